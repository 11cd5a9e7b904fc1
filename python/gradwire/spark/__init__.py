"""Training on Spark: estimators for DataFrames, and a connected node in every task of a barrier stage.

Spark starts all tasks at the same time and gives each its part of the data. Updates travel directly between the tasks,
not through the driver; there is no master.

Requires ``gradwire[spark]`` where the driver runs and on every executor; estimators need ``gradwire[spark,torch]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .strategies import ParameterAveraging, SharedTraining
from .tasks import node, run

if TYPE_CHECKING:
    from .estimator import TorchEstimator, TorchModel
    from .persistence import trust_code
    from .production import Production, stream

__all__ = [
    "ParameterAveraging",
    "Production",
    "SharedTraining",
    "TorchEstimator",
    "TorchModel",
    "node",
    "run",
    "stream",
    "trust_code",
]

# Imported at first use: they need torch, pyarrow and pandas.
_LAZY = {
    "Production": "production",
    "TorchEstimator": "estimator",
    "TorchModel": "estimator",
    "stream": "production",
    "trust_code": "persistence",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"gradwire.spark.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'gradwire.spark' has no attribute {name!r}")
