"""The feeds of one task, without Spark: which feed a batch goes to, and what is counted when a task is repeated."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradwire.errors import Closed
from gradwire.feed import Feed, layout
from gradwire.feed.ring import Claim, Superseded

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from gradwire.spark.production import _Outlets, stream

pytestmark = pytest.mark.spark
FIRST = Claim(stream=1, part=0, epoch=0, attempt=1)


def produce(feeds: Sequence[Feed], claim: Claim, numbers: Sequence[int]) -> tuple[int, int]:
    """Do what a task does; return how many batches have arrived, and how many are lost."""
    outlets = _Outlets([Feed.attach(feed.name) for feed in feeds], claim)
    for number in numbers:
        outlets.put(layout.Layout(np.array([number])))
    return outlets.end()


def numbers_in(*feeds: Feed) -> list[int]:
    return sorted(
        int(feed.get(1.0)[0])  # type: ignore[index]
        for feed in feeds
        for _ in range(feed.produced - feed.consumed)
    )


def test_a_slow_consumer_does_not_hold_up_the_other_feeds() -> None:
    with Feed(2, 64) as slow, Feed(64, 64) as fast:
        assert produce([slow, fast], FIRST, range(40)) == (40, 0)
        assert (slow.produced, fast.produced) == (2, 38)
        assert numbers_in(slow, fast) == list(range(40))


def test_a_feed_that_is_closed_ends_only_itself() -> None:
    with Feed(2, 64) as closed, Feed(64, 64) as open_feed:
        closing = threading.Timer(0.2, closed.close)
        closing.start()
        outlets = _Outlets([Feed.attach(feed.name) for feed in (closed, open_feed)], FIRST)
        closing.join()
        for number in range(20):
            outlets.put(layout.Layout(np.array([number])))
        assert open_feed.produced == 20
        open_feed.close()
        with pytest.raises(Closed, match="all feeds are closed"):
            outlets.put(layout.Layout(np.array([20])))


@pytest.mark.parametrize("arrived", [0, 1, 7, 20])
def test_a_repeated_task_puts_what_has_not_arrived(arrived: int) -> None:
    with Feed(5, 64) as one, Feed(64, 64) as other:
        produce([one, other], FIRST, range(arrived))
        assert produce([one, other], FIRST._replace(attempt=2), range(20)) == (20, 0)
        assert numbers_in(one, other) == list(range(20))


def test_a_repeated_task_that_makes_other_batches_counts_them_as_lost() -> None:
    with Feed(64, 64) as feed:
        produce([feed], FIRST, [1, 2, 3])
        arrived, lost = produce([feed], FIRST._replace(attempt=2), [1, 3, 2, 4, 5])
        assert (arrived, lost) == (3, 2)
        assert numbers_in(feed) == [1, 2, 3]
        arrived, lost = produce([feed], FIRST._replace(attempt=3), [1])
        assert (arrived, lost) == (3, 1)


def test_an_attempt_that_was_replaced_fails() -> None:
    with Feed(64, 64) as feed:
        old = _Outlets([Feed.attach(feed.name)], FIRST)
        old.put(layout.Layout(np.array([0])))
        assert produce([feed], FIRST._replace(attempt=2), range(3)) == (3, 0)
        with pytest.raises(Superseded):
            old.put(layout.Layout(np.array([1])))
        assert numbers_in(feed) == [0, 1, 2]


class Query:
    """A streaming DataFrame and its query, whose only micro-batch fails when it is cancelled."""

    isStreaming = True  # noqa: N815

    def __init__(self) -> None:
        self.is_cancelled = threading.Event()
        self.errors: list[Exception] = []

    def __getattr__(self, _name: str) -> Any:
        return self

    def __call__(self, *_: Any) -> Any:
        return self

    def get(self, _name: str) -> str:
        return "127.0.0.1"

    def isStopped(self) -> bool:  # noqa: N802
        return False

    def foreachBatch(self, function: Any) -> Query:  # noqa: N802
        self.function = function
        return self

    def awaitTermination(self) -> None:  # noqa: N802
        try:
            self.function(self, 0)
        except RuntimeError as error:
            self.errors.append(error)
            raise

    def collect(self) -> Any:
        self.is_cancelled.wait()
        raise RuntimeError("An error occurred while calling: the job was cancelled")


def test_a_query_that_is_stopped_within_a_micro_batch_has_no_error() -> None:
    """Java's stack overflows where Spark looks at that of a cancelled job."""
    with Feed(2, 64) as feed:
        query = Query()
        job = stream(query, feed, iter)  # type: ignore[arg-type]
        feed.close()
        query.is_cancelled.set()
        assert job.join(30.0)
    assert query.errors == []
    assert job.error is None
