"""The demo's task: a small network in NumPy, scikit-learn's scanned digits, and one worker's share of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Integers: TypeAlias = NDArray[np.int64]

TRAINING_IMAGES = 898  # of scikit-learn's 1,797 digits; the other half is held out
BATCH = 8
MOMENTUM = 0.5
LEARNING_RATE = 0.4  # of the first step; falls linearly to zero
SEED = 0  # of the split, the initial parameters and the order of the images


@dataclass(frozen=True)
class Recipe:
    """The settings of a run; the demo's two runs differ in ``dense`` only.

    Attributes:
        workers: number of processes, each with its own share of the training images.
        epochs: passes over the training images.
        dense: send raw float32 values instead, to owners, in as many bytes as a ring all-reduce.
        layers: width of every layer of the network.
    """

    workers: int = 4
    epochs: int = 20
    dense: bool = False
    layers: tuple[int, ...] = (64, 512, 256, 10)

    def __post_init__(self) -> None:
        """Refuse a recipe that cannot be trained, with the reason."""
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}, must be at least 2")
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, must be at least 1")
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{self.workers} workers leave fewer than {BATCH} training images each; "
                "use fewer workers"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every worker per epoch."""
        return TRAINING_IMAGES // self.workers // BATCH

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch


class Network:
    """A network of rectified linear layers with a softmax, whose parameters are one flat array.

    Args:
        sizes: width of every layer, from the inputs to the classes.

    Example:
        >>> import numpy as np
        >>> network = Network([4, 8, 3])
        >>> params = network.initial(seed=0)
        >>> network.numel, params.dtype, params.shape
        (67, dtype('float32'), (67,))
        >>> gradient = np.empty_like(params)
        >>> loss = network.gradient(params, np.ones((2, 4), np.float32), np.array([0, 2]), gradient)
        >>> loss > 0
        True
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._shapes = list(itertools.pairwise(sizes))
        self.numel = sum((fan_in + 1) * fan_out for fan_in, fan_out in self._shapes)

    def initial(self, seed: int | np.random.Generator) -> Floats:
        """Return initial parameters, float32 of shape (numel,): He-initialised weights, zero biases."""
        rng = np.random.default_rng(seed)
        params = np.zeros(self.numel, np.float32)
        for weights, _ in self._layers(params):
            scale = np.sqrt(2.0 / weights.shape[0])
            weights[...] = scale * rng.standard_normal(weights.shape)
        return params

    def gradient(self, params: Floats, inputs: Floats, labels: Integers, out: Floats) -> float:
        """Write the gradient of the mean cross-entropy into ``out`` and return that loss.

        Args:
            params: float32, shape (numel,), not modified.
            inputs: float32, shape (batch, sizes[0]), not modified.
            labels: int64, shape (batch,), the classes.
            out: float32, shape (numel,), overwritten.
        """
        layers = self._layers(params)
        activations = _forward(layers, inputs)
        error = np.exp(activations[-1] - activations[-1].max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -float(np.log(error[rows, labels] + 1e-12).mean())
        error[rows, labels] -= 1.0
        error /= len(labels)
        for index, (weights, bias) in reversed(list(enumerate(self._layers(out)))):
            np.matmul(activations[index].T, error, out=weights)
            error.sum(axis=0, out=bias)
            if index > 0:
                error = (error @ layers[index][0].T) * (activations[index] > 0)
        return loss

    def accuracy(self, params: Floats, inputs: Floats, labels: Integers) -> float:
        """Return the share of ``inputs`` whose largest output is the right class."""
        outputs = _forward(self._layers(params), inputs)[-1]
        return float((outputs.argmax(axis=1) == labels).mean())

    def _layers(self, params: Floats) -> list[tuple[Floats, Floats]]:
        """Return views of every layer's weights, shape (fan_in, fan_out), and bias, shape (fan_out,)."""
        layers = []
        begin = 0
        for fan_in, fan_out in self._shapes:
            middle = begin + fan_in * fan_out
            end = middle + fan_out
            layers.append((params[begin:middle].reshape(fan_in, fan_out), params[middle:end]))
            begin = end
        return layers


def _forward(layers: list[tuple[Floats, Floats]], inputs: Floats) -> list[Floats]:
    """Return the inputs and the output of every layer; all but the last are rectified."""
    activations = [inputs]
    for weights, bias in layers:
        activations.append(activations[-1] @ weights + bias)
        if len(activations) <= len(layers):
            np.maximum(activations[-1], 0.0, out=activations[-1])
    return activations


class Digits(NamedTuple):
    """The two halves of scikit-learn's scanned digits: pixels float32[n, 64], about zero mean, and classes int64[n]."""

    inputs: Floats
    labels: Integers
    test_inputs: Floats
    test_labels: Integers

    @staticmethod
    def load() -> Digits:
        """Return the digits, shuffled and split."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(SEED).permutation(len(images))
        inputs = (images[order] / 16.0).astype(np.float32)
        classes = labels[order].astype(np.int64)
        half = TRAINING_IMAGES
        inputs -= inputs[:half].mean(axis=0)
        return Digits(inputs[:half], classes[:half], inputs[half:], classes[half:])


class Trainer:
    """One worker's images, momentum and updates.

    Args:
        recipe: settings of the run.
        rank: number of the worker, from 0.
        digits: all images; the worker uses every ``recipe.workers``-th of the training half.
    """

    def __init__(self, recipe: Recipe, rank: int, digits: Digits) -> None:
        self.recipe = recipe
        self.rank = rank
        self.digits = digits
        self.network = Network(recipe.layers)
        self._gradient, self._update = np.empty((2, self.network.numel), np.float32)
        self._velocity = np.zeros(self.network.numel, np.float32)
        self._rng = np.random.default_rng((SEED, rank))

    def batches(self) -> Iterator[Integers]:
        """Yield the indices of every batch of one epoch, in random order."""
        images = np.arange(self.rank, TRAINING_IMAGES, self.recipe.workers)
        self._rng.shuffle(images)
        for index in range(self.recipe.steps_per_epoch):
            yield images[index * BATCH : (index + 1) * BATCH]

    def update(self, params: Floats, batch: Integers, step: int) -> tuple[Floats, float]:
        """Return the update of one step (float32, shape (numel,), overwritten by the next) and the loss."""
        inputs = self.digits.inputs[batch]
        labels = self.digits.labels[batch]
        loss = self.network.gradient(params, inputs, labels, self._gradient)
        self._velocity *= MOMENTUM
        self._velocity += self._gradient
        rate = LEARNING_RATE * (1.0 - step / self.recipe.steps)
        np.multiply(self._velocity, np.float32(-rate), out=self._update)
        return self._update, loss
