"""Batches that Spark makes while they are consumed."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.feed import Feed, FeedFailed

pytestmark = [pytest.mark.spark, pytest.mark.slow]
pytest.importorskip("pyspark", reason="pyspark is not installed")

WAIT_S = 120.0


def make_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield ten rows at a time."""
    for batch in batches:
        ids = batch.column("id").to_numpy()
        for first in range(0, len(ids), 10):
            yield {"id": ids[first : first + 10]}


def test_every_row_arrives_once(session: Any) -> None:
    from gradwire.spark import stream

    with Feed(4, 1 << 10) as feed, stream(session.range(0, 500, 1, 3), feed, make_batches) as job:
        found = np.concatenate([batch["id"].copy() for batch in feed])
        assert job.join(WAIT_S)
        assert job.join(math.inf)
    assert sorted(found.tolist()) == list(range(500))
    assert job.error is None


def test_closing_the_feed_cancels_the_job_within_a_second(session: Any) -> None:
    from gradwire.spark import stream

    with Feed(4, 1 << 10) as feed:
        job = stream(session.range(0, 100_000_000, 1, 2), feed, make_batches)
        for _ in range(20):
            feed.get(WAIT_S)
        feed.close()
        closed_s = time.monotonic()
        assert job.join(WAIT_S)
        assert time.monotonic() - closed_s < 5.0  # a second on a machine with nothing else to do
        assert feed.produced - feed.consumed <= 4
    assert job.error is None


def test_several_feeds_get_batches_in_turn_also_over_a_node(session: Any) -> None:
    from gradwire.spark import stream

    secret = bytes(range(32)).hex()
    with (
        Feed(64, 1 << 10) as near,
        Feed(64, 1 << 10) as far,
        gw.Node("127.0.0.1:0", secret=secret) as node,
    ):
        far.serve(node)
        job = stream(session.range(0, 400, 1, 2), [near, node.address], make_batches, secret=secret)
        found = [[int(batch["id"][0]) for batch in one] for one in (near, far)]
        assert job.join(WAIT_S)
    assert [len(one) for one in found] == [20, 20]
    assert sorted(found[0] + found[1]) == list(range(0, 400, 10))


def test_an_error_in_a_task_reaches_the_consumer(session: Any) -> None:
    from gradwire.spark import stream

    def fail(_batches: Iterator[Any]) -> Iterator[Any]:
        yield from ()
        raise RuntimeError("this series has a gap")

    with (
        Feed(2, 64) as feed,
        stream(session.range(4), feed, fail),
        pytest.raises(FeedFailed, match="this series has a gap"),
    ):
        feed.get(WAIT_S)


def kill_at(folder: Any, numbers: tuple[int, ...], *, shuffles: bool = False) -> Any:
    """Return a function that makes batches, and whose process is killed once at each of these numbers of batches."""
    base = str(folder)

    def make(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import signal
        from pathlib import Path

        from pyspark import TaskContext

        part = TaskContext.get().partitionId()
        attempts = Path(base, f"attempt-{part}")
        attempt = len(attempts.read_text()) if attempts.exists() else 0
        attempts.write_text("x" * (attempt + 1))
        ids = np.concatenate([batch.column("id").to_numpy() for batch in batches])
        if shuffles and attempt:
            ids = ids[::-1]
        for number, first in enumerate(range(0, len(ids), 10)):
            if part == 1 and attempt < len(numbers) and number == numbers[attempt]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield {"id": ids[first : first + 10].copy()}

    return make


@pytest.mark.parametrize("feeds", [1, 2])
def test_every_batch_arrives_once_though_a_python_worker_is_killed_three_times(
    repeating: Any, tmp_path: Any, feeds: int
) -> None:
    from gradwire.spark import stream

    make = kill_at(tmp_path, (100, 250, 990))
    counts: list[list[int]] = [[] for _ in range(feeds)]
    rows = repeating.range(0, 20_000, 1, 2)
    with contextlib.ExitStack() as stack:
        queues = [stack.enter_context(Feed(16, 1 << 10)) for _ in range(feeds)]
        job = stack.enter_context(stream(rows, queues, make))

        def consume(index: int) -> None:
            counts[index] = [int(batch["id"][0]) for batch in queues[index]]

        threads = [threading.Thread(target=consume, args=(index,)) for index in range(feeds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert job.join(WAIT_S)
        assert (job.error, job.lost) == (None, 0)
    assert sorted(itertools.chain(*counts)) == list(range(0, 20_000, 10))


def test_batches_that_cannot_be_told_apart_are_counted_and_the_end_raises(
    repeating: Any, tmp_path: Any
) -> None:
    from gradwire.spark import stream

    make = kill_at(tmp_path, (50,), shuffles=True)
    with Feed(16, 1 << 10) as feed, stream(repeating.range(0, 2000, 1, 2), feed, make) as job:
        found: list[int] = []
        with pytest.raises(FeedFailed, match="batches are lost"):
            found.extend(int(batch["id"][0]) for batch in feed)
        with pytest.raises(FeedFailed, match="50 batches are lost"):
            job.join(WAIT_S)
        assert (len(set(found)), job.lost) == (150, 50)


@pytest.mark.usefixtures("spark")  # a classic session
def test_a_streaming_data_frame_fills_a_feed_until_the_feed_is_closed(session: Any) -> None:
    from gradwire.spark import stream

    rows = session.readStream.format("rate").option("rowsPerSecond", 200).load()
    rows = rows.selectExpr("value id")
    with Feed(8, 1 << 10) as feed:
        job = stream(rows, feed, make_batches)
        found: list[int] = []
        while len(found) < 500:
            found += feed.get(WAIT_S)["id"].tolist()
        feed.close()
        assert job.join(WAIT_S)
    assert job.error is None
    assert len(set(found)) == len(found)
    assert not session.streams.active


def test_feeds_elsewhere_need_their_secret(session: Any) -> None:
    from gradwire.spark import stream

    with pytest.raises(ValueError, match="need their nodes' secret"):
        stream(session.range(1), "10.1.1.5:40123", make_batches)
    with pytest.raises(ValueError, match="there is no feed"):
        stream(session.range(1), [], make_batches)
