"""The bytes of one mini-batch: a short description, then its arrays, each aligned to 64 bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..shared_memory import aligned, arrays_at, layout_of, span

__all__ = ["DESCRIPTION_BYTES", "Batch", "Layout", "read"]

Batch = dict[str, NDArray[Any]] | tuple[NDArray[Any], ...] | NDArray[Any]

# Space for the description, which a slot has beside the bytes of the arrays.
DESCRIPTION_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<Q")


class Layout:
    """The places of a batch's arrays in a buffer.

    Args:
        batch: a dict, tuple or list of arrays, or one array; anything that NumPy can view, such as CPU tensors.

    Attributes:
        nbytes: size of the whole batch.
        array_bytes: size of the arrays.

    Raises:
        TypeError: an array holds Python objects or fields, or is of a dtype that is not NumPy's own.
        ValueError: there are so many arrays that their description does not fit 4 KiB, or two of the same name.
    """

    def __init__(self, batch: Any) -> None:
        names = [str(name) for name in batch] if isinstance(batch, Mapping) else None
        if names is not None and len(set(names)) < len(names):
            raise ValueError(f"two arrays of the batch have the same name as text: {names}")
        is_single = names is None and not isinstance(batch, (tuple, list))
        values = [batch] if is_single else batch if names is None else batch.values()
        self._arrays = [np.asarray(value) for value in values]
        for index, array in enumerate(self._arrays):
            # An extension's dtype, such as ml_dtypes' bfloat16, has no name of its own in the description.
            if array.dtype.hasobject or array.dtype.kind == "V":
                name = repr(names[index]) if names else index
                raise TypeError(
                    f"array {name} of the batch has dtype {array.dtype}: a feed carries numbers"
                )
        self._layout = layout_of(self._arrays)
        text = json.dumps([names, is_single, self._layout]).encode()
        self._head = _LENGTH.pack(len(text)) + text
        self._start = aligned(len(self._head))
        if self._start > DESCRIPTION_BYTES:
            raise ValueError(
                f"the description of {len(self._arrays)} arrays has {self._start} bytes, at most "
                f"{DESCRIPTION_BYTES} are allowed: put fewer arrays with shorter names into a batch"
            )
        self.array_bytes = span(self._layout)
        self.nbytes = self._start + self.array_bytes

    def checksum(self, before: int) -> int:
        """Return a checksum of the batch and of the batches before it, whose checksum is ``before``."""
        value = zlib.crc32(self._head, before)
        for array in self._arrays:
            value = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, value)
        return value

    def write(self, buffer: Any) -> None:
        """Copy the batch into a buffer of at least ``nbytes``."""
        memoryview(buffer)[: len(self._head)] = self._head
        places = arrays_at(buffer, self._start, self._layout)
        for place, array in zip(places, self._arrays, strict=True):
            place[...] = array


def read(buffer: Any) -> Batch:
    """Return the batch in a buffer; its arrays are views of the buffer.

    Raises:
        ValueError: the buffer holds no batch.
    """
    try:
        (length,) = _LENGTH.unpack_from(buffer)
        text = bytes(memoryview(buffer).cast("B")[_LENGTH.size : _LENGTH.size + length])
        names, is_single, layout = json.loads(text)
        arrays = arrays_at(buffer, aligned(_LENGTH.size + length), layout)
        if names is not None:
            return dict(zip(names, arrays, strict=True))
        return arrays[0] if is_single else tuple(arrays)
    except (ArithmeticError, RuntimeError, TypeError, ValueError, struct.error) as bad:
        raise ValueError(f"the buffer holds no batch: {bad}") from bad
