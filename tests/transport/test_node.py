"""Nodes on real loopback sockets: the public promises, the threads, the fall-backs."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradwire.errors import Closed, TransportError, WouldBlock
from gradwire.transport import Limits, Node, Peer, PeerJoined, PeerLost, Received
from gradwire.transport.watchers import Watchers

from .ruled_sender import RuledSocket

SECRET = bytes(range(32))


def collect(node: Node, count: int, timeout_s: float = 10.0) -> list[Received]:
    end_s = time.monotonic() + timeout_s
    found: list[Received] = []
    while len(found) < count:
        assert time.monotonic() < end_s, f"{len(found)} of {count} messages came"
        found += node.receive(timeout_s=0.2)
    return found


def connected(count: int, **options: object) -> list[Node]:
    nodes: list[Node] = []
    for _ in range(count):
        peers = [node.address for node in nodes]
        nodes.append(Node("127.0.0.1:0", peers, secret=SECRET, **options))  # type: ignore[arg-type]
    for node in nodes:
        node.wait_for_peers(count - 1, timeout_s=10.0)
    return nodes


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    one, two = connected(2)
    yield one, two
    one.close(timeout_s=1.0)
    two.close(timeout_s=1.0)


def test_messages_of_all_sizes_arrive_whole_and_in_order(pair: tuple[Node, Node]) -> None:
    one, two = pair
    generator = random.Random(1)
    sent = [
        generator.randbytes(size)
        for size in (0, 1, 1_344, 1_345, 62_240, 62_241, 249_080, 3_000_000)
    ]
    tickets = [one.publish(payload, tag) for tag, payload in enumerate(sent)]
    got = collect(two, len(sent))
    assert [bytes(message.payload) for message in got] == sent
    assert [message.tag for message in got] == list(range(len(sent)))
    assert {message.peer for message in got} == {one.peer}
    assert one.drain(timeout_s=5.0)
    assert all(ticket.delivered == {two.peer} for ticket in tickets)


def test_everybody_hears_everybody() -> None:
    nodes = connected(4)
    for node in nodes:
        node.publish(node.address.encode(), tag=1)
    for node in nodes:
        heard = {bytes(message.payload).decode() for message in collect(node, 3)}
        assert heard == {other.address for other in nodes} - {node.address}
    for node in nodes:
        assert node.close() == []


def test_the_buffer_may_be_changed_as_soon_as_publish_returns(pair: tuple[Node, Node]) -> None:
    one, two = pair
    buffer = np.arange(100_000, dtype=np.float32)
    one.publish(buffer)
    buffer[:] = -1
    assert np.array_equal(
        np.frombuffer(collect(two, 1)[0].payload, dtype=np.float32),
        np.arange(100_000, dtype=np.float32),
    )


def test_a_received_payload_is_read_only_and_outlives_later_traffic(
    pair: tuple[Node, Node],
) -> None:
    one, two = pair
    one.publish(b"first" * 1_000)
    kept = collect(two, 1)[0].payload
    for _ in range(20):
        one.publish(os.urandom(70_000))
    collect(two, 20)
    assert kept.readonly
    assert bytes(kept) == b"first" * 1_000


def test_a_buffer_that_is_not_contiguous_is_refused(pair: tuple[Node, Node]) -> None:
    with pytest.raises(TypeError, match="ascontiguousarray"):
        pair[0].publish(np.zeros((10, 10))[:, ::2])


@pytest.mark.parametrize("tag", [-1, 2**64])
def test_a_tag_that_does_not_fit_is_refused(pair: tuple[Node, Node], tag: int) -> None:
    with pytest.raises(ValueError, match="tag"):
        pair[0].publish(b"", tag)


def test_a_tag_or_a_peer_that_is_none_is_refused(pair: tuple[Node, Node]) -> None:
    with pytest.raises(TypeError, match="integer"):
        pair[0].publish(b"", tag=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one of node\.peers"):
        pair[0].publish(b"", to=pair[1].address)  # type: ignore[arg-type]
    assert pair[0].publish(b"", tag=np.uint64(2**64 - 1)).tag == 2**64 - 1  # type: ignore[arg-type]


def test_receive_returns_nothing_after_its_timeout(pair: tuple[Node, Node]) -> None:
    started_s = time.monotonic()
    assert pair[0].receive(timeout_s=0.05) == []
    assert 0.04 < time.monotonic() - started_s < 1.0


def test_a_message_wakes_a_waiting_receiver_promptly(pair: tuple[Node, Node]) -> None:
    one, two = pair
    waits = []
    for _ in range(50):
        timer = threading.Timer(0.005, one.publish, args=(time.monotonic().hex().encode(),))
        timer.start()
        two.receive(timeout_s=2.0)
        timer.join()
        started_s = time.monotonic()
        one.publish(b"x")
        collect(two, 1)
        waits.append(time.monotonic() - started_s)
    assert sorted(waits)[len(waits) // 2] < 0.01


def test_messages_arrive_and_are_acknowledged_while_the_receiver_computes(
    pair: tuple[Node, Node],
) -> None:
    one, two = pair
    ticket = one.publish(os.urandom(5_000_000))
    total = 0
    end_s = time.monotonic() + 10.0
    while not ticket.is_done and time.monotonic() < end_s:
        total += sum(range(1_000))  # the main thread never lets go of the interpreter by itself
    assert ticket.delivered == {two.peer}


def test_what_was_received_is_acknowledged_although_the_receiver_calls_nothing_more(
    pair: tuple[Node, Node],
) -> None:
    one, two = pair
    for _ in range(5):
        time.sleep(0.02)  # the I/O thread of the receiver goes to sleep for long
        ticket = one.publish(b"small")
        collect(two, 1)
        started_s = time.monotonic()
        while not ticket.is_done and time.monotonic() - started_s < 1.0:
            time.sleep(0.001)
        assert time.monotonic() - started_s < 0.1


def test_coroutines_wait_for_messages_and_for_room() -> None:
    limits = Limits(
        message_bytes_max=1 << 20,
        send_log_bytes=2 << 20,
        receive_bytes=2 << 20,
        window_bytes=1 << 20,
    )
    one, two = connected(2, limits=limits)

    async def send() -> int:
        refused = 0
        for tag in range(60):
            refused += not one.has_room(1 << 18)
            await one.apublish(bytes([tag]) * (1 << 18), tag)
        return refused

    async def take() -> list[int]:
        tags: list[int] = []
        while len(tags) < 60:
            tags += [message.tag for message in await two.areceive(timeout_s=5.0)]
            await asyncio.sleep(0.002)
        return tags

    async def both() -> tuple[int, list[int]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        result = await asyncio.gather(send(), take())
        ticker.cancel()
        assert ticks > 10, "the event loop must not be blocked"
        assert await two.areceive(timeout_s=0.01) == []
        return result[0], result[1]

    refused, tags = asyncio.run(both())
    assert tags == list(range(60))
    assert refused > 0
    one.close()
    two.close()


def test_a_coroutine_that_waits_takes_no_processor_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    notify = Watchers.notify

    def count(watchers: Watchers) -> None:
        nonlocal looks
        looks += 1
        notify(watchers)

    monkeypatch.setattr(Watchers, "notify", count)
    limits = Limits(message_bytes_max=1 << 20, send_log_bytes=8 << 20, receive_bytes=4 << 20)
    one = Node("127.0.0.1:0", secret=SECRET, limits=limits)
    two = Node("127.0.0.1:0", [one.address], secret=SECRET, limits=limits)
    one.wait_for_peers(1, 5.0)
    for _ in range(30):  # the other end takes none: both its budget and the log are full then
        try:
            one.publish(bytes(1 << 20))
        except WouldBlock:
            time.sleep(0.02)

    async def wait() -> None:
        nonlocal looks
        waiting = [asyncio.create_task(one.apublish(bytes(1 << 20))) for _ in range(3)]
        waiting.append(asyncio.create_task(one.areceive()))
        await asyncio.sleep(0.2)
        looks = 0
        await asyncio.sleep(1.0)
        for task in waiting:
            task.cancel()
        done, late = await asyncio.wait(waiting, timeout=5.0)
        assert not late
        assert all(task.cancelled() for task in done)

    asyncio.run(wait())
    assert looks < 300  # heartbeats, probes and four rechecks of each: it was 15,000
    for node in (one, two):
        node.close(timeout_s=0.0)


def test_events_tell_who_joined_and_who_left() -> None:
    one, two = connected(2)
    assert one.events() == [PeerJoined(two.peer)]
    two.close()
    end_s = time.monotonic() + 5.0
    events = []
    while not events and time.monotonic() < end_s:
        one.receive(timeout_s=0.02)
        events = one.events()
    assert events == [PeerLost(two.peer, "left", ())]
    assert one.peers == ()
    one.close()


def test_wait_for_peers_says_how_many_were_missing() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        pytest.raises(TimeoutError, match="0 of 2 peers"),
    ):
        node.wait_for_peers(2, timeout_s=0.05)


def test_nothing_works_after_close_and_closing_twice_is_fine() -> None:
    node = Node("127.0.0.1:0", secret=SECRET)
    assert node.close() == []
    assert node.close() == []
    for call in (lambda: node.publish(b""), node.receive, lambda: node.wait_for_peers(1, 0.1)):
        with pytest.raises(Closed):
            call()


def test_close_wakes_another_thread_that_waits_in_receive() -> None:
    node = Node("127.0.0.1:0", secret=SECRET)
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(node.receive(timeout_s=30.0))
        except Closed as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    node.close()
    thread.join(timeout=5.0)
    assert not thread.is_alive()
    assert isinstance(outcome[0], Closed)


def test_close_reports_what_a_dead_peer_did_not_get() -> None:
    one, two = connected(2)
    two._driver._socket.close()  # as if the process had been killed
    ticket = one.publish(b"lost")
    undelivered = one.close(timeout_s=0.2)
    assert undelivered == [(two.peer, ticket)]
    assert ticket.failed == {two.peer}
    two._is_closed = True
    two._thread_waker.ring()


def test_close_delivers_what_is_queued() -> None:
    one, two = connected(2)
    payload = os.urandom(10_000_000)
    one.publish(payload)
    assert one.close(timeout_s=20.0) == []
    assert bytes(collect(two, 1)[0].payload) == payload
    two.close()


def test_many_threads_may_publish_and_receive_at_once(pair: tuple[Node, Node]) -> None:
    one, two = pair
    threads = [
        threading.Thread(
            target=lambda base=base: [one.publish(os.urandom(3_000), base + n) for n in range(50)]
        )
        for base in (0, 1_000, 2_000)
    ]
    got: list[Received] = []
    lock = threading.Lock()

    def read() -> None:
        while True:
            found = two.receive(timeout_s=0.05)
            with lock:
                got.extend(found)
                if len(got) >= 150:
                    return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads + readers:
        thread.start()
    for thread in threads + readers:
        thread.join(timeout=20.0)
    assert sorted(message.tag for message in got) == sorted(
        base + n for base in (0, 1_000, 2_000) for n in range(50)
    )


def test_stats_count_payload_and_everything_around_it(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.publish(bytes(10_000))
    collect(two, 1)
    one.drain(timeout_s=5.0)
    sender, receiver = one.stats(), two.stats()
    assert sender.payload_bytes_sent == receiver.payload_bytes_received == 10_000
    assert sender.messages_sent == receiver.messages_received == 1
    assert 10_000 < sender.udp_bytes_sent < 13_000
    assert 0 < receiver.control_bytes_sent <= receiver.udp_bytes_sent
    assert sender.datagrams_sent >= 8
    assert sender.srtt_s > 0
    assert [path.peer for path in sender.peers] == [two.peer]


def test_stats_tell_what_the_system_gives_the_socket(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.publish(bytes(1_000_000))
    collect(two, 1)
    stats = two.stats()
    assert stats.socket.receive_buffer_bytes > 0
    assert stats.socket.send_buffer_bytes > 0
    assert stats.socket.errors == 0
    assert 0 < stats.socket.receive_calls <= stats.datagrams_received
    if sys.platform == "linux":
        assert stats.socket.has_gso
        assert stats.socket.has_gro
        assert stats.socket.receive_calls < stats.datagrams_received / 4
    two.close()
    assert two.stats().socket.receive_buffer_bytes == 0


def test_without_offload_everything_still_works() -> None:
    one, two = connected(2, offload=False)
    payload = os.urandom(500_000)
    one.publish(payload)
    assert bytes(collect(two, 1)[0].payload) == payload
    socket_stats = one.stats().socket
    assert not socket_stats.has_gso
    assert not socket_stats.has_gro
    one.close()
    two.close()


def test_who_publishes_a_stream_looks_at_the_socket_now_and_then_and_tells_who_waits(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, _ = pair
    seen: list[str] = []
    with one._lock:
        began_s = one._polled_at_s = time.monotonic()
        one._leased_until_s = began_s
        monkeypatch.setattr(one._driver, "receive", lambda _: seen.append("look"))
        monkeypatch.setattr(one._caller_waker, "ring", lambda: seen.append("tell"))
        one._callers_waiting += 1  # a thread in `receive`
        # Looks at 0.6 and 1.2 ms; that at 9 ms is of somebody who has computed meanwhile.
        for after_s, looks, is_leased in [
            (0.0004, 0, False),
            (0.0006, 1, True),
            (0.0009, 1, True),
            (0.0012, 2, True),
            (0.009, 3, False),
        ]:
            monkeypatch.setattr(
                "gradwire.transport.node.now_s", lambda after_s=after_s: began_s + after_s
            )
            one._look_while_publishing()
            assert seen == ["look", "tell"] * looks
            assert (one._leased_until_s > began_s + after_s) == is_leased
        one._callers_waiting -= 1
        monkeypatch.undo()


def note_wakes(monkeypatch: pytest.MonkeyPatch, node: Node) -> list[float]:
    """Return a list to which the I/O thread adds each time that it goes to sleep."""
    wakes: list[float] = []
    wait = node._driver.wait

    def noting(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is node._thread:
            wakes.append(time.monotonic())
        wait(*arguments, **options)

    monkeypatch.setattr(node._driver, "wait", noting)
    return wakes


def test_the_thread_sleeps_while_a_caller_waits_and_is_there_when_he_has_gone(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, two = pair
    wakes = note_wakes(monkeypatch, two)
    two.receive(timeout_s=0.01)
    wakes.clear()
    assert two.receive(timeout_s=0.5) == []
    assert len(wakes) <= 5
    for _ in range(20):
        two.receive(timeout_s=0.002)
        ticket = one.publish(b"x")
        assert one.drain(timeout_s=1.0)  # acknowledged by the thread: nobody receives
        assert ticket.is_done
        assert len(two.receive()) == 1
        time.sleep(0.005)
    began_s = time.monotonic()
    for _ in range(20):
        one.publish(b"x")
        assert one.drain(timeout_s=1.0)
    assert time.monotonic() - began_s < 0.5


def test_the_thread_does_not_spin_while_it_cannot_get_the_lock(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, _ = pair
    wakes = note_wakes(monkeypatch, one)
    with one._lock:
        one._thread_waker.ring_at(time.monotonic())
        time.sleep(0.05)
    assert len(wakes) <= 60


def test_an_interrupted_wait_is_no_wait_any_more(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, two = pair
    wait = two._driver.wait

    def interrupted(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is not two._thread:
            raise KeyboardInterrupt
        wait(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(two._driver, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.receive(timeout_s=5.0)
    assert two._callers_waiting == 0
    one.publish(b"x")
    assert one.drain(timeout_s=2.0)  # the thread is there


def test_what_is_published_wakes_no_thread_before_a_timer_is_due(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, _ = pair
    if one._thread_waker.alarm is None:
        pytest.skip("this system has no timers to wait for like sockets")
    rings: list[float] = []
    monkeypatch.setattr(one._thread_waker, "ring", lambda: rings.append(time.monotonic()))
    for _ in range(20):
        one.publish(b"x")
        time.sleep(0.01)
    assert rings == []
    assert one.drain(timeout_s=1.0)


def test_a_lost_datagram_is_missed_in_time_though_nobody_was_woken(pair: tuple[Node, Node]) -> None:
    one, _ = pair
    for _ in range(5):
        one.publish(b"x")
        assert one.drain(timeout_s=1.0)
    lost = RuledSocket(one._driver, lambda call, *_: errno.ENOBUFS if call == 1 else 0)
    ticket = one.publish(b"y")
    end_s = time.monotonic() + 1.0
    while not ticket.is_done and time.monotonic() < end_s:
        time.sleep(0.002)
    assert lost.refused == 1
    assert ticket.is_done


def refuse(node: Node, refusal: int | None, full_every: int) -> None:
    """Let the kernel refuse segmentation, or say now and then that it is full."""

    def rule(call: int, _: int, has_several: bool) -> int:
        if full_every and call % full_every == 0:
            return errno.EAGAIN
        return refusal if has_several and refusal is not None else 0

    RuledSocket(node._driver, rule)


@pytest.mark.parametrize("refusal", [errno.EIO, errno.EINVAL, errno.EMSGSIZE])
def test_a_kernel_that_refuses_segmentation_is_noticed_once(
    refusal: int, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = connected(2)
    refuse(one, refusal, 0)
    payload = os.urandom(2_000_000)
    one.publish(payload)
    assert bytes(collect(two, 1)[0].payload) == payload
    assert [record.levelname for record in caplog.records if "GSO" in record.message] == ["WARNING"]
    one.close()
    two.close()


@pytest.mark.parametrize("refusal", [None, errno.EIO])
def test_a_full_socket_buffer_delays_and_loses_nothing(refusal: int | None) -> None:
    one, two = connected(2)
    refuse(one, refusal, 3)
    payload = os.urandom(2_000_000)
    one.publish(payload)
    assert bytes(collect(two, 1)[0].payload) == payload
    assert one.drain(timeout_s=5.0)
    assert one.stats().retransmitted_bytes < 100_000
    one.close()
    two.close()


def test_a_tiny_receive_buffer_loses_datagrams_and_no_message() -> None:
    one, two = connected(2)
    two._driver._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    payload = os.urandom(2_000_000)
    one.publish(payload)
    assert bytes(collect(two, 1, timeout_s=30.0)[0].payload) == payload
    one.close()
    two.close()


def test_random_datagrams_are_counted_and_dropped(pair: tuple[Node, Node]) -> None:
    one, two = pair
    generator = random.Random(5)
    host, port = two.address.split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for index in range(2_000):
            first = bytes([generator.choice((0x11, 0x12, 0x13, 0x14, 0x21, 0, 255))])
            stranger.sendto(
                first + generator.randbytes(generator.choice((0, 15, 40, 255, 1_399))),
                (host, int(port)),
            )
            if index % 100 == 0:
                one.publish(b"service goes on", index)
                assert collect(two, 1)[0].tag == index
    stats = two.stats()
    assert stats.malformed_datagrams + stats.stray_datagrams + stats.unauthenticated_datagrams > 500
    assert two.peers == (one.peer,)


def test_a_port_in_use_is_named_in_the_error() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        pytest.raises(OSError, match=node.address.replace(".", r"\.")),
    ):
        Node(node.address, secret=SECRET)


def test_the_own_address_among_the_peers_is_ignored() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with Node(address, [address, "127.0.0.1:9"], secret=SECRET) as node:
        assert node.seeds == {"127.0.0.1:9"}


def test_advertise_is_what_the_node_calls_itself() -> None:
    with Node("127.0.0.1:0", secret=SECRET, advertise="203.0.113.5:40123") as node:
        assert node.address == node.peer.address == "203.0.113.5:40123"


@pytest.mark.parametrize(
    "options",
    [
        {"bind": "nonsense"},
        {"bind": "::1:5"},
        {"peers": ["127.0.0.1"]},
        {"network_mask": "300.0.0.0/8", "bind": "0.0.0.0:0"},
        {"network_mask": "203.0.113.0/24", "bind": "0.0.0.0:0"},
        {"advertise": "somewhere"},
        {"on_lag": "hope"},
        {"node_id": -1},
        {"secret": b"weak"},
        {"peers": "127.0.0.1:40123"},
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".{20}"):
        Node(**{"bind": "127.0.0.1:0", "secret": SECRET, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"node_id": 1.5},
        {"limits": {}},
        {"limits": 5},
        {"on_lag": "coalesce", "coalesce": 5},
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_at_once(options: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Node("127.0.0.1:0", secret=SECRET, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["window_bytes", "lag_s", "handshakes_per_s", "rekey_records", "rekey_s"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_without_which_nothing_moves_are_refused(name: str, value: float) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{name} is|integer"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_a_knock_with_another_secret_is_counted_among_the_refused() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as one,
        Node("127.0.0.1:0", [one.address], secret=SECRET[::-1]),
    ):
        deadline_s = time.monotonic() + 10.0
        while one.stats().handshakes_refused == 0 and time.monotonic() < deadline_s:
            one.receive(0.05)
        assert one.stats().handshakes_refused > 0


def test_a_message_that_was_taken_before_a_goodbye_counts_as_delivered() -> None:
    with Node("127.0.0.1:0", secret=SECRET) as one:
        two = Node("127.0.0.1:0", [one.address], secret=SECRET)
        one.wait_for_peers(1, 5.0)
        two.wait_for_peers(1, 5.0)
        ticket = one.publish(b"taken")
        assert len(two.receive(5.0)) == 1
        two.close()
        while not ticket.is_done:
            one.receive(0.05)
        assert ticket.delivered == {two.peer}
        (lost,) = [event for event in one.events() if isinstance(event, PeerLost)]
        assert (lost.reason, lost.undelivered) == ("left", ())


def test_the_secret_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET.hex())
    with Node("127.0.0.1:0") as one, Node("127.0.0.1:0", [one.address], secret=SECRET) as two:
        assert two.wait_for_peers(1, timeout_s=5.0) == (one.peer,)


def test_a_forked_child_is_told_to_make_its_own_node() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    one, two = connected(2)
    program = multiprocessing.get_context("fork").SimpleQueue()
    child = os.fork()
    if child == 0:
        try:
            one.publish(b"from the child")
        except TransportError as error:
            program.put(str(error))
        one.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert "after a fork" in program.get()
    one.publish(b"from the parent")
    assert bytes(collect(two, 1)[0].payload) == b"from the parent"
    one.close()
    two.close()


CHILD = """
import sys
from gradwire.transport import Node
node = Node("127.0.0.1:0", [sys.argv[1]], secret=bytes(range(32)))
node.wait_for_peers(1, timeout_s=10.0)
print(node.address, flush=True)
while True:
    for peer, tag, payload in node.receive(timeout_s=1.0):
        node.publish(payload, tag, to=peer)
"""


def test_a_killed_process_is_lost_and_a_new_one_takes_its_place() -> None:
    limits = Limits(heartbeat_s=0.05, suspect_s=0.2, down_s=0.5)
    with Node("127.0.0.1:0", secret=SECRET, limits=limits) as node:
        seen: list[Peer] = []
        for _ in range(2):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, node.address], stdout=subprocess.PIPE
            )
            try:
                seen += node.wait_for_peers(1, timeout_s=20.0)
                node.publish(b"echo" * 1_000, tag=9)
                assert bytes(collect(node, 1)[0].payload) == b"echo" * 1_000
            finally:
                child.kill()
                child.communicate()
            end_s = time.monotonic() + 10.0
            while node.peers:
                assert time.monotonic() < end_s
                node.receive(timeout_s=0.05)
        reasons = [event.reason for event in node.events() if isinstance(event, PeerLost)]
        assert reasons == ["timeout", "timeout"]
        assert seen[0] != seen[1]
