"""The hook and a loss scale that it cannot follow: steps are skipped or raise, and no backward() waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import gradwire as gw  # noqa: E402
from gradwire.torch import ThresholdState, register_threshold_hook  # noqa: E402

from .linear import BUCKET_CAP_MB, Linear, inputs  # noqa: E402
from .ranks import RankFailed, Ranks  # noqa: E402

pytestmark = pytest.mark.torch


class Scaler:
    """Has the scale that a test gives it; an error is raised."""

    scale: Any = 1.0

    def get_scale(self) -> Any:
        if isinstance(self.scale, BaseException):
            raise self.scale
        return self.scale


def training(scaler: Any, **options: Any) -> tuple[Linear, Any, ThresholdState]:
    model = Linear()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    options = {"threshold": gw.FixedThreshold(0.5), "warmup_steps": 0, **options}
    return model, ddp, register_threshold_hook(ddp, scaler=scaler, **options)


def everything(state: ThresholdState) -> list[Any]:
    """Return what a checkpoint has of all parameters, in the units of unscaled gradients."""
    saved = state.state_dict()
    parts = [part for _, part in sorted(saved["residuals"]["parameters"].items())]
    scaled = [(part["residual"], part["velocity"], part["threshold"]) for part in parts]
    return [None if one is None else one / saved["scale"] for three in scaled for one in three]


def same(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def train_gone_nan(_: int, options: dict[str, Any]) -> Any:
    """Halve a real scaler's scale down to zero; go on with another one."""
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(20, 3))
    state = register_threshold_hook(ddp, scaler=scaler, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    values = torch.randn(8, 20)

    def step(values: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(ddp(values).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    for number in range(190):
        step(torch.full_like(values, float("nan")) if number >= 5 else values)
    lowest = scaler.get_scale()
    scaler.update(65536.0)
    before = ddp.module.weight.detach().clone()
    for _ in range(3):
        step(values)
    is_changed = not torch.equal(before, ddp.module.weight)
    is_finite = bool(ddp.module.weight.isfinite().all())
    return lowest, state.state_dict()["scale"], is_changed, is_finite


@pytest.mark.parametrize("options", [{}, {"threshold": 1e-3}, {"momentum": 0.5}], ids=str)
def test_a_training_gone_nan_is_skipped_until_it_has_another_scale(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    assert two_ranks.run(train_gone_nan, options) == [(0.0, 65536.0, True, True)] * 2


def scales_that_cannot_be_followed(rank: int, options: dict[str, Any]) -> list[tuple[float, str]]:
    scaler = Scaler()
    model, ddp, state = training(scaler, **options)
    for step in range(3):
        ddp(inputs(rank, step)).backward()
    failures = []
    for scale in (0.0, 1e-40, -1.0, float("nan"), float("inf"), 1.5e-38, 1e39):
        before = everything(state)
        scaler.scale = scale
        model.zero_grad()
        ddp(inputs(rank, 3)).backward()
        if not all(bool(weight.grad.isnan().all()) for weight in model.weights):
            failures.append((scale, "not skipped"))
        scaler.scale = 1.0
        if not same(everything(state), before):
            failures.append((scale, "changed"))
    model.zero_grad()
    ddp(inputs(rank, 4)).backward()
    if not all(bool(weight.grad.isfinite().all()) for weight in model.weights):
        failures.append((1.0, "skipped"))
    return failures


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_a_step_in_a_scale_that_cannot_be_followed_is_skipped_and_leaves_no_trace(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    # 1.5e-38 times the threshold 1e-3 is none; it is a scale otherwise.
    options = {**options, "threshold": gw.FixedThreshold(1e-3)}
    assert two_ranks.run(scales_that_cannot_be_followed, options) == [[], []]


def resumed_without_a_scaler(rank: int, options: dict[str, Any]) -> Any:
    scaler = Scaler()
    scaler.scale = 1024.0
    _, ddp, state = training(scaler, **options)
    for step in range(3):
        (scaler.scale * ddp(inputs(rank, step))).backward()
    saved = state.state_dict()
    gradients = []
    for scale in (scaler.scale, 1.0):
        model, ddp, state = training(None if scale == 1.0 else scaler, **options)
        state.load_state_dict(saved)
        for step in range(3, 6):
            model.zero_grad()
            (scale * ddp(inputs(rank, step))).backward()
        gradients.append([weight.grad / scale for weight in model.weights])
    return same(*gradients), state.state_dict()["scale"]


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.5}, {"momentum": 0.5, "warmup_steps": 5}], ids=str
)
def test_a_checkpoint_with_a_scale_goes_on_without_a_scaler(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    assert two_ranks.run(resumed_without_a_scaler, options) == [(True, 1.0)] * 2


def momentum_of_a_warm_up(rank: int, scale: float) -> Any:
    scaler = Scaler()
    _, ddp, state = training(scaler, momentum=0.5, warmup_steps=5)
    ddp(inputs(rank, 0)).backward()
    before = everything(state)
    scaler.scale = scale
    ddp(inputs(rank, 1)).backward()
    return same(everything(state), before)


def test_a_warm_up_step_in_such_a_scale_leaves_no_trace(two_ranks: Ranks) -> None:
    assert two_ranks.run(momentum_of_a_warm_up, 0.0) == [True, True]


def error_at_the_start(rank: int, error: Any) -> Any:
    scaler = Scaler()
    _, ddp, state = training(scaler)
    ddp(inputs(rank, 0)).backward()
    ddp(inputs(rank, 1)).backward()  # in the buckets that stay
    before = everything(state)
    scaler.scale = error
    raised = ""
    try:
        ddp(inputs(rank, 2)).backward()
    except Exception as failure:
        raised = str(failure)
    scaler.scale = 1.0
    return raised, same(everything(state), before)


@pytest.mark.parametrize("error", [ZeroDivisionError("no scale here"), "no scale here"], ids=repr)
def test_an_error_at_the_start_of_a_step_ends_its_backward_pass(
    two_ranks: Ranks, error: Any
) -> None:
    for raised, is_unchanged in two_ranks.run(error_at_the_start, error):
        assert "no scale here" in raised
        assert is_unchanged


def first_threshold_out_of_range(rank: int) -> None:
    scaler = Scaler()
    scaler.scale = 2e-38
    _, ddp, _ = training(scaler, threshold=1e-3)
    ddp(inputs(rank, 0)).backward()


def test_a_first_threshold_that_no_scale_allows_is_an_error(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"threshold 0\.001 times 2e-38 is 2e-41, out of the"):
        two_ranks.run(first_threshold_out_of_range)


def rescaled(rank: int, options: dict[str, Any]) -> list[str]:
    _, ddp, state = training(None, **options)
    ddp([100.0 * values for values in inputs(rank, 0)]).backward()
    texts = []
    for factor in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 3e38, 1e42, 1e300):
        before = everything(state)
        try:
            state.rescale(factor)
        except ValueError as error:
            texts.append(str(error))
        assert same(everything(state), before)
    return texts


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=str)
def test_a_factor_out_of_range_changes_nothing(two_ranks: Ranks, options: Any) -> None:
    # The threshold times 3e38 is one, but a residual of 100 overflows.
    options = {**options, "threshold": gw.FixedThreshold(2.0**-10)}
    for texts in two_ranks.run(rescaled, options):
        assert len(texts) == 8
        assert all("factor" in text for text in texts)


def test_a_factor_that_is_no_float32_is_followed(two_ranks: Ranks) -> None:
    assert two_ranks.run(down_and_up) == [True, True]


def down_and_up(rank: int) -> bool:
    _, ddp, state = training(None, threshold=gw.FixedThreshold(2.0**-30))
    ddp(inputs(rank, 0)).backward()
    before = everything(state)
    for factor in (2.0**-90, 2.0**140, 2.0**-50):
        state.rescale(factor)
    return same(everything(state), before)
