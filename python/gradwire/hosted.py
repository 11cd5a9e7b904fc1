"""A model's parameters in shared memory, which every process of the machine can read while training changes them."""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import GradwireError, Mismatch
from .shared_memory import (
    SharedFile,
    arrays_at,
    create_locked,
    fence,
    layout_of,
    path_of,
    release,
    span,
)
from .state import check_range, check_seconds

__all__ = ["HostedModel", "Snapshot"]

_RETRY_S = 0.001
_PATIENCE_S = 0.5  # a reader that has no copy by then asks the host to wait
_READERS_S = 5.0  # most that the host waits, so that a reader that was stopped does not stop it

_Arrays: TypeAlias = list[NDArray[Any]]


class Snapshot(NamedTuple):
    """A consistent copy of a hosted model: its version, and its parameters as arrays of the caller's own."""

    version: int
    params: _Arrays


class HostedModel:
    """The current parameters of a model in shared memory, under a name.

    The process that makes the model hosts it and writes. Any other process of the same user attaches by name and reads.
    The name goes when the host closes the model or ends, however it ends; attached readers keep the last parameters.
    The memory of a killed host goes when any model, team or feed of this user begins or ends.

    Args:
        name: letters, digits, ".", "_" and "-", at most 64.
        params: the initial parameters: one array or several, of numbers, in host memory, such as
            ``model.parameters()``. Copied.
        version: the number of the initial parameters, for a host that goes on from a checkpoint.

    Attributes:
        name: name of the model.
        params: the parameters themselves. The host's arrays are writable: change them inside ``writing``. Readers'
            arrays are read-only views, which may change while they are read; ``snapshot`` copies one version.

    Raises:
        ValueError: the name cannot be used, or a living process hosts a model of this name.
        TypeError: an array of another kind, or on a device.
        OSError: there is too little shared memory.

    >>> import numpy as np, gradwire as gw
    >>> with gw.HostedModel("documentation", [np.zeros(2, np.float32)]) as host:
    ...     reader = gw.HostedModel.attach("documentation")  # in any process of this machine
    ...     host.update([np.array([1.0, 2.0], np.float32)])
    ...     reader.version, reader.params[0].tolist(), reader.snapshot().version
    1
    (1, [1.0, 2.0], 1)
    """

    def __init__(self, name: str, params: Any, *, version: int = 0) -> None:
        version = check_range("version", version, 0, 2**62 - 1)
        path = path_of("model", name)
        initial = _views(params)
        lock = create_locked(path, f"hosts a model {name!r}")
        self._finalizer: Any = weakref.finalize(self, release, lock, path, os.getpid())
        self._process = os.getpid()
        layout = layout_of(initial)
        what = f"the model {name!r} does"
        self._map(name, SharedFile.host(path, lock, layout, span(layout), what=what))
        for target, source in zip(self.params, initial, strict=True):
            target[...] = source
        self._sequence[0] = 2 * version
        self._file.publish()

    @classmethod
    def attach(cls, name: str, like: Any = None, *, timeout_s: float = 0.0) -> HostedModel:
        """Return a reader of the model that another process, or this one, hosts.

        Args:
            name: of the model.
            like: arrays whose dtypes and shapes the model must have, such as ``model.parameters()``; None: any.
            timeout_s: longest wait for the model to be hosted.

        Raises:
            FileNotFoundError: no living process hosts a model of this name.
            Mismatch: the model has another layout than ``like``.
            ValueError: the name cannot be used.
            PermissionError: the model belongs to another user.
        """
        path = path_of("model", name)
        end_s = time.monotonic() + check_seconds("timeout_s", timeout_s, least=-math.inf)
        while (file := SharedFile.attach(path, mmap.ACCESS_READ)) is None:
            if time.monotonic() >= end_s:
                raise FileNotFoundError(f"no living process of this machine hosts a model {name!r}")
            time.sleep(_RETRY_S)
        expected = file.document if like is None else layout_of(_views(like))
        if expected != file.document:
            file.close()
            raise Mismatch(f"the model {name!r} has {file.document}, expected {expected}")
        model = cls.__new__(cls)
        model._map(name, file)
        model._process = 0  # no process has this id, so a reader cannot write
        model._finalizer = file.close
        return model

    def _map(self, name: str, file: SharedFile) -> None:
        self.name = name
        self._file = file
        self._layout = file.document
        self.params: _Arrays = arrays_at(file.data, 0, file.document)
        # Odd while the host writes. A reader whose copy began and ended at the same even number has one version.
        self._sequence = file.words[:1]
        self._finished = file.words[1:2]
        self._ignores_readers = False
        self._is_writing = False

    @property
    def version(self) -> int:
        """The number of times that the parameters were written since the model was made, plus the initial version."""
        return int(self._sequence[0]) // 2

    @property
    def is_finished(self) -> bool:
        """Whether the host has said that the parameters are final; a host that dies does not say so."""
        return bool(self._finished[0])

    @property
    def is_live(self) -> bool:
        """Whether the host still runs and has not closed the model."""
        return self._file.is_live

    @contextmanager
    def writing(self) -> Iterator[_Arrays]:
        """Return a context in which the host changes ``params`` in place; snapshots wait until it ends.

        It begins after the snapshots of other processes that have found no time to copy. If it ends with an error, what
        it has written is no version: snapshots wait for the next one.

        Raises:
            GradwireError: this process does not host the model, or has closed it, or is writing already.
        """
        self._check_hosting()
        if self._is_writing:
            raise GradwireError("writing() or update() inside writing(): change params there")
        # A host that only writes leaves no time to copy between two versions.
        end_s = time.monotonic() + (0.0 if self._ignores_readers else _READERS_S)
        while (has_waiting := self._file.has_waiting) and time.monotonic() < end_s:
            time.sleep(_RETRY_S)
        self._ignores_readers = has_waiting
        self._sequence |= 1
        fence()
        self._is_writing = True  # last, so that an interrupt before leaves nothing behind
        try:
            yield self.params
        finally:
            self._is_writing = False
        fence()
        self._sequence += 1

    def _check_hosting(self) -> None:
        if self._process != os.getpid() or not self._file.is_live:
            raise GradwireError(f"only the process that hosts the model {self.name!r} writes to it")

    def update(self, params: Any) -> int:
        """Replace the parameters by a copy of others, and return the new version.

        Args:
            params: arrays of the same shapes and dtypes as the initial parameters.

        Raises:
            Mismatch: another layout; nothing was written.
            GradwireError: this process does not host the model, or has closed it.
        """
        sources = _views(params)
        if layout_of(sources) != self._layout:
            raise Mismatch(f"the model {self.name!r} has {self._layout}, got {layout_of(sources)}")
        with self.writing():
            for target, source in zip(self.params, sources, strict=True):
                target[...] = source
        return self.version

    def snapshot(self, timeout_s: float = 10.0) -> Snapshot:
        """Return a copy of the parameters at one version, whatever the host writes meanwhile.

        Raises:
            TimeoutError: the host wrote during every attempt.
            GradwireError: the host died while it wrote.
        """
        end_s = time.monotonic() + check_seconds("timeout_s", timeout_s, least=-math.inf)
        patient_until_s = time.monotonic() + _PATIENCE_S
        copies = [np.empty_like(array) for array in self.params]
        with ExitStack() as waiting:
            while (version := self._copy(copies)) is None:
                now_s = time.monotonic()
                if now_s >= end_s:
                    raise TimeoutError(
                        f"no consistent copy of the model {self.name!r} within {timeout_s:g} s: "
                        "the host wrote each time"
                    )
                if now_s >= patient_until_s and self._file.is_open:
                    waiting.enter_context(self._file.waiting())
                    patient_until_s = math.inf
                time.sleep(_RETRY_S)
        return Snapshot(version, copies)

    def _copy(self, copies: _Arrays) -> int | None:
        """Copy the parameters, and return their version, or None if the host wrote meanwhile."""
        before = int(self._sequence[0])
        fence()
        if before % 2 == 0:
            for target, source in zip(copies, self.params, strict=True):
                target[...] = source
            fence()
            return before // 2 if int(self._sequence[0]) == before else None
        if not self.is_live and int(self._sequence[0]) == before:
            raise GradwireError(
                f"the host of the model {self.name!r} died while it wrote version {before // 2 + 1}"
            )
        return None

    def finish(self) -> None:
        """Tell the readers that the parameters are final.

        Raises:
            GradwireError: as ``writing``.
        """
        self._check_hosting()
        self._finished[0] = 1

    def close(self) -> None:
        """End the hosting, or the reading; the arrays stay readable until they are released."""
        self._finalizer()

    def __enter__(self) -> HostedModel:
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()


def listed(params: Any) -> list[Any]:
    """Return one array or several as a list; raise `TypeError` for a dict, of which the names would be left."""
    if hasattr(params, "dtype"):
        return [params]
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be an array or several, got {type(params).__name__}: of a dict, pass list(params.values())"
        )
    return list(params)


def _views(params: Any) -> _Arrays:
    """Return arrays, or tensors whether they require grad or not, as NumPy arrays of the same memory."""
    arrays = listed(params)
    views = [np.asarray(array.detach() if hasattr(array, "detach") else array) for array in arrays]
    for view in views:
        if view.dtype.kind not in "biuf":
            raise TypeError(f"a hosted model has arrays of numbers, got {view.dtype}")
    return views
