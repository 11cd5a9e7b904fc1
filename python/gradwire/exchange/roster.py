"""Who takes part, as this node knows it, and what has arrived of whom. Sans-IO."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from ..errors import MessageError
from ..message import Message
from ..transport import Peer
from .agreement import Agreement
from .control import Kind, Note, Phase, Place, place_of, split_tag
from .groups import Groups
from .stream import Stream

__all__ = ["Roster", "by_place"]

_NOBODY: frozenset[Peer] = frozenset()


class Roster:
    """The members, this node's place among them, and the updates of every node.

    Args:
        me: this node.
        groups: what every update has to fit.
        step: number of this node's first step.
        keeps: applied updates of every member that are kept, for those who miss some when it dies.

    Attributes:
        phase: where this node stands.
        origin: the node that began the training it takes part in.
        next_step: the first whose update this node is still to publish, with all that belongs to it.
        first_step: of this node as a member.
        members: the updates of the members besides this node, those that are gone but not forgotten included.
        others: of nodes that are no members, or no members any more.
        past: of members of which nothing more is to come.
        broken: members whose connection ended.
        agreement: on what everybody applies of those that are gone.
        heard: notes that came with the updates that were taken to be applied.
        lost, joined, ignored: what the next step's result tells of members and messages.
    """

    def __init__(self, me: Peer, groups: Groups, *, step: int, keeps: int) -> None:
        self.me = me
        self.place = place_of(me)
        self.phase = Phase.NEW
        self.origin = self.place
        self.next_step = step
        self.first_step = step
        self.members: dict[Peer, Stream] = {}
        self.others: dict[Peer, Stream] = {}
        self.past: dict[Peer, Stream] = {}
        self.broken: set[Peer] = set()
        self.agreement = Agreement()
        self.heard: list[tuple[Peer, Note]] = []
        self.lost: list[Peer] = []
        self.joined: list[Peer] = []
        self.ignored = 0
        self._groups = groups
        self._keeps = keeps
        self._sorted: tuple[Peer, ...] = ()  # the members
        self._oldest_cut = 0  # what this node has applied is known from here on, update by update

    # ---- who is there ------------------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The members besides this node that are not gone, by node id."""
        if not self.agreement.held:
            return self._sorted
        return tuple(peer for peer in self._sorted if peer not in self.agreement)

    @property
    def is_first(self) -> bool:
        """Whether this node has the lowest id of all members."""
        peers = self.peers
        return self.phase is Phase.IN and (not peers or self.me < peers[0])

    def names_at(self, cut: int) -> str:
        """Return what tells apart who contributed to the state at a cut, as far as this node knows."""
        places = [place_of(peer) for peer, stream in self.members.items() if stream.begun < cut]
        if self.first_step < cut:
            places.append(self.place)
        return f"{zlib.crc32(repr(sorted(places)).encode()):08x}"

    # ---- how far they are --------------------------------------------------------------------------------------------

    @property
    def slowest(self) -> int | None:
        """The number of the next update of the slowest member; None without members."""
        return min((self.members[peer].held for peer in self.peers), default=None)

    @property
    def positions(self) -> dict[Peer, int]:
        """For every member but this node, the number of its next update to apply."""
        return {peer: stream.position for peer, stream in self.members.items()}

    @property
    def reached(self) -> int | None:
        """The number below which every member's updates are applied; None without members."""
        return min((stream.position for stream in self.members.values()), default=None)

    def missing(self, step: int) -> frozenset[Peer]:
        """Return the members whose update of ``step`` is still to come, or of whom it is not agreed whether."""
        missing = [peer for peer, stream in self.members.items() if step not in stream]
        if not missing:
            return _NOBODY
        finals = self.agreement.finals
        return frozenset(peer for peer in missing if step < finals.get(peer, step + 1))

    def is_ready_for(self, step: int) -> bool:
        """Whether this node, not a member yet, can follow the members through ``step``."""
        return self.phase is Phase.READY and bool(self.members) and not self.missing(step)

    def first_of(self, peer: Peer) -> int | None:
        """Return the first update of a node that is no member yet that this one gets itself; None: unknown."""
        stream = self.others.get(peer)
        return None if stream is None else stream.first

    # ---- their updates -----------------------------------------------------------------------------------------------

    def stream_of(self, peer: Peer) -> Stream | None:
        """Return where the updates of a node belong, None where they do not."""
        if peer in self.others:
            return self.others[peer]
        return None if peer in self.agreement.held else self.members.get(peer)

    def parse(self, peer: Peer, step: int, payload: memoryview) -> list[Message]:
        """Return the messages of an update.

        Raises:
            MessageError: they are none, or of another model; it names both sides.
        """
        try:
            return self._groups.parse(payload)
        except MessageError as error:
            raise MessageError(
                f"step {step} from {peer.address} to this node ({self.me.address}): {error}"
            ) from error

    def wrong_step(self, peer: Peer, step: int) -> MessageError:
        """Return the error for an update that cannot be the next one of its sender."""
        return MessageError(
            f"{peer.address} sent step {step} while this node is at step {self.next_step}: begin "
            "with the same checkpoint on all nodes"
        )

    def take_step(self, step: int) -> list[tuple[Peer, list[Message]]]:
        """Return the members that sent messages of ``step``, with those, and forget them."""
        return [
            (peer, self.take(peer, stream))
            for peer, stream in self.members.items()
            if step in stream
        ]

    def take(self, peer: Peer, stream: Stream) -> list[Message]:
        """Return the next messages of a member to apply, and hear the note that came with them."""
        note = stream.notes.get(stream.position)
        if note is not None:
            self.heard.append((peer, note))
        return stream.take()

    def applied_from(self, step: int) -> list[list[Message]] | None:
        """Return what was applied of updates from ``step`` on; None if that cannot be told any more."""
        if step < self._oldest_cut:
            return None
        found = []
        for stream in [*self.members.values(), *self.past.values()]:
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

    # ---- changes -----------------------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        """Return a stream that begins with whichever update comes first."""
        return Stream(None, self._keeps)

    def add_member(self, peer: Peer, at: int) -> None:
        """Make a node a member from its update ``at`` on.

        Raises:
            MessageError: this node does not get that update itself.
        """
        stream = self.others.pop(peer, None) or Stream(at, self._keeps)
        if stream.first is not None and stream.first > at:
            raise self.wrong_step(peer, stream.first)
        stream.start_at(at)
        self.members[peer] = stream
        self._sorted = tuple(sorted(self.members))
        if peer in self.past:
            self._oldest_cut = max(self._oldest_cut, at)
        self.past.pop(peer, None)
        self.agreement.readmit(peer)

    def follow(self, members: dict[Peer, int], *, finals: dict[Peer, int], step: int) -> None:
        """Take over where a snapshot leaves off.

        Args:
            members: the first update of every member that is not in it.
            finals: the first update that nobody applies of those that were members before.
            step: the next one.
        """
        self.agreement.finals = finals
        self._oldest_cut = max(members.values())
        self.next_step = step
        for peer, at in members.items():
            self.add_member(peer, at)

    def begin_anew(self) -> None:
        """Be no member any more; what the others send goes on arriving."""
        for peer, stream in self.members.items():
            is_whole = peer not in self.agreement and peer not in self.broken
            self.others.setdefault(peer, stream if is_whole else self.new_stream())
        self.members.clear()
        self._sorted = ()
        self.broken.clear()
        self.agreement.begin_anew()

    def remove_member(self, peer: Peer) -> None:
        """Let a member go of which everything is applied."""
        self.past[peer] = self.members.pop(peer)
        self._sorted = tuple(sorted(self.members))
        self.broken.discard(peer)
        self.lost.append(peer)

    def take_news(self) -> tuple[tuple[Peer, ...], tuple[Peer, ...], int]:
        """Return who went, who came, and how many messages were ignored, once."""
        news = tuple(self.lost), tuple(self.joined), self.ignored
        self.lost, self.joined, self.ignored = [], [], 0
        return news

    def forget_connection(self, peer: Peer) -> None:
        """A connection ended: what comes through the next one begins with a greeting."""
        self.others.pop(peer, None)
        if peer in self.members:
            self.broken.add(peer)


def by_place(peers: Iterable[Peer]) -> dict[Place, Peer]:
    """Return peers by what identifies them on the wire."""
    return {place_of(peer): peer for peer in peers}
