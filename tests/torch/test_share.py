"""One call shares a training: equal starts, shared checkpoints, the scale of adaptive optimisers, wrong use."""

from __future__ import annotations

import copy
import doctest
import gc
import io
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire import rendezvous  # noqa: E402

from .ranks import Ranks  # noqa: E402
from .test_optimizer import (  # noqa: E402
    OPTIMIZERS,
    flat,
    loss_of,
    model,
    run_together,
    same_bits,
    train,
)

pytestmark = pytest.mark.torch

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", rendezvous.PEERS, rendezvous.MIN_PEERS):
        monkeypatch.delenv(name, raising=False)


def varied(rank: int) -> Any:
    net = model()
    with torch.no_grad():
        for param in net.parameters():
            param.add_(rank)
    return net


def share(net: Any, node: gw.Node | None = None, name: str = "AdamW", **options: Any) -> Any:
    options.setdefault("density", 0.1)
    return gradwire.torch.share(net, OPTIMIZERS[name](net.parameters()), node=node, **options)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_nodes_that_begin_differently_save_the_same_parameters(
    pair: list[gw.Node], name: str
) -> None:
    def work(rank: int) -> Any:
        net = varied(rank)
        optimizer = share(net, pair[rank], name)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
        losses = []
        for step in range(60):
            losses += train(net, optimizer, rank, range(step, step + 1))
            schedule.step()
        return net.state_dict(), losses, optimizer.update_scale, flat(net)

    (first, losses, scale, own), (second, *_, other) = run_together(work, 2)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not same_bits(own, other), "each node's model holds its own residual"
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert 1.0 < scale <= 2.0**0.5 if name == "AdamW" else scale == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apply_residual", [True, False])
@pytest.mark.parametrize("every", [1, 4], ids=["", "two local steps are under way"])
def test_a_checkpoint_has_the_shared_parameters_and_goes_on_bit_for_bit(
    every: int, apply_residual: bool, dtype: Any
) -> None:
    options = {"every": every, "apply_residual": apply_residual}

    def saved(*things: Any) -> Any:
        file = io.BytesIO()
        torch.save([thing.state_dict() for thing in things], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    straight = model(dtype)
    optimizer = share(straight, **options)
    train(straight, optimizer, 0, range(6), dtype)
    outside = saved(straight, optimizer)
    with optimizer.shared_parameters():
        inside = copy.deepcopy(straight.state_dict())
        states = saved(straight, optimizer)
    train(straight, optimizer, 0, range(6, 16), dtype)
    for weights, state in (states, outside):
        assert all(torch.equal(weights[key], inside[key]) for key in inside)
        net = model(dtype)
        again = share(net, **options)
        if state is outside[1]:
            net.load_state_dict(weights)
        again.load_state_dict(state)
        net.load_state_dict(weights)
        train(net, again, 0, range(6, 16), dtype)
        assert same_bits(flat(net), flat(straight))


def test_half_precision_is_as_it_was_after_an_evaluation_before_the_first_step() -> None:
    net = model(torch.bfloat16)
    for param in net.parameters():
        param.data.fill_(torch.nan)  # as memory that nothing was written to
    optimizer = share(net)
    net.load_state_dict(model(torch.bfloat16).state_dict())
    with optimizer.shared_parameters():
        assert same_bits(flat(net), flat(model(torch.bfloat16)))
    again = share(net)
    again.load_state_dict(optimizer.state_dict())
    assert same_bits(flat(net), flat(model(torch.bfloat16)))


class Features(torch.nn.Module):
    """A layer on random features: frozen parameters and a buffer, other ones on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.features = torch.nn.Linear(20, 8).requires_grad_(False)
        self.register_buffer("shift", torch.randn(8))
        self.last = torch.nn.Linear(8, 3)

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.tanh(self.features(inputs) + self.shift))


def test_what_the_optimiser_does_not_train_begins_as_on_rank_0(pair: list[gw.Node]) -> None:
    nets = [Features(rank) for rank in range(2)]

    def work(rank: int) -> Any:
        trained = torch.optim.AdamW(nets[rank].last.parameters())
        optimizer = gradwire.torch.share(nets[rank], trained, node=pair[rank], density=0.1)
        train(nets[rank], optimizer, rank, range(3))
        return nets[rank].state_dict()

    before = copy.deepcopy(nets[0].state_dict())
    first, second = run_together(work, 2)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert torch.equal(tensor, before[name]) == (not name.startswith("last"))


@pytest.mark.parametrize("share_state", [True, False])
def test_a_late_node_has_the_optimiser_s_state_if_that_is_wanted(
    pair: list[gw.Node], share_state: bool
) -> None:
    is_in = threading.Event()

    def begin(node: gw.Node) -> None:
        net = model()
        optimizer = share(net, node, "AdamW", share_state=share_state)
        step = 0
        while not is_in.is_set():
            train(net, optimizer, 0, range(step, step + 1))
            step += 1
        optimizer.exchange.end()  # the other may be one step ahead

    def come_late() -> int:
        try:
            with gw.Node("127.0.0.1:0", [pair[0].address], secret=SECRET, node_id=3) as node:
                node.expected_peers = 1
                while pair[0].stats().messages_sent < 10:  # training has begun
                    time.sleep(0.01)
                optimizer = share(model(), node, "AdamW", share_state=share_state)
                assert optimizer.join().is_late
                count = len(optimizer.state)
                optimizer.close()
                return count
        finally:
            is_in.set()

    count, *_ = run_together(lambda rank: begin(pair[rank - 1]) if rank else come_late(), 3)
    assert (count > 0) == share_state


def test_nodes_wait_for_one_that_evaluates_longer_than_the_timeout(
    pair: list[gw.Node], caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> Any:
        net = model()
        optimizer = share(net, pair[rank], timeout_s=0.5)
        train(net, optimizer, rank, range(2))
        if rank:
            with optimizer.shared_parameters():
                time.sleep(1.5)
        train(net, optimizer, rank, range(2, 4))
        return net.state_dict()

    first, second = run_together(work, 2)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert f"after 0.5 s: no message from {pair[1].address}" in caplog.text


def test_weights_that_were_loaded_are_saved_as_they_are() -> None:
    net, other = model(), varied(5)
    optimizer = share(net)
    train(net, optimizer, 0, range(3))
    assert not torch.equal(net.state_dict()["0.weight"], net[0].weight)
    net.load_state_dict(other.state_dict())
    assert torch.equal(net.state_dict()["0.weight"], other[0].weight)


def test_copies_of_a_model_have_no_part_in_sharing() -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(3))
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    assert torch.equal(average.state_dict()["module.0.weight"], net[0].weight)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.state_dict()["0.weight"], net[0].weight)


def test_accumulation_gradscaler_and_compile_work_as_without_it() -> None:
    net = model()
    optimizer = share(net)
    compiled = torch.compile(net, backend="eager")
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            scaler.scale(loss_of(compiled, part, step) / 2).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.result.step == 3
    assert sorted(compiled.state_dict())[0] == "_orig_mod.0.bias"
    assert torch.equal(compiled.state_dict()["_orig_mod.0.weight"], net.state_dict()["0.weight"])


class Tied(torch.nn.Module):
    """An embedding whose weights are the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Embedding(20, 8)
        self.outside = torch.nn.Linear(8, 20, bias=False)
        self.outside.weight = self.inside.weight

    def forward(self, words: Any) -> Any:
        return self.outside(self.inside(words))


def test_tied_weights_are_saved_without_the_residual_under_every_name() -> None:
    net = Tied()
    optimizer = share(net)
    words = torch.arange(20)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(words), words).backward()
        optimizer.step()
    saved = net.state_dict()
    assert not torch.equal(saved["inside.weight"], net.inside.weight)
    assert saved["outside.weight"].data_ptr() == saved["inside.weight"].data_ptr()


@pytest.mark.parametrize("name", ["NAdam", "Rprop", "ASGD", "RAdam", "Adamax", "Adafactor"])
def test_an_optimizer_s_state_begins_as_without_sharing(name: str) -> None:
    net, plain = model(), model()
    make = getattr(torch.optim, name)
    optimizer = gradwire.torch.share(net, make(net.parameters(), lr=0.01))
    losses = (
        train(net, optimizer, 0, range(5)),
        train(plain, make(plain.parameters(), lr=0.01), 0, range(5)),
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
def test_sparse_gradients_train_as_without_sharing(name: str) -> None:
    nets = [torch.nn.Embedding(20, 4, sparse=True) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    make = getattr(torch.optim, name)
    optimizers = [make(net.parameters(), lr=0.1) for net in nets]
    optimizers[0] = gradwire.torch.share(nets[0], optimizers[0])
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(torch.tensor([step, step + 1])).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight)


def test_parameters_whose_memory_is_replaced_are_still_shared(pair: list[gw.Node]) -> None:
    def work(rank: int) -> Any:
        net = varied(rank)
        optimizer = share(net, pair[rank])
        for step in range(6):
            train(net, optimizer, rank, range(step, step + 1))
            vector = torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()
            torch.nn.utils.vector_to_parameters(vector, net.parameters())
        return net.state_dict(), flat(net)

    (first, own), (second, _) = run_together(work, 2)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (own - torch.cat([one.flatten() for one in first.values()])).abs().max() < 0.1


def test_a_compiled_function_may_take_the_step() -> None:
    net = model()
    optimizer = share(net)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def step() -> None:
        optimizer.step()

    for number in range(3):
        optimizer.zero_grad()
        loss_of(net, 0, number).backward()
        step()
    assert optimizer.result.step == 2


def test_density_by_name_and_small_tensors_in_one_message() -> None:
    net = model()
    assert len(share(net).exchange._groups) == 1
    optimizer = share(net, density={"2.*": 0.25, "*.bias": "dense"})
    groups = optimizer.exchange._groups.groups
    assert [(group.tensors, group.is_dense) for group in groups] == [
        ((0,), False),
        ((1,), True),
        ((2, 3), False),
    ]
    train(net, optimizer, 0, range(3))
    with pytest.raises(ValueError, match=r"lm_head\* matches no parameter"):
        share(model(), density={"lm_head*": 0.1})


class Frozen(torch.nn.Module):
    """A small trained model beside a large parameter that is not trained."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)
        )
        self.backbone = torch.nn.Parameter(torch.zeros(100_000), requires_grad=not is_frozen)

    def forward(self, inputs: Any) -> Any:
        return self.trained(inputs) + 0.0 * self.backbone[0]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_frozen_parameters_change_neither_the_messages_nor_the_training_of_the_others(
    pair: list[gw.Node], name: str
) -> None:
    # Made here: threads would take turns with the generator of the initial values.
    nets = [Frozen(is_frozen=True) for _ in range(4)]

    def work(rank: int, node: gw.Node, with_frozen: bool) -> Any:
        net = nets.pop()
        params = net.parameters() if with_frozen else net.trained.parameters()
        # The factor of an adaptive optimiser is measured in a sample of the elements.
        optimizer = gradwire.torch.share(net, OPTIMIZERS[name](params), node=node, update_scale=1.0)
        sent_bytes = 0
        for step in range(30):
            train(net, optimizer, rank, range(step, step + 1))
            sent_bytes += optimizer.result.sent_bytes
        return flat(net.trained), sent_bytes

    both = run_together(lambda rank: work(rank, pair[rank], True), 2)
    with (
        gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=SECRET, node_id=2) as two,
    ):
        one.expected_peers = two.expected_peers = 1
        alone = run_together(lambda rank: work(rank, [one, two][rank], False), 2)
    for (params, sent_bytes), (expected, expected_bytes) in zip(both, alone, strict=True):
        assert same_bits(params, expected)
        # The frozen group's message is empty.
        assert sent_bytes <= expected_bytes + 30 * 64


def test_tensors_that_do_not_change_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    net = Frozen(is_frozen=False)
    optimizer = share(net, name="SGD")
    train(net, optimizer, 0, range(120))
    warnings = [record.message for record in caplog.records if "hardly" in record.message]
    assert len(warnings) == 1
    assert "backbone" in warnings[0]
    assert "trained" not in warnings[0].partition("changed in")[2].partition(":")[0]


def test_a_number_is_a_parameter_as_any_other() -> None:
    """Also where tensors that hardly change are looked for, after 50 steps."""
    net = torch.nn.ParameterList([torch.zeros(()), torch.zeros(300), torch.zeros(0)])
    optimizer = gradwire.torch.share(net, torch.optim.SGD(net.parameters(), lr=1.0), density=0.1)
    for _ in range(60):
        for param in net:
            param.grad = torch.full_like(param, -1.0)
        optimizer.step()
    assert net[0].item() == 60.0


class Pretrained(torch.nn.Module):
    """A large backbone and a head: every gradient is nearly constant, so an adaptive optimiser moves by its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Parameter(torch.zeros(100_000))
        self.head = torch.nn.Parameter(torch.zeros(200))

    def train_once(self, optimizer: Any, generator: torch.Generator) -> None:
        for param in self.parameters():
            param.grad = noisy(param, generator)
        optimizer.step()


@pytest.mark.parametrize("density", [None, 0.05, {"back*": 0.05}], ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_small_group_with_a_high_learning_rate_is_sent_in_steps_of_its_own_size(
    name: str, density: Any
) -> None:
    net, generator = Pretrained(), torch.Generator().manual_seed(0)
    rates = [
        {"params": [net.backbone], "lr": 1e-5},
        {"params": [net.head], "lr": 1e-3},
    ]
    inner = OPTIMIZERS[name](rates)
    optimizer = gradwire.torch.share(net, inner, density=density)
    for _ in range(100):
        net.train_once(optimizer, generator)
    means = {name: float(param.detach().mean()) for name, param in net.named_parameters()}
    with optimizer.shared_parameters():
        shared = {name: float(param.detach().mean()) for name, param in net.named_parameters()}
    # With one threshold for both, 0.2 to 0.35 of the head's way would have been sent.
    assert all(0.6 < shared[name] / means[name] < 1.1 for name in means), (shared, means)


def test_groups_that_move_unequally_fast_have_thresholds_of_their_own() -> None:
    net = model()
    groups = [{"params": [param]} for param in net.parameters()]
    for group, differing in zip(groups, [{}, {"lr": 0.1}, {"betas": (0.5, 0.9)}, {}], strict=True):
        group.update(differing)
    groups[0] |= {"weight_decay": 0.1, "name": "first"}
    inner = torch.optim.AdamW(groups, lr=0.001)
    # A warm-up begins at a rate of 0 for all.
    torch.optim.lr_scheduler.LambdaLR(inner, float)
    encoders = gradwire.torch.share(net, inner).exchange._groups.encoders
    sizes = [param.numel() for param in net.parameters()]
    assert [encoder.numel for encoder in encoders] == [sizes[0] + sizes[3], sizes[1], sizes[2]]
    # The density is that of all parameters, also where a group asks for less than one element.
    net = Pretrained()
    parts = [{"params": [net.backbone]}, {"params": [net.head], "lr": 1.0}]
    shared = gradwire.torch.share(net, torch.optim.SGD(parts, lr=0.1), density=0.001)
    assert [encoder.policy.density for encoder in shared.exchange._groups.encoders] == [0.001] * 2
    with pytest.raises(ValueError, match="less than one element"):
        gradwire.torch.share(net, torch.optim.SGD(parts, lr=0.1), density={"head": 0.001})


@pytest.mark.parametrize("density", [0.05, {"head": 0.06}], ids=str)
def test_tensors_that_stay_behind_are_named_once(
    density: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net, generator = Pretrained(), torch.Generator().manual_seed(0)
    net.head.register_hook(lambda grad: 100.0 * grad)
    optimizer = gradwire.torch.share(net, torch.optim.SGD(net.parameters(), 1e-5), density=density)
    for _ in range(120):
        optimizer.zero_grad()
        (net.backbone @ noisy(net.backbone, generator)).backward()
        (net.head @ noisy(net.head, generator)).backward()
        optimizer.step()
    warnings = [record.message for record in caplog.records if "thresholds each" in record.message]
    if isinstance(density, float):
        assert len(warnings) == 1
        assert warnings[0].startswith("head: 0.2 % of the elements hold ")
    else:
        assert not warnings


def noisy(param: Any, generator: torch.Generator) -> Any:
    return 1.0 + 0.3 * torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize(
    ("name", "inputs", "default"),
    [("SGD", 2_000, 0.01), ("AdamW", 2_000, 0.05), ("SGD", 500, 0.02), ("AdamW", 500, 0.08)],
)
def test_adaptive_optimizers_and_small_models_have_a_higher_default_density(
    name: str, inputs: int, default: float
) -> None:
    for density, expected in ((None, [default]), ({"bias": 0.25}, [default, 0.25])):
        shared = share(torch.nn.Linear(inputs, 1_000), name=name, density=density)
        found = [group.encoder.policy.density for group in shared.exchange._groups.groups]
        assert found == pytest.approx(expected, rel=0.01)


# ---- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, 1.0, True, "none", 1e-6])
def test_a_density_that_sends_nothing_is_refused(density: Any) -> None:
    with pytest.raises(ValueError, match="density"):
        share(model(), density=density)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"evry": 4}, TypeError, "unknown options evry"),
        ({"timeout_s": 0.0}, ValueError, "timeout_s is 0.0"),
        ({"min_members": 0}, ValueError, "min_members is 0"),
        ({"mode": "async", "overlap": 1}, ValueError, "overlap is for synchronous steps"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_there_is_a_node(
    options: dict[str, Any],
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gw.Node, "from_env", lambda **_: pytest.fail("made a node"))
    net = model()
    with pytest.raises(error, match=text):
        gradwire.torch.share(net, torch.optim.SGD(net.parameters()), **options)
    with pytest.raises(error, match=text):
        gw.share(np.zeros(4, np.float32), **options)


@pytest.mark.parametrize(
    ("options", "straggler"),
    [({}, "wait"), ({"mode": "async"}, "wait"), ({"on_straggler": "drop"}, "drop")],
)
def test_a_shared_model_holds_its_residual_and_waits_for_stragglers(
    options: dict[str, Any], straggler: str
) -> None:
    shared = gw.share(np.zeros(4, np.float32), **options, timeout_s=7.0)
    chosen = shared.exchange._options
    assert (chosen.apply_residual, chosen.on_straggler, chosen.timeout_s) == (True, straggler, 7.0)


def test_a_gradient_that_is_not_finite_is_found_beside_sparse_ones() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 1))
    momentum = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = gradwire.torch.share(net, momentum)
    for factor in (1.0, float("nan")):
        optimizer.zero_grad()
        (net(torch.tensor([1])).sum() * factor).backward()
        if factor == 1.0:
            optimizer.step()
    with pytest.raises(gw.NonFiniteUpdate, match="9 elements of the gradient"):
        optimizer.step()
    momenta = [one["momentum_buffer"].to_dense() for one in optimizer.state.values()]
    assert all(momentum.isfinite().all() for momentum in momenta)


def test_optimizers_and_parameters_that_cannot_be_shared_are_refused() -> None:
    net = model()
    with pytest.raises(TypeError, match="L-BFGS"):
        gradwire.torch.share(net, torch.optim.LBFGS(net.parameters()))
    net.register_parameter("phase", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(TypeError, match=r"complex64.*view_as_real"):
        share(net)
    with pytest.raises(ValueError, match="to_empty"):
        share(torch.nn.Linear(2, 2, device="meta"))


def share_what_ddp_averages(_rank: int) -> str:
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    with pytest.raises(ValueError, match="give both the process group") as caught:
        gradwire.torch.share(ddp, torch.optim.SGD(ddp.parameters()))
    return str(caught.value)


def test_a_model_whose_gradients_all_ranks_average_is_refused(two_ranks: Ranks) -> None:
    one, other = two_ranks.run(share_what_ddp_averages)
    assert one == other


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    net = model()
    with pytest.raises(TypeError, match="Module"):
        gradwire.torch.share(net.parameters(), OPTIMIZERS["SGD"](net.parameters()))
    with pytest.raises(TypeError, match="SharedOptimizer"):
        gradwire.torch.share(net, share(net))
    with pytest.raises(ValueError, match="not the model's"):
        gradwire.torch.share(model(), OPTIMIZERS["SGD"](net.parameters()))
    with pytest.raises(ValueError, match="update_scale"):
        share(net, update_scale=0.0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_loop_that_goes_on_with_the_plain_optimiser_is_told(
    is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    kept = gradwire.torch.share(net, optimizer)
    if not is_kept:
        kept = None
    for step in range(2):
        loss_of(net, 0, step).backward()
        optimizer.step()
    assert caplog.text.count("AdamW takes a step of its own, which no other node gets") == 1
    if kept is not None:
        kept.close()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_plain_optimiser_goes_on_after_the_training_without_a_word(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    hooked = []
    with gradwire.torch.share(net, optimizer, update_scale=0.5) as shared:
        optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
        for step in range(steps):
            loss_of(net, 0, step).backward()
            shared.step()
    for step in range(2):  # the second time after what share() has returned was collected
        loss_of(net, 0, steps).backward()
        optimizer.step()
        assert len(hooked) == steps + step + 1
        shared = None
        gc.collect()
    assert "a step of its own" not in caplog.text


def test_a_step_inside_shared_parameters_is_an_error() -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(2))
    with optimizer.shared_parameters(), pytest.raises(RuntimeError, match="would be lost"):
        train(net, optimizer, 0, range(1))


def test_a_gradient_that_is_not_finite_leaves_the_optimiser_as_it_was() -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(2))
    before = copy.deepcopy(optimizer.optimizer.state_dict())
    loss_of(net, 0, 3).backward()
    net[0].bias.grad = None
    net[2].bias.grad[1] = float("nan")
    with pytest.raises(gw.NonFiniteUpdate, match=r"1 elements .* the first in 2\.bias: nothing"):
        optimizer.step()
    after = optimizer.optimizer.state_dict()["state"]
    for index, state in before["state"].items():
        assert all(torch.equal(value, after[index][key]) for key, value in state.items())


# ---- processes -------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
import gradwire.torch

torch.manual_seed({seed})
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
optimizer = gradwire.torch.share(model, torch.optim.AdamW(model.parameters(), lr=0.01), density=0.1)
for step in range(30):
    inputs = torch.randn(16, 20)
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :3]).square().mean().backward()
    scale = optimizer.update_scale  # after the last step the other may be gone
    optimizer.step()
weights = torch.cat([one.flatten() for one in model.state_dict().values()])
print("checksum", int(weights.view(torch.int32).sum()), scale, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--as-machines",)], ids=["a team", "machines"])
def test_processes_share_a_training_without_another_word(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{seed}", "__import__('os').getpid()"))
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", *options, str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line[4:] for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert 1.0 < float(lines[0].split()[-1]) <= 2.0**0.5


def test_the_readme_s_five_lines_run() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [example] = [
        one for one in re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S) if "torch" in one
    ]
    assert len([line for line in example.splitlines() if line.strip()]) <= 8
    net, data = model(), [(torch.ones(2, 20), torch.zeros(2, 3))] * 3
    names = {"model": net, "data": data, "loss_of": lambda out, want: (out - want).square().mean()}
    before = flat(net)
    exec(compile(example, "README.md", "exec"), names)
    assert not same_bits(before, flat(net))
    assert names["optimizer"].exchange.next_step == 3


def test_the_example_in_the_docstring_runs() -> None:
    from gradwire.torch import share as function

    result = doctest.testmod(sys.modules[function.__module__])
    assert (result.attempted > 3, result.failed) == (True, 0)


# ---- one training after another --------------------------------------------------------------------------------------

FOLDS = """
import gc, os, sys, threading, time
import torch
import gradwire.torch

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
model = torch.nn.Linear(64, 8)  # a search for the learning rate uses one model again

def train(number, way):
    net = model if way == "with" else torch.nn.Linear(64, 8)
    inner = torch.optim.AdamW([net.weight] if way == "grown" else net.parameters(), lr=0.01)
    optimizer = gradwire.torch.share(net, inner, timeout_s=30.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def loop():
        for step in range(4):
            if way == "grown" and step == 2:
                optimizer.add_param_group({"params": [net.bias]})
            optimizer.zero_grad()
            net(torch.full((4, 64), 1.0 + rank)).square().mean().backward()
            optimizer.step()
            schedule.step()

    if way == "with":
        with optimizer:
            loop()
    else:
        loop()
        assert optimizer.catch_up() == 0
    if way == "leave":
        optimizer.leave()
        optimizer.leave()
    if way == "deleted":
        return net.state_dict()
    optimizer.close()
    assert all(map(torch.equal, net.parameters(), net.state_dict().values()))
    assert "gradwire" in optimizer.state_dict()
    shared = [param.clone() for param in net.parameters()]
    with optimizer.shared_parameters():
        assert all(map(torch.equal, net.parameters(), shared))
    # The model is a plain one: what is done to it later is what is saved.
    with torch.no_grad():
        net.bias += 1.0
    assert torch.equal(net.state_dict()["bias"], net.bias)
    with torch.no_grad():
        net.bias.copy_(shared[1])
    return net.state_dict()

def usage():
    gc.collect()  # an owner in a cycle, which ends its training
    gc.collect()  # what the training held
    return len(os.listdir("/proc/self/fd")), threading.active_count()

for number, way in enumerate(["close", "with", "deleted", "with", "grown", "close", "leave"]):
    # A rank that is ahead must not come into the training that the other still ends.
    if rank == number % 2:
        time.sleep(0.2)
    state = train(number, way)
    if number == 0:
        first = usage()
    print("digest", number, sum(value.double().sum().item() for value in state.values()), flush=True)
assert usage() == first, (usage(), first)
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", ["team", "machines"])
def test_a_process_trains_one_model_after_another(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "folds.py"
    script.write_text(FOLDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    machines = ["--as-machines"] if kind == "machines" else []
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", *machines, str(script)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr
    # Who leaves first does not get the other's rest.
    digests = [set(re.findall(rf"digest {number} (.*)", done.stdout)) for number in range(6)]
    assert [len(values) for values in digests] == [1] * 6, digests


def test_a_share_that_is_refused_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET.hex())
    monkeypatch.setenv("GRADWIRE_MIN_PEERS", "1")
    monkeypatch.setenv("GRADWIRE_BIND", "127.0.0.1:0")
    net = model()
    for _ in range(2):
        with pytest.raises(ValueError, match="update_scale"):
            gradwire.torch.share(net, torch.optim.SGD(net.parameters(), lr=0.1), update_scale=-1.0)


def test_a_closed_optimizer_can_be_saved_and_goes_on_where_it_was() -> None:
    straight = model()
    optimizer = share(straight)
    train(straight, optimizer, 0, range(6))
    weights = copy.deepcopy(straight.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    train(straight, optimizer, 0, range(6, 12))
    stopped = model()
    with share(stopped) as ending:
        train(stopped, ending, 0, range(6))
    assert all(torch.equal(weights[key], stopped.state_dict()[key]) for key in weights)
    assert same_bits(flat(stopped), torch.cat([weights[key].reshape(-1) for key in weights]))
    for saved in (state, ending.state_dict()):
        net = model()
        again = share(net)
        net.load_state_dict(weights)
        again.load_state_dict(saved)
        train(net, again, 0, range(6, 12))
        assert same_bits(flat(net), flat(straight))
    with pytest.raises(gw.Closed, match="call share again"):
        ending.step()


def test_an_optimizer_that_is_closed_inside_shared_parameters_leaves_the_shared_ones() -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(6))
    with optimizer.shared_parameters():
        expected = flat(net)
        optimizer.close()
        assert same_bits(flat(net), expected)
    assert optimizer.has_ended
    assert same_bits(flat(net), expected)
    with optimizer.shared_parameters():
        assert same_bits(flat(net), expected)


def test_ranks_whose_gradients_are_averaged_have_equal_updates_without_a_warning(
    everywhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def work(_rank: int, share: Any) -> None:
        train(net := model(), share(net, OPTIMIZERS["AdamW"](net.parameters())), 0, range(12))

    everywhere("team", work)
    assert "the processes' updates are equal" not in caplog.text


# ---- the step of the training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"every": 3}], ids=["", "local steps"])
def test_a_late_node_s_schedule_goes_on_at_the_training_s_step(
    options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun, is_done = threading.Event(), threading.Event()

    def schedule_of(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)

    def train_early(node: gw.Node) -> list[float]:
        optimizer = share(net := model(), node, "SGD", **options)
        schedule = schedule_of(optimizer)
        rates = []
        while not is_done.is_set():
            rates.append(schedule.get_last_lr()[0])
            train(net, optimizer, 0, range(len(rates), len(rates) + 1))
            schedule.step()
            assert optimizer.step_number == len(rates)
            if len(rates) == 10:
                has_begun.set()
        return rates

    with (
        gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=SECRET, node_id=2) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        first.expected_peers = 0
        early = pool.submit(train_early, first)
        try:
            assert has_begun.wait(60.0)
            optimizer = share(net := model(), second, "SGD", **options)
            scheduler = schedule_of(optimizer)
            # As docs/howto/late-joiners.md has it.
            optimizer.join()
            for _ in range(optimizer.step_number - scheduler.last_epoch):
                scheduler.step()
            number = optimizer.step_number
            rate = scheduler.get_last_lr()[0]
            train(net, optimizer, 1, range(3))
            assert optimizer.step_number == number + 3
            optimizer.leave()
        finally:
            is_done.set()
        rates = early.result()
    assert number >= 10
    assert rate == rates[number]
    assert f"comes in late, at step {number} of the training" in caplog.text


@pytest.mark.parametrize("place", ["machines", "team"])
def test_a_schedule_follows_a_first_step_that_leaves_out_this_node_s_part(
    everywhere: Any, place: str, recwarn: pytest.WarningsRecorder
) -> None:
    def work(rank: int, share: Any) -> float:
        inner = torch.optim.SGD((net := varied(rank)).parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
        train(net, share(net, inner), rank, range(1))
        schedule.step()
        return schedule.get_last_lr()[0]

    assert everywhere(place, work) == [0.05] * 2
    assert not [each for each in recwarn if "lr_scheduler.step()" in str(each.message)]


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"every": 3, "overlap": 1}], ids=str)
@pytest.mark.parametrize("place", ["alone", "machines", "team"])
def test_the_step_number_is_the_checkpoint_s(everywhere: Any, place: str, options: Any) -> None:
    def before(rank: int, share: Any) -> Any:
        net = model()
        optimizer = share(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
        assert optimizer.step_number == 0
        train(net, optimizer, rank, range(7))
        if options.get("overlap"):
            optimizer.catch_up()
        assert optimizer.step_number == 7
        return net.state_dict(), optimizer.state_dict()

    states = everywhere(place, before)

    def after(rank: int, share: Any) -> None:
        net = model()
        optimizer = share(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
        optimizer.load_state_dict(states[rank][1])
        net.load_state_dict(states[rank][0])
        assert optimizer.step_number == 7
        optimizer.join()
        assert optimizer.step_number == 7
        train(net, optimizer, rank, range(2))
        assert optimizer.step_number == 9
        with pytest.raises(RuntimeError, match="begun"):
            optimizer.load_state_dict(states[rank][1])

    everywhere(place, after)
