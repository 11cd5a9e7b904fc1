"""bfloat16 arrays without a library that has them: NumPy memory lent through DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CPU = 1
_BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Bfloat16Array:
    """A 1-D bfloat16 array that lends its memory through DLPack; ``bits`` is uint16[numel]."""

    def __init__(self, bits: NDArray[np.uint16], device: int = _CPU) -> None:
        self.bits = np.ascontiguousarray(bits)
        self._shape = (ctypes.c_int64 * 1)(bits.size)
        self._managed = _ManagedTensor()
        tensor = self._managed.tensor
        tensor.data = self.bits.ctypes.data
        tensor.device = _Device(device, 0)
        tensor.ndim = 1
        tensor.dtype = _Dtype(_BFLOAT, 16, 1)
        tensor.shape = self._shape

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._managed.tensor.device.kind, 0

    def widened(self) -> NDArray[np.float32]:
        """Return the same values as float32[numel]."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> Bfloat16Array:
    """Return finite float32 values cut (not rounded) to bfloat16."""
    return Bfloat16Array((values.view(np.uint32) >> 16).astype(np.uint16))
