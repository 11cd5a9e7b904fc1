"""Residuals and momentum that belong to parameters, in encoders that belong to buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..codec import Encoder
from ..message import Message
from ..state import check_format

__all__ = ["Bucket", "Residuals"]

_STATE_FORMAT = 1


class Bucket:
    """What one bucket's gradients go through: local momentum, where there is one, and an encoder.

    Args:
        encoder: of as many elements as the bucket has.
        momentum: 0.0: none.

    Attributes:
        encoder: as given.
        velocity: gradients with their momentum, in the residual's dtype; None without momentum.
    """

    def __init__(self, encoder: Encoder, momentum: float) -> None:
        self.encoder = encoder
        self._momentum = momentum
        self.velocity: torch.Tensor | None = None
        if momentum > 0.0:
            self.velocity = torch.zeros_like(torch.from_numpy(encoder.residual))
            self._before = torch.empty_like(self.velocity)

    def update(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the encoder is to take for a gradient: the new velocity, if there is any."""
        if self.velocity is None:
            return gradient
        torch.mul(self.velocity, self._momentum, out=self._before)
        self._before.add_(gradient)
        self.velocity, self._before = self._before, self.velocity
        return self.velocity

    def revert(self) -> None:
        """Make the velocity what it was before the last update."""
        if self.velocity is not None:
            self.velocity, self._before = self._before, self.velocity

    def forget_nonfinite(self) -> None:
        """Let elements that are not finite, which the encoder has left out, begin again without momentum."""
        if self.velocity is not None:
            torch.nan_to_num(self.velocity, nan=0.0, posinf=0.0, neginf=0.0, out=self.velocity)

    def mask(self, message: Message) -> None:
        """Take the momentum from the elements that a message holds."""
        if self.velocity is not None:
            positions, _ = message.entries()
            self.velocity.numpy()[positions] = 0.0


@dataclass(frozen=True)
class _Home:
    """Where one parameter's residual and velocity are: a range of elements of a bucket's."""

    bucket: Bucket
    begin: int
    end: int


@dataclass(frozen=True)
class _Moved:
    """What a parameter takes along when its bucket changes, or out of a checkpoint."""

    residual: Any
    velocity: Any
    threshold: float
    step: int


class Residuals:
    """One encoder per bucket; what it has not sent yet belongs to the parameters and moves with them.

    DDP decides which parameters share a bucket, and decides again after the first iteration. When the parameters of a
    bucket are others than before, a new one is made and takes over residual and velocity of each, and the mean of their
    thresholds, weighted with the elements (the geometric mean: thresholds differ by factors).

    A checkpoint names parameters: by the names given, otherwise by their place counted from the end, which is the order
    in which DDP's first buckets bring them.

    Args:
        make: makes an encoder of so many elements, of this dtype and with this key.
        momentum: of every bucket.
    """

    def __init__(self, make: Callable[[int, str, int], Encoder], momentum: float = 0.0) -> None:
        self._make = make
        self._momentum = momentum
        self._names: dict[int, str] = {}
        self._buckets: dict[int, Bucket] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._homes: dict[int, _Home] = {}
        self._loaded: dict[str, _Moved] = {}
        # Identities are only worth something while the tensors live.
        self._parameters: dict[int, torch.Tensor] = {}

    def bucket(self, index: int, parameters: Sequence[torch.Tensor], dtype: str) -> Bucket:
        """Return bucket ``index``, which holds these parameters now.

        Raises:
            ValueError: a checkpoint holds another size or dtype for one of them, or momentum where there is none.
        """
        members = tuple(map(id, parameters))
        if self._members.get(index) != members:
            self._buckets[index] = self._rebuild(index, parameters, dtype)
            self._members[index] = members
        return self._buckets[index]

    def name(self, parameters: list[tuple[str, torch.Tensor]]) -> None:
        """Name parameters that no bucket has brought yet.

        Raises:
            ValueError: too late, a bucket has brought one.
        """
        if self._homes:
            raise ValueError("parameters are named before the first step")
        self._parameters = {id(parameter): parameter for _, parameter in parameters}
        self._names = {id(parameter): name for name, parameter in parameters}

    def check_all_taken(self) -> None:
        """Refuse a checkpoint that holds more than the model, once all buckets have come by.

        Raises:
            ValueError: a parameter of the checkpoint is in no bucket.
        """
        if self._loaded:
            names, known = ", ".join(sorted(self._loaded)), ", ".join(sorted(self._names.values()))
            raise ValueError(
                f"the checkpoint has residuals of parameters that no bucket holds: {names}; the model's are "
                f"named {known}: load it into the same model, with register_threshold_hook(model, state)"
            )

    @property
    def buckets(self) -> list[Bucket]:
        """Those that hold a parameter's residual, each once."""
        return list({id(home.bucket): home.bucket for home in self._homes.values()}.values())

    def rescale(self, factor: float) -> None:
        """Multiply all residuals, velocities and thresholds."""
        for bucket in self.buckets:
            state = bucket.encoder.state_dict()
            state["residual"] *= state["residual"].dtype.type(factor)
            state["threshold"] *= factor
            bucket.encoder.load_state_dict(state)
            if bucket.velocity is not None:
                bucket.velocity.mul_(factor)
        self._loaded = {
            name: _Moved(
                moved.residual * moved.residual.dtype.type(factor),
                None
                if moved.velocity is None
                else moved.velocity * moved.velocity.dtype.type(factor),
                moved.threshold * factor,
                moved.step,
            )
            for name, moved in self._loaded.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return every parameter's residual and velocity, as host tensors of their own, and its threshold."""
        moved = dict(self._loaded)
        for identity, home in self._homes.items():
            moved[self._names[identity]] = _take(home)
        return {
            "format": _STATE_FORMAT,
            "parameters": {
                name: {
                    "residual": torch.from_numpy(np.array(one.residual)),
                    "velocity": None
                    if one.velocity is None
                    else torch.from_numpy(np.array(one.velocity)),
                    "threshold": one.threshold,
                    "step": one.step,
                }
                for name, one in moved.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint; each parameter gets its residual when its bucket next comes by.

        Raises:
            ValueError: the state is of another format.
        """
        check_format(state, _STATE_FORMAT)
        self._loaded = {
            name: _Moved(
                np.asarray(one["residual"]),
                None if one.get("velocity") is None else np.asarray(one["velocity"]),
                float(one["threshold"]),
                int(one["step"]),
            )
            for name, one in state["parameters"].items()
        }
        self._buckets.clear()
        self._members.clear()
        self._homes.clear()

    def _rebuild(self, index: int, parameters: Sequence[torch.Tensor], dtype: str) -> Bucket:
        """Make a bucket and move the parameters' residuals and velocities in."""
        numels = [parameter.numel() for parameter in parameters]
        bucket = Bucket(self._make(sum(numels), dtype, index), self._momentum)
        # DDP's first buckets hold the parameters from the last to the first, but in order within each.
        for parameter in reversed(parameters):
            self._parameters[id(parameter)] = parameter
            self._names.setdefault(id(parameter), str(len(self._names)))
        moved = [self._leave(parameter, dtype) for parameter in parameters]
        begins = np.cumsum([0, *numels])
        with_state = [(one, numel) for one, numel in zip(moved, numels, strict=True) if one]
        if with_state:
            state = bucket.encoder.state_dict()
            for one, begin, end in zip(moved, begins, begins[1:], strict=False):
                if one:
                    state["residual"][begin:end] = one.residual
                if one and bucket.velocity is not None and one.velocity is not None:
                    bucket.velocity.numpy()[begin:end] = one.velocity
            state["threshold"] = _mean_threshold(with_state)
            state["step"] = max(one.step for one, _ in with_state)
            bucket.encoder.load_state_dict(state)
        for parameter, begin, end in zip(parameters, begins, begins[1:], strict=False):
            self._homes[id(parameter)] = _Home(bucket, int(begin), int(end))
        return bucket

    def _leave(self, parameter: torch.Tensor, dtype: str) -> _Moved | None:
        """Return what the parameter takes along, None if it is new."""
        name = self._names[id(parameter)]
        home = self._homes.get(id(parameter))
        moved = _take(home) if home else self._loaded.pop(name, None)
        if moved and (moved.residual.size != parameter.numel() or moved.residual.dtype != dtype):
            raise ValueError(
                f"the residual of parameter {name} is {moved.residual.dtype}[{moved.residual.size}], "
                f"it now needs {dtype}[{parameter.numel()}]: the checkpoint is of another model"
            )
        if moved and moved.velocity is not None and self._momentum == 0.0:
            raise ValueError(
                f"the checkpoint has momentum for parameter {name}, this state was made without: "
                "give ThresholdState the momentum that it had"
            )
        return moved


def _take(home: _Home) -> _Moved:
    bucket, encoder = home.bucket, home.bucket.encoder
    velocity = None if bucket.velocity is None else bucket.velocity.numpy()[home.begin : home.end]
    residual = encoder.residual[home.begin : home.end]
    return _Moved(residual, velocity, encoder.threshold, encoder.step)


def _mean_threshold(moved: Iterable[tuple[_Moved, int]]) -> float:
    weighted = [(max(numel, 1), math.log(one.threshold)) for one, numel in moved]
    total = sum(weight for weight, _ in weighted)
    return math.exp(sum(weight * value for weight, value in weighted) / total)
