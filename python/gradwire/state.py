"""The states in checkpoints, and checks that refuse an unsuitable state before anything changes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .policy import PolicyState, Supply, as_number, round_threshold

__all__ = [
    "EncoderState",
    "check_dict",
    "check_flag",
    "check_format",
    "check_node",
    "check_range",
    "check_seconds",
]

_ENCODER_FORMAT = 2


def check_format(state: dict[str, Any], known: int, name: str = "state") -> None:
    """Refuse a state of another format.

    Args:
        state: a dict from ``state_dict``, possibly of another version.
        known: the format that this version reads.
        name: the name of the state in the error.

    Raises:
        ValueError: the state has another format, or none.
        TypeError: it is no dict.
    """
    check_dict(state, name)
    if state.get("format") != known:
        raise ValueError(f"{name} has format {state.get('format')!r}, this gradwire reads {known}")


def check_dict(state: Any, name: str) -> None:
    """Raise `TypeError` for a state that is no dict."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a dict from state_dict(), got {reprlib.repr(state)}")


def check_range(name: str, value: int, least: int, most: int) -> int:
    """Return an int from ``least`` to ``most``, one of NumPy's as an int; refuse everything else.

    Raises:
        TypeError: the value is not an int.
        ValueError: the value is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {reprlib.repr(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least} to {most}, got {value}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Return True or False, one of NumPy's as Python's; raise `TypeError` for everything else, as for "False"."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {reprlib.repr(value)}")
    return bool(value)


def check_node(node: Any) -> None:
    """Raise `TypeError` for what is not a node, nor stands in for one."""
    if isinstance(node, type) or not hasattr(node, "publish"):
        raise TypeError(f"node must be a Node, got {reprlib.repr(node)}")


def check_seconds(name: str, value: Any, *, least: float = math.ulp(0.0)) -> float:
    """Return a time in seconds as a float; infinity: for ever.

    Raises:
        TypeError: the value is not a number.
        ValueError: it is NaN, or too small: without ``least`` it must be positive.
    """
    seconds = as_number(name, value)
    if not seconds >= least:
        raise ValueError(
            f"{name} is {value}, must be {'0 or more' if least == 0.0 else 'positive'}"
        )
    return seconds


@dataclass(frozen=True)
class EncoderState:
    """The state that an encoder's next message depends on, for every device.

    Attributes:
        residual: float32[numel] or float64[numel], contiguous, in host memory.
        threshold: the policy's threshold, not rounded.
        step: number of the next message.
        changed_at: step at which the threshold last changed, or at which a ``TargetDensity`` began.
        policy_state: memory of a ``TargetDensity``.
    """

    residual: NDArray[Any]
    threshold: float
    step: int
    changed_at: int
    policy_state: PolicyState

    def as_dict(self) -> dict[str, Any]:
        """Return the state as host arrays and plain numbers."""
        return {
            "format": _ENCODER_FORMAT,
            "numel": self.residual.size,
            "dtype": str(self.residual.dtype),
            "residual": self.residual,
            "threshold": self.threshold,
            "step": self.step,
            "changed_at": self.changed_at,
            # The name in checkpoints. No enumeration: torch loads plain numbers only.
            "course": (*self.policy_state[:2], int(self.policy_state.supply)),
        }

    @staticmethod
    def of(state: dict[str, Any], numel: int, dtype: str) -> EncoderState:
        """Return the state in a dict, after checking that it fits an encoder of this size and dtype.

        Raises:
            ValueError: another format, size or dtype, or not the state of an encoder: a damaged value would make every
                later step fail.
            TypeError: it is no dict.
        """
        check_format(state, _ENCODER_FORMAT)
        missing = {"residual", "threshold", "step", "changed_at", "course"} - state.keys()
        if missing:
            raise ValueError(
                f"state lacks {', '.join(sorted(missing))}: it is not that of an encoder"
            )
        try:
            residual = np.asarray(state["residual"])
            threshold = as_number("threshold", _plain(state["threshold"]))
            step = check_range("step", _plain(state["step"]), 0, 2**63)
            changed_at = check_range("changed_at", _plain(state["changed_at"]), 0, step)
            trend, deviation, supply = (
                as_number("course", _plain(each)) for each in state["course"]
            )
            # An enumeration refuses 0.5 and takes 1.0 for 1.
            policy_state = PolicyState(trend, deviation, Supply(supply))  # type: ignore[arg-type]
            round_threshold(threshold)
        except (TypeError, ValueError) as error:
            raise ValueError(f"state is not that of an encoder: {error}") from None
        if residual.shape != (numel,) or str(residual.dtype) != dtype:
            raise ValueError(
                f"state is of {residual.dtype}{list(residual.shape)}, "
                f"this encoder of {dtype}[{numel}]"
            )
        if not (math.isfinite(trend) and math.isfinite(deviation)):
            raise ValueError(f"state has course {(trend, deviation, int(supply))}, must be finite")
        # A sum takes no memory; that of finite values may be too large, too.
        with np.errstate(all="ignore"):
            is_finite = math.isfinite(residual.sum())
        bad = np.zeros(0) if is_finite else np.flatnonzero(~np.isfinite(residual))
        if bad.size:
            raise ValueError(
                f"state has a residual of which {bad.size} elements are not finite, the first at index {bad[0]}: "
                "set them to 0, or load another checkpoint"
            )
        residual = np.ascontiguousarray(residual)
        return EncoderState(residual, threshold, step, changed_at, policy_state)


def _plain(value: Any) -> Any:
    """Return the number in an array without dimensions, as which np.savez keeps it; everything else as it is."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
