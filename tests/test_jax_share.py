"""An optax transformation shares its updates: the same parameters on all nodes, at the scale of the optimiser."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
optax: Any = pytest.importorskip("optax", reason="optax is not installed")

import gradwire as gw  # noqa: E402
import gradwire.jax  # noqa: E402
from gradwire.agreement import Agreement  # noqa: E402

pytestmark = pytest.mark.jax


@contextmanager
def two_nodes() -> Iterator[list[gw.Node]]:
    with (
        gw.Node("127.0.0.1:0", secret=bytes(range(32)), node_id=1) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=bytes(range(32)), node_id=2) as two,
    ):
        one.expected_peers = two.expected_peers = 1
        yield [one, two]


@pytest.mark.parametrize("make", [optax.adamw, optax.sgd], ids=["adamw", "sgd"])
def test_nodes_learn_together_with_optax(make: Any) -> None:
    def loss(params: Any, inputs: Any) -> Any:
        return ((inputs @ params["weights"] + params["bias"] - inputs[:, :2]) ** 2).mean()

    def train(rank: int) -> Any:
        rng = np.random.default_rng(rank)
        params = {"weights": jax.numpy.full((6, 2), 0.5 * rank), "bias": jax.numpy.zeros(2)}
        optimizer = gradwire.jax.share(make(0.05), node=nodes[rank], density=0.25)
        state, losses = optimizer.init(params), []
        for _ in range(80):
            inputs = jax.numpy.asarray(rng.standard_normal((16, 6)), "float32")
            value, gradients = jax.value_and_grad(loss)(params, inputs)
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        return losses, params

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        (losses, params), (_, others) = pool.map(train, range(2))
    assert np.mean(losses[-10:]) < 0.3 * np.mean(losses[:10])
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=0.1)  # but for both residuals


def test_a_fast_head_does_not_stay_behind_where_its_path_has_a_density() -> None:
    rates = {"slow": optax.adam(1e-5), "fast": optax.adam(1e-3)}
    params: Any = {
        "backbone": [jax.numpy.zeros(100_000), jax.numpy.zeros(1)],
        "head": {"kernel": jax.numpy.zeros(200)},
    }
    labels = {"backbone": ["slow", "slow"], "head": {"kernel": "fast"}}
    inner = optax.multi_transform(rates, labels)
    with gradwire.jax.share(inner, density={"head/kernel": 0.05, "backbone/1": "dense"}) as shared:
        state = shared.init(params)
        rng = np.random.default_rng(0)
        for _ in range(100):
            gradients = jax.tree.map(lambda p: 1.0 + 0.3 * rng.standard_normal(p.shape), params)
            updates, state = shared.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        # The model has this node's residual, so this is what was sent of what it has moved by.
        sent = shared.shared()["head"]["kernel"].mean() / params["head"]["kernel"].mean()
    assert 0.6 < sent < 1.1
    with pytest.raises(ValueError, match="names are backbone/0, backbone/1, head/kernel"):
        gradwire.jax.share(inner, density={"kernel": 0.05}).init(params)


@pytest.mark.parametrize(("make", "default"), [(optax.adamw, 0.05), (optax.sgd, 0.01)])
def test_adaptive_optimizers_have_a_higher_default_density(
    make: Any, default: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    make_training = gradwire.sharing.TrainingMaker.make

    def keep(maker: Any, named: Any) -> Any:
        made.append(make_training(maker, named))
        return made[-1]

    monkeypatch.setattr(gradwire.sharing.TrainingMaker, "make", keep)
    gradwire.jax.share(make(0.05)).init(jax.numpy.zeros(2_000_000))
    assert made[0].exchange._groups.encoders[0].policy.density == default


@pytest.mark.parametrize(("make", "momentum"), [(optax.adamw, 0.9), (optax.rmsprop, 0.0)])
def test_what_adam_s_momentum_repeats_is_not_measured(
    make: Any, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    start = Agreement.start

    def keep(agreement: Agreement, momentum: float = 0.0) -> None:
        begun.append(momentum)
        start(agreement, momentum)

    monkeypatch.setattr(Agreement, "start", keep)
    with gradwire.jax.share(make(0.05), density=0.5) as optimizer:
        optimizer.init(jax.numpy.zeros(4))
        optimizer.join()
    assert begun == [momentum]


@pytest.mark.parametrize("at", [0, 1, 8])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_parameters_that_were_restored_stay(at: int, ranks: tuple[int, ...]) -> None:
    saved = {"weights": jax.numpy.full((6, 2), 3.0), "bias": jax.numpy.arange(2.0)}

    def train(rank: int) -> Any:
        params = {"weights": jax.numpy.full((6, 2), 0.5 * rank), "bias": jax.numpy.zeros(2)}
        optimizer = gradwire.jax.share(optax.sgd(1e-6), node=nodes[rank], codec="dense")
        state = optimizer.init(params)
        for step in range(12):
            if step == at and rank in ranks:
                params = saved
            gradients = jax.tree.map(jax.numpy.ones_like, params)
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(train, range(2)))
    share = len(ranks) / 2  # one of two nodes moves the mean half of the way, from zeros
    for params in outcomes:
        np.testing.assert_allclose(params["weights"], 3.0 * share, atol=1e-3)
        np.testing.assert_allclose(params["bias"], share * np.arange(2.0), atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.multi_transform({"all": optax.adam(1e-3)}, lambda _: "all"),
        lambda: optax.named_chain(("first", optax.clip(1.0)), ("second", optax.adamw(1e-3))),
        optax.contrib.prodigy,
    ],
    ids=["multi_transform", "named_chain", "prodigy"],
)
def test_an_adaptive_optimizer_is_found_inside_others(make: Any) -> None:
    params = {"weights": jax.numpy.zeros(3_000_000)}
    with gradwire.jax.share(make()) as optimizer:
        optimizer.init(params)
        [encoder] = optimizer.init.__self__._training.exchange._groups.encoders
        assert encoder.policy.density == 0.05


def test_parameters_that_are_written_in_place_before_the_first_update_stay() -> None:
    params = {"weights": np.ones(6, np.float32)}
    with gradwire.jax.share(optax.sgd(0.5), codec="dense") as optimizer:
        state = optimizer.init(params)
        params["weights"][...] = 5.0
        updates, _ = optimizer.update({"weights": np.ones(6, np.float32)}, state, params)
        np.testing.assert_array_equal(optax.apply_updates(params, updates)["weights"], 4.5)


@pytest.mark.parametrize("leaf", [np.ones((3, 2), np.float32).T, np.full((2, 3), 0.1)])
def test_parameters_may_be_any_array_of_numpy_s(leaf: Any) -> None:
    """A training has them as JAX computes with them: in float32, and without gaps."""
    with gradwire.jax.share(optax.sgd(0.5), codec="dense") as shared:
        state = shared.init({"weight": leaf})
        params = shared.join()
        assert params["weight"].dtype == np.float32
        updates, state = shared.update({"weight": np.ones((2, 3))}, state, {"weight": leaf})
        saved = shared.state_dict()
    np.testing.assert_allclose(optax.apply_updates(params, updates)["weight"], leaf - 0.5, 0.01)
    with gradwire.jax.share(optax.sgd(0.5), codec="dense") as shared:
        shared.init(params)
        shared.load_state_dict(saved)


def test_parameters_that_no_sum_can_change_are_refused() -> None:
    params = {"mask": jax.numpy.asarray([0.0, -jax.numpy.inf]), "weights": jax.numpy.ones(3)}
    with pytest.raises(ValueError, match="1 elements of mask are NaN or infinite"):
        gradwire.jax.share(optax.sgd(0.5)).init(params)


@pytest.mark.parametrize("more", [{"phase": "warm"}, {"is_last": True}])
def test_an_optimizer_may_take_texts_and_flags(more: dict[str, Any]) -> None:
    def update(updates: Any, state: Any, _params: Any = None, **further: Any) -> Any:
        scale = 2.0 if further.get("phase") == "warm" or further.get("is_last") else 1.0
        return jax.tree.map(lambda leaf: scale * leaf, updates), state

    made = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    with gradwire.jax.share(made, codec="dense") as optimizer:
        state = optimizer.init(jax.numpy.zeros(4))
        updates, _ = optimizer.update(jax.numpy.ones(4), state, jax.numpy.zeros(4), **more)
    np.testing.assert_array_equal(updates, 2.0)


def test_what_cannot_be_shared_is_refused_and_ends_no_training() -> None:
    params = {"head": {"kernel": jax.numpy.ones(6)}}
    gradients = jax.tree.map(jax.numpy.ones_like, params)
    with gradwire.jax.share(optax.sgd(0.5)) as optimizer:
        state = optimizer.init(params)
        _, state = optimizer.update(gradients, state, params)
        for call in (jax.eval_shape, lambda init, tree: jax.jit(init)(tree)):
            with pytest.raises(TypeError, match=r"outside jax\.jit"):
                call(optimizer.init, params)
        with pytest.raises(TypeError, match="head/kernel is bfloat16"):
            optimizer.init(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params))
        calls: list[Any] = [
            jax.jit(optimizer.update),
            # A function that closes over its arrays is traced as well.
            jax.jit(lambda *_: optimizer.update(gradients, state, params)),
        ]
        for traced in calls:
            with pytest.raises(TypeError, match=r"put share around optax\.MultiSteps"):
                traced(gradients, state, params)
        halves = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
        with pytest.raises(TypeError, match=r"head/kernel is bfloat16.*master copy"):
            optimizer.update(gradients, state, halves)
        with pytest.raises(TypeError, match=r"count is int32.*leave out what is not trained"):
            optimizer.init({"count": jax.numpy.arange(3)})
        updates, _ = optimizer.update(gradients, state, params)
        assert optimizer.result.step == 1
        assert float(updates["head"]["kernel"][0]) < 0.0


@pytest.mark.parametrize("factor", [2.0, "auto"])
def test_an_optimizer_that_needs_the_loss_gets_it(factor: Any) -> None:
    reduce = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    make = optax.chain(optax.adamw(0.01), reduce)
    params, gradients = jax.numpy.ones(6), jax.numpy.ones(6)
    alone, expected = make.init(params), params
    with gradwire.jax.share(make, update_scale=factor, codec="dense") as optimizer:
        state = optimizer.init(params)
        for _ in range(12):
            updates, state = optimizer.update(gradients, state, params, value=1.0)
            params = optax.apply_updates(params, updates)
            updates, alone = make.update(gradients, alone, expected, value=1.0)
            expected = optax.apply_updates(expected, updates)
    assert float(state.inner[1].scale) == float(alone[1].scale) < 1.0
    moved = float(params[0]) - 1.0, float(expected[0]) - 1.0
    assert moved[0] == pytest.approx(moved[1] * (1.0 if factor == "auto" else factor), rel=0.01)


def test_an_optimizer_of_which_decay_cannot_be_told_needs_a_factor_of_one() -> None:
    params = optax.LookaheadParams.init_synced({"weights": jax.numpy.ones((3, 2))})
    make = optax.lookahead(optax.adamw(0.1), 2, 0.5)
    with (
        gradwire.jax.share(make) as optimizer,
        pytest.raises(ValueError, match=r"update_scale=1\.0"),
    ):
        optimizer.init(params)
    with gradwire.jax.share(make, update_scale=1.0, codec="dense") as optimizer:
        state = optimizer.init(params)
        alone, expected = make.init(params), params
        for _ in range(5):
            updates, state = optimizer.update(params.fast, state, params)
            params = optax.apply_updates(params, updates)
            updates, alone = jax.jit(make.update)(expected.fast, alone, expected)
            expected = optax.apply_updates(expected, updates)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_line_search_takes_its_function() -> None:
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=15)

    def loss(params: Any) -> Any:
        return (params**2).sum()

    params = jax.numpy.full(4, 3.0)
    with gradwire.jax.share(optax.chain(optax.sgd(1.0), search), codec="dense") as optimizer:
        state = optimizer.init(params)
        for _ in range(5):
            value, gradient = jax.value_and_grad(loss)(params)
            further = {"value": value, "grad": gradient, "value_fn": loss}
            updates, state = optimizer.update(gradient, state, params, **further)
            params = optax.apply_updates(params, updates)
    assert float(loss(params)) < 1.0  # of 36


def test_an_optimizer_is_compiled() -> None:
    calls = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        calls.append(params)
        return jax.tree.map(lambda leaf: -leaf, updates), state

    params = jax.numpy.zeros(4)
    made = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    with gradwire.jax.share(made, codec="dense") as optimizer:
        state = optimizer.init(params)
        for _ in range(5):
            updates, state = optimizer.update(jax.numpy.ones(4), state, params)
            params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params, np.full(4, -5.0))
    assert len(calls) == 1


def test_parameters_stay_on_their_devices() -> None:
    device = jax.devices()[0]
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array([device]), ("data",)), jax.sharding.PartitionSpec("data")
    )
    params = jax.device_put(jax.numpy.ones(8), sharding)
    with gradwire.jax.share(optax.sgd(0.1)) as optimizer:
        state = optimizer.init(params)
        updates, _ = optimizer.update(params, state, optimizer.join())
        for given in (updates, optimizer.join(), optimizer.shared()):
            assert given.sharding == sharding
            assert given.committed


def as_variables(tree: Any) -> Any:
    """Return a tree whose arrays are parts of nodes, as the variables of flax's nnx are."""
    return jax.tree.map(lambda leaf: jax.tree_util.Partial(max, leaf), tree)


def test_an_optimizer_that_began_with_variables_goes_on_with_their_values() -> None:
    """As flax's nnx.Optimizer does: its state has variables, and ``update`` gets the values of all."""

    def train(begin: Any) -> Any:
        params = {"kernel": jax.numpy.ones((6, 2)), "scale": jax.numpy.ones(())}
        with gradwire.jax.share(optax.adamw(0.1, weight_decay=0.5), update_scale=0.5) as optimizer:
            given = optimizer.init(begin(params))
            state = jax.tree.unflatten(
                jax.tree.structure(optimizer_state(params)), jax.tree.leaves(given)
            )
            for _ in range(3):
                gradients = jax.tree.map(lambda leaf: 0.1 * leaf, params)
                updates, state = optimizer.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
            assert jax.tree.structure(optimizer.shared()) == jax.tree.structure(begin(params))
        return params, state

    def optimizer_state(params: Any) -> Any:
        with gradwire.jax.share(optax.adamw(0.1, weight_decay=0.5), update_scale=0.5) as optimizer:
            return optimizer.init(params)

    expected, actual = train(lambda params: params), train(as_variables)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_who_leaves_sends_the_rest_of_its_updates() -> None:
    def work(rank: int) -> Any:
        optimizer = gradwire.jax.share(optax.sgd(1.0), node=nodes[rank], density=0.25)
        params = jax.numpy.zeros(64)
        state = optimizer.init(params)
        gradient = jax.numpy.arange(64.0) * (rank + 1) / 1024
        for _ in range(3):
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return optimizer.leave()

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        one, two = pool.map(work, range(2))
    np.testing.assert_allclose(one, two, atol=1e-6)
    np.testing.assert_allclose(one, -4.5 * np.arange(64.0) / 1024, atol=1e-5)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="update_scale"):
        gradwire.jax.share(optax.sgd(0.1), update_scale=-1.0)
    optimizer = gradwire.jax.share(optax.sgd(0.1), density=0.5)
    params = jax.numpy.zeros(4)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(params, state)
    for nothing in ({}, None, {"params": [np.zeros(4)], "exchange": {}}):
        with pytest.raises(ValueError, match=r"the state|a state"):
            optimizer.load_state_dict(nothing)
    for strange in ("adam", None, optax.GradientTransformation):
        with pytest.raises(TypeError, match="GradientTransformation"):
            gradwire.jax.share(strange)
    with pytest.raises(TypeError, match="parameters must be arrays"):
        optimizer.init({"w": "x"})


def test_arrays_of_other_shapes_are_refused_and_nothing_is_sent() -> None:
    params = {"w": jax.numpy.zeros((4, 2))}
    with gradwire.jax.share(optax.sgd(0.1), codec="dense") as optimizer:
        state = optimizer.init(params)
        with pytest.raises(ValueError, match=r"the update .*\(4, 2\).*\(2, 4\)"):
            optimizer.update({"w": jax.numpy.ones((2, 4))}, state, params)
        with pytest.raises(ValueError, match=r"the parameters .*\(4, 2\).*\(3,\)"):
            optimizer.update({"w": jax.numpy.ones(3)}, state, {"w": jax.numpy.ones(3)})
        with pytest.raises(ValueError, match="the parameters"):
            optimizer.update(jax.numpy.ones((4, 2)), state, params["w"])
        updates, _ = optimizer.update({"w": jax.numpy.ones((4, 2))}, state, params)
        assert optimizer.result.step == 0
    np.testing.assert_allclose(updates["w"], np.full((4, 2), -0.1), rtol=1e-6)


@pytest.mark.parametrize("make", [optax.adamw, optax.sgd], ids=["adamw", "sgd"])
@pytest.mark.parametrize("restored", ["returned", "shared", "initial"])
def test_a_training_goes_on_from_its_state(make: Any, restored: str) -> None:
    first = {"weights": jax.numpy.full((6, 2), 0.5), "bias": jax.numpy.zeros(2)}

    def begin() -> tuple[Any, Any]:
        optimizer = gradwire.jax.share(make(0.05), density=0.25)
        return optimizer, optimizer.init(first)

    def go_on(optimizer: Any, state: Any, params: Any, steps: range) -> Any:
        for step in steps:
            rng = np.random.default_rng(step)
            gradients = jax.tree.map(
                lambda leaf, rng=rng: jax.numpy.asarray(rng.standard_normal(leaf.shape), "float32"),
                params,
            )
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            assert optimizer.step_number == step + 1
        return params, state

    optimizer, state = begin()
    assert optimizer.result is None
    with optimizer:
        params, state = go_on(optimizer, state, first, range(6))
        saved, inner = pickle.loads(pickle.dumps((optimizer.state_dict(), jax.device_get(state))))
        kept = optimizer.shared()
        expected, _ = go_on(optimizer, state, params, range(6, 12))
        assert optimizer.result.step == 11
        with pytest.raises(RuntimeError, match="before the first update"):
            optimizer.load_state_dict(saved)
    whole = optimizer.shared()  # also after the end

    again, _ = begin()
    with again:
        given = again.load_state_dict(saved)
        assert again.step_number == 6
        jax.tree.map(np.testing.assert_array_equal, given, params)
        params = {"returned": given, "shared": kept, "initial": first}[restored]
        params, _ = go_on(again, inner, params, range(6, 12))
    compare = (
        np.testing.assert_array_equal if restored == "returned" else np.testing.assert_allclose
    )
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        compare(mine, theirs, **({} if restored == "returned" else {"atol": 1e-5}))
    if restored == "returned":
        jax.tree.map(np.testing.assert_array_equal, again.shared(), whole)


def test_a_checkpoint_has_every_parameter_once_beside_its_residual() -> None:
    rng = np.random.default_rng(0)
    params: Any = {"weights": jax.numpy.asarray(rng.standard_normal((300, 300)), "float32")}
    with gradwire.jax.share(optax.adamw(0.01), density=0.1) as optimizer:
        state = optimizer.init(params)
        for _ in range(5):
            gradients = {"weights": rng.standard_normal((300, 300)).astype(np.float32)}
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        saved = pickle.dumps(optimizer.state_dict())
    assert len(saved) / 300**2 < 9.0
    again = gradwire.jax.share(optax.adamw(0.01), density=0.1)
    with again:
        again.init({"weights": jax.numpy.zeros((300, 300))})
        restored = again.load_state_dict(pickle.loads(saved))
        np.testing.assert_array_equal(restored["weights"], params["weights"])


@pytest.mark.parametrize("steps", [1, 6, 9])
def test_an_overlapped_training_goes_on_where_it_has_caught_up(steps: int) -> None:
    options: Any = {"codec": "dense", "every": 4, "overlap": 2}

    def go_on(optimizer: Any, state: Any, params: Any, steps: range) -> Any:
        for step in steps:
            rng = np.random.default_rng(step)
            gradients = jax.numpy.asarray(rng.standard_normal(12), "float32")
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    first = jax.numpy.full(12, 0.5)
    with gradwire.jax.share(optax.adam(0.05), **options) as optimizer:
        params, state = go_on(optimizer, optimizer.init(first), first, range(steps))
        params = optimizer.catch_up()
        assert optimizer.step_number == steps
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        expected, _ = go_on(optimizer, state, params, range(steps, 14))
    with gradwire.jax.share(optax.adam(0.05), **options) as again:
        again.init(first)
        params = again.load_state_dict(saved)
        assert again.step_number == steps
        params, _ = go_on(again, state, params, range(steps, 14))
    np.testing.assert_array_equal(params, expected)


def test_asynchronous_nodes_catch_up_before_an_evaluation() -> None:
    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        shared = [
            gradwire.jax.share(optax.sgd(1.0), node=node, mode="async", codec="dense")
            for node in nodes
        ]
        states = [optimizer.init(jax.numpy.zeros(4)) for optimizer in shared]
        begun = list(pool.map(lambda optimizer: optimizer.join(), shared))
        theirs, state, before = begun[0], states[0], begun[1]
        kept = []
        deadline_s = time.monotonic() + 30.0
        for _ in range(6):
            updates, state = shared[0].update(jax.numpy.ones(4), state, theirs)
            theirs = theirs + updates
            params = shared[1].catch_up()
            while (params == before).any() and time.monotonic() < deadline_s:
                params = shared[1].catch_up()
            np.testing.assert_array_equal(params, theirs)
            kept.append(len(shared[1].init.__self__._expected))
            before = shared[1].catch_up()  # brings nothing, and keeps no other copy
            assert len(shared[1].init.__self__._expected) == kept[-1]
        assert kept == [2, 3, 4, 4, 4, 4]
        # The caller may also go on with the parameters that it had.
        nothing, _ = shared[1].update(jax.numpy.zeros(4), states[1], begun[1])
        np.testing.assert_array_equal(begun[1] + nothing, params)
        for optimizer in shared:
            optimizer.close()


def test_a_node_gets_the_first_node_s_parameters_before_its_first_gradient() -> None:
    def work(rank: int) -> Any:
        optimizer = gradwire.jax.share(optax.sgd(0.5), node=nodes[rank], codec="dense")
        state = optimizer.init(jax.numpy.full(4, 8.0 * rank))
        params = optimizer.join()
        np.testing.assert_array_equal(params, np.zeros(4))
        updates, state = optimizer.update(params - 1.0, state, params)
        return optax.apply_updates(params, updates)

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        for params in pool.map(work, range(2)):
            np.testing.assert_allclose(params, 0.5)


def ramp(count: Any) -> Any:
    """A learning rate that begins at zero."""
    return 0.01 * jax.numpy.minimum(count, 5)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


DECAYS = {
    "adamw": lambda decay: optax.adamw(0.05, weight_decay=decay),
    "masked": lambda decay: optax.adamw(0.05, weight_decay=decay, mask=matrices),
    "ramp": lambda decay: optax.adamw(ramp, weight_decay=decay),
    "injected": lambda decay: optax.inject_hyperparams(optax.adamw)(ramp, weight_decay=decay),
    "clipped": lambda decay: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(0.05, weight_decay=decay)
    ),
    "accumulated": lambda decay: optax.MultiSteps(
        optax.adamw(0.05, weight_decay=decay), every_k_schedule=2
    ).gradient_transformation(),
}


def train_alone(optimizer: Any) -> Any:
    rng = np.random.default_rng(3)
    params = {
        "weights": jax.numpy.full((6, 2), 0.5),
        "bias": jax.numpy.ones(2),
        "gain": jax.numpy.float32(0.5),
    }
    state = optimizer.init(params)
    for _ in range(6):
        gradients = jax.tree.map(
            lambda leaf: jax.numpy.asarray(rng.standard_normal(leaf.shape), "float32"), params
        )
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def times(factor: float, decay: float, make: Any) -> Any:
    """A transformation whose update is the factor times the update without decay, plus the decay."""
    whole, rest = make(decay), make(0.0)

    def update(gradients: Any, states: Any, params: Any) -> Any:
        both, first = whole.update(gradients, states[0], params)
        bare, second = rest.update(gradients, states[1], params)
        return jax.tree.map(lambda u, v: factor * v + (u - v), both, bare), (first, second)

    return optax.GradientTransformation(lambda p: (whole.init(p), rest.init(p)), update)


@pytest.mark.parametrize("how", DECAYS)
def test_weight_decay_beside_the_gradient_has_no_factor(how: str) -> None:
    make = DECAYS[how]
    shared = gradwire.jax.share(make(0.5), update_scale=3.0, codec="dense", min_peers=0)
    expected = train_alone(times(3.0, 0.5, make))
    jax.tree.map(
        lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-4),
        train_alone(shared),
        expected,
    )
    plain = train_alone(times(3.0, 0.0, make))
    assert abs(plain["weights"] - expected["weights"]).max() > 0.01


def injected(rate: Any, decay: float = 0.5) -> Any:
    return optax.inject_hyperparams(optax.adamw)(rate, weight_decay=decay)


def set_by_hand(state: Any, **values: float) -> None:
    """Set hyperparameters, wherever they are in a state."""
    if isinstance(state, dict):
        state = tuple(state.values())
    if hasattr(state, "hyperparams"):
        state.hyperparams.update({name: jax.numpy.asarray(values[name]) for name in values})
    elif hasattr(state, "inner_state"):
        set_by_hand(state.inner_state, **values)
    elif isinstance(state, tuple):
        for part in state:
            set_by_hand(part, **values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: injected(0.1),
        lambda: injected(0.0, 0.0),
        lambda: optax.multi_transform({"all": injected(0.1)}, lambda _: "all"),
        lambda: optax.masked(injected(0.1), lambda _: True),
        lambda: optax.apply_if_finite(optax.chain(optax.clip(1.0), injected(0.1)), 5),
    ],
    ids=["alone", "from zero", "multi_transform", "masked", "in a chain"],
)
def test_weight_decay_follows_hyperparameters_that_are_set_by_hand(make: Any) -> None:
    params = jax.numpy.arange(1.0, 5.0)
    with gradwire.jax.share(make(), update_scale=3.0, codec="dense", min_peers=0) as shared:
        state = shared.init(params)
        for rate, decay in (0.1, 0.5), (0.02, 0.5), (0.02, 0.25), (0.2, 0.0):
            set_by_hand(state.inner, learning_rate=rate, weight_decay=decay)
            updates, state = shared.update(jax.numpy.zeros(4), state, params)
            np.testing.assert_allclose(updates, -rate * decay * params, rtol=1e-5)


@pytest.mark.parametrize(
    "skipping",
    [
        lambda inner: optax.apply_if_finite(inner, 100),
        lambda inner: optax.MultiSteps(inner, 1, should_skip_update_fn=optax.skip_not_finite),
    ],
    ids=["apply_if_finite", "MultiSteps"],
)
def test_a_step_that_is_skipped_has_no_weight_decay(skipping: Any) -> None:
    inner = skipping(optax.adamw(lambda count: 0.1 / (1 + count), weight_decay=0.5))
    params = jax.numpy.arange(1.0, 5.0)
    with gradwire.jax.share(inner, update_scale=3.0, codec="dense", min_peers=0) as shared:
        state = shared.init(params)
        for _ in range(3):
            updates, state = shared.update(jax.numpy.full(4, np.nan), state, params)
            np.testing.assert_array_equal(updates, np.zeros(4))
            params = optax.apply_updates(params, updates)
        # The schedule has not gone on meanwhile.
        for rate in 0.1, 0.05:
            updates, state = shared.update(jax.numpy.zeros(4), state, params)
            np.testing.assert_allclose(updates, -rate * 0.5 * params, rtol=1e-5)


def test_weight_decay_follows_a_schedule_that_is_begun_again() -> None:
    inner = optax.adamw(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.5)
    params = jax.numpy.arange(1.0, 5.0)
    with gradwire.jax.share(inner, update_scale=3.0, codec="dense", min_peers=0) as shared:
        state = shared.init(params)
        for rate in 0.1, 0.075, 0.05, 0.1:
            if state.inner[2].count == 3:
                state = state._replace(inner=inner.init(params))
            updates, state = shared.update(jax.numpy.zeros(4), state, params)
            np.testing.assert_allclose(updates, -rate * 0.5 * params, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_local_steps_and_decay_are_shorter_by_what_the_outer_momentum_adds(decay: float) -> None:
    make = DECAYS["adamw"]
    params = jax.numpy.arange(1.0, 5.0)
    plain = make(decay)
    expected, _ = plain.update(params, plain.init(params), params)
    with gradwire.jax.share(make(decay), every=15, min_peers=0) as shared:
        state = shared.init(params)
        updates, _ = shared.update(params, state, params)
    np.testing.assert_allclose(updates, 0.5 * expected, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.lamb(0.05, weight_decay=0.5),
        lambda: optax.adam(0.05),
        lambda: optax.chain(optax.add_decayed_weights(0.5), optax.adam(0.05)),
    ],
    ids=["trust ratio", "none", "in the gradient"],
)
def test_decay_that_is_no_part_of_its_own_has_the_factor(make: Any) -> None:
    shared = gradwire.jax.share(make(), update_scale=3.0, codec="dense", min_peers=0)
    inner = make()
    tripled = optax.chain(inner, optax.scale(3.0))
    jax.tree.map(
        lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-4),
        train_alone(shared),
        train_alone(tripled),
    )


# ---- a node that joins late ------------------------------------------------------------------------------------------


def shared_late(
    shared_state: bool, late: Any, joins: bool = True, **options: Any
) -> tuple[dict[int, Any], Any]:
    """Let a node train alone and another one join, before its first update or in it, with a far larger gradient.

    Returns:
        The first one's states by count, and the other's after an update, with the number of its next step.
    """
    gradients = {"weights": jax.numpy.ones((50, 3), "bfloat16").astype("float32")}
    begun, is_done = threading.Event(), threading.Event()
    states: dict[int, Any] = {}

    def train(node: gw.Node) -> None:
        params = {"weights": jax.numpy.zeros((50, 3))}
        optimizer = gradwire.jax.share(
            optax.adamw(optax.linear_schedule(0.1, 0.0, 1_000)), node=node, min_peers=0, **options
        )
        state = optimizer.init(params)
        while not is_done.is_set():
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            states[int(state.inner[0].count)] = state
            if len(states) == 20:
                begun.set()
            time.sleep(0.01)
        optimizer.close()

    def join() -> Any:
        assert begun.wait(60.0)
        params = {"weights": jax.numpy.full((50, 3), 7.0)}
        try:
            with (
                gw.Node("127.0.0.1:0", [one.address], secret=bytes(range(32)), node_id=2) as node,
                gradwire.jax.share(
                    late, node=node, share_state=shared_state, **options
                ) as optimizer,
            ):
                state = optimizer.init(params)
                steep = gradients if joins else jax.tree.map(lambda leaf: 1e4 * leaf, gradients)
                if joins:
                    params = optimizer.join()
                    time.sleep(0.1)  # the other one goes on
                    broken = jax.tree.map(lambda leaf: math.nan * leaf, gradients)
                    with pytest.raises(gw.NonFiniteUpdate):  # which changes nothing
                        optimizer.update(broken, state, params)
                updates, state = optimizer.update(steep, state, params)
                params = optax.apply_updates(params, updates)
                assert (params["weights"] < 0.0).all()  # the others', however far they are, not 7.0
                return state, optimizer.step_number
        finally:
            is_done.set()

    with (
        gw.Node("127.0.0.1:0", secret=bytes(range(32)), node_id=1) as one,
        ThreadPoolExecutor(2) as pool,
    ):
        first, second = pool.submit(train, one), pool.submit(join)
        late_state = second.result()
        first.result()
    return states, late_state


def test_a_late_node_goes_on_with_optax_s_state_and_count() -> None:
    optimizer = optax.adamw(optax.linear_schedule(0.1, 0.0, 1_000))
    states, (state, step) = shared_late(True, optimizer)
    count = int(state.inner[0].count)
    assert 20 < count < step  # the means are of the snapshot, the schedule is the present one
    assert state.inner[2].count == state.decay[2].count == step
    for own, other in zip(*map(jax.tree.leaves, (state, states[count])), strict=True):
        assert own.dtype == other.dtype
        if own.shape:
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("options", [{}, {"every": 4}, {"overlap": 1}], ids=str)
def test_a_late_node_s_gradient_at_other_parameters_moves_nothing(options: Any) -> None:
    optimizer = optax.adamw(optax.linear_schedule(0.1, 0.0, 1_000))
    states, (state, step) = shared_late(True, optimizer, joins=False, **options)
    count = int(state.inner[0].count)
    assert state.inner[2].count == state.decay[2].count == step  # schedules go on all the same
    for own, other in zip(*map(jax.tree.leaves, (state, states[count])), strict=True):
        if own.shape:
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize(
    ("how", "moments"),
    [("together", (1, 0)), ("joined", (1, 1)), ("joined, not taken", (1, 0))],
)
def test_a_gradient_at_parameters_that_the_start_has_replaced_is_left_out(
    how: str, moments: tuple[int, int]
) -> None:
    def train(rank: int) -> Any:
        params = jax.numpy.full(4, 8.0 * rank)
        optimizer = gradwire.jax.share(
            optax.sgd(optax.linear_schedule(1.0, 0.0, 8), momentum=0.5),
            node=nodes[rank],
            codec="dense",
        )
        state = optimizer.init(params)
        if how != "together":
            begun = optimizer.join()
            params = begun if how == "joined" else params
        updates, state = optimizer.update(jax.numpy.ones(4), state, params)
        return optax.apply_updates(params, updates), state.inner

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        for moment, (params, (trace, schedule)) in zip(
            moments, pool.map(train, range(2)), strict=True
        ):
            np.testing.assert_array_equal(params, np.full(4, -sum(moments) / 2))
            np.testing.assert_array_equal(trace.trace, np.full(4, moment))
            assert schedule.count == 1  # equal on all nodes


def test_accumulated_steps_stay_in_time_with_the_others() -> None:
    def train(rank: int) -> list[int]:
        params = jax.numpy.full(4, 8.0 * rank)
        optimizer = gradwire.jax.share(
            optax.MultiSteps(optax.sgd(0.1), 3), node=nodes[rank], codec="dense"
        )
        state = optimizer.init(params)
        moving = []
        for step in range(9):
            updates, state = optimizer.update(jax.numpy.ones(4), state, params)
            params = optax.apply_updates(params, updates)
            if step and np.abs(updates).max() > 0.05:
                moving.append(step)
        return moving

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, range(2))) == [[2, 5, 8]] * 2


def test_a_rate_is_reduced_on_plateaus_in_a_late_node_too() -> None:
    optimizer = optax.chain(
        optax.scale_by_schedule(lambda count: count), optax.contrib.reduce_on_plateau()
    )
    schedule, plateau = counted_up(optimizer, optimizer.init(jax.numpy.zeros(4)), 7, value=1.0)
    assert (schedule.count, plateau.count, plateau.plateau_count) == (7, 0, 0)


def counted_up(optimizer: Any, state: Any, steps: int, **further: Any) -> Any:
    """Return a state as a late node has it that lacks so many updates."""
    shared = gradwire.jax.share(optimizer).init.__self__
    zeros = jax.numpy.zeros(4)
    return shared._counted_up(gradwire.jax.ShareState(state), steps, zeros, zeros, further).inner


@pytest.mark.parametrize("every", [2, 3, lambda step: 2 + step % 2], ids=["2", "3", "changing"])
@pytest.mark.parametrize("lost", [1, 2, 3, 5])
def test_a_late_node_accumulates_in_time_with_the_others(every: Any, lost: int) -> None:
    optimizer = optax.MultiSteps(
        optax.chain(optax.adam(0.1), optax.scale_by_schedule(lambda count: 1 / (1 + count))), every
    )
    gradient = params = jax.numpy.ones(4)
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update(gradient, state, params)
    late = counted_up(optimizer, state, lost)
    first, given = state.inner_opt_state[0][0], late.inner_opt_state[0][0]
    jax.tree.map(np.testing.assert_array_equal, first, given)  # the means, and their count
    for _ in range(lost):
        _, state = optimizer.update(gradient, state, params)
    for _ in range(7):
        assert late.mini_step == state.mini_step
        assert late.gradient_step == state.gradient_step
        assert late.inner_opt_state[1].count == state.inner_opt_state[1].count
        _, state = optimizer.update(gradient, state, params)
        _, late = optimizer.update(gradient, late, params)


def test_a_node_that_was_left_behind_goes_on_with_the_others_state() -> None:
    """Its update of that step counts, and its optimiser's state is the others' from the next one on."""
    behind = threading.Event()

    def train(rank: int) -> Any:
        params = jax.numpy.zeros(4)
        optimizer = gradwire.jax.share(optax.adam(0.1), node=nodes[rank], codec="dense")
        state = optimizer.init(params)
        while optimizer.step_number < 30:
            if rank == 1 and optimizer.step_number >= 8 and not behind.is_set():
                behind.set()
                state = jax.tree.map(lambda leaf: 100 * leaf, state)  # to be replaced
                optimizer.init.__self__._training.exchange._departure.rejoin("test")
            updates, state = optimizer.update(params - 1.0, state, params)
            params = optax.apply_updates(params, updates)
        return params, state.inner[0], optimizer.shared()

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        (params, moments, shared), (others, theirs, same) = pool.map(train, range(2))
    assert behind.is_set()
    np.testing.assert_array_equal(shared, same)
    np.testing.assert_allclose(params, others, atol=1e-6)
    np.testing.assert_allclose(moments.nu, theirs.nu, rtol=0.1)


def test_a_late_node_begins_with_a_state_of_its_own_if_that_is_wanted() -> None:
    _, (state, _) = shared_late(False, optax.adamw(optax.linear_schedule(0.1, 0.0, 1_000)))
    assert int(state.inner[0].count) == 1


def test_a_late_node_with_another_optimiser_is_refused_by_name() -> None:
    with pytest.raises(gw.Mismatch, match="wrap the same one on all nodes"):
        shared_late(True, optax.adam(0.1))


def test_a_state_that_was_taken_is_what_a_node_gives_before_its_next_update() -> None:
    """A node that comes late may have to join again at once, or give another one the state."""
    optimizer = optax.chain(
        optax.trace(0.9), optax.scale_by_schedule(optax.constant_schedule(-0.1))
    )
    states = [gradwire.jax._SharedState(is_shared=True) for _ in range(3)]
    for place, state in enumerate(states):
        state.set(optimizer.init(jax.numpy.full(4, float(place))), 0)
    states[0].set(optimizer.update(jax.numpy.ones(4), states[0].values)[1], 7)
    states[1].load(states[0].export())
    states[2].load(states[1].export())
    following = states[2].values
    with pytest.raises(TimeoutError), states[2].followed_by(following, 10):
        raise TimeoutError
    (trace, schedule), lost = states[2].taken(9)
    np.testing.assert_array_equal(trace.trace, np.ones(4))
    assert (int(schedule.count), lost) == (1, 2)
    with states[2].followed_by(following, 10):
        pass
    assert states[2].taken(9) == (None, 0)


def test_nodes_that_begin_together_keep_the_states_that_their_callers_have_restored() -> None:
    def train(rank: int) -> Any:
        params = jax.numpy.full(4, float(rank))
        optimizer = gradwire.jax.share(optax.adam(0.1), node=nodes[rank], codec="dense")
        state = optimizer.init(params)
        state = jax.tree.map(lambda leaf: leaf + 5, state)
        params = optimizer.join()
        return optimizer.update(jax.numpy.ones(4), state, params)[1]

    with two_nodes() as nodes, ThreadPoolExecutor(2) as pool:
        for state in pool.map(train, range(2)):
            assert int(state.inner[0].count) == 6


def test_a_factor_is_a_positive_number() -> None:
    gradwire.jax.share(optax.sgd(0.1), update_scale=np.float32(2.0))
    for wrong in (True, 0.0, "2"):
        with pytest.raises(ValueError, match="update_scale is"):
            gradwire.jax.share(optax.sgd(0.1), update_scale=wrong)
