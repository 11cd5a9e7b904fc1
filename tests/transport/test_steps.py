"""Hosts that exchange messages in steps, all at once, each behind a slow link."""

from __future__ import annotations

import pytest

from .switched import Bucket, Switched, floor_s, steps_s

MEGABIT = 125_000.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_only_waits_in_a_queue_is_not_sent_again(seed: int) -> None:
    """Round trips grow from 0.2 ms to some hundred while nothing is lost."""
    rate = 10 * MEGABIT
    simulator = Switched(seed, Bucket(rate, queue_bytes=1 << 22))
    hosts = simulator.mesh(4)
    times = steps_s(simulator, hosts, 250_000, 2)
    assert simulator.lost_bytes == 0
    assert max(times) < 1.5 * floor_s(250_000, 3, rate)
    for host in hosts:
        assert host.endpoint.stats().retransmitted_bytes < 0.2 * 2 * 3 * 250_000
