"""The automatic topology: the mesh with few nodes, owners with more, and nothing is lost when it changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import replica as replicas
from gradwire.exchange.protocol import Phase
from gradwire.transport import Peer

from ..seeds import seeds
from . import test_sharded
from .cluster import cluster
from .test_sharded import (
    MODES,
    SIZES,
    Trainer,
    assert_identical,
    assert_nothing_lost,
    histories,
    kill,
    modes,
)


@pytest.fixture(autouse=True)
def _sharded_from_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds: fewer nodes and elements are quicker."""
    monkeypatch.setattr(replicas, "SHARDED_FROM", 4)
    monkeypatch.setattr(replicas, "SHARDED_ELEMENTS", sum(SIZES))


def kinds(one: Trainer) -> list[bool]:
    """Return for every step whether this node has sent its update whole, as in the mesh."""
    parsed = [
        one.replica.parse(one.node.peer, step, memoryview(payload))
        for step, payload in sorted(one.node.updates.items())
    ]
    return [not piece.parts for piece in parsed]


def kill_unless_last(trainers: list[Trainer], at: int) -> None:
    """Kill a node, unless only newcomers would be left, who have nobody to take the parameters from."""
    others = [one for one in trainers if one is not trainers[at] and one.remains]
    if any(one.share._membership.phase is Phase.IN for one in others):
        kill(trainers[at])


def crossings(
    seed: int,
    how: dict[str, Any],
    *,
    deaths: int,
    initial: int = 3,
    late: tuple[int, ...] = (5, 25),
) -> list[Trainer]:
    """Let nodes come, leave and die around the number from which the exchange is sharded."""
    with cluster(seed) as world:
        options = {"topology": "auto", **how}
        trainers = [
            Trainer(world, 10 * (1 + at), 30, min_peers=initial - 1, **options)
            for at in range(initial)
        ]
        for one in trainers:
            one.cohort = trainers if "mode" in how else []
        trainers[world.random.randrange(initial)].leaves_after = world.random.randrange(8, 20, 2)

        def join(node_id: int) -> None:
            late = Trainer(world, node_id, 30, min_peers=1, **options)
            late.cohort = trainers if "mode" in how else []
            trainers.append(late)

        for node_id in late:
            world.plan(world.random.randint(60, 300), lambda n=node_id: join(n))
        turn = world.random.randint(150, 600)
        for _ in range(deaths):
            chosen = world.random.randrange(initial)
            when = turn + world.random.randint(0, 60)
            world.plan(when, lambda at=chosen: kill_unless_last(trainers, at))
        world.run()
    assert_identical(trainers)
    if "outer_momentum" not in how and not (deaths and "every" in how):
        assert_nothing_lost(trainers)
    return trainers


@histories
@modes
def test_nodes_come_and_leave_across_the_threshold(seed: int, how: Any) -> None:
    trainers = crossings(seed, how, deaths=0)
    assert {True, False} <= {kind for one in trainers for kind in kinds(one)}


@histories
@modes
def test_nodes_die_across_the_threshold(seed: int, how: Any) -> None:
    crossings(seed, how, deaths=2, initial=4)


@pytest.mark.parametrize(
    ("name", "initial", "seed"),
    [
        ("waiting", 3, 5024),
        ("momentum", 3, 5028),
        ("momentum", 4, 5019),
        ("every", 3, 5003),
        ("every", 4, 5009),
        ("moved", 3, 5034),
        ("overlapped", 3, 5046),
        # Here newcomers are left behind, and are owners again in the next step.
        ("waiting", 3, 5187),
        ("overlapped", 4, 13),
        ("overlapped", 4, 25),
    ],
)
def test_a_newcomer_applies_what_the_members_apply_when_one_dies(
    name: str, initial: int, seed: int
) -> None:
    crossings(seed, MODES[name], deaths=1 + seed % 2, initial=initial)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("initial", [3, 4])
@modes
def test_many_joins_and_deaths(seed: int, how: Any, initial: int) -> None:
    crossings(5000 + seed, how, deaths=1 + seed % 2, initial=initial)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(40))
@pytest.mark.parametrize("initial", [4, 5])
@modes
def test_many_deaths(seed: int, how: Any, initial: int) -> None:
    crossings(5000 + seed, how, deaths=1 + seed % 2, initial=initial, late=())


# ---- links that are slow ---------------------------------------------------------------------------------------------


@pytest.fixture
def _slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every node find its links slow after five steps, whatever time passes in the cluster."""
    monkeypatch.setattr(replicas, "JUDGED_STEPS", 5)
    monkeypatch.setattr(replicas, "_PROCESSING_S", -1.0)
    monkeypatch.setattr(replicas, "SHARDED_FROM", 100)


@histories
@pytest.mark.parametrize("deaths", [0, 2])
@pytest.mark.usefixtures("_slow_links")
@modes
def test_nodes_come_leave_and_die_behind_slow_links(seed: int, how: Any, deaths: int) -> None:
    trainers = crossings(seed, how, deaths=deaths, initial=4)
    if "mode" not in how and "every" not in how:
        assert {True, False} <= {kind for one in trainers for kind in kinds(one)}


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.usefixtures("_slow_links")
def test_two_nodes_stay_in_the_mesh_and_three_leave_it_at_the_same_step(nodes: int) -> None:
    with cluster(0) as world:
        trainers = [
            Trainer(world, 10 + at, 14, min_peers=nodes - 1, topology="auto") for at in range(nodes)
        ]
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    for one in trainers:
        # They judge after five steps, and say so with the sixth.
        assert kinds(one)[:6] == [True] * 6
        assert set(kinds(one)[7:]) == {nodes == 2}


@pytest.mark.usefixtures("_slow_links")
def test_one_node_that_does_not_wait_keeps_all_in_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(0) as world:
        trainers = [Trainer(world, 10 + at, 14, min_peers=2, topology="auto") for at in range(3)]
        monkeypatch.setattr(trainers[1].replica, "wants_switch", lambda *_: False)
        world.run()
    assert_identical(trainers)
    assert all(set(kinds(one)) == {True} for one in trainers)


@pytest.mark.parametrize(
    ("nodes", "wait_s", "round_trip_s", "encode_s", "wants"),
    [
        # Measured in network namespaces: 5 million elements at 10 Mbit/s, 100 Mbit/s twice, and 1 Gbit/s.
        (3, 0.106, 1e-3, 1.5e-3, True),
        (3, 0.007, 1e-3, 1.5e-3, False),
        (4, 0.012, 1e-3, 1.6e-3, True),
        (4, 0.0035, 1e-3, 2.8e-3, False),
        (6, 0.003, 1e-3, 0.1e-3, False),  # 100,000 elements at 10 Mbit/s
        (4, 0.045, 0.080, 1e-3, False),  # far away, but not slow
        (2, 1.0, 1e-3, 1e-3, False),
        (0, 1.0, 1e-3, 1e-3, False),  # all have left
    ],
)
def test_long_waits_for_bytes_make_owners_worth_while(
    nodes: int, wait_s: float, round_trip_s: float, encode_s: float, wants: bool
) -> None:
    with cluster(0) as world:
        share = gw.Exchange(gw.Encoder(8, 1.0), world.node(0))
        replica = share._replica
        replica.deal([Peer(at, 1, "") for at in range(nodes)], 0)
        result = gw.StepResult(step=0, wait_s=wait_s, encode_s=encode_s)
        late = gw.StepResult(step=0, wait_s=60.0)  # for peers that still load
        steps = [late, *[result] * (replicas.JUDGED_STEPS - 1)]
        found = [replica.wants_switch(one, lambda: round_trip_s) for one in steps]
    assert found == [False] * (len(steps) - 1) + [wants]


@pytest.mark.parametrize(("sharded_s", "is_mesh"), [(0.2, False), (0.4, True)])
def test_longer_sharded_steps_bring_the_mesh_back_for_good(sharded_s: float, is_mesh: bool) -> None:
    peers = [Peer(at, 1, "") for at in range(4)]
    with cluster(0) as world:
        replica = gw.Exchange(gw.Encoder(8, 1.0), world.node(0))._replica
        for step in range(4 * replicas.JUDGED_STEPS):
            replica.deal(peers, step)
            wait_s = 0.3 if replica._is_mesh else sharded_s
            result = gw.StepResult(step=step, wait_s=wait_s)
            if replica.wants_switch(result, lambda: 1e-3):
                replica.switch()
            judged = step + 1 - replicas.JUDGED_STEPS
            was_tried = 0 <= judged < (replicas.JUDGED_STEPS if is_mesh else math.inf)
            assert replica.has_slow_links == was_tried, step


@histories
@pytest.mark.parametrize("deaths", [0, 2])
@modes
def test_nodes_come_leave_and_die_while_the_topology_changes(
    seed: int, how: Any, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SHARDED_FROM", 100)
    monkeypatch.setattr(replicas.Replica, "wants_switch", lambda self, *_: self.step % 4 == 0)
    trainers = crossings(seed, how, deaths=deaths, initial=4)
    if "mode" not in how and "every" not in how:
        changes = [np.count_nonzero(np.diff(kinds(one))) for one in trainers]
        assert max(changes) > 2


@histories
@pytest.mark.usefixtures("_slow_links")
def test_checkpoints_say_that_links_are_slow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = replicas.Replica.wants_switch

    def is_slow(self: replicas.Replica, *given: Any) -> bool:
        return self._is_mesh and judge(self, *given)  # the way back depends on times

    monkeypatch.setattr(replicas.Replica, "wants_switch", is_slow)
    test_sharded.test_training_resumes_from_checkpoints_bit_for_bit(seed, {"topology": "auto"})


@histories
@pytest.mark.parametrize(
    "how",
    [
        {},
        MODES["momentum"],
        MODES["residual"],
        {"codec": "dense"},
        {"codec": "bfloat16"},
        {"reduction": "mean"},
    ],
    ids=str,
)
def test_three_nodes_get_the_mesh_s_bits(seed: int, how: Any) -> None:
    found = []
    for topology in ("mesh", "auto"):
        with cluster(seed) as world:
            trainers = [
                Trainer(world, 10 * (1 + at), 12, min_peers=2, topology=topology, **how)
                for at in range(3)
            ]
            world.run()
        assert_identical(trainers)
        states = [
            [one["residual"].tobytes() for one in each.saved["encoders"]] for each in trainers
        ]
        sent = [each.node.updates for each in trainers]
        found.append((trainers[0].shared.tobytes(), states, sent))
    assert found[0] == found[1]


@pytest.mark.parametrize("topology", ["auto", "sharded"])
@pytest.mark.parametrize("codec", ["dense", "bfloat16"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whole_updates_lose_nothing(topology: str, codec: str, mode: str) -> None:
    with cluster(3) as world:
        trainers = [
            Trainer(
                world, 10 * (1 + at), 12, min_peers=3, topology=topology, codec=codec, mode=mode
            )
            for at in range(4)
        ]
        for one in trainers:
            one.cohort = trainers if mode == "async" else []
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    assert set(kinds(trainers[0])) == {(topology, mode) == ("auto", "async")}


@pytest.mark.parametrize("more", [0, 1])
def test_smaller_models_stay_in_the_mesh(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SHARDED_ELEMENTS", sum(SIZES) + more)
    with cluster(0) as world:
        trainers = [Trainer(world, 10 + at, 8, min_peers=3, topology="auto") for at in range(4)]
        world.run()
    assert_nothing_lost(trainers)
    assert set(kinds(trainers[0])) == {bool(more)}


def test_a_dedicated_role_makes_few_nodes_shard() -> None:
    with cluster(0) as world:
        trainers = [
            Trainer(world, 10 * (1 + at), 8, min_peers=2, topology="auto", role=role)
            for at, role in enumerate(("member", "worker", "worker"))
        ]
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    assert not any(kinds(trainers[0]))
    assert trainers[1].replica.owner_state() is None


def test_exact_sums_are_the_mesh_s() -> None:
    with cluster(0) as world:
        share = gw.Exchange(gw.Encoder(8, 1.0), world.node(1), min_peers=0, exact=True)
        assert share.step(np.ones(8, np.float32), np.zeros(8, np.float32)).is_exact
        with pytest.raises(ValueError, match="needs topology"):
            gw.Exchange(gw.Encoder(8, 1.0), world.node(2), exact=True, role="worker")
