"""The encoder on a GPU: the CPU's bytes and residual, over sizes, dtypes, densities and alignments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw

from .cuda_arrays import (
    DTYPES,
    as_tensor,
    is_emulated,
    on_device,
    pair,
    residual_of,
    step_both,
    torch,
    update_of,
)

pytestmark = pytest.mark.cuda

SIZES = (0, 1, 63, 64, 65, 2047, 2048, 2049, 16383, 16384, 16385, 70001, 1 << 20)
DENSITIES = (0.0, 1e-3, 0.02, 0.2, 0.45, 0.66, 0.9, 1.0)
POLICIES: dict[str, Any] = {
    "fixed": gw.FixedThreshold(0.75),
    "adaptive": gw.AdaptiveThreshold(initial=0.5, density_min=0.01, density_max=0.1),
    "step": gw.StepThreshold(initial=1.0, minimum=0.25, step=0.125, trigger=0.05, delay=2),
    "target": gw.TargetDensity(0.01, initial=0.5),
    "learned": gw.TargetDensity(0.01),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size_and_density_gives_the_bytes_of_the_cpu(numel: int, dtype: str) -> None:
    residual = "float64" if dtype == "float64" else "float32"
    for seed, density in enumerate(DENSITIES):
        both = pair(numel, threshold=1.0, dtype=residual, key=3)
        for step in range(2):
            step_both(both, update_of(numel, dtype, density, 10 * seed + step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float64_residual_takes_every_dtype(dtype: str) -> None:
    both = pair(50021, threshold=1.0, dtype="float64")
    for density in DENSITIES:
        step_both(both, update_of(50021, dtype, density, 5))


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_alignment_gives_the_same_bytes(dtype: str, offset: int) -> None:
    update = update_of(40000, dtype, 0.05, offset)
    cpu, cuda = pair(40000, threshold=1.0)
    assert bytes(cuda.encode(on_device(update, offset))) == bytes(cpu.encode(update))
    np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_follow_the_policy_as_on_the_cpu(policy: str) -> None:
    arguments = {
        "threshold": POLICIES[policy],
        "shakeup": gw.ShakeUp(every=4, divisor=3.0),
        "clip": gw.ResidualClip(limit=1.0, every=3),
    }
    cpu, cuda = pair(100_003, **arguments)
    rng = np.random.default_rng(8)
    for _ in range(12):
        update = torch().from_numpy(rng.normal(0, 0.3, 100_003).astype(np.float32))
        update[::500] *= 20.0  # beyond what a step sends, so that there is something to clip
        expected, message = step_both((cpu, cuda), update)
        assert message.threshold == expected.threshold
        assert message.is_shakeup == expected.is_shakeup
        assert cuda.threshold == pytest.approx(cpu.threshold, rel=1e-14)
    assert cuda.step == cpu.step == 12
    ours, theirs = cuda.stats, cpu.stats
    assert ours.clipped_count == theirs.clipped_count > 0
    assert ours.clipped_sum == pytest.approx(theirs.clipped_sum, rel=1e-9, abs=1e-9)
    assert (ours.messages, ours.message_bytes, ours.sent_count) == (
        theirs.messages,
        theirs.message_bytes,
        theirs.sent_count,
    )


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_density_holds_back_is_as_on_the_cpu(dtype: str, parts: int | None) -> None:
    numel, policy = 40_011, gw.TargetDensity(0.01)
    both = pair(numel, threshold=policy, dtype=dtype, shakeup=gw.ShakeUp(every=9))
    rng = np.random.default_rng(12)
    limited = 0
    for step in range(18):
        update = rng.normal(0, 1000.0 if step > 11 else 1.0, numel).astype(np.float32)
        if step in (3, 4):
            update = np.sign(update)  # equal magnitudes everywhere
        cpu, cuda = (
            [message] if parts is None else message
            for message in (
                both[0].encode(update, parts=parts),
                both[1].encode(on_device(torch().from_numpy(update)), parts=parts),
            )
        )
        assert list(map(bytes, cuda)) == list(map(bytes, cpu))
        np.testing.assert_array_equal(residual_of(both[1]), residual_of(both[0]))
        assert both[1].threshold == pytest.approx(both[0].threshold, rel=1e-14)
        limited += sum(message.count for message in cpu) == policy.most_changed(numel)
    assert limited >= 2


def test_a_sequence_of_tensors_is_one_update() -> None:
    rng = np.random.default_rng(2)
    for dtypes in (["float32"], ["bfloat16", "float32", "float16"]):
        numels = [int(n) for n in rng.integers(1, 9000, 60)] + [0, 16384, 1]
        parts = [update_of(n, dtypes[i % len(dtypes)], 0.02, i) for i, n in enumerate(numels)]
        cpu, cuda = pair(sum(numels), threshold=1.0)
        assert bytes(cuda.encode([on_device(p) for p in parts])) == bytes(cpu.encode(parts))
        np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))


def test_more_tensors_than_one_launch_takes_are_one_update_too() -> None:
    parts = [update_of(300, "float32", 0.02, i) for i in range(700)]
    cpu, cuda = pair(300 * 700, threshold=1.0)
    assert bytes(cuda.encode([on_device(p) for p in parts])) == bytes(cpu.encode(parts))


def test_values_that_the_caller_accumulates_in_the_residual_are_sent() -> None:
    for numel in (100, 2048, 1 << 20):
        cpu, cuda = pair(numel, threshold=1.0)
        update = update_of(numel, "float32", 0.01, numel)
        cpu.residual[...] += update.numpy()
        as_tensor(cuda.residual).add_(update.cuda())
        step_both((cpu, cuda), None)


def test_a_region_of_every_density_gives_the_bytes_of_the_cpu() -> None:
    numel = 1 << 22
    rng = np.random.default_rng(4)
    density = 10.0 ** rng.uniform(-6, 0, 64)
    changed = rng.random(numel) < np.repeat(density, numel // 64)
    update = torch().from_numpy(
        np.where(changed, rng.choice([-1.0, 1.0], numel), 0).astype(np.float32)
    )
    step_both(pair(numel, threshold=1.0), update)


@pytest.mark.skipif(is_emulated(), reason="the emulated device has not that much memory")
def test_very_few_changes_in_very_many_elements_are_found() -> None:
    numel = (1 << 32) + 12345
    positions = np.array([0, 63, 64, 1 << 31, (1 << 32) - 1, 1 << 32, numel - 1])
    encoder = gw.Encoder(numel, threshold=1.0, device="cuda")
    as_tensor(encoder.residual)[torch().from_numpy(positions).cuda()] = -1.0
    message = gw.Message.parse(encoder.encode())
    found, negative = message.entries()
    np.testing.assert_array_equal(found, positions)
    assert negative.all()


def test_nothing_is_lost_over_many_steps() -> None:
    numel = 200_000
    encoder = gw.Encoder(numel, threshold=0.5, device="cuda", shakeup=gw.ShakeUp(every=3))
    put_in = np.zeros(numel)
    sent = np.zeros(numel)
    for step in range(10):
        update = update_of(numel, "float32", 0.1, step)
        put_in += update.numpy()
        sent += gw.decode(encoder.encode(update.cuda()))
    np.testing.assert_array_equal(sent + encoder.state_dict()["residual"], put_in)
    sent += gw.decode(encoder.flush())
    np.testing.assert_array_equal(sent, put_in)
    assert not encoder.state_dict()["residual"].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dense", [True, "bfloat16"])
def test_a_dense_message_is_the_cpu_s(dense: Any, dtype: str) -> None:
    for numel in (0, 1, 5000):
        cpu, cuda = pair(numel, threshold=1.0, dtype=dtype)
        values = torch().from_numpy(
            np.random.default_rng(numel).normal(size=numel).astype(np.float32)
        )
        expected = cpu.encode(values, dense=dense)
        assert bytes(cuda.encode(values.cuda(), dense=dense)) == bytes(expected)
        np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("numel", "parts", "first"),
    [(0, 3, 1), (100, 1, 0), (100, 3, 2), (2049, 2, 0), (70001, 5, 3), (70001, 33, 32)],
)
def test_the_messages_of_parts_are_the_cpu_s(
    numel: int, parts: int, first: int, dtype: str
) -> None:
    partition = gw.Partition(numel, parts, first=first)
    cpu, cuda = pair(numel, threshold=gw.TargetDensity(0.05), dtype=dtype, key=3)
    for step, density in enumerate([0.3, 0.0, 0.02, 0.9]):
        update = update_of(numel, "float32", density, step)
        dense = "bfloat16" if step == 2 else False
        expected = cpu.encode(update, parts=partition, dense=dense)
        messages = cuda.encode(on_device(update), parts=partition, dense=dense)
        assert [bytes(one) for one in messages] == [bytes(one) for one in expected]
        np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))
        targets = np.ones((2, numel), dtype)
        on_cuda = on_device(torch().from_numpy(targets[1]))
        for part, ours, theirs in zip(partition, messages, expected, strict=True):
            gw.apply_many([theirs, theirs], targets[0], scale=-0.7, part=part)
            gw.apply_many([ours, theirs], on_cuda, scale=-0.7, part=part)
        np.testing.assert_array_equal(on_cuda.cpu().numpy(), targets[0])
        step_both((cpu, cuda), update_of(numel, "float32", 0.1, step))  # parts and no parts in turn
    flushed = [bytes(one) for one in cuda.flush(parts=parts)]
    assert flushed == [bytes(one) for one in cpu.flush(parts=parts)]
    ours, theirs = cuda.stats, cpu.stats
    assert ours == theirs
    assert ours.messages == 4 * parts + 4 + parts


def test_parts_of_blocks_as_large_as_tiles_are_the_cpu_s() -> None:
    numel = 2 * 256 * 4096 + 77
    for parts in (2, 1):
        partition = gw.Partition(numel, parts)
        assert partition.block == 4096
        cpu, cuda = pair(numel, threshold=1.0)
        update = update_of(numel, "float32", 0.01, parts)
        expected = cpu.encode(update, parts=partition)
        messages = cuda.encode(on_device(update), parts=partition)
        assert [bytes(one) for one in messages] == [bytes(one) for one in expected]


def test_parts_are_written_to_the_caller_s_memory() -> None:
    cpu, cuda = pair(5000, threshold=1.0)
    update = update_of(5000, "float32", 0.1, 1)
    partition = gw.Partition(5000, 3)
    sizes = [-(-gw.max_message_bytes(size) // 16) * 16 for size in partition.sizes]
    outs = [torch().empty(size, dtype=torch().uint8, device="cuda") for size in sizes]
    messages = cuda.encode(on_device(update), parts=partition, out=outs)
    expected = cpu.encode(update, parts=partition)
    assert [bytes(one) for one in messages] == [bytes(one) for one in expected]
    assert bytes(gw.cuda_message(outs[2])) == bytes(expected[2])
    with pytest.raises(ValueError, match="2 arrays for 3 parts"):
        cuda.encode(parts=partition, out=outs[:2])
    with pytest.raises(ValueError, match="partition has 4999 elements"):
        cuda.encode(parts=gw.Partition(4999, 3))


def test_no_part_of_a_nonfinite_update_is_sent() -> None:
    update = update_of(9000, "float32", 0.2, 1)
    update[4321] = float("inf")
    cpu, cuda = pair(9000, threshold=1.0)
    with pytest.raises(gw.NonFiniteUpdate) as expected:
        cpu.encode(update, parts=4)
    messages = cuda.encode(on_device(update), parts=4)
    for message in messages:
        with pytest.raises(gw.NonFiniteUpdate) as raised:
            bytes(message)
        assert raised.value.first_index == expected.value.first_index == 4321
    np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))
    assert cuda.step == 0
    clip = gw.ResidualClip(limit=1.0, every=1)
    both = pair(9000, threshold=0.125, on_nonfinite="skip", clip=clip)
    sent = [
        one.encode(u, parts=4) for one, u in zip(both, (update, on_device(update)), strict=True)
    ]
    assert [bytes(one) for one in sent[1]] == [bytes(one) for one in sent[0]]
    np.testing.assert_array_equal(residual_of(both[1]), residual_of(both[0]))
    assert both[1].stats.clipped_count == both[0].stats.clipped_count > 0


@pytest.mark.parametrize("parts", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_budget_of_bytes_gives_the_messages_of_the_cpu(dtype: str, parts: int) -> None:
    numel, max_bytes = 20_000, 64 * parts + 600
    equal = torch().from_numpy(np.full(numel, -0.75, np.float32))
    gauss = np.random.default_rng(4).standard_normal(numel, np.float32)
    updates = [equal, *(update_of(numel, "float32", density, 1) for density in (2e-3, 1.0))]
    updates += [torch().from_numpy(gauss * np.float32(scale)) for scale in (0.1, 1e4)]
    for update in updates:
        both = pair(numel, threshold=0.01, dtype=dtype, clip=gw.ResidualClip(2.0, 2))
        for once in (update, None, None):
            device = None if once is None else on_device(once)
            sent = [
                one.encode(u, parts=parts, max_bytes=max_bytes)
                for one, u in zip(both, (once, device), strict=True)
            ]
            assert [bytes(one) for one in sent[1]] == [bytes(one) for one in sent[0]]
            assert sum(one.nbytes for one in sent[1]) <= max_bytes
            np.testing.assert_array_equal(residual_of(both[1]), residual_of(both[0]))
        assert both[1].stats.sent_count == both[0].stats.sent_count


def test_a_policy_of_a_budget_gives_the_messages_of_the_cpu() -> None:
    both = pair(30_000, threshold=gw.TargetBytes(1_500), shakeup=gw.ShakeUp(4))
    rng = np.random.default_rng(3)
    for step in range(20):
        scale = np.float32(100.0 if step == 9 else 1.0)
        update = torch().from_numpy(rng.standard_normal(30_000, np.float32) * scale)
        _, message = step_both(both, update)
        assert message.nbytes <= 1_500
        assert both[0].threshold == pytest.approx(both[1].threshold, rel=1e-9)
    # Magnitudes on both sides of the bound that agree in their upper bits: only those above may be sent.
    near = gw.TargetDensity.rounding_point * 129 / 128 * np.array([1 - 2**-11, 1 + 2**-9])
    bounded = pair(10_000, threshold=gw.TargetDensity(0.5, initial=129 / 128))
    tied = torch().from_numpy(np.tile(near, 5_000).astype(np.float32))
    sent = [
        one.encode(u, max_bytes=1_000)
        for one, u in zip(bounded, (tied, on_device(tied)), strict=True)
    ]
    assert bytes(sent[1]) == bytes(sent[0])
    assert 1_000 < sent[0].count < 5_000
    for one in both:
        one.set_policy(gw.TargetBytes(700))
    assert step_both(both, update)[1].nbytes <= 700
    cuda = both[1]
    for max_bytes, dense, problem in [
        (50, False, "too few for one changed element"),
        (5_000, True, "max_bytes is for messages of a threshold"),
    ]:
        with pytest.raises(ValueError, match=problem):
            cuda.encode(on_device(update), dense=dense, max_bytes=max_bytes)
    with pytest.raises(ValueError, match="too few for one changed element"):
        cuda.set_policy(gw.TargetBytes(10))
    assert cuda.policy == gw.TargetBytes(700)


def test_nonfinite_values_are_left_out_or_nothing_is_sent() -> None:
    for numel in (10, 5000, 100_000):
        update = update_of(numel, "float32", 0.1, numel)
        update[numel // 3] = float("nan")
        update[numel // 2] = float("-inf")
        step_both(pair(numel, threshold=1.0, on_nonfinite="skip"), update)

        cpu, cuda = pair(numel, threshold=1.0)
        with pytest.raises(gw.NonFiniteUpdate) as expected:
            cpu.encode(update)
        message = cuda.encode(update.cuda())  # only enqueued: the error is the message's
        with pytest.raises(gw.NonFiniteUpdate) as raised:
            bytes(message)
        assert raised.value.count == expected.value.count == 2
        assert raised.value.first_index == expected.value.first_index == numel // 3
        np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))
        assert cuda.step == cpu.step == 0
        step_both((cpu, cuda), update_of(numel, "float32", 0.1, 1))


def test_applying_a_refused_message_changes_nothing() -> None:
    encoder = gw.Encoder(100, threshold=1.0, device="cuda")
    message = encoder.encode(torch().full((100,), float("nan"), device="cuda"))
    target = torch().ones(100, device="cuda")
    gw.apply(message, target)
    assert target.tolist() == [1.0] * 100
    with pytest.raises(gw.NonFiniteUpdate):
        message.check()


def test_a_checkpoint_of_one_side_is_loaded_by_the_other() -> None:
    policy = gw.AdaptiveThreshold(initial=0.5, density_min=0.1, density_max=0.2)
    cpu, cuda = pair(3000, threshold=policy)
    for step in range(5):
        step_both((cpu, cuda), update_of(3000, "float32", 0.02, step))
    crossed = pair(3000, threshold=policy)
    crossed[0].load_state_dict(cuda.state_dict())
    crossed[1].load_state_dict(cpu.state_dict())
    for step in range(5):
        step_both(crossed, update_of(3000, "float32", 0.02, step))
    assert crossed[1].threshold == crossed[0].threshold


def test_a_new_policy_is_followed_from_the_next_step_on() -> None:
    both = pair(3000, threshold=gw.FixedThreshold(1.0))
    step_both(both, update_of(3000, "float32", 0.1, 1))
    for encoder in both:
        encoder.set_policy(
            gw.AdaptiveThreshold(initial=0.5, density_min=0.5, density_max=0.9), threshold=0.5
        )
    for step in range(3):
        step_both(both, update_of(3000, "float32", 0.1, step))
    with pytest.raises(ValueError, match="one of gradwire's"):
        both[1].set_policy(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("parts", [None, 3])
def test_a_call_that_a_signal_interrupts_keeps_its_messages_in_the_residual(
    monkeypatch: pytest.MonkeyPatch, dense: bool, parts: int | None
) -> None:
    class InterruptedCore:
        """Python raises KeyboardInterrupt where the core returns if the signal came while it ran."""

        residual = property(lambda _: core.residual)

        def encode(self, *arguments: Any) -> None:
            core.encode(*arguments)
            raise KeyboardInterrupt

    encoder = gw.Encoder(30_000, 0.5, device="cuda")
    core = encoder._device_core
    update = update_of(30_000, "float32", 0.05, 6)
    monkeypatch.setattr(encoder, "_device_core", InterruptedCore())
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(on_device(update), dense=dense, parts=parts)
    monkeypatch.undo()
    np.testing.assert_array_equal(encoder.state_dict()["residual"], update.numpy())
