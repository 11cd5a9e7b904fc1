"""The encoder on a CUDA device: residual, threshold and step live there, so that no step waits for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from .arrays import cuda_core, stream_of
from .codec import Encoder, EncoderStats, dense_dtype
from .policy import (
    AdaptiveThreshold,
    FixedThreshold,
    ResidualClip,
    ShakeUp,
    StepThreshold,
    TargetDensity,
    ThresholdPolicy,
    round_threshold,
)
from .state import EncoderState

if TYPE_CHECKING:
    from ._cuda import CudaMessage, DeviceArray

__all__ = ["CudaEncoder"]

# csrc/cuda/policy.h: the number of each Rule, and those fields of its policy that have the same names there.
_RULES: dict[type, tuple[int, tuple[str, ...]]] = {
    FixedThreshold: (0, ()),
    AdaptiveThreshold: (1, ("minimum", "density_min", "density_max", "decay")),
    StepThreshold: (2, ("minimum", "step", "trigger", "delay")),
    TargetDensity: (3, ("minimum", "density")),
}


class CudaEncoder(Encoder):
    """An encoder whose residual is in a device's memory; made by ``Encoder(..., device="cuda")``.

    What differs from one on the CPU: ``encode`` only enqueues work, so NaN and infinity are reported when the message
    is first looked at; ``threshold``, ``step`` and ``stats`` wait for the device; the policy is one of gradwire's,
    since it runs there.
    """

    def __init__(
        self,
        numel: int,
        threshold: ThresholdPolicy | float | None = None,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        dtype: Any = "float32",
        device: str = "cuda",
        key: int = 0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        threads: int = 1,
    ) -> None:
        self._describe(numel, threshold, shakeup, clip, dtype, device, key, on_nonfinite, threads)
        self._number = device_number(device)
        self._device_core = cuda_core().Encoder(
            self._number,
            numel,
            self.dtype == "float64",
            _policy_words(self.policy, shakeup, clip),
            self.policy.initial,
        )

    @property
    def residual(self) -> Any:
        """What was not sent yet: float32[numel] or float64[numel] on the device, the same memory for life.

        ``torch.as_tensor(encoder.residual, device="cuda")``, ``cupy.asarray`` and ``jax.dlpack.from_dlpack`` take it
        without a copy.
        """
        residual: DeviceArray = self._device_core.residual
        return residual

    @property
    def threshold(self) -> float:
        """The policy's threshold for the next step; waits for the device."""
        return float(self._state()["threshold"])

    @property
    def step(self) -> int:
        """Number of the next message; waits for the device."""
        return int(self._state()["step"])

    @property
    def stats(self) -> EncoderStats:
        """Totals so far; waits for the device."""
        state = self._state()
        for name in ("threshold", "step", "changed_at"):
            del state[name]
        return EncoderStats(**state)

    @property
    def message_bytes_max(self) -> int:
        """Bytes that ``out`` must have: the ceiling of a message, in whole vectors of 16."""
        return int(self._device_core.capacity)

    def encode(  # type: ignore[override]  # what it returns answers to the same names as a Message
        self,
        update: Any = None,
        *,
        dense: bool | Literal["bfloat16"] = False,
        out: Any = None,
        stream: Any = None,
    ) -> CudaMessage:
        """Add ``update`` to the residual and enqueue what is sent of it now. Never waits for the device.

        Args:
            update: array of float32, float16 or bfloat16 (float64 too if the residual is float64) on this device,
                C-contiguous, of any shape; or a list or tuple of such arrays that together have ``numel`` elements. Not
                modified, not copied. None: the caller has already added it to ``residual``.
            dense: as on the CPU.
            out: array of uint8 on this device for the message, ``message_bytes_max`` bytes or more (dense: 48 and the
                values, in whole vectors of 16), beginning at a multiple of 16. Its first 48 bytes are the header, in
                which bytes 40 to 47 say how many follow. The caller's memory: a later encode with the same ``out``
                overwrites the message. None: memory of the message's own, with a copy in pinned host memory.
            stream: see ``gradwire.arrays.stream_of``. Calls on different streams must be put in order by the caller.
                Inside of a graph capture ``out`` must be memory that was passed before the capture began.

        Returns:
            The message. Its bytes and fields are there when the device is done; asking for them waits, and raises
            ``NonFiniteUpdate`` where the update was not finite (then nothing was sent and the step did not advance).

        Raises:
            TypeError: a dtype that the residual cannot take exactly.
            ValueError: wrong size, device or layout, or memory shared with the residual.
            CudaError: a CUDA call failed.
            RuntimeError: another thread is in this encoder.
        """
        message: CudaMessage = self._device_core.encode(
            update,
            self.key,
            self._skip,
            (dense_dtype(dense) or "own") if dense else "",
            out,
            stream_of(stream, out if update is None else update, self._number),
        )
        return message

    def flush(  # type: ignore[override]
        self, dtype: Literal["bfloat16"] | None = None
    ) -> CudaMessage:
        """Return everything that is left as one dense message; the residual keeps only what rounding leaves."""
        return self.encode(None, dense=True if dtype is None else dtype)

    def set_policy(self, policy: ThresholdPolicy, threshold: float | None = None) -> None:
        """Follow another policy from the next step on; waits for the device.

        Raises:
            ValueError: ``threshold`` is not a threshold, or the policy is not one of gradwire's.
        """
        words = _policy_words(policy, self.shakeup, self.clip)
        if threshold is not None:
            round_threshold(threshold)
        state = self._state()
        self._device_core.set_policy(words)
        self.policy = policy
        kept = state["threshold"] if threshold is None else threshold
        self._device_core.set_state(kept, state["step"], state["step"])

    def state_dict(self) -> dict[str, Any]:
        """Return what an encoder on the CPU would, as host arrays: either loads the other's. Waits for the device."""
        state = self._state()
        return EncoderState(
            self._device_core.residual_to_host(),
            state["threshold"],
            state["step"],
            state["changed_at"],
        ).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, bit for bit. Waits for the device.

        Raises:
            ValueError: the state is of another format, size or dtype; nothing has changed then.
        """
        found = EncoderState.of(state, self.numel, self.dtype)
        self._device_core.residual_from_host(found.residual)
        self._device_core.set_state(found.threshold, found.step, found.changed_at)

    def __repr__(self) -> str:
        return f"<gradwire.Encoder {self.dtype}[{self.numel}] key={self.key} device={self.device}>"

    def _state(self) -> dict[str, Any]:
        return dict(self._device_core.state())


def device_number(device: str) -> int:
    """Return 1 for "cuda:1" and 0 for "cuda".

    Raises:
        ValueError: it is neither.
    """
    name, colon, number = str(device).partition(":")
    if name != "cuda" or (colon and not number.isdigit()):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:<number>", got {device!r}')
    return int(number) if number else 0


def _policy_words(
    policy: ThresholdPolicy, shakeup: ShakeUp | None, clip: ResidualClip | None
) -> dict[str, Any]:
    """Return the numbers of csrc/cuda/policy.h's Policy."""
    known = next((one for kind, one in _RULES.items() if isinstance(policy, kind)), None)
    if known is None:
        raise ValueError(
            f"a policy on a device must be one of gradwire's, which run there, not {policy!r}"
        )
    rule, names = known
    words: dict[str, Any] = {"rule": rule, "minimum": policy.initial}  # a fixed one stays there
    words |= {name: getattr(policy, name) for name in names}
    if shakeup is not None:
        # Never below this, so that no step on the device can be without a threshold.
        round_threshold(words["minimum"] / shakeup.divisor)
        words |= {"shakeup_every": shakeup.every, "shakeup_divisor": shakeup.divisor}
    if clip is not None:
        words |= {"clip_every": clip.every, "clip_limit": clip.limit}
    return words
