"""Rates in simulated time: delays, bottlenecks, many senders at once, and slow consumers."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from gradwire.errors import WouldBlock
from gradwire.transport.types import Limits

from .faults import MEGABYTE, measure_round_trips, transfer
from .simulator import Host, Link, Simulator


@pytest.mark.parametrize("delay_s", [0.00005, 0.001, 0.015, 0.1, 0.75])
def test_any_delay_is_bridged_without_sending_twice(delay_s: float) -> None:
    done = transfer(Link(delay_s=delay_s), 5 * MEGABYTE)
    assert done.resent_bytes < 20_000
    assert done.elapsed_s < 0.2 + 16 * delay_s


@pytest.mark.parametrize(
    ("link", "nbytes", "share"),
    [
        (Link(0.0005, rate_bytes_per_s=12.5e6, queue_bytes=125_000), 16 * MEGABYTE, 0.92),
        (Link(0.02, loss=0.01, rate_bytes_per_s=12.5e6, queue_bytes=500_000), 24 * MEGABYTE, 0.8),
        (Link(0.015, rate_bytes_per_s=1.25e6, queue_bytes=35_000), 3 * MEGABYTE, 0.8),
        (Link(0.001, rate_bytes_per_s=125e6, queue_bytes=50_000), 32 * MEGABYTE, 0.8),
    ],
    ids=[
        "100 Mbit/s",
        "100 Mbit/s 40 ms 1 %",
        "10 Mbit/s queue of 25",
        "1 Gbit/s queue of 0.2 BDP",
    ],
)
def test_a_bottleneck_is_used(link: Link, nbytes: int, share: float) -> None:
    done = transfer(link, nbytes, back=Link(link.delay_s, loss=link.loss))
    rate = nbytes / done.elapsed_s
    assert rate >= share * link.rate_bytes_per_s
    assert done.resent_bytes <= 1.2 * link.lost_bytes


def crowd_s(senders: int, seed: int = 6) -> list[float]:
    """Return when each sender of 1 MB to one sink was done, over a shared link with a queue of 256 kB."""
    simulator = Simulator(seed, Link(delay_s=0.00005))
    sink = simulator.add("sink")
    hosts = [simulator.add(f"s{index}") for index in range(senders)]
    shared = Link(0.00005, rate_bytes_per_s=125e6, queue_bytes=256_000)
    for host in hosts:
        host.endpoint.connect(sink.address)
    simulator.run_until(lambda: all(sink_peer(host, sink) for host in hosts), 10.0)
    for host in hosts:
        simulator.links[host.address, sink.address] = shared
    started_s = simulator.now_s
    finished_s: dict[str, float] = {}
    tickets = {
        host.name: simulator.publish(host, bytes(MEGABYTE), 0, sink_peer(host, sink))  # type: ignore[arg-type]
        for host in hosts
    }
    while len(finished_s) < senders:
        simulator.run_for(0.001)
        assert simulator.now_s - started_s < 5.0
        for name, ticket in tickets.items():
            if ticket.is_done:
                finished_s.setdefault(name, simulator.now_s - started_s)
    return list(finished_s.values())


def test_small_messages_do_not_slow_down_a_larger_one_after_them() -> None:
    simulator = Simulator(1)
    one, _ = simulator.mesh(2)
    simulator.publish(one, bytes(MEGABYTE), 0)
    simulator.run_for(1.0)
    [before] = one.endpoint.stats().peers
    measure_round_trips(simulator, one)
    [after] = one.endpoint.stats().peers
    assert after.rate_bytes_per_s >= before.rate_bytes_per_s > 1e7
    started_s = simulator.now_s
    ticket = simulator.publish(one, bytes(30_000), 99)
    simulator.run_until(lambda: ticket.is_done, 1.0)
    assert simulator.now_s - started_s < 3 * before.srtt_s


def test_messages_of_a_round_trip_learn_that_a_queue_is_short() -> None:
    """In each of them the sender soon has nothing to send, and the queue, of 1 ms, delays nothing."""
    link = Link(0.01, rate_bytes_per_s=125e6, queue_bytes=125_000)
    simulator = Simulator(1, Link(delay_s=0.01))
    one, two = simulator.mesh(2)
    simulator.links[one.address, two.address] = link
    for index in range(16):
        ticket = simulator.publish(one, bytes(3 * MEGABYTE), index)
        simulator.run_until(lambda ticket=ticket: ticket.is_done, 10.0)  # type: ignore[misc]
        simulator.run_for(0.5)
    assert one.endpoint.stats().lost_bytes < 0.1 * 16 * 3 * MEGABYTE


@pytest.mark.parametrize("senders", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_many_to_one_use_the_link(senders: int) -> None:
    # The last of many may lose its last datagrams again and again, so single runs differ much.
    shares = [senders * MEGABYTE / max(crowd_s(senders, seed)) / 125e6 for seed in (5, 6, 7)]
    assert statistics.median(shares) >= 0.8
    assert min(shares) >= 0.6


@pytest.mark.parametrize("senders", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_many_to_one_share_the_link_fairly(senders: int) -> None:
    rates = [1 / seconds for seconds in crowd_s(senders)]
    jain = sum(rates) ** 2 / (senders * sum(rate**2 for rate in rates))
    assert jain >= 0.9


def sink_peer(host: Host, sink: Host) -> object:
    return next(
        (peer for peer in host.endpoint.peers if peer.id == sink.endpoint.local.node_id), None
    )


# ---- slow consumers ---------------------------------------------------------------------------------------------


def test_a_consumer_that_sleeps_two_and_a_half_seconds_loses_nothing() -> None:
    limits = Limits(
        message_bytes_max=MEGABYTE,
        send_log_bytes=4 * MEGABYTE,
        receive_bytes=2 * MEGABYTE,
        window_bytes=MEGABYTE,
    )
    simulator = Simulator(16)
    one, two = simulator.mesh(2, limits=limits)
    two.reads = False
    simulator.call_at(simulator.now_s + 2.5, lambda: setattr(two, "reads", True))
    sent = refused = 0
    while sent < 100:
        try:
            simulator.publish(one, bytes(100_000), sent)
            sent += 1
        except WouldBlock:
            refused += 1
            simulator.run_for(0.01)
    simulator.run_until(lambda: len(two.received) == 100, 10.0)
    assert refused > 50
    assert one.lost == two.lost == []


def test_a_slow_consumer_takes_as_much_from_each_sender() -> None:
    limits = Limits(
        message_bytes_max=100_000,
        send_log_bytes=MEGABYTE,
        receive_bytes=200_000,
        window_bytes=MEGABYTE,
    )
    simulator = Simulator(3)
    slow, *senders = simulator.mesh(4, limits=limits)
    slow.reads = False
    taken: Counter[int] = Counter()
    for _ in range(60):
        for sender in senders:
            while sender.endpoint.has_room(90_000):
                simulator.publish(sender, bytes(90_000))
        simulator.run_for(0.05)
        taken.update(each.peer.id for each in slow.endpoint.take_messages(simulator.now_s))
    shares = [taken[sender.endpoint.local.node_id] for sender in senders]
    assert sum(shares) > 100
    assert min(shares) > 0.9 * max(shares)
