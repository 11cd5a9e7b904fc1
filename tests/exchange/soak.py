"""Four small nodes train for as long as wanted while they are killed, stopped, ended and started again at random.

Counted are ends of nodes that nobody has killed or asked to end; trainings that begin at step 0 while a node lives that
has trained; steps after which two nodes of one synchronous training have other parameters. All have to be 0.

    python tests/exchange/soak.py --minutes 60 --ways mesh sharded async every sharded-every async-every
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import gradwire as gw

NODES = 4
NUMEL = 20_000
SECRET = bytes(range(100, 132))
STEP_S = 0.1
EVENT_S, STOP_S, AWAY_S = (1.0, 8.0), (1.0, 20.0), (0.0, 10.0)  # between events, stopped, dead
SHARED = {"apply_residual": True, "start_timeout_s": 1_800.0, "digest_s": 1.0}
SYNC = {**SHARED, "on_straggler": "wait"}
ASYNC = {**SHARED, "mode": "async", "topology": "mesh"}
WAYS: dict[str, Any] = {
    "mesh": {**SYNC, "topology": "mesh"},
    "sharded": {**SYNC, "topology": "sharded"},
    "async": ASYNC,
    "every": {**SYNC, "topology": "mesh", "every": 4},
    "sharded-every": {**SYNC, "topology": "sharded", "every": 4},
    "async-every": {**ASYNC, "every": 4},
}


def train(way: str, rank: int, ports: list[int]) -> None:
    """Train until a signal asks for the end; print a line for the beginning and one for every exchange."""
    ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ends.set())
    rng = np.random.default_rng()
    params = np.zeros(NUMEL, np.float32)
    address, *others = (f"127.0.0.1:{port}" for port in (ports[rank], *ports))
    with gw.Node(address, others, secret=SECRET, node_id=rank + 1) as node:
        encoder = gw.Encoder(NUMEL, gw.TargetDensity(0.01), keeps_residual=False)
        share = gw.Exchange(encoder, node, **WAYS[way])
        share.join(params)

        def tell(word: str) -> None:
            training = share.state_dict(params)["training"]
            # A node that was stopped finishes its step, and then learns that the others went on without it.
            members = sorted(peer.incarnation for peer in (*share.members, node.peer))
            digest = zlib.crc32(np.concatenate(share.shared(params)).tobytes())
            words = [word, share.next_step, digest, training, *members]
            sys.stdout.write(" ".join(map(str, words)) + "\n")
            sys.stdout.flush()

        tell("begin")
        while not ends.wait(STEP_S):
            params += rng.normal(0.0, 1e-3, NUMEL).astype(np.float32)
            share.step_moved(params)
            if not share.has_local_steps:
                tell("step")
        with contextlib.suppress(gw.PeerLost):  # the last other node was killed, too
            share.leave(params)


class Soak:
    """The four processes of one way, and what they have said."""

    def __init__(self, way: str, logs: Path, port: int) -> None:
        self.way = way
        self.counts = Counter[str]()
        self._ports = [str(port + rank) for rank in range(NODES)]
        self._logs = [(logs / f"{way}-{rank}.log").open("a") for rank in range(NODES)]
        self._said: dict[int, tuple[int, str]] = {}  # step and training, by rank
        self._digests: dict[tuple[str, ...], str] = {}
        self._asked: set[int] = set()  # process ids that may end
        self._lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen[str]] = {}  # the latest, by rank
        for rank in range(NODES):
            self._start(rank)

    def _start(self, rank: int) -> None:
        command = [sys.executable, __file__, "--node", self.way, str(rank), *self._ports]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._logs[rank], text=True
        )
        with self._lock:
            self._processes[rank] = process
            self._said.pop(rank, None)
        threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if not line.endswith("\n"):
                return  # killed in the middle of it
            word, step, digest, training, *members = line.split()
            with self._lock:
                if self._processes[rank] is not process:
                    return  # the last words of a process that another one has followed
                lives = set(filter(self._lives, self._processes))
                others = {each: self._said[each] for each in lives & self._said.keys() - {rank}}
                if step == "0" and any(n > 0 and it != training for n, it in others.values()):
                    self._fault(rank, "begun at 0", f"others are at {others}")
                self._said[rank] = int(step), training
                self.counts[word] += 1
                expected = self._digests.setdefault((step, training, *members), digest)
                if "async" not in self.way and expected != digest:
                    self._fault(rank, "unequal", line)

    def _lives(self, rank: int) -> bool:
        return self._processes[rank].poll() is None

    def _fault(self, rank: int, kind: str, text: str) -> None:
        self.counts[kind] += 1
        print(f"{time.ctime()} FAULT {kind}: {text}", file=self._logs[rank], flush=True)

    def run(self, end_s: float) -> None:
        """Let things happen until a time."""
        plans: list[tuple[float, int]] = []  # when a stopped or dead node goes on
        event_s = 0.0
        while time.monotonic() < end_s:
            now_s = time.monotonic()
            for at_s, rank in [plan for plan in plans if plan[0] <= now_s]:
                plans.remove((at_s, rank))
                if self._lives(rank):
                    self._processes[rank].send_signal(signal.SIGCONT)
                else:
                    self._start(rank)
            busy = {rank for _, rank in plans}
            for rank in set(range(NODES)) - busy:
                if not self._lives(rank):
                    process = self._processes[rank]
                    if process.pid not in self._asked or process.returncode > 0:
                        self._fault(rank, "ends", f"status {process.returncode}")
                    plans.append((now_s + random.uniform(*AWAY_S), rank))
            rank = random.randrange(NODES)
            if now_s >= event_s and rank not in busy and self._lives(rank):
                event_s = now_s + random.uniform(*EVENT_S)
                what = random.choice(["SIGKILL", "SIGSTOP", "SIGTERM"])
                self.counts[what] += 1
                self._processes[rank].send_signal(signal.Signals[what])
                if what == "SIGSTOP":
                    plans.append((now_s + random.uniform(*STOP_S), rank))
                else:
                    self._asked.add(self._processes[rank].pid)
            time.sleep(0.05)
        for process in self._processes.values():
            process.kill()


def main() -> None:
    """Run the ways beside each other, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--logs", type=Path, default=Path())
    parser.add_argument("--port", type=int, default=23_100)
    parser.add_argument("--node", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        way, rank, *ports = options.node
        train(way, int(rank), list(map(int, ports)))
        return
    end_s = time.monotonic() + 60.0 * options.minutes
    options.logs.mkdir(parents=True, exist_ok=True)
    soaks = [Soak(way, options.logs, options.port + 4 * n) for n, way in enumerate(options.ways)]
    threads = [threading.Thread(target=soak.run, args=(end_s,)) for soak in soaks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for soak in soaks:
        sys.stdout.write(f"{soak.way} {json.dumps(dict(soak.counts))}\n")
    faults = ("ends", "begun at 0", "unequal")
    sys.exit(any(soak.counts[kind] for soak in soaks for kind in faults))


if __name__ == "__main__":
    main()
