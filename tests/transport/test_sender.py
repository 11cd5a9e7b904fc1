"""One peer's view of the send log: every record leaves, is acknowledged or sent again, within the credit."""

from __future__ import annotations

import random

import pytest

from gradwire.transport.congestion import RttEstimator
from gradwire.transport.crypto import KeyChain
from gradwire.transport.receiver import ReceiveBudget, Receiver
from gradwire.transport.records import Record, Sealer, SendLog
from gradwire.transport.sender import Sender
from gradwire.transport.types import Stats, Transmit
from gradwire.transport.wire import Ack, DataHeader, Key, Skip

from .invariants import check_receiver, check_sender

SESSION, OTHER = 1, 2
SEGMENT = 1_200
STREAM = 8
PEER = ("10.0.0.2", 5)


def keys() -> KeyChain:
    return KeyChain(bytes(range(16)), bytes(range(12)), 0)


class Log(SendLog):
    """A log to which messages are published."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self._sealer = Sealer(keys(), STREAM, SEGMENT)
        self.messages = 0

    def publish(self, payload: bytes, *recipients: int) -> list[Record]:
        chosen = frozenset(recipients or (SESSION,))
        view = memoryview(payload)
        number = self.messages
        found = list(self._sealer.seal_message(self.head, chosen, number, number, view))
        for record in found:
            self.append(record)
        self.messages += 1
        return found


def all_items(sender: Sender, now_s: float) -> list[Transmit | Skip]:
    items = []
    while (item := sender.next_item(now_s, PEER)) is not None:
        items.append(item)
    return items


def sent_datagrams(items: list[Transmit | Skip]) -> list[tuple[int, int]]:
    """Return (record, fragment) of each datagram."""
    headers = [DataHeader.decode(memoryview(datagram), 0) for datagram in datagrams(items)]
    return [(header.record, header.first) for header in headers]


def datagrams(items: list[Transmit | Skip]) -> list[bytes]:
    found = []
    for item in items:
        if isinstance(item, Transmit):
            assert all(len(piece) % SEGMENT == 0 for piece in item.slices[:-1])
            data = b"".join(item.slices)
            found += [data[at : at + SEGMENT] for at in range(0, len(data), SEGMENT)]
    return found


def test_nothing_leaves_without_credit() -> None:
    log = Log()
    sender = Sender(log, SESSION, RttEstimator(), Stats())
    for _ in range(3):
        log.publish(b"x")
    assert all_items(sender, 1.0) == []
    sender.on_ack(Ack(0, 2), 1.0)
    assert sent_datagrams(all_items(sender, 1.0)) == [(0, 0), (1, 0)]
    sender.on_ack(Ack(1, 1), 1.1)  # credit is never withdrawn
    assert sender.limit == 2
    sender.on_ack(Ack(2, 3), 1.2)
    assert sent_datagrams(all_items(sender, 1.2)) == [(2, 0)]
    assert not sender.is_idle
    sender.on_ack(Ack(3, 3), 1.3)
    assert sender.is_idle


def test_records_of_other_peers_are_skipped_in_one_frame_and_need_no_credit() -> None:
    log = Log()
    sender = Sender(log, SESSION, RttEstimator(), Stats())
    log.publish(bytes(100_000), OTHER)
    log.publish(b"x", OTHER)
    log.publish(b"mine", SESSION, OTHER)
    [skip] = all_items(sender, 1.0)
    assert skip == Skip(0, 3)
    sender.on_ack(Ack(3, 4), 1.1)
    assert sent_datagrams(all_items(sender, 1.1)) == [(3, 0)]


def two_records() -> tuple[Sender, list[Record]]:
    """Return a sender that had one record acknowledged and has sent two more."""
    log = Log()
    sender = Sender(log, SESSION, RttEstimator(), Stats())
    sender.on_ack(Ack(0, 16), 1.0)
    log.publish(bytes(9_000))
    all_items(sender, 1.0)
    sender.on_ack(Ack(1, 16), 1.01)
    sender.rate.on_app_limited()  # as a session does for a message after a pause
    found = log.publish(bytes(9_000)) + log.publish(bytes(9_000))
    all_items(sender, 1.1)
    assert sender.rate.bytes_in_flight == sum(record.nbytes for record in found)
    return sender, found


def later(sender: Sender) -> list[tuple[int, int]]:
    """Return the datagrams that the sender sends again once what is missing is overdue."""
    due_s = sender.deadline_s()
    assert 1.111 < due_s < 1.12
    sender.on_timer(due_s, PEER)
    return sent_datagrams(all_items(sender, due_s))


def test_fragments_overtaken_by_later_ones_are_sent_again_once_they_are_overdue() -> None:
    sender, (first, second) = two_records()
    sender.on_ack(Ack(1, 16, 0, 0b10), 1.111)
    assert all_items(sender, 1.111) == [], "they may only be late"
    assert later(sender) == [(1, index) for index in range(8)]
    assert sender._counters.lost_bytes == sender._counters.retransmitted_bytes == first.nbytes
    assert sender._counters.retransmitted_fragments == first.fragments == 8
    check_sender(sender)
    sender.on_ack(Ack(3, 16), 1.2)
    assert sender.is_idle
    assert sender.rate.bytes_in_flight == 0
    assert second.nbytes == first.nbytes


def test_only_the_missing_fragments_of_a_record_are_sent_again() -> None:
    sender, _ = two_records()
    sender.on_ack(Ack(1, 16, 0, 0, ((1, 0b1110_1011), (2, 0b1000_0000))), 1.111)
    assert later(sender) == [(1, 2), (1, 4), *((2, index) for index in range(7))]


def test_fragments_that_the_receiver_dropped_are_sent_again() -> None:
    """A record that failed authentication disappears from the reports."""
    sender, _ = two_records()
    sender.on_ack(Ack(1, 16, 0, 0, ((1, 0b1111),)), 1.111)
    sender.on_ack(Ack(1, 16), 1.112)
    assert sent_datagrams(all_items(sender, 1.112)) == [(1, index) for index in range(4)]


def test_a_truncated_report_says_nothing_about_the_records_beyond_it() -> None:
    sender, _ = two_records()
    sender.on_ack(Ack(1, 16, 0, 0, ((1, 0b1000_0000),), truncated=True), 1.111)
    assert later(sender) == [(1, index) for index in range(7)]


def test_a_pong_shows_that_nothing_that_left_before_its_ping_is_on_its_way() -> None:
    sender, _ = two_records()
    assert sender.on_timer(1.15, PEER)
    assert not sender._waiting
    sender.on_ack(Ack(1, 16, 0, 0, ((2, 0b1000_0000),)), 1.17)
    sender.on_pong(sender.transmissions, 1.4)
    assert sorted(sender._waiting) == [1, 2]
    assert sent_datagrams(all_items(sender, 1.4)) == [(1, n) for n in range(8)] + [
        (2, n) for n in range(7)
    ]


def test_an_arrival_before_a_second_copy_was_sent_proves_nothing_about_those_sent_between() -> None:
    sender, _ = two_records()
    sender.on_ack(Ack(1, 16), 1.4)
    sender.on_pong(sender.transmissions, 1.4)
    assert sent_datagrams(all_items(sender, 1.4)) == [(n, m) for n in (1, 2) for m in range(8)]
    sender.on_ack(Ack(1, 16, int(0.05e6), 0, ((2, 0b1000_0000),)), 1.42)
    assert not sender._waiting


def test_a_closing_session_waits_for_nothing() -> None:
    sender, _ = two_records()
    sender.abandon()
    assert sender.is_idle
    assert sender.rate.bytes_in_flight == 0
    assert sender.deadline_s() == float("inf")


@pytest.mark.parametrize("seed", range(20))
def test_sender_and_receiver_deliver_everything_once_in_order_whatever_is_lost(seed: int) -> None:
    generator = random.Random(seed)
    log = Log()
    sender = Sender(log, SESSION, RttEstimator(), Stats())
    got: list[int] = []
    receiver = Receiver(
        Key(STREAM, 0, *keys().key_of(0)),
        ReceiveBudget(1 << 30, 1 << 22),
        lambda tag, _: got.append(tag),
        Stats(),
    )
    receiver.grant_credit(generator.choice((10, 200)), 0.0)
    loss, holes = generator.choice(((0.0, 0.0), (0.01, 0.0), (0.2, 0.0), (0.0, 0.3), (0.2, 0.3)))
    now_s, expected = 1.0, []
    for step in range(20_000):
        now_s += generator.choice((0.0, 1e-4, 1e-3))
        if log.messages < 40 and generator.random() < 0.3:
            is_mine = generator.random() < 0.8
            expected += [log.messages] if is_mine else []
            nbytes = generator.choice((10, 5_000, 61_528, 200_000))
            log.publish(bytes(nbytes), SESSION if is_mine else OTHER)
        items = all_items(sender, now_s)
        is_ping_due = sender.on_timer(now_s, PEER)
        is_hole = generator.random() < holes
        for item in items:
            if isinstance(item, Skip) and not is_hole:
                receiver.skip(item.first, item.records, now_s)
        for datagram in () if is_hole else datagrams(items):
            if generator.random() >= loss:
                batch = memoryview(datagram)
                assert receiver.on_fragments(DataHeader.decode(batch, 0), batch, now_s)
        if step == 0 or is_ping_due or generator.random() < 0.3:
            receiver.grant_credit(200, now_s)
            sender.on_ack(receiver.make_ack(now_s), now_s)
            if is_ping_due:
                sender.on_pong(sender.transmissions, now_s)
        check_sender(sender)
        check_receiver(receiver)
        if log.messages == 40 and sender.is_idle:
            break
    assert got == expected
