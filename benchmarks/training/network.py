"""Hosts in network namespaces of the kernel, each behind a link of limited rate to one switch::

    node 0  v0 --link-- p0 \\
    node 1  v0 --link-- p1 -- bridge
    ...

A token bucket (tbf) at both ends of every link limits what the node sends and what it gets. It counts whole Ethernet
frames; a queue of 50 ms, at least 64 KB, stands before it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

DEVICE = "v0"
BURST_BYTES, QUEUE_MS, QUEUE_BYTES_MIN = 131_072, 50, 65_536


class Refused(Exception):
    """The kernel does not do what a network needs; the message says which command failed, and why."""


class Network:
    """So many nodes and a switch; a rate of 0 limits nothing.

    Attributes:
        addresses: of the nodes, by number.
    """

    def __init__(self, nodes: int, rate_mbit: int) -> None:
        self._prefix = f"gwtrain-{os.getpid()}"
        self._rate_mbit = rate_mbit
        self.addresses = [f"10.78.0.{node + 1}" for node in range(nodes)]

    def build(self) -> None:
        """Set everything up.

        Raises:
            Refused: a command failed.
        """
        self._add(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, address in enumerate(self.addresses):
            space, port = self._space(node), f"p{node}"
            self._add(space)
            _run(
                *("ip", "link", "add", DEVICE, "netns", space, "type", "veth"),
                *("peer", "name", port, "netns", self._switch),
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", space, "link", "set", DEVICE, "up")
            if self._rate_mbit:
                self._limit(space, DEVICE)
                self._limit(self._switch, port)

    def within(self, node: int) -> list[str]:
        """Return what to put before a command that is to run on a node."""
        return ["ip", "netns", "exec", self._space(node)]

    def remove(self) -> None:
        """Take everything down again; what was never there is no matter."""
        spaces = [self._switch, *map(self._space, range(len(self.addresses)))]
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _space(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def _add(self, space: str) -> None:
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")

    def _limit(self, space: str, device: str) -> None:
        queue_bytes = max(self._rate_mbit * 125 * QUEUE_MS, QUEUE_BYTES_MIN)
        _run(
            *("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{self._rate_mbit}mbit", "burst", str(BURST_BYTES)),
            *("limit", str(queue_bytes + BURST_BYTES)),
        )


@contextlib.contextmanager
def network(nodes: int, rate_mbit: int) -> Iterator[Network]:
    """Build a network and take it down again whatever happens."""
    built = Network(nodes, rate_mbit)
    try:
        built.build()
        yield built
    finally:
        built.remove()


def missing() -> str | None:
    """Return why networks cannot be built here, or None if they can."""
    try:
        with network(nodes=1, rate_mbit=100):
            return None
    except (Refused, OSError) as error:
        return str(error)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode != 0:
        raise Refused(f"{' '.join(command)!r} failed: {done.stderr.strip()}")
