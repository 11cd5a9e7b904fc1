"""One peer's incoming records: fragments to records, records in order to messages, acknowledgements and credit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from . import wire
from .congestion import NEVER_S
from .crypto import AuthenticationError, KeyChain
from .types import Stats
from .wire import ACK_WINDOW_RECORDS, FRAGMENTS_MAX, HEADER_BYTES, TAG_BYTES, Ack, DataHeader, Key

SMALL_BYTES: Final = 1_000  # what a smaller message counts for: its Python objects take 650 bytes
ACK_DELAY_S: Final = 0.0005
ACK_EVERY_BYTES: Final = 300_000  # one ACK per record would cost more than the data
# Bytes of fragments that draw an ACK before any record of theirs is authenticated: at least as many as the ACK has.
UNPROVED_BYTES: Final = 250
UNPROVED_PARTIAL_BYTES: Final = 10  # as many more for each incomplete record
TAGGED_S: Final = 10.0  # for so long after a forgery only TAGGED fragments count

Deliver = Callable[[int, memoryview], None]


@dataclass(slots=True)
class ReceiveBudget:
    """Bytes of messages that are in assembly or wait for the caller, over all peers."""

    limit_bytes: int
    message_bytes_max: int  # a peer that sends a larger message breaks the protocol
    used_bytes: int = 0
    has_waiting: bool = False  # some message waits for memory

    def take(self, message_bytes: int, *, may_wait: bool = True) -> bool:
        """Reserve memory for a message; return False when the message has to wait."""
        used_bytes = self.used_bytes + max(message_bytes, SMALL_BYTES)
        if may_wait and self.used_bytes and used_bytes > self.limit_bytes:
            self.has_waiting = True
            return False
        self.used_bytes = used_bytes
        return True

    def forget_waiting(self) -> bool:
        """Return whether a message waits for memory, and count it as not waiting: it is going to ask again."""
        has_waiting, self.has_waiting = self.has_waiting, False
        return has_waiting

    def give_back(self, *message_bytes: int) -> None:
        """Release the memory of messages that were handed over or given up."""
        self.used_bytes -= sum([max(nbytes, SMALL_BYTES) for nbytes in message_bytes])


@dataclass(slots=True)
class Partial:
    """The fragments of one incomplete record."""

    buffer: NDArray[np.uint8]  # a row for each fragment
    got: int = 0  # a bit for each fragment that has arrived
    sealed_bytes: int = 0  # of the record, once its last fragment has arrived

    def add_fragments(self, first: int, count: int, batch: memoryview) -> memoryview | None:
        """Store neighbouring fragments, headers included; return the record's sealed bytes if all have arrived."""
        fragments, size = self.buffer.shape
        segment = size + HEADER_BYTES
        full = len(batch) // segment
        if full:
            rows = np.ndarray((full, segment), np.uint8, batch)
            self.buffer[first : first + full] = rows[:, HEADER_BYTES:]
        if full < count:
            tail = np.frombuffer(batch, np.uint8, offset=full * segment + HEADER_BYTES)
            self.buffer[first + full, : len(tail)] = tail
        if first + count == fragments:
            self.sealed_bytes = first * size + len(batch) - count * HEADER_BYTES
        self.got |= ((1 << count) - 1) << first
        if self.got + 1 < 1 << fragments:
            return None
        return memoryview(self.buffer.reshape(-1))[: self.sealed_bytes]  # type: ignore[arg-type]


@dataclass(slots=True)
class _Assembly:
    """A message of several records, filled in order."""

    number: int
    tag: int
    payload: memoryview
    filled: int = 0


class Receiver:
    """Reassembles one peer's messages and delivers them complete, once and in order."""

    def __init__(self, key: Key, budget: ReceiveBudget, deliver: Deliver, counters: Stats) -> None:
        start = key.first_record
        self._keys = KeyChain(key.key, key.iv, start)
        self._budget = budget
        self._deliver = deliver
        self._counters = counters
        self.cumulative = start  # every record below this number is complete
        self.limit = start  # the first record number for which no credit has been granted
        self.ack_at_s = NEVER_S  # when an acknowledgement is due
        self.error = ""  # how the authenticated peer broke the protocol: the session has to end
        self._consumed = start
        self._is_ended = False
        self._window = 0
        self._partials: dict[int, Partial] = {}  # by record
        self._tagged_until_s = -NEVER_S  # until then fragments without a tag do not count
        # By record number: the plaintext of a complete record, or the end of a skip that begins there.
        self._complete: dict[int, memoryview | int] = {}
        self._assembly: _Assembly | None = None
        self._unacknowledged_bytes = 0
        self.last_arrival_s = 0.0  # when the latest data datagram, or skip, came
        self._frontier = start * FRAGMENTS_MAX  # position of the fragment after the newest one

    def grant_credit(self, window_records: int, now_s: float) -> None:
        """Let the peer send ``window_records`` beyond the consumed records; credit is never withdrawn."""
        self._window = min(window_records, ACK_WINDOW_RECORDS)
        limit = min(self._consumed + self._window, wire.RECORD_NUMBER_MAX)
        # Every grant costs a datagram, so small grants wait for an acknowledgement that is sent anyway.
        if limit - self.limit > self._window // 4:
            self.acknowledge_by(now_s)
        self.limit = max(self.limit, limit)

    def acknowledge_by(self, at_s: float) -> None:
        """Have an acknowledgement sent at this time or earlier."""
        self.ack_at_s = min(self.ack_at_s, at_s)

    def authentic(self, header: DataHeader, batch: memoryview, step: int) -> list[memoryview]:
        """Return neighbouring TAGGED datagrams without their tags, up to the first that is forged."""
        run = [batch[start : start + step] for start in range(0, len(batch), step)]
        datagrams = [each[:-TAG_BYTES] for each in run]
        # Records without credit may be of an epoch to come, whose key would replace the present ones.
        if header.record >= self.limit:
            return []
        try:
            tags = self._keys.tags(header.record, header.first, datagrams)
        except AuthenticationError:  # a hostile member has skipped to an epoch without a key
            return []
        are_true = map(compare_digest, tags, [each[-TAG_BYTES:] for each in run])
        return datagrams[: [*are_true, False].index(False)]

    def on_fragments(self, header: DataHeader, batch: memoryview, now_s: float) -> bool:
        """Take neighbouring fragments of one record, headers included; return False if no valid record has them."""
        _, record, fragments, fragment_bytes, first, is_tagged = header
        nbytes = len(batch)
        segment_bytes = fragment_bytes + HEADER_BYTES
        count = -(-nbytes // segment_bytes)
        end = first + count
        is_valid = (
            wire.DATAGRAM_BYTES_MIN <= segment_bytes <= wire.DATAGRAM_BYTES_MAX
            and end <= fragments <= FRAGMENTS_MAX
            and fragments * segment_bytes <= wire.RECORD_BYTES_MAX
            and nbytes > (count - 1) * segment_bytes + HEADER_BYTES
            and (nbytes == count * segment_bytes or end == fragments)
        )
        if not is_valid:
            return False
        self.last_arrival_s = now_s
        self._unacknowledged_bytes += nbytes
        unproved_bytes = UNPROVED_BYTES + UNPROVED_PARTIAL_BYTES * len(self._partials)
        is_enough = self._unacknowledged_bytes >= unproved_bytes
        if not is_tagged and count < fragments and now_s < self._tagged_until_s:
            self._counters.unauthenticated_datagrams += count
        elif not self.cumulative <= record < self.limit or record in self._complete:
            self._counters.duplicate_fragments += count
        elif self._add_fragments(header, count, batch) or is_enough:
            position = record * FRAGMENTS_MAX + first
            opens_gap = position > self._frontier and self._has_gap(record)
            after = position + count if end < fragments else (record + 1) * FRAGMENTS_MAX
            self._frontier = max(self._frontier, after)
            # A gap is reported once, when it opens: the sender finds losses by time. `_take_record` reports ends.
            is_urgent = opens_gap or self._unacknowledged_bytes >= ACK_EVERY_BYTES
            self.acknowledge_by(now_s if is_urgent else now_s + ACK_DELAY_S)
            return True
        if is_enough:  # the sender has missed an ACK, or has no credit, or does not know yet that tags are needed
            self.acknowledge_by(now_s + ACK_DELAY_S)
        return True

    def _add_fragments(self, header: DataHeader, count: int, batch: memoryview) -> bool:
        """Store the fragments; return whether they complete their record."""
        _, record, fragments, fragment_bytes, first, _ = header
        shape = (fragments, fragment_bytes)
        partial = self._partials.get(record)
        if partial is None or count == fragments:  # a complete record stands for itself
            partial = Partial(np.empty(shape, np.uint8))
        self._counters.duplicate_fragments += (partial.got >> first & (1 << count) - 1).bit_count()
        if partial.buffer.shape == shape:
            sealed = partial.add_fragments(first, count, batch)
            if sealed is None:
                self._partials[record] = partial
                return False
            is_authentic = self._open(record, sealed, header.associated)
            if is_authentic or count == fragments:
                return is_authentic
        # A fragment is forged, or one of two headers that differ: everything incomplete comes again, with tags.
        self._partials.clear()
        self._tagged_until_s = self.last_arrival_s + TAGGED_S
        return False

    def _open(self, record: int, sealed: memoryview, associated: bytes) -> bool:
        """Decrypt a complete record, and consume every record that is next in order; return False if it is forged."""
        plain = _empty(max(0, len(sealed) - TAG_BYTES))
        try:
            if len(plain) < wire.RECORD_META_BYTES:
                raise AuthenticationError("too short for a record")
            self._keys.open_into(record, sealed, associated, plain)
        except AuthenticationError:
            self._counters.rejected_records += 1
            return False
        self._partials.pop(record, None)
        self._complete[record] = plain.toreadonly()
        self._advance()
        return True

    def skip(self, first: int, count: int, now_s: float) -> None:
        """Count records as complete that are meant for other nodes."""
        self.last_arrival_s = now_s  # from then on the acknowledgement is held back
        # The first ones may have come in a session before. A skip beyond the window of an acknowledgement comes again.
        start = max(first, self.cumulative)
        if start < min(first + count, self.cumulative + ACK_WINDOW_RECORDS):
            self._complete[start] = first + count
            self._advance()
            self._keys.key_of(self.cumulative)  # forgets the keys of earlier epochs
        self.acknowledge_by(now_s + ACK_DELAY_S)

    def _advance(self) -> None:
        """Move `cumulative` over complete and skipped records, and consume them."""
        while (entry := self._complete.get(self.cumulative)) is not None:
            if isinstance(entry, int):
                self.cumulative = entry
                for record in [each for each in self._partials if each < entry]:
                    del self._partials[record]
            else:
                self.cumulative += 1
        self.consume()

    def consume(self) -> None:
        """Turn complete records into messages, in order, as far as the budget allows."""
        while self._consumed < self.cumulative and not self.error:
            entry = self._complete[self._consumed]
            if isinstance(entry, int):
                self._consumed = entry
                for record in [each for each in self._complete if each < entry]:
                    del self._complete[record]
            elif self._take_record(entry):
                del self._complete[self._consumed]
                self._consumed += 1
            else:
                return

    def _take_record(self, plain: memoryview) -> bool:
        """Add a record to its message; return False if the message has to wait, or the record belongs to none."""
        number, tag, message_bytes, offset = wire.RECORD_META.unpack_from(plain)
        chunk = plain[wire.RECORD_META_BYTES :]
        assembly = self._assembly
        end = offset + len(chunk)
        if offset == 0 and (assembly is None or assembly.number != number):
            most_bytes = self._budget.message_bytes_max
            if message_bytes > most_bytes or end > message_bytes:
                self.error = f"message {number} has {message_bytes} bytes, more than {most_bytes}"
                return False
            self._drop_assembly()
            if not self._budget.take(message_bytes, may_wait=not self._is_ended):
                return False
            payload = chunk if end == message_bytes else _empty(message_bytes)
            assembly = self._assembly = _Assembly(number, tag, payload)
        if assembly is None or assembly.number != number or offset != assembly.filled:
            self.error = f"a record of message {number} at offset {offset} continues nothing"
        elif end > len(assembly.payload) or (not chunk and message_bytes):
            self.error = f"message {number} has more bytes than it announced"
        else:
            if assembly.payload is not chunk:
                assembly.payload[offset:end] = chunk
            assembly.filled = end
            if end == len(assembly.payload):
                self._assembly = None
                self._unacknowledged_bytes = ACK_EVERY_BYTES  # the sender may wait for the ACK
                self._deliver(assembly.tag, assembly.payload.toreadonly())
        return not self.error

    def _drop_assembly(self) -> None:
        if self._assembly is not None:
            self._budget.give_back(len(self._assembly.payload))
            self._assembly = None

    def _has_gap(self, record: int) -> bool:
        """Return whether fragments are missing before this record, or inside the next one."""
        oldest = self._partials.get(self.cumulative)
        return record > self.cumulative or (oldest is not None and oldest.got & oldest.got + 1 != 0)

    def make_ack(self, now_s: float) -> Ack:
        """Return the acknowledgement to send now, with all the credit there is."""
        self.ack_at_s = NEVER_S
        self._unacknowledged_bytes = 0
        self.limit = max(self.limit, min(self._consumed + self._window, wire.RECORD_NUMBER_MAX))
        base = self.cumulative
        described = sorted(self._partials)[: wire.ACK_PARTIALS_MAX]
        return Ack(
            cumulative=base,
            limit=self.limit,
            delay_us=min(int(max(0.0, now_s - self.last_arrival_s) * 1e6), 1_000_000),
            complete=sum(1 << (record - base) for record in self._complete if record > base),
            partials=tuple((number, self._partials[number].got) for number in described),
            truncated=len(described) < len(self._partials),
            tagged=now_s < self._tagged_until_s,
        )

    def abandon(self) -> None:
        """Deliver the complete messages that wait for memory, and drop the incomplete ones."""
        # The sender's tickets already show the complete messages as delivered, so the budget must not hold them back.
        self._is_ended = True
        self.consume()
        self._drop_assembly()


def _empty(nbytes: int) -> memoryview:
    return memoryview(np.empty(nbytes, dtype=np.uint8))  # type: ignore[arg-type]
