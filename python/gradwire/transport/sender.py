"""One peer's view of the send log: the records in flight to the peer, those it has, and those to send again.

Losses are found by time (RFC 8985): a fragment counts as lost when a fragment sent after it has arrived and it is
overdue. When no acknowledgement arrives at all, a probe of one fragment asks for one, which then shows every gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from .congestion import PTO_MAX_S, RateController, RttEstimator, Sent
from .records import Record, SendLog, lowest_bits
from .types import Stats
from .wire import Ack, Skip

# With many senders to one receiver single datagrams are lost repeatedly, and an early pause would outlast the crowd.
PROBES_AT_FIRST: Final = 3
PTO_BACKOFF_MAX: Final = 10
# An answer this fraction of the usual round trip after the second copy was sent is an answer to the second copy.
PLAUSIBLE: Final = 0.75
PROBES_BELIEVED: Final = 2  # after so many probes their answers count, however early
NEVER_S: Final = float("inf")


class Burst(NamedTuple):
    """Datagrams of one record to send with one system call."""

    slices: list[memoryview]
    segment_bytes: int


Sending: TypeAlias = Burst | Skip


@dataclass(slots=True)
class Flight:
    """One record, or one run of skipped records, on its way to the peer."""

    number: int  # of the record, or of the first skipped one
    record: Record | None  # None for skipped ones
    span: int  # record numbers that it covers
    full: int  # a bit for each fragment
    to_send: int  # fragments that wait to be sent
    acked: int = 0  # fragments that the peer has
    ever: int = 0  # fragments that were sent
    again: int = 0  # fragments that were sent more than once
    first_order: int = -1  # order of the first transmission
    sent: list[Sent] = field(default_factory=list)  # the transmissions, oldest first

    def bytes_of(self, mask: int) -> int:
        """Return the size on the wire of these fragments."""
        return 0 if self.record is None else self.record.bytes_of(mask)


class Sender:
    """Sends the records of the log to one peer, reliably, within its credit and the path's rate."""

    def __init__(
        self, log: SendLog, session: int, start: int, rtt: RttEstimator, counters: Stats
    ) -> None:
        self._log = log
        self._counters = counters
        self._session = session
        self._rtt = rtt
        self.rate = RateController(rtt)
        self.cursor = start  # the next record of the log to send for the first time
        self.cumulative = start  # the peer has every record below this number
        self.limit = start  # the first record number for which the peer has given no credit
        self._flights: dict[int, Flight] = {}
        self._waiting: dict[int, Flight] = {}
        self._order = 0
        self._newest = (
            -1,
            0,
        )  # order and highest fragment of the newest transmission that has arrived
        self._described_end = start
        self._loss_due_at_s = NEVER_S
        self._progress_at_s = 0.0
        self._timeouts = 0

    @property
    def is_idle(self) -> bool:
        """Whether the peer has acknowledged everything in the log."""
        return not self._flights and self.cursor == self._log.head

    @property
    def backlog_records(self) -> int:
        """Records of the log that the peer has not acknowledged."""
        return self._log.head - self.cumulative

    # ---- sending ------------------------------------------------------------------------------------------------

    def next_item(self, now_s: float) -> Sending | None:
        """Return what to send now, or None when nothing may or need be sent."""
        room = self.rate.room_bytes(now_s)
        if not room:
            return None
        flight = self._waiting[min(self._waiting)] if self._waiting else self._open_next()
        if flight is None:
            self.rate.on_app_limited()
            return None
        record = flight.record
        if record is None:
            return self._send_skip(flight, now_s)
        mask = flight.to_send
        if room < record.nbytes:
            mask = lowest_bits(mask, max(1, room // record.segment_bytes))
        return self._send(flight, record, mask, now_s)

    def _open_next(self) -> Flight | None:
        head = self._log.head
        if self.cursor >= head:
            return None
        record = self._log.get(self.cursor)
        if record is not None and self._session in record.recipients:
            if self.cursor >= self.limit:
                return None
            flight = Flight(self.cursor, record, 1, record.full, record.full)
        else:
            end = self.cursor + 1
            while end < head and not self._is_recipient(end):
                end += 1
            flight = Flight(self.cursor, None, end - self.cursor, 1, 1)
        self.cursor += flight.span
        self._flights[flight.number] = self._waiting[flight.number] = flight
        return flight

    def _is_recipient(self, number: int) -> bool:
        record = self._log.get(number)
        return record is not None and self._session in record.recipients

    def _send(self, flight: Flight, record: Record, mask: int, now_s: float) -> Burst:
        self._note_sent(flight, mask, record.bytes_of(mask), now_s)
        return Burst(record.slices(mask), record.segment_bytes)

    def _send_skip(self, flight: Flight, now_s: float) -> Skip:
        self._note_sent(flight, 1, 0, now_s)
        return Skip(flight.number, flight.span)

    def _note_sent(self, flight: Flight, mask: int, nbytes: int, now_s: float) -> None:
        again = mask & flight.ever
        flight.ever |= mask
        flight.to_send &= ~mask
        if not flight.to_send:
            self._waiting.pop(flight.number, None)
        if flight.first_order < 0:
            flight.first_order = self._order
        if again:
            flight.again |= again
            self._counters.retransmitted_bytes += flight.bytes_of(again)
            self._counters.retransmitted_fragments += again.bit_count()
        flight.sent.append(self.rate.on_sent(nbytes, now_s, self._order, mask))
        self._progress_at_s = now_s
        self._order += 1

    # ---- acknowledgements ---------------------------------------------------------------------------------------

    def on_ack(self, ack: Ack, now_s: float) -> None:
        """Process an acknowledgement, which must be newer than every one before.

        Fragments that an incomplete record's bitmap no longer shows were dropped by the receiver because their record
        failed authentication, so they are sent again.
        """
        self.limit = max(self.limit, ack.limit)
        newest_before = self._newest[0]
        # When the last fragment arrived at the latest, plus the way back.
        arrived_s = now_s - ack.delay_us * 1e-6
        newest: Sent | None = None
        was_sent_once = True
        delivered_bytes = 0
        for flight, got in self._reported(ack):
            newly, dropped = got & ~flight.acked, flight.acked & ~got
            if newly:
                nbytes, sent, once = self._mark_delivered(flight, newly, arrived_s)
                delivered_bytes += nbytes
                if sent is not None and (newest is None or sent.order > newest.order):
                    newest, was_sent_once = sent, once
            if dropped:
                flight.acked &= got
                self._queue_again(flight, dropped)
            if got == flight.full:
                del self._flights[flight.number]
                self._waiting.pop(flight.number, None)
        if newest is not None:
            self._timeouts = 0
            self._progress_at_s = now_s
            if newest.order > newest_before and was_sent_once:
                elapsed_s = now_s - newest.sent_at_s
                sample_s = max(elapsed_s - ack.delay_us * 1e-6, elapsed_s / 8)
                self._rtt.add_sample(sample_s, now_s)
            self.rate.on_delivered(delivered_bytes, newest, now_s)
        self.cumulative = max(self.cumulative, min(ack.cumulative, self.cursor))
        # A truncated report says nothing about the records beyond it, so they are not lost yet.
        self._described_end = ack.partials[-1][0] + 1 if ack.truncated else self.cursor
        self._find_losses(now_s)

    def _reported(self, ack: Ack) -> list[tuple[Flight, int]]:
        """Return each flight that the report describes, with the fragments that the peer holds."""
        partials = dict(ack.partials)
        last_partial = ack.partials[-1][0] if ack.partials else ack.cumulative
        end = max(ack.cumulative + max(ack.complete.bit_length(), 1), last_partial + 1)
        result = []
        for number, flight in self._flights.items():
            if number >= end:
                break
            if number + flight.span <= ack.cumulative:
                result.append((flight, flight.full))
            elif number >= ack.cumulative:
                if ack.complete >> (number - ack.cumulative) & 1:
                    result.append((flight, flight.full))
                elif number <= last_partial or not ack.truncated:
                    # A bitmap with every bit set belongs to an incomplete record only if the peer is confused.
                    got = partials.get(number, 0) & flight.full
                    result.append((flight, got if got != flight.full else 0))
        return result

    def _mark_delivered(
        self, flight: Flight, newly: int, arrived_s: float
    ) -> tuple[int, Sent | None, bool]:
        """Note that the peer has these fragments, the last of which arrived at ``arrived_s`` at the latest.

        Returns:
            Their bytes; the newest transmission of any of them; and whether that transmission brought a fragment that
            was sent only once, so that it yields a round trip.
        """
        flight.acked |= newly
        if flight.to_send & newly:
            flight.to_send &= ~newly
            if not flight.to_send:
                self._waiting.pop(flight.number, None)
        nbytes = 0
        newest: Sent | None = None
        was_sent_once = False
        for sent in flight.sent:
            hit = sent.mask & newly
            if not hit:
                continue
            sent.mask &= ~hit
            nbytes += flight.bytes_of(hit)
            if hit & flight.again and self._is_early(sent, arrived_s):
                # The first copy of a fragment may have arrived, which tells nothing about the second.
                hit &= ~flight.again
                if not hit:
                    continue
            newest = sent
            was_sent_once = bool(hit & ~flight.again)
            self._newest = max(self._newest, (sent.order, hit.bit_length() - 1))
        flight.sent = [sent for sent in flight.sent if sent.mask]
        if newest is None and nbytes:
            self.rate.on_abandoned(nbytes)
            nbytes = 0
        return nbytes, newest, was_sent_once

    def _is_early(self, sent: Sent, arrived_s: float) -> bool:
        """Return whether the answer came too soon to be one to this transmission.

        When only probes are answered, the queue that made round trips long is empty, so the latest sample counts.
        """
        usual_s = self._rtt.smoothed_s
        if self._timeouts:
            usual_s = min(usual_s, self._rtt.latest_s)
        is_early = arrived_s - sent.sent_at_s < PLAUSIBLE * usual_s
        return is_early and self._timeouts < PROBES_BELIEVED

    def _queue_again(self, flight: Flight, mask: int) -> None:
        if mask:
            flight.to_send |= mask
            self._waiting[flight.number] = flight

    def _find_losses(self, now_s: float) -> None:
        newest_order, newest_bit = self._newest
        delay_s = self._rtt.loss_delay_s
        due_at_s = NEVER_S
        for flight in self._flights.values():
            # Records are opened in order, so from here on everything left after the newest arrival.
            if flight.first_order > newest_order or flight.number >= self._described_end:
                break
            for sent in flight.sent:
                if sent.order > newest_order:
                    break
                overdue = sent.mask
                if sent.order == newest_order:
                    overdue &= (1 << newest_bit) - 1
                if overdue and now_s - sent.sent_at_s >= delay_s:
                    self._declare_lost(flight, sent, overdue)
                elif overdue:
                    due_at_s = min(due_at_s, sent.sent_at_s + delay_s)
            flight.sent = [sent for sent in flight.sent if sent.mask]
        self._loss_due_at_s = due_at_s

    def _declare_lost(self, flight: Flight, sent: Sent, mask: int) -> None:
        sent.mask &= ~mask
        nbytes = flight.bytes_of(mask)
        self._counters.lost_bytes += nbytes
        self.rate.on_lost(nbytes)
        self._queue_again(flight, mask & ~flight.acked)

    # ---- timers -------------------------------------------------------------------------------------------------

    def deadline_s(self) -> float:
        """Return when `on_timer` or `next_item` should be called next; infinity if there is nothing to wait for."""
        at_s = min(self._loss_due_at_s, self._probe_at_s())
        if self._waiting or self.cursor < min(self._log.head, self.limit):
            allowed_at_s = self.rate.send_allowed_at_s()
            if allowed_at_s is not None:
                return min(at_s, allowed_at_s)
        return at_s

    def _probe_at_s(self) -> float:
        if not self._flights:
            return NEVER_S
        if not self._timeouts:
            return self._progress_at_s + self._rtt.first_probe_timeout_s
        timeout_s = self._rtt.probe_timeout_s
        if self._timeouts > PROBES_AT_FIRST:
            backoff = 1 << min(self._timeouts - PROBES_AT_FIRST, PTO_BACKOFF_MAX)
            timeout_s = max(timeout_s, min(timeout_s * backoff, PTO_MAX_S))
        return self._progress_at_s + timeout_s

    def on_timer(self, now_s: float) -> tuple[list[Sending], bool]:
        """Find losses and probe, as far as they are due.

        Returns:
            The datagrams to send at once, whatever the window; and whether a probe timeout expired.
        """
        if now_s >= self._loss_due_at_s:
            self._find_losses(now_s)
        if now_s < self._probe_at_s():
            return [], False
        self._timeouts += 1
        self._progress_at_s = now_s
        numbers = list(self._flights)
        chosen = {numbers[-1]} if self._timeouts == 1 else {numbers[0], numbers[-1]}
        return [self._probe(self._flights[number], now_s) for number in sorted(chosen)], True

    def _probe(self, flight: Flight, now_s: float) -> Sending:
        """Send the last missing fragment again: any answer to it shows every gap before it."""
        missing = flight.full & ~flight.acked
        bit = 1 << (missing.bit_length() - 1)
        for sent in flight.sent:
            if sent.mask & bit:
                sent.mask &= ~bit
                lost = flight.bytes_of(bit)
                self._counters.lost_bytes += lost
                self.rate.on_abandoned(lost)
        flight.sent = [sent for sent in flight.sent if sent.mask]
        if flight.record is None:
            return self._send_skip(flight, now_s)
        return self._send(flight, flight.record, bit, now_s)

    def abandon(self) -> None:
        """Drop everything: the peer is gone."""
        self.rate.on_abandoned(self.rate.bytes_in_flight)
        self._flights.clear()
        self._waiting.clear()
        self._loss_due_at_s = NEVER_S
        self.cursor = self.cumulative = self._log.head
