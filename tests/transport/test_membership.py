"""Whom to knock at, and which knocks to look at."""

from __future__ import annotations

from gradwire.transport.membership import (
    GATE_BURST,
    SEEDS_MAX,
    STAMPS_MAX,
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
    membership.on_identified(SEED, 77, is_own=False)
    assert membership.due(1.0, set(), {77}) == []
    assert membership.next_at_s(set(), {77}) is None
    assert membership.due(1.0, set(), set()) == [SEED]


def test_the_own_address_is_never_knocked_at_again() -> None:
    membership = Membership()
    membership.add(SEED)
    assert membership.seeds() == [SEED]
    membership.on_identified(SEED, 1, is_own=True)
    assert membership.seeds() == []
    assert membership.due(100.0, set(), set()) == []


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


def test_the_gate_admits_a_burst_and_then_its_rate() -> None:
    gate = HandshakeGate(10.0)
    admitted = sum(gate.admit(1_000.0) for _ in range(500))
    assert admitted == GATE_BURST
    assert sum(gate.admit(1_001.0) for _ in range(500)) == 10
    assert not gate.admit(900.0), "a clock that goes back gives nothing away"


def test_a_stamp_counts_once_per_node_and_only_grows() -> None:
    gate = HandshakeGate(10.0)
    assert gate.is_fresh(1, 100, 5)
    assert not gate.is_fresh(1, 100, 5)
    assert not gate.is_fresh(1, 100, 4)
    assert gate.is_fresh(2, 100, 4)
    assert gate.is_fresh(1, 101, 0)
    assert not gate.is_fresh(1, 100, 9)


def test_the_memory_of_stamps_is_bounded() -> None:
    gate = HandshakeGate(10.0)
    for node_id in range(2 * STAMPS_MAX):
        gate.is_fresh(node_id, 1, 1)
    assert len(gate._stamps) == STAMPS_MAX
