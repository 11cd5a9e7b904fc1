"""Arrays in named shared memory: what hosted models, teams of local workers and feeds have in common."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import mmap
import os
import pwd
import re
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FOLDER",
    "STATE_SUFFIX",
    "SharedFile",
    "Usage",
    "aligned",
    "arrays_at",
    "create_locked",
    "fence",
    "free_leftovers",
    "is_held",
    "is_locked",
    "layout_of",
    "open_file",
    "path_of",
    "release",
    "shortage",
    "span",
    "usage",
]

FOLDER: Final = Path("/dev/shm")  # noqa: S108  (files there never reach a disk)
PREFIX: Final = "gradwire-"
# Of a file NAME.token.state that belongs to the file NAME, and has no lock of its own.
STATE_SUFFIX: Final = ".state"

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ALIGNMENT: Final = 64
_MAGIC: Final = b"gwshare1"
# Magic, bytes of the document, six numbers of the caller's. The document follows, then the data.
_HEADER: Final = struct.Struct("<8s7Q")
# Errors of opening what another user has made, a link, a folder, a socket, or a pipe, which is Python's own error.
_TAKEN: Final = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO, None)
_TRIES = 20
_RETRY_S = 0.001

_Layout = list[Any]  # [dtype, shape] of each array, as JSON has it


def path_of(kind: str, name: str) -> Path:
    """Return the file of this user's shared memory of a kind and name.

    Raises:
        ValueError: the name cannot be used.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f'the name {name!r} has other characters than letters, digits, ".", "_" and "-", or not 1 to 64'
        )
    return FOLDER / f"{PREFIX}{os.getuid()}-{kind}-{name}"


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
    arrays: list[NDArray[Any]] = []
    for dtype, shape in layout:
        arrays.append(np.ndarray(shape, dtype, memory, start))
        start += aligned(arrays[-1].nbytes)
    return arrays


def fence() -> None:
    """Keep the loads and stores before this call before the loads and stores after it."""
    # Python has no fence of its own, but the release and the acquisition of a lock are ordered.
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


# ---- files whose lock says that a process lives ----------------------------------------------------------------------


def open_file(path: Path, flags: int = os.O_RDWR) -> BufferedRandom:
    """Open a file of this user.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the file belongs to another user, or is no regular file.
    """
    try:
        file = os.fdopen(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), "r+b")
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise PermissionError(_describe_taken(path)) from None
    status = os.fstat(file.fileno())
    # Anybody may make files in the folder, so the name alone does not show whose the file is.
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        file.close()
        raise PermissionError(_describe_taken(path))
    return file


def _describe_taken(path: Path) -> str:
    try:
        user = path.lstat().st_uid
        owner = pwd.getpwuid(user).pw_name
    except FileNotFoundError:
        return f"{path} cannot be created"
    except KeyError:
        owner = f"user {user}"
    whose = "is no regular file" if user == os.getuid() else "belongs to another user"
    return f"{path} {whose} ({owner}): take another name, or have {owner} remove it"


def create_locked(path: Path, what: str) -> BufferedRandom:
    """Create a file that is locked until this process closes it or ends; remove all that dead processes have left.

    A run that is killed cannot remove its files, and the next run has another name, so whoever creates or releases a
    file removes them. A forked child does not keep the lock.

    Args:
        path: of the file.
        what: what a process that holds the lock does, for the error.

    Raises:
        ValueError: a living process holds the lock.
    """
    free_leftovers()
    # Another process may look at the lock, or create the file, at the same time.
    for _ in range(_TRIES):
        with suppress(BlockingIOError, FileExistsError, FileNotFoundError):
            if os.path.lexists(path):
                with open_file(path) as leftover:
                    _lock(leftover, path)
                    path.unlink()
            file = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                _lock(file, path)
            except OSError:
                file.close()
                raise
            # Nothing can take a function back from the system's list, so the list must not keep the file.
            os.register_at_fork(after_in_child=functools.partial(_close, weakref.ref(file)))
            return file
        time.sleep(_RETRY_S)
    raise ValueError(f"a living process {what}: take another name, or end that process")


def _close(reference: weakref.ref[BufferedRandom]) -> None:
    file = reference()
    if file is not None:
        file.close()


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


def is_held(path: Path) -> bool:
    """Return whether a living process of this user holds the lock of a file; another user's file says nothing."""
    try:
        with open_file(path) as file:
            return is_locked(file)
    except OSError:
        return False


def release(file: BufferedRandom, path: Path, process: int) -> None:
    """Remove a locked file, and all that dead processes have left; a forked child leaves the file to its creator."""
    if os.getpid() == process and not file.closed:
        path.unlink(missing_ok=True)
        file.close()
        # A team's killed rank 0, say: the workers that end because of that are the last that can do so.
        free_leftovers()


class Usage(NamedTuple):
    """Bytes of shared memory in this user's files.

    Attributes:
        held_bytes: of files that a living process holds.
        left_bytes: of files whose processes have ended without removing them.
    """

    held_bytes: int
    left_bytes: int


def free_leftovers() -> Usage:
    """Remove this user's files that no living process holds, of whatever name; return what was there."""
    return _survey(frees=True)


def usage() -> Usage:
    """Return the bytes of this user's files; remove none."""
    return _survey(frees=False)


def _survey(*, frees: bool) -> Usage:
    held_bytes = 0
    left_bytes = 0
    for path in FOLDER.glob(f"{PREFIX}*"):
        # Other users have files of such names, too, and processes end and begin meanwhile.
        with suppress(OSError), open_file(path) as file:
            nbytes = 512 * os.fstat(file.fileno()).st_blocks
            try:
                # Whoever holds the lock may remove the file: its creator tries again if it is just creating it.
                _lock(file, path)
            except BlockingIOError:
                held_bytes += nbytes
                continue
            if path.suffix == STATE_SUFFIX and is_held(path.with_name(path.name.rsplit(".", 2)[0])):
                held_bytes += nbytes
                continue
            left_bytes += nbytes
            if frees:
                path.unlink()
    return Usage(held_bytes, left_bytes)


def shortage(what: str, nbytes: int, path: Path, error: OSError, *, remedy: str = "") -> OSError:
    """Return the error of memory that the machine does not have, with the numbers and the way out.

    Args:
        what: needs the memory, with its verb: "two batches do".
        nbytes: that are needed.
        path: of the file.
        error: the system's.
        remedy: another way out, besides more memory.
    """
    status = os.statvfs(path.parent)
    total_bytes = status.f_blocks * status.f_frsize
    free_bytes = status.f_bavail * status.f_frsize
    megabytes = -(-(total_bytes - free_bytes + nbytes) // 1_000_000)
    return OSError(
        error.errno,
        f"{what} not fit {path.parent} ({nbytes:,} bytes of shared memory are needed, {free_bytes:,} of "
        f"{total_bytes:,} are free: {error.strerror}): enlarge it (docker run --shm-size={megabytes}m; in Kubernetes "
        f"an emptyDir with medium: Memory; else mount -o remount,size={megabytes}m {path.parent})"
        + (f", or {remedy}" if remedy else ""),
        str(path),
    )


class SharedFile:
    """A document and bytes in shared memory, which one process hosts, and which others map while that process lives.

    Args:
        file: with a complete header; closed with this object.
        access: of the mapping, as ``mmap`` has it.

    Attributes:
        document: a JSON value, as the host gave it.
        words: six uint64 of the caller's; zeros at first.
        data: uint8, the bytes; zeros at first.
    """

    def __init__(self, file: BufferedRandom, access: int) -> None:
        self._file = file
        _, nbytes, *_ = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, 0))
        self.document: Any = json.loads(os.pread(file.fileno(), nbytes, _HEADER.size))
        self._memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)
        self.words = self._memory[16 : _HEADER.size].view(np.uint64)
        self.data = self._memory[aligned(_HEADER.size + nbytes) :]
        self._finalizer: Any = weakref.finalize(self, file.close)

    @classmethod
    def host(
        cls,
        path: Path,
        lock: BufferedRandom,
        document: Any,
        nbytes: int,
        *,
        what: str,
        remedy: str = "",
    ) -> SharedFile:
        """Fill a file that this process has created and locked; others find it after ``publish``.

        Args:
            path: of the file.
            lock: the open file.
            document: a JSON value.
            nbytes: of the data.
            what: needs the memory, see `shortage`.
            remedy: see `shortage`.

        Raises:
            OSError: there is too little shared memory; the file is removed.
        """
        text = json.dumps(document).encode()
        size = aligned(_HEADER.size + len(text)) + nbytes
        try:
            os.posix_fallocate(lock.fileno(), 0, size)
        except OSError as error:
            os.ftruncate(lock.fileno(), 0)  # gives back the part that was there
            refusal = shortage(what, size, path, error, remedy=remedy)
            release(lock, path, os.getpid())
            raise refusal from None
        os.pwrite(lock.fileno(), _HEADER.pack(b"", len(text), *[0] * 6) + text, 0)
        # A mapping duplicates its file's descriptor, and a forked child keeps mappings: this one must not be locked.
        return cls(open_file(path), mmap.ACCESS_WRITE)

    @classmethod
    def attach(cls, path: Path, access: int) -> SharedFile | None:
        """Return the file that a living process hosts; None if there is none yet.

        Raises:
            PermissionError: the file belongs to another user.
        """
        try:
            file = open_file(path)
        except FileNotFoundError:
            return None
        if is_locked(file) and os.pread(file.fileno(), len(_MAGIC), 0) == _MAGIC:
            shared = cls(file, access)
            # A new host holds the lock of a dead one's file for the moment in which it removes the file.
            if shared.is_live:
                return shared
        file.close()
        return None

    def publish(self) -> None:
        """Let others attach."""
        fence()
        self._memory[: len(_MAGIC)] = np.frombuffer(_MAGIC, np.uint8)

    @property
    def is_live(self) -> bool:
        """Whether the host lives and has not released the file."""
        return self.is_open and is_locked(self._file)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which ``has_waiting`` is true for the host, in another process."""
        # The kernel releases the lock of a process that dies. It is apart from the host's, which is a flock.
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)

    @property
    def has_waiting(self) -> bool:
        """Whether another process is in a context of ``waiting``."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1)
        return False

    @property
    def is_open(self) -> bool:
        """Whether this process has not closed the file."""
        return not self._file.closed

    def close(self) -> None:
        """Close the file; the mapped memory stays readable until it is released."""
        self._finalizer()
