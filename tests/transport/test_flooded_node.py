"""Nodes on real sockets under a flood from another process: every message arrives, and new nodes join."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.transport import Limits, Node

logger = logging.getLogger(__name__)

SECRET = bytes(range(32))
FLOOD_S = 1.0
MEGABYTE = 1 << 20
WARM_UP = 10  # messages until the memory in use is steady
GROWTH_MB_MAX = 8.0
PATIENCE_S = 60.0


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def recorded_inits(count: int) -> bytes:
    """Return the INIT datagrams of members, taken from the wire."""
    inits = b""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tap:
        tap.bind(("127.0.0.1", 0))
        tap.settimeout(10.0)
        seed = f"127.0.0.1:{tap.getsockname()[1]}"
        for _ in range(count):
            with Node("127.0.0.1:0", [seed], secret=SECRET):
                inits += tap.recv(2_000)
    return inits


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    with (
        Node("127.0.0.1:0", secret=SECRET) as one,
        Node("127.0.0.1:0", [one.address], secret=SECRET) as two,
    ):
        one.wait_for_peers(1, timeout_s=10.0)
        two.wait_for_peers(1, timeout_s=10.0)
        yield one, two


def flood(node: Node, inits: bytes) -> subprocess.Popen[bytes]:
    host, port = node.address.split(":")
    program = str(Path(__file__).with_name("flooder.py"))
    return subprocess.Popen(
        [sys.executable, program, host, port, str(FLOOD_S), inits.hex()],
        stdout=subprocess.PIPE,
    )


def exchange(one: Node, two: Node, payload: bytes, tag: int) -> None:
    """Send a message each way and wait for both; the flood may take most of the machine."""
    tickets = [one.publish(payload, tag, two.peer), two.publish(payload, tag, one.peer)]
    missing = {one, two}
    end_s = time.monotonic() + PATIENCE_S
    while missing or not all(ticket.is_done for ticket in tickets):
        assert time.monotonic() < end_s, f"message {tag} is not through"
        for node in (one, two):
            for _, got, received in node.receive(timeout_s=0.005):
                assert (got, received) == (tag, payload)
                missing.discard(node)
    assert all(ticket.delivered for ticket in tickets)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read memory from")
def test_a_flood_of_garbage_and_replays_stops_neither_messages_nor_newcomers(
    pair: tuple[Node, Node],
) -> None:
    one, two = pair
    payload = random.Random(1).randbytes(MEGABYTE)
    inits = recorded_inits(8)
    for tag in range(WARM_UP):
        exchange(one, two, payload, tag)
    threads, before_mb, before = threading.active_count(), rss_mb(), two.stats()
    flooder = flood(two, inits)
    tag = WARM_UP
    with Node("127.0.0.1:0", [two.address], secret=SECRET) as newcomer:
        newcomer.wait_for_peers(1, timeout_s=PATIENCE_S)
        while flooder.poll() is None:
            exchange(one, two, payload, tag)
            tag += 1
        output, _ = flooder.communicate()
        exchange(one, two, payload, tag)
        newcomer.wait_for_peers(2, timeout_s=PATIENCE_S)
    after = two.stats()
    dropped = sum(
        getattr(after, name) - getattr(before, name)
        for name in (
            "malformed_datagrams",
            "stray_datagrams",
            "unauthenticated_datagrams",
            "handshakes_refused",
            "kernel_drops",
        )
    )
    assert int(output) > 10_000
    assert dropped > int(output) / 4, "the flood must have arrived"
    assert after.messages_received > before.messages_received
    assert rss_mb() - before_mb < GROWTH_MB_MAX
    assert threading.active_count() == threads
    assert two.peers == (one.peer,)


def has_raw_sockets() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_raw_sockets(), reason="forging a source address needs raw sockets")
@pytest.mark.parametrize("datagram_bytes", [1_200, 9_000])
@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_forged_fragments_of_full_size_lose_nothing(share: float, datagram_bytes: int) -> None:
    """Logs the goodput over that without forgeries, and what each forged datagram costs this process."""

    def stream(share: float) -> tuple[float, float, int, float]:
        """Return goodput, processor time for a megabyte, forged datagrams, and the time until all had arrived."""
        limits = Limits(datagram_bytes=datagram_bytes)
        with (
            Node("127.0.0.1:0", secret=SECRET, limits=limits) as one,
            Node("127.0.0.1:0", [one.address], secret=SECRET, limits=limits) as two,
        ):
            one.wait_for_peers(1, timeout_s=10.0)
            two.wait_for_peers(1, timeout_s=10.0)
            ports = [node.address.split(":")[1] for node in (one, two)]
            program = str(Path(__file__).with_name("forger.py"))
            forger = subprocess.Popen(
                [sys.executable, program, *ports, str(share), str(FLOOD_S)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert forger.stdout is not None
            assert forger.stdout.readline() == "ready\n"
            payload = bytes(MEGABYTE)
            tags: list[int] = []
            published = 0
            started_s, cpu_s = time.monotonic(), time.process_time()
            while forger.poll() is None:
                if one.has_room(len(payload)):
                    one.publish(payload, published)
                    published += 1
                tags += [tag for _, tag, _ in two.receive(0.002)]
            ended_s = time.monotonic()
            goodput = len(tags) / (ended_s - started_s)
            while len(tags) < published:
                assert time.monotonic() < ended_s + PATIENCE_S
                tags += [tag for _, tag, _ in two.receive(0.1)]
            assert tags == [*range(published)]
            cpu_s = (time.process_time() - cpu_s) / max(1, len(tags))
            return goodput, cpu_s, int(forger.communicate()[0]), time.monotonic() - ended_s

    quiet, quiet_cpu_s, none, _ = stream(0.0)
    loud, loud_cpu_s, forged, recovery_s = stream(share)
    assert none == 0
    assert forged > 10
    assert loud > 0.05 * quiet
    assert recovery_s < 10.0
    logger.info(
        "%d bytes, %g times the stream: %.0f of %.0f MB/s, %.2f; %d forged; %.1f ms instead of %.1f ms for a "
        "megabyte; all arrived %.1f s after the last forgery",
        *(datagram_bytes, share, loud, quiet, loud / quiet, forged),
        *(loud_cpu_s * 1e3, quiet_cpu_s * 1e3, recovery_s),
    )
