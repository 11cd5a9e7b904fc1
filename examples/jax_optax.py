"""Train with JAX and optax on two workers; gradwire accepts JAX's arrays without a copy.

    pip install ".[jax,demo]"
    python examples/jax_optax.py

This starts both workers on this machine. On two machines, start each with its rank and both addresses, and the same
secret in GRADWIRE_SECRET.
"""

from __future__ import annotations

import itertools

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes

import gradwire as gw

WORKERS, STEPS, BATCH = 2, 400, 32
SIZES = (64, 256, 10)


def initial() -> list[np.ndarray]:
    """Return weights and bias of each layer as NumPy arrays, which unlike JAX's are mutable."""
    rng = np.random.default_rng(0)
    params = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        weights = rng.standard_normal((fan_in, fan_out)) * np.sqrt(2 / fan_in)
        params += [np.float32(weights), np.zeros(fan_out, np.float32)]
    return params


def outputs(params: list[jax.Array], pixels: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(pixels @ params[0] + params[1])
    return hidden @ params[2] + params[3]


def loss(params: list[jax.Array], pixels: jax.Array, labels: jax.Array) -> jax.Array:
    logits = outputs(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(rank: int, addresses: list[str]) -> None:
    optimizer = optax.adamw(2e-3)

    @jax.jit
    def update(params, state, pixels, labels):
        gradients = jax.grad(loss)(params, pixels, labels)
        return optimizer.update(gradients, state, params)

    params = initial()
    state = optimizer.init([jnp.array(one) for one in params])
    encoder = gw.Encoder(sum(one.size for one in params), threshold=gw.TargetDensity(0.02))
    pixels, labels = digits.training(rank, WORKERS)
    batches = np.random.default_rng(rank)
    with gw.Node(addresses[rank], addresses) as node:
        share = gw.Exchange(encoder, node, min_peers=WORKERS - 1)
        for _ in range(STEPS):
            batch = batches.integers(len(labels), size=BATCH)
            # A copy, because JAX may keep using the memory of its arguments, and `params` changes below.
            shared = [jnp.array(one, copy=True) for one in params]
            updates, state = update(shared, state, pixels[batch], labels[batch])
            share.step(updates, params)  # reads JAX's arrays without a copy
        stats = share.stats

    pixels, labels = digits.held_out()
    accuracy = float((outputs(params, pixels).argmax(1) == labels).mean())
    checksum = sum(int(one.view(np.uint32).sum(dtype=np.uint64)) for one in params)
    print(
        f"worker {rank}: accuracy {accuracy:.1%}, {stats.sent_bytes / STEPS:.0f} bytes per step "
        f"instead of {4 * encoder.numel}; checksum {checksum}"
    )


if __name__ == "__main__":
    processes.run(train, WORKERS, __doc__.splitlines()[0])
