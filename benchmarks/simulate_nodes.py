"""Trainings of many simulated nodes with the real codec, for docs/scale.md: losses and bytes, no times.

All nodes are in this process: a 64-256-128-10 network on scikit-learn's digits, 64 images a step in all, each node with
its residual applied locally. Owners have residuals of their own, as in the sharded exchange.

    OMP_NUM_THREADS=1 nice python benchmarks/simulate_nodes.py            # all tables, half an hour
    OMP_NUM_THREADS=1 nice python benchmarks/simulate_nodes.py --only sgd --seeds 1
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import gradwire as gw
from gradwire.cli.demo.training import Network

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import digits

BATCH, MOMENTUM = 64, 0.9
NETWORK = Network((64, 256, 128, 10))
NUMEL = NETWORK.numel
HEADER_BYTES, PIECE_BYTES = 48, 8  # of a message, and before the messages of one part
TRAINING_IMAGES = 899  # half; the loss of the other half has less noise than that of a few images
FALLING_STEPS, FALLING_FROM = 50, 10.0

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Run:
    """One training; owners: 0 for the mesh; density None: whole updates, with one optimiser for the mean gradient."""

    nodes: int
    density: float | None
    owners: int = 0
    owner_density: float = 0.01
    adam: bool = False
    rate: float = 0.02
    steps: int = 400
    falls: bool = False  # the density, from ten times as much, in the first steps

    @property
    def name(self) -> str:
        if self.density is None or not self.owners:
            return "dense" if self.density is None else f"mesh, {self.density:g}"
        falling = ", falling from 10 times" if self.falls else ""
        return (
            f"sharded, {self.owners} owners, {self.density:g} and {self.owner_density:g}{falling}"
        )


def optimizer(run: Run) -> Callable[[Floats], Floats]:
    """Return a function from gradients to updates; every row has a state of its own."""
    first = second = np.float32(0.0)
    step = 0

    def sgd(gradients: Floats) -> Floats:
        nonlocal first
        first = MOMENTUM * first + gradients
        return np.float32(-run.rate) * first

    def adam(gradients: Floats) -> Floats:
        nonlocal first, second, step
        step += 1
        first = np.float32(0.9) * first + np.float32(0.1) * gradients
        second = np.float32(0.999) * second + np.float32(0.001) * gradients**2
        scaled = first / np.float32(1 - 0.9**step)
        deviation = np.sqrt(second / np.float32(1 - 0.999**step)) + np.float32(1e-8)
        # The mean of the nodes' updates is too short by about this factor where noise dominates.
        return np.float32(-run.rate * math.sqrt(len(gradients))) * scaled / deviation

    return adam if run.adam else sgd


def train(run: Run, seed: int) -> tuple[float, float, float]:
    """Return the held-out loss, and the bytes that the mean node receives per parameter and step, all and coded."""
    rng = np.random.default_rng(seed)
    both = zip(digits.training(0, 1), digits.held_out(), strict=True)
    halves = zip(*(np.split(np.concatenate(one), [TRAINING_IMAGES]) for one in both), strict=True)
    images, held_out = (digits.Images(*half) for half in halves)
    shared = NETWORK.initial(rng)
    rows = 1 if run.density is None else run.nodes
    update_of, received, headers = optimizer(run), 0, 0
    gradients = np.empty((rows, NUMEL), np.float32)
    partition = gw.Partition(NUMEL, max(1, run.owners))
    encoders = [gw.Encoder(NUMEL, policy(run.density or 1.0, run, 0)) for _ in range(rows)]
    owners = [gw.Encoder(size, policy(run.owner_density, run, 0)) for size in partition.sizes]
    for step in range(run.steps):
        chosen = rng.integers(len(images.labels), size=(rows, BATCH // rows))
        for encoder, batch, out in zip(encoders, chosen, gradients, strict=True):
            params = shared + encoder.residual
            NETWORK.gradient(params, images.pixels[batch], images.labels[batch], out)
        updates = update_of(gradients)
        if run.density is None:
            shared += updates[0]
            received += 2 * (run.nodes - 1) * 4 * NUMEL // run.nodes
            continue
        if run.falls and step <= FALLING_STEPS:
            for one in (*encoders, *owners):
                density = run.density if one in encoders else run.owner_density
                one.set_policy(policy(density, run, step))
        pairs = list(zip(encoders, updates, strict=True))
        if not run.owners:
            messages = [one.encode(update) for one, update in pairs]
            gw.apply_many(messages, shared, 1.0 / run.nodes)
            received += (run.nodes - 1) * sum(one.nbytes for one in messages) // run.nodes
            headers += (run.nodes - 1) * HEADER_BYTES
            continue
        parts = [one.encode(update, parts=partition) for one, update in pairs]
        results = []
        for index, owner in enumerate(owners):
            gw.apply_many([one[index] for one in parts], owner.residual, 1.0 / run.nodes)
            results.append(owner.encode())
            gw.apply(results[-1], shared, part=partition[index])
        # An owner's own part and result do not travel; the others', to and from n - 1 nodes.
        moved = sum(one.nbytes + PIECE_BYTES for node in parts for one in node)
        moved += run.nodes * sum(one.nbytes + PIECE_BYTES for one in results)
        received += moved * (run.nodes - 1) // run.nodes // run.nodes
        headers += 2 * run.owners * (HEADER_BYTES + PIECE_BYTES) * (run.nodes - 1) // run.nodes
    loss = NETWORK.gradient(shared, held_out.pixels, held_out.labels, gradients[0])
    per_parameter = run.steps * NUMEL
    return loss, received / per_parameter, (received - headers) / per_parameter


def policy(density: float, run: Run, step: int) -> gw.TargetDensity:
    """Return the policy of one step."""
    left = max(0.0, 1.0 - step / FALLING_STEPS) if run.falls else 0.0
    return gw.TargetDensity(min(0.5, density * FALLING_FROM**left))


def runs() -> Iterator[tuple[str, list[Run]]]:
    """Yield the name of every table, and its lines; the first two are dense and mesh."""
    for nodes in (16, 64):
        mesh = Run(nodes, 0.01)
        sharded = [replace(mesh, owners=owners) for owners in (nodes, 8)]
        yield f"sgd, {nodes} nodes", [Run(nodes, None), mesh, *sharded]
    for rate in (3e-3, 1e-3):
        one = Run(16, 0.01, adam=True, rate=rate, steps=300)
        sharded = replace(one, owners=16, owner_density=0.03)
        ways = [replace(one, density=None), one, sharded, replace(sharded, owner_density=0.01)]
        ways += [replace(sharded, falls=True), replace(one, density=0.05)]
        ways += [replace(sharded, density=p, owner_density=p) for p in (0.03, 0.05, 0.08)]
        yield f"adam, 16 nodes, rate {rate:g}", ways


def main() -> None:
    """Train, and print a table of each kind in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tables whose names begin so")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for title, lines in runs():
        if not title.startswith(options.only):
            continue
        print(f"\n{title}\n\n| exchange | loss | / mesh | bytes | / mesh | coded | / mesh |")
        print("| --- " * 7 + "|")
        found = [[train(line, seed) for seed in range(options.seeds)] for line in lines]
        means = [[statistics.mean(column) for column in zip(*one, strict=True)] for one in found]
        for line, figures, each in zip(lines, means, found, strict=True):
            pairs = zip(figures, means[1], strict=True)
            cells = " | ".join(f"{one:.4f} | {one / mesh:.3f}" for one, mesh in pairs)
            spread = f" ({min(each)[0]:.4f} to {max(each)[0]:.4f}) |"
            print(f"| {line.name} | {cells.replace(' |', spread, 1)} |", flush=True)


if __name__ == "__main__":
    main()
