"""Hypothesis strategies: which elements change, in every mixture of densities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

# bfloat16 values: 8 significant bits anywhere between the subnormals and the largest.
thresholds = st.builds(
    lambda mantissa, exponent: mantissa * 2.0**exponent,
    st.integers(1, 255),
    st.integers(-133, 120),
)


@dataclass(frozen=True)
class Changes:
    """The elements that change among ``numel``."""

    numel: int
    positions: NDArray[np.int64]
    negative: NDArray[np.bool_]


def changes_in_regions(parts: list[tuple[int, float]], seed: int) -> Changes:
    """Return changes in regions of given lengths and densities, one after the other."""
    rng = np.random.default_rng(seed)
    changed = np.concatenate([np.zeros(0, bool), *(rng.random(n) < p for n, p in parts)])
    positions = np.flatnonzero(changed).astype(np.int64)
    return Changes(changed.size, positions, rng.random(positions.size) < 0.5)


regions = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 40), st.integers(0, 3_000)),
        st.sampled_from([0.0, 0.003, 0.05, 0.3, 0.45, 0.6, 0.65, 0.7, 0.9, 0.99, 1.0]),
    ),
    max_size=6,
)
changes = st.builds(changes_in_regions, regions, st.integers(0, 2**32 - 1))
