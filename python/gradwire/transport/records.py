"""Sealed records: cutting a message into them, framing them for the wire, and the bounded log that keeps them.

A record is the unit of encryption and of acknowledgement; it leaves in up to four bursts, one system call each, and
takes up a record number for each of them. It is sealed and framed once, whatever the number of peers; retransmissions
send slices of the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .buffers import BufferPool
from .crypto import SenderKey
from .model import Calls
from .wire import (
    DATA,
    FRAGMENTS_MAX,
    HEADER,
    HEADER_BYTES,
    RECORD_META,
    RECORD_META_BYTES,
    TAG_BYTES,
    fragments_per_burst,
    fragments_per_record,
    record_span,
)

RECORD_NUMBER_SHIFT: Final = 48
WIRES_KEPT_BYTES: Final = 8 << 20
FRAGMENT_INDICES: Final = np.arange(FRAGMENTS_MAX, dtype=np.uint8)


@functools.cache
def chunk_bytes_max(fragment_bytes: int, fragments_max: int = FRAGMENTS_MAX) -> int:
    """Return how many bytes of a message one record carries at most."""
    sealed_bytes = fragments_per_record(fragment_bytes, fragments_max) * fragment_bytes
    return sealed_bytes - TAG_BYTES - RECORD_META_BYTES


class Outgoing:
    """One published message on its way: for whom, and where in the log it ends.

    Attributes:
        recipients: sessions (by local index) that it was published to.
        last_record: number of its last record.
        is_shared: whether it is for every peer connected at the time, so that one may forward it to another. What is
            not says so in its header, by an odd stream number.
    """

    __slots__ = ("is_shared", "last_record", "recipients")

    def __init__(
        self, recipients: frozenset[int], last_record: int, *, is_shared: bool = False
    ) -> None:
        self.recipients = recipients
        self.last_record = last_record
        self.is_shared = is_shared


class Burst:
    """Datagrams of one record to send to one peer with as few system calls as possible; not to be changed.

    Attributes:
        calls: what each system call sends.
        segment_bytes: of each datagram but the last.
        nbytes: of all.
    """

    __slots__ = ("calls", "nbytes", "segment_bytes")

    def __init__(self, calls: Calls, segment_bytes: int, nbytes: int) -> None:
        self.calls = calls
        self.segment_bytes = segment_bytes
        self.nbytes = nbytes


class Record:
    """One sealed record, framed: ``fragments`` datagrams back to back, all but the last of ``segment_bytes``.

    Attributes:
        number: the first of its record numbers.
        span: how many it takes up, one per burst.
        burst_fragments: datagrams in each burst but the last.
        full: a bit for each fragment.
        nbytes: of all datagrams.
        message: that it belongs to.
    """

    __slots__ = (
        "_whole",
        "burst_fragments",
        "fragments",
        "full",
        "message",
        "nbytes",
        "number",
        "segment_bytes",
        "span",
        "wire",
    )

    def __init__(
        self, number: int, wire: memoryview, fragments: int, segment_bytes: int, message: Outgoing
    ) -> None:
        self.number = number
        self.wire = wire
        self.nbytes = len(wire)
        self.fragments = fragments
        self.segment_bytes = segment_bytes
        self.message = message
        self.full, self.burst_fragments, self.span = _shape(fragments, segment_bytes)
        self._whole: Burst | None = None

    @property
    def epoch(self) -> int:
        """Low 8 bits of the epoch of the key that sealed it."""
        return self.wire[1]

    @property
    def datagram_bytes(self) -> int:
        """Size of its largest datagram."""
        return min(self.segment_bytes, len(self.wire))

    def fragments_above(self, size_bytes: int) -> int:
        """Return the bits of the fragments whose datagrams are larger than this."""
        if self.segment_bytes <= size_bytes:
            return 0
        last_bytes = self.nbytes - (self.fragments - 1) * self.segment_bytes
        return self.full if last_bytes > size_bytes else self.full >> 1

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
        result = []
        for first, count in runs(mask):
            result.append(
                self.wire[first * self.segment_bytes : (first + count) * self.segment_bytes]
            )
        return result

    @property
    def whole(self) -> Burst:
        """All of its datagrams; the same object for every peer."""
        whole = self._whole
        if whole is None:
            wire, step = self.wire, self.burst_fragments * self.segment_bytes
            calls = [[wire[at : at + step]] for at in range(0, self.nbytes, step)]
            whole = self._whole = Burst(calls, self.segment_bytes, self.nbytes)
        return whole

    def burst(self, mask: int) -> Burst:
        """Return the datagrams whose bits are set."""
        if mask == self.full:
            return self.whole
        calls = calls_of(self.slices(mask), self.segment_bytes)
        return Burst(calls, self.segment_bytes, self.bytes_of(mask))

    def part_of(self, mask: int, room_bytes: int) -> int:
        """Return the bits of ``mask`` to send next, at least one, as far as they fit: whole bursts, where one does."""
        count = max(1, room_bytes // self.segment_bytes)
        if count > self.burst_fragments:
            count -= count % self.burst_fragments
        return lowest_bits(mask, count)


@functools.lru_cache(maxsize=256)
def _shape(fragments: int, segment_bytes: int) -> tuple[int, int, int]:
    """Return a bit for each fragment, the datagrams of a burst, and how many record numbers there are."""
    fragment_bytes = segment_bytes - HEADER_BYTES
    span = record_span(fragments, fragment_bytes)
    return (1 << fragments) - 1, fragments_per_burst(fragment_bytes), span


def calls_of(slices: list[memoryview], segment_bytes: int) -> Calls:
    """Return which of these whole datagrams each system call sends: as many as one may, in order."""
    most_bytes = segment_bytes * fragments_per_burst(segment_bytes - HEADER_BYTES)
    calls: Calls = [[]]
    room = most_bytes
    for piece in slices:
        rest = piece
        while len(rest) > room:
            if room:
                calls[-1].append(rest[:room])
            calls.append([])
            rest, room = rest[room:], most_bytes
        calls[-1].append(rest)
        room -= len(rest)
    return calls


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
    gap = (mask & -mask).bit_length() - 1
    low = ((1 << count) - 1) << gap
    if mask & low == low:  # the common case: they are neighbours
        return low
    rest = mask
    for _ in range(count):
        rest &= rest - 1
    return mask & ~rest


class Sealer:
    """Turns messages into framed records under the current sender key.

    Not thread-safe: the scratch buffers are reused.

    Attributes:
        key: of the current epoch.
        fragment_bytes: sealed bytes per datagram.
        fragments_max: datagrams per record.
        chunk_bytes: bytes of a message that one record carries at most.
    """

    def __init__(self, key: SenderKey, stream: int, fragment_bytes: int) -> None:
        self.key = key
        self.stream = stream
        self._wires = BufferPool(WIRES_KEPT_BYTES)
        self.reframe(fragment_bytes, FRAGMENTS_MAX)

    def reframe(self, fragment_bytes: int, fragments_max: int) -> None:
        """Cut what is sealed from now on for datagrams of this size, and this many per record."""
        self.fragment_bytes = fragment_bytes
        self.fragments_max = fragments_max
        self.chunk_bytes = chunk_bytes_max(fragment_bytes, fragments_max)
        fragments = fragments_per_record(fragment_bytes, fragments_max)
        self._plain = memoryview(bytearray(fragment_bytes))
        self._sealed = np.empty((fragments, fragment_bytes), dtype=np.uint8)
        self._sealed_view = memoryview(self._sealed.reshape(-1))  # type: ignore[arg-type]
        self._headers = np.zeros((fragments, HEADER_BYTES), dtype=np.uint8)
        self._numbers = self._headers.view("<u8")[:, 1]
        self._headers_are_for = b""

    def seal_message(
        self, number: int, message: Outgoing, message_number: int, tag: int, payload: memoryview
    ) -> Iterator[Record]:
        """Yield the records of a whole message, the first of which gets ``number``."""
        total_bytes, chunk_bytes = len(payload), self.chunk_bytes
        for offset in range(0, max(1, total_bytes), chunk_bytes):
            chunk = payload[offset : offset + chunk_bytes]
            record = self.seal(number, message, message_number, tag, total_bytes, offset, chunk)
            yield record
            number += record.span

    def numbers_of(self, message_bytes: int) -> int:
        """Return how many record numbers a message takes up."""
        whole, rest = divmod(message_bytes, self.chunk_bytes)
        numbers = whole * self._span(self.chunk_bytes)
        return numbers if whole and not rest else numbers + self._span(rest)

    def _span(self, chunk_bytes: int) -> int:
        sealed_bytes = RECORD_META_BYTES + chunk_bytes + TAG_BYTES
        return record_span(-(-sealed_bytes // self.fragment_bytes), self.fragment_bytes)

    def wire_bytes(self, message_bytes: int) -> int:
        """Return how many bytes a message takes in the log."""
        whole, rest = divmod(message_bytes, self.chunk_bytes)
        total = whole * self._record_bytes(self.chunk_bytes)
        return total if whole and not rest else total + self._record_bytes(rest)

    def _record_bytes(self, chunk_bytes: int) -> int:
        sealed_bytes = RECORD_META_BYTES + chunk_bytes + TAG_BYTES
        return sealed_bytes + -(-sealed_bytes // self.fragment_bytes) * HEADER_BYTES

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
        size, key = self.fragment_bytes, self.key
        fragments = -(-sealed_bytes // size)
        field = size << RECORD_NUMBER_SHIFT | number
        stream = self.stream if message.is_shared else self.stream | 1
        header = HEADER.pack(DATA, key.epoch & 0xFF, 0, fragments, stream, field)
        wire_bytes = sealed_bytes + fragments * HEADER_BYTES
        wire = self._wires.take(wire_bytes)[:wire_bytes]
        view = memoryview(wire)  # type: ignore[arg-type]
        # The plaintext stands where its datagrams will: a buffer less for the processor's cache to hold.
        plain = (self._plain if fragments == 1 else view)[:plain_bytes]
        RECORD_META.pack_into(plain, 0, message_number, tag, message_bytes, offset)
        plain[RECORD_META_BYTES:] = chunk
        if fragments == 1:
            view[:HEADER_BYTES] = header
            key.seal_into(number, plain, header, view[HEADER_BYTES:])
        else:
            key.seal_into(number, plain, header, self._sealed_view[:sealed_bytes])
            self._frame(wire, header, field, fragments, sealed_bytes)
        return Record(number, view, fragments, size + HEADER_BYTES, message)

    def _frame(
        self,
        wire: NDArray[np.uint8],
        header: bytes,
        field: int,
        fragments: int,
        sealed_bytes: int,
    ) -> None:
        """Spread the sealed bytes over datagrams with headers, in two strided copies instead of 90 slices."""
        size = self.fragment_bytes
        whole = sealed_bytes // size
        headers = self._headers[:fragments]
        if self._headers_are_for != header[:8]:
            self._headers_are_for = header[:8]
            headers[:] = np.frombuffer(header, dtype=np.uint8)
            headers[:, 2] = FRAGMENT_INDICES[:fragments]
        self._numbers[:fragments] = field
        grid = wire[: whole * (size + HEADER_BYTES)].reshape(whole, -1)
        grid[:, :HEADER_BYTES] = headers[:whole]
        grid[:, HEADER_BYTES:] = self._sealed[:whole]
        if whole < fragments:
            tail = wire[whole * (size + HEADER_BYTES) :]
            tail[:HEADER_BYTES] = headers[whole]
            tail[HEADER_BYTES:] = self._sealed[whole, : len(tail) - HEADER_BYTES]


def open_record(record: Record, key: SenderKey) -> memoryview:
    """Return the plaintext of a record of this node's own, meta data first."""
    wire, segment = record.wire, record.segment_bytes
    pieces = [wire[at + HEADER_BYTES : at + segment] for at in range(0, len(wire), segment)]
    sealed = memoryview(b"".join(pieces))
    plain = memoryview(bytearray(len(sealed) - TAG_BYTES))
    key.open_into(record.number, sealed, bytes(wire[:HEADER_BYTES]), plain)
    return plain


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

    def get(self, number: int) -> Record | None:
        """Return a record, or None if nobody needs it any more."""
        return self._records.get(number)

    def __getitem__(self, number: int) -> Record:
        return self._records[number]

    def __iter__(self) -> Iterator[Record]:
        """Return an iterator over the records, in order of their numbers."""
        return iter([self._records[number] for number in sorted(self._records)])

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Record) -> None:
        """Keep a record; its number must be ``head``."""
        self._records[record.number] = record
        self.used_bytes += record.nbytes
        self.head = record.number + record.span

    def set_aside(self, count: int) -> int:
        """Keep the next ``count`` numbers for records that `put` brings later, and return the first."""
        self.head += count
        return self.head - count

    def put(self, record: Record) -> None:
        """Keep a record whose number was set aside."""
        self._records[record.number] = record
        self.used_bytes += record.nbytes

    def drop(self, number: int) -> None:
        """Forget one record: whoever has not got it skips it."""
        record = self._records.pop(number, None)
        if record is not None:
            self.used_bytes -= record.nbytes

    def release_below(self, number: int) -> None:
        """Forget the records below ``number``: everybody has them or will never get them."""
        released = self.base
        while released < number:
            record = self._records.pop(released, None)
            if record is None:
                released += 1
            else:
                self.used_bytes -= record.nbytes
                released += record.span
        self.base = max(self.base, number)
