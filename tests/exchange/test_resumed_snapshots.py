"""A donor that dies in the middle of a snapshot: another one goes on where it ended, and nothing travels twice."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import shares
from gradwire.exchange import join as join_module
from gradwire.exchange import snapshot as snapshot_module
from gradwire.exchange.protocol import TAG_NUMBERS, Kind, Phase
from gradwire.transport import Peer, PeerStats, Stats

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster
from .test_membership import NUMEL, THRESHOLD, Trainer, assert_identical, drop

PART_BYTES = 4
WAYS: dict[str, dict[str, Any]] = {
    "mesh": {"topology": "mesh"},
    "mean": {"topology": "mesh", "reduction": "mean"},
    "sharded": {"topology": "sharded", "reduction": "mean"},
    "momentum": {"topology": "mesh", "outer_momentum": 0.5, "reduction": "mean"},
    "sharded, momentum": {"topology": "sharded", "outer_momentum": 0.5, "reduction": "mean"},
    "local steps": {"every": 2, "reduction": "mean", "moves": True},
    "residual": {"apply_residual": True, "reduction": "mean", "moves": True},
    "difference": {
        "apply_residual": True,
        "keeps_residual": False,
        "reduction": "mean",
        "moves": True,
    },
    "dense": {"codec": "dense", "reduction": "mean"},
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a snapshot travel for several steps."""
    monkeypatch.setattr(snapshot_module, "_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(snapshot_module, "WHOLE_BYTES", 1)
    monkeypatch.setattr(shares, "WHOLE_BYTES", 1)
    monkeypatch.setattr(shares, "_ALIGNMENT_BYTES", PART_BYTES)
    monkeypatch.setattr(snapshot_module, "_DONORS_MAX", 1)


@pytest.fixture
def many_donors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all members send a part of a snapshot."""
    monkeypatch.setattr(snapshot_module, "_DONORS_MAX", 8)


class Parts:
    """Counts the parts of snapshots that a node gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, receiver: FakeNode) -> None:
        self.headers = self.header_bytes = 0
        self.nbytes = 0
        self.by_sender: dict[int, int] = {}
        publish = FakeNode.publish

        def counted(node: FakeNode, buffer: Any, tag: int = 0, to: Peer | None = None) -> Any:
            ticket = publish(node, buffer, tag, to)
            if tag // TAG_NUMBERS == Kind.SNAPSHOT and to == receiver.peer:
                is_header = bytes(buffer)[:2] == b'{"'  # no four bytes of a value begin so
                self.headers += is_header
                self.header_bytes += len(bytes(buffer)) if is_header else 0
                nbytes = 0 if is_header else len(bytes(buffer))
                self.nbytes += nbytes
                sender = node.peer.id
                self.by_sender[sender] = self.by_sender.get(sender, 0) + nbytes
            return ticket

        monkeypatch.setattr(FakeNode, "publish", counted)


def arrived(newcomer: Trainer) -> int:
    """Return how many bytes of a snapshot a newcomer has and could keep."""
    return newcomer.share._join._recipient.arrived_bytes


def begin_with_newcomer(world: Cluster, how: Any) -> tuple[list[Trainer], Trainer]:
    """Return four nodes that have trained for some steps, and one that begins to join them."""
    trainers = [Trainer(world, node_id, 60, min_peers=3, **how) for node_id in (10, 20, 30, 50)]
    world.run(until=lambda: len(trainers[0].results) > 3)
    return trainers, Trainer(world, 40, 60, min_peers=3, **how)


def kill_donor(world: Cluster, newcomer: Trainer, trainers: list[Trainer]) -> Trainer:
    """Kill a member that gives a newcomer its snapshot."""
    donor = min(newcomer.share._join._recipient.donors)
    [dead] = [one for one in trainers if one.node.peer.id == donor.id]
    world.kill(dead.node)
    return dead


def test_a_newcomer_that_gives_up_says_how_far_its_snapshot_came() -> None:
    with cluster(1) as world:
        trainers, newcomer = begin_with_newcomer(world, WAYS["mean"])
        world.run(until=lambda: arrived(newcomer) > 0)
        world.slow_links |= {(one.node.peer, newcomer.node.peer) for one in trainers}
        with pytest.raises(TimeoutError, match=r"of a snapshot .* have come: is the link too slow"):
            world.run()


class State:
    """An optimiser's state that some nodes cannot export."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.array = np.zeros(3, np.float32)

    def export(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [self.array]

    def check(self, arrays: list[Any]) -> None:
        assert len(arrays) == 1

    def load(self, arrays: list[Any]) -> None:
        self.array[...] = arrays[0]


@pytest.mark.parametrize("bad", [(), (10,), (20,), (10, 20)])
@pytest.mark.parametrize("error", [TypeError("a hook has no bytes"), RuntimeError("out of memory")])
def test_a_newcomer_asks_another_member_where_one_cannot_export_its_state(
    bad: tuple[int, ...], error: Exception
) -> None:
    final: dict[int, bytes] = {}

    def work(node: FakeNode) -> None:
        share = gw.Exchange(gw.Encoder(NUMEL, THRESHOLD), node, min_peers=1, timeout_s=5.0)
        params = np.zeros(NUMEL, np.float32)
        state = State(error if node.peer.id in bad else None)
        share.join(params, state)
        while share.next_step < 40:
            world.compute(node, 0.5)
            share.step(np.ones(NUMEL, np.float32), params, state)
        final[node.peer.id] = params.tobytes()
        world.close(node)

    def come_late(node: FakeNode) -> None:
        if len(bad) < 2:
            work(node)
            return
        with pytest.raises(TimeoutError, match=rf"no snapshot: {type(error).__name__}: {error}$"):
            work(node)
        world.close(node)

    with cluster(1) as world:
        for node in (world.node(10), world.node(20)):
            world.start(node, lambda node=node: work(node))
        world.run(until=lambda: world.now_s > 3.0)
        late = world.node(100)
        world.start(late, lambda: come_late(late))
        world.run()
    assert final.keys() == ({10, 20} if len(bad) == 2 else {10, 20, 100})
    assert len(set(final.values())) == 1


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_another_member_goes_on_with_the_snapshot_of_a_donor_that_dies(
    seed: int, deaths: int, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        parts = Parts(monkeypatch, newcomer.node)
        total = 0
        for _ in range(deaths):
            least = arrived(newcomer) + world.random.randint(8, 28)
            world.run(until=lambda n=least: arrived(newcomer) >= n)
            kill_donor(world, newcomer, trainers)
            recipient = newcomer.share._join._recipient
            assert recipient.resumable is not None
            total = recipient.resumable.nbytes
        world.run()
    assert_identical([*trainers, newcomer])
    # What was under way to the newcomer when the donors died has to travel again, and nothing else.
    assert parts.headers == 1 + deaths
    assert parts.nbytes <= total + deaths * 4 * PART_BYTES


@pytest.mark.usefixtures("many_donors")
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_every_member_sends_its_part_of_a_snapshot(
    seed: int, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        parts = Parts(monkeypatch, newcomer.node)
        world.run()
    assert_identical([*trainers, newcomer])
    snapshot = newcomer.share._join._recipient
    assert snapshot.requests == 1
    assert sorted(parts.by_sender) == [10, 20, 30, 50]
    sizes = sorted(parts.by_sender.values())
    assert sizes[0] > 0
    assert sizes[-1] - sizes[0] <= 3 * PART_BYTES
    assert sum(sizes) == snapshot.received_bytes - parts.header_bytes


@pytest.mark.usefixtures("many_donors")
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_another_member_sends_what_one_of_several_donors_has_not(
    seed: int, deaths: int, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        parts = Parts(monkeypatch, newcomer.node)
        recipient = newcomer.share._join._recipient
        for _ in range(deaths):
            least = arrived(newcomer) + world.random.randint(4, 12)
            world.run(until=lambda n=least: arrived(newcomer) >= n and recipient.donors)
            kill_donor(world, newcomer, trainers)
            assert recipient.resumable is not None
            total = recipient.resumable.nbytes
        world.run()
    assert_identical([*trainers, newcomer])
    assert parts.nbytes <= total + (deaths + 1) * 4 * PART_BYTES


@pytest.mark.usefixtures("many_donors")
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_members_that_are_beyond_the_step_of_a_request_send_nothing_in_vain(
    seed: int, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_module, "_STEPS_AHEAD_MAX", -1)
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        parts = Parts(monkeypatch, newcomer.node)
        world.run()
    assert_identical([*trainers, newcomer])
    assert parts.headers == 5
    assert parts.nbytes == max(parts.by_sender.values())  # of the one that is asked alone


@pytest.mark.parametrize("seed", seeds(3))
def test_an_asynchronous_newcomer_goes_on_with_the_snapshot_of_a_donor_that_dies(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import test_async_membership

    trainers: list[test_async_membership.Trainer] = []
    with cluster(seed) as world:
        for node_id in (10, 20, 30):
            test_async_membership.Trainer(world, trainers, node_id, min_peers=2)
        world.run(until=lambda: len(trainers[0].node.updates) > 3)
        test_async_membership.Trainer(world, trainers, 40, min_peers=2)
        newcomer: Any = trainers[3]
        parts = Parts(monkeypatch, newcomer.node)
        least = world.random.randint(8, 60)
        world.run(until=lambda: arrived(newcomer) >= least)
        kill_donor(world, newcomer, trainers[:3])  # type: ignore[arg-type]
        world.run()
    alive = [one for one in trainers if not one.node.is_dead]
    assert len({one.params.tobytes() for one in alive}) == 1
    assert parts.headers == 2
    assert parts.nbytes <= 4 * NUMEL + 4 * PART_BYTES


@pytest.mark.parametrize("seed", seeds(3))
def test_updates_between_two_asynchronous_donors_weigh_as_at_the_members(seed: int) -> None:
    """These have added them before the first donor died."""
    steps = 20
    have_stepped: set[int] = set()
    params: dict[int, Any] = {}
    shares_of: dict[int, gw.Exchange] = {}

    def work(node: FakeNode) -> None:
        share = shares_of[node.peer.id] = gw.Exchange(
            gw.Encoder(NUMEL, THRESHOLD), node, mode="async", min_peers=1, timeout_s=60.0
        )
        rank = node.peer.id
        params[rank] = np.zeros(NUMEL, np.float32)
        if rank == 40:
            assert share.join(params[rank]).is_late
            return
        for count in range(steps):
            share.step(np.full(NUMEL, THRESHOLD * (1 + count % 2), np.float32), params[rank])
            world.compute(node, 0.2)
        while len(params) < 3 or not shares_of[40].next_step:
            share.catch_up(params[rank])
            have_stepped.add(rank)
            world.compute(node, 0.2)

    with cluster(seed) as world:
        donors = {node_id: world.node(node_id) for node_id in (10, 20)}
        for node in donors.values():
            world.start(node, lambda node=node: work(node))
        world.run(until=lambda: len(donors[10].updates) > 3)
        late = world.node(40)
        world.start(late, lambda: work(late))
        world.run(until=lambda: 40 in shares_of)
        recipient = shares_of[40]._join._recipient
        world.run(until=lambda: recipient.arrived_bytes >= 8)
        [donor] = [donors[run.id] for run in recipient.donors]
        world.slow_links.add((donor.peer, late.peer))
        world.run(until=lambda: len(have_stepped) == 2)
        world.slow_links.clear()
        world.kill(donor)
        world.run()
    [alive] = donors.keys() - {donor.peer.id}
    np.testing.assert_allclose(params[40], params[alive], rtol=1e-6)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_a_member_that_dies_or_comes_while_a_snapshot_travels_ends_with_identical_replicas(
    seed: int, how: Any
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        world.run(until=lambda: arrived(newcomer) >= 8)
        second = Trainer(world, world.random.choice([5, 60]), 60, min_peers=3, **how)
        if world.random.random() < 0.5:
            least = world.random.randint(8, 80)
            world.run(until=lambda: arrived(newcomer) >= least or newcomer.joined is not None)
        dead = world.random.sample(trainers, 2)
        world.kill(dead[0].node)
        turn = world.turns + world.random.randint(1, 60)
        world.plan(turn, lambda: world.kill(dead[1].node))
        world.run()
    assert_identical([*trainers, newcomer, second])


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_a_member_whose_updates_have_not_come_dies_before_or_after_another_donor_answers(
    seed: int, when: str, how: Any
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        recipient = newcomer.share._join._recipient
        world.run(until=lambda: arrived(newcomer) >= 12)
        donor_id = min(recipient.donors).id
        late = next(one for one in trainers if one.node.peer.id != donor_id)
        link = (late.node.peer, newcomer.node.peer)
        world.slow_links |= {(one.node.peer, newcomer.node.peer) for one in trainers}
        first = late.share.next_step
        world.run(until=lambda: late.share.next_step > first + 1)
        kill_donor(world, newcomer, trainers)
        world.slow_links = {link}
        if when == "before":
            world.kill(late.node)
        world.run(until=lambda: recipient.earlier is not None and recipient.incoming is not None)
        if when == "after":
            world.kill(late.node)
        world.slow_links.clear()
        world.run()
    assert_identical([*trainers, newcomer])


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_a_member_that_only_a_newcomer_sees_while_its_donor_dies_comes_back(
    seed: int, how: Any
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        world.run(until=lambda: arrived(newcomer) >= 12)
        donor_id = min(newcomer.share._join._recipient.donors).id
        late, *others = [one for one in trainers if one.node.peer.id != donor_id]
        world.slow_links |= {(one.node.peer, newcomer.node.peer) for one in trainers}
        first = late.share.next_step
        world.run(until=lambda: late.share.next_step > first + 1)
        kill_donor(world, newcomer, trainers)
        world.slow_links = {(late.node.peer, newcomer.node.peer)}
        for other in others:
            world.cut(late.node, other.node)
        turn = world.turns + 60
        world.run(until=lambda: world.turns > turn)
        world.slow_links.clear()
        for other in others:
            world.connect(late.node, other.node)
        world.run()
    assert_identical([*trainers, newcomer])


def is_ready(newcomer: Trainer) -> bool:
    """Return whether a newcomer has its snapshot, and waits for the members to name it."""
    return newcomer.share._membership.phase is Phase.READY


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_a_newcomer_that_has_everything_keeps_it_when_a_member_dies(
    seed: int, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(seed) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        parts = Parts(monkeypatch, newcomer.node)
        world.run(until=lambda: is_ready(newcomer))
        nbytes = parts.nbytes
        world.kill(world.random.choice(trainers).node)
        world.run()
    assert_identical([*trainers, newcomer])
    assert parts.nbytes == nbytes
    assert parts.headers <= 2


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_a_newcomer_that_has_everything_goes_on_alone_if_all_members_die(
    how: Any, seed: int
) -> None:
    with cluster(seed) as world:
        member = Trainer(world, 10, 40, min_peers=0, **how)
        world.run(until=lambda: len(member.results) > 3)
        newcomer = Trainer(world, 20, 40, min_peers=1, **how)
        world.run(until=lambda: is_ready(newcomer))
        world.kill(member.node)
        world.run()
    assert newcomer.share.next_step == 40
    assert newcomer.joined is not None
    assert newcomer.joined.step > 3


@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_a_newcomer_that_the_members_have_dropped_does_not_go_on_alone(how: Any) -> None:
    with cluster(1) as world:
        member = Trainer(world, 10, 40, min_peers=0, **how)
        world.run(until=lambda: len(member.results) > 3)
        newcomer = Trainer(world, 20, 40, min_peers=1, **how)
        world.run(until=lambda: is_ready(newcomer))
        drop(world, newcomer.node, [member.node])
        world.run(until=lambda: member.worker.is_done)
        with pytest.raises(TimeoutError, match="from 0 members"):
            world.run()


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("how", [WAYS["mean"], WAYS["sharded"]], ids=["mesh", "sharded"])
def test_an_observer_keeps_what_it_has_when_a_member_dies(
    how: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, node_id, 60, min_peers=2, **how) for node_id in (10, 20, 30)]
        node = world.node(40)
        parts = Parts(monkeypatch, node)
        seen: dict[int, bytes] = {}

        def follow() -> None:
            encoder = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD))
            options = {"timeout_s": 20.0, "role": "observer", "min_peers": 1, **how}
            share, params = gw.Exchange(encoder, node, **options), np.zeros(NUMEL, np.float32)
            while share.next_step < 50:
                share.follow(params, timeout_s=0.1)
                seen[share.next_step] = params.tobytes()
            node.cluster.close(node)

        world.start(node, follow)
        world.run(until=lambda: len(seen) > 4)
        nbytes = parts.nbytes
        world.kill(trainers[world.random.randrange(3)].node)
        world.run()
    assert parts.nbytes == nbytes > 0
    assert parts.headers == 2
    assert max(seen) >= 50


def test_what_a_dead_member_has_not_acknowledged_holds_up_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates to the members go first, which takes a living member a moment, and a dead one until it is lost."""

    def seconds(silence_s: float) -> float:
        def stats(node: FakeNode) -> Stats:
            state = {"srtt_s": 0.01, "least_rtt_s": 0.01, "backlog_records": 0, "loss_rate": 0.0}
            paths = [
                PeerStats(
                    peer=peer,
                    rate_bytes_per_s=100.0,
                    in_flight_bytes=1_000 if peer.id == 20 else 0,
                    silence_s=silence_s if peer.id == 20 else 0.0,
                    **state,
                )
                for peer in node.peers
            ]
            return Stats(peers=tuple(paths))

        monkeypatch.setattr(FakeNode, "stats", stats)
        with cluster(1) as world:
            members = [Trainer(world, node_id, 200, min_peers=2) for node_id in (10, 20, 30)]
            world.run(until=lambda: len(members[0].results) > 3)
            newcomer = Trainer(world, 40, 200, min_peers=2)
            begun_s = world.now_s
            world.run(until=lambda: is_ready(newcomer))
            return world.now_s - begun_s

    assert seconds(silence_s=2.0) < 0.5 * seconds(silence_s=0.1)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_values_that_have_not_arrived_are_not_what_the_memory_had_before(
    how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(shape: Any, dtype: Any = float) -> Any:
        return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 255, dtype)

    monkeypatch.setattr(np, "empty", used)
    with cluster(0) as world:
        trainers, newcomer = begin_with_newcomer(world, how)
        world.run(until=lambda: arrived(newcomer) >= 8)
        kill_donor(world, newcomer, trainers)
        snapshot = newcomer.share._join._recipient.resumable
        assert snapshot is not None
        assert all(np.isfinite(array).all() for array in snapshot.arrays)
        world.run()
    assert_identical([*trainers, newcomer])


def test_a_snapshot_of_another_training_or_layout_begins_at_the_first_byte() -> None:
    arrays = [np.zeros(6, np.float32)]
    run = gw.exchange.protocol.NodeRun(1, 1)
    made = snapshot_module.Snapshot(5, {run: 5}, {}, arrays, 1, run, "ab")
    header = made.header([(0, 24)])
    earlier, ranges = snapshot_module.Snapshot.from_header(memoryview(header), lambda *_: None)
    assert ranges == [(0, 24)]
    header = made.header([(8, 24)], goes_on=True)
    goes_on, ranges = snapshot_module.Snapshot.from_header(
        memoryview(header), lambda *_: None, earlier
    )
    assert goes_on.arrays is earlier.arrays
    assert ranges == [(8, 24)]
    made.training = "cd"
    header = made.header([(8, 24)], goes_on=True)
    with pytest.raises(gw.MessageError, match="no beginning"):
        snapshot_module.Snapshot.from_header(memoryview(header), lambda *_: None, earlier)


# --- real processes ---------------------------------------------------------------------------------------------------

LARGE_NUMEL = 25_000_000
MEMBER = """
import sys, time
import numpy as np
import gradwire as gw

node_id, numel, *ports = map(int, sys.argv[1:])
seeds = [f"127.0.0.1:{port}" for port in ports]
rng = np.random.default_rng(node_id)
with gw.Node(seeds[node_id - 1], seeds, secret=bytes(range(32)), node_id=node_id) as node:
    share = gw.Exchange(gw.Encoder(numel, gw.TargetDensity(0.01)), node, min_peers=2, apply_residual=True)
    params = np.ones(numel, np.float32)
    share.join(params)
    for step in range(1_000):
        params[rng.integers(0, numel, 50_000)] += 1e-3
        share.step_moved(params)
        print(step, flush=True)
        time.sleep(0.2)
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.mark.slow
def test_a_donor_that_is_killed_in_the_middle_costs_a_tenth_of_the_snapshot_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # parts of the usual size
    ports = free_ports(3)
    with ExitStack() as stack:
        members = []
        for node_id in (1, 2, 3):
            arguments = map(str, (node_id, LARGE_NUMEL, *ports))
            command = [sys.executable, "-c", MEMBER, *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            members.append(process)
        for process in members:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("0")
        peers = [f"127.0.0.1:{port}" for port in ports]
        node = stack.enter_context(gw.Node("127.0.0.1:0", peers, secret=bytes(range(32))))
        encoder = gw.Encoder(LARGE_NUMEL, gw.TargetDensity(0.01))
        options: dict[str, Any] = {"min_peers": 1, "apply_residual": True, "digest_s": 0.1}
        share = gw.Exchange(encoder, node, **options)
        recipient = share._join._recipient
        has_killed = threading.Event()

        def kill() -> None:
            while recipient.received_bytes < 2 * LARGE_NUMEL:
                time.sleep(0.001)
            donor = min(recipient.donors)
            members[donor.id - 1].kill()
            has_killed.set()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        params = np.zeros(LARGE_NUMEL, np.float32)
        assert share.join(params).is_late
        killer.join()
        assert has_killed.is_set()
        assert recipient.requests == 2
        assert recipient.received_bytes <= 1.1 * 4 * LARGE_NUMEL
        while share.stats.digests < 2:  # the replicas of all nodes are the same bits
            share.step_moved(params)
