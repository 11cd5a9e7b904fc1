"""The rate controller, against a model of a link."""

from __future__ import annotations

import pytest

from gradwire.transport.recovery import (
    BURST_MAX_BYTES,
    RECORD_MAX_BYTES,
    WINDOW_INITIAL_BYTES,
    RateController,
    Sent,
)
from gradwire.transport.round_trips import RttEstimator


def run_link(
    rate: float,
    delay_s: float,
    loss_every: int,
    seconds: float,
    *,
    is_local: bool = False,
    local_buffer_bytes: int = 0,
    first_s: float | None = None,
) -> tuple[RateController, float]:
    """Drive a controller over a bottleneck with a deep queue; return it and the share of the rate delivered."""
    rtt = RttEstimator()
    if first_s is not None:
        rtt.add_sample(first_s, 0.0)
    control = RateController(rtt)
    control.is_local = is_local
    control.local_buffer_bytes = local_buffer_bytes
    now_s = free_s = 0.0
    in_flight: list[tuple[float, int, Sent, bool]] = []
    delivered = count = 0
    while now_s < seconds:
        allowed_s = control.send_allowed_at_s()
        while allowed_s is not None and allowed_s <= now_s:
            nbytes = min(control.burst_bytes, 60_000)
            mark = control.on_sent(nbytes, now_s)
            free_s = max(free_s, now_s) + nbytes / rate
            count += 1
            in_flight.append(
                (free_s + delay_s, nbytes, mark, bool(loss_every) and count % loss_every == 0)
            )
            allowed_s = control.send_allowed_at_s()
        times = [in_flight[0][0]] if in_flight else []
        if allowed_s is not None:
            times.append(allowed_s)
        now_s = max(now_s + 1e-7, min(times))
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
    assert control.phase == "probe"
    assert share > 0.9
    assert 0.9 * rate < control.rate_bytes_per_s < 1.3 * rate


@pytest.mark.parametrize("loss_every", [100, 10, 5])
def test_loss_alone_does_not_slow_it_down(loss_every: int) -> None:
    _, share = run_link(12.5e6, 0.02, loss_every, 3.0)
    assert share > 0.8 * (1 - 1 / loss_every)


@pytest.mark.parametrize(
    ("rate", "loss_every", "is_local", "least", "most"),
    [
        (1.25e6, 0, False, 3_000, 0.005 * 1.25e6),
        (12.5e6, 0, False, 30_000, BURST_MAX_BYTES),
        (125e6, 0, False, BURST_MAX_BYTES, BURST_MAX_BYTES),
        (125e6, 20, False, 40_000, BURST_MAX_BYTES),
        (1.25e9, 0, False, RECORD_MAX_BYTES, RECORD_MAX_BYTES),
        (125e6, 0, True, RECORD_MAX_BYTES, RECORD_MAX_BYTES),
        (12.5e6, 20, True, 3_000, 10_000),
    ],
)
def test_what_leaves_at_once_is_little_enough_for_a_switch(
    rate: float, loss_every: int, is_local: bool, least: float, most: float
) -> None:
    control, _ = run_link(rate, 0.0002, loss_every, 2.0, is_local=is_local)
    assert least <= control.burst_bytes <= most


@pytest.mark.parametrize(
    ("rate", "least", "most"),
    [(1.25e6, 3_000, 3_000), (12.5e6, 8_000, 14_600), (50e6, 14_600, 40_000)],
)
def test_what_leaves_at_once_over_a_long_way_that_loses_something_is_ten_datagrams_or_half_a_millisecond(
    rate: float, least: float, most: float
) -> None:
    control, _ = run_link(rate, 0.02, 20, 2.0)
    assert least <= control.burst_bytes <= most


@pytest.mark.parametrize(
    ("loss_every", "buffer_bytes", "least", "most"),
    [
        (0, 8 << 20, BURST_MAX_BYTES, BURST_MAX_BYTES),
        (0, 425_984, 0, 15_000),
        (20, 8 << 20, 0, 4_000),
    ],
)
def test_a_busy_receiver_on_this_machine_gets_whole_calls_however_slowly_it_takes_them(
    loss_every: int, buffer_bytes: int, least: int, most: int
) -> None:
    control, _ = run_link(
        1e6,
        0.03,
        loss_every,
        4.0,
        is_local=True,
        local_buffer_bytes=buffer_bytes,
        first_s=0.0002,
    )
    assert least <= control.burst_bytes <= most


@pytest.mark.parametrize("first_s", [None, 0.05])
def test_a_path_within_this_machine_that_was_never_short_is_paced_like_any_other(
    first_s: float | None,
) -> None:
    """An emulated link or a tunnel: it has a queue."""
    there, _ = run_link(
        12.5e6, 0.04, 0, 2.0, is_local=True, local_buffer_bytes=8 << 20, first_s=first_s
    )
    elsewhere, _ = run_link(12.5e6, 0.04, 0, 2.0, first_s=first_s)
    assert there.free_bytes == 0
    assert (there.send_allowed_at_s() or 0.0) > 1.9
    assert there.burst_bytes == elsewhere.burst_bytes
    assert there.window_bytes == elsewhere.window_bytes


def test_what_was_sent_without_a_pace_is_not_paid_for_once_there_is_one() -> None:
    """To a receiver on this machine everything leaves at once, until it loses something."""
    control, _ = run_link(1.25e7, 0.0002, 0, 0.1, is_local=True, local_buffer_bytes=8 << 20)
    for _ in range(100):
        control.on_sent(BURST_MAX_BYTES, 0.2)
    control.on_lost(control.bytes_in_flight)
    control.loss_rate = 0.02
    assert control.room_bytes(0.2) > 0
    control.on_sent(BURST_MAX_BYTES, 0.2)
    allowed_s = control.send_allowed_at_s()
    assert allowed_s is not None
    assert 0.2 < allowed_s < 0.22


def test_probes_which_need_not_keep_to_the_pace_make_it_wait_for_one_of_them() -> None:
    control, _ = run_link(1.25e6, 0.02, 0, 2.0)
    control.on_abandoned(control.bytes_in_flight)
    for _ in range(100):
        control.on_sent(1_400, 3.0)
    allowed_s = control.send_allowed_at_s()
    assert allowed_s is not None
    assert 3.0 < allowed_s < 3.005


def test_the_window_stays_near_two_bandwidth_delay_products() -> None:
    control, _ = run_link(12.5e6, 0.02, 0, 3.0)
    assert 12.5e6 * 0.02 < control.window_bytes < 3 * 12.5e6 * 0.02 + 8 * 65_536


@pytest.mark.parametrize(
    ("is_local", "buffer_bytes", "loss_every", "slack_bytes"),
    [
        (False, 8 << 20, 0, 8 * BURST_MAX_BYTES),
        (True, 0, 0, 8 * BURST_MAX_BYTES),
        (True, 425_984, 0, 8 * BURST_MAX_BYTES),
        (True, 8 << 20, 0, 3 << 20),
        (True, 8 << 20, 20, 8 * BURST_MAX_BYTES),
    ],
)
def test_the_window_leaves_room_for_a_busy_receiver_on_this_machine(
    is_local: bool, buffer_bytes: int, loss_every: int, slack_bytes: int
) -> None:
    control, _ = run_link(
        1.25e10,
        1e-5,
        loss_every,
        0.05,
        is_local=is_local,
        local_buffer_bytes=buffer_bytes,
    )
    pipe_bytes = 2 * control.rate_bytes_per_s * control._rtt.minimum_s
    assert control.window_bytes == pytest.approx(pipe_bytes + slack_bytes, rel=0.01)


def test_within_one_machine_only_loss_has_it_paced() -> None:
    control, _ = run_link(1.25e8, 0.0002, 0, 0.1, is_local=True, local_buffer_bytes=8 << 20)
    control.on_abandoned(control.bytes_in_flight)
    control.on_sent(100_000, 0.2)
    assert control.send_allowed_at_s() == 0.0
    for control.loss_rate, control.local_buffer_bytes in ((0.02, 8 << 20), (0.0, 425_984)):
        control.on_abandoned(control.bytes_in_flight)
        control.on_sent(100_000, 0.2)
        assert (control.send_allowed_at_s() or 0.0) > 0.2


def test_nothing_more_may_be_sent_when_the_window_is_full() -> None:
    control = RateController(RttEstimator())
    assert control.send_allowed_at_s() is not None
    assert control.room_bytes(1.0) == WINDOW_INITIAL_BYTES
    mark = control.on_sent(WINDOW_INITIAL_BYTES, 1.0)
    assert control.send_allowed_at_s() is None
    assert control.room_bytes(1.0) == 0
    control.on_delivered(1_000, mark, 1.1)
    assert control.bytes_in_flight == WINDOW_INITIAL_BYTES - 1_000


def test_what_may_leave_at_once_is_what_the_pace_a_burst_and_the_window_allow() -> None:
    control, _ = run_link(12.5e6, 0.02, 0, 1.0)
    allowed_s = control.send_allowed_at_s()
    assert allowed_s is not None
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
