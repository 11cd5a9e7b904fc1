"""The datagrams of transport version 3, to and from bytes; ``docs/transport.md`` draws them with byte rulers."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Final, NamedTuple, TypeAlias

VERSION: Final = 3
DATA: Final = VERSION << 4 | 1
CONTROL: Final = VERSION << 4 | 2
INIT: Final = VERSION << 4 | 3
RESPONSE: Final = VERSION << 4 | 4
TAGGED: Final = VERSION << 4 | 5  # a DATA datagram with a tag of its own

HEADER: Final = struct.Struct("<BBBBIQ")  # kind, 0, fragment, fragments, stream or session, number
HEADER_BYTES: Final = 16
TAG_BYTES: Final = 16

RECORD_META: Final = struct.Struct("<QQII")  # message number, tag, message bytes, offset
RECORD_META_BYTES: Final = 24

# One system call sends a record. Linux refuses more than 65,507 bytes and, in older versions, more than 64 datagrams.
RECORD_BYTES_MAX: Final = 62_400
FRAGMENTS_MAX: Final = 64
RECORD_NUMBER_BITS: Final = 48
RECORD_NUMBER_MAX: Final = (1 << RECORD_NUMBER_BITS) - 1
DATAGRAM_BYTES_MIN: Final = 256 + HEADER_BYTES
DATAGRAM_BYTES_MAX: Final = 9_000 + HEADER_BYTES

INIT_BYTES: Final = 256  # padded; no RESPONSE is larger, so a node amplifies no traffic
MAC1_BYTES: Final = 16  # at the end of both handshake datagrams
INTRODUCTION_BYTES: Final = INIT_BYTES - HEADER_BYTES - 32 - TAG_BYTES - MAC1_BYTES  # in an INIT
CONTROL_PLAINTEXT_MAX: Final = 1_200 - HEADER_BYTES - TAG_BYTES
ACK_WINDOW_RECORDS: Final = 1_024  # records that the bitmap of one ACK can describe
ACK_PARTIALS_MAX: Final = 90
MEMBERS_MAX: Final = 32
_FRAGMENT_INDICES: Final = bytes(range(256))


def fragments_per_record(datagram_bytes: int) -> int:
    """Return the number of datagrams of a full record."""
    return min(FRAGMENTS_MAX, RECORD_BYTES_MAX // datagram_bytes)


class WireError(ValueError):
    """Bytes that are not a well-formed datagram or frame of this version."""


class DataHeader(NamedTuple):
    """The header of a DATA or TAGGED datagram."""

    stream: int  # of the sender
    record: int
    fragments: int  # of the record
    fragment_bytes: int  # sealed bytes in each fragment but the last
    first: int  # index of this fragment
    is_tagged: bool = False  # in a TAGGED datagram

    @classmethod
    def decode(cls, data: memoryview, position: int) -> DataHeader:
        """Parse the header at this position."""
        kind, _, first, fragments, stream, number = HEADER.unpack_from(data, position)
        record, fragment_bytes = number & RECORD_NUMBER_MAX, number >> RECORD_NUMBER_BITS
        return cls(stream, record, fragments, fragment_bytes, first, kind == TAGGED)

    @property
    def associated(self) -> bytes:
        """The header of the record's first fragment, which the record's tag covers."""
        field = self.fragment_bytes << RECORD_NUMBER_BITS | self.record
        return HEADER.pack(DATA, 0, 0, self.fragments, self.stream, field)


class Ack(NamedTuple):
    """The records that a receiver has, and its credit."""

    cumulative: int  # every record below this number is complete
    limit: int  # the first record number that must not be sent yet (absolute credit)
    delay_us: int = 0  # time for which the receiver held the acknowledgement back
    complete: int = 0  # bit i: record ``cumulative + i`` is complete, or the skip that begins there
    partials: tuple[tuple[int, int], ...] = ()  # incomplete records, oldest first: their fragments
    truncated: bool = False  # the ACK says nothing about the records beyond the last partial
    tagged: bool = False  # somebody forges fragments: only TAGGED ones count


class Ping(NamedTuple):
    """Asks for a `Pong` with the same token, and for an immediate `Ack`."""

    token: int


class Pong(NamedTuple):
    """The answer to a `Ping`."""

    token: int


class Key(NamedTuple):
    """A sender's key, for the records of ``stream`` from ``first_record`` on."""

    stream: int
    first_record: int
    key: bytes
    iv: bytes


class KeyAck(NamedTuple):
    """The sender's key has arrived."""


class Skip(NamedTuple):
    """The ``records`` records from ``first`` on are for other nodes; the receiver counts them as complete."""

    first: int
    records: int


class Close(NamedTuple):
    """The sender leaves; nothing follows."""

    reason: int


class CloseAck(NamedTuple):
    """A `Close` has arrived."""


class Members(NamedTuple):
    """Addresses ("host:port") of other nodes that the sender is connected to."""

    addresses: tuple[str, ...]


Frame: TypeAlias = Ack | Ping | Pong | Key | KeyAck | Skip | Close | CloseAck | Members

_ACK_TYPE: Final = 1
_MEMBERS_TYPE: Final = 9
_ACK: Final = struct.Struct("<QQIBBB")  # cumulative, limit, delay, bitmap bytes, partials, flags
_PARTIAL: Final = struct.Struct("<HB")  # distance from cumulative, bytes of the bitmap that follows
_FIXED_SIZE: Final[dict[int, tuple[type[Frame], struct.Struct]]] = {
    2: (Ping, struct.Struct("<Q")),
    3: (Pong, struct.Struct("<Q")),
    4: (Key, struct.Struct("<IQ16s12s")),
    5: (KeyAck, struct.Struct("<")),
    6: (Skip, struct.Struct("<QQ")),
    7: (Close, struct.Struct("<B")),
    8: (CloseAck, struct.Struct("<")),
}
_TYPES: Final = {frame: (number, layout) for number, (frame, layout) in _FIXED_SIZE.items()}


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of one control frame."""
    if isinstance(frame, Ack):
        bitmap = _bitmap(frame.complete)
        counts = (len(bitmap), len(frame.partials), frame.truncated | frame.tagged << 1)
        data = bytes([_ACK_TYPE]) + _ACK.pack(*frame[:3], *counts) + bitmap
        for number, got in frame.partials:
            bitmap = _bitmap(got)
            data += _PARTIAL.pack(number - frame.cumulative, len(bitmap)) + bitmap
        return data
    if isinstance(frame, Members):
        texts = b"".join(map(_encode_text, frame.addresses))
        return bytes([_MEMBERS_TYPE, len(frame.addresses)]) + texts
    number, layout = _TYPES[type(frame)]
    return bytes([number]) + layout.pack(*frame)


def _bitmap(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _encode_text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")


def decode_frames(plaintext: bytes) -> list[Frame]:
    """Parse the frames of one control datagram; raise `WireError` if one is unknown, truncated or out of range."""
    data = BytesIO(plaintext)
    frames = []
    while kind := data.read(1):
        frames.append(_decode_frame(kind[0], data))
    return frames


def _decode_frame(kind: int, data: BytesIO) -> Frame:
    if kind == _ACK_TYPE:
        return _decode_ack(data)
    if kind == _MEMBERS_TYPE:
        if (count := _read(data, 1)[0]) > MEMBERS_MAX:
            raise WireError(f"{count} members in one frame, at most {MEMBERS_MAX} are allowed")
        return Members(tuple(_decode_text(data) for _ in range(count)))
    if kind not in _FIXED_SIZE:
        raise WireError(f"unknown control frame type {kind}")
    make, layout = _FIXED_SIZE[kind]
    frame = make(*layout.unpack(_read(data, layout.size)))
    if isinstance(frame, Key):
        _check_record_number(frame.first_record)
    elif isinstance(frame, Skip):
        _check_record_number(frame.first + frame.records)
        if not frame.records:
            raise WireError("an empty skip")
    return frame


def _decode_ack(data: BytesIO) -> Ack:
    cumulative, limit, delay_us, nbytes, count, flags = _ACK.unpack(_read(data, _ACK.size))
    _check_record_number(max(cumulative, limit))
    is_excessive = nbytes > ACK_WINDOW_RECORDS // 8 or count > ACK_PARTIALS_MAX
    if is_excessive or flags > 3 or (flags & 1 and count == 0):
        raise WireError("an acknowledgement describes more than its limits allow")
    complete = int.from_bytes(_read(data, nbytes), "little")
    partials = []
    for _ in range(count):
        delta, nbytes = _PARTIAL.unpack(_read(data, _PARTIAL.size))
        if nbytes > FRAGMENTS_MAX // 8:
            raise WireError("the bitmap of an incomplete record is too long")
        partials.append((cumulative + delta, int.from_bytes(_read(data, nbytes), "little")))
    return Ack(cumulative, limit, delay_us, complete, tuple(partials), bool(flags & 1), flags > 1)


def _read(data: BytesIO, nbytes: int) -> bytes:
    field = data.read(nbytes)
    if len(field) < nbytes:
        raise WireError("a frame or an introduction is truncated")
    return field


def _decode_text(data: BytesIO) -> str:
    try:
        return _read(data, _read(data, 1)[0]).decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("an address is not ASCII") from error


def _check_record_number(number: int) -> None:
    if number > RECORD_NUMBER_MAX:
        raise WireError(f"record number {number} needs more than {RECORD_NUMBER_BITS} bits")


_INTRODUCTION: Final = struct.Struct("<QQI")


class Introduction(NamedTuple):
    """A node's statement about itself inside the handshake."""

    node_id: int  # identity of the node, 64 bits
    incarnation: int  # start of the process in milliseconds; a restart has a larger one
    session: int  # index for the control datagrams that are sent to this node
    advertise: str = ""  # "host:port" at which others reach the node, or empty

    def encode(self, padded_bytes: int = 0) -> bytes:
        """Return the bytes, zero-padded to ``padded_bytes``."""
        data = _INTRODUCTION.pack(*self[:3]) + _encode_text(self.advertise)
        return data.ljust(padded_bytes, b"\0")

    @classmethod
    def decode(cls, encoded: bytes) -> Introduction:
        """Parse the result of `encode`; raise `WireError` if it is truncated, or the address is not ASCII."""
        data = BytesIO(encoded)
        fixed = _INTRODUCTION.unpack(_read(data, _INTRODUCTION.size))
        return cls(*fixed)._replace(advertise=_decode_text(data))


def run_length(data: memoryview, position: int, segment_bytes: int, first: int, most: int) -> int:
    """Return how many of the ``most`` datagrams from ``position`` on are neighbouring fragments of one record."""
    # Three bytes of each header are compared, which is cheap. A false match, 256 records apart, costs retransmissions.
    stop = position + (most - 1) * segment_bytes + HEADER_BYTES
    if most <= 1 or stop > len(data):  # the last datagram is too short for a header
        return 1
    kinds = data[position:stop:segment_bytes].tobytes()
    indices = data[position + 2 : stop : segment_bytes].tobytes()
    numbers = data[position + 8 : stop : segment_bytes].tobytes()
    is_record = kinds == kinds[:1] * most and numbers == numbers[:1] * most
    if is_record and indices == _FRAGMENT_INDICES[first : first + most]:
        return most
    headers = enumerate(zip(kinds, indices, numbers, strict=True))
    return next(n for n, each in headers if each != (kinds[0], first + n, numbers[0]))
