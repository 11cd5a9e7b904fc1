"""Coming in, leaving and going down over real nodes on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.transport import Limits

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
            other.train(goal, min_peers=1, timeout_s=2.0)
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


SMALL = Limits(
    message_bytes_max=1 << 20,
    send_log_bytes=2 << 20,
    receive_bytes=2 << 20,
    window_bytes=1 << 20,
    lag_s=0.5,
)


@pytest.mark.parametrize("role", ["member", "observer"])
def test_a_node_outside_that_takes_nothing_for_long_holds_up_nobody(
    stack: ExitStack, role: str
) -> None:
    """An observer that evaluates, or a late process that compiles: what is sent meanwhile fits nowhere."""
    numel, far = 50_000, 80  # steps of 200 kB
    nodes: list[gw.Node] = []
    for _ in range(3):
        seeds = [each.address for each in nodes[:1]]
        node = gw.Node("127.0.0.1:0", seeds, secret=SECRET, limits=SMALL)
        nodes.append(stack.enter_context(node))
    for node in nodes:
        node.wait_for_peers(2, timeout_s=20.0)
    steps = [0, 0]
    is_away, is_over = threading.Event(), threading.Event()

    def exchange_of(node: gw.Node, **options: Any) -> gw.Exchange:
        options = {"codec": "dense", "topology": "mesh", "timeout_s": 8.0, **options}
        return gw.Exchange(gw.Encoder(numel, 1.0), node, min_peers=1, **options)

    def train(rank: int) -> None:
        params = np.zeros(numel, np.float32)
        share = exchange_of(nodes[rank])
        share.join(params)
        while not is_over.is_set():
            share.step(np.full(numel, (rank + share.next_step) / 2.0**20, np.float32), params)
            steps[rank] = share.next_step
            if not is_away.is_set():
                time.sleep(0.05)
        share.leave(params)

    def watch() -> int:
        params = np.zeros(numel, np.float32)
        share = exchange_of(nodes[2], role=role)
        while role == "observer" and not share.follow(params, timeout_s=1.0):
            pass
        last = steps[0] + far
        is_away.set()
        while min(steps) < last:
            assert not any(each.done() for each in training), "a member has ended"
            time.sleep(0.01)
        while share.next_step < last and role == "observer":
            share.follow(params, timeout_s=1.0)
        if role == "member":
            share.join(params)
            share.leave(params)
        is_over.set()
        return share.next_step - last

    with ThreadPoolExecutor(3) as pool:
        training = [pool.submit(train, rank) for rank in range(2)]
        try:
            assert watch() >= 0
        finally:
            is_over.set()
    for each in training:
        each.result()
