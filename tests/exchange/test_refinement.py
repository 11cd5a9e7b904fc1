"""Two messages of a group: what the first has left is encoded again with a threshold of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import Group, redistribute

from .cluster import FakeNode, cluster, run_cluster

SHAPES = [(40, 30), (30,)]
COARSE, FINE = 2.0**-4, 2.0**-6
STEPS = 8


def zeros() -> list[NDArray[np.float32]]:
    return [np.zeros(shape, np.float32) for shape in SHAPES]


def update_of(node: int, step: int) -> list[NDArray[np.float32]]:
    """Return multiples of 2^-12, so that every sum of them is exact in float32."""
    rng = np.random.default_rng([29, node, step])
    return [(rng.integers(-600, 600, shape) / 2.0**12).astype(np.float32) for shape in SHAPES]


def flat(arrays: Any) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(one, np.float64).ravel() for one in arrays])


def refined(**options: Any) -> gw.Groups:
    return gw.Groups.of(zeros(), COARSE, refine=FINE, **options)


def left_in(groups: gw.Groups) -> NDArray[np.float64]:
    """Return what waits to be sent, in the order of the model's tensors."""
    return flat(groups.residuals(zeros()))


def decoded(groups: gw.Groups, messages: Any) -> NDArray[np.float64]:
    arrays = zeros()
    for index, message in enumerate(messages):
        gw.apply_many([message], groups.select(arrays, index))
    return flat(arrays)


def test_what_a_coarse_message_leaves_goes_out_in_a_fine_one() -> None:
    groups = gw.Groups.of([np.zeros((1, 5))], 1.0, dense_below=0, refine=0.25)
    update = [np.array([[1.3125, 0.3125, -1.0, 0.125, -0.5]], np.float32)]
    coarse, fine = groups.encode(update, "threshold")
    assert gw.decode(coarse).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0]
    assert gw.decode(fine).tolist() == [0.25, 0.25, 0.0, 0.0, -0.25]
    assert groups.residuals(update)[0].tolist() == [[0.0625, 0.0625, 0.0, 0.125, -0.25]]


def test_it_follows_the_groups_that_it_refines_and_is_not_counted_twice() -> None:
    groups = refined()
    described = [(one.encoder.key, one.tensors, one.is_dense, one.refines) for one in groups.groups]
    assert described == [
        (0, (0,), False, False),
        (1, (1,), True, False),
        (2, (0,), False, True),
    ]
    assert groups.numel == 1230
    messages = groups.encode(update_of(0, 0), "threshold")
    assert groups.density(messages) == sum(message.count for message in messages) / 1230


class Outcome(NamedTuple):
    groups: gw.Groups
    params: Any
    shared: Any


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"apply_residual": True, "every": 2}])
def test_nothing_is_lost_and_replicas_are_identical(options: dict[str, Any]) -> None:
    def work(node: FakeNode, rank: int) -> Outcome:
        groups, params = refined(), zeros()
        share = gw.Exchange(groups, node, peers=2, **options)
        share.join(params)
        for step in range(STEPS):
            share.step(update_of(rank, step), params)
        return Outcome(groups, params, share.shared(params))

    outcomes = run_cluster(work, seed=4)
    put_in = sum(flat(update_of(rank, step)) for rank in range(3) for step in range(STEPS))
    kept = sum(left_in(one.groups) for one in outcomes)
    for one in outcomes:
        np.testing.assert_array_equal(flat(one.shared) + kept, put_in)
        home = left_in(one.groups) if options.get("apply_residual") else 0.0
        np.testing.assert_array_equal(flat(one.params), flat(one.shared) + home)


def test_messages_that_were_not_sent_return_to_where_they_came_from() -> None:
    groups = refined()
    groups.put_back(groups.encode(update_of(0, 0), "threshold"))
    np.testing.assert_array_equal(left_in(groups), flat(update_of(0, 0)))


def test_a_refused_update_returns_to_where_it_came_from() -> None:
    """The last group refuses, after the first has been refined."""
    coarse, whole, fine = refined().groups
    groups = gw.Groups([coarse, fine, whole])
    update = update_of(0, 0)
    update[1][3] = np.nan
    with pytest.raises(gw.NonFiniteUpdate):
        groups.encode(update, "threshold")
    np.testing.assert_array_equal(coarse.encoder.residual, update[0].ravel())


def test_a_checkpoint_of_an_unfinished_step_and_another_number_of_workers_lose_nothing() -> None:
    def work(node: FakeNode, rank: int) -> dict[str, Any]:
        share = gw.Exchange(refined(), node, peers=1, timeout_s=1.0)
        params = zeros()
        share.step(update_of(rank, 0), params)
        if rank == 0:
            with pytest.raises(TimeoutError):
                share.step(update_of(rank, 1), params)
        return {"state": share.state_dict(), "params": params}

    (first, second) = run_cluster(work, count=2, seed=5)
    first["state"]["step"] = second["state"]["step"]
    (state,) = redistribute([first["state"], second["state"]], 1)
    with cluster(6) as made:
        groups, params = refined(), [one.copy() for one in second["params"]]
        share = gw.Exchange(groups, made.node(1), peers=0)
        share.load_state_dict(state)
        share.step([np.zeros_like(one) for one in params], params)
        put_in = flat(update_of(0, 0)) + flat(update_of(1, 0)) + flat(update_of(0, 1))
        np.testing.assert_array_equal(flat(params) + left_in(groups), put_in)
        share.leave(params)
    np.testing.assert_array_equal(flat(params), put_in)
    assert not left_in(groups).any()


def test_the_last_message_of_a_node_that_leaves_takes_all_in_one_whole_message() -> None:
    groups = refined()
    groups.encode(update_of(0, 0), "threshold")
    left = left_in(groups)
    messages = groups.flush()
    assert [message.kind for message in messages] == ["dense", "dense", "sparse"]
    np.testing.assert_array_equal(decoded(groups, messages), left)
    assert not left_in(groups).any()


@pytest.mark.parametrize("codec", ["dense", "bfloat16"])
def test_whole_updates_are_not_refined(codec: Any) -> None:
    groups = gw.Groups.of(zeros(), COARSE, refine=2.0**-12)  # what rounding leaves could be sent
    messages = groups.encode(update_of(0, 0), codec)
    assert messages[2].count == 0
    payload = b"".join(map(bytes, messages))
    assert len(payload) <= groups.max_payload_bytes(codec)
    np.testing.assert_array_equal(
        decoded(groups, messages) + left_in(groups), flat(update_of(0, 0))
    )


def test_a_peer_without_it_is_refused() -> None:
    payload = b"".join(map(bytes, gw.Groups.of(zeros(), COARSE).encode(zeros(), "threshold")))
    with pytest.raises(gw.MessageError, match="2 messages for 3 groups"):
        refined().parse(memoryview(payload))


HOME = gw.Encoder(1200, COARSE)


@pytest.mark.parametrize(
    ("before", "tensors"),
    [
        ([], (0,)),
        ([Group(gw.Encoder(1200, COARSE, key=1), (0,))], (0,)),
        ([Group(HOME, (0,))], (1,)),
        ([Group(HOME, (0,), is_dense=True)], (0,)),
    ],
    ids=["nothing before", "another", "other tensors", "a whole one"],
)
def test_groups_that_refine_none_before_them_are_refused(
    before: list[Group], tensors: tuple[int, ...]
) -> None:
    group = Group(gw.Refiner(HOME, FINE, key=9), tensors)
    with pytest.raises(ValueError, match="group 9 refines group 0, which is no group before it"):
        gw.Groups([*before, group])
