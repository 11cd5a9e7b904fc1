"""Datagrams that arrive late, twice, in another order, or changed: every message arrives once and unchanged."""

from __future__ import annotations

import random

import pytest

from gradwire.transport.types import Address
from gradwire.transport.wire import DATA

from .faults import MEGABYTE, transfer
from .simulator import Link, Simulator
from .vopr import EPOCH_RECORDS


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


def test_a_path_that_shuffles_every_64_datagrams_loses_and_repeats_nothing() -> None:
    simulator = Simulator(1)
    one, two = simulator.mesh(2)
    path = simulator.link(one, two)
    held: list[bytes] = []
    pass_on = simulator.send

    def release() -> None:
        simulator.random.shuffle(held)
        while held:
            pass_on(one.address, two.address, held.pop())

    def send(source: Address, target: Address, datagram: bytes) -> None:
        if source != one.address:
            pass_on(source, target, datagram)
            return
        held.append(datagram)
        if len(held) == 64:
            release()
        elif len(held) == 1:  # the last datagrams are not held for ever
            simulator.call_at(simulator.now_s + 0.005, release)

    simulator.send = send  # type: ignore[method-assign]
    sent = [simulator.random.randbytes(MEGABYTE) for _ in range(3)]
    tickets = [simulator.publish(one, payload, tag) for tag, payload in enumerate(sent)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 10.0)
    assert two.payloads == sent
    assert path.lost_bytes == 0
    # Nothing was lost, so every repetition was in vain.
    assert one.endpoint.stats().retransmitted_bytes < 0.05 * 3 * MEGABYTE


def test_every_datagram_comes_again_after_a_minute_of_other_traffic_and_under_another_key() -> None:
    simulator = Simulator(2)
    one, two = simulator.mesh(2, first_record=EPOCH_RECORDS - 130)
    path = simulator.link(one, two)

    def again(_: int, datagram: bytes) -> bool:
        simulator.call_at(simulator.now_s + 60.0, lambda: arrive(datagram))
        return False

    def arrive(datagram: bytes) -> None:
        two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)

    path.drop = again
    for index in range(260):
        simulator.publish(one, index.to_bytes(2, "little") * 700, index)
        simulator.run_for(0.5)
    simulator.run_until(lambda: len(two.received) == 260, 5.0)
    assert [tag for _, tag, _ in two.received] == list(range(260))
    assert one.lost == two.lost == []
    assert one.endpoint.log.head > EPOCH_RECORDS
    assert one.endpoint.stats().retransmitted_bytes == 0


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


def test_at_two_percent_of_flipped_bits_full_records_arrive_in_the_end() -> None:
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


def test_a_true_header_with_a_false_payload_changes_no_message() -> None:
    simulator = Simulator(5)
    one, two = simulator.mesh(2)
    generator = random.Random(5)

    def forge(_: int, datagram: bytes) -> bool:
        if datagram[0] != DATA or generator.random() >= 0.01:
            return False
        false = datagram[:16] + generator.randbytes(len(datagram) - 16)
        two.endpoint.receive(memoryview(false), len(false), one.address, simulator.now_s)
        return True  # the true one never comes

    simulator.link(one, two).drop = forge
    payload = generator.randbytes(MEGABYTE)
    simulator.publish(one, payload)
    simulator.run_until(lambda: bool(two.received), 30.0)
    assert two.payloads == [payload]
    assert two.endpoint.stats().rejected_records > 0
