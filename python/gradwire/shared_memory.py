"""Arrays in named shared memory: what hosted models, teams of local workers and feeds have in common."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FOLDER",
    "aligned",
    "arrays_at",
    "create_locked",
    "fence",
    "is_locked",
    "layout_of",
    "open_file",
    "path_of",
    "release",
    "span",
]

FOLDER: Final = Path("/dev/shm")  # noqa: S108  (files there never reach a disk)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ALIGNMENT: Final = 64
_TRIES, _RETRY_S = 20, 0.001

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


# ---- files whose lock says that a process lives ----------------------------------------------------------------------


def open_file(path: Path, flags: int = os.O_RDWR) -> BufferedRandom:
    """Open a file of this user.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: another user's, or no regular file.
    """
    file = os.fdopen(os.open(path, flags | os.O_NOFOLLOW, 0o600), "r+b")
    found = os.fstat(file.fileno())
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        file.close()
        raise PermissionError(f"{path} belongs to another user, or is no file")
    return file


def create_locked(path: Path) -> BufferedRandom:
    """Create a file that is locked until this process closes it or ends; replace one that a dead process has left.

    A forked child does not keep the lock.

    Raises:
        FileExistsError: a living process holds the lock.
    """
    for _ in range(
        _TRIES
    ):  # another process may look at the lock, or create the file, at the same time
        with suppress(BlockingIOError, FileExistsError, FileNotFoundError):
            if path.exists():
                with open_file(path) as leftover:
                    _lock(leftover, path)
                    path.unlink()
            file = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                _lock(file, path)
            except OSError:
                file.close()
                raise
            os.register_at_fork(after_in_child=file.close)
            return file
        time.sleep(_RETRY_S)
    raise FileExistsError(f"a living process holds {path}")


def _lock(file: BufferedRandom, path: Path) -> None:
    """Lock a file; raise `FileNotFoundError` if another process has removed or replaced it meanwhile."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise FileNotFoundError(path)


def is_locked(file: BufferedRandom) -> bool:
    """Return whether the process that created a file still holds its lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def release(file: BufferedRandom, path: Path, process: int) -> None:
    """Remove a locked file; a forked child leaves it to the process that created it."""
    if os.getpid() == process and not file.closed:
        path.unlink(missing_ok=True)
        file.close()
