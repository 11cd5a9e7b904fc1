"""A deterministic network and clock around the sans-IO core.

Everything random comes from one seed, so a run can be repeated to the byte. The network loses, duplicates, delays,
reorders, corrupts, throttles and partitions datagrams; nodes start, crash, pause and restart.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.transport.endpoint import Endpoint
from gradwire.transport.handshake import LocalNode
from gradwire.transport.types import Address, Limits, Peer, PeerLost, Ticket, Transmit

SECRET = bytes(range(32))
STEP_GRAIN_S = 1e-6
BATCH_BYTES = 65_000  # what one receive call returns with GRO
IDLE_POLLS_MAX = 50


@dataclass
class Link:
    """The path of datagrams from one host to another.

    Attributes:
        delay_s: one-way delay.
        jitter_s: mean of an exponentially distributed extra delay, which reorders.
        loss: probability that a datagram is lost.
        duplicate: probability that a datagram arrives twice.
        corrupt: probability that one bit of a datagram is flipped (as if the UDP checksum did not exist).
        reorder: probability that a datagram is held back by 5 to 10 ms.
        rate_bytes_per_s: rate of the bottleneck; 0 is unlimited.
        queue_bytes: queue of the bottleneck; datagrams that do not fit are lost.
        burst_loss: if set, the probabilities of entering and of leaving a state in which everything is lost.
        drop: if set, called with the number of the datagram and its bytes; True loses the datagram.
        blocked: everything is lost.
    """

    delay_s: float = 0.0005
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0
    rate_bytes_per_s: float = 0.0
    queue_bytes: int = 1 << 20
    burst_loss: tuple[float, float] | None = None
    drop: Callable[[int, bytes], bool] | None = None
    blocked: bool = False
    count: int = 0
    lost_bytes: int = 0
    passed_bytes: int = 0
    busy_until_s: float = 0.0
    in_burst: bool = False


@dataclass
class Host:
    """One simulated node: its endpoint, and everything its application received."""

    name: str
    address: Address
    endpoint: Endpoint
    received: list[tuple[Peer, int, bytes]] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    reads: bool = True
    paused: bool = False
    alive: bool = True
    incarnation: int = 1
    due_s: float | None = 0.0
    idle_polls: int = 0
    inbox: list[tuple[bytes, int, Address]] = field(default_factory=list)

    @property
    def payloads(self) -> list[bytes]:
        """The received messages without their senders."""
        return [payload for _, _, payload in self.received]

    @property
    def lost(self) -> list[PeerLost]:
        """The PeerLost events so far."""
        return [event for event in self.events if isinstance(event, PeerLost)]


class Simulator:
    """Hosts, links and a clock.

    Args:
        seed: seed of everything random.
        link: the default for every pair of hosts.
        batches: deliver datagrams that arrive at the same time in batches, as GRO does, instead of one by one.
    """

    def __init__(self, seed: int, link: Link | None = None, *, batches: bool = False) -> None:
        self.seed = seed
        self.batches = batches
        self.random = random.Random(seed)
        self.now_s = 1_000.0
        self.default = link or Link()
        self.links: dict[tuple[Address, Address], Link] = {}
        self.hosts: dict[Address, Host] = {}
        self._queue: list[tuple[float, int, Address, Address, bytes]] = []
        self._sequence = itertools.count()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    # ---- building -----------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        secret: bytes = SECRET,
        port: int = 1,
        **options: object,
    ) -> Host:
        """Add a host; a name that was there before restarts as a new incarnation."""
        address = (name, port)
        before = self.hosts.get(address)
        incarnation: int = options.pop("incarnation", before.incarnation + 1 if before else 1)  # type: ignore[assignment]
        entropy = random.Random(self.random.getrandbits(64))
        local = LocalNode(
            secret,
            self.now_s,
            node_id=options.pop("node_id", None) or self.random.getrandbits(63) | 1,  # type: ignore[arg-type]
            incarnation=incarnation,
            advertise=options.pop("advertise", ""),  # type: ignore[arg-type]
            entropy=entropy.randbytes,
        )
        endpoint = Endpoint(local, limits or Limits(), **options)  # type: ignore[arg-type]
        host = Host(name, address, endpoint, incarnation=incarnation)
        self.hosts[address] = host
        return host

    def mesh(self, count: int, **options: object) -> list[Host]:
        """Add hosts that all know each other, and run until all are connected."""
        hosts = [self.add(f"h{index}", **options) for index in range(count)]  # type: ignore[arg-type]
        for host, other in itertools.permutations(hosts, 2):
            host.endpoint.connect(other.address)
        self.run_until(lambda: all(len(host.endpoint.peers) == count - 1 for host in hosts), 60.0)
        return hosts

    def link(self, source: Host, target: Host) -> Link:
        """Return the link from one host to another, separate from the default from now on."""
        key = (source.address, target.address)
        if key not in self.links:
            self.links[key] = Link(
                **{name: getattr(self.default, name) for name in Link.__dataclass_fields__}
            )
            self.links[key].count = 0
        return self.links[key]

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """Run an action at a time."""
        heapq.heappush(self._calls, (at_s, next(self._sequence), action))

    def crash(self, host: Host) -> None:
        """Stop a host for good; its peers are not told."""
        host.alive = False

    def publish(
        self, host: Host, payload: bytes, tag: int = 0, to: Peer | list[Peer] | None = None
    ) -> Ticket:
        """Publish a message and send whatever may be sent at once, as a node does."""
        ticket = host.endpoint.publish(memoryview(payload), tag, to, self.now_s)
        host.tickets.append(ticket)
        self._flush(host)
        return ticket

    # ---- running ------------------------------------------------------------------------------------------------

    def run_until(self, done: Callable[[], bool], limit_s: float) -> None:
        """Advance until ``done``; fail if it takes longer than ``limit_s`` of simulated time."""
        end_s = self.now_s + limit_s
        self._poll_all()
        while not done():
            if not self._step(end_s):
                raise AssertionError(
                    f"seed {self.seed}: not done within {limit_s} simulated seconds"
                )

    def run_for(self, duration_s: float) -> None:
        """Advance by this much."""
        end_s = self.now_s + duration_s
        self._poll_all()
        while self._step(end_s):
            pass

    def _poll_all(self) -> None:
        """Poll every host next: a test may have called an endpoint directly."""
        for host in self.hosts.values():
            host.due_s = self.now_s

    def _step(self, end_s: float) -> bool:
        at_s = self._next_at_s()
        if at_s is None or at_s > end_s:
            self.now_s = end_s
            return False
        self.now_s = max(self.now_s, at_s)
        while self._calls and self._calls[0][0] <= self.now_s:
            heapq.heappop(self._calls)[2]()
            self._poll_all()
        touched = set()
        while self._queue and self._queue[0][0] <= self.now_s:
            _, _, source, target, datagram = heapq.heappop(self._queue)
            touched.add(target)
            batch = self._batch(source, target, datagram) if self.batches else datagram
            self._arrive(source, target, batch, len(datagram))
        for address in list(self.hosts):
            host = self.hosts[address]
            due = None if address in touched else self._due_s(host)
            if address in touched or (due is not None and due <= self.now_s):
                self._flush(host)
        return True

    def _batch(self, source: Address, target: Address, datagram: bytes) -> bytes:
        """Return the datagram and its successors that GRO would join: of the same size, only the last one shorter."""
        size, batch = len(datagram), [datagram]
        while self._queue and len(batch[-1]) == size and size * len(batch) < BATCH_BYTES:
            at_s, _, next_source, next_target, following = self._queue[0]
            if at_s > self.now_s or (next_source, next_target) != (source, target):
                break
            if not 0 < len(following) <= size:
                break
            batch.append(heapq.heappop(self._queue)[4])
        return b"".join(batch)

    def _next_at_s(self) -> float | None:
        times = [self._queue[0][0]] if self._queue else []
        if self._calls:
            times.append(self._calls[0][0])
        times.extend(due for due in map(self._due_s, self.hosts.values()) if due is not None)
        return min(times) if times else None

    def _due_s(self, host: Host) -> float | None:
        """Return when the host is to be polled, as its endpoint said after the last poll."""
        return host.due_s if host.alive and not host.paused else None

    def _arrive(self, source: Address, target: Address, data: bytes, size: int) -> None:
        host = self.hosts.get(target)
        if host is None or not host.alive:
            return
        if host.paused:
            if sum(len(kept) for kept, *_ in host.inbox) < 1 << 20:  # the socket's receive buffer
                host.inbox.append((data, size, source))
            return
        host.endpoint.receive(memoryview(data), size, source, self.now_s)

    def resume(self, host: Host) -> None:
        """Wake a paused host, which then reads its socket buffer."""
        host.paused = False
        for data, size, source in host.inbox:
            host.endpoint.receive(memoryview(data), size, source, self.now_s)
        host.inbox.clear()
        self._flush(host)

    def _flush(self, host: Host) -> None:
        if not host.alive or host.paused:
            return
        if host.reads:
            for peer, tag, payload in host.endpoint.take_messages(self.now_s):
                host.received.append((peer, tag, bytes(payload)))
        host.events.extend(host.endpoint.take_events())
        transmits = host.endpoint.poll(self.now_s)
        self._note_poll(host, bool(transmits))
        self._send_all(host, transmits)
        host.events.extend(host.endpoint.take_events())

    def _send_all(self, host: Host, transmits: list[Transmit]) -> None:
        for transmit in transmits:
            data = b"".join(transmit.slices)
            step = transmit.segment_bytes or len(data)
            for start in range(0, len(data), step):
                self.send(host.address, transmit.address, data[start : start + step])

    def _note_poll(self, host: Host, sent: bool) -> None:
        """Fail if the endpoint asks to be polled again and again without sending anything."""
        due_s = host.endpoint.next_timeout_s(self.now_s)
        host.idle_polls = (
            host.idle_polls + 1 if not sent and due_s is not None and due_s <= self.now_s else 0
        )
        if host.idle_polls > IDLE_POLLS_MAX:
            raise AssertionError(f"seed {self.seed}: {host.name} spins")
        host.due_s = None if due_s is None else max(due_s, self.now_s + STEP_GRAIN_S)

    def send(self, source: Address, target: Address, datagram: bytes) -> None:
        """Put one datagram on the network."""
        link = self.links.get((source, target), self.default)
        link.count += 1
        if self._is_lost(link, datagram):
            link.lost_bytes += len(datagram)
            return
        link.passed_bytes += len(datagram)
        for _ in range(2 if self.random.random() < link.duplicate else 1):
            at_s = self.now_s + link.delay_s
            if link.rate_bytes_per_s:
                at_s = max(self.now_s, link.busy_until_s) + link.delay_s
            if link.jitter_s:
                at_s += self.random.expovariate(1 / link.jitter_s)
            if link.reorder and self.random.random() < link.reorder:
                at_s += self.random.uniform(0.005, 0.010)
            arriving = self._corrupt(link, datagram)
            heapq.heappush(self._queue, (at_s, next(self._sequence), source, target, arriving))

    def _is_lost(self, link: Link, datagram: bytes) -> bool:
        if link.blocked or (link.drop is not None and link.drop(link.count, datagram)):
            return True
        if link.burst_loss is not None:
            enter, leave = link.burst_loss
            link.in_burst = (
                self.random.random() >= leave if link.in_burst else self.random.random() < enter
            )
            if link.in_burst:
                return True
        if self.random.random() < link.loss:
            return True
        if link.rate_bytes_per_s:
            queued = max(0.0, link.busy_until_s - self.now_s) * link.rate_bytes_per_s
            if queued + len(datagram) > link.queue_bytes:
                return True
            link.busy_until_s = (
                max(self.now_s, link.busy_until_s) + (len(datagram) + 28) / link.rate_bytes_per_s
            )
        return False

    def _corrupt(self, link: Link, datagram: bytes) -> bytes:
        if not link.corrupt or self.random.random() >= link.corrupt:
            return datagram
        broken = bytearray(datagram)
        broken[self.random.randrange(len(broken))] ^= 1 << self.random.randrange(8)
        return bytes(broken)
