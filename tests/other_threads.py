"""Whether a call lets other threads of Python run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def lets_others_run(call: Callable[[], object]) -> bool:
    """Return whether another thread could run while a call took place."""
    begin = threading.Lock()
    begin.acquire()
    calls: list[int] = []

    def note() -> None:
        with begin:
            calls.append(1)

    other = threading.Thread(target=note)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # from here on the other thread runs only while this one lets it
    try:
        begin.release()
        call()
        return bool(calls)
    finally:
        sys.setswitchinterval(interval)
        other.join()
