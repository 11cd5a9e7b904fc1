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

    Raises:
        TypeError: the tensor's elements are not real floating-point numbers.
    """

    def __init__(self, tensor: torch.Tensor, *, on_host: bool = False) -> None:
        if not tensor.is_floating_point():
            raise TypeError(
                f"a tensor of {tensor.dtype} cannot be shared: only floating-point ones can; "
                "torch.view_as_real views complex ones so"
            )
        self._source = tensor
        self._copy: torch.Tensor | None = None
        shard = self.tensor
        moves = on_host and shard.is_cuda
        if moves or shard.dtype not in _CODED or not shard.is_contiguous():
            dtype = shard.dtype if shard.dtype in _CODED else torch.float32
            place = "cpu" if moves else shard.device
            self._copy = shard.new_empty(shard.shape, dtype=dtype, device=place, pin_memory=moves)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor as it is now: ``Module.to`` and others give a parameter other memory."""
        tensor = self._source.detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    @property
    def memory(self) -> torch.Tensor:
        """Holds the tensor's values after ``fetch``."""
        return self.tensor if self._copy is None else self._copy

    @property
    def is_rounded(self) -> bool:
        """Whether the tensor has less precision than the memory."""
        return self._copy is not None and self._copy.dtype != self._source.dtype

    def fetch(self) -> torch.Tensor:
        """Return the memory with the tensor's values."""
        return self.tensor if self._copy is None else self._copy.copy_(self.tensor)

    def fetch_moved(self) -> torch.Tensor:
        """Return the tensor's values, after the memory held them once and the tensor has changed since.

        Like ``fetch``, but the memory keeps the bits that half precision has rounded off: only the difference is added.
        """
        if not self.is_rounded:
            return self.fetch()
        before = self.memory.clone()
        rounded = before.to(self._source.dtype).to(before.dtype)
        return self.fetch().sub_(rounded).add_(before)

    def store(self) -> torch.Tensor:
        """Return the tensor with the values of the memory."""
        return self.tensor if self._copy is None else self.tensor.copy_(self._copy)
