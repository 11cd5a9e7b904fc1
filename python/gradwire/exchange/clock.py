"""The exchange's only clock, so that a test can put another in its place."""

from __future__ import annotations

import time

__all__ = ["POLL_S", "now_s"]

# How long one wait for messages lasts before a loop looks at the peers and the clock again.
POLL_S = 0.05


def now_s() -> float:
    """Return seconds on a clock that never goes back."""
    return time.perf_counter()
