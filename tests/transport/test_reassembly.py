"""What comes next if nothing is lost is recognised, and nothing else is taken for it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.transport.crypto import SenderKey
from gradwire.transport.inbound import Inbound, ReceiveBudget
from gradwire.transport.reassembly import Sequel
from gradwire.transport.records import Outgoing, Record
from gradwire.transport.round_trips import RttEstimator
from gradwire.transport.sealer import Sealer

KEY = SenderKey.generate(0, random.Random(1).randbytes)
SEGMENT = 1_400
NOW_S = 1.0


def records(payload: bytes, start: int = 0, message: int = 0) -> list[Record]:
    sealer = Sealer(KEY, 8, SEGMENT - 16)
    outgoing = Outgoing(frozenset(), 0, is_shared=True)
    return list(sealer.seal_message(start, outgoing, message, 7, memoryview(payload)))


class Stream:
    """An `Inbound` that is asked first whether a burst is what comes next, as an endpoint asks."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.quick = 0
        self.inbound = Inbound(
            0,
            ReceiveBudget(1 << 24),
            lambda _, view: self.got.append(bytes(view)),
            1 << 24,
            RttEstimator(),
        )
        self.inbound.add_key(KEY)
        self.inbound.grant(1_024, NOW_S)

    def feed(self, record: Record, batch: memoryview) -> None:
        if self.inbound.go_on(batch, SEGMENT, NOW_S):
            self.quick += 1
        else:
            self.inbound.on_fragments(
                0, 8, record.number, record.fragments, SEGMENT - 16, batch[2], batch, NOW_S
            )


def test_all_bursts_of_a_stream_but_the_first_and_the_last_go_the_quick_way() -> None:
    payload = random.Random(2).randbytes(1_000_000)
    stream = Stream()
    sent = [(record, burst) for record in records(payload) for [burst] in record.calls]
    for record, burst in sent:
        stream.feed(record, burst)
    assert stream.got == [payload]
    assert len(sent) - stream.quick == 2


@given(st.integers(0, 2**32 - 1), st.sampled_from((200_000, 400_000, 1_000_000)))
def test_the_quick_way_and_the_other_give_the_same_in_any_disorder(seed: int, nbytes: int) -> None:
    generator = random.Random(seed)
    payload = generator.randbytes(nbytes)
    stream, start = Stream(), 0
    pieces: list[tuple[Record, memoryview]] = []
    for message in range(2):
        for record in records(payload, start, message):
            at = 0
            while at < record.nbytes:
                end = min(record.nbytes, at + SEGMENT * generator.choice((1, 7, 45, 45, 45, 46)))
                pieces.append((record, record.wire[at:end]))
                at = end
            start = record.number + record.span
    for _ in range(generator.choice((0, 1, 8))):
        one, two = generator.randrange(len(pieces)), generator.randrange(len(pieces))
        pieces[one], pieces[two] = pieces[two], pieces[one]
        pieces.insert(generator.randrange(len(pieces)), pieces[two])
    for record, piece in pieces:
        stream.feed(record, piece)
    assert stream.got == [payload, payload]
    assert stream.inbound.cumulative == start
    assert not stream.inbound._partials


@pytest.mark.parametrize("where", [0, 1, 2, 3, 4, 8, 14, 2 * SEGMENT + 2, 2 * SEGMENT + 8])
def test_a_burst_with_another_header_is_not_what_comes_next(where: int) -> None:
    [record] = records(bytes(200_000))
    sequel = Sequel()
    sequel.begin(0, 0, 8, record.fragments, SEGMENT - 16, 45)
    burst = bytearray(record.calls[1][0])
    assert sequel.match(memoryview(burst), SEGMENT) == 45
    burst[where] ^= 1
    assert sequel.match(memoryview(burst), SEGMENT) == 0


def test_more_or_fewer_bytes_than_the_header_says_are_not_what_comes_next() -> None:
    [record] = records(bytes(150_000))
    sequel = Sequel()
    sequel.begin(0, 0, 8, record.fragments, SEGMENT - 16, 90)
    tail = record.calls[2][0]
    assert sequel.match(tail, SEGMENT) == record.fragments - 90
    assert sequel.match(tail, SEGMENT - 1) == 0
    assert sequel.match(tail[: len(tail) // SEGMENT * SEGMENT + 16], SEGMENT) == 0
    assert sequel.match(tail[: 2 * SEGMENT + 100], SEGMENT) == 0
    longer = memoryview(bytes(tail) + bytes(tail[-SEGMENT:]))
    assert sequel.match(longer, SEGMENT) == 0
    assert sequel.match(tail[:10], SEGMENT) == 0


def test_what_was_not_granted_does_not_go_the_quick_way() -> None:
    stream = Stream()
    sent = records(bytes(500_000))
    stream.inbound.limit = 7
    for record in sent[:2]:
        for [burst] in record.calls:
            stream.feed(record, burst)
    assert stream.inbound.cumulative == 4
    assert not stream.inbound._partials
