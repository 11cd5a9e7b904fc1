"""Fragments to records to messages: once, in order, within the bounds."""

from __future__ import annotations

import random

import pytest

from gradwire.transport.crypto import SenderKey
from gradwire.transport.inbound import SKIPS_MAX, Inbound, ProtocolError, ReceiveBudget
from gradwire.transport.records import Outgoing, Record
from gradwire.transport.round_trips import RttEstimator
from gradwire.transport.sealer import Sealer, chunk_bytes_max
from gradwire.transport.wire import CONTROL_PLAINTEXT_MAX, encode_frame

KEY = SenderKey.generate(0, random.Random(1).randbytes)
CHUNK = chunk_bytes_max(1_384)
NOW_S = 1.0


class Receiver:
    """An `Inbound` with a window of 64 records, and what it delivered."""

    def __init__(self, budget_bytes: int = 1 << 20, start: int = 0) -> None:
        self.budget = ReceiveBudget(budget_bytes)
        self.got: list[tuple[int, bytes]] = []
        self.rtt = RttEstimator()
        self.inbound = Inbound(
            start,
            self.budget,
            lambda tag, view: self.got.append((tag, bytes(view))),
            1 << 20,
            self.rtt,
        )
        self.inbound.add_key(KEY)
        self.inbound.grant(64, NOW_S)

    def feed(self, record: Record, first: int = 0, count: int | None = None) -> bool:
        count = record.fragments - first if count is None else count
        batch = record.wire[first * record.segment_bytes : (first + count) * record.segment_bytes]
        return self.inbound.on_fragments(
            0, 9, record.number, record.fragments, 1_384, first, batch, NOW_S
        )


def records(*payloads: bytes, start: int = 0, message: int = 0) -> list[Record]:
    sealer = Sealer(KEY, 9, 1_384)
    result: list[Record] = []
    for index, payload in enumerate(payloads, start=message):
        outgoing = Outgoing(frozenset(), 0)
        result += sealer.seal_message(start, outgoing, index, index, memoryview(payload))
        start = result[-1].number + result[-1].span
    return result


@pytest.mark.parametrize("seed", range(20))
def test_fragments_in_any_order_and_number_give_each_message_once(seed: int) -> None:
    generator = random.Random(seed)
    payloads = [
        generator.randbytes(generator.choice((0, 10, 5_000, 70_000, 200_000))) for _ in range(6)
    ]
    receiver = Receiver()
    pieces = [(record, index) for record in records(*payloads) for index in range(record.fragments)]
    pieces += generator.sample(pieces, len(pieces) // 3)
    generator.shuffle(pieces)
    for record, index in pieces:
        assert receiver.feed(record, index, 1)
    assert receiver.got == list(enumerate(payloads))
    assert receiver.inbound.duplicate_fragments == len(pieces) - sum(
        r.fragments for r in records(*payloads)
    )


@pytest.mark.parametrize("apart", [1, 2])
def test_what_everything_waits_for_is_skipped_however_much_is_skipped_already(apart: int) -> None:
    """A peer whose log was cut anew skips all of it at once, and there may be many skips for single messages in it."""
    receiver = Receiver()
    for index in range(3 * SKIPS_MAX):
        receiver.inbound.skip(10 + apart * index, 1, NOW_S)
    assert len(receiver.inbound._skips) <= SKIPS_MAX
    receiver.inbound.skip(0, 1_000, NOW_S)
    [ack] = receiver.inbound.make_acks(NOW_S)
    assert ack.cumulative == 1_000
    assert receiver.inbound._skips == []


def test_an_acknowledgement_tells_exactly_what_is_there() -> None:
    receiver = Receiver()
    sent = records(*[bytes(5_000)] * 6)
    receiver.feed(sent[0])
    receiver.feed(sent[2])
    receiver.feed(sent[3], 1, 2)
    [ack] = receiver.inbound.make_acks(NOW_S)
    assert (ack.cumulative, ack.complete, ack.partials) == (1, 0b10, ((3, 0b0110),))
    assert ack.limit == 1 + 64
    assert receiver.inbound.ack_at_s is None


def test_what_comes_seldom_and_a_gap_are_acknowledged_at_once_and_a_tidy_record_a_little_later() -> (
    None
):
    receiver = Receiver()
    sent = records(b"a", b"b", b"c", b"d")
    receiver.inbound.make_acks(NOW_S)
    receiver.feed(sent[0])
    assert receiver.inbound.ack_at_s == NOW_S
    receiver.inbound.make_acks(NOW_S)
    receiver.feed(sent[1])
    assert receiver.inbound.ack_at_s == pytest.approx(NOW_S + 0.0005)
    receiver.feed(sent[3])
    assert receiver.inbound.ack_at_s == NOW_S


def test_a_gap_is_acknowledged_once_and_what_comes_after_it_as_usual() -> None:
    """Where 1 % is lost there is nearly always a gap: an answer to each datagram would cost more than the data."""
    receiver = Receiver()
    sent = records(bytes(20_000), b"a", b"b", b"c")
    receiver.inbound.make_acks(NOW_S)
    receiver.feed(sent[0], 0, 1)
    urgent = []
    pieces = [(0, index) for index in (2, 3, 4, 6, 7, 8, 1, 10)] + [(1, 0), (2, 0), (3, 0), (0, 5)]
    for index, fragment in pieces:
        receiver.inbound.make_acks(NOW_S)
        receiver.feed(sent[index], fragment, 1)
        if receiver.inbound.ack_at_s == NOW_S:
            urgent.append((index, fragment))
        else:
            assert receiver.inbound.ack_at_s == pytest.approx(NOW_S + 0.0005)
    assert urgent == [(0, 2), (0, 6), (0, 10), (1, 0)]


@pytest.mark.parametrize(
    ("round_trip_s", "delay_s"), [(0.001, 0.0005), (0.016, 0.002), (0.1, 0.004)]
)
@pytest.mark.parametrize("is_asked_first", [False, True])
def test_over_a_long_way_what_comes_in_the_middle_of_a_message_may_wait_longer(
    round_trip_s: float, delay_s: float, is_asked_first: bool
) -> None:
    receiver = Receiver()
    receiver.rtt.add_sample(round_trip_s, NOW_S)
    [record] = records(bytes(50_000))
    [[burst]] = record.calls

    def delay_of(first: int, count: int) -> float:
        batch = burst[first * 1_400 : (first + count) * 1_400]
        receiver.inbound.make_acks(NOW_S)
        if not (is_asked_first and receiver.inbound.go_on(batch, 1_400, NOW_S)):
            receiver.feed(record, first, count)
        assert receiver.inbound.ack_at_s is not None
        return receiver.inbound.ack_at_s - NOW_S

    at_first = delay_of(0, 2)
    midway = [delay_of(first, 2) for first in range(2, 34, 2)]
    at_last = delay_of(34, record.fragments - 34)
    assert receiver.got == [(0, bytes(50_000))]
    assert at_first == pytest.approx(0.0005)
    assert midway == pytest.approx([delay_s] * len(midway))
    assert at_last == pytest.approx(0.0005)


def test_the_beginning_of_a_long_message_is_not_acknowledged_at_once() -> None:
    receiver = Receiver()
    receiver.inbound.make_acks(NOW_S)
    receiver.feed(records(bytes(2 * CHUNK))[0])
    assert receiver.inbound.ack_at_s == pytest.approx(NOW_S + 0.0005)


def test_a_stream_is_acknowledged_with_every_other_record_and_later_than_a_single_one() -> None:
    receiver = Receiver(budget_bytes=1 << 22)
    receiver.inbound._message_bytes_max = 1 << 22
    receiver.inbound.make_acks(NOW_S)
    sent = records(bytes(10 * CHUNK))
    acknowledged = []
    for record in sent[:6]:
        for [burst] in record.calls:
            if not receiver.inbound.go_on(burst, 1_400, NOW_S):
                receiver.inbound.on_fragments(
                    0, 9, record.number, record.fragments, 1_384, burst[2], burst, NOW_S
                )
            if receiver.inbound.ack_at_s == NOW_S:
                [ack] = receiver.inbound.make_acks(NOW_S)
                assert ack.partials == ()
                acknowledged.append(ack.cumulative)
    assert acknowledged == [8, 16, 24]
    receiver.inbound.go_on(sent[6].calls[0][0], 1_400, NOW_S)
    assert receiver.inbound.ack_at_s == pytest.approx(NOW_S + 0.001)
    receiver.inbound.make_acks(NOW_S)
    receiver.inbound.go_on(sent[6].calls[1][0], 1_400, NOW_S)
    assert receiver.inbound.ack_at_s == pytest.approx(NOW_S + 0.0005)


@pytest.mark.parametrize(("message_chunks", "acknowledged"), [(4.2, [8, 17]), (6.0, [8, 16, 24])])
def test_what_comes_shortly_before_the_end_of_a_message_is_acknowledged_with_it(
    message_chunks: float, acknowledged: list[int]
) -> None:
    receiver = Receiver(budget_bytes=1 << 24)
    receiver.inbound._message_bytes_max = 1 << 24
    receiver.inbound.make_acks(NOW_S)
    told = []
    for record in records(bytes(int(message_chunks * CHUNK))):
        for [burst] in record.calls:
            if not receiver.inbound.go_on(burst, 1_400, NOW_S):
                receiver.inbound.on_fragments(
                    0, 9, record.number, record.fragments, 1_384, burst[2], burst, NOW_S
                )
            if receiver.inbound.ack_at_s == NOW_S:
                told.append(receiver.inbound.make_acks(NOW_S)[0].cumulative)
    assert told == acknowledged


def test_more_incomplete_records_than_fit_are_told_in_parts() -> None:
    receiver = Receiver()
    receiver.inbound.grant(256, NOW_S)
    for record in records(*[bytes(5_000)] * 150)[1:]:
        receiver.feed(record, 0, 1)
    parts = receiver.inbound.make_acks(NOW_S)
    assert [len(part.partials) for part in parts] == [100, 49]
    assert [part.truncated for part in parts] == [True, False]
    assert parts[1].skipped == parts[0].partials[-1][0] + 1


def test_the_parts_of_an_acknowledgement_fit_a_datagram_however_long_the_records_are() -> None:
    receiver = Receiver()
    receiver.inbound.grant(512, NOW_S)
    sent = records(*[bytes(CHUNK)] * 100)
    for record in sent[1:]:
        receiver.feed(record, record.fragments - 1, 1)
    parts = receiver.inbound.make_acks(NOW_S)
    assert all(len(encode_frame(part)) <= CONTROL_PLAINTEXT_MAX for part in parts)
    last_bit = 1 << (sent[0].fragments - 1)
    assert [partial for part in parts for partial in part.partials] == [
        (record.number, last_bit) for record in sent[1:]
    ]
    assert [part.truncated for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_record_of_several_bursts_takes_up_as_many_numbers() -> None:
    receiver = Receiver()
    first, second, third = records(bytes(CHUNK + 70_000), b"after")
    assert (first.number, second.number, third.number) == (0, 4, 6)
    receiver.feed(third)
    receiver.feed(second, 0, second.burst_fragments)
    receiver.feed(first)
    [ack] = receiver.inbound.make_acks(NOW_S)
    assert (ack.cumulative, ack.complete, ack.limit) == (4, 0b100, 4 + 64)
    assert ack.partials == ((4, (1 << second.burst_fragments) - 1),)
    receiver.feed(second, second.burst_fragments)
    assert receiver.got == [(0, bytes(CHUNK + 70_000)), (1, b"after")]
    assert receiver.inbound.cumulative == 7


def test_a_record_of_which_only_the_beginning_was_granted_is_not_stored() -> None:
    receiver = Receiver()
    [record] = records(bytes(CHUNK), start=61)
    assert receiver.feed(record, 0, 1)
    assert receiver.inbound.make_acks(NOW_S)[0].partials == ()


def test_what_is_forged_in_the_middle_of_a_record_does_not_stay() -> None:
    receiver = Receiver()
    payload = random.Random(4).randbytes(CHUNK)
    [record] = records(payload)
    forged = memoryview(bytes(1_400))
    for place in (1, 3):
        receiver.feed(record, 0, 20)
        assert receiver.inbound.on_fragments(0, 9, place, 90, 1_384, 3, forged, NOW_S)
        assert [number for number, _ in receiver.inbound.make_acks(NOW_S)[0].partials] == [place]
    receiver.feed(record)
    assert receiver.got == [(0, payload)]
    assert receiver.inbound.make_acks(NOW_S)[0].partials == ()


def test_a_member_whose_records_overlap_leaves_nothing_behind() -> None:
    receiver = Receiver()
    sealer = Sealer(KEY, 9, 1_384)
    message = Outgoing(frozenset(), 0)
    inner = sealer.seal(2, message, 1, 0, 1, 0, memoryview(b"x"))
    [outer] = records(bytes(CHUNK))
    receiver.feed(inner)
    receiver.feed(outer)
    assert receiver.got == [(0, bytes(CHUNK))]
    [ack] = receiver.inbound.make_acks(NOW_S)
    assert (ack.cumulative, ack.complete, ack.partials) == (4, 0, ())
    assert not receiver.inbound._complete


def test_what_was_not_granted_is_not_stored() -> None:
    receiver = Receiver()
    sent = records(*[b"x"] * 70)
    assert receiver.feed(sent[64])
    assert receiver.feed(sent[63])
    [ack] = receiver.inbound.make_acks(NOW_S)
    assert ack.complete == 1 << 63


def test_a_message_waits_until_the_budget_has_room_and_no_credit_is_given_meanwhile() -> None:
    receiver = Receiver(budget_bytes=100_000)
    sent = records(*[bytes(60_000)] * 3)
    for record in sent:
        receiver.feed(record)
    assert len(receiver.got) == 1
    assert receiver.inbound.is_stalled
    [ack] = receiver.inbound.make_acks(NOW_S)
    assert (ack.cumulative, ack.limit) == (3, 1 + 64)
    receiver.budget.give_back(60_000)
    receiver.inbound.consume()
    assert len(receiver.got) == 2


@pytest.mark.parametrize("where", [0, 20, 45 * 1_400 - 1_400 + 16, -1])
def test_a_forged_record_is_dropped_whole_and_the_true_one_still_counts(where: int) -> None:
    receiver = Receiver()
    [record, tail] = records(bytes(CHUNK + 10))
    forged = bytearray(record.wire)
    forged[where if where else 16] ^= 1
    batch = memoryview(forged)
    assert receiver.inbound.on_fragments(0, 9, 0, record.fragments, 1_384, 0, batch, NOW_S)
    assert receiver.inbound.rejected_records == 1
    assert receiver.inbound.make_acks(NOW_S)[0].partials == ()
    receiver.feed(record)
    receiver.feed(tail)
    assert receiver.got == [(0, bytes(CHUNK + 10))]


def test_a_forged_record_in_the_middle_of_a_message_leaves_the_rest_of_it_intact() -> None:
    receiver = Receiver()
    payload = random.Random(3).randbytes(3 * CHUNK)
    sent = records(payload)
    receiver.feed(sent[0])
    forged = bytearray(sent[1].wire)
    forged[100] ^= 1
    number = sent[1].number
    receiver.inbound.on_fragments(
        0, 9, number, sent[1].fragments, 1_384, 0, memoryview(forged), NOW_S
    )
    receiver.feed(sent[1])
    receiver.feed(sent[2])
    assert receiver.got == [(0, payload)]


def test_a_contradicting_shape_cannot_block_a_record_for_ever() -> None:
    receiver = Receiver()
    [record] = records(bytes(5_000))
    forged = memoryview(bytes(1_400))
    assert receiver.inbound.on_fragments(0, 9, 0, 40, 1_384, 3, forged, NOW_S)
    receiver.feed(record)
    assert receiver.got == [(0, bytes(5_000))]


@pytest.mark.parametrize(
    ("fragments", "size", "first", "nbytes"),
    [
        (0, 1384, 0, 100),
        (181, 1384, 0, 100),
        (29, 9000, 0, 100),
        (2, 255, 0, 100),
        (2, 9001, 0, 100),
        (256, 256, 0, 272),
        (2, 1384, 2, 1400),
        (2, 1384, 0, 1399),
        (2, 1384, 0, 16),
        (1, 1384, 0, 3000),
    ],
)
def test_impossible_fragments_are_malformed(
    fragments: int, size: int, first: int, nbytes: int
) -> None:
    receiver = Receiver()
    batch = memoryview(bytes(nbytes))
    assert not receiver.inbound.on_fragments(0, 9, 0, fragments, size, first, batch, NOW_S)
    assert receiver.inbound.make_acks(NOW_S)[0].partials == ()


def test_skipped_records_count_as_complete_wherever_they_are() -> None:
    receiver = Receiver()
    receiver.inbound.skip(2, 3, NOW_S)
    assert receiver.inbound.make_acks(NOW_S)[0].complete == 0b11100
    receiver.inbound.skip(0, 1, NOW_S)
    assert receiver.inbound.cumulative == 1
    receiver.feed(records(b"one", start=1)[0])
    assert receiver.inbound.cumulative == 5
    receiver.feed(records(b"five", start=5, message=1)[0])
    assert [payload for _, payload in receiver.got] == [b"one", b"five"]


def test_a_skip_of_a_million_records_costs_nothing() -> None:
    receiver = Receiver()
    receiver.inbound.skip(0, 1_000_000, NOW_S)
    assert receiver.inbound.cumulative == 1_000_000
    receiver.feed(records(b"after", start=1_000_000)[0])
    assert receiver.inbound.make_acks(NOW_S)[0].limit == 1_000_000 + 64 + (1 if receiver.got else 0)


def test_a_message_that_grows_or_exceeds_the_maximum_ends_the_session() -> None:
    sealer = Sealer(KEY, 9, 1_384)
    cases = [
        [(0, 0, 2 << 20, 0, b"x")],
        [(0, 0, 3, 0, b"xxxx")],
        [(0, 0, 10, 5, b"x")],
        [(0, 0, 10, 0, b"xxxx"), (1, 0, 10, 0, b"xxxx"), (1, 0, 10, 8, b"xx")],
    ]
    for case in cases:
        receiver = Receiver()
        with pytest.raises(ProtocolError):  # noqa: PT012 - only the last of them is at fault
            for number, (message, tag, total, offset, chunk) in enumerate(case):
                record = sealer.seal(
                    number, Outgoing(frozenset(), 0), message, tag, total, offset, memoryview(chunk)
                )
                receiver.feed(record)
        assert receiver.got == []


def test_only_the_two_newest_keys_are_kept_and_late_repetitions_are_ignored() -> None:
    receiver = Receiver()
    keys = [SenderKey.generate(epoch, random.Random(epoch).randbytes) for epoch in range(300)]
    for key in keys[1:]:
        receiver.inbound.add_key(key)
        receiver.inbound.add_key(keys[max(1, key.epoch - 2)])
    assert list(receiver.inbound._keys) == [298 & 255, 299 & 255]
    assert receiver.inbound._keys[299 & 255] is keys[299]
