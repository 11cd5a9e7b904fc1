"""The three ways of an exchange: chosen once, by a rule that all nodes know; what does not fit a way is refused."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import ExchangeOptions, LocalExchange
from gradwire.exchange import options as rule
from gradwire.exchange.options import Options
from gradwire.exchange.protocol import TAG_NUMBERS

from ..seeds import seeds
from .cluster import FakeNode, cluster, run_cluster
from .test_sharded import SIZES, Trainer, assert_identical, assert_nothing_lost

PACKAGE = Path(gw.__file__).parent


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "nodes", "numel", "is_sharded"),
    [
        ({}, 5, 500_000, True),
        ({}, 4, 500_000, False),
        ({}, 5, 499_999, False),
        ({"codec": "dense"}, 5, 500_000, True),
        ({"mode": "async"}, 64, 10**9, False),
        ({"topology": "sharded"}, 2, 10, True),
        ({"topology": "mesh"}, 64, 10**9, False),
    ],
)
def test_auto_is_a_rule_of_two_numbers(
    options: Any, nodes: int, numel: int, is_sharded: bool
) -> None:
    assert Options.of(options).is_sharded(nodes, numel) is is_sharded


@pytest.mark.parametrize(("count", "is_sharded"), [(4, False), (5, True)])
def test_the_first_members_choose_the_way(count: int, is_sharded: bool) -> None:
    def work(node: FakeNode, rank: int) -> tuple[bool, bytes]:
        share = gw.Exchange(gw.Encoder(rule.SHARDED_NUMEL, 0.5), node, min_peers=count - 1)
        params = np.zeros(rule.SHARDED_NUMEL, np.float32)
        for step in range(3):
            share.step(np.full(rule.SHARDED_NUMEL, 0.25 * (rank + step), np.float32), params)
        return share.stats.is_sharded, params.tobytes()

    replicas = run_cluster(work, count=count, seed=7)
    assert {chosen for chosen, _ in replicas} == {is_sharded}
    assert len({params for _, params in replicas}) == 1


@pytest.fixture
def sharded_from_three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds: fewer nodes and elements are quicker."""
    monkeypatch.setattr(rule, "SHARDED_NODES", 3)
    monkeypatch.setattr(rule, "SHARDED_NUMEL", sum(SIZES))


@pytest.mark.usefixtures("sharded_from_three_nodes")
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("initial", [2, 3])
def test_the_way_stays_when_nodes_come_leave_and_die(seed: int, initial: int) -> None:
    with cluster(seed) as world:

        def trainer(node_id: int, peers: int) -> Trainer:
            return Trainer(world, node_id, 30, min_peers=peers, topology="auto")

        trainers = [trainer(10 * (1 + rank), initial - 1) for rank in range(initial)]
        if initial == 3:  # of two, the last could end before a newcomer has all of its parameters
            trainers[0].leaves_after = 20
        for node_id in (5, 25):
            turn = world.random.randint(60, 250)
            world.plan(turn, lambda n=node_id: trainers.append(trainer(n, 1)))
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers)
    assert {one.share.stats.is_sharded for one in trainers} == {initial == 3}


@pytest.mark.usefixtures("sharded_from_three_nodes")
def test_the_same_run_gives_the_same_bits() -> None:
    def outcome() -> list[bytes]:
        with cluster(11) as world:
            trainers = [
                Trainer(world, 10 * (1 + rank), 20, min_peers=2, topology="auto")
                for rank in range(3)
            ]
            world.run()
        return [one.shared.tobytes() for one in trainers]

    assert outcome() == outcome()


# ---- options ---------------------------------------------------------------------------------------------------------


def test_the_options_are_declared_once() -> None:
    assert get_type_hints(ExchangeOptions) == {
        name: kind for name, kind in get_type_hints(Options).items() if not name.startswith("_")
    }
    assert [field.name for field in fields(Options)] == list(ExchangeOptions.__annotations__)


def test_an_unknown_option_is_refused_with_the_names_of_those_that_there_are() -> None:
    with cluster(0) as world, pytest.raises(TypeError, match=r"exact; an exchange has reduction"):
        gw.Exchange(gw.Encoder(4, 1.0), world.node(1), exact=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"topology": "sharded"}, "an owner needs all nodes' parts of the same step"),
        ({"overlap": 1}, "asynchronous ones wait for nobody"),
        ({"outer_momentum": 0.5}, "do not all add the same messages"),
        ({"on_straggler": "drop"}, "max_staleness"),
    ],
)
def test_what_does_not_fit_the_asynchronous_way_is_refused_with_the_reason(
    options: Any, reason: str
) -> None:
    with cluster(0) as world, pytest.raises(ValueError, match=reason):
        gw.Exchange(gw.Encoder(4, 1.0), world.node(1), mode="async", **options)


def test_a_node_and_a_worker_of_a_team_offer_the_same() -> None:
    own = {"team", "exchange"}
    with cluster(0) as world:
        exchange = gw.Exchange(gw.Encoder(4, 1.0), world.node(1))
    offered = {name for name in dir(LocalExchange) if not name.startswith("_")} - own
    assert {"rank", "workers", "present", "takes_devices", "step_moved"} <= offered
    assert offered <= set(dir(exchange))


# ---- what a step costs -----------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[list[gw.Node]]:
    secret = bytes(range(32))
    with (
        gw.Node("127.0.0.1:0", secret=secret) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=secret) as second,
    ):
        yield [first, second]


def test_a_mesh_step_enters_few_modules_and_none_of_the_owners(
    nodes: list[gw.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps for which the other node's message is there: how often a step looks for it depends on other work."""
    profiles: list[tuple[int, int, set[str]]] = []

    def profiled_step(take: Any) -> None:
        calls = moves = 0
        modules: set[str] = set()

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal calls, moves
            name = frame.f_code.co_filename
            if event != "call" or not name.startswith(str(PACKAGE)):
                return
            calls += 1
            modules.add(str(Path(name).relative_to(PACKAGE)))
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
                caller = caller.f_back
            moves += caller is not None and caller.f_code.co_filename != name

        sys.setprofile(count)
        try:
            take()
        finally:
            sys.setprofile(None)
        profiles.append((calls, moves, modules))

    first, second = nodes
    published = threading.Semaphore(0)
    publish = second.publish

    def counted(buffer: Any, tag: int = 0, to: Any = None) -> Any:
        ticket = publish(buffer, tag, to)
        if 0 < tag < TAG_NUMBERS:  # an update
            published.release()
        return ticket

    monkeypatch.setattr(second, "publish", counted)

    def wait_for_update() -> None:
        published.acquire()
        sent_bytes = second.stats().payload_bytes_sent
        while first.stats().payload_bytes_received < sent_bytes:
            time.sleep(0.001)

    def train(rank: int) -> None:
        encoder = gw.Encoder(10_000, gw.TargetDensity(0.01))
        share = gw.Exchange(encoder, nodes[rank], min_peers=1, digest_s=0.0, topology="mesh")
        params = np.zeros(10_000, np.float32)
        for step in range(40):
            update = np.random.default_rng([rank, step]).standard_normal(10_000).astype(np.float32)
            if rank == 0 and step > 0:  # the first step is also the beginning
                wait_for_update()
            if rank == 0 and step >= 10:
                profiled_step(lambda u=update: share.step(u, params))
            else:
                share.step(update, params)

    other = threading.Thread(target=train, args=(1,))
    other.start()
    train(0)
    other.join()
    # Other work of the machine adds calls to a step, or lets it find its message elsewhere: in fewer calls, of which
    # more cross to another module.
    calls, moves = (min(profile[index] for profile in profiles) for index in (0, 1))
    _, _, modules = min(profiles, key=lambda profile: profile[0])
    assert not any("exchange/owner.py" in names for *_, names in profiles)
    assert len(modules) <= 25
    assert calls <= 230
    assert moves <= 90
