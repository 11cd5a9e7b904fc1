"""Hosts, each behind a slow link, that all send to all others in steps."""

from __future__ import annotations

import statistics

import pytest

from .switched import Bucket, Switched, floor_s, steps_s

MEGABIT = 125_000.0
RESENDS_MORE = pytest.mark.xfail(
    reason="with one of two seeds 5.7 % of the bytes are sent again, not below 5 %", strict=False
)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_datagrams_that_wait_in_a_queue_are_not_sent_again(seed: int) -> None:
    """Round trips grow from 0.2 to some hundred milliseconds while nothing is lost."""
    rate = 10 * MEGABIT
    simulator = Switched(seed, Bucket(rate, queue_bytes=1 << 22))
    hosts = simulator.mesh(4)
    times = steps_s(simulator, hosts, 250_000, 2)
    assert simulator.lost_bytes == 0
    assert max(times) < 1.5 * floor_s(250_000, 3, rate)
    for host in hosts:
        assert host.endpoint.stats().retransmitted_bytes < 0.2 * 2 * 3 * 250_000


@pytest.mark.parametrize(
    ("nodes", "megabits", "nbytes", "steps"),
    [
        (3, 10, 108_000, 8),
        pytest.param(4, 10, 108_000, 40, marks=pytest.mark.slow),
        pytest.param(4, 10, 250_000, 10, marks=pytest.mark.slow),
        pytest.param(8, 10, 108_000, 8, marks=[pytest.mark.slow, RESENDS_MORE]),
        pytest.param(4, 100, 600_000, 10, marks=pytest.mark.slow),
    ],
    ids=["3 nodes", "4 nodes", "4 nodes, larger messages", "8 nodes", "4 nodes, 100 Mbit/s"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_all_to_all_takes_little_longer_than_its_bytes(
    seed: int, nodes: int, megabits: int, nbytes: int, steps: int
) -> None:
    """The queues, those of `benchmarks/training/network.py`, hold less than the messages of one step."""
    rate = megabits * MEGABIT
    queue_bytes = max(int(0.05 * rate), 65_536) + Bucket.burst_bytes
    simulator = Switched(seed, Bucket(rate, queue_bytes=queue_bytes))
    hosts = simulator.mesh(nodes)
    simulator.run_for(1.0)
    times = steps_s(simulator, hosts, nbytes, steps)
    least_s = floor_s(nbytes, nodes - 1, rate)
    assert statistics.mean(times) < 1.25 * least_s
    assert max(times) < 2.25 * least_s
    again_bytes = sum(host.endpoint.stats().retransmitted_bytes for host in hosts)
    assert again_bytes < 0.05 * steps * nodes * (nodes - 1) * nbytes
