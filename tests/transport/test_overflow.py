"""What is learnt from one round trip after the other about how much may be in flight."""

from __future__ import annotations

import pytest

from gradwire.transport.overflow import (
    FIRST_BYTES,
    FLOOR_BYTES,
    SHARE_MIN_BYTES,
    Bound,
    RoundTrip,
)

SHORTEST_S = 0.0002
QUEUED_S = 0.1


def round_trip(
    delivered_bytes: int,
    lost_bytes: int = 0,
    longest_s: float = SHORTEST_S,
    rate_bytes_per_s: float = 0.0,
    in_flight_bytes: int = FIRST_BYTES,
) -> RoundTrip:
    seen = RoundTrip(1.0)
    seen.delivered_bytes, seen.lost_bytes = delivered_bytes, lost_bytes
    seen.longest_s, seen.rate_bytes_per_s = longest_s, rate_bytes_per_s
    seen.in_flight_bytes = in_flight_bytes
    return seen


def overflown() -> Bound:
    bound = Bound()
    assert bound.on_round_trip(round_trip(45_000, 15_000, QUEUED_S), SHORTEST_S, 2.0)
    return bound


def test_what_did_not_fit_into_a_queue_is_not_in_flight_again() -> None:
    assert overflown().bytes == FIRST_BYTES * 3 // 4


@pytest.mark.parametrize(
    ("delivered_bytes", "lost_bytes", "longest_s"),
    [
        (45_000, 15_000, SHORTEST_S),
        (45_000, 15_000, 0.004),
        (590_000, 10_000, QUEUED_S),
        (10_000, 2_800, QUEUED_S),
    ],
    ids=["no queue", "a busy receiver", "a small share", "two datagrams"],
)
def test_other_losses_lower_nothing(
    delivered_bytes: int, lost_bytes: int, longest_s: float
) -> None:
    bound = Bound()
    seen = round_trip(delivered_bytes, lost_bytes, longest_s)
    assert not bound.on_round_trip(seen, SHORTEST_S, 2.0)
    assert bound.bytes >= FIRST_BYTES


def test_a_long_path_keeps_what_it_needs_to_be_busy() -> None:
    bound = Bound()
    held_bytes, rate, shortest_s = 1_000_000, 10e6, 0.05
    bound.bytes = held_bytes
    seen = round_trip(50_000, 50_000, shortest_s + QUEUED_S, rate, held_bytes)
    assert bound.on_round_trip(seen, shortest_s, 2.0)
    assert rate * shortest_s < bound.bytes < held_bytes


def test_however_much_is_lost_something_may_be_sent() -> None:
    bound = Bound()
    for _ in range(20):
        bound.on_round_trip(round_trip(100, 60_000, QUEUED_S), SHORTEST_S, 2.0)
    assert bound.bytes == FLOOR_BYTES


def test_many_paths_begin_with_as_much_as_two() -> None:
    assert [first_bytes(paths) for paths in (1, 2, 8, 1_000)] == [
        FIRST_BYTES,
        FIRST_BYTES,
        FIRST_BYTES // 4,
        SHARE_MIN_BYTES,
    ]


def first_bytes(paths: int) -> int:
    bound = Bound()
    bound.share(paths, is_first=True)
    return bound.bytes


def test_a_start_goes_slower_as_soon_as_round_trips_grow() -> None:
    def growth(shortest_s: float, longest_s: float) -> int:
        bound = Bound()
        seen = round_trip(FIRST_BYTES, longest_s=longest_s)
        bound.on_round_trip(seen, shortest_s, 2.0)
        return bound.bytes - FIRST_BYTES

    far, near = growth(0.02, 0.02), growth(SHORTEST_S, SHORTEST_S)
    assert far == 2 * FIRST_BYTES
    assert growth(0.02, 0.05) < near < far


def test_after_an_overflow_more_is_tried_only_without_a_queue_and_not_at_once() -> None:
    bound = overflown()
    before_bytes = bound.bytes
    bound.on_round_trip(round_trip(60_000, 0, QUEUED_S), SHORTEST_S, 3.0)
    bound.on_round_trip(round_trip(60_000), SHORTEST_S, 4.0)  # the one before had a queue
    assert bound.bytes == before_bytes
    bound.on_round_trip(round_trip(60_000), SHORTEST_S, 5.0)
    assert before_bytes < bound.bytes < 1.01 * before_bytes
    for step in range(10_000):
        bound.on_round_trip(round_trip(60_000, in_flight_bytes=bound.bytes), SHORTEST_S, 6.0 + step)
    assert bound.bytes > 10 * before_bytes


def test_who_sends_little_is_not_trusted_with_more() -> None:
    bound = Bound()
    bound.on_round_trip(round_trip(1_000, in_flight_bytes=1_000), SHORTEST_S, 2.0)
    assert bound.bytes == FIRST_BYTES
