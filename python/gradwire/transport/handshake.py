"""The datagrams of handshakes: written, checked in order of cost, and the log of rejected peers."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ..clock import LogLimit
from . import wire
from .addressing import format_address
from .crypto import PROLOGUE, AuthenticationError, Entropy, Handshake, Mac1
from .types import Address

logger = logging.getLogger(__name__)

INITS_PER_S: Final = 200.0
INITS_BURST: Final = 64
MAC1S_MAX: Final = 16_384  # 2 MB; at full rate the last 40 s
TIMELY_S: Final = 120.0  # how far apart the clocks of two nodes may be
Admitted: TypeAlias = tuple[Handshake, wire.Introduction]


class RejectedPeers:
    """Counts INIT datagrams made with another secret or version, and logs a few. Their senders get no answer."""

    def __init__(self, name: str) -> None:
        self.name = name  # of this node, for the log
        self.count = 0
        self.last: Address | None = None  # source of the last of them, which nobody has verified
        self.reason = ""  # why the last of them got no answer
        self._log = LogLimit(logger.warning)

    def note(self, address: Address, reason: str, now_s: float) -> None:
        """Count an INIT that gets no answer."""
        self.count += 1
        self.last = address
        self.reason = reason
        text = "an INIT from %s gets no answer: %s; this is %s"
        # One limit for all senders: their addresses can be made up.
        self._log.log(None, now_s, text, format_address(address), reason, self.name)


class InitGate:
    """Decides which authentic INITs are decrypted: none twice, few a second; recent ones have a rate of their own."""

    def __init__(self, per_second: float = INITS_PER_S) -> None:
        self._interval_s = 1.0 / per_second
        self._burst_s = (INITS_BURST - 0.5) * self._interval_s  # half an interval for rounding
        self._next_at_s = [float("-inf")] * 2  # when to admit the next timely INIT; any INIT
        self.mac1s: OrderedDict[bytes, None] = OrderedDict()  # of the INITs admitted last

    def admit(self, mac1: bytes, age_s: float, now_s: float) -> bool:
        """Return whether another INIT may be decrypted now, and remember its (verified) mac1 if so."""
        for rate in (0, 1) if abs(age_s) <= TIMELY_S else (1,):
            at_s = max(self._next_at_s[rate], now_s - self._burst_s)  # saves up to a burst
            if at_s <= now_s:
                self._next_at_s[rate] = at_s + self._interval_s
                self.mac1s[mac1] = None
                if len(self.mac1s) > MAC1S_MAX:
                    self.mac1s.popitem(last=False)
                return True
        return False


@dataclass(eq=False)
class LocalNode:
    """This node in handshakes: what it says about itself, and its proof that it knows the secret of the cluster."""

    secret: bytes = field(repr=False)
    started_at_s: float  # monotonic time at which the node knew its incarnation
    node_id: int
    incarnation: int  # start of the process in milliseconds, larger than that of any earlier run
    advertise: str = ""
    entropy: Entropy = os.urandom  # a simulator has a seeded one
    name: str = "this node"  # in log entries

    def __post_init__(self) -> None:
        self.mac1 = Mac1(self.secret)
        self.rejected = RejectedPeers(self.name)
        self._gate = InitGate()
        self._path_key = self.entropy(32)

    def wall_ms(self, now_s: float) -> int:
        """Return the time since the epoch in ms; a jump of the clock after the start goes unnoticed."""
        return (self.incarnation + int((now_s - self.started_at_s) * 1e3)) & (2**64 - 1)

    def path_token(self, session: int, address: Address) -> int:
        """Return the token of the PINGs that a session sends to an address to find out whether its peer is there."""
        path = f"{session} {address}".encode()
        digest = hashlib.blake2b(path, key=self._path_key, digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def write_init(self, session: int, now_s: float) -> tuple[Handshake, bytes]:
        """Return a handshake of the session with this index, and its INIT."""
        header = wire.HEADER.pack(wire.INIT, 0, 0, 0, session, self.wall_ms(now_s))
        handshake = Handshake(self.secret, PROLOGUE + header, self.entropy)
        message = handshake.write_init(self._introduction(session).encode(wire.INTRODUCTION_BYTES))
        return handshake, self.mac1.sign(header + message)

    def write_response(self, handshake: Handshake, session: int, remote_session: int) -> bytes:
        """Return the RESPONSE to an INIT, for the session with this index."""
        header = wire.HEADER.pack(wire.RESPONSE, 0, 0, 0, remote_session, 0)
        message = handshake.write_response(self._introduction(session).encode())
        return self.mac1.sign(header + message)

    def _introduction(self, session: int) -> wire.Introduction:
        return wire.Introduction(self.node_id, self.incarnation, session, self.advertise)

    def read_response(self, handshake: Handshake, datagram: bytes) -> wire.Introduction:
        """Return the peer's introduction in a RESPONSE; raise `AuthenticationError` or `WireError` for another."""
        if not self.mac1.verify(datagram):
            raise AuthenticationError("a RESPONSE without a valid mac1")
        message = datagram[wire.HEADER_BYTES : -wire.MAC1_BYTES]
        return wire.Introduction.decode(handshake.read_response(message))

    def read_init(self, datagram: bytes, address: Address, now_s: float) -> Admitted | None:
        """Return the handshake and the sender's introduction; None for a recording, or if there are too many."""
        mac1 = datagram[-wire.MAC1_BYTES :]
        if mac1 in self._gate.mac1s:
            return None
        if not self.mac1.verify(datagram):
            self.rejected.note(address, "it has another secret", now_s)
            raise AuthenticationError("an INIT without a valid mac1")
        header = datagram[: wire.HEADER_BYTES]
        _, _, _, _, index, sent_ms = wire.HEADER.unpack(header)
        if not self._gate.admit(mac1, (self.wall_ms(now_s) - sent_ms) * 1e-3, now_s):
            return None
        handshake = Handshake(self.secret, PROLOGUE + header, self.entropy)
        message = datagram[wire.HEADER_BYTES : -wire.MAC1_BYTES]
        remote = wire.Introduction.decode(handshake.read_init(message))
        if remote.session != index:
            raise wire.WireError("an INIT whose header contradicts its introduction")
        return handshake, remote
