"""Messages of Deeplearning4j, bit for bit, to compare the two codecs and to read what a cluster of its own has sent.

Only the bytes are the same: gradwire does not speak Deeplearning4j's transport (Aeron), so the nodes of a run are all
gradwire's.

A message is an int32 array: ``[count, N, float32 bits of tau, form, payload...]``. Form 0 (threshold) lists signed
one-based indexes. Form 1 (bitmap) has a value bit and a sign bit for each element, 16 elements a word, and count N.

Source: eclipse/deeplearning4j at 9d83f7cf, ``encode_threshold``, ``decode_threshold``, ``encode_bitmap`` and
``decode_bitmap`` of libnd4j (CPU, one thread), studied and written anew.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import MessageError
from gradwire.message import Message
from gradwire.policy import as_number, whole

__all__ = [
    "decode_bitmap",
    "decode_threshold",
    "encode_bitmap",
    "encode_threshold",
    "from_dl4j",
    "to_dl4j",
]

MAX_NUMEL = 2**31 - 1
_HEADER_WORDS = 4
_THRESHOLD_FORM = 0
_BITMAP_FORM = 1
_WORD_ELEMENTS = 16
# The dtypes of arrays, and the positive numbers that each can hold.
_RANGES = {
    "float16": "6e-8 to 65504",
    "bfloat16": "9.2e-41 to 3.38e38",
    "float32": "1.4e-45 to 3.4e38",
    "float64": "4.9e-324 to 1.7e308",
}
_DTYPES = tuple(_RANGES)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Flags = NDArray[np.bool_]


def encode_threshold(updates: NDArray[Any], tau: float, boundary: int | None = None) -> Int32:
    """Encode the elements whose magnitude is at least tau, and subtract tau from them.

    NaN is never sent; an infinity is sent and stays. If fewer than two elements pass, nothing is sent: the message is a
    header with count 0, and ``updates`` is unchanged.

    Args:
        updates: float16, bfloat16, float32 or float64, contiguous, N <= 2^31 - 1 elements; modified in place.
        tau: the threshold, rounded to float32 for the message and to the dtype of ``updates`` for the arithmetic.
        boundary: the most entries, lowest indexes first; None for no limit.

    Returns:
        int32[4 + count], entries in ascending order of their index.

    Raises:
        TypeError: ``updates`` is not an array of one of the four dtypes.
        ValueError: ``updates`` is not contiguous, not writable or too long; boundary is out of range, or tau is, as
            float32 or in the dtype of ``updates``; ``updates`` is unchanged.

    >>> updates = np.array([0.75, -0.5, 0.25], np.float32)
    >>> encode_threshold(updates, 0.5)[4:].tolist(), updates.tolist()
    ([1, -2], [0.25, 0.0, 0.25])
    """
    flat = _flat_view("updates", updates)
    header_tau = _float32_tau(tau)
    if boundary is not None:
        whole("boundary", boundary, least=0)
    quantum = _quantum(header_tau, flat.dtype, f"tau {tau!r}")
    up = flat >= quantum
    passing = np.flatnonzero(up | (flat <= -quantum))[:boundary]
    if passing.size < 2:
        passing = passing[:0]
    rising = up[passing]
    flat[passing] -= np.where(rising, quantum, -quantum)
    one_based = passing + 1
    return np.concatenate(
        [
            _header(passing.size, flat.size, header_tau, _THRESHOLD_FORM),
            np.where(rising, one_based, -one_based).astype(np.int32),
        ]
    )


def decode_threshold(message: Int32, target: NDArray[Any]) -> None:
    """Add a threshold message to ``target``, in the order of its entries.

    Args:
        message: int32[4 + count].
        target: float16, bfloat16, float32 or float64, contiguous, N elements; modified in place.

    Raises:
        MessageError: the message is inconsistent or has another number of elements, an entry is zero or out of range,
            or tau is too large for the dtype of ``target``; ``target`` is unchanged.
        TypeError: ``message`` is not int32, or ``target`` not an array of one of the four dtypes.
        ValueError: ``target`` is not contiguous or not writable.
    """
    flat = _flat_view("target", target)
    tau, entries = _read_threshold(message, flat.size)
    quantum = _decoded(tau, flat.dtype)
    index = np.abs(entries) - 1
    steps = np.where(entries > 0, quantum, -quantum)
    if np.unique(index).size == index.size:
        flat[index] += steps
    else:
        np.add.at(flat, index, steps)


def encode_bitmap(updates: NDArray[Any], tau: float) -> Int32:
    """Encode every element in two bits, and subtract the encoded values from ``updates``.

    A magnitude of at least tau sets the value bit, and the sign bit if the element is negative. A negative element of
    magnitude at least tau/2 sets the sign bit alone, which stands for -tau/2. Positive elements between tau/2 and tau
    are not sent. This is the rule of Deeplearning4j.

    Args:
        updates: float16, bfloat16, float32 or float64, contiguous, N <= 2^31 - 1 elements; modified in place.
        tau: the threshold, rounded to float32 for the message and to the dtype of ``updates`` for the arithmetic.

    Returns:
        int32[N // 16 + 5]; the last word is unused and zero if N is a multiple of 16.

    Raises:
        TypeError: ``updates`` is not an array of one of the four dtypes.
        ValueError: ``updates`` is not contiguous, not writable or too long; tau or its half is out of range, as float32
            or in the dtype of ``updates``; ``updates`` is unchanged.

    >>> updates = np.array([0.75, -0.5, 0.25, -0.25], np.float32)
    >>> hex(encode_bitmap(updates, 0.5)[4]), updates.tolist()
    ('0xa0003', [0.25, 0.0, 0.25, 0.0])
    """
    flat = _flat_view("updates", updates)
    header_tau = _float32_tau(tau)
    quantum = _quantum(header_tau, flat.dtype, f"tau {tau!r}")
    if header_tau / np.float32(2) == 0:  # as a receiver computes it
        raise ValueError(f"half of tau {tau!r} rounds to 0.0 in float32")
    half = _quantum(quantum / flat.dtype.type(2), flat.dtype, f"half of tau {tau!r}")
    whole = np.abs(flat) >= quantum
    below_zero = flat < 0
    halved = (np.abs(flat) >= half) & below_zero & ~whole
    sign = (whole & below_zero) | halved
    flat[whole] -= np.where(below_zero[whole], -quantum, quantum)
    flat[halved] += half
    return np.concatenate(
        [_header(flat.size, flat.size, header_tau, _BITMAP_FORM), _pack_bitmap(whole, sign)]
    )


def decode_bitmap(message: Int32, target: NDArray[Any]) -> None:
    """Add a bitmap message to ``target``.

    Args:
        message: int32[N // 16 + 5].
        target: float16, bfloat16, float32 or float64, contiguous, N elements; modified in place.

    Raises:
        MessageError: the message is inconsistent or has another number of elements, or tau is too large for the dtype
            of ``target``; ``target`` is unchanged.
        TypeError: ``message`` is not int32, or ``target`` not an array of one of the four dtypes.
        ValueError: ``target`` is not contiguous or not writable.
    """
    flat = _flat_view("target", target)
    tau, value, sign = _read_bitmap(message, flat.size)
    quantum = _decoded(tau, flat.dtype)
    half = flat.dtype.type(np.float32(tau) / np.float32(2))
    flat[value] += np.where(sign[value], -quantum, quantum)
    flat[sign & ~value] -= half


def to_dl4j(message: Message) -> Int32:
    """Convert a ternary message to Deeplearning4j's threshold form.

    Returns:
        int32[4 + count], entries in ascending order of their index.

    Raises:
        MessageError: the message is dense, or has more than 2^31 - 1 elements.
    """
    if not isinstance(message, Message):
        raise TypeError(
            f"message must be a Message, got {type(message).__name__}; see Message.parse"
        )
    if message.kind == "dense":
        raise MessageError("a dense message has no threshold and no Deeplearning4j form")
    if message.numel > MAX_NUMEL:
        raise MessageError(
            f"Deeplearning4j counts to 2^31 - 1 elements, the message has {message.numel}"
        )
    positions, negative = message.entries()
    one_based = positions + 1
    header = _header(positions.size, message.numel, np.float32(message.threshold), _THRESHOLD_FORM)
    return np.concatenate([header, np.where(negative, -one_based, one_based).astype(np.int32)])


def from_dl4j(message: Int32, *, key: int = 0, step: int = 0) -> list[Message]:
    """Convert a Deeplearning4j message of either form to messages of gradwire, which together say exactly the same.

    A threshold of gradwire has 8 significant bits, tau has 24. Where tau does not fit, it is the sum of two or three
    thresholds, and as many messages have the same elements: their sum is tau, without rounding in float32, too. The
    half-threshold symbols of a bitmap have messages of their own, with tau/2.

    Returns:
        One to six messages, for `gradwire.apply_many`.

    Raises:
        MessageError: the message is inconsistent, lists an element twice, or its tau is below 2**-109 and not a sum of
            bfloat16 values.
        TypeError: ``message`` is not int32.

    >>> import gradwire as gw
    >>> updates = np.full(3, 1.5e-3, np.float32)
    >>> messages = from_dl4j(encode_threshold(updates, 1e-3))
    >>> target = np.zeros(3, np.float32)
    >>> gw.apply_many(messages, target)
    >>> len(messages), bool((target == np.float32(1e-3)).all())
    (3, True)
    """
    for name, number in (("key", key), ("step", step)):
        if whole(name, number, least=0) >= 1 << 32:
            raise ValueError(f"{name} is {number}, must be below 2^32")
    numel = _stated_numel(message)
    if int(message[3]) == _BITMAP_FORM:
        tau, value, sign = _read_bitmap(message, numel)
        parts = [(tau, np.flatnonzero(value).astype(np.int64), sign[value])]
        halves = np.flatnonzero(sign & ~value).astype(np.int64)
        if halves.size:
            parts.append((tau / 2, halves, np.ones(halves.size, np.bool_)))
    else:
        tau, entries = _read_threshold(message, numel)
        entries = entries[np.argsort(np.abs(entries), kind="stable")]
        positions = np.abs(entries) - 1
        if np.any(positions[1:] == positions[:-1]):
            raise MessageError("the message lists an element twice, which gradwire's format cannot")
        parts = [(tau, positions, entries < 0)]
    return [
        Message.from_entries(
            positions, negative, numel=numel, threshold=threshold, key=key, step=step
        )
        for total, positions, negative in parts
        for threshold in _thresholds_of(total)
    ]


def _flat_view(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if not isinstance(array, np.ndarray) or array.dtype.name not in _DTYPES:
        kind = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{name} must be a NumPy array of {', '.join(_DTYPES)}, got {kind}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"{name} must be contiguous and writable, because it is modified in place")
    if array.size > MAX_NUMEL:
        raise ValueError(f"Deeplearning4j counts to 2^31 - 1 elements, {name} has {array.size}")
    return array.reshape(-1)


def _float32_tau(tau: float) -> np.float32:
    if not 0.0 < as_number("tau", tau) < math.inf:
        raise ValueError(f"tau must be positive and finite, got {tau!r}")
    with np.errstate(over="ignore", under="ignore"):
        rounded: np.float32 = np.float32(tau)
    if rounded == 0 or np.isinf(rounded):
        raise ValueError(f"tau {tau!r} rounds to {rounded} in float32")
    return rounded


def _quantum(value: Any, dtype: np.dtype[Any], name: str) -> Any:
    """Return tau, or its half, as a number of a dtype; raise `ValueError` where that is zero or infinite."""
    with np.errstate(over="ignore", under="ignore"):
        quantum = dtype.type(value)
    # A quantum of zero would be sent for every element, and none of it subtracted.
    if quantum == 0 or np.isinf(quantum):
        raise ValueError(
            f"{name} rounds to {quantum} in {dtype}, whose range is {_RANGES[dtype.name]}: "
            "use another tau or dtype"
        )
    return quantum


def _decoded(tau: float, dtype: np.dtype[Any]) -> Any:
    """Return tau as a number of a target's dtype, possibly zero."""
    with np.errstate(over="ignore", under="ignore"):
        quantum = dtype.type(tau)
    if np.isinf(quantum):
        raise MessageError(
            f"tau is {tau}, too large for a target of {dtype}, whose range is {_RANGES[dtype.name]}"
        )
    return quantum


def _header(count: int, numel: int, tau: np.float32, form: int) -> Int32:
    return np.array([count, numel, int(tau.view(np.int32)), form], dtype=np.int32)


def _stated_numel(message: Int32) -> int:
    if not isinstance(message, np.ndarray) or message.dtype != np.int32 or message.ndim != 1:
        raise TypeError("a Deeplearning4j message is a 1-D int32 array")
    if message.size < _HEADER_WORDS:
        raise MessageError(f"a message has at least {_HEADER_WORDS} words, got {message.size}")
    if int(message[1]) < 0:
        raise MessageError(f"the message states {message[1]} elements")
    return int(message[1])


def _read_header(message: Int32, numel: int, form: int) -> tuple[int, float]:
    """Return count and tau of a message that must have this form and number of elements."""
    stated = _stated_numel(message)
    if stated != numel:
        raise MessageError(f"a message of {stated} elements does not fit a target of {numel}")
    if int(message[3]) != form:
        raise MessageError(f"the message has form {message[3]}, expected {form}")
    tau = float(message[2:3].view(np.float32)[0])
    if not 0.0 < tau < math.inf:
        raise MessageError(f"tau is {tau}, expected a positive finite number")
    return int(message[0]), tau


def _read_threshold(message: Int32, numel: int) -> tuple[float, Int64]:
    count, tau = _read_header(message, numel, _THRESHOLD_FORM)
    if count != message.size - _HEADER_WORDS:
        raise MessageError(f"count is {count}, {message.size - _HEADER_WORDS} entries follow")
    entries = message[_HEADER_WORDS:].astype(np.int64)
    outside = np.flatnonzero((entries == 0) | (np.abs(entries) > numel))
    if outside.size:
        first = int(outside[0])
        raise MessageError(
            f"{outside.size} entries are out of range for {numel} elements, "
            f"first entry {first}: {entries[first]}"
        )
    return tau, entries


def _read_bitmap(message: Int32, numel: int) -> tuple[float, Flags, Flags]:
    """Return tau, the value bits and the sign bits."""
    count, tau = _read_header(message, numel, _BITMAP_FORM)
    if count != numel or message.size != numel // _WORD_ELEMENTS + 5:
        raise MessageError(
            f"a bitmap of {numel} elements has {numel // _WORD_ELEMENTS + 5} words and that count, "
            f"got {message.size} words and count {count}"
        )
    octets = np.ascontiguousarray(message[_HEADER_WORDS:], dtype="<i4").view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little").reshape(-1, 2, _WORD_ELEMENTS) != 0
    value = bits[:, 0].reshape(-1)
    sign = bits[:, 1].reshape(-1)
    if value[numel:].any() or sign[numel:].any():
        raise MessageError(f"bits beyond element {numel - 1} are set")
    return tau, value[:numel], sign[:numel]


def _pack_bitmap(value: Flags, sign: Flags) -> Int32:
    bits = np.zeros((value.size // _WORD_ELEMENTS + 1, 2, _WORD_ELEMENTS), dtype=np.bool_)
    for row, flags in enumerate((value, sign)):
        padded = np.zeros(bits.shape[0] * _WORD_ELEMENTS, dtype=np.bool_)
        padded[: flags.size] = flags
        bits[:, row] = padded.reshape(-1, _WORD_ELEMENTS)
    words = np.packbits(bits.reshape(-1), bitorder="little").view("<i4")
    return words.astype(np.int32)


def _thresholds_of(tau: float) -> list[float]:
    """Return the bfloat16 values, from the largest to the smallest, whose sum is tau, a float32 value."""
    thresholds = []
    rest = np.float32(tau)
    while rest > 0:
        # Rounded towards zero: all parts are positive, and the largest tau does not become infinite.
        bits = rest.view(np.uint32) & np.uint32(0xFFFF0000)
        part = bits.view(np.float32)
        if part == 0:
            raise MessageError(
                f"tau {tau!r} is not a sum of bfloat16 values, which gradwire's format needs: the values of this "
                "size have fewer digits"
            )
        thresholds.append(float(part))
        rest = rest - part
    return thresholds
