"""gradwire for PyTorch: a communication hook for DistributedDataParallel, and an optimiser that shares its updates."""

from . import ops
from .hook import HookStats, ThresholdState, register_threshold_hook, threshold_hook
from .optimizer import SharedOptimizer

__all__ = [
    "HookStats",
    "SharedOptimizer",
    "ThresholdState",
    "ops",
    "register_threshold_hook",
    "threshold_hook",
]
