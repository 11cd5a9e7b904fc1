"""The trainings: a convolutional network on digits, and a character-level transformer on Python's documentation.

Both have more than five million parameters and little arithmetic per step, on purpose: nodes share few processors, and
the benchmark measures the exchange. Five million float32 gradients are 20 MB, of which a ring of four sends 30 MB per
node and step, 2.4 s at 100 Mbit/s. A step's arithmetic must be small beside that, as where a GPU trains a larger model
behind a faster link, but must not vanish, or a faster link would gain without end. So a node's batch has 64 characters,
or 16 images of 12 x 12 pixels.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Task:
    """A model, its data and its recipe."""

    held_out: Batch  # of the validation loss
    learning_rate: float  # of SGD with a momentum of 0.9
    target: float  # validation loss to reach
    clip_norm: float  # largest norm of the gradient
    # Whether the nodes' gradients are independent: the norm of their mean is then smaller by the root of their number.
    are_independent: bool

    def model(self) -> nn.Module:
        """Return a new model; seed torch first."""
        raise NotImplementedError

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        """Return the training batch of one node's step."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def validation_loss(self, model: nn.Module) -> float:
        """Return the loss on the held-out data."""
        with torch.no_grad():
            return float(self.loss(model, self.held_out))

    def generator(self, seed: int, rank: int, step: int) -> torch.Generator:
        """Return the random numbers of one batch."""
        return torch.Generator().manual_seed((seed * 64 + rank) * 1_000_000 + step)


class Digits(Task):
    """Scikit-learn's digits at random places of a larger, noisy image."""

    IMAGES, BATCH, SIDE, SHIFTS = 1_437, 16, 12, 5
    learning_rate, target, clip_norm = 0.05, 0.15, 5.0
    # The first steps' gradients, the only ones as large, agree: their mean is no smaller than each.
    are_independent = False

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(pixels))
        self._images = torch.from_numpy(np.float32(pixels[order] / 16.0).reshape(-1, 8, 8))
        self._labels = torch.from_numpy(np.int64(labels[order]))
        generator = torch.Generator().manual_seed(0)
        self.held_out = self._placed(torch.arange(self.IMAGES, len(labels)), generator)

    def model(self) -> nn.Module:
        """Return two convolutions and three linear layers: 5.5 million parameters, most of them in linear layers."""
        convolutions: list[nn.Module] = []
        for channels in ((1, 32), (32, 64)):
            convolutions += [nn.Conv2d(*channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        linear = [nn.Linear(64 * 9, 4096), nn.ReLU(), nn.Linear(4096, 768), nn.ReLU()]
        model = nn.Sequential(*convolutions, nn.Flatten(), *linear, nn.Linear(768, 10))
        for layer in model:
            if hasattr(layer, "weight"):
                # PyTorch's own initial weights are too small for five rectified layers.
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        return model

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        generator = self.generator(seed, rank, step)
        indices = torch.randint(self.IMAGES, (self.BATCH,), generator=generator)
        return self._placed(indices, generator)

    def _placed(self, indices: torch.Tensor, generator: torch.Generator) -> Batch:
        count = len(indices)
        canvas = torch.randn((count, 1, self.SIDE, self.SIDE), generator=generator) * 0.1
        places = torch.randint(self.SHIFTS, (count, 2), generator=generator)
        for image, index, (row, column) in zip(canvas, indices, places.tolist(), strict=True):
            image[0, row : row + 8, column : column + 8] += self._images[index]
        return canvas, self._labels[indices]


class Transformer(nn.Module):
    """A decoder of pre-normalised blocks, by default with 5.6 million parameters."""

    SYMBOLS, HEADS = 128, 4

    def __init__(self, context: int = 32, width: int = 256, layers: int = 7) -> None:
        super().__init__()
        self.symbols = nn.Embedding(self.SYMBOLS, width)
        self.places = nn.Embedding(context, width)
        sizes, options = (width, self.HEADS, 4 * width, 0.0, "gelu"), {"norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*sizes, **options, batch_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.SYMBOLS)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits of the next symbol at every place: float32[sequences, places, symbols]."""
        hidden = self.symbols(text) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


class Text(Task):
    """The documentation that ``help()`` shows, as ASCII: English prose that comes with every Python.

    Attributes:
        digest: check sum of the text.
    """

    BATCH, HELD_OUT, CONTEXT = 2, 32, 32
    learning_rate, target, clip_norm = 0.1, 2.3, 1.0
    # Lin et al. 2018, section 3.2
    are_independent = True

    def __init__(self) -> None:
        text = self.text().encode("ascii", "replace")
        self.digest = zlib.crc32(text)
        self._symbols = torch.from_numpy(np.int64(np.frombuffer(text, np.uint8)))
        self._training, last = len(text) * 9 // 10, len(text) - self.CONTEXT - 2
        starts = torch.linspace(self._training, last, self.HELD_OUT, dtype=torch.int64)
        self.held_out = self._sequences(starts)

    def text(self) -> str:
        """Return all text, training and held out."""
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))

    def model(self) -> nn.Module:
        return Transformer()

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        latest = self._training - self.CONTEXT - 1
        generator = self.generator(seed, rank, step)
        return self._sequences(torch.randint(latest, (self.BATCH,), generator=generator))

    def _sequences(self, starts: torch.Tensor) -> Batch:
        """Return sequences, and the same shifted by one."""
        length = self.CONTEXT + 1
        windows = torch.stack([self._symbols[start : start + length] for start in starts])
        return windows[:, :-1], windows[:, 1:]


TASKS: dict[str, type[Task]] = {"digits": Digits, "text": Text}
