"""Random histories: every seed is another network, another load and other accidents.

First safety under all of it (nothing lost silently, nothing twice, nothing out of order, no bound exceeded), then the
network heals and liveness is checked (everything still owed arrives). Run more seeds, or one again, from the directory
``tests``::

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gradwire.errors import WouldBlock
from gradwire.transport.coalesce import Backlogged
from gradwire.transport.model import Address, Limits, Peer, PeerLost, Ticket

from . import invariants
from .simulator import Host, Link, Simulator

SIZES = (0, 1, 32, 300, 1_343, 1_344, 1_345, 5_000, 62_240, 62_241, 70_000, 200_000, 300_000)
LIMITS = Limits(
    message_bytes_max=1 << 20,
    send_log_bytes=4 << 20,
    receive_bytes=2 << 20,
    window_bytes=1 << 20,
    lag_s=0.2,
)
GROUP = ("239.1.2.3", 40_124)
LIVENESS_S = 120.0


def payload_of(sender: Peer, tag: int, nbytes: int) -> bytes:
    """Return the bytes that this message must have, whoever asks."""
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
        self.given_up: set[tuple[Peer, Peer, int]] = set()
        self.blocked = 0
        self.quiet_at_s = 0.0
        count = self.random.choice((2, 2, 3, 4))
        self.limits = LIMITS
        self.group: Address | None = None
        if seed % 4 == 3:
            self._choose_fanout()
            count += 2
        for index in range(count):
            self._start(f"h{index}", [f"h{other}" for other in range(count) if other != index])
        self.names = [f"h{index}" for index in range(count)]

    def _choose_fanout(self) -> None:
        """Let records travel along trees of relays, or through a group that some hosts may not hear, or both."""
        if self.random.random() < 0.7:
            self.limits = replace(
                LIMITS, mesh_nodes_max=2, relay_children_max=self.random.choice((1, 2))
            )
        if self.random.random() < 0.5:
            self.group = GROUP
            self.simulator.groups[GROUP] = set()

    def _link(self) -> Link:
        pick = self.random.choice
        link = Link(
            delay_s=pick((0.00005, 0.001, 0.015, 0.1)),
            jitter_s=pick((0.0, 0.0, 0.0005, 0.01)),
            loss=pick((0.0, 0.001, 0.01, 0.05, 0.1, 0.3)),
            duplicate=pick((0.0, 0.0, 0.05, 0.5)),
            corrupt=pick((0.0, 0.0, 0.0, 0.005)),
            reorder=pick((0.0, 0.01, 0.2)),
            mtu_bytes=pick((0, 0, 9_000, 1_500, 1_280)),
        )
        if self.random.random() < 0.2:
            link.rate_bytes_per_s = pick((1.25e6, 12.5e6))
            link.queue_bytes = pick((35_000, 256_000))
        if self.random.random() < 0.2:
            link.burst_loss = (0.01, 0.05)
        return link

    def _start(self, name: str, others: Iterable[str]) -> None:
        interface_mtu = self.random.choice((None, 1_500, 9_000))
        host = self.simulator.add(
            name,
            limits=self.limits,
            node_id=1 + int(name[1:]),
            on_lag="block" if self.group else self.random.choice(("block", "coalesce")),
            interface_mtu=lambda _: interface_mtu,
            multicast=self.group,
        )
        if self.group is not None and self.random.random() < 0.8:
            self.simulator.groups[self.group].add(host.address)
        own = self._own(host)
        host.coalesce = lambda peer, backlog: self._keep_some(own, peer, backlog)
        host.coalesce_s = self.random.choice((0.0, 0.01, 1.0))
        for other in others:
            host.endpoint.connect((other, 1))

    def _own(self, host: Host) -> Peer:
        return Peer(host.endpoint.node_id, host.endpoint.incarnation, "")

    def _keep_some(
        self, own: Peer, peer: Peer, backlog: Sequence[Backlogged]
    ) -> list[tuple[int, object]]:
        """Give up a part of what waits for a slow peer; whether this is taken does not show here."""
        kept = [message for message in backlog if self.random.random() < 0.5]
        self.given_up.update((own, peer, message.tag) for message in backlog if message not in kept)
        return list(kept)

    def hosts(self) -> list[Host]:
        """Return the hosts that run."""
        return [host for host in self.simulator.hosts.values() if host.alive]

    # ---- what happens -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Safety first, then liveness."""
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
            ticket = self.simulator.publish(
                host, payload, len(tickets), to, while_sealing=self.seed % 8 < 4
            )
            tickets.append(ticket)
        except WouldBlock:
            self.blocked += 1

    def _accident(self) -> None:
        name = self.random.choice(self.names)
        host = self.simulator.hosts[name, 1]
        match self.random.choice(
            (
                "cut",
                "cut",
                "one way",
                "pause",
                "restart",
                "deaf",
                "rotate",
                "clog",
                "poison",
                "narrow",
            )
        ):
            case "cut":
                self._cut(host, both=True, duration_s=self.random.choice((0.2, 2.0, 12.0)))
            case "one way":
                self._cut(host, both=False, duration_s=self.random.choice((0.2, 2.0, 12.0)))
            case "pause":
                self._pause(host, self.random.choice((0.2, 3.0, 30.0)))
            case "restart":
                self._restart(host)
            case "deaf":
                self._deafen(host, self.random.choice((0.1, 2.5)))
            case "rotate":
                host.endpoint.rotate_key(self.simulator.now_s)
            case "poison":
                self._poison(host, self.random.choice((0.2, 2.0, 12.0)))
            case "narrow":
                self._narrow(host, self.random.choice((9_000, 1_500, 1_400, 1_280)))
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

    def _poison(self, host: Host, duration_s: float) -> None:
        links = [self.simulator.link(host, other) for other in self.hosts() if other is not host]

        def leave() -> None:
            for link in links:
                link.poisoned = False

        for link in links:
            link.poisoned = True
        self._call_in(duration_s, leave)

    def _narrow(self, host: Host, mtu_bytes: int) -> None:
        """Larger packets to this host are lost from now on; nobody says so."""
        for other in self.hosts():
            if other is not host:
                self.simulator.link(other, host).mtu_bytes = mtu_bytes

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

    def _deafen(self, host: Host, duration_s: float) -> None:
        host.reads = False

        def hear() -> None:
            host.reads = True

        self._call_in(duration_s, hear)

    def _heal(self) -> None:
        self.simulator.run_for(max(0.0, self.quiet_at_s - self.simulator.now_s))
        for link in (self.simulator.default, *self.simulator.links.values()):
            link.loss = link.corrupt = link.jitter_s = link.reorder = 0.0
            link.burst_loss = None
            link.blocked = False
            link.mtu_bytes = link.mtu_bytes and 1_280

    # ---- what must hold -----------------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        hosts = self.hosts()
        connected = all(len(host.endpoint.peers) == len(hosts) - 1 for host in hosts)
        is_done = all(ticket.is_done for host in hosts for ticket in host.tickets)
        return connected and is_done and not any(host.endpoint.has_messages for host in hosts)

    def check_bounds(self) -> None:
        """No host holds more than its limits allow, and its books add up."""
        for host in self.hosts():
            invariants.check(host.endpoint)

    def check(self) -> None:
        """Every message came once, whole and in order, or its ticket says that it did not."""
        everyone = self.hosts() + self.retired
        for host in everyone:
            for peer, messages in itertools.groupby(
                sorted(host.received, key=lambda message: message[0]),
                key=lambda message: message[0],
            ):
                got = [(tag, payload) for _, tag, payload in messages]
                self._check_one(host, peer, got)
        for host in self.hosts():
            self._check_tickets(host)

    def _check_one(self, host: Host, peer: Peer, got: list[tuple[int, bytes]]) -> None:
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
                is_given_up = (own, peer, ticket.tag) in self.given_up
                assert ticket.tag in tags or is_given_up or not alive, f"{ticket} is not at {peer}"
            for peer in ticket.failed:
                assert (peer, ticket.tag) in failed, f"{ticket} failed at {peer} without an event"


def run_seed(seed: int) -> History:
    """Run one seed; on failure the message ends with the command that repeats it."""
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
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--seeds", type=int, default=200, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what the histories do to the nodes is worth a warning each
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
