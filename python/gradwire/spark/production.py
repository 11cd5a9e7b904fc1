"""Mini-batches that Spark makes while training runs."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from .. import clock
from ..errors import Closed
from ..feed import Feed, FeedFailed, layout
from ..feed.link import Link
from ..feed.ring import Claim
from ..transport import Node, generate_secret
from .session import cancel, check_runs, driver_address, failure_of, is_connect, tagged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Production", "stream"]

_LOG = logging.getLogger("gradwire.spark")
_POLL_S: Final = 0.02
_PAUSE_S: Final = 1e-4  # the first wait where no feed has space
_CONNECT_S: Final = 30.0
_PATIENCE_S: Final = 0.3  # of a task, for links to answer where there are several feeds


def stream(
    rows: DataFrame,
    feeds: Feed | str | Sequence[Feed | str],
    make_batch: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]],
    *,
    secret: str | None = None,
) -> Production:
    """Make batches in Spark's tasks and put them into feeds, in the background.

    The job starts before training does, waits where the feeds are full, and is cancelled within a second after the last
    feed is closed. At its end the feeds are finished; if it fails, every consumer gets the error.

    Every batch is delivered once, also if Spark repeats a task: the feeds know how many batches of the task's partition
    they have, and the new attempt puts those that follow. For that it has to make the same batches again, in the same
    order, which checksums show. If it makes others, nobody knows which rows have arrived: `Production.lost` counts the
    batches that are left out, and consumers get `FeedFailed` after the last batch, `Production.join` raises it.

    Args:
        rows: a DataFrame, of a classic or a Connect session; or a streaming DataFrame of a classic session, whose query
            then runs until the last feed is closed.
        feeds: feeds of this process; for trainers on other machines the "host:port" of the node that serves each feed.
            A task puts each batch into the next feed that has space; a feed that is closed ends only itself.
        make_batch: called in every task with the rows of its partition as Arrow batches; yields what `Feed.put` takes.
        secret: of the nodes at "host:port".

    Raises:
        ValueError: there is no feed, or no secret for a node, or the session was stopped.
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
    check_runs(rows.sparkSession)
    return Production(rows, targets, make_batch, secret or generate_secret())


class Production:
    """A job that makes batches; a context manager that stops the job at its end.

    Attributes:
        error: the error with which the job ended; None without one.
        lost: number of batches that are left out, because a repeated task made others than its first attempt.
    """

    def __init__(
        self,
        rows: DataFrame,
        feeds: list[Feed | str],
        make_batch: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]],
        secret: str,
    ) -> None:
        self._session = rows.sparkSession
        if rows.isStreaming and is_connect(self._session):
            raise TypeError(
                "a streaming DataFrame of Spark Connect cannot fill feeds of this process: use a classic session"
            )
        self._tag = f"gradwire-{secrets.token_hex(8)}"
        self._ended = threading.Event()
        self._query: Any = None
        self.error: Exception | None = None
        self.lost = 0
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
        self._task = _Task(tuple(places), secret, secrets.randbits(62), make_batch)
        threading.Thread(target=self._run, args=(rows,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def _are_all_closed(self) -> bool:
        return all(feed.is_closed for feed in self._feeds)

    def _run(self, rows: DataFrame) -> None:
        text = ""
        try:
            if rows.isStreaming:
                self._query = rows.writeStream.foreachBatch(self._make_part).start()
                self._query.awaitTermination()
            else:
                with tagged(self._session, self._tag):
                    self._make(rows)
        except Exception as error:
            if not self._are_all_closed:
                self.error = error
                for feed in self._feeds:
                    feed.fail(failure_of(error))
        finally:
            if self.lost:
                text = (
                    f"{self.lost} batches are lost: a task was repeated, and made other batches than at its first "
                    "attempt. Give every partition the same rows in the same order (persist, or "
                    "sortWithinPartitions), and let make_batch not depend on chance or time"
                )
                self.error = self.error or FeedFailed(text)
            for feed in self._feeds:
                feed.finish(text)  # without effect on a feed that is closed or failed
                try:
                    feed._store.check(is_producer=False)
                except FeedFailed as error:  # reported by another producer
                    self.error = self.error or error
                except Closed:
                    pass
            self._ended.set()
            self._nodes.close()

    def _make_part(self, rows: DataFrame, number: int) -> None:
        """Make the batches of one of a stream's micro-batches."""
        try:
            self._make(rows, number)
        except Exception:
            # Spark matches the error of a query that is stopped against a pattern, and Java's stack overflows at the
            # hundreds of lines of a cancelled job's.
            if not self._are_all_closed:
                raise

    def _make(self, rows: DataFrame, number: int = 0) -> None:
        """Make the batches of all rows, or of the rows of one of a stream's micro-batches, whose number is given."""
        made = 0
        for row in rows.mapInArrow(self._task.of(number), "batches long, lost long").collect():
            made += row.batches
            self.lost += row.lost
        _LOG.info("production ended after %d batches, %d lost", made, self.lost)

    def _watch(self) -> None:
        """Cancel the job when all feeds are closed."""
        while not self._ended.wait(_POLL_S):
            if self._are_all_closed:
                with contextlib.suppress(Exception):  # the job may have ended by itself meanwhile
                    if self._query is not None:
                        self._query.stop()
                    cancel(self._session, self._tag)
                self._ended.wait(1.0)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job; return whether it has ended.

        Raises:
            FeedFailed: batches are lost.
        """
        has_ended = self._ended.wait(clock.bounded_s(timeout_s))
        if self.lost and isinstance(self.error, FeedFailed):
            raise self.error
        return has_ended

    def stop(self) -> None:
        """Close the feeds and wait until the job is cancelled."""
        for feed in self._feeds:
            feed.close()
        self._ended.wait()

    def __enter__(self) -> Production:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()


@dataclass(frozen=True)
class _Task:
    """What every task of a stream does, on an executor.

    Attributes:
        places: of each feed its name on the driver's machine and the address of its node.
        secret: of the nodes.
        stream: the number of the stream.
        make_batch: the user's function.
    """

    places: tuple[tuple[str, str], ...]
    secret: str
    stream: int
    make_batch: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]

    def of(self, number: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return the task for one micro-batch."""
        return lambda batches: self._produce(number, batches)

    def _produce(self, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Put one task's batches into the feeds."""
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        part = context.partitionId()
        made = lost = 0
        with contextlib.ExitStack() as stack, contextlib.suppress(Closed):
            outlets = _Outlets(
                [_open(name, address, self.secret, stack) for name, address in self.places],
                Claim(self.stream, part, number, context.taskAttemptId()),
            )
            for batch in self.make_batch(batches):
                outlets.put(layout.Layout(batch))
            made, lost = outlets.end()
        yield pa.RecordBatch.from_pydict({"batches": [made], "lost": [lost]})


class _Outlets:
    """The feeds of one task: each batch goes to the next feed that has space.

    Args:
        feeds: of this machine, or links to others.
        claim: the attempt.

    Raises:
        Superseded: a later attempt of the task runs.
        Closed: all feeds are closed.
    """

    def __init__(self, feeds: list[Feed], claim: Claim) -> None:
        self._feeds = feeds
        self._next = claim.part
        self._last: Feed | None = None
        arrived = [claim]
        for feed in list(feeds):
            with self._dropped_if_closed(feed):
                arrived.append(feed._store.claim(claim))
        # Batches go in one after the other: if a batch is in a feed, all before it are in theirs.
        self._arrived = max(arrived, key=lambda claim: claim.batches)
        self._made = claim  # by this attempt
        self._is_other = False  # than what has arrived
        self._patience_s = _PATIENCE_S

    def put(self, batch: layout.Layout) -> None:
        """Put a batch that has not arrived yet; wait for space.

        Raises:
            Superseded, Closed: as the class.
        """
        made = self._made
        self._made = made._replace(batches=made.batches + 1, checksum=batch.checksum(made.checksum))
        if self._made.batches == self._arrived.batches:
            self._is_other = self._made.checksum != self._arrived.checksum
        elif self._made.batches > self._arrived.batches and not self._is_other:
            self._put(batch)

    def end(self) -> tuple[int, int]:
        """Wait until all batches have arrived; return how many have, and how many are lost.

        Raises:
            Superseded: as the class.
        """
        self._flush()
        arrived = self._arrived.batches
        made = self._made.batches
        # Which rows the batches that have arrived hold is unknown if the earlier attempt made others.
        if self._is_other or made < arrived:
            return arrived, max(made - arrived, 1)
        return made, 0

    def _put(self, batch: layout.Layout) -> None:
        pause_s = _PAUSE_S
        while True:
            for _ in range(len(self._feeds)):
                feed = self._feeds[self._next % len(self._feeds)]
                self._next += 1
                # With a single feed there is nothing to choose. A link learns only after a moment that there is space;
                # nobody waits longer for a feed that is full.
                patience_s = self._patience_s if isinstance(feed._store, Link) else 0.0
                timeout_s = None if len(self._feeds) == 1 else patience_s
                began_s = clock.now_s()
                is_in = False
                with self._dropped_if_closed(feed), contextlib.suppress(TimeoutError):
                    # Before the next batch is in another feed, the last one has to be in its own.
                    prepare = self._flush if feed is not self._last else None
                    feed._put(batch, timeout_s, self._made, prepare)
                    self._last = feed
                    is_in = True
                self._patience_s = max(0.0, self._patience_s - (clock.now_s() - began_s))
                if is_in:
                    return
                if not self._feeds:
                    break
            if not self._feeds:
                raise Closed("all feeds are closed")
            clock.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _POLL_S)

    def _flush(self) -> None:
        if self._last is not None:
            # A feed that has ended has done so with all that was in it.
            with contextlib.suppress(Closed, FeedFailed):
                self._last._store.flush()

    @contextlib.contextmanager
    def _dropped_if_closed(self, feed: Feed) -> Iterator[None]:
        try:
            yield
        except (Closed, FeedFailed):
            self._feeds.remove(feed)


def _open(name: str, address: str, secret: str, stack: contextlib.ExitStack) -> Feed:
    """Return a feed of this machine by its name, or else one behind an address."""
    if name:
        with contextlib.suppress(Closed):
            return Feed.attach(name)
    node = stack.enter_context(Node("0.0.0.0:0", [address], secret=secret))
    return Feed.connect(node, timeout_s=_CONNECT_S)
