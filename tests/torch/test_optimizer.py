"""Shared optimisers: the same parameters on every node with any optimiser, and nothing lost."""

from __future__ import annotations

import copy
import doctest
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire.torch import SharedOptimizer  # noqa: E402

pytestmark = pytest.mark.torch

SECRET = bytes(range(32))
STEPS = 12
NUMEL = 20 * 8 + 8 + 8 * 3 + 3


def model(dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return net.to(dtype)


def batch(rank: int, step: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, 20, generator=generator)
    return inputs.to(dtype), inputs[:, :3].to(dtype)


def loss_of(net: Any, rank: int, step: int, dtype: Any = torch.float32) -> Any:
    inputs, targets = batch(rank, step, dtype)
    return (net(inputs) - targets).square().mean()


def flat(net: Any) -> Any:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def same_bits(one: Any, other: Any) -> bool:
    return bool(torch.equal(one.view(torch.int16), other.view(torch.int16)))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=0.02, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


@pytest.fixture
def alone() -> Iterator[gw.Node]:
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        yield node


def run_together(work: Callable[[int], Any], count: int = 3) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, rank) for rank in range(count)]
        # The first error is the cause: the other ranks fail because they wait for this one.
        for done in wait(futures, return_when=FIRST_EXCEPTION).done:
            done.result()
        return [future.result() for future in futures]


def shared(
    net: Any, node: gw.Node, make: Callable[[Any], Any], min_peers: int = 2, **options: Any
) -> SharedOptimizer:
    residual = "float64" if next(net.parameters()).dtype == torch.float64 else "float32"
    encoder = gw.Encoder(NUMEL, threshold=gw.TargetDensity(0.1), dtype=residual)
    share_state = options.pop("share_state", False)
    exchange = gw.Exchange(encoder, node, min_peers=min_peers, **options)
    return SharedOptimizer(make(net.parameters()), exchange, share_state=share_state)


def train(
    net: Any, optimizer: Any, rank: int, steps: Any = range(STEPS), dtype: Any = torch.float32
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, rank, step, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_node_holds_the_same_bits_and_learns(
    nodes: list[gw.Node], make: Callable[[Any], Any]
) -> None:
    def work(rank: int) -> Any:
        net = model()
        losses = train(net, shared(net, nodes[rank], make), rank, range(60))
        return flat(net), losses

    (first, losses), *others = run_together(work)
    for other, _ in others:
        assert same_bits(first, other)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_with_owners_every_node_holds_the_same_bits_and_learns(
    nodes: list[gw.Node], dtype: Any
) -> None:
    def work(rank: int) -> Any:
        net = model(dtype)
        options: dict[str, Any] = {"topology": "sharded", "apply_residual": True}
        optimizer = shared(net, nodes[rank], OPTIMIZERS["SGD"], **options)
        losses = train(net, optimizer, rank, range(60), dtype)
        with optimizer.shared_parameters():
            return flat(net), losses

    (first, losses), *others = run_together(work)
    for other, _ in others:
        assert same_bits(first, other)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_node_that_sends_everything_trains_as_without_it(
    alone: gw.Node, make: Callable[[Any], Any]
) -> None:
    net, plain = model(), model()
    train(net, shared(net, alone, make, min_peers=0, codec="dense"), 0)
    train(plain, make(plain.parameters()), 0)
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)


def test_every_tensor_can_have_a_threshold_of_its_own(nodes: list[gw.Node]) -> None:
    def work(rank: int) -> Any:
        net = model()
        groups = gw.Groups.of(
            list(net.parameters()), threshold=gw.TargetDensity(0.1), dense_below=30
        )
        exchange = gw.Exchange(groups, nodes[rank], min_peers=2)
        losses = train(
            net, SharedOptimizer(OPTIMIZERS["AdamW"](net.parameters()), exchange), rank, range(60)
        )
        return flat(net), losses, len(groups)

    (first, losses, count), *others = run_together(work)
    assert count > 1
    for other, *_ in others:
        assert same_bits(first, other)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_what_the_optimiser_added_is_in_the_parameters_or_in_the_residual(alone: gw.Node) -> None:
    net = torch.nn.Linear(30, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    encoder = gw.Encoder(30, threshold=2.0**-2)
    optimizer = SharedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), gw.Exchange(encoder, alone, min_peers=0)
    )
    total = torch.zeros(30)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        gradient = torch.randint(-512, 513, (30,), generator=generator) / 1024.0
        net.weight.grad = gradient.reshape(1, 30)
        optimizer.step()
        total -= gradient
    assert encoder.residual.any()
    assert net.weight.detach().any()
    assert torch.equal(net.weight.detach().flatten() + torch.from_numpy(encoder.residual), total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes_are_shared(nodes: list[gw.Node], dtype: Any) -> None:
    def work(rank: int) -> Any:
        net = model(dtype)
        optimizer = shared(net, nodes[rank], OPTIMIZERS["SGD"])
        losses = []
        for step in range(60):
            optimizer.zero_grad()
            loss = loss_of(net, rank, step, dtype)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return flat(net), losses

    (first, losses), *others = run_together(work)
    for other, _ in others:
        assert same_bits(first, other)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_half_precision_loses_nothing_of_the_shared_parameters(alone: gw.Node) -> None:
    # Each message is far below what bfloat16 can add to 1.0; a thousand of them are not.
    net = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(net.weight)
    encoder = gw.Encoder(1, threshold=2.0**-12)
    optimizer = SharedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), gw.Exchange(encoder, alone, min_peers=0)
    )
    # One step moves the parameter by 2^-7, its finest; the residual then pays out in messages of 2^-12.
    net.weight.grad = torch.full((1, 1), -(2.0**-7), dtype=torch.bfloat16)
    optimizer.step()
    for _ in range(31):
        net.weight.grad = torch.zeros(1, 1, dtype=torch.bfloat16)
        optimizer.step()
    assert encoder.residual.tolist() == [0.0]
    assert net.weight.item() == 1.0 + 2.0**-7


# ---- features of optimisers ------------------------------------------------------------------------------------------


def test_schedules_and_parameter_groups_work_on_the_wrapped_optimiser(alone: gw.Node) -> None:
    def groups(net: Any) -> Any:
        return torch.optim.SGD(
            [{"params": net[0].parameters(), "lr": 0.2}, {"params": net[2].parameters()}], lr=0.05
        )

    net, plain = model(), model()
    optimizer: Any = SharedOptimizer(
        groups(net), gw.Exchange(gw.Encoder(NUMEL), alone, min_peers=0, codec="dense")
    )
    for one, each in ((net, optimizer), (plain, groups(plain))):
        schedule = torch.optim.lr_scheduler.StepLR(each, step_size=4, gamma=0.5)
        for step in range(STEPS):
            train(one, each, 0, [step])
            schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2 / 8, 0.05 / 8]
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)


def test_a_closure_is_evaluated_and_its_loss_returned(alone: gw.Node) -> None:
    net = model()
    make = lambda params: torch.optim.LBFGS(params, lr=0.5)  # noqa: E731
    optimizer = shared(net, alone, make, min_peers=0, codec="dense")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(net, 0, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_node_whose_scaler_skips_a_step_does_not_keep_the_others_waiting(
    nodes: list[gw.Node],
) -> None:
    def work(rank: int) -> Any:
        net = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = shared(net, nodes[rank], OPTIMIZERS["AdamW"], timeout_s=20.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, rank, step)).backward()
            if rank == 1 and step == 5:
                next(net.parameters()).grad[0, 0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        taken = optimizer.state[next(net.parameters())]["step"].item()
        return flat(net), scaler.get_scale(), taken

    (first, _, taken), (second, scale, fewer), (third, _, _) = run_together(work)
    assert same_bits(first, second)
    assert same_bits(first, third)
    assert (taken, fewer, scale) == (STEPS, STEPS - 1, 128.0)


@pytest.mark.parametrize("name", ["SGD", "fused Adam"])
def test_a_scaler_changes_nothing_while_all_is_finite(alone: gw.Node, name: str) -> None:
    make = OPTIMIZERS[name]
    net, plain = model(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = shared(net, alone, make, min_peers=0, codec="dense")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, 0, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    train(plain, make(plain.parameters()), 0)
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "fused Adam"])
@pytest.mark.parametrize("is_infinite", [False, True])
def test_a_step_of_a_scaler_that_raises_leaves_nothing_for_the_next_step(
    alone: gw.Node, name: str, is_infinite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = shared(net, alone, OPTIMIZERS[name], min_peers=0)
    train(net, optimizer, 0, range(2))

    def raises(*_: Any) -> None:
        raise TimeoutError("late")

    scaler.scale(loss_of(net, 0, 2)).backward()
    if is_infinite:
        next(net.parameters()).grad[0, 0] = float("inf")
    monkeypatch.setattr(optimizer.exchange, "step_moved", raises)
    with pytest.raises(TimeoutError, match="late"):
        scaler.step(optimizer)
    monkeypatch.undo()
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    optimizer.zero_grad()
    before = flat(net)
    train(net, optimizer, 0, range(3, 4))
    assert (flat(net) - before).abs().max() > 1e-3


def test_parameters_that_became_infinite_are_refused_and_restored(alone: gw.Node) -> None:
    net = model()
    optimizer = shared(net, alone, OPTIMIZERS["SGD"], min_peers=0)
    train(net, optimizer, 0, range(3))
    before = flat(net)
    next(net.parameters()).grad[1, 2] = float("nan")
    with pytest.raises(gw.NonFiniteUpdate):
        optimizer.step()
    assert same_bits(flat(net), before)


def test_attributes_of_the_wrapped_optimiser_are_found(alone: gw.Node) -> None:
    net = model()
    optimizer = shared(net, alone, OPTIMIZERS["AdamW"], min_peers=0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 0.02
    assert repr(optimizer).startswith("SharedOptimizer(AdamW")
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    train(net, optimizer, 0, [0])
    assert calls == ["stepped"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        optimizer.no_such_thing  # noqa: B018


def test_new_parameters_are_refused(alone: gw.Node) -> None:
    optimizer = shared(model(), alone, OPTIMIZERS["SGD"], min_peers=0)
    with pytest.raises(ValueError, match="before it is shared"):
        optimizer.add_param_group({"params": [torch.zeros(3)]})


# ---- the exchange's modes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_steps_are_shared_together(nodes: list[gw.Node], dtype: Any) -> None:
    def work(rank: int) -> Any:
        net = model(dtype)
        optimizer = shared(net, nodes[rank], OPTIMIZERS["SGD"], every=4)
        snapshots, kinds = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, rank, step, dtype).backward()
            optimizer.step()
            snapshots.append(flat(net))
            kinds.append(optimizer.result.is_local)
        return snapshots, kinds

    (first, kinds), (second, _), _ = run_together(work)
    assert kinds == [True, True, True, False] * 3
    for one, other, is_local in zip(first, second, kinds, strict=True):
        assert same_bits(one, other) != is_local


def test_asynchronous_nodes_lose_nothing(nodes: list[gw.Node]) -> None:
    def work(rank: int) -> Any:
        net = torch.nn.Linear(30, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        encoder = gw.Encoder(30, threshold=2.0**-2)
        exchange = gw.Exchange(encoder, nodes[rank], reduction="sum", min_peers=2, mode="async")
        optimizer = SharedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), exchange)
        total = torch.zeros(30)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            gradient = torch.randint(-512, 513, (30,), generator=generator) / 1024.0
            net.weight.grad = gradient.reshape(1, 30)
            optimizer.step()
            total -= gradient
        received = exchange.stats.received
        while received < 40:
            received += optimizer.catch_up(timeout_s=1.0)
        return net.weight.detach().flatten(), torch.from_numpy(encoder.residual), total

    results = run_together(work)
    params = results[0][0]
    assert all(torch.equal(params, other) for other, _, _ in results)
    left = sum(residual for _, residual, _ in results)
    assert torch.equal(params + left, sum(total for _, _, total in results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_model_holds_the_residual_except_in_shared_parameters(
    nodes: list[gw.Node], dtype: Any
) -> None:
    def work(rank: int) -> tuple[Any, Any, Any]:
        net = model(dtype)
        optimizer = shared(net, nodes[rank], OPTIMIZERS["SGD"], apply_residual=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, rank, step, dtype).backward()
            optimizer.step()
        own = flat(net)
        with optimizer.shared_parameters():
            common = flat(net)
        assert same_bits(flat(net), own)
        (encoder,) = optimizer.exchange.state_dict()["encoders"]
        return own, common, torch.from_numpy(encoder["residual"])

    outcomes = run_together(work)
    for own, common, residual in outcomes:
        assert same_bits(common, outcomes[0][1])
        assert not same_bits(own, outcomes[0][1])
        atol = torch.finfo(dtype).eps
        torch.testing.assert_close((own - common).float(), residual, atol=atol, rtol=0.0)


def test_making_the_state_early_changes_no_step(alone: gw.Node) -> None:
    for make in OPTIMIZERS.values():
        net, plain = model(), model()
        train(net, shared(net, alone, make, min_peers=0, codec="dense", share_state=True), 0)
        train(plain, make(plain.parameters()), 0)
        torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_timed_out_is_finished_by_the_next(nodes: list[gw.Node], dtype: Any) -> None:
    nets = [model(dtype) for _ in nodes]
    optimizers = [
        shared(net, node, OPTIMIZERS["SGD"], min_peers=2, timeout_s=5.0 if rank == 2 else 1.5)
        for rank, (net, node) in enumerate(zip(nets, nodes, strict=True))
    ]
    nodes[2].wait_for_peers(2, timeout_s=10.0)
    run_together(lambda rank: optimizers[rank].join(), count=3)
    nodes[2].close()  # a member that never takes a step

    def step(rank: int) -> None:
        optimizers[rank].zero_grad()
        loss_of(nets[rank], rank, 0, dtype).backward()
        optimizers[rank].step()

    with pytest.raises(TimeoutError):
        step(0)
    assert same_bits(flat(nets[0]), flat(model(dtype))), "without its update until it is shared"
    step_of_both = run_together(lambda rank: [step(rank) for _ in range(1 + rank)], count=2)
    assert len(step_of_both) == 2
    assert same_bits(flat(nets[0]), flat(nets[1]))
    assert not same_bits(flat(nets[0]), flat(model(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_join_changes_no_bit(nodes: list[gw.Node], dtype: Any) -> None:
    nets = [model(dtype) for _ in nodes]

    def work(rank: int) -> Any:
        optimizer = shared(nets[rank], nodes[rank], OPTIMIZERS["SGD"], apply_residual=True)
        train(nets[rank], optimizer, rank, dtype=dtype)
        before = [*optimizer.shared_tensors(), flat(nets[rank])]
        assert optimizer.join().step == STEPS
        after = [*optimizer.shared_tensors(), flat(nets[rank])]
        assert all(map(same_bits, before, after))
        train(nets[rank], optimizer, rank, range(STEPS, STEPS + 2), dtype)
        with optimizer.shared_parameters():
            return flat(nets[rank])

    shares = run_together(work)
    assert all(same_bits(shares[0], other) for other in shares)


# ---- joining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_late_node_has_the_parameters_and_the_state_of_the_others(dtype: Any) -> None:
    has_begun = threading.Event()
    end: list[int] = []  # the step at which all stop, once the late node knows its first

    def found(rank: int, node: gw.Node) -> Any:
        net = model(dtype)
        optimizer = shared(net, node, OPTIMIZERS["AdamW"], min_peers=1, share_state=True)
        while not end or optimizer.exchange.next_step < end[0]:
            optimizer.zero_grad()
            loss_of(net, rank, optimizer.exchange.next_step, dtype).backward()
            optimizer.step()
            if optimizer.exchange.next_step == 5:
                has_begun.set()
        return flat(net)

    def come_late(node: gw.Node) -> Any:
        net = model(dtype)
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(7.0)
        optimizer = shared(net, node, OPTIMIZERS["AdamW"], min_peers=1, share_state=True)
        joined = optimizer.join()
        taken = optimizer.state[next(net.parameters())]["step"].item()
        end.append(joined.step + 20)
        while optimizer.exchange.next_step < end[0]:
            optimizer.zero_grad()
            loss_of(net, 2, optimizer.exchange.next_step, dtype).backward()
            optimizer.step()
        return flat(net), joined, taken

    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        first = stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET))
        second = stack.enter_context(gw.Node("127.0.0.1:0", [first.address], secret=SECRET))
        initial_members = [pool.submit(found, 0, first), pool.submit(found, 1, second)]
        assert has_begun.wait(timeout=60.0)
        third = stack.enter_context(
            gw.Node("127.0.0.1:0", [first.address, second.address], secret=SECRET)
        )
        params, joined, taken = pool.submit(come_late, third).result()
        others = [founder.result() for founder in initial_members]
    assert joined.is_late
    assert taken > 0.0
    assert all(same_bits(params, other) for other in others)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(*things: Any) -> list[Any]:
    """Return the things' states after saving them and loading them with torch's restrictive loader."""
    file = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], file)
    file.seek(0)
    found: list[Any] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [1, 4])
def test_training_that_was_resumed_has_the_same_bits(dtype: Any, every: int) -> None:
    def begin(node: gw.Node) -> Any:
        net = model(dtype)
        return net, shared(net, node, OPTIMIZERS["AdamW"], min_peers=0, every=every)

    def go_on(net: Any, optimizer: Any, steps: Any) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, 0, step, dtype).backward()
            optimizer.step()

    with gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as node:
        straight, optimizer = begin(node)
        go_on(straight, optimizer, range(2 * STEPS))
    with gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as node:
        net, optimizer = begin(node)
        go_on(net, optimizer, range(STEPS + 1))
        checkpoint = saved(net, optimizer)
    with gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as node:
        net, optimizer = begin(node)
        net.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
        go_on(net, optimizer, range(STEPS + 1, 2 * STEPS))
    assert same_bits(flat(straight), flat(net))


def test_a_plain_optimisers_state_loads_in_both_directions(alone: gw.Node) -> None:
    net, plain = model(), model()
    unshared = torch.optim.AdamW(plain.parameters(), lr=0.02)
    train(plain, unshared, 0)
    optimizer = shared(net, alone, OPTIMIZERS["AdamW"], min_peers=0)
    optimizer.load_state_dict(unshared.state_dict())
    assert optimizer.state[next(net.parameters())]["step"].item() == STEPS
    unshared.load_state_dict(optimizer.state_dict())


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(gradwire.torch.optimizer)
    assert (result.attempted > 3, result.failed) == (True, 0)


def test_arguments_of_other_types_are_refused() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match="optimizer must be one of torch's"):
        SharedOptimizer(model, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exchange must be an Exchange"):
        SharedOptimizer(torch.optim.SGD(model.parameters()), None)  # type: ignore[arg-type]


def test_an_encoder_of_another_size_is_refused_before_the_model_moves() -> None:
    model = torch.nn.Linear(3, 1)
    before = model.weight.detach().clone()
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        share = gw.Exchange(gw.Encoder(5, threshold=0.5), node, min_peers=0)
        optimizer = SharedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), share)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match="4 elements, must have 5"):
            optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("options", [{}, {"apply_residual": True}, {"every": 3}, {"overlap": 1}])
def test_the_workers_of_a_machine_share_one_model(options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    begin = [param.detach().clone() for param in models[0].parameters()]
    inputs = torch.randn(2, 8, 3)
    with (
        gw.LocalTeam(f"model-{os.getpid()}", begin, size=2, rank=0, timeout_s=20.0) as team,
        gw.LocalTeam(f"model-{os.getpid()}", begin, size=2, rank=1, timeout_s=20.0) as other,
        gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node,
        ThreadPoolExecutor(2) as pool,
    ):
        share = gw.Exchange(gw.Encoder(4, threshold=0.05), node, min_peers=0, **options)
        workers = [team.lead(share), other.follow()]

        def train(rank: int) -> tuple[list[float], dict[str, Any]]:
            adam = torch.optim.Adam(models[rank].parameters(), lr=0.02)
            optimizer = SharedOptimizer(adam, workers[rank])
            losses = []
            for _ in range(40):
                optimizer.zero_grad()
                loss = (
                    (models[rank](inputs[rank]) - inputs[rank].sum(1, keepdim=True)).square().mean()
                )
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, optimizer.state_dict()

        (first, state), (second, nothing) = pool.map(train, range(2))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert max(first[-1], second[-1]) < 0.5 * min(first[0], second[0])
    assert state["gradwire"]["step"] == share.next_step
    # The exchange's state is the leader's; the step is compared when a checkpoint is loaded.
    assert set(nothing["gradwire"]) == {"local", "rounded", "step_number"}
    assert nothing["gradwire"]["step_number"] == state["gradwire"]["step_number"]


def test_the_buffers_of_a_team_begin_as_the_leader_s(alone: gw.Node) -> None:
    name = f"buffers-{os.getpid()}"

    def train_as(rank: int) -> Any:
        with gw.LocalTeam(name, size=2, rank=rank, timeout_s=20.0) as team:
            enc = gw.Encoder(NUMEL, threshold=0.05)
            share = team.follow() if rank else team.lead(gw.Exchange(enc, alone, min_peers=0))
            net, buffer = model(), torch.full((3,), rank + 1.0)
            optimizer = SharedOptimizer(
                OPTIMIZERS["AdamW"](net.parameters()), share, equalize=True, buffers=[buffer]
            )
            train(net, optimizer, rank)
            return buffer.tolist()

    assert run_together(train_as, 2) == [[1.0] * 3] * 2


@pytest.mark.parametrize(("every", "until"), [(1, 6), (4, 6), (4, 2)])
def test_a_team_resumes_bit_for_bit(every: int, until: int) -> None:
    def run(name: str, steps: range, saved: list[Any]) -> list[Any]:
        def train_as(rank: int) -> Any:
            team = gw.LocalTeam(f"{name}-{os.getpid()}", size=2, rank=rank, timeout_s=20.0)
            with team, gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as node:
                policy = gw.Encoder(NUMEL, threshold=gw.TargetDensity(0.1))
                lead = gw.Exchange(policy, node, min_peers=0, apply_residual=True, every=every)
                share = team.follow() if rank else team.lead(lead)
                net = model()
                optimizer = SharedOptimizer(
                    OPTIMIZERS["AdamW"](net.parameters()), share, share_state=True
                )
                if saved:
                    net.load_state_dict(saved[rank][0])
                    optimizer.load_state_dict(saved[rank][1])
                train(net, optimizer, rank, steps)
                own = flat(net)
                with optimizer.shared_parameters():  # what share() saves
                    return copy.deepcopy(net.state_dict()), optimizer.state_dict(), own

        return run_together(train_as, 2)

    straight = run("straight", range(12), [])
    resumed = run("resumed", range(until, 12), run("begun", range(until), []))
    for rank in range(2):
        assert same_bits(straight[rank][2], resumed[rank][2])


def test_a_worker_that_takes_the_place_of_another_has_the_leader_s_state(alone: gw.Node) -> None:
    name, is_done = f"replaced-{os.getpid()}", threading.Event()
    moments: list[Any] = []  # of the leader's optimiser, after each of its steps

    def train(rank: int, steps: int) -> SharedOptimizer:
        with gw.LocalTeam(name, size=2, rank=rank, timeout_s=20.0) as team:
            enc = gw.Encoder(NUMEL, threshold=0.05)
            share = team.follow() if rank else team.lead(gw.Exchange(enc, alone, min_peers=0))
            net = model()
            optimizer = SharedOptimizer(
                OPTIMIZERS["AdamW"](net.parameters()), share, share_state=True
            )
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(net, rank, step).backward()
                optimizer.step()
                if rank == 0:
                    moments.append(optimizer.state[net[0].weight]["exp_avg"].clone())
                if is_done.is_set():
                    break
            return optimizer

    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(train, 0, 100_000)
        try:
            train(1, 3)
            late = train(1, 1)  # joins, and takes no step with gradients of other parameters
        finally:
            is_done.set()
        leader.result()
    [weight, *_] = late.optimizer.state
    state = late.state[weight]
    assert state["step"] >= 3
    assert any(torch.equal(state["exp_avg"], found) for found in moments)


@pytest.mark.parametrize("scale", ["0.5", "Auto", None, True, [1.0], float("nan"), 0])
def test_a_scale_that_is_no_factor_is_refused(alone: gw.Node, scale: Any) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    exchange = gw.Exchange(gw.Encoder(NUMEL), alone)
    with pytest.raises(ValueError, match=r"update_scale is .*, must be positive, or"):
        SharedOptimizer(optimizer, exchange, update_scale=scale)
    with pytest.raises(TypeError, match="share_state must be True or False, got 'False'"):
        SharedOptimizer(optimizer, exchange, share_state="False")  # type: ignore[arg-type]


def test_a_state_of_something_else_is_refused_and_nothing_loaded(alone: gw.Node) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    shared = SharedOptimizer(optimizer, gw.Exchange(gw.Encoder(NUMEL), alone))
    plain = optimizer.state_dict()
    state: Any
    for state in (
        {},
        model().state_dict(),
        {"gradwire": {}},
        {"state": {}},
        gw.Encoder(4).state_dict(),
    ):
        with pytest.raises(
            ValueError, match=r"has state and param_groups, this one .* nothing was loaded"
        ):
            shared.load_state_dict(state)
    for state in (None, [], "text"):
        with pytest.raises(TypeError, match="the state must be a dict"):
            shared.load_state_dict(state)
    assert optimizer.state_dict() == plain
