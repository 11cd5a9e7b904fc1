"""Batches that Spark makes while they are consumed."""

from __future__ import annotations

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


def test_feeds_elsewhere_need_their_secret(session: Any) -> None:
    from gradwire.spark import stream

    with pytest.raises(ValueError, match="need their nodes' secret"):
        stream(session.range(1), "10.1.1.5:40123", make_batches)
    with pytest.raises(ValueError, match="there is no feed"):
        stream(session.range(1), [], make_batches)
