"""Deeplearning4j's codec: its own vectors, and random cases against a slow scalar oracle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import dl4j
from gradwire.errors import MessageError

VECTORS = sorted((Path(__file__).parent / "golden" / "dl4j").glob("*.npz"))


def bits_of(array: np.ndarray) -> np.ndarray:
    """Return the bits, so that NaN equals itself and -0.0 differs from 0.0."""
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_libnd4j_vectors_are_reproduced_bit_for_bit(path: Path) -> None:
    vector = np.load(path)
    updates, tau = vector["updates"].copy(), float(vector["tau"])
    target = np.zeros_like(updates)
    if vector["kind"] == "bitmap":
        message = dl4j.encode_bitmap(updates, tau)
        dl4j.decode_bitmap(message, target)
    else:
        boundary = int(vector["boundary"])
        message = dl4j.encode_threshold(updates, tau, None if boundary < 0 else boundary)
        dl4j.decode_threshold(message, target)
    assert message.dtype == np.int32
    np.testing.assert_array_equal(message, vector["message"])
    np.testing.assert_array_equal(bits_of(updates), bits_of(vector["residual"]))
    np.testing.assert_array_equal(bits_of(target), bits_of(vector["decoded"]))


# --- the oracle: one element after the other ------------------------------------------------------


def header(count: int, numel: int, tau: np.float32, form: int) -> list[int]:
    """Return the four words in front."""
    return [count, numel, int(tau.view(np.int32)), form]


def slow_threshold(x: np.ndarray, tau: float, boundary: int | None) -> list[int]:
    """Return the message of ``encode_threshold``; takes the sent parts out of ``x``."""
    tau32 = np.float32(tau)
    t = x.dtype.type(tau32)
    passing = [i for i in range(x.size) if x[i] >= t or x[i] <= -t]
    if boundary is not None:
        passing = passing[:boundary]
    if len(passing) < 2:
        passing = []
    entries = []
    for i in passing:
        if x[i] >= t:
            entries.append(i + 1)
            x[i] = x[i] - t
        else:
            entries.append(-(i + 1))
            x[i] = x[i] + t
    return header(len(entries), x.size, tau32, 0) + entries


def slow_bitmap(x: np.ndarray, tau: float) -> list[int]:
    """Return the message of ``encode_bitmap``; takes the sent parts out of ``x``."""
    tau32 = np.float32(tau)
    t = x.dtype.type(tau32)
    half = t / x.dtype.type(2)
    words = [0] * (x.size // 16 + 1)
    for i in range(x.size):
        value, sign = 1 << i % 16, 1 << (16 + i % 16)
        if abs(x[i]) >= t:
            words[i // 16] |= value
            if x[i] < 0:
                words[i // 16] |= sign
                x[i] = x[i] + t
            else:
                x[i] = x[i] - t
        elif abs(x[i]) >= half and x[i] < 0:
            words[i // 16] |= sign
            x[i] = x[i] + half
    signed = [w - 2**32 if w >= 2**31 else w for w in words]
    return header(x.size, x.size, tau32, 1) + signed


def updates_of(seed: int, numel: int, dtype: str, tau: float) -> np.ndarray:
    """Return updates around tau, with some exact multiples and non-finite values among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(numel) * tau
    special = np.array([tau, -tau, tau / 2, -tau / 2, 0.0, -0.0, np.nan, np.inf, -np.inf])
    odd = rng.random(numel) < 0.2
    values[odd] = rng.choice(special, np.count_nonzero(odd))
    with np.errstate(over="ignore"):
        return values.astype(dtype)


dtypes = st.sampled_from(["float16", "float32", "float64"])
taus = st.sampled_from([0.5, 1e-3, 0.1, 3.0, 1e-4, 1 / 3])
seeds = st.integers(0, 2**32 - 1)
# Sums with infinities are meant, and float16 cannot hold every tau.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@given(seeds, st.integers(0, 200), dtypes, taus, st.one_of(st.none(), st.integers(0, 40)))
def test_threshold_form_equals_the_oracle(
    seed: int, numel: int, dtype: str, tau: float, boundary: int | None
) -> None:
    ours = updates_of(seed, numel, dtype, tau)
    theirs, before = ours.copy(), ours.copy()
    expected = slow_threshold(theirs, tau, boundary)
    message = dl4j.encode_threshold(ours, tau, boundary)
    assert message.tolist() == expected
    np.testing.assert_array_equal(bits_of(ours), bits_of(theirs))
    target = np.zeros(numel, dtype)
    dl4j.decode_threshold(message, target)
    t = ours.dtype.type(np.float32(tau))
    for entry in expected[4:]:
        assert target[abs(entry) - 1] == (t if entry > 0 else -t)
    assert np.count_nonzero(target) == (len(expected) - 4 if t else 0)
    untouched = target == 0
    np.testing.assert_array_equal(bits_of(ours)[untouched], bits_of(before)[untouched])


@given(seeds, st.integers(0, 200), dtypes, taus)
def test_bitmap_form_equals_the_oracle(seed: int, numel: int, dtype: str, tau: float) -> None:
    ours = updates_of(seed, numel, dtype, tau)
    theirs, before = ours.copy(), ours.copy()
    expected = slow_bitmap(theirs, tau)
    message = dl4j.encode_bitmap(ours, tau)
    assert message.tolist() == expected
    np.testing.assert_array_equal(bits_of(ours), bits_of(theirs))
    target = np.zeros(numel, dtype)
    dl4j.decode_bitmap(message, target)
    finite = np.isfinite(before)
    np.testing.assert_array_equal((before - target)[finite], ours[finite])


def test_bfloat16_updates_go_both_ways() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes").bfloat16
    ours = updates_of(1, 100, "float32", 0.5).astype(bfloat16)
    theirs = ours.copy()
    assert dl4j.encode_threshold(ours, 0.5).tolist() == slow_threshold(theirs, 0.5, None)
    np.testing.assert_array_equal(bits_of(ours), bits_of(theirs))


# --- rules by name --------------------------------------------------------------------------------


def test_a_single_passing_element_is_not_sent_and_keeps_its_value() -> None:
    updates = np.array([0.1, 0.9, 0.2], np.float32)
    message = dl4j.encode_threshold(updates, 0.5)
    assert message[0] == 0
    assert message.size == 4
    assert updates[1] == np.float32(0.9)


def test_a_boundary_keeps_the_first_and_leaves_the_others_whole() -> None:
    updates = np.array([1.0, -1.0, 1.0, -1.0], np.float32)
    assert dl4j.encode_threshold(updates, 0.75, boundary=3)[4:].tolist() == [1, -2, 3]
    assert updates.tolist() == [0.25, -0.25, 0.25, -1.0]


def test_an_infinity_is_sent_and_stays_and_nan_is_not_sent() -> None:
    updates = np.array([np.inf, np.nan, -np.inf], np.float32)
    assert dl4j.encode_threshold(updates, 0.5)[4:].tolist() == [1, -3]
    assert np.isposinf(updates[0])
    assert np.isnan(updates[1])
    assert np.isneginf(updates[2])


def test_only_negative_elements_are_halved() -> None:
    updates = np.array([0.3, -0.3], np.float32)
    message = dl4j.encode_bitmap(updates, 0.5)
    assert message[4] == 1 << 17
    assert updates.tolist() == [np.float32(0.3), np.float32(-0.3) + np.float32(0.25)]


def test_entries_that_name_an_element_twice_add_up() -> None:
    message = np.array([3, 2, np.float32(0.5).view(np.int32), 0, 1, 1, -2], np.int32)
    target = np.zeros(2, np.float32)
    dl4j.decode_threshold(message, target)
    assert target.tolist() == [1.0, -0.5]


def broken(index: int, value: int, form: int) -> np.ndarray:
    """Return a valid message of 20 elements with one word replaced."""
    updates = np.where(np.arange(20) % 2, 1.0, -1.0).astype(np.float32)
    encode = dl4j.encode_bitmap if form else dl4j.encode_threshold
    message = encode(updates, 0.5)
    message[index] = value
    return message


NAN_BITS, INF_BITS, MINUS_BITS = 0x7FC00000, 0x7F800000, -0x41000000


@pytest.mark.parametrize(
    ("index", "value"),
    [
        *[(0, 19), (0, 21), (0, -1), (1, 19), (1, -20), (2, NAN_BITS), (2, INF_BITS), (2, 0)],
        *[(2, MINUS_BITS), (3, 1), (3, 2), (4, 0), (4, 21), (4, -21), (4, -(2**31))],
    ],
)
def test_a_broken_threshold_message_is_refused_before_the_target_changes(
    index: int, value: int
) -> None:
    target = np.ones(20, np.float32)
    with pytest.raises(MessageError):
        dl4j.decode_threshold(broken(index, value, form=0), target)
    with pytest.raises(MessageError):
        dl4j.from_dl4j(broken(index, value, form=0))
    assert (target == 1).all()


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, 19), (1, 40), (1, -1), (2, NAN_BITS), (2, 0), (3, 0), (3, 7), (5, 1 << 4), (5, 1 << 20)],
)
def test_a_broken_bitmap_is_refused_before_the_target_changes(index: int, value: int) -> None:
    target = np.ones(20, np.float32)
    with pytest.raises(MessageError):
        dl4j.decode_bitmap(broken(index, value, form=1), target)
    assert (target == 1).all()


@pytest.mark.parametrize("size", [0, 3])
def test_a_message_without_a_whole_header_is_refused(size: int) -> None:
    for decode in (dl4j.decode_threshold, dl4j.decode_bitmap):
        with pytest.raises(MessageError, match="at least 4 words"):
            decode(np.zeros(size, np.int32), np.zeros(3, np.float32))


@pytest.mark.parametrize("tau", [0.0, -1.0, np.nan, np.inf, 1e-60, 1e60])
def test_a_tau_that_float32_cannot_hold_is_refused(tau: float) -> None:
    for encode in (dl4j.encode_threshold, dl4j.encode_bitmap):
        with pytest.raises(ValueError, match="tau"):
            encode(np.zeros(3, np.float64), tau)


@pytest.mark.parametrize(
    ("dtype", "tau", "bounds"),
    [
        ("float16", 1e-9, "6e-8 to 65504"),
        ("float16", 1e6, "6e-8 to 65504"),
        ("bfloat16", 1e-43, "9.2e-41 to 3.38e38"),
        ("bfloat16", 3.4e38, "9.2e-41 to 3.38e38"),
    ],
)
def test_a_tau_outside_the_range_of_the_updates_is_refused(
    dtype: str, tau: float, bounds: str
) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
    for encode in (dl4j.encode_threshold, dl4j.encode_bitmap):
        updates = np.zeros(3, dtype)
        with pytest.raises(ValueError, match=f"^tau {re.escape(repr(tau))} rounds to .*{bounds}"):
            encode(updates, tau)
        assert not updates.any()


def test_a_bitmap_s_half_of_tau_must_be_in_the_range_too() -> None:
    for dtype, tau in ((np.float16, 6e-8), (np.float32, 1.4e-45), (np.float64, 1.4e-45)):
        assert dl4j.encode_threshold(np.zeros(3, dtype), tau)[0] == 0
        with pytest.raises(ValueError, match=f"half of tau {tau!r} rounds to 0.0 in float"):
            dl4j.encode_bitmap(np.zeros(3, dtype), tau)


def test_a_tau_above_the_range_of_the_target_is_refused() -> None:
    target = np.zeros(3, np.float16)
    for encode, decode in (
        (dl4j.encode_threshold, dl4j.decode_threshold),
        (dl4j.encode_bitmap, dl4j.decode_bitmap),
    ):
        message = encode(np.full(3, 1e6, np.float32), 1e6)
        with pytest.raises(MessageError, match="too large for a target of float16"):
            decode(message, target)
    assert not target.any()


def test_arrays_that_cannot_be_changed_in_place_are_refused() -> None:
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    message = dl4j.encode_threshold(np.ones(4, np.float32), 0.5)
    wrong: list[Any] = [[1.0, 2.0], np.zeros(4, np.int32), np.zeros(4, np.complex64)]
    for array in wrong:
        with pytest.raises(TypeError, match="float16, bfloat16"):
            dl4j.encode_threshold(array, 0.5)
    for array in (read_only, np.zeros(8, np.float32)[::2]):
        with pytest.raises(ValueError, match="contiguous and writable"):
            dl4j.encode_bitmap(array, 0.5)
        with pytest.raises(ValueError, match="contiguous and writable"):
            dl4j.decode_threshold(message, array)
    with pytest.raises(TypeError, match="int32"):
        dl4j.decode_threshold(message.astype(np.int64), np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="boundary"):
        dl4j.encode_threshold(np.zeros(4, np.float32), 0.5, boundary=-1)


def test_arrays_of_any_shape_are_changed_in_place() -> None:
    updates = np.ones((3, 5), np.float32)
    message = dl4j.encode_threshold(updates, 0.75)
    assert (updates == 0.25).all()
    dl4j.decode_threshold(message, updates)
    assert (updates == 1.0).all()


# --- converters -----------------------------------------------------------------------------------


@given(seeds, st.integers(0, 300), st.sampled_from([0.5, 2.0**-10, 3.0]))
def test_a_threshold_message_survives_the_way_through_ours(
    seed: int, numel: int, tau: float
) -> None:
    theirs = dl4j.encode_threshold(updates_of(seed, numel, "float32", tau), tau)
    (ours,) = dl4j.from_dl4j(theirs, key=5, step=6)
    assert (ours.key, ours.step, ours.numel, ours.threshold) == (5, 6, numel, tau)
    assert ours.count == theirs[0]
    np.testing.assert_array_equal(dl4j.to_dl4j(ours), theirs)


def test_entries_in_any_order_are_sorted() -> None:
    theirs = np.array([3, 9, np.float32(0.5).view(np.int32), 0, 7, -2, 9], np.int32)
    (ours,) = dl4j.from_dl4j(theirs)
    assert dl4j.to_dl4j(ours)[4:].tolist() == [-2, 7, 9]


@given(seeds, st.integers(0, 300))
def test_a_bitmap_becomes_messages_that_add_up_to_the_same(seed: int, numel: int) -> None:
    updates = updates_of(seed, numel, "float32", 0.5)
    bitmap = dl4j.encode_bitmap(updates, 0.5)
    expected, target = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    dl4j.decode_bitmap(bitmap, expected)
    messages = dl4j.from_dl4j(bitmap)
    for message in messages:
        gw.apply(message, target)
    np.testing.assert_array_equal(target, expected)
    halves = bool((expected == -0.25).any())
    assert [m.threshold for m in messages] == ([0.5, 0.25] if halves else [0.5])


@pytest.mark.parametrize("form", ["threshold", "bitmap"])
def test_every_threshold_of_deeplearning4j_s_decay_is_taken_exactly(form: str) -> None:
    for exponent in range(100):
        tau = 1e-3 * 0.966**exponent
        check_exact(form, tau, seed=exponent)


def check_exact(form: str, tau: float, seed: int) -> None:
    """Check that the converted messages add up to what Deeplearning4j decodes, in float32 and float64."""
    theirs = getattr(dl4j, f"encode_{form}")(updates_of(seed, 300, "float32", tau), tau)
    messages = dl4j.from_dl4j(theirs, key=2, step=seed)
    assert {(message.key, message.step) for message in messages} == {(2, seed)}
    for dtype in ("float32", "float64"):
        expected = np.zeros(300, dtype)
        target = np.zeros(300, dtype)
        getattr(dl4j, f"decode_{form}")(theirs, expected)
        gw.apply_many(messages, target)
        np.testing.assert_array_equal(target, expected)
        assert np.count_nonzero(target) > 50


@given(seeds, st.floats(2.0**-109, float(np.finfo(np.float32).max), width=32))
def test_any_threshold_is_a_sum_of_at_most_three(seed: int, tau: float) -> None:
    message = np.array([1, 9, np.float32(tau).view(np.int32), 0, seed % 9 + 1], np.int32)
    messages = dl4j.from_dl4j(message)
    assert 1 <= len(messages) <= 3
    target = np.zeros(9, np.float32)
    gw.apply_many(messages, target)
    assert target[seed % 9] == np.float32(tau)


def test_a_tau_with_digits_below_the_smallest_bfloat16_value_is_refused() -> None:
    message = np.array([1, 9, np.float32(2.0**-120).view(np.int32) + 1, 0, 3], np.int32)
    with pytest.raises(MessageError, match="not a sum of bfloat16 values"):
        dl4j.from_dl4j(message)


def test_an_element_named_twice_is_refused_by_the_converter() -> None:
    message = np.array([2, 9, np.float32(0.5).view(np.int32), 0, 3, -3], np.int32)
    with pytest.raises(MessageError, match="twice"):
        dl4j.from_dl4j(message)


def test_messages_without_a_deeplearning4j_form_are_refused() -> None:
    huge = gw.Message.from_entries(
        np.array([2**31]), np.array([True]), numel=2**31 + 1, threshold=0.5
    )
    with pytest.raises(MessageError, match="2\\^31"):
        dl4j.to_dl4j(huge)
    largest = gw.Message.from_entries(
        np.array([2**31 - 2]), np.array([True]), numel=2**31 - 1, threshold=0.5
    )
    assert dl4j.to_dl4j(largest)[4] == -(2**31 - 1)
    with pytest.raises(MessageError, match="dense"):
        dl4j.to_dl4j(gw.dense_message(np.zeros(3, np.float32)))


def test_arguments_of_the_wrong_kind_are_refused_by_name() -> None:
    updates: Any = np.ones(3, np.float32)
    message = gw.Encoder(3, 0.5).encode(updates)
    for wrong in ("0.5", None, True):
        with pytest.raises(TypeError, match="tau must be a number"):
            dl4j.encode_threshold(updates, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="key must be a whole number of at least 0"):
            dl4j.from_dl4j(dl4j.to_dl4j(message), key=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="message must be a Message"):
            dl4j.to_dl4j(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step is 4294967296, must be below"):
        dl4j.from_dl4j(dl4j.to_dl4j(message), step=1 << 32)
    assert (updates == 1.0).all()
