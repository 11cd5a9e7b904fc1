"""Memory that is used again: fresh pages cost a fault each, which is more than encrypting what goes into them."""

from __future__ import annotations

import functools
import sys
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

SMALL_BYTES: Final = 16_384  # the allocator keeps small blocks by itself
UNUSED_REFERENCES: Final = 3  # the pool's deque, the local name, and the argument of getrefcount


class BufferPool:
    """Hands out arrays and takes them back by itself: one that nobody refers to any more is given out again.

    Every memoryview of an array, and every slice of one, keeps a reference to the array, so the reference count tells
    whether somebody still looks at it. Not thread-safe.

    Args:
        kept_bytes_max: the pool itself keeps no more memory than this; what is lent beyond it is freed after its use.
    """

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self.kept_bytes = 0
        self._classes: dict[int, deque[NDArray[np.uint8]]] = {}

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an array of at least ``nbytes`` (at most a quarter more), dtype uint8, with arbitrary contents."""
        if nbytes < SMALL_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        size = _rounded_up(nbytes)
        kept = self._classes.get(size)
        if kept is None:
            kept = self._classes[size] = deque()
        elif kept:
            array = kept[
                0
            ]  # the longest lent; one that is still in use is asked about again after the others
            kept.rotate(-1)
            if sys.getrefcount(array) <= UNUSED_REFERENCES:
                return array
        array = np.empty(size, dtype=np.uint8)
        if self._make_room(size):
            kept.append(array)
            self.kept_bytes += size
        return array

    def _make_room(self, nbytes: int) -> bool:
        """Forget arrays of other sizes, the longest unused size first, until ``nbytes`` more may be kept."""
        for size in list(self._classes):
            if self.kept_bytes + nbytes <= self._kept_bytes_max:
                break
            if size == nbytes:
                continue
            self.kept_bytes -= size * len(self._classes.pop(size))
        return self.kept_bytes + nbytes <= self._kept_bytes_max


@functools.lru_cache(maxsize=256)
def _rounded_up(nbytes: int) -> int:
    """Return the size with only its three leading bits kept, rounded up, so that few sizes exist."""
    shift = max(0, nbytes.bit_length() - 3)
    return -(-nbytes >> shift) << shift


def flat_view(buffer: object) -> memoryview:
    """Return the bytes of anything contiguous with the buffer protocol, one dimension, format "B".

    Raises:
        TypeError: it has no contiguous buffer.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise TypeError(
            f"a buffer of {view.nbytes} bytes is not C-contiguous; pass a contiguous one (numpy.ascontiguousarray "
            "copies one)"
        )
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B")
