"""A communication hook for DistributedDataParallel: gradients as threshold messages, all-gathered and averaged."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.

import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..codec import Encoder
from ..errors import MessageError, NonFiniteUpdate
from ..exchange.density import check_size_exponent, for_size
from ..message import Message, apply_many, parse_many
from ..policy import ResidualClip, ShakeUp, TargetDensity, ThresholdPolicy
from ..state import check_format
from .buckets import Bucket, Residuals
from .gather import Gather, Gathered
from .staging import Staging

__all__ = ["HookStats", "ThresholdState", "register_threshold_hook", "threshold_hook"]

_LOG = logging.getLogger(__name__)

_STATE_FORMAT = 1


@dataclass(frozen=True)
class HookStats:
    """Totals of one rank since its state was made.

    Attributes:
        dense_steps: steps of the warm-up, averaged whole.
        steps: steps that sent messages.
        skipped_steps: of them, those whose gradients were not finite on some rank.
        message_bytes: of this rank's messages.
        gathered_bytes: what this rank gave into collectives: messages, headers and padding.
        second_collectives: how often a message outgrew its slot.
        encode_s: time to encode.
        gather_s: time in collectives, waiting for the other ranks included.
        apply_s: time to decode everybody's messages into the gradients.
    """

    dense_steps: int = 0
    steps: int = 0
    skipped_steps: int = 0
    message_bytes: int = 0
    gathered_bytes: int = 0
    second_collectives: int = 0
    encode_s: float = 0.0
    gather_s: float = 0.0
    apply_s: float = 0.0


@dataclass
class _Job:
    """One bucket of one step on its way."""

    index: int
    is_last: bool
    step: int
    buffer: torch.Tensor
    parameters: list[torch.Tensor]
    staging: Staging
    done: "torch.futures.Future[torch.Tensor]"
    taken: "_Taken | None" = None
    gathered: list[Gathered] = field(default_factory=list)


@dataclass(frozen=True)
class _Taken:
    """A bucket whose encoders have taken an update, and their messages: None, if the update was not finite."""

    bucket: Bucket
    update: torch.Tensor
    messages: list[Message] | None

    @property
    def payload(self) -> memoryview:
        return memoryview(b"".join(map(bytes, self.messages or ())))


class ThresholdState:
    """What ``threshold_hook`` keeps from step to step: residuals, thresholds, and the thread that does the work.

    Make one per model and rank, with the same arguments on every rank, and register it with the hook::

        state = ThresholdState(parameters=model.named_parameters())
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, threshold_hook)

    **What is sent.** Every parameter's gradient goes through an encoder, so each has a threshold of its own: with one
    for all, layers with small gradients would hardly be heard. The messages of a bucket travel together; those of all
    ranks are gathered, decoded and averaged, in the order of the ranks, so that all of them hold the same bits. What
    was not sent stays in a residual, which the parameter keeps however DDP arranges its buckets.

    **What waits.** The hook itself returns at once; encoding and gathering go on in a thread of this state beside the
    backward pass, in a process group of its own (so that they cannot meet SyncBatchNorm's collectives). The gradients
    change when the last bucket's messages are here: then every rank knows whether the step counts. DDP waits for that
    at the end of ``backward()``, as it does without a hook.

    **Steps that do not count.** If a gradient is NaN or infinite on any rank, all ranks get NaN as the result of all
    buckets, as dense training would spread it, and ``GradScaler`` skips the step on all of them. The residuals are then
    what they were before the step. With ``on_nonfinite="skip"`` such elements are left out instead, counted by nobody
    but the encoders, and the step goes on.

    **Loss scale.** Residuals are in the units of the gradients. Give ``scaler``, and a change of its scale rescales
    them; or call ``rescale``.

    **Momentum.** An optimiser's momentum after the hook multiplies quanta that come late. With ``momentum`` each rank
    accumulates gradients with momentum before they are encoded, and what it sends loses it; then give the optimiser
    none, and clip gradients at 1 / (1 - momentum) times the norm. Training then needs far fewer steps.

    **Memory.** 4 bytes per parameter for the residual (8 for float64 gradients), 8 more (16) with momentum. Gradients
    that are not float32 or float64 in host memory are staged there: 4 bytes more, of pinned memory for a GPU.

    Source: Y. Lin et al., "Deep gradient compression", ICLR 2018, sections 3.1 and 3.3 (momentum correction, factor
    masking).

    Args:
        process_group: as given to DDP; None is the default group. Not pickled.
        threshold: policy of the thresholds, one per parameter.
        size_exponent: where it aims at a density, the largest parameter gets that, and one that is k times as small
            k^size_exponent times as much, up to 0.08. 0.0: all the same.
        shakeup: periodic messages with a smaller threshold, or None.
        clip: periodic clipping of the residual, or None.
        momentum: of the local momentum correction, in [0, 1); 0.0: none.
        factor_masking: whether elements that were sent lose their momentum, so that it does not push stale ones.
        warmup_steps: steps at the beginning that are averaged whole. The first should be: its buckets are provisional,
            and early gradients are the largest.
        parameters: ``model.named_parameters()``; checkpoints then name residuals as the model does. Without, they are
            counted from the last to the first.
        scaler: the ``GradScaler`` whose scale the gradients carry, or None.
        on_nonfinite: "propagate" or "skip".
        threads: most threads of one encode, and for adding messages.
        backend: of the group that carries the messages: "gloo", which suits messages in host memory even where
            gradients go over NCCL; "nccl" moves them to the GPU and back.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument of the wrong kind.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        threshold: ThresholdPolicy | None = None,
        size_exponent: float = 0.5,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        momentum: float = 0.0,
        factor_masking: bool = True,
        warmup_steps: int = 1,
        parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["propagate", "skip"] = "propagate",
        threads: int = 1,
        backend: Literal["gloo", "nccl"] = "gloo",
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is {warmup_steps}, must be 0 or more")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum is {momentum}, must be in [0, 1)")
        if on_nonfinite not in ("propagate", "skip"):
            raise ValueError(f'on_nonfinite is {on_nonfinite!r}; it must be "propagate" or "skip"')
        if backend not in ("gloo", "nccl"):
            raise ValueError(f'backend is {backend!r}; it must be "gloo" or "nccl"')
        self.process_group = process_group
        self.threshold = threshold if threshold is not None else TargetDensity()
        self.size_exponent = size_exponent
        self.shakeup = shakeup
        self.clip = clip
        self.momentum = momentum
        self.factor_masking = factor_masking
        self.warmup_steps = warmup_steps
        self.scaler = scaler
        self.on_nonfinite = on_nonfinite
        self.threads = threads
        self.backend = backend
        self._step = 0
        self._scale = 1.0
        self._set_up()
        check_size_exponent(size_exponent)
        self._make_encoder(1, "float32", 0, 1)  # refuses what the first bucket's would, but in time
        if parameters is not None:
            self.name_parameters(parameters)

    def _set_up(self) -> None:
        """Make what is neither configuration nor checkpoint."""
        self._residuals = Residuals(self._make_encoder, self.momentum)
        self._gather: Gather | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._jobs: list[_Job] = []
        # Of the last step of the warm-up, where there is momentum: its buckets, and whether their averages were finite.
        self._whole: list[Bucket] = []
        self._is_whole_finite: list[bool] = []
        self._dense_steps = self._sparse_steps = self._skipped_steps = self._message_bytes = 0
        self._encode_s = self._gather_s = self._apply_s = 0.0

    def _make_encoder(self, numel: int, dtype: str, index: int, largest: int) -> Encoder:
        encoder = Encoder(
            numel,
            threshold=for_size(self.threshold, numel, largest, self.size_exponent),
            shakeup=self.shakeup,
            clip=self.clip,
            dtype=dtype,
            key=index,
            on_nonfinite="raise" if self.on_nonfinite == "propagate" else "skip",
            threads=self.threads,
        )
        if self._scale != 1.0:
            # Policies speak of gradients without their loss scale.
            state = encoder.state_dict()
            encoder.load_state_dict({**state, "threshold": state["threshold"] * self._scale})
        return encoder

    @property
    def step(self) -> int:
        """Number of the next step, the warm-up's included."""
        return self._step

    @property
    def stats(self) -> HookStats:
        """Totals so far."""
        gather = self._gather
        return HookStats(
            dense_steps=self._dense_steps,
            steps=self._sparse_steps,
            skipped_steps=self._skipped_steps,
            message_bytes=self._message_bytes,
            gathered_bytes=gather.sent_bytes if gather else 0,
            second_collectives=gather.second_collectives if gather else 0,
            encode_s=self._encode_s,
            gather_s=self._gather_s,
            apply_s=self._apply_s,
        )

    def name_parameters(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Name the residuals in checkpoints as the model does: ``state.name_parameters(model.named_parameters())``.

        Raises:
            ValueError: too late, the first step has begun.
        """
        self._residuals.name(list(parameters))

    def rescale(self, factor: float) -> None:
        """Multiply residuals and thresholds: after a change of the loss scale, or of what a gradient means.

        Call it between steps, with the same factor on every rank.

        Raises:
            ValueError: the factor is not positive and finite.
        """
        if not 0.0 < factor < float("inf"):
            raise ValueError(f"factor is {factor}, must be positive and finite")
        self._settle_warmup()
        self._residuals.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return what training needs to go on: this rank's residuals, its step, its loss scale.

        Every rank saves its own. Host tensors and plain numbers, without the process group; call it between steps.
        """
        self._settle_warmup()
        return {
            "format": _STATE_FORMAT,
            "step": self._step,
            "scale": self._scale,
            "residuals": self._residuals.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Nothing is lost, wherever DDP's buckets begin and end now.

        Raises:
            ValueError: the state is of another format.
        """
        check_format(state, _STATE_FORMAT)
        self._residuals.load_state_dict(state["residuals"])
        self._step = int(state["step"])
        self._scale = float(state["scale"])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process: the group, the scaler, the thread."""
        configuration = {
            name: getattr(self, name)
            for name in (
                "threshold",
                "size_exponent",
                "shakeup",
                "clip",
                "momentum",
                "factor_masking",
                "warmup_steps",
                "on_nonfinite",
                "threads",
                "backend",
            )
        }
        return {"configuration": configuration, "state": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Come back with the default process group and without a scaler; set the attributes to give it others."""
        self.__dict__.update(pickled["configuration"])
        self.process_group = None
        self.scaler = None
        self._set_up()
        self.load_state_dict(pickled["state"])

    # ---- in DDP's thread --------------------------------------------------------------------------------------------

    def _take(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """Start work on one bucket."""
        gather = self._gather = self._gather or self._make_gather(bucket.buffer().device)
        step = self._step
        if bucket.is_last():
            self._step += 1
        if step < self.warmup_steps:
            self._dense_steps += bucket.is_last()
            return self._take_whole(bucket)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradwire-hook")
        buffer = bucket.buffer()
        job = _Job(
            index=bucket.index(),
            is_last=bucket.is_last(),
            step=step,
            buffer=buffer,
            parameters=bucket.parameters(),
            staging=Staging(buffer),
            done=torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None),
        )
        self._worker.submit(self._work, job, gather)
        # Errors arrive as a result, because a future of Python's cannot fail; this makes them one.
        return job.done.then(_result)

    def _take_whole(self, bucket: dist.GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """Average one bucket of the warm-up, with the momentum that later steps go on with."""
        buffer = bucket.buffer()
        if self.momentum == 0.0:
            return _average(self.process_group, buffer)
        if bucket.index() == 0:
            self._settle_warmup()
        staging = Staging(buffer)
        home = self._residuals.bucket(bucket.index(), bucket.parameters(), _dtype_of(buffer))
        staging.host.copy_(home.update(staging.fetch()))
        self._whole.append(home)

        def note(future: "torch.futures.Future[torch.Tensor]") -> torch.Tensor:
            self._is_whole_finite.append(bool(future.value().isfinite().all()))
            return future.value()

        return _average(self.process_group, staging.store()).then(note)

    def _settle_warmup(self) -> None:
        """Take a step of the warm-up back out of the momentum if it was not finite in some bucket."""
        if not all(self._is_whole_finite):
            for home in self._whole:
                home.revert()
        self._whole, self._is_whole_finite = [], []

    def _make_gather(self, device: torch.device) -> Gather:
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        group = dist.new_group(ranks, backend=self.backend, use_local_synchronization=True)
        where = device if self.backend == "nccl" else torch.device("cpu")
        _LOG.info("threshold hook: %d ranks, messages over %s", len(ranks), self.backend)
        return Gather(group, where)

    # ---- in the state's own thread ----------------------------------------------------------------------------------

    def _work(self, job: _Job, gather: Gather) -> None:
        """Encode and gather one bucket; after the last one, finish the step."""
        try:
            if job.index == 0:
                self._begin_step()
            self._jobs.append(job)
            begin_s = time.perf_counter()
            taken = job.taken = self._encode(job)
            payload = taken.payload
            encoded_s = time.perf_counter()
            job.gathered = gather(job.step, job.index, payload, taken.messages is None)
            self._encode_s += encoded_s - begin_s
            self._gather_s += time.perf_counter() - encoded_s
            self._message_bytes += payload.nbytes
            if job.is_last:
                self._residuals.check_all_taken()
                self._finish_step()
        except BaseException as error:
            self._fail(error)

    def _begin_step(self) -> None:
        """Follow the loss scale; give back what an interrupted step has taken."""
        self._settle_warmup()
        for job in self._jobs:
            _put_back(job)
        self._jobs = []
        if self.scaler is not None:
            scale = float(self.scaler.get_scale())
            if scale != self._scale:
                self._residuals.rescale(scale / self._scale)
                self._scale = scale

    def _encode(self, job: _Job) -> _Taken:
        bucket = self._residuals.bucket(job.index, job.parameters, _dtype_of(job.buffer))
        update = bucket.update(job.staging.fetch())
        try:
            messages = bucket.encode(update)
        except NonFiniteUpdate as error:
            _LOG.warning("step %d, bucket %d: %s", job.step, job.index, error)
            return _Taken(bucket, update, None)
        if self.on_nonfinite == "skip":
            bucket.forget_nonfinite()
        return _Taken(bucket, update, messages)

    def _finish_step(self) -> None:
        """Turn the gradients of all buckets into the average of what the ranks sent."""
        begin_s = time.perf_counter()
        jobs = self._jobs
        is_skipped = any(one.is_nonfinite for job in jobs for one in job.gathered)
        if is_skipped:
            _LOG.info("step %d is skipped: a gradient was not finite", jobs[0].step)
            for job in jobs:
                _undo(job)
                job.staging.fill(float("nan"))
        else:
            # All are checked before the first gradient changes.
            for job, payloads in [(job, _parse(job)) for job in jobs]:
                taken = _taken(job)
                job.staging.fill(0.0)
                for place, elements in enumerate(taken.bucket.ranges):
                    messages = [payload[place] for payload in payloads]
                    apply_many(
                        messages,
                        job.staging.host[elements],
                        scale=1.0 / len(messages),
                        threads=self.threads,
                    )
                if self.factor_masking and taken.messages:
                    taken.bucket.mask(taken.messages)
        self._jobs = []
        self._sparse_steps += 1
        self._skipped_steps += is_skipped
        for job in jobs:
            job.done.set_result(job.staging.store())
        self._apply_s += time.perf_counter() - begin_s

    def _fail(self, error: BaseException) -> None:
        """Fail all buckets of the step; what it has taken goes back."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            _undo(job)
        for job in jobs:
            job.done.set_result(error)


def threshold_hook(
    state: ThresholdState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over the ranks as threshold messages; see ``ThresholdState``.

    Args:
        state: of this rank and model.
        bucket: float32, float64, float16 or bfloat16 gradients in host or GPU memory; modified in place.

    Returns:
        A future of the bucket's buffer. It fails, and ``backward()`` with it, when the other ranks cannot be reached or
        are at another step.
    """
    return state._take(bucket)


def register_threshold_hook(
    model: torch.nn.parallel.DistributedDataParallel,
    state: ThresholdState | None = None,
    **options: Any,
) -> ThresholdState:
    """Register the hook with ``model``, whose names the residuals get in checkpoints, and return its state.

    Args:
        model: wrapped in DDP, before its first backward pass.
        state: one that was pickled, to go on with; None makes a new one.
        options: of ``ThresholdState``, for a new one.

    Raises:
        ValueError: the state has begun with another model, or an option is out of range.
        TypeError: ``model`` is not wrapped in DDP.
    """
    if not hasattr(model, "register_comm_hook"):
        raise TypeError(
            f"the hook is for DistributedDataParallel(model), got a {type(model).__name__} itself"
        )
    if state is None:
        state = ThresholdState(**options)
    elif options:
        raise ValueError(f"the state given has its options already: {', '.join(options)}")
    state.process_group = model.process_group
    state.name_parameters(model.module.named_parameters())
    model.register_comm_hook(state, threshold_hook)
    return state


def _dtype_of(buffer: torch.Tensor) -> str:
    """Return the dtype of the residual of a bucket's gradients."""
    return "float64" if buffer.dtype == torch.float64 else "float32"


def _average(
    group: dist.ProcessGroup | None, tensor: torch.Tensor
) -> "torch.futures.Future[torch.Tensor]":
    """Average a tensor whole, in place, as DDP does without a hook."""
    tensor.div_(dist.get_world_size(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _result(future: "torch.futures.Future[Any]") -> torch.Tensor:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


def _taken(job: _Job) -> _Taken:
    if job.taken is None:
        raise RuntimeError(f"bucket {job.index} of step {job.step} was not encoded")
    return job.taken


def _parse(job: _Job) -> list[list[Message]]:
    """Return everybody's messages for one bucket, by rank, one for each of its parameters."""
    payloads = [parse_many(one.payload) for one in job.gathered]
    for rank, messages in enumerate(payloads):
        try:
            _taken(job).bucket.check(messages)
        except ValueError as error:
            raise MessageError(
                f"rank {rank} sent for bucket {job.index} {error}: begin with the same model on all ranks"
            ) from error
    return payloads


def _put_back(job: _Job) -> None:
    """Return to the residuals what was taken out of them as messages."""
    if job.taken is not None and job.taken.messages is not None:
        job.taken.bucket.put_back(job.taken.messages)


def _undo(job: _Job) -> None:
    """Make residuals and velocity what they were before this step."""
    if job.taken is None:
        return
    _put_back(job)
    job.taken.bucket.take_out(job.taken.update)
