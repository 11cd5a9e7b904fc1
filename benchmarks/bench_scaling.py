"""The scalability ratio: the throughput of n machines over n times that of one, with all-reduce and with gradwire.

Every machine is a process in a network namespace of its own behind a shaped link (needs root and iproute2). The
computation, the optimiser's step included, is a sleep until a deadline: it leaves the processor free, as a GPU does.
Encoding, sending and applying take processor time, and the machines share the processors. In the columns "a core each"
computation and links are slower, too, by the number of machines over that of processors.

    python benchmarks/bench_scaling.py --json scaling.json      # an hour, 8 GB of memory
    python benchmarks/publish.py scaling.json docs/performance.md
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from bench_cost import LOOPBACK_BYTES_PER_S, burst_of, on_links
from harness import Report, Row, Target
from training.network import DEVICE
from transport_goodput import SECRET

from gradwire import calibration, cost
from gradwire.exchange.options import Options
from gradwire.policy import default_policy

WIDTH, LAYERS, COMPUTE_S, FORWARD_SHARE = 1_600, 10, 0.1, 1.0 / 3.0
SETTLING_STEPS, STEPS_MIN, STEPS_MAX = 30, 5, 1_000
MANY = (8, 64, 256, 1_024)  # machines, by estimate
PLAIN, OVERLAPPED = "all-reduce", "all-reduce, overlapped"
# The optimiser, on which the density depends, and the options of share.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("", {}),
    OVERLAPPED: ("", {}),
    "share, SGD": ("SGD", {}),
    "share, AdamW": ("AdamW", {}),
    "share, AdamW, overlap=1": ("AdamW", {"overlap": 1}),
    "share, AdamW, every=4, overlap=1": ("AdamW", {"every": 4, "overlap": 1}),
    "share, AdamW, every=15, overlap=4": ("AdamW", {"every": 15, "overlap": 4}),
}


def take_steps(
    pipe: Connection, rank: int, host: str, way: str, layers: int, compute_s: float, steps: int
) -> None:
    """Be one machine; report the seconds of every step, and the mean processor time of one."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal parameters do not travel at the start
    matrices = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    prepare = shared_step if WAYS[way][0] else reduced_step
    step = prepare(pipe, rank, host, way, torch.nn.Sequential(*matrices), compute_s)
    settling = 2 if prepare is reduced_step else SETTLING_STEPS + 8 * WAYS[way][1].get("every", 0)
    seconds, processor_s = [], 0.0
    for number in range(settling + steps):
        if number == settling:
            processor_s -= time.process_time()
        begin_s = time.perf_counter()
        step(begin_s)
        seconds.append(time.perf_counter() - begin_s)
    pipe.send((seconds[settling:], (processor_s + time.process_time()) / steps))
    pipe.recv()  # others may still wait for this machine


def shared_step(
    pipe: Connection, rank: int, host: str, way: str, model: Any, compute_s: float
) -> Callable[[float], object]:
    """Return a step with gradwire, which is told when it begins."""
    import torch

    import gradwire as gw
    import gradwire.torch

    name, options = WAYS[way]
    params, rng = list(model.parameters()), np.random.default_rng(rank)
    noise = torch.from_numpy(rng.standard_normal(WIDTH**2 + 10_000, np.float32)) * 1e-3
    deadline_s = 0.0

    def compute() -> None:
        for param in params:
            start = int(rng.integers(10_000))  # no drift
            param.data.add_(noise[start : start + WIDTH**2].view_as(param))
        wait_until(deadline_s)

    def step(begin_s: float) -> None:
        nonlocal deadline_s
        deadline_s = begin_s + compute_s
        shared.step()

    optimizer = getattr(torch.optim, name)(params, lr=0.01)
    optimizer.step = compute
    node = gw.Node(f"{host}:0", secret=SECRET)
    pipe.send(node.address)
    addresses = pipe.recv()
    for address in addresses[:rank]:
        node.add_peer(address)
    options = {"min_peers": len(addresses) - 1, **options}
    shared: Any = gradwire.torch.share(model, optimizer, node=node, **options)
    for param in params:
        param.grad = torch.zeros_like(param)
    return step


def reduced_step(
    pipe: Connection, rank: int, host: str, way: str, model: Any, compute_s: float
) -> Callable[[float], object]:
    """Return a step with PyTorch's all-reduce, after the backward pass or during it (as DDP's)."""
    import torch
    import torch.distributed as dist

    from gradwire.cli.run import free_port

    pipe.send(f"tcp://{host}:{free_port()}")
    addresses = pipe.recv()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host == "127.0.0.1" else DEVICE
    dist.init_process_group("gloo", addresses[0], rank=rank, world_size=len(addresses))
    flat = torch.zeros(sum(param.numel() for param in model.parameters()))
    until_s = [0.0] * len(model)  # when the gradient of a layer is there

    def step(begin_s: float) -> None:
        wait_until(begin_s + compute_s)
        dist.all_reduce(flat)

    def overlapped_step(begin_s: float) -> None:
        for layer in range(len(model)):
            backward_s = layer / len(model) * (1.0 - FORWARD_SHARE) * compute_s
            until_s[layer] = begin_s + compute_s - backward_s
        model.zero_grad()
        loss = ddp(torch.ones(1, WIDTH)).sum()
        wait_until(begin_s + FORWARD_SHARE * compute_s)
        loss.backward()

    def delay(layer: Any, _: Any, output: Any) -> None:
        number = list(model).index(layer)
        output.register_hook(lambda _: wait_until(until_s[number]))

    if way != OVERLAPPED:
        return step
    for layer in model:
        layer.register_forward_hook(delay)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    return overlapped_step


def wait_until(deadline_s: float) -> None:
    """Sleep, as a process does while its GPU computes."""
    time.sleep(max(0.0, deadline_s - time.perf_counter()))


def estimated_s(way: str, job: Any) -> float:
    """Return the seconds of a step by the cost model."""
    optimizer, options = WAYS[way]
    if not optimizer:
        ring = cost.dense_ring(job)
        return ring.step_s + (ring.hidden_s if way == PLAIN else 0.0)
    density = default_policy(job.elements, is_adaptive=optimizer == "AdamW").density
    topology: Any = "sharded" if Options().is_sharded(job.nodes, job.elements) else "mesh"
    return cost.exchange(replace(job, density=density), topology, **options).step_s


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--smoke", action="store_true", help="two machines on loopback")
    parser.add_argument("--mbit", nargs="+", type=int, default=[100, 1_000], help="0: loopback")
    parser.add_argument("--machines", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    options = parser.parse_args()
    if options.smoke:
        options.mbit, options.machines, options.seconds = [0], [2], 0.1
    elements = (layers := 1 if options.smoke else LAYERS) * WIDTH**2
    facts = {"computation": f"{COMPUTE_S * 1e3:g} ms", "parameters": f"{elements:,}"}
    report = Report("scaling", facts, "smoke test" if options.smoke else "")
    given: Any = {"elements": elements, "step_s": COMPUTE_S, "rates": calibration.measure()}
    for mbit, way, machines in product(options.mbit, options.ways, options.machines):
        rate = mbit * 125_000.0 or LOOPBACK_BYTES_PER_S
        links = {"link_bytes_per_s": rate, "latency_s": 2e-5, "frame_bytes": 42}
        expected_s = estimated_s(way, cost.Job(nodes=machines, **links, **given))
        what, target = f"{mbit} Mbit/s, {way}", Target(">=", 0.9) if WAYS[way][0] else None
        # An all-reduce waits for the link alone.
        crowd = max(1.0, machines / (os.cpu_count() or 1)) if WAYS[way][0] else 1.0
        for slower in dict.fromkeys((1.0, crowd)):
            steps = round(min(max(options.seconds / expected_s / slower, STEPS_MIN), STEPS_MAX))
            where = round(mbit / slower), burst_of(mbit), take_steps
            compute_s = COMPUTE_S * slower  # all that a machine alone does
            seconds, processor_s = on_links(machines, *where, way, layers, compute_s, steps)[0]
            # Throughput is that of all steps: with every=4 one of four has an exchange.
            figures = [compute_s / statistics.mean(seconds)] * 2
            column = f"{machines} machines{', a core each' if slower > 1.0 else ''}"
            note = f"estimate {COMPUTE_S / expected_s:.3f}"
            report.add([Row("scaling", what, column, *figures, target=target, note=note)])
            if slower == 1.0:
                slow_s = sorted(seconds)[math.ceil(0.999 * steps) - 1]
                named = {"median": statistics.median(seconds), "99.9 %": slow_s}
                for name, value_s in {**named, "processor": processor_s}.items():
                    row = ("scaling-steps", what, f"{machines}, {name}", *[value_s * 1e3] * 2)
                    report.add([Row(*row, unit="ms", note=f"of {steps}")])
    for gbit, way, machines in product((0.1, 1, 10, 100), options.ways, MANY):
        job = cost.Job(nodes=machines, link_bytes_per_s=gbit * 125e6, **given)
        figures = [COMPUTE_S / estimated_s(way, job)] * 2
        where = ("scaling-estimate", f"{gbit:g} Gbit/s, {way}", f"{machines:,} machines")
        report.add([Row(*where, *figures)])
    report.finish(options.json)


if __name__ == "__main__":
    main()
