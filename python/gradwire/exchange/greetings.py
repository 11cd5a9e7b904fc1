"""Who has greeted, who trains the same, and what this node says of itself."""

from __future__ import annotations

import logging

from ..errors import MessageError, Mismatch
from ..transport import Peer
from .control import Hello, Kind, Phase, place_of
from .model import Model
from .outbox import Outbox
from .roster import Roster

__all__ = ["Greetings"]

_LOG = logging.getLogger(__name__)


class Greetings:
    """The greetings of the connected nodes.

    Args:
        model: what has to be the same on all nodes.

    Attributes:
        hellos: the latest of every connected node.
        misfits: the nodes among them that train something else.
    """

    def __init__(self, model: Model, roster: Roster, outbox: Outbox) -> None:
        self._model = model
        self._roster = roster
        self._outbox = outbox
        self.hellos: dict[Peer, Hello] = {}
        self.misfits: set[Peer] = set()
        self._welcomed: set[Peer] = set()

    # ---- this node's own ---------------------------------------------------------------------------------------------

    def announce(self, phase: Phase) -> None:
        """Tell everybody where this node stands now."""
        self._roster.phase = phase
        self.tell()

    def tell(self, to: Peer | None = None) -> None:
        """Greet everybody, or one."""
        self._outbox.send(Kind.HELLO, 0, self._own().encode(), to)

    def greet(self, connected: frozenset[Peer]) -> list[Peer]:
        """Greet the nodes that have connected; return those that had greeted and are not connected any more."""
        self._welcomed &= connected
        for peer in sorted(connected - self._welcomed):
            self._welcomed.add(peer)
            self.tell(peer)
        return [peer for peer in self.hellos if peer not in connected]

    def _own(self) -> Hello:
        roster = self._roster
        is_in = roster.phase is Phase.IN
        members = {roster.place, *map(place_of, roster.peers)} if is_in else set()
        return Hello(
            self._model.entries,
            roster.phase,
            roster.next_step,
            tuple(sorted(members)),
            roster.next_step,
            roster.origin,
        )

    # ---- the others' -------------------------------------------------------------------------------------------------

    def take(self, peer: Peer, payload: memoryview) -> tuple[Hello, Hello | None]:
        """Take a greeting; return it and the one before it, None where that was none or did not fit."""
        hello = _read(payload)
        before = None if peer in self.misfits else self.hellos.get(peer)
        self.hellos[peer] = hello
        self._tell_apart(peer, hello)
        return hello, before

    def forget(self, peer: Peer) -> None:
        """A connection ended: what comes through the next one begins with a greeting."""
        self.hellos.pop(peer, None)
        self.misfits.discard(peer)
        self._welcomed.discard(peer)

    def fitting(self, phase: Phase | None = None) -> dict[Peer, Hello]:
        """Return the greetings of connected nodes that train the same, of all or of those that stand at ``phase``."""
        return {
            peer: hello
            for peer, hello in self.hellos.items()
            if peer not in self.misfits and phase in (None, hello.phase)
        }

    def strangers(self) -> list[str]:
        """Return for every connected node that trains something else how it differs."""
        return [self._difference(peer) for peer in sorted(self.misfits)]

    def check_somebody_fits(self) -> None:
        """Refuse to wait where training has begun and everybody there trains something else.

        Raises:
            Mismatch: it is so.
        """
        has_begun = any(self.hellos[peer].phase is Phase.IN for peer in self.misfits)
        if has_begun and not self.fitting():
            raise Mismatch("; ".join(self.strangers()))

    def knows(self, name: str) -> bool:
        """Whether it is known what this node's arrays of that name are like."""
        return self._model.entries[name] is not None

    def learn(self, late: dict[str, list[object]]) -> None:
        """Say what the arrays are like, once that is known; the greetings of before fitted any."""
        if not self._model.learn(late):
            return
        for peer, hello in self.hellos.items():
            if self._tell_apart(peer, hello) and peer not in self._roster.members:
                self._roster.others.setdefault(peer, self._roster.new_stream())
        if self._welcomed:
            self.tell()

    def _tell_apart(self, peer: Peer, hello: Hello) -> bool:
        """Note whether a node trains the same; return it."""
        is_fit = not self._model.differing(hello.model)
        if is_fit:
            self.misfits.discard(peer)
        elif peer not in self.misfits:
            self.misfits.add(peer)
            _LOG.warning("%s; it is left alone", self._difference(peer))
        return is_fit

    def _difference(self, peer: Peer) -> str:
        difference = self._model.difference(self.hellos[peer].model)
        return f"{peer.address} and this node ({self._roster.me.address}) do not fit: {difference}"


def _read(payload: memoryview) -> Hello:
    try:
        return Hello.decode(payload)
    except MessageError:
        return Hello.of_another_version(payload)
