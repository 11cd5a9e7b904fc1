"""A Spark session, classic or Connect: its slots, its jobs, and the driver's address."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from ..clock import now_s
from ..errors import GradwireError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..transport import Node

__all__ = [
    "Parcel",
    "WorkerTraceback",
    "cancel",
    "check_runs",
    "check_slots",
    "driver_address",
    "failure_of",
    "gpus_of_executor",
    "is_connect",
    "keeping_slots",
    "result_bytes_max",
    "tagged",
    "task_failure",
    "told_in_one_line",
]

_LOG = logging.getLogger("gradwire.spark")

# Of gradwire and of what it needs: other modules may be the user's own, which are sent in other ways.
_NO_MODULE: Final = re.compile("No module named '(gradwire|numpy|pandas|pyarrow|fsspec|torch)'")
_NO_PROGRAM: Final = re.compile('Cannot run program "[^"]*"')
_IN_JAVA: Final = "\n\tat "
_CANCELLED: Final = re.compile("SPARK_JOB_CANCELLED|OPERATION_CANCELED|SparkContext was shut down")
_INTERRUPTS: Final = "spark.job.interruptOnCancel"
_STOPPED: Final = "the Spark session was stopped"
# With Connect, before the session itself knows.
_CLOSED: Final = re.compile("SESSION_CLOSED|NO_ACTIVE_SESSION|Channel closed|closed channel")
_JAVA: Final = re.compile(r"^(?:Caused by)?: (?:[\w$]+\.)*(.+)$", re.MULTILINE)
_LINE_MAX: Final = 2_000
_SLOTS_S: Final = 45.0  # for executors to register
_LOOK_S: Final = 1.0
_BUSY_S: Final = 30.0  # other jobs may hold slots for a moment
_LEFT_S: Final = 5.0  # Spark itself ends most tasks of an attempt that has failed
_SMALL_BYTES: Final = 1 << 20  # go with the tasks
_BROADCAST_BYTES: Final = 16 << 20


def is_connect(spark: SparkSession) -> bool:
    """Return whether a session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_stopped(spark: SparkSession) -> bool:
    """Return whether a session was stopped."""
    if is_connect(spark):
        return bool(spark.is_stopped)  # type: ignore[attr-defined]
    context = spark.sparkContext._jsc
    return context is None or bool(context.sc().isStopped())


def _was_stopped(spark: SparkSession, error: Exception) -> bool:
    """Return whether a session was stopped, for which Spark has many errors."""
    if is_connect(spark) and _CLOSED.search(str(error)):
        return True
    with contextlib.suppress(Exception):  # as where Java has ended, too
        return is_stopped(spark)
    return False


def check_runs(spark: SparkSession) -> None:
    """Raise if a session was stopped: PySpark has errors without a word for that.

    Raises:
        ValueError: it was.
    """
    if is_stopped(spark):
        raise ValueError(f"{_STOPPED}: make the DataFrame with another one")


def check_slots(spark: SparkSession, workers: int, name: str = "num_workers") -> None:
    """Raise if the cluster cannot run all workers at the same time; Spark itself would say so after ten minutes.

    Args:
        spark: the session.
        workers: number of workers.
        name: of that number, for the error.

    Raises:
        ValueError: dynamic allocation is on, or there are too few slots.
    """
    if str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise ValueError(
            "all workers train at the same time, which Spark does not allow with dynamic allocation: set "
            "spark.dynamicAllocation.enabled=false"
        )
    master = str(spark.conf.get("spark.master", ""))
    end_s = now_s() + (0.0 if re.match(r"local(\[|$)", master) else _SLOTS_S)
    while (slots := _slots(spark, workers)) < workers:
        if now_s() >= end_s:
            text = _too_few(name, workers, slots)
            if not slots and not is_connect(spark):
                text += "; no executor runs, or all are excluded: the logs of the cluster say why"
            raise ValueError(text)
        threading.Event().wait(0.5)  # executors may be on their way


def _too_few(name: str, workers: int, slots: int) -> str:
    count = "1 slot" if slots == 1 else f"{slots or 'too few'} slots"
    return (
        f"{name} is {workers}, and the cluster has {count} for tasks: use fewer of them, or more "
        "executors or cores (spark.executor.instances, spark.executor.cores), or a smaller spark.task.cpus"
    )


@contextlib.contextmanager
def keeping_slots(
    spark: SparkSession, tag: str, workers: int, timeout_s: float, name: str = "num_workers"
) -> Iterator[None]:
    """End the jobs with a tag if there are too few slots for ``timeout_s``: Spark waits for lost executors without end.

    Slots that other jobs hold are waited for. Spark does not say so; the log does, once.

    With Connect this does nothing: slots are known there only by trying.

    Args:
        spark: the session.
        tag: of the block's jobs.
        workers: number of workers.
        timeout_s: in which lost executors may be replaced.
        name: of the number of workers, for the error.

    Raises:
        GradwireError: executors were lost, and not replaced.
    """
    if is_connect(spark):
        yield
        return
    ended = threading.Event()
    texts: list[str] = []

    def look() -> None:
        enough_s = began_s = now_s()
        is_told = False
        while not ended.wait(_LOOK_S):
            slots = _slots(spark, workers)
            waiting = _stages_without_slots(spark, tag, workers)
            if not waiting:
                began_s = now_s()
            elif now_s() - began_s > _LEFT_S:
                _end_left_tasks(spark, waiting, workers)
            if waiting and not is_told and slots >= workers and now_s() - began_s > _BUSY_S:
                is_told = True
                text = "%s is %d, and other jobs hold some of the cluster's %d slots: training begins when %d are free"
                _LOG.warning(text, name, workers, slots, workers)
            if slots >= workers or _has_tasks(spark, workers):
                enough_s = now_s()
            elif now_s() - enough_s > timeout_s:
                lost = f"executors were lost, and not replaced within {timeout_s:g} s"
                texts.append(f"{lost}: {_too_few(name, workers, slots)}")
                cancel(spark, tag)
                return

    def look_while_session_lasts() -> None:
        with contextlib.suppress(Exception):  # it may be stopped
            look()

    thread = threading.Thread(target=look_while_session_lasts, name="gradwire-slots", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if texts:
            raise GradwireError(texts[0]) from None
        raise
    finally:
        ended.set()
        thread.join()


def _has_tasks(spark: SparkSession, workers: int) -> bool:
    """Return whether a stage has so many tasks: executors that are to be given up finish theirs, and have no slots."""
    tracker = spark.sparkContext.statusTracker()
    stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
    return any(stage is not None and stage.numActiveTasks >= workers for stage in stages)


def _end_left_tasks(spark: SparkSession, stages: list[Any], workers: int) -> None:
    """End the tasks of earlier attempts of stages that wait for slots.

    Spark leaves them if an attempt fails because a task's rows were lost with an executor: others may have read theirs,
    once those were computed anew, and wait for that task without end.
    """
    context = spark.sparkContext._jsc.sc()
    for stage in stages:
        for attempt in range(stage.currentAttemptId):
            tasks = context.statusStore().taskList(stage.stageId, attempt, workers)
            for task in map(tasks.apply, range(tasks.size())):
                if task.status() == "RUNNING":
                    reason = "it waits for a task of an earlier attempt"
                    context.killTaskAttempt(task.taskId(), True, reason)


def _stages_without_slots(spark: SparkSession, tag: str, workers: int) -> list[Any]:
    """Return the stages, of jobs with the tag, that have so many tasks, of which none has begun."""
    context = spark.sparkContext
    tracker = context.statusTracker()
    jobs = map(tracker.getJobInfo, context._jsc.sc().statusTracker().getJobIdsForTag(tag))
    stages = {stage for job in jobs if job is not None for stage in job.stageIds}
    return [
        stage
        for stage in map(tracker.getStageInfo, stages.intersection(tracker.getActiveStageIds()))
        if stage is not None
        and stage.numTasks == workers
        and not stage.numActiveTasks
        and not stage.numCompletedTasks
    ]


def _slots(spark: SparkSession, workers: int) -> int:
    """Return how many tasks the cluster runs at the same time; with Connect ``workers`` or 0, by trying."""
    if not is_connect(spark):
        context = spark.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return int(context.maxNumConcurrentTasks(profile))
    rows = spark.range(0, workers, 1, workers)
    try:
        rows.mapInArrow(lambda batches: batches, "id long", barrier=True).count()
    except Exception as error:
        if "SPARK-24819" not in str(error):
            raise
        return 0
    return workers


@contextlib.contextmanager
def tagged(spark: SparkSession, tag: str) -> Iterator[None]:
    """Give the jobs that this thread starts in the block a tag; cancel them if an exception leaves the block."""
    # A classic session's own tags are known only to the thread that set them.
    place: Any = spark if is_connect(spark) else spark.sparkContext
    kind = "" if is_connect(spark) else "Job"
    interrupts = None
    if not is_connect(spark):
        interrupts = place.getLocalProperty(_INTERRUPTS)
        place.setInterruptOnCancel(True)
    getattr(place, f"add{kind}Tag")(tag)
    try:
        with _cancelling_at_once(spark, tag):
            yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            cancel(spark, tag)
        raise
    finally:
        with contextlib.suppress(Exception):  # the session may have been stopped
            getattr(place, f"remove{kind}Tag")(tag)
            if not is_connect(spark):
                place.setLocalProperty(_INTERRUPTS, interrupts)


@contextlib.contextmanager
def _cancelling_at_once(spark: SparkSession, tag: str) -> Iterator[None]:
    """Cancel the jobs with a tag when Ctrl-C is pressed: what it interrupts in PySpark waits for its job's end.

    PySpark's own handler does so, too, but in the cells of a notebook Jupyter puts Python's handler in its place.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: Any) -> None:
        # From another thread: this one may be amidst a call of Java's.
        threading.Thread(target=cancel, args=(spark, tag), daemon=True).start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def cancel(spark: SparkSession, tag: str) -> None:
    """Cancel the jobs with a tag, from any thread."""
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def gpus_of_executor(spark: SparkSession) -> int:
    """Return how many GPUs Spark gives to an executor."""
    return int(str(spark.conf.get("spark.executor.resource.gpu.amount", "0")))


def result_bytes_max(spark: SparkSession) -> int:
    """Return how many bytes of one job's results the driver accepts; 0: any number."""
    text = str(spark.conf.get("spark.driver.maxResultSize", "1g")).strip().lower()
    number, unit = re.fullmatch(r"(\d+)([kmgtp]?)b?", text).groups()  # type: ignore[union-attr]
    return int(number) << 10 * " kmgtp".index(unit or " ")


class Parcel:
    """Bytes for tasks, which go to every executor once and in pieces, instead of with every task in one array.

    Args:
        spark: the session.
        source: a file with the bytes, which are read piece by piece.
    """

    def __init__(self, spark: SparkSession, source: IO[bytes]) -> None:
        self._data = b""
        self._file = ""
        self._pieces: list[Any] = []
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        if size <= _SMALL_BYTES:
            self._data = source.read()
        elif is_connect(spark):
            # Spark Connect has no broadcasts. The server keeps the file for as long as the session.
            with tempfile.NamedTemporaryFile(prefix="gradwire-") as file:
                shutil.copyfileobj(source, file, _BROADCAST_BYTES)
                file.flush()
                spark.addArtifacts(file.name, file=True)
                self._file = os.path.basename(file.name)
        else:
            while piece := source.read(_BROADCAST_BYTES):
                self._pieces.append(spark.sparkContext.broadcast(piece))

    def read(self) -> bytes:
        """Return the bytes (in a task)."""
        if self._file:
            from pyspark import SparkFiles

            return Path(SparkFiles.get(self._file)).read_bytes()
        return self._data or b"".join(piece.value for piece in self._pieces)

    def close(self) -> None:
        """Free the executors' memory, once no task reads any more."""
        for piece in self._pieces:
            piece.destroy()


def driver_address(spark: SparkSession, node: Node) -> str:
    """Return the address at which executors reach a node of this process, as far as Spark knows it."""
    if is_connect(spark):
        return node.address
    context: Any = spark.sparkContext
    host = context.getConf().get("spark.driver.host")
    return f"{host}:{node.address.rpartition(':')[2]}"


class WorkerTraceback(Exception):
    """The cause of the driver's error: its text is the traceback of the worker."""


@contextlib.contextmanager
def told_in_one_line(spark: SparkSession) -> Iterator[None]:
    """Raise what ended a job of Spark in one line, where Spark has hundreds; its cause is the task's traceback.

    Raises:
        GradwireError: the job failed, or was cancelled.
        KeyboardInterrupt: while Spark's job ran; PySpark raises the error of the job that it has cancelled instead.
    """
    # What the caller handles, such as an interruption after which it begins another fit, is not the job's.
    _, handled, _ = sys.exc_info()
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and cause is not handled:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            cause = cause.__context__
        if isinstance(error, GradwireError):
            raise
        if _was_stopped(spark, error):
            raise GradwireError(_STOPPED) from error
        text, trace = task_failure(error)
        if not text:
            raise
        raise GradwireError(text) from (WorkerTraceback(trace) if trace else None)


def task_failure(error: Exception) -> tuple[str, str]:
    """Return why a job failed, in one line, and the task's traceback; "" for an error that Spark tells shortly."""
    text = str(error)
    if _CANCELLED.search(text):
        return f"Spark's job was cancelled: {_reason(text)}", ""
    if not any(part in text for part in (_IN_JAVA, "barrier", "gradwire/spark")) and (
        not _NO_MODULE.search(text)
    ):
        return "", ""
    text, trace = _failure(error)
    return f"{'a worker' if trace or 'crashed' in text else 'the job'} failed: {text}", trace


def failure_of(error: Exception) -> str:
    """Return the error of a task, with its traceback, from Spark's error, which has hundreds of lines."""
    text, trace = _failure(error)
    return f"{text}\n{trace}" if trace else text


def _failure(error: Exception) -> tuple[str, str]:
    """Return a task's error in one line, and its traceback if it has one."""
    text = str(error)
    program = _NO_PROGRAM.search(text)
    module = _NO_MODULE.search(text)
    if program or module:
        missing = module and f"the Python of Spark's executors has no {module[1]}"
        reason = program[0] if program else missing
        return (
            f"{reason}: set PYSPARK_PYTHON to the interpreter of the environment in which gradwire is installed, "
            f"before the session begins (this process runs {sys.executable})"
        ), ""
    # The task's own error, in Python's form, is in the middle of several stack traces of Spark.
    _, start, rest = text.rpartition("Traceback (most recent call last):")
    lines = rest.split(_IN_JAVA)[0].strip("\n").rstrip().splitlines() if start else []
    # The frames are indented; what follows them is the error.
    last = [line.strip() for line in itertools.dropwhile(lambda line: line.startswith(" "), lines)]
    if last:
        said = " ".join(line for line in last if line and not line.startswith("SQLSTATE"))
        return said[:_LINE_MAX], "\n".join([start, *lines])
    return _reason(text) or repr(error), ""


def _reason(text: str) -> str:
    """Return the line of Spark's error that says most."""
    lines = text.splitlines()
    reasons = [line for line in lines if "crashed" in line or "Lost" in line]
    # Java's first line says only what was called, its last exception is the first cause.
    reasons = reasons or _JAVA.findall(text)[-1:] or lines
    return reasons[0].strip() if reasons else ""
