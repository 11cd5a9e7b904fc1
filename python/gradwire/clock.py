"""The clock of the exchange and of the Spark integration, which tests replace; waits that last as long as they move."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["POLL_S", "ROOM_POLL_S", "Wait", "now_s", "of_bytes", "repeat", "sleep"]

_LOG = logging.getLogger(__name__)

# Longest wait for messages before a loop checks the connected peers and the clock again.
POLL_S = 0.05

# The same without space to send: acknowledgements arrive within a round trip.
ROOM_POLL_S = 0.001

# Whoever waits longer gets a log entry, and then others at intervals that double up to the longest.
_SHOWN_AFTER_S = 2.0
_SHOWN_EVERY_S = 30.0

now_s = time.perf_counter

sleep = time.sleep


def repeat(work: Callable[[], float | None]) -> None:
    """Call ``work`` in a thread of its own, again after as many seconds as it returns, until it returns None."""

    def run() -> None:
        while (pause_s := work()) is not None:
            time.sleep(pause_s)

    threading.Thread(target=run, name="gradwire-repeat", daemon=True).start()


class Wait:
    """A wait that may last as long as it progresses, and is logged where it lasts longer than two seconds.

    Args:
        what: is waited for, for the log.
        silence_s: longest time without progress.

    Attributes:
        what: as given.
        silence_s: as given, or allowed since.
        progress: how far it was when it was last noted.
    """

    def __init__(self, what: str, silence_s: float) -> None:
        self.what = what
        self.silence_s = silence_s
        self.progress = "nothing yet"
        self._begin_s = self._moved_s = now_s()
        self._shown_s = self._begin_s + _SHOWN_AFTER_S
        self._marker: object = None

    def allow(self, silence_s: float) -> None:
        """Allow another time without progress from now on."""
        self.silence_s = silence_s

    @property
    def is_over(self) -> bool:
        """Whether nothing has moved for too long."""
        return now_s() >= self._moved_s + self.silence_s

    def note(self, marker: object, text: str = "") -> None:
        """Note how far it is.

        Args:
            marker: any value that changes where something has moved.
            text: describes it for the log.
        """
        time_s = now_s()
        self.progress = text or self.progress
        if marker != self._marker:
            self._marker = marker
            self._moved_s = time_s
        if time_s >= self._shown_s:
            elapsed_s = time_s - self._begin_s
            self._shown_s = time_s + min(elapsed_s, _SHOWN_EVERY_S)
            what = f"{self.what}: {text}" if text else self.what
            _LOG.warning("%s, after %.0f s", what, elapsed_s)


def of_bytes(done: int, total: int) -> str:
    """Return how many of so many bytes are done, as text."""
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
