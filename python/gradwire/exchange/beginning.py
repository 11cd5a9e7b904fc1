"""How nodes begin together: the one with the lowest id names the members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..errors import Mismatch
from ..transport import Peer
from . import clock
from .control import Hello, Phase
from .greetings import Greetings
from .roster import Roster, by_place

if TYPE_CHECKING:
    from ..transport import Node

__all__ = ["Beginning"]

_LOG = logging.getLogger(__name__)

# How long the beginning waits for the greeting of a connected node, which may run no exchange at all.
_GREETING_S = 2.0


class Beginning:
    """Finds out whether training begins now, with whom, or has begun before."""

    def __init__(self, node: Node, roster: Roster, greetings: Greetings) -> None:
        self._node = node
        self._roster = roster
        self._greetings = greetings
        self._silent_until_s: float | None = None

    def wait(self, expected: int, timeout_s: float, poll: Callable[[float], None]) -> None:
        """Return when this node is a member from the start on (phase IN), or has to come in late (JOINING).

        Args:
            expected: other nodes to wait for.
            timeout_s: for how long.
            poll: sends, and receives for so many seconds.

        Raises:
            TimeoutError: too few nodes were there in time.
            Mismatch: the others train something else, or another step.
        """
        deadline_s = clock.now_s() + timeout_s
        if expected:
            self._node.wait_for_peers(expected, timeout_s)
        poll_s = 0.0
        while self._roster.phase is Phase.NEW:
            poll(poll_s)
            poll_s = clock.POLL_S
            self._look(expected)
            if self._roster.phase is Phase.NEW and clock.now_s() >= deadline_s:
                raise self._nobody_there(expected, timeout_s)

    def _look(self, expected: int) -> None:
        me = self._roster.me
        good, strangers = self._greetings.fitting(), self._greetings.strangers()
        inside = {peer: hello for peer, hello in good.items() if hello.phase is Phase.IN}
        mine = [hello for hello in inside.values() if self._roster.place in hello.members]
        if mine:
            self._adopt(mine[0])
        elif inside:
            self._roster.phase = Phase.JOINING
        elif strangers and not good and len(strangers) >= expected:
            raise Mismatch("; ".join(strangers))
        elif not self._is_anybody_silent():
            founders = {peer: hello for peer, hello in good.items() if hello.phase is Phase.NEW}
            if len(founders) >= expected:
                # Also where another one names the members: it would name nobody.
                self._check_same_step(founders)
                if all(me < peer for peer in founders):
                    self._be_in(founders)

    def _is_anybody_silent(self) -> bool:
        """Whether a connected node has not greeted yet: it may know of a training that has begun."""
        is_silent = not self._greetings.hellos.keys() >= set(self._node.peers)
        if not is_silent or self._silent_until_s is None:
            self._silent_until_s = clock.now_s() + _GREETING_S
        return is_silent and clock.now_s() < self._silent_until_s

    def _adopt(self, hello: Hello) -> None:
        """Begin with the members that the one with the lowest id has named, as soon as all of them are here."""
        good = self._greetings.fitting()
        known = by_place(good)
        others = [place for place in hello.members if place != self._roster.place]
        if all(place in known for place in others):
            chosen = {known[place]: good[known[place]] for place in others}
            self._check_same_step(chosen)
            self._roster.origin = hello.origin
            self._be_in(chosen)

    def _check_same_step(self, hellos: dict[Peer, Hello]) -> None:
        own = self._roster.next_step
        for peer, hello in hellos.items():
            if hello.phase is Phase.NEW and hello.step != own:
                raise Mismatch(
                    f"{peer.address} begins at step {hello.step}, this node ({self._roster.me.address}) at step "
                    f"{own}: begin with the same checkpoint on all nodes"
                )

    def _be_in(self, others: Iterable[Peer]) -> None:
        step = self._roster.next_step
        for peer in others:
            self._roster.add_member(peer, step)
        self._greetings.announce(Phase.IN)
        _LOG.info("exchange of %d nodes begins at step %d", len(self._roster.members) + 1, step)

    def _nobody_there(self, expected: int, timeout_s: float) -> TimeoutError:
        strangers = "".join(f"; {text}" for text in self._greetings.strangers())
        good = len(self._greetings.fitting())
        return TimeoutError(
            f"{good} of {expected} peers are ready within {timeout_s:g} s{strangers}"
        )
