"""Parameter averaging through Spark itself: one job per average, no connection between the workers.

Each task trains on its rows of the round. Its parameters are cut into chunks, and every chunk is summed by one task of
a second stage, so that the driver receives one sum however many workers there are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from ..clock import now_s
from .checkpoints import Position, pack, unpack
from .data import VALIDATION, shuffled, spill
from .train import (
    ModelReplica,
    Times,
    TrainingJob,
    averaged_values,
    epoch_rows,
    put_values,
    rank_of_task,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from .strategies import ParameterAveraging

__all__ = ["fit"]

_CHUNK: Final = 1 << 18  # elements
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
    with contextlib.ExitStack() as stack:
        stack.callback(rows.unpersist)
        is_held = F.col(VALIDATION) if VALIDATION in rows.columns else F.lit(False)
        count = rows.filter(~is_held).count()
        if not count:
            raise ValueError("there are no rows to train on")
        every = _averaging(job).every
        rounds = -(-count // (workers * job.batch_size * every))
        round_rows = workers * job.batch_size * every
        position, checkpoint = job.checkpoints.read(0, 1)
        rounds_done = position.steps_done(rounds, round_rows)
        last = job.epochs + position.first_epoch * job.is_warm

        def save(state: bytes) -> None:
            done = rounds_done * every
            epoch, step = divmod(rounds_done, rounds)
            job.checkpoints.write(done, 0, state)
            job.checkpoints.finish(done, 1, Position(epoch, step, round_rows, position.first_epoch))

        state = pack(checkpoint) if checkpoint else _state(ModelReplica(replace(job, device="cpu")))
        history: list[dict[str, Any]] = []
        best = state
        losses = [np.inf]
        began_s = now_s()
        for epoch in range(rounds_done // rounds, last):
            start_s = now_s()
            stats: list[dict[str, Any]] = []
            order = np.random.default_rng([job.seed, epoch]).permutation(rounds).tolist()
            for number in order[rounds_done - epoch * rounds :]:
                is_chosen = (F.col("round") * rounds).cast("int") == number
                chosen = rows.filter(~is_held & is_chosen).drop("round")
                state = _train_round(job, chosen, state, epoch, stats)
                rounds_done += 1
                done = rounds_done * every
                if job.checkpoints.is_due(done - every, done):
                    save(state)
            if VALIDATION in rows.columns:
                held = rows.filter(is_held).drop("round").mapInArrow(_scorer(job, state), _SCHEMA)
                stats += [json.loads(row.data) for row in held.collect()]
            same = {"epoch": epoch, "start_s": start_s - began_s, "seconds": now_s() - start_s}
            sums = pd.DataFrame(stats).groupby("worker", as_index=False).sum().to_dict("records")
            history += epoch_rows([{**row, **same} for row in sums])
            report([row for row in history if row["epoch"] == epoch])
            losses.append(history[-1]["validation_loss"])
            if not job.patience or losses[-1] < min(losses[:-1]):
                best = state
            elif len(losses) > losses.index(min(losses)) + job.patience:
                break
        if job.checkpoints.folder is not None:
            save(state)
        return history, pack(unpack(best)["model"])


def _train_round(
    job: TrainingJob, rows: DataFrame, state: bytes, epoch: int, stats: list[dict[str, Any]]
) -> bytes:
    """Train on the rows of a round; return the state with the mean of all workers' values."""
    pieces: dict[int, bytes] = {}
    trained = rows.mapInArrow(_trainer(job, state, epoch), _SCHEMA)
    for chunk, data in trained.groupBy("chunk").applyInArrow(_sum, _SCHEMA).toLocalIterator():
        if chunk == _STATS:
            stats.append(json.loads(data))
        else:
            pieces[chunk] = bytes(data)
    if not pieces:  # no rows
        return state
    replica = _load(replace(job, device="cpu"), pieces.pop(_STATE))
    flat = np.concatenate([np.frombuffer(pieces[chunk], np.float32) for chunk in sorted(pieces)])
    put_values(replica.optimizer, _averaging(job), flat)
    return _state(replica)


def _averaging(job: TrainingJob) -> ParameterAveraging:
    return cast("ParameterAveraging", job.training)


def _state(replica: ModelReplica) -> bytes:
    return pack({name: getattr(replica, name).state_dict() for name in ("model", "optimizer")})


def _load(job: TrainingJob, state: bytes) -> ModelReplica:
    replica = ModelReplica(job)
    values = unpack(state)
    replica.model.load_state_dict(values["model"])
    if _averaging(job).average_optimizer:
        replica.optimizer.load_state_dict(values["optimizer"])
    return replica


def _trainer(job: TrainingJob, state: bytes, epoch: int) -> _Task:
    """Return the function that trains on one task's rows of a round."""

    def train(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rank = rank_of_task()
        rows = spill(batches, f"worker {rank}", job.columns)[0]
        if not rows.rows:
            return
        times = Times()
        start_s = now_s()
        replica = _load(job, state)
        torch.manual_seed(job.seed + rank)
        order = shuffled(rows.rows, job.batch_size, [job.seed, epoch, rank])
        for _ in range(min(_averaging(job).every, -(-rows.rows // job.batch_size))):
            replica.compute_gradients(rows, order, times)
            replica.optimizer.step()
        compute_s = now_s() - start_s - times.data_s
        flat = averaged_values(replica.optimizer, _averaging(job))
        yield _stats(rank, replace(times, compute_s=compute_s, sent_bytes=flat.nbytes))
        yield _batch(_STATE, _state(replica))
        for number, first in enumerate(range(0, flat.size, _CHUNK)):
            yield _batch(number, flat[first : first + _CHUNK].tobytes())

    return train


def _scorer(job: TrainingJob, state: bytes) -> _Task:
    """Return the function that adds up the loss of rows for validation."""

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rank = rank_of_task()
        times = Times()
        held = spill(batches, f"worker {rank}", job.columns)[1]
        _load(job, state).score(held, times)
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
    return pa.table({"chunk": [chunk], "data": [mean.tobytes()]})
