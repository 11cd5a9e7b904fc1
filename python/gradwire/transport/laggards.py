"""Which peers lag, what waits for them, and what is sent to them instead.

The endpoint asks now and then; the node has the hook called in between, without its lock (`coalesce`).
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from . import coalesce
from .coalesce import Backlog, Substitutes
from .model import Counters, Limits
from .own_records import OwnRecords
from .session import Session

logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.25
AFTER_REFUSAL_S: Final = 5.0
HOOK_TIMEOUT_S: Final = 30.0
CROWDED: Final = 0.5  # of the log's room in use
HEAVY: Final = 0.25  # of the log's room waiting for one peer


class Owner(Protocol):
    """What is needed of the endpoint."""

    limits: Limits
    counters: Counters
    own: OwnRecords

    def up_sessions(self) -> list[Session]:
        """Return the sessions with which messages flow."""

    def on_withdrawn(self, now_s: float) -> None:
        """Records may have left the log."""


class Laggards:
    """Watches the peers of one endpoint.

    Attributes:
        has_backlog: whether `take_backlogs` is to be called.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.has_backlog = False

    def check(self, now_s: float) -> None:
        """Look whether something waits for a peer that lags, and whether a hook takes too long."""
        owner = self._owner
        for session in owner.up_sessions():
            outbound = session.outbound
            if outbound is None or outbound.held_at is None or now_s < session.coalesce_at_s:
                continue
            logger.warning(
                "coalesce has taken more than %g s for %s; what waits is sent as it is",
                HOOK_TIMEOUT_S,
                session.identity,
            )
            outbound.release()
            session.touch()
            session.coalesce_at_s = now_s + AFTER_REFUSAL_S
        self.has_backlog = any(self._is_to_coalesce(s, now_s) for s in owner.up_sessions())

    def _is_to_coalesce(self, session: Session, now_s: float) -> bool:
        """Whether something waits for a peer that lags, or so much that it crowds the log."""
        owner = self._owner
        outbound = session.outbound
        if outbound is None or outbound.held_at is not None or now_s < session.coalesce_at_s:
            return False
        start = outbound.unsent_from
        if owner.own.log.head - start < 2:
            return False
        if session.is_lagging(now_s):
            return True
        if owner.own.log.used_bytes < CROWDED * owner.own.room_bytes:
            return False
        waiting = sum(
            record.nbytes
            for record in owner.own.log
            if record.number >= start and session.index in record.message.recipients
        )
        return waiting > HEAVY * owner.own.room_bytes

    def take_backlogs(self, now_s: float) -> list[Backlog]:
        """Return what waits for each peer that lags; it is held back until `substitute` is called with it."""
        owner = self._owner
        self.has_backlog = False
        backlogs = []
        for session in owner.up_sessions():
            if session.outbound is None or not self._is_to_coalesce(session, now_s):
                continue
            session.coalesce_at_s = now_s + AGAIN_S
            start, messages = coalesce.waiting_messages(
                owner.own.log, session.index, session.outbound.unsent_from, owner.own.keys_in_use()
            )
            if len(messages) < 2:
                continue
            places = sum(1 + owner.own.sealer.numbers_of(len(each.payload)) for each in messages)
            backlogs.append(
                Backlog(
                    session.index,
                    session.identity,
                    tuple(messages),
                    start,
                    owner.own.log.set_aside(places),
                    places,
                    owner.own.take_message_numbers(len(messages)),
                )
            )
            session.outbound.hold_at(start)
            session.coalesce_at_s = now_s + HOOK_TIMEOUT_S
        if backlogs:
            for session in owner.up_sessions():
                session.touch()  # all skip the numbers that were set aside
        return backlogs

    def substitute(self, backlog: Backlog, substitutes: Substitutes | None, now_s: float) -> bool:
        """Send something else than what waits for a peer; None leaves it as it is. Return whether that was done."""
        owner = self._owner
        session = next((s for s in owner.up_sessions() if s.index == backlog.session), None)
        outbound = None if session is None else session.outbound
        if session is None or outbound is None:
            return False
        session.coalesce_at_s = now_s + AGAIN_S
        if outbound.held_at != backlog.first:
            return False  # cut anew in the meantime, or held back for too long
        outbound.release()
        session.touch()
        session.coalesce_at_s = now_s + AFTER_REFUSAL_S
        if substitutes is None or coalesce.is_unchanged(backlog, substitutes):
            return False
        positions = owner.own.positions()
        why_not = coalesce.objection(
            backlog, substitutes, owner.own.sealer, owner.limits.message_bytes_max
        )
        needed = sum(owner.own.sealer.wire_bytes(len(payload)) for _, payload in substitutes)
        freed = coalesce.own_bytes(owner.own.log, backlog, positions)
        if owner.own.log.used_bytes - freed + needed > owner.own.room_bytes:
            why_not = f"the send log has no room for {needed} bytes more, {freed} less"
        if why_not is not None:
            logger.warning("what coalesce returned for %s is refused: %s", backlog.peer, why_not)
            return False
        session.coalesce_at_s = now_s + AGAIN_S
        coalesce.withdraw(owner.own.log, backlog, positions)
        session.repoint(
            backlog.first, coalesce.put(owner.own.log, owner.own.sealer, backlog, substitutes)
        )
        owner.counters.coalesced_messages += len(backlog.messages) - len(substitutes)
        owner.on_withdrawn(now_s)
        return True
