"""Three nodes in three processes exchange random messages over loopback for as long as wanted.

Sizes from 0 B to 8 MB, bursts and pauses, readers that stop reading, and now and then a node is killed and restarted.
Checked: every message arrives complete, in order and once, or is reported as failed; the counts of senders and
receivers agree; no queue holds anything at the end; memory, threads and files do not grow.

    python benchmarks/soak_transport.py --minutes 30
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire.errors import WouldBlock
from gradwire.transport import Limits, Node, Peer, PeerJoined, Ticket

NODES = 3
SECRET = bytes(range(100, 132))
MESSAGE_BYTES_MAX, BURST_BYTES_MAX, QUEUE_BYTES = 8 << 20, 24 << 20, 32 << 20
CONTENT = random.Random(1).randbytes(3 * MESSAGE_BYTES_MAX)
DIRECTED = 1 << 63  # tags of messages to one peer have this bit, and numbers of their own
START_S, QUIET_S, LINGER_S, IDLE_EVERY_S = 3.0, 6.0, 2.0, 2.0
LIFE_S = (10.0, 40.0)  # between two kills
WARM_UP_S = 120.0  # until the allocator has met the largest bursts
GROWTH_MB_MAX, SAMPLES_MIN = 4.0, 20  # between the halves of the samples after it
IDLE_MB_MAX = 250.0  # two queues of 32 MB, 25 MB of content, and the allocator's
# Makes glibc return freed buffers: its heap otherwise grows in steps for an hour and would hide a leak.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
EMPTY = ("send_log_bytes", "receive_queue_bytes", "malformed_datagrams", "rejected_records")


def message_of(sender: Peer, tag: int) -> memoryview:
    """Return the bytes of this message: 0 B to 8 MB, small ones as often as large ones."""
    draw = random.Random(f"{sender.id}/{sender.incarnation}/{tag}")
    nbytes = 0 if draw.random() < 0.02 else int(2 ** draw.uniform(0.0, 23.0))
    start = draw.randrange(2 * MESSAGE_BYTES_MAX)
    return memoryview(CONTENT)[start : start + nbytes]


def name_of(peer: Peer) -> str:
    return f"{peer.id}/{peer.incarnation}"


class Soaker:
    """Drives one node: publishes bursts, checks what arrives, and counts both."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.counts = {name: Counter[str]() for name in ("sent", "delivered", "failed", "received")}
        self.open: deque[Ticket] = deque()
        self.idle: list[dict[str, float]] = []
        self._random = random.Random(node.peer.incarnation)
        self._next_tags: Counter[Peer | None] = Counter()
        self._expected: dict[tuple[Peer, bool], int] = {}
        self._joined: set[Peer] = set()

    def run(self, end_s: float) -> None:
        """Publish bursts and read between them until a time, then wait for everything to arrive."""
        idle_at_s = 0.0
        while time.monotonic() < end_s:
            self._publish_burst(min(end_s, time.monotonic() + 10.0))
            pause_s = self._random.choice((0.0, 0.1, 0.5, 1.0))
            if self._random.random() < 0.2:
                time.sleep(pause_s)  # nobody reads, only the I/O thread works
            self._read(min(end_s, time.monotonic() + pause_s))
            if time.monotonic() >= idle_at_s:
                self._measure_idle(end_s)
                idle_at_s = time.monotonic() + IDLE_EVERY_S
        self.node.drain(timeout_s=QUIET_S)
        self._read(end_s + QUIET_S)

    def _publish_burst(self, end_s: float) -> None:
        left_bytes = self._random.randrange(BURST_BYTES_MAX)
        while left_bytes > 0 and time.monotonic() < end_s:
            peers = self.node.peers
            to = self._random.choice(peers) if peers and self._random.random() < 0.2 else None
            tag = self._next_tags[to] | (DIRECTED if to else 0)
            payload = message_of(self.node.peer, tag)
            try:
                ticket = self.node.publish(payload, tag, to)
            except WouldBlock:
                self._read(time.monotonic() + 0.01)
                continue
            self._next_tags[to] += 1
            self._count("sent", ticket.pending | ticket.delivered | ticket.failed)
            self.open.append(ticket)
            left_bytes -= len(payload) + 1_000
            self._read(0.0)

    def _read(self, until_s: float) -> None:
        while True:
            for peer, tag, payload in self.node.receive(timeout_s=0.02 if until_s else 0.0):
                self._check(peer, tag, payload)
            while self.open and self.open[0].is_done:
                ticket = self.open.popleft()
                self._count("delivered", ticket.delivered)
                self._count("failed", ticket.failed)
            if time.monotonic() >= until_s:
                return

    def _check(self, peer: Peer, tag: int, payload: memoryview) -> None:
        stream, number = (peer, bool(tag & DIRECTED)), tag & ~DIRECTED
        expected = self._expected.get(stream, number)
        if number != expected:
            # After a reconnection, messages published meanwhile are missing.
            events = self.node.events()
            self._joined |= {event.peer for event in events if isinstance(event, PeerJoined)}
            is_gap = number > expected and peer in self._joined
            assert is_gap, f"{peer}: message {number} arrived instead of {expected}"
            self._joined.discard(peer)
        self._expected[stream] = number + 1
        assert payload == message_of(peer, tag), f"{peer}: message {number} has wrong bytes"
        self._count("received", [peer])

    def _count(self, name: str, peers: Any) -> None:
        self.counts[name].update(map(name_of, peers))

    def _measure_idle(self, end_s: float) -> None:
        """Wait until nothing is queued and note what the process holds: peaks of a burst say nothing about a leak."""
        self.node.drain(timeout_s=max(0.0, min(5.0, end_s - time.monotonic())))
        self._read(time.monotonic() + 0.05)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        held = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}
        rss_mb = pages * os.sysconf("SC_PAGESIZE") / 1e6
        self.idle.append({"at_s": time.monotonic(), "rss_mb": rss_mb, **held})


def run_node(bind: str, peers: list[str], node_id: int, end_s: float) -> None:
    """Be one node, and print its counts and its state at the end."""
    sizes = {"send_log_bytes": QUEUE_BYTES, "receive_bytes": QUEUE_BYTES}
    limits = Limits(message_bytes_max=MESSAGE_BYTES_MAX, **sizes)
    with Node(bind, peers, secret=SECRET, node_id=node_id, limits=limits) as node:
        with contextlib.suppress(TimeoutError):
            node.wait_for_peers(len(peers), timeout_s=5.0)
        soaker = Soaker(node)
        soaker.run(end_s)
        state = {"peer": name_of(node.peer), "open": len(soaker.open), "idle": soaker.idle}
        report = {**state, "stats": asdict(node.stats()), **soaker.counts}
        node.receive(timeout_s=LINGER_S)  # the others must still find this node
        print(json.dumps(report), flush=True)


# ---- all of them ----------------------------------------------------------------------------------------------------


def start(index: int, addresses: list[str], end_s: float) -> subprocess.Popen[str]:
    others = addresses[:index] + addresses[index + 1 :]
    arguments = ["--node", str(index + 1), str(end_s), addresses[index], *others]
    command, environment = [sys.executable, __file__, *arguments], os.environ | ALLOCATOR
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def free_addresses() -> list[str]:
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(NODES)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [f"127.0.0.1:{port}" for port in ports]


def soak(minutes: float, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Run the nodes; return the report of each and the number of kills."""
    chance, addresses = random.Random(seed), free_addresses()
    end_s = time.monotonic() + START_S + 60.0 * minutes
    kills, next_s = 0, time.monotonic() + chance.uniform(*LIFE_S)
    nodes = [start(index, addresses, end_s) for index in range(NODES)]
    try:
        while time.monotonic() < end_s - LIFE_S[0]:
            time.sleep(0.5)
            assert all(node.poll() is None for node in nodes), "a node has ended"
            if time.monotonic() >= next_s:
                victim = chance.randrange(1, NODES)  # not the first, whose memory is watched
                nodes[victim].kill()
                nodes[victim].communicate()
                time.sleep(chance.choice((0.0, 1.0, 4.0)))
                nodes[victim] = start(victim, addresses, end_s)
                kills, next_s = kills + 1, time.monotonic() + chance.uniform(*LIFE_S)
        outputs = [node.communicate(timeout=60.0)[0] for node in nodes]
        assert not any(node.returncode for node in nodes), "a node has failed"
        return [json.loads(output.splitlines()[-1]) for output in outputs], kills
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def check_counts(sender: dict[str, Any], receiver: dict[str, Any]) -> None:
    """Check that delivered messages have been received, and that nothing is left in the sender."""
    names = ("sent", "delivered", "failed")
    sent, delivered, failed = (sender[name].get(receiver["peer"], 0) for name in names)
    received = receiver["received"].get(sender["peer"], 0)
    assert sent == delivered + failed, (sent, delivered, failed)
    assert 0 < delivered <= received <= sent, (delivered, received, sent)
    stats = sender["stats"]
    assert not any(stats[name] for name in EMPTY), {name: stats[name] for name in EMPTY}
    assert not any(path["in_flight_bytes"] for path in stats["peers"])
    assert len(stats["peers"]) == NODES - 1
    assert not sender["open"], "a message is still pending"


def check_growth(idle: list[dict[str, float]]) -> str:
    """Check what a node holds whenever it is idle, and return it in words."""
    largest = max(sample["rss_mb"] for sample in idle)
    assert largest <= IDLE_MB_MAX, f"memory reached {largest:.0f} MB"
    for name in ("task", "fd"):
        counts = {sample[name] for sample in idle}
        assert len(counts) == 1, f"the number of entries of /proc/self/{name} varies: {counts}"
    warm = [one["rss_mb"] for one in idle if one["at_s"] >= idle[0]["at_s"] + WARM_UP_S]
    if len(warm) < SAMPLES_MIN:
        return f"at most {largest:.0f} MB when idle; too short to tell growth"
    half = len(warm) // 2
    growth = statistics.median(warm[half:]) - statistics.median(warm[:half])
    assert growth <= GROWTH_MB_MAX, f"memory grew by {growth:.1f} MB"
    return f"at most {largest:.0f} MB when idle, {growth:+.2f} MB between the halves"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--node", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        number, end_s, bind, *peers = options.node
        run_node(bind, peers, int(number), float(end_s))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that no node is left behind
    reports, kills = soak(options.minutes, options.seed)
    for report in reports:
        for other in reports:
            if other is not report:
                check_counts(report, other)
        stats, failed = report["stats"], sum(report["failed"].values())
        received = (
            f"{stats['messages_received']:,} messages, {stats['payload_bytes_received']:.3g} B"
        )
        print(f"{report['peer']}: {received} received; {failed} failed", end="; ")
        print(f"{stats['retransmitted_bytes']} B sent again; {stats['kernel_drops']} kernel drops")
    print(f"{options.minutes:g} minutes, {kills} kills; {check_growth(reports[0]['idle'])}")


if __name__ == "__main__":
    main()
