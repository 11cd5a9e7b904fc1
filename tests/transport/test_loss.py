"""Lost datagrams: little is sent twice, and nothing waits long."""

from __future__ import annotations

import pytest

from gradwire.transport.types import Limits

from .faults import MEGABYTE, data_fragments, measure_round_trips, transfer
from .simulator import Link, Simulator

FRAGMENTS = 52  # of a full record


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("where", ["both", "data", "control"])
def test_random_loss_loses_no_message_and_little_is_sent_twice(loss: float, where: str) -> None:
    link = Link(loss=loss if where != "control" else 0.0)
    done = transfer(link, 3 * MEGABYTE, back=Link(loss=loss if where != "data" else 0.0))
    assert done.resent_bytes <= 1.1 * link.lost_bytes + 6_000  # a few probes


def test_half_of_the_acknowledgements_may_be_lost() -> None:
    link = Link()
    done = transfer(link, 3 * MEGABYTE, back=Link(loss=0.5))
    assert done.resent_bytes < 0.02 * 3 * MEGABYTE


def test_bursts_of_loss_lose_no_message() -> None:
    link = Link(burst_loss=(0.004, 0.05))  # holes of 20 datagrams on average
    done = transfer(link, 5 * MEGABYTE)
    assert link.lost_bytes > 100_000
    assert done.resent_bytes <= 1.1 * link.lost_bytes + 6_000  # a few probes


def test_a_hole_of_100_kilobytes_heals() -> None:
    link = Link(
        drop=data_fragments(lambda record, fragment, _: 90 <= record * FRAGMENTS + fragment < 174)
    )
    done = transfer(link, MEGABYTE)
    assert link.lost_bytes == 84 * 1_200
    assert done.resent_bytes <= 1.1 * link.lost_bytes


def test_a_lost_record_heals() -> None:
    link = Link(drop=data_fragments(lambda record, *_: record == 5))
    assert transfer(link, MEGABYTE).resent_bytes <= 1.1 * link.lost_bytes


@pytest.mark.parametrize("lost", ["first", "last", "only"])
def test_the_lost_end_of_a_message_comes_again_within_three_probe_timeouts(lost: str) -> None:
    simulator = Simulator(1)
    one, two = simulator.mesh(2)
    measure_round_trips(simulator, one)
    session = next(iter(one.endpoint.sessions))
    probe_timeout_s = session.rtt.probe_timeout_s
    assert probe_timeout_s < 0.01
    link = simulator.link(one, two)
    head = one.endpoint.log.head
    link.drop = data_fragments(
        lambda record, fragment, fragments: (
            record >= head and fragment == (0 if lost == "first" else fragments - 1)
        )
    )
    started_s = simulator.now_s
    ticket = simulator.publish(one, bytes(10 if lost == "only" else 30_000), 99)
    simulator.run_until(lambda: ticket.is_done, 1.0)
    assert link.lost_bytes > 0
    assert simulator.now_s - started_s < 3 * probe_timeout_s + 0.003
    assert two.received[-1][1] == 99


def test_probes_lost_one_after_the_other_do_not_make_a_tail_wait_long() -> None:
    simulator = Simulator(1)
    one, two = simulator.mesh(2)
    measure_round_trips(simulator, one)
    session = next(iter(one.endpoint.sessions))
    probe_timeout_s = session.rtt.probe_timeout_s
    link = simulator.link(one, two)
    lost_until = link.count + 4  # the message itself, and three probes after it
    link.drop = lambda number, _: number <= lost_until
    started_s = simulator.now_s
    ticket = simulator.publish(one, b"tail", 99)
    simulator.run_until(lambda: ticket.is_done, 1.0)
    assert link.count > lost_until
    assert simulator.now_s - started_s < 6 * probe_timeout_s


def test_a_tail_lost_in_a_queue_that_has_emptied_comes_again_at_once() -> None:
    """Earlier round trips are no measure for the answers to probes: early answers are believed in the end."""
    simulator = Simulator(1, Link(delay_s=0.05))
    one, two = simulator.mesh(2)
    measure_round_trips(simulator, one, pause_s=0.12)
    session = next(iter(one.endpoint.sessions))
    probe_timeout_s = session.rtt.probe_timeout_s
    head = one.endpoint.log.head
    for link in (simulator.link(one, two), simulator.link(two, one)):
        link.delay_s = 0.0001
    link = simulator.link(one, two)
    link.drop = data_fragments(lambda record, fragment, _: record >= head and fragment >= 4)
    started_s = simulator.now_s
    ticket = simulator.publish(one, bytes(50_000), 99)
    simulator.run_until(lambda: ticket.is_done, 20.0)
    assert link.lost_bytes > 40_000
    # Two to notice, three to send it at the pace of an unknown path.
    assert simulator.now_s - started_s < 6 * probe_timeout_s


def test_a_record_lost_in_a_steady_flow_comes_again_within_three_round_trips() -> None:
    simulator = Simulator(1, Link(delay_s=0.01))
    one, two = simulator.mesh(2)
    simulator.link(one, two).drop = data_fragments(lambda record, *_: record == 100)
    arrival_s = {}
    for index in range(200):
        simulator.publish(one, b"steady", index)
        simulator.run_for(0.002)
        for _, tag, _ in two.received[len(arrival_s) :]:
            arrival_s[tag] = simulator.now_s - (1_000.0 if tag < 0 else 0.0)
        if index == 100:
            published_s = simulator.now_s
    assert 0.02 < arrival_s[100] - published_s < 0.065


def test_a_hundred_single_gaps_in_ten_megabytes_cause_no_storm() -> None:
    link = Link(
        drop=data_fragments(lambda record, fragment, _: (record * FRAGMENTS + fragment) % 85 == 7)
    )
    done = transfer(link, 10 * MEGABYTE)
    assert link.lost_bytes >= 100 * 1_200
    assert done.resent_bytes <= 1.1 * link.lost_bytes


def test_a_path_that_swallows_datagrams_of_full_size_is_not_flooded() -> None:
    """PINGs and their answers are small enough to pass, and show every loss at once."""
    simulator = Simulator(1)
    one, two = simulator.mesh(2, limits=Limits(datagram_bytes=8_000))
    link = simulator.link(one, two)
    link.drop = lambda _, datagram: len(datagram) > 1_472
    ticket = simulator.publish(one, bytes(1_600_000))
    simulator.run_for(5.0)
    lost_bytes = link.lost_bytes
    simulator.run_for(10.0)
    assert link.lost_bytes - lost_bytes < MEGABYTE
    link.drop = None
    simulator.run_until(lambda: ticket.is_done, 2.0)
