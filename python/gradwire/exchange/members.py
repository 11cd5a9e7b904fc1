"""Who takes part, and what has arrived of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..errors import MessageError
from ..message import Message
from .groups import Groups

if TYPE_CHECKING:
    from ..transport import Node, Peer

__all__ = ["Members"]

_LOG = logging.getLogger(__name__)


class Members:
    """The other members of an exchange: those still connected, and their messages that were not applied yet.

    Args:
        node: the node; all its messages are taken.
        groups: what every message has to fit.
        ahead_max: steps that a member's message may be ahead of this node's.
    """

    def __init__(self, node: Node, groups: Groups, ahead_max: int | None) -> None:
        self._node = node
        self._groups = groups
        self._ahead_max = ahead_max
        self._next: dict[Peer, int] = {}  # number of the next message to apply, of every member
        self._inbox: dict[Peer, dict[int, list[Message]]] = {}
        self.lost: list[Peer] = []
        self.ignored = 0
        self.has_begun = False

    def begin(self, peers: tuple[Peer, ...], step: int) -> None:
        """Make these peers the members, all at ``step``."""
        self.has_begun = True
        self._next = dict.fromkeys(peers, step)
        self._inbox = {peer: {} for peer in peers}

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The members besides this node, by node id."""
        return tuple(sorted(self._next))

    @property
    def slowest(self) -> int | None:
        """The earliest step that some member's last message is before; None without members."""
        received = (self._next[peer] + len(self._inbox[peer]) for peer in self._next)
        return min(received, default=None)

    def missing(self, step: int) -> frozenset[Peer]:
        """Return the members whose message of ``step`` is not here."""
        return frozenset(peer for peer, inbox in self._inbox.items() if step not in inbox)

    def poll(self, step: int, timeout_s: float) -> None:
        """Receive, waiting up to ``timeout_s``; drop members that went down without a message for ``step``."""
        # Look who is connected before receiving: what a peer sent before it went down is then still taken.
        connected = frozenset(self._node.peers)
        self._receive(step, timeout_s)
        gone = self.missing(step) - connected
        if gone:
            self.lost += sorted(gone)
            for peer in gone:
                del self._next[peer], self._inbox[peer]
            names = ", ".join(peer.address for peer in sorted(gone))
            _LOG.warning("step %d: lost %s; %d nodes go on", step, names, len(self._next) + 1)

    def take_step(self, step: int) -> list[tuple[int, list[Message]]]:
        """Return every member's node id and messages of ``step``, and forget them."""
        taken = []
        for peer, inbox in self._inbox.items():
            messages = inbox.pop(step, None)
            if messages is not None:
                taken.append((peer.id, messages))
            self._next[peer] = step + 1
        return taken

    def take_all(self) -> list[tuple[int, list[Message]]]:
        """Return node ids and messages of all that has come, every member's in its order, and forget it."""
        taken = []
        for peer, inbox in self._inbox.items():
            while self._next[peer] in inbox:
                taken.append((peer.id, inbox.pop(self._next[peer])))
                self._next[peer] += 1
        return taken

    def _receive(self, step: int, timeout_s: float) -> None:
        for peer, tag, payload in self._node.receive(timeout_s=timeout_s):
            if peer not in self._next:
                self.ignored += 1
                _LOG.warning("step %d from %s ignored: it is not a member", tag, peer.address)
            else:
                self._check_step(peer, tag, step)
                self._inbox[peer][tag] = self._parse(peer, tag, payload)

    def _check_step(self, peer: Peer, tag: int, step: int) -> None:
        if self._ahead_max is None:
            is_right = tag == self._next[peer] + len(self._inbox[peer])
        else:
            is_right = step <= tag <= step + self._ahead_max and tag not in self._inbox[peer]
        if not is_right:
            raise MessageError(
                f"{peer.address} sent step {tag} while this node is at step {step}: begin "
                "with the same checkpoint on all nodes"
            )

    def _parse(self, peer: Peer, step: int, payload: memoryview) -> list[Message]:
        try:
            return self._groups.parse(payload)
        except MessageError as error:
            raise MessageError(f"step {step} from {peer.address}: {error}") from error
