"""Messages that a member refuses: their sender joins again, and is excluded by all alike if it happens again and again.

Several members may refuse them, or one alone, and perhaps it is that one which is wrong. Only who is wrong ends.
"""

from __future__ import annotations

from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import Mismatch
from gradwire.exchange.protocol import TAG_NUMBERS, Kind

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster
from .test_hostile_members import WAYS, damaged, lie_from, of_the_other_way
from .test_membership import Trainer, assert_identical
from .test_other_owners import lie_in, more_parts
from .test_sharded import Trainer as ShardedTrainer

STEPS = 60
FOR_EVER = 1_000_000


class Tickets:
    """Follows a message that was published to each peer by itself."""

    def __init__(self, tickets: list[Any]) -> None:
        self._tickets = tickets
        self.nbytes = tickets[0].nbytes if tickets else 0

    @property
    def is_done(self) -> bool:
        return all(ticket.is_done for ticket in self._tickets)


def lie_to(node: FakeNode, victim: int, steps: range, lie: Any) -> None:
    """Let a node send other bytes to one of its peers than to the others, in some steps."""
    publish = node.publish

    def publish_lies(buffer: Any, tag: int = 0, to: Any = None) -> Any:
        kind, number = divmod(tag, TAG_NUMBERS)
        if kind not in (Kind.UPDATE, Kind.PART) or number not in steps:
            return publish(buffer, tag=tag, to=to)
        true = bytes(buffer)
        peers = sorted(node.connected) if to is None else [to]
        return Tickets(
            [
                publish(lie(true)[0] if peer.id == victim else true, tag=tag, to=peer)
                for peer in peers
            ]
        )

    node.publish = publish_lies  # type: ignore[method-assign]


def trainers_of(world: Cluster, count: int, way: str) -> list[Trainer]:
    how = {"timeout_s": 5.0, "min_peers": count - 1, **WAYS[way]}
    return [Trainer(world, node_id, STEPS, **how) for node_id in range(1, count + 1)]


def assert_all_finish(world: Cluster, trainers: list[Trainer], way: str) -> None:
    world.run(until=lambda: all(trainer.worker.is_done for trainer in trainers))
    assert all(trainer.share.next_step >= STEPS for trainer in trainers)
    if way != "async":
        assert_identical(trainers)
        assert all(len(trainer.share.members) == len(trainers) - 1 for trainer in trainers)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lie", [damaged, of_the_other_way])
def test_a_node_of_which_one_member_refuses_an_update_comes_in_again(
    lie: Any, way: str, count: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(seed) as world:
        trainers = trainers_of(world, count, way)
        lie_to(trainers[-1].node, world.random.randint(1, count - 1), range(5, 6), lie)
        assert_all_finish(world, trainers, way)
    address = trainers[-1].node.peer.address
    assert f"{address} joins again, because its message is refused" in caplog.text
    assert count in [peer.id for result in trainers[0].results for peer in result.joined]


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_node_whose_updates_are_refused_again_and_again_is_excluded_by_all(
    way: str, count: int, seed: int
) -> None:
    with cluster(seed) as world:
        *honest, liar = trainers_of(world, count, way)
        lie_from(liar.node, 5, damaged)
        with pytest.raises(Mismatch, match=r"takes no more messages of this node: .*127.0.0.1"):
            world.run()
        assert liar.worker.error is not None
        world.kill(liar.node)
        assert_all_finish(world, honest, way)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_where_one_member_refuses_again_and_again_it_ends_or_the_sender(
    way: str, count: int, seed: int
) -> None:
    with cluster(seed) as world:
        trainers = trainers_of(world, count, way)
        victim, liar = world.random.choice(trainers[:-1]), trainers[-1]
        lie_to(liar.node, victim.node.peer.id, range(5, FOR_EVER), damaged)
        with pytest.raises(
            Mismatch, match=r"takes no more messages of this node|that the others can use"
        ):
            world.run()
        [ended] = [trainer for trainer in trainers if trainer.worker.error is not None]
        assert ended in (victim, liar)
        world.kill(ended.node)
        assert_all_finish(world, [trainer for trainer in trainers if trainer is not ended], way)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("way", WAYS)
def test_of_two_nodes_one_stops_where_updates_are_refused_again_and_again(
    way: str, seed: int
) -> None:
    with cluster(seed) as world:
        trainers = trainers_of(world, 2, way)
        lie_from(trainers[1].node, 5, damaged)
        with pytest.raises(gw.MessageError, match=r"from 127.0.0.1:1002.*checksum"):
            world.run()


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("liar", [0, 1])
def test_of_two_nodes_one_stops_where_owners_differ_again_and_again(liar: int, seed: int) -> None:
    with cluster(seed) as world:
        trainers = [ShardedTrainer(world, node_id, 200, min_peers=1) for node_id in (10, 20)]
        lie_in(trainers[liar], range(6, FOR_EVER), more_parts)
        with pytest.raises(Mismatch, match=r"is for other owners .*, again and again"):
            world.run()


# In the last two it refuses a relayed update, or as a node that joins.
@pytest.mark.parametrize("seed", sorted({*seeds(2), 17, 42}))
@pytest.mark.parametrize("steps", [range(5, 6), range(5, FOR_EVER)])
@pytest.mark.parametrize("way", ["mesh", "async"])
def test_who_cannot_use_what_the_others_use_joins_again_and_ends_in_the_end(
    way: str, steps: range, seed: int
) -> None:
    with cluster(seed) as world:
        first, wrong, sender = trainers_of(world, 3, way)
        router = wrong.share._step._router
        parse = router._parse

        def refuse(run: Any, step: int, payload: memoryview) -> Any:
            if run.id == sender.node.peer.id and step in steps:
                raise gw.MessageError("cannot be used")
            return parse(run, step, payload)

        router._parse = refuse
        if len(steps) == 1:
            assert_all_finish(world, [first, wrong, sender], way)
            return
        # Where it has refused them as a node that joins, it does not hear that the others use them.
        used = r"has refused updates of 127.0.0.1:1003 that the others"
        refused = r"127.0.0.1:1003 was excluded: step \d+ from .*: cannot be used(?!.*cannot reach)"
        with pytest.raises((Mismatch, TimeoutError), match=f"{used}|{refused}"):
            world.run()
        assert wrong.worker.error is not None
        world.kill(wrong.node)
        assert_all_finish(world, [first, sender], way)
