"""Hosts that are each behind one slow link to a switch, as in an office or at home, and take steps together.

What a host sends to all others shares its own link, and so does what all others send to it. Each direction of a link
is a token bucket with a queue before it, as `benchmarks/training/network.py` has the kernel do it.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

from gradwire.transport.model import Address

from .simulator import Host, Link, Simulator

FRAME_BYTES = 42  # Ethernet, IP and UDP
SWITCH = "switch"
START_SPREAD_S = 0.002  # hosts do not begin a step at the very same time


@dataclass
class Bucket:
    """One direction of a link: tokens come at a rate, some may be saved up, and what finds none waits.

    Attributes:
        rate_bytes_per_s: at which tokens come.
        burst_bytes: tokens that may be saved up, so much leaves at once after a pause.
        queue_bytes: of what waits; what does not fit is lost.
        passed_bytes: what has left or will leave.
        lost_bytes: what did not fit.
        full_at_s: when all tokens are saved up again.
    """

    rate_bytes_per_s: float
    burst_bytes: int = 131_072
    queue_bytes: int = 196_608
    passed_bytes: int = 0
    lost_bytes: int = 0
    full_at_s: float = 0.0

    def leaves_at_s(self, nbytes: int, now_s: float) -> float | None:
        """Take so many bytes; return when they have left, or None if they are lost."""
        saved_s = self.burst_bytes / self.rate_bytes_per_s
        waiting_bytes = (self.full_at_s - saved_s - now_s) * self.rate_bytes_per_s
        if max(0.0, waiting_bytes) + nbytes > self.queue_bytes:
            self.lost_bytes += nbytes
            return None
        self.passed_bytes += nbytes
        self.full_at_s = max(self.full_at_s, now_s) + nbytes / self.rate_bytes_per_s
        return max(now_s, self.full_at_s - saved_s)


class Switched(Simulator):
    """Hosts around a switch.

    Args:
        seed: of everything random.
        bucket: what both directions of every link are like.
        delay_s: from one host to another when nothing waits.
    """

    def __init__(self, seed: int, bucket: Bucket, delay_s: float = 0.0001) -> None:
        super().__init__(seed, Link(delay_s=delay_s))
        self._like = bucket
        self.up: dict[Address, Bucket] = {}
        self.down: dict[Address, Bucket] = {}

    @property
    def lost_bytes(self) -> int:
        """What found no room in any queue, headers included."""
        return sum(bucket.lost_bytes for bucket in (*self.up.values(), *self.down.values()))

    def _bucket(self, buckets: dict[Address, Bucket], address: Address) -> Bucket:
        if address not in buckets:
            like = self._like
            buckets[address] = Bucket(like.rate_bytes_per_s, like.burst_bytes, like.queue_bytes)
        return buckets[address]

    def send(
        self, source: Address, target: Address, datagram: bytes, *, is_group: bool = False
    ) -> None:
        """Put one datagram on the sender's link."""
        up = self._bucket(self.up, source)
        left_at_s = up.leaves_at_s(len(datagram) + FRAME_BYTES, self.now_s)
        if left_at_s is not None:
            self._put(left_at_s, source, (SWITCH, *target), datagram, is_group)

    def _arrive(
        self, source: Address, target: Address, data: bytes, is_group: bool, size: int
    ) -> None:
        if target[0] != SWITCH:
            super()._arrive(source, target, data, is_group, size)
            return
        target = target[1:]
        down = self._bucket(self.down, target)
        left_at_s = down.leaves_at_s(len(data) + FRAME_BYTES, self.now_s)
        if left_at_s is not None:
            self._put(left_at_s + self.default.delay_s, source, target, data, is_group)

    def _put(
        self, at_s: float, source: Address, target: Address, datagram: bytes, is_group: bool
    ) -> None:
        heapq.heappush(
            self._queue, (at_s, next(self._sequence), source, target, datagram, is_group)
        )


def steps_s(
    simulator: Switched, hosts: list[Host], nbytes: int, steps: int, pause_s: float = 0.1
) -> list[float]:
    """Have every host send a message to all others, again and again; return how long each step took.

    A step begins, a little later with some hosts than with others, when all have had everything of the one before and
    have paused.
    """
    times = []
    others = len(hosts) - 1
    for step in range(steps):
        payloads = [simulator.random.randbytes(nbytes) for _ in hosts]
        started_s = simulator.now_s
        for host, payload in zip(hosts, payloads, strict=True):
            at_s = started_s + simulator.random.uniform(0.0, START_SPREAD_S)
            simulator.call_at(at_s, functools.partial(simulator.publish, host, payload, step))
            host.received.clear()
        simulator.run_until(lambda: all(len(host.received) == others for host in hosts), 60.0)
        times.append(simulator.now_s - started_s)
        for host in hosts:
            assert sorted(host.payloads) == sorted(
                payload for other, payload in zip(hosts, payloads, strict=True) if other is not host
            )
        simulator.run_for(pause_s)
    return times


def floor_s(nbytes: int, others: int, rate_bytes_per_s: float) -> float:
    """Return how long the bytes of one step take on each link, with 4 % for headers."""
    return 1.04 * nbytes * others / rate_bytes_per_s
