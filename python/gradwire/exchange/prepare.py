"""What happens to an update before it is accumulated: clipping, momentum correction, warm-up.

Source: Y. Lin et al., "Deep gradient compression", ICLR 2018, sections 3.1 to 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NonFiniteUpdate
from ..message import Message
from ..policy import FixedThreshold, TargetDensity
from .groups import Codec, Groups
from .views import Arrays, views

__all__ = ["Preparation", "Preparer", "Warmup"]


@dataclass(frozen=True)
class Warmup:
    """The first steps send more: everything, or densities that fall in stages of equal length.

    >>> Warmup(steps=4, densities=(0.25, 0.0625)).density(step=2)
    0.0625

    Attributes:
        steps: how many.
        densities: of the stages; none: the updates go out whole.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    densities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps of a warm-up must be a whole number from 1, got {self.steps}")
        if not all(0.0 < density < 1.0 for density in self.densities):
            raise ValueError(f"densities must be in (0, 1), got {self.densities}")
        if len(self.densities) > self.steps:
            raise ValueError(f"{len(self.densities)} densities in {self.steps} steps of warm-up")

    def density(self, step: int) -> float | None:
        """Return the density aimed at in ``step``; None: whole updates, or the warm-up is over."""
        if not self.densities or step >= self.steps:
            return None
        return self.densities[step * len(self.densities) // self.steps]

    def is_dense(self, step: int) -> bool:
        """Return whether the update of ``step`` goes out whole."""
        return not self.densities and step < self.steps


@dataclass(frozen=True)
class Preparation:
    """The options of one exchange.

    Attributes:
        warmup: or None.
        momentum: of the local momentum correction; 0.0: none.
        factor_masking: whether elements that were sent lose their momentum, so that it does not push stale ones.
        clip_norm: largest Euclidean norm of one update; None: any.

    Raises:
        ValueError: a value is out of its range.
        TypeError: ``warmup`` is no `Warmup`.
    """

    warmup: Warmup | None = None
    momentum: float = 0.0
    factor_masking: bool = True
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.warmup is not None and not isinstance(self.warmup, Warmup):
            raise TypeError(f"warmup must be a Warmup, got {self.warmup!r}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be positive and finite, got {self.clip_norm}")

    @property
    def needs_update(self) -> bool:
        """Whether it needs the update itself, not one that was added to the residual before."""
        return self.momentum > 0.0 or self.clip_norm is not None


class Preparer:
    """Carries a preparation out: holds the momentum."""

    def __init__(self, options: Preparation, groups: Groups) -> None:
        self._options = options
        self._groups = groups
        self._policies = [encoder.policy for encoder in groups.encoders]
        self.velocity: Arrays = []

    def begin(self, step: int, codec: Codec) -> Codec:
        """Set the thresholds' policies for ``step``; return the codec that its update goes out in."""
        warmup = self._options.warmup
        if warmup is None or codec != "threshold":
            return codec
        density = warmup.density(step)
        for encoder, own in zip(self._groups.encoders, self._policies, strict=True):
            wanted = own if density is None else TargetDensity(density)
            if encoder.policy != wanted:
                is_fixed = isinstance(wanted, FixedThreshold)
                encoder.set_policy(wanted, threshold=wanted.initial if is_fixed else None)
        return "dense" if warmup.is_dense(step) else codec

    def update(self, update: Any) -> Any:
        """Return what is to be accumulated for an update (which is not modified)."""
        if not self._options.needs_update:
            return update
        if update is None:
            raise ValueError(
                "momentum and clip_norm need the update; it cannot be in the residual already"
            )
        parts = self._finite(views(update))
        if self._options.clip_norm is not None:
            parts = _clipped(parts, self._options.clip_norm)
        if self._options.momentum == 0.0:
            return parts
        if not self.velocity:
            self.velocity = [np.zeros(part.shape, np.float32) for part in parts]
        for velocity, part in zip(self.velocity, parts, strict=True):
            velocity *= np.float32(self._options.momentum)
            velocity += part
        return self.velocity

    def mask(self, messages: list[Message]) -> None:
        """Take the momentum from the elements that were sent."""
        if not self.velocity or not self._options.factor_masking:
            return
        for index in range(len(self._groups)):
            message = messages[index]
            if message.kind == "dense":
                continue
            positions, _ = message.entries()
            start = 0
            for velocity in self._groups.select(self.velocity, index):
                stop = start + velocity.size
                first, last = np.searchsorted(positions, (start, stop))
                velocity.reshape(-1)[positions[first:last] - start] = 0.0
                start = stop

    def _finite(self, parts: Arrays) -> Arrays:
        """Return the parts without non-finite elements, which would poison the momentum for ever."""
        bad = [np.flatnonzero(~np.isfinite(part)) for part in parts]
        count = sum(one.size for one in bad)
        if count == 0:
            return parts
        if any(encoder.on_nonfinite == "raise" for encoder in self._groups.encoders):
            first = self._first_index(parts, bad)
            raise NonFiniteUpdate(
                f"the update holds {count} elements that are not finite, the first at {first}; "
                "nothing of it was accumulated",
                count,
                first,
            )
        return [np.where(np.isfinite(part), part, part.dtype.type(0)) for part in parts]

    @staticmethod
    def _first_index(parts: Arrays, bad: list[NDArray[Any]]) -> int:
        before = 0
        for part, indices in zip(parts, bad, strict=True):
            if indices.size:
                return before + int(indices[0])
            before += part.size
        raise ValueError("all elements are finite")


def _clipped(parts: Arrays, limit: float) -> Arrays:
    """Return the parts, scaled down together if their norm is above ``limit``."""
    flat = [part.reshape(-1).astype(np.float64, copy=False) for part in parts]
    norm = math.sqrt(math.fsum(float(np.dot(part, part)) for part in flat))
    if norm <= limit:
        return parts
    return [np.multiply(part, part.dtype.type(limit / norm)) for part in parts]
