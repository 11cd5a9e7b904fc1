"""How the workers of an estimator train together: what can be chosen, and what is refused when it is chosen."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import ExchangeOptions
from gradwire.exchange.options import Options
from gradwire.spark import ParameterAveraging, SharedTraining

VALUES: ExchangeOptions = {
    "reduction": "sum",
    "mode": "async",
    "max_staleness": 3,
    "codec": "bfloat16",
    "every": 4,
    "overlap": 0,
    "topology": "mesh",
    "owners_max": 5,
    "outer_momentum": 0.0,
    "apply_residual": False,
    "limit_outliers": False,
    "timeout_s": 7.0,
    "start_timeout_s": 9.0,
    "digest_s": 0.0,
}
SET = ("min_peers", "min_members", "on_straggler", "role")


def test_shared_training_takes_every_option_of_an_exchange_that_it_does_not_set_itself() -> None:
    assert sorted((*VALUES, *SET)) == sorted(ExchangeOptions.__annotations__)
    assert SharedTraining(**VALUES).options == Options(**VALUES)
    assert SharedTraining().options == Options(
        apply_residual=True, limit_outliers=True, timeout_s=300.0
    )
    assert SharedTraining(every=15).options.outer_momentum == 0.5
    assert SharedTraining(every=15, outer_momentum=0.0).options.outer_momentum == 0.0


@pytest.mark.parametrize("name", SET)
def test_options_that_the_estimator_sets_are_refused_with_the_reason(name: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is set by the estimator: .*"):
        SharedTraining(**{name: 1})


def test_a_shared_training_can_be_pickled_compared_hashed_and_read() -> None:
    policy = gw.TargetDensity(0.02)
    training = SharedTraining(
        threshold=policy,
        every=3,
        overlap=1,
        workers_per_node=2,
        clip=gw.ResidualClip(5.0, every=5),
        shakeup=gw.ShakeUp(every=100),
    )
    assert pickle.loads(pickle.dumps(training)) == training
    assert training != SharedTraining(threshold=policy, every=3, workers_per_node=2)
    assert SharedTraining(mode="sync", port=0) == SharedTraining()
    assert len({training, SharedTraining(), SharedTraining()}) == 2
    assert eval(repr(training), {"SharedTraining": SharedTraining, **vars(gw)}) == training
    assert repr(SharedTraining()) == "SharedTraining()"
    with pytest.raises(AttributeError):
        training.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        (SharedTraining, {"mode": "fast"}, ValueError, "must be one of sync, async"),
        (SharedTraining, {"topology": "ring"}, ValueError, "must be one of auto, mesh, sharded"),
        (SharedTraining, {"every": 0}, ValueError, "every is 0"),
        (SharedTraining, {"mode": "async", "overlap": 1}, ValueError, "overlap is for synchronous"),
        (SharedTraining, {"port": 70_000}, ValueError, "port is 70000"),
        (SharedTraining, {"port": "40123"}, ValueError, "port must be a whole number"),
        (SharedTraining, {"threshold": "low"}, TypeError, "threshold must be a threshold policy"),
        (SharedTraining, {"threshold": 0.0}, ValueError, "a threshold must be positive"),
        (SharedTraining, {"workers_per_node": 0}, ValueError, "whole number of at least 1, got 0"),
        (SharedTraining, {"clip": 5.0}, TypeError, r"clip is 5.0, must be ResidualClip\("),
        (SharedTraining, {"shakeup": 100}, TypeError, r"shakeup is 100, must be ShakeUp\("),
        (SharedTraining, {"evry": 2}, TypeError, "unknown options evry"),
        (ParameterAveraging, {"via": "pigeon"}, ValueError, "must be one of udp, spark"),
        (ParameterAveraging, {"every": 0}, ValueError, "every must be a whole number"),
        (ParameterAveraging, {"every": 2.0}, ValueError, "every must be a whole number"),
        (ParameterAveraging, {"every": True}, ValueError, "every must be a whole number"),
        (ParameterAveraging, {"timeout_s": 0.0}, ValueError, "timeout_s is 0.0"),
        (ParameterAveraging, {"timeout_s": "300"}, TypeError, "timeout_s must be a number"),
        (ParameterAveraging, {"average_optimizer": "no"}, TypeError, "must be True or False"),
        (ParameterAveraging, {"port": 1.5}, ValueError, "port must be a whole number"),
        (ParameterAveraging, {"network_mask": 10}, TypeError, "network_mask is 10, must be a text"),
        (ParameterAveraging, {"network_mask": "x"}, ValueError, "'x' does not appear to be"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    kind: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kind(**options)


def test_whole_numbers_may_be_numpy_s() -> None:
    assert type(ParameterAveraging(every=np.int64(3)).every) is int  # type: ignore[arg-type]
    training = SharedTraining(every=np.int64(3), workers_per_node=np.int64(2))  # type: ignore[arg-type]
    assert repr(training) == "SharedTraining(workers_per_node=2, every=3)"
