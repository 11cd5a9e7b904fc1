"""Counters and timers to the letter: what is counted is what was on the wire, and what is late is late by the rule."""

from __future__ import annotations

import itertools
import random

import pytest

from gradwire.transport.model import Limits
from gradwire.transport.wire import CONTROL, DATA, HEADER, RECORD_NUMBER_MAX

from .faults import data_fragments, teach_round_trips, transfer
from .simulator import Host, Link, Simulator


class Wire:
    """Notes the data datagrams that leave on a link and those that are not lost."""

    def __init__(self, simulator: Simulator, source: Host, target: Host, loss: float) -> None:
        self.sent: list[tuple[int, int]] = []
        self.arrived: list[tuple[int, int]] = []
        self.sent_bytes = self.first_bytes = 0
        self._loss = loss
        self._random = random.Random(7)
        simulator.link(source, target).drop = self._note

    def _note(self, _: int, datagram: bytes) -> bool:
        is_lost = self._random.random() < self._loss
        if datagram[0] == DATA:
            _, _, fragment, _, _, number = HEADER.unpack_from(datagram)
            name = (number & RECORD_NUMBER_MAX, fragment)
            if name not in self.sent:
                self.first_bytes += len(datagram)
            self.sent.append(name)
            self.sent_bytes += len(datagram)
            if not is_lost:
                self.arrived.append(name)
        return is_lost


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3])
def test_what_is_sent_again_and_what_comes_twice_is_counted_exactly(loss: float) -> None:
    simulator = Simulator(1, Link(delay_s=0.002))
    one, two = simulator.mesh(2)
    wire = Wire(simulator, one, two, loss)
    back = simulator.link(two, one)
    back.loss = loss
    payloads = [simulator.random.randbytes(size) for size in (10, 70_000, 5_000, 0, 200_000, 300)]
    tickets = []
    for tag, payload in enumerate(payloads * 5):
        tickets.append(simulator.publish(one, payload, tag))
        simulator.run_for(0.003)
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 30.0)
    simulator.run_for(0.1)
    assert two.payloads == payloads * 5
    sender, receiver = one.endpoint.stats(), two.endpoint.stats()
    assert sender.retransmitted_fragments == len(wire.sent) - len(set(wire.sent))
    assert sender.retransmitted_bytes == wire.sent_bytes - wire.first_bytes
    assert receiver.duplicate_fragments == len(wire.arrived) - len(set(wire.arrived))
    assert sender.peers[0].in_flight_bytes == sender.send_log_bytes == 0
    if not loss:
        assert sender.retransmitted_bytes == sender.lost_bytes == receiver.duplicate_fragments == 0
    else:
        assert sender.retransmitted_fragments >= len(wire.sent) - len(wire.arrived) > 0
        assert sender.lost_bytes >= sender.retransmitted_bytes


def test_a_silent_peer_is_probed_three_times_and_then_at_doubling_intervals_up_to_a_second() -> (
    None
):
    simulator = Simulator(2, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    for index in range(20):  # round trips to estimate from
        simulator.publish(one, b"x", index)
        simulator.run_for(0.02)
    times_s: list[float] = []
    link = simulator.link(one, two)
    link.drop = lambda _, datagram: datagram[0] != DATA or times_s.append(simulator.now_s) is None
    simulator.publish(one, b"never arrives")
    simulator.run_for(9.0)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert 12 <= len(gaps_s) <= 20
    assert gaps_s[0] < 0.01
    assert gaps_s[1:4] == pytest.approx([gaps_s[0]] * 3, rel=0.1)
    for shorter_s, longer_s in itertools.pairwise(gaps_s[3:]):
        assert longer_s == pytest.approx(min(2 * shorter_s, 1.0), rel=0.1)


@pytest.mark.parametrize("how", ["left", "timeout"])
def test_who_is_gone_does_not_have_the_key_of_what_comes_next(how: str) -> None:
    simulator = Simulator(3)
    one, two, three = simulator.mesh(3)
    known = {key.key for key in one.endpoint.sender_keys()}
    if how == "left":
        three.endpoint.close(simulator.now_s)
    else:
        simulator.crash(three)
    simulator.run_until(lambda: bool(one.lost), 12.0)
    assert one.lost[0].reason == how
    simulator.run_for(0.5)
    assert known.isdisjoint(key.key for key in one.endpoint.sender_keys())
    simulator.publish(one, b"not for three")
    simulator.run_until(lambda: two.payloads == [b"not for three"], 1.0)


def test_an_older_datagram_from_a_former_address_does_not_move_the_peer_back() -> None:
    simulator = Simulator(4, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    held: list[bytes] = []
    link = simulator.link(two, one)
    link.drop = lambda _, datagram: (
        datagram[0] == CONTROL and not held and not held.append(datagram)
    )
    simulator.run_until(lambda: bool(held), 1.0)
    former = two.address
    del simulator.hosts[former]
    two.address = ("h1", 99)
    simulator.hosts[two.address] = two
    simulator.run_for(0.5)
    one.endpoint.receive(memoryview(held[0]), len(held[0]), former, simulator.now_s)
    session = next(iter(one.endpoint.sessions.values()))
    assert session.address == two.address
    ticket = simulator.publish(one, b"to the new address")
    simulator.run_until(lambda: ticket.is_done, 0.1)


def test_a_message_that_will_never_be_whole_gives_its_room_back() -> None:
    simulator = Simulator(5)
    one, two = simulator.mesh(2)
    simulator.link(one, two).rate_bytes_per_s = 1e6
    simulator.publish(one, bytes(1 << 20))
    simulator.run_for(0.5)
    assert two.endpoint.stats().receive_queue_bytes == 1 << 20
    simulator.crash(one)
    simulator.run_until(lambda: bool(two.lost), 12.0)
    assert two.endpoint.stats().receive_queue_bytes == 0


def test_from_the_second_on_probes_ask_for_the_oldest_record_as_well() -> None:
    simulator = Simulator(6, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    wire = Wire(simulator, one, two, loss=1.0)
    first = one.endpoint.log.head
    for index in range(3):
        simulator.publish(one, b"x", index)
    simulator.run_for(3.0)
    probes = [number - first for number, _ in wire.sent[3:]]
    assert probes[:5] == [2, 0, 2, 0, 2]


def test_reordering_by_less_than_an_eighth_of_a_round_trip_repeats_nothing() -> None:
    simulator = Simulator(7, Link(delay_s=0.05))
    one, two = simulator.mesh(2)
    teach_round_trips(simulator, one)
    simulator.link(one, two).reorder = 0.05
    tickets = []
    for index in range(50, 250):
        tickets.append(simulator.publish(one, bytes(10_000), index))
        simulator.run_for(0.01)
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 5.0)
    assert one.endpoint.stats().retransmitted_fragments == 0
    assert one.endpoint.stats().lost_bytes == 0


def test_a_report_that_is_cut_off_makes_nothing_lost_of_which_it_does_not_speak() -> None:
    link = Link(delay_s=0.05, drop=data_fragments(lambda _, fragment, __: fragment % 45 == 7))
    done = transfer(link, 16 << 20)
    assert link.lost_bytes > 200 * 1_400
    assert done.resent_bytes <= 1.02 * link.lost_bytes


def test_no_key_is_used_before_everybody_has_it() -> None:
    simulator = Simulator(8, Link(delay_s=0.001))
    one, two, three = simulator.mesh(3)
    simulator.link(one, three).drop = lambda _, datagram: datagram[0] == CONTROL
    one.endpoint.rotate_key(simulator.now_s)
    for index in range(20):
        simulator.publish(one, b"x", index)
        simulator.run_for(0.02)
    assert one.endpoint.sender_keys()[0].epoch == 0
    simulator.link(one, three).drop = None
    simulator.run_until(lambda: one.endpoint.sender_keys()[0].epoch == 1, 3.0)
    assert len(two.received) == len(three.received) == 20
    assert two.endpoint.stats().rejected_records == three.endpoint.stats().rejected_records == 0


def test_no_third_key_is_made_while_somebody_lacks_records_under_the_first() -> None:
    simulator = Simulator(9, Link(delay_s=0.001))
    one, two, three = simulator.mesh(3, limits=Limits(rekey_records=5))
    simulator.link(one, three).drop = lambda _, datagram: datagram[0] == DATA
    for index in range(60):
        simulator.publish(one, b"x", index)
        simulator.run_for(0.05)
    assert len(two.received) == 60
    assert one.endpoint.sender_keys()[0].epoch == 1
    simulator.link(one, three).drop = None
    simulator.run_until(lambda: len(three.received) == 60, 3.0)
    assert three.endpoint.stats().rejected_records == 0


@pytest.mark.parametrize("after_s", [1.0, 1.05, 1.1, 1.15])
def test_who_reads_again_is_sent_to_again_at_once(after_s: float) -> None:
    limits = Limits(
        message_bytes_max=1 << 20,
        send_log_bytes=8 << 20,
        receive_bytes=2 << 20,
        window_bytes=1 << 19,
    )
    simulator = Simulator(10, Link(delay_s=0.001))
    one, two = simulator.mesh(2, limits=limits)
    two.reads = False
    for index in range(60):
        simulator.publish(one, bytes(100_000), index)
    simulator.run_for(after_s)
    wire = Wire(simulator, one, two, loss=0.0)
    two.reads = True
    simulator.run_until(lambda: bool(wire.sent), 0.01)


def test_two_nodes_that_slept_together_do_not_blame_each_other() -> None:
    simulator = Simulator(11)
    one, two = simulator.mesh(2)
    for host in (one, two):
        host.paused = True
    simulator.run_for(60.0)
    for host in (one, two):
        simulator.resume(host)
    simulator.run_for(5.0)
    assert one.lost == two.lost == []


@pytest.mark.parametrize("seed", range(3))
def test_no_round_trip_is_measured_shorter_than_the_path_is_long(seed: int) -> None:
    simulator = Simulator(seed, Link(delay_s=0.02))
    one, two = simulator.mesh(2)
    for source, target in ((one, two), (two, one)):
        simulator.link(source, target).jitter_s = 0.02
    simulator.link(one, two).loss = 0.1
    tickets = []
    for index in range(150):
        tickets.append(simulator.publish(one, bytes(8_000), index))
        simulator.run_for(0.01)
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 30.0)
    assert one.endpoint.stats().retransmitted_fragments > 20
    assert next(iter(one.endpoint.sessions.values())).rtt.minimum_s > 0.0399


def test_an_acknowledgement_that_comes_late_takes_nothing_back() -> None:
    simulator = Simulator(12, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    link = simulator.link(one, two)
    link.rate_bytes_per_s = 1e6
    ticket = simulator.publish(one, bytes(60_000))
    simulator.run_for(0.02)
    held: list[bytes] = []
    back = simulator.link(two, one)
    back.drop = lambda _, datagram: not held and not held.append(datagram)
    simulator.run_for(0.02)
    assert held
    assert not ticket.is_done
    one.endpoint.receive(memoryview(held[0]), len(held[0]), two.address, simulator.now_s)
    simulator.run_until(lambda: ticket.is_done, 0.2)
    assert one.endpoint.stats().retransmitted_fragments == 0
