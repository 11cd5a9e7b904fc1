"""Congestion control: paces at the highest recent delivery rate, with two bandwidth-delay products in flight.

Source: draft-cardwell-iccrg-bbr-congestion-control-00 and -02, draft-cheng-iccrg-delivery-rate-estimation-00, RFC 9002
(round trips, probe timeout), RFC 9406 (slower start as soon as round trips grow).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

Window: TypeAlias = deque[tuple[float, float]]  # (time, value), without values before a higher one

NEVER_S: Final = float("inf")
RTT_VARIATION_FLOOR_S: Final = 0.001  # the timers of a busy machine are no better
ACK_DELAY_MAX_S: Final = 0.001
PTO_MAX_S: Final = 1.0

WINDOW_INITIAL_BYTES: Final = 65_536  # with twice as much, 16 senders at once overflow a switch
WINDOW_INITIAL_ALL_BYTES: Final = 131_072  # on all paths of a node together
WINDOW_MIN_BYTES: Final = 16_384
WINDOW_MAX_BYTES: Final = 1 << 28
SHARE_MIN_BYTES: Final = 4_200
BURST_MAX_BYTES: Final = 65_536  # a record, one system call
BURST_S: Final = 0.0004  # a burst at the path's rate lasts so long: less than the queue of a switch
BURST_CLEAN_S: Final = 0.004  # the same without loss, where larger bursts save processor time
PACING_SLACK_S: Final = 0.001  # a late timer may catch up with this much at once
UNPACED_LOSS: Final = 0.01

STARTUP_GAIN: Final = 2.885  # 2 / ln 2: doubles the delivery rate every round trip
PROBE_GAINS: Final = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

QUEUE_S: Final = 0.004  # wait that shows a queue: a busy receiver or a late timer adds less
LOSS_COMPENSATION_MAX: Final = 0.3


def windowed_maximum(window: Window, now: float, value: float, span: float) -> float:
    """Add a value to a window, and return the highest of those no older than ``span``."""
    while window and window[-1][1] <= value:
        window.pop()
    window.append((now, value))
    while now - window[0][0] > span:
        window.popleft()
    return window[0][1]


class RttEstimator:
    """Smoothed round-trip time, its variation, and the minimum of the last ten seconds; 0 while unknown."""

    def __init__(self) -> None:
        self.smoothed_s = self.variation_s = self.latest_s = self.minimum_s = 0.0
        self.probe_timeout_s = 0.2  # time to wait for an acknowledgement before probing
        # The same for the first probe: at most two round trips (RFC 8985, section 7.2).
        self.first_probe_timeout_s = 0.2
        # Time after its sending at which a fragment counts as lost, once a later fragment has arrived.
        self.loss_delay_s = 0.0005
        self._paused_until_s = -NEVER_S  # the end of the peer's latest pause
        self._negated: Window = deque()  # samples of the last ten seconds

    def note_pause(self, now_s: float) -> None:
        """Note that the peer has been silent until now: it stood still, which is no property of the path."""
        self._paused_until_s = now_s

    def add_sample(self, sample_s: float, now_s: float) -> None:
        """Add one measured round trip, unless it began before a pause was over."""
        if now_s - sample_s < self._paused_until_s:
            return
        sample_s = self.latest_s = max(sample_s, 1e-6)
        if self.minimum_s == 0.0:
            self.smoothed_s, self.variation_s = sample_s, sample_s / 2
        else:
            self.variation_s += (abs(self.smoothed_s - sample_s) - self.variation_s) / 4
            self.smoothed_s += (sample_s - self.smoothed_s) / 8
        self.minimum_s = -windowed_maximum(self._negated, now_s, -sample_s, span=10.0)
        margin_s = max(4 * self.variation_s, RTT_VARIATION_FLOOR_S)
        self.probe_timeout_s = self.smoothed_s + margin_s + ACK_DELAY_MAX_S
        # Where queues fill and empty, the variation is a multiple of the round trip.
        margin_s = min(margin_s, max(self.smoothed_s, RTT_VARIATION_FLOOR_S))
        self.first_probe_timeout_s = self.smoothed_s + margin_s + ACK_DELAY_MAX_S
        longest_s = max(self.smoothed_s, self.latest_s)
        self.loss_delay_s = max(1.125 * longest_s, self.smoothed_s + 2 * self.variation_s, 0.0005)


@dataclass(slots=True)
class RoundTrip:
    """Observations of one round trip."""

    began_at_s: float
    delivered_bytes: int = 0
    lost_bytes: int = 0
    longest_s: float = 0.0  # the longest sample
    rate_bytes_per_s: float = 0.0  # the highest delivery rate
    in_flight_bytes: int = 0  # the most at the sending of any burst that has arrived
    number: int = 0
    ends_at_bytes: int = 0  # delivered bytes at the sending of the first burst of the next one

    @property
    def lost_share(self) -> float:
        """Lost bytes as a share of the lost and delivered bytes."""
        return self.lost_bytes / max(1, self.lost_bytes + self.delivered_bytes)


class InFlightLimit:
    """The most bytes in flight that overflow no queue, which the delivery rate hides behind a token bucket."""

    def __init__(self) -> None:
        self.nbytes = WINDOW_INITIAL_BYTES
        self.floor_bytes = WINDOW_MIN_BYTES  # the limit never drops below
        self._has_overflowed = False
        self._before = RoundTrip(0.0)

    def on_round_trip(self, last: RoundTrip, shortest_s: float, now_s: float) -> bool:
        """Adapt the limit to a round trip that has ended; return whether a queue has overflowed."""
        before, self._before = self._before, last
        # What one round trip loses may have been sent into the queue of the round trip before.
        in_flight_bytes = max(before.in_flight_bytes, last.in_flight_bytes)
        is_queued = max(before.longest_s, last.longest_s) > shortest_s + QUEUE_S
        lost_share = last.lost_share
        if is_queued and last.lost_bytes >= 4_200 and lost_share > 0.05:  # fewer may be late
            self._has_overflowed = True
            queued_bytes = min(in_flight_bytes, self.nbytes)
            rate = max(before.rate_bytes_per_s, last.rate_bytes_per_s)
            arriving = 1.0 - min(lost_share, LOSS_COMPENSATION_MAX)
            needed_bytes = min(rate * (shortest_s + QUEUE_S) / arriving, queued_bytes)
            fitting_bytes = queued_bytes * max(0.5, 1.0 - lost_share)
            # Below its rate times its round trip, and what a short queue holds, the path would run empty.
            self.nbytes = max(int(max(fitting_bytes, needed_bytes)), self.floor_bytes)
            return True
        if 2 * in_flight_bytes < self.nbytes or (self._has_overflowed and is_queued):
            return False
        if self._has_overflowed:
            # By a factor of e in a second without a queue; the part that is longer than its round trips was a pause.
            grown_bytes = self.nbytes * min(now_s - last.began_at_s, 2 * last.longest_s, 1.0)
        else:
            share = 0.25 if is_queued else 0.5 if shortest_s < 0.001 else 2.0
            grown_bytes = share * last.delivered_bytes
        self.nbytes = min(self.nbytes + int(grown_bytes), WINDOW_MAX_BYTES)
        return False


class SendState(NamedTuple):
    """The state of delivery when a burst left; the acknowledgement of the burst yields a rate sample."""

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
        self.rate_bytes_per_s = 0.0  # the highest delivery rate of the last ten rounds
        self.is_starting = True  # the rate still grows with every round trip
        self._delivered_bytes = 0
        self._delivered_at_s = 0.0
        self._first_sent_at_s = 0.0
        self._app_limited_until_bytes = 0
        self._rates: Window = deque()  # of this and the nine rounds before
        self._gain_index = 0  # the next gain drains the queue of the start
        self._gain_since_s = 0.0
        self._full_rate = 0.0
        self._full_rounds = 0
        self._next_send_at_s = 0.0
        self._pace = 0.0
        self._seen = RoundTrip(0.0)

    def room_bytes(self, now_s: float) -> int:
        """Return the bytes that may leave now; 0 if none may."""
        space = self.window_bytes - self.bytes_in_flight
        if space <= 0:
            return 0
        if self._next_send_at_s > now_s and self.send_allowed_at_s() > now_s:
            return 0
        # A window of several bursts may be overdrawn by a part of one: a part costs as much as a full burst.
        if self.window_bytes >= 2 * BURST_MAX_BYTES:
            return self.burst_bytes
        return min(space, self.burst_bytes)

    def send_allowed_at_s(self) -> float:
        """Return when the next burst may leave: a past time is at once, infinity after the next acknowledgement."""
        if self.bytes_in_flight >= self.window_bytes:
            return NEVER_S
        if self._delivered_bytes < self._app_limited_until_bytes:
            # A sender of small messages measures only its own rate. Pacing by that rate would slow it down for nothing.
            unpaced = WINDOW_INITIAL_BYTES if self.loss_rate < UNPACED_LOSS else WINDOW_MIN_BYTES
            if self.bytes_in_flight < unpaced:
                return 0.0
        return self._next_send_at_s

    def on_sent(self, sent_bytes: int, now_s: float) -> SendState:
        """Account for a burst that leaves now."""
        if self.bytes_in_flight == 0:
            # The pause before this burst belongs to no rate sample.
            self._first_sent_at_s = self._delivered_at_s = now_s
        self.bytes_in_flight += sent_bytes
        if self._pace > 0.0:
            # A burst that leaves before its time does not postpone the next one.
            earliest_s = min(max(self._next_send_at_s, now_s - PACING_SLACK_S), now_s)
            self._next_send_at_s = earliest_s + sent_bytes / self._pace
        return SendState(
            sent_at_s=now_s,
            delivered_bytes=self._delivered_bytes,
            delivered_at_s=self._delivered_at_s,
            first_sent_at_s=self._first_sent_at_s,
            app_limited=self._delivered_bytes < self._app_limited_until_bytes,
            in_flight_bytes=self.bytes_in_flight,
        )

    def on_app_limited(self) -> None:
        """Note that nothing waits to be sent: until the bytes in flight arrive, rates are only lower bounds."""
        self._app_limited_until_bytes = self._delivered_bytes + max(self.bytes_in_flight, 1)

    def on_lost(self, lost_bytes: int) -> None:
        """Account for bytes declared lost."""
        self.bytes_in_flight -= lost_bytes
        self._seen.lost_bytes += lost_bytes
        self.loss_rate += min(1.0, lost_bytes / BURST_MAX_BYTES) * (1.0 - self.loss_rate) / 16

    def on_abandoned(self, abandoned_bytes: int) -> None:
        """Account for bytes whose acknowledgement is not awaited any more."""
        self.bytes_in_flight -= abandoned_bytes

    def share_link(self, paths: int) -> None:
        """Give this path its share of the node's link, on which all ``paths`` may send at once."""
        share_bytes = WINDOW_INITIAL_ALL_BYTES // max(1, paths)
        share_bytes = max(SHARE_MIN_BYTES, min(WINDOW_INITIAL_BYTES, share_bytes))
        self.limit.floor_bytes = min(WINDOW_MIN_BYTES, share_bytes)
        if not self._delivered_bytes and not self.bytes_in_flight:
            self.limit.nbytes = self.window_bytes = self.burst_bytes = share_bytes

    def on_delivered(self, delivered_bytes: int, mark: SendState, now_s: float) -> None:
        """Account for bytes acknowledged now, of which ``mark`` was sent most recently."""
        self.bytes_in_flight -= delivered_bytes
        self._delivered_bytes += delivered_bytes
        self._delivered_at_s = now_s
        self._first_sent_at_s = mark.sent_at_s
        self.loss_rate -= min(1.0, delivered_bytes / BURST_MAX_BYTES) * self.loss_rate / 16
        seen = self._seen
        new_round = mark.delivered_bytes >= seen.ends_at_bytes
        number = seen.number + new_round
        seen.delivered_bytes += delivered_bytes
        seen.longest_s = max(seen.longest_s, self._rtt.latest_s)
        seen.in_flight_bytes = max(seen.in_flight_bytes, mark.in_flight_bytes)
        # Acknowledgements that come in bunches show too high a rate, so the slower of sending and acknowledging counts.
        interval_s = max(now_s - mark.delivered_at_s, mark.sent_at_s - mark.first_sent_at_s)
        if interval_s >= self._rtt.minimum_s > 0.0:  # a shorter interval shows a bunch only
            rate = (self._delivered_bytes - mark.delivered_bytes) / interval_s
            seen.rate_bytes_per_s = max(seen.rate_bytes_per_s, rate)
            if rate >= self.rate_bytes_per_s or not mark.app_limited:
                self.rate_bytes_per_s = windowed_maximum(self._rates, number, rate, span=9)
        if not self.is_starting:
            if now_s - self._gain_since_s > max(self._rtt.minimum_s, PACING_SLACK_S):
                self._gain_index = (self._gain_index + 1) % len(PROBE_GAINS)
                self._gain_since_s = now_s
        elif new_round and (not mark.app_limited or seen.lost_share > 0.1):
            self._notice_full_pipe()
        if new_round:
            self._seen = RoundTrip(now_s, number=number, ends_at_bytes=self._delivered_bytes)
            has_overflowed = self.limit.on_round_trip(seen, self._rtt.minimum_s, now_s)
            if has_overflowed and self.rate_bytes_per_s:
                self.is_starting = False
        self._update_window()
        self._update_pace()

    def _notice_full_pipe(self) -> None:
        """End the start after three rounds without growth, or one with much loss: a queue overflows already."""
        if self.rate_bytes_per_s >= self._full_rate * 1.25:
            self._full_rate = self.rate_bytes_per_s
            self._full_rounds = 0
        else:
            self._full_rounds += 1
            self.is_starting = self._full_rounds < 3 and self._seen.lost_share <= 0.1

    def _update_window(self) -> None:
        rate = self.rate_bytes_per_s
        gain = STARTUP_GAIN if self.is_starting else 2.0
        burst_bytes = max(BURST_MAX_BYTES, rate * BURST_CLEAN_S)
        slack_bytes = min(rate * ACK_DELAY_MAX_S + 2 * burst_bytes, 8 * BURST_MAX_BYTES)
        target_bytes = int(gain * rate * self._rtt.minimum_s + slack_bytes)
        floor_bytes = WINDOW_INITIAL_BYTES if self.is_starting else WINDOW_MIN_BYTES
        self.window_bytes = min(max(floor_bytes, target_bytes), self.limit.nbytes)

    def _update_pace(self) -> None:
        if self.rate_bytes_per_s == 0.0:
            return
        gain = STARTUP_GAIN if self.is_starting else PROBE_GAINS[self._gain_index]
        if gain > 1.0 and not self.is_starting:
            # Without this, a path that loses a fifth of everything could never show a higher rate than before.
            gain /= 1.0 - min(self.loss_rate, LOSS_COMPENSATION_MAX)
        floor = WINDOW_MIN_BYTES / max(self._rtt.smoothed_s, 0.01)
        self._pace = max(self.rate_bytes_per_s * gain, floor)
        burst_bytes = self._pace * BURST_CLEAN_S
        if self.loss_rate >= UNPACED_LOSS:
            burst_bytes = self._pace * BURST_S
            if self._rtt.minimum_s >= 0.008:
                # A millisecond does not matter here; at most ten datagrams (RFC 9002, section 7.7).
                burst_bytes = max(burst_bytes, min(self._pace * 0.001, 14_600))
        self.burst_bytes = int(max(3_000, min(BURST_MAX_BYTES, burst_bytes)))
