"""Coming in late, leaving, dying, being left behind: replicas stay identical, updates are applied once or kept."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange.protocol import Hello, Note, Phase, decode_steps, unpack_relay
from gradwire.transport import PeerLost

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster, run_cluster

NUMEL = 24
THRESHOLD = 2.0**-6
COMPUTE_S = 0.1
START = np.arange(NUMEL, dtype=np.float32)


def update(node_id: int, count: int) -> NDArray[np.float32]:
    """Return multiples of 2^-12, so that every sum is exact."""
    rng = np.random.default_rng([41, node_id, count])
    return (rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32)


OVERLAPPED: dict[str, dict[str, Any]] = {
    "waiting": {},
    "overlapped": {"overlap": 1},
    "overlapped, moved": {"overlap": 1, "moves": True},
    "overlapped, moved, residual": {"overlap": 1, "moves": True, "apply_residual": True},
    "difference": {"moves": True, "apply_residual": True, "keeps_residual": False},
}
overlapped_or_not = pytest.mark.parametrize("how", OVERLAPPED.values(), ids=OVERLAPPED.keys())


class Trainer:
    """One worker: it trains until the members have reached a step, and keeps account of what it put in.

    With ``moves`` it adds its updates to the parameters itself.
    """

    def __init__(
        self,
        world: Cluster,
        node_id: int,
        steps: int,
        *,
        moves: bool = False,
        keeps_residual: bool = True,
        **options: Any,
    ) -> None:
        self.world = world
        self.node: FakeNode = world.node(node_id)
        self.steps = steps
        policy = gw.FixedThreshold(THRESHOLD)
        self.keeps_residual = keeps_residual
        self.encoder = gw.Encoder(NUMEL, policy, keeps_residual=keeps_residual)
        options = {
            "reduction": "sum",
            "timeout_s": 20.0,
            "digest_s": 0.0,
            "topology": "mesh",
            **options,
        }
        self.share = gw.Exchange(self.encoder, self.node, **options)
        self.params = START.copy()
        self.moves, self.overlaps = moves, bool(options.get("overlap"))
        self.put_in = np.zeros(NUMEL)
        self.results: list[gw.StepResult] = []
        self.joined: gw.Joined | None = None
        self.leaves_after: int | None = None
        self.resyncs_at: int | None = None
        self.pause: dict[int, float] = {}  # seconds to compute before a step, where not COMPUTE_S
        self.worker = world.start(self.node, self.train)

    def train(self) -> None:
        self.joined = self.share.join(self.params)
        for count in itertools.count():
            if self.share.next_step >= self.steps:
                break
            self.world.compute(self.node, self.pause.get(self.share.next_step, COMPUTE_S))
            one = update(self.node.peer.id, count)
            self.put_in += one
            if self.moves:
                self.params += one
                if self.share.next_step == self.resyncs_at:
                    self.resyncs_at = None
                    self.share.resync(self.params)
                    assert self.encoder.has_residual == self.keeps_residual
                self.results.append(self.share.step_moved(self.params))
            else:
                self.results.append(self.share.step(one, self.params))
            if self.leaves_after is not None and len(self.results) >= self.leaves_after:
                self.results.append(self.share.leave(self.params))
                break
        if self.overlaps and self.leaves_after is None:
            self.share.catch_up(self.params)
        self.world.close(self.node)

    @property
    def residual(self) -> NDArray[np.float32]:
        """What it has not sent, without the message of an unfinished step."""
        self.share._replica.make_residual(self.params)
        return self.encoder.residual

    @property
    def shared(self) -> NDArray[np.float32]:
        """The parameters that all nodes share."""
        return self.share.shared(self.params)[0]

    @property
    def is_alive(self) -> bool:
        return not self.node.is_dead

    def sent(self, steps: int | None = None) -> NDArray[np.float64]:
        """Return the sum of what it published, or of the first so many of it."""
        total = np.zeros(NUMEL)
        for _, payload in itertools.islice(sorted(self.node.updates.items()), steps):
            for message in gw.parse_many(payload):
                gw.apply(message, total)
        return total


def assert_identical(trainers: list[Trainer]) -> None:
    alive = [one for one in trainers if one.is_alive and one.leaves_after is None]
    assert all(one.share.next_step >= one.steps for one in alive)
    assert len({one.shared.tobytes() for one in alive}) == 1
    assert len({one.share.next_step for one in alive}) == 1


def assert_nothing_lost(trainers: list[Trainer]) -> None:
    put_in = sum(one.put_in for one in trainers)
    kept = sum(one.residual.astype(np.float64) for one in trainers)
    survivor = next(one for one in trainers if one.is_alive and one.leaves_after is None)
    np.testing.assert_array_equal(survivor.shared + kept, START + put_in)


# --- coming in late ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_id", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_comes_in_again_while_another_one_is_missing(mode: str, node_id: int) -> None:
    with cluster(3) as world:
        first = {each: Trainer(world, each, 400, mode=mode, min_peers=2) for each in (1, 2, 3)}
        for each in (1, 3):
            world.plan(100, lambda node=first[each].node: world.kill(node))
        world.run(until=lambda: first[2].share.members == () and first[2].share.next_step > 0)
        again = Trainer(world, node_id, 400, mode=mode, min_peers=2)
        began_s = world.now_s
        world.run(until=lambda: again.joined is not None)
        assert again.joined is not None
        assert again.joined.is_late
        assert again.joined.is_replaced
        assert (
            world.now_s < began_s + 15.0
        )  # another one might come, and begin the run again with it
        world.run()
    if mode == "sync":
        assert_identical([first[2], again])


@pytest.mark.parametrize("seed", seeds(2))
@overlapped_or_not
def test_a_late_node_misses_nothing_and_applies_nothing_twice(seed: int, how: Any) -> None:
    def trainer(node_id: int) -> Trainer:
        return Trainer(world, node_id, 40, min_peers=1, **how)

    with cluster(seed) as world:
        trainers = [trainer(node_id) for node_id in (20, 30)]
        for turn, node_id in ((world.random.randint(20, 150), 10), (100, 40)):
            world.plan(turn, lambda n=node_id: trainers.append(trainer(n)))
        world.run()
    assert len(trainers) == 4
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    late = [one for one in trainers if one.joined is not None and one.joined.is_late]
    assert {one.node.peer.id for one in late} <= {10, 40}
    assert late
    initial_member = trainers[0]
    assert {gone.id for result in initial_member.results for gone in result.joined} >= {
        one.node.peer.id for one in late
    }


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(
    "options",
    [
        {"every": 2},
        {"every": 2, "codec": "dense", "reduction": "mean"},
        {"reduction": "mean"},
        {"outer_momentum": 0.5},
        {"outer_momentum": 0.5, "every": 2, "apply_residual": True, "overlap": 1, "moves": True},
    ],
    ids=str,
)
def test_a_late_node_comes_in_whatever_the_mode(seed: int, options: Any) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 25, min_peers=1, **options) for node_id in (20, 30)]
        turn = world.random.randint(60, 150)
        world.plan(turn, lambda: trainers.append(Trainer(world, 10, 25, min_peers=1, **options)))
        world.run()
    assert trainers[2].joined is not None
    assert trainers[2].joined.is_late
    assert_identical(trainers)
    if options == {"every": 2}:
        assert_nothing_lost(trainers)


@pytest.mark.parametrize("seed", seeds(2))
@overlapped_or_not
def test_the_others_go_on_while_a_snapshot_is_on_its_way(seed: int, how: Any) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 40, min_peers=1, **how) for node_id in (20, 30)]
        world.run(until=lambda: len(trainers[0].results) > 5)
        before = len(trainers[0].results)
        late = Trainer(world, 10, 40, min_peers=1, **how)
        late_links = [(one.node.peer, late.node.peer) for one in trainers]
        world.slow_links |= set(late_links)
        world.run(until=lambda: len(trainers[0].results) > before + 12)
        assert late.joined is None
        world.slow_links.clear()
        world.run()
    assert_identical([*trainers, late])
    assert_nothing_lost([*trainers, late])


def test_a_restarted_node_comes_in_with_the_step_of_the_others() -> None:
    with cluster(5) as world:
        trainers = [Trainer(world, node_id, 30, min_peers=2) for node_id in (10, 20, 30)]
        world.run(until=lambda: len(trainers[0].results) > 8)
        world.kill(trainers[2].node)
        world.run(until=lambda: len(trainers[0].results) > 12)
        trainers.append(Trainer(world, 30, 30, min_peers=2))
        world.run()
    assert trainers[3].joined is not None
    assert trainers[3].joined.is_late
    assert trainers[3].joined.step > 8
    assert_identical(trainers)


def test_the_log_counts_local_steps_too_and_has_the_names_of_the_nodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "gradwire.exchange"), cluster(5) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=1, every=7) for node_id in (10, 20)]
        trainers[0].node.names.update({20: "rank 1", 30: "rank 2"})
        world.run(until=lambda: len(trainers[0].results) > 30)
        late = Trainer(world, 30, 20, min_peers=1, every=7)
        late.node.names.update({10: "rank 0", 20: "rank 1"})
        world.run(until=lambda: bool(late.results))
        world.kill(trainers[1].node)
        world.run()
    log = "\n".join(caplog.messages)
    came = [int(step) for step in re.findall(r":1030\)? comes in with step (\d+)", log)]
    went = [int(step) for step in re.findall(r"step (\d+): rank 1 \(127.0.0.1:1020\) is", log)]
    assert log.count("rank 2 (127.0.0.1:1030) comes in with step") == 1
    assert "rank 1 (127.0.0.1:1020) is gone, says rank 2 (127.0.0.1:1030)" in log
    assert late.joined is not None
    assert came == [7 * late.joined.step] * 2
    assert len(went) == 2
    assert all(step % 7 == 0 and came[0] <= step < 140 for step in went)
    assert_identical([trainers[0], late])


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize(
    "options", [{}, {"topology": "sharded"}, {"mode": "async"}, {"every": 4}], ids=str
)
def test_a_newcomer_whose_members_are_all_restarted_begins_with_them(
    seed: int, options: Any
) -> None:
    with cluster(seed) as world:
        first = [Trainer(world, node_id, 30, min_peers=1, **options) for node_id in (10, 20)]
        world.run(until=lambda: len(first[0].node.updates) > 3)
        newcomer = Trainer(world, 30, 30, min_peers=2, **options)
        world.run(until=lambda: newcomer.share._membership.phase == "joining")
        for dead in first:
            world.kill(dead.node)
        again = [Trainer(world, node_id, 30, min_peers=2, **options) for node_id in (10, 20)]
        world.run()
    assert all(one.joined is not None and one.joined.step == 0 for one in again)
    assert newcomer.joined is not None
    assert len(newcomer.joined.members) == 2


def test_the_optimiser_s_state_comes_with_the_snapshot() -> None:
    def work(node: FakeNode, is_late: bool) -> Any:
        params, state = START.copy(), [np.full(3, 7.0 - is_late, np.float32), np.ones((2, 2))]
        share = gw.Exchange(gw.Encoder(NUMEL, THRESHOLD), node, min_peers=0 if not is_late else 1)
        joined = share.join(params, state)
        while share.next_step < 30:
            share.step(update(node.peer.id, share.next_step), params, state)
        node.cluster.close(node)
        return joined, [one.tolist() for one in state], params

    with cluster(1) as world:
        first_node = world.node(1)
        first = world.start(first_node, lambda: work(first_node, False))
        world.run(until=lambda: len(first_node.updates) > 5)
        node = world.node(2)
        second = world.start(node, lambda: work(node, True))
        world.run()
    joined, state, params = second.result
    assert joined.is_late
    assert state == [[7.0] * 3, [[1.0, 1.0], [1.0, 1.0]]]
    assert params.tobytes() == first.result[2].tobytes()


# --- going ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(2))
@overlapped_or_not
def test_a_node_that_leaves_takes_nothing_with_it(seed: int, how: Any) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 15, min_peers=2, **how) for node_id in (10, 20, 30)]
        trainers[1].leaves_after = 6
        world.run()
    left = trainers[1]
    np.testing.assert_array_equal(left.params, left.share.shared(left.params)[0])
    assert not (left.keeps_residual and left.encoder.residual.any())
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    assert [gone.id for result in trainers[0].results for gone in result.lost] == [20]


@pytest.mark.parametrize("seed", seeds(2))
@overlapped_or_not
def test_what_a_dead_node_had_sent_is_applied_by_all_or_by_nobody(seed: int, how: Any) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=3, **how) for node_id in (10, 20, 30, 40)]
        dead = world.random.sample(trainers, world.random.choice([1, 1, 2]))
        turn = world.random.randint(60, 500)
        for one in dead:
            world.plan(turn + world.random.randint(0, 40), lambda d=one: world.kill(d.node))
        world.run()
    alive = [one for one in trainers if one.is_alive]
    assert len(alive) == 4 - len(dead)
    assert_identical(trainers)
    # Exactly one way to explain the parameters: everything the living sent, and the first updates of the dead.
    explanations = []
    for counts in itertools.product(*(range(len(one.node.updates) + 1) for one in dead)):
        total = START + sum(one.sent() for one in alive)
        total += sum(one.sent(count) for one, count in zip(dead, counts, strict=True))
        if np.array_equal(total, alive[0].shared):
            explanations.append(counts)
    assert len(explanations) == 1
    for one, count in zip(dead, explanations[0], strict=True):
        assert count >= len(one.node.updates) - 2


@pytest.mark.parametrize("seed", [19, 27, 50])
def test_members_that_lose_each_other_while_another_dies_are_counted_alike(seed: int) -> None:
    """A node outside calls a member gone, of which another node still takes an update."""
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 30, min_peers=4, overlap=1) for node_id in (10, 20, 30, 40, 50)
        ]
        for each in trainers:
            each.pause = dict.fromkeys(range(8, 40), 0.5)
        dies, one, _, _, other = trainers
        turn = world.random.randint(60, 350)
        world.plan(turn, lambda: world.cut(one.node, other.node))
        world.plan(turn + world.random.randint(0, 30), lambda: world.kill(dies.node))
        world.plan(turn + 60, lambda: world.connect(one.node, other.node))
        world.run()
    assert_identical(trainers)


# --- being left behind ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(2))
@overlapped_or_not
def test_a_straggler_is_left_behind_and_comes_in_again_with_all_its_updates(
    seed: int, how: Any
) -> None:
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 30, min_peers=2, on_straggler="drop", **how)
            for node_id in (10, 20, 30)
        ]
        slow = trainers[world.random.randrange(3)]
        slow.pause = {5: 25.0}  # longer than timeout_s
        for one in trainers:
            if one is not slow:
                one.pause = dict.fromkeys(range(6, 30), 1.0)
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    witness = next(one for one in trainers if one is not slow)
    assert slow.node.peer in [gone for result in witness.results for gone in result.lost]
    assert slow.node.peer in [gone for result in witness.results for gone in result.joined]


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"overlap": 1},
        {"apply_residual": True},
        {"apply_residual": True, "keeps_residual": False},
        OVERLAPPED["overlapped, moved, residual"],
    ],
)
def test_what_an_optimiser_moved_before_a_resync_is_not_lost(seed: int, how: Any) -> None:
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 40, min_peers=2, **{**how, "moves": True})
            for node_id in (10, 20, 30)
        ]
        trainers[1].resyncs_at = 9
        world.run()
    assert trainers[1].resyncs_at is None
    assert_identical(trainers)
    assert_nothing_lost(trainers)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_a_difference_is_after_a_resync_what_a_residual_of_its_own_is(
    seed: int, topology: str
) -> None:
    ends = []
    for keeps in (True, False):
        options = {"apply_residual": True, "moves": True, "topology": topology, "min_peers": 2}
        with cluster(seed) as world:
            trainers = [
                Trainer(world, node_id, 30, keeps_residual=keeps, **options)
                for node_id in (10, 20, 30)
            ]
            trainers[1].resyncs_at = 9
            world.run()
        assert_identical(trainers)
        ends.append(trainers)
    for kept, difference in zip(*ends, strict=True):
        np.testing.assert_array_equal(difference.shared, kept.shared)
        np.testing.assert_array_equal(difference.params, kept.params)


def drop(world: Cluster, dropped: FakeNode, others: list[FakeNode]) -> None:
    """Let nodes give up one that stands still, which hears of it when it goes on."""
    for other in others:
        world.cut(dropped, other)
        inbox = world.link(other.peer, dropped.peer)
        inbox[-1] = PeerLost(other.peer, "dropped by the peer")


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_node_that_the_others_have_dropped_comes_in_again(
    count: int, mode: str, seed: int
) -> None:
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 40, mode=mode, min_peers=count - 1)
            for node_id in range(1, count + 1)
        ]
        late = world.random.choice(trainers)
        nodes = [each.node for each in trainers if each is not late]
        turn = world.random.randint(60, 200)
        world.plan(turn, lambda: drop(world, late.node, nodes))
        for other in nodes:
            world.plan(turn + 40, lambda o=other: world.connect(late.node, o))
        world.run()
    if mode == "sync":
        assert_identical(trainers)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("connects_at", [50, 61])
def test_only_the_node_that_stood_still_joins_again(connects_at: int, seed: int, mode: str) -> None:
    """Also where it has the update of the other one that its present step needs, and the lower id.

    It hears of the loss before it is connected again, or of both at once.
    """
    with cluster(seed) as world:
        late, other = (Trainer(world, node_id, 60, mode=mode, min_peers=1) for node_id in (1, 2))
        turn = world.random.randint(60, 120)
        world.plan(turn, lambda: world.stopped.add(late.node))
        world.plan(turn + 40, lambda: drop(world, late.node, [other.node]))
        world.plan(turn + 60, lambda: world.stopped.discard(late.node))
        world.plan(turn + connects_at, lambda: world.connect(late.node, other.node))
        phases: set[Phase] = set()
        world.run(until=lambda: phases.add(other.share._membership.phase) or other.worker.is_done)
        world.run()
    assert Phase.JOINING not in phases
    assert late.share.next_step == other.share.next_step


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_that_stood_still_until_the_others_ended_is_told_whose_parameters_count(
    mode: str,
) -> None:
    with cluster(1) as world:
        late, other = (Trainer(world, node_id, 20, mode=mode, min_peers=1) for node_id in (1, 20))
        world.run(until=lambda: len(other.results) > 5)
        world.stopped.add(late.node)
        drop(world, late.node, [other.node])
        world.run(until=lambda: other.worker.is_done)
        world.stopped.clear()
        with pytest.raises(TimeoutError, match="the training's parameters are theirs"):
            world.run()


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}], ids=str)
def test_a_newcomer_stays_where_a_node_that_stood_still_has_never_heard_of_it(
    options: Any, seed: int
) -> None:
    """That node still counts the other member in, and has the lowest id: this is no part of a split network."""
    with cluster(seed) as world:
        late, other = (Trainer(world, node_id, 90, min_peers=1, **options) for node_id in (1, 20))
        world.run(until=lambda: len(other.results) > 5)
        world.stopped.add(late.node)
        drop(world, late.node, [other.node])
        world.run(until=lambda: not other.share.members)
        newcomer = Trainer(world, 30, 90, min_peers=1, **options)
        world.cut(late.node, newcomer.node)
        world.run(until=lambda: newcomer.share._membership.phase is Phase.IN)
        world.run(until=lambda: len(newcomer.results) > 5)
        for node in (newcomer.node, other.node):
            world.connect(late.node, node)
        world.stopped.clear()
        phases: set[Phase] = set()
        staying = [other.share._membership, newcomer.share._membership]
        world.run(
            until=lambda: phases.update(each.phase for each in staying) or other.worker.is_done
        )
        world.run()
    assert Phase.JOINING not in phases
    assert_identical([late, other, newcomer])


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}], ids=str)
def test_a_node_that_is_lost_before_it_begins_comes_in_late(
    options: Any, count: int, seed: int
) -> None:
    """It hears of the beginning, of its loss and of the new connection together."""
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 40, min_peers=count - 1, **options)
            for node_id in (10, 20, 30)[:count]
        ]
        late, other = trainers[-1], trainers[-2]
        world.run(until=lambda: other.share._membership.phase == "in")
        world.stopped.add(late.node)
        world.cut(other.node, late.node)
        world.run(until=lambda: len(trainers[0].share.members) == count - 2)
        world.connect(other.node, late.node)
        world.stopped.clear()
        world.run()
    assert_identical(trainers)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}], ids=str)
def test_a_newcomer_that_loses_its_member_does_not_go_on_while_another_one_sees_it(
    options: Any, seed: int
) -> None:
    with cluster(seed) as world:
        member = Trainer(world, 30, 60, min_peers=0, **options)
        world.run(until=lambda: len(member.results) > 3)
        newcomers = [Trainer(world, node_id, 60, min_peers=2, **options) for node_id in (10, 20)]
        lost, follower = newcomers
        world.run(until=lambda: follower.share._membership.phase in ("ready", "in"))
        world.stopped.add(follower.node)
        world.run(until=lambda: lost.share._membership.phase in ("ready", "in"))
        world.cut(member.node, lost.node)
        until_s = world.now_s + 1.0
        world.run(until=lambda: world.now_s > until_s)
        world.stopped.clear()
        world.connect(member.node, lost.node)
        world.run()
    assert all(each.share.step_number >= 60 for each in newcomers)
    assert member.share._membership.first_step == 0  # it has not joined again
    assert_identical([member, *newcomers])


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}, {"every": 4}], ids=str)
def test_the_newest_of_the_states_goes_on_where_no_member_is_left(options: Any, seed: int) -> None:
    with cluster(seed) as world:
        still, newest = (
            Trainer(world, node_id, 60, min_peers=1, moves=True, **options) for node_id in (10, 20)
        )
        newest.resyncs_at = 15
        world.run(until=lambda: len(newest.results) > 3)
        drop(world, still.node, [newest.node])
        end_s = world.now_s + 10.0
        world.run(until=lambda: world.now_s > end_s)
        assert still.share._membership.phase == newest.share._membership.phase == "joining"
        world.connect(still.node, newest.node)
        world.run()
    steps = [result.step for result in newest.results if not result.is_local]
    assert steps == sorted(set(steps))
    assert_identical([still, newest])


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}, {"every": 4}], ids=str)
def test_a_node_waits_for_a_member_that_another_one_sees(options: Any, seed: int) -> None:
    """The member stands still, and has the newest state."""
    with cluster(seed) as world:
        late, member = (
            Trainer(world, node_id, 60, min_peers=1, moves=True, **options) for node_id in (10, 20)
        )
        world.run(until=lambda: len(member.results) > 3)
        drop(world, late.node, [member.node])
        world.stopped.add(late.node)
        world.run(until=lambda: len(member.results) > 12)
        newcomer = Trainer(world, 30, 60, min_peers=2, moves=True, **options)
        world.run(until=lambda: newcomer.node.peer in member.node.connected)
        world.run(until=lambda: newcomer.share._membership.introductions.hellos)
        world.stopped.add(member.node)
        world.stopped.discard(late.node)
        end_s = world.now_s + 6.0
        world.run(until=lambda: world.now_s > end_s)
        assert late.share._membership.phase == "joining"
        world.stopped.clear()
        world.connect(late.node, member.node)
        world.run()
    steps = [result.step for result in member.results if not result.is_local]
    assert steps == sorted(set(steps))
    assert_identical([late, member, newcomer])


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}], ids=str)
def test_a_newcomer_that_follows_the_admission_of_one_that_joins_again_comes_in(
    options: Any, seed: int
) -> None:
    with cluster(seed) as world:
        members = [Trainer(world, node_id, 60, min_peers=1, **options) for node_id in (30, 40)]
        world.run(until=lambda: len(members[0].results) > 3)
        newcomers = [Trainer(world, node_id, 60, min_peers=3, **options) for node_id in (10, 20)]
        again, follower = newcomers
        world.run(until=lambda: follower.share._membership.phase == "joining")
        world.run(until=lambda: follower.share._membership.phase != "joining")
        world.stopped.add(follower.node)
        end_s = world.now_s + 1.0
        named = members[0].share._membership.members
        world.run(until=lambda: again.share._membership.run in named or world.now_s > end_s)
        world.cut(members[0].node, again.node)
        world.connect(members[0].node, again.node)
        phase = again.share._membership
        world.run(until=lambda: phase.phase == "joining" or world.now_s > end_s)
        world.stopped.clear()
        world.run()
    assert_identical([*members, *newcomers])


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}, {"every": 4}], ids=str)
def test_a_node_that_is_dropped_in_its_first_step_goes_on_in_the_same_training(
    seed: int, options: Any
) -> None:
    """It sees nobody but a new node, and goes on with it until it sees the others."""
    with cluster(seed) as world:
        trainers = [
            Trainer(world, node_id, 60, min_peers=2, moves=True, **options)
            for node_id in (10, 20, 30)
        ]
        *others, late = trainers
        world.run(until=lambda: all(each.share._membership.phase == "in" for each in trainers))
        world.stopped.add(late.node)
        drop(world, late.node, [each.node for each in others])
        world.run(until=lambda: len(others[0].results) > 3)
        trainers.append(Trainer(world, 40, 60, min_peers=1, moves=True, **options))
        for each in others:
            world.cut(trainers[3].node, each.node)
        world.stopped.clear()
        world.run(until=lambda: len(trainers[3].results) > 3)
        for each in others:
            for node in (late.node, trainers[3].node):
                world.connect(each.node, node)
        world.run()
    assert_identical(trainers)
    trainings = {each.share.state_dict()["training"] for each in trainers}
    assert len(trainings) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("connects_at", [20, 40])
def test_nodes_that_have_all_dropped_each_other_go_on(
    connects_at: int, seed: int, mode: str
) -> None:
    """As processes of one machine do that stands still."""
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 999, mode=mode, min_peers=2) for node_id in (1, 2, 3)]
        nodes = [each.node for each in trainers]
        pairs = list(itertools.combinations(nodes, 2))
        turn = world.random.randint(60, 120)

        def part() -> None:
            for one, other in pairs:
                drop(world, one, [other])
                world.link(one.peer, other.peer)[-1] = PeerLost(one.peer, "dropped by the peer")

        world.plan(turn, lambda: world.stopped.update(nodes))
        world.plan(turn + 10, part)
        world.plan(turn + 30, world.stopped.clear)
        world.plan(turn + connects_at, lambda: [world.connect(*pair) for pair in pairs])
        world.run(until=lambda: all(each.share.next_step >= 60 for each in trainers))
        assert all(len(each.share.members) == 2 for each in trainers)
    assert len({each.share._membership.introductions.training for each in trainers}) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_that_the_others_have_dropped_does_not_end_alone(mode: str) -> None:
    with cluster(1) as world:
        other, late = (Trainer(world, node_id, 20, mode=mode, min_peers=1) for node_id in (1, 2))
        world.plan(60, lambda: drop(world, late.node, [other.node]))
        world.run(until=lambda: other.worker.is_done)
        assert not late.worker.is_done
        with pytest.raises(TimeoutError, match="from 0 members"):
            world.run()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_updates_of_departed_members_are_forgotten_after_some_steps(mode: str) -> None:
    """Each restart of a spot machine would cost the memory of its last updates."""
    with cluster(4) as world:
        trainers = [Trainer(world, node_id, 999, mode=mode, min_peers=2) for node_id in (1, 2, 3)]
        for round_ in range(3):
            world.run(until=lambda step=20 * round_: trainers[0].share.next_step > step)
            world.kill(trainers[-1].node)
            trainers.append(Trainer(world, 3, 999, mode=mode, min_peers=2))
        world.run(until=lambda: trainers[0].share.next_step > 100)
        assert not trainers[0].share._membership.past
        assert len(trainers[0].share.members) == 2


@pytest.mark.parametrize("seed", seeds(2))
@overlapped_or_not
def test_a_broken_connection_ends_with_identical_replicas(seed: int, how: Any) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 40, min_peers=2, **how) for node_id in (10, 20, 30)]
        one, other = world.random.sample(trainers, 2)
        turn = world.random.randint(60, 250)
        world.plan(turn, lambda: world.cut(one.node, other.node))
        world.plan(turn + 60, lambda: world.connect(one.node, other.node))
        for each in trainers:
            each.pause = dict.fromkeys(range(8, 40), 0.5)
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)


def test_a_node_that_both_parts_of_a_split_network_admit_takes_part_in_one() -> None:
    with cluster(10) as world:
        trainers = [Trainer(world, node_id, 40, min_peers=2) for node_id in (10, 20, 30)]
        one, restarted, other = trainers

        def restart() -> None:
            world.kill(restarted.node)
            trainers.append(Trainer(world, 20, 40, min_peers=1))
            trainers[-1].pause = one.pause

        turn = world.random.randint(150, 250)
        world.plan(turn, lambda: world.cut(one.node, other.node))
        world.plan(turn, restart)
        world.plan(turn + 100, lambda: world.connect(one.node, other.node))
        for each in trainers:
            each.pause = dict.fromkeys(range(8, 40), 0.5)
        world.run()
    assert_identical(trainers)


class Waiting(Trainer):
    """Stops at `PeerLost`, and comes back when the network is whole."""

    error = ""

    def train(self) -> None:
        try:
            super().train()
        except gw.PeerLost as error:
            self.error = str(error)
            self.world.compute(self.node, 10.0)
            self.share.resync(self.params)
            # The last one of asynchronous nodes is alone when the others have ended.
            with contextlib.suppress(gw.PeerLost):
                super().train()


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("hears_nothing", [False, True])
def test_with_a_majority_as_min_members_only_one_part_of_a_split_network_goes_on(
    hears_nothing: bool, topology: str, seed: int
) -> None:
    """Also where the part that stops still reaches the others: it gives them up, and tells them."""
    with cluster(seed) as world:
        how = {"topology": topology, "min_peers": 2, "min_members": 2}
        trainers = [Waiting(world, node_id, 60, **how) for node_id in (10, 20, 30)]
        alone, *majority = trainers
        for each in trainers:
            each.pause = dict.fromkeys(range(8, 60), 0.5)
        for each in majority:
            if hears_nothing:
                world.plan(200, lambda m=each: drop(world, m.node, [alone.node]))
            else:
                world.plan(200, lambda m=each: world.cut(alone.node, m.node))
            world.plan(300, lambda m=each: world.connect(alone.node, m.node))
        world.run()
    assert alone.error.startswith("1 of at least 2 members are left: ")
    assert not any(one.error for one in majority)
    assert_identical(trainers)
    joined = [peer for result in majority[0].results for peer in result.joined]
    assert joined == [alone.node.peer]


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("how", [{"topology": "mesh"}, {"topology": "sharded"}, {"mode": "async"}])
@pytest.mark.parametrize("min_members", [2, 3])
@pytest.mark.parametrize("is_one_killed", [False, True])
def test_nodes_that_were_all_apart_go_on_together_if_they_are_enough(
    is_one_killed: bool, min_members: int, how: dict[str, Any], seed: int
) -> None:
    with cluster(seed) as world:
        how = {**how, "min_peers": 2, "min_members": min_members}
        trainers = [Waiting(world, node_id, 60, **how) for node_id in (10, 20, 30)]
        for each in trainers:
            each.pause = dict.fromkeys(range(8, 60), 0.5)
        lives = trainers[is_one_killed:]
        for one, other in itertools.combinations(trainers, 2):
            world.plan(200, lambda a=one, b=other: world.cut(a.node, b.node))
        for one, other in itertools.combinations(lives, 2):
            world.plan(300, lambda a=one, b=other: world.connect(a.node, b.node))
        if is_one_killed:
            world.plan(250, lambda: world.kill(trainers[0].node))
        if is_one_killed and min_members == 3:
            with pytest.raises(TimeoutError, match=r"are fewer than the 3 that a step needs"):
                world.run()
            return
        world.run()
    assert all(each.error.startswith("1 of at least ") for each in lives)
    if "mode" not in how:
        assert_identical(lives)
    assert all(each.share.next_step >= 50 for each in lives)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_end_after_the_same_step_hold_the_same(seed: int) -> None:
    """A node may hear from one that ends that another has left, before that one's last update arrives."""

    def train(node: FakeNode, rank: int) -> bytes:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD)), node, min_peers=2, topology="mesh"
        )
        params = START.copy()
        for step in range(4):
            share.step(update(rank, step), params)
        share.end()
        node.cluster.close(node)
        return params.tobytes()

    assert len(set(run_cluster(train, count=3, seed=seed))) == 1


# --- who does not fit -------------------------------------------------------------------------------------------------


def test_another_model_is_refused_where_it_wants_to_come_in_and_training_goes_on() -> None:
    def intrude(node: FakeNode) -> str:
        share = gw.Exchange(gw.Encoder(NUMEL + 1, 1.0, dtype="float64"), node, min_peers=2)
        with pytest.raises(gw.Mismatch) as caught:
            share.step(np.zeros(NUMEL + 1, np.float32), np.zeros(NUMEL + 1, np.float32))
        return str(caught.value)

    with cluster(3) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=1) for node_id in (10, 20)]
        world.run(until=lambda: len(trainers[0].results) > 3)
        node = world.node(30)
        intruder = world.start(node, lambda: intrude(node))
        world.run()
    assert_identical(trainers)
    text = intruder.result
    assert "127.0.0.1:1010" in text
    assert "127.0.0.1:1030" in text
    assert "[[0, 24, 'float32']] there" in text
    assert "[[0, 25, 'float64']] here" in text


@pytest.mark.parametrize(
    ("params", "state", "complaint"),
    [
        (
            [np.zeros((4, 6), np.float32)],
            [],
            r"'float32', \[24\].*there.*'float32', \[4, 6\].*here",
        ),
        ([np.zeros(NUMEL)], [], r"'float32', \[24\].*there.*'float64', \[24\].*here"),
        ([np.zeros(NUMEL, np.float32)], [np.zeros(3)], r"\[3\].*\[\]"),
    ],
    ids=["shapes", "dtypes", "optimiser"],
)
def test_parameters_of_other_shapes_or_dtypes_are_refused_before_they_are_overwritten(
    params: list[Any], state: list[Any], complaint: str
) -> None:
    def intrude(node: FakeNode) -> None:
        params[0][...] = 7.0
        share = gw.Exchange(
            gw.Encoder(NUMEL, THRESHOLD), node, reduction="sum", topology="mesh", min_peers=1
        )
        with pytest.raises(gw.Mismatch, match=complaint):
            share.join(params, state)
        assert (params[0] == 7.0).all()
        node.cluster.close(node)

    with cluster(3) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=1) for node_id in (10, 20)]
        world.run(until=lambda: len(trainers[0].results) > 3)
        node = world.node(30)
        world.start(node, lambda: intrude(node))
        world.run()
    assert_identical(trainers)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "async"},
        {"every": 2},
        {"reduction": "sum"},
        {"topology": "sharded"},
        {"outer_momentum": 0.5},
    ],
    ids=str,
)
def test_two_nodes_that_do_not_agree_on_the_options_do_not_begin(options: Any) -> None:
    def begin(node: FakeNode, own: Any) -> str:
        share = gw.Exchange(gw.Encoder(NUMEL, 1.0), node, min_peers=1, **own)
        with pytest.raises(gw.Mismatch) as caught:
            share.wait_for_peers()
        return str(caught.value)

    with cluster(0) as world:
        one, two = world.node(1), world.node(2)
        workers = [
            world.start(one, lambda: begin(one, {})),
            world.start(two, lambda: begin(two, options)),
        ]
        world.run()
    assert all(next(iter(options)) in worker.result for worker in workers)


def test_nodes_with_checkpoints_of_different_steps_do_not_begin() -> None:
    def begin(node: FakeNode, steps: int) -> str:
        enc = gw.Encoder(NUMEL, 1.0)
        for _ in range(steps):
            enc.encode(np.zeros(NUMEL, np.float32))
        with pytest.raises(gw.Mismatch) as caught:
            gw.Exchange(enc, node, min_peers=1).wait_for_peers()
        return str(caught.value)

    with cluster(0) as world:
        nodes = [world.node(1), world.node(2)]
        workers = [world.start(node, lambda n=node: begin(n, n.peer.id)) for node in nodes]
        world.run(until=lambda: any(worker.is_done for worker in workers))
    [text] = [worker.result for worker in workers if worker.is_done]
    assert "step 1" in text
    assert "step 2" in text


@pytest.mark.parametrize("payload", [b"", b"[1", b"[7]", b'{"model": 3}', b"\xff\xfe"])
def test_control_messages_that_cannot_be_read_are_errors(payload: bytes) -> None:
    for decode in (Hello.decode, Note.decode, decode_steps, unpack_relay):
        with pytest.raises(gw.MessageError):
            decode(memoryview(payload))
