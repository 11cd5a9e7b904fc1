"""Training data that Spark produces while training runs, and whose production ends when training ends.

    pip install ".[spark,torch]"
    python examples/stream_series.py

Requires Java. Spark cuts sub-sequences out of long noisy series; a recurrent network learns to predict the next value.
Once the loss is low enough, the feed is closed, and Spark's job is cancelled.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pyspark.sql import SparkSession
from torch import nn

from gradwire.feed import Feed
from gradwire.spark import stream

SERIES, POINTS, WINDOW, BATCH = 64, 50_000, 32, 64
BATCHES = POINTS // BATCH  # of each series: about as many sub-sequences as it has
TARGET = 0.008


def make_series(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    times = np.arange(POINTS) * rng.uniform(0.05, 0.2) + rng.uniform(0, 6)
    return np.sin(times) + 0.5 * np.sin(2.7 * times) + 0.05 * rng.standard_normal(POINTS)


def cut(batches: Iterator[Any]) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of sub-sequences, of all series alike, with the value that follows each (in Spark's tasks)."""
    for batch in batches:
        seeds = batch.column("id").to_pylist()
        series = np.stack([make_series(seed) for seed in seeds])
        rng = np.random.default_rng(seeds)
        for _ in range(BATCHES * len(seeds)):
            places = zip(
                rng.integers(len(seeds), size=BATCH),
                rng.integers(0, POINTS - WINDOW, size=BATCH),
                strict=True,
            )
            windows = np.stack([series[one, first : first + WINDOW + 1] for one, first in places])
            yield {
                "inputs": windows[:, :-1, None].astype(np.float32),
                "target": windows[:, -1].astype(np.float32),
            }


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(inputs)[0][:, -1])[:, 0]


def train(batches: Any, began_s: float) -> int:
    """Train until the loss is low enough; return the number of steps."""
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    smooth = 1.0
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(batch["inputs"]), batch["target"])
        loss.backward()
        optimizer.step()
        smooth += 0.05 * (loss.item() - smooth)
        if step % 50 == 0 or smooth < TARGET:
            print(f"step {step}: loss {smooth:.4f} after {time.perf_counter() - began_s:.1f} s")
        if smooth < TARGET:
            return step
    raise SystemExit(f"the series ended before the loss reached {TARGET}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", action="store_true", help="produce everything before training")
    parser.add_argument("--master", default="local[2]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(arguments.master).config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.range(0, SERIES, 1, 2)
    began_s = time.perf_counter()
    size = SERIES * BATCHES + 1 if arguments.first else 32
    with Feed(batches=size, batch_bytes=BATCH * (WINDOW + 1) * 4 + 128) as feed:
        with stream(rows, feed, cut) as job:
            if arguments.first:
                job.join()
            loader = torch.utils.data.DataLoader(feed.dataset(), batch_size=None)
            steps = train(loader, began_s)
            feed.close()
            closed_s = time.perf_counter()
            job.join()
            stopped_s = time.perf_counter() - closed_s
        wasted = feed.produced - feed.consumed
        print(
            f"{steps} steps in {closed_s - began_s:.1f} s; {feed.produced} batches produced, {wasted} of them wasted; "
            f"production stopped {stopped_s:.2f} s after training"
        )
    spark.stop()


if __name__ == "__main__":
    main()
