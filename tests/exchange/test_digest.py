"""Replicas are compared while they train: what differs is found within seconds, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import consistency as consistency_module
from gradwire.exchange.consistency import Consistency, digest_of
from gradwire.exchange.protocol import NodeRun, Note, Phase

from ..seeds import seeds
from .cluster import FakeNode, cluster

NUMEL = 40
MODES: list[dict[str, Any]] = [
    {},
    {"every": 2},
    {"topology": "sharded"},
    {"overlap": 1},
]


def update(node_id: int, step: int) -> Any:
    rng = np.random.default_rng([51, node_id, step])
    return (rng.standard_normal(NUMEL) / 8).astype(np.float32)


def train(
    node: FakeNode,
    options: dict[str, Any],
    params: Any,
    steps: int,
    peers: int,
    changed: float = 0.0,
) -> tuple[int | None, gw.Exchange]:
    """Train, and resync when told to; return at which step that was."""
    share = gw.Exchange(
        gw.Encoder(NUMEL, gw.TargetDensity(0.2)),
        node,
        reduction="sum",
        min_peers=peers,
        digest_s=0.2,
        **options,
    )
    found_at = None
    share.join(params)
    params[7] += changed
    if options.get("every"):
        share._replica.shared[0][7] += changed
    for count in range(steps):
        node.cluster.compute(node, 0.1 + 0.05 * node.cluster.random.random())
        if share.next_step >= steps and share.stats.staleness == 0:
            break
        try:
            share.step(update(node.peer.id, count), params)
        except gw.Diverged as error:
            text = str(error)
            found_at = share.next_step if node.peer.address in text and "resync" in text else -1
            share.resync(params)
    if share.next_step > 0 and options.get("mode") == "async":
        for _ in range(40):  # everybody's last updates
            share.catch_up(params, timeout_s=0.05)
    node.cluster.close(node)
    return found_at, share


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("seed", seeds(2))
def test_replicas_that_are_the_same_are_found_the_same(seed: int, options: Any) -> None:
    replicas = [np.ones(NUMEL, np.float32) for _ in range(3)]
    with cluster(seed) as world:
        nodes = [world.node(10 * rank) for rank in range(3)]
        workers = [
            world.start(node, lambda n=node, p=params: train(n, options, p, 60, 2))
            for node, params in zip(nodes, replicas, strict=True)
        ]
        world.run()
    for worker in workers:
        found_at, share = worker.result
        assert found_at is None
        assert share.stats.digests >= 3
    assert len({params.tobytes() for params in replicas}) == 1


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_replica_that_has_become_different_is_told_so_and_comes_in_again(options: Any) -> None:
    replicas = [np.ones(NUMEL, np.float32) for _ in range(3)]
    with cluster(3) as world:
        nodes = [world.node(10 * rank) for rank in range(3)]
        workers = [
            world.start(node, lambda n=node, p=params, c=c: train(n, options, p, 60, 2, c))
            for node, params, c in zip(nodes, replicas, [0.0, 0.5, 0.0], strict=True)
        ]
        world.run()
    found = [worker.result[0] for worker in workers]
    assert found[0] is found[2] is None
    assert found[1] is not None
    assert 0 < found[1] <= 20
    assert workers[1].result[1].stats.digests > 0, "compared again after it came in again"
    assert replicas[0].tobytes() == replicas[2].tobytes()
    if options in ({}, {"topology": "sharded"}):  # others have unfinished or local steps
        assert replicas[1].tobytes() == replicas[0].tobytes()


@pytest.mark.parametrize("seed", seeds(2))
def test_coming_in_and_dying_are_no_divergence(seed: int) -> None:
    options: dict[str, Any] = {}
    replicas = [np.ones(NUMEL, np.float32) for _ in range(4)]
    with cluster(seed) as world:

        def start(rank: int, peers: int) -> Any:
            node = world.node(10 * rank)
            return node, world.start(node, lambda: train(node, options, replicas[rank], 60, peers))

        started = [start(rank, 2) for rank in range(3)]
        world.plan(world.random.randint(150, 300), lambda: started.append(start(3, 1)))
        world.plan(world.random.randint(400, 700), lambda: world.kill(started[1][0]))
        world.run()
    alive = [worker for node, worker in started if not node.is_dead]
    assert len(alive) >= 3 or started[1][0].is_closed
    for worker in alive:
        assert worker.result[0] is None
        assert worker.result[1].stats.digests > 0


class Others:
    """The members of a comparison, whose notes a test writes; the part of a membership that a comparison uses."""

    def __init__(self, *ids: int) -> None:
        self.run = NodeRun(5, 1)
        self.introductions = SimpleNamespace(name_of=str)
        self.phase = Phase.IN
        self.is_first = True
        self.has_news = False
        self.members = {NodeRun(id_, 1): SimpleNamespace(notes={}) for id_ in ids}
        self.peers = tuple(self.members)
        self.announced: list[int] = []
        self.contributors = "m"

    def announce(self, comparison: int | None, digest: tuple[int, str] | None) -> None:
        assert comparison is not None or digest is not None
        self.announced += [comparison] if comparison is not None else []

    def contributors_before(self, step: int) -> str:
        assert step > 0
        return self.contributors


PARAMS = [np.ones(3, np.float32)]


def comparison_of(others: Others, step: int) -> tuple[Consistency, Any]:
    replica = SimpleNamespace(step=step, shared=[])
    return Consistency(others, others, replica, 1.0), replica  # type: ignore[arg-type]


def test_the_majority_is_right_and_of_equals_the_lowest_id() -> None:
    mine = f"m-{digest_of(PARAMS)}"

    def outcome(*digests: str) -> bool:
        others = Others(*(1 + 9 * index for index in range(len(digests))))
        with cluster(0):
            consistency, replica = comparison_of(others, 3)
            consistency.compare(PARAMS)
            assert others.announced == [4]
            replica.step = 4
            for stream, digest in zip(others.members.values(), digests, strict=True):
                stream.notes[3] = Note(digest=(4, digest))
            try:
                consistency.compare(PARAMS)
            except gw.Diverged:
                return False
        return True

    assert outcome(mine)
    assert not outcome("m-b"), "the other has the lower id"
    assert outcome("m-b", mine)
    assert not outcome("m-b", "m-b")
    assert outcome("n-b", "n-b"), "not all knew of the same members"


def test_a_digest_tells_every_bit() -> None:
    params = [np.zeros(3, np.float32), np.zeros((2, 2))]
    before = digest_of(params)
    params[1][1, 1] = -0.0
    assert digest_of(params) != before


def test_expensive_digests_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(0) as world:

        def slow(_: object) -> str:
            world.now_s += 0.5
            return "a"

        monkeypatch.setattr(consistency_module, "digest_of", slow)
        others = Others()
        consistency, replica = comparison_of(others, 0)
        for step in range(200):
            replica.step = step
            consistency.compare(PARAMS)
            world.now_s += 1.0
    assert others.announced[:2] == [1, 2]
    assert others.announced[2] - others.announced[1] == 100, "0.5 s are 1/200 of 100 s"


def test_digests_that_not_all_will_tell_are_not_kept_for_ever() -> None:
    others = Others(2, 3)
    others.is_first = False
    other, silent = others.members.values()
    with cluster(0):
        consistency, replica = comparison_of(others, 0)
        for step in range(1, 1_000):
            replica.step = step
            other.notes = {step - 1: Note(comparison=step, digest=(step, "m-a"))}
            consistency.compare(PARAMS)
        assert len(consistency._digests) < 20
        assert consistency.agreed == 0
        replica.step = 1_000
        mine = f"m-{digest_of(PARAMS)}"
        other.notes = {999: Note(digest=(999, mine))}
        silent.notes = {999: Note(digest=(999, mine))}
        consistency.compare(PARAMS)
    assert consistency.agreed == 1
