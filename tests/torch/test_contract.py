"""A shared optimiser is one of torch's in its owner's hands: every method and attribute, each against the plain one."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire import rendezvous  # noqa: E402
from gradwire.torch.judge import judge  # noqa: E402

from .test_optimizer import flat, loss_of, model, run_together, same_bits, train  # noqa: E402

pytestmark = pytest.mark.torch

SECRET = bytes(range(32))
PLACES = ["alone", "machines", "team"]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}
# Whole updates, and no factor for several nodes: with the same data everywhere, all is as without sharing.
AS_PLAIN: dict[str, Any] = {"codec": "dense", "update_scale": 1.0}

Share = Callable[..., Any]
Work = Callable[[int, Share], Any]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", rendezvous.PEERS, rendezvous.MIN_PEERS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Work], list[Any]]]:
    """Yield a function that runs work(rank, share) alone, on two machines, or as a team of two workers."""
    groups = SimpleNamespace(
        get_rank=lambda group: group.rank,
        get_world_size=lambda _: 2,
        ProcessGroup=object,
    )
    numbers = itertools.count()
    with ExitStack() as stack:

        def node(**options: Any) -> gw.Node:
            return stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET, **options))

        def run(place: str, work: Work) -> list[Any]:
            if place == "alone":
                made = node()
                return [work(0, lambda net, each, **given: shared(net, each, made, **given))]
            if place == "machines":
                first = node(node_id=1)
                pair = [first, node(peers=[first.address], node_id=2)]
                for one in pair:
                    one.expected_peers = 1
                return run_together(
                    lambda rank: work(
                        rank, lambda net, each, **given: shared(net, each, pair[rank], **given)
                    ),
                    2,
                )
            name = f"contract-{next(numbers)}"
            monkeypatch.setattr(rendezvous, "name_of", lambda _: name)
            monkeypatch.setattr(sys.modules["gradwire.torch.share"], "dist", groups)
            leader = node()
            leader.expected_peers = 0
            return run_together(
                lambda rank: work(
                    rank,
                    lambda net, each, **given: shared(
                        net,
                        each,
                        None if rank else leader,
                        process_group=SimpleNamespace(rank=rank),
                        **given,
                    ),
                ),
                2,
            )

        yield run


def shared(net: Any, optimizer: Any, node: gw.Node | None, **options: Any) -> Any:
    return gradwire.torch.share(
        net, optimizer, **{"node": node, "timeout_s": 20.0, "density": 0.1, **options}
    )


def share(net: Any, optimizer: Any = None, **options: Any) -> Any:
    """Share on this machine alone."""
    given = OPTIMIZERS["AdamW"](net.parameters()) if optimizer is None else optimizer
    return gradwire.torch.share(net, given, **{"density": 0.1, **options})


def steps(net: Any, optimizer: Any, count: int = 6, first: int = 0) -> None:
    """Train on the same data on every rank."""
    train(net, optimizer, 0, range(first, first + count))


def assert_as(net: Any, plain: Any) -> None:
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["without lr", "lr=None"])
def test_an_optimiser_without_a_learning_rate_is_scaled_as_others(
    everywhere: Any, place: str, defaults: dict[str, Any]
) -> None:
    def work(_: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, Relative(net.parameters(), **defaults), codec="dense")
        before = flat(net)
        scale = 1.0
        for step in range(3):
            steps(net, optimizer, 1, step)
            scale = optimizer.update_scale
            if not step:
                first = flat(net) - before
        return first, scale

    plain = model()
    before = flat(plain)
    steps(plain, Relative(plain.parameters()), 1)
    for moved, scale in everywhere(place, work):
        assert scale == pytest.approx(2**0.5 if place == "machines" else 1.0)
        # The members are known from the first step on.
        torch.testing.assert_close(moved, scale * (flat(plain) - before), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "RAdam", "AdamW"])
def test_the_factor_of_several_nodes_multiplies_every_update(name: str) -> None:
    nets = [model(), model()]
    make = lambda net: getattr(torch.optim, name)(net.parameters(), lr=0.5)  # noqa: E731
    optimizers = [share(nets[0], make(nets[0]), update_scale=3.0, codec="dense"), make(nets[1])]
    for step in range(8):
        before = flat(nets[1])
        nets[0].load_state_dict(nets[1].state_dict()) if step == 0 else None
        for net, optimizer in zip(nets, optimizers, strict=True):
            for param in net.parameters():
                param.grad = torch.full_like(param, 0.25 + step)
            with torch.no_grad():
                kept = [param.clone() for param in net.parameters()]
            optimizer.step()
            if net is nets[0]:
                moved = flat(net) - torch.cat([param.flatten() for param in kept])
        if name == "AdamW":  # its decay depends on the parameters, which are other ones after a step
            assert moved.abs().mean() == pytest.approx(1.5, rel=0.1)
        elif step == 0:
            torch.testing.assert_close(moved, 3.0 * (flat(nets[1]) - before), rtol=1e-4, atol=1e-6)
        elif name == "Adafactor":  # relative to the parameters' size
            assert moved.abs().mean() > 1.5 * (flat(nets[1]) - before).abs().mean()


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
    handle = torch.optim.optimizer.register_optimizer_step_post_hook(
        lambda *_: calls.append("stepped")
    )
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
    optimizer.register_state_dict_post_hook(lambda given, state: seen.append(sorted(state)))
    optimizer.register_state_dict_post_hook(lambda given, state: {**state, "extra": 1})
    state = optimizer.state_dict()
    assert seen == [optimizer, ["gradwire", "param_groups", "state"]]
    assert state["extra"] == 1
    again = share(net := model())
    again.register_load_state_dict_pre_hook(
        lambda given, state: {key: value for key, value in state.items() if key != "extra"}
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


# ---- groups that are added -------------------------------------------------------------------------------------------


def unfreeze(net: Any, optimizer: Any, before: int, after: int = 4) -> None:
    """Train the last layer, and from a step on the first one too, at another rate."""
    steps(net, optimizer, before)
    optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})
    steps(net, optimizer, after, before)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [0, 3], ids=["before the first step", "later"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_group_that_is_added_trains_as_with_the_plain_optimiser(
    everywhere: Any, place: str, before: int, make: Callable[[Any], Any]
) -> None:
    def work(_: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, make(net[2].parameters()), **AS_PLAIN)
        unfreeze(net, optimizer, before)
        return net, net.state_dict(), [group["lr"] for group in optimizer.param_groups]

    plain = model()
    each = make(plain[2].parameters())
    unfreeze(plain, each, before)
    for net, saved, rates in everywhere(place, work):
        assert_as(net, plain)
        torch.testing.assert_close(saved, plain.state_dict(), rtol=1e-4, atol=1e-6)
        assert rates == [group["lr"] for group in each.param_groups]


@pytest.mark.parametrize("place", ["machines", "team"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"apply_residual": False},
        {"every": 3},
        {"overlap": 1},
        {"topology": "sharded"},
        {"every": 2, "overlap": 1, "outer_momentum": 0.5},
        {"density": {"0.*": 0.2, "*.bias": "dense"}},
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_groups_are_added_in_every_way_of_the_exchange(
    everywhere: Any, place: str, options: dict[str, Any]
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        given = {**options}
        if isinstance(given.get("density"), dict):
            given["density"] = {"2.*": 0.2, "*.bias": "dense"}
        optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()), **given)
        losses = train(net, optimizer, rank, range(10))
        optimizer.add_param_group({"params": net[0].parameters()})
        losses += train(net, optimizer, rank, range(10, 40))
        if "overlap" in options:
            optimizer.catch_up()
        return net.state_dict(), losses, optimizer.exchange.next_step

    (first, losses, step), *others = everywhere(place, work)
    for other, _, other_step in others:
        assert step == other_step
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name])
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_groups_are_added_twice_on_three_nodes_and_nothing_is_lost(nodes: list[gw.Node]) -> None:
    for node in nodes:
        node.expected_peers = 2

    def work(rank: int) -> Any:
        net = torch.nn.ParameterList(torch.zeros(30) for _ in range(3))
        inner = torch.optim.SGD([net[0]], lr=1.0)
        optimizer = shared(net, inner, nodes[rank], reduction="sum", density=0.1)
        total = torch.zeros(3, 30)
        generator = torch.Generator().manual_seed(rank)
        for step in range(18):
            if step in (6, 12):
                optimizer.add_param_group({"params": [net[step // 6]]})
            for row in range(1 + step // 6):
                net[row].grad = torch.randint(-512, 513, (30,), generator=generator) / 1024.0
                total[row] -= net[row].grad
            optimizer.step()
        left = optimizer.exchange._groups.encoders[0].residual.copy()
        return torch.stack(optimizer.shared_tensors()), torch.from_numpy(left), total

    results = run_together(work)
    params = results[0][0]
    assert all(torch.equal(params, other) for other, _, _ in results)
    residuals = sum(left for _, left, _ in results)
    sums = sum(total for _, _, total in results)
    torch.testing.assert_close(params.flatten() + residuals, sums.flatten(), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("late", [False, True], ids=["never", "a step later"])
def test_a_group_that_not_all_ranks_add_is_an_error_on_all(everywhere: Any, late: bool) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()), timeout_s=5.0)
        steps(net, optimizer, 2)
        with pytest.raises((gw.Mismatch, TimeoutError)) as caught:
            if rank:
                steps(net, optimizer, 1 if late else 3, 2)
            optimizer.add_param_group({"params": net[0].parameters()})
        return str(caught.value), len(optimizer.param_groups)

    for text, count in everywhere("machines", work):
        assert "groups" in text or "same step" in text or "param" in text
        assert count == 1


def test_groups_that_cannot_be_added_are_refused() -> None:
    net = model()
    optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()))
    steps(net, optimizer, 2)
    for params, error, text in (
        ([torch.nn.Parameter(torch.zeros(3))], ValueError, "not the model's"),
        (list(net[2].parameters()), ValueError, "more than one parameter group"),
    ):
        with pytest.raises(error, match=text):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1
        steps(net, optimizer, 1)
    net = model()
    late = share(net, OPTIMIZERS["AdamW"](net[2].parameters()), mode="async")
    steps(net, late, 1)
    with pytest.raises(ValueError, match="before the first step"):
        late.add_param_group({"params": net[0].parameters()})
    steps(net, late, 1)


def test_a_checkpoint_after_groups_were_added_goes_on_bit_for_bit() -> None:
    def begin() -> Any:
        net = model()
        return net, share(net, OPTIMIZERS["AdamW"](net[2].parameters()))

    straight, optimizer = begin()
    unfreeze(straight, optimizer, 3)
    weights, state = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    steps(straight, optimizer, 5, 7)
    net, again = begin()
    again.add_param_group({"params": net[0].parameters()})
    net.load_state_dict(weights)
    again.load_state_dict(state)
    steps(net, again, 5, 7)
    assert same_bits(flat(net), flat(straight))


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


# ---- what an optimiser is --------------------------------------------------------------------------------------------


class Plain(torch.optim.AdamW):  # type: ignore[misc]
    """Another name."""


class AdamNamed(torch.optim.SGD):  # type: ignore[misc]
    """A name that says the contrary."""


class SignSGD(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.sign_()
        return super().step(closure)


class Logged(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Scratch(torch.optim.Optimizer):  # type: ignore[misc]
    """Adam without torch's: a state made at once, an integer as counter."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "n": 0,
                    "mean": torch.zeros_like(param),
                    "spread": [torch.zeros_like(param)],
                }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["n"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                state["spread"][0].lerp_(param.grad.square(), 0.01)
                mean = state["mean"] / (1 - 0.9 ** state["n"])
                spread = state["spread"][0] / (1 - 0.99 ** state["n"])
                param.sub_(group["lr"] * mean / (spread.sqrt() + 1e-8))
        return loss


class Momentum(torch.optim.Optimizer):  # type: ignore[misc]
    """SGD without torch's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                velocity = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                velocity.mul_(0.9).add_(param.grad + group["weight_decay"] * param)
                param.sub_(velocity, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):  # type: ignore[misc]
    """Another project's wrapper."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.inner.step(closure)


class NeedsClosure(torch.optim.SGD):  # type: ignore[misc]
    """Takes two steps for each, as sharpness-aware minimisation does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step(closure)


KINDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "AdamW of another name": (Plain, True),
    "SGD of Adam's name": (lambda params: AdamNamed(params, lr=0.1), False),
    "sign SGD": (lambda params: SignSGD(params, lr=0.1), True),
    "SGD with a step of its own": (lambda params: Logged(params, lr=0.1, momentum=0.9), False),
    "Adam from scratch": (Scratch, True),
    "SGD from scratch": (Momentum, False),
    "relative steps": (Relative, True),
    "a wrapped Adam": (lambda params: Lookahead(torch.optim.Adam(params)), True),
    "a wrapped SGD": (lambda params: Lookahead(torch.optim.SGD(params, lr=0.1)), False),
    "a closure is needed": (lambda params: NeedsClosure(params, lr=0.1), False),
    **{
        name: (getattr(torch.optim, name), True)
        for name in ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
    },
    "ASGD": (torch.optim.ASGD, False),
}


@pytest.mark.parametrize("size", [20, 700], ids=["a small model", "a large one"])
@pytest.mark.parametrize(("make", "is_adaptive"), KINDS.values(), ids=KINDS)
def test_an_optimiser_is_judged_by_what_it_does(
    make: Callable[[Any], Any], is_adaptive: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    net = torch.nn.Linear(size, 100)
    before = [param.detach().clone() for param in net.parameters()]
    inner = make(net.parameters())
    state = copy.deepcopy(inner.state_dict())
    random = torch.get_rng_state()
    assert judge(inner).is_adaptive == is_adaptive
    assert str(state) == str(inner.state_dict()), "nothing is changed by it"
    assert all(map(torch.equal, before, net.parameters()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(param.grad is None for param in net.parameters())
    kind = "normalises its updates" if is_adaptive else "updates grow with its gradients"
    assert f"{type(inner).__name__} is an optimiser " in caplog.text
    assert kind in caplog.text
    density = share(net, inner, density=None).exchange._groups.encoders[0].policy.density
    assert density == pytest.approx(0.08 if size == 20 else density)
    assert (density > 0.05) == (is_adaptive or size == 20)


def test_an_optimiser_that_cannot_be_tried_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Strange(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            raise LookupError("no such thing")

    net = model()
    assert not judge(Strange(net.parameters(), {})).is_adaptive
    assert "Strange could not be tried out (LookupError: no such thing)" in caplog.text
    assert "update_scale=" in caplog.text


@pytest.mark.parametrize("make", [Plain, Scratch], ids=["derived", "from scratch"])
def test_others_adaptive_optimisers_have_the_factor_too(everywhere: Any, make: Any) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, make(net.parameters()))
        train(net, optimizer, rank, range(3))
        return optimizer.update_scale

    assert everywhere("machines", work)[0] == pytest.approx(2.0**0.5)


# ---- what begins as on rank 0 ----------------------------------------------------------------------------------------


class Everything(torch.nn.Module):  # type: ignore[misc]
    """Tensors of every dtype that the optimiser does not train, with other values on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.body = torch.nn.Linear(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 3)
        with torch.no_grad():
            for param in (*self.body.parameters(), *self.norm.parameters()):
                param.copy_(torch.randn(param.shape, generator=generator))
            for param in self.head.parameters():
                param.zero_()  # the same everywhere
        self.half = torch.nn.Parameter(torch.randn(3, generator=generator).half())
        self.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64, generator=generator))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            values = torch.randint(0, 2 if dtype == torch.bool else 99, (4, 3), generator=generator)
            self.register_buffer(str(dtype).split(".")[1], values.to(dtype))
        self.register_buffer("strided", torch.randn(4, 6, generator=generator).t())
        self.register_buffer("scalar", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer(
            "passing", torch.randn(5, generator=generator), persistent=False
        )
        self.register_buffer("cache", torch.zeros(3 + rank), persistent=False)

    def forward(self, inputs: Any) -> Any:
        return self.head(self.norm(torch.tanh(self.body(inputs))))


@pytest.mark.parametrize("place", ["machines", "team"])
def test_all_tensors_begin_as_on_rank_0_and_the_untrained_are_named(
    everywhere: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = Everything(rank)
        net.half.requires_grad_(False)
        optimizer = share(net, OPTIMIZERS["AdamW"](net.head.parameters()))
        optimizer.join()
        return {**dict(net.named_parameters()), **dict(net.named_buffers())}

    expected = Everything(0)
    for tensors in everywhere(place, work):
        for name, tensor in (*expected.named_parameters(), *expected.named_buffers()):
            if name != "cache":
                assert torch.equal(tensors[name], tensor), name
    [record] = {
        entry.getMessage() for entry in caplog.records if "does not train" in entry.getMessage()
    }
    assert "body.weight" in record
    assert "half" not in record
    assert "head" not in record
    assert len([entry for entry in caplog.records if "does not train" in entry.getMessage()]) == 2


def test_two_optimisers_of_one_model_leave_each_other_s_parameters_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pairs: list[list[gw.Node]] = []
    with ExitStack() as stack:
        for _ in range(2):
            first = stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET, node_id=1))
            second = stack.enter_context(
                gw.Node("127.0.0.1:0", [first.address], secret=SECRET, node_id=2)
            )
            first.expected_peers = second.expected_peers = 1
            pairs.append([first, second])

        def work(rank: int) -> Any:
            net = model()
            optimizers = [
                shared(net, OPTIMIZERS["AdamW"](net[index].parameters()), pairs[place][rank])
                for place, index in enumerate((0, 2))
            ]
            for step in range(8):
                for optimizer in optimizers if step > 3 else optimizers[:1]:
                    train(net, optimizer, rank, [step])
            return net.state_dict(), flat(net)

        (first_state, own), (second_state, other) = run_together(work, 2)
    assert all(torch.equal(first_state[name], second_state[name]) for name in first_state)
    assert not same_bits(own, other), "each has its own residual"


def test_a_second_optimiser_that_is_not_shared_trains_from_rank_0_s_parameters(
    everywhere: Any,
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = Everything(rank).requires_grad_(True) if False else Everything(rank)
        plain = torch.optim.SGD(net.body.parameters(), lr=0.1)
        optimizer = share(net, OPTIMIZERS["AdamW"](net.head.parameters()))
        optimizer.join()
        begun = net.body.weight.detach().clone()
        for step in range(3):
            train(net, optimizer, rank, [step])
            plain.step()
        return begun, net.body.weight.detach()

    (first, _), (second, moved) = everywhere("machines", work)
    assert torch.equal(first, second)
    assert not torch.equal(second, moved)


def test_a_late_node_takes_over_whatever_state_there_is() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET))
        first.expected_peers = 0
        second = stack.enter_context(gw.Node("127.0.0.1:0", [first.address], secret=SECRET))

        def early(_: int) -> Any:
            net = Everything(0)
            optimizer = shared(net, Scratch(net.head.parameters()), first)
            for step in itertools.count():
                train(net, optimizer, 0, [step])
                if len(optimizer.exchange.members) and step > 60:
                    return net, optimizer

        def late(_: int) -> Any:
            net = Everything(1)
            optimizer = shared(net, Scratch(net.head.parameters()), second)
            first.wait_for_peers(1, 20.0)
            joined = optimizer.join()
            state = copy.deepcopy(optimizer.state[net.head.weight])
            tensors = copy.deepcopy(dict(net.named_buffers()))
            return joined, state, tensors, optimizer

        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as pool:
            founder = pool.submit(early, 0)
            joined, state, tensors, optimizer = pool.submit(late, 1).result()
            optimizer.leave()
            second.close()
            founder.result()
    assert joined.is_late
    assert state["n"] > 0
    assert isinstance(state["n"], int)
    assert state["spread"][0].any()
    assert tensors["norm.num_batches_tracked"] > 0
    assert torch.equal(tensors["bool"], Everything(0).bool)


# ---- parameters that are special, or change --------------------------------------------------------------------------


class Masked(torch.nn.Module):  # type: ignore[misc]
    """A layer with a mask of minus infinity among its parameters."""

    def __init__(self, rank: int = 0, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.layer = model(dtype)
        mask = torch.zeros(3, dtype=dtype)
        if rank == 0:
            mask[1] = -torch.inf
        self.mask = torch.nn.Parameter(mask)

    def forward(self, inputs: Any) -> Any:
        return torch.softmax(self.layer(inputs) + self.mask, dim=1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["everywhere", "on rank 0"])
def test_infinite_parameters_stay_what_they_are(
    everywhere: Any, place: str, dtype: Any, same: bool
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = Masked(0 if same else rank, dtype)
        optimizer = share(net, OPTIMIZERS["SGD"](net.parameters()))
        train(net, optimizer, rank, range(5), dtype)
        with optimizer.shared_parameters():
            common = net.mask.detach().clone()
        after = net.mask.detach().clone()
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        again = Masked(1, dtype)
        return common, after, saved, again

    results = everywhere(place, work)
    for common, after, (weights, _), _ in results:
        for mask in (common, after, weights["mask"]):
            assert mask.isinf().tolist() == [False, True, False]
        assert weights["mask"][0] != 0.0, "the others are trained"
        assert torch.equal(weights["mask"], results[0][2][0]["mask"])
        assert all(tensor.isfinite().all() for name, tensor in weights.items() if name != "mask")


def test_infinite_parameters_are_in_checkpoints() -> None:
    straight = Masked()
    optimizer = share(straight)
    steps(straight, optimizer, 4)
    weights, state = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    steps(straight, optimizer, 4, 4)
    net = Masked(1)
    again = share(net)
    again.load_state_dict(state)
    net.load_state_dict(weights)
    steps(net, again, 4, 4)
    assert same_bits(flat(net), flat(straight))
    assert net.mask[1] == -torch.inf


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_infinite_parameters_that_are_changed_are_refused(value: float) -> None:
    net = Masked()
    optimizer = share(net)
    steps(net, optimizer, 2)
    with torch.no_grad():
        net.mask[1] = value
    with pytest.raises(gw.NonFiniteUpdate):
        steps(net, optimizer, 1)
    assert net.mask[1] == -torch.inf
    steps(net, optimizer, 1)


def other_shape(net: Any) -> None:
    net[2].bias.data = torch.zeros(5)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bfloat16": (lambda net: net.to(torch.bfloat16), "dtype was torch.float32"),
    "double": (lambda net: net.double(), "dtype was torch.float32 and is torch.float64"),
    "half of a layer": (lambda net: net[2].half(), r"2\.weight has changed.*torch.float16"),
    "another shape": (other_shape, r"2\.bias has changed.*shape was \(3,\) and is \(5,\)"),
}


@pytest.mark.parametrize("count", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES)
def test_parameters_that_change_in_kind_are_named_with_the_remedy(
    change: Callable[[Any], Any], text: str, count: int
) -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, count)
    change(net)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=f"{text}.*before gradwire.torch.share"):
        optimizer.step()


def test_a_parameter_that_is_replaced_in_the_model_is_named() -> None:
    net = model()
    optimizer = share(net)
    net[2].bias = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"2\.bias of the model was replaced"):
        steps(net, optimizer, 1)


@pytest.mark.parametrize("count", [0, 2], ids=["before the first step", "later"])
def test_parameters_may_have_another_layout_after_they_were_shared(count: int) -> None:
    def net() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten())

    def run(net: Any, optimizer: Any) -> None:
        for step in range(5):
            if step == count:
                net.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            net(torch.randn(2, 2, 5, 5, generator=generator)).square().mean().backward()
            optimizer.step()

    nets = [net(), net()]
    run(nets[0], share(nets[0], **AS_PLAIN))
    run(nets[1], OPTIMIZERS["AdamW"](nets[1].parameters()))
    assert nets[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert_as(*nets)
