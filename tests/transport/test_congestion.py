"""Round-trip times, the rate controller against a model of a link, and the limit on the bytes in flight."""

from __future__ import annotations

import pytest

from gradwire.transport.congestion import (
    ACK_DELAY_MAX_S,
    BURST_MAX_BYTES,
    NEVER_S,
    SHARE_MIN_BYTES,
    WINDOW_INITIAL_BYTES,
    WINDOW_MIN_BYTES,
    InFlightLimit,
    RateController,
    RoundTrip,
    RttEstimator,
    SendState,
)

# ---- round trips ------------------------------------------------------------------------------------------------


def test_the_first_round_trip_sets_the_estimate() -> None:
    rtt = RttEstimator()
    assert rtt.probe_timeout_s == 0.2
    rtt.add_sample(0.010, 1.0)
    assert (rtt.smoothed_s, rtt.variation_s, rtt.minimum_s) == (0.010, 0.005, 0.010)
    assert rtt.probe_timeout_s == pytest.approx(0.010 + 0.020 + ACK_DELAY_MAX_S)


def test_the_estimate_follows_rfc_9002() -> None:
    rtt = RttEstimator()
    rtt.add_sample(0.100, 1.0)
    rtt.add_sample(0.200, 1.1)
    assert rtt.variation_s == pytest.approx(0.05 + (0.1 - 0.05) / 4)
    assert rtt.smoothed_s == pytest.approx(0.1125)


def test_the_minimum_is_forgotten_after_ten_seconds() -> None:
    rtt = RttEstimator()
    rtt.add_sample(0.001, 0.0)
    rtt.add_sample(0.005, 9.0)
    assert rtt.minimum_s == 0.001
    rtt.add_sample(0.005, 10.1)
    assert rtt.minimum_s == 0.005


def test_the_smallest_of_the_last_ten_seconds_follows_the_minimum() -> None:
    rtt = RttEstimator()
    for at_s, sample_s in ((0.0, 0.001), (4.0, 0.030), (6.0, 0.002), (8.0, 0.040), (10.1, 0.150)):
        rtt.add_sample(sample_s, at_s)
    assert rtt.minimum_s == 0.002
    rtt.add_sample(0.100, 16.1)
    assert rtt.minimum_s == 0.040
    rtt.add_sample(0.003, 16.2)
    assert rtt.minimum_s == 0.003
    rtt.add_sample(0.100, 40.0)
    assert rtt.minimum_s == 0.100


@pytest.mark.parametrize("round_trip_s", [0.0001, 0.016, 0.2])
def test_the_probe_timeout_includes_the_delay_of_the_acknowledgement(round_trip_s: float) -> None:
    rtt = RttEstimator()
    for _ in range(100):
        rtt.add_sample(round_trip_s, 1.0)
    assert rtt.probe_timeout_s == pytest.approx(round_trip_s + 0.001 + ACK_DELAY_MAX_S)


def test_a_first_probe_waits_two_round_trips_at_most() -> None:
    rtt = RttEstimator()
    rtt.add_sample(0.100, 1.0)
    assert rtt.first_probe_timeout_s == pytest.approx(0.2, abs=0.002)
    assert rtt.probe_timeout_s > 0.3
    for _ in range(100):
        rtt.add_sample(0.100, 1.0)
    assert rtt.first_probe_timeout_s == rtt.probe_timeout_s < 0.11


# ---- the rate controller ----------------------------------------------------------------------------------------


def run_link(
    rate: float, delay_s: float, loss_every: int, seconds: float
) -> tuple[RateController, float]:
    """Drive a controller over a bottleneck with a deep queue; return it and the share of the rate delivered."""
    rtt = RttEstimator()
    control = RateController(rtt)
    now_s = free_s = 0.0
    in_flight: list[tuple[float, int, SendState, bool]] = []
    delivered = count = 0
    while now_s < seconds:
        allowed_s = control.send_allowed_at_s()
        while allowed_s <= now_s:
            nbytes = min(control.burst_bytes, 60_000)
            mark = control.on_sent(nbytes, now_s)
            free_s = max(free_s, now_s) + nbytes / rate
            count += 1
            in_flight.append(
                (free_s + delay_s, nbytes, mark, bool(loss_every) and count % loss_every == 0)
            )
            allowed_s = control.send_allowed_at_s()
        arrives_s = in_flight[0][0] if in_flight else NEVER_S
        now_s = max(now_s + 1e-7, min(arrives_s, allowed_s))
        while in_flight and in_flight[0][0] <= now_s:
            _, nbytes, mark, is_lost = in_flight.pop(0)
            if is_lost:
                control.on_lost(nbytes)
                continue
            rtt.add_sample(now_s - mark.sent_at_s, now_s)
            control.on_delivered(nbytes, mark, now_s)
            delivered += nbytes
    return control, delivered / seconds / rate


@pytest.mark.parametrize("rate", [1.25e6, 12.5e6, 125e6, 1.25e9])
@pytest.mark.parametrize("delay_s", [0.0002, 0.02])
def test_the_controller_finds_the_rate_of_the_link(rate: float, delay_s: float) -> None:
    control, share = run_link(rate, delay_s, 0, 3.0)
    assert not control.is_starting
    assert share > 0.9
    assert 0.9 * rate < control.rate_bytes_per_s < 1.3 * rate


@pytest.mark.parametrize("loss_every", [100, 10, 5])
def test_loss_alone_does_not_slow_it_down(loss_every: int) -> None:
    _, share = run_link(12.5e6, 0.02, loss_every, 3.0)
    assert share > 0.8 * (1 - 1 / loss_every)


@pytest.mark.parametrize(
    ("rate", "loss_every", "least", "most"),
    [
        (1.25e6, 0, 3_000, 0.005 * 1.25e6),
        (12.5e6, 0, 30_000, BURST_MAX_BYTES),
        (125e6, 0, BURST_MAX_BYTES, BURST_MAX_BYTES),
        (125e6, 20, 40_000, BURST_MAX_BYTES),
    ],
)
def test_a_burst_fits_the_queue_of_a_switch(
    rate: float, loss_every: int, least: float, most: float
) -> None:
    control, _ = run_link(rate, 0.0002, loss_every, 2.0)
    assert least <= control.burst_bytes <= most


@pytest.mark.parametrize(
    ("rate", "least", "most"),
    [(1.25e6, 3_000, 3_000), (12.5e6, 8_000, 14_600), (50e6, 14_600, 40_000)],
)
def test_over_a_long_path_with_loss_a_burst_is_ten_datagrams_or_half_a_millisecond(
    rate: float, least: float, most: float
) -> None:
    control, _ = run_link(rate, 0.02, 20, 2.0)
    assert least <= control.burst_bytes <= most


def test_probes_that_ignore_the_pace_delay_the_next_burst_by_one_of_them() -> None:
    control, _ = run_link(1.25e6, 0.02, 0, 2.0)
    control.on_abandoned(control.bytes_in_flight)
    for _ in range(100):
        control.on_sent(1_200, 3.0)
    allowed_s = control.send_allowed_at_s()
    assert 3.0 < allowed_s < 3.005


def test_the_window_stays_near_two_bandwidth_delay_products() -> None:
    control, _ = run_link(12.5e6, 0.02, 0, 3.0)
    assert 12.5e6 * 0.02 < control.window_bytes < 3 * 12.5e6 * 0.02 + 8 * 65_536


def test_nothing_more_may_be_sent_when_the_window_is_full() -> None:
    control = RateController(RttEstimator())
    assert control.send_allowed_at_s() < NEVER_S
    assert control.room_bytes(1.0) == WINDOW_INITIAL_BYTES
    mark = control.on_sent(WINDOW_INITIAL_BYTES, 1.0)
    assert control.send_allowed_at_s() == NEVER_S
    assert control.room_bytes(1.0) == 0
    control.on_delivered(1_000, mark, 1.1)
    assert control.bytes_in_flight == WINDOW_INITIAL_BYTES - 1_000


def test_pace_burst_and_window_limit_the_bytes_that_may_leave_at_once() -> None:
    control, _ = run_link(12.5e6, 0.02, 0, 1.0)
    allowed_s = control.send_allowed_at_s()
    later_s = allowed_s + 0.001
    control.bytes_in_flight, control.window_bytes = 90_000, 100_000
    assert control.room_bytes(later_s) == 10_000
    control.bytes_in_flight, control.window_bytes = 290_000, 300_000  # a part of a burst too many
    assert control.room_bytes(later_s) == min(BURST_MAX_BYTES, control.burst_bytes) > 10_000
    control.window_bytes = 10_000_000
    assert control.room_bytes(later_s) == control.burst_bytes
    assert control.room_bytes(allowed_s - 0.001) == 0


def test_an_idle_sender_does_not_lower_the_estimate() -> None:
    control, _ = run_link(12.5e6, 0.002, 0, 1.0)
    before = control.rate_bytes_per_s
    control.on_abandoned(control.bytes_in_flight)
    now_s = 2.0
    for _ in range(200):
        control.on_app_limited()
        mark = control.on_sent(100, now_s)
        control.on_app_limited()
        control.on_delivered(100, mark, now_s + 0.004)
        now_s += 0.1
    assert control.rate_bytes_per_s > 0.5 * before


# ---- the limit on the bytes in flight ---------------------------------------------------------------------------

SHORTEST_S = 0.0002
QUEUED_S = 0.1


def round_trip(
    delivered_bytes: int,
    lost_bytes: int = 0,
    longest_s: float = SHORTEST_S,
    rate_bytes_per_s: float = 0.0,
    in_flight_bytes: int = WINDOW_INITIAL_BYTES,
) -> RoundTrip:
    return RoundTrip(1.0, delivered_bytes, lost_bytes, longest_s, rate_bytes_per_s, in_flight_bytes)


def overflowed() -> InFlightLimit:
    limit = InFlightLimit()
    assert limit.on_round_trip(round_trip(45_000, 15_000, QUEUED_S), SHORTEST_S, 2.0)
    return limit


def test_bytes_that_did_not_fit_into_a_queue_are_not_in_flight_again() -> None:
    assert overflowed().nbytes == WINDOW_INITIAL_BYTES * 3 // 4


@pytest.mark.parametrize(
    ("delivered_bytes", "lost_bytes", "longest_s"),
    [
        (45_000, 15_000, SHORTEST_S),
        (45_000, 15_000, 0.004),
        (590_000, 10_000, QUEUED_S),
        (10_000, 2_400, QUEUED_S),
    ],
    ids=["no queue", "a busy receiver", "a small share", "two datagrams"],
)
def test_other_losses_lower_nothing(
    delivered_bytes: int, lost_bytes: int, longest_s: float
) -> None:
    limit = InFlightLimit()
    seen = round_trip(delivered_bytes, lost_bytes, longest_s)
    assert not limit.on_round_trip(seen, SHORTEST_S, 2.0)
    assert limit.nbytes >= WINDOW_INITIAL_BYTES


def test_a_long_path_keeps_enough_to_stay_busy() -> None:
    limit = InFlightLimit()
    held_bytes, rate, shortest_s = 1_000_000, 10e6, 0.05
    limit.nbytes = held_bytes
    seen = round_trip(50_000, 50_000, shortest_s + QUEUED_S, rate, held_bytes)
    assert limit.on_round_trip(seen, shortest_s, 2.0)
    assert rate * shortest_s < limit.nbytes < held_bytes


def test_however_much_is_lost_something_may_be_sent() -> None:
    limit = InFlightLimit()
    for _ in range(20):
        limit.on_round_trip(round_trip(100, 60_000, QUEUED_S), SHORTEST_S, 2.0)
    assert limit.nbytes == WINDOW_MIN_BYTES


def test_many_paths_begin_with_as_much_as_two() -> None:
    assert [first_bytes(paths) for paths in (1, 2, 8, 1_000)] == [
        WINDOW_INITIAL_BYTES,
        WINDOW_INITIAL_BYTES,
        WINDOW_INITIAL_BYTES // 4,
        SHARE_MIN_BYTES,
    ]


def first_bytes(paths: int) -> int:
    control = RateController(RttEstimator())
    control.share_link(paths)
    assert control.window_bytes == control.limit.nbytes
    return control.limit.nbytes


def test_a_start_slows_down_as_soon_as_round_trips_grow() -> None:
    def growth(shortest_s: float, longest_s: float) -> int:
        limit = InFlightLimit()
        seen = round_trip(WINDOW_INITIAL_BYTES, longest_s=longest_s)
        limit.on_round_trip(seen, shortest_s, 2.0)
        return limit.nbytes - WINDOW_INITIAL_BYTES

    long_path, short_path = growth(0.02, 0.02), growth(SHORTEST_S, SHORTEST_S)
    assert long_path == 2 * WINDOW_INITIAL_BYTES
    assert growth(0.02, 0.05) < short_path < long_path


def test_after_an_overflow_the_limit_grows_slowly_and_only_without_a_queue() -> None:
    limit = overflowed()
    before_bytes = limit.nbytes
    limit.on_round_trip(round_trip(60_000, 0, QUEUED_S), SHORTEST_S, 3.0)
    limit.on_round_trip(round_trip(60_000), SHORTEST_S, 4.0)  # the one before had a queue
    assert limit.nbytes == before_bytes
    limit.on_round_trip(round_trip(60_000), SHORTEST_S, 5.0)
    assert before_bytes < limit.nbytes < 1.01 * before_bytes
    for step in range(10_000):
        seen = round_trip(60_000, in_flight_bytes=limit.nbytes)
        limit.on_round_trip(seen, SHORTEST_S, 6.0 + step)
    assert limit.nbytes > 10 * before_bytes


def test_the_limit_does_not_grow_for_a_sender_of_little() -> None:
    limit = InFlightLimit()
    limit.on_round_trip(round_trip(1_000, in_flight_bytes=1_000), SHORTEST_S, 2.0)
    assert limit.nbytes == WINDOW_INITIAL_BYTES
