"""A parameter server on one machine: workers compute gradients, one process applies the descent, another evaluates.

    python examples/coprocessor.py

Four workers read the parameters from shared memory, without a copy, and send their compressed gradients to the owner.
The owner applies each when it comes (momentum, asynchronously) and writes the parameters. An evaluator takes consistent
snapshots meanwhile. One worker is killed on the way, and replaced: neither the owner nor the others wait for it.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise

import digits
import numpy as np
import processes
from numpy.typing import NDArray

import gradwire as gw

WORKERS, UPDATES, BATCH = 4, 3_000, 32
LEARNING_RATE, MOMENTUM, DENSITY = 0.01, 0.9, 0.02
LAYERS = 64, 128, 10
PATIENCE_S = 30.0
OWNER, EVALUATOR = 0, WORKERS + 1

Params = list[NDArray[np.float32]]


def initial() -> Params:
    """Return the weights and biases of two layers."""
    rng, params = np.random.default_rng(0), []
    for inputs, outputs in pairwise(LAYERS):
        weights = rng.standard_normal((inputs, outputs)) * np.sqrt(2.0 / inputs)
        params += [np.float32(weights), np.zeros(outputs, np.float32)]
    return params


def forward(params: Params, pixels: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Return the hidden layer and the logits."""
    hidden = np.maximum(pixels @ params[0] + params[1], 0.0)
    return hidden, hidden @ params[2] + params[3]


def gradients(params: Params, images: digits.Images) -> Params:
    """Return the gradients of the mean cross-entropy."""
    hidden, logits = forward(params, images.pixels)
    error = np.exp(logits - logits.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(error)), images.labels] -= 1.0
    error /= len(error)
    before = (error @ params[2].T) * (hidden > 0.0)
    return [images.pixels.T @ before, before.sum(0), hidden.T @ error, error.sum(0)]


def own(name: str, addresses: list[str]) -> None:
    """Be the owner: apply the descent to every gradient that comes."""
    params = initial()
    velocity, gradient = ([np.zeros_like(one) for one in params] for _ in range(2))
    applied = 0
    with gw.Node(addresses[OWNER]) as node, gw.HostedModel(name, params) as model:
        while applied < UPDATES:
            for _, _, payload in node.receive(timeout_s=PATIENCE_S):
                gw.apply(gw.Message.parse(payload), gradient)
                with model.writing() as hosted:
                    for param, speed, one in zip(hosted, velocity, gradient, strict=True):
                        speed *= MOMENTUM
                        speed += one
                        param -= np.float32(LEARNING_RATE) * speed
                        one[...] = 0.0
                applied += 1


def work(name: str, addresses: list[str], rank: int) -> None:
    """Be a worker: send gradients until the model is gone."""
    images = digits.training(rank - 1, WORKERS)
    rng = np.random.default_rng(os.getpid())
    with (
        gw.Node(addresses[rank], [addresses[OWNER]]) as node,
        gw.HostedModel.attach(name, initial(), timeout_s=PATIENCE_S) as model,
    ):
        encoder = gw.Encoder(sum(one.size for one in model.params), gw.TargetDensity(DENSITY))
        node.wait_for_peers(1, PATIENCE_S)
        while model.is_live:
            chosen = rng.integers(len(images.labels), size=BATCH)
            batch = digits.Images(images.pixels[chosen], images.labels[chosen])
            ticket = node.publish(encoder.encode(gradients(model.params, batch)))
            while not ticket.is_done and model.is_live:
                node.receive(timeout_s=0.001)  # one message at a time, so that none is out of date


def evaluate(name: str) -> None:
    """Be the evaluator: print the accuracy of snapshots while the others train."""
    images, seen = digits.held_out(), -1
    with gw.HostedModel.attach(name, timeout_s=PATIENCE_S) as model:
        while seen < UPDATES and (model.is_live or seen < model.version):
            while model.is_live and model.version < min(seen + UPDATES // 10, UPDATES):
                time.sleep(0.02)
            seen, params = model.snapshot()
            found = forward(params, images.pixels)[1].argmax(1)
            accuracy = 100 * (found == images.labels).mean()
            print(f"version {seen}: accuracy {accuracy:.1f}%", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, help="of this process; without, all are started here")
    parser.add_argument("--addresses", nargs=WORKERS + 2, help="host:port of every process")
    arguments = parser.parse_args()
    if arguments.rank is None:
        launch()
        return
    name = "coprocessor-" + arguments.addresses[OWNER].rpartition(":")[2]
    if arguments.rank == OWNER:
        own(name, arguments.addresses)
    elif arguments.rank == EVALUATOR:
        evaluate(name)
    else:
        work(name, arguments.addresses, arguments.rank)


def launch() -> None:
    """Start all processes, kill a worker on the way and replace it."""
    launcher = processes.Workers(processes.free_addresses(WORKERS + 2))
    started = [launcher.start(rank) for rank in range(WORKERS + 2)]
    evaluator = started.pop()
    assert evaluator.stdout is not None
    for number, line in enumerate(evaluator.stdout):
        print(line, end="", flush=True)
        if number == 3:
            started[WORKERS].kill()
            started[WORKERS].communicate()
            started[WORKERS] = launcher.start(WORKERS)
            print(f"worker {WORKERS} is killed, and replaced", flush=True)
    processes.finish([*started, evaluator])


if __name__ == "__main__":
    main()
