"""From facts to verdicts: what is well, what costs speed, what does not work, and the command that helps."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from gradwire.transport.membership import TIMELY_S

from .facts import Binding, Clocks, Flow, Installation, Link, Machine, Secret, Socket

Verdict: TypeAlias = Literal["ok", "slow", "FAIL", "n/a"]
Helps: TypeAlias = tuple[str, ...]
Reached: TypeAlias = Literal["doctor", "node", "refused", "silent", "unknown host"]

AES_SLOW_BYTES_PER_S: Final = 1e9
CLOCK_STEP_MAX_S: Final = 1e-4
# A node that starts counts as newer than its earlier run by the wall clock.
WALL_CLOCK_MIN_S: Final = 1_700_000_000.0
SET_TIME: Final = "sudo timedatectl set-ntp true"
DROPPED_SHARE_MAX: Final = 1e-4
SWITCH_INTERVAL_MAX_S: Final = 1e-3
DATAGRAM_BYTES: Final = 1_400
LINK_SHARE_MIN: Final = 0.8
PROCESSOR_BUSY: Final = 0.85
RESENT_SHARE_MAX: Final = 0.02
TAIL_MAX: Final = 20.0
TAIL_MIN_S: Final = 0.01


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        verdict: "ok"; "slow" if it works and costs speed; "FAIL" if it does not work; "n/a" if it cannot be told here.
        says: what was found.
        helps: commands or advice, one per line; empty if nothing is wrong.
    """

    name: str
    verdict: Verdict
    says: str
    helps: Helps = ()


def judge_machine(machine: Machine, *, needs_secret: bool) -> Iterator[Check]:
    """Yield the verdicts that need no peer; a missing secret is a failure only where one is needed now."""
    yield from judge_installation(machine.installation)
    yield judge_secret(machine.secret, needs_it=needs_secret)
    yield judge_interface(machine.binding)
    yield judge_port(machine.binding, machine.system)
    if machine.socket is not None:
        yield judge_buffers(machine.socket, machine.system)
        yield judge_offload(machine.socket, machine.system)
    yield judge_drops(machine)
    yield from judge_clocks(machine.clocks)
    yield judge_switch_interval(machine.switch_interval_s)
    yield judge_processors(machine.cpus)


def judge_installation(found: Installation) -> Iterator[Check]:
    """Yield what the codec runs on, and how fast records are sealed."""
    usable = f"usable: {', '.join(found.backends)}"
    if found.instruction_set_problem:
        why = found.instruction_set_problem
        yield Check("instruction set", "FAIL", why, ("unset GRADWIRE_ISA",))
    elif found.instruction_set == "scalar":
        helps: Helps = ("unset GRADWIRE_ISA",) if len(found.backends) > 1 else ()
        yield Check("instruction set", "slow", f"scalar; {usable}", helps)
    else:
        yield Check("instruction set", "ok", f"{found.instruction_set}; {usable}")
    if found.seals_in_place:
        yield Check("cryptography", "ok", f"{found.cryptography}, seals in place")
    else:
        says = f"{found.cryptography} has no encrypt_into: 10 to 30 % more work per record"
        upgrade = ("python -m pip install --upgrade 'cryptography>=47'",)
        yield Check("cryptography", "slow", says, upgrade)
    rate = f"AES-128-GCM at {found.aes_bytes_per_s / 1e9:.2f} GB/s"
    if found.aes_bytes_per_s >= AES_SLOW_BYTES_PER_S:
        yield Check("encryption", "ok", rate)
    else:
        says = f"{rate}: this processor, or its virtual machine, has no AES instructions"
        yield Check("encryption", "slow", says, ("grep -m1 -o -w aes /proc/cpuinfo",))


def judge_secret(found: Secret, *, needs_it: bool) -> Check:
    """Return whether there is a secret, and a good one; it is never shown."""
    make = 'export GRADWIRE_SECRET="$(gradwire secret)"   # once; then the same on every machine'
    if found.problem:
        return Check("secret", "FAIL", found.problem, (make,))
    if found.is_set:
        says = f"GRADWIRE_SECRET is there and strong; fingerprint {found.fingerprint}, the same on every machine"
        return Check("secret", "ok", says)
    if needs_it:
        return Check("secret", "FAIL", "GRADWIRE_SECRET is not set", (make,))
    says = "GRADWIRE_SECRET is not set: a node then needs secret=..."
    return Check("secret", "n/a", says, (make,))


def judge_interface(found: Binding) -> Check:
    """Return which address is taken, and why."""
    if found.problem and found.error_number is None:
        helps: Helps = (
            "ip -brief address",
            "give another --mask, or --bind with one of these addresses",
        )
        return Check("interface", "FAIL", found.problem, helps)
    why = {
        "bind": f"given by --bind {found.asked}",
        "mask": f"the one address inside {found.detail}",
        "variable": f"GRADWIRE_IP is {found.detail}",
        "route": f"on the route to {found.detail}" if found.detail else "nothing else was said",
    }[found.rule]
    host = found.address.rpartition(":")[0] or found.asked.rpartition(":")[0]
    at = f"{host} on {found.interface}" if found.interface else host
    facts = [f"MTU {found.interface_mtu}"] if found.interface_mtu else []
    facts += [f"{found.interface_mbit} Mbit/s"] if found.interface_mbit else []
    says = ", ".join([f"{at}: {why}", *facts])
    if found.rule == "route" and not found.detail:
        helps = ("for other machines give --mask, such as 10.1.1.0/24, or set GRADWIRE_IP",)
        return Check("interface", "n/a", says, helps)
    return Check("interface", "ok", says)


def judge_port(found: Binding, system: str) -> Check:
    """Return whether the port can be bound."""
    if not found.problem:
        return Check("port", "ok", f"UDP {found.asked} can be bound")
    if found.error_number is None:
        return Check("port", "n/a", "there is no address to bind")
    port = found.asked.rpartition(":")[2]
    list_ports = (
        f"sudo ss -ulpn 'sport = :{port}'" if system == "Linux" else f"lsof -nP -iUDP:{port}"
    )
    helps = {
        errno.EADDRINUSE: (list_ports,),
        errno.EADDRNOTAVAIL: ("ip -brief address" if system == "Linux" else "ifconfig",),
        errno.EACCES: ("choose a port above 1023",),
    }
    return Check("port", "FAIL", found.problem, helps.get(found.error_number, ()))


def judge_buffers(found: Socket, system: str) -> Check:
    """Return whether the socket's buffers are as large as a node wants them."""
    granted = f"receive {_size(found.receive_bytes)}, send {_size(found.send_bytes)}"
    if min(found.receive_bytes, found.send_bytes) >= found.wanted_bytes:
        return Check("socket buffers", "ok", granted)
    says = f"{granted}; a node asks for {_size(found.wanted_bytes)}: bursts will be dropped"
    helps: Helps = ()
    if system == "Linux":
        short = [
            f"net.core.{name}={found.wanted_bytes}"
            for name, most in (
                ("rmem_max", found.receive_bytes_max),
                ("wmem_max", found.send_bytes_max),
            )
            if most is None or most < found.wanted_bytes
        ]
        names = [f"net.core.{name}={found.wanted_bytes}" for name in ("rmem_max", "wmem_max")]
        settings = " ".join(short or names)
        helps = (
            f"sudo sysctl -w {settings}",
            f"echo {settings} | tr ' ' '\\n' | sudo tee /etc/sysctl.d/90-gradwire.conf   # to keep it",
        )
    elif system == "Darwin":
        helps = (f"sudo sysctl -w kern.ipc.maxsockbuf={2 * found.wanted_bytes}",)
    return Check("socket buffers", "slow", says, helps)


def judge_offload(found: Socket, system: str) -> Check:
    """Return whether many datagrams move with one call."""
    if system != "Linux":
        return Check("GSO, GRO", "n/a", f"{system} has neither: one call per datagram")
    missing = [name for name, has in (("GSO", found.has_gso), ("GRO", found.has_gro)) if not has]
    if missing:
        says = f"no {' and no '.join(missing)}: one call per datagram, about 40 times the work"
        helps = ("uname -r   # GSO needs Linux 4.18, GRO 5.0; some sandboxes have neither",)
        return Check("GSO, GRO", "slow", says, helps)
    says = f"both on, {found.datagrams_per_receive:.0f} datagrams per receiving call on loopback"
    return Check("GSO, GRO", "ok", says)


def judge_drops(machine: Machine) -> Check:
    """Return whether the kernel has dropped datagrams for want of room."""
    drops = machine.drops
    if drops is None:
        return Check("kernel drops", "n/a", f"{machine.system} does not tell")
    says = f"{drops.dropped} of {drops.received + drops.dropped} datagrams of all programs"
    if drops.dropped <= DROPPED_SHARE_MAX * (drops.received + drops.dropped):
        return Check("kernel drops", "ok", says)
    helps = ("nstat -az UdpRcvbufErrors   # again later: does it still grow?",)
    return Check("kernel drops", "slow", f"{says}: receivers were too slow", helps)


def judge_clocks(found: Clocks) -> Iterator[Check]:
    """Yield whether times can be measured, and whether restarts can be told from their predecessors."""
    says = f"the monotonic clock has steps of {_time(found.step_s)}"
    coarse = found.step_s > CLOCK_STEP_MAX_S
    yield Check("clock", "slow" if coarse else "ok", says)
    if found.wall_s < WALL_CLOCK_MIN_S:
        says = "years late: a node that restarts would not count as newer"
        yield Check("wall clock", "FAIL", says, (SET_TIME,))
    else:
        yield Check("wall clock", "ok", "plausible")


def judge_wall_clock(ahead_of_peer_s: float) -> Check:
    """Return whether the wall clocks of both machines agree well enough."""
    apart_s = abs(ahead_of_peer_s)
    says = f"{_time(apart_s)} {'ahead of' if ahead_of_peer_s > 0 else 'behind'} the peer's"
    if apart_s <= TIMELY_S:
        return Check("wall clocks", "ok", says)
    says += ": while strangers replay old handshakes, such a node may have to knock for long"
    return Check("wall clocks", "slow", says, (SET_TIME,))


def judge_switch_interval(interval_s: float) -> Check:
    """Return whether a busy main thread lets the I/O thread run."""
    says = f"threads take turns every {_time(interval_s)}"
    if interval_s <= SWITCH_INTERVAL_MAX_S:
        return Check("switch interval", "ok", says)
    helps = ("import sys; sys.setswitchinterval(5e-4)   # or leave Node's switch_interval_s alone",)
    return Check("switch interval", "slow", f"{says}: a busy main thread starves the I/O", helps)


def judge_processors(cpus: int) -> Check:
    """Return whether there is a processor for the I/O beside the one that computes."""
    if cpus >= 2:
        return Check("processors", "ok", f"{cpus}")
    return Check("processors", "slow", "1: computing and the I/O share it")


def judge_reached(peer: str, reached: Reached, fingerprint: str) -> Check:
    """Return whether somebody with the same secret answers there."""
    port = peer.rpartition(":")[2]
    serve = f"gradwire doctor --serve --bind 0.0.0.0:{port}   # there"
    if reached == "doctor":
        return Check("peer", "ok", f"{peer} answers and has the same secret")
    if reached == "node":
        says = f"{peer} is a node with the same secret; left alone, for a doctor is no member"
        return Check("peer", "ok", says, (f"for a test of the link stop it, then: {serve}",))
    if reached == "refused":
        return Check("peer", "FAIL", f"nothing listens on UDP port {port} there", (serve,))
    if reached == "unknown host":
        return Check(
            "peer",
            "FAIL",
            f"{peer} cannot be resolved",
            (f"getent hosts {peer.rpartition(':')[0]}",),
        )
    says = f"{peer} does not answer: not running, another secret, or a firewall"
    return Check(
        "peer",
        "FAIL",
        says,
        (
            serve,
            f"compare the fingerprint of the secret there with this one: {fingerprint}",
            f"sudo nft insert rule inet filter input udp dport {port} accept   # there; or: sudo ufw allow {port}/udp",
        ),
    )


def judge_link(link: Link, here: Machine) -> Iterator[Check]:
    """Yield what the test between two doctors says."""
    yield judge_path_mtu(link)
    if here.system == "Linux" and not link.has_gso:
        name = here.binding.interface or "eth0"
        helps = (f"sudo ethtool -K {name} tx on   # GSO needs its checksums",)
        says = f"{name} refused bursts: one call per datagram, about 40 times the work"
        yield Check("GSO on the link", "slow", says, helps)
    yield judge_round_trips(link)
    rates = [rate for rate in (here.binding.interface_mbit, link.peer_mbit) if rate]
    for name, flow in (("to the peer", link.out), ("from the peer", link.back)):
        yield judge_loss(name, flow, here)
        yield judge_goodput(name, flow, min(rates, default=None))


def judge_path_mtu(link: Link) -> Check:
    """Return whether full datagrams pass."""
    says = f"datagrams of {link.path_bytes} bytes pass"
    says += f"; the interface has {link.route_mtu}" if link.route_mtu else ""
    if link.path_bytes >= DATAGRAM_BYTES:
        return Check("path MTU", "ok", says)
    helps = (
        f"ping -M do -s {DATAGRAM_BYTES} {link.peer.rpartition(':')[0]}   # a tunnel on the way?",
    )
    return Check("path MTU", "slow", f"{says}: more datagrams for the same bytes", helps)


def judge_round_trips(link: Link) -> Check:
    """Return whether answers come evenly."""
    middle_s, tail_s = link.round_trip_s(0.5), link.round_trip_s(0.99)
    says = f"1 KB there and back: p50 {_time(middle_s)}, p99 {_time(tail_s)}"
    if tail_s > max(TAIL_MIN_S, TAIL_MAX * middle_s):
        helps = ("losses, other load on either machine, power saving, wifi",)
        return Check("round trip", "slow", says, helps)
    return Check("round trip", "ok", says)


def judge_loss(name: str, flow: Flow, here: Machine) -> Check:
    """Return whether much had to be sent again."""
    says = f"{flow.resent_share:.2%} of the datagrams sent again, {flow.kernel_drops} dropped by the kernel"
    if flow.resent_share <= RESENT_SHARE_MAX:
        return Check(f"loss {name}", "ok", says)
    if flow.kernel_drops:
        helps = ("a larger net.core.rmem_max on the receiving machine: run gradwire doctor there",)
    else:
        helps = (f"ethtool -S {here.binding.interface or 'eth0'} | grep -iE 'err|drop|crc'",)
    return Check(f"loss {name}", "slow", says, helps)


def judge_goodput(name: str, flow: Flow, nominal_mbit: int | None) -> Check:
    """Return whether everything came, and how near it comes to what the link can do."""
    label = f"goodput {name}"
    if flow.received_bytes != flow.sent_bytes:
        return Check(label, "FAIL", f"{flow.received_bytes} of {flow.sent_bytes} bytes came")
    says = f"{_rate(flow.bytes_per_s)} in messages of 1 MB"
    bounds = []
    if nominal_mbit is not None:
        bounds.append((nominal_mbit * 125_000.0, "the interface's rate"))
    if flow.tcp_bytes_per_s is not None:
        bounds.append((flow.tcp_bytes_per_s, f"TCP's {_rate(flow.tcp_bytes_per_s)}"))
    if not bounds:
        return Check(label, "ok", f"{says}; what the link can do is not known")
    most, what = min(bounds)
    share = flow.bytes_per_s / most
    says = f"{says}, {share:.0%} of {what}"
    if share >= LINK_SHARE_MIN:
        return Check(label, "ok", says)
    if max(flow.sender_cpu, flow.receiver_cpu) >= PROCESSOR_BUSY:
        end = "sender's" if flow.sender_cpu >= flow.receiver_cpu else "receiver's"
        return Check(label, "ok", f"{says}: the {end} processor is the bound")
    helps = ("again while nothing else uses the link: gradwire doctor ... --seconds 10",)
    return Check(label, "slow", says, helps)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.3g} KiB"


def _rate(bytes_per_s: float) -> str:
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    )


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
