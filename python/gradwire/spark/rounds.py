"""Parameter averaging through Spark itself: one job per average, no connection between the workers.

Each task trains on its rows of the round. Its parameters are cut into chunks, and every chunk is summed by one task of
a second stage, so that the driver receives one sum however many workers there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import torch

from ..exchange.clock import now_s
from .checkpoints import pack, unpack
from .data import VALIDATION, Shuffled, spill
from .train import Job, Times, averaged_tensors, device_of, flatten, held_loss, learn, put, tensors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["fit"]

_CHUNK: Final = 1 << 18  # elements
_SCHEMA: Final = "chunk int, data binary"
_ARROW: Final = pa.schema([("chunk", pa.int32()), ("data", pa.binary())])
_STATS, _STATE = -1, -2


def fit(
    job: Job, rows: DataFrame, workers: int, tell: Callable[[list[dict[str, Any]]], None]
) -> tuple[list[dict[str, Any]], bytes]:
    """Train; return the history and the model's state.

    Args:
        job: with `ParameterAveraging`.
        rows: in as many partitions as there are workers.
        workers: number of workers.
        tell: called with the history's rows of each epoch.
    """
    from pyspark.sql import functions as F  # noqa: N812

    rows = rows.withColumn("round", F.rand(job.seed)).persist()
    try:
        return _fit(job, rows, workers, tell)
    finally:
        rows.unpersist()


def _fit(
    job: Job, rows: DataFrame, workers: int, tell: Callable[[list[dict[str, Any]]], None]
) -> tuple[list[dict[str, Any]], bytes]:
    from pyspark.sql import functions as F  # noqa: N812

    learned, held = rows, None
    if VALIDATION in rows.columns:
        learned, held = rows.filter(~F.col(VALIDATION)), rows.filter(F.col(VALIDATION))
    count = learned.count()
    if not count:
        raise ValueError("there are no rows to train on")
    every = job.training.every
    rounds = -(-count // (workers * job.batch_size * every))
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    done, found = job.checkpoints.read(0, []) or (0, None)
    state = pack(found or {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    history: list[dict[str, Any]] = []
    best, kept, waited = np.inf, state, 0
    began_s = now_s()
    for epoch in range(done // (rounds * every), job.epochs):
        start_s, stats = now_s(), []
        order = np.random.default_rng([job.seed, epoch]).permutation(rounds).tolist()
        for number in order[done // every - epoch * rounds :]:
            chosen = learned.filter((F.col("round") * rounds).cast("int") == number).drop("round")
            trained = chosen.mapInArrow(_task(job, state, epoch), _SCHEMA)
            pieces: dict[int, Any] = {}
            for chunk, data in (
                trained.groupBy("chunk").applyInArrow(_sum, _SCHEMA).toLocalIterator()
            ):
                if chunk == _STATS:
                    stats.append(json.loads(data))
                else:
                    pieces[chunk] = bytes(data)
            if pieces:
                state = _mean(job, model, pieces)
            done += every
            if job.checkpoints.is_due(done - every, done):
                job.checkpoints.write(done, 0, state)
                job.checkpoints.finish(done, [0])
        loss = np.nan
        if held is not None:
            scores = [
                json.loads(one.data)
                for one in held.drop("round").mapInArrow(_score(job, state), _SCHEMA).collect()
            ]
            loss = sum(one[0] for one in scores) / max(sum(one[1] for one in scores), 1e-30)
        mean = sum(one["loss"] for one in stats) / sum(one["steps"] for one in stats)
        by_worker: dict[int, dict[str, Any]] = {}
        for one in stats:
            total = by_worker.setdefault(one["worker"], dict.fromkeys(one, 0))
            for name in one.keys() - {"worker"}:
                total[name] += one[name]
        seconds = now_s() - start_s
        same = {"epoch": epoch, "loss": mean, "validation_loss": loss, "seconds": seconds}
        same["start_s"] = start_s - began_s
        history += [{**one, **same, "worker": rank} for rank, one in sorted(by_worker.items())]
        tell(history[-len(by_worker) :])
        waited = 0 if loss < best else waited + 1
        if not job.patience or loss < best:
            best, kept = loss, state
        if job.patience and waited >= job.patience:
            break
    return history, pack(unpack(kept)["model"])


def _mean(job: Job, model: torch.nn.Module, pieces: dict[int, Any]) -> bytes:
    """Return the state with the mean of all workers' values."""
    optimizer = job.optimizer(model.parameters())
    found = unpack(pieces.pop(_STATE))
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    flat = np.concatenate([np.frombuffer(pieces[chunk], np.float32) for chunk in sorted(pieces)])
    with torch.no_grad():
        put(averaged_tensors(optimizer, job.training), flat)  # type: ignore[arg-type]
    return pack({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _load(job: Job, state: bytes) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = job.model().to(device_of(job.device))
    optimizer = job.optimizer(model.parameters())
    values = unpack(state)
    model.load_state_dict(values["model"])
    if job.training.average_optimizer:  # type: ignore[union-attr]
        optimizer.load_state_dict(values["optimizer"])
    return model, optimizer


def _task(
    job: Job, state: bytes, epoch: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that trains on one task's rows of a round."""

    def train(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        rank = context.partitionId() if context is not None else 0
        rows = spill(batches, rank)[0]
        if not rows.rows:
            return
        times, start_s = Times(epoch=epoch), now_s()
        torch.manual_seed(job.seed + rank)
        model, optimizer = _load(job, state)
        loss, device = job.loss(), device_of(job.device)
        order = Shuffled(rows.rows, [job.seed, epoch, rank])
        for _ in range(min(job.training.every, -(-rows.rows // job.batch_size))):
            batch = tensors(rows, order.take(job.batch_size), device)
            learn(model, optimizer, loss, batch, times)
            optimizer.step()
        times.compute_s = now_s() - start_s
        flat = flatten(averaged_tensors(optimizer, job.training))  # type: ignore[arg-type]
        times.sent_bytes = flat.nbytes
        stats = {"worker": rank, **asdict(times)}
        yield _batch(_STATS, json.dumps(stats).encode())
        yield _batch(
            _STATE, pack({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        )
        for number, first in enumerate(range(0, flat.size, _CHUNK)):
            yield _batch(number, flat[first : first + _CHUNK].tobytes())

    return train


def _score(
    job: Job, state: bytes
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that sums the loss of rows for validation."""

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = spill(batches, 0)[1]
        model, _ = _load(job, state)
        device = device_of(job.device)
        found = held_loss(model, job.loss(), held, job.batch_size, device)
        yield _batch(_STATS, json.dumps(found).encode())

    return score


def _batch(chunk: int, data: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"chunk": [chunk], "data": [data]}, schema=_ARROW)


def _sum(table: pa.Table) -> pa.Table:
    """Return the mean of one chunk of all workers; of the states only the first, of the statistics all."""
    chunk = table["chunk"][0].as_py()
    if chunk == _STATS:
        return table
    if chunk == _STATE:
        return table.slice(0, 1)
    values = [np.frombuffer(one.as_buffer(), np.float32) for one in table["data"]]
    mean = np.mean(values, axis=0, dtype=np.float64).astype(np.float32)
    return pa.table({"chunk": [chunk], "data": [mean.tobytes()]}, schema=_ARROW)
