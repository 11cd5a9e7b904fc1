"""A small fully connected network in NumPy whose parameters are one flat array, as an exchange wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Integers: TypeAlias = NDArray[np.int64]


class Network:
    """Rectified linear layers under a softmax, for classification.

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
        self.sizes = tuple(sizes)
        self._shapes = list(zip(self.sizes, self.sizes[1:], strict=False))
        self.numel = sum((fan_in + 1) * fan_out for fan_in, fan_out in self._shapes)

    def initial(self, seed: int) -> Floats:
        """Return fresh parameters, float32 of shape (numel,): He-initialised weights, zero biases."""
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
        activations = self._forward(layers, inputs)
        probabilities = _softmax(activations[-1])
        rows = np.arange(len(labels))
        loss = -float(np.log(probabilities[rows, labels] + 1e-12).mean())
        error = probabilities
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
        outputs = self._forward(self._layers(params), inputs)[-1]
        return float((outputs.argmax(axis=1) == labels).mean())

    def _layers(self, params: Floats) -> list[tuple[Floats, Floats]]:
        """Return views of every layer's weights, shape (fan_in, fan_out), and bias, shape (fan_out,)."""
        layers, begin = [], 0
        for fan_in, fan_out in self._shapes:
            middle = begin + fan_in * fan_out
            weights = params[begin:middle].reshape(fan_in, fan_out)
            layers.append((weights, params[middle : middle + fan_out]))
            begin = middle + fan_out
        return layers

    @staticmethod
    def _forward(layers: list[tuple[Floats, Floats]], inputs: Floats) -> list[Floats]:
        """Return the inputs and the output of every layer; all but the last are rectified."""
        activations = [inputs]
        for index, (weights, bias) in enumerate(layers):
            output = activations[-1] @ weights + bias
            if index + 1 < len(layers):
                np.maximum(output, 0.0, out=output)
            activations.append(output)
        return activations


def _softmax(outputs: Floats) -> Floats:
    shifted: Floats = outputs - outputs.max(axis=1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=1, keepdims=True)
    return shifted
