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

    __slots__ = ("_full", "buffer", "fragment_bytes", "fragments", "got", "sealed_bytes", "span")

    def __init__(self, fragments: int, fragment_bytes: int, buffers: BufferPool) -> None:
        self.fragments = fragments
        self.fragment_bytes = fragment_bytes
        self.span = record_span(fragments, fragment_bytes)
        self.buffer = buffers.take(fragments * fragment_bytes)
        self.got = 0
        self._full = (1 << fragments) - 1
        self.sealed_bytes = 0

    def add(self, first: int, count: int, batch: memoryview) -> bool:
        """Store neighbouring fragments; return whether all are there now."""
        self.got |= ((1 << count) - 1) << first
        unframe(self.buffer, batch, first, count, self.fragment_bytes)
        if first + count == self.fragments:
            self.sealed_bytes = first * self.fragment_bytes + len(batch) - count * HEADER_BYTES
        return self.got == self._full

    @property
    def sealed(self) -> memoryview:
        """The sealed bytes of the record, once all are there."""
        return memoryview(self.buffer)[: self.sealed_bytes]  # type: ignore[arg-type]


class Sequel:
    """What a peer sends next if nothing is lost or overtaken: the rest of a record, then one of the same shape.

    Nearly every burst of a stream is that, and it is recognised by comparing 16 bytes.

    Attributes:
        record: number of the record that is under way, or comes next.
        span: how many record numbers it takes up.
        epoch: low 8 bits of its key's epoch.
        fragments: of the record.
        fragment_bytes: sealed bytes in each but the last.
        first: the fragment that comes next.
    """

    __slots__ = (
        "_kind",
        "_segment_bytes",
        "_shape",
        "_stream",
        "epoch",
        "first",
        "fragment_bytes",
        "fragments",
        "record",
        "span",
    )

    def __init__(self) -> None:
        self._kind = self._shape = b""
        self._segment_bytes = self._stream = 0
        self.record = self.span = self.epoch = 0
        self.fragments = self.fragment_bytes = self.first = 0

    def begin(
        self, record: int, epoch: int, stream: int, fragments: int, fragment_bytes: int, first: int
    ) -> None:
        """Expect this fragment of this record next."""
        self.record, self.epoch, self._stream = record, epoch, stream
        self.fragments, self.fragment_bytes, self.first = fragments, fragment_bytes, first
        self.span = record_span(fragments, fragment_bytes)
        self._segment_bytes = fragment_bytes + HEADER_BYTES
        header = self.associated
        self._kind, self._shape = header[:2], header[3:]

    def begin_next(self) -> None:
        """Expect a record of the same shape after this one."""
        fields = self.epoch, self._stream, self.fragments, self.fragment_bytes
        self.begin(self.record + self.span, *fields, 0)

    @property
    def associated(self) -> bytes:
        """The header of the record's first fragment, which its tag covers."""
        number = self.fragment_bytes << RECORD_NUMBER_BITS | self.record
        return HEADER.pack(DATA, self.epoch, 0, self.fragments, self._stream, number)

    def match(self, batch: memoryview, segment_bytes: int) -> int:
        """Return how many fragments these datagrams are, all of them expected; 0 if they are anything else."""
        if (
            batch[3:HEADER_BYTES] != self._shape
            or batch[:2] != self._kind
            or segment_bytes != self._segment_bytes
        ):
            return 0
        first = self.first
        count, rest = divmod(len(batch), segment_bytes)
        if rest:
            count += 1
            if first + count != self.fragments or rest <= HEADER_BYTES:
                return 0
        # The same two bytes of each header as `run_length` compares; more datagrams than are left differ in the first.
        if batch[2::segment_bytes].tobytes() != FRAGMENT_INDICES[first : first + count]:
            return 0
        numbers = batch[8::segment_bytes].tobytes()
        return count if first + count <= self.fragments and numbers == numbers[:1] * count else 0

    def is_like(self, partial: Partial) -> bool:
        """Whether a record has this shape."""
        return partial.fragments == self.fragments and partial.fragment_bytes == self.fragment_bytes


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
