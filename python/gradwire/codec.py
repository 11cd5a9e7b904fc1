"""The encoder: a residual, a threshold that follows its policy, and the messages that come of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from . import _core
from .arrays import cuda_problem
from .message import Message, apply
from .policy import (
    AdaptiveThreshold,
    FixedThreshold,
    ResidualClip,
    ShakeUp,
    Tail,
    ThresholdPolicy,
    round_threshold,
)
from .state import EncoderState, check_range

__all__ = ["Encoder", "EncoderStats", "backends"]

_MAX_NUMEL = 2**48
_STEP_MASK = 2**32 - 1
_FLAG_SHAKEUP = 1


@dataclass(frozen=True)
class EncoderStats:
    """Totals since the encoder was made or its state was loaded.

    Attributes:
        messages: messages encoded.
        message_bytes: their bytes.
        sent_count: changed elements in them (dense: all elements).
        nonfinite_count: elements left out because NaN, infinity or an overflowing sum was met.
        clipped_count: elements that clipping cut.
        clipped_sum: signed sum of what clipping removed.
    """

    messages: int = 0
    message_bytes: int = 0
    sent_count: int = 0
    nonfinite_count: int = 0
    clipped_count: int = 0
    clipped_sum: float = 0.0


class Encoder:
    """Accumulates updates in a residual and encodes the part that matters now.

    ``encode(update)`` adds the update to the residual, takes plus or minus one threshold out of every element whose
    magnitude reaches it, and returns those elements as a message. What was not sent stays in the residual: nothing is
    lost, only delayed.

    One encoder serves one group of parameters and one thread at a time.

    Args:
        numel: elements of the update, 0 to 2^48.
        threshold: policy of the threshold, or a number for a fixed one.
        shakeup: periodic messages with a smaller threshold, or None.
        clip: periodic clipping of the residual, or None.
        dtype: "float32" or "float64", of the residual.
        device: "cpu", or "cuda" or "cuda:<number>": then the encoder is a ``gradwire.cuda.CudaEncoder``, which works
            on arrays on that device.
        key: index of the group, carried by every message, 0 to 2^32 - 1.
        on_nonfinite: what NaN and infinity in an update do: "raise" (nothing is sent, the finite part stays in the
            residual) or "skip" (the message goes out without them). Either way they never enter the residual.
        threads: most threads for one encode, and for adding messages where an `Exchange` does it; bytes and parameters
            are the same at every number.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument of the wrong kind.
        BackendUnavailable: the device, or the instruction set that GRADWIRE_ISA names, is not usable here.
        MemoryError: the residual does not fit.

    Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.

    >>> import numpy as np, gradwire as gw
    >>> encoder = gw.Encoder(4, threshold=gw.FixedThreshold(1.0))
    >>> message = encoder.encode(np.array([0.5, -1.5, 1.0, 0.0], np.float32))
    >>> gw.decode(message).tolist(), encoder.residual.tolist()
    ([0.0, -1.0, 1.0, 0.0], [0.5, -0.5, 0.0, 0.0])
    """

    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        """Let ``inspect`` and ``help`` show the parameters of ``__init__``: those of ``__new__`` are any."""
        cls.__signature__ = _parameters_of(cls.__init__)

    def __new__(cls, *arguments: Any, **options: Any) -> Encoder:
        """Make an encoder of the device's kind."""
        device = options.get("device", arguments[5] if len(arguments) > 5 else "cpu")
        if cls is Encoder and device != "cpu":
            from .cuda import CudaEncoder

            return object.__new__(CudaEncoder)
        return object.__new__(cls)

    def __init__(
        self,
        numel: int,
        threshold: ThresholdPolicy | float | None = None,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        dtype: Any = "float32",
        device: str = "cpu",
        key: int = 0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        threads: int = 1,
    ) -> None:
        self._describe(numel, threshold, shakeup, clip, dtype, device, key, on_nonfinite, threads)
        try:
            core = _core.Encoder(numel, self.dtype == "float64", threads)
        except MemoryError:
            nbytes = numel * np.dtype(self.dtype).itemsize
            raise MemoryError(
                f"a residual of {numel} {self.dtype} elements takes {nbytes} bytes, which this machine does not have"
            ) from None
        self._begin(core)

    def _begin(self, core: _core.Encoder) -> None:
        """Begin at step 0 with what holds the residual."""
        self._core = core
        self._residual: NDArray[Any] = core.residual
        self._step = 0
        self._changed_at = 0
        self._sample_density = self.policy.sample_density or 0.0
        self._set_threshold(self.policy.initial)
        # Running totals, of which a frozen EncoderStats is made when somebody asks.
        self._messages = self._message_bytes = self._sent_count = 0
        self._nonfinite_count = self._clipped_count = 0
        self._clipped_sum = 0.0

    def _describe(
        self,
        numel: int,
        threshold: ThresholdPolicy | float | None,
        shakeup: ShakeUp | None,
        clip: ResidualClip | None,
        dtype: Any,
        device: str,
        key: int,
        on_nonfinite: Literal["raise", "skip"],
        threads: int,
    ) -> None:
        """Check the arguments and keep them."""
        if threshold is None:
            threshold = AdaptiveThreshold()
        elif isinstance(threshold, (int, float, np.integer, np.floating)):
            threshold = FixedThreshold(float(threshold))
        _check_kind("threshold", threshold, "next_threshold", "a threshold policy or a number")
        if shakeup is not None:
            _check_kind("shakeup", shakeup, "divisor", "a ShakeUp")
        if clip is not None:
            _check_kind("clip", clip, "limit", "a ResidualClip")
        check_range("numel", numel, 0, _MAX_NUMEL)
        check_range("key", key, 0, 2**32 - 1)
        check_range("threads", threads, 1, 1024)
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite must be "raise" or "skip", got {on_nonfinite!r}')
        self.numel = numel
        self.key = key
        self.dtype = _residual_dtype(dtype)
        self.device = device
        self.policy = threshold
        self.shakeup = shakeup
        self.clip = clip
        self.on_nonfinite = on_nonfinite
        self.threads = threads
        self._skip = on_nonfinite == "skip"

    @property
    def residual(self) -> NDArray[Any]:
        """What was not sent yet: a writable view of float32[numel] or float64[numel], the same memory for life."""
        return self._residual

    @property
    def threshold(self) -> float:
        """The policy's threshold for the next step, not yet rounded to bfloat16."""
        return self._threshold

    @property
    def step(self) -> int:
        """Number of the next message."""
        return self._step

    @property
    def _wire_step(self) -> int:
        """The step's number as messages carry it."""
        return self._step & _STEP_MASK

    @property
    def stats(self) -> EncoderStats:
        """Totals so far."""
        return EncoderStats(
            self._messages,
            self._message_bytes,
            self._sent_count,
            self._nonfinite_count,
            self._clipped_count,
            self._clipped_sum,
        )

    def encode(self, update: Any = None, *, dense: bool | Literal["bfloat16"] = False) -> Message:
        """Add ``update`` to the residual and return what is sent of it now.

        Args:
            update: array of float32, float16 or bfloat16 (float64 too if the residual is float64), C-contiguous, on the
                CPU, of any shape; or a list or tuple of such arrays that together have ``numel`` elements. Not
                modified, not copied. None: the caller has already added it to ``residual``, a third of the traffic.
            dense: True sends everything that is left as a dense message instead, in the residual's dtype; "bfloat16"
                does in bfloat16, and what the rounding leaves stays in the residual.

        Returns:
            The message. It owns its bytes.

        Raises:
            NonFiniteUpdate: see ``on_nonfinite``; ``step`` does not advance and nothing was sent.
            TypeError: a dtype that the residual cannot take exactly.
            ValueError: wrong size, device or layout, memory shared with the residual, or another ``dense``.
            RuntimeError: another thread is in this encoder.
        """
        if dense:
            return self._encode_dense(update, dense)
        step = self._step
        rounded = self._rounded
        shakeup = self.shakeup if self.shakeup is not None and self.shakeup.is_due(step) else None
        message, skipped, tail = self._core.encode(
            update,
            round_threshold(self._threshold / shakeup.divisor) if shakeup else rounded,
            _FLAG_SHAKEUP if shakeup else 0,
            self.key,
            self._wire_step,
            self._skip,
            self._sample_density,
        )
        if shakeup is None:
            try:
                self._follow_policy(message.density, tail)
            except BaseException:
                # A policy that fails must not cost an update: what was taken goes back.
                apply(message, self._residual)
                raise
        if self.clip is not None and self.clip.is_due(step):
            count, removed = self._core.clip(self.clip.limit * rounded)
            self._clipped_count += count
            self._clipped_sum += removed
        self._finish(message, skipped)
        return message

    def hold_difference(self, now: Any, before: Any) -> None:
        """Let the residual be what some arrays differ from others: ``residual = now - before``.

        For parameters that hold the residual, before ``encode()`` without an update.

        Args:
            now: float32 or float64 arrays as ``apply`` takes them; not modified.
            before: of the same sizes and dtypes; not modified.

        Raises:
            TypeError, ValueError: they are no such arrays, not alike, or share memory with the residual.
            RuntimeError: another thread is in this encoder.
        """
        self._core.hold_difference(now, before)

    def set_policy(self, policy: ThresholdPolicy, threshold: float | None = None) -> None:
        """Follow another policy from the next step on; the threshold stays as it is unless one is given.

        Raises:
            ValueError: ``threshold`` is not a threshold.
            TypeError: ``policy`` is none.
        """
        _check_kind("policy", policy, "next_threshold", "a threshold policy")
        if threshold is not None:
            self._set_threshold(threshold)
        self.policy = policy
        self._sample_density = policy.sample_density or 0.0
        self._changed_at = self._step

    def flush(self, dtype: Literal["bfloat16"] | None = None) -> Message:
        """Return everything that is left as one dense message; the residual keeps only what rounding leaves.

        Raises:
            NonFiniteUpdate: as ``encode``.
            ValueError: ``dtype`` is not "bfloat16".
        """
        return self._encode_dense(None, True if dtype is None else dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that the next message depends on, as host arrays and plain numbers.

        The policies are not part of it: they hold no state.
        """
        return EncoderState(
            self._residual.copy(), self._threshold, self._step, self._changed_at
        ).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, bit for bit; the residual is copied into the encoder's own memory.

        Raises:
            ValueError: the state is of another format, size or dtype; nothing has changed then.
        """
        found = EncoderState.of(state, self.numel, self.dtype)
        self._residual[...] = found.residual
        self._continue_from(found)

    def __repr__(self) -> str:
        return (
            f"<gradwire.{type(self).__name__} {self.dtype}[{self.numel}] key={self.key} step={self._step} "
            f"threshold={self._threshold:.4g}>"
        )

    def _continue_from(self, state: EncoderState) -> None:
        """Take over all of a state but the residual."""
        self._set_threshold(state.threshold)
        self._step = state.step
        self._changed_at = state.changed_at

    def _set_threshold(self, threshold: float) -> None:
        self._rounded = round_threshold(threshold)  # refuses first
        self._threshold = threshold

    def _follow_policy(
        self, density: float, tail: tuple[float, float, float, float, float] | None
    ) -> None:
        before = self._threshold
        after = self.policy.next_threshold(
            before,
            density,
            self._step + 1 - self._changed_at,
            None if tail is None else Tail(*tail),
        )
        if after != before:
            self._set_threshold(after)
            self._changed_at = self._step + 1

    def _encode_dense(self, update: Any, dense: bool | str) -> Message:
        message, skipped = self._core.encode_dense(
            update,
            dense_dtype(dense),
            self.key,
            self._wire_step,
            self._skip,
        )
        self._finish(message, skipped)
        return message

    def _finish(self, message: Message, skipped: int) -> None:
        self._step += 1
        self._messages += 1
        self._message_bytes += message.nbytes
        self._sent_count += message.count
        self._nonfinite_count += skipped


def _parameters_of(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that a method has for its callers."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


Encoder.__signature__ = _parameters_of(Encoder.__init__)


def dense_dtype(dense: bool | str) -> str:
    """Return what a dense message rounds to, as the core names it: "" where it keeps the residual's dtype.

    Raises:
        ValueError: ``dense`` is neither True nor "bfloat16".
    """
    if isinstance(dense, (bool, np.bool_)):
        return ""
    if dense == "bfloat16":
        return "bfloat16"
    raise ValueError(
        f'a dense message has the dtype of the residual (dense=True) or "bfloat16", got {dense!r}'
    )


def backends() -> list[str]:
    """Return the names of the backends that this machine can use, slowest first.

    >>> "scalar" in backends()
    True
    """
    return [*_core.usable_isas(), *([] if cuda_problem() else ["cuda"])]


def _check_kind(name: str, value: Any, attribute: str, what: str) -> None:
    if isinstance(value, type) or not hasattr(value, attribute):
        raise TypeError(f"{name} must be {what}, got {value!r}")


def _residual_dtype(dtype: Any) -> Literal["float32", "float64"]:
    name = np.dtype(dtype).name
    if name == "float32":
        return "float32"
    if name == "float64":
        return "float64"
    raise ValueError(f'dtype of the residual must be "float32" or "float64", got {name!r}')
