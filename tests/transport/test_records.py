"""Cutting, sealing, framing, and the bounded log."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.transport.crypto import SenderKey
from gradwire.transport.records import (
    Burst,
    Outgoing,
    Record,
    SendLog,
    joined,
    lowest_bits,
    runs,
)
from gradwire.transport.sealer import Sealer, chunk_bytes_max
from gradwire.transport.wire import (
    BURST_BYTES_MAX,
    BURST_FRAGMENTS_MAX,
    FRAGMENT_BYTES_MAX,
    FRAGMENT_BYTES_MIN,
    FRAGMENTS_MAX,
    HEADER,
    NUMBER_BYTES,
    RECORD_BURSTS_MAX,
    RECORD_META,
    fragments_per_record,
)

KEY = SenderKey.generate(3, random.Random(1).randbytes)


def seal(chunk: bytes, number: int = 7, fragment_bytes: int = 1_384) -> Record:
    sealer = Sealer(KEY, 99, fragment_bytes)
    return sealer.seal(number, Outgoing(frozenset({1}), 0), 5, 11, len(chunk), 0, memoryview(chunk))


FULL = seal(bytes(chunk_bytes_max(1_384)))


@given(st.integers(0, 2**255 - 1))
def test_runs_cover_exactly_the_set_bits(mask: int) -> None:
    found = 0
    for first, count in runs(mask):
        assert found >> first == 0
        found |= ((1 << count) - 1) << first
    assert found == mask
    assert len(list(runs(mask))) == bin(mask).replace("0b", "0").count("01")


@given(
    st.integers(0, 2**255 - 1) | st.integers(1, 200).map(lambda n: ((1 << n) - 1) << 20),
    st.integers(1, 64),
)
def test_the_lowest_bits_are_the_lowest(mask: int, count: int) -> None:
    low = lowest_bits(mask, count)
    assert low.bit_count() == min(count, mask.bit_count())
    assert low & ~mask == 0
    assert low == 0 or mask & ((1 << low.bit_length()) - 1) == low


@pytest.mark.parametrize(
    "fragment_bytes", [FRAGMENT_BYTES_MIN, 1_184, 1_384, 8_956, FRAGMENT_BYTES_MAX]
)
def test_a_full_record_is_whole_bursts_and_takes_up_a_number_for_each(fragment_bytes: int) -> None:
    record = seal(bytes(chunk_bytes_max(fragment_bytes)), fragment_bytes=fragment_bytes)
    assert record.fragments == fragments_per_record(fragment_bytes) <= FRAGMENTS_MAX
    assert len(record.wire) == record.fragments * record.segment_bytes
    bursts = [burst for [burst] in record.calls]
    assert record.span == len(bursts) <= RECORD_BURSTS_MAX
    assert len({len(burst) for burst in bursts}) == 1
    assert len(bursts[0]) <= BURST_BYTES_MAX <= NUMBER_BYTES
    assert len(bursts[0]) // record.segment_bytes <= BURST_FRAGMENTS_MAX
    assert b"".join(bursts) == record.wire


@given(st.integers(1, 2**180 - 1), st.integers(1, 300_000))
def test_a_part_of_a_record_fits_the_room_and_is_not_half_a_burst(mask: int, room: int) -> None:
    record = FULL
    part = record.part_of(mask, room)
    assert part
    assert part & ~mask == 0
    assert record.bytes_of(part) <= max(room, record.segment_bytes)
    if part != mask and room >= BURST_BYTES_MAX:
        assert part.bit_count() % record.burst_fragments == 0, "half a burst costs as much as one"
    burst = record.burst(part)
    sent = [b"".join(slices) for slices in burst.calls]
    assert burst.nbytes == sum(map(len, sent))
    assert b"".join(sent) == b"".join(record.slices(part))
    whole_bytes = record.burst_fragments * record.segment_bytes
    assert all(len(call) == whole_bytes for call in sent[:-1])
    assert 0 < len(sent[-1]) <= whole_bytes


@given(st.lists(st.sampled_from(("full", "short", "small", "skip")), max_size=8))
def test_only_whole_datagrams_of_one_size_are_joined_and_nothing_changes_its_place(
    kinds: list[str],
) -> None:
    records = {
        "full": FULL,
        "short": seal(bytes(5_000)),
        "small": seal(bytes(chunk_bytes_max(1_184)), fragment_bytes=1_184),
    }
    items: list[Burst | str] = [records.get(kind, kind) for kind in kinds]
    before = [record.calls for record in records.values()]
    found = joined(items)

    def flat(items: list[Burst | str]) -> list[object]:
        return [
            call for item in items for call in (item.calls if isinstance(item, Burst) else [item])
        ]

    assert flat(found) == flat(items)
    assert [record.calls for record in records.values()] == before
    for burst in found:
        if isinstance(burst, Burst):
            sizes = [len(b"".join(call)) for call in burst.calls]
            assert sum(sizes) == burst.nbytes
            assert all(size % burst.segment_bytes == 0 for size in sizes[:-1])
    together = {("full", "full"), ("full", "short"), ("small", "small")}
    apart = sum(pair not in together for pair in pairwise(kinds))
    assert len(found) == bool(kinds) + apart


@pytest.mark.parametrize("fragment_bytes", [FRAGMENT_BYTES_MIN, 1_184, 1_384, FRAGMENT_BYTES_MAX])
@pytest.mark.parametrize("fragments_max", [1, FRAGMENTS_MAX])
def test_a_message_takes_up_as_many_numbers_as_foretold(
    fragment_bytes: int, fragments_max: int
) -> None:
    sealer = Sealer(KEY, 99, fragment_bytes)
    sealer.reframe(fragment_bytes, fragments_max)
    for nbytes in (0, 1, sealer.chunk_bytes, sealer.chunk_bytes + 1, 70_000, 300_000):
        log = SendLog(1 << 30, first_record=5)
        message = Outgoing(frozenset({1}), 0)
        for record in sealer.seal_message(5, message, 0, 0, memoryview(bytes(nbytes))):
            assert record.number == log.head
            log.append(record)
        assert log.head == 5 + sealer.numbers_of(nbytes)
        assert log.used_bytes == sealer.wire_bytes(nbytes)
        log.release_below(log.head)
        assert (log.used_bytes, len(log)) == (0, 0)


@pytest.mark.parametrize("nbytes", [0, 1, 1_343, 1_344, 1_345, 10_000, 62_240, 62_241, 249_080])
def test_the_datagrams_of_a_record_hold_the_sealed_message(nbytes: int) -> None:
    chunk = random.Random(nbytes).randbytes(nbytes)
    record = seal(chunk)
    datagrams = [record.slices(1 << index)[0] for index in range(record.fragments)]
    headers = [HEADER.unpack_from(datagram) for datagram in datagrams]
    assert [header[2] for header in headers] == list(range(record.fragments))
    assert {header[:2] + header[3:] for header in headers} == {
        (0x11, 3, record.fragments, 99, 1_384 << 48 | 7)
    }
    sealed = b"".join(datagram[16:] for datagram in datagrams)
    plain = bytearray(len(sealed) - 16)
    KEY.open_into(7, memoryview(sealed), bytes(datagrams[0][:16]), memoryview(plain))
    assert RECORD_META.unpack_from(plain) == (5, 11, nbytes, 0)
    assert plain[24:] == chunk


@given(st.integers(1, 2**8 - 1))
def test_the_bytes_of_a_mask_are_those_of_its_slices(mask: int) -> None:
    record = seal(bytes(10_000))
    assert record.fragments == 8
    assert record.bytes_of(mask) == sum(map(len, record.slices(mask)))


def test_the_log_counts_bytes_and_releases_in_order() -> None:
    log = SendLog(1_000_000, first_record=7)
    records = [seal(bytes(100 * index), number) for index, number in enumerate(range(7, 12))]
    for record in records:
        log.append(record)
    assert (log.base, log.head, len(log)) == (7, 12, 5)
    assert log.used_bytes == sum(len(record.wire) for record in records)
    log.release_below(10)
    assert log.used_bytes == sum(len(record.wire) for record in records[3:])
    assert log[10] is records[3]
    log.release_below(5)
    log.release_below(12)
    assert (log.used_bytes, len(log)) == (0, 0)
