"""An encoder of what another's message has left."""

from __future__ import annotations

from typing import Any

import numpy as np

from .codec import Encoder
from .message import Message
from .policy import ThresholdPolicy
from .state import EncoderState

__all__ = ["Refiner"]


# The largest bfloat16: no element of a residual gets there.
_UNREACHED = float.fromhex("0x1.fep127")


class Refiner(Encoder):
    """Encodes once more what the message of another encoder has left, with a threshold of its own.

    An element moves by one quantum per message. With a second, smaller one it moves by either or by both. Both encoders
    take from one residual, the other's, so nothing has to be carried from one to the other, and nothing is lost between
    them: ``residual`` is the same array.

    Args:
        coarse: the other, in host memory; ``encode`` it first. One thread at a time serves both.
        threshold: policy of the threshold, or a number for a fixed one.
        key: index of the group, another than that encoder's.

    Raises:
        ValueError: an argument is out of range, or the other encoder is not in host memory.

    >>> import numpy as np, gradwire as gw
    >>> coarse = gw.Encoder(3, threshold=1.0)
    >>> fine = gw.Refiner(coarse, 0.25, key=1)
    >>> message = coarse.encode(np.array([1.3125, 0.375, 0.125], np.float32))
    >>> gw.decode(message).tolist(), gw.decode(fine.encode()).tolist(), coarse.residual.tolist()
    ([1.0, 0.0, 0.0], [0.25, 0.25, 0.0], [0.0625, 0.125, 0.125])
    """

    def __init__(
        self, coarse: Encoder, threshold: ThresholdPolicy | float | None = None, *, key: int
    ) -> None:
        if coarse.device != "cpu":
            raise ValueError(
                f"what a message has left can only be encoded again in host memory, not on {coarse.device}"
            )
        self.coarse = coarse
        self._describe(
            coarse.numel,
            threshold,
            None,
            None,
            coarse.dtype,
            "cpu",
            key,
            coarse.on_nonfinite,
            coarse.threads,
        )
        self._begin(coarse._core)
        self._residual = coarse.residual

    def rest(self) -> Message:
        """Return an empty message in the place of this step's; the residual stays as it is.

        Raises:
            NonFiniteUpdate: as ``encode``.
        """
        message, skipped, _ = self._core.encode(
            None, _UNREACHED, 0, self.key, self._wire_step, self._skip, 0.0
        )
        self._finish(message, skipped)
        return message

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the residual, which is in the other encoder's state."""
        empty = np.empty(0, self.dtype)
        return EncoderState(empty, self._threshold, self._step, self._changed_at).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; the residual stays as it is.

        Raises:
            ValueError: the state is of another format or dtype, or an encoder's with a residual of its own.
        """
        self._continue_from(EncoderState.of(state, 0, self.dtype))
