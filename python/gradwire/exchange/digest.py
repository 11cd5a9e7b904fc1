"""Whether the replicas still hold the same: digests at cuts that all nodes know, and the judgement on them.

A cut is a number K: the state in which every member's updates below K are applied and no others. The member with the
lowest id names one from time to time in a note; each node computes the digest when it has got there and sends it with
its next update. In synchronous mode a cut is simply the end of a step. An asynchronous replica is never exactly at a
cut, but its sum is exact: it takes out again what it has applied beyond.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import Diverged
from ..transport import Peer
from . import clock
from .control import Note

__all__ = ["Digests", "digest_of"]

_LOG = logging.getLogger(__name__)

# A digest passes over all parameters: it may take one part in this many of the time.
_COST_SHARE = 50
_DIGEST_BYTES = 8

# Cuts of which digests are kept: of one that a member cannot tell of, all never come.
_CUTS_MAX = 8


def digest_of(arrays: Sequence[NDArray[Any]]) -> str:
    """Return a digest of the arrays' bits."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


class Digests:
    """When to compute a digest, and what the members' digests say.

    Args:
        me: this node.
        every_s: seconds between cuts that this node names; 0: none.
        ahead: how far a cut is in the future, so that no node has passed it when it hears of it.

    Attributes:
        agreed: how many times all members' digests were the same.
    """

    def __init__(self, me: Peer, every_s: float, ahead: int) -> None:
        self._me = me
        self._every_s = every_s
        self._ahead = ahead
        self._due_s: float | None = None
        self._interval_s = every_s
        self._cut: int | None = None
        self._to_send: tuple[int, str] | None = None
        self._heard: dict[int, dict[Peer, str]] = {}
        self.agreed = 0

    @property
    def may_name(self) -> bool:
        """Whether it is time to name a cut, for the member that does."""
        if not self._every_s or self._cut is not None:
            return False
        return self._due_s is None or clock.now_s() >= self._due_s

    def name_cut(self, step: int) -> int:
        """Return the cut to name in the note of ``step``."""
        self._due_s = clock.now_s() + self._interval_s
        self._cut = step + self._ahead
        return self._cut

    @property
    def is_due(self) -> bool:
        """Whether a cut is named whose digest this node has not computed."""
        return self._cut is not None

    def take(self) -> tuple[int, str] | None:
        """Return the digest to send with the next update, once."""
        found, self._to_send = self._to_send, None
        return found

    def hear(self, peer: Peer, note: Note) -> None:
        """Take what a member's note says of cuts and digests."""
        if note.cut is not None:
            self._cut = note.cut
        if note.digest is not None:
            cut, digest = note.digest
            self._heard.setdefault(cut, {})[peer] = digest
            if len(self._heard) > _CUTS_MAX:
                del self._heard[min(self._heard)]

    def compute(self, reached: int, digest: Callable[[int], str | None]) -> None:
        """Compute the digest of the cut that was named, if this node has got there.

        Args:
            reached: every member's updates below this number are applied.
            digest: returns the digest at a cut, after a dash and what names the contributors; None if it cannot be told
                any more.
        """
        cut = self._cut
        if cut is None or reached < cut:
            return
        self._cut = None
        begin_s = clock.now_s()
        own = digest(cut)
        self._interval_s = max(self._every_s, _COST_SHARE * (clock.now_s() - begin_s))
        if own is not None:
            self._to_send = (cut, own)
            self._heard.setdefault(cut, {})[self._me] = own

    @property
    def has_news(self) -> bool:
        """Whether digests wait to be compared."""
        return bool(self._heard)

    def judge(self, peers: Iterable[Peer]) -> None:
        """Compare the digests of a cut of which all members have told.

        Raises:
            Diverged: most others hold something else than this node.
        """
        everybody = {self._me, *peers}
        for cut in sorted(self._heard):
            digests = self._heard[cut]
            if not everybody <= digests.keys():
                continue
            for old in [old for old in self._heard if old <= cut]:
                del self._heard[old]
            self._compare(cut, {peer: digests[peer] for peer in everybody})

    def _compare(self, cut: int, digests: dict[Peer, str]) -> None:
        counts = Counter(digests.values())
        if len({digest.partition("-")[0] for digest in counts}) > 1:
            return  # somebody came or went, and not all knew it at this cut
        if len(counts) == 1:
            self.agreed += 1
            return
        # What most hold; of equally many, what the member with the lowest id holds.
        most = max(counts.values())
        right = next(digests[peer] for peer in sorted(digests) if counts[digests[peer]] == most)
        good = ", ".join(peer.address for peer in sorted(digests) if digests[peer] == right)
        bad = [peer for peer in sorted(digests) if digests[peer] != right]
        text = (
            f"the replicas have diverged at step {cut}: {', '.join(one.address for one in bad)} hold other "
            f"parameters than {good}"
        )
        if self._me in bad:
            raise Diverged(
                f"{text}; this node ({self._me.address}) has digest {digests[self._me]} instead of {right}: "
                "call resync(params)"
            )
        _LOG.error("%s", text)

    def forget(self) -> None:
        """Begin anew: this node has taken its parameters from another."""
        self._cut = self._to_send = None
        self._heard.clear()
