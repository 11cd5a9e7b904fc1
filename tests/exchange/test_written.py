"""Parameters that the caller writes between steps: adopted if all nodes wrote the same, else shared as an update."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange.parameters import _fingerprint

from .cluster import FakeNode, cluster, run_cluster

NUMEL = 700
THRESHOLD = 2.0**-6

Write = Any

WAYS: dict[str, dict[str, Any]] = {
    "mesh": {"apply_residual": True},
    "sharded": {"apply_residual": True, "topology": "sharded"},
    "difference": {"apply_residual": True, "keeps_residual": False},
    "overlap": {"apply_residual": True, "overlap": 1},
    "overlap, difference": {"apply_residual": True, "overlap": 1, "keeps_residual": False},
    "sharded, overlap": {"apply_residual": True, "overlap": 1, "topology": "sharded"},
    "local steps": {"every": 3},
    "local steps, residual": {"every": 3, "apply_residual": True},
    "local steps, overlap": {"every": 3, "apply_residual": True, "overlap": 1},
    "outer momentum": {"every": 2, "outer_momentum": 0.5, "apply_residual": True},
    "asynchronous": {"mode": "async", "apply_residual": True},
}
ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
SYNC = {name: options for name, options in WAYS.items() if "mode" not in options}
sync_ways = pytest.mark.parametrize("options", SYNC.values(), ids=SYNC.keys())


def update(rank: int, step: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([rank, step])
    return (rng.integers(-64, 64, NUMEL) / 2.0**12).astype(np.float32)


def train(
    writes: dict[tuple[int, int], Any],
    *,
    steps: int = 12,
    moves: bool = False,
    nodes: int = 2,
    updates: Any = update,
    **options: Any,
) -> list[Any]:
    """Let nodes take steps; before some, a function of (rank, step) writes into the parameters.

    Returns:
        By rank: the shared parameters before every step and at the end, this node's own, and the encoder.
    """
    options = {"topology": "mesh", **options}
    keeps = options.pop("keeps_residual", True)

    def work(node: FakeNode, rank: int) -> Any:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD), keeps_residual=keeps)
        share = gw.Exchange(encoder, node, min_peers=nodes - 1, digest_s=0.1, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        shared = []
        for step in range(steps):
            shared.append(share.shared(params)[0])
            write = writes.get((rank, step))
            if write is not None:
                write(params)
            if moves:
                share.note_written(params)
                params += updates(rank, step)
                share.step_moved(params)
            else:
                share.step(updates(rank, step), params)
            node.cluster.compute(node, 0.1)
        if "mode" in options:
            node.cluster.compute(node, 5.0)
            share.catch_up(params)
        elif options.get("overlap"):
            share.catch_up(params)
        shared.append(share.shared(params)[0])
        share._replica.make_residual(params)
        node.cluster.close(node)
        return shared, params, encoder

    with cluster(7) as world:
        workers = []
        for rank in range(nodes):
            node = world.node(rank + 1)
            workers.append(world.start(node, lambda n=node, r=rank: work(n, r)))
        world.run()
    return [worker.result for worker in workers]


BEST = (np.arange(NUMEL) % 32 - 7.0).astype(np.float32)


def load(params: NDArray[np.float32]) -> None:
    params[...] = BEST


def test_the_log_names_the_step_at_which_parameters_were_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "gradwire.exchange.step"):
        train({(0, 0): load, (1, 0): load, (0, 8): load}, every=4, moves=True)
    texts = [text.partition(" on ")[0] for text in caplog.messages]
    everywhere = "step 0: all nodes go"
    assert texts == [everywhere, everywhere, "step 8: the parameters were changed"]


@sync_ways
@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize("at", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_what_all_nodes_write_is_what_they_go_on_from(
    options: Any, moves: bool, at: int, nodes: int
) -> None:
    writes = {(rank, at): load for rank in range(nodes)}
    outcomes = train(writes, moves=moves, nodes=nodes, **options)
    period = options.get("every", 1) + options.get("overlap", 0)
    for shared, params, _ in outcomes:
        # As soon as the exchange after it is finished; nothing of the time before is left in any residual.
        later = shared[min(at + period + 1, len(shared) - 1)]
        np.testing.assert_allclose(later, BEST, atol=12 * 2.0**-6)
        np.testing.assert_allclose(params, BEST, atol=12 * 2.0**-6)
    assert len({shared[-1].tobytes() for shared, *_ in outcomes}) == 1


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
def test_residuals_of_the_time_before_are_gone(topology: str, moves: bool) -> None:
    def updates(rank: int, step: int) -> NDArray[np.float32]:
        return np.full(NUMEL, 0.75 * THRESHOLD * (step < 5) * (rank + 1), np.float32)

    writes = {(rank, 5): load for rank in (0, 1)}
    outcomes = train(
        writes, moves=moves, topology=topology, apply_residual=True, updates=updates, steps=20
    )
    for shared, params, encoder in outcomes:
        np.testing.assert_array_equal(shared[6], BEST)
        np.testing.assert_array_equal(shared[-1], BEST)
        np.testing.assert_array_equal(params, BEST)
        assert not encoder.residual.any()


def change_one(params: NDArray[np.float32]) -> None:
    params[17] += 0.5


def clamp(params: NDArray[np.float32]) -> None:
    np.clip(params, -(2.0**-5), 2.0**-5, out=params)


@ways
@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_what_one_node_writes_is_its_update(options: Any, moves: bool, at: int) -> None:
    """One element is changed by 0.5, where everything else is zero: the mean moves by a quarter."""

    def nothing(*_: int) -> NDArray[np.float32]:
        return np.zeros(NUMEL, np.float32)

    outcomes = train({(1, at): change_one}, moves=moves, updates=nothing, steps=120, **options)
    expected = np.zeros(NUMEL)
    expected[17] = 0.5 if options.get("outer_momentum") else 0.25
    for shared, params, _ in outcomes:
        np.testing.assert_allclose(shared[-1], expected, atol=1e-6)
        np.testing.assert_allclose(params, expected, atol=1e-6)


@sync_ways
@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
def test_different_changes_lose_nothing(options: Any, moves: bool) -> None:
    """Each node adds something else: the mean of all that was put in is in the parameters and in the residuals."""
    if "outer_momentum" in options:
        pytest.skip("momentum repeats a part of every update")

    def add(amount: float) -> Any:
        def write(params: NDArray[np.float32]) -> None:
            params[::3] += np.float32(amount)

        return write

    writes = {(0, 4): add(0.25), (1, 4): add(-0.5), (1, 7): add(0.125)}
    outcomes = train(writes, moves=moves, **options)
    put_in = sum(update(rank, step) for rank in (0, 1) for step in range(12)).astype(np.float64)
    put_in[::3] += 0.25 - 0.5 + 0.125
    if options.get("topology") != "sharded":
        kept = sum(encoder.residual.astype(np.float64) for *_, encoder in outcomes)
        np.testing.assert_allclose(2 * outcomes[0][0][-1] + kept, put_in, atol=1e-5)
    assert len({shared[-1].tobytes() for shared, *_ in outcomes}) == 1


@pytest.mark.parametrize("options", [WAYS["mesh"], WAYS["sharded"], {"every": 1}], ids=str)
def test_a_clamp_before_every_step_does_not_stop_the_training(options: Any) -> None:
    def updates(rank: int, _: int) -> NDArray[np.float32]:
        return np.full(NUMEL, 0.3 * THRESHOLD * (1 + rank), np.float32)

    writes = {(rank, step): clamp for rank in (0, 1) for step in range(60)}
    outcomes = train(writes, moves=True, updates=updates, steps=60, **options)
    for shared, *_ in outcomes:
        assert shared[-1].min() > 2.0**-5 - 2 * THRESHOLD
        assert shared[-1].max() < 2.0**-5 + 3 * THRESHOLD
    assert len({shared[-1].tobytes() for shared, *_ in outcomes}) == 1


@ways
def test_values_that_are_not_finite_are_refused(options: Any) -> None:
    with cluster(1) as world:
        node = world.node(1)
        options = {"topology": "mesh", **options}
        encoder = gw.Encoder(NUMEL, 1.0, keeps_residual=options.pop("keeps_residual", True))
        share = gw.Exchange(encoder, node, min_peers=0, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        params[3] = np.nan
        with pytest.raises(gw.NonFiniteUpdate, match="1 elements of the parameters"):
            share.step(np.zeros(NUMEL, np.float32), params)
        params[3] = 0.0
        share.step(np.zeros(NUMEL, np.float32), params)


@ways
def test_an_update_that_is_not_finite_counts_as_nothing_that_the_caller_has_written(
    options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with cluster(1) as world:
        options = {"topology": "mesh", **options}
        encoder = gw.Encoder(NUMEL, 1.0, keeps_residual=options.pop("keeps_residual", True))
        share = gw.Exchange(encoder, world.node(1), min_peers=0, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(16):
            one = update(0, step)
            if step % 5 == 4:
                one[3] = np.nan
                with pytest.raises(gw.NonFiniteUpdate):
                    share.step(one, params)
            else:
                share.step(one, params)
    assert "written" not in caplog.text


def test_a_node_that_only_follows_takes_the_written_parameters_too() -> None:
    def follow(node: FakeNode, members: list[Any]) -> list[float]:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD)),
            node,
            min_peers=2,
            role="observer",
            apply_residual=True,
            topology="mesh",
        )
        params = np.zeros(NUMEL, np.float32)
        seen = []
        while not all(worker.is_done for worker in members):
            share.follow(params, timeout_s=0.2)
            seen.append(float(np.abs(params - BEST).max()))
        node.cluster.close(node)
        return seen

    def work(node: FakeNode) -> None:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD)),
            node,
            min_peers=1,
            apply_residual=True,
            topology="mesh",
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(60):
            if step == 20:
                load(params)
            node.cluster.compute(node, 0.2)
            share.step(update(node.peer.id, step), params)
        node.cluster.close(node)

    with cluster(2) as world:
        members: list[Any] = []
        for node_id in (1, 2):
            node = world.node(node_id)
            members.append(world.start(node, lambda n=node: work(n)))
        observer = world.node(9)
        watcher = world.start(observer, lambda: follow(observer, members))
        world.run()
    assert max(watcher.result) > 5.0
    assert min(watcher.result) < 1.0


SECRET = bytes(range(32))


@pytest.mark.parametrize("options", [{}, {"overlap": 1}, {"topology": "sharded"}], ids=str)
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_an_array_that_is_overwritten_after_share_stays(
    options: Any, at: int, ranks: tuple[int, ...]
) -> None:
    def work(rank: int) -> NDArray[np.float32]:
        weights = np.full(NUMEL, float(rank), np.float32)
        shared = gw.share(weights, node=nodes[rank], codec="dense", **options)
        shared.join()
        for step in range(6):
            if step == at and rank in ranks:
                weights[...] = BEST
            shared.step(np.zeros(NUMEL, np.float32))
        if "overlap" in options:
            shared.exchange.catch_up(weights)
        return weights

    with (
        gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=SECRET, node_id=2) as two,
    ):
        nodes = [one, two]
        one.expected_peers = two.expected_peers = 1
        with ThreadPoolExecutor(2) as pool:
            for weights in pool.map(work, range(2)):
                np.testing.assert_allclose(weights, BEST * len(ranks) / 2, atol=1e-5)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "difference"])
def test_arrays_that_the_workers_of_a_machine_overwrite_stay(
    at: int, ranks: tuple[int, ...], reduction: Any, keeps: bool
) -> None:
    name = f"written-{threading.get_native_id()}"
    with ExitStack() as stack:
        node = stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET))
        teams = [
            stack.enter_context(gw.LocalTeam(name, size=2, rank=rank, reduction=reduction))
            for rank in (0, 1)
        ]
        lead = gw.Exchange(
            gw.Encoder(NUMEL, 1.0, keeps_residual=keeps),
            node,
            min_peers=0,
            apply_residual=True,
            codec="dense",
            reduction=reduction,
        )
        shares = [teams[0].lead(lead), teams[1].follow()]

        def work(rank: int) -> NDArray[np.float32]:
            params = np.zeros(NUMEL, np.float32)
            shares[rank].join(params)
            for step in range(4):
                if step == at and rank in ranks:
                    params[...] = BEST
                shares[rank].step(np.full(NUMEL, 0.25, np.float32), params)
            return params

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(work, (0, 1)))
    workers = 2 if reduction == "sum" else 1
    moved = 0.25 * workers
    expected = BEST + moved * (4 - at)
    if len(ranks) == 1:
        expected = workers / 2 * (BEST - moved * at) + moved * 4
    for params in outcomes:
        np.testing.assert_allclose(params, expected, atol=1e-5)


# ---- before the next exchange settles it -----------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("applies", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("writers", [(0,), (0, 1)], ids=["one", "all"])
def test_a_checkpoint_between_write_and_exchange_resumes_bit_for_bit(
    writers: tuple[int, ...], applies: bool, topology: Any
) -> None:
    def train(steps: range, starts: Any) -> list[Any]:
        def work(node: FakeNode, rank: int) -> Any:
            encoder = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD))
            share = gw.Exchange(
                encoder, node, min_peers=1, every=4, topology=topology, apply_residual=applies
            )
            params = np.zeros(NUMEL, np.float32)
            if starts is not None:
                params[...], state = starts[rank]
                share.load_state_dict(state)
            share.join(params)
            for step in steps:
                if step == 5 and rank in writers:
                    load(params)
                share.note_written(params)
                params += update(rank, step)
                share.step_moved(params)
            return params.copy(), share.state_dict(params)

        return run_cluster(work, count=2, seed=3)

    whole = train(range(16), None)
    resumed = train(range(7, 16), train(range(7), None))
    for (params, _), (expected, _) in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(params, expected)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_gets_no_parameters_that_only_one_member_has_written(
    seed: int, topology: Any
) -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD)),
            node,
            min_peers=1,
            every=4,
            topology=topology,
            digest_s=0.0,
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        local = 0
        while share.next_step < 12:
            if rank == 0 and share.has_local_steps:
                params += 1.0
            share.note_written(params)
            params += update(rank, local)
            share.step_moved(params)
            local += 1
            node.cluster.compute(node, 0.1)
        return share.shared(params)[0]

    with cluster(seed) as world:
        nodes = [world.node(10), world.node(20)]
        workers = [
            world.start(node, lambda n=node, r=rank: work(n, r)) for rank, node in enumerate(nodes)
        ]

        def come() -> None:
            node = world.node(5)
            workers.append(world.start(node, lambda: work(node, 2)))

        world.plan(100 + 10 * seed, come)
        world.run()
    assert len(workers) == 3
    for worker in workers[1:]:
        np.testing.assert_array_equal(worker.result, workers[0].result)


def test_messages_that_arrive_between_write_and_exchange_stay() -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD)),
            node,
            min_peers=1,
            mode="async",
            every=4,
            reduction="sum",
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(24):
            if rank == 0 and step in (5, 14):
                params += 1.0
                share.note_written(params)
            if rank == 0:
                node.cluster.compute(node, 0.3)
                share.catch_up(params)
            params += update(rank, step)
            share.step_moved(params)
            node.cluster.compute(node, 0.1)
        node.cluster.compute(node, 5.0)
        share.catch_up(params)
        share.leave(params)
        return share.shared(params)[0]

    last, _ = run_cluster(work, count=2, seed=0)
    put_in = sum(update(rank, step) for rank in range(2) for step in range(24)) + np.float32(2.0)
    np.testing.assert_array_equal(last, put_in)


@pytest.mark.parametrize("applies", [False, True], ids=["plain", "residual"])
def test_what_is_written_right_before_leave_is_sent(applies: bool) -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD))
        share = gw.Exchange(
            encoder, node, min_peers=1, reduction="sum", every=2, apply_residual=applies
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(4):
            share.step(update(rank, step), params)
        params += rank
        share.leave(params)
        return share.shared(params)[0]

    put_in = sum(update(rank, step) for rank in range(2) for step in range(4)) + np.float32(1.0)
    for shared in run_cluster(work, count=2, seed=1):
        np.testing.assert_array_equal(shared, put_in)


@pytest.mark.parametrize("writes", [(4,), (3, 4, 5), (5, 6)], ids=str)
@pytest.mark.parametrize(("every", "overlap"), [(2, 0), (2, 1), (2, 2), (3, 1)])
def test_what_is_noted_twice_before_an_exchange_loses_no_message(
    every: int, overlap: int, writes: tuple[int, ...]
) -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD))
        share = gw.Exchange(
            encoder, node, min_peers=1, reduction="sum", every=every, overlap=overlap
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(13):
            if rank == 0 and step in writes:
                params += 0.125
                share.note_written(params)
            share.step(update(rank, step), params)  # notes it again
        share.leave(params)
        return share.shared(params)[0]

    put_in = sum(update(rank, step) for rank in range(2) for step in range(13))
    for shared in run_cluster(work, count=2, seed=1):
        np.testing.assert_array_equal(shared, put_in + np.float32(0.125 * len(writes)))


def test_what_is_noted_twice_in_an_array_without_dimensions_is_not_lost() -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = gw.Exchange(gw.Encoder(1, gw.FixedThreshold(1.0)), node, min_peers=1, every=3)
        scale = np.zeros((), np.float32)
        share.join(scale)
        for _ in range(6):
            if rank == 0:
                scale += 1.0
            share.step(np.zeros((), np.float32), scale)
        share.leave(scale)
        return share.shared(scale)[0]

    assert [float(shared) for shared in run_cluster(work, count=2, seed=1)] == [3.0, 3.0]


def test_what_is_remembered_of_small_tensors_is_as_small_as_they_are() -> None:
    params = [np.full(4, index, np.float32) for index in range(100)]
    marks = _fingerprint(params)
    assert sum(len(mark) for mark in marks if isinstance(mark, bytes)) <= 100 * 16
    params[70][2] = -1.0
    assert [index for index, mark in enumerate(_fingerprint(params)) if mark != marks[index]] == [
        70
    ]


@sync_ways
@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize("at", [6, 7, 8])
@pytest.mark.parametrize("writers", [(0, 1), (0,)], ids=["all", "one"])
def test_what_is_written_around_an_interrupted_step_is_noticed(
    options: Any, moves: bool, at: int, writers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A pause of the second node interrupts a step of the first one, which waits for it, or finishes an earlier one."""
    options = {"topology": "mesh", **options}
    keeps = options.pop("keeps_residual", True)
    interruptions: list[str] = []

    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD), keeps_residual=keeps)
        share = gw.Exchange(encoder, node, min_peers=1, digest_s=0.0, timeout_s=2.0, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)

        def call(method: Any, *args: Any) -> None:
            """Repeat what has taken nothing."""
            try:
                method(*args)
            except TimeoutError as error:
                interruptions.append(str(error))
                if "no update of this call was taken" in str(error):
                    method(*args)

        for step in range(20):
            if rank == 1 and step == 6:
                node.cluster.compute(node, 3.0)
            if step == at and rank in writers:
                load(params)
            moved = update(rank, step) if step < 12 else np.zeros(NUMEL, np.float32)
            if moves:
                call(share.note_written, params)
                params += moved
                call(share.step_moved, params)
            else:
                call(share.step, moved, params)
        if "overlap" in options:
            share.catch_up(params)
        return share.shared(params)[0]

    outcomes = run_cluster(work, count=2, seed=5)
    assert interruptions
    assert len({shared.tobytes() for shared in outcomes}) == 1
    if len(writers) == 2:
        np.testing.assert_allclose(outcomes[0], BEST, atol=12 * 2.0**-6)
        assert "not in the same way" not in caplog.text
    else:
        assert "not in the same way" in caplog.text
