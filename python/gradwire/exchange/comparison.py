"""This node's part in comparing the replicas: when it is at a cut, and what it holds there."""

from __future__ import annotations

from typing import Any

from .control import Phase
from .digest import Digests, digest_of
from .parts import Parts
from .sums import ExactSum
from .views import views

__all__ = ["Comparison"]


class Comparison:
    """Computes the digests of one node and tells them to the others.

    Asynchronous replicas are compared only where their sums are exact.
    """

    def __init__(self, parts: Parts) -> None:
        self._options = options = parts.options
        self._roster, self._replica, self._progress = parts.roster, parts.replica, parts.progress
        ahead = 1 if options.is_sync else options.max_staleness + 2
        is_comparable = options.is_sync or options.exact
        self._digests = Digests(parts.roster.me, options.digest_s if is_comparable else 0.0, ahead)

    @property
    def agreed(self) -> int:
        """How many times all replicas were the same."""
        return self._digests.agreed

    def to_say(self, step: int) -> tuple[int | None, tuple[int, str] | None]:
        """Return the cut to name and the digest to tell with the update of ``step``, None for none."""
        names = self._digests.may_name and self._roster.is_first
        cut = self._digests.name_cut(step) if names else None
        return cut, self._digests.take()

    def forget(self) -> None:
        """Begin anew with parameters of another."""
        self._digests.forget()

    def take_part(self, params: Any) -> None:
        """Between two steps: take part in comparing the replicas."""
        self.hear_and_compute(params)
        if self._digests.has_news and self._roster.phase is Phase.IN:
            self._digests.judge(self._roster.peers)

    def hear_and_compute(self, params: Any) -> None:
        """Take what the applied updates' notes say, and compute a digest where it is time."""
        for peer, note in self._roster.heard:
            self._digests.hear(peer, note)
        self._roster.heard.clear()
        if not self._digests.is_due:
            return
        reached = self._roster.reached
        at = (
            self._progress.step
            if reached is None or self._options.is_sync
            else min(reached, self._progress.step)
        )
        self._digests.compute(at, lambda cut: self._digest(cut, params))

    def _digest(self, cut: int, params: Any) -> str | None:
        """Return the digest of the state at a cut; None where it cannot be told."""
        if self._options.is_sync:
            if cut != self._progress.step:
                return None
            try:
                state = digest_of(self._replica.anchor or views(params))
            except TypeError:
                return None  # not in this machine's memory
            return f"{self._roster.names_at(cut)}-{state}"
        beyond = self._roster.applied_from(cut)
        total = self._replica.total
        if beyond is None or not isinstance(total, ExactSum) or not total.initial:
            return None
        oldest = self._progress.oldest
        if oldest is not None and oldest.step > cut:
            return None
        beyond += [own.messages for own in self._progress.sent if own.step >= cut]
        state = digest_of([*total.initial, *total.without(beyond)])
        return f"{self._roster.names_at(cut)}-{state}"
