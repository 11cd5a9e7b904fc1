"""Tests for the emulated device only: how often the host waits, several devices, and the checks of the device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.arrays import cuda_core

from ..cuda_arrays import is_emulated, on_device, torch, update_of
from ..other_threads import lets_others_run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not is_emulated(), reason="for the device of tests/emulated_cuda"),
]

NUMEL = 30_000


def update(seed: int) -> Any:
    return update_of(NUMEL, "float32", 0.02, seed)


def runtime() -> Any:
    from . import device

    return device.RUNTIME


@pytest.mark.parametrize("policy", [0.5, gw.AdaptiveThreshold(initial=0.5), gw.TargetDensity(0.01)])
def test_steps_on_the_device_never_have_the_host_wait(policy: Any) -> None:
    encoder = gw.Encoder(NUMEL, threshold=policy, shakeup=gw.ShakeUp(every=3), device="cuda")
    target = torch().zeros(NUMEL, device="cuda")
    out = torch().empty(encoder.message_bytes_max, dtype=torch().uint8, device="cuda")
    tensors = [on_device(update(seed)) for seed in range(8)]
    before = runtime().waits()
    messages = []
    for tensor in tensors:
        gw.apply(encoder.encode(tensor, out=out), target)
        messages.append(encoder.encode(tensor))
        gw.apply_many(messages, target)
    assert runtime().waits() == before
    messages[0].check()
    assert runtime().waits() == before + 1


class OnDevice:
    """Float32 or bytes on one of the devices, with nothing but the CUDA array interface."""

    def __init__(self, number: int, values: Any) -> None:
        runtime().call("cudaSetDevice", number)
        address = runtime().make("cudaMalloc", ctypes.c_size_t(values.nbytes))
        runtime().call("cudaSetDevice", 0)
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }
        self.memory = np.frombuffer(
            (ctypes.c_uint8 * values.nbytes).from_address(address), values.dtype
        )
        self.memory[:] = values


def test_the_device_of_the_arrays_decides() -> None:
    first, second = (OnDevice(number, update(1).numpy()) for number in range(2))
    expected = gw.Encoder(NUMEL, threshold=1.0).encode(update(1))
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda:1")
    with pytest.raises(
        ValueError, match=r"update is on cuda:0, but this encoder or target is on cuda:1"
    ):
        encoder.encode(first)
    message = encoder.encode(second)
    assert bytes(message) == bytes(expected)
    targets = [OnDevice(number, np.zeros(NUMEL, np.float32)) for number in range(2)]
    with pytest.raises(ValueError, match="a message is on cuda:1, but the target is on cuda:0"):
        gw.apply(message, targets[0])
    with pytest.raises(ValueError, match="out is on cuda:0, but this encoder is on cuda:1"):
        encoder.encode(second, out=OnDevice(0, np.zeros(encoder.message_bytes_max, np.uint8)))
    gw.apply(message, targets[1])
    gw.apply(expected, targets[0])
    torch().cuda.synchronize()
    for target in targets:
        np.testing.assert_array_equal(target.memory, gw.decode(expected))
    assert encoder.step == 1


class OfTorch(OnDevice):
    """Lends its memory as torch does: only where its device is the current one."""

    def __init__(self, number: int, values: Any) -> None:
        super().__init__(number, values)
        self._number = number

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number

    def __dlpack__(self, **_: Any) -> Any:
        current = ctypes.c_int()
        runtime().call("cudaGetDevice", ctypes.byref(current))
        if current.value != self._number:
            raise BufferError("Can't export tensors on a different CUDA device index")
        return torch().from_numpy(self.memory).__dlpack__()


def test_arrays_of_torch_may_be_on_another_device_than_the_current_one() -> None:
    expected = gw.Encoder(NUMEL, threshold=1.0).encode(update(1))
    message = gw.Encoder(NUMEL, threshold=1.0, device="cuda:1").encode(
        OfTorch(1, update(1).numpy())
    )
    assert bytes(message) == bytes(expected)
    target = OfTorch(1, np.zeros(NUMEL, np.float32))
    gw.apply(message, target)
    message.check()
    np.testing.assert_array_equal(target.memory, gw.decode(expected))


def test_an_encode_on_the_caller_s_memory_gives_the_same_bytes() -> None:
    """The call of `gradwire.torch`'s operator, whose own tests need torch on a GPU."""
    cpu = gw.Encoder(NUMEL, threshold=1.0, key=5)
    residual = torch().zeros(NUMEL, device="cuda")
    out = torch().empty(
        gw.Encoder(NUMEL, device="cuda").message_bytes_max, dtype=torch().uint8, device="cuda"
    )
    for step in range(3):
        tensor = on_device(update(step))
        cuda_core().encode_into(residual, tensor, 1.0, 5, step, out, 0)
        expected = cpu.encode(update(step))
        assert out[: expected.nbytes].cpu().numpy().tobytes() == bytes(expected)
    np.testing.assert_array_equal(residual.cpu().numpy(), cpu.residual)


def test_other_threads_run_while_an_encoder_s_memory_is_made() -> None:
    assert lets_others_run(lambda: gw.Encoder(2**24, device="cuda"))


def test_work_does_not_run_before_the_host_waits() -> None:
    tensor = torch().zeros(4, device="cuda")
    torch().cuda.synchronize()
    stream = torch().cuda.Stream()
    with torch().cuda.stream(stream):
        torch().cuda._sleep(1)
        tensor.fill_(3.0)
        assert not torch().cuda.current_stream().query()
    stream.synchronize()
    assert tensor.tolist() == [3.0] * 4


def test_calls_that_would_break_a_capture_fail_in_it() -> None:
    graph = torch().cuda.CUDAGraph()
    with (
        torch().cuda.graph(graph),
        pytest.raises(gw.CudaError, match="cudaErrorStreamCaptureUnsupported"),
    ):
        gw.Encoder(NUMEL, device="cuda")
