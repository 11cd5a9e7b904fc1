"""What the doctor knows about a machine, a path and a test: plain data, from which `verdicts` judges."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.transport.addressing import Rule


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What is installed, and how fast it encrypts.

    Attributes:
        gradwire: version, "not installed" if run from a source tree.
        backends: usable ones.
        instruction_set: in use; empty if the one forced by GRADWIRE_ISA is unusable.
        instruction_set_problem: why it is not.
        cryptography: version of the package.
        seals_in_place: whether it has ``encrypt_into`` (from 47 on).
        aes_bytes_per_s: AES-128-GCM over records of 62 KB, measured.
    """

    gradwire: str
    backends: tuple[str, ...]
    instruction_set: str
    instruction_set_problem: str
    cryptography: str
    seals_in_place: bool
    aes_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Secret:
    """The cluster secret, without the secret.

    Attributes:
        is_set: whether GRADWIRE_SECRET or GRADWIRE_SECRET_FILE is there.
        problem: why it cannot be used; empty if it can.
        fingerprint: eight hex digits to compare between machines; they say nothing about the secret.
    """

    is_set: bool
    problem: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Which local address a node takes.

    Attributes:
        asked: "host:port" as given.
        address: "host:port" that others would use; empty if there is none.
        rule: what decided.
        detail: the mask or the variable that decided, or the peer on the route.
        problem: why there is no address; empty if there is one.
        error_number: errno of a bind that failed, or None.
        interface: its name; empty if unknown.
        interface_mtu: in bytes, or None.
        interface_mbit: its nominal rate, or None where the system does not know (virtual ones, wifi).
    """

    asked: str
    address: str
    rule: Rule
    detail: str = ""
    problem: str = ""
    error_number: int | None = None
    interface: str = ""
    interface_mtu: int | None = None
    interface_mbit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Socket:
    """What the system gives a socket.

    Attributes:
        wanted_bytes: what a node asks for, of each buffer.
        receive_bytes: what it was granted, in the same measure.
        send_bytes: the same for sending.
        receive_bytes_max: net.core.rmem_max, or None.
        send_bytes_max: net.core.wmem_max, or None.
        has_gso: several datagrams left with one call, on the interface that was used.
        has_gro: several datagrams may come in with one call.
        datagrams_per_receive: that came with one call in a test; 0 if there was none.
    """

    wanted_bytes: int
    receive_bytes: int
    send_bytes: int
    receive_bytes_max: int | None
    send_bytes_max: int | None
    has_gso: bool
    has_gro: bool
    datagrams_per_receive: float


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The clocks.

    Attributes:
        step_s: smallest step of the monotonic clock that was seen.
        wall_s: seconds since 1970.
    """

    step_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Drops:
    """What the kernel had no room for in UDP sockets, all programs together, since the machine started."""

    received: int
    dropped: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that was found out without a peer.

    Attributes:
        system: "Linux", "Darwin", ...
        installation: what is installed.
        secret: the cluster secret.
        binding: the local address.
        socket: what the system gives it; None if nothing could be bound.
        clocks: the clocks.
        drops: of the kernel, or None where it does not tell.
        switch_interval_s: of the interpreter, once a node has been made.
        cpus: how many there are.
    """

    system: str
    installation: Installation
    secret: Secret
    binding: Binding
    socket: Socket | None
    clocks: Clocks
    drops: Drops | None
    switch_interval_s: float
    cpus: int


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One direction of the bandwidth test.

    Attributes:
        seconds: from the first message until all was acknowledged.
        sent_bytes: of messages.
        received_bytes: that the other side counted.
        datagrams: sent, all in all.
        resent_datagrams: the part that was sent again.
        kernel_drops: of the receiving socket.
        sender_cpu: processors used by the sender.
        receiver_cpu: the same of the receiver.
        tcp_bytes_per_s: what one TCP connection reaches in this direction, unencrypted; None if it could not connect.
    """

    seconds: float
    sent_bytes: int
    received_bytes: int
    datagrams: int
    resent_datagrams: int
    kernel_drops: int
    sender_cpu: float
    receiver_cpu: float
    tcp_bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """Goodput."""
        return self.received_bytes / self.seconds

    @property
    def resent_share(self) -> float:
        """The part of the datagrams that was sent again."""
        return self.resent_datagrams / max(1, self.datagrams)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a test between two doctors found.

    Attributes:
        peer: "host:port" of the other doctor.
        round_trips_s: of 1 KB messages, sorted.
        out: from here to the peer.
        back: from the peer to here.
        path_bytes: UDP payload of the datagrams that pass, proved by an answer.
        route_mtu: of the interface towards the peer, or None.
        peer_mbit: nominal rate of the peer's interface, or None.
        has_gso: whether bursts still left with one call at the end.
    """

    peer: str
    round_trips_s: tuple[float, ...]
    out: Flow
    back: Flow
    path_bytes: int
    route_mtu: int | None
    peer_mbit: int | None
    has_gso: bool

    def round_trip_s(self, share: float) -> float:
        """Return the round trip that this share of them does not exceed."""
        return self.round_trips_s[
            min(len(self.round_trips_s) - 1, int(share * len(self.round_trips_s)))
        ]
