"""LeNet on Spark, in the two ways that Deeplearning4j's users know; on enlarged digits.

    pip install ".[spark,torch,demo]"
    python examples/spark_lenet.py [MASTER]

Requires Java. Without a master such as spark://10.1.1.5:7077 Spark makes a cluster of two executors on this machine.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import numpy as np
import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

from gradwire.spark import ParameterAveraging, SharedTraining, TorchEstimator

EPOCHS, BATCH, WORKERS = 5, 16, 2


def lenet() -> nn.Module:
    """The network of Deeplearning4j's example: 5x5x20, pool, 5x5x50, pool, 200, softmax (in the loss)."""
    layers = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 20, 5), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 200), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(200, 10))


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.01, weight_decay=0.0005)


def enlarged() -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's digits, 8x8, as 28x28 pixels."""
    images, labels = load_digits(return_X_y=True)
    small = torch.from_numpy((images / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    return nn.functional.interpolate(small, (28, 28), mode="bilinear").flatten(1).numpy(), labels


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("gradwire.spark").setLevel(logging.INFO)
    master = sys.argv[1] if len(sys.argv) > 1 else f"local-cluster[{WORKERS},1,1024]"
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(master).appName("LeNet").config("spark.ui.enabled", "false")
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    spark = builder.config("spark.executorEnv.PYTHONPATH", paths).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    pixels, labels = enlarged()
    is_held = np.random.default_rng(1).random(len(labels)) < 0.2
    rows = zip(pixels.tolist(), labels.tolist(), is_held.tolist(), strict=True)
    data = spark.createDataFrame(list(rows), "features array<float>, label int, held boolean")
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    for training in (SharedTraining(), ParameterAveraging(every=5)):
        estimator = TorchEstimator(
            model=lenet,
            optimizer=adagrad,
            loss=nn.CrossEntropyLoss,
            validation_indicator_col="held",
            num_workers=WORKERS,
            batch_size=BATCH,
            epochs=EPOCHS,
            training=training,
            collect_stats=True,
        )
        print(training)
        model = estimator.fit(data)
        accuracy = evaluator.evaluate(model.transform(data.filter("held")))
        sent_mb = model.history.sent_bytes.sum() / 1e6
        print(f"accuracy {100 * accuracy:.1f}%, {sent_mb:.1f} MB sent")
    spark.stop()


if __name__ == "__main__":
    main()
