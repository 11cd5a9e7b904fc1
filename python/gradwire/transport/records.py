"""Sealed records, and the bounded log that keeps them.

A record is the unit of encryption and of acknowledgement, has one record number, and leaves with one system call. A
message is cut into records, and each record is encrypted and framed once, whatever the number of peers.
Retransmissions send slices of the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .crypto import KeyChain
from .wire import (
    DATA,
    FRAGMENTS_MAX,
    HEADER,
    HEADER_BYTES,
    RECORD_META,
    RECORD_META_BYTES,
    RECORD_NUMBER_BITS,
    TAG_BYTES,
    fragments_per_record,
)

FRAGMENT_INDICES: Final = np.arange(FRAGMENTS_MAX, dtype=np.uint8)


@dataclass(slots=True)
class Record:
    """One sealed record, framed: ``fragments`` datagrams back to back, all but the last of ``segment_bytes``."""

    number: int
    wire: memoryview  # the datagrams
    fragments: int
    segment_bytes: int
    recipients: frozenset[
        int
    ]  # sessions, by local index, that the record's message was published to
    nbytes: int = field(init=False)  # of all datagrams
    full: int = field(init=False)  # a bit for each fragment

    def __post_init__(self) -> None:
        """Derive the size and the bits."""
        self.nbytes = len(self.wire)
        self.full = (1 << self.fragments) - 1

    def bytes_of(self, mask: int) -> int:
        """Return the size on the wire of the fragments whose bits are set."""
        if mask == self.full:
            return self.nbytes
        total = mask.bit_count() * self.segment_bytes
        if mask >> (self.fragments - 1) & 1:
            total -= self.fragments * self.segment_bytes - self.nbytes
        return total

    def slices(self, mask: int) -> list[memoryview]:
        """Return the datagrams whose bits are set, neighbours as one slice; only the last may be short."""
        if mask == self.full:
            return [self.wire]
        size = self.segment_bytes
        return [self.wire[first * size : (first + count) * size] for first, count in runs(mask)]


def runs(mask: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) for each run of set bits, lowest first."""
    position = 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        position += gap
        count = (~mask & (mask + 1)).bit_length() - 1
        yield position, count
        mask >>= count
        position += count


def lowest_bits(mask: int, count: int) -> int:
    """Return ``mask`` reduced to its ``count`` lowest set bits."""
    excess = mask.bit_count() - count
    for _ in range(excess):
        mask ^= 1 << (mask.bit_length() - 1)
    return mask


class SendLog:
    """The records that some peer has not acknowledged yet, bounded in bytes."""

    def __init__(self, limit_bytes: int, first_record: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.head = first_record  # number of the next record
        self.base = first_record  # every record below this number has been released
        self.used_bytes = 0
        self._records: dict[int, Record] = {}
        self.get = (
            self._records.get
        )  # a method without the cost of one: called once per record and peer

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Record) -> None:
        """Keep a record; its number must be ``head``."""
        self._records[record.number] = record
        self.used_bytes += record.nbytes
        self.head += 1

    def release_below(self, number: int) -> None:
        """Drop the records below ``number``: every peer has them or will never get them."""
        for released in range(self.base, number):
            record = self._records.pop(released, None)
            if record is not None:
                self.used_bytes -= record.nbytes
        self.base = max(self.base, number)


class Sealer:
    """Turns messages into framed records under the node's keys.

    Args:
        keys: the node's sender keys.
        stream: number of the node's stream, in the header of every record.
        datagram_bytes: size of a full datagram, the header included.
    """

    def __init__(self, keys: KeyChain, stream: int, datagram_bytes: int) -> None:
        self.keys = keys
        self._stream = stream
        self._segment_bytes = datagram_bytes
        self._fragment_bytes = datagram_bytes - HEADER_BYTES
        fragments = fragments_per_record(datagram_bytes)
        self._chunk_bytes = fragments * self._fragment_bytes - TAG_BYTES - RECORD_META_BYTES
        # Scratch memory for the plaintext and the sealed bytes of one record.
        self._plain = memoryview(bytearray(fragments * self._fragment_bytes))
        self._sealed = np.empty((fragments, self._fragment_bytes), dtype=np.uint8)
        self._sealed_view = memoryview(self._sealed.reshape(-1))  # type: ignore[arg-type]

    def records_of(self, message_bytes: int) -> int:
        """Return the number of records of a message."""
        return max(1, -(-message_bytes // self._chunk_bytes))

    def wire_bytes(self, message_bytes: int) -> int:
        """Return the bytes that a message takes in the log."""
        full, rest = divmod(message_bytes, self._chunk_bytes)
        total = full * self._record_bytes(self._chunk_bytes)
        return total if full and not rest else total + self._record_bytes(rest)

    def _record_bytes(self, chunk_bytes: int) -> int:
        sealed_bytes = RECORD_META_BYTES + chunk_bytes + TAG_BYTES
        return sealed_bytes + -(-sealed_bytes // self._fragment_bytes) * HEADER_BYTES

    def seal_message(
        self, number: int, recipients: frozenset[int], message: int, tag: int, payload: memoryview
    ) -> Iterator[Record]:
        """Yield the records of a message, in order; the first has the record number ``number``."""
        total_bytes = len(payload)
        for offset in range(0, max(1, total_bytes), self._chunk_bytes):
            chunk = payload[offset : offset + self._chunk_bytes]
            meta = RECORD_META.pack(message, tag, total_bytes, offset)
            yield self._seal(number, recipients, meta, chunk)
            number += 1

    def _seal(
        self, number: int, recipients: frozenset[int], meta: bytes, chunk: memoryview
    ) -> Record:
        plain_bytes = RECORD_META_BYTES + len(chunk)
        sealed_bytes = plain_bytes + TAG_BYTES
        fragments = -(-sealed_bytes // self._fragment_bytes)
        field = self._fragment_bytes << RECORD_NUMBER_BITS | number
        header = HEADER.pack(DATA, 0, 0, fragments, self._stream, field)
        plain = self._plain[:plain_bytes]
        plain[:RECORD_META_BYTES] = meta
        plain[RECORD_META_BYTES:] = chunk
        self.keys.seal_into(number, plain, header, self._sealed_view[:sealed_bytes])
        wire = np.empty(sealed_bytes + fragments * HEADER_BYTES, dtype=np.uint8)
        self._frame(wire, header, fragments, sealed_bytes)
        view = memoryview(wire)  # type: ignore[arg-type]
        return Record(number, view, fragments, self._segment_bytes, recipients)

    def _frame(
        self, wire: NDArray[np.uint8], header: bytes, fragments: int, sealed_bytes: int
    ) -> None:
        """Spread the sealed bytes over datagrams with headers, in two strided copies instead of 52 slices."""
        full = sealed_bytes // self._fragment_bytes
        first_header = np.frombuffer(header, dtype=np.uint8)
        grid = wire[: full * self._segment_bytes].reshape(full, self._segment_bytes)
        grid[:, :HEADER_BYTES] = first_header
        grid[:, 2] = FRAGMENT_INDICES[:full]
        grid[:, HEADER_BYTES:] = self._sealed[:full]
        if full < fragments:
            tail = wire[full * self._segment_bytes :]
            tail[:HEADER_BYTES] = first_header
            tail[2] = full
            tail[HEADER_BYTES:] = self._sealed[full, : len(tail) - HEADER_BYTES]
