"""Threshold policies, and the schedules of shake-up messages and clipping.

Policies and schedules are frozen and have no hidden state. The encoder owns the values that change from step to step
(the threshold, the step, the step of its last change) and passes them as arguments.
"""

# ruff: noqa: ARG002  (all policies have the signature that the encoder calls)

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

__all__ = [
    "FIRST_TREND",
    "AdaptiveThreshold",
    "Course",
    "FixedThreshold",
    "ResidualClip",
    "ShakeUp",
    "StepThreshold",
    "Tail",
    "TargetBytes",
    "TargetDensity",
    "ThresholdPolicy",
    "begin",
    "follow",
    "learned_threshold",
    "most_changed",
    "reach_of",
    "round_threshold",
    "sampled_density",
]

# bfloat16: 8 significant bits, and the smallest subnormal is 2^-133.
_SIGNIFICANT_BITS = 8
_SMALLEST_EXPONENT = -133
# From here on the nearest value is 2^128, which is infinity.
_TOO_LARGE = 255.5 * 2.0**120
# The largest bfloat16 value: policies stop here, so that their threshold can always be rounded.
_MAX_THRESHOLD = 255.0 * 2.0**120
# A sampled quantile does not separate magnitudes within 3 % of each other: they pass the predicted threshold together
# or, usually, not at all. From this agreement in sign on updates repeat so exactly that they would never pass.
_REPEATED = 0.99
_BELOW_TIES = 31.0 / 32.0
# The numbers of TargetDensity.follow, chosen by simulation (docs/algorithm.md). csrc/cuda/policy.h has the same.
_SAMPLED_STEPS = 10
_DEVIATION_MAX = 4.0
_SPAN_MIN = 10.0
_TREND_MAX = 1.5
FIRST_TREND = 0.5
_LEARNS = -1.0
# The threshold before the first is learned, for updates of nothing but zeros.
_UNKNOWN = 1.0


class Tail(NamedTuple):
    """Four sampled quantiles, each exceeded by the target density's share of the sampled elements, over the reach.

    So each is the threshold at which that share would be sent.

    With residual r, update u, an element i and another element j near it:

    Attributes:
        now: of |r_before(i) + u(i)|, the magnitudes that this step compared with its threshold.
        shuffled: of |r_before(i) + u(j)|, the same without the correlation between an element and its update.
        next: of |r_after(i) + u(j)|, the magnitudes of the next step if its update is independent of this one.
        same: of |r_after(i) + u(i)|, the magnitudes of the next step if it has the same update.
        agreement: share of elements whose residual and update have the same sign, of those where neither is zero; 0.5
            if there are none.
    """

    now: float
    shuffled: float
    next: float
    same: float
    agreement: float


class Course(NamedTuple):
    """The memory of ``TargetDensity`` between steps, which the encoder keeps.

    Attributes:
        trend: growth of the threshold since the policy began, as an exponent of the number of steps; -1 until the first
            threshold has been learned.
        deviation: recent relative deviations of the density from the target, summed with weights that fade by a tenth
            per step.
    """

    trend: float
    deviation: float = 0.0


class ThresholdPolicy(Protocol):
    """The interface of a threshold policy."""

    @property
    def initial(self) -> float | None:
        """The threshold of the first step, not rounded; None if it is learned."""

    @property
    def sample_density(self) -> float | None:
        """The density whose quantiles (``Tail``) the encoder samples, or None."""

    def next_threshold(
        self, threshold: float, density: float, steps_since_change: int, tail: Tail | None
    ) -> float:
        """Return the threshold of the next step, not rounded.

        Args:
            threshold: the threshold of this step, not rounded.
            density: changed elements of this step / numel.
            steps_since_change: steps since the threshold last changed, this one included.
            tail: quantiles sampled in this step, or None.
        """


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


class Plain:
    """An object of plain numbers, which makes a dict, for configuration files and logs, and comes back from it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the class's name under "kind", and the values by name.

        >>> ShakeUp(every=3).to_dict()
        {'kind': 'ShakeUp', 'every': 3, 'divisor': 3.0}
        """
        return {"kind": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """Return the object that ``to_dict`` described: of this class, or called on any of a kind, of that kind.

        Raises:
            ValueError: the kind is unknown, or a value is out of its range.
            TypeError: a value is missing, unknown or of the wrong kind.

        >>> ShakeUp.from_dict({"kind": "ShakeUp", "every": 3})
        ShakeUp(every=3, divisor=3.0)
        """
        kinds = {one.__name__: one for one in Plain.__subclasses__()}
        kind = values.get("kind", cls.__name__)
        if kind not in kinds:
            raise ValueError(f"kind is {kind!r}, must be one of {', '.join(sorted(kinds))}")
        return kinds[kind](**{name: one for name, one in values.items() if name != "kind"})


@dataclass(frozen=True)
class FixedThreshold(Plain):
    """The same threshold in every step.

    >>> FixedThreshold(0.5).initial
    0.5

    Raises:
        ValueError: ``value`` is not a threshold.
    """

    sample_density: ClassVar[None] = None

    value: float

    def __post_init__(self) -> None:
        round_threshold(self.value)

    @property
    def initial(self) -> float:
        """The fixed threshold."""
        return self.value

    def next_threshold(
        self, threshold: float, density: float, steps_since_change: int, tail: Tail | None
    ) -> float:
        """Return the same threshold."""
        return threshold


@dataclass(frozen=True)
class AdaptiveThreshold(Plain):
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
        _check_thresholds(self.initial, self.minimum)
        if not 0.0 <= self.density_min <= self.density_max <= 1.0:
            raise ValueError(
                f"densities must satisfy 0 <= density_min <= density_max <= 1, "
                f"got {self.density_min!r} and {self.density_max!r}"
            )
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"decay must be in (0, 1), got {self.decay!r}")

    def next_threshold(
        self, threshold: float, density: float, steps_since_change: int, tail: Tail | None
    ) -> float:
        """Return threshold * decay below the band, threshold / decay above, threshold inside."""
        if density < self.density_min:
            return max(threshold * self.decay, self.minimum)
        if density > self.density_max:
            return min(threshold / self.decay, _MAX_THRESHOLD)
        return threshold


@dataclass(frozen=True)
class StepThreshold(Plain):
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
        _check_thresholds(self.initial, self.minimum)
        if not 0.0 < self.step < math.inf:
            raise ValueError(f"step must be positive and finite, got {self.step!r}")
        if not 0.0 <= self.trigger <= 1.0:
            raise ValueError(f"trigger is a density in 0 ... 1, got {self.trigger!r}")
        _check_whole("delay", self.delay, least=0)

    def next_threshold(
        self, threshold: float, density: float, steps_since_change: int, tail: Tail | None
    ) -> float:
        """Return the threshold, less ``step`` if the rule allows it."""
        lower = threshold - self.step
        if density < self.trigger and steps_since_change >= self.delay and lower >= self.minimum:
            return lower
        return threshold


@dataclass(frozen=True)
class TargetDensity(Plain):
    """Aim at a density, from samples of the first steps and the counts of later ones.

    The first threshold is learned from the first update. In the first steps, and again whenever the density stays away
    from the target, the encoder samples the quantile of the next step. Between samples the threshold continues its
    trend, corrected by the densities that the messages had, which costs nothing. A group with fewer than
    ``1 / density`` elements sends about one element a step.

    Elements are rounded: one is sent as plus or minus the threshold from ``reach`` times the threshold on.

    Args:
        density: the target, in (0, 1).
        initial: threshold of the first step, or None to learn it from the first update.
        minimum: least threshold.

    >>> tail = Tail(now=0.5, shuffled=0.25, next=0.25, same=1.0, agreement=0.5)
    >>> TargetDensity(1e-3).next_threshold(1e-4, 0.9, 1, tail)
    0.5

    Source: derived and measured in ``docs/algorithm.md``.

    Raises:
        ValueError: a value is out of its range.
    """

    reach: ClassVar[float] = 0.5625

    density: float = 0.01
    initial: float | None = None
    minimum: float = 1e-8

    def __post_init__(self) -> None:
        _check_thresholds(self.minimum if self.initial is None else self.initial, self.minimum)
        if not 0.0 < self.density < 1.0:
            raise ValueError(f"density must be in (0, 1), got {self.density!r}")

    @property
    def sample_density(self) -> float:
        """The target density."""
        return self.density

    def samples(self, age: int, course: Course) -> bool:
        """Return whether the encoder samples in the step after ``age`` steps under this policy."""
        return age < _SAMPLED_STEPS or abs(course.deviation) >= _DEVIATION_MAX or course.trend < 0.0

    def follow(
        self, threshold: float, density: float, age: int, tail: Tail | None, course: Course
    ) -> tuple[float, Course]:
        """Return the threshold of the next step, not rounded, and the memory.

        Args:
            threshold: the threshold of this step, not rounded.
            density: changed elements of this step / numel.
            age: steps under this policy before this one.
            tail: quantiles sampled in this step, or None.
            course: the memory at this step.
        """
        off = min(density / self.density - 1.0, _DEVIATION_MAX)
        deviation = 0.0
        if age >= _SAMPLED_STEPS - 2:
            deviation = min(max(0.9 * course.deviation + off, -_DEVIATION_MAX), _DEVIATION_MAX)
        trend = course.trend
        if trend < 0.0:
            if tail is None or tail.now <= 0.0:
                return threshold, course
            # If the next update is the same, the magnitudes double.
            return self._bounded(2.0 * threshold), Course(FIRST_TREND, deviation)
        if tail is not None and tail.next <= 0.0:
            return threshold, Course(trend, deviation)
        # Residuals settle within about 1 / density steps. Until then corrections become smaller.
        span = min(age + 1.0, max(1.0 / self.density, _SPAN_MIN))
        growth = trend if age + 1.0 < 1.0 / self.density else 0.0
        corrected = self._bounded(threshold * (1.0 + (growth + 0.5 * deviation) / span))
        if tail is None:
            return corrected, Course(trend, deviation)
        predicted = self.next_threshold(threshold, density, age + 1, tail)
        if age >= _SAMPLED_STEPS:
            # The counts say in which direction the threshold was wrong.
            further = min if deviation < 0.0 else max
            return further(corrected, predicted), Course(trend, deviation)
        if age == 1:  # two steps do not show yet whether updates repeat
            predicted = max(predicted, self._bounded(tail.same))
        seen = min(max(span * (predicted / threshold - 1.0), 0.0), _TREND_MAX)
        return predicted, Course(trend + (seen - trend) / 4.0, deviation)

    def _bounded(self, threshold: float) -> float:
        return min(max(threshold, self.minimum), _MAX_THRESHOLD)

    def next_threshold(
        self, threshold: float, density: float, steps_since_change: int, tail: Tail | None
    ) -> float:
        """Return the predicted quantile, between those for independent and for repeated updates.

        For independent updates the quantile is next + (now - shuffled). The difference is the effect of the correlation
        between an element's residual and its update. After a change of sign of the updates it can be below -next, so a
        quarter of ``next`` bounds the sum. For repeated updates the quantile is ``same``. The weight of the two is the
        squared correlation, which follows from the agreement in sign (for Gaussian values by the arcsine law). Without
        a sample, or if every sampled element is zero, the threshold stays. If updates repeat and nothing was sent, all
        magnitudes are about equal (as in Adam's first steps), and a threshold just below the prediction sends them.
        """
        if tail is None or tail.next <= 0.0:
            return threshold
        independent = max(tail.next + (tail.now - tail.shuffled), 0.25 * tail.next)
        repeats = max(math.sin(math.pi * (tail.agreement - 0.5)), 0.0) ** 2
        weighted = math.sqrt(1.0 - repeats) * independent, math.sqrt(repeats) * tail.same
        predicted = math.hypot(*weighted)
        if density == 0.0 and tail.agreement >= _REPEATED:
            predicted *= _BELOW_TIES
        return self._bounded(predicted)


@dataclass(frozen=True)
class TargetBytes(Plain):
    """A budget: the messages of a step never have more bytes, and usually nearly as many.

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
        _check_whole("max_bytes_per_step", self.max_bytes_per_step, least=1)
        round_threshold(self.minimum)

    def density_of(self, numel: int) -> TargetDensity:
        """Return the policy that aims at the density whose messages just fit."""
        if numel == 0:
            return TargetDensity(minimum=self.minimum)
        share = most_changed(self.max_bytes_per_step, numel, 1) / numel
        return TargetDensity(min(0.9 * share, 0.5), minimum=self.minimum)


@lru_cache(maxsize=64)
def most_changed(max_bytes: int, numel: int, parts: int) -> int:
    """Return how many changed elements fit into messages of so many bytes, wherever they are (``docs/algorithm.md``).

    Raises:
        ValueError: not even one changed element fits.
    """
    _check_whole("max_bytes", max_bytes, least=1)
    header = 48
    if max_bytes >= parts * (header + 1) + (22 * numel + 99) // 100:
        return numel

    def bytes_of(changed: int) -> int:
        # An upper bound of log2(numel / changed - 1/2) in 16ths: log2(1 + m) < m + 0.09, and 0.13 is rounding.
        scaled = (2 * numel - changed) * 8 // changed
        exponent = scaled.bit_length() - 1
        logarithm = 16 * (exponent - 4) + ((scaled - (1 << exponent)) << 4 >> exponent) + 4
        bits = changed * (logarithm + 49) // 16
        chunks = min(changed // 256, math.isqrt(changed * parts) * 3 // 8 + 1)
        return parts * (header + 1) + chunks * 2 * (numel.bit_length() // 7 + 1) + bits // 8 + 1

    most = bisect_right(range(1, numel // 2 + 1), max_bytes, key=bytes_of)
    if most == 0 and numel > 0:
        least = bytes_of(1)
        raise ValueError(
            f"max_bytes is {max_bytes}, too few for one changed element of {numel} in {parts} "
            f"messages: must be at least {least}"
        )
    return most


@dataclass(frozen=True)
class ShakeUp(Plain):
    """The schedule of shake-ups: every ``every``-th message uses the threshold divided by ``divisor``.

    >>> ShakeUp(every=3).is_due(step=2)
    True

    Raises:
        ValueError: a value is out of its range.
    """

    every: int = 100
    divisor: float = 3.0

    def __post_init__(self) -> None:
        _check_whole("every", self.every, least=1)
        if not 1.0 <= self.divisor < math.inf:
            raise ValueError(f"divisor must be finite and at least 1, got {self.divisor!r}")

    def is_due(self, step: int) -> bool:
        """Return whether the message of ``step`` is a shake-up."""
        return (step + 1) % self.every == 0


@dataclass(frozen=True)
class ResidualClip(Plain):
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
        _check_whole("every", self.every, least=1)
        if not 1.0 <= self.limit < math.inf:
            raise ValueError(f"limit must be finite and at least 1, got {self.limit!r}")

    def is_due(self, step: int) -> bool:
        """Return whether the residual is clipped after the message of ``step``."""
        return (step + 1) % self.every == 0


def begin(policy: ThresholdPolicy) -> tuple[float, Course]:
    """Return the first threshold under a policy, not rounded and possibly still to be learned, and the memory."""
    if policy.initial is None:
        return _UNKNOWN, Course(_LEARNS)
    return policy.initial, Course(FIRST_TREND)


def learned_threshold(policy: ThresholdPolicy, threshold: float, tail: Tail) -> float:
    """Return the first threshold that a sample of the first update asks for; of zeros nothing is learned."""
    learned = min(max(tail.now, getattr(policy, "minimum", 0.0)), _MAX_THRESHOLD)
    return learned if tail.now > 0.0 else threshold


def reach_of(policy: ThresholdPolicy) -> float:
    """Return the share of the threshold from which on elements are sent."""
    return policy.reach if isinstance(policy, TargetDensity) else 1.0


def sampled_density(policy: ThresholdPolicy, age: int, course: Course) -> float:
    """Return the density whose quantiles are sampled in the step after ``age`` steps under a policy, or 0."""
    if isinstance(policy, TargetDensity) and not policy.samples(age, course):
        return 0.0
    return policy.sample_density or 0.0


def follow(
    policy: ThresholdPolicy,
    threshold: float,
    density: float,
    age: int,
    tail: Tail | None,
    course: Course,
) -> tuple[float, Course]:
    """Return the next threshold under any policy, and the memory: see ``TargetDensity.follow``.

    ``age`` counts the steps since the threshold last changed, or under ``TargetDensity`` since that policy began.
    """
    if isinstance(policy, TargetDensity):
        return policy.follow(threshold, density, age, tail, course)
    return policy.next_threshold(threshold, density, age + 1, tail), course


def _check_thresholds(initial: float, minimum: float) -> None:
    round_threshold(initial)
    round_threshold(minimum)
    if minimum > initial:
        raise ValueError(f"minimum {minimum!r} is above initial {initial!r}")


def _check_whole(name: str, value: int, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
