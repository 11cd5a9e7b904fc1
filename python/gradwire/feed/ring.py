"""Slots for batches in shared memory, which any process of the machine can fill and empty.

The state of every slot is in the shared memory, protected by a lock on its first byte, which the system releases when
a process dies. Another lock, on the file as a whole, says that the process that made the feed lives. Waiting processes
poll every few milliseconds.

Spark may repeat a task, so the batches of a stream's parts are numbered. For each part a file beside the memory holds
how many batches were put, and by which attempt. A later attempt claims the part: it learns where to go on, and the
earlier attempt, which may still run, can put nothing any more. A batch and its number go in together: the head notes
both first, and whoever locks next completes what a dead process left undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import Closed, GradwireError
from ..shared_memory import (
    FOLDER,
    PREFIX,
    STATE_SUFFIX,
    aligned,
    create_locked,
    fence,
    free_leftovers,
    open_file,
    release,
    shortage,
)

__all__ = ["ENDINGS", "Claim", "FeedFailed", "Ring", "Slot", "Superseded"]

_RECORD_LOCK: Final = struct.Struct("hhqqi")  # the system's ``struct flock``

_POLL_S: Final = (1e-4, 5e-3)  # the first and the longest wait between polls
_CHECK_S: Final = 0.25  # between checks for dead processes

_MAGIC: Final = 0x6777_6665_6564_0005
_FIELDS: Final = 24
_MAGIC_AT, _SLOTS, _SLOT_BYTES, _PID, _STARTED, _PROCESSES = range(6)
_ENDING, _SEQUENCE, _TAKEN, _ERROR_BYTES = range(6, 10)
# A batch that is going in, and where its claim is noted; see `Ring.commit`.
_IS_GOING_IN, _GOING_SLOT, _GOING_ORDER, _GOING_STREAM, _GOING_PART = range(10, 15)
_GOING_CLAIM: Final = slice(15, 19)
_ERROR_AT: Final = 4096
_ERROR_BYTES_MAX: Final = 12_288
_TABLE_AT: Final = _ERROR_AT + _ERROR_BYTES_MAX
_COLUMNS: Final = 4
_STATE, _ORDER, _OWNER, _OWNER_STARTED = range(_COLUMNS)
_FREE, _WRITING, _FULL, _READING = range(4)
_OPEN, _FINISHED, _CLOSED, _FAILED = range(4)
ENDINGS: Final = {"finished": _FINISHED, "closed": _CLOSED, "failed": _FAILED}


class FeedFailed(GradwireError):
    """A producer failed; the message has its error."""


class Superseded(GradwireError):
    """A later attempt of the same task puts the batches now."""


class Claim(NamedTuple):
    """What a feed has of one part of a stream, and who may put more; also the number that a batch gets."""

    stream: int  #: number of the stream, 63 bits
    part: int
    epoch: int  #: how often the stream has begun again, with other batches
    attempt: int  #: number of the attempt, higher than those before
    batches: int = 0  #: that the feed has
    checksum: int = 0  #: of these batches and those before them, also in other feeds


_CLAIM: Final = struct.Struct("<qqqq")  # what follows after the part


@dataclass(frozen=True)
class Slot:
    """One slot that this process is filling."""

    index: int
    buffer: Any  #: writable bytes of the slot


def _started(pid: int) -> int:
    """Return when a process started, in the system's ticks; 0 if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # any other error must not declare it dead
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _process_namespace() -> int:
    """Return the number of the namespace of this process's id: processes of two namespaces cannot watch each other."""
    return Path("/proc/self/ns/pid").stat().st_ino


class Ring:
    """The slots of one feed.

    Args:
        name: of an existing ring; None: make one.
        slots: number of slots of a new ring.
        slot_bytes: size of each.

    Raises:
        Closed: there is no ring of this name that this process may open.
        OSError: the machine has too little shared memory.
    """

    def __init__(self, name: str | None = None, slots: int = 0, slot_bytes: int = 0) -> None:
        self._memory: SharedMemory | None = None
        self.name = name or f"{PREFIX}feed-{secrets.token_hex(8)}"
        if name is None:
            self._make(slots, aligned(slot_bytes))
        self._open()

    def _make(self, slots: int, slot_bytes: int) -> None:
        size = _data_at(slots) + slots * slot_bytes
        path = FOLDER / self.name
        guard = create_locked(path, f"has a feed {self.name!r}")
        # First, because what follows may fail, as where there are no descriptors left.
        weakref.finalize(self, release, guard, path, os.getpid())
        try:
            os.posix_fallocate(guard.fileno(), 0, size)  # a full /dev/shm must not kill a writer
        except OSError as error:
            os.ftruncate(guard.fileno(), 0)
            what = f"{slots} batches of {slot_bytes} bytes do"
            refusal = shortage(what, size, path, error, remedy="use fewer or smaller batches")
            release(guard, path, os.getpid())
            raise refusal from None
        # The resource tracker removes the memory also when this process is killed.
        self._memory = SharedMemory(self.name)
        weakref.finalize(self, _remove, self.name, self._memory, os.getpid())
        head: NDArray[np.int64] = np.ndarray(_FIELDS, np.int64, self._memory.buf)
        head[[_SLOTS, _SLOT_BYTES]] = slots, slot_bytes
        head[[_PID, _STARTED]] = os.getpid(), _started(os.getpid())
        head[_PROCESSES] = _process_namespace()
        head[_MAGIC_AT] = _MAGIC
        del head
        self._memory.close()  # mapped below as in every other process; this object only removes the name

    def _open(self) -> None:
        """Map the memory; again in a forked process, which must not share its parent's lock."""
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()  # when this process last looked for dead ones
        path = FOLDER / self.name
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # A forked child would keep the lock of a process that is killed while it holds the lock.
            os.register_at_fork(after_in_child=weakref.finalize(self, os.close, self._file))
            # Another open file, because a mapping keeps its own, in a forked child, too.
            with path.open("r+b") as mapped:
                self._map = mmap.mmap(mapped.fileno(), 0)
        except (FileNotFoundError, PermissionError):
            raise Closed(
                f"there is no feed {self.name!r} that this process may open: the feed was closed, or belongs to "
                "another user or machine (Feed.connect)"
            ) from None
        self._head: NDArray[np.int64] = np.frombuffer(self._map, np.int64, _FIELDS)
        if self._head[_MAGIC_AT] != _MAGIC:
            raise ValueError(f"{self.name!r} is no feed of this version of gradwire")
        if self._head[_PROCESSES] != _process_namespace():
            raise Closed(
                f"the feed {self.name!r} belongs to a container with other process numbers: use Feed.connect"
            )
        self.slots = int(self._head[_SLOTS])
        self.slot_bytes = int(self._head[_SLOT_BYTES])
        shape = (self.slots, _COLUMNS)
        self._table: NDArray[np.int64] = np.ndarray(shape, np.int64, self._map, _TABLE_AT)
        # Last: where this fails, as for a feed that was closed meanwhile, the next call has to fail in the same way.
        self._process_started = _started(os.getpid())
        self._process = os.getpid()

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> tuple[int, int]:
        """Batches that were put, and those that were taken."""
        return int(self._head[_SEQUENCE]), int(self._head[_TAKEN])

    def end(self, *, how: str, text: str = "") -> None:
        """End the feed in one of the ``ENDINGS``; only the first close or failure counts.

        With a text a finished feed gives it as an error to consumers that have taken the last batch.
        """
        state = ENDINGS[how]
        with self._locked():
            if self._head[_ENDING] < min(state, _CLOSED):
                if text:
                    data = _shortened(text.encode(errors="backslashreplace"))
                    self._map[_ERROR_AT : _ERROR_AT + len(data)] = data
                    self._head[_ERROR_BYTES] = len(data)
                self._head[_ENDING] = state
        if state == _CLOSED and self._memory is not None:  # whoever has the memory open keeps it
            _remove(self.name, self._memory, int(self._head[_PID]))

    def check(self, *, is_producer: bool = True) -> None:
        """Raise `Closed` or `FeedFailed` if the feed has ended for this side."""
        ending = int(self._head[_ENDING])
        if ending == _FAILED:
            raise FeedFailed(f"a producer failed: {self._error}")
        if ending == _CLOSED:
            raise Closed("the feed is closed")
        if ending == _FINISHED and is_producer:
            raise Closed("the feed is finished: nothing can be put into it")

    @property
    def _error(self) -> str:
        length = int(self._head[_ERROR_BYTES])
        return self._map[_ERROR_AT : _ERROR_AT + length].decode(errors="replace")

    def claim(self, claim: Claim) -> Claim:
        """Let only this attempt put batches of a part from now on; return what the feed has.

        Raises:
            Superseded: a later attempt has claimed the part.
            Closed, FeedFailed: the feed has ended.
        """
        with self._locked():
            self.check()
            last = self._read_claim(claim.stream, claim.part)
            if (last.epoch, last.attempt) > (claim.epoch, claim.attempt):
                raise Superseded(f"attempt {last.attempt} has taken part {claim.part}")
            if last.epoch == claim.epoch:
                claim = last._replace(attempt=claim.attempt)
            self._write_claim(claim)
            return claim

    def _claims(self, stream: int) -> Path:
        return FOLDER / f"{self.name}.{stream:016x}{STATE_SUFFIX}"

    def _read_claim(self, stream: int, part: int) -> Claim:
        try:
            with open_file(self._claims(stream)) as file:
                data = os.pread(file.fileno(), _CLAIM.size, part * _CLAIM.size)
        except FileNotFoundError:
            data = b""
        values = _CLAIM.unpack(data) if data else (0, 0, 0, 0)
        # The file has a hole where another part of a higher number was claimed first.
        return Claim(stream, part, *values)

    def _write_claim(self, claim: Claim) -> None:
        data = _CLAIM.pack(*claim[2:])
        with open_file(self._claims(claim.stream), os.O_RDWR | os.O_CREAT) as file:
            os.pwrite(file.fileno(), data, claim.part * _CLAIM.size)

    # ---- slots -------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, timeout_s: float | None) -> Slot:
        """Wait for a free slot, of which ``nbytes`` are to be filled; see `Feed.put`."""
        index = self._acquire(_WRITING, timeout_s)
        first = self._first(index)
        return Slot(index, memoryview(self._map)[first : first + nbytes])

    def commit(self, slot: Slot, claim: Claim | None = None) -> None:
        """Hand a filled slot to the consumers.

        Args:
            slot: with the batch.
            claim: what the feed has with this batch; None: the batch belongs to no stream.

        Raises:
            Superseded: a later attempt has claimed the part; the slot is free.
            Closed, FeedFailed: the feed has ended.
        """
        with self._locked():
            self.check()
            if claim is None:
                self._fill(slot.index, int(self._head[_SEQUENCE]))
                return
            if self._read_claim(claim.stream, claim.part)[:4] != claim[:4]:
                self.abandon(slot)
                raise Superseded(f"another attempt has taken part {claim.part}")
            place = slot.index, self._head[_SEQUENCE], claim.stream, claim.part
            self._head[_GOING_SLOT : _GOING_PART + 1] = place
            self._head[_GOING_CLAIM] = claim[2:]
            fence()
            self._head[_IS_GOING_IN] = 1
            self._complete()

    def _complete(self) -> None:
        """Put the batch that is going in; again if the process that did so died meanwhile."""
        stream, part = map(int, self._head[_GOING_STREAM : _GOING_PART + 1])
        self._write_claim(Claim(stream, part, *map(int, self._head[_GOING_CLAIM])))
        self._fill(int(self._head[_GOING_SLOT]), int(self._head[_GOING_ORDER]))
        self._head[_IS_GOING_IN] = 0

    def _fill(self, index: int, order: int) -> None:
        self._table[index, _ORDER] = order
        self._table[index, _STATE] = _FULL
        self._head[_SEQUENCE] = order + 1

    def flush(self) -> None:
        """Do nothing: a batch that was put is in the feed."""

    def abandon(self, slot: Slot) -> None:
        """Give back a slot that is not filled."""
        self._table[slot.index, _STATE] = _FREE

    def take(self, timeout_s: float | None) -> Any:
        """Return the bytes of the oldest batch, whose slot is free once nothing refers to them; see `Feed.get`."""
        index = self._acquire(_READING, timeout_s)
        block = (ctypes.c_char * self.slot_bytes).from_buffer(self._map, self._first(index))
        weakref.finalize(block, self._release, index, os.getpid()).atexit = False
        return block

    def _release(self, index: int, process: int) -> None:
        """Free the slot of a batch that nothing refers to."""
        # Takes no lock: a finalizer may run at any point of this thread, also while the thread holds the lock.
        if os.getpid() == process == self._process:
            fence()  # whoever sees the slot free must not overwrite bytes that this process still reads
            self._table[index, _STATE] = _FREE

    def _first(self, index: int) -> int:
        return _data_at(self.slots) + index * self.slot_bytes

    def _acquire(self, state: int, timeout_s: float | None) -> int:
        """Wait for a slot to write into or to read from, enter this process as its owner, and return the slot."""
        is_producer = state == _WRITING
        began_s = time.monotonic()
        wait_s = _POLL_S[0]
        while True:
            with self._locked():
                self.check(is_producer=is_producer)
                index = self._find(is_producer=is_producer)
                if index >= 0:
                    row = self._table[index]
                    row[_OWNER] = self._process
                    # The system gives the id of a dead process to a new one; the times of their starts differ.
                    row[_OWNER_STARTED] = self._process_started
                    row[_STATE] = state
                    self._head[_TAKEN] += not is_producer
                    return index
            now_s = time.monotonic()
            # By the time since the last look, also in an earlier call: callers may ask often, and wait for a moment.
            if now_s - self._looked_s > _CHECK_S:
                self._looked_s = now_s
                self._free_slots_of_the_dead()
            if timeout_s is not None and now_s - began_s >= timeout_s:
                missing = "no space" if is_producer else "no batch"
                raise TimeoutError(f"{missing} in the feed within {timeout_s:g} s")
            time.sleep(wait_s)
            wait_s = min(2.0 * wait_s, _POLL_S[1])

    def _find(self, *, is_producer: bool) -> int:
        """Return a free slot, or that of the oldest batch; -1 if there is none."""
        wanted = _FREE if is_producer else _FULL
        indices = np.flatnonzero(self._table[:, _STATE] == wanted)
        if is_producer:
            return int(indices[0]) if len(indices) else -1
        if len(indices):
            return int(indices[self._table[indices, _ORDER].argmin()])
        if self._head[_ENDING] == _FINISHED:
            if self._head[_ERROR_BYTES]:
                raise FeedFailed(self._error)
            raise Closed("the feed is finished and empty")
        is_own = (self._table[:, _STATE] == _READING) & (self._table[:, _OWNER] == os.getpid())
        if is_own.all():
            raise GradwireError(
                f"this process holds all {self.slots} batches of the feed: drop earlier batches, or copy what is to "
                "be kept"
            )
        return -1

    def _free_slots_of_the_dead(self) -> None:
        """Free the slots of dead processes; close the feed if the process that made it is dead."""
        alive: dict[int, int] = {}
        with self._locked():
            for row in self._table:
                if row[_STATE] in (_WRITING, _READING):
                    pid = int(row[_OWNER])
                    if alive.setdefault(pid, _started(pid)) != row[_OWNER_STARTED]:
                        row[_STATE] = _FREE
        if _started(int(self._head[_PID])) != self._head[_STARTED]:
            self.end(how="closed")
            free_leftovers()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._process != os.getpid():
            self._open()
        with self._lock:
            try:  # an interrupt may come with the lock
                # Of the open file, not of the process: closing another descriptor of the feed does not release it.
                self._set_lock(fcntl.F_WRLCK)
                if self._head[_IS_GOING_IN]:
                    self._complete()
                yield
            finally:
                self._set_lock(fcntl.F_UNLCK)

    def _set_lock(self, kind: int) -> None:
        lock = _RECORD_LOCK.pack(kind, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, lock)


def _shortened(text: bytes) -> bytes:
    """Return a text that fits: the beginning and the end of a long one, as a traceback's last line is the error."""
    if len(text) <= _ERROR_BYTES_MAX:
        return text
    gap = b"\n[...]\n"
    half = (_ERROR_BYTES_MAX - len(gap)) // 2
    return text[:half] + gap + text[-half:]


def _data_at(slots: int) -> int:
    page = mmap.PAGESIZE
    return -(-(_TABLE_AT + slots * _COLUMNS * 8) // page) * page


def _remove(name: str, memory: SharedMemory, process: int) -> None:
    if os.getpid() == process:
        for path in FOLDER.glob(f"{name}.*{STATE_SUFFIX}"):
            path.unlink(missing_ok=True)
        if (FOLDER / name).exists():
            memory.unlink()
