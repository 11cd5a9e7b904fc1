"""Batches of repeated tasks: each once, whoever dies when."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.errors import Closed
from gradwire.feed import Feed, FeedFailed
from gradwire.feed.layout import Layout
from gradwire.feed.ring import Claim, Ring, Superseded
from gradwire.shared_memory import FOLDER

FIRST = Claim(stream=5, part=3, epoch=0, attempt=10)
LATER = FIRST._replace(attempt=11)
WAIT_S = 30.0


@pytest.fixture(params=["memory", "node"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Feed, list[Feed]]]:
    """A feed, and two producers' sides of it: in shared memory, or over nodes."""
    secret = bytes(range(32))
    with Feed(8, 1 << 10) as feed:
        if request.param == "memory":
            yield feed, [Feed.attach(feed.name) for _ in range(2)]
            return
        with gw.Node("127.0.0.1:0", secret=secret) as node:
            feed.serve(node)
            with (
                gw.Node("127.0.0.1:0", [node.address], secret=secret) as one,
                gw.Node("127.0.0.1:0", [node.address], secret=secret) as other,
            ):
                yield feed, [Feed.connect(one), Feed.connect(other)]


def put(feed: Feed, claim: Claim, number: int) -> None:
    """Put a batch with its number."""
    feed._put(Layout(np.array([number])), WAIT_S, claim._replace(batches=number, checksum=number))


def numbers_in(feed: Feed) -> list[int]:
    """Take all batches that are in a feed."""
    return [int(feed.get(WAIT_S)[0]) for _ in range(feed.produced - feed.consumed)]  # type: ignore[index]


def test_a_later_attempt_goes_on_after_the_batches_that_have_arrived(sides: Any) -> None:
    feed, (one, other) = sides
    assert one._store.claim(FIRST) == FIRST
    for number in (1, 2, 3):
        put(one, FIRST, number)
    one._store.flush()
    assert other._store.claim(LATER) == LATER._replace(batches=3, checksum=3)
    put(other, LATER, 4)
    other._store.flush()
    assert numbers_in(feed) == [1, 2, 3, 4]


def test_an_earlier_attempt_that_still_runs_puts_nothing_any_more(sides: Any) -> None:
    feed, (one, other) = sides
    one._store.claim(FIRST)
    put(one, FIRST, 1)
    one._store.flush()
    other._store.claim(LATER)

    def put_late() -> None:
        put(one, FIRST, 2)
        one._store.flush()  # a link learns it later

    with pytest.raises(Superseded):
        put_late()
    put(other, LATER, 2)
    other._store.flush()
    assert numbers_in(feed) == [1, 2]
    with pytest.raises(Superseded):
        other._store.claim(FIRST)


def test_parts_epochs_and_streams_have_their_own_numbers(sides: Any) -> None:
    _, (one, other) = sides
    one._store.claim(FIRST)
    put(one, FIRST, 1)
    one._store.flush()
    for claim in (
        LATER._replace(part=2),
        LATER._replace(part=40),
        LATER._replace(stream=6),
        LATER._replace(epoch=1),
    ):
        assert other._store.claim(claim) == claim


@pytest.mark.parametrize("line", ["_write_claim", "_fill"])
def test_a_batch_whose_producer_dies_while_it_goes_in_is_in_with_its_number(line: str) -> None:
    with Feed(4, 1 << 10) as feed:
        feed._local().claim(FIRST)

        def die() -> None:
            attached = Feed.attach(feed.name)
            put(attached, FIRST, 1)
            setattr(Ring, line, lambda *_: os._exit(1))
            put(attached, FIRST, 2)

        process = multiprocessing.get_context("fork").Process(target=die)
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == 1
        assert feed._local().claim(LATER).batches == 2
        assert numbers_in(feed) == [1, 2]


def test_a_full_feed_frees_nothing_of_a_batch_that_was_refused() -> None:
    with Feed(2, 1 << 10) as feed:
        feed._local().claim(LATER)
        for _ in range(5):  # more often than there are slots
            with pytest.raises(Superseded):
                put(feed, FIRST, 1)
        put(feed, LATER, 1)
        assert numbers_in(feed) == [1]


def test_a_closed_feed_leaves_no_files_and_refuses_claims() -> None:
    feed = Feed(2, 1 << 10)
    feed._local().claim(FIRST)
    assert len(list(FOLDER.glob(f"{feed.name}*"))) == 2
    feed.close()
    assert list(FOLDER.glob(f"{feed.name}*")) == []
    with pytest.raises(Closed):
        feed._local().claim(FIRST)


def test_a_producer_that_comes_after_the_end_is_told_so() -> None:
    secret = bytes(range(32))
    feed = Feed(2, 1 << 10)
    with gw.Node("127.0.0.1:0", secret=secret) as node:
        feed.serve(node)
        feed.close()
        with (
            gw.Node("127.0.0.1:0", [node.address], secret=secret) as late,
            pytest.raises(Closed, match="ended"),
        ):
            Feed.connect(late, timeout_s=WAIT_S).put(np.zeros(1), WAIT_S)


def test_consumers_get_what_is_missing_after_the_last_batch() -> None:
    with Feed(2, 1 << 10) as feed:
        feed.put(np.array([7]))
        feed.finish("3 batches are lost")
        assert [int(batch[0]) for batch in [feed.get()]] == [7]  # type: ignore[index]
        with pytest.raises(FeedFailed, match=r"^3 batches are lost$"):
            feed.get()


def test_checksums_tell_batches_and_their_order_apart() -> None:
    batches = [Layout({"x": np.arange(3)}), Layout({"y": np.arange(3)}), Layout({"x": np.ones(3)})]
    assert len({batch.checksum(0) for batch in batches}) == 3
    assert batches[0].checksum(batches[1].checksum(0)) != batches[1].checksum(
        batches[0].checksum(0)
    )
    assert Layout(np.arange(6)[::2]).checksum(1) == Layout(np.array([0, 2, 4])).checksum(1)
