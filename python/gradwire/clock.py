"""The clock of the exchange and of Spark, which tests replace; waits that are shown, and log entries at intervals."""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

__all__ = [
    "LOG_INTERVAL_S",
    "POLL_S",
    "ROOM_POLL_S",
    "LogLimit",
    "Wait",
    "bounded_s",
    "now_s",
    "of_bytes",
    "repeat",
    "shown",
    "sleep",
]

Item = TypeVar("Item")

_LOG = logging.getLogger(__name__)

# Longest wait for messages before a loop checks the connected peers and the clock again.
POLL_S = 0.05

# The same without space to send: acknowledgements arrive within a round trip.
ROOM_POLL_S = 0.001

# Whoever waits longer gets a line on the terminal, or a log entry and then others at intervals that double up to the
# longest.
_SHOWN_AFTER_S = 2.0
_SHOWN_EVERY_S = 30.0
_REDRAWN_EVERY_S = 0.25

LOG_INTERVAL_S = 10.0  # between entries that every message of a peer may cause
# Senders and texts whose entries are counted: a peer that is started again is another sender.
_LOG_ENTRIES_MAX = 1_024

now_s = time.perf_counter

sleep = time.sleep


def bounded_s(timeout_s: float | None) -> float:
    """Return how long a thread is told to wait: it refuses infinity, which means "for ever", as None does."""
    return threading.TIMEOUT_MAX if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)


def repeat(work: Callable[[], float | None]) -> None:
    """Call ``work`` in a thread of its own, again after as many seconds as it returns, until it returns None."""

    def run() -> None:
        while (pause_s := work()) is not None:
            time.sleep(pause_s)

    threading.Thread(target=run, name="gradwire-repeat", daemon=True).start()


class Wait:
    """A wait that may last as long as it progresses, and is shown where it lasts longer than two seconds.

    On a terminal, if rich is installed, a line that moves shows how far it is, until the wait is over. Elsewhere the
    log does.

    Args:
        what: is waited for, to be shown.
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
        self._line: Any = None  # of rich

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
            text: describes it, to be shown.
        """
        time_s = now_s()
        self.progress = text or self.progress
        if marker != self._marker:
            self._marker = marker
            self._moved_s = time_s
        if time_s >= self._shown_s:
            elapsed_s = time_s - self._begin_s
            what = f"{self.what}: {text}" if text else self.what
            what += f", after {elapsed_s:.0f} s"
            if self._line is None and (line := _line_on_terminal()):
                self._line = line
                # The wait is over when its caller has returned, or has handled the error that it raised.
                weakref.finalize(self, line.stop)
            if self._line is not None:
                self._shown_s = time_s + _REDRAWN_EVERY_S
                self._line.update(what, refresh=True)
            else:
                self._shown_s = time_s + min(elapsed_s, _SHOWN_EVERY_S)
                _LOG.warning("%s", what)


def shown(what: str, arrays: Iterable[Item], count: int) -> Iterator[Item]:
    """Yield the arrays, so many, and show how many of them the caller is done with, as a `Wait` does."""
    wait = Wait(what, math.inf)
    for index, array in enumerate(arrays):
        wait.note(index, f"{index} of {count} arrays")
        yield array


def _line_on_terminal() -> Any:
    """Begin a line that moves, below what the process prints; None: there is no terminal, rich, or wish for it."""
    if not (
        _LOG.isEnabledFor(logging.WARNING)
        and sys.stderr is not None
        and sys.stderr.isatty()
        and importlib.util.find_spec("rich")
    ):
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    line = Live(console=console, transient=True, auto_refresh=False)
    line.start()
    return line


class LogLimit:
    """Log entries that every message of a peer may cause: the first, and then one in ten seconds with their number.

    Args:
        write: method of a logger, such as ``logger.warning``.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        # By sender and text: the time of the next entry, and how many were left out since the last.
        self._entries: dict[tuple[Hashable, str], tuple[float, int]] = {}

    def log(self, sender: Hashable, time_s: float, text: str, *values: object) -> None:
        """Write an entry unless this sender has caused one with this text (before formatting) shortly before."""
        key = (sender, text)
        due_s, left_out = self._entries.pop(key, (-math.inf, 0))
        if time_s < due_s:
            self._entries[key] = (due_s, left_out + 1)
            return
        if len(self._entries) >= _LOG_ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]  # the one that was quiet for longest
        self._entries[key] = (time_s + LOG_INTERVAL_S, 0)
        if left_out:
            text += " (%d more of these since the last entry)"
            values = (*values, left_out)
        self._write(text, *values, stacklevel=2)


def of_bytes(done: int, total: int) -> str:
    """Return how many of so many bytes are done, as text."""
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
