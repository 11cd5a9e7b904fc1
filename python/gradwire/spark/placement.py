"""The bind address of a Spark task's node: one that the other executors reach, and a port of its own."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from gradwire.transport.addressing import WILDCARD, deciding_rule, format_address, local_address

PORT_MAX: Final = 65_535


def host_of(address: str) -> str:
    """Return the host of an executor's address as Spark gives it: "host:port", IPv6 in brackets or not."""
    return address.rpartition(":")[0].strip("[]")


def teams_of(hosts: Sequence[str], size: int) -> list[list[int]]:
    """Return the workers, whose hosts are given, in teams of at most ``size`` on the same machine."""
    teams = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        teams += [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return teams


def where_to_bind(
    hosts: Sequence[str], rank: int, port: int = 0, network_mask: str | None = None
) -> str:
    """Return the "host:port" for the node of one task.

    Args:
        hosts: of the executors, by task.
        rank: the task's number.
        port: the first port for the tasks of a machine; 0 for any.
        network_mask: as given to `node`.

    Raises:
        ValueError: the machine's tasks need ports above 65,535, or no route leads to the other executors.
    """
    host = hosts[rank]
    last = port + hosts.count(host) - 1 if port else 0
    if not 0 <= port <= last <= PORT_MAX:
        raise ValueError(
            f"port is {port}, and {hosts.count(host)} tasks on {host} use ports up to {last}; port must be 0, or all "
            f"ports between 1 and {PORT_MAX}"
        )
    chosen = port + hosts[:rank].count(host) if port else 0
    if deciding_rule((WILDCARD, chosen), network_mask) != "route":
        return f"{WILDCARD}:{chosen}"  # the mask or GRADWIRE_IP names the address
    return format_address((_address_towards([other for other in hosts if other != host]), chosen))


def _address_towards(others: Sequence[str]) -> str:
    """Return this machine's address on the route to the first of these hosts; loopback if there are none."""
    if not others:
        return "127.0.0.1"
    names = [format_address((host, 1)) for host in others]  # any port
    for wildcard in (WILDCARD, "::"):
        address = local_address((wildcard, 0), names)[0]
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ValueError(
        f"no route from this machine leads to the other executors ({', '.join(sorted(set(others)))}): "
        "set network_mask, or GRADWIRE_IP on each executor"
    )
