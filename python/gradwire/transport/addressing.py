"""The choice of a node's address, by bind, network mask, GRADWIRE_IP or the route to a peer; and name resolution."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..rendezvous import format_address as format_address
from ..rendezvous import parse_address as parse_address
from .types import Address

ADDRESS_VARIABLE: Final = "GRADWIRE_IP"
WILDCARD: Final = "0.0.0.0"  # noqa: S104 - recognised, and bound only when asked for
WILDCARDS: Final = ("", WILDCARD, "::")
ANYWHERE: Final = "192.0.2.1:9", "[2001:db8::1]:9"  # on nobody's network (RFC 5737, 3849)
IPV4_TABLE: Final = Path("/proc/net/fib_trie")
IPV6_TABLE: Final = Path("/proc/net/if_inet6")


def parse_numeric(text: str, like: Address) -> Address:
    """Parse an address that a peer has told; raise `ValueError` unless a socket like this can send there as it is."""
    host, port = parse_address(text)
    address = ipaddress.ip_address(host)  # no name: a resolver may take seconds
    # Peers that meet through a socket of both versions hear of each other in its form.
    address = getattr(address, "ipv4_mapped", None) or address
    prefix = "::ffff:" if address.version == 4 and like[0] == "::" else ""
    is_unusable = not port or "%" in host or address.is_unspecified or address.is_multicast
    is_other_version = not prefix and (address.version == 6) != (":" in like[0])
    if is_unusable or is_other_version or str(address) == "255.255.255.255":
        problem = f"a node bound to {format_address(like)} cannot send to {text!r}"
        raise ValueError(f"{problem}: advertise an address at which others reach the node")
    return prefix + str(address), port


def is_served_by(address: Address, bound: Address) -> bool:
    """Return whether datagrams to an address arrive at a socket that is bound on this machine."""
    if address == bound or address[1] != bound[1] or bound[0] not in WILDCARDS:
        return address == bound
    host = ipaddress.ip_address(address[0])
    host = getattr(host, "ipv4_mapped", None) or host  # a socket of both versions
    return host.is_loopback or str(host) in local_addresses()


def deciding_rule(bind: Address, network_mask: str | None) -> str:
    """Return the rule that decides on the address to bind: "bind", "mask", "variable" or "route"."""
    if bind[0] not in WILDCARDS:
        return "bind"
    if network_mask is not None:
        return "mask"
    return "variable" if os.environ.get(ADDRESS_VARIABLE) else "route"


def choose_address(bind: Address, network_mask: str | None) -> Address:
    """Return the address to bind: the mask or GRADWIRE_IP replaces a wildcard host; `ValueError` if it cannot."""
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
    """Return the one candidate inside the network; raise `ValueError` if there is none, or several."""
    try:
        network = ipaddress.ip_network(network_mask, strict=False)
    except ValueError as error:
        raise ValueError(
            f"network_mask is {network_mask!r}; it must be a network such as 10.1.1.0/24 or fd00::/64: {error}"
        ) from None
    known = sorted(set(candidates))
    inside = [text for text in known if ipaddress.ip_address(text) in network]
    if not inside:
        raise ValueError(
            f"no local address is in network_mask {network_mask}; this machine has {', '.join(known) or 'none'}"
        )
    if len(inside) > 1:
        raise ValueError(
            f"network_mask {network_mask} fits several local addresses ({', '.join(inside)}): narrow it, or bind one"
        )
    return inside[0]


def local_addresses() -> list[str]:
    """Return the addresses of this machine's interfaces (elsewhere than on Linux: of its host name)."""
    addresses: set[str] = set()
    for table, parse in ((IPV4_TABLE, parse_fib_trie), (IPV6_TABLE, parse_if_inet6)):
        if table.exists():
            addresses.update(parse(table.read_text(encoding="ascii")))
    if not addresses:
        addresses.update(str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None))
    return sorted(addresses)


def parse_fib_trie(text: str) -> list[str]:
    """Return the local IPv4 addresses in the kernel's routing trie: those followed by "/32 host LOCAL"."""
    return re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", text)


def parse_if_inet6(text: str) -> list[str]:
    """Return the IPv6 addresses in the kernel's table, without link-local addresses, which need a scope."""
    packed = (bytes.fromhex(line.split()[0]) for line in text.splitlines())
    return [str(ip) for ip in map(ipaddress.IPv6Address, packed) if not ip.is_link_local]


def local_address(bound: Address, peers: Sequence[str]) -> Address:
    """Return the address to show for a bound socket: a wildcard becomes the address on the route to the first peer."""
    host, port = bound
    if host not in WILDCARDS:
        return bound
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for peer in peers:
        with suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(resolve_all(peer, like=bound)[0])  # only looks the route up
            return str(probe.getsockname()[0]).removeprefix("::ffff:"), port
    return "::1" if ":" in host else "127.0.0.1", port


def resolve_all(text: str, like: Address) -> list[Address]:
    """Return the numeric addresses of "host:port" in the family of ``like``; raise `ValueError` if there is none."""
    host, port = parse_address(text)
    if port == 0:
        raise ValueError(f"address {text!r} cannot be reached: its port must be from 1 to 65535")
    try:
        family = socket.AF_INET6 if ":" in like[0] else socket.AF_INET
        flags = socket.AI_V4MAPPED if like[0] == "::" else 0  # a socket of both versions
        entries = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM, 0, flags)
    except (OSError, UnicodeError) as error:
        hint = ""
        if (":" in host) != (":" in like[0]):
            hint = f", because this node is bound to {format_address(like)}: bind an address of the peers' IP version"
        raise ValueError(f"address {text!r} cannot be resolved{hint}: {error}") from error
    return [(host, port) for host in dict.fromkeys(str(entry[4][0]) for entry in entries)]
