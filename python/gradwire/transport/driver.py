"""The sockets and the clock: the only file of the transport that moves datagrams or tells the time.

Linux moves up to 45 datagrams per system call (GSO on send, GRO on receive), 40 times what one call per datagram gives.
Where that is missing or refused the driver sends and receives them one by one, and says so once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from .addressing import WILDCARDS, local_addresses
from .endpoint import Endpoint
from .model import Address, SocketStats, Transmit
from .multicast import aim, check_group, join

logger = logging.getLogger(__name__)

UDP_SEGMENT: Final = 103  # absent from the socket module
UDP_GRO: Final = 104
SO_RXQ_OVFL: Final = 40
# (level, option) to set "do not fragment" without believing ICMP, and to ask for the interface's MTU
MTU_DISCOVER: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, 10),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23),
}
MTU: Final = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
PMTUDISC_PROBE: Final = 3
SOCKET_BUFFER_BYTES: Final = 4 << 20
GRO_BYTES_MAX: Final = 65_536  # what does not fit would be cut off
# Room for a whole record: it then costs little more to take in than a burst of it.
BATCH_BYTES_MAX: Final = 4 * GRO_BYTES_MAX
ROOM_LEFT_FROM_BYTES: Final = BATCH_BYTES_MAX - GRO_BYTES_MAX
ROOMS_KEPT: Final = 64
ANCILLARY_BYTES: Final = 64
ANCILLARY_INT: Final = struct.Struct("=I")
RECEIVES_PER_PUMP: Final = 32
SENDS_PER_PUMP: Final = 8
IDLE_WAIT_S: Final = 1.0
# sysexits of a segmentation offload that the kernel or the device does not do.
GSO_REFUSED: Final = frozenset(
    {errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
)
TRY_LATER: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})

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
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM)
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
        self.socket_errors = 0
        self._receive_calls = 0
        self._configure(self._socket, offload)
        self._group: socket.socket | None = None
        self._drops: dict[socket.socket, int] = {}  # datagrams, as each socket counts them
        self._own_addresses: frozenset[Address] = frozenset()
        if group is not None:
            self._join(group, hops, offload)
        self._rooms = _Rooms(memoryview(bytearray(BATCH_BYTES_MAX)))
        self._view = self._rooms.whole.toreadonly()
        self._unsent: deque[Transmit] = deque()
        self._too_large: dict[Address, int] = {}

    def _join(self, group: Address, hops: int, offload: bool) -> None:
        host, port = self.address
        hosts = local_addresses() if host in WILDCARDS else [host]
        self._own_addresses = frozenset((each, port) for each in hosts)
        try:
            aim(self._socket, host, hops)
            self._group = join(group, host)
        except OSError:
            self._socket.close()
            raise
        self._configure(self._group, offload)

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
            receive_calls=self._receive_calls,
            errors=self.socket_errors,
        )

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
        # What the group brought before something else, while this thread slept between the two sockets, must be taken
        # before that is acknowledged, or it counts as overtaken and lost.
        if self._receive_from(self._socket, intake.receive, endpoint) and group is not None:
            self._receive_from(group, intake.receive_group, endpoint)

    def _receive_from(self, source: socket.socket, take: Take, endpoint: Endpoint) -> int:
        """Take what a socket has; neighbours of one sender and one size as one batch, up to a record at a time.

        Returns:
            How often it had something.
        """
        time_s = now_s()
        receive_into, rooms, view = source.recvmsg_into, self._rooms, self._view
        start = end = segment_bytes = gro_bytes = last_bytes = calls = 0
        sender: Address = ("", 0)
        known: list[tuple[int, int, bytes]] | None = None
        for _ in range(RECEIVES_PER_PUMP):
            try:
                nbytes, ancillary, _, origin = receive_into(rooms[end], ANCILLARY_BYTES)
            except OSError as error:
                if error.errno in TRY_LATER:
                    break
                self.socket_errors += 1
                continue
            calls += 1
            # Nearly always one more burst of the same record: whatever was asked of the last one holds for it.
            if end > start and nbytes == last_bytes and origin == sender and ancillary == known:
                end += nbytes
                if end <= ROOM_LEFT_FROM_BYTES:
                    continue
                take(view[start:end], segment_bytes, sender[:2], time_s)
                start = end = 0
                continue
            # What this node itself has sent to the group comes back to it.
            if nbytes == 0 or (source is self._group and origin[:2] in self._own_addresses):
                continue
            if ancillary != known:
                known, gro_bytes = ancillary, self._read_ancillary(source, ancillary, endpoint)
            size = gro_bytes or nbytes
            if end > start and (size != segment_bytes or origin != sender):
                take(view[start:end], segment_bytes, sender[:2], time_s)
                start = end
            segment_bytes, sender, last_bytes = size, origin, nbytes
            end += nbytes
            # A short datagram ends a batch, and one that GRO has found no neighbour for has none.
            is_last = nbytes % size or (nbytes == size and self.has_gro)
            if is_last or end > ROOM_LEFT_FROM_BYTES:
                take(view[start:end], segment_bytes, sender[:2], time_s)
                start = end = 0
        if end > start:
            take(view[start:end], segment_bytes, sender[:2], time_s)
        self._receive_calls += calls
        return calls

    def _read_ancillary(
        self, source: socket.socket, ancillary: list[tuple[int, int, bytes]], endpoint: Endpoint
    ) -> int:
        """Note the drops, and return the size of each datagram; 0 if that is not told."""
        gro_bytes = 0
        for level, kind, data in ancillary:
            if level == socket.IPPROTO_UDP and kind == UDP_GRO:
                gro_bytes = ANCILLARY_INT.unpack_from(data)[0]
            elif level == socket.SOL_SOCKET and kind == SO_RXQ_OVFL:
                self._drops[source] = ANCILLARY_INT.unpack_from(data)[0]
                endpoint.counters.kernel_drops = sum(self._drops.values())
        return gro_bytes

    def transmit(self, endpoint: Endpoint) -> float:
        """Send what the endpoint has for now, up to a bound, so that receiving is not kept waiting.

        Returns:
            Until when there is nothing to do unless a datagram comes.
        """
        for _ in range(SENDS_PER_PUMP):
            if self._unsent and not self._send_all(()):
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

    def _send_all(self, transmits: Sequence[Transmit]) -> bool:
        """Send in order; return False if the socket's buffer is full, keeping the rest."""
        unsent = self._unsent
        if not unsent:
            for index, transmit in enumerate(transmits):
                if not self._send(transmit):
                    unsent.extend(transmits[index:])
                    return False
            return True
        unsent.extend(transmits)
        while unsent:
            if not self._send(unsent[0]):
                return False
            unsent.popleft()
        return True

    def _send(self, transmit: Transmit) -> bool:
        is_single = transmit.segment_bytes == 0 or transmit.nbytes <= transmit.segment_bytes
        if is_single:
            return self._send_one(transmit.calls[0], transmit.address)
        if not self.has_gso:
            return self._send_each(transmit)
        calls, address, sendmsg = transmit.calls, transmit.address, self._socket.sendmsg
        options = _segmented(transmit.segment_bytes)
        for index, slices in enumerate(calls):
            try:
                sendmsg(slices, options, 0, address)
            except OSError as error:
                if error.errno in TRY_LATER or error.errno in GSO_REFUSED:
                    transmit.calls = calls[index:]
                    return error.errno in GSO_REFUSED and self._send_without_gso(transmit, error)
                self._note_failed(error, transmit.segment_bytes, address)
        return True

    def _send_without_gso(self, transmit: Transmit, error: OSError) -> bool:
        """Find out by single datagrams whether GSO was refused or their size."""
        is_done = self._send_each(transmit)
        if is_done and transmit.address not in self._too_large:
            self.has_gso = False
            logger.warning(
                "UDP GSO was refused (%s); datagrams are sent one by one from now on",
                error.strerror,
            )
        return is_done

    def _send_each(self, transmit: Transmit) -> bool:
        """Send the datagrams one by one; what is left when the buffer fills stays in ``transmit``."""
        rest = [
            piece[start : start + transmit.segment_bytes]
            for slices in transmit.calls
            for piece in slices
            for start in range(0, len(piece), transmit.segment_bytes)
        ]
        for index, datagram in enumerate(rest):
            if not self._send_one([datagram], transmit.address):
                transmit.calls = [[left] for left in rest[index:]]
                return False
        return True

    def _send_one(self, slices: Sequence[memoryview], address: Address) -> bool:
        try:
            self._socket.sendmsg(slices, [], 0, address)
        except OSError as error:
            if error.errno in TRY_LATER:
                return False
            self._note_failed(error, sum(len(piece) for piece in slices), address)
        return True

    def _note_failed(self, error: OSError, datagram_bytes: int, address: Address) -> None:
        """No route, no buffer, a firewall: to the protocol that is a loss like any other. A size is worth knowing."""
        self.socket_errors += 1
        if error.errno == errno.EMSGSIZE:
            known = self._too_large.get(address, datagram_bytes)
            self._too_large[address] = min(known, datagram_bytes)

    # ---- waiting ------------------------------------------------------------------------------------------------

    def deadline_s(self, endpoint: Endpoint) -> float:
        """Return until when there is nothing to do unless a datagram comes."""
        time_s = now_s()
        return _bounded(endpoint.next_timeout_s(time_s), time_s)

    def wait(self, until_s: float, waker: Waker, *, for_datagrams: bool = True) -> None:
        """Sleep until a time or until the waker rings, for datagrams also until one comes or can be sent again."""
        reads: list[socket.socket] = [waker.socket]
        writes: list[socket.socket] = []
        if for_datagrams:
            reads.append(self._socket)
            if self._group is not None:
                reads.append(self._group)
            if self._unsent:
                writes.append(self._socket)
        timeout_s = max(0.0, until_s - now_s())
        try:
            if waker.socket in _wait_ready(reads, writes, timeout_s):
                waker.clear()
        except (OSError, ValueError):
            pass  # another thread has closed the socket; the caller sees it afterwards

    def close(self) -> None:
        """Close the sockets."""
        self._socket.close()
        if self._group is not None:
            self._group.close()


class _Rooms(dict[int, list[memoryview]]):
    """Where the next datagrams go, as `recvmsg_into` wants it, for each position; most come up again and again."""

    def __init__(self, whole: memoryview) -> None:
        self.whole = whole

    def __missing__(self, position: int) -> list[memoryview]:
        """Return the room from this position on."""
        if len(self) >= ROOMS_KEPT:
            self.clear()
        room = self[position] = [self.whole[position:]]
        return room


class Waker:
    """Makes a `Driver.wait` in another thread return."""

    def __init__(self) -> None:
        self.socket, self._bell = socket.socketpair()
        self.socket.setblocking(False)
        self._bell.setblocking(False)

    def ring(self) -> None:
        """Wake whoever waits; if nobody does, the next wait returns at once."""
        with contextlib.suppress(
            OSError
        ):  # a full pipe wakes just as well, a closed one has nobody to wake
            self._bell.send(b"\0")

    def clear(self) -> None:
        """Forget the rings so far."""
        self.socket.recv(4_096)

    def close(self) -> None:
        """Release the sockets."""
        self.socket.close()
        self._bell.close()


def _bounded(at_s: float | None, time_s: float) -> float:
    return time_s + IDLE_WAIT_S if at_s is None else min(at_s, time_s + IDLE_WAIT_S)


@functools.cache
def _segmented(segment_bytes: int) -> list[tuple[int, int, bytes]]:
    """Return what has the system cut a send into datagrams of this size."""
    return [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", segment_bytes))]


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


def _wait_ready(
    reads: list[socket.socket], writes: list[socket.socket], timeout_s: float
) -> list[socket.socket]:
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
