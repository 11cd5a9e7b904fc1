"""The cost model's prediction of a step beside the measured step, over shaped links and loopback.

Every node is a process in a network namespace of its own, which needs root, iproute2 and a quiet machine. A step's
computation is a sleep, because the nodes share few processors; for the same reason the machine's rates are slowed by
the number of nodes over that of processors.

    python benchmarks/bench_cost.py --json cost.json        # a quarter of an hour
    python benchmarks/publish.py cost.json docs/scale.md
    python benchmarks/bench_cost.py --nodes 8 --mbit 10 100 --elements 5000000 --ways mesh sharded
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from children import children
from harness import Report, Row, Target
from training.network import BURST_BYTES, network
from transport_goodput import SECRET

COMPUTE_S, DENSITY, LOOPBACK_BYTES_PER_S = 0.02, 0.01, 5e9  # loopback: processors are slower
MBIT, NODES, ELEMENTS = [10, 100, 1_000, 0], [2, 4], [1_000_000, 5_000_000]  # 0: loopback
SETTLING_STEPS, STEPS_MIN, STEPS_MAX, MEASURED_S = 40, 2, 30, 20.0
WAYS: dict[str, dict[str, Any]] = {
    "mesh": {"topology": "mesh"},
    "sharded": {"topology": "sharded"},
    "dense": {"topology": "mesh", "codec": "dense"},
}


def take_steps(pipe: Connection, rank: int, host: str, elements: int, way: str, steps: int) -> None:
    """Be one node, and report the seconds of every step and the mean of the bytes received."""
    import gradwire as gw

    rng = np.random.default_rng(rank)
    noise = rng.standard_normal(elements + 10_000, np.float32)
    params = np.zeros(elements, np.float32)
    encoder = gw.Encoder(elements, threshold=gw.TargetDensity(DENSITY))
    settling = 2 if "codec" in WAYS[way] else SETTLING_STEPS
    with gw.Node(f"{host}:0", secret=SECRET) as node:
        pipe.send(node.address)
        addresses = pipe.recv()
        for address in addresses[:rank]:
            node.add_peer(address)
        share = gw.Exchange(
            encoder, node, min_peers=len(addresses) - 1, timeout_s=600.0, **WAYS[way]
        )
        seconds, received = [], []
        for _ in range(settling + steps):
            update = noise[(offset := rng.integers(10_000)) : offset + elements]  # no drift
            begin_s = time.perf_counter()
            time.sleep(COMPUTE_S)
            received.append(share.step(update, params).received_bytes)
            seconds.append(time.perf_counter() - begin_s)
        pipe.send((seconds[settling:], statistics.mean(received[settling:])))
        pipe.recv()


def on_links(
    nodes: int, mbit: int, burst_bytes: int, node: Callable[..., None], *arguments: Any
) -> list[Any]:
    """Return what ``node(pipe, rank, host, *arguments)`` reports in every process behind a link; 0 Mbit/s: loopback.

    Every node sends its address, receives all of them, and reports; it ends when it is told to.
    """
    unlimited = nullcontext((["127.0.0.1"] * nodes, []))
    with network(nodes, mbit, burst_bytes) if mbit else unlimited as (hosts, commands):
        spaces = tuple(command[-1] for command in commands)
        calls = [(node, rank, host, *arguments) for rank, host in enumerate(hosts)]
        with children(*calls, namespaces=spaces) as pipes:
            addresses = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(addresses)
            reports = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send("end")
    return reports


def burst_of(mbit: int) -> int:
    """Return the size of a token bucket that holds 5 ms: a larger one fills while a step computes."""
    return min(BURST_BYTES, 625 * mbit)


def main() -> None:
    """Measure, print, and write JSON if asked."""
    from gradwire import calibration, cost

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--smoke", action="store_true", help="two nodes on loopback")
    parser.add_argument("--mbit", nargs="+", type=int, default=MBIT, help="0: loopback")
    parser.add_argument("--nodes", nargs="+", type=int, default=NODES)
    parser.add_argument("--elements", nargs="+", type=int, default=ELEMENTS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["mesh", "sharded", "dense"])
    options = parser.parse_args()
    if options.smoke:
        options.mbit, options.nodes, options.elements = [0], [2], [100_000]
    why, errors = "smoke test" if options.smoke else "", []
    report = Report("cost", {"computation": f"{COMPUTE_S * 1e3:g} ms"}, why)
    rates = calibration.measure()
    for mbit, nodes, elements in product(options.mbit, options.nodes, options.elements):
        shared = max(1.0, nodes / (os.cpu_count() or 1))  # nodes of one processor
        job = cost.Job(
            elements=elements,
            nodes=nodes,
            step_s=COMPUTE_S,
            link_bytes_per_s=mbit * 125_000.0 or LOOPBACK_BYTES_PER_S,
            latency_s=2e-5,
            density=DENSITY,
            frame_bytes=42,
            rates=cost.Rates(**{name: rate * shared for name, rate in asdict(rates).items()}),
        )
        what = f"{f'{mbit} Mbit/s' if mbit else 'loopback'}, {nodes} nodes, {elements / 1e6:g} M elements"
        for way in options.ways:
            predicted_s = cost.exchange(job, **WAYS[way]).step_s
            steps = round(min(max(MEASURED_S / predicted_s, STEPS_MIN), STEPS_MAX))
            reports = on_links(nodes, mbit, burst_of(mbit), take_steps, elements, way, steps)
            received = statistics.mean(nbytes for _, nbytes in reports)
            step_s = statistics.median(
                reports[0][0]
            )  # other work on the machine delays single steps
            errors.append(abs(predicted_s / step_s - 1.0))
            note = f"{step_s * 1e3:.4g} ms, not {predicted_s * 1e3:.4g}; {received / 1e3:.4g} kB"
            report.add([Row("cost", what, way, *[predicted_s / step_s] * 2, note=note)])
    figures = statistics.median(errors), max(errors)
    for name, figure, most in zip(("median", "largest"), figures, (0.15, 0.35), strict=True):
        report.add([Row("cost-errors", "error", name, figure, figure, target=Target("<=", most))])
    report.finish(options.json)


if __name__ == "__main__":
    main()
