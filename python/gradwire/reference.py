"""The message format and the encoder in plain NumPy: executable specification and test oracle.

Every compiled backend gives the same bytes and the same residual. ``docs/message-format.md`` uses the same names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import policy as rules
from .errors import MessageError, NonFiniteUpdate
from .policy import ResidualClip, SampledQuantiles, ShakeUp, ThresholdPolicy, round_threshold

# The kinds of messages.
TERNARY = 1
DENSE = 2
MAX_NUMEL = 2**48
HEADER_BYTES = 48
MAX_VARINT_BYTES = 7
_HEADER = struct.Struct("<4s4BH2B3I3Q")
# The dtypes of dense messages by their numbers. NumPy has no bfloat16: its bits are stored as uint16.
_DENSE_DTYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 3: np.dtype("<u2")}

Bits = NDArray[np.uint8]
Positions = NDArray[np.int64]
Signs = NDArray[np.bool_]
Values = NDArray[Any]


def _require(condition: Any, sentence: str) -> None:
    if not condition:
        raise MessageError(sentence)


def chunk_exponent(count: int) -> int:
    """Return e: a chunk has 2^e changed elements, about four times the square root of the count."""
    return max(8, (max(count, 1) - 1).bit_length() // 2 + 2)


def rice_parameter(listed: int, span: int) -> int:
    """Return k, the number of remainder bits (``docs/algorithm.md`` derives the rule)."""
    return (32 * (2 * span - listed) // (133 * listed)).bit_length() if listed else 0


class Chunk:
    """The shape of a chunk, which follows from its numbers of changed (C) and unchanged (U) elements."""

    def __init__(self, begin: int, changed: int, unchanged: int) -> None:
        self.begin = begin
        self.changed = changed
        self.unchanged = unchanged
        self.span = changed + unchanged  # S
        self.inverted = 20 * unchanged <= 7 * self.span  # then the unchanged elements are listed
        self.listed = unchanged if self.inverted else changed  # n
        self.k = rice_parameter(self.listed, self.span)
        self.fixed_bits = self.listed * self.k + changed  # remainders and signs


_CRC32C_TABLE = list(range(256))
for _ in range(8):
    _CRC32C_TABLE = [(crc >> 1) ^ (0x82F63B78 if crc & 1 else 0) for crc in _CRC32C_TABLE]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``; ``crc32c(b"123456789") == 0xE3069283``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Header:
    """The 48 bytes before every payload, in the order of the bytes."""

    magic: bytes = b"GRDW"
    version: int = 1
    kind: int = TERNARY
    flags: int = 0
    exponent: int = 0
    threshold_bits: int = 0
    dtype: int = 0
    reserved: int = 0
    key: int = 0
    step: int = 0
    crc: int = 0
    numel: int = 0
    count: int = 0
    payload_bytes: int = 0

    @property
    def threshold(self) -> float:
        """The threshold as a number; 0.0 in a dense message."""
        return float(np.uint32(self.threshold_bits << 16).view(np.float32))

    @staticmethod
    def unpack(data: bytes) -> Header:
        """Return the header of ``data``; only the length is checked."""
        _require(len(data) >= HEADER_BYTES, f"a message has at least 48 bytes, got {len(data)}")
        return Header(*_HEADER.unpack_from(data))


def seal(header: Header, payload: bytes) -> bytes:
    """Return header and payload with the CRC, computed over the message with a CRC of zero; nothing is validated."""
    crc = crc32c(_HEADER.pack(*astuple(replace(header, crc=0))) + payload)
    return _HEADER.pack(*astuple(replace(header, crc=crc))) + payload


def encode_ternary(
    positions: ArrayLike, negative: ArrayLike, *, numel: int, threshold: float, **header: Any
) -> bytes:
    """Encode changes of the elements at ``positions``: by minus threshold where ``negative``, else by plus threshold.

    ``positions`` are strictly ascending. ``header`` has the fields key, step and flags. Raises ValueError for arguments
    that do not describe a message.
    """
    where = np.asarray(positions, np.int64)
    minus = np.asarray(negative, np.bool_)
    if where.ndim != 1 or where.shape != minus.shape:
        raise ValueError(f"positions and negative must be 1-D and of one length, got {where.shape}")
    if numel > MAX_NUMEL or np.any(np.diff(where, prepend=-1, append=numel) <= 0):
        raise ValueError(f"positions must ascend and be below numel, {numel}, at most 2^48")
    if round_threshold(threshold) != threshold:
        raise ValueError(f"threshold {threshold!r} is not a bfloat16 value")
    exponent = chunk_exponent(where.size)
    directory = b""
    streams = [np.zeros(0, np.uint8)]
    begin = 0
    for first in range(0, where.size, 1 << exponent):
        part = slice(first, first + (1 << exponent))
        inside = where[part] - begin  # counted from the chunk's begin
        last = part.stop >= where.size
        span = numel - begin if last else int(inside[-1]) + 1
        chunk = Chunk(begin, inside.size, span - inside.size)
        quotient_sum, bits = _chunk_bits(chunk, inside, minus[part])
        streams += bits
        if not last:
            directory += _varint(chunk.unchanged) + (_varint(quotient_sum) if chunk.k else b"")
        begin += span
    payload = directory + np.packbits(np.concatenate(streams), bitorder="little").tobytes()
    bfloat16 = int(np.float32(threshold).view(np.uint32)) >> 16
    header |= {"numel": numel, "count": where.size, "payload_bytes": len(payload)}
    return seal(Header(exponent=exponent, threshold_bits=bfloat16, **header), payload)


def encode_dense(values: NDArray[Any], **header: Any) -> bytes:
    """Encode raw values: float32, float64, or uint16 with the bits of bfloat16 values."""
    dtype = {"float32": 1, "float64": 2, "uint16": 3}.get(values.dtype.name)
    if dtype is None:
        raise TypeError(f"a dense message has float32, float64 or uint16, not {values.dtype}")
    payload = values.astype(_DENSE_DTYPES[dtype]).tobytes()
    header |= {"numel": values.size, "count": values.size, "payload_bytes": len(payload)}
    return seal(Header(kind=DENSE, dtype=dtype, **header), payload)


def _chunk_bits(chunk: Chunk, inside: Positions, signs: Signs) -> tuple[int, list[Bits]]:
    """Return the sum of quotients, and remainders, signs and quotients with one byte per bit."""
    listed = np.setdiff1d(np.arange(chunk.span), inside) if chunk.inverted else inside
    distances = np.diff(listed, prepend=-1) - 1
    quotients = distances >> chunk.k
    remainders = (distances[:, None] >> np.arange(chunk.k)) & 1
    unary = np.zeros(int(quotients.sum()) + quotients.size, np.uint8)
    unary[np.cumsum(quotients + 1) - 1] = 1
    bits = [remainders.astype(np.uint8).reshape(-1), signs.astype(np.uint8), unary]
    return int(quotients.sum()), bits


def _varint(value: int) -> bytes:
    low = bytes([value & 127 | (128 if value >= 128 else 0)])
    return low + _varint(value >> 7) if value >= 128 else low


class Message(NamedTuple):
    """A valid message: the header, and either chunks and entries (ternary) or values (dense; bfloat16 as float32)."""

    header: Header
    chunks: tuple[Chunk, ...] = ()
    positions: Positions = np.zeros(0, np.int64)
    negative: Signs = np.zeros(0, np.bool_)
    values: NDArray[Any] = np.zeros(0, np.float32)

    @property
    def kind(self) -> str:
        """Either "dense", "bitmap" (there are chunks, and all have k = 0) or "sparse"."""
        bitmap = self.chunks and not any(chunk.k for chunk in self.chunks)
        return "dense" if self.header.kind == DENSE else "bitmap" if bitmap else "sparse"


def parse(data: bytes) -> Message:
    """Validate and decode one message. Raise MessageError unless ``data`` is the valid spelling of one."""
    header = Header.unpack(data)
    _check_header(header)
    rest = len(data) - HEADER_BYTES - header.payload_bytes
    _require(rest >= 0, f"{-rest} payload bytes are missing")
    _require(rest == 0, f"{rest} bytes follow a message")
    payload = data[HEADER_BYTES:]
    crc = Header.unpack(seal(header, payload)).crc
    _require(crc == header.crc, f"CRC-32C is {crc:#010x}, the header states {header.crc:#010x}")
    if header.kind == TERNARY:
        return Message(header, *_ternary_entries(header, payload))
    values = np.frombuffer(payload, _DENSE_DTYPES[header.dtype]).copy()
    if header.dtype == 3:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Message(header, values=values)


def decode(data: bytes) -> NDArray[Any]:
    """Return the decoded update: float32[numel], or float64[numel] of a dense float64 message."""
    header, _, positions, negative, values = parse(data)
    if header.kind == DENSE:
        return values
    update = np.zeros(header.numel, np.float32)
    update[positions] = np.where(negative, -header.threshold, header.threshold)
    return update


def apply(data: bytes, target: NDArray[Any], scale: float = 1.0) -> None:
    """Add scale * threshold, rounded once to float32, or scale * value, rounded once to the dtype of ``target``."""
    header, _, positions, negative, values = parse(data)
    _require(header.numel == target.size, f"{header.numel} elements do not fit {target.size}")
    if header.kind == DENSE:
        target += (scale * values.astype(np.float64)).astype(target.dtype)
    else:
        quantum = target.dtype.type(np.float32(scale * header.threshold))
        target[positions] += np.where(negative, -quantum, quantum)


def _check_header(h: Header) -> None:
    _require(h.magic == b"GRDW", f"magic is {h.magic!r}, must be GRDW")
    _require(h.version == 1, f"version is {h.version}, must be 1")
    _require(h.kind in (TERNARY, DENSE), f"kind is {h.kind}, must be 1 (ternary) or 2 (dense)")
    _require(h.flags <= (h.kind == TERNARY), f"flags are {h.flags}, must be 0, or 1 if ternary")
    _require(h.reserved == 0, f"the reserved byte is {h.reserved}, must be 0")
    _require(h.numel <= MAX_NUMEL, f"numel is {h.numel}, must be at most 2^48")
    _require(h.count <= h.numel, f"count is {h.count}, more than numel {h.numel}")
    if h.kind == TERNARY:
        _require(0 < h.threshold_bits < 0x7F80, f"threshold has the bits {h.threshold_bits:#06x}")
        _require(h.dtype == 0, f"dtype is {h.dtype}, must be 0 in a ternary message")
        _require(h.exponent == chunk_exponent(h.count), f"exp is {h.exponent} for count {h.count}")
    else:
        _require(h.dtype in _DENSE_DTYPES, f"dtype is {h.dtype}, must be 1, 2 or 3 if dense")
        _require(h.threshold_bits == h.exponent == 0, "threshold and exp must be 0 if dense")
        _require(h.count == h.numel, f"count is {h.count}, must be numel {h.numel} if dense")
        nbytes = h.numel * _DENSE_DTYPES[h.dtype].itemsize
        _require(h.payload_bytes == nbytes, f"{h.payload_bytes} payload bytes for {nbytes}")


def _ternary_entries(header: Header, payload: bytes) -> tuple[tuple[Chunk, ...], Positions, Signs]:
    count = header.count
    nbytes = len(payload)
    _require(count > 0 or nbytes == 0, f"{nbytes} payload bytes, but nothing changed")
    _require(count <= 8 * nbytes, f"{nbytes} payload bytes cannot hold {count} signs")
    positions = [np.zeros(0, np.int64)]
    signs = [np.zeros(0, np.bool_)]
    directory = list(_read_directory(header, payload)) if count else []
    stream = payload[directory[-1][2] :] if count else b""
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")
    offset = 0
    for index, (chunk, stated, _) in enumerate(directory):
        end = offset + chunk.fixed_bits + chunk.listed
        # The last quotient of the message ends with the last one of the stream.
        final = bits.size - int(np.argmax(bits[::-1])) - end if chunk.listed else 0
        quotient_sum = final if stated is None else stated
        possible = quotient_sum << chunk.k <= chunk.span - chunk.listed
        _require(possible, f"chunk {index}: quotients sum to {quotient_sum}, too many")
        end += quotient_sum
        _require(quotient_sum >= 0 and end <= bits.size, f"chunk {index} needs bits up to {end}")
        positions.append(_chunk_positions(chunk, bits[offset:end], index, stated is None))
        signs.append(bits[offset + chunk.listed * chunk.k :][: chunk.changed] != 0)
        offset = end
    padding = bits[offset:]
    _require(padding.size < 8 and not padding.any(), "padding must be fewer than 8 bits, all zero")
    chunks = tuple(chunk for chunk, _, _ in directory)
    return chunks, np.concatenate(positions), np.concatenate(signs)


def _read_directory(header: Header, payload: bytes) -> Iterator[tuple[Chunk, int | None, int]]:
    """Yield each chunk, its sum of quotients (None for the last), and the byte after its entry."""
    offset = begin = 0
    left = header.count
    while left > 1 << header.exponent:
        unchanged, offset = _read_varint(payload, offset)
        chunk = Chunk(begin, 1 << header.exponent, unchanged)
        # With k = 0, d = q and the listed elements end with the chunk (an inverted chunk with n > 0 has k > 0).
        quotient_sum = chunk.span - chunk.listed if chunk.listed else 0
        if chunk.k > 0:
            quotient_sum, offset = _read_varint(payload, offset)
        yield chunk, quotient_sum, offset
        begin += chunk.span
        left -= chunk.changed
        _require(begin + left <= header.numel, f"too few of {header.numel} elements for the rest")
    yield Chunk(begin, left, header.numel - begin - left), None, offset


def _read_varint(payload: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(payload[offset : offset + MAX_VARINT_BYTES]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            _require(byte > 0 or index == 0, f"superfluous zero byte in the varint at {offset}")
            return value, offset + index + 1
    raise MessageError(f"varint at {offset} is cut off or has more than {MAX_VARINT_BYTES} bytes")


def _chunk_positions(chunk: Chunk, bits: Bits, index: int, last: bool) -> Positions:
    """Return the changed elements from the chunk's bits."""
    unary = bits[chunk.fixed_bits :]
    ones = np.flatnonzero(unary).astype(np.int64)
    complete = ones.size == chunk.listed and unary[-1:].all()
    _require(complete, f"chunk {index}: {ones.size} quotients end in its bits, not {chunk.listed}")
    quotients = np.diff(ones, prepend=-1) - 1
    fields = bits[: chunk.listed * chunk.k].reshape(chunk.listed, chunk.k).astype(np.int64)
    remainders = (fields << np.arange(chunk.k)).sum(axis=1, dtype=np.int64)
    listed = np.cumsum((quotients << chunk.k) + remainders + 1) - 1
    end = int(listed[-1]) + 1 if listed.size else 0
    limit = chunk.span - (chunk.inverted and not last)
    fits = end <= limit and (last or chunk.inverted or end == limit)
    _require(fits, f"chunk {index}: the listed elements end at {end} of {chunk.span}")
    inside = np.setdiff1d(np.arange(chunk.span), listed) if chunk.inverted else listed
    return chunk.begin + inside


def sample_quantiles(
    before: Values,
    update: Values | None,
    after: Values,
    density: float,
    rounding_point: float = 1.0,
    turn: int = 0,
) -> SampledQuantiles | None:
    """Return the sampled quantiles that ``TargetDensity`` predicts from (``docs/algorithm.md``); None for no elements.

    ``before`` is the residual before the update, ``after`` the residual after encoding. If the caller had already added
    the update, ``update`` is None and its effect unknown: all four are quantiles of the residual. The quantiles are
    divided by ``rounding_point``.
    Every so many groups of 16 one is sampled; the first is the one with the number ``turn``, or as many before.
    """
    if (numel := before.size) == 0:
        return None
    if update is None:
        update = np.zeros_like(before)
        after = before
    stride = -(-numel // math.ceil(min(max(640 / density, 2**12), 2**18))) | 1  # groups of 16
    i = np.flatnonzero(np.arange(numel) // 16 % stride == turn % stride)
    j = np.where(i ^ 8 < numel, i ^ 8, i)
    with np.errstate(over="ignore", invalid="ignore"):
        signs = np.sign(before[i]) * np.sign(update[i])
        pairs = ((before, i), (before, j), (after, j), (after, i))  # now, shuffled, next, same
        sums = [residual[i] + update[k] for residual, k in pairs]
    bits = [_magnitude_bits(total) for total in sums]
    quantiles = (_quantile(magnitudes, density) / rounding_point for magnitudes in bits)
    now, shuffled, following, same = quantiles
    moving = np.count_nonzero(bits[0]) / i.size
    floor = _floor(bits[0], density) / rounding_point
    agreeing = np.count_nonzero(signs > 0)
    either = np.count_nonzero(abs(signs) > 0)
    agreement = agreeing / either if either else 0.5
    return SampledQuantiles(now, shuffled, following, same, agreement, moving, floor)


def _magnitude_bits(values: NDArray[Any]) -> NDArray[np.uint32]:
    with np.errstate(over="ignore"):
        return abs(values).astype(np.float32).view(np.uint32)


def _filled_bins(bits: NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
    """Yield the bins of magnitudes and their counts, highest first. Zero and non-finite magnitudes are in no bin.

    The number of a bin is the upper 15 bits of a float32: an exponent, and 6 bits of the fraction.
    """
    bins, counts = np.unique(bits[(bits > 0) & (bits < 0x7F800000)] >> 17, return_counts=True)
    return zip(bins[::-1].tolist(), counts[::-1].tolist(), strict=True)


def _floor(bits: NDArray[np.uint32], density: float) -> float:
    """Return 9/32 of the mean of the magnitudes that move, or 0 if the quantile of the density can be followed.

    It can if the elements that reach the quantile are as many as ``density`` asks for, and their mean is at most 32/9
    of it: with a rounding point of 9/16 they hold two thresholds on the average. Otherwise the elements that move are
    those down to the lowest bin, not below the quantile, of which that is true.

    Sums are of integers, so that every order of the additions gives the same: in halves of the least step of a fraction
    30 octaves below the largest magnitude, below which everything counts as zero.
    """
    above = weight = top = 0
    floor = 0.0
    for number, inside in _filled_bins(bits):
        top = top or number >> 6
        scale = 1 << 30 >> top - (number >> 6)
        edge = 2 * (64 + number % 64) * scale
        above += inside
        weight += inside * (edge + scale)
        is_even = 9 * weight <= 32 * above * edge
        is_reached = above >= density * bits.size
        if is_even:
            if is_reached:
                return 0.0
            floor = math.ldexp(float(9 * weight) / float(32 * above), top - 30 - 127 - 7)
        if is_reached:
            break
    return floor


def _quantile(bits: NDArray[np.uint32], density: float) -> float:
    """Return about the magnitude that ``density`` of the elements reach or exceed, linear inside a bin."""
    want = density * bits.size
    above = 0
    low = 0.0
    for number, inside in _filled_bins(bits):
        ends = np.array([number << 17, min(number + 1 << 17, 0x7F7FFFFF)], "u4")
        low, high = ends.view("f4").tolist()
        if above + inside >= want:
            return float(high - (high - low) * ((want - above) / inside))
        above += inside
    return low


class ReferenceEncoder:
    """The semantics of ``gradwire.Encoder``, on whole arrays.

    >>> from gradwire.policy import FixedThreshold
    >>> encoder = ReferenceEncoder(4, FixedThreshold(1.0))
    >>> message = encoder.encode(np.array([0.5, -1.5, 1.0, 0.0], np.float32))
    >>> decode(message).tolist(), encoder.residual.tolist()
    ([0.0, -1.0, 1.0, 0.0], [0.5, -0.5, 0.0, 0.0])
    """

    def __init__(
        self,
        numel: int,
        threshold: ThresholdPolicy,
        *,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        dtype: str = "float32",
        key: int = 0,
        on_nonfinite: str = "raise",
    ) -> None:
        self.residual: NDArray[Any] = np.zeros(numel, dtype)
        self.threshold, self._policy_state = rules.begin(threshold)
        self.step = self.changed_at = 0
        self.nonfinite_count = self.clipped_count = 0
        self.clipped_sum = 0.0
        self._policy = threshold
        self._shakeup = shakeup
        self._clip = clip
        self._key = key
        self._raises = on_nonfinite == "raise"

    def encode(self, update: NDArray[Any] | None = None) -> bytes:
        """Add ``update`` to the residual, subtract ±threshold where it is reached, and encode these elements."""
        shakeup = self._shakeup if self._shakeup and self._shakeup.is_due(self.step) else None
        before = self.residual.copy()
        numel = self.residual.size
        age = self.step - self.changed_at
        density = rules.sampled_density(self._policy, age, self._policy_state)
        point = rules.rounding_point_of(self._policy)
        turn = rules.sample_turn(age)
        if self._policy_state.trend < 0:  # the first threshold is still to be learned
            first = sample_quantiles(before, update, before, density, point, turn)
            if first is not None:
                self.threshold = rules.learned_threshold(self._policy, self.threshold, first)
        used = self.threshold
        threshold = round_threshold(used / (shakeup.divisor if shakeup else 1.0))
        quantum = self.residual.dtype.type(threshold)
        bad = self._accumulate(update)
        passing = np.flatnonzero(np.abs(self.residual) >= quantum * quantum.dtype.type(point))
        reached = passing.size
        sent = np.copysign(quantum, self.residual[passing])
        self.residual[passing] -= sent
        after = self.residual.copy()
        is_held_back = False
        if not (bad.size and self._raises) and reached > self._most_changed(shakeup is not None):
            self.residual[passing] += sent
            passing, threshold = self._largest(passing, point)
            is_held_back = True
            sent = np.copysign(self.residual.dtype.type(threshold), self.residual[passing])
            self.residual[passing] -= sent
        if bad.size and self._raises:
            self.residual[passing] += sent
        self._count_nonfinite(bad)
        header = {"key": self._key, "step": self.step % 2**32, "flags": int(shakeup is not None)}
        message = encode_ternary(passing, sent < 0, numel=numel, threshold=threshold, **header)
        if shakeup is None and numel > 0:
            quantiles = None
            if density:
                quantiles = sample_quantiles(before, update, after, density, point, turn)
                if quantiles and is_held_back:
                    quantiles = quantiles.held_back(age)
            self.threshold, self._policy_state = rules.follow(
                self._policy, used, reached / numel, age, quantiles, self._policy_state
            )
            if self.threshold != used and not isinstance(self._policy, rules.TargetDensity):
                self.changed_at = self.step + 1
        if self._clip is not None and self._clip.is_due(self.step):
            bound = self.residual.dtype.type(self._clip.limit * round_threshold(used))
            removed = self.residual.astype(np.float64) - np.clip(self.residual, -bound, bound)
            self.clipped_count += int(np.count_nonzero(removed))
            self.clipped_sum += math.fsum(removed.tolist())
            np.clip(self.residual, -bound, bound, out=self.residual)
        self.step += 1
        return message

    def _most_changed(self, is_shakeup: bool) -> int:
        """Return the most changed elements of a message."""
        is_bounded = isinstance(self._policy, rules.TargetDensity) and not is_shakeup
        numel = self.residual.size
        return self._policy.most_changed(numel) if is_bounded else numel  # type: ignore[attr-defined]

    def _largest(self, passing: Positions, point: float) -> tuple[Positions, float]:
        """Return the largest of the elements that reach the threshold, and the threshold of their message.

        Magnitudes are compared by the largest bfloat16 values up to them. Of equal ones those with the lowest index
        come first.
        """
        most = self._most_changed(is_shakeup=False)
        magnitudes = abs(self.residual[passing])
        bits = _magnitude_bits(magnitudes)
        bins = (bits.astype(np.int64) - (bits.view(np.float32) > magnitudes)) >> 16
        order = np.argsort(-bins, kind="stable")
        edge = float(np.uint32(bins[order[most]] << 16).view(np.float32))
        threshold = min(max(edge / point, 2.0**-133), 255.0 * 2.0**120)
        return passing[np.sort(order[:most])], round_threshold(threshold)

    def encode_dense(self, update: NDArray[Any] | None = None, *, bfloat16: bool = False) -> bytes:
        """Add ``update`` to the residual and send all of it; the residual keeps only the rounding error."""
        self._count_nonfinite(self._accumulate(update))
        values = self.residual
        if bfloat16:  # round to float32 and then to nearest-even, but no finite value to infinity
            most = 255.0 * 2.0**120
            bits = np.clip(values, -most, most).astype(np.float32).view(np.uint32).astype(np.int64)
            values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        message = encode_dense(values, key=self._key, step=self.step % 2**32)
        self.residual -= decode(message).astype(self.residual.dtype)
        self.step += 1
        return message

    def _accumulate(self, update: NDArray[Any] | None) -> NDArray[np.intp]:
        """Add where the sum is finite; elsewhere keep the finite summand, or zero. Return the indexes of the latter."""
        added = np.zeros_like(self.residual)
        added[:] = 0.0 if update is None else update
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.residual.copy() if update is None else self.residual + added  # keeps -0.0
        bad = np.flatnonzero(~np.isfinite(total))
        for index in bad:
            finite = [part[index] for part in (self.residual, added) if np.isfinite(part[index])]
            total[index] = finite[0] if finite else 0.0
        self.residual[:] = total
        return bad

    def _count_nonfinite(self, bad: NDArray[np.intp]) -> None:
        if bad.size and self._raises:
            raise NonFiniteUpdate(f"{bad.size} elements are not finite", bad.size, int(bad[0]))
        self.nonfinite_count += bad.size
