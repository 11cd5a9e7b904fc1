"""The members as one node sees them, their updates in order, and the router of messages and events.

Nobody but `Membership` changes what a membership holds.
"""

from __future__ import annotations

import logging
import math
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import clock
from ..errors import MessageError, Mismatch, WouldBlock
from ..message import Message
from ..slices import LEAST_SLICE_BYTES, Assembler, Outgoing, Slicer, tag_of_slice
from ..transport import Peer, PeerLost
from .protocol import (
    STEP_S_MAX,
    TAG_NUMBERS,
    Hello,
    Introductions,
    Kind,
    NodeRun,
    Note,
    PartUpdate,
    Phase,
    run_of,
    tag_of,
)
from .results import Pace

if TYPE_CHECKING:
    from ..transport import Node, Received, Ticket

__all__ = ["STEPS_AHEAD_MAX", "Membership", "Router", "UpdateStream", "Updates"]

_LOG = logging.getLogger(__name__)

Updates = list[tuple[NodeRun, list[Message]]]
Receiver = NodeRun | list[NodeRun] | None  # None: all

STEPS_AHEAD_MAX = 1_024  # of notes, and of updates that nobody applies yet
_UPDATE_OBJECT_BYTES = 2_000  # memory of the Python objects of an update

# Documents whose loss changes no replica: one that cannot be read is ignored, and costs its sender alone.
_DOCUMENTS = (Kind.NOTE, Kind.REPORT, Kind.REQUEST, Kind.SNAPSHOT)


class UpdateStream:
    """The updates of one node from some step on: in order, once, and kept a little longer than needed here.

    Attributes:
        first_received: number of the first update that arrives here; None: unknown until that update arrives.
        received: number of the next update to arrive.
        position: number of the next update to apply.
        first_direct: number of the first update that was applied from here rather than with a snapshot.
        notes: by step of the update that they belong to.
        is_provisional: whether the updates are kept, and not applied, until their sender names this node as a member.
        kept_until: of a departed member: the last step of this node at which another member may lack updates.
    """

    def __init__(self, first_received: int | None, keeps: int) -> None:
        self.first_received = first_received
        self.received = self.position = self.first_direct = first_received or 0
        self.notes: dict[int, Note] = {}
        self.is_provisional = False
        self.kept_until = math.inf
        self._keeps = keeps
        # Bytes of updates outlive their application: if the sender dies, a member that has its last updates relays the
        # bytes to members that lack them, and all of them parse the same.
        self._messages: dict[int, list[Message]] = {}
        self._payloads: dict[int, list[tuple[int, memoryview]]] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._messages

    @property
    def next_missing(self) -> int:
        """Number of the first update that has neither arrived nor been applied."""
        return max(self.received, self.position)

    @property
    def waiting_bytes(self) -> int:
        """Memory of these updates."""
        sizes = [message.nbytes for update in self._messages.values() for message in update]
        return sum(sizes) + _UPDATE_OBJECT_BYTES * len(self._messages)

    @property
    def waiting(self) -> int:
        """Number of updates that have arrived and are not applied."""
        return len(self._messages)

    def has_begun(self, step: int) -> bool:
        """Return whether the sender has gone on to a step, as far as notes and updates say."""
        return step in self.notes or self.next_missing > step

    def accepts(self, step: int) -> bool:
        """Return whether the update of ``step`` is the next to arrive."""
        # A stream that begins on a new connection begins with whichever update arrives first. Everything before was
        # sent on an earlier connection or is in a snapshot, so it cannot arrive here any more.
        if self.first_received is None:
            self.first_received = self.received = self.position = self.first_direct = step
        return step == self.received

    def add_note(self, step: int, note: Note, payload: memoryview) -> None:
        """Keep a note, which arrives before its update."""
        # A note goes right before its update, so a note for a step far ahead is a mistake that would cost memory.
        if self.first_received is not None and step > self.next_missing + STEPS_AHEAD_MAX:
            raise MessageError(f"a note for step {step}, where {self.next_missing} is next")
        if len(self.notes) > self.waiting + self._keeps + STEPS_AHEAD_MAX:
            raise MessageError(f"{len(self.notes)} notes without their updates")
        self.notes[step] = note
        # A second one for the same step replaces the first: nobody may send any number of them.
        tag = tag_of(Kind.NOTE, step)
        others = [kept for kept in self._payloads.get(step, ()) if kept[0] != tag]
        self._payloads[step] = [*others, (tag, payload)]

    def add_update(self, messages: list[Message], payload: memoryview) -> None:
        """Keep the next update, unless it has been applied with a snapshot."""
        # An update below the position is in the snapshot with which this node has joined. Adding it would count it
        # twice.
        if self.received >= self.position:
            self._messages[self.received] = messages
            self._payloads.setdefault(self.received, []).append((self.received, payload))
        self.received += 1

    def add_relayed(self, messages: list[Message], payload: memoryview) -> None:
        """Keep the first update that is missing, which came through another node."""
        self.received = self.next_missing
        self.add_update(messages, payload)

    def cut_at(self, step: int) -> None:
        """Forget the updates from ``step`` on, which nobody applies."""
        self.received = min(self.received, max(step, self.position))
        for number in [number for number in self._messages if number >= step]:
            del self._messages[number]

    def start_at(self, step: int) -> None:
        """Continue at ``step``: everything before has been applied."""
        if self.first_received is None:
            self.first_received = self.received = step
        for old in [old for old in self._messages if old < step]:
            del self._messages[old]
        self.position = self.first_direct = step
        oldest = self.position - self._keeps
        for kept in (self._payloads, self.notes):
            for old in [old for old in kept if old < oldest]:
                del kept[old]

    def take_messages(self) -> list[Message]:
        """Return the next update to apply, and advance.

        Raises:
            KeyError: the update has not arrived.
        """
        messages = self._messages.pop(self.position)
        self.position += 1
        # One update leaves for each that is applied, so nothing needs to be searched in a step.
        oldest = self.position - self._keeps
        self._payloads.pop(oldest - 1, None)
        self.notes.pop(oldest - 1, None)
        return messages

    def messages_of(self, step: int) -> list[Message]:
        """Return an update that has arrived and was not applied."""
        return self._messages[step]

    def raw(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """Yield tag and payload of all messages for the steps from ``first`` to ``last`` exclusive, in order."""
        for step in range(first, last):
            yield from self._payloads.get(step, ())


class Membership:
    """The members, as this node sees them, and the updates that have arrived.

    Args:
        me: this node.
        introductions: of all connected nodes.
        role: of this node.
        step: number of this node's first step.
        keeps: applied updates of every member that are kept, for peers that miss some when their sender dies.
        waits: updates of a member that may wait to be applied.

    Attributes:
        run: this node.
        introductions, waits: as given.
        phase: of this node.
        origin: the node that began the training.
        is_sharded: the way that the first members have chosen; None before the training begins.
        next_step: the first step whose update this node has not published.
        first_step: of this node as a member.
        members: the update streams of the other members, by node; of departed ones until all updates are applied.
        others: the update streams of nodes that are not members.
        past: the update streams of departed members.
        broken: members whose connection ended.
        departing: for every member that is gone, the first of its updates that this node lacks.
        finals: for those on which the members have agreed, the first update that nobody applies.
        reported: the nodes that others report as gone, this node perhaps among them, and those that it reports.
        pace: of this node's exchanges.
    """

    def __init__(
        self, me: Peer, introductions: Introductions, role: str, step: int, keeps: int, waits: int
    ) -> None:
        self.run = run_of(me)
        self.introductions = introductions
        self.waits = waits
        self.phase = Phase.NEW
        self.origin = self.run
        self.is_sharded: bool | None = None
        self.next_step = step
        self.first_step = step
        self.members: dict[NodeRun, UpdateStream] = {}
        self.others: dict[NodeRun, UpdateStream] = {}
        self.past: dict[NodeRun, UpdateStream] = {}
        self.broken: set[NodeRun] = set()
        self.departing: dict[NodeRun, int] = {}
        self.finals: dict[NodeRun, int] = {}
        self.reported: set[NodeRun] = set()
        self.pace = Pace()
        self._role = role
        self._keeps = keeps
        # Of the snapshot with which this node has joined: the first update that is not in it; None: a first member.
        self._snapshot_step: int | None = None
        # Lost and joined members, for the next step's result.
        self._events: tuple[list[NodeRun], list[NodeRun]] = ([], [])

    # ---- members -----------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[NodeRun, ...]:
        """The other members that are not gone, by node."""
        if not self.departing:
            return tuple(self.members)
        return tuple(run for run in self.members if run not in self.departing)

    @property
    def teams(self) -> list[tuple[int, int]]:
        """The workers on the machines of this node and of the other members, see `Hello`."""
        teams = self.introductions.teams
        return [teams.get(run, (1, 1)) for run in (self.run, *self.peers)]

    @property
    def weight(self) -> float:
        """Factor of this node's updates with which every worker has the same weight in the mean of the nodes."""
        # The sender weighs, not the receiver: messages, owners' sums and residuals then all have the same unit, and
        # nodes that learn at different times how many workers there are still add the same. Exactly 1 where all
        # machines have equally many workers.
        teams = self.teams
        own = teams[0][1]
        return own * len(teams) / sum([averaged for _, averaged in teams])

    @property
    def is_first(self) -> bool:
        """Whether this node has the lowest id of all members."""
        peers = self.peers
        return self.phase is Phase.IN and (not peers or self.run < peers[0])

    def begin(
        self,
        others: Iterable[NodeRun],
        step: int,
        origin: NodeRun,
        *,
        is_sharded: bool,
        training: str = "",
    ) -> None:
        """Begin the training with these members, a new one without an identity; `enter` follows."""
        self.origin = origin
        self.is_sharded = is_sharded
        self.pace.note()
        for run in others:
            self.add_member(run, step)
        introductions = self.introductions
        training = training or introductions.training or secrets.token_hex(8)
        introductions.take_part(training, is_confirmed=introductions.is_confirmed)

    def follow_snapshot(
        self,
        positions: dict[NodeRun, int],
        finals: dict[NodeRun, int],
        step: int,
        origin: NodeRun,
        *,
        is_sharded: bool,
        training: str,
    ) -> None:
        """Continue from a snapshot.

        Args:
            positions: for every member the first update that is not in the snapshot.
            finals: for departed members the first update that nobody applied.
            step: the next step.
            origin: the node that began the training.
            is_sharded: the way of the training.
            training: its identity.
        """
        self.finals = dict(finals)
        self.past.clear()
        self._snapshot_step = min(positions.values(), default=step)
        self.next_step = step
        self.begin((), step, origin, is_sharded=is_sharded, training=training)
        self.introductions.confirm()
        for run, position in positions.items():
            self.add_member(run, position)

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        self.phase = phase

    def enter_at(self, step: int) -> None:
        """Become a member whose first update is that of ``step``."""
        self.first_step = step
        self.phase = Phase.IN

    def reach_step(self, step: int) -> None:
        """Note that the next update to publish is that of ``step`` or a later one."""
        self.next_step = max(self.next_step, step)
        if self.past:
            self.past = {run: kept for run, kept in self.past.items() if kept.kept_until >= step}

    def restart_at(self, step: int) -> None:
        """Begin at a step, before the training; or publish the update of ``step`` again, which was refused."""
        self.next_step = step

    def add_member(self, run: NodeRun, first: int) -> None:
        """Make a node a member from its update ``first`` on."""
        # Updates of a newcomer may have arrived before this node admits it: a faster member has admitted it already.
        # They are in the stream of a node that is no member yet, which now becomes the member's.
        stream = self.others.pop(run, None) or UpdateStream(first, self._keeps)
        if stream.first_received is not None and stream.first_received > first:
            # The connection has begun anew, and the first updates came before: the node counts as lost.
            _LOG.warning("%s", self.wrong_step(run, stream.first_received))
            stream = UpdateStream(first, self._keeps)
            self.broken.add(run)
        stream.start_at(first)
        # Sorted by node: every loop over members, and with it every sum of their updates, has the same order on all
        # nodes.
        self.members = dict(sorted({**self.members, run: stream}.items()))
        # A node that comes back begins anew: earlier agreements and reports are about the time before.
        self.past.pop(run, None)
        self.departing.pop(run, None)
        self.finals.pop(run, None)
        self.reported.discard(run)

    def admit(self, run: NodeRun, first: int) -> None:
        """Make a newcomer a member from its update ``first`` on, for the next step's result too."""
        step = self.introductions.step_number(first)
        _LOG.info("%s comes in with step %d", self.introductions.name_of(run), step)
        self.add_member(run, first)
        self._events[1].append(run)

    def admit_unaware(self, run: NodeRun) -> None:
        """Keep a member's updates, which has come in without naming this node, until it does.

        Asynchronous nodes admit newcomers by their introductions. One that does not know this node may have come in
        with a part of a split network whose members were this node's, too: the others here then apply none of its
        updates. A newcomer that came in beside this node names it as soon as it hears of it. Nobody names an observer.
        """
        self.members[run].is_provisional = self._role != "observer" and not self.is_known_to(run)

    def mark_broken(self, run: NodeRun) -> None:
        """Note that a member's updates have a gap, as if its connection had ended."""
        self.broken.add(run)

    def mark_departing(self, run: NodeRun) -> None:
        """Take no more updates from a member that is gone."""
        # From here on nothing more is accepted from the member, also where its connection still works: this node is
        # about to report how many of its updates it has, and that number must stay true.
        stream = self.members[run]
        self.departing[run] = stream.position if stream.is_provisional else stream.next_missing
        self.reported.add(run)

    def add_reported(self, runs: Collection[NodeRun]) -> None:
        """Add nodes that others report as gone."""
        self.reported.update(runs)

    def forget_reports(self) -> None:
        """Begin without reports, before a snapshot."""
        self.reported.clear()

    def agree_on_final(self, run: NodeRun, final: int) -> None:
        """Note the first update of a departed member that nobody applies."""
        self.finals[run] = final
        stream = self.members[run]
        if stream.is_provisional:
            # Kept updates that others have applied count here, too, and those that nobody has applied do not.
            stream.cut_at(final)
            stream.is_provisional = False
            self.departing[run] = stream.next_missing

    def refuse_from(self, run: NodeRun, step: int) -> None:
        """Note that nobody applies a member's update of ``step`` or a later one, and that it is a member no more."""
        self.members[run].cut_at(step)
        self.departing[run] = step
        self.finals[run] = step
        self.reported.add(run)

    def remove_member(self, run: NodeRun) -> None:
        """Remove a departed member, for the next step's result too."""
        # The stream stays for a while: another member may still lack updates that this node can relay. No member gets
        # further ahead of one that waits for them.
        stream = self.members.pop(run)
        stream.kept_until = self.next_step + self._keeps
        self.past[run] = stream
        self.broken.discard(run)
        self._events[0].append(run)

    def drain_events(self) -> tuple[list[NodeRun], list[NodeRun]]:
        """Return the members that went and those that came since the last call."""
        events = self._events
        self._events = [], []
        return events

    def forget_members(self) -> None:
        """Stop being a member; updates count again from where the others introduce themselves to a newcomer."""
        # What this node has applied is still true of its parameters, should it have to go on with them.
        self.finals.update(self.positions)
        # So are the updates that follow, where another member can add to what a newcomer has.
        for run, stream in self.members.items() if self.phase is Phase.READY else ():
            stream.first_received = stream.position
            (self.past if run in self.broken else self.others).setdefault(run, stream)
        self.introductions.leave_training()
        self.members.clear()
        self.broken.clear()
        self.departing.clear()
        self.reported.clear()

    @property
    def destination(self) -> Phase:
        """The phase in which this node takes part."""
        return Phase.READY if self._role == "observer" else Phase.IN

    # ---- introductions -----------------------------------------------------------------------------------------------

    def own_hello(self) -> Hello:
        """Return this node's introduction."""
        # Only a member's word about the members counts: a node that leaves or joins has an old or an incomplete view.
        members: list[NodeRun] = []
        if self.phase is Phase.IN:
            members = sorted({self.run, *self.peers})
        elif self.phase in (Phase.NEW, Phase.JOINING):
            members = sorted(self.introductions.compatible(Phase.IN))
        sees: Iterable[NodeRun] = ()
        if self.phase is Phase.NEW:
            sees = self.introductions.compatible(Phase.NEW)
        elif self.phase is Phase.IN:
            sees = filter(self.gets_updates, self.introductions.hellos.keys() - members)
        return Hello(
            self.introductions.signature,
            self.phase,
            self.next_step,
            tuple(members),
            self.first_step,
            self.next_step,
            self.origin,
            self._role,
            self.introductions.start,
            self.is_sharded,
            self.introductions.teams[self.run],
            self.introductions.training,
            self.introductions.is_confirmed,
            min(self.pace.present_s, STEP_S_MAX),
            self.introductions.slice_bytes,
            self.introductions.excluded,
            tuple(sorted(sees)),
        )

    def set_params(self, layout: list[list[object]], start: tuple[str, str]) -> bool:
        """Add the dtypes and shapes of the parameters to the signature; return whether anything has changed."""
        if not self.introductions.set_params(layout, start):
            return False
        for run in self.introductions.hellos:
            if run not in self.introductions.incompatible and run not in self.members:
                self.expect_updates(run)
        return True

    def forget_connection(self, run: NodeRun, reason: str | None) -> None:
        """Forget a connection that has ended, and remember why unless the node has said why it goes."""
        self.introductions.forget(run, reason)
        stream = self.others.pop(run, None)
        # The values of a donor that dies may need its last updates before another donor can go on with them.
        if stream is not None and stream.received and self.phase is Phase.JOINING:
            self.past[run] = stream
        if run in self.members:
            self.broken.add(run)

    def gets_updates(self, run: NodeRun) -> bool:
        """Return whether this node, a member, sends its updates to a node."""
        # A node that has not begun may be busy with something else for minutes, and would need none of them later.
        hello = self.introductions.hellos.get(run)
        return run in self.members or (hello is not None and hello.phase is not Phase.NEW)

    def is_known_to(self, run: NodeRun) -> bool:
        """Return whether a node named this node as a member when it last introduced itself."""
        hello = self.introductions.hellos.get(run)
        return hello is not None and hello.phase is Phase.IN and self.run in hello.members

    @property
    def members_unaware_of_us(self) -> frozenset[NodeRun]:
        """The members that have not named this node, which came late, as a member.

        They do not apply its updates, so an asynchronous node sends none yet; a synchronous one is `READY` as long.
        """
        # The first members name each other before anybody sends an update.
        if self._snapshot_step is None:
            return frozenset()
        # What a member said is forgotten with its connection, and it is gone in a moment.
        here = set(self.peers) - self.broken
        return frozenset(run for run in here if not self.is_known_to(run))

    def lacks_updates(self, next_missing: dict[NodeRun, int]) -> bool:
        """Return whether updates before these of departed nodes, which this node has never met, are missing here.

        Two asynchronous nodes may come in by the same member without seeing each other. If one of them goes before they
        do, the other has none of its updates, and the members have applied them.
        """
        # What is reported of the time before the snapshot is in it. First members have met everybody: a newcomer waits
        # until they know it.
        begin = self._snapshot_step
        return begin is not None and any(
            step > max(begin, self.finals.get(run, 0))
            for run, step in next_missing.items()
            if run not in self.members
        )

    # ---- positions ---------------------------------------------------------------------------------------------------

    @property
    def slowest(self) -> tuple[int, NodeRun] | None:
        """Number of the next update of the slowest member, and that member; None without members."""
        return min(((self.members[run].next_missing, run) for run in self.peers), default=None)

    @property
    def positions(self) -> dict[NodeRun, int]:
        """For every other member, the number of its next update to apply."""
        return {run: stream.position for run, stream in self.members.items()}

    def missing(self, step: int) -> frozenset[NodeRun]:
        """Return the members whose update of ``step`` may still arrive."""
        return frozenset(
            run
            for run, stream in self.members.items()
            if step not in stream and step < self.finals.get(run, step + 1)
        )

    def contributors_before(self, step: int) -> str:
        """Return a name for the set of nodes whose updates are in the state before a step, as this node sees them."""
        # A member that has just been admitted has contributed nothing to the state so far.
        runs = [run for run, stream in self.members.items() if stream.first_direct < step]
        if self.first_step < step:
            runs.append(self.run)
        # A checksum tells sets apart well enough: a collision would only let a comparison go ahead that finds a
        # difference in a step in which members change.
        return f"{zlib.crc32(repr(sorted(map(tuple, runs))).encode()):08x}"

    # ---- updates -----------------------------------------------------------------------------------------------------

    def expect_updates(self, run: NodeRun, *, anew: bool = False) -> UpdateStream:
        """Return the stream of a node that is not a member, which begins with whichever update arrives first.

        Args:
            run: the node.
            anew: whether to forget what has arrived.
        """
        if anew or run not in self.others:
            self.others[run] = UpdateStream(None, self._keeps)
        return self.others[run]

    def expect_direct(self, run: NodeRun, hello: Hello) -> None:
        """Expect the updates of a node that is no member here, from the first that it says it sends directly."""
        if not hello.serves(self.run):
            return
        first = hello.first_direct
        stream = self.expect_updates(run)
        # Introductions of two connections may be handled together. The updates between them are lost.
        if stream.first_received is not None and stream.received < first:
            stream = self.expect_updates(run, anew=True)
        if stream.first_received is None:
            stream.start_at(first)

    def expect_nothing(self, run: NodeRun) -> None:
        """Wait for the introduction of a node that is not a member before its updates count."""
        self.others.pop(run, None)

    def stream_of(self, run: NodeRun) -> UpdateStream | None:
        """Return the stream for a node's updates, None if they are to be ignored."""
        # A member that joins again has both: the old stream until its last updates are applied, the new one for the
        # time after. What arrives now was sent on the new connection.
        if run in self.others:
            return self.others[run]
        return None if run in self.departing else self.members.get(run)

    def add_relayed(self, run: NodeRun, messages: list[Message], payload: memoryview) -> None:
        """Keep the first missing update of a departing member, which came through another node."""
        stream = self.members[run]
        stream.add_relayed(messages, payload)
        self.departing[run] = stream.next_missing

    def wrong_step(self, run: NodeRun, step: int) -> MessageError:
        """Return the error for an update that cannot be the next one of its sender."""
        return MessageError(
            f"{self.introductions.peer_of(run).address} sent step {step} while this node is at step {self.next_step}: "
            "begin with the same checkpoint on all nodes"
        )

    def updates_of(self, step: int) -> Updates:
        """Return the other members' updates of a step, which `take_updates` still has."""
        streams = self.members.items()
        return [(run, stream.messages_of(step)) for run, stream in streams if step in stream]

    def take_updates(self, last: float = math.inf) -> Updates:
        """Return and forget the updates that have arrived, every member's in order, up to step ``last``."""
        updates: Updates = []
        for run, stream in self.members.items():
            if stream.is_provisional:
                stream.is_provisional = not self.is_known_to(run)
            if stream.is_provisional:
                continue
            while stream.position in stream and stream.position <= last:
                updates.append((run, stream.take_messages()))
        return updates


Handler = Callable[[NodeRun, int, memoryview], None]


class Router:
    """Receives the node's messages and events, and passes each to its handler; sends control messages.

    Args:
        node: all its messages and events are taken.
        membership: gets the updates.
        parse: returns the messages of an update, given its sender, step and bytes; raises `MessageError` if they are
            not this exchange's.
        largest_bytes: size of the largest message that this exchange has a use for.

    Attributes:
        node: as given.
        lost: the members that the last ``receive`` found lost.
        remaining: messages that were received and are still to be handled.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        parse: Callable[[NodeRun, int, memoryview], list[Message]],
        largest_bytes: int,
    ) -> None:
        self.node = node
        self.lost: set[NodeRun] = set()
        self.remaining: deque[Received] = deque()
        self._membership = membership
        self._introductions = membership.introductions
        self._parse = parse
        self._handlers: dict[int, Handler] = {
            Kind.UPDATE: self._add_update,
            Kind.NOTE: self._add_note,
            Kind.SLICE: self._add_slice,
        }
        self._unsent: deque[Outgoing] = deque()
        self._update: Outgoing | None = None  # a large one, on its way
        self._slicer = Slicer(node, tag_of(Kind.SLICE, 0), self._peers_of, self._most_bytes)
        self._assembler = Assembler(largest_bytes)
        self._runs: dict[Peer, NodeRun] = {}  # of the connected peers
        # What was seen last, so that a step in which nobody comes or goes compares two tuples and nothing else.
        self._connected: frozenset[NodeRun] = frozenset()
        self._introduced: set[NodeRun] = set()
        self._ended: set[NodeRun] = set()  # connections that may have left messages
        self._slice_bytes = self._introductions.slice_bytes  # that all connected nodes take
        self._ignored = 0  # updates of nodes that are no members
        self._log = clock.LogLimit(_LOG.warning)
        # The step of the last update to this exchange, and introductions to the next one.
        self._held: tuple[int, list[tuple[NodeRun, memoryview]]] | None = None
        self._refuse: Callable[[NodeRun, int, str], bool] = lambda *_: False

    def handle(self, kind: Kind, handler: Handler) -> None:
        """Pass messages of a kind to a handler: it is called with sender, number and payload."""
        self._handlers[kind] = handler

    def set_refuse(self, refuse: Callable[[NodeRun, int, str], bool]) -> None:
        """Ask a function to go on without the sender of a message that cannot be used; it returns whether it can."""
        self._refuse = refuse

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, number: int, payload: bytes, receiver: Receiver = None) -> None:
        """Queue a control message for all peers or for some, and send as much as there is space for."""
        # At once if possible: the caller may go off to compute while others wait for the message.
        self._unsent.append(Outgoing(tag_of(kind, number), payload, receiver))
        self.flush()

    def flush(self, queue: deque[Outgoing] | None = None) -> bool:
        """Send the queued messages, or those of another queue, while there is space; return whether none is left."""
        is_empty = self._slicer.send_all(self._unsent if queue is None else queue)
        if not is_empty:
            self.make_room()
        return is_empty

    def make_room(self) -> None:
        """End the connections of nodes that are no members and take nothing: they join again, with a snapshot."""
        members = self._membership.members
        outside = {peer for peer, run in self._runs.items() if run not in members}
        if outside and self._membership.phase is Phase.IN:
            self.node.drop_late(outside)

    def participants(self) -> list[NodeRun] | None:
        """Return the nodes that an update and its note are for; None: all that are connected."""
        if self._membership.members.keys() >= self._connected:
            return None
        return [run for run in self._runs.values() if self._membership.gets_updates(run)]

    def _peers_of(self, receiver: NodeRun | list[NodeRun]) -> Peer | set[Peer]:
        peer_of = self._introductions.peer_of
        return peer_of(receiver) if isinstance(receiver, NodeRun) else set(map(peer_of, receiver))

    def _most_bytes(self, outgoing: Outgoing) -> int:
        """Return how many bytes of a message all its receivers take at once."""
        # How much a peer takes is known once it has introduced itself, so an introduction must not need to know.
        if outgoing.tag // TAG_NUMBERS == Kind.HELLO:
            return LEAST_SLICE_BYTES
        receivers = self._connected if outgoing.receiver is None else outgoing.receiver
        return self._introductions.common_slice_bytes(
            [receivers] if isinstance(receivers, NodeRun) else receivers
        )

    @property
    def slices(self) -> int:
        """Number of slices sent and received so far: who waits for a large message sees that it goes on."""
        return self._slicer.slices + self._assembler.slices

    def greet(self) -> None:
        """Introduce this node to nodes that have come since the last `receive`, before an update or its note."""
        if self.node.peers != tuple(self._runs):
            self._greet(self.node.peers)

    def introduce(self, receiver: NodeRun | None = None) -> None:
        """Send this node's introduction to all peers or to one."""
        self.send(Kind.HELLO, 0, self._membership.own_hello().encode(), receiver)

    def announce(self, phase: Phase) -> None:
        """Enter a phase and tell all peers."""
        self._membership.enter(phase)
        self.introduce()

    def publish_update(self, step: int, payload: list[Any]) -> Ticket | None:
        """Send this node's update, after what is queued; return None without space, for another try.

        Raises:
            TooLarge: the transport refuses the size; nothing was sent.
        """
        self._membership.reach_step(step + 1)
        if self._unsent and not self.flush():
            return None
        receivers = self.participants()
        try:
            if sum([memoryview(piece).nbytes for piece in payload]) <= self._slice_bytes:
                whole = payload[0] if len(payload) == 1 else b"".join(payload)
                to = None if receivers is None else self._peers_of(receivers)
                return self.node.publish(whole, tag=step, to=to)
            # A step may be encoded again, after this node has joined again: slices of the earlier update are of no use.
            if self._update is None or self._update.payload is not payload:
                self._update = Outgoing(step, payload, receivers)
            ticket = self._slicer.send(self._update)
        except WouldBlock:
            self.make_room()
            return None
        self._update = None
        return ticket

    def drain_ignored(self) -> int:
        """Return the number of updates of nodes that are no members since the last call."""
        count = self._ignored
        self._ignored = 0
        return count

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def hold_introductions(self, step: int) -> None:
        """From now on keep introductions of members that have gone on to another exchange, after ``step``; -1: any."""
        self._held = (step, [])

    @property
    def held(self) -> list[tuple[NodeRun, memoryview]]:
        """Senders and introductions that were kept."""
        return [] if self._held is None else self._held[1]

    def replay(self, introductions: Iterable[tuple[NodeRun, memoryview]]) -> None:
        """Handle introductions that an earlier exchange has kept."""
        self._greet(self.node.peers)
        for sender, payload in introductions:
            self._handle(sender, Kind.HELLO, 0, payload)

    def _hold(self, sender: NodeRun, payload: memoryview) -> bool:
        """Keep an introduction to a member's next exchange; return whether it is one.

        Raises:
            Mismatch: the member has gone on a step before this node.
        """
        # A node that joins again goes on with whoever has begun, until it is a member.
        is_joining = self._membership.phase is Phase.JOINING
        if self._held is None or is_joining or not Hello.begins_anew(payload):
            return False
        known = self._introductions.hellos.get(sender)
        if known is not None and known.phase is Phase.NEW:
            return False  # repeated while it waited: that it has begun is still to come
        last, held = self._held
        stream = self._membership.members.get(sender)
        # Messages of a node arrive in order: what it has not sent before the introduction does not come any more. Of a
        # node that is gone, the introduction may be an old one.
        if stream is not None and stream.next_missing <= last and sender in self._connected:
            there = self._introductions.name_of(sender)
            raise Mismatch(
                f"{there} has added parameters after an earlier step: add them after the same step on all nodes"
            )
        held.append((sender, payload))
        return True

    def receive(self, timeout_s: float) -> set[NodeRun]:
        """Send and handle messages and events for up to ``timeout_s``, and return the lost members."""
        peers = self.node.peers
        if peers != tuple(self._runs) or not self._introductions.hellos.keys() <= self._connected:
            self._greet(peers)
        if self._unsent:
            self.flush()
        if not self.remaining:  # an interrupted call leaves what it has taken
            self._take(timeout_s)
        while self.remaining:
            peer, tag, payload = self.remaining.popleft()
            kind, number = divmod(tag, TAG_NUMBERS)
            sender = self._runs.get(peer) or self._introductions.register(peer)
            self._handle(sender, kind, number, payload)
        if self._assembler.assemblies:
            self._assembler.keep_only(self._connected)
        # A connection may break and come back between two calls, when the peer is connected again but what was under
        # way is lost. Such a member has to begin anew as well: ``broken`` remembers it.
        self.lost = self._membership.broken | (self._membership.members.keys() - self._connected)
        return self.lost

    def _take(self, timeout_s: float) -> None:
        """Take messages and events from the node; wait up to ``timeout_s`` for some."""
        self.remaining.extend(self.node.receive(timeout_s=timeout_s))
        # Losses before messages: a connection that has ended and begun again meanwhile brings an introduction, which
        # would be forgotten with the old connection. What a lost peer has sent is all taken before the peer counts as
        # lost.
        ended: set[NodeRun] = set()
        while events := self.node.events():
            for event in events:
                if isinstance(event, PeerLost):
                    run = run_of(event.peer)
                    self._forget_connection(run, event.reason)
                    ended.add(run)
            self.remaining.extend(self.node.receive(timeout_s=0.0))
            self._greet(self.node.peers)
        self._ended |= ended - self._connected

    def _greet(self, peers: tuple[Peer, ...]) -> None:
        """Introduce this node to new connections, and forget those that have ended."""
        # By peer, because a message names its sender so: the step of a mesh makes no identities anew.
        self._runs = {peer: self._introductions.register(peer) for peer in peers}
        self._connected = frozenset(self._runs.values())
        self._introduced &= self._connected
        self._slice_bytes = self._introductions.common_slice_bytes(self._connected)
        # An introduction may be handled after its connection has ended, or before it is seen.
        known = self._introductions.hellos.keys()
        for run in sorted((known - self._connected) | (known & self._ended)):
            self._forget_connection(run, None)
        self._ended.clear()
        # Every connection begins with an introduction, also one that replaces a lost connection of the same node.
        for run in sorted(self._connected - self._introduced):
            self._introduced.add(run)
            self.introduce(run)

    def _forget_connection(self, run: NodeRun, reason: str | None) -> None:
        self._introduced.discard(run)
        self._membership.forget_connection(run, reason)

    def _handle(self, sender: NodeRun, kind: int, number: int, payload: memoryview) -> None:
        membership = self._membership
        handler = self._handlers.get(kind)
        if handler is None:  # of a later version
            return
        if kind == Kind.HELLO:
            if not self._hold(sender, payload):
                handler(sender, number, payload)
                self._slice_bytes = self._introductions.common_slice_bytes(self._connected)
            return
        # Its updates would not parse, and an error must not stop the nodes that do fit.
        if sender in self._introductions.incompatible and kind != Kind.SLICE:
            self._ignored += kind == Kind.UPDATE
            return
        try:
            handler(sender, number, payload)
        except MessageError as error:
            # An update of a member may not just be left out: the replicas would differ. The members go on without its
            # sender, or the caller sees the error. A node that is no member must not be able to end the training.
            is_member = membership.phase is not Phase.IN or sender in membership.members
            name = self._introductions.name_of(sender)
            if is_member and kind not in _DOCUMENTS:
                text = str(error) if name in str(error) else f"from {name}: {error}"
                if self._refuse(sender, kind, text):
                    return
                raise MessageError(text) from error
            if not is_member:
                name += " is no member, its message"
            self._log.log(sender, clock.now_s(), "%s is ignored: %s", name, error)

    def _add_slice(self, sender: NodeRun, _: int, payload: memoryview) -> None:
        kind, number = divmod(tag_of_slice(payload), TAG_NUMBERS)
        # Of nodes that do not fit, nothing but their introductions counts, and nothing else is kept.
        if kind != Kind.HELLO and sender in self._introductions.incompatible:
            return
        message = self._assembler.add(sender, kind, payload)
        if message is not None and kind != Kind.SLICE:
            self._handle(sender, kind, number, message)

    def _add_update(self, sender: NodeRun, step: int, payload: memoryview) -> None:
        membership = self._membership
        stream = membership.stream_of(sender)
        if stream is None:
            address = self._introductions.peer_of(sender).address
            if membership.phase is not Phase.IN:
                _LOG.debug("step %d from %s came before its introduction", step, address)
                return
            self._ignored += 1
            text = "step %d from %s ignored: it is not a member"
            self._log.log(sender, clock.now_s(), text, step, address)
        elif stream.accepts(step):
            # No member gets that far ahead of another, and waiting updates cost memory.
            is_member = membership.phase is Phase.IN and sender in membership.peers
            is_member = is_member and sender not in membership.broken
            if is_member and stream.waiting >= membership.waits:
                raise MessageError(f"{stream.waiting} updates are ahead of this node")
            messages = self.parse(sender, step, payload)
            self._check_way(sender, step, messages)
            stream.add_update(messages, payload)
            # A newcomer needs all of them for its snapshot, within the bound of `Join`.
            is_bounded = sender not in membership.members and membership.phase is not Phase.JOINING
            if is_bounded and stream.waiting > STEPS_AHEAD_MAX:
                membership.expect_nothing(sender)  # until it joins, and says so
        elif membership.phase is Phase.JOINING and step < stream.received:
            pass  # a donor has sent it before, as that of a departed member
        elif membership.others.get(sender) is stream:
            # From a new connection, before its introduction: others were lost with the old one.
            membership.expect_nothing(sender)
        elif sender not in membership.broken and step >= (stream.first_received or 0):
            is_explained = (
                self._introductions.is_confirmed or sender in self._introductions.interrupted
            )
            if membership.phase is Phase.IN and (step < stream.received or not is_explained):
                raise membership.wrong_step(sender, step)
            # Both have trained, or their connection was lost, so neither has begun with a wrong checkpoint. What lies
            # between is lost: one of them joins again.
            _LOG.warning("%s", membership.wrong_step(sender, step))
            membership.mark_broken(sender)

    def _check_way(self, sender: NodeRun, step: int, messages: list[Message]) -> None:
        """Raise `MessageError` for a whole update in the sharded exchange, and for an owner's result in the mesh."""
        membership = self._membership
        is_sharded = membership.is_sharded
        # A node that joins goes on in the way of the members, which they have told it.
        if membership.phase not in (Phase.IN, Phase.READY):
            hello = self._introductions.hellos.get(sender)
            is_sharded = None if hello is None else hello.is_sharded
        if is_sharded is not None and is_sharded != isinstance(messages, PartUpdate):
            raise MessageError(
                f"step {step} from {self._introductions.name_of(sender)} is "
                + ("no result of an owner" if is_sharded else "an owner's result in a mesh")
            )

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
