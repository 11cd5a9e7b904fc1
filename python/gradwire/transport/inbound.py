"""One peer's records on their way in: fragments to records, records in order to messages, and what to acknowledge.

Bounded on both sides: the peer may send only as far as it was granted, and a message takes its whole size out of the
node's receive budget before its first byte is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .buffers import BufferPool
from .crypto import AuthenticationError, SenderKey
from .poison import PoisonWatch
from .reassembly import Partial, Scratch, Sequel, is_plausible
from .round_trips import ACK_DELAY_MAX_S, RttEstimator, ack_delay_s
from .wire import (
    ACK_PARTIAL_BYTES_MAX,
    ACK_PARTIALS_MAX,
    ACK_WINDOW_RECORDS,
    DATA,
    HEADER,
    HEADER_BYTES,
    RECORD_BURSTS_MAX,
    RECORD_META,
    RECORD_META_BYTES,
    RECORD_NUMBER_MAX,
    TAG_BYTES,
    Ack,
    partial_bytes,
    record_span,
)

ACK_DELAY_S: Final = 0.0005
BULK_BYTES: Final = 100_000  # more than a first flight; nobody waits for an acknowledgement then
ACK_EVERY_BYTES: Final = 300_000  # two full records; one a burst would cost more than the data
ACK_MIDWAY_BYTES: Final = (
    2 * ACK_EVERY_BYTES
)  # in the middle of a record it costs the sender more to take in
SELDOM_S: Final = 0.002  # to wait for more to acknowledge would cost a wake-up, and none comes
SKIPS_MAX: Final = 64
PAYLOADS_KEPT_BYTES: Final = 32 << 20

Deliver = Callable[[int, memoryview], None]


class ProtocolError(Exception):
    """An authenticated peer broke the protocol; the session ends."""


class ReceiveBudget:
    """Bytes of messages that are being assembled or wait for the caller, over all peers.

    Attributes:
        used_bytes: taken and not given back.
        has_waiting: some message has not got its room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.has_waiting = False
        self.buffers = BufferPool(min(PAYLOADS_KEPT_BYTES, limit_bytes // 4))
        self.scratch = Scratch()

    def take(self, nbytes: int) -> bool:
        """Reserve room for a message; False when it has to wait."""
        if self.used_bytes and self.used_bytes + nbytes > self.limit_bytes:
            self.has_waiting = True
            return False
        self.used_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Return room: the message was handed over or given up."""
        self.used_bytes -= nbytes


class _Assembly:
    """A message of several records, filled in order."""

    __slots__ = ("buffer", "filled", "number", "payload", "tag")

    def __init__(self, number: int, tag: int, message_bytes: int, buffers: BufferPool) -> None:
        self.number = number
        self.tag = tag
        # In front there is room for one record's meta data, so that records can be decrypted in place.
        total_bytes = RECORD_META_BYTES + message_bytes
        self.buffer = memoryview(buffers.take(total_bytes))[:total_bytes]  # type: ignore[arg-type]
        self.payload = self.buffer[RECORD_META_BYTES:]
        self.filled = 0

    @property
    def missing_bytes(self) -> int:
        """How much of the message has not come yet."""
        return len(self.payload) - self.filled


class Inbound:
    """Takes one peer's fragments and hands over its messages whole, once and in order.

    Attributes:
        cumulative: every record below this number is complete.
        ack_at_s: when an acknowledgement is due; None when nothing is to be acknowledged.
        poison: whether too many records fail their tags.
    """

    def __init__(
        self,
        start: int,
        budget: ReceiveBudget,
        deliver: Deliver,
        message_bytes_max: int,
        rtt: RttEstimator,
    ) -> None:
        self._budget = budget
        self._deliver = deliver
        self._message_bytes_max = message_bytes_max
        self._rtt = rtt
        self._keys: dict[int, SenderKey] = {}
        self._newest_epoch = 0
        self.cumulative = start
        self.limit = start
        self.ack_at_s: float | None = None
        self.duplicate_fragments = 0
        self.rejected_records = 0
        self.is_stalled = False
        self.poison = PoisonWatch()
        self._consumed = start
        self._window = 0
        self._partials: dict[int, Partial] = {}
        self._sequel = Sequel()
        self._complete: dict[int, tuple[memoryview, int]] = {}  # plaintext, record numbers
        self._skips: list[tuple[int, int]] = []
        self._assembly: _Assembly | None = None
        self._next_message = 0
        self._unacknowledged_bytes = 0
        self._ack_delay_s = self._midway_delay_s = ACK_DELAY_S
        self._last_arrival_s = 0.0
        self._frontier = (start, 0)  # what comes next if nothing is lost: record, fragment

    def add_key(self, key: SenderKey) -> None:
        """Accept records of this epoch.

        Only the newest two are kept, and a late repetition of an older one is ignored.
        """
        age = (self._newest_epoch - key.epoch) & 0xFF
        if self._keys and 1 < age < 128:
            return
        if not self._keys or age >= 128:
            self._newest_epoch = key.epoch & 0xFF
        self._keys[key.epoch & 0xFF] = key
        self._keys = {
            epoch: kept
            for epoch, kept in self._keys.items()
            if (self._newest_epoch - epoch) & 0xFF <= 1
        }

    def key_of(self, epoch: int) -> SenderKey | None:
        """Return the peer's key of this epoch, if it is one of the newest two."""
        return self._keys.get(epoch)

    def grant(self, window_records: int, now_s: float) -> None:
        """Let the peer send ``window_records`` beyond what has been consumed; a grant is never taken back."""
        self._window = min(window_records, ACK_WINDOW_RECORDS)
        limit = min(self._consumed + self._window, RECORD_NUMBER_MAX)
        # Every grant costs a datagram, so small ones wait for an acknowledgement that is sent anyway.
        if limit - self.limit > self._window // 4:
            self.acknowledge_by(now_s)
        self.limit = max(self.limit, limit)

    def acknowledge_by(self, at_s: float) -> None:
        """Have an acknowledgement sent at this time or earlier."""
        self.ack_at_s = at_s if self.ack_at_s is None else min(self.ack_at_s, at_s)

    @property
    def is_midway(self) -> bool:
        """Whether a message or a record has come in part."""
        return self._assembly is not None or bool(self._partials)

    def accepts(self, record: int) -> bool:
        """Whether fragments of this record are still of use and were granted."""
        return (
            self.cumulative <= record < self.limit
            and record not in self._complete
            and not (self._skips and self._is_skipped(record))
        )

    def on_fragments(
        self,
        epoch: int,
        stream: int,
        record: int,
        fragments: int,
        fragment_bytes: int,
        first: int,
        batch: memoryview,
        now_s: float,
    ) -> bool:
        """Take neighbouring fragments of one record.

        Args:
            epoch: low 8 bits of the key's epoch.
            stream: the sender's stream, part of the authenticated header.
            record: the record's number.
            fragments: number of fragments of the record.
            fragment_bytes: sealed bytes in each but the last.
            first: index of the first fragment in the batch.
            batch: the datagrams back to back, headers included, all but the last of the same size.
            now_s: current time.

        Returns:
            False if the fragments cannot belong to a valid record.
        """
        nbytes = len(batch)
        count = -(-nbytes // (fragment_bytes + HEADER_BYTES))
        if not is_plausible(fragments, fragment_bytes, first, count, nbytes):
            return False
        is_seldom = now_s - self._last_arrival_s > SELDOM_S
        self._last_arrival_s = now_s
        span = record_span(fragments, fragment_bytes)
        if not self.accepts(record) or record + span > self.limit:
            # The acknowledgement of an earlier copy was lost, or the sender guessed wrong: tell it at once.
            self.duplicate_fragments += count
            self.acknowledge_by(now_s)
            return True
        self._unacknowledged_bytes += nbytes
        if count < fragments or record in self._partials:
            sealed = self._add_to_partial(record, fragments, fragment_bytes, first, count, batch)
            if sealed is None and count > 1:
                self._sequel.begin(record, epoch, stream, fragments, fragment_bytes, first + count)
                self._sequel.partial = self._partials[record]
        elif fragments == 1:
            sealed = batch[HEADER_BYTES:]
        else:
            sealed = self._budget.scratch.unframe(batch, fragments, fragment_bytes)
        if sealed is not None:
            header = HEADER.pack(DATA, epoch, 0, fragments, stream, fragment_bytes << 48 | record)
            if fragments > 1:
                self._sequel.follow(record, epoch, stream, fragments, fragment_bytes)
            self._open(epoch, record, span, header, sealed, now_s)
        is_ahead = (record, first) > self._frontier
        next_one = (record, first + count) if first + count < fragments else (record + span, 0)
        self._frontier = max(self._frontier, next_one)
        self._schedule_ack(record, is_ahead, is_seldom, now_s)
        if is_seldom and sealed is not None and self._assembly is None:
            self.acknowledge_by(now_s)
        return True

    def _add_to_partial(
        self, record: int, fragments: int, size: int, first: int, count: int, batch: memoryview
    ) -> memoryview | None:
        """Store fragments; return the sealed bytes of the record once all are there."""
        partial = self._partials.get(record)
        if partial is None or partial.fragments != fragments or partial.fragment_bytes != size:
            partial = self._begin_partial(record, fragments, size)
        self.duplicate_fragments += (partial.got >> first & ((1 << count) - 1)).bit_count()
        if not partial.add(first, count, batch):
            return None
        del self._partials[record]
        return partial.sealed

    def _begin_partial(self, record: int, fragments: int, size: int) -> Partial:
        partial = Partial(fragments, size, self._budget.buffers)
        self._drop_overlapping(record, partial.span)
        self._partials[record] = partial
        return partial

    def go_on(self, batch: memoryview, segment_bytes: int, now_s: float) -> int:
        """Take these datagrams as far as they come next when nothing is lost; return their bytes, 0 if they do not."""
        sequel = self._sequel
        record = sequel.record
        if record != self.cumulative:
            return 0
        if len(batch) > sequel.left_bytes:
            batch = batch[: sequel.left_bytes]
        count = sequel.match(batch, segment_bytes)
        if not count:
            return 0
        fragments, size = sequel.fragments, sequel.fragment_bytes
        if count == fragments and not self._partials and record + sequel.span <= self.limit:
            sealed: memoryview | None = self._budget.scratch.unframe(batch, fragments, size)
        else:
            partial = self._go_on_partial(sequel, record)
            if partial is None:
                return 0
            sealed = partial.sealed if partial.add(sequel.first, count, batch) else None
        is_seldom = now_s - self._last_arrival_s > SELDOM_S
        self._last_arrival_s = now_s
        self._unacknowledged_bytes += len(batch)
        most_bytes = ACK_MIDWAY_BYTES
        if sealed is None:
            sequel.go_to(sequel.first + count)
        else:
            self._partials.pop(record, None)
            header, span = sequel.associated, sequel.span
            sequel.begin_next()
            self._open(sequel.epoch, record, span, header, sealed, now_s)
            # The end of a message is acknowledged at once, so what comes shortly before it can wait.
            assembly = self._assembly
            if assembly is None or assembly.missing_bytes >= ACK_EVERY_BYTES:
                most_bytes = ACK_EVERY_BYTES
        if self._unacknowledged_bytes >= most_bytes:
            self.ack_at_s = now_s
        elif self.ack_at_s is None or sealed is not None:
            self.acknowledge_by(now_s + self._delay_s(is_seldom))
        return len(batch)

    def _go_on_partial(self, sequel: Sequel, record: int) -> Partial | None:
        """Return where the expected fragments of the record that is under way go; None if they are others."""
        partial, first = self._partials.get(record), sequel.first
        if partial is None and first == 0 and record + sequel.span <= self.limit:
            partial = self._begin_partial(record, sequel.fragments, sequel.fragment_bytes)
            sequel.partial = partial
        elif partial is None or partial is not sequel.partial or partial.got + 1 != 1 << first:
            return None
        return partial

    def _drop_overlapping(self, record: int, span: int) -> None:
        """Forget what contradicts the shape of a new record.

        One of the two is forged. Starting again with the newer one cannot be blocked for ever by a forgery that came
        first.
        """
        if self._partials:
            for number in range(record - RECORD_BURSTS_MAX + 1, record + span):
                partial = self._partials.get(number)
                if partial is not None and number + partial.span > record:
                    del self._partials[number]

    def _open(
        self,
        epoch: int,
        record: int,
        span: int,
        header: bytes,
        sealed: memoryview,
        now_s: float,
    ) -> None:
        key = self._keys.get(epoch)
        plain_bytes = len(sealed) - TAG_BYTES
        if key is None or plain_bytes < RECORD_META_BYTES:
            self.rejected_records += 1
            return
        is_next = record == self._consumed == self.cumulative
        try:
            if is_next and self._open_in_place(key, record, header, sealed, plain_bytes):
                self._note_taken(span)
                return
            plain = memoryview(self._budget.buffers.take(plain_bytes))[:plain_bytes]  # type: ignore[arg-type]
            key.open_into(record, sealed, header, plain)
        except AuthenticationError:
            self.rejected_records += 1
            self.poison.on_failure(now_s)
            self.acknowledge_by(now_s)
            return
        if is_next and self._take_record(plain.toreadonly()):
            self._note_taken(span)
        else:
            self._complete[record] = plain.toreadonly(), span
            self._advance()
            self.consume()

    def _open_in_place(
        self, key: SenderKey, record: int, header: bytes, sealed: memoryview, plain_bytes: int
    ) -> bool:
        """Decrypt the next record of the message in assembly to where it belongs; False if it is not that."""
        assembly = self._assembly
        if assembly is None:
            return False
        start = assembly.filled
        end = start + plain_bytes
        buffer = assembly.buffer
        if end > len(buffer):
            return False
        # The record's meta data lands on the end of what is there already.
        saved = bytes(buffer[start : start + RECORD_META_BYTES])
        target = buffer[start:end]
        try:
            key.open_into(record, sealed, header, target)
            number, _, _, offset = RECORD_META.unpack_from(target)
        finally:
            target[:RECORD_META_BYTES] = saved
        if number != assembly.number or offset != start:
            # Another message begins; what was written is only room not filled yet, but it has to be read again.
            return False
        self._filled_to(assembly, end - RECORD_META_BYTES)
        return True

    def _note_taken(self, span: int) -> None:
        """The next record has been consumed as it came; later ones may have been waiting for it."""
        if self._complete:
            self._forget_within(self._consumed, span)
        self._consumed += span
        self.cumulative += span
        if self._complete or self._skips or self._partials:
            self._advance()
            self.consume()

    def _forget_within(self, record: int, span: int) -> None:
        """Forget what claims to begin in the middle of a record that has been consumed."""
        for number in range(record + 1, record + span):
            self._complete.pop(number, None)

    def skip(self, first: int, count: int, now_s: float) -> None:
        """Count records as complete that are not meant for this node."""
        end = first + count
        if end > self.cumulative and (first, end) not in self._skips:
            # Neighbours become one. What everything else waits for is taken even where there are many already.
            near = [skip for skip in self._skips if skip[0] <= end and first <= skip[1]]
            others = [skip for skip in self._skips if skip not in near]
            if len(others) >= (SKIPS_MAX if first > self.cumulative else 2 * SKIPS_MAX):
                return  # the sender will say it again
            near.append((first, end))
            whole = min(skip[0] for skip in near), max(skip[1] for skip in near)
            self._skips = [*others, whole]
            self._advance()
            self.consume()
        self.acknowledge_by(now_s + ACK_DELAY_S)

    def _is_skipped(self, record: int) -> bool:
        return any(first <= record < end for first, end in self._skips)

    def _advance(self) -> None:
        moved = True
        while moved:
            moved = False
            while (whole := self._complete.get(self.cumulative)) is not None:
                self.cumulative += whole[1]
            for first, end in self._skips:
                if first <= self.cumulative < end:
                    self.cumulative = end
                    moved = True
        for record in [record for record in self._partials if record < self.cumulative]:
            del self._partials[record]

    def consume(self) -> None:
        """Turn complete records into messages, in order, as far as the budget allows."""
        self.is_stalled = False
        while self._consumed < self.cumulative:
            whole = self._complete.get(self._consumed)
            if whole is None:
                self._consume_skip()
            elif self._take_record(whole[0]):
                del self._complete[self._consumed]
                self._forget_within(self._consumed, whole[1])
                self._consumed += whole[1]
            else:
                self.is_stalled = True
                return

    def _consume_skip(self) -> None:
        covering = [end for first, end in self._skips if first <= self._consumed < end]
        if not covering:
            raise ProtocolError(f"what is skipped and what was sent overlap at {self._consumed}")
        end = max(covering)
        for record in [record for record in self._complete if self._consumed < record < end]:
            del self._complete[record]
        self._consumed = end
        self._skips = [skip for skip in self._skips if skip[1] > end]

    def _take_record(self, plain: memoryview) -> bool:
        number, tag, message_bytes, offset = RECORD_META.unpack_from(plain)
        if self._has_consumed(number, offset):
            return True  # cut anew by a sender that did not know yet that it had arrived
        chunk = plain[RECORD_META_BYTES:]
        if offset == 0 and (self._assembly is None or self._assembly.number != number):
            return self._begin(number, tag, message_bytes, chunk)
        assembly = self._assembly
        if assembly is None or assembly.number != number or offset != assembly.filled:
            raise ProtocolError(
                f"a record of message {number} at offset {offset} does not continue anything"
            )
        self._fill(assembly, chunk)
        return True

    def _has_consumed(self, number: int, offset: int) -> bool:
        """Whether the piece of this message at this offset has been consumed; a new cut only subdivides the old one."""
        assembly = self._assembly
        if assembly is not None and number == assembly.number:
            return offset < assembly.filled
        return number < self._next_message

    def _begin(self, number: int, tag: int, message_bytes: int, chunk: memoryview) -> bool:
        if message_bytes > self._message_bytes_max or len(chunk) > message_bytes:
            raise ProtocolError(
                f"message {number} of {message_bytes} bytes is larger than {self._message_bytes_max}"
            )
        self._drop_assembly()
        if not self._budget.take(message_bytes):
            return False
        self._next_message = number + 1
        if len(chunk) == message_bytes:
            self._deliver(tag, chunk)
            return True
        self._assembly = _Assembly(number, tag, message_bytes, self._budget.buffers)
        self._fill(self._assembly, chunk)
        return True

    def _fill(self, assembly: _Assembly, chunk: memoryview) -> None:
        end = assembly.filled + len(chunk)
        if end > len(assembly.payload) or not chunk:
            raise ProtocolError(f"message {assembly.number} has more bytes than it announced")
        assembly.payload[assembly.filled : end] = chunk
        self._filled_to(assembly, end)

    def _filled_to(self, assembly: _Assembly, end: int) -> None:
        assembly.filled = end
        if end == len(assembly.payload):
            self._assembly = None
            self._unacknowledged_bytes = ACK_EVERY_BYTES  # the sender may be waiting for this
            self._deliver(assembly.tag, assembly.payload.toreadonly())

    def _drop_assembly(self) -> None:
        if self._assembly is not None:
            self._budget.give_back(len(self._assembly.payload))
            self._assembly = None

    def _schedule_ack(self, record: int, is_ahead: bool, is_seldom: bool, now_s: float) -> None:
        """Have acknowledged what has come.

        Args:
            record: to which it belongs.
            is_ahead: whether it begins after what would come next, and so leaves a gap if that has not come before.
            is_seldom: whether nothing came for a while before.
            now_s: current time.
        """
        most_bytes = ACK_EVERY_BYTES if record < self.cumulative else ACK_MIDWAY_BYTES
        is_urgent = self._unacknowledged_bytes >= most_bytes or (
            is_ahead and self._has_hole(record)
        )
        self.acknowledge_by(now_s if is_urgent else now_s + self._delay_s(is_seldom))

    def _delay_s(self, is_seldom: bool) -> float:
        """How long what has come may wait: a flight's beginning and a message's end not as long as what is between."""
        return self._midway_delay_s if self.is_midway and not is_seldom else self._ack_delay_s

    def _has_hole(self, record: int) -> bool:
        """Whether something is missing before this record, or between the fragments of the next one."""
        if record > self.cumulative:
            return True
        partial = self._partials.get(self.cumulative)
        return partial is not None and partial.got & (partial.got + 1) != 0

    def make_acks(self, now_s: float) -> list[Ack]:
        """Return the acknowledgement to send now, with all the credit there is, in as many parts as it needs."""
        self.ack_at_s = None
        is_bulk = self._unacknowledged_bytes >= BULK_BYTES
        self._ack_delay_s = ACK_DELAY_MAX_S if is_bulk else ACK_DELAY_S
        self._midway_delay_s = ack_delay_s(self._rtt.shortest_s, self._ack_delay_s)
        self._unacknowledged_bytes = 0
        self.limit = max(self.limit, min(self._consumed + self._window, RECORD_NUMBER_MAX))
        base = self.cumulative
        complete = self._complete_bitmap(base)
        partials = [(number, self._partials[number].got) for number in sorted(self._partials)]
        delay_us = min(int(max(0.0, now_s - self._last_arrival_s) * 1e6), 1_000_000)
        acks: list[Ack] = []
        skipped = start = 0
        while start < len(partials) or not acks:
            part = _fitting(partials, start)
            start += len(part)
            is_last = start >= len(partials)
            acks.append(Ack(base, self.limit, delay_us, complete, part, skipped, not is_last))
            skipped = part[-1][0] + 1 - base if part else 0
        return acks

    def _complete_bitmap(self, base: int) -> int:
        complete = 0
        for record in self._complete:
            if record > base:
                complete |= 1 << (record - base)
        for first, end in self._skips:
            if first > base and first - base < ACK_WINDOW_RECORDS:
                last = min(end, base + ACK_WINDOW_RECORDS)
                complete |= ((1 << (last - first)) - 1) << (first - base)
        return complete

    def abandon(self) -> None:
        """Give back what is half done: the peer is gone."""
        self._drop_assembly()
        self._partials.clear()
        self._complete.clear()


def _fitting(partials: list[tuple[int, int]], start: int) -> tuple[tuple[int, int], ...]:
    """Return as many incomplete records from ``start`` on as one acknowledgement has room for."""
    end, room = start, ACK_PARTIAL_BYTES_MAX
    while end < min(len(partials), start + ACK_PARTIALS_MAX):
        room -= partial_bytes(partials[end][1])
        if room < 0:
            break
        end += 1
    return tuple(partials[start:end])
