"""Somebody on the path spoils records: the transfer gets slower, and finishes."""

from __future__ import annotations

import random

from gradwire.transport.model import Limits
from gradwire.transport.poison import FAILURES_WITHIN_S, SAY_AGAIN_S, SINGLE_S, PoisonWatch

from .simulator import Link, Simulator

LIMITS = Limits(fragment_bytes_max=1_384)  # datagrams of one size, so that they can be counted


def test_a_transfer_finishes_while_every_record_of_several_datagrams_is_spoiled() -> None:
    simulator = Simulator(1, Link(poisoned=True))
    one, two = simulator.mesh(2, limits=LIMITS)
    generator = random.Random(1)
    sent = [generator.randbytes(size) for size in (300_000, 10, 1_000_000, 5_000)]
    tickets = [simulator.publish(one, payload, tag) for tag, payload in enumerate(sent)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 5.0)
    assert two.payloads == sent
    assert all(ticket.delivered for ticket in tickets)
    assert 3 <= two.endpoint.stats().rejected_records < 60
    assert one.endpoint.stats().recut_records >= 1_305_010 // 1_344
    # The attack goes on, and what is published now is sent in single datagrams from the start.
    rejected = two.endpoint.stats().rejected_records
    simulator.publish(one, sent[0], 9)
    simulator.run_until(lambda: len(two.received) == 5, 1.0)
    assert two.endpoint.stats().rejected_records == rejected


def test_both_directions_and_a_third_node_survive_a_poisoned_network() -> None:
    simulator = Simulator(2, Link(poisoned=True))
    hosts = simulator.mesh(3, limits=LIMITS)
    sent = {host.name: random.Random(host.name).randbytes(400_000) for host in hosts}
    for host in hosts:
        simulator.publish(host, sent[host.name])
    simulator.run_until(lambda: all(len(host.received) == 2 for host in hosts), 5.0)
    for host in hosts:
        others = sorted(payload for name, payload in sent.items() if name != host.name)
        assert sorted(host.payloads) == others


def test_large_records_come_back_a_minute_after_the_attack() -> None:
    simulator = Simulator(3, Link(poisoned=True))
    one, two = simulator.mesh(2, limits=LIMITS)
    simulator.publish(one, bytes(200_000))
    simulator.run_until(lambda: len(two.received) == 1, 5.0)
    simulator.default.poisoned = False
    head = one.endpoint.log.head
    simulator.publish(one, bytes(200_000))
    assert one.endpoint.log.head - head == -(-200_000 // 1_344)
    simulator.run_for(SINGLE_S + 1.0)
    head = one.endpoint.log.head
    simulator.publish(one, bytes(200_000))
    assert one.endpoint.log.head - head == 4
    simulator.run_until(lambda: len(two.received) == 3, 1.0)


def test_two_failures_are_chance_and_three_within_ten_seconds_are_not() -> None:
    watch = PoisonWatch()
    for at_s in (0.0, 1.0, FAILURES_WITHIN_S + 0.5):
        watch.on_failure(at_s)
        assert not watch.is_due
    watch.on_failure(FAILURES_WITHIN_S + 0.9)
    assert watch.is_due
    watch.is_due = False
    watch.on_failure(FAILURES_WITHIN_S + 0.9 + SAY_AGAIN_S / 2)
    assert not watch.is_due
    watch.on_failure(FAILURES_WITHIN_S + 1.0 + SAY_AGAIN_S)
    assert watch.is_due
