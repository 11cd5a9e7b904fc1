"""The exchange's only clock, so that a test can put another in its place."""

from __future__ import annotations

import time

__all__ = ["now_s"]


def now_s() -> float:
    """Return seconds on a clock that never goes back."""
    return time.perf_counter()
