"""Memory in which the codec works for tensors that it cannot use in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from .. import _core
from ..arrays import cuda_core, device_of, stream_of
from ..exchange.consistency import digest_of

__all__ = [
    "Staging",
    "bytes_of",
    "check_memory",
    "check_params",
    "fetch_moved",
    "is_same",
    "local_of",
    "normal_tensors",
    "snapshot",
    "store",
    "sums_of",
]

P = ParamSpec("P")
R = TypeVar("R")

_CODED = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)
_KIND = ("dtype", "device", "shape")

# One thread for so many elements, at most.
_THREAD_NUMEL = 1 << 20


def normal_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function make tensors that outlive it, also where it is called under ``torch.inference_mode``.

    Tensors from there cannot be changed outside, and count no changes.
    """

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        # Gradients are switched on again with the mode, unless somebody says otherwise.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return make


class Staging:
    """Memory in which the codec works for one tensor: the tensor's own where possible.

    A contiguous float32 or float64 tensor is its own staging, without a copy. Any other tensor is copied to float32
    (float64 stays) on the same device and back.

    Elements that are infinite by design, as in a mask, cannot be part of a sum. They are constants: the codec works in
    a copy that has zeros in their places, and they stay what they are; a step that changes them is refused.

    Args:
        tensor: of a ``DTensor`` only this rank's shard.
        name: of the tensor, for error messages.
        on_host: whether the codec works in host memory, as the workers of one machine do: a tensor on a GPU is then
            copied there and back.

    Attributes:
        source: the tensor as given.
        name: as given, or the shape in words.
        constants: the infinite elements, with zeros elsewhere; None without any.

    Raises:
        TypeError: the tensor's elements are not real floating-point numbers.
    """

    def __init__(self, tensor: torch.Tensor, name: str = "", *, on_host: bool = False) -> None:
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name or 'a tensor'} of {tensor.dtype} cannot be shared: only floating-point ones can; "
                "torch.view_as_real views complex ones so"
            )
        self.source = tensor
        self.name = name or _named_by_shape(tensor)
        self._kind = _kind_of(tensor)
        shard = self.tensor
        self._moves = on_host and shard.is_cuda
        self.constants: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None
        if self._moves or shard.dtype not in _CODED:
            self._make_copy()

    @normal_tensors
    def _make_copy(self) -> None:
        shard = self.tensor
        dtype = shard.dtype if shard.dtype in _CODED else torch.float32
        if shard.device.type == "cpu":
            # NumPy asks the system for large pages, without which the first write takes several times as long.
            memory = np.empty(shard.shape, str(dtype).removeprefix("torch."))
            self._copy = torch.from_numpy(memory)
            return
        place = "cpu" if self._moves else shard.device
        empty = shard.new_empty(shard.shape, dtype=dtype, device=place, pin_memory=self._moves)
        self._copy = empty.contiguous()

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor as it is now: ``Module.to`` and others give a parameter other memory."""
        # The shard first: an operation on a `DTensor` takes ten times as long.
        return local_of(self.source).detach()

    @property
    def memory(self) -> torch.Tensor:
        """Holds the tensor's values after ``fetch``.

        Raises:
            ValueError: the tensor itself is the memory, and its dtype or device has changed since it was shared.
        """
        if self._copy is not None:
            return self._copy
        tensor = self.tensor
        if (tensor.dtype, tensor.device) != self._kind[:2]:
            self.check_kind()  # converted by hand: the memory would no longer be what the exchange knows
        # The layout may change in the middle of training: ``model.to(memory_format=torch.channels_last)``.
        if tensor.is_contiguous():
            return tensor
        self._make_copy()
        return self.fetch()

    @property
    def is_rounded(self) -> bool:
        """Whether the tensor has less precision than the memory."""
        return self._copy is not None and self._copy.dtype != self.source.dtype

    @property
    def is_converted_on_device(self) -> bool:
        """Whether the memory is a copy on a device of a tensor there, with nothing but another dtype."""
        copy, tensor = self._copy, self.source
        is_there = copy is not None and copy.is_cuda and tensor.is_cuda and self.constants is None
        return is_there and self.is_rounded and local_of(tensor).is_contiguous()

    def check_kind(self) -> None:
        """Refuse a tensor that is not what it was when it was shared.

        Raises:
            ValueError: the tensor's dtype, device or shape has changed.
        """
        now = _kind_of(self.source)
        if now == self._kind:
            return
        changes = [
            f"its {what} was {before} and is {after} now"
            for what, before, after in zip(_KIND, self._kind, now, strict=True)
            if before != after
        ]
        raise ValueError(
            f"{self.name} has changed since it was shared: {', '.join(changes)}. Nothing was sent. Convert it back "
            "to go on, to save or to close; move and convert the model (model.to, .half, .cuda) before "
            "gradwire.torch.share(model, optimizer), or after optimizer.close()"
        )

    # ---- infinite elements ---------------------------------------------------------------------------------------

    def mark_constants(self) -> torch.Tensor:
        """Mark the tensor's infinite elements; return the memory with the other values."""
        self._set_constants(self.tensor)
        return self.fetch()

    def replace_constants(self, constants: torch.Tensor | None) -> None:
        """Mark the infinite elements of another node's tensor, of which the memory has the finite ones; then store."""
        values = self.memory.clone()
        if constants is None:
            self.constants = None
        else:
            self._set_constants(constants)
        self.memory.copy_(values)
        self.store()

    def assign(self, values: torch.Tensor) -> None:
        """Set the tensor and the memory to values whose infinite elements are constants."""
        self._set_constants(values)
        self.memory.copy_(values)
        if self.constants is not None:
            self.memory.masked_fill_(self.constants.isinf().to(self.memory.device), 0.0)
        self.store()

    def complete(self, values: torch.Tensor) -> torch.Tensor:
        """Put the constants into values like the memory's; return the values."""
        if self.constants is not None:
            constants = self.constants.to(values)
            infinite = constants.isinf()
            values[infinite] = constants[infinite]
        return values

    @normal_tensors
    def _set_constants(self, values: torch.Tensor) -> None:
        self.constants = None
        # Nearly always one pass without temporary values is enough: infinity makes the sum infinite, or NaN.
        if bool(_sum_of(values).isfinite()):
            return
        infinite = values.isinf()
        if bool(infinite.any()):
            self.constants = torch.where(infinite, values, 0.0).to(self.tensor)
            if self._copy is None:
                self._make_copy()

    # ---- values --------------------------------------------------------------------------------------------------

    def fetch(self) -> torch.Tensor:
        """Return the memory with the tensor's values."""
        if self._copy is None:
            return self.memory
        self._copy.copy_(self.tensor)
        if self.constants is not None:
            # A constant that was changed cannot be shared: as NaN it is refused by the encoder.
            is_constant = self.constants.isinf()
            is_kept = is_constant & (self.tensor == self.constants)
            self._copy.masked_fill_(is_constant.to(self._copy.device), torch.nan)
            self._copy.masked_fill_(is_kept.to(self._copy.device), 0.0)
        return self._copy

    def fetch_moved(self) -> torch.Tensor:
        """Return the tensor's values, after the memory held them once and the tensor has changed since.

        Like ``fetch``, but the memory keeps the bits that half precision has rounded off: only the difference is added.
        """
        if not self.is_rounded:
            return self.fetch()
        memory = self.memory
        tensor = self.tensor
        if tensor.dtype in _HALVES and _is_plain(tensor) and self.constants is None:
            _core.add_moved(memory, tensor, _threads_for(tensor))
            return memory
        before = memory.clone()
        rounded = before.to(tensor.dtype).to(before.dtype)
        return self.fetch().sub_(rounded).add_(before)

    def written(self) -> torch.Tensor:
        """Return a copy of the tensor's values as the memory would have them, which stays as it is."""
        values = self.tensor.to(self.memory.dtype, copy=True)
        if self.constants is not None:
            values[self.constants.isinf()] = 0.0
        return values

    def restore_rounded(self, values: torch.Tensor, shared: torch.Tensor) -> None:
        """Restore the bits that half precision has rounded off, if the shared parameters were written into the tensor.

        Args:
            values: as ``written`` returned them; overwritten like the memory.
            shared: parameters like the memory, without infinite elements.
        """
        shared = shared.to(values.device)
        if self.is_rounded and torch.equal(shared.to(self.tensor).to(values), values):
            values.copy_(shared)
            self.memory.copy_(shared)

    @property
    def has_constants(self) -> bool:
        """Whether the infinite elements, if there are any, are what they were."""
        if self.constants is None:
            return True
        infinite = self.constants.isinf()
        return bool((self.tensor == self.constants)[infinite].all())

    def store(self) -> torch.Tensor:
        """Return the tensor with the values of the memory."""
        tensor = self.tensor
        if self._copy is None:
            return tensor
        # Torch's own conversion takes half as long again.
        if (
            tensor.dtype == torch.bfloat16
            and _is_plain(tensor)
            and self._copy.device == tensor.device
        ):
            _core.round_copies(self._copy, tensor, _threads_for(tensor))
        else:
            tensor.copy_(self._copy)
        return self.complete(tensor)


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor without values.

    Raises:
        ValueError: the tensor is on the device meta.
    """
    if tensor.is_meta:
        raise ValueError(
            f"{name} has no memory (device meta): let model.to_empty(device=...) give it to the model, and initialise "
            "it, before the optimiser is made"
        )


def check_params(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that no step can move, that have elements in common, or that are sharded unequally.

    Args:
        named: the parameters, each with its name, "" for none.

    Raises:
        ValueError: the first of them.
    """
    named = [(name or _named_by_shape(param), param) for name, param in named]
    for name, param in named:
        check_memory(param, name)
        if param.is_inference():
            raise ValueError(
                f"{name} was made under torch.inference_mode, and no step can change it: make the model outside"
            )
        local = local_of(param).detach()
        if any(
            stride == 0 < size - 1 for size, stride in zip(local.shape, local.stride(), strict=True)
        ):
            raise ValueError(
                f"{name} has several elements in the same memory, as expand makes them, so no step can move them: make "
                "it of its clone() before the optimiser is made"
            )
    _check_apart(named)
    _check_shards([param for _, param in named])


def _check_apart(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that have elements in common, each of which would count once for every parameter.

    The update of such an element is what all of its parameters' steps have done to it.

    Args:
        named: the parameters, each with its name. Views of one memory are allowed where they do not overlap.

    Raises:
        ValueError: two parameters overlap.
    """
    neighbours: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, param in named:
        tensor = local_of(param).detach()
        if tensor.numel():
            place = tensor.device, tensor.untyped_storage().data_ptr(), tensor.dtype
            neighbours.setdefault(place, []).append((name, tensor))
    for (_, _, dtype), tensors in neighbours.items():
        ranges = sorted(map(_range_of, (tensor for _, tensor in tensors)))
        if all(end <= begin for (_, end), (begin, _) in pairwise(ranges)):
            continue  # they follow each other, as in flat buffers
        numel = tensors[0][1].untyped_storage().nbytes() // dtype.itemsize
        # The number of each element's parameter, 0 for none.
        owners = torch.zeros(numel, dtype=torch.int32)
        for number, (name, tensor) in enumerate(tensors, 1):
            own = owners.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            other = int(own.max())
            if other:
                raise ValueError(
                    f"{tensors[other - 1][0]} and {name} have elements in the same memory, whose updates would count "
                    "twice: to tie weights, make both the same Parameter (decoder.weight = encoder.weight), before the "
                    "optimiser is made; to part them, give one of them a clone()"
                )
            own.fill_(number)


def _named_by_shape(param: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(param.shape)}"


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its memory, in elements."""
    begin = tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + 1 + sum((size - 1) * stride for size, stride in steps)


def _check_shards(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of which ranks have parts of unequal size, as where only some are sharded.

    Each rank has its own threshold and factor, so ranks that hold the same elements would send different ones of them.

    Raises:
        ValueError: some are sharded, and others are whole, or in fewer parts, on several ranks.
    """
    parts = [_parts_of(tensor) for tensor in tensors]
    most, fewest = max(parts, default=1), min(parts, default=1)
    if most != fewest:
        count = sum(number < most for number in parts)
        shape = tuple(tensors[parts.index(fewest)].shape)
        raise ValueError(
            f"{count} of {len(parts)} parameters are in fewer parts than the {most} of the others, the first of shape "
            f"{shape} in {fewest}: ranks that hold the same elements, as of a norm in tensor parallelism, would send "
            "different ones of them and drift apart. Shard all parameters over the same ranks (fully_shard)"
        )


def fetch_moved(stagings: Sequence[Staging]) -> None:
    """Call ``fetch_moved`` of every staging; those in half precision on a device share a launch."""
    copies, tensors = [], []
    for staging in stagings:
        if staging.is_converted_on_device and staging.source.dtype in _HALVES:
            copies.append(staging.memory)
            tensors.append(staging.tensor)
        else:
            staging.fetch_moved()
    if copies:
        device = device_of(copies)
        cuda_core().add_moved(copies, tensors, device, stream_of(None, copies, device))


def store(stagings: Sequence[Staging]) -> None:
    """Call ``store`` of every staging; those on a device share their launches."""
    together = []
    for staging in stagings:
        if staging.is_converted_on_device:
            together.append((staging.tensor, staging.memory))
        else:
            staging.store()
    if together:
        tensors, memories = (list(tensors) for tensors in zip(*together, strict=True))
        torch._foreach_copy_(tensors, memories)


def snapshot(tensor: torch.Tensor) -> str | torch.Tensor:
    """Return a digest of a tensor's bits, for which no memory of its size is needed; or a copy on a device."""
    if tensor.device.type != "cpu":
        return tensor.clone()
    return digest_of([bytes_of(tensor).numpy()])


def is_same(before: str | torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether a tensor has the bits that `snapshot` returned."""
    return before == snapshot(now) if isinstance(before, str) else torch.equal(before, now)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as bytes, in its own memory where that is contiguous."""
    plain = tensor.resolve_conj().resolve_neg()  # a view of such a kind has no bytes of its own
    flat = plain.contiguous().reshape(-1)
    # NumPy gives empty arrays strides of zero, with which torch views nothing as bytes.
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def sums_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a number for each tensor, or none for an empty one, which is not finite if one of its elements is not."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled or not all(tensor.is_cuda for tensor in filled):
        return [_sum_of(tensor) for tensor in filled]
    # A launch for each tensor would take longer than reading it.
    return list(torch._foreach_norm(filled, math.inf))


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor``, or a tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _parts_of(tensor: Any) -> int:
    """Return into how many different parts a ``DTensor`` is divided; 1: it is whole on every rank, or none."""
    sizes = (
        zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if hasattr(tensor, "placements")
        else ()
    )
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of all elements, which is not finite if one of them is not.

    A sum in another dtype than the tensor's takes a copy of it. Those of float16 need that: they exceed its range.
    """
    is_wide = tensor.dtype in (*_CODED, torch.bfloat16)
    return tensor.sum() if is_wide else tensor.sum(dtype=torch.float32)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _threads_for(tensor: torch.Tensor) -> int:
    return max(1, min(torch.get_num_threads(), tensor.numel() // _THREAD_NUMEL))


def _kind_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.shape)
