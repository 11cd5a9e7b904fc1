"""The comparison of replicas: digests of the same state on all members, and the verdict.

A cut is a number K: the state in which every member's updates below K are applied and no others. The member with the
lowest id announces a cut from time to time in a note; each member computes the digest at the cut and sends it with its
next update. In synchronous mode a cut is the end of a step. An asynchronous replica is never exactly at a cut; if its
sum is exact, the updates beyond the cut are subtracted again.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import device_of
from ..errors import Diverged
from ..message import Message
from ..transport import Peer
from . import clock
from .groups import Groups
from .membership import Membership
from .options import Options
from .parameters import ExactSum, on_host, views
from .protocol import Note, Phase
from .replica import Replica

__all__ = ["Consistency", "Digests", "digest_of", "start_of"]

_LOG = logging.getLogger(__name__)

# A digest passes over all parameters: it may take one part in this many of the time.
_COST_SHARE = 50
_DIGEST_BYTES = 8

# Cuts whose digests are kept: those of a cut that some member cannot compute never become complete.
_CUTS_MAX = 8


def digest_of(arrays: Sequence[NDArray[Any]]) -> str:
    """Return a digest of the arrays' bits."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        state.update(np.ascontiguousarray(on_host(array)).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def start_of(groups: Groups, params: Any) -> tuple[str, str]:
    """Return digests of the parameters and of the residual before the first step.

    Args:
        groups: the encoders.
        params: the shared parameters.

    Returns:
        Empty texts for arrays that NumPy and torch cannot see, and for a residual of zeros.
    """
    try:
        arrays = views(params)
    except TypeError:
        return "", ""
    residuals = [
        encoder.state_dict()["residual"] if device_of(encoder.residual) >= 0 else encoder.residual
        for encoder in groups.encoders
    ]
    has_residual = any(residual.any() for residual in residuals)
    return digest_of(arrays), digest_of(residuals) if has_residual else ""


class Digests:
    """The times of comparisons, the members' digests, and the verdict.

    Args:
        me: this node.
        every_s: seconds between the cuts that this node announces; 0: none.
        ahead: steps from the announcement to the cut, so that no node has passed the cut when it is announced.

    Attributes:
        agreed: number of comparisons without a difference.
    """

    def __init__(self, me: Peer, every_s: float, ahead: int) -> None:
        self._me = me
        self._every_s = self._interval_s = every_s
        self._ahead = ahead
        self._due_s: float | None = None
        self._cut: int | None = None
        self._own: tuple[int, str] | None = None
        self._digests: dict[int, dict[Peer, str]] = {}
        self.agreed = 0

    def announce_cut(self, step: int) -> int | None:
        """Return the cut to announce with the update of ``step``, None if no comparison is due."""
        is_due = self._due_s is None or clock.now_s() >= self._due_s
        if not self._every_s or self._cut is not None or not is_due:
            return None
        self._due_s = clock.now_s() + self._interval_s
        self._cut = step + self._ahead
        return self._cut

    def outgoing(self) -> tuple[int, str] | None:
        """Return the cut and digest to send with the next update, once."""
        own, self._own = self._own, None
        return own

    def add_remote(self, peer: Peer, note: Note) -> None:
        """Add the cut and the digest of a member's note."""
        if note.cut is not None:
            self._cut = note.cut
        if note.digest is not None:
            cut, digest = note.digest
            self._digests.setdefault(cut, {})[peer] = digest
            if len(self._digests) > _CUTS_MAX:
                del self._digests[min(self._digests)]

    def digest_step(self, reached: int, digest: Callable[[int], str | None]) -> None:
        """Compute the digest if the announced cut is reached.

        Args:
            reached: every member's updates below this number are applied.
            digest: returns the digest at a cut, preceded by the contributors' name and a dash; None if the state at the
                cut is unknown.
        """
        cut = self._cut
        if cut is None or reached < cut:
            return
        self._cut = None
        begin_s = clock.now_s()
        own = digest(cut)
        self._interval_s = max(self._every_s, _COST_SHARE * (clock.now_s() - begin_s))
        if own is not None:
            self._own = (cut, own)
            self._digests.setdefault(cut, {})[self._me] = own

    def check_verdict(self, peers: Iterable[Peer]) -> None:
        """Compare the digests of every cut for which all members' have arrived.

        Raises:
            Diverged: most others hold other parameters than this node.
        """
        members = {self._me, *peers}
        for cut in sorted(self._digests):
            digests = self._digests[cut]
            if not members <= digests.keys():
                continue
            for old in [old for old in self._digests if old <= cut]:
                del self._digests[old]
            self._compare(cut, {peer: digests[peer] for peer in members})

    def _compare(self, cut: int, digests: dict[Peer, str]) -> None:
        counts = Counter(digests.values())
        if len({digest.partition("-")[0] for digest in counts}) > 1:
            return  # a member came or went, and not all knew of it at this cut
        if len(counts) == 1:
            self.agreed += 1
            return
        # The majority is right; of equally many, those with the lowest id.
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

    def reset(self) -> None:
        """Forget all cuts and digests: this node has another replica's parameters now."""
        self._cut = self._own = None
        self._digests.clear()


class Consistency:
    """Takes part in the comparison of replicas between two steps.

    Asynchronous replicas are compared only if their sums are exact.

    Attributes:
        digests: of this node and of the others.
    """

    def __init__(self, options: Options, membership: Membership, replica: Replica) -> None:
        self._is_sync = options.is_sync
        self._membership = membership
        self._replica = replica
        ahead = 1 if options.is_sync else options.max_staleness + 2
        every_s = options.digest_s if options.is_sync or options.exact else 0.0
        self.digests = Digests(membership.me, every_s, ahead)

    def add_notes(self, params: Any) -> None:
        """Add the notes of applied updates, and compute a digest where a cut is reached."""
        membership = self._membership
        for peer, note in membership.heard:
            self.digests.add_remote(peer, note)
        membership.heard.clear()
        reached = self._replica.step
        if not self._is_sync:
            reached = min([reached, *membership.positions.values()])
        self.digests.digest_step(reached, lambda cut: self._digest_at(cut, params))

    def compare(self, params: Any) -> None:
        """Add notes, compare digests, and prepare this node's next note.

        Raises:
            Diverged: most others hold other parameters than this node.
        """
        membership = self._membership
        self.add_notes(params)
        if membership.outgoing is None:
            step = self._replica.step
            cut = self.digests.announce_cut(step) if membership.is_first else None
            digest = self.digests.outgoing()
            if cut is not None or digest is not None:
                membership.outgoing = Note(cut=cut, digest=digest)
        if membership.phase is Phase.IN:
            self.digests.check_verdict(membership.peers)

    def _digest_at(self, cut: int, params: Any) -> str | None:
        """Return contributors and digest of the state at a cut; None where the state is unknown."""
        replica, contributors = self._replica, self._membership.contributors_at(cut)
        if self._is_sync:
            if cut != replica.step:
                return None
            try:
                return f"{contributors}-{digest_of(replica.shared or views(params))}"
            except TypeError:
                return None  # neither NumPy's nor torch's
        beyond = self._membership.applied_since(cut)
        total, oldest = replica.total, replica.oldest_sent
        if beyond is None or not isinstance(total, ExactSum) or not total.initial:
            return None
        if oldest is not None and oldest.step > cut:
            return None
        payloads: list[list[Message]] = [replica.parse(replica.me, cut, one) for one in beyond]
        payloads += [own.messages for own in replica.sent if own.step >= cut]
        return f"{contributors}-{digest_of([*total.initial, *total.without(payloads)])}"
