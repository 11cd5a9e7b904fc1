"""One encoder for each parameter of a bucket, and its momentum; what they hold moves with the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..codec import Encoder
from ..errors import NonFiniteUpdate
from ..exchange.density import learn_first_threshold
from ..message import Message, apply
from ..state import check_format

__all__ = ["Bucket", "Residuals"]

_STATE_FORMAT = 1


class Bucket:
    """What one bucket's gradients go through: local momentum, where there is one, and an encoder for each parameter.

    Args:
        encoders: of the parameters, in the order in which the bucket holds them.
        momentum: 0.0: none.

    Attributes:
        encoders: as given.
        ranges: of each parameter, its elements of the bucket.
        velocity: gradients with their momentum, in the residual's dtype; None without momentum.
    """

    def __init__(self, encoders: Sequence[Encoder], momentum: float) -> None:
        self.encoders = tuple(encoders)
        ends = list(itertools.accumulate((encoder.numel for encoder in encoders), initial=0))
        self.ranges = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._momentum = momentum
        self.velocity: torch.Tensor | None = None
        if momentum > 0.0:
            self.velocity = torch.zeros(
                ends[-1], dtype=torch.from_numpy(encoders[0].residual).dtype
            )
            self._before = torch.empty_like(self.velocity)

    def update(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the encoders are to take for a gradient: the new velocity, if there is any."""
        if self.velocity is None:
            return gradient
        torch.mul(self.velocity, self._momentum, out=self._before)
        self._before.add_(gradient)
        self.velocity, self._before = self._before, self.velocity
        return self.velocity

    def encode(self, update: torch.Tensor) -> list[Message]:
        """Return every parameter's message.

        Raises:
            NonFiniteUpdate: of the first parameter that was refused; the residuals hold what is finite of the update.
        """
        encoded: list[tuple[Encoder, Message]] = []
        refused: NonFiniteUpdate | None = None
        for encoder, elements in zip(self.encoders, self.ranges, strict=True):
            part = update[elements]
            learn_first_threshold(encoder, part)
            try:
                encoded.append((encoder, encoder.encode(part)))
            except NonFiniteUpdate as error:
                refused = refused or error
        if refused is not None:
            for encoder, message in encoded:
                apply(message, encoder.residual)
            raise refused
        return [message for _, message in encoded]

    def check(self, messages: Sequence[Message]) -> None:
        """Refuse another rank's messages if they are not one for each of these parameters.

        Raises:
            ValueError: with both sizes.
        """
        theirs = [message.numel for message in messages]
        own = [encoder.numel for encoder in self.encoders]
        if theirs != own:
            raise ValueError(f"messages of {theirs} elements, here its parameters have {own}")

    def put_back(self, messages: Sequence[Message]) -> None:
        """Return to the residuals what was taken out of them as messages."""
        for encoder, message in zip(self.encoders, messages, strict=True):
            apply(message, encoder.residual)

    def take_out(self, update: torch.Tensor) -> None:
        """Take an update out of the residuals again, as far as it is finite, and out of the velocity."""
        for encoder, elements in zip(self.encoders, self.ranges, strict=True):
            residual = torch.from_numpy(encoder.residual)
            finite = torch.nan_to_num(update[elements].to(residual.dtype), 0.0, 0.0, 0.0)
            residual.sub_(finite)
        self.revert()

    def revert(self) -> None:
        """Make the velocity what it was before the last update."""
        if self.velocity is not None:
            self.velocity, self._before = self._before, self.velocity

    def forget_nonfinite(self) -> None:
        """Let elements that are not finite, which the encoders have left out, begin again without momentum."""
        if self.velocity is not None:
            torch.nan_to_num(self.velocity, nan=0.0, posinf=0.0, neginf=0.0, out=self.velocity)

    def mask(self, messages: Sequence[Message]) -> None:
        """Take the momentum from the elements that messages hold."""
        if self.velocity is None:
            return
        for message, elements in zip(messages, self.ranges, strict=True):
            positions, _ = message.entries()
            self.velocity[elements].numpy()[positions] = 0.0


@dataclass(frozen=True)
class _Home:
    """Where one parameter's residual and velocity are: its place in a bucket."""

    bucket: Bucket
    place: int


@dataclass(frozen=True)
class _Moved:
    """What a parameter takes along when its bucket changes, or out of a checkpoint."""

    residual: Any
    velocity: Any
    threshold: float
    step: int


class Residuals:
    """The buckets; what their encoders have not sent yet belongs to the parameters and moves with them.

    DDP decides which parameters share a bucket, and decides again after the first iteration. When the parameters of a
    bucket are others than before, a new one is made and takes over residual, velocity and threshold of each.

    A checkpoint names parameters: by the names given, otherwise by their place counted from the end, which is the order
    in which DDP's first buckets bring them.

    Args:
        make: makes an encoder of so many elements, of this dtype and with this key: its place in the bucket. The last
            argument is how many the largest parameter has.
        momentum: of every bucket.
    """

    def __init__(
        self, make: Callable[[int, str, int, int], Encoder], momentum: float = 0.0
    ) -> None:
        self._make = make
        self._momentum = momentum
        self._names: dict[int, str] = {}
        self._largest = 0
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
            self._buckets[index] = self._rebuild(parameters, dtype)
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
        self._largest = max((parameter.numel() for _, parameter in parameters), default=0)

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
            for encoder in bucket.encoders:
                state = encoder.state_dict()
                state["residual"] *= state["residual"].dtype.type(factor)
                state["threshold"] *= factor
                encoder.load_state_dict(state)
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

    def _rebuild(self, parameters: Sequence[torch.Tensor], dtype: str) -> Bucket:
        """Make a bucket and move in what the parameters have."""
        # DDP's first buckets hold the parameters from the last to the first, but in order within each.
        for parameter in reversed(parameters):
            self._parameters[id(parameter)] = parameter
            self._names.setdefault(id(parameter), str(len(self._names)))
        moved = [self._leave(parameter, dtype) for parameter in parameters]
        largest = max(self._largest, *(parameter.numel() for parameter in parameters))
        bucket = Bucket(
            [
                self._make(parameter.numel(), dtype, place, largest)
                for place, parameter in enumerate(parameters)
            ],
            self._momentum,
        )
        for place, (parameter, one) in enumerate(zip(parameters, moved, strict=True)):
            if one:
                _settle(bucket, place, one)
            self._homes[id(parameter)] = _Home(bucket, place)
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
    bucket, encoder = home.bucket, home.bucket.encoders[home.place]
    elements = bucket.ranges[home.place]
    velocity = None if bucket.velocity is None else bucket.velocity.numpy()[elements]
    return _Moved(encoder.residual, velocity, encoder.threshold, encoder.step)


def _settle(bucket: Bucket, place: int, moved: _Moved) -> None:
    """Put in what a parameter has brought along."""
    encoder = bucket.encoders[place]
    state = {"residual": moved.residual, "threshold": moved.threshold, "step": moved.step}
    encoder.load_state_dict({**encoder.state_dict(), **state})
    if bucket.velocity is not None and moved.velocity is not None:
        bucket.velocity.numpy()[bucket.ranges[place]] = moved.velocity
