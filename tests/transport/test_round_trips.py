"""Round-trip times, and how long to wait for an answer."""

from __future__ import annotations

import pytest

from gradwire.transport.round_trips import RttEstimator, ack_delay_s


def test_the_first_round_trip_sets_the_estimate() -> None:
    rtt = RttEstimator()
    assert rtt.probe_timeout_s == 0.2
    rtt.add_sample(0.010, 1.0)
    assert (rtt.smoothed_s, rtt.variation_s, rtt.minimum_s) == (0.010, 0.005, 0.010)
    assert rtt.probe_timeout_s == pytest.approx(0.010 + 0.020 + 0.010 / 8)


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
    assert rtt.minimum_s == 0.100
    rtt.add_sample(0.003, 16.2)
    assert rtt.minimum_s == 0.003
    rtt.add_sample(0.100, 40.0)
    assert rtt.minimum_s == 0.100


def test_a_guess_gives_way_to_the_first_measurement() -> None:
    rtt = RttEstimator()
    rtt.set_guess(3.0, 1.0)
    assert rtt.smoothed_s == 3.0
    rtt.add_sample(0.001, 1.1)
    assert (rtt.smoothed_s, rtt.minimum_s) == (0.001, 0.001)
    rtt.set_guess(3.0, 1.2)
    assert rtt.smoothed_s == 0.001


def test_the_shortest_of_all_times_is_never_forgotten_and_no_guess() -> None:
    rtt = RttEstimator()
    rtt.set_guess(0.001, 0.0)
    assert rtt.shortest_s == 0.0
    for at_s, sample_s in ((1.0, 0.030), (2.0, 0.020), (20.0, 0.040), (40.0, 0.050)):
        rtt.add_sample(sample_s, at_s)
    assert rtt.minimum_s == 0.050
    assert rtt.shortest_s == 0.020


@pytest.mark.parametrize(
    ("round_trip_s", "delay_s"), [(0.0001, 0.001), (0.008, 0.001), (0.016, 0.002), (0.2, 0.004)]
)
def test_an_acknowledgement_over_a_long_way_is_waited_for_as_long_as_it_may_take(
    round_trip_s: float, delay_s: float
) -> None:
    rtt, overtaken = RttEstimator(), RttEstimator(is_overtaken=True)
    for _ in range(100):
        rtt.add_sample(round_trip_s, 1.0)
        overtaken.add_sample(round_trip_s, 1.0)
    assert ack_delay_s(round_trip_s) == pytest.approx(delay_s)
    assert rtt.probe_timeout_s == pytest.approx(round_trip_s + 0.001 + delay_s)
    assert overtaken.loss_delay_s == pytest.approx(rtt.loss_delay_s + delay_s)


def test_a_first_probe_waits_two_round_trips_at_most() -> None:
    rtt = RttEstimator()
    rtt.add_sample(0.100, 1.0)
    assert rtt.first_probe_timeout_s == pytest.approx(0.2, abs=0.002)
    assert rtt.probe_timeout_s > 0.3
    for _ in range(100):
        rtt.add_sample(0.100, 1.0)
    assert rtt.first_probe_timeout_s == rtt.probe_timeout_s < 0.11
