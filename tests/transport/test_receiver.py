"""Fragments to records to messages: once, in order, acknowledged, within the bounds."""

from __future__ import annotations

import random

import pytest

from gradwire.transport.congestion import NEVER_S
from gradwire.transport.crypto import EPOCH_BITS, KeyChain
from gradwire.transport.receiver import TAGGED_S, ReceiveBudget, Receiver
from gradwire.transport.records import Record, Sealer
from gradwire.transport.types import Stats, Transmit
from gradwire.transport.wire import (
    ACK_WINDOW_RECORDS,
    CONTROL_PLAINTEXT_MAX,
    DATA,
    HEADER,
    RECORD_META,
    TAG_BYTES,
    TAGGED,
    DataHeader,
    Key,
    encode_frame,
)

STREAM = 9
FRAGMENT = 1_184
SEGMENT = FRAGMENT + 16
TAGGED_BYTES = SEGMENT + 16
CHUNK = 52 * FRAGMENT - 40  # bytes of a message in a full record
NOW_S = 1.0
ACK_DELAY_S = 0.0005


def keys() -> KeyChain:
    return KeyChain(bytes(range(16)), bytes(range(12)), 0)


class Feed:
    """A `Receiver` with a window of 64 records, and the messages it delivered."""

    def __init__(
        self, budget_bytes: int = 1 << 20, start: int = 0, message_bytes_max: int = 1 << 20
    ) -> None:
        self.budget = ReceiveBudget(budget_bytes, message_bytes_max)
        self.got: list[tuple[int, bytes]] = []
        self.receiver = Receiver(
            Key(STREAM, start, *keys().key_of(start)),
            self.budget,
            lambda tag, view: self.got.append((tag, bytes(view))),
            Stats(),
        )
        self.receiver.grant_credit(64, NOW_S)

    def feed(self, record: Record, first: int = 0, count: int | None = None) -> bool:
        count = record.fragments - first if count is None else count
        return self.feed_bytes(record, first, record.wire[first * SEGMENT :][: count * SEGMENT])

    def feed_bytes(
        self, record: Record, first: int, batch: bytes | memoryview, after_s: float = 0.0
    ) -> bool:
        view = memoryview(batch)
        shape = (record.number, record.fragments, FRAGMENT)
        header = DataHeader(STREAM, *shape, first)
        return self.receiver.on_fragments(header, view, NOW_S + after_s)

    def spoil(self, record: Record, where: int = 100, after_s: float = 0.0) -> None:
        """Feed a record in two parts, of which one is forged."""
        forged = bytearray(record.wire)
        forged[where] ^= 1
        self.feed_bytes(record, 0, forged[: 2 * SEGMENT], after_s)
        self.feed_bytes(record, 2, forged[2 * SEGMENT :], after_s)

    def feed_tagged(self, record: Record, first: int = 0, count: int = 64) -> None:
        batch = memoryview(tagged(record))[first * TAGGED_BYTES :][: count * TAGGED_BYTES]
        header = DataHeader.decode(batch, 0)
        parts = self.receiver.authentic(header, batch, TAGGED_BYTES)
        assert len(parts) == min(count, record.fragments - first)
        assert self.receiver.on_fragments(header, memoryview(b"".join(parts)), NOW_S)


def records(*payloads: bytes, start: int = 0, message: int = 0) -> list[Record]:
    """Seal messages, numbered and tagged from ``message`` on, into records from ``start`` on."""
    sealer = Sealer(keys(), STREAM, SEGMENT)
    result: list[Record] = []
    for number, payload in enumerate(payloads, message):
        view = memoryview(payload)
        result += sealer.seal_message(start + len(result), frozenset(), number, number, view)
    return result


def tagged(record: Record) -> bytes:
    """Return the TAGGED datagrams of a record."""
    sealer = Sealer(keys(), STREAM, SEGMENT)
    [datagrams] = sealer.tagged(Transmit(("", 0), [record.wire], SEGMENT)).slices
    return bytes(datagrams)


def sealed(number: int, message: int, total: int, offset: int, chunk: bytes) -> Record:
    """Return a record of one datagram with any metadata, sealed with the true key."""
    plain = RECORD_META.pack(message, 0, total, offset) + chunk
    header = HEADER.pack(DATA, 0, 0, 1, STREAM, FRAGMENT << 48 | number)
    wire = bytearray(header + bytes(len(plain) + 16))
    keys().seal_into(number, memoryview(plain), header, memoryview(wire)[16:])
    return Record(number, memoryview(wire), len(wire), 1, 1, SEGMENT, frozenset())


# ---- records and messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_fragments_in_any_order_and_number_give_each_message_once(seed: int) -> None:
    generator = random.Random(seed)
    payloads = [
        generator.randbytes(generator.choice((0, 10, 5_000, 70_000, 200_000))) for _ in range(6)
    ]
    feed = Feed()
    pieces = [(record, index) for record in records(*payloads) for index in range(record.fragments)]
    count = len(pieces)
    pieces += generator.sample(pieces, len(pieces) // 3)
    generator.shuffle(pieces)
    for record, index in pieces:
        assert feed.feed(record, index, 1)
    assert feed.got == list(enumerate(payloads))
    assert feed.receiver._counters.duplicate_fragments == len(pieces) - count


@pytest.mark.parametrize("seed", range(10))
def test_batches_of_any_length_give_each_message_once(seed: int) -> None:
    generator = random.Random(seed)
    payloads = [generator.randbytes(generator.choice((1_000, 100_000, 400_000))) for _ in range(4)]
    feed = Feed(budget_bytes=1 << 22)
    pieces = []
    for record in records(*payloads):
        at = 0
        while at < record.fragments:
            count = min(record.fragments - at, generator.choice((1, 7, 45, 52)))
            pieces.append((record, at, count))
            at += count
    for _ in range(generator.choice((0, 1, 8))):
        one, two = generator.randrange(len(pieces)), generator.randrange(len(pieces))
        pieces[one], pieces[two] = pieces[two], pieces[one]
        pieces.insert(generator.randrange(len(pieces)), pieces[two])
    for piece in pieces:
        feed.feed(*piece)
    assert feed.got == list(enumerate(payloads))
    assert not feed.receiver._partials


def test_records_that_were_not_granted_are_not_stored() -> None:
    feed = Feed()
    sent = records(*[b"x"] * 70)
    assert feed.feed(sent[64])
    assert feed.feed(sent[63])
    assert feed.receiver.make_ack(NOW_S).complete == 1 << 63


def test_a_message_waits_until_the_budget_has_room_and_no_credit_is_granted_meanwhile() -> None:
    feed = Feed(budget_bytes=100_000)
    sent = records(*[bytes(60_000)] * 3)
    for record in sent:
        feed.feed(record)
    assert len(feed.got) == 1
    assert feed.budget.has_waiting
    ack = feed.receiver.make_ack(NOW_S)
    assert (ack.cumulative, ack.limit) == (3, 1 + 64)
    feed.budget.give_back(60_000)
    feed.receiver.consume()
    assert len(feed.got) == 2


def test_empty_messages_use_up_the_budget_by_the_memory_of_their_objects() -> None:
    feed = Feed(budget_bytes=10_000)
    for record in records(*[b""] * 60):
        feed.feed(record)
    assert len(feed.got) == 10
    feed.budget.give_back(*[0] * 10)
    feed.receiver.consume()
    assert len(feed.got) == 20


def test_a_message_larger_than_the_budget_is_taken_when_nothing_else_is_there() -> None:
    feed = Feed(budget_bytes=1_000)
    for record in records(bytes(5_000), bytes(5_000)):
        feed.feed(record)
    assert len(feed.got) == 1
    feed.budget.give_back(5_000)
    feed.receiver.consume()
    assert len(feed.got) == 2


def test_acknowledged_messages_arrive_though_their_sender_has_gone_meanwhile() -> None:
    feed = Feed(budget_bytes=100_000)
    for record in records(*[bytes(60_000)] * 3):
        feed.feed(record)
    assert len(feed.got) == 1
    feed.receiver.abandon()
    assert len(feed.got) == 3
    assert feed.budget.used_bytes == 180_000


def test_an_abandoned_message_gives_its_budget_back() -> None:
    feed = Feed()
    feed.feed(records(bytes(200_000))[0])
    assert feed.budget.used_bytes == 200_000
    feed.receiver.abandon()
    assert feed.budget.used_bytes == 0


def test_records_of_two_epochs_arrive_in_any_order() -> None:
    start = (1 << 22) - 3
    feed = Feed(start=start)
    payloads = [bytes([index]) * 100 for index in range(6)]
    sealer = Sealer(keys(), STREAM, SEGMENT)
    sent = [
        record
        for index, payload in enumerate(payloads)
        for record in sealer.seal_message(
            start + index, frozenset(), index, index, memoryview(payload)
        )
    ]
    for index in (5, 3, 0, 4, 2, 1):
        feed.feed(sent[index])
    assert feed.got == list(enumerate(payloads))
    assert feed.receiver._counters.rejected_records == 0


# ---- forgeries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [16, 20, 45 * SEGMENT + 16, -1])
def test_a_forged_record_that_comes_at_once_changes_nothing(where: int) -> None:
    feed = Feed()
    record, tail = records(bytes(CHUNK + 10))
    feed.feed(record, 0, 20)
    forged = bytearray(record.wire)
    forged[where] ^= 1
    assert feed.feed_bytes(record, 0, forged)
    assert feed.receiver._counters.rejected_records == 1
    ack = feed.receiver.make_ack(NOW_S)
    assert (ack.tagged, ack.partials) == (False, ((0, (1 << 20) - 1),))
    feed.feed(record, 20)
    feed.feed(tail)
    assert feed.got == [(0, bytes(CHUNK + 10))]


@pytest.mark.parametrize("where", [16, 20, 45 * SEGMENT + 16, -1])
def test_after_a_forged_fragment_only_fragments_with_tags_count(where: int) -> None:
    feed = Feed()
    [record] = records(bytes(CHUNK))
    feed.spoil(record, where)
    assert feed.receiver._counters.rejected_records == 1
    assert feed.receiver.make_ack(NOW_S).tagged
    feed.feed(record, 0, 51)
    assert feed.receiver.make_ack(NOW_S).partials == ()
    feed.feed_tagged(record, 0, 40)
    assert feed.receiver.make_ack(NOW_S).partials == ((0, (1 << 40) - 1),)
    feed.feed_bytes(record, 0, bytes(10 * SEGMENT))
    feed.feed_tagged(record, 40)
    assert feed.got == [(0, bytes(CHUNK))]
    assert feed.receiver._counters.rejected_records == 1


@pytest.mark.parametrize("seed", range(5))
def test_any_fragments_of_a_record_get_tags(seed: int) -> None:
    generator = random.Random(seed)
    feed = Feed()
    record, other = records(bytes(generator.randrange(100, CHUNK)), bytes(CHUNK))
    feed.spoil(other)
    missing = record.full
    sealer = Sealer(keys(), STREAM, SEGMENT)
    while missing:
        mask = missing & generator.getrandbits(64) or missing
        missing ^= mask
        sent = sealer.tagged(Transmit(("", 0), record.slices(mask), SEGMENT))
        assert sent.segment_bytes == TAGGED_BYTES
        data = memoryview(b"".join(sent.slices))
        assert len(data) == record.bytes_of(mask) + TAG_BYTES * mask.bit_count()
        for start in range(0, len(data), TAGGED_BYTES):
            datagram = data[start : start + TAGGED_BYTES]
            header = DataHeader.decode(datagram, 0)
            [part] = feed.receiver.authentic(header, datagram, len(datagram))
            assert feed.receiver.on_fragments(header, part, NOW_S)
    assert [len(payload) for _, payload in feed.got] == [record.nbytes - 16 * record.fragments - 40]


def test_a_record_that_comes_at_once_needs_no_tags() -> None:
    feed = Feed()
    full, small, last = records(bytes(CHUNK), b"small", bytes(CHUNK))
    feed.spoil(last)
    feed.feed(full)
    feed.feed(small)
    feed.feed_tagged(last)
    assert feed.got == [(0, bytes(CHUNK)), (1, b"small"), (2, bytes(CHUNK))]


def test_a_forged_fragment_in_the_middle_of_a_message_leaves_the_rest_intact() -> None:
    feed = Feed()
    payload = random.Random(3).randbytes(3 * CHUNK)
    sent = records(payload)
    feed.feed(sent[0])
    feed.spoil(sent[1])
    feed.feed_tagged(sent[1])
    feed.feed_tagged(sent[2])
    assert feed.got == [(0, payload)]


def test_a_forged_fragment_makes_all_incomplete_records_come_again() -> None:
    feed = Feed()
    sent = records(bytes(CHUNK), bytes(CHUNK), bytes(CHUNK))
    feed.feed(sent[1], 0, 5)
    feed.feed(sent[2])
    assert feed.receiver.make_ack(NOW_S).partials == ((1, 0b11111),)
    feed.spoil(sent[0])
    ack = feed.receiver.make_ack(NOW_S)
    assert (ack.tagged, ack.partials, ack.complete) == (True, (), 0b100)


def test_two_headers_that_contradict_each_other_are_a_forgery() -> None:
    feed = Feed()
    [record] = records(bytes(5_000))
    forged = memoryview(bytes(SEGMENT))
    assert feed.receiver.on_fragments(DataHeader(STREAM, 0, 40, FRAGMENT, 3), forged, NOW_S)
    assert not feed.receiver.make_ack(NOW_S).tagged
    feed.feed(record, 0, 1)
    assert feed.receiver.make_ack(NOW_S).tagged
    feed.feed_tagged(record)
    assert feed.got == [(0, bytes(5_000))]


def test_tags_are_needed_for_some_seconds_after_the_last_forgery() -> None:
    feed = Feed()
    sent = records(*[bytes(5_000)] * 3)
    for record, at_s in ((sent[0], 0.0), (sent[1], TAGGED_S + 0.1)):
        feed.spoil(record, after_s=at_s)
        assert feed.receiver.make_ack(NOW_S + at_s).tagged
        for first in (0, 2):
            batch = record.wire[first * SEGMENT :][: 3 * SEGMENT]
            feed.feed_bytes(record, first, batch, at_s + TAGGED_S - 0.1)
        assert feed.got == []
    end_s = 2 * TAGGED_S + 0.2
    assert not feed.receiver.make_ack(NOW_S + end_s).tagged
    for record in sent:
        for first in range(record.fragments):
            feed.feed_bytes(record, first, record.wire[first * SEGMENT :][:SEGMENT], end_s)
    assert len(feed.got) == 3


@pytest.mark.parametrize("batch", [1, 2, 52])
@pytest.mark.parametrize("where", [2, 3, 5, 8, 13, 15, 16, SEGMENT - 1, SEGMENT, TAGGED_BYTES - 1])
def test_tagged_fragments_count_up_to_the_first_that_is_forged(where: int, batch: int) -> None:
    feed = Feed()
    [record, _] = records(bytes(CHUNK), bytes(CHUNK))
    data = bytearray(tagged(record)[: batch * TAGGED_BYTES])
    header = DataHeader.decode(memoryview(data), 0)
    data[(batch // 2) * TAGGED_BYTES + where] ^= 1
    parts = feed.receiver.authentic(header, memoryview(data), TAGGED_BYTES)
    starts = range(0, batch // 2 * SEGMENT, SEGMENT)
    assert [part[1:] for part in parts] == [record.wire[at + 1 :][: SEGMENT - 1] for at in starts]


def test_a_tag_of_another_record_or_place_does_not_count() -> None:
    feed = Feed()
    sent = records(bytes(CHUNK), bytes(CHUNK))
    first, second = (tagged(record) for record in sent)
    header = DataHeader.decode(memoryview(first), 0)
    for other in (second[TAGGED_BYTES:], first[2 * TAGGED_BYTES :], first):
        mixed = memoryview(first[:TAGGED_BYTES] + other[:TAGGED_BYTES])
        assert len(feed.receiver.authentic(header, mixed, TAGGED_BYTES)) == 1
    assert not feed.receiver.authentic(header, memoryview(second), TAGGED_BYTES)


@pytest.mark.parametrize("nbytes", [16, 17, 18, 31, 32, 33, 100])
def test_a_truncated_tagged_fragment_is_forged(nbytes: int) -> None:
    feed = Feed()
    [record] = records(bytes(5_000))
    cut = memoryview(tagged(record)[:nbytes])
    assert feed.receiver.authentic(DataHeader.decode(cut, 0), cut, nbytes) == []


def test_a_forged_tagged_fragment_of_a_later_epoch_costs_no_key() -> None:
    feed = Feed()
    [record] = records(b"text")
    for epoch in (1, 2, 3):
        header = HEADER.pack(TAGGED, 0, 0, 1, STREAM, FRAGMENT << 48 | epoch << EPOCH_BITS)
        forged = memoryview(header + bytes(100))
        assert feed.receiver.authentic(DataHeader.decode(forged, 0), forged, len(forged)) == []
    feed.feed_tagged(record)
    assert feed.got == [(0, b"text")]


@pytest.mark.parametrize("are_tagged", [False, True])
def test_forged_and_repeated_fragments_draw_no_ack_before_they_have_its_bytes(
    are_tagged: bool,
) -> None:
    feed = Feed()
    record, other = records(b"text", b"other")
    feed.feed_bytes(other, 0, bytes(other.nbytes))
    feed.feed_tagged(record)
    feed.receiver.make_ack(NOW_S)
    for _ in range(250 // record.nbytes):
        assert feed.receiver.ack_at_s == NEVER_S
        (feed.feed_tagged if are_tagged else feed.feed)(record)
    feed.feed_tagged(record)
    assert feed.receiver.ack_at_s < NEVER_S


@pytest.mark.parametrize(
    ("fragments", "size", "first", "nbytes"),
    [
        (0, 1_184, 0, 100),
        (53, 1_184, 0, 100),
        (7, 9_000, 0, 100),
        (2, 255, 0, 100),
        (2, 9_001, 0, 100),
        (65, 256, 0, 272),
        (2, 1_184, 2, 1_200),
        (2, 1_184, 0, 1_199),
        (2, 1_184, 0, 16),
        (2, 1_184, 0, 1_215),
        (2, 1_184, 0, 1_216),
        (1, 1_184, 0, 3_000),
    ],
)
def test_impossible_fragments_are_malformed(
    fragments: int, size: int, first: int, nbytes: int
) -> None:
    receiver = Feed().receiver
    batch = memoryview(bytes(nbytes))
    assert not receiver.on_fragments(DataHeader(STREAM, 0, fragments, size, first), batch, NOW_S)
    assert receiver.make_ack(NOW_S).partials == ()


@pytest.mark.parametrize(
    "case",
    [
        [(0, 2 << 20, 0, b"x")],
        [(0, 3, 0, b"xxxx")],
        [(0, 10, 5, b"x")],
        [(0, 10, 0, b"xxxx"), (1, 10, 0, b"xxxx"), (1, 10, 8, b"xx")],
        [(0, 10, 0, b"xxxx"), (0, 10, 4, b"xxxxxxx")],
        [(0, 10, 0, b"xxxx"), (0, 10, 4, b"")],
    ],
)
def test_a_message_that_grows_or_exceeds_the_maximum_ends_the_session(
    case: list[tuple[int, int, int, bytes]],
) -> None:
    feed = Feed()
    sent = [sealed(number, *fields) for number, fields in enumerate(case)]
    for record in sent[:-1]:
        feed.feed(record)
    assert not feed.receiver.error
    feed.feed(sent[-1])
    assert feed.receiver.error
    assert feed.got == []


# ---- acknowledgements -------------------------------------------------------------------------------------------


def test_an_acknowledgement_describes_exactly_the_records_held() -> None:
    feed = Feed()
    sent = records(*[bytes(4_000)] * 6)
    feed.feed(sent[0])
    feed.feed(sent[2])
    feed.feed(sent[3], 1, 2)
    ack = feed.receiver.make_ack(NOW_S)
    assert (ack.cumulative, ack.complete, ack.partials) == (1, 0b10, ((3, 0b0110),))
    assert ack.limit == 1 + 64
    assert feed.receiver.ack_at_s == NEVER_S


def test_gaps_and_ends_of_messages_are_acknowledged_at_once_and_other_records_a_little_later() -> (
    None
):
    feed = Feed()
    delays = []
    sent = records(bytes(4 * CHUNK), b"last")
    for record in (sent[0], sent[2], sent[1], sent[3], sent[4]):
        feed.receiver.make_ack(NOW_S)
        feed.feed(record)
        delays.append(feed.receiver.ack_at_s - NOW_S)
    assert delays == pytest.approx([ACK_DELAY_S, 0.0, ACK_DELAY_S, 0.0, 0.0])


def test_a_gap_is_acknowledged_at_once_only_when_it_opens() -> None:
    """At 1 % loss there is nearly always a gap: an answer to each datagram would cost more than the data."""
    feed = Feed()
    sent = records(bytes(20_000), b"a", b"b", b"c")
    feed.receiver.make_ack(NOW_S)
    feed.feed(sent[0], 0, 1)
    urgent = []
    pieces = [(0, index) for index in (2, 3, 4, 6, 7, 8, 1, 10)] + [(1, 0), (2, 0), (3, 0), (0, 5)]
    for index, fragment in pieces:
        feed.receiver.make_ack(NOW_S)
        feed.feed(sent[index], fragment, 1)
        if feed.receiver.ack_at_s == NOW_S:
            urgent.append((index, fragment))
        else:
            assert feed.receiver.ack_at_s == pytest.approx(NOW_S + ACK_DELAY_S)
    assert urgent == [(0, 2), (0, 6), (0, 10), (1, 0)]


def test_a_stream_is_acknowledged_every_few_records_and_at_its_end() -> None:
    feed = Feed(budget_bytes=1 << 22, message_bytes_max=1 << 22)
    feed.receiver.make_ack(NOW_S)
    acknowledged = []
    for record in records(bytes(12 * CHUNK)):
        feed.feed(record)
        if feed.receiver.ack_at_s == NOW_S:
            ack = feed.receiver.make_ack(NOW_S)
            assert ack.partials == ()
            acknowledged.append(ack.cumulative)
    assert acknowledged == [5, 10, 12]


def test_credit_covers_the_consumed_records_and_is_never_withdrawn() -> None:
    feed = Feed()
    assert feed.receiver.make_ack(NOW_S).limit == 64
    feed.receiver.grant_credit(10, NOW_S)
    assert feed.receiver.make_ack(NOW_S).limit == 64
    feed.receiver.grant_credit(1 << 20, NOW_S)
    assert feed.receiver.make_ack(NOW_S).limit == 1_024
    for record in records(*[b"x"] * 10):
        feed.feed(record)
    assert feed.receiver.make_ack(NOW_S).limit == 1_034


def test_one_acknowledgement_describes_the_oldest_incomplete_records_and_fits_a_datagram() -> None:
    feed = Feed()
    feed.receiver.grant_credit(512, NOW_S)
    sent = records(*[bytes(CHUNK)] * 150)
    last = 51
    for record in sent[1:]:
        feed.feed(record, last, 1)
    ack = feed.receiver.make_ack(NOW_S)
    assert len(encode_frame(ack)) <= CONTROL_PLAINTEXT_MAX
    assert ack.truncated
    assert 50 <= len(ack.partials) <= 100
    assert list(ack.partials) == [
        (record.number, 1 << last) for record in sent[1 : 1 + len(ack.partials)]
    ]
    for record in sent[: 1 + len(ack.partials)]:
        feed.feed(record)
    following = feed.receiver.make_ack(NOW_S)
    assert following.partials[0][0] == ack.partials[-1][0] + 1


# ---- skips ------------------------------------------------------------------------------------------------------


def test_skipped_records_count_as_complete_wherever_they_are() -> None:
    feed = Feed()
    feed.receiver.skip(2, 3, NOW_S)
    assert feed.receiver.make_ack(NOW_S).complete == 0b100  # one bit for the skip
    feed.receiver.skip(0, 1, NOW_S)
    assert feed.receiver.cumulative == 1
    feed.feed(records(b"one", start=1)[0])
    assert feed.receiver.cumulative == 5
    feed.feed(records(b"five", start=5, message=1)[0])
    assert [payload for _, payload in feed.got] == [b"one", b"five"]


def test_a_skip_counts_though_its_first_records_have_come() -> None:
    """A node that connects again may get records of the session before, which the new one skips."""
    feed = Feed()
    feed.feed(records(b"first")[0])
    feed.receiver.skip(0, 1, NOW_S)
    assert feed.receiver.cumulative == 1
    feed.receiver.skip(0, 3, NOW_S)
    assert feed.receiver.make_ack(NOW_S).cumulative == 3
    feed.feed(records(b"last", start=3, message=1)[0])
    assert [payload for _, payload in feed.got] == [b"first", b"last"]


def test_a_skip_of_a_million_records_costs_nothing() -> None:
    feed = Feed()
    feed.receiver.skip(0, 1_000_000, NOW_S)
    assert feed.receiver.cumulative == 1_000_000
    assert feed.receiver.make_ack(NOW_S).limit == 1_000_000 + 64
    feed.feed(records(b"after", start=1_000_000)[0])
    assert feed.got == [(0, b"after")]


@pytest.mark.parametrize("apart", [1, 2])
def test_the_skip_that_everything_waits_for_is_taken_however_many_there_are(apart: int) -> None:
    feed = Feed()
    for index in range(3 * ACK_WINDOW_RECORDS):
        feed.receiver.skip(10 + apart * index, 1, NOW_S)
    assert len(feed.receiver._complete) <= ACK_WINDOW_RECORDS
    feed.receiver.skip(0, 10_000, NOW_S)
    assert feed.receiver.make_ack(NOW_S).cumulative == 10_000
    assert feed.receiver._complete == {}
