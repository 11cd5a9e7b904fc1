"""One worker of a training: a task of a barrier stage with its rows, its node and its copy of the model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ..clock import bounded_s, now_s
from ..codec import Encoder
from ..errors import Closed, GradwireError, Mismatch, PeerLost
from ..exchange import AnyExchange, Exchange, ExchangeStats, Groups, LocalTeam
from ..torch import SharedOptimizer
from ..torch.judge import is_adaptive, parameters_of
from ..transport import Limits, Node, Peer
from .checkpoints import Checkpoints, Position, pack, unpack
from .data import FEATURES, LABEL, WEIGHT, Spill, shuffled, spill
from .placement import teams_of
from .strategies import ParameterAveraging, SharedTraining
from .tasks import connect, hosts_of, pieces_of
from .watch import START_S, Watch, one_line, silence_limits

OUTPUT: Final = "worker bigint, kind string, part bigint, data binary"
CATCH_UP_S: Final = 0.2  # for the last messages of an asynchronous epoch
CONNECT_S: Final = 40.0  # machines that do not reach each other are an error within a minute
RESULT_BYTES: Final = 1 << 18  # of a row of the results: Java has space for such arrays
PIECE: Final = 1 << 22  # elements that are averaged at a time, 16 MiB
FAILURE_S: Final = (
    5.0  # for the other workers' errors, one of which may be the cause of this worker's
)

# Errors that another attempt may not have: a worker is gone, or did not come in time.
TRANSIENT: Final = (PeerLost, TimeoutError, Closed)


@dataclass(frozen=True)
class TrainingJob:
    """Everything that a worker needs for a training."""

    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[], Callable[..., torch.Tensor]]
    training: SharedTraining | ParameterAveraging
    columns: dict[str, Any]  #: the user's name of each role's column
    secret: bytes = field(repr=False)
    batch_size: int
    epochs: int
    seed: int
    device: str
    patience: int
    checkpoints: Checkpoints
    is_warm: bool  #: the epochs are counted from the checkpoint to resume from
    team_size: int  #: workers of a machine that send one message
    limits: Limits | None  #: of the workers' nodes
    is_shuffled: bool  #: the rows are assigned to the workers at random, rather than lie where they are trained on
    driver: str | None  #: address of the driver's node


@dataclass
class Times:
    """Seconds, bytes and rows of one worker in one epoch."""

    epoch: int = 0
    start_s: float = 0.0
    seconds: float = 0.0
    loss: float = 0.0
    rows: int = 0
    steps: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    shuffled_bytes: int = 0
    held_loss: float = 0.0
    held_weight: float = 0.0

    def add(self, before: ExchangeStats, after: ExchangeStats, *, is_leader: bool) -> None:
        """Count what an exchange did between two statements of its totals; only the leader of a team counts bytes."""
        for name in ("encode_s", "wait_s", "apply_s", "sent_bytes", "received_bytes"):
            if is_leader or not name.endswith("_bytes"):
                amount = getattr(after, name) - getattr(before, name)
                setattr(self, name, getattr(self, name) + amount)


_ALONE: Final = "ParameterAveraging(average_optimizer=False) averages the parameters alone"
# In which a worker's watch notices that its code hangs, after the time that is allowed.
_HANG_S: Final = 5.0
_LOSSES: Final = frozenset({"loss", "held_loss", "held_weight"})  # replaced by those of all workers


class Stopped(GradwireError):
    """Another worker reported an error.

    Attributes:
        is_final: whether another attempt would have the same error.
    """

    def __init__(self, *, is_final: bool) -> None:
        super().__init__("another worker failed")
        self.is_final = is_final


class LateWorkers(TimeoutError):
    """A worker did not come where all meet."""


class StageEnded(Closed):
    """Spark has ended the stage: another worker's process died, or the job was cancelled."""


def device_of(name: str) -> torch.device:
    """Return a task's device: "auto" is the GPU that Spark gave to the task, or else the CPU."""
    from pyspark import TaskContext

    if name == "cpu":
        return torch.device("cpu")
    context: Any = TaskContext.get()
    gpus = context.resources().get("gpu")
    if gpus is None:
        return torch.device("cpu" if name == "auto" else name)
    address = gpus.addresses[0]
    # Where CUDA shows some devices only, they have new numbers.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return torch.device("cuda", visible.index(address) if address in visible else int(address))


def rank_of_task() -> int:
    """Return the number of this task's partition."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return int(context.partitionId())


def _made(name: str, value: Any, kind: type) -> Any:
    """Return what a function of the user's has made, if it is of the right kind."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name}(...) has returned {value!r:.100}, must return a torch {kind.__name__}"
        )
    return value


def seed_torch(*key: int) -> None:
    """Seed torch's random numbers, such as those of dropout, differently for every key."""
    [seed] = np.random.SeedSequence(key).generate_state(1, np.uint64)
    torch.manual_seed(int(seed))


class ModelReplica:
    """A copy of the model with its optimiser and its loss."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.device = device_of(job.device)
        torch.manual_seed(job.seed)
        self.model = _made("model", job.model(), torch.nn.Module).to(self.device)
        made = job.optimizer(self.model.parameters())
        self.optimizer = _made("optimizer", made, torch.optim.Optimizer)
        self.loss = job.loss()
        # Of the optimiser's groups, as its function makes them.
        self.initial_options: list[dict[str, Any]] = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self.optimizer_classes = [kind.__name__ for kind in type(self.optimizer).__mro__]

    def continued(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimiser's state of a checkpoint, with the options for which its function has new values now.

        All others are as the training left them: a schedule may have changed them.

        Raises:
            ValueError: the state is of an optimiser of another class, which is no base class either.
        """
        optimizer: dict[str, Any] = state["optimizer"]
        # torch takes it, and misses its own options or state only in a step. Older checkpoints name no classes.
        classes = state.get("optimizer_classes", self.optimizer_classes)
        if classes[0] not in self.optimizer_classes and self.optimizer_classes[0] not in classes:
            raise ValueError(
                f"it has the state of an optimizer {classes[0]}, not {self.optimizer_classes[0]}"
            )
        groups = zip(
            optimizer["param_groups"],
            state.get("initial_options", self.initial_options),  # older checkpoints have none
            self.initial_options,
            strict=False,
        )
        for group, before, now in groups:
            group |= {name: now[name] for name in now.keys() & before if now[name] != before[name]}
        return optimizer

    def compute_gradients(self, rows: Spill, order: Iterator[Any], times: Times) -> None:
        """Compute the gradients of the next batch, and count its loss and rows.

        Raises:
            ValueError: the loss is not finite.
        """
        self.optimizer.zero_grad()
        start_s = now_s()
        batch = self._tensors(rows, next(order))
        times.data_s += now_s() - start_s
        loss = self._batch_loss(batch)
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(
                f"the loss is {value} in step {times.steps} of epoch {times.epoch}: lower the learning rate, or check "
                "the loss and the weights"
            )
        loss.backward()
        times.loss += value
        times.steps += 1
        times.rows += len(batch[LABEL])

    def score(
        self,
        held: Spill,
        times: Times,
        busy: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Add up the loss of the rows for validation, each batch in a block of ``busy``."""
        self.model.eval()
        for first in range(0, held.rows, self.job.batch_size):
            with busy(), torch.no_grad():
                rows = self._tensors(held, slice(first, first + self.job.batch_size))
                weight = rows[WEIGHT].sum().item() if WEIGHT in rows else len(rows[LABEL])
                times.held_loss += self._batch_loss(rows).item() * weight
            times.held_weight += weight

    def _tensors(self, rows: Spill, chosen: Any) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(np.array(array[chosen])).to(self.device)
            for name, array in rows.arrays.items()
        }

    def _batch_loss(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch, weighted if the rows have weights."""
        labels = rows[LABEL]
        weights = rows.get(WEIGHT)
        outputs = None
        try:
            outputs = self.model(rows[FEATURES])
            if outputs.dim() == labels.dim() + 1 and outputs.shape[-1] == 1:
                outputs = outputs.squeeze(-1)  # or else (n, 1) - (n,) would become (n, n)
            if outputs.shape == labels.shape and not labels.is_floating_point():
                labels = labels.to(outputs.dtype)  # numbers, not classes
            values = _made("loss", self.loss(outputs, labels), torch.Tensor)
        except Exception as error:
            batch = [f"{name} {rows[name].dtype} {tuple(rows[name].shape)}" for name in rows]
            text = f"model or loss failed with a batch of {', '.join(batch)}: {one_line(error)}"
            # Several outputs and one number per row may be classes, which StringIndexer gives as doubles.
            has_classes = isinstance(outputs, torch.Tensor) and outputs.dim() > labels.dim() == 1
            if has_classes and labels.is_floating_point():
                text += "; if the labels are classes, cast their column to int"
            raise GradwireError(text) from error
        if weights is None:
            return values.mean()
        if values.shape[:1] != weights.shape:
            raise ValueError(
                'with weight_col the loss must return one value per row: give it reduction="none"'
            )
        values = values.flatten(1).mean(1) if values.dim() > 1 else values
        return values @ weights / weights.sum().clamp(min=1e-30)  # all may have weight zero


def epoch_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the history's rows of one epoch: every worker's `Times`, with the losses of all instead of its own."""
    totals = {name: sum(row[name] for row in rows) for name in ("steps", *_LOSSES)}
    mean = {"loss": totals["loss"] / totals["steps"], "validation_loss": math.nan}
    if totals["held_weight"]:
        mean["validation_loss"] = totals["held_loss"] / totals["held_weight"]
    return [{**{name: row[name] for name in row if name not in _LOSSES}, **mean} for row in rows]


def is_over(losses: list[float], patience: int) -> bool:
    """Return whether training stops early: ``patience`` epochs, if it is not 0, have passed since the best one."""
    return bool(losses) and 0 < patience < len(losses) - best_epoch(losses)


def best_epoch(losses: list[float]) -> int:
    """Return the index of the least loss, which is NaN only if all are."""
    return min(range(len(losses)), key=lambda epoch: (math.isnan(losses[epoch]), losses[epoch]))


def gather(context: Any, timeout_s: float | None, value: Any = None, **error: bool) -> list[Any]:
    """Return every worker's value; wait for the others.

    Args:
        context: of the task.
        timeout_s: longest wait; None: Spark's own, a year.
        value: anything that JSON has.
        error: ``is_final=``, if this worker failed.

    Raises:
        Stopped: a worker failed.
        LateWorkers: a worker did not come in time.
        StageEnded: Spark has ended the stage meanwhile.
    """
    texts: list[str] = []
    failures: list[Exception] = []
    # The executor's Java may stand still for longer than PySpark's 15 s. This function ends the wait itself.
    os.environ["SPARK_AUTH_SOCKET_TIMEOUT"] = "1000000"

    def wait() -> None:
        try:
            texts.extend(context.allGather(json.dumps({"value": value, **error})))
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(bounded_s(timeout_s))
    if failures:
        raise StageEnded("Spark has ended the stage") from failures[0]
    if not texts:
        raise LateWorkers(f"not all workers came within {timeout_s:g} s")
    answers = [json.loads(text) for text in texts]
    errors = [answer["is_final"] for answer in answers if "is_final" in answer]
    if errors:
        raise Stopped(is_final=any(errors))
    return [answer["value"] for answer in answers]


def lost_workers(names: dict[int, str], members: Sequence[Peer]) -> str:
    """Return a text about the workers, by number, that are no members any more."""
    present = {peer.id for peer in members}
    lost = [name for number, name in names.items() if number not in present]
    return f"{', '.join(lost) or 'another worker'} is gone"


def check_weights(job: TrainingJob, *, has_rows: bool, has_held: bool) -> None:
    """Raise if there are no rows to train on, or with patience none for validation, of a weight other than zero."""
    weight = job.columns.get(WEIGHT)
    if not has_rows:
        raise ValueError(f"all rows to train on have weight 0 in column {weight!r}")
    if job.patience and not has_held:
        kind = "" if weight is None else f" with a weight above 0 in column {weight!r}"
        raise ValueError(f"patience needs rows for validation{kind}, and there are none")


class SharedTrainer:
    """Threshold messages after every step of the optimiser.

    Args:
        training: how the workers train together.
        optimizer: of this worker's model.
        node: of this machine's team; None: another worker of the team has it.
        team: the team's name, this worker's place in it, and its size.
        machines: number of teams.
        model: of this worker, whose order of parameters is the same on all; None: that of the optimiser is.
    """

    def __init__(
        self,
        training: SharedTraining,
        optimizer: torch.optim.Optimizer,
        node: Node | None,
        team: tuple[str, int, int],
        machines: int,
        model: torch.nn.Module | None = None,
    ) -> None:
        name, rank, size = team
        named = () if model is None else model.named_parameters()
        names = {param: key for key, param in named}
        self.exchange: AnyExchange
        if node is not None:
            groups = Groups.of(
                parameters_of(optimizer, names),
                training.threshold,
                is_adaptive=is_adaptive(optimizer),
                shakeup=training.shakeup,
                clip=training.clip,
                every=training.options.every,
            )
            options: dict[str, Any] = {**asdict(training.options), "min_peers": machines - 1}
            self.exchange = lead = Exchange(groups, node, **options)
        self.team: LocalTeam | None = None
        if size > 1:
            reduction = training.options.reduction
            timeout_s = training.options.timeout_s
            self.team = LocalTeam(
                name, size=size, rank=rank, reduction=reduction, timeout_s=timeout_s
            )
            self.exchange = self.team.follow() if rank else self.team.lead(lead)
        self.optimizer = SharedOptimizer(optimizer, self.exchange, update_scale="auto", names=names)
        self._names = {} if node is None else node.names
        self.is_async = not training.options.is_sync
        self._overlaps = training.options.overlap > 0
        self._has_local_steps = False
        self._others = machines - 1

    def step(self, times: Times) -> None:
        """Take a step, and count its exchange.

        Raises:
            PeerLost: another worker is gone.
        """
        before = self.exchange.stats
        self.optimizer.step()
        self._count(before, times)
        # The exchange would go on with those that are left. Spark repeats the stage with all workers instead, from the
        # last checkpoint, so that every row is trained on equally often.
        is_whole = self.exchange.present == self.exchange.workers
        if len(self.exchange.members) < self._others or not is_whole:
            raise PeerLost(lost_workers(self._names, self.exchange.members))

    def end_epoch(self, times: Times) -> None:
        """Exchange the remaining local steps, and add the messages that are still to come.

        Raises:
            PeerLost: another worker is gone.
        """
        while self.exchange.has_local_steps or self._has_local_steps:
            self.optimizer.zero_grad()  # without gradients a step moves nothing
            self.step(times)
        if self.is_async or self._overlaps:
            before = self.exchange.stats
            self.optimizer.catch_up(CATCH_UP_S)
            self._count(before, times)

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Let the model hold the parameters that all workers share."""
        return self.optimizer.shared_parameters()

    def _count(self, before: ExchangeStats, times: Times) -> None:
        after = self.exchange.stats
        # Neither a team's ``has_local_steps`` nor the step's result tells that the step was a local one: a step that
        # ends an overlapped exchange returns the result of that exchange. The totals do.
        self._has_local_steps = after.local_steps > before.local_steps
        times.add(before, after, is_leader=self.exchange.rank == 0)


class AveragingTrainer:
    """The mean of parameters, and of the optimiser's state, every few steps.

    Args:
        training: how often, and of what.
        replica: this worker's model and optimiser.
        node: of this worker.
        workers: number of workers.
        steps: of the epoch that are done already, as where a checkpoint lies between two averages.
    """

    team = None
    is_async = False

    def __init__(
        self,
        training: ParameterAveraging,
        replica: ModelReplica,
        node: Node,
        workers: int,
        steps: int = 0,
    ) -> None:
        self.optimizer = replica.optimizer
        self._replica = replica
        self._training = training
        self._node = node
        self._others = workers - 1
        self._steps = steps % training.every  # since the last average
        self._numel = 0  # number of values that are averaged
        # Made at the first average: before its first step an optimiser may have no state to average.
        self._exchange: Exchange | None = None
        self._residual = np.empty(0, np.float32)  # of the exchange's encoder
        # A message has finite numbers only. A mask with infinities is the same on all workers, which begin alike.
        self._left_out = frozenset(
            name
            for name, buffer in replica.model.named_buffers()
            if buffer.is_floating_point() and buffer.isinf().any()
        )

    def step(self, times: Times) -> None:
        """Take a step, and average if it is time to.

        Raises:
            PeerLost: another worker is gone.
        """
        self.optimizer.step()
        self._steps += 1
        if self._steps == self._training.every:
            self.end_epoch(times)

    def end_epoch(self, times: Times) -> None:
        """Average if there were steps since the last average.

        Raises:
            PeerLost: another worker is gone.
            ValueError: the workers have other numbers of values.
        """
        if not self._steps:
            return
        self._steps = 0
        values = Averaged(self._replica, self._training, self._left_out)
        if self._exchange is None:
            self._numel = values.numel
            # All workers have to cut the pieces out of the same tensors.
            encoder = Encoder(min(PIECE, values.numel), threshold=1.0, key=values.checksum)
            options: Any = {
                "codec": "dense",
                "topology": "mesh",
                "min_peers": self._others,
                "timeout_s": self._training.timeout_s,
                # A worker whose code hangs before the first average ends itself meanwhile, and is named for it.
                "start_timeout_s": self._training.timeout_s + _HANG_S,
            }
            self._residual = encoder.residual
            self._exchange = Exchange(encoder, self._node, **options)
        if values.numel != self._numel:
            raise ValueError(
                f"the optimiser's state has changed its size: {values.numel} values instead of {self._numel} are to be "
                f"averaged; {_ALONE}"
            )
        before = self._exchange.stats
        # In pieces: an exchange holds its messages of several steps, with AdamW each three times the parameters.
        mean = np.zeros_like(self._residual)
        try:
            if not before.steps:
                # With a residual of zero: that of two workers without rows is the same, and would be refused for it.
                start_s = now_s()
                self._exchange.join(mean)
                times.wait_s += now_s() - start_s
            for first in range(0, values.numel, mean.size):
                size = min(mean.size, values.numel - first)
                values.copy_to(self._residual[:size], first)
                mean.fill(0.0)
                self._exchange.step(None, mean)  # sends the residual, and leaves zeros
                if len(self._exchange.members) < self._others:
                    raise PeerLost(lost_workers(self._node.names, self._exchange.members))
                values.copy_from(mean[:size], first)
        except Mismatch as error:
            raise ValueError(
                f"not all workers' optimisers have a state of the same parameters, as where a parameter has "
                f"gradients on some workers only ({error}); {_ALONE}"
            ) from error
        times.add(before, self._exchange.stats, is_leader=True)

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: at the end of an epoch all parameters are the mean."""
        return contextlib.nullcontext()


class Averaged:
    """Everything that is averaged, as one sequence of float32: parameters, the model's and the optimiser's statistics.

    Args:
        replica: the model and its optimiser.
        training: whether the optimiser's state is averaged.
        left_out: names of the model's buffers that are not averaged.

    Attributes:
        numel: number of values.
        checksum: of the tensors' sizes.

    Raises:
        TypeError: a parameter is complex.
    """

    def __init__(
        self,
        replica: ModelReplica,
        training: ParameterAveraging,
        left_out: Collection[str] = (),
    ) -> None:
        params = parameters_of(replica.optimizer, replica.model.parameters())
        tensors = [param.detach() for param in params]
        tensors += [
            buffer
            for name, buffer in replica.model.named_buffers()
            if buffer.is_floating_point() and name not in left_out
        ]
        if training.average_optimizer:
            states = [replica.optimizer.state.get(param, {}) for param in params]
            values = [state[name] for state in states for name in sorted(state)]
            tensors += [value for value in values if is_averaged(value)]
        for tensor in tensors:
            if tensor.is_complex():
                raise TypeError(
                    f"parameters of {tensor.dtype} cannot be averaged; torch.view_as_real views complex ones as "
                    "floating-point ones"
                )
        self._tensors = tensors
        sizes = np.array([tensor.numel() for tensor in tensors], np.int64)
        self._ends = np.cumsum(sizes)
        self.numel = int(sizes.sum())
        self.checksum = zlib.crc32(sizes.tobytes())

    def copy_to(self, piece: NDArray[np.float32], first: int = 0) -> None:
        """Copy values, from number ``first`` on, into an array."""
        target = torch.from_numpy(piece)
        for tensor, start, place in self._cut(first, len(piece)):
            part = target[place]
            part.copy_(tensor.reshape(-1)[start : start + len(part)])

    def copy_from(self, piece: NDArray[np.float32], first: int = 0) -> None:
        """Copy an array into the values from number ``first`` on."""
        source = torch.from_numpy(piece)
        for tensor, start, place in self._cut(first, len(piece)):
            part = source[place]
            flat = tensor.reshape(-1)
            flat[start : start + len(part)].copy_(part)
            if flat.data_ptr() != tensor.data_ptr():  # a copy, of a tensor with another layout
                tensor.copy_(flat.reshape(tensor.shape))

    def _cut(self, first: int, size: int) -> Iterator[tuple[torch.Tensor, int, slice]]:
        """Yield the tensors of a piece, with the first element in each, and the tensor's place in the piece."""
        index = int(np.searchsorted(self._ends, first, side="right"))
        done = 0
        while done < size:
            tensor = self._tensors[index]
            start = first + done - (int(self._ends[index]) - tensor.numel())
            stop = min(done + tensor.numel() - start, size)
            if stop > done:
                yield tensor, start, slice(done, stop)
            done = stop
            index += 1


def is_averaged(value: Any) -> bool:
    """Return whether a value of an optimiser's state is averaged."""
    return torch.is_tensor(value) and value.is_floating_point()


class Worker(ModelReplica):
    """The training of one task."""

    def __init__(self, job: TrainingJob, context: Any, watch: Watch) -> None:
        with watch.busy():
            super().__init__(job)
        self.context = context
        self.watch = watch
        self.rank = context.partitionId()
        self.workers = len(context.getTaskInfos())
        torch.set_num_threads(max(1, context.cpus()))
        self.teams = teams_of(hosts_of(context), job.team_size)
        self.leads = sorted(team[0] for team in self.teams)
        # Without end for the others' rows: Spark may have to compute them anew, as after an executor was lost, and
        # watches over its executors itself.
        self.longest_wait_s: float | None = None
        self.trainer: SharedTrainer | AveragingTrainer
        self.history: list[dict[str, Any]] = []  # this worker's rows
        self.losses: list[float] = []  # with patience: the validation loss of every epoch
        self.best: dict[str, Any] = {}  # with patience: the state of the model to return
        self.unfinished: dict[str, Any] = {}  # at a checkpoint within an epoch: its `Times` so far

    def run(
        self, batches: Iterator[pa.RecordBatch], stack: contextlib.ExitStack
    ) -> list[tuple[str, bytes]]:
        """Train; return the history and the model, from one worker only. The connections end with the stack."""
        training, held = spill(batches, f"worker {self.rank}", self.job.columns)
        names: list[str] = []
        while not names:
            with self.watch.busy():
                position, state = self.job.checkpoints.read(
                    self.rank, self.workers, self.leads, is_warm=self.job.is_warm
                )
            steps, names = self.agree(training, held, position)
            self.longest_wait_s = max(self.job.training.timeout_s, START_S)
        self.connect(stack, names, position.step)
        self.longest_wait_s = self.job.training.timeout_s
        if state:
            self.load(state)
        if isinstance(self.trainer.optimizer, SharedOptimizer):
            self.trainer.optimizer.join()
        return self.train(training, held, steps, position)

    def gather(self, value: Any = None) -> list[Any]:
        """Return every worker's value, see the function `gather`."""
        self.watch.tell_wait()
        return gather(self.context, self.longest_wait_s, value)

    def agree(self, training: Spill, held: Spill, position: Position) -> tuple[int, list[str]]:
        """Return the number of steps per epoch, the same for all workers, and a name of each for its team.

        There are no names if the workers have read different checkpoints, as where the first one of an earlier attempt
        ended its checkpoint in between.
        """
        # Of the features and of the labels: 0 for single numbers.
        widths = [
            sum(training.arrays[role].shape[1:]) for role in (FEATURES, LABEL) if training.rows
        ]
        # Another attempt of the stage may still hold the memory of a team, so every attempt has another name.
        name = secrets.token_hex(12)
        counts = [training.rows, training.weight, held.weight]
        answers = self.gather([*counts, name, *widths, asdict(position)])
        rows = sum(answer[0] for answer in answers)
        if not rows:
            raise ValueError("there are no rows to train on")
        for index, role in ((4, FEATURES), (5, LABEL)):
            different = sorted({answer[index] for answer in answers if answer[0]})
            if len(different) > 1:
                raise ValueError(
                    f"column {self.job.columns[role]!r} has rows of {different[0]} values and of {different[1]}"
                )
        check_weights(
            self.job,
            has_rows=any(answer[1] for answer in answers),
            has_held=any(answer[2] for answer in answers),
        )
        steps = math.ceil(rows / (self.workers * self.job.batch_size))
        is_same = all(answer[-1] == answers[0][-1] for answer in answers)
        return steps, [f"spark-{answer[3]}" for answer in answers if is_same]

    def connect(self, stack: contextlib.ExitStack, names: list[str], steps: int) -> None:
        """Connect the nodes, one per team, and create the exchange over them, after so many steps of an epoch."""
        training = self.job.training
        limits = silence_limits(self.job.limits, training.timeout_s)
        try:
            node = connect(
                self.context,
                self.gather,
                self.leads,
                self.job.secret,
                training.network_mask,
                training.port,
                CONNECT_S,
                limits=limits,
            )
        except TimeoutError as error:
            if isinstance(error, LateWorkers):
                raise
            raise GradwireError(str(error)) from error  # another attempt would not connect, too
        if node is not None:
            stack.callback(node.close, 1.0)
        if isinstance(training, SharedTraining):
            [ranks] = [team for team in self.teams if self.rank in team]
            place = names[ranks[0]], ranks.index(self.rank), len(ranks)
            self.trainer = SharedTrainer(
                training, self.optimizer, node, place, len(self.leads), self.model
            )
        else:
            # Without teams every worker has a node.
            workers = len(self.leads)
            self.trainer = AveragingTrainer(training, self, cast("Node", node), workers, steps)
        if self.trainer.team is not None:
            stack.callback(self.trainer.team.close)
        # Behind the optimiser's own step, which may run code of the user's, the worker waits for the others.
        self.optimizer.register_step_post_hook(lambda *_: self.watch.rest())

    def train(
        self, training: Spill, held: Spill, steps: int, position: Position
    ) -> list[tuple[str, bytes]]:
        """Train epoch after epoch, all workers for the same number of steps."""
        job = self.job
        done = position.steps_done(steps, self.workers * job.batch_size)
        order = shuffled(training.rows, job.batch_size, [job.seed, self.rank])
        # The rows of a training that continues are those of one without a break.
        for _ in range(done):
            next(order)
        before = self.unfinished or [asdict(Times()), *self.history][-1]
        began_s = now_s() - before["start_s"] - before["seconds"]
        shuffled_bytes = (training.nbytes + held.nbytes) * job.is_shuffled
        last = job.epochs + position.first_epoch * job.is_warm
        for epoch in range(done // steps, last):
            if is_over(self.losses, job.patience):
                break
            times = Times(epoch=epoch, start_s=now_s() - began_s)
            if self.unfinished.get("epoch") == epoch:
                times = Times(**self.unfinished)
            times.shuffled_bytes += shuffled_bytes
            shuffled_bytes = 0
            self.model.train()
            # With the numbers of the initial parameters, all workers would drop the same units. At each epoch, so that
            # a fit that continues another at the end of an epoch has the numbers of a fit without a break.
            seed_torch(job.seed, done, self.rank)
            while done < (epoch + 1) * steps:
                self.step(training, order, times)
                done += 1
                if job.checkpoints.is_due(done - 1, done) and done % steps:
                    times.seconds = now_s() - began_s - times.start_s
                    self.unfinished = asdict(times)
                    self.save(done, steps, position.first_epoch)
            self.unfinished = {}
            self.end_steps(times)
            with self.trainer.shared():
                self.score(held, times, self.watch.busy)
                times.seconds = now_s() - began_s - times.start_s
                exchange_s = times.encode_s + times.wait_s + times.apply_s
                times.compute_s = times.seconds - times.data_s - exchange_s
                self.end_epoch(times)
            # At the end of an epoch with the epoch's losses; at that of the fit there is a checkpoint anyway.
            is_last = epoch + 1 == last or is_over(self.losses, job.patience)
            if job.checkpoints.is_due(done - 1, done) and not is_last:
                self.save(done, steps, position.first_epoch)
        self.end_steps(Times())  # of a checkpoint after the last step
        if job.checkpoints.folder is not None:
            self.save(done, steps, position.first_epoch)
        state = b""
        if self.rank == 0:
            with self.watch.busy(), self.trainer.shared():
                state = pack(self.best or self.model.state_dict())
        # An error before this point reaches all workers. If this worker failed just when the others end, Spark would
        # repeat it alone.
        histories = self.gather(self.history)
        if self.rank != 0:
            return []
        history = [row for epoch in zip(*histories, strict=True) for row in epoch_rows(epoch)]
        return [
            ("history", json.dumps(history).encode()),
            ("first_epoch", b"%d" % position.first_epoch),
            ("model", state),
        ]

    def step(self, training: Spill, order: Iterator[Any], times: Times) -> None:
        """Take one step together with the others."""
        if training.rows:
            with self.watch.busy():
                self.compute_gradients(training, order, times)
        else:
            for param in parameters_of(self.optimizer):
                if param.requires_grad:  # or else weight decay would move what is frozen elsewhere
                    param.grad = torch.zeros_like(param)
        with self.watch.busy():
            self.trainer.step(times)
        self.watch.note_start()

    def end_steps(self, times: Times) -> None:
        """Exchange the remaining local steps, once all workers have taken all steps."""
        start_s = now_s()
        if self.trainer.is_async:
            self.gather()
            times.wait_s += now_s() - start_s
        self.trainer.end_epoch(times)

    def end_epoch(self, times: Times) -> None:
        """Add an epoch to the history, with patience also to the losses.

        All workers wait for each other only where they have to decide: a barrier of Spark takes a second.
        """
        row = {"worker": self.rank, **asdict(times)}
        self.history.append(row)
        self.watch.tell("epoch", row=row)  # the driver has the history at the end, too
        if self.job.patience:
            self.losses.append(epoch_rows(self.gather(row))[0]["validation_loss"])
            if best_epoch(self.losses) == len(self.losses) - 1:
                self.best = unpack(pack(self.model.state_dict()))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, done: int, steps: int, first_epoch: int) -> None:
        """Write this worker's state; once all have, make the checkpoint the latest."""
        with self.watch.busy(), self.trainer.shared():
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.trainer.optimizer.state_dict(),
                "initial_options": self.initial_options,
                "optimizer_classes": self.optimizer_classes,
            }
            names = "history", "losses", "best", "unfinished"
            attempt = {name: getattr(self, name) for name in names}
            self.job.checkpoints.write(done, self.rank, {**state, "attempt": attempt})
        self.gather()
        if self.rank == 0:
            epoch, step = divmod(done, steps)
            step_rows = self.workers * self.job.batch_size
            position = Position(epoch, step, step_rows, first_epoch)
            with self.watch.busy():
                self.job.checkpoints.finish(done, self.workers, position, self.leads)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        with self.job.checkpoints.named_if_other():
            self.model.load_state_dict(state["model"])
            self.trainer.optimizer.load_state_dict(self.continued(state))
        attempt = state.get("attempt", {})
        vars(self).update(attempt)
        if not self.job.patience:  # the earlier fit had it
            self.losses, self.best = [], {}


def train(job: TrainingJob, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one worker; yield its results in pieces, or its error.

    An error that every attempt would have is returned as a result: if it were raised, Spark would repeat the stage.

    Raises:
        PeerLost, TimeoutError, Closed: another worker is gone or hangs; Spark repeats the stage.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    timeout_s = job.training.timeout_s
    results: list[tuple[str, bytes]] = []
    with (
        contextlib.closing(
            Watch(job.driver, job.secret, (context.taskAttemptId(), rank), timeout_s)
        ) as watch,
        contextlib.ExitStack() as stack,
    ):
        try:
            results = Worker(job, context, watch).run(batches, stack)
        except Stopped as stopped:
            if not stopped.is_final:
                raise PeerLost("another worker failed") from None
        except StageEnded:
            raise  # Spark knows why
        except (Exception, SystemExit) as error:  # code of the user's may exit, as argparse does
            text = f"{one_line(error)} (on {hosts_of(context)[rank]})"
            trace = "".join(traceback.format_exception(error))[-8000:]
            is_final = not isinstance(error, TRANSIENT)
            watch.tell(
                "error",
                text=text,
                trace=trace,
                is_final=is_final,
                is_late=isinstance(error, LateWorkers),
            )
            # Not before the driver knows why: the other workers tell it that this one is gone.
            stack.close()
            try:
                gather(context, timeout_s if is_final else FAILURE_S, is_final=is_final)
            except Stopped as stopped:
                if not stopped.is_final:
                    raise error from None
            except (TimeoutError, StageEnded):
                raise error from None
            if is_final:
                results = [("error", f"{text}\n{trace}".encode(errors="backslashreplace"))]
    for kind, data in results:
        for part, piece in enumerate(pieces_of(data, RESULT_BYTES)):
            row = {"worker": rank, "kind": kind, "part": part, "data": piece}
            yield pa.RecordBatch.from_pylist([row])
