"""The public interface of a feed: put batches in on one side, take them out on the other."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import Closed
from ..state import check_node, check_range, check_seconds
from . import layout
from .ring import FeedFailed, Ring

if TYPE_CHECKING:
    from ..transport import Node
    from .link import Link
    from .ring import Claim
    from .torch import FeedDataset

__all__ = ["Feed", "FeedFailed"]


class Feed:
    """A bounded queue of whole mini-batches in shared memory.

    Several processes may put batches, and several may take batches. Every batch goes to one consumer, in the order in
    which the batches were put. A consumer's arrays are views of the shared memory: nothing is copied, and the space is
    reused once nothing refers to any array of the batch. A full feed makes producers wait.

    Pass the feed to processes, forked or spawned, as an argument; or find the feed by its name with `attach`; or reach
    the feed from another machine with `connect`. A batch is delivered at most once, and exactly once if nothing fails:
    a producer that dies loses the batch that it was writing, and a consumer that dies loses the batches that it holds.

    Args:
        batches: number of batches that the feed holds, those in the consumers' hands included.
        batch_bytes: largest size of a batch's arrays together.

    Raises:
        ValueError: a number is out of range.
        OSError: the machine has too little shared memory.

    Example:
        >>> import numpy as np
        >>> from gradwire.feed import Feed
        >>> with Feed(batches=4, batch_bytes=1 << 10) as feed:
        ...     feed.put({"x": np.ones((2, 3), np.float32), "y": np.arange(2)})
        ...     feed.finish()
        ...     [(batch["x"].shape, batch["y"].tolist()) for batch in feed]
        [((2, 3), [0, 1])]
    """

    def __init__(self, batches: int = 8, batch_bytes: int = 1 << 20) -> None:
        if check_range("batches", batches, 0, 2**53) < 2:
            raise ValueError(f"batches is {batches}; a feed needs 2 or more: one is in use")
        check_range("batch_bytes", batch_bytes, 1, 2**53)
        self._store: Ring | Link
        self._store = Ring(slots=batches, slot_bytes=batch_bytes + layout.DESCRIPTION_BYTES)

    @classmethod
    def attach(cls, name: str) -> Feed:
        """Return the feed of this name, which a process of this machine made.

        Raises:
            Closed: there is no such feed that this process may open, or the feed belongs to another container.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be that of a feed, Feed.name, got {name!r}")
        feed = cls.__new__(cls)
        feed._store = Ring(name)
        return feed

    @classmethod
    def connect(cls, node: Node, *, timeout_s: float = 60.0) -> Feed:
        """Return the producers' side of a feed on another machine, where `serve` was called.

        Args:
            node: connected, or about to connect, to the node that serves the feed, and to no other. The feed takes all
                messages of this node, and does not close it.
            timeout_s: longest wait for the node that serves the feed.

        Raises:
            TimeoutError: the node that serves the feed could not be reached.
        """
        from .link import Link

        check_node(node)
        feed = cls.__new__(cls)
        feed._store = Link(node, check_seconds("timeout_s", timeout_s, least=0.0))
        return feed

    def serve(self, node: Node) -> None:
        """Take batches from producers on other machines, in a thread, until the node is closed.

        Args:
            node: a node whose peers are the producers of this feed only. The thread takes all its messages.
        """
        from .link import Server

        check_node(node)
        run = Server(self._local(), node).run
        threading.Thread(target=run, name="gradwire-feed", daemon=True).start()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the call by which another process of this machine attaches."""
        return Feed.attach, (self.name,)

    def __repr__(self) -> str:
        return (
            f"Feed({self.name!r})" if isinstance(self._store, Ring) else f"<Feed of {self._store}>"
        )

    @property
    def name(self) -> str:
        """Name for `attach`."""
        return self._local().name

    @property
    def is_closed(self) -> bool:
        """Whether the feed is closed, or a producer failed."""
        try:
            self._store.check(is_producer=False)
        except (Closed, FeedFailed):
            return True
        return False

    @property
    def produced(self) -> int:
        """Number of batches put so far, by all producers."""
        return self._local().counts[0]

    @property
    def consumed(self) -> int:
        """Number of batches taken so far, by all consumers."""
        return self._local().counts[1]

    def put(self, batch: Any, timeout_s: float | None = None) -> None:
        """Copy a batch into the feed; wait while the feed is full.

        Args:
            batch: a dict, tuple or list of arrays, or one array, of numbers; not modified.
            timeout_s: longest wait; None: no limit.

        Raises:
            Closed: the feed was closed or finished, or the process that made it is gone; producers end then.
            TimeoutError: the feed stayed full; nothing was put.
            FeedFailed: another producer failed.
            ValueError: the batch is larger than ``batch_bytes``.
            TypeError: an array holds something other than numbers.
        """
        self._put(layout.Layout(batch), timeout_s)

    def _put(
        self,
        planned: layout.Layout,
        timeout_s: float | None,
        claim: Claim | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Put a batch; call ``prepare`` before, once there is space."""
        allowed = self._store.slot_bytes - layout.DESCRIPTION_BYTES
        if planned.array_bytes > allowed:
            raise ValueError(
                f"the batch has {planned.array_bytes} bytes, the feed takes {allowed}: make the feed "
                "with a larger batch_bytes, or smaller batches"
            )
        slot = self._store.reserve(planned.nbytes, _checked_wait(timeout_s))
        try:
            if prepare is not None:
                prepare()
            planned.write(slot.buffer)
        except BaseException:
            self._store.abandon(slot)
            raise
        self._store.commit(slot, claim)

    def get(self, timeout_s: float | None = None) -> layout.Batch:
        """Wait for the oldest batch and return it as the producer put it (a list as a tuple).

        The arrays are writable views of the shared memory, valid as long as they are referenced.

        Args:
            timeout_s: longest wait; None: no limit.

        Raises:
            Closed: the feed is closed, or finished and empty.
            FeedFailed: a producer failed.
            TimeoutError: no batch came in time.
            GradwireError: this process still refers to all batches of the feed.
        """
        return layout.read(self._local().take(_checked_wait(timeout_s)))

    def __iter__(self) -> Iterator[layout.Batch]:
        """Yield batches until the feed is closed, or finished and empty."""
        while True:
            try:
                batch = self.get()
            except Closed:
                return
            yield batch
            del batch  # while this generator waits, the space belongs to the producers

    def dataset(self) -> FeedDataset:
        """Return a torch ``IterableDataset`` of the batches as tensors, for ``DataLoader(..., batch_size=None)``."""
        from .torch import FeedDataset

        return FeedDataset(self)

    def finish(self, lost: str = "") -> None:
        """End production: consumers take the batches left, and stop. Call `finish` once, after the very last batch.

        Args:
            lost: what is missing; consumers get it as `FeedFailed` after the last batch.
        """
        self._store.end(how="finished", text=lost)

    def close(self) -> None:
        """End both sides at once: whoever waits in `put` or `get` gets `Closed`, and the batches left are lost."""
        self._store.end(how="closed")

    def fail(self, error: BaseException | str) -> None:
        """End both sides with an error, which every consumer gets as `FeedFailed`; only the first error counts."""
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        self._store.end(how="failed", text=text)

    def __enter__(self) -> Feed:
        """Return the feed."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the feed."""
        self.close()

    def _local(self) -> Ring:
        if not isinstance(self._store, Ring):
            raise TypeError("this feed is on another machine: here batches can only be put into it")
        return self._store


def _checked_wait(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else check_seconds("timeout_s", timeout_s, least=-math.inf)
