"""How large the datagrams to one peer may be: found out by sending some, never by believing what routers say.

A size is proved by a padded PING that is answered, or by data of that size that is acknowledged. It counts as refused
after three probes without an answer while small datagrams sent along with them were answered.

Source: RFC 8899 (Datagram Packetization Layer Path MTU Discovery), sections 4 and 5; the search climbs a ladder of the
sizes that real networks have instead of halving intervals.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Final

# All sizes are UDP payload bytes.
BASE_BYTES: Final = 1_200  # passes wherever IPv6 is allowed to pass
HEADERS_IPV4: Final = 28
HEADERS_IPV6: Final = 48
ETHERNET_MTU: Final = 1_500
# IPv6's minimum, the default, Ethernet under IPv6 and IPv4, jumbo frames under IPv6 and IPv4.
RUNGS: Final = (1_232, 1_400, 1_452, 1_472, 8_952, 8_972)
PROBES_MAX: Final = 3
PROBE_TIMEOUT_MIN_S: Final = 0.05
PROBE_TIMEOUT_MAX_S: Final = 5.0  # a pause can leave a round trip of a minute behind
SEARCH_AGAIN_S: Final = 600.0
LARGE_LOST_MAX: Final = 3
UNLIMITED: Final = float("inf")


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, where larger datagrams gain nothing (7.1 GB/s at 1,400 bytes, 4.9 at 8,900)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ceiling_bytes(host: str, interface_mtu: int | None) -> int:
    """Return the largest datagram worth trying: Ethernet's, or the interface's where that is known."""
    headers = HEADERS_IPV6 if ":" in host else HEADERS_IPV4
    return (ETHERNET_MTU if interface_mtu is None else interface_mtu) - headers


class LargeLosses:
    """Counts the losses in a row of datagrams that are larger than what always passes.

    One that arrives ends the row if it is no smaller than all that were lost.
    """

    def __init__(self) -> None:
        self._count = 0
        self._smallest_bytes: float = UNLIMITED
        self._delivered_bytes = 0

    def on_lost(self, nbytes: int) -> None:
        """A datagram of this size was lost."""
        self._count += 1
        self._smallest_bytes = min(self._smallest_bytes, nbytes)

    def on_delivered(self, nbytes: int) -> None:
        """A datagram of this size arrived."""
        self._delivered_bytes = max(self._delivered_bytes, nbytes)
        if nbytes >= self._smallest_bytes:
            self._count, self._smallest_bytes = 0, UNLIMITED

    def is_hole_likely(self) -> bool:
        """Whether so many were lost that the size is in doubt; the row begins again then."""
        if self._count < LARGE_LOST_MAX:
            return False
        self._count, self._smallest_bytes, self._delivered_bytes = 0, UNLIMITED, 0
        return True

    def take_delivered(self) -> int:
        """Return the size of the largest datagram that arrived since the last call; 0 if none did."""
        nbytes, self._delivered_bytes = self._delivered_bytes, 0
        return nbytes


class PathMtu:
    """What is known about one path, and which size to probe next.

    Three things can be going on: the size in use is being confirmed, a larger one is being tried, or neither until it
    is time to search again.

    Args:
        start_bytes: size to begin with, before anything is known.
        ceiling: returns the largest size worth trying; asked at the beginning of each search.
        now_s: current time.

    Attributes:
        size_bytes: datagrams of this size pass, as far as is known.
        due_at_s: when `poll` has something to do.
    """

    def __init__(self, start_bytes: int, ceiling: Callable[[], int], now_s: float) -> None:
        self.size_bytes = start_bytes
        self.due_at_s = now_s
        self._base_bytes = min(BASE_BYTES, start_bytes)
        self._rungs = sorted({*RUNGS, start_bytes})
        self._ceiling = ceiling
        self._ceiling_bytes = ceiling()
        self._refused_bytes: float = UNLIMITED
        self._probing: int | None = start_bytes
        self._is_sent = False
        self._is_alive = False
        self._failures = 0

    @property
    def is_confirming(self) -> bool:
        """Whether it is in doubt that the size in use passes."""
        return self._probing == self.size_bytes

    def poll(self, now_s: float, timeout_s: float) -> int | None:
        """Return the size of the probe to send now; a small datagram that asks for an answer has to go with it.

        Args:
            now_s: current time.
            timeout_s: how long an answer takes at most, usually.
        """
        if now_s < self.due_at_s:
            return None
        if self._probing is None:
            self._refused_bytes = UNLIMITED
            self._ceiling_bytes = self._ceiling()
            self._search(now_s)
        elif (
            self._is_sent and self._is_alive
        ):  # without the small one's answer the path may just be down
            self._failures += 1
            if self._failures == PROBES_MAX:
                self._refuse(self._probing, now_s)
        if self._probing is None:
            return None
        self._is_sent, self._is_alive = True, False
        # Not much sooner, or one overflowing queue may swallow all three.
        self.due_at_s = now_s + min(max(2 * timeout_s, PROBE_TIMEOUT_MIN_S), PROBE_TIMEOUT_MAX_S)
        return self._probing

    def on_small_arrived(self) -> None:
        """The small datagram that went with the latest probe was answered."""
        self._is_alive = True

    def on_arrived(self, nbytes: int, now_s: float) -> None:
        """A datagram of this size reached the peer."""
        if self._probing is not None and nbytes >= self._probing:
            self.size_bytes = max(self.size_bytes, self._probing)
            self._search(now_s)

    def on_large_lost(self, now_s: float) -> None:
        """Large datagrams keep being lost, so confirm that the size in use still passes."""
        if not self.is_confirming and self.size_bytes > self._base_bytes:
            self._probe(self.size_bytes, now_s)

    def on_too_large(self, nbytes: int, now_s: float) -> None:
        """The system refused to send a datagram of this size."""
        if nbytes <= self.size_bytes or (self._probing is not None and nbytes <= self._probing):
            self._refuse(nbytes, now_s)

    def _refuse(self, nbytes: int, now_s: float) -> None:
        """Nothing of this size passes: go back to what always does if that was in use, and search below."""
        self._refused_bytes = min(self._refused_bytes, nbytes)
        if nbytes <= self.size_bytes:
            self.size_bytes = self._base_bytes
        self._search(now_s)

    def _search(self, now_s: float) -> None:
        """Try the next larger size, or rest if there is none."""
        candidates = [
            rung
            for rung in (*self._rungs, self._ceiling_bytes)
            if self.size_bytes < rung <= self._ceiling_bytes and rung < self._refused_bytes
        ]
        if candidates:
            self._probe(min(candidates), now_s)
        else:
            self._probing = None
            self.due_at_s = now_s + SEARCH_AGAIN_S

    def _probe(self, nbytes: int, now_s: float) -> None:
        self._probing = nbytes
        self._is_sent = False
        self._failures = 0
        self.due_at_s = now_s
