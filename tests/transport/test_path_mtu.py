"""How large datagrams may be: found out by probing, and put right when it changes in mid-run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.transport.model import Limits
from gradwire.transport.path_mtu import (
    BASE_BYTES,
    PROBE_TIMEOUT_MAX_S,
    PROBES_MAX,
    RUNGS,
    SEARCH_AGAIN_S,
    PathMtu,
    ceiling_bytes,
    is_loopback,
)

from .simulator import Host, Link, Simulator

MEGABYTE = 1 << 20
TIMEOUT_S = 0.01


def discover(path: PathMtu, passes: int, now_s: float = 0.0, probes: int = 100) -> list[int]:
    """Answer the probes of sizes that pass, and return the sizes probed, until the path rests."""
    sizes = []
    for _ in range(probes):
        if path.due_at_s - now_s > 1.0:
            break
        now_s = max(now_s, path.due_at_s)
        nbytes = path.poll(now_s, TIMEOUT_S)
        if nbytes is not None:
            sizes.append(nbytes)
            path.on_small_arrived()
            if nbytes <= passes:
                path.on_arrived(nbytes, now_s)
    return sizes


def ethernet() -> int:
    return 1_472


# ---- the search by itself ---------------------------------------------------------------------------------------


def test_the_start_is_confirmed_and_then_larger_sizes_are_tried() -> None:
    path = PathMtu(1_400, ethernet, 0.0)
    assert discover(path, 1_472) == [1_400, 1_452, 1_472]
    assert path.size_bytes == 1_472


def test_a_start_that_is_not_confirmed_by_three_probes_is_given_up_for_the_base() -> None:
    path = PathMtu(1_400, ethernet, 0.0)
    assert discover(path, 1_252) == [1_400] * PROBES_MAX + [1_232]
    assert path.size_bytes == 1_232


@given(st.integers(BASE_BYTES, 9_000), st.sampled_from([600, 1_200, 1_384, 1_400, 1_472, 8_972]))
def test_whatever_passes_is_used_up_to_the_next_rung(passes: int, start: int) -> None:
    path = PathMtu(start, lambda: 8_972, 0.0)
    discover(path, passes)
    assert path.size_bytes == max(
        rung for rung in (min(start, BASE_BYTES), *RUNGS, start) if rung <= passes
    )


def test_silence_is_an_outage_and_not_a_small_path() -> None:
    path = PathMtu(1_400, ethernet, 0.0)
    for _ in range(50):
        assert path.poll(path.due_at_s, TIMEOUT_S) == 1_400
    assert path.size_bytes == 1_400


def test_a_round_trip_that_an_outage_left_behind_does_not_hold_up_the_search() -> None:
    """Found by the simulator, seed 5403: after half a minute's pause the probes went out every three minutes."""
    path = PathMtu(1_400, ethernet, 0.0)
    now_s = 0.0
    for _ in range(PROBES_MAX):
        assert path.poll(now_s, 80.0) == 1_400
        path.on_small_arrived()
        now_s = path.due_at_s
    assert path.poll(now_s, 80.0) == 1_232
    assert now_s == PROBES_MAX * PROBE_TIMEOUT_MAX_S


def test_losses_of_large_datagrams_have_the_size_confirmed_and_change_it_only_if_that_fails() -> (
    None
):
    path = PathMtu(1_400, ethernet, 0.0)
    discover(path, 1_472)
    path.on_large_lost(10.0)
    assert discover(path, 1_472, 10.0) == [1_472]
    path.on_large_lost(20.0)
    assert discover(path, 1_300, 20.0) == [1_472] * 3 + [1_232] + [1_400] * 3
    assert path.size_bytes == 1_232


def test_acknowledged_data_confirms_the_size_without_a_probe() -> None:
    path = PathMtu(1_400, lambda: 1_400, 0.0)
    path.on_arrived(1_400, 0.0)
    assert discover(path, 0) == []


def test_a_size_that_the_system_refuses_is_left_at_once() -> None:
    path = PathMtu(1_400, ethernet, 0.0)
    discover(path, 1_472)
    path.on_too_large(1_472, 1.0)
    assert path.size_bytes == BASE_BYTES
    assert discover(path, 1_472, 1.0) == [1_232, 1_400, 1_452]
    path.on_too_large(1_472, 2.0)  # one that was still on its way out
    assert path.size_bytes == 1_452


def test_the_search_begins_again_after_ten_minutes_and_asks_for_the_interface_again() -> None:
    ceiling = 1_472
    path = PathMtu(1_400, lambda: ceiling, 0.0)
    discover(path, 1_300)
    assert path.size_bytes == 1_232
    ceiling = 8_972
    assert path.due_at_s >= SEARCH_AGAIN_S
    discover(path, 9_000, path.due_at_s)
    assert path.size_bytes == 8_972


def test_the_ceiling_is_ethernet_unless_the_interface_says_otherwise() -> None:
    assert ceiling_bytes("10.0.0.1", None) == 1_472
    assert ceiling_bytes("fd00::1", None) == 1_452
    assert ceiling_bytes("10.0.0.1", 9_000) == 8_972
    assert ceiling_bytes("fd00::1", 9_000) == 8_952
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "h0")] == [
        True,
        True,
        True,
        False,
        False,
    ]


# ---- whole nodes ------------------------------------------------------------------------------------------------


def jumbo(simulator: Simulator, count: int = 2, **options: object) -> list[Host]:
    return simulator.mesh(count, interface_mtu=lambda _: 9_000, **options)


def datagram_bytes(host: Host) -> int:
    return host.endpoint.own.sealer.fragment_bytes + 16


def send(simulator: Simulator, source: Host, nbytes: int) -> bytes:
    payload = simulator.random.randbytes(nbytes)
    simulator.publish(source, payload, len(source.tickets))
    return payload


@pytest.mark.parametrize(
    ("mtu_bytes", "expected"),
    [(0, 8_972), (9_000, 8_972), (1_500, 1_472), (1_492, 1_452), (1_428, 1_400), (1_280, 1_232)],
)
def test_the_size_of_a_path_is_found_within_seconds(mtu_bytes: int, expected: int) -> None:
    simulator = Simulator(1, Link(delay_s=0.005, mtu_bytes=mtu_bytes))
    one, two = jumbo(simulator)
    simulator.run_for(2.0)
    assert (datagram_bytes(one), datagram_bytes(two)) == (expected, expected)
    assert [path.path_mtu_bytes for path in one.endpoint.stats().peers] == [expected]
    payload = send(simulator, one, MEGABYTE)
    simulator.run_until(lambda: two.payloads == [payload], 5.0)
    assert one.endpoint.stats().lost_bytes == 0


def test_without_a_word_from_the_interface_the_search_ends_at_ethernet() -> None:
    simulator = Simulator(2)
    one, _ = simulator.mesh(2)
    simulator.run_for(2.0)
    assert datagram_bytes(one) == 1_472


def test_the_search_can_be_limited_and_switched_off() -> None:
    for fragment_bytes_max, expected in ((1_384, 1_400), (1_436, 1_452), (4_000, 4_016)):
        simulator = Simulator(3)
        one, _ = jumbo(simulator, limits=Limits(fragment_bytes_max=fragment_bytes_max))
        simulator.run_for(2.0)
        assert datagram_bytes(one) == expected


def test_the_narrowest_path_decides_for_the_node() -> None:
    simulator = Simulator(4)
    one, two, three = jumbo(simulator, 3)
    simulator.link(one, three).mtu_bytes = 1_280
    simulator.run_for(2.0)
    payload = send(simulator, one, MEGABYTE)
    simulator.run_until(lambda: two.payloads == three.payloads == [payload], 5.0)
    assert datagram_bytes(one) == 1_232
    assert datagram_bytes(two) == datagram_bytes(three) == 8_972
    simulator.crash(three)
    simulator.run_for(15.0)
    assert datagram_bytes(one) == 8_972


def test_a_newcomer_brings_the_size_down_until_its_path_is_known() -> None:
    simulator = Simulator(5)
    one, _ = jumbo(simulator)
    simulator.run_for(2.0)
    late = simulator.add("late")
    late.endpoint.connect(one.address)
    simulator.run_until(lambda: len(one.endpoint.peers) == 2, 5.0)
    assert datagram_bytes(one) == 1_400
    simulator.run_for(2.0)
    assert datagram_bytes(one) == 8_972


def test_on_loopback_nothing_is_probed() -> None:
    simulator = Simulator(6)
    one, two = (simulator.add("127.0.0.1", port=port) for port in (1, 2))
    one.endpoint.connect(two.address)
    sizes: list[int] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(sizes.append(len(datagram)))
    simulator.run_until(lambda: bool(one.endpoint.peers), 5.0)
    simulator.run_for(30.0)
    assert max(sizes) == 256
    assert datagram_bytes(one) == 1_400


def test_a_path_that_shrinks_twice_in_mid_run_delivers_everything_without_a_lost_peer() -> None:
    simulator = Simulator(7, Link(delay_s=0.001, rate_bytes_per_s=12.5e6, queue_bytes=256_000))
    one, two = jumbo(simulator)
    simulator.run_for(2.0)
    assert datagram_bytes(one) == 8_972
    link = simulator.link(one, two)
    link.mtu_bytes = 9_000
    sent = []
    for index in range(30):
        sent.append(send(simulator, one, MEGABYTE))
        if index == 5:
            link.mtu_bytes = 1_500
        if index == 20:
            assert datagram_bytes(one) == 1_472
            link.mtu_bytes = 1_280
        simulator.run_for(0.08)
    started_s = simulator.now_s
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 5.0)
    assert two.payloads == sent
    assert one.lost == two.lost == []
    assert datagram_bytes(one) == 1_232
    assert one.endpoint.stats().recut_records > 0
    assert simulator.now_s - started_s < 1.0  # that is how long the two holes kept it up


def test_small_messages_go_on_while_a_hole_for_large_ones_is_found() -> None:
    """Small ones keep being acknowledged, so the loss is no timeout; that the large ones never are tells it."""
    simulator = Simulator(8, Link(delay_s=0.005))
    one, two = simulator.mesh(2)
    simulator.run_for(2.0)
    simulator.link(one, two).mtu_bytes = 1_280
    expected = [send(simulator, one, 20_000)]
    for _ in range(100):
        expected.append(send(simulator, one, 200))
        simulator.run_for(0.01)
    assert two.payloads == expected[: len(two.payloads)]
    assert len(two.payloads) > 40
    simulator.run_until(lambda: two.payloads == expected, 2.0)


def test_a_first_message_before_the_path_is_known_gets_through_a_narrow_one() -> None:
    simulator = Simulator(9, Link(delay_s=0.01, mtu_bytes=1_300))
    one, two = simulator.mesh(2)
    payload = send(simulator, one, MEGABYTE)
    started_s = simulator.now_s
    simulator.run_until(lambda: two.payloads == [payload], 5.0)
    assert simulator.now_s - started_s < 2.0


def test_what_the_system_refuses_to_send_is_cut_anew_at_once() -> None:
    simulator = Simulator(10, Link(delay_s=0.01))
    one, two = simulator.mesh(2)
    simulator.run_for(1.0)
    simulator.link(one, two).mtu_bytes = 1_400
    payload = send(simulator, one, MEGABYTE)
    one.endpoint.on_too_large(two.address, 1_472, simulator.now_s)
    started_s = simulator.now_s
    simulator.run_until(lambda: two.payloads == [payload], 2.0)
    assert simulator.now_s - started_s < 0.4
    assert two.lost == one.lost == []


@pytest.mark.parametrize("seed", range(10))
def test_heavy_loss_and_outages_change_no_size_for_long(seed: int) -> None:
    generator = random.Random(seed)
    simulator = Simulator(seed, Link(delay_s=0.005, loss=0.05, mtu_bytes=1_500))
    one, two = simulator.mesh(2)
    for index in range(20):
        simulator.publish(one, bytes(generator.choice((100, 100_000))), index)
        simulator.link(one, two).blocked = generator.random() < 0.2
        simulator.run_for(0.1)
    simulator.link(one, two).blocked = False
    simulator.run_until(lambda: len(two.received) == 20, 20.0)
    assert datagram_bytes(one) >= 1_400


def test_a_path_that_recovers_is_used_again_after_ten_minutes() -> None:
    simulator = Simulator(11, Link(mtu_bytes=1_280))
    one, _ = simulator.mesh(2)
    simulator.run_for(5.0)
    assert datagram_bytes(one) == 1_232
    simulator.default.mtu_bytes = 1_500
    simulator.run_for(SEARCH_AGAIN_S + 5.0)
    assert datagram_bytes(one) == 1_472
