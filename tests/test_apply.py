"""Applying and decoding: what the target gets, bit for bit, and what is refused."""

from __future__ import annotations

import math
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import reference
from gradwire.message import apply_to_both, apply_with_momentum, dense_message

from .bfloat16 import Bfloat16Array
from .strategies import Changes, changes, changes_in_regions

scales = st.sampled_from([1.0, -1.0, 0.5, 0.1, 1 / 3, -(2.0**-20), 1e-30, 12345.678])


def message_of(what: Changes, threshold: float = 0.5, **header: Any) -> gw.Message:
    """Return a message of the core."""
    return gw.Message.from_entries(
        what.positions, what.negative, numel=what.numel, threshold=threshold, **header
    )


def random_target(numel: int, dtype: str, seed: int = 51) -> np.ndarray:
    """Return a target of random values."""
    return np.random.default_rng(seed).standard_normal(numel).astype(dtype)


@pytest.mark.usefixtures("isa")
@given(changes, scales, st.sampled_from(["float32", "float64"]))
def test_apply_equals_the_reference(what: Changes, scale: float, dtype: str) -> None:
    message = message_of(what)
    ours = random_target(what.numel, dtype)
    theirs = ours.copy()
    gw.apply(message, ours, scale)
    reference.apply(bytes(message), theirs, scale)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.usefixtures("isa")
@given(changes)
def test_decode_equals_the_reference(what: Changes) -> None:
    message = message_of(what)
    values = gw.decode(message)
    assert values.tobytes() == reference.decode(bytes(message)).tobytes()
    assert values.dtype == np.float32


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_apply_many_equals_single_applies_in_order(dtype: str) -> None:
    numel = 200_003
    rng = np.random.default_rng(52)
    messages = []
    for density in (0.0, 1e-3, 0.02, 0.1, 0.4, 0.7, 0.97, 1.0):
        what = changes_in_regions([(numel // 2, density), (numel - numel // 2, density / 3)], 53)
        messages.append(message_of(what, threshold=float(rng.integers(128, 256)) / 512))
    messages.insert(3, gw.dense_message(rng.standard_normal(numel).astype(dtype)))
    together, singly = random_target(numel, dtype), random_target(numel, dtype)
    gw.apply_many(messages, together, scale=0.3)
    for message in messages:
        gw.apply(message, singly, scale=0.3)
    assert together.tobytes() == singly.tobytes()
    expected = random_target(numel, dtype)
    for message in messages:
        reference.apply(bytes(message), expected, scale=0.3)
    assert together.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("held", [None, 0, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_second_target_gets_the_same_but_for_its_own_message(
    dtype: str, held: int | None
) -> None:
    rng = np.random.default_rng(7)
    messages = [
        gw.Encoder(5000, threshold=threshold).encode(rng.standard_normal(5000).astype(np.float32))
        for threshold in (2.5, 0.5, 0.001)
    ]
    messages.append(dense_message(rng.standard_normal(5000).astype(np.float32)))
    target, second = (random_target(5000, dtype, seed) for seed in (1, 2))
    expected = target.copy(), second.copy()
    for number, message in enumerate(messages):
        gw.apply(message, expected[0], 0.25)
        gw.apply(message, expected[1], -0.75 if number == held else 0.25)
    halves = [[one[:2000], one[2000:]] for one in (target, second)]
    apply_to_both(messages, *halves, held=held, scale=0.25)
    assert target.tobytes() == expected[0].tobytes()
    assert second.tobytes() == expected[1].tobytes()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_second_target_that_holds_the_only_message_is_left_alone(dtype: str) -> None:
    update = np.random.default_rng(7).standard_normal(5000).astype(np.float32)
    messages = [gw.Encoder(5000, threshold=value).encode(update) for value in (2.5, 0.5, 0.001)]
    for message in (*messages, dense_message(update)):
        target, second = np.zeros(5000, dtype), np.full(5000, -0.0, dtype)
        before = second.tobytes()
        apply_to_both([message], target, second, held=0, scale=1.0)
        np.testing.assert_array_equal(target, gw.decode(message))
        # Adding a zero would change the sign of these.
        assert second.tobytes() == before


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_are_the_same_at_every_number_of_threads(dtype: str, threads: int) -> None:
    numel = 700_001
    rng = np.random.default_rng(54)
    messages = []
    for density in (1e-3, 0.05, 0.4, 0.97):
        what = changes_in_regions([(numel // 3, density), (numel - numel // 3, density / 2)], 55)
        messages.append(message_of(what, threshold=float(rng.integers(128, 256)) / 512))
    messages.insert(2, gw.dense_message(rng.standard_normal(numel).astype(dtype)))
    arrays = [random_target(numel, dtype, seed) for seed in (1, 2, 3)]

    def applied(threads: int) -> list[bytes]:
        target, second, velocity = ([one[:9], one[9:].copy()] for one in (a.copy() for a in arrays))
        gw.apply(messages[3], target, 0.3, threads=threads)
        gw.apply_many(messages, target, 0.3, threads=threads)
        apply_to_both(messages, target, second, held=1, scale=0.3, threads=threads)
        apply_with_momentum(
            messages,
            target,
            velocity,
            momentum=0.7,
            scale=0.3,
            second=second,
            held=1,
            threads=threads,
        )
        return [part.tobytes() for part in (*target, *second, *velocity)]

    assert applied(threads) == applied(1)


@pytest.mark.parametrize("threads", [0, -1, 1025, 2.0, "two"])
def test_a_wrong_number_of_threads_is_refused(threads: Any) -> None:
    message = gw.Encoder(4, threshold=1.0).encode(np.ones(4, np.float32))
    with pytest.raises((TypeError, ValueError), match="threads"):
        gw.apply(message, np.zeros(4, np.float32), threads=threads)


def test_two_targets_that_differ_or_overlap_are_refused() -> None:
    message = gw.Encoder(4, threshold=1.0).encode(np.ones(4, np.float32))
    target = np.zeros(8, np.float32)
    for second, complaint in (
        (np.zeros(4), "same sizes and dtypes"),
        ([np.zeros(2, np.float32), np.zeros(2, np.float32)], "same sizes and dtypes"),
        (np.zeros(5, np.float32), "5"),
        (target[2:6], "overlaps"),
    ):
        with pytest.raises(ValueError, match=complaint):
            apply_to_both([message], target[:4], second, held=None, scale=1.0)
    assert not target.any()


@pytest.mark.parametrize("held", [None, 0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_momentum_repeats_a_part_of_the_sum_of_messages(dtype: str, held: int | None) -> None:
    """All values are multiples of 2^-12 and small, so every sum is exact whatever its order."""
    numel = 100_000  # several blocks
    rng = np.random.default_rng(11)
    updates = rng.integers(-512, 512, (4, numel)).astype(np.float32) / 2.0**9
    messages = [
        gw.Encoder(numel, threshold=threshold).encode(one)
        for threshold, one in zip((0.25, 0.5, 0.96875), updates, strict=False)
    ]
    messages.append(dense_message(updates[3]))
    target, second, velocity = (
        (rng.integers(-512, 512, numel) / 2.0**9).astype(dtype) for _ in range(3)
    )
    added = 0.25 * sum(gw.decode(message).astype(np.float64) for message in messages)
    goes = 0.5 * (velocity + added)
    held_sum = 0.0 if held is None else gw.decode(messages[held]).astype(np.float64)
    expected = target + added + goes, second + added + goes - held_sum, goes
    parts = [[one[:70_001], one[70_001:]] for one in (target, velocity, second)]
    apply_with_momentum(
        messages,
        parts[0],
        parts[1],
        momentum=0.5,
        scale=0.25,
        second=parts[2],
        held=held,
    )
    for found, wanted in zip((target, second, velocity), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_momentum_needs_no_second_target_and_refuses_unsuitable_arrays() -> None:
    message = gw.Encoder(4, threshold=1.0).encode(np.ones(4, np.float32))
    target, velocity = np.zeros(8, np.float32), np.zeros(4, np.float32)

    def call(velocity: Any, second: Any, momentum: float = 0.5) -> None:
        apply_with_momentum(
            [message],
            target[:4],
            velocity,
            momentum=momentum,
            scale=1.0,
            second=second,
        )

    for velocities, second, complaint in (
        (np.zeros(4), [], "target and velocity must be arrays of the same sizes and dtypes"),
        (np.zeros(5, np.float32), [], "5"),
        (target[2:6], [], "overlaps"),
        (velocity, np.zeros(4), "target and second must be arrays of the same sizes and dtypes"),
        (velocity, velocity, "overlaps"),
    ):
        with pytest.raises(ValueError, match=complaint):
            call(velocities, second)
    with pytest.raises(ValueError, match="not finite"):
        call(velocity, [], math.nan)
    assert not target.any()
    call(velocity, [])
    assert target.tolist() == [1.5] * 4 + [0.0] * 4
    assert velocity.tolist() == [0.5] * 4


@given(changes, st.lists(st.integers(0, 500), max_size=6), st.integers(0, 2**16))
def test_a_target_of_several_arrays_is_one_target(
    what: Changes, cuts: list[int], seed: int
) -> None:
    message, other = message_of(what), message_of(what, threshold=0.75)
    edges = sorted({0, what.numel, *(min(c, what.numel) for c in cuts)})
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal(what.numel)
    parts = [whole[a:b].astype(rng.choice(["float32", "float64"])) for a, b in pairwise(edges)]
    expected = [part.copy() for part in parts]
    decoded = [0.1 * gw.decode(m) for m in (message, other)]
    gw.apply_many([message, other], parts, scale=0.1)
    for update in decoded:
        for part, a in zip(expected, edges[:-1], strict=True):
            part += update[a : a + part.size]
    for ours, theirs in zip(parts, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_the_product_of_scale_and_threshold_is_rounded_once_to_float32() -> None:
    message = message_of(Changes(1, np.array([0]), np.array([False])), threshold=255 / 256)
    scale = 0.1234567890123456
    target = np.zeros(1, np.float64)
    gw.apply(message, target, scale)
    assert target[0] == float(np.float32(scale * (255 / 256)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense_values_are_scaled_in_float64_and_rounded_once(dtype: str) -> None:
    values = random_target(1_000, dtype, seed=54)
    message = gw.dense_message(values)
    for target_dtype in ("float32", "float64"):
        ours, theirs = random_target(1_000, target_dtype), random_target(1_000, target_dtype)
        gw.apply(message, ours, scale=1 / 3)
        reference.apply(bytes(message), theirs, scale=1 / 3)
        assert ours.tobytes() == theirs.tobytes()


def test_a_dense_message_decodes_to_the_very_bits_it_holds() -> None:
    values = np.array([0.0, -0.0, np.nan, -np.inf, 1e-45, 3.4e38], np.float32)
    decoded = gw.decode(gw.dense_message(values))
    assert decoded.tobytes() == values.tobytes()
    doubles = np.array([-0.0, 5e-324, np.nan])
    assert gw.decode(gw.dense_message(doubles)).tobytes() == doubles.tobytes()


def test_a_dense_message_of_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1e-40], np.float32)
    message = gw.dense_message(values, bfloat16=True)
    expected = np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7], np.float32)
    decoded = gw.decode(message)
    np.testing.assert_array_equal(decoded[:4], expected)
    assert decoded[4] == pytest.approx(-1e-40, rel=2**-8, abs=2.0**-134)


def test_a_received_view_is_applied_without_a_copy() -> None:
    what = changes_in_regions([(5_000, 0.05)], seed=55)
    received = bytearray(b"....") + bytearray(bytes(message_of(what))) + b".."
    view = memoryview(received)[4:-2]
    message = gw.Message.parse(view)
    target = np.zeros(5_000, np.float32)
    gw.apply(message, target)
    np.testing.assert_array_equal(np.flatnonzero(target), what.positions)
    received[4:8] = b"XXXX"
    assert bytes(message)[:4] == b"XXXX"


@pytest.mark.usefixtures("isa")
@given(changes, st.data())
def test_bytes_that_change_after_parsing_never_hurt(what: Changes, data: st.DataObject) -> None:
    received = bytearray(bytes(message_of(what)))
    message = gw.Message.parse(received)
    bits = data.draw(st.lists(st.integers(0, 8 * len(received) - 1), min_size=1, max_size=4))
    for bit in bits:
        received[bit // 8] ^= 1 << bit % 8
    guarded = np.zeros(what.numel + 64, np.float32)
    target = guarded[32 : 32 + what.numel]
    try:
        gw.apply(message, target)
    except gw.MessageError:
        assert not target.any()
    assert not guarded[:32].any()
    assert not guarded[32 + what.numel :].any()


def test_one_bad_message_among_many_leaves_the_target_unchanged() -> None:
    what = changes_in_regions([(3_000, 0.1)], seed=56)
    received = bytearray(bytes(message_of(what)))
    bad = gw.Message.parse(received)
    received[60:200] = bytes(140)
    target = np.zeros(3_000, np.float32)
    with pytest.raises(gw.MessageError):
        gw.apply_many([message_of(what), bad], target)
    assert not target.any()


def test_a_message_of_another_size_is_refused() -> None:
    message = message_of(changes_in_regions([(100, 0.2)], seed=57))
    for target in (np.zeros(99, np.float32), [np.zeros(100, np.float32), np.zeros(1, np.float32)]):
        with pytest.raises(ValueError, match="100"):
            gw.apply(message, target)
    first = np.zeros(100, np.float32)
    other = message_of(changes_in_regions([(101, 0.2)], seed=57))
    with pytest.raises(ValueError, match=r"10[01]"):
        gw.apply_many([message, other], first)
    assert not first.any()


def read_only() -> np.ndarray:
    """Return an array that cannot be written."""
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (read_only(), ValueError, "read-only"),
        (bytes(32), TypeError, "format"),
        (np.zeros(16, np.float32)[::2], ValueError, "contiguous"),
        (np.zeros(8, np.float16), TypeError, "float16"),
        (Bfloat16Array(np.zeros(8, np.uint16)), TypeError, "bfloat16"),
        (np.zeros(8, np.int64), TypeError, "int64"),
        ([1.0] * 8, TypeError, r"target\[0\]"),
        (None, TypeError, "None"),
    ],
)
def test_a_target_that_cannot_be_added_to_is_refused(
    target: Any, error: type[Exception], words: str
) -> None:
    message = message_of(Changes(8, np.arange(8), np.zeros(8, bool)))
    with pytest.raises(error, match=words):
        gw.apply(message, target)


def test_arrays_live_as_long_as_the_call_that_they_were_given_to() -> None:
    class Emptying:
        """An array that empties the list in which it was given."""

        def __dlpack__(self, **_: Any) -> Any:
            targets.clear()
            are_alive.append(first() is not None)
            return rest.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return rest.__dlpack_device__()

    are_alive: list[bool] = []
    rest = np.zeros(4, np.float32)
    targets: list[Any] = [np.zeros(4, np.float32), Emptying()]
    first = weakref.ref(targets[0])
    gw.apply(message_of(Changes(8, np.arange(8), np.zeros(8, bool))), targets)
    assert are_alive == [True]
    assert first() is None
    assert rest.tolist() == [0.5] * 4


def test_targets_that_overlap_are_refused() -> None:
    memory = np.zeros(12, np.float32)
    message = message_of(Changes(8, np.arange(8), np.zeros(8, bool)))
    with pytest.raises(ValueError, match="overlap"):
        gw.apply(message, [memory[:4], memory[3:7]])
    assert not memory.any()
    gw.apply(message, [memory[4:8], memory[:4]])
    assert memory[:8].all()


def test_an_array_without_elements_hides_no_overlap() -> None:
    flat = np.zeros(20, np.float32)
    target = [flat[:10], flat[2:2], flat[3:13]]
    message = gw.Encoder(20, 0.5).encode(np.ones(20, np.float32))
    with pytest.raises(ValueError, match=r"target\[0\] and target\[2\] overlap"):
        gw.apply(message, target)


@pytest.mark.parametrize("shared", [None, *range(8)])
def test_each_array_of_a_second_target_may_lie_anywhere_but_in_the_first(
    shared: int | None,
) -> None:
    pieces = np.split(np.zeros(160, np.float32), 16)
    target, second = pieces[::2], pieces[1::2]
    np.random.default_rng(56).shuffle(target)
    message = gw.Encoder(80, 0.5).encode(np.ones(80, np.float32))
    if shared is None:
        apply_to_both([message], target, second, held=None, scale=1.0)
        assert all((piece == 0.5).all() for piece in pieces)
        return
    second[shared] = target[3]
    with pytest.raises(ValueError, match=rf"second\[{shared}\] overlaps the target"):
        apply_to_both([message], target, second, held=None, scale=1.0)
    assert not any(piece.any() for piece in pieces)


def test_a_target_that_overlaps_the_message_is_refused() -> None:
    data = bytes(gw.dense_message(np.ones(4, np.float32)))
    memory = np.zeros(len(data) // 4 + 4, np.float32)
    memory.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    message = gw.Message.parse(memory.view(np.uint8)[: len(data)])
    with pytest.raises(ValueError, match="overlaps"):
        gw.apply(message, memory[12:16])


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    target = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="finite"):
        gw.apply(message_of(Changes(8, np.arange(8), np.zeros(8, bool))), target, scale)
    assert not target.any()


def test_nothing_is_applied_from_no_messages() -> None:
    target = np.ones(5, np.float32)
    gw.apply_many([], target)
    assert (target == 1).all()


@pytest.mark.parametrize("true", [1, 2, 128, 255])
def test_every_byte_of_numpy_s_true_is_a_minus(true: int) -> None:
    negative = np.array([true, 0, true, 0], np.uint8).view(np.bool_)
    message = gw.Message.from_entries(np.arange(4), negative, numel=4, threshold=1.0)
    assert gw.decode(message).tolist() == [-1.0, 1.0, -1.0, 1.0]


# --- sizes beyond memory --------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**48])
def test_positions_beyond_32_bits_survive(numel: int) -> None:
    rng = np.random.default_rng(58)
    positions = np.unique(rng.integers(0, numel, 3_000))
    positions[-1] = numel - 1
    negative = rng.random(positions.size) < 0.5
    message = gw.Message.from_entries(positions, negative, numel=numel, threshold=0.5)
    data = reference.encode_ternary(positions, negative, numel=numel, threshold=0.5)
    assert bytes(message) == data
    ours = gw.Message.parse(data).entries()
    np.testing.assert_array_equal(ours[0], positions)
    np.testing.assert_array_equal(ours[1], negative)
    assert message.density == positions.size / numel


def test_the_ceiling_is_known_for_every_size() -> None:
    assert gw.max_message_bytes(0) == 48
    assert gw.max_message_bytes(1) == 49
    assert gw.max_message_bytes(2**48) == 48 + -(-22 * 2**48 // 100)
    assert gw.max_message_bytes(10, dense=True) == 88
    assert gw.max_message_bytes(10, dense=True, dtype="float64") == 128
    for bad in (-1, 2**48 + 1):
        with pytest.raises(ValueError, match="numel"):
            gw.max_message_bytes(bad)


@pytest.mark.parametrize(
    ("positions", "negative", "numel", "threshold"),
    [
        ([1, 1], [True, True], 9, 0.5),
        ([2, 1], [True, True], 9, 0.5),
        ([-1], [True], 9, 0.5),
        ([9], [True], 9, 0.5),
        ([1, 2], [True], 9, 0.5),
        ([1], [True], 9, 0.1),
        ([1], [True], 9, 0.0),
        ([1], [True], 9, -0.5),
        ([1], [True], 9, float("inf")),
        ([1], [True], 9, float("nan")),
        ([1], [True], 2**48 + 1, 0.5),
    ],
)
def test_entries_that_describe_no_message_are_refused(
    positions: list[int], negative: list[bool], numel: int, threshold: float
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (many messages, one type)
        gw.Message.from_entries(
            np.array(positions), np.array(negative), numel=numel, threshold=threshold
        )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"message": None}, "a message must be a Message or its bytes, got None"),
        ({"scale": "0.5"}, "scale must be a number, got '0.5'"),
        ({"scale": None}, "scale must be a number, got None"),
        ({"part": 0}, r"part must be partition\[i\] of a Partition, got 0"),
        ({"part": gw.Partition(3, 1)}, r"part must be partition\[i\]"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(arguments: Any, complaint: str) -> None:
    message = gw.Encoder(3, 0.5).encode(np.ones(3, np.float32))
    target = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match=complaint):
        gw.apply(**{"message": message, "target": target, **arguments})
    assert not target.any()
    gw.apply(message, target, np.float32(0.5), threads=np.int64(1))
    assert (target == 0.25).all()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"threads": None}, "threads must be an int, got None"),
        ({"threads": 0}, "threads must be 1 to 1024, got 0"),
        ({"scale": 10**400}, "scale is too large for a float"),
        ({"scale": np.ones(2)}, "scale must be a number"),
        ({"scale": 0.0}, "scale is 0"),
        ({"scale": -0.0}, "scale is 0"),
        ({"scale": np.float32(0.0)}, "scale is 0"),
        ({"scale": np.nan}, "finite"),
    ],
    ids=str,
)
def test_one_message_and_many_have_the_same_errors(arguments: Any, complaint: str) -> None:
    message = gw.Encoder(3, 0.5).encode(np.ones(3, np.float32))
    target = np.zeros(3, np.float32)
    for add, messages in ((gw.apply, message), (gw.apply_many, [message])):
        with pytest.raises((TypeError, ValueError), match=complaint):
            add(messages, target, **arguments)  # type: ignore[arg-type]
    assert not target.any()
    gw.apply_many([message], target, np.array(0.5))  # type: ignore[arg-type]
    assert (target == 0.25).all()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"key": -1}, "key must be 0 to 4294967295, got -1"),
        ({"key": "1"}, "key must be an int"),
        ({"step": 2**32}, "step must be 0 to 4294967295"),
        ({"step": 1.5}, "step must be an int"),
        ({"numel": -1}, "numel must be 0 to"),
        ({"numel": 9.0}, "numel must be an int"),
        ({"threshold": "0.5"}, "threshold must be a number"),
        ({"shakeup": "no"}, "shakeup must be True or False"),
        ({"positions": np.array([1.0, 2.0])}, r"positions must be int64\[count\], got float64"),
        ({"positions": np.array([1, 2], np.uint64)}, r"positions must be int64\[count\]"),
        ({"negative": np.array([0, 1])}, r"negative must be bool\[count\], got int64"),
    ],
    ids=str,
)
def test_wrong_entries_are_refused_by_name(changed: Any, complaint: str) -> None:
    entries = {
        "positions": np.array([1, 2], np.int32),
        "negative": np.array([True, False]),
        "numel": np.int64(9),
        "threshold": np.float32(0.5),
    }
    assert gw.Message.from_entries(**entries, key=np.uint32(7), step=3).key == 7  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=complaint):
        gw.Message.from_entries(**{**entries, **changed})


def test_numbers_of_messages_are_checked() -> None:
    values = np.ones(3, np.float32)
    for wrong in ("1", None, 1.0):
        with pytest.raises(TypeError, match="key must be an int"):
            gw.dense_message(values, key=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="numel must be an int"):
            gw.max_message_bytes(wrong)  # type: ignore[arg-type]
    for dense in ("yes", 1, None):
        with pytest.raises(TypeError, match="dense must be True or False"):
            gw.max_message_bytes(9, dense=dense)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be 0 to 4294967295, got -1"):
        gw.dense_message(values, step=-1)


def test_a_scale_of_zero_and_a_threshold_of_true_are_refused() -> None:
    with pytest.raises(ValueError, match="scale is 0"):
        gw.apply(gw.Encoder(3).encode(np.ones(3, np.float32)), np.zeros(3, np.float32), scale=0)
    with pytest.raises(TypeError, match="threshold is True"):
        gw.Encoder(3, threshold=True)
