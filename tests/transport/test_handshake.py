"""Which INIT datagrams are looked at, and what is recorded of those that get no answer."""

from __future__ import annotations

import pytest

from gradwire.clock import LOG_INTERVAL_S
from gradwire.transport.handshake import (
    INITS_BURST,
    MAC1S_MAX,
    TIMELY_S,
    InitGate,
    RejectedPeers,
)

SECRET = bytes(range(32))


def admitted(gate: InitGate, first: int, age_s: float, now_s: float) -> int:
    """Return how many of 500 INIT datagrams, each with another mac1, the gate admits."""
    return sum(gate.admit(n.to_bytes(16, "big"), age_s, now_s) for n in range(first, first + 500))


def test_the_gate_admits_a_burst_and_then_its_rate() -> None:
    gate = InitGate(10.0)
    old_s = 2 * TIMELY_S
    assert admitted(gate, 0, old_s, 1_000.0) == INITS_BURST
    assert admitted(gate, 500, old_s, 1_001.0) == 10
    assert admitted(gate, 1_000, old_s, 900.0) == 0, "a clock that goes back adds no tokens"


@pytest.mark.parametrize("age_s", [0.0, -TIMELY_S, TIMELY_S])
def test_old_datagrams_leave_the_timely_ones_their_own_rate(age_s: float) -> None:
    gate = InitGate(10.0)
    assert admitted(gate, 0, 2 * TIMELY_S, 1_000.0) == INITS_BURST
    assert admitted(gate, 500, -2 * TIMELY_S, 1_000.0) == 0
    assert admitted(gate, 1_000, age_s, 1_000.0) == INITS_BURST


def test_in_quiet_times_a_wrong_clock_excludes_nobody() -> None:
    gate = InitGate(10.0)
    assert all(gate.admit(bytes([n]), 1e9 * n, 1_000.0 + n) for n in range(256))


def test_the_mac1_of_an_admitted_datagram_is_remembered_and_the_memory_is_bounded() -> None:
    gate = InitGate(1e9)
    for number in range(MAC1S_MAX + 10):
        assert gate.admit(number.to_bytes(4, "big"), 0.0, float(number))
    seen = sum(number.to_bytes(4, "big") in gate.mac1s for number in range(MAC1S_MAX + 10))
    assert seen == MAC1S_MAX
    assert bytes(4) not in gate.mac1s, "the oldest is forgotten first"


def test_a_datagram_refused_for_its_number_may_come_again() -> None:
    gate = InitGate(1e-9)
    while gate.admit(b"spent", 0.0, 0.0) or gate.admit(b"spent", 1e9, 0.0):
        pass
    assert not gate.admit(b"refused", 0.0, 0.0)
    assert b"refused" not in gate.mac1s


def test_rejected_peers_are_counted_and_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejected = RejectedPeers("10.0.0.9:1")
    for index in range(1_000):
        rejected.note((f"10.0.{index >> 8}.{index & 255}", 1), "reason", 1.0 + index * 1e-3)
    assert rejected.count == 1_000
    assert rejected.last == ("10.0.3.231", 1)
    [first] = caplog.messages
    assert "10.0.0.0:1" in first
    assert "10.0.0.9:1" in first
    rejected.note(("10.0.0.1", 1), "reason", 1.0 + LOG_INTERVAL_S)
    assert "10.0.0.1:1" in caplog.messages[1]
    assert "(999 more of these since the last entry)" in caplog.messages[1]
