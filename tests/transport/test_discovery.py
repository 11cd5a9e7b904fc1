"""Which addresses a node connects to, and when."""

from __future__ import annotations

import pytest

from gradwire.transport.discovery import RETRY_MAX_S, SEEDS_MAX, Discovery
from gradwire.transport.types import Address

SEED = ("10.0.0.1", 5)
NEVER = float("inf")


@pytest.fixture
def discovery() -> Discovery:
    found = Discovery()
    found.add(SEED)
    return found


def due(
    discovery: Discovery, now_s: float, connected: set[Address], node_ids: set[int]
) -> tuple[list[Address], float]:
    return discovery.due(now_s, connected, node_ids), discovery.due_at_s


def test_a_seed_is_due_until_it_is_connected(discovery: Discovery) -> None:
    assert due(discovery, 1.0, set(), set()) == ([SEED], 1.1)
    assert due(discovery, 1.0, set(), set()) == ([], 1.1)
    assert due(discovery, 2.0, {SEED}, set()) == ([], NEVER)
    discovery.on_ended(SEED, 3.0, is_answered=True)
    assert due(discovery, 3.0, set(), set()) == ([], 3.1)
    assert due(discovery, 3.2, set(), set()) == ([SEED], 3.2 + 0.1)


def test_a_node_connected_at_another_address_is_not_tried_again(discovery: Discovery) -> None:
    discovery.on_identified(SEED, 77)
    assert due(discovery, 1.0, set(), {77}) == ([], NEVER)
    assert discovery.due(1.0, set(), set()) == [SEED]


def test_only_misfits_at_known_addresses_are_remembered(discovery: Discovery) -> None:
    for port in range(10_000):
        discovery.on_misfit(("10.0.0.9", port), 5.0)
    assert list(discovery.by_address) == [SEED]
    assert discovery.by_address[SEED].misfit_at_s < 0.0
    discovery.on_misfit(SEED, 6.0)
    assert discovery.by_address[SEED].misfit_at_s == 6.0


def test_a_learned_address_is_dropped_after_one_failed_attempt_and_a_seed_is_not(
    discovery: Discovery,
) -> None:
    discovery.add(("10.0.0.2", 5), is_learned=True)
    for address in list(discovery.by_address):
        discovery.on_ended(address, 1.0, is_answered=False)
    assert list(discovery.by_address) == [SEED]
    assert due(discovery, 1.0, set(), set()) == ([], 1.0 + RETRY_MAX_S)


def test_only_seeds_without_a_connection_count_as_unanswered(discovery: Discovery) -> None:
    other = ("10.0.0.2", 5)
    discovery.add(other)
    discovery.add(("10.0.0.3", 5), is_learned=True)
    discovery.on_identified(other, 77)
    assert discovery.seeds() == [SEED, other]
    assert discovery.seeds({SEED}, {77}) == []


def test_the_number_of_addresses_is_bounded() -> None:
    discovery = Discovery()
    for port in range(10 * SEEDS_MAX):
        discovery.add(("10.0.0.1", port), is_learned=True)
    assert len(list(discovery.by_address)) == SEEDS_MAX


def test_no_address_of_the_caller_is_left_out() -> None:
    discovery = Discovery()
    for port in range(2 * SEEDS_MAX):
        discovery.add(("10.0.0.1", port))
    assert len(discovery.seeds()) == 2 * SEEDS_MAX


def test_an_address_from_a_peer_is_a_seed_once_the_caller_gives_it() -> None:
    discovery = Discovery()
    discovery.add(SEED, is_learned=True)
    assert discovery.seeds() == []
    discovery.add(SEED)
    discovery.add(SEED, is_learned=True)
    assert discovery.seeds() == [SEED]
