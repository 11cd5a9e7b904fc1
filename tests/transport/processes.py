"""Nodes in separate processes, commanded over a pipe, which can be killed, stopped, and put into network namespaces.

Run as a program, this file is one such node: it reads commands as lines of JSON and answers each with one line. As a
module, it provides `PeerProcess`, which starts and commands the program.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from gradwire.errors import WouldBlock
from gradwire.transport import Limits, Node, PeerLost, Ticket

SECRET = bytes(range(32))
START_S = 30.0
GRACE_S = 30.0
MARGIN_S = 5.0
TIMED = ("wait", "send", "receive", "close")
IN_FLIGHT_MAX = 8
SHIFTS = 65_521  # the largest prime of 16 bits
PATTERN_BYTES = 4 << 20
Json = dict[str, Any]


def payload_of(sender: int, tag: int, nbytes: int) -> memoryview:
    """Return the bytes of a message, which depend on its sender, tag and size and are cheap to make and to compare."""
    shift = (sender + 7_919 * tag) % SHIFTS
    return _pattern(-(-(SHIFTS + nbytes) // PATTERN_BYTES))[shift : shift + nbytes]


@cache
def _pattern(blocks: int) -> memoryview:
    return memoryview(random.Random(1).randbytes(PATTERN_BYTES) * blocks)


class PeerProcess:
    """A node in a separate process.

    Args:
        peers: addresses of other nodes.
        bind: address at which the node listens.
        limits: limits that differ from the default.
        within: prefix of the command, such as ``ip netns exec NAME``.
        options: further arguments of `Node`.
    """

    def __init__(
        self,
        peers: Sequence[str] = (),
        *,
        bind: str = "127.0.0.1:0",
        limits: Json | None = None,
        within: Sequence[str] = (),
        **options: object,
    ) -> None:
        node = {"bind": bind, "peers": list(peers), "limits": limits or {}, **options}
        self._process = subprocess.Popen(
            [*within, sys.executable, str(Path(__file__)), json.dumps(node)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            self.address: str
            self.id: int
            vars(self).update(self.answer(START_S))
        except BaseException:
            self.kill()
            raise

    def tell(self, do: str, **arguments: object) -> None:
        """Send a command; `answer` has to follow."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = GRACE_S) -> Json:
        """Return the answer to the oldest unanswered command."""
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], timeout_s)
        assert ready, f"the process of {getattr(self, 'address', '?')} is silent for {timeout_s} s"
        line = out.readline()
        assert line, f"the process of {getattr(self, 'address', '?')} has ended"
        answer: Json = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def ask(self, do: str, *, timeout_s: float = GRACE_S, **arguments: object) -> Json:
        """Send a command and wait for its answer."""
        self.tell(do, **arguments, **({"timeout_s": timeout_s} if do in TIMED else {}))
        return self.answer(timeout_s + MARGIN_S)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop the process until SIGCONT, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """End the process at once, as `kill -9` does, and wait for its end."""
        self._process.kill()
        self._process.send_signal(signal.SIGCONT)  # a stopped process has to run in order to end
        self._process.wait(timeout=GRACE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# ---- inside the process -----------------------------------------------------------------------------------------


class Commands:
    """The commands of a node in a separate process."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._received: dict[int, list[int]] = {}
        self._first_s = self._last_s = 0.0
        self._bytes = 0

    def wait(self, peers: int, timeout_s: float = GRACE_S) -> Json:
        """Wait until this many peers are connected."""
        return {"peers": [peer.id for peer in self._node.wait_for_peers(peers, timeout_s)]}

    def send(self, messages: int, nbytes: int, first: int = 0, timeout_s: float = GRACE_S) -> Json:
        """Publish messages, a few at a time, and wait until all are acknowledged."""
        node = self._node
        started_s = time.monotonic()
        tickets: deque[Ticket] = deque()
        for tag in range(first, first + messages):
            tickets.append(
                self._publish(payload_of(node.id, tag, nbytes), tag, started_s + timeout_s)
            )
            while len(tickets) > IN_FLIGHT_MAX and not tickets[0].is_done:
                assert time.monotonic() - started_s < timeout_s, f"{tag} messages sent"
                self._take(0.001)
            while tickets and tickets[0].is_done:
                tickets.popleft()
        is_drained = node.drain(timeout_s)
        return {"seconds": time.monotonic() - started_s, "is_drained": is_drained, **self.stats()}

    def _publish(self, payload: memoryview, tag: int, end_s: float) -> Ticket:
        while True:
            try:
                return self._node.publish(payload, tag)
            except WouldBlock:
                assert time.monotonic() < end_s, f"no space for message {tag}"
                self._take(0.002)

    def receive(self, messages: int, timeout_s: float = GRACE_S) -> Json:
        """Wait until this many messages have come since the start, and check their bytes."""
        end_s = time.monotonic() + timeout_s
        while sum(map(len, self._received.values())) < messages and time.monotonic() < end_s:
            self._take(0.05)
        return {
            "tags": {str(sender): tags for sender, tags in self._received.items()},
            "seconds": self._last_s - self._first_s,
            "bytes": self._bytes,
            **self.stats(),
        }

    def _take(self, timeout_s: float) -> None:
        for peer, tag, payload in self._node.receive(timeout_s):
            assert payload == payload_of(peer.id, tag, len(payload)), f"{tag} has other bytes"
            self._received.setdefault(peer.id, []).append(tag)
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
            self._bytes += len(payload)

    def stats(self) -> Json:
        """Return the counters."""
        return {"stats": asdict(self._node.stats()), "processor_s": time.process_time()}

    def events(self) -> Json:
        """Return the lost peers with the reasons and the tags of the undelivered messages."""
        lost = [event for event in self._node.events() if isinstance(event, PeerLost)]
        return {
            "lost": [
                [event.peer.id, event.reason, [ticket.tag for ticket in event.undelivered]]
                for event in lost
            ]
        }

    def close(self, timeout_s: float = GRACE_S) -> Json:
        """Close the node; return the number of unacknowledged messages."""
        return {"undelivered": len(self._node.close(timeout_s))}


def main() -> None:
    """Serve one node until the other end of the pipe is closed."""
    options = json.loads(sys.argv[1])
    options["limits"] = Limits(**options["limits"])
    node = Node(options.pop("bind"), options.pop("peers"), secret=SECRET, **options)
    commands = Commands(node)
    payload_of(node.id, 0, PATTERN_BYTES)  # fill the cache before anything is timed
    sys.stdout.write(json.dumps({"address": node.address, "id": node.id}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(commands, arguments.pop("do"))(**arguments)
        except Exception as error:  # for the test to raise
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
