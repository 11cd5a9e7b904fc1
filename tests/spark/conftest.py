"""One Spark for all tests of a run: "local[4]", or what GRADWIRE_SPARK names; "connect" is a Connect session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

MASTER = os.environ.get("GRADWIRE_SPARK", "local[4]")
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executorEnv.PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "spark.executor.memory": "512m",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.fixture(scope="session")
def session() -> Iterator[Any]:
    """A Spark session with two slots or more."""
    from pyspark.sql import SparkSession

    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    patch.setenv("PYTHONPATH", SETTINGS["spark.executorEnv.PYTHONPATH"])
    builder = SparkSession.builder
    if MASTER == "connect":
        builder = builder.remote("local[4]")
    else:
        builder = builder.master(MASTER)
        for name, value in SETTINGS.items():
            builder = builder.config(name, value)
    made = builder.getOrCreate()
    if MASTER != "connect":
        made.sparkContext.setLogLevel("OFF")
    yield made
    made.stop()
    patch.undo()


@pytest.fixture(scope="session")
def spark(session: Any) -> Any:
    """The context of a classic session, for what needs RDDs."""
    if MASTER == "connect":
        pytest.skip("Spark Connect has no RDDs")
    return session.sparkContext


@pytest.fixture(scope="session")
def repeating(session: Any) -> Any:
    """A session that repeats tasks, which local[4] does not."""
    master = str(session.conf.get("spark.master", ""))
    if master.startswith("local["):
        pytest.skip("a local session repeats no tasks: GRADWIRE_SPARK=local-cluster[2,1,1024]")
    return session
