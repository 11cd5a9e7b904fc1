"""Waiting in a step: for room to send, and for everybody's messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import TooLarge, WouldBlock
from . import clock
from .comparison import Comparison
from .control import Phase
from .parts import Parts
from .progress import Own

if TYPE_CHECKING:
    from ..transport import Peer

__all__ = ["Handover", "LeftBehind"]

# Without room to send, acknowledgements are what is waited for, and those come within a round trip.
_ROOM_POLL_S = 0.001

# Room asked for before encoding: what the message may need at most, but no more than this, so that the ceiling of a
# huge update does not ask for more than any node has.
_ROOM_BYTES_MAX = 16 << 20


class LeftBehind(Exception):
    """The others have gone on without this node, in the middle of a step."""


class Handover:
    """Gives this node's messages to the transport, and waits for the members' of the same step.

    Args:
        poll: sends, and receives for so many seconds.
    """

    def __init__(self, parts: Parts, comparison: Comparison, poll: Callable[[float], None]) -> None:
        self._node, self._options, self._groups = parts.node, parts.options, parts.groups
        self._roster, self._members, self._progress = parts.roster, parts.members, parts.progress
        self._comparison = comparison
        self._poll = poll
        most_bytes = parts.groups.max_payload_bytes(parts.options.codec)
        self._room_bytes = min(most_bytes, _ROOM_BYTES_MAX)

    def wait_for_room(self, come_in: Callable[[], None]) -> None:
        """Go on receiving until the node has room for one more message and no member is too far behind.

        Args:
            come_in: called where the others have gone on without this node meanwhile.

        Raises:
            WouldBlock: that did not happen in time.
        """
        deadline_s = clock.now_s() + self._options.timeout_s
        while True:
            if self._roster.phase is Phase.JOINING:
                come_in()
            what = self._obstacle()
            if what is None:
                return
            if clock.now_s() >= deadline_s:
                raise WouldBlock(
                    f"step {self._progress.step} cannot begin within {self._options.timeout_s:g} s: {what}; "
                    "the update was not taken"
                )
            self._poll(_ROOM_POLL_S)

    def _obstacle(self) -> str | None:
        """Return what keeps this node from sending one more update, None if nothing does."""
        if not self._node.has_room(self._room_bytes):
            return "no room to send it: a peer does not take its messages"
        if self._options.is_sync:
            return None
        if self.staleness() > self._options.max_staleness:
            return f"this node is {self.staleness()} steps ahead of another"
        oldest = self._progress.oldest
        if oldest is not None and oldest.ticket is not None and not oldest.ticket.is_done:
            return f"a peer has not got step {oldest.step} yet"
        return None

    def staleness(self) -> int:
        """Return how many steps this node is ahead of the slowest member."""
        slowest = self._roster.slowest
        return 0 if slowest is None else max(0, self._progress.step - slowest)

    def begin(self, own: Own) -> None:
        """Hand the own message over if there is room, and take what has arrived; wait for nothing.

        Raises:
            TooLarge: as ``swap``.
        """
        self._hand_over(own)
        self._poll(0.0)

    def swap(self, own: Own) -> None:
        """Return when the own message is handed over and, in synchronous mode, every live member's is here.

        Raises:
            LeftBehind: the members do not wait for this node.
            TimeoutError: a member has sent nothing in time, or there was no room.
            TooLarge: the transport takes no such message; it is back in the residual.
        """
        deadline_s = clock.now_s() + self._options.timeout_s
        has_dropped = self._options.on_straggler == "raise"
        poll_s = 0.0
        while True:
            self._hand_over(own)
            self._poll(poll_s)
            if self._roster.phase is Phase.JOINING:
                raise LeftBehind
            missing = self._roster.missing(own.step) if self._options.is_sync else frozenset()
            if own.is_handed_over and not missing:
                return
            if clock.now_s() >= deadline_s:
                if has_dropped:
                    raise self._timed_out(own, missing)
                has_dropped = True
                deadline_s = clock.now_s() + self._options.timeout_s
                silent = [peer for peer in missing if peer not in self._roster.agreement]
                self._members.going.suspect(silent, "sends nothing: the others go on without it")
            poll_s = clock.POLL_S if own.is_handed_over else _ROOM_POLL_S

    def _hand_over(self, own: Own) -> None:
        """Publish the own message unless that is done; without room it stays for the next try."""
        if own.is_handed_over:
            return
        if self._roster.next_step <= own.step:
            self._members.send_note(own.step, *self._comparison.to_say(own.step))
        if not self._members.outbox.flush():
            return
        try:
            own.ticket = self._node.publish(own.payload, tag=own.step)
        except WouldBlock:
            return
        except TooLarge:
            self._groups.put_back(own.messages)
            self._progress.own = None
            self._roster.next_step = own.step
            raise
        own.is_handed_over = True

    def _timed_out(self, own: Own, missing: frozenset[Peer]) -> TimeoutError:
        if not own.is_handed_over:
            what = "no room to send it: a peer does not take its messages"
        else:
            names = ", ".join(peer.address for peer in sorted(missing))
            what = f"no message from {names}, though connected"
        return TimeoutError(
            f"step {own.step} is not finished after {self._options.timeout_s:g} s: {what}; "
            "the next call goes on with it"
        )

    def say_goodbye(self) -> None:
        """Tell the members that this node's last update was sent, as long as there is time."""
        self._members.greetings.announce(Phase.LEAVING)
        deadline_s = clock.now_s() + self._options.timeout_s
        while not self._members.outbox.flush() and clock.now_s() < deadline_s:
            self._poll(_ROOM_POLL_S)
