"""The notes that travel with updates: what this node's next one says, and what those of all nodes say together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ..agreement import Agreement, Sketch
from .membership import Membership, Router
from .protocol import Kind, NodeRun, Note, Phase

__all__ = ["Notes"]

_LOG = logging.getLogger(__name__)

_EMPTY = Note()


class Notes:
    """Sends the notes of this node's updates, and reads the members' notes of the same step.

    Args:
        membership, router: of this node.
        keeps: notes of this node's latest updates that are kept.
    """

    def __init__(self, membership: Membership, router: Router, keeps: int) -> None:
        self._membership = membership
        self._introductions = membership.introductions
        self._router = router
        self._keeps = keeps
        self._own: dict[int, Note] = {}  # by step
        self._next = _EMPTY
        self._measured = -1  # the last step whose updates were measured
        # Updates that were shortened, as far as notes tell.
        self._outliers: Counter[NodeRun] = Counter()

    # ---- this node's notes -------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether this node's next note has something about a comparison."""
        return self._next.comparison is not None or self._next.digest is not None

    def announce(self, comparison: int | None, digest: tuple[int, str] | None) -> None:
        """Let this node's next note announce a comparison of replicas, and give its digest."""
        self._next = replace(self._next, comparison=comparison, digest=digest)

    def announce_update(self, norm: float | None, sketch: Sketch | None) -> None:
        """Let this node's next note have the norm and the sketch of its update."""
        self._next = replace(self._next, norm=norm, sketch=sketch)

    def reset(self) -> None:
        """Forget what the next note was to say: it was about parameters that this node has no longer."""
        self._next = _EMPTY
        self._measured = -1

    def send(self, step: int, written: str) -> None:
        """Send the note for this node's update of ``step``, unless it is empty; before the update.

        Args:
            step: number of the step.
            written: digest of the parameters that the caller has written before the step; empty: none.
        """
        membership = self._membership
        # The note is made once for a step: another try of the update must not repeat it.
        if membership.next_step > step:
            return
        note = self._next
        if written:
            note = replace(note, written=written)
        if self._introductions.hellos.keys() - membership.members.keys():
            note = self._with_newcomers(note)
        if note is _EMPTY:
            return
        self._next = _EMPTY
        self._own[step] = note
        for old in [old for old in self._own if old < step - self._keeps]:
            del self._own[old]
        self._router.send(Kind.NOTE, step, note.encode(), self._router.participants())

    def _with_newcomers(self, note: Note) -> Note:
        """Return a note that names the nodes that are ready to be members, too."""
        ready = self._introductions.compatible(Phase.READY).keys() - self._membership.members.keys()
        if not ready:
            return note
        admits = tuple(sorted(ready))
        workers = tuple(run for run in admits if run in self._introductions.workers)
        return replace(note, admits=admits, workers=workers)

    # ---- all nodes' notes --------------------------------------------------------------------------------------------

    def measure(self, agreement: Agreement, step: int | None) -> None:
        """Add what the notes say of all updates of a step, this node's own included, to the agreement.

        Args:
            agreement: of this node; its factor stays as it is without sketches.
            step: None: the latest of which every member has told, if there is a new one.
        """
        notes = {run: stream.notes for run, stream in self._membership.members.items()}
        if self._membership.phase is Phase.IN:
            notes[self._membership.run] = self._own
        if step is None:
            told = [
                {step for step, note in by_step.items() if note.tells_of_update}
                for by_step in notes.values()
            ]
            # A node that has to join again at the end of its step has no members any more.
            step = max(set.intersection(*told), default=-1) if told else -1
            if step <= self._measured:
                return
            self._measured = step
        # By node, because the order of a sum decides about its bits.
        of_step = {run: notes[run].get(step, _EMPTY) for run in sorted(notes)}
        norms = {run: note.norm for run, note in of_step.items() if note.norm is not None}
        is_told = agreement.takes(step)
        if is_told:
            sketches = [note.sketch for note in of_step.values()]
            agreement.add([sketch for sketch in sketches if sketch is not None])
        outliers = list(norms)
        # In other steps only those tell whose update was too long: all of them after a jump of the learning rate.
        if is_told or 0 < len(norms) == len(of_step):
            outliers = agreement.add_norms(norms)
            if agreement.drain_equal_updates():
                _LOG.warning(
                    "step %d: the processes' updates are equal, so they seem to train on the same batches and gain "
                    "nothing from each other: seed what draws the batches with the rank, or give the loader a "
                    "DistributedSampler(data, num_replicas=..., rank=...)",
                    self._introductions.step_number(step),
                )
        for run in outliers:
            self._log_outlier(run, step, norms[run])

    def _log_outlier(self, run: NodeRun, step: int, norm: float) -> None:
        self._outliers[run] += 1
        count = self._outliers[run]
        # Seldom, where every update of a node is too long.
        if count & (count - 1) == 0:
            is_own = run == self._membership.run
            _LOG.warning(
                "step %d: the update of %s has a norm of %.3g, several times the median of all nodes (number %d); such "
                "updates are shortened to the median: look for bad data or a broken machine there",
                self._introductions.step_number(step),
                "this node" if is_own else self._introductions.name_of(run),
                norm,
                count,
            )

    def named_by_all(self, senders: Iterable[NodeRun], step: int) -> list[NodeRun]:
        """Return the newcomers that the notes of all updates of a step name, sorted.

        Args:
            senders: of the other updates that were applied in the step.
            step: number of the step.
        """
        members = self._membership.members
        notes: list[Note] = []
        if self._membership.phase is Phase.IN:
            own_note = self._own.get(step)
            if own_note is None:
                return []
            notes.append(own_note)
        for run in senders:
            note = members[run].notes.get(step) if run in members else None
            if note is not None:
                notes.append(note)
            elif run in members:
                return []
        # A node that only follows may not be connected with every newcomer, so the notes say who owns nothing.
        for note in notes:
            self._introductions.add_workers(note.workers)
        named = [set(note.admits) for note in notes]
        return sorted(set.intersection(*named)) if named else []

    def is_written_by_all(self, senders: Iterable[NodeRun], step: int) -> bool:
        """Return whether the callers of all nodes have written the same parameters before a step.

        Args:
            senders: of the other updates of the step.
            step: number of the step.
        """
        # All members have the same notes of the same step, so all come to the same answer.
        members = self._membership.members
        notes = [
            members[run].notes.get(step, _EMPTY) if run in members else _EMPTY for run in senders
        ]
        if self._membership.phase is Phase.IN:
            notes.append(self._own.get(step, _EMPTY))
        written = {note.written for note in notes}
        return len(written) == 1 and "" not in written
