"""Memory in which the codec works for tensors that it cannot use in place."""

from __future__ import annotations

import torch

__all__ = ["Staging"]

_CODED = (torch.float32, torch.float64)


class Staging:
    """Memory in which the codec works for one tensor: the tensor's own where possible.

    A contiguous float32 or float64 tensor is its own staging, without a copy. Any other tensor is copied to float32
    (float64 stays) on the same device and back.

    Args:
        tensor: of a ``DTensor`` only this rank's shard.
        on_host: whether the codec works in host memory, as the workers of one machine do: a tensor on a GPU is then
            copied there and back.

    Attributes:
        memory: holds the tensor's values after ``fetch``.
    """

    def __init__(self, tensor: torch.Tensor, *, on_host: bool = False) -> None:
        tensor = tensor.detach()
        self._tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self.memory = self._tensor
        moves = on_host and tensor.is_cuda
        if moves or tensor.dtype not in _CODED or not self._tensor.is_contiguous():
            dtype = tensor.dtype if tensor.dtype in _CODED else torch.float32
            place = "cpu" if moves else self._tensor.device
            shape = self._tensor.shape
            self.memory = self._tensor.new_empty(shape, dtype=dtype, device=place, pin_memory=moves)

    @property
    def is_rounded(self) -> bool:
        """Whether the tensor has less precision than the memory."""
        return self.memory.dtype != self._tensor.dtype

    def fetch(self) -> torch.Tensor:
        """Return the memory with the tensor's values."""
        if self.memory is not self._tensor:
            self.memory.copy_(self._tensor)
        return self.memory

    def fetch_moved(self) -> torch.Tensor:
        """Return the tensor's values, after the memory held them once and the tensor has changed since.

        Like ``fetch``, but the memory keeps the bits that half precision has rounded off: only the difference is added.
        """
        if not self.is_rounded:
            return self.fetch()
        before = self.memory.clone()
        rounded = before.to(self._tensor.dtype).to(before.dtype)
        return self.fetch().sub_(rounded).add_(before)

    def store(self) -> torch.Tensor:
        """Return the tensor with the values of the memory."""
        if self.memory is not self._tensor:
            self._tensor.copy_(self.memory)
        return self._tensor
