"""Looks at this machine. Needs no privileges; what the system does not tell stays None."""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import gradwire as gw
from gradwire import _core
from gradwire.transport import Node, SocketStats, generate_secret, parse_secret
from gradwire.transport.addressing import (
    ADDRESS_VARIABLE,
    WILDCARD,
    WILDCARDS,
    choose_address,
    deciding_rule,
    local_address,
    resolve,
)
from gradwire.transport.crypto import AesGcm
from gradwire.transport.driver import SOCKET_BUFFER_BYTES
from gradwire.transport.model import Address, format_address, parse_address
from gradwire.transport.secret import environment_secret, fingerprint

from .facts import Binding, Clocks, Drops, Installation, Machine, Secret, Socket

RECORD_BYTES: Final = 249_080
AES_TRIAL_S: Final = 0.05
AES_TRIALS: Final = 5
CLOCK_STEPS: Final = 1_000
LOOPBACK_BYTES: Final = 1 << 20
LOOPBACK_LIMIT_S: Final = 10.0
SIOCGIFADDR: Final = 0x8915


def look(bind: str, network_mask: str | None, peer: str | None) -> Machine:
    """Find out everything that needs no peer to answer.

    Args:
        bind: "host:port" that a node is to bind.
        network_mask: as for `Node`.
        peer: "host:port" of a peer, which decides on the route; or None.

    Raises:
        ValueError: ``bind`` or ``peer`` is not an address.
    """
    for address in filter(None, (bind, peer)):
        parse_address(address)
    binding = look_at_binding(bind, network_mask, peer)
    return Machine(
        system=platform.system(),
        installation=look_at_installation(),
        secret=look_at_environment(),
        binding=binding,
        socket=look_at_socket(),
        clocks=look_at_clocks(),
        drops=read_drops(Path("/proc/net/snmp"), Path("/proc/net/snmp6")),
        switch_interval_s=sys.getswitchinterval(),  # after a node was made, which lowers it
        cpus=usable_cpus(),
    )


def usable_cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- what is installed ------------------------------------------------------------------------------------------


def look_at_installation() -> Installation:
    """Return versions, backends and the speed of encryption."""
    instruction_set, problem = "", ""
    try:
        instruction_set = _core.isa()
    except gw.BackendUnavailable as error:
        problem = str(error)
    aead = AesGcm(bytes(16))
    return Installation(
        gradwire=installed("gradwire"),
        backends=tuple(gw.backends()),
        instruction_set=instruction_set,
        instruction_set_problem=problem,
        cryptography=installed("cryptography"),
        seals_in_place=aead.seals_in_place,
        aes_bytes_per_s=max(_aes_bytes_per_s(aead) for _ in range(AES_TRIALS)),
    )


def installed(distribution: str) -> str:
    """Return the version of a package."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _aes_bytes_per_s(aead: AesGcm) -> float:
    """Seal records for a moment, by processor time, so that other load does not count."""
    plain, out = memoryview(bytes(RECORD_BYTES)), memoryview(bytearray(RECORD_BYTES + 16))
    records, used_s, started_s = 0, 0.0, time.process_time()
    while used_s < AES_TRIAL_S / AES_TRIALS:
        aead.seal_into(records.to_bytes(12, "little"), plain, b"", out)
        records += 1
        used_s = time.process_time() - started_s
    return records * RECORD_BYTES / used_s


def look_at_environment() -> Secret:
    """Return what can be said about the secret that a node would find in the environment."""
    try:
        return look_at_secret(environment_secret())
    except ValueError as error:
        return Secret(is_set=True, problem=str(error))


def look_at_secret(secret: str | Path | None) -> Secret:
    """Return what can be said about a secret without showing it."""
    if not secret:
        return Secret(is_set=False)
    try:
        return Secret(is_set=True, fingerprint=fingerprint(parse_secret(secret)))
    except ValueError as error:
        return Secret(is_set=True, problem=str(error))


# ---- the address ------------------------------------------------------------------------------------------------


def look_at_binding(bind: str, network_mask: str | None, peer: str | None) -> Binding:
    """Bind for a moment what a node would bind, and say which address that is."""
    asked = parse_address(bind)
    rule = deciding_rule(asked, network_mask)
    details = {"mask": network_mask, "variable": os.environ.get(ADDRESS_VARIABLE), "route": peer}
    detail = details.get(rule) or ""
    try:
        chosen = choose_address(asked, network_mask)
        with Node(format_address(chosen), secret=generate_secret()) as node:
            bound = parse_address(node.address)
    except ValueError as error:
        return Binding(asked=bind, address="", rule=rule, detail=detail, problem=str(error))
    except OSError as error:
        return Binding(
            asked=bind,
            address="",
            rule=rule,
            detail=detail,
            problem=str(error.strerror or error),
            error_number=error.errno,
        )
    host = local_address((chosen[0], bound[1]), [peer] if peer else [])
    name = interface_of(host[0])
    return Binding(
        asked=bind,
        address=format_address(host),
        rule=rule,
        detail=detail,
        interface=name,
        interface_mtu=_read_number(f"/sys/class/net/{name}/mtu"),
        interface_mbit=_read_number(f"/sys/class/net/{name}/speed"),
    )


def interface_of(host: str) -> str:
    """Return the name of the interface that has an address, on Linux; otherwise an empty string."""
    if sys.platform != "linux" or host in WILDCARDS:
        return ""
    if ":" in host:
        return _interface_of_ipv6(host)
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    control.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return ""


def _interface_of_ipv6(host: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, host).hex()
    table = Path("/proc/net/if_inet6")
    lines = table.read_text(encoding="ascii").splitlines() if table.exists() else []
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), "")


def interface_towards(peer: str) -> tuple[str, int | None]:
    """Return the interface on the route to a peer, and its nominal Mbit/s."""
    like = "::" if peer.startswith("[") else WILDCARD
    name = interface_of(local_address((like, 0), [peer])[0])
    return name, _read_number(f"/sys/class/net/{name}/speed")


def resolved(peer: str, like: str) -> Address:
    """Return the numeric address of a peer, in the address family of a local one.

    Raises:
        ValueError: malformed, or the name is not known.
    """
    return resolve(peer, like=parse_address(like))


# ---- the socket, the clocks, the kernel -------------------------------------------------------------------------


def look_at_socket() -> Socket:
    """Send a message from one node to another on loopback and see what the system did for it."""
    secret = generate_secret()
    with (
        Node("127.0.0.1:0", secret=secret) as one,
        Node("127.0.0.1:0", [one.address], secret=secret) as two,
    ):
        one.wait_for_peers(1, LOOPBACK_LIMIT_S)
        before = two.stats()
        one.publish(bytes(LOOPBACK_BYTES))
        came = two.receive(LOOPBACK_LIMIT_S)
        after, sender = two.stats(), one.stats().socket
    calls = after.socket.receive_calls - before.socket.receive_calls
    datagrams = after.datagrams_received - before.datagrams_received
    return describe_socket(sender, datagrams / calls if came and calls else 0.0)


def describe_socket(stats: SocketStats, datagrams_per_receive: float) -> Socket:
    """Return what a node's socket was given; Linux shows twice what it grants."""
    double = 2 if sys.platform == "linux" else 1
    return Socket(
        wanted_bytes=SOCKET_BUFFER_BYTES,
        receive_bytes=stats.receive_buffer_bytes // double,
        send_bytes=stats.send_buffer_bytes // double,
        receive_bytes_max=_read_number("/proc/sys/net/core/rmem_max"),
        send_bytes_max=_read_number("/proc/sys/net/core/wmem_max"),
        has_gso=stats.has_gso,
        has_gro=stats.has_gro,
        datagrams_per_receive=datagrams_per_receive,
    )


def look_at_clocks() -> Clocks:
    """Return the smallest step of the monotonic clock, and the wall clock."""
    steps = []
    last_s = time.monotonic()
    for _ in range(CLOCK_STEPS):
        while (now_s := time.monotonic()) == last_s:
            continue
        steps.append(now_s - last_s)
        last_s = now_s
    return Clocks(step_s=min(steps), wall_s=time.time())


def read_drops(*tables: Path) -> Drops | None:
    """Return the kernel's counters of UDP over IPv4 and IPv6."""
    texts = [table.read_text(encoding="ascii") for table in tables if table.exists()]
    return parse_drops("\n".join(texts)) if texts else None


def parse_drops(text: str) -> Drops:
    """Return the counters in /proc/net/snmp (a line of names, a line of values) and snmp6 (a line for each)."""
    counters: dict[str, int] = {}
    names, values = (re.findall(rf"^Udp: ([{kind} ]+)$", text, re.M) for kind in ("A-Za-z", "0-9"))
    for line_of_names, line_of_values in zip(names, values, strict=False):
        counters.update(zip(line_of_names.split(), map(int, line_of_values.split()), strict=False))
    counters.update(
        (name, int(value)) for name, value in re.findall(r"^(Udp6\w+)\s+(\d+)$", text, re.M)
    )
    return Drops(
        received=counters.get("InDatagrams", 0) + counters.get("Udp6InDatagrams", 0),
        dropped=counters.get("RcvbufErrors", 0) + counters.get("Udp6RcvbufErrors", 0),
    )


def _read_number(path: str) -> int | None:
    """Return a positive number in a file of the system; interfaces without a rate say -1, or refuse to be read."""
    try:
        number = int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number > 0 else None
