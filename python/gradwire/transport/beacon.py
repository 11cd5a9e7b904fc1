"""Who hears what is sent to the multicast group: beacons, and who has answered them.

Cloud networks and many switches drop multicast without a word, so nothing is sent to the group for a peer before it has
said, over its authenticated connection, that a beacon came through.
"""

from __future__ import annotations

import logging
from typing import Final

from .crypto import SenderKey
from .model import Address, Transmit, format_address
from .wire import BEACON, BEACON_BYTES, HEADER, HEADER_BYTES

logger = logging.getLogger(__name__)

NEVER_S: Final = float("inf")
INTERVAL_FIRST_S: Final = 0.1
INTERVAL_MAX_S: Final = 10.0
SILENT_S: Final = 2.0
NONCE_BASE: Final = 1 << 63  # no record has such a number


def seal_beacon(key: SenderKey, stream: int, number: int) -> bytes:
    """Return a beacon: a header and its tag."""
    datagram = bytearray(BEACON_BYTES)
    header = HEADER.pack(BEACON, key.epoch & 0xFF, 0, 0, stream, number)
    datagram[:HEADER_BYTES] = header
    key.seal_into(NONCE_BASE | number, memoryview(b""), header, memoryview(datagram)[HEADER_BYTES:])
    return bytes(datagram)


def verify_beacon(key: SenderKey, datagram: bytes) -> int:
    """Return the beacon's number.

    Raises:
        AuthenticationError: no member sealed it.
    """
    header = datagram[:HEADER_BYTES]
    number = HEADER.unpack(header)[5]
    tag = memoryview(datagram)[HEADER_BYTES:]
    key.open_into(NONCE_BASE | number, tag, header, memoryview(bytearray()))
    return int(number)


class Beacons:
    """When to send a beacon, and the complaint when nobody answers.

    Attributes:
        group: the multicast address.
        number: of the next beacon.
        next_at_s: when it is due.
    """

    def __init__(self, group: Address) -> None:
        self.group = group
        self.number = 0
        self.next_at_s = NEVER_S
        self._interval_s = INTERVAL_FIRST_S
        self._silent_since_s = NEVER_S
        self._has_complained = False

    def restart(self) -> None:
        """Send some soon: there is somebody new."""
        self._interval_s = INTERVAL_FIRST_S
        self.next_at_s = 0.0

    def poll(
        self, silent: int, peers: int, key: SenderKey, stream: int, now_s: float
    ) -> list[Transmit]:
        """Return the beacon that is due.

        Args:
            silent: how many peers have not answered.
            peers: how many there are.
            key: this node's sender key.
            stream: its number.
            now_s: current time.
        """
        if not silent:
            self.next_at_s = self._silent_since_s = NEVER_S
            return []
        self._silent_since_s = min(self._silent_since_s, now_s)
        if not self._has_complained and now_s - self._silent_since_s > SILENT_S:
            self._has_complained = True
            logger.warning(
                "%d of %d peers hear nothing that is sent to %s; they are served one by one",
                silent,
                peers,
                format_address(self.group),
            )
        if self.next_at_s == NEVER_S:
            self.restart()
        if now_s < self.next_at_s:
            return []
        self.next_at_s = now_s + self._interval_s
        self._interval_s = min(2 * self._interval_s, INTERVAL_MAX_S)
        datagram = seal_beacon(key, stream, self.number)
        self.number += 1
        return [Transmit.single(self.group, datagram)]
