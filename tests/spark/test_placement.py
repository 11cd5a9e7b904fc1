"""Which address and port the node of each Spark task gets."""

from __future__ import annotations

import pytest

from gradwire.spark import placement
from gradwire.spark.placement import host_of, teams_of, where_to_bind
from gradwire.transport.addressing import ADDRESS_VARIABLE
from gradwire.transport.types import Address


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The address on the way to each "host:port"; where there is none, loopback."""
    known: dict[str, str] = {}

    def look_up(bound: Address, peers: list[str]) -> Address:
        wants_ipv6 = ":" in bound[0]
        for peer in peers:
            address = known.get(peer)
            if address is not None and (":" in address) == wants_ipv6:
                return address, bound[1]
        return ("::1" if wants_ipv6 else "127.0.0.1"), bound[1]

    monkeypatch.setattr(placement, "local_address", look_up)
    return known


@pytest.mark.parametrize(
    ("address", "host"),
    [("10.1.1.7:39001", "10.1.1.7"), ("node-3:39001", "node-3"), ("[fd00::7]:39001", "fd00::7")],
)
def test_an_executors_host_is_what_stands_before_the_port(address: str, host: str) -> None:
    assert host_of(address) == host


def test_tasks_of_one_machine_talk_over_loopback() -> None:
    assert where_to_bind(["10.1.1.7"] * 3, 1) == "127.0.0.1:0"


def test_with_other_machines_it_is_the_address_on_the_way_to_them(routes: dict[str, str]) -> None:
    routes["10.1.1.8:1"] = "10.1.1.7"
    assert where_to_bind(["10.1.1.7", "10.1.1.7", "10.1.1.8"], 0) == "10.1.1.7:0"


def test_executors_with_ipv6_addresses_get_ipv6_nodes(routes: dict[str, str]) -> None:
    routes["[fd00::8]:1"] = "fd00::7"
    assert where_to_bind(["fd00::7", "fd00::8"], 0, 40_123) == "[fd00::7]:40123"


def test_each_task_of_a_machine_takes_a_port_of_its_own(routes: dict[str, str]) -> None:
    routes.update({"a:1": "10.1.1.1", "b:1": "10.1.1.2"})
    binds = [where_to_bind(["a", "b", "a", "a"], rank, 40_123) for rank in range(4)]
    assert [bind.rpartition(":")[2] for bind in binds] == ["40123", "40123", "40124", "40125"]


def test_a_mask_leaves_the_address_to_the_node(routes: dict[str, str]) -> None:
    routes["b:1"] = "192.168.0.7"
    assert where_to_bind(["a", "b"], 0, 40_123, "10.1.1.0/24") == "0.0.0.0:40123"


def test_so_does_the_variable(routes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    routes["b:1"] = "192.168.0.7"
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.1.1.7")
    assert where_to_bind(["a", "b"], 0) == "0.0.0.0:0"


def test_ports_above_the_last_one_are_refused_with_the_numbers() -> None:
    assert where_to_bind(["a"] * 3, 2, 65_533) == "127.0.0.1:65535"
    with pytest.raises(ValueError, match=r"port is 65534, and 3 tasks on a .* up to 65536"):
        where_to_bind(["a"] * 3, 0, 65_534)
    with pytest.raises(ValueError, match="port is -1"):
        where_to_bind(["a"], 0, -1)


def test_a_machine_without_a_way_to_the_others_says_what_to_give(routes: dict[str, str]) -> None:
    assert not routes
    with pytest.raises(ValueError, match=r"to the other executors \(b, c\): set network_mask"):
        where_to_bind(["a", "b", "c", "b"], 0)


def test_teams_are_of_one_machine_and_of_limited_size() -> None:
    hosts = ["a", "b", "a", "a", "b"]
    assert teams_of(hosts, 1) == [[0], [2], [3], [1], [4]]
    assert teams_of(hosts, 2) == [[0, 2], [3], [1, 4]]
    assert teams_of(hosts, 9) == [[0, 2, 3], [1, 4]]
