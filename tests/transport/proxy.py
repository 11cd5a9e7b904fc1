"""A middlebox in a separate process that delays, loses, reorders, repeats, corrupts and shapes datagrams.

The middlebox is between clients and one server. The server sees each client at a port of the middlebox, as behind a
NAT. The port may change at any moment; datagrams sent to the old port are lost.

Run as a program, this file is the middlebox; as a module, it provides `Proxy`, which starts the program.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECEIVES_MAX = 64
BUFFER_BYTES = 4 << 20
IDLE_S = 0.5
LATE_S = 0.0002  # a datagram due so soon is sent at once: a timer would fire later
START_S = 20.0
Address = tuple[str, int]


@dataclass(frozen=True)
class Trouble:
    """The troubles of a path, the same in both directions; probabilities are per datagram.

    Attributes:
        delay_s: one-way delay.
        rate_bytes_per_s: rate of the path, 0 for no bound; datagrams that do not fit the queue are lost.
        queue_bytes: size of the queue.
        datagram_bytes_max: larger datagrams are lost.
        loss: probability of loss.
        reorder: probability of being held back by up to 10 ms.
        duplicate: probability of arriving twice, the second time up to 10 ms later.
        corrupt: probability that one bit is flipped.
        truncate: probability of being cut short.
        rebind_first_s: when the clients' ports change for the first time; 0 for never.
        rebind_every_s: interval of the changes from then on.
        seed: seed of everything random.
    """

    delay_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    queue_bytes: int = 500_000
    datagram_bytes_max: int = 65_535
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0
    rebind_first_s: float = 0.0
    rebind_every_s: float = 1.0
    seed: int = 1


class Proxy:
    """A middlebox in front of ``server``; clients connect to its ``address``."""

    def __init__(self, server: str, trouble: Trouble) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), server, json.dumps(asdict(trouble))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address: str = self._read()["address"]

    def stop(self) -> dict[str, int]:
        """Stop the middlebox and return the number of datagrams for each kind of trouble."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        counts = self._read()
        self._process.wait(timeout=START_S)
        return counts

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        assert ready, "the middlebox is silent"
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=START_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# ---- inside the process -----------------------------------------------------------------------------------------


class Direction:
    """One direction of the path."""

    def __init__(self, name: str, trouble: Trouble, counts: Counter[str]) -> None:
        self._name = name
        self._trouble = trouble
        self._counts = counts
        self._random = random.Random(trouble.seed)
        self._busy_until_s = 0.0

    def carry(self, datagram: bytes, now_s: float) -> Iterator[tuple[float, bytes]]:
        """Yield (time, bytes) of each datagram that leaves the path."""
        trouble = self._trouble
        if len(datagram) > trouble.datagram_bytes_max or self._happens("loss", trouble.loss):
            self._counts[f"lost_{self._name}"] += 1
            return
        at_s = now_s
        if trouble.rate_bytes_per_s:
            at_s = max(now_s, self._busy_until_s)
            if (at_s - now_s) * trouble.rate_bytes_per_s + len(datagram) > trouble.queue_bytes:
                self._counts[f"lost_{self._name}"] += 1
                return
            at_s += len(datagram) / trouble.rate_bytes_per_s
            self._busy_until_s = at_s
        at_s += trouble.delay_s
        if self._happens("corrupt", trouble.corrupt):
            broken = bytearray(datagram)
            broken[self._random.randrange(len(broken))] ^= 1 << self._random.randrange(8)
            datagram = bytes(broken)
        if self._happens("truncate", trouble.truncate):
            datagram = datagram[: self._random.randrange(len(datagram))]
        late = self._happens("reorder", trouble.reorder)
        yield at_s + (self._random.uniform(0.0, 0.01) if late else 0.0), datagram
        if self._happens("duplicate", trouble.duplicate):
            yield at_s + self._random.uniform(0.0, 0.01), datagram

    def _happens(self, what: str, chance: float) -> bool:
        happens = chance > 0.0 and self._random.random() < chance
        if happens:
            self._counts[what] += 1
        return happens


class Middlebox:
    """Moves datagrams between clients and a server until its standard input is closed."""

    def __init__(self, server: Address, trouble: Trouble) -> None:
        self._server = server
        self._family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
        self._inside = self._open()
        self._trouble = trouble
        self.counts: Counter[str] = Counter()
        self._there = Direction("there", trouble, self.counts)
        self._back = Direction("back", trouble, self.counts)
        self._outside: dict[Address, socket.socket] = {}
        self._due: list[tuple[float, int, socket.socket, Address, bytes]] = []
        self._numbers = itertools.count()
        first_s = trouble.rebind_first_s
        self._rebind_at_s = time.monotonic() + first_s if first_s else float("inf")

    @property
    def address(self) -> str:
        """The address for clients."""
        host, port = self._inside.getsockname()[:2]
        return f"[{host}]:{port}" if self._family == socket.AF_INET6 else f"{host}:{port}"

    def run(self) -> None:
        """Serve."""
        while True:
            sources = [sys.stdin, self._inside, *self._outside.values()]
            timeout_s = min(self._due[0][0] if self._due else float("inf"), self._rebind_at_s)
            timeout_s = min(IDLE_S, max(0.0, timeout_s - time.monotonic()))
            ready = select.select(sources, [], [], timeout_s)[0]
            if sys.stdin in ready:
                return
            if time.monotonic() >= self._rebind_at_s:
                self._rebind()
                continue
            if self._inside in ready:
                self._take_inside()
            for client, outside in self._outside.items():
                if outside in ready:
                    self._take_outside(client, outside)
            self._send_due()

    def _open(self) -> socket.socket:
        opened = socket.socket(self._family, socket.SOCK_DGRAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        opened.bind(("::1" if self._family == socket.AF_INET6 else "127.0.0.1", 0))
        opened.setblocking(False)
        return opened

    def _rebind(self) -> None:
        """Give every client another port; datagrams to the old ports are lost."""
        for client, outside in self._outside.items():
            outside.close()
            self._outside[client] = self._open()
        self.counts["rebind"] += 1
        # From now: a middlebox that is late, on a busy machine, must not make up for the changes that it has missed.
        self._rebind_at_s = time.monotonic() + self._trouble.rebind_every_s

    def _take_inside(self) -> None:
        for datagram, client in self._received(self._inside):
            if client not in self._outside:
                self._outside[client] = self._open()
            for at_s, changed in self._there.carry(datagram, time.monotonic()):
                self._push(at_s, self._outside[client], self._server, changed)

    def _take_outside(self, client: Address, outside: socket.socket) -> None:
        for datagram, _ in self._received(outside):
            for at_s, changed in self._back.carry(datagram, time.monotonic()):
                self._push(at_s, self._inside, client, changed)

    def _received(self, source: socket.socket) -> Iterator[tuple[bytes, Address]]:
        with contextlib.suppress(BlockingIOError):
            for _ in range(RECEIVES_MAX):
                datagram, address = source.recvfrom(65_536)
                self.counts["datagrams"] += 1
                yield datagram, (address[0], address[1])

    def _push(self, at_s: float, out: socket.socket, target: Address, datagram: bytes) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), out, target, datagram))

    def _send_due(self) -> None:
        until_s = time.monotonic() + LATE_S
        while self._due and self._due[0][0] <= until_s:
            _, _, out, target, datagram = heapq.heappop(self._due)
            # An abandoned port, a full buffer, no listener: the datagram is lost, as on any path.
            with contextlib.suppress(OSError):
                out.sendto(datagram, target)


def main() -> None:
    """Serve one middlebox until the other end of the pipe is closed."""
    host, _, port = sys.argv[1].rpartition(":")
    box = Middlebox((host.strip("[]"), int(port)), Trouble(**json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps({"address": box.address}) + "\n")
    sys.stdout.flush()
    box.run()
    sys.stdout.write(json.dumps(box.counts) + "\n")


if __name__ == "__main__":
    main()
