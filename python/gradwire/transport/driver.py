"""The socket and the clock: the only file of the transport that moves datagrams or reads the time.

Linux moves up to 52 datagrams per system call (GSO on send, GRO on receive), 40 times as many bytes per second as one
call per datagram. Where that is missing or refused, the driver sends and receives datagrams one by one, and logs it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from .addressing import format_address, local_addresses
from .types import Address, SocketStats, Stats, Transmit

logger = logging.getLogger(__name__)

UDP_SEGMENT: Final = 103  # absent from the socket module
UDP_GRO: Final = 104
SO_RXQ_OVFL: Final = 40
# (level, option): do not set "do not fragment", so a path with a small MTU fragments instead of losing every datagram.
MTU_DISCOVER: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, 10),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 23),
}
PMTUDISC_DONT: Final = 0
SOCKET_BUFFER_BYTES: Final = 4 << 20
RECEIVE_BUFFER_BYTES: Final = 65_536  # a GRO batch that does not fit would be truncated
RECEIVES_PER_PUMP: Final = 32
SENDS_PER_PUMP: Final = 8
IDLE_WAIT_S: Final = 1.0
# Errors of a segmentation offload that the kernel or the device does not support.
GSO_REFUSED: Final = frozenset(
    {errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
)
TRY_LATER: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})
SIZE_REMEDY: Final = (
    "lower Limits(datagram_bytes=...) to the interface's MTU less 28 bytes (IPv4) or 48 (IPv6)"
)

now_s = time.monotonic


class Endpoint(Protocol):
    """The protocol of a node, as the driver uses it; see `gradwire.transport.endpoint.Endpoint`."""

    counters: Stats

    def receive(self, data: memoryview, segment_bytes: int, address: Address, now_s: float) -> None:
        """Process datagrams from one address."""

    def poll(self, now_s: float) -> list[Transmit]:
        """Return the datagrams to send now."""

    def next_timeout_s(self, now_s: float) -> float | None:
        """Return the time at which to call `poll` next."""


class Driver:
    """Moves datagrams between one endpoint and one UDP socket. Not thread-safe: the node holds a lock.

    Args:
        bind: local address; port 0 lets the system choose.
        offload: use GSO and GRO where the system has them.

    Raises:
        OSError: the address cannot be bound; the message names it.
    """

    def __init__(self, bind: Address, *, offload: bool = True) -> None:
        family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind(bind)
        except OSError as error:
            self._socket.close()
            what = f"cannot bind UDP {format_address(bind)}: {error.strerror}"
            if error.errno == errno.EADDRNOTAVAIL:
                what += f"; this machine has {', '.join(local_addresses())}"
            raise OSError(error.errno, what) from error
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.address: Address = (host, port)
        self.has_gso = offload and sys.platform == "linux"
        self.has_gro = False
        self._errors = 0
        self._configure(family, offload)
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self._buffer).toreadonly()
        self._unsent: deque[Transmit] = deque()
        self._has_logged_size = False

    def _configure(self, family: socket.AddressFamily, offload: bool) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            with contextlib.suppress(OSError):  # the system caps the size by itself
                self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(*MTU_DISCOVER[family], PMTUDISC_DONT)
        if offload:
            try:
                self._socket.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
                self.has_gro = True
            except OSError:
                logger.info("this kernel has no UDP GRO; datagrams are received one by one")

    def stats(self) -> SocketStats:
        """Return the properties of the socket."""
        return SocketStats(
            has_gso=self.has_gso,
            has_gro=self.has_gro,
            receive_buffer_bytes=self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF),
            send_buffer_bytes=self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            errors=self._errors,
        )

    # ---- moving datagrams ---------------------------------------------------------------------------------------

    def receive(self, endpoint: Endpoint) -> None:
        """Hand waiting datagrams to the endpoint, up to a bound, so that sending does not have to wait."""
        time_s = now_s()
        for _ in range(RECEIVES_PER_PUMP):
            try:
                nbytes, ancillary, _, source = self._socket.recvmsg_into([self._buffer], 64)
            except OSError as error:
                if error.errno in TRY_LATER:
                    return
                self._errors += 1
                continue
            segment_bytes = nbytes
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_UDP and kind == UDP_GRO:
                    segment_bytes = struct.unpack_from("=i", data)[0]
                elif level == socket.SOL_SOCKET and kind == SO_RXQ_OVFL:
                    endpoint.counters.kernel_drops = struct.unpack_from("=I", data)[0]
            endpoint.receive(self._view[:nbytes], segment_bytes, (source[0], source[1]), time_s)

    def transmit(self, endpoint: Endpoint) -> float:
        """Send the endpoint's datagrams, up to a bound, so that receiving does not have to wait.

        Returns:
            The time until which there is nothing to do unless a datagram comes.
        """
        for _ in range(SENDS_PER_PUMP):
            if not self._send_unsent():
                break
            time_s = now_s()
            transmits = endpoint.poll(time_s)
            if not transmits:
                break
            self._unsent.extend(transmits)
            due_s = endpoint.next_timeout_s(time_s)
            if due_s is None or due_s > time_s:
                self._send_unsent()
                break
        time_s = now_s()
        due_s = endpoint.next_timeout_s(time_s)
        return time_s + IDLE_WAIT_S if due_s is None else min(due_s, time_s + IDLE_WAIT_S)

    def _send_unsent(self) -> bool:
        """Send the queued datagrams in order; return False if the socket's buffer is full."""
        while self._unsent:
            if not self._send(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def _send(self, transmit: Transmit) -> bool:
        if transmit.nbytes <= transmit.segment_bytes:
            return self._send_one(transmit.slices, transmit.address)
        if self.has_gso:
            option = (socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", transmit.segment_bytes))
            try:
                self._socket.sendmsg(transmit.slices, [option], 0, transmit.address)
                return True
            except OSError as error:
                if error.errno in TRY_LATER:
                    return False
                if error.errno not in GSO_REFUSED:
                    self._errors += 1  # no route, a firewall: to the protocol a loss like any other
                    return True
                self.has_gso = False
                logger.warning(
                    "UDP GSO was refused for datagrams of %d bytes (%s): they are sent one by one from now on; or %s",
                    transmit.segment_bytes,
                    error.strerror,
                    SIZE_REMEDY,
                )
        self._unsent.popleft()
        self._unsent.extendleft(reversed(_one_by_one(transmit)))
        return self._send(self._unsent[0])

    def _send_one(self, slices: Sequence[memoryview | bytes], address: Address) -> bool:
        try:
            self._socket.sendmsg(slices, [], 0, address)
        except OSError as error:
            if error.errno in TRY_LATER:
                return False
            self._errors += 1
            if error.errno == errno.EMSGSIZE and not self._has_logged_size:
                self._has_logged_size = True
                logger.warning(
                    "datagrams of %d bytes to %s are refused (%s); %s",
                    sum(map(len, slices)),
                    format_address(address),
                    error.strerror,
                    SIZE_REMEDY,
                )
        return True

    # ---- waiting ------------------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """Whether datagrams wait for space in the socket's buffer."""
        return bool(self._unsent)

    def wait(self, until_s: float, waker: Waker) -> None:
        """Sleep until a time, or until a datagram comes, the waker is used, or a full socket buffer has space again."""
        reads = [waker.socket, self._socket]
        writes = [self._socket] if self._unsent else []
        # When another thread has closed the socket, the caller notices it afterwards.
        with contextlib.suppress(OSError, ValueError):
            if waker.socket in _wait_ready(reads, writes, max(0.0, until_s - now_s())):
                waker.clear()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Waker:
    """Ends a `Driver.wait` in another thread."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.socket.setblocking(False)
        self._other.setblocking(False)

    def wake(self) -> None:
        """End the current wait, or the next one if no thread is waiting."""
        with contextlib.suppress(OSError):  # a full pipe wakes as well; a closed one has no reader
            self._other.send(b"\0")

    def clear(self) -> None:
        """Forget earlier calls of `wake`."""
        self.socket.recv(4_096)

    def close(self) -> None:
        """Release the sockets."""
        self.socket.close()
        self._other.close()


def _one_by_one(transmit: Transmit) -> list[Transmit]:
    """Return the same datagrams with a system call each."""
    size = transmit.segment_bytes
    return [
        Transmit(transmit.address, [piece[start : start + size]], size)
        for piece in transmit.slices
        for start in range(0, len(piece), size)
    ]


def _wait_ready(
    reads: list[socket.socket], writes: list[socket.socket], timeout_s: float
) -> list[socket.socket]:
    """Return the readable sockets. ``select`` keeps microseconds where ``poll`` rounds up to milliseconds."""
    try:
        return select.select(reads, writes, [], timeout_s)[0]
    except ValueError:  # a descriptor that is too large for select, or of a closed socket
        if not hasattr(select, "poll"):
            raise
    poller = select.poll()
    for each in reads:
        poller.register(each, select.POLLIN | (select.POLLOUT if each in writes else 0))
    ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1_000)}
    return [each for each in reads if each.fileno() in ready]
