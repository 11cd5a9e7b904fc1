"""An observer to the very end: when all members leave, it has what they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw

from ..seeds import seeds
from .cluster import FakeNode, cluster

NUMEL = 24
START = np.arange(NUMEL, dtype=np.float32)
WAYS: list[dict[str, Any]] = [
    {"topology": "mesh"},
    {"topology": "mesh", "every": 3, "overlap": 2},
    {"topology": "sharded"},
    {"topology": "mesh", "mode": "async"},
]


def update(node_id: int, count: int) -> NDArray[np.float32]:
    """Return multiples of 2^-12, so that every sum is exact."""
    rng = np.random.default_rng([73, node_id, count])
    return (rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("leaves", ["together", "in turn"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_an_observer_has_the_last_updates_of_all_who_leave(
    options: dict[str, Any], leaves: str, seed: int
) -> None:
    put_in = np.zeros(NUMEL)

    def exchange(node: FakeNode, **more: Any) -> gw.Exchange:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-6))
        return gw.Exchange(encoder, node, reduction="sum", timeout_s=10.0, **options, **more)

    def train(node: FakeNode) -> NDArray[np.float32]:
        share = exchange(node, min_peers=2)
        params = START.copy()
        share.join(params)
        for count in range(12 if leaves == "together" else 6 + node.peer.id):
            node.cluster.compute(node, node.cluster.random.choice([0.01, 0.05]))
            one = update(node.peer.id, count)
            put_in[...] += one
            share.step(one, params)
        share.leave(params)
        node.cluster.compute(node, 2.0)  # a real node's end waits until all is delivered
        node.cluster.close(node)
        return params

    def follow(node: FakeNode) -> NDArray[np.float32]:
        share = exchange(node, role="observer", min_peers=1)
        params = np.zeros(NUMEL, np.float32)
        quiet = 0
        while quiet < 8:
            count = share.follow(params, timeout_s=0.3)
            is_over = count == 0 and all(member.is_done for member in members)
            quiet = quiet + 1 if is_over else 0
        node.cluster.close(node)
        return params

    with cluster(seed) as world:
        nodes = [world.node(1 + at) for at in range(3)]
        members = [world.start(node, lambda n=node: train(n)) for node in nodes]
        observer = world.node(9)
        watcher = world.start(observer, lambda: follow(observer))
        world.run()
    np.testing.assert_array_equal(watcher.result, START + put_in)
