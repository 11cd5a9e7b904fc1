"""The same job, or the nearest to it, done by what people have installed: NumPy, torch and pi-quant.

Each maker returns an ``Operation`` that works on its own copy of the residual and has been checked to send the same
elements, or raises ``Missing`` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Operation, aligned
from numpy.typing import NDArray
from updates import THRESHOLD, SteadyState

__all__ = ["MAKERS", "Missing"]


class Missing(Exception):
    """A peer that cannot be measured here, and why."""


def numpy_three_lines(state: SteadyState) -> Operation:
    """Return threshold encoding with residual as one writes it in NumPy: positions and signs, not packed."""
    residual = _copy(state.residual)
    update = state.update

    def run() -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        np.add(residual, update, out=residual)
        positions = np.flatnonzero(np.abs(residual) >= THRESHOLD)
        sent = np.copysign(np.float32(THRESHOLD), residual[positions])
        residual[positions] -= sent
        return positions, sent

    _check("NumPy", run, residual, state)
    return Operation("NumPy, three lines", run)


def torch_nonzero(state: SteadyState) -> Operation:
    """Return the same in torch's eager mode: add, compare, nonzero, index."""
    torch = _torch()
    residual = _copy(state.residual)
    r, u = torch.from_numpy(residual), torch.from_numpy(state.update)

    def run() -> tuple[Any, Any]:
        r.add_(u)
        positions = torch.nonzero(r.abs() >= THRESHOLD).squeeze(1)
        sent = torch.sign(r[positions]) * THRESHOLD
        r[positions] -= sent
        return positions, sent

    _check("torch", run, residual, state)
    return Operation("torch, nonzero and index", run)


def torch_topk(state: SteadyState) -> Operation:
    """Return top-k with residual: as many elements as the threshold selects, their values, and zero left behind."""
    torch = _torch()
    residual = _copy(state.residual)
    r, u = torch.from_numpy(residual), torch.from_numpy(state.update)
    count = state.count

    def run() -> tuple[Any, Any]:
        r.add_(u)
        positions = torch.topk(r.abs(), count, sorted=False).indices
        sent = r[positions]
        r[positions] = 0.0
        return positions, sent

    positions, _ = run()
    if not np.array_equal(np.sort(positions.numpy()), np.flatnonzero(state.update)):
        raise AssertionError("torch.topk selected other elements")
    return Operation("torch.topk", run)


def piquant_int4(state: SteadyState) -> Operation:
    """Return pi-quant's int4: parameters, then quantise; no residual, so less work and less memory."""
    try:
        piquant: Any = importlib.import_module("piquant")
    except ImportError as error:
        raise Missing(f"pip install pypiquant ({error})") from None
    context = piquant.Context(num_threads=1)
    update = state.update
    codes = aligned((update.size + 1) // 2, np.uint8)
    kind = (piquant.DataType.F32, piquant.DataType.UINT4)

    def run() -> tuple[float, int]:
        scale, zero = context.compute_quant_params_ptr_float32(
            update.ctypes.data, kind[1], update.size
        )
        context.quantize_ptr(
            update.ctypes.data,
            kind[0],
            codes.ctypes.data,
            kind[1],
            update.size,
            scale,
            zero,
            piquant.RoundMode.NEAREST,
        )
        return scale, zero

    scale, zero = run()
    back = aligned(update.size)
    context.dequantize_ptr(
        codes.ctypes.data,
        kind[1],
        back.ctypes.data,
        kind[0],
        update.size,
        scale,
        zero,
        piquant.ReduceOp.SET,
    )
    if not np.allclose(back, update, rtol=0.0, atol=scale):
        raise AssertionError("pi-quant's codes decode to other values")
    return Operation("pi-quant int4, no residual", run)


MAKERS: tuple[tuple[str, Callable[[SteadyState], Operation]], ...] = (
    ("NumPy, three lines", numpy_three_lines),
    ("torch, nonzero and index", torch_nonzero),
    ("torch.topk", torch_topk),
    ("pi-quant int4, no residual", piquant_int4),
)


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise Missing(f"pip install torch ({error})") from None
    torch.set_num_threads(1)
    return torch


def _copy(array: NDArray[np.float32]) -> NDArray[np.float32]:
    copy = aligned(array.size)
    copy[...] = array
    return copy


def _check(
    name: str, run: Callable[[], tuple[Any, Any]], residual: NDArray[np.float32], state: SteadyState
) -> None:
    """Assert that one call sends the update and leaves the residual as it was."""
    positions, sent = run()
    decoded = np.zeros(state.numel, np.float32)
    decoded[np.asarray(positions)] = np.asarray(sent)
    if not (np.array_equal(decoded, state.update) and np.array_equal(residual, state.residual)):
        raise AssertionError(f"{name} sent something else")
