"""What a node that joins takes over besides the trained parameters: the optimiser's state, and other tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..arrays import Arrays
from ..errors import Mismatch
from .judge import parameters_of
from .staging import Staging, bytes_of, local_of, normal_tensors

__all__ = ["SharedState"]

_LOG = logging.getLogger(__name__)

_TENSOR = "tensor"

# Numbers and flags of a parameter group that every node sets itself, as schedules do, or as its device needs them;
# others may be state, such as a counter, or decide what the state contains, such as ``amsgrad``.
_OWN = frozenset({"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"})


class SharedState:
    """Exports an optimiser's state and a model's other tensors as bytes, whatever they are, and takes them over.

    Nothing is created in advance: an optimiser makes its state in its first step, and what is exported is the state at
    that time. A parameter of which the state holds other things than tensors and numbers is left out.

    Args:
        optimizer: its state is exported; None: none is.
        stagings: of the trained parameters, in the order of all nodes; their infinite elements are exported.
        others: returns the model's tensors that the optimiser does not train, by name; those whose size may differ from
            node to node come second.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        stagings: Sequence[Staging],
        others: Callable[[], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]],
    ) -> None:
        self._optimizer = optimizer
        self._stagings = stagings
        self._others = others
        self._has_warned = False
        # The infinite elements of another node's parameters, until `settle`.
        self._constants: list[torch.Tensor | None] | None = None

    def export(self) -> Arrays:
        """Return a description as bytes, and the bytes of each tensor in it."""
        arrays: Arrays = []
        params: list[Any] = []
        if self._optimizer is not None:
            for staging in self._stagings:
                param = staging.source
                params.append(self._exported(self._optimizer.state.get(param, {}), param, arrays))
        has_state = any(params)
        fixed, varying = self._others()
        document = {
            "optimizer": type(self._optimizer).__name__,
            "params": params,
            "groups": [
                {
                    key: _tree(value, next(iter(group["params"]), None), arrays)
                    for key, value in group.items()
                    if key not in _OWN
                    and (torch.is_tensor(value) or isinstance(value, (bool, int, float)))
                }
                for group in (self._optimizer.param_groups if self._optimizer and has_state else ())
            ],
            "constants": [
                None if staging.constants is None else _put(staging.constants, None, arrays)
                for staging in self._stagings
            ],
            "fixed": {name: _put(tensor, None, arrays) for name, tensor in fixed.items()},
            "varying": {name: _put(tensor, None, arrays) for name, tensor in varying.items()},
        }
        # A model whose optimiser has no state yet, and which has nothing else, has nothing to say.
        if not arrays and not has_state:
            return []
        return [np.frombuffer(json.dumps(document).encode(), np.uint8), *arrays]

    def check(self, arrays: Arrays) -> None:
        """Refuse the state of another model or optimiser.

        Raises:
            Mismatch: the text names the difference.
        """
        document = _read(arrays)
        if document is None:
            return
        here = 0 if self._optimizer is None else len(self._stagings)
        there = len(document["params"])
        if there not in (0, here):
            raise Mismatch(f"this node's optimiser has {here} parameters, the members' has {there}")
        # Of another optimiser it would lack what this one looks for in its next step.
        kind = type(self._optimizer).__name__
        if here and any(document["params"]) and kind != document["optimizer"]:
            raise Mismatch(
                f"this node's optimiser is {kind}, the members' is {document['optimizer']}, whose state it cannot take "
                "over: give all nodes the same one, or share_state=False"
            )
        fixed, _ = self._others()
        names = sorted(fixed.keys() ^ document["fixed"].keys())
        if names:
            raise Mismatch(
                f"tensors that are not trained are not in both models: {', '.join(names[:6])}"
            )
        for name, saved in document["fixed"].items():
            own = [str(fixed[name].dtype), list(local_of(fixed[name].detach()).shape)]
            if own != saved[1:3]:
                raise Mismatch(f"{name} is {own} on this node, {saved[1:3]} on the members")

    @normal_tensors
    def load(self, arrays: Arrays) -> None:
        """Take over another node's state; parameters of which it has none lose theirs.

        Raises:
            Mismatch: a tensor's memory has no place for the other node's values; the text names it.
        """
        document = _read(arrays)
        if document is None:
            return
        if self._optimizer is not None:
            state = self._optimizer.state
            trained = set(parameters_of(self._optimizer))
            for staging, saved in zip(self._stagings, document["params"], strict=False):
                param = staging.source
                state.pop(param, None)
                if saved and param in trained:
                    state[param] = {
                        key: _loaded(value, param, arrays) for key, value in saved.items()
                    }
            groups = self._optimizer.param_groups
            for group, saved in zip(groups, document["groups"], strict=False):
                first = next(iter(group["params"]), None)
                group.update({key: _loaded(value, first, arrays) for key, value in saved.items()})
        self._constants = [
            None if saved is None else _get(saved, arrays) for saved in document["constants"]
        ]
        fixed, varying = self._others()
        for name, saved in document["fixed"].items():
            _assign(fixed[name], _get(saved, arrays), name)
        for name, saved in document["varying"].items():
            own = varying.get(name)
            if own is not None and list(local_of(own.detach()).shape) == saved[2]:
                _assign(own, _get(saved, arrays), name)

    def settle(self) -> None:
        """Let the parameters have the infinite elements that `load` has brought, once their memory has the others."""
        pending = self._constants
        self._constants = None
        for staging, constants in zip(self._stagings, pending or (), strict=False):
            if constants is not None or staging.constants is not None:
                staging.replace_constants(constants)

    def _exported(self, state: Any, param: torch.Tensor, arrays: Arrays) -> Any:
        """Return one parameter's state with its tensors in ``arrays``; an empty one where that is not possible."""
        count = len(arrays)
        try:
            return {key: _tree(value, param, arrays) for key, value in state.items()}
        except TypeError as error:
            del arrays[count:]
            if not self._has_warned:
                _LOG.warning("nodes that join late begin without the optimiser's state: %s", error)
            self._has_warned = True
            return {}


def _tree(value: Any, param: torch.Tensor | None, arrays: Arrays) -> Any:
    """Return JSON values for a value of an optimiser's state, and put its tensors into ``arrays``."""
    if torch.is_tensor(value):
        return {_TENSOR: _put(value, param, arrays)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_tree(item, param, arrays) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _tree(item, param, arrays) for key, item in value.items()}
    raise TypeError(f"it has a {type(value).__name__}, which is no tensor, number or text")


def _loaded(value: Any, param: Any, arrays: Arrays) -> Any:
    """Return what `_tree` was given, its tensors where they belong."""
    if isinstance(value, list):
        return [_loaded(item, param, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_TENSOR}:
        return {key: _loaded(item, param, arrays) for key, item in value.items()}
    _, _, _, is_with_param, is_sharded = saved = value[_TENSOR]
    tensor = _get(saved, arrays)
    # Counters may be in host memory while parameters are on a device.
    if is_with_param:
        tensor = tensor.to(param.device)
    local = None if param is None else local_of(param.detach())
    # In the order of the parameter's memory, as of channels_last: fused optimisers take that for granted.
    if local is not None and local.shape == tensor.shape and local.stride() != tensor.stride():
        ordered = torch.empty_like(local, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    if is_sharded and hasattr(param, "to_local"):
        from torch.distributed.tensor import DTensor

        sharded: Any = param
        # Shards may be uneven, so torch cannot tell the whole tensor's shape from this one.
        is_alike = tensor.shape == local_of(param).shape
        layout = {"shape": param.shape, "stride": param.stride()} if is_alike else {}
        return DTensor.from_local(tensor, sharded.device_mesh, sharded.placements, **layout)
    return tensor


def _put(tensor: torch.Tensor, param: torch.Tensor | None, arrays: Arrays) -> list[Any]:
    """Append a tensor's bytes; return their place, the dtype, the shape, and how the tensor follows its parameter."""
    local = local_of(tensor.detach())
    # The momentum of sparse gradients is sparse at first; torch adds to a dense one as well.
    local = local if local.layout is torch.strided else local.to_dense()
    arrays.append(bytes_of(local).cpu().numpy())
    is_with_param = param is not None and local.device == param.device
    return [
        len(arrays),
        str(local.dtype),
        list(local.shape),
        is_with_param,
        hasattr(tensor, "to_local"),
    ]


def _assign(tensor: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Set a tensor that is not trained, of whatever kind, to another node's values.

    Raises:
        Mismatch: the tensor's memory has no place for them.
    """
    local = local_of(tensor.detach())
    place = f"{name} of this node cannot hold the members' values, which differ from its own: "
    if local.layout is not torch.strided:
        if torch.equal(bytes_of(local.to_dense()), bytes_of(values.to(local.device))):
            return
        if local.layout is not torch.sparse_coo:
            raise Mismatch(f"{place}it is {local.layout}; make it dense, or equal on all nodes")
        # Not what detach() returns, which would get indices of its own.
        tensor.copy_(values.to_sparse(local.sparse_dim()).to(local.device))
        return
    # What expand() has made is written to once.
    for dim, (size, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
        if size > 1 and stride == 0:
            first = values.narrow(dim, 0, 1)
            if not torch.equal(bytes_of(first.expand_as(values)), bytes_of(values)):
                raise Mismatch(f"{place}expand() has made it; make it of its clone()")
            local, values = local.narrow(dim, 0, 1), first
    with torch.inference_mode(local.is_inference()):  # tensors from there change only there
        local.copy_(values)


def _get(saved: Sequence[Any], arrays: Arrays) -> torch.Tensor:
    """Return a tensor from its bytes, in their memory if nothing else uses it."""
    place, dtype, shape, *_ = saved
    kind = getattr(torch, dtype.removeprefix("torch."))
    data = arrays[place]
    if not data.size:
        return torch.empty(shape, dtype=kind)
    # A snapshot has brought an array of its own for each tensor; others may be views.
    if not (data.flags.owndata and data.flags.writeable):
        data = np.array(data, np.uint8)
    return torch.from_numpy(data).view(kind).reshape(shape)


def _read(arrays: Arrays) -> Any:
    """Return the description of an exported state; None for nothing."""
    if not arrays:
        return None
    try:
        return json.loads(bytes(arrays[0]))
    except ValueError as error:
        raise Mismatch(f"the members' state cannot be read: {error}") from error
