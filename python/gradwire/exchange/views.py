"""NumPy's view of what a trainer hands in: one array or several, of any kind that lies in this machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arrays",
    "add",
    "as_list",
    "copies",
    "described",
    "difference",
    "kinds",
    "put",
    "views",
    "writable_views",
]

Arrays: TypeAlias = list[NDArray[Any]]


def as_list(arrays: Any) -> list[Any]:
    """Return a list of arrays as it is, one array as a list of one."""
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def views(arrays: Any) -> Arrays:
    """Return each array as NumPy sees it, without a copy.

    Args:
        arrays: one array or a list or tuple of them: ndarrays, buffers, or tensors on the CPU with a ``numpy`` method.

    Raises:
        TypeError: something that NumPy cannot view in place.
        ValueError: a tensor that requires grad.
    """
    return [_view(one) for one in as_list(arrays)]


def writable_views(arrays: Any) -> Arrays:
    """Return each array as NumPy sees it, checked to be float32 or float64, contiguous and writable.

    Raises:
        TypeError: another dtype, or something that NumPy cannot view in place.
        ValueError: read-only or not C-contiguous.
    """
    found = views(arrays)
    for one in found:
        if one.dtype not in (np.float32, np.float64):
            raise TypeError(f"parameters must be float32 or float64, got {one.dtype}")
        if not one.flags.c_contiguous or not one.flags.writeable:
            raise ValueError("parameters must be C-contiguous and writable")
    return found


def _view(array: Any) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    if getattr(array, "requires_grad", False):
        raise ValueError(
            "a tensor that requires grad does not lend its memory: pass tensor.detach()"
        )
    if hasattr(array, "numpy"):
        return np.asarray(array.numpy())
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    try:
        return np.asarray(memoryview(array))
    except (TypeError, BufferError):  # the second is JAX's for bfloat16
        raise TypeError(
            f"{type(array).__name__} is not an array that NumPy can view in place; "
            "hand in arrays in the memory of the CPU"
        ) from None


def kinds(arrays: Arrays) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each array, to be compared."""
    return [(array.dtype.str, array.shape) for array in arrays]


def described(arrays: Any) -> list[list[Any]]:
    """Return [dtype, shape] of each array, as JSON has it; the arrays may lie on a device."""
    found = []
    for one in as_list(arrays):
        array = one if hasattr(one, "dtype") and hasattr(one, "shape") else _view(one)
        found.append([str(array.dtype).removeprefix("torch."), list(array.shape)])
    return found


def copies(arrays: Sequence[NDArray[Any]]) -> Arrays:
    """Return a contiguous copy of each array."""
    return [np.array(one, order="C") for one in arrays]


def put(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Copy every array of ``source`` into its place in ``target``."""
    for to, of in zip(target, source, strict=True):
        to[...] = of


def add(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Add every array of ``source`` to its place in ``target``.

    Raises:
        ValueError: they are not of the same sizes, array by array; nothing was added.
    """
    sizes = [one.size for one in target], [one.size for one in source]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"an update of arrays with {sizes[1]} elements for parameters of {sizes[0]}"
        )
    for to, of in zip(target, source, strict=True):
        np.add(to, of.reshape(to.shape), out=to)


def difference(minuend: Sequence[NDArray[Any]], subtrahend: Sequence[NDArray[Any]]) -> Arrays:
    """Return the difference of every two arrays, in new memory."""
    return [np.subtract(one, other) for one, other in zip(minuend, subtrahend, strict=True)]
