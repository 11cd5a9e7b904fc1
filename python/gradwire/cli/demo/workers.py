"""The demo's processes: workers that exchange updates over UDP, and their parent, which collects the reports."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import gradwire as gw

from .link import Link
from .report import Epoch, Run
from .training import SEED, Digits, Recipe, Trainer

_SILENCE_S = 120.0
_END_S = 10.0


class WorkerFailed(RuntimeError):
    """A worker process ended early or did not report in time."""


class _Worker:
    """A worker process, seen from the parent."""

    def __init__(
        self, recipe: Recipe, rank: int, secret: bytes, link: Link, stack: ExitStack
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=work,
            args=(recipe, rank, secret, link, theirs),
            name=f"worker {rank}",
            daemon=True,
        )
        # A terminal interrupts the workers, too: the parent ends them, in one line instead of a traceback for each.
        # A process inherits which signals wait; the tracker, where it begins here, would let them through again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        stack.callback(self._end)

    def receive(self, *messages: Any) -> Any:
        """Send messages to the worker, and return the next message of the worker.

        Raises:
            WorkerFailed: the worker ended early or did not report in time; its traceback is on stderr.
        """
        name = self._process.name
        try:
            for message in messages:
                self._pipe.send(message)
            if self._pipe.poll(_SILENCE_S):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            status = self._process.exitcode
            raise WorkerFailed(f"{name} ended early with status {status}") from None
        raise WorkerFailed(f"{name} has not reported for {_SILENCE_S:g} s")

    def join(self) -> None:
        """Wait until the worker has closed its node."""
        self._process.join(_END_S)

    def _end(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def train(recipe: Recipe, on_epoch: Callable[[Epoch], None], links: Sequence[Link] = ()) -> Run:
    """Train ``recipe`` in processes of its own, calling ``on_epoch`` after every epoch.

    Args:
        recipe: settings of the run.
        on_epoch: function that receives the measurements.
        links: a link for each worker; empty: loopback.

    Raises:
        WorkerFailed: a worker ended early or did not report in time; its traceback is on stderr.
    """
    secret = secrets.token_bytes(32)
    with ExitStack() as stack:
        places = links or [Link()] * recipe.workers
        workers = [_Worker(recipe, rank, secret, place, stack) for rank, place in enumerate(places)]
        addresses: list[str] = []
        for worker in workers:
            addresses.append(worker.receive(addresses))
        begin_s = time.monotonic()
        epochs = []
        for _ in range(recipe.epochs):
            epochs.append(Epoch.merge([worker.receive() for worker in workers]))
            on_epoch(epochs[-1])
        seconds = time.monotonic() - begin_s
        for worker in workers:
            worker.join()
    return Run(recipe, tuple(epochs), seconds)


def work(recipe: Recipe, rank: int, secret: bytes, link: Link, pipe: Connection) -> None:
    """Train to the end as one worker; the entry point of the process.

    The parent sends the addresses of the workers with smaller numbers, and receives the address of this worker, then an
    `Epoch` for every epoch.
    """
    from threadpoolctl import threadpool_limits

    link.enter()
    # The network is so small that most of a step is the exchange, as the table shows.
    logging.getLogger("gradwire.exchange.metrics").setLevel(logging.ERROR)
    trainer = Trainer(recipe, rank, Digits.load())
    params = trainer.network.initial(SEED)
    # One thread each: the workers share the cores, and NumPy's results do not depend on the number of cores.
    with threadpool_limits(1), gw.Node(f"{link.host}:0", pipe.recv(), secret=secret) as node:
        pipe.send(node.address)
        share = gw.Exchange(
            gw.Encoder(trainer.network.numel, gw.TargetDensity(0.01)),
            node,
            min_peers=recipe.workers - 1,
            codec="dense" if recipe.dense else "threshold",
            topology="sharded" if recipe.dense else "auto",
            apply_residual=not recipe.dense,
        )
        share.wait_for_peers()
        begin_s = time.monotonic()
        for number in range(1, recipe.epochs + 1):
            losses = []
            for batch in trainer.batches():
                update, loss = trainer.update(params, batch, share.next_step)
                result = share.step(update, params)
                if result.lost:
                    raise gw.PeerLost(f"{result.lost[0].address} went down in step {result.step}")
                if link.mbit:
                    link.wait(node.stats().udp_bytes_sent, begin_s)
                losses.append(loss)
            stats = share.stats
            digits = trainer.digits
            (shared,) = share.shared(params)
            pipe.send(
                Epoch(
                    number=number,
                    elapsed_s=time.monotonic() - begin_s,
                    loss=sum(losses) / len(losses),
                    accuracy=trainer.network.accuracy(
                        shared, digits.test_inputs, digits.test_labels
                    ),
                    udp_bytes=node.stats().udp_bytes_sent,
                    digest=hashlib.sha256(shared.tobytes()).hexdigest(),
                    encode_s=stats.encode_s / stats.steps,
                    wait_s=stats.wait_s / stats.steps,
                    apply_s=stats.apply_s / stats.steps,
                )
            )
