"""Real nodes whose start somebody disturbs with a few datagrams, and nodes that fail inside."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

import gradwire as gw
from gradwire.transport import addressing
from gradwire.transport import node as node_module
from gradwire.transport.endpoint import Endpoint
from gradwire.transport.wire import INIT

SECRET = bytes(range(32))
FORGED = [bytes([INIT + 0x10]) + bytes(15), bytes([INIT + 0x10]) + bytes(255), bytes([INIT]) * 256]
COMPLETE = [FORGED[1], bytes([INIT]) + bytes(255)]  # of another version, of another secret


@pytest.fixture(autouse=True)
def log_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MISSING_LOG_S", 0.1)


def target_of(node: gw.Node) -> tuple[str, int]:
    host, port = node.address.split(":")
    return host, int(port)


@pytest.fixture
def outsider() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("127.0.0.1", 0))
        yield sender


@contextmanager
def disturbing(outsider: socket.socket, datagram: bytes, node: gw.Node) -> Iterator[None]:
    """Send a node the same datagram again and again."""
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(0.02):
            outsider.sendto(datagram, target_of(node))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("datagram", [*FORGED, COMPLETE[1]])
def test_an_opening_from_elsewhere_does_not_end_the_wait_for_a_late_peer(
    outsider: socket.socket, datagram: bytes
) -> None:
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        late: list[gw.Node] = []
        start = threading.Timer(
            0.6, lambda: late.append(gw.Node("127.0.0.1:0", [node.address], secret=SECRET))
        )
        start.start()
        try:
            with disturbing(outsider, datagram, node):
                [peer] = node.wait_for_peers(1, timeout_s=30.0)
        finally:
            start.join()
        assert peer == late[0].peer
        late[0].close()


@pytest.mark.parametrize("datagram", [FORGED[0], FORGED[2], *COMPLETE])
def test_only_a_complete_opening_of_a_seed_ends_the_wait(
    outsider: socket.socket, datagram: bytes
) -> None:
    host, port = outsider.getsockname()
    timeout_s = 60.0 if datagram in COMPLETE else 2.0
    with (
        gw.Node("127.0.0.1:0", [f"{host}:{port}"], secret=SECRET) as node,
        disturbing(outsider, datagram, node),
    ):
        started_s = time.monotonic()
        with pytest.raises(TimeoutError, match="INIT datagrams were not answered") as caught:
            node.wait_for_peers(1, timeout_s)
        waited_s = time.monotonic() - started_s
    assert (waited_s < timeout_s) == (datagram in COMPLETE)
    assert f"no answer from {host}:{port}" in str(caught.value)


def test_a_failure_of_the_io_thread_closes_the_node_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = gw.Node("127.0.0.1:0", secret=SECRET)

    receive = node._driver.receive

    def fail(endpoint: Endpoint) -> bool:
        if threading.current_thread() is node._thread:  # who waits looks for datagrams as well
            raise ZeroDivisionError("a bug")
        return receive(endpoint)

    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            node.wait_for_peers(1, timeout_s=60.0)
        except gw.Closed as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not node._awaited:
        threading.Event().wait(0.001)
    monkeypatch.setattr(node._driver, "receive", fail)
    node._driver.wake()
    thread.join(timeout=10.0)
    assert "a bug" in str(waiting[0])
    with pytest.raises(gw.Closed, match="a bug") as caught:
        node.publish(b"more")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert node.close() == []


@pytest.mark.parametrize("method", ["receive", "transmit"])
@pytest.mark.parametrize("call", ["publish", "receive", "wait_for_peers"])
def test_a_failure_in_a_caller_s_thread_ends_the_node_for_its_peers_as_well(
    method: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = gw.transport.Limits(heartbeat_s=0.05, down_s=0.5)
    with (
        gw.Node("127.0.0.1:0", secret=SECRET, limits=limits) as peer,
        gw.Node("127.0.0.1:0", [peer.address], secret=SECRET, limits=limits) as node,
    ):
        assert node.wait_for_peers(1, timeout_s=10.0) == (peer.peer,)
        assert peer.wait_for_peers(1, timeout_s=10.0) == (node.peer,)
        move = getattr(node._driver, method)

        def fail(endpoint: Endpoint) -> float:
            if threading.current_thread() is threading.main_thread():
                raise ZeroDivisionError("a bug")
            return move(endpoint)

        monkeypatch.setattr(node._driver, method, fail)
        arguments = {"publish": (b"1",), "wait_for_peers": (2, 0.001)}

        def call_until_a_datagram_comes() -> None:
            end_s = time.monotonic() + 30.0
            while time.monotonic() < end_s:
                with suppress(TimeoutError):
                    getattr(node, call)(*arguments.get(call, ()))

        with pytest.raises(gw.Closed, match="a bug") as caught:
            call_until_a_datagram_comes()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        end_s = time.monotonic() + 10.0
        while peer.peers and time.monotonic() < end_s:
            peer.receive(0.05)
        assert peer.peers == ()
        node.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1"])
def test_an_own_address_among_the_peers_is_no_seed_of_a_node_on_all_interfaces(host: str) -> None:
    with gw.Node("0.0.0.0:0", secret=SECRET) as node:
        node.add_peer(f"{host}:{node._driver.address[1]}")
        assert node.seeds == frozenset()
    assert addressing.is_served_by((f"::ffff:{host}", 5), ("::", 5))
    assert not addressing.is_served_by((host, 5), ("10.0.0.1", 5))
    assert not addressing.is_served_by((host, 5), ("0.0.0.0", 6))
