"""Cutting records anew in mid-run: every message still comes once, in order, and its ticket still tells the truth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import WouldBlock
from gradwire.transport.crypto import SenderKey
from gradwire.transport.model import Limits, Peer
from gradwire.transport.records import Outgoing, SendLog
from gradwire.transport.recut import growth_max, recut
from gradwire.transport.sealer import Sealer, open_record
from gradwire.transport.wire import RECORD_META, RECORD_META_BYTES

from .simulator import Host, Link, Simulator

LIMITS = Limits(
    message_bytes_max=1 << 20, send_log_bytes=4 << 20, receive_bytes=2 << 20, window_bytes=1 << 20
)
FRAMINGS = ((1_384, 64), (1_384, 1), (1_184, 64), (1_184, 1), (8_956, 64), (1_184, 3))
SIZES = (0, 1, 300, 1_344, 1_345, 20_000, 62_241, 200_000)
KEY = SenderKey.generate(3, random.Random(1).randbytes)


def sealed_log(payloads: list[bytes], fragment_bytes: int, recipients: frozenset[int]) -> SendLog:
    log = SendLog(1 << 30)
    sealer = Sealer(KEY, 9, fragment_bytes)
    for index, payload in enumerate(payloads):
        message = Outgoing(recipients, 0)
        for record in sealer.seal_message(log.head, message, index, index, memoryview(payload)):
            log.append(record)
    return log


def payloads_in(log: SendLog, recipient: int) -> dict[int, bytes]:
    """Return the messages that the records for one session make, checking that they are in order and whole."""
    found: dict[int, bytearray] = {}
    for record in log:
        if recipient in record.message.recipients:
            plain = open_record(record, KEY)
            number, _, _, offset = RECORD_META.unpack_from(plain)
            message = found.setdefault(number, bytearray())
            assert (offset, max(found)) == (len(message), number)
            message += plain[RECORD_META_BYTES:]
    return {number: bytes(message) for number, message in found.items()}


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=5),
    st.lists(st.sampled_from([1_184, 1_232, 1_384, 1_456, 8_956]), min_size=1, max_size=3),
)
def test_the_new_records_say_the_same_and_take_little_more_room(
    sizes: list[int], steps: list[int]
) -> None:
    """Sizes fall or stay the same, as they do in a run; the last cut is the smallest there is."""
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    log = sealed_log(payloads, max(steps), frozenset({1}))
    before = log.used_bytes
    sealer = Sealer(KEY, 9, max(steps))
    for fragment_bytes, fragments_max in ((max(steps), 1), (1_184, 64), (1_184, 1)):
        sealer.reframe(fragment_bytes, fragments_max)
        first = log.head
        moved = recut(log, sealer, {3: KEY}, {1: 0})
        assert (log.base, max(moved.values())) == (first, log.head - 1)
        assert log.used_bytes == sum(len(record.wire) for record in log)
        assert log.used_bytes <= before * growth_max(1_184)
        assert all(record.datagram_bytes <= fragment_bytes + 16 for record in log)
    assert payloads_in(log, 1) == dict(enumerate(payloads))


def test_each_new_record_goes_only_to_the_peers_that_lack_the_old_one() -> None:
    log = sealed_log([bytes(10), bytes(10), bytes(10)], 1_384, frozenset({1, 2, 3}))
    moved = recut(log, Sealer(KEY, 9, 1_184), {3: KEY}, {1: 1, 2: 2})
    assert moved == {1: 3, 2: 4}
    assert [record.message.recipients for record in log] == [{1}, {1, 2}]


def framing_changes(simulator: Simulator, host: Host, generator: random.Random) -> None:
    """Cut what is in the host's log as one of the framings says, whatever has arrived by now."""
    endpoint = host.endpoint
    endpoint.own.sealer.reframe(*generator.choice(FRAMINGS))
    endpoint.recut()
    endpoint.own.sealer.reframe(*generator.choice(FRAMINGS))
    simulator.run_for(0.0)


@pytest.mark.parametrize("seed", range(60))
def test_every_message_comes_once_and_in_order_whatever_is_lost_while_records_are_cut_anew(
    seed: int,
) -> None:
    generator = random.Random(seed)
    pick = generator.choice
    link = Link(
        delay_s=pick((0.0005, 0.02)),
        jitter_s=pick((0.0, 0.002)),
        loss=pick((0.0, 0.02, 0.2)),
        duplicate=pick((0.0, 0.3)),
        reorder=pick((0.0, 0.1)),
    )
    simulator = Simulator(seed, link)
    hosts = simulator.mesh(3, limits=LIMITS)
    # One peer is far behind the others: what it lacks is much more than what they do.
    slow = simulator.link(hosts[0], hosts[2])
    slow.rate_bytes_per_s, slow.queue_bytes = 1.25e6, 35_000
    expected: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for step in range(60):
        host = pick(hosts)
        to: Peer | None = pick((None, None, *host.endpoint.peers))
        payload = generator.randbytes(pick(SIZES))
        try:
            ticket = simulator.publish(host, payload, step, to)
        except WouldBlock:
            simulator.run_for(0.05)
            continue
        for peer in ticket.pending | ticket.delivered:
            key = (host.endpoint.node_id, peer.id)
            expected.setdefault(key, []).append((step, payload))
        if generator.random() < 0.2:
            framing_changes(simulator, host, generator)
        if generator.random() < 0.1:
            host.endpoint.rotate_key(simulator.now_s)
        simulator.run_for(pick((0.0, 0.001, 0.03)))
        for each in hosts:
            assert each.endpoint.stats().send_log_bytes <= LIMITS.send_log_bytes
    simulator.run_until(lambda: not any(len(host.endpoint.log) for host in hosts), 60.0)
    got: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for host in hosts:
        assert host.lost == []
        for sender, tag, data in host.received:
            got.setdefault((sender.id, host.endpoint.node_id), []).append((tag, data))
    assert got == expected
    assert all(ticket.is_done and not ticket.failed for host in hosts for ticket in host.tickets)
    assert sum(host.endpoint.stats().recut_records for host in hosts) > 0


def test_what_had_arrived_unknown_to_the_sender_is_not_delivered_twice() -> None:
    simulator = Simulator(1)
    one, two = simulator.mesh(2)
    back = simulator.link(two, one)
    back.blocked = True  # no acknowledgement comes through
    sent = [simulator.random.randbytes(20_000) for _ in range(10)]
    for tag, payload in enumerate(sent):
        simulator.publish(one, payload, tag)
    simulator.run_for(0.05)
    arrived = len(two.received)
    assert arrived > 0
    one.endpoint.own.sealer.reframe(1_184, 1)
    one.endpoint.recut()
    back.blocked = False
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 10.0)
    assert two.payloads == sent
    assert two.lost == one.lost == []


def test_a_peer_that_joins_while_the_log_was_just_cut_anew_gets_only_what_is_published_later() -> (
    None
):
    simulator = Simulator(2)
    one, two = simulator.mesh(2, limits=LIMITS)
    simulator.link(one, two).blocked = True
    simulator.publish(one, bytes(500_000), 1)
    three = simulator.add("h2", limits=LIMITS)
    three.endpoint.connect(one.address)
    while not any(s.outbound is not None for s in three.endpoint.sessions.values()):
        simulator.run_for(0.0001)
    one.endpoint.own.sealer.reframe(1_184, 1)
    one.endpoint.recut()
    simulator.run_until(lambda: len(one.endpoint.peers) == 2, 5.0)
    simulator.publish(one, b"for both", 2)
    simulator.run_until(lambda: bool(three.received), 5.0)
    simulator.link(one, two).blocked = False
    simulator.run_until(lambda: len(two.received) == 2, 10.0)
    assert three.payloads == [b"for both"]
    assert two.payloads == [bytes(500_000), b"for both"]
