"""How long it takes until an answer comes, and so when to give up waiting for one.

Source: RFC 9002 (estimation, probe timeout).
"""

from __future__ import annotations

from typing import Final

RTT_INITIAL_S: Final = 0.1
RTT_VARIATION_FLOOR_S: Final = 0.001  # the timers of a busy machine are no better
ACK_DELAY_MAX_S: Final = 0.001
# Of a round trip in the middle of a message, which goes on anyway: over a slow link each datagram comes alone.
ACK_DELAY_SHARE: Final = 1 / 8
ACK_DELAY_FAR_MAX_S: Final = 0.004
FAR_S: Final = ACK_DELAY_MAX_S / ACK_DELAY_SHARE  # from here on that share is the longer wait
LOSS_DELAY_FLOOR_S: Final = 0.0005
PTO_MAX_S: Final = 1.0
MIN_RTT_WINDOW_S: Final = 10.0


def ack_delay_s(round_trip_s: float, least_s: float = ACK_DELAY_MAX_S) -> float:
    """Return how long a receiver may wait before it acknowledges what came over a path with this round trip."""
    return max(least_s, min(ACK_DELAY_SHARE * round_trip_s, ACK_DELAY_FAR_MAX_S))


class RttEstimator:
    """Smoothed round-trip time, its variation, and the minimum of the last ten seconds.

    Args:
        is_overtaken: what is sent later by a quicker way can overtake. Its acknowledgement says nothing about what goes
            the slower way, and that way's own may be held back: nothing counts as lost before.

    Attributes:
        shortest_s: the shortest that was ever measured; 0 before that.
    """

    def __init__(self, *, is_overtaken: bool = False) -> None:
        self.is_overtaken = is_overtaken
        self.smoothed_s = 0.0
        self.variation_s = 0.0
        self.latest_s = 0.0
        self.minimum_s = 0.0
        self.shortest_s = 0.0
        self._minimum_at_s = 0.0
        self._next_s = self._next_at_s = 0.0  # the next smallest, which will follow it
        self._is_guess = False

    def set_guess(self, sample_s: float, now_s: float) -> None:
        """Take a time that may be too long, because it is not known which of several datagrams was answered."""
        if self.smoothed_s == 0.0:
            self.add_sample(sample_s, now_s)
            self._is_guess = True
            self.shortest_s = 0.0

    def add_sample(self, sample_s: float, now_s: float) -> None:
        """Take one measured round trip."""
        sample_s = max(sample_s, 1e-6)
        self.latest_s = sample_s
        if self.smoothed_s == 0.0 or self._is_guess:
            self._is_guess = False
            self.smoothed_s, self.variation_s = sample_s, sample_s / 2
            self._set_minimum(sample_s, now_s)
            return
        self.variation_s += (abs(self.smoothed_s - sample_s) - self.variation_s) / 4
        self.smoothed_s += (sample_s - self.smoothed_s) / 8
        if sample_s <= self.minimum_s:
            self._set_minimum(sample_s, now_s)
        else:
            self._look_for_next_minimum(sample_s, now_s)

    def _set_minimum(self, sample_s: float, at_s: float) -> None:
        self.shortest_s = min(self.shortest_s or sample_s, sample_s)
        self.minimum_s, self._minimum_at_s = sample_s, at_s
        self._next_s = float("inf")

    def _look_for_next_minimum(self, sample_s: float, now_s: float) -> None:
        """Have another one ready when the minimum is too old: what comes just then may be that of a full queue."""
        if sample_s <= self._next_s or now_s - self._next_at_s > MIN_RTT_WINDOW_S / 2:
            self._next_s, self._next_at_s = sample_s, now_s
        if now_s - self._minimum_at_s > MIN_RTT_WINDOW_S:
            self._set_minimum(self._next_s, self._next_at_s)

    @property
    def is_far(self) -> bool:
        """Whether no round trip was ever so short that a millisecond would matter."""
        return self.shortest_s >= FAR_S

    @property
    def probe_timeout_s(self) -> float:
        """How long to wait for an acknowledgement before probing."""
        if self.smoothed_s == 0.0:
            return 2 * RTT_INITIAL_S
        variation_s = max(4 * self.variation_s, RTT_VARIATION_FLOOR_S)
        return self.smoothed_s + variation_s + ack_delay_s(self.smoothed_s)

    @property
    def first_probe_timeout_s(self) -> float:
        """The same for the first probe, which may be one too many: no more than two round trips.

        Where queues fill and empty again the variation is a multiple of the round trip, and a lost tail would wait for
        all of it. Source: RFC 8985, section 7.2.
        """
        if self.smoothed_s == 0.0:
            return self.probe_timeout_s
        most_s = self.smoothed_s + max(self.smoothed_s, RTT_VARIATION_FLOOR_S) + ACK_DELAY_MAX_S
        return min(self.probe_timeout_s, most_s)

    @property
    def loss_delay_s(self) -> float:
        """How long after its sending a fragment counts as lost, once something sent later has arrived."""
        tolerated_s = max(
            1.125 * max(self.smoothed_s, self.latest_s), self.smoothed_s + 2 * self.variation_s
        )
        slack_s = ack_delay_s(self.smoothed_s) if self.is_overtaken else 0.0
        return max(tolerated_s, LOSS_DELAY_FLOOR_S) + slack_s
