"""How fast to send: a rate controller that tolerates loss.

Loss on a wireless or long-distance link says nothing about congestion, and a controller that halves on every loss gets
about 9 Mbit/s at 1 % loss and 20 ms. This one measures what the path delivers: it paces at the highest delivery rate
seen lately and keeps about two bandwidth-delay products in flight.

Source: draft-cardwell-iccrg-bbr-congestion-control-00 and draft-cheng-iccrg-delivery-rate-estimation-00, from which the
four phases and the delivery-rate sample are taken.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from .overflow import FIRST_BYTES, LOSS_COMPENSATION_MAX, Bound, RoundTrip
from .round_trips import RttEstimator, ack_delay_s
from .wire import BURST_BYTES_MAX, RECORD_BURSTS_MAX

WINDOW_INITIAL_BYTES: Final = FIRST_BYTES  # one burst
WINDOW_MIN_BYTES: Final = 16_384
UNPACED_LOSS: Final = 0.01
WINDOW_MAX_BYTES: Final = 1 << 28
BURST_MIN_BYTES: Final = 3_000
BURST_MAX_BYTES: Final = 65_536
RECORD_MAX_BYTES: Final = RECORD_BURSTS_MAX * BURST_BYTES_MAX
BURST_S: Final = 0.0005  # of the path's rate in one burst: less than the queue of a switch
# Over a long way up to a whole millisecond's worth, but no more than ten datagrams (RFC 9002, section 7.7).
BURST_FAR_S: Final = 0.001
BURST_FAR_BYTES: Final = 14_600
BURST_CLEAN_S: Final = (
    0.004  # on a path that loses nothing, where larger bursts save processor time
)
BURST_LOCAL_S: Final = 0.01  # within one machine, where only the receiver's buffer has to hold it
SLACK_MAX_BYTES: Final = 8 * BURST_MAX_BYTES
# Within one machine nothing but the receiver's buffer holds what is under way: so much of it keeps both ends busy while
# either waits for a processor.
LOCAL_SLACK_SHARE: Final = 0.375
# A buffer within one machine that holds more than is sent elsewhere.
ROOMY_BYTES: Final = SLACK_MAX_BYTES / LOCAL_SLACK_SHARE
# Within a machine no round trip takes so long, even of a busy one hardly every single one does: there is an emulated
# link or a tunnel in between, with a queue.
LOCAL_ROUND_TRIP_MAX_S: Final = 0.01
OVERDRAFT_WINDOW_BYTES: Final = 2 * BURST_MAX_BYTES
PACING_SLACK_S: Final = 0.001  # what a late timer may catch up with at once

STARTUP_GAIN: Final = 2.885  # 2 / ln 2: doubles the delivery rate every round trip
DRAIN_GAIN: Final = 1 / 2.885
PROBE_GAINS: Final = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
STEADY_PHASE: Final = 2
WINDOW_GAIN: Final = 2.0
RATE_FILTER_ROUNDS: Final = 10
FULL_GROWTH: Final = 1.25
FULL_ROUNDS: Final = 3
OVERFLOW_LOSS: Final = 0.1
OVERRATED: Final = 2.0


class Sent:
    """One transmission, and the state of delivery when it left: an acknowledgement of it turns that into a rate sample.

    Attributes:
        order: which of all to the peer it is.
        mask: the fragments of its record that are still unaccounted for.
        is_carried: whether a carrier brings it, and so perhaps a relay.
    """

    __slots__ = (
        "app_limited",
        "delivered_at_s",
        "delivered_bytes",
        "first_sent_at_s",
        "in_flight_bytes",
        "is_carried",
        "mask",
        "order",
        "sent_at_s",
    )

    def __init__(
        self,
        order: int,
        mask: int,
        sent_at_s: float,
        delivered_bytes: int,
        delivered_at_s: float,
        first_sent_at_s: float,
        app_limited: bool,
        in_flight_bytes: int,
        is_carried: bool,
    ) -> None:
        self.order = order
        self.mask = mask
        self.sent_at_s = sent_at_s
        self.delivered_bytes = delivered_bytes
        self.delivered_at_s = delivered_at_s
        self.first_sent_at_s = first_sent_at_s
        self.app_limited = app_limited
        self.in_flight_bytes = in_flight_bytes
        self.is_carried = is_carried

    def copy(self, order: int, mask: int) -> Sent:
        """Return the books of one of several records that left together."""
        return Sent(
            order,
            mask,
            self.sent_at_s,
            self.delivered_bytes,
            self.delivered_at_s,
            self.first_sent_at_s,
            self.app_limited,
            self.in_flight_bytes,
            self.is_carried,
        )


class GainCycle:
    """Which of the probing gains is in force.

    Every path has one of its own. Those that a carrier serves together share one: what they get at the same time has to
    probe at the same time, or there would always be one at 0.75 that holds up the others.

    Attributes:
        floor_s: a phase lasts at least this long; of a shared cycle the longest round trip.
        full_rate: the rate at which a path was found full; 0 before that. Those that share it and have seen about as
            much need not overflow anything to find out by themselves.
    """

    __slots__ = ("_index", "_since_s", "floor_s", "full_rate")

    def __init__(self, floor_s: float = 0.0) -> None:
        self.floor_s = floor_s
        self.full_rate = 0.0
        self._index = STEADY_PHASE
        self._since_s = 0.0

    @property
    def gain(self) -> float:
        """The gain of this phase."""
        return PROBE_GAINS[self._index]

    def restart(self, now_s: float) -> None:
        """Begin with a steady phase."""
        self._index, self._since_s = STEADY_PHASE, now_s

    def advance(self, round_trip_s: float, now_s: float) -> None:
        """Go on to the next phase if this one has lasted a round trip."""
        if now_s - self._since_s > max(round_trip_s, self.floor_s, PACING_SLACK_S):
            self._index = (self._index + 1) % len(PROBE_GAINS)
            self._since_s = now_s


class RateController:
    """Window and pace of one path.

    Attributes:
        cycle: the gains with which it probes.
        bound: the most that may be in flight, as far as queues on the way go.
        bytes_in_flight: sent and neither acknowledged nor given up.
        window_bytes: the most that may be in flight.
        burst_bytes: how much may leave at once: half a millisecond's worth, over a long way a whole one's up to ten
            datagrams; without loss four, up to one system call's worth, and ten, up to one record, within one machine,
            where no switch has to queue it.
        is_local: whether the peer's address is one of this machine.
        local_buffer_bytes: what the receiver's socket holds if it is on this machine; 0 if that is not known.
    """

    def __init__(self, rtt: RttEstimator) -> None:
        self._rtt = rtt
        self.cycle = GainCycle()
        self.bound = Bound()
        self.bytes_in_flight = 0
        self.window_bytes = WINDOW_INITIAL_BYTES
        self.burst_bytes = BURST_MAX_BYTES
        self.is_local = False
        self.local_buffer_bytes = 0
        self.loss_rate = 0.0
        self._delivered_bytes = 0
        self._delivered_at_s = 0.0
        self._first_sent_at_s = 0.0
        self._app_limited_until_bytes = 0
        self._round = 0
        self._round_ends_at_bytes = 0
        self._rates: deque[tuple[int, float]] = deque()
        self._phase = "startup"
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

    @property
    def _is_near(self) -> bool:
        """Whether there is nothing between here and the receiver's socket, on this machine."""
        return self.is_local and self._rtt.shortest_s < LOCAL_ROUND_TRIP_MAX_S

    @property
    def _is_roomy(self) -> bool:
        """Whether there is nothing in between and the receiver's socket holds more than is sent elsewhere."""
        return (
            self._is_near
            and self.local_buffer_bytes > ROOMY_BYTES
            and self.loss_rate < UNPACED_LOSS
        )

    @property
    def free_bytes(self) -> int:
        """What may leave now where only the window limits it, a receiver on this machine; elsewhere 0."""
        if self.burst_bytes < RECORD_MAX_BYTES or not self._is_roomy:
            return 0
        return max(0, self.window_bytes - self.bytes_in_flight)

    def room_bytes(self, now_s: float) -> int:
        """Return how much may leave now; 0 if nothing may."""
        window = self.window_bytes
        room = window - self.bytes_in_flight
        if room <= 0:
            return 0
        # Nobody but a roomy receiver queues what is sent to it, and each piece would cost a wake-up.
        if (
            self._next_send_at_s > now_s
            and not self._is_roomy
            and (self.send_allowed_at_s() or 0.0) > now_s
        ):
            return 0
        # A window of several bursts may be overdrawn by a part of one: halves cost as much as wholes.
        if room < BURST_MAX_BYTES and window >= OVERDRAFT_WINDOW_BYTES:
            room = BURST_MAX_BYTES
        return room if room < self.burst_bytes else self.burst_bytes

    def use_round_trips(self, rtt: RttEstimator) -> None:
        """Take the round trips from another estimator: the data goes another way now."""
        self._rtt = rtt

    def send_allowed_at_s(self) -> float | None:
        """Return when the next burst may leave, in the past if at once; None until something is acknowledged."""
        if self.bytes_in_flight >= self.window_bytes:
            return None
        if self._is_roomy:
            return 0.0
        if self._delivered_bytes < self._app_limited_until_bytes:
            # A sender of small messages measures only its own rate; pacing it by that would slow it down for nothing.
            unpaced = WINDOW_INITIAL_BYTES if self.loss_rate < UNPACED_LOSS else WINDOW_MIN_BYTES
            if self.bytes_in_flight < unpaced:
                return 0.0
        return self._next_send_at_s

    def on_sent(
        self,
        sent_bytes: int,
        now_s: float,
        order: int = 0,
        mask: int = 0,
        is_carried: bool = False,
    ) -> Sent:
        """Account for a burst that leaves now: the one with this order, of the fragments in ``mask``."""
        in_flight_bytes = self.bytes_in_flight
        delivered_bytes = self._delivered_bytes
        if in_flight_bytes == 0:
            self._first_sent_at_s = self._delivered_at_s = now_s
        self.bytes_in_flight = in_flight_bytes = in_flight_bytes + sent_bytes
        if self._pace > 0.0 and not self._is_roomy:
            # What was let through without regard to the pace is not paid for by a pause later.
            earliest_s = min(max(self._next_send_at_s, now_s - PACING_SLACK_S), now_s)
            self._next_send_at_s = earliest_s + sent_bytes / self._pace
        return Sent(
            order,
            mask,
            now_s,
            delivered_bytes,
            self._delivered_at_s,
            self._first_sent_at_s,
            delivered_bytes < self._app_limited_until_bytes,
            in_flight_bytes,
            is_carried,
        )

    def on_app_limited(self) -> None:
        """Note that there is nothing more to send: rates measured until this is delivered are only lower bounds."""
        self._app_limited_until_bytes = self._delivered_bytes + max(self.bytes_in_flight, 1)

    def on_lost(self, lost_bytes: int) -> None:
        """Account for bytes declared lost."""
        self.bytes_in_flight -= lost_bytes
        self._seen.lost_bytes += lost_bytes
        self.loss_rate += min(1.0, lost_bytes / BURST_MAX_BYTES) * (1.0 - self.loss_rate) / 16

    def share_link(self, paths: int) -> None:
        """Take note of how many paths leave this node; those within the machine share nothing."""
        if not self._is_near:
            is_first = not self._delivered_bytes and not self.bytes_in_flight
            self.bound.share(paths, is_first=is_first)
            if is_first:
                self.window_bytes = self.burst_bytes = self.bound.bytes

    def _learn_from_round_trip(self, now_s: float) -> None:
        seen = self._seen
        if self._is_near:
            seen.lost_bytes = seen.delivered_bytes = 0
            return
        self._seen = RoundTrip(now_s)
        if self.bound.on_round_trip(seen, self._rtt.minimum_s, now_s):
            self._on_overflow(now_s)

    def _on_overflow(self, now_s: float) -> None:
        """Forget a rate that was only that of a burst, and start no more."""
        rate = self.bound.rate_bytes_per_s
        if 0.0 < rate * OVERRATED < self.rate_bytes_per_s:
            self._rates.clear()
            self._rates.append((self._round, rate))
        if self._phase == "startup" and self._rates:
            self._phase = "probe"
            self.cycle.full_rate = self.rate_bytes_per_s
            self.cycle.restart(now_s)

    def on_abandoned(self, abandoned_bytes: int) -> None:
        """Account for bytes that nobody waits for any more."""
        self.bytes_in_flight -= abandoned_bytes

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
            if rate > seen.rate_bytes_per_s:
                seen.rate_bytes_per_s = rate
        if not self._is_near:
            seen.longest_s = max(seen.longest_s, self._rtt.latest_s)
            seen.in_flight_bytes = max(seen.in_flight_bytes, mark.in_flight_bytes)
        self._advance_phase(new_round, mark.app_limited, now_s)
        if new_round:
            self._learn_from_round_trip(now_s)
        self._update_window()
        self._pace = self._pacing_rate()
        if self._pace > 0.0:
            self.burst_bytes = int(max(BURST_MIN_BYTES, min(RECORD_MAX_BYTES, self._burst())))

    def _burst(self) -> float:
        is_clean = self.loss_rate < UNPACED_LOSS
        if is_clean and self._is_near:
            burst = self._pace * BURST_LOCAL_S
            # However slowly a busy machine takes it: several small calls cost it as much as so many large ones.
            return max(burst, BURST_MAX_BYTES) if self._is_roomy else burst
        burst = self._pace * (BURST_CLEAN_S if is_clean else BURST_S)
        if not is_clean and self._rtt.is_far:
            burst = max(burst, min(self._pace * BURST_FAR_S, BURST_FAR_BYTES))
        # More than one system call's worth only where that passes in half a millisecond.
        return min(burst, max(BURST_MAX_BYTES, self.rate_bytes_per_s * BURST_S))

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
                self.cycle.full_rate = self.rate_bytes_per_s
            elif 0.0 < self.cycle.full_rate <= self.rate_bytes_per_s * FULL_GROWTH:
                self._phase = "drain"
        elif self._phase == "drain":
            if self.bytes_in_flight <= self._bandwidth_delay_bytes():
                self._phase = "probe"
                self.cycle.restart(now_s)
        else:
            self.cycle.advance(self._rtt.minimum_s, now_s)

    def _is_pipe_full(self) -> bool:
        if self.rate_bytes_per_s >= self._full_rate * FULL_GROWTH:
            self._full_rate, self._full_rounds = self.rate_bytes_per_s, 0
            return False
        # No growth and much loss: the queue at the bottleneck overflows already.
        self._full_rounds += FULL_ROUNDS if self._seen.lost_share > OVERFLOW_LOSS else 1
        return self._full_rounds >= FULL_ROUNDS

    def _update_window(self) -> None:
        gain = STARTUP_GAIN if self._phase == "startup" else WINDOW_GAIN
        # Acknowledgements come late and a whole burst at a time.
        late_bytes = self.rate_bytes_per_s * ack_delay_s(self._rtt.minimum_s)
        slack = late_bytes + 2 * max(self.burst_bytes, BURST_MAX_BYTES)
        most = LOCAL_SLACK_SHARE * self.local_buffer_bytes if self._is_roomy else SLACK_MAX_BYTES
        target = int(gain * self._bandwidth_delay_bytes() + min(slack, most))
        floor = WINDOW_INITIAL_BYTES if self._phase == "startup" else WINDOW_MIN_BYTES
        self.window_bytes = max(floor, min(target, WINDOW_MAX_BYTES))
        if not self._is_near:
            self.window_bytes = min(self.window_bytes, self.bound.bytes)

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
            gain = self.cycle.gain
            if gain > 1.0:
                # Without this, a path that loses a fifth of everything could never show a higher rate than before.
                gain /= 1.0 - min(self.loss_rate, LOSS_COMPENSATION_MAX)
        floor = WINDOW_MIN_BYTES / max(self._rtt.smoothed_s, 0.01)
        return max(rate * gain, floor)
