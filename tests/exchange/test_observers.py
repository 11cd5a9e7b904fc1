"""An observer to the very end: when all members leave, it has what they have."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
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
    ends: dict[int, int] = {}  # the number with which each member has left

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
        ends[node.peer.id] = share.next_step
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
        assert share.step_number == max(ends.values()) * options.get("every", 1)
        node.cluster.close(node)
        return params

    with cluster(seed) as world:
        nodes = [world.node(1 + at) for at in range(3)]
        members = [world.start(node, lambda n=node: train(n)) for node in nodes]
        observer = world.node(9)
        watcher = world.start(observer, lambda: follow(observer))
        world.run()
    np.testing.assert_array_equal(watcher.result, START + put_in)


def begin(node: FakeNode, *named: FakeNode, **options: Any) -> list[int]:
    """Join with those that the node's list names; return the other members."""
    node.seeds = frozenset(each.peer.address for each in named)
    share = gw.Exchange(gw.Encoder(NUMEL, 1.0), node, **{"start_timeout_s": 20.0, **options})
    joined = share.join(START.copy())
    assert not joined.is_late
    return [member.id for member in joined.members]


@pytest.mark.parametrize("is_named", [False, True])
def test_an_observer_that_is_there_first_is_not_waited_for_as_a_member(is_named: bool) -> None:
    def observe(node: FakeNode) -> None:
        share = gw.Exchange(gw.Encoder(NUMEL, 1.0), node, role="observer")
        share.follow(np.zeros(NUMEL, np.float32), timeout_s=5.0)

    with cluster(1) as world:
        one, two, observer = (world.node(number) for number in (1, 2, 9))
        world.start(observer, lambda: observe(observer))
        extra = [observer] if is_named else []
        results = []
        for node, other in ((one, two), (two, one)):
            results.append(world.start(node, lambda n=node, o=other: begin(n, o, *extra)))
        world.run(until=lambda: all(worker.is_done for worker in results))
        assert world.now_s < 10.0
    assert [worker.result for worker in results] == [[2], [1]]


def test_a_start_that_lacks_members_says_that_observers_do_not_count() -> None:
    def observe(node: FakeNode) -> None:
        share = gw.Exchange(gw.Encoder(NUMEL, 1.0), node, role="observer")
        with pytest.raises(TimeoutError):
            share.follow(np.zeros(NUMEL, np.float32), timeout_s=5.0)

    def wait(node: FakeNode) -> None:
        message = "0 of 1 peers are ready; observers do not count: 127.0.0.1:1009;"
        with pytest.raises(TimeoutError, match=message):
            begin(node, min_peers=1, start_timeout_s=5.0)

    with cluster(1) as world:
        member, observer = world.node(1), world.node(9)
        world.start(observer, lambda: observe(observer))
        world.start(member, lambda: wait(member))
        world.run()


@pytest.mark.parametrize("seed", seeds(3))
def test_a_node_that_comes_and_goes_before_the_start_is_not_waited_for(seed: int) -> None:
    """As ``gradwire doctor`` does. A named one that is gone for a while is."""
    with cluster(seed) as world:
        one, two, three, visitor = (world.node(number) for number in (1, 2, 3, 9))

        def join(node: FakeNode, after_s: float) -> list[int]:
            world.compute(node, after_s)
            assert len(node.peers) == 3 or node is two
            return begin(node, *{one, two, three} - {node})

        results = [
            world.start(one, lambda: join(one, 0.5)),
            world.start(three, lambda: join(three, 0.5)),
        ]
        results.insert(1, world.start(two, lambda: join(two, 5.0)))
        world.run(until=lambda: world.now_s > 1.0)
        world.close(visitor)
        world.cut(one, two)
        world.run(until=lambda: world.now_s > 4.0)
        assert not any(worker.is_done for worker in results)
        world.connect(one, two)
        world.run()
        assert world.now_s < 12.0
    assert [worker.result for worker in results] == [[2, 3], [1, 3], [1, 2]]


@pytest.mark.parametrize("role", ["member", "observer"])
def test_only_a_member_that_dies_takes_the_last_update_with_it(role: Any) -> None:
    """The replicas of an observer are not the training's: the last member ends as if it had been alone."""

    def exchange(node: FakeNode, role: Any, least: int) -> gw.Exchange:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-6))
        return gw.Exchange(encoder, node, role=role, min_peers=least)

    def train(node: FakeNode) -> bool:
        share = exchange(node, "member", int(role == "member"))
        params = START.copy()
        share.join(params)
        share.step(update(1, 0), params)
        node.cluster.compute(node, 1.0)
        last = [SimpleNamespace(peer=other.peer, backlog_records=3)]
        paths = iter([last])  # then the other one is gone
        node.stats = lambda: SimpleNamespace(peers=next(paths, []))  # type: ignore[method-assign,assignment,return-value]
        is_lost = pytest.raises(gw.PeerLost, match="nobody else has it")
        with is_lost if role == "member" else nullcontext():
            share.end()
        return True

    def follow(node: FakeNode) -> None:
        share = exchange(node, role, 1)
        params = START.copy()
        if role == "member":
            share.join(params)
            share.step(update(2, 0), params)
        else:
            share.follow(params, timeout_s=0.3)
        node.cluster.compute(node, 100.0)

    with cluster(1) as world:
        first, other = world.node(1), world.node(2)
        trained = world.start(first, lambda: train(first))
        world.start(other, lambda: follow(other))
        world.run(lambda: trained.is_done)
    assert trained.result


@pytest.mark.parametrize("seed", seeds(3))
def test_an_asynchronous_observer_has_the_updates_of_members_that_come_after_it(seed: int) -> None:
    """Members come and leave in good order, and it neither takes another snapshot nor keeps what they have sent."""
    put_in = np.zeros(NUMEL)

    def exchange(node: FakeNode, **more: Any) -> gw.Exchange:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-12))
        return gw.Exchange(encoder, node, reduction="sum", mode="async", timeout_s=10.0, **more)

    def train(node: FakeNode, steps: int) -> None:
        share = exchange(node, min_peers=0)
        params = START.copy()
        share.join(params)
        for _ in range(steps):
            node.cluster.compute(node, 0.05)
            put_in[...] += 2.0**-12
            share.step(np.full(NUMEL, 2.0**-12, np.float32), params)
        share.leave(params)
        node.cluster.compute(node, 1.0)
        node.cluster.close(node)

    with cluster(seed) as world:
        first, observer = world.node(1), world.node(9)
        world.start(first, lambda: train(first, 400))
        share = exchange(observer, role="observer", min_peers=1)
        params = np.zeros(NUMEL, np.float32)

        def follow() -> None:
            while True:
                share.follow(params, timeout_s=0.1)

        world.start(observer, follow)
        world.run(until=lambda: world.now_s > 1.0)
        replacements = share._replica.replacements
        for number in range(2, 6):
            node = world.node(number)
            worker = world.start(node, lambda n=node: train(n, 8))
            world.run(until=lambda w=worker: w.is_done)
        assert share._replica.replacements == replacements
        world.run(until=lambda t=world.now_s: world.now_s > t + 2.0)
        np.testing.assert_allclose(params, START + put_in, atol=2.0**-9)
        assert not share._membership.past
