"""PyTorch: a communication hook for DistributedDataParallel, and an optimiser whose updates are shared."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        'gradwire.torch needs PyTorch: pip install "gradwire[torch]"', name="torch"
    )

from . import ops
from .comparison import Comparison, compare
from .hook import HookOptions, HookStats, ThresholdState, register_threshold_hook, threshold_hook
from .optimizer import SharedOptimizer
from .share import share

__all__ = [
    "Comparison",
    "HookOptions",
    "HookStats",
    "SharedOptimizer",
    "ThresholdState",
    "compare",
    "ops",
    "register_threshold_hook",
    "share",
    "threshold_hook",
]
