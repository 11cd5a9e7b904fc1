"""Momentum correction in the DDP hook, compared step by step with the same arithmetic in float64."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from gradwire.torch import ThresholdState, register_threshold_hook  # noqa: E402

from .linear import flat_inputs, inputs  # noqa: E402
from .ranks import RankFailed, Ranks  # noqa: E402
from .test_hook import STEPS, THRESHOLD, Training  # noqa: E402

pytestmark = pytest.mark.torch

MOMENTUM = 0.5


def train(rank: int, options: dict[str, Any]) -> Any:
    training = Training(rank, momentum=MOMENTUM, **options)
    for step in range(STEPS):
        training.step(step)
    return *training.accounted, velocity(training.state)


def velocity(state: ThresholdState) -> Any:
    saved = state.state_dict()["residuals"]["parameters"]
    return torch.cat([saved[f"weights.{place}"]["velocity"] for place in range(5)])


class Rank:
    """The expected arithmetic of one rank, in float64."""

    def __init__(self) -> None:
        self.velocity = self.residual = torch.zeros(())

    def send(self, gradient: Any, *, masks: bool, whole: bool = False) -> Any:
        """Return the values that the rank sends for a gradient."""
        self.velocity = MOMENTUM * self.velocity + gradient
        if whole:
            return self.velocity
        self.residual = self.residual + self.velocity
        sent = torch.where(self.residual.abs() >= THRESHOLD, THRESHOLD * self.residual.sign(), 0.0)
        self.residual = self.residual - sent
        if masks:
            self.velocity = torch.where(sent != 0.0, 0.0, self.velocity)
        return sent


def put_in() -> Any:
    """Return the sum of both ranks' velocities over all steps."""
    total = torch.zeros(())
    for number in (0, 1):
        rank = Rank()
        for step in range(STEPS):
            gradient = flat_inputs(number, step).double()
            rank.send(gradient, masks=False)
            total = total + rank.velocity
    return total


@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("masks", [True, False])
def test_gradients_accumulate_momentum_before_they_are_encoded(
    two_ranks: Ranks, masks: bool, warmup_steps: int
) -> None:
    options = {"factor_masking": masks, "warmup_steps": warmup_steps}
    trained = two_ranks.run(train, options)
    ranks = [Rank(), Rank()]
    params = torch.zeros(())
    for step in range(STEPS):
        for number, rank in enumerate(ranks):
            gradient = flat_inputs(number, step).double()
            params = params - rank.send(gradient, masks=masks, whole=step < warmup_steps) / 2
    for rank, (own_params, own_residual, own_velocity) in zip(ranks, trained, strict=True):
        assert torch.equal(own_params, params)
        assert torch.equal(own_residual, rank.residual)
        assert torch.equal(own_velocity.double(), rank.velocity)


@pytest.mark.parametrize("warmup_steps", [0, STEPS + 1])
def test_a_step_that_is_not_finite_leaves_no_trace_in_the_momentum(
    two_ranks: Ranks, warmup_steps: int
) -> None:
    with_it, without = (
        two_ranks.run(spoil, spoils, {"warmup_steps": warmup_steps}) for spoils in (True, False)
    )
    for one, other in zip(with_it, without, strict=True):
        for values, expected in zip(one, other, strict=True):
            assert torch.equal(values, expected)


def spoil(rank: int, spoils: bool, options: dict[str, Any]) -> Any:
    training = Training(rank, momentum=MOMENTUM, **options)
    for step in range(STEPS):
        if spoils and step == STEPS // 2:
            values = [8.0 * one for one in inputs(rank, 99)]
            if rank == 1:
                values[3].view(-1)[4] = float("inf")
            training.optimizer.zero_grad()
            training.ddp(values).backward()
        training.step(step)
    return *training.accounted, velocity(training.state)


def train_with_scaler(rank: int, warmup_steps: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    options = {"momentum": MOMENTUM, "factor_masking": False, "warmup_steps": warmup_steps}
    training = Training(rank, scaler=scaler, **options)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        scaler.scale(training.ddp(inputs(rank, step))).backward()
        scaler.step(training.optimizer)
        scaler.update()
    params, left = training.accounted
    return params, left / training.state.state_dict()["scale"]


@pytest.mark.parametrize("warmup_steps", [0, 1, 6])
def test_a_changed_loss_scale_rescales_the_momentum(two_ranks: Ranks, warmup_steps: int) -> None:
    (params, first), (_, second) = two_ranks.run(train_with_scaler, warmup_steps)
    assert torch.equal(-2.0 * params + first + second, put_in())


def load_into_a_state_without(rank: int) -> None:
    training = Training(rank, momentum=MOMENTUM)
    training.step(0)
    other = Training(rank)
    other.state.load_state_dict(training.state.state_dict())
    other.step(1)


def test_a_checkpoint_with_momentum_is_refused_without_it(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"momentum for parameter weights\.\d"):
        two_ranks.run(load_into_a_state_without)


def spoil_static_graph(rank: int, place: int | None) -> Any:
    """Return the velocities after two steps, in the first of which one bucket's gradients are infinite on a rank."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6).double())
    model[0].register_forward_hook(lambda _module, _inputs, output: output.double())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    ddp = DistributedDataParallel(model, static_graph=True)
    state = register_threshold_hook(ddp, momentum=MOMENTUM, warmup_steps=3)
    if place is not None:
        spoils = model[place].bias.register_hook(lambda grad: grad / (1 - rank))
        ddp(torch.full((5, 6), 8.0)).sum().backward()
        spoils.remove()
    for step in range(2):
        ddp.zero_grad()
        ddp(torch.full((5, 6), 1.0 + rank + step)).sum().backward()
    saved = state.state_dict()["residuals"]["parameters"]
    return torch.cat([saved[name]["velocity"].double() for name, _ in model.named_parameters()])


@pytest.mark.parametrize("place", [0, 1])
def test_a_first_step_with_a_static_graph_leaves_no_trace_if_it_is_not_finite(
    two_ranks: Ranks, place: int
) -> None:
    spoilt, whole = (two_ranks.run(spoil_static_graph, each) for each in (place, None))
    for velocities, expected in zip(spoilt, whole, strict=True):
        assert torch.equal(velocities, expected)
