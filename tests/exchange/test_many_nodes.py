"""What many nodes send each other grows with their number only as much as it has to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange.departure import Departure
from gradwire.exchange.protocol import TAG_NUMBERS, Kind, NodeRun

from .cluster import FakeNode, FakeTicket, run_cluster

NUMEL = 24
COUNT = 16


@pytest.mark.parametrize("how", [{"topology": "mesh"}, {"topology": "sharded"}, {"mode": "async"}])
def test_goodbyes_that_come_together_get_one_report(how: dict[str, Any]) -> None:
    """Otherwise every node reports every goodbye to all: n reports to n nodes from each at the end of a training."""

    def work(node: FakeNode, rank: int) -> tuple[int, bytes]:
        reports: list[int] = []
        publish = node.publish

        def count(buffer: Any, tag: int = 0, to: Any = None) -> FakeTicket:
            if tag // TAG_NUMBERS == Kind.REPORT:
                reports.append(tag)
            return publish(buffer, tag, to)

        node.publish = count  # type: ignore[method-assign]
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-6))
        share = gw.Exchange(encoder, node, min_peers=COUNT - 1, reduction="sum", **how)
        params = np.zeros(NUMEL, np.float32)
        update = np.full(NUMEL, 2.0**-6, np.float32)
        for _ in range(3):
            node.cluster.compute(node, 0.5)
            share.step(update, params)
        if rank < 4:  # busy while the others say goodbye
            node.cluster.compute(node, 5.0)
            for _ in range(3):
                share.step(update, params)
        share.leave(params)
        node.cluster.close(node)
        return len(reports), params.tobytes() if rank < 4 else b""

    results = run_cluster(work, count=COUNT, seed=1)[:4]
    if "mode" not in how:  # asynchronous nodes do not wait for what others add at the end
        assert len({params for _, params in results}) == 1
    # Each of them reports the goodbyes once, and then what the others report one after the other.
    assert max(reports for reports, _ in results) <= COUNT // 2


@pytest.mark.parametrize("seed", range(3))
def test_reports_that_come_together_are_compared_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison passes over all that have ever gone, times the members: after weeks that takes long."""
    own_report = Departure._own_report
    comparisons: list[int] = []

    def count(departure: Departure) -> dict[NodeRun, int]:
        comparisons.append(departure._membership.run.id)
        return own_report(departure)

    def work(node: FakeNode, rank: int) -> None:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-6))
        share = gw.Exchange(encoder, node, min_peers=COUNT - 1)
        params = np.zeros(NUMEL, np.float32)
        for step in range(10):
            node.cluster.compute(node, 0.5)
            if (rank, step) == (COUNT - 1, 5):
                node.cluster.kill(node)
                return
            share.step(np.full(NUMEL, 2.0**-6, np.float32), params)

    monkeypatch.setattr(Departure, "_own_report", count)
    run_cluster(work, count=COUNT, seed=seed)
    assert len(comparisons) < 7 * COUNT
