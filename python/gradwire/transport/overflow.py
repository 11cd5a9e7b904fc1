"""How much may be in flight so that no queue on the way overflows.

Loss alone says little: links in the air lose datagrams whatever is sent. Loss while round trips take much longer than
the shortest is that of a full queue. What was in flight less what was lost is then about what the path can hold, and
what arrives per second, times the shortest round trip, is what it needs to be busy.

The rate of delivery cannot tell that: a token bucket lets what it has saved up pass at the speed of the interface, and
the next round trip of a sender that pauses between its messages begins with a full bucket again.

Source: the bound on data in flight after draft-cardwell-iccrg-bbr-congestion-control-02 (``inflight_hi``); slower start
as soon as round trips grow after RFC 9406.
"""

from __future__ import annotations

from typing import Final

QUEUE_S: Final = 0.004  # of waiting: more than a busy receiver or a late timer adds every time
OVERFLOW_SHARE: Final = 0.05
LOST_MIN_BYTES: Final = 4_200  # less than three datagrams may be one that was only late
KEPT_MIN: Final = 0.5  # of the bound, however much was lost
LOSS_COMPENSATION_MAX: Final = 0.3
FIRST_BYTES: Final = 65_536  # with twice as much, 16 senders at once overflow a switch
FIRST_ALL_BYTES: Final = 131_072  # on all paths of a node together
SHARE_MIN_BYTES: Final = 4_200  # three datagrams
FLOOR_BYTES: Final = 16_384
UNBOUNDED_BYTES: Final = 1 << 28

# What a round trip adds to the bound before anything has overflowed, as a share of what it delivered.
GROWTH: Final = 2.0
GROWTH_BRIEF: Final = 0.5  # in so short a time a bucket is not seen to empty
GROWTH_QUEUED: Final = 0.25
BRIEF_S: Final = 0.001
REGROWTH_S: Final = 1.0  # afterwards: of sending without a queue, until it is e times as much


class RoundTrip:
    """What was seen in one round trip.

    Attributes:
        began_at_s: when.
        delivered_bytes: acknowledged.
        lost_bytes: declared lost.
        longest_s: the longest time measured.
        rate_bytes_per_s: the highest rate of delivery.
        in_flight_bytes: the most that was in flight when something left that has arrived.
    """

    __slots__ = (
        "began_at_s",
        "delivered_bytes",
        "in_flight_bytes",
        "longest_s",
        "lost_bytes",
        "rate_bytes_per_s",
    )

    def __init__(self, began_at_s: float) -> None:
        self.began_at_s = began_at_s
        self.delivered_bytes = 0
        self.lost_bytes = 0
        self.longest_s = 0.0
        self.rate_bytes_per_s = 0.0
        self.in_flight_bytes = 0

    @property
    def lost_share(self) -> float:
        """Lost bytes as a share of those lost and delivered."""
        return self.lost_bytes / max(1, self.lost_bytes + self.delivered_bytes)


class Bound:
    """The most that may be in flight on one path.

    Attributes:
        bytes: the bound.
        rate_bytes_per_s: the highest rate of delivery in the last two round trips.
    """

    __slots__ = ("_before", "_floor_bytes", "_has_overflowed", "bytes", "rate_bytes_per_s")

    def __init__(self) -> None:
        self.bytes = FIRST_BYTES
        self.rate_bytes_per_s = 0.0
        self._floor_bytes = FLOOR_BYTES
        self._has_overflowed = False
        self._before = RoundTrip(0.0)

    def share(self, paths: int, *, is_first: bool) -> None:
        """Take note of how many paths leave this node: they share its link, and may all be used at once.

        Args:
            paths: that many.
            is_first: nothing has been sent on this path yet.
        """
        share_bytes = max(SHARE_MIN_BYTES, min(FIRST_BYTES, FIRST_ALL_BYTES // max(1, paths)))
        self._floor_bytes = min(FLOOR_BYTES, share_bytes)
        if is_first:
            self.bytes = share_bytes

    def on_round_trip(self, last: RoundTrip, shortest_s: float, now_s: float) -> bool:
        """Learn from a round trip that is over; return whether a queue has overflowed.

        Args:
            last: what was seen in it.
            shortest_s: the shortest round trip of the path.
            now_s: current time.
        """
        before, self._before = self._before, last
        # What is lost in one round trip may have been sent into the queue of the one before.
        in_flight_bytes = max(before.in_flight_bytes, last.in_flight_bytes)
        self.rate_bytes_per_s = max(before.rate_bytes_per_s, last.rate_bytes_per_s)
        is_queued = max(before.longest_s, last.longest_s) > shortest_s + QUEUE_S
        is_lossy = last.lost_bytes >= LOST_MIN_BYTES and last.lost_share > OVERFLOW_SHARE
        if is_queued and is_lossy:
            self._cut(min(in_flight_bytes, self.bytes), last.lost_share, shortest_s)
            return True
        if 2 * in_flight_bytes >= self.bytes:
            self._grow(last, shortest_s, is_queued, now_s)
        return False

    def _cut(self, held_bytes: int, lost_share: float, shortest_s: float) -> None:
        self._has_overflowed = True
        arriving = 1.0 - min(lost_share, LOSS_COMPENSATION_MAX)
        needed_bytes = self.rate_bytes_per_s * (shortest_s + QUEUE_S) / arriving
        fitting_bytes = held_bytes * max(KEPT_MIN, 1.0 - lost_share)
        kept_bytes = max(fitting_bytes, min(needed_bytes, held_bytes))
        self.bytes = max(int(kept_bytes), self._floor_bytes)

    def _grow(self, last: RoundTrip, shortest_s: float, is_queued: bool, now_s: float) -> None:
        if not self._has_overflowed:
            free_share = GROWTH if shortest_s >= BRIEF_S else GROWTH_BRIEF
            share = GROWTH_QUEUED if is_queued else free_share
            grown_bytes = self.bytes + int(share * last.delivered_bytes)
        elif not is_queued:
            # What lasted longer than the round trips in it was a pause.
            sending_s = min(now_s - last.began_at_s, 2 * last.longest_s, REGROWTH_S)
            grown_bytes = self.bytes + int(self.bytes * sending_s / REGROWTH_S)
        else:
            return
        self.bytes = min(grown_bytes, UNBOUNDED_BYTES)
