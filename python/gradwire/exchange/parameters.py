"""The parameters that all nodes share: sums of messages, and how this node's copy differs from the shared one."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arrays import device_of
from ..message import Message, apply_many, apply_to_both, apply_with_momentum
from ..partition import Part, Partition
from ..transport import Peer
from .groups import Groups

__all__ = [
    "Arrays",
    "ExactSum",
    "Exactness",
    "MomentumSum",
    "PlainSum",
    "SecondTarget",
    "SharedCopy",
    "add",
    "add_owner_state",
    "copies",
    "described",
    "difference",
    "gathered",
    "on_host",
    "owner_arrays",
    "put",
    "views",
    "writable_views",
]

Arrays: TypeAlias = list[NDArray[Any]]

_FLOAT64_BITS = 53
_THRESHOLD_BITS = 8

# Elements per block of an exact sum: two float64 and one float32 block fit into the first-level cache.
_BLOCK = 1 << 13

# Bound on the difference between parameters and shared copy + residual, relative to both: eight roundings of float32.
_ROUNDING = 2.0**-20


# ---- arrays as NumPy sees them, or tensors on a device ---------------------------------------------------------------


def views(arrays: Any) -> Arrays:
    """Return each array as NumPy sees it, without a copy; torch's tensors on a device as they are.

    Args:
        arrays: one array, or a list or tuple: ndarrays, buffers, CPU tensors with ``numpy``, or torch's on a device.

    Raises:
        TypeError: NumPy cannot view an array in place.
        ValueError: a tensor that requires grad.
    """
    return [_view(one) for one in _as_list(arrays)]


def writable_views(arrays: Any) -> Arrays:
    """Return each array as ``views`` does, checked to be float32 or float64, contiguous and writable.

    Raises:
        TypeError: another dtype, or NumPy cannot view an array in place.
        ValueError: read-only or not C-contiguous.
    """
    found = views(arrays)
    for one in found:
        dtype = _dtype_of(one)
        if dtype not in ("float32", "float64"):
            raise TypeError(f"parameters must be float32 or float64, got {dtype}")
        if isinstance(one, np.ndarray):  # noqa: SIM108
            is_fit = one.flags.c_contiguous and one.flags.writeable
        else:
            is_fit = one.is_contiguous()
        if not is_fit:
            raise ValueError("parameters must be C-contiguous and writable")
    return found


def _as_list(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def _dtype_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _view(array: Any) -> NDArray[Any]:
    if getattr(array, "requires_grad", False):
        raise ValueError(
            "a tensor that requires grad does not lend its memory: pass tensor.detach()"
        )
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    if hasattr(array, "copy_") and device_of(array) >= 0:
        tensor: NDArray[Any] = array
        return tensor
    try:
        return np.asarray(array.numpy() if hasattr(array, "numpy") else memoryview(array))
    except (TypeError, BufferError):  # the second is JAX's for bfloat16
        raise TypeError(
            f"{type(array).__name__} is not an array that NumPy can view in place; "
            "pass arrays in host memory, or torch's tensors"
        ) from None


def described(arrays: Any) -> list[list[Any]]:
    """Return [dtype, shape] of each array, as JSON values; the arrays may lie on a device."""
    found = []
    for one in _as_list(arrays):
        array = one if hasattr(one, "dtype") and hasattr(one, "shape") else _view(one)
        found.append([_dtype_of(array), list(array.shape)])
    return found


def on_host(array: Any) -> NDArray[Any]:
    """Return an array itself, or a copy in host memory of a tensor on a device."""
    if isinstance(array, np.ndarray):
        return array
    host: NDArray[Any] = array.cpu().numpy()
    return host


def copies(arrays: Sequence[NDArray[Any]]) -> Arrays:
    """Return a contiguous copy of each array, in host memory."""
    return [np.array(on_host(one), order="C") for one in arrays]


def zeros_like(arrays: Sequence[Any]) -> Arrays:
    """Return zeros for each array, where it is."""
    return [
        np.zeros_like(one) if isinstance(one, np.ndarray) else one.new_zeros(one.shape)
        for one in arrays
    ]


def put(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Copy every array of ``source`` to its counterpart in ``target``, from or to a device where they differ."""
    for to, of in zip(target, source, strict=True):
        if isinstance(to, np.ndarray):
            to[...] = on_host(of)
            continue
        tensor: Any = to
        if isinstance(of, np.ndarray):
            tensor.copy_(sys.modules["torch"].from_numpy(np.ascontiguousarray(of)))
        else:
            tensor.copy_(of)


def placed(arrays: Arrays, like: Any) -> Arrays:
    """Return the arrays themselves, or copies in the memory of other arrays if these are on a device."""
    others = views(like)
    if (device_of(arrays) < 0) == (device_of(others) < 0):
        return arrays
    found = zeros_like(others)
    put(found, arrays)
    return found


def add(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Add every array of ``source`` to its counterpart in ``target``.

    Raises:
        ValueError: the sizes differ; nothing was added.
    """
    sizes = [math.prod(one.shape) for one in target], [math.prod(one.shape) for one in source]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"an update of arrays with {sizes[1]} elements for parameters of {sizes[0]}"
        )
    for to, of in zip(target, source, strict=True):
        to += of.reshape(to.shape)


def difference(minuend: Sequence[NDArray[Any]], subtrahend: Sequence[NDArray[Any]]) -> Arrays:
    """Return the differences of all pairs of arrays, in new memory."""
    return [one - other for one, other in zip(minuend, subtrahend, strict=True)]


def gathered(arrays: Any, part: Part) -> NDArray[Any]:
    """Return a copy of a part of the elements of several arrays."""
    flat = [one.reshape(-1) for one in views(arrays)]
    ends = np.cumsum([one.size for one in flat]).tolist()
    found = []
    for whole, _ in part.slices():
        at, begin = bisect_right(ends, whole.start), whole.start
        while begin < whole.stop:
            first = ends[at] - flat[at].size
            found.append(flat[at][begin - first : whole.stop - first])
            begin, at = ends[at], at + 1
    return np.concatenate(found)


# ---- sums of messages ------------------------------------------------------------------------------------------------


@dataclass
class Exactness:
    """Whether a growing sum of messages in float64 is provably free of rounding, in any order.

    Every threshold is a multiple of its last significant bit. Sums of such multiples are exact while they need no more
    than float64's 53 bits above the smallest of those bits. Dense messages hold arbitrary values and prove nothing.
    """

    last_bit: float = math.inf
    largest: float = 0.0  # bound on every element of the sum
    has_dense: bool = False

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Extend the sum."""
        for message in messages:
            if message.count and message.kind == "dense":
                self.has_dense = True
            elif message.count:
                self.largest += message.threshold
                exponent = math.frexp(message.threshold)[1] - _THRESHOLD_BITS
                self.last_bit = min(self.last_bit, math.ldexp(1.0, exponent))

    @property
    def is_proven(self) -> bool:
        """Whether no addition so far has rounded."""
        is_small = self.largest <= math.ldexp(self.last_bit, _FLOAT64_BITS)
        return not self.has_dense and (is_small or self.largest == 0.0)


class SecondTarget(NamedTuple):
    """Parameters that get the same messages as the shared ones, except those that they hold already.

    Attributes:
        params: like the shared parameters.
        own: index of the payload that they hold already, in full; None: none.
    """

    params: Arrays
    own: int | None


Payloads: TypeAlias = Sequence[Sequence[Message]]


class TakenParts(NamedTuple):
    """The parts of one sender that an owner has taken: all before ``stop``, except those from ``lost`` to ``found``.

    Parts are lost with a connection. The sender joins again then, so only the last gap matters.
    """

    stop: int
    lost: int = 0
    found: int = 0

    def has(self, number: int) -> bool:
        """Return whether the part of update ``number`` was taken."""
        return number < self.stop and not self.lost <= number < self.found


Taken: TypeAlias = dict[Peer, dict[Peer, TakenParts]]


def add_scaled(groups: Groups, payloads: Payloads, params: Any, scale: float) -> None:
    """Add the messages of several payloads, in order: ``params += scale * message``."""
    for index, encoder in enumerate(groups.encoders):
        messages = [payload[index] for payload in payloads]
        apply_many(messages, groups.select(params, index), scale, threads=encoder.threads)


class PlainSum:
    """Adds messages to the parameters directly: ``params += message / divisor``, in order."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def add_payloads(
        self, payloads: Payloads, params: Any, divisor: int, second: SecondTarget | None = None
    ) -> bool:
        """Add the messages of several payloads, in order; return whether the sum is provably exact."""
        if second is None:
            add_scaled(self._groups, payloads, params, 1.0 / divisor)
            return False
        for index, encoder in enumerate(self._groups.encoders):
            apply_to_both(
                [payload[index] for payload in payloads],
                self._groups.select(params, index),
                self._groups.select(second.params, index),
                own=second.own,
                scale=1.0 / divisor,
                threads=encoder.threads,
            )
        return False


class MomentumSum(PlainSum):
    """Adds messages with Nesterov's momentum: a part of every addition is repeated in the next steps.

    Every node does the same arithmetic with the same messages, so replicas stay identical bit for bit.

    Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1;
    J. Wang et al., "SlowMo: Improving communication-efficient distributed SGD with slow momentum", ICLR 2020.

    Attributes:
        velocity: one array for each of the parameters; empty before the first step.
    """

    def __init__(self, groups: Groups, momentum: float) -> None:
        super().__init__(groups)
        self._momentum = momentum
        self.velocity: Arrays = []

    def ensure_velocity(self, params: Any) -> None:
        """Start with a velocity of zero, unless there is one already; keep it where the parameters are."""
        if not self.velocity:
            self.velocity = zeros_like(writable_views(params))
        self.velocity = placed(self.velocity, params)

    def accelerate(self, added: Arrays) -> None:
        """Add the momentum to an addition to the parameters, in place."""
        self.ensure_velocity(added)
        for velocity, one in zip(self.velocity, added, strict=True):
            velocity += one
            velocity *= self._momentum
            one += velocity

    def add_payloads(
        self, payloads: Payloads, params: Any, divisor: int, second: SecondTarget | None = None
    ) -> bool:
        """Add the messages of several payloads; nothing is proven."""
        self.ensure_velocity(params)
        for index, encoder in enumerate(self._groups.encoders):
            messages = [payload[index] for payload in payloads]
            apply_with_momentum(
                messages,
                self._groups.select(params, index),
                self._groups.select(self.velocity, index),
                momentum=self._momentum,
                scale=1.0 / divisor,
                second=() if second is None else self._groups.select(second.params, index),
                own=None if second is None else second.own,
                threads=encoder.threads,
            )
        return False


class ExactSum(PlainSum):
    """Keeps the sum of all messages in float64: ``params = initial + sum / divisor``, divided and rounded once.

    Replicas with the same initial parameters and the same messages, in whatever order they came, hold the same bits as
    long as the float64 sum does not round. Every step overwrites the parameters.

    Attributes:
        initial: copies of the parameters before the first message, in their dtype; empty before the first step.
        total: float64, the sum of all messages since.
        exactness: of the sum.
        divisor: of the sum; None before the first step.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self.initial: Arrays = []
        self.total: Arrays = []
        self.exactness = Exactness()
        self.divisor: int | None = None

    def add_payloads(
        self, payloads: Payloads, params: Any, divisor: int, second: SecondTarget | None = None
    ) -> bool:
        """Add the messages of several payloads; another divisor begins a new sum at the current parameters."""
        if not self.initial or divisor != self.divisor:
            self.initial = copies(writable_views(params))
            self.total = [np.zeros(one.shape, np.float64) for one in self.initial]
            self.exactness = Exactness()
            self.divisor = divisor
        add_scaled(self._groups, payloads, self.total, 1.0)
        for messages in payloads:
            self.exactness.add_messages(messages)
        self.write_params(params)
        if second is not None:
            for number, payload in enumerate(payloads):
                held = 1.0 if number == second.own else 0.0
                add_scaled(self._groups, [payload], second.params, 1.0 / divisor - held)
        return self.exactness.is_proven

    def without(self, payloads: Payloads) -> Arrays:
        """Return the sum without the messages of some payloads: exactly, as long as the sum is exact."""
        total = copies(self.total)
        add_scaled(self._groups, payloads, total, -1.0)
        return total

    def write_params(self, params: Any) -> None:
        """Set ``params`` to initial + sum / divisor."""
        scratch = np.empty(_BLOCK, np.float64)
        for arrays in zip(writable_views(params), self.initial, self.total, strict=True):
            param, initial, total = (array.reshape(-1) for array in arrays)
            for start in range(0, total.size, _BLOCK):
                part = slice(start, min(start + _BLOCK, total.size))
                block = scratch[: part.stop - start]
                np.divide(total[part], self.divisor or 1, out=block)
                param[part] = np.add(block, initial[part], out=block)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, as host arrays and plain numbers."""
        return {
            "initial": copies(self.initial),
            "total": copies(self.total),
            "divisor": self.divisor,
            "exactness": astuple(self.exactness),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another replica or of a checkpoint."""
        self.initial, self.total = copies(state["initial"]), copies(state["total"])
        self.divisor = state["divisor"]
        self.exactness = Exactness(*state["exactness"])


# ---- this node's state -----------------------------------------------------------------------------------------------


def add_owner_state(
    state: Mapping[str, Any] | None, residuals: Sequence[NDArray[Any]], factor: float
) -> None:
    """Add the residual in ``Replica.owner_state``, times a factor, to the residuals of all groups."""
    if state is None:
        return
    for index, one in zip(state["groups"], state["encoders"], strict=True):
        residual, parts = residuals[index], state["parts"]
        part = Partition(residual.size, parts, first=index % parts)[state["at"]]
        for of_whole, of_part in part.slices():
            residual[of_whole] += factor * one["residual"][of_part]


def owner_arrays(state: Mapping[str, Any]) -> list[Arrays]:
    """Return residual and optimiser's state in ``Replica.owner_state``, for each of its groups."""
    pairs = zip(state["encoders"], state["states"], strict=True)
    return [[one["residual"], *slots] for one, slots in pairs]


class SharedCopy:
    """The parameters that all nodes share, and how the caller's differ from them.

    Without local steps the caller's parameters are the shared ones. With local steps (``every``, ``step_moved``) the
    caller's parameters run ahead, and ``shared`` is a copy of the shared ones: the difference is the update.

    With ``apply_residual`` the caller's parameters also hold this node's residual: the residual is their difference
    from ``shared``, brought up to date right before an encode. Between the encode and the end of the step they hold the
    encoded messages as well, in full. Encoding then does not modify the parameters, and applying messages changes only
    the elements those messages contain.

    Attributes:
        groups: encoders and residuals.
        total: adds messages to the shared parameters.
        shared: one array for each of the caller's; empty without local steps and ``apply_residual``.
        local_steps: steps since the last exchange.
    """

    def __init__(self, groups: Groups, total: PlainSum, *, applies_residual: bool) -> None:
        self.groups = groups
        self.total = total
        self.shared: Arrays = []
        self.local_steps = 0
        self._applies_residual = applies_residual

    # ---- local steps -------------------------------------------------------------------------------------------------

    def copy_shared(self, params: Any) -> None:
        """Make the shared copy from ``params``, unless there is one already; keep it where the parameters are."""
        self.shared = placed(self.shared or copies(writable_views(params)), params)

    def drop_shared(self) -> None:
        """Make the caller's parameters the shared ones."""
        self.shared = []
        self.local_steps = 0

    def add_loaded_residual(self, params: Any) -> None:
        """Add the residual of a checkpoint, which may be another node's, to the caller's parameters.

        Elements that hold the residual already, but for rounding, stay as they are: training then resumes bit for bit.
        """
        if not self._applies_residual or self.local_steps:
            return
        for param, shared, residual in self._parts(params):
            expected = shared + residual
            bound = _ROUNDING * (np.abs(shared) + np.abs(residual))
            np.copyto(param, expected, where=~(np.abs(param - expected) <= bound))

    def holds(self, params: Any) -> bool:
        """Return whether ``params`` are as the last step left them, but for rounding; after local steps always True."""
        if not self.shared or self.local_steps:
            return True
        if not self._applies_residual:
            arrays = map(on_host, writable_views(params))
            return all(map(np.array_equal, arrays, map(on_host, self.shared)))
        # Where a large quantum was added and taken away again, rounding is relative to the quantum.
        quantum = max((encoder.threshold for encoder in self.groups.encoders), default=0.0)
        for param, shared, residual in self._parts(params):
            largest = quantum + float(np.abs(shared).max(initial=0.0))
            if float(np.abs(param - shared - residual).max(initial=0.0)) > _ROUNDING * largest:
                return False
        return True

    def local_delta(self, params: Any) -> tuple[Arrays | None, Callable[[int], None] | None]:
        """Return the sum of the local steps since the last exchange.

        With ``apply_residual`` return None, and a function that brings the residual of a group up to date.
        """
        targets = writable_views(params)
        if not self._applies_residual:
            return difference(targets, self.shared), None
        residuals = self.groups.residuals(self.shared)  # refuses residuals elsewhere

        def refresh(index: int) -> None:
            now, before = self.groups.select(targets, index), self.groups.select(self.shared, index)
            if device_of(now) >= 0:
                put(self.groups.select(residuals, index), difference(now, before))
            else:
                self.groups.encoders[index].hold_difference(now, before)

        return None, refresh

    def reject(self, params: Any) -> None:
        """Remove an update that is not finite from the caller's parameters; the residual holds the finite part."""
        if not self.shared:
            return
        self.local_steps = 0
        if self._applies_residual:
            self._set_residual(params)
        self.write_params(params)

    def absorb_local_changes(self, params: Any) -> None:
        """Move local changes of the caller's parameters into the residual, before the parameters are replaced."""
        if self._applies_residual:
            self._set_residual(params)
            return
        for param, shared, residual in self._parts(params):
            moved = param - shared
            np.add(residual, moved, out=residual, where=np.isfinite(moved), casting="same_kind")

    def _set_residual(self, params: Any) -> None:
        for param, shared, residual in self._parts(params):
            moved = param - shared
            np.copyto(residual, moved, where=np.isfinite(moved), casting="same_kind")

    def write_params(self, params: Any) -> None:
        """Set the caller's parameters to the shared ones, plus the residual with ``apply_residual``."""
        if not self._applies_residual:
            put(writable_views(params), self.shared)
            return
        targets, residuals = writable_views(params), self.groups.residuals(self.shared)
        if device_of(targets) >= 0:
            put(targets, self.shared)
            add(targets, residuals)
            return
        for param, shared, residual in zip(targets, self.shared, residuals, strict=True):
            np.add(shared, residual, out=param)

    def _parts(self, params: Any) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Yield the caller's parameters, the shared ones and the residual, array by array, in host memory.

        Changes of parameters and residual go back to the device. No step does this, it would copy all of them.
        """
        residuals = self.groups.residuals(self.shared)
        for arrays in zip(writable_views(params), self.shared, residuals, strict=True):
            param, shared, residual = map(on_host, arrays)
            yield param, shared, residual
            if device_of(arrays) >= 0:
                put([arrays[0], arrays[2]], [param, residual])

    # ---- the state of another node -----------------------------------------------------------------------------------

    def export_state(self, params: Any) -> tuple[Arrays, dict[str, Any] | None]:
        """Return the arrays of the shared parameters and their momentum, and the numbers of an exact sum.

        The arrays are not copied.

        Raises:
            TypeError: NumPy cannot view the parameters in place.
        """
        total = self.total
        if isinstance(total, ExactSum) and total.initial:
            exact = {"divisor": total.divisor, "exactness": astuple(total.exactness)}
            return [*total.initial, *total.total], exact
        shared = self.shared or writable_views(params)
        if isinstance(total, MomentumSum):
            total.ensure_velocity(shared)
            return [*shared, *total.velocity], None
        return shared, None

    def state_layout(self, params: Any, *, is_exact: bool) -> list[list[Any]]:
        """Return [dtype, shape] of every array that ``export_state`` returns."""
        own = described(writable_views(params))
        if is_exact:
            return [*own, *(["float64", shape] for _, shape in own)]
        return own * 2 if isinstance(self.total, MomentumSum) else own

    def import_state(self, arrays: Arrays, exact: dict[str, Any] | None, params: Any) -> None:
        """Replace the shared parameters and the caller's by another replica's."""
        target: Any = self.shared or params
        total = self.total
        if isinstance(total, ExactSum) and exact is not None:
            half = len(arrays) // 2
            total.load_state_dict({"initial": arrays[:half], "total": arrays[half:], **exact})
            total.write_params(target)
        elif isinstance(total, MomentumSum):
            total.ensure_velocity(target)
            put([*writable_views(target), *total.velocity], arrays)
        else:
            put(writable_views(target), arrays)
        if self.shared:
            self.write_params(params)
