"""Host memory for tensors that the codec cannot use in place."""

from __future__ import annotations

import torch

__all__ = ["Staging"]

_CODED = (torch.float32, torch.float64)


class Staging:
    """Host memory in which the codec works for one tensor: the tensor's own where possible.

    A contiguous float32 or float64 tensor in host memory is its own staging, without a copy. Any other tensor is copied
    to float32 (float64 stays) in host memory and back. For a GPU that memory is pinned and the copies run in a stream
    of their own, for which only the caller waits.

    Args:
        tensor: work queued on the current stream may still be writing it. Of a ``DTensor`` only this rank's shard.

    Attributes:
        host: the memory; holds the tensor's values after ``fetch``.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self._ready: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.host = self._tensor
        if tensor.is_cuda or tensor.dtype not in _CODED or not self._tensor.is_contiguous():
            dtype = tensor.dtype if tensor.dtype in _CODED else torch.float32
            self.host = torch.empty(self._tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self._stream = torch.cuda.Stream(tensor.device)
            self.mark_ready()

    @property
    def is_rounded(self) -> bool:
        """Whether the tensor has less precision than host memory."""
        return self.host.dtype != self._tensor.dtype

    def mark_ready(self) -> None:
        """Let the next ``fetch`` wait for the work queued so far on the current stream of the tensor's GPU."""
        if self._tensor.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._tensor.device))

    def fetch(self) -> torch.Tensor:
        """Return the tensor's values in host memory; blocks until a GPU has written and copied them."""
        if self._stream is not None and self._ready is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                self.host.copy_(self._tensor, non_blocking=True)
            self._stream.synchronize()
        elif self.host is not self._tensor:
            self.host.copy_(self._tensor)
        return self.host

    def fetch_moved(self) -> torch.Tensor:
        """Return the tensor's values, after host memory held them once and the tensor has changed since.

        Like ``fetch``, but host memory keeps the bits that half precision has rounded off: only the difference is
        added.
        """
        if not self.is_rounded:
            return self.fetch()
        before = self.host.clone()
        rounded = before.to(self._tensor.dtype).to(before.dtype)
        return self.fetch().sub_(rounded).add_(before)

    def store(self) -> torch.Tensor:
        """Return the tensor with the values of host memory; for a GPU the copy is done."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._tensor.copy_(self.host, non_blocking=True)
            self._stream.synchronize()
        elif self.host is not self._tensor:
            self._tensor.copy_(self.host)
        return self._tensor
