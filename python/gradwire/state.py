"""States: what checkpoints hold, and how one that does not fit is refused before anything changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .policy import round_threshold

__all__ = ["EncoderState", "check_format", "check_range"]

_ENCODER_FORMAT = 1


def check_format(state: dict[str, Any], known: int, what: str = "state") -> None:
    """Refuse a state of another format.

    Args:
        state: as ``state_dict`` returned it, here or elsewhere.
        known: the format that is read here.
        what: it is, for the message.

    Raises:
        ValueError: it has another one, or none.
    """
    if state.get("format") != known:
        raise ValueError(f"{what} has format {state.get('format')!r}, this gradwire reads {known}")


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse what is no int from ``least`` to ``most``.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least} to {most}, got {value}")


@dataclass(frozen=True)
class EncoderState:
    """Everything that an encoder's next message depends on, wherever the encoder is.

    Attributes:
        residual: float32[numel] or float64[numel], contiguous, in host memory.
        threshold: the policy's, not yet rounded.
        step: number of the next message.
        changed_at: step at which the threshold last changed.
    """

    residual: NDArray[Any]
    threshold: float
    step: int
    changed_at: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as host arrays and plain numbers."""
        return {
            "format": _ENCODER_FORMAT,
            "numel": self.residual.size,
            "dtype": str(self.residual.dtype),
            "residual": self.residual,
            "threshold": self.threshold,
            "step": self.step,
            "changed_at": self.changed_at,
        }

    @staticmethod
    def of(state: dict[str, Any], numel: int, dtype: str) -> EncoderState:
        """Return the state that a dict holds, checked to be of an encoder like this.

        Raises:
            ValueError: it is of another format, size or dtype, or no encoder's.
        """
        check_format(state, _ENCODER_FORMAT)
        missing = {"residual", "threshold", "step", "changed_at"} - state.keys()
        if missing:
            raise ValueError(f"state lacks {', '.join(sorted(missing))}: it is no encoder's")
        residual = np.asarray(state["residual"])
        if residual.shape != (numel,) or str(residual.dtype) != dtype:
            raise ValueError(
                f"state is of {residual.dtype}{list(residual.shape)}, "
                f"this encoder of {dtype}[{numel}]"
            )
        found = EncoderState(
            np.ascontiguousarray(residual),
            float(state["threshold"]),
            int(state["step"]),
            int(state["changed_at"]),
        )
        round_threshold(found.threshold)
        check_range("step", found.step, 0, 2**63)
        return found
