"""An observer who sees every datagram, adds others with any source and any bytes, and cannot stop or read any.

Copies, echoes and forgeries must neither stop a stream, nor end or delay a start, nor make a node send to others more
than three times what they seem to have sent.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from gradwire.transport.receiver import TAGGED_S
from gradwire.transport.session import State
from gradwire.transport.types import Limits
from gradwire.transport.wire import CONTROL, DATA, HEADER, HEADER_BYTES, INIT, RESPONSE, TAGGED

from .faults import MEGABYTE
from .simulator import Host, Link, Simulator

THIRD = ("third", 9)
FLOOD_PER_MS = 10


def deliver(simulator: Simulator, host: Host, data: bytes, source: tuple[str, int]) -> None:
    """Let a datagram arrive now, ahead of all that are on their way."""
    host.endpoint.receive(memoryview(data), len(data), source, simulator.now_s)


class Third:
    """Counts what is sent to an address that never answers, and what seems to have come from there."""

    def __init__(self, simulator: Simulator) -> None:
        self.sent: Counter[tuple[str, int]] = Counter()
        self.received: Counter[tuple[str, int]] = Counter()
        send = simulator.send

        def counting(source: tuple[str, int], target: tuple[str, int], datagram: bytes) -> None:
            self.received[target] += len(datagram)
            send(source, target, datagram)

        simulator.send = counting  # type: ignore[method-assign]

    def check(self, *, least_bytes: int = 1) -> None:
        assert sum(self.sent.values()) >= least_bytes
        for address, nbytes in self.sent.items():
            assert self.received[address] <= 3 * nbytes, address


@pytest.mark.parametrize("kinds", [{CONTROL}, {DATA}, {CONTROL, DATA, INIT, RESPONSE}])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("sources", [1, 1_000])
def test_copies_from_other_addresses_divert_no_traffic(
    kinds: set[int], is_first: bool, sources: int
) -> None:
    simulator = Simulator(1, Link(delay_s=0.001, rate_bytes_per_s=12.5e6))
    one, two = simulator.mesh(2)
    third = Third(simulator)
    numbers = itertools.count()

    def copy_to(host: Host) -> Callable[[int, bytes], bool]:
        def copy(_: int, datagram: bytes) -> bool:
            if datagram[0] in kinds:
                source = (f"third{next(numbers) % sources}", 9)
                third.sent[source] += len(datagram)
                at_s = simulator.now_s + (0.0 if is_first else 0.01)
                simulator.call_at(at_s, lambda: deliver(simulator, host, datagram, source))
            return False

        return copy

    simulator.link(one, two).drop = copy_to(two)
    simulator.link(two, one).drop = copy_to(one)
    started_s = simulator.now_s
    tickets = [simulator.publish(one, bytes(MEGABYTE), tag) for tag in range(4)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 5.0)
    assert 4 * MEGABYTE / (simulator.now_s - started_s) >= 0.5 * 12.5e6
    assert [tag for _, tag, _ in two.received] == [0, 1, 2, 3]
    assert one.lost == two.lost == []
    third.check()


def with_copied_datagrams() -> Third:
    """Send two megabytes while five datagrams seem to come from a third address first; return what is there."""
    simulator = Simulator(2, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    third = Third(simulator)
    copied: list[bytes] = []

    def copy(_: int, datagram: bytes) -> bool:
        if datagram[0] == CONTROL and len(copied) < 5:
            copied.append(datagram)
            third.sent[THIRD] += len(datagram)
            deliver(simulator, one, datagram, THIRD)
            return True  # the original is late
        return False

    simulator.link(two, one).drop = copy
    ticket = simulator.publish(one, bytes(2 * MEGABYTE))
    simulator.run_until(lambda: ticket.is_done, 5.0)
    simulator.run_for(5.0)
    assert len(copied) == 5
    return third


def test_five_copied_datagrams_draw_at_most_three_times_their_bytes() -> None:
    with_copied_datagrams().check()


@pytest.mark.parametrize("delay_s", [0.001, 0.05])
def test_a_peer_with_a_new_port_is_back_within_two_round_trips(delay_s: float) -> None:
    simulator = Simulator(3, Link(delay_s=delay_s))
    one, two = simulator.mesh(2)
    simulator.run_for(1.0)
    del simulator.hosts[two.address]
    two.address = ("h1", 77)
    simulator.hosts[two.address] = two
    heard: list[float] = []
    simulator.link(two, one).drop = lambda *_: bool(heard.append(simulator.now_s))
    simulator.run_until(lambda: bool(heard), 1.0)
    [session] = one.endpoint.sessions
    simulator.run_until(lambda: session.address == two.address, 2 * 2 * delay_s + 0.002)
    ticket = simulator.publish(one, b"to the new port")
    simulator.run_until(lambda: ticket.is_done, 2 * 2 * delay_s + 0.01)
    assert one.lost == two.lost == []


def starting(seed: int, attack: Callable[[Simulator, Host, Host, bytes], None]) -> Simulator:
    """Return a simulation of a node that connects to its seed, whose datagrams an observer sees first."""
    simulator = Simulator(seed, Link(delay_s=0.001))
    seed_host, joiner = simulator.add("seed", node_id=5), simulator.add("joiner", node_id=9)
    simulator.link(joiner, seed_host).drop = lambda _, datagram: bool(
        attack(simulator, joiner, seed_host, datagram)
    )
    joiner.endpoint.connect(seed_host.address)
    return simulator


def is_connected(simulator: Simulator) -> bool:
    return all(host.endpoint.peers for host in simulator.hosts.values())


@pytest.mark.parametrize("repetitions", [1, 5])
@pytest.mark.parametrize("sources", [1, 3])
def test_a_captured_opening_delivered_first_and_repeated_delays_nobody(
    repetitions: int, sources: int
) -> None:
    def attack(simulator: Simulator, _: Host, seed_host: Host, datagram: bytes) -> None:
        for number in range(repetitions):
            deliver(simulator, seed_host, datagram, ("observer", number % sources))

    simulator = starting(4, attack)
    simulator.run_until(lambda: is_connected(simulator), 1.0)


@pytest.mark.parametrize("is_seed", [True, False])
def test_a_joiner_copied_with_a_member_s_source_evicts_nobody(is_seed: bool) -> None:
    """Every datagram of the joiner comes a second time, first, from the address of a member."""
    simulator = Simulator(5, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    joiner = simulator.add("joiner")

    def copy(_: int, datagram: bytes) -> bool:
        deliver(simulator, one, datagram, two.address)
        return False

    simulator.link(joiner, one).drop = copy
    joiner.endpoint.connect(one.address)
    if is_seed:
        one.endpoint.connect(("elsewhere", 1))
    simulator.run_until(lambda: len(joiner.endpoint.peers) == len(one.endpoint.peers) == 2, 1.0)
    simulator.run_for(3.0)
    assert one.lost == two.lost == joiner.lost == []
    assert {peer.address for peer in one.endpoint.peers} == {"h1:1", "joiner:1"}


def test_an_opening_copied_with_a_seed_s_source_does_not_delay_its_sender() -> None:
    """The node with the larger id also sends an INIT to that seed, which may win a handshake of both."""
    simulator = Simulator(6, Link(delay_s=0.001))
    one, joiner = simulator.add("one", node_id=9), simulator.add("joiner", node_id=5)
    one.endpoint.connect(("absent", 1))
    simulator.run_for(0.05)

    def copy(_: int, datagram: bytes) -> bool:
        deliver(simulator, one, datagram, ("absent", 1))
        return False

    simulator.link(joiner, one).drop = copy
    joiner.endpoint.connect(one.address)
    simulator.run_until(lambda: bool(joiner.endpoint.peers and one.endpoint.peers), 1.0)


def test_an_unanswered_start_sends_no_more_than_it_got() -> None:
    """The KEY of a joiner comes from elsewhere alone: it draws one answer, which is not repeated."""
    simulator = Simulator(7, Link(delay_s=0.001))
    third = Third(simulator)
    one, joiner = simulator.add("one"), simulator.add("joiner")

    def steal(_: int, datagram: bytes) -> bool:
        if datagram[0] != CONTROL:
            return False
        third.sent[THIRD] += len(datagram)
        deliver(simulator, one, datagram, THIRD)
        return True

    simulator.link(joiner, one).drop = steal
    joiner.endpoint.connect(one.address)
    simulator.run_for(30.0)
    assert one.endpoint.peers == ()
    third.check(least_bytes=500)


# ---- forged data ------------------------------------------------------------------------------------------------


def forgeries(seed: int, nbytes: int) -> Callable[[bytes], bytes]:
    """Return a function that forges a fragment near one that was seen: its stream, any place, any shape."""
    generator = random.Random(seed)

    def forge(seen: bytes) -> bytes:
        _, _, first, fragments, stream, number = HEADER.unpack_from(seen)
        record = (number & ((1 << 48) - 1)) + generator.choice((-1, 0, 0, 1, 2, 20))
        size = generator.choice((number >> 48, number >> 48, 256, 9_000))
        if generator.random() < 0.3:
            fragments = generator.randint(1, 64)
        first = fragments - 1 if nbytes < 256 else generator.randrange(max(1, fragments))
        header = HEADER.pack(DATA, 0, first, fragments, stream, size << 48 | max(0, record))
        return header + generator.randbytes(nbytes - len(header))

    return forge


def flooded(nbytes: int, *, forges: bool, batches: bool = True) -> tuple[Simulator, Host, Host]:
    """Return two nodes on a path of 12.5 MB/s, the second under 10,000 forged datagrams a second."""
    simulator = Simulator(8, Link(delay_s=0.001, rate_bytes_per_s=12.5e6), batches=batches)
    one, two = simulator.mesh(2)
    forge = forgeries(8, nbytes)
    seen: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == DATA and seen.append(datagram)
    )

    def strike() -> None:
        for _ in range(FLOOD_PER_MS if seen else 0):
            deliver(simulator, two, forge(seen[-1]), one.address)
        if forges:
            simulator.call_at(simulator.now_s + 0.001, strike)

    strike()
    return simulator, one, two


@pytest.mark.parametrize("nbytes", [17, 100, 1_000])
@pytest.mark.parametrize("batches", [True, False])
def test_ten_thousand_forged_fragments_a_second_cost_a_fifth_at_most(
    nbytes: int, batches: bool
) -> None:
    def elapsed_s(is_forging: bool) -> float:
        simulator, one, two = flooded(nbytes, forges=is_forging, batches=batches)
        started_s = simulator.now_s
        tickets = [simulator.publish(one, bytes([tag]) * MEGABYTE, tag) for tag in range(3)]
        simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 5.0)
        assert two.payloads == [bytes([tag]) * MEGABYTE for tag in range(3)]
        return simulator.now_s - started_s

    assert elapsed_s(False) >= 0.8 * elapsed_s(True)


class Forger:
    """Adds forgeries of full size to the stream between two nodes, ``share`` for each fragment, at most one."""

    def __init__(self, seed: int, kind: str, share: float, nbytes: int) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.share = share
        self.is_forging = False
        self.forged = 0
        link = Link(delay_s=0.001, rate_bytes_per_s=12.5e6)
        self.simulator = simulator = Simulator(seed, link, batches=seed % 2 == 0)
        self.one, self.two = simulator.mesh(2, limits=Limits(datagram_bytes=nbytes))
        simulator.link(self.one, self.two).drop = self._watch

    def _watch(self, _: int, seen: bytes) -> bool:
        if self.is_forging and seen[0] in (DATA, TAGGED) and self.random.random() < self.share:
            forged = self._forge(seen)
            at_s = self.simulator.now_s + self._delay_s()
            self.simulator.call_at(at_s, lambda: self._deliver(forged))
            self.forged += 1
        return False

    def _deliver(self, forged: bytes) -> None:
        deliver(self.simulator, self.two, forged, self.one.address)

    def _delay_s(self) -> float:
        delays_s = {"after": (0.02,), "at random": (0.0, 0.0025)}
        return self.random.choice(delays_s.get(self.kind, (0.0,)))

    def _forge(self, seen: bytes) -> bytes:
        kind, _, first, fragments, stream, number = HEADER.unpack_from(seen)
        if self.kind == "of records to come":
            number += self.random.choice((1, 2, 3, 10))
            first = self.random.randrange(max(1, fragments - 1))
        elif self.kind == "whole records":
            number += self.random.choice((0, 1, 2))
            first, fragments = 0, 1
        elif self.kind == "without tags":
            kind = DATA
        header = HEADER.pack(kind, 0, first, fragments, stream, number)
        return header + self.random.randbytes(len(seen) - HEADER_BYTES)

    def elapsed_s(self, count: int = 10) -> float:
        """Return how long so many megabytes take."""
        started_s = self.simulator.now_s
        tags = range(len(self.one.tickets), len(self.one.tickets) + count)
        tickets = [self.simulator.publish(self.one, bytes([tag]) * MEGABYTE, tag) for tag in tags]
        self.simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 60.0)
        return self.simulator.now_s - started_s


FORGERIES = ("before", "after", "at random", "of records to come", "whole records", "without tags")


@pytest.mark.parametrize("kind", FORGERIES)
@pytest.mark.parametrize(
    ("share", "nbytes", "seeds"),
    [
        (0.05, 1_200, (1,)),
        (1.0, 9_000, (2,)),
        pytest.param(0.05, 9_000, range(3, 7), marks=pytest.mark.slow),
        pytest.param(1.0, 1_200, range(7, 11), marks=pytest.mark.slow),
    ],
)
def test_forged_fragments_of_full_size_cost_a_fifth_at_most(
    kind: str, share: float, nbytes: int, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        forger = Forger(seed, kind, share, nbytes)
        quiet_s = forger.elapsed_s()
        forger.is_forging = True
        assert quiet_s >= 0.8 * forger.elapsed_s()
        forger.is_forging = False
        assert forger.elapsed_s(1) < 0.5
        assert quiet_s >= 0.9 * forger.elapsed_s()
        assert forger.forged > 20
        assert forger.two.payloads == [bytes([tag]) * MEGABYTE for tag in range(31)]
        assert forger.one.lost == forger.two.lost == []


def test_tags_end_some_seconds_after_the_attack() -> None:
    forger = Forger(12, "before", 1.0, 1_200)
    kinds: Counter[int] = Counter()
    watch = forger._watch
    sent_bytes = forger.one.endpoint.stats().udp_bytes_sent

    def count(number: int, datagram: bytes) -> bool:
        nonlocal sent_bytes
        sent_bytes += len(datagram)
        kinds[datagram[0]] += 1
        return watch(number, datagram)

    forger.simulator.link(forger.one, forger.two).drop = count
    forger.is_forging = True
    forger.elapsed_s(1)
    assert kinds[TAGGED] > 800
    forger.is_forging = False
    forger.simulator.run_for(TAGGED_S)
    kinds.clear()
    forger.elapsed_s(1)
    assert kinds[DATA] > 800
    assert not kinds[TAGGED]
    assert forger.one.endpoint.stats().udp_bytes_sent == sent_bytes


def test_forgeries_to_one_peer_cost_the_others_no_tags() -> None:
    simulator = Simulator(13, Link(delay_s=0.001, rate_bytes_per_s=12.5e6))
    one, two, other = simulator.mesh(3)
    kinds: dict[str, Counter[int]] = {"h1": Counter(), "h2": Counter()}

    def watch(host: Host) -> Callable[[int, bytes], bool]:
        def note(_: int, seen: bytes) -> bool:
            kinds[host.name][seen[0]] += 1
            if host is two and seen[0] in (DATA, TAGGED):
                deliver(simulator, two, seen[:HEADER_BYTES] + bytes(len(seen) - 16), one.address)
            return False

        return note

    for host in (two, other):
        simulator.link(one, host).drop = watch(host)
    tickets = [simulator.publish(one, bytes([tag]) * MEGABYTE, tag) for tag in range(3)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 10.0)
    assert two.payloads == other.payloads == [bytes([tag]) * MEGABYTE for tag in range(3)]
    assert kinds["h1"][TAGGED] > 2_000
    assert not kinds["h2"][TAGGED]


def test_the_first_forgery_is_survived_though_the_next_acknowledgements_are_lost() -> None:
    forger = Forger(14, "before", 1.0, 1_200)
    simulator, back = forger.simulator, forger.simulator.link(forger.two, forger.one)
    quiet_s = forger.elapsed_s(3)
    forger.is_forging = True
    back.drop = lambda *_: simulator.random.random() < 0.3
    assert forger.elapsed_s(3) < 3 * quiet_s
    assert forger.two.payloads == [bytes([tag]) * MEGABYTE for tag in range(6)]


@pytest.mark.parametrize("interval_s", [0.0001, 0.001, 0.01])
@pytest.mark.parametrize("nbytes", [17, 60, 300])
def test_forged_fragments_draw_no_more_bytes_than_they_have(interval_s: float, nbytes: int) -> None:
    simulator = Simulator(9, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    seen: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == DATA and seen.append(datagram)
    )
    simulator.publish(one, bytes(200_000))
    simulator.run_for(0.1)
    forge = forgeries(9, nbytes)

    def sent_bytes(duration_s: float, is_forging: bool) -> tuple[int, int]:
        before = two.endpoint.stats().control_bytes_sent
        forged = 0
        end_s = simulator.now_s + duration_s
        while simulator.now_s < end_s:
            if is_forging:
                deliver(simulator, two, forge(seen[-1]), one.address)
                forged += nbytes
            simulator.run_for(interval_s)
        return two.endpoint.stats().control_bytes_sent - before, forged

    quiet, _ = sent_bytes(1.0, is_forging=False)
    loud, forged = sent_bytes(1.0, is_forging=True)
    assert forged > 1_000
    assert loud - quiet <= forged


def test_a_half_open_session_of_a_copied_start_ends_without_a_word() -> None:
    simulator = Simulator(10, Link(delay_s=0.001))
    one, joiner = simulator.add("one"), simulator.add("joiner")
    joiner.endpoint.connect(one.address)
    simulator.link(joiner, one).drop = lambda _, datagram: datagram[0] == CONTROL
    simulator.run_for(1.0)
    [session] = one.endpoint.sessions
    assert session.state is State.RESPONDED
    simulator.crash(joiner)
    simulator.run_for(12.0)
    assert list(one.endpoint.sessions) == []
    assert one.events == []
