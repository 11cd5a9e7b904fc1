"""Hosts around a switch, each behind one slow link, that exchange messages in steps.

A host sends to all others through its own link, and receives from all others through it. Each direction of a link is a
token bucket with a queue, as `benchmarks/training/network.py` configures the kernel.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

from gradwire.transport.types import Address

from .simulator import Host, Link, Simulator

FRAME_BYTES = 42  # Ethernet, IP and UDP
SWITCH = "switch"
START_SPREAD_S = 0.002  # hosts begin a step at slightly different times


@dataclass
class Bucket:
    """One direction of a link: a token bucket with a queue.

    Attributes:
        rate_bytes_per_s: rate at which tokens arrive.
        burst_bytes: size of the bucket; so many bytes leave at once after a pause.
        queue_bytes: size of the queue; datagrams that do not fit are lost.
        passed_bytes: bytes that have left or will leave.
        lost_bytes: bytes of the datagrams that did not fit.
        full_at_s: when the bucket is full again.
    """

    rate_bytes_per_s: float
    burst_bytes: int = 131_072
    queue_bytes: int = 196_608
    passed_bytes: int = 0
    lost_bytes: int = 0
    full_at_s: float = 0.0

    def leaves_at_s(self, nbytes: int, now_s: float) -> float | None:
        """Queue this many bytes; return when they have left, or None if they are lost."""
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
        seed: seed of everything random.
        bucket: both directions of every link are like this one.
        delay_s: delay from one host to another with empty queues.
    """

    def __init__(self, seed: int, bucket: Bucket, delay_s: float = 0.0001) -> None:
        super().__init__(seed, Link(delay_s=delay_s))
        self._like = bucket
        self.up: dict[Address, Bucket] = {}
        self.down: dict[Address, Bucket] = {}

    @property
    def lost_bytes(self) -> int:
        """Return the bytes lost in all queues, headers included."""
        return sum(bucket.lost_bytes for bucket in (*self.up.values(), *self.down.values()))

    def _bucket(self, buckets: dict[Address, Bucket], address: Address) -> Bucket:
        if address not in buckets:
            like = self._like
            buckets[address] = Bucket(like.rate_bytes_per_s, like.burst_bytes, like.queue_bytes)
        return buckets[address]

    def send(self, source: Address, target: Address, datagram: bytes) -> None:
        """Put one datagram on the sender's link."""
        up = self._bucket(self.up, source)
        left_at_s = up.leaves_at_s(len(datagram) + FRAME_BYTES, self.now_s)
        if left_at_s is not None:
            self._put(left_at_s, source, (SWITCH, *target), datagram)

    def _arrive(self, source: Address, target: Address, data: bytes, size: int) -> None:
        if target[0] != SWITCH:
            super()._arrive(source, target, data, size)
            return
        target = target[1:]
        down = self._bucket(self.down, target)
        left_at_s = down.leaves_at_s(len(data) + FRAME_BYTES, self.now_s)
        if left_at_s is not None:
            self._put(left_at_s + self.default.delay_s, source, target, data)

    def _put(self, at_s: float, source: Address, target: Address, datagram: bytes) -> None:
        heapq.heappush(self._queue, (at_s, next(self._sequence), source, target, datagram))


def steps_s(
    simulator: Switched, hosts: list[Host], nbytes: int, steps: int, pause_s: float = 0.1
) -> list[float]:
    """Have every host send a message to all others, step after step; return the duration of each step.

    The next step begins after a pause once every host has received everything; hosts begin slightly apart.
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
    """Return how long the bytes of one step take on each link, with 6 % for headers."""
    return 1.06 * nbytes * others / rate_bytes_per_s
