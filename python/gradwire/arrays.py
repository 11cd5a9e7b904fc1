"""The devices and streams of arrays, and the availability of the CUDA backend."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .errors import BackendUnavailable

__all__ = ["cuda_core", "cuda_problem", "device_of", "stream_of"]

_DLPACK_CUDA = (2, 13)


@lru_cache(maxsize=1)
def cuda_problem() -> str:
    """Return why the CUDA backend is not usable here, or an empty string.

    The answer of the driver is kept for the life of the process.
    """
    try:
        core = importlib.import_module("gradwire._cuda")
    except ImportError as error:
        from . import _core

        if importlib.util.find_spec("gradwire._cuda") is None:
            return f"this build has no CUDA backend ({_core.cuda_status()})"
        return f"the CUDA module does not load: {error}"
    return str(core.unusable())


def cuda_core() -> Any:
    """Return the module ``gradwire._cuda``.

    Raises:
        BackendUnavailable: this build has no such module, or there is no driver or GPU.
    """
    problem = cuda_problem()
    if problem:
        raise BackendUnavailable(f'{problem}; use device="cpu" and arrays on the CPU')
    return importlib.import_module("gradwire._cuda")


def device_of(arrays: Any) -> int:
    """Return the number of the CUDA device of an array, or of the first of a sequence; -1 for the CPU."""
    if isinstance(arrays, np.ndarray):
        return -1
    if isinstance(arrays, (list, tuple)):
        return device_of(arrays[0]) if arrays else -1
    if hasattr(arrays, "__dlpack_device__"):
        kind, number = arrays.__dlpack_device__()
        return int(number) if kind in _DLPACK_CUDA else -1
    if hasattr(arrays, "__cuda_array_interface__"):
        return int(cuda_core().device_of(arrays))
    return -1


def stream_of(stream: Any, arrays: Any, device: int) -> int:
    """Return the handle of the stream for work on some arrays.

    Args:
        stream: an int (0 and 1 are the legacy default stream, 2 the per-thread default stream), a
            ``torch.cuda.Stream``, a ``cupy.cuda.Stream``, or an object with ``__cuda_stream__``. None stands for the
            current stream of torch or CuPy if the arrays are theirs, for gradwire's own memory of torch if torch uses
            the device, otherwise for the default stream.
        arrays: one array or a sequence of arrays; may be None.
        device: the number of their device.

    Raises:
        TypeError: ``stream`` is of another type.
    """
    if stream is None:
        return _current_stream(arrays, device)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(
        f"stream must be an int, a torch or CuPy stream or have __cuda_stream__, got {stream!r}"
    )


def _current_stream(arrays: Any, device: int) -> int:
    first = arrays[0] if isinstance(arrays, Sequence) and len(arrays) > 0 else arrays
    library = type(first).__module__.split(".")[0]
    torch = sys.modules.get("torch")
    is_own = first is None or library == "gradwire"
    if library == "torch" or (is_own and torch is not None and torch.cuda.is_initialized()):
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0
