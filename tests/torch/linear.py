"""A model whose gradients are its inputs, so that all gradients are known."""

from __future__ import annotations

import torch

SHAPES = ((40, 30), (30,), (30, 50), (50,), (5, 7, 3))
NUMEL = 40 * 30 + 30 + 30 * 50 + 50 + 5 * 7 * 3
BUCKET_CAP_MB = 0.004  # about a thousand elements: several buckets


class Linear(torch.nn.Module):
    """The sum of the products of parameters and inputs: d loss / d parameter = input.

    Args:
        dtype: of the parameters.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES
        )

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Use the parameters out of order, so that DDP rearranges its buckets after the first step."""
        total = torch.zeros(())
        for place in (3, 0, 4, 1, 2):
            total = total + (self.weights[place] * inputs[place]).sum()
        return total

    def flat(self) -> torch.Tensor:
        """Return a copy of all parameters as one vector."""
        return torch.cat([weight.detach().flatten() for weight in self.weights])


def inputs(rank: int, step: int) -> list[torch.Tensor]:
    """Return multiples of 2^-10 below 1: sums and halves of them are exact in float32."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randint(-1023, 1024, shape, generator=generator) / 1024.0 for shape in SHAPES]


def flat_inputs(rank: int, step: int) -> torch.Tensor:
    return torch.cat([one.flatten() for one in inputs(rank, step)])
