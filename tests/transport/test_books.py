"""Counters and timers to the letter: what is counted is what was on the wire, and what is late is late by the rule."""

from __future__ import annotations

import itertools
import random

import pytest

from gradwire.transport.wire import CONTROL, DATA, HEADER, RECORD_NUMBER_MAX

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
    session = next(iter(one.endpoint._sessions.values()))
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
