"""The demo's parent process: starts the workers, introduces them and collects their reports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from gradwire.cli.demo.network import Network
from gradwire.cli.demo.results import Epoch, Outcome, Run, merge
from gradwire.cli.demo.training import Recipe
from gradwire.cli.demo.worker import work

# One BLAS thread per worker: the processes are the parallelism, and NumPy's results then do not depend on the number
# of cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SILENCE_S = 120.0
_FAREWELL_S = 10.0


class WorkerFailed(RuntimeError):
    """A worker process ended early or fell silent."""


class _Worker(NamedTuple):
    """A worker process and this end of its pipe."""

    process: SpawnProcess
    pipe: Connection

    def send(self, thing: Any) -> None:
        """Send something to the worker.

        Raises:
            WorkerFailed: it has ended.
        """
        try:
            self.pipe.send(thing)
        except OSError:
            raise self._failed() from None

    def receive(self) -> Any:
        """Return the next thing the worker sends.

        Raises:
            WorkerFailed: it has ended.
        """
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            raise self._failed() from None

    def _failed(self) -> WorkerFailed:
        self.process.join(_FAREWELL_S)
        return WorkerFailed(f"{self.process.name} ended early with status {self.process.exitcode}")


def train(recipe: Recipe, on_epoch: Callable[[Epoch], None]) -> Run:
    """Train ``recipe`` in processes of its own, calling ``on_epoch`` after every epoch.

    Raises:
        WorkerFailed: a worker ended early or fell silent; its own traceback is on stderr.
    """
    with _workers(recipe) as workers:
        addresses: list[str] = []
        for worker in workers:
            worker.send(addresses)
            addresses.append(worker.receive())
        begin_s = time.monotonic()
        epochs, outcomes = _collect(workers, on_epoch)
        seconds = time.monotonic() - begin_s
    numel = Network(recipe.layers).numel
    return Run(recipe, numel, tuple(epochs), tuple(outcomes), seconds)


@contextlib.contextmanager
def _workers(recipe: Recipe) -> Iterator[list[_Worker]]:
    """Start the worker processes; end them on leaving, by force if need be."""
    secret = secrets.token_bytes(32)
    workers: list[_Worker] = []
    try:
        with _environment(_ONE_THREAD):
            for rank in range(recipe.workers):
                workers.append(_start(recipe, rank, secret))
        yield workers
        for worker in workers:
            worker.process.join(_FAREWELL_S)
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()
            worker.pipe.close()


def _start(recipe: Recipe, rank: int, secret: bytes) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=work, args=(recipe, rank, secret, there), name=f"worker {rank}", daemon=True
    )
    process.start()
    there.close()
    return _Worker(process, here)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect(
    workers: list[_Worker], on_epoch: Callable[[Epoch], None]
) -> tuple[list[Epoch], list[Outcome]]:
    """Read all workers' reports until each has ended."""
    reports: dict[int, list[Epoch]] = {}
    epochs: list[Epoch] = []
    outcomes: list[Outcome] = []
    for report in _reports(workers):
        if isinstance(report, Outcome):
            outcomes.append(report)
            continue
        finished = reports.setdefault(report.number, [])
        finished.append(report)
        if len(finished) == len(workers):
            epochs.append(merge(finished))
            on_epoch(epochs[-1])
    return epochs, outcomes


def _reports(workers: list[_Worker]) -> Iterator[Epoch | Outcome]:
    """Yield what the workers send, until every one has sent its `Outcome`."""
    running = list(workers)
    while running:
        ready = wait([worker.pipe for worker in running], timeout=_SILENCE_S)
        if not ready:
            raise WorkerFailed(f"no worker has reported for {_SILENCE_S:g} s")
        for worker in [worker for worker in running if worker.pipe in ready]:
            report = worker.receive()
            if isinstance(report, Outcome):
                running.remove(worker)
            yield report
