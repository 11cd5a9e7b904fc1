"""The DDP hook: the same bits on every rank, and nothing lost, whatever DDP does."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import gradwire as gw  # noqa: E402
from gradwire.torch import (  # noqa: E402
    HookOptions,
    ThresholdState,
    register_threshold_hook,
    threshold_hook,
)
from gradwire.torch.staging import Staging  # noqa: E402

from .linear import BUCKET_CAP_MB, NUMEL, SHAPES, Linear, flat_inputs, inputs  # noqa: E402
from .ranks import RankFailed, Ranks  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 12
THRESHOLD = 2.0**-1
NO_SCALES = [0.0, -1.0, 1e-40, float("nan"), float("inf")]
SMALL = 2  # the place of a parameter whose gradients are small


def residual(state: ThresholdState) -> Any:
    """Return a rank's residuals in the order of the model's parameters, as float64."""
    saved = state.state_dict()["residuals"]["parameters"]
    return torch.cat([saved[f"weights.{place}"]["residual"] for place in range(5)]).double()


class Training:
    """One rank's model, its hook, and plain gradient descent with a learning rate of 1."""

    def __init__(
        self,
        rank: int,
        hook: Any = threshold_hook,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.model = Linear()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_cap_mb)
        options = {
            "threshold": gw.FixedThreshold(THRESHOLD),
            "warmup_steps": 0,
            "parameters": self.model.named_parameters(),
            **options,
        }
        self.state = ThresholdState(**options)
        self.ddp.register_comm_hook(self.state, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.ddp(inputs(self.rank, step)).backward()
        self.optimizer.step()

    @property
    def accounted(self) -> Any:
        """The parameters, which hold half of what both ranks have sent, and this rank's residual."""
        return self.model.flat().double(), residual(self.state)


def train(rank: int, options: dict[str, Any]) -> Any:
    training = Training(rank, **options)
    for step in range(STEPS):
        training.step(step)
    return *training.accounted, training.state.stats


def expected_sum(steps: Any = range(STEPS)) -> Any:
    return sum(flat_inputs(rank, step).double() for rank in (0, 1) for step in steps)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": gw.TargetDensity(0.1, initial=0.5)},
        {"shakeup": gw.ShakeUp(every=3, divisor=2.0)},
        {"warmup_steps": 4},
    ],
    ids=["fixed", "adaptive", "shake-up", "warm-up"],
)
def test_ranks_hold_the_same_bits_and_nothing_is_lost(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    (params, first, stats), (others, second, _) = two_ranks.run(train, options)
    assert torch.equal(params, others)
    assert not torch.equal(first, second)
    assert torch.equal(-2.0 * params + first + second, expected_sum())
    assert stats.dense_steps == options.get("warmup_steps", 0)
    assert stats.steps == STEPS - stats.dense_steps
    assert 0 < stats.message_bytes < stats.steps * gw.max_message_bytes(NUMEL, dense=True)


@pytest.mark.parametrize("budget", [300, 350])
def test_a_budget_is_that_of_all_parameters(two_ranks: Ranks, budget: int) -> None:
    options = {"threshold": gw.TargetBytes(budget), "bucket_cap_mb": 0.0001}
    for *_, stats in two_ranks.run(train, options):
        assert stats.message_bytes <= budget * STEPS
        assert stats.message_bytes > budget * STEPS // 2


def test_a_budget_needs_to_know_all_parameters(two_ranks: Ranks) -> None:
    options = {"threshold": gw.TargetBytes(300), "parameters": None}
    with pytest.raises(RankFailed, match=r"parameters=model\.named_parameters\(\)"):
        two_ranks.run(train, options)
    with pytest.raises(ValueError, match="5 groups, which have at least"):
        ThresholdState(parameters=Linear().named_parameters(), threshold=gw.TargetBytes(100))


def layouts_while_training(rank: int) -> Any:
    """Train, and record the sizes of the parameters in every bucket of every step."""
    layouts: list[list[list[int]]] = []

    def noting_hook(state, bucket):  # without annotations, which DDP would compare with its own
        if bucket.index() == 0:
            layouts.append([])
        layouts[-1].append([parameter.numel() for parameter in bucket.parameters()])
        return threshold_hook(state, bucket)

    training = Training(rank, hook=noting_hook)
    for step in range(4):
        training.step(step)
    return layouts, *training.accounted


def test_rearranged_buckets_keep_the_residual_of_every_parameter(two_ranks: Ranks) -> None:
    (layouts, params, first), (_, _, second) = two_ranks.run(layouts_while_training)
    before, after, *rest = layouts
    assert before != after, "DDP must have rearranged its buckets, else this tests nothing"
    assert len(after) > 1
    assert rest == [after, after]
    assert torch.equal(-2.0 * params + first + second, expected_sum(range(4)))


def train_in_buckets(rank: int, bucket_cap_mb: float) -> Any:
    """Train with thresholds that follow the gradients; those of one parameter are a thousand times as small."""
    training = Training(rank, bucket_cap_mb=bucket_cap_mb, threshold=gw.TargetDensity(0.1, 0.5))
    for step in range(STEPS):
        training.optimizer.zero_grad()
        ours = inputs(rank, step)
        ours[SMALL] /= 1024.0
        training.ddp(ours).backward()
        training.optimizer.step()
    saved = training.state.state_dict()["residuals"]["parameters"]
    thresholds = [saved[f"weights.{place}"]["threshold"] for place in range(5)]
    return [weight.detach() for weight in training.model.weights], thresholds


def test_a_parameter_with_small_gradients_is_sent_beside_others(two_ranks: Ranks) -> None:
    (weights, thresholds), _ = two_ranks.run(train_in_buckets, 100.0)
    assert weights[SMALL].count_nonzero() > 0.5 * weights[SMALL].numel()
    for place, threshold in enumerate(thresholds):
        scale = 1 / 1024 if place == SMALL else 1.0
        assert 0.5 * scale < threshold < 4.0 * scale, f"weights.{place}"


def test_how_ddp_arranges_its_buckets_changes_no_bit(two_ranks: Ranks) -> None:
    (weights, thresholds), _ = two_ranks.run(train_in_buckets, BUCKET_CAP_MB)
    (same, same_thresholds), _ = two_ranks.run(train_in_buckets, 100.0)
    assert thresholds == same_thresholds
    assert all(map(torch.equal, weights, same))


class FailsOnce:
    """A policy of the caller's that raises in the middle of the second step."""

    initial = THRESHOLD
    sample_density = None

    def __init__(self) -> None:
        self.calls = 0

    def next_threshold(self, threshold: float, *_: Any) -> float:
        self.calls += 1
        if self.calls == 8:
            raise ValueError("not now")
        return threshold


def fail_once(rank: int) -> Any:
    training = Training(rank, threshold=FailsOnce())
    training.step(0)
    with pytest.raises(RuntimeError, match="not now"):
        training.step(1)
    return training.accounted


def test_a_step_that_fails_in_the_middle_of_a_bucket_is_taken_back(two_ranks: Ranks) -> None:
    (params, first), (_, second) = two_ranks.run(fail_once)
    assert torch.equal(-2.0 * params + first + second, expected_sum([0]))


def interrupt_once(rank: int) -> Any:
    training = Training(rank)
    training.step(0)

    def interrupt(_: Any) -> None:
        raise MemoryError

    training.model.weights[3].register_hook(interrupt)  # the last of a backward pass
    with pytest.raises(MemoryError):
        training.step(1)
    training.state._worker.submit(int).result()  # the buckets before are encoded
    return training.accounted


def test_a_checkpoint_after_an_interrupted_step_lacks_nothing(two_ranks: Ranks) -> None:
    (params, first), (_, second) = two_ranks.run(interrupt_once)
    sizes = [math.prod(shape) for shape in SHAPES]
    added = (-2.0 * params + first + second - expected_sum([0])).split(sizes)
    whole = expected_sum([1]).split(sizes)
    is_whole = [torch.equal(*pair) for pair in zip(added, whole, strict=True)]
    assert any(is_whole)
    assert not any(part.any() for part, is_one in zip(added, is_whole, strict=True) if not is_one)


def share_once(rank: int) -> Any:
    training = Training(rank, threshold=gw.TargetDensity(0.1))
    training.step(0)
    return training.model.flat()


def test_the_first_message_has_the_density_aimed_at(two_ranks: Ranks) -> None:
    params, _ = two_ranks.run(share_once)
    # Two ranks send different elements.
    assert 0.15 < params.count_nonzero() / params.numel() < 0.22


def densities(rank: int, options: dict[str, Any]) -> Any:
    training = Training(rank, threshold=gw.TargetDensity(0.02), **options)
    training.step(0)
    return [weight.count_nonzero() / weight.numel() for weight in training.model.weights]


def test_smaller_parameters_are_sent_more_densely(two_ranks: Ranks) -> None:
    # Two ranks send different elements: 0.02 each of the largest, 0.08 of a parameter 14 times as small.
    found, _ = two_ranks.run(densities, {})
    assert found[2] == pytest.approx(0.04, abs=0.01)
    assert found[4] == pytest.approx(0.152, abs=0.04)


def accumulate(rank: int) -> Any:
    training = Training(rank)
    for first in range(0, STEPS, 3):
        training.optimizer.zero_grad()
        with training.ddp.no_sync():
            training.ddp(inputs(rank, first)).backward()
            training.ddp(inputs(rank, first + 1)).backward()
        training.ddp(inputs(rank, first + 2)).backward()
        training.optimizer.step()
    return *training.accounted, training.state.stats.steps


def test_gradients_accumulated_without_sync_are_sent_with_the_next(two_ranks: Ranks) -> None:
    (params, first, steps), (others, second, _) = two_ranks.run(accumulate)
    assert steps == STEPS // 3
    assert torch.equal(params, others)
    assert torch.equal(-2.0 * params + first + second, expected_sum())


def with_static_graph(rank: int, registers: bool) -> Any:
    """Train a model of two dtypes, and go on from its checkpoint in a new DDP."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6).double())
    model[0].register_forward_hook(lambda _module, _inputs, output: output.double())
    saved = None
    for _start in range(2):
        ddp = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=0.0001)
        if registers:
            state = register_threshold_hook(ddp, threshold=0.01)
        else:
            state = ThresholdState(parameters=model.named_parameters(), warmup_steps=0)
            ddp.register_comm_hook(state, threshold_hook)
        if saved is not None:
            state.load_state_dict(saved)
        for step in range(4):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * rank + step))
            ddp(inputs).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
        saved = state.state_dict()
    return torch.cat([param.detach().flatten().double() for param in model.parameters()])


def test_a_first_step_whose_buckets_have_no_numbers_is_averaged_uncompressed(
    two_ranks: Ranks,
) -> None:
    params, others = two_ranks.run(with_static_graph, True)
    assert torch.equal(params, others)
    with pytest.raises(RankFailed, match="register the hook by register_threshold_hook"):
        two_ranks.run(with_static_graph, False)


def with_sparse_gradients(_rank: int) -> None:
    ddp = DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))
    register_threshold_hook(ddp)
    ddp(torch.tensor([1, 3])).sum().backward()


def test_sparse_gradients_are_refused_in_the_first_step(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="the hook takes no sparse gradients"):
        two_ranks.run(with_sparse_gradients)


def infinite_in_the_middle(rank: int, place: int, with_it: bool) -> Any:
    """Train with or without a step whose gradient is infinite on rank 1 and large on both."""
    training = Training(rank)
    for step in range(3):
        training.step(step)
    grads = []
    if with_it:
        spoiled = [8.0 * one for one in inputs(rank, 99)]
        if rank == 1:
            spoiled[place].view(-1)[4] = float("inf")
        training.optimizer.zero_grad()
        training.ddp(spoiled).backward()
        grads = [bool(torch.isnan(weight.grad).all()) for weight in training.model.weights]
    for step in range(3, STEPS):
        training.step(step)
    return *training.accounted, grads, training.state.stats.skipped_steps


@pytest.mark.parametrize("place", range(5))
def test_a_step_that_is_not_finite_on_one_rank_leaves_no_trace_on_any(
    two_ranks: Ranks, place: int
) -> None:
    with_it = two_ranks.run(infinite_in_the_middle, place, True)
    without = two_ranks.run(infinite_in_the_middle, place, False)
    for (params, left, grads, skipped), (same_params, same_left, _, none) in zip(
        with_it, without, strict=True
    ):
        assert all(grads)
        assert (skipped, none) == (1, 0)
        assert torch.equal(params, same_params)
        assert torch.equal(left, same_left)


def train_with_scaler(rank: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    training = Training(rank, scaler=scaler)
    scales = []
    for step in range(STEPS):
        values = inputs(rank, step)
        if step == 6 and rank == 0:
            values[1][3] = float("inf")
        training.optimizer.zero_grad()
        scaler.scale(training.ddp(values)).backward()
        scaler.step(training.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    params, left = training.accounted
    return params, left / training.state.state_dict()["scale"], scales


def test_a_changed_loss_scale_rescales_the_residuals(two_ranks: Ranks) -> None:
    (params, first, scales), (others, second, same) = two_ranks.run(train_with_scaler)
    assert scales == same
    changes = {after / before for before, after in itertools.pairwise(scales)}
    assert changes == {0.5, 1.0, 2.0}, (
        "the scale must both grow and shrink, else this tests nothing"
    )
    assert torch.equal(params, others)
    finite = [step for step in range(STEPS) if step != 6]
    assert torch.equal(-2.0 * params + first + second, expected_sum(finite))


WRAPPERS = {
    "float16": default_hooks.fp16_compress_wrapper,
    "bfloat16": default_hooks.bf16_compress_wrapper,
}


def train_in_half_precision(rank: int, dtype: str) -> Any:
    model = Linear()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    state = ThresholdState(
        threshold=gw.FixedThreshold(THRESHOLD),
        warmup_steps=0,
        parameters=model.named_parameters(),
    )
    # Not by register_comm_hook, which refuses bfloat16 without NCCL.
    dist._register_comm_hook(ddp.reducer, state, WRAPPERS[dtype](threshold_hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(inputs(rank, step)).backward()
        optimizer.step()
    return model.flat().double(), residual(state)


@pytest.mark.parametrize("dtype", WRAPPERS)
def test_the_wrappers_for_half_precision_accept_the_hook(two_ranks: Ranks, dtype: str) -> None:
    (params, first), (others, second) = two_ranks.run(train_in_half_precision, dtype)
    assert torch.equal(params, others)
    rounded = [
        flat_inputs(rank, step).to(getattr(torch, dtype)).double()
        for rank in (0, 1)
        for step in range(STEPS)
    ]
    assert torch.equal(-2.0 * params + first + second, sum(rounded))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_models_of_other_dtypes_are_trained(two_ranks: Ranks, dtype: str) -> None:
    (params, _), (others, _) = two_ranks.run(train_model_of, dtype)
    assert params.abs().max() > 0.0
    assert torch.equal(params, others)


def train_model_of(rank: int, dtype: str) -> Any:
    model = Linear(getattr(torch, dtype))
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    state = register_threshold_hook(ddp, threshold=0.5, warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(inputs(rank, step)).backward()
        optimizer.step()
    return model.flat(), residual(state)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def train_again_from_a_checkpoint(rank: int, interrupt: bool, options: dict[str, Any]) -> Any:
    """Train, and in the middle go on with a new DDP and a new state, which has other buckets."""
    training = Training(rank, **options)
    for step in range(STEPS):
        if interrupt and step == STEPS // 2:
            saved = pickle.loads(pickle.dumps(training.state.state_dict()))
            weights = training.model.state_dict()
            bucket_cap_mb = 100 if "parameters" not in options else BUCKET_CAP_MB
            training = Training(rank, bucket_cap_mb=bucket_cap_mb, **options)
            training.model.load_state_dict(weights)
            training.state.load_state_dict(saved)
        training.step(step)
    return (
        training.accounted if "parameters" not in options else (training.model.flat(), NO_RESIDUAL)
    )


NO_RESIDUAL = torch.zeros(1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.5},
        {"threshold": None},
        {"threshold": None, "momentum": 0.5, "warmup_steps": 2},
        {"threshold": None, "parameters": None},
        {"threshold": None, "parameters": None, "warmup_steps": 1},
        {"threshold": gw.AdaptiveThreshold(initial=0.5)},
        {"threshold": gw.StepThreshold(initial=0.5, delay=3), "shakeup": gw.ShakeUp(every=4)},
        {"threshold": gw.TargetBytes(300), "clip": gw.ResidualClip(1.0, every=3)},
    ],
    ids=str,
)
def test_a_checkpoint_continues_where_it_stopped(two_ranks: Ranks, options: dict[str, Any]) -> None:
    straight = two_ranks.run(train_again_from_a_checkpoint, False, options)
    again = two_ranks.run(train_again_from_a_checkpoint, True, options)
    for (params, left), (same_params, same_left) in zip(straight, again, strict=True):
        assert torch.equal(params, same_params)
        assert torch.equal(left, same_left)


def train_on_with_a_copy(rank: int, how: str, options: dict[str, Any]) -> Any:
    """Train, and in the middle go on with a copy of the hook's state, as torch's tutorial does."""
    training = Training(rank, threshold=None, momentum=0.5, **options)
    for step in range(STEPS):
        if how and step == STEPS // 2:
            old = training
            training = Training(rank, **options)
            training.model.load_state_dict(old.model.state_dict())
            if how == "deepcopy":
                training.state = copy.deepcopy(old.state)
            else:
                pickled = pickle.dumps(pickle.loads(pickle.dumps(old.state)))
                training.state = pickle.loads(pickled)
            old.step(step)  # has no part in the copy
            training.ddp = DistributedDataParallel(training.model, bucket_cap_mb=0.002)
            training.ddp.register_comm_hook(training.state, threshold_hook)
        training.step(step)
    left = training.state.state_dict()["residuals"]["parameters"]
    return training.model.flat(), [left[name]["residual"] for name in sorted(left)]


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("options", [{}, {"parameters": None, "warmup_steps": 1}], ids=str)
def test_a_copy_of_the_state_goes_on_where_the_original_was(
    two_ranks: Ranks, how: str, options: dict[str, Any]
) -> None:
    straight = two_ranks.run(train_on_with_a_copy, "", options)
    again = two_ranks.run(train_on_with_a_copy, how, options)
    for (params, left), (same_params, same_left) in zip(straight, again, strict=True):
        assert torch.equal(params, same_params)
        assert all(map(torch.equal, left, same_left))


def test_a_copy_of_the_state_knows_its_parameters() -> None:
    state = ThresholdState(parameters=Linear().named_parameters(), threshold=0.5)
    copied = pickle.loads(pickle.dumps(state))
    assert copied.threshold == gw.FixedThreshold(0.5) or copied.threshold == 0.5
    *others, last = Linear().parameters()
    copied._parameters.add_bucket([last])
    assert copied._parameters._names[last] == "weights.4"
    with pytest.raises(ValueError, match=r"30 elements, where this state knows weights\.3 of 50"):
        copied._parameters.add_bucket([others[1]])


@pytest.mark.parametrize(
    "thing",
    [
        gw.FixedThreshold(0.5),
        gw.AdaptiveThreshold(),
        gw.StepThreshold(),
        gw.TargetDensity(0.1),
        gw.TargetBytes(3000),
        gw.ShakeUp(),
        gw.ResidualClip(),
        gw.transport.Limits(),
        ThresholdState().stats,
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_options_and_figures_are_pickled_and_copied(thing: Any) -> None:
    assert pickle.loads(pickle.dumps(thing)) == thing
    assert copy.deepcopy(thing) == thing


def state_of(rank: int) -> dict[str, Any]:
    training = Training(rank)
    training.step(0)
    return training.state.state_dict()


def test_a_checkpoint_is_plain_tensors_and_numbers(two_ranks: Ranks) -> None:
    saved, _ = two_ranks.run(state_of)
    assert saved["step"] == 1
    weights = saved["residuals"]["parameters"]
    assert sorted(weights) == [f"weights.{place}" for place in range(5)]
    assert all(one["residual"].dtype == torch.float32 for one in weights.values())
    state = ThresholdState(parameters=Linear().named_parameters())
    state.load_state_dict(saved)
    assert state.step == 1
    np.testing.assert_array_equal(
        state.state_dict()["residuals"]["parameters"]["weights.1"]["residual"],
        weights["weights.1"]["residual"],
    )


def load_another_models(rank: int, options: dict[str, Any]) -> None:
    training = Training(rank, **options)
    saved = training.state.state_dict()
    saved["residuals"]["parameters"]["head.weight"] = copy.deepcopy(
        state_of(rank)["residuals"]["parameters"]["weights.0"]
    )
    training.state.load_state_dict(saved)
    training.step(1)


@pytest.mark.parametrize("options", [{}, {"parameters": None}], ids=["named", "counted"])
def test_a_checkpoint_of_another_model_is_refused(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    with pytest.raises(RankFailed, match=r"that this model does not have: head\.weight"):
        two_ranks.run(load_another_models, options)


def train_with_counted_parameters(rank: int, interrupt: bool) -> Any:
    training = Training(rank, parameters=None)
    for step in range(STEPS):
        if interrupt and step == STEPS // 2:
            model, saved = training.model.state_dict(), training.state.state_dict()
            training = Training(rank, parameters=None)
            training.model.load_state_dict(model)
            training.state.load_state_dict(saved)
        training.step(step)
    return training.model.flat()


def test_without_names_parameters_are_counted_and_a_checkpoint_continues(two_ranks: Ranks) -> None:
    straight = two_ranks.run(train_with_counted_parameters, False)
    again = two_ranks.run(train_with_counted_parameters, True)
    assert all(torch.equal(*pair) for pair in zip(straight, again, strict=True))


def step_apart(rank: int) -> None:
    training = Training(rank)
    training.step(0)
    saved = training.state.state_dict()
    training.state.load_state_dict({**saved, "step": 5 + rank})
    training.step(1)


def test_ranks_at_different_steps_raise(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 sent bucket 0 of step 6, this rank is at .* 5"):
        two_ranks.run(step_apart)


def test_a_state_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 7"):
        ThresholdState(parameters=()).load_state_dict({"format": 7})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *(({"scale": scale}, f"scale is {scale}, must be") for scale in NO_SCALES),
        ({"scale": "1"}, "scale must be a number, got '1'"),
        ({"step": -1}, "step must be 0 to .* got -1"),
        ({"step": 1.5}, r"step must be an int, got 1\.5"),
        ({"residuals": {"format": 7}}, "format 7"),
        ({"threshold": 0.0}, r"parameter weights\.1 is not that of a hook.*got 0\.0"),
        ({"step of it": -1}, r"parameter weights\.1 is not that of a hook.*got -1"),
        ({"sizes": (3, 3)}, r"parameter weights\.1 is not .*elements of at most 3 of 3"),
        ({"velocity": torch.zeros(3)}, r"parameter weights\.1 is not .*a velocity of 3 elements"),
        ({"residual": torch.tensor([float("nan")])}, r"weights\.1 is not .*are not finite"),
        ({"residual": None}, r"parameter weights\.1 is not that of a hook"),
        (
            {"residual": torch.zeros(2)},
            r"weights\.1 has 2 elements, the parameter has \d+: .* model",
        ),
        ({"residual": torch.zeros(2, dtype=torch.int32)}, "residual is int32, must be float32 or"),
        ({"residual": torch.zeros(2, device="meta")}, r"weights\.1 is not that of a hook"),
        (
            {"velocity": torch.zeros(SHAPES[1], dtype=torch.float16).ravel()},
            r"weights\.1 is not .*a velocity of torch\.float16 for a residual of float32",
        ),
        (
            {"velocity": torch.zeros(SHAPES[1]).ravel()},
            r"has momentum for parameter weights\.1, this state was made",
        ),
        ({"parameters": None}, "must have a dict of parameters, has None"),
        ({"weights.1": torch.zeros(3)}, r"weights\.1 is not .*it must be a dict, is tensor"),
    ],
    ids=str,
)
def test_a_state_that_cannot_be_used_is_refused_as_a_whole(
    two_ranks: Ranks, change: dict[str, Any], complaint: str
) -> None:
    good, _ = two_ranks.run(state_of)
    state = ThresholdState(parameters=Linear().named_parameters())
    state.load_state_dict(good)
    before = repr(state.state_dict())
    wrong = {**copy.deepcopy(good), "step": 9, "scale": 9.0}
    residuals = wrong["residuals"]
    of_parameter = residuals["parameters"]["weights.1"]
    for key, value in change.items():
        holders = (wrong, residuals, residuals["parameters"])
        holder = next((each for each in holders if key in each), of_parameter)
        holder[key.removesuffix(" of it")] = value
    with pytest.raises((TypeError, ValueError), match=complaint):
        state.load_state_dict(wrong)
    with pytest.raises(ValueError, match="state lacks residuals, scale, step"):
        state.load_state_dict({"format": 1})
    assert repr(state.state_dict()) == before


def refusals(_: int) -> list[str]:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, _: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param.data -= 0.1 * param.grad.sign()

    ddp = DistributedDataParallel(Linear())
    texts = []
    for make in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, Signs):
        try:
            register_threshold_hook(ddp, optimizer=make(ddp.parameters()))
        except ValueError as error:
            texts.append(f"{make.__name__}: {error}")
    return texts


def test_adaptive_optimisers_are_refused_with_the_reason_and_the_way_out(two_ranks: Ranks) -> None:
    texts, _ = two_ranks.run(refusals)
    names = [text.split(": ")[0] for text in texts]
    assert names == ["AdamW", "RMSprop", "Adagrad", "Signs"]
    for text in texts:
        assert "divides by the size of its gradients" in text
        assert "gradwire.torch.share(model, optimizer)" in text


# ---- registration with DDP -------------------------------------------------------------------------------------------


def register_as_lightning_does(rank: int) -> Any:
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook

    model = Linear()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    _register_ddp_comm_hook(
        ddp,
        ddp_comm_state=ThresholdState(
            threshold=0.5, warmup_steps=0, parameters=model.named_parameters()
        ),
        ddp_comm_hook=threshold_hook,
        ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
    )
    ddp(inputs(rank, 0)).backward()
    return torch.cat([weight.grad.flatten() for weight in model.weights])


def test_lightning_registers_the_hook(two_ranks: Ranks) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    first, second = two_ranks.run(register_as_lightning_does)
    assert torch.equal(first, second)
    assert set(first.tolist()) <= {-0.5, -0.25, 0.0, 0.25, 0.5}


def register_as_with_accelerate(rank: int) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Linear()
    ddp = accelerator.prepare(model)
    register_threshold_hook(ddp, threshold=0.5, warmup_steps=0)
    accelerator.backward(ddp(inputs(rank, 0)))
    return torch.cat([weight.grad.flatten() for weight in model.weights])


def test_a_model_prepared_by_accelerate_takes_the_hook(two_ranks: Ranks) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    first, second = two_ranks.run(register_as_with_accelerate)
    assert torch.equal(first, second)
    assert set(first.tolist()) <= {-0.5, -0.25, 0.0, 0.25, 0.5}


def test_frameworks_can_log_the_name_of_the_hook() -> None:
    assert threshold_hook.__qualname__ == "threshold_hook"
    assert threshold_hook.__module__ == "gradwire.torch.hook"


def test_float32_gradients_in_host_memory_are_not_copied() -> None:
    gradient = torch.zeros(10)
    staging = Staging(gradient)
    assert staging.fetch().data_ptr() == gradient.data_ptr() == staging.store().data_ptr()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"warmup_steps": "1"}, "warmup_steps must be an int, got '1'"),
        ({"momentum": "0.9"}, "momentum must be a number, got '0.9'"),
        ({"scaler": 5}, "scaler must be a GradScaler or None, got 5"),
        ({"scaler": torch.amp.GradScaler}, "scaler must be a GradScaler or None, got <class"),
        ({"factor_masking": "no"}, "factor_masking must be True or False, got 'no'"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_by_name(options: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        ThresholdState(parameters=(), **options)
    with pytest.raises(TypeError, match="factor must be a number, got None"):
        ThresholdState(parameters=()).rescale(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"warmup_steps": -1}, {"backend": "x"}, {"momentum": 1.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ThresholdState(parameters=(), **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threads": 0}, ValueError),
        ({"threshold": "0.1"}, TypeError),
        ({"shakeup": 5}, TypeError),
        ({"clip": 5.0}, TypeError),
    ],
)
def test_a_state_refuses_options_of_its_encoders_before_training(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(options))):
        ThresholdState(parameters=(), **options)


def test_the_options_of_the_hook_are_those_of_its_state() -> None:
    own = ("process_group", "parameters", "_")
    declared = {
        name: kind for name, kind in ThresholdState.__annotations__.items() if name not in own
    }
    assert HookOptions.__annotations__ == declared


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        register_threshold_hook(torch.nn.Linear(2, 1))  # type: ignore[arg-type]
