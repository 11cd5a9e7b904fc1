"""Links and nodes that stop for a while: short outages are bridged, and long ones reported."""

from __future__ import annotations

import pytest

from gradwire.transport.types import Limits

from .faults import MEGABYTE, measure_round_trips
from .simulator import Link, Simulator


def test_five_seconds_on_two_seconds_off() -> None:
    link = Link(0.005, rate_bytes_per_s=1.25e6, queue_bytes=100_000)
    simulator = Simulator(7, Link(delay_s=0.005))
    one, two = simulator.mesh(2)
    simulator.links[one.address, two.address] = link
    back = simulator.link(two, one)

    def switch(blocked: bool) -> None:
        link.blocked = back.blocked = blocked
        simulator.call_at(simulator.now_s + (2.0 if blocked else 5.0), lambda: switch(not blocked))

    simulator.call_at(simulator.now_s + 1.0, lambda: switch(True))
    ticket = simulator.publish(one, bytes(10 * MEGABYTE))
    started_s = simulator.now_s
    simulator.run_until(lambda: ticket.is_done, 60.0)
    assert ticket.delivered
    # 8.4 s at the rate of the link, and two or three outages.
    assert simulator.now_s - started_s < 18.0
    assert one.lost == two.lost == []


def test_after_thirty_seconds_of_silence_the_peer_is_lost_and_reconnects() -> None:
    simulator = Simulator(8)
    one, two = simulator.mesh(2)
    for source, target in ((one, two), (two, one)):
        simulator.link(source, target).blocked = True
    tickets = [simulator.publish(one, bytes(100), index) for index in range(5)]
    simulator.run_for(30.0)
    assert [event.reason for event in one.lost] == ["timeout"]
    assert list(one.lost[0].undelivered) == tickets
    for link in simulator.links.values():
        link.blocked = False
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 5.0)
    simulator.publish(one, b"again", 9)
    simulator.run_until(lambda: bool(two.payloads), 1.0)
    assert two.payloads == [b"again"]


@pytest.mark.parametrize("outage_s", [11.0, 30.0])
def test_an_outage_in_the_middle_of_a_stream_is_reported_to_the_message(outage_s: float) -> None:
    simulator = Simulator(18)
    one, two = simulator.mesh(2)
    there, back = simulator.link(one, two), simulator.link(two, one)
    there.rate_bytes_per_s, there.queue_bytes = 12.5e6, 125_000
    sent = [simulator.random.randbytes(300_000) for _ in range(40)]
    tickets = [simulator.publish(one, payload, tag) for tag, payload in enumerate(sent)]
    simulator.run_for(0.5)  # of the second that all of it takes
    there.blocked = back.blocked = True
    simulator.run_for(outage_s)
    there.blocked = back.blocked = False
    (event,) = one.lost
    assert event.reason == "timeout"
    assert list(event.undelivered) == [ticket for ticket in tickets if ticket.failed]
    delivered = [ticket.tag for ticket in tickets if ticket.delivered]
    assert 5 < len(delivered) < 35
    assert len(delivered) + len(event.undelivered) == 40
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 5.0)
    for tag, payload in enumerate(sent[:5], 100):
        simulator.publish(one, payload, tag)
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 5.0)
    tags = [tag for _, tag, _ in two.received]
    before = [tag for tag in tags if tag < 100]
    # The acknowledgement of one more may have been under way when the outage began.
    assert before in (delivered, [*delivered, len(delivered)])
    assert tags == [*before, *range(100, 105)]
    assert two.payloads == [*sent[: len(before)], *sent[:5]]
    assert one.endpoint.stats().send_log_bytes == 0


def test_a_crashed_peer_is_lost_in_time_although_heartbeats_are_seconds_apart() -> None:
    """The time between two heartbeats does not count as a pause of this process, however long it is."""
    limits = Limits(heartbeat_s=2.0, down_s=12.0)
    simulator = Simulator(19)
    one, two = simulator.mesh(2, limits=limits)
    simulator.crash(two)
    simulator.run_until(lambda: bool(one.lost), 15.5)
    assert one.lost[0].reason == "timeout"


def test_a_one_way_partition_ends_on_both_sides() -> None:
    simulator = Simulator(9)
    one, two = simulator.mesh(2)
    simulator.link(one, two).blocked = True
    simulator.run_for(15.0)
    assert one.lost
    assert two.lost
    simulator.link(one, two).blocked = False
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 15.0)


@pytest.mark.parametrize("seed", range(10, 15))
def test_clogging_every_link_in_turn_loses_no_message(seed: int) -> None:
    simulator = Simulator(seed, Link(loss=0.01))
    hosts = simulator.mesh(4)
    links = [simulator.link(a, b) for a in hosts for b in hosts if a is not b]
    simulator.random.shuffle(links)
    for index, link in enumerate(links):
        simulator.call_at(simulator.now_s + 0.1 * index, lambda link=link: _block(link, True))
    simulator.random.shuffle(links)  # they are opened in another order
    for index, link in enumerate(links):
        simulator.call_at(
            simulator.now_s + 1.2 + 0.3 * index, lambda link=link: _block(link, False)
        )
    for index in range(100):
        for host in hosts:
            simulator.publish(host, bytes(2_000), index)
        simulator.run_for(0.05)
    simulator.run_until(lambda: all(len(host.received) == 300 for host in hosts), 20.0)
    for host in hosts:
        for peer in host.endpoint.peers:
            assert [tag for sender, tag, _ in host.received if sender == peer] == list(range(100))
    assert all(host.lost == [] for host in hosts)


def _block(link: Link, blocked: bool) -> None:
    link.blocked = blocked


def test_a_starved_timer_thread_recovers() -> None:
    simulator = Simulator(11, Link(loss=0.02))
    one, two = simulator.mesh(2)
    for index in range(40):
        simulator.publish(one, bytes(20_000), index)
        one.paused = index % 2 == 0
        simulator.run_for(0.2)
        if one.paused:
            simulator.resume(one)
    simulator.run_until(lambda: len(two.received) == 40, 10.0)
    assert one.lost == two.lost == []


def test_after_a_pause_of_the_peer_a_lost_datagram_comes_again_as_soon_as_before() -> None:
    simulator = Simulator(20, Link(delay_s=0.02))
    one, two = simulator.mesh(2)
    measure_round_trips(simulator, one, pause_s=0.05)
    session = next(iter(one.endpoint.sessions))
    probe_timeout_s = session.rtt.probe_timeout_s
    two.paused = True
    ticket = simulator.publish(one, b"over the pause")
    simulator.run_for(5.0)
    simulator.resume(two)
    simulator.run_until(lambda: ticket.is_done, 1.0)
    simulator.run_for(0.1)
    assert session.rtt.probe_timeout_s < 1.1 * probe_timeout_s


def test_a_peer_that_loses_the_connection_alone_is_back_as_soon_as_it_counts_as_silent() -> None:
    simulator = Simulator(21)
    one, two = simulator.mesh(2)
    simulator.run_for(1.0)
    there = simulator.link(one, two)
    there.blocked = True
    for session in one.endpoint.sessions:
        session.give_up("timeout", simulator.now_s)
    simulator.run_for(0.05)  # the goodbye is lost
    there.blocked = False
    assert not one.endpoint.peers
    assert two.endpoint.peers
    simulator.run_until(lambda: bool(one.endpoint.peers), 4.0)
    simulator.run_for(0.05)
    assert [event.reason for event in two.lost] == ["timeout"]
