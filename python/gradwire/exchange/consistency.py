"""The comparison of synchronous replicas: digests of the same state on all members, and the verdict.

The member with the lowest id announces a comparison step K from time to time in the note of its update. All members
compute the digest of their parameters when they have finished the steps before K, and send it with their next update.
Asynchronous replicas are never in the same state, so they are not compared.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import device_of, on_host, views
from ..errors import Diverged
from . import clock
from .groups import Groups
from .membership import Membership
from .options import Options
from .protocol import NodeRun, Note, Phase
from .replica import Replica

__all__ = ["Consistency", "Digests", "digest_of", "start_of"]

_LOG = logging.getLogger(__name__)

# A digest passes over all parameters: it may take one part in this many of the time.
_COST_SHARE = 50
_DIGEST_BYTES = 8

# Steps from the announcement to the comparison: every member sees the announcement in the step before.
_LEAD_STEPS = 1

# Comparisons whose digests are kept: those that some member cannot compute never become complete.
_COMPARISONS_MAX = 8


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
        run: this node.
        name_of: returns the name of a node, for messages.
        every_s: seconds between the comparisons that this node announces; 0: none.

    Attributes:
        agreed: number of comparisons without a difference.
    """

    def __init__(self, run: NodeRun, name_of: Callable[[NodeRun], str], every_s: float) -> None:
        self.agreed = 0
        self._run = run
        self._name_of = name_of
        self._every_s = every_s
        self._interval_s = every_s
        self._due_s: float | None = None
        self._comparison: int | None = None
        self._unsent: tuple[int, str] | None = None
        self._digests: dict[int, dict[NodeRun, str]] = {}

    @property
    def is_pending(self) -> bool:
        """Whether some members' digests have arrived, and not all."""
        return bool(self._digests)

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next comparison."""
        if not self._every_s or self._comparison is not None:
            return False
        return self._due_s is None or clock.now_s() >= self._due_s

    def schedule_comparison(self, step: int) -> int | None:
        """Return the comparison to announce with the update of ``step``, None if no comparison is due."""
        if not self.is_due:
            return None
        self._due_s = clock.now_s() + self._interval_s
        self._comparison = step + _LEAD_STEPS
        return self._comparison

    @property
    def has_unsent(self) -> bool:
        """Whether this node's digest waits for the next update."""
        return self._unsent is not None

    def take_unsent(self) -> tuple[int, str] | None:
        """Return the comparison and this node's digest to send with the next update, once."""
        unsent = self._unsent
        self._unsent = None
        return unsent

    def add_remote(self, run: NodeRun, note: Note) -> None:
        """Add the announcement and the digest of a member's note."""
        if note.comparison is not None:
            self._comparison = note.comparison
        if note.digest is not None:
            comparison, digest = note.digest
            self._digests.setdefault(comparison, {})[run] = digest
            if len(self._digests) > _COMPARISONS_MAX:
                del self._digests[min(self._digests)]

    def digest_step(self, step: int, digest: Callable[[], str | None]) -> None:
        """Compute the digest if ``step`` is the comparison that was announced.

        Args:
            step: all updates before this step are applied, and no others.
            digest: returns the digest of the present state, preceded by the contributors' name and a dash; None if the
                arrays cannot be read.
        """
        comparison = self._comparison
        if comparison is None or step < comparison:
            return
        self._comparison = None
        if step > comparison:
            return  # this node came in after the state that the others compare
        begin_s = clock.now_s()
        own_digest = digest()
        self._interval_s = max(self._every_s, _COST_SHARE * (clock.now_s() - begin_s))
        if own_digest is not None:
            self._unsent = (comparison, own_digest)
            self._digests.setdefault(comparison, {})[self._run] = own_digest

    def check_verdict(self, peers: Iterable[NodeRun]) -> None:
        """Compare the digests of every comparison for which all members' have arrived.

        Raises:
            Diverged: most others hold other parameters than this node.
        """
        members = {self._run, *peers}
        for comparison in sorted(self._digests):
            digests = self._digests[comparison]
            if not members <= digests.keys():
                continue
            for old in [old for old in self._digests if old <= comparison]:
                del self._digests[old]
            self._compare(comparison, {run: digests[run] for run in sorted(members)})

    def _compare(self, step: int, digests: dict[NodeRun, str]) -> None:
        counts = Counter(digests.values())
        if len({digest.partition("-")[0] for digest in counts}) > 1:
            return  # a member came or went, and not all knew of it at this step
        if len(counts) == 1:
            self.agreed += 1
            return
        # The majority is right; of equally many, those with the lowest id.
        most = max(counts.values())
        right = next(digest for digest in digests.values() if counts[digest] == most)
        good = ", ".join(self._name_of(run) for run, digest in digests.items() if digest == right)
        bad = ", ".join(self._name_of(run) for run, digest in digests.items() if digest != right)
        text = f"the replicas have diverged at step {step}: {bad} hold other parameters than {good}"
        if digests[self._run] != right:
            raise Diverged(
                f"{text}; this node ({self._name_of(self._run)}) has digest {digests[self._run]} instead of {right}: "
                "call resync(params)"
            )
        _LOG.error("%s", text)

    def reset(self) -> None:
        """Forget all comparisons and digests: this node has another replica's parameters now."""
        self._comparison = None
        self._unsent = None
        self._digests.clear()


class Consistency:
    """Takes part in the comparison of replicas between two steps.

    Attributes:
        digests: of this node and of the others.
    """

    def __init__(self, options: Options, membership: Membership, replica: Replica) -> None:
        self._membership = membership
        self._replica = replica
        every_s = options.digest_s if options.is_sync else 0.0
        name_of = membership.introductions.name_of
        self.digests = Digests(membership.run, name_of, every_s)

    def add_notes(self, params: Any) -> None:
        """Add the notes of applied updates, and compute a digest where a comparison was announced."""
        for run, note in self._membership.notes.drain_applied():
            self.digests.add_remote(run, note)
        self.digests.digest_step(self._replica.step, lambda: self._digest(params))

    def compare(self, params: Any) -> None:
        """Add notes, compare digests, and prepare this node's next note.

        Raises:
            Diverged: most others hold other parameters than this node.
        """
        membership = self._membership
        digests = self.digests
        self.add_notes(params)
        is_due = digests.is_due and membership.is_first
        if (is_due or digests.has_unsent) and not membership.notes.is_scheduled:
            step = self._replica.step
            comparison = digests.schedule_comparison(step) if is_due else None
            membership.notes.schedule(comparison, digests.take_unsent())
        if digests.is_pending and membership.phase is Phase.IN:
            digests.check_verdict(membership.peers)

    def _digest(self, params: Any) -> str | None:
        """Return contributors and digest of the present state; None where neither NumPy nor torch can see it."""
        replica = self._replica
        contributors = self._membership.contributors_before(replica.step)
        try:
            return f"{contributors}-{digest_of(replica.shared or views(params))}"
        except TypeError:
            return None
