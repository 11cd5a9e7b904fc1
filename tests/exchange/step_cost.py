"""The processor time of a step, all to all of six processes: python tests/exchange/step_cost.py [STEPS].

To compare two versions, run it with each one's folder ``python`` as PYTHONPATH, in turn.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import time
from typing import Any

NODES = 6
NUMEL = 1_000_000
FIRST_STEPS = 10


def work(rank: int, addresses: list[str], steps: int, results: Any, end: Any) -> None:
    import numpy as np

    import gradwire as gw

    rng = np.random.default_rng(rank)
    updates = [rng.standard_normal(NUMEL).astype(np.float32) for _ in range(4)]
    params = np.zeros(NUMEL, np.float32)
    with gw.Node(addresses[rank], addresses, secret=bytes(range(32))) as node:
        encoder = gw.Encoder(NUMEL, gw.TargetDensity(0.01))
        share = gw.Exchange(encoder, node, min_peers=NODES - 1, topology="mesh")
        began_s = 0.0
        for step in range(steps):
            if step == FIRST_STEPS:
                began_s = time.process_time()
            share.step(updates[step % 4], params)
        results.put((time.process_time() - began_s) / (steps - FIRST_STEPS))
        end.wait()


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(NODES)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    context = multiprocessing.get_context("spawn")
    results, end = context.Queue(), context.Barrier(NODES)
    processes = [
        context.Process(target=work, args=(rank, addresses, steps, results, end))
        for rank in range(NODES)
    ]
    for process in processes:
        process.start()
    total_s = sum(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    sys.stdout.write(f"{total_s * 1e3:.1f} ms of processor time for a step\n")


if __name__ == "__main__":
    main()
