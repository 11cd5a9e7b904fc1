"""The datagrams of transport version 1: headers and control frames, to and from bytes.

Everything here is a pure function of bytes. Whatever does not parse raises `WireError`, which the endpoint counts; it
never reaches the caller. ``docs/transport.md`` draws the layouts with byte rulers.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

VERSION: Final = 1
DATA: Final = VERSION << 4 | 1
CONTROL: Final = VERSION << 4 | 2
INIT: Final = VERSION << 4 | 3
RESPONSE: Final = VERSION << 4 | 4
BEACON: Final = VERSION << 4 | 5

HEADER: Final = struct.Struct(
    "<BBBBIQ"
)  # kind, epoch, fragment, fragments, stream or session, number
HEADER_BYTES: Final = 16
TAG_BYTES: Final = 16

RECORD_META: Final = struct.Struct("<QQII")  # message number, tag, message bytes, offset
RECORD_META_BYTES: Final = 24

# One system call sends a burst. Linux refuses more than 65,507 bytes and, in older versions, more than 64 datagrams;
# bursts near that size are not coalesced again on receipt: 45 datagrams of 1,400.
BURST_BYTES_MAX: Final = 63_000
BURST_FRAGMENTS_MAX: Final = 64
RECORD_BURSTS_MAX: Final = (
    4  # what is done once per record then costs little beside what is done once per burst
)
FRAGMENTS_MAX: Final = 255  # of a record: their number is a byte of the header
NUMBER_BYTES: Final = 65_536  # a receiver never sets aside more for one record number
RECORD_NUMBER_BITS: Final = 48
RECORD_NUMBER_MAX: Final = (1 << RECORD_NUMBER_BITS) - 1
FRAGMENT_BYTES_MIN: Final = 256
FRAGMENT_BYTES_MAX: Final = 9_000

# An INIT is padded to this size, which no RESPONSE exceeds, so an answer never amplifies.
INIT_BYTES: Final = 256
MARK_BYTES: Final = 16  # at the end of both handshake datagrams
CONTROL_PLAINTEXT_MAX: Final = 1_200  # fits an IPv6 minimum-MTU path with the header and the tag
ACK_WINDOW_RECORDS: Final = 1_024  # records that the bitmap of one ACK can describe
ACK_PARTIALS_MAX: Final = 100
ACK_PARTIAL_BYTES_MAX: Final = 1_000  # of all partials of one ACK
FRAGMENT_BITMAP_BYTES_MAX: Final = (FRAGMENTS_MAX + 7) // 8
MEMBERS_MAX: Final = 32
RELAY_CHILDREN_MAX: Final = 64
BEACON_BYTES: Final = HEADER_BYTES + TAG_BYTES


@functools.cache
def fragments_per_burst(fragment_bytes: int) -> int:
    """Return how many datagrams of a record one system call sends."""
    return max(1, min(BURST_FRAGMENTS_MAX, BURST_BYTES_MAX // (fragment_bytes + HEADER_BYTES)))


@functools.cache
def fragments_per_record(fragment_bytes: int, fragments_max: int = FRAGMENTS_MAX) -> int:
    """Return into how many datagrams a full record is cut: whole bursts, unless ``fragments_max`` is less than one."""
    burst = fragments_per_burst(fragment_bytes)
    return min(fragments_max, burst * min(RECORD_BURSTS_MAX, FRAGMENTS_MAX // burst))


@functools.lru_cache(maxsize=256)
def record_span(fragments: int, fragment_bytes: int) -> int:
    """Return how many record numbers a record takes up: one per burst."""
    return -(-fragments // fragments_per_burst(fragment_bytes))


class WireError(ValueError):
    """Bytes that are not a well-formed datagram or frame of this version."""


class Ack(NamedTuple):
    """What a receiver has, and how far the sender may go.

    Attributes:
        cumulative: every record below this number is complete.
        limit: the first record number that must not be sent yet (absolute credit).
        delay_us: time the receiver held this acknowledgement back.
        complete: bit i set means the record that begins at ``cumulative + i`` is complete.
        partials: (record number, bitmap of the fragments held) of incomplete records, oldest first.
        skipped: incomplete records from ``cumulative`` up to this many numbers on are described by an earlier report.
        truncated: more incomplete records exist than are listed; a later report describes them.
    """

    cumulative: int
    limit: int
    delay_us: int = 0
    complete: int = 0
    partials: tuple[tuple[int, int], ...] = ()
    skipped: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `Pong` with the same token, and for an `Ack` at once."""

    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a `Ping`."""

    token: int


@dataclass(frozen=True, slots=True)
class Key:
    """A sender's data key: valid for records from ``first_record`` of ``stream``."""

    epoch: int
    stream: int
    first_record: int
    key: bytes
    iv: bytes


@dataclass(frozen=True, slots=True)
class KeyAck:
    """The key of this epoch has arrived."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Skip:
    """Records ``first`` to ``first + count - 1`` are not for this receiver; it counts them as complete."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Close:
    """The sender leaves; nothing follows."""

    reason: int


@dataclass(frozen=True, slots=True)
class CloseAck:
    """A `Close` has arrived."""


@dataclass(frozen=True, slots=True)
class Members:
    """Addresses ("host:port") of other nodes that the sender is connected to."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Poison:
    """Records of the sender keep failing their tags on the way here: it should cut them into single datagrams."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Zeros up to the end of the datagram, so that its arrival proves that the path carries such a size.

    Attributes:
        nbytes: of the frame, its type byte included.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Relay:
    """Asks the receiver to forward the sender's records to these nodes; replaces what was asked before.

    Attributes:
        generation: grows with every change.
        children: ids of nodes; empty to end it.
    """

    generation: int
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relaying:
    """What a `Relay` of this generation has come to: bit i of ``reached`` is set if child i is connected here."""

    generation: int
    reached: int


@dataclass(frozen=True, slots=True)
class Share:
    """Records from ``first`` on that come through a relay or a group are for the receiver as well."""

    first: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A `Share` has arrived."""

    first: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The beacon of this number came through the multicast group."""

    number: int


Frame: TypeAlias = (
    Ack
    | Ping
    | Pong
    | Key
    | KeyAck
    | Skip
    | Close
    | CloseAck
    | Members
    | Poison
    | Padding
    | Relay
    | Relaying
    | Share
    | Shared
    | Heard
)

_ACK = struct.Struct(
    "<BQQIHBBB"
)  # type, cumulative, limit, delay, skipped, bitmap bytes, partials, flags
_ACK_PARTIAL = struct.Struct("<HB")  # distance from cumulative, bytes of the bitmap that follows
_TOKEN = struct.Struct("<BQ")
_KEY = struct.Struct("<BBIQ16s12s")
_KEY_ACK = struct.Struct("<BB")
_SKIP = struct.Struct("<BQQ")
_CLOSE = struct.Struct("<BB")
_MEMBERS = struct.Struct("<BB")
_RELAY = struct.Struct("<BIB")
_RELAYING = struct.Struct("<BIQ")
_NODE = struct.Struct("<Q")

(
    _T_ACK,
    _T_PING,
    _T_PONG,
    _T_KEY,
    _T_KEY_ACK,
    _T_SKIP,
    _T_CLOSE,
    _T_CLOSE_ACK,
    _T_MEMBERS,
    _T_POISON,
    _T_PADDING,
) = range(1, 12)
# A family of their own: what carriers need.
_T_RELAY, _T_RELAYING, _T_SHARE, _T_SHARED, _T_HEARD = range(32, 37)


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of one control frame."""
    match frame:
        case Ack():
            return _encode_ack(frame)
        case Ping(token):
            return _TOKEN.pack(_T_PING, token)
        case Pong(token):
            return _TOKEN.pack(_T_PONG, token)
        case Key(epoch, stream, first_record, key, iv):
            return _KEY.pack(_T_KEY, epoch, stream, first_record, key, iv)
        case KeyAck(epoch):
            return _KEY_ACK.pack(_T_KEY_ACK, epoch)
        case Skip(first, count):
            return _SKIP.pack(_T_SKIP, first, count)
        case Close(reason):
            return _CLOSE.pack(_T_CLOSE, reason)
        case CloseAck():
            return bytes([_T_CLOSE_ACK])
        case Members(addresses):
            texts = [address.encode("ascii") for address in addresses]
            return _MEMBERS.pack(_T_MEMBERS, len(texts)) + b"".join(
                bytes([len(text)]) + text for text in texts
            )
        case Poison():
            return bytes([_T_POISON])
        case Padding(nbytes):
            return bytes([_T_PADDING]).ljust(nbytes, b"\0")
        case Relay(generation, children):
            fixed = _RELAY.pack(_T_RELAY, generation, len(children))
            return fixed + b"".join(map(_NODE.pack, children))
        case Relaying(generation, reached):
            return _RELAYING.pack(_T_RELAYING, generation, reached)
        case Share(first):
            return _TOKEN.pack(_T_SHARE, first)
        case Shared(first):
            return _TOKEN.pack(_T_SHARED, first)
        case Heard(number):
            return _TOKEN.pack(_T_HEARD, number)


def _encode_ack(ack: Ack) -> bytes:
    bitmap = ack.complete.to_bytes((ack.complete.bit_length() + 7) // 8, "little")
    fixed = _ACK.pack(
        _T_ACK,
        ack.cumulative,
        ack.limit,
        ack.delay_us,
        ack.skipped,
        len(bitmap),
        len(ack.partials),
        1 if ack.truncated else 0,
    )
    return (
        fixed
        + bitmap
        + b"".join(_encode_partial(number - ack.cumulative, got) for number, got in ack.partials)
    )


def _encode_partial(delta: int, got: int) -> bytes:
    nbytes = (got.bit_length() + 7) // 8
    return _ACK_PARTIAL.pack(delta, nbytes) + got.to_bytes(nbytes, "little")


def partial_bytes(got: int) -> int:
    """Return how many bytes of an ACK tell of an incomplete record with these fragments."""
    return _ACK_PARTIAL.size + (got.bit_length() + 7) // 8


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
    kind = data[at]
    if kind == _T_ACK:
        return _decode_ack(data, at)
    if kind in (_T_PING, _T_PONG):
        token = _TOKEN.unpack_from(data, at)[1]
        return (Ping(token) if kind == _T_PING else Pong(token)), at + _TOKEN.size
    if kind == _T_KEY:
        _, epoch, stream, first_record, key, iv = _KEY.unpack_from(data, at)
        return Key(epoch, stream, _record_number(first_record), key, iv), at + _KEY.size
    if kind == _T_KEY_ACK:
        return KeyAck(_KEY_ACK.unpack_from(data, at)[1]), at + _KEY_ACK.size
    if kind == _T_SKIP:
        _, first, count = _SKIP.unpack_from(data, at)
        if count == 0:
            raise WireError("an empty skip")
        _record_number(first + count)
        return Skip(first, count), at + _SKIP.size
    if kind == _T_CLOSE:
        return Close(_CLOSE.unpack_from(data, at)[1]), at + _CLOSE.size
    if kind == _T_CLOSE_ACK:
        return CloseAck(), at + 1
    if kind == _T_MEMBERS:
        return _decode_members(data, at)
    if kind == _T_POISON:
        return Poison(), at + 1
    if kind == _T_PADDING:
        if any(data[at + 1 :]):
            raise WireError("something follows the padding")
        return Padding(len(data) - at), len(data)
    if kind == _T_RELAY:
        return _decode_relay(data, at)
    if kind == _T_RELAYING:
        return Relaying(*_RELAYING.unpack_from(data, at)[1:]), at + _RELAYING.size
    if kind in (_T_SHARE, _T_SHARED):
        first = _record_number(_TOKEN.unpack_from(data, at)[1])
        return (Share(first) if kind == _T_SHARE else Shared(first)), at + _TOKEN.size
    if kind == _T_HEARD:
        return Heard(_TOKEN.unpack_from(data, at)[1]), at + _TOKEN.size
    raise WireError(f"unknown control frame type {kind}")


def _decode_ack(data: bytes, at: int) -> tuple[Ack, int]:
    _, cumulative, limit, delay_us, skipped, bitmap_bytes, partial_count, flags = _ACK.unpack_from(
        data, at
    )
    at += _ACK.size
    is_excessive = bitmap_bytes > ACK_WINDOW_RECORDS // 8 or partial_count > ACK_PARTIALS_MAX
    if is_excessive or flags > 1 or (flags == 1 and partial_count == 0):
        raise WireError("an acknowledgement describes more than its limits allow")
    if at + bitmap_bytes > len(data):
        raise WireError("an acknowledgement's bitmap is truncated")
    _record_number(max(cumulative, limit))
    if not bitmap_bytes and not partial_count:  # the common case: nothing is missing
        return Ack(cumulative, limit, delay_us, 0, (), skipped), at
    complete = int.from_bytes(data[at : at + bitmap_bytes], "little")
    at += bitmap_bytes
    partials = []
    for _ in range(partial_count):
        delta, nbytes = _ACK_PARTIAL.unpack_from(data, at)
        at += _ACK_PARTIAL.size
        if nbytes > FRAGMENT_BITMAP_BYTES_MAX or at + nbytes > len(data):
            raise WireError("the bitmap of an incomplete record is too long or truncated")
        partials.append((cumulative + delta, int.from_bytes(data[at : at + nbytes], "little")))
        at += nbytes
    return Ack(cumulative, limit, delay_us, complete, tuple(partials), skipped, flags == 1), at


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


def _decode_relay(data: bytes, at: int) -> tuple[Relay, int]:
    _, generation, count = _RELAY.unpack_from(data, at)
    at += _RELAY.size
    if count > RELAY_CHILDREN_MAX:
        raise WireError(f"{count} nodes to relay to, at most {RELAY_CHILDREN_MAX} are allowed")
    end = at + count * _NODE.size
    if end > len(data):
        raise WireError("the nodes to relay to are truncated")
    children = tuple(node for (node,) in _NODE.iter_unpack(data[at:end]))
    return Relay(generation, children), end


def _record_number(number: int) -> int:
    if number > RECORD_NUMBER_MAX:
        raise WireError(f"record number {number} needs more than {RECORD_NUMBER_BITS} bits")
    return number


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a node says about itself inside the handshake.

    Attributes:
        node_id: identity of the node, 64 bits.
        incarnation: start of the process in milliseconds since the epoch; a restart has a larger one.
        session: index by which the sender of this introduction wants to be addressed in control datagrams.
        advertise: "host:port" under which others reach the node, or empty.
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
        """Parse what `encode` wrote.

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


ADVERTISE_BYTES_MAX: Final = 64


_FRAGMENT_INDICES: Final = bytes(range(256))


def run_length(data: memoryview, position: int, segment_bytes: int, first: int, most: int) -> int:
    """Return how many of the ``most`` datagrams from ``position`` on are neighbouring fragments of one record.

    Compares two bytes of each header (fragment, record number), which is cheap; a false match, 256 records apart, is
    caught by the record's tag and costs a retransmission.
    """
    stop = position + (most - 1) * segment_bytes + HEADER_BYTES
    if stop > len(data):  # the last datagram is too short to have a header
        return 1
    indices = data[position + 2 : stop : segment_bytes].tobytes()
    numbers = data[position + 8 : stop : segment_bytes].tobytes()
    if indices == _FRAGMENT_INDICES[first : first + most] and numbers == numbers[:1] * most:
        return most
    count = 1
    while count < most and indices[count] == first + count and numbers[count] == numbers[0]:
        count += 1
    return count
