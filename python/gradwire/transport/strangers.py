"""Who knocks and gets no answer. It learns nothing from this node; this node's own log has to tell."""

from __future__ import annotations

from typing import Final, NamedTuple

from .model import Address
from .wire import INIT, VERSION

TOLD_MAX: Final = 8  # addresses told of at a time: they can be made up
TOLD_FOR_S: Final = 60.0  # then the same may be told again

_KIND_BITS: Final = 0x0F  # of a datagram's first byte; the others are the version


class Stranger(NamedTuple):
    """A first message that gets no answer.

    Attributes:
        address: where it came from, which nobody has checked.
        why: what keeps it from one.
    """

    address: Address
    why: str


class Strangers:
    """Counts the first messages of strangers and picks those to be told of: few, however many there are.

    Attributes:
        count: of all first messages that were no member's.
        last: the address of the last one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Address | None = None
        self._told: set[Address] = set()
        self._told_until_s = 0.0
        self._untold: list[Stranger] = []

    @property
    def has_news(self) -> bool:
        """Whether there is somebody to tell of."""
        return bool(self._untold)

    def note(self, address: Address, why: str, now_s: float) -> None:
        """Take note of a first message that gets no answer."""
        self.count += 1
        self.last = address
        if now_s >= self._told_until_s:
            self._told.clear()
            self._told_until_s = now_s + TOLD_FOR_S
        if address not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(address)
            self._untold.append(Stranger(address, why))

    def note_version(self, kind: int, address: Address, now_s: float) -> None:
        """Take note of a datagram of an unknown kind if it is a first message in another version."""
        if kind & _KIND_BITS == INIT & _KIND_BITS:
            why = f"it speaks version {kind >> 4} of the transport, this node {VERSION}"
            self.note(address, why, now_s)

    def take(self) -> list[Stranger]:
        """Return those to tell of, once."""
        untold, self._untold = self._untold, []
        return untold
