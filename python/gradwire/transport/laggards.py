"""Which peers lag, what waits for them, and what is sent to them instead.

The endpoint asks now and then; the node has the hook called in between, without its lock (`coalesce`).
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from . import coalesce
from .coalesce import Backlog, Substitutes
from .crypto import SenderKey
from .model import Counters, Limits
from .records import Sealer, SendLog
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
    log: SendLog
    counters: Counters
    room_bytes: int

    @property
    def sealer(self) -> Sealer:
        """Cuts and seals as the paths allow now."""

    def up_sessions(self) -> list[Session]:
        """Return the sessions with which messages flow."""

    def keys_in_use(self) -> dict[int, SenderKey]:
        """Return the keys under which the records in the log are sealed, by the low 8 bits of their epoch."""

    def positions(self) -> dict[int, int]:
        """Return the first record that each session may lack, by the session's index."""

    def take_message_numbers(self, count: int) -> int:
        """Set aside so many message numbers, and return the first."""

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
        if owner.log.head - start < 2:
            return False
        if session.is_lagging(now_s):
            return True
        if owner.log.used_bytes < CROWDED * owner.room_bytes:
            return False
        waiting = sum(
            record.nbytes
            for record in owner.log
            if record.number >= start and session.index in record.message.recipients
        )
        return waiting > HEAVY * owner.room_bytes

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
                owner.log, session.index, session.outbound.unsent_from, owner.keys_in_use()
            )
            if len(messages) < 2:
                continue
            places = sum(1 + owner.sealer.records_of(len(each.payload)) for each in messages)
            backlogs.append(
                Backlog(
                    session.index,
                    session.identity,
                    tuple(messages),
                    start,
                    owner.log.set_aside(places),
                    places,
                    owner.take_message_numbers(len(messages)),
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
        positions = owner.positions()
        why_not = coalesce.objection(
            backlog, substitutes, owner.sealer, owner.limits.message_bytes_max
        )
        needed = sum(owner.sealer.wire_bytes(len(payload)) for _, payload in substitutes)
        freed = coalesce.own_bytes(owner.log, backlog, positions)
        if owner.log.used_bytes - freed + needed > owner.room_bytes:
            why_not = f"the send log has no room for {needed} bytes more, {freed} less"
        if why_not is not None:
            logger.warning("what coalesce returned for %s is refused: %s", backlog.peer, why_not)
            return False
        session.coalesce_at_s = now_s + AGAIN_S
        coalesce.withdraw(owner.log, backlog, positions)
        session.repoint(backlog.first, coalesce.put(owner.log, owner.sealer, backlog, substitutes))
        owner.counters.coalesced_messages += len(backlog.messages) - len(substitutes)
        owner.on_withdrawn(now_s)
        return True
