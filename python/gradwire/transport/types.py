"""The types that the transport shows to its callers: peers, tickets, events, limits and statistics."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .wire import DATAGRAM_BYTES_MAX, DATAGRAM_BYTES_MIN

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, order=True, slots=True)
class Peer:
    """One run of one node."""

    id: int  #: identity of the node, 64 bits, the same everywhere in the cluster; peers sort by it
    incarnation: int  #: start of the process in milliseconds; a restarted node is another Peer
    #: "host:port" at which this node reaches the peer; other nodes may see another, so comparisons ignore it
    address: str = field(compare=False)


class Received(NamedTuple):
    """One message: its sender, the sender's tag, and a read-only view of its bytes."""

    peer: Peer
    tag: int
    payload: memoryview


@dataclass(slots=True, eq=False)
class Ticket:
    """Follows one published message to each of its recipients; any thread may read it: no set is ever changed."""

    tag: int  #: the caller's tag
    nbytes: int  #: size of the message
    pending: frozenset[Peer]  #: peers that have neither acknowledged the message nor been lost
    #: peers that have acknowledged the complete message; they may not have applied it
    delivered: frozenset[Peer] = frozenset()
    failed: frozenset[Peer] = frozenset()  #: peers that were lost first

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


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer is connected in both directions; messages published from now on reach it."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer is gone."""

    peer: Peer  #: which peer
    #: "left", "timeout", "restarted", "lagging", "protocol error", "closed", or "dropped by the peer"
    reason: str
    undelivered: tuple[Ticket, ...] = ()  #: messages that the peer had not acknowledged


Event: TypeAlias = PeerJoined | PeerLost
Recipients: TypeAlias = Peer | Collection[Peer] | None  # None: all that are connected


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds and timers of a node."""

    message_bytes_max: int = 64 << 20  #: a larger message raises `TooLarge`
    #: memory for messages that some recipient has not acknowledged; when it is used up, `publish` raises `WouldBlock`
    send_log_bytes: int = 160 << 20
    receive_bytes: int = 128 << 20  #: memory for messages in assembly or waiting for the caller
    window_bytes: int = 16 << 20  #: credit granted to all sending peers together
    #: UDP payload of a full data datagram: up to the MTU less 44 bytes (IPv4) or 64 (IPv6), the same on all nodes
    datagram_bytes: int = 1_200
    #: every peer gets a control datagram in this time; after five times as much silence a new session may replace it
    heartbeat_s: float = 0.2
    down_s: float = 10.0  #: silence after which a peer is lost
    #: time without an acknowledgement, while messages wait for it, after which a peer counts as lagging
    lag_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if "bytes" in name:
                operator.index(value)
        low, high = DATAGRAM_BYTES_MIN, DATAGRAM_BYTES_MAX
        message_bytes = self.message_bytes_max
        silence = f"above 5 × heartbeat_s ({self.heartbeat_s})"
        twice = f"at least twice message_bytes_max ({message_bytes})"
        for name, is_valid, rule in (
            ("window_bytes", self.window_bytes > 0, "positive"),
            ("heartbeat_s", self.heartbeat_s > 0, "positive"),
            ("lag_s", self.lag_s > 0, "positive"),
            ("datagram_bytes", low <= self.datagram_bytes <= high, f"{low} to {high}"),
            ("message_bytes_max", 1 <= message_bytes <= 256 << 20, f"1 to {256 << 20}"),
            ("send_log_bytes", self.send_log_bytes >= 2 * message_bytes, twice),
            ("receive_bytes", self.receive_bytes >= 2 * message_bytes, twice),
            ("down_s", self.down_s > 5 * self.heartbeat_s, silence),
        ):
            if not is_valid:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """The state of the path to one peer."""

    peer: Peer  #: which peer
    srtt_s: float  #: smoothed round-trip time; 0 while unknown
    least_rtt_s: float  #: shortest round-trip time of late; 0 while unknown
    rate_bytes_per_s: float  #: delivery rate of the last rounds; 0 while unknown
    in_flight_bytes: int  #: bytes that are in flight
    backlog_records: int  #: records that the peer has not acknowledged
    loss_rate: float  #: smoothed fraction of the bytes that were lost
    silence_s: float  #: time since the latest datagram came


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketStats:
    """The node's socket as the system provides it."""

    has_gso: bool = False  #: one call sends several datagrams; False once that was refused
    has_gro: bool = False  #: one call may receive several datagrams
    receive_buffer_bytes: int = 0  #: as the kernel counts it; Linux shows twice the usable size
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
    control_bytes_sent: int = 0  #: acknowledgements, keys and the like, part of udp_bytes_sent
    retransmitted_bytes: int = 0  #: data bytes sent more than once
    retransmitted_fragments: int = 0  #: data datagrams sent more than once
    lost_bytes: int = 0  #: data bytes declared lost; some may only have been late
    duplicate_fragments: int = 0  #: data datagrams that had come before
    malformed_datagrams: int = 0  #: datagrams dropped because they did not parse
    unauthenticated_datagrams: int = 0  #: datagrams dropped as forged or repeated
    rejected_records: int = 0  #: records dropped because their tag did not verify
    stray_datagrams: int = 0  #: datagrams dropped because they belong to no session
    handshakes_refused: int = 0  #: INIT datagrams dropped, those made with another secret included
    kernel_drops: int = 0  #: datagrams that did not fit into the socket's receive buffer
    send_log_bytes: int = 0  #: memory held for peers that have not acknowledged it
    receive_queue_bytes: int = 0  #: memory of the messages in assembly or waiting for the caller
    socket: SocketStats = field(default_factory=SocketStats)  #: as the system provides it
    peers: tuple[PeerStats, ...] = ()  #: the state of the path to each peer


class Transmit(NamedTuple):
    """Datagrams to send to one address with one system call."""

    address: Address  # of the receiver
    # the datagrams back to back; every slice but the last holds complete datagrams of ``segment_bytes``
    slices: Sequence[memoryview | bytes]
    segment_bytes: int  # size of every datagram but the last


def flat_view(buffer: object) -> memoryview:
    """Return a buffer's bytes, one dimension, format "B"; raise `TypeError` if it is not contiguous."""
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise TypeError(f"{view.nbytes} bytes are not C-contiguous: numpy.ascontiguousarray copies")
    return view.cast("B") if view.nbytes else memoryview(b"")
