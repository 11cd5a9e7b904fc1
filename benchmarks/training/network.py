"""Hosts in network namespaces of the kernel, each behind a link of limited rate to one switch::

    node 0  v0 --link-- p0 \\
    node 1  v0 --link-- p1 -- bridge
    ...

A token bucket (tbf) at both ends of every link limits what the node sends and receives. It counts whole Ethernet
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
    """The kernel cannot build a network; the message says which command failed, and why."""


@contextlib.contextmanager
def network(
    nodes: int, rate_mbit: int, burst_bytes: int = BURST_BYTES
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Build a network, and remove it at the end; a rate of 0 limits nothing. Buckets hold ``burst_bytes``.

    Yields:
        The IP address of each node, and the command that runs another command on each node.

    Raises:
        Refused: a command failed.
    """
    switch, *spaces = (f"gwtrain-{os.getpid()}-{one}" for one in ("switch", *range(nodes)))
    addresses = [f"10.78.0.{node + 1}" for node in range(nodes)]
    try:
        for space in (switch, *spaces):
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for node, (space, address) in enumerate(zip(spaces, addresses, strict=True)):
            port = f"p{node}"
            peer = ["peer", "name", port, "netns", switch]
            _run("ip", "link", "add", DEVICE, "netns", space, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", space, "link", "set", DEVICE, "up")
            if rate_mbit:
                _limit(space, DEVICE, rate_mbit, burst_bytes)
                _limit(switch, port, rate_mbit, burst_bytes)
        yield addresses, [["ip", "netns", "exec", space] for space in spaces]
    finally:
        for space in (switch, *spaces):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _limit(space: str, device: str, rate_mbit: int, burst_bytes: int) -> None:
    queue_bytes = max(rate_mbit * 125 * QUEUE_MS, QUEUE_BYTES_MIN)
    _run(
        *("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{rate_mbit}mbit", "burst", str(burst_bytes)),
        *("limit", str(queue_bytes + burst_bytes)),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode != 0:
        raise Refused(f"{' '.join(command)!r} failed: {done.stderr.strip()}")
