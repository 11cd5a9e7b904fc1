"""A shared optimiser is one of torch's in its owner's hands: every method and attribute, each against the plain one."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


from .places import (  # noqa: E402
    AS_PLAIN,
    OPTIMIZERS,
    PLACES,
    Share,
    assert_as,
    share,
    steps,
)
from .test_optimizer import flat, loss_of, model, same_bits  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]

# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_loop_trains_as_with_the_plain_optimiser(
    everywhere: Any, place: str, make: Callable[[Any], Any]
) -> None:
    def work(_: int, share: Share) -> Any:
        net = model()
        steps(net, share(net, make(net.parameters()), **AS_PLAIN))
        return net

    plain = model()
    steps(plain, make(plain.parameters()))
    for net in everywhere(place, work):
        assert_as(net, plain)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_optimiser_s_state_is_what_its_own_steps_make(
    everywhere: Any, place: str, make: Callable[[Any], Any]
) -> None:
    def work(_: int, share: Share) -> Any:
        net = model()
        inner = make(net.parameters())
        calls: list[Any] = []
        inner.register_step_pre_hook(lambda optimizer, *_: calls.append(dict(optimizer.state)))
        optimizer = share(net, inner, **AS_PLAIN)
        before = copy.deepcopy(inner.state_dict())
        optimizer.join()
        assert str(inner.state_dict()) == str(before), "nothing is created in advance"
        steps(net, optimizer, 1)
        assert len(calls) == 1
        return inner.state_dict()["state"]

    plain = model()
    expected = make(plain.parameters())
    steps(plain, expected, 1)
    for state in everywhere(place, work):
        torch.testing.assert_close(state, expected.state_dict()["state"])


class Relative(torch.optim.Optimizer):  # type: ignore[misc]
    """Steps relative to the parameters' size, as Adafactor without a learning rate."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                size = param.grad.square().mean().sqrt() + 1e-12
                param.sub_(param.grad / size * 0.02 / state["count"] ** 0.5)
        return loss


def moves_of(
    rank: int, net: Any, optimizer: Any, *, steps: int = 3
) -> tuple[list[Any], list[float]]:
    """Return what every step has moved, and the factors; no two ranks have a gradient for the same element."""
    moves, scales = [], []
    for _ in range(steps):
        before = flat(net)
        scales.append(getattr(optimizer, "update_scale", 1.0))
        for param in net.parameters():
            places = torch.arange(param.numel()).reshape(param.shape)
            param.grad = (places % 2 == rank).to(param)
        optimizer.step()
        moves.append(flat(net) - before)
    return moves, scales


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["without lr", "lr=None"])
def test_an_optimiser_without_a_learning_rate_is_scaled_as_others(
    everywhere: Any, place: str, defaults: dict[str, Any]
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, Relative(net.parameters(), **defaults), codec="dense")
        return moves_of(rank, net, optimizer)

    plain = [model() for _ in range(2)]
    alone = [moves_of(rank, net, Relative(net.parameters()))[0] for rank, net in enumerate(plain)]
    results = everywhere(place, work)
    count = len(results)
    for moves, scales in results:
        # The first step measures.
        assert scales == pytest.approx([1.0, count**0.5, count**0.5], rel=0.01)
        for moved, scale, *plainly in zip(moves, scales, *alone[:count], strict=True):
            torch.testing.assert_close(moved, scale * sum(plainly) / count, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("outer_momentum", [0.0, 0.75])
def test_local_steps_are_scaled_too(everywhere: Any, place: str, outer_momentum: float) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        options = {"every": 2, "outer_momentum": outer_momentum}
        optimizer = share(net, Relative(net.parameters()), codec="dense", **options)
        return moves_of(rank, net, optimizer, steps=3)

    plain = [model() for _ in range(2)]
    plainly = [moves_of(rank, net, Relative(net.parameters()))[0] for rank, net in enumerate(plain)]
    results = everywhere(place, work)
    count = len(results)
    for rank, (moves, scales) in enumerate(results):
        # The first exchange measures; before the first step nobody has joined.
        factors = [(1.0 - outer_momentum) * k for k in (1.0, count**0.5)]
        assert scales == pytest.approx([1.0, *factors], rel=0.01)
        # The third step is the node's own; a team takes it together.
        ranks = range(count) if place == "team" else [rank]
        mean = sum(plainly[each][2] for each in ranks) / len(ranks)
        torch.testing.assert_close(moves[2], scales[2] * mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "RAdam", "AdamW", "SGD"])
@pytest.mark.parametrize("rate", [0.01, 0.9])
def test_the_factor_of_several_nodes_multiplies_every_update(name: str, rate: float) -> None:
    # Adafactor takes the smaller one of its rate and another one, Rprop's rate is only the size of the first step.
    plain, net = model(), model()
    # AdamW's weight decay has no factor, see test_judge.
    options = {"weight_decay": 0.0} if name == "AdamW" else {}
    make = functools.partial(getattr(torch.optim, name), **options)
    expected = make(plain.parameters(), lr=rate)
    optimizer = share(net, make(net.parameters(), lr=rate), update_scale=3.0, codec="dense")
    for step in range(8):
        with torch.no_grad():
            for param, source in zip(net.parameters(), plain.parameters(), strict=True):
                param.copy_(source)
        before = flat(plain)
        for each, stepping in ((net, optimizer), (plain, expected)):
            for param in each.parameters():
                param.grad = torch.full_like(param, 0.25 + step)
            stepping.step()
        moved = flat(plain) - before
        torch.testing.assert_close(flat(net) - before, 3.0 * moved, rtol=1e-3, atol=1e-5)


def test_rates_that_an_optimiser_lowers_itself_stay_lowered() -> None:
    class Decaying(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.5
            return loss

    net = model()
    optimizer = share(net, Decaying(net.parameters(), lr=1.0), update_scale=4.0)
    steps(net, optimizer, 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125]


@pytest.mark.parametrize("name", ["StepLR", "LambdaLR", "ExponentialLR"])
def test_hooks_on_steps_see_and_set_the_rates_without_the_factor(name: str) -> None:
    options = {
        "StepLR": {"step_size": 1, "gamma": 0.5},
        "LambdaLR": {"lr_lambda": lambda step: 1.0 / (1.0 + step)},
        "ExponentialLR": {"gamma": 0.5},
    }

    def train(scale: float) -> tuple[list[float], Any]:
        seen: list[float] = []
        net = model()
        before = flat(net)
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        scheduler = getattr(torch.optim.lr_scheduler, name)(inner, **options[name])

        def look(optimizer: Any, *_: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

        inner.register_step_pre_hook(look)
        inner.register_step_post_hook(look)
        inner.register_step_post_hook(lambda *_: scheduler.step())
        optimizer = share(net, inner, update_scale=scale, codec="dense") if scale else inner
        for _ in range(3):
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        assert len(inner._optimizer_step_pre_hooks) == 1
        return seen, flat(net) - before

    rates, moved = train(0.0)
    shared_rates, shared_moved = train(3.0)
    assert shared_rates == rates
    torch.testing.assert_close(shared_moved, 3.0 * moved)


@pytest.mark.parametrize("has_hooks", [True, False])
def test_all_of_a_step_that_takes_another_class_s_step_has_the_factor(has_hooks: bool) -> None:
    during: list[float] = []

    class Noting(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            during.append(self.param_groups[0]["lr"])
            return loss

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch calls hooks in SGD's step, too
    net = model()
    inner = Noting(net.parameters(), lr=0.5)
    if not has_hooks:  # as of an optimiser that has not called torch's __init__
        Noting.step = Noting.step.__wrapped__  # type: ignore[method-assign]
    steps(net, optimizer := share(net, inner, update_scale=3.0, codec="dense"), 2)
    assert during[-2:] == [1.5, 1.5]  # those before are of trials
    assert optimizer.param_groups[0]["lr"] == 0.5


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_every_public_method_of_torch_s_class_is_tested_here() -> None:
    public = {name for name in dir(torch.optim.Optimizer) if not name.startswith("_")}
    types = {"OptimizerPreHook", "OptimizerPostHook"}
    tested = {
        "add_param_group",
        "load_state_dict",
        "profile_hook_step",  # torch's own wrapper of a step
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "register_step_post_hook",
        "register_step_pre_hook",
        "state_dict",
        "step",
        "zero_grad",
    }
    assert public - types <= tested


@pytest.mark.parametrize("place", PLACES)
def test_hooks_on_steps_are_called_around_the_whole_step(everywhere: Any, place: str) -> None:
    def work(_: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, OPTIMIZERS["SGD"](net.parameters()), **AS_PLAIN)
        seen: list[Any] = []

        def before(given: Any, arguments: Any, options: Any) -> None:
            seen.append(("before", given is optimizer, arguments == (optimizer,), options))

        def after(given: Any, *_: Any) -> None:
            seen.append(("after", given is optimizer, optimizer.result.step, flat(net)))

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        steps(net, optimizer, 2)
        for handle in handles:
            handle.remove()
        moved = flat(net)
        steps(net, optimizer, 1)
        return seen, moved

    for seen, moved in everywhere(place, work):
        assert [entry[:3] for entry in seen] == [
            ("before", True, True),
            ("after", True, 0),
            ("before", True, True),
            ("after", True, 1),
        ]
        assert same_bits(seen[-1][3], moved), "with what the others sent"


def test_a_hook_before_a_step_may_change_the_closure() -> None:
    net = model()
    optimizer = share(net, OPTIMIZERS["SGD"](net.parameters()))
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.register_step_pre_hook(lambda given, *_: ((given, lambda: 7.0), {}))
    assert optimizer.step() == 7.0
    optimizer.register_step_pre_hook(lambda *_: "something else")
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()


def test_hooks_of_all_optimisers_are_called_once_a_step() -> None:
    calls = []
    hooks: Any = importlib.import_module("torch.optim.optimizer")
    handle = hooks.register_optimizer_step_post_hook(lambda *_: calls.append("stepped"))
    net = model()
    try:
        steps(net, share(net, Relative(net.parameters())), 3)
    finally:
        handle.remove()
    assert calls == ["stepped"] * 3


def test_hooks_on_states_are_called_with_the_whole_state() -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, 2)
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda given: seen.append(given))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state)))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    state = optimizer.state_dict()
    assert seen == [optimizer, ["gradwire", "param_groups", "state"]]
    assert state["extra"] == 1
    again = share(net := model())
    again.register_load_state_dict_pre_hook(
        lambda _, state: {key: value for key, value in state.items() if key != "extra"}
    )
    again.register_load_state_dict_post_hook(lambda given: seen.append(given))
    again.load_state_dict(state)
    assert seen[-1] is again
    assert again.exchange.next_step == 2
    assert again.state[net[0].weight]["step"] == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_reset(set_to_none: bool) -> None:
    net = model()
    optimizer = share(net)
    loss_of(net, 0, 0).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for param in net.parameters():
        assert param.grad is None if set_to_none else not param.grad.any()


@pytest.mark.parametrize("place", PLACES)
def test_a_closure_gives_the_loss_and_the_gradients(everywhere: Any, place: str) -> None:
    def run(net: Any, optimizer: Any) -> list[float]:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, 0, 0)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(4)]

    def work(_: int, share: Share) -> Any:
        net = model()
        return run(net, share(net, OPTIMIZERS["AdamW"](net.parameters()), **AS_PLAIN))

    plain = model()
    expected = run(plain, OPTIMIZERS["AdamW"](plain.parameters()))
    for losses in everywhere(place, work):
        assert losses == pytest.approx(expected, rel=1e-4)


# ---- attributes ------------------------------------------------------------------------------------------------------


def test_groups_and_state_that_are_assigned_are_the_wrapped_optimiser_s() -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, 2)
    inner = optimizer.optimizer
    groups = [{**group, "lr": 0.5} for group in inner.param_groups]
    optimizer.param_groups = groups
    assert inner.param_groups is groups
    state = type(inner.state)(dict)
    optimizer.state = state
    assert inner.state is state
    optimizer.defaults = {**inner.defaults, "lr": 0.25}
    assert inner.defaults["lr"] == 0.25
    before = flat(net)
    steps(net, optimizer, 1, 2)
    assert state[net[0].weight]["step"] == 1, "begun anew"
    assert (flat(net) - before).abs().max() > 0.2, "with the new rate"


def test_parameters_that_come_past_add_param_group_are_refused_by_the_next_step() -> None:
    net = model()
    inner = OPTIMIZERS["SGD"](net[0].parameters())
    optimizer = share(net, inner)
    steps(net, optimizer, 1)
    optimizer.param_groups.append({**inner.param_groups[0], "params": list(net[2].parameters())})
    before = flat(net)
    with pytest.raises(ValueError, match=r"2 parameters .* \(3, 8\).*add_param_group"):
        steps(net, optimizer, 1)
    assert same_bits(flat(net), before)


def test_groups_that_are_removed_are_not_trained_any_more() -> None:
    nets = [model(), model()]
    for net in nets:
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]
        optimizer = OPTIMIZERS["AdamW"](groups)
        if net is nets[0]:
            optimizer = share(net, optimizer, **AS_PLAIN)
        steps(net, optimizer, 2)
        optimizer.param_groups.pop()
        steps(net, optimizer, 2, 2)
    assert_as(*nets)
    assert sorted(nets[0].state_dict()) == sorted(nets[1].state_dict())


class Outside(torch.optim.SGD):  # type: ignore[misc]
    """What optimisers of other projects have besides: a value, a method that moves parameters, one more optimiser."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.strength = 1.0
        self._halved = False
        self.base = torch.optim.SGD(self.param_groups, **options)

    @property
    def halved(self) -> bool:
        return self._halved

    @halved.setter
    def halved(self, value: bool) -> None:
        self._halved = value

    def first_step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(1.0)


def test_what_only_the_wrapped_optimiser_has_is_reached_or_refused() -> None:
    net = model()
    inner = Outside(net.parameters(), lr=0.1)
    optimizer = share(net, inner)
    assert optimizer.strength == 1.0
    optimizer.strength = 2.0
    optimizer.halved = True
    assert (inner.strength, inner.halved, optimizer.halved) == (2.0, True, True)
    before = flat(net)
    with pytest.raises(RuntimeError, match=r"first_step\(\) of Outside .*optimizer\.first_step"):
        optimizer.first_step()
    with pytest.raises(AttributeError, match="base of Outside"):
        optimizer.base.step()
    assert same_bits(flat(net), before)
    with pytest.raises(AttributeError, match="no_such_thing"):
        optimizer.no_such_thing  # noqa: B018
    optimizer.own_note = "mine"
    assert optimizer.own_note == "mine"
    assert not hasattr(inner, "own_note")


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("count", [0, 2], ids=["before the first step", "later"])
def test_copies_are_refused_and_change_nothing(make_copy: Any, count: int) -> None:
    net, plain = model(), model()
    optimizer, other = (
        share(net, **AS_PLAIN),
        OPTIMIZERS["AdamW"](plain.parameters()),
    )
    steps(net, optimizer, count)
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        make_copy(optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    steps(net, optimizer, 3, count)
    steps(plain, other, 3 + count)
    assert_as(net, plain)
    assert calls == ["stepped"] * 3
    assert copy.deepcopy(optimizer.optimizer).param_groups[0]["lr"] == 0.02


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_the_state_of_a_plain_optimiser_goes_on_at_any_time(everywhere: Any, place: str) -> None:
    other = model()
    trained = OPTIMIZERS["AdamW"](other.parameters())
    steps(other, trained, 5)

    def run(net: Any, optimizer: Any) -> Any:
        steps(net, optimizer, 2)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        steps(net, optimizer, 2, 2)
        return net, optimizer.state[net[0].weight]["step"].item()

    def work(_: int, share: Share) -> Any:
        net = model()
        return run(net, share(net, OPTIMIZERS["AdamW"](net.parameters()), **AS_PLAIN))

    plain = model()
    _, count = run(plain, OPTIMIZERS["AdamW"](plain.parameters()))
    for net, taken in everywhere(place, work):
        assert_as(net, plain)
        assert taken == count == 7


def test_a_state_with_a_residual_is_refused_in_the_middle_and_nothing_is_loaded() -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, 2)
    earlier = copy.deepcopy(optimizer.state_dict())
    steps(net, optimizer, 2, 2)
    before = copy.deepcopy(optimizer.optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r'new gradwire\.torch\.share.*the key "gradwire"'):
        optimizer.load_state_dict(earlier)
    torch.testing.assert_close(optimizer.optimizer.state_dict()["state"], before["state"])
    del earlier["gradwire"]
    optimizer.load_state_dict(earlier)
    assert optimizer.state[net[0].weight]["step"] == 2


def test_a_state_that_does_not_fit_leaves_the_optimiser_as_it_was() -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, 2)
    state = optimizer.state_dict()
    state["gradwire"]["encoders"][0]["residual"] = torch.zeros(5)
    again = share(model())
    with pytest.raises(ValueError, match="float32"):
        again.load_state_dict(state)
    assert not again.state


# ---- torch's other parts ---------------------------------------------------------------------------------------------

lrs = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda each: lrs.LambdaLR(each, lambda step: 0.9**step),
    "MultiplicativeLR": lambda each: lrs.MultiplicativeLR(each, lambda _: 0.9),
    "StepLR": lambda each: lrs.StepLR(each, 2, 0.5),
    "MultiStepLR": lambda each: lrs.MultiStepLR(each, [2, 4], 0.5),
    "ConstantLR": lambda each: lrs.ConstantLR(each, 0.5, 3),
    "LinearLR": lambda each: lrs.LinearLR(each, 0.1, total_iters=4),
    "ExponentialLR": lambda each: lrs.ExponentialLR(each, 0.8),
    "PolynomialLR": lambda each: lrs.PolynomialLR(each, 6),
    "CosineAnnealingLR": lambda each: lrs.CosineAnnealingLR(each, 6),
    "CosineAnnealingWarmRestarts": lambda each: lrs.CosineAnnealingWarmRestarts(each, 3),
    "CyclicLR": lambda each: lrs.CyclicLR(each, 0.01, 0.1, 3, cycle_momentum=True),
    "OneCycleLR": lambda each: lrs.OneCycleLR(each, 0.2, 10),
    "SequentialLR": lambda each: lrs.SequentialLR(
        each, [lrs.ConstantLR(each, 0.1), lrs.ExponentialLR(each, 0.9)], [3]
    ),
    "ChainedScheduler": lambda each: lrs.ChainedScheduler(
        [lrs.ConstantLR(each, 0.1), lrs.ExponentialLR(each, 0.9)]
    ),
    "SWALR": lambda each: torch.optim.swa_utils.SWALR(each, 0.01, 3),
    "ReduceLROnPlateau": lambda each: lrs.ReduceLROnPlateau(each, patience=0, threshold=10.0),
}


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")
@pytest.mark.parametrize("first", [False, True], ids=["of the shared one", "of the wrapped one"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedules_set_rates_and_momenta(make: Callable[[Any], Any], first: bool) -> None:
    def run(net: Any, is_shared: bool) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = make(optimizer) if first else None
        if is_shared:
            optimizer = share(net, optimizer, **AS_PLAIN)
        schedule = schedule or make(optimizer)
        seen = []
        for step in range(7):
            steps(net, optimizer, 1, step)
            schedule.step(*([1.0] if isinstance(schedule, lrs.ReduceLROnPlateau) else []))
            seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        state = schedule.state_dict()
        schedule.load_state_dict(state)
        return seen

    net, plain = model(), model()
    seen = run(net, True)
    assert seen == run(plain, False)
    assert len({rates[0] for rates in seen}) > 1
    assert_as(net, plain)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_scalers_clipping_schedules_and_averages_together(
    everywhere: Any, place: str, make: Callable[[Any], Any]
) -> None:
    def run(net: Any, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        schedule = lrs.OneCycleLR(optimizer, 0.05, 10, cycle_momentum=False)
        average = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, 0, step)).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            assert norm.isfinite()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update_parameters(net)
        return net, average.module, scaler.get_scale()

    def work(_: int, share: Share) -> Any:
        net = model()
        return run(net, share(net, make(net.parameters()), **AS_PLAIN))

    plain = model()
    _, expected, expected_scale = run(plain, make(plain.parameters()))
    for net, average, scale in everywhere(place, work):
        assert_as(net, plain)
        assert_as(average, expected)
        assert scale == expected_scale


class Proxy:
    """A framework's optimiser, which derives a class from the wrapped one's, as Lightning does."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.calls = 0
        self.__class__ = type("Proxied", (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None, **options: Any) -> Any:
        self.calls += 1
        return self._optimizer.step(closure, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_framework_s_proxy_is_the_shared_optimiser() -> None:
    net, plain = model(), model()
    optimizer = share(net, OPTIMIZERS["SGD"](net.parameters()), **AS_PLAIN)
    proxy: Any = Proxy(optimizer)
    assert isinstance(proxy, torch.optim.Optimizer)
    schedule = lrs.StepLR(optimizer, 2, 0.5)
    other = OPTIMIZERS["SGD"](plain.parameters())
    other_schedule = lrs.StepLR(other, 2, 0.5)
    for step in range(5):
        steps(net, proxy, 1, step)
        steps(plain, other, 1, step)
        schedule.step()
        other_schedule.step()
    assert_as(net, plain)
    assert proxy.calls == 5
    assert proxy.param_groups is optimizer.optimizer.param_groups
    groups = [dict(group) for group in proxy.param_groups]
    proxy.param_groups = groups
    assert optimizer.optimizer.param_groups is groups
    with proxy.shared_parameters(), pytest.raises(RuntimeError, match="would be lost"):
        optimizer.step()
    assert sorted(proxy.state_dict()) == ["gradwire", "param_groups", "state"]
