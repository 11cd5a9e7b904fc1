"""Where strangers knock: which first datagrams are answered, at what cost, and the sessions that begin so.

Sans-IO like everything around it. ``docs/transport.md``, section "Floods", has what each refusal costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .context import Context
from .crypto import AuthenticationError, Handshake, Marker
from .membership import HALF_OPEN_MAX, HandshakeGate, Membership
from .model import Address
from .session import Session, State, prologue
from .strangers import Strangers
from .wire import HEADER, HEADER_BYTES, INIT_BYTES, MARK_BYTES, Introduction, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping


class House(Context, Protocol):
    """What is needed of the endpoint, which is also the context of the sessions that begin here."""

    marker: Marker
    membership: Membership
    sessions: dict[int, Session]
    by_node: dict[int, Session]
    is_closing: bool

    def new_index(self) -> int:
        """Return a number for another session, which nobody can guess."""

    def drop(self, session: Session) -> None:
        """Forget a session, whatever its state."""


class Doorway:
    """Takes the first datagrams of other nodes.

    Attributes:
        strangers: who gets no answer.
    """

    def __init__(self, house: House) -> None:
        self._house = house
        self.strangers = Strangers()
        self._gate = HandshakeGate(house.limits.handshakes_per_s)
        self._half_open: dict[bytes, Session] = {}

    @property
    def half_open(self) -> Mapping[bytes, Session]:
        """Sessions whose peer has not proved yet that it is there, by the mark of their first datagram."""
        return self._half_open

    def on_knock(self, datagram: bytes, address: Address, now_s: float) -> None:
        """Take a first datagram: answer it, or refuse it at the least cost.

        Raises:
            WireError: it is none.
            AuthenticationError: its sender does not know the secret.
        """
        if len(datagram) != INIT_BYTES:
            raise WireError(f"an INIT of {len(datagram)} bytes")
        mark = datagram[-MARK_BYTES:]
        repeated = self._half_open.get(mark)
        if repeated is not None and repeated.knock == datagram:
            self._house.counters.handshakes_refused += not repeated.answer_again(address, now_s)
            return
        # From the cheapest question to the dearest: seen before, of a stranger, too many, all of Noise.
        if self._house.is_closing or self._gate.has_seen(mark):
            self._house.counters.handshakes_refused += 1
            return
        if not self._house.marker.is_marked(datagram):
            self._house.counters.handshakes_refused += 1
            self.strangers.note(address, "it does not know this secret", now_s)
            raise AuthenticationError("a first message without a mark")
        header = datagram[:HEADER_BYTES]
        _, _, _, _, index, sent_ms = HEADER.unpack(header)
        if not self._gate.admit(mark, (self._house.wall_ms(now_s) - sent_ms) * 1e-3, now_s):
            self._house.counters.handshakes_refused += 1
            return
        handshake = Handshake(
            self._house.secret, prologue(header, insecure=self._house.insecure), self._house.entropy
        )
        remote = Introduction.decode(handshake.read_init(datagram[HEADER_BYTES:-MARK_BYTES]))
        if self._is_welcome(remote, index, address, now_s):
            self._open_half(handshake, remote, datagram, address, now_s)
        else:
            self._house.counters.handshakes_refused += 1

    def _is_welcome(self, remote: Introduction, index: int, address: Address, now_s: float) -> bool:
        if remote.node_id == self._house.node_id:
            self._note_own_knock(index, now_s)
            return False
        if remote.session != index:
            return False
        known = self._house.by_node.get(remote.node_id)
        if known is not None and known.peer is not None:
            if remote.incarnation < known.peer.incarnation:
                return False
            is_alive = now_s - known.heard_at_s < self._house.limits.suspect_s
            if remote.incarnation == known.peer.incarnation and is_alive:
                return False
        return self._yield_to(remote, address)

    def _yield_to(self, remote: Introduction, address: Address) -> bool:
        """Both knocked at the same time: the knock of the larger id counts.

        Our own goes on until the other has proved that it is there: this may be a recorded one from a false address.
        """
        is_knocking = any(
            session.state is State.INIT_SENT and session.address == address
            for session in self._house.sessions.values()
        )
        return not is_knocking or self._house.node_id < remote.node_id

    def _note_own_knock(self, index: int, now_s: float) -> None:
        session = self._house.sessions.get(index)
        if session is not None and session.state is State.INIT_SENT and session.target is not None:
            self._house.membership.on_own(session.target, now_s)
            self._house.drop(session)

    def _open_half(
        self,
        handshake: Handshake,
        remote: Introduction,
        datagram: bytes,
        address: Address,
        now_s: float,
    ) -> None:
        while len(self._half_open) >= HALF_OPEN_MAX:
            self._house.drop(next(iter(self._half_open.values())))
        session = Session(self._house, self._house.new_index(), address, now_s)
        session.knock = datagram
        session.start_responder(handshake, remote)
        self._house.sessions[session.index] = session
        self._half_open[datagram[-MARK_BYTES:]] = session

    def forget(self, session: Session) -> None:
        """The session is open, or over."""
        mark = session.knock[-MARK_BYTES:]
        if self._half_open.get(mark) is session:
            del self._half_open[mark]
