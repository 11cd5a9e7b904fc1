"""Checkpoints: training goes on bit for bit, and with another number of workers nothing is lost."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import redistribute
from gradwire.exchange.checkpoint import params_of
from gradwire.exchange.groups import Group
from gradwire.exchange.owner import add_owner_state

from .cluster import FakeNode, cluster, run_cluster

NUMEL = 200
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"every": 2},
    {"apply_residual": True},
    {"apply_residual": True, "moves": True},
    {"apply_residual": True, "moves": True, "keeps_residual": False},
    {"apply_residual": True, "overlap": 1, "moves": True},
    {"overlap": 1},
    {"every": 2, "outer_momentum": 0.5},
    {"apply_residual": True, "outer_momentum": 0.5, "moves": True},
]
HALF = 6


def update(rank: int, step: int, drift: float = 0.0) -> NDArray[np.float32]:
    rng = np.random.default_rng([31, rank, step])
    return (rng.standard_normal(NUMEL) + drift).astype(np.float32)


def train(
    steps: range, options: dict[str, Any], starts: list[Any], seed: int = 0
) -> list[tuple[NDArray[np.float32], dict[str, Any]]]:
    """Train one worker for each start (None, or parameters and state), and return theirs at the end.

    With ``moves`` the workers add their updates to the parameters themselves. An overlapped step is finished where
    training may be interrupted.
    """

    def work(node: Any, rank: int) -> Any:
        others = dict(options)
        moves, drift = others.pop("moves", False), others.pop("drift", 0.0)
        policy, shakeup = gw.TargetDensity(0.1), gw.ShakeUp(every=3)
        keeps = others.pop("keeps_residual", True)
        enc = gw.Encoder(NUMEL, policy, shakeup=shakeup, keeps_residual=keeps)
        share = gw.Exchange(enc, node, min_peers=len(starts) - 1, **others)
        params = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
        if starts[rank] is not None:
            params, state = copy.deepcopy(starts[rank])
            share.load_state_dict(state)
        share.join(params)
        for step in steps:
            if moves:
                params += update(rank, step, drift)
                share.step_moved(params)
            else:
                share.step(update(rank, step, drift), params)
            if "overlap" in options and step + 1 in (HALF, steps.stop):
                share.catch_up(params)
        return params, share.state_dict()

    with cluster(seed) as made:
        nodes = [made.node(rank) for rank in range(len(starts))]
        workers = [made.start(node, lambda n=node, r=r: work(n, r)) for r, node in enumerate(nodes)]
        made.run()
    return [worker.result for worker in workers]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_resumed_training_is_uninterrupted_training_bit_for_bit(options: dict[str, Any]) -> None:
    whole = train(range(12), options, [None, None], seed=1)
    first = train(range(HALF), options, [None, None], seed=2)
    stored = pickle.loads(pickle.dumps(first))
    second = train(range(HALF, 12), options, stored, seed=3)
    for (params, state), (resumed, resumed_state) in zip(whole, second, strict=True):
        assert params.tobytes() == resumed.tobytes()
        residual, other = (one["encoders"][0]["residual"] for one in (state, resumed_state))
        assert residual.tobytes() == other.tobytes()
        assert state["step"] == resumed_state["step"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topology": "sharded"},
        {"apply_residual": True},
        {"apply_residual": True, "moves": True},
        {"apply_residual": True, "moves": True, "keeps_residual": False},
        {"apply_residual": True, "moves": True, "keeps_residual": False, "topology": "sharded"},
    ],
    ids=" ".join,
)
def test_local_steps_before_a_checkpoint_count_in_the_next_update_s_norm(
    options: dict[str, Any],
) -> None:
    """Five of six: by the last one alone the update would be an outlier, and shortened on all nodes."""
    options = {"every": 6, "drift": 3.0, "limit_outliers": True, **options}
    whole = train(range(24), options, [None] * 3, seed=1)
    first = train(range(11), options, [None] * 3, seed=2)
    second = train(range(11, 24), options, pickle.loads(pickle.dumps(first)), seed=3)
    for (params, state), (resumed, resumed_state) in zip(whole, second, strict=True):
        assert params.tobytes() == resumed.tobytes()
        assert state["shared"][0].tobytes() == resumed_state["shared"][0].tobytes()


@pytest.mark.parametrize("applies", [False, True])
def test_local_steps_of_a_checkpoint_are_shared_also_where_every_step_is_an_exchange(
    applies: bool,
) -> None:
    def work(node: FakeNode, rank: int, every: int, start: Any, steps: range) -> Any:
        enc = gw.Encoder(NUMEL, 2.0**-4)
        share = gw.Exchange(enc, node, min_peers=1, every=every, apply_residual=applies)
        params = np.zeros(NUMEL, np.float32)
        if start is not None:
            params, state = start
            share.load_state_dict(state)
        for step in steps:
            share.step(np.round(update(rank, step) * 64.0) / 64.0, params)
        return params, share.state_dict()

    def train(every: int, starts: Any, steps: range) -> Any:
        return run_cluster(
            lambda node, rank: work(node, rank, every, starts[rank], steps), count=2, seed=1
        )

    saved = train(4, [None, None], range(6))
    ended = train(1, copy.deepcopy(saved), range(6, 9))
    shared = [state["shared"][0] if applies else params for params, state in ended]
    np.testing.assert_array_equal(*shared)
    left = sum(state["encoders"][0]["residual"].astype(np.float64) for _, state in ended)
    total = sum(
        np.round(update(rank, step) * 64.0) / 64.0 for rank in range(2) for step in range(9)
    )
    np.testing.assert_array_equal(2.0 * shared[0] + left, total)


@pytest.mark.parametrize(("half", "bad"), [(10, 10), (33, 35)])
def test_an_outlier_right_after_a_checkpoint_is_shortened(half: int, bad: int) -> None:
    def work(node: FakeNode, rank: int, steps: range, start: Any) -> Any:
        share = gw.Exchange(gw.Encoder(NUMEL, 0.01), node, min_peers=2, limit_outliers=True)
        params = np.zeros(NUMEL, np.float32)
        if start is not None:
            params, state = start
            share.load_state_dict(state)
        for step in steps:
            factor = np.float32(100.0 if (rank, step) == (0, bad) else 1.0)
            result = share.step(factor * update(rank, step), params)
            assert result.shortened == int(factor > 1.0)
        return params.copy(), share.state_dict()

    def train(steps: range, starts: Any = (None,) * 3) -> Any:
        return run_cluster(lambda node, rank: work(node, rank, steps, starts[rank]), seed=1)

    [(whole, _), *_] = train(range(40))
    [(resumed, _), *_] = train(range(half, 40), train(range(half)))
    assert resumed.tobytes() == whole.tobytes()


def test_a_state_is_a_copy() -> None:
    [(_, state)] = train(range(2), {}, [None])
    before = pickle.dumps(state)
    train(range(2, 4), {}, [(np.zeros(NUMEL, np.float32), state)])
    assert pickle.dumps(state) == before


def test_a_message_that_was_not_finished_is_in_the_state() -> None:
    def work(node: Any, rank: int) -> Any:
        enc = gw.Encoder(2, 0.5)
        share = gw.Exchange(enc, node, min_peers=1, timeout_s=1.0)
        share.wait_for_peers()
        if rank == 1:
            node.cluster.compute(node, 9.0)
            return None
        with pytest.raises(TimeoutError):
            share.step(np.array([0.75, 0.25], np.float32), np.zeros(2, np.float32))
        assert enc.residual.tolist() == [0.25, 0.25]
        return share.state_dict()

    with cluster(0) as made:
        nodes = [made.node(rank) for rank in range(2)]
        workers = [made.start(node, lambda n=node, r=r: work(n, r)) for r, node in enumerate(nodes)]
        made.run()
    state = workers[0].result
    assert state["encoders"][0]["residual"].tolist() == [0.75, 0.25]
    assert state["step"] == 0


# --- another number of workers ----------------------------------------------------------------------------------------


def states_of(residuals: list[list[float]], **changes: Any) -> list[dict[str, Any]]:
    states = []
    with cluster(0) as made:
        for rank, residual in enumerate(residuals):
            enc = gw.Encoder(len(residual), 1.0)
            enc.residual[:] = residual
            states.append({**gw.Exchange(enc, made.node(rank)).state_dict(), **changes})
    return states


def residuals_of(states: list[dict[str, Any]]) -> list[list[float]]:
    return [state["encoders"][0]["residual"].tolist() for state in states]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_what_was_not_sent_survives_another_number_of_workers(world_size: int) -> None:
    old = [[0.5, 0.25], [0.125, -0.5], [0.0, 0.75]]
    new = residuals_of(redistribute(states_of(old), world_size, reduction="sum"))
    assert len(new) == world_size
    np.testing.assert_array_equal(np.sum(new, axis=0), np.sum(old, axis=0))
    average = residuals_of(redistribute(states_of(old), world_size))
    np.testing.assert_allclose(np.mean(average, axis=0), np.mean(old, axis=0), rtol=1e-6)


def test_fewer_workers_go_on_where_more_stopped() -> None:
    summed = {"reduction": "sum"}
    first = train(range(6), summed, [None, None, None])
    params = first[0][0]
    states = redistribute([state for _, state in first], 2, **summed)
    second = train(range(6, 9), summed, [(params, states[0]), (params, states[1])])
    assert second[0][0].tobytes() == second[1][0].tobytes()
    assert second[0][1]["step"] == 9
    put_in = sum(update(rank, step).astype(np.float64) for rank in range(3) for step in range(6))
    put_in += sum(update(rank, step) for rank in range(2) for step in range(6, 9))
    start = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    kept = np.sum(residuals_of([state for _, state in second]), axis=0)
    np.testing.assert_allclose(second[0][0] - start + kept, put_in, atol=1e-4)


@pytest.mark.parametrize("merges", [False, True])
def test_fewer_nodes_without_the_residuals_of_the_others_say_so(
    merges: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(range(6), {}, [None, None, None])
    params = first[0][0]
    states = [state for _, state in first]
    assert [state["nodes"] for state in states] == [3, 3, 3]
    if merges:
        states = redistribute(states, 2)
    second = train(range(6, 9), {}, [(params, state) for state in states[:2]])
    assert [state["nodes"] for _, state in second] == [2, 2]
    text = "3 nodes have saved the checkpoint, and 2 begin with it: the residuals of the others are"
    assert caplog.text.count(text) == (0 if merges else 2)


def test_states_that_do_not_belong_together_are_refused() -> None:
    good = states_of([[0.0], [0.0]])
    for bad, complaint in (
        ([], "no states"),
        ([good[0], {**good[1], "step": 3}], "different steps"),
        ([good[0], *states_of([[0.0, 0.0]])], "different steps or models"),
        ([{**good[0], "local_steps": 2}], "2 local steps"),
        ([{**good[0], "format": 99}], "format 99"),
        ([{"exchange": good[0]}], r'give state\["exchange"\]'),
        ([good[0], {"step_number": 0}], "of another local rank than 0.* number of machines"),
    ):
        with pytest.raises(ValueError, match=complaint):
            redistribute(bad, 1)
    with pytest.raises(ValueError, match="world_size must be a whole number of at least 1, got 0"):
        redistribute(good, 0)


def test_the_state_of_one_worker_is_not_merged_twice() -> None:
    states = states_of([[0.5, 0.0], [0.25, 0.0], [0.0, 0.0], [0.0, 0.0]])
    redistribute(states, 2)
    with pytest.raises(ValueError, match="states 1 and 4 are of the same worker"):
        redistribute([*states, copy.deepcopy(states[1])], 2)
    # Nodes that train with the same data may have the same residual.
    redistribute([*states, {**states[1], "saved_by": "another node"}], 2)


def test_a_state_that_does_not_fit_is_refused() -> None:
    [state] = states_of([[0.0, 0.0]])
    with cluster(0) as made:
        node = made.node(1)
        for share, complaint in (
            (gw.Exchange(gw.Encoder(3, 1.0), node), r"float32\[3\]"),
            (
                gw.Exchange(gw.Groups.of([np.zeros((2, 1)), np.zeros(1)], dense_below=1), node),
                r"encoders of \[2\] elements, this exchange of \[2, 1\]",
            ),
        ):
            with pytest.raises(ValueError, match=complaint):
                share.load_state_dict(state)
        begun = gw.Exchange(gw.Encoder(2, 1.0), node, min_peers=0)
        begun.step(np.zeros(2, np.float32), np.zeros(2, np.float32))
        with pytest.raises(RuntimeError, match="begun"):
            begun.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("encoders", value) for value in (None, [1.0], np.zeros(2), [{}])],
        *[(name, None) for name in ("numel", "dtype", "residual", "threshold", "step")],
        ("residual", np.full(2, np.nan, np.float32)),
        ("residual", np.zeros(3, np.float32)),
    ],
    ids=repr,
)
def test_a_damaged_state_is_not_redistributed(name: str, value: Any) -> None:
    states = states_of([[0.5, 0.0], [0.25, 0.0]])
    damaged = copy.deepcopy(states[1])
    (damaged if name in damaged and name != "step" else damaged["encoders"][0])[name] = value
    with pytest.raises((TypeError, ValueError)):
        redistribute([states[0], damaged], 1)
    if name in ("numel", "dtype"):
        del damaged["encoders"][0][name]
        with pytest.raises(ValueError, match="this encoder of"):
            redistribute([states[0], damaged], 1)
    assert len(redistribute((state for state in states), 1)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, [], "text"])
def test_a_state_of_another_kind_is_refused(state: Any) -> None:
    with cluster(0) as made:
        for owner in (gw.Encoder(2), gw.Exchange(gw.Encoder(2), made.node(1))):
            with pytest.raises(TypeError, match=r"must be a dict from state_dict\(\), got"):
                owner.load_state_dict(state)
        with pytest.raises(TypeError, match="states must be a list of dicts"):
            redistribute([state], 1)


def test_nothing_is_loaded_of_a_state_that_fits_one_encoder_only() -> None:
    with cluster(0) as made:
        encoders = [gw.Encoder(2, 1.0), gw.Encoder(3, 1.0, key=1)]
        groups = gw.Groups([Group(encoders[0], (0,)), Group(encoders[1], (1,))])
        share = gw.Exchange(groups, made.node(1))
        state = share.state_dict()
        state["encoders"][0]["residual"][:] = 7.0
        for others in ([], [{}], state["encoders"][:1]):
            with pytest.raises(ValueError, match=r"has 1 encoders|format None|float32"):
                share.load_state_dict({**state, "encoders": [state["encoders"][0], *others]})
        assert not encoders[0].residual.any()


def divided(*tensors: tuple[int, ...]) -> gw.Groups:
    """Return groups of three arrays with 20, 5 and 10 elements, and thresholds of 1, 2, ..."""
    sizes = (20, 5, 10, 1)
    return gw.Groups(
        [
            Group(gw.Encoder(sum(sizes[index] for index in indices), 1.0 + key, key=key), indices)
            for key, indices in enumerate(tensors)
        ]
    )


@pytest.mark.parametrize("options", [{}, {"every": 2}], ids=str)
def test_a_state_goes_on_with_other_groups(options: Any) -> None:
    updates = [np.random.default_rng(n).normal(0, 0.4, n).astype(np.float32) for n in (20, 5, 10)]
    with cluster(0) as made:
        options |= {"min_peers": 0, "apply_residual": True}
        share = gw.Exchange(divided((0, 2), (1,)), made.node(1), **options)
        params = [np.zeros_like(update) for update in updates]
        for _ in range(4):
            share.step(updates, params)
        state = share.state_dict(params)
        sums = list(params_of(state))
        for tensors, thresholds in (
            ([(0, 1, 2)], [1.0]),
            ([(1,), (0, 2)], [2.0, 1.0]),
            ([(2, 1), (0,)], [1.0, 1.0]),
        ):
            again = gw.Exchange(divided(*tensors), made.node(1), **options)
            again.load_state_dict(copy.deepcopy(state))
            now = again.state_dict()
            for expected, array in zip(sums, params_of(now), strict=True):
                np.testing.assert_array_equal(array, expected)
            assert [encoder["threshold"] for encoder in now["encoders"]] == thresholds
        fewer = gw.Exchange(divided((0,), (1,)), made.node(1), **options)
        more = gw.Exchange(divided((0, 1), (2,), (3,)), made.node(1), **options)
        for share in (fewer, more):
            with pytest.raises(ValueError, match="3 arrays"):
                share.load_state_dict(copy.deepcopy(state))


def test_another_number_of_local_steps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(0) as made:
        share = gw.Exchange(gw.Encoder(2, 1.0), made.node(1), min_peers=0, every=4)
        params = np.zeros(2, np.float32)
        for _ in range(6):
            share.step(np.ones(2, np.float32), params)
        state = share.state_dict(params)
        for every, number in ((4, 6), (3, 5), (15, 17)):
            caplog.clear()
            again = gw.Exchange(gw.Encoder(2, 1.0), made.node(1), min_peers=0, every=every)
            again.load_state_dict(copy.deepcopy(state))
            assert again.step_number == number
            assert ("saved at step 6, with another number" in caplog.text) == (every != 4)
            with caplog.at_level(logging.INFO):
                again.join(params.copy())
            assert f"begins at step {number}" in caplog.text.splitlines()[-1]


def test_a_state_that_lacks_something_is_refused() -> None:
    [state] = states_of([[0.0, 0.0]])
    del state["shared"]
    with cluster(0) as made, pytest.raises(ValueError, match="lacks shared"):
        gw.Exchange(gw.Encoder(2, 1.0), made.node(1)).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"outer_velocity": [np.full(6, np.nan, np.float32)]},
        {"outer_velocity": [np.zeros(3, np.float32)]},
        {"outer_velocity": [np.zeros(6, np.int64)]},
        {"outer_velocity": [np.zeros(6, ">f4")]},
        {"shared": [np.full(6, np.inf, np.float32)]},
        {"shared": [None]},
        {"shared": [np.full(6, "x")]},
        {"shared": None},
        {"step": -1},
        {"step": "3"},
        {"step": None},
        {"step_number": None},
        {"step_number": "1"},
        {"local_steps": 1.5},
        {"step": 2**64},
        {"agreement": []},
        {"agreement": [1.0, float("nan"), 1.0]},
        {"agreement": [10**400, 1.0, 1.0]},
        {"median": 10**400},
        {"agreement": "x"},
        {"last_updates": None},
        {"last_updates": ["x"]},
        {"last_updates": [np.full(6, np.nan)]},
        {"last_updates": [np.zeros((1, 6))]},
        {"shared": [np.zeros(6)], "outer_velocity": [np.zeros((2, 3), np.float32)]},
        {"owner": {}},
        {"owner": {"parts": 2, "place": 2, "groups": [0], "encoders": [{}]}},
        {"encoders": None},
        {"encoders": [None]},
        {"tensors": 3},
        {"training": 5},
        {"nodes": -1},
        {"nodes": "x"},
    ],
    ids=str,
)
def test_damaged_values_are_refused_before_anything_is_loaded(damage: dict[str, Any]) -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:

        def exchange() -> gw.Exchange:
            encoder = gw.Encoder(6, threshold=0.5)
            return gw.Exchange(encoder, node, min_peers=0, outer_momentum=0.5)

        saved = exchange()
        saved.step(np.ones(6, np.float32), np.zeros(6, np.float32))
        resumed = exchange()
        before = pickle.dumps(resumed.state_dict())
        with pytest.raises(ValueError, match=r"\w"):
            resumed.load_state_dict({**saved.state_dict(), **damage})
        assert pickle.dumps(resumed.state_dict()) == before


@pytest.mark.parametrize(
    "moved", [None, 7, ["x"], [None], [np.full(3, np.nan)], [np.zeros((1, 3))]]
)
def test_a_leader_loads_nothing_of_a_damaged_state(moved: Any) -> None:
    with (
        gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node,
        gw.LocalTeam(f"damaged{os.getpid()}", size=1, rank=0) as team,
    ):
        lead = team.lead(gw.Exchange(gw.Encoder(6, threshold=0.5), node, min_peers=0))
        state = lead.state_dict()
        state["encoders"][0]["residual"][:] = 1.0
        before = pickle.dumps(lead.state_dict())
        with pytest.raises(ValueError, match="moved"):
            lead.load_state_dict({**state, "moved": moved})
        assert pickle.dumps(lead.state_dict()) == before
        lead.load_state_dict({**state, "moved": [np.zeros(3)]})


@pytest.mark.parametrize("number", [None, "7", -3, 1.5, True], ids=repr)
def test_a_worker_of_a_team_loads_no_number_that_is_none(number: Any) -> None:
    with gw.LocalTeam(f"number{os.getpid()}", size=2, rank=1) as team:
        worker = team.follow()
        with pytest.raises(ValueError, match="step_number must be a whole number"):
            worker.load_state_dict({"step_number": number})
        with pytest.raises(TypeError, match="must be a dict"):
            worker.load_state_dict(number)
        worker.load_state_dict({"step_number": 3})
        assert worker.state_dict() == {"step_number": 3}


def test_a_state_of_a_team_s_other_ranks_makes_no_node_go_on() -> None:
    state = {"step_number": 3}
    with cluster(0) as made:
        share = gw.Exchange(gw.Encoder(2, 1.0), made.node(1), min_peers=0)
        with pytest.raises(ValueError, match=r"another local rank than 0.*redistribute takes"):
            share.load_state_dict(state)


def test_a_state_whose_arrays_became_lists_loads_nothing_or_all_of_itself() -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:

        def exchange() -> gw.Exchange:
            encoder = gw.Encoder(3, threshold=0.5, dtype="float64")
            return gw.Exchange(encoder, node, min_peers=0, apply_residual=True)

        saved, params = exchange(), np.zeros(3)
        saved.step(np.array([0.75, 0.25, -0.5]), params)
        state = saved.state_dict(params)
        lists = {**state, "shared": [array.tolist() for array in state["shared"]]}
        resumed = exchange()
        resumed.load_state_dict(lists)
        again = resumed.state_dict()
        assert [array.tolist() for array in again["shared"]] == lists["shared"]
        assert again["encoders"][0]["residual"].tolist() == [0.25, 0.25, 0.0]


def test_a_state_whose_numbers_became_numpy_s_goes_on() -> None:
    update = np.array([0.75, 0.25, -0.5], np.float32)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:

        def exchange() -> gw.Exchange:
            return gw.Exchange(gw.Encoder(3, threshold=0.5), node, min_peers=0, every=2)

        saved, params = exchange(), np.zeros(3, np.float32)
        for _ in range(3):
            saved.step(update, params)
        state = saved.state_dict(params)
        resumed = exchange()
        names = "step", "local_steps", "step_number"
        resumed.load_state_dict({**state, **{name: np.int64(state[name]) for name in names}})
        assert resumed.step_number == 3
        # Their introductions carry the number of the step as JSON.
        assert resumed.step(update, params).step == 1


def test_what_has_connections_or_shared_memory_refuses_to_be_copied() -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        share = gw.Exchange(gw.Encoder(2, 1.0), node, min_peers=0)
        with gw.LocalTeam(f"copied-{os.getpid()}", size=1, rank=0) as team:
            local = team.lead(share)
            for thing in (node, share, team, local):
                for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=f"a {type(thing).__name__} is not copied"):
                        copied(thing)


def test_a_state_of_another_way_to_hold_the_residual_is_refused() -> None:
    with cluster(0) as made:
        with_it = gw.Exchange(gw.Encoder(2, 1.0), made.node(1), apply_residual=True)
        without = gw.Exchange(gw.Encoder(2, 1.0), made.node(2))
        with pytest.raises(ValueError, match="apply_residual=True, this one has False"):
            without.load_state_dict(with_it.state_dict())
        with pytest.raises(ValueError, match="apply_residual=False, this one has True"):
            with_it.load_state_dict(without.state_dict())


def test_a_state_with_the_parameters_says_exactly_what_they_hold() -> None:
    """Shared + residual are the parameters, up to the rounding of that sum."""
    with cluster(0) as made:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.TargetDensity(0.1)), made.node(1), min_peers=0, apply_residual=True
        )
        params = np.ones(NUMEL, np.float32)
        share.join(params)
        for step in range(5):
            params += update(0, step)
            share.step_moved(params)
        state = share.state_dict([params])
        expected = params - share.shared(params)[0]
        np.testing.assert_array_equal(state["encoders"][0]["residual"], expected)
        np.testing.assert_allclose(next(params_of(state)), params, rtol=1e-6, atol=1e-6)


def test_a_state_takes_the_parameters_as_one_array_too() -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        share = gw.Exchange(gw.Encoder(24, 1.0), node, min_peers=0, apply_residual=True)
        params = np.zeros(24, np.float32)
        share.join(params)
        params += 0.25
        share.step_moved(params)
        states = [share.state_dict(given) for given in (params, [params])]
    for state in states:
        np.testing.assert_array_equal(state["encoders"][0]["residual"], params)


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on after it", "dies with it"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "async", "topology": "mesh"},
        {"topology": "sharded"},
        {"every": 2},
        {"apply_residual": True, "moves": True},
        {"apply_residual": True, "moves": True, "topology": "sharded"},
        {"apply_residual": True, "moves": True, "every": 2, "overlap": 1},
        {"apply_residual": True, "moves": True, "keeps_residual": False},
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_what_a_node_has_sent_after_its_checkpoint_does_not_count_twice(
    options: dict[str, Any], goes_on: bool
) -> None:
    """Its file holds a residual, which the others have had when it comes back if it went on after the save."""
    others: dict[str, Any] = {"topology": "mesh", **options}
    moves, keeps = others.pop("moves", False), others.pop("keeps_residual", True)
    updates = 8 if goes_on else 6  # of a quarter: at the end of six of them half an update is left
    saves_after, dies_after = (6, 14) if goes_on else (14, 14)
    files: list[Any] = []
    ended: list[NDArray[np.float32]] = []

    def train(
        node: FakeNode, calls: range, share: gw.Exchange, params: NDArray[np.float32]
    ) -> None:
        for count in calls:
            world.compute(node, 0.1)
            change = np.full(
                NUMEL, 0.25 if count < updates and node.peer.id == 2 else 0.0, np.float32
            )
            if moves:
                params += change
                share.step_moved(params)
            else:
                share.step(change, params)
            if node.peer.id == 2 and count + 1 == saves_after:
                share.catch_up(params)
                files.append(copy.deepcopy((params, share.state_dict(params))))

    def begin(node: FakeNode) -> tuple[gw.Exchange, NDArray[np.float32]]:
        encoder = gw.Encoder(NUMEL, 1.0, keeps_residual=keeps)
        share = gw.Exchange(encoder, node, min_peers=1, reduction="sum", timeout_s=20.0, **others)
        params = np.zeros(NUMEL, np.float32)
        if node.peer.id == 2 and files:
            params, state = copy.deepcopy(files[0])
            share.load_state_dict(state)
        assert share.join(params).is_late == bool(files)
        return share, params

    def stay(node: FakeNode) -> None:
        share, params = begin(node)
        train(node, range(80), share, params)
        share.leave(params)  # with what others have sent it as an owner
        ended.append(share.shared(params)[0])
        world.close(node)

    def die(node: FakeNode) -> None:
        train(node, range(dies_after), *begin(node))
        world.kill(node)

    def come_back(node: FakeNode) -> None:
        share, params = begin(node)
        train(node, range(dies_after, dies_after + 6), share, params)
        share.leave(params)
        world.close(node)

    with cluster(5) as world:
        nodes = [world.node(number) for number in (2, 1)]
        world.start(nodes[1], lambda: stay(nodes[1]))
        first = world.start(nodes[0], lambda: die(nodes[0]))
        world.run(until=lambda: first.is_done)
        again = world.node(2)
        world.start(again, lambda: come_back(again))
        world.run()
    np.testing.assert_array_equal(ended[0], np.full(NUMEL, updates / 4, np.float32))


@pytest.mark.parametrize("apply_residual", [False, True])
@pytest.mark.parametrize("equalize", [False, True])
def test_asynchronous_nodes_that_saved_with_messages_on_their_way_begin_alike(
    equalize: bool, apply_residual: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def resume(node: FakeNode, rank: int, starts: list[Any]) -> Any:
        encoder = gw.Encoder(NUMEL, 0.5)
        options: dict[str, Any] = {"mode": "async", "apply_residual": apply_residual}
        share = gw.Exchange(encoder, node, min_peers=2, timeout_s=20.0, **options)
        params = np.zeros(NUMEL, np.float32)
        if starts:
            params, state = copy.deepcopy(starts[rank])
            share.load_state_dict(state)
        assert not share.join(params, equalize=equalize).is_late
        begun = share.shared(params)[0].copy()
        for step in range(4):
            share.step(update(rank, step), params)
        saved = copy.deepcopy((params, share.state_dict(params)))
        for _ in range(40):
            share.catch_up(params, timeout_s=0.05)
        return begun, saved, share.shared(params)[0]

    first = run_cluster(lambda node, rank: resume(node, rank, []), seed=3)
    starts = [saved for _, saved, _ in first]
    assert not np.array_equal(starts[0][0], starts[1][0]), "messages must be on their way"
    caplog.clear()
    second = run_cluster(lambda node, rank: resume(node, rank, starts), seed=4)
    is_equal = all(np.array_equal(begun, second[0][0]) for begun, _, _ in second)
    assert is_equal == equalize
    assert ("checkpoints whose parameters differ" in caplog.text) == (not equalize)
    for _, _, ended in second:
        assert np.allclose(ended, second[0][2], atol=1e-5) == (equalize or ended is second[0][2])


@pytest.mark.parametrize("topology", ["sharded", "mesh"])
def test_the_sums_that_an_owner_had_kept_count_in_full_where_it_comes_late(topology: Any) -> None:
    """They go into its residual, and from there to other owners, or in the mesh to all nodes."""

    def share_of(node: FakeNode, topology: Any, peers: int) -> gw.Exchange:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(1.0))
        return gw.Exchange(encoder, node, topology=topology, min_peers=peers, timeout_s=30.0)

    def save(node: FakeNode, rank: int) -> dict[str, Any]:
        share = share_of(node, "sharded", 2)
        params = np.zeros(NUMEL, np.float32)
        share.step(np.full(NUMEL, 1.0 if rank == 0 else 0.0, np.float32), params)
        assert not params.any()  # the owners have all of it
        return share.state_dict()

    def resume(node: FakeNode, state: dict[str, Any]) -> None:
        share = share_of(node, topology, 1)
        share.load_state_dict(state)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        while share.next_step < 40:
            share.step(np.zeros(NUMEL, np.float32), params)
            node.cluster.compute(node, 0.1)
        ends[node.peer.id] = params.copy(), share.state_dict()
        share.leave(params)

    states = run_cluster(save, seed=1)
    kept = np.zeros(NUMEL)
    add_owner_state(states[2]["owner"], [kept], 1.0)
    ends: dict[int, tuple[NDArray[Any], dict[str, Any]]] = {}
    with cluster(1) as world:

        def begin(node_id: int, state: dict[str, Any]) -> None:
            node = world.node(node_id)
            world.start(node, lambda: resume(node, state))

        begin(10, states[0])
        begin(20, states[1])
        world.plan(60, lambda: begin(30, states[2]))
        world.run()
    unsent = np.zeros(NUMEL)
    for _, state in ends.values():
        unsent += state["encoders"][0]["residual"] / 3
        add_owner_state(state["owner"], [unsent], 1.0)
    params, _ = ends[10]
    assert kept.any()
    np.testing.assert_allclose((params + unsent)[kept != 0], kept[kept != 0], rtol=1e-6)
