"""TensorFlow and Keras train on a feed, with the lines of docs/spark.md."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.feed import Feed

pytestmark = pytest.mark.slow
tf: Any = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
BATCHES = 400
WEIGHTS = np.linspace(-1.0, 1.0, 32, dtype=np.float32)[:, None]


def produce(feed: Feed) -> None:
    rng = np.random.default_rng(0)
    for _ in range(BATCHES):
        inputs = rng.standard_normal((32, 32)).astype(np.float32)
        feed.put((inputs, inputs @ WEIGHTS))
    feed.finish()


# Keras says that there are no more batches than in the feed.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_keras_trains_on_every_batch_of_a_feed_that_is_smaller_than_what_it_prefetches() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [lines] = [block for block in blocks if "from_generator" in block]
    assert len(lines.splitlines()) == 3
    with Feed(batches=2, batch_bytes=1 << 13) as feed:
        process = multiprocessing.get_context("spawn").Process(target=produce, args=(feed,))
        process.start()
        names = {"feed": feed, "tf": tf}
        exec(lines, names)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.fit(names["dataset"], verbose=0)
        process.join()
        assert (feed.produced, feed.consumed) == (BATCHES, BATCHES)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), WEIGHTS, atol=1e-2)
