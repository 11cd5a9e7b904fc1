"""A multicast group on real sockets: the loopback interface of a network namespace, or of this machine."""

from __future__ import annotations

import os
import socket
import time

import pytest

from gradwire.transport import Limits, Node
from gradwire.transport.multicast import aim, join

SECRET = bytes(range(32))
GROUPS = {"127.0.0.1": "239.77.11.3", "::1": "ff11::4d0b:3"}


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_that_works(host: str) -> str:
    """Return a group on the interface of ``host``, or skip where what is sent to it does not arrive."""
    group = (GROUPS[host], free_port())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sender, join(group, host) as receiver:
            sender.bind((host, 0))
            aim(sender, host, 1)
            sender.sendto(b"is anybody there", group)
            receiver.settimeout(1.0)
            receiver.recv(100)
    except OSError as error:
        pytest.skip(f"no multicast on the interface of {host}: {error}")
    return f"[{group[0]}]:{group[1]}" if ":" in host else f"{group[0]}:{group[1]}"


def until(done: object, timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.01)


def connected(count: int, host: str, **options: object) -> list[Node]:
    bind = f"[{host}]:0" if ":" in host else f"{host}:0"
    nodes: list[Node] = []
    for _ in range(count):
        nodes.append(Node(bind, [n.address for n in nodes], secret=SECRET, **options))  # type: ignore[arg-type]
    for node in nodes:
        node.wait_for_peers(count - 1, timeout_s=10.0)
    return nodes


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("offload", [True, False])
def test_a_group_of_nodes_sends_each_message_once(host: str, offload: bool) -> None:
    nodes = connected(4, host, multicast=group_that_works(host), offload=offload)
    one, others = nodes[0], nodes[1:]
    until(lambda: all(peer.carrier == "multicast" for peer in one.stats().peers))
    payload = os.urandom(2_000_000)
    ticket = one.publish(payload, 5)
    for node in others:
        got: list[bytes] = []
        while not got:
            got = [bytes(message.payload) for message in node.receive(timeout_s=5.0)]
        assert got == [payload]
    assert one.drain(timeout_s=5.0)
    assert ticket.delivered == {node.peer for node in others}
    sent, received = one.stats(), others[0].stats()
    assert 2_000_000 < sent.multicast_bytes_sent < 2_100_000
    assert received.multicast_bytes_received > 0.5 * sent.multicast_bytes_sent
    assert (
        one.stats().multicast_bytes_received < 100_000
    )  # others' beacons, not what it sent itself
    for node in nodes:
        node.close()


def test_a_tree_of_nodes_on_real_sockets() -> None:
    nodes = connected(6, "127.0.0.1", limits=Limits(mesh_nodes_max=2, relay_children_max=2))
    one, others = nodes[0], nodes[1:]
    until(lambda: all(peer.carrier == "tree" for peer in one.stats().peers))
    payload = os.urandom(1_000_000)
    ticket = one.publish(payload, 5)
    for node in others:
        got: list[bytes] = []
        while not got:
            got = [bytes(message.payload) for message in node.receive(timeout_s=5.0)]
        assert got == [payload]
    assert one.drain(timeout_s=5.0)
    assert len(ticket.delivered) == 5
    assert sum(node.stats().relayed_bytes for node in others) > 1_000_000
    for node in nodes:
        node.close()


@pytest.mark.parametrize(
    "multicast", ["10.0.0.1:5", "239.1.2.3:0", "[ff11::1]:5", "somewhere:5", "239.1.2.3"]
)
def test_what_is_no_group_is_refused(multicast: str) -> None:
    with pytest.raises(ValueError, match=r"multicast|host:port"):
        Node("127.0.0.1:0", secret=SECRET, multicast=multicast)


def test_hops_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multicast_hops"):
        Node("127.0.0.1:0", secret=SECRET, multicast="239.1.2.3:40124", multicast_hops=0)
