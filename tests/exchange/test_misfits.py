"""Who does not fit is refused when it greets, with words that name both sides; training elsewhere goes on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import Group, Groups, StepResult, join
from gradwire.exchange.metrics import ResidualMonitor
from gradwire.exchange.protocol import (
    TAG_NUMBERS,
    Hello,
    Introductions,
    Kind,
    Phase,
    run_of,
    tag_of,
)
from gradwire.exchange.step import Step
from gradwire.transport import Peer

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster, run_cluster
from .test_local import SHAPES, run_team, tensors
from .test_membership import NUMEL, THRESHOLD, Trainer, assert_identical, update

FEW_S = 5.0

Work = Callable[[FakeNode, Any], Any]


def share_on(node: FakeNode, **options: Any) -> gw.Exchange:
    return gw.Exchange(gw.Encoder(NUMEL, THRESHOLD), node, digest_s=0.0, **options)


def refused(node: FakeNode, work: Callable[[], Any]) -> str:
    """Return what a worker is told when it is refused, which happens soon."""
    begin_s = node.cluster.now_s
    with pytest.raises(gw.Mismatch) as caught:
        work()
    assert node.cluster.now_s - begin_s < FEW_S
    node.cluster.close(node)
    return str(caught.value)


def joins(node: FakeNode, params: Any) -> str:
    return refused(node, lambda: share_on(node, min_peers=1).join(params))


def steps(node: FakeNode, params: Any) -> str:
    work = share_on(node, min_peers=1)
    return refused(node, lambda: work.step(update(node.peer.id, 0), params))


def waits_and_steps(node: FakeNode, params: Any) -> str:
    share = share_on(node, min_peers=1)
    share.wait_for_peers()
    return refused(node, lambda: share.step(update(node.peer.id, 0), params))


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("work", [joins, steps, waits_and_steps])
@pytest.mark.parametrize(
    "other",
    [
        np.zeros(NUMEL),
        np.zeros((4, 6), np.float32),
        [np.zeros(12, np.float32), np.zeros(12, np.float32)],
    ],
    ids=["dtype", "shape", "number"],
)
def test_initial_members_whose_parameters_are_not_alike_do_not_begin(
    seed: int, work: Work, other: Any
) -> None:
    with cluster(seed) as world:
        nodes = [world.node(1), world.node(2)]
        params = [np.zeros(NUMEL, np.float32), other]
        workers = [
            world.start(node, lambda n=node, p=one: work(n, p))
            for node, one in zip(nodes, params, strict=True)
        ]
        world.run()
    for text in [worker.result for worker in workers]:
        assert "127.0.0.1:1001" in text
        assert "127.0.0.1:1002" in text
        assert "params" in text
    assert all(not one.any() for one in [params[0], *other])


@pytest.mark.parametrize("seed", sorted({*seeds(2), 35}))
def test_two_go_on_without_a_founder_that_told_too_late_what_its_parameters_are(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train(node: FakeNode, dtype: Any) -> Any:
        share, params = share_on(node, min_peers=2), np.zeros(NUMEL, dtype)
        share.wait_for_peers()
        if dtype is np.float64:
            return refused(node, lambda: [share.step(update(3, n), params) for n in range(20)])
        lost, joined = set(), set()
        while share.next_step < 20:
            result = share.step(update(node.peer.id, share.next_step), params)
            lost.update(gone.id for gone in result.lost)
            joined.update(come.id for come in result.joined)
            node.cluster.compute(node, 0.1)
        node.cluster.close(node)
        return lost, joined, params.tobytes()

    with cluster(seed) as world:
        kinds = {1: np.float32, 2: np.float32, 3: np.float64}
        workers = []
        for node_id, dtype in kinds.items():
            node = world.node(node_id)
            workers.append(world.start(node, lambda n=node, d=dtype: train(n, d)))
        world.run()
    one, two, odd = [worker.result for worker in workers]
    assert one[-1] == two[-1]
    # One of the two may be about to begin when the other parts with the founder: then it comes in late.
    late = one[1] | two[1]
    for (lost, _, _), node_id in ((one, 1), (two, 2)):
        assert lost - late == (set() if node_id in late else {3})
    assert late < {1, 2}
    for address in ("127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"):
        assert address in odd
    assert "127.0.0.1:1003 and this node (127.0.0.1:1001) do not fit: params" in caplog.text


def test_the_only_wrong_one_of_many_nodes_names_a_few_of_the_others() -> None:
    def train(node: FakeNode, rank: int) -> str:
        params = np.zeros(NUMEL, np.float64 if rank == 8 else np.float32)
        if rank == 8:
            return refused(node, lambda: share_on(node, min_peers=8).join(params))
        share_on(node, min_peers=7).join(params)
        node.cluster.compute(node, 1.0)
        node.cluster.close(node)
        return ""

    told = run_cluster(train, count=9, seed=0)[8]
    assert told.count("float64") == 5
    assert told.endswith("; 3 more do not fit either")


def test_who_has_corrected_its_parameters_takes_part() -> None:
    def train(node: FakeNode, wrong: Any) -> bytes:
        share = share_on(node, min_peers=1, timeout_s=5.0)
        if wrong is not None:
            with pytest.raises(gw.Mismatch):
                share.join(wrong)
        params = np.zeros(NUMEL, np.float32)
        while True:
            try:
                share.join(params)
                break
            except gw.Mismatch:
                node.cluster.compute(node, 0.1)
        for count in range(5):
            share.step(update(node.peer.id, count), params)
        node.cluster.close(node)
        return params.tobytes()

    with cluster(3) as world:
        nodes = [world.node(1), world.node(2)]
        wrongs = [None, np.zeros(NUMEL)]
        workers = [
            world.start(node, lambda n=node, w=wrong: train(n, w))
            for node, wrong in zip(nodes, wrongs, strict=True)
        ]
        world.run()
    assert workers[0].result == workers[1].result


# --- other versions and models ----------------------------------------------------------------------------------------


OTHER_VERSION = json.dumps({"signature": {"versions": [99, 1]}, "stage": 7}).encode()


def own_greeting(node: FakeNode, model: dict[str, Any]) -> bytes:
    place = run_of(node.peer)
    return Hello(model, Phase.IN, 0, (place,), 0, 0, place).encode()


def intrude(world: Cluster, node: FakeNode, *messages: tuple[Kind, int, bytes]) -> None:
    """Say something to everybody, several times, and stay."""
    for _ in range(5):
        for kind, number, payload in messages:
            node.publish(payload, tag_of(kind, number))
        world.compute(node, 0.2)


@pytest.mark.parametrize("greeting", [OTHER_VERSION, b"\xff\xfe"], ids=["other", "unreadable"])
def test_another_version_is_told_and_left_alone(
    greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(4) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=1) for node_id in (10, 20)]
        world.run(until=lambda: len(trainers[0].results) > 3)
        node = world.node(30)
        told = [(Kind.HELLO, 0, greeting), (Kind.UPDATE, 0, b"of another version")]
        world.start(node, lambda: intrude(world, node, *told))
        world.run()
    assert_identical(trainers)
    for address in ("127.0.0.1:1010", "127.0.0.1:1020"):
        lines = [line for line in caplog.messages if f"this node ({address})" in line]
        assert len(lines) == 1, "once, not with every message"
        assert "127.0.0.1:1030" in lines[0]
        assert "versions" in lines[0]
    if greeting is OTHER_VERSION:
        assert "versions [99, 1] there" in caplog.text


def test_who_trains_alone_goes_on_where_a_misfit_comes_with_a_checkpoint_of_the_training() -> None:
    with cluster(4) as world:
        trainer = Trainer(world, 10, 20, min_peers=0)
        world.run(until=lambda: len(trainer.results) > 3)
        node = world.node(20)
        training = trainer.share._membership.introductions.training
        greeting = replace(
            Hello.decode(own_greeting(node, {"versions": [1, 1]})), training=training
        )
        world.start(node, lambda: intrude(world, node, (Kind.HELLO, 0, greeting.encode())))
        world.run()
    assert trainer.share.next_step == 20


def test_a_node_among_others_of_another_version_is_refused() -> None:
    with cluster(5) as world:
        old, new = world.node(1), world.node(2)
        world.start(old, lambda: intrude(world, old, (Kind.HELLO, 0, OTHER_VERSION)))
        worker = world.start(new, lambda: joins(new, np.zeros(NUMEL, np.float32)))
        world.run()
    assert "127.0.0.1:1001 and this node (127.0.0.1:1002)" in worker.result
    assert "versions [99, 1] there" in worker.result


@pytest.mark.parametrize(
    "kind", [Kind.UPDATE, Kind.NOTE, Kind.REPORT, Kind.RELAY, Kind.REQUEST, Kind.SNAPSHOT]
)
@pytest.mark.parametrize("greets", ["not at all", "as another model"])
@pytest.mark.parametrize("payload", [b"{", b"[[30,3,5]]"], ids=["unreadable", "readable"])
def test_messages_of_another_model_change_nothing(kind: Kind, greets: str, payload: bytes) -> None:
    with cluster(6) as world:
        trainers = [Trainer(world, node_id, 20, min_peers=1) for node_id in (10, 20)]
        world.run(until=lambda: len(trainers[0].results) > 3)
        node = world.node(30)
        other = gw.Encoder(NUMEL + 1, THRESHOLD).encode(np.ones(NUMEL + 1, np.float32))
        said = [(kind, 5, bytes(other) if kind is Kind.UPDATE else payload)]
        if greets == "as another model":
            said.insert(0, (Kind.HELLO, 0, own_greeting(node, {"versions": [1, 1]})))
        world.start(node, lambda: intrude(world, node, *said))
        world.run()
    assert_identical(trainers)
    assert not any(result.lost or result.joined for result in trainers[0].results)
    if kind is Kind.UPDATE:
        assert sum(result.ignored for result in trainers[0].results) > 0


def test_a_model_of_many_tensors_is_told_by_its_first_difference() -> None:
    def work(node: FakeNode, sizes: list[int]) -> str:
        params = [np.zeros(size, np.float32) for size in sizes]
        return joins(node, params)

    with cluster(7) as world:
        nodes = [world.node(1), world.node(2)]
        sizes = [[1] * 24, [1] * 20 + [2, 1, 1]]
        workers = [
            world.start(node, lambda n=node, s=one: work(n, s))
            for node, one in zip(nodes, sizes, strict=True)
        ]
        world.run()
    assert [worker.result.split(": ")[1] for worker in workers] == [
        "23 params there, 24 here",
        "24 params there, 23 here",
    ]


def test_a_member_that_sends_messages_of_another_model_is_named_with_this_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lie(node: FakeNode) -> None:
        share = share_on(node, min_peers=1)
        share.join(np.zeros(NUMEL, np.float32))
        other = gw.Encoder(NUMEL + 1, THRESHOLD).encode(np.ones(NUMEL + 1, np.float32))
        node.publish(bytes(other), tag=0)
        node.cluster.compute(node, 1.0)

    def work(node: FakeNode) -> gw.StepResult:
        params = np.zeros(NUMEL, np.float32)
        result = share_on(node, min_peers=1).step(update(1, 0), params)
        node.cluster.close(node)
        return result

    with cluster(8) as world:
        one, two = world.node(1), world.node(2)
        worker = world.start(one, lambda: work(one))
        world.start(two, lambda: lie(two))
        world.run()
    assert "from 127.0.0.1:1002 to this node (127.0.0.1:1001)" in caplog.text
    assert f"{NUMEL + 1} elements" in caplog.text
    assert (worker.result.applied, worker.result.lost) == (1, (two.peer,))


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("every", [1, 4])
def test_initial_members_that_begin_at_different_steps_all_hear_of_it_at_once(
    seed: int, late: int, every: int
) -> None:
    def begin(node: FakeNode) -> str:
        share = share_on(node, min_peers=1, every=every)
        if node.peer.id == late:
            share.load_state_dict({**share.state_dict(), "step": 5})
        return refused(
            node, lambda: share.step(update(node.peer.id, 0), np.zeros(NUMEL, np.float32))
        )

    with cluster(seed) as world:
        workers = [
            world.start(node, lambda n=node: begin(n)) for node in (world.node(1), world.node(2))
        ]
        world.run()
    for worker in workers:
        assert f"at step {5 * every}" in worker.result
        assert "at step 0" in worker.result
        assert "same checkpoint" in worker.result


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nodes_that_begin_with_other_parameters_are_refused_before_the_first_step(
    mode: str,
) -> None:
    with cluster(1) as world:
        nodes = [world.node(1), world.node(2)]
        workers = [
            world.start(
                node,
                lambda n=node: refused(
                    n,
                    lambda: share_on(n, min_peers=1, mode=mode).join(
                        np.full(NUMEL, n.peer.id, np.float32)
                    ),
                ),
            )
            for node in nodes
        ]
        world.run()
    assert all("begin with other parameters" in worker.result for worker in workers)


def saved_with_equal_residuals(nodes: list[FakeNode]) -> list[dict[str, Any]]:
    """Return what nodes save that have trained with the same data."""
    states = []
    for node in nodes:
        share = share_on(node, min_peers=1)
        share._groups.encoders[0].residual[:] = 0.125
        states.append(share.state_dict())
    return states


def begin_with(node: FakeNode, state: dict[str, Any]) -> Any:
    share = share_on(node, min_peers=1)
    share.load_state_dict(state)
    return share.join(np.zeros(NUMEL, np.float32))


def test_the_checkpoint_of_one_node_is_refused_on_two() -> None:
    with cluster(1) as world:
        nodes = [world.node(1), world.node(2)]
        state = saved_with_equal_residuals(nodes)[0]
        workers = [
            world.start(node, lambda n=node: refused(n, lambda: begin_with(n, state)))
            for node in nodes
        ]
        world.run()
    assert all("checkpoint of the same node" in worker.result for worker in workers)


def test_nodes_whose_residuals_are_equal_begin_with_their_own_checkpoints() -> None:
    with cluster(1) as world:
        nodes = [world.node(1), world.node(2)]
        workers = [
            world.start(node, lambda n=node, s=state: begin_with(n, s))
            for node, state in zip(nodes, saved_with_equal_residuals(nodes), strict=True)
        ]
        world.run()
    assert [worker.result.is_late for worker in workers] == [False, False]


@pytest.mark.parametrize("seed", seeds(2))
def test_equalize_gives_all_nodes_the_parameters_of_the_one_with_the_lowest_id(seed: int) -> None:
    def train(node: FakeNode) -> Any:
        share, state = share_on(node, min_peers=2), np.full(3, node.peer.id, np.float32)
        params = np.full(NUMEL, node.peer.id if node.peer.id != 3 else 1, np.float32)
        joined = share.join(params, [state], equalize=True)
        # Node 3 has the same parameters, and takes over another state alone.
        assert joined.is_replaced == (node.peer.id == 2)
        begun = params.copy()
        for count in range(3):
            share.step(update(node.peer.id, count), params)
        node.cluster.close(node)
        return begun, params, state, share.next_step

    with cluster(seed) as world:
        nodes = [world.node(node_id) for node_id in (1, 2, 3)]
        workers = [world.start(node, lambda n=node: train(n)) for node in nodes]
        world.run()
    for worker in workers:
        begun, params, state, next_step = worker.result
        assert (begun == 1.0).all()
        assert params.tobytes() == workers[0].result[1].tobytes()
        assert next_step == 3
        # Also of node 3, which begins with the same parameters and another state.
        assert state.tolist() == [1.0] * 3


@pytest.mark.parametrize("seed", seeds(2))
def test_whoever_has_the_first_parameters_passes_them_on(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[int] = Counter()
    params_of: dict[int, Any] = {}
    receivers: dict[int, int] = {}  # the last one to whom each gives them
    publish = FakeNode.publish

    def counted(node: FakeNode, buffer: Any, tag: int = 0, to: Any = None) -> Any:
        is_header = tag // TAG_NUMBERS == Kind.SNAPSHOT and bytes(buffer)[:1] == b"{"
        sent[node.peer.id] += is_header
        if is_header:
            if (before := receivers.get(node.peer.id)) is not None:
                assert (params_of[before] == 1.0).all(), "a node gives them to one at a time"
            receivers[node.peer.id] = to.id
        return publish(node, buffer, tag, to)

    def begin(node: FakeNode) -> Any:
        share = share_on(node, min_peers=7)
        params = np.full(NUMEL, node.peer.id, np.float32)
        params_of[node.peer.id] = params
        share.join(params, equalize=True)
        share.step(update(node.peer.id, 0), params)
        node.cluster.close(node)
        return params

    monkeypatch.setattr(FakeNode, "publish", counted)
    with cluster(seed) as world:
        nodes = [world.node(node_id) for node_id in range(1, 9)]
        workers = [world.start(node, lambda n=node: begin(n)) for node in nodes]
        world.run()
    assert len({worker.result.tobytes() for worker in workers}) == 1
    # One in each of three turns, in which those that have them double, whichever link is the faster.
    assert sent == {1: 3, 2: 2, 3: 1, 4: 1, 5: 0, 6: 0, 7: 0, 8: 0}


@pytest.mark.parametrize(
    ("goes", "reason"),
    [
        ("ends", "finished"),
        ("closes", "crashed, or closed its node before leave()"),
        ("dies", "is silent"),
    ],
)
def test_a_step_below_min_members_names_who_went_and_why(goes: str, reason: str) -> None:
    def train(node: FakeNode, steps: int) -> str:
        share, params = (
            share_on(node, min_peers=1, min_members=2),
            np.zeros(NUMEL, np.float32),
        )
        share.join(params)
        try:
            for count in range(steps):
                share.step(update(node.peer.id, count), params)
        except gw.PeerLost as error:
            return str(error)
        if goes == "ends":
            share.end()
        if goes == "dies":
            node.cluster.kill(node)
        else:
            node.cluster.close(node)
        return ""

    with cluster(1) as world:
        nodes = [world.node(1), world.node(2)]
        workers = [
            world.start(node, lambda n=node, s=steps: train(n, s))
            for node, steps in zip(nodes, (9, 3), strict=True)
        ]
        world.run()
    assert workers[0].result == f"1 of at least 2 members are left: 127.0.0.1:1002 {reason}"


def test_of_many_that_went_the_last_are_named_first() -> None:
    peers = [Peer(number, 1, f"host-{number}") for number in range(9)]
    introductions = Introductions(peers[0], {}, {}, "member", 1 << 20)
    runs = list(map(introductions.register, peers))
    assert introductions.describe_departed() == ""
    for run in runs[1:4]:
        introductions.forget(run, "timeout")
    assert introductions.describe_departed() == (
        "host-3 is silent, host-2 is silent, host-1 is silent"
    )
    for run in runs[4:8]:
        introductions.forget(run, "restarted")
    assert introductions.describe_departed() == (
        "host-7 is gone: restarted, host-6 is gone: restarted, host-5 is gone: restarted, host-4 is gone: restarted, "
        "host-3 is silent, and 2 more"
    )
    assert introductions.describe_departed(runs[1:8]).count("host") == 7


@pytest.mark.parametrize("joins", [True, False], ids=["join", "step"])
def test_a_run_that_begins_below_min_members_is_told_so(joins: bool) -> None:
    with cluster(1) as world:
        share, params = (
            share_on(world.node(1), min_peers=0, min_members=3),
            np.zeros(NUMEL, np.float32),
        )
        if joins:
            share.join(params)
        with pytest.raises(
            gw.PeerLost, match=r"^1 of at least 3 .* left: the run began with no more$"
        ):
            share.step(update(1, 0), params)


def test_a_step_without_a_member_that_joins_again_says_that_it_cannot() -> None:
    def work(node: FakeNode, rank: int) -> None:
        share, params = (
            share_on(node, min_peers=1, min_members=2, timeout_s=5.0),
            np.zeros(NUMEL, np.float32),
        )
        share.step(update(rank, 0), params)
        if rank == 0:
            with pytest.raises(TimeoutError, match="did not come in"):
                share.resync(params)
            return

        def train() -> None:
            while True:
                share.step(update(rank, 1), params)

        with pytest.raises(gw.PeerLost, match=r"left: 127.0.0.1:1010 cannot join again without a"):
            train()

    run_cluster(work, count=2, seed=1)


@pytest.mark.parametrize("has_team", [False, True])
@pytest.mark.parametrize("by_handler", [False, True], ids=["thread", "handler"])
def test_a_call_in_the_middle_of_another_is_refused(
    has_team: bool, by_handler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step, refusals = Step.take_step, []

    def interrupted(*args: Any, **options: Any) -> Any:
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(RuntimeError, match="one exchange serves one thread") as refusal,
        ):
            share.leave(params) if by_handler else pool.submit(share.leave, params).result()
        refusals.append(refusal)
        return take_step(*args, **options)

    monkeypatch.setattr(Step, "take_step", interrupted)
    with cluster(1) as world, gw.LocalTeam(f"misfits-{os.getpid()}", size=1, rank=0) as team:
        alone = share_on(world.node(1), min_peers=0)
        share = team.lead(alone) if has_team else alone
        params = np.zeros(NUMEL, np.float32)
        assert [share.step(update(1, step), params).step for step in range(2)] == [0, 1]
    assert len(refusals) == 2


@pytest.mark.parametrize("dtype", ["float64", "int32", "complex64", "bool"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_worker_s_update_that_would_be_rounded_is_refused_and_its_team_goes_on(
    bad: int, dtype: str
) -> None:
    def work(rank: int, share: Any) -> Any:
        params = tensors()
        if rank == bad:
            with pytest.raises(TypeError, match=f"an update of {dtype} .* would be rounded; pass"):
                share.step([array.astype(dtype) for array in tensors(1)], params)
        share.step([np.full(shape, 2 * THRESHOLD, np.float32) for shape in SHAPES], params)
        return params

    for params in run_team(work, 2)[0]:
        assert all((array > 0.0).all() for array in params)


def test_useless_densities_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    full = ResidualMonitor(lambda _numel: ())
    groups = Groups([Group(gw.Encoder(4))])
    for step in range(120):
        full.add(StepResult(step=step, density=1.0, threshold=1e-8), groups)
    assert len(caplog.messages) == 1
    assert "every element has been sent for 50 steps" in caplog.text


@pytest.mark.parametrize(("density", "filled"), [(0.0, 200), (0.001, 200), (0.01, 100)])
def test_a_residual_that_grows_beyond_the_first_steps_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, density: float, filled: int
) -> None:
    groups = Groups([Group(gw.Encoder(4))])
    for last, warnings in ((filled + 30, 0), (filled + 100, 1)):
        watch = ResidualMonitor(lambda _numel: [groups.encoders[0].residual])
        for step in range(filled + 100):
            groups.encoders[0].residual[:] = 1.02 ** min(step, last)
            watch.add(StepResult(step=step, density=density), groups)
        assert caplog.text.count("the residual has grown for 50 steps") == warnings


def test_a_residual_that_grows_with_the_learning_rate_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = Groups([Group(gw.Encoder(20_000, gw.TargetDensity(0.05)))])
    [encoder] = groups.encoders
    watch = ResidualMonitor(lambda _numel: [encoder.residual])
    random = np.random.default_rng(0)
    for step in range(200):
        message = encoder.encode(random.standard_normal(20_000, np.float32) * np.float32(step + 1))
        density = message.count / 20_000
        watch.add(StepResult(step=step, density=density, threshold=message.threshold), groups)
    assert not caplog.messages


def test_a_node_that_prepares_for_long_before_it_joins_gets_no_updates_meanwhile() -> None:
    """It could not take them, and the members would end for lack of space."""
    updates = []

    def train(node: FakeNode, rank: int) -> Any:
        share = gw.Exchange(gw.Encoder(50, 0.1), node, min_peers=1, timeout_s=20.0)
        params = np.zeros(50, np.float32)
        if rank == 2:
            node.cluster.compute(node, 30.0)
            updates.extend([each for each in node.inbox if each.tag < TAG_NUMBERS])
        else:
            share.join(params)
        while share.next_step < 100:
            share.step(np.full(50, 0.01, np.float32), params)
            node.cluster.compute(node, 1.0)
        return params

    first, *others = run_cluster(train, count=3, seed=5)
    assert all(first.tobytes() == other.tobytes() for other in others)
    assert not updates


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_keeps_some_updates_however_large_they_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_KEPT_BYTES", 0)
    monkeypatch.setattr(join, "_KEPT_FACTOR", 0)

    def train(node: FakeNode, rank: int) -> Any:
        node.cluster.compute(node, 10.0 * (rank == 2))
        share = gw.Exchange(gw.Encoder(50, 0.1), node, min_peers=1, timeout_s=20.0, codec="dense")
        params = np.zeros(50, np.float32)
        share.join(params)
        while share.next_step < 40:
            share.step(np.full(50, 0.01, np.float32), params)
            node.cluster.compute(node, 1.0)
        return params

    first, *others = run_cluster(train, count=3, seed=seed)
    assert all(first.tobytes() == other.tobytes() for other in others)


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_may_begin_alone_first_looks_for_those_that_it_knows(seed: int) -> None:
    """As a first node that is started again, after the others have noticed that it was gone."""
    with cluster(seed) as made:

        def train(node: FakeNode, least: int) -> Any:
            share = gw.Exchange(gw.Encoder(50, 0.1), node, min_peers=0, timeout_s=20.0)
            params = np.zeros(50, np.float32)
            share.join(params)
            first = share.next_step
            while share.next_step < least:
                share.step(np.full(50, 0.01, np.float32), params)
                made.compute(node, 0.1)
            return first, share.next_step, len(share.members)

        first = made.start(made.node(20), lambda: train(made.nodes[0], 60))
        made.run(until=lambda: len(made.nodes[0].updates) > 5)
        again = made.node(10)
        again.seeds = frozenset([made.nodes[0].peer.address])
        second = made.start(again, lambda: train(again, 60))
        made.run()
    assert first.result == (0, 60, 1)
    assert second.result[0] > 0
