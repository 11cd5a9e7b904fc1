"""The driver's view of the workers, without Spark: who failed, who hangs, and whether there is another attempt."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.torch]
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")

from gradwire import GradwireError, Node  # noqa: E402
from gradwire.spark import session  # noqa: E402
from gradwire.spark.progress import Progress  # noqa: E402
from gradwire.spark.session import (  # noqa: E402
    check_runs,
    check_slots,
    keeping_slots,
    task_failure,
    told_in_one_line,
)
from gradwire.spark.watch import WORKERS_MAX, Watch  # noqa: E402
from gradwire.transport import Peer, PeerJoined, PeerLost  # noqa: E402

SECRET = bytes(range(32))
WAIT_S = 30.0


class Session:
    """A classic session, as far as its driver's address goes."""

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        return self

    def getConf(self) -> dict[str, str]:  # noqa: N802
        return {"spark.driver.host": "127.0.0.1"}


class Driver:
    """A driver of two workers, and whether it has ended Spark's job."""

    def __init__(self, retries: int, timeout_s: float = 60.0) -> None:
        self.cancelled = threading.Event()
        self.timeout_s = timeout_s
        self.progress = Progress(
            Session(),  # type: ignore[arg-type]
            SECRET,
            2,
            timeout_s=timeout_s,
            retries=retries,
            cancel=self.cancelled.set,
        )

    def watch(self, task: int, worker: int) -> Watch:
        return Watch(self.progress.address, SECRET, (task, worker), self.timeout_s)

    @contextlib.contextmanager
    def attempt(self, first_task: int) -> Iterator[tuple[Watch, Watch]]:
        """The workers of one attempt."""
        watches = self.watch(first_task, 0), self.watch(first_task + 1, 1)
        yield watches
        for watch in watches:
            watch.close()


@pytest.fixture
def make_driver() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Driver:
            driver = Driver(**options)
            stack.callback(driver.progress.close)
            return driver

        yield make


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """Return the first log line with a text."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        for record in caplog.records:
            if text in record.getMessage():
                return record.getMessage()
        time.sleep(0.02)
    raise AssertionError(f"{text!r} was not logged: {caplog.text}")


def fail(watch: Watch, text: str, **values: Any) -> None:
    watch.tell("error", text=text, trace="Traceback of it", **{"is_final": False, **values})


def test_an_error_that_every_attempt_would_have_ends_the_training(make_driver: Any) -> None:
    driver = make_driver(retries=3)
    with driver.attempt(0) as (_, watch):
        fail(watch, "ValueError: row 3 has a null", is_final=True)
        assert not driver.cancelled.wait(2.0), "the workers may end by themselves"
        assert driver.cancelled.wait(WAIT_S)
    failure = "worker 1 failed: ValueError: row 3 has a null (on 127.0.0.1)", "Traceback of it"
    assert driver.progress.failure == failure
    assert not driver.progress.may_repeat()


def test_after_such_an_error_nothing_is_said_to_begin_again(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The other workers only see that the one is gone."""
    driver = make_driver(retries=3)
    with driver.attempt(0) as (other, watch):
        fail(watch, "ValueError: row 3 has a null", is_final=True)
        assert driver.cancelled.wait(WAIT_S)
        fail(other, "PeerLost: worker 1 on 10.1.1.7 is gone")
    driver.progress.close()
    assert driver.progress.failure[0].startswith("worker 1 failed: ValueError")
    assert "begins again" not in caplog.text


@pytest.mark.parametrize("note", [b"", b"{}", b"[1]", b"[" * 100_000, b'{"kind":"epoch","row":7}'])
def test_a_note_that_cannot_be_read_is_logged_and_ends_nothing(
    make_driver: Any, caplog: pytest.LogCaptureFixture, note: bytes
) -> None:
    driver = make_driver(retries=0)
    with Node("127.0.0.1:0", [driver.progress.address], secret=SECRET) as node:
        node.wait_for_peers(1, timeout_s=WAIT_S)
        node.publish(note)
        wait_for_log(caplog, "cannot be read")
    assert driver.progress._thread.is_alive()
    assert not driver.cancelled.is_set()


def test_a_failed_attempt_is_logged_and_the_last_one_is_the_error(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(retries=1)
    with driver.attempt(0) as (watch, other):
        fail(watch, "PeerLost: worker 1 on 10.1.1.7 is gone")
        fail(other, "PeerLost: worker 0 on 10.1.1.6 is gone")  # of the same attempt
        line = wait_for_log(caplog, "attempt 1 of 2")
        assert "worker 0 failed: PeerLost: worker 1 on 10.1.1.7 is gone" in line
    assert driver.progress.failure is None
    with driver.attempt(2) as (watch, _):
        fail(watch, "TimeoutError: no message")
        assert driver.cancelled.wait(WAIT_S)
    assert driver.progress.failure == (
        "worker 0 failed: TimeoutError: no message (on 127.0.0.1)",
        "Traceback of it",
    )


def test_processes_that_die_without_a_word_are_counted_and_told_once_per_attempt(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(retries=1)
    for first_task in (0, 2, 4):
        assert not driver.cancelled.is_set()
        with driver.attempt(first_task):
            pass
    assert driver.cancelled.wait(WAIT_S)
    assert "was killed, or crashed" in driver.progress.failure[0]
    lines = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("attempt 1 of 2: a worker's process ended without an error")


def test_an_attempt_that_said_why_it_failed_is_told_once(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(retries=2)
    with driver.attempt(0) as (watch, _):
        fail(watch, "TimeoutError: no message")
        wait_for_log(caplog, "attempt 1 of 3")
    with driver.attempt(2):
        pass
    with driver.attempt(4):
        wait_for_log(caplog, "attempt 2 of 3: a worker's process")
    assert caplog.text.count("training begins again") == 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_was_killed_is_not_missed_once_the_next_attempt_has_begun(
    make_driver: Any, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    """The driver hears of its silence only when the first worker of the next attempt has come."""
    driver = make_driver(retries=3)
    peers = [Peer(task * WORKERS_MAX + task % 2, 1, "127.0.0.1:9") for task in range(4)]
    for peer in (*peers[:2], peers[2 + first]):
        driver.progress._take_event(PeerJoined(peer))
    driver.progress._take_event(PeerLost(peers[1 - first], "timeout"))
    assert not driver.cancelled.is_set()
    assert caplog.text.count("training begins again") == 1
    driver.progress._take_event(PeerJoined(peers[3 - first]))
    driver.progress._take_event(PeerLost(peers[3 - first], "timeout"))
    assert driver.cancelled.is_set()
    assert f"attempt 2 of 4: worker {1 - first} on 127.0.0.1 was silent" in caplog.text


def test_workers_that_do_not_come_where_all_meet_are_named(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(retries=1)
    with driver.attempt(0) as (watch, other):
        for each in (watch, other, watch):
            each.tell_wait()
        other.tell("epoch", row={"epoch": 0, "worker": 1})
        fail(watch, "LateWorkers: not all workers came", is_late=True)
        line = wait_for_log(caplog, "attempt 1 of 2")
        assert "worker 1 on 127.0.0.1 did not come within 60 s: worker 0 failed" in line


CHILD = """
import os, sys, time
from gradwire.spark.watch import Watch
watch = Watch(sys.argv[1], bytes(range(32)), (7, 1), float(sys.argv[2]))
watch.note_start()
print("here", flush=True)
def wait_for_a_lock():
    with watch.busy():
        time.sleep(1000)
wait_for_a_lock()
"""


@contextlib.contextmanager
def worker_process(driver: Driver, timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that hangs, in a process of its own."""
    command = [sys.executable, "-c", CHILD, driver.progress.address, str(timeout_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"here\n"
            yield process
        finally:
            process.kill()


def test_a_worker_whose_code_hangs_says_where_and_ends(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(retries=1)
    with worker_process(driver, timeout_s=1.0) as process:
        line = wait_for_log(caplog, "attempt 1 of 2")
        assert "worker 1 failed: no progress for 1 s in <string>" in line
        assert "wait_for_a_lock (on 127.0.0.1)" in line
        assert process.wait(WAIT_S) == 1


@pytest.mark.slow  # ten seconds without a heartbeat
@pytest.mark.parametrize("retries", [0, 1])
def test_a_worker_that_stands_still_is_named_and_spark_s_job_ended(
    make_driver: Any, retries: int
) -> None:
    driver = make_driver(retries=retries, timeout_s=5.0)
    with worker_process(driver, timeout_s=60.0) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert driver.cancelled.wait(WAIT_S)
    assert driver.progress.may_repeat() == (retries == 1)
    if not retries:
        assert driver.progress.failure == ("worker 1 on 127.0.0.1 was silent for 5 s", "")


def test_a_hang_shorter_than_the_time_allowed_is_none(
    make_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gradwire.spark")
    driver = make_driver(retries=0, timeout_s=3.0)
    with driver.attempt(0) as (watch, _):
        watch.note_start()
        for _ in range(4):
            with watch.busy():
                time.sleep(1.0)
    assert driver.progress.failure is None
    assert not caplog.records


def test_a_wait_for_others_in_the_middle_of_a_block_is_no_hang(make_driver: Any) -> None:
    driver = make_driver(retries=0, timeout_s=2.0)
    with driver.attempt(0) as (watch, _):
        watch.note_start()
        with watch.busy():
            watch.rest()
            time.sleep(3.5)
    assert driver.progress.failure is None


JAVA_TEXT = """An error occurred while calling o99.toLocalIterator.
org.apache.spark.SparkException: Job aborted due to stage failure: Stage failed because barrier task finished
\tat org.apache.spark.Something
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 3, in main
    process()
gradwire.errors.PeerLost: worker 1 on 10.1.1.7 is gone

\tat org.apache.spark.api.python.BasePythonRunner
\tat java.base/java.lang.Thread.run
"""


def test_spark_s_error_becomes_one_line_with_the_worker_s_own() -> None:
    text, trace = task_failure(RuntimeError(JAVA_TEXT))
    assert text == "a worker failed: gradwire.errors.PeerLost: worker 1 on 10.1.1.7 is gone"
    assert trace.splitlines()[1:3] == ['  File "worker.py", line 3, in main', "    process()"]
    longer = JAVA_TEXT.replace("is gone\n", "is gone:\nnobody\nhas seen it\nSQLSTATE: 38000\n")
    text, _ = task_failure(RuntimeError(longer))
    assert text.endswith("PeerLost: worker 1 on 10.1.1.7 is gone: nobody has seen it")
    crashed = (
        "job aborted\nbarrier task failed: Python worker exited unexpectedly (crashed): x\n\tat a"
    )
    text, trace = task_failure(RuntimeError(crashed))
    assert (text.count("\n"), trace) == (0, "")
    assert "crashed" in text
    assert task_failure(RuntimeError("there is no table x")) == ("", "")


@pytest.mark.parametrize("module", ["gradwire", "pyarrow", "torch"])
def test_a_python_without_gradwire_or_what_it_needs_is_told_with_the_way_out(module: str) -> None:
    java = JAVA_TEXT.replace("gradwire.errors.PeerLost: worker 1 on 10.1.1.7 is gone", "{}")
    error = RuntimeError(java.format(f"ModuleNotFoundError: No module named '{module}'"))
    text, _ = task_failure(error)
    assert f"executors has no {module}: set PYSPARK_PYTHON" in text
    assert sys.executable in text
    assert "\n" not in text
    text, _ = task_failure(RuntimeError(java.format("ModuleNotFoundError: No module named 'mine'")))
    assert text == "a worker failed: ModuleNotFoundError: No module named 'mine'"


def test_a_cancelled_job_is_told_without_a_worker() -> None:
    java = """An error occurred while calling o284.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.ThreadUtils$.awaitResult(ThreadUtils.scala:359)
Caused by: org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 8 cancelled as part of cancellation of all jobs
\tat org.apache.spark.errors.SparkCoreErrors$.sparkJobCancelled(SparkCoreErrors.scala:213)
"""
    reason = (
        "SparkException: [SPARK_JOB_CANCELLED] Job 8 cancelled as part of cancellation of all jobs"
    )
    assert task_failure(RuntimeError(java)) == (f"Spark's job was cancelled: {reason}", "")


def a_running_session() -> Any:
    java = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java))


@pytest.mark.parametrize("kind", [RuntimeError, GradwireError])
def test_an_interruption_stays_one_though_pyspark_raises_the_cancelled_job_s_error(
    kind: type[Exception],
) -> None:
    def cancel() -> None:
        raise kind("SPARK_JOB_CANCELLED: Job 8 cancelled")

    @told_in_one_line(a_running_session())
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            cancel()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # and then another fit, which fails
        with pytest.raises(GradwireError), told_in_one_line(a_running_session()):
            cancel()


def test_an_error_in_java_alone_is_told_in_one_line() -> None:
    java = """An error occurred while calling o186.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: java.io.IOException: {}
\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
Caused by: java.io.IOException: {}
\tat java.base/java.lang.ProcessImpl.forkAndExec(Native Method)
"""
    full = java.format(*["No space left on device"] * 2)
    assert task_failure(RuntimeError(full)) == (
        "the job failed: IOException: No space left on device",
        "",
    )
    absent = java.format('Cannot run program "/nowhere/python": error=2', "error=2")
    text, _ = task_failure(RuntimeError(absent))
    assert text.startswith(
        'the job failed: Cannot run program "/nowhere/python": set PYSPARK_PYTHON'
    )


def test_a_session_that_was_stopped_is_told_whatever_spark_says() -> None:
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))
    with (
        pytest.raises(GradwireError, match=r"^the Spark session was stopped$"),
        told_in_one_line(spark),
    ):
        raise AttributeError("'NoneType' object has no attribute 'setCallSite'")
    with pytest.raises(ValueError, match="was stopped: make the DataFrame with another one"):
        check_runs(spark)


def test_nothing_begins_with_rows_of_a_session_that_was_stopped() -> None:
    """Where PySpark says: 'NoneType' object has no attribute 'setInterruptOnCancel'."""
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from gradwire.feed import Feed
    from gradwire.spark import TorchEstimator, TorchModel, stream

    stopped = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))
    rows: Any = SimpleNamespace(sparkSession=stopped, columns=["features"], isStreaming=False)
    with Feed(batches=2, batch_bytes=1 << 12) as feed:
        for begin in (
            TorchEstimator().fit,
            TorchModel().transform,
            lambda rows: stream(rows, feed, iter),
        ):
            with pytest.raises(ValueError, match="was stopped: make the DataFrame with another"):
                begin(rows)


class Tasks:
    """What Java's list has of tasks: two that have ended, and those that run."""

    def __init__(self, running: list[int]) -> None:
        self._tasks = [3, *running, 4]
        self._running = list(running)

    def size(self) -> int:
        return len(self._tasks)

    def apply(self, index: int) -> Any:
        task = self._tasks[index]
        status = "RUNNING" if task in self._running else "FAILED"
        return SimpleNamespace(taskId=lambda: task, status=lambda: status)


class Slots:
    """A classic session with some slots, with a stage, and what was cancelled in it."""

    def __init__(self, active_tasks: int, slots: int = 1) -> None:
        self.sparkContext = self._jsc = self
        self.numActiveTasks = active_tasks
        self.numTasks = 2
        self.numCompletedTasks = 0
        self.stageIds = [5, 7]  # of the job
        self.stageId, self.currentAttemptId = 7, 2
        self.slots = slots
        self.cancelled = threading.Event()
        self.running = {0: [], 1: [18]}  # by attempt of the stage

    def statusStore(self) -> Any:  # noqa: N802
        return self

    def taskList(self, stage: int, attempt: int, _: int) -> Any:  # noqa: N802
        assert stage == 7
        return Tasks(self.running[attempt])

    def killTaskAttempt(self, task: int, interrupt: bool, _: str) -> bool:  # noqa: N802
        assert interrupt
        self.running[1].remove(task)
        return True

    def sc(self) -> Any:
        return self

    def resourceProfileManager(self) -> Any:  # noqa: N802
        return self

    def defaultResourceProfile(self) -> None:  # noqa: N802
        return None

    def maxNumConcurrentTasks(self, _: None) -> int:  # noqa: N802
        return self.slots

    def statusTracker(self) -> Any:  # noqa: N802
        return self

    def getJobIdsForTag(self, tag: str) -> list[int]:  # noqa: N802
        assert tag == "the job's"
        return [3, 4]

    def getJobInfo(self, job: int) -> Any:  # noqa: N802
        return self if job == 4 else None

    def getActiveStageIds(self) -> list[int]:  # noqa: N802
        return [6, 7]

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802
        return self if stage == 7 else None  # which is over meanwhile

    def cancelJobsWithTag(self, tag: str) -> None:  # noqa: N802
        assert tag == "the job's"
        self.cancelled.set()


def test_a_cluster_without_executors_is_told_apart_from_a_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where Spark removes each executor that begins; the reason is only in its logs."""
    monkeypatch.setattr(session, "_SLOTS_S", 0.0)
    for slots, text in ((0, "spark.task.cpus; no executor runs, or all"), (1, "spark.task.cpus$")):
        spark = Slots(active_tasks=0, slots=slots)
        spark.conf = {}  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=text):
            check_slots(spark, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("master", ["local", "local[2]"])
def test_no_executors_are_on_their_way_to_a_single_process(master: str) -> None:
    spark = Slots(active_tasks=0, slots=1)
    spark.conf = {"spark.master": master}  # type: ignore[attr-defined]
    start_s = time.monotonic()
    with pytest.raises(ValueError, match="num_workers is 2, and the cluster has 1 slot for"):
        check_slots(spark, 2)  # type: ignore[arg-type]
    assert time.monotonic() - start_s < 10.0


def test_executors_that_are_not_replaced_end_the_job_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 0.02)

    def job(spark: Slots, timeout_s: float, wait_s: float) -> None:
        with keeping_slots(spark, "the job's", 2, timeout_s):  # type: ignore[arg-type]
            if spark.cancelled.wait(wait_s):
                raise RuntimeError("the job was cancelled")

    text = "not replaced within 0.1 s: num_workers is 2, and the cluster has 1 slot for tasks"
    with pytest.raises(GradwireError, match=text):
        job(Slots(active_tasks=1), timeout_s=0.1, wait_s=WAIT_S)
    job(Slots(active_tasks=1), timeout_s=1000.0, wait_s=0.5)
    job(Slots(active_tasks=2), timeout_s=0.1, wait_s=0.5)  # on an executor that is to be given up
    assert not [thread for thread in threading.enumerate() if thread.name == "gradwire-slots"]


@pytest.mark.parametrize(
    ("active_tasks", "slots", "is_told"),
    [(0, 4, True), (1, 4, False), (2, 4, False), (0, 1, False)],
)
def test_slots_that_other_jobs_hold_are_waited_for_and_named_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    active_tasks: int,
    slots: int,
    is_told: bool,
) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 0.02)
    monkeypatch.setattr(session, "_BUSY_S", 0.1)
    spark = Slots(active_tasks, slots)
    with keeping_slots(spark, "the job's", 2, timeout_s=1000.0):  # type: ignore[arg-type]
        assert not spark.cancelled.wait(1.5)
    assert spark.running[1] == [18]  # Spark itself may end it
    told = "num_workers is 2, and other jobs hold some of the cluster's 4 slots: training begins when 2 are free"
    assert caplog.messages == [told] * is_told


@pytest.mark.parametrize(("active_tasks", "left"), [(0, []), (2, [18])])
def test_a_task_that_a_failed_attempt_has_left_does_not_hold_its_slot_for_ever(
    monkeypatch: pytest.MonkeyPatch, active_tasks: int, left: list[int]
) -> None:
    """As where an executor was lost with the rows of another task, for which it would wait."""
    monkeypatch.setattr(session, "_LOOK_S", 0.02)
    monkeypatch.setattr(session, "_LEFT_S", 0.1)
    spark = Slots(active_tasks, slots=2)
    with keeping_slots(spark, "the job's", 2, timeout_s=1000.0):  # type: ignore[arg-type]
        assert not spark.cancelled.wait(1.5)
    assert spark.running[1] == left
