"""Arrays, streams, graphs and errors of the CUDA backend; what needs a GPU is marked so."""

from __future__ import annotations

import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import _core
from gradwire.arrays import cuda_core, cuda_problem, device_of, stream_of
from gradwire.cuda import _policy_words

from .cuda_arrays import (
    as_tensor,
    is_emulated,
    on_device,
    pair,
    residual_of,
    step_both,
    torch,
    update_of,
)

NUMEL = 60_000


def update(seed: int = 1, density: float = 0.02) -> Any:
    return update_of(NUMEL, "float32", density, seed)


def expected_bytes(seed: int = 1) -> bytes:
    return bytes(gw.Encoder(NUMEL, threshold=1.0).encode(update(seed)))


# --- without a GPU ----------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_reason_is_named() -> None:
    if not cuda_problem():
        pytest.skip("the CUDA backend is usable here")
    with pytest.raises(gw.BackendUnavailable, match='use device="cpu"'):
        gw.Encoder(4, device="cuda")
    assert "cuda" not in gw.backends()


@pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "tpu", "", 5])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="device must be"):
        gw.Encoder(4, device=device)


def test_streams_are_taken_in_every_form() -> None:
    class Torch:
        cuda_stream = 70

    class CuPy:
        ptr = 71

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 72)

    streams = [stream_of(one, None, 0) for one in (69, Torch(), CuPy(), Protocol(), None)]
    assert streams == [69, 70, 71, 72, 0]
    for wrong in (True, "7", object()):
        with pytest.raises(TypeError, match="stream must be"):
            stream_of(wrong, None, 0)


@pytest.mark.parametrize(
    ("policy", "rule", "fields"),
    [
        (gw.FixedThreshold(0.5), 0, {"reach": 1.0, "minimum": 0.5}),
        (
            gw.AdaptiveThreshold(0.5, 0.01, 0.1, decay=0.75, minimum=0.25),
            1,
            {"reach": 1.0, "minimum": 0.25, "density_min": 0.01, "density_max": 0.1, "decay": 0.75},
        ),
        (
            gw.StepThreshold(0.5, minimum=0.25, step=0.125, trigger=0.01, delay=7),
            2,
            {"reach": 1.0, "minimum": 0.25, "step": 0.125, "trigger": 0.01, "delay": 7},
        ),
        (
            gw.TargetDensity(0.01, 0.5, minimum=0.25),
            3,
            {"reach": 0.5625, "minimum": 0.25, "density": 0.01},
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_policy_is_passed_to_the_device_as_numbers(policy: Any, rule: int, fields: Any) -> None:
    assert _policy_words(policy, None, None) == {"rule": rule, **fields}
    both = _policy_words(policy, gw.ShakeUp(every=10, divisor=2.0), gw.ResidualClip(3.0, every=4))
    schedules = {"shakeup_every": 10, "shakeup_divisor": 2.0, "clip_every": 4, "clip_limit": 3.0}
    assert both == {"rule": rule, **fields, **schedules}


def test_a_policy_of_the_caller_s_own_is_refused_on_a_device() -> None:
    with pytest.raises(ValueError, match="one of gradwire's"):
        _policy_words(object(), None, None)  # type: ignore[arg-type]


def test_arrays_on_the_cpu_have_no_cuda_device() -> None:
    array = np.zeros(3, np.float32)
    assert (
        device_of(array) == device_of([array]) == device_of([]) == device_of(memoryview(b"")) == -1
    )


# --- arrays -----------------------------------------------------------------------------------------------------------


class InterfaceOnly:
    """An array that has nothing but the CUDA array interface, version 3, with its stream."""

    def __init__(self, tensor: Any, stream: int | None, **changes: Any) -> None:
        self.keeps = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
            "stream": stream,
            **changes,
        }


@pytest.mark.cuda
def test_cupy_jax_and_plain_interfaces_are_taken_without_a_copy() -> None:
    tensor = on_device(update())
    arrays = [tensor, InterfaceOnly(tensor, None), InterfaceOnly(tensor, 1)]
    if importlib.util.find_spec("cupy"):
        import cupy

        arrays.append(cupy.from_dlpack(tensor))
    for array in arrays:
        encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
        assert bytes(encoder.encode(array)) == expected_bytes()


@pytest.mark.cuda
def test_work_waits_for_the_stream_that_an_array_names() -> None:
    producer, consumer = torch().cuda.Stream(), torch().cuda.Stream()
    tensor = torch().zeros(NUMEL, device="cuda")
    source = update().cuda()
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")  # waits for the device
    torch().cuda.synchronize()
    with torch().cuda.stream(producer):
        torch().cuda._sleep(200_000_000)
        tensor.copy_(source)
    message = encoder.encode(InterfaceOnly(tensor, producer.cuda_stream), stream=consumer)
    assert bytes(message) == expected_bytes()


@pytest.mark.cuda
def test_unsuitable_arrays_are_refused_by_name() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    good = on_device(update())
    wide = torch().zeros(2 * NUMEL, device="cuda")
    with pytest.raises(ValueError, match="not on a CUDA device"):
        encoder.encode(np.zeros(NUMEL, np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        encoder.encode(wide[::2])
    with pytest.raises(ValueError, match="contiguous"):
        encoder.encode(InterfaceOnly(good, None, strides=(8,)))
    with pytest.raises(TypeError, match="float64"):
        encoder.encode(good.double())
    with pytest.raises(TypeError, match="dtype"):
        encoder.encode(good.int())
    with pytest.raises(ValueError, match="must have 60000"):
        encoder.encode(good[:-1])
    with pytest.raises(ValueError, match="residual"):
        encoder.encode(as_tensor(encoder.residual))
    with pytest.raises(ValueError, match="on a CUDA device"):
        gw.Encoder(NUMEL).encode(good)
    tiny = [good[i : i + 1] for i in range(2000)] + [good[2000:]]
    with pytest.raises(ValueError, match="concatenate"):
        encoder.encode(tiny)
    assert bytes(encoder.encode(good)) == expected_bytes()


@pytest.mark.cuda
def test_the_residual_is_shared_memory_for_torch_and_cupy() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    as_tensor(encoder.residual)[7] = 1.5
    assert torch().from_dlpack(encoder.residual)[7].item() == 1.5
    if importlib.util.find_spec("cupy"):
        import cupy

        assert float(cupy.from_dlpack(encoder.residual)[7]) == 1.5
    assert gw.decode(encoder.encode())[7] == 1.0
    assert encoder.state_dict()["residual"][7] == 0.5


# --- memory of the caller's -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_a_message_in_the_caller_s_memory_has_its_length_in_the_header() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    out = torch().full((encoder.message_bytes_max + 64,), 0xA5, dtype=torch().uint8, device="cuda")
    message = encoder.encode(on_device(update()), out=out)
    expected = expected_bytes()
    held = out.cpu().numpy()
    length = 48 + int(held[40:48].view(np.uint64)[0])
    assert held[:length].tobytes() == expected == bytes(message)
    assert (held[encoder.message_bytes_max :] == 0xA5).all()
    target = torch().zeros(NUMEL, device="cuda")
    gw.apply(gw.cuda_message(out), target)
    np.testing.assert_array_equal(target.cpu().numpy(), gw.decode(gw.Message.parse(expected)))


@pytest.mark.cuda
def test_memory_for_a_message_must_fit() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    enough = torch().zeros(encoder.message_bytes_max + 16, dtype=torch().uint8, device="cuda")
    with pytest.raises(ValueError, match="must have at least"):
        encoder.encode(out=enough[: encoder.message_bytes_max - 16])
    with pytest.raises(ValueError, match="multiple of 16"):
        encoder.encode(out=enough[1:])
    with pytest.raises(TypeError, match="uint8"):
        encoder.encode(out=enough.float())
    with pytest.raises(ValueError, match="uint8 on a CUDA device"):
        encoder.encode(out=np.zeros(1 << 20, np.uint8))
    assert encoder.step == 0


@pytest.mark.cuda
def test_messages_keep_their_bytes_while_later_ones_are_encoded() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    cpu = gw.Encoder(NUMEL, threshold=1.0)
    messages = [encoder.encode(on_device(update(seed))) for seed in range(6)]
    expected = [bytes(cpu.encode(update(seed))) for seed in range(6)]
    assert [bytes(message) for message in messages] == expected
    del messages[::2]
    more = encoder.encode(on_device(update(7)))  # in memory that went back to the pool
    assert bytes(more) == bytes(cpu.encode(update(7)))
    assert [bytes(message) for message in messages] == expected[1::2]


# --- apply ------------------------------------------------------------------------------------------------------------


def messages_for(numel: int) -> list[gw.Message]:
    densities = (1e-3, 0.3, 0.05, 0.9, 1e-4, 0.6)
    return [
        gw.Encoder(numel, threshold=0.3 + 0.01 * i).encode(update_of(numel, "float32", density, i))
        for i, density in enumerate(densities)
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("numel", [0, 1, 100, 4097, 1 << 20])
def test_messages_of_the_cpu_are_applied_bit_for_bit_in_the_order_of_the_list(
    numel: int, dtype: str
) -> None:
    messages = messages_for(numel)
    if numel:
        messages.insert(2, gw.dense_message(np.linspace(-1, 1, numel), bfloat16=True))
    start = np.random.default_rng(numel).normal(size=numel).astype(dtype)
    expected = start.copy()
    gw.apply_many(messages, expected, 0.7)
    target = torch().from_numpy(start).cuda()
    gw.apply_many(messages, target, 0.7)
    np.testing.assert_array_equal(target.cpu().numpy(), expected)
    target = torch().from_numpy(start).cuda()
    for message in messages:
        gw.apply(message, target, 0.7)
    np.testing.assert_array_equal(target.cpu().numpy(), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_has_moved_in_half_precision_is_added_with_the_bits_of_the_cpu(dtype: str) -> None:
    rng = np.random.default_rng(3)
    sizes = [5000, 0, 1, *[7] * 150]  # more arrays than a launch takes
    copies = [rng.normal(size=size).astype(np.float32) for size in sizes]
    moved = [(copy + 1e-3 * rng.normal(size=copy.shape)).astype(np.float32) for copy in copies]
    halves = [torch().from_numpy(values).to(getattr(torch(), dtype)) for values in moved]
    there = [torch().from_numpy(copy).cuda() for copy in copies], [half.cuda() for half in halves]
    cuda_core().add_moved(*there, 0, stream_of(None, there[0], 0))
    _core.add_moved(copies, halves, 1)
    for copy, result in zip(copies, there[0], strict=True):
        np.testing.assert_array_equal(result.cpu().numpy().view(np.int32), copy.view(np.int32))
    with pytest.raises(TypeError, match="params float16 or bfloat16"):
        cuda_core().add_moved(there[0], there[0], 0, 0)


@pytest.mark.cuda
def test_a_tensor_that_requires_grad_is_refused_wherever_it_stands() -> None:
    if is_emulated():
        pytest.skip("tensors of the emulated device have no gradients")
    targets = [torch().zeros(3, device="cuda") for _ in range(3)]
    message = gw.Encoder(9, threshold=1.0).encode(np.ones(9, np.float32))
    for index in range(3):
        refused = [target.clone() for target in targets]
        refused[index].requires_grad_()
        with pytest.raises(ValueError, match="requires grad"):
            gw.apply(message, refused)


@pytest.mark.cuda
def test_a_target_of_many_arrays_and_more_messages_than_one_launch_takes() -> None:
    numel = 50_000
    messages = messages_for(numel) * 12
    expected = np.zeros(numel, np.float32)
    gw.apply_many(messages, expected)
    cuts = [0, 1, 5000, 5003, 20_000, 49_999, numel]
    parts = [torch().zeros(b - a, device="cuda") for a, b in itertools.pairwise(cuts)]
    gw.apply_many(messages, parts)
    np.testing.assert_array_equal(torch().cat(parts).cpu().numpy(), expected)


@pytest.mark.cuda
def test_a_message_on_the_device_is_applied_there_and_on_the_cpu() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    message = encoder.encode(on_device(update()))
    target = torch().zeros(NUMEL, device="cuda")
    gw.apply(message, target, 2.0)
    on_cpu = np.zeros(NUMEL, np.float32)
    gw.apply(message, on_cpu, 2.0)
    np.testing.assert_array_equal(target.cpu().numpy(), on_cpu)
    assert on_cpu.any()
    assert bytes(gw.Message.parse(message)) == expected_bytes()


@pytest.mark.cuda
def test_threads_that_read_a_message_in_the_caller_s_memory_have_one_copy_of_it() -> None:
    host = gw.dense_message(np.ones(5_000_000, np.float32))
    memory = on_device(torch().from_numpy(np.frombuffer(host, np.uint8).copy()))
    torch().cuda.synchronize()
    for _ in range(3):
        message = gw.cuda_message(memory)
        views = list(ThreadPoolExecutor(2).map(memoryview, [message] * 2))
        addresses = {np.frombuffer(view, np.uint8).ctypes.data for view in views}
        assert len(addresses) == 1  # the memory of any other is freed already


@pytest.mark.cuda
def test_host_bytes_may_change_once_apply_returns() -> None:
    data = bytearray(expected_bytes())
    target = torch().zeros(NUMEL, device="cuda")
    gw.apply(gw.Message.parse(data), target)
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(
        target.cpu().numpy(), gw.decode(gw.Message.parse(expected_bytes()))
    )


@pytest.mark.cuda
def test_a_corrupt_message_changes_no_element_of_any_target() -> None:
    good = gw.Encoder(NUMEL, threshold=1.0).encode(update(density=0.2))
    rng = np.random.default_rng(3)
    for position in (
        5,
        8,
        24,
        32,
        40,
        48,
        60,
        len(bytes(good)) - 1,
        *rng.integers(48, good.nbytes, 20),
    ):
        damaged = np.frombuffer(bytes(good), np.uint8).copy()
        damaged[position] ^= 1 << rng.integers(8)
        bad = gw.cuda_message(torch().from_numpy(damaged).cuda())
        held = gw.cuda_message(
            torch().from_numpy(np.frombuffer(bytes(good), np.uint8).copy()).cuda()
        )
        target = torch().zeros(NUMEL, device="cuda")
        gw.apply_many([held, bad], target)
        assert not target.any()
        with pytest.raises(gw.MessageError):
            bad.check()
        held.check()


def golden(folder: str) -> list[tuple[str, bytes, int]]:
    """Return name, bytes and numel of the golden messages that are small enough to have a target."""
    found = []
    for path in sorted((Path(__file__).parent / "golden" / folder).glob("*.bin")):
        data = path.read_bytes()
        numel = int.from_bytes(data[24:32], "little")
        if len(data) >= 48 and numel <= 1 << 22:
            found.append((path.stem, data, numel))
    return found


@pytest.mark.cuda
def test_valid_golden_messages_are_applied_and_invalid_ones_refused() -> None:
    valid, invalid = golden("valid"), golden("invalid")
    assert len(valid) >= 25
    assert len(invalid) >= 35
    for name, data, numel in valid:
        held = torch().from_numpy(np.frombuffer(data, np.uint8).copy()).cuda()
        expected, target = np.zeros(numel, np.float32), torch().zeros(numel, device="cuda")
        gw.apply(gw.Message.parse(data), expected)
        gw.apply(gw.cuda_message(held), target)
        np.testing.assert_array_equal(target.cpu().numpy(), expected, err_msg=name)
    for name, data, numel in invalid:
        if name == "trailing-byte":  # memory on a device may be longer than its message
            continue
        message = gw.cuda_message(torch().from_numpy(np.frombuffer(data, np.uint8).copy()).cuda())
        target = torch().zeros(numel, device="cuda")
        gw.apply(message, target)
        assert not target.any(), name
        with pytest.raises(gw.MessageError):
            message.check()


@pytest.mark.cuda
def test_a_message_of_a_part_is_added_to_a_sequence_of_arrays() -> None:
    numel = 150_000
    partition = gw.Partition(numel, 3, first=1)
    messages = gw.Encoder(numel, threshold=0.5).encode(
        update_of(numel, "float32", 0.4, 1), parts=partition
    )
    cuts = sorted({0, numel, *range(7, numel, 911)})
    expected = np.zeros(numel, np.float32)
    targets = [torch().zeros(b - a, device="cuda") for a, b in itertools.pairwise(cuts)]
    for part, message in zip(partition, messages, strict=True):
        gw.apply(message, expected, part=part)
        gw.apply(message, targets, part=part)
    np.testing.assert_array_equal(np.concatenate([t.cpu().numpy() for t in targets]), expected)
    with pytest.raises(gw.MessageError, match=f"part {partition[0].numel}"):
        gw.apply(messages[1], targets, part=partition[0])
    with pytest.raises(ValueError, match="target has"):
        gw.apply(messages[0], targets[:1], part=partition[0])
    with pytest.raises(ValueError, match=f"target or part {numel}"):
        gw.apply(messages[0], targets)  # a message of a part, but no part is named


@pytest.mark.cuda
def test_a_message_for_another_target_is_refused() -> None:
    message = gw.Encoder(NUMEL, threshold=1.0, device="cuda").encode(on_device(update()))
    target = torch().zeros(NUMEL - 1, device="cuda")
    gw.apply(message, target)
    assert not target.any()
    with pytest.raises(gw.MessageError, match="numel"):
        message.check()
    with pytest.raises(TypeError, match="float32 or float64"):
        gw.apply(message, torch().zeros(NUMEL, device="cuda", dtype=torch().bfloat16))
    with pytest.raises(ValueError, match="overlap"):
        gw.apply(message, [target, target])


# --- streams and graphs -----------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_encode_and_apply_return_before_the_device_is_done() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    tensor, target = on_device(update()), torch().zeros(NUMEL, device="cuda")
    out = torch().empty(encoder.message_bytes_max, dtype=torch().uint8, device="cuda")
    encoder.encode(tensor, out=out).check()  # the first call allocates
    gw.apply(encoder.encode(tensor), target)
    torch().cuda.synchronize()
    torch().cuda._sleep(2_000_000_000)  # a second
    message = encoder.encode(tensor, out=out)
    other = encoder.encode(tensor)
    gw.apply_many([message, other], target)
    assert not torch().cuda.current_stream().query()
    message.check()  # this waits
    assert bytes(message) == bytes(gw.Message.parse(message))


@pytest.mark.cuda
def test_two_encoders_on_two_streams_do_not_disturb_each_other() -> None:
    streams = [torch().cuda.Stream() for _ in range(2)]
    tensors = [[on_device(update(10 * i + s)) for s in range(8)] for i in range(2)]
    torch().cuda.synchronize()
    encoders = [gw.Encoder(NUMEL, threshold=1.0, device="cuda") for _ in range(2)]
    messages: list[list[Any]] = [[], []]
    for step in range(8):
        for i in range(2):
            messages[i].append(encoders[i].encode(tensors[i][step], stream=streams[i]))
    for i in range(2):
        cpu = gw.Encoder(NUMEL, threshold=1.0)
        for step in range(8):
            assert bytes(messages[i][step]) == bytes(cpu.encode(update(10 * i + step)))


@pytest.mark.cuda
def test_reading_an_encoder_waits_for_work_on_any_stream() -> None:
    cpu, encoder = pair(NUMEL, threshold=1.0)
    tensor = on_device(update())
    torch().cuda.synchronize()
    cpu.encode(update())
    for ask in (
        lambda: encoder.step == 1,
        lambda: (residual_of(encoder) == residual_of(cpu)).all(),
    ):
        with torch().cuda.stream(torch().cuda.Stream()):
            torch().cuda._sleep(200_000_000)
            encoder.encode(tensor)
        assert ask()
        encoder.load_state_dict(gw.Encoder(NUMEL, threshold=1.0).state_dict())


@pytest.mark.cuda
def test_a_message_of_one_stream_is_applied_on_another() -> None:
    first, second = torch().cuda.Stream(), torch().cuda.Stream()
    tensor, target = on_device(update()), torch().zeros(NUMEL, device="cuda")
    torch().cuda.synchronize()
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    with torch().cuda.stream(first):
        torch().cuda._sleep(200_000_000)
        message = encoder.encode(tensor)
    with torch().cuda.stream(second):
        gw.apply(message, target)
    torch().cuda.synchronize()
    np.testing.assert_array_equal(
        target.cpu().numpy(), gw.decode(gw.Message.parse(expected_bytes()))
    )


@pytest.mark.cuda
@pytest.mark.parametrize("policy", [0.5, gw.AdaptiveThreshold(initial=0.5), gw.TargetDensity(0.01)])
def test_steps_captured_in_a_graph_follow_each_other(policy: Any) -> None:
    steps, replays = 4, 3
    arguments = {"threshold": policy, "shakeup": gw.ShakeUp(every=5)}
    cpu, cuda = pair(NUMEL, **arguments)
    tensors = [on_device(update(seed, 0.05)) for seed in range(steps)]
    sent = torch().zeros(NUMEL, device="cuda")
    outs = [
        torch().empty(cuda.message_bytes_max, dtype=torch().uint8, device="cuda") for _ in tensors
    ]

    def run() -> None:
        for tensor, out in zip(tensors, outs, strict=True):
            gw.apply(cuda.encode(tensor, out=out), sent)

    side = torch().cuda.Stream()
    with torch().cuda.stream(side):
        run()  # what the first call allocates must be there before the capture
    torch().cuda.synchronize()
    cuda.load_state_dict(gw.Encoder(NUMEL, **arguments).state_dict())
    sent.zero_()
    graph = torch().cuda.CUDAGraph()
    with torch().cuda.graph(graph):
        run()
    expected = np.zeros(NUMEL, np.float32)
    for _ in range(replays):
        graph.replay()
        torch().cuda.synchronize()
        for seed, out in enumerate(outs):
            message = cpu.encode(update(seed, 0.05))
            assert out[: message.nbytes].cpu().numpy().tobytes() == bytes(message)
            gw.apply(message, expected)
    np.testing.assert_array_equal(sent.cpu().numpy(), expected)
    np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))
    assert cuda.step == cpu.step == steps * replays


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_an_error_names_file_line_and_call_and_is_cleared() -> None:
    with pytest.raises(
        gw.CudaError, match=r"memory\.cpp:\d+: cudaMalloc.*: cudaErrorMemoryAllocation"
    ):
        gw.Encoder(1 << 44, device="cuda")
    with pytest.raises(gw.CudaError, match="cudaErrorInvalidDevice"):
        gw.Encoder(4, device="cuda:99")
    assert torch().zeros(3, device="cuda").sum().item() == 0.0
    assert (
        bytes(gw.Encoder(NUMEL, threshold=1.0, device="cuda").encode(on_device(update())))
        == expected_bytes()
    )


@pytest.mark.cuda
def test_freed_memory_is_not_read_by_pending_work() -> None:
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    messages = []
    for seed in range(20):
        tensor = on_device(update(seed))
        messages.append(encoder.encode(tensor))
        del tensor
        torch().full((NUMEL,), float("nan"), device="cuda")  # takes the memory that went back
    cpu = gw.Encoder(NUMEL, threshold=1.0)
    assert [bytes(m) for m in messages] == [bytes(cpu.encode(update(seed))) for seed in range(20)]


@pytest.mark.cuda
def test_an_encoder_works_on_after_a_refused_update() -> None:
    both = pair(NUMEL, threshold=1.0)
    step_both(both, update())
    with pytest.raises(ValueError, match="must have"):
        both[1].encode(torch().zeros(3, device="cuda"))
    step_both(both, update(2))
