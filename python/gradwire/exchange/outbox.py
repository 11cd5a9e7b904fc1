"""Control messages on their way out: in order, as there is room for them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..errors import NotConnected, WouldBlock
from .control import Kind, tag_of

if TYPE_CHECKING:
    from ..transport import Node, Peer

__all__ = ["Outbox"]


class Outbox:
    """What this node's exchange has to say to others besides its updates."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: deque[tuple[int, bytes, Peer | None]] = deque()

    def send(self, kind: Kind, number: int, payload: bytes, to: Peer | None = None) -> None:
        """Queue a message, to all or to one, and send what there is room for."""
        # At once if there is room: the caller may go off to compute, and others wait for this.
        self._waiting.append((tag_of(kind, number), payload, to))
        self.flush()

    def flush(self) -> bool:
        """Hand over what waits; return whether nothing is left."""
        while self._waiting:
            tag, payload, to = self._waiting[0]
            try:
                self._node.publish(payload, tag=tag, to=to)
            except WouldBlock:
                return False
            except NotConnected:
                pass  # it went meanwhile
            self._waiting.popleft()
        return True
