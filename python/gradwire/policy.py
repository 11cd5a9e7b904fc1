"""Threshold policies, and the schedules of shake-up messages and clipping.

Policies and schedules are frozen and have no hidden state. The encoder owns the values that change from step to step
(the threshold, the step, the step of its last change) and passes them as arguments.
"""

# ruff: noqa: ARG002  (all policies have the signature that the encoder calls)

from __future__ import annotations

import math
import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Protocol

__all__ = [
    "FIRST_TREND",
    "AdaptiveThreshold",
    "FixedThreshold",
    "PolicyState",
    "ResidualClip",
    "SampledQuantiles",
    "ShakeUp",
    "StepThreshold",
    "Supply",
    "TargetBytes",
    "TargetDensity",
    "ThresholdPolicy",
    "as_number",
    "begin",
    "default_policy",
    "divide_budget",
    "follow",
    "learned_threshold",
    "most_changed",
    "nodes_budget",
    "owners_density",
    "owners_policy",
    "policy_for_tensor",
    "round_threshold",
    "rounding_point_of",
    "sample_turn",
    "sampled_density",
    "whole",
]

# bfloat16: 8 significant bits, and the smallest subnormal is 2^-133.
_SIGNIFICANT_BITS = 8
_SMALLEST_EXPONENT = -133
# From here on the nearest value is 2^128, which is infinity.
_TOO_LARGE = 255.5 * 2.0**120
# The largest bfloat16 value: policies stop here, so that their threshold can always be rounded.
_MAX_THRESHOLD = 255.0 * 2.0**120
# A sampled quantile does not separate magnitudes within 3 % of each other: they pass the predicted threshold together
# or, usually, not at all. From an agreement in sign of 0.99 on, updates repeat so exactly that they would never pass,
# and the threshold goes 3 % below the prediction.
_REPEATED = 0.99
_BELOW_TIES = 31.0 / 32.0
# The numbers of TargetDensity.follow, chosen by simulation (docs/algorithm.md). csrc/cuda/policy.h has the same.
_SAMPLED_STEPS = 10
_DEVIATION_MAX = 4.0
_SPAN_MIN = 10.0
_TREND_MAX = 1.5
# Where few elements move, samples are repeated: an element that falls behind does not change the counts.
_FEW_PER_TARGET = 4.0
_FEW_STEPS = 8
# No message has more than so many times the target, or this many elements, which take no more bytes than a header.
# Smaller arrays have no limit: their largest message has 3.6 kB.
_MOST_PER_TARGET = 2.0
_LEAST_MOST = 64
_LIMITED_NUMEL = 1 << 14
# The share of a quantile that is left for the next step after twice the target has been sent: found by simulation.
_LEFT = 29.0 / 32.0
FIRST_TREND = 0.5
_LEARNS = -1.0
# The threshold before the first is learned, for updates of nothing but zeros.
_UNKNOWN = 1.0
_HEADER_BYTES = 48
# The default densities, measured in docs/performance.md. Adaptive optimisers make the updates of all elements about as
# large: what is sent late is missed more.
MANY_LOCAL_STEPS = 15  # between exchanges, from which on the defaults are others
_DENSITY = 0.01
_ADAPTIVE_DENSITY = 0.05
# Smaller models have a higher density, because their messages are small anyway.
_LARGE_NUMEL = 2_000_000
# A higher density makes the quantum of a small tensor so small that its largest elements cannot keep up.
_SMALL_DENSITY_MAX = 0.08
# Owners' results hold what all nodes have sent: up to twice the nodes' density, from twice this one on. Twice as much
# gains nothing at SGD's densities, and more makes the quantum too small at any.
_OWNERS_DENSER_FROM = 0.02
_OWNERS_TIMES_MAX = 2.0
_OWNERS_DENSITY_MAX = 0.2


class SampledQuantiles(NamedTuple):
    """Four sampled quantiles of magnitudes, as thresholds, the agreement in sign, and how many elements move.

    The target density's share of the sampled elements exceeds each quantile. A quantile is divided by the policy's
    rounding point, so it is the threshold at which that share of the elements would be sent.

    With residual r, update u, an element i and another element j near it:

    Attributes:
        now: quantile of |r_before(i) + u(i)|, the magnitudes that this step compared with its threshold.
        shuffled: quantile of |r_before(i) + u(j)|: without the correlation between an element and its update.
        next: quantile of |r_after(i) + u(j)|, the magnitudes of the next step if the next update is independent.
        same: quantile of |r_after(i) + u(i)|, the magnitudes of the next step if the next update is the same.
        agreement: share of the elements whose residual and update have the same sign, among the elements where neither
            is zero; 0.5 if there are no such elements.
        moving: share of the elements whose sum of residual and update is not zero.
        floor: the least useful threshold if ``now`` is below it, otherwise 0. Too few elements move then, and they hold
            more than a threshold as small as ``now`` carries. The floor is half the mean of their magnitudes.
    """

    now: float
    shuffled: float
    next: float
    same: float
    agreement: float
    moving: float = 1.0
    floor: float = 0.0

    def held_back(self, age: int) -> SampledQuantiles:
        """Return the quantiles of a step in which not all elements that reached the threshold were sent.

        The sample takes them for sent. Instead they stay, at about the quantile of this step, and grow if updates
        repeat.

        Args:
            age: number of earlier steps under the policy.
        """
        left = _LEFT * self.now
        return self._replace(
            next=max(self.next, left), same=max(self.same, left * ((age + 2.0) / (age + 1.0)))
        )


class Supply(IntEnum):
    """How many elements move, compared with the target density, as the last sample showed."""

    ENOUGH = 0
    FEW = 1
    """Little more than the target asks for: the counts are followed, and the samples go on."""
    SHORT = 2
    """The target cannot be met: the threshold stays from sample to sample."""


class PolicyState(NamedTuple):
    """The memory of ``TargetDensity`` between steps, which the encoder keeps.

    Attributes:
        trend: exponent of the threshold's growth with the number of steps since the policy began; -1 until the first
            threshold has been learned.
        deviation: sum of the recent relative deviations of the density from the target, with weights that fade by a
            tenth per step.
        supply: how many elements move.
    """

    trend: float
    deviation: float = 0.0
    supply: Supply = Supply.ENOUGH


class ThresholdPolicy(Protocol):
    """The interface of a threshold policy."""

    @property
    def initial(self) -> float | None:
        """The threshold of the first step, not rounded; None if it is learned."""

    @property
    def sample_density(self) -> float | None:
        """The density whose ``SampledQuantiles`` the encoder samples, or None."""

    def next_threshold(
        self,
        threshold: float,
        density: float,
        steps_since_change: int,
        quantiles: SampledQuantiles | None,
    ) -> float:
        """Return the threshold of the next step, not rounded.

        Args:
            threshold: the threshold of this step, not rounded.
            density: changed elements of this step / numel.
            steps_since_change: steps since the threshold last changed, this one included.
            quantiles: quantiles sampled in this step, or None.
        """


def as_number(name: str, value: Any) -> float:
    """Return a number, which may be NumPy's, as a float; one that is too large for that as infinity.

    Raises:
        TypeError: the value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {reprlib.repr(value)}")
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def round_threshold(threshold: float) -> float:
    """Return ``threshold`` rounded once to the nearest bfloat16 value, ties to even.

    Raises:
        ValueError: the threshold is not a positive finite number, or rounds to zero or infinity.
    """
    if not 0.0 < threshold < math.inf:
        raise ValueError(f"a threshold must be positive and finite, got {threshold!r}")
    exponent = max(math.frexp(threshold)[1] - _SIGNIFICANT_BITS, _SMALLEST_EXPONENT)
    quanta = round(math.ldexp(threshold, -exponent))
    if quanta == 0 or threshold >= _TOO_LARGE:
        raise ValueError(
            f"threshold {threshold!r} rounds to zero or infinity in bfloat16; use 1e-40 ... 3e38"
        )
    return math.ldexp(quanta, exponent)


@dataclass(frozen=True)
class FixedThreshold:
    """The same threshold in every step.

    >>> FixedThreshold(0.5).initial
    0.5

    Raises:
        ValueError: ``value`` is not a threshold.
    """

    sample_density: ClassVar[None] = None

    value: float

    def __post_init__(self) -> None:
        _as_numbers(self, "value")
        round_threshold(self.value)

    @property
    def initial(self) -> float:
        """The fixed threshold."""
        return self.value

    def next_threshold(
        self,
        threshold: float,
        density: float,
        steps_since_change: int,
        quantiles: SampledQuantiles | None,
    ) -> float:
        """Return the same threshold."""
        return threshold


@dataclass(frozen=True)
class AdaptiveThreshold:
    """Multiply or divide by ``decay`` while the density is outside its band.

    >>> AdaptiveThreshold(initial=1e-3, decay=0.5).next_threshold(1e-3, 0.0, 1, None)
    0.0005

    Source: Deeplearning4j 1.0, ``AdaptiveThresholdAlgorithm``, described in ``docs/algorithm.md``.

    Raises:
        ValueError: a value is out of its range.
    """

    sample_density: ClassVar[None] = None

    initial: float = 1e-3
    density_min: float = 1e-4
    density_max: float = 1e-2
    decay: float = 0.5 ** (1 / 20)
    minimum: float = 1e-8

    def __post_init__(self) -> None:
        _as_numbers(self, "initial", "density_min", "density_max", "decay", "minimum")
        _check_thresholds(self.initial, self.minimum)
        if not 0.0 <= self.density_min <= self.density_max <= 1.0:
            raise ValueError(
                f"densities must satisfy 0 <= density_min <= density_max <= 1, "
                f"got {self.density_min!r} and {self.density_max!r}"
            )
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"decay must be in (0, 1), got {self.decay!r}")

    def next_threshold(
        self,
        threshold: float,
        density: float,
        steps_since_change: int,
        quantiles: SampledQuantiles | None,
    ) -> float:
        """Return threshold * decay below the band, threshold / decay above, threshold inside."""
        if density < self.density_min:
            return max(threshold * self.decay, self.minimum)
        if density > self.density_max:
            return min(threshold / self.decay, _MAX_THRESHOLD)
        return threshold


@dataclass(frozen=True)
class StepThreshold:
    """Subtract ``step`` when the density is below ``trigger``, at most once in ``delay`` steps.

    >>> policy = StepThreshold(initial=0.5, minimum=0.25, step=0.125, delay=2)
    >>> policy.next_threshold(0.5, 0.0, 2, None)
    0.375

    Source: Deeplearning4j 0.9.1, ``EncodingHandler``, as documented (its code could step only once).

    Raises:
        ValueError: a value is out of its range.
    """

    sample_density: ClassVar[None] = None

    initial: float = 1e-3
    minimum: float = 1e-5
    step: float = 1e-5
    trigger: float = 5e-4
    delay: int = 50

    def __post_init__(self) -> None:
        _as_numbers(self, "initial", "minimum", "step", "trigger")
        _check_thresholds(self.initial, self.minimum)
        if not 0.0 < self.step < math.inf:
            raise ValueError(f"step must be positive and finite, got {self.step!r}")
        if not 0.0 <= self.trigger <= 1.0:
            raise ValueError(f"trigger is a density in 0 ... 1, got {self.trigger!r}")
        _as_whole(self, "delay", least=0)

    def next_threshold(
        self,
        threshold: float,
        density: float,
        steps_since_change: int,
        quantiles: SampledQuantiles | None,
    ) -> float:
        """Return the threshold, less ``step`` if the rule allows it."""
        lower = threshold - self.step
        if density < self.trigger and steps_since_change >= self.delay and lower >= self.minimum:
            return lower
        return threshold


@dataclass(frozen=True)
class TargetDensity:
    """Aim at a density, with samples in the first steps and with the counts of messages later.

    No message has more than twice the target, shake-ups excepted: if more elements reach the threshold, as in an
    adaptive optimiser's first steps or after a jump of the learning rate, the largest are sent with a larger threshold,
    and the others stay in the residual. (A limit below 64 elements is 64, and arrays of fewer than 16,384 elements have
    none.)

    The first threshold is learned from the first update. In the first steps, and again whenever the density stays away
    from the target, the encoder samples the quantile of the next step. Between samples the threshold continues its
    trend, corrected by the densities that the messages had, which costs nothing. A group with fewer than
    ``1 / density`` elements sends one element every few steps.

    If fewer elements move than the target asks for, as in a frozen backbone or an embedding table, the target does not
    drive the threshold. It is then half the mean of the magnitudes that move, so that these elements are sent as soon
    as they move.

    Elements are rounded: an element whose magnitude is at least ``rounding_point`` times the threshold is sent as plus
    or minus the threshold.

    Args:
        density: the target, in (0, 1).
        initial: threshold of the first step, or None to learn it from the first update.
        minimum: least threshold.

    >>> quantiles = SampledQuantiles(now=0.5, shuffled=0.25, next=0.25, same=1.0, agreement=0.5)
    >>> TargetDensity(1e-3).next_threshold(1e-4, 0.9, 1, quantiles)
    0.5

    Source: derived and measured in ``docs/algorithm.md``.

    Raises:
        ValueError: a value is out of its range.
    """

    rounding_point: ClassVar[float] = 0.5625

    density: float = 0.01
    initial: float | None = None
    minimum: float = 1e-8

    def __post_init__(self) -> None:
        _as_numbers(self, "density", "minimum", *([] if self.initial is None else ["initial"]))
        _check_thresholds(self.minimum if self.initial is None else self.initial, self.minimum)
        if not 0.0 < self.density < 1.0:
            raise ValueError(f"density must be in (0, 1), got {self.density!r}")

    @property
    def sample_density(self) -> float:
        """The target density."""
        return self.density

    def most_changed(self, numel: int) -> int:
        """Return the most changed elements of a message of ``numel`` elements: twice the target, but at least 64.

        Below 16,384 elements all may change.
        """
        if numel < _LIMITED_NUMEL:
            return numel
        return max(int(_MOST_PER_TARGET * self.density * numel), _LEAST_MOST)

    def samples(self, age: int, state: PolicyState) -> bool:
        """Return whether the encoder samples in the step after ``age`` steps under this policy."""
        return (
            age < _SAMPLED_STEPS
            or abs(state.deviation) >= _DEVIATION_MAX
            or state.trend < 0.0
            or (state.supply != Supply.ENOUGH and age % _FEW_STEPS == 0)
        )

    def follow(
        self,
        threshold: float,
        density: float,
        age: int,
        quantiles: SampledQuantiles | None,
        state: PolicyState,
    ) -> tuple[float, PolicyState]:
        """Return the threshold of the next step, not rounded, and the policy's memory.

        Args:
            threshold: the threshold of this step, not rounded.
            density: elements of this step that reached the threshold / numel.
            age: number of earlier steps under this policy.
            quantiles: quantiles sampled in this step, or None.
            state: the policy's memory at this step.
        """
        excess = min(density / self.density - 1.0, _DEVIATION_MAX)
        deviation = 0.0
        # Samples correct the threshold of the first steps. The sum begins shortly before the counts take over.
        if age >= _SAMPLED_STEPS - 2:
            deviation = min(max(0.9 * state.deviation + excess, -_DEVIATION_MAX), _DEVIATION_MAX)
        trend = state.trend
        supply = state.supply if quantiles is None else self._supply(quantiles)
        if trend < 0.0:
            if quantiles is None or quantiles.now <= 0.0:
                return threshold, state
            # If the next update is the same, the magnitudes double.
            return self._bounded(2.0 * threshold), PolicyState(FIRST_TREND, deviation, supply)
        if supply == Supply.SHORT:
            # Too few are sent whatever the threshold. A count above the target says that more elements move now.
            after = PolicyState(trend, max(deviation, 0.0), supply)
            if quantiles is None or quantiles.floor <= 0.0:
                return threshold, after
            return self._bounded(quantiles.floor), after._replace(deviation=0.0)
        if quantiles is not None and quantiles.next <= 0.0:
            return threshold, PolicyState(trend, deviation, supply)
        # Residuals settle within about 1 / density steps and change ever more slowly until then: so do corrections.
        span = min(age + 1.0, max(1.0 / self.density, _SPAN_MIN))
        growth = trend if age + 1.0 < 1.0 / self.density else 0.0
        corrected = self._bounded(threshold * (1.0 + (growth + 0.5 * deviation) / span))
        after = PolicyState(trend, deviation, supply)
        if quantiles is None:
            return corrected, after
        predicted = self.next_threshold(threshold, density, age + 1, quantiles)
        if age >= _SAMPLED_STEPS:
            if state.supply == Supply.SHORT:
                return predicted, after._replace(deviation=0.0)
            if state.supply == Supply.FEW and abs(state.deviation) < _DEVIATION_MAX:
                return corrected, after  # sampled only to see how many elements move
            # The counts say in which direction the threshold was wrong, so the sample may only go further that way.
            further = min if deviation < 0.0 else max
            return further(corrected, predicted), after
        if age == 1:  # two steps do not show yet whether updates repeat
            predicted = max(predicted, self._bounded(quantiles.same))
        # A threshold that grows as age^trend changes by the share trend / age from one step to the next.
        observed_trend = min(max(span * (predicted / threshold - 1.0), 0.0), _TREND_MAX)
        return predicted, after._replace(trend=trend + (observed_trend - trend) / 4.0)

    def _supply(self, quantiles: SampledQuantiles) -> Supply:
        if quantiles.floor > 0.0 or quantiles.now <= 0.0:
            return Supply.SHORT
        is_few = quantiles.moving < _FEW_PER_TARGET * self.density
        return Supply.FEW if is_few else Supply.ENOUGH

    def _bounded(self, threshold: float) -> float:
        return min(max(threshold, self.minimum), _MAX_THRESHOLD)

    def next_threshold(
        self,
        threshold: float,
        density: float,
        steps_since_change: int,
        quantiles: SampledQuantiles | None,
    ) -> float:
        """Return the predicted quantile, between the quantile for independent and the one for repeated updates.

        For independent updates the quantile is next + (now - shuffled). The difference is the effect of the correlation
        between an element's residual and its update. After a change of sign of the updates the difference can be below
        -next, so the sum is at least a quarter of ``next``. For repeated updates the quantile is ``same``. The weight
        of the two is the squared correlation, which follows from the agreement in sign (for Gaussian values by the
        arcsine law). Without a sample, or if every sampled element is zero, the threshold stays. If updates repeat and
        nothing was sent, all magnitudes are about equal (as in Adam's first steps), and a threshold just below the
        prediction sends them.
        """
        if quantiles is None or quantiles.next <= 0.0:
            return threshold
        independent = max(
            quantiles.next + (quantiles.now - quantiles.shuffled), 0.25 * quantiles.next
        )
        repeats = max(math.sin(math.pi * (quantiles.agreement - 0.5)), 0.0) ** 2
        # predicted^2 = (1 - repeats) * independent^2 + repeats * same^2
        predicted = math.hypot(
            math.sqrt(1.0 - repeats) * independent, math.sqrt(repeats) * quantiles.same
        )
        if density == 0.0 and quantiles.agreement >= _REPEATED:
            predicted *= _BELOW_TIES
        return self._bounded(predicted)


@dataclass(frozen=True)
class TargetBytes:
    """A budget: the messages of a step never have more bytes, and usually nearly as many.

    ``Groups.of`` divides the budget among its groups, the hook for DistributedDataParallel among parameters. In
    the sharded exchange it is divided between the parts of this node's update and its result as an owner, which gets
    twice as many bytes for each element: the budget is that of everything that a node sends in a step.

    The encoder aims at the density whose messages just fit. If an update reaches the threshold in more elements than
    fit, only the largest are sent, and the rest stays in the residual. Dense messages (``flush``) are not limited.

    Args:
        max_bytes_per_step: most bytes of all messages of a step, headers included; at least about 64 for each part.
        minimum: least threshold.

    >>> most_changed(1_000, 1_000_000, 1)
    531

    Raises:
        ValueError: a value is out of its range.
    """

    max_bytes_per_step: int
    minimum: float = 1e-8

    def __post_init__(self) -> None:
        _as_whole(self, "max_bytes_per_step", least=1)
        _as_numbers(self, "minimum")
        round_threshold(self.minimum)

    def density_of(self, numel: int) -> TargetDensity:
        """Return the policy that aims at the density whose messages just fit."""
        if numel == 0:
            return TargetDensity(minimum=self.minimum)
        share = most_changed(self.max_bytes_per_step, numel, 1) / numel
        return TargetDensity(min(0.9 * share, 0.5), minimum=self.minimum)


@lru_cache(maxsize=4096)  # a model may have an encoder for each tensor
def most_changed(max_bytes: int, numel: int, parts: int) -> int:
    """Return how many changed elements fit into ``max_bytes`` of messages, wherever the elements are.

    ``docs/algorithm.md`` derives the bound.

    Raises:
        ValueError: not even one changed element fits.
    """
    whole("max_bytes", max_bytes, least=1)
    if max_bytes >= _ceiling_bytes(numel, parts):
        return numel
    bytes_of = partial(_bytes_of, numel, parts)
    most = bisect_right(range(1, numel // 2 + 1), max_bytes, key=bytes_of)
    if most == 0 and numel > 0:
        raise ValueError(
            f"max_bytes is {max_bytes}, too few for one changed element of {numel} in {parts} "
            f"messages: must be at least {bytes_of(1)}"
        )
    return most


def divide_budget(budget: TargetBytes, left: int, sizes: Sequence[int]) -> list[TargetBytes]:
    """Divide what is left of a budget among tensors of these sizes, by the roots of the sizes.

    Raises:
        ValueError: that is too little for the smallest messages.
    """
    least = [_least_bytes(numel) for numel in sizes]
    if sum(least) > left:
        raise ValueError(
            f"TargetBytes({budget.max_bytes_per_step}) leaves {left} bytes for the messages of {len(sizes)} groups, "
            f"which have at least {sum(least)}: give more, or one Encoder for the whole model"
        )
    # Every message has a header, whatever is in it: only the rest is to divide.
    roots = [math.sqrt(numel) for numel in sizes]
    share = (left - sum(least)) / max(sum(roots), 1.0)
    return [
        replace(budget, max_bytes_per_step=fixed + int(share * root))
        for fixed, root in zip(least, roots, strict=True)
    ]


def _least_bytes(numel: int, parts: int = 1) -> int:
    """Return the least budget of the messages of ``numel`` elements."""
    return min(_ceiling_bytes(numel, parts), _bytes_of(numel, parts, 1))


def _ceiling_bytes(numel: int, parts: int) -> int:
    return parts * (_HEADER_BYTES + 1) + (22 * numel + 99) // 100


def _bytes_of(numel: int, parts: int, changed: int) -> int:
    """Return a bound of the bytes of so many changed elements."""
    # An upper bound of log2(numel / changed - 1/2) in 16ths: log2(1 + m) < m + 0.09, and 0.13 is rounding.
    scaled = (2 * numel - changed) * 8 // changed
    exponent = scaled.bit_length() - 1
    logarithm = 16 * (exponent - 4) + ((scaled - (1 << exponent)) << 4 >> exponent) + 4
    bits = changed * (logarithm + 49) // 16
    chunks = min(changed // 256, math.isqrt(changed * parts) * 3 // 8 + 1)
    return parts * (_HEADER_BYTES + 1) + chunks * 2 * (numel.bit_length() // 7 + 1) + bits // 8 + 1


@dataclass(frozen=True)
class ShakeUp:
    """The schedule of shake-ups: every ``every``-th message uses the threshold divided by ``divisor``.

    >>> ShakeUp(every=3).is_due(step=2)
    True

    Raises:
        ValueError: a value is out of its range.
    """

    every: int = 100
    divisor: float = 3.0

    def __post_init__(self) -> None:
        _as_whole(self, "every", least=1)
        _as_numbers(self, "divisor")
        if not 1.0 <= self.divisor < math.inf:
            raise ValueError(f"divisor must be finite and at least 1, got {self.divisor!r}")

    def is_due(self, step: int) -> bool:
        """Return whether the message of ``step`` is a shake-up."""
        return (step + 1) % self.every == 0


@dataclass(frozen=True)
class ResidualClip:
    """The schedule of clipping: every ``every``-th step limits the residual to ``limit`` thresholds after encoding.

    >>> ResidualClip(limit=5.0, every=5).is_due(step=4)
    True

    Source: Deeplearning4j, ``ResidualClippingPostProcessor``.

    Raises:
        ValueError: a value is out of its range.
    """

    limit: float = 5.0
    every: int = 5

    def __post_init__(self) -> None:
        _as_whole(self, "every", least=1)
        _as_numbers(self, "limit")
        if not 1.0 <= self.limit < math.inf:
            raise ValueError(f"limit must be finite and at least 1, got {self.limit!r}")

    def is_due(self, step: int) -> bool:
        """Return whether the residual is clipped after the message of ``step``."""
        return (step + 1) % self.every == 0


def default_policy(numel: int, *, is_adaptive: bool = False, every: int = 1) -> TargetDensity:
    """Return the policy of a model of ``numel`` elements for which none is given.

    This is the one rule of default densities, for encoders, ``Groups.of``, ``share``, the hook for
    DistributedDataParallel and Spark. Models of fewer than 2,000,000 elements get sqrt(2,000,000 / numel) times the
    density, up to 0.08.

    Args:
        numel: elements of the whole model.
        is_adaptive: whether the updates are an adaptive optimiser's: the density is then 0.05 instead of 0.01.
        every: steps between exchanges. From 15 on the density is 0.05, too: an element of density 0.01 would wait for
            1,500 steps.

    >>> default_policy(2_000_000).density, default_policy(500_000).density
    (0.01, 0.02)
    """
    is_high = is_adaptive or whole("every", every, least=1) >= MANY_LOCAL_STEPS
    policy = TargetDensity(_ADAPTIVE_DENSITY if is_high else _DENSITY)
    return _denser(policy, numel, _LARGE_NUMEL)


def owners_density(density: float) -> float:
    """Return the density of owners' results in the sharded exchange, where nodes' messages have this one.

    >>> owners_density(0.01), owners_density(0.05)
    (0.01, 0.1)
    """
    times = min(max(density / _OWNERS_DENSER_FROM, 1.0), _OWNERS_TIMES_MAX)
    return max(density, min(times * density, _OWNERS_DENSITY_MAX))


def nodes_budget(policy: ThresholdPolicy | TargetBytes, sizes: Sequence[int]) -> TargetBytes | None:
    """Return what a node's parts may have of the budget of a step of the sharded exchange; None: there is none.

    The rest is for its result as an owner, which has few elements: twice as many bytes for each.

    Args:
        policy: of the nodes.
        sizes: elements of each owner.

    Raises:
        ValueError: one of the two is too little for a single changed element, on this node or on another.
    """
    if not isinstance(policy, TargetBytes):
        return None
    budget = policy.max_bytes_per_step
    largest = max(sizes) / max(sum(sizes), 1)
    share = max(1.0 / (1.0 + _OWNERS_TIMES_MAX * largest), 0.5)
    of_parts = max(int(share * budget), 1)
    owners = sum(size > 0 for size in sizes)
    needs = _least_bytes(sum(sizes), owners), _least_bytes(max(sizes))
    if owners and (of_parts < needs[0] or budget - of_parts < needs[1]):
        least = math.ceil(max(needs[0] / share, needs[1] / (1.0 - share)))
        raise ValueError(
            f"TargetBytes({budget}) is too little for {sum(sizes)} elements in the sharded exchange of {owners} "
            f"owners: messages of one changed element take {needs[0]} bytes, and an owner's result {needs[1]}; give "
            f"about {least} or more"
        )
    return replace(policy, max_bytes_per_step=of_parts)


def owners_policy(
    policy: ThresholdPolicy | TargetBytes, sizes: Sequence[int], *, every: int = 1
) -> ThresholdPolicy | TargetBytes:
    """Return the policy of owners' results in the sharded exchange, where nodes have ``policy``.

    Owners are denser than nodes, and round to the nearest (docs/algorithm.md). Policies that aim at no density stay as
    they are. After many local steps owners round as nodes do: elements that are rounded to the nearest swing at half a
    threshold, which then falls too slowly to follow a learning rate.

    Args:
        policy: of the nodes.
        sizes: elements of each owner.
        every: steps between exchanges.
    """
    rounds_to_nearest = every < MANY_LOCAL_STEPS
    nodes = nodes_budget(policy, sizes)
    if nodes is not None and isinstance(policy, TargetBytes):
        rest = max(policy.max_bytes_per_step - nodes.max_bytes_per_step, 1)
        return (_OwnersBytes if rounds_to_nearest else TargetBytes)(rest, policy.minimum)
    if type(policy) is TargetDensity:
        kind = _OwnersDensity if rounds_to_nearest else TargetDensity
        return kind(owners_density(policy.density), policy.initial, policy.minimum)
    return policy


@dataclass(frozen=True)
class _OwnersDensity(TargetDensity):
    rounding_point: ClassVar[float] = 0.5


@dataclass(frozen=True)
class _OwnersBytes(TargetBytes):
    def density_of(self, numel: int) -> TargetDensity:
        return _OwnersDensity(super().density_of(numel).density, minimum=self.minimum)


def policy_for_tensor(
    policy: ThresholdPolicy | TargetBytes | float, numel: int, largest: int
) -> ThresholdPolicy | TargetBytes | float:
    """Return the policy of one tensor of a model whose tensors have an encoder each.

    The largest tensor has ``policy`` itself. A tensor k times as small gets sqrt(k) times the density, up to 0.08;
    policies that aim at no density stay as they are.

    Args:
        policy: of the model.
        numel: elements of the tensor.
        largest: elements of the largest tensor.

    >>> policy_for_tensor(TargetDensity(0.01), 100, 400).density
    0.02
    """
    return _denser(policy, numel, largest) if isinstance(policy, TargetDensity) else policy


def _denser(policy: TargetDensity, numel: int, reference: int) -> TargetDensity:
    """Return the policy of ``numel`` elements where so many as ``reference`` have ``policy`` itself."""
    if numel == 0:
        return policy
    density = min(policy.density * math.sqrt(reference / numel), _SMALL_DENSITY_MAX)
    return replace(policy, density=max(density, policy.density))


def begin(policy: ThresholdPolicy) -> tuple[float, PolicyState]:
    """Return the first threshold under a policy, not rounded and possibly to be learned later, and the memory."""
    if policy.initial is None:
        return _UNKNOWN, PolicyState(_LEARNS)
    return policy.initial, PolicyState(FIRST_TREND)


def learned_threshold(
    policy: ThresholdPolicy, threshold: float, quantiles: SampledQuantiles
) -> float:
    """Return the first threshold, learned from a sample of the first update; from zeros nothing is learned."""
    first = quantiles.floor or quantiles.now
    learned = min(max(first, getattr(policy, "minimum", 0.0)), _MAX_THRESHOLD)
    return learned if quantiles.now > 0.0 else threshold


def rounding_point_of(policy: ThresholdPolicy) -> float:
    """Return the share of the threshold from which on elements are sent."""
    return policy.rounding_point if isinstance(policy, TargetDensity) else 1.0


def sampled_density(policy: ThresholdPolicy, age: int, state: PolicyState) -> float:
    """Return the density whose quantiles the encoder samples after ``age`` steps under a policy, or 0."""
    if isinstance(policy, TargetDensity) and not policy.samples(age, state):
        return 0.0
    return policy.sample_density or 0.0


def sample_turn(age: int) -> int:
    """Return the number of the first sampled group of 16 after ``age`` steps; larger numbers begin again."""
    return max(age // _FEW_STEPS - 1, 0)


def follow(
    policy: ThresholdPolicy,
    threshold: float,
    density: float,
    age: int,
    quantiles: SampledQuantiles | None,
    state: PolicyState,
) -> tuple[float, PolicyState]:
    """Return the next threshold under any policy, and the memory: see ``TargetDensity.follow``.

    ``age`` counts the steps since the threshold last changed, or under ``TargetDensity`` since that policy began.
    """
    if isinstance(policy, TargetDensity):
        return policy.follow(threshold, density, age, quantiles, state)
    if quantiles is not None and quantiles.now > 0.0:
        state = state._replace(trend=FIRST_TREND)  # the first threshold has been learned
    return policy.next_threshold(threshold, density, age + 1, quantiles), state


def _check_thresholds(initial: float, minimum: float) -> None:
    round_threshold(initial)
    round_threshold(minimum)
    if minimum > initial:
        raise ValueError(f"minimum {minimum!r} is above initial {initial!r}")


def whole(name: str, value: Any, *, least: int) -> int:
    """Return a whole number, which may be NumPy's, as an int.

    Raises:
        ValueError: the value is none, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}, got {reprlib.repr(value)}"
        )
    return int(value)


def _as_numbers(policy: object, *names: str) -> None:
    """Make attributes floats: those of NumPy would make a policy compute with less precision than other nodes' have."""
    for name in names:
        object.__setattr__(policy, name, as_number(name, getattr(policy, name)))


def _as_whole(policy: object, name: str, *, least: int) -> None:
    object.__setattr__(policy, name, whole(name, getattr(policy, name), least=least))
