"""The clock of the exchange and of the Spark integration, which tests replace."""

from __future__ import annotations

import time

__all__ = ["POLL_S", "ROOM_POLL_S", "now_s", "sleep"]

# Longest wait for messages before a loop checks the connected peers and the clock again.
POLL_S = 0.05

# The same without space to send: acknowledgements arrive within a round trip.
ROOM_POLL_S = 0.001

now_s = time.perf_counter

sleep = time.sleep
