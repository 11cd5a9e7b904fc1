"""One peer's books: what is under way to it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gradwire.transport.crypto import SenderKey
from gradwire.transport.inbound import Inbound, ReceiveBudget
from gradwire.transport.outbound import Outbound, Sending
from gradwire.transport.records import Outgoing, Record, SendLog
from gradwire.transport.recovery import RECORD_MAX_BYTES
from gradwire.transport.round_trips import RttEstimator
from gradwire.transport.sealer import Sealer
from gradwire.transport.wire import HEADER, RECORD_NUMBER_MAX, Ack

from .invariants import check_outbound

SESSION = 1
SEGMENT_BYTES = 1_400


def test_what_a_peer_has_already_is_not_under_way_when_a_carrier_sends_it() -> None:
    """A relay may have given it what this node sends only now; nobody acknowledges that again."""
    log = SendLog(1 << 20)
    sealer = Sealer(SenderKey.generate(1, random.Random(1).randbytes), 99, 1_384)
    message = Outgoing(frozenset({SESSION}), 0, is_shared=True)
    record = sealer.seal(0, message, 0, 0, 10_000, 0, memoryview(bytes(10_000)))
    log.append(record)
    outbound = Outbound(log, SESSION, 0, RttEstimator())
    outbound.on_ack(Ack(0, 16, 0, 0, (), 0, False), 1.0)
    outbound.gate = 0
    outbound.carry(record, 0b11, 1.0)
    outbound.on_ack(Ack(0, 16, 0, 0, ((0, 0b111),), 0, False), 1.1)
    outbound.carry(record, 0b100, 1.2)
    assert outbound.rate.bytes_in_flight == 0
    outbound.carry(record, record.full & ~0b111, 1.3)
    assert outbound.rate.bytes_in_flight == record.bytes_of(record.full & ~0b111)
    outbound.on_ack(Ack(1, 16, 0, 0, (), 0, False), 1.4)
    assert outbound.rate.bytes_in_flight == 0


def two_records() -> tuple[Outbound, list[Record]]:
    """Return what has sent one record, had it acknowledged, and has two more to send."""
    log = SendLog(1 << 20)
    sealer = Sealer(SenderKey.generate(1, random.Random(1).randbytes), 8, SEGMENT_BYTES - 16)
    message = Outgoing(frozenset({SESSION}), 2)
    for number in range(3):
        log.append(sealer.seal(number, message, number, 0, 10_000, 0, memoryview(bytes(10_000))))
    outbound = Outbound(log, SESSION, 0, RttEstimator())
    outbound.on_ack(Ack(0, 16, 0, 0, (), 0, False), 1.0)
    outbound.gate = 0
    outbound.carry(log[0], log[0].full, 1.0)
    outbound.on_ack(Ack(1, 16, 0, 0, (), 0, False), 1.01)
    return outbound, [log[1], log[2]]


def test_what_only_a_probe_has_overtaken_is_sent_again_and_says_nothing_about_a_queue() -> None:
    """A busy relay may still have it."""
    for overtaken_by_carried in (False, True):
        outbound, (first, second) = two_records()
        outbound.carry(first, first.full, 1.1)
        outbound.carry(second, second.full, 1.1)
        last = 1 << (second.fragments - 1)
        if overtaken_by_carried:
            outbound.on_ack(Ack(1, 16, 0, 0b10, (), 0, False), 1.13)
            outbound.on_timer(1.15)
        else:
            outbound.on_timer(1.15)
            outbound.on_ack(Ack(1, 16, 0, 0, ((2, last),), 0, False), 1.17)
        assert outbound.has_unsent
        assert outbound.lost_bytes >= first.nbytes
        assert (outbound.rate.loss_rate > 0.0) is overtaken_by_carried


def test_what_came_before_a_second_copy_was_sent_proves_nothing_about_what_was_sent_between() -> (
    None
):
    for arrived_before_s, is_overtaken in ((0.0, True), (0.05, False)):
        outbound, (first, second) = two_records()
        outbound.carry(first, first.full, 1.1)
        outbound.carry(second, second.full, 1.1)
        outbound.on_timer(1.15)  # a probe: the last fragment again
        delay_us = int(arrived_before_s * 1e6)
        last = 1 << (second.fragments - 1)
        outbound.on_ack(Ack(1, 16, delay_us, 0, ((2, last),), 0, False), 1.17)
        assert outbound.has_unsent is is_overtaken


def roomy(log: SendLog) -> Outbound:
    """Return what sends to a peer on this machine whose socket has much room."""
    outbound = Outbound(log, SESSION, 0, RttEstimator())
    outbound.rate.is_local = True
    outbound.rate.local_buffer_bytes = 8 << 20
    outbound.rate.burst_bytes = RECORD_MAX_BYTES
    outbound.rate.window_bytes = 2 << 20
    return outbound


def one_by_one(outbound: Outbound, now_s: float) -> list[Sending]:
    items: list[Sending] = []
    while outbound.has_unsent and (item := outbound.next_item(now_s)) is not None:
        items.append(item)
    return items


def together(outbound: Outbound, now_s: float) -> list[Sending]:
    items: list[Sending] = []
    while found := outbound.send_unsent(now_s, 16):
        items += found
    return items


def check_unheard(outbound: Outbound, ack: Ack) -> None:
    """Of what has no books of its fragments nothing has arrived, and nothing that was sent later either."""
    heard = {number for number, _ in ack.partials}
    heard |= {ack.cumulative + bit for bit in range(1_024) if ack.complete >> bit & 1}
    for record, order, _ in outbound._wholes:
        assert record.number >= ack.cumulative
        assert record.number not in heard
        assert order > outbound._newest[0]


def datagrams(items: list[Sending]) -> list[bytes]:
    """Return all that leaves, in order."""
    pieces: list[memoryview] = []
    for item in items:
        found = [piece for call in getattr(item, "calls", ()) for piece in call]
        assert all(len(piece) % SEGMENT_BYTES == 0 for piece in found[:-1])
        pieces += found
    return [
        bytes(piece[at : at + SEGMENT_BYTES])
        for piece in pieces
        for at in range(0, len(piece), SEGMENT_BYTES)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_what_leaves_together_is_accounted_for_like_what_leaves_alone(seed: int) -> None:
    """Whatever is lost: the same datagrams at the same time, and the same books."""
    generator = random.Random(seed)
    key = SenderKey.generate(0, generator.randbytes)
    log, sealer = SendLog(1 << 30), Sealer(key, 8, SEGMENT_BYTES - 16)
    ways: list[tuple[Outbound, Callable[[Outbound, float], list[Sending]]]] = [
        (roomy(log), one_by_one),
        (roomy(log), together),
    ]
    got: list[int] = []
    inbound = Inbound(
        0, ReceiveBudget(1 << 30), lambda tag, _: got.append(tag), 1 << 22, RttEstimator()
    )
    inbound.add_key(key)
    inbound.grant(1_024, 0.0)
    loss, holes = generator.choice(((0.0, 0.0), (0.01, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.3)))
    now_s, sent = 1.0, 0
    for step in range(4_000):
        now_s += generator.choice((0.0, 1e-4, 1e-3))
        if sent < 40 and generator.random() < 0.3:
            payload = memoryview(bytes(generator.choice((10, 5_000, 62_240, 600_000, 1 << 20))))
            message = Outgoing(frozenset({SESSION}), 0)
            for record in sealer.seal_message(log.head, message, sent, sent, payload):
                log.append(record)
            sent += 1
        left = [way(outbound, now_s) + outbound.on_timer(now_s)[0] for outbound, way in ways]
        arriving = datagrams(left[0])
        assert arriving == datagrams(left[1])
        for datagram in arriving if generator.random() >= holes else ():
            if generator.random() >= loss:
                _, epoch, first, fragments, stream, number = HEADER.unpack_from(datagram)
                record_number, size = number & RECORD_NUMBER_MAX, number >> 48
                batch = memoryview(datagram)
                assert inbound.on_fragments(
                    epoch, stream, record_number, fragments, size, first, batch, now_s
                )
        if step == 0 or generator.random() < 0.3:
            for ack in inbound.make_acks(now_s):
                for outbound, _ in ways:
                    outbound.on_ack(ack, now_s)
                    check_unheard(outbound, ack)
        one, other = (outbound for outbound, _ in ways)
        check_outbound(one)
        check_outbound(other)
        assert one.deadline_s() == pytest.approx(other.deadline_s(), abs=1e-9)
        assert vars(one._rtt) == vars(other._rtt)
        assert one.retransmitted_bytes == other.retransmitted_bytes
        assert (one.cumulative, one.cursor, one.is_idle) == (
            other.cumulative,
            other.cursor,
            other.is_idle,
        )
        if sent == 40 and one.is_idle:
            break
    assert got == list(range(40))
