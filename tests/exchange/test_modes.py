"""The modes: synchronous, asynchronous, local steps; whole updates and averaged parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.errors import WouldBlock

from ..seeds import seeds
from .cluster import FakeNode, cluster, run_cluster

NUMEL = 64
THRESHOLD = 2.0**-6


def updates_of(node: int, steps: int, numel: int = NUMEL) -> list[NDArray[np.float32]]:
    """Return multiples of 2^-12, so that every sum of them is exact in float32."""
    rng = np.random.default_rng([11, node])
    return [(rng.integers(-256, 256, numel) / 2.0**12).astype(np.float32) for _ in range(steps)]


def encoder(numel: int = NUMEL, threshold: float = THRESHOLD) -> gw.Encoder:
    return gw.Encoder(numel, threshold=gw.FixedThreshold(threshold))


class Replica(NamedTuple):
    params: NDArray[np.float32]
    residual: NDArray[np.float32]
    results: list[gw.StepResult]


Work = Callable[[FakeNode, int], Replica]


def same_bits(replicas: list[Replica]) -> bool:
    return len({replica.params.tobytes() for replica in replicas}) == 1


# --- asynchronous -----------------------------------------------------------------------------------------------------

STEPS = 12


def train_asynchronously(**options: Any) -> Work:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.ones(NUMEL, np.float32)
        share = gw.Exchange(enc, node, min_peers=2, mode="async", reduction="sum", **options)
        results = [share.step(one, params) for one in updates_of(rank, STEPS)]
        applied = sum(result.received for result in results)
        while applied < 2 * STEPS:
            applied += share.catch_up(params, timeout_s=0.05)
        return Replica(params, enc.residual, results)

    return work


@pytest.mark.parametrize("seed", seeds(2))
def test_asynchronous_replicas_hold_everything_that_was_put_in(seed: int) -> None:
    replicas = run_cluster(train_asynchronously(), seed=seed)
    put_in = sum(one.astype(np.float64) for rank in range(3) for one in updates_of(rank, STEPS))
    kept = sum(replica.residual.astype(np.float64) for replica in replicas)
    for replica in replicas:
        np.testing.assert_array_equal(replica.params + kept, 1.0 + put_in)


def test_asynchronous_replicas_show_the_order_in_the_last_bits() -> None:
    def outcome(seed: int) -> bool:
        def work(node: FakeNode, rank: int) -> Replica:
            rng = np.random.default_rng([12, rank])
            enc = gw.Encoder(NUMEL, threshold=gw.TargetDensity(0.3, initial=0.5))
            params = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
            share = gw.Exchange(enc, node, min_peers=2, mode="async", reduction="sum")
            applied = 0
            for _ in range(STEPS):
                one = rng.standard_normal(NUMEL).astype(np.float32)
                applied += share.step(one, params).received
            while applied < 2 * STEPS:
                applied += share.catch_up(params, timeout_s=0.05)
            return Replica(params, enc.residual, [])

        return same_bits(run_cluster(work, seed=seed))

    assert not all(outcome(seed) for seed in range(4)), "the example must tell the orders apart"


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_nobody_runs_further_ahead_than_allowed(max_staleness: int) -> None:
    sent_by_the_slow_one = 0
    leads = []

    def work(node: FakeNode, rank: int) -> Replica:
        nonlocal sent_by_the_slow_one
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, min_peers=2, mode="async", max_staleness=max_staleness)
        results = []
        for step, one in enumerate(updates_of(rank, STEPS)):
            if rank == 0:
                node.cluster.compute(node, 0.5)
                sent_by_the_slow_one = step + 1
            results.append(share.step(one, params))
            leads.append(step - sent_by_the_slow_one)
        return Replica(params, enc.residual, results)

    replicas = run_cluster(work, seed=5)
    assert max(leads) == max_staleness
    assert max(result.staleness for result in replicas[1].results) == max_staleness
    # A node that waits says for whom.
    for fast in replicas[1:]:
        named = [result.slowest.id for result in fast.results if result.slowest]
        assert named.count(10) > STEPS // 2


def test_a_node_too_far_ahead_gives_up_without_taking_the_update() -> None:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, min_peers=1, mode="async", max_staleness=1, timeout_s=2.0)
        share.wait_for_peers()
        if rank == 1:
            node.cluster.compute(node, 30.0)
            return Replica(params, enc.residual, [])
        one, two, three = updates_of(0, 3)
        results = [share.step(one, params), share.step(two, params)]
        before = enc.residual.copy()
        with pytest.raises(WouldBlock, match=r"2 steps ahead of 127\.0\.0\.1:1020; the update"):
            share.step(three, params)
        np.testing.assert_array_equal(enc.residual, before)
        return Replica(params, enc.residual, results)

    run_cluster(work, count=2, seed=0)


def test_a_node_too_far_ahead_waits_for_a_node_that_evaluates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = impatient(enc, node, False, mode="async", max_staleness=1)
        results = []
        for count, one in enumerate(updates_of(rank, 4)):
            if rank == 1 and count == 1:
                node.cluster.compute(node, 9.0)
            results.append(share.step(one, params))
        share.leave(params)
        return Replica(params, enc.residual, results)

    with caplog.at_level("WARNING"):
        waits, _ = run_cluster(work, count=2, seed=0)
    assert sum(result.wait_s for result in waits.results) > 8.0
    text = "step 3 cannot begin within 2 s: this node is 2 steps ahead of 127.0.0.1:1020; waiting goes on"
    assert caplog.messages.count(text) == 4


# --- local steps ------------------------------------------------------------------------------------------------------


def test_whole_updates_of_local_steps_are_parameter_averaging() -> None:
    every, rounds = 4, 3
    start = np.arange(NUMEL, dtype=np.float32)

    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), start.copy()
        share = gw.Exchange(enc, node, min_peers=1, every=every, codec="dense")
        results = [share.step(one, params) for one in updates_of(rank, every * rounds)]
        return Replica(params, enc.residual, results)

    replicas = run_cluster(work, count=2, seed=3)
    expected = start.copy()
    both = [updates_of(rank, every * rounds) for rank in range(2)]
    for first in range(0, every * rounds, every):
        locals_ = []
        for updates in both:
            mine = expected.copy()
            for one in updates[first : first + every]:
                mine += one
            locals_.append(mine)
        expected = ((locals_[0].astype(np.float64) + locals_[1]) / 2).astype(np.float32)
    for replica in replicas:
        np.testing.assert_array_equal(replica.params, expected)
        assert [result.is_local for result in replica.results] == [True, True, True, False] * 3
        assert [result.step for result in replica.results] == [0] * 4 + [1] * 4 + [2] * 4
        assert not replica.residual.any()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_local_steps_lose_nothing(mode: Any) -> None:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, reduction="sum", min_peers=2, every=3, mode=mode)
        results = [share.step(one, params) for one in updates_of(rank, 12)]
        applied = sum(result.received for result in results)
        while applied < 2 * 4:
            applied += share.catch_up(params, timeout_s=0.05)
        return Replica(params, enc.residual, results)

    replicas = run_cluster(work, seed=4)
    put_in = sum(one.astype(np.float64) for rank in range(3) for one in updates_of(rank, 12))
    kept = sum(replica.residual.astype(np.float64) for replica in replicas)
    for replica in replicas:
        np.testing.assert_array_equal(replica.params + kept, put_in)


@pytest.mark.parametrize("every", [1, 3])
def test_what_an_optimiser_moved_is_shared_as_an_update_is(every: int) -> None:
    def outcome(moves: bool) -> Replica:
        def work(node: FakeNode, rank: int) -> Replica:
            enc, params = encoder(), np.zeros(NUMEL, np.float32)
            share = gw.Exchange(enc, node, min_peers=1, every=every)
            share.join(params)
            results = []
            for one in updates_of(rank, 6):
                if moves:
                    params += one
                    results.append(share.step_moved(params))
                else:
                    results.append(share.step(one, params))
            return Replica(params, enc.residual, results)

        return run_cluster(work, count=2, seed=6)[0]

    with_update, moved = outcome(moves=False), outcome(moves=True)
    np.testing.assert_array_equal(with_update.params, moved.params)
    np.testing.assert_array_equal(with_update.residual, moved.residual)


def test_moved_parameters_need_to_be_known_before() -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(), made.node(1), min_peers=0)
        with pytest.raises(ValueError, match="join"):
            share.step_moved(np.zeros(NUMEL, np.float32))


def test_an_interrupted_exchange_of_local_steps_counts_nothing_twice() -> None:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, reduction="sum", min_peers=1, every=2, timeout_s=2.0)
        share.join(params)
        results = []
        for count, one in enumerate(updates_of(rank, 8)):
            if rank == 1 and count == 3:
                node.cluster.compute(node, 3.0)
            params += one
            try:
                results.append(share.step_moved(params))
            except TimeoutError:
                results.append(None)
        return Replica(params, enc.residual, results)

    replicas = run_cluster(work, count=2, seed=2)
    assert None in replicas[0].results, "the example must interrupt a step"
    put_in = sum(one.astype(np.float64) for rank in range(2) for one in updates_of(rank, 8))
    kept = sum(replica.residual.astype(np.float64) for replica in replicas)
    assert same_bits(replicas)
    np.testing.assert_array_equal(replicas[0].params + kept, put_in)


def impatient(enc: gw.Encoder, node: FakeNode, raises: bool, **options: Any) -> gw.Exchange:
    """Return an exchange of sums that waits for two seconds, and then raises or goes on waiting."""
    options = {"min_peers": 1, "on_straggler": "raise" if raises else "wait", **options}
    return gw.Exchange(enc, node, reduction="sum", timeout_s=2.0, **options)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("applies", [False, True], ids=["plain", "residual"])
def test_an_update_that_found_no_space_may_be_given_again(every: int, applies: bool) -> None:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = impatient(enc, node, False, every=every, apply_residual=applies)
        share.join(params)
        refusals = 0
        for count, one in enumerate(updates_of(rank, 8)):
            node.is_full = rank == 0 and count == 3
            try:
                share.step(one, params)
            except WouldBlock:
                refusals += 1
                assert share.step_number == count
                node.is_full = False
                share.step(one, params)
        assert refusals == (rank == 0)
        share.leave(params)
        return Replica(share.shared(params)[0], enc.residual, [])

    put_in = sum(one.astype(np.float64) for rank in range(2) for one in updates_of(rank, 8))
    for replica in run_cluster(work, count=2, seed=1):
        np.testing.assert_array_equal(replica.params, put_in)


@pytest.mark.parametrize(("every", "overlap"), [(1, 0), (1, 1), (3, 1)])
def test_a_call_that_only_waits_for_an_earlier_step_says_that_it_took_nothing(
    every: int, overlap: int
) -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        params = np.zeros(NUMEL, np.float32)
        share = impatient(encoder(), node, rank == 0, every=every, overlap=overlap)
        share.join(params)
        repeated = 0
        for count, one in enumerate(updates_of(rank, 9)):
            if rank == 1 and count == 4:
                node.cluster.compute(node, 7.0)
            is_taken = False
            while not is_taken:
                try:
                    share.step(one, params)
                    is_taken = True
                except TimeoutError as error:
                    is_taken = "no update of this call was taken" not in str(error)
                    repeated += not is_taken
        assert (repeated > 1) == (rank == 0)
        share.leave(params)
        return share.shared(params)[0]

    put_in = sum(one.astype(np.float64) for rank in range(2) for one in updates_of(rank, 9))
    for shared in run_cluster(work, count=2, seed=1):
        np.testing.assert_array_equal(shared, put_in)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("others", [1, 2])
def test_a_leave_that_timed_out_may_be_called_again(topology: Any, others: int) -> None:
    def work(node: FakeNode, rank: int) -> Replica:
        enc, params = encoder(), np.zeros(NUMEL, np.float32)
        share = impatient(enc, node, rank == 0, min_peers=others, topology=topology)
        share.join(params)
        results = [share.step(one, params) for one in updates_of(rank, 4)]
        if rank == 1:
            node.cluster.compute(node, 3.0)
        if rank == 0:
            with pytest.raises(TimeoutError):
                share.leave(params)
        results.append(share.leave(params))
        node.cluster.compute(node, 1.0)
        node.cluster.close(node)
        return Replica(params, enc.residual, results)

    put_in = sum(one.astype(np.float64) for r in range(1 + others) for one in updates_of(r, 4))
    for replica in run_cluster(work, count=1 + others, seed=2):
        np.testing.assert_array_equal(replica.params, put_in)


def test_a_local_step_that_is_not_finite_is_taken_back() -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(4), made.node(1), min_peers=0)
        params = np.zeros(4, np.float32)
        share.join(params)
        params[:] = (np.nan, 0.25, 0.0, 0.0)
        with pytest.raises(gw.NonFiniteUpdate):
            share.step_moved(params)
        assert not params.any()
        share.step_moved(params)
        assert params.tolist() == [0.0, THRESHOLD, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every is 0"),
        ({"mode": "later"}, "mode is 'later'"),
        ({"codec": "zip"}, "codec is 'zip'"),
        ({"max_staleness": -1}, "max_staleness is -1, must be 0 or more"),
        ({"max_staleness": 2**63}, "max_staleness is 9223372036854775808, must be at most"),
        ({"timeout_s": float("nan")}, "timeout_s is nan, must be positive"),
        ({"digest_s": -1}, "digest_s is -1, must be 0 or more"),
        ({"overlap": -1}, "overlap is -1"),
        ({"overlap": 3, "every": 2}, "overlap is 3, must be from 0 to the 2 steps"),
        ({"overlap": 1, "mode": "async"}, "overlap is for synchronous steps"),
        ({"outer_momentum": 1.0}, "outer_momentum must be"),
        ({"outer_momentum": 0.5, "mode": "async"}, "for synchronous replicas"),
        ({"mode": "async", "on_straggler": "drop"}, "for synchronous steps"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, complaint: str) -> None:
    with cluster(0) as made, pytest.raises(ValueError, match=complaint):
        gw.Exchange(encoder(), made.node(1), **options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 2.5}, "every must be an int"),
        ({"every": True}, "every must be an int"),
        ({"min_peers": 1.0}, "min_peers must be an int"),
        ({"max_staleness": "8"}, "max_staleness must be an int"),
        ({"overlap": 0.5}, "overlap must be an int"),
        ({"timeout_s": "5"}, "timeout_s must be a number, got '5'"),
        ({"timeout_s": None}, "timeout_s must be a number, got None"),
        ({"start_timeout_s": [5.0]}, "start_timeout_s must be a number"),
        ({"digest_s": True}, "digest_s must be a number, got True"),
        ({"outer_momentum": "0.5"}, "outer_momentum must be a number"),
        ({"apply_residual": "False"}, "apply_residual must be True or False, got 'False'"),
        ({"limit_outliers": 0}, "limit_outliers must be True or False, got 0"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(options: Any, complaint: str) -> None:
    with cluster(0) as made, pytest.raises(TypeError, match=complaint):
        gw.Exchange(encoder(), made.node(1), **options)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_with_options_of_numpy_trains_with_one_that_has_plain_ones(mode: Any) -> None:
    numbers: list[dict[str, Any]] = [
        {"every": 20, "owners_max": 4, "max_staleness": 3, "min_peers": 1, "timeout_s": 20.0},
        {name: np.int64(value) for name, value in (("every", 20), ("owners_max", 4))}
        | {"max_staleness": np.int64(3), "min_peers": np.int8(1), "timeout_s": np.float32(20)},
    ]
    momentum: list[Any] = [0.5, np.float32(0.5)] if mode == "sync" else [0, np.int64(0)]

    def work(node: FakeNode, rank: int) -> int:
        numel: Any = (NUMEL, np.prod((NUMEL, 1)))[rank]
        options = {**numbers[rank], "outer_momentum": momentum[rank], "mode": mode}
        share = gw.Exchange(encoder(numel), node, **options)
        return len(share.join(np.zeros(NUMEL, np.float32)).members)

    assert run_cluster(work, count=2, seed=0) == [1, 1]


@pytest.mark.parametrize("state", [None, {"m": np.zeros(3)}, np.zeros(3), "text", [5]])
def test_a_state_that_no_newcomer_could_get_is_refused_at_once(state: Any) -> None:
    params, update = np.zeros(NUMEL, np.float32), np.ones(NUMEL, np.float32)
    with cluster(0) as made:
        share = gw.Exchange(encoder(), made.node(1), min_peers=0)
        for call in (lambda: share.step(update, params, state), lambda: share.join(params, state)):
            with pytest.raises(TypeError, match=r"optimizer_state must be|not an array"):
                call()
        assert share.step(update, params).step == 0
    assert (params > 0.0).all()


@pytest.mark.parametrize("bad_step", [0, 1])
def test_a_local_update_that_is_not_finite_takes_nothing_from_the_others(bad_step: int) -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(), made.node(1), min_peers=0, every=2, codec="dense")
        params = np.zeros(NUMEL, np.float32)
        ones = np.ones(NUMEL, np.float32)
        bad = np.where(np.arange(NUMEL) == 3, np.nan, ones).astype(np.float32)
        for step in range(4):
            if step == bad_step:
                with pytest.raises(gw.NonFiniteUpdate, match=r"1 elements .* the first at index 3"):
                    share.step(bad, params)
            share.step(ones, params)
        with pytest.raises(TypeError, match=r"an update of float64 .* would be rounded"):
            share.step(ones.astype(float), params)
    expected = np.full(NUMEL, 5.0, np.float32)
    expected[3] = 4.0
    np.testing.assert_array_equal(params, expected)


@pytest.mark.parametrize("timeout_s", ["1", None, float("nan"), -1.0])
def test_a_wait_of_no_time_is_refused_instead_of_lasting_for_ever(timeout_s: Any) -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(), made.node(1), min_peers=0, mode="async")
        with pytest.raises((TypeError, ValueError), match="timeout_s"):
            share.catch_up(np.zeros(NUMEL, np.float32), timeout_s)


def test_other_parameters_than_those_of_the_training_are_refused_by_shape() -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(), made.node(1), min_peers=0, apply_residual=True)
        params = np.zeros(NUMEL, np.float32)
        share.step(np.ones(NUMEL, np.float32), params)
        for other in ([], np.zeros(3, np.float32), [params[:1], params[1:]]):
            with pytest.raises(ValueError, match="those of the training"):
                share.step(np.ones(NUMEL, np.float32), other)
        share.step(np.ones(NUMEL, np.float32), params)
    np.testing.assert_array_equal(params, np.full(NUMEL, 2.0, np.float32))


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "async"}, {"apply_residual": True}, {"every": 2}, {"overlap": 1}, {"outer_momentum": 0.5}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("call", ["step", "leave"])
def test_parameters_that_do_not_fit_a_later_call_are_refused_before_it_takes_the_update(
    options: Any, call: str
) -> None:
    given = np.array([1.0, 0.25, 0.0, -1.0], np.float32)
    read_only = np.zeros(4, np.float32)
    read_only.setflags(write=False)

    def outcome(wrong: Any) -> tuple[bytes, bytes, int]:
        with cluster(0) as world:
            share = gw.Exchange(gw.Encoder(4, 0.5), world.node(1), min_peers=0, **options)
            params = np.zeros(4, np.float32)
            share.join(params)
            share.step(given, params)
            if wrong is not None:
                with pytest.raises((TypeError, ValueError)):
                    share.step(given, wrong) if call == "step" else share.leave(wrong)
                if "mode" in options:
                    with pytest.raises((TypeError, ValueError)):
                        share.catch_up(wrong)
            share.step(given, params)
            (encoder,) = share.state_dict()["encoders"]
            return params.tobytes(), encoder["residual"].tobytes(), share.step_number

    expected = outcome(None)
    for wrong in (np.zeros(2, np.float32), read_only, [np.zeros(4, np.float32)] * 2, [0.0] * 4):
        assert outcome(wrong) == expected


@pytest.mark.parametrize("call", ["step", "join", "catch_up", "leave"])
def test_parameters_that_do_not_fit_a_team_are_refused_before_its_call(call: str) -> None:
    with (
        cluster(0) as world,
        gw.LocalTeam(f"misfit-{call}-{os.getpid()}", size=1, rank=0) as team,
    ):
        share = team.lead(gw.Exchange(gw.Encoder(4, 0.5), world.node(1), min_peers=0))
        given, params = np.ones(4, np.float32), np.zeros(4, np.float32)
        share.step(given, params)
        for wrong in (np.zeros(3, np.float32), [params] * 2, np.zeros(4)):
            with pytest.raises(ValueError, match="those of the training"):
                share.step(given, wrong) if call == "step" else getattr(share, call)(wrong)
        assert share.next_step == 1
        share.step(given, params)
    assert params.tolist() == [1.0] * 4  # a threshold for each of two steps


@pytest.mark.parametrize("every", [1, 2])
def test_an_update_in_another_order_than_the_parameters_is_refused(every: int) -> None:
    with cluster(0) as world:
        share = gw.Exchange(gw.Encoder(10, 0.5), world.node(1), min_peers=0, every=every)
        params = [np.zeros((2, 3), np.float32), np.zeros(4, np.float32)]
        update = [np.ones((2, 3), np.float32), np.zeros(4, np.float32)]
        for wrong in (update[::-1], [update[0].T, update[1]]):
            with pytest.raises(ValueError, match="array 0 of the update has shape"):
                share.step(wrong, params)
        assert not any(param.any() for param in params)
        share.step([update[0].ravel(), update[1]], params)
    assert params[0].all()
    assert not params[1].any()


def test_what_is_neither_encoder_nor_node_is_refused() -> None:
    with cluster(0) as made:
        with pytest.raises(TypeError, match="enc must be an Encoder or Groups"):
            gw.Exchange([encoder()], made.node(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="node must be a Node"):
            gw.Exchange(encoder(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_left", [False, True])
def test_a_resync_without_others_changes_nothing(has_left: bool) -> None:
    """There is nobody whose parameters it could take, and nobody comes back."""

    def work(node: FakeNode, rank: int) -> int:
        share = gw.Exchange(encoder(), node, min_peers=int(has_left), codec="dense")
        params = np.zeros(NUMEL, np.float32)
        share.step(np.ones(NUMEL, np.float32), params)
        if rank:
            share.leave(params)
            return 1
        while share.members:
            share.step(np.zeros(NUMEL, np.float32), params)
        joined = share.resync(params)
        assert (joined.is_late, joined.step) == (False, share.next_step)
        assert (params == 1.0).all()
        return share.step(np.ones(NUMEL, np.float32), params).applied

    assert run_cluster(work, count=1 + has_left, seed=1) == [1] * (1 + has_left)


def test_parameters_without_an_element_may_be_sharded() -> None:
    with cluster(0) as made:
        share = gw.Exchange(encoder(0), made.node(1), min_peers=0, topology="sharded")
        result = share.step(np.zeros(0, np.float32), np.zeros(0, np.float32))
    assert (result.threshold, result.is_shakeup, result.ratio) == (0.0, False, 0.0)
