"""Several tensors: which encoder serves which tensor, and which parameters and updates are refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import Group

from ..seeds import seeds
from .cluster import cluster

SHAPES = [(40, 50), (50,), (50, 60), (60,), (3, 4)]
THRESHOLD = 2.0**-6


def tensors(seed: int | None = None) -> list[NDArray[np.float32]]:
    """Return a model of zeros, or multiples of 2^-12, whose sums are exact."""
    if seed is None:
        return [np.zeros(shape, np.float32) for shape in SHAPES]
    rng = np.random.default_rng([21, seed])
    return [(rng.integers(-99, 99, shape) / 2.0**12).astype(np.float32) for shape in SHAPES]


def flat(arrays: list[Any]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(one, np.float64).ravel() for one in arrays])


def kept_in(groups: gw.Groups) -> list[NDArray[np.float64]]:
    """Return what is in the residuals, as tensors of the model."""
    kept = [np.zeros(shape) for shape in SHAPES]
    for group in groups.groups:
        start = 0
        for tensor in group.tensors or ():
            stop = start + kept[tensor].size
            kept[tensor][...] = group.encoder.residual[start:stop].reshape(SHAPES[tensor])
            start = stop
    return kept


def alone(groups: gw.Groups | gw.Encoder, **options: Any) -> gw.Exchange:
    with cluster(0) as made:
        return gw.Exchange(groups, made.node(1), min_peers=0, **options)


# --- who encodes what -------------------------------------------------------------------------------------------------


def test_small_and_one_dimensional_tensors_go_out_whole_in_one_message() -> None:
    groups = gw.Groups.of(tensors(), THRESHOLD)
    assert [group.tensors for group in groups.groups] == [(0,), (2,), (1, 3, 4)]
    assert [group.is_dense for group in groups.groups] == [False, False, True]
    assert [encoder.key for encoder in groups.encoders] == [0, 1, 2]


def test_many_small_tensors_are_divided_in_little_time() -> None:
    arrays = [np.empty(8, np.float32)] * 20_000
    begin_s = time.process_time()
    [group] = gw.Groups.of(arrays).groups
    # 6 seconds if the set of dense ones were made again for every tensor.
    assert time.process_time() - begin_s < 2.0
    assert group.tensors == tuple(range(20_000))


def test_each_group_has_its_threshold() -> None:
    groups = gw.Groups.of(tensors(), THRESHOLD, thresholds={1: 0.5})
    assert [encoder.threshold for encoder in groups.encoders] == [THRESHOLD, 0.5, THRESHOLD]


def test_thresholds_of_groups_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\], there are 2"):
        gw.Groups.of(tensors(), THRESHOLD, thresholds={7: 0.5})


def test_encoders_need_keys_of_their_own() -> None:
    with pytest.raises(ValueError, match="key"):
        gw.Groups([Group(gw.Encoder(2, 1.0)), Group(gw.Encoder(2, 1.0))])


def test_one_array_for_several_tensors_is_refused() -> None:
    share = alone(gw.Groups.of(tensors(), THRESHOLD))
    with pytest.raises(TypeError, match="list of the model's tensors"):
        share.step(flat(tensors(1)).astype(np.float32), tensors())


@pytest.mark.parametrize("seed", seeds(2))
def test_groups_lose_nothing_and_keep_replicas_identical(seed: int) -> None:
    def work(node: Any, rank: int) -> Any:
        groups, params = gw.Groups.of(tensors(), THRESHOLD), tensors()
        share = gw.Exchange(groups, node, reduction="sum", min_peers=2)
        results = [share.step(tensors(10 * rank + step), params) for step in range(6)]
        return groups, params, results

    with cluster(seed) as made:
        nodes = [made.node(rank) for rank in range(3)]
        workers = [made.start(node, lambda n=node, r=r: work(n, r)) for r, node in enumerate(nodes)]
        made.run()
    put_in = sum(flat(tensors(10 * rank + step)) for rank in range(3) for step in range(6))
    kept = sum(flat(kept_in(worker.result[0])) for worker in workers)
    for worker in workers:
        groups, params, results = worker.result
        np.testing.assert_array_equal(flat(params) + kept, put_in)
        assert not groups.encoders[2].residual.any(), "whole updates leave nothing"
        assert all(result.received == 2 for result in results)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("bad_tensors", [[0], [2], [0, 2], [4]])
def test_an_update_that_one_group_refuses_goes_into_all_residuals(
    topology: Any, bad_tensors: list[int]
) -> None:
    groups, params = gw.Groups.of(tensors(), THRESHOLD), tensors()
    share = alone(groups, topology=topology)
    update = tensors(1)
    bad = [one.copy() for one in update]
    for tensor in bad_tensors:
        bad[tensor].flat[0] = np.nan
        update[tensor].flat[0] = 0.0
    with pytest.raises(gw.NonFiniteUpdate):
        share.step(bad, params)
    assert not flat(params).any()
    np.testing.assert_array_equal(flat(kept_in(groups)), flat(update))
    assert share.next_step == 0


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("applies", [False, True])
@pytest.mark.parametrize(
    "misfit",
    [
        np.zeros((8, 40)),
        np.zeros((8, 39), np.float32),
        np.zeros((8, 80), np.float32)[:, ::2],
        "a text",
    ],
    ids=["dtype", "size", "layout", "kind"],
)
def test_an_update_that_does_not_fit_one_group_is_taken_by_none(
    topology: Any, applies: bool, misfit: Any
) -> None:
    shapes = [np.zeros((50, 40), np.float32), np.zeros((8, 40), np.float32)]
    groups, params = gw.Groups.of(shapes, THRESHOLD, dense_below=1), shapes
    share = alone(groups, topology=topology, apply_residual=applies)
    update = [np.full_like(array, 0.7) for array in params]
    share.step(update, params)
    before = [array.copy() for array in params], groups.whole_residuals()[0].copy()
    with pytest.raises((TypeError, ValueError), match=r"key 1 of tensors \[1\]: update|array 1 of"):
        share.step([update[0], misfit], params)
    assert all(map(np.array_equal, before[0], params))
    assert np.array_equal(before[1], groups.whole_residuals()[0])
    assert share.next_step == 1


def test_a_peer_with_other_groups_is_refused() -> None:
    groups = gw.Groups.of(tensors(), THRESHOLD)
    other = gw.Groups.of(tensors(), THRESHOLD, dense_below=1, dense_one_dimensional=False)
    payload = b"".join(map(bytes, other.encode(tensors(1), "threshold")))
    replica = alone(groups)._replica
    with pytest.raises(gw.MessageError, match=r"12 elements in group 4, but .* on this node"):
        replica.parse(replica.run, 0, memoryview(payload))
    first = bytes(groups.encode(tensors(1), "threshold")[0])
    with pytest.raises(gw.MessageError, match=r"^2000 elements in group 0, but .* in group 2 on"):
        replica.parse(replica.run, 0, memoryview(first))


def test_smaller_tensors_are_sent_more_densely() -> None:
    model = [np.zeros((rows, 100)) for rows in (900, 100, 25, 1)]

    def densities(**options: Any) -> list[float]:
        groups = gw.Groups.of(model, gw.TargetDensity(0.01, initial=0.5), dense_below=0, **options)
        policies = [encoder.policy for encoder in groups.encoders]
        assert all(policy.initial == 0.5 for policy in policies)
        return [round(policy.density, 6) for policy in policies]

    assert densities() == [0.01, 0.03, 0.06, 0.08]
    own = gw.TargetDensity(0.02, initial=0.5)
    assert densities(thresholds={3: own}) == [0.01, 0.03, 0.06, 0.02]
    dense = gw.Groups.of(model, gw.TargetDensity(0.2), dense_below=0)
    assert {encoder.policy.density for encoder in dense.encoders} == {0.2}


@pytest.mark.parametrize("is_in_residual", [False, True])
@pytest.mark.parametrize("split", [1, 4])
def test_the_first_message_has_the_density_aimed_at(is_in_residual: bool, split: int) -> None:
    rng = np.random.default_rng(27)
    update = rng.standard_normal((split, 100_000 // split)).astype(np.float32)
    groups = gw.Groups([Group(gw.Encoder(update.size, gw.TargetDensity(0.01)))])
    if is_in_residual:
        groups.encoders[0].residual[:] = update.ravel()
    (message,) = groups.encode(None if is_in_residual else list(update), "threshold")
    assert 0.0095 < message.density < 0.0105


def test_the_first_threshold_is_learned_after_whole_and_empty_updates_too() -> None:
    rng = np.random.default_rng(24)
    groups = gw.Groups([Group(gw.Encoder(50_000, gw.TargetDensity(0.01)))])
    update = rng.standard_normal(50_000).astype(np.float32)
    groups.encode(update, "dense")
    groups.encode(np.zeros_like(update), "threshold")
    update[7] = np.inf
    with pytest.raises(gw.NonFiniteUpdate):
        groups.encode(update, "threshold")
    (message,) = groups.encode(None, "threshold")
    assert 0.0095 < message.density < 0.0105


# --- parameters and updates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "complaint"),
    [
        (np.zeros(5, np.float32), ValueError, "encoder with key 0: target has 5 elements"),
        (np.zeros(2, np.float16), TypeError, "float16"),
        (np.zeros(4, np.float32)[::2], ValueError, "not C-contiguous"),
        (np.broadcast_to(np.float32(0), (2,)), ValueError, "key 0: target is"),
        ([0.0, 0.0], TypeError, "is a float"),
    ],
)
@pytest.mark.parametrize("joins", [False, True])
def test_parameters_that_do_not_fit_are_refused_before_anything_is_sent(
    params: Any, error: type[Exception], complaint: str, joins: bool
) -> None:
    enc, good = gw.Encoder(2, 1.0), np.zeros(2, np.float32)
    share = alone(enc)
    with pytest.raises(error, match=complaint):
        share.join(params) if joins else share.step(np.ones(2, np.float32), params)
    assert (enc.step, enc.residual.tolist()) == (0, [0.0, 0.0])
    assert share.step(np.ones(2, np.float32), good).step == 0
    assert good.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("count", [4, 6])
def test_groups_take_exactly_the_tensors_they_were_made_for(count: int) -> None:
    groups = gw.Groups.of(tensors(), THRESHOLD)
    share = alone(groups)
    wrong = (tensors() * 2)[:count]
    with pytest.raises(ValueError, match=f"{count} parameters for groups of 5 tensors"):
        share.step(tensors(), wrong)
    with pytest.raises(ValueError, match=f"{count} arrays of the update for groups of 5 tensors"):
        share.step((tensors(1) * 2)[:count], tensors())
    assert share.next_step == 0
    assert not flat(kept_in(groups)).any()


def test_local_steps_refuse_updates_of_other_sizes_whole() -> None:
    share = alone(gw.Encoder(4, 1.0), every=2)
    params = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    with pytest.raises(ValueError, match=r"\[2, 3\] elements for parameters of \[2, 2\]"):
        share.step([np.ones(2, np.float32), np.ones(3, np.float32)], params)
    assert not np.concatenate(params).any()


# --- budgets of bytes -------------------------------------------------------------------------------------------------


def model(*shapes: tuple[int, ...]) -> list[NDArray[np.float32]]:
    return [np.zeros(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("params", "dense"),
    [
        (model((200, 300), (100, 100), (50, 40), (60,)), True),
        (model((200, 300), (100, 100), (50, 40), (2_000,)), False),
        (model((400, 300)), None),
        (model((60,), (30,)), True),
    ],
    ids=["few small", "many small", "one", "only small"],
)
def test_a_budget_is_that_of_all_groups_from_the_first_step_on(
    params: Any, dense: bool | None
) -> None:
    groups = gw.Groups.of(params, gw.TargetBytes(3_000))
    assert [group.is_dense for group in groups.groups[-1:]] == [bool(dense)]
    rng = np.random.default_rng(5)
    sizes = []
    for step in range(40):
        scale = np.float32(1000.0 if step == 20 else 1.0)
        update = [rng.standard_normal(each.shape, dtype=np.float32) * scale for each in params]
        messages = groups.encode(update, "threshold")
        sizes.append(sum(message.nbytes for message in messages))
    assert max(sizes) <= 3_000
    if sum(each.size for each in params) > 10_000:
        assert np.mean(sizes[5:]) >= 0.6 * 3_000


def test_a_budget_too_small_for_so_many_groups_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"TargetBytes\(500\) leaves 500 bytes .* 20 groups, .* at least 1"
    ):
        gw.Groups.of(model(*[(100, 100)] * 20), gw.TargetBytes(500))


@pytest.mark.parametrize("dtype", ["float64", "f8", float, np.float64, np.dtype("float64")])
def test_a_budget_takes_every_name_of_a_dtype(dtype: Any) -> None:
    groups = gw.Groups.of([np.zeros((200, 200)), np.zeros(200)], gw.TargetBytes(9_000), dtype=dtype)
    assert [group.encoder.dtype for group in groups.groups] == ["float64", "float64"]


def test_groups_with_policies_of_their_own_count_in_a_budget() -> None:
    params = model((300, 200), (50, 60))
    update = [np.random.default_rng(0).standard_normal(each.shape, np.float32) for each in params]
    for own in ({0: gw.TargetBytes(3_000)}, {1: gw.TargetDensity(0.5)}):
        groups = gw.Groups.of(params, gw.TargetBytes(5_000), thresholds=own)
        sizes = [message.nbytes for message in groups.encode(update, "threshold")]
        assert 2_000 < sum(sizes) <= 5_000
    with pytest.raises(ValueError, match=r"TargetBytes\(5000\) leaves -8248 bytes"):
        gw.Groups.of(params, gw.TargetBytes(5_000), thresholds={0: gw.TargetDensity(0.5)})


def test_wrong_arguments_of_groups_are_named() -> None:
    params = model((300, 200))
    [group] = gw.Groups.of(params[0]).groups  # type: ignore[arg-type]
    assert group.encoder.numel == 60_000
    with pytest.raises(TypeError, match="is_adaptive must be True or False, got 'no'"):
        gw.Groups.of(params, is_adaptive="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="thresholds must be a dict of policies"):
        gw.Groups.of(params, thresholds=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
@pytest.mark.parametrize("grouped", [False, True], ids=["one encoder", "groups"])
def test_a_node_sends_no_more_in_a_step_than_its_budget(topology: Any, grouped: bool) -> None:
    shapes = ((200, 300), (100, 100), (60,))
    secret, budget = bytes(range(32)), 3_000
    sizes = [int(np.prod(shape)) for shape in shapes]
    with ExitStack() as stack:
        nodes: list[gw.Node] = []
        for _ in range(3):
            seeds = [node.address for node in nodes]
            nodes.append(stack.enter_context(gw.Node("127.0.0.1:0", seeds, secret=secret)))

        def train(rank: int) -> tuple[list[int], bytes]:
            params = model(*shapes)
            policy = gw.TargetBytes(budget)
            groups = gw.Groups.of(params, policy) if grouped else gw.Encoder(sum(sizes), policy)
            share = gw.Exchange(groups, nodes[rank], min_peers=2, topology=topology)
            rng = np.random.default_rng(rank)
            sent = []
            for step in range(12):
                scale = np.float32(100.0 if step == 8 else 1.0)
                update = [rng.standard_normal(shape, dtype=np.float32) * scale for shape in shapes]
                sent.append(share.step(update, params).sent_bytes)
            return sent, b"".join(each.tobytes() for each in params)

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(train, range(3)))
    assert max(max(sent) for sent, _ in found) <= budget
    assert min(np.mean(sent[3:]) for sent, _ in found) >= 0.5 * budget
    assert len({params for _, params in found}) == 1


def test_what_are_no_groups_or_no_tensors_is_refused() -> None:
    encoder = gw.Encoder(4)
    groups: Any
    for groups in (None, [], [None], encoder, [encoder], Group(encoder)):
        with pytest.raises(TypeError, match="groups must be a list of Group, got"):
            gw.Groups(groups)
    assert len(gw.Groups(Group(each) for each in [encoder])) == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tensors \[1\] belong to several groups"):
        gw.Groups([Group(encoder, (0, 1)), Group(gw.Encoder(4, key=1), (1, 2))])
    for params in (None, [], {"a": np.zeros(3)}, [1.0], "ab"):
        with pytest.raises(TypeError, match="params must be an array or a list of arrays"):
            gw.Groups.of(params)  # type: ignore[arg-type]
    for options in ({"every": 0}, {"every": "4"}, {"dense_below": "1024"}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(options))} must be"):
            gw.Groups.of(tensors(), **options)
