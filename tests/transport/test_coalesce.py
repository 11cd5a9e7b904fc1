"""A peer that lags gets the sum of what waited for it; everybody else gets everything."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gradwire.errors import WouldBlock
from gradwire.transport import Backlogged, Limits, Node, Peer

from .simulator import Host, Link, Simulator

MEGABYTE = 1 << 20
VALUES = 500
LIMITS = Limits(
    message_bytes_max=MEGABYTE,
    send_log_bytes=4 * MEGABYTE,
    receive_bytes=2 * MEGABYTE,
    window_bytes=MEGABYTE,
    lag_s=0.5,
)
SMALL = replace(LIMITS, message_bytes_max=MEGABYTE // 4, receive_bytes=MEGABYTE // 2)
SECRET = bytes(range(32))


def total(_: Peer, backlog: Sequence[Backlogged]) -> Iterable[tuple[int, object]]:
    """Send the sum of all updates under the tag of the last one."""
    return [(backlog[-1].tag, sum_of(message.payload for message in backlog))]


def sum_of(payloads: Iterable[object]) -> np.ndarray:
    result = np.zeros(VALUES, dtype=np.int64)
    for payload in payloads:
        result += np.frombuffer(payload, dtype=np.int64)  # type: ignore[call-overload]
    return result


def update(generator: random.Random) -> bytes:
    return np.array([generator.randrange(-9, 10) for _ in range(VALUES)]).tobytes()


def mesh(simulator: Simulator, count: int, limits: Limits = LIMITS) -> list[Host]:
    hosts = simulator.mesh(count, limits=limits, on_lag="coalesce")
    for host in hosts:
        host.coalesce = total
    return hosts


def publish(simulator: Simulator, host: Host, payload: bytes, tag: int) -> None:
    simulator.publish(host, payload, tag)


# ---- in the simulator -------------------------------------------------------------------------------------------


def test_a_consumer_that_is_deaf_for_long_ends_with_the_sum_and_slows_nobody_down() -> None:
    simulator = Simulator(1)
    one, slow, *fast = mesh(simulator, 4)
    slow.reads = False
    generator = random.Random(1)
    sent: list[bytes] = []
    largest = 0
    for tag in range(3_000):  # 12 MB, three times what the log can hold
        sent.append(update(generator))
        publish(simulator, one, sent[-1], tag)  # never WouldBlock
        simulator.run_for(0.004)
        largest = max(largest, one.endpoint.stats().send_log_bytes)
        if tag % 100 == 99:
            assert all(len(host.received) >= tag - 10 for host in fast)
    for host in fast:
        assert host.payloads == sent
    assert largest < 2 * LIMITS.send_log_bytes // 3
    slow.reads = True
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 10.0)
    assert len(slow.received) < 1_500
    assert (sum_of(slow.payloads) == sum_of(sent)).all()
    assert [tag for _, tag, _ in slow.received] == sorted({tag for _, tag, _ in slow.received})
    assert slow.received[-1][1] == 2_999
    assert one.endpoint.stats().coalesced_messages == 3_000 - len(slow.received)
    assert all(len(ticket.delivered) == 3 for ticket in one.tickets)
    assert one.lost == slow.lost == []


@pytest.mark.parametrize("seed", range(30))
def test_the_sums_are_right_whatever_is_lost_cut_anew_or_published_meanwhile(seed: int) -> None:
    generator = random.Random(seed)
    pick = generator.choice
    link = Link(
        delay_s=pick((0.0005, 0.02)),
        loss=pick((0.0, 0.05, 0.2)),
        duplicate=pick((0.0, 0.2)),
        jitter_s=pick((0.0, 0.002)),
    )
    simulator = Simulator(seed, link)
    hosts = mesh(simulator, 3)
    sent: dict[int, list[bytes]] = {host.endpoint.node_id: [] for host in hosts}
    for host in hosts:
        host.coalesce_s = pick((0.0, 0.05, 0.4))
    for step in range(250):
        if step % 25 == 0:
            deaf = pick(hosts)
            deaf.reads = not deaf.reads
        host = pick(hosts)
        payload = update(generator)
        try:
            publish(simulator, host, payload, step)
            sent[host.endpoint.node_id].append(payload)
        except WouldBlock:
            simulator.run_for(0.1)
        if generator.random() < 0.03:
            host.endpoint.own.sealer.reframe(*pick(((1_384, 64), (1_384, 1), (1_184, 2))))
            host.endpoint.recut()
        if generator.random() < 0.05:
            host.endpoint.rotate_key(simulator.now_s)
        simulator.run_for(pick((0.0, 0.01, 0.05)))
        assert host.endpoint.log.used_bytes <= LIMITS.send_log_bytes
    for host in hosts:
        host.reads = True
    simulator.run_until(
        lambda: all(ticket.is_done for host in hosts for ticket in host.tickets), 60.0
    )
    simulator.run_for(1.0)  # what is acknowledged may still have to be read
    for host in hosts:
        assert host.lost == []
        for node_id, payloads in sent.items():
            if node_id != host.endpoint.node_id:
                got = [(tag, data) for peer, tag, data in host.received if peer.id == node_id]
                assert (sum_of(data for _, data in got) == sum_of(payloads)).all()
                assert [tag for tag, _ in got] == sorted({tag for tag, _ in got})


def deaf_pair(seed: int = 1) -> tuple[Simulator, Host, Host]:
    """Two hosts, the second of which has stopped reading, so that messages wait for it."""
    simulator = Simulator(seed)
    one, two = mesh(simulator, 2, SMALL)
    two.reads = False
    return simulator, one, two


def fill(simulator: Simulator, host: Host, count: int) -> list[bytes]:
    generator = random.Random(count)
    sent = [generator.randbytes(50_000) for _ in range(count)]
    for tag, payload in enumerate(sent):
        publish(simulator, host, payload, tag)
    return sent


def hear_all(simulator: Simulator, one: Host, two: Host) -> None:
    two.reads = True
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 10.0)
    simulator.run_for(1.0)  # what is acknowledged may still have to be read


@pytest.mark.parametrize(
    ("hook", "complaint"),
    [
        (lambda *_: [(1, b"x" * 3_000_000)], "fewer are required"),
        (lambda _, backlog: [(1, b"")] * (len(backlog) + 1), "not more are allowed"),
        (lambda *_: [(-1, b"")], "does not fit 64 bits"),
        (lambda *_: [(1, bytes(SMALL.message_bytes_max + 1))], "is larger than 262144"),
        (lambda *_: [(1, "text")], "coalesce failed"),
        (lambda *_: 1 / 0, "coalesce failed"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_numbers_and_changes_nothing(
    hook: object, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    simulator, one, two = deaf_pair()
    one.coalesce = hook  # type: ignore[assignment]
    sent = fill(simulator, one, 60)
    with caplog.at_level(logging.WARNING):
        simulator.run_for(3.0)
    assert complaint in caplog.text
    hear_all(simulator, one, two)
    assert two.payloads == sent


def test_the_same_messages_again_change_nothing() -> None:
    simulator, one, two = deaf_pair()
    asked: list[int] = []

    def same(_: Peer, backlog: Sequence[Backlogged]) -> Iterable[tuple[int, object]]:
        asked.append(len(backlog))
        return backlog

    one.coalesce = same
    sent = fill(simulator, one, 60)
    simulator.run_for(3.0)
    assert asked
    hear_all(simulator, one, two)
    assert two.payloads == sent
    assert one.endpoint.stats().coalesced_messages == 0


def test_nothing_at_all_may_be_sent_instead() -> None:
    simulator, one, two = deaf_pair()
    one.coalesce = lambda *_: []
    sent = fill(simulator, one, 60)
    simulator.run_for(3.0)
    one.endpoint.recut()  # there is no record that the last tickets could follow
    hear_all(simulator, one, two)
    assert 0 < len(two.received) < 60
    assert two.payloads == sent[: len(two.received)]
    assert all(ticket.delivered and not ticket.failed for ticket in one.tickets)


def test_the_tickets_fail_with_their_substitutes() -> None:
    simulator, one, two = deaf_pair()
    one.coalesce = lambda _, backlog: [(backlog[-1].tag, b"less")]
    fill(simulator, one, 60)
    simulator.run_for(3.0)
    assert one.endpoint.stats().coalesced_messages > 20
    simulator.crash(two)
    simulator.run_until(lambda: bool(one.lost), 30.0)
    assert all(ticket.is_done for ticket in one.tickets)
    assert list(one.lost[0].undelivered) == [ticket for ticket in one.tickets if ticket.failed]


def test_a_hook_that_never_returns_holds_nothing_up_for_ever() -> None:
    simulator, one, two = deaf_pair()
    one.coalesce_s = 1e6
    sent = fill(simulator, one, 60)
    simulator.run_for(3.0)
    two.reads = True
    simulator.run_for(10.0)
    assert len(two.received) < 60
    simulator.run_until(lambda: len(two.received) == 60, 30.0)
    assert two.payloads == sent


# ---- on real nodes ----------------------------------------------------------------------------------------------


def test_coalesce_and_its_hook_go_together() -> None:
    with pytest.raises(ValueError, match="go together"):
        Node("127.0.0.1:0", secret=SECRET, on_lag="coalesce")
    with pytest.raises(ValueError, match="go together"):
        Node("127.0.0.1:0", secret=SECRET, on_lag="block", coalesce=total)


def test_a_multicast_group_is_refused_because_a_slow_peer_hears_it() -> None:
    with pytest.raises(ValueError, match="does not go with multicast"):
        Simulator(1).add("one", on_lag="coalesce", multicast=("239.1.2.3", 40_124))


def test_a_node_that_reads_nothing_gets_the_sum_from_a_real_node() -> None:
    limits = Limits(
        message_bytes_max=MEGABYTE,
        send_log_bytes=4 * MEGABYTE,
        receive_bytes=2 * MEGABYTE,
        window_bytes=MEGABYTE // 4,
        lag_s=0.2,
    )
    threads: set[str] = set()
    seen: list[int] = []

    def hook(peer: Peer, backlog: Sequence[Backlogged]) -> Iterable[tuple[int, object]]:
        threads.add(threading.current_thread().name)
        seen.append(len(one.peers))  # the node can be used from the hook
        assert peer == two.peer
        return total(peer, backlog)

    generator = random.Random(3)
    sent = [update(generator) for _ in range(3_000)]
    with (
        Node("127.0.0.1:0", secret=SECRET, limits=limits, on_lag="coalesce", coalesce=hook) as one,
        Node("127.0.0.1:0", [one.address], secret=SECRET, limits=limits) as two,
    ):
        one.wait_for_peers(1, timeout_s=10.0)
        end_s = time.monotonic() + 60.0
        tickets = []
        for tag, payload in enumerate(sent):
            while not one.has_room(len(payload)):
                assert time.monotonic() < end_s
                time.sleep(0.01)
            tickets.append(one.publish(payload, tag))
        got = two.receive(timeout_s=0.0)
        while not all(ticket.is_done for ticket in tickets):
            assert time.monotonic() < end_s
            got += two.receive(timeout_s=0.05)
        got += two.receive(timeout_s=0.0)
        assert (sum_of(message.payload for message in got) == sum_of(sent)).all()
        assert len(got) < len(sent)
        assert threads == {"gradwire-coalesce"}
        assert set(seen) == {1}
