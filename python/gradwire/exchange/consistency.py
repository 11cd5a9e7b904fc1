"""The comparison of synchronous replicas: digests of the same state on all members, and the verdict.

The member with the lowest id announces a comparison step K from time to time in the note of its update. All members
compute the digest of their parameters when they have finished the steps before K, and send it with their next update.
Asynchronous replicas are never in the same state, so they are not compared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from .. import clock
from ..arrays import on_host, views
from ..errors import Diverged
from .groups import Groups
from .membership import Membership
from .notes import Notes
from .protocol import NodeRun, Note, Phase
from .replica import Replica

__all__ = ["Consistency", "digest_of", "residual_digest", "start_of"]

_LOG = logging.getLogger(__name__)

# A digest passes over all parameters: it may take one part in this many of the time.
_COST_SHARE = 200
_DIGEST_BYTES = 8

# The digest tells different replicas apart, and protects against nobody: its key is public. Processors that encrypt
# quickly compute the tag of AES-GCM twenty times as fast as a hash, at the speed of their memory.
_DIGEST_KEY = bytes(16)
_DIGEST_NONCE = bytes(12)
_DIGEST_SLICE_BYTES = 1 << 30  # some versions of OpenSSL take at most 2^31 - 1 bytes at once

# Steps from the announcement to the comparison: every member sees the announcement in the step before.
_LEAD_STEPS = 1

# Comparisons whose digests are kept: those that some member cannot compute never become complete.
_COMPARISONS_MAX = 8


def digest_of(arrays: Sequence[NDArray[Any]]) -> str:
    """Return a digest of the arrays' bits."""
    state = Cipher(algorithms.AES(_DIGEST_KEY), modes.GCM(_DIGEST_NONCE)).encryptor()
    for array in arrays:
        data = np.ascontiguousarray(on_host(array)).reshape(-1).view(np.uint8).data
        for begin in range(0, data.nbytes, _DIGEST_SLICE_BYTES):
            state.authenticate_additional_data(data[begin : begin + _DIGEST_SLICE_BYTES])
    state.finalize()
    return state.tag[:_DIGEST_BYTES].hex()


def residual_digest(residuals: Sequence[NDArray[Any]], saved_by: str) -> str:
    """Return a digest of a node's residuals; empty where they are zeros.

    Args:
        residuals: of the encoders.
        saved_by: the node that saved them: nodes that train with the same data may have the same residual.
    """
    if not any(residual.any() for residual in residuals):
        return ""
    return digest_of([*residuals, np.frombuffer(saved_by.encode(), np.uint8)])


def start_of(groups: Groups, params: Any, state: Sequence[Any], saved_by: str) -> tuple[str, str]:
    """Return digests of the parameters and of the residual before the first step.

    Args:
        groups: the encoders.
        params: the shared parameters.
        state: arrays that begin equal with them.
        saved_by: the node whose checkpoint was loaded; empty: none was, or it does not say.

    Returns:
        Empty texts for arrays that NumPy and torch cannot see, and for a residual of zeros.
    """
    try:
        arrays = views(params)
    except TypeError:
        return "", ""
    residuals = [
        encoder.state_dict()["residual"] if encoder.device_number >= 0 else encoder.residual
        for encoder in groups.encoders
        if encoder.has_residual
    ]
    return digest_of([*arrays, *state]), residual_digest(residuals, saved_by)


class Consistency:
    """Takes part in the comparison of replicas between two steps.

    Args:
        membership, notes, replica: of this node.
        every_s: seconds between the comparisons that this node announces; 0: none.

    Attributes:
        agreed: number of comparisons without a difference.
    """

    def __init__(
        self, membership: Membership, notes: Notes, replica: Replica, every_s: float
    ) -> None:
        self.agreed = 0
        self._membership = membership
        self._name_of = membership.introductions.name_of
        self._notes = notes
        self._replica = replica
        self._every_s = every_s
        self._interval_s = every_s
        self._due_s: float | None = None
        self._comparison: int | None = None
        self._unsent: tuple[int, str] | None = None  # comparison and this node's digest
        self._digests: dict[int, dict[NodeRun, str]] = {}  # by comparison

    def compare(self, params: Any) -> None:
        """Between two steps, add the members' notes, compare digests, and prepare this node's next note.

        Raises:
            Diverged: most others hold other parameters than this node.
        """
        membership = self._membership
        self.add_notes(params)
        is_due = self._is_due() and membership.is_first
        # The note before may not have been sent yet, as an overlapped step is finished first.
        if (is_due or self._unsent is not None) and not self._notes.has_news:
            if is_due:
                self._due_s = clock.now_s() + self._interval_s
                self._comparison = self._replica.step + _LEAD_STEPS
            self._notes.announce(self._comparison if is_due else None, self._unsent)
            self._unsent = None
        if self._digests and membership.phase is Phase.IN:
            self._check_verdict()

    def _is_due(self) -> bool:
        """Return whether it is time for the next comparison."""
        if not self._every_s or self._comparison is not None:
            return False
        return self._due_s is None or clock.now_s() >= self._due_s

    def add_notes(self, params: Any) -> None:
        """Add the notes of the last step's updates, and compute a digest where a comparison was announced."""
        step = self._replica.step
        # All members have the same notes of a step, so all compute their digests after the same step.
        for run, stream in self._membership.members.items():
            note = stream.notes.get(step - 1)
            if note is not None:
                self._add_note(run, note)
        if self._comparison is not None and step >= self._comparison:
            # A node that came in later has not the state that the others compare.
            if step == self._comparison:
                self._digest(step, params)
            self._comparison = None

    def _add_note(self, run: NodeRun, note: Note) -> None:
        if note.comparison is not None:
            self._comparison = note.comparison
        if note.digest is not None:
            comparison, digest = note.digest
            self._digests.setdefault(comparison, {})[run] = digest
            if len(self._digests) > _COMPARISONS_MAX:
                del self._digests[min(self._digests)]

    def _digest(self, step: int, params: Any) -> None:
        """Compute the digest of the present state, unless neither NumPy nor torch can see the arrays."""
        begin_s = clock.now_s()
        try:
            digest = digest_of(self._replica.shared or views(params))
        except TypeError:
            return
        self._interval_s = max(self._every_s, _COST_SHARE * (clock.now_s() - begin_s))
        # Digests of nodes that have seen different members contribute are not compared.
        self._unsent = (step, f"{self._membership.contributors_before(step)}-{digest}")
        self._digests.setdefault(step, {})[self._membership.run] = self._unsent[1]

    def _check_verdict(self) -> None:
        """Compare the digests of every comparison for which all members' have arrived."""
        members = sorted((self._membership.run, *self._membership.peers))
        for comparison in sorted(self._digests):
            digests = self._digests[comparison]
            if not all(run in digests for run in members):
                continue
            for old in [old for old in self._digests if old <= comparison]:
                del self._digests[old]
            self._judge(comparison, {run: digests[run] for run in members})

    def _judge(self, step: int, digests: dict[NodeRun, str]) -> None:
        counts = Counter(digests.values())
        # Each digest begins with the set of nodes that its sender believes to have contributed. Where these differ,
        # different parameters say nothing.
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
        run = self._membership.run
        if digests[run] != right:
            raise Diverged(
                f"{text}; this node ({self._name_of(run)}) has digest {digests[run]} instead of {right}: call "
                "resync(params)"
            )
        _LOG.error("%s", text)

    def reset(self) -> None:
        """Forget all comparisons and digests: this node has another replica's parameters now."""
        self._comparison = None
        self._unsent = None
        self._digests.clear()
        self._notes.reset()
