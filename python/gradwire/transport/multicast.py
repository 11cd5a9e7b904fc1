"""Joining a multicast group, and sending to it, on the interface that has the node's address."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path
from typing import Final

from .addressing import IPV6_TABLE, WILDCARDS
from .model import Address, format_address

IP_MULTICAST_ALL: Final = (
    49  # absent from the socket module: other groups of this machine are not for us
)


def check_group(group: Address, bound: Address) -> None:
    """Refuse what cannot work.

    Raises:
        ValueError: not a multicast address, of another family than the node's, or port 0.
    """
    host, port = group
    try:
        is_group = ipaddress.ip_address(host).is_multicast
    except ValueError:
        is_group = False
    if not is_group or port == 0 or (":" in host) != (":" in bound[0]):
        raise ValueError(
            f"multicast is {format_address(group)}; it must be a multicast address with a port, such as "
            f"239.1.2.3:40124, of the same family as the node's {format_address(bound)}"
        )


def join(group: Address, local: str) -> socket.socket:
    """Return a socket that receives what is sent to the group, on the interface that has the address ``local``.

    Raises:
        OSError: the port is taken by somebody else, or the interface does no multicast; the message names the group.
    """
    family = socket.AF_INET6 if ":" in group[0] else socket.AF_INET
    joined = socket.socket(family, socket.SOCK_DGRAM)
    try:
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux" and hasattr(socket, "SO_REUSEPORT"):
            joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Elsewhere a socket cannot have a group's address; there it gets all that comes to the port.
        host = group[0] if sys.platform == "linux" else ""
        scope = (0, interface_index(local)) if family == socket.AF_INET6 else ()
        joined.bind((host, group[1], *scope))
        _add_membership(joined, group[0], local)
    except OSError as error:
        joined.close()
        where = "" if local in WILDCARDS else f" on the interface of {local}"
        raise OSError(
            error.errno, f"cannot join {format_address(group)}{where}: {error.strerror}"
        ) from error
    joined.setblocking(False)
    return joined


def _add_membership(joined: socket.socket, host: str, local: str) -> None:
    if joined.family == socket.AF_INET6:
        request = struct.pack(
            "=16sI", socket.inet_pton(socket.AF_INET6, host), interface_index(local)
        )
        joined.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)
        return
    own = "0.0.0.0" if local in WILDCARDS else local  # noqa: S104 - lets the system choose
    request = socket.inet_aton(host) + socket.inet_aton(own)
    joined.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)


def aim(sender: socket.socket, local: str, hops: int) -> None:
    """Have what a socket sends to groups leave by the interface of ``local``, and reach nodes on this machine, too."""
    if sender.family == socket.AF_INET6:
        level = socket.IPPROTO_IPV6
        sender.setsockopt(level, socket.IPV6_MULTICAST_HOPS, hops)
        sender.setsockopt(level, socket.IPV6_MULTICAST_LOOP, 1)
        if local not in WILDCARDS:
            sender.setsockopt(level, socket.IPV6_MULTICAST_IF, interface_index(local))
        return
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, hops)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    if sys.platform == "linux":
        # Bound to all addresses and the group's port it would get the group's datagrams as if they were its own.
        with contextlib.suppress(OSError):
            sender.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
    if local not in WILDCARDS:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(local))


def interface_index(local: str) -> int:
    """Return the index of the interface that has this IPv6 address; 0, the system's choice, if it is not known."""
    table = Path(IPV6_TABLE)
    if local in WILDCARDS or not table.exists():
        return 0
    wanted = ipaddress.IPv6Address(local).packed.hex()
    for line in table.read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields and fields[0] == wanted:
            return int(fields[1], 16)
    return 0
