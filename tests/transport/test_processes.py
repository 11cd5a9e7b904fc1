"""Nodes in separate processes that are killed, stopped, restarted, and forked."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

import pytest

from gradwire.errors import TransportError, WouldBlock
from gradwire.transport import Limits, Node, PeerLost, Ticket

from .processes import SECRET, PeerProcess, payload_of

QUICK = {"heartbeat_s": 0.06, "down_s": 1.5}
MESSAGE_BYTES = 1 << 20
SMALL_QUEUE = {"message_bytes_max": MESSAGE_BYTES, "receive_bytes": 2 * MESSAGE_BYTES}


def lost(node: Node, timeout_s: float) -> PeerLost:
    """Wait for the loss of a peer."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        node.receive(timeout_s=0.02)
        for event in node.events():
            if isinstance(event, PeerLost):
                return event
    raise AssertionError(f"no peer was lost within {timeout_s} s")


def publish_until_full(node: Node, most: int) -> list[Ticket]:
    """Publish messages of 1 MB until the log has been full for half a second."""
    tickets: list[Ticket] = []
    room_at_s = time.monotonic()
    while len(tickets) < most and time.monotonic() < room_at_s + 0.5:
        try:
            tickets.append(
                node.publish(payload_of(node.id, len(tickets), MESSAGE_BYTES), len(tickets))
            )
            room_at_s = time.monotonic()
        except WouldBlock:
            node.receive(timeout_s=0.005)
    return tickets


def wait_for(peer: PeerProcess, others: set[int], timeout_s: float = 20.0) -> None:
    """Wait until exactly these are a process's peers; killed ones may linger until they are replaced."""
    end_s = time.monotonic() + timeout_s
    now: set[int] = set()
    while now != others and time.monotonic() < end_s:
        now = set(peer.ask("wait", peers=len(others))["peers"])
        peer.ask("receive", messages=1, timeout_s=0.05)
    assert now == others


def test_a_peer_killed_in_the_middle_of_a_message_is_reported_exactly_and_disturbs_nobody() -> None:
    limits = Limits(**QUICK, message_bytes_max=MESSAGE_BYTES, send_log_bytes=24 * MESSAGE_BYTES)  # type: ignore[arg-type]
    with (
        Node("127.0.0.1:0", secret=SECRET, limits=limits) as node,
        PeerProcess([node.address], limits=QUICK) as bystander,
        # The victim takes no message, so its budget is full after two, in the middle of the third.
        PeerProcess(
            [node.address], limits={**QUICK, **SMALL_QUEUE, "window_bytes": 1 << 18}
        ) as victim,
    ):
        peers = {peer.id: peer for peer in node.wait_for_peers(2, timeout_s=10.0)}
        bystander.ask("wait", peers=2)
        tickets = publish_until_full(node, most=40)
        assert 10 < len(tickets) < 40
        end_s = time.monotonic() + 10.0  # on a busy machine the victim acknowledges late
        while peers[victim.id] not in tickets[1].delivered and time.monotonic() < end_s:
            node.receive(timeout_s=0.02)
        assert [ticket.tag for ticket in tickets if peers[victim.id] in ticket.delivered] == [0, 1]
        victim.kill()
        event = lost(node, timeout_s=QUICK["down_s"] + 3.0)
        assert event.peer == peers[victim.id]
        assert event.reason == "timeout"
        assert list(event.undelivered) == tickets[2:]
        assert all(ticket.failed == {event.peer} for ticket in tickets[2:])
        received = bystander.ask("receive", messages=len(tickets))
        assert received["tags"] == {str(node.id): list(range(len(tickets)))}
        assert node.drain(timeout_s=5.0)
        assert all(peers[bystander.id] in ticket.delivered for ticket in tickets)
        assert node.stats().send_log_bytes == 0
        assert node.peers == (peers[bystander.id],)


@pytest.mark.slow
def test_a_process_stopped_for_three_seconds_is_not_lost_and_gets_everything() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        PeerProcess([node.address]) as peer,
        PeerProcess([node.address]) as bystander,
    ):
        node.wait_for_peers(2, timeout_s=10.0)
        peer.ask("wait", peers=2)
        bystander.ask("wait", peers=2)
        peer.tell("receive", messages=60)
        bystander.tell("receive", messages=60)
        peer.stop()
        started_s = time.monotonic()
        for tag in range(60):
            node.publish(payload_of(node.id, tag, 100_000), tag)
            node.receive(timeout_s=0.05)
        assert bystander.answer()["tags"] == {str(node.id): list(range(60))}
        assert time.monotonic() - started_s > 3.0
        peer.send_signal(signal.SIGCONT)
        assert peer.answer()["tags"] == {str(node.id): list(range(60))}
        assert node.drain(timeout_s=5.0)
        assert [event for event in node.events() if isinstance(event, PeerLost)] == []
        assert peer.ask("events")["lost"] == bystander.ask("events")["lost"] == []


@pytest.mark.parametrize(
    ("limits", "stop_s"),
    [
        pytest.param(QUICK, 2.5, id="short limits"),
        pytest.param({}, 30.0, id="30 s", marks=pytest.mark.slow),
    ],
)
def test_a_process_stopped_for_too_long_is_lost_and_reconnects_by_itself(
    limits: dict[str, float], stop_s: float
) -> None:
    chosen = Limits(**limits)  # type: ignore[arg-type]
    with (
        Node("127.0.0.1:0", secret=SECRET, limits=chosen) as node,
        PeerProcess([node.address], limits=limits) as peer,
    ):
        (before,) = node.wait_for_peers(1, timeout_s=10.0)
        peer.ask("wait", peers=1)
        peer.stop()
        started_s = time.monotonic()
        tickets = [node.publish(payload_of(node.id, tag, 1_000), tag) for tag in range(3)]
        event = lost(node, timeout_s=chosen.down_s + 3.0)
        assert time.monotonic() - started_s > 0.9 * chosen.down_s
        assert (event.peer, event.reason) == (before, "timeout")
        assert list(event.undelivered) == tickets
        while time.monotonic() - started_s < stop_s:
            node.receive(timeout_s=0.1)
        peer.send_signal(signal.SIGCONT)
        # The same run of the same node, in a new session.
        assert node.wait_for_peers(1, timeout_s=5.0) == (before,)
        peer.ask("wait", peers=1)
        node.publish(payload_of(node.id, 3, 1_000), 3)
        tags = peer.ask("receive", messages=1)["tags"][str(node.id)]
        # Datagrams in the socket's buffer may have been read first; nothing is received twice.
        assert tags in ([3], [0, 1, 2, 3])
        assert peer.ask("send", messages=1, nbytes=1_000)["is_drained"]
        assert [message.tag for message in node.receive(timeout_s=5.0)] == [0]


def test_a_restart_under_the_same_address_is_a_new_incarnation() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as node,
        PeerProcess([node.address], node_id=7) as first,
    ):
        (before,) = node.wait_for_peers(1, timeout_s=10.0)
        first.kill()
        with PeerProcess([node.address], bind=first.address, node_id=7) as second:
            event = lost(node, timeout_s=5.0)  # long before ten seconds of silence
            assert (event.peer, event.reason) == (before, "restarted")
            (after,) = node.wait_for_peers(1, timeout_s=5.0)
            assert (after.id, after.address) == (before.id, before.address)
            assert after.incarnation > before.incarnation
            second.ask("wait", peers=1)
            node.publish(payload_of(node.id, 0, 100_000), 0)
            assert second.ask("receive", messages=1)["tags"] == {str(node.id): [0]}


@pytest.mark.parametrize(("count", "rounds"), [(3, 1), pytest.param(5, 2, marks=pytest.mark.slow)])
def test_a_storm_of_restarts_ends_in_a_complete_mesh(count: int, rounds: int) -> None:
    peers: list[PeerProcess] = []
    try:
        for _ in range(count):
            peers.append(PeerProcess([peer.address for peer in peers]))
        addresses = [peer.address for peer in peers]
        for index in [(3 * turn) % count if count > 3 else turn for turn in range(count)] * rounds:
            peers[index].kill()
            others = [other for other in addresses if other != addresses[index]]
            peers[index] = PeerProcess(others, bind=addresses[index])
        for peer in peers:
            wait_for(peer, {other.id for other in peers if other is not peer})
        for peer in peers:
            peer.tell("send", messages=2, nbytes=200_000)
        for peer in peers:
            assert peer.answer()["is_drained"]
        for peer in peers:
            assert peer.ask("receive", messages=2 * (count - 1))["tags"] == {
                str(other.id): [0, 1] for other in peers if other is not peer
            }
    finally:
        for peer in peers:
            peer.kill()


def test_a_forked_child_can_neither_use_nor_disturb_the_node_and_may_make_its_own() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    with Node("127.0.0.1:0", secret=SECRET) as node, PeerProcess([node.address]) as peer:
        (known,) = node.wait_for_peers(1, timeout_s=10.0)
        peer.ask("wait", peers=1)
        for tag in range(20):
            node.publish(payload_of(node.id, tag, MESSAGE_BYTES), tag)
            if tag % 10 == 5:  # in the middle of the transfer
                with (
                    node._lock
                ):  # as if the I/O thread were working: the child's copy stays locked for ever
                    child = os.fork()
                    if child == 0:
                        _end_child(node)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert node.drain(timeout_s=10.0)
        assert peer.ask("receive", messages=20)["tags"][str(node.id)] == list(range(20))
        assert node.peers == (known,)
        gone = [event for event in node.events() if isinstance(event, PeerLost)]
        assert [event.reason for event in gone] == ["left", "left"]  # the nodes of the children
        assert known not in {event.peer for event in gone}


def _end_child(node: Node) -> NoReturn:
    """Check in the child that every call is refused at once and that a node of its own works; exit with 0 if so."""
    status = 1
    try:
        signal.alarm(20)
        refused = 0
        for use in (
            lambda: node.publish(b""),
            lambda: node.receive(),
            lambda: node.drain(1.0),
            lambda: node.stats(),
            lambda: node.events(),
            lambda: node.peers,
            lambda: node.wait_for_peers(1, 1.0),
            lambda: node.has_room(1),
        ):
            try:
                use()
            except TransportError as error:
                refused += "after a fork" in str(error)
        node.close()
        with Node("127.0.0.1:0", [node.address], secret=SECRET) as own:
            own.wait_for_peers(1, timeout_s=10.0)
        status = 0 if refused == 8 else 2
    finally:
        os._exit(status)
