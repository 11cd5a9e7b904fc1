"""Partitions, and messages for parts: every part's message is that of its gathered elements."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.reference import ReferenceEncoder

Array = np.ndarray[Any, Any]


def gathered(values: Array, part: gw.Part) -> Array:
    """Return the elements of a part, copied."""
    own = np.empty(part.numel, values.dtype)
    for whole, inside in part.slices():
        own[inside] = values[whole]
    return own


def updates(numel: int, steps: int, dtype: str = "float32") -> list[Array]:
    """Return updates whose scale differs from region to region: sparse, bitmap and inverted chunks."""
    rng = np.random.default_rng(numel)
    scale = np.repeat(rng.choice([0.01, 0.3, 5.0], numel // 500 + 1), 500)[:numel]
    return [(rng.standard_normal(numel) * scale).astype(dtype) for _ in range(steps)]


# --- the arithmetic -------------------------------------------------------------------------------


@given(st.integers(0, 20_000), st.integers(1, 80), st.integers(0, 79))
def test_every_element_is_in_one_part_and_blocks_are_dealt_in_turn(
    numel: int, parts: int, first: int
) -> None:
    partition = gw.Partition(numel, parts, first=first % parts)
    owner = np.full(numel, -1)
    for index, part in enumerate(partition):
        done = 0
        for whole, inside in part.slices():
            assert (owner[whole] == -1).all()
            assert whole.start // partition.block % parts == (index - partition.first) % parts
            assert inside == slice(done, done + whole.stop - whole.start)
            owner[whole] = index
            done = inside.stop
        assert part.numel == done == partition.sizes[index]
    assert (owner >= 0).all()
    assert len(partition) == len(partition.sizes) == parts


@pytest.mark.parametrize(
    ("numel", "parts", "block"),
    [
        *[(0, 1, 64), (100, 64, 64), (2**16, 16, 64), (2**18, 4, 256), (2**20, 16, 256)],
        *[(2**22, 16, 1024), (2**26, 16, 4096), (2**40, 2, 4096)],
    ],
)
def test_blocks_are_small_enough_to_balance_and_large_enough_to_be_fast(
    numel: int, parts: int, block: int
) -> None:
    assert gw.Partition(numel, parts).block == block


def test_partitions_are_values() -> None:
    assert gw.Partition(1000, 4) == gw.Partition(1000, 4, first=0)
    assert len({gw.Partition(1000, 4), gw.Partition(1000, 4), gw.Partition(1000, 4, first=1)}) == 2
    assert gw.Partition(1000, 4)[1] == gw.Partition(1000, 4)[1]
    with pytest.raises(AttributeError):
        gw.Partition(1000, 4).parts = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "first", "what"),
    [
        ((-1, 1), 0, "numel must be 0 to 281474976710656, got -1"),
        ((9, 0), 0, "parts must be 1 to 65536, got 0"),
        ((9, 2**17), 0, "parts must be 1 to 65536, got 131072"),
        ((9, 3), 3, "first must be 0 to 2, got 3"),
    ],
)
def test_impossible_partitions_are_refused(
    arguments: tuple[int, int], first: int, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        gw.Partition(*arguments, first=first)
    with pytest.raises(IndexError, match="part 3 of 3"):
        gw.Partition(9, 3)[3]


def test_only_whole_numbers_divide() -> None:
    for wrong in ("3", None, True, 3.0, np.float32(3.0)):
        for arguments in ({"numel": wrong}, {"parts": wrong}, {"first": wrong}):
            options: Any = {"numel": 100, "parts": 3, **arguments}
            with pytest.raises(TypeError, match=f"{next(iter(arguments))} must be an int"):
                gw.Partition(**options)
    assert repr(gw.Partition(np.int64(100), np.uint8(3))) == repr(gw.Partition(100, 3))


# --- encoding -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("float32", 3), ("float64", 2)])
@pytest.mark.parametrize(("numel", "parts"), [(20_037, 5), (600_011, 3), (300, 8), (0, 2)])
def test_parts_are_encoded_as_if_each_had_been_gathered(
    numel: int, parts: int, dtype: str, threads: int
) -> None:
    partition = gw.Partition(numel, parts, first=parts // 2)
    encoder = gw.Encoder(numel, 0.5, dtype=dtype, key=7, threads=threads)
    oracles = [
        ReferenceEncoder(size, gw.FixedThreshold(0.5), dtype=dtype, key=7)
        for size in partition.sizes
    ]
    # Arrays that end inside of words and blocks.
    cuts = [numel // 3 + 1, numel // 3 + 1, numel // 2 + 5]
    for update in updates(numel, 3 if numel < 100_000 else 1):
        messages = encoder.encode(np.split(update, cuts), parts=partition)
        for part, oracle, message in zip(partition, oracles, messages, strict=True):
            assert bytes(message) == oracle.encode(gathered(update, part))
            own = gathered(encoder.residual, part)
            np.testing.assert_array_equal(own.view("u1"), oracle.residual.view("u1"))


@pytest.mark.usefixtures("isa")
def test_threshold_policy_schedules_and_stats_are_those_of_one_message() -> None:
    numel, options = 30_000, {"shakeup": gw.ShakeUp(3), "clip": gw.ResidualClip(2.0, 2)}
    one, many = (gw.Encoder(numel, gw.TargetDensity(0.02), **options) for _ in range(2))  # type: ignore[arg-type]
    for update in updates(numel, 7):
        message, messages = one.encode(update), many.encode(update, parts=4)
        assert {m.threshold for m in messages} == {message.threshold}
        assert {(m.step, m.is_shakeup) for m in messages} == {(message.step, message.is_shakeup)}
        assert sum(m.count for m in messages) == message.count
        np.testing.assert_array_equal(one.residual, many.residual)
        assert one.threshold == many.threshold
    assert many.stats.messages == 4 * one.stats.messages
    assert many.stats.sent_count == one.stats.sent_count
    assert many.stats.clipped_sum == one.stats.clipped_sum


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_non_finite_update_sends_nothing_and_names_the_element_of_the_whole(
    threads: int,
) -> None:
    numel = 600_000
    one, many = (gw.Encoder(numel, 0.5, threads=threads) for _ in range(2))
    update = updates(numel, 1)[0]
    update[[140_001, 300_007, 555_555]] = np.nan
    with pytest.raises(gw.NonFiniteUpdate, match=r"^3 elements .* at index 140001;"):
        many.encode(update, parts=7)
    with pytest.raises(gw.NonFiniteUpdate):
        one.encode(update)
    assert many.step == 0
    np.testing.assert_array_equal(one.residual, many.residual)
    with pytest.raises(gw.NonFiniteUpdate, match="at index 140001;"):
        many.encode(update, parts=7, dense=True)
    skipping = gw.Encoder(numel, 0.5, threads=threads, on_nonfinite="skip")
    skipping.encode(update, parts=7)
    assert skipping.stats.nonfinite_count == 3


def test_an_error_of_the_policy_loses_nothing() -> None:
    class Broken:
        initial, sample_density = 0.5, None

        def next_threshold(self, *_: object) -> float:
            raise ArithmeticError

    encoder = gw.Encoder(10_000, Broken())
    update = np.rint(updates(10_000, 1)[0] * 64) / np.float32(64)
    with pytest.raises(ArithmeticError):
        encoder.encode(update, parts=3)
    np.testing.assert_array_equal(encoder.residual, update)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dense", [True, "bfloat16"])
def test_dense_messages_of_parts_hold_their_elements(dense: Any) -> None:
    numel = 10_007
    partition = gw.Partition(numel, 3)
    one, many = (gw.Encoder(numel, 0.5) for _ in range(2))
    update = updates(numel, 1)[0]
    whole = gw.decode(one.encode(update, dense=dense))
    for part, message in zip(
        partition, many.encode(update, dense=dense, parts=partition), strict=True
    ):
        np.testing.assert_array_equal(gw.decode(message), gathered(whole, part))
    np.testing.assert_array_equal(one.residual, many.residual)
    rest = np.zeros(numel, np.float32)
    for part, message in zip(partition, many.flush(parts=3), strict=True):
        gw.apply(message, rest, part=part)
    np.testing.assert_array_equal(rest, one.residual)
    assert not many.residual.any()


def test_a_partition_of_another_size_is_refused() -> None:
    encoder = gw.Encoder(100, 0.5)
    with pytest.raises(ValueError, match="the partition has 99 elements, the encoder 100"):
        encoder.encode(np.ones(100, np.float32), parts=gw.Partition(99, 2))
    assert not encoder.residual.any()


# --- applying -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("spread", [0.1, 0.4, 3.0])  # sparse, bitmap, inverted
@pytest.mark.parametrize(("dtypes", "threads"), [(["f4"], 1), (["f8", "f4", "f8"], 3)])
def test_messages_of_a_part_are_added_to_its_elements_only(
    spread: float, dtypes: list[str], threads: int
) -> None:
    numel = 200_003
    partition = gw.Partition(numel, 6, first=1)
    rng = np.random.default_rng(5)
    encoders = [gw.Encoder(numel, 0.5), gw.Encoder(numel, 0.25)]
    update = (rng.standard_normal(numel) * spread).astype(np.float32)
    encoded = [one.encode(update, parts=partition) for one in encoders]
    sizes = [numel // len(dtypes)] * (len(dtypes) - 1)
    edges = [0, *itertools.accumulate(sizes), numel]
    target = [
        np.zeros(b - a, dtype)
        for (a, b), dtype in zip(itertools.pairwise(edges), dtypes, strict=True)
    ]
    expected = np.zeros(numel)
    for index in (4, 0):
        part = partition[index]
        gw.apply_many([one[index] for one in encoded], target, 0.5, part, threads=threads)
        added = sum(0.5 * gw.decode(one[index]) for one in encoded)
        for whole, inside in part.slices():
            expected[whole] += added[inside]
    np.testing.assert_array_equal(np.concatenate([one.astype("f8") for one in target]), expected)


def test_what_was_put_in_is_sent_to_parts_or_in_the_residual_exactly() -> None:
    numel, parts = 50_000, 5
    encoder = gw.Encoder(numel, 2.0**-6)
    put_in, sent = np.zeros(numel), np.zeros(numel)
    for step, update in enumerate(updates(numel, 8)):
        exact = (np.rint(update * 64) * 2.0**-12).astype(np.float32)
        put_in += exact
        partition = gw.Partition(numel, parts, first=step % parts)
        for part, message in zip(partition, encoder.encode(exact, parts=partition), strict=True):
            gw.apply(message, sent, part=part)
        np.testing.assert_array_equal(put_in, sent + encoder.residual)


def test_a_message_or_target_that_does_not_fit_the_part_is_refused() -> None:
    partition = gw.Partition(1000, 3)
    messages = gw.Encoder(1000, 0.5).encode(np.ones(1000, np.float32), parts=partition)
    target = np.zeros(1000, np.float32)
    with pytest.raises(gw.MessageError, match="has numel 360, the target 320"):
        gw.apply(messages[0], target, part=partition[1])
    with pytest.raises(ValueError, match="target has 999 elements, must have 1000"):
        gw.apply_many([], target[:999], part=partition[1])
    with pytest.raises(ValueError, match="target has 1000 elements, must have 360"):
        gw.apply(messages[0], target)
    assert not target.any()
