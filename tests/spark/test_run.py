"""Spark tasks that train together: real Spark.

What goes to the tasks is defined inside the tests: Spark sends such functions whole, others by their module's name.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
import gradwire.spark

# ruff: noqa: ARG001, ARG005 - tasks get their rows whether they want them or not

TASKS = 2 if os.environ.get("GRADWIRE_SPARK", "").startswith("local-cluster[2,1,") else 3  # slots


@pytest.mark.spark
def test_tasks_fit_one_line_to_the_rows_of_all_and_end_with_the_same_bits(spark: Any) -> None:
    rng = np.random.default_rng(1)
    truth = rng.standard_normal(40).astype(np.float32)
    inputs = rng.standard_normal((600, 40)).astype(np.float32)
    rows = list(zip(inputs, inputs @ truth, strict=True))

    def train(node: gw.Node, rows: Iterator[Any]) -> tuple[int, int, np.ndarray]:
        inputs, targets = (np.array(column) for column in zip(*rows, strict=True))
        params = np.zeros(40, np.float32)
        share = gw.Exchange(gw.Encoder(40, threshold=gw.TargetDensity(0.2)), node, timeout_s=30.0)
        for _ in range(200):
            gradient = inputs.T @ (inputs @ params - targets) / len(inputs)
            share.step(np.float32(-0.1) * gradient, params)
        return node.id, len(inputs), params

    results = gradwire.spark.run(spark.parallelize(rows, TASKS), train)
    assert [result[:2] for result in results] == [(rank, 600 // TASKS) for rank in range(TASKS)]
    first, *others = [params for _, _, params in results]
    assert np.abs(first - truth).max() < 0.05
    assert all(np.array_equal(first.view("u4"), params.view("u4")) for params in others)


@pytest.mark.spark
def test_a_single_task_trains_alone(spark: Any) -> None:
    [peers] = gradwire.spark.run(
        spark.parallelize(range(4), 1), lambda node, rows: (len(node.peers), sum(rows))
    )
    assert peers == (0, 6)


@pytest.mark.spark
def test_a_partition_without_rows_has_a_node_as_well(spark: Any) -> None:
    def count(node: gw.Node, rows: Iterator[int]) -> tuple[int, int]:
        from pyspark import BarrierTaskContext

        peers = len(node.peers)
        BarrierTaskContext.get().barrier()  # nobody goes before all have counted
        return peers, len(list(rows))

    results = gradwire.spark.run(spark.parallelize([7], TASKS), count)
    assert results == [(TASKS - 1, rank == TASKS - 1) for rank in range(TASKS)]


@pytest.mark.spark
def test_what_a_task_raises_ends_the_training_with_its_message(spark: Any) -> None:
    def train(node: gw.Node, rows: Iterator[int]) -> None:
        if node.id == 1:
            raise RuntimeError("the data of partition 1 are bad")
        node.receive(timeout_s=60.0)

    with pytest.raises(gw.GradwireError, match="the data of partition 1 are bad") as caught:
        gradwire.spark.run(spark.parallelize(range(9), TASKS), train)
    assert "\n" not in str(caught.value)
    assert "in train" in str(caught.value.__cause__)


@pytest.mark.spark
def test_two_trainings_after_each_other_are_two_clusters(spark: Any) -> None:
    def greet(node: gw.Node, rows: Iterator[int]) -> tuple[int, bytes]:
        """Say something to the other task, which stays until it has heard it."""
        node.publish(f"from {node.id}".encode())
        [(peer, _, payload)] = node.receive(timeout_s=20.0)
        return peer.id, bytes(payload)

    data = spark.parallelize(range(4), 2)
    for _ in range(2):
        assert gradwire.spark.run(data, greet) == [(1, b"from 1"), (0, b"from 0")]


@pytest.mark.spark
def test_tasks_on_one_machine_take_ports_from_the_given_one_on(spark: Any) -> None:
    data = spark.parallelize(range(TASKS), TASKS)
    # Below the ports that Linux gives to who asks for any, as other tests do meanwhile.
    addresses = gradwire.spark.run(data, lambda node, rows: node.address, port=23_210)
    assert addresses == [f"127.0.0.1:{23_210 + rank}" for rank in range(TASKS)]


@pytest.mark.spark
def test_a_barrier_stage_of_ones_own_gets_its_nodes_one_by_one(spark: Any) -> None:
    secret = bytes(range(32))

    def task(rows: Iterator[int]) -> Iterator[tuple[int, int]]:
        from pyspark import BarrierTaskContext

        with gradwire.spark.node(secret=secret) as node:
            peers = len(node.peers)
            BarrierTaskContext.get().barrier()
            yield node.id, peers

    data = spark.parallelize(range(4), 2)
    assert data.barrier().mapPartitions(task).collect() == [(0, 1), (1, 1)]


@pytest.mark.spark
def test_outside_a_barrier_stage_the_error_says_what_to_use(spark: Any) -> None:
    with pytest.raises(gw.TransportError, match=r"use gradwire\.spark\.run"):
        gradwire.spark.node(secret=bytes(range(32)))

    def task(rows: Iterator[int]) -> Iterator[str]:
        try:
            gradwire.spark.node(secret=bytes(range(32)))
        except gw.TransportError as error:
            yield str(error)

    [text] = spark.parallelize([1], 1).mapPartitions(task).collect()
    assert "must be called in a task of a barrier stage" in text


@pytest.mark.spark
def test_a_stage_whose_task_dies_runs_again(spark: Any, tmp_path: Path) -> None:
    flag = str(tmp_path / "died")

    def train(node: gw.Node, rows: Iterator[int]) -> tuple[int, int]:
        if node.id == 1 and not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(1)
        return node.id, sum(rows)

    results = gradwire.spark.run(spark.parallelize(range(4), 2), train)
    assert os.path.exists(flag)
    assert results == [(0, 1), (1, 5)]


@pytest.mark.spark
def test_ctrl_c_in_a_notebook_ends_the_job_at_once(spark: Any, session: Any) -> None:
    from gradwire.spark.session import tagged, told_in_one_line

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        time.sleep(60.0)
        yield from batches

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in Jupyter's cells
    interruption = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT))
    start_s = time.monotonic()
    try:
        interruption.start()
        with (
            pytest.raises(KeyboardInterrupt),
            told_in_one_line(session),
            tagged(session, "interrupted"),
        ):
            session.range(1).mapInArrow(wait, "id long").toArrow()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert spark.getLocalProperty("spark.job.interruptOnCancel") is None, "the user's choice"
    finally:
        interruption.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start_s < 40.0
    assert session.range(3).count() == 3


@pytest.mark.spark
def test_no_task_ends_before_all_have_trained(spark: Any, tmp_path: Path) -> None:
    """If one ends just when another fails, Spark repeats the failed one alone, which then waits for ever."""
    trained, goes_on = tmp_path / "trained", tmp_path / "goes_on"

    def train(node: gw.Node, rows: Iterator[int]) -> int:
        trained.touch()
        while node.id == 1 and not goes_on.exists():
            time.sleep(0.05)
        return node.id

    data = spark.parallelize(range(2), 2)
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(gradwire.spark.run, data, train)
        while not trained.exists() and not results.done():
            time.sleep(0.05)
        time.sleep(1.0)
        tracker = spark.statusTracker()
        ended = [
            tracker.getStageInfo(stage).numCompletedTasks for stage in tracker.getActiveStageIds()
        ]
        goes_on.touch()
        assert results.result() == [0, 1]
    assert ended == [0]


@pytest.mark.spark
@pytest.mark.slow
def test_results_that_are_together_larger_than_the_driver_accepts_arrive(spark: Any) -> None:
    """Each fits spark.driver.maxResultSize of 1 GiB, all together do not."""
    results = gradwire.spark.run(
        spark.parallelize(range(4), 2), lambda node, rows: bytes(560 << 20 if node.id < 2 else 0)
    )
    assert [len(one) for one in results] == [560 << 20] * 2


@pytest.mark.spark
def test_more_tasks_than_slots_are_refused(spark: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the number of partitions is 5, and the cluster has \d slots"
    ):
        gradwire.spark.run(spark.parallelize(range(5), 5), lambda node, rows: None)


def test_what_is_no_rdd_is_refused_with_the_way_to_one() -> None:
    with pytest.raises(TypeError, match=r"must be an RDD, got list; use a DataFrame's \.rdd"):
        gradwire.spark.run([1, 2, 3], lambda node, rows: None)  # type: ignore[arg-type]


@pytest.mark.spark
def test_a_weak_secret_is_refused_before_anything_is_started() -> None:
    class Data:
        def barrier(self) -> None:
            raise AssertionError("must not be reached")

    with pytest.raises(ValueError, match="random"):
        gradwire.spark.run(Data(), lambda node, rows: None, secret=bytes(32))  # type: ignore[arg-type]
