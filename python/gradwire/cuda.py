"""The encoder on a CUDA device: its state is in device memory, so that no step waits for the host."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .arrays import cuda_core, stream_of
from .codec import (
    Encoder,
    EncoderStats,
    ThresholdRule,
    checked_threshold,
    continued,
    dense_dtype,
    shakeup_threshold,
)
from .partition import Partition
from .policy import (
    AdaptiveThreshold,
    FixedThreshold,
    PolicyState,
    ResidualClip,
    ShakeUp,
    StepThreshold,
    Supply,
    TargetBytes,
    TargetDensity,
    ThresholdPolicy,
    begin,
    rounding_point_of,
)
from .state import EncoderState

if TYPE_CHECKING:
    from ._cuda import CudaMessage, DeviceArray

__all__ = ["CudaEncoder"]

# The number of each Rule in csrc/cuda/policy.h, and the fields of its policy that have the same names there.
_RULES: dict[type, tuple[int, tuple[str, ...]]] = {
    FixedThreshold: (0, ()),
    AdaptiveThreshold: (1, ("minimum", "density_min", "density_max", "decay")),
    StepThreshold: (2, ("minimum", "step", "trigger", "delay")),
    TargetDensity: (3, ("minimum", "density")),
}


class CudaEncoder(Encoder, device="cuda"):
    """An encoder whose residual is in device memory, created by ``Encoder(..., device="cuda")``.

    It differs from an encoder on the CPU in three ways: ``encode`` only enqueues work, so NaN and infinity are reported
    when the message is first read; ``threshold``, ``step`` and ``stats`` wait for the device; and the policy must be a
    policy of gradwire, which runs on the device.
    """

    _devices = re.compile(r"cuda(:\d+)?")

    def _allocate(self) -> None:
        self._number = int(str(self.device).partition(":")[2] or 0)
        self._lent: Any = None  # torch's tensor
        words = _policy_words(self._rule.policy, self.shakeup, self.clip)
        threshold, policy_state = begin(self._rule.policy)
        self._device_core = cuda_core().Encoder(
            self._number,
            self.numel,
            self.dtype == "float64",
            words,
            threshold,
            *policy_state,
            self.keeps_residual,
        )

    @property
    def residual(self) -> Any:
        """The part not sent yet: float32[numel] or float64[numel] on the device, always the same memory.

        ``torch.as_tensor(encoder.residual, device="cuda")``, ``cupy.asarray`` and ``jax.dlpack.from_dlpack`` use the
        memory without a copy.

        Raises:
            RuntimeError: as on the CPU.
        """
        if not self.has_residual:
            return super().residual  # raises
        if self._lent is not None:
            return self._lent
        residual: DeviceArray = self._device_core.residual
        return residual

    @property
    def has_residual(self) -> bool:
        """Whether there is memory for a residual now."""
        return self.keeps_residual or self._lent is not None

    def make_residual(self) -> None:
        """Take memory of torch for a residual of zeros, unless there is a residual.

        Between steps it is torch's again: a backward pass uses it for other things.
        """
        if self.has_residual:
            return
        torch = sys.modules["torch"]
        dtype = getattr(torch, self.dtype)
        lent = torch.zeros(self.numel, dtype=dtype, device=f"cuda:{self._number}")
        self._device_core.lend_residual(lent)
        self._lent = lent

    def drop_residual(self) -> None:
        """Give the memory back, after all work that is enqueued on the current stream."""
        if self._lent is not None:
            self._device_core.lend_residual(None)
            self._lent = None

    @property
    def device_number(self) -> int:
        """Number of the CUDA device."""
        return self._number

    @property
    def threshold(self) -> float:
        """The policy's threshold for the next step; waits for the device."""
        return float(self._state()["threshold"])

    @property
    def step(self) -> int:
        """The number of the next message; waits for the device."""
        return int(self._state()["step"])

    @property
    def stats(self) -> EncoderStats:
        """The totals so far; waits for the device."""
        state = self._state()
        return EncoderStats(*(state[field.name] for field in fields(EncoderStats)))

    @property
    def message_bytes_max(self) -> int:
        """The least size of ``out`` in bytes: the ceiling of a message, in whole vectors of 16."""
        return int(self._device_core.capacity)

    def encode(  # type: ignore[override]  # on a device the caller computes a difference itself
        self,
        update: Any = None,
        *,
        dense: bool | Literal["bfloat16"] = False,
        parts: Partition | int | None = None,
        max_bytes: int | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Add ``update`` to the residual and enqueue the encoding. Never waits for the device.

        Args:
            update: array of float32, float16 or bfloat16 (float64 too if the residual is float64) on this device,
                C-contiguous, of any shape; or a list or tuple of such arrays that together have ``numel`` elements. Not
                modified, not copied. None for an update that the caller has already added to ``residual``.
            dense: as on the CPU.
            parts: as on the CPU, for a list of messages. The first encode in more parts than before allocates memory.
            max_bytes: as on the CPU, with the same bytes. It does not reduce the least size of ``out``.
            out: array of uint8 on this device for the message: at least ``message_bytes_max`` bytes (for a dense
                message 48 and the values, in whole vectors of 16), aligned to 16. The first 48 bytes are the header,
                whose bytes 40 to 47 are the number of bytes that follow. A later encode with the same ``out``
                overwrites the message. With ``parts`` a list of arrays, one for each message. None for memory owned by
                the message, with a copy in pinned host memory.
            stream: see ``gradwire.arrays.stream_of``. The caller must order calls on different streams. Inside a graph
                capture ``out`` must have been used in an encode before the capture began.

        Returns:
            The message, or the list of the parts' messages. Reading its bytes or fields waits for the device, and
            raises ``NonFiniteUpdate`` if the update was not finite; then nothing was sent and the step did not advance.

        Raises:
            TypeError: the residual cannot represent the dtype of the update exactly.
            ValueError: wrong size, device or layout, memory shared with the residual, a partition of another number of
                elements, or ``max_bytes`` as on the CPU.
            CudaError: a CUDA call failed.
            RuntimeError: another thread uses this encoder.
        """
        partition = None if parts is None else self._partition(parts)
        outs = [out] if out is not None and partition is None else out
        if partition is not None and outs is not None and len(outs) != len(partition):
            raise ValueError(f"out has {len(outs)} arrays for {len(partition)} parts")
        budget, most = self._rule.budget(max_bytes, dense, self.numel, partition)
        number = stream_of(stream, outs if update is None else update, self._number)
        messages: list[CudaMessage] = []
        try:
            self._device_core.encode(
                update,
                self.key,
                self.on_nonfinite == "skip",
                (dense_dtype(dense) or "own") if dense else "",
                partition,
                budget,
                most,
                outs,
                number,
                messages,
            )
        except BaseException:
            # As on the CPU. A message that the device has refused is empty.
            self._put_back(messages, partition, number)
            raise
        return messages[0] if partition is None else messages

    def check_update(self, update: Any) -> None:
        """Raise as ``encode`` does where an update does not fit; take nothing."""
        self._device_core.check_update(update, stream_of(None, update, self._number))

    def set_policy(
        self, policy: ThresholdPolicy | TargetBytes, threshold: float | None = None
    ) -> None:
        """Change the policy from the next step on, as on the CPU; waits for the device.

        Raises:
            ValueError: as on the CPU, or the policy is not one of gradwire's; nothing has changed.
            TypeError: ``threshold`` is no number; nothing has changed.
        """
        rule = ThresholdRule.of(policy, self.numel, self.shakeup)
        words = _policy_words(rule.policy, self.shakeup, self.clip)
        if threshold is not None:
            threshold = checked_threshold(threshold, self.shakeup)
        state = self._state()
        learned = state["threshold"] if state["trend"] >= 0.0 else None
        first, policy_state = continued(rule, threshold, learned)
        self._device_core.set_policy(words)
        self.policy = policy
        self._rule = rule
        self._device_core.set_state(first, state["step"], state["step"], *policy_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as on the CPU, with host arrays: it can be loaded on either side. Waits for the device."""
        state = self._state()
        return EncoderState(
            self._residual_on_host(),
            state["threshold"],
            state["step"],
            state["changed_at"],
            PolicyState(state["trend"], state["deviation"], Supply(state["supply"])),
        ).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, bit for bit. Waits for the device.

        Raises:
            ValueError: the state has another format, size or dtype; the encoder is unchanged.
        """
        checked = EncoderState.of(state, self.numel, self.dtype)
        self.make_residual()
        self._device_core.residual_from_host(checked.residual)
        self._device_core.set_state(
            checked.threshold, checked.step, checked.changed_at, *checked.policy_state
        )

    def __repr__(self) -> str:
        return f"<gradwire.Encoder {self.dtype}[{self.numel}] key={self.key} device={self.device}>"

    def _residual_on_host(self) -> NDArray[Any]:
        if not self.has_residual:
            return np.zeros(self.numel, self.dtype)
        residual: NDArray[Any] = self._device_core.residual_to_host()
        return residual

    def _state(self) -> dict[str, Any]:
        return dict(self._device_core.state())


def _policy_words(
    policy: ThresholdPolicy, shakeup: ShakeUp | None, clip: ResidualClip | None
) -> dict[str, Any]:
    """Return the fields of Policy in csrc/cuda/policy.h."""
    known = next((rule for kind, rule in _RULES.items() if isinstance(policy, kind)), None)
    if known is None:
        raise ValueError(
            f"a policy on a device must be one of gradwire's, which run there, not {policy!r}"
        )
    rule, names = known
    words: dict[str, Any] = {"rule": rule, "reach": rounding_point_of(policy)}
    if isinstance(policy, FixedThreshold):
        words["minimum"] = policy.value
    words |= {name: getattr(policy, name) for name in names}
    if shakeup is not None:
        # No threshold on the device falls below this one, so check here that it can be rounded.
        shakeup_threshold(words["minimum"], shakeup)
        words |= {"shakeup_every": shakeup.every, "shakeup_divisor": shakeup.divisor}
    if clip is not None:
        words |= {"clip_every": clip.every, "clip_limit": clip.limit}
    return words
