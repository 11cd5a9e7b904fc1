"""A Spark session, classic or Connect: its slots, its jobs, and the driver's address."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ..exchange.clock import now_s

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..transport import Node

__all__ = ["cancel", "check_slots", "driver_address", "is_connect", "tagged"]

_SLOTS_S: Final = 45.0  # for executors to register


def is_connect(spark: SparkSession) -> bool:
    """Return whether a session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def check_slots(spark: SparkSession, workers: int) -> None:
    """Raise if the cluster cannot run all workers at the same time; Spark itself would say so after ten minutes.

    Raises:
        ValueError: dynamic allocation is on, or there are too few slots.
    """
    if str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise ValueError(
            "all workers train at the same time, which Spark does not allow with dynamic allocation: set "
            "spark.dynamicAllocation.enabled=false"
        )
    slots = _slots(spark)
    is_fixed = is_connect(spark) or str(spark.sparkContext.master).startswith("local[")
    end_s = now_s() + (0.0 if is_fixed else _SLOTS_S)
    while slots is not None and slots < workers and now_s() < end_s:
        threading.Event().wait(0.5)  # executors may be on their way
        slots = _slots(spark)
    if slots is not None and slots < workers:
        raise ValueError(
            f"num_workers is {workers}, and the cluster has slots for {slots} tasks: use fewer workers, or more "
            "executors or cores (spark.executor.instances, spark.executor.cores), or a smaller spark.task.cpus"
        )


def _slots(spark: SparkSession) -> int | None:
    """Return the number of tasks that the cluster runs at the same time; None if it cannot be known."""
    if not is_connect(spark):
        context = spark.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return int(context.maxNumConcurrentTasks(profile))
    cores = re.match(r"local\[(\d+)", str(spark.conf.get("spark.master", "")))
    return int(cores[1]) // int(spark.conf.get("spark.task.cpus", "1") or 1) if cores else None


@contextlib.contextmanager
def tagged(spark: SparkSession, tag: str) -> Iterator[None]:
    """Give the jobs that this thread starts in the block a tag; cancel them if an exception leaves the block."""
    # A classic session's own tags are known only to the thread that set them.
    place: Any = spark if is_connect(spark) else spark.sparkContext
    kind = "" if is_connect(spark) else "Job"
    if not is_connect(spark):
        place.setInterruptOnCancel(True)
    getattr(place, f"add{kind}Tag")(tag)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            cancel(spark, tag)
        raise
    finally:
        getattr(place, f"remove{kind}Tag")(tag)


def cancel(spark: SparkSession, tag: str) -> None:
    """Cancel the jobs with a tag, from any thread."""
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def driver_address(spark: SparkSession, node: Node) -> str:
    """Return the address at which executors reach a node of this process, as far as Spark knows it."""
    if is_connect(spark):
        return node.address
    context: Any = spark.sparkContext
    host = context.getConf().get("spark.driver.host")
    return f"{host}:{node.address.rpartition(':')[2]}"
