"""One call for NumPy arrays, and what the integrations have in common: encoders by name, node, exchange, goodbye."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import rendezvous
from .arrays import device_of
from .codec import Encoder
from .errors import NotCopied
from .exchange import Exchange, Group, Groups, LocalExchange, LocalTeam, StepResult
from .exchange.options import ExchangeOptions, Options
from .exchange.results import ExchangeStats
from .policy import TargetDensity, default_policy
from .transport import Node

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Density", "ExchangeMaker", "SharedArrays", "exchange_for", "share"]

Density = float | Mapping[str, float | Literal["dense"]]

_LOG = logging.getLogger(__name__)

# Steps until tensors that do not change are named, and how many names are given.
_JUDGED_STEPS = 50
_NAMED_TENSORS = 5

# One thread of an encoder for so many elements, at most.
_THREAD_NUMEL = 1 << 20


class SharedArrays(NotCopied, instead="save arrays and exchange.state_dict()"):
    """Parameters that all nodes of a run share; made by `share`.

    Attributes:
        params: the parameters, changed in place by every step.
        exchange: does the work.
        result: of the last step.
    """

    def __init__(self, params: Any, exchange: Exchange | LocalExchange) -> None:
        self.params = params
        self.exchange = exchange
        self.result: StepResult | None = None
        exchange.join(params, equalize=True)

    def __repr__(self) -> str:
        return f"<gradwire.SharedArrays over {self.exchange!r}>"

    def step(self, update: Any) -> StepResult:
        """Add this node's update, and the part of the others' updates that has been sent, to the parameters.

        Args:
            update: addition to the parameters, such as -learning_rate * gradient; arrays of the parameters' shapes,
                float32, float64 or float16, where the parameters are; not modified.

        Raises:
            NonFiniteUpdate, TimeoutError, PeerLost, Closed: as ``Exchange.step``.
        """
        self.result = self.exchange.step(update, self.params)
        return self.result

    def shared(self) -> Any:
        """Return a copy of the parameters that all nodes share, without this node's residual: to save or to compare."""
        shared = self.exchange.shared(self.params)
        return shared if isinstance(self.params, (list, tuple)) else shared[0]


def share(
    params: Any,
    *,
    node: Node | None = None,
    density: float | None = None,
    **options: Unpack[ExchangeOptions],
) -> SharedArrays:
    """Share arrays with the other nodes of this run: one call, and then ``step`` with every update.

    The node's place in the run comes from the environment, see `Node.from_env`; several processes of one machine are a
    `LocalTeam`. All begin with the parameters of rank 0; whoever comes late takes the present ones.

    Args:
        params: one NumPy array, or a list of arrays: float32 or float64, contiguous, writable; or torch's tensors, also
            on a GPU. Changed in place.
        node: a node to use and to close; None: one from the environment, closed when the process ends.
        density: share of the elements that a step sends; None: 0.01, for n < 2,000,000 elements sqrt(2e6 / n) times as
            many, up to 0.08.
        options: see `ExchangeOptions`. Unlike those of `Exchange`, parameters hold this node's residual
            (``apply_residual``), and a synchronous step waits for stragglers: after ``timeout_s`` a log entry names the
            node that all wait for.

    Raises:
        TimeoutError: not all nodes of the run appeared; the message names the missing ones.
        Mismatch: another node shares arrays of other shapes or dtypes, or with other options.
        ValueError: an argument or environment variable that cannot be used.
        TypeError: an unknown option.

    >>> import numpy as np, gradwire as gw
    >>> weights = np.zeros(3, np.float32)
    >>> shared = gw.share(weights)
    >>> result = shared.step(np.array([0.5, 0.25, -0.5], np.float32))
    >>> weights.tolist()
    [0.5, 0.25, -0.5]
    """
    arrays = list(params) if isinstance(params, (list, tuple)) else [params]
    named = [(str(index), array) for index, array in enumerate(arrays)]
    return SharedArrays(params, exchange_for(named, density, node=node, **options))


def _groups_for(
    named: Sequence[tuple[str, Any]],
    density: Density | None,
    *,
    is_adaptive: bool,
    device: str,
    processors: int,
) -> Groups:
    """Return one group of all tensors with the same density, which is the default where none is given.

    All of them share a threshold and a message: a group for every tensor costs small models several times the bytes.
    Frozen parameters have a group of their own: the densities are those of the model without them.
    """
    patterns = density if isinstance(density, Mapping) else {}
    rest = None if isinstance(density, Mapping) else density
    by_density: dict[tuple[bool, float | str | None], list[int]] = {}
    used = set()
    for index, (name, array) in enumerate(named):
        pattern = next(filter(functools.partial(fnmatchcase, name), patterns), None)
        used.add(pattern)
        value: float | str | None = rest if pattern is None else patterns[pattern]
        by_density.setdefault((_is_frozen(array), value), []).append(index)
    # A pattern without a parameter is a typing error, which would train with another density than intended.
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        names = ", ".join(name for name, _ in named[:6])
        raise ValueError(
            f"density: {', '.join(unused)} matches no parameter that an earlier pattern leaves; the names are {names}"
            f"{', ...' if len(named) > 6 else ''}"
        )
    dtype = "float64" if any("float64" in str(array.dtype) for _, array in named) else "float32"
    numel_of = {
        is_frozen: sum(
            math.prod(array.shape) for _, array in named if _is_frozen(array) == is_frozen
        )
        for is_frozen in (False, True)
    }
    groups = []
    for key, ((is_frozen, value), indices) in enumerate(by_density.items()):
        numel = sum(math.prod(named[index][1].shape) for index in indices)
        policy = default_policy(numel_of[is_frozen], is_adaptive=is_adaptive)
        if value not in (None, "dense"):
            policy = _policy(value, numel)
        threads = max(1, min(processors, numel // _THREAD_NUMEL))
        encoder = Encoder(numel, policy, dtype=dtype, device=device, key=key, threads=threads)
        tensors = tuple(indices) if len(by_density) > 1 else None
        groups.append(Group(encoder, tensors, is_dense=value == "dense"))
    return Groups(groups)


def _is_frozen(array: Any) -> bool:
    """Return whether a parameter is one of torch's that takes no gradient; arrays are never known to be."""
    return getattr(array, "is_leaf", False) and not array.requires_grad


def _policy(density: Any, numel: int) -> TargetDensity:
    if isinstance(density, (bool, str)) or not 0.0 < density < 1.0:
        raise ValueError(f'density is {density!r}, must be in (0, 1), about 0.01, or "dense"')
    if density * numel < 1.0:
        raise ValueError(
            f"density {density:g} of {numel} elements is less than one element: give at least {1.0 / numel:.2g}"
        )
    return TargetDensity(density)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ExchangeMaker:
    """Makes the exchange of this process, with its place in the run; and again for more parameters.

    Encoders are where the parameters are, a team's in host memory.

    Args:
        density: for all; or by pattern of the names (the first that fits), where "dense" sends whole updates and the
            rest has the default; None: the default for all.
        is_adaptive: whether the updates are an adaptive optimiser's, for the default.
        node: to use; None: one from the environment, closed at the end of the process.
        team: rank and size of the team on this machine; None: from the environment.
        options: see `ExchangeOptions`; with other defaults of ``apply_residual`` and ``on_straggler``.

    Raises:
        TypeError, ValueError: the options cannot be used.
    """

    def __init__(
        self,
        density: Density | None,
        *,
        is_adaptive: bool = False,
        node: Node | None,
        team: tuple[int, int] | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        self._density = density
        self._is_adaptive = is_adaptive
        self._node = node
        self._options: ExchangeOptions = {
            "apply_residual": True,
            # An asynchronous step waits only for nodes that are far behind, and then not for ever.
            "on_straggler": "raise" if options.get("mode") == "async" else "wait",
            **options,
        }
        # Options that cannot be used are refused by every worker of a team, before there is a node.
        checked = Options.of(self._options)
        self._timeout_s = checked.timeout_s
        self._reduction = checked.reduction
        self._place = place = rendezvous.placement()
        self._rank, self._size = team or (place.local_rank, place.local_size)
        self._is_team = self._size > 1 and (node is None or team is not None)
        self._teams = 0

    def make(self, named: Sequence[tuple[str, Any]]) -> Exchange | LocalExchange:
        """Return the exchange of the parameters, which are given with their names, in order."""
        groups = self._groups(named)
        if not self._is_team:
            return self._exchange(named, groups)
        team = self._team()
        return team.lead(self._exchange(named, groups)) if self._rank == 0 else team.follow()

    def make_again(
        self, named: Sequence[tuple[str, Any]], before: Exchange | LocalExchange
    ) -> Exchange | LocalExchange:
        """Return an exchange of more parameters, in the place of another one that this object has made."""
        groups = self._groups(named)
        if isinstance(before, Exchange):
            return self._exchange(named, groups)
        # The memory of a team that has begun has the size of the earlier parameters.
        team = self._team() if before.team.is_attached else before.team
        return team.lead(self._exchange(named, groups)) if self._rank == 0 else team.follow()

    def _groups(self, named: Sequence[tuple[str, Any]]) -> Groups:
        number = -1 if self._is_team else device_of([array for _, array in named])
        return _groups_for(
            named,
            self._density,
            is_adaptive=self._is_adaptive,
            device="cpu" if number < 0 else f"cuda:{number}",
            # The workers of a team wait while their leader encodes.
            processors=_processors() // (1 if self._is_team else self._place.local_size),
        )

    def _team(self) -> LocalTeam:
        name = rendezvous.name_of(self._place)
        if self._teams:
            name = f"{name}.{self._teams}"
        self._teams += 1
        return LocalTeam(
            name,
            size=self._size,
            rank=self._rank,
            reduction=self._reduction,
            timeout_s=self._timeout_s,
        )

    def _exchange(self, named: Sequence[tuple[str, Any]], groups: Groups) -> Exchange:
        is_given = self._node is not None
        if self._node is None:
            # Machines of one rank and of several may train together.
            is_alone = self._place.local_size == 1
            self._node = Node.from_env(per_machine=self._is_team or is_alone)
        exchange = Exchange(groups, self._node, **self._options)
        if Options.of(self._options).codec == "threshold":
            exchange.listeners.append(_StillTensors(named, groups))
        if not is_given:
            atexit.register(_say_goodbye, weakref.ref(exchange), self._node)
        return exchange


def exchange_for(
    named: Sequence[tuple[str, Any]],
    density: Density | None,
    *,
    is_adaptive: bool = False,
    node: Node | None,
    **options: Unpack[ExchangeOptions],
) -> Exchange | LocalExchange:
    """Return the exchange of this process, see `ExchangeMaker`."""
    return ExchangeMaker(density, is_adaptive=is_adaptive, node=node, **options).make(named)


class _StillTensors:
    """Logs once which tensors hardly change, if so few elements have changed that a density cannot be met.

    Messages are right all the same; but these tensors cost memory and time in every step, and often nobody knows that
    they do not train.
    """

    def __init__(self, named: Sequence[tuple[str, Any]], groups: Groups) -> None:
        self._names = [name for name, _ in named]
        self._sizes = [math.prod(array.shape) for _, array in named]
        self._groups = groups
        self._steps = 0

    def __call__(self, _result: StepResult, _stats: ExchangeStats) -> None:
        """Count a finished step."""
        self._steps += 1
        if self._steps != _JUDGED_STEPS:
            return
        for group in self._groups.groups:
            policy = group.encoder.policy
            # Dense updates leave no residual, and reading one on a device would make the training wait.
            is_on_device = device_of(group.encoder.residual) >= 0
            if group.is_dense or is_on_device or not isinstance(policy, TargetDensity):
                continue
            still = self._still_tensors(group, policy.density)
            if still:
                _LOG.warning(
                    "fewer elements change than the density %.2g asks for, and all that change are sent; in %d steps "
                    "hardly anything has changed in %s%s: leave out of the optimiser, or of share(), what is not "
                    "trained",
                    policy.density,
                    _JUDGED_STEPS,
                    ", ".join(still[:_NAMED_TENSORS]),
                    ", ..." if len(still) > _NAMED_TENSORS else "",
                )

    def _still_tensors(self, group: Group, density: float) -> list[str]:
        """Return the names of a group's tensors in which fewer elements have changed than the density."""
        residual = group.encoder.residual
        if np.count_nonzero(residual) > density * residual.size:
            return []
        still = []
        start = 0
        for index in range(len(self._names)) if group.tensors is None else group.tensors:
            part = residual[start : start + self._sizes[index]]
            start += part.size
            if np.count_nonzero(part) <= density * part.size:
                still.append(self._names[index])
        return still


def _say_goodbye(exchange: weakref.ref[Exchange], node: Node) -> None:
    """Deliver the last messages when the process ends; after an error without a goodbye, so that others know."""
    has_failed = getattr(sys, "last_value", None) is not None
    share = exchange()
    if share is not None and not has_failed:
        share.end()
    node.close(0.0 if has_failed else 5.0)
