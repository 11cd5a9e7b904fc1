"""Everything that an exchange can be told, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .groups import Codec
from .prepare import Preparation
from .results import StepResult

__all__ = ["Options", "Reduction"]

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one exchange, as ``Exchange`` documents them.

    Raises:
        ValueError: a value is out of its range, or two contradict each other.
        TypeError: a value is of the wrong kind.
    """

    reduction: Reduction
    min_peers: int | None
    exact: bool
    codec: Codec
    timeout_s: float
    mode: Literal["sync", "async"]
    max_staleness: int
    every: int
    average_optimizer: bool
    apply_residual: bool
    overlap: int
    outer_momentum: float
    on_straggler: Literal["raise", "drop"]
    digest_s: float
    on_step: Callable[[StepResult], None] | None
    preparation: Preparation

    def __post_init__(self) -> None:
        _check_number("timeout_s", self.timeout_s, self.timeout_s > 0, "positive")
        _check_number("digest_s", self.digest_s, self.digest_s >= 0, "0 or more")
        if self.min_peers is not None:
            _check_whole("min_peers", self.min_peers, 0)
        _check_whole("every", self.every, 1)
        _check_whole("max_staleness", self.max_staleness, 0)
        _check_whole("overlap", self.overlap, 0)
        if self.on_step is not None and not callable(self.on_step):
            raise TypeError(f"on_step must be a function of a StepResult, got {self.on_step!r}")
        _check_choice("reduction", self.reduction, "mean", "sum")
        _check_choice("mode", self.mode, "sync", "async")
        _check_choice("codec", self.codec, "threshold", "dense", "bfloat16")
        _check_choice("on_straggler", self.on_straggler, "raise", "drop")
        if self.mode == "async" and self.on_straggler == "drop":
            raise ValueError(
                'on_straggler="drop" is for synchronous steps: asynchronous ones do not wait for a straggler until '
                "they are max_staleness ahead"
            )
        if self.codec != "threshold" and self.preparation.warmup is not None:
            raise ValueError(
                f'warmup is for codec="threshold": with "{self.codec}" every update is whole, from the first on'
            )
        if self.overlap > self.every:
            raise ValueError(
                f"overlap is {self.overlap}, must be from 0 to the {self.every} steps of every exchange: "
                "messages are applied before the next ones are encoded"
            )
        if self.overlap and (self.mode == "async" or self.average_optimizer):
            raise ValueError(
                "overlap is for synchronous steps, and without average_optimizer: asynchronous ones wait for nobody, "
                "and the optimiser's state goes on meanwhile"
            )
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if self.outer_momentum and (self.exact or self.mode == "async"):
            raise ValueError(
                "outer_momentum is for synchronous replicas that are not exact: others do not all add the same "
                "messages in the same order"
            )
        if self.average_optimizer and (self.every == 1 or self.mode == "async"):
            raise ValueError(
                "average_optimizer is for local steps between synchronous exchanges: every > 1"
            )
        if self.apply_residual and self.preparation.needs_update:
            raise ValueError(
                "apply_residual takes updates as they are: without momentum and clip_norm of the exchange; "
                "let the optimiser do both"
            )
        if self.exact and self.mode == "async" and self.reduction == "mean":
            raise ValueError(
                "exact asynchronous replicas cannot divide by a number of nodes that changes: give "
                'reduction="sum", and divide the updates by the number of nodes'
            )

    def scale_for(self, nodes: int) -> float:
        """Return the factor of every message when so many nodes contribute."""
        return 1.0 / nodes if self.reduction == "mean" else 1.0

    @property
    def is_sync(self) -> bool:
        """Whether every step waits for everybody's message."""
        return self.mode == "sync"


def _check_number(name: str, value: float, is_good: bool, what: str) -> None:
    if not is_good:
        raise ValueError(f"{name} is {value}, must be {what}")


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    _check_number(name, value, value >= least, f"{least} or more")


def _check_choice(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(choices)}")
