"""Where the codec reads and writes a tensor that it cannot take as it is."""

from __future__ import annotations

import torch

__all__ = ["Staging"]

_CODED = (torch.float32, torch.float64)


class Staging:
    """Host memory in which the codec works for one tensor: the tensor's own where that will do.

    A contiguous float32 or float64 tensor in host memory is its own staging; nothing is copied. Any other is copied to
    float32 (float64 stays) in host memory and back; for a GPU that memory is pinned, the copies run in a stream of
    their own, and the one who asks for them waits.

    Args:
        tensor: work queued on the current stream may still be writing it. Of a ``DTensor`` only this rank's shard.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        self.is_own = not tensor.is_cuda and tensor.dtype in _CODED and self._tensor.is_contiguous()
        self._ready: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._host = self._tensor if self.is_own else self._make_host()
        if tensor.is_cuda:
            self._stream = torch.cuda.Stream(tensor.device)
            self.mark_ready()

    @property
    def host(self) -> torch.Tensor:
        """The memory; it holds the tensor's values after ``fetch``."""
        return self._host

    @property
    def is_rounded(self) -> bool:
        """Whether the tensor holds less precision than host memory does."""
        return self._host.dtype != self._tensor.dtype

    def mark_ready(self) -> None:
        """Let the next ``fetch`` wait for what the current stream of the tensor's GPU has been given so far."""
        if self._tensor.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._tensor.device))

    def fetch(self) -> torch.Tensor:
        """Return the tensor's values in host memory; blocks until a GPU has written and copied them."""
        if self._stream is not None and self._ready is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                self._host.copy_(self._tensor, non_blocking=True)
            self._stream.synchronize()
        elif not self.is_own:
            self._host.copy_(self._tensor)
        return self._host

    def fetch_moved(self) -> torch.Tensor:
        """Return the values in host memory, if those there before were the tensor's and it has moved since.

        Like ``fetch``, but what half precision has rounded off the values in host memory stays with them: only the
        difference comes in.
        """
        if not self.is_rounded:
            return self.fetch()
        before = self._host.clone()
        rounded = before.to(self._tensor.dtype).to(before.dtype)
        moved = self.fetch()
        moved.sub_(rounded).add_(before)
        return moved

    def fill(self, value: float) -> None:
        """Set all elements in host memory."""
        self._host.fill_(value)

    def store(self) -> torch.Tensor:
        """Return the tensor with the values that host memory holds now; for a GPU the copy is done."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._tensor.copy_(self._host, non_blocking=True)
            self._stream.synchronize()
        elif not self.is_own:
            self._tensor.copy_(self._host)
        return self._tensor

    def _make_host(self) -> torch.Tensor:
        dtype = self._tensor.dtype if self._tensor.dtype in _CODED else torch.float32
        return torch.empty(self._tensor.shape, dtype=dtype, pin_memory=self._tensor.is_cuda)
