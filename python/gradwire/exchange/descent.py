"""Descent at the owners: nodes send gradients, and each owner runs an optimiser on the parameters that it owns.

An owner's residual holds changes of parameters then, a node's residual gradients. So an owner whose elements go to
others sends them its residual and the optimiser's state, with its parts of the first update after the new dealing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..codec import Encoder
from ..message import Message, apply_many, decode, dense_message
from ..partition import Part

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Descent",
    "Handover",
    "Optimizer",
    "Place",
    "Rate",
    "check_number",
    "summary",
]

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = list[Array]
Rate: TypeAlias = float | Callable[[int], float]
Place: TypeAlias = tuple[int, int]  # number of parts, and which of them


# ---- optimisers ------------------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """An optimiser for ``Exchange(optimizer=...)``, the same on all nodes: they compare class and attributes.

    Every element is on its own, because the elements of an owner change with the members.

    Every value of the state is zero at first.
    """

    @property
    def slots(self) -> int:
        """Number of values of state for each element."""
        ...

    @property
    def is_linear(self) -> bool:
        """Whether a change is linear in all gradients so far; others need ``codec="dense"`` or "bfloat16"."""
        ...

    def update(self, gradient: Array, params: Array, state: Sequence[Array], step: int) -> Array:
        """Return the change of some parameters.

        Args:
            gradient: one-dimensional, float32 or float64; may be overwritten.
            params: the parameters; not modified.
            state: ``slots`` arrays like the gradient, modified in place.
            step: number of the step.
        """
        ...


def check_number(name: str, value: float, is_good: bool, what: str) -> None:
    """Refuse a value that is out of range."""
    if not is_good:
        raise ValueError(f"{name} is {value}, must be {what}")


@dataclass(frozen=True)
class _Descending:
    """Attributes of all optimisers.

    Attributes:
        lr: learning rate, or a function of the step's number, which nodes compare by its qualified name.
        weight_decay: factor of the parameters that is added to the gradient.

    Raises:
        ValueError: an argument is out of range.
    """

    lr: Rate
    weight_decay: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("lr", self.lr, 0.0 <= self.lr < math.inf, "0 or more")
        check_number("weight_decay", self.weight_decay, self.weight_decay >= 0.0, "0 or more")

    def _rate(self, step: int) -> float:
        return float(self.lr(step) if callable(self.lr) else self.lr)

    def _decay(self, gradient: Array, params: Array) -> None:
        if self.weight_decay:
            gradient += self.weight_decay * params


@dataclass(frozen=True, kw_only=True)
class SGD(_Descending):
    """Stochastic gradient descent, with momentum as ``torch.optim.SGD`` has it.

    >>> import numpy as np, gradwire as gw
    >>> gw.SGD(0.5, momentum=0.5).update(np.ones(2), np.zeros(2), [np.array([0.0, 1.0])], step=0).tolist()
    [-0.5, -0.75]
    """

    momentum: float = 0.0
    nesterov: bool = False
    is_linear = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, 0.0 <= self.momentum < 1.0, "in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")

    @property
    def slots(self) -> int:
        """The velocity."""
        return 1 if self.momentum else 0

    def update(self, gradient: Array, params: Array, state: Sequence[Array], step: int) -> Array:
        """See `Optimizer`."""
        self._decay(gradient, params)
        for velocity in state:
            velocity *= self.momentum
            velocity += gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        change: Array = -self._rate(step) * gradient
        return change


@dataclass(frozen=True, kw_only=True)
class Adagrad(_Descending):
    """Adagrad, as ``torch.optim.Adagrad``.

    >>> import numpy as np, gradwire as gw
    >>> gw.Adagrad(0.5).update(np.ones(1), np.zeros(1), [np.array([3.0])], step=0).round(3).tolist()
    [-0.25]
    """

    eps: float = 1e-10
    slots = 1
    is_linear = False

    def update(self, gradient: Array, params: Array, state: Sequence[Array], step: int) -> Array:
        """See `Optimizer`."""
        self._decay(gradient, params)
        (total,) = state
        total += gradient * gradient
        gradient *= -self._rate(step)
        gradient /= np.sqrt(total) + self.eps
        return gradient


@dataclass(frozen=True, kw_only=True)
class Adam(_Descending):
    """Adam, as ``torch.optim.Adam``; an element whose state was lost begins anew, corrections included.

    >>> import numpy as np, gradwire as gw
    >>> gw.Adam(0.5).update(np.array([3.0]), np.zeros(1), np.zeros((3, 1)), step=0).round(3).tolist()
    [-0.5]
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slots = 3  # moments, and the number of steps: an element's, which may have lost its state
    is_linear = False
    _is_decoupled = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for beta in self.betas:
            check_number("betas", beta, 0.0 <= beta < 1.0, "in [0, 1)")

    def update(self, gradient: Array, params: Array, state: Sequence[Array], step: int) -> Array:
        """See `Optimizer`."""
        if not self._is_decoupled:
            self._decay(gradient, params)
        (beta, beta_square), (mean, square, age) = self.betas, state
        mean *= beta
        mean += (1.0 - beta) * gradient
        square *= beta_square
        gradient *= gradient
        gradient *= 1.0 - beta_square
        square += gradient
        age += 1.0
        steps: Any = age.astype(np.float64) if age.min() < age.max() else float(age[0])
        change: Array = mean / (1.0 - beta**steps)
        change /= np.sqrt(square / (1.0 - beta_square**steps)) + self.eps
        change *= -self._rate(step)
        if self._is_decoupled:
            change -= self._rate(step) * self.weight_decay * params
        return change


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``.

    >>> import numpy as np, gradwire as gw
    >>> adamw = gw.AdamW(0.5, weight_decay=0.25)
    >>> adamw.update(np.array([3.0]), np.array([2.0]), np.zeros((3, 1)), step=0).round(3).tolist()
    [-0.75]
    """

    weight_decay: float = 0.01
    _is_decoupled = True


def summary(optimizer: Optimizer | None) -> str | None:
    """Return an optimiser's class and attributes, which are the same on all nodes."""
    if optimizer is None:
        return None
    values = [
        f"{name}={getattr(value, '__qualname__', None) or repr(value)}"
        for name, value in sorted(vars(optimizer).items())
    ]
    return f"{type(optimizer).__name__}({', '.join(values)})"


# ---- an owner's state ------------------------------------------------------------------------------------------------


class Handover(NamedTuple):
    """Residual and state of the elements that two parts have in common, for their new owner.

    Attributes:
        of: the part that it has owned.
        to: a part of another dealing.
        messages: for every group with such elements, the residual and each array of the state.
    """

    of: Place
    to: Place
    messages: list[Message]


def _places(part: Part) -> NDArray[np.int64]:
    """Return the elements of a part, as indices of the whole."""
    found = [np.arange(whole.start, whole.stop) for whole, _ in part.slices()]
    return np.concatenate([np.empty(0, np.int64), *found])


def _inside(part: Part, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which elements of the whole belong to a part, and their indices in the part."""
    block, parts = part.partition.block, part.partition.parts
    chosen = np.flatnonzero(places // block % parts == part.position)
    inside = places[chosen]
    return chosen, inside // block // parts * block + inside % block


class Descent:
    """Runs the optimiser for one node, and keeps residuals and states that the node has to hand over.

    Args:
        optimizer: as given to the exchange.
        encoders: of all groups.
        shares: returns index and elements of every group that has elements in a part.

    Attributes:
        estates: residual and state of parts that this node has owned, for each group with elements in the part.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        encoders: Sequence[Encoder],
        shares: Callable[[int, int], list[tuple[int, Part]]],
    ) -> None:
        self._optimizer = optimizer
        self._encoders, self._shares = encoders, shares
        self.slots = optimizer.slots
        self.estates: dict[Place, list[Arrays]] = {}

    def take_step(
        self,
        pieces: Sequence[Sequence[Message]],
        scale: float,
        encoders: Sequence[Encoder],
        arrays: Sequence[Arrays],
        params: Arrays,
        step: int,
    ) -> None:
        """Take one step: add the change of the parameters to an owner's residuals, and advance its state.

        Args:
            pieces: parts of gradients, each one message for every group.
            scale: factor of their sum.
            encoders: of the owner.
            arrays: for every group the encoder's residual and the state, modified in place.
            params: for every group.
            step: number of the step.
        """
        for index, (residual, *state) in enumerate(arrays):
            gradient = np.zeros_like(residual)
            messages = [piece[index] for piece in pieces]
            apply_many(messages, gradient, scale, threads=encoders[index].threads)
            # A sum that overflows must not stay in the state.
            np.copyto(gradient, 0.0, where=~np.isfinite(gradient))
            change = self._optimizer.update(gradient, params[index], state, step)
            np.add(residual, change, out=residual, casting="same_kind")

    def zeros(self, place: Place) -> list[Arrays]:
        """Return a residual and a state of zeros for every group with elements in a part."""
        shares = [(part.numel, self._encoders[index].dtype) for index, part in self._shares(*place)]
        return [[np.zeros(*one) for _ in range(1 + self.slots)] for one in shares]

    def keep_estate(self, place: Place, arrays: Sequence[Arrays]) -> None:
        """Keep residual and state of a part that this node does not own any more, until they are handed over."""
        for to, of in zip(self._estate(place), arrays, strict=True):
            for total, one in zip(to, of, strict=True):
                total += one

    def hand_over(self, to: Place) -> list[Handover]:
        """Return the handovers for the owner of a part. The caller clears ``estates`` afterwards."""
        return [self.pack_handover(of, arrays, to) for of, arrays in self.estates.items()]

    def pack_handover(self, of: Place, arrays: Sequence[Arrays], to: Place) -> Handover:
        """Return those elements of a part that belong to another part as well."""
        shares = {index: (part, at) for at, (index, part) in enumerate(self._shares(*of))}
        messages = []
        for index, places in self._common(of, to):
            part, at = shares[index]
            _, inside = _inside(part, places)
            messages += [_packed(one[inside], self._encoders[index].key) for one in arrays[at]]
        return Handover(of, to, messages)

    def layouts(self, handovers: Iterable[Handover]) -> list[list[tuple[int, int]]]:
        """Return group and number of elements of every message of some handovers."""
        repeats = range(1 + self.slots)
        common = [list(self._common(one.of, one.to)) for one in handovers]
        return [[(index, len(it)) for index, it in one for _ in repeats] for one in common]

    def count_common(self, of: Place, to: Place) -> int:
        """Return the number of elements that two parts have in common."""
        return sum(len(places) for _, places in self._common(of, to))

    def add_handover(
        self, handover: Handover, place: Place, arrays: Sequence[Arrays], factor: float = 1.0
    ) -> None:
        """Add a handover, times a factor, to those of its elements that belong to a part."""
        shares = {index: (part, at) for at, (index, part) in enumerate(self._shares(*place))}
        messages = iter(handover.messages)
        for index, places in self._common(handover.of, handover.to):
            part, at = shares.get(index, (None, 0))
            for slot in range(1 + self.slots):
                values = decode(next(messages))
                if part is not None:
                    chosen, inside = _inside(part, places)
                    arrays[at][slot][inside] += factor * values[chosen]

    def take_back(self, handovers: Iterable[Handover], factor: float = 1.0) -> None:
        """Keep handovers that did not arrive, or with factor -1 remove those that arrived after all."""
        for one in handovers:
            self.add_handover(one, one.of, self._estate(one.of), factor)

    def export(self, under_way: Iterable[Handover]) -> list[dict[str, Any]]:
        """Return a copy of ``estates``, as host arrays and plain numbers, with some handovers taken back."""
        kept = self.estates
        self.estates = {
            place: [[one.copy() for one in of_group] for of_group in arrays]
            for place, arrays in kept.items()
        }
        self.take_back(under_way)
        found, self.estates = self.estates, kept
        return [
            {"parts": parts, "at": at, "arrays": arrays} for (parts, at), arrays in found.items()
        ]

    def _estate(self, place: Place) -> list[Arrays]:
        if place not in self.estates:
            self.estates[place] = self.zeros(place)
        return self.estates[place]

    def _common(self, of: Place, to: Place) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield every group with elements in both parts, and those elements as indices of the group."""
        others = dict(self._shares(*to))
        for index, part in self._shares(*of):
            places = _places(part)
            places = places[_inside(others[index], places)[0]] if index in others else places[:0]
            if len(places):
                yield index, places


def _packed(values: Array, key: int) -> Message:
    if values.any():
        return dense_message(values, key=key)
    nothing = np.empty(0, np.int64), np.empty(0, np.bool_)
    return Message.from_entries(*nothing, numel=values.size, threshold=1.0, key=key)
