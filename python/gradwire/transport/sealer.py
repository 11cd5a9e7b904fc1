"""Sealing: a message is cut into records, and each is encrypted once and framed once, whatever the number of peers."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from sys import getrefcount
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .buffers import BufferPool
from .crypto import SenderKey
from .records import Outgoing, Record
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
    record_span,
)

WIRES_KEPT_BYTES: Final = 8 << 20
HEADERS_KEPT: Final = 16  # of records of so many shapes
FRAGMENT_INDICES: Final = np.arange(FRAGMENTS_MAX, dtype=np.uint8)


@functools.cache
def chunk_bytes_max(fragment_bytes: int, fragments_max: int = FRAGMENTS_MAX) -> int:
    """Return how many bytes of a message one record carries at most."""
    sealed_bytes = fragments_per_record(fragment_bytes, fragments_max) * fragment_bytes
    return sealed_bytes - TAG_BYTES - RECORD_META_BYTES


class _Frame:
    """The memory of a full record, and the views through which it is filled.

    They are made once: to make them anew costs more than what is written through some of them. What others have of
    `array`, views and their slices, keeps it from being used again, as in a `BufferPool`: more than
    ``own_references`` are then counted.
    """

    __slots__ = ("array", "chunk", "headers", "own_references", "payloads", "plain")

    def __init__(self, fragments: int, fragment_bytes: int) -> None:
        self.array = np.empty(fragments * (fragment_bytes + HEADER_BYTES), dtype=np.uint8)
        grid = self.array.reshape(fragments, -1)
        self.headers = grid[:, :HEADER_BYTES]
        self.payloads = grid[:, HEADER_BYTES:]
        view = memoryview(self.array)  # type: ignore[arg-type]
        # The plaintext stands where its datagrams will: a buffer less for the processor's cache to hold.
        self.plain = view[: fragments * fragment_bytes - TAG_BYTES]
        self.chunk = self.plain[RECORD_META_BYTES:]
        del grid, view
        self.own_references = getrefcount(self.array)


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
        self._frames: deque[_Frame] = deque()
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
        self._headers: dict[bytes, tuple[NDArray[np.uint8], NDArray[np.uint64]]] = {}
        self._fragments = fragments
        self._frames.clear()
        wire_bytes = fragments * (fragment_bytes + HEADER_BYTES)
        self._frames_max = WIRES_KEPT_BYTES // wire_bytes if fragments > 1 else 0

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
        field = size << RECORD_NUMBER_BITS | number
        stream = self.stream if message.is_shared else self.stream | 1
        header = HEADER.pack(DATA, key.epoch & 0xFF, 0, fragments, stream, field)
        frame = self._free_frame() if len(chunk) == self.chunk_bytes else None
        if frame is not None:
            RECORD_META.pack_into(frame.plain, 0, message_number, tag, message_bytes, offset)
            frame.chunk[:] = chunk
            key.seal_into(number, frame.plain, header, self._sealed_view)
            frame.headers[...] = self._headers_of(header, fragments, field)
            frame.payloads[...] = self._sealed
            view = memoryview(frame.array)  # type: ignore[arg-type]
            return Record(number, view, fragments, size + HEADER_BYTES, message)
        wire_bytes = sealed_bytes + fragments * HEADER_BYTES
        wire = self._wires.take(wire_bytes)[:wire_bytes]
        view = memoryview(wire)  # type: ignore[arg-type]
        plain = (self._plain if fragments == 1 else view)[:plain_bytes]
        RECORD_META.pack_into(plain, 0, message_number, tag, message_bytes, offset)
        plain[RECORD_META_BYTES:] = chunk
        if fragments == 1:
            view[:HEADER_BYTES] = header
            key.seal_into(number, plain, header, view[HEADER_BYTES:])
        else:
            key.seal_into(number, plain, header, self._sealed_view[:sealed_bytes])
            self._spread(wire, self._headers_of(header, fragments, field), sealed_bytes)
        return Record(number, view, fragments, size + HEADER_BYTES, message)

    def _free_frame(self) -> _Frame | None:
        """Return memory for a full record; None if all that is kept is in use."""
        frames = self._frames
        if frames:
            frame = frames[0]  # the longest lent
            frames.rotate(-1)
            if getrefcount(frame.array) <= frame.own_references:
                return frame
        if len(frames) >= self._frames_max:
            return None
        frame = _Frame(self._fragments, self.fragment_bytes)
        frames.append(frame)
        return frame

    def _headers_of(self, header: bytes, fragments: int, field: int) -> NDArray[np.uint8]:
        """Return the headers of all datagrams of a record, of which the first is given; only valid until the next."""
        kept = self._headers.get(header[:8])
        if kept is None:
            headers = np.empty((fragments, HEADER_BYTES), dtype=np.uint8)
            headers[:] = np.frombuffer(header, dtype=np.uint8)
            headers[:, 2] = FRAGMENT_INDICES[:fragments]
            if len(self._headers) >= HEADERS_KEPT:
                self._headers.clear()
            kept = self._headers[header[:8]] = headers, headers.view("<u8")[:, 1]
        headers, numbers = kept
        numbers[...] = field
        return headers

    def _spread(
        self, wire: NDArray[np.uint8], headers: NDArray[np.uint8], sealed_bytes: int
    ) -> None:
        """Spread the sealed bytes over datagrams with headers, in two strided copies instead of 90 slices."""
        size, fragments = self.fragment_bytes, len(headers)
        whole = sealed_bytes // size
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
