"""The same training with plain all-reduce and with gradwire: seconds, bytes, memory and loss, side by side."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..rendezvous import PORT_LAST, parse_address, placement
from ..transport import parse_secret
from .share import check_kinds, share

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..exchange import ExchangeOptions
    from ..sharing import Density

__all__ = [
    "KINDS",
    "PORT_VARIABLE",
    "Comparison",
    "Curve",
    "Finished",
    "Place",
    "Recorder",
    "ShapedLink",
    "check_steps",
    "compare",
]

#: ways to train: all-reduce; the same with other seeds, which shows what chance does to the loss; gradwire
KINDS = ("all-reduce", "other seeds", "gradwire")
STEPS_MIN = 20
PORT_VARIABLE = "GRADWIRE_COMPARE_PORT"
_WARM_UP = 3  # steps whose times do not count
_TIMED_ON_LINK = 20  # of all-reduce, whose losses do not depend on the link, and whose later steps go without its limit
_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel's
_LAST = 0.1  # part of the steps whose mean loss is compared
_FIRST_LOSS_TOLERANCE = 1e-3
_REPORT_TIMEOUT = timedelta(minutes=30)
_OTHER_SEEDS = 10_007

Step = Callable[[torch.nn.Module, Any, int], Any]


class Finished(BaseException):
    """The steps that were asked for are done; ends a script."""


class ShapedLink(Protocol):
    """What limits the rate between this process and the others, which are on this machine."""

    def wait(self, sent_bytes: int, begin_s: float) -> None:
        """Wait until the link would have carried so many bytes since ``begin_s`` (monotonic)."""

    def unlimit(self) -> None:
        """End the limit."""


@dataclass(frozen=True)
class Place:
    """A process among those that train: its rank, their number, and where rank 0 collects what they measure.

    The port is that of ``GRADWIRE_COMPARE_PORT``, or the one after the run's (MASTER_PORT), of TCP.
    """

    rank: int
    ranks: int
    host: str
    port: int

    @classmethod
    def from_env(cls) -> Place:
        """Return the place that a launcher gives this process.

        Raises:
            ValueError: there is no launcher, or only one process, or the port is none.
        """
        place = placement()
        if place.rank is None or not place.size or place.size < 2 or not place.seed:
            raise ValueError(
                "a comparison needs two processes or more, started by torchrun or another launcher; "
                "`gradwire compare -n 4 SCRIPT` starts them on this machine"
            )
        host, port = parse_address(place.seed)
        text = os.environ.get(PORT_VARIABLE) or str(port + 1)
        if not text.isdecimal() or not 0 < int(text) <= PORT_LAST:
            raise ValueError(f"{PORT_VARIABLE} is {text!r}, must be a port from 1 to {PORT_LAST}")
        return cls(place.rank, place.size, host, int(text))

    def open_store(self) -> dist.Store:
        """Return a store of the processes, which is in rank 0."""
        return dist.TCPStore(self.host, self.port, self.ranks, self.rank == 0, _REPORT_TIMEOUT)


@dataclass
class Measured:
    """What one process measures in one way to train.

    Attributes:
        losses: mean of the losses before each optimiser's step.
        step_s: seconds from the end of a step to the end of the next.
        exchange_s: seconds of each step that the process waited for the exchange.
        backward_s: seconds of each step in the backward pass.
        sent_bytes: by this process.
        memory_bytes: largest resident memory of the process so far.
        timed_end: number of the step, from 0, at which the times no longer count; None: those of all steps count.
    """

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    memory_bytes: int = 0
    timed_end: int | None = None


@dataclass(frozen=True)
class Curve:
    """One way to train, as all processes measured it.

    Attributes:
        losses: by step, the mean of all processes.
        first_loss: rank 0's; the others compute theirs before they have rank 0's parameters.
        step_s: median seconds of a step, in the slowest process.
        hidden_s: the same, with the exchange hidden behind the backward pass as far as possible.
        exchange_s: median seconds of a step in the exchange.
        step_bytes: sent per process and step.
        memory_bytes: largest resident memory of a process.
        timed_steps: of which the seconds are medians.
    """

    losses: list[float]
    first_loss: float
    step_s: float
    hidden_s: float
    exchange_s: float
    step_bytes: float
    memory_bytes: int
    timed_steps: int

    @classmethod
    def of(cls, kind: str, all_measured: Sequence[Measured]) -> Curve:
        """Return the means and medians over the processes.

        Args:
            kind: the way, of `KINDS`.
            all_measured: of all processes, by rank.

        Raises:
            ValueError: too few steps, or processes that have taken different numbers of steps, or no finite losses.
        """
        counts = sorted({len(each.losses) for each in all_measured})
        if not counts[-1]:
            raise ValueError(
                "the script has not called gradwire.torch.share, or step() of what it returned"
            )
        if counts[0] < STEPS_MIN or len(counts) > 1:
            steps = " or ".join(map(str, counts))
            raise ValueError(
                f"the processes have taken {steps} optimiser's steps with {kind}; all must take the same number, "
                f"{STEPS_MIN} or more: give the script more data or epochs"
            )
        if not all(math.isfinite(loss) for each in all_measured for loss in each.losses):
            raise ValueError(
                f"a loss of the training with {kind} is not a finite number, or backward() was not called on one"
            )
        # A program that uses all-reduce would hide it behind the backward pass, as DistributedDataParallel does.
        is_overlapped = kind != KINDS[2]
        timed = slice(_WARM_UP, all_measured[0].timed_end)
        slowest = max(all_measured, key=lambda measured: median(measured.step_s[timed]))
        times = zip(slowest.step_s, slowest.exchange_s, slowest.backward_s, strict=True)
        hidden = [
            step_s - (min(exchange_s, backward_s) if is_overlapped else 0.0)
            for step_s, exchange_s, backward_s in times
        ]
        return cls(
            losses=[
                fmean(losses) for losses in zip(*[m.losses for m in all_measured], strict=True)
            ],
            first_loss=all_measured[0].losses[0],
            step_s=median(slowest.step_s[timed]),
            hidden_s=median(hidden[timed]),
            exchange_s=median(slowest.exchange_s[timed]),
            step_bytes=fmean(m.sent_bytes / len(m.losses) for m in all_measured),
            memory_bytes=max(m.memory_bytes for m in all_measured),
            timed_steps=len(hidden[timed]),
        )

    @property
    def last_losses(self) -> list[float]:
        """Losses of the last tenth of the steps."""
        return self.losses[-max(2, round(_LAST * len(self.losses))) :]

    @property
    def last_loss(self) -> float:
        """Their mean."""
        return fmean(self.last_losses)


@dataclass(frozen=True)
class Comparison:
    """A training in three ways: with all-reduce, the same with other seeds, and with gradwire.

    Attributes:
        ranks: processes.
        link: the links between them, in words.
        plain, again, shared: the three ways.
    """

    ranks: int
    link: str
    plain: Curve
    again: Curve
    shared: Curve

    @property
    def speedup(self) -> float:
        """Time of a step with all-reduce, hidden behind the backward pass as far as possible, over gradwire's."""
        return self.plain.hidden_s / self.shared.step_s

    @property
    def loss_difference(self) -> float:
        """How much higher gradwire's last loss is, as a part of all-reduce's."""
        return _relative(self.shared.last_loss - self.plain.last_loss, self.plain.last_loss)

    @property
    def noise(self) -> float:
        """What chance does to all-reduce's last loss, as a part of it.

        It is how far other seeds move it, and at least twice the standard error of the mean.
        """
        last = self.plain.last_losses
        moved = abs(self.again.last_loss - self.plain.last_loss)
        spread = max(moved, 2.0 * stdev(last) / math.sqrt(len(last)))
        return _relative(spread, self.plain.last_loss)

    def check(self) -> None:
        """Raise `ValueError` unless the two trainings are the same but for the exchange."""
        first, other = self.plain.first_loss, self.shared.first_loss
        if not abs(_relative(other - first, first)) <= _FIRST_LOSS_TOLERANCE:
            raise ValueError(
                f"the first loss is {first:.6g} with all-reduce and {other:.6g} with gradwire, before anything was "
                "exchanged: the script draws other batches or parameters in every run; seed what it draws from"
            )

    def verdict(self) -> str:
        """Return the result in one sentence."""
        speed = f"{_rounded(self.speedup, 2)} times as fast"
        if self.speedup < 1.0:
            speed = f"slower: {_rounded(1.0 / self.speedup, 2)} times the time of all-reduce"
        loss = (
            f"{abs(self.loss_difference):.1%} {'higher' if self.loss_difference > 0 else 'lower'}"
        )
        is_chance = abs(self.loss_difference) <= self.noise
        chance = f"{'within' if is_chance else 'more than'} the {self.noise:.1%} that chance makes"
        steps = len(self.shared.losses)
        return f"{self.link}: {speed}; loss after {steps} steps {loss} ({chance})"

    def table(self) -> str:
        """Return the measurements of all-reduce and gradwire as a table."""
        plain, shared = self.plain, self.shared

        def row(label: str, figure: str, divisor: float, unit: str) -> tuple[str, str, str, str]:
            left, right = (getattr(curve, figure) / divisor for curve in (plain, shared))
            ratio = f"{_rounded(left / right)} times" if right else ""
            return label, f"{_rounded(left)} {unit}", f"{_rounded(right)} {unit}", ratio

        difference = f"{self.loss_difference:+.1%} (chance {self.noise:.1%})"
        rows = [
            ("", KINDS[0], KINDS[2], ""),
            ("steps timed", f"{plain.timed_steps}", f"{shared.timed_steps}", ""),
            row("step, median", "step_s", 1e-3, "ms"),
            row("step, all-reduce hidden behind backward", "hidden_s", 1e-3, "ms"),
            row("of it in the exchange", "exchange_s", 1e-3, "ms"),
            row("sent per process and step", "step_bytes", 1e6, "MB"),
            row("largest memory of a process", "memory_bytes", 1e6, "MB"),
            ("last loss", f"{plain.last_loss:.4g}", f"{shared.last_loss:.4g}", difference),
        ]
        return "\n".join(
            f"{label:42}{left:>14}{right:>14}  {note}".rstrip() for label, left, right, note in rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything that was measured, and the figures of the verdict, as JSON values."""
        figures = {name: getattr(self, name) for name in ("speedup", "loss_difference", "noise")}
        return {**asdict(self), **figures, "verdict": self.verdict()}


def compare(
    step_fn: Step,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 200,
    seed: int = 0,
    density: Density | None = None,
    update_scale: float | Literal["auto"] = "auto",
    **options: Unpack[ExchangeOptions],
) -> Comparison | None:
    """Train with plain all-reduce and with gradwire, from the same parameters and seeds, and compare.

    Call it in all processes of a launcher (torchrun, ``gradwire run --as-machines``). ``model`` and ``optimizer`` are
    copied for every way and stay as they are. Three trainings run one after another: all-reduce, all-reduce with other
    seeds, gradwire. The ranks train with their own batches; parameters are rank 0's.

    Args:
        step_fn: takes model, optimiser and the step's number, and does a step: ``zero_grad``, forward, ``backward`` of
            the loss, ``step``.
        model: to begin with.
        optimizer: of the model, to begin with.
        steps: optimiser's steps of each training, 20 or more.
        seed: from which every rank's generators (torch, NumPy, Python) begin in each training.
        density: as in `share`.
        update_scale: as in `share`.
        options: as in `share`.

    Returns:
        The comparison in rank 0, None in the others.

    Raises:
        ValueError: no launcher, no secret for several machines, fewer than 20 steps, or trainings that differ before
            anything was exchanged.

    Example:
        >>> def step(model, optimizer, number):
        ...     optimizer.zero_grad()
        ...     model(batches[number]).square().mean().backward()
        ...     optimizer.step()
        >>> comparison = gradwire.torch.compare(step, model, optimizer)  # doctest: +SKIP
        >>> print(comparison.verdict())  # doctest: +SKIP
    """
    place = Place.from_env()
    check_steps(steps)
    store = place.open_store()
    curves: list[Any] = []
    for kind in KINDS:
        begin = copy.deepcopy((model, optimizer))
        recorder = Recorder(kind, place, store, seed=seed)
        with recorder.watching():
            shared = recorder.share(*begin, density=density, update_scale=update_scale, **options)
            for step in range(steps):
                step_fn(begin[0], shared, step)
            shared.close()
        curves.append(recorder.gather())
    if place.rank:
        return None
    comparison = Comparison(place.ranks, f"{place.ranks} processes", *curves)
    comparison.check()
    return comparison


def check_steps(steps: int) -> None:
    """Raise `ValueError` if there are too few steps to compare."""
    if steps < STEPS_MIN:
        raise ValueError(
            f"steps is {steps}, must be {STEPS_MIN} or more: the last tenth is compared"
        )


class Recorder:
    """Trains in one of the ways of `KINDS`, and measures.

    Args:
        kind: the way.
        place: of this process.
        store: of all processes.
        seed: of the generators.
        stop_after: optimiser's steps after which `Finished` is raised; None: never.
        link: with a limited rate, between processes of this machine; None: the real one.
    """

    def __init__(
        self,
        kind: str,
        place: Place,
        store: dist.Store,
        *,
        seed: int = 0,
        stop_after: int | None = None,
        link: ShapedLink | None = None,
    ) -> None:
        self._kind = kind
        self._place = place
        self._seed = seed + place.rank + (_OTHER_SEEDS if kind == KINDS[1] else 0)
        self._stop_after = stop_after
        self._link = link
        self._measured = Measured()
        self._exchange: Any = None  # gradwire's
        self._losses: list[float] = []  # since the last step, as the next two
        self._exchange_s = self._backward_s = 0.0
        self._begin_s = self._last_s = 0.0
        self._sent_bytes = 0
        self._store = dist.PrefixStore(kind, store)
        self._group: Any = None
        self._set_seeds()

    def _set_seeds(self) -> None:
        torch.manual_seed(self._seed)
        np.random.seed(self._seed)  # noqa: NPY002  (what the user's script draws from)
        random.seed(self._seed)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the backward passes meanwhile, and take the calls of ``gradwire.torch.share``."""
        package: Any = sys.modules["gradwire.torch"]
        backward = torch.Tensor.backward

        def timed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            begin_s = time.monotonic()
            backward(tensor, *args, **kwargs)
            self._backward_s += time.monotonic() - begin_s
            if tensor.numel() == 1:
                self._losses.append(float(tensor.detach()))

        torch.Tensor.backward = timed  # type: ignore[method-assign]
        package.share = self.share
        try:
            yield
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            package.share = share
            if self._group is not None:
                # Its threads must be gone before the interpreter: they would end the process with SIGABRT.
                self._group.shutdown()
                self._group = None

    def share(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> Any:
        """Return an optimiser that trains the model in this recorder's way; of the first, the steps are measured."""
        # Before the trainings with all-reduce, which would take any optimiser, and need no secret.
        check_kinds(model, optimizer)
        if options.get("node") is None and not placement().is_alone(per_machine=True):
            parse_secret(None)
        if self._kind == KINDS[2]:
            made: Any = share(model, optimizer, **options)
        else:
            made = self._with_all_reduce(model, optimizer)
            if self._kind == KINDS[1]:
                self._set_seeds()  # the script may have set its own
        if not self._begin_s:
            exchange = getattr(made, "exchange", None)
            self._exchange = getattr(exchange, "exchange", exchange)  # of a team
            made.register_step_post_hook(self._on_step)
            self._begin_s = self._last_s = time.monotonic()
        return made

    def _with_all_reduce(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> torch.optim.Optimizer:
        """Let an optimiser average its gradients over all ranks before each step, and take a shared one's calls."""
        group = self._all_reduce_group()
        for tensor in (*model.parameters(), *model.buffers()):
            group.broadcast(tensor.detach(), 0).wait()

        def average(averaged: torch.optim.Optimizer) -> None:
            begin_s = time.monotonic()
            params = [
                param
                for each in averaged.param_groups
                for param in each["params"]
                if param.requires_grad
            ]
            grads = [_grad(param) for param in params]
            ranks = self._place.ranks
            for bucket in _buckets(grads):
                flat = torch.cat([grad.flatten() for grad in bucket])
                self._all_reduce_group().allreduce([flat]).wait()
                self._sent_bytes += 2 * (ranks - 1) * flat.numel() * flat.element_size() // ranks
                parts = flat.div_(ranks).split([grad.numel() for grad in bucket])
                for grad, part in zip(bucket, parts, strict=True):
                    grad.copy_(part.view_as(grad))
            for param, grad in zip(params, grads, strict=True):
                if param.grad.is_sparse:  # the optimiser may take no others
                    param.grad = grad.to_sparse(param.grad.sparse_dim())
            self._exchange_s += time.monotonic() - begin_s

        def average_before(averaged: torch.optim.Optimizer, given: Any, options: Any) -> Any:
            is_named = "closure" in options
            closure = options["closure"] if is_named else next(iter(given[1:]), None)
            if closure is None:
                average(averaged)
                return None

            def with_average() -> Any:
                loss = closure()  # makes the gradients, inside the step
                average(averaged)
                return loss

            if is_named:
                return given, {**options, "closure": with_average}
            return (averaged, with_average, *given[2:]), options

        optimizer.register_step_pre_hook(average_before)
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_Plain, kind), {})
        return optimizer

    def _all_reduce_group(self) -> Any:
        """Return the script's process group, or one of this recorder's own."""
        if dist.is_initialized():
            return dist.group.WORLD
        if self._group is None:
            store = dist.PrefixStore("gloo", self._store)
            ranks = self._place.rank, self._place.ranks
            self._group = dist.ProcessGroupGloo(store, *ranks, _REPORT_TIMEOUT)
        return self._group

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        measured = self._measured
        if self._exchange is not None:
            result = optimizer.result
            self._exchange_s += result.encode_s + result.wait_s + result.apply_s
        if self._link is not None:
            begin_s = time.monotonic()
            self._link.wait(self._all_sent_bytes(), self._begin_s)
            self._exchange_s += time.monotonic() - begin_s
        now_s = time.monotonic()
        measured.step_s.append(now_s - self._last_s)
        measured.exchange_s.append(self._exchange_s)
        measured.backward_s.append(self._backward_s)
        measured.losses.append(fmean(self._losses) if self._losses else math.nan)
        self._last_s = now_s
        self._exchange_s = self._backward_s = 0.0
        self._losses.clear()
        steps = len(measured.losses)
        if self._link is not None and self._kind != KINDS[2] and steps == _WARM_UP + _TIMED_ON_LINK:
            # The other steps would take minutes, and only their losses are still needed.
            self._link.unlimit()
            self._link = None
            measured.timed_end = steps
        if steps == self._stop_after:
            measured.sent_bytes = self._all_sent_bytes()
            raise Finished

    def _all_sent_bytes(self) -> int:
        """Return the bytes that this process has sent; of a team's workers the first sends for all."""
        if self._exchange is None:
            return self._sent_bytes
        snapshot = getattr(self._exchange, "metrics_snapshot", None)
        return 0 if snapshot is None else int(snapshot()["transport"]["udp_bytes_sent"])

    def gather(self) -> Curve | None:
        """Return what all ranks have measured, in rank 0, and None in the others.

        Raises:
            ValueError: as `Curve.of`.
        """
        measured = self._measured
        measured.sent_bytes = measured.sent_bytes or self._all_sent_bytes()
        measured.memory_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._store.set(str(self._place.rank), json.dumps(asdict(measured)))
        if self._place.rank:
            return None
        texts = [self._store.get(str(rank)) for rank in range(self._place.ranks)]
        everyone = [Measured(**json.loads(text)) for text in texts]
        return Curve.of(self._kind, everyone)


class _Plain(torch.optim.Optimizer):
    """What a script may call on a shared optimiser, for one that is not shared."""

    result = None

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Do nothing."""

    leave = join = resync = close

    def catch_up(self, timeout_s: float = 0.0) -> int:  # noqa: ARG002
        """Return 0: no step is open."""
        return 0

    def shared_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes nothing: the parameters are all ranks' already."""
        return contextlib.nullcontext()


def _grad(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, zeros where this rank has none; of a sparse gradient a dense copy."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad.to_dense() if param.grad.is_sparse else param.grad


def _buckets(grads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield neighbouring gradients of one dtype and device, some 25 MB at a time."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for grad in grads:
        is_other = bucket and (grad.dtype, grad.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (is_other or nbytes >= _BUCKET_BYTES):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(grad)
        nbytes += grad.numel() * grad.element_size()
    if bucket:
        yield bucket


def _rounded(value: float, digits: int = 3) -> str:
    """Return a number of so many digits, without an exponent where it is large."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def _relative(difference: float, reference: float) -> float:
    if reference:
        return difference / abs(reference)
    return math.copysign(math.inf, difference) if difference else 0.0  # a loss may become zero
