"""The members' comings and goings: every message and event of the node ends here, in the room that it is for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..errors import MessageError
from ..message import Message
from ..transport import Peer, PeerLost
from .beginning import Beginning
from .control import Hello, Kind, Note, Phase, Place, Report, place_of, split_tag, unpack_relay
from .going import Going
from .greetings import Greetings
from .model import Model
from .outbox import Outbox
from .roster import Roster, by_place
from .snapshot import Snapshot

if TYPE_CHECKING:
    from ..transport import Node

__all__ = ["Members"]

_LOG = logging.getLogger(__name__)


class Members:
    """Keeps the roster: takes what the node brings, and says what the others have to know.

    Args:
        node: the node; all its messages and events are taken.
        roster: of this node.
        model: what has to be the same on all nodes.
        is_sync: whether the members go step by step together.

    Attributes:
        greetings: who has greeted.
        going: what to do about members that are gone.
        outbox: control messages of all rooms.
        on_control: called with sender, kind, number and payload of what is neither an update nor about membership.
        on_gone: called with a peer whose connection ended.
    """

    def __init__(self, node: Node, roster: Roster, model: Model, *, is_sync: bool) -> None:
        self._node = node
        self._roster = roster
        self._is_sync = is_sync
        self.outbox = Outbox(node)
        self.greetings = Greetings(model, roster, self.outbox)
        self.going = Going(roster, self.greetings, self.outbox, self.come_in_again, is_sync=is_sync)
        self._beginning = Beginning(node, roster, self.greetings)
        self.on_control: Callable[[Peer, int, int, memoryview], None] = lambda *_: None
        self.on_gone: Callable[[Peer], None] = lambda _: None
        self._connected_in_order: tuple[Peer, ...] = ()
        self._connected: frozenset[Peer] = frozenset()
        self._has_greeted = False  # somebody, since the last look at who is connected
        self._ready: set[Peer] = set()  # newcomers that follow the members' steps
        self._own_notes: dict[int, Note] = {}

    # ---- beginning and coming in -------------------------------------------------------------------------------------

    def begin(self, expected: int, timeout_s: float) -> None:
        """Return when this node is a member from the start on (phase IN), or has to come in late (JOINING).

        Raises:
            TimeoutError: too few nodes were there in time.
            Mismatch: the others train something else, or another step.
        """
        self._beginning.wait(
            expected, timeout_s, lambda poll_s: self.poll(poll_s, self._roster.next_step)
        )

    def learn(self, late: dict[str, list[object]]) -> None:
        """Say what the caller's arrays are like, by name, once that is known.

        Raises:
            Mismatch: no other member has such arrays.
        """
        self.greetings.learn(late)
        self.going.refuse_misfits()

    def follow(self, snapshot: Snapshot) -> bool:
        """Take the members of a snapshot for the members; return whether all their later updates arrive here."""
        roster, positions = self._roster, snapshot.positions
        known = by_place(roster.others)
        chosen = {known[place]: at for place, at in positions.items() if place in known}
        firsts = {peer: roster.first_of(peer) for peer in chosen}
        if len(chosen) < len(positions) or any(
            first is None or first > chosen[peer] for peer, first in firsts.items()
        ):
            return False
        finals = {Peer(*one, "unknown"): at for one, at in snapshot.finals.items()}
        roster.origin = snapshot.origin
        roster.follow(chosen, finals=finals, step=snapshot.step)
        self._ready -= chosen.keys()
        if self._is_sync:
            self.greetings.announce(Phase.READY)
        else:
            roster.first_step = snapshot.step
            self.greetings.announce(Phase.IN)
        return True

    def come_in_again(self, why: str) -> None:
        """Give up what this node has, to take everything from a member anew."""
        _LOG.warning("%s: it comes in again", why)
        self._roster.begin_anew()
        self.greetings.announce(Phase.JOINING)

    def _admit(self, peer: Peer, at: int) -> None:
        """Take a newcomer for a member from its update ``at`` on."""
        _LOG.info("%s comes in with step %d", peer.address, at)
        self._roster.add_member(peer, at)
        self._ready.discard(peer)
        self._roster.joined.append(peer)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def send_note(self, step: int, cut: int | None, digest: tuple[int, str] | None) -> None:
        """Send what belongs to the update of ``step``, once, before that: the newcomers that this node sees too."""
        note = Note(tuple(sorted(map(place_of, self._ready))), cut, digest)
        self._roster.next_step = step + 1
        if not note.is_empty:
            if self._is_sync:
                self._own_notes[step] = note
            self.outbox.send(Kind.NOTE, step, note.encode())

    def take_all(self) -> list[tuple[Peer, list[Message]]]:
        """Return members and messages of all that has come, every member's in its order, and forget it."""
        taken = []
        for peer, stream in self._roster.members.items():
            while stream.position in stream:
                taken.append((peer, self._roster.take(peer, stream)))
        self.going.let_go()
        return taken

    def finish_step(self, step: int, contributors: Iterable[Peer]) -> None:
        """Admit those that all members have named with their update of ``step``, this node among them or not."""
        roster = self._roster
        roster.next_step = max(roster.next_step, step + 1)
        notes = [self._own_notes.pop(step, None)] if roster.phase is Phase.IN else []
        if notes != [None]:  # what this node does not say is not said by all
            members = roster.members
            notes += [members[peer].notes.get(step) for peer in contributors if peer in members]
        admitted = _named_by_all(notes)
        known = by_place(roster.others) if admitted else {}
        for place in sorted(admitted):
            if place == roster.place:
                roster.first_step = step + 1
                roster.phase = Phase.IN
            elif place in known:
                self._admit(known[place], step + 1)
            else:  # it went again meanwhile: the next poll finds it gone
                self._admit(Peer(*place, "a newcomer"), step + 1)
        self.going.let_go()
        if admitted:
            self.greetings.announce(roster.phase)

    # ---- what the node brings ----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float, step: int) -> None:
        """Send what waits, receive for up to ``timeout_s``, and notice who is gone without an update for ``step``."""
        # Look who is connected before receiving: what a peer sent before it went down is then still taken.
        peers, events = self._node.peers, self._node.events()
        for event in events:
            if isinstance(event, PeerLost):
                self._forget(event.peer)
        # A greeting may be read after the connection that it came through has ended, or before it is seen.
        if events or self._has_greeted or peers != self._connected_in_order:
            self._has_greeted = False
            self._connected_in_order, self._connected = peers, frozenset(peers)
            for peer in self.greetings.greet(self._connected):
                self._forget(peer)
        connected = self._connected
        self.outbox.flush()
        for peer, tag, payload in self._node.receive(timeout_s=timeout_s):
            self._route(peer, tag, payload)
        self.going.look(connected, step)
        self.outbox.flush()

    def _forget(self, peer: Peer) -> None:
        """A connection ended: what comes through the next one begins with a greeting."""
        self.greetings.forget(peer)
        self._roster.forget_connection(peer)
        self._ready.discard(peer)
        self.on_gone(peer)

    def _route(self, peer: Peer, tag: int, payload: memoryview) -> None:
        kind, number = split_tag(tag)
        if kind == Kind.HELLO:
            self._take_hello(peer, payload)
        elif peer in self.greetings.misfits:
            self._roster.ignored += kind == Kind.UPDATE
        else:
            try:
                self._take(peer, kind, number, payload)
            except MessageError as error:
                if self._roster.phase is not Phase.IN or peer in self._roster.members:
                    raise
                _LOG.warning("%s is no member, its message is ignored: %s", peer.address, error)

    def _take(self, peer: Peer, kind: int, number: int, payload: memoryview) -> None:
        if kind == Kind.UPDATE:
            self._take_update(peer, number, payload)
        elif kind == Kind.NOTE:
            stream = self._roster.stream_of(peer)
            if stream is not None:
                stream.add_note(number, Note.decode(payload), payload)
        elif kind == Kind.REPORT:
            self.going.take_report(peer, Report.decode(payload))
        elif kind == Kind.RELAY:
            if peer not in self._roster.agreement:
                self.going.take_relay(*unpack_relay(payload))
        else:
            self.on_control(peer, kind, number, payload)

    def _take_update(self, peer: Peer, step: int, payload: memoryview) -> None:
        roster = self._roster
        stream = roster.stream_of(peer)
        if stream is None and roster.phase is not Phase.IN:
            _LOG.debug("step %d from %s came before its greeting", step, peer.address)
        elif stream is None:
            roster.ignored += 1
            _LOG.warning("step %d from %s ignored: it is not a member", step, peer.address)
        elif stream.accepts(step):
            stream.add(roster.parse(peer, step, payload), payload)
        elif peer not in roster.broken and step >= (stream.first or 0):
            raise roster.wrong_step(peer, step)

    def _take_hello(self, peer: Peer, payload: memoryview) -> None:
        roster = self._roster
        self._has_greeted = True
        hello, before = self.greetings.take(peer, payload)
        self._ready.discard(peer)
        if peer in self.greetings.misfits:
            self.going.refuse_misfits()
            return
        if hello.phase is Phase.READY:
            self._ready.add(peer)
        begins_anew = hello.phase in (Phase.JOINING, Phase.READY)
        if peer in roster.members and not begins_anew and hello.phase is not Phase.LEAVING:
            return
        if before is None or begins_anew:
            roster.others[peer] = roster.new_stream()
        if hello.phase is Phase.JOINING and roster.phase is Phase.IN:
            self.greetings.tell(peer)  # says what it gets from here on
        if peer in roster.members:
            if roster.phase is Phase.IN and peer not in roster.agreement:
                why = "leaves" if hello.phase is Phase.LEAVING else "begins anew"
                self.going.suspect([peer], why)
        elif hello.phase is Phase.IN:
            stream = roster.others.setdefault(peer, roster.new_stream())
            if stream.first is None:
                stream.start_at(hello.fresh)
            if roster.phase is Phase.IN:
                has_come_in = before is not None and before.phase is not Phase.IN
                self._meet(peer, hello, has_come_in=has_come_in)

    def _meet(self, peer: Peer, hello: Hello, *, has_come_in: bool) -> None:
        """Hear of a member that this node does not know: a newcomer, or one of a group that had split off."""
        roster = self._roster
        if roster.place in hello.members:
            if not has_come_in:  # it has not heard that the others have gone on without it
                self.going.report(to=peer)
            elif not self._is_sync:  # synchronous ones come in with a step that all agree on
                self._admit(peer, hello.step)
            return
        # What began earlier counts, then the larger group: the run of a process is the time of its start.
        peers = roster.peers
        own = (*reversed(roster.origin), -len(peers) - 1, min((*peers, roster.me)).id)
        first = min((node for node, _ in hello.members), default=0)
        theirs = (*reversed(hello.origin), -len(hello.members), first)
        if theirs < own:
            self.come_in_again(f"this node had split off from {len(hello.members)} others")


def _named_by_all(notes: list[Note | None]) -> set[Place]:
    """Return the newcomers that every one of the notes admits."""
    admitted = set(notes[0].admits) if notes and notes[0] is not None else set()
    for note in notes:
        if not admitted:
            break
        admitted &= set(note.admits) if note is not None else set()
    return admitted
