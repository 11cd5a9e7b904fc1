"""The socket and the clock: the only file of the transport that moves datagrams or reads the time.

Linux moves up to 52 datagrams per system call (GSO on send, GRO on receive), elsewhere they go one by one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from typing import Any, Final

from .addressing import format_address, local_addresses
from .types import Address, SocketStats, Transmit

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
GSO_REFUSED: Final = {errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
TRY_LATER: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})
SIZE_REMEDY: Final = ": lower Limits(datagram_bytes=...) to the MTU less 44 bytes (IPv6: 64)"
now_s = time.monotonic


class Driver:
    """Moves datagrams between one endpoint and one UDP socket. Not thread-safe: the node holds a lock."""

    def __init__(self, bind: Address, *, offload: bool = True) -> None:
        family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            # A link-local address needs the number of its interface.
            self._socket.bind(socket.getaddrinfo(*bind, family, socket.SOCK_DGRAM)[0][4])
        except OSError as error:
            self._socket.close()
            here = f"; this machine has {', '.join(local_addresses())}: change bind or GRADWIRE_IP"
            free = "; end the program that has it, or give another port (0: any)"
            hints = {errno.EADDRNOTAVAIL: here, errno.EADDRINUSE: free}
            message = f"cannot bind UDP {format_address(bind)}: {error.strerror}"
            raise OSError(error.errno, message + hints.get(error.errno or 0, "")) from error
        self._alarm, self._bell = socket.socketpair()  # readable once `wake` was called
        for each in (self._socket, self._alarm, self._bell):
            each.setblocking(False)
        closing = weakref.finalize(self, self._socket.close)
        closing.atexit = False
        os.register_at_fork(after_in_child=closing)  # a forked child would keep the port
        self.address: Address = self._socket.getsockname()[:2]
        self.has_gso = offload and sys.platform == "linux"
        self.has_gro = False
        self.kernel_drops = 0  # datagrams that did not fit into the socket's receive buffer
        self._errors = 0
        self._configure(family, offload)
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self._buffer).toreadonly()
        self.unsent: deque[Transmit] = deque()  # waits for space in the socket's buffer
        self._logged: set[tuple[bool, int | None]] = set()  # refusals: whether of a datagram, errno

    def _configure(self, family: socket.AddressFamily, offload: bool) -> None:
        options = [
            (socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES),  # capped by the system
            (socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES),
        ]
        if sys.platform == "linux":
            options += [(socket.SOL_SOCKET, SO_RXQ_OVFL, 1), (*MTU_DISCOVER[family], PMTUDISC_DONT)]
        for option in options:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(*option)
        if offload and sys.platform == "linux":
            with contextlib.suppress(OSError):  # an older kernel
                self._socket.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
                self.has_gro = True

    def stats(self) -> SocketStats:
        """Return the properties of the socket."""
        return SocketStats(
            has_gso=self.has_gso,
            has_gro=self.has_gro,
            receive_buffer_bytes=self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF),
            send_buffer_bytes=self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            errors=self._errors,
        )

    def receive(self, endpoint: Any) -> bool:
        """Hand waiting datagrams to the endpoint, but not so many that ACKs are late; return False if none came."""
        time_s = now_s()
        for number in range(RECEIVES_PER_PUMP):
            try:
                nbytes, ancillary, _, source = self._socket.recvmsg_into([self._buffer], 64)
            except OSError as error:
                if error.errno in TRY_LATER:
                    return number > 0
                self._errors += 1
                continue
            segment_bytes = nbytes
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_UDP and kind == UDP_GRO:
                    segment_bytes = struct.unpack_from("=i", data)[0]
                elif level == socket.SOL_SOCKET and kind == SO_RXQ_OVFL:
                    self.kernel_drops = struct.unpack_from("=I", data)[0]
            endpoint.receive(self._view[:nbytes], segment_bytes, source[:2], time_s)
        return True

    def transmit(self, endpoint: Any) -> float:
        """Send the endpoint's datagrams, up to a bound; return when to call `transmit` again if no datagram comes."""
        due_s: float | None = None
        for _ in range(SENDS_PER_PUMP):
            if not self._send_unsent():
                break
            time_s = now_s()
            self.unsent.extend(endpoint.poll(time_s))
            due_s = endpoint.next_timeout_s(time_s)
            if not self._send_unsent() or due_s is None or due_s > time_s:
                break
        return min(now_s() + IDLE_WAIT_S, float("inf") if due_s is None else due_s)

    def _send_unsent(self) -> bool:
        """Send the queued datagrams in order; return False if the socket's buffer is full."""
        while self.unsent and self._send(self.unsent[0]):
            self.unsent.popleft()
        return not self.unsent

    def _send(self, transmit: Transmit) -> bool:
        address, slices, segment_bytes = transmit
        is_single = len(slices) == 1 and len(slices[0]) <= segment_bytes
        if is_single or self.has_gso:
            option = (socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", segment_bytes))
            try:
                self._socket.sendmsg(slices, [] if is_single else [option], 0, address)
                return True
            except OSError as error:
                if error.errno in TRY_LATER:
                    return False
                self._errors += 1  # no route, a firewall: to the protocol a loss like any other
                is_lost = is_single or error.errno not in GSO_REFUSED
                self._log_refusal(transmit, error, is_lost=is_lost)
                if is_lost:
                    return True
                self.has_gso = False
        self.unsent.popleft()
        datagrams = [
            Transmit(address, [part[start : start + segment_bytes]], segment_bytes)
            for part in slices
            for start in range(0, len(part), segment_bytes)
        ]
        self.unsent.extendleft(reversed(datagrams))
        return self._send(self.unsent[0])

    def _log_refusal(self, transmit: Transmit, error: OSError, *, is_lost: bool) -> None:
        if (is_lost, error.errno) not in self._logged:
            self._logged.add((is_lost, error.errno))
            what = "the system refused" if is_lost else "UDP GSO was refused: sending one by one"
            nbytes = min(len(transmit.slices[0]), transmit.segment_bytes)
            remedy = "" if is_lost and error.errno != errno.EMSGSIZE else SIZE_REMEDY
            target = f"{format_address(transmit.address)}: {error.strerror}{remedy}"
            logger.warning("%s datagrams of %d bytes to %s", what, nbytes, target)

    def wake(self) -> None:
        """End the current `wait`, or the next one if there is none; any thread may call it."""
        with contextlib.suppress(OSError):  # a full pipe wakes as well; a closed one has no reader
            self._bell.send(b"\0")

    def wait(self, until_s: float) -> None:
        """Sleep until a time, or until a datagram comes, `wake` is called, or a full socket buffer has space again."""
        writes = [self._socket] if self.unsent else []
        timeout_s = max(0.0, until_s - now_s())
        with contextlib.suppress(OSError, ValueError):  # no alarm, or another thread has closed it
            try:  # microseconds, where ``poll`` rounds up to milliseconds
                select.select([self._alarm, self._socket], writes, [], timeout_s)
            except ValueError:  # a descriptor is too large for ``select``
                poller = select.poll()
                poller.register(self._alarm, select.POLLIN)
                poller.register(self._socket, select.POLLIN | (select.POLLOUT if writes else 0))
                poller.poll(timeout_s * 1_000)
            self._alarm.recv(4_096)

    def close(self) -> None:
        """Close the sockets."""
        for each in (self._socket, self._alarm, self._bell):
            each.close()
