"""Residual, threshold and momentum of every parameter, wherever DDP's buckets put its gradient."""

from __future__ import annotations

import copy
import math
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..codec import Encoder
from ..exchange.groups import host_message
from ..message import Message, apply
from ..policy import round_threshold
from ..state import EncoderState, check_format, check_range

__all__ = ["ParameterState", "ParameterStates", "scaled_threshold"]

_STATE_FORMAT = 2

_BLOCK_NUMEL = 1 << 18  # elements that are multiplied together

# What an encoder's state has beside the residual.
_PLAIN = "threshold", "step", "changed_at", "course"


class ParameterState:
    """The encoder of one parameter's gradient, and its local momentum.

    Args:
        encoder: of as many elements as the parameter has.
        momentum: 0.0: none.
        sizes: elements of the model and of its largest parameter, from which the encoder's policy was made.

    Attributes:
        encoder: as given.
        velocity: gradients with their momentum, in the residual's dtype and where it is; None without momentum.
    """

    def __init__(self, encoder: Encoder, momentum: float, sizes: tuple[int, int]) -> None:
        self.encoder = encoder
        self._sizes = sizes
        self._residual = torch.as_tensor(encoder.residual, device=encoder.device)
        self._momentum = momentum
        self.velocity = torch.zeros_like(self._residual) if momentum else None
        self._velocity_before = torch.zeros_like(self._residual) if momentum else None

    def add_momentum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the update to encode: the new velocity, or without momentum the gradient itself."""
        if self.velocity is None or self._velocity_before is None:
            return gradient
        # The new velocity goes into the memory of the one before the last update. The last one stays as it is, so a
        # step that turns out not to be finite on some rank can be reverted without a copy.
        torch.mul(self.velocity, self._momentum, out=self._velocity_before)
        self._velocity_before.add_(gradient)
        self.revert_momentum()
        return self.velocity

    def revert_momentum(self) -> None:
        """Exchange the velocity and the one before the last update."""
        self.velocity, self._velocity_before = self._velocity_before, self.velocity

    def revert_update(self, update: torch.Tensor) -> None:
        """Take the finite part of an update out of the residual again, and revert the momentum."""
        self._residual.sub_(torch.nan_to_num(update.to(self._residual.dtype), 0.0, 0.0, 0.0))
        self.revert_momentum()

    def mask_momentum(self, message: Message) -> None:
        """Set the velocity of the elements in a message to zero (factor masking)."""
        if self.velocity is None:
            return
        if self.velocity.is_cuda:
            sent = torch.zeros_like(self.velocity)
            apply(message, sent)
            self.velocity.masked_fill_(sent != 0.0, 0.0)
        else:
            self.velocity.numpy()[message.entries()[0]] = 0.0

    def check_rescale(self, factor: float) -> None:
        """Raise `ValueError` if the threshold, the residual or the velocity cannot be multiplied."""
        _check_rescale(self.encoder.threshold, self._residual, self.velocity, factor)

    def rescale(self, factor: float) -> None:
        """Multiply residual, velocity and threshold."""
        state = self.encoder.state_dict()
        _multiply(torch.from_numpy(state["residual"]), factor)
        threshold = scaled_threshold(self.encoder.threshold, factor)
        self.encoder.load_state_dict({**state, "threshold": threshold})
        if self.velocity is not None:
            _multiply(self.velocity, factor)

    def state_dict(self, unsent: Any = None) -> dict[str, Any]:
        """Return copies of residual and velocity as host tensors, and the rest of the encoder's state.

        Args:
            unsent: a message that the copy of the residual gets back, or None.
        """
        state = self.encoder.state_dict()
        if unsent is not None:
            apply(host_message(unsent), state["residual"])
        return {
            "residual": torch.from_numpy(state["residual"]),
            "velocity": None if self.velocity is None else self.velocity.to("cpu", copy=True),
            "sizes": self._sizes,
            **{name: state[name] for name in _PLAIN},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, of a parameter of the same size and dtype."""
        loaded = {name: state[name] for name in _PLAIN}
        residual = state["residual"].cpu().numpy()
        self.encoder.load_state_dict({**self.encoder.state_dict(), "residual": residual, **loaded})
        if self.velocity is not None and state["velocity"] is not None:
            self.velocity.copy_(state["velocity"])


class ParameterStates:
    """The states of a model's parameters, each made when a bucket first brings the parameter.

    DDP decides which parameters share a bucket, and decides again after the first iteration. A state belongs to the
    parameter, so rearranged buckets change nothing.

    Args:
        parameters: all parameters of the model with the names that checkpoints use; None: they are counted from the
            last to the first, the order in which DDP's first buckets bring them.
        make_encoder: returns an encoder for (numel, dtype, device, key, sizes), the last as of `ParameterState`.
        momentum: of every parameter.

    Attributes:
        numel: elements of all trainable parameters that are known.
        largest: elements of the largest of them.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] | None,
        make_encoder: Callable[[int, str, str, int, tuple[int, int]], Encoder],
        momentum: float,
    ) -> None:
        self._is_named = parameters is not None
        self._names = {parameter: name for name, parameter in parameters or ()}
        trained = [
            (name, param.numel()) for param, name in self._names.items() if param.requires_grad
        ]
        self._set_order(trained[::-1])
        self._make_encoder = make_encoder
        self._momentum = momentum
        # What DDP's first step with static_graph has brought; None: there is none, or it is over.
        self._unnumbered: set[torch.Tensor] | None = None
        self._states: dict[torch.Tensor, ParameterState] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        # Those of a copy, which buckets are still to bring.
        self._expected: deque[tuple[str, int]] = deque()

    def _set_order(self, names: Sequence[tuple[str, int]]) -> None:
        """Note names and sizes of the trainable parameters, from the last to the first."""
        self._order = list(names)
        self.numel = sum(numel for _, numel in names)
        self.largest = max((numel for _, numel in names), default=0)

    def add_bucket(self, parameters: Sequence[torch.Tensor]) -> None:
        """Name the parameters of a bucket, unless names were given, and count their elements.

        Raises:
            ValueError: a copy's parameter has another size than the copied one's.
        """
        for parameter in reversed(parameters):
            if parameter in self._names:
                continue
            if self._is_named:
                self._names[parameter] = self._next_name(parameter)
                continue
            self._names[parameter] = str(len(self._names))
            self.numel += parameter.numel()
            self.largest = max(self.largest, parameter.numel())

    @property
    def sizes(self) -> list[int]:
        """Elements of each trainable parameter; empty while parameters are only counted."""
        return [numel for _, numel in self._order]

    def names(self) -> list[tuple[str, int]] | None:
        """Return names and sizes of the trainable parameters, the last one first; None if they are counted."""
        return self._order if self._is_named else None

    def expect(self, names: Sequence[tuple[str, int]] | None) -> None:
        """Expect parameters of these names and sizes, as `names` returned them, in the order of DDP's first buckets."""
        if names is None:
            return
        self._is_named = True
        self._expected = deque(names)
        self._set_order(names)

    def expect_unnumbered(self) -> None:
        """Expect DDP's first step with static_graph: all its buckets have the number 0, and of several none is last."""
        self._unnumbered = set()

    def is_unnumbered(self, parameters: Sequence[torch.Tensor], is_last: bool) -> bool:
        """Return whether a bucket of these parameters is of such a step."""
        if self._unnumbered is None:
            return False
        if is_last or not self._unnumbered.isdisjoint(parameters):
            self._unnumbered = None
            return False
        self._unnumbered.update(parameters)
        return True

    def _next_name(self, parameter: torch.Tensor) -> str:
        if not self._expected or self._expected[0][1] != parameter.numel():
            wanted = (
                f"{self._expected[0][0]} of {self._expected[0][1]} elements"
                if self._expected
                else "no other"
            )
            raise ValueError(
                f"a bucket brings a parameter of {parameter.numel()} elements, where this state knows {wanted}: make a "
                "state with parameters=model.named_parameters(), and load the old one's state_dict() into it"
            )
        return self._expected.popleft()[0]

    def of_bucket(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[ParameterState]:
        """Return the states of a bucket's parameters, in the bucket's order, with residuals of ``dtype``.

        Raises:
            ValueError: the checkpoint has another size or dtype for a parameter, or momentum where there is none.
        """
        self.add_bucket(parameters)  # without a warm-up these buckets are the first
        for parameter in parameters:
            if parameter not in self._states:
                self._states[parameter] = self._make_state(parameter, str(dtype).split(".")[1])
        return [self._states[parameter] for parameter in parameters]

    def rescale(self, factor: float) -> None:
        """Multiply all residuals, velocities and thresholds.

        Raises:
            ValueError: the factor is not positive and finite, or a product is out of range; nothing has changed.
        """
        if not 0.0 < factor < math.inf:
            raise ValueError(f"factor is {factor}, must be positive and finite")
        for state in self._states.values():
            state.check_rescale(factor)
        for loaded in self._loaded.values():
            _check_rescale(loaded["threshold"], loaded["residual"], loaded["velocity"], factor)
        for state in self._states.values():
            state.rescale(factor)
        self._loaded = {name: _rescaled(state, factor) for name, state in self._loaded.items()}

    def state_dict(self, unsent: Mapping[ParameterState, Any]) -> dict[str, Any]:
        """Return the state of every parameter, by name; the arguments are those of `ParameterState.state_dict`."""
        parameters = copy.deepcopy(self._loaded)
        for parameter, state in self._states.items():
            parameters[self._names[parameter]] = state.state_dict(unsent.get(state))
        return {"format": _STATE_FORMAT, "parameters": parameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; a parameter's part is loaded when a bucket next brings the parameter.

        Raises:
            ValueError: the state is of another format or of another model, or no training goes on from it; nothing has
                changed.
        """
        check_format(state, _STATE_FORMAT)
        parameters = state.get("parameters")
        if not isinstance(parameters, Mapping):
            raise ValueError(
                f"state must have a dict of parameters, has {reprlib.repr(parameters)}: load another checkpoint"
            )
        for name, loaded in parameters.items():
            _check_loaded(name, loaded)
        if self._is_named and not self._expected:
            self._check_known(parameters)
        # Here rather than in the first backward pass, in which the other ranks would wait for this one.
        for parameter, name in self._names.items():
            if name in parameters:
                self._check_fits(name, parameters[name], parameter.numel())
        self._loaded = dict(parameters)
        self._states.clear()

    def check_all_loaded(self) -> None:
        """Refuse a checkpoint of another model, when buckets have brought all parameters.

        Raises:
            ValueError: a parameter of the checkpoint is in no bucket.
        """
        if self._loaded and not self._is_named:
            self._check_known(self._loaded)

    def _check_known(self, loaded: Iterable[str]) -> None:
        unknown = sorted(set(loaded) - set(self._names.values()))
        if unknown:
            raise ValueError(
                f"the checkpoint has residuals of parameters that this model does not have: {', '.join(unknown)}; "
                f"its own are named {', '.join(sorted(self._names.values()))}"
            )

    def _check_fits(self, name: str, loaded: Mapping[str, Any], numel: int) -> None:
        size = loaded["residual"].numel()
        if size != numel:
            raise ValueError(
                f"the residual of parameter {name} has {size} elements, the parameter has {numel}: the checkpoint is "
                "of another model"
            )
        if loaded["velocity"] is not None and not self._momentum:
            raise ValueError(
                f"the checkpoint has momentum for parameter {name}, this state was made without: "
                "give ThresholdState the momentum that it had"
            )

    def _make_state(self, parameter: torch.Tensor, dtype: str) -> ParameterState:
        numel = parameter.numel()
        name = self._names[parameter]
        loaded = self._loaded.get(name)
        # A policy depends on the sizes that were known when it was made: without names, those of the buckets so far.
        sizes = (self.numel, self.largest) if loaded is None else tuple(loaded["sizes"])
        encoder = self._make_encoder(numel, dtype, str(parameter.device), len(self._states), sizes)
        state = ParameterState(encoder, self._momentum, sizes)
        if loaded is None:
            return state
        self._check_fits(name, loaded, numel)
        saved = str(loaded["residual"].dtype).split(".")[1]
        if saved != dtype:
            raise ValueError(
                f"the residual of parameter {name} is {saved}, it now needs {dtype}: the checkpoint is of a model of "
                "another dtype"
            )
        state.load_state_dict(loaded)
        del self._loaded[name]
        return state


def scaled_threshold(threshold: float, factor: float) -> float:
    """Return a threshold in other units; raise `ValueError` if it is none there."""
    try:
        round_threshold(threshold * factor)
    except ValueError:
        raise ValueError(
            f"threshold {threshold:g} times {factor:g} is {threshold * factor:g}, out of the range of thresholds, "
            "1e-40 ... 3e38: use another loss scale or factor"
        ) from None
    return threshold * factor


def _check_rescale(
    threshold: float, residual: torch.Tensor, velocity: torch.Tensor | None, factor: float
) -> None:
    """Refuse a factor with which the threshold is none, or a finite value becomes infinite."""
    scaled_threshold(threshold, factor)
    for values in (residual, velocity):
        if values is None or not values.numel() or factor <= 1.0:
            continue
        largest = float(torch.linalg.vector_norm(values, math.inf))
        if largest * factor > torch.finfo(values.dtype).max:
            raise ValueError(
                f"a residual or velocity of {largest:g} times {factor:g} overflows {values.dtype}: use another loss "
                "scale or factor"
            )


def _check_loaded(name: str, state: dict[str, Any]) -> None:
    """Refuse what cannot be the state of a parameter of any size, before it replaces another."""
    try:
        if not isinstance(state, Mapping):
            raise TypeError(f"it must be a dict, is {reprlib.repr(state)}")
        residual = state["residual"].cpu().numpy()
        if str(residual.dtype) not in ("float32", "float64"):
            raise ValueError(f"its residual is {residual.dtype}, must be float32 or float64")
        plain = {**Encoder(0).state_dict(), **{key: state[key] for key in _PLAIN}}
        EncoderState.of({**plain, "residual": residual}, residual.size, str(residual.dtype))
        for size in state["sizes"]:
            check_range("sizes", size, 0, 2**63 - 1)
        numel, largest = state["sizes"]
        if not residual.size <= largest <= numel:
            raise ValueError(f"{residual.size} elements of at most {largest} of {numel}")
        velocity = state["velocity"]
        if velocity is not None and velocity.shape != state["residual"].shape:
            raise ValueError(f"a velocity of {velocity.numel()} elements for {residual.size}")
        if velocity is not None and velocity.dtype != state["residual"].dtype:
            raise ValueError(f"a velocity of {velocity.dtype} for a residual of {residual.dtype}")
        if not all(
            bool(v.isfinite().all()) for v in (state["residual"], velocity) if v is not None
        ):
            raise ValueError("its residual or velocity is not finite")
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # torch raises the RuntimeError for tensors without data in host memory, or with a gradient.
        raise ValueError(
            f"the state of parameter {name} is not that of a hook, load another checkpoint: {error!r}"
        ) from error


def _rescaled(state: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return one parameter's state with residual, velocity and threshold multiplied."""
    scaled = {"threshold": scaled_threshold(state["threshold"], factor)}
    for name in ("residual", "velocity"):
        if (values := state[name]) is not None:
            _multiply(multiplied := values.clone(), factor)
            scaled[name] = multiplied
    return {**state, **scaled}


def _multiply(values: torch.Tensor, factor: float) -> None:
    """Multiply a contiguous tensor in place, block by block, because doubles of the whole would take twice its memory.

    No float32 is as large as the factor from a very small loss scale to a usual one.
    """
    for block in values.view(-1).split(_BLOCK_NUMEL):
        block.copy_(block.double().mul_(factor))
