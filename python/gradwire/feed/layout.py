"""The bytes of one mini-batch: a short description, then its arrays, each aligned to 64 bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..shared_memory import aligned

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

    Raises:
        TypeError: an array holds Python objects or fields.
        ValueError: there are so many arrays that their description does not fit 4 KiB.
    """

    def __init__(self, batch: Any) -> None:
        is_mapping, is_sequence = isinstance(batch, Mapping), isinstance(batch, (tuple, list))
        names = [str(name) for name in batch] if is_mapping else None
        values = list(batch.values()) if is_mapping else list(batch) if is_sequence else [batch]
        self._arrays = [np.asarray(value) for value in values]
        for index, array in enumerate(self._arrays):
            if array.dtype.hasobject or array.dtype.names:
                name = repr(names[index]) if names else index
                raise TypeError(
                    f"array {name} of the batch has dtype {array.dtype}: a feed carries numbers"
                )
        end, entries = 0, []
        for array in self._arrays:
            entries.append([array.dtype.str, list(array.shape), end])
            end += aligned(array.nbytes)
        description = {"names": names, "one": not (is_mapping or is_sequence), "arrays": entries}
        self._text = json.dumps(description).encode()
        self._start = aligned(_LENGTH.size + len(self._text))
        if self._start > DESCRIPTION_BYTES:
            raise ValueError(
                f"the description of {len(values)} arrays has {self._start} bytes, at most "
                f"{DESCRIPTION_BYTES} are allowed: put fewer arrays with shorter names into a batch"
            )
        self.nbytes = self._start + end
        self.array_bytes = end
        self._places = [place for _, _, place in entries]

    def write(self, buffer: Any) -> None:
        """Copy the batch into a buffer of at least ``nbytes``."""
        target = np.frombuffer(buffer, np.uint8)
        header = _LENGTH.pack(len(self._text)) + self._text
        target[: len(header)] = np.frombuffer(header, np.uint8)
        for array, place in zip(self._arrays, self._places, strict=True):
            if array.nbytes:
                view: NDArray[Any] = np.ndarray(
                    array.shape, array.dtype, target.data, self._start + place
                )
                view[...] = array


def read(buffer: Any) -> Batch:
    """Return the batch in a buffer; its arrays are views of the buffer.

    Raises:
        ValueError: the buffer holds no batch.
    """
    try:
        (length,) = _LENGTH.unpack_from(buffer)
        text = bytes(memoryview(buffer).cast("B")[_LENGTH.size : _LENGTH.size + length])
        description = json.loads(text)
        start = aligned(_LENGTH.size + length)
        arrays = []
        for dtype, shape, place in description["arrays"]:
            count = int(np.prod(shape, dtype=np.int64))
            flat = (
                np.frombuffer(buffer, dtype, count, start + place)
                if count
                else np.empty(0, np.dtype(dtype))
            )
            arrays.append(flat.reshape(shape))
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"the buffer holds no batch: {error}") from error
    if description["names"] is not None:
        return dict(zip(description["names"], arrays, strict=True))
    return arrays[0] if description["one"] else tuple(arrays)
