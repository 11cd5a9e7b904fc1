"""Sizes, numbers and clocks at their limits."""

from __future__ import annotations

import itertools
import os
import time

import pytest

from gradwire.transport import Limits, Node, PeerLost, crypto

from .faults import MEGABYTE
from .processes import SECRET, PeerProcess, payload_of
from .simulator import Link, Simulator


def test_the_last_record_numbers_below_2_to_the_48_work() -> None:
    simulator = Simulator(1, Link(loss=0.02))
    one = simulator.add("one", first_record=2**48 - 400)
    two = simulator.add("two")
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 5.0)
    for index in range(399):
        simulator.publish(one, index.to_bytes(2, "little"), index)
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 5.0)
    assert one.endpoint.log.head == 2**48 - 1
    assert [tag for _, tag, _ in two.received] == list(range(399))


@pytest.mark.parametrize(
    "records", [6_000, pytest.param(100_000, marks=pytest.mark.slow)], ids="{} records".format
)
def test_a_new_key_every_2048_records_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    """The shortest epoch that is longer than the window of records in flight."""
    monkeypatch.setattr(crypto, "EPOCH_BITS", 11)
    simulator = Simulator(2, Link(delay_s=0.0002, loss=0.005))
    one, two = simulator.mesh(2)
    for tag in range(0, records, 10):
        for each in range(tag, tag + 10):
            simulator.publish(one, each.to_bytes(4, "little"), each)
        simulator.run_for(0.002)
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 10.0)
    assert [tag for _, tag, _ in two.received] == list(range(records))
    assert [int.from_bytes(payload, "little") for payload in two.payloads] == list(range(records))
    assert two.endpoint.stats().rejected_records == 0
    assert one.lost == two.lost == []


def test_small_messages_between_large_ones_arrive_in_order() -> None:
    simulator = Simulator(3, Link(loss=0.002))
    one, two = simulator.mesh(2)
    simulator.link(one, two).rate_bytes_per_s = 125e6
    started_s = simulator.now_s
    sizes = [nbytes for _ in range(3) for nbytes in (8 * MEGABYTE, *[300] * 40)]
    for tag, nbytes in enumerate(sizes):
        simulator.publish(one, tag.to_bytes(1, "little") * nbytes, tag)
        simulator.run_for(0.002)
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 10.0)
    assert [tag for _, tag, _ in two.received] == list(range(len(sizes)))
    assert all(
        payload == tag.to_bytes(1, "little") * nbytes
        for (_, tag, payload), nbytes in zip(two.received, sizes, strict=True)
    )
    assert sum(sizes) / (simulator.now_s - started_s) > 0.6 * 125e6


@pytest.mark.slow
def test_a_message_of_256_megabytes_arrives_complete() -> None:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory_bytes < 4 << 30:
        pytest.skip(f"needs 4 GB of memory; this machine has {memory_bytes / 1e9:.1f}")
    nbytes = 256 * MEGABYTE
    bounds = {
        "message_bytes_max": nbytes,
        "send_log_bytes": 3 * nbytes,
        "receive_bytes": 2 * nbytes,
    }
    with (
        Node("127.0.0.1:0", secret=SECRET, limits=Limits(**bounds)) as node,
        PeerProcess([node.address], limits=bounds) as peer,
    ):
        peer.ask("wait", peers=1)
        peer.tell("send", messages=2, nbytes=nbytes, timeout_s=60.0)
        found = []
        end_s = time.monotonic() + 60.0
        while len(found) < 2 and time.monotonic() < end_s:
            found += node.receive(timeout_s=0.5)
        assert peer.answer()["is_drained"]
        assert [message.tag for message in found] == [0, 1]
        for message in found:
            assert message.payload == payload_of(peer.id, message.tag, nbytes)


def test_the_wall_clock_may_jump_by_an_hour_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as one,
        Node("127.0.0.1:0", [one.address], secret=SECRET) as two,
    ):
        for node in (one, two):
            node.wait_for_peers(1, timeout_s=5.0)
        real_s, jumps = time.time(), itertools.cycle((3_600.0, -3_600.0))
        monkeypatch.setattr(time, "time", lambda: real_s + next(jumps))
        monkeypatch.setattr(time, "time_ns", lambda: int((real_s + next(jumps)) * 1e9))
        for tag in range(30):
            one.publish(bytes([tag]) * 100_000, tag)
            (message,) = two.receive(timeout_s=5.0)
            assert (message.tag, bytes(message.payload)) == (tag, bytes([tag]) * 100_000)
            one.receive(timeout_s=0.02)
        assert one.drain(timeout_s=5.0)
        for node in (one, two):
            assert [event for event in node.events() if isinstance(event, PeerLost)] == []
        # A node that starts while the clock is wrong connects as well.
        with Node("127.0.0.1:0", [one.address], secret=SECRET) as late:
            assert len(late.wait_for_peers(2, timeout_s=5.0)) == 2
