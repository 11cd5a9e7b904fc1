"""One worker of a training: a task of a barrier stage with its rows, its node and its copy of the model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from ..codec import Encoder
from ..errors import GradwireError, PeerLost, TransportError
from ..exchange import Exchange, Groups, LocalExchange, LocalTeam, StepResult
from ..exchange.clock import now_s
from ..torch import SharedOptimizer
from ..torch.optimizer import parameters_of
from ..transport import Node
from .checkpoints import Checkpoints, pack, unpack
from .data import FEATURES, LABEL, WEIGHT, Shuffled, Spill, spill
from .masters import ParameterAveraging, SharedTraining
from .placement import host_of, teams_of, where_to_bind
from .tasks import pieces_of

__all__ = ["OUTPUT", "Job", "Times", "device_of", "held_loss", "learn", "tensors", "train"]

OUTPUT: Final = "worker int, kind string, part int, data binary"
_ARROW: Final = pa.schema(
    {"worker": pa.int32(), "kind": pa.string(), "part": pa.int32(), "data": pa.binary()}
)
CONNECT_S: Final = 40.0  # machines that do not reach each other are an error within a minute


@dataclass(frozen=True)
class Job:
    """All that a worker has to know."""

    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[], Callable[..., torch.Tensor]]
    training: SharedTraining | ParameterAveraging
    secret: bytes
    batch_size: int
    epochs: int
    seed: int
    device: str
    patience: int
    checkpoints: Checkpoints
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
    held_loss: float = 0.0
    held_weight: float = 0.0

    def add(self, result: StepResult | None) -> None:
        """Count an exchange."""
        if result is not None:
            for name in ("encode_s", "wait_s", "apply_s", "sent_bytes", "received_bytes"):
                setattr(self, name, getattr(self, name) + getattr(result, name))


class Stopped(GradwireError):
    """Another worker failed, and said so."""


def device_of(name: str) -> torch.device:
    """Return a task's device: "auto" is the GPU that Spark gave to the task, or else the CPU."""
    from pyspark import TaskContext

    if name == "cpu":
        return torch.device("cpu")
    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    if gpus is None:
        return torch.device("cpu" if name == "auto" else name)
    address = gpus.addresses[0]
    # Where CUDA shows some devices only, they have new numbers.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return torch.device("cuda", visible.index(address) if address in visible else int(address))


def batch_loss(
    loss: Callable[..., torch.Tensor], outputs: torch.Tensor, rows: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the mean loss of a batch, weighted if the rows have weights."""
    labels = rows[LABEL]
    if outputs.dim() == labels.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)  # or else (n, 1) - (n,) would become (n, n)
    values = loss(outputs, labels)
    weights = rows.get(WEIGHT)
    if values.dim() == 0:
        if weights is not None:
            raise ValueError(
                'with weight_col the loss must return one value per row: give it reduction="none"'
            )
        return values
    values = values.flatten(1).mean(1) if values.dim() > 1 else values
    return values.mean() if weights is None else (values * weights).sum() / weights.sum()


def tensors(rows: Spill, chosen: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return rows as tensors on the device."""
    return {
        name: torch.from_numpy(np.array(array[chosen])).to(device)
        for name, array in rows.arrays.items()
    }


def learn(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., torch.Tensor],
    rows: dict[str, torch.Tensor],
    times: Times,
) -> None:
    """Compute the gradients of a batch, and count its loss and rows.

    Raises:
        ValueError: the loss is not finite.
    """
    optimizer.zero_grad()
    found = batch_loss(loss, model(rows[FEATURES]), rows)
    value = found.item()
    if not math.isfinite(value):
        raise ValueError(
            f"the loss is {value} in step {times.steps} of epoch {times.epoch}: lower the learning rate, or look "
            "for such values in the features"
        )
    found.backward()
    times.loss += value
    times.steps += 1
    times.rows += len(rows[LABEL])


def held_loss(
    model: torch.nn.Module,
    loss: Callable[..., torch.Tensor],
    held: Spill,
    batch_size: int,
    device: torch.device,
) -> tuple[float, float]:
    """Return the sum of the loss over rows for validation, and the rows' total weight."""
    model.eval()
    total = weights = 0.0
    for first in range(0, held.rows, batch_size):
        rows = tensors(held, slice(first, first + batch_size), device)
        weight = rows[WEIGHT].sum().item() if WEIGHT in rows else len(rows[LABEL])
        with torch.no_grad():
            total += batch_loss(loss, model(rows[FEATURES]), rows).item() * weight
        weights += weight
    return total, weights


def gather(context: Any, message: dict[str, Any]) -> list[Any]:
    """Return every worker's value; raise `Stopped` if one sent an error."""
    found = [json.loads(text) for text in context.allGather(json.dumps(message))]
    if any("error" in one for one in found):
        raise Stopped("another worker failed")
    return [one["value"] for one in found]


class Sharing:
    """Threshold messages after every step of the optimiser."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        training: SharedTraining,
        node: Node | None,
        team: tuple[str, int, int],
        machines: int,
    ) -> None:
        params = parameters_of(optimizer)
        options: Any = {} if training.topology == "auto" else {"topology": training.topology}
        name, rank, size = team
        self.exchange: Exchange | LocalExchange
        if node is not None:
            self.exchange = lead = Exchange(
                Groups.of(params, training.threshold),
                node,
                min_peers=machines - 1,
                mode=training.mode,
                every=training.every,
                apply_residual=True,
                **options,
            )
        self.team: LocalTeam | None = None
        if size > 1:
            self.team = LocalTeam.join(name, size=size, rank=rank, timeout_s=CONNECT_S)
            self.exchange = self.team.follow(rank) if rank else self.team.lead(lead)
        self.optimizer = SharedOptimizer(optimizer, self.exchange, update_scale="auto")
        self.is_async = training.mode == "async"
        self._others = machines - 1

    def begin(self) -> None:
        """Take part."""
        self.optimizer.join()

    def step(self) -> StepResult | None:
        """Move the parameters; return what was exchanged."""
        self.optimizer.step()
        is_whole = self.team is None or self.team.present == self.team.workers
        if len(self.exchange.members) < self._others or not is_whole:
            raise PeerLost("another worker is gone")
        result = self.optimizer.result
        is_follower = getattr(self.exchange, "rank", 0) > 0
        return replace(result, sent_bytes=0, received_bytes=0) if result and is_follower else result

    def end_epoch(self) -> StepResult | None:
        """Exchange the local steps that are left, and take what has arrived."""
        result = None
        while self.exchange.has_local_steps or getattr(self.optimizer.result, "is_local", False):
            self.optimizer.zero_grad()  # without gradients a step moves nothing
            result = self.step()
        if self.is_async:
            self.optimizer.catch_up(0.2)
        return result

    def close(self) -> None:
        """Release the memory of the machine's team."""
        if self.team is not None:
            self.team.close()

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Let the model hold the parameters that all workers share."""
        return self.optimizer.shared_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state with the residual."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        self.optimizer.load_state_dict(state)


class Averaging(Sharing):
    """The mean of parameters, and of the optimiser's state, every few steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        training: ParameterAveraging,
        node: Node,
        _team: tuple[str, int, int],
        workers: int,
    ) -> None:
        self.optimizer: Any = optimizer
        self.team = None
        self._training, self._node, self._workers = training, node, workers
        self._exchange: Exchange | None = None
        self._since = 0

    def begin(self) -> None:
        """Do nothing: the exchange is made when the optimiser has a state."""

    def step(self) -> StepResult | None:
        """Move the parameters; return what was exchanged, or None."""
        self.optimizer.step()
        self._since += 1
        return self._average() if self._since == self._training.every else None

    def end_epoch(self) -> StepResult | None:
        """Average what is left of the last steps."""
        return self._average() if self._since else None

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: at the end of an epoch all parameters are the mean."""
        return contextlib.nullcontext()

    def _average(self) -> StepResult:
        self._since = 0
        averaged = averaged_tensors(self.optimizer, self._training)
        flat = flatten(averaged)
        if self._exchange is None:
            encoder = Encoder(flat.size, threshold=1.0)
            options: Any = {"codec": "dense", "topology": "mesh", "min_peers": self._workers - 1}
            self._exchange = Exchange(encoder, self._node, **options)
        mean = np.zeros_like(flat)
        result = self._exchange.step(flat, mean)
        if len(self._exchange.members) < self._workers - 1:
            raise PeerLost("another worker is gone")
        put(averaged, mean)
        return result


def averaged_tensors(
    optimizer: torch.optim.Optimizer, training: ParameterAveraging
) -> list[torch.Tensor]:
    """Return the parameters and, if wanted, the tensors of the optimiser's state, in the same order everywhere."""
    params = parameters_of(optimizer)
    found = [param.detach() for param in params]
    if training.average_optimizer:
        for param in params:
            state = optimizer.state.get(param, {})
            found += [
                state[name]
                for name in sorted(state)
                if torch.is_tensor(state[name]) and state[name].is_floating_point()
            ]
    return found


def flatten(tensors: list[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return all values, one after the other."""
    return torch.cat([one.reshape(-1).float().cpu() for one in tensors]).numpy()


def put(tensors: list[torch.Tensor], flat: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Copy values back into tensors."""
    start = 0
    for one in tensors:
        piece = torch.from_numpy(flat[start : start + one.numel()])
        one.copy_(piece.reshape(one.shape))
        start += one.numel()


class Worker:
    """The training of one task."""

    def __init__(self, job: Job, context: Any) -> None:
        self.job, self.context, self.rank = job, context, context.partitionId()
        self.device = device_of(job.device)
        torch.set_num_threads(max(1, context.cpus()))
        torch.manual_seed(job.seed)
        self.model = job.model().to(self.device)
        self.optimizer = job.optimizer(self.model.parameters())
        self.loss = job.loss()
        self.progress: Node | None = None
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}  # the state of the model to return

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value; raise if one has failed."""
        return gather(self.context, {"value": value})

    def run(self, batches: Iterator[pa.RecordBatch]) -> list[tuple[str, bytes]]:
        """Train; return the history and the model, from one worker only."""
        training, held = spill(batches, self.rank)
        sizes = [training.rows, held.rows, training.width(FEATURES), training.width(LABEL)]
        found = self.gather(sizes)
        self.active = active = [rank for rank, one in enumerate(found) if one[0]]
        if not active:
            raise ValueError("there are no rows to train on")
        for index, name in ((2, FEATURES), (3, LABEL)):
            widths = {one[index] for one in found if one[0]}
            if len(widths) > 1:
                raise ValueError(f"column {name!r} has rows of {sorted(widths)} values")
        if self.job.patience and not any(one[1] for one in found):
            raise ValueError("patience needs rows for validation, and there are none")
        steps = -(-sum(one[0] for one in found) // (len(active) * self.job.batch_size))
        with contextlib.ExitStack() as stack:
            node = self.connect(stack)
            kind: Any = Sharing if isinstance(self.job.training, SharedTraining) else Averaging
            done = 0
            if self.rank in self.active:
                self.sharing = kind(
                    self.optimizer, self.job.training, node, self.team, len(self.leads)
                )
                stack.callback(self.sharing.close)
                done = self.resume()
            # A worker without its checkpoint must not be waited for, and those without rows have none.
            done, self.history = self.gather([done, self.history])[self.active[0]]
            if self.rank not in self.active:
                self.watch(done // steps)
                return []
            self.sharing.begin()
            return self.train(training, held, steps, done)

    def connect(self, stack: contextlib.ExitStack) -> Node | None:
        """Return a node connected to the other machines' nodes; None if this worker has no need of one."""
        job, options, made = self.job, self.job.training, None
        infos = self.context.getTaskInfos()
        hosts = {rank: host_of(infos[rank].address) for rank in self.active}
        size = getattr(options, "workers_per_node", 1)
        teams = teams_of(hosts, size)
        self.leads = sorted(team[0] for team in teams)
        [own] = [team for team in teams if self.rank in team] or [[]]
        if self.rank in self.leads:
            bind = where_to_bind(
                [hosts[rank] for rank in self.leads],
                self.leads.index(self.rank),
                options.port,
                options.network_mask,
            )
            mask = options.network_mask
            made = Node(bind, secret=job.secret, network_mask=mask, node_id=self.rank)
            stack.callback(made.close, 1.0)
        # Another attempt of the stage may still hold the memory of a team, so every attempt has another name.
        found = self.gather([made.address if made else None, secrets.token_hex(12)])
        if own:
            self.team = f"spark-{found[own[0]][1]}", own.index(self.rank), len(own)
        if made is not None:
            for address in filter(None, (one[0] for one in found)):
                made.add_peer(address)
            try:
                made.wait_for_peers(len(self.leads) - 1, CONNECT_S)
            except TimeoutError as error:
                raise TimeoutError(
                    f"{error}. Set network_mask to the network that connects the executors, or open its UDP ports "
                    '(port=...); where no UDP is allowed, use ParameterAveraging(via="spark")'
                ) from None
        self.gather(None)
        if self.is_lead and job.driver:
            self.progress = Node("0.0.0.0:0", [job.driver], secret=job.secret)
            stack.callback(self.progress.close, 0.5)
        return made

    @property
    def is_lead(self) -> bool:
        """Whether this worker returns the model: the first one that has rows."""
        return bool(self.rank == self.active[0])

    def watch(self, epoch: int) -> None:
        """Take part in all agreements, without rows: the mean must not count a worker that learns nothing."""
        while epoch < self.job.epochs:
            found = self.gather(None)
            if any(one is not None and "epoch" in one for one in found):
                epoch = self.end_epoch(found)
        self.gather(None)

    def train(self, training: Spill, held: Spill, steps: int, done: int) -> list[tuple[str, bytes]]:
        """Train epoch after epoch, all workers for the same number of steps."""
        job = self.job
        order = Shuffled(training.rows, [job.seed, self.rank, done])
        began_s = now_s()
        if self.history:  # of an earlier attempt
            began_s -= self.history[-1]["start_s"] + self.history[-1]["seconds"]
        epoch = done // steps
        has_ended = epoch >= job.epochs
        while epoch < job.epochs:
            times = Times(epoch=epoch, start_s=now_s() - began_s)
            self.model.train()
            while done < (epoch + 1) * steps:
                self.step(training, order, times)
                done += 1
                if job.checkpoints.is_due(done - 1, done):
                    self.save(done)
            self.end_steps(times)
            with self.sharing.shared():
                times.held_loss, times.held_weight = held_loss(
                    self.model, self.loss, held, job.batch_size, self.device
                )
                times.seconds = now_s() - began_s - times.start_s
                own_s = times.encode_s + times.wait_s + times.apply_s
                times.compute_s = times.seconds - times.data_s - own_s
                found = self.gather(asdict(times))
                epoch = self.end_epoch(found)
                *earlier, last = [
                    one["validation_loss"] for one in self.history if one["worker"] == self.rank
                ]
                if self.is_lead and (not job.patience or all(last < one for one in earlier)):
                    self.best = unpack(pack(self.model.state_dict()))
        if has_ended:  # the checkpoint was the last one: nothing is left but local steps
            self.end_steps(Times())
            with self.sharing.shared():
                if not job.patience or not self.best:
                    self.best = unpack(pack(self.model.state_dict()))
        results = []
        if self.is_lead:
            results = [("history", json.dumps(self.history).encode()), ("model", pack(self.best))]
        self.gather(None)  # whatever fails before this, all workers learn
        return results

    def step(self, training: Spill, order: Shuffled, times: Times) -> None:
        """Take one step together with the others."""
        start_s = now_s()
        rows = tensors(training, order.take(self.job.batch_size), self.device)
        times.data_s += now_s() - start_s
        learn(self.model, self.optimizer, self.loss, rows, times)
        times.add(self.sharing.step())

    def end_steps(self, times: Times) -> None:
        """Let every worker have all messages."""
        start_s = now_s()
        if isinstance(self.job.training, SharedTraining) and self.job.training.mode == "async":
            self.gather({})
            times.wait_s += now_s() - start_s
        times.add(self.sharing.end_epoch())

    def end_epoch(self, found: list[Any]) -> int:
        """Add an epoch to the history; return the number of the next, or of the last where training stops early."""
        rows = [{"worker": rank, **one} for rank, one in enumerate(found) if one is not None]
        steps = sum(one["steps"] for one in rows)
        weight = sum(one.pop("held_weight") for one in rows)
        held = sum(one.pop("held_loss") for one in rows)
        mean = {
            "loss": sum(one.pop("loss") for one in rows) / steps if steps else math.nan,
            "validation_loss": held / weight if weight else math.nan,
        }
        self.history += [{**one, **mean} for one in rows]
        epoch = int(rows[0]["epoch"])
        if self.progress is not None:
            with contextlib.suppress(TransportError):  # the driver has the history at the end
                self.progress.publish(json.dumps(self.history[-len(rows) :]).encode())
        losses = [
            one["validation_loss"] for one in self.history if one["worker"] == rows[0]["worker"]
        ]
        best = min(range(len(losses)), key=losses.__getitem__)
        if self.job.patience and len(losses) - 1 - best >= self.job.patience:
            return self.job.epochs
        return epoch + 1

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, done: int) -> None:
        """Write this worker's state; once all have, make the checkpoint the latest."""
        with self.sharing.shared():
            state = {"model": self.model.state_dict(), "optimizer": self.sharing.state_dict()}
            attempt = {
                "history": json.dumps(self.history),
                "best": self.best if self.job.patience else {},
            }
            self.job.checkpoints.write(done, self.rank, pack({**state, "attempt": attempt}))
        self.gather({})
        if self.is_lead:
            self.job.checkpoints.finish(done, self.active)

    def resume(self) -> int:
        """Load the latest checkpoint; return the number of steps done."""
        done, state = self.job.checkpoints.read(self.rank, self.active) or (0, None)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.sharing.load_state_dict(state["optimizer"])
            if "attempt" in state:
                self.history = json.loads(state["attempt"]["history"])
                self.best = state["attempt"]["best"]
        return done


def train(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one worker; yield its results in pieces, or its error.

    An error is a result: Spark would run the whole stage again, several times, where the same would happen.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    results: list[tuple[str, bytes]] = []
    try:
        results = Worker(job, context).run(batches)
    except Stopped:
        pass
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-8000:]
        with contextlib.suppress(Stopped):
            gather(context, {"error": text})
        results = [("error", text.encode())]
    for kind, data in results:
        for part, piece in enumerate(pieces_of(data)):
            row = {"worker": context.partitionId(), "kind": kind, "part": part, "data": piece}
            yield pa.RecordBatch.from_pylist([row], schema=_ARROW)
