"""The two ways in which the workers of an estimator train together."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal

from ..codec import Encoder
from ..exchange.options import ExchangeOptions, Options, training_defaults
from ..policy import ResidualClip, ShakeUp, whole
from ..state import check_flag, check_seconds
from .placement import PORT_MAX

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..policy import ThresholdPolicy

__all__ = ["ParameterAveraging", "SharedTraining"]

# A worker that swaps, collects garbage or waits for a disk is slow for minutes, and comes back.
TIMEOUT_S: Final = 300.0


# Options of an exchange that the estimator sets itself, and why.
_SET: Final = {
    "min_peers": "the first step waits for all workers",
    "min_members": "a training stops when a worker is gone, and Spark repeats the stage",
    "on_straggler": "a training stops when a worker sends nothing for timeout_s",
    "role": "every worker has rows to train on",
}


@dataclass(frozen=True, init=False, repr=False)
class SharedTraining:
    """Every worker's optimiser steps are shared as threshold messages (Deeplearning4j's SharedTrainingMaster).

    Args:
        exchange: see `ExchangeOptions`: such as ``mode="async"``, or ``every=4, overlap=1``. The
            workers' models hold their residuals by default (``apply_residual``), outliers are limited
            (``limit_outliers``), from ``every=15`` on ``outer_momentum`` is 0.5, and a worker that stands still is
            waited for, and then given up, after ``timeout_s`` (300). The estimator itself sets ``min_peers``,
            ``min_members``, ``on_straggler`` and ``role``.

    Attributes:
        threshold: a threshold policy, or a number; None: the default of `gradwire.torch.share`.
        port: the first UDP port of the workers of each machine; 0: the system chooses.
        network_mask: a network such as "10.1.1.0/24", in which every machine has one address.
        workers_per_node: workers of a machine that share one residual and send one message per step, through shared
            memory; 1: each worker sends its own; None: the number of GPUs of an executor, or else 1. Every worker has
            the same weight, also where a machine has fewer.
        shakeup: periodic messages with a smaller threshold, a `ShakeUp`; None: without.
        clip: periodic clipping of the residual, a `ResidualClip`; None: without.
        options: those of the exchange, with the defaults.

    Raises:
        ValueError: a value is out of range, two options contradict each other, or the estimator sets the option itself.
        TypeError: an unknown option, or one of the wrong kind.

    >>> SharedTraining(every=4, overlap=1)
    SharedTraining(every=4, overlap=1)
    """

    threshold: ThresholdPolicy | float | None
    port: int
    network_mask: str | None
    workers_per_node: int | None
    shakeup: ShakeUp | None
    clip: ResidualClip | None
    options: Options

    def __init__(
        self,
        *,
        threshold: ThresholdPolicy | float | None = None,
        port: int = 0,
        network_mask: str | None = None,
        workers_per_node: int | None = None,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        **exchange: Unpack[ExchangeOptions],
    ) -> None:
        for name in exchange:
            if name in _SET:
                raise ValueError(f"{name} is set by the estimator: {_SET[name]}")
        if workers_per_node is not None:
            workers_per_node = whole("workers_per_node", workers_per_node, least=1)
        for name, schedule, kind in (("shakeup", shakeup, ShakeUp), ("clip", clip, ResidualClip)):
            if not isinstance(schedule, (kind, NoneType)):
                raise TypeError(f"{name} is {schedule!r}, must be {kind.__name__}(...)")
        # Refuses here, and not in every worker, what no encoder takes.
        Encoder(0, threshold, shakeup, clip)
        values = {
            "threshold": threshold,
            "port": _checked_port(port, network_mask),
            "network_mask": network_mask,
            "workers_per_node": workers_per_node,
            "shakeup": shakeup,
            "clip": clip,
            "options": Options.of(
                {**training_defaults(exchange), "timeout_s": TIMEOUT_S, **exchange}
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the class is frozen

    @property
    def timeout_s(self) -> float:
        """Time for which a worker that stands still is waited for."""
        return self.options.timeout_s

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make an equal object."""
        return {name: value for name, value in _values_of(self).items() if name not in _SET}

    def __repr__(self) -> str:
        """Return the call with the arguments that are not the defaults."""
        values = _values_of(self)
        defaults = _values_of(SharedTraining())
        changed = [name for name in values if values[name] != defaults[name]]
        return f"SharedTraining({', '.join(f'{name}={values[name]!r}' for name in changed)})"


def _values_of(training: SharedTraining) -> dict[str, Any]:
    """Return all arguments of a `SharedTraining` by name."""
    values = {**vars(training), **vars(training.options)}
    del values["options"]
    return values


@dataclass(frozen=True, kw_only=True)
class ParameterAveraging:
    """Workers train on their own and average their parameters (Deeplearning4j's ParameterAveragingTrainingMaster).

    Attributes:
        every: steps between averages.
        average_optimizer: average the optimiser's state too.
        via: "udp": between the workers; "spark": through Spark's own connections, one job per average, where firewalls
            allow nothing else.
        port: as `SharedTraining.port`.
        network_mask: as `SharedTraining.network_mask`.
        timeout_s: time for which a worker that stands still is waited for; then it is given up. With ``via="spark"``
            that is Spark's matter (``spark.speculation``).

    Raises:
        ValueError: a value is out of range.
        TypeError: a value is of the wrong kind.
    """

    every: int = 5
    average_optimizer: bool = True
    via: Literal["udp", "spark"] = "udp"
    port: int = 0
    network_mask: str | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if self.via not in ("udp", "spark"):
            raise ValueError(f"via is {self.via!r}, must be one of udp, spark")
        values = {
            "every": whole("every", self.every, least=1),
            "average_optimizer": check_flag("average_optimizer", self.average_optimizer),
            "port": _checked_port(self.port, self.network_mask),
            "timeout_s": check_seconds("timeout_s", self.timeout_s),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _checked_port(port: int, network_mask: str | None) -> int:
    """Return a port as an int, if both it and the mask of the network can be used."""
    port = whole("port", port, least=0)
    if port > PORT_MAX:
        raise ValueError(f"port is {port}, must be 0 to {PORT_MAX}")
    if network_mask is not None:
        if not isinstance(network_mask, str):
            raise TypeError(f"network_mask is {network_mask!r}, must be a text such as 10.1.1.0/24")
        ipaddress.ip_network(network_mask, strict=False)
    return port
