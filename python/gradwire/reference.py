"""The message format and the encoder in plain NumPy: executable specification and test oracle.

Every compiled backend must give the same bytes and the same residual, bit for bit. This module is
written to be read next to ``docs/message-format.md``; it uses arrays so that it stays quick enough
for tests, and it favours the shortest correct spelling over speed everywhere else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradwire.errors import MessageError, NonFiniteUpdate
from gradwire.policy import ResidualClip, ShakeUp, Tail, ThresholdPolicy, round_threshold

__all__ = [
    "Chunk",
    "Header",
    "Message",
    "ReferenceEncoder",
    "apply",
    "chunk_exponent",
    "crc32c",
    "decode",
    "encode_dense",
    "encode_ternary",
    "entries",
    "parse",
    "parse_many",
    "rice_parameter",
    "tail_quantiles",
]

MAGIC = b"GRDW"
VERSION = 1
TERNARY = 1
DENSE = 2
FLAG_SHAKEUP = 1
MAX_NUMEL = 2**48
MAX_VARINT_BYTES = 7
HEADER_BYTES = 48
_HEADER = struct.Struct("<4s4BH2B3I3Q")
_CRC_OFFSET = 20

# The dense dtypes by their number on the wire. NumPy has no bfloat16, so its bits travel as uint16.
_DENSE_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<u2"),
}

Bits = NDArray[np.uint8]
Positions = NDArray[np.int64]
Signs = NDArray[np.bool_]


# --- the integer functions that everybody must agree on -------------------------------------------


def chunk_exponent(count: int) -> int:
    """Return e: a chunk holds 2^e changed elements, about twice the square root of all of them."""
    return max(8, (max(count, 1) - 1).bit_length() // 2 + 2)


def rice_parameter(listed: int, span: int) -> int:
    """Return k, the number of remainder bits, for ``listed`` elements among ``span``.

    The mean distance in units of the break-even distance 133/64, doubled for each further bit.

    Source: Golomb 1966, "Run-length encodings"; the golden-ratio rule for powers of two is derived
    in ``docs/algorithm.md``.
    """
    if listed == 0:
        return 0
    return (32 * (2 * span - listed) // (133 * listed)).bit_length()


@dataclass(frozen=True)
class Chunk:
    """The shape of a chunk: all that follows from its numbers of changed and unchanged elements."""

    begin: int
    changed: int
    unchanged: int

    @property
    def span(self) -> int:
        """Number of elements the chunk covers (S)."""
        return self.changed + self.unchanged

    @property
    def inverted(self) -> bool:
        """Whether the unchanged elements are listed, since nearly all changed."""
        return 20 * self.unchanged <= 7 * self.span

    @property
    def listed(self) -> int:
        """Number of listed elements (n)."""
        return self.unchanged if self.inverted else self.changed

    @property
    def k(self) -> int:
        """Rice parameter."""
        return rice_parameter(self.listed, self.span)

    @property
    def fixed_bits(self) -> int:
        """Bits of the remainders and signs together."""
        return self.listed * self.k + self.changed

    def quotient_sum_without_entry(self) -> int:
        """Return Q of a chunk with k = 0, where the directory leaves it out.

        Then d = q, and the last listed element is the last of the chunk (or none is listed): the
        inverted polarity with n > 0 always has k > 0, because 32 * (2 - 7/20) / (133 * 7/20) > 1.
        """
        return 0 if self.listed == 0 else self.span - self.listed


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC32C_TABLE = _crc32c_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``; ``crc32c(b"123456789") == 0xE3069283``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


# --- header ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """The 48 bytes in front of every payload, as plain numbers."""

    kind: int
    flags: int
    exponent: int
    threshold_bits: int
    dtype: int
    key: int
    step: int
    numel: int
    count: int
    payload_bytes: int
    version: int = VERSION
    reserved: int = 0
    magic: bytes = MAGIC

    @property
    def threshold(self) -> float:
        """The threshold as a number; 0.0 in a dense message."""
        return float(struct.unpack("<f", struct.pack("<I", self.threshold_bits << 16))[0])

    @property
    def is_shakeup(self) -> bool:
        """Whether this is a shake-up message."""
        return bool(self.flags & FLAG_SHAKEUP)

    def pack(self, crc: int = 0) -> bytes:
        """Return the 48 bytes, with ``crc`` in its place."""
        return _HEADER.pack(
            self.magic,
            self.version,
            self.kind,
            self.flags,
            self.exponent,
            self.threshold_bits,
            self.dtype,
            self.reserved,
            self.key,
            self.step,
            crc,
            self.numel,
            self.count,
            self.payload_bytes,
        )

    @staticmethod
    def unpack(data: bytes) -> tuple[Header, int]:
        """Return the header of ``data`` and the CRC it states; only the length is checked."""
        if len(data) < HEADER_BYTES:
            raise MessageError(f"a message has at least {HEADER_BYTES} bytes, got {len(data)}")
        (
            magic,
            version,
            kind,
            flags,
            exponent,
            threshold_bits,
            dtype,
            reserved,
            key,
            step,
            crc,
            numel,
            count,
            payload_bytes,
        ) = _HEADER.unpack_from(data)
        header = Header(
            kind=kind,
            flags=flags,
            exponent=exponent,
            threshold_bits=threshold_bits,
            dtype=dtype,
            key=key,
            step=step,
            numel=numel,
            count=count,
            payload_bytes=payload_bytes,
            version=version,
            reserved=reserved,
            magic=magic,
        )
        return header, crc


def seal(header: Header, payload: bytes) -> bytes:
    """Join header and payload and write the CRC; nothing is validated."""
    return header.pack(crc32c(header.pack() + payload)) + payload


# --- encoding -------------------------------------------------------------------------------------


def encode_ternary(
    positions: ArrayLike,
    negative: ArrayLike,
    *,
    numel: int,
    threshold: float,
    key: int = 0,
    step: int = 0,
    shakeup: bool = False,
) -> bytes:
    """Encode which elements change, and which of them by minus the threshold.

    Args:
        positions: int64[count], strictly ascending indexes of the changed elements, below
            ``numel``.
        negative: bool[count], True where the element gets -threshold.
        numel: elements in the update.
        threshold: a positive bfloat16 value.
        key: index of the group of parameters.
        step: the encoder's step; taken modulo 2^32.
        shakeup: whether to flag the message as a shake-up.

    Raises:
        ValueError: the arguments do not describe a message.
    """
    where = np.asarray(positions, dtype=np.int64)
    minus = np.asarray(negative, dtype=np.bool_)
    _check_entries(where, minus, numel)
    if round_threshold(threshold) != threshold:
        raise ValueError(f"threshold {threshold!r} is not a bfloat16 value")
    exponent = chunk_exponent(where.size)
    directory = bytearray()
    streams: list[Bits] = []
    for chunk, inside, signs, last in _split(where, minus, numel, exponent):
        quotient_sum, bits = _chunk_bits(chunk, inside, signs)
        streams.extend(bits)
        if not last:
            directory += _varint(chunk.unchanged)
            if chunk.k > 0:
                directory += _varint(quotient_sum)
    stream = np.packbits(np.concatenate(streams), bitorder="little").tobytes() if streams else b""
    payload = bytes(directory) + stream
    header = Header(
        kind=TERNARY,
        flags=FLAG_SHAKEUP if shakeup else 0,
        exponent=exponent,
        threshold_bits=_float32_bits(threshold) >> 16,
        dtype=0,
        key=key,
        step=step % 2**32,
        numel=numel,
        count=where.size,
        payload_bytes=len(payload),
    )
    return seal(header, payload)


def encode_dense(values: NDArray[Any], *, key: int = 0, step: int = 0) -> bytes:
    """Encode raw values: float32, float64, or uint16 holding the bits of bfloat16 values.

    Raises:
        TypeError: ``values`` has another dtype.
    """
    numbers = {dtype: number for number, dtype in _DENSE_DTYPES.items()}
    flat = np.ascontiguousarray(values).reshape(-1)
    number = numbers.get(flat.dtype.newbyteorder("<"))
    if number is None:
        raise TypeError(
            f"a dense message holds float32, float64 or uint16 (bfloat16 bits), not {flat.dtype}"
        )
    payload = flat.astype(_DENSE_DTYPES[number]).tobytes()
    header = Header(
        kind=DENSE,
        flags=0,
        exponent=0,
        threshold_bits=0,
        dtype=number,
        key=key,
        step=step % 2**32,
        numel=flat.size,
        count=flat.size,
        payload_bytes=len(payload),
    )
    return seal(header, payload)


def _check_entries(where: Positions, minus: Signs, numel: int) -> None:
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel must be in 0 ... 2^48, got {numel}")
    if where.ndim != 1 or where.shape != minus.shape:
        raise ValueError(
            f"positions {where.shape} and negative {minus.shape} must be 1-D and of one length"
        )
    if where.size and (where[0] < 0 or where[-1] >= numel or bool(np.any(where[1:] <= where[:-1]))):
        raise ValueError(f"positions must be strictly ascending and in 0 ... {numel - 1}")


def _float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _split(
    where: Positions, minus: Signs, numel: int, exponent: int
) -> Iterator[tuple[Chunk, Positions, Signs, bool]]:
    """Yield each chunk, its changed elements counted from its begin, signs, and whether last."""
    size = 1 << exponent
    begin = 0
    for first in range(0, where.size, size):
        inside = where[first : first + size] - begin
        last = first + size >= where.size
        span = numel - begin if last else int(inside[-1]) + 1
        yield (
            Chunk(begin, inside.size, span - inside.size),
            inside,
            minus[first : first + size],
            last,
        )
        begin += span


def _chunk_bits(chunk: Chunk, inside: Positions, signs: Signs) -> tuple[int, list[Bits]]:
    """Return the sum of quotients, and remainders, signs and quotients as one byte per bit."""
    listed = inside
    if chunk.inverted:
        unchanged = np.ones(chunk.span, dtype=np.bool_)
        unchanged[inside] = False
        listed = np.flatnonzero(unchanged).astype(np.int64)
    distances = np.diff(listed, prepend=-1) - 1
    quotients = distances >> chunk.k
    remainders = (distances[:, None] >> np.arange(chunk.k)) & 1
    ends = np.cumsum(quotients + 1)
    unary = np.zeros(int(ends[-1]) if ends.size else 0, dtype=np.uint8)
    unary[ends - 1] = 1
    return int(quotients.sum()), [
        remainders.astype(np.uint8).reshape(-1),
        signs.astype(np.uint8),
        unary,
    ]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# --- decoding -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Message:
    """A parsed message: the header and either entries or values.

    Attributes:
        header: the header.
        chunks: the chunks' shapes (ternary only).
        positions: int64[count], ascending; empty in a dense message.
        negative: bool[count]; empty in a dense message.
        values: float32[numel] or float64[numel] of a dense message, bfloat16 widened to float32;
            empty in a ternary one.
        nbytes: bytes of the whole message.
    """

    header: Header
    chunks: tuple[Chunk, ...] = ()
    positions: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    negative: Signs = field(default_factory=lambda: np.zeros(0, np.bool_))
    values: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.float32))
    nbytes: int = 0

    @property
    def kind(self) -> str:
        """Return "dense", "bitmap" (there are chunks, and every one has k = 0) or "sparse"."""
        if self.header.kind == DENSE:
            return "dense"
        return "bitmap" if self.chunks and all(chunk.k == 0 for chunk in self.chunks) else "sparse"


def parse(data: bytes) -> Message:
    """Validate and decode exactly one message.

    Raises:
        MessageError: ``data`` is not the one valid spelling of a message.
    """
    message = _parse_first(data)
    if message.nbytes != len(data):
        raise MessageError(
            f"{len(data) - message.nbytes} bytes follow a message of {message.nbytes} bytes"
        )
    return message


def parse_many(data: bytes) -> list[Message]:
    """Validate and decode a concatenation of messages; no bytes give no messages.

    Raises:
        MessageError: some part of ``data`` is not a valid message.
    """
    messages = []
    offset = 0
    while offset < len(data):
        messages.append(_parse_first(data[offset:]))
        offset += messages[-1].nbytes
    return messages


def entries(data: bytes) -> tuple[Positions, Signs]:
    """Return positions, int64[count], and signs, bool[count] (True is minus), of a message."""
    message = parse(data)
    if message.header.kind != TERNARY:
        raise MessageError("a dense message has values, not entries")
    return message.positions, message.negative


def decode(data: bytes) -> NDArray[Any]:
    """Return the decoded update: float32[numel], or float64[numel] of a dense float64 message."""
    message = parse(data)
    if message.header.kind == DENSE:
        return message.values
    update = np.zeros(message.header.numel, dtype=np.float32)
    update[message.positions] = np.where(
        message.negative, -message.header.threshold, message.header.threshold
    )
    return update


def apply(data: bytes, target: NDArray[Any], scale: float = 1.0) -> None:
    """Add ``scale`` times the message to ``target``: float32[numel] or float64[numel], in place.

    Ternary: q = float32(scale * threshold), the product taken in float64, and the target gets +q or
    -q. Dense: the product scale * value is taken in float64 and rounded to the target's dtype, then
    added.

    Raises:
        MessageError: the message is invalid or has another number of elements; ``target`` is not
            changed.
    """
    message = parse(data)
    if message.header.numel != target.size:
        raise MessageError(
            f"a message of {message.header.numel} elements does not fit a target of {target.size}"
        )
    if message.header.kind == DENSE:
        target += (scale * message.values.astype(np.float64)).astype(target.dtype)
        return
    quantum = target.dtype.type(np.float32(scale * message.header.threshold))
    target[message.positions] += np.where(message.negative, -quantum, quantum)


def _parse_first(data: bytes) -> Message:
    header, crc = Header.unpack(data)
    _check_common(header)
    nbytes = HEADER_BYTES + header.payload_bytes
    if nbytes > len(data):
        raise MessageError(
            f"the header states {header.payload_bytes} payload bytes, "
            f"{len(data) - HEADER_BYTES} follow"
        )
    payload = data[HEADER_BYTES:nbytes]
    actual = crc32c(header.pack() + payload)
    if actual != crc:
        raise MessageError(f"CRC-32C is {actual:#010x}, the header states {crc:#010x}")
    if header.kind == DENSE:
        return Message(header, values=_dense_values(header, payload), nbytes=nbytes)
    _check_ternary(header)
    chunks, positions, negative = _ternary_entries(header, payload)
    return Message(header, chunks, positions, negative, nbytes=nbytes)


def _check_common(header: Header) -> None:
    if header.magic != MAGIC:
        raise MessageError(f"magic is {header.magic!r}, expected {MAGIC!r}")
    if header.version != VERSION:
        raise MessageError(f"version is {header.version}, this decoder reads {VERSION}")
    if header.kind not in (TERNARY, DENSE):
        raise MessageError(
            f"kind is {header.kind}, expected {TERNARY} (ternary) or {DENSE} (dense)"
        )
    if header.flags & ~(FLAG_SHAKEUP if header.kind == TERNARY else 0):
        raise MessageError(
            f"flags {header.flags:#04x} have bits that mean nothing in kind {header.kind}"
        )
    if header.reserved != 0:
        raise MessageError(f"the reserved byte is {header.reserved}, expected 0")
    if header.numel > MAX_NUMEL:
        raise MessageError(f"numel is {header.numel}, at most 2^48 is allowed")
    if header.count > header.numel:
        raise MessageError(f"count is {header.count}, more than numel {header.numel}")


def _check_ternary(header: Header) -> None:
    if not 0 < header.threshold_bits < 0x7F80:
        raise MessageError(
            f"threshold bits {header.threshold_bits:#06x} are not a positive finite bfloat16"
        )
    if header.dtype != 0:
        raise MessageError(f"dtype is {header.dtype}, expected 0 in a ternary message")
    if header.exponent != chunk_exponent(header.count):
        raise MessageError(
            f"exp is {header.exponent}, count {header.count} demands {chunk_exponent(header.count)}"
        )


def _dense_values(header: Header, payload: bytes) -> NDArray[Any]:
    dtype = _DENSE_DTYPES.get(header.dtype)
    if dtype is None:
        raise MessageError(f"dtype is {header.dtype}, expected 1, 2 or 3 in a dense message")
    if header.threshold_bits or header.exponent:
        raise MessageError("threshold and exp must be 0 in a dense message")
    if header.count != header.numel:
        raise MessageError(f"count is {header.count} in a dense message of {header.numel} elements")
    if header.payload_bytes != header.numel * dtype.itemsize:
        raise MessageError(
            f"{header.payload_bytes} payload bytes for {header.numel} values "
            f"of {dtype.itemsize} bytes"
        )
    values = np.frombuffer(payload, dtype=dtype)
    if header.dtype == 3:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.array(values)


def _ternary_entries(header: Header, payload: bytes) -> tuple[tuple[Chunk, ...], Positions, Signs]:
    if header.count == 0:
        if payload:
            raise MessageError(f"{len(payload)} payload bytes, but nothing changed")
        return (), np.zeros(0, np.int64), np.zeros(0, np.bool_)
    if header.count > 8 * len(payload):
        raise MessageError(f"{len(payload)} payload bytes cannot hold {header.count} signs")
    chunks, quotient_sums, directory_bytes = _read_directory(header, payload)
    bits = np.unpackbits(
        np.frombuffer(payload, np.uint8, offset=directory_bytes), bitorder="little"
    )
    positions: list[Positions] = []
    signs: list[Signs] = []
    offset = 0
    for index, chunk in enumerate(chunks):
        last = index == len(chunks) - 1
        quotient_end = offset + chunk.fixed_bits + chunk.listed
        quotient_end = _last_one(bits) if last else quotient_end + quotient_sums[index]
        if last and chunk.listed == 0:
            quotient_end = offset + chunk.fixed_bits
        if not offset + chunk.fixed_bits + chunk.listed <= quotient_end <= bits.size:
            raise MessageError(
                f"chunk {index} needs bits {offset} ... {quotient_end} of {bits.size}"
            )
        positions.append(
            chunk.begin + _chunk_positions(chunk, bits[offset:quotient_end], index, last)
        )
        first_sign = offset + chunk.listed * chunk.k
        signs.append(bits[first_sign : first_sign + chunk.changed] != 0)
        offset = quotient_end
    padding = bits[offset:]
    if padding.size >= 8 or padding.any():
        raise MessageError(
            f"{padding.size} bits follow the last quotient, expected fewer than 8, all zero"
        )
    return chunks, np.concatenate(positions), np.concatenate(signs)


def _last_one(bits: Bits) -> int:
    ones = np.flatnonzero(bits)
    return int(ones[-1]) + 1 if ones.size else 0


def _read_directory(header: Header, payload: bytes) -> tuple[tuple[Chunk, ...], list[int], int]:
    """Return the chunks, the quotient sums of all but the last, and the bytes of the directory."""
    chunks: list[Chunk] = []
    quotient_sums: list[int] = []
    offset = begin = 0
    changed_left = header.count
    while changed_left > 1 << header.exponent:
        unchanged, offset = _read_varint(payload, offset)
        chunk = Chunk(begin, 1 << header.exponent, unchanged)
        quotient_sum = chunk.quotient_sum_without_entry()
        if chunk.k > 0:
            quotient_sum, offset = _read_varint(payload, offset)
        _check_quotient_sum(chunk, quotient_sum, len(chunks))
        chunks.append(chunk)
        quotient_sums.append(quotient_sum)
        begin += chunk.span
        changed_left -= chunk.changed
        if begin + changed_left > header.numel:
            raise MessageError(
                f"chunk {len(chunks) - 1} leaves too few of {header.numel} elements for the rest"
            )
    chunks.append(Chunk(begin, changed_left, header.numel - begin - changed_left))
    return tuple(chunks), quotient_sums, offset


def _read_varint(payload: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for index in range(MAX_VARINT_BYTES):
        if offset + index >= len(payload):
            raise MessageError("the payload ends inside the directory")
        byte = payload[offset + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            if byte == 0 and index > 0:
                raise MessageError(f"varint at payload byte {offset} has a superfluous zero byte")
            return value, offset + index + 1
    raise MessageError(f"varint at payload byte {offset} has more than {MAX_VARINT_BYTES} bytes")


def _check_quotient_sum(chunk: Chunk, quotient_sum: int, index: int) -> None:
    """Refuse a sum that no distances can have, so that quotients << k cannot overflow."""
    if quotient_sum << chunk.k > chunk.span - chunk.listed:
        raise MessageError(
            f"chunk {index}: quotients sum to {quotient_sum}, too far for a span of {chunk.span}"
        )


def _chunk_positions(chunk: Chunk, bits: Bits, index: int, last: bool) -> Positions:
    """Return the changed elements, counted from the chunk's begin, out of the chunk's bits."""
    listed = _listed_elements(chunk, bits, index)
    end = int(listed[-1]) + 1 if listed.size else 0
    limit = chunk.span - (1 if chunk.inverted and not last else 0)
    if end > limit or (not last and not chunk.inverted and end != chunk.span):
        raise MessageError(
            f"chunk {index}: the listed elements end at {end} of a span of {chunk.span}"
        )
    if not chunk.inverted:
        return listed
    changed = np.ones(chunk.span, dtype=np.bool_)
    changed[listed] = False
    return np.flatnonzero(changed).astype(np.int64)


def _listed_elements(chunk: Chunk, bits: Bits, index: int) -> Positions:
    unary = bits[chunk.fixed_bits :]
    ones = np.flatnonzero(unary).astype(np.int64)
    if ones.size != chunk.listed or (ones.size and ones[-1] != unary.size - 1):
        raise MessageError(
            f"chunk {index}: {ones.size} quotients end in their bits, expected {chunk.listed}"
        )
    _check_quotient_sum(chunk, unary.size - chunk.listed, index)
    quotients = np.diff(ones, prepend=-1) - 1
    fields = bits[: chunk.listed * chunk.k].reshape(chunk.listed, chunk.k).astype(np.int64)
    remainders = (fields << np.arange(chunk.k)).sum(axis=1, dtype=np.int64)
    elements: Positions = np.cumsum((quotients << chunk.k) + remainders + 1) - 1
    return elements


# --- the encoder ----------------------------------------------------------------------------------

SAMPLE_EXCEEDING = 640
SAMPLE_LEAST, SAMPLE_MOST = 2**12, 2**18
SAMPLE_GROUP = 16
_BIN_SHIFT = 17
_BINS = 0x7F800000 >> _BIN_SHIFT


def tail_quantiles(
    residual_before: NDArray[Any],
    update: NDArray[Any],
    residual_after: NDArray[Any],
    density: float,
) -> Tail | None:
    """Return the sampled quantiles that ``TargetDensity`` predicts from; None if numel is 0.

    Element i is sampled when its group of 16 is: ``(i // 16) % stride == 0`` with
    ``stride = ceil(numel / wanted) | 1``, where 640 of ``wanted`` elements are to exceed the
    quantile, but ``2^12 <= wanted <= 2^18``. The stride is odd so that it does not fall in step with
    rows of a matrix whose length is a power of two. The partner j of i is ``i ^ 8`` where that
    element exists, otherwise i.

    Args:
        residual_before: float32[numel] or float64[numel], the residual before the update was added.
        update: the update in the same dtype; may hold non-finite values.
        residual_after: the residual after encoding (before any clipping).
        density: the target.
    """
    numel = residual_before.size
    if numel == 0:
        return None
    wanted = math.ceil(min(max(SAMPLE_EXCEEDING / density, SAMPLE_LEAST), SAMPLE_MOST))
    stride = -(-numel // wanted) | 1
    index = np.arange(numel)
    index = index[(index // SAMPLE_GROUP) % stride == 0]
    partner = np.where(index ^ 8 < numel, index ^ 8, index)
    with np.errstate(over="ignore", invalid="ignore"):
        now = np.abs(residual_before[index] + update[index])
        shuffled = np.abs(residual_before[index] + update[partner])
        following = np.abs(residual_after[index] + update[partner])
        same = np.abs(residual_after[index] + update[index])
    return Tail(
        now=_quantile(now, density),
        shuffled=_quantile(shuffled, density),
        next=_quantile(following, density),
        same=_quantile(same, density),
        agreement=_sign_agreement(residual_before[index], update[index]),
    )


def _sign_agreement(residual: NDArray[Any], update: NDArray[Any]) -> float:
    """Return the share of elements with equal signs, of those where neither is zero or NaN."""
    signs = np.sign(residual) * np.sign(update)
    agreeing, opposing = np.count_nonzero(signs > 0), np.count_nonzero(signs < 0)
    return agreeing / (agreeing + opposing) if agreeing + opposing else 0.5


def _quantile(magnitudes: NDArray[Any], density: float) -> float:
    """Return about the magnitude that ``density`` of the elements reach or exceed.

    The histogram has 64 bins to the octave (the upper 15 bits of a float32); inside a bin the tail
    is linear. Zero and non-finite magnitudes count as elements, but are in no bin. 0.0 when all
    are.
    """
    with np.errstate(over="ignore"):
        bits = magnitudes.astype(np.float32).view(np.uint32)
    counted = bits[(bits > 0) & (bits < 0x7F800000)]
    histogram = np.bincount(counted >> _BIN_SHIFT, minlength=_BINS)
    want = density * float(magnitudes.size)
    above = 0
    lowest = -1
    for bin_index in np.flatnonzero(histogram)[::-1].tolist():
        inside = int(histogram[bin_index])
        if float(above + inside) >= want:
            low, high = _bin_edge(bin_index), _bin_edge(bin_index + 1)
            return high - (high - low) * ((want - float(above)) / float(inside))
        above += inside
        lowest = bin_index
    return _bin_edge(lowest) if lowest >= 0 else 0.0


def _bin_edge(bin_index: int) -> float:
    """Return the lower edge of a bin; past the last bin, the largest float32 and not infinity."""
    bits = min(bin_index << _BIN_SHIFT, 0x7F7FFFFF)
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _nonfinite_update(bad: NDArray[np.intp], numel: int) -> NonFiniteUpdate:
    return NonFiniteUpdate(
        f"{bad.size} of {numel} elements are not finite, first at {bad[0]}; "
        "the finite part is in the residual and nothing was sent",
        count=bad.size,
        first_index=int(bad[0]),
    )


def _bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round finite values to float32 and that to bfloat16, ties to even, never to infinity."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    infinite = (rounded & 0x7FFF) >= 0x7F80
    return np.where(infinite, (rounded & 0x8000) | 0x7F7F, rounded).astype(np.uint16)


class ReferenceEncoder:
    """The encoder's semantics, element by element, without any haste.

    Attributes:
        residual: float32[numel] or float64[numel], what was not sent yet.
        threshold: the policy's unrounded threshold for the next step.
        step: number of messages so far.
        changed_at: the step from which on the present threshold holds.
        nonfinite_count: elements left out because a non-finite value was met, over all steps.
        clipped_count: elements clipped, over all steps.
        clipped_sum: signed sum of what clipping removed, over all steps.

    >>> from gradwire.policy import FixedThreshold
    >>> encoder = ReferenceEncoder(4, FixedThreshold(1.0))
    >>> decode(encoder.encode(np.array([0.5, -1.5, 1.0, 0.0], np.float32))).tolist()
    [0.0, -1.0, 1.0, 0.0]
    >>> encoder.residual.tolist()
    [0.5, -0.5, 0.0, 0.0]
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
        self.residual: NDArray[Any] = np.zeros(numel, dtype=dtype)
        self.threshold = float(threshold.initial)
        self.step = 0
        self.changed_at = 0
        self.nonfinite_count = 0
        self.clipped_count = 0
        self.clipped_sum = 0.0
        self._policy = threshold
        self._shakeup = shakeup
        self._clip = clip
        self._key = key
        self._raises = on_nonfinite == "raise"

    def encode(self, update: ArrayLike | Sequence[NDArray[Any]] | None = None) -> bytes:
        """Add ``update`` to the residual, take ±threshold out where it is reached, and encode that.

        Args:
            update: numel elements in one array or several; None encodes what is in the residual.

        Raises:
            NonFiniteUpdate: with on_nonfinite="raise", when a value or sum is not finite. The
                finite part is in the residual, nothing was taken out of it, and the step did not
                advance.
        """
        shaking = self._shakeup is not None and self._shakeup.is_due(self.step)
        divisor = self._shakeup.divisor if self._shakeup is not None and shaking else 1.0
        threshold = round_threshold(self.threshold / divisor)
        before = self.residual.copy()
        added = self._as_residual_dtype(update)
        bad = self._accumulate(added)
        passing, taken = self._take(threshold)
        if bad.size and self._raises:
            self.residual[passing] += taken
            raise _nonfinite_update(bad, self.residual.size)
        message = encode_ternary(
            passing,
            taken < 0,
            numel=self.residual.size,
            threshold=threshold,
            key=self._key,
            step=self.step,
            shakeup=shaking,
        )
        used = self.threshold
        if not shaking:
            self._feed_policy(passing.size, before, added if update is not None else None)
        self._clip_residual(used)
        self.nonfinite_count += bad.size
        self.step += 1
        return message

    def encode_dense(
        self, update: ArrayLike | Sequence[NDArray[Any]] | None = None, *, bfloat16: bool = False
    ) -> bytes:
        """Add ``update`` to the residual and send everything; neither the policy nor clipping acts.

        Args:
            update: numel elements in one array or several, or None.
            bfloat16: send bfloat16 values; what rounding leaves stays in the residual.

        Raises:
            NonFiniteUpdate: as ``encode``.
        """
        bad = self._accumulate(self._as_residual_dtype(update))
        if bad.size and self._raises:
            raise _nonfinite_update(bad, self.residual.size)
        values = _bfloat16_bits(self.residual) if bfloat16 else self.residual
        message = encode_dense(values, key=self._key, step=self.step)
        self.residual -= decode(message).astype(self.residual.dtype)
        self.nonfinite_count += bad.size
        self.step += 1
        return message

    def flush(self) -> bytes:
        """Return all that is left as one dense message; the policy is not fed."""
        return self.encode_dense()

    def _take(self, threshold: float) -> tuple[Positions, NDArray[Any]]:
        """Take ±threshold out of every element that reaches it; return where, and what."""
        quantum = self.residual.dtype.type(threshold)
        passing = np.flatnonzero(np.abs(self.residual) >= quantum).astype(np.int64)
        taken = np.copysign(quantum, self.residual[passing])
        self.residual[passing] -= taken
        return passing, taken

    def _as_residual_dtype(self, update: ArrayLike | Sequence[NDArray[Any]] | None) -> NDArray[Any]:
        if update is None:
            return np.zeros_like(self.residual)
        parts = update if isinstance(update, (list, tuple)) else [update]
        arrays = [np.asarray(part).reshape(-1) for part in parts]
        flat = np.concatenate(arrays) if arrays else np.zeros(0, self.residual.dtype)
        if flat.size != self.residual.size:
            raise ValueError(
                f"an update of {flat.size} elements for an encoder of {self.residual.size}"
            )
        if flat.dtype == np.float64 and self.residual.dtype == np.float32:
            raise TypeError("a float64 update does not go into a float32 residual")
        return flat.astype(self.residual.dtype)

    def _accumulate(self, update: NDArray[Any]) -> NDArray[np.intp]:
        """Add where the sum is finite; elsewhere keep the finite one of the two, or zero."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.residual + update
        bad = np.flatnonzero(~np.isfinite(total))
        kept, offered = self.residual[bad], update[bad]
        total[bad] = np.where(np.isfinite(kept), kept, np.where(np.isfinite(offered), offered, 0.0))
        self.residual[:] = total
        return bad

    def _feed_policy(self, count: int, before: NDArray[Any], update: NDArray[Any] | None) -> None:
        tail = self._sample(before, update)
        density = count / max(self.residual.size, 1)
        since = self.step + 1 - self.changed_at
        following = self._policy.next_threshold(self.threshold, density, since, tail)
        if following != self.threshold:
            self.changed_at = self.step + 1
        self.threshold = following

    def _sample(self, before: NDArray[Any], update: NDArray[Any] | None) -> Tail | None:
        wanted = self._policy.sample_density
        if wanted is None:
            return None
        if update is not None:
            return tail_quantiles(before, update, self.residual, wanted)
        # The caller has added its update already, so what an update does is unknown: expect the
        # same magnitudes again. (What is left is no guide: all of it is below the threshold.)
        tail = tail_quantiles(before, np.zeros_like(before), before, wanted)
        return None if tail is None else Tail(tail.now, tail.now, tail.now, tail.now, 0.5)

    def _clip_residual(self, state: float) -> None:
        if self._clip is None or not self._clip.is_due(self.step):
            return
        bound = self.residual.dtype.type(self._clip.limit * round_threshold(state))
        clipped = np.clip(self.residual, -bound, bound)
        self.clipped_count += int(np.count_nonzero(clipped != self.residual))
        self.clipped_sum += math.fsum((self.residual.astype(np.float64) - clipped).tolist())
        self.residual[:] = clipped
