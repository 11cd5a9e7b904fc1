"""Sealed records, the units of encryption and acknowledgement, and the bounded log that keeps them for all peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from . import wire
from .crypto import EPOCH_BITS, KeyChain
from .types import Transmit
from .wire import HEADER_BYTES, RECORD_META_BYTES, TAG_BYTES

KEY_LIFE_S: Final = 86_400.0  # of a sender key
OBJECT_BYTES: Final = 1_400  # memory of the Python objects of a record and its ticket


class Record(NamedTuple):
    """One sealed record, framed: ``fragments`` datagrams back to back, all but the last of ``segment_bytes``."""

    number: int
    wire: memoryview  # the datagrams
    nbytes: int  # of all datagrams
    fragments: int
    full: int  # a bit for each fragment
    segment_bytes: int
    recipients: frozenset[int]  # sessions, by local index, that get the record's message

    def bytes_of(self, mask: int) -> int:
        """Return the size on the wire of the fragments whose bits are set."""
        missing = self.fragments * self.segment_bytes - self.nbytes  # from the last fragment
        has_last = mask >> (self.fragments - 1)
        return mask.bit_count() * self.segment_bytes - has_last * missing

    def slices(self, mask: int) -> list[memoryview]:
        """Return the datagrams whose bits are set, neighbours as one slice; only the last may be short."""
        size = self.segment_bytes
        slices = []
        while mask:
            lowest = mask & -mask
            after = mask + lowest  # the carry clears the lowest run and sets the bit after it
            end = (after & -after).bit_length() - 1
            slices.append(self.wire[(lowest.bit_length() - 1) * size : end * size])
            mask &= after
        return slices


class SendLog:
    """The records that some peer has not acknowledged yet, bounded in bytes."""

    def __init__(self, limit_bytes: int, first_record: int = 0, now_s: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self._renewed_at_s = now_s  # the sender key
        self.head = first_record  # number of the next record
        self.base = first_record  # every record below this number has been released
        self.used_bytes = 0
        self._records: dict[int, Record] = {}
        self.get = self._records.get  # not a method of its own: called once per record and peer

    def has_room(self, sealer: Sealer, nbytes: int) -> bool:
        """Return whether the records of a message of this size fit beside those that are kept."""
        kept_bytes = sealer.wire_bytes(nbytes) + sealer.records_of(nbytes) * OBJECT_BYTES
        return self.used_bytes + kept_bytes <= self.limit_bytes

    def append(self, record: Record) -> None:
        """Keep a record; its number must be ``head``."""
        self._records[record.number] = record
        self.used_bytes += record.nbytes + OBJECT_BYTES
        self.head += 1

    def renew_key(self, now_s: float) -> None:
        """Once a day, if the log is empty, go on in the next epoch; peers get a SKIP for the numbers before."""
        if now_s - self._renewed_at_s >= KEY_LIFE_S and not self._records:
            self._renewed_at_s = now_s
            self.head = self.base = (self.head >> EPOCH_BITS) + 1 << EPOCH_BITS

    def release_below(self, number: int) -> None:
        """Drop the records below ``number``: every peer has them or will never get them."""
        for released in range(self.base, number):
            self.used_bytes -= self._records.pop(released).nbytes + OBJECT_BYTES
        self.base = max(self.base, number)


class Sealer:
    """Turns messages into framed records under the node's keys; ``datagram_bytes`` includes the header."""

    def __init__(self, keys: KeyChain, stream: int, datagram_bytes: int) -> None:
        self.keys = keys
        self.stream = stream
        self._segment_bytes = datagram_bytes
        self._fragment_bytes = datagram_bytes - HEADER_BYTES
        fragments = wire.fragments_per_record(datagram_bytes)
        self._overhead_bytes = RECORD_META_BYTES + TAG_BYTES
        self._chunk_bytes = fragments * self._fragment_bytes - self._overhead_bytes
        self._plain = memoryview(bytearray(fragments * self._fragment_bytes))
        self._sealed = np.empty((fragments, self._fragment_bytes), dtype=np.uint8)
        self._sealed_view = memoryview(self._sealed.reshape(-1))  # type: ignore[arg-type]

    def records_of(self, message_bytes: int) -> int:
        """Return the number of records of a message."""
        return max(1, -(-message_bytes // self._chunk_bytes))

    def wire_bytes(self, message_bytes: int) -> int:
        """Return the bytes of a message's datagrams."""
        sealed_bytes = message_bytes + self.records_of(message_bytes) * self._overhead_bytes
        return sealed_bytes + -(-sealed_bytes // self._fragment_bytes) * HEADER_BYTES

    def seal_message(
        self, number: int, recipients: frozenset[int], message: int, tag: int, payload: memoryview
    ) -> Iterator[Record]:
        """Yield the records of a message, in order; the first has the record number ``number``."""
        for offset in range(0, max(1, len(payload)), self._chunk_bytes):
            chunk = payload[offset : offset + self._chunk_bytes]
            plain = self._plain[: RECORD_META_BYTES + len(chunk)]
            wire.RECORD_META.pack_into(plain, 0, message, tag, len(payload), offset)
            plain[RECORD_META_BYTES:] = chunk
            yield self._seal(number, recipients, plain)
            number += 1

    def _seal(self, number: int, recipients: frozenset[int], plain: memoryview) -> Record:
        sealed_bytes = len(plain) + TAG_BYTES
        fragments = -(-sealed_bytes // self._fragment_bytes)
        nbytes = sealed_bytes + fragments * HEADER_BYTES
        field = self._fragment_bytes << wire.RECORD_NUMBER_BITS | number
        header = wire.HEADER.pack(wire.DATA, 0, 0, fragments, self.stream, field)
        self.keys.seal_into(number, plain, header, self._sealed_view[:sealed_bytes])
        # Strided copies put a header before each fragment. Some bytes after a short last one are allocated and unused.
        width = min(sealed_bytes, self._fragment_bytes)
        grid = np.empty((fragments, HEADER_BYTES + width), dtype=np.uint8)
        grid[:, :HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
        grid[:, 2] = np.arange(fragments, dtype=np.uint8)
        grid[:, HEADER_BYTES:] = self._sealed[:fragments, :width]
        datagrams = memoryview(grid.reshape(-1))[:nbytes]  # type: ignore[arg-type]
        full = (1 << fragments) - 1
        return Record(number, datagrams, nbytes, fragments, full, self._segment_bytes, recipients)

    def tagged(self, transmit: Transmit) -> Transmit:
        """Return DATA datagrams of one record as TAGGED ones."""
        address, slices, step = transmit
        parts: list[bytes | memoryview] = []
        for run in [memoryview(each) for each in slices]:
            header = wire.DataHeader.decode(run, 0)
            datagrams = [run[start : start + step] for start in range(0, len(run), step)]
            tags = self.keys.tags(header.record, header.first, datagrams)
            for datagram, tag in zip(datagrams, tags, strict=True):
                parts += (bytes([wire.TAGGED]), datagram[1:], tag)
        return Transmit(address, [b"".join(parts)], step + TAG_BYTES)
