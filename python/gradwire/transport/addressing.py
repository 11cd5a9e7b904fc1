"""The choice of a node's local address, and the resolution of its peers' addresses.

The order is: explicit bind, network mask, the variable GRADWIRE_IP, the route to the first peer.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

from .types import Address

Rule: TypeAlias = Literal["bind", "mask", "variable", "route"]

ADDRESS_VARIABLE: Final = "GRADWIRE_IP"
WILDCARD: Final = "0.0.0.0"  # noqa: S104 - recognised, and bound only when asked for
WILDCARDS: Final = ("", WILDCARD, "::")
IPV4_TABLE: Final = "/proc/net/fib_trie"
IPV6_TABLE: Final = "/proc/net/if_inet6"


def format_address(address: Address) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """Parse "host:port" or "[v6]:port".

    Raises:
        ValueError: no port, or not a number from 0 to 65,535.
    """
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: write an IPv6 address as [host]:port")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"address {text!r} is not of the form host:port")
    return host, int(port)


def deciding_rule(bind: Address, network_mask: str | None) -> Rule:
    """Return the rule that decides on the address to bind."""
    if bind[0] not in WILDCARDS:
        return "bind"
    if network_mask is not None:
        return "mask"
    return "variable" if os.environ.get(ADDRESS_VARIABLE) else "route"


def choose_address(bind: Address, network_mask: str | None) -> Address:
    """Return the address to bind: the mask or GRADWIRE_IP replaces a wildcard host.

    Raises:
        ValueError: no local address is in the network, or several are; or the mask is no network, or GRADWIRE_IP no
            address.
    """
    host, port = bind
    rule = deciding_rule(bind, network_mask)
    if rule == "mask" and network_mask is not None:
        return pick_by_mask(network_mask, local_addresses()), port
    if rule == "variable":
        text = os.environ[ADDRESS_VARIABLE]
        try:
            return str(ipaddress.ip_address(text)), port
        except ValueError:
            raise ValueError(
                f"{ADDRESS_VARIABLE} is {text!r}; it must be one of this machine's addresses, without a port: "
                f"{', '.join(local_addresses())}"
            ) from None
    return (host or WILDCARD), port


def pick_by_mask(network_mask: str, candidates: Iterable[str]) -> str:
    """Return the one candidate inside the network.

    Raises:
        ValueError: not a network, or not exactly one candidate is in it; the message lists them.
    """
    try:
        network = ipaddress.ip_network(network_mask, strict=False)
    except ValueError as error:
        raise ValueError(
            f"network_mask is {network_mask!r}; it must be a network such as 10.1.1.0/24 or fd00::/64: {error}"
        ) from None
    known = sorted(set(candidates))
    inside = [text for text in known if ipaddress.ip_address(text) in network]
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise ValueError(
            f"network_mask {network_mask} fits several local addresses ({', '.join(inside)}): narrow it, or bind one"
        )
    raise ValueError(
        f"no local address is in network_mask {network_mask}; this machine has {', '.join(known) or 'none'}"
    )


def local_addresses() -> list[str]:
    """Return the addresses of this machine's interfaces (elsewhere than on Linux: of its host name)."""
    found: list[str] = []
    for path, parse in ((IPV4_TABLE, parse_fib_trie), (IPV6_TABLE, parse_if_inet6)):
        table = Path(path)
        if table.exists():
            found.extend(parse(table.read_text(encoding="ascii")))
    if not found:
        for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM):
            found.append(str(entry[4][0]))
    return sorted(set(found))


def parse_fib_trie(text: str) -> list[str]:
    """Return the local IPv4 addresses in the kernel's routing trie: those followed by "/32 host LOCAL"."""
    return re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", text)


def parse_if_inet6(text: str) -> list[str]:
    """Return the IPv6 addresses in the kernel's table, without link-local addresses, which need a scope."""
    addresses = [
        str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
        for line in text.splitlines()
        if line
    ]
    return [address for address in addresses if not ipaddress.ip_address(address).is_link_local]


def local_address(bound: Address, peers: Sequence[str]) -> Address:
    """Return the address to show for a bound socket: a wildcard becomes the address on the route to the first peer."""
    host, port = bound
    if host not in WILDCARDS:
        return bound
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    loopback = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    for peer in peers:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(
                    resolve(peer, like=bound)
                )  # UDP: sends nothing, only looks the route up
                return str(probe.getsockname()[0]), port
        except (OSError, ValueError):
            continue
    return loopback, port


def resolve(text: str, like: Address) -> Address:
    """Return the numeric address of "host:port" in the address family of ``like``.

    Raises:
        ValueError: malformed, or the name has no such address.
    """
    host, port = parse_address(text)
    family = socket.AF_INET6 if ":" in like[0] else socket.AF_INET
    try:
        entries = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(f"peer {text!r} cannot be resolved: {error}") from error
    return str(entries[0][4][0]), port
