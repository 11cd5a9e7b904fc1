"""Updates with a known answer: steady-state ones for timing, adversarial ones for message sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from harness import aligned
from numpy.typing import NDArray

THRESHOLD = 1.0


@dataclass(frozen=True)
class SteadyState:
    """A residual and an update that repeat the same encode, to the bit.

    The residual holds random multiples of 2^-10 below half a threshold. The update is ±1, with the residual's sign, at
    the elements that are to pass, and 0 elsewhere. So |r + u| >= 1 exactly where u is not 0, and taking ±1 out restores
    the residual.

    Attributes:
        residual: float32[numel], the encoder's residual before and after each encode.
        update: float32[numel], also what the message decodes to.
    """

    residual: NDArray[np.float32]
    update: NDArray[np.float32]

    @classmethod
    def make(cls, numel: int, density: float, seed: int, count: int | None = None) -> SteadyState:
        """Return a state in which a random share ``density``, or exactly ``count`` elements, pass."""
        rng = np.random.default_rng(seed)
        residual, update = aligned(numel), aligned(numel)
        np.multiply(rng.integers(-512, 512, numel, np.int16), np.float32(2.0**-10), out=residual)
        if count is None:
            mask = random_mask(numel, density, rng)
        else:
            mask = np.zeros(numel, bool)
            mask[rng.choice(numel, count, replace=False, shuffle=False)] = True
        np.copysign(np.float32(1), residual, out=update, where=mask)
        return cls(residual, update)


def random_mask(numel: int, density: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which elements change when each does with probability ``density``."""
    return rng.random(numel, np.float32) < density


def clustered_mask(
    numel: int, density: float, sigma: float, region: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Return changes whose density differs lognormally between regions, as it does between a model's layers."""
    densities = density * rng.lognormal(-(sigma**2) / 2, sigma, -(-numel // region))
    chances = np.repeat(np.minimum(densities, 1.0).astype(np.float32), region)[:numel]
    return rng.random(numel, np.float32) < chances


def signed(mask: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return an update of ±1 at the elements of the mask, with random signs."""
    update = aligned(mask.size)
    signs = rng.integers(0, 2, mask.size, np.int8)
    np.subtract(1, 2 * signs, out=update, where=mask, casting="unsafe")
    return update


def entropy_floor_bits(numel: int, count: int) -> float:
    """Return log2 C(numel, count) + count: which elements, all choices equally likely, and their signs."""
    ways = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return ways / math.log(2) + count


def adversarial_masks(numel: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield patterns that an entropy coder for random places could handle badly, each with its name."""
    for period in (2, 3, 5, 16, 1000):
        yield f"every {period}th", np.arange(numel) % period == period - 1
    for run in (8, 64, 100_000):
        yield f"runs of {run}", np.arange(numel) // run % 2 == 0
    few = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.34, 7 / 20, 0.36, 0.4, 0.5, 0.63)
    for share in (*few, 0.7, 0.8, 0.9, 0.99, 0.999):
        yield f"longest quotients, {share:.4g} unchanged", _longest_quotients(numel, share)


def _longest_quotients(numel: int, unchanged_share: float) -> NDArray[np.bool_]:
    """Return chunks of C - 1 changed elements, then U unchanged ones, then a changed one.

    All distances but one are 0 and that one is as long as the chunk allows, so the sum of the Rice quotients is the
    largest for the chunk's counts, whichever kind of element the code lists.
    """
    count = round(numel * (1 - unchanged_share))
    # The chunk's size follows from the count, and the count from the chunk's size.
    for _ in range(4):
        changed = 2 ** max(8, (max(count, 1) - 1).bit_length() // 2 + 2)
        unchanged = math.floor(changed * unchanged_share / (1 - unchanged_share))
        chunks = numel // (changed + unchanged)
        count = chunks * changed
    chunk = np.ones(changed + unchanged, bool)
    chunk[changed - 1 : -1] = False
    mask = np.zeros(numel, bool)
    mask[: chunks * chunk.size] = np.tile(chunk, chunks)
    return mask
