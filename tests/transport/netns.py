"""Two hosts and a cable in network namespaces of the kernel, with a real bottleneck and real losses.

Each host is a namespace with one device. Both are plugged into a switch, a third namespace with two bridges and a
cable between them::

    host a  v0 --- bridge a  =====cable=====  bridge b --- v0  host b

Each end of the cable sends at a limited rate out of a bounded queue (tbf). Datagrams that leave the cable are lost at
random, and the kernel counts the losses (nftables, in the bridges). The cable segments bursts, so one datagram is lost
at a time; the devices of the hosts join datagrams again (GRO), as a network card does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

HOSTS = ("a", "b")
DEVICE = "v0"
# Lets a burst of 64 KB pass the shaper at once: a timer for each datagram would cost more than all the rest.
BUCKET_BYTES = 131_072
LOSS_PARTS = 1_000
ETHTOOL_SET_TSO, ETHTOOL_SET_GRO = 0x1F, 0x2C
# Arguments: device, command, value (linux/ethtool.h); 0x8946 is SIOCETHTOOL.
ETHTOOL = """
import ctypes, fcntl, socket, struct, sys
device, command, value = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
argument = ctypes.create_string_buffer(struct.pack("=II", command, value), 8)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8946, struct.pack("16sP24x", device, ctypes.addressof(argument)))
"""
_numbers = itertools.count()


@dataclass(frozen=True)
class Cable:
    """The path between the hosts, the same in both directions.

    Attributes:
        rate_mbit: rate in Mbit/s, Ethernet headers included.
        loss: share of the UDP datagrams that are lost, in steps of a thousandth.
        queue_ms: size of the queue in milliseconds of the rate; datagrams that do not fit are lost.
        mtu: size of the largest IP packet that passes, also through the devices of the hosts.
    """

    rate_mbit: int
    loss: float = 0.0
    queue_ms: float = 10.0
    mtu: int = 1_500


class Refused(Exception):
    """The kernel refused a command; the message has the command and the reason."""


class Network:
    """Two hosts with a cable between them.

    Attributes:
        addresses: IP address of each host, by name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._switch = f"{name}-s"
        self.addresses = {"a": "10.77.0.1", "b": "10.77.0.2"}

    def build(self, cable: Cable) -> None:
        """Set everything up."""
        self._add_namespaces()
        for host in HOSTS:
            self._plug_in(host, cable.mtu)
        self._add_cable(cable)
        for host in HOSTS:
            self._switch_on_gro(host)

    def within(self, host: str) -> list[str]:
        """Return the prefix of a command that is to run on a host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def lost(self, target: str) -> int:
        """Return the number of datagrams towards a host that the cable has lost at random."""
        counters = json.loads(self._in_switch("nft", "-j", "list", "counters"))["nftables"]
        found: int = next(
            entry["counter"]["packets"]
            for entry in counters
            if entry.get("counter", {}).get("name") == f"to_{target}"
        )
        return found

    def overflows(self, target: str) -> int:
        """Return how often the queue towards a host was full, for a datagram or for a burst."""
        other = next(host for host in HOSTS if host != target)
        queues = json.loads(self._in_switch("tc", "-j", "-s", "qdisc", "show", "dev", f"x{other}"))
        dropped: int = next(queue["drops"] for queue in queues if queue["kind"] == "tbf")
        return dropped

    def remove(self) -> None:
        """Take everything down again, also after an incomplete `build`."""
        for namespace in (*map(self._namespace, HOSTS), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    # ---- building -----------------------------------------------------------------------------------------------

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _in_switch(self, *command: str, text: str | None = None) -> str:
        return _run("ip", "netns", "exec", self._switch, *command, text=text)

    def _add_namespaces(self) -> None:
        for namespace in (*map(self._namespace, HOSTS), self._switch):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _plug_in(self, host: str, mtu: int) -> None:
        space, switch = self._namespace(host), self._switch
        port, bridge = f"p{host}", f"br{host}"
        _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", bridge, "up")
        _run(
            *("ip", "link", "add", DEVICE, "netns", space, "mtu", str(mtu), "type", "veth"),
            *("peer", "name", port, "netns", switch, "mtu", str(mtu)),
        )
        _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
        _run("ip", "-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", DEVICE)
        _run("ip", "-n", space, "link", "set", DEVICE, "up")

    def _add_cable(self, cable: Cable) -> None:
        switch = self._switch
        mtu = str(cable.mtu)
        _run(
            *("ip", "-n", switch, "link", "add", "xa", "mtu", mtu, "type", "veth"),
            *("peer", "name", "xb", "mtu", mtu),
        )
        for host in HOSTS:
            end = f"x{host}"
            _run("ip", "-n", switch, "link", "set", end, "gso_max_segs", "1")
            _run("ip", "-n", switch, "link", "set", end, "master", f"br{host}", "up")
            self._in_switch(
                *("tc", "qdisc", "add", "dev", end, "root", "tbf"),
                *("rate", f"{cable.rate_mbit}mbit", "burst", str(BUCKET_BYTES)),
                *("latency", f"{cable.queue_ms}ms"),
            )
        lost = round(cable.loss * LOSS_PARTS)
        rules = "".join(
            f'iifname "x{host}" meta l4proto udp numgen random mod {LOSS_PARTS} < {lost} '
            f"counter name to_{host} drop\n"
            for host in HOSTS
            if lost
        )
        counters = "".join(f"counter to_{host} {{ }}\n" for host in HOSTS)
        chain = f"chain cable {{\ntype filter hook forward priority 0; policy accept;\n{rules}}}"
        self._in_switch("nft", "-f", "-", text=f"table bridge cable {{\n{counters}{chain}\n}}\n")

    def _switch_on_gro(self, host: str) -> None:
        """Switch GRO on at the host's device; veth joins only datagrams that the other end has segmented."""
        for space, device, command, value in (
            (self._switch, f"p{host}", ETHTOOL_SET_TSO, 0),
            (self._namespace(host), DEVICE, ETHTOOL_SET_GRO, 1),
        ):
            _run(
                *("ip", "netns", "exec", space, sys.executable, "-SE", "-c", ETHTOOL),
                *(device, str(command), str(value)),
            )


@contextlib.contextmanager
def network(cable: Cable) -> Iterator[Network]:
    """Build two hosts and a cable, and take them down again in any case."""
    built = Network(f"gradwire-{os.getpid()}-{next(_numbers)}")
    try:
        built.build(cable)
        yield built
    finally:
        built.remove()


@functools.cache
def missing() -> str | None:
    """Return why networks cannot be built here, or None if they can."""
    if sys.platform != "linux":
        return "network namespaces exist only on Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [command for command in ("ip", "tc", "nft") if shutil.which(command) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (iproute2, nftables)"
    try:
        with network(Cable(rate_mbit=100, loss=0.001)) as built:
            built.lost("a")
            built.overflows("a")
    except Refused as error:
        return str(error)
    return None


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, check=False, text=True)
    if done.returncode != 0:
        raise Refused(f"{' '.join(command)!r} failed: {done.stderr.strip()}")
    return done.stdout
