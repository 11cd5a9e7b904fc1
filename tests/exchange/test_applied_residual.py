"""apply_residual: the caller's parameters are the shared ones plus what this node has not sent yet."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import redistribute

from ..seeds import seeds
from .cluster import FakeNode, cluster, refuse_updates, run_cluster, train_with_a_pause

NUMEL = 64
STEPS = 12
THRESHOLD = 2.0**-6


class Outcome(NamedTuple):
    params: NDArray[np.float32]
    shared: NDArray[np.float32]
    residual: NDArray[np.float32]


Work = Callable[[FakeNode, int], Any]


def updates_of(node: int, steps: int = STEPS) -> list[NDArray[np.float32]]:
    """Return multiples of 2^-12, so that every sum of them is exact in float32."""
    rng = np.random.default_rng([17, node])
    return [(rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32) for _ in range(steps)]


def encoder(threshold: float = THRESHOLD, *, keeps: bool = True) -> gw.Encoder:
    return gw.Encoder(NUMEL, threshold=gw.FixedThreshold(threshold), keeps_residual=keeps)


def outcome_of(share: gw.Exchange, enc: gw.Encoder, params: NDArray[np.float32]) -> Outcome:
    share._replica.make_residual(params)
    return Outcome(params, share.shared(params)[0], enc.residual)


kept_or_not = pytest.mark.parametrize("keeps", [True, False], ids=["kept", "difference"])


def train(apply_residual: bool, *, moves: bool, keeps: bool = True, **options: Any) -> Work:
    """Return the work of one node; ``moves``: through ``step_moved``, else through ``step``."""

    def work(node: FakeNode, rank: int) -> Outcome:
        enc, params = encoder(keeps=keeps), np.ones(NUMEL, np.float32)
        share = gw.Exchange(
            enc, node, reduction="sum", min_peers=2, apply_residual=apply_residual, **options
        )
        share.join(params)
        received = 0
        for one in updates_of(rank):
            if moves:
                params += one
                received += share.step_moved(params).received
            else:
                received += share.step(one, params).received
        while received < 2 * STEPS // options.get("every", 1):
            received += share.catch_up(params, timeout_s=0.05)
        assert enc.has_residual == keeps
        return outcome_of(share, enc, params)

    return work


@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize(
    "options",
    [{}, {"every": 3}, {"mode": "async"}, {"topology": "sharded"}],
    ids=lambda one: str(one),
)
@kept_or_not
def test_parameters_are_the_shared_ones_and_the_residual(
    options: Any, moves: bool, keeps: bool
) -> None:
    """The shared parameters, and what each node keeps back, are those of an exchange without the option."""
    with_it = run_cluster(train(True, moves=moves, keeps=keeps, **options), seed=3)
    without = run_cluster(train(False, moves=moves, **options), seed=3)
    for one, other in zip(with_it, without, strict=True):
        assert one.residual.any()
        np.testing.assert_array_equal(one.params, one.shared + one.residual)
        np.testing.assert_array_equal(one.shared, with_it[0].shared)
        np.testing.assert_array_equal(one.shared, other.params)
        np.testing.assert_array_equal(one.residual, other.residual)


@kept_or_not
@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
def test_a_node_alone_trains_as_without_compression(moves: bool, keeps: bool) -> None:
    """The gradients of each step see all updates before it."""

    def gradient(params: NDArray[np.float32]) -> NDArray[np.float32]:
        return params - np.linspace(-1.0, 1.0, NUMEL, dtype=np.float32)

    plain = np.ones(NUMEL, np.float32)
    with cluster(0) as made:
        enc = encoder(0.25, keeps=keeps)
        share = gw.Exchange(enc, made.node(1), min_peers=0, apply_residual=True)
        params = plain.copy()
        share.join(params)
        for _ in range(STEPS):
            plain -= 0.125 * gradient(plain)
            update = -0.125 * gradient(params)
            if moves:
                params += update
                share.step_moved(params)
            else:
                share.step(update, params)
        np.testing.assert_allclose(params, plain, rtol=1e-5, atol=1e-6)
        assert np.abs(share.shared(params)[0] - plain).max() > 0.05


@kept_or_not
def test_an_interrupted_step_counts_nothing_twice(keeps: bool) -> None:
    def work(node: FakeNode, rank: int) -> Outcome:
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(
            enc, node, reduction="sum", min_peers=1, timeout_s=2.0, apply_residual=True
        )
        share.join(params)
        train_with_a_pause(share, node, rank, params, updates_of(rank, 8))
        return outcome_of(share, enc, params)

    outcomes = run_cluster(work, count=2, seed=2)
    put_in = sum(one.astype(np.float64) for rank in range(2) for one in updates_of(rank, 8))
    kept = sum(one.residual.astype(np.float64) for one in outcomes)
    for one in outcomes:
        np.testing.assert_array_equal(one.shared + kept, put_in)
        np.testing.assert_array_equal(one.params, one.shared + one.residual)


@kept_or_not
def test_a_message_that_no_node_takes_stays_in_the_parameters(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    with cluster(0) as made:
        node = made.node(1)
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, min_peers=0, apply_residual=True)
        share.join(params)
        first, second = updates_of(0, 2)
        refuse_updates(node, monkeypatch)
        params += first
        with pytest.raises(gw.TooLarge):
            share.step_moved(params)
        np.testing.assert_array_equal(params, first)
        if keeps:
            np.testing.assert_array_equal(enc.residual, first)
        monkeypatch.undo()
        params += second
        share.step_moved(params)
        np.testing.assert_array_equal(params, first + second)


@kept_or_not
def test_an_update_that_is_not_finite_leaves_finite_parameters(keeps: bool) -> None:
    with cluster(0) as made:
        enc = encoder(keeps=keeps)
        share = gw.Exchange(enc, made.node(1), min_peers=0, apply_residual=True)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        params[:2] = (np.nan, 0.25)
        with pytest.raises(gw.NonFiniteUpdate):
            share.step_moved(params)
        assert params[:3].tolist() == [0.0, 0.25, 0.0]
        params[3] = 0.5
        share.step_moved(params)
        assert params[:4].tolist() == [0.0, 0.25, 0.0, 0.5]


@kept_or_not
def test_an_update_of_a_step_that_is_not_finite_leaves_the_residual(keeps: bool) -> None:
    with cluster(0) as made:
        enc = encoder(0.75, keeps=keeps)
        share = gw.Exchange(enc, made.node(1), min_peers=0, apply_residual=True)
        params = np.zeros(NUMEL, np.float32)
        share.step(np.full(NUMEL, 0.5, np.float32), params)
        update = np.full(NUMEL, 0.125, np.float32)
        update[[3, 5]] = np.inf, np.nan
        with pytest.raises(gw.NonFiniteUpdate, match=r"2 elements.*index 3") as caught:
            share.step(update, params)
        assert (caught.value.count, caught.value.first_index) == (2, 3)
        result = share.step(np.full(NUMEL, 0.25, np.float32), params)
        assert result.step == 1
        expected = np.full(NUMEL, 0.875, np.float32)
        expected[[3, 5]] = 0.75
        np.testing.assert_array_equal(params, expected)
        np.testing.assert_array_equal(share.shared(params)[0], 0.75)


@kept_or_not
def test_an_update_that_would_be_rounded_is_refused(keeps: bool) -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(keeps=keeps), made.node(1), min_peers=0, apply_residual=True)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        with pytest.raises(TypeError, match="would be rounded"):
            share.step(np.ones(NUMEL), params)
        with pytest.raises(ValueError, match="elements"):
            share.step(np.ones(NUMEL - 1, np.float32), params)
        assert not params.any()
        share.step(np.full(NUMEL, 0.5, np.float16), params)
        np.testing.assert_array_equal(params, 0.5)


@pytest.mark.parametrize("options", [{}, {"every": 2}], ids=str)
def test_an_update_cannot_be_in_a_residual_that_is_not_kept(options: Any) -> None:
    with cluster(0) as made:
        enc = encoder(keeps=False)
        share = gw.Exchange(enc, made.node(1), min_peers=0, apply_residual=True, **options)
        with pytest.raises(ValueError, match="need the update"):
            share.step(None, np.zeros(NUMEL, np.float32))


@kept_or_not
@pytest.mark.parametrize("seed", seeds(2))
def test_a_late_node_gets_the_parameters_without_the_residual_of_another(
    seed: int, keeps: bool
) -> None:
    outcomes: list[Outcome] = []
    late: list[bool] = []

    def train_until(node: FakeNode, last: int) -> None:
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(
            enc, node, reduction="sum", min_peers=1, timeout_s=20.0, apply_residual=True
        )
        late.append(share.join(params).is_late)
        while share.next_step < last:
            node.cluster.compute(node, 0.1)
            params += updates_of(node.peer.id, last)[share.next_step]
            share.step_moved(params)
        outcomes.append(outcome_of(share, enc, params))
        node.cluster.close(node)

    def add(node_id: int) -> None:
        node = world.node(node_id)
        world.start(node, lambda: train_until(node, 40))

    with cluster(seed) as world:
        add(20)
        add(30)
        world.plan(120, lambda: add(10))
        world.run()
    assert sorted(late) == [False, False, True]
    for one in outcomes:
        assert one.residual.any()
        np.testing.assert_array_equal(one.shared, outcomes[0].shared)
        np.testing.assert_array_equal(one.params, one.shared + one.residual)


def test_a_node_that_joins_again_needs_no_memory_for_the_residual() -> None:
    numel = 1_000_000
    peaks: list[int] = []

    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        enc = gw.Encoder(numel, gw.FixedThreshold(THRESHOLD), keeps_residual=False)
        params = np.zeros(numel, np.float32)
        share = gw.Exchange(enc, node, reduction="sum", min_peers=1, apply_residual=True)
        share.join(params)
        while share.next_step < 20:
            node.cluster.compute(node, 0.1)
            params[rank::3] += THRESHOLD / 256
            if rank and share.next_step == 2:
                tracemalloc.start()
                share.resync(params)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            share.step_moved(params)
        return params

    run_cluster(work, count=2, seed=0)
    # The donor's copy, and the snapshot as it arrives: 8 bytes per parameter of both nodes together.
    assert max(peaks) < 9 * numel


def test_a_checkpoint_needs_no_memory_besides_its_own() -> None:
    numel = 1_000_000
    bytes_per_parameter = {}

    def exchange(node: FakeNode) -> gw.Exchange:
        enc = gw.Encoder(numel, gw.FixedThreshold(THRESHOLD), keeps_residual=False)
        return gw.Exchange(enc, node, min_peers=0, apply_residual=True)

    def traced(name: str, call: Callable[[], Any]) -> Any:
        tracemalloc.start()
        result = call()
        bytes_per_parameter[name] = tracemalloc.get_traced_memory()[1] / numel
        tracemalloc.stop()
        return result

    params = np.zeros(numel, np.float32)
    with cluster(0) as made:
        share = exchange(made.node(1))
        share.join(params)
        for _ in range(2):
            params[::3] += THRESHOLD / 4
            share.step_moved(params)
        state = traced("saved", share.state_dict)
    with cluster(0) as made:
        share = exchange(made.node(1))
        share.load_state_dict(state)
        traced("joins", lambda: share.join(params))
    traced("redistributed", lambda: redistribute([state], 1))
    # The shared parameters and the residual, which a node that joins has already. A sum is in float64 until it is done.
    assert bytes_per_parameter["saved"] < 8.5
    assert bytes_per_parameter["joins"] < 1.5
    assert bytes_per_parameter["redistributed"] < 12.5


@pytest.mark.parametrize("again", ["leaves", "joins again"])
def test_values_that_are_not_finite_are_refused_by_a_node_that(again: str) -> None:
    def go_on(share: gw.Exchange, params: NDArray[np.float32]) -> None:
        if again == "leaves":
            share.leave(params)
        for _ in range(2):  # until the next exchange
            share.step_moved(params)

    def work(node: FakeNode, rank: int) -> list[float]:
        enc, params = encoder(keeps=False), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, reduction="sum", min_peers=0, apply_residual=True, every=2)
        share.join(params)
        for step in range(20):
            node.cluster.compute(node, 0.1)
            params += THRESHOLD / 8
            share.step_moved(params)
            if rank and step == 2:
                params[5] = np.nan
                if again == "joins again":
                    share.resync(params)
                with pytest.raises(gw.NonFiniteUpdate, match=r"^1 elements"):
                    go_on(share, params)
                params[5] = params[6]
            if rank and step == 12:
                share.leave(params)
                break
        return [float(value) for value in (params - params[0])]

    assert not any(any(values) for values in run_cluster(work, count=2, seed=0))


@kept_or_not
def test_a_checkpoint_of_another_world_size_acts_in_the_parameters(keeps: bool) -> None:
    def work(node: FakeNode, rank: int) -> Any:
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, reduction="sum", min_peers=2, apply_residual=True)
        share.join(params)
        for one in updates_of(rank):
            params += one
            share.step_moved(params)
        return share.state_dict(), params

    saved = run_cluster(work, seed=3)
    (state,) = redistribute([state for state, _ in saved], 1, reduction="sum")
    with cluster(0) as made:
        enc, params = encoder(keeps=keeps), saved[0][1].copy()
        share = gw.Exchange(enc, made.node(1), reduction="sum", min_peers=0, apply_residual=True)
        share.load_state_dict(state)
        share.join(params)
        put_in = sum(one.astype(np.float64) for rank in range(3) for one in updates_of(rank))
        np.testing.assert_array_equal(params, put_in)
        share.step_moved(params)
        np.testing.assert_array_equal(params, put_in)


def test_rounding_of_a_large_quantum_is_no_foreign_change_of_the_parameters() -> None:
    params = np.full(4, 1e-9, np.float32)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        encoder = gw.Encoder(4, gw.FixedThreshold(0.0625))
        share = gw.Exchange(encoder, node, min_peers=0, apply_residual=True)
        share.join(params)
        assert all(share.held(params))
        params += np.float32(1e-9)  # 0.0625 was added and taken away again
        assert all(share.held(params))
        params[1] = 0.01
        assert not all(share.held(params))


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize(
    "policy",
    [gw.FixedThreshold(1e-4), gw.AdaptiveThreshold(), gw.TargetDensity(0.01)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_residual_larger_than_the_parameters_is_no_foreign_change(
    policy: Any, topology: str
) -> None:
    """A step's rounding is relative to the largest value in it, which may be the residual's."""

    def work(node: FakeNode, rank: int) -> int:
        rng = np.random.default_rng([rank, 5])
        share = gw.Exchange(
            gw.Encoder(2000, policy), node, min_peers=2, apply_residual=True, topology=topology
        )
        params = np.zeros(2000, np.float32)
        share.join(params)
        unknown = 0
        for step in range(20):
            scale = 1.0 if step == 3 else 1e-3
            params += (rng.standard_t(1.5, 2000) * scale).astype(np.float32)
            share.step_moved(params)
            unknown += not all(share.held(params))
        return unknown

    assert run_cluster(work, seed=3) == [0, 0, 0]


def test_an_encoder_without_a_residual_needs_parameters_that_hold_it() -> None:
    with cluster(0) as made, pytest.raises(ValueError, match="give apply_residual=True"):
        gw.Exchange(encoder(keeps=False), made.node(1))
    with pytest.raises(ValueError, match="keeps_residual=True"):
        gw.Encoder(4, clip=gw.ResidualClip(every=2), keeps_residual=False)
    enc = encoder(keeps=False)
    with pytest.raises(RuntimeError, match="keeps no residual"):
        _ = enc.residual
    with pytest.raises(ValueError, match="differences only"):
        enc.encode(np.ones(NUMEL, np.float32))


@pytest.mark.parametrize("limits", [True, False])
def test_an_update_is_measured_without_what_earlier_ones_have_left(limits: bool) -> None:
    """A node whose residual is large must not be taken for one whose updates are."""

    def work(node: FakeNode, rank: int) -> tuple[NDArray[np.float32], int]:
        enc = encoder(1.0 if rank == 0 else THRESHOLD, keeps=False)  # the first sends nothing
        options: Any = {"apply_residual": True, "limit_outliers": limits, "topology": "mesh"}
        share = gw.Exchange(enc, node, min_peers=3, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        shortened = 0
        for _ in range(40):
            params += np.float32(2.0**-6)
            shortened += share.step_moved(params).shortened
        return params, shortened

    outcomes = run_cluster(work, count=4, seed=1)
    assert [count for _, count in outcomes] == [0, 0, 0, 0]


def test_an_update_that_only_the_residual_holds_is_not_shortened() -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        enc = encoder()
        options: Any = {"apply_residual": True, "limit_outliers": True, "topology": "mesh"}
        share = gw.Exchange(enc, node, min_peers=2, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(6):
            enc.residual[:] += 100.0 if (rank, step) == (0, 3) else 1.0
            assert share.step(None, params).shortened == 0
        return share.shared(params)[0]

    first, second, third = run_cluster(work, seed=1)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)


def test_a_node_that_has_workers_weighs_what_its_parameters_have_moved_by() -> None:
    def work(node: FakeNode, rank: int) -> Outcome:
        enc, params = encoder(keeps=False), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, min_peers=1, apply_residual=True)
        share.set_team(1 + 2 * rank, sends_mean=True)  # weights 1/2 and 3/2
        share.join(params)
        for one in updates_of(rank):
            params += one
            share.step_moved(params)
        return outcome_of(share, enc, params)

    outcomes = run_cluster(work, count=2, seed=2)
    first, second = (sum(one.astype(np.float64) for one in updates_of(rank)) for rank in range(2))
    left = sum(one.residual.astype(np.float64) for one in outcomes) / 2.0
    np.testing.assert_allclose(
        outcomes[0].shared + left, 0.25 * first + 0.75 * second, rtol=0.0, atol=1e-6
    )
