"""Paths on which somebody spoils records: one changed fragment makes a whole record fail its tag.

The receiver notices and says so; the sender then uses records of one datagram for a while, so that each changed
datagram costs one datagram.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FAILURES: Final = 3
FAILURES_WITHIN_S: Final = 10.0
SAY_AGAIN_S: Final = 0.2
SINGLE_S: Final = 60.0


class PoisonWatch:
    """Counts records of one peer that failed their tags.

    Attributes:
        is_due: the peer is to be told now.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._failed_at_s: deque[float] = deque(maxlen=FAILURES)
        self._said_at_s = float("-inf")

    def on_failure(self, now_s: float) -> None:
        """Note a failure; the third within ten seconds makes it due, as does every later one while they go on."""
        self._failed_at_s.append(now_s)
        is_poisoned = (
            len(self._failed_at_s) == FAILURES and now_s - self._failed_at_s[0] <= FAILURES_WITHIN_S
        )
        if is_poisoned and now_s - self._said_at_s >= SAY_AGAIN_S:
            self._said_at_s = now_s
            self.is_due = True
