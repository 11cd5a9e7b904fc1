"""The driver's view of a training: the epochs as they end, and the workers that fail or fall silent."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..clock import LogLimit, now_s
from ..errors import Closed
from ..transport import Node, PeerJoined
from .placement import host_of
from .session import driver_address
from .train import FAILURE_S, epoch_rows
from .watch import WORKERS_MAX, silence_limits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..transport import Event

__all__ = ["Progress", "report_epoch"]

_LOG = logging.getLogger("gradwire.spark")

# The other workers wait for a silent one as long as the driver does. They know more about it, so they may speak first.
_MARGIN_S: Final = 5.0
# Workers that know of an error tell each other, and end. When a job is cancelled, Spark 4 ends every executor with a
# task that waits for the others, so it is cancelled only if the workers have not ended after that.
_END_S: Final = FAILURE_S + 1.0
_DIED: Final = "a worker's process ended without an error: it was killed, or crashed"


class Progress:
    """Listens to the workers that can reach the driver's node, and decides when a training has failed.

    Args:
        spark: the session.
        secret: of the training.
        workers: number of workers.
        timeout_s: silence after which a worker is given up.
        retries: failed attempts after which there is another one.
        cancel: ends Spark's job; called from another thread.

    Attributes:
        address: of the driver's node.
        failure: the error with which the training ends, and the worker's traceback.
        is_interrupted: whether this attempt was ended so that another one can begin.
    """

    def __init__(
        self,
        spark: SparkSession,
        secret: bytes,
        workers: int,
        *,
        timeout_s: float,
        retries: int,
        cancel: Callable[[], None],
    ) -> None:
        limits = silence_limits(None, timeout_s + _MARGIN_S)
        self._node = Node("0.0.0.0:0", secret=secret, limits=limits)
        self._log = LogLimit(_LOG.warning)
        self._workers = workers
        self._timeout_s = timeout_s
        self._retries = retries
        self._cancel = cancel
        self.address = driver_address(spark, self._node)
        self.failure: tuple[str, str] | None = None
        self.is_interrupted = False
        self._tasks: dict[int, list[int]] = {}  # by worker: Spark's numbers of its attempts
        self._failed_task = -1  # Spark's highest number in the attempts that have failed
        self._waits: dict[int, int] = {}  # by worker: the waits for all others that it has begun
        self._hosts: dict[int, str] = {}
        self._last = "", ""
        self._reported_failures = 0  # the attempts of which a warning says why they failed
        self._cancel_at_s = math.inf
        self._epochs: dict[int, dict[int, Any]] = {}
        self._reported = -1
        self._thread = threading.Thread(target=self._listen, name="gradwire-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._node.close(0.0)
        self._thread.join()

    def may_repeat(self) -> bool:
        """Return whether another attempt may begin, now that Spark's job has ended; prepare for it."""
        may_repeat = self.is_interrupted and self.failure is None
        self.is_interrupted = False
        return may_repeat

    def report(self, history: list[dict[str, Any]]) -> None:
        """Report the epochs that were not reported yet."""
        for epoch in sorted({row["epoch"] for row in history}):
            if epoch > self._reported:
                self._reported = epoch
                report_epoch([row for row in history if row["epoch"] == epoch])

    def _listen(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                messages = self._node.receive(0.5)
                if now_s() >= self._cancel_at_s:
                    self._cancel_at_s = math.inf
                    self._cancel()
                for event in self._node.events():
                    self._take_event(event)
                for message in messages:
                    task, worker = divmod(message.peer.id, WORKERS_MAX)
                    try:
                        self._take_note(task, worker, json.loads(bytes(message.payload)))
                    except (KeyError, TypeError, ValueError, RecursionError) as error:
                        text = "a note of %s cannot be read: %r"
                        self._log.log(worker, now_s(), text, self._name(worker), error)

    def _take_event(self, event: Event) -> None:
        task, worker = divmod(event.peer.id, WORKERS_MAX)
        if isinstance(event, PeerJoined):
            self._hosts[worker] = host_of(event.peer.address)
            tasks = self._tasks.setdefault(worker, [])
            if task not in tasks:
                if self.failure is None and self._reported_failures < len(tasks) <= self._retries:
                    self._warn(len(tasks), _DIED)
                if tasks and tasks[-1] > self._failed_task:
                    # The last attempt has failed. Its workers that were killed are not silent in this one.
                    self._failed_task = self._latest_task()
                tasks.append(task)
                self._waits.pop(worker, None)
            if len(tasks) > self._retries + 1:
                self._end(self._last[0] or _DIED, self._last[1])
        elif (
            event.reason == "timeout"
            and task > self._failed_task
            and task == self._tasks[worker][-1]
        ):
            text = f"{self._name(worker)} was silent for {self._timeout_s:g} s"
            # Nobody may wait for the silent worker, so Spark's job is ended from here.
            if self._fail(text, ""):
                self.is_interrupted = True
                self._cancel()

    def _take_note(self, task: int, worker: int, note: dict[str, Any]) -> None:
        if note["kind"] == "epoch":
            row = note["row"]
            rows = self._epochs.setdefault(row["epoch"], {})
            rows[row["worker"]] = row
            if len(rows) == self._workers:
                self.report(epoch_rows(list(rows.values())))
        if task <= self._failed_task or self.failure is not None:
            return
        self._waits[worker] = note["waits"]
        if note["kind"] in ("epoch", "wait"):
            return
        text = f"worker {worker} failed: {note['text']}"
        host = self._hosts.get(worker)
        if host and "(on " not in text:
            text += f" (on {host})"
        if note["is_final"]:
            self._end(text, note["trace"], _END_S)
        else:
            late = self._late_workers() if note.get("is_late") else []
            if late:
                text = f"{', '.join(late)} did not come within {self._timeout_s:g} s: {text}"
            self._fail(text, note["trace"], _END_S)

    def _late_workers(self) -> list[str]:
        """Return the workers for which the others wait."""
        most = max(self._waits.values(), default=0)
        workers = range(self._workers)
        return [self._name(worker) for worker in workers if self._waits.get(worker, 0) < most]

    def _name(self, worker: int) -> str:
        host = self._hosts.get(worker)
        return f"worker {worker} on {host}" if host else f"worker {worker}"

    def _fail(self, text: str, trace: str, delay_s: float = 0.0) -> bool:
        """Note that an attempt failed; return whether there is another one. If not, end as `_end` does."""
        self._last = text, trace
        self._waits.clear()
        attempts = max(map(len, self._tasks.values()), default=1)
        if attempts > self._retries:
            self._end(text, trace, delay_s)
            return False
        self._failed_task = self._latest_task()
        self._warn(attempts, text)
        return True

    def _latest_task(self) -> int:
        """Return Spark's highest number of all attempts that the driver knows, -1 without any."""
        return max((task for tasks in self._tasks.values() for task in tasks), default=-1)

    def _warn(self, attempts: int, text: str) -> None:
        """Log why the latest of so many attempts failed."""
        self._reported_failures = attempts
        _LOG.warning(
            "attempt %d of %d: %s; training begins again, at the last checkpoint if there is one",
            attempts,
            self._retries + 1,
            text,
        )

    def _end(self, text: str, trace: str, delay_s: float = 0.0) -> None:
        """Let the training end with an error; cancel Spark's job if it has not ended after the delay."""
        if self.failure is None:
            self.failure = text, trace
            self._cancel_at_s = now_s() + delay_s


def report_epoch(rows: list[dict[str, Any]]) -> None:
    """Log one epoch."""
    first = rows[0]
    seconds = max(row["seconds"] for row in rows)
    exchange_s = sum(row["encode_s"] + row["wait_s"] + row["apply_s"] for row in rows)
    held = first["validation_loss"]
    _LOG.info(
        "epoch %d: loss %.4g%s, %.0f rows/s, %.0f%% of the time in gradwire",
        first["epoch"],
        first["loss"],
        "" if math.isnan(held) else f", validation {held:.4g}",
        sum(row["rows"] for row in rows) / max(seconds, 1e-9),
        100 * exchange_s / max(sum(row["seconds"] for row in rows), 1e-9),
    )
