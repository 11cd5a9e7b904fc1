"""Batches from another machine: the same calls, over a node."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.errors import Closed
from gradwire.feed import Feed, FeedFailed, link, ring
from gradwire.transport import Limits

SECRET = bytes(range(32))
WAIT_S = 20.0


@pytest.fixture
def served() -> Iterator[Feed]:
    with Feed(batches=3, batch_bytes=1 << 16) as feed:
        yield feed


@pytest.fixture
def far(served: Feed) -> Iterator[Feed]:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as here,
        gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as there,
    ):
        served.serve(here)
        yield Feed.connect(there, timeout_s=WAIT_S)
        served.close()


def test_a_batch_arrives_as_it_was_put(served: Feed, far: Feed) -> None:
    for number in range(5):
        far.put({"x": np.full((20, 30), number), "y": np.zeros(0)}, WAIT_S)
        batch = served.get(WAIT_S)
        assert batch["x"].tolist() == [[number] * 30] * 20
        assert batch["y"].shape == (0,)
        del batch


def test_no_more_leaves_than_the_feed_holds(served: Feed, far: Feed) -> None:
    for number in range(3):
        far.put(np.array([number]), WAIT_S)
    with pytest.raises(TimeoutError, match="no space"):
        far.put(np.array([3]), timeout_s=0.1)
    assert served.get(WAIT_S)[0] == 0
    far.put(np.array([3]), WAIT_S)
    assert [int(served.get(WAIT_S)[0]) for _ in range(3)] == [1, 2, 3]


def test_closing_the_feed_ends_the_far_producer(served: Feed, far: Feed) -> None:
    errors: list[Exception] = []

    def produce() -> None:
        try:
            while True:
                far.put(np.zeros(1))
        except Closed as error:
            errors.append(error)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    served.get(WAIT_S)
    served.close()
    thread.join(WAIT_S)
    assert len(errors) == 1
    assert far.is_closed


def test_finish_and_failure_come_from_afar_as_well(served: Feed, far: Feed) -> None:
    far.put(np.zeros(1), WAIT_S)
    far.finish()
    assert len(list(served)) == 1
    far.fail("the table is gone")
    with pytest.raises(Closed):
        served.get(WAIT_S)


def test_a_far_error_reaches_the_consumer(served: Feed, far: Feed) -> None:
    far.fail("the table is gone")
    with pytest.raises(FeedFailed, match="the table is gone"):
        served.get(WAIT_S)


def test_a_producer_that_goes_leaves_its_space_to_the_others(served: Feed) -> None:
    with gw.Node("127.0.0.1:0", secret=SECRET) as here:
        served.serve(here)
        for _ in range(4):
            with gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as there:
                Feed.connect(there, timeout_s=WAIT_S)._store.reserve(8, WAIT_S)
        with gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as there:
            Feed.connect(there, timeout_s=WAIT_S).put(np.array([9]), WAIT_S)
            assert served.get(WAIT_S)[0] == 9


def test_the_far_side_has_a_text(far: Feed) -> None:
    assert repr(far).startswith("<Feed of the node at 127.0.0.1:")


def test_the_far_side_only_produces(far: Feed) -> None:
    with pytest.raises(TypeError, match="can only be put"):
        far.get()


def test_a_batch_too_large_is_refused_before_it_travels(far: Feed) -> None:
    with pytest.raises(ValueError, match="the feed takes"):
        far.put(np.zeros(1 << 16))


def test_a_batch_too_large_for_the_node_leaves_its_slot_to_the_next(served: Feed) -> None:
    limits = Limits(message_bytes_max=1 << 12)
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as here,
        gw.Node("127.0.0.1:0", [here.address], secret=SECRET, limits=limits) as there,
    ):
        served.serve(here)
        far = Feed.connect(there, timeout_s=WAIT_S)
        for _ in range(3):  # as many as the feed has slots
            with pytest.raises(gw.TooLarge, match="message_bytes_max"):
                far.put(np.zeros(1 << 12), WAIT_S)
        far.put(np.array([7]), WAIT_S)
        assert served.get(WAIT_S)[0] == 7


def test_a_feed_that_ends_before_a_flush_takes_no_batch(served: Feed, far: Feed) -> None:
    far.put(np.array([1]), WAIT_S)
    assert served.get(WAIT_S)[0] == 1
    served.close()
    with contextlib.suppress(Closed):
        while True:  # the end may come after an answer
            far._store.flush(WAIT_S)
    with pytest.raises(Closed):  # and not that the batch is too large
        far.put(np.array([2]), WAIT_S)


def test_a_node_that_serves_nothing_is_named() -> None:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as here,
        gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as there,
        pytest.raises(TimeoutError, match=r"serves no feed: call feed\.serve there"),
    ):
        Feed.connect(there, timeout_s=0.3)


def test_the_last_batch_of_a_producer_that_goes_at_once_is_not_lost(served: Feed) -> None:
    """The batch arrives and its producer goes while the feed's machine looks for messages."""
    with gw.Node("127.0.0.1:0", secret=SECRET) as here:
        goes = threading.Event()

        class Busy:
            """The node, whose answer is late by all that the producer does meanwhile."""

            def receive(self, timeout_s: float) -> Any:
                found = here.receive(timeout_s)
                if goes.is_set() and not gone.is_set():
                    far.put(np.array([7]), WAIT_S)
                    there.close()
                    while here.peers:
                        gone.wait(0.01)
                    gone.set()
                return found

            def __getattr__(self, name: str) -> Any:
                return getattr(here, name)

        gone = threading.Event()
        served.serve(Busy())  # type: ignore[arg-type]
        there = gw.Node("127.0.0.1:0", [here.address], secret=SECRET)
        far = Feed.connect(there, timeout_s=WAIT_S)
        far._store.abandon(far._store.reserve(8, WAIT_S))  # the next batch needs no answer
        goes.set()
        assert served.get(WAIT_S).tolist() == [7]


def test_a_producer_that_goes_after_its_first_message_does_not_end_the_service(
    served: Feed,
) -> None:
    with gw.Node("127.0.0.1:0", secret=SECRET) as here:
        with gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as there:
            [peer] = here.wait_for_peers(1, WAIT_S)
            there.wait_for_peers(1, WAIT_S)
        while here.peers:
            threading.Event().wait(0.01)
        link.Server(served._local(), here)._handle(peer, link._HELLO, b"")


def test_a_feed_that_cannot_note_a_claim_fails_on_both_sides(
    served: Feed, far: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ring.Ring, "_write_claim", fail)
    with pytest.raises(FeedFailed, match="No space left"):
        far._store.claim(link.Claim(7, 0, 0, 0))
    with pytest.raises(FeedFailed, match="No space left"):
        served.get(WAIT_S)


@pytest.mark.parametrize("has_slot", [False, True])
def test_a_producer_that_missed_a_lost_connection_does_not_go_on(
    served: Feed, *, has_slot: bool
) -> None:
    """It was stopped, or busy, until the nodes had found each other again; its slot and its question are forgotten."""
    limits = Limits(heartbeat_s=0.02, down_s=1.0, lag_s=0.01)
    with (
        gw.Node("127.0.0.1:0", secret=SECRET, limits=limits) as here,
        gw.Node("127.0.0.1:0", [here.address], secret=SECRET, limits=limits) as there,
    ):
        served.serve(here)
        far = Feed.connect(there, timeout_s=WAIT_S)
        slot = far._store.reserve(200, WAIT_S)
        with there._lock:  # nothing is acknowledged meanwhile
            here.publish(b"late", 99, there.peer)
            while here.peers:
                here.drop_late([there.peer])
                threading.Event().wait(0.01)
        while not (here.peers and there.peers):
            threading.Event().wait(0.01)
        if has_slot:
            far._store.commit(slot)
        with pytest.raises(Closed, match="is gone"):
            far._store.flush(WAIT_S)
        served.close()


def test_what_was_flushed_is_in_the_feed(served: Feed, far: Feed) -> None:
    for number in range(3):
        far.put(np.array([number]), WAIT_S)
    far._store.flush()
    assert served.produced == 3


def test_several_threads_put_batches_through_one_link(served: Feed, far: Feed) -> None:
    threads = [
        threading.Thread(
            target=lambda first: [far.put(np.array([first + n]), WAIT_S) for n in range(20)],
            args=(first,),
        )
        for first in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    values = [int(served.get(WAIT_S)[0]) for _ in range(60)]
    for thread in threads:
        thread.join()
    assert sorted(values) == [first + n for first in (0, 100, 200) for n in range(20)]


@pytest.mark.parametrize(
    ("tag", "payload"),
    [
        (link._WANT, b"again and again"),
        (link._CLAIM, b"short"),
        (link._CLAIM, link._HEAD.pack(7, -1, 0, 0, 0, 0)),
        (link._CLAIM, link._HEAD.pack(7, 1 << 60, 0, 0, 0, 0)),
        (link._CLAIM, link._HEAD.pack(-7, 0, 0, 0, 0, 0)),
        (link._CLAIM, link._HEAD.pack(7, 0, -1, 0, 0, 0)),
        (link._BATCH, b""),
        (link._END, b"paused:"),
        (link._BATCH, link._HEAD.pack(7, 1 << 60, 0, 0, 0, 0) + b"batch"),
        (99, b"of another version"),
    ],
)
def test_a_producer_with_a_mistake_does_not_end_the_feed(
    served: Feed, tag: int, payload: bytes
) -> None:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as here,
        gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as wrong,
        gw.Node("127.0.0.1:0", [here.address], secret=SECRET) as there,
    ):
        served.serve(here)
        far = Feed.connect(there, timeout_s=WAIT_S)
        wrong.wait_for_peers(2, WAIT_S)
        wrong.publish(b"", link._WANT, here.peer)
        for _ in range(50):
            wrong.publish(payload, tag, here.peer)
        wrong.publish(b"0", link._HELLO, there.peer)  # a producer answers nobody
        wrong.publish(b"no number", link._HELLO, there.peer)
        assert wrong.drain(WAIT_S)
        for number in range(20):
            far.put(np.array([number]), WAIT_S)
            assert int(served.get(WAIT_S)[0]) == number
        served.close()
