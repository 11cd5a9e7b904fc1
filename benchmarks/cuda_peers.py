"""The codec's job by other tools on a GPU: move the elements that pass a threshold out of residual + update to a list.

None of them codes the list, so all do less than an encode. Each function returns a call on the given tensors, or raises
`Missing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Missing

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Run = Callable[[], object]


def torch_eager(residual: Any, update: Any) -> Run:
    """Three lines of torch, as in published code."""

    def run() -> object:
        residual.add_(update)
        index = (residual.abs() >= 1.0).nonzero().view(-1)
        sign = residual[index].sign()
        residual.index_add_(0, index, sign, alpha=-1.0)
        return index, sign

    return run


if triton is not None:

    @triton.jit
    def _take(r_ptr, u_ptr, list_ptr, count_ptr, numel, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        value = tl.load(r_ptr + at, inside, 0.0) + tl.load(u_ptr + at, inside, 0.0)
        passes = tl.abs(value) >= 1.0
        left = tl.where(value < 0, value + 1.0, value - 1.0)
        tl.store(r_ptr + at, tl.where(passes, left, value), inside)
        ones = passes.to(tl.int32)
        found = tl.sum(ones, 0)
        if found > 0:
            base = tl.atomic_add(count_ptr, found)
            entry = tl.where(value < 0, at | -2147483648, at)
            tl.store(list_ptr + base + tl.cumsum(ones, 0) - 1, entry, passes)


def triton_kernel(residual: Any, update: Any) -> Run:
    """One fused kernel that lists positions and signs, block by block in any order."""
    if triton is None:
        raise Missing("Triton is not installed")
    entries = torch.empty(residual.numel(), dtype=torch.int32, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    block = 2048
    grid = (triton.cdiv(residual.numel(), block),)

    def run() -> object:
        count.zero_()
        _take[grid](residual, update, entries, count, residual.numel(), BLOCK=block, num_warps=8)
        return entries, count

    return run


# How many times as fast an encode should be, and the prediction.
PEERS: dict[str, tuple[Callable[[Any, Any], Run], float, float]] = {
    "torch eager, threshold and residual": (torch_eager, 8.0, 2.5),
    "Triton, one kernel that lists": (triton_kernel, 1.5, 1.05),
}
