"""Policies against sequences worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.policy import (
    AdaptiveThreshold,
    FixedThreshold,
    PolicyState,
    ResidualClip,
    SampledQuantiles,
    ShakeUp,
    StepThreshold,
    Supply,
    TargetDensity,
    ThresholdPolicy,
    begin,
    default_policy,
    follow,
    learned_threshold,
    most_changed,
    nodes_budget,
    owners_density,
    owners_policy,
    policy_for_tensor,
    round_threshold,
    sampled_density,
)

EVERY_POLICY: list[ThresholdPolicy] = [
    FixedThreshold(1e-3),
    AdaptiveThreshold(),
    StepThreshold(),
    TargetDensity(),
]


def bfloat16(bits: int) -> float:
    """Return the value of bfloat16 bits."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def nearest_bfloat16(value: float) -> float | None:
    """Return the nearest bfloat16 by exact arithmetic and search, None for zero and infinity."""
    low, high = 0, 0x7F80
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bfloat16(middle) <= value else (low, middle)
    above = Fraction(2) ** 128 if high == 0x7F80 else Fraction(bfloat16(high))
    to_low, to_high = Fraction(value) - Fraction(bfloat16(low)), above - Fraction(value)
    bits = low if to_low < to_high or (to_low == to_high and low % 2 == 0) else high
    return None if bits in (0, 0x7F80) else bfloat16(bits)


@given(st.floats(min_value=0.0, exclude_min=True, allow_infinity=False))
@example(1.0 + 2.0**-8)
@example(1.0 + 3 * 2.0**-8)
@example((1.0 + 2.0**-8) * (1 + 2.0**-50))  # a detour through float32 would round this down
@example(2.0**-134)
@example(2.0**-134 * 1.0000001)
@example(3 * 2.0**-134)
@example(255.0 * 2.0**120)
@example(255.5 * 2.0**120)
@example(5e-324)
def test_a_threshold_is_rounded_once_to_the_nearest_bfloat16(value: float) -> None:
    expected = nearest_bfloat16(value)
    if expected is None:
        with pytest.raises(ValueError, match="rounds to zero or infinity"):
            round_threshold(value)
    else:
        assert round_threshold(value) == expected
        assert round_threshold(expected) == expected


@pytest.mark.parametrize("value", [0.0, -0.0, -1e-3, math.inf, -math.inf, math.nan])
def test_wrong_thresholds_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        round_threshold(value)
    with pytest.raises(ValueError, match="positive and finite"):
        FixedThreshold(value)


def test_fixed_threshold_stays() -> None:
    policy = FixedThreshold(0.3)
    assert policy.initial == 0.3
    assert policy.next_threshold(0.3, 1.0, 99, None) == 0.3


def test_adaptive_threshold_decays_below_its_band_and_rises_above_it() -> None:
    policy = AdaptiveThreshold(
        initial=1.0, density_min=0.25, density_max=0.5, decay=0.5, minimum=0.2
    )
    threshold = policy.initial
    seen = []
    for density in (0.1, 0.25, 0.5, 0.51, 0.9, 0.0, 0.0, 0.0, 0.0, 0.3):
        threshold = policy.next_threshold(threshold, density, 1, None)
        seen.append(threshold)
    assert seen == [0.5, 0.5, 0.5, 1.0, 2.0, 1.0, 0.5, 0.25, 0.2, 0.2]


def test_adaptive_threshold_never_rises_to_where_it_cannot_be_rounded() -> None:
    policy = AdaptiveThreshold(initial=3e38, decay=0.5)
    top = policy.next_threshold(3e38, 1.0, 1, None)
    assert round_threshold(top) == top == policy.next_threshold(top, 1.0, 1, None)


def test_twenty_decays_halve_the_default_adaptive_threshold() -> None:
    policy = AdaptiveThreshold()
    threshold = policy.initial
    for _ in range(20):
        threshold = policy.next_threshold(threshold, 0.0, 1, None)
    assert threshold == pytest.approx(policy.initial / 2, rel=1e-12)


def test_step_threshold_steps_down_after_its_delay_until_its_minimum() -> None:
    policy = StepThreshold(initial=1.0, minimum=0.5, step=0.25, trigger=0.1, delay=3)
    threshold, changed_at = policy.initial, 0
    seen = []
    for step in range(12):
        following = policy.next_threshold(threshold, 0.05, step + 1 - changed_at, None)
        if following != threshold:
            threshold, changed_at = following, step + 1
        seen.append(threshold)
    assert seen == [1.0, 1.0, 0.75, 0.75, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_step_threshold_waits_while_enough_is_sent() -> None:
    policy = StepThreshold(initial=1.0, minimum=0.5, step=0.25, trigger=0.1, delay=3)
    assert policy.next_threshold(1.0, 0.1, 99, None) == 1.0
    assert policy.next_threshold(1.0, 0.0999, 2, None) == 1.0
    assert policy.next_threshold(0.7, 0.0, 99, None) == 0.7


@pytest.mark.parametrize(
    ("quantiles", "expected"),
    [
        (SampledQuantiles(now=0.5, shuffled=0.5, next=0.25, same=2.0, agreement=0.5), 0.25),
        (SampledQuantiles(now=0.75, shuffled=0.5, next=0.25, same=2.0, agreement=0.5), 0.5),
        (SampledQuantiles(now=0.0, shuffled=0.5, next=0.5, same=2.0, agreement=0.5), 0.125),
        (SampledQuantiles(now=0.5, shuffled=0.25, next=0.0, same=2.0, agreement=0.5), 8.0),
        (SampledQuantiles(now=1e-12, shuffled=0.0, next=1e-12, same=2.0, agreement=0.5), 1e-8),
        (SampledQuantiles(now=0.5, shuffled=0.5, next=0.5, same=2.0, agreement=1.0), 2.0),
        (SampledQuantiles(now=0.5, shuffled=0.5, next=0.5, same=2.0, agreement=0.0), 0.5),
        (None, 8.0),
    ],
)
def test_target_density_predicts_from_the_sampled_quantiles(
    quantiles: SampledQuantiles | None, expected: float
) -> None:
    policy = TargetDensity()
    assert policy.next_threshold(8.0, 0.5, 1, quantiles) == expected
    assert policy.sample_density == 0.01


def test_a_target_density_goes_below_repeated_sums_of_which_nothing_was_sent() -> None:
    policy = TargetDensity()
    repeated = SampledQuantiles(now=1.0, shuffled=1.0, next=1.0, same=2.0, agreement=1.0)
    assert policy.next_threshold(1.5, 0.0, 1, repeated) == 2.0 * 31 / 32
    assert policy.next_threshold(1.5, 1e-6, 1, repeated) == 2.0
    changing = repeated._replace(agreement=0.98)
    assert policy.next_threshold(1.5, 0.0, 1, changing) == policy.next_threshold(
        1.5, 1.0, 1, changing
    )


def test_a_target_density_learns_its_first_threshold_and_then_expects_the_same_update() -> None:
    policy = TargetDensity(0.1)
    threshold, state = begin(policy)
    nothing = SampledQuantiles(now=0.0, shuffled=0.0, next=0.0, same=0.0, agreement=0.5)
    assert sampled_density(policy, 0, state) == 0.1
    assert follow(policy, threshold, 0.0, 0, nothing, state) == (threshold, state)
    assert sampled_density(policy, 99, state) == 0.1  # still to be learned
    seen = nothing._replace(now=0.25, next=0.3, same=0.5)
    assert learned_threshold(policy, threshold, nothing) == threshold
    learned = learned_threshold(policy, threshold, seen)
    assert learned == 0.25
    after, state = follow(policy, learned, 0.1, 0, seen, state)
    assert after == 0.5
    assert state.trend > 0.0
    assert begin(TargetDensity(0.1, initial=0.7)) == (0.7, state)


def test_a_target_density_samples_a_few_steps_and_where_the_density_stays_away() -> None:
    policy = TargetDensity(0.1)
    threshold, state = 1.0, begin(TargetDensity(0.1, initial=1.0))[1]
    sampled = []
    for age in range(40):
        sampled.append(sampled_density(policy, age, state) > 0.0)
        density = 0.1 if age < 20 else 0.05
        threshold, state = follow(policy, threshold, density, age, None, state)
    assert sampled[:20] == [True] * 10 + [False] * 10
    assert sampled[20:36] == [False] * 16
    assert sampled[36:] == [True] * 4


def test_a_target_density_does_not_sample_because_single_steps_swing() -> None:
    policy = TargetDensity(0.01)
    threshold, state = 1.0, PolicyState(trend=0.0)
    rng = random.Random(52)
    sampled, densities = 0, []
    for age in range(100, 1_100):
        sampled += sampled_density(policy, age, state) > 0.0
        # A batch's updates are 0.8 to 1.25 times as large, and the density follows steeply.
        densities.append(0.01 * (rng.uniform(0.8, 1.25) / threshold) ** 3)
        threshold, state = follow(policy, threshold, densities[-1], age, None, state)
    assert sampled <= 10
    assert sum(densities) / 1_000 == pytest.approx(0.01, rel=0.05)


def test_corrections_of_a_high_density_leave_the_threshold_positive() -> None:
    policy = TargetDensity(0.5)
    after, _ = follow(policy, 1.0, 0.0, 99, None, PolicyState(trend=0.0, deviation=-4.0))
    assert after == 0.8


@pytest.mark.parametrize(("density", "falls"), [(0.05, True), (0.2, False)])
def test_a_late_sample_moves_the_threshold_only_towards_the_target(
    density: float, falls: bool
) -> None:
    policy = TargetDensity(0.1)
    state = PolicyState(trend=0.0, deviation=-2.0 if falls else 2.0)
    corrected = pytest.approx(0.885 if falls else 1.14)
    for predicted in (0.5, 2.0):
        quantiles = SampledQuantiles(
            now=predicted, shuffled=predicted, next=predicted, same=1.0, agreement=0.5
        )
        after, _ = follow(policy, 1.0, density, 50, quantiles, state)
        assert after == (predicted if (predicted < 1.0) == falls else corrected)


def test_a_target_that_cannot_be_met_leaves_the_threshold_to_the_samples() -> None:
    policy = TargetDensity(0.1)
    short = SampledQuantiles(0.01, 0.01, 0.01, 0.01, 0.5, moving=0.02, floor=0.25)
    after, state = follow(policy, 0.1, 0.02, 20, short, PolicyState(0.5, -4.0))
    assert (after, state) == (0.25, PolicyState(0.5, 0.0, Supply.SHORT))
    for age in range(21, 24):  # few are sent whatever the threshold
        assert not policy.samples(age, state)
        assert follow(policy, after, 0.02, age, None, state) == (after, state)
    assert policy.samples(24, state)
    _, state = follow(policy, after, 0.6, 25, None, state)  # many elements move again
    assert policy.samples(26, state)
    enough = SampledQuantiles(2.0, 2.0, 2.0, 2.0, 0.5)
    after, state = follow(policy, after, 0.6, 26, enough, state)
    assert (after, state.supply) == (2.0, Supply.ENOUGH)


def test_where_few_elements_move_the_counts_are_followed_and_samples_go_on() -> None:
    policy = TargetDensity(0.1)
    few = SampledQuantiles(2.0, 2.0, 2.0, 2.0, 0.5, moving=0.3)
    after, state = follow(policy, 1.0, 0.1, 16, few, PolicyState(0.0, 0.0, Supply.FEW))
    assert (after, state) == (1.0, PolicyState(0.0, 0.0, Supply.FEW))
    assert [age for age in range(16, 40) if policy.samples(age, state)] == [16, 24, 32]


def test_nothing_that_moves_keeps_the_threshold() -> None:
    policy = TargetDensity(0.1)
    nothing = SampledQuantiles(0.0, 0.0, 0.0, 0.0, 0.5, moving=0.0)
    threshold, state = 1.0, PolicyState(0.5)
    for age in range(60):
        quantiles = nothing if policy.samples(age, state) else None
        threshold, state = follow(policy, threshold, 0.0, age, quantiles, state)
    assert threshold == 1.0


def test_the_first_threshold_is_the_floor_where_the_target_cannot_be_met() -> None:
    short = SampledQuantiles(0.01, 0.01, 0.01, 0.01, 0.5, moving=0.02, floor=0.25)
    assert learned_threshold(TargetDensity(0.1), 1.0, short) == 0.25


def test_only_target_density_asks_for_a_sample() -> None:
    asking = [type(p).__name__ for p in EVERY_POLICY if p.sample_density is not None]
    assert asking == ["TargetDensity"]


def test_shake_ups_and_clips_are_due_at_the_end_of_every_period() -> None:
    assert [s for s in range(10) if ShakeUp(every=3).is_due(s)] == [2, 5, 8]
    assert [s for s in range(10) if ResidualClip(every=5).is_due(s)] == [4, 9]
    assert all(ShakeUp(every=1).is_due(s) for s in range(5))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: AdaptiveThreshold(initial=0.0), "positive"),
        (lambda: AdaptiveThreshold(minimum=1.0), "minimum"),
        (lambda: AdaptiveThreshold(density_min=0.5, density_max=0.1), "density_min"),
        (lambda: AdaptiveThreshold(density_max=1.5), "density_max"),
        (lambda: AdaptiveThreshold(density_min=math.nan), "density_min"),
        (lambda: AdaptiveThreshold(decay=1.0), "decay"),
        (lambda: AdaptiveThreshold(decay=0.0), "decay"),
        (lambda: StepThreshold(step=0.0), "step"),
        (lambda: StepThreshold(step=math.inf), "step"),
        (lambda: StepThreshold(trigger=5.0), "trigger"),
        (lambda: StepThreshold(delay=-1), "delay"),
        (lambda: StepThreshold(minimum=0.1), "minimum"),
        (lambda: TargetDensity(density=0.0), "density"),
        (lambda: TargetDensity(density=1.0), "density"),
        (lambda: TargetDensity(initial=1e-9), "minimum"),
        (lambda: ShakeUp(every=0), "every"),
        (lambda: ShakeUp(every=True), "every"),
        (lambda: ShakeUp(divisor=0.5), "divisor"),
        (lambda: ShakeUp(divisor=math.nan), "divisor"),
        (lambda: ResidualClip(limit=0.9), "limit"),
        (lambda: ResidualClip(limit=math.inf), "limit"),
        (lambda: ResidualClip(every=0), "every"),
    ],
)
def test_values_out_of_range_are_refused_by_name(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize("policy", [*EVERY_POLICY, ShakeUp(), ResidualClip()])
def test_policies_are_frozen_comparable_and_hashable(policy: object) -> None:
    assert dataclasses.is_dataclass(policy)
    name = dataclasses.fields(policy)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, 1.0)
    assert not isinstance(policy, type)
    copy = dataclasses.replace(policy)
    assert copy == policy
    assert hash(copy) == hash(policy)


# ---- the default densities -------------------------------------------------------------------------------------------

ROWS = 1_000  # of the model of these tests, which has ROWS x 500 elements: half the root of two million


def of_encoder() -> Any:
    return gw.Encoder(ROWS * 500)


def of_groups(*, is_adaptive: bool) -> Any:
    [encoder] = gw.Groups.of([np.zeros((ROWS, 500))], is_adaptive=is_adaptive).encoders
    return encoder


def of_share() -> Any:
    return encoder_of(gw.share(np.zeros((ROWS, 500), np.float32)).exchange)


def of_torch_share(*, is_adaptive: bool) -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    import gradwire.torch

    model, optimizer = torch_model(is_adaptive=is_adaptive)
    return encoder_of(gradwire.torch.share(model, optimizer).exchange)


def of_hook() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    import gradwire.torch

    model, _ = torch_model(is_adaptive=False)
    state = gradwire.torch.ThresholdState(parameters=model.named_parameters())
    [parameter] = state._parameters.of_bucket([model.weight], model.weight.dtype)
    return parameter.encoder


def of_spark(*, is_adaptive: bool) -> Any:
    for name in ("torch", "pyarrow", "fsspec"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from gradwire.spark import SharedTraining
    from gradwire.spark.train import SharedTrainer

    _, optimizer = torch_model(is_adaptive=is_adaptive)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        return encoder_of(SharedTrainer(SharedTraining(), optimizer, node, ("", 0, 1), 1).exchange)


def encoder_of(exchange: Any) -> Any:
    [encoder] = exchange._groups.encoders
    return encoder


def torch_model(*, is_adaptive: bool) -> Any:
    import torch

    model = torch.nn.Linear(500, ROWS, bias=False)
    kind = torch.optim.AdamW if is_adaptive else torch.optim.SGD
    return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "encoder_for",
    [
        of_encoder,
        of_groups,
        of_share,
        pytest.param(of_torch_share, marks=pytest.mark.torch),
        pytest.param(of_hook, marks=pytest.mark.torch),
        pytest.param(of_spark, marks=[pytest.mark.spark, pytest.mark.torch]),
    ],
)
def test_all_ways_to_train_have_the_same_default_density(encoder_for: Callable[..., Any]) -> None:
    takes_kind = "is_adaptive" in encoder_for.__annotations__
    encoder = encoder_for(is_adaptive=False) if takes_kind else encoder_for()
    assert encoder.policy == default_policy(encoder.numel) == TargetDensity(0.02)
    if takes_kind:
        expected = default_policy(encoder.numel, is_adaptive=True)
        assert encoder_for(is_adaptive=True).policy == expected == TargetDensity(0.08)


def test_adaptive_optimisers_and_small_models_have_a_higher_default_density() -> None:
    assert default_policy(2_000_000) == default_policy(10**9) == TargetDensity(0.01)
    assert default_policy(10**9, is_adaptive=True) == TargetDensity(0.05)
    assert default_policy(1_250_000, is_adaptive=True).density == pytest.approx(0.0632, abs=1e-4)
    assert default_policy(1) == default_policy(1, is_adaptive=True) == TargetDensity(0.08)
    assert default_policy(0) == TargetDensity(0.01)
    assert default_policy(10**9, every=14) == TargetDensity(0.01)
    assert default_policy(10**9, every=15) == TargetDensity(0.05)


def test_small_tensors_of_a_model_are_denser_and_other_policies_stay_as_they_are() -> None:
    policy = TargetDensity(0.01, initial=0.5, minimum=1e-3)
    assert policy_for_tensor(policy, 900, 900) == policy
    assert policy_for_tensor(policy, 100, 900) == dataclasses.replace(policy, density=0.03)
    assert policy_for_tensor(policy, 1, 900) == dataclasses.replace(policy, density=0.08)
    assert policy_for_tensor(policy, 0, 900) == policy
    assert policy_for_tensor(TargetDensity(0.2), 1, 900) == TargetDensity(0.2)
    for other in (0.5, FixedThreshold(0.5), AdaptiveThreshold()):
        assert policy_for_tensor(other, 1, 900) is other


PARTITION = gw.Partition(1_000_000, 8)


@given(st.floats(1e-6, 0.99), st.floats(1e-6, 0.99))
def test_owners_are_up_to_twice_as_dense_as_nodes_and_never_less(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert low <= owners_density(low) <= 2.0 * low
    assert owners_density(low) <= owners_density(high) <= max(high, 0.2)
    owners = owners_policy(TargetDensity(high, 0.5, 1e-6), PARTITION.sizes)
    assert isinstance(owners, TargetDensity)
    assert (owners.initial, owners.minimum) == (0.5, 1e-6)


@pytest.mark.parametrize(
    ("numel", "is_adaptive", "every", "density"),
    [
        (10**7, False, 1, 0.01),
        (500_000, False, 1, 0.02),
        (10**7, True, 1, 0.1),
        (10**7, False, 15, 0.1),
        (10**6, True, 1, 0.1414),
    ],
)
def test_the_defaults_of_owners(numel: int, is_adaptive: bool, every: int, density: float) -> None:
    nodes = default_policy(numel, is_adaptive=is_adaptive, every=every)
    owners = owners_policy(nodes, PARTITION.sizes, every=every)
    assert isinstance(owners, TargetDensity)
    assert owners.density == pytest.approx(density, rel=1e-3)
    encoder = gw.Encoder(4, owners)
    encoder.load_state_dict({**encoder.state_dict(), "threshold": 1.0, "course": (0.5, 0.0, 0)})
    # Rounded to the nearest: from half a threshold on an element is sent, a node's from 9/16 on.
    message = encoder.encode(np.array([0.5, -0.53125, 0.4375, 0.0], np.float32))
    assert gw.decode(message).tolist() == ([1.0, -1.0, 0.0, 0.0] if every < 15 else [0.0] * 4)


def test_after_many_local_steps_owners_follow_a_falling_learning_rate_in_few_exchanges() -> None:
    rng, numel, thresholds = np.random.default_rng(0), 20_000, []
    policy = owners_policy(TargetDensity(0.05), [numel] * 8, every=30)
    encoder = gw.Encoder(numel, policy)
    for exchange in range(100):
        changed = rng.choice([-1, 0, 0, 0, 1], numel) * (1.0 - exchange / 101.0)
        encoder.encode(changed.astype(np.float32))
        thresholds.append(encoder.threshold)
    # The updates fall to a hundredth; rounded to the nearest, thresholds would fall to a third.
    assert thresholds[-1] < 0.15 * thresholds[10]


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 64])
def test_a_budget_gives_an_owner_s_elements_twice_as_many_bytes_as_a_node_s(parts: int) -> None:
    partition = gw.Partition(2**20, parts)
    nodes = nodes_budget(gw.TargetBytes(100_000), partition.sizes)
    owners = owners_policy(gw.TargetBytes(100_000), partition.sizes)
    assert isinstance(nodes, gw.TargetBytes)
    assert isinstance(owners, gw.TargetBytes)
    assert nodes.max_bytes_per_step + owners.max_bytes_per_step == 100_000
    by_element = owners.max_bytes_per_step * parts / nodes.max_bytes_per_step
    assert by_element == pytest.approx(min(2.0, parts), rel=0.02)
    aimed = owners.density_of(2**20 // parts)
    # A dense message takes fewer bits for an element.
    assert 0.9 * min(2.0, parts) < aimed.density / nodes.density_of(2**20).density < 3.0
    assert aimed.rounding_point == 0.5


def test_a_budget_of_fewer_blocks_than_owners_leaves_a_half_for_the_nodes() -> None:
    for numel in (0, 60, 200):
        nodes = nodes_budget(gw.TargetBytes(1000), gw.Partition(numel, 64).sizes)
        assert isinstance(nodes, gw.TargetBytes)
        assert 500 <= nodes.max_bytes_per_step <= 1000
    assert nodes_budget(TargetDensity(), PARTITION.sizes) is None


def test_policies_that_aim_at_no_density_are_the_owners_own() -> None:
    class Own(TargetDensity):
        rounding_point = 0.75

    for policy in (FixedThreshold(0.5), AdaptiveThreshold(), StepThreshold(), Own(0.05)):
        assert owners_policy(policy, PARTITION.sizes) is policy


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (FixedThreshold, "value"),
        (TargetDensity, "density"),
        (lambda value: TargetDensity(initial=value), "initial"),
        (lambda value: gw.TargetBytes(100, minimum=value), "minimum"),
        (lambda value: AdaptiveThreshold(density_min=value), "density_min"),
        (lambda value: AdaptiveThreshold(decay=value), "decay"),
        (lambda value: StepThreshold(trigger=value), "trigger"),
        (lambda value: ShakeUp(divisor=value), "divisor"),
        (ResidualClip, "limit"),
        (lambda value: gw.Encoder(4).set_policy(TargetDensity(), value), "threshold"),
    ],
)
def test_what_is_no_number_is_refused_by_name(make: Callable[[Any], object], name: str) -> None:
    for value in ("0.5", True, [0.5], 0.5j, np.bool_(True), np.array([0.5])):
        with pytest.raises(TypeError, match=f"{name} must be a number, got"):
            make(value)
    for number in (10**400, -(10**400), math.nan):
        if name != "limit" or number != 10**400:
            with pytest.raises(ValueError, match=r"must|a threshold|is a density"):
                make(number)


def test_numbers_of_numpy_make_the_policies_of_plain_numbers() -> None:
    half, four = np.float32(0.5), np.int64(4)
    for policy, plain in (
        (FixedThreshold(half), FixedThreshold(0.5)),
        (FixedThreshold(four), FixedThreshold(4.0)),
        (TargetDensity(half, half, half), TargetDensity(0.5, 0.5, 0.5)),
        (gw.TargetBytes(four), gw.TargetBytes(4)),
        (StepThreshold(step=half, delay=four), StepThreshold(step=0.5, delay=4)),
        (ShakeUp(four, np.float32(3.0)), ShakeUp(4, 3.0)),
        (ResidualClip(np.float32(3.0), four), ResidualClip(3.0, 4)),
    ):
        assert repr(policy) == repr(plain)


@pytest.mark.parametrize(
    ("sizes", "least"), [((10_000, 10_000), 202), ((6_688, 6_656, 6_656), 251)]
)
def test_a_budget_too_small_for_owners_is_refused_with_the_numbers(
    sizes: tuple[int, ...], least: int
) -> None:
    budget = nodes_budget(gw.TargetBytes(least), sizes)
    assert budget is not None
    assert most_changed(budget.max_bytes_per_step, sum(sizes), len(sizes)) >= 1
    with pytest.raises(ValueError, match=rf"of {len(sizes)} owners: .* give about {least} or more"):
        nodes_budget(gw.TargetBytes(least - 1), sizes)
