"""What monitoring sees."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import prometheus_text, to_tensorboard

from .cluster import cluster


def trained(**options: Any) -> gw.Exchange:
    """Return an exchange of one node after four steps."""
    with cluster(0) as made:
        share = gw.Exchange(gw.Encoder(4, 0.5), made.node(1), min_peers=0, **options)
        params = np.zeros(4, np.float32)
        for value in (0.5, 0.25, 0.25, 0.375):
            share.step(np.array([value, 0.0, 0.0, 0.0], np.float32), params)
    return share


def test_the_statistics_add_up() -> None:
    results: list[gw.StepResult] = []
    stats = trained(on_step=results.append).stats
    assert [result.step for result in results] == [0, 1, 2, 3]
    assert (stats.steps, stats.local_steps) == (4, 0)
    assert stats.sent_bytes == sum(result.sent_bytes for result in results)
    assert stats.ratio == pytest.approx(4 * 4 * 4 / stats.sent_bytes)
    assert (stats.residual_norm, stats.threshold, stats.density) == (0.375, 0.5, 0.0)
    assert results[0].ratio == 16 / results[0].sent_bytes


def test_local_steps_are_counted_apart_and_not_called_back() -> None:
    results: list[gw.StepResult] = []
    stats = trained(every=2, on_step=results.append).stats
    assert (stats.steps, stats.local_steps, len(results)) == (2, 2, 2)


def test_prometheus_text_has_a_type_for_every_line() -> None:
    text = prometheus_text(trained().stats, {"host": 'a"b\\c\n'})
    lines = text.splitlines()
    assert text.endswith("\n")
    for explanation, kind, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name = explanation.split()[2]
        assert kind in (f"# TYPE {name} counter", f"# TYPE {name} gauge")
        assert name.endswith("_total") == kind.endswith("counter")
        assert re.fullmatch(rf'{name}{{host="a\\"b\\\\c\\n"}} [-+.e\d]+', sample)
    assert "gradwire_steps_total" in text
    assert 'gradwire_residual_norm{host="a\\"b\\\\c\\n"} 0.375' in text
    assert "gradwire_encode_seconds_total" in text
    assert "{" not in prometheus_text(trained().stats)


def test_tensorboard_gets_every_step() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

    writer = Writer()
    trained(on_step=to_tensorboard(writer, prefix="g/"))
    densities = [(value, step) for name, value, step in writer.scalars if name == "g/density"]
    assert densities == [(0.25, 0), (0.0, 1), (0.25, 2), (0.0, 3)]
    assert {name for name, _, step in writer.scalars if step == 0} >= {"g/wait_s", "g/staleness"}
