"""Congestion control: round-trip times, the sending rate, and the bytes in flight that queues on the path can hold.

Loss on a wireless or long-distance link is no sign of congestion, and a controller that halves on every loss gets about
9 Mbit/s at 1 % loss and 20 ms. This one measures the delivery rate of the path: it paces at the highest recent rate and
keeps about two bandwidth-delay products in flight. Loss while round trips are much longer than the shortest one is that
of a full queue, and lowers the limit on the bytes in flight.

Source: draft-cardwell-iccrg-bbr-congestion-control-00 (phases) and -02 (``inflight_hi``),
draft-cheng-iccrg-delivery-rate-estimation-00 (rate samples), RFC 9002 (round trips, probe timeout), RFC 9406 (slower
start as soon as round trips grow).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

RTT_INITIAL_S: Final = 0.1
RTT_VARIATION_FLOOR_S: Final = 0.001  # the timers of a busy machine are no better
ACK_DELAY_MAX_S: Final = 0.001
LONG_RTT_S: Final = 0.008
LOSS_DELAY_FLOOR_S: Final = 0.0005
PTO_MAX_S: Final = 1.0
MIN_RTT_WINDOW_S: Final = 10.0

WINDOW_INITIAL_BYTES: Final = 65_536  # with twice as much, 16 senders at once overflow a switch
WINDOW_INITIAL_ALL_BYTES: Final = 131_072  # on all paths of a node together
WINDOW_MIN_BYTES: Final = 16_384
WINDOW_MAX_BYTES: Final = 1 << 28
BURST_MIN_BYTES: Final = 3_000
BURST_MAX_BYTES: Final = 65_536  # a record, one system call
BURST_S: Final = 0.0004  # of the path's rate in one burst: less than the queue of a switch
BURST_CLEAN_S: Final = 0.004  # on a path without loss, where larger bursts save processor time
# Over a long path up to a millisecond's worth, but at most ten datagrams (RFC 9002, section 7.7).
BURST_LONG_S: Final = 0.001
BURST_LONG_BYTES: Final = 14_600
SLACK_MAX_BYTES: Final = 8 * BURST_MAX_BYTES
OVERDRAFT_WINDOW_BYTES: Final = 2 * BURST_MAX_BYTES
PACING_SLACK_S: Final = 0.001  # a late timer may catch up with this much at once
UNPACED_LOSS: Final = 0.01

STARTUP_GAIN: Final = 2.885  # 2 / ln 2: doubles the delivery rate every round trip
DRAIN_GAIN: Final = 1 / 2.885
PROBE_GAINS: Final = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
STEADY_PHASE: Final = 2
WINDOW_GAIN: Final = 2.0
RATE_FILTER_ROUNDS: Final = 10
FULL_GROWTH: Final = 1.25
FULL_ROUNDS: Final = 3
FULL_LOSS: Final = 0.1
OVERRATED: Final = 2.0

QUEUE_S: Final = 0.004  # of waiting: more than a busy receiver or a late timer adds every time
OVERFLOW_SHARE: Final = 0.05
LOST_MIN_BYTES: Final = 4_200  # less may be a datagram that was only late
KEPT_MIN: Final = 0.5  # of the in-flight limit, however much was lost
LOSS_COMPENSATION_MAX: Final = 0.3
SHARE_MIN_BYTES: Final = 4_200
UNLIMITED_BYTES: Final = 1 << 28
# Growth of the limit in a round trip, before any overflow, as a share of the bytes delivered.
GROWTH: Final = 2.0
GROWTH_BRIEF: Final = 0.5  # in so short a round trip a token bucket does not visibly empty
GROWTH_QUEUED: Final = 0.25
BRIEF_S: Final = 0.001
REGROWTH_S: Final = 1.0  # after an overflow: time without a queue in which the limit grows by e


class RttEstimator:
    """Smoothed round-trip time, its variation, and the minimum of the last ten seconds; 0 while unknown."""

    def __init__(self) -> None:
        self.smoothed_s = 0.0
        self.variation_s = 0.0
        self.latest_s = 0.0
        self.minimum_s = 0.0
        self.shortest_s = 0.0  # of all samples
        self._minimum_at_s = 0.0
        self._next_s = self._next_at_s = (
            0.0  # the next smallest sample, which will replace the minimum
        )

    def set_guess(self, sample_s: float) -> None:
        """Begin with a time that may be too long because it is unknown which of several datagrams was answered."""
        if self.smoothed_s == 0.0:
            self.smoothed_s, self.variation_s = sample_s, sample_s / 2

    def add_sample(self, sample_s: float, now_s: float) -> None:
        """Add one measured round trip."""
        sample_s = max(sample_s, 1e-6)
        self.latest_s = sample_s
        if self.minimum_s == 0.0:
            self.smoothed_s, self.variation_s = sample_s, sample_s / 2
            self._set_minimum(sample_s, now_s)
            return
        self.variation_s += (abs(self.smoothed_s - sample_s) - self.variation_s) / 4
        self.smoothed_s += (sample_s - self.smoothed_s) / 8
        if sample_s <= self.minimum_s:
            self._set_minimum(sample_s, now_s)
            return
        # Keep a successor of the minimum ready: the sample at its expiry may be that of a full queue.
        if sample_s <= self._next_s or now_s - self._next_at_s > MIN_RTT_WINDOW_S / 2:
            self._next_s, self._next_at_s = sample_s, now_s
        if now_s - self._minimum_at_s > MIN_RTT_WINDOW_S:
            self._set_minimum(self._next_s, self._next_at_s)

    def _set_minimum(self, sample_s: float, at_s: float) -> None:
        self.shortest_s = min(self.shortest_s or sample_s, sample_s)
        self.minimum_s, self._minimum_at_s = sample_s, at_s
        self._next_s = float("inf")

    @property
    def long_rtt(self) -> bool:
        """Whether even the shortest round trip is so long that a millisecond does not matter."""
        return self.shortest_s >= LONG_RTT_S

    @property
    def probe_timeout_s(self) -> float:
        """Time to wait for an acknowledgement before probing."""
        if self.smoothed_s == 0.0:
            return 2 * RTT_INITIAL_S
        variation_s = max(4 * self.variation_s, RTT_VARIATION_FLOOR_S)
        return self.smoothed_s + variation_s + ACK_DELAY_MAX_S

    @property
    def first_probe_timeout_s(self) -> float:
        """The same for the first probe, which may be superfluous: at most two round trips.

        Where queues fill and empty, the variation is a multiple of the round trip, and a lost tail would wait for all
        of it. Source: RFC 8985, section 7.2.
        """
        if self.smoothed_s == 0.0:
            return self.probe_timeout_s
        most_s = self.smoothed_s + max(self.smoothed_s, RTT_VARIATION_FLOOR_S) + ACK_DELAY_MAX_S
        return min(self.probe_timeout_s, most_s)

    @property
    def loss_delay_s(self) -> float:
        """Time after its sending at which a fragment counts as lost, once a later fragment has arrived."""
        tolerated_s = max(
            1.125 * max(self.smoothed_s, self.latest_s), self.smoothed_s + 2 * self.variation_s
        )
        return max(tolerated_s, LOSS_DELAY_FLOOR_S)


@dataclass(slots=True)
class RoundTrip:
    """Observations of one round trip."""

    began_at_s: float
    delivered_bytes: int = 0
    lost_bytes: int = 0
    longest_s: float = 0.0  # the longest sample
    rate_bytes_per_s: float = 0.0  # the highest delivery rate
    in_flight_bytes: int = 0  # the most at the sending of any burst that has arrived

    @property
    def lost_share(self) -> float:
        """Lost bytes as a share of the lost and delivered bytes."""
        return self.lost_bytes / max(1, self.lost_bytes + self.delivered_bytes)


class InFlightLimit:
    """The most bytes that may be in flight on one path without overflowing a queue.

    The delivery rate cannot tell that: a token bucket lets its savings pass at the speed of the interface, and the next
    round trip of a sender that pauses between its messages begins with a full bucket again.
    """

    def __init__(self) -> None:
        self.nbytes = WINDOW_INITIAL_BYTES
        self.rate_bytes_per_s = 0.0  # the highest delivery rate of the last two round trips
        self._floor_bytes = WINDOW_MIN_BYTES
        self._has_overflowed = False
        self._before = RoundTrip(0.0)

    def share(self, paths: int, *, is_first: bool) -> None:
        """Divide the node's link among its paths, which may all send at once; ``is_first``: nothing was sent yet."""
        share_bytes = WINDOW_INITIAL_ALL_BYTES // max(1, paths)
        share_bytes = max(SHARE_MIN_BYTES, min(WINDOW_INITIAL_BYTES, share_bytes))
        self._floor_bytes = min(WINDOW_MIN_BYTES, share_bytes)
        if is_first:
            self.nbytes = share_bytes

    def on_round_trip(self, last: RoundTrip, shortest_s: float, now_s: float) -> bool:
        """Adapt the limit to a round trip that has ended; return whether a queue has overflowed."""
        before, self._before = self._before, last
        # Losses of one round trip may have been sent into the queue of the one before.
        in_flight_bytes = max(before.in_flight_bytes, last.in_flight_bytes)
        self.rate_bytes_per_s = max(before.rate_bytes_per_s, last.rate_bytes_per_s)
        is_queued = max(before.longest_s, last.longest_s) > shortest_s + QUEUE_S
        is_lossy = last.lost_bytes >= LOST_MIN_BYTES and last.lost_share > OVERFLOW_SHARE
        if is_queued and is_lossy:
            self._cut(min(in_flight_bytes, self.nbytes), last.lost_share, shortest_s)
            return True
        if 2 * in_flight_bytes >= self.nbytes:
            self._grow(last, shortest_s, is_queued, now_s)
        return False

    def _cut(self, held_bytes: int, lost_share: float, shortest_s: float) -> None:
        self._has_overflowed = True
        arriving = 1.0 - min(lost_share, LOSS_COMPENSATION_MAX)
        needed_bytes = self.rate_bytes_per_s * (shortest_s + QUEUE_S) / arriving
        fitting_bytes = held_bytes * max(KEPT_MIN, 1.0 - lost_share)
        kept_bytes = max(fitting_bytes, min(needed_bytes, held_bytes))
        self.nbytes = max(int(kept_bytes), self._floor_bytes)

    def _grow(self, last: RoundTrip, shortest_s: float, is_queued: bool, now_s: float) -> None:
        if not self._has_overflowed:
            free_share = GROWTH if shortest_s >= BRIEF_S else GROWTH_BRIEF
            share = GROWTH_QUEUED if is_queued else free_share
            grown_bytes = self.nbytes + int(share * last.delivered_bytes)
        elif not is_queued:
            # The part of the round that is longer than its round trips was a pause.
            sending_s = min(now_s - last.began_at_s, 2 * last.longest_s, REGROWTH_S)
            grown_bytes = self.nbytes + int(self.nbytes * sending_s / REGROWTH_S)
        else:
            return
        self.nbytes = min(grown_bytes, UNLIMITED_BYTES)


@dataclass(slots=True)
class Sent:
    """One transmission, and the state of delivery when it left; its acknowledgement yields a rate sample."""

    order: int  # its place in the sequence of all transmissions to the peer
    mask: int  # the fragments of its record that are neither acknowledged nor declared lost
    sent_at_s: float
    delivered_bytes: int
    delivered_at_s: float
    first_sent_at_s: float
    app_limited: bool
    in_flight_bytes: int


class RateController:
    """Window and pace of one path."""

    def __init__(self, rtt: RttEstimator) -> None:
        self._rtt = rtt
        self.limit = InFlightLimit()
        self.bytes_in_flight = 0  # sent and neither acknowledged nor given up
        self.window_bytes = WINDOW_INITIAL_BYTES  # the most that may be in flight
        self.burst_bytes = BURST_MAX_BYTES  # the most that may leave at once
        self.loss_rate = 0.0  # smoothed fraction of the bytes that were lost
        self._delivered_bytes = 0
        self._delivered_at_s = 0.0
        self._first_sent_at_s = 0.0
        self._app_limited_until_bytes = 0
        self._round = 0
        self._round_ends_at_bytes = 0
        self._rates: deque[tuple[int, float]] = deque()
        self._phase = "startup"
        self._gain_index = STEADY_PHASE
        self._gain_since_s = 0.0
        self._full_rate = 0.0
        self._full_rounds = 0
        self._next_send_at_s = 0.0
        self._pace = 0.0
        self._seen = RoundTrip(0.0)

    @property
    def rate_bytes_per_s(self) -> float:
        """The highest delivery rate of the last ten rounds; 0 while unknown."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def phase(self) -> str:
        """One of "startup", "drain", "probe"."""
        return self._phase

    def room_bytes(self, now_s: float) -> int:
        """Return the bytes that may leave now; 0 if none may."""
        room = self.window_bytes - self.bytes_in_flight
        if room <= 0:
            return 0
        if self._next_send_at_s > now_s and (self.send_allowed_at_s() or 0.0) > now_s:
            return 0
        # A window of several bursts may be overdrawn by a part of one: a part costs as much as a full burst.
        if self.window_bytes >= OVERDRAFT_WINDOW_BYTES:
            room = max(room, BURST_MAX_BYTES)
        return min(room, self.burst_bytes)

    def send_allowed_at_s(self) -> float | None:
        """Return when the next burst may leave, in the past if at once; None until bytes are acknowledged."""
        if self.bytes_in_flight >= self.window_bytes:
            return None
        if self._delivered_bytes < self._app_limited_until_bytes:
            # A sender of small messages measures only its own rate; pacing by that rate would slow it down for nothing.
            unpaced = WINDOW_INITIAL_BYTES if self.loss_rate < UNPACED_LOSS else WINDOW_MIN_BYTES
            if self.bytes_in_flight < unpaced:
                return 0.0
        return self._next_send_at_s

    def on_sent(self, sent_bytes: int, now_s: float, order: int, mask: int) -> Sent:
        """Account for a burst of the fragments in ``mask`` that leaves now."""
        if self.bytes_in_flight == 0:
            self._first_sent_at_s = self._delivered_at_s = now_s
        self.bytes_in_flight += sent_bytes
        if self._pace > 0.0:
            # A burst that left before its time is not paid for by a pause later.
            earliest_s = min(max(self._next_send_at_s, now_s - PACING_SLACK_S), now_s)
            self._next_send_at_s = earliest_s + sent_bytes / self._pace
        return Sent(
            order,
            mask,
            now_s,
            self._delivered_bytes,
            self._delivered_at_s,
            self._first_sent_at_s,
            self._delivered_bytes < self._app_limited_until_bytes,
            self.bytes_in_flight,
        )

    def on_app_limited(self) -> None:
        """Note that nothing more waits to be sent: rates measured until these bytes arrive are only lower bounds."""
        self._app_limited_until_bytes = self._delivered_bytes + max(self.bytes_in_flight, 1)

    def on_lost(self, lost_bytes: int) -> None:
        """Account for bytes declared lost."""
        self.bytes_in_flight -= lost_bytes
        self._seen.lost_bytes += lost_bytes
        self.loss_rate += min(1.0, lost_bytes / BURST_MAX_BYTES) * (1.0 - self.loss_rate) / 16

    def on_abandoned(self, abandoned_bytes: int) -> None:
        """Account for bytes that nothing waits for any more."""
        self.bytes_in_flight -= abandoned_bytes

    def share_link(self, paths: int) -> None:
        """Adapt to the number of paths that share the node's link."""
        is_first = not self._delivered_bytes and not self.bytes_in_flight
        self.limit.share(paths, is_first=is_first)
        if is_first:
            self.window_bytes = self.burst_bytes = self.limit.nbytes

    def on_delivered(self, delivered_bytes: int, mark: Sent, now_s: float) -> None:
        """Account for bytes acknowledged now, of which ``mark`` was sent most recently."""
        self.bytes_in_flight -= delivered_bytes
        self._delivered_bytes += delivered_bytes
        seen = self._seen
        seen.delivered_bytes += delivered_bytes
        self._delivered_at_s = now_s
        self._first_sent_at_s = mark.sent_at_s
        self.loss_rate -= min(1.0, delivered_bytes / BURST_MAX_BYTES) * self.loss_rate / 16
        new_round = mark.delivered_bytes >= self._round_ends_at_bytes
        if new_round:
            self._round += 1
            self._round_ends_at_bytes = self._delivered_bytes
        interval_s = max(now_s - mark.delivered_at_s, mark.sent_at_s - mark.first_sent_at_s)
        if interval_s >= self._rtt.minimum_s > 0.0:
            rate = (self._delivered_bytes - mark.delivered_bytes) / interval_s
            self._add_rate(rate, mark.app_limited)
            seen.rate_bytes_per_s = max(seen.rate_bytes_per_s, rate)
        seen.longest_s = max(seen.longest_s, self._rtt.latest_s)
        seen.in_flight_bytes = max(seen.in_flight_bytes, mark.in_flight_bytes)
        self._advance_phase(new_round, mark.app_limited, now_s)
        if new_round:
            self._seen = RoundTrip(now_s)
            if self.limit.on_round_trip(seen, self._rtt.minimum_s, now_s):
                self._on_overflow(now_s)
        self._update_window()
        self._pace = self._pacing_rate()
        if self._pace > 0.0:
            self.burst_bytes = int(max(BURST_MIN_BYTES, min(BURST_MAX_BYTES, self._burst())))

    def _burst(self) -> float:
        if self.loss_rate < UNPACED_LOSS:
            return self._pace * BURST_CLEAN_S
        burst = self._pace * BURST_S
        if self._rtt.long_rtt:
            burst = max(burst, min(self._pace * BURST_LONG_S, BURST_LONG_BYTES))
        return burst

    def _on_overflow(self, now_s: float) -> None:
        """Drop a rate that was only that of a burst, and end the startup phase."""
        rate = self.limit.rate_bytes_per_s
        if 0.0 < rate * OVERRATED < self.rate_bytes_per_s:
            self._rates.clear()
            self._rates.append((self._round, rate))
        if self._phase == "startup" and self._rates:
            self._begin_probing(now_s)

    def _begin_probing(self, now_s: float) -> None:
        self._phase = "probe"
        self._gain_index, self._gain_since_s = STEADY_PHASE, now_s

    def _add_rate(self, rate: float, app_limited: bool) -> None:
        if app_limited and rate < self.rate_bytes_per_s:
            return
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((self._round, rate))
        while self._rates[0][0] <= self._round - RATE_FILTER_ROUNDS:
            self._rates.popleft()

    def _advance_phase(self, new_round: bool, app_limited: bool, now_s: float) -> None:
        if self._phase == "startup":
            if new_round and not app_limited and self._is_pipe_full():
                self._phase = "drain"
        elif self._phase == "drain":
            if self.bytes_in_flight <= self._bandwidth_delay_bytes():
                self._begin_probing(now_s)
        elif now_s - self._gain_since_s > max(self._rtt.minimum_s, PACING_SLACK_S):
            self._gain_index = (self._gain_index + 1) % len(PROBE_GAINS)
            self._gain_since_s = now_s

    def _is_pipe_full(self) -> bool:
        if self.rate_bytes_per_s >= self._full_rate * FULL_GROWTH:
            self._full_rate, self._full_rounds = self.rate_bytes_per_s, 0
            return False
        # No growth and much loss: the queue at the bottleneck overflows already.
        self._full_rounds += FULL_ROUNDS if self._seen.lost_share > FULL_LOSS else 1
        return self._full_rounds >= FULL_ROUNDS

    def _update_window(self) -> None:
        gain = STARTUP_GAIN if self._phase == "startup" else WINDOW_GAIN
        # Acknowledgements come late and a burst at a time.
        late_bytes = self.rate_bytes_per_s * ACK_DELAY_MAX_S
        burst_bytes = max(BURST_MAX_BYTES, self.rate_bytes_per_s * BURST_CLEAN_S)
        slack = min(late_bytes + 2 * burst_bytes, SLACK_MAX_BYTES)
        target = int(gain * self._bandwidth_delay_bytes() + slack)
        floor = WINDOW_INITIAL_BYTES if self._phase == "startup" else WINDOW_MIN_BYTES
        self.window_bytes = min(max(floor, min(target, WINDOW_MAX_BYTES)), self.limit.nbytes)

    def _bandwidth_delay_bytes(self) -> float:
        return self.rate_bytes_per_s * self._rtt.minimum_s

    def _pacing_rate(self) -> float:
        rate = self.rate_bytes_per_s
        if rate == 0.0:
            return 0.0
        if self._phase == "startup":
            gain = STARTUP_GAIN
        elif self._phase == "drain":
            gain = DRAIN_GAIN
        else:
            gain = PROBE_GAINS[self._gain_index]
            if gain > 1.0:
                # Without this, a path that loses a fifth of everything could never show a higher rate than before.
                gain /= 1.0 - min(self.loss_rate, LOSS_COMPENSATION_MAX)
        floor = WINDOW_MIN_BYTES / max(self._rtt.smoothed_s, 0.01)
        return max(rate * gain, floor)
