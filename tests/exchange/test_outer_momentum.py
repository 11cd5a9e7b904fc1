"""outer_momentum: the shared parameters go on as all nodes together have moved them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw

from .cluster import FakeNode, cluster, run_cluster

SHAPES = [(50, 700), (30,)]  # the first is longer than a block
STEPS = 8
THRESHOLD = 2.0**-6
MOMENTUM = 0.5


class Outcome(NamedTuple):
    shared: NDArray[np.float64]
    params: NDArray[np.float64]
    residual: NDArray[np.float64]
    published: list[bytes]


def updates_of(rank: int, step: int) -> list[NDArray[np.float32]]:
    """Return multiples of 2^-9: halved as often as here they are still exact in float32."""
    rng = np.random.default_rng([37, rank, step])
    return [(rng.integers(-32, 32, shape) / 2.0**9).astype(np.float32) for shape in SHAPES]


def flat(arrays: Any) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(one, np.float64).ravel() for one in arrays])


def train(node: FakeNode, *, rank: int, moves: bool, **options: Any) -> Outcome:
    params = [np.ones(shape, np.float32) for shape in SHAPES]
    groups = gw.Groups.of(params, THRESHOLD)
    options = {"reduction": "sum", "outer_momentum": MOMENTUM, **options}
    share = gw.Exchange(groups, node, min_peers=2, **options)
    share.join(params)
    for step in range(STEPS):
        update = updates_of(rank, step)
        if moves:
            for param, part in zip(params, update, strict=True):
                param += part
            share.step_moved(params)
        else:
            share.step(update, params)
    if options.get("overlap"):
        share.catch_up(params)
    published = [payload for _, payload in sorted(node.updates.items())]
    residual = flat(groups.residuals(params))
    return Outcome(flat(share.shared(params)), flat(params), residual, published)


def expected(outcomes: list[Outcome]) -> NDArray[np.float64]:
    """Return what Nesterov's momentum makes of all that was published, in float64."""
    shared, velocity = np.ones(outcomes[0].shared.shape), np.zeros(outcomes[0].shared.shape)
    for payloads in zip(*(one.published for one in outcomes), strict=True):
        added = np.zeros(shared.shape)
        for payload in payloads:
            first, second = gw.parse_many(payload)
            added += np.concatenate([gw.decode(first), gw.decode(second)])
        velocity = MOMENTUM * velocity + added
        shared += added + MOMENTUM * velocity
    return shared


@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 2},
        {"apply_residual": True},
        {"every": 4, "overlap": 2, "apply_residual": True},
    ],
    ids=str,
)
def test_what_was_added_goes_on_and_replicas_are_identical(
    options: dict[str, Any], moves: bool
) -> None:
    def work(node: FakeNode, rank: int) -> Outcome:
        return train(node, rank=rank, moves=moves, **options)

    outcomes = run_cluster(work, seed=3)
    for one in outcomes:
        np.testing.assert_array_equal(one.shared, outcomes[0].shared)
        np.testing.assert_allclose(one.shared, expected(outcomes), rtol=0, atol=2.0**-20)
        home = one.residual if options.get("apply_residual") else 0.0
        np.testing.assert_allclose(one.params, one.shared + home, rtol=0, atol=2.0**-20)


def test_without_it_nothing_is_kept_and_a_state_with_it_is_refused() -> None:
    with cluster(0) as made:
        params, update = np.zeros(4, np.float32), np.ones(4, np.float32)

        def share_with(momentum: float) -> gw.Exchange:
            node = made.node(1 + len(made.nodes))
            encoder = gw.Encoder(4, THRESHOLD)
            return gw.Exchange(encoder, node, min_peers=0, outer_momentum=momentum)

        without, within = share_with(0.0), share_with(MOMENTUM)
        without.step(update, params)
        assert without.state_dict()["outer_velocity"] == []
        within.step(update, params)
        with pytest.raises(ValueError, match="no outer_momentum"):
            share_with(0.0).load_state_dict(within.state_dict())


@pytest.mark.parametrize(
    ("options", "momentum"),
    [
        ({}, 0.0),
        ({"every": 4}, 0.0),
        ({"every": 14, "overlap": 1}, 0.0),
        ({"every": 15}, 0.5),
        ({"every": 100, "overlap": 1, "topology": "sharded"}, 0.5),
        ({"every": 15, "outer_momentum": 0.0}, 0.0),
        ({"every": 15, "outer_momentum": 0.25}, 0.25),
        ({"every": 15, "mode": "async"}, 0.0),
        ({"every": 15, "reduction": "sum"}, 0.0),
    ],
    ids=str,
)
def test_share_has_it_from_fifteen_local_steps_on(options: Any, momentum: float) -> None:
    with gw.share(np.zeros(3, np.float32), **options) as shared:
        assert shared.exchange._options.outer_momentum == momentum


@pytest.mark.parametrize("every", [2.5, "15", None, True])
def test_share_refuses_what_is_no_number_of_steps(every: Any) -> None:
    with pytest.raises(TypeError, match="every must be an int"):
        gw.share(np.zeros(3, np.float32), every=every)
