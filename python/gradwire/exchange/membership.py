"""The membership view of one node, the updates of every node in their order, and the router of arriving messages."""

from __future__ import annotations

import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import MessageError, NotConnected, WouldBlock
from ..message import Message
from ..transport import Peer, PeerLost
from .protocol import (
    TAG_NUMBERS,
    Hello,
    Kind,
    NodeRun,
    Note,
    Phase,
    difference_of,
    run_of,
    tag_of,
)

if TYPE_CHECKING:
    from ..transport import Node, Ticket

__all__ = ["Membership", "Router", "UpdateStream", "by_run"]

_LOG = logging.getLogger(__name__)

# Why a connection without a goodbye ended. Silence lasts ``Limits.down_s``, 10 s by default.
_REASONS = {"left": "crashed, or closed its node before leave()", "timeout": "is silent"}

Updates = list[tuple[Peer, list[Message]]]


def by_run(peers: Iterable[Peer]) -> dict[NodeRun, Peer]:
    """Return peers by their identity on the wire."""
    return {run_of(peer): peer for peer in peers}


class UpdateStream:
    """The updates of one node from some step on: in order, once, and kept a little longer than needed here.

    Attributes:
        first: number of the first update that arrives here; None: unknown until the first arrives.
        received: number of the next update to arrive.
        position: number of the next update to apply.
        begun: number of the first update that was applied from here rather than with a snapshot.
        notes: by step of the update that they belong to.
    """

    def __init__(self, first: int | None, keeps: int) -> None:
        self.first = first
        self.received = self.position = self.begun = first or 0
        self.notes: dict[int, Note] = {}
        self._keeps = keeps
        self._messages: dict[int, list[Message]] = {}
        self._payloads: dict[int, list[tuple[int, memoryview]]] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._messages

    @property
    def held(self) -> int:
        """Number of the first update that has neither arrived nor been applied."""
        return max(self.received, self.position)

    def accepts(self, step: int) -> bool:
        """Return whether the update of ``step`` is the next to arrive."""
        if self.first is None:
            self.first = self.received = self.position = self.begun = step
        return step == self.received

    def add_note(self, step: int, note: Note, payload: memoryview) -> None:
        """Keep a note, which arrives before its update."""
        self.notes[step] = note
        self._payloads.setdefault(step, []).append((tag_of(Kind.NOTE, step), payload))

    def add_update(self, messages: list[Message], payload: memoryview) -> None:
        """Keep the next update, unless it has been applied with a snapshot."""
        if self.received >= self.position:
            self._messages[self.received] = messages
            self._payloads.setdefault(self.received, []).append((self.received, payload))
        self.received += 1

    def add_relayed(self, messages: list[Message], payload: memoryview) -> None:
        """Keep the first update that is not held, which came through another node."""
        self.received = self.held
        self.add_update(messages, payload)

    def start_at(self, step: int) -> None:
        """Continue at ``step``: everything before has been applied."""
        if self.first is None:
            self.first = self.received = step
        for old in [old for old in self._messages if old < step]:
            del self._messages[old]
        self.position = self.begun = step
        self._trim()

    def take_messages(self) -> list[Message]:
        """Return the next update to apply, and advance.

        Raises:
            KeyError: the update has not arrived.
        """
        messages = self._messages.pop(self.position)
        self.position += 1
        self._trim()
        return messages

    def raw(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """Yield tag and payload of all messages for the steps from ``first`` to ``last`` exclusive, in order."""
        for step in range(first, last):
            yield from self._payloads.get(step, ())

    def _trim(self) -> None:
        oldest = self.position - self._keeps
        for kept in (self._payloads, self.notes):
            for step in [step for step in kept if step < oldest]:
                del kept[step]


class Membership:
    """The members, as this node sees them, and the updates that have arrived. Sans-IO.

    Args:
        me: this node.
        signature: this node's run signature.
        role: of this node.
        step: number of this node's first step.
        keeps: applied updates of every member that are kept, for peers that miss some when their sender dies.

    Attributes:
        phase: of this node.
        origin: the node that began the training.
        start: digests of the initial parameters and of the initial residual, see `Hello`.
        names: of nodes by their ids, for messages.
        reasons: why connections ended.
        next_step: the first step whose update this node has not published.
        first_step: of this node as a member.
        is_late: whether this node has joined with a snapshot.
        members: the update streams of the other members, by node id; of departed ones until all updates are applied.
        others: the update streams of nodes that are not members.
        past: the update streams of departed members.
        broken: members whose connection ended.
        departing: for every member that is gone, the first of its updates that this node lacks.
        finals: for those on which the members have agreed, the first update that nobody applies.
        reported: the nodes that this node's last report names.
        hellos: the latest introduction of every connected node.
        mismatched: the nodes among them that train something else, and how they differ.
        roles: of this node, of all that have introduced themselves, and of admitted newcomers.
        heard: notes of applied updates, for the comparison of replicas.
        outgoing: cut and digest for this node's next note.
        own_note: step and note of this node's last update that had one.
        wants_switch: for this node's next notes, see `Note`.
        lost, joined, ignored: members and number of messages for the next step's result.
    """

    def __init__(
        self,
        me: Peer,
        signature: dict[str, Any],
        *,
        step: int,
        keeps: int,
        role: str = "member",
    ) -> None:
        self.me = me
        self.role = role
        self.run = run_of(me)
        self.signature = signature
        self.phase = Phase.NEW
        self.origin = self.run
        self.start = ("", "")
        self.names: dict[int, str] = {}
        self.reasons: dict[Peer, str] = {}
        self.next_step = step
        self.first_step = step
        self.is_late = False
        self.members: dict[Peer, UpdateStream] = {}
        self.others: dict[Peer, UpdateStream] = {}
        self.past: dict[Peer, UpdateStream] = {}
        self.broken: set[Peer] = set()
        self.departing: dict[Peer, int] = {}
        self.finals: dict[Peer, int] = {}
        self.reported: set[Peer] = set()
        self.hellos: dict[Peer, Hello] = {}
        self.mismatched: dict[Peer, str] = {}
        self.roles: dict[Peer, str] = {me: role}
        self.heard: list[tuple[Peer, Note]] = []
        self.outgoing: Note | None = None
        self.own_note: tuple[int, Note] | None = None
        self.wants_switch = False
        self.lost: list[Peer] = []
        self.joined: list[Peer] = []
        self.ignored = 0
        self._keeps = keeps
        self._oldest_cut = 0  # from here on every applied update is known one by one

    # ---- members -----------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The other members that are not gone, by node id."""
        return tuple(peer for peer in self.members if peer not in self.departing)

    @property
    def is_first(self) -> bool:
        """Whether this node has the lowest id of all members."""
        peers = self.peers
        return self.phase is Phase.IN and (not peers or self.me < peers[0])

    @property
    def newcomers(self) -> tuple[NodeRun, ...]:
        """The nodes that follow the members' steps and wait to become members."""
        ready = self.fitting(Phase.READY)
        return tuple(sorted(run_of(peer) for peer in ready if peer not in self.members))

    def name_of(self, peer: Peer) -> str:
        """Return a node's rank, if that is known, and its address."""
        name = self.names.get(peer.id)
        return f"{name} ({peer.address})" if name else peer.address

    def departed(self, peers: Iterable[Peer]) -> str:
        """Name nodes that are gone, each with the reason."""
        return ", ".join(
            f"{self.name_of(peer)} {self.reasons.get(peer, 'is gone')}" for peer in peers
        )

    def add_member(self, peer: Peer, at: int) -> None:
        """Make a node a member from its update ``at`` on.

        Raises:
            MessageError: this node does not get that update directly.
        """
        stream = self.others.pop(peer, None) or UpdateStream(at, self._keeps)
        if stream.first is not None and stream.first > at:
            raise self.wrong_step(peer, stream.first)
        stream.start_at(at)
        self.members = dict(sorted({**self.members, peer: stream}.items()))
        if self.past.pop(peer, None) is not None:
            self._oldest_cut = max(self._oldest_cut, at)
        self.departing.pop(peer, None)
        self.finals.pop(peer, None)
        self.reported.discard(peer)

    def admit(self, peer: Peer, at: int) -> None:
        """Make a newcomer a member from its update ``at`` on, for the next step's result too."""
        _LOG.info("%s comes in with step %d", peer.address, at)
        self.add_member(peer, at)
        self.joined.append(peer)

    def follow_snapshot(
        self, positions: dict[Peer, int], finals: dict[Peer, int], step: int
    ) -> None:
        """Continue from a snapshot.

        Args:
            positions: for every member the first update that is not in the snapshot.
            finals: for departed members the first update that nobody applied.
            step: the next step.
        """
        self.finals = finals
        self.is_late = True
        self._oldest_cut = max(positions.values())
        self.next_step = step
        for peer, at in positions.items():
            self.add_member(peer, at)

    def remove_member(self, peer: Peer) -> None:
        """Remove a departed member, for the next step's result too."""
        self.past[peer] = self.members.pop(peer)
        self.broken.discard(peer)
        self.lost.append(peer)

    def forget_members(self) -> None:
        """Stop being a member; updates count again from where the others introduce themselves to a newcomer."""
        self.members.clear()
        self.broken.clear()
        self.departing.clear()
        self.finals.clear()
        self.reported.clear()
        self.outgoing = None

    def make_note(self, step: int) -> Note | None:
        """Return the note for this node's update of ``step``, None if the note would be empty."""
        self.next_step = step + 1
        admits = self.newcomers
        roles = tuple(
            (*run, role) for run in admits if (role := self.roles[Peer(*run, "")]) != "member"
        )
        note = replace(
            self.outgoing or Note(), admits=admits, roles=roles, wants_switch=self.wants_switch
        )
        self.outgoing = None
        if note == Note():
            return None
        self.own_note = step, note
        return note

    def drain_events(self) -> tuple[tuple[Peer, ...], tuple[Peer, ...], int]:
        """Return the members that went and came, and the number of ignored messages, since the last call."""
        events = tuple(self.lost), tuple(self.joined), self.ignored
        self.lost, self.joined, self.ignored = [], [], 0
        return events

    # ---- introductions -----------------------------------------------------------------------------------------------

    def own_hello(self) -> Hello:
        """Return this node's introduction."""
        members: set[NodeRun] = set()
        if self.phase is Phase.IN:
            members = {self.run, *map(run_of, self.peers)}
        return Hello(
            self.signature,
            self.phase,
            self.next_step,
            tuple(sorted(members)),
            self.first_step,
            self.next_step,
            self.origin,
            self.role,
            self.start,
        )

    def add_hello(self, peer: Peer, payload: memoryview) -> tuple[Hello, Hello | None]:
        """Keep a node's introduction; return it and the one before, None if that did not match."""
        try:
            hello = Hello.decode(payload)
        except MessageError:
            hello = Hello.of_another_version(payload)
        before = None if peer in self.mismatched else self.hellos.get(peer)
        self.hellos[peer] = hello
        self.roles[peer] = hello.role
        self._compare_signature(peer, hello)
        return hello, before

    def set_params(self, described: list[list[object]], start: tuple[str, str]) -> bool:
        """Add the dtypes and shapes of the parameters to the signature; return whether anything has changed."""
        if (self.signature["params"], self.start) == (described, start):
            return False
        self.start = start
        self.signature["params"] = described
        for peer, hello in self.hellos.items():
            if self._compare_signature(peer, hello) and peer not in self.members:
                self.others.setdefault(peer, self.new_stream())
        return True

    def fitting(self, phase: Phase | None = None) -> dict[Peer, Hello]:
        """Return the introductions of connected nodes that train the same, without observers: all or of one phase."""
        return {
            peer: hello
            for peer, hello in self.hellos.items()
            if peer not in self.mismatched
            and phase in (None, hello.phase)
            and hello.role != "observer"
        }

    def mismatches(self) -> str:
        """Describe every connected node that trains something else."""
        return "; ".join(text for _, text in sorted(self.mismatched.items()))

    def _compare_signature(self, peer: Peer, hello: Hello) -> bool:
        before = self.mismatched.pop(peer, None)
        difference = difference_of(hello.signature, self.signature)
        if difference:
            text = f"{peer.address} and this node ({self.me.address}) do not fit: {difference}"
            self.mismatched[peer] = text
            if before is None:
                _LOG.warning("%s; its messages are ignored", text)
        return not difference

    def forget_connection(self, peer: Peer) -> None:
        """Forget a connection that has ended: the next one begins with an introduction."""
        self.hellos.pop(peer, None)
        self.mismatched.pop(peer, None)
        self.others.pop(peer, None)
        if peer in self.members:
            self.broken.add(peer)

    # ---- positions ---------------------------------------------------------------------------------------------------

    @property
    def slowest(self) -> int | None:
        """Number of the next update of the slowest member; None without members."""
        return min((self.members[peer].held for peer in self.peers), default=None)

    @property
    def positions(self) -> dict[Peer, int]:
        """For every other member, the number of its next update to apply."""
        return {peer: stream.position for peer, stream in self.members.items()}

    def missing(self, step: int) -> frozenset[Peer]:
        """Return the members whose update of ``step`` may still arrive."""
        return frozenset(
            peer
            for peer, stream in self.members.items()
            if step not in stream and step < self.finals.get(peer, step + 1)
        )

    def is_ready_for(self, step: int) -> bool:
        """Return whether this node, not a member yet, can follow the members through ``step``."""
        if self.phase is not Phase.READY or not self.members or self.missing(step):
            return False
        notes = [stream.notes.get(step) for stream in self.members.values()]
        if not all(note is not None and self.run in note.admits for note in notes):
            return True
        # The step at which this node becomes a member: only when all members have finished it, and without a report,
        # is it sure that they have applied the same updates.
        return all(map(self.is_known_to, self.members))

    def is_known_to(self, peer: Peer) -> bool:
        """Return whether a node named this node as a member when it last introduced itself."""
        hello = self.hellos.get(peer)
        return hello is not None and self.run in hello.members

    @property
    def unaware(self) -> frozenset[Peer]:
        """The members that have not named this node, which came late, as a member.

        They do not apply its updates, so an asynchronous node sends none yet; a synchronous one is `READY` as long.
        """
        late = self.peers if self.is_late else ()
        return frozenset(peer for peer in late if not self.is_known_to(peer))

    def first_of(self, peer: Peer) -> int | None:
        """Return the first update of a node, not a member yet, that this node gets directly; None: unknown."""
        stream = self.others.get(peer)
        return None if stream is None else stream.first

    def contributors_at(self, cut: int) -> str:
        """Return a name for the set of nodes that contributed to the state at a cut, as this node sees them."""
        runs = [run_of(peer) for peer, stream in self.members.items() if stream.begun < cut]
        if self.first_step < cut:
            runs.append(self.run)
        return f"{zlib.crc32(repr(sorted(runs)).encode()):08x}"

    # ---- updates -----------------------------------------------------------------------------------------------------

    def new_stream(self) -> UpdateStream:
        """Return a stream that begins with whichever update arrives first."""
        return UpdateStream(None, self._keeps)

    def stream_of(self, peer: Peer) -> UpdateStream | None:
        """Return the stream for a node's updates, None if they are to be ignored."""
        if peer in self.others:
            return self.others[peer]
        return None if peer in self.departing else self.members.get(peer)

    def wrong_step(self, peer: Peer, step: int) -> MessageError:
        """Return the error for an update that cannot be the next one of its sender."""
        return MessageError(
            f"{peer.address} sent step {step} while this node is at step {self.next_step}: begin "
            "with the same checkpoint on all nodes"
        )

    def take_updates(self, last: float = math.inf) -> Updates:
        """Return and forget the updates that have arrived, every member's in order, up to step ``last``."""
        taken = []
        for peer, stream in self.members.items():
            while stream.position in stream and stream.position <= last:
                note = stream.notes.get(stream.position)
                if note is not None:
                    self.heard.append((peer, note))
                taken.append((peer, stream.take_messages()))
        return taken

    def applied_since(self, step: int) -> list[memoryview] | None:
        """Return the applied payloads of all updates from ``step`` on; None if some are no longer kept."""
        if step < self._oldest_cut:
            return None
        found = []
        for stream in [*self.members.values(), *self.past.values()]:
            first = max(step, stream.begun)
            payloads = [
                payload for tag, payload in stream.raw(first, stream.position) if tag < TAG_NUMBERS
            ]
            if len(payloads) < stream.position - first:
                return None
            found += payloads
        return found


class Router:
    """Receives the node's messages and events, and passes each to its handler; sends control messages.

    Args:
        node: all its messages and events are taken.
        membership: gets the updates.
        parse: returns the messages of an update, given its sender, step and bytes; raises `MessageError` if they are
            not this exchange's.

    Attributes:
        handlers: by kind: called with sender, number and payload. Updates and notes are handled here.
        lost: the members that the last ``receive`` found lost.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        parse: Callable[[Peer, int, memoryview], list[Message]],
    ) -> None:
        self.node = node
        self._membership = membership
        self._parse = parse
        self.handlers: dict[int, Callable[[Peer, int, memoryview], None]] = {
            Kind.UPDATE: self._add_update,
            Kind.NOTE: self._add_note,
        }
        self.lost: set[Peer] = set()
        self._waiting: deque[tuple[int, bytes, Peer | None]] = deque()
        self._connected: frozenset[Peer] = frozenset()
        self._introduced: set[Peer] = set()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, number: int, payload: bytes, to: Peer | None = None) -> None:
        """Queue a control message for all peers or for one, and send as much as there is space for."""
        # At once if possible: the caller may go off to compute while others wait for the message.
        self._waiting.append((tag_of(kind, number), payload, to))
        self.flush()

    def flush(self) -> bool:
        """Send the queued messages; return whether none is left."""
        while self._waiting:
            tag, payload, to = self._waiting[0]
            try:
                self.node.publish(payload, tag=tag, to=to)
            except WouldBlock:
                return False
            except NotConnected:
                pass  # the peer has gone
            self._waiting.popleft()
        return True

    def introduce(self, to: Peer | None = None) -> None:
        """Send this node's introduction to all peers or to one."""
        self.send(Kind.HELLO, 0, self._membership.own_hello().encode(), to)

    def announce(self, phase: Phase) -> None:
        """Enter a phase and tell all peers."""
        self._membership.phase = phase
        self.introduce()

    def publish_parts(self, step: int, unsent: deque[tuple[Peer, bytes]]) -> bool:
        """Send single nodes their parts of this node's update; return whether none is left.

        Raises:
            TooLarge: the transport refuses the size.
        """
        while unsent:
            peer, payload = unsent[0]
            try:
                self.node.publish(payload, tag=tag_of(Kind.PART, step), to=peer)
            except WouldBlock:
                return False
            except NotConnected:
                pass  # the peer has gone, and does not get the part
            unsent.popleft()
        return True

    def publish_update(self, step: int, payload: Message | bytes) -> Ticket | None:
        """Send this node's update and, before it, its note; return None without space, for another try.

        Raises:
            TooLarge: the transport refuses the size; nothing was sent.
        """
        if self._membership.next_step <= step:
            note = self._membership.make_note(step)
            if note is not None:
                self.send(Kind.NOTE, step, note.encode())
        if not self.flush():
            return None
        try:
            return self.node.publish(payload, tag=step)
        except WouldBlock:
            return None

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> set[Peer]:
        """Send queued messages, handle messages and events for up to ``timeout_s``, and return the lost members.

        Members that go down meanwhile are lost in the next call, after their last messages.
        """
        peers, events = frozenset(self.node.peers), self.node.events()
        for event in events:
            if isinstance(event, PeerLost):
                reason = _REASONS.get(event.reason, f"is gone: {event.reason}")
                self._membership.reasons.setdefault(event.peer, reason)
                self._forget_connection(event.peer)
        if events or peers != self._connected or not self._membership.hellos.keys() <= peers:
            self._connected = peers
            self._introduced &= peers
            for peer in sorted(peers - self._introduced):
                self._introduced.add(peer)
                self.introduce(peer)
            # An introduction may be handled after its connection has ended, or before it is seen.
            for peer in [peer for peer in self._membership.hellos if peer not in peers]:
                self._forget_connection(peer)
        self.flush()
        for peer, tag, payload in self.node.receive(timeout_s=timeout_s):
            kind, number = divmod(tag, TAG_NUMBERS)
            self._handle(peer, kind, number, payload)
        self.lost = self._membership.broken | (self._membership.members.keys() - peers)
        return self.lost

    def _forget_connection(self, peer: Peer) -> None:
        self._introduced.discard(peer)
        self._membership.forget_connection(peer)

    def _handle(self, peer: Peer, kind: int, number: int, payload: memoryview) -> None:
        membership, handler = self._membership, self.handlers.get(kind)
        if handler is None:  # of a later version
            return
        if kind == Kind.HELLO:
            handler(peer, number, payload)
            return
        if peer in membership.mismatched:
            membership.ignored += kind == Kind.UPDATE
            return
        try:
            handler(peer, number, payload)
        except MessageError as error:
            if membership.phase is not Phase.IN or peer in membership.members:
                raise
            _LOG.warning("%s is no member, its message is ignored: %s", peer.address, error)

    def _add_update(self, peer: Peer, step: int, payload: memoryview) -> None:
        membership = self._membership
        stream = membership.stream_of(peer)
        if stream is None and membership.phase is not Phase.IN:
            _LOG.debug("step %d from %s came before its introduction", step, peer.address)
        elif stream is None:
            membership.ignored += 1
            _LOG.warning("step %d from %s ignored: it is not a member", step, peer.address)
        elif stream.accepts(step):
            stream.add_update(self.parse(peer, step, payload), payload)
        elif membership.others.get(peer) is stream:
            # From a new connection, before its introduction: others were lost with the old one.
            del membership.others[peer]
        elif peer not in membership.broken and step >= (stream.first or 0):
            raise membership.wrong_step(peer, step)

    def _add_note(self, peer: Peer, step: int, payload: memoryview) -> None:
        stream = self._membership.stream_of(peer)
        if stream is not None:
            stream.add_note(step, Note.decode(payload), payload)

    def parse(self, peer: Peer, step: int, payload: memoryview) -> list[Message]:
        """Return the messages of an update.

        Raises:
            MessageError: not messages, or those of another model; the error names both sides.
        """
        try:
            return self._parse(peer, step, payload)
        except MessageError as error:
            me = self._membership.me.address
            raise MessageError(
                f"step {step} from {peer.address} to this node ({me}): {error}"
            ) from error
