"""Nodes on real loopback sockets: the public promises, the threads, the fall-backs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gradwire.cli.run import free_port
from gradwire.errors import Closed, TransportError
from gradwire.transport import Limits, Node, Peer, PeerJoined, PeerLost, Received, records

from .ruled_socket import RuledSocket

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


@pytest.fixture
def quiet_pair() -> Iterator[tuple[Node, Node]]:
    """Two nodes whose heartbeats are so rare that they help no test."""
    one, two = connected(2, limits=Limits(heartbeat_s=100.0, down_s=1_000.0))
    yield one, two
    one.close(timeout_s=1.0)
    two.close(timeout_s=1.0)


def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, "it did not happen"
        threading.Event().wait(0.002)


def test_messages_of_all_sizes_arrive_complete_and_in_order(pair: tuple[Node, Node]) -> None:
    one, two = pair
    generator = random.Random(1)
    sent = [generator.randbytes(size) for size in (0, 1, 1_144, 1_145, 61_528, 61_529, 3_000_000)]
    tickets = [one.publish(payload, tag) for tag, payload in enumerate(sent)]
    got = collect(two, len(sent))
    assert [bytes(message.payload) for message in got] == sent
    assert [message.tag for message in got] == list(range(len(sent)))
    assert {message.peer for message in got} == {one.peer}
    assert one.drain(timeout_s=5.0)
    assert all(ticket.delivered == {two.peer} for ticket in tickets)


def test_every_node_receives_from_every_other() -> None:
    nodes = connected(4)
    for node in nodes:
        node.publish(node.address.encode(), tag=1)
    for node in nodes:
        received = {bytes(message.payload).decode() for message in collect(node, 3)}
        assert received == {other.address for other in nodes} - {node.address}
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


def test_a_tag_or_a_peer_of_the_wrong_kind_is_refused(pair: tuple[Node, Node]) -> None:
    with pytest.raises(TypeError, match="integer"):
        pair[0].publish(b"", tag=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one of node\.peers"):
        pair[0].publish(b"", to=pair[1].address)  # type: ignore[arg-type]
    assert pair[0].publish(b"", tag=np.uint64(2**64 - 1)).tag == 2**64 - 1  # type: ignore[arg-type]


def test_receive_returns_nothing_after_its_timeout(pair: tuple[Node, Node]) -> None:
    started_s = time.monotonic()
    assert pair[0].receive(timeout_s=0.05) == []
    assert time.monotonic() - started_s > 0.04


def test_a_message_wakes_a_waiting_receiver(quiet_pair: tuple[Node, Node]) -> None:
    one, two = quiet_pair
    for _ in range(10):
        timer = threading.Timer(0.005, one.publish, args=(b"x",))
        timer.start()
        started_s = time.monotonic()
        assert len(two.receive(timeout_s=30.0)) == 1
        assert time.monotonic() - started_s < 10.0
        timer.join()


def test_messages_arrive_and_are_acknowledged_while_the_receiver_computes(
    pair: tuple[Node, Node],
) -> None:
    one, two = pair
    ticket = one.publish(os.urandom(5_000_000))
    total = 0
    end_s = time.monotonic() + 10.0
    while not ticket.is_done and time.monotonic() < end_s:
        total += sum(range(1_000))  # the main thread never releases the interpreter by itself
    assert ticket.delivered == {two.peer}


def test_received_messages_are_acknowledged_although_the_receiver_calls_nothing_more(
    quiet_pair: tuple[Node, Node],
) -> None:
    one, two = quiet_pair
    for _ in range(5):
        ticket = one.publish(b"small")
        collect(two, 1)
        until(lambda ticket=ticket: ticket.is_done)


def test_the_thread_of_an_idle_node_sleeps(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, _ = pair
    waits: list[float] = []
    wait = one._driver.wait

    def counting(*arguments: Any) -> None:
        waits.append(time.monotonic())
        wait(*arguments)

    monkeypatch.setattr(one._driver, "wait", counting)
    started_s = time.monotonic()
    assert one.receive(timeout_s=0.5) == []
    elapsed_s = time.monotonic() - started_s
    assert len(waits) < 40 * elapsed_s  # heartbeats and their answers, five times a second each way


def test_an_interrupted_call_leaves_the_node_usable(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, two = pair

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(two._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.receive(timeout_s=5.0)
    one.publish(b"x")
    assert one.drain(timeout_s=5.0)
    assert len(collect(two, 1)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only 127.0.0.1 is there")
def test_a_node_with_several_addresses_may_answer_from_another_one() -> None:
    with Node(secret=SECRET) as one:
        port = one.address.rpartition(":")[2]
        # Where Debian's /etc/hosts has the machine's name; answers come from 127.0.0.1.
        with Node(peers=[f"127.0.1.1:{port}"], secret=SECRET) as two:
            for node in (one, two):
                node.wait_for_peers(1, timeout_s=10.0)
            for node, other in ((one, two), (two, one)):
                node.publish(bytes(500_000))
                assert len(collect(other, 1)[0].payload) == 500_000
            assert two.peers == (one.peer,)


def test_an_interrupted_publish_sends_nothing_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Node, Node]
) -> None:
    one, two = pair
    seal = records.Sealer._seal
    sealed = []

    def interrupted(sealer: Any, *arguments: Any) -> Any:
        sealed.append(arguments)
        if len(sealed) == 5:
            raise KeyboardInterrupt
        return seal(sealer, *arguments)

    monkeypatch.setattr(records.Sealer, "_seal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.publish(bytes(1_000_000), tag=1)
    assert one.drain(timeout_s=5.0)
    one.publish(bytes(500_000), tag=2)
    assert [(tag, len(payload)) for _, tag, payload in collect(two, 1)] == [(2, 500_000)]
    assert one.drain(timeout_s=5.0)
    stats = one.stats()
    assert (stats.messages_sent, stats.send_log_bytes) == (1, 0)
    assert not any(isinstance(event, PeerLost) for event in (*one.events(), *two.events()))


def test_events_name_the_peers_that_joined_and_left() -> None:
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


def test_wait_for_peers_reports_how_many_are_missing() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        pytest.raises(TimeoutError, match="0 of 2 peers"),
    ):
        node.wait_for_peers(2, timeout_s=0.05)


def test_a_node_that_is_to_be_found_says_that_no_datagram_has_come() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        pytest.raises(TimeoutError, match=r"no datagram has come: .* router let UDP \(IPv4\)"),
    ):
        node.wait_for_peers(1, timeout_s=0.05)


def test_wait_for_peers_ends_when_another_condition_is_met(pair: tuple[Node, Node]) -> None:
    one, two = pair
    two.publish(b"x")
    received: list[Received] = []

    def has_received() -> bool:  # may use the node
        received.extend(one.receive())
        return bool(received)

    assert one.wait_for_peers(2, timeout_s=10.0, until=has_received) == (two.peer,)
    assert [bytes(message.payload) for message in received] == [b"x"]


def test_nothing_works_after_close_and_closing_twice_is_fine() -> None:
    node = Node("127.0.0.1:0", secret=SECRET)
    assert node.close() == []
    assert node.close() == []
    for call in (lambda: node.publish(b""), node.receive, lambda: node.wait_for_peers(1, 0.1)):
        with pytest.raises(Closed):
            call()


def test_an_interrupt_that_comes_with_the_lock_gives_the_lock_back() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with Node("127.0.0.1:0", secret=SECRET) as node:
            held, interrupted = threading.Event(), threading.Event()

            def hold() -> None:
                with node._lock:
                    held.set()
                    while not interrupted.wait(0.0):  # keeps the interpreter busy
                        pass
                    signal.raise_signal(signal.SIGINT)

            for _ in range(20):
                held.clear()
                interrupted.clear()
                thread = threading.Thread(target=hold)
                thread.start()
                held.wait()
                threading.Timer(0.005, interrupted.set).start()
                with pytest.raises(KeyboardInterrupt):
                    for _ in iter(node.stats, None):
                        pass
                thread.join()
                assert not node._lock._is_owned()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_signal_handler_that_interrupts_the_node_is_refused_and_does_not_hang() -> None:
    with Node("127.0.0.1:0", secret=SECRET) as node:
        for call in (node.close, node.stats, lambda: node.publish(b"")):
            with node._lock, pytest.raises(RuntimeError, match="signal's handler"):
                call()
        with node._close_lock, pytest.raises(RuntimeError, match="signal's handler"):
            node.close()
        node.publish(b"")


def test_close_wakes_another_thread_that_waits_in_receive() -> None:
    node = Node("127.0.0.1:0", secret=SECRET)
    outcome: list[object] = []
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        try:
            outcome.append(node.receive(timeout_s=30.0))
        except Closed as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait(10.0)
    node.close()
    thread.join(timeout=10.0)
    assert not thread.is_alive()
    assert isinstance(outcome[0], Closed)


def test_close_reports_the_messages_that_a_dead_peer_did_not_get() -> None:
    one, two = connected(2)
    RuledSocket(one._driver, lambda *_: errno.ENETUNREACH)  # from now on nothing arrives
    ticket = one.publish(b"lost")
    undelivered = one.close(timeout_s=0.2)
    assert undelivered == [(two.peer, ticket)]
    assert ticket.failed == {two.peer}
    two.close(timeout_s=0.0)


def test_a_node_that_closes_without_waiting_says_so_to_its_peers(
    quiet_pair: tuple[Node, Node],
) -> None:
    one, two = quiet_pair
    time.sleep(0.2)  # the last of the handshake
    until(lambda: one._sleeps_until_s > time.monotonic() + 0.5)  # the I/O thread has nothing to do
    one.close(timeout_s=0.0)
    until(lambda: not two.peers)


def test_close_delivers_queued_messages() -> None:
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


def test_stats_count_payload_and_overhead(pair: tuple[Node, Node]) -> None:
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
    assert sender.peers[0].srtt_s >= sender.peers[0].least_rtt_s > 0
    assert [path.peer for path in sender.peers] == [two.peer]


def test_stats_show_the_socket_as_the_system_provides_it(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.publish(bytes(1_000_000))
    collect(two, 1)
    stats = two.stats()
    assert stats.socket.receive_buffer_bytes > 0
    assert stats.socket.send_buffer_bytes > 0
    assert stats.socket.errors == 0
    if sys.platform == "linux":
        assert stats.socket.has_gso
        assert stats.socket.has_gro
    two.close()
    assert two.stats().socket.receive_buffer_bytes == 0


@pytest.mark.parametrize("datagram_bytes", [272, 1_472, 8_972])
def test_datagrams_of_another_size_carry_messages_as_well(datagram_bytes: int) -> None:
    one, two = connected(2, limits=Limits(datagram_bytes=datagram_bytes))
    payload = os.urandom(300_000)
    one.publish(payload)
    assert bytes(collect(two, 1)[0].payload) == payload
    assert one.stats().datagrams_sent >= 300_000 // datagram_bytes
    one.close()
    two.close()


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


def test_a_lost_datagram_is_sent_again_by_the_thread(quiet_pair: tuple[Node, Node]) -> None:
    one, _ = quiet_pair
    for _ in range(5):
        one.publish(b"x")
        assert one.drain(timeout_s=5.0)
    ruled = RuledSocket(one._driver, lambda call, *_: errno.ENOBUFS if call == 1 else 0)
    ticket = one.publish(b"y")
    until(lambda: ticket.is_done)
    assert ruled.refused == 1
    assert ticket.delivered


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.EPERM, errno.ENETUNREACH])
def test_bursts_that_the_system_refuses_are_sent_again(pair: tuple[Node, Node], error: int) -> None:
    one, two = pair
    ruled = RuledSocket(one._driver, lambda call, *_: 0 if call % 7 else error)
    payload = os.urandom(2_000_000)
    one.publish(payload)
    assert bytes(collect(two, 1, timeout_s=30.0)[0].payload) == payload
    assert one.drain(timeout_s=10.0)
    assert ruled.refused > 0
    assert one.stats().socket.errors >= ruled.refused


def refuse(node: Node, refusal: int | None, full_every: int) -> None:
    """Refuse segmentation, or report a full buffer now and then."""

    def rule(call: int, _: int, has_several: bool) -> int:
        if full_every and call % full_every == 0:
            return errno.EAGAIN
        return refusal if has_several and refusal is not None else 0

    RuledSocket(node._driver, rule)


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outsider:
        for index in range(2_000):
            first = bytes([generator.choice((0x31, 0x32, 0x33, 0x34, 0x35, 0x11, 0, 255))])
            outsider.sendto(
                first + generator.randbytes(generator.choice((0, 15, 40, 255, 1_399))),
                (host, int(port)),
            )
            if index % 100 == 0:
                one.publish(b"the service continues", index)
                assert collect(two, 1)[0].tag == index
    stats = two.stats()
    assert stats.malformed_datagrams + stats.stray_datagrams + stats.unauthenticated_datagrams > 500
    assert two.peers == (one.peer,)


def test_a_port_in_use_is_named_in_the_error() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        pytest.raises(
            OSError, match=node.address.replace(".", r"\.") + ".*end the program that has it"
        ),
    ):
        Node(node.address, secret=SECRET)


def test_the_port_is_free_after_an_error() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match="cannot be resolved") as raised:  # and its frames are kept
        Node(address, ["no-such-name.invalid:40123"], secret=SECRET)
    with Node(address, secret=SECRET) as node:
        assert node.address == address
    assert raised.tb is not None


def test_the_own_address_among_the_peers_is_ignored() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Node(address, [address, "127.0.0.1:9"], secret=SECRET) as node:
        assert node.seeds == {"127.0.0.1:9"}


def test_the_advertised_address_is_the_node_s_own() -> None:
    with Node("127.0.0.1:0", secret=SECRET, advertise="203.0.113.5:40123") as node:
        assert node.address == node.peer.address == "203.0.113.5:40123"


def test_a_wildcard_is_no_address_to_advertise() -> None:
    with pytest.raises(ValueError, match=r"'0\.0\.0\.0:40123': advertise an address"):
        Node("127.0.0.1:0", secret=SECRET, advertise="0.0.0.0:40123")


def test_an_advertised_name_is_resolved_for_the_others() -> None:
    with Node("127.0.0.1:0", secret=SECRET, advertise="localhost:40123") as node:
        assert node.address == "127.0.0.1:40123"


def test_waiting_for_ever_is_allowed() -> None:
    one, two = connected(2)
    threading.Timer(0.1, lambda: one.publish(b"late")).start()
    assert [bytes(each.payload) for each in two.receive(float("inf"))] == [b"late"]
    assert one.drain(float("inf"))
    one.close(float("inf"))
    two.close()


@pytest.mark.parametrize(
    "options",
    [
        {"bind": "nonsense"},
        {"bind": "::1:5"},
        {"peers": ["127.0.0.1"]},
        {"network_mask": "300.0.0.0/8", "bind": "0.0.0.0:0"},
        {"network_mask": "203.0.113.0/24", "bind": "0.0.0.0:0"},
        {"advertise": "somewhere"},
        {"advertise": "no-such-name.invalid:40123"},
        {"advertise": "239.1.1.7:40123"},
        {"peers": ["two..dots:40123"]},
        {"peers": ["127.0.0.1:0"]},
        {"on_lag": "hope"},
        {"on_lag": "coalesce"},
        {"node_id": -1},
        {"secret": b"weak"},
        {"peers": "127.0.0.1:40123"},
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".{20}"):
        Node(**{"bind": "127.0.0.1:0", "secret": SECRET, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"node_id": 1.5},
        {"limits": {}},
        {"limits": 5},
        {"peers": [("127.0.0.1", 40123)]},
        {"advertise": 40123},
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_at_once(options: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Node("127.0.0.1:0", secret=SECRET, **options)  # type: ignore[arg-type]


def test_an_init_made_with_another_secret_is_counted_as_refused() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as one,
        Node("127.0.0.1:0", [one.address], secret=SECRET[::-1]),
    ):
        until(lambda: one.stats().handshakes_refused > 0)


def test_a_message_taken_before_the_receiver_closes_counts_as_delivered() -> None:
    with Node("127.0.0.1:0", secret=SECRET) as one:
        two = Node("127.0.0.1:0", [one.address], secret=SECRET)
        one.wait_for_peers(1, 5.0)
        two.wait_for_peers(1, 5.0)
        ticket = one.publish(b"taken")
        assert len(two.receive(5.0)) == 1
        two.close()
        until(lambda: ticket.is_done)
        assert ticket.delivered == {two.peer}
        until(lambda: not one.peers)
        (lost,) = [event for event in one.events() if isinstance(event, PeerLost)]
        assert (lost.reason, lost.undelivered) == ("left", ())


def test_the_secret_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET.hex())
    with Node("127.0.0.1:0") as one, Node("127.0.0.1:0", [one.address], secret=SECRET) as two:
        assert two.wait_for_peers(1, timeout_s=5.0) == (one.peer,)


def test_a_forked_child_must_make_its_own_node() -> None:
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


def test_a_child_that_was_forked_while_a_thread_used_the_node_does_not_hang() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    with Node("127.0.0.1:0", secret=SECRET) as node:
        with node._lock:  # as the I/O thread does, which the child has not
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(5)
                shown = repr(node)
                try:
                    node.drop_late(())
                except TransportError:
                    os._exit(0 if node.address in shown else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_does_not_keep_the_port() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    node = Node("127.0.0.1:0", secret=SECRET)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        theirs.send(b"forked")
        theirs.recv(1)
        os._exit(0)
    assert ours.recv(10) == b"forked"
    node.close()
    try:
        Node(node.address, secret=SECRET).close()
    finally:
        ours.send(b"x")
        os.waitpid(child, 0)
        ours.close()
        theirs.close()


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
    limits = Limits(heartbeat_s=0.05, down_s=1.0)
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
