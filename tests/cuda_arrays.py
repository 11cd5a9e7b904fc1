"""What the GPU tests share: arrays on a device, and the CPU's encoder to compare with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradwire as gw

Words = NDArray[Any]

EMULATED_MODULE = "GRADWIRE_EMULATED_CUDA"  # names the module of tests/emulated_cuda

DTYPES = ("float32", "float16", "bfloat16", "float64")


def torch() -> Any:
    """Return torch, which is imported only where there is a GPU, or what stands for it on the emulated device."""
    if is_emulated():
        from .emulated_cuda.device import TORCH

        return TORCH
    import torch as module

    return module


def is_emulated() -> bool:
    """Whether the device is the one of tests/emulated_cuda."""
    return EMULATED_MODULE in os.environ


def update_of(numel: int, dtype: str, density: float, seed: int) -> Any:
    """Return a CPU tensor: multiples of 2^-6, of which about ``density`` reach 1 in magnitude."""
    rng = np.random.default_rng(seed)
    small = rng.integers(-32, 33, numel) / 64
    large = rng.choice([-1.5, 1.0, 1.25], numel)
    values = np.where(rng.random(numel) < density, large, small / 64)
    return torch().from_numpy(values).to(getattr(torch(), dtype))


def on_device(tensor: Any, offset: int = 0) -> Any:
    """Return a copy on the device that begins ``offset`` elements into its memory."""
    memory = torch().empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")
    memory[offset:].copy_(tensor)
    return memory[offset:]


def as_tensor(array: Any) -> Any:
    """Return a torch tensor of the same device memory as one of gradwire's arrays."""
    return torch().as_tensor(array, device="cuda")


def residual_of(encoder: Any) -> Words:
    """Return the residual as bits, from wherever it lies."""
    residual: Words = encoder.state_dict()["residual"]
    return residual.view(np.uint32 if residual.dtype == np.float32 else np.uint64)


def pair(numel: int, **arguments: Any) -> tuple[gw.Encoder, Any]:
    """Return an encoder on the CPU and the same one on the device."""
    return gw.Encoder(numel, **arguments), gw.Encoder(numel, device="cuda", **arguments)


def step_both(pair_of_encoders: Sequence[Any], update: Any, **arguments: Any) -> tuple[Any, Any]:
    """Encode one update (a CPU tensor, or None) with both; messages and residuals must have the same bits."""
    cpu, cuda = pair_of_encoders
    expected = cpu.encode(update)
    message = cuda.encode(None if update is None else on_device(update), **arguments)
    assert bytes(message) == bytes(expected)
    np.testing.assert_array_equal(residual_of(cuda), residual_of(cpu))
    return expected, message
