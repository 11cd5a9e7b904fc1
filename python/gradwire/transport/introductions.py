"""Peers are told where the others are, so that one seed is enough to join the whole mesh."""

from __future__ import annotations

from typing import Final

from .model import format_address
from .session import Session
from .wire import MEMBERS_MAX, Members

GOSSIP_S: Final = 1.0
MEMBERS_BYTES_MAX: Final = 1_100


class Introductions:
    """Tells a newcomer at once and everybody in turn: what is said once may get lost."""

    def __init__(self, now_s: float) -> None:
        self._due_at_s = now_s + GOSSIP_S
        self._turn = 0

    def introduce(self, newcomer: Session, sessions: list[Session]) -> None:
        """Tell a peer where those of the other sessions are."""
        addresses = [
            session.advertised or format_address(session.address)
            for session in sessions
            if session is not newcomer
        ]
        # As many as surely fit one datagram, however long they are.
        count = min(MEMBERS_MAX, MEMBERS_BYTES_MAX // (1 + max(map(len, addresses), default=0)))
        for start in range(0, len(addresses), count):
            newcomer.send_frame(Members(tuple(addresses[start : start + count])))

    def gossip(self, sessions: list[Session], now_s: float) -> None:
        """Repeat the introduction to one peer after the other, if it is time."""
        if now_s < self._due_at_s:
            return
        self._due_at_s = now_s + GOSSIP_S
        if len(sessions) > 1:
            self._turn = (self._turn + 1) % len(sessions)
            self.introduce(sessions[self._turn], sessions)
