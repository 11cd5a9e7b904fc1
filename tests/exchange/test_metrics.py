"""The totals of an exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw

from .cluster import cluster


def trained(**options: Any) -> tuple[gw.ExchangeStats, list[gw.StepResult]]:
    """Return totals and results of an exchange of one node after four steps."""
    with cluster(0) as made:
        share = gw.Exchange(gw.Encoder(4, 0.5), made.node(1), min_peers=0, **options)
        params = np.zeros(4, np.float32)
        results = [
            share.step(np.array([value, 0.0, 0.0, 0.0], np.float32), params)
            for value in (0.5, 0.25, 0.25, 0.375)
        ]
    return share.stats, results


def test_the_statistics_add_up() -> None:
    stats, results = trained()
    assert [result.step for result in results] == [0, 1, 2, 3]
    assert (stats.steps, stats.local_steps) == (4, 0)
    assert stats.sent_bytes == sum(result.sent_bytes for result in results)
    assert stats.ratio == pytest.approx(4 * 4 * 4 / stats.sent_bytes)
    assert (stats.threshold, stats.density) == (0.5, 0.0)
    assert results[0].ratio == 16 / results[0].sent_bytes


def test_local_steps_are_counted_apart() -> None:
    stats, results = trained(every=2)
    assert (stats.steps, stats.local_steps) == (2, 2)
    assert [result.is_local for result in results] == [True, False, True, False]
