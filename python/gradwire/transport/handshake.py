"""Incoming handshakes: the INIT datagrams that are answered, the cost of each refusal, and the rejected peers.

Sans-IO. ``docs/transport.md``, section "Floods", lists the cost of each refusal.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

from .addressing import format_address
from .crypto import AuthenticationError, Handshake
from .secret import fingerprint
from .session import Context, Session, State, prologue
from .types import Address
from .wire import (
    HEADER,
    HEADER_BYTES,
    INIT,
    INIT_BYTES,
    MAC1_BYTES,
    VERSION,
    Introduction,
    WireError,
)

logger = logging.getLogger(__name__)

HALF_OPEN_MAX: Final = 256
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
    """Answers or refuses the INIT datagrams of other nodes."""

    def __init__(self, endpoint: Context) -> None:
        self._endpoint = endpoint
        self._gate = InitGate()
        # By mac1: the sessions whose peer has not yet proved that its INIT is no recording.
        self.half_open: dict[bytes, Session] = {}
        self.rejected = RejectedPeers(endpoint.secret)

    def on_init(self, datagram: bytes, address: Address, now_s: float) -> None:
        """Answer an INIT, or refuse it at the least cost; raise if it is malformed or made with another secret."""
        if len(datagram) != INIT_BYTES:
            raise WireError(f"an INIT of {len(datagram)} bytes")
        counters = self._endpoint.counters
        mac1 = datagram[-MAC1_BYTES:]
        repeated = self.half_open.get(mac1)
        if repeated is not None and repeated.init == datagram:
            counters.handshakes_refused += not repeated.answer_again(address, now_s)
            return
        # In order of cost: duplicate, mac1, rate limit, Noise decryption.
        if self._endpoint.is_closing or self._gate.has_seen(mac1):
            counters.handshakes_refused += 1
            return
        if not self._endpoint.mac1.verify(datagram):
            counters.handshakes_refused += 1
            self.rejected.note(address, "it has another secret", now_s)
            raise AuthenticationError("an INIT without a valid mac1")
        header = datagram[:HEADER_BYTES]
        _, _, _, _, index, sent_ms = HEADER.unpack(header)
        if not self._gate.admit(mac1, (self._endpoint.wall_ms(now_s) - sent_ms) * 1e-3, now_s):
            counters.handshakes_refused += 1
            return
        handshake = Handshake(self._endpoint.secret, prologue(header), self._endpoint.entropy)
        remote = Introduction.decode(handshake.read_init(datagram[HEADER_BYTES:-MAC1_BYTES]))
        if self._is_acceptable(remote, index, address, now_s):
            self._open_half(handshake, remote, datagram, address, now_s)
        else:
            counters.handshakes_refused += 1

    def _is_acceptable(
        self, remote: Introduction, index: int, address: Address, now_s: float
    ) -> bool:
        if remote.node_id == self._endpoint.node_id:
            self._note_own_init(index, now_s)
            return False
        if remote.session != index:
            return False
        known = self._endpoint.by_node.get(remote.node_id)
        if known is not None and known.peer is not None:
            if remote.incarnation < known.peer.incarnation:
                return False
            is_alive = now_s - known.heard_at_s < self._endpoint.limits.suspect_s
            if remote.incarnation == known.peer.incarnation and is_alive:
                return False
        return self._yield_to(remote, address)

    def _yield_to(self, remote: Introduction, address: Address) -> bool:
        """Return whether the peer's INIT wins over an INIT of our own: that of the larger node id does.

        Our own handshake continues until the peer has proved its presence: the INIT may be a recording.
        """
        is_initiating = any(
            session.state is State.INIT_SENT and session.address == address
            for session in self._endpoint.sessions.values()
        )
        return not is_initiating or self._endpoint.node_id < remote.node_id

    def _note_own_init(self, index: int, now_s: float) -> None:
        session = self._endpoint.sessions.get(index)
        if session is not None and session.state is State.INIT_SENT and session.target is not None:
            self._endpoint.discovery.on_own(session.target, now_s)
            self._endpoint.drop(session)

    def _open_half(
        self,
        handshake: Handshake,
        remote: Introduction,
        datagram: bytes,
        address: Address,
        now_s: float,
    ) -> None:
        while len(self.half_open) >= HALF_OPEN_MAX:
            self._endpoint.drop(next(iter(self.half_open.values())))
        session = Session(self._endpoint, self._endpoint.new_index(), address, now_s)
        session.init = datagram
        session.start_responder(handshake, remote)
        self._endpoint.sessions[session.index] = session
        self.half_open[datagram[-MAC1_BYTES:]] = session

    def forget(self, session: Session) -> None:
        """Remove a session that has been established or has ended."""
        mac1 = session.init[-MAC1_BYTES:]
        if self.half_open.get(mac1) is session:
            del self.half_open[mac1]
