"""Scikit-learn's scanned digits, shared out among workers: what the examples train on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

TRAINING_IMAGES = 1_437


class Images(NamedTuple):
    """Images of 8 x 8 pixels in 0 ... 1, float32[n, 64], and what they show, int64[n]."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


def training(rank: int, workers: int) -> Images:
    """Return one worker's share of the training images."""
    images = _shuffled()
    mine = slice(rank, TRAINING_IMAGES, workers)
    return Images(images.pixels[mine], images.labels[mine])


def held_out() -> Images:
    """Return the 360 images that nobody trains on."""
    images = _shuffled()
    return Images(images.pixels[TRAINING_IMAGES:], images.labels[TRAINING_IMAGES:])


def _shuffled() -> Images:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    return Images(np.float32(pixels[order] / 16.0), np.int64(labels[order]))
