"""The options of an exchange, checked once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .descent import Optimizer, check_number, summary
from .groups import Codec

__all__ = ["Options", "Reduction", "Role", "Topology", "chosen_codec"]

_LOG = logging.getLogger(__name__)

Reduction = Literal["mean", "sum"]
Role = Literal["member", "worker", "owner", "observer"]
Topology = Literal["auto", "mesh", "sharded"]

_KEPT_UPDATES = 3  # a member may be one step ahead of another


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `Exchange`; docs/exchange.md explains them.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
        TypeError: a value is of the wrong kind.
    """

    reduction: Reduction
    min_peers: int | None
    mode: Literal["sync", "async"]
    max_staleness: int
    exact: bool
    codec: Codec
    every: int
    overlap: int
    topology: Topology
    owners_max: int
    role: Role
    optimizer: Optimizer | None
    outer_momentum: float
    apply_residual: bool
    on_straggler: Literal["raise", "drop", "wait"]
    min_members: int
    timeout_s: float
    digest_s: float

    def __post_init__(self) -> None:
        check_number("timeout_s", self.timeout_s, self.timeout_s > 0, "positive")
        check_number("digest_s", self.digest_s, self.digest_s >= 0, "0 or more")
        if self.min_peers is not None:
            _check_int("min_peers", self.min_peers, 0)
        _check_int("every", self.every, 1)
        _check_int("min_members", self.min_members, 1)
        _check_int("max_staleness", self.max_staleness, 0)
        _check_int("overlap", self.overlap, 0)
        _check_int("owners_max", self.owners_max, 1)
        _check_choice("topology", self.topology, "auto", "mesh", "sharded")
        _check_choice("role", self.role, "member", "worker", "owner", "observer")
        if self.role in ("worker", "owner") and not self.may_shard:
            raise ValueError(
                f'role="{self.role}" needs topology="sharded" or "auto", and no exact: in the mesh nobody adds up '
                "updates for the others"
            )
        _check_choice("reduction", self.reduction, "mean", "sum")
        _check_choice("mode", self.mode, "sync", "async")
        _check_choice("codec", self.codec, "threshold", "dense", "bfloat16")
        _check_choice("on_straggler", self.on_straggler, "raise", "drop", "wait")
        if not self.is_sync and self.on_straggler == "drop":
            raise ValueError(
                'on_straggler="drop" is for synchronous steps: asynchronous ones wait for nobody until they are '
                "max_staleness ahead"
            )
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if self.outer_momentum and (self.exact or not self.is_sync):
            raise ValueError(
                "outer_momentum is for synchronous replicas that are not exact: others do not all add the same "
                "messages in the same order"
            )
        if self.overlap > self.every:
            raise ValueError(
                f"overlap is {self.overlap}, must be from 0 to the {self.every} steps of every exchange: "
                "messages are applied before the next ones are encoded"
            )
        if self.overlap and not self.is_sync:
            raise ValueError("overlap is for synchronous steps: asynchronous ones wait for nobody")
        if self.exact and self.topology == "sharded":
            raise ValueError(
                "exact is for the mesh: sharded replicas add the same results of the same owners, so their bits are "
                "the same without it"
            )
        if self.optimizer is not None:
            _check_optimizer(self, self.optimizer)
        if self.exact and not self.is_sync and self.reduction == "mean":
            raise ValueError(
                "exact asynchronous replicas cannot divide by a number of nodes that changes: give "
                'reduction="sum", and divide the updates by the number of nodes'
            )

    @property
    def is_sync(self) -> bool:
        """Whether every step waits for all members' messages."""
        return self.mode == "sync"

    @property
    def may_shard(self) -> bool:
        """Whether nodes may own parameters; exact sums need all messages on all nodes."""
        return self.topology != "mesh" and not self.exact

    @property
    def kept_updates(self) -> int:
        """Number of updates of every node that are kept after they are applied: for peers that miss some."""
        return _KEPT_UPDATES if self.is_sync else 2 * self.max_staleness + _KEPT_UPDATES

    def signature(self) -> dict[str, Any]:
        """Return the options that have to be the same on all nodes."""
        names = ("reduction", "mode", "every", "exact", "outer_momentum", "topology", "owners_max")
        return {
            **{name: getattr(self, name) for name in names},
            "optimizer": summary(self.optimizer),
        }


def _check_optimizer(options: Options, optimizer: Optimizer) -> None:
    if not all(hasattr(optimizer, name) for name in ("slots", "is_linear", "update")):
        raise TypeError(f"optimizer must be one as gradwire.SGD, got {optimizer!r}")
    if options.topology != "sharded":
        raise ValueError('optimizer needs topology="sharded": in the mesh no node owns parameters')
    if options.every > 1:
        raise ValueError("optimizer takes gradients, and local steps (every) change the parameters")
    if options.apply_residual:
        raise ValueError(
            "apply_residual adds the residual to the parameters; with an optimizer it holds gradients"
        )
    if options.outer_momentum:
        raise ValueError("give the optimizer the momentum, rather than outer_momentum")
    if not optimizer.is_linear and options.codec == "threshold":
        raise ValueError(
            f"{type(optimizer).__name__} normalises gradients, and those of threshold messages are sparse, which ruins "
            'training: give codec="dense" or "bfloat16", or run it on the nodes and share its updates'
        )


def chosen_codec(codec: Codec | Literal["auto"]) -> Codec:
    """Return the codec that an exchange uses, and log the reason where it is a choice.

    The choice does not depend on the link: threshold messages were faster than whole updates on every link that was
    measured, and are in the cost model wherever an encoder's density is at most 0.2 (docs/scale.md).
    """
    if codec != "auto":
        return codec
    _LOG.info(
        'codec="auto": threshold messages, because whole updates take longer to encode and send on any link'
    )
    return "threshold"


def _check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    check_number(name, value, value >= least, f"{least} or more")


def _check_choice(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(choices)}")
