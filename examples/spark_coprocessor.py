"""A co-processor for Spark: tasks compute gradients, one process applies the descent, another evaluates.

    pip install ".[spark,torch]"
    python examples/spark_coprocessor.py [MASTER]

Requires Java. Some tasks of Spark cut windows out of long noisy series while the training runs. Others take the windows
from a feed and compute the gradients of a network that predicts the next value. The co-processor, a process of the
driver's machine, has the only optimiser. The driver evaluates the hosted model meanwhile, and starts the co-processor
again if it dies, as Spark does with its tasks. The feed is memory of one machine, so all of them run on that machine;
docs/spark.md says what several machines need.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pyarrow as pa
import torch
from pyspark.sql import SparkSession
from torch import nn

import gradwire as gw
from gradwire.coprocessor import Host, Worker
from gradwire.feed import Feed
from gradwire.spark import stream

SERIES, POINTS, WINDOW = 2_000, 1_000, 32
TOGETHER, BATCH = 20, 64
WORKERS, PRODUCERS, UPDATES = 2, 2, 3_000
DENSITY = gw.TargetDensity(0.1)  # of gradients and changes; Adam changes all elements in each step
PATIENCE_S = 60.0


def make_series(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    times = np.arange(POINTS) * rng.uniform(0.05, 0.2) + rng.uniform(0, 6)
    return np.sin(times) + 0.5 * np.sin(2.7 * times) + 0.05 * rng.standard_normal(POINTS)


def windows_of(series: np.ndarray) -> np.ndarray:
    """Return all windows, each with the value that follows it; a view, so nothing is copied."""
    return np.lib.stride_tricks.sliding_window_view(series.astype(np.float32), WINDOW + 1)


def cut(batches: Iterator[Any]) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of windows from several series at a time, the same ones if Spark repeats the task."""
    for batch in batches:
        seeds = batch.column("id").to_pylist()
        for first in range(0, len(seeds), TOGETHER):
            chosen = seeds[first : first + TOGETHER]
            windows = np.concatenate([windows_of(make_series(seed)) for seed in chosen])
            order = np.random.default_rng(chosen).permutation(len(windows))
            for places in np.array_split(order, len(order) // BATCH):
                yield {"inputs": windows[places, :-1], "target": windows[places, -1:]}


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WINDOW, 64), nn.Tanh(), nn.Linear(64, 1))


def host_network(name: str, address: str, secret: str, path: Path) -> None:
    """Be the co-processor: apply the descent to every gradient that comes."""
    params = list(make_network().parameters())
    optimizer = torch.optim.Adam(params)
    options: dict[str, Any] = {"name": name, "path": path, "save_every": 50, "threshold": DENSITY}
    with gw.Node(address, secret=secret) as node, Host(node, params, optimizer, **options) as host:
        while host.version < UPDATES:
            # Gradients are sparse, and of parameters of some steps ago: with a constant rate the error would swing by a
            # factor of ten and more from step to step, until the end. The rate is one of the version, with which a host
            # that is started again goes on.
            optimizer.param_groups[0]["lr"] = 0.002 * (1.0 - host.version / UPDATES)
            host.step()


def worker_of(address: str, secret: str, feed: Feed) -> Callable[[Any], Iterator[pa.RecordBatch]]:
    """Return what a task does that computes gradients."""

    def work(_: Any) -> Iterator[pa.RecordBatch]:
        torch.set_num_threads(1)
        network = make_network()
        params = list(network.parameters())  # become a replica of the host's
        sent = 0
        with (
            gw.Node("0.0.0.0:0", [address], secret=secret) as node,
            Worker(node, params, threshold=DENSITY, timeout_s=PATIENCE_S) as worker,
        ):
            for batch in feed.dataset():
                network.zero_grad()
                nn.functional.mse_loss(network(batch["inputs"]), batch["target"]).backward()
                sent += 1
                if not worker.send([param.grad for param in params]):
                    break
        yield pa.RecordBatch.from_pydict({"gradients": [sent]})

    return work


def evaluate(name: str, start_host: Callable[[], Any], training: Future[Any]) -> None:
    """Print the error of snapshots until the training ends; start the co-processor again if it dies."""
    windows = np.concatenate([windows_of(make_series(seed)) for seed in range(SERIES, SERIES + 20)])
    inputs, target = torch.tensor(windows[:, :-1]), torch.tensor(windows[:, -1:])
    network = make_network()
    is_finished = False
    while not is_finished:
        process = start_host()
        with gw.HostedModel.attach(name, timeout_s=PATIENCE_S) as hosted:
            while process.is_alive() and not is_finished:
                time.sleep(0.5)
                is_finished = hosted.is_finished
                if training.done():
                    training.result()  # raises if the tasks have failed
                with contextlib.suppress(gw.GradwireError):  # it may die while it writes
                    version, values = hosted.snapshot()
                    for param, value in zip(network.parameters(), values, strict=True):
                        param.data = torch.from_numpy(value)
                    with torch.no_grad():
                        error = nn.functional.mse_loss(network(inputs), target).item()
                    print(f"version {version}: mean squared error {error:.4f}", flush=True)
        if not is_finished:
            print("the co-processor has died, and is started again", flush=True)


def main() -> None:
    # Spark tries each task four times, as on a cluster.
    master = sys.argv[1] if len(sys.argv) > 1 else f"local[{WORKERS + PRODUCERS},4]"
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    [address] = processes.free_addresses(1)
    name = "series-" + address.rpartition(":")[2]
    secret = gw.transport.generate_secret()
    with (
        ThreadPoolExecutor(1) as pool,
        tempfile.TemporaryDirectory() as folder,
        Feed(32, BATCH * (WINDOW + 1) * 4 + 512) as feed,
    ):
        tasks = spark.range(0, WORKERS, 1, WORKERS)
        work = worker_of(address, secret, feed)
        training = pool.submit(tasks.mapInArrow(work, "gradients long").collect)
        arguments = (name, address, secret, Path(folder, "checkpoint"))

        def start_host() -> Any:
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=host_network, args=arguments, daemon=True)
            process.start()
            return process

        # Leaving the block closes the feed, so the tasks end in any case.
        with stream(spark.range(0, SERIES, 1, PRODUCERS), feed, cut) as production:
            evaluate(name, start_host, training)
            sent = [row.gradients for row in training.result()]
        if production.error:
            raise production.error
        print(f"gradients of each worker: {sent}; {feed.consumed} batches consumed")
    spark.stop()


if __name__ == "__main__":
    main()
