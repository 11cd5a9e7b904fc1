"""Sealed records: cutting a message into them, framing them for the wire, and the bounded log that keeps them.

A record is at once the unit of encryption, of one system call (a GSO burst) and of acknowledgement. It is sealed and
framed once, whatever the number of peers; retransmissions send slices of the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .crypto import SenderKey
from .wire import (
    DATA,
    FRAGMENTS_MAX,
    HEADER,
    HEADER_BYTES,
    RECORD_META,
    RECORD_META_BYTES,
    TAG_BYTES,
)

# Linux refuses more than 65,507 bytes, and bursts near that are not coalesced again on receipt: 45 datagrams of 1,400.
BURST_BYTES_MAX: Final = 63_000
RECORD_NUMBER_SHIFT: Final = 48
FRAGMENT_INDICES: Final = np.arange(FRAGMENTS_MAX, dtype=np.uint8)


def fragments_per_record(fragment_bytes: int) -> int:
    """Return into how many datagrams a full record is cut."""
    return max(1, min(FRAGMENTS_MAX, BURST_BYTES_MAX // (fragment_bytes + HEADER_BYTES)))


def chunk_bytes_max(fragment_bytes: int) -> int:
    """Return how many bytes of a message one record carries at most."""
    return fragments_per_record(fragment_bytes) * fragment_bytes - TAG_BYTES - RECORD_META_BYTES


class Outgoing:
    """One published message on its way: for whom, and where in the log it ends.

    Attributes:
        recipients: sessions (by local index) that it was published to.
        last_record: number of its last record.
    """

    __slots__ = ("last_record", "recipients")

    def __init__(self, recipients: frozenset[int]) -> None:
        self.recipients = recipients
        self.last_record = -1


class Record:
    """One sealed record, framed: ``fragments`` datagrams back to back, all but the last of ``segment_bytes``."""

    __slots__ = ("fragments", "full", "message", "number", "segment_bytes", "wire")

    def __init__(
        self, number: int, wire: memoryview, fragments: int, segment_bytes: int, message: Outgoing
    ) -> None:
        self.number = number
        self.wire = wire
        self.fragments = fragments
        self.full = (1 << fragments) - 1
        self.segment_bytes = segment_bytes
        self.message = message

    def bytes_of(self, mask: int) -> int:
        """Return the size on the wire of the fragments whose bits are set."""
        if mask == self.full:
            return len(self.wire)
        total = mask.bit_count() * self.segment_bytes
        if mask >> (self.fragments - 1) & 1:
            total -= self.fragments * self.segment_bytes - len(self.wire)
        return total

    def slices(self, mask: int) -> list[memoryview]:
        """Return the datagrams whose bits are set, neighbours as one slice; only the last may be short."""
        if mask == self.full:
            return [self.wire]
        result = []
        for first, count in runs(mask):
            result.append(
                self.wire[first * self.segment_bytes : (first + count) * self.segment_bytes]
            )
        return result


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
    if mask.bit_count() <= count:
        return mask
    rest = mask
    for _ in range(count):
        rest &= rest - 1
    return mask & ~rest


class Sealer:
    """Turns chunks of messages into framed records under the current sender key.

    Not thread-safe: the scratch buffers are reused.
    """

    def __init__(self, key: SenderKey, stream: int, fragment_bytes: int) -> None:
        self.key = key
        self.stream = stream
        self.fragment_bytes = fragment_bytes
        self._plain = bytearray(fragments_per_record(fragment_bytes) * fragment_bytes)
        self._sealed = bytearray(len(self._plain))
        self._sealed_array = np.frombuffer(self._sealed, dtype=np.uint8)

    def seal(
        self,
        number: int,
        message: Outgoing,
        message_number: int,
        tag: int,
        message_bytes: int,
        offset: int,
        chunk: memoryview,
    ) -> Record:
        """Return the record ``number`` that carries ``chunk``, found at ``offset`` of its message."""
        plain_bytes = RECORD_META_BYTES + len(chunk)
        sealed_bytes = plain_bytes + TAG_BYTES
        size = self.fragment_bytes
        fragments = -(-sealed_bytes // size)
        RECORD_META.pack_into(self._plain, 0, message_number, tag, message_bytes, offset)
        self._plain[RECORD_META_BYTES:plain_bytes] = chunk
        plain = memoryview(self._plain)[:plain_bytes]
        header = HEADER.pack(
            DATA,
            self.key.epoch & 0xFF,
            0,
            fragments,
            self.stream,
            size << RECORD_NUMBER_SHIFT | number,
        )
        wire = np.empty(sealed_bytes + fragments * HEADER_BYTES, dtype=np.uint8)
        view = memoryview(wire)  # type: ignore[arg-type]
        if fragments == 1:
            view[:HEADER_BYTES] = header
            self.key.seal_into(number, plain, header, view[HEADER_BYTES:])
        else:
            self.key.seal_into(number, plain, header, memoryview(self._sealed)[:sealed_bytes])
            _frame(wire, self._sealed_array[:sealed_bytes], header, fragments, size)
        return Record(number, view, fragments, size + HEADER_BYTES, message)


def _frame(
    out: NDArray[np.uint8], sealed: NDArray[np.uint8], header: bytes, fragments: int, size: int
) -> None:
    """Spread ``sealed`` over datagrams with headers; NumPy does in one strided copy what 45 slices would."""
    whole = fragments - 1
    segment = size + HEADER_BYTES
    grid = out[: whole * segment].reshape(whole, segment)
    template = np.frombuffer(header, dtype=np.uint8)
    grid[:, :HEADER_BYTES] = template
    grid[:, 2] = FRAGMENT_INDICES[:whole]
    grid[:, HEADER_BYTES:] = sealed[: whole * size].reshape(whole, size)
    tail = whole * segment
    out[tail : tail + HEADER_BYTES] = template
    out[tail + 2] = whole
    out[tail + HEADER_BYTES :] = sealed[whole * size :]


class SendLog:
    """The records that some peer has not acknowledged yet, bounded in bytes.

    Attributes:
        head: number that the next record will get.
        base: every record below this number has been released.
        used_bytes: bytes held.
    """

    def __init__(self, limit_bytes: int, first_record: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.head = first_record
        self.used_bytes = 0
        self.base = first_record
        self._records: dict[int, Record] = {}

    def __getitem__(self, number: int) -> Record:
        return self._records[number]

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Record) -> None:
        """Keep a record; its number must be ``head``."""
        self._records[record.number] = record
        self.used_bytes += len(record.wire)
        self.head = record.number + 1

    def release_below(self, number: int) -> None:
        """Forget the records below ``number``: everybody has them or will never get them."""
        while self.base < number:
            record = self._records.pop(self.base, None)
            if record is not None:
                self.used_bytes -= len(record.wire)
            self.base += 1
