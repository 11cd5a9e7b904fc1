"""How messages are added to the parameters: as they come, or exactly, so that their order does not matter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..message import Message, apply_many, apply_to_both
from .groups import Groups
from .views import Arrays, copies, writable_views

__all__ = ["Beside", "ExactSum", "Exactness", "PlainSum", "Sum", "is_sum_exact"]

_FLOAT64_BITS = 53
_THRESHOLD_BITS = 8

# Elements that are brought up to date at a time: two float64 and one float32 block stay in the first-level cache.
_BLOCK = 1 << 11 << 2


class Exactness:
    """Whether a growing sum of messages in float64 is provably free of rounding, in any order.

    Every threshold is a multiple of its last significant bit; sums of such multiples are exact while they need no more
    than float64's 53 bits above the smallest of those bits. Dense messages hold arbitrary values, so nothing is proven.
    """

    def __init__(
        self, last_bit: float = math.inf, largest: float = 0.0, has_dense: bool = False
    ) -> None:
        self.last_bit = last_bit
        self.largest = largest  # no element of the sum can be larger
        self.has_dense = has_dense

    def as_tuple(self) -> tuple[float, float, bool]:
        """Return the arguments that make another one like it."""
        return self.last_bit, self.largest, self.has_dense

    def add(self, messages: Iterable[Message]) -> None:
        """Take note of messages that are added."""
        for message in messages:
            if not message.count:
                continue
            if message.kind == "dense":
                self.has_dense = True
                continue
            threshold = message.threshold
            self.largest += threshold
            exponent = math.frexp(threshold)[1] - _THRESHOLD_BITS
            self.last_bit = min(self.last_bit, math.ldexp(1.0, exponent))

    @property
    def is_proven(self) -> bool:
        """Whether everything so far added up without rounding."""
        if self.has_dense:
            return False
        return self.largest <= math.ldexp(self.last_bit, _FLOAT64_BITS) or self.largest == 0.0


def is_sum_exact(messages: Sequence[Message]) -> bool:
    """Return whether adding up these messages in float64 rounds nowhere, in any order."""
    exactness = Exactness()
    exactness.add(messages)
    return exactness.is_proven


class Beside(NamedTuple):
    """Parameters to which the same is added on the way, apart from what they hold already.

    Attributes:
        params: like those that are shared.
        own: place of the payload that they hold already, in full; None: none.
    """

    params: Arrays
    own: int | None


class Sum(Protocol):
    """What the exchange asks of either."""

    def add(
        self,
        payloads: Sequence[Sequence[Message]],
        params: Any,
        scale: float,
        beside: Beside | None = None,
    ) -> bool:
        """Add the messages of several payloads, in order; return whether that was provably exact."""


class PlainSum:
    """Adds messages to the parameters as they come: the fastest, and as exact as float additions in order are."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def add(
        self,
        payloads: Sequence[Sequence[Message]],
        params: Any,
        scale: float,
        beside: Beside | None = None,
    ) -> bool:
        """See `Sum`: ``params += scale * message`` for every message; nothing is proven."""
        for index in range(len(self._groups)):
            messages = [payload[index] for payload in payloads]
            target = self._groups.select(params, index)
            threads = self._groups.encoders[index].threads
            if beside is None:
                apply_many(messages, target, scale, threads=threads)
            else:
                second = self._groups.select(beside.params, index)
                apply_to_both(
                    messages, target, second, own=beside.own, scale=scale, threads=threads
                )
        return False


class ExactSum:
    """Keeps the sum of all messages apart, in float64: ``params = initial + scale * sum``, scaled and rounded once.

    Replicas with the same initial parameters and the same messages, in whatever order they came, hold the same bits
    as long as the float64 sum rounds nowhere. The parameters belong to it: what others do to them is overwritten.

    Attributes:
        initial: copies of the parameters before the first message, in their dtype; empty before that.
        total: float64, the sum of all messages since.
        exactness: of that sum.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.initial: Arrays = []
        self.total: Arrays = []
        self.exactness = Exactness()
        self.scale: float | None = None

    def begin(self, params: Any) -> None:
        """Take ``params`` as they are for the initial ones."""
        self.initial = copies(writable_views(params))
        self.total = [np.zeros(one.shape, np.float64) for one in self.initial]
        self.exactness = Exactness()
        self.scale = None

    def add(
        self,
        payloads: Sequence[Sequence[Message]],
        params: Any,
        scale: float,
        beside: Beside | None = None,
    ) -> bool:
        """See `Sum`; another scale than before begins a new sum at the parameters as they are."""
        if not self.initial or (self.scale is not None and scale != self.scale):
            self.begin(params)
        self.scale = scale
        for index in range(len(self._groups)):
            messages = [payload[index] for payload in payloads]
            threads = self._groups.encoders[index].threads
            apply_many(messages, self._groups.select(self.total, index), threads=threads)
            self.exactness.add(messages)
        self.write(params)
        if beside is not None:
            plain = PlainSum(self._groups)
            for number, payload in enumerate(payloads):
                plain.add([payload], beside.params, scale - 1.0 if number == beside.own else scale)
        return self.exactness.is_proven

    def without(self, payloads: Sequence[Sequence[Message]]) -> Arrays:
        """Return what the sum would be without the messages of some payloads: exactly, as long as it is exact."""
        total = copies(self.total)
        for index in range(len(self._groups)):
            messages = [payload[index] for payload in payloads]
            apply_many(messages, self._groups.select(total, index), -1.0)
        return total

    def write(self, params: Any) -> None:
        """Set ``params`` to initial + scale * sum."""
        for target, initial, total in zip(
            writable_views(params), self.initial, self.total, strict=True
        ):
            _scale_and_add(initial.reshape(-1), total.reshape(-1), self.scale, target.reshape(-1))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything, as host arrays and plain numbers."""
        return {
            "initial": copies(self.initial),
            "total": copies(self.total),
            "scale": self.scale,
            "exactness": self.exactness.as_tuple(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what another replica or a checkpoint holds."""
        self.initial, self.total = copies(state["initial"]), copies(state["total"])
        self.scale = state["scale"]
        self.exactness = Exactness(*state["exactness"])


def _scale_and_add(
    initial: NDArray[Any], total: NDArray[np.float64], scale: float | None, target: NDArray[Any]
) -> None:
    """Set ``target`` (same dtype as ``initial``) to initial + scale * total in float64, block by block."""
    scratch = np.empty(min(_BLOCK, total.size), np.float64)
    factor = 1.0 if scale is None else scale
    for start in range(0, total.size, _BLOCK):
        stop = min(start + _BLOCK, total.size)
        block = scratch[: stop - start]
        np.multiply(total[start:stop], factor, out=block)
        np.add(block, initial[start:stop], out=block)
        target[start:stop] = block
