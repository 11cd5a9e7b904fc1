"""Encode and apply as torch operators for traced programs: ``torch.ops.gradwire.encode`` and ``.apply``.

The operators are stateless: the residual is a tensor argument, which ``encode`` modifies, and the threshold is a
number. Both work on the CPU and on CUDA devices. A traced program must know sizes before it runs, so a message is a
tensor of a fixed size, whose header says how many of the bytes count.

>>> import torch, gradwire.torch
>>> residual, params = torch.zeros(4), torch.zeros(4)
>>> update = torch.tensor([0.75, -0.5, 0.25, 0.0])
>>> message = torch.ops.gradwire.encode(residual, update, 0.5)
>>> torch.ops.gradwire.apply(message, params, 1.0)
>>> params.tolist(), residual.tolist()
([0.5, -0.5, 0.0, 0.0], [0.25, 0.0, 0.25, 0.0])
"""

# No postponed annotations: torch 2.4 reads those of the operators as types.
from typing import Any

import numpy as np
import torch

from .. import _core
from ..arrays import cuda_core, stream_of
from ..message import Message, cuda_message
from ..message import apply as apply_message
from ..policy import round_threshold

__all__ = ["message_bytes_max"]

_HEADER_BYTES = 48
_LENGTH = slice(40, 48)  # of the header: the bytes that follow it
_VECTOR_BYTES = 16


def message_bytes_max(numel: Any) -> Any:
    """Return the size of ``encode``'s result: the ceiling of a message of ``numel`` elements, rounded up to vectors."""
    ceiling = _HEADER_BYTES + (22 * numel + 99) // 100
    return (ceiling + _VECTOR_BYTES - 1) // _VECTOR_BYTES * _VECTOR_BYTES


def encode(
    residual: torch.Tensor, update: torch.Tensor, threshold: float, key: int = 0, step: int = 0
) -> torch.Tensor:
    """Add ``update`` to ``residual``, subtract plus or minus one threshold where the sum reaches it, encode those.

    Args:
        residual: float32 or float64, contiguous (on a device: aligned to 16 bytes); modified.
        update: float32, float16 or bfloat16 (float64 too if the residual is float64), of the same size; not modified.
        threshold: rounded to bfloat16.
        key: index of the group of parameters.
        step: number of the message.

    Returns:
        uint8[message_bytes_max(residual.numel())]: the message, then zeros. Elements that are not finite are left out.
    """
    capacity = message_bytes_max(residual.numel())
    message = torch.zeros(capacity, dtype=torch.uint8, device=residual.device)
    rounded = round_threshold(threshold)
    if residual.is_cuda:
        device = residual.device.index
        cuda_core().encode_into(
            residual, update, rounded, key, step, message, stream_of(None, residual, device)
        )
    else:
        encoded = _core.encode_into(residual, update, rounded, key, step)
        message.numpy()[: encoded.nbytes] = np.frombuffer(memoryview(encoded), np.uint8)
    return message


def apply(message: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> None:
    """Add the message at the start of ``message`` to ``target``: ``target += scale * decoded``.

    Args:
        message: uint8, contiguous, on the target's device; may be longer than the message.
        target: float32 or float64, contiguous; modified.
        scale: finite factor.

    Raises:
        MessageError: on the CPU, the message is invalid. On a device nothing is raised, and the target is unchanged.
    """
    if target.is_cuda:
        apply_message(cuda_message(message), target, scale)
        return
    content = memoryview(message.numpy())
    length = _HEADER_BYTES + int.from_bytes(content[_LENGTH], "little")
    apply_message(Message.parse(content[:length]), target, scale)


def _encode_fake(residual: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return a tensor of the result's shape, for tracing."""
    return residual.new_empty(message_bytes_max(residual.numel()), dtype=torch.uint8)


_encode = torch.library.custom_op("gradwire::encode", encode, mutates_args=("residual",))
_encode.register_fake(_encode_fake)
_apply = torch.library.custom_op("gradwire::apply", apply, mutates_args=("target",))
_apply.register_fake(lambda *_, **__: None)
