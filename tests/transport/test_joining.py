"""Joining and leaving at bad moments: under full load, during a handshake, a message, a change of keys."""

from __future__ import annotations

import pytest

from .faults import MEGABYTE
from .simulator import Host, Link, Simulator
from .vopr import EPOCH_RECORDS


def keep_busy(simulator: Simulator, host: Host, nbytes: int) -> None:
    """Publish so that the host never runs out of something to send."""
    while host.endpoint.log.used_bytes < 2 * nbytes:
        simulator.publish(host, bytes(nbytes), len(host.tickets))


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_visitors_under_full_load_disturb_nobody(count: int) -> None:
    simulator = Simulator(2)
    one, two = simulator.mesh(2)
    simulator.link(one, two).rate_bytes_per_s = 12.5e6
    started_s, visits = simulator.now_s, 0
    for visit in range(count):
        keep_busy(simulator, one, 200_000)
        visitor = simulator.add("visitor")
        visitor.endpoint.connect(one.address)
        before = len(one.tickets)
        for _ in range(6):
            simulator.run_for(0.005)
            keep_busy(simulator, one, 200_000)
        visits += bool(visitor.endpoint.peers)
        tags = [tag for peer, tag, _ in visitor.received if peer.id == one.endpoint.local.node_id]
        # A visitor gets every message published after it joined, without a gap.
        assert tags == list(range(tags[0], tags[0] + len(tags))) if tags else not visitor.received
        assert not tags or tags[0] >= before - 1
        if visit % 2:  # the last one closes, or the end would have to wait for a timeout
            visitor.endpoint.close(simulator.now_s)
        else:
            simulator.crash(visitor)
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 30.0)
    assert visits > 0.9 * count
    assert [tag for _, tag, _ in two.received] == list(range(len(one.tickets)))
    assert two.endpoint.stats().duplicate_fragments < 100
    rate = sum(map(len, two.payloads)) / (simulator.now_s - started_s)
    assert rate > 0.3 * 12.5e6


@pytest.mark.parametrize("datagrams", range(1, 11))
@pytest.mark.parametrize("who", ["initiator", "responder"])
def test_a_node_that_crashes_in_a_handshake_is_forgotten_and_connects_after_its_restart(
    datagrams: int, who: str
) -> None:
    simulator = Simulator(datagrams)
    one, two = simulator.add("one", node_id=1), simulator.add("two", node_id=2)
    passed = 0

    def count(*_: object) -> bool:
        nonlocal passed
        passed += 1
        if passed == datagrams:
            simulator.crash(one if who == "initiator" else two)
        return False

    simulator.link(one, two).drop = simulator.link(two, one).drop = count
    one.endpoint.connect(two.address)
    simulator.run_for(0.5)
    if who == "initiator":
        survivor = two
        one = simulator.add("one", node_id=1)
        one.endpoint.connect(two.address)
    else:
        survivor = one
        two = simulator.add("two", node_id=2)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 12.0)
    ticket = simulator.publish(one, b"after all")
    simulator.run_until(lambda: ticket.is_done, 1.0)
    assert two.payloads == [b"after all"]
    simulator.run_for(20.0)
    assert len(survivor.endpoint.sessions.by_index) == 1
    assert len(survivor.endpoint.peers) == 1


@pytest.mark.parametrize("datagrams", range(1, 9))
def test_the_successor_of_a_node_that_closes_in_a_handshake_is_connected_soon(
    datagrams: int,
) -> None:
    """As of a process that ends a training and begins the next one, which another process has begun already."""
    simulator = Simulator(1)
    first, other = simulator.add("first", node_id=1), simulator.add("other", node_id=2)
    passed = 0

    def count(*_: object) -> bool:
        nonlocal passed
        passed += 1
        return False

    for link in (simulator.link(first, other), simulator.link(other, first)):
        link.drop = count
    other.endpoint.connect(first.address)
    simulator.run_until(lambda: passed >= datagrams, 5.0)
    first.endpoint.close(simulator.now_s)
    simulator.run_until(lambda: first.endpoint.is_closed, 1.0)
    simulator.run_for(0.01)
    simulator.crash(first)
    again = simulator.add("first", node_id=1)
    began_s = simulator.now_s
    simulator.run_until(lambda: len(other.endpoint.peers) == len(again.endpoint.peers) == 1, 30.0)
    assert simulator.now_s - began_s < 3.0


def test_a_node_that_leaves_with_fragments_in_flight_disturbs_nobody() -> None:
    simulator = Simulator(3)
    one, two, leaver = simulator.mesh(3)
    for source in (one, leaver):
        simulator.link(source, two).rate_bytes_per_s = 12.5e6
    tickets = [simulator.publish(one, bytes([tag]) * MEGABYTE, tag) for tag in range(6)]
    own = simulator.publish(leaver, bytes(MEGABYTE), 99)
    simulator.run_for(0.03)  # a third of its message has arrived, and some of the messages to it
    assert own.pending
    leaver.endpoint.close(simulator.now_s)
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 5.0)
    assert own.is_done
    for host in (one, two):
        (event,) = host.lost
        assert (event.peer.id, event.reason) == (leaver.endpoint.local.node_id, "left")
    assert [tag for peer, tag, _ in two.received if peer.id == one.endpoint.local.node_id] == list(
        range(6)
    )
    assert two.endpoint.stats().receive_queue_bytes == 0
    assert one.endpoint.stats().send_log_bytes == 0


@pytest.mark.parametrize("seed", range(2))
def test_joining_while_the_key_changes_at_full_load_loses_nothing(seed: int) -> None:
    simulator = Simulator(seed, Link(loss=0.05, jitter_s=0.002))
    one, two = simulator.mesh(2, first_record=EPOCH_RECORDS - 50)
    visitors = []
    for index in range(10):
        visitors.append(simulator.add(f"v{index}"))
        visitors[-1].endpoint.connect(one.address)
        for _ in range(10):
            simulator.publish(one, bytes(5_000), len(one.tickets))
            simulator.run_for(0.01)
    simulator.run_until(lambda: len(one.endpoint.peers) == 11, 20.0)
    simulator.publish(one, bytes(5_000), len(one.tickets))
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 20.0)
    assert one.endpoint.log.head > EPOCH_RECORDS + 50
    assert [tag for _, tag, _ in two.received] == list(range(len(one.tickets)))
    for visitor in visitors:
        tags = [tag for peer, tag, _ in visitor.received if peer.id == one.endpoint.local.node_id]
        assert tags == list(range(tags[0], len(one.tickets)))
        assert visitor.lost == []
