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
from typing import Any

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


def train(recipe: Recipe, on_epoch: Callable[[Epoch], None]) -> Run:
    """Train ``recipe`` in processes of its own, calling ``on_epoch`` after every epoch.

    Raises:
        WorkerFailed: a worker ended early or fell silent; its own traceback is on stderr.
    """
    with _workers(recipe) as pipes:
        addresses: list[str] = []
        for pipe in pipes:
            pipe.send(addresses)
            addresses.append(_receive(pipe))
        begin_s = time.monotonic()
        epochs, outcomes = _collect(pipes, on_epoch)
        seconds = time.monotonic() - begin_s
    numel = Network(recipe.layers).numel
    return Run(recipe, numel, tuple(epochs), tuple(outcomes), seconds)


@contextlib.contextmanager
def _workers(recipe: Recipe) -> Iterator[list[Connection]]:
    """Start the worker processes; end them on leaving, by force if need be."""
    context = multiprocessing.get_context("spawn")
    secret = secrets.token_bytes(32)
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        with _environment(_ONE_THREAD):
            for rank in range(recipe.workers):
                here, there = context.Pipe()
                pipes.append(here)
                process = context.Process(
                    target=work, args=(recipe, rank, secret, there), daemon=True
                )
                process.start()
                processes.append(process)
                there.close()
        yield pipes
        for process in processes:
            process.join(timeout=_FAREWELL_S)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for pipe in pipes:
            pipe.close()


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
    pipes: list[Connection], on_epoch: Callable[[Epoch], None]
) -> tuple[list[Epoch], list[Outcome]]:
    """Read all workers' reports until each has ended."""
    reports: dict[int, list[Epoch]] = {}
    epochs: list[Epoch] = []
    outcomes: list[Outcome] = []
    for report in _reports(pipes):
        if isinstance(report, Outcome):
            outcomes.append(report)
            continue
        finished = reports.setdefault(report.number, [])
        finished.append(report)
        if len(finished) == len(pipes):
            epochs.append(merge(finished))
            on_epoch(epochs[-1])
    return epochs, outcomes


def _reports(pipes: list[Connection]) -> Iterator[Epoch | Outcome]:
    """Yield what the workers send, until every one has sent its `Outcome`."""
    running = list(pipes)
    while running:
        ready = wait(running, timeout=_SILENCE_S)
        if not ready:
            raise WorkerFailed(f"no worker has reported for {_SILENCE_S:g} s")
        for pipe in running.copy():
            if pipe in ready:
                report = _receive(pipe)
                if isinstance(report, Outcome):
                    running.remove(pipe)
                yield report


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise WorkerFailed("a worker ended early; its traceback is above") from None
