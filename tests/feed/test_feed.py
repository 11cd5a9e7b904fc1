"""Batches in shared memory: what one process puts another takes, once, and both end together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.errors import Closed, GradwireError
from gradwire.feed import Feed, FeedFailed, ring

WAIT_S = 20.0
SHARED = Path("/dev/shm")

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def feed() -> Iterator[Feed]:
    with Feed(batches=3, batch_bytes=1024) as made:
        yield made


def start(target: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def numbers(feed: Feed, count: int) -> list[int]:
    return [int(feed.get(WAIT_S)[0]) for _ in range(count)]


def put_numbers(feed: Feed, first: int, count: int) -> None:
    for number in range(first, first + count):
        feed.put(np.array([number]))


def test_batches_come_out_in_order_and_in_the_form_in_which_they_were_put(feed: Feed) -> None:
    feed.put(
        {"x": np.eye(2, dtype=np.float32), "y": np.array(["a"], "S1"), "empty": np.empty((0, 3))}
    )
    feed.put([np.arange(3), np.float64(2.5)])
    feed.put(np.arange(6).reshape(2, 3).T)
    first, second, third = feed.get(WAIT_S), feed.get(WAIT_S), feed.get(WAIT_S)
    assert first["x"].dtype == np.float32
    assert first["x"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert first["y"].tolist() == [b"a"]
    assert first["empty"].shape == (0, 3)
    assert isinstance(second, tuple)
    assert [one.tolist() for one in second] == [[0, 1, 2], 2.5]
    assert third.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_consumer_s_arrays_are_the_shared_memory_itself(feed: Feed) -> None:
    feed.put(np.zeros(4))
    batch = feed.get(WAIT_S)
    batch[:] = 0.123456789
    assert not batch.flags.owndata
    assert batch.tobytes() in (SHARED / feed.name).read_bytes()


def test_a_full_feed_makes_the_producer_wait_until_a_batch_is_dropped(feed: Feed) -> None:
    put_numbers(feed, 0, 3)
    with pytest.raises(TimeoutError, match=r"no space in the feed within 0\.01 s"):
        feed.put(np.array([3]), timeout_s=0.01)
    batch = feed.get(WAIT_S)
    with pytest.raises(TimeoutError):  # taken, but still in use
        feed.put(np.array([3]), timeout_s=0.01)
    row = batch[:]
    del batch
    with pytest.raises(TimeoutError):  # a view of it as well
        feed.put(np.array([3]), timeout_s=0.01)
    del row
    feed.put(np.array([3]), timeout_s=WAIT_S)
    assert numbers(feed, 3) == [1, 2, 3]


def test_an_empty_feed_makes_the_consumer_wait(feed: Feed) -> None:
    with pytest.raises(TimeoutError, match="no batch in the feed"):
        feed.get(timeout_s=0.01)


def test_several_producers_and_consumers_share_every_batch_once(feed: Feed) -> None:
    seen = multiprocessing.get_context("fork").SimpleQueue()

    def consume(feed: Feed) -> None:
        for batch in feed:
            seen.put(int(batch[0]))
            del batch

    consumers = [start(consume, feed) for _ in range(2)]
    producers = [start(put_numbers, feed, 100 * number, 60) for number in range(3)]
    for producer in producers:
        producer.join(WAIT_S)
    feed.finish()
    found = [seen.get() for _ in range(180)]
    for consumer in consumers:
        consumer.join(WAIT_S)
    assert [process.exitcode for process in producers + consumers] == [0] * 5
    assert sorted(found) == [100 * number + i for number in range(3) for i in range(60)]
    assert (feed.produced, feed.consumed) == (180, 180)


def test_a_process_of_its_own_attaches_by_name_and_leaves_the_feed_alone(feed: Feed) -> None:
    code = (
        "import sys, numpy as np; from gradwire.feed import Feed\n"
        "feed = Feed.attach(sys.argv[1]); feed.put(np.array([7])); print(feed.get(9.0)[0]); feed.put(np.array([8]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, feed.name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("7\n", "")
    assert numbers(feed, 1) == [8]


@pytest.mark.parametrize("action", ["get", "put"])
def test_close_wakes_whoever_waits(feed: Feed, action: str) -> None:
    if action == "put":
        put_numbers(feed, 0, 3)
    errors: list[Exception] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            feed.put(np.zeros(1)) if action == "put" else feed.get()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun.wait()
    feed.close()
    thread.join(WAIT_S)
    assert [type(error) for error in errors] == [Closed]


def test_close_ends_producers_in_other_processes_and_what_is_left_is_what_the_feed_held() -> None:
    with Feed(batches=4, batch_bytes=64) as feed:
        producers = [start(put_until_closed, feed) for _ in range(2)]
        numbers(feed, 10)
        feed.close()
        for producer in producers:
            producer.join(WAIT_S)
        assert [producer.exitcode for producer in producers] == [0, 0]
        assert feed.produced - feed.consumed <= 4
        with pytest.raises(Closed):
            feed.get()


def put_until_closed(feed: Feed) -> None:
    try:
        while True:
            feed.put(np.zeros(1))
    except Closed:
        return


def test_finish_lets_consumers_take_what_is_left(feed: Feed) -> None:
    put_numbers(feed, 0, 2)
    feed.finish()
    with pytest.raises(Closed, match="finished"):
        feed.put(np.zeros(1))
    assert [int(batch[0]) for batch in feed] == [0, 1]
    with pytest.raises(Closed, match="finished and empty"):
        feed.get()


def test_a_producer_that_dies_loses_only_the_batch_that_it_was_writing(feed: Feed) -> None:
    def die(feed: Feed) -> None:
        put_numbers(feed, 1, 1)
        feed._store.reserve(8, None)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2 * 3):  # more often than there are slots
        process = start(die, feed)
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
        assert numbers(feed, 1) == [1]
    put_numbers(feed, 0, 3)
    assert numbers(feed, 3) == [0, 1, 2]


def test_a_consumer_that_dies_gives_its_space_back(feed: Feed) -> None:
    def die(feed: Feed) -> None:
        kept = [feed.get() for _ in range(2)]
        assert kept
        os.kill(os.getpid(), signal.SIGKILL)

    put_numbers(feed, 0, 3)
    start(die, feed).join(WAIT_S)
    for number in (3, 4):
        feed.put(np.array([number]), WAIT_S)
    assert numbers(feed, 3) == [2, 3, 4]


def test_an_interrupt_that_comes_with_the_lock_gives_the_lock_back(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_lock = ring.Ring._set_lock
    interrupts = [KeyboardInterrupt()]

    def interrupted(self: ring.Ring, kind: int) -> None:
        set_lock(self, kind)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(ring.Ring, "_set_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed.get(timeout_s=0.0)
    with (SHARED / feed.name).open("r+b") as file:
        lock = ring._RECORD_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)  # does not wait


def test_a_producer_killed_in_the_middle_of_a_call_has_no_lock_in_its_children(feed: Feed) -> None:
    """The children of a loader, say, live on, and nobody could use the feed until they have ended."""
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)

    def die(feed: Feed) -> None:
        put_numbers(feed, 1, 1)
        child = os.fork()
        if child == 0:
            signal.pause()
        writer.send(child)
        with feed._store._locked():
            os.kill(os.getpid(), signal.SIGKILL)

    producer = start(die, feed)
    child = reader.recv()
    os.waitid(os.P_PID, producer.pid, os.WEXITED | os.WNOWAIT)  # join would wait for the child, too
    waker = threading.Timer(WAIT_S, os.kill, (child, signal.SIGKILL))
    waker.start()
    try:
        assert numbers(feed, 1) == [1]
        assert waker.is_alive()
    finally:
        waker.cancel()
        os.kill(child, signal.SIGKILL)


def test_a_process_that_must_not_open_the_feed_finds_none(feed: Feed) -> None:
    """A Spark executor of another user; it reaches the feed over a node instead."""
    is_root = os.getuid() == 0
    if is_root:
        os.seteuid(65_534)
    else:
        (SHARED / feed.name).chmod(0)
    try:
        with pytest.raises(Closed, match="belongs to another user"):
            Feed.attach(feed.name)
    finally:
        if is_root:
            os.seteuid(0)


def test_a_container_with_other_process_numbers_must_not_take_part(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take living processes for dead and free their batches."""
    monkeypatch.setattr(ring, "_process_namespace", lambda: 1)
    with pytest.raises(Closed, match="container with other process numbers"):
        Feed.attach(feed.name)


def test_who_cannot_be_looked_at_is_not_taken_for_dead(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_numbers(feed, 0, 3)
    kept = feed.get()

    def fail(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="too many open files"):
        feed.put(np.array([7]), WAIT_S)
    assert kept == [0]


def start_maker() -> tuple[Any, Feed]:
    """Return a process that has made a feed, and the feed."""
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)

    def make() -> None:
        feed = Feed(batches=2, batch_bytes=64)
        writer.send(feed.name)
        signal.pause()

    maker = start(make)
    return maker, Feed.attach(reader.recv())


def test_who_asks_often_for_a_moment_learns_that_the_maker_was_killed() -> None:
    maker, feed = start_maker()
    maker.kill()
    maker.join(WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while not feed.is_closed and time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError, Closed):
            feed.get(timeout_s=0.001)
    assert feed.is_closed
    (SHARED / feed.name).unlink(missing_ok=True)  # the tracker of this process would, at its end


def test_a_forked_process_finds_a_closed_feed_closed_every_time() -> None:
    with Feed(batches=2, batch_bytes=64) as feed:
        reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)

        def ask(feed: Feed) -> None:
            reader.recv()
            for _ in range(2):
                with contextlib.suppress(Closed):
                    feed.put(np.zeros(1), WAIT_S)

        child = start(ask, feed)
    writer.send(None)
    child.join(WAIT_S)
    assert child.exitcode == 0


def test_producers_end_when_the_process_that_made_the_feed_is_killed() -> None:
    maker, feed = start_maker()
    producer = start(put_until_closed, feed)
    maker.kill()
    maker.join(WAIT_S)
    producer.join(WAIT_S)
    assert producer.exitcode == 0
    assert feed.is_closed
    (SHARED / feed.name).unlink(missing_ok=True)  # the tracker of this process would, at its end


def test_a_producer_s_error_reaches_every_consumer_and_the_other_producers(feed: Feed) -> None:
    put_numbers(feed, 0, 1)
    try:
        {}["column"]
    except KeyError as error:
        feed.fail(error)
    feed.fail("a later one")
    for action in (feed.get, lambda: feed.put(np.zeros(1)), lambda: next(iter(feed))):
        with pytest.raises(
            FeedFailed, match=r"(?s)a producer failed: Traceback.*KeyError: 'column'"
        ):
            action()


def test_a_long_traceback_keeps_its_error(feed: Feed) -> None:
    def first(depth: int) -> None:
        second(depth - 1)

    def second(depth: int) -> None:
        if not depth:
            raise ValueError("the reason")
        first(depth)

    with pytest.raises(ValueError, match="the reason") as caught:
        first(200)
    feed.fail(caught.value)
    with pytest.raises(FeedFailed, match=r"(?s)Traceback.*\[...\].*ValueError: the reason\n$"):
        feed.get()


def test_a_failure_with_a_name_of_other_bytes_reaches_the_consumer(feed: Feed) -> None:
    feed.fail(OSError("no file a\udcff"))  # as os.fsdecode returns it
    with pytest.raises(FeedFailed, match=r"no file a\\udcff"):
        feed.get()


def test_a_batch_that_is_too_large_is_refused_with_both_sizes(feed: Feed) -> None:
    with pytest.raises(ValueError, match=r"has 8000 bytes, the feed takes 1024"):
        feed.put(np.zeros(1000))
    put_numbers(feed, 5, 1)  # nothing is left behind
    assert numbers(feed, 1) == [5]


def test_objects_are_refused_by_name(feed: Feed) -> None:
    with pytest.raises(TypeError, match="array 'rows' of the batch has dtype object"):
        feed.put({"rows": np.array([None])})


def test_a_consumer_that_keeps_everything_is_told_so(feed: Feed) -> None:
    put_numbers(feed, 0, 3)
    kept = [feed.get(WAIT_S) for _ in range(3)]
    with pytest.raises(GradwireError, match="this process holds all 3 batches"):
        feed.get(WAIT_S)
    assert len(kept) == 3


def test_nothing_is_left_in_shared_memory() -> None:
    feed = Feed(batches=2, batch_bytes=10)
    name = feed.name
    assert list(SHARED.glob(f"{name}*"))
    del feed
    gc.collect()
    assert list(SHARED.glob(f"{name}*")) == []
    with pytest.raises(Closed, match="there is no feed"):
        Feed.attach(name)


@pytest.mark.parametrize("step", ["_process_namespace", "SharedMemory"])
def test_a_feed_that_cannot_be_made_leaves_no_memory(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    token = f"test-{os.getpid()}"
    with monkeypatch.context() as patched:
        patched.setattr(ring.secrets, "token_hex", lambda _: token)
        patched.setattr(ring, step, fail)
        with pytest.raises(OSError, match="too many open files"):
            Feed(batches=2, batch_bytes=10)
    gc.collect()
    assert list(SHARED.glob(f"*{token}*")) == []


@pytest.mark.parametrize(("batches", "batch_bytes"), [(1, 10), (2, 0)])
def test_a_feed_has_two_batches_or_more_and_they_have_bytes(batches: int, batch_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"batches is 1;|batch_bytes must be 1 to"):
        Feed(batches, batch_bytes)


def test_more_than_the_machine_has_is_refused_with_the_way_out() -> None:
    with pytest.raises(OSError, match=r"2 batches of .* do not fit /dev/shm .*use fewer"):
        Feed(2, 1 << 50)


@pytest.mark.torch
def test_a_data_loader_gives_the_batches_as_tensors_in_the_same_memory(feed: Feed) -> None:
    torch = pytest.importorskip("torch")
    feed.put({"x": np.ones((2, 3), np.float32)})
    feed.put((np.arange(3), np.zeros(1)))
    feed.put(np.full(2, 7.0))
    feed.finish()
    loader = torch.utils.data.DataLoader(feed.dataset(), batch_size=None)
    first, second, third = list(loader)
    assert first["x"].sum().item() == 6.0
    assert [one.tolist() for one in second] == [[0, 1, 2], [0.0]]
    third[:] = 0.987654321
    assert third.numpy().tobytes() in (SHARED / feed.name).read_bytes()


def test_arguments_of_the_wrong_kind_are_refused_by_name(feed: Feed) -> None:
    call: Any
    for call, complaint in (
        (lambda: Feed("8"), "batches must be an int, got '8'"),  # type: ignore[arg-type]
        (lambda: Feed(8, 1e6), "batch_bytes must be an int, got 1000000.0"),  # type: ignore[arg-type]
        (lambda: Feed.attach(None), "name must be that of a feed"),  # type: ignore[arg-type]
        (lambda: Feed.connect(None), "node must be a Node, got None"),  # type: ignore[arg-type]
        (lambda: feed.serve(None), "node must be a Node, got None"),  # type: ignore[arg-type]
        (lambda: feed.get("1"), "timeout_s must be a number, got '1'"),  # type: ignore[arg-type]
        (lambda: feed.get(float("nan")), "timeout_s is nan"),
        (lambda: feed.put(np.zeros(3), float("nan")), "timeout_s is nan"),
    ):
        with pytest.raises((TypeError, ValueError), match=complaint):
            call()
