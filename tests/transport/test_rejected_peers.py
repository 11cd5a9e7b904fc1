"""Peers with another secret or version get no answer; the logs and errors of both nodes give the reason."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

import gradwire as gw
from gradwire.transport import node as node_module
from gradwire.transport.secret import fingerprint
from gradwire.transport.wire import INIT, VERSION

SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(1, 33))


@pytest.fixture(autouse=True)
def log_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MISSING_LOG_S", 0.1)


def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, "it did not happen"
        threading.Event().wait(0.005)


def test_a_peer_with_another_secret_is_logged_at_both_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=OTHER_SECRET) as two,
    ):
        two.wait_for_peers(1, 10.0, lambda: "no answer from" in caplog.text)
        until(lambda: "an INIT from" in caplog.text)
        with pytest.raises(TimeoutError) as caught:
            two.wait_for_peers(1, timeout_s=0.0)
    [at_one] = [line for line in caplog.messages if "an INIT from" in line]
    [at_two] = [line for line in caplog.messages if "no answer from" in line]
    assert at_one.startswith(f"an INIT from {two.address} gets no answer")
    assert fingerprint(SECRET) in at_one
    for text in (at_two, str(caught.value)):
        assert f"connected to {two.address}" in text
        assert f"no answer from {one.address}" in text
        assert fingerprint(OTHER_SECRET) in text


def test_a_node_that_waits_for_peers_names_the_one_with_another_secret() -> None:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=OTHER_SECRET) as two,
    ):
        until(lambda: one.stats().handshakes_refused > 0)
        with pytest.raises(TimeoutError) as caught:
            one.wait_for_peers(1, timeout_s=0.5)
    text = str(caught.value)
    assert f"connected to {one.address}" in text
    assert f"the last from {two.address}" in text
    assert fingerprint(SECRET) in text


def test_peers_that_connect_while_missing_ones_are_logged_are_still_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with gw.Node("127.0.0.1:0", secret=SECRET) as one:
        late: list[gw.Node] = []

        def connect_late() -> None:
            until(lambda: "0 of 1 peers" in caplog.text)
            late.append(gw.Node("127.0.0.1:0", [one.address], secret=SECRET))

        thread = threading.Thread(target=connect_late)
        thread.start()
        peers = one.wait_for_peers(1, timeout_s=10.0)
        thread.join()
        with late[0]:
            assert peers == (late[0].peer,)


def test_a_peer_of_another_version_is_logged_and_noise_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as node,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as newer,
    ):
        newer.bind(("127.0.0.1", 0))
        host, port = node.address.split(":")
        newer.sendto(bytes([INIT + 0x90]) + b"noise" * 51, (host, int(port)))
        newer.sendto(bytes([INIT + 0x10]) + bytes(255), (host, int(port)))
        until(lambda: bool(caplog.messages))
        host, port = newer.getsockname()
    [line] = caplog.messages
    assert line.startswith(f"an INIT from {host}:{port} gets no answer")
    assert f"version {VERSION + 1} of the transport, this node version {VERSION}" in line


def test_a_third_node_logs_that_two_others_have_the_same_node_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=SECRET, node_id=2) as older,
    ):
        older.wait_for_peers(1, timeout_s=5.0)
        until(lambda: time.time_ns() // 1_000_000 > older.peer.incarnation)
        with gw.Node("127.0.0.1:0", [one.address], secret=SECRET, node_id=2) as newer:
            newer.wait_for_peers(1, timeout_s=5.0)
            until(lambda: "an INIT from" in caplog.text)
    # A slow start is logged as well: that a node still waits for the other one.
    line = next(line for line in caplog.messages if "an INIT from" in line)
    assert line.startswith(f"an INIT from {older.address} gets no answer: its node_id, 2, is that")
    assert f"at {newer.address}: give every node its own" in line
