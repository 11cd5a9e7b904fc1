"""The send log as one peer sees it; losses are found by time (RFC 8985), and by a PING when no ACK comes at all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from .congestion import NEVER_S, PTO_MAX_S, RateController, RttEstimator, SendState
from .records import Record, SendLog
from .types import Address, Peer, Stats, Ticket, Transmit
from .wire import TAG_BYTES, Ack, Skip

# When many nodes send to one, a datagram is often lost several times; backing off early would waste the time after.
PROBES_AT_FIRST: Final = 3
# From this fraction of the usual round trip on, an acknowledgement after a second copy counts as that of the copy.
PLAUSIBLE: Final = 0.75

SKIPPED: Final = Record(-1, memoryview(b""), 0, 1, 1, 0, frozenset())

Sending: TypeAlias = Transmit | Skip  # the datagrams leave with one system call


@dataclass(slots=True)
class Sent:
    """One transmission of fragments of a record."""

    order: int  # place in the sequence of all transmissions to the peer
    mask: int  # the fragments that are neither acknowledged nor declared lost
    state: SendState
    has_single_copy: bool = True  # it brought a fragment that was sent only once: a round trip
    is_probe: bool = False  # an earlier copy may still be on its way


@dataclass(slots=True)
class Flight:
    """One record, or one run of skipped records, on its way to the peer."""

    number: int  # of the record, or of the first skipped one
    record: Record
    span: int  # record numbers that it covers
    to_send: int  # fragments that wait to be sent
    first_order: int  # order of the first transmission
    acked: int = 0  # fragments that the peer has
    ever: int = 0  # fragments that were sent
    again: int = 0  # fragments that were sent more than once
    sent: list[Sent] = field(default_factory=list)  # the transmissions, oldest first


class Sender:
    """Sends the records of the log to one peer, reliably, within its credit and the path's rate."""

    def __init__(self, log: SendLog, session: int, rtt: RttEstimator, counters: Stats) -> None:
        start = log.head
        self._log = log
        self._counters = counters
        self._session = session
        self._rtt = rtt
        self.rate = RateController(rtt)
        self.cursor = start  # the next record of the log to send for the first time
        self.cumulative = start  # the peer has every record below this number
        self.limit = start  # the first record number for which the peer has given no credit
        self.is_tagging = False  # the peer takes only TAGGED fragments
        self._flights: dict[int, Flight] = {}
        self._waiting: dict[int, Flight] = {}
        self.pending: deque[tuple[int, Ticket]] = deque()  # (last record of a message, its ticket)
        self.transmissions = 0
        self._newest = (-1, 0)  # order and highest fragment of the newest transmission that arrived
        self._described_end = start
        self._loss_due_at_s = NEVER_S
        self._progress_at_s = 0.0
        self._acknowledged_at_s = 0.0  # when the peer last acknowledged a complete record
        self._timeouts = 0
        self._lone_pongs = 0  # since data last arrived, while some was missing

    @property
    def is_idle(self) -> bool:
        """Whether the peer has acknowledged everything in the log."""
        return not self._flights and self.cursor == self._log.head

    def note_published(self, last_record: int, ticket: Ticket, now_s: float) -> None:
        """Follow a message of the log, up to its last record."""
        if not self.pending:
            self._acknowledged_at_s = now_s
        if self.is_idle:
            self.rate.on_app_limited()
        self.pending.append((last_record, ticket))

    def settle_messages(self, peer: Peer, below: float, *, delivered: bool) -> tuple[Ticket, ...]:
        """Settle and forget the messages that end before this record, and return their tickets."""
        tickets = []
        while self.pending and self.pending[0][0] < below:
            tickets.append(self.pending.popleft()[1])
            tickets[-1].settle(peer, delivered=delivered)
        return tuple(tickets)

    def is_late(self, lag_s: float, now_s: float) -> bool:
        """Return whether the peer has acknowledged nothing for so long, though messages wait for it."""
        return bool(self.pending) and now_s - self._acknowledged_at_s > lag_s

    def excuse_silence(self, pause_s: float, now_s: float) -> None:
        """Do not count a pause of this process as silence of the peer."""
        self._acknowledged_at_s = min(now_s, self._acknowledged_at_s + pause_s)

    def next_item(self, now_s: float, address: Address) -> Sending | None:
        """Return what to send now, or None when nothing may or need be sent."""
        space_bytes = self.rate.room_bytes(now_s)
        if not space_bytes:
            return None
        flight = self._waiting[min(self._waiting)] if self._waiting else self._open_next()
        if flight is None:
            self.rate.on_app_limited()
            return None
        mask = flight.to_send
        if space_bytes < flight.record.nbytes:
            fitting = max(1, space_bytes // flight.record.segment_bytes)
            for _ in range(mask.bit_count() - fitting):  # the first fragments leave first
                mask ^= 1 << (mask.bit_length() - 1)
        return self._send(flight, mask, now_s, address)

    def _open_next(self) -> Flight | None:
        number = self.cursor
        # Records below the log's base were for others, and were released before this peer was established.
        end = max(number, self._log.base)
        while (record := self._log.get(end)) and self._session not in record.recipients:
            end += 1
        if end > number:
            record = SKIPPED
        elif record is None or number >= self.limit:
            return None
        span = max(1, end - number)
        flight = Flight(number, record, span, record.full, self.transmissions)
        self.cursor += span
        self._flights[number] = self._waiting[number] = flight
        return flight

    def _send(self, flight: Flight, mask: int, now_s: float, address: Address) -> Sending:
        record = flight.record
        slices = record.slices(mask)
        nbytes = sum(map(len, slices))
        again = mask & flight.ever
        if again:
            flight.again |= again
            self._counters.retransmitted_bytes += record.bytes_of(again)
            self._counters.retransmitted_fragments += again.bit_count()
        flight.ever |= mask
        self._set_to_send(flight, flight.to_send & ~mask)
        flight.sent.append(Sent(self.transmissions, mask, self.rate.on_sent(nbytes, now_s)))
        self.transmissions += 1
        self._progress_at_s = now_s
        if record is SKIPPED:
            return Skip(flight.number, flight.span)
        self._counters.udp_bytes_sent += nbytes + mask.bit_count() * TAG_BYTES * self.is_tagging
        self._counters.datagrams_sent += mask.bit_count()
        return Transmit(address, slices, record.segment_bytes)

    def _set_to_send(self, flight: Flight, mask: int) -> None:
        flight.to_send = mask
        if mask:
            self._waiting[flight.number] = flight
        else:
            self._waiting.pop(flight.number, None)

    def on_ack(self, ack: Ack, now_s: float) -> None:
        """Process an acknowledgement, which must be newer than every one before."""
        self.limit = max(self.limit, ack.limit)
        self.is_tagging = ack.tagged
        newest_before = self._newest[0]
        delay_s = ack.delay_us * 1e-6
        shortest_s = 0.0
        newest: Sent | None = None
        delivered_bytes = 0
        for flight, got in self._reported(ack):
            got &= flight.ever  # nobody has what was not sent
            newly = got & ~flight.acked
            dropped = flight.acked & ~got
            if newly:
                # The last fragment arrived ``delay_s`` ago at the latest, less the way back.
                nbytes, sent = self._confirm(flight, newly, now_s - delay_s)
                delivered_bytes += nbytes
                if sent is not None and (newest is None or sent.order > newest.order):
                    newest = sent
                    # Parts of a record may be forged, and may have come before the true ones.
                    is_authentic = ack.tagged or got == flight.record.full
                    shortest_s = 0.0 if is_authentic else self._rtt.minimum_s
            if dropped:  # the peer could not authenticate the record and forgot its fragments
                flight.acked &= got
                self._set_to_send(flight, flight.to_send | dropped)
            if got == flight.record.full:
                del self._flights[flight.number]
        if newest is not None:
            self._timeouts = self._lone_pongs = 0
            self._progress_at_s = now_s
            if newest.order > newest_before and newest.has_single_copy:
                elapsed_s = now_s - newest.state.sent_at_s
                self._rtt.add_sample(max(elapsed_s - delay_s, elapsed_s / 8, shortest_s), now_s)
            self.rate.on_delivered(delivered_bytes, newest.state, now_s)
        # A peer has nothing that was not sent. Of the records beyond a truncated report nothing is known: not lost yet.
        cumulative = min(ack.cumulative, self.cursor)
        if cumulative > self.cumulative:
            self.cumulative = cumulative
            self._acknowledged_at_s = now_s
        self._described_end = ack.partials[-1][0] + 1 if ack.truncated else self.cursor
        self._find_losses(now_s)

    def _reported(self, ack: Ack) -> list[tuple[Flight, int]]:
        """Return each flight that the report describes, with the fragments that the peer holds."""
        cumulative = ack.cumulative
        partials = dict(ack.partials)
        last_partial = ack.partials[-1][0] if ack.partials else cumulative
        end = max(cumulative + max(ack.complete.bit_length(), 1), last_partial + 1)
        result = []
        for number, flight in self._flights.items():
            if number >= end:
                break
            full = flight.record.full
            offset = number - cumulative
            if offset + flight.span <= 0 or (offset >= 0 and ack.complete >> offset & 1):
                result.append((flight, full))
            elif offset >= 0 and (number <= last_partial or not ack.truncated):
                # A correct peer does not report an incomplete record with all fragments.
                got = partials.get(number, 0) & full
                result.append((flight, got if got != full else 0))
        return result

    def _confirm(self, flight: Flight, newly: int, arrived_s: float) -> tuple[int, Sent | None]:
        """Note that fragments arrived, at ``arrived_s`` at the latest; return their bytes and newest transmission."""
        flight.acked |= newly
        if flight.to_send:
            self._set_to_send(flight, flight.to_send & ~newly)
        nbytes = 0
        newest: Sent | None = None
        for sent in flight.sent:
            arrived = sent.mask & newly
            if not arrived:
                continue
            sent.mask ^= arrived
            nbytes += flight.record.bytes_of(arrived)
            if arrived & flight.again:
                usual_s = min(self._rtt.smoothed_s, self._rtt.latest_s)
                if sent.is_probe or arrived_s - sent.state.sent_at_s < PLAUSIBLE * usual_s:
                    # The first copy of a fragment may have arrived, which tells nothing about the second.
                    arrived &= ~flight.again
                    if not arrived:
                        continue
            newest = sent
            sent.has_single_copy = bool(arrived & ~flight.again)
            self._newest = max(self._newest, (sent.order, arrived.bit_length() - 1))
        if newest is None:
            self.rate.on_abandoned(nbytes)
            nbytes = 0
        return nbytes, newest

    def _find_losses(self, now_s: float) -> None:
        newest_order, newest_bit = self._newest
        delay_s = self._backed_off(self._rtt.loss_delay_s)
        due_at_s = NEVER_S
        for flight in self._flights.values():
            # Flights are in order of their first transmission: all others began after the newest arrival.
            if flight.first_order > newest_order or flight.number >= self._described_end:
                break
            for sent in flight.sent:
                if sent.order > newest_order:
                    break
                overdue = sent.mask
                if sent.order == newest_order:
                    overdue &= (1 << newest_bit) - 1
                if overdue and now_s - sent.state.sent_at_s >= delay_s:
                    sent.mask &= ~overdue
                    lost_bytes = flight.record.bytes_of(overdue)
                    self._counters.lost_bytes += lost_bytes
                    self.rate.on_lost(lost_bytes)
                    self._set_to_send(flight, flight.to_send | overdue)
                elif overdue:
                    due_at_s = min(due_at_s, sent.state.sent_at_s + delay_s)
            flight.sent = [sent for sent in flight.sent if sent.mask]
        self._loss_due_at_s = due_at_s

    def deadline_s(self) -> float:
        """Return when `on_timer` or `next_item` should be called next; infinity if there is nothing to wait for."""
        at_s = min(self._loss_due_at_s, self._probe_at_s()) if self._flights else NEVER_S
        if self._waiting or self.cursor < min(self._log.head, self.limit):
            at_s = min(at_s, self.rate.send_allowed_at_s())
        return at_s

    def _probe_at_s(self) -> float:
        rtt = self._rtt
        timeout_s = rtt.probe_timeout_s if self._timeouts else rtt.first_probe_timeout_s
        return self._progress_at_s + self._backed_off(timeout_s)

    def _backed_off(self, wait_s: float) -> float:
        """Return a wait, doubled with each probe or lone PONG after the first ones."""
        in_vain = max(self._timeouts, self._lone_pongs)
        backoff = 1 << min(max(0, in_vain - PROBES_AT_FIRST), 10)
        return max(wait_s, min(wait_s * backoff, PTO_MAX_S))

    def on_timer(self, now_s: float, address: Address) -> Sending | None:
        """Find losses; if a probe timeout has expired, return the last missing fragment, to send again with a PING."""
        if now_s >= self._loss_due_at_s:
            self._find_losses(now_s)
        if not self._flights or now_s < self._probe_at_s():
            return None
        self._timeouts += 1
        flight = list(self._flights.values())[-1]
        bit = 1 << ((flight.record.full & ~flight.acked).bit_length() - 1)
        for sent in flight.sent:
            if sent.mask & bit:
                sent.mask ^= bit
                lost_bytes = flight.record.bytes_of(bit)
                self._counters.lost_bytes += lost_bytes
                self.rate.on_abandoned(lost_bytes)
        probe = self._send(flight, bit, now_s, address)
        flight.sent[-1].is_probe = True
        return probe

    def on_pong(self, transmissions: int, now_s: float) -> None:
        """Process the answer to a PING that left after so many transmissions: none of them is still on its way."""
        self._timeouts = 0
        # PONGs pass even where datagrams of full size are too long for the path.
        self._lone_pongs += bool(self._flights)
        self._progress_at_s = now_s
        self._newest = max(self._newest, (transmissions, 0))
        self._find_losses(now_s)

    def abandon(self) -> None:
        """Drop everything: the peer is gone."""
        self.rate.on_abandoned(self.rate.bytes_in_flight)
        self._flights.clear()
        self._waiting.clear()
        self.cursor = self.cumulative = self._log.head
