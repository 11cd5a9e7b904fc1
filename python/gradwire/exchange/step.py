"""One step: wait for space to send, encode, publish, wait for the members' messages, apply."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from ..errors import TooLarge, WouldBlock
from ..transport import Peer
from . import clock
from .departure import Departure
from .join import Join
from .membership import Membership, Router, Updates
from .options import Options
from .protocol import Phase
from .replica import OwnUpdate, Replica
from .results import StepResult

__all__ = ["Step"]

_LOG = logging.getLogger(__name__)

# Space that a step asks for before encoding: the largest possible message, but at most this, which every node has.
_ROOM_BYTES_MAX = 16 << 20


class LeftBehind(Exception):
    """The others have gone on without this node, in the middle of a step."""


class Step:
    """Takes the steps that send a message."""

    def __init__(
        self,
        options: Options,
        replica: Replica,
        membership: Membership,
        router: Router,
        departure: Departure,
        join: Join,
    ) -> None:
        self._options = options
        self._is_sync = options.is_sync
        self._replica = replica
        self._membership = membership
        self._router = router
        self._departure = departure
        self._join = join
        most_bytes = replica.groups.max_payload_bytes(options.codec)
        self._room_bytes = min(most_bytes, _ROOM_BYTES_MAX)
        self._last_missing: frozenset[Peer] = frozenset()

    def take_step(
        self, update: Any, params: Any, optimizer_state: Sequence[Any], *, has_moved: bool = False
    ) -> StepResult | None:
        """Send an update and add all members' to the parameters; the arguments are those of ``Exchange.step``.

        With ``has_moved`` the update is the difference between the parameters and the shared ones.

        Returns:
            The result; None where a later call finishes the step (``overlap``).
        """
        replica, codec = self._replica, self._options.codec
        room_s = self._wait_for_room(params, optimizer_state)
        begin_s = clock.now_s()
        if not self._is_sync:
            replica.put_back_departed(self._membership.members)
            replica.deal([self._membership.me, *self._membership.peers], replica.step)
        refresh = None
        if has_moved:
            update, refresh = replica.local_delta(params)
        own = replica.encode(update, codec, refresh)
        own.wait_s = room_s
        self._hold(own, params, begin_s, has_moved=has_moved)
        if self._options.overlap:
            begin_s = clock.now_s()
            self._publish(own)
            self._join.poll(0.0)
            own.wait_s += clock.now_s() - begin_s
            return None
        again = partial(replica.encode, None, codec)
        return self._finish_or_repeat(own, again, params, optimizer_state)

    def leave(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult:
        """Send everything that is left as the last update, and say so."""
        self._wait_for_room(params, optimizer_state)
        if self._replica.local_steps:
            self._replica.absorb_local_changes(params)
        begin_s, flush = clock.now_s(), partial(self._replica.encode, None, None)
        own = flush()
        self._hold(own, params, begin_s, has_moved=False)
        result = self._finish_or_repeat(own, flush, params, optimizer_state)
        self._join.say_goodbye()
        return result

    def finish_earlier(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult | None:
        """Finish a step that was interrupted after encoding, or left open on purpose (``overlap``), if there is one."""
        if self._replica.pending is None:
            return None
        try:
            return self._finish(self._replica.pending, params, has_moved=True)
        except LeftBehind:
            self._join.ensure_member(params, optimizer_state)
            return None

    def _finish_or_repeat(
        self,
        own: OwnUpdate,
        encode_again: Callable[[], OwnUpdate],
        params: Any,
        optimizer_state: Sequence[Any],
    ) -> StepResult:
        """Finish the pending step, or a later one where the others have gone on without this node."""
        while True:
            try:
                return self._finish(own, params, has_moved=False)
            except LeftBehind:
                # The messages are back in the residual, for the step at which the others admit this node.
                self._join.ensure_member(params, optimizer_state)
            begin_s = clock.now_s()
            own = encode_again()
            self._hold(own, params, begin_s, has_moved=True)

    def _hold(self, own: OwnUpdate, params: Any, begin_s: float, *, has_moved: bool) -> None:
        """Hold an update, encoded since ``begin_s``, until the step is finished."""
        self._replica.remove_local_changes(params, own, has_moved=has_moved)
        own.encode_s = clock.now_s() - begin_s
        self._replica.pending = own

    def _wait_for_room(self, params: Any, optimizer_state: Sequence[Any]) -> float:
        """Receive until the node has space for one more message and no member is too far behind; return the seconds.

        Raises:
            WouldBlock: after ``timeout_s``.
        """
        timeout_s, begin_s = self._options.timeout_s, clock.now_s()
        deadline_s = begin_s + timeout_s
        while True:
            if self._membership.phase is Phase.JOINING:
                self._join.ensure_member(params, optimizer_state)
            obstacle = self._obstacle()
            if obstacle is None:
                return clock.now_s() - begin_s
            if clock.now_s() >= deadline_s:
                raise WouldBlock(
                    f"step {self._replica.step} cannot begin within {timeout_s:g} s: {obstacle}; "
                    "the update was not taken"
                )
            self._join.poll(clock.ROOM_POLL_S)

    def _obstacle(self) -> str | None:
        """Return the reason why this node cannot send one more update; None if it can."""
        if not self._router.node.has_room(self._room_bytes):
            return "no space to send it: a peer does not take its messages"
        if self._is_sync:
            return None
        if self._staleness() > self._options.max_staleness:
            return f"this node is {self._staleness()} steps ahead of another"
        oldest = self._replica.oldest_sent
        if oldest is not None and oldest.ticket is not None and not oldest.ticket.is_done:
            return f"a peer has not got step {oldest.step} yet"
        return None

    def _staleness(self) -> int:
        """Return how many steps this node is ahead of the slowest member."""
        slowest = self._membership.slowest
        return 0 if slowest is None else max(0, self._replica.step - slowest)

    def _publish(self, own: OwnUpdate) -> frozenset[Peer]:
        """Hand an update over unless that is done; without space it stays for the next try.

        Returns:
            The members of which something is missing for the update.

        Raises:
            TooLarge: the transport refuses the size; the message is back in the residual.
        """
        if own.ticket is not None:
            return frozenset()
        unaware = frozenset() if self._is_sync else self._membership.unaware
        if unaware:
            return unaware
        try:
            if not self._router.publish_parts(own.step, own.unsent):
                return frozenset()
            missing = self._replica.prepare(own, self._gone())
            if not missing:
                own.ticket = self._router.publish_update(own.step, own.payload)
        except TooLarge:
            self._replica.take_back(own)
            self._membership.next_step = own.step
            raise
        return missing

    def _gone(self) -> set[Peer]:
        """Return the members of which nothing more comes."""
        return self._router.lost | self._membership.departing.keys()

    def _wait_for_members(self, own: OwnUpdate) -> None:
        """Return when the own message is handed over and, in synchronous mode, all members' have arrived.

        Raises:
            LeftBehind: the members do not wait for this node.
            TimeoutError: a member sent nothing in time, or there was no space.
            TooLarge: the transport refuses the size; the message is back in the residual.
        """
        membership, timeout_s = self._membership, self._options.timeout_s
        deadline_s = clock.now_s() + timeout_s
        may_drop = self._options.on_straggler == "drop"
        self._last_missing = frozenset()
        is_patient = bool(self._replica.waiting())
        poll_s = 0.0
        while True:
            needed = self._publish(own)
            self._join.poll(poll_s)
            if membership.phase is Phase.JOINING:
                raise LeftBehind
            missing = needed | (membership.missing(own.step) if self._is_sync else frozenset())
            if own.ticket is not None and not missing:
                return
            self._last_missing = missing or self._last_missing
            if clock.now_s() >= deadline_s:
                if self._options.on_straggler == "wait" and (own.ticket is not None or needed):
                    deadline_s = clock.now_s() + timeout_s
                    _LOG.warning("%s", self._timed_out(own, missing))
                elif not may_drop:
                    raise self._timed_out(own, missing)
                elif is_patient and not needed:
                    # An owner may wait for a part, and suspects its sender about now.
                    is_patient = False
                    deadline_s = clock.now_s() + timeout_s
                else:
                    may_drop = False
                    deadline_s = clock.now_s() + timeout_s
                    silent = [
                        peer for peer in needed or missing if peer not in membership.departing
                    ]
                    why = "sends nothing: the others go on without it"
                    self._departure.suspect(silent, why)
            has_room = own.ticket is not None or needed
            poll_s = clock.POLL_S if has_room else clock.ROOM_POLL_S

    def _timed_out(self, own: OwnUpdate, missing: frozenset[Peer]) -> TimeoutError:
        what = "no space to send it: a peer does not take its messages"
        if missing:
            names = ", ".join(map(self._membership.name_of, sorted(missing)))
            what = f"no message from {names}, though connected"
        return TimeoutError(
            f"step {own.step} is not finished after {self._options.timeout_s:g} s: {what}; "
            "the next call goes on with it"
        )

    def _finish(self, own: OwnUpdate, params: Any, *, has_moved: bool) -> StepResult:
        """Hand over the pending message, wait for the others' and apply all of them, by node id."""
        membership, replica, is_sync = self._membership, self._replica, self._is_sync
        begin_s = clock.now_s()
        self._wait_for_members(own)
        arrived_s = clock.now_s()
        own.wait_s += arrived_s - begin_s
        others = membership.take_updates(own.step if is_sync else math.inf)
        in_order: Updates = [*others, (membership.me, own.messages)]
        in_order.sort(key=itemgetter(0))
        is_exact = replica.apply(
            [messages for _, messages in in_order],
            params,
            nodes=len(in_order) if is_sync else len(membership.peers) + 1,
            own=own,
            has_moved=has_moved,
        )
        if is_sync:
            self._join.finish_step([peer for peer, _ in others])
        else:
            self._departure.remove_departed()
        lost, joined, ignored = membership.drain_events()
        first = own.encoded[0]
        result = StepResult(
            step=own.step,
            sent_bytes=own.nbytes,
            density=sum(one.count for one in own.encoded) / max(replica.groups.numel, 1),
            threshold=first.threshold,
            is_shakeup=first.is_shakeup,
            received=len(others),
            received_bytes=sum(
                one.nbytes
                for messages in (*own.taken, *map(itemgetter(1), others))
                for one in messages
            ),
            applied=len(in_order),
            ignored=ignored,
            lost=lost,
            joined=joined,
            orphaned=replica.drain_orphaned(),
            is_exact=is_exact,
            staleness=0 if is_sync else self._staleness(),
            ratio=4 * replica.groups.numel / own.nbytes,
            encode_s=own.encode_s,
            wait_s=own.wait_s,
            apply_s=clock.now_s() - arrived_s,
            slowest=min(self._last_missing, default=None),
        )
        replica.finish_step(own)
        return result
