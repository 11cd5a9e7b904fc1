"""Train one network in four Spark tasks, each on its part of the data; there is no master.

    pip install ".[spark,demo]"
    python examples/spark_digits.py [MASTER]

Requires Java. Without a master such as spark://10.1.1.5:7077 Spark runs on this machine. Executors need gradwire; the
training function is sent to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import digits
import numpy as np
from pyspark import SparkConf, SparkContext

import gradwire as gw
import gradwire.spark

TASKS, STEPS, BATCH, RATE = 4, 400, 32, 0.3


def scores(params: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    return pixels @ params[:640].reshape(64, 10) + params[640:]


def train(node: gw.Node, rows: Iterator[Any]) -> tuple[int, int, np.ndarray]:
    """Train on one task's rows; all tasks take the same number of steps, because they wait for each other."""
    pixels, labels = (np.array(column) for column in zip(*rows, strict=True))
    picks = np.random.default_rng(node.id)
    params, sent_bytes = np.zeros(650, np.float32), 0
    encoder = gw.Encoder(params.size, threshold=gw.TargetDensity(0.05))
    share = gw.Exchange(encoder, node)
    for _ in range(STEPS):
        chosen = picks.integers(len(labels), size=BATCH)
        weights = np.exp(scores(params, pixels[chosen]))
        wrong = weights / weights.sum(axis=1, keepdims=True) - np.eye(10)[labels[chosen]]
        gradient = np.concatenate([(pixels[chosen].T @ wrong).ravel(), wrong.sum(axis=0)])
        result = share.step(np.float32(-RATE / BATCH) * np.float32(gradient), params)
        sent_bytes += result.sent_bytes
    return len(labels), sent_bytes // STEPS, params


def main() -> None:
    master = sys.argv[1] if len(sys.argv) > 1 else f"local[{TASKS}]"
    settings = SparkConf().setMaster(master).setAppName("gradwire").set("spark.ui.enabled", "false")
    with SparkContext(conf=settings) as spark:
        images = digits.training(0, 1)
        rows = list(zip(images.pixels, images.labels, strict=True))
        results = gradwire.spark.run(spark.parallelize(rows, TASKS), train)
    pixels, labels = digits.held_out()
    for task, (count, sent_bytes, params) in enumerate(results):
        right = scores(params, pixels).argmax(axis=1) == labels
        print(
            f"task {task}: {count} images, {sent_bytes} bytes per step instead of {params.nbytes}: "
            f"accuracy {100 * right.mean():.1f}%, checksum {params.view(np.uint32).sum()}"
        )


if __name__ == "__main__":
    main()
