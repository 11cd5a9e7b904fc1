"""Mini-batches that Spark makes while training runs."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ..errors import Closed
from ..feed import Feed, FeedFailed
from ..transport import Node, generate_secret
from .session import cancel, driver_address, tagged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Production", "stream"]

_LOG = logging.getLogger("gradwire.spark")
_POLL_S: Final = 0.02
_CONNECT_S: Final = 30.0


def stream(
    rows: DataFrame,
    feeds: Feed | str | Sequence[Feed | str],
    make_batch: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]],
    *,
    secret: str | None = None,
) -> Production:
    """Make batches in Spark's tasks and put them into feeds, in the background.

    The job starts before training does, waits where the feeds are full, and is cancelled within a second after a feed
    is closed. At its end the feeds are finished; if it fails, every consumer gets the error. Every batch is delivered
    at most once, and exactly once if no task fails: a task that Spark repeats puts nothing, because it is unknown
    which of its batches arrived.

    Args:
        rows: a DataFrame, of a classic or a Connect session.
        feeds: feeds of this process; for trainers on other machines the "host:port" of the node that serves each feed.
            Every task puts its batches into all feeds in turn.
        make_batch: called in every task with the rows of its partition as Arrow batches; yields what `Feed.put` takes.
        secret: of the nodes at "host:port".

    Raises:
        ValueError: there is no feed, or no secret for a node.
        TimeoutError: a node cannot be reached, or serves no feed.

    Example:
        >>> feed = Feed(batches=16)  # doctest: +SKIP
        >>> with stream(df, feed, make_batch):  # doctest: +SKIP
        ...     for batch in feed:
        ...         train(batch)
    """
    targets = [feeds] if isinstance(feeds, (Feed, str)) else list(feeds)
    if not targets:
        raise ValueError("there is no feed to put batches into")
    if secret is None and any(isinstance(target, str) for target in targets):
        raise ValueError("the feeds at other addresses need their nodes' secret")
    return Production(rows, targets, make_batch, secret or generate_secret())


class Production:
    """A job that makes batches; a context manager that stops the job at its end.

    Attributes:
        error: the error with which the job or one of its tasks failed; None without one.
    """

    def __init__(
        self,
        rows: DataFrame,
        feeds: list[Feed | str],
        make_batch: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]],
        secret: str,
    ) -> None:
        self._session = rows.sparkSession
        self._tag = f"gradwire-{secrets.token_hex(8)}"
        self._ended = threading.Event()
        self.error: Exception | None = None
        self._feeds: list[Feed] = []
        places: list[tuple[str, str]] = []
        with contextlib.ExitStack() as stack:
            for target in feeds:
                if isinstance(target, Feed):
                    node = stack.enter_context(Node("0.0.0.0:0", secret=secret))
                    target.serve(node)
                    self._feeds.append(target)
                    places.append((target.name, driver_address(self._session, node)))
                else:
                    self._feeds.append(_open("", target, secret, stack))
                    places.append(("", target))
            self._nodes = stack.pop_all()
        job = rows.mapInArrow(
            lambda batches: _produce(places, secret, make_batch, batches), "batches long"
        )
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _run(self, job: DataFrame) -> None:
        try:
            with tagged(self._session, self._tag):
                count = sum(row.batches for row in job.collect())
            _LOG.info("production ended after %d batches", count)
        except Exception as error:
            if not any(feed.is_closed for feed in self._feeds):
                self.error = error
                for feed in self._feeds:
                    feed.fail(error)
        finally:
            for feed in self._feeds:
                feed.finish()  # without effect on a feed that is closed or failed
                try:
                    feed._store.check(is_producer=False)
                except FeedFailed as error:  # reported by a task
                    self.error = self.error or error
                except Closed:
                    pass
            self._ended.set()
            self._nodes.close()

    def _watch(self) -> None:
        """Cancel the job when a feed is closed."""
        while not self._ended.wait(_POLL_S):
            if any(feed.is_closed for feed in self._feeds):
                with contextlib.suppress(Exception):  # the job may have ended by itself meanwhile
                    cancel(self._session, self._tag)
                self._ended.wait(1.0)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """Close the feeds and wait until the job is cancelled."""
        for feed in self._feeds:
            feed.close()
        self.join()

    def __enter__(self) -> Production:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()


def _produce(
    places: list[tuple[str, str]], secret: str, make_batch: Any, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Put one task's batches into the feeds (on an executor)."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    if context.attemptNumber() > 0:
        _LOG.warning(
            "partition %d is lost: its task failed after it had put batches", context.partitionId()
        )
        return
    count = 0
    with contextlib.suppress(Closed), contextlib.ExitStack() as stack:
        feeds = [_open(name, address, secret, stack) for name, address in places]
        try:
            for batch in make_batch(batches):
                feeds[(context.partitionId() + count) % len(feeds)].put(batch)
                count += 1
            for feed in feeds:
                feed._store.flush()
        except Closed:
            raise
        except Exception as error:  # Spark repeats the task, which then puts nothing and succeeds
            for feed in feeds:
                feed.fail(error)
            raise
    yield pa.RecordBatch.from_pydict({"batches": [count]})


def _open(name: str, address: str, secret: str, stack: contextlib.ExitStack) -> Feed:
    """Return a feed of this machine by its name, or else one behind an address."""
    if name:
        with contextlib.suppress(Closed):
            return Feed.attach(name)
    node = stack.enter_context(Node("0.0.0.0:0", [address], secret=secret))
    return Feed.connect(node, timeout_s=_CONNECT_S)
