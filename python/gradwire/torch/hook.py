"""A communication hook for DistributedDataParallel: gradients as threshold messages, all-gathered and averaged."""

# No `from __future__ import annotations` here: DDP compares the annotations of `threshold_hook` with the classes
# themselves. Annotations of others may be strings.

import copy
import datetime
import logging
import re
import reprlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
import torch.distributed as dist

from ..codec import Encoder
from ..errors import GradwireError, MessageError, NonFiniteUpdate
from ..message import Message, apply, apply_many, parse_many
from ..policy import (
    ResidualClip,
    ShakeUp,
    TargetBytes,
    ThresholdPolicy,
    as_number,
    default_policy,
    divide_budget,
    policy_for_tensor,
)
from ..state import check_flag, check_format, check_range
from .gather import Gather, Gathered
from .judge import is_adaptive
from .parameter_state import ParameterState, ParameterStates, scaled_threshold
from .staging import Staging

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "HookOptions",
    "HookStats",
    "ThresholdState",
    "register_threshold_hook",
    "threshold_hook",
]

_LOG = logging.getLogger(__name__)

_STATE_FORMAT = 1
_BACKENDS = "gloo", "nccl"
# From here on the reciprocal, by which a scaler multiplies gradients, is a float32, too.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class HookOptions(TypedDict, total=False):
    """The options of a `ThresholdState`, which explains them and has their defaults."""

    threshold: ThresholdPolicy | TargetBytes | float | None
    shakeup: ShakeUp | None
    clip: ResidualClip | None
    momentum: float
    factor_masking: bool
    warmup_steps: int
    scaler: torch.amp.GradScaler | None
    threads: int
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True)
class HookStats:
    """Totals of one rank since its state was made.

    Attributes:
        dense_steps: steps of the warm-up, whose gradients were averaged uncompressed.
        steps: steps that sent messages.
        skipped_steps: of those, steps with a gradient that was not finite on some rank.
        message_bytes: bytes of this rank's messages.
        encode_s: time to encode.
        gather_s: time in collectives, waiting for the other ranks included.
        apply_s: time to decode all ranks' messages into the gradients.
    """

    dense_steps: int = 0
    steps: int = 0
    skipped_steps: int = 0
    message_bytes: int = 0
    encode_s: float = 0.0
    gather_s: float = 0.0
    apply_s: float = 0.0


@dataclass
class _LossScale:
    """The scale that residuals and thresholds have, and whether it is that of this step's gradients."""

    value: float = 1.0
    is_followed: bool = True


@dataclass
class _Job:
    """One bucket of one step; in ``messages`` None stands for an update that was not finite."""

    index: int
    is_last: bool
    step: int
    parameters: list[torch.Tensor]
    staging: Staging
    gather: Gather
    done: "torch.futures.Future[torch.Tensor]"
    ready: "torch.cuda.Event | None" = None
    states: list[ParameterState] = field(default_factory=list)
    updates: list[torch.Tensor] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)

    def put_back_messages(self) -> None:
        """Add the messages to the residuals again."""
        for state, message in zip(self.states, self.messages, strict=False):
            if message is not None:
                apply(message, state.encoder.residual)

    def revert(self) -> None:
        """Make residuals and velocities what they were before this step."""
        self.put_back_messages()
        for state, update in zip(self.states, self.updates, strict=False):
            state.revert_update(update)

    def parse_gathered(self) -> list[list[Message]]:
        """Return all ranks' messages, by rank, a list with one for each parameter.

        Raises:
            MessageError: invalid bytes, or a rank has a model of another shape.
        """
        sizes = [state.encoder.numel for state in self.states]
        by_rank = [parse_many(gathered.payload) for gathered in self.gathered]
        for rank, messages in enumerate(by_rank):
            theirs = [message.numel for message in messages]
            if theirs != sizes:
                raise MessageError(
                    f"rank {rank} sent for bucket {self.index} messages of {theirs} elements, here its parameters "
                    f"have {sizes}: begin with the same model on all ranks"
                )
        return by_rank


@dataclass(eq=False, repr=False)
class ThresholdState:
    """What ``threshold_hook`` keeps from step to step: residuals, thresholds, and a thread that encodes and gathers.

    Make one per model and rank, with the same arguments on every rank; ``register_threshold_hook`` does so. Frameworks
    that take state and hook separately get this and ``threshold_hook``.

    Every parameter has an encoder with a threshold of its own, on the parameter's device. The messages of all ranks are
    gathered bucket by bucket, while the backward pass goes on, and averaged in the order of the ranks, so all ranks get
    the same bits. Unsent gradients stay in residuals, which belong to the parameters however DDP arranges its buckets.

    If a gradient is NaN or infinite on any rank, the whole step becomes NaN on all ranks, so that ``GradScaler`` skips
    it everywhere, and the residuals are what they were before.

    ``docs/torch.md`` has the details: momentum, loss scales, checkpoints, memory.

    Source: Y. Lin et al., "Deep gradient compression", ICLR 2018, sections 3.1 and 3.3 (momentum correction, factor
    masking).

    Args:
        process_group: as given to DDP; None is the default group.
        parameters: ``model.named_parameters()``, so that checkpoints use the model's names. Without, parameters are
            counted from the last to the first.
        threshold: policy of the thresholds, one per parameter; None: density 0.01, or for a model of n < 2,000,000
            elements sqrt(2e6 / n) times as much, up to 0.08. Where the policy aims at a density, a parameter k times as
            small as the largest gets sqrt(k) times that density, up to 0.08. A budget (``TargetBytes``) is one for all
            parameters, so it needs ``parameters``.
        shakeup: periodic messages with a smaller threshold, or None.
        clip: periodic clipping of the residual, or None.
        momentum: of the local momentum correction, in [0, 1); 0.0: none. The optimiser then needs none.
        factor_masking: whether elements that were sent lose their momentum.
        warmup_steps: first steps, which are averaged uncompressed. At least one is advisable: DDP's first buckets are
            provisional, and early gradients are the largest.
        scaler: the ``GradScaler`` whose scale the gradients carry, or None.
        threads: most threads of one encode, and for adding messages.
        backend: of the group that carries the messages: "gloo", from host memory, even where gradients go over NCCL;
            "nccl" moves them to the GPU and back.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument of the wrong kind.
    """

    process_group: dist.ProcessGroup | None = None
    _: KW_ONLY
    parameters: InitVar[Iterable[tuple[str, torch.nn.Parameter]] | None] = None
    threshold: ThresholdPolicy | TargetBytes | float | None = None
    shakeup: ShakeUp | None = None
    clip: ResidualClip | None = None
    momentum: float = 0.0
    factor_masking: bool = True
    warmup_steps: int = 1
    scaler: torch.amp.GradScaler | None = None
    threads: int = 1
    backend: Literal["gloo", "nccl"] = "gloo"

    def __post_init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]] | None) -> None:
        """Check the options and make what changes from step to step."""
        self.warmup_steps = check_range("warmup_steps", self.warmup_steps, 0, 2**63 - 1)
        self.momentum = as_number("momentum", self.momentum)
        self.factor_masking = check_flag("factor_masking", self.factor_masking)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}, must be in [0, 1)")
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, must be one of {_BACKENDS}")
        is_scaler = hasattr(self.scaler, "get_scale") and not isinstance(self.scaler, type)
        if self.scaler is not None and not is_scaler:
            raise TypeError(
                f"scaler must be a GradScaler or None, got {reprlib.repr(self.scaler)}: for another change of units "
                "call rescale(factor)"
            )
        self._step = 0
        self._scale = _LossScale()
        self._parameters = ParameterStates(parameters, self._make_encoder, self.momentum)
        self._gather: Gather | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None  # for gradients on a GPU
        self._jobs: list[_Job] = []
        # With momentum, of the warm-up's last step: the states it updated, and whether its averages were finite.
        self._warmed: list[ParameterState] = []
        self._is_warmup_finite: list[bool] = []
        self._stats = HookStats()
        # Raises now what the first bucket's would raise later. A copy does not know its parameters yet.
        known = self._parameters.sizes
        if known or not isinstance(self.threshold, TargetBytes):
            sizes = self._parameters.numel, self._parameters.largest
            self._make_encoder(min(known, default=1), "float32", "cpu", 0, sizes)

    def __reduce__(self) -> Any:
        """Return what makes a state with the same options, residuals and policies; the process group stays here.

        The copy serves a model of the same parameters, or of equal ones in the same order, wrapped in DDP anew.
        """
        if self.process_group is not None:
            _LOG.warning(
                "the process group of a ThresholdState is not pickled: the loaded state uses the default group"
            )
        return _restored, (self._options(), self._parameters.names(), self.state_dict())

    def __deepcopy__(self, memo: dict[int, Any]) -> "ThresholdState":
        """Return such a copy with the same process group."""
        options = copy.deepcopy(self._options(), memo)
        return _restored(
            {**options, "process_group": self.process_group},
            self._parameters.names(),
            self.state_dict(),
        )

    def _options(self) -> dict[str, Any]:
        """Return the options but the process group."""
        names = [option.name for option in fields(self)]
        return {name: getattr(self, name) for name in names if name != "process_group"}

    def _make_encoder(
        self, numel: int, dtype: str, device: str, key: int, sizes: tuple[int, int]
    ) -> Encoder:
        encoder = Encoder(
            numel,
            threshold=self._policy_of(numel, sizes),
            shakeup=self.shakeup,
            clip=self.clip,
            dtype=dtype,
            device=device,
            key=key,
            threads=self.threads,
        )
        if self._scale.value != 1.0:
            # Policies refer to gradients without their loss scale.
            threshold = scaled_threshold(encoder.threshold, self._scale.value)
            encoder.load_state_dict({**encoder.state_dict(), "threshold": threshold})
        return encoder

    def _policy_of(
        self, numel: int, sizes: tuple[int, int]
    ) -> ThresholdPolicy | TargetBytes | float:
        """Return the policy of a parameter of ``numel`` elements; ``sizes`` are as of `ParameterState`."""
        model_numel, largest = sizes
        policy = default_policy(model_numel) if self.threshold is None else self.threshold
        if not isinstance(policy, TargetBytes):
            return policy_for_tensor(policy, numel, largest)
        known = self._parameters.sizes
        if numel not in known:
            raise ValueError(
                f"{policy} is divided among the parameters that require gradients when the state is made, and one of "
                f"{numel} elements is not among those known: give it parameters=model.named_parameters(), as "
                "register_threshold_hook does"
            )
        return dict(
            zip(known, divide_budget(policy, policy.max_bytes_per_step, known), strict=True)
        )[numel]

    @property
    def step(self) -> int:
        """Number of the next step, the warm-up's included."""
        return self._step

    @property
    def stats(self) -> HookStats:
        """Totals so far."""
        return self._stats

    def _count(self, **amounts: float) -> None:
        """Add to fields of the statistics."""
        totals = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
        self._stats = replace(self._stats, **totals)

    def rescale(self, factor: float) -> None:
        """Multiply residuals and thresholds: after a change of the loss scale, or of what a gradient means.

        Call this between steps, with the same factor on every rank.

        Raises:
            TypeError: the factor is not a number.
            ValueError: it is not positive and finite, or a threshold or residual would be out of range; nothing has
                changed.
        """
        number = as_number("factor", factor)
        self._finish_warmup_step()
        self._parameters.rescale(number)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, policies, step and loss scale, as host tensors and plain numbers.

        Every rank saves its own. Call this between steps, or after one that was interrupted.
        """
        self._finish_warmup_step()
        # An interrupted step's messages are not sent: they go back into the residuals when the next step begins.
        unsent = {
            state: message
            for job in self._jobs
            for state, message in zip(job.states, job.messages, strict=False)
        }
        return {
            "format": _STATE_FORMAT,
            "step": self._step,
            "scale": self._scale.value,
            "residuals": self._parameters.state_dict(unsent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, whatever DDP's buckets are now.

        Raises:
            ValueError: the state is of another format or of another model, or its step, its scale or a parameter's part
                cannot be used; nothing has changed.
            TypeError: it is no dict, or step or scale is of the wrong kind.
        """
        check_format(state, _STATE_FORMAT)
        missing = {"step", "scale", "residuals"} - state.keys()
        if missing:
            raise ValueError(f"state lacks {', '.join(sorted(missing))}: it is not that of a hook")
        step = check_range("step", state["step"], 0, 2**63 - 1)
        scale = as_number("scale", state["scale"])
        if not _SMALLEST_SCALE <= scale < float("inf"):
            raise ValueError(
                f"scale is {scale}, must be a loss scale, {_SMALLEST_SCALE:g} or more and finite: load another "
                "checkpoint"
            )
        self._parameters.load_state_dict(state["residuals"])
        self._step = step
        self._scale = _LossScale(scale)

    # ---- in DDP's thread --------------------------------------------------------------------------------------------

    def _start_bucket(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """Start work on one bucket."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(
                "the hook takes no sparse gradients, as of nn.Embedding(sparse=True): make the layer with sparse=False "
                "or use gradwire.torch.share(model, optimizer) without DistributedDataParallel, which takes them"
            )
        step = self._step
        gather = self._gather = self._gather or self._make_gather(buffer.device)
        if bucket.is_last():
            self._step += 1
        is_unnumbered = self._parameters.is_unnumbered(bucket.parameters(), bucket.is_last())
        if is_unnumbered or step < self.warmup_steps:
            self._count(dense_steps=int(bucket.is_last()))
            # Of the buckets without numbers, which all have 0, the first one begins the step.
            is_first = bucket.index() == 0 and not (is_unnumbered and self._warmed)
            return self._average_uncompressed(bucket, is_first=is_first)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradwire-hook")
        job = _Job(
            index=bucket.index(),
            is_last=bucket.is_last(),
            step=step,
            parameters=bucket.parameters(),
            staging=Staging(buffer),
            gather=gather,
            done=torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None),
        )
        if buffer.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(buffer.device)
            job.ready = torch.cuda.current_stream(buffer.device).record_event()
        self._worker.submit(self._process, job)
        # Errors arrive as a result, because a Future made in Python cannot fail; this turns them into one.
        return job.done.then(_raise_or_return)

    def _average_uncompressed(
        self, bucket: dist.GradBucket, *, is_first: bool
    ) -> "torch.futures.Future[torch.Tensor]":
        """Average one bucket of the warm-up, with the momentum that later steps continue."""
        buffer = bucket.buffer()
        self._parameters.add_bucket(bucket.parameters())
        if self.momentum == 0.0:
            return _all_reduce(self.process_group, buffer)
        if is_first:
            self._finish_warmup_step()
            self._follow_scale()
        staging = Staging(buffer)
        states = self._parameters.of_bucket(bucket.parameters(), staging.memory.dtype)
        for state, gradient in zip(states, self._gradients(staging, states), strict=True):
            gradient.copy_(state.add_momentum(gradient))
        self._warmed += states

        def note(future: "torch.futures.Future[torch.Tensor]") -> torch.Tensor:
            self._is_warmup_finite.append(bool(future.value().isfinite().all()))
            return future.value()

        return _all_reduce(self.process_group, staging.store()).then(note)

    def _finish_warmup_step(self) -> None:
        """Revert the momentum of a warm-up step that was not finite in some bucket."""
        if not all(self._is_warmup_finite):
            for state in self._warmed:
                state.revert_momentum()
        self._warmed = []
        self._is_warmup_finite = []

    def _make_gather(self, device: torch.device) -> Gather:
        # A group of its own, so that SyncBatchNorm's collectives in the backward pass cannot get between. It is none of
        # torch's known groups: `dist.new_group` waits for ever where ranks have different numbers of groups, and keeps
        # connections and threads when the state is gone.
        of_model = self.process_group or dist.group.WORLD
        rank, size = dist.get_rank(of_model), dist.get_world_size(of_model)
        _, store = dist.distributed_c10d._world.pg_map[of_model]
        # The number of this group's models so far is the same on all ranks.
        count = store.add(f"gradwire-hook/{rank}", 1)
        store = dist.PrefixStore(f"gradwire-hook/{count}", store)
        timeout = _timeout_of(of_model, device)
        _LOG.info("threshold hook: %d ranks, messages over %s", size, self.backend)
        if self.backend == "gloo":
            group = dist.ProcessGroupGloo(store, rank, size, timeout)
            gather = Gather(group, torch.device("cpu"))
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            gather = Gather(dist.ProcessGroupNCCL(store, rank, size, options), device)
        # A rank in its warm-up takes part in no gather: the others would wait for it until the timeout.
        gather(self._step, 0, memoryview(b""), False)
        return gather

    # ---- in the state's own thread ----------------------------------------------------------------------------------

    def _process(self, job: _Job) -> None:
        """Encode and gather one bucket; after the last one, finish the step. On a GPU in a stream of this thread's."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                if self._stream is not None and job.ready is not None:
                    self._stream.wait_event(job.ready)
                self._exchange(job)
            except BaseException as error:
                self._fail(job, error)

    def _exchange(self, job: _Job) -> None:
        if job.index == 0:
            if self._jobs and set(self._jobs[0].parameters).isdisjoint(job.parameters):
                raise GradwireError(
                    "DDP's first step with static_graph=True does not tell its buckets apart, so it cannot be sent: "
                    "register the hook by register_threshold_hook, which averages that step uncompressed"
                )
            self._begin_step()
        if job.index != len(self._jobs):
            # The others cannot be applied without it, and their residuals must not lose what was sent.
            raise GradwireError(
                f"bucket {job.index} of step {job.step} was not sent, because an earlier bucket of this step failed"
            )
        self._jobs.append(job)
        begin_s = time.perf_counter()
        self._encode(job)
        encoded_s = time.perf_counter()
        finite = [message for message in job.messages if message is not None]
        is_nonfinite = len(finite) < len(job.messages)
        payload = memoryview(b"" if is_nonfinite else b"".join(map(bytes, finite)))
        job.gathered = job.gather(job.step, job.index, payload, is_nonfinite)
        gathered_s = time.perf_counter()
        self._count(
            encode_s=encoded_s - begin_s,
            gather_s=gathered_s - encoded_s,
            message_bytes=payload.nbytes,
        )
        if job.is_last:
            self._parameters.check_all_loaded()
            self._finish_step()

    def _begin_step(self) -> None:
        """Put back what an interrupted step has encoded; follow the loss scale."""
        self._finish_warmup_step()
        for job in self._jobs:
            job.put_back_messages()
        self._jobs = []
        self._follow_scale()

    def _follow_scale(self) -> None:
        """Give velocities and residuals the scale of the gradients that come now.

        A scaler halves its scale at every step of a training gone NaN, down to zero. What cannot follow stays as it is,
        and the step is skipped, so that another scale finds everything as it was.
        """
        # Without a scaler a checkpoint may still have the scale of one.
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        was_followed = self._scale.is_followed
        self._scale.is_followed = False
        try:
            if not _SMALLEST_SCALE <= scale < float("inf"):
                raise ValueError(f"it must be {_SMALLEST_SCALE:g} or more, and finite")
            if scale != self._scale.value:
                self._parameters.rescale(scale / self._scale.value)
        except ValueError as error:
            if was_followed:
                text = "the loss scale %g cannot be followed (%s), so steps are skipped: %s"
                way_out = (
                    "if the training is to go on, give the scaler another one by update(new_scale)"
                )
                _LOG.warning(text, scale, error, way_out)
            return
        self._scale = _LossScale(scale)

    def _gradients(self, staging: Staging, states: list[ParameterState]) -> list[torch.Tensor]:
        """Return each parameter's gradient; NaN, which skips the step everywhere, in a scale that is not followed."""
        gradients = staging.fetch()
        if not self._scale.is_followed:
            gradients.fill_(float("nan"))
        return _split(gradients, states)

    def _encode(self, job: _Job) -> None:
        """Encode every parameter of a bucket; an update that is not finite is reported and leaves None."""
        job.states = self._parameters.of_bucket(job.parameters, job.staging.memory.dtype)
        gradients = self._gradients(job.staging, job.states)
        refused: NonFiniteUpdate | None = None
        # An error in the middle leaves the updates and messages so far to `revert`.
        for state, gradient in zip(job.states, gradients, strict=True):
            job.updates.append(state.add_momentum(gradient))
            try:
                job.messages.append(state.encoder.encode(job.updates[-1]))
            except NonFiniteUpdate as error:
                refused = refused or error
                job.messages.append(None)
        for index, message in enumerate(job.messages):
            if message is not None and not isinstance(message, Message):  # on a GPU
                try:
                    message.check()  # waits
                except NonFiniteUpdate as error:
                    refused = refused or error
                    job.messages[index] = None
        if refused is not None:
            # A training that has gone NaN stays so: one line tells, and the totals count the steps.
            is_first = not any(None in other.messages for other in self._jobs if other is not job)
            is_first &= self._stats.skipped_steps == 0
            level = logging.WARNING if is_first else logging.DEBUG
            _LOG.log(
                level,
                "step %d, bucket %d: %d elements of the gradient, or its sum with the residual, are NaN or infinite: "
                "all ranks get NaN and residuals stay as they were: clip gradients, lower the learning rate, or use "
                "GradScaler, which skips such steps; HookStats.skipped_steps counts further ones",
                job.step,
                job.index,
                refused.count,
            )

    def _finish_step(self) -> None:
        """Turn the gradients of all buckets into the average of the ranks' messages."""
        begin_s = time.perf_counter()
        jobs = self._jobs
        is_skipped = any(gathered.is_nonfinite for job in jobs for gathered in job.gathered)
        if is_skipped:
            _LOG.info("step %d is skipped: a gradient was not finite", jobs[0].step)
            for job in jobs:
                job.revert()
                job.staging.memory.fill_(float("nan"))
        else:
            # All are checked before the first gradient changes.
            for job, by_rank in [(job, job.parse_gathered()) for job in jobs]:
                self._apply(job, by_rank)
        self._jobs = []
        averages = [job.staging.store() for job in jobs]
        apply_s = time.perf_counter() - begin_s
        self._count(steps=1, skipped_steps=int(is_skipped), apply_s=apply_s)
        for job, average in zip(jobs, averages, strict=True):
            job.done.set_result(average)

    def _apply(self, job: _Job, by_rank: list[list[Message]]) -> None:
        """Replace a bucket's gradients by the average of all ranks' messages."""
        job.staging.memory.fill_(0.0)
        scale = 1.0 / len(by_rank)
        gradients = _split(job.staging.memory, job.states)
        by_rank[job.gather.rank] = list(job.messages)  # on a GPU not copied there again
        for gradient, messages in zip(gradients, zip(*by_rank, strict=True), strict=True):
            apply_many(messages, gradient, scale=scale, threads=self.threads)
        if self.factor_masking:
            for state, message in zip(job.states, job.messages, strict=True):
                if message is not None:
                    state.mask_momentum(message)

    def _fail(self, failed: _Job, error: BaseException) -> None:
        """Fail all buckets of the step, and revert what was encoded."""
        # The first bucket may have failed before it was noted: without a result its backward() would wait for ever.
        jobs = [job for job in self._jobs if job is not failed]
        jobs.append(failed)
        self._jobs = []
        # All residuals are whole again before the first future lets DDP raise, and the caller save a checkpoint.
        for job in jobs:
            job.revert()
        for job in jobs:
            job.done.set_result(error)


def _restored(
    options: dict[str, Any], names: list[tuple[str, int]] | None, state: dict[str, Any]
) -> ThresholdState:
    """Return a copy of a state, for parameters that buckets are still to bring."""
    copied = ThresholdState(**options)
    copied._parameters.expect(names)
    copied.load_state_dict(state)
    return copied


def threshold_hook(
    state: ThresholdState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over the ranks as threshold messages; see ``ThresholdState``.

    Args:
        state: of this rank and model.
        bucket: float32, float64, float16 or bfloat16 gradients in host or GPU memory; modified in place.

    Returns:
        A future of the bucket's buffer. The future fails, and with it ``backward()``, when the other ranks cannot be
        reached or are at another step.
    """
    return state._start_bucket(bucket)


def register_threshold_hook(
    model: torch.nn.parallel.DistributedDataParallel,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: "Unpack[HookOptions]",
) -> ThresholdState:
    """Register the hook with ``model``, and return the hook's state.

    All ranks of the model's process group call this together: they compare their options.

    Args:
        model: wrapped in DDP, before its first backward pass.
        optimizer: of the model; refused if the hook cannot serve it.
        options: see `HookOptions`.

    Raises:
        ValueError: an option is out of range, or another rank has another; or the optimiser is adaptive, or has
            momentum beside the hook's.
        TypeError: ``model`` is not wrapped in DDP, or ``optimizer`` is none of torch's.
    """
    if isinstance(model, type) or not hasattr(model, "register_comm_hook"):
        raise TypeError(
            f"the hook is for DistributedDataParallel(model), got a {type(model).__name__} itself"
        )
    named = model.module.named_parameters()
    state = ThresholdState(model.process_group, parameters=named, **options)
    if optimizer is not None:
        _check_optimizer(optimizer, state.momentum)
    _compare_options(state)
    if model.static_graph:
        state._parameters.expect_unnumbered()
    model.register_comm_hook(state, threshold_hook)
    return state


def _check_optimizer(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be one of torch's, got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if is_adaptive(optimizer):
        raise ValueError(
            f"{name} divides by the size of its gradients, as Adam by a running mean of squares, and the hook's sparse "
            "gradients have another size, so the loss would be higher (docs/torch.md says by how much): "
            "use gradwire.torch.share(model, optimizer) without DistributedDataParallel, which shares the optimiser's "
            "updates; or SGD"
        )
    inner = max(group.get("momentum", 0.0) for group in optimizer.param_groups)
    if momentum and inner:
        raise ValueError(
            f"{name} has momentum {inner} and the hook {momentum}: give momentum to the hook alone"
        )


def _compare_options(state: ThresholdState) -> None:
    """Refuse other options on another rank, which would hang or fail in the middle of training."""
    # A policy of the user's own may have no better repr than its address.
    options = {
        option.name: re.sub(" at 0x[0-9a-f]+", "", repr(getattr(state, option.name)))
        for option in fields(state)
        if option.name not in ("process_group", "scaler", "threads")
    }
    gathered: list[Any] = [None] * dist.get_world_size(state.process_group)
    dist.all_gather_object(gathered, options, group=state.process_group)
    first = gathered[0]
    for rank, theirs in enumerate(gathered):
        different = [name for name in options if theirs.get(name) != first.get(name)]
        if different:
            name = different[0]
            raise ValueError(
                f"ranks 0 and {rank} registered the hook with other options: {name} is {first.get(name)} on rank 0, "
                f"{theirs.get(name)} on rank {rank}"
            )


def _split(buffer: torch.Tensor, states: list[ParameterState]) -> list[torch.Tensor]:
    """Return a view of each parameter's elements in a bucket's buffer."""
    return list(buffer.split([state.encoder.numel for state in states]))


def _timeout_of(group: Any, device: torch.device) -> datetime.timedelta:
    """Return the timeout that the user gave a process group; a new group would have the backend's default."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout


def _all_reduce(
    group: dist.ProcessGroup | None, tensor: torch.Tensor
) -> "torch.futures.Future[torch.Tensor]":
    """Average an uncompressed tensor in place, as DDP does without a hook."""
    tensor.div_(dist.get_world_size(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _raise_or_return(future: "torch.futures.Future[Any]") -> torch.Tensor:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
