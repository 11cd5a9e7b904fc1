"""The types that the transport shows to its callers: peers, tickets, events, limits and statistics."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .wire import DATAGRAM_BYTES_MAX, DATAGRAM_BYTES_MIN

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, order=True, slots=True)
class Peer:
    """One run of one node.

    Attributes:
        id: identity of the node, 64 bits, the same everywhere in the cluster; peers sort by it.
        incarnation: start of the node's process in milliseconds; a restarted node is another Peer.
        address: "host:port" at which this node reaches the peer. Other nodes may see another address, so comparisons
            ignore it.
    """

    id: int
    incarnation: int
    address: str = field(compare=False)


class Received(NamedTuple):
    """One message: its sender, the sender's tag, and a read-only view of its bytes."""

    peer: Peer
    tag: int
    payload: memoryview


class Ticket:
    """Follows one published message to each of its recipients.

    The sets are replaced, never changed, so they can be read from any thread.

    Attributes:
        tag: the caller's tag.
        nbytes: size of the message.
        delivered: peers that have acknowledged the complete message; they may not have applied it.
        failed: peers that were lost first.
        pending: peers that have neither acknowledged the message nor been lost.
    """

    __slots__ = ("delivered", "failed", "nbytes", "pending", "tag")

    def __init__(self, tag: int, nbytes: int, recipients: frozenset[Peer]) -> None:
        self.tag = tag
        self.nbytes = nbytes
        self.pending = recipients
        self.delivered: frozenset[Peer] = frozenset()
        self.failed: frozenset[Peer] = frozenset()

    @property
    def is_done(self) -> bool:
        """Whether every recipient has acknowledged the message or been lost."""
        return not self.pending

    def settle(self, peer: Peer, *, delivered: bool) -> None:
        """Record the outcome for one peer (called by the transport)."""
        if delivered:
            self.delivered |= {peer}
        else:
            self.failed |= {peer}
        self.pending -= {peer}

    def __repr__(self) -> str:
        """Return the tag, the size and the counts."""
        return (
            f"Ticket(tag={self.tag}, nbytes={self.nbytes}, delivered={len(self.delivered)}, "
            f"failed={len(self.failed)}, pending={len(self.pending)})"
        )


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer is connected in both directions; messages published from now on reach it."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer is gone.

    Attributes:
        peer: which peer.
        reason: "left", "timeout", "restarted", "lagging", "protocol error", "closed", or "dropped by the peer" (for
            example because of a message larger than the peer's ``message_bytes_max``).
        undelivered: tickets of the messages that the peer had not acknowledged.
    """

    peer: Peer
    reason: str
    undelivered: tuple[Ticket, ...] = ()


Event: TypeAlias = PeerJoined | PeerLost


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds and timers of a node."""

    message_bytes_max: int = (
        64 << 20
    )  #: size of the largest message; a larger one raises `TooLarge`
    #: bytes kept until every recipient has acknowledged them; when they are used up, `publish` raises `WouldBlock`
    send_log_bytes: int = 160 << 20
    receive_bytes: int = (
        128 << 20
    )  #: bytes of messages in assembly or waiting for the caller, over all peers
    window_bytes: int = 16 << 20  #: credit granted to all sending peers together
    #: UDP payload of a full data datagram. The default passes every path; raise it, up to the MTU less 28 bytes
    #: (IPv4) or 48 (IPv6), on all nodes of a network that carries larger packets
    datagram_bytes: int = 1_200
    #: every peer gets at least one control datagram in this time; after five times as much silence a new session of
    #: the same node replaces the old one
    heartbeat_s: float = 0.2
    down_s: float = 10.0  #: silence after which a peer is lost
    #: time without an acknowledgement, while messages wait for it, after which a peer counts as lagging
    lag_s: float = 5.0

    @property
    def suspect_s(self) -> float:
        """Silence after which a peer may be replaced by a new session of the same node."""
        return 5 * self.heartbeat_s

    def __post_init__(self) -> None:
        """Refuse limits that are out of range or contradict each other."""
        for name in ("message_bytes_max", "send_log_bytes", "receive_bytes", "window_bytes"):
            operator.index(getattr(self, name))
        for name in ("window_bytes", "heartbeat_s", "lag_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if not DATAGRAM_BYTES_MIN <= self.datagram_bytes <= DATAGRAM_BYTES_MAX:
            raise ValueError(
                f"datagram_bytes is {self.datagram_bytes}; it must be {DATAGRAM_BYTES_MIN} to {DATAGRAM_BYTES_MAX}"
            )
        if not 1 <= self.message_bytes_max <= 256 << 20:
            raise ValueError(
                f"message_bytes_max is {self.message_bytes_max}; it must be 1 to {256 << 20}"
            )
        for name in ("send_log_bytes", "receive_bytes"):
            if getattr(self, name) < 2 * self.message_bytes_max:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least twice "
                    f"message_bytes_max ({self.message_bytes_max})"
                )
        if self.down_s <= self.suspect_s:
            raise ValueError(
                f"down_s is {self.down_s}; it must be more than five times heartbeat_s ({self.heartbeat_s})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """The state of the path to one peer."""

    peer: Peer  #: which peer
    srtt_s: float  #: smoothed round-trip time; 0 while unknown
    rate_bytes_per_s: float  #: delivery rate of the last rounds; 0 while unknown
    window_bytes: int  #: bytes that may be in flight
    in_flight_bytes: int  #: bytes that are in flight
    credit_records: int  #: records that the peer still accepts
    backlog_records: int  #: records that the peer has not acknowledged
    loss_rate: float  #: smoothed fraction of the bytes that were lost


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketStats:
    """The node's socket as the system provides it."""

    #: one call sends several datagrams; False once the system or a device has refused that
    has_gso: bool = False
    has_gro: bool = False  #: one call may receive several datagrams
    #: size of the receive buffer as the kernel counts it; Linux shows twice the usable size
    receive_buffer_bytes: int = 0
    send_buffer_bytes: int = 0  #: the same for sending
    errors: int = 0  #: failed system calls; the protocol treats each as a loss


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of a node since its start; bytes are UDP payload bytes unless the name says otherwise."""

    messages_sent: int = 0  #: messages published to at least one peer
    messages_received: int = 0  #: messages put into the receive queue
    payload_bytes_sent: int = 0  #: bytes of published messages, once for each recipient
    payload_bytes_received: int = 0  #: bytes of received messages
    datagrams_sent: int = 0  #: all datagrams, control and handshake included
    datagrams_received: int = 0  #: all datagrams, dropped ones included
    udp_bytes_sent: int = 0  #: payload bytes of all datagrams sent
    udp_bytes_received: int = 0  #: payload bytes of all datagrams received
    #: the part of udp_bytes_sent that is acknowledgements, keys and other control
    control_bytes_sent: int = 0
    retransmitted_bytes: int = 0  #: data bytes sent more than once
    retransmitted_fragments: int = 0  #: data datagrams sent more than once
    lost_bytes: int = 0  #: data bytes declared lost; some may only have been late
    duplicate_fragments: int = 0  #: data datagrams that had come before
    malformed_datagrams: int = 0  #: datagrams dropped because they did not parse
    #: datagrams dropped because a tag did not verify or a counter was repeated
    unauthenticated_datagrams: int = 0
    rejected_records: int = 0  #: records dropped because their tag did not verify
    stray_datagrams: int = 0  #: datagrams dropped because they belong to no session
    handshakes_refused: int = 0  #: INIT datagrams dropped, those made with another secret included
    kernel_drops: int = 0  #: datagrams that did not fit into the socket's receive buffer
    send_log_bytes: int = 0  #: bytes held for peers that have not acknowledged them
    receive_queue_bytes: int = 0  #: bytes of messages in assembly or waiting for the caller
    srtt_s: float = 0.0  #: smoothed round-trip time, mean over the peers; 0 while unknown
    socket: SocketStats = field(
        default_factory=SocketStats
    )  #: the socket as the system provides it
    peers: tuple[PeerStats, ...] = ()  #: the state of the path to each peer


class Transmit(NamedTuple):
    """Datagrams to send to one address with one system call.

    Attributes:
        address: of the receiver.
        slices: the datagrams back to back; every slice but the last holds complete datagrams of ``segment_bytes``.
        segment_bytes: size of every datagram but the last.
    """

    address: Address
    slices: Sequence[memoryview | bytes]
    segment_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all datagrams."""
        return sum(map(len, self.slices))

    def data(self) -> bytes:
        """Return all the datagrams, back to back."""
        return b"".join(self.slices)


def flat_view(buffer: object) -> memoryview:
    """Return the bytes of anything contiguous with the buffer protocol, one dimension, format "B".

    Raises:
        TypeError: the object has no contiguous buffer.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise TypeError(
            f"a buffer of {view.nbytes} bytes is not C-contiguous; pass a contiguous one (numpy.ascontiguousarray "
            "copies one)"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")
