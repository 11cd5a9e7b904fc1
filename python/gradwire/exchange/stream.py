"""The updates of one node, as they arrive: in order, once, kept a little longer than they are needed here."""

from __future__ import annotations

from collections.abc import Iterator

from ..message import Message
from .control import Kind, Note, tag_of

__all__ = ["Stream"]


class Stream:
    """The updates of one node from some step on.

    Attributes:
        first: number of the first update that arrives in full; None: whichever comes first.
        received: number of the next update to arrive.
        position: number of the next update to apply.
        begun: number of the first update that was applied from here, not with a snapshot.
        notes: what came with the updates, by step.
    """

    def __init__(self, first: int | None, keeps: int) -> None:
        self.first = first
        self.received = self.position = first or 0
        self.begun = self.position
        self.notes: dict[int, Note] = {}
        self._keeps = keeps
        self._messages: dict[int, list[Message]] = {}
        self._payloads: dict[int, list[tuple[int, memoryview]]] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._messages

    @property
    def held(self) -> int:
        """Number of the first update that neither arrived nor is applied."""
        return max(self.received, self.position)

    def accepts(self, step: int) -> bool:
        """Return whether the update of ``step`` is the next to arrive."""
        if self.first is None:
            self.first = self.received = self.position = self.begun = step
        return step == self.received

    def add_note(self, step: int, note: Note, payload: memoryview) -> None:
        """Keep what comes with the update of ``step``, before that."""
        self.notes[step] = note
        self._payloads.setdefault(step, []).append((tag_of(Kind.NOTE, step), payload))

    def add(self, messages: list[Message], payload: memoryview) -> None:
        """Keep the update that was to arrive next, unless it is applied already."""
        if self.received >= self.position:
            self._messages[self.received] = messages
            self._payloads.setdefault(self.received, []).append((self.received, payload))
        self.received += 1

    def add_relayed(self, messages: list[Message], payload: memoryview) -> None:
        """Keep the first update that is not held, which came by way of another node."""
        self.received = self.held
        self.add(messages, payload)

    def start_at(self, step: int) -> None:
        """Go on at ``step``: what is applied holds everything before."""
        if self.first is None:
            self.first = self.received = step
        for old in [old for old in self._messages if old < step]:
            del self._messages[old]
        self.position = self.begun = step
        self._trim()

    def take(self) -> list[Message]:
        """Return the next update to apply, and move on.

        Raises:
            KeyError: it is not here.
        """
        messages = self._messages.pop(self.position)
        self.position += 1
        self._trim()
        return messages

    def raw(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """Yield tags and payloads of what came from step ``first`` on, up to ``last`` exclusive, in order."""
        for step in range(first, last):
            yield from self._payloads.get(step, ())

    def _trim(self) -> None:
        oldest = self.position - self._keeps
        # One goes with each that is applied; there are more only where this node came in or fell behind.
        self._payloads.pop(oldest - 1, None)
        self.notes.pop(oldest - 1, None)
        if len(self._payloads) > 2 * self._keeps + 16:
            for step in [step for step in self._payloads if step < oldest]:
                del self._payloads[step]
                self.notes.pop(step, None)
