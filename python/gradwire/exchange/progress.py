"""How far this node has come: the number of its step, and its own messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..message import Message

if TYPE_CHECKING:
    from ..transport import Ticket

__all__ = ["Own", "Progress"]


@dataclass
class Own:
    """This node's messages of one step: encoded once, handed over once.

    Attributes:
        step: its number.
        messages: the groups', and those of the optimiser's state.
        payload: all of them, as they are sent.
        encode_s: time it took to encode them.
        wait_s: time spent on handing them over and on waiting for the others', so far.
        is_handed_over: whether the transport has them.
        ticket: follows them to the peers, once handed over.
    """

    step: int
    messages: list[Message]
    payload: Message | bytes
    encode_s: float
    wait_s: float = 0.0
    is_handed_over: bool = False
    ticket: Ticket | None = None

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return self.payload.nbytes if isinstance(self.payload, Message) else len(self.payload)


class Progress:
    """What the rooms of one exchange share about its own steps.

    Attributes:
        step: number of the next step, or of the one that is not finished.
        own: its messages once they are encoded; None before.
        sent: the messages of the last steps, finished here; others may not have them.
        keeps: how many of those.
    """

    def __init__(self, step: int, keeps: int) -> None:
        self.step = step
        self.own: Own | None = None
        self.keeps = keeps
        self.sent: deque[Own] = deque(maxlen=keeps)

    @property
    def oldest(self) -> Own | None:
        """The oldest of the messages that are kept; None while there is room for more."""
        return self.sent[0] if len(self.sent) == self.keeps else None

    def finish(self, own: Own) -> None:
        """The step of these messages is done: keep them a little longer, and go on to the next."""
        self.own = None
        self.sent.append(own)
        self.step += 1
