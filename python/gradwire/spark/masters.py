"""The two ways in which the workers of an estimator train together."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ParameterAveraging", "SharedTraining"]


@dataclass(frozen=True, kw_only=True)
class SharedTraining:
    """Every worker's optimiser steps are shared as threshold messages (Deeplearning4j's SharedTrainingMaster).

    Attributes:
        threshold: a threshold policy, or a number; None: the default of `gradwire.torch.share`.
        topology: "mesh", "sharded" or "auto", as for `Exchange`.
        mode: "sync": a step waits for all workers' messages; "async": it takes those that have arrived.
        every: steps between exchanges.
        port: the first UDP port of the workers of each machine; 0: the system chooses.
        network_mask: a network such as "10.1.1.0/24", in which every machine has one address.
        workers_per_node: workers of a machine that share one residual and send one message per step, through shared
            memory; 1: each worker sends its own. Every message counts the same in the mean, so let all machines have
            equally many workers.

    Raises:
        ValueError: a value is out of range.
    """

    threshold: Any = None
    topology: Literal["auto", "mesh", "sharded"] = "auto"
    mode: Literal["sync", "async"] = "sync"
    every: int = 1
    port: int = 0
    network_mask: str | None = None
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        _check(self, topology=("auto", "mesh", "sharded"), mode=("sync", "async"))


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

    Raises:
        ValueError: a value is out of range.
    """

    every: int = 5
    average_optimizer: bool = True
    via: Literal["udp", "spark"] = "udp"
    port: int = 0
    network_mask: str | None = None

    def __post_init__(self) -> None:
        _check(self, via=("udp", "spark"))


def _check(training: Any, **choices: tuple[str, ...]) -> None:
    for name, allowed in choices.items():
        if getattr(training, name) not in allowed:
            raise ValueError(
                f"{name} is {getattr(training, name)!r}, must be one of {', '.join(allowed)}"
            )
    for name in ("every", "workers_per_node"):
        count = getattr(training, name, 1)
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}, must be 1 or more")
    if not 0 <= training.port <= 65_535:
        raise ValueError(f"port is {training.port}, must be 0 to 65535")
    if training.network_mask is not None:
        ipaddress.ip_network(training.network_mask, strict=False)
