"""Whom to knock at, and which knocks to look at."""

from __future__ import annotations

import pytest

from gradwire.transport.membership import (
    GATE_BURST,
    MARKS_MAX,
    SEEDS_MAX,
    TIMELY_S,
    HandshakeGate,
    Membership,
)

SEED = ("10.0.0.1", 5)


def test_a_seed_is_due_until_it_is_connected() -> None:
    membership = Membership()
    membership.add(SEED)
    assert membership.due(1.0, set(), set()) == [SEED]
    assert membership.due(1.0, set(), set()) == []
    assert membership.due(2.0, {SEED}, set()) == []
    membership.on_lost(SEED, 3.0)
    assert membership.next_at_s(set(), set()) == 3.1
    assert membership.due(3.2, set(), set()) == [SEED]


def test_a_node_known_by_another_address_is_not_knocked_at() -> None:
    membership = Membership()
    membership.add(SEED)
    membership.on_identified(SEED, 77)
    assert membership.due(1.0, set(), {77}) == []
    assert membership.next_at_s(set(), {77}) is None
    assert membership.due(1.0, set(), set()) == [SEED]


def test_the_own_address_is_asked_again_once_a_minute_in_case_it_was_an_echo() -> None:
    membership = Membership()
    membership.add(SEED)
    assert membership.seeds() == [SEED]
    membership.on_own(SEED, 1.0)
    assert membership.seeds() == []
    assert membership.due(60.9, set(), set()) == []
    assert membership.due(61.1, set(), set()) == [SEED]
    membership.on_identified(SEED, 77)
    assert membership.seeds() == [SEED]


def test_hearsay_is_forgotten_after_one_vain_attempt_and_a_seed_is_not() -> None:
    membership = Membership()
    membership.add(SEED)
    membership.add(("10.0.0.2", 5), is_learned=True)
    for address in list(membership):
        membership.on_no_answer(address, 1.0)
    assert list(membership) == [SEED]


def test_the_number_of_addresses_is_bounded() -> None:
    membership = Membership()
    for port in range(10 * SEEDS_MAX):
        membership.add(("10.0.0.1", port), is_learned=True)
    assert len(list(membership)) == SEEDS_MAX


def admitted(gate: HandshakeGate, first: int, age_s: float, now_s: float) -> int:
    """Knock 500 times with marks of their own and return how many were let in."""
    return sum(gate.admit(n.to_bytes(16, "big"), age_s, now_s) for n in range(first, first + 500))


def test_the_gate_admits_a_burst_and_then_its_rate() -> None:
    gate = HandshakeGate(10.0)
    old_s = 2 * TIMELY_S
    assert admitted(gate, 0, old_s, 1_000.0) == GATE_BURST
    assert admitted(gate, 500, old_s, 1_001.0) == 10
    assert admitted(gate, 1_000, old_s, 900.0) == 0, "a clock that goes back gives nothing away"


@pytest.mark.parametrize("age_s", [0.0, -TIMELY_S, TIMELY_S])
def test_old_knocks_leave_the_timely_ones_their_own_rate(age_s: float) -> None:
    gate = HandshakeGate(10.0)
    assert admitted(gate, 0, 2 * TIMELY_S, 1_000.0) == GATE_BURST
    assert admitted(gate, 500, -2 * TIMELY_S, 1_000.0) == 0
    assert admitted(gate, 1_000, age_s, 1_000.0) == GATE_BURST


def test_in_quiet_times_a_wrong_clock_keeps_nobody_out() -> None:
    gate = HandshakeGate(10.0)
    assert all(gate.admit(bytes([n]), 1e9 * n, 1_000.0 + n) for n in range(256))


def test_a_mark_is_remembered_if_it_was_admitted_and_the_memory_is_bounded() -> None:
    gate = HandshakeGate(1e9)
    for number in range(MARKS_MAX + 10):
        assert gate.admit(number.to_bytes(4, "big"), 0.0, float(number))
    seen = sum(gate.has_seen(number.to_bytes(4, "big")) for number in range(MARKS_MAX + 10))
    assert seen == MARKS_MAX
    assert not gate.has_seen(bytes(4)), "the oldest is forgotten first"
    closed = HandshakeGate(0.0)
    while closed.admit(b"spent", 0.0, 0.0) or closed.admit(b"spent", 1e9, 0.0):
        pass
    assert not closed.admit(b"refused", 0.0, 0.0)
    assert not closed.has_seen(b"refused"), "who was turned away for the crowd may come again"
