"""Who takes part: greeting, beginning together, coming in late, going; and what has arrived of whom."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..errors import MessageError, Mismatch, NotConnected, WouldBlock
from ..message import Message
from ..transport import Peer, PeerLost
from . import clock
from .agreement import Agreement
from .control import (
    Hello,
    Kind,
    Note,
    Phase,
    Place,
    Report,
    pack_relay,
    place_of,
    split_tag,
    tag_of,
    unpack_relay,
)
from .groups import Groups
from .model import Model
from .snapshot import Snapshot
from .stream import Stream

if TYPE_CHECKING:
    from ..transport import Node

__all__ = ["Members"]

_LOG = logging.getLogger(__name__)

# How long one wait for messages lasts before the loop looks at the peers and the clock again.
POLL_S = 0.05

# How long the beginning waits for the greeting of a connected node, which may run no exchange at all.
_GREETING_S = 2.0


class Members:
    """The members of an exchange, this node's place among them, and their updates that were not applied yet.

    Args:
        node: the node; all its messages and events are taken.
        groups: what every update has to fit.
        model: what has to be the same on all nodes.
        step: number of this node's first step.
        is_sync: whether the members go step by step together.
        keeps: applied updates of every member that are kept, for those who miss some when it dies.
    """

    def __init__(
        self,
        node: Node,
        groups: Groups,
        model: Model,
        *,
        step: int,
        is_sync: bool,
        keeps: int,
    ) -> None:
        self._node = node
        self._groups = groups
        self._model = model
        self._is_sync = is_sync
        self._keeps = keeps
        self.phase = Phase.NEW
        self.next_step = (
            step  # the first whose update is still to be published, with all that belongs to it
        )
        self.lost: list[Peer] = []
        self.joined: list[Peer] = []
        self.heard: list[tuple[Peer, Note]] = []  # with the updates that were taken to be applied
        self.ignored = 0
        self.agreement = Agreement()
        self.on_control: Callable[[Peer, int, int, memoryview], None] = lambda *_: None
        self.origin = place_of(node.peer)  # the node that began this training
        self.on_gone: Callable[[Peer], None] = lambda _: None
        self._silent_until_s: float | None = None
        self._first_step = step  # of this node as a member
        self._members: dict[Peer, Stream] = {}
        self._others: dict[
            Peer, Stream
        ] = {}  # of nodes that are no members, or no members any more
        self._past: dict[Peer, Stream] = {}
        self._hellos: dict[Peer, Hello] = {}
        self._misfits: set[Peer] = set()  # of those that have greeted
        self._welcomed: set[Peer] = set()
        self._connected_in_order: tuple[Peer, ...] = ()
        self._connected: frozenset[Peer] = frozenset()
        self._broken: set[Peer] = set()
        self._ready: set[Peer] = set()
        self._oldest_cut = 0  # what this node has applied is known from here on, update by update
        self._own_notes: dict[int, Note] = {}
        self._outbox: deque[tuple[int, bytes, Peer | None]] = deque()

    # ---- what the exchange asks --------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether this node has taken part, or is on its way in."""
        return self.phase is not Phase.NEW

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The members besides this node that are not gone, by node id."""
        return tuple(sorted(peer for peer in self._members if peer not in self.agreement))

    @property
    def slowest(self) -> int | None:
        """The number of the next update of the slowest member; None without members."""
        return min((self._members[peer].held for peer in self.peers), default=None)

    @property
    def positions(self) -> dict[Peer, int]:
        """For every member but this node, the number of its next update to apply."""
        return {peer: stream.position for peer, stream in self._members.items()}

    def missing(self, step: int) -> frozenset[Peer]:
        """Return the members whose update of ``step`` is still to come, or of whom it is not agreed whether."""
        finals = self.agreement.finals
        return frozenset(
            peer
            for peer, stream in self._members.items()
            if step not in stream and step < finals.get(peer, step + 1)
        )

    def is_ready_for(self, step: int) -> bool:
        """Whether this node, not a member yet, can follow the members through ``step``."""
        return self.phase is Phase.READY and bool(self._members) and not self.missing(step)

    def take_step(self, step: int) -> list[tuple[Peer, list[Message]]]:
        """Return the members that sent messages of ``step``, with those, and forget them."""
        return [
            (peer, self._take(peer, stream))
            for peer, stream in self._members.items()
            if step in stream
        ]

    def take_all(self) -> list[tuple[Peer, list[Message]]]:
        """Return members and messages of all that has come, every member's in its order, and forget it."""
        taken = []
        for peer, stream in self._members.items():
            while stream.position in stream:
                taken.append((peer, self._take(peer, stream)))
        self._let_go()
        return taken

    def _take(self, peer: Peer, stream: Stream) -> list[Message]:
        note = stream.notes.get(stream.position)
        if note is not None:
            self.heard.append((peer, note))
        return stream.take()

    @property
    def is_first(self) -> bool:
        """Whether this node has the lowest id of all members."""
        return self.phase is Phase.IN and all(self._node.peer < peer for peer in self.peers)

    @property
    def reached(self) -> int | None:
        """The number below which every member's updates are applied; None without members."""
        return min((stream.position for stream in self._members.values()), default=None)

    def names_at(self, cut: int) -> str:
        """Return what tells apart who contributed to the state at a cut, as far as this node knows."""
        places = [place_of(peer) for peer, stream in self._members.items() if stream.begun < cut]
        if self._first_step < cut:
            places.append(self._place)
        return f"{zlib.crc32(repr(sorted(places)).encode()):08x}"

    def applied_from(self, step: int) -> list[list[Message]] | None:
        """Return what was applied of updates from ``step`` on; None if that cannot be told any more."""
        if step < self._oldest_cut:
            return None
        found = []
        for stream in [*self._members.values(), *self._past.values()]:
            first = max(step, stream.begun)
            payloads = [
                payload
                for tag, payload in stream.raw(first, stream.position)
                if split_tag(tag)[0] == Kind.UPDATE
            ]
            if len(payloads) < stream.position - first:
                return None
            found += [self._groups.parse(payload) for payload in payloads]
        return found

    # ---- beginning together ------------------------------------------------------------------------------------------

    def begin(self, expected: int, timeout_s: float) -> None:
        """Return when this node is a member from the start on (phase IN), or has to come in late (JOINING).

        Raises:
            TimeoutError: too few nodes were there in time.
            Mismatch: the others train something else, or another step.
        """
        deadline_s = clock.now_s() + timeout_s
        if expected:
            self._node.wait_for_peers(expected, timeout_s)
        poll_s = 0.0
        while self.phase is Phase.NEW:
            self.poll(poll_s, self.next_step)
            poll_s = POLL_S
            self._look_for_a_beginning(expected)
            if self.phase is Phase.NEW and clock.now_s() >= deadline_s:
                raise self._nobody_there(expected, timeout_s)

    def _look_for_a_beginning(self, expected: int) -> None:
        good = self._fitting()
        inside = {peer: hello for peer, hello in good.items() if hello.phase is Phase.IN}
        mine = [hello for hello in inside.values() if self._place in hello.members]
        if mine:
            self._adopt(mine[0])
        elif inside:
            self.phase = Phase.JOINING
        elif self._strangers() and not good and len(self._strangers()) >= expected:
            raise Mismatch("; ".join(self._strangers()))
        else:
            if self._is_anybody_silent():
                return
            founders = {peer: hello for peer, hello in good.items() if hello.phase is Phase.NEW}
            if len(founders) >= expected and all(self._node.peer < peer for peer in founders):
                self._check_same_step(founders)
                self._be_in(founders)

    def _is_anybody_silent(self) -> bool:
        """Whether a connected node has not greeted yet: it may know of a training that has begun."""
        is_silent = not self._hellos.keys() >= set(self._node.peers)
        if not is_silent or self._silent_until_s is None:
            self._silent_until_s = clock.now_s() + _GREETING_S
        return is_silent and clock.now_s() < self._silent_until_s

    def _adopt(self, hello: Hello) -> None:
        """Begin with the members that the one with the lowest id has named, as soon as all of them are here."""
        known = {place_of(peer): peer for peer in self._fitting()}
        others = [place for place in hello.members if place != self._place]
        if all(place in known for place in others):
            chosen = {known[place]: self._hellos[known[place]] for place in others}
            self._check_same_step(chosen)
            self.origin = hello.origin
            self._be_in(chosen)

    def _check_same_step(self, hellos: dict[Peer, Hello]) -> None:
        for peer, hello in hellos.items():
            if hello.phase is Phase.NEW and hello.step != self.next_step:
                raise Mismatch(
                    f"{peer.address} begins at step {hello.step}, this node ({self._node.peer.address}) at step "
                    f"{self.next_step}: begin with the same checkpoint on all nodes"
                )

    def _be_in(self, others: Iterable[Peer]) -> None:
        for peer in others:
            self._add_member(peer, self.next_step)
        self.announce(Phase.IN)
        _LOG.info("exchange of %d nodes begins at step %d", len(self._members) + 1, self.next_step)

    def _nobody_there(self, expected: int, timeout_s: float) -> TimeoutError:
        strangers = "".join(f"; {text}" for text in self._strangers())
        return TimeoutError(
            f"{len(self._fitting())} of {expected} peers are ready within {timeout_s:g} s{strangers}"
        )

    # ---- greeting ----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Place:
        return place_of(self._node.peer)

    def _fitting(self) -> dict[Peer, Hello]:
        """Return the greetings of the connected nodes that train the same."""
        return {peer: hello for peer, hello in self._hellos.items() if peer not in self._misfits}

    def _strangers(self) -> list[str]:
        """Return for every connected node that trains something else how it differs."""
        return [self._difference(peer) for peer in sorted(self._misfits)]

    def _difference(self, peer: Peer) -> str:
        difference = self._model.difference(self._hellos[peer].model)
        return f"{peer.address} and this node ({self._node.peer.address}) do not fit: {difference}"

    @property
    def knows_params(self) -> bool:
        """Whether it is known what the parameters are like."""
        return self._model.params is not None

    def tell_params(self, described: list[Any]) -> None:
        """Say what the parameters are like, once that is known; the greetings of before fitted any.

        Raises:
            Mismatch: no other member has such parameters.
        """
        if self._model.params == described:
            return
        self._model.params = described
        for peer, hello in self._hellos.items():
            if self._tell_apart(peer, hello) and peer not in self._members:
                self._others.setdefault(peer, Stream(None, self._keeps))
        if self._welcomed:
            self.announce(self.phase)
        self._refuse_misfits()

    def _tell_apart(self, peer: Peer, hello: Hello) -> bool:
        """Note whether a node trains the same; return it."""
        is_fit = not self._model.differing(hello.model)
        if is_fit:
            self._misfits.discard(peer)
        elif peer not in self._misfits:
            self._misfits.add(peer)
            _LOG.warning("%s; it is left alone", self._difference(peer))
        return is_fit

    def _refuse_misfits(self) -> None:
        """Go on without members whose parameters turn out to be others, which they said only after the beginning."""
        misfits = [peer for peer in self.peers if peer in self._misfits]
        if not misfits or self.phase is not Phase.IN:
            return
        if len(misfits) == len(self.peers):
            raise Mismatch("; ".join(self._strangers()))
        self.suspect(misfits, "has other parameters")

    def check_somebody_fits(self) -> None:
        """Refuse to wait where training has begun and everybody there trains something else.

        Raises:
            Mismatch: it is so.
        """
        has_begun = any(self._hellos[peer].phase is Phase.IN for peer in self._misfits)
        if has_begun and not self._fitting():
            raise Mismatch("; ".join(self._strangers()))

    def fitting(self, phase: Phase) -> dict[Peer, Hello]:
        """Return the greetings of connected nodes that train the same and stand at ``phase``."""
        return {peer: hello for peer, hello in self._fitting().items() if hello.phase is phase}

    def announce(self, phase: Phase) -> None:
        """Tell everybody where this node stands now."""
        self.phase = phase
        self._send(Kind.HELLO, 0, self._hello().encode())

    def _hello(self) -> Hello:
        members = {self._place, *map(place_of, self.peers)} if self.phase is Phase.IN else set()
        return Hello(
            self._model.entries,
            self.phase,
            self.next_step,
            tuple(sorted(members)),
            self.next_step,
            self.origin,
        )

    def _greet(self, connected: frozenset[Peer]) -> None:
        self._welcomed &= connected
        for peer in sorted(connected - self._welcomed):
            self._welcomed.add(peer)
            self._send(Kind.HELLO, 0, self._hello().encode(), to=peer)
        for peer in [peer for peer in self._hellos if peer not in connected]:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        """A connection ended: what comes through the next one begins with a greeting."""
        self._hellos.pop(peer, None)
        self._misfits.discard(peer)
        self._others.pop(peer, None)
        self._welcomed.discard(peer)
        self._ready.discard(peer)
        if peer in self._members:
            self._broken.add(peer)
        self.on_gone(peer)

    def _take_hello(self, peer: Peer, hello: Hello) -> None:
        before = self._hellos.get(peer)
        is_first = before is None or peer in self._misfits
        self._hellos[peer] = hello
        self._ready.discard(peer)
        if not self._tell_apart(peer, hello):
            self._refuse_misfits()
            return
        if hello.phase is Phase.READY:
            self._ready.add(peer)
        begins_anew = hello.phase in (Phase.JOINING, Phase.READY)
        if peer in self._members and not begins_anew and hello.phase is not Phase.LEAVING:
            return
        if is_first or begins_anew:
            self._others[peer] = Stream(None, self._keeps)
        if hello.phase is Phase.JOINING and self.phase is Phase.IN:
            self._send(
                Kind.HELLO, 0, self._hello().encode(), to=peer
            )  # says what it gets from here on
        if peer in self._members:
            if self.phase is Phase.IN and peer not in self.agreement:
                self.suspect([peer], "leaves" if hello.phase is Phase.LEAVING else "begins anew")
        elif hello.phase is Phase.IN:
            stream = self._others.setdefault(peer, Stream(None, self._keeps))
            if stream.first is None:
                stream.start_at(hello.fresh)
            if self.phase is Phase.IN:
                has_come_in = before is not None and before.phase is not Phase.IN
                self._meet(peer, hello, has_come_in=has_come_in)

    def _meet(self, peer: Peer, hello: Hello, *, has_come_in: bool) -> None:
        """Hear of a member that this node does not know: a newcomer, or one of a group that had split off."""
        if self._place in hello.members:
            if not has_come_in:  # it has not heard that the others have gone on without it
                self._report(to=peer)
            elif not self._is_sync:  # synchronous ones come in with a step that all agree on
                self._admit(peer, hello.step)
            return
        # What began earlier counts, then the larger group: the run of a process is the time of its start.
        own = (*reversed(self.origin), -len(self.peers) - 1, min((*self.peers, self._node.peer)).id)
        first = min((node for node, _ in hello.members), default=0)
        theirs = (*reversed(hello.origin), -len(hello.members), first)
        if theirs < own:
            self.come_in_again(f"this node had split off from {len(hello.members)} others")

    # ---- coming in ---------------------------------------------------------------------------------------------------

    def first_of(self, peer: Peer) -> int | None:
        """Return the first update of a node that is no member yet that this one gets itself; None: unknown."""
        stream = self._others.get(peer)
        return None if stream is None else stream.first

    def follow(self, snapshot: Snapshot) -> bool:
        """Take the members of a snapshot for the members; return whether all their later updates arrive here."""
        positions, step = snapshot.positions, snapshot.step
        known = {place_of(peer): peer for peer in self._others}
        chosen = {known[place]: at for place, at in positions.items() if place in known}
        firsts = {peer: self.first_of(peer) for peer in chosen}
        if len(chosen) < len(positions) or any(
            first is None or first > chosen[peer] for peer, first in firsts.items()
        ):
            return False
        self.agreement.finals = {Peer(*one, "unknown"): at for one, at in snapshot.finals.items()}
        self.origin = snapshot.origin
        self._oldest_cut = max(positions.values())
        self.next_step = step
        for peer, at in chosen.items():
            self._add_member(peer, at)
        if self._is_sync:
            self.announce(Phase.READY)
        else:
            self._first_step = step
            self.announce(Phase.IN)
        return True

    def come_in_again(self, why: str) -> None:
        """Give up what this node has, to take everything from a member anew."""
        _LOG.warning("%s: it comes in again", why)
        for peer, stream in self._members.items():
            is_whole = peer not in self.agreement and peer not in self._broken
            self._others.setdefault(peer, stream if is_whole else Stream(None, self._keeps))
        self._members.clear()
        self._broken.clear()
        self.agreement.begin_anew()
        self.announce(Phase.JOINING)

    def _add_member(self, peer: Peer, at: int) -> None:
        stream = self._others.pop(peer, None) or Stream(at, self._keeps)
        if stream.first is not None and stream.first > at:
            raise self._wrong_step(peer, stream.first)
        stream.start_at(at)
        self._members[peer] = stream
        if peer in self._past:
            self._oldest_cut = max(self._oldest_cut, at)
        self._ready.discard(peer)
        self._past.pop(peer, None)
        self.agreement.readmit(peer)

    def _admit(self, peer: Peer, at: int) -> None:
        """Take a newcomer for a member from its update ``at`` on."""
        _LOG.info("%s comes in with step %d", peer.address, at)
        self._add_member(peer, at)
        self.joined.append(peer)

    @staticmethod
    def _places(peers: Iterable[Peer]) -> dict[Place, Peer]:
        return {place_of(peer): peer for peer in peers}

    def finish_step(self, step: int, contributors: Iterable[Peer]) -> None:
        """Admit those that all members have named with their update of ``step``, this node among them or not."""
        self.next_step = max(self.next_step, step + 1)
        notes = [
            self._members[peer].notes.get(step) for peer in contributors if peer in self._members
        ]
        if self.phase is Phase.IN:
            notes.append(self._own_notes.pop(step, None))
        admitted = _named_by_all(notes)
        known = self._places(self._others) if admitted else {}
        for place in sorted(admitted):
            if place == self._place:
                self._first_step = step + 1
                self.phase = Phase.IN
            elif place in known:
                self._admit(known[place], step + 1)
            else:  # it went again meanwhile: the next poll finds it gone
                self._admit(Peer(*place, "a newcomer"), step + 1)
        self._let_go()
        if admitted:
            self.announce(self.phase)

    # ---- going -------------------------------------------------------------------------------------------------------

    def suspect(self, peers: Iterable[Peer], why: str) -> None:
        """Take members for gone: what everybody applies of them is now agreed with the others."""
        for peer in sorted(peers):
            _LOG.warning("step %d: %s %s", self.next_step, peer.address, why)
            self.agreement.suspect(peer, self._members[peer].held)
        self._report()
        self._settle()

    def _report(self, to: Peer | None = None) -> None:
        if self.phase is Phase.IN:
            held = {place_of(peer): held for peer, held in self.agreement.report().items()}
            self._send(Kind.REPORT, 0, Report(held).encode(), to)

    def _take_report(self, reporter: Peer, report: Report) -> None:
        known = self._places([*self._members, *self._past, *self.agreement.held])
        named = {
            known.get(place, Peer(*place, "unknown")): held
            for place, held in report.held.items()
            if place != self._place
        }
        is_asked_for_more = self.agreement.take_report(reporter, named)
        is_told = reporter in self._members and reporter not in self.agreement
        own = report.held.get(self._place)
        if is_told and self.phase is Phase.IN and own is not None and own >= self._first_step:
            self.come_in_again("the others have gone on without this node")
        elif is_told:
            gone = [
                peer
                for peer, held in named.items()
                if peer in self._members
                and peer not in self.agreement
                and held >= (self._members[peer].first or 0)
            ]
            if gone:
                self.suspect(gone, f"is gone, says {reporter.address}")
            elif is_asked_for_more:
                self._report()
        self._settle()

    def _settle(self) -> None:
        """Agree on what can be agreed, pass on what others lack, let go whom nothing more is to come of."""
        agreement = self.agreement
        if not agreement.held:
            return
        votes = self.phase is Phase.IN
        agreement.settle(self.peers, votes=votes)
        if votes:
            for peer, first, last in agreement.relays(self._node.peer, self.peers):
                stream = self._members.get(peer) or self._past.get(peer)
                for tag, payload in stream.raw(first, last) if stream else ():
                    self._send(Kind.RELAY, 0, pack_relay(place_of(peer), tag, payload))
        elif self.phase is Phase.READY and agreement.lacks_something:
            self.come_in_again("a member went and left this node without its last update")
        self._let_go()

    def _take_relay(self, place: Place, tag: int, payload: memoryview) -> None:
        peer = self._places(self._members).get(place)
        kind, step = split_tag(tag)
        if peer is None or peer not in self.agreement:
            return
        stream = self._members[peer]
        if step != stream.held:
            return
        if kind == Kind.NOTE:
            stream.add_note(step, Note.decode(payload), payload)
        else:
            stream.add_relayed(self._parse(peer, step, payload), payload)
            self.agreement.held[peer] = stream.held
            self._settle()

    def _let_go(self) -> None:
        """Drop the members that are gone and of which everything is applied."""
        finals = self.agreement.finals
        if not finals:
            return
        gone = [
            peer
            for peer, stream in self._members.items()
            if peer in finals and stream.position >= finals[peer]
        ]
        for peer in gone:
            self._past[peer] = self._members.pop(peer)
            self._broken.discard(peer)
            self.lost.append(peer)
        if gone:
            names = ", ".join(peer.address for peer in gone)
            _LOG.warning("without %s: %d nodes go on", names, len(self._members) + 1)
            if self.phase is Phase.IN:
                self.announce(Phase.IN)

    def _look_for_gone(self, connected: frozenset[Peer], step: int) -> None:
        # Who has sent its update of this step may go: that shows in the next one. Unless something is to be agreed on.
        is_patient = self._is_sync and not self.agreement.unsettled
        if not self._broken and connected >= self._members.keys():
            return
        gone = [
            peer
            for peer in self._members
            if peer not in self.agreement
            and (peer not in connected or peer in self._broken)
            and not (is_patient and step in self._members[peer])
        ]
        if gone and self.phase is Phase.IN:
            self.suspect(gone, "is lost")
        elif gone and self.phase is Phase.READY:
            self.come_in_again(f"the connection to {gone[0].address} is lost")

    # ---- messages in and out -----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float, step: int) -> None:
        """Send what waits, receive for up to ``timeout_s``, and notice who is gone without an update for ``step``."""
        # Look who is connected before receiving: what a peer sent before it went down is then still taken.
        peers, events = self._node.peers, self._node.events()
        for event in events:
            if isinstance(event, PeerLost):
                self._forget(event.peer)
        # Words of a peer may be read after the connection that they came through has ended, or before it is seen.
        if (
            events
            or peers != self._connected_in_order
            or not self._hellos.keys() <= self._connected
        ):
            self._connected_in_order, self._connected = peers, frozenset(peers)
            self._greet(self._connected)
        connected = self._connected
        self.flush()
        for peer, tag, payload in self._node.receive(timeout_s=timeout_s):
            self._route(peer, tag, payload)
        self._look_for_gone(connected, step)
        self.flush()

    def _route(self, peer: Peer, tag: int, payload: memoryview) -> None:
        kind, number = split_tag(tag)
        if kind == Kind.HELLO:
            self._take_hello(peer, _read_hello(payload))
        elif peer in self._misfits:
            self.ignored += kind == Kind.UPDATE
        else:
            try:
                self._take_message(peer, kind, number, payload)
            except MessageError as error:
                if self.phase is not Phase.IN or peer in self._members:
                    raise
                _LOG.warning("%s is no member, its message is ignored: %s", peer.address, error)

    def _take_message(self, peer: Peer, kind: int, number: int, payload: memoryview) -> None:
        if kind == Kind.UPDATE:
            self._take_update(peer, number, payload)
        elif kind == Kind.NOTE:
            stream = self._stream_of(peer)
            if stream is not None:
                stream.add_note(number, Note.decode(payload), payload)
        elif kind == Kind.REPORT:
            self._take_report(peer, Report.decode(payload))
        elif kind == Kind.RELAY:
            if peer not in self.agreement:
                self._take_relay(*unpack_relay(payload))
        else:
            self.on_control(peer, kind, number, payload)

    def _stream_of(self, peer: Peer) -> Stream | None:
        """Return where the updates of a node belong, None where they do not."""
        stream = self._others.get(peer)
        if stream is None and peer not in self.agreement:
            stream = self._members.get(peer)
        return stream

    def _take_update(self, peer: Peer, step: int, payload: memoryview) -> None:
        stream = self._stream_of(peer)
        if stream is None and self.phase is not Phase.IN:
            _LOG.debug("step %d from %s came before its greeting", step, peer.address)
        elif stream is None:
            self.ignored += 1
            _LOG.warning("step %d from %s ignored: it is not a member", step, peer.address)
        elif stream.accepts(step):
            stream.add(self._parse(peer, step, payload), payload)
        elif peer not in self._broken and step >= (stream.first or 0):
            raise self._wrong_step(peer, step)

    def _wrong_step(self, peer: Peer, step: int) -> MessageError:
        return MessageError(
            f"{peer.address} sent step {step} while this node is at step {self.next_step}: begin "
            "with the same checkpoint on all nodes"
        )

    def _parse(self, peer: Peer, step: int, payload: memoryview) -> list[Message]:
        try:
            return self._groups.parse(payload)
        except MessageError as error:
            raise MessageError(f"step {step} from {peer.address}: {error}") from error

    def _send(self, kind: Kind, number: int, payload: bytes, to: Peer | None = None) -> None:
        # At once if there is room: the caller may go off to compute, and others wait for this.
        self._outbox.append((tag_of(kind, number), payload, to))
        self.flush()

    def flush(self) -> bool:
        """Hand over the control messages that wait; return whether none is left."""
        while self._outbox:
            tag, payload, to = self._outbox[0]
            try:
                self._node.publish(payload, tag=tag, to=to)
            except WouldBlock:
                return False
            except NotConnected:
                pass  # it went meanwhile
            self._outbox.popleft()
        return True

    def send_note(self, step: int, cut: int | None, digest: tuple[int, str] | None) -> None:
        """Send what belongs to the update of ``step``, once, before that: the newcomers that this node sees too."""
        note = Note(tuple(sorted(map(place_of, self._ready))), cut, digest)
        self.next_step = step + 1
        if not note.is_empty:
            if self._is_sync:
                self._own_notes[step] = note
            self._send(Kind.NOTE, step, note.encode())

    def send(self, kind: Kind, number: int, payload: bytes, to: Peer | None = None) -> None:
        """Queue a control message for the other rooms of the exchange."""
        self._send(kind, number, payload, to)


def _read_hello(payload: memoryview) -> Hello:
    try:
        return Hello.decode(payload)
    except MessageError:
        return Hello.of_another_version(payload)


def _named_by_all(notes: list[Note | None]) -> set[Place]:
    """Return the newcomers that every one of the notes admits."""
    admitted = set(notes[0].admits) if notes and notes[0] is not None else set()
    for note in notes:
        if not admitted:
            break
        admitted &= set(note.admits) if note is not None else set()
    return admitted
