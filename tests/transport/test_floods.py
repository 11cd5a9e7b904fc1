"""Floods of garbage, replays and INIT datagrams at a hundred thousand per second, while the service continues.

The attacker may have every handshake datagram of the past, any source address, and a faster path to the victim than the
true sender. The attacker does not have the secret.
"""

from __future__ import annotations

import itertools
import random

import pytest

from gradwire.transport.crypto import Handshake
from gradwire.transport.endpoint import HALF_OPEN_MAX
from gradwire.transport.handshake import TIMELY_S
from gradwire.transport.session import RESPONSE_INTERVAL_S
from gradwire.transport.wire import CONTROL, DATA, INIT, INIT_BYTES, RESPONSE, TAGGED

from .simulator import Host, Link, Simulator

TODAY_MS = 1_700_000_000_000
YESTERDAY_MS = TODAY_MS - 86_400_000
FLOOD_PER_MS = 100


def init_of(simulator: Simulator, node_id: int, **options: object) -> bytes:
    """Return the INIT of a node that once started a handshake somewhere."""
    host = simulator.add("elsewhere", node_id=node_id, port=node_id, **options)  # type: ignore[arg-type]
    host.endpoint.connect(("nowhere", 1))
    [transmit] = host.endpoint.poll(simulator.now_s)
    del simulator.hosts[host.address]
    return b"".join(transmit.slices)


def address_of(number: int) -> tuple[str, int]:
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", number % 60_000


def flood(simulator: Simulator, target: Host, datagrams: list[bytes], duration_s: float) -> None:
    """Deliver 100 of the datagrams in turn every millisecond, each from another address."""
    end_s = simulator.now_s + duration_s
    numbers = itertools.count()

    def strike() -> None:
        for number in itertools.islice(numbers, FLOOD_PER_MS):
            data = memoryview(datagrams[number % len(datagrams)])
            target.endpoint.receive(data, len(data), address_of(number), simulator.now_s)
        if simulator.now_s < end_s:
            simulator.call_at(simulator.now_s + 0.001, strike)

    simulator.call_at(simulator.now_s, strike)


def cluster(seed: int) -> tuple[Simulator, Host, Host, list[bytes]]:
    """Return two connected nodes, and the messages that one will send to the other for a second."""
    simulator = Simulator(seed, Link(delay_s=0.001))
    one, two = simulator.mesh(2, incarnation=TODAY_MS)
    payloads = [simulator.random.randbytes(20_000) for _ in range(100)]
    for index, payload in enumerate(payloads):
        simulator.call_at(
            simulator.now_s + 0.01 * index,
            lambda index=index, payload=payload: simulator.publish(one, payload, index),
        )
    return simulator, one, two, payloads


def recorded_inits(simulator: Simulator, count: int, **options: object) -> list[bytes]:
    return [init_of(simulator, 1_000 + number, **options) for number in range(count)]


@pytest.mark.parametrize("kind", ["wrong secret", "garbage", "of yesterday", "of today"])
def test_a_hundred_thousand_inits_per_second_exclude_nobody_and_disturb_nobody(kind: str) -> None:
    simulator, one, two, payloads = cluster(1)
    match kind:
        case "wrong secret":
            inits = recorded_inits(simulator, 500, secret=bytes(range(1, 33)))
        case "garbage":
            inits = [bytes([INIT]) + simulator.random.randbytes(255) for _ in range(500)]
        case "of yesterday":
            inits = recorded_inits(simulator, 2_000, incarnation=YESTERDAY_MS)
        case "of today":  # few can have been recorded within two minutes
            inits = recorded_inits(simulator, 100, incarnation=TODAY_MS)
    flood(simulator, two, inits, duration_s=1.0)
    joiner = simulator.add("joiner", incarnation=TODAY_MS)
    simulator.run_for(0.5)  # the flood has spent every token that it can
    joiner.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(joiner.endpoint.peers), 0.3)
    simulator.run_until(lambda: len(two.received) == 100, 1.0)
    assert two.payloads == payloads
    assert one.lost == two.lost == []
    simulator.run_for(0.5)
    stats = two.endpoint.stats()
    assert stats.handshakes_refused + stats.unauthenticated_datagrams > 94_000
    if kind in ("wrong secret", "garbage"):
        assert stats.unauthenticated_datagrams >= 100_000
        assert len(two.endpoint.sessions.by_index) == 2
    assert len(two.endpoint.sessions.by_index) <= HALF_OPEN_MAX + 2


def test_the_clocks_of_two_nodes_may_differ_by_a_year_in_quiet_times() -> None:
    simulator = Simulator(2)
    one = simulator.add("one", incarnation=TODAY_MS)
    two = simulator.add("two", incarnation=TODAY_MS - 365 * 86_400_000)
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 1.0)


def test_an_init_made_with_another_secret_costs_no_decryption_and_no_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator, _, two, _ = cluster(3)
    inits = recorded_inits(simulator, 20, secret=bytes(range(1, 33)))

    def refuse(*_: object) -> bytes:
        raise AssertionError("the datagram reached the handshake")

    monkeypatch.setattr(Handshake, "read_init", refuse)
    for number, init in enumerate(inits):
        two.endpoint.receive(memoryview(init), INIT_BYTES, address_of(number), simulator.now_s)
    assert two.endpoint.stats().unauthenticated_datagrams == 20
    init = init_of(simulator, 5)
    with pytest.raises(AssertionError, match="reached the handshake"):
        two.endpoint.receive(memoryview(init), INIT_BYTES, address_of(5), simulator.now_s)


def test_a_forged_answer_costs_no_curve_and_the_true_one_still_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator(4)
    one, two = simulator.add("one"), simulator.add("two")
    exchanges = []
    shared = Handshake._mix_shared
    monkeypatch.setattr(Handshake, "_mix_shared", lambda self: exchanges.append(1) or shared(self))

    def forge(_: int, datagram: bytes) -> bool:
        if datagram[0] == RESPONSE:
            for bit in range(0, 8 * len(datagram), 7):
                forged = bytearray(datagram)
                forged[bit // 8] ^= 1 << bit % 8
                one.endpoint.receive(memoryview(forged), len(forged), two.address, simulator.now_s)
        return False

    simulator.link(two, one).drop = forge
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers), 1.0)
    assert len(exchanges) == 2, "one on each side"
    assert one.endpoint.stats().unauthenticated_datagrams > 100


def test_a_full_table_of_half_open_handshakes_excludes_nobody() -> None:
    simulator, _, two, _ = cluster(5)
    inits = recorded_inits(simulator, 1_000, incarnation=YESTERDAY_MS)
    received = 0
    for number, init in enumerate(inits):  # at the rate of the gate, so that each opens one
        two.endpoint.receive(memoryview(init), INIT_BYTES, address_of(number), simulator.now_s)
        received += len(init)
        simulator.run_for(0.005)
        if number == 600:
            assert len(two.endpoint.sessions.half_open) == HALF_OPEN_MAX
            joiner = simulator.add("joiner", incarnation=TODAY_MS)
            joiner.endpoint.connect(two.address)
    assert joiner.endpoint.peers
    sent = sum(
        host.endpoint.stats().udp_bytes_received
        for host in simulator.hosts.values()
        if host.name.startswith("10.")
    )
    assert sent <= received
    simulator.run_for(11.0)
    assert len(two.endpoint.sessions.half_open) == 0


def test_a_half_open_handshake_is_answered_twenty_times_a_second_at_most() -> None:
    simulator, _, two, _ = cluster(6)
    simulator.run_for(2.0)
    init = init_of(simulator, 7)
    before = two.endpoint.stats().control_bytes_sent
    answers: list[bytes] = []
    simulator.default.drop = lambda _, datagram: bool(
        datagram[0] == RESPONSE and answers.append(datagram)
    )
    flood(simulator, two, [init], duration_s=1.0)
    simulator.run_for(1.0)
    assert 2 <= len(answers) <= 1.0 / RESPONSE_INTERVAL_S + 1
    assert len(set(answers)) == 1
    assert len(answers[0]) <= INIT_BYTES
    assert two.endpoint.stats().control_bytes_sent - before < 20_000
    assert len(two.endpoint.sessions.half_open) == 1


def test_an_attacker_who_delivers_an_init_first_delays_its_sender_by_one_repetition() -> None:
    simulator = Simulator(8, Link(delay_s=0.01))
    one, two = simulator.add("one"), simulator.add("two")

    def overtake(_: int, datagram: bytes) -> bool:
        if datagram[0] == INIT:
            two.endpoint.receive(
                memoryview(datagram), len(datagram), ("attacker", 9), simulator.now_s
            )
        return False

    simulator.link(one, two).drop = overtake
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 0.5)
    assert two.endpoint.peers[0].address == "one:1"
    simulator.publish(two, b"to the true address")
    simulator.run_until(lambda: bool(one.payloads), 0.1)


def test_a_recorded_init_from_the_address_of_a_seed_does_not_stop_our_own() -> None:
    simulator = Simulator(9, Link(delay_s=0.01))
    two = simulator.add("two", node_id=5)
    seed = ("seed", 1)
    two.endpoint.connect(seed)
    simulator.run_for(0.05)
    init = init_of(simulator, 900)  # a larger id, which wins a simultaneous handshake
    two.endpoint.receive(memoryview(init), INIT_BYTES, seed, simulator.now_s)
    simulator.run_for(0.3)
    simulator.add("seed", node_id=900)
    simulator.run_until(lambda: bool(two.endpoint.peers), 2.1)


def test_recorded_inits_from_the_address_of_a_seed_do_not_keep_us_from_connecting() -> None:
    simulator = Simulator(15)
    two = simulator.add("two", node_id=5)
    seed = ("seed", 1)
    two.endpoint.connect(seed)
    inits = recorded_inits(simulator, 60)
    for number, init in enumerate(inits):
        simulator.call_at(
            simulator.now_s + 0.5 * number,
            lambda init=init: two.endpoint.receive(
                memoryview(init), INIT_BYTES, seed, simulator.now_s
            ),
        )
    simulator.run_for(13.0)  # beyond the end of the first attempt
    simulator.add("seed")
    simulator.run_until(lambda: bool(two.endpoint.peers), 2.1)


@pytest.mark.parametrize("starts_after_s", [0.0, 5.0, 30.0])
def test_an_attacker_who_returns_our_datagrams_does_not_keep_us_from_a_seed(
    starts_after_s: float,
) -> None:
    simulator = Simulator(13)
    one = simulator.add("one")
    seed = ("two", 1)

    def echo(_: int, datagram: bytes) -> bool:
        one.endpoint.receive(memoryview(datagram), len(datagram), seed, simulator.now_s)
        return False

    simulator.default.drop = echo
    one.endpoint.connect(seed)
    simulator.run_for(starts_after_s)
    assert one.endpoint.unanswered() == [seed]
    simulator.add("two")
    simulator.run_until(lambda: bool(one.endpoint.peers), 2.1 if starts_after_s else 0.1)


@pytest.mark.parametrize("incarnation", [1, 2**63])
def test_a_node_whose_clock_went_back_is_accepted_again(incarnation: int) -> None:
    simulator = Simulator(14)
    one = simulator.add("one", node_id=2)
    two = simulator.add("two", node_id=1, incarnation=2**63 + 5)
    two.endpoint.connect(one.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 1.0)
    simulator.crash(two)
    again = simulator.add("two", node_id=1, incarnation=incarnation)
    again.endpoint.connect(one.address)
    simulator.run_until(lambda: bool(again.endpoint.peers and one.endpoint.peers), 25.0)
    assert one.endpoint.peers[0].incarnation == incarnation


@pytest.mark.parametrize("first", [0, DATA, RESPONSE, 0xFF])
def test_a_batch_from_an_unknown_address_is_dropped_at_once(first: int) -> None:
    simulator, _, two, _ = cluster(10)
    before = two.endpoint.stats()
    batch = memoryview(b"".join([bytes([first]) + bytes(1_399)] * 44) + bytes([first]))
    two.endpoint.receive(batch, 1_400, ("unknown", 1), simulator.now_s)
    after = two.endpoint.stats()
    dropped = after.stray_datagrams + after.malformed_datagrams
    assert dropped - before.stray_datagrams - before.malformed_datagrams == 45
    assert after.datagrams_received - before.datagrams_received == 45
    assert after.udp_bytes_received - before.udp_bytes_received == len(batch)


@pytest.mark.parametrize("where", ["unknown address", "address of a peer"])
def test_garbage_of_every_kind_is_counted_and_dropped(where: str) -> None:
    simulator, one, two, payloads = cluster(11)
    generator = random.Random(11)
    source = one.address if where == "address of a peer" else ("unknown", 1)
    before = two.endpoint.stats()
    for _ in range(300):
        kind = generator.choice((DATA, CONTROL, INIT, RESPONSE, TAGGED, 0, 0x21, 0xFF))
        size = generator.choice((1, 15, 16, 17, 32, 256, 1_400))
        batch = b"".join(bytes([kind]) + generator.randbytes(size - 1) for _ in range(20))
        batch = batch[: generator.randint(19 * size + 1, 20 * size)]
        two.endpoint.receive(memoryview(batch), size, source, simulator.now_s)
    after = two.endpoint.stats()
    dropped = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("malformed_datagrams", "stray_datagrams", "unauthenticated_datagrams")
    )
    assert dropped == after.datagrams_received - before.datagrams_received == 6_000
    simulator.run_until(lambda: two.payloads == payloads, 3.0)


def test_the_age_of_an_init_does_not_depend_on_the_uptime_of_the_node() -> None:
    simulator = Simulator(12)
    old = simulator.add("old", incarnation=TODAY_MS)
    simulator.run_for(10 * TIMELY_S)
    new = simulator.add("new", incarnation=TODAY_MS + int(10_000 * TIMELY_S))
    local, later = old.endpoint.local, new.endpoint.local
    assert abs(local.wall_ms(simulator.now_s) - later.wall_ms(simulator.now_s)) < 2
