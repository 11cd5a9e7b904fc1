"""The fragments of one record, put together again: what has arrived of it, and what comes next if nothing is lost."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .buffers import BufferPool
from .wire import (
    DATA,
    FRAGMENT_BYTES_MAX,
    FRAGMENT_BYTES_MIN,
    FRAGMENTS_MAX,
    HEADER,
    HEADER_BYTES,
    NUMBER_BYTES,
    RECORD_BURSTS_MAX,
    RECORD_NUMBER_BITS,
    record_span,
)

FRAGMENT_INDICES: Final = bytes(range(256))


class Partial:
    """The fragments of one incomplete record that have arrived.

    Attributes:
        got: a bit for each of them.
        sealed_bytes: of the whole record, known once the last fragment is there.
        span: how many record numbers it takes up.
    """

    __slots__ = (
        "_full",
        "_grid",
        "buffer",
        "fragment_bytes",
        "fragments",
        "got",
        "sealed_bytes",
        "span",
    )

    def __init__(self, fragments: int, fragment_bytes: int, buffers: BufferPool) -> None:
        self.fragments = fragments
        self.fragment_bytes = fragment_bytes
        self.span = record_span(fragments, fragment_bytes)
        self.buffer = buffers.take(fragments * fragment_bytes)
        self.got = 0
        self._full = (1 << fragments) - 1
        self._grid = self.buffer[: fragments * fragment_bytes].reshape(fragments, fragment_bytes)
        self.sealed_bytes = 0

    def add(self, first: int, count: int, batch: memoryview) -> bool:
        """Store neighbouring fragments; return whether all are there now."""
        end = first + count
        if len(batch) == count * (self.fragment_bytes + HEADER_BYTES):
            framed = np.frombuffer(batch, np.uint8).reshape(count, -1)
            self._grid[first:end] = framed[:, HEADER_BYTES:]
        else:
            unframe(self.buffer, batch, first, count, self.fragment_bytes)
        if end == self.fragments:
            self.sealed_bytes = first * self.fragment_bytes + len(batch) - count * HEADER_BYTES
        self.got |= ((1 << count) - 1) << first
        return self.got == self._full

    @property
    def sealed(self) -> memoryview:
        """The sealed bytes of the record, once all are there."""
        return memoryview(self.buffer)[: self.sealed_bytes]  # type: ignore[arg-type]


class Scratch:
    """The sealed bytes of one record that came in one piece; those of the next take their place."""

    def __init__(self) -> None:
        self._buffer = np.empty(RECORD_BURSTS_MAX * NUMBER_BYTES, dtype=np.uint8)
        self._view = memoryview(self._buffer)  # type: ignore[arg-type]
        self._shape = (0, 0)
        self._grid = self._buffer.reshape(1, -1)

    def unframe(self, batch: memoryview, fragments: int, fragment_bytes: int) -> memoryview:
        """Return the payloads of all the datagrams of a record."""
        sealed_bytes = len(batch) - fragments * HEADER_BYTES
        if sealed_bytes == fragments * fragment_bytes:
            if self._shape != (fragments, fragment_bytes):
                self._shape = (fragments, fragment_bytes)
                self._grid = self._buffer[:sealed_bytes].reshape(fragments, fragment_bytes)
            framed = np.frombuffer(batch, np.uint8).reshape(fragments, -1)
            self._grid[...] = framed[:, HEADER_BYTES:]
        else:
            unframe(self._buffer, batch, 0, fragments, fragment_bytes)
        return self._view[:sealed_bytes]


class Sequel:
    """What a peer sends next if nothing is lost or overtaken: the rest of a record, then one of the same shape.

    Nearly every burst of a stream is that, and it is recognised by comparing its first header with the one that is
    expected.

    Attributes:
        record: number of the record that is under way, or comes next.
        span: how many record numbers it takes up.
        epoch: low 8 bits of its key's epoch.
        fragments: of the record.
        fragment_bytes: sealed bytes in each but the last.
        first: the fragment that comes next.
        left_bytes: of the datagrams of the record that have not come yet, the most that they can be.
        partial: what has come of the record; None before the first fragment.
    """

    __slots__ = (
        "_field",
        "_header",
        "_segment_bytes",
        "_stream",
        "epoch",
        "first",
        "fragment_bytes",
        "fragments",
        "left_bytes",
        "partial",
        "record",
        "span",
    )

    def __init__(self) -> None:
        self._header = b""
        self._segment_bytes = self._stream = self._field = 0
        self.record = self.span = self.epoch = 0
        self.fragments = self.fragment_bytes = self.first = self.left_bytes = 0
        self.partial: Partial | None = None

    def begin(
        self, record: int, epoch: int, stream: int, fragments: int, fragment_bytes: int, first: int
    ) -> None:
        """Expect this fragment of this record next."""
        self.record, self.epoch, self._stream = record, epoch, stream
        self.fragments, self.fragment_bytes = fragments, fragment_bytes
        self.span = record_span(fragments, fragment_bytes)
        self._segment_bytes = fragment_bytes + HEADER_BYTES
        self._field = fragment_bytes << RECORD_NUMBER_BITS | record
        self.go_to(first)

    def follow(
        self, record: int, epoch: int, stream: int, fragments: int, fragment_bytes: int
    ) -> None:
        """Expect the record that follows this one: of the same shape, or of that which ended with this shorter one."""
        is_tail = (
            fragments < self.fragments
            and fragment_bytes == self.fragment_bytes
            and (epoch, stream) == (self.epoch, self._stream)
        )
        shape = self.fragments if is_tail else fragments
        next_record = record + record_span(fragments, fragment_bytes)
        self.begin(next_record, epoch, stream, shape, fragment_bytes, 0)
        self.partial = None

    def begin_next(self) -> None:
        """Expect a record of the same shape after this one."""
        self.record += self.span
        self._field += self.span
        self.partial = None
        self.go_to(0)

    def go_to(self, first: int) -> None:
        """Expect this fragment of the same record next."""
        self.first = first
        self.left_bytes = (self.fragments - first) * self._segment_bytes
        self._header = HEADER.pack(
            DATA, self.epoch, first, self.fragments, self._stream, self._field
        )

    @property
    def associated(self) -> bytes:
        """The header of the record's first fragment, which its tag covers."""
        return HEADER.pack(DATA, self.epoch, 0, self.fragments, self._stream, self._field)

    def match(self, batch: memoryview, segment_bytes: int) -> int:
        """Return how many fragments these datagrams are, all of them expected; 0 if they are anything else."""
        if batch[:HEADER_BYTES] != self._header or segment_bytes != self._segment_bytes:
            return 0
        # The same two bytes of each header as `run_length` compares; more datagrams than are left differ in the first.
        indices = batch[2::segment_bytes].tobytes()
        numbers = batch[8::segment_bytes].tobytes()
        first, count = self.first, len(indices)
        if (
            not FRAGMENT_INDICES.startswith(indices, first)
            or numbers.count(self.record & 0xFF) != count
            or first + count > self.fragments
        ):
            return 0
        rest = count * segment_bytes - len(batch)
        is_last = first + count == self.fragments
        return count if rest == 0 or (is_last and rest < segment_bytes - HEADER_BYTES) else 0


@functools.lru_cache(maxsize=256)
def is_plausible(
    fragments: int, fragment_bytes: int, first: int, count: int, batch_bytes: int
) -> bool:
    """Whether a record may have this shape and the batch fits into it; only a record's last datagram may be short."""
    if not (
        FRAGMENT_BYTES_MIN <= fragment_bytes <= FRAGMENT_BYTES_MAX
        and 1 <= fragments <= FRAGMENTS_MAX
        and record_span(fragments, fragment_bytes) <= RECORD_BURSTS_MAX
        and first + count <= fragments
        and batch_bytes > HEADER_BYTES
    ):
        return False
    is_whole = batch_bytes == count * (fragment_bytes + HEADER_BYTES)
    return is_whole or first + count == fragments


def unframe(
    buffer: NDArray[np.uint8], batch: memoryview, first: int, count: int, size: int
) -> None:
    """Copy the payloads of ``count`` datagrams next to each other."""
    source = np.frombuffer(batch, dtype=np.uint8)
    whole = len(batch) // (size + HEADER_BYTES)
    start = first * size
    end = start + whole * size
    if whole:
        framed = source if whole == count else source[: whole * (size + HEADER_BYTES)]
        buffer[start:end].reshape(whole, size)[:] = framed.reshape(whole, -1)[:, HEADER_BYTES:]
    if whole < count:
        tail = source[whole * (size + HEADER_BYTES) + HEADER_BYTES :]
        buffer[end : end + len(tail)] = tail
