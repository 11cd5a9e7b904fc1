"""Four small nodes train for as long as wanted while they are killed, stopped, ended and started again at random.

Counted: ends of nodes that nobody has killed or asked to end; trainings that begin at step 0 while a node lives that
has trained; steps after which two nodes of one synchronous training have other parameters. All have to be 0.

    python benchmarks/soak_exchange.py --minutes 60 --ways mesh sharded async every sharded-every async-every
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
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
EVENT_S = (1.0, 8.0)  # between two events of one way
STOP_S = (1.0, 20.0)
AWAY_S = (0.0, 10.0)  # until a dead node is started again
WAYS: dict[str, dict[str, Any]] = {
    "mesh": {"topology": "mesh"},
    "sharded": {"topology": "sharded"},
    "async": {"mode": "async", "topology": "mesh"},
    "every": {"topology": "mesh", "every": 4},
    "sharded-every": {"topology": "sharded", "every": 4},
    "async-every": {"mode": "async", "topology": "mesh", "every": 4},
}


def train(way: str, rank: int, ports: list[int]) -> None:
    """Train until a signal asks for the end; print a line for the beginning and one for every exchange."""
    ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ends.set())
    rng = np.random.default_rng()
    params = np.zeros(NUMEL, np.float32)
    address, *others = (f"127.0.0.1:{port}" for port in (ports[rank], *ports))
    with gw.Node(address, others, secret=SECRET, node_id=rank + 1) as node:
        waits = "wait" if WAYS[way].get("mode") != "async" else "raise"
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.TargetDensity(0.01)),
            node,
            apply_residual=True,
            on_straggler=waits,
            start_timeout_s=1_800.0,
            digest_s=1.0,
            **WAYS[way],
        )
        share.join(params)
        print("begin", share.next_step, flush=True)
        while not ends.wait(STEP_S):
            params += rng.normal(0.0, 1e-3, NUMEL).astype(np.float32)
            share.step_moved(params)
            if share.is_settled and not share.has_local_steps:
                digest = zlib.crc32(np.concatenate(share.shared(params)).tobytes())
                # A node that was stopped finishes its step, and then learns that the others went on without it.
                members = sorted(peer.incarnation for peer in (*share.members, node.peer))
                state = f"{share.state_dict(params)['training']}/{members}".replace(" ", "")
                print("step", share.next_step, f"{digest:08x}", state, flush=True)
        share.leave(params)


class Nodes:
    """The four processes of one way, and what they have said."""

    def __init__(self, way: str, folder: Path, first_port: int) -> None:
        self.way = way
        self.counts = Counter[str]()
        self._ports = [first_port + rank for rank in range(NODES)]
        self._logs = [folder / f"{way}-{rank}.log" for rank in range(NODES)]
        self._processes: list[subprocess.Popen[str]] = []
        self._steps = [0] * NODES
        self._asked: set[int] = set()  # process ids that may end
        self._digests: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._random = random.Random(way)
        self._processes = [self._start(rank) for rank in range(NODES)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--node", self.way, str(rank), *map(str, self._ports)]
        self._steps[rank] = 0
        with self._logs[rank].open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        threading.Thread(target=self._read, args=(rank, process), daemon=True).start()
        return process

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            word, *rest = line.split()
            with self._lock:
                self._note(rank, word, rest)

    def _note(self, rank: int, word: str, rest: list[str]) -> None:
        step = int(rest[0])
        if word == "begin":
            lives = [process.poll() is None for process in self._processes]
            trained = [steps > 0 and lives[other] for other, steps in enumerate(self._steps)]
            if step == 0 and any(trained):
                self._fault(rank, f"begins at 0, others are at {self._steps}", "begun at 0")
            return
        if step < self._steps[rank]:
            self.counts["steps given up"] += self._steps[rank] - step
        self._steps[rank] = step
        self.counts["steps"] += 1
        if WAYS[self.way].get("mode") != "async":
            key = (rest[2], rest[0])
            expected = self._digests.setdefault(key, rest[1])
            self.counts["equal"] += expected == rest[1]
            if expected != rest[1]:
                self._fault(rank, f"step {step}: {rest[1]}, not {expected}", "unequal")

    def _fault(self, rank: int, text: str, kind: str) -> None:
        self.counts[kind] += 1
        with self._logs[rank].open("a") as log:
            log.write(f"FAULT: {text}\n")

    def run(self, end_s: float) -> None:
        """Let things happen until a time."""
        waking: list[tuple[float, int]] = []
        starting: dict[int, float] = {}
        event_s = 0.0
        while time.monotonic() < end_s:
            now_s = time.monotonic()
            for due in [due for due in waking if due[0] <= now_s]:
                waking.remove(due)
                self._processes[due[1]].send_signal(signal.SIGCONT)
            for rank in [rank for rank, at_s in starting.items() if at_s <= now_s]:
                del starting[rank]
                self._processes[rank] = self._start(rank)
            for rank, process in enumerate(self._processes):
                if rank in starting or process.poll() is None:
                    continue
                if process.pid not in self._asked or process.returncode > 0:
                    self._fault(rank, f"ended with status {process.returncode}", "ends")
                starting[rank] = now_s + self._random.uniform(*AWAY_S)
            if now_s >= event_s:
                event_s = now_s + self._random.uniform(*EVENT_S)
                rank = self._random.randrange(NODES)
                if rank not in starting and rank not in [stopped for _, stopped in waking]:
                    self._hurt(rank, waking)
            time.sleep(0.05)
        for process in self._processes:
            process.kill()

    def _hurt(self, rank: int, waking: list[tuple[float, int]]) -> None:
        process = self._processes[rank]
        what = self._random.choice(["kill", "stop", "leave"])
        self.counts[what] += 1
        if what == "stop":
            process.send_signal(signal.SIGSTOP)
            waking.append((time.monotonic() + self._random.uniform(*STOP_S), rank))
            return
        self._asked.add(process.pid)
        process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)


def main() -> None:
    """Run the ways beside each other, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--port", type=int, default=23_100)
    parser.add_argument("--node", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        way, rank, *ports = options.node
        train(way, int(rank), list(map(int, ports)))
        return
    end_s = time.monotonic() + 60.0 * options.minutes
    options.logs.mkdir(parents=True, exist_ok=True)
    nodes = [
        Nodes(way, options.logs, options.port + NODES * n) for n, way in enumerate(options.ways)
    ]
    threads = [threading.Thread(target=each.run, args=(end_s,)) for each in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in nodes:
        print(each.way, json.dumps(dict(each.counts)))
    sys.exit(any(each.counts[kind] for each in nodes for kind in ("ends", "begun at 0", "unequal")))


if __name__ == "__main__":
    main()
