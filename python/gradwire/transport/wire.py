"""The datagrams of transport version 2: headers and control frames, to and from bytes.

Everything here is a pure function of bytes. Bytes that do not parse raise `WireError`, which the endpoint counts; the
error never reaches the caller. ``docs/transport.md`` draws the layouts with byte rulers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

VERSION: Final = 2
DATA: Final = VERSION << 4 | 1
CONTROL: Final = VERSION << 4 | 2
INIT: Final = VERSION << 4 | 3
RESPONSE: Final = VERSION << 4 | 4

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
FRAGMENT_BYTES_MIN: Final = 256
FRAGMENT_BYTES_MAX: Final = 9_000
DATAGRAM_BYTES_MIN: Final = FRAGMENT_BYTES_MIN + HEADER_BYTES
DATAGRAM_BYTES_MAX: Final = FRAGMENT_BYTES_MAX + HEADER_BYTES

INIT_BYTES: Final = (
    256  # an INIT is padded to this size, which no RESPONSE exceeds: no amplification
)
MAC1_BYTES: Final = 16  # at the end of both handshake datagrams
ADVERTISE_BYTES_MAX: Final = 64
CONTROL_PLAINTEXT_MAX: Final = 1_200 - HEADER_BYTES - TAG_BYTES
ACK_WINDOW_RECORDS: Final = 1_024  # records that the bitmap of one ACK can describe
ACK_PARTIALS_MAX: Final = 100
ACK_PARTIAL_BYTES_MAX: Final = 1_000  # of all partials of one ACK
MEMBERS_MAX: Final = 32


def fragments_per_record(datagram_bytes: int) -> int:
    """Return the number of datagrams of a full record."""
    return max(1, min(FRAGMENTS_MAX, RECORD_BYTES_MAX // datagram_bytes))


class WireError(ValueError):
    """Bytes that are not a well-formed datagram or frame of this version."""


class DataHeader(NamedTuple):
    """The header of a DATA datagram."""

    stream: int  # of the sender
    record: int
    fragments: int  # of the record
    fragment_bytes: int  # sealed bytes in each fragment but the last
    first: int  # index of this fragment

    @classmethod
    def decode(cls, data: memoryview, position: int) -> DataHeader:
        """Parse the header at this position."""
        _, _, first, fragments, stream, number = HEADER.unpack_from(data, position)
        fragment_bytes = number >> RECORD_NUMBER_BITS
        return cls(stream, number & RECORD_NUMBER_MAX, fragments, fragment_bytes, first)

    @property
    def associated(self) -> bytes:
        """The header of the record's first fragment, which the record's tag covers."""
        field = self.fragment_bytes << RECORD_NUMBER_BITS | self.record
        return HEADER.pack(DATA, 0, 0, self.fragments, self.stream, field)


class Ack(NamedTuple):
    """The records that a receiver has, and its credit.

    Attributes:
        cumulative: every record below this number is complete.
        limit: the first record number that must not be sent yet (absolute credit).
        delay_us: time for which the receiver held the acknowledgement back.
        complete: bit i set means record ``cumulative + i`` is complete, or the skip that begins there.
        partials: (record number, bitmap of the fragments held) of incomplete records, oldest first.
        truncated: more incomplete records exist than are listed; nothing is said about records beyond the last one.
    """

    cumulative: int
    limit: int
    delay_us: int = 0
    complete: int = 0
    partials: tuple[tuple[int, int], ...] = ()
    truncated: bool = False


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
    """So many records from ``first`` on are for other nodes; the receiver counts them as complete."""

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

_T_ACK: Final = 1
_T_MEMBERS: Final = 9
_ACK = struct.Struct("<BQQIBBB")  # type, cumulative, limit, delay, bitmap bytes, partials, flags
_PARTIAL = struct.Struct("<HB")  # distance from cumulative, bytes of the bitmap that follows
_MEMBERS = struct.Struct("<BB")  # type, count
# Frames of fixed size: type, layout of the fields.
_FIXED: Final[dict[type[Frame], tuple[int, struct.Struct]]] = {
    Ping: (2, struct.Struct("<Q")),
    Pong: (3, struct.Struct("<Q")),
    Key: (4, struct.Struct("<IQ16s12s")),
    KeyAck: (5, struct.Struct("<")),
    Skip: (6, struct.Struct("<QQ")),
    Close: (7, struct.Struct("<B")),
    CloseAck: (8, struct.Struct("<")),
}
_FIXED_OF_TYPE: Final = {number: (frame, layout) for frame, (number, layout) in _FIXED.items()}


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of one control frame."""
    if isinstance(frame, Ack):
        return _encode_ack(frame)
    if isinstance(frame, Members):
        texts = [address.encode("ascii") for address in frame.addresses]
        pieces = (bytes([len(text)]) + text for text in texts)
        return _MEMBERS.pack(_T_MEMBERS, len(texts)) + b"".join(pieces)
    number, layout = _FIXED[type(frame)]
    return bytes([number]) + layout.pack(*frame)


def _encode_ack(ack: Ack) -> bytes:
    bitmap = ack.complete.to_bytes((ack.complete.bit_length() + 7) // 8, "little")
    fixed = _ACK.pack(
        _T_ACK,
        ack.cumulative,
        ack.limit,
        ack.delay_us,
        len(bitmap),
        len(ack.partials),
        1 if ack.truncated else 0,
    )
    partials = (_encode_partial(number - ack.cumulative, got) for number, got in ack.partials)
    return fixed + bitmap + b"".join(partials)


def _encode_partial(delta: int, got: int) -> bytes:
    nbytes = (got.bit_length() + 7) // 8
    return _PARTIAL.pack(delta, nbytes) + got.to_bytes(nbytes, "little")


def partial_bytes(got: int) -> int:
    """Return the bytes that an ACK spends on an incomplete record with these fragments."""
    return _PARTIAL.size + (got.bit_length() + 7) // 8


def decode_frames(plaintext: bytes) -> list[Frame]:
    """Parse all frames of one control datagram.

    Raises:
        WireError: an unknown type, a truncated frame, or a field out of range.
    """
    frames: list[Frame] = []
    position = 0
    try:
        while position < len(plaintext):
            frame, position = _decode_frame(plaintext, position)
            frames.append(frame)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"control frame is truncated or malformed: {error}") from error
    return frames


def _decode_frame(data: bytes, at: int) -> tuple[Frame, int]:
    if data[at] == _T_ACK:
        return _decode_ack(data, at)
    if data[at] == _T_MEMBERS:
        return _decode_members(data, at)
    if data[at] not in _FIXED_OF_TYPE:
        raise WireError(f"unknown control frame type {data[at]}")
    make, layout = _FIXED_OF_TYPE[data[at]]
    frame = make(*layout.unpack_from(data, at + 1))
    if isinstance(frame, Key):
        _check_record_number(frame.first_record)
    elif isinstance(frame, Skip):
        if not frame.records:
            raise WireError("an empty skip")
        _check_record_number(frame.first + frame.records)
    return frame, at + 1 + layout.size


def _decode_ack(data: bytes, at: int) -> tuple[Ack, int]:
    _, cumulative, limit, delay_us, bitmap_bytes, partial_count, flags = _ACK.unpack_from(data, at)
    at += _ACK.size
    is_excessive = bitmap_bytes > ACK_WINDOW_RECORDS // 8 or partial_count > ACK_PARTIALS_MAX
    if is_excessive or flags > 1 or (flags == 1 and partial_count == 0):
        raise WireError("an acknowledgement describes more than its limits allow")
    if at + bitmap_bytes > len(data):
        raise WireError("an acknowledgement's bitmap is truncated")
    _check_record_number(max(cumulative, limit))
    complete = int.from_bytes(data[at : at + bitmap_bytes], "little")
    at += bitmap_bytes
    partials = []
    for _ in range(partial_count):
        delta, nbytes = _PARTIAL.unpack_from(data, at)
        at += _PARTIAL.size
        if nbytes > FRAGMENTS_MAX // 8 or at + nbytes > len(data):
            raise WireError("the bitmap of an incomplete record is too long or truncated")
        partials.append((cumulative + delta, int.from_bytes(data[at : at + nbytes], "little")))
        at += nbytes
    return Ack(cumulative, limit, delay_us, complete, tuple(partials), flags == 1), at


def _decode_members(data: bytes, at: int) -> tuple[Members, int]:
    _, count = _MEMBERS.unpack_from(data, at)
    at += _MEMBERS.size
    if count > MEMBERS_MAX:
        raise WireError(f"{count} members in one frame, at most {MEMBERS_MAX} are allowed")
    addresses = []
    for _ in range(count):
        if at >= len(data) or at + 1 + data[at] > len(data):
            raise WireError("a member's address is truncated")
        addresses.append(data[at + 1 : at + 1 + data[at]].decode("ascii"))
        at += 1 + data[at]
    return Members(tuple(addresses)), at


def _check_record_number(number: int) -> None:
    if number > RECORD_NUMBER_MAX:
        raise WireError(f"record number {number} needs more than {RECORD_NUMBER_BITS} bits")


@dataclass(frozen=True, slots=True)
class Introduction:
    """A node's statement about itself inside the handshake.

    Attributes:
        node_id: identity of the node, 64 bits.
        incarnation: start of the process in milliseconds since the epoch; a restart has a larger one.
        session: index for the control datagrams that are sent to this node.
        advertise: "host:port" at which others reach the node, or empty.
    """

    node_id: int
    incarnation: int
    session: int
    advertise: str = ""

    _FIXED = struct.Struct("<QQIB")

    def encode(self, padded_bytes: int = 0) -> bytes:
        """Return the bytes, zero-padded to ``padded_bytes``."""
        text = self.advertise.encode("ascii")
        fixed = self._FIXED.pack(self.node_id, self.incarnation, self.session, len(text))
        return (fixed + text).ljust(padded_bytes, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Parse the result of `encode`.

        Raises:
            WireError: truncated, or the address is not ASCII.
        """
        try:
            node_id, incarnation, session, length = cls._FIXED.unpack_from(data)
            if cls._FIXED.size + length > len(data):
                raise WireError("the advertised address is truncated")
            text = data[cls._FIXED.size : cls._FIXED.size + length].decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise WireError(f"malformed introduction: {error}") from error
        return cls(node_id, incarnation, session, text)


_FRAGMENT_INDICES: Final = bytes(range(256))


def run_length(data: memoryview, position: int, segment_bytes: int, first: int, most: int) -> int:
    """Return how many of the ``most`` datagrams from ``position`` on are neighbouring fragments of one record.

    Compares two bytes of each header (fragment, record number), which is cheap. The tag of the record reveals a false
    match, 256 records apart, which then costs a retransmission.
    """
    stop = position + (most - 1) * segment_bytes + HEADER_BYTES
    if most <= 1 or stop > len(data):  # the last datagram is too short for a header
        return 1
    indices = data[position + 2 : stop : segment_bytes].tobytes()
    numbers = data[position + 8 : stop : segment_bytes].tobytes()
    if indices == _FRAGMENT_INDICES[first : first + most] and numbers == numbers[:1] * most:
        return most
    count = 1
    while count < most and indices[count] == first + count and numbers[count] == numbers[0]:
        count += 1
    return count
