"""One peer's view of the send log: what is in flight to it, what it has, what must be sent again.

Losses are found by time (RFC 8985): a fragment counts as lost when something sent after it has arrived and it is
overdue. When nothing arrives at all, a probe of one fragment asks for an acknowledgement, which then shows every hole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import Final, TypeAlias

from .flight import Flight, described_end, reported
from .path_mtu import BASE_BYTES, LargeLosses
from .records import Burst, Record, SendLog, joined
from .recovery import RateController, Sent
from .round_trips import PTO_MAX_S, RttEstimator
from .wire import Ack, Skip

# In a crowd (many to one) single datagrams are lost one after the other, and an early pause would outlast the crowd.
PROBES_AT_FIRST: Final = 3
PTO_BACKOFF_MAX: Final = 10
NEVER_S: Final = float("inf")
NO_GATE: Final = 1 << 62
PLAUSIBLE: Final = (
    0.75  # an answer this fraction of the usual round trip after the second copy is one to it
)

PROBES_BELIEVED: Final = 2  # after so many, however early their answers come

Sending: TypeAlias = Burst | Skip
Whole: TypeAlias = tuple[
    Record, int, Sent
]  # with its order; several that left together share the rest


class Outbound:
    """Sends the records of the log to one peer, reliably, within its credit and the path's rate.

    Attributes:
        cumulative: the peer has every record below this number.
        limit: the first record number that the peer has no room for yet, or that is held back.
        held_at: nothing new is sent from this record on; None if nothing is held back.
        gate: records from this number on are sent by a carrier (`carry`), which reaches several peers at once.
        retransmitted_bytes: bytes sent more than once.
        large: what became of large datagrams lately.
    """

    def __init__(self, log: SendLog, session: int, start: int, rtt: RttEstimator) -> None:
        self._log = log
        self._session = session
        self._rtt = rtt
        self._direct_rtt = rtt
        self.rate = RateController(rtt)
        self.gate = NO_GATE
        self.on_resend: Callable[[Record, int, float], None] | None = None
        self.carried_bursts = 0
        self.carried_bytes = 0
        self.cursor = start
        self.cumulative = start
        self.limit = start
        self.held_at: int | None = None
        self._granted = start
        self._fresh_from = start
        self.lost_bytes = 0
        self.retransmitted_bytes = 0
        self.retransmitted_fragments = 0
        self.large = LargeLosses()
        # What was sent whole, once, and not heard of: nearly everything. Of what is older each fragment has books.
        self._wholes: deque[Whole] = deque()
        self._flights: dict[int, Flight] = {}
        self._waiting: dict[int, Flight] = {}
        self._order = 0
        self._newest = (-1, 0)
        self._newest_carried = -1
        self._described_end = start
        self._loss_due_at_s = NEVER_S
        self._progress_at_s = 0.0
        self._timeouts = 0
        self._partly_carried: Flight | None = None

    @property
    def is_idle(self) -> bool:
        """Whether everything in the log has been acknowledged by this peer."""
        return self.cursor == self._log.head and not self._flights and not self._wholes

    @property
    def has_unsent(self) -> bool:
        """Whether something is in the log that was not sent to this peer yet, or has to be sent again."""
        return self.cursor < self._log.head or bool(self._waiting)

    @property
    def is_starved(self) -> bool:
        """Whether there is something to send and the peer has given no credit for it."""
        return (
            not self._flights
            and not self._wholes
            and self.cursor < self._log.head
            and not self._is_granted(self.cursor)
        )

    def _is_granted(self, number: int) -> bool:
        """Whether the peer has room for the whole record that begins with this number."""
        record = self._log.get(number)
        return number + (1 if record is None else record.span) <= self.limit

    @property
    def backlog_records(self) -> int:
        """Records of the log that the peer has not acknowledged."""
        return self._log.head - self.cumulative

    def send_unsent(self, now_s: float, most: int) -> list[Sending]:
        """Return what may leave now while the caller is still filling the log: that it is empty says nothing then."""
        items: list[Sending] = []
        head, waiting = self._log.head, self._waiting
        while (self.cursor < head or waiting) and len(items) < most:
            item = self._send_wholes(now_s, most) or self.next_item(now_s)
            if item is None:
                break
            items.append(item)
        return joined(items) if len(items) > 1 else items

    def _send_wholes(self, now_s: float, most: int) -> Burst | None:
        """Send as many records as there are, whole and for the first time, to a peer that has room for all of them."""
        free_bytes = 0 if self._waiting else self.rate.free_bytes
        if not free_bytes:
            return None
        number, segment_bytes, nbytes = self.cursor, 0, 0
        records: list[Record] = []
        calls: list[Sequence[memoryview]] = []
        while number < self.gate and len(records) < most:
            record = self._log.get(number)
            if (
                record is None
                or (end := number + record.span) > self.limit
                or (record.segment_bytes != segment_bytes and segment_bytes)
                or nbytes + record.nbytes > free_bytes
                or self._session not in record.message.recipients
            ):
                break
            records.append(record)
            calls += record.calls
            number, segment_bytes = end, record.segment_bytes
            nbytes += record.nbytes
            if record.nbytes % segment_bytes:  # only the last datagram of a burst may be short
                break
        if not records:
            return None
        mark = self.rate.on_sent(nbytes, now_s, self._order)
        self._wholes.extend(zip(records, count(self._order), repeat(mark), strict=False))
        self.cursor = number
        self._order += len(records)
        self._progress_at_s = now_s
        return Burst(calls, segment_bytes, nbytes)

    def next_item(self, now_s: float) -> Sending | None:
        """Return what to send now, or None when nothing may or need be sent."""
        room = self.rate.room_bytes(now_s)
        if not room:
            return None
        if not self._waiting:
            burst = self._send_whole(room, now_s)
            if burst is not None:
                return burst
        flight = self._waiting[min(self._waiting)] if self._waiting else self._open_next()
        if flight is None:
            if self.cursor < self.gate:
                self.rate.on_app_limited()
            return None
        record = flight.record
        if record is None:
            return self._send_skip(flight, now_s)
        mask = flight.to_send
        if room < record.nbytes:
            mask = record.part_of(mask, room)
        return self._send(flight, record, mask, now_s)

    def _send_whole(self, room: int, now_s: float) -> Burst | None:
        """Send the next record for the first time and in one piece, if it may be: the common case."""
        number = self.cursor
        record = self._log.get(number) if number < self.gate else None
        if (
            record is None
            or record.nbytes > room
            or number + record.span > self.limit
            or self._session not in record.message.recipients
        ):
            return None
        self._note_whole(record, now_s)
        return record

    def _note_whole(self, record: Record, now_s: float, *, is_carried: bool = False) -> None:
        """Account for the next record, which is sent for the first time and in one piece."""
        order = self._order
        mark = self.rate.on_sent(record.nbytes, now_s, order, is_carried=is_carried)
        self._wholes.append((record, order, mark))
        self.cursor = record.number + record.span
        self._order = order + 1
        self._progress_at_s = now_s

    def _open_next(self) -> Flight | None:
        head = min(self._log.head, self.gate)
        if self.cursor >= head:
            return None
        record = self._log.get(self.cursor)
        if record is not None and self._session in record.message.recipients:
            if self.cursor + record.span > self.limit:
                return None
            flight = Flight(self.cursor, record, record.span)
        else:
            end = self.cursor + 1
            while end < head and not self._is_meant(end):
                end += 1
            flight = Flight(self.cursor, None, end - self.cursor)
        self._unfold()
        self.cursor += flight.span
        self._flights[flight.number] = flight
        self._waiting[flight.number] = flight
        return flight

    def _unfold(self, end: int = NO_GATE) -> None:
        """Keep books of each fragment from now on for the records below ``end`` that were sent whole."""
        wholes = self._wholes
        while wholes and wholes[0][0].number < end:
            record, order, mark = wholes.popleft()
            self._flights[record.number] = Flight.whole(record, mark.copy(order, record.full))

    def _is_meant(self, number: int) -> bool:
        record = self._log.get(number)
        return record is not None and self._session in record.message.recipients

    def _send(self, flight: Flight, record: Record, mask: int, now_s: float) -> Burst:
        self._note_sent(flight, mask, record.bytes_of(mask), now_s)
        return record.burst(mask)

    def _send_skip(self, flight: Flight, now_s: float) -> Skip:
        self._note_sent(flight, 1, 0, now_s)
        return Skip(flight.number, flight.span)

    def _note_sent(
        self, flight: Flight, mask: int, nbytes: int, now_s: float, *, is_carried: bool = False
    ) -> None:
        again = mask & flight.ever
        flight.ever |= mask
        flight.to_send &= ~mask
        if not flight.to_send:
            self._waiting.pop(flight.number, None)
        if flight.first_order < 0:
            flight.first_order = self._order
        if again:
            flight.again |= again
            self.retransmitted_bytes += flight.bytes_of(again)
            self.retransmitted_fragments += again.bit_count()
            if self.on_resend is not None and flight.record is not None:
                self.on_resend(flight.record, again, now_s)
        mark = self.rate.on_sent(nbytes, now_s, self._order, mask, is_carried=is_carried)
        flight.sent.append(mark)
        self._progress_at_s = now_s
        self._order += 1

    def on_ack(self, ack: Ack, now_s: float) -> None:
        """Take a peer's report; it must be newer than every one taken before.

        What an incomplete record's bitmap no longer shows was dropped by the receiver (it failed authentication), so it
        is sent again.
        """
        if ack.limit > self._granted:
            self._granted = ack.limit
            self.limit = ack.limit if self.held_at is None else min(ack.limit, self.held_at)
        if self._wholes and (ack.partials or ack.complete):
            self._unfold(described_end(ack))
        elif self._wholes and self._flights:
            self._unfold(ack.cumulative)
        newest_before = self._newest[0]
        # When the last of it came at the latest, plus the way back: or the report would tell of something newer.
        arrived_s = now_s - ack.delay_us * 1e-6
        delivered_bytes, newest = self._take_whole(ack.cumulative)
        was_sent_once = True
        finished = []
        for flight, got in reported(self._flights, ack):
            if got == flight.full:
                finished.append(flight.number)
            newly, dropped = got & ~flight.acked, flight.acked & ~got
            if newly:
                nbytes, sent, once = self._mark_delivered(flight, newly, arrived_s)
                delivered_bytes += nbytes
                if sent is not None and (newest is None or sent.order > newest.order):
                    newest, was_sent_once = sent, once
            if dropped:
                flight.acked &= got
                self._queue_again(flight, dropped)
        for number in finished:
            del self._flights[number]
            self._waiting.pop(number, None)
        if newest is not None:
            is_news = newest.order > newest_before and was_sent_once
            self._note_progress(
                newest, delivered_bytes, ack.delay_us * 1e-6 if is_news else None, now_s
            )
        self.cumulative = max(self.cumulative, min(ack.cumulative, self.cursor))
        # A report that ran out of room says nothing about the rest, so nothing of the rest is lost yet.
        if ack.skipped == 0 or ack.cumulative + ack.skipped <= self._described_end:
            self._described_end = ack.partials[-1][0] + 1 if ack.truncated else self.cursor
        self._find_losses(now_s)

    def _take_whole(self, cumulative: int) -> tuple[int, Sent | None]:
        """Finish the oldest records as far as they were sent once, whole, and have arrived: the common case.

        Returns:
            Their bytes, and the transmission of the last of them.
        """
        flights, wholes = self._flights, self._wholes
        finished: list[int] = []
        nbytes = 0
        last: Record | None = None
        sent: Sent | None = None
        for number, flight in flights.items():
            if number + flight.span > cumulative or not flight.is_simple:
                break
            finished.append(number)
            nbytes += flight.nbytes
            last, sent = flight.record, flight.sent[-1]
        for number in finished:
            del flights[number]
        while wholes and not flights:
            record, order, mark = wholes[0]
            if record.number + record.span > cumulative:
                break
            del wholes[0]
            nbytes += record.nbytes
            last, sent = record, mark if mark.order == order else mark.copy(order, record.full)
        if sent is None:
            return 0, None
        if last is not None and (large := last.fragments_above(BASE_BYTES)):
            self.large.on_delivered(last.bytes_of(large & -large))
        full = 1 if last is None else last.full
        self._note_news(sent, full)
        return nbytes, sent

    def _mark_delivered(
        self, flight: Flight, newly: int, arrived_s: float
    ) -> tuple[int, Sent | None, bool]:
        """Take in that the peer has these fragments.

        Args:
            flight: the record.
            newly: the fragments that were not known to be there.
            arrived_s: when the last of them came at the latest, and the way back added.

        Returns:
            Their bytes, the newest transmission of any of them, and whether that can have brought some that no other
            has brought. Only then it tells a round trip. Whether others of the record were sent again does not matter:
            a record may be a whole message, and one probe must not end all measuring while a queue grows.
        """
        flight.acked |= newly
        if newly & flight.large:
            self.large.on_delivered(flight.largest_of(newly))
        if flight.to_send & newly:
            flight.to_send &= ~newly
            if not flight.to_send:
                self._waiting.pop(flight.number, None)
        nbytes = 0
        newest: Sent | None = None
        was_sent_once = False
        for sent in flight.sent:
            hit = sent.mask & newly
            if hit:
                sent.mask &= ~hit
                nbytes += flight.bytes_of(hit)
                # A fragment sent twice may have arrived by its first copy; too early an answer proves nothing
                # about what was sent before the second. Not so when probes are all that is answered: the queue
                # that made round trips long is empty then.
                quickest_s = min(self._rtt.smoothed_s, self._direct_rtt.smoothed_s)
                if self._timeouts and self._rtt is self._direct_rtt:
                    quickest_s = min(
                        quickest_s, self._rtt.latest_s
                    )  # of the PING next to the probe
                is_early = arrived_s - sent.sent_at_s < PLAUSIBLE * quickest_s
                if is_early and self._timeouts < PROBES_BELIEVED:
                    hit &= ~flight.again
                    if not hit:
                        continue
                newest = sent
                was_sent_once = bool(hit & ~flight.again)
                self._note_news(sent, hit)
        if newest is None and nbytes:
            self.rate.on_abandoned(nbytes)
            nbytes = 0
        return nbytes, newest, was_sent_once

    def _note_news(self, sent: Sent, hit: int) -> None:
        self._newest = max(self._newest, (sent.order, hit.bit_length() - 1))
        if sent.is_carried:
            self._newest_carried = max(self._newest_carried, sent.order)

    def _note_progress(
        self, sent: Sent, delivered_bytes: int, held_back_s: float | None, now_s: float
    ) -> None:
        """Account for an acknowledgement; it gives a round trip only if it is about the newest thing that was sent."""
        self._timeouts = 0
        self._progress_at_s = now_s
        if held_back_s is not None:
            elapsed_s = now_s - sent.sent_at_s
            self._rtt.add_sample(max(elapsed_s - held_back_s, elapsed_s / 8), now_s)
        self.rate.on_delivered(delivered_bytes, sent, now_s)

    def _queue_again(self, flight: Flight, mask: int) -> None:
        flight.to_send |= mask
        flight.resent = True
        self._waiting[flight.number] = flight

    def _find_losses(self, now_s: float) -> None:
        newest_order, newest_bit = self._newest
        while self._wholes and self._wholes[0][1] <= newest_order:
            self._unfold(self._wholes[0][0].number + 1)
        delay_s = self._rtt.loss_delay_s
        due_at_s = NEVER_S
        for flight in self._flights.values():
            # Records are opened in order, so from here on everything left after the newest arrival.
            if flight.first_order > newest_order or flight.number >= self._described_end:
                break
            for sent in flight.sent:
                if sent.order > newest_order or not sent.mask:
                    continue
                overdue = (
                    sent.mask if sent.order < newest_order else sent.mask & ((1 << newest_bit) - 1)
                )
                if not overdue:
                    continue
                if now_s - sent.sent_at_s >= delay_s:
                    self._declare_lost(flight, sent, overdue)
                else:
                    due_at_s = min(due_at_s, sent.sent_at_s + delay_s)
            flight.sent = [sent for sent in flight.sent if sent.mask]
        self._loss_due_at_s = due_at_s

    def _declare_lost(self, flight: Flight, sent: Sent, mask: int) -> None:
        sent.mask &= ~mask
        nbytes = flight.bytes_of(mask)
        if mask & flight.large:
            self.large.on_lost(flight.largest_of(mask))
        self.lost_bytes += nbytes
        # What came directly has overtaken what a busy relay still has, perhaps: that says nothing about a queue.
        if sent.is_carried and sent.order > self._newest_carried:
            self.rate.on_abandoned(nbytes)
        else:
            self.rate.on_lost(nbytes)
        self._queue_again(flight, mask & ~flight.acked)

    def deadline_s(self) -> float:
        """Return when `on_timer` or `next_item` should be called next; infinity if there is nothing to wait for."""
        at_s = min(self._loss_due_at_s, self._probe_at_s())
        if self._waiting or (
            self.cursor < min(self._log.head, self.limit, self.gate)
            and self._is_granted(self.cursor)
        ):
            allowed_at_s = self.rate.send_allowed_at_s()
            if allowed_at_s is not None:
                return min(at_s, allowed_at_s)
        return at_s

    def _probe_at_s(self) -> float:
        if not self._flights and not self._wholes:
            return NEVER_S
        part = self._partly_carried
        if part is not None and len(self._flights) == 1 and not part.ever & ~part.acked:
            return NEVER_S  # everything that was sent has arrived
        if not self._timeouts and self._rtt is self._direct_rtt:
            return self._progress_at_s + self._rtt.first_probe_timeout_s
        timeout_s = self._rtt.probe_timeout_s
        if self._timeouts > PROBES_AT_FIRST:
            backoff = 1 << min(self._timeouts - PROBES_AT_FIRST, PTO_BACKOFF_MAX)
            timeout_s = max(timeout_s, min(timeout_s * backoff, PTO_MAX_S))
        return self._progress_at_s + timeout_s

    def on_timer(self, now_s: float) -> tuple[list[Sending], bool]:
        """Do what is due: find losses, probe.

        Returns:
            What to send at once, whatever the window; and whether a probe timeout expired.
        """
        if now_s >= self._loss_due_at_s:
            self._find_losses(now_s)
        if now_s < self._probe_at_s():
            return [], False
        self._timeouts += 1
        self._progress_at_s = now_s
        self._unfold()
        part = self._partly_carried
        numbers = [
            number
            for number, flight in self._flights.items()
            if flight is not part or flight.ever & ~flight.acked
        ]
        chosen = {numbers[-1]} if self._timeouts == 1 else {numbers[0], numbers[-1]}
        return [self._probe(self._flights[number], now_s) for number in sorted(chosen)], True

    def _probe(self, flight: Flight, now_s: float) -> Sending:
        """Send the last missing fragment again: any answer to it shows all that is missing before."""
        missing = flight.full & ~flight.acked
        if flight is self._partly_carried:
            missing &= flight.ever
        bit = 1 << (missing.bit_length() - 1)
        for sent in flight.sent:
            if sent.mask & bit:
                sent.mask &= ~bit
                lost = flight.bytes_of(bit)
                if bit & flight.large:
                    self.large.on_lost(lost)
                self.lost_bytes += lost
                self.rate.on_abandoned(lost)
        flight.sent = [sent for sent in flight.sent if sent.mask]
        flight.resent = True
        return (
            self._send_skip(flight, now_s)
            if flight.record is None
            else self._send(flight, flight.record, bit, now_s)
        )

    @property
    def unsent_from(self) -> int:
        """The first record from which on nothing has ever been sent to this peer, in no cut."""
        return max(self.cursor, self._fresh_from)

    def hold_at(self, number: int) -> None:
        """Send nothing new from this record on, until `release`."""
        self.held_at = number
        self.limit = min(self._granted, number)

    def release(self) -> None:
        """Hold nothing back any more."""
        self.held_at = None
        self.limit = self._granted

    def skip_to(self, number: int, fresh_from: int) -> None:
        """Have the peer skip what it has not acknowledged below ``number``: it comes again, cut anew, from there on.

        Args:
            number: first record of the new cut.
            fresh_from: first record of the new cut of which nothing has been sent in any older one.
        """
        self.release()
        self._fresh_from = fresh_from
        self.rate.on_abandoned(self.rate.bytes_in_flight)
        self._wholes.clear()
        self._flights.clear()
        self._waiting.clear()
        self._loss_due_at_s = NEVER_S
        self._partly_carried = None
        if self.cumulative < number:
            flight = Flight(self.cumulative, None, number - self.cumulative)
            self._flights[flight.number] = self._waiting[flight.number] = flight
        self.cursor = number

    # ---- what a carrier sends for this peer ---------------------------------------------------------------------

    @property
    def timeouts(self) -> int:
        """Probes since the peer last confirmed anything."""
        return self._timeouts

    @property
    def round_trip_s(self) -> float:
        """Smoothed time from sending data to its acknowledgement, on the way that the data takes."""
        return self._rtt.smoothed_s

    def carry_at_s(self, record: Record) -> float | None:
        """Return when a carrier may send (more of) this record, in the past if at once; None: not before news come."""
        if record.number + record.span > self.limit or self.cursor < record.number:
            return None
        rate = self.rate
        # One burst to all: too little room for one of them would cut it into crumbs for all the others.
        if (
            rate.bytes_in_flight > 0
            and rate.window_bytes - rate.bytes_in_flight < rate.burst_bytes // 2
        ):
            return None
        return rate.send_allowed_at_s()

    def carry(self, record: Record, mask: int, now_s: float) -> None:
        """Account for fragments of a record, the next one or the last one begun, that a carrier sends now."""
        if mask == record.full and self.cursor == record.number:
            self._note_whole(record, now_s, is_carried=True)
            self._partly_carried = None
            self.carried_bursts += 1
            self.carried_bytes += record.nbytes
            return
        self._unfold()
        if self.cursor == record.number:
            flight = Flight(record.number, record, record.span)
            flight.to_send = 0
            self._flights[record.number] = flight
            self.cursor += record.span
        carried = self._flights.get(record.number)
        if carried is None:
            return  # the peer claims to have what was not sent
        nbytes = record.bytes_of(mask)
        carried.ever |= mask & carried.acked  # had by another way, so nothing of it is under way
        if mask & ~carried.acked:
            missing = mask & ~carried.acked
            self._note_sent(carried, missing, record.bytes_of(missing), now_s, is_carried=True)
        self._partly_carried = carried if carried.ever != carried.full else None
        self.carried_bursts += 1
        self.carried_bytes += nbytes

    def carry_again(self, record: Record, mask: int, now_s: float) -> None:
        """Account for fragments that reach the peer again because they were sent again to its relay."""
        self._unfold(record.number + 1)
        flight = self._flights.get(record.number)
        if flight is None:
            return
        mask &= flight.ever & ~flight.acked
        if not mask:
            return
        nbytes = 0
        for sent in flight.sent:
            nbytes += flight.bytes_of(sent.mask & mask)
            sent.mask &= ~mask
        flight.sent = [sent for sent in flight.sent if sent.mask]
        self.lost_bytes += nbytes
        self.rate.on_lost(nbytes)
        flight.to_send &= ~mask
        if not flight.to_send:
            self._waiting.pop(flight.number, None)
        flight.again |= mask
        flight.resent = True
        nbytes = flight.bytes_of(mask)
        flight.sent.append(self.rate.on_sent(nbytes, now_s, self._order, mask, is_carried=True))
        self._order += 1

    def leave_carrier(self, number: int, unsent: int) -> None:
        """Send everything from now on, and of the record ``number`` the fragments that the carrier has not sent."""
        self.gate = NO_GATE
        self._partly_carried = None
        self._unfold()
        flight = self._flights.get(number)
        if flight is not None and unsent & ~flight.ever:
            flight.to_send |= unsent & ~flight.ever
            self._waiting[number] = flight

    def use_round_trips(self, rtt: RttEstimator) -> None:
        """Judge by the round trips of another way from now on: the data takes it, the answers come back directly."""
        self._rtt = rtt
        self.rate.use_round_trips(rtt)

    # ---- the end ----------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Forget everything: the peer is gone."""
        self.rate.on_abandoned(self.rate.bytes_in_flight)
        self._wholes.clear()
        self._flights.clear()
        self._waiting.clear()
        self._loss_due_at_s = NEVER_S
        self._partly_carried = None
        self.cursor = self.cumulative = self._log.head
