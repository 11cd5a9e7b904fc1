"""The sockets and the clock: the only file of the transport that moves datagrams or tells the time.

Linux moves up to 45 datagrams per system call (GSO on send, GRO on receive), 40 times what one call per datagram gives.
Where that is missing or refused the driver sends and receives them one by one, and says so once. The calls themselves
are made in C++ (`_udp`), many in a row: a turn of the interpreter for each took a tenth more time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from .._udp import Alarm, Receiver, Sender
from .addressing import WILDCARDS, local_addresses
from .endpoint import Endpoint
from .model import Address, SocketStats, Transmit
from .multicast import aim, check_group, join

logger = logging.getLogger(__name__)

UDP_GRO: Final = 104  # absent from the socket module
SO_RXQ_OVFL: Final = 40
# (level, option) to set "do not fragment" without believing ICMP, and to ask for the interface's MTU
MTU_DISCOVER: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, 10),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23),
}
MTU: Final = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
PMTUDISC_PROBE: Final = 3
SOCKET_BUFFER_BYTES: Final = 4 << 20
# A whole record comes as one batch where nothing is lost: it then costs little more to take in than a burst of it.
BATCH_BYTES_MAX: Final = 4 * 65_536
ROOM_BYTES: Final = 2 * BATCH_BYTES_MAX
LOOKS_PER_PUMP: Final = 4
CALLS_PER_LOOK: Final = 32
SENDS_PER_PUMP: Final = 8
IDLE_WAIT_S: Final = 1.0
REST_FIRST_S: Final = 0.0001
REST_MAX_S: Final = 0.001
LITTLE_BYTES: Final = 16_384  # so little in one look that a longer rest may bring more
MUCH_BYTES: Final = 65_536  # so much that a socket's small buffer might overflow in a rest
# sysexits of a segmentation offload that the kernel or the device does not do.
GSO_REFUSED: Final = frozenset(
    {errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
)
TRY_LATER: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})

Waitable: TypeAlias = socket.socket | Alarm
Take: TypeAlias = Callable[[memoryview, int, Address, float], None]

now_s = time.monotonic


class Driver:
    """Moves datagrams between one endpoint and one UDP socket, and takes what comes to a multicast group.

    Not thread-safe: the node holds a lock.

    Args:
        bind: local address; port 0 lets the system choose.
        offload: use GSO and GRO where the system has them.
        group: multicast group to join.
        hops: over how many routers what is sent to the group may go, and one.

    Raises:
        OSError: the address cannot be bound, or the group not be joined; the message names it.
        ValueError: not a multicast group.
    """

    def __init__(
        self,
        bind: Address,
        *,
        offload: bool = True,
        group: Address | None = None,
        hops: int = 1,
    ) -> None:
        if group is not None:
            check_group(group, bind)
        self._family = _family_of(bind)
        self._inlet = _Inlet(socket.socket(self._family, socket.SOCK_DGRAM))
        self._socket = self._inlet.socket
        try:
            self._socket.bind(bind)
        except OSError as error:
            self._socket.close()
            what = f"cannot bind UDP {bind[0]}:{bind[1]}: {error.strerror}"
            if error.errno == errno.EADDRNOTAVAIL:
                what += f"; this machine has {', '.join(local_addresses())}"
            raise OSError(error.errno, what) from error
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.address: Address = (host, port)
        self.has_gso = offload and sys.platform == "linux"
        self.has_gro = False
        self._send_errors = 0
        self._configure(self._socket, offload)
        self._group: _Inlet | None = None
        self._own_addresses: frozenset[Address] = frozenset()
        if group is not None:
            self._join(group, hops, offload)
        self._inlets = [self._inlet] if self._group is None else [self._inlet, self._group]
        self._rest = _Rest()
        self._sender = Sender()
        self._unsent: list[Transmit] = []
        self._too_large: dict[Address, int] = {}

    def _join(self, group: Address, hops: int, offload: bool) -> None:
        host, port = self.address
        hosts = local_addresses() if host in WILDCARDS else [host]
        self._own_addresses = frozenset((each, port) for each in hosts)
        try:
            aim(self._socket, host, hops)
            self._group = _Inlet(join(group, host))
        except OSError:
            self._socket.close()
            raise
        self._configure(self._group.socket, offload)

    def _configure(self, each: socket.socket, offload: bool) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):  # the system caps it by itself
                each.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        with contextlib.suppress(OSError):  # then a path with a smaller MTU gets fragments
            each.setsockopt(*MTU_DISCOVER[self._family], PMTUDISC_PROBE)
        if offload:
            try:
                each.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
                self.has_gro = True
            except OSError:
                logger.info("this kernel has no UDP GRO; datagrams are received one by one")

    def stats(self) -> SocketStats:
        """Return what the system gives the socket."""
        return SocketStats(
            has_gso=self.has_gso,
            has_gro=self.has_gro,
            receive_buffer_bytes=self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF),
            send_buffer_bytes=self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            receive_calls=sum(each.receiver.calls for each in self._inlets),
            errors=self.socket_errors,
        )

    @property
    def socket_errors(self) -> int:
        """System calls that failed, but for those that only come too early."""
        return self._send_errors + sum(each.receiver.errors for each in self._inlets)

    # ---- moving -------------------------------------------------------------------------------------------------

    def pump(self, endpoint: Endpoint) -> float:
        """Take what has come, let the timers run, and send what is due; return what `transmit` returns."""
        self.receive(endpoint)
        return self.transmit(endpoint)

    def receive(self, endpoint: Endpoint) -> None:
        """Take what has come, up to a bound, so that sending is not kept waiting."""
        intake, group = endpoint.intake, self._group
        if group is not None:
            self._receive_from(group, intake.receive_group, endpoint)
        nbytes = self._receive_from(self._inlet, intake.receive, endpoint)
        self._rest.on_look(nbytes)
        # What the group brought before something else, while this thread slept between the two sockets, must be taken
        # before that is acknowledged, or it counts as overtaken and lost.
        if nbytes and group is not None:
            self._receive_from(group, intake.receive_group, endpoint)

    def _receive_from(self, inlet: _Inlet, take: Take, endpoint: Endpoint) -> int:
        """Take what a socket has; neighbours of one sender and one size as one batch, up to a record at a time.

        Returns:
            The bytes that it had.
        """
        time_s = now_s()
        receiver, view = inlet.receiver, inlet.view
        descriptor = inlet.socket.fileno()
        nbytes = 0
        for _ in range(LOOKS_PER_PUMP):
            for start, end, segment_bytes, sender in receiver.receive(descriptor, CALLS_PER_LOOK):
                nbytes += end - start
                # What this node itself has sent to the group comes back to it.
                if inlet is not self._group or sender not in self._own_addresses:
                    take(view[start:end], segment_bytes, sender, time_s)
            if receiver.is_empty:
                break
        if nbytes:
            endpoint.counters.kernel_drops = sum(each.receiver.drops for each in self._inlets)
        return nbytes

    def transmit(self, endpoint: Endpoint) -> float:
        """Send what the endpoint has for now, up to a bound, so that receiving is not kept waiting.

        Returns:
            Until when there is nothing to do unless a datagram comes.
        """
        for _ in range(SENDS_PER_PUMP):
            if self._unsent and not self._send_all([]):
                break
            if self._too_large:
                self._report_too_large(endpoint)
            time_s = now_s()
            transmits = endpoint.poll(time_s)
            until_s = _bounded(endpoint.next_timeout_s(time_s), time_s)
            if not transmits:
                return until_s
            if not self._send_all(transmits):
                break
            if until_s > time_s:
                return until_s
        return self.deadline_s(endpoint)

    def transmit_data(self, endpoint: Endpoint) -> None:
        """Send the data that may leave at once, unless the socket's buffer is full."""
        if not self._unsent:
            self._send_all(endpoint.poll_data(now_s()))

    def _report_too_large(self, endpoint: Endpoint) -> None:
        while self._too_large:
            address, nbytes = self._too_large.popitem()
            endpoint.on_too_large(address, nbytes, now_s())

    def _send_all(self, transmits: list[Transmit]) -> bool:
        """Send in order; return False if the socket's buffer is full, keeping the rest."""
        transmits, self._unsent = self._unsent + transmits, []
        if not self.has_gso:
            transmits = list(map(_one_by_one, transmits))
        index = call = 0
        while True:
            index, call, code = self._sender.send(self._socket.fileno(), transmits, index, call)
            if not code:
                return True
            transmit = transmits[index]
            if code in TRY_LATER:
                self._unsent = [transmit.rest(call), *transmits[index + 1 :]]
                return False
            nbytes = sum(map(len, transmit.calls[call]))
            datagram_bytes = min(nbytes, transmit.segment_bytes or nbytes)
            if datagram_bytes == nbytes or code not in GSO_REFUSED:
                self._note_failed(code, datagram_bytes, transmit.address)
                call += 1
            elif self._send_without_gso(transmit.rest(call), code):
                index, call = index + 1, 0
                if not self.has_gso:
                    transmits[index:] = map(_one_by_one, transmits[index:])
            else:
                self._unsent += transmits[index + 1 :]
                return False

    def _send_without_gso(self, transmit: Transmit, code: int) -> bool:
        """Find out by single datagrams whether GSO was refused or their size."""
        is_done = self._send_all([_one_by_one(transmit)])
        if is_done and transmit.address not in self._too_large:
            self.has_gso = False
            logger.warning(
                "UDP GSO was refused (%s); datagrams are sent one by one from now on",
                os.strerror(code),
            )
        return is_done

    def _note_failed(self, code: int, datagram_bytes: int, address: Address) -> None:
        """No route, no buffer, a firewall: to the protocol that is a loss like any other. A size is worth knowing."""
        self._send_errors += 1
        if code == errno.EMSGSIZE:
            known = self._too_large.get(address, datagram_bytes)
            self._too_large[address] = min(known, datagram_bytes)

    # ---- waiting ------------------------------------------------------------------------------------------------

    def deadline_s(self, endpoint: Endpoint) -> float:
        """Return until when there is nothing to do unless a datagram comes."""
        time_s = now_s()
        return _bounded(endpoint.next_timeout_s(time_s), time_s)

    def rest_s(self, endpoint: Endpoint) -> float:
        """Return how long datagrams may lie in the socket now, so that one look takes several of them."""
        return self._rest.next_s(is_patient=endpoint.is_patient)

    def wait(
        self, until_s: float, waker: Waker, *, for_datagrams: bool = True, rest_s: float = 0.0
    ) -> None:
        """Sleep until a time or until the waker rings, for datagrams also until one comes or can be sent again.

        For the first ``rest_s`` seconds datagrams do not count.
        """
        bells: list[Waitable] = [waker.socket]
        if waker.alarm is not None:
            bells.append(waker.alarm)
        time_s = now_s()
        rested_s = min(until_s, time_s + rest_s)
        if rested_s > time_s and (_sleep(bells, [], rested_s, waker) or rested_s == until_s):
            return
        sources: list[Waitable] = [each.socket for each in self._inlets] if for_datagrams else []
        writes: list[Waitable] = [self._socket] if for_datagrams and self._unsent else []
        _sleep(bells + sources, writes, until_s, waker)

    def close(self) -> None:
        """Close the sockets."""
        for each in self._inlets:
            each.socket.close()


class _Inlet:
    """A socket, and what takes its datagrams."""

    def __init__(self, source: socket.socket) -> None:
        self.socket = source
        self.receiver = Receiver(ROOM_BYTES, BATCH_BYTES_MAX)
        self.view = memoryview(self.receiver)


class _Rest:
    """How long to leave datagrams in the socket, as network cards moderate their interrupts.

    Over a slow link each datagram comes alone, and to wake up for it costs more than to take it in.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def on_look(self, nbytes: int) -> None:
        """Learn from what a look at the socket has brought."""
        if nbytes > MUCH_BYTES:
            self._seconds = 0.0
        elif 0 < nbytes <= LITTLE_BYTES:
            self._seconds = min(max(2 * self._seconds, REST_FIRST_S), REST_MAX_S)

    def next_s(self, *, is_patient: bool) -> float:
        """Return how long to rest now; the first rests after a time without any are short."""
        if not is_patient:
            self._seconds = 0.0
        return self._seconds


class Waker:
    """Makes a `Driver.wait` in another thread return.

    Args:
        has_alarm: also at times that are set.
    """

    def __init__(self, *, has_alarm: bool = False) -> None:
        self.socket, self._bell = socket.socketpair()
        self.socket.setblocking(False)
        self._bell.setblocking(False)
        self.alarm: Alarm | None = None
        if has_alarm:
            with contextlib.suppress(OSError):  # a system without such timers
                self.alarm = Alarm()

    def ring(self) -> None:
        """Wake whoever waits; if nobody does, the next wait returns at once."""
        with contextlib.suppress(
            OSError
        ):  # a full pipe wakes just as well, a closed one has nobody to wake
            self._bell.send(b"\0")

    def ring_at(self, at_s: float) -> None:
        """Wake whoever waits then; at once where the system has no timer for that."""
        if self.alarm is None:
            self.ring()
        else:
            self.alarm.set(at_s)

    def calm(self) -> None:
        """Do not ring at any time that was set."""
        if self.alarm is not None:
            self.alarm.clear()

    def clear(self) -> None:
        """Forget the rings so far."""
        self.socket.recv(4_096)

    def close(self) -> None:
        """Release the sockets."""
        self.alarm = None
        self.socket.close()
        self._bell.close()


def _sleep(reads: list[Waitable], writes: list[Waitable], until_s: float, waker: Waker) -> bool:
    """Sleep until a time or until one of these is ready; return whether one is."""
    try:
        ready = _wait_ready(reads, writes, max(0.0, until_s - now_s()))
        if waker.socket in ready:
            waker.clear()
        if waker.alarm in ready:
            waker.calm()
        return bool(ready)
    except (OSError, ValueError):
        return True  # another thread has closed the socket; the caller sees it afterwards


def _bounded(at_s: float | None, time_s: float) -> float:
    return time_s + IDLE_WAIT_S if at_s is None else min(at_s, time_s + IDLE_WAIT_S)


def _one_by_one(transmit: Transmit) -> Transmit:
    """Return what sends the same datagrams with a system call each."""
    size = transmit.segment_bytes
    if not size or transmit.nbytes <= size:
        return transmit
    calls = [
        [piece[start : start + size]]
        for slices in transmit.calls
        for piece in slices
        for start in range(0, len(piece), size)
    ]
    return Transmit(transmit.address, calls, 0, transmit.nbytes)


def interface_mtu(address: Address) -> int | None:
    """Return the MTU of the interface through which an address is reached; None where the system does not say."""
    if sys.platform != "linux":
        return None
    family = _family_of(address)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # UDP: sends nothing, only looks the route up
            return probe.getsockopt(*MTU[family])
    except OSError:
        return None


def _family_of(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _wait_ready(reads: list[Waitable], writes: list[Waitable], timeout_s: float) -> list[Waitable]:
    """Return the sockets that can be read. ``select`` keeps microseconds where ``poll`` rounds up to milliseconds."""
    try:
        return select.select(reads, writes, [], timeout_s)[0]
    except ValueError:  # a descriptor that is too large for it, or of a closed socket
        if not hasattr(select, "poll"):
            raise
    poller = select.poll()
    for each in reads:
        poller.register(each, select.POLLIN)
    for each in writes:
        poller.register(each, select.POLLOUT | (select.POLLIN if each in reads else 0))
    ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1_000)}
    return [each for each in reads if each.fileno() in ready]
