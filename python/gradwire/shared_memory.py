"""Arrays in named shared memory: what hosted models, teams of local workers and feeds have in common."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["FOLDER", "aligned", "arrays_at", "fence", "layout_of", "path_of", "span"]

FOLDER: Final = Path("/dev/shm")  # noqa: S108  (files there never reach a disk)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ALIGNMENT: Final = 64

_Layout = list[Any]  # [dtype, shape] of each array, as JSON has it


def path_of(kind: str, name: str) -> Path:
    """Return the file of this user's shared memory of a kind and name.

    Raises:
        ValueError: the name cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f'the name {name!r} has other characters than letters, digits, ".", "_" and "-", or not 1 to 64'
        )
    return FOLDER / f"gradwire-{os.getuid()}-{kind}-{name}"


def aligned(offset: int) -> int:
    """Return the next offset at which an array may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def layout_of(arrays: Iterable[NDArray[Any]]) -> _Layout:
    """Return the dtype and shape of every array, as JSON values."""
    return [[array.dtype.str, list(array.shape)] for array in arrays]


def span(layout: _Layout) -> int:
    """Return the bytes that arrays of a layout take, one after the other."""
    return sum(
        aligned(np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)))
        for dtype, shape in layout
    )


def arrays_at(memory: Any, start: int, layout: _Layout) -> list[NDArray[Any]]:
    """Return the arrays of a layout that begin at an offset of a buffer, as views."""
    found: list[NDArray[Any]] = []
    for dtype, shape in layout:
        found.append(np.ndarray(shape, dtype, memory, start))
        start += aligned(found[-1].nbytes)
    return found


def fence() -> None:
    """Keep loads and stores before this call before those after it: a lock's release and acquisition are ordered."""
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass
