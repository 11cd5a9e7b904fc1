"""One node of the soak: sends random messages, checks every byte it receives, and reports how it is doing.

What a message must hold follows from its sender, the sender's start and its number, so the receiver needs nobody to
tell. Run by soak_transport.py; reports go to standard output, one JSON object per line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import time
from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire.errors import WouldBlock
from gradwire.transport import Limits, Node, Peer, PeerJoined, Ticket

SECRET = bytes(range(100, 132))
MESSAGE_BYTES_MAX = 8 << 20
LIMITS = Limits(
    message_bytes_max=MESSAGE_BYTES_MAX,
    send_log_bytes=32 << 20,
    receive_bytes=32 << 20,
    rekey_records=500,
    rekey_s=10.0,
)
DIRECTED = 1 << 63  # tags of messages to one peer have this bit, and numbers of their own
CONTENT = random.Random(1).randbytes(3 * MESSAGE_BYTES_MAX)
BURST_BYTES_MAX = 24 << 20
QUIET_S = 6.0  # after the end everybody still answers for this long
LINGER_S = 2.0
REST_S = 2.0


def message_of(sender: Peer, tag: int) -> memoryview:
    """Return what this message holds: 0 B to 8 MB, small ones as often as large ones."""
    draw = random.Random(f"{sender.id}/{sender.incarnation}/{tag}")
    nbytes = 0 if draw.random() < 0.02 else int(2 ** draw.uniform(0.0, 23.0))
    start = draw.randrange(2 * MESSAGE_BYTES_MAX)
    return memoryview(CONTENT)[start : start + nbytes]


class Ledger:
    """What was sent to whom and what became of it: sent = delivered + failed + pending, for each peer."""

    def __init__(self) -> None:
        self.sent: Counter[Peer] = Counter()
        self.delivered: Counter[Peer] = Counter()
        self.failed: Counter[Peer] = Counter()
        self._open: deque[Ticket] = deque()

    def add(self, ticket: Ticket) -> None:
        self.sent.update(ticket.pending | ticket.delivered | ticket.failed)
        self._open.append(ticket)

    def settle(self) -> None:
        """Book the tickets that are done, oldest first."""
        while self._open and self._open[0].is_done:
            ticket = self._open.popleft()
            self.delivered.update(ticket.delivered)
            self.failed.update(ticket.failed)

    def check(self) -> None:
        self.settle()
        now = Counter(self.delivered)
        now.update(self.failed)
        for ticket in self._open:
            for peers in (ticket.delivered, ticket.failed, ticket.pending):
                now.update(peers)
        assert now == self.sent, f"sent {self.sent}, accounted for {now}"


class Soaker:
    """Drives one node until a time, then waits for quiet and reports."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node = node
        self.ledger = Ledger()
        self.received: Counter[Peer] = Counter()
        self.received_bytes = 0
        self._random = random.Random(seed)
        self._next = 0
        self._directed: Counter[Peer] = Counter()
        self._expected: dict[tuple[Peer, bool], int] = {}
        self._gaps: set[Peer] = set()
        self._calm: list[dict[str, float]] = []
        self._rest_at_s = 0.0

    def run(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            self._burst(min(end_s, time.monotonic() + 10.0))
            pause_s = self._random.choice((0.0, 0.1, 0.5, 1.0))
            if self._random.random() < 0.2:
                time.sleep(pause_s)  # deaf: nobody reads, only the I/O thread works
            self._read(min(end_s, time.monotonic() + pause_s))
            if time.monotonic() >= self._rest_at_s:
                self._rest(end_s)
        self.node.drain(timeout_s=QUIET_S)
        self._read(end_s + QUIET_S)

    def _burst(self, end_s: float) -> None:
        """Publish some messages, as fast as they are taken."""
        left_bytes = self._random.randrange(BURST_BYTES_MAX)
        while left_bytes > 0 and time.monotonic() < end_s:
            to, tag = self._recipient()
            payload = message_of(self.node.peer, tag)
            try:
                ticket = self.node.publish(payload, tag, to)
            except WouldBlock:
                self._read(time.monotonic() + 0.01)
                continue
            if to is None:
                self._next += 1
            else:
                self._directed[to] += 1
            self.ledger.add(ticket)
            left_bytes -= len(payload) + 1_000
            self._read(0.0)

    def _recipient(self) -> tuple[Peer | None, int]:
        peers = self.node.peers
        if not peers or self._random.random() < 0.8:
            return None, self._next
        to = self._random.choice(peers)
        return to, DIRECTED | self._directed[to]

    def _read(self, until_s: float) -> None:
        while True:
            for peer, tag, payload in self.node.receive(timeout_s=0.02 if until_s else 0.0):
                self._check(peer, tag, payload)
            self._note_events()
            self.ledger.settle()
            if time.monotonic() >= until_s:
                return

    def _note_events(self) -> None:
        for event in self.node.events():
            if isinstance(event, PeerJoined):
                self._gaps |= {event.peer}
                self._directed.setdefault(event.peer, 0)

    def _check(self, peer: Peer, tag: int, payload: memoryview) -> None:
        stream, number = (peer, bool(tag & DIRECTED)), tag & ~DIRECTED
        expected = self._expected.get(stream)
        if expected is not None and number != expected:
            self._note_events()
            is_gap = peer in self._gaps and number > expected
            assert is_gap, f"{peer}: message {number} came instead of {expected}"
            self._gaps.discard(peer)
        self._expected[stream] = number + 1
        assert payload == message_of(peer, tag), f"{peer}: message {number} has wrong bytes"
        self.received[peer] += 1
        self.received_bytes += len(payload)

    def _rest(self, end_s: float) -> None:
        """Come to rest and note what is in use: peaks of a burst say nothing about a leak."""
        self.node.drain(timeout_s=max(0.0, min(5.0, end_s - time.monotonic())))
        self._read(time.monotonic() + 0.05)
        self.ledger.check()
        gc.collect()
        self._calm.append({"at_s": time.monotonic(), **usage()})
        self._rest_at_s = time.monotonic() + REST_S

    def report(self) -> dict[str, Any]:
        """Return everything that the judge wants to know, after a check of the books."""
        self.ledger.check()
        stats = self.node.stats()
        return {
            "peer": [self.node.peer.id, self.node.peer.incarnation],
            "sent": by_peer(self.ledger.sent),
            "delivered": by_peer(self.ledger.delivered),
            "failed": by_peer(self.ledger.failed),
            "received": by_peer(self.received),
            "received_bytes": self.received_bytes,
            "calm": self._calm,
            "epoch": self.node._endpoint.sender_keys()[0].epoch,
            "in_flight_bytes": sum(path.in_flight_bytes for path in stats.peers),
            "stats": {name: value for name, value in asdict(stats).items() if name != "peers"},
            "peers": len(stats.peers),
        }


def by_peer(counts: Counter[Peer]) -> dict[str, int]:
    return {f"{peer.id}/{peer.incarnation}": count for peer, count in counts.items()}


def usage() -> dict[str, float]:
    """Return what this process holds of what can leak."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": pages * os.sysconf("SC_PAGESIZE") / 1e6,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--peers", nargs="+", required=True)
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--end-s", type=float, required=True, help="on the monotonic clock")
    options = parser.parse_args()
    node = Node(options.bind, options.peers, secret=SECRET, node_id=options.id, limits=LIMITS)
    with node:
        with contextlib.suppress(TimeoutError):
            node.wait_for_peers(len(options.peers), timeout_s=5.0)
        soaker = Soaker(node, seed=node.peer.incarnation)
        soaker.run(options.end_s)
        report = soaker.report()
        node.receive(timeout_s=LINGER_S)  # the others are to find this one still there
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
