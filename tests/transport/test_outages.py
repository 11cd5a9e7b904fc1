"""Links and nodes that stop for a while: what can be bridged is, and the rest is told."""

from __future__ import annotations

from .faults import MEGABYTE
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
    assert (
        simulator.now_s - started_s < 18.0
    )  # 8.4 s at the rate of the link, and two or three outages
    assert one.lost == two.lost == []


def test_thirty_seconds_of_silence_lose_the_peer_and_it_comes_back() -> None:
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


def test_a_one_way_partition_ends_on_both_sides() -> None:
    simulator = Simulator(9)
    one, two = simulator.mesh(2)
    simulator.link(one, two).blocked = True
    simulator.run_for(15.0)
    assert one.lost
    assert two.lost
    simulator.link(one, two).blocked = False
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 15.0)


def test_clogging_every_link_in_turn_loses_nothing() -> None:
    simulator = Simulator(10, Link(loss=0.01))
    hosts = simulator.mesh(4)
    for index, link_of in enumerate([(a, b) for a in hosts for b in hosts if a is not b]):
        link = simulator.link(*link_of)
        simulator.call_at(
            simulator.now_s + 0.1 * index, lambda link=link: setattr(link, "blocked", True)
        )
        simulator.call_at(
            simulator.now_s + 1.2 + 0.1 * (11 - index),
            lambda link=link: setattr(link, "blocked", False),
        )
    for index in range(60):
        for host in hosts:
            simulator.publish(host, bytes(2_000), index)
        simulator.run_for(0.05)
    simulator.run_until(lambda: all(len(host.received) == 180 for host in hosts), 20.0)


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
