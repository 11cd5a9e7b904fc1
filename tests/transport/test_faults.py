"""The faults that a transport meets, one scenario each: nothing is lost, and it does not take for ever."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import WouldBlock
from gradwire.transport.model import Limits
from gradwire.transport.wire import CONTROL, DATA, HEADER, INIT, INIT_BYTES, RECORD_NUMBER_MAX

from .simulator import Host, Link, Simulator

MEGABYTE = 1 << 20
Drop = Callable[[int, bytes], bool]


def transfer(
    link: Link, nbytes: int, *, seed: int = 1, back: Link | None = None, limit_s: float = 300.0
) -> Simulator:
    """Send ``nbytes`` in 1 MB messages over the link, check them, and leave the time it took in ``now_s``."""
    simulator = Simulator(seed, Link(delay_s=link.delay_s))
    one, two = simulator.mesh(2)
    simulator.links[one.address, two.address] = link
    simulator.links[two.address, one.address] = back or Link(delay_s=link.delay_s)
    simulator.now_s = 0.0 if simulator.now_s < 0 else simulator.now_s
    started_s = simulator.now_s
    sent = [
        simulator.random.randbytes(min(MEGABYTE, nbytes - at)) for at in range(0, nbytes, MEGABYTE)
    ]
    tickets = [simulator.publish(one, payload, tag) for tag, payload in enumerate(sent)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), limit_s)
    assert two.payloads == sent
    assert all(ticket.delivered for ticket in tickets)
    simulator.elapsed_s = simulator.now_s - started_s  # type: ignore[attr-defined]
    simulator.sender = one  # type: ignore[attr-defined]
    return simulator


def resent_bytes(simulator: Simulator) -> int:
    sender: Host = simulator.sender  # type: ignore[attr-defined]
    return sender.endpoint.stats().retransmitted_bytes


def data_fragments(wanted: Callable[[int, int, int], bool]) -> Drop:
    """Lose the first copy of the data datagrams that (record, fragment, fragments) says."""
    seen: set[tuple[int, int]] = set()

    def drop(_: int, datagram: bytes) -> bool:
        if datagram[0] != DATA:
            return False
        _, _, fragment, fragments, _, number = HEADER.unpack_from(datagram)
        record = number & RECORD_NUMBER_MAX
        if (record, fragment) in seen or not wanted(record, fragment, fragments):
            return False
        seen.add((record, fragment))
        return True

    return drop


# ---- loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("where", ["both", "data", "control"])
def test_random_loss_loses_nothing_and_little_is_sent_twice(loss: float, where: str) -> None:
    link = Link(loss=loss if where != "control" else 0.0)
    simulator = transfer(link, 3 * MEGABYTE, back=Link(loss=loss if where != "data" else 0.0))
    assert resent_bytes(simulator) <= 1.1 * link.lost_bytes + 6_000  # a few probes


def test_half_of_the_acknowledgements_may_be_lost() -> None:
    link = Link()
    simulator = transfer(link, 3 * MEGABYTE, back=Link(loss=0.5))
    assert resent_bytes(simulator) < 0.02 * 3 * MEGABYTE


def test_bursts_of_loss_lose_nothing() -> None:
    link = Link(burst_loss=(0.002, 0.05))  # holes of 20 datagrams on average
    simulator = transfer(link, 5 * MEGABYTE)
    assert link.lost_bytes > 100_000
    assert resent_bytes(simulator) <= 1.1 * link.lost_bytes + 6_000  # a few probes


def test_a_hole_of_100_kilobytes_heals() -> None:
    link = Link(drop=data_fragments(lambda record, fragment, _: 90 <= record * 45 + fragment < 162))
    simulator = transfer(link, MEGABYTE)
    assert link.lost_bytes == 72 * 1_400
    assert resent_bytes(simulator) <= 1.1 * link.lost_bytes


def test_a_whole_lost_record_heals() -> None:
    link = Link(drop=data_fragments(lambda record, *_: record == 5))
    assert resent_bytes(transfer(link, MEGABYTE)) <= 1.1 * link.lost_bytes


@pytest.mark.parametrize("lost", ["first", "last", "only"])
def test_the_lost_end_of_a_message_comes_again_within_three_probe_timeouts(lost: str) -> None:
    simulator = Simulator(1)
    one, two = simulator.mesh(2)
    for index in range(50):  # round trips to estimate from
        simulator.publish(one, b"x", index)
        simulator.run_for(0.02)
    session = next(iter(one.endpoint._sessions.values()))
    probe_timeout_s = session.rtt.probe_timeout_s
    assert probe_timeout_s < 0.01
    link = simulator.link(one, two)
    head = one.endpoint.log.head
    link.drop = data_fragments(
        lambda record, fragment, fragments: (
            record >= head and fragment == (0 if lost == "first" else fragments - 1)
        )
    )
    started_s = simulator.now_s
    ticket = simulator.publish(one, bytes(10 if lost == "only" else 30_000), 99)
    simulator.run_until(lambda: ticket.is_done, 1.0)
    assert link.lost_bytes > 0
    assert simulator.now_s - started_s < 3 * probe_timeout_s + 0.003
    assert two.received[-1][1] == 99


def test_a_record_lost_in_a_steady_flow_comes_again_within_three_round_trips() -> None:
    simulator = Simulator(1, Link(delay_s=0.01))
    one, two = simulator.mesh(2)
    simulator.link(one, two).drop = data_fragments(lambda record, *_: record == 100)
    arrival_s = {}
    for index in range(200):
        simulator.publish(one, b"steady", index)
        simulator.run_for(0.002)
        for _, tag, _ in two.received[len(arrival_s) :]:
            arrival_s[tag] = simulator.now_s - (1_000.0 if tag < 0 else 0.0)
        if index == 100:
            published_s = simulator.now_s
    assert 0.02 < arrival_s[100] - published_s < 0.065


def test_a_hundred_single_gaps_in_ten_megabytes_cause_no_storm() -> None:
    link = Link(drop=data_fragments(lambda record, fragment, _: (record * 45 + fragment) % 75 == 7))
    simulator = transfer(link, 10 * MEGABYTE)
    assert link.lost_bytes >= 100 * 1_400
    assert resent_bytes(simulator) <= 1.1 * link.lost_bytes


# ---- order, repetition, corruption ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "link",
    [
        Link(reorder=0.01),
        Link(jitter_s=0.002),
        Link(duplicate=0.5),
        Link(delay_s=0.02, jitter_s=0.1),
    ],
    ids=["1 % by 5 to 10 ms", "shuffled", "half twice", "100 ms of jitter"],
)
def test_reordering_and_repetition_lose_and_repeat_nothing(link: Link) -> None:
    transfer(
        link,
        2 * MEGABYTE,
        back=Link(delay_s=link.delay_s, jitter_s=link.jitter_s, duplicate=link.duplicate),
    )


def test_a_replay_of_everything_after_a_minute_changes_nothing() -> None:
    simulator = Simulator(2)
    one, two = simulator.mesh(2)
    recorded: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(recorded.append(datagram))
    for index in range(20):
        simulator.publish(one, bytes(3_000), index)
        simulator.run_for(0.01)
    simulator.run_for(60.0)
    before = two.endpoint.peers
    for datagram in recorded[:200]:
        two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)
    simulator.run_for(1.0)
    assert len(two.received) == 20
    assert two.endpoint.peers == before
    assert two.endpoint.stats().messages_received == 20


@pytest.mark.parametrize("corrupt", [0.02, 0.3])
def test_flipped_bits_never_reach_a_message(corrupt: float) -> None:
    # Records of one datagram: whole bursts would practically never survive 30 % of flipped bits.
    simulator = Simulator(3, Link(corrupt=corrupt, delay_s=0.001))
    one, two = simulator.mesh(2)
    sent = [simulator.random.randbytes(1_000) for _ in range(300)]
    for tag, payload in enumerate(sent):
        simulator.publish(one, payload, tag)
        simulator.run_for(0.001)
    simulator.run_until(lambda: len(two.received) == 300, 60.0)
    assert two.payloads == sent
    stats = two.endpoint.stats()
    assert stats.rejected_records + stats.unauthenticated_datagrams + stats.malformed_datagrams > 3


def test_two_percent_of_flipped_bits_let_whole_records_through_in_the_end() -> None:
    transfer(Link(corrupt=0.02), 500_000)


def test_truncated_and_lengthened_datagrams_are_dropped() -> None:
    simulator = Simulator(4)
    one, two = simulator.mesh(2)
    generator = random.Random(4)
    original = simulator.send

    def send(source: object, target: object, datagram: bytes) -> None:
        if generator.random() < 0.1:
            cut = generator.randrange(len(datagram) + 20)
            datagram = (
                datagram[:cut] if cut < len(datagram) else datagram + bytes(cut - len(datagram) + 1)
            )
        original(source, target, datagram)  # type: ignore[arg-type]

    simulator.send = send  # type: ignore[method-assign]
    sent = [generator.randbytes(5_000) for _ in range(100)]
    for tag, payload in enumerate(sent):
        simulator.publish(one, payload, tag)
        simulator.run_for(0.01)
    simulator.run_until(lambda: len(two.received) == 100, 30.0)
    assert two.payloads == sent


def test_a_true_header_with_a_false_payload_spoils_no_message() -> None:
    simulator = Simulator(5)
    one, two = simulator.mesh(2)
    generator = random.Random(5)

    def poison(_: int, datagram: bytes) -> bool:
        if datagram[0] != DATA or generator.random() >= 0.01:
            return False
        false = datagram[:16] + generator.randbytes(len(datagram) - 16)
        two.endpoint.receive(memoryview(false), len(false), one.address, simulator.now_s)
        return True  # the true one never comes

    simulator.link(one, two).drop = poison
    payload = generator.randbytes(MEGABYTE)
    simulator.publish(one, payload)
    simulator.run_until(lambda: bool(two.received), 30.0)
    assert two.payloads == [payload]
    assert two.endpoint.stats().rejected_records > 0


# ---- delay and rate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.00005, 0.001, 0.015, 0.1, 0.75])
def test_any_delay_is_bridged_without_sending_twice(delay_s: float) -> None:
    simulator = transfer(Link(delay_s=delay_s), 5 * MEGABYTE)
    assert resent_bytes(simulator) < 20_000
    assert simulator.elapsed_s < 0.2 + 16 * delay_s  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("link", "nbytes", "share"),
    [
        (Link(0.0005, rate_bytes_per_s=12.5e6, queue_bytes=125_000), 16 * MEGABYTE, 0.92),
        (Link(0.02, loss=0.01, rate_bytes_per_s=12.5e6, queue_bytes=500_000), 24 * MEGABYTE, 0.8),
        (Link(0.015, rate_bytes_per_s=1.25e6, queue_bytes=35_000), 3 * MEGABYTE, 0.8),
        (Link(0.001, rate_bytes_per_s=125e6, queue_bytes=50_000), 32 * MEGABYTE, 0.8),
    ],
    ids=[
        "100 Mbit/s",
        "100 Mbit/s 40 ms 1 %",
        "10 Mbit/s queue of 25",
        "1 Gbit/s queue of 0.2 BDP",
    ],
)
def test_a_bottleneck_is_used(link: Link, nbytes: int, share: float) -> None:
    simulator = transfer(link, nbytes, back=Link(link.delay_s, loss=link.loss))
    rate = nbytes / simulator.elapsed_s  # type: ignore[attr-defined]
    assert rate >= share * link.rate_bytes_per_s
    assert resent_bytes(simulator) <= 1.2 * link.lost_bytes


@pytest.mark.parametrize("senders", [16, 32])
def test_many_to_one_use_the_link_and_share_it_fairly(senders: int) -> None:
    simulator = Simulator(6, Link(delay_s=0.00005))
    sink = simulator.add("sink")
    hosts = [simulator.add(f"s{index}") for index in range(senders)]
    shared = Link(0.00005, rate_bytes_per_s=125e6, queue_bytes=256_000)
    for host in hosts:
        host.endpoint.connect(sink.address)
    simulator.run_until(lambda: all(sink_peer(host, sink) for host in hosts), 10.0)
    for host in hosts:
        simulator.links[host.address, sink.address] = shared
    started_s = simulator.now_s
    finished_s: dict[str, float] = {}
    tickets = {
        host.name: simulator.publish(host, bytes(MEGABYTE), 0, sink_peer(host, sink))  # type: ignore[arg-type]
        for host in hosts
    }
    while len(finished_s) < senders:
        simulator.run_for(0.001)
        assert simulator.now_s - started_s < 5.0
        for name, ticket in tickets.items():
            if ticket.is_done:
                finished_s.setdefault(name, simulator.now_s - started_s)
    rates = [1 / value for value in finished_s.values()]
    jain = sum(rates) ** 2 / (senders * sum(rate**2 for rate in rates))
    goodput = senders * MEGABYTE / max(finished_s.values())
    assert goodput >= 0.8 * 125e6
    assert jain >= 0.9


def sink_peer(host: Host, sink: Host) -> object:
    return next((peer for peer in host.endpoint.peers if peer.id == sink.endpoint.node_id), None)


# ---- outages ----------------------------------------------------------------------------------------------------


def test_five_seconds_on_two_seconds_off() -> None:
    link = Link(0.005, rate_bytes_per_s=1.25e6, queue_bytes=100_000)
    simulator = Simulator(7, Link(delay_s=0.005))
    one, two = simulator.mesh(2)
    simulator.links[one.address, two.address] = link
    back = simulator.link(two, one)

    def switch(blocked: bool) -> None:
        link.blocked = back.blocked = blocked
        simulator.call_at(simulator.now_s + (2.0 if blocked else 5.0), lambda: switch(not blocked))

    simulator.call_at(simulator.now_s + 1.0, lambda: switch(True))
    ticket = simulator.publish(one, bytes(10 * MEGABYTE))
    started_s = simulator.now_s
    simulator.run_until(lambda: ticket.is_done, 60.0)
    assert ticket.delivered
    assert (
        simulator.now_s - started_s < 18.0
    )  # 8.4 s at the rate of the link, and two or three outages
    assert one.lost == two.lost == []


def test_thirty_seconds_of_silence_lose_the_peer_and_it_comes_back() -> None:
    simulator = Simulator(8)
    one, two = simulator.mesh(2)
    for source, target in ((one, two), (two, one)):
        simulator.link(source, target).blocked = True
    tickets = [simulator.publish(one, bytes(100), index) for index in range(5)]
    simulator.run_for(30.0)
    assert [event.reason for event in one.lost] == ["timeout"]
    assert list(one.lost[0].undelivered) == tickets
    for link in simulator.links.values():
        link.blocked = False
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 5.0)
    simulator.publish(one, b"again", 9)
    simulator.run_until(lambda: bool(two.payloads), 1.0)
    assert two.payloads == [b"again"]


def test_a_one_way_partition_ends_on_both_sides() -> None:
    simulator = Simulator(9)
    one, two = simulator.mesh(2)
    simulator.link(one, two).blocked = True
    simulator.run_for(15.0)
    assert one.lost
    assert two.lost
    simulator.link(one, two).blocked = False
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 15.0)


def test_clogging_every_link_in_turn_loses_nothing() -> None:
    simulator = Simulator(10, Link(loss=0.01))
    hosts = simulator.mesh(4)
    for index, link_of in enumerate([(a, b) for a in hosts for b in hosts if a is not b]):
        link = simulator.link(*link_of)
        simulator.call_at(
            simulator.now_s + 0.1 * index, lambda link=link: setattr(link, "blocked", True)
        )
        simulator.call_at(
            simulator.now_s + 1.2 + 0.1 * (11 - index),
            lambda link=link: setattr(link, "blocked", False),
        )
    for index in range(60):
        for host in hosts:
            simulator.publish(host, bytes(2_000), index)
        simulator.run_for(0.05)
    simulator.run_until(lambda: all(len(host.received) == 180 for host in hosts), 20.0)


def test_a_starved_timer_thread_recovers() -> None:
    simulator = Simulator(11, Link(loss=0.02))
    one, two = simulator.mesh(2)
    for index in range(40):
        simulator.publish(one, bytes(20_000), index)
        one.paused = index % 2 == 0
        simulator.run_for(0.2)
        if one.paused:
            simulator.resume(one)
    simulator.run_until(lambda: len(two.received) == 40, 10.0)
    assert one.lost == two.lost == []


# ---- what strangers and broken peers send -----------------------------------------------------------------------


def test_replayed_knocks_get_no_answers_and_take_no_memory() -> None:
    simulator = Simulator(12)
    one, two = simulator.add("one"), simulator.add("two")
    knocks: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == INIT and knocks.append(datagram)
    )
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(two.endpoint.peers), 5.0)
    simulator.crash(one)
    simulator.run_for(30.0)
    sent = two.endpoint.stats().datagrams_sent
    for index in range(10_000):
        source = (f"10.{index >> 8}.{index & 255}.1", index)
        two.endpoint.receive(
            memoryview(knocks[0]), INIT_BYTES, source, simulator.now_s + index * 1e-5
        )
    assert two.endpoint.poll(simulator.now_s + 0.1) == []
    assert two.endpoint.stats().datagrams_sent == sent
    assert two.endpoint.stats().handshakes_refused == 10_000
    assert len(two.endpoint._sessions) == 0


def test_fresh_knocks_from_everywhere_are_limited_in_number_and_answers_are_no_larger() -> None:
    simulator = Simulator(13)
    target = simulator.add("target")
    received = 0
    for index in range(2_000):
        stranger = simulator.add("member", node_id=index + 10)
        stranger.endpoint.connect(target.address)
        for transmit in stranger.endpoint.poll(simulator.now_s):
            data = b"".join(transmit.slices)
            received += len(data)
            target.endpoint.receive(memoryview(data), len(data), (f"h{index}", 1), simulator.now_s)
        for _ in range(2):
            target.endpoint.poll(simulator.now_s)
    assert len(target.endpoint._sessions) <= 256
    assert target.endpoint.stats().udp_bytes_sent <= received
    assert target.endpoint.stats().handshakes_refused > 1_000


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([DATA, CONTROL, INIT, 0x14, 0]), st.binary(max_size=1_500)),
        max_size=30,
    )
)
def test_no_datagram_raises_or_stops_the_service(datagrams: list[tuple[int, bytes]]) -> None:
    simulator = Simulator(14)
    one, two = simulator.mesh(2)
    for kind, rest in datagrams:
        data = bytes([kind]) + rest
        two.endpoint.receive(memoryview(data), len(data), one.address, simulator.now_s)
        two.endpoint.receive(memoryview(data * 3), max(1, len(data)), one.address, simulator.now_s)
    simulator.publish(one, b"service goes on")
    simulator.run_until(lambda: bool(two.received), 5.0)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=400), st.integers(0, 2**32))
def test_a_member_that_seals_nonsense_stops_only_itself(plaintext: bytes, seed: int) -> None:
    """What comes out of decryption is checked as if it came from a stranger: a broken peer ends its own session."""
    simulator = Simulator(seed)
    one, two, three = simulator.mesh(3)
    session = next(s for s in one.endpoint._sessions.values() if s.address == two.address)
    channel = session._channel
    assert channel is not None
    counter = channel.next_counter()
    header = HEADER.pack(CONTROL, 0, 0, 0, session._remote_index, counter)
    datagram = channel.seal(counter, header, plaintext)
    two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)
    simulator.run_for(0.1)
    simulator.publish(three, b"still here")
    simulator.run_until(lambda: b"still here" in two.payloads, 5.0)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=100))
def test_a_member_that_seals_nonsense_into_a_record_stops_only_itself(plaintext: bytes) -> None:
    simulator = Simulator(15)
    one, two, three = simulator.mesh(3)
    endpoint = one.endpoint
    number = endpoint.log.head
    header = HEADER.pack(DATA, 0, 0, 1, endpoint.stream, 1_384 << 48 | number)
    sealed = bytearray(len(plaintext) + 16)
    endpoint.sender_keys()[0].seal_into(number, memoryview(plaintext), header, memoryview(sealed))
    datagram = header + sealed
    two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)
    simulator.run_for(0.1)
    simulator.publish(three, b"still here")
    simulator.run_until(lambda: b"still here" in two.payloads, 5.0)
    assert [payload for payload in two.payloads if payload != b"still here"] in ([], [b""])


# ---- slow consumers ---------------------------------------------------------------------------------------------


def test_a_consumer_that_sleeps_two_and_a_half_seconds_loses_nothing() -> None:
    limits = Limits(
        message_bytes_max=MEGABYTE,
        send_log_bytes=4 * MEGABYTE,
        receive_bytes=2 * MEGABYTE,
        window_bytes=MEGABYTE,
    )
    simulator = Simulator(16)
    one, two = simulator.mesh(2, limits=limits)
    two.reads = False
    simulator.call_at(simulator.now_s + 2.5, lambda: setattr(two, "reads", True))
    sent = refused = 0
    while sent < 100:
        try:
            simulator.publish(one, bytes(100_000), sent)
            sent += 1
        except WouldBlock:
            refused += 1
            simulator.run_for(0.01)
    simulator.run_until(lambda: len(two.received) == 100, 10.0)
    assert refused > 50
    assert one.lost == two.lost == []
