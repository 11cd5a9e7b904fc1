"""Ctrl-C in the middle of a step: it waits until the step has ended, or waits itself for others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["held_back", "let_through"]


class _Interrupt:
    """What SIGINT does outside `held_back`, and the frame of the one that is held back."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.frames: list[Any] = []

    def hold(self, number: int, frame: Any) -> None:
        """Handle SIGINT: the first one waits; whoever sends a second one does not want to wait."""
        if self.frames:
            self.handler(number, frame)
        else:
            self.frames.append(frame)

    def release(self) -> None:
        """Handle the one that waits, if any."""
        if self.frames:
            frame = self.frames.pop()
            self.handler(signal.SIGINT, frame)


_INTERRUPT = _Interrupt()
_HOLD = _INTERRUPT.hold  # the same object every time, by which it is recognised


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, or until `let_through`; a second one is handled at once.

    A `KeyboardInterrupt` may come between any two calls. Between those that send an update, or add the others', it
    would leave a step half done, which the next call could neither finish nor take back. Only the main thread gets
    signals: in others this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler) or handler is _HOLD:
        yield
        return
    _INTERRUPT.handler = handler
    signal.signal(signal.SIGINT, _HOLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _INTERRUPT.release()


def let_through() -> None:
    """Handle a SIGINT that is held back: nothing is half done here, and the caller is about to wait for others."""
    if _INTERRUPT.frames and threading.current_thread() is threading.main_thread():
        _INTERRUPT.release()
