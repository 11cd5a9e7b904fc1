"""Random histories: every seed is another network, another load and other accidents.

A history checks safety first: nothing is lost silently, repeated or reordered, and no bound is exceeded. Then the
network heals, and the history checks liveness: everything still owed arrives. Run more seeds, or repeat one, from the
directory ``tests``::

    python -m transport.vopr --seeds 10000
    python -m transport.vopr --seed 17
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable

from gradwire.errors import WouldBlock
from gradwire.transport.types import Limits, Peer, PeerLost, Ticket

from . import invariants
from .simulator import Host, Link, Simulator

# Around the largest message in one datagram (1,144 bytes) and in one record (61,528 bytes).
SIZES = (0, 1, 32, 300, 1_143, 1_144, 1_145, 5_000, 61_528, 61_529, 70_000, 200_000, 300_000)
LIMITS = Limits(
    message_bytes_max=1 << 20,
    send_log_bytes=4 << 20,
    receive_bytes=2 << 20,
    window_bytes=1 << 20,
    lag_s=2.0,
)
LIVENESS_S = 120.0
EPOCH_RECORDS = 1 << 22  # records that one sender key seals


def payload_of(sender: Peer, tag: int, nbytes: int) -> bytes:
    """Return the bytes of a sender's message, the same for the sender and for everybody who checks."""
    seed = f"{sender.id}/{sender.incarnation}/{tag}".encode()
    return hashlib.shake_128(seed).digest(nbytes)


class History:
    """One seed's run: the hosts, what they published, and the accidents still to come."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.simulator = Simulator(seed, self._link(), batches=seed % 2 == 1)
        self.published: dict[tuple[int, int], list[Ticket]] = {}
        self.retired: list[Host] = []
        self.blocked = 0
        self.quiet_at_s = 0.0
        count = self.random.choice((2, 2, 3, 4))
        for index in range(count):
            self._start(f"h{index}", [f"h{other}" for other in range(count) if other != index])
        self.names = [f"h{index}" for index in range(count)]

    def _link(self) -> Link:
        pick = self.random.choice
        link = Link(
            delay_s=pick((0.00005, 0.001, 0.015, 0.1)),
            jitter_s=pick((0.0, 0.0, 0.0005, 0.01)),
            loss=pick((0.0, 0.001, 0.01, 0.05, 0.1, 0.3)),
            duplicate=pick((0.0, 0.0, 0.05, 0.5)),
            corrupt=pick((0.0, 0.0, 0.0, 0.005)),
            reorder=pick((0.0, 0.01, 0.2)),
        )
        if self.random.random() < 0.2:
            link.rate_bytes_per_s = pick((1.25e6, 12.5e6))
            link.queue_bytes = pick((35_000, 256_000))
        if self.random.random() < 0.2:
            link.burst_loss = (0.01, 0.05)
        return link

    def _start(self, name: str, others: Iterable[str]) -> None:
        is_near_epoch_end = self.random.random() < 0.2
        first_record = EPOCH_RECORDS - self.random.randrange(1, 200) if is_near_epoch_end else 0
        host = self.simulator.add(
            name,
            limits=LIMITS,
            node_id=1 + int(name[1:]),
            on_lag=self.random.choice(("block", "block", "evict")),
            first_record=first_record,
        )
        for other in others:
            host.endpoint.connect((other, 1))

    def _own(self, host: Host) -> Peer:
        return Peer(host.endpoint.local.node_id, host.endpoint.local.incarnation, "")

    def hosts(self) -> list[Host]:
        """Return the hosts that run."""
        return [host for host in self.simulator.hosts.values() if host.alive]

    # ---- accidents ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Check safety, then liveness."""
        for _ in range(self.random.randint(20, 60)):
            for host in self.hosts():
                if not host.paused and self.random.random() < 0.5:
                    self._publish(host)
            if self.random.random() < 0.08:
                self._accident()
            self.simulator.run_for(self.random.choice((0.0, 0.0005, 0.01, 0.1)))
            self.check_bounds()
        self._heal()
        self.simulator.run_until(self._is_settled, LIVENESS_S)
        self.check()

    def _publish(self, host: Host) -> None:
        own = self._own(host)
        tickets = self.published.setdefault((own.id, own.incarnation), [])
        payload = payload_of(own, len(tickets), self.random.choice(SIZES))
        peers = host.endpoint.peers
        to = self.random.choice(peers) if peers and self.random.random() < 0.2 else None
        try:
            tickets.append(self.simulator.publish(host, payload, len(tickets), to))
        except WouldBlock:
            self.blocked += 1

    def _accident(self) -> None:
        name = self.random.choice(self.names)
        host = self.simulator.hosts[name, 1]
        accidents = ("cut", "cut", "one way", "pause", "restart", "stop reading", "clog")
        match self.random.choice(accidents):
            case "cut":
                self._cut(host, both=True, duration_s=self.random.choice((0.2, 2.0, 12.0)))
            case "one way":
                self._cut(host, both=False, duration_s=self.random.choice((0.2, 2.0, 12.0)))
            case "pause":
                self._pause(host, self.random.choice((0.2, 3.0, 30.0)))
            case "restart":
                self._restart(host)
            case "stop reading":
                self._stop_reading(host, self.random.choice((0.1, 2.5)))
            case "clog":
                for each in self.hosts():
                    self._cut(each, both=True, duration_s=self.random.uniform(0.1, 3.0))

    def _cut(self, host: Host, *, both: bool, duration_s: float) -> None:
        others = [other for other in self.hosts() if other is not host]
        links = [self.simulator.link(host, other) for other in others]
        if both:
            links += [self.simulator.link(other, host) for other in others]

        def join() -> None:
            for link in links:
                link.blocked = False

        for link in links:
            link.blocked = True
        self._call_in(duration_s, join)

    def _call_in(self, duration_s: float, action: Callable[[], None]) -> None:
        at_s = self.simulator.now_s + duration_s
        self.quiet_at_s = max(self.quiet_at_s, at_s + 0.001)
        self.simulator.call_at(at_s, action)

    def _pause(self, host: Host, duration_s: float) -> None:
        if not host.paused:
            host.paused = True
            self._call_in(duration_s, lambda: self.simulator.resume(host))

    def _restart(self, host: Host) -> None:
        self.simulator.crash(host)
        self.retired.append(host)
        others = [name for name in self.names if name != host.name]
        self._start(host.name, others)

    def _stop_reading(self, host: Host, duration_s: float) -> None:
        host.reads = False

        def read() -> None:
            host.reads = True

        self._call_in(duration_s, read)

    def _heal(self) -> None:
        self.simulator.run_for(max(0.0, self.quiet_at_s - self.simulator.now_s))
        for link in (self.simulator.default, *self.simulator.links.values()):
            link.loss = link.corrupt = link.jitter_s = link.reorder = 0.0
            link.burst_loss = None
            link.blocked = False

    # ---- checks -------------------------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        hosts = self.hosts()
        connected = all(len(host.endpoint.peers) == len(hosts) - 1 for host in hosts)
        is_done = all(ticket.is_done for host in hosts for ticket in host.tickets)
        return connected and is_done and not any(host.endpoint.messages for host in hosts)

    def check_bounds(self) -> None:
        """Check that no host holds more than its limits allow and that its counts add up."""
        for host in self.hosts():
            invariants.check(host.endpoint)

    def check(self) -> None:
        """Check that every message came once, complete and in order, or that its ticket names who did not get it."""
        everyone = self.hosts() + self.retired
        for host in everyone:
            for peer, messages in itertools.groupby(
                sorted(host.received, key=lambda message: message[0]),
                key=lambda message: message[0],
            ):
                got = [(tag, payload) for _, tag, payload in messages]
                self._check_received(host, peer, got)
        for host in self.hosts():
            self._check_tickets(host)

    def _check_received(self, host: Host, peer: Peer, got: list[tuple[int, bytes]]) -> None:
        tags = [tag for tag, _ in got]
        assert tags == sorted(set(tags)), f"{host.name}: {peer} out of order or twice: {tags}"
        for tag, payload in got:
            assert payload == payload_of(peer, tag, len(payload)), f"{host.name}: wrong bytes"
        tickets = self.published[peer.id, peer.incarnation]
        for tag, payload in got:
            assert len(payload) == tickets[tag].nbytes

    def _check_tickets(self, host: Host) -> None:
        own = self._own(host)
        by_peer = {self._own(other): other for other in self.hosts() + self.retired}
        failed = {
            (event.peer, ticket.tag)
            for event in host.events
            if isinstance(event, PeerLost)
            for ticket in event.undelivered
        }
        for ticket in host.tickets:
            for peer in ticket.delivered:
                tags = {tag for sender, tag, _ in by_peer[peer].received if sender == own}
                alive = by_peer[peer].alive
                assert ticket.tag in tags or not alive, f"{ticket} is not at {peer}"
            for peer in ticket.failed:
                assert (peer, ticket.tag) in failed, f"{ticket} failed at {peer} without an event"


def run_seed(seed: int) -> History:
    """Run one seed; the message of a failure ends with the command that repeats the seed."""
    history = History(seed)
    try:
        history.run()
    except Exception as error:
        message = f"{error}\nrepeat with: cd tests && python -m transport.vopr --seed {seed}"
        raise AssertionError(message) from error
    return history


def main() -> int:
    """Run seeds from the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the accidents cause many warnings
    seeds = (
        [options.seed]
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    failures = 0
    started_s = time.monotonic()
    for seed in seeds:
        try:
            run_seed(seed)
        except AssertionError as error:
            failures += 1
            sys.stderr.write(f"{error}\n")
            if options.seed is not None:
                raise
    sys.stdout.write(
        f"{len(seeds)} seeds, {failures} failures, {time.monotonic() - started_s:.1f} s\n"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
