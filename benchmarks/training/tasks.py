"""What is trained: a convolutional network on digits, and a character-level transformer on Python's own documentation.

Both have more than five million parameters and little arithmetic per step, on purpose. Four nodes share this machine's
few processors, and what is measured is the exchange: five million float32 gradients are 20 MB, of which a ring of four
sends 30 MB per node and step, 2.4 s at 100 Mbit/s. A step's arithmetic should be small beside that, as it is where a
GPU trains a model ten times the size behind a link ten times as fast, and must not vanish, or a faster link would gain
without end. So a node's batch has 64 characters, or 16 images of 12 x 12 pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its recipe.

    Attributes:
        model: makes it; seed it first.
        batch: the training batch of (seed, rank, step); every rank has its own.
        held_out: what the validation loss is computed on.
        optimizer: makes the optimiser of every method.
        target: the validation loss to reach.
        clip_norm: largest norm of the gradient.
        node_clip_norm: largest norm of one node's gradient, where what it adds to the parameters is averaged.
        outer_momentum: of the shared parameters, where nodes take a few steps alone.
        data: what identifies the data.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    held_out: Callable[[], Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    target: float
    clip_norm: float
    node_clip_norm: float
    outer_momentum: float
    data: str

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of a batch."""
        inputs, labels = batch
        logits = model(inputs)
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def validation_loss(self, model: nn.Module) -> float:
        """Return the loss on the held-out data."""
        with torch.no_grad():
            return float(self.loss(model, self.held_out()))


def _generator(seed: int, rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 64 + rank) * 1_000_000 + step)


# ---- digits ----------------------------------------------------------------------------------------------------------

SIDE, SHIFTS = 12, 5
TRAINING_IMAGES, DIGITS_BATCH = 1_437, 16


def digits_model() -> nn.Module:
    """Return two convolutions and three full layers: 5.5 million parameters, most of them in full layers."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 9, 4096),
        nn.ReLU(),
        nn.Linear(4096, 768),
        nn.ReLU(),
        nn.Linear(768, 10),
    )
    for layer in model:
        if hasattr(layer, "weight"):
            # PyTorch's own initial weights are too small for five rectified layers: nothing would happen for long.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


class Digits:
    """Scikit-learn's digits at random places of a larger, noisy image."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(pixels))
        images = np.float32(pixels[order] / 16.0).reshape(-1, 8, 8)
        self._images = torch.from_numpy(images)
        self._labels = torch.from_numpy(np.int64(labels[order]))
        self.digest = hashlib.sha256(images.tobytes()).hexdigest()[:16]
        generator = torch.Generator().manual_seed(0)
        self._held_out = self._placed(torch.arange(TRAINING_IMAGES, len(images)), generator)

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        """Return some training images, each at a place of its own."""
        generator = _generator(seed, rank, step)
        return self._placed(
            torch.randint(TRAINING_IMAGES, (DIGITS_BATCH,), generator=generator), generator
        )

    def held_out(self) -> Batch:
        """Return the images that nobody trains on."""
        return self._held_out

    def _placed(self, indices: torch.Tensor, generator: torch.Generator) -> Batch:
        count = len(indices)
        canvas = torch.randn((count, 1, SIDE, SIDE), generator=generator) * 0.1
        places = torch.randint(SHIFTS, (count, 2), generator=generator)
        for image, index, (row, column) in zip(canvas, indices, places.tolist(), strict=True):
            image[0, row : row + 8, column : column + 8] += self._images[index]
        return canvas, self._labels[indices]


def digits_task() -> Task:
    """Return the convolutional task."""
    data = Digits()
    return Task(
        model=digits_model,
        batch=data.batch,
        held_out=data.held_out,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        target=0.15,
        clip_norm=5.0,
        # The first steps' gradients, which alone are as large, agree: their mean is no smaller than each.
        node_clip_norm=5.0,
        outer_momentum=0.5,
        data=f"scikit-learn digits, {data.digest}",
    )


# ---- text ------------------------------------------------------------------------------------------------------------

SYMBOLS, CONTEXT, WIDTH, HEADS, LAYERS = 128, 32, 256, 4, 7
TEXT_BATCH, HELD_OUT_SEQUENCES = 2, 32


class Transformer(nn.Module):
    """A decoder of pre-normalised blocks: 5.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits of the next symbol at every place: float32[sequences, places, symbols]."""
        hidden = self.symbols(text) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


class Text:
    """The documentation that ``help()`` shows, as ASCII: English prose that comes with every Python."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        symbols = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        self._symbols = torch.from_numpy(np.int64(symbols))
        self._training = len(symbols) * 9 // 10
        self.digest = hashlib.sha256(symbols.tobytes()).hexdigest()[:16]
        starts = torch.linspace(
            self._training, len(symbols) - CONTEXT - 2, HELD_OUT_SEQUENCES, dtype=torch.int64
        )
        self._held_out = self._sequences(starts)

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        """Return some sequences and the same shifted by one."""
        latest = self._training - CONTEXT - 1
        generator = _generator(seed, rank, step)
        return self._sequences(torch.randint(latest, (TEXT_BATCH,), generator=generator))

    def held_out(self) -> Batch:
        """Return sequences from the last tenth of the text."""
        return self._held_out

    def _sequences(self, starts: torch.Tensor) -> Batch:
        windows = torch.stack([self._symbols[start : start + CONTEXT + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:]


def text_task() -> Task:
    """Return the transformer's task."""
    data = Text()
    return Task(
        model=Transformer,
        batch=data.batch,
        held_out=data.held_out,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        target=2.3,
        clip_norm=1.0,
        # Independent gradients, of four nodes: their mean has half their norm (Lin et al. 2018, section 3.2).
        node_clip_norm=2.0,
        outer_momentum=0.7,
        data=f"pydoc_data.topics, {data.digest}",
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits_task, "text": text_task}
