"""What policies that aim at a density do not know: how large a tensor is beside others, and its first update."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import device_of
from ..codec import Encoder
from ..policy import Tail, TargetDensity, ThresholdPolicy
from .views import views

__all__ = ["check_size_exponent", "for_size", "learn_first_threshold"]

# With much more the quantum gets so small that the largest elements of a small tensor cannot keep up.
_SMALL_DENSITY_MAX = 0.08

# Elements, at most about, from which it is learned.
_NUMEL_MAX = 1 << 20


def for_size(
    policy: ThresholdPolicy | float | None, numel: int, largest: int, exponent: float
) -> ThresholdPolicy | float | None:
    """Return the policy of a tensor beside the largest, which has ``policy`` itself; all have one without a density.

    Bytes are spent where elements are many, but a tensor of few matters as much: one that is k times as small gets
    k^exponent times the density, up to a bound.
    """
    if not isinstance(policy, TargetDensity) or numel == 0:
        return policy
    density = min(policy.density * (largest / numel) ** exponent, _SMALL_DENSITY_MAX)
    return replace(policy, density=max(density, policy.density))


def check_size_exponent(exponent: float) -> None:
    """Refuse what gives smaller tensors less.

    Raises:
        ValueError: ``exponent`` is negative or not finite.
    """
    if not 0.0 <= exponent < math.inf:
        raise ValueError(f"size_exponent must be finite and 0 or more, got {exponent}")


def learn_first_threshold(encoder: Encoder, update: Any) -> None:
    """Let the first message of a policy that aims at a density have the threshold that its own update asks for.

    No initial value suits updates that nobody has seen: one far too small sends a tiny quantum of every element, at
    many times the bytes, and all the rest comes late. An encoder that has followed its policy is left alone, and so is
    one on a device.

    Args:
        encoder: about to encode.
        update: as ``Encoder.encode`` takes it, or None; not modified.
    """
    density = encoder.policy.sample_density
    has_learned = encoder.threshold != encoder.policy.initial
    if density is None or has_learned or device_of(encoder.residual) >= 0:
        return
    # An even stride could meet the same columns of a matrix again and again.
    stride = (encoder.numel // _NUMEL_MAX) | 1
    sums = encoder.residual[::stride].copy()
    if update is not None:
        try:
            flat = [part.reshape(-1) for part in views(update)]
        except TypeError:  # half precision of torch, say
            return
        sums += np.concatenate(flat)[::stride] if len(flat) > 1 else flat[0][::stride]
    magnitudes = np.abs(sums[np.isfinite(sums)])
    if not magnitudes.any():
        return
    rank = min(int(density * magnitudes.size), magnitudes.size - 1)
    seen = float(-np.partition(-magnitudes, rank)[rank])
    tail = Tail(now=seen, shuffled=seen, next=seen, same=seen, agreement=0.5)
    learned = encoder.policy.next_threshold(encoder.threshold, density, 1, tail)
    encoder.set_policy(encoder.policy, threshold=learned)
