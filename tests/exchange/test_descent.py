"""Descent at the owners: the same as one optimiser on one machine, wherever its state lies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import Optimizer
from gradwire.exchange.replica import Replica

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster, run_cluster

SIZES = (24, 700, 7, 40, 3)
NUMEL = sum(SIZES)

histories = pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in seeds(12)],
)

Params = list[NDArray[Any]]

# With powers of two every number of a short training is exact in float64.
EXACT = gw.SGD(0.25, momentum=0.5)
LINEAR: dict[str, Optimizer] = {
    "plain": gw.SGD(0.25),
    "momentum": EXACT,
    "nesterov": replace(EXACT, nesterov=True),
    "decay": replace(EXACT, weight_decay=0.25),
}
ADAPTIVE: dict[str, Optimizer] = {
    "adagrad": gw.Adagrad(0.1),
    "adam": gw.Adam(0.01, weight_decay=0.1),
    "adamw": gw.AdamW(0.01, betas=(0.8, 0.99)),
}


def halved(step: int) -> float:
    return 0.25 if step < 6 else 0.125


def gradient(node_id: int, count: int) -> Params:
    rng = np.random.default_rng([47, node_id, count])
    return [rng.integers(-256, 256, size) / 2.0**8 for size in SIZES]


def start() -> Params:
    return [np.arange(size) / 32.0 for size in SIZES]


def flat(arrays: Any) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(one, np.float64).reshape(-1) for one in arrays])


class Trainer:
    """A node that sends gradients until the members have reached a step, and notes which."""

    def __init__(
        self,
        world: Cluster,
        node_id: int,
        steps: int = 15,
        *,
        optimizer: Optimizer = EXACT,
        before: Trainer | None = None,
        loads: dict[str, Any] | None = None,
        policy: Any = 1.0,
        **options: Any,
    ) -> None:
        self.world, self.steps = world, steps
        self.node: FakeNode = world.node(node_id)
        encoders = [
            gw.Encoder(size, policy, dtype="float64", key=k) for k, size in enumerate(SIZES)
        ]
        self.groups = gw.Groups([gw.exchange.Group(one, (one.key,)) for one in encoders])
        defaults = {"codec": "dense", "timeout_s": 20.0, "digest_s": 0.3, "reduction": "sum"}
        self.options = {**defaults, "topology": "sharded", "optimizer": optimizer, **options}
        self.share = gw.Exchange(self.groups, self.node, **self.options)
        self.params = start()
        if before is not None:
            loads, self.params = loads or before.saved, [one.copy() for one in before.saved_params]
        if loads is not None:
            self.share.load_state_dict(loads)
        self.sent: dict[int, Params] = {}  # by step
        self.lost: set[int] = set()  # ids of members that went
        self.count = 0 if before is None else before.count
        self.leaves_after: int | None = None
        self.resyncs_at: int | None = None
        self.begun: int | None = None
        self.cohort: list[Trainer] = []
        self.is_done = False
        self.worker = world.start(self.node, self.train)

    def train(self) -> None:
        self.begun = self.share.join(self.params).step
        while self.share.next_step < self.steps:
            self.world.compute(self.node, 0.1)
            if self.share.next_step == self.resyncs_at:
                self.resyncs_at = None
                self.share.resync(self.params)
            self.step()
            if self.leaves_after is not None and self.share.next_step > self.leaves_after:
                self.share.leave(self.params)
                break
        self.saved = self.share.state_dict()
        if self.options.get("overlap") and self.leaves_after is None:
            self.share.catch_up(self.params)
        self.saved_params = [one.copy() for one in self.params]
        self.finish()

    def finish(self) -> None:
        self.is_done = True
        self.world.close(self.node)

    def step(self) -> None:
        if self.options.get("role") == "owner":
            self.share.follow(self.params, timeout_s=0.2)
            return
        step = self.share.next_step
        one = gradient(self.node.peer.id, self.count)
        self.count += 1
        result = self.share.step(one, self.params)
        self.lost |= {peer.id for peer in result.lost}
        if not self.options.get("overlap"):
            step = result.step
        self.sent[step] = one

    @property
    def replica(self) -> Replica:
        return self.share._replica

    @property
    def remains(self) -> bool:
        return not self.node.is_dead and self.leaves_after is None


def on_one_machine(
    optimizer: Optimizer, trainers: list[Trainer], steps: int, mean: bool = False
) -> Any:
    """Return the parameters and the state after the same gradients on one machine."""
    params = flat(start())
    state = [np.zeros(NUMEL) for _ in range(optimizer.slots)]
    for step in range(steps):
        sent = [flat(one.sent[step]) for one in trainers if step in one.sent]
        total = sum(sent) / (len(sent) if mean else 1.0)
        params += optimizer.update(total, params, state, step)
    return params, state


def state_of(trainers: list[Trainer]) -> list[NDArray[np.float64]]:
    """Return the optimiser's state of all owners."""
    remaining = [one for one in trainers if one.remains]
    slots = remaining[0].options["optimizer"].slots
    found = [[np.zeros(size) for size in SIZES] for _ in range(slots)]
    for one in remaining:
        owner = one.share.state_dict()["owner"]
        shares = one.replica._shares.of(owner["parts"], owner["at"]) if owner else ()
        for (index, part), state in zip(shares, owner["states"] if owner else (), strict=True):
            for slot, values in enumerate(state):
                for of_whole, of_part in part.slices():
                    found[slot][index][of_whole] += values[of_part]
    return [flat(one) for one in found]


def assert_identical(trainers: list[Trainer]) -> None:
    remaining = [one for one in trainers if one.remains]
    assert len({one.share.next_step for one in remaining}) == 1
    assert len({flat(one.params).tobytes() for one in remaining}) == 1
    assert any(one.share.stats.digests for one in remaining)


def assert_as_on_one_machine(
    trainers: list[Trainer], steps: int = 15, *, exact: bool = True
) -> None:
    assert_identical(trainers)
    optimizer = trainers[0].options["optimizer"]
    mean = trainers[0].options["reduction"] == "mean"
    params, state = on_one_machine(optimizer, trainers, steps, mean)
    survivor = next(one for one in trainers if one.remains)
    for here, there in [
        (flat(survivor.params), params),
        *zip(state_of(trainers), state, strict=True),
    ]:
        if exact:
            np.testing.assert_array_equal(here, there)
        else:
            np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-13)
    assert survivor.share.stats.orphaned == 0


def assert_nothing_lost(trainers: list[Trainer], divisor: int = 1) -> None:
    """Plain descent is linear: what was sent and not kept is in the parameters, or owed to them."""
    sent = sum(flat(each) for one in trainers for each in one.sent.values())
    kept, owed = np.zeros(NUMEL), [np.zeros(size) for size in SIZES]
    for one in trainers:
        kept += flat([each.residual for each in one.groups.encoders])
        if not one.remains:
            continue
        state, replica = one.share.state_dict(), one.replica
        under_way = [part.piece for part in replica._sent_parts() if part.is_open]
        for piece in under_way:
            found = [np.zeros(size) for size in SIZES]
            replica._add_to_params(piece, found, 1.0)
            kept += flat(found)
        assert replica._descent is not None
        handovers = [one for piece in under_way for one in piece.handovers]
        estates = replica._descent.export(handovers)
        if state["owner"] is not None:
            place = {name: state["owner"][name] for name in ("parts", "at")}
            residuals = [[each["residual"]] for each in state["owner"]["encoders"]]
            estates.append({**place, "arrays": residuals})
        for estate in estates:
            shares = replica._shares.of(estate["parts"], estate["at"])
            for (index, part), (residual, *_) in zip(shares, estate["arrays"], strict=True):
                for of_whole, of_part in part.slices():
                    owed[index][of_whole] += residual[of_part]
    survivor = next(one for one in trainers if one.remains)
    np.testing.assert_array_equal(
        flat(survivor.params) + flat(owed), flat(start()) - 0.25 * (sent - kept) / divisor
    )


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "momentum", "nesterov", "decay", *ADAPTIVE])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_whole_gradients_give_what_one_machine_gives(name: str, count: int, reduction: str) -> None:
    with cluster(3) as world:
        optimizer = (LINEAR | ADAPTIVE)[name]
        trainers = [
            Trainer(world, 10 + at, optimizer=optimizer, min_peers=count - 1, reduction=reduction)
            for at in range(count)
        ]
        if count == 1:
            trainers[0].options["digest_s"] = 0
        world.run()
    if count > 1:
        assert_as_on_one_machine(trainers, exact=name in LINEAR and name != "decay")
    else:
        params, _ = on_one_machine(optimizer, trainers, 15)
        np.testing.assert_allclose(flat(trainers[0].params), params, rtol=1e-12, atol=1e-13)


def test_a_learning_rate_may_follow_the_steps() -> None:
    with cluster(3) as world:
        optimizer = replace(EXACT, lr=halved)
        trainers = [Trainer(world, at, optimizer=optimizer, min_peers=2) for at in (1, 2, 3)]
        world.run()
    assert_as_on_one_machine(trainers)


def test_an_optimizer_of_one_s_own_fits_the_protocol() -> None:
    class Signs:
        slots, is_linear = 1, False

        def update(self, gradient: Any, params: Any, state: Any, step: int) -> Any:  # noqa: ARG002
            state[0] += np.sign(gradient)
            return -0.125 * np.sign(state[0])

    with cluster(3) as world:
        trainers = [Trainer(world, at, optimizer=Signs(), min_peers=2) for at in (1, 2, 3)]
        world.run()
    assert_as_on_one_machine(trainers)


TORCH: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda torch: torch.optim.SGD,
    "Adagrad": lambda torch: torch.optim.Adagrad,
    "Adam": lambda torch: torch.optim.Adam,
    "AdamW": lambda torch: torch.optim.AdamW,
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr": 0.1, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
        ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    ],
)
def test_the_optimizers_are_torch_s(name: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    with cluster(3) as world:
        optimizer = getattr(gw, name)(**options)
        trainers = [Trainer(world, at, optimizer=optimizer, min_peers=2) for at in (1, 2, 3)]
        world.run()
    params = torch.tensor(flat(start()), requires_grad=True)
    reference = TORCH[name](torch)([params], **options)
    for step in range(15):
        params.grad = torch.tensor(sum(flat(one.sent[step]) for one in trainers))
        reference.step()
    here, there = flat(trainers[0].params), params.detach().numpy()
    np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-13)


# --- members ----------------------------------------------------------------------------------------------------------


def join_and_leave(seed: int, **how: Any) -> list[Trainer]:
    with cluster(seed) as world:
        trainers = [Trainer(world, at, min_peers=2, **how) for at in (10, 20, 30)]
        trainers[world.random.randrange(3)].leaves_after = world.random.randint(4, 10)
        for node_id in (5, 25):
            turn = world.random.randint(60, 200)
            world.plan(
                turn, lambda n=node_id: trainers.append(Trainer(world, n, min_peers=1, **how))
            )
        world.run()
    assert_identical(trainers)
    assert len(trainers) == 5
    assert not any(one.share.stats.orphaned for one in trainers)
    return trainers


@histories
@pytest.mark.parametrize("how", [{}, {"overlap": 1}], ids=str)
def test_state_follows_the_elements_when_nodes_join_and_leave(seed: int, how: Any) -> None:
    trainers = join_and_leave(seed, **how)
    # What a newcomer that begins again before its first step was to own takes two gradients in one step.
    if not how and not {5, 25} & set().union(*(one.lost for one in trainers)):
        assert_as_on_one_machine(trainers)


@histories
def test_plain_descent_loses_nothing_when_nodes_join_and_leave(seed: int) -> None:
    assert_nothing_lost(join_and_leave(seed, optimizer=gw.SGD(0.25)))


@histories
def test_two_leave_in_one_step(seed: int) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, at, min_peers=3) for at in (10, 20, 30, 40)]
        for one in world.random.sample(trainers, 2):
            one.leaves_after = 7
        world.run()
    assert_as_on_one_machine(trainers)


def kill(one: Trainer) -> None:
    if not one.is_done and one.share.next_step < one.steps - 2:
        one.world.kill(one.node)


def deaths(seed: int, **how: Any) -> None:
    with cluster(seed) as world:
        count = world.random.choice([3, 4, 5])
        trainers = [Trainer(world, 10 + at, 20, min_peers=count - 1, **how) for at in range(count)]
        dead = world.random.choice(trainers)
        world.plan(world.random.randint(40 * count, 220 * count), lambda: kill(dead))
        world.run()
    assert_identical(trainers)
    survivors = [one for one in trainers if one.remains]
    if len(survivors) < count:
        lost = {one.share.stats.orphaned for one in survivors}
        assert len(lost) == 1
        assert lost.pop() > 0
    assert np.isfinite(flat(survivors[0].params)).all()
    assert not any(one.replica.estates() for one in survivors)


@histories
@pytest.mark.parametrize("how", [{}, {"codec": "threshold"}, {"optimizer": gw.Adam(0.01)}], ids=str)
def test_a_dead_owner_s_state_begins_anew_and_is_counted(seed: int, how: Any) -> None:
    deaths(seed, **how)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(100))
@pytest.mark.parametrize("how", [{}, {"overlap": 1}, {"codec": "threshold"}], ids=str)
def test_deaths_in_every_phase(seed: int, how: Any) -> None:
    deaths(1000 + seed, **how)


def test_a_dead_owner_s_elements_have_the_state_of_a_beginning() -> None:
    class Counting:
        """Its state is the number of steps."""

        slots, is_linear = 1, True

        def update(self, gradient: Any, params: Any, state: Any, step: int) -> Any:  # noqa: ARG002
            state[0] += 1.0
            return -0.25 * gradient

    with cluster(5) as world:
        trainers = [Trainer(world, 10 + at, optimizer=Counting(), min_peers=3) for at in range(4)]
        world.run(until=lambda: trainers[0].share.next_step == 8)
        owned = trainers[2].replica._owner
        assert owned is not None
        numel = sum(encoder.numel for encoder in owned.encoders)
        world.kill(trainers[2].node)
        world.run()
    assert_identical(trainers)
    (counts,) = state_of(trainers)
    assert (counts < 15).sum() == numel == trainers[0].share.stats.orphaned
    assert (counts[counts < 15] >= 6).all()


@histories
def test_a_resync_is_the_end_of_an_owner_s_state(seed: int) -> None:
    with cluster(seed) as world:
        trainers = [Trainer(world, at, 30, min_peers=2) for at in (10, 20, 30)]
        trainers[1].resyncs_at = 9
        world.run()
    assert trainers[1].resyncs_at is None
    assert_identical(trainers)
    assert trainers[0].share.stats.orphaned > 0


# --- residuals --------------------------------------------------------------------------------------------------------


@histories
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_nothing_is_lost_in_either_unit(seed: int, reduction: str) -> None:
    """With plain descent parameters and owners' residuals are the start less the gradients that nodes do not keep."""
    with cluster(seed) as world:
        plain: dict[str, Any] = {"codec": "threshold", "optimizer": gw.SGD(0.25), "policy": 0.5}
        if reduction == "mean":
            plain["reduction"] = "mean"
        trainers = [Trainer(world, at, 20, min_peers=3, **plain) for at in (10, 20, 30, 40)]
        if reduction == "sum":
            trainers[world.random.randrange(4)].leaves_after = 9
            turn = world.random.randint(60, 250)
            world.plan(turn, lambda: trainers.append(Trainer(world, 15, 20, min_peers=1, **plain)))
        world.run()
    assert_identical(trainers)
    assert_nothing_lost(trainers, 1 if reduction == "sum" else len(trainers))
    state: Any = next(one for one in trainers if one.remains).replica.owner_state()
    assert any(one["residual"].any() for one in state["encoders"])


# --- checkpoints ------------------------------------------------------------------------------------------------------


@histories
@pytest.mark.parametrize(
    "how",
    [{}, {"overlap": 1}, {"codec": "threshold"}, {"optimizer": gw.Adam(0.01)}],
    ids=["momentum", "overlap", "threshold", "adam"],
)
def test_training_resumes_from_checkpoints_bit_for_bit(seed: int, how: Any) -> None:
    def train(world: Cluster, steps: int, before: list[Trainer] | None = None) -> list[Trainer]:
        found = [
            Trainer(
                world,
                10 + at,
                steps,
                before=None if before is None else before[at],
                min_peers=3,
                **how,
            )
            for at in range(4)
        ]
        world.run()
        return found

    with cluster(seed) as world:
        whole = train(world, 15)
    with cluster(seed + 100) as world:
        first = train(world, 8)
    if "overlap" in how:  # the last step is taken back
        for one in first:
            one.saved_params = first[0].saved_params
            one.saved = one.share.state_dict()
    with cluster(seed + 200) as world:
        second = train(world, 15, first)
    assert flat(second[0].params).tobytes() == flat(whole[0].params).tobytes()
    assert [one.tolist() for one in state_of(second)] == [one.tolist() for one in state_of(whole)]
    assert_identical(second)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_another_number_of_nodes_goes_on_with_the_same_state(world_size: int) -> None:
    with cluster(1) as world:
        before = [Trainer(world, 10 + at, 8, min_peers=3) for at in range(4)]
        world.run()
    states = gw.exchange.redistribute([one.saved for one in before], world_size, reduction="sum")
    with cluster(2) as world:
        after = [
            Trainer(world, 100 + at, before=before[0], loads=state, min_peers=world_size - 1)
            for at, state in enumerate(states)
        ]
        world.run()
    params, state = on_one_machine(EXACT, [*before, *after], 15)
    np.testing.assert_array_equal(flat(after[0].params), params)
    np.testing.assert_array_equal(state_of(after), state)


def test_a_state_in_the_middle_of_a_step_is_that_before_it() -> None:
    saved = []

    class Interrupted(Trainer):
        def step(self) -> None:
            if self.share.next_step != 6 or self.node.peer.id != 10:
                super().step()
                return
            one = gradient(10, 6)
            self.world.slow_links.add((trainers[1].node.peer, self.node.peer))
            with pytest.raises(TimeoutError):
                self.share.step(one, self.params)
            self.sent[6] = one
            self.world.slow_links.clear()
            self.share._finish_earlier(self.params, ())

    with cluster(4) as world:
        trainers: list[Trainer] = [
            Interrupted(
                world,
                at,
                12,
                min_peers=1,
                timeout_s=5.0,
                on_straggler="wait" if at > 10 else "raise",
            )
            for at in (10, 20)
        ]

        def look() -> bool:
            for one in trainers:
                own: Any = one.replica.pending
                if own is not None and own.before is not None:
                    saved.append((own.before, one.share.state_dict()["owner"]))
            return False

        world.run(until=look)
    assert_as_on_one_machine(trainers, 12)
    assert saved
    for before, state in saved:
        pairs = zip(state["encoders"], state["states"], strict=True)
        found = [[one["residual"], *each] for one, each in pairs]
        for here, there in zip(itertools.chain(*found), itertools.chain(*before), strict=True):
            np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize(
    ("one", "other"),
    [(EXACT, None), (None, EXACT), (EXACT, gw.SGD(0.1)), (gw.Adam(0.1), EXACT)],
    ids=["without", "with", "plain", "adam"],
)
def test_a_checkpoint_of_another_optimizer_is_refused(one: Any, other: Any) -> None:
    def made(world: Cluster, optimizer: Any) -> gw.Exchange:
        options = {"topology": "sharded", "codec": "dense", "optimizer": optimizer}
        return gw.Exchange(gw.Encoder(4, 1.0), world.node(1), **options)

    with cluster(0) as world:
        state = made(world, one).state_dict()
        with pytest.raises(ValueError, match="optimizer"):
            made(world, other).load_state_dict(state)


# --- roles and asynchronous owners ------------------------------------------------------------------------------------


@histories
def test_a_parameter_server_descends_for_its_workers(seed: int) -> None:
    with cluster(seed) as world:
        roles = {10: "worker", 20: "owner", 30: "worker"}
        trainers = [
            Trainer(world, at, role=role, min_peers=2, reduction="mean")
            for at, role in roles.items()
        ]
        world.run()
    assert_as_on_one_machine(trainers)
    assert trainers[0].replica.owner_state() is None


class Quiet(Trainer):
    """An asynchronous node: it goes on receiving until nothing is under way."""

    def finish(self) -> None:
        self.is_done = True
        quiet = 0
        while quiet < 6:
            if self.options["role"] == "owner":
                self.share.follow(self.params, timeout_s=0.5)
            else:
                self.share.catch_up(self.params, 0.5)
            is_quiet = all(one.is_done for one in self.cohort) and not any(
                [*self.world._links.values(), *(one.node.inbox for one in self.cohort)]
            )
            quiet = quiet + 1 if is_quiet else 0
        self.drained = True
        while not all(getattr(one, "drained", False) for one in self.cohort):
            self.world.compute(self.node, 0.1)
        super().finish()


@histories
def test_an_asynchronous_server_descends_with_whatever_arrives(seed: int) -> None:
    with cluster(seed) as world:
        roles = {10: "worker", 20: "owner", 30: "worker"}
        plain = {"mode": "async", "optimizer": gw.SGD(0.25)}
        trainers = [Quiet(world, at, role=role, min_peers=2, **plain) for at, role in roles.items()]
        for one in trainers:
            one.cohort = trainers
            one.steps = 0 if one.options["role"] == "owner" else one.steps
        world.run()
    total = sum(flat(each) for one in trainers for each in one.sent.values())
    for one in trainers:
        np.testing.assert_array_equal(flat(one.params), flat(start()) - 0.25 * total)


@histories
def test_asynchronous_owners_hand_over_what_they_owe(seed: int) -> None:
    with cluster(seed) as world:
        plain: Any = {"mode": "async", "optimizer": gw.SGD(0.25), "role": "member"}
        trainers = [Quiet(world, at, min_peers=2, **plain) for at in (10, 20, 30)]
        turn = world.random.randint(60, 200)
        world.plan(turn, lambda: trainers.append(Quiet(world, 25, min_peers=1, **plain)))
        for one in trainers:
            one.cohort = trainers
        world.run(until=lambda: len(trainers) == 4)
        trainers[3].cohort = trainers
        world.run()
    assert_nothing_lost(trainers)


def test_real_nodes_descend_through_owners() -> None:
    optimizer, secret, steps = gw.SGD(0.25, momentum=0.5), bytes(range(32)), 8
    with ExitStack() as stack:
        nodes: list[gw.Node] = []
        for _ in range(3):
            seeds_so_far = [one.address for one in nodes]
            nodes.append(stack.enter_context(gw.Node("127.0.0.1:0", seeds_so_far, secret=secret)))

        def train(node: gw.Node, rank: int) -> NDArray[np.float32]:
            options: Any = {"topology": "sharded", "codec": "dense", "reduction": "sum"}
            share = gw.Exchange(
                gw.Encoder(5000, 1.0), node, min_peers=2, optimizer=optimizer, **options
            )
            params = np.zeros(5000, np.float32)
            for step in range(steps):
                share.step(np.full(5000, step + rank, np.float32), params)
            return params

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(train, nodes, range(3)))
    params, state = np.zeros(1), [np.zeros(1)]
    for step in range(steps):
        params += optimizer.update(np.array([3.0 * step + 3.0]), params, state, step)
    for one in found:
        np.testing.assert_array_equal(one, params[0])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topology": "auto"}, "needs topology"),
        ({"topology": "mesh"}, "needs topology"),
        ({"every": 2}, "local steps"),
        ({"apply_residual": True}, "holds gradients"),
        ({"outer_momentum": 0.5}, "give the optimizer the momentum"),
        ({"exact": True}, "exact is for the mesh"),
        ({"optimizer": gw.Adam(0.1)}, 'codec="dense"'),
        ({"optimizer": gw.Adagrad(0.1)}, "normalises gradients"),
    ],
    ids=str,
)
def test_what_does_not_combine_is_refused(options: Any, text: str) -> None:
    with cluster(0) as world, pytest.raises(ValueError, match=text):
        gw.Exchange(
            gw.Encoder(4, 1.0),
            world.node(1),
            **{"topology": "sharded", "optimizer": EXACT, **options},
        )


def test_what_is_no_optimizer_is_refused() -> None:
    with cluster(0) as world, pytest.raises(TypeError, match="optimizer"):
        gw.Exchange(gw.Encoder(4, 1.0), world.node(1), topology="sharded", optimizer="sgd")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: gw.SGD(-1.0),
        lambda: gw.SGD(0.1, momentum=1.0),
        lambda: gw.SGD(0.1, nesterov=True),
        lambda: gw.Adam(0.1, betas=(0.9, 1.0)),
        lambda: gw.AdamW(0.1, weight_decay=-0.1),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        make()


def test_movements_are_no_gradients() -> None:
    with cluster(0) as world:
        options: Any = {"topology": "sharded", "optimizer": EXACT, "min_peers": 0}
        share = gw.Exchange(gw.Encoder(4, 1.0), world.node(1), **options)
        params = np.zeros(4, np.float32)
        share.join(params)
        with pytest.raises(ValueError, match="call step"):
            share.step_moved(params)


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (EXACT, None, "optimizer None there"),
        (EXACT, gw.SGD(0.5, momentum=0.5), "lr=0.5"),
        (EXACT, replace(EXACT, lr=halved), "lr=halved"),
        (gw.Adam(0.1), gw.AdamW(0.1), "AdamW"),
    ],
    ids=["none", "lr", "schedule", "class"],
)
def test_another_optimizer_is_a_mismatch_that_names_both_sides(
    here: Any, there: Any, text: str
) -> None:
    def begin(node: FakeNode, rank: int) -> str:
        options: Any = {"optimizer": here if rank == 0 else there, "codec": "dense"}
        share = gw.Exchange(gw.Encoder(4, 1.0), node, min_peers=1, topology="sharded", **options)
        with pytest.raises(gw.Mismatch) as caught:
            share.wait_for_peers()
        return str(caught.value)

    found = run_cluster(begin, count=2, seed=0)
    assert text in found[0]
    for one in found:
        assert "optimizer" in one
        assert "127.0.0.1:1010" in one
        assert "127.0.0.1:1020" in one
