"""Coming in, leaving and going down over real nodes on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw

SECRET = bytes(range(32))
NUMEL = 2_000
MORE_STEPS = 20  # after the newcomer has come in


def update(rank: int, step: int) -> NDArray[np.float32]:
    """Return multiples of 2^-20, so that every sum is exact."""
    rng = np.random.default_rng([81, rank, step])
    return (rng.integers(-4096, 4096, NUMEL) / 2.0**20).astype(np.float32)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Goal:
    """The step that all train to; known once the newcomer has come in, and nobody can be further then."""

    step: int | None = None


class Worker:
    """Trains on its own node."""

    def __init__(
        self, stack: ExitStack, rank: int, seeds: list[str], secret: bytes = SECRET
    ) -> None:
        self.rank = rank
        self.node = stack.enter_context(gw.Node("127.0.0.1:0", seeds, secret=secret))
        self.encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-9))
        self.params = np.zeros(NUMEL, np.float32)
        self.put_in = np.zeros(NUMEL)
        self.joined: gw.Joined | None = None
        self.is_in = threading.Event()
        self.step = 0

    def exchange(self, **options: Any) -> gw.Exchange:
        # In the mesh, whatever the times on a busy machine: owners have residuals of their own.
        common: Any = {"reduction": "sum", "topology": "mesh"}
        return gw.Exchange(self.encoder, self.node, **common, **options)

    def train(self, goal: Goal, **options: Any) -> None:
        share = self.exchange(**options)
        self.joined = share.join(self.params)
        self.is_in.set()
        if self.joined.is_late:
            goal.step = self.joined.step + MORE_STEPS
        while goal.step is None or share.next_step < goal.step:
            self.step = share.next_step
            one = update(self.rank, share.next_step)
            self.put_in += one
            share.step(one, self.params)

    def leave_after(self, steps: int, **options: Any) -> None:
        share = self.exchange(**options)
        for _ in range(steps):
            one = update(self.rank, share.next_step)
            self.put_in += one
            share.step(one, self.params)
        share.leave(self.params)
        self.node.close()


def assert_nothing_lost(stayed: list[Worker], everybody: list[Worker]) -> None:
    assert len({one.params.tobytes() for one in stayed}) == 1
    put_in = sum(one.put_in for one in everybody)
    kept = sum(one.encoder.residual.astype(np.float64) for one in everybody)
    np.testing.assert_array_equal(stayed[0].params + kept, put_in)


def test_a_late_node_comes_in_while_the_others_train(stack: ExitStack) -> None:
    initial_members = [Worker(stack, 0, [])]
    initial_members.append(Worker(stack, 1, [initial_members[0].node.address]))
    goal = Goal()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(one.train, goal, min_peers=1) for one in initial_members]
        assert all(one.is_in.wait(60) for one in initial_members)
        late = Worker(stack, 2, [initial_members[0].node.address])
        running.append(pool.submit(late.train, goal, min_peers=1))
        for each in running:
            each.result(100)
    assert late.joined is not None
    assert late.joined.is_late
    assert_nothing_lost([*initial_members, late], [*initial_members, late])


def test_a_node_leaves_with_its_residual(stack: ExitStack) -> None:
    workers: list[Worker] = []
    for rank in range(3):
        workers.append(Worker(stack, rank, [one.node.address for one in workers]))
    goal = Goal()
    goal.step = 30
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(one.train, goal, min_peers=2) for one in workers[:2]]
        running.append(pool.submit(workers[2].leave_after, 10, min_peers=2))
        for one in running:
            one.result(100)
        path = workers[0].node.stats().peers[0]
    assert 0.0 < path.least_rtt_s <= path.srtt_s
    assert not workers[2].encoder.residual.any()
    assert_nothing_lost(workers[:2], workers)


def test_training_goes_on_while_a_node_with_another_secret_tries_to_connect(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    initial_members = [Worker(stack, 0, [])]
    initial_members.append(Worker(stack, 1, [initial_members[0].node.address]))
    goal, addresses = Goal(), [one.node.address for one in initial_members]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(one.train, goal, min_peers=1) for one in initial_members]
        assert all(one.is_in.wait(60) for one in initial_members)
        other = Worker(stack, 2, addresses, secret=SECRET[::-1])
        with pytest.raises(TimeoutError) as caught:
            other.train(goal, min_peers=1, timeout_s=1.0)
        # Further than anybody gets while this is being set: else one may stop at a step that the other has begun.
        goal.step = max(one.step for one in initial_members) + 1_000
        for each in running:
            each.result(100)
    assert_nothing_lost(initial_members, initial_members)
    for address in addresses:
        assert address in str(caught.value)
        lines = [line for line in caplog.messages if other.node.address in line]
        assert any(address in line for line in lines), "every node logs whom it rejects"
    assert other.node.address in str(caught.value)
