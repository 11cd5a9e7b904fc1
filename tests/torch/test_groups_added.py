"""Groups that are added to a shared optimiser, before the first step and in the middle of training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch.optimizer  # noqa: E402
from gradwire.exchange.groups import split_by_tensor  # noqa: E402

from .places import (  # noqa: E402
    AS_PLAIN,
    OPTIMIZERS,
    PLACES,
    Share,
    assert_as,
    share,
    shared,
    steps,
)
from .test_optimizer import flat, model, run_together, same_bits, train  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]


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
        {"every": 4, "overlap": 4},
        {"density": {"*.bias": "dense", "2.*": 0.2}},
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_groups_are_added_in_every_way_of_the_exchange(
    everywhere: Any, place: str, options: dict[str, Any]
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        given = {**options}
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
        left = np.concatenate([optimizer.exchange.difference_of(index) for index in range(3)])
        return torch.stack(optimizer.shared_tensors()), torch.from_numpy(left), total

    results = run_together(work)
    params = results[0][0]
    assert all(torch.equal(params, other) for other, _, _ in results)
    residuals = sum(left for _, left, _ in results)
    sums = sum(total for _, _, total in results)
    torch.testing.assert_close(params.flatten() + residuals, sums.flatten(), rtol=0.0, atol=1e-5)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "frozen": lambda net, _: net[0].requires_grad_(False),
    "unfrozen": lambda net, _: net[0].requires_grad_(True),
    "slower": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "removed": lambda _, optimizer: optimizer.param_groups.pop(0),
}


@pytest.mark.parametrize("apply_residual", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_group_is_added_after_others_have_changed_and_nothing_is_lost(
    nodes: list[gw.Node], change: str, apply_residual: bool
) -> None:
    """The parameters are divided among the encoders in another way then."""

    def work(rank: int) -> Any:
        net = torch.nn.ParameterList(torch.zeros(numel) for numel in (100, 10, 50))
        net[0].requires_grad_(change != "unfrozen")
        inner = torch.optim.SGD([{"params": [net[0]]}, {"params": [net[1]]}], lr=1.0)
        options = {"apply_residual": apply_residual, "reduction": "sum"}
        optimizer = shared(net, inner, nodes[rank], **options)
        generator = torch.Generator().manual_seed(rank)
        moved = [torch.zeros_like(param) for param in net]
        for step in range(18):
            if step == 6:
                CHANGES[change](net, optimizer)
            if step == 12:
                optimizer.add_param_group({"params": [net[2]]})
            for group in optimizer.param_groups:
                [param] = group["params"]
                param.grad = torch.randint(-512, 513, param.shape, generator=generator) / 1024.0
                row = next(row for row in range(3) if net[row] is param)
                moved[row] -= group["lr"] * param.grad
            optimizer.step()
        state = optimizer.exchange.state_dict([param.detach() for param in net])
        unsent = [encoder["residual"] for encoder in state["encoders"]]
        left = split_by_tensor(unsent, state["tensors"], moved)
        return optimizer.shared_tensors(), list(map(torch.from_numpy, left)), moved

    for node in nodes:
        node.expected_peers = 2
    results = run_together(work)
    for row, param in enumerate(results[0][0]):
        assert all(torch.equal(param, params[row]) for params, _, _ in results)
        held = param + sum(residuals[row] for _, residuals, _ in results)
        moved = sum(sums[row] for _, _, sums in results)
        torch.testing.assert_close(held, moved, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("late", [False, True], ids=["never", "a step later"])
def test_a_group_that_not_all_ranks_add_is_an_error_on_all(everywhere: Any, late: bool) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()), timeout_s=5.0)
        steps(net, optimizer, 2)

        def go_on() -> None:
            if rank:
                steps(net, optimizer, 1 if late else 3, 2)
            optimizer.add_param_group({"params": net[0].parameters()})

        with pytest.raises((gw.Mismatch, TimeoutError)) as caught:
            go_on()
        return str(caught.value), len(optimizer.param_groups)

    for text, count in everywhere("machines", work):
        assert "call add_param_group() alike on all nodes" in text or "do not fit: groups" in text
        assert count == 1


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_a_node_that_is_lost_while_a_group_is_added_ends_nobody(
    nodes: list[gw.Node], topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said its last to the exchange before, and nothing to the one that follows."""

    def take_over(exchange: gw.Exchange, *arguments: Any) -> None:
        if threading.get_ident() in dying:
            raise KeyboardInterrupt
        real(exchange, *arguments)

    dying: set[int] = set()
    real = gradwire.torch.optimizer.take_over
    monkeypatch.setattr(gradwire.torch.optimizer, "take_over", take_over)
    for node in nodes:
        node.expected_peers = 2

    def work(rank: int) -> Any:
        net = model()
        inner = OPTIMIZERS["AdamW"](net[2].parameters())
        optimizer = shared(net, inner, nodes[rank], topology=topology)
        steps(net, optimizer, 3)
        if not rank:
            dying.add(threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                optimizer.add_param_group({"params": net[0].parameters()})
            nodes[0].close(0.0)
            return None
        optimizer.add_param_group({"params": net[0].parameters()})
        losses = train(net, optimizer, rank, range(3, 8))
        return optimizer.shared_tensors(), losses, optimizer.result

    _, (first, _, result), (second, _, _) = run_together(work)
    assert all(map(torch.equal, first, second))
    assert result is not None
    assert result.received == 1


def test_groups_that_cannot_be_added_are_refused() -> None:
    net = model()
    optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()))
    steps(net, optimizer, 2)
    for group, text in (
        ({"params": [torch.nn.Parameter(torch.zeros(3))]}, "not the model's"),
        ({"params": list(net[2].parameters())}, "more than one parameter group"),
        ({"parameters": [], "lr": 0.1}, "needs \"params\", this dict has 'parameters', 'lr'"),
        ({}, "this dict has nothing"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        steps(net, optimizer, 1)
    net[2] = torch.nn.Linear(net[2].in_features, net[2].out_features)
    with pytest.raises(
        ValueError, match=r"2\.bias, 2\.weight of the model was replaced .* close\(\)"
    ):
        optimizer.add_param_group({"params": net[2].parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.close()
    net = model()
    late = share(net, OPTIMIZERS["AdamW"](net[2].parameters()), mode="async")
    steps(net, late, 1)
    with pytest.raises(ValueError, match="before the first step"):
        late.add_param_group({"params": net[0].parameters()})
    steps(net, late, 1)


def test_a_group_that_is_refused_takes_no_exchange(everywhere: Any) -> None:
    strange = {
        "not the model's": lambda _: torch.nn.Parameter(torch.zeros(3)),
        "0.weight has no memory": lambda net: net[0].weight,
        "several elements in the same memory": lambda net: net[0].bias,
        "phase of torch.complex64 cannot be shared": lambda net: net.phase,
    }

    def work(rank: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()))
        steps(net, optimizer, 2)
        kept = net[0]
        if not rank:
            net[0] = torch.nn.Linear(20, 8, device="meta")
            net[0].bias = torch.nn.Parameter(torch.zeros(1).expand(8))
            net.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            for text, make in strange.items():
                with pytest.raises((TypeError, ValueError), match=text):
                    optimizer.add_param_group({"params": [make(net)]})
        assert (optimizer.step_number, len(optimizer.param_groups)) == (2, 1)
        net[0] = kept
        if not rank:
            del net.phase
        steps(net, optimizer, 2, 2)
        return net.state_dict()

    first, second = everywhere("machines", work)
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimiser_whose_group_was_not_added_can_be_saved(
    everywhere: Any, place: str, dtype: Any
) -> None:
    def fail() -> None:
        raise TimeoutError("nobody is here")

    def work(_: int, share: Share) -> Any:
        net = model(dtype)
        optimizer = share(net, OPTIMIZERS["AdamW"](net[2].parameters()))
        train(net, optimizer, 0, range(3), dtype)
        optimizer.join = fail
        with pytest.raises(TimeoutError, match=r"so this optimiser was closed: .*nobody is here"):
            optimizer.add_param_group({"params": net[0].parameters()})
        with pytest.raises(gw.Closed, match="call share again"):
            train(net, optimizer, 0, [3], dtype)
        return copy.deepcopy((net.state_dict(), optimizer.state_dict())), flat(net)

    (weights, state), own = everywhere(place, work)[0]
    net = model(dtype)
    again = share(net, OPTIMIZERS["AdamW"](net[2].parameters()))
    net.load_state_dict(weights)
    again.load_state_dict(state)
    assert same_bits(flat(net), own)
    assert again.join().step == 4, "three steps, and the exchange before the group"


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


@pytest.mark.parametrize("place", PLACES)
def test_a_group_that_is_added_right_after_a_checkpoint_keeps_what_was_loaded(
    everywhere: Any, place: str
) -> None:
    def begin(share: Share) -> Any:
        net = model()
        return net, share(net, OPTIMIZERS["AdamW"](net[2].parameters()))

    def go_on(rank: int, net: Any, optimizer: Any) -> Any:
        optimizer.add_param_group({"params": net[0].parameters()})
        train(net, optimizer, rank, range(3, 6))
        common = torch.cat([each.detach().flatten() for each in optimizer.shared_params()])
        return flat(net), optimizer.step_number, common

    def straight(rank: int, share: Share) -> Any:
        net, optimizer = begin(share)
        train(net, optimizer, rank, range(3))
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        return saved, go_on(rank, net, optimizer)

    def resumed(rank: int, share: Share) -> Any:
        net, optimizer = begin(share)
        weights, state = saved[rank]
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return go_on(rank, net, optimizer)

    saved, ends = zip(*everywhere(place, straight), strict=True)
    for (own, step, common), end in zip(everywhere(place, resumed), ends, strict=True):
        assert step == end[1]
        assert same_bits(own, end[0])
        assert same_bits(common, end[2])


@pytest.mark.parametrize("place", PLACES)
def test_groups_that_are_assigned_before_the_first_step_are_shared(
    everywhere: Any, place: str
) -> None:
    """As Lightning's callback for fine-tuning does when a training is resumed."""

    def work(_: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, torch.optim.SGD(net[2].parameters(), lr=0.1), **AS_PLAIN)
        optimizer.param_groups = torch.optim.SGD(net.parameters(), lr=0.1).param_groups
        steps(net, optimizer, 4)
        return net

    plain = model()
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 4)
    for net in everywhere(place, work):
        assert_as(net, plain)
