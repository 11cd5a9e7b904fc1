"""The task that the demo trains on, and one worker's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gradwire.cli.demo.network import Floats, Integers, Network


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome of a run; both runs of the demo share it but for ``dense``.

    Attributes:
        workers: number of processes, each with its own share of the training images.
        epochs: passes over the training images.
        batch: images per worker and step.
        learning_rate: of the first step; it falls linearly to zero.
        momentum: of the local updates.
        seed: of the split, the initial parameters and the order of the images.
        threshold: a fixed threshold, or None for one that follows the density.
        dense: send every update as raw float32 values instead.
    """

    workers: int = 4
    epochs: int = 20
    batch: int = 8
    learning_rate: float = 0.4
    momentum: float = 0.5
    seed: int = 0
    threshold: float | None = None
    dense: bool = False
    layers: tuple[int, ...] = (64, 512, 256, 10)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, with the reason."""
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}, must be at least 1")
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, must be at least 1")
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{self.workers} workers leave fewer than {self.batch} training images each; "
                "use fewer workers"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps that every worker takes per epoch."""
        return TRAINING_IMAGES // self.workers // self.batch

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch


TRAINING_IMAGES = 898  # of scikit-learn's 1,797 digits; the other half is held out


@dataclass(frozen=True)
class Digits:
    """The two halves of scikit-learn's scanned digits, 8 x 8 pixels each.

    Attributes:
        inputs: float32, shape (898, 64), about zero mean.
        labels: int64, shape (898,).
        test_inputs: the held-out half.
        test_labels: its classes.
    """

    inputs: Floats
    labels: Integers
    test_inputs: Floats
    test_labels: Integers

    @staticmethod
    def load(seed: int) -> Digits:
        """Return the digits, shuffled and split by ``seed``; they come with scikit-learn."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(images))
        inputs = (images[order] / 16.0).astype(np.float32)
        classes = labels[order].astype(np.int64)
        half = TRAINING_IMAGES
        inputs -= inputs[:half].mean(axis=0)
        return Digits(inputs[:half], classes[:half], inputs[half:], classes[half:])


@dataclass
class Trainer:
    """One worker: its images, its momentum, and the updates it wants to add to the shared parameters.

    Attributes:
        recipe: what to train.
        rank: which worker this is, from 0.
        digits: all images; this worker uses every ``recipe.workers``-th of the training half.
    """

    recipe: Recipe
    rank: int
    digits: Digits
    network: Network = field(init=False)

    def __post_init__(self) -> None:
        """Allocate what every step reuses."""
        self.network = Network(self.recipe.layers)
        self._gradient = np.empty(self.network.numel, np.float32)
        self._velocity = np.zeros(self.network.numel, np.float32)
        self._update = np.empty(self.network.numel, np.float32)
        self._rng = np.random.default_rng((self.recipe.seed, self.rank))

    def batches(self) -> Iterator[Integers]:
        """Yield the indices of every batch of one epoch, in fresh order."""
        mine = np.arange(self.rank, TRAINING_IMAGES, self.recipe.workers)
        self._rng.shuffle(mine)
        size = self.recipe.batch
        for index in range(self.recipe.steps_per_epoch):
            yield mine[index * size : (index + 1) * size]

    def update(self, params: Floats, batch: Integers, step: int) -> tuple[Floats, float]:
        """Return the update of one step (float32, shape (numel,), overwritten by the next) and the loss."""
        inputs, labels = self.digits.inputs[batch], self.digits.labels[batch]
        loss = self.network.gradient(params, inputs, labels, self._gradient)
        self._velocity *= self.recipe.momentum
        self._velocity += self._gradient
        rate = self.recipe.learning_rate * (1.0 - step / self.recipe.steps)
        np.multiply(self._velocity, np.float32(-rate), out=self._update)
        return self._update, loss

    def test_accuracy(self, params: Floats) -> float:
        """Return the accuracy on the held-out half."""
        return self.network.accuracy(params, self.digits.test_inputs, self.digits.test_labels)
