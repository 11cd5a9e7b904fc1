"""What the transport shows to its caller: peers, tickets, events, limits and statistics."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .wire import FRAGMENT_BYTES_MAX, FRAGMENT_BYTES_MIN, RELAY_CHILDREN_MAX

Address: TypeAlias = tuple[str, int]
Calls: TypeAlias = Sequence[Sequence[memoryview]]  # the datagrams of each system call


@dataclass(frozen=True, order=True, slots=True)
class Peer:
    """One run of one node.

    Attributes:
        id: identity of the node, 64 bits, the same everywhere in the cluster; peers sort by it.
        incarnation: start of its process in milliseconds; a restarted node is another Peer.
        address: "host:port" at which this node reaches it; others may see another address, so it does not take part in
            comparisons.
    """

    id: int
    incarnation: int
    address: str = field(compare=False)


class Received(NamedTuple):
    """One message: who sent it, the sender's tag, and a read-only view of its bytes."""

    peer: Peer
    tag: int
    payload: memoryview


class Ticket:
    """Follows one published message to each of its recipients.

    The sets are replaced, never changed, so they can be read from any thread.

    Attributes:
        tag: the caller's tag.
        nbytes: size of the message.
        delivered: peers that have all of it (reassembled, authenticated and acknowledged; not yet necessarily applied).
        failed: peers that went down first.
        pending: peers still to answer.
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
        """Whether every recipient has it or has failed."""
        return not self.pending

    def settle(self, peer: Peer, *, delivered: bool) -> None:
        """Record the outcome for one peer (called by the transport)."""
        if delivered:
            self.delivered |= {peer}
        else:
            self.failed |= {peer}
        self.pending -= {peer}

    def __repr__(self) -> str:
        """Show the counts, which is what one looks for in a log."""
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
        peer: which one.
        reason: "left", "timeout", "restarted", "lagging", "protocol error", "closed", or "dropped by the peer": what it
            was sent it could not take, such as a message larger than its ``message_bytes_max``.
        undelivered: the tickets of the messages that it had not acknowledged.
    """

    peer: Peer
    reason: str
    undelivered: tuple[Ticket, ...] = ()


Event: TypeAlias = PeerJoined | PeerLost


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every bound and timer of a node, with defaults that suit a LAN of up to 32 nodes.

    Attributes:
        message_bytes_max: largest message; more raises `TooLarge`.
        send_log_bytes: records kept until everybody has acknowledged them; when full, `publish` raises `WouldBlock`.
        receive_bytes: messages in assembly or waiting for the caller, over all peers.
        window_bytes: credit over all sending peers (absolute, receiver-granted).
        fragment_bytes: sealed bytes per datagram to begin with; 1,384 + 16 of header fits a 1,500-byte MTU. A path that
            does not carry that much gets 1,184.
        fragment_bytes_max: the most that the search for a larger size may end at; it goes beyond 1,456 only where the
            interface's MTU does, and never on loopback. ``fragment_bytes`` turns the search off.
        heartbeat_s: at least one control datagram per peer in this time.
        suspect_s: silence after which a peer may be replaced by a new session of the same node.
        down_s: silence after which a peer is lost.
        lag_s: time without progress, with something to send, after which a peer counts as lagging.
        mesh_nodes_max: nodes up to which each sends its records to every other; in larger clusters they travel
            along a tree.
        relay_children_max: to how many nodes each sends in such a tree.
        handshakes_per_s: first messages of handshakes decrypted per second, and as many again of the last two minutes.
        rekey_records: records sealed under one key.
        rekey_s: time one key is used.
    """

    message_bytes_max: int = 64 << 20
    send_log_bytes: int = 160 << 20
    receive_bytes: int = 128 << 20
    window_bytes: int = 16 << 20
    fragment_bytes: int = 1_384
    fragment_bytes_max: int = 8_956
    heartbeat_s: float = 0.2
    suspect_s: float = 1.0
    down_s: float = 10.0
    lag_s: float = 5.0
    mesh_nodes_max: int = 32
    relay_children_max: int = 8
    handshakes_per_s: float = 200.0
    rekey_records: int = 1 << 22
    rekey_s: float = 3_600.0

    def __post_init__(self) -> None:
        """Refuse limits that are out of range or contradict each other."""
        for name in ("message_bytes_max", "send_log_bytes", "receive_bytes", "window_bytes"):
            operator.index(getattr(self, name))
        for name in ("window_bytes", "lag_s", "handshakes_per_s", "rekey_records", "rekey_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if not FRAGMENT_BYTES_MIN <= self.fragment_bytes <= FRAGMENT_BYTES_MAX:
            raise ValueError(
                f"fragment_bytes is {self.fragment_bytes}; it must be {FRAGMENT_BYTES_MIN} to {FRAGMENT_BYTES_MAX}"
            )
        if not self.fragment_bytes <= self.fragment_bytes_max <= FRAGMENT_BYTES_MAX:
            raise ValueError(
                f"fragment_bytes_max is {self.fragment_bytes_max}; it must be fragment_bytes "
                f"({self.fragment_bytes}) to {FRAGMENT_BYTES_MAX}"
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
        if self.mesh_nodes_max < 2 or not 1 <= self.relay_children_max <= RELAY_CHILDREN_MAX:
            raise ValueError(
                f"mesh_nodes_max is {self.mesh_nodes_max} and relay_children_max {self.relay_children_max}; they must "
                f"be at least 2, and 1 to {RELAY_CHILDREN_MAX}"
            )
        if not 0 < self.heartbeat_s < self.suspect_s < self.down_s:
            raise ValueError(
                "heartbeat_s, suspect_s and down_s must be positive and grow in this order"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """The state of one peer's path.

    Attributes:
        peer: which one.
        srtt_s: smoothed round-trip time; 0 while unknown.
        rate_bytes_per_s: delivery rate of the last rounds; 0 while unknown.
        window_bytes: what may be in flight.
        in_flight_bytes: what is in flight.
        credit_records: records that the peer has still room for.
        backlog_records: records that the peer has not acknowledged.
        loss_rate: smoothed fraction of bytes lost.
        path_mtu_bytes: size of datagrams that pass, as far as is known, as UDP payload.
        carrier: how records reach it first: "unicast", "multicast" or "tree".
    """

    peer: Peer
    srtt_s: float
    rate_bytes_per_s: float
    window_bytes: int
    in_flight_bytes: int
    credit_records: int
    backlog_records: int
    loss_rate: float
    path_mtu_bytes: int
    carrier: str = "unicast"


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketStats:
    """What the system gives the node's socket.

    Attributes:
        has_gso: several datagrams go out with one call; False once a device has refused it.
        has_gro: several datagrams may come in with one call.
        receive_buffer_bytes: as the kernel counts it; Linux shows twice what it grants.
        send_buffer_bytes: the same for sending.
        receive_calls: calls that brought datagrams.
        errors: calls that failed; to the protocol that is a loss like any other.
    """

    has_gso: bool = False
    has_gro: bool = False
    receive_buffer_bytes: int = 0
    send_buffer_bytes: int = 0
    receive_calls: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of a node since its start; bytes are UDP payload bytes unless the name says otherwise.

    Attributes:
        messages_sent: messages published to at least one peer.
        messages_received: messages handed to the receive queue.
        payload_bytes_sent: bytes of published messages, once for each recipient.
        payload_bytes_received: bytes of received messages.
        datagrams_sent: all datagrams, control and handshake included.
        datagrams_received: all datagrams, also those dropped.
        udp_bytes_sent: payload bytes of all datagrams sent.
        udp_bytes_received: payload bytes of all datagrams received.
        control_bytes_sent: the part of udp_bytes_sent that is acknowledgements, keys and other control.
        retransmitted_bytes: data bytes sent more than once.
        retransmitted_fragments: datagrams of data sent more than once.
        lost_bytes: data bytes declared lost (some may only have been late).
        duplicate_fragments: datagrams of data that had come before.
        malformed_datagrams: dropped because they did not parse.
        unauthenticated_datagrams: dropped because a tag did not verify or a counter came again.
        rejected_records: records dropped whole because their tag did not verify.
        coalesced_messages: messages that a slow peer did not get because fewer were sent instead.
        recut_records: records sealed anew because the old cut did not fit some path any more.
        stray_datagrams: dropped because they belong to no session.
        handshakes_refused: first messages of handshakes that were dropped, those with another secret included.
        kernel_drops: datagrams that the socket's receive buffer had no room for.
        multicast_bytes_sent: data bytes sent to the multicast group, each once however many heard them.
        multicast_bytes_received: bytes that came through the multicast group.
        relayed_bytes: data bytes of others forwarded, once for each receiver.
        relay_dropped_bytes: data bytes of others that could not be forwarded in time.
        send_log_bytes: records held for peers that have not acknowledged them.
        receive_queue_bytes: messages in assembly or waiting for the caller.
        srtt_s: smoothed round-trip time, mean over the peers; 0 while unknown.
        socket: what the system gives the node's socket.
        peers: the state of each peer's path.
    """

    messages_sent: int = 0
    messages_received: int = 0
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    datagrams_sent: int = 0
    datagrams_received: int = 0
    udp_bytes_sent: int = 0
    udp_bytes_received: int = 0
    control_bytes_sent: int = 0
    retransmitted_bytes: int = 0
    retransmitted_fragments: int = 0
    lost_bytes: int = 0
    duplicate_fragments: int = 0
    malformed_datagrams: int = 0
    unauthenticated_datagrams: int = 0
    rejected_records: int = 0
    coalesced_messages: int = 0
    recut_records: int = 0
    stray_datagrams: int = 0
    handshakes_refused: int = 0
    kernel_drops: int = 0
    multicast_bytes_sent: int = 0
    multicast_bytes_received: int = 0
    relayed_bytes: int = 0
    relay_dropped_bytes: int = 0
    send_log_bytes: int = 0
    receive_queue_bytes: int = 0
    srtt_s: float = 0.0
    socket: SocketStats = field(default_factory=SocketStats)
    peers: tuple[PeerStats, ...] = ()


class Counters:
    """The running counters behind `Stats`."""

    __slots__ = (
        "coalesced_messages",
        "control_bytes_sent",
        "datagrams_received",
        "datagrams_sent",
        "duplicate_fragments",
        "handshakes_refused",
        "kernel_drops",
        "lost_bytes",
        "malformed_datagrams",
        "messages_received",
        "messages_sent",
        "multicast_bytes_received",
        "multicast_bytes_sent",
        "payload_bytes_received",
        "payload_bytes_sent",
        "recut_records",
        "rejected_records",
        "relay_dropped_bytes",
        "relayed_bytes",
        "retransmitted_bytes",
        "retransmitted_fragments",
        "stray_datagrams",
        "udp_bytes_received",
        "udp_bytes_sent",
        "unauthenticated_datagrams",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    coalesced_messages: int
    control_bytes_sent: int
    datagrams_received: int
    datagrams_sent: int
    duplicate_fragments: int
    handshakes_refused: int
    kernel_drops: int
    lost_bytes: int
    malformed_datagrams: int
    messages_received: int
    messages_sent: int
    multicast_bytes_received: int
    multicast_bytes_sent: int
    payload_bytes_received: int
    payload_bytes_sent: int
    recut_records: int
    rejected_records: int
    relay_dropped_bytes: int
    relayed_bytes: int
    retransmitted_bytes: int
    retransmitted_fragments: int
    stray_datagrams: int
    udp_bytes_received: int
    udp_bytes_sent: int
    unauthenticated_datagrams: int


class Transmit:
    """What the driver is to send: datagrams to one address, all but the last of ``segment_bytes``.

    What each system call sends is a list of whole datagrams, neighbours as one slice; the lists may be shared and are
    not to be changed.
    """

    __slots__ = ("address", "calls", "nbytes", "segment_bytes")

    def __init__(self, address: Address, calls: Calls, segment_bytes: int, nbytes: int) -> None:
        self.address = address
        self.calls = calls
        self.segment_bytes = segment_bytes
        self.nbytes = nbytes

    @classmethod
    def single(cls, address: Address, datagram: bytes) -> Transmit:
        """Return what sends one datagram."""
        return cls(address, [[memoryview(datagram)]], 0, len(datagram))

    def rest(self, call: int) -> Transmit:
        """Return what is left to send from this call on."""
        return Transmit(self.address, self.calls[call:], self.segment_bytes, self.nbytes)

    def data(self) -> bytes:
        """Return all the datagrams, back to back."""
        return b"".join(piece for slices in self.calls for piece in slices)


def format_address(address: Address) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """Parse "host:port" or "[v6]:port".

    Raises:
        ValueError: no port, or not a number from 0 to 65,535.
    """
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: write an IPv6 address as [host]:port")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"address {text!r} is not of the form host:port")
    return host, int(port)
