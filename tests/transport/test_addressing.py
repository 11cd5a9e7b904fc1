"""The address that a node binds, and the address that it shows to others."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from gradwire.transport import Node, addressing

TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.1.1.0/24 2 0 2
        |-- 10.1.1.0
           /24 link UNICAST
        |-- 10.1.1.7
           /32 host LOCAL
        |-- 10.1.1.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
"""
INET6 = (
    "00000000000000000000000000000001 01 80 10 80       lo\n"
    "fd000000000000000000000000000007 02 40 00 80     eth0\n"
    "fe800000000000000000000000000007 02 40 20 80     eth0\n"
)


def test_the_kernel_tables_give_the_local_addresses() -> None:
    assert addressing.parse_fib_trie(TRIE) == ["10.1.1.7", "127.0.0.1"]
    assert addressing.parse_if_inet6(INET6) == ["::1", "fd00::7"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("10.1.1.0/24", "10.1.1.7"),
        ("10.1.1.9/24", "10.1.1.7"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("fd00::/64", "fd00::7"),
    ],
)
def test_the_mask_picks_the_one_address_inside_it(mask: str, expected: str) -> None:
    assert addressing.pick_by_mask(mask, ["10.1.1.7", "127.0.0.1", "fd00::7", "::1"]) == expected


def test_a_mask_without_or_with_several_addresses_names_them() -> None:
    with pytest.raises(ValueError, match=r"no local address.*10\.1\.1\.7"):
        addressing.pick_by_mask("192.168.0.0/16", ["10.1.1.7"])
    with pytest.raises(ValueError, match=r"several.*10\.1\.1\.7, 10\.1\.2\.7"):
        addressing.pick_by_mask("10.0.0.0/8", ["10.1.2.7", "10.1.1.7"])
    with pytest.raises(ValueError, match=r"network_mask is 'ten'.*does not appear to be"):
        addressing.pick_by_mask("ten", [])


def test_an_explicit_host_goes_before_the_mask_and_the_mask_before_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(addressing.ADDRESS_VARIABLE, "127.0.0.3")
    assert addressing.deciding_rule(("127.0.0.2", 5), "127.0.0.1/32") == "bind"
    assert addressing.deciding_rule(("0.0.0.0", 5), "127.0.0.1/32") == "mask"
    assert addressing.deciding_rule(("0.0.0.0", 5), None) == "variable"
    assert addressing.choose_address(("127.0.0.2", 5), "127.0.0.1/32") == ("127.0.0.2", 5)
    assert addressing.choose_address(("0.0.0.0", 5), "127.0.0.1/32") == ("127.0.0.1", 5)
    assert addressing.choose_address(("0.0.0.0", 5), None) == ("127.0.0.3", 5)
    monkeypatch.delenv(addressing.ADDRESS_VARIABLE)
    assert addressing.deciding_rule(("", 5), None) == "route"
    assert addressing.choose_address(("", 5), None) == ("0.0.0.0", 5)


def test_a_malformed_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(addressing.ADDRESS_VARIABLE, "eth0")
    with pytest.raises(ValueError, match=r"GRADWIRE_IP is 'eth0'.*127\.0\.0\.1"):
        addressing.choose_address(("0.0.0.0", 5), None)


def test_a_wildcard_shows_the_address_on_the_route_to_the_first_peer() -> None:
    assert addressing.local_address(("0.0.0.0", 5), ["127.0.0.1:9"]) == ("127.0.0.1", 5)
    assert addressing.local_address(("0.0.0.0", 5), []) == ("127.0.0.1", 5)
    assert addressing.local_address(("::", 5), []) == ("::1", 5)
    assert addressing.local_address(("10.0.0.1", 5), ["127.0.0.1:9"]) == ("10.0.0.1", 5)


def test_a_node_without_peers_shows_the_address_on_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_up(bound: addressing.Address, peers: Sequence[str]) -> addressing.Address:
        assert list(peers) == ["192.0.2.1:9", "[2001:db8::1]:9"]  # on no machine's network
        return "10.1.1.7", bound[1]

    monkeypatch.setattr(addressing, "local_address", look_up)
    with Node("0.0.0.0:0", secret=bytes(range(32))) as node:
        assert node.address == f"10.1.1.7:{node._driver.address[1]}"


def test_names_are_resolved_in_the_family_of_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, port: int, family: int, kind: int, *_: int) -> list[object]:
        assert kind == socket.SOCK_DGRAM
        if host == "missing":
            raise socket.gaierror("no such host")
        return [(family, kind, 0, "", ("::5" if family == socket.AF_INET6 else "10.0.0.5", port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert addressing.resolve_all("node:7", like=("0.0.0.0", 1))[0] == ("10.0.0.5", 7)
    assert addressing.resolve_all("node:7", like=("::", 1))[0] == ("::5", 7)
    with pytest.raises(ValueError, match="missing:7"):
        addressing.resolve_all("missing:7", like=("0.0.0.0", 1))


def test_an_address_of_another_machine_is_refused_with_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADWIRE_IP", "203.0.113.9")
    with pytest.raises(
        OSError, match=r"203\.0\.113\.9:0: .*this machine has .*127\.0\.0\.1.*GRADWIRE_IP"
    ):
        Node("0.0.0.0:0", secret=bytes(range(32)))


def test_all_addresses_of_a_name_are_connected_to_and_count_as_one_peer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    lookup = socket.getaddrinfo

    def lookup_workers(host: str, *options: int) -> list[object]:
        names = hosts if host == "workers" else [host]
        return [entry for each in names for entry in lookup(each, *options)]

    secret = bytes(range(32))
    with Node("127.0.0.1:0", secret=secret) as first:
        port = first.address.split(":")[1]
        monkeypatch.setattr(socket, "getaddrinfo", lookup_workers)
        first.add_peer(f"workers:{port}")
        with (
            Node(f"127.0.0.2:{port}", secret=secret) as second,
            Node(f"127.0.0.3:{port}", secret=secret) as third,
        ):
            assert set(first.wait_for_peers(2, timeout_s=10.0)) == {second.peer, third.peer}
        assert first.seeds == {f"127.0.0.2:{port}"}
    warning = next(line for line in caplog.messages if "workers" in line)
    assert f"has 2 addresses (127.0.0.2:{port}, 127.0.0.3:{port})" in warning


def test_a_machine_that_takes_over_the_name_of_a_lost_peer_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Kubernetes, where a new pod has the name of the one before, and another address."""
    host = "127.0.0.2"
    lookup = socket.getaddrinfo

    def lookup_worker(name: str, *options: int) -> list[object]:
        return lookup(host if name == "worker" else name, *options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup_worker)
    monkeypatch.setattr("gradwire.transport.node.LOOK_UP_S", 0.05)
    secret = bytes(range(32))
    with Node("127.0.0.2:0", secret=secret) as before:
        port = before.address.split(":")[1]
        stays = Node("127.0.0.1:0", [f"worker:{port}"], secret=secret)
        assert stays.wait_for_peers(1, timeout_s=10.0) == (before.peer,)
    with stays, Node(f"127.0.0.3:{port}", secret=secret) as after:
        assert stays.seeds == {f"127.0.0.2:{port}"}
        host = "127.0.0.3"
        assert after.wait_for_peers(1, timeout_s=10.0) == (stays.peer,)
        assert stays.seeds == {after.address}
