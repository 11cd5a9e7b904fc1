"""Cutting, sealing, framing, and the bounded log."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.transport.crypto import KeyChain
from gradwire.transport.records import OBJECT_BYTES, Record, Sealer, SendLog
from gradwire.transport.wire import (
    DATA,
    DATAGRAM_BYTES_MAX,
    DATAGRAM_BYTES_MIN,
    HEADER,
    RECORD_BYTES_MAX,
    RECORD_META,
    fragments_per_record,
)

FULL_CHUNK_BYTES = 61_528  # in 52 datagrams of 1,200 bytes
SIZES = [DATAGRAM_BYTES_MIN, 1_200, 1_472, 8_972, DATAGRAM_BYTES_MAX]


def keys() -> KeyChain:
    return KeyChain(bytes(range(16)), bytes(range(12)), 0)


def seal(payload: bytes, number: int = 7, datagram_bytes: int = 1_200) -> list[Record]:
    sealer = Sealer(keys(), 99, datagram_bytes)
    return list(sealer.seal_message(number, frozenset({1}), 5, 11, memoryview(payload)))


def opened(record: Record, chain: KeyChain) -> tuple[tuple[int, ...], bytes]:
    """Return metadata and chunk of a record, opened from its datagrams."""
    datagrams = [record.slices(1 << index)[0] for index in range(record.fragments)]
    sealed = b"".join(datagram[16:] for datagram in datagrams)
    plain = bytearray(len(sealed) - 16)
    chain.open_into(record.number, memoryview(sealed), bytes(datagrams[0][:16]), memoryview(plain))
    return RECORD_META.unpack_from(plain), bytes(plain[RECORD_META.size :])


@given(st.integers(0, 2**52 - 1))
def test_slices_hold_exactly_the_datagrams_whose_bits_are_set(mask: int) -> None:
    [record] = seal(bytes(FULL_CHUNK_BYTES))
    slices = record.slices(mask)
    assert len(slices) == bin(mask).replace("0b", "0").count("01")
    wanted = [bytes(record.slices(1 << index)[0]) for index in range(52) if mask >> index & 1]
    assert b"".join(slices) == b"".join(wanted)


@pytest.mark.parametrize("datagram_bytes", SIZES)
def test_a_full_record_fills_its_datagrams_and_one_system_call(datagram_bytes: int) -> None:
    record = seal(bytes(200_000), datagram_bytes=datagram_bytes)[0]
    assert record.fragments == fragments_per_record(datagram_bytes)
    assert record.segment_bytes == datagram_bytes
    assert record.nbytes == len(record.wire) == record.fragments * datagram_bytes
    assert record.nbytes <= RECORD_BYTES_MAX


@pytest.mark.parametrize("datagram_bytes", SIZES)
def test_a_message_takes_as_many_records_and_bytes_as_foretold(datagram_bytes: int) -> None:
    sealer = Sealer(keys(), 99, datagram_bytes)
    chunk_bytes = fragments_per_record(datagram_bytes) * (datagram_bytes - 16) - 16 - 24
    for nbytes in (0, 1, chunk_bytes - 1, chunk_bytes, chunk_bytes + 1, 70_000, 300_000):
        log = SendLog(1 << 30, first_record=5)
        for record in sealer.seal_message(5, frozenset({1}), 0, 0, memoryview(bytes(nbytes))):
            assert record.number == log.head
            log.append(record)
        assert log.head == 5 + sealer.records_of(nbytes)
        records = sealer.records_of(nbytes)
        assert log.used_bytes == sealer.wire_bytes(nbytes) + records * OBJECT_BYTES
        log.release_below(log.head)
        assert log.used_bytes == 0


@pytest.mark.parametrize(
    "nbytes", [0, 1, 1_143, 1_144, 1_145, 10_000, FULL_CHUNK_BYTES, FULL_CHUNK_BYTES + 1, 200_000]
)
def test_the_datagrams_of_the_records_hold_the_sealed_message(nbytes: int) -> None:
    payload = random.Random(nbytes).randbytes(nbytes)
    chain, found = keys(), b""
    for number, record in enumerate(seal(payload), 7):
        datagrams = [record.slices(1 << index)[0] for index in range(record.fragments)]
        headers = [HEADER.unpack_from(datagram) for datagram in datagrams]
        assert headers == [
            (DATA, 0, index, record.fragments, 99, 1_184 << 48 | number)
            for index in range(record.fragments)
        ]
        meta, chunk = opened(record, chain)
        assert meta == (5, 11, nbytes, len(found))
        found += chunk
    assert found == payload


@given(st.integers(1, 2**8 - 1))
def test_the_bytes_of_a_mask_are_those_of_its_slices(mask: int) -> None:
    [record] = seal(bytes(9_000))
    assert record.fragments == 8
    assert record.bytes_of(mask) == sum(map(len, record.slices(mask)))
    assert all(len(piece) % record.segment_bytes == 0 for piece in record.slices(mask)[:-1])


def test_records_on_both_sides_of_an_epoch_s_end_are_sealed_with_different_keys() -> None:
    first = (1 << 22) - 1
    before, after = seal(bytes(FULL_CHUNK_BYTES + 1), number=first)
    chain = keys()
    assert opened(before, chain)[0] == (5, 11, FULL_CHUNK_BYTES + 1, 0)
    assert opened(after, chain)[0] == (5, 11, FULL_CHUNK_BYTES + 1, FULL_CHUNK_BYTES)
    assert chain.key_of(first) != chain.key_of(first + 1)


def test_the_log_counts_bytes_and_releases_in_order() -> None:
    log = SendLog(1_000_000, first_record=7)
    records = [record for number in range(7, 12) for record in seal(bytes(100 * number), number)]
    for record in records:
        log.append(record)
    assert (log.base, log.head, log.get(6)) == (7, 12, None)
    assert log.used_bytes == sum(record.nbytes + OBJECT_BYTES for record in records)
    log.release_below(10)
    assert log.used_bytes == sum(record.nbytes + OBJECT_BYTES for record in records[3:])
    assert log.get(10) is records[3]
    assert log.get(9) is None
    log.release_below(5)
    log.release_below(12)
    assert (log.used_bytes, log.get(11)) == (0, None)


def test_empty_messages_fill_the_log_by_the_memory_of_their_objects() -> None:
    log, sealer, [record] = SendLog(1 << 20), Sealer(keys(), 99, 1_200), seal(b"")
    while log.has_room(sealer, 0):
        log.append(record._replace(number=log.head))
    assert log.head * 1_400 < 1 << 20
