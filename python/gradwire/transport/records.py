"""Sealed records, and the bounded log that keeps them.

A record is the unit of encryption and of acknowledgement; it leaves in up to four bursts, one system call each, and
takes up a record number for each of them. It is sealed and framed once, whatever the number of peers; retransmissions
send slices of the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeVar

from .model import Calls
from .wire import HEADER_BYTES, fragments_per_burst, record_span

_Other = TypeVar("_Other")


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


def joined(items: list[Burst | _Other]) -> list[Burst | _Other]:
    """Return the same in as few bursts as possible; only the last datagram of each may be short."""
    result: list[Burst | _Other] = []
    last: Burst | None = None
    for item in items:
        if not isinstance(item, Burst):
            last = None
            result.append(item)
        elif (
            last is not None
            and item.segment_bytes == last.segment_bytes
            and last.nbytes % last.segment_bytes == 0
        ):
            last.calls = [*last.calls, *item.calls]
            last.nbytes += item.nbytes
        else:
            last = Burst(item.calls, item.segment_bytes, item.nbytes)
            result.append(last)
    return result


class Record(Burst):
    """One sealed record, framed: ``fragments`` datagrams back to back, all but the last of ``segment_bytes``.

    As a burst it is all of them, the same object for every peer.

    Attributes:
        number: the first of its record numbers.
        span: how many it takes up, one per burst.
        burst_fragments: datagrams in each burst but the last.
        full: a bit for each fragment.
        message: that it belongs to.
    """

    __slots__ = ("burst_fragments", "fragments", "full", "message", "number", "span", "wire")

    def __init__(
        self, number: int, wire: memoryview, fragments: int, segment_bytes: int, message: Outgoing
    ) -> None:
        self.number = number
        self.wire = wire
        self.nbytes = len(wire)
        self.fragments = fragments
        self.segment_bytes = segment_bytes
        self.message = message
        self.full, self.burst_fragments, self.span, cuts = _shape(fragments, segment_bytes)
        self.calls = tuple(zip(map(wire.__getitem__, cuts)))

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

    def burst(self, mask: int) -> Burst:
        """Return the datagrams whose bits are set."""
        if mask == self.full:
            return self
        calls = calls_of(self.slices(mask), self.segment_bytes)
        return Burst(calls, self.segment_bytes, self.bytes_of(mask))

    def part_of(self, mask: int, room_bytes: int) -> int:
        """Return the bits of ``mask`` to send next, at least one, as far as they fit: whole bursts, where one does."""
        count = max(1, room_bytes // self.segment_bytes)
        if count > self.burst_fragments:
            count -= count % self.burst_fragments
        return lowest_bits(mask, count)


@functools.lru_cache(maxsize=256)
def _shape(fragments: int, segment_bytes: int) -> tuple[int, int, int, list[slice]]:
    """Return a bit for each fragment, the datagrams of a burst, how many bursts, and where each is."""
    fragment_bytes = segment_bytes - HEADER_BYTES
    burst_fragments = fragments_per_burst(fragment_bytes)
    span = record_span(fragments, fragment_bytes)
    step = burst_fragments * segment_bytes
    cuts = [slice(at, at + step) for at in range(0, span * step, step)]
    return (1 << fragments) - 1, burst_fragments, span, cuts


def calls_of(slices: list[memoryview], segment_bytes: int) -> Calls:
    """Return which of these whole datagrams each system call sends: as many as one may, in order."""
    most_bytes = segment_bytes * fragments_per_burst(segment_bytes - HEADER_BYTES)
    calls: list[list[memoryview]] = [[]]
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


class SendLog:
    """The records that some peer has not acknowledged yet, bounded in bytes.

    Attributes:
        head: number that the next record will get.
        base: every record below this number has been released.
        used_bytes: bytes held.
        get: returns the record of a number, None if nobody needs it any more.
    """

    def __init__(self, limit_bytes: int, first_record: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.head = first_record
        self.used_bytes = 0
        self.base = first_record
        self._records: dict[int, Record] = {}
        self.get = self._records.get  # asked once per record and peer

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
        released, take = self.base, self._records.pop
        nbytes = 0
        while released < number:
            record = take(released, None)
            if record is None:
                released += 1
            else:
                nbytes += record.nbytes
                released += record.span
        self.used_bytes -= nbytes
        self.base = max(self.base, number)
