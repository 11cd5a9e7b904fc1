"""One endpoint as a whole: exact counters and timers, changes of address, batches of datagrams."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.transport.endpoint import Endpoint
from gradwire.transport.session import Session
from gradwire.transport.types import Limits, Transmit
from gradwire.transport.wire import CONTROL, DATA, HEADER, RECORD_NUMBER_MAX

from .faults import data_fragments, measure_round_trips, transfer
from .simulator import Host, Link, Simulator


class Wire:
    """Records the data datagrams that leave on a link and those that arrive."""

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
def test_retransmissions_and_repetitions_are_counted_exactly(loss: float) -> None:
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
    for index in range(20):  # to measure round trips
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
    session = next(iter(one.endpoint.sessions))
    assert session.address == two.address
    ticket = simulator.publish(one, b"to the new address")
    simulator.run_until(lambda: ticket.is_done, 0.1)


def test_data_is_routed_to_a_session_only_once_its_peer_has_told_its_stream() -> None:
    """A peer that changes its address before that must not leave a route behind."""
    simulator = Simulator(18)
    endpoint = simulator.add("h0").endpoint
    session = Session(endpoint, 7, ("h1", 1), simulator.now_s)
    endpoint.sessions.route(session)
    assert endpoint.sessions.by_stream == {}
    session.stream = 5
    endpoint.sessions.route(session)
    assert endpoint.sessions.by_stream == {(("h1", 1), 5): session}
    endpoint.sessions.unroute(session)
    assert endpoint.sessions.by_stream == {}


def test_a_message_that_will_never_be_complete_gives_its_budget_back() -> None:
    simulator = Simulator(5)
    one, two = simulator.mesh(2)
    simulator.link(one, two).rate_bytes_per_s = 1e6
    simulator.publish(one, bytes(1 << 20))
    simulator.run_for(0.5)
    assert two.endpoint.stats().receive_queue_bytes == 1 << 20
    simulator.crash(one)
    simulator.run_until(lambda: bool(two.lost), 12.0)
    assert two.endpoint.stats().receive_queue_bytes == 0


def test_probes_repeat_the_newest_record_and_the_first_answer_brings_all_the_others() -> None:
    simulator = Simulator(6, Link(delay_s=0.001))
    one, two = simulator.mesh(2)
    wire = Wire(simulator, one, two, loss=1.0)
    first = one.endpoint.log.head
    for index in range(3):
        simulator.publish(one, b"x", index)
    simulator.run_for(3.0)
    probes = [number - first for number, _ in wire.sent[3:]]
    assert len(probes) >= 5
    assert set(probes) == {2}
    simulator.link(one, two).drop = None
    simulator.run_until(lambda: len(two.received) == 3, 1.5)


def test_reordering_by_less_than_an_eighth_of_a_round_trip_repeats_nothing() -> None:
    simulator = Simulator(7, Link(delay_s=0.05))
    one, two = simulator.mesh(2)
    measure_round_trips(simulator, one)
    simulator.link(one, two).reorder = 0.05
    tickets = []
    for index in range(50, 250):
        tickets.append(simulator.publish(one, bytes(10_000), index))
        simulator.run_for(0.01)
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 5.0)
    assert one.endpoint.stats().retransmitted_fragments == 0
    assert one.endpoint.stats().lost_bytes == 0


def test_a_truncated_report_makes_no_datagram_lost_that_it_does_not_describe() -> None:
    link = Link(delay_s=0.05, drop=data_fragments(lambda _, fragment, __: fragment % 52 == 7))
    done = transfer(link, 16 << 20)
    assert link.lost_bytes > 200 * 1_200
    assert done.resent_bytes <= 1.02 * link.lost_bytes


@pytest.mark.parametrize("after_s", [1.0, 1.05, 1.1, 1.15])
def test_a_peer_that_reads_again_is_sent_to_at_once(after_s: float) -> None:
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


def test_two_nodes_that_were_stopped_together_stay_connected() -> None:
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
    assert next(iter(one.endpoint.sessions)).rtt.minimum_s > 0.0399


def test_messages_for_others_shorten_no_round_trip() -> None:
    """A node hears that they are not for it, and holds that answer back no longer than any other."""
    simulator = Simulator(13, Link(delay_s=0.05))
    one, *_ = simulator.mesh(3)
    peers = list(one.endpoint.peers)
    for index in range(60):
        simulator.publish(one, bytes(8_000), index, peers[index % 2])
        simulator.run_for(0.03)
    assert all(path.least_rtt_s > 0.0999 for path in one.endpoint.stats().peers)


def test_a_late_acknowledgement_takes_nothing_back() -> None:
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


# ---- batches ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from((0, 0, 1, 5)))
@settings(max_examples=50)
def test_batches_of_any_length_bring_the_same_messages(seed: int, swaps: int) -> None:
    """A batch may hold datagrams of several records, and begin and end in the middle of one."""
    draw = random.Random(seed)
    simulator = Simulator(seed)
    one, two = simulator.mesh(2)
    payloads = [draw.randbytes(draw.choice((1_000, 100_000, 400_000))) for _ in range(3)]
    for tag, payload in enumerate(payloads):
        one.endpoint.publish(memoryview(payload), tag, None, simulator.now_s)
    got: list[bytes] = []
    while len(got) < len(payloads):
        assert simulator.now_s < 1_060.0
        pieces = [
            piece
            for stream in joined(one.endpoint.poll(simulator.now_s))
            for piece in cut(draw, *stream)
        ]
        for _ in range(swaps if len(pieces) > 1 else 0):
            at, to = draw.randrange(len(pieces)), draw.randrange(len(pieces))
            pieces[at], pieces[to] = pieces[to], pieces[at]
        for data, size in pieces:
            two.endpoint.receive(memoryview(data), size, one.address, simulator.now_s)
        for transmit in two.endpoint.poll(simulator.now_s):
            answer = memoryview(b"".join(transmit.slices))
            one.endpoint.receive(answer, len(answer), two.address, simulator.now_s)
        simulator.now_s += 0.001
        got += [bytes(message.payload) for message in two.endpoint.take_messages(simulator.now_s)]
    assert got == payloads
    stats = two.endpoint.stats()
    assert stats.malformed_datagrams == stats.stray_datagrams == 0


def joined(transmits: list[Transmit]) -> list[tuple[bytes, int]]:
    """Join consecutive transmissions in datagrams of one size, of which only the last may be shorter."""
    streams: list[tuple[bytes, int]] = []
    for transmit in transmits:
        data, size = b"".join(transmit.slices), transmit.segment_bytes
        if streams and streams[-1][1] == size and len(streams[-1][0]) % size == 0:
            data = streams.pop()[0] + data
        streams.append((data, size))
    return streams


def cut(draw: random.Random, data: bytes, size: int) -> list[tuple[bytes, int]]:
    pieces = []
    while data:
        end = size * draw.choice((1, 7, 45, 52, 104, 187, 400))
        pieces.append((data[:end], size))
        data = data[end:]
    return pieces


@pytest.mark.parametrize("datagram_bytes", [272, 1_472, 8_972])
def test_nodes_with_datagrams_of_other_sizes_understand_each_other(datagram_bytes: int) -> None:
    simulator = Simulator(13, Link(loss=0.02))
    one = simulator.add("one", limits=Limits(datagram_bytes=datagram_bytes))
    two = simulator.add("two")
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 5.0)
    sizes: list[int] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(sizes.append(len(datagram)))
    payload = simulator.random.randbytes(300_000)
    for host in (one, two):
        simulator.publish(host, payload)
    simulator.run_until(lambda: one.payloads == two.payloads == [payload], 5.0)
    assert max(sizes) == max(datagram_bytes, *(size for size in sizes if size <= 1_232))
    assert datagram_bytes in sizes


def test_the_credit_is_worked_out_once_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator(1)
    [host, *_] = simulator.mesh(8)
    calls = []
    original = Endpoint.window_records

    def counted(endpoint: Endpoint) -> int:
        calls.append(endpoint)
        return original(endpoint)

    monkeypatch.setattr(Endpoint, "window_records", counted)
    simulator.run_for(1.0)
    assert 0 < calls.count(host.endpoint) <= 10, "every 100 ms at most"
