"""Incoming handshakes: checks of INIT datagrams in order of cost, and the log of rejected peers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

from .addressing import format_address
from .crypto import PROLOGUE, AuthenticationError, Entropy, Handshake, Mac1
from .secret import fingerprint
from .types import Address
from .wire import (
    HEADER,
    HEADER_BYTES,
    INIT,
    MAC1_BYTES,
    VERSION,
    Introduction,
    WireError,
)

logger = logging.getLogger(__name__)

INITS_PER_S: Final = 200.0
INITS_BURST: Final = 64.0
MAC1S_MAX: Final = 16_384  # 2 MB; at full rate the last 40 s
TIMELY_S: Final = 120.0  # how far apart the clocks of two nodes may be
LOGGED_MAX: Final = 8  # rejected addresses logged at a time: addresses can be made up
LOGGED_FOR_S: Final = 60.0  # then the same address may be logged again

_KIND_BITS: Final = 0x0F  # of a datagram's first byte; the other bits are the version


class RejectedPeers:
    """Counts INIT datagrams made with another secret or version, and logs a few. The peer itself gets no answer."""

    def __init__(self, secret: bytes) -> None:
        self.count = 0
        self.last: Address | None = None  # source of the last one, which nobody has verified
        self._fingerprint = fingerprint(secret)
        self._logged: set[Address] = set()
        self._logged_until_s = 0.0

    def note(self, address: Address, reason: str, now_s: float) -> None:
        """Count an INIT that gets no answer."""
        self.count += 1
        self.last = address
        if now_s >= self._logged_until_s:
            self._logged.clear()
            self._logged_until_s = now_s + LOGGED_FOR_S
        if address not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(address)
            logger.warning(
                "an INIT from %s gets no answer: %s (this node has the secret with fingerprint %s)",
                format_address(address),
                reason,
                self._fingerprint,
            )

    def note_version(self, kind: int, address: Address, now_s: float) -> None:
        """Count a datagram of an unknown kind if it is an INIT of another version."""
        if kind & _KIND_BITS == INIT & _KIND_BITS:
            version = kind >> 4
            reason = f"it speaks version {version} of the transport, this node version {VERSION}"
            self.note(address, reason, now_s)


class InitGate:
    """Decides which authentic INIT datagrams are worth a decryption: none twice, and a limited number per second.

    Datagrams with a valid mac1 that were not made by a member are recordings. An attacker may have recorded more than
    the gate can remember, so INIT datagrams of the last two minutes, of which there are few, have a rate of their own.
    """

    def __init__(self, per_second: float = INITS_PER_S) -> None:
        self._timely = _TokenBucket(per_second)
        self._any = _TokenBucket(per_second)
        self._mac1s: OrderedDict[bytes, None] = OrderedDict()

    def has_seen(self, mac1: bytes) -> bool:
        """Return whether the INIT with this mac1 was admitted before."""
        return mac1 in self._mac1s

    def admit(self, mac1: bytes, age_s: float, now_s: float) -> bool:
        """Return whether another INIT may be decrypted now, and remember its (verified) mac1 if so."""
        is_timely = abs(age_s) <= TIMELY_S and self._timely.take(now_s)
        if not is_timely and not self._any.take(now_s):
            return False
        self._mac1s[mac1] = None
        if len(self._mac1s) > MAC1S_MAX:
            self._mac1s.popitem(last=False)
        return True


class _TokenBucket:
    """A rate limit with a burst of `INITS_BURST`."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._tokens = INITS_BURST
        self._refilled_at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take one token if there is one."""
        elapsed_s = max(0.0, now_s - self._refilled_at_s)
        self._refilled_at_s = now_s
        self._tokens = min(INITS_BURST, self._tokens + elapsed_s * self._per_second)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class IncomingHandshakes:
    """Reads the INIT datagrams of other nodes, and refuses each at the least cost."""

    def __init__(self, secret: bytes, entropy: Entropy) -> None:
        self._secret = secret
        self._entropy = entropy
        self._mac1 = Mac1(secret)
        self._gate = InitGate()
        self.rejected = RejectedPeers(secret)

    def read_init(
        self, datagram: bytes, address: Address, wall_ms: int, now_s: float
    ) -> tuple[Handshake, Introduction] | None:
        """Return the handshake and the sender's introduction; None for a recording, or if there are too many.

        Raises:
            WireError: the datagram is no INIT.
            AuthenticationError: the datagram was made with another secret.
        """
        mac1 = datagram[-MAC1_BYTES:]
        # In order of cost: duplicate, mac1, rate limit, Noise decryption.
        if self._gate.has_seen(mac1):
            return None
        if not self._mac1.verify(datagram):
            self.rejected.note(address, "it has another secret", now_s)
            raise AuthenticationError("an INIT without a valid mac1")
        header = datagram[:HEADER_BYTES]
        _, _, _, _, index, sent_ms = HEADER.unpack(header)
        if not self._gate.admit(mac1, (wall_ms - sent_ms) * 1e-3, now_s):
            return None
        handshake = Handshake(self._secret, PROLOGUE + header, self._entropy)
        remote = Introduction.decode(handshake.read_init(datagram[HEADER_BYTES:-MAC1_BYTES]))
        if remote.session != index:
            raise WireError("an INIT whose header contradicts its introduction")
        return handshake, remote
