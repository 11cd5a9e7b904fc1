"""Exchanges with further parameters that follow others: who repeats itself, dies or leaves meanwhile ends nobody."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import hand_over, take_over

from .cluster import FakeNode, run_cluster

SHAPES = [(8, 9), (5, 8)]
WAYS: list[dict[str, Any]] = [{}, {"topology": "sharded"}, {"overlap": 1}, {"every": 3}]

Ends = Callable[[gw.Exchange, FakeNode, list[NDArray[np.float32]]], None]


def exchange(node: FakeNode, count: int, **options: Any) -> gw.Exchange:
    groups = gw.Groups.of([np.zeros(shape, np.float32) for shape in SHAPES[:count]], 2.0**-6)
    return gw.Exchange(groups, node, min_peers=2, **options)


def add_parameter(
    share: gw.Exchange, node: FakeNode, params: list[NDArray[np.float32]], **options: Any
) -> gw.Exchange:
    hand_over(share, params)
    following = exchange(node, 2, **options)
    params.append(np.zeros(SHAPES[1], np.float32))
    take_over(following, share, params, 1)
    following.join(params)
    return following


def train_on(before: int, ends: Ends, **options: Any) -> Callable[[FakeNode, int], int]:
    """Let two nodes add a parameter after so many steps, and the third one end; return how many train on at most."""

    def work(node: FakeNode, rank: int) -> int:
        params = [np.zeros(SHAPES[0], np.float32)]
        share = exchange(node, 1, **options)
        share.join(params)
        for _ in range(before):
            params[0] += 2.0**-8
            share.step_moved(params)
        if rank == 2:
            ends(share, node, params)
            return 0
        following = add_parameter(share, node, params, **options)
        members = 0
        for _ in range(12):
            node.cluster.compute(node, 0.5)
            following.step_moved(params)
            members = max(members, len(following.members) + 1)
        following.end()
        node.cluster.close(node)
        return members

    return work


def test_a_repeated_introduction_is_not_taken_for_that_to_the_exchange_that_follows() -> None:
    """While a node waits for the start it introduces itself again; whether that comes late depends on the seed."""

    def work(node: FakeNode, _: int) -> int:
        share = exchange(node, 1)
        params = [np.zeros(SHAPES[0], np.float32)]
        share.join(params)
        return hand_over(share, params).received

    for seed in range(30):
        assert run_cluster(work, seed=seed) == [2, 2, 2]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_node_that_dies_while_the_others_wait_for_it_does_not_end_them(
    options: dict[str, Any],
) -> None:
    """They find that out in the exchange before, and one of them follows while the other still speaks of it."""

    def ends(_: gw.Exchange, node: FakeNode, __: object) -> None:
        node.cluster.compute(node, 0.5)
        node.cluster.kill(node)

    for seed in range(10):
        assert run_cluster(train_on(seed % 3, ends, **options), seed=seed) == [2, 2, 0]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_node_that_dies_while_all_add_parameters_does_not_end_the_others(
    options: dict[str, Any],
) -> None:
    """Who has its last message finishes the step, and must not go on before it has passed it on to who lacks it."""

    def ends(share: gw.Exchange, node: FakeNode, params: list[NDArray[np.float32]]) -> None:
        world = node.cluster
        world.plan(world.turns + world.random.randint(1, 40), lambda: world.kill(node))
        add_parameter(share, node, params, **options)
        world.rest(node, math.inf)

    for seed in range(25):
        before = options.get("every", 1) + 1 + seed % 3  # all have met before
        *others, dead = run_cluster(train_on(before, ends, **options), seed=seed)
        assert min(others) >= 2
        assert dead is None


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_node_that_leaves_while_the_others_add_parameters_leaves_in_good_order(
    options: dict[str, Any],
) -> None:
    def ends(share: gw.Exchange, node: FakeNode, params: list[NDArray[np.float32]]) -> None:
        share.leave(params)
        node.cluster.close(node)

    for seed in range(20):
        assert run_cluster(train_on(seed % 3, ends, **options), seed=seed) == [2, 2, 0]


def test_a_node_that_has_left_may_begin_anew_while_another_one_leaves() -> None:
    def work(node: FakeNode, rank: int) -> bool:
        share = exchange(node, 1)
        params = [np.zeros(SHAPES[0], np.float32)]
        share.join(params)
        share.step_moved(params)
        if rank < 2:
            node.cluster.compute(node, 0.2)
            share.leave(params)
            return True
        share.end()
        with pytest.raises(TimeoutError):
            exchange(node, 1, start_timeout_s=1.0).join(params)
        return True

    for seed in range(20):
        assert run_cluster(work, seed=seed) == [True] * 3
