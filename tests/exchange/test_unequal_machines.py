"""Machines with different numbers of workers: every worker has the same weight in the mean."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import LocalTeam

from .cluster import FakeNode, cluster, run_cluster

SECRET = bytes(range(32))
NUMEL = 4


def train(
    node: FakeNode,
    workers: int,
    update: float,
    *,
    moves: bool = False,
    steps: int = 2,
    on_step: Callable[[gw.Exchange, int], None] = lambda *_: None,
    **options: Any,
) -> tuple[list[float], int]:
    """Train as the node of a machine whose workers' updates have this mean; return the shared value of every step."""
    options = {"codec": "dense", "topology": "mesh", **options}
    keeps = options.pop("keeps_residual", True)
    enc = gw.Encoder(NUMEL, 1.0, dtype="float64", keeps_residual=keeps)
    share = gw.Exchange(enc, node, digest_s=0.0, **options)
    share.set_team(workers, sends_mean=True)
    params = np.zeros(NUMEL)
    share.join(params)
    values: list[float] = []
    total = 0
    while share.next_step < steps and len(values) < steps * options.get("every", 1):
        on_step(share, share.next_step)
        one = np.full(NUMEL, update)
        if moves:
            params += one
            share.step_moved(params)
        else:
            share.step(one, params)
        values.append(float(share.shared(params)[0][0]))
        total = max(total, share.total_workers)
    if options.get("overlap") or "mode" in options:
        if "mode" in options:
            node.cluster.compute(node, 10.0)  # until everybody's messages are here
        share.catch_up(params)
        values.append(float(share.shared(params)[0][0]))
        node.cluster.compute(
            node, 10.0
        )  # until everybody has taken them: a mean is of the nodes that are there
    node.cluster.close(node)
    return values, total


@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topology": "sharded"},
        {"apply_residual": True},
        {"apply_residual": True, "keeps_residual": False},
        {"topology": "sharded", "apply_residual": True, "overlap": 1},
        {"topology": "sharded", "apply_residual": True, "overlap": 1, "keeps_residual": False},
        {"apply_residual": True, "overlap": 1, "keeps_residual": False},
        {"every": 2, "apply_residual": True},
        {"every": 2, "topology": "sharded"},
        {"overlap": 1},
        {"mode": "async", "max_staleness": 0},
    ],
    ids=str,
)
def test_every_worker_has_the_same_weight(options: Any, moves: bool) -> None:
    """Three machines of one, two and three workers, whose workers' updates are 6, 0 and 0, 3 and 3 and 3."""
    with cluster(3) as world:
        machines = zip((10, 20, 30), (1, 2, 3), (6.0, 0.0, 3.0), strict=True)
        workers = [
            world.start(
                node := world.node(node_id),
                lambda node=node, size=size, mean=mean: train(
                    node, size, mean, moves=moves, min_peers=2, **options
                ),
            )
            for node_id, size, mean in machines
        ]
        world.run()
    steps = 2 * options.get("every", 1)
    for values, total in [worker.result for worker in workers]:
        assert total == 6
        assert values[-1] == pytest.approx(steps * (6.0 + 9.0) / 6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_machines_have_the_bits_of_a_plain_mean(size: int) -> None:
    def share(node: FakeNode, workers: int, update: float) -> list[float]:
        return train(node, workers, update, codec="threshold", min_peers=1, steps=5)[0]

    outcomes = []
    for workers in (1, size):
        with cluster(1) as world:
            running = [
                world.start(
                    node := world.node(node_id),
                    lambda node=node, update=update, workers=workers: share(node, workers, update),
                )
                for node_id, update in ((1, 0.3), (2, 7.1))
            ]
            world.run()
        outcomes.append([worker.result for worker in running])
    assert outcomes[0] == outcomes[1]


def test_a_worker_that_goes_and_one_that_comes_back_change_the_weights() -> None:
    def lose(share: gw.Exchange, step: int) -> None:
        if step in (4, 8):
            share.set_team({4: 1, 8: 2}[step], sends_mean=True)

    with cluster(2) as world:
        one, two = world.node(1), world.node(2)
        first = world.start(one, lambda: train(one, 2, 0.0, min_peers=1, steps=12, on_step=lose))
        world.start(two, lambda: train(two, 1, 3.0, min_peers=1, steps=12))
        world.run()
    changes = np.diff([0.0, *first.result[0]])
    np.testing.assert_allclose(changes[:4], 1.0)
    assert 1.5 in changes[4:8].round(12)
    np.testing.assert_allclose(changes[10:], 1.0)


def test_a_late_machine_and_a_dead_one_change_the_weights() -> None:
    with cluster(4) as world:
        nodes = [world.node(10), world.node(20)]
        sizes = {10: 2, 20: 1}
        running = [
            world.start(
                node,
                lambda node=node: train(
                    node,
                    sizes[node.peer.id],
                    3.0 * (node.peer.id == 20),
                    min_peers=1,
                    steps=60,
                    on_step=lambda *_: world.compute(node, 0.1),
                ),
            )
            for node in nodes
        ]
        world.run(until=lambda: len(nodes[0].updates) > 5)
        late = world.node(30)
        world.start(
            late,
            lambda: train(
                late, 3, 0.0, min_peers=1, steps=60, on_step=lambda *_: world.compute(late, 0.1)
            ),
        )
        world.run(until=lambda: len(late.updates) > 10)
        world.kill(nodes[0])
        world.run()
    changes = np.diff(running[1].result[0]).round(12)
    assert changes[0] == 1.0
    assert 0.5 in changes
    assert changes[-1] == 0.75


def test_an_update_in_the_residual_cannot_be_weighed_and_is_refused() -> None:
    def work(node: FakeNode, workers: int) -> Any:
        encoder = gw.Encoder(NUMEL, 1.0)
        share = gw.Exchange(encoder, node, min_peers=1, digest_s=0.0)
        share.set_team(workers, sends_mean=True)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        encoder.residual[:] = 3.0
        with pytest.raises(ValueError, match=r"of 3 workers are on this machine.*pass the update"):
            share.step(None, params)
        assert (encoder.residual == 3.0).all()
        node.cluster.close(node)

    with cluster(1) as world:
        for node_id in (1, 2):
            node = world.node(node_id)
            world.start(node, lambda node=node, size=node_id: work(node, size))
        world.run()


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", 1.0), ("sum", 3.0)], ids=["mean", "sum"]
)
def test_teams_in_shared_memory_count_their_workers(reduction: Any, expected: float) -> None:
    updates = {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 3.0}
    sizes = (2, 1)
    with ExitStack() as stack:
        nodes = [stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET, node_id=1))]
        nodes.append(
            stack.enter_context(
                gw.Node("127.0.0.1:0", [nodes[0].address], secret=SECRET, node_id=2)
            )
        )
        shares: dict[tuple[int, int], Any] = {}
        for machine, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
            encoder = gw.Encoder(NUMEL, 1.0)
            lead = gw.Exchange(encoder, node, min_peers=1, codec="dense", reduction=reduction)
            name = f"unequal-{machine}-{threading.get_native_id()}"
            teams = [
                stack.enter_context(LocalTeam(name, size=size, rank=rank, reduction=reduction))
                for rank in range(size)
            ]
            shares[machine, 0] = teams[0].lead(lead)
            shares.update({(machine, team.rank): team.follow() for team in teams[1:]})

        def work(place: tuple[int, int]) -> tuple[float, int]:
            params = np.zeros(NUMEL, np.float32)
            shares[place].join(params)
            before = shares[place].total_workers
            shares[place].step(np.full(NUMEL, updates[place], np.float32), params)
            assert shares[place].total_workers == before
            return float(params[0]), before

        with ThreadPoolExecutor(3) as pool:
            outcomes = list(pool.map(work, updates))
    assert outcomes == [(pytest.approx(expected), 3)] * 3


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize(("every", "overlap"), [(1, 1), (2, 1), (2, 2)])
def test_an_open_step_has_its_weight_once_where_a_machine_joins_again(
    every: int, overlap: int, topology: Any
) -> None:
    """The first of three machines has four workers, of six: its updates count twice. Only these are not zero."""

    def updates() -> list[NDArray[np.float32]]:
        rng = np.random.default_rng(7)
        return [(rng.integers(-64, 64, 64) / 2.0**12).astype(np.float32) for _ in range(20)]

    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = gw.Exchange(
            gw.Encoder(64, gw.FixedThreshold(2.0**-6)),
            node,
            min_peers=2,
            reduction="sum",
            every=every,
            overlap=overlap,
            apply_residual=True,
            topology=topology,
        )
        share.set_team(1 if rank else 4, sends_mean=True)
        params = np.zeros(64, np.float32)
        share.join(params)
        for count, one in enumerate(updates()):
            if rank == 0 and count in (8, 13):
                share.resync(params)
            params += one * (rank == 0)
            share.step_moved(params)
            node.cluster.compute(node, 0.1)
        while share.next_step < 30:
            share.step_moved(params)
            node.cluster.compute(node, 0.1)
        share.leave(params)
        return share.shared(params)[0]

    for shared in run_cluster(work, seed=1):
        np.testing.assert_array_equal(shared, 2.0 * np.sum(updates(), axis=0))
