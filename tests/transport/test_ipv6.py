"""The basics over IPv6, for all code that handles addresses."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator

import pytest

from gradwire.transport import Limits, Node, PeerLost, Received, addressing

from .processes import SECRET, PeerProcess, payload_of
from .proxy import Proxy, Trouble

HOST = "[::1]:0"


@pytest.fixture(autouse=True)
def _loopback() -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")


@pytest.fixture
def pair(_loopback: None) -> Iterator[tuple[Node, Node]]:
    with Node(HOST, secret=SECRET) as one, Node(HOST, [one.address], secret=SECRET) as two:
        one.wait_for_peers(1, timeout_s=5.0)
        two.wait_for_peers(1, timeout_s=5.0)
        yield one, two


def collect(node: Node, count: int) -> list[Received]:
    end_s = time.monotonic() + 10.0
    found: list[Received] = []
    while len(found) < count and time.monotonic() < end_s:
        found += node.receive(timeout_s=0.2)
    return found


def test_addresses_have_brackets_everywhere(pair: tuple[Node, Node]) -> None:
    one, two = pair
    assert one.address.startswith("[::1]:")
    assert [peer.address for peer in one.peers] == [two.address]
    assert [peer.address for peer in two.peers] == [one.address]
    assert two.seeds == {one.address}


def test_a_node_to_which_nobody_comes_names_its_ip_version() -> None:
    with (
        Node("[::]:0", secret=SECRET) as node,
        pytest.raises(TimeoutError, match=r"router let UDP \(IPv6\)"),
    ):
        node.wait_for_peers(1, timeout_s=0.05)


def test_messages_of_all_sizes_arrive_complete_and_in_order(pair: tuple[Node, Node]) -> None:
    one, two = pair
    sizes = (0, 1, 1_144, 1_145, 61_528, 61_529, 3_000_000)
    tickets = [
        one.publish(payload_of(one.id, tag, nbytes), tag) for tag, nbytes in enumerate(sizes)
    ]
    got = collect(two, len(sizes))
    assert [message.tag for message in got] == list(range(len(sizes)))
    for message, nbytes in zip(got, sizes, strict=True):
        assert message.payload == payload_of(one.id, message.tag, nbytes)
    assert one.drain(timeout_s=5.0)
    assert all(ticket.delivered == {two.peer} for ticket in tickets)
    assert one._driver.has_gso  # the kernel segments IPv6 as well


def test_without_offload_everything_still_works() -> None:
    with (
        Node(HOST, secret=SECRET, offload=False) as one,
        Node(HOST, [one.address], secret=SECRET, offload=False) as two,
    ):
        one.wait_for_peers(1, timeout_s=5.0)
        one.publish(payload_of(one.id, 0, 500_000))
        assert [message.payload for message in collect(two, 1)] == [payload_of(one.id, 0, 500_000)]


def test_one_seed_is_enough_to_join_the_mesh(pair: tuple[Node, Node]) -> None:
    one, two = pair
    with Node(HOST, [one.address], secret=SECRET) as three:
        assert {peer.id for peer in three.wait_for_peers(2, timeout_s=5.0)} == {one.id, two.id}
        for node in (one, two):
            node.wait_for_peers(2, timeout_s=5.0)
        three.publish(b"to both")
        assert [bytes(collect(node, 1)[0].payload) for node in (one, two)] == [b"to both"] * 2
        assert three.close() == []


def test_a_killed_peer_is_lost_and_a_restarted_one_reconnects() -> None:
    limits = {"heartbeat_s": 0.06, "down_s": 1.0}
    with (
        Node(HOST, secret=SECRET, limits=Limits(**limits)) as node,
        PeerProcess([node.address], bind=HOST, node_id=7) as first,
    ):
        node.wait_for_peers(1, timeout_s=10.0)
        first.kill()
        ticket = node.publish(b"nobody gets this")
        end_s = time.monotonic() + 5.0
        lost: list[PeerLost] = []
        while not lost and time.monotonic() < end_s:
            node.receive(timeout_s=0.05)
            lost = [event for event in node.events() if isinstance(event, PeerLost)]
        assert [(event.reason, event.undelivered) for event in lost] == [("timeout", (ticket,))]
        with PeerProcess([node.address], bind=first.address, node_id=7) as second:
            (peer,) = node.wait_for_peers(1, timeout_s=10.0)
            assert (peer.id, peer.address) == (7, second.address)
            assert second.ask("send", messages=3, nbytes=100_000)["is_drained"]
            assert [message.tag for message in collect(node, 3)] == [0, 1, 2]


def test_a_bad_path_that_changes_ports_loses_nothing() -> None:
    trouble = Trouble(
        delay_s=0.002,
        rate_bytes_per_s=3e6,
        loss=0.02,
        reorder=0.05,
        corrupt=0.002,
        rebind_first_s=0.3,
        rebind_every_s=0.3,
    )
    with (
        PeerProcess(bind=HOST) as server,
        Proxy(server.address, trouble) as proxy,
        PeerProcess([proxy.address], bind=HOST) as client,
    ):
        client.ask("wait", peers=1)
        server.tell("receive", messages=30)
        assert client.ask("send", messages=30, nbytes=100_000)["is_drained"]
        assert server.answer()["tags"] == {str(client.id): list(range(30))}
        assert proxy.stop()["rebind"] > 0


def test_ipv4_nodes_that_meet_at_a_node_of_both_versions_reach_each_other() -> None:
    with Node("[::]:0", secret=SECRET) as middle:
        seed = f"127.0.0.1:{middle.address.rpartition(':')[2]}"
        with (
            Node("127.0.0.1:0", [seed], secret=SECRET) as one,
            Node("127.0.0.1:0", [seed], secret=SECRET) as two,
        ):
            for node in (middle, one, two):
                node.wait_for_peers(2, timeout_s=20.0)


def test_a_node_of_both_versions_connects_to_peers_of_either() -> None:
    with (
        Node("127.0.0.1:0", secret=SECRET) as old,
        Node(HOST, secret=SECRET) as new,
        Node("[::]:0", [old.address, new.address], secret=SECRET) as middle,
    ):
        assert {peer.id for peer in middle.wait_for_peers(2, timeout_s=20.0)} == {old.id, new.id}


def test_a_link_local_address_is_bound_with_its_interface() -> None:
    if not addressing.IPV6_TABLE.exists():
        pytest.skip("the system does not list its IPv6 addresses")
    table = [line.split() for line in addressing.IPV6_TABLE.read_text().splitlines()]
    scoped = [(ip, device) for ip, *_, device in table if ip.startswith("fe80")]
    if not scoped:
        pytest.skip("this machine has no link-local address")
    packed, device = scoped[0]
    host = f"{ipaddress.IPv6Address(bytes.fromhex(packed))}%{device}"
    with Node(f"[{host}]:0", secret=SECRET) as first:
        port = first.address.rpartition(":")[2]
        with Node(f"[{host}]:0", [f"[{host}]:{port}"], secret=SECRET) as second:
            assert [peer.id for peer in second.wait_for_peers(1, timeout_s=20.0)] == [first.id]
