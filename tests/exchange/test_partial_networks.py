"""Two nodes cannot reach each other, and the others reach both: training goes on, and an error names the two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import start

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster
from .test_membership import Trainer, assert_identical

WAYS: dict[str, dict[str, Any]] = {
    "mesh": {},
    "sharded": {"topology": "sharded"},
    "async": {"mode": "async"},
    "wait": {"on_straggler": "wait"},
    "drop": {"on_straggler": "drop"},
    "sharded, wait": {"topology": "sharded", "on_straggler": "wait"},
}
STEPS = 250
TIMEOUT_S = 4.0


def trainer(world: Cluster, node_id: int, min_peers: int, how: Any) -> Trainer:
    return Trainer(world, node_id, STEPS, **{"min_peers": min_peers, "timeout_s": TIMEOUT_S, **how})


def block(world: Cluster, one: FakeNode, other: FakeNode) -> None:
    """Let two nodes never be connected."""
    for here, there in ((one, other), (other, one)):
        world.link(there.peer, here.peer).clear()
        here.connected.discard(there.peer)


def at_the_start(world: Cluster, how: Any) -> list[Trainer]:
    trainers = [trainer(world, node_id, 2, how) for node_id in (10, 20, 30)]
    block(world, trainers[1].node, trainers[2].node)
    return trainers


def of_the_lowest(world: Cluster, how: Any) -> list[Trainer]:
    how = {"start_timeout_s": 1_000.0, **how}
    trainers = [trainer(world, node_id, 2, how) for node_id in (10, 20, 30)]
    block(world, trainers[0].node, trainers[2].node)
    return trainers


def of_the_lowest_and_two(world: Cluster, how: Any) -> list[Trainer]:
    how = {"start_timeout_s": 1_000.0, **how}
    trainers = [trainer(world, node_id, 3, how) for node_id in (10, 20, 30, 40)]
    for other in world.random.sample(trainers[1:], 2):
        block(world, trainers[0].node, other.node)
    return trainers


def in_the_middle(world: Cluster, how: Any) -> list[Trainer]:
    trainers = [trainer(world, node_id, 2, how) for node_id in (10, 20, 30)]
    world.run(until=lambda: len(trainers[0].results) > 5)
    world.cut(trainers[0].node, trainers[1].node)
    return trainers


def among_four(world: Cluster, how: Any) -> list[Trainer]:
    trainers = [trainer(world, node_id, 3, how) for node_id in (10, 20, 30, 40)]
    world.run(until=lambda: len(trainers[0].results) > 5)
    world.cut(*[each.node for each in world.random.sample(trainers, 2)])
    return trainers


def of_a_newcomer(world: Cluster, how: Any) -> list[Trainer]:
    trainers = [trainer(world, node_id, 1, how) for node_id in (10, 20)]
    world.run(until=lambda: len(trainers[0].results) > 5)
    trainers.append(trainer(world, 30, 1, how))
    block(world, trainers[0].node, trainers[2].node)
    trainers[2].node.seeds = frozenset(each.node.peer.address for each in trainers[:2])
    return trainers


def of_two_newcomers(world: Cluster, how: Any) -> list[Trainer]:
    trainers = [trainer(world, node_id, 1, how) for node_id in (10, 20)]
    world.run(until=lambda: len(trainers[0].results) > 5)
    trainers += [trainer(world, node_id, 1, how) for node_id in (5, 30)]
    block(world, trainers[2].node, trainers[3].node)
    return trainers


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "break_network",
    [
        at_the_start,
        of_the_lowest,
        of_the_lowest_and_two,
        in_the_middle,
        among_four,
        of_a_newcomer,
        of_two_newcomers,
    ],
)
def test_all_but_one_of_two_nodes_that_cannot_reach_each_other_go_on(
    break_network: Any, way: str, seed: int
) -> None:
    with cluster(seed) as world:
        trainers = break_network(world, WAYS[way])
        with pytest.raises(TimeoutError, match="cannot reach") as raised:
            world.run()
        [ended] = [each for each in trainers if each.worker.error is not None]
        assert f"this node ({ended.node.peer.address}) cannot reach" in str(raised.value)
        if break_network is of_a_newcomer:
            assert f"no answer from {trainers[0].node.peer.address}" in str(raised.value)
        world.kill(ended.node)
        world.run()
    others = [each for each in trainers if each is not ended]
    assert len(others) == len(trainers) - 1
    if way != "async":
        assert_identical(others)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("way", ["mesh", "sharded"])
def test_a_node_that_never_comes_in_does_not_go_on_alone_when_the_others_have_finished(
    way: str, seed: int
) -> None:
    how = {"timeout_s": 100.0, "start_timeout_s": 20.0, **WAYS[way]}
    with cluster(seed) as world:
        trainers = [trainer(world, node_id, 2, how) for node_id in (10, 20, 30)]
        block(world, trainers[1].node, trainers[2].node)
        for each in trainers:
            each.leaves_after = STEPS // 2
        with pytest.raises(TimeoutError, match=r"from 0 members.*finished"):
            world.run()


@pytest.mark.parametrize("way", WAYS)
def test_a_node_that_could_not_come_in_hears_why_also_when_the_others_have_ended(way: str) -> None:
    with cluster(1) as world:
        trainers = of_a_newcomer(world, WAYS[way])
        until_s = world.now_s + TIMEOUT_S / 2
        world.run(until=lambda: world.now_s > until_s)
        for member in trainers[:2]:
            world.kill(member.node)
        with pytest.raises(TimeoutError, match=r"1020 is silent; .* before: .* cannot reach"):
            world.run()


@pytest.mark.parametrize("way", WAYS)
def test_a_node_comes_in_as_soon_as_it_reaches_the_other(way: str) -> None:
    with cluster(1) as world:
        trainers = in_the_middle(world, WAYS[way])
        first, second, _ = trainers
        until_s = world.now_s + TIMEOUT_S / 2
        world.run(until=lambda: world.now_s > until_s)
        assert {first.share._membership.phase, second.share._membership.phase} == {"joining", "in"}
        world.connect(first.node, second.node)
        world.run()
    if way != "async":
        assert_identical(trainers)


def test_the_log_names_the_two_while_a_start_waits(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(1) as world:
        trainers = at_the_start(world, {"timeout_s": 20.0, "start_timeout_s": 1_000.0})
        world.run(until=lambda: world.now_s > 5.0)
        assert trainers[1].share._membership.phase == "new"
        assert "1010 has the node with id 30 as a member" in caplog.text
        world.run(until=lambda: len(trainers[0].results) > 5)
    assert "this node begins without some of the first members" in caplog.text


def test_a_node_that_connects_late_with_one_after_the_other_lacks_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cluster(1) as world:
        how = {"start_timeout_s": 1_000.0}
        trainers = [trainer(world, node_id, 1, how) for node_id in (10, 20)]
        world.run(until=lambda: len(trainers[0].results) > 5)
        newcomer = trainer(world, 30, 1, how)
        for member in trainers:
            block(world, member.node, newcomer.node)
        connects_s = world.now_s + 5.0
        world.run(until=lambda: world.now_s > connects_s)
        world.connect(trainers[1].node, newcomer.node)
        world.run(until=lambda: world.now_s > connects_s + 0.2)
        world.connect(trainers[0].node, newcomer.node)
        world.run()
    assert "cannot reach" not in caplog.text
    assert_identical([*trainers, newcomer])


@pytest.mark.parametrize("way", WAYS)
def test_a_member_that_computes_while_a_node_joins_is_not_called_unreachable(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(1) as world:
        how = {**WAYS[way], "timeout_s": 60.0, "start_timeout_s": 1_000.0}
        trainers = [trainer(world, node_id, 1, how) for node_id in (10, 20)]
        world.run(until=lambda: len(trainers[0].results) > 5)
        busy = trainers[1]
        step = busy.share.step
        computes: list[bool] = []

        def compute_and_step(*args: Any) -> gw.StepResult:
            busy.share.step = step  # type: ignore[method-assign]
            computes.append(True)
            world.compute(busy.node, 20.0)
            return step(*args)

        busy.share.step = compute_and_step  # type: ignore[assignment,method-assign]
        world.run(until=lambda: bool(computes))
        trainers.append(trainer(world, 30, 1, how))
        world.run()
    assert "this node joins" in caplog.text
    assert "cannot reach" not in caplog.text
    if way != "async":
        assert_identical(trainers)


def test_the_others_wait_for_a_lowest_node_that_has_said_something_and_is_busy() -> None:
    with cluster(1) as world:
        how = {"start_timeout_s": 1_000.0}
        trainers = [trainer(world, node_id, 2, how) for node_id in (20, 10, 30)]
        busy = trainers[1]
        join = busy.share.join

        def prepare_and_join(params: Any) -> gw.Joined:
            world.compute(busy.node, 1.0)
            busy.share.set_team(2, sends_mean=False)  # introduces the node
            world.compute(busy.node, 60.0)
            return join(params)

        busy.share.join = prepare_and_join  # type: ignore[assignment,method-assign]
        world.run()
    assert all(each.joined is not None and not each.joined.is_late for each in trainers)
    assert_identical(trainers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("notices", [True, False])
def test_a_node_that_stood_still_at_the_start_does_not_begin_on_what_it_knew_before(
    notices: bool, way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not notices:  # two trainings then begin, and one of them has to give way
        monkeypatch.setattr(start, "_STILL_S", 1_000.0)
    with cluster(1) as world:
        how = {**WAYS[way], "timeout_s": 30.0, "start_timeout_s": 1_000.0}
        trainers = [trainer(world, node_id, 3, how) for node_id in (10, 20, 30, 40)]
        first, second, third, _ = (each.node for each in trainers)
        block(world, first, third)
        receive = second.receive

        def stop(timeout_s: float = 0.0) -> Any:
            if world.now_s < 4.0:
                return receive(timeout_s)
            second.receive = receive  # type: ignore[method-assign]
            world.compute(second, 15.0)
            return []  # what has come meanwhile is only being read

        second.receive = stop  # type: ignore[method-assign]
        world.run(until=lambda: world.now_s > 5.0)
        assert trainers[1].share._start._lacks_since_s
        world.connect(first, third)
        world.run(until=lambda: world.now_s > 20.0 and len(trainers[1].results) > 8)
        assert {each.share._membership.origin.id for each in trainers} == {10}
        assert all(len(each.share.members) == 3 for each in trainers)
    assert ("begins without it" in caplog.text) != notices


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_the_last_update_of_a_node_that_left_counts_after_the_report_of_one_that_left_later(
    topology: Any,
) -> None:
    steps = 4
    with cluster(1) as world:
        nodes = [world.node(10 * (1 + rank)) for rank in range(3)]
        _, stopped, slow = nodes

        def work(node: FakeNode, rank: int) -> bytes:
            share = gw.Exchange(gw.Encoder(8, 0.5), node, min_peers=2, topology=topology)
            params = np.zeros(8, np.float32)
            for _ in range(steps):
                share.step(np.full(8, 0.25 + 0.25 * rank, np.float32), params)
            if node is slow:
                world.slow_links.add((slow.peer, stopped.peer))
            share.leave(params)
            world.close(node)
            return params.tobytes()

        publish = stopped.publish

        def stop_after_last(buffer: Any, tag: int = 0, to: Any = None) -> Any:
            ticket = publish(buffer, tag, to)
            if tag == steps:
                world.stopped.add(stopped)
            return ticket

        stopped.publish = stop_after_last  # type: ignore[method-assign]
        workers = [
            world.start(node, lambda n=node, r=rank: work(n, r)) for rank, node in enumerate(nodes)
        ]
        world.run(until=lambda: workers[0].is_done and workers[2].is_done)
        links = [world.link(node.peer, stopped.peer) for node in (nodes[0], slow)]
        world.run(until=lambda: not links[0])
        world.slow_links.clear()
        world.run(until=lambda: not links[1])
        world.stopped.clear()
        world.run()
    assert len({worker.result for worker in workers}) == 1
