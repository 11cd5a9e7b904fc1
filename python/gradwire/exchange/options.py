"""The options of an exchange, declared and checked once for everything that takes them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

from ..codec import Encoder
from ..policy import MANY_LOCAL_STEPS, as_number
from ..state import check_flag, check_seconds
from .groups import Codec
from .protocol import VERSIONS

__all__ = [
    "ExchangeOptions",
    "Mode",
    "Options",
    "Reduction",
    "Role",
    "Straggler",
    "Topology",
    "training_defaults",
]

Mode = Literal["sync", "async"]
Reduction = Literal["mean", "sum"]
Role = Literal["member", "worker", "observer"]
Straggler = Literal["raise", "drop", "wait"]
Topology = Literal["auto", "mesh", "sharded"]

# After many local steps the mean moves much less than each node has; see docs/algorithm.md.
_OUTER_MOMENTUM = 0.5

# topology="auto": with fewer nodes, or a smaller model, the sharded exchange saves less than its second way costs.
SHARDED_NODES = 5
SHARDED_NUMEL = 500_000

_CHOICES: dict[str, tuple[str, ...]] = {
    "reduction": get_args(Reduction),
    "mode": get_args(Mode),
    "codec": get_args(Codec),
    "topology": get_args(Topology),
    "role": get_args(Role),
    "on_straggler": get_args(Straggler),
}
_FLAGS = ("apply_residual", "limit_outliers")
_SECONDS = {"timeout_s": math.ulp(0.0), "start_timeout_s": math.ulp(0.0), "digest_s": 0.0}
_INT_MAX = 2**31 - 1
_LEAST = {
    "min_peers": 0,
    "max_staleness": 0,
    "every": 1,
    "overlap": 0,
    "owners_max": 1,
    "min_members": 1,
}

# Options that have to be the same on all nodes.
_SIGNED = ("reduction", "mode", "every", "outer_momentum", "topology", "owners_max")

# A synchronous member may be one step ahead of another, and so may lack the last update of a third that dies now. A
# node that was left behind learns the fate of its updates of that time, too.
_KEPT_UPDATES = 3


class ExchangeOptions(TypedDict, total=False):
    """The options of `Exchange`, which `share`, the Spark estimator's `SharedTraining` and others pass on.

    `Options` has the defaults. docs/exchange.md explains when to choose which.
    """

    reduction: Reduction  #: "mean" of the live nodes' messages, as DistributedDataParallel's, or their "sum"
    #: number of other nodes to wait for before the first step; None: as many as the node was told of
    min_peers: int | None
    #: "sync": a step waits for all members' messages; "async": a step adds the messages that have arrived
    mode: Mode
    max_staleness: int  #: steps that an asynchronous node may be ahead of the slowest member
    codec: Codec  #: "threshold" messages, or whole updates as "dense" or "bfloat16"
    every: int  #: steps between exchanges; the steps in between change only this node's parameters
    overlap: int  #: steps that are computed while a step's messages travel, at most ``every``
    #: "mesh": every message goes to every node; "sharded": by way of owners of parts of the parameters; "auto":
    #: sharded for a synchronous training that begins with 5 nodes and 500,000 parameters or more, otherwise the mesh
    topology: Topology
    owners_max: int  #: most owners in the sharded exchange
    role: Role  #: a "worker" owns no parameters in the sharded exchange, an "observer" sends no updates
    #: Nesterov's momentum of the shared parameters, for ``every`` of 15 or more
    outer_momentum: float
    #: let this node's parameters hold its residual, so that gradients are computed with up-to-date parameters
    apply_residual: bool
    #: what a connected member that sends nothing for ``timeout_s`` leads to: "raise" a `TimeoutError`, "drop" the
    #: member, or "wait" and log its name
    on_straggler: Straggler
    #: shorten this node's update to the median of all nodes' where it is more than 4 times as long (bad data, a broken
    #: machine); with reduction="mean" and from 3 nodes on
    limit_outliers: bool
    #: number of nodes, or of their workers where these are teams, this node's included, below which the next step
    #: raises `PeerLost`
    min_members: int
    timeout_s: float  #: longest wait of one step
    #: longest wait for the peers before the first step, which may load data for long; None: ``timeout_s``
    start_timeout_s: float | None
    digest_s: float  #: seconds between comparisons of synchronous replicas; 0: never


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checked options, with the defaults; `ExchangeOptions` explains them.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
        TypeError: a value is of the wrong kind.
    """

    reduction: Reduction = "mean"
    min_peers: int | None = None
    mode: Mode = "sync"
    max_staleness: int = 8
    codec: Codec = "threshold"
    every: int = 1
    overlap: int = 0
    topology: Topology = "auto"
    owners_max: int = 64
    role: Role = "member"
    outer_momentum: float = 0.0
    apply_residual: bool = False
    on_straggler: Straggler = "raise"
    limit_outliers: bool = False
    min_members: int = 1
    timeout_s: float = 60.0
    start_timeout_s: float | None = None
    digest_s: float = 2.0

    @staticmethod
    def of(options: ExchangeOptions) -> Options:
        """Return the options; raise `TypeError`, which names those that there are, for an unknown name."""
        names = [field.name for field in fields(Options)]
        unknown = sorted(map(str, options.keys() - set(names)))
        if unknown:
            raise TypeError(
                f"unknown options {', '.join(unknown)}; an exchange has {', '.join(names)}"
            )
        return Options(**options)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, must be one of {', '.join(choices)}"
                )
        # Plain values, because other nodes compare some of them: NumPy's numbers are not written alike.
        for name in (*_LEAST, *_SECONDS, *_FLAGS, "outer_momentum"):
            value = getattr(self, name)
            if value is not None or name not in ("min_peers", "start_timeout_s"):
                object.__setattr__(self, name, _plain(name, value))
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if self.overlap > self.every:
            raise ValueError(
                f"overlap is {self.overlap}, must be from 0 to the {self.every} steps of every exchange: "
                "messages are applied before the next ones are encoded"
            )
        if not self.is_sync:
            self._check_async()
        if self.role == "worker" and self.topology == "mesh":
            raise ValueError(
                'role="worker" needs topology="sharded" or "auto": in the mesh nobody adds up updates for the others'
            )

    def _check_async(self) -> None:
        """Refuse what only synchronous exchanges have."""
        if self.topology == "sharded":
            raise ValueError(
                'topology="sharded" is for synchronous steps: an owner needs all nodes\' parts of the same step'
            )
        if self.overlap:
            raise ValueError("overlap is for synchronous steps: asynchronous ones wait for nobody")
        if self.outer_momentum:
            raise ValueError(
                "outer_momentum is for synchronous replicas: asynchronous ones do not all add the same messages in the "
                "same order"
            )
        if self.on_straggler == "drop":
            raise ValueError(
                'on_straggler="drop" is for synchronous steps: asynchronous ones wait for nobody until they are '
                "max_staleness ahead"
            )

    @property
    def longest_start_s(self) -> float:
        """Longest wait for the peers before the first step."""
        return self.timeout_s if self.start_timeout_s is None else self.start_timeout_s

    @property
    def is_sync(self) -> bool:
        """Whether every step waits for all members' messages."""
        return self.mode == "sync"

    def is_sharded(self, nodes: int, numel: int) -> bool:
        """Return whether a training that so many nodes begin, with so many parameters, is the sharded one."""
        # All nodes know both numbers, and the node that names the first members decides with them, once. Measured times
        # would make the bits of a run depend on the machine.
        if self.topology != "auto":
            return self.topology == "sharded"
        return self.is_sync and nodes >= SHARDED_NODES and numel >= SHARDED_NUMEL

    @property
    def kept_updates(self) -> int:
        """Number of updates of every node that are kept after they are applied: for peers that miss some."""
        # Asynchronous nodes measure the latest step of which all have told, and they tell of one in four: it may be
        # four steps ago even where nobody is behind.
        return _KEPT_UPDATES if self.is_sync else 2 * (self.max_staleness + 1) + _KEPT_UPDATES

    def signature(self, encoders: Sequence[Encoder]) -> dict[str, Any]:
        """Return everything that has to be the same on all nodes; the parameters' shapes are still to come."""
        return {
            "versions": VERSIONS,
            "params": None,
            "groups": [[encoder.key, encoder.numel, encoder.dtype] for encoder in encoders],
            **{name: getattr(self, name) for name in _SIGNED},
        }


def training_defaults(options: ExchangeOptions) -> ExchangeOptions:
    """Return the defaults of ``share`` and Spark where they differ from those of `Options`."""
    every = options.get("every", 1)
    is_measured = (options.get("mode", "sync"), options.get("reduction", "mean")) == (
        "sync",
        "mean",
    )
    # What is no number is refused with the other options.
    is_long = isinstance(every, Integral) and every >= MANY_LOCAL_STEPS
    return {
        "apply_residual": True,
        "limit_outliers": True,
        "outer_momentum": _OUTER_MOMENTUM if is_long and is_measured else 0.0,
    }


def _plain(name: str, value: Any) -> float:
    """Return an option's value as a bool, int or float; raise as `Options` does."""
    if name in _FLAGS:
        return check_flag(name, value)
    if name == "outer_momentum":
        return as_number(name, value)
    if name in _SECONDS:
        return check_seconds(name, value, least=_SECONDS[name])
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {reprlib.repr(value)}")
    least, number = _LEAST[name], int(value)
    if not least <= number <= _INT_MAX:
        bound = f"{least} or more" if number < least else f"at most {_INT_MAX}"
        raise ValueError(f"{name} is {number}, must be {bound}")
    return number
