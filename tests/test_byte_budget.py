"""Messages within a budget of bytes: what is sent, what stays, and that no message is larger."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.policy import most_changed
from gradwire.reference import ReferenceEncoder

Array = np.ndarray[Any, Any]


def gauss(numel: int, seed: int = 0, scale: float = 1.0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32) * np.float32(scale)


def largest(values: Array, most: int) -> tuple[Array, float]:
    """Return the positions that are kept, and the threshold: the specification, with a sort."""
    bins = np.abs(values).astype(np.float32).view(np.uint32) >> 16
    order = np.argsort(-bins.astype(np.int64), kind="stable")
    lowest = bins[order[most]]
    kept = order[:most][bins[order[:most]] >= lowest]
    return np.sort(kept), float(np.uint32(lowest << 16).view(np.float32))


# --- what fits ------------------------------------------------------------------------------------


@given(
    st.integers(1, 30_000),
    st.integers(0, 2**32 - 1),
    st.floats(0.0005, 0.22),
    st.sampled_from(["spread", "start", "end", "pairs", "clusters"]),
    st.integers(1, 9),
)
def test_so_many_changed_elements_fit_wherever_they_are(
    numel: int, seed: int, share: float, where: str, parts: int
) -> None:
    max_bytes = 64 * parts + int(share * numel)
    most = most_changed(max_bytes, numel, parts)
    rng = np.random.default_rng(seed)
    order = rng.permutation(numel)
    if where == "start":
        order = np.arange(numel)
    elif where == "end":
        order = np.arange(numel)[::-1]
    elif where == "pairs":
        order = (rng.permutation(numel // 2 + 1)[:, None] * 2 + [0, 1]).ravel()
    elif where == "clusters":
        order = (rng.permutation(numel // 100 + 1)[:, None] * 100 + np.arange(100)).ravel()
    update = np.zeros(numel, np.float32)
    update[order[order < numel][:most]] = 1.0
    messages = gw.Encoder(numel, 1.0).encode(update, parts=parts)
    assert sum(one.count for one in messages) == min(most, numel)
    assert sum(one.nbytes for one in messages) <= max_bytes


@pytest.mark.parametrize(("max_bytes", "slack"), [(2_000, 0.88), (20_000, 0.88), (100_000, 0.85)])
def test_a_budget_is_used(max_bytes: int, slack: float) -> None:
    message = gw.Encoder(2**20, 0.01).encode(gauss(2**20), max_bytes=max_bytes)
    assert slack * max_bytes <= message.nbytes <= max_bytes


@pytest.mark.parametrize("parts", [None, 3])
def test_a_budget_below_one_element_is_refused(parts: int | None) -> None:
    encoder = gw.Encoder(1_000, 0.5)
    with pytest.raises(ValueError, match="max_bytes is 50, too few for one changed element"):
        encoder.encode(gauss(1_000), parts=parts, max_bytes=50)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="max_bytes is for messages of a threshold"):
        encoder.encode(gauss(1_000), dense=True, max_bytes=5_000)
    assert not encoder.residual.any()
    with pytest.raises(ValueError, match="max_bytes_per_step"):
        gw.TargetBytes(0)


# --- what is sent ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("float64", 3)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_largest_elements_are_sent_and_the_rest_stays(
    dtype: str, threads: int, scale: float
) -> None:
    numel, max_bytes = 300_000, 5_000
    update = np.rint(gauss(numel, scale=64 * scale)) / np.float32(64)  # exact
    encoder = gw.Encoder(numel, 0.5, dtype=dtype, threads=threads)
    message = encoder.encode(update, max_bytes=max_bytes)
    kept, threshold = largest(update, most_changed(max_bytes, numel, 1))
    assert message.nbytes <= max_bytes
    assert message.threshold == threshold
    positions, negative = message.entries()
    np.testing.assert_array_equal(positions, kept)
    np.testing.assert_array_equal(negative, update[kept] < 0)
    np.testing.assert_array_equal(gw.decode(message) + encoder.residual, update)


@pytest.mark.usefixtures("isa")
def test_parts_share_one_budget() -> None:
    numel, max_bytes = 300_000, 5_000
    update = np.rint(gauss(numel, scale=64)) / np.float32(64)
    partition = gw.Partition(numel, 5, first=2)
    encoder = gw.Encoder(numel, 0.5, threads=2)
    messages = encoder.encode(update, parts=partition, max_bytes=max_bytes)
    assert sum(one.nbytes for one in messages) <= max_bytes
    assert sum(one.count for one in messages) == most_changed(max_bytes, numel, 5)
    sent = np.zeros(numel, np.float32)
    for part, message in zip(partition, messages, strict=True):
        gw.apply(message, sent, part=part)
    np.testing.assert_array_equal(sent + encoder.residual, update)


@pytest.mark.usefixtures("isa")
def test_equal_magnitudes_are_sent_in_turn() -> None:
    numel = 10_000
    encoder = gw.Encoder(numel, 1.0)
    sent = np.zeros(numel, np.float32)
    for step in range(40):
        update = np.full(numel, -1.0 if step == 0 else 0.0, np.float32)
        gw.apply(encoder.encode(update, max_bytes=600), sent)
        np.testing.assert_array_equal(sent + encoder.residual, -1.0)
    assert (sent == -1.0).all()


def test_only_elements_that_reach_the_bound_are_sent() -> None:
    policy = gw.TargetDensity(0.5, initial=129 / 128)
    bound = np.float32(gw.TargetDensity.rounding_point * 129 / 128)
    update = np.tile(bound * np.array([1 - 2**-11, 1 + 2**-9], np.float32), 5_000)
    reaching = gw.decode(gw.Encoder(10_000, policy).encode(update)) != 0
    assert reaching.sum() == 5_000
    sent = gw.decode(gw.Encoder(10_000, policy).encode(update, max_bytes=1_000)) != 0
    assert 1_000 < sent.sum() < 5_000
    assert not (sent & ~reaching).any()


def test_a_message_that_fits_is_the_same_without_a_budget() -> None:
    one, two = gw.Encoder(50_000, 2.0), gw.Encoder(50_000, 2.0)
    without = one.encode(gauss(50_000))
    assert bytes(without) == bytes(two.encode(gauss(50_000), max_bytes=without.nbytes))
    np.testing.assert_array_equal(one.residual, two.residual)


# --- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [None, 4])
def test_no_message_is_larger_whatever_the_update(parts: int | None) -> None:
    numel, max_bytes = 2**16, 3_000
    encoder = gw.Encoder(numel, gw.TargetBytes(max_bytes), shakeup=gw.ShakeUp(10))
    put_in, sent = np.zeros(numel), np.zeros(numel)
    scales = [0.0, 1.0, *[1.0] * 10, 100.0, 1e-3, *[1.0] * 10, 1e4, *[1.0] * 6]
    for step, scale in enumerate(scales):
        update = np.rint(gauss(numel, step, 2.0**10 * scale)) * np.float32(2.0**-10)
        messages = encoder.encode(update, parts=parts or 1)
        assert sum(one.nbytes for one in messages) <= max_bytes
        for part, message in zip(gw.Partition(numel, parts or 1), messages, strict=True):
            gw.apply(message, sent, part=part)
        put_in += update
    np.testing.assert_allclose(sent + encoder.residual, put_in, rtol=1e-4, atol=1e-2)


def test_a_budget_is_nearly_used_by_ordinary_updates() -> None:
    numel, max_bytes = 2**18, 4_000
    encoder = gw.Encoder(numel, gw.TargetBytes(max_bytes))
    sizes = [encoder.encode(gauss(numel, step)).nbytes for step in range(40)]
    assert 0.7 * max_bytes <= np.mean(sizes[5:]) <= max_bytes
    assert encoder.policy == gw.TargetBytes(max_bytes)


def test_a_budget_goes_on_after_a_checkpoint() -> None:
    one, two = (gw.Encoder(10_000, gw.TargetBytes(500)) for _ in range(2))
    for step in range(12):
        one.encode(gauss(10_000, step))
    two.load_state_dict(one.state_dict())
    for step in range(12):
        assert bytes(one.encode(gauss(10_000, step))) == bytes(two.encode(gauss(10_000, step)))


# --- the limit of a target density ----------------------------------------------------------------


def adam(numel: int, seed: int) -> Iterator[Array]:
    """Yield Adam's updates of a model that learns: the first are plus or minus the learning rate."""
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal(numel, dtype=np.float32)
    first, second = np.zeros((2, numel), np.float32)
    for count in itertools.count(1):
        gradient = mean + rng.standard_normal(numel, dtype=np.float32)
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (gradient * gradient - second)
        unbiased = first / np.float32(1 - 0.9**count)
        yield np.float32(-1e-3) * unbiased / np.sqrt(second / np.float32(1 - 0.999**count))


@pytest.mark.parametrize("adds_first", [False, True], ids=["update", "already added"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.05])
def test_no_message_of_an_adaptive_optimiser_has_more_than_twice_the_target(
    density: float, adds_first: bool
) -> None:
    numel = 2**18
    encoder = gw.Encoder(numel, gw.TargetDensity(density))
    for update in itertools.islice(adam(numel, 3), 20):
        if adds_first:
            encoder.residual[...] += update
        message = encoder.encode(None if adds_first else update)
        assert message.density <= 2.0 * density


@pytest.mark.parametrize("factor", [10.0, 1000.0])
@pytest.mark.parametrize("density", [0.001, 0.01])
def test_after_a_jump_of_the_updates_messages_stay_below_twice_the_target(
    density: float, factor: float
) -> None:
    numel = 2**18
    encoder = gw.Encoder(numel, gw.TargetDensity(density))
    put_in, sent = np.zeros(numel), np.zeros(numel)
    ratios = []
    for step in range(100):
        scale = 2.0**10 * (factor if step >= 60 else 1.0)
        update = np.rint(gauss(numel, step, scale)) * np.float32(2.0**-10)
        message = encoder.encode(update)
        gw.apply(message, sent)
        put_in += update
        ratios.append(message.density / density)
    assert max(ratios[60:]) <= 2.0, ratios[60:]
    assert 0.7 <= np.mean(ratios[75:]) <= 1.4, ratios[60:]
    assert max(ratios[85:]) <= 1.6, ratios[60:]
    np.testing.assert_allclose(sent + encoder.residual, put_in, rtol=1e-4, atol=1e-2)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("density", [0.3, 0.05, 0.001])
def test_what_is_held_back_is_as_in_the_reference(dtype: str, density: float) -> None:
    numel, policy = 20_011, gw.TargetDensity(density)
    shakeup = gw.ShakeUp(7)
    ours = gw.Encoder(numel, policy, dtype=dtype, threads=2, shakeup=shakeup)
    theirs = ReferenceEncoder(numel, policy, dtype=dtype, shakeup=shakeup)
    limited = 0
    for step in range(40):
        update = gauss(numel, step, 1000.0 if step > 20 else 1.0)
        if step in (3, 4, 5):
            update = np.sign(update)  # equal magnitudes everywhere
        message = ours.encode(update)
        assert bytes(message) == theirs.encode(update)
        assert ours.residual.tobytes() == theirs.residual.tobytes()
        assert ours.threshold == theirs.threshold
        assert message.is_shakeup or message.count <= policy.most_changed(numel)
        limited += message.count == policy.most_changed(numel)
    assert limited >= 2


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("magnitudes", "least"), [([2.0, 1.0 - 1e-12, 1.0], 0.1), ([6e-41, 7e-41, 8e-41], 1e-40)]
)
def test_the_largest_are_as_in_the_reference_at_the_edges_of_bfloat16(
    magnitudes: list[float], least: float, dtype: str
) -> None:
    policy = gw.TargetDensity(0.01, initial=least, minimum=least)
    ours = gw.Encoder(20_000, policy, dtype=dtype)
    theirs = ReferenceEncoder(20_000, policy, dtype=dtype)
    update = np.zeros(20_000)
    update[:900] = np.random.default_rng(9).permutation(np.repeat(magnitudes, 300))
    message = ours.encode(update.astype(dtype))
    assert bytes(message) == theirs.encode(update.astype(dtype))
    assert ours.residual.tobytes() == theirs.residual.tobytes()
    assert gw.Message.parse(bytes(message)).count == policy.most_changed(20_000)


def test_parts_share_the_limit_of_a_density() -> None:
    numel, policy = 300_000, gw.TargetDensity(0.01, initial=1e-3)
    messages = gw.Encoder(numel, policy).encode(gauss(numel), parts=5)
    assert sum(one.count for one in messages) == policy.most_changed(numel) == 6_000


def test_small_arrays_and_explicit_budgets_have_no_limit_of_a_density() -> None:
    policy = gw.TargetDensity(0.01, initial=1e-3)
    assert gw.Encoder(10_000, policy).encode(gauss(10_000)).count > 9_000
    message = gw.Encoder(100_000, policy).encode(gauss(100_000), max_bytes=10_000)
    assert message.count > 2_000
    assert message.nbytes <= 10_000


def test_a_budget_may_be_larger_than_any_message() -> None:
    update = np.ones(4, np.float32)
    for max_bytes in (2**64, 10**30):
        assert gw.Encoder(4, 1.0).encode(update, max_bytes=max_bytes).count == 4
        gw.Encoder(4, gw.TargetBytes(max_bytes)).encode(update)


def test_the_budgets_of_many_encoders_are_computed_once() -> None:
    encoders = [gw.Encoder(1_000 + i, gw.TargetBytes(300)) for i in range(500)]
    for encoder in encoders:
        encoder.encode(np.ones(encoder.numel, np.float32))
    misses = most_changed.cache_info().misses
    for encoder in encoders:
        encoder.encode(np.ones(encoder.numel, np.float32))
    assert most_changed.cache_info().misses == misses
