"""What a shared optimiser adds to a checkpoint, and how torch's functions for distributed checkpoints carry it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from .. import ulps
from ..arrays import on_host, writable_views
from ..exchange.checkpoint import params_of
from ..exchange.consistency import digest_of
from ..exchange.exchange import check_state
from ..exchange.groups import split_by_tensor
from ..exchange.local import leader_of
from .staging import Staging, snapshot

if TYPE_CHECKING:
    from types import FrameType

    from numpy.typing import NDArray

    from ..exchange import AnyExchange

__all__ = [
    "KEY",
    "LoadedState",
    "Values",
    "are_same",
    "check_kinds",
    "dcp_caller",
    "overwritten",
    "put_into",
    "seen",
    "state_of",
    "take_from",
]

#: A node's own parameters: the codec's memory, and the tensors that have less precision than that memory.
Values = tuple[list[np.ndarray[Any, Any]], list[torch.Tensor]]

# Where the exchange's state is in an optimiser's state.
KEY = "gradwire"

# Integers as wide as a tensor's elements.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Torch's functions for distributed checkpoints. Hooks, schedulers and profilers may stand between them and the
# optimiser's methods, though not many.
_DCP = "torch.distributed.checkpoint.state_dict"
_FRAMES_MAX = 16
_LISTS = "outer_velocity", "last_updates", "sample", "moved", "unsettled"  # of an exchange's state


# ---- an exchange's state and a node's own parameters -----------------------------------------------------------------


def state_of(
    state: dict[str, Any],
    own: Values,
    shared: list[NDArray[Any]],
    is_rounded: Sequence[bool],
    *,
    in_model: Sequence[bool],
    written: Sequence[bool],
) -> dict[str, Any]:
    """Return the state of an exchange and of a node's own parameters, as tensors and plain values.

    A parameter is what all nodes share plus this node's residual, but for rounding in few elements. Where the model's
    own state has the shared parameters, the residual is therefore nearly all that is stored.

    Args:
        state: of the exchange of this node, or of one worker of its team; not to be used afterwards.
        own: this node's parameters, in host memory.
        shared: those that all nodes share, in host memory.
        is_rounded: for every parameter whether its tensor has less precision than the codec's memory.
        in_model: for every parameter whether the model's own state has the shared one, as far as its precision goes.
        written: for every parameter whether other weights were written into it since the last step.
    """
    params, halves = own
    tensors = list(map(torch.from_numpy, params))
    bases: Iterable[Any] = [None] * len(params)
    if "encoders" in state:  # of a team only the leader's
        bases = map(torch.from_numpy, params_of({**state, "shared": shared}))
    state["local"] = tuple(map(_pack, tensors, bases))
    if "encoders" in state:
        # In half precision the model's state lacks bits.
        state["shared"] = tuple(
            None if flag and not is_half else array
            for array, flag, is_half in zip(shared, in_model, is_rounded, strict=True)
        )
        if any(in_model):
            state["digest"] = digest_of(shared)
        # Tuples, because a distributed checkpoint stores and loads a tuple as a whole: the state before the first step,
        # into which it is loaded, has no velocity and owns nothing.
        for name in _LISTS:
            state[name] = tuple(state.get(name, ()))
        state["owner"] = (state["owner"],)
    rounded = [tensor for tensor, flag in zip(tensors, is_rounded, strict=True) if flag]
    state["rounded"] = tuple(
        _pack(half, tensor.to(half.dtype)) for half, tensor in zip(halves, rounded, strict=True)
    )
    # A leader stores it always: a distributed checkpoint loads only entries that the state before the load has, too.
    if "encoders" in state or any(written):
        state["written"] = tuple(written)
    tree: dict[str, Any] = _map_leaves(state, np.ndarray, torch.from_numpy)
    return tree


def seen(params: Sequence[Staging], rounded: list[torch.Tensor]) -> Values:
    """Return a node's own parameters in host memory, in the codec's own memory where that is possible.

    Args:
        params: whose memory has the values.
        rounded: copies of the tensors that have less precision than that memory.
    """
    memory = []
    for staging in params:
        [array] = map(on_host, writable_views(staging.memory))
        if staging.constants is not None:
            array = staging.complete(torch.from_numpy(array.copy())).numpy()
        memory.append(array)
    return memory, rounded


def overwritten(
    own: Values, now: Values, written: Sequence[bool], is_rounded: Sequence[bool]
) -> Values:
    """Return a node's own parameters, but for those that were written as they are now."""
    memory = [
        array if flag and not is_half else before
        for before, array, flag, is_half in zip(own[0], now[0], written, is_rounded, strict=True)
    ]
    flags = [flag for flag, is_half in zip(written, is_rounded, strict=True) if is_half]
    halves = [
        half if flag else before for before, half, flag in zip(own[1], now[1], flags, strict=True)
    ]
    return memory, halves


class LoadedState:
    """The state of a checkpoint, from its load to the first step.

    Args:
        stored: as ``state_of`` returned it.

    Attributes:
        stored: as given.
        is_restored: whether the model has this node's parameters of the checkpoint.
        written: by the numbers of the parameters into which other weights had been written since the last step, the
            shared ones; None where the codec's memory had not yet taken the weights over, or another worker has them.
    """

    def __init__(self, stored: dict[str, Any]) -> None:
        self.stored = stored
        self.is_restored = False
        self.written: dict[int, torch.Tensor | None] = {}

    def restore(
        self,
        exchange: AnyExchange,
        params: Sequence[NDArray[Any]],
        half_dtypes: Sequence[torch.dtype | None],
    ) -> Values | None:
        """Load the exchange's state, and return this node's own parameters; None if the model lacks the shared ones.

        Args:
            exchange: of this node.
            params: copies of the model's, as they were loaded.
            half_dtypes: for every parameter the dtype of its tensor if that is ``is_rounded``.

        Raises:
            ValueError, RuntimeError: as ``Exchange.load_state_dict``.
        """
        self.is_restored = False
        stored = dict(self.stored)
        nothing = (None,) * len(params)
        local = stored.pop("local", nothing)  # ``redistribute`` removes what is one node's
        half_count = sum(dtype is not None for dtype in half_dtypes)
        halves = stored.pop("rounded", nothing[:half_count])
        # Where states were merged for other nodes, the residual alone has what was written.
        flags = stored.pop("written", ()) if local is not nothing else ()
        self.written = {index: None for index, flag in enumerate(flags) if flag}
        bases = list(params)
        values: Values | None = None
        try:
            state = _map_leaves(stored, torch.Tensor, lambda tensor: tensor.cpu().numpy())
            is_held = True
            if "encoders" in state:  # of a worker its leader has the rest
                shared = [
                    array if kept is None else kept
                    for array, kept in zip(bases, state["shared"] or nothing, strict=True)
                ]
                if isinstance(state["owner"], (list, tuple)):
                    [state["owner"]] = state["owner"]
                # Some of torch's functions drop empty tuples.
                state |= {name: list(state.get(name, ())) for name in _LISTS}
                # Infinite elements are no part of any sum.
                state["shared"] = [
                    np.where(is_infinite, array.dtype.type(0), array)
                    if is_infinite.any()
                    else array
                    for array in shared
                    for is_infinite in [np.isinf(array)]
                ]
                leader = leader_of(exchange)
                if leader is not None:
                    check_state(leader, state)
                is_held = "digest" not in state or digest_of(shared) == state["digest"]
                if is_held:
                    bases = list(params_of({**state, "shared": shared}))
                for index in self.written:
                    if half_dtypes[index] is None:
                        self.written[index] = torch.from_numpy(shared[index])
                if any(written is not None for written in self.written.values()):
                    state["encoders"] = self._without_written(state, state["shared"])
            if is_held:
                if (len(local), len(halves)) != (len(params), half_count):
                    raise ValueError(
                        f"the state has {len(local)} parameters, {len(halves)} of them in half precision, the model "
                        f"{len(params)} and {half_count}, and nothing was loaded"
                    )
                tensors = map(torch.from_numpy, bases)
                own = [_unpack(*pair) for pair in zip(local, tensors, strict=True)]
                rounded = [
                    tensor.to(dtype)
                    for tensor, dtype in zip(own, half_dtypes, strict=True)
                    if dtype is not None
                ]
                values = (
                    [tensor.numpy() for tensor in own],
                    [_unpack(*pair) for pair in zip(halves, rounded, strict=True)],
                )
                _check_shapes(values, params, half_dtypes)
                if "digest" in state and not _has_halves(params, half_dtypes, shared, values[1]):
                    values = None
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"the state of the exchange cannot be read, and nothing was loaded: {error!r}"
            ) from error
        # Last, because nothing after it can fail: the exchange would keep a residual whose parameters were not loaded.
        exchange.load_state_dict(state)
        self.is_restored = values is not None
        return values

    def is_held(self, own: Values, params: Sequence[Staging]) -> bool:
        """Return whether the model has this node's own parameters, which ``restore`` has returned."""
        memory, rounded = own
        halves = iter(rounded)
        return self.is_restored and all(
            torch.equal(
                staging.tensor.cpu(),
                next(halves) if staging.is_rounded else torch.from_numpy(array),
            )
            for staging, array in zip(params, memory, strict=False)
        )

    def _without_written(
        self, state: dict[str, Any], shared: list[NDArray[Any]]
    ) -> list[dict[str, Any]]:
        """Return the states of the encoders, with no residual where weights were written: it leads to these."""
        encoders = [{**saved, "residual": saved["residual"].copy()} for saved in state["encoders"]]
        parts = split_by_tensor([saved["residual"] for saved in encoders], state["tensors"], shared)
        for index, values in self.written.items():
            if values is not None:
                parts[index][...] = 0.0
        return encoders

    def take_back(self, params: Sequence[Staging]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take out of the model what had been written into it before the state was saved; return tensors and values.

        Written again after the join, this is noticed as without the checkpoint: all nodes go on from it if it is the
        same on all.
        """
        taken = []
        for index, shared in self.written.items():
            tensor = params[index].tensor
            taken.append((tensor, tensor.clone()))
            if shared is not None:
                params[index].assign(shared)
        return taken


# ---- bits that differ ------------------------------------------------------------------------------------------------


def are_same(arrays: Sequence[NDArray[Any]], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each array whether a tensor has its bits, as far as the tensor's precision goes."""
    return [
        snapshot(torch.from_numpy(array).to(tensor.dtype)) == snapshot(tensor.cpu())
        for array, tensor in zip(arrays, tensors, strict=True)
    ]


def check_kinds(params: Sequence[Staging]) -> None:
    """Refuse to put shared parameters into tensors of another kind, or into a state of these.

    Raises:
        ValueError: as ``Staging.check_kind``.
    """
    try:
        for staging in params:
            staging.check_kind()
    except ValueError as error:
        raise ValueError(
            f"{error}, or after optimizer.close(): as it is now, it has this node's own parameters, residual included, "
            "and not those that all nodes share"
        ) from None


def _check_shapes(
    values: Values, params: Sequence[NDArray[Any]], half_dtypes: Sequence[torch.dtype | None]
) -> None:
    """Raise `ValueError` unless a node's own parameters have the shapes of the model's."""
    whole = [param.shape for param in params]
    halves = [shape for shape, dtype in zip(whole, half_dtypes, strict=True) if dtype is not None]
    shapes = [tuple(value.shape) for value in (*values[0], *values[1])]
    if shapes != [*whole, *halves]:
        raise ValueError(
            f"the state has parameters of shapes {shapes}, the model of {[*whole, *halves]}, and nothing was loaded"
        )


def _has_halves(
    params: Sequence[NDArray[Any]],
    half_dtypes: Sequence[torch.dtype | None],
    shared: Sequence[NDArray[Any]],
    own: Sequence[torch.Tensor],
) -> bool:
    """Return whether a model's parameters in half precision are the shared ones, or this node's own."""
    halves = iter(own)
    for param, dtype, array in zip(params, half_dtypes, shared, strict=True):
        if dtype is None:
            continue
        now = torch.from_numpy(param).to(dtype)
        # The codec's memory has zeros where they are infinite.
        known = [_finite(torch.from_numpy(array).to(dtype)), _finite(next(halves))]
        if not any(torch.equal(now, values) for values in known):
            return False
    return True


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values.isinf(), 0.0)


def _pack(values: torch.Tensor, base: torch.Tensor | None) -> Any:
    """Return what turns ``base`` into ``values``, see `ulps.pack`, or a copy of all values, as tensors."""
    if base is None:
        return values.clone()
    packed = ulps.pack(_bits(values), _bits(base))
    if not isinstance(packed, tuple):
        return None if packed is None else values.clone()
    codes, steps, far = map(torch.from_numpy, packed)
    return codes, steps, far.view(values.dtype)


def _unpack(packed: Any, base: torch.Tensor) -> torch.Tensor:
    """Return the values that ``_pack`` was given; ``base`` is as there, and may be modified."""
    if packed is None:
        return base
    if torch.is_tensor(packed):
        whole: torch.Tensor = packed.cpu()
        return whole
    codes, steps, far = (tensor.cpu() for tensor in packed)
    ulps.unpack((codes.numpy(), steps.numpy(), _bits(far)), _bits(base))
    return base


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the bits of a tensor in host memory as integers; NumPy has no bfloat16."""
    bits: NDArray[Any] = tensor.reshape(-1).view(_BITS[tensor.element_size()]).numpy()
    return bits


def _map_leaves(tree: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with ``function`` applied to every leaf of ``kind``."""
    if isinstance(tree, dict):
        return {key: _map_leaves(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_map_leaves(value, kind, function) for value in tree])
    return function(tree) if isinstance(tree, kind) else tree


# ---- in an optimiser's state -----------------------------------------------------------------------------------------


def put_into(state: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Return an optimiser's state with that of the exchange under "gradwire".

    For ``get_optimizer_state_dict`` and ``get_state_dict`` it is in the first parameter group: they keep the state of
    the parameters and the groups, and drop everything else without a word.

    Raises:
        ValueError: these functions are called with ``flatten_optimizer_state_dict``, which has one value for each
            parameter only, or on several ranks with options that keep rank 0's state alone.
    """
    caller = dcp_caller("_get_optim_state_dict")
    if caller is None:
        return {**state, KEY: stored}
    info: Any = caller.f_locals.get("info")
    if getattr(info, "flatten_optimizer_state_dict", False):
        raise ValueError(
            "flatten_optimizer_state_dict=True has no place for the residual and the other state of the exchange: save "
            "without this option"
        )
    is_first_only = getattr(info, "full_state_dict", False) and getattr(info, "cpu_offload", False)
    is_first_only |= getattr(info, "broadcast_from_rank0", False)
    if is_first_only and _dcp_key() != KEY:
        raise ValueError(
            "full_state_dict=True with cpu_offload=True, or with broadcast_from_rank0=True, has the state of rank 0 "
            "alone, and every rank has a residual of its own: save and load on every rank, without the second option"
        )
    first, *others = state["param_groups"]
    # A tuple, which distributed checkpoints store as a whole.
    held: tuple[Any, ...] = (stored,)
    if _dcp_key() != KEY:
        held = stored, _unsharded(state)
    return {**state, "param_groups": [{**first, _dcp_key(): held}, *others]}


def take_from(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimiser's state without the exchange's, and that of the exchange, empty if there is none.

    Raises:
        ValueError: there are only those of other ranks, or what is under the exchange's name is no state.
    """
    rest = dict(state)
    stored: Any = rest.pop(KEY, None)
    has_stored = KEY in state
    groups = []
    others: set[str] = set()
    unsharded: Sequence[Any] = ()  # none in older checkpoints
    for group in rest.get("param_groups", ()):
        plain = dict(group)
        if _dcp_key() in plain:
            stored, *values = plain.pop(_dcp_key())
            has_stored = True
            unsharded = values[0] if values else ()
        others.update(key for key in plain if key.partition(".")[0] == KEY)
        groups.append({key: plain[key] for key in plain if key not in others})
    if others and not stored:
        raise ValueError(
            f"the state has the residuals of {', '.join(sorted(others))}, and none of this rank, {_dcp_key()}: resume "
            "with the number of ranks that saved it"
        )
    # Taken for a plain optimiser's state, it would lose the residual without a word.
    if has_stored and not (isinstance(stored, Mapping) and stored):
        raise ValueError(
            f'the state has {reprlib.repr(stored)} under "{KEY}", which is no state of an exchange, and nothing was '
            "loaded: load another checkpoint"
        )
    if unsharded:
        names = [name for group in groups for name in group["params"]]
        own = {name: value for name, value in zip(names, unsharded, strict=False) if value}
        rest["state"] = {**rest["state"], **own}
    return {**rest, "param_groups": groups} if groups else rest, stored or {}


def _unsharded(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return this rank's own state of an optimiser, in the order of the parameters, where it is not sharded.

    All ranks' shards are stored anyway. Of the state of a whole parameter, which differs among the ranks under one
    name, one rank's is; torch's functions do not load without it.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    values = [state["state"].get(number, {}) for number in numbers]
    return tuple(
        {} if any(hasattr(part, "to_local") for part in value.values()) else value
        for value in values
    )


def _dcp_key() -> str:
    """Return this rank's key: of what has one name on all ranks, a distributed checkpoint stores only one rank's."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return KEY
    return f"{KEY}.{dist.get_rank()}"


def dcp_caller(name: str) -> FrameType | None:
    """Return the frame of one of torch's functions for distributed checkpoints if the caller was called from there.

    Torch has no other way to tell them from the user. ``_init_optim_state`` takes a step without gradients to make the
    optimiser's state: shared, it would be a step that the other nodes do not take. ``_get_optim_state_dict`` drops what
    is neither the state of a parameter nor in a parameter group.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return None
        if frame.f_code.co_name == name and frame.f_globals.get("__name__") == _DCP:
            return frame
        frame = frame.f_back
    return None
