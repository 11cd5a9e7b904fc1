"""Every training has an identity: a process that is left over from another one is refused, and told so."""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.cli.run import free_port

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster

NUMEL = 8
COMPUTE_S = 0.1
OLD, NEW = 100.0, 1.0  # the parameters with which runs begin


def exchange(node: Any, **options: Any) -> gw.Exchange:
    options = {"min_peers": 1, "digest_s": 0.0, "topology": "mesh", "timeout_s": 40.0, **options}
    return gw.Exchange(gw.Encoder(NUMEL, 2.0**-6), node, **options)


class Trainer:
    """A node that trains until the members have reached a step, or until it is refused."""

    def __init__(
        self,
        world: Cluster,
        node_id: int,
        start: float,
        steps: int,
        *,
        loads: dict[str, Any] | None = None,
        computes_s: float = COMPUTE_S,
        **options: Any,
    ) -> None:
        self.world = world
        self.node: FakeNode = world.node(node_id)
        self.share = exchange(self.node, **options)
        self.loads = loads
        self.steps = steps
        self.computes_s = computes_s
        self.params: NDArray[np.float32] = np.full(NUMEL, start, np.float32)
        self.joined: gw.Joined | None = None
        self.error = ""
        self.states: dict[int, tuple[dict[str, Any], NDArray[np.float32]]] = {}
        self.worker = world.start(self.node, self.train)

    def train(self) -> None:
        try:
            if self.loads is not None:
                self.share.load_state_dict(self.loads)
            self.joined = self.share.join(self.params)
            while self.share.next_step < self.steps:
                self.world.compute(self.node, self.computes_s)
                self.share.step(np.full(NUMEL, 2.0**-6, np.float32), self.params)
                self.states[self.share.next_step] = self.share.state_dict(), self.params.copy()
        except gw.Mismatch as error:
            self.error = str(error)
        if not self.node.is_dead:
            self.world.close(self.node)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(0.0, 0.0), (0.0, 8.0), (8.0, 0.0)],
    ids=["together", "the last rank late", "rank 0 late"],
)
@pytest.mark.parametrize("count", [2, 3])
def test_a_process_of_a_crashed_run_is_left_out_of_the_restarted_one(
    seed: int, mode: Any, first: float, second: float, count: int
) -> None:
    with cluster(seed) as world:
        options = {"min_peers": count - 1, "mode": mode}
        old = [Trainer(world, rank, OLD, 10_000, **options) for rank in range(count)]
        world.run(until=lambda: all(each.share.next_step > 20 for each in old))
        for each in old[:-1]:
            world.kill(each.node)
        leftover = old[-1]
        begin_s = world.now_s
        new: list[Trainer] = []
        starts_s = dict.fromkeys(range(count), 0.0)
        starts_s |= {0: first, count - 1: second}
        for rank in sorted(starts_s, key=lambda rank: starts_s[rank]):
            after_s = begin_s + starts_s[rank]
            world.run(until=lambda s=after_s: world.now_s >= s)
            new.append(Trainer(world, rank, NEW, 30, **options))
        world.run()
    for each in new:
        assert not each.error
        assert each.joined is not None
        assert (each.joined.step, each.joined.is_late) == (0, False)
        assert each.params.max() < OLD / 2
    assert "left over from an earlier run" in leftover.error
    assert "127.0.0.1:1000" in leftover.error


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("restarted", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_a_node_that_restarts_without_a_file_while_the_others_live_joins_their_training(
    seed: int, mode: Any, restarted: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(seed) as world:
        options = {"min_peers": count - 1, "mode": mode}
        trainers = [Trainer(world, rank, OLD, 300, **options) for rank in range(count)]
        world.run(until=lambda: all(each.share.next_step > 20 for each in trainers))
        world.kill(trainers[restarted].node)
        again = Trainer(world, restarted, NEW, 300, **options)
        world.run()
    assert again.joined is not None
    assert again.joined.is_late
    assert again.joined.step > 20
    alive = [each for each in [*trainers, again] if not each.node.is_dead]
    assert not any(each.error for each in alive)
    assert min(each.params.min() for each in alive) > OLD
    identities = {each.share.state_dict()["training"] for each in alive}
    assert len(identities) == 1
    assert ("takes part in a training that has begun" in caplog.text) == (restarted == 0)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("new_ids", [(0, 1), (5, 6)], ids=["same ids", "other ids"])
def test_an_observer_of_a_crashed_run_does_not_follow_a_fresh_one(
    seed: int, mode: Any, new_ids: tuple[int, int]
) -> None:
    def observe(share: gw.Exchange, node: FakeNode) -> str:
        params = np.zeros(NUMEL, np.float32)
        try:
            while True:
                share.follow(params, timeout_s=1.0)
        except gw.Mismatch as error:
            assert params.min() > OLD / 2, "the old weights are still there"
            world.close(node)
            return str(error)

    with cluster(seed) as world:
        old = [Trainer(world, rank, OLD, 10_000, mode=mode) for rank in (0, 1)]
        world.run(until=lambda: all(each.share.next_step > 5 for each in old))
        node = world.node(9)
        share = exchange(node, role="observer", mode=mode)
        worker = world.start(node, lambda share=share, node=node: observe(share, node))
        world.run(until=lambda: old[0].share.next_step > 40)
        for each in old:
            world.kill(each.node)
        world.run(until=lambda s=world.now_s + 5.0: world.now_s >= s)
        new = [Trainer(world, rank, NEW, 100, mode=mode) for rank in new_ids]
        world.run()
    assert "earlier run" in worker.result
    assert not any(each.error for each in new)


@pytest.mark.parametrize("seed", seeds(2))
def test_all_restart_from_their_files_and_keep_the_identity(seed: int) -> None:
    with cluster(seed) as world:
        old = [Trainer(world, rank, OLD, 10_000) for rank in (0, 1)]
        world.run(until=lambda: all(each.share.next_step > 20 for each in old))
        world.kill(old[0].node)
        leftover = old[1]
        new = []
        for each in old:
            state, params = each.states[10]
            new.append(Trainer(world, each.node.peer.id, 0.0, 30, loads=state))
            new[-1].params[:] = params
        world.run()
    for each in new:
        assert not each.error
        assert each.joined is not None
        assert (each.joined.step, each.joined.is_late) == (10, False)
        assert each.share.state_dict()["training"] == old[0].states[1][0]["training"]
    assert "left over" in leftover.error


@pytest.mark.parametrize("seed", seeds(2))
def test_a_checkpoint_of_another_training_is_refused(seed: int) -> None:
    with cluster(seed) as world:
        one = [Trainer(world, rank, OLD, 12) for rank in (0, 1)]
        world.run()
    with cluster(seed) as world:
        two = [Trainer(world, rank, OLD, 12) for rank in (0, 1)]
        world.run()
    states = [one[0].states[10], two[1].states[10]]
    with cluster(seed) as world:
        mixed = [
            Trainer(world, rank, OLD, 30, loads=state) for rank, (state, _) in enumerate(states)
        ]
        world.run()
    for each in mixed:
        assert "training" in each.error
        assert all(state["training"] in each.error for state, _ in states)
    # The same where the others have begun.
    with cluster(seed) as world:
        members = [Trainer(world, rank, OLD, 60) for rank in (0, 1)]
        world.run(until=lambda: all(each.share.next_step > 5 for each in members))
        late = Trainer(world, 2, OLD, 60, loads=states[0][0])
        world.run()
    assert states[0][0]["training"] in late.error
    assert not any(each.error for each in members)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_node_that_comes_late_has_the_identity_in_its_checkpoint(seed: int) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, rank, OLD, 60) for rank in (0, 1)]
        world.run(until=lambda: all(each.share.next_step > 5 for each in trainers))
        trainers.append(Trainer(world, 2, OLD, 60))
        world.run()
    assert len({each.share.state_dict()["training"] for each in trainers} - {""}) == 1


def test_two_nodes_with_one_id_do_not_begin_together() -> None:
    with cluster(1) as world:
        trainers = [Trainer(world, 0, OLD, 10) for _ in range(2)]
        world.run(until=lambda: trainers[0].error != "")
        trainers.append(Trainer(world, 1, OLD, 10))
        world.run()
    assert "started later" in trainers[0].error
    assert not trainers[1].error
    assert not trainers[2].error


def test_a_line_on_the_terminal_shows_a_wait_for_others_and_goes_with_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    terminal = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with cluster(1) as world:
        first, second = world.node(0), world.node(1)
        first.names = {0: "rank 0", 1: "rank 1"}
        shares = [exchange(first), exchange(second)]
        world.start(first, lambda: shares[0].join(np.zeros(NUMEL, np.float32)))
        world.run(until=lambda: world.now_s > 10.0)
        assert "preparing: rank 1 (127.0.0.1:1001), after 10 s" in terminal.getvalue()
        assert sys.stderr is not terminal  # what is written goes above the line
        world.start(second, lambda: shares[1].join(np.zeros(NUMEL, np.float32)))
        world.run()
        assert sys.stderr is terminal


def test_a_node_that_ends_before_the_start_is_named_by_those_that_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wait(node: FakeNode) -> str:
        with pytest.raises(TimeoutError) as caught:
            exchange(node, start_timeout_s=60.0).join(np.zeros(NUMEL, np.float32))
        return str(caught.value)

    with cluster(1) as world:
        waiting, busy = world.node(0), world.node(1)
        waiting.names = {0: "rank 0", 1: "rank 1"}
        worker = world.start(waiting, lambda: wait(waiting))
        world.run(until=lambda: world.now_s > 10.0)
        assert "0 of 1 peers are ready; connected, and still preparing: rank 1" in caplog.text
        caplog.clear()
        world.kill(busy)
        world.run()
    gone = "gone before the start, see their own logs: rank 1 (127.0.0.1:1001) is silent"
    assert 3 <= sum(gone in line for line in caplog.messages) <= 6  # less and less often
    assert "0 of 1 peers are ready; rank 1 missing" in caplog.text
    assert gone in worker.result
    assert "start_timeout_s" not in worker.result


@pytest.mark.parametrize("seed", seeds(5))
def test_trainings_that_begin_at_the_same_time_become_one(seed: int) -> None:
    """Three nodes wait for one other each, so any two of them may begin before they see the third."""
    with cluster(seed) as world:
        trainers = [Trainer(world, rank, OLD, 60, min_peers=1) for rank in (0, 1, 2)]
        pairs = [(a.node.peer, b.node.peer) for a in trainers for b in trainers if a is not b]
        slow = set(world.random.sample(pairs, 3))
        world.slow_links |= slow
        world.run(until=lambda: world.now_s > 0.5)
        world.slow_links.clear()
        world.run()
    assert not any(each.error for each in trainers)
    assert len({each.params.tobytes() for each in trainers}) == 1
    assert len({each.share.state_dict()["training"] for each in trainers}) == 1


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize(
    "way", [("sync", "mesh"), ("sync", "sharded"), ("async", "mesh")], ids="-".join
)
@pytest.mark.parametrize("size", [2, 3])
def test_of_groups_that_begin_apart_no_node_is_left_alone(
    size: int, way: tuple[Any, Any], seed: int
) -> None:
    """A member may give way in its first step, which the others of its group have finished: they follow."""
    with cluster(seed) as world:
        options = dict(zip(("mode", "topology"), way, strict=True))
        trainers = [
            Trainer(world, rank, OLD, 20, min_peers=size - 1, **options) for rank in range(2 * size)
        ]
        sides = trainers[:size], trainers[size:]
        for near, far in (sides, sides[::-1]):
            world.slow_links |= {(a.node.peer, b.node.peer) for a in near for b in far}
        meet_s = world.random.uniform(0.0, 1.2 * COMPUTE_S)
        world.run(until=lambda: world.now_s > meet_s)
        world.slow_links.clear()
        world.run()
    assert not any(each.error for each in trainers)
    trainings = Counter(each.share.state_dict()["training"] for each in trainers)
    # Where both groups have finished a step, neither gives way.
    assert sorted(trainings.values()) in ([2 * size], [size, size])


@pytest.mark.parametrize("seed", seeds(3))
def test_a_node_that_left_and_trains_elsewhere_takes_nobody_with_it(seed: int) -> None:
    with cluster(seed) as world:
        stays = Trainer(world, 0, OLD, 80)
        leaves = world.node(1)

        def train(steps: int, start: float) -> None:
            share = exchange(leaves)
            params = np.full(NUMEL, start, np.float32)
            for _ in range(steps):
                world.compute(leaves, COMPUTE_S)
                share.step(np.full(NUMEL, 2.0**-6, np.float32), params)
            share.leave(params)

        worker = world.start(leaves, lambda: train(5, OLD))
        world.run(until=lambda: worker.is_done)
        partner = Trainer(world, 2, NEW, 40)
        for other in (leaves, partner.node):
            world.slow_links |= {(stays.node.peer, other.peer), (other.peer, stays.node.peer)}
        world.start(leaves, lambda: train(40, NEW))
        world.run(until=lambda: partner.share.next_step > 4)
        world.slow_links.clear()
        world.run()
    assert not stays.error
    assert stays.share.next_step == 80
    assert stays.params[0] > OLD
    assert partner.params[0] < OLD


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_node_that_begins_the_next_training_of_a_sweep_is_no_misfit(
    has_finished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gradwire")
    with cluster(0) as world:
        stays = Trainer(world, 0, OLD, 200)
        node = world.node(1)

        def train() -> None:
            share, params = exchange(node), np.full(NUMEL, OLD, np.float32)
            for _ in range(5):
                share.step(np.full(NUMEL, 2.0**-6, np.float32), params)
            if has_finished:
                share.leave(params)
            world.close(node)

        worker = world.start(node, train)
        world.run(until=lambda: worker.is_done)
        ahead = stays.share.next_step + 2
        world.run(until=lambda: stays.share.next_step > ahead)
        node = world.node(1)
        wider = gw.Exchange(gw.Encoder(2 * NUMEL, 2.0**-6), node, min_peers=1, digest_s=0.0)

        def begin() -> None:
            with pytest.raises(gw.Mismatch):  # share() would wait for the others to end theirs
                wider.join(np.zeros(2 * NUMEL, np.float32))
            world.close(node)

        world.start(node, begin)
        world.run()
    assert stays.share.next_step == 200
    is_told = "127.0.0.1:1001 and this node (127.0.0.1:1000) do not fit" in caplog.text
    assert is_told != has_finished
    assert ("has finished this training, and begins another one" in caplog.text) == has_finished


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_nodes_that_restart_together_find_the_one_that_lives_before_they_begin(
    topology: str, seed: int
) -> None:
    """They may begin alone, and meet each other before they meet it: another new node says nothing of it."""
    with cluster(seed) as world:
        options = {"min_peers": 0, "topology": topology}
        first, *dead = (Trainer(world, rank, OLD, 200, **options) for rank in (1, 0, 2))
        world.run(until=lambda: first.share.next_step > 20)
        for each in dead:
            world.kill(each.node)
        again = [Trainer(world, rank, NEW, 200, **options) for rank in (0, 2)]
        for each, other in zip(again, reversed(again), strict=True):
            each.node.seeds = frozenset({first.node.peer.address, other.node.peer.address})
        world.slow_links |= {(first.node.peer, each.node.peer) for each in again}
        begin_s = world.now_s
        world.run(until=lambda: world.now_s > begin_s + 0.5)
        world.slow_links.clear()
        world.run()
    assert not any(each.error for each in (first, *again))
    assert all(each.joined is not None and each.joined.step > 20 for each in again)
    assert len({each.params.tobytes() for each in (first, *again)}) == 1


def test_a_node_that_starts_again_and_again_keeps_nobody_from_joining() -> None:
    """Rank 0 waits for other new nodes before it joins, but not anew for every start of the same node."""
    with cluster(1) as world:
        first, rank0 = (Trainer(world, rank, OLD, 400, mode="async") for rank in (1, 0))
        world.run(until=lambda: first.share.next_step > 20)
        world.kill(rank0.node)
        again = Trainer(world, 0, NEW, 400, mode="async", min_peers=3)
        begin_s = world.now_s
        while again.joined is None:
            assert world.now_s < begin_s + 20.0
            unsteady = Trainer(world, 2, NEW, 400, mode="async", min_peers=3)
            start_s = world.now_s
            world.run(until=lambda: world.now_s > start_s + 4.0)  # noqa: B023
            world.kill(unsteady.node)
        world.run()
    assert again.joined.step > 20


def test_a_rank_0_that_looks_for_other_new_nodes_does_not_say_that_it_waits_for_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with cluster(1) as world:
        first, rank0 = (Trainer(world, rank, OLD, 200) for rank in (1, 0))
        world.run(until=lambda: first.share.next_step > 20)
        world.kill(rank0.node)
        again = Trainer(world, 0, NEW, 200)
        world.run(until=lambda: again.joined is not None)
    waits = [text for text in caplog.messages if text.startswith("this node waits")]
    assert any("more new nodes may come before it begins or joins" in text for text in waits)
    assert not any("has not begun the training with this node" in text for text in waits)


def test_real_nodes_leave_a_process_of_the_run_before_alone() -> None:
    """Rank 0 comes back at the same port; the process that is left over connects before rank 1 does."""
    secret = bytes(range(32))

    def make(rank: int, address: str) -> gw.Node:
        peers = [] if rank == 0 else [address]
        return gw.Node(address if rank == 0 else "127.0.0.1:0", peers, secret=secret, node_id=rank)

    def train(node: gw.Node, start: float, steps: int) -> tuple[int, float]:
        params = np.full(NUMEL, start, np.float32)
        share = exchange(node, timeout_s=20.0)
        first = share.join(params).step
        while share.next_step < steps:
            share.step(np.full(NUMEL, 2.0**-6, np.float32), params)
        node.close(0.0)
        return first, float(params[0])

    with ThreadPoolExecutor(4) as pool:
        address = f"127.0.0.1:{free_port()}"
        old = make(0, address)
        leftover = make(1, address)
        dead = pool.submit(train, old, OLD, 5)
        left = pool.submit(train, leftover, OLD, 10_000_000)
        dead.result()
        time.sleep(0.2)
        new = pool.submit(train, node := make(0, address), NEW, 20)
        node.wait_for_peers(1, 20.0)  # the process that is left over
        other = pool.submit(train, make(1, address), NEW, 20)
        assert new.result() == other.result() == (0, NEW + 20 * 2.0**-6)
        leftover.close(0.0)
        with pytest.raises((gw.Closed, gw.Mismatch)):
            left.result()
