"""Checks of one machine. They need no privileges and no peer."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import gradwire as gw
from gradwire import _core, rendezvous, shared_memory
from gradwire.shared_memory import Usage
from gradwire.transport import Node, SocketStats, addressing, generate_secret, parse_secret
from gradwire.transport.secret import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    environment_secret,
    fingerprint,
)

from ..units import si

BUFFER_BYTES: Final = 4 << 20  # what a node asks for
RECORD_BYTES: Final = 62_000
RECORDS: Final = 50
AES_SLOW_BYTES_PER_S: Final = 1e9
SHARED_MEMORY_MIN_BYTES: Final = (
    1 << 28
)  # Docker gives 64 MB, enough for two workers of 3 million parameters
WALL_CLOCK_MIN_S: Final = 1_700_000_000.0
LAUNCHER: Final = "launcher"
REMEDY: Final = (
    'export GRADWIRE_SECRET="$(gradwire secret)"   # once; then the same on every machine'
)


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was checked.
        verdict: "ok"; "slow" if it works and costs speed; "FAIL" if it does not work; "n/a" if it does not apply.
        says: the finding.
        helps: commands that help.
    """

    name: str
    verdict: Literal["ok", "slow", "FAIL", "n/a"]
    says: str
    helps: tuple[str, ...] = ()


def slow_if(is_slow: bool, name: str, says: str, *helps: str) -> Check:
    """Return a check with the verdict "slow" and the commands that help, or one with the verdict "ok"."""
    return Check(name, "slow", says, helps) if is_slow else Check(name, "ok", says)


def check(bind: str, mask: str | None, peer: str | None, *, needs_secret: bool) -> Iterator[Check]:
    """Yield the checks of a node that is to bind an address, and to reach a peer if there is one.

    Raises:
        ValueError: ``bind`` or ``peer`` is not an address, or ``peer`` has no port to connect to.
    """
    addressing.parse_address(bind)
    if peer is not None and not addressing.parse_address(peer)[1]:
        raise ValueError(
            f"address {peer!r}: nothing can be reached at port 0: give the port of `gradwire doctor --serve`, from 1 "
            "to 65535"
        )
    try:
        yield check_instruction_set(_core.isa(), gw.backends())
    except gw.BackendUnavailable as error:
        yield Check("instruction set", "FAIL", str(error), ("unset GRADWIRE_ISA",))
    yield check_encryption(max(aes_bytes_per_s() for _ in range(5)))
    yield check_secret(needs_it=needs_secret)
    yield from check_binding(bind, mask, peer)
    yield from check_socket(socket_stats(), sys.platform)
    if shared_memory.FOLDER.is_dir():
        yield check_shared_memory(shared_memory.usage(), shutil.disk_usage(shared_memory.FOLDER))
    yield check_clock(time.time())
    yield check_launcher()


def check_instruction_set(name: str, usable: Sequence[str]) -> Check:
    """Check the instruction set in use against the usable ones."""
    is_slow = name == "scalar" and len(usable) > 1
    says = f"{name}; usable: {', '.join(usable)}"
    return slow_if(is_slow, "instruction set", says, "unset GRADWIRE_ISA")


def check_encryption(bytes_per_s: float) -> Check:
    """Check the speed of AES-128-GCM."""
    says = f"AES-128-GCM at {bytes_per_s / 1e9:.2f} GB/s"
    help_ = "grep -m1 -o -w aes /proc/cpuinfo   # does the processor have AES instructions?"
    return slow_if(bytes_per_s < AES_SLOW_BYTES_PER_S, "encryption", says, help_)


def aes_bytes_per_s() -> float:
    """Return the speed of encrypting records, by processor time so that other load does not count."""
    aead = AESGCM(bytes(16))
    plain = bytes(RECORD_BYTES)
    started_s = time.process_time()
    for number in range(RECORDS):
        aead.encrypt(number.to_bytes(12, "little"), plain, None)
    return RECORDS * RECORD_BYTES / (time.process_time() - started_s)


def check_secret(*, needs_it: bool) -> Check:
    """Check the secret of the environment, without showing it."""
    try:
        if environment_secret() is None:
            says = "neither GRADWIRE_SECRET nor GRADWIRE_SECRET_FILE is set"
            return Check("secret", "FAIL" if needs_it else "n/a", says, (REMEDY,))
        says = f"fingerprint {fingerprint(parse_secret(None))}, the same on every machine"
    except ValueError as error:
        # Beside the variable of a file, that of a secret would be one too many.
        remedy = REMEDY
        if os.environ.get(SECRET_FILE_VARIABLE):
            is_second = bool(os.environ.get(SECRET_VARIABLE))
            remedy = "unset GRADWIRE_SECRET_FILE" + ("" if is_second else f"; {REMEDY}")
        return Check("secret", "FAIL", str(error), (remedy,))
    return Check("secret", "ok", says)


def check_binding(bind: str, mask: str | None, peer: str | None) -> Iterator[Check]:
    """Check which address a node takes, and whether it can bind the port."""
    asked = addressing.parse_address(bind)
    rule = addressing.deciding_rule(asked, mask)
    try:
        chosen = addressing.choose_address(asked, mask)
    except ValueError as error:
        helps = ("ip -brief address", "give another --mask, or --bind with one of these addresses")
        yield Check("address", "FAIL", str(error), helps)
        return
    if peer and rule == "route":
        try:
            addressing.resolve_all(peer, like=chosen)
        except ValueError as error:
            yield Check("address", "n/a", f"no route can be looked up: {error}")
            yield check_port(chosen)
            return
    every = "every address of this machine; --mask or GRADWIRE_IP chooses one"
    why = {
        "bind": f"given by --bind {bind}",
        "mask": f"the one address inside {mask}",
        "variable": f"GRADWIRE_IP is {os.environ.get('GRADWIRE_IP')}",
        "route": f"on the route to {peer}" if peer else every,
    }[rule]
    shown = addressing.local_address(chosen, [peer]) if peer else chosen
    host = addressing.format_address(shown).rpartition(":")[0]
    yield Check("address", "ok", f"{host}: {why}")
    yield check_port(chosen)


def check_port(address: tuple[str, int]) -> Check:
    """Check whether a node can bind an address."""
    text = addressing.format_address(address)
    try:
        with Node(text, secret=generate_secret()):
            return Check("port", "ok", f"UDP {text} can be bound")
    except OSError as error:
        port = address[1]
        users = f"sudo ss -ulpn 'sport = :{port}'   # macOS: lsof -nP -iUDP:{port}"
        helps = {
            errno.EADDRINUSE: (users,),
            errno.EADDRNOTAVAIL: ("ip -brief address   # macOS: ifconfig",),
            errno.EACCES: ("choose a port above 1023",),
        }
        says = f"UDP {text}: {error.strerror}"
        return Check("port", "FAIL", says, helps.get(error.errno or 0, ()))


def socket_stats() -> SocketStats:
    """Return what the system gives a node's socket, after one message over loopback."""
    secret = generate_secret()
    with (
        Node("127.0.0.1:0", secret=secret) as receiver,
        Node("127.0.0.1:0", [receiver.address], secret=secret) as sender,
    ):
        sender.wait_for_peers(1, timeout_s=10.0)
        sender.publish(bytes(1 << 20))
        sender.drain(timeout_s=10.0)
        return sender.stats().socket


def check_socket(stats: SocketStats, platform: str) -> Iterator[Check]:
    """Check the buffers of a socket, and whether many datagrams move with one call."""
    double = 2 if platform == "linux" else 1  # Linux reports twice what it grants
    granted = {
        "rmem_max": stats.receive_buffer_bytes // double,
        "wmem_max": stats.send_buffer_bytes // double,
    }
    says = "receive {} KiB, send {} KiB".format(*(nbytes >> 10 for nbytes in granted.values()))
    short = [f"net.core.{name}={BUFFER_BYTES}" for name in granted if granted[name] < BUFFER_BYTES]
    says += f" of {BUFFER_BYTES >> 10} KiB: bursts will be dropped" if short else ""
    settings = " ".join(short) if platform == "linux" else f"kern.ipc.maxsockbuf={2 * BUFFER_BYTES}"
    help_ = f"sudo sysctl -w {settings}   # to keep it, in a file of /etc/sysctl.d"
    yield slow_if(bool(short), "socket buffers", says, help_)
    if platform != "linux":
        yield Check("GSO, GRO", "n/a", "only Linux has them")
        return
    missing = ["GSO"] * (not stats.has_gso) + ["GRO"] * (not stats.has_gro)
    says = f"no {' and '.join(missing)}: one call per datagram" if missing else "both in use"
    help_ = "uname -r   # Linux 5.0 and later have both"
    yield slow_if(bool(missing), "GSO, GRO", says, help_)


def check_shared_memory(usage: Usage, space: tuple[int, int, int]) -> Check:
    """Check the space for teams, hosted models and feeds, and whether killed processes have left memory.

    Args:
        usage: of gradwire's files of this user.
        space: total, used and free bytes, as `shutil.disk_usage` has them.
    """
    total_bytes, _, free_bytes = space
    says = f"{shared_memory.FOLDER} has {si(free_bytes, 'B')} of {si(total_bytes, 'B')} free"
    says += f"; {si(usage.held_bytes, 'B')} in use by gradwire"
    helps = []
    if usage.left_bytes:
        says += f"; {si(usage.left_bytes, 'B')} left by killed processes"
        helps.append(
            'python -c "from gradwire.shared_memory import free_leftovers; free_leftovers()"   '
            "# as any new team, model or feed does"
        )
    if total_bytes < SHARED_MEMORY_MIN_BYTES:
        helps.append("docker run --shm-size=8g   # a team of n needs 4 (2 + n) bytes a parameter")
    return slow_if(bool(helps), "shared memory", says, *helps)


def check_clock(wall_s: float) -> Check:
    """Check that the wall clock is plausible."""
    if wall_s >= WALL_CLOCK_MIN_S:
        return Check("clock", "ok", "plausible")
    says = "years late: a node that restarts would not count as newer than its earlier run"
    return Check("clock", "FAIL", says, ("sudo timedatectl set-ntp true",))


def check_launcher() -> Check:
    """Check what the launcher's variables and gradwire's own say to a training that would start here."""
    try:
        place = rendezvous.placement()
        per_machine = place.local_size > 1  # as `share` does: a team has one node
        options = place.node_options(per_machine=per_machine)
    except ValueError as error:
        return Check(LAUNCHER, "FAIL", str(error))
    if place.hint:
        return Check(LAUNCHER, "FAIL", place.hint)
    expected = place.expected_peers(per_machine=per_machine)
    if expected == 0 and place.rank is None:
        return Check(LAUNCHER, "n/a", "no variables of one: a training that starts here is alone")
    says = []
    if place.rank is not None:
        says.append(f"{place.launcher}: rank {place.rank} of {place.size}")
        if place.local_size > 1:
            says.append(f"local rank {place.local_rank} of {place.local_size}")
    says.append(f"binds {options['bind']}")
    if options["peers"]:
        says.append(f"peers {', '.join(options['peers'])}")
    waits = len(options["peers"]) if expected is None else expected
    says.append(f"waits for {waits} other node{'s' * (waits != 1)}")
    return Check(LAUNCHER, "ok", "; ".join(says))
