"""The router: passes arriving messages and events of the node to their handlers, and sends messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import MessageError, NotConnected, WouldBlock
from ..message import Message
from ..transport import PeerLost
from .membership import Membership
from .protocol import TAG_NUMBERS, Kind, NodeRun, Note, Phase, run_of, tag_of

if TYPE_CHECKING:
    from ..transport import Node, Peer, Ticket

__all__ = ["Router"]

_LOG = logging.getLogger(__name__)

# Why a connection without a goodbye ended. Silence lasts ``Limits.down_s``, 10 s by default.
_REASONS = {"left": "crashed, or closed its node before leave()", "timeout": "is silent"}

Handler = Callable[[NodeRun, int, memoryview], None]


class Router:
    """Receives the node's messages and events, and passes each to its handler; sends control messages.

    Args:
        node: all its messages and events are taken.
        membership: gets the updates.
        parse: returns the messages of an update, given its sender, step and bytes; raises `MessageError` if they are
            not this exchange's.

    Attributes:
        node: as given.
        lost: the members that the last ``receive`` found lost.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        parse: Callable[[NodeRun, int, memoryview], list[Message]],
    ) -> None:
        self.node = node
        self.lost: set[NodeRun] = set()
        self._membership = membership
        self._introductions = membership.introductions
        self._parse = parse
        self._handlers: dict[int, Handler] = {
            Kind.UPDATE: self._add_update,
            Kind.NOTE: self._add_note,
        }
        self._unsent: deque[tuple[int, bytes, NodeRun | None]] = deque()
        self._peers: tuple[Peer, ...] = ()
        self._runs: dict[Peer, NodeRun] = {}  # of the connected peers
        self._connected: frozenset[NodeRun] = frozenset()
        self._introduced: set[NodeRun] = set()

    def handle(self, kind: Kind, handler: Handler) -> None:
        """Pass messages of a kind to a handler: it is called with sender, number and payload."""
        self._handlers[kind] = handler

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, number: int, payload: bytes, to: NodeRun | None = None) -> None:
        """Queue a control message for all peers or for one, and send as much as there is space for."""
        # At once if possible: the caller may go off to compute while others wait for the message.
        self._unsent.append((tag_of(kind, number), payload, to))
        self.flush()

    def flush(self) -> bool:
        """Send the queued messages; return whether none is left."""
        while self._unsent:
            tag, payload, receiver = self._unsent[0]
            if not self._send_to(receiver, tag, payload):
                return False
            self._unsent.popleft()
        return True

    def publish_parts(self, step: int, unsent: deque[tuple[NodeRun, bytes]]) -> bool:
        """Send single nodes their parts of this node's update; return whether none is left.

        Raises:
            TooLarge: the transport refuses the size.
        """
        while unsent:
            owner, payload = unsent[0]
            if not self._send_to(owner, tag_of(Kind.PART, step), payload):
                return False
            unsent.popleft()
        return True

    def _send_to(self, receiver: NodeRun | None, tag: int, payload: bytes) -> bool:
        """Send a message to all peers or to one; return False without space."""
        peer = None if receiver is None else self._introductions.peer_of(receiver)
        try:
            self.node.publish(payload, tag=tag, to=peer)
        except WouldBlock:
            return False
        except NotConnected:
            pass  # the peer has gone, and does not get the message
        return True

    def introduce(self, to: NodeRun | None = None) -> None:
        """Send this node's introduction to all peers or to one."""
        self.send(Kind.HELLO, 0, self._membership.own_hello().encode(), to)

    def announce(self, phase: Phase) -> None:
        """Enter a phase and tell all peers."""
        self._membership.enter(phase)
        self.introduce()

    def publish_update(self, step: int, payload: Message | bytes) -> Ticket | None:
        """Send this node's update and, before it, its note; return None without space, for another try.

        Raises:
            TooLarge: the transport refuses the size; nothing was sent.
        """
        if self._membership.next_step <= step:
            note = self._membership.make_note(step)
            if note is not None:
                self.send(Kind.NOTE, step, note.encode())
        if self._unsent and not self.flush():
            return None
        try:
            return self.node.publish(payload, tag=step)
        except WouldBlock:
            return None

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> set[NodeRun]:
        """Send queued messages, handle messages and events for up to ``timeout_s``, and return the lost members.

        Members that go down meanwhile are lost in the next call, after their last messages.
        """
        peers = self.node.peers
        events = self.node.events()
        for event in events:
            if isinstance(event, PeerLost):
                run = run_of(event.peer)
                reason = _REASONS.get(event.reason, f"is gone: {event.reason}")
                self._introductions.add_reason(run, reason)
                self._forget_connection(run)
        if (
            events
            or peers != self._peers
            or not self._introductions.hellos.keys() <= self._connected
        ):
            self._greet(peers)
        if self._unsent:
            self.flush()
        for peer, tag, payload in self.node.receive(timeout_s=timeout_s):
            kind, number = divmod(tag, TAG_NUMBERS)
            sender = self._runs.get(peer) or self._introductions.register(peer)
            self._handle(sender, kind, number, payload)
        self.lost = self._membership.broken | (self._membership.members.keys() - self._connected)
        return self.lost

    def _greet(self, peers: tuple[Peer, ...]) -> None:
        """Introduce this node to new connections, and forget those that have ended."""
        self._peers = peers
        self._runs = {peer: self._introductions.register(peer) for peer in peers}
        self._connected = frozenset(self._runs.values())
        self._introduced &= self._connected
        for run in sorted(self._connected - self._introduced):
            self._introduced.add(run)
            self.introduce(run)
        # An introduction may be handled after its connection has ended, or before it is seen.
        for run in [run for run in self._introductions.hellos if run not in self._connected]:
            self._forget_connection(run)

    def _forget_connection(self, run: NodeRun) -> None:
        self._introduced.discard(run)
        self._membership.forget_connection(run)

    def _handle(self, sender: NodeRun, kind: int, number: int, payload: memoryview) -> None:
        membership = self._membership
        handler = self._handlers.get(kind)
        if handler is None:  # of a later version
            return
        if kind == Kind.HELLO:
            handler(sender, number, payload)
            return
        if sender in self._introductions.incompatible:
            if kind == Kind.UPDATE:
                membership.events.add_ignored()
            return
        try:
            handler(sender, number, payload)
        except MessageError as error:
            if membership.phase is not Phase.IN or sender in membership.members:
                raise
            address = self._introductions.peer_of(sender).address
            _LOG.warning("%s is no member, its message is ignored: %s", address, error)

    def _add_update(self, sender: NodeRun, step: int, payload: memoryview) -> None:
        membership = self._membership
        stream = membership.stream_of(sender)
        if stream is None:
            address = self._introductions.peer_of(sender).address
            if membership.phase is not Phase.IN:
                _LOG.debug("step %d from %s came before its introduction", step, address)
                return
            membership.events.add_ignored()
            _LOG.warning("step %d from %s ignored: it is not a member", step, address)
        elif stream.accepts(step):
            stream.add_update(self.parse(sender, step, payload), payload)
        elif membership.others.get(sender) is stream:
            # From a new connection, before its introduction: others were lost with the old one.
            membership.expect_nothing(sender)
        elif sender not in membership.broken and step >= (stream.first_received or 0):
            raise membership.wrong_step(sender, step)

    def _add_note(self, sender: NodeRun, step: int, payload: memoryview) -> None:
        stream = self._membership.stream_of(sender)
        if stream is not None:
            stream.add_note(step, Note.decode(payload), payload)

    def parse(self, sender: NodeRun, step: int, payload: memoryview) -> list[Message]:
        """Return the messages of an update.

        Raises:
            MessageError: not messages, or those of another model; the error names both sides.
        """
        try:
            return self._parse(sender, step, payload)
        except MessageError as error:
            there = self._introductions.name_of(sender)
            here = self._introductions.name_of(self._membership.run)
            raise MessageError(
                f"step {step} from {there} to this node ({here}): {error}"
            ) from error
