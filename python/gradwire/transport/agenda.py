"""Who has something to do next, and when: asked at every wake-up, so it must not look at everybody."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

NEVER_S: Final = float("inf")
STALE_SHARE_MAX: Final = 4
STALE_MIN: Final = 64


class Agenda:
    """A time for each of a number of sessions, the earliest first.

    A time that is replaced stays in the heap until it comes up or there are too many of them.
    """

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, index: int, at_s: float) -> None:
        """Wake this session at this time instead of the one set before."""
        if self._at_s.get(index) == at_s:
            return
        self._at_s[index] = at_s
        heappush(self._heap, (at_s, index))
        if len(self._heap) > STALE_MIN + STALE_SHARE_MAX * len(self._at_s):
            self._heap = [(at_s, index) for index, at_s in self._at_s.items()]
            heapify(self._heap)

    def drop(self, index: int) -> None:
        """Do not wake this session any more."""
        self._at_s.pop(index, None)

    def next_at_s(self) -> float:
        """Return the earliest time; infinity if there is none."""
        heap, times = self._heap, self._at_s
        while heap:
            at_s, index = heap[0]
            if times.get(index) == at_s:
                return at_s
            heappop(heap)
        return NEVER_S

    def take_due(self, now_s: float) -> list[int]:
        """Return and forget the sessions whose time has come, the earliest first; each sets its next time itself."""
        due = []
        while self.next_at_s() <= now_s:
            _, index = heappop(self._heap)
            del self._at_s[index]
            due.append(index)
        return due
