"""Fit a linear model on two machines (or in two terminals) with different halves of the data.

On both, the same secret: export GRADWIRE_SECRET=$(gradwire secret)

    python examples/train_together.py --bind 10.1.1.5:40123 --peer 10.1.1.7:40123 --half 0
    python examples/train_together.py --bind 10.1.1.7:40123 --peer 10.1.1.5:40123 --half 1

Both end with the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse

import numpy as np

import gradwire as gw

FEATURES, SAMPLES, STEPS, LEARNING_RATE = 500, 4_000, 400, 0.1


def samples(half: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return this half's inputs and targets, and the parameters that made them."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(FEATURES).astype(np.float32)
    inputs = rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return inputs[half::2], inputs[half::2] @ truth, truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bind", required=True, help="host:port of this node")
    parser.add_argument("--peer", required=True, help="host:port of the other node")
    parser.add_argument("--half", type=int, choices=(0, 1), required=True)
    arguments = parser.parse_args()

    inputs, targets, truth = samples(arguments.half)
    params = np.zeros(FEATURES, np.float32)
    sent_bytes = 0
    with gw.Node(arguments.bind, [arguments.peer]) as node:
        share = gw.share(params, node=node)
        for _ in range(STEPS):
            gradient = inputs.T @ (inputs @ params - targets) / len(inputs)
            sent_bytes += share.step(np.float32(-LEARNING_RATE) * gradient).sent_bytes
    found = share.shared()
    error = np.abs(found - truth).max()
    print(f"largest error {error:.4f}, sent {sent_bytes / STEPS:.0f} bytes per step", end=" ")
    print(f"instead of {4 * FEATURES}; checksum {found.view(np.uint32).sum()}")


if __name__ == "__main__":
    main()
