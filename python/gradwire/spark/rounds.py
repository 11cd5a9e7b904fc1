"""Parameter averaging through Spark itself: one job per average, no connection between the workers.

Each task trains on its rows of the round. Its parameters are cut into chunks, and every chunk is summed by one task of
a second stage, so that the driver receives one sum however many workers there are.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ..clock import now_s
from .checkpoints import Position, pack, pack_into, unpack
from .data import VALIDATION, WEIGHT, shuffled, spill
from .session import Parcel
from .train import (
    Averaged,
    ModelReplica,
    Times,
    TrainingJob,
    best_epoch,
    check_weights,
    epoch_rows,
    is_averaged,
    is_over,
    rank_of_task,
    seed_torch,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .strategies import ParameterAveraging

__all__ = ["fit"]

# Java's collector G1 gives arrays of more than half a region contiguous regions of their own, and leaves their last
# region unused. With a heap of 1 GB a region has 1 MiB: arrays of 1 MiB and a header would waste half of the heap, and
# for results of many MiB there is no contiguous space although the heap is not full.
_CHUNK: Final = 1 << 16  # elements, 256 KiB
# Spark sends results above 1 MiB through the block managers, which copy them.
_PART_BYTES: Final = 1 << 20
_SCHEMA: Final = "chunk bigint, data binary"
# Numbers of chunks that are no parameters.
_STATS: Final = -1
_STATE: Final = -2

_Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def fit(
    job: TrainingJob, rows: DataFrame, workers: int, report: Callable[[list[dict[str, Any]]], None]
) -> tuple[list[dict[str, Any]], bytes]:
    """Train; return the history and the model's state.

    Args:
        job: with `ParameterAveraging`.
        rows: in as many partitions as there are workers.
        workers: number of workers.
        report: called with the history's rows of each epoch.
    """
    from pyspark.sql import functions as F  # noqa: N812

    rows = rows.withColumn("round", F.rand(job.seed)).persist()
    spark = rows.sparkSession
    with contextlib.ExitStack() as stack:
        stack.callback(rows.unpersist)
        is_held = F.lit(False)
        if VALIDATION in rows.columns:
            # A row that is null here goes to a worker, which refuses it by its number.
            is_held = F.coalesce(F.col(VALIDATION), F.lit(False))
        count = rows.filter(~is_held).count()
        if not count:
            raise ValueError("there are no rows to train on")
        weighted = rows
        if WEIGHT in rows.columns:
            weighted = rows.filter(F.coalesce(F.col(WEIGHT) != 0, F.lit(True)))
        check_weights(
            job,
            has_rows=weighted is rows or not weighted.filter(~is_held).isEmpty(),
            has_held=not job.patience or not weighted.filter(is_held).isEmpty(),
        )
        every = _averaging(job).every
        rounds = -(-count // (workers * job.batch_size * every))
        round_rows = workers * job.batch_size * every
        state = _State(replace(job, device="cpu"))
        position, checkpoint = job.checkpoints.read(0, 1, is_warm=job.is_warm)
        if checkpoint:
            state.start_from(checkpoint)
        attempt = checkpoint.get("attempt", {})
        history: list[dict[str, Any]] = attempt.get("history", [])
        losses: list[float] = attempt.get("losses", []) if job.patience else []
        best: dict[str, Any] = attempt.get("best", {}) if job.patience else {}
        unfinished: dict[str, Any] = attempt.get("unfinished", {})
        del checkpoint, attempt
        rounds_done = position.steps_done(rounds, round_rows)
        last = job.epochs + position.first_epoch * job.is_warm

        def save() -> None:
            done = rounds_done * every
            epoch, step = divmod(rounds_done, rounds)
            attempt = {"history": history, "losses": losses, "best": best, "unfinished": unfinished}
            job.checkpoints.write(done, 0, {**state.complete(), "attempt": attempt})
            job.checkpoints.finish(done, 1, Position(epoch, step, round_rows, position.first_epoch))

        before = unfinished or [asdict(Times()), *history][-1]
        began_s = now_s() - before["start_s"] - before["seconds"]
        first_epoch = rounds_done // rounds
        for epoch in range(first_epoch, last):
            if is_over(losses, job.patience):
                break
            start_s = now_s()
            stats: list[dict[str, Any]] = []
            if unfinished.get("epoch") == epoch:
                start_s = began_s + unfinished["start_s"]
                stats = unfinished["stats"]
            order = np.random.default_rng([job.seed, epoch]).permutation(rounds).tolist()
            for number in order[rounds_done - epoch * rounds :]:
                is_chosen = (F.col("round") * rounds).cast("int") == number
                chosen = rows.filter(~is_held & is_chosen).drop("round")
                with contextlib.closing(state.parcel(spark)) as parcel:
                    trained = chosen.mapInArrow(_trainer(job, parcel, epoch, number), _SCHEMA)
                    # Each part is a result of a task. Java hands it on to Python when it comes, and keeps nothing;
                    # with toLocalIterator it pickles all parts, in half as many bytes again, and keeps them.
                    parts = trained.repartition(state.parts, "chunk")
                    sums = parts.groupBy("chunk").applyInArrow(_sum, _SCHEMA).toArrow()
                    for chunk, data in zip(sums["chunk"].to_pylist(), sums["data"], strict=True):
                        if chunk == _STATS:
                            stats.append(json.loads(data.as_py()))
                        else:
                            state.put(chunk, data.as_buffer())
                    del sums
                rounds_done += 1
                done = rounds_done * every
                if job.checkpoints.is_due(done - every, done) and rounds_done % rounds:
                    unfinished = {
                        "epoch": epoch,
                        "start_s": start_s - began_s,
                        "seconds": now_s() - start_s,
                        "stats": stats,
                    }
                    save()
            unfinished = {}
            if VALIDATION in rows.columns:
                with contextlib.closing(state.parcel(spark)) as parcel:
                    held = rows.filter(is_held).drop("round")
                    scores = held.mapInArrow(_scorer(job, parcel), _SCHEMA).collect()
                stats += [json.loads(row.data) for row in scores]
            same = {"epoch": epoch, "start_s": start_s - began_s, "seconds": now_s() - start_s}
            by_worker = pd.DataFrame(stats).groupby("worker", as_index=False).sum()
            if epoch > first_epoch or not job.is_shuffled:
                same["shuffled_bytes"] = 0
            history += epoch_rows([{**row, **same} for row in by_worker.to_dict("records")])
            report([row for row in history if row["epoch"] == epoch])
            if job.patience:
                losses.append(history[-1]["validation_loss"])
                if best_epoch(losses) == len(losses) - 1:
                    best = state.complete()["model"]
            is_last = epoch + 1 == last or is_over(losses, job.patience)
            if job.checkpoints.is_due(done - every, done) and not is_last:
                save()
        if job.checkpoints.folder is not None:
            save()
        return history, pack(best or state.complete()["model"])


class _State:
    """The state that all workers begin a round with, on the driver: one copy, and parts that are no numbers.

    Args:
        job: of a training on the CPU.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        replica = ModelReplica(job)
        self._flat = _values_of(replica)
        self._rest = _rest_of(replica)
        # After their first step most optimisers have a state, Adam twice the parameters.
        self._growth = 3 if _averaging(job).average_optimizer else 1

    def start_from(self, checkpoint: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""
        replica = ModelReplica(self._job)
        with self._job.checkpoints.named_if_other():
            replica.model.load_state_dict(checkpoint["model"])
            if _averaging(self._job).average_optimizer:
                replica.optimizer.load_state_dict(replica.continued(checkpoint))
        self._flat = _values_of(replica)
        self._rest = _rest_of(replica)
        self._growth = 1

    @property
    def parts(self) -> int:
        """Number of parts in which the state comes back."""
        return 1 + self._growth * self._flat.nbytes // _PART_BYTES

    def write(self, file: Any) -> None:
        """Write the state for workers."""
        pack_into({"flat": torch.from_numpy(self._flat), "rest": self._rest}, file)

    def parcel(self, spark: SparkSession) -> Parcel:
        """Return the state on its way to the workers; it goes through a file rather than through memory."""
        with tempfile.TemporaryFile() as file:
            self.write(file)
            return Parcel(spark, file)

    def put(self, chunk: int, data: bytes | pa.Buffer) -> None:
        """Put in a part of what the workers have after a round."""
        if chunk == _STATE:
            self._rest = unpack(bytes(data))
            return
        values = np.frombuffer(data, np.float32)
        first = chunk * _CHUNK
        self._growth = 1
        if self._flat.size < first + values.size:
            self._flat = np.pad(self._flat, (0, first + values.size - self._flat.size))
        self._flat[first : first + values.size] = values

    def complete(self) -> dict[str, Any]:
        """Return the states of a model and its optimiser."""
        replica = _load(self._job, {"flat": torch.from_numpy(self._flat), "rest": self._rest})
        states = {name: getattr(replica, name).state_dict() for name in ("model", "optimizer")}
        kept = {name: getattr(replica, name) for name in ("initial_options", "optimizer_classes")}
        return {**states, **kept}


def _averaging(job: TrainingJob) -> ParameterAveraging:
    return cast("ParameterAveraging", job.training)


def _rest_of(replica: ModelReplica) -> dict[str, Any]:
    """Return everything that is not averaged: of the optimiser's averaged tensors only the shapes."""
    model = {
        name: value
        for name, value in replica.model.state_dict().items()
        if not (torch.is_tensor(value) and value.is_floating_point())
    }
    if not _averaging(replica.job).average_optimizer:
        return {"model": model, "optimizer": None}
    optimizer = replica.optimizer.state_dict()
    optimizer["state"] = {
        index: {
            # All elements of the tensor are the same one in memory, and so in a file.
            name: torch.zeros(()).expand(value.shape) if is_averaged(value) else value
            for name, value in state.items()
        }
        for index, state in optimizer["state"].items()
    }
    return {"model": model, "optimizer": optimizer}


def _values_of(replica: ModelReplica) -> NDArray[np.float32]:
    """Return everything that is averaged."""
    values = Averaged(replica, _averaging(replica.job))
    flat = np.empty(values.numel, np.float32)
    values.copy_to(flat)
    return flat


def _load(job: TrainingJob, state: dict[str, Any]) -> ModelReplica:
    replica = ModelReplica(job)
    rest = state["rest"]
    replica.model.load_state_dict({**replica.model.state_dict(), **rest["model"]})
    if rest["optimizer"] is not None:
        replica.optimizer.load_state_dict(rest["optimizer"])
        for values in replica.optimizer.state.values():
            for name, value in values.items():
                if is_averaged(value):
                    values[name] = value.clone(memory_format=torch.contiguous_format)
    Averaged(replica, _averaging(job)).copy_from(state["flat"].numpy())
    return replica


def _trainer(job: TrainingJob, parcel: Parcel, epoch: int, number_of_round: int) -> _Task:
    """Return the function that trains on one task's rows of a round."""

    def train(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rank = rank_of_task()
        rows = spill(batches, f"worker {rank}", job.columns)[0]
        if not rows.rows:
            return
        times = Times(shuffled_bytes=rows.nbytes)
        start_s = now_s()
        replica = _load(job, unpack(parcel.read()))
        seed_torch(job.seed, epoch, number_of_round, rank)
        order = shuffled(rows.rows, job.batch_size, [job.seed, epoch, rank])
        for _ in range(min(_averaging(job).every, -(-rows.rows // job.batch_size))):
            replica.compute_gradients(rows, order, times)
            replica.optimizer.step()
        compute_s = now_s() - start_s - times.data_s
        values = Averaged(replica, _averaging(job))
        yield _stats(rank, replace(times, compute_s=compute_s, sent_bytes=4 * values.numel))
        yield _batch(_STATE, pack(_rest_of(replica)))
        for number, first in enumerate(range(0, values.numel, _CHUNK)):
            piece = np.empty(min(_CHUNK, values.numel - first), np.float32)
            values.copy_to(piece, first)
            yield _batch(number, piece.tobytes())

    return train


def _scorer(job: TrainingJob, parcel: Parcel) -> _Task:
    """Return the function that adds up the loss of rows for validation."""

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rank = rank_of_task()
        held = spill(batches, f"worker {rank}", job.columns)[1]
        times = Times(shuffled_bytes=held.nbytes)
        _load(job, unpack(parcel.read())).score(held, times)
        yield _stats(rank, times)

    return score


def _stats(rank: int, times: Times) -> pa.RecordBatch:
    return _batch(_STATS, json.dumps({"worker": rank, **asdict(times)}).encode())


def _batch(chunk: int, data: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"chunk": [chunk], "data": [data]})


def _sum(table: pa.Table) -> pa.Table:
    """Return the mean of one chunk of all workers; of the states only the first, of the statistics all."""
    chunk = table["chunk"][0].as_py()
    if chunk == _STATS:
        return table
    if chunk == _STATE:
        return table.slice(0, 1)
    values = [np.frombuffer(data.as_buffer(), np.float32) for data in table["data"]]
    mean = np.mean(values, axis=0, dtype=np.float64).astype(np.float32)
    # Spark refuses other types than it has given: with arrow.useLargeVarTypes the data is a large_binary.
    return pa.table({"chunk": [chunk], "data": [mean.tobytes()]}, table.schema)
