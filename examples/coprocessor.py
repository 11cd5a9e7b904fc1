"""A parameter server: workers compute gradients, one process applies the descent, another evaluates.

    python examples/coprocessor.py

Two of the four workers read the parameters in shared memory, without a copy. The other two play workers of another
machine: they have replicas, which the host's answers change. The host applies every compressed gradient when it comes,
with Nesterov momentum, and refuses those that are too old. An evaluator takes consistent snapshots meanwhile. One
worker is killed on the way, and replaced: neither the host nor the others wait for it.
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
from gradwire.coprocessor import SGD, Host, Worker
from gradwire.transport import PeerJoined

WORKERS, UPDATES, BATCH = 4, 3_000, 32
LEARNING_RATE, MOMENTUM, DENSITY = 0.01, 0.9, 0.02
MAX_STALENESS = 20
LAYERS = 64, 128, 10
PATIENCE_S = 30.0
HOST, EVALUATOR = 0, WORKERS + 1
REMOTE = {3, 4}

Params = list[NDArray[np.float32]]


def initial() -> Params:
    """Return the weights and biases of two layers."""
    rng = np.random.default_rng(0)
    params = []
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


def host_model(name: str, addresses: list[str]) -> None:
    """Be the host: apply the descent to every gradient that comes."""
    descent = SGD(LEARNING_RATE, MOMENTUM, nesterov=True)
    with (
        gw.Node(addresses[HOST]) as node,
        Host(
            node,
            initial(),
            descent,
            name=name,
            max_staleness=MAX_STALENESS,
            threshold=gw.TargetDensity(DENSITY),
        ) as host,
    ):
        joined = 0
        last = UPDATES
        # On a busy machine the training would otherwise end before the replacement takes part.
        while host.version < last or joined <= WORKERS:
            host.step(PATIENCE_S)
            for event in node.events():
                if isinstance(event, PeerJoined):
                    joined += 1
                    last = max(UPDATES, host.version + UPDATES // 10)


def work(name: str, addresses: list[str], rank: int) -> None:
    """Be a worker: send gradients until the training ends."""
    images = digits.training(rank - 1, WORKERS)
    rng = np.random.default_rng(os.getpid())
    model = None if rank in REMOTE else name
    density = gw.TargetDensity(DENSITY)
    with (
        gw.Node(addresses[rank], [addresses[HOST]]) as node,
        Worker(node, initial(), name=model, threshold=density, timeout_s=PATIENCE_S) as worker,
    ):
        is_training = True
        while is_training:
            chosen = rng.integers(len(images.labels), size=BATCH)
            batch = digits.Images(images.pixels[chosen], images.labels[chosen])
            is_training = worker.send(gradients(worker.params, batch))


def evaluate(name: str) -> None:
    """Be the evaluator: print the accuracy of snapshots while the others train."""
    images = digits.held_out()
    version = -1
    with gw.HostedModel.attach(name, timeout_s=PATIENCE_S) as model:
        while version < UPDATES and (model.is_live or model.is_finished):
            due = min(version + UPDATES // 10, UPDATES)
            while model.is_live and model.version < due:
                time.sleep(0.02)
            version, params = model.snapshot()
            predicted = forward(params, images.pixels)[1].argmax(1)
            accuracy = 100 * (predicted == images.labels).mean()
            print(f"version {version}: accuracy {accuracy:.1f}%", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, help="of this process; without, all are started here")
    parser.add_argument("--addresses", nargs=WORKERS + 2, help="host:port of every process")
    arguments = parser.parse_args()
    if arguments.rank is None:
        launch()
        return
    name = "coprocessor-" + arguments.addresses[HOST].rpartition(":")[2]
    if arguments.rank == HOST:
        host_model(name, arguments.addresses)
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
