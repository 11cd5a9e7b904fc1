"""Scikit-learn's scanned digits, the data of the examples, divided among workers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TRAINING_IMAGES = 1_437
FILE = "datasets/data/digits.csv.gz"


class Images(NamedTuple):
    """Images of 8 x 8 pixels in 0 ... 1, float32[n, 64], and their digits, int64[n]."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


def training(rank: int, workers: int) -> Images:
    """Return one worker's share of the training images."""
    images = _shuffled()
    share = slice(rank, TRAINING_IMAGES, workers)
    return Images(images.pixels[share], images.labels[share])


def held_out() -> Images:
    """Return the 360 images that no worker trains on."""
    images = _shuffled()
    return Images(images.pixels[TRAINING_IMAGES:], images.labels[TRAINING_IMAGES:])


def _shuffled() -> Images:
    # The file without importing the library, which would take every worker longer than its training.
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(found.submodule_search_locations[0], FILE), delimiter=",")
    table = table[np.random.default_rng(0).permutation(len(table))]
    return Images(np.float32(table[:, :-1] / 16.0), np.int64(table[:, -1]))
