"""gradwire for PyTorch: a communication hook for DistributedDataParallel."""

from .hook import HookStats, ThresholdState, register_threshold_hook, threshold_hook

__all__ = ["HookStats", "ThresholdState", "register_threshold_hook", "threshold_hook"]
