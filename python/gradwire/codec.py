"""The encoder on the CPU: a residual, a threshold that follows its policy, and the messages made of them."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, overload

import numpy as np
from numpy.typing import NDArray

from . import _core
from .arrays import cuda_problem
from .errors import NonFiniteUpdate
from .message import Message, apply
from .partition import Partition
from .policy import (
    FIRST_TREND,
    FixedThreshold,
    PolicyState,
    ResidualClip,
    SampledQuantiles,
    ShakeUp,
    TargetBytes,
    TargetDensity,
    ThresholdPolicy,
    as_number,
    begin,
    default_policy,
    follow,
    learned_threshold,
    most_changed,
    round_threshold,
    rounding_point_of,
    sample_turn,
    sampled_density,
    whole,
)
from .state import EncoderState, check_flag, check_range

__all__ = ["Encoder", "EncoderStats", "backends"]

_MAX_NUMEL = 2**48
# A larger limit would not fit into the core's integer, and no message is as large.
_MAX_BYTES = 2**63
_STEP_MASK = 2**32 - 1
_FLAG_SHAKEUP = 1


@dataclass(frozen=True)
class EncoderStats:
    """Totals since the encoder was created.

    Attributes:
        messages: encoded messages.
        message_bytes: bytes of these messages.
        sent_count: changed elements in these messages; all elements of a dense message.
        nonfinite_count: elements left out of these messages because of NaN, infinity or an overflowing sum, with
            ``on_nonfinite="skip"``. Where such an update raises, the `NonFiniteUpdate` has their number.
        clipped_count: elements that clipping changed.
        clipped_sum: signed sum of the amounts that clipping removed.
    """

    messages: int = 0
    message_bytes: int = 0
    sent_count: int = 0
    nonfinite_count: int = 0
    clipped_count: int = 0
    clipped_sum: float = 0.0


@dataclass(frozen=True)
class ThresholdRule:
    """The rule that thresholds follow: a policy, or the policy that a budget of bytes makes for ``numel`` elements.

    Attributes:
        policy: the policy that chooses the thresholds.
        rounding_point: an element is sent if its magnitude reaches this share of the threshold.
        max_bytes: the most bytes of a step, or None.
    """

    policy: ThresholdPolicy
    rounding_point: float
    max_bytes: int | None = None

    @staticmethod
    def of(
        policy: ThresholdPolicy | TargetBytes, numel: int, shakeup: ShakeUp | None = None
    ) -> ThresholdRule:
        """Return the rule of a policy for ``numel`` elements.

        Raises:
            ValueError: the budget is too small, or a shake-up's threshold could be below bfloat16's.
        """
        if isinstance(policy, TargetBytes):
            density = policy.density_of(numel)
            rule = ThresholdRule(density, rounding_point_of(density), policy.max_bytes_per_step)
        else:
            rule = ThresholdRule(policy, rounding_point_of(policy))
        followed = rule.policy
        name = "value" if isinstance(followed, FixedThreshold) else "minimum"
        least = getattr(followed, name, 0.0)
        if shakeup is not None and least:
            shakeup_threshold(least, shakeup)
        return rule

    def most_changed(self, numel: int) -> int:
        """Return the most changed elements of a message without a budget; a shake-up may have more."""
        return self.policy.most_changed(numel) if isinstance(self.policy, TargetDensity) else numel

    def budget(
        self, max_bytes: int | None, dense: bool | str, numel: int, partition: Partition | None
    ) -> tuple[int, int]:
        """Return the most bytes of a step, and the most changed elements of a step that needs more; 0: no limit.

        Raises:
            ValueError: another ``dense``, or ``max_bytes`` with ``dense`` or for less than one element.
        """
        dense_dtype(dense)
        if dense and max_bytes is not None:
            raise ValueError("max_bytes is for messages of a threshold, not for dense ones")
        max_bytes = None if max_bytes is None else whole("max_bytes", max_bytes, least=1)
        limits = [limit for limit in (max_bytes, self.max_bytes) if limit is not None]
        if dense or not limits:
            return 0, numel
        parts = 1 if partition is None else partition.parts
        limit = min(*limits, _MAX_BYTES)
        return limit, most_changed(limit, numel, parts)


class ThresholdMemory:
    """The threshold in use, and what its rule remembers from step to step."""

    def __init__(self, rule: ThresholdRule) -> None:
        threshold, self.policy_state = begin(rule.policy)
        # Step at which the threshold last changed, or at which the policy began.
        self.changed_at = 0
        self.set_threshold(threshold)

    def set_threshold(self, threshold: float) -> None:
        """Use another threshold.

        Raises:
            ValueError: not a threshold; nothing has changed.
        """
        self.rounded = round_threshold(threshold)
        self.threshold = threshold

    def begin(self, rule: ThresholdRule, step: int, threshold: float | None) -> None:
        """Follow another rule from this step on, with this threshold or that of `continued`.

        Raises:
            ValueError: not a threshold; nothing has changed.
        """
        is_learned = self.policy_state.trend >= 0.0
        first, policy_state = continued(rule, threshold, self.threshold if is_learned else None)
        self.set_threshold(first)
        self.policy_state = policy_state
        self.changed_at = step

    def restore(self, state: EncoderState) -> None:
        """Continue from a checkpoint."""
        self.set_threshold(state.threshold)
        self.changed_at = state.changed_at
        self.policy_state = state.policy_state

    def sample(
        self,
        rule: ThresholdRule,
        sample: Callable[..., tuple[float, ...]],
        step: int,
        *,
        is_shakeup: bool,
    ) -> SampledQuantiles | None:
        """Sample the quantiles that the policy wants in this step, and learn the first threshold from them."""
        learns = self.policy_state.trend < 0.0
        age = step - self.changed_at
        density = sampled_density(rule.policy, age, self.policy_state)
        if not density or (is_shakeup and not learns):
            return None
        sampled = sample(self.rounded, rule.rounding_point, density, sample_turn(age))
        quantiles = SampledQuantiles(*sampled)
        if learns:
            self.set_threshold(learned_threshold(rule.policy, self.threshold, quantiles))
        return quantiles

    def follow(
        self, rule: ThresholdRule, density: float, step: int, quantiles: SampledQuantiles | None
    ) -> None:
        """Choose the threshold of the next step, after one in which this density reached the threshold."""
        age = step - self.changed_at
        after, self.policy_state = follow(
            rule.policy, self.threshold, density, age, quantiles, self.policy_state
        )
        if after != self.threshold:
            self.set_threshold(after)
            if not isinstance(rule.policy, TargetDensity):
                self.changed_at = step + 1


def continued(
    rule: ThresholdRule, given: float | None, learned: float | None
) -> tuple[float, PolicyState]:
    """Return threshold and memory of a rule that follows another.

    Args:
        rule: the new one.
        given: the threshold that the caller wants, or None.
        learned: the threshold in use, or None if it is still to be learned from the first update.
    """
    first, policy_state = begin(rule.policy)
    if given is None and not isinstance(rule.policy, FixedThreshold):
        given = learned  # better than one learned from a single update
    if given is None:
        return first, policy_state
    return given, policy_state._replace(trend=FIRST_TREND)


class Encoder:
    """Accumulate updates in a residual and encode the part that is large enough to send.

    ``encode(update)`` adds the update to the residual, subtracts plus or minus one threshold from every element whose
    magnitude reaches the threshold (with ``TargetDensity`` and ``TargetBytes`` 9/16 of the threshold), and returns
    these elements as a message. The rest stays in the residual for later messages, so nothing is lost.

    An encoder serves one group of parameters and one thread at a time.

    Args:
        numel: elements of the update, 0 to 2^48.
        threshold: a threshold policy, or a number for a fixed threshold. The default aims at density 0.01, or for
            fewer than 2,000,000 elements at sqrt(2,000,000 / numel) times as much, up to 0.08.
        shakeup: schedule of messages with a smaller threshold, or None.
        clip: schedule of clipping of the residual, or None.
        dtype: "float32" or "float64", of the residual.
        device: "cpu", or "cuda" or "cuda:<number>" for a ``gradwire.cuda.CudaEncoder``, which works on arrays on that
            device.
        key: index of the group, stored in every message, 0 to 2^32 - 1.
        on_nonfinite: reaction to NaN and infinity in an update: "raise" sends nothing and keeps the finite part in the
            residual, "skip" sends the message without these elements. They enter the residual in neither case.
        threads: most threads for one encode, and for adding messages in an `Exchange`. Bytes and parameters do not
            depend on the number.
        keeps_residual: False for parameters that contain the residual: `encode` then takes differences only
            (``before``), and there is memory for a residual only between ``make_residual`` and ``drop_residual``.

    Raises:
        ValueError: an argument is out of range, or ``clip`` or ``on_nonfinite="skip"`` without a residual.
        TypeError: an argument is of the wrong kind.
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
    _by_device: ClassVar[dict[str, type[Encoder]]] = {}
    _devices: ClassVar[re.Pattern[str]] = re.compile("cpu")

    def __init_subclass__(cls, device: str = "") -> None:
        """Register a subclass as the encoder of a kind of device."""
        cls.__signature__ = _signature_of(cls)
        if device:
            Encoder._by_device[device] = cls

    def __new__(cls, *arguments: Any, **options: Any) -> Encoder:
        """Create an encoder of the device's kind."""
        device = str(options.get("device", arguments[5] if len(arguments) > 5 else "cpu"))
        kind = Encoder._by_device.get(device.partition(":")[0], cls) if cls is Encoder else cls
        return object.__new__(kind)

    def __init__(
        self,
        numel: int,
        threshold: ThresholdPolicy | TargetBytes | float | None = None,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        dtype: Any = "float32",
        device: str = "cpu",
        key: int = 0,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        threads: int = 1,
        keeps_residual: bool = True,
    ) -> None:
        self.numel = numel = check_range("numel", numel, 0, _MAX_NUMEL)
        if threshold is None:
            threshold = default_policy(numel)
        elif isinstance(threshold, (bool, np.bool_)):
            raise TypeError(f"threshold is {threshold!r}, must be a threshold policy or a number")
        elif isinstance(threshold, (int, float, np.integer, np.floating)):
            threshold = FixedThreshold(as_number("threshold", threshold))
        if not isinstance(threshold, TargetBytes):
            _check_kind("threshold", threshold, "next_threshold", "a threshold policy or a number")
        if shakeup is not None:
            _check_kind("shakeup", shakeup, "divisor", "a ShakeUp")
        if clip is not None:
            _check_kind("clip", clip, "limit", "a ResidualClip")
        self.key = check_range("key", key, 0, 2**32 - 1)
        self.threads = check_range("threads", threads, 1, 1024)
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f'on_nonfinite must be "raise" or "skip", got {on_nonfinite!r}')
        if not self._devices.fullmatch(str(device)):
            raise ValueError(f'device must be "cpu", "cuda" or "cuda:<number>", got {device!r}')
        self.dtype = dtype_of_residual(dtype)
        self.keeps_residual = check_flag("keeps_residual", keeps_residual)
        # What these take out of the residual would be in the difference again.
        if not keeps_residual and (clip is not None or on_nonfinite == "skip"):
            raise ValueError(
                'clip and on_nonfinite="skip" change the residual: give keeps_residual=True'
            )
        self.device = device
        self.policy = threshold
        self.shakeup = shakeup
        self.clip = clip
        self.on_nonfinite = on_nonfinite
        self._rule = ThresholdRule.of(threshold, numel, shakeup)
        self._allocate()

    def _allocate(self) -> None:
        """Begin at step 0, with a residual of zeros if it is kept."""
        self._core = _core.Encoder(self.numel, self.dtype == "float64", self.threads)
        self._residual: NDArray[Any] | None = None
        if self.keeps_residual:
            self.make_residual()
        self._step = 0
        self._memory = ThresholdMemory(self._rule)
        # Counted in place: a frozen ``EncoderStats`` is made on request only.
        self._totals = dict.fromkeys(
            ("messages", "message_bytes", "sent_count", "nonfinite_count"), 0
        )

    @property
    def residual(self) -> NDArray[Any]:
        """The part not sent yet: a writable view of float32[numel] or float64[numel], always of the same memory.

        Raises:
            RuntimeError: with ``keeps_residual=False``, outside ``make_residual`` and ``drop_residual``.
        """
        if self._residual is None:
            raise RuntimeError(
                "this encoder keeps no residual: it is what the parameters differ from the shared ones by"
            )
        return self._residual

    @property
    def has_residual(self) -> bool:
        """Whether there is memory for a residual now."""
        return self._residual is not None

    def make_residual(self) -> None:
        """Allocate a residual of zeros, unless there is a residual.

        Raises:
            MemoryError: it does not fit.
        """
        if self._residual is not None:
            return
        try:
            self._residual = self._core.keep_residual()
        except MemoryError:
            nbytes = self.numel * np.dtype(self.dtype).itemsize
            raise MemoryError(f"a residual of {nbytes} bytes does not fit into memory") from None

    def drop_residual(self) -> None:
        """Free the residual if it is not kept; arrays that were taken of it have its last values."""
        if not self.keeps_residual:
            self._core.drop_residual()
            self._residual = None

    @property
    def device_number(self) -> int:
        """Number of the CUDA device; -1 for the CPU."""
        return -1

    @property
    def threshold(self) -> float:
        """The policy's threshold for the next step, not yet rounded to bfloat16."""
        return self._memory.threshold

    @property
    def step(self) -> int:
        """The number of the next message."""
        return self._step

    @property
    def stats(self) -> EncoderStats:
        """The totals so far."""
        count, removed = self._core.clipped()
        return EncoderStats(**self._totals, clipped_count=count, clipped_sum=removed)

    @overload
    def encode(
        self,
        update: Any = None,
        *,
        before: Any = None,
        dense: bool | Literal["bfloat16"] = False,
        parts: None = None,
        max_bytes: int | None = None,
    ) -> Message: ...
    @overload
    def encode(
        self,
        update: Any = None,
        *,
        before: Any = None,
        dense: bool | Literal["bfloat16"] = False,
        parts: Partition | int,
        max_bytes: int | None = None,
    ) -> list[Message]: ...
    def encode(
        self,
        update: Any = None,
        *,
        before: Any = None,
        dense: bool | Literal["bfloat16"] = False,
        parts: Partition | int | None = None,
        max_bytes: int | None = None,
    ) -> Message | list[Message]:
        """Add ``update`` to the residual and encode the elements that reach the threshold.

        Args:
            update: array of float32, float16 or bfloat16 (float64 too if the residual is float64), C-contiguous, on the
                CPU, of any shape; or a list or tuple of such arrays that together have ``numel`` elements. Not
                modified, not copied. None for an update that the caller has already added to ``residual``, which takes
                a third of the memory traffic.
            before: None, or arrays like those of ``update``, float32 or float64 as for ``apply``. Then the residual
                becomes the difference, ``update - before``, in the same pass: for parameters that contain the residual.
                Without a residual the difference is encoded, and nothing of it is kept.
            dense: True sends the whole residual as a dense message of the residual's dtype instead; "bfloat16" sends it
                in bfloat16 and keeps the rounding error in the residual.
            parts: a partition of the ``numel`` elements, or its number of parts, for one message per part. Message i
                numbers the elements of ``partition[i]`` from 0; the message of a part without elements is empty. All
                messages have the same threshold and step, and the policy follows their sum.
            max_bytes: most bytes of the message, or of all messages of the parts together. If the elements that reach
                the threshold need more bytes, only the largest of them are sent, with a larger threshold, and the rest
                stays in the residual.

        Returns:
            The message, or the list of the parts' messages. A message owns its bytes.

        Raises:
            NonFiniteUpdate: see ``on_nonfinite``; ``step`` does not advance and nothing was sent. With ``before`` the
                residual, if there is one, is the finite part of the difference.
            TypeError: the residual cannot represent the dtype of the update exactly.
            ValueError: wrong size, device or layout, memory shared with the residual, another ``dense``, a partition of
                another number of elements, or ``max_bytes`` with ``dense`` or for less than one element.
            RuntimeError: another thread uses this encoder.
        """
        partition = None if parts is None else self._partition(parts)
        budget, most = self._rule.budget(max_bytes, dense, self.numel, partition)
        messages: list[Message] = []
        memory = dict(vars(self._memory))
        try:
            if dense:
                skipped = self._call(
                    self._core.encode_dense,
                    update,
                    before,
                    dense_dtype(dense),
                    self.key,
                    self._step & _STEP_MASK,
                    self.on_nonfinite == "skip",
                    partition,
                    messages,
                )
            else:
                skipped = self._encode_ternary(update, before, partition, budget, most, messages)
            self._finish(messages, skipped)
        except BaseException:
            # What is not returned must not be lost, after an error of the policy or a signal, which Python raises as
            # soon as the core returns. The step does not count, so the next one has its threshold.
            if messages:
                vars(self._memory).update(memory)
            self._put_back(messages, partition)
            raise
        return messages[0] if partition is None else messages

    def check_update(self, update: Any) -> None:
        """Raise as ``encode`` does where an update does not fit; take nothing."""
        self._core.check_update(update)

    def _encode_ternary(
        self,
        update: Any,
        before: Any,
        partition: Partition | None,
        budget: int,
        most: int,
        messages: list[Message],
    ) -> int:
        """Append the messages of a step to a list, choose the next threshold, and return how many were skipped."""
        step = self._step
        shakeup = self.shakeup if self.shakeup is not None and self.shakeup.is_due(step) else None
        memory, rule = self._memory, self._rule
        if not budget and shakeup is None:
            # More bytes than one are too many for more elements than these.
            budget, most = 1, rule.most_changed(self.numel)
        # Sampled before the core adds the update to the residual, because the quantiles need the two apart.
        sample = partial(self._call, self._core.sample, update, before)
        quantiles = memory.sample(rule, sample, step, is_shakeup=shakeup is not None)
        rounded = memory.rounded
        skipped, reached = self._call(
            self._core.encode,
            update,
            before,
            shakeup_threshold(memory.threshold, shakeup) if shakeup else rounded,
            rule.rounding_point,
            _FLAG_SHAKEUP if shakeup else 0,
            self.key,
            step & _STEP_MASK,
            self.on_nonfinite == "skip",
            partition,
            budget,
            most,
            messages,
        )
        # A shake-up sends more elements than the policy's threshold would: its density says nothing about the policy.
        if shakeup is None and self.numel > 0:
            if quantiles and reached > sum(message.count for message in messages):
                quantiles = quantiles.held_back(step - memory.changed_at)
            memory.follow(rule, reached / self.numel, step, quantiles)
        if self.clip is not None and self.clip.is_due(step):
            self._core.clip(self.clip.limit * rounded)
        return int(skipped)

    def set_policy(
        self, policy: ThresholdPolicy | TargetBytes, threshold: float | None = None
    ) -> None:
        """Change the policy from the next step on, and the threshold if one is given.

        Otherwise the threshold in use stays, but a ``FixedThreshold`` has its own. As long as none has been learned,
        the threshold is the first one of the policy, which may learn it from the next update.

        Raises:
            ValueError: ``threshold`` is not a threshold, or the policy is none for this encoder; nothing has changed.
            TypeError: ``policy`` is not a threshold policy, or ``threshold`` no number; nothing has changed.
        """
        if not isinstance(policy, TargetBytes):
            _check_kind("policy", policy, "next_threshold", "a threshold policy")
        rule = ThresholdRule.of(policy, self.numel, self.shakeup)
        if threshold is not None:
            threshold = checked_threshold(threshold, self.shakeup)
        self._memory.begin(rule, self._step, threshold)
        self._rule = rule
        self.policy = policy

    @overload
    def flush(self, dtype: Literal["bfloat16"] | None = None, *, parts: None = None) -> Message: ...
    @overload
    def flush(
        self, dtype: Literal["bfloat16"] | None = None, *, parts: Partition | int
    ) -> list[Message]: ...
    def flush(
        self, dtype: Literal["bfloat16"] | None = None, *, parts: Partition | int | None = None
    ) -> Message | list[Message]:
        """Return the whole residual as one dense message, or as one for each of the ``parts`` of ``encode``.

        The residual keeps only the rounding error.

        Raises:
            NonFiniteUpdate: as for ``encode``.
            ValueError: ``dtype`` is neither None nor "bfloat16".
        """
        if dtype is not None and (not isinstance(dtype, str) or dtype != "bfloat16"):
            raise ValueError(
                f'dtype must be None (that of the residual) or "bfloat16", got {dtype!r}'
            )
        dense: bool | Literal["bfloat16"] = True if dtype is None else dtype
        return self.encode(dense=dense) if parts is None else self.encode(dense=dense, parts=parts)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state that the next message depends on, as host arrays and plain numbers.

        The policies are not part of the state, because they are immutable. A residual that is not kept is zeros here.
        """
        memory = self._memory
        return EncoderState(
            self._residual_on_host(),
            memory.threshold,
            self._step,
            memory.changed_at,
            memory.policy_state,
        ).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, bit for bit; the residual is copied into the encoder's memory.

        The threshold is that of the state, also with a ``FixedThreshold``; ``set_policy(encoder.policy)`` goes back to
        the policy's own.

        Raises:
            ValueError: the state has another format, size or dtype; the encoder is unchanged.
        """
        checked = EncoderState.of(state, self.numel, self.dtype)
        self.make_residual()
        self.residual[...] = checked.residual
        self._memory.restore(checked)
        self._step = checked.step

    def __reduce__(self) -> Any:
        """Return what makes an encoder with the same options and state; the totals of ``stats`` begin anew."""
        names = ("shakeup", "clip", "dtype", "key", "on_nonfinite", "threads", "keeps_residual")
        options = {name: getattr(self, name) for name in names}
        options |= {"threshold": self.policy, "device": str(self.device)}
        return _restored, (self.numel, options, self.state_dict(), self.has_residual)

    def __repr__(self) -> str:
        return (
            f"<gradwire.{type(self).__name__} {self.dtype}[{self.numel}] key={self.key} step={self._step} "
            f"threshold={self.threshold:.4g}>"
        )

    def _residual_on_host(self) -> NDArray[Any]:
        """Return a copy of the residual; zeros if there is none."""
        return np.zeros(self.numel, self.dtype) if self._residual is None else self._residual.copy()

    def _partition(self, parts: Partition | int) -> Partition:
        partition = parts if isinstance(parts, Partition) else Partition(self.numel, parts)
        if partition.numel != self.numel:
            raise ValueError(
                f"the partition has {partition.numel} elements, the encoder {self.numel}"
            )
        return partition

    def _call(self, method: Callable[..., Any], update: Any, before: Any, *arguments: Any) -> Any:
        """Call the core; say what became of an update that is not finite."""
        try:
            return method(update, before, *arguments)
        except NonFiniteUpdate as error:
            if self.keeps_residual:
                raise
            # Such an encoder cannot skip elements, and may have no residual to put the others into.
            of, kept = ("update - before", "update and before are as they were")
            if self._residual is not None:
                of, kept = ("the residual", "the finite part is in the residual")
            raise NonFiniteUpdate(
                f"{error.count} elements of {of} are not finite, the first at index {error.first_index}; "
                f"nothing was sent and {kept}: mend the update",
                error.count,
                error.first_index,
            ) from None

    def _put_back(
        self, messages: list[Any], partition: Partition | None, stream: int | None = None
    ) -> None:
        """Add the messages of a step, or those of its first parts, to the residual, if there is one."""
        owners = [None] if partition is None else list(partition)
        for part, message in zip(owners, messages, strict=False):
            if self.has_residual:
                apply(message, self.residual, part=part, stream=stream)

    def _finish(self, messages: list[Message], skipped: int) -> None:
        totals = self._totals
        totals["messages"] += len(messages)
        for message in messages:
            totals["message_bytes"] += message.nbytes
            totals["sent_count"] += message.count
        totals["nonfinite_count"] += skipped
        self._step += 1  # last: a step that is interrupted does not count


def _restored(
    numel: int, options: dict[str, Any], state: dict[str, Any], has_residual: bool
) -> Encoder:
    encoder = Encoder(numel, **options)
    encoder.load_state_dict(state)
    if not has_residual:
        encoder.drop_residual()
    return encoder


def _signature_of(encoder: type[Encoder]) -> inspect.Signature:
    """Return the signature of ``__init__`` without self, for ``inspect`` and ``help``: that of ``__new__`` is any."""
    signature = inspect.signature(encoder.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


Encoder.__signature__ = _signature_of(Encoder)


def shakeup_threshold(threshold: float, shakeup: ShakeUp) -> float:
    """Return the threshold of a shake-up, rounded.

    Raises:
        ValueError: it rounds to zero.
    """
    try:
        return round_threshold(threshold / shakeup.divisor)
    except ValueError:
        raise ValueError(
            f"a shake-up's threshold, {threshold!r} / {shakeup.divisor!r}, rounds to zero in bfloat16; "
            "use a smaller divisor, or a larger threshold or minimum: the quotient must be 1e-40 or more"
        ) from None


def checked_threshold(threshold: Any, shakeup: ShakeUp | None) -> float:
    """Return a number that is a threshold, also divided by the divisor of shake-ups.

    Raises:
        ValueError: it is none.
        TypeError: it is no number.
    """
    number = as_number("threshold", threshold)
    round_threshold(number)
    if shakeup is not None:
        shakeup_threshold(number, shakeup)
    return number


def dense_dtype(dense: bool | str) -> str:
    """Return the core's name of the dtype of a dense message: "" for the dtype of the residual.

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
    """Return the names of the backends that are usable on this machine, slowest first.

    >>> "scalar" in backends()
    True
    """
    return [*_core.usable_isas(), *([] if cuda_problem() else ["cuda"])]


def dtype_of_residual(dtype: Any) -> str:
    """Return the name of the residual's dtype.

    Raises:
        ValueError: it is another than float32 and float64.
    """
    try:
        name = "None" if dtype is None else np.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in ("float32", "float64"):
        raise ValueError(f'dtype of the residual must be "float32" or "float64", got {name!r}')
    return name


def _check_kind(name: str, value: Any, attribute: str, kind: str) -> None:
    if isinstance(value, type) or not hasattr(value, attribute):
        raise TypeError(f"{name} must be {kind}, got {reprlib.repr(value)}")
