"""Results for other owners than the receiver counts: nobody applies them, nobody ends, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.errors import Mismatch
from gradwire.exchange.owner import can_be_of_same_owners
from gradwire.exchange.protocol import TAG_NUMBERS, NodeRun, PartUpdate, run_of

from ..seeds import seeds
from .cluster import FakeNode, cluster
from .test_sharded import (
    THRESHOLD,
    Follower,
    Trainer,
    assert_identical,
    assert_nothing_lost,
    update,
)

IDS = (10, 20, 30, 40)


def more_parts(parts: int, place: int) -> tuple[int, int]:
    return parts + 1, place


def fewer_parts(parts: int, _: int) -> tuple[int, int]:
    return max(parts - 1, 1), 0


def another_place(parts: int, place: int) -> tuple[int, int]:
    return parts, (place + 1) % parts


def nothing(parts: int, _: int) -> tuple[int, int]:
    return parts, parts


def first_place(parts: int, _: int) -> tuple[int, int]:
    return parts, 0


def lie_in(trainer: Trainer, steps: range, lie: Any) -> None:
    """Let a node publish the result of other owners in some steps."""
    publish = trainer.node.publish

    def publish_lie(buffer: Any, tag: int = 0, to: Any = None) -> Any:
        if tag >= TAG_NUMBERS or tag not in steps:
            return publish(buffer, tag=tag, to=to)
        run = run_of(trainer.node.peer)
        true = PartUpdate.parse(run, tag, memoryview(bytes(buffer)))
        parts, place = lie(true.parts, true.place)
        encoders = trainer.groups.encoders
        one = update(99, tag)
        messages = [
            gw.Encoder(part.numel, THRESHOLD, key=encoders[group].key).encode(
                one[group][: part.numel]
            )
            for group, part in trainer.replica._division.part(parts, place)
        ]
        return publish(
            b"".join(PartUpdate(messages, run, tag, parts, place).pieces()), tag=tag, to=to
        )

    trainer.node.publish = publish_lie  # type: ignore[method-assign]


def train_with_a_liar(
    seed: int, ids: tuple[int, ...], liar: int, lie: Any, **options: Any
) -> list[Trainer]:
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 25, min_peers=len(ids) - 1, **options) for node_id in ids
        ]
        lie_in(trainers[liar], range(6, 7), lie)
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    return trainers


def those_who_joined_again(trainers: list[Trainer]) -> list[int]:
    return [one.node.peer.id for one in trainers if one.member_since > 0]


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(
    "how", [{}, {"apply_residual": True, "moves": True, "overlap": 1}], ids=str
)
@pytest.mark.parametrize("liar", [0, 1, 2])
@pytest.mark.parametrize("lie", [more_parts, fewer_parts, another_place, nothing])
def test_a_node_alone_with_its_view_of_the_owners_joins_again(
    lie: Any, liar: int, how: Any, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = train_with_a_liar(seed, IDS[:3], liar, lie, **how)
    assert those_who_joined_again(trainers) == [IDS[liar]]
    assert "is for other owners than this node counts" in caplog.text
    lost = [peer.id for result in trainers[liar - 1].results for peer in result.lost]
    assert lost == [IDS[liar]]


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("lie", [more_parts, another_place, nothing])
def test_of_two_nodes_that_count_other_owners_the_one_with_the_lower_id_goes_on(
    lie: Any, liar: int, seed: int
) -> None:
    assert 20 in those_who_joined_again(train_with_a_liar(seed, IDS[:2], liar, lie))


@pytest.mark.parametrize("seed", seeds(2))
def test_a_worker_that_claims_a_part_joins_again(seed: int) -> None:
    with cluster(seed) as world:
        owners = [Trainer(world, node_id, 25, min_peers=2) for node_id in IDS[:2]]
        worker = Trainer(world, 5, 25, min_peers=2, role="worker")
        lie_in(worker, range(6, 7), first_place)
        world.run()
    assert_identical([*owners, worker])
    assert_nothing_lost([*owners, worker])
    assert those_who_joined_again([*owners, worker]) == [5]


@pytest.mark.parametrize("seed", seeds(2))
def test_half_of_the_nodes_join_the_half_with_the_lowest_id(seed: int) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 25, min_peers=3) for node_id in IDS]
        for each in trainers[2:]:
            lie_in(each, range(6, 7), more_parts)
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    assert set(those_who_joined_again(trainers)) >= {30, 40}
    assert trainers[0].member_since == 0


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("lie", [more_parts, another_place, nothing])
def test_a_node_that_always_claims_another_part_is_excluded_by_all(lie: Any, seed: int) -> None:
    with cluster(seed) as world:
        honest = [Trainer(world, node_id, 25, min_peers=2) for node_id in IDS[1:3]]
        liar = Trainer(world, 10, 1_000_000, min_peers=2)
        lie_in(liar, range(6, 1_000_000), lie)
        with pytest.raises(Mismatch, match="takes no more messages of this node"):
            world.run()
        assert liar.worker.error is not None
        world.kill(liar.node)
        world.run()
    assert_identical(honest)
    assert those_who_joined_again(honest) == []


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("event", ["death", "cut", "newcomer", "observer"])
@pytest.mark.parametrize("lie", [more_parts, another_place])
def test_other_owners_are_refused_alike_while_nodes_come_and_go(
    lie: Any, event: str, seed: int
) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 30, min_peers=3) for node_id in IDS]
        first = world.random.randint(4, 9)
        lie_in(trainers[world.random.randrange(4)], range(first, first + 1), lie)

        def hurt() -> None:
            if event == "death":
                world.kill(world.random.choice(trainers).node)
            elif event == "cut":
                one, other = world.random.sample(trainers, 2)
                world.cut(one.node, other.node)
                turn = world.turns + world.random.randint(20, 80)
                world.plan(turn, lambda: world.connect(one.node, other.node))
            elif event == "newcomer":
                trainers.append(Trainer(world, 25, 30, min_peers=3))
            else:
                trainers.append(Follower(world, 5, 30, role="observer"))
                for each in trainers:
                    each.cohort = trainers

        world.plan(world.random.randint(150, 350), hurt)
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)


def test_results_for_other_owners_are_told_from_those_for_the_same() -> None:
    def result(parts: int, place: int) -> PartUpdate:
        return PartUpdate([], NodeRun(1, 1), 0, parts, place)

    assert can_be_of_same_owners([result(3, 0), result(3, 3), result(3, 2)])
    assert not can_be_of_same_owners([result(3, 0), result(2, 1)])
    assert not can_be_of_same_owners([result(3, 1), result(3, 1)])
    assert not can_be_of_same_owners([result(3, 1), result(3, 0)])
    assert not can_be_of_same_owners([result(3, 1), []])
    assert not can_be_of_same_owners([[]])


@pytest.mark.parametrize("event", ["join", "death", "leave"])
def test_what_moves_is_even_when_the_owners_change(event: str) -> None:
    """Each owner's threshold goes on in its new part: one learned anew lets hardly anything through for a step."""
    numel, changes, steps = 40_000, 60, 90
    moved: dict[int, float] = {}

    def train(node: FakeNode, rank: int) -> None:
        share = gw.Exchange(
            gw.Encoder(numel, gw.TargetDensity(0.05)), node, min_peers=1, topology="sharded"
        )
        random, params = np.random.default_rng(rank), np.zeros(numel, np.float32)
        share.join(params)
        while share.next_step < steps and not (
            (rank, event) == (2, "leave") and share.next_step >= changes
        ):
            before, step = params.copy(), share.next_step
            node.cluster.compute(node, 0.1)
            share.step(random.standard_normal(numel, np.float32), params)
            if rank == 0:
                moved[step] = float(np.linalg.norm(np.subtract(params, before)))
        if (rank, event) == (2, "leave"):
            share.leave(params)
        node.cluster.close(node)

    with cluster(1) as world:

        def begin(rank: int) -> FakeNode:
            node = world.node(10 * (rank + 1))
            world.start(node, lambda: train(node, rank))
            return node

        nodes = [begin(rank) for rank in range(2 if event == "join" else 3)]
        if event != "leave":
            world.run(until=lambda: len(moved) >= changes)
        if event == "join":
            begin(2)
        elif event == "death":
            world.kill(nodes[2])
        world.run()
    usual = float(np.median([moved[step] for step in range(changes - 20, changes)]))
    later = [moved[step] / usual for step in range(changes, steps)]
    assert 0.5 < min(later) < max(later) < 2.0


def test_parts_that_an_owner_had_not_accepted_before_it_came_back_stay_with_a_node_that_goes_next() -> (
    None
):
    with cluster(0) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=1, every=4) for node_id in IDS[:2]]
        first, second = trainers
        second.resyncs_at = 9
        first.pause = {9: 2.0, 10: 2.0}
        world.run(until=lambda: bool(first.results and first.results[-1].joined))
        # The second one was away for one step, and the first one goes before it sends another update.
        first.resyncs_at = first.share.next_step
        assert first.resyncs_at == 10
        world.run()
    assert first.resyncs_at is None
    assert_identical(trainers)
    assert_nothing_lost(trainers)


def test_what_is_known_of_owners_that_are_gone_does_not_grow_with_their_number() -> None:
    """Every newcomer gets the table of parts that were not accepted, which has to fit into a message."""
    sizes: list[int] = []
    with cluster(0) as world:
        trainers = [Trainer(world, node_id, 10**6, min_peers=2) for node_id in IDS[:3]]
        for _ in range(6):
            other = Trainer(world, IDS[3], 10**6, min_peers=0)
            world.run(until=lambda o=other: len(o.results) > 3)
            world.kill(other.node)
            world.run(until=lambda: bool(trainers[0].results[-1].lost))
            step = trainers[0].share.next_step + 4
            world.run(until=lambda end=step: trainers[0].share.next_step >= end)
            sharding = trainers[0].share._replica.sharding
            assert sharding is not None
            sizes.append(sum(map(len, sharding.accepted.values())))
            assert len(sharding._ledger) <= len(IDS)
            assert len(sharding._arrived) <= len(IDS)
    assert 0 < max(sizes) <= len(IDS) ** 2
