"""Whether tensors have changed since they were marked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arrays import sampled

__all__ = ["Marks"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Marks:
    """Tells whether tensors are as they were when they were marked.

    torch counts the changes of a tensor, but not what is written through ``data``. So the bits of a sample are added up
    as well; it has all elements of a small model.
    """

    def __init__(self) -> None:
        self._counts: list[tuple[int, tuple[int, ...]]] = []
        self._sums: list[torch.Tensor] = []
        # Views of the tensors' memory, which hold it, and what they were made of: making them takes longer than their
        # sums.
        self._layout: list[tuple[int, tuple[int, ...]]] = []
        self._samples: list[list[torch.Tensor]] = []
        self._gaps: list[int] = []  # numbers of the tensors that are no whole piece of memory

    def set(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark tensors as they are now."""
        self._counts = _counts_of(tensors)
        self._sums = self._sums_of(tensors)

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors are as they were when they were marked, as far as counts and sums tell."""
        if self._counts != _counts_of(tensors):
            return False
        sums = self._sums_of(tensors)
        if [total.device for total in sums] != [total.device for total in self._sums]:
            return False
        return all(map(torch.equal, sums, self._sums))

    def _sums_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        layout = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
        if layout != self._layout:
            ordered = list(map(_in_order, tensors))
            flat = [tensor.view(-1) for tensor in ordered if tensor.is_contiguous()]
            self._samples = _alike(sampled(flat))
            self._gaps = [
                index for index, tensor in enumerate(ordered) if not tensor.is_contiguous()
            ]
            self._layout = layout
        others = [[tensors[index].reshape(-1)] for index in self._gaps]
        return [_sum_of_bits(torch.cat(samples)) for samples in (*self._samples, *others)]


def _counts_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Return torch's counts of changes, and the strides: a transposed tensor has the same sum."""
    return [(tensor._version, tensor.stride()) for tensor in tensors]


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in the order of the memory, which is contiguous also of ``channels_last``."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _alike(samples: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return lists of tensors that can be concatenated."""
    lists: dict[object, list[torch.Tensor]] = {}
    for sample in samples:
        lists.setdefault((sample.device, sample.dtype, sample.shape[1:]), []).append(sample)
    return list(lists.values())


def _sum_of_bits(values: torch.Tensor) -> torch.Tensor:
    """Return a sum in which, other than in one of rounded numbers, no small change is lost."""
    return values.view(_INTEGERS[values.element_size()]).sum()
