"""What waits for a peer that lags, given back to the application so that it can make less of it.

Updates add up, so what a slow peer has not been sent yet can become one message, their sum. Nothing that was sent to it
in part, or may have been, is touched; messages that are published in the meantime come after the substitutes, for which
record and message numbers are set aside beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .buffers import flat_view
from .crypto import SenderKey
from .model import Peer
from .records import Outgoing, SendLog
from .sealer import Sealer, open_record
from .wire import RECORD_META, RECORD_META_BYTES

logger = logging.getLogger(__name__)


class Backlogged(NamedTuple):
    """One message that nothing has been sent of yet: the caller's tag and a read-only view of its bytes."""

    tag: int
    payload: memoryview


Coalesce: TypeAlias = Callable[[Peer, Sequence[Backlogged]], Iterable[tuple[int, object]]]
Substitutes: TypeAlias = list[tuple[int, memoryview]]


@dataclass(frozen=True)
class Backlog:
    """The messages that wait for one peer, and where their substitutes go.

    Attributes:
        session: local index of the peer's session.
        peer: who it is.
        messages: what waits, oldest first.
        first: number of the first record of the first message; nothing is sent from here on until it is settled.
        place: first of the record numbers set aside for the substitutes.
        places: how many there are.
        number: first of the message numbers set aside, as many as there are messages.
    """

    session: int
    peer: Peer
    messages: tuple[Backlogged, ...]
    first: int
    place: int
    places: int
    number: int

    @property
    def nbytes(self) -> int:
        """Bytes of all the messages."""
        return sum(len(message.payload) for message in self.messages)


def waiting_messages(
    log: SendLog, session: int, start: int, keys: Mapping[int, SenderKey]
) -> tuple[int, list[Backlogged]]:
    """Return the whole messages for one session from record ``start`` on, and the number of their first record."""
    first = log.head
    buffers: list[tuple[int, bytearray]] = []
    for record in log:
        if record.number < start or session not in record.message.recipients:
            continue
        plain = open_record(record, keys[record.epoch])
        _, tag, _, offset = RECORD_META.unpack_from(plain)
        if offset == 0:
            buffers.append((tag, bytearray()))
            first = min(first, record.number)
        if buffers:  # otherwise it continues a message that was begun before
            buffers[-1][1].extend(plain[RECORD_META_BYTES:])
    return first, [Backlogged(tag, memoryview(data).toreadonly()) for tag, data in buffers]


def ask(hook: Coalesce, backlog: Backlog) -> Substitutes | None:
    """Return what the hook wants to be sent instead, or None if it failed, which is logged."""
    try:
        return [(tag, flat_view(payload)) for tag, payload in hook(backlog.peer, backlog.messages)]
    except Exception:
        logger.exception(
            "coalesce failed for %s; its %d messages stay as they are",
            backlog.peer,
            len(backlog.messages),
        )
        return None


def is_unchanged(backlog: Backlog, substitutes: Substitutes) -> bool:
    """Whether the same messages came back."""
    return len(substitutes) == len(backlog.messages) and all(
        message.tag == tag and message.payload == payload
        for message, (tag, payload) in zip(backlog.messages, substitutes, strict=True)
    )


def objection(
    backlog: Backlog, substitutes: Substitutes, sealer: Sealer, message_bytes_max: int
) -> str | None:
    """Return why the substitutes cannot be taken, with the numbers; None if they can."""
    nbytes = sum(len(payload) for _, payload in substitutes)
    if nbytes >= backlog.nbytes:
        return f"{nbytes} bytes instead of {backlog.nbytes}: fewer are required"
    if len(substitutes) > len(backlog.messages):
        return (
            f"{len(substitutes)} messages instead of {len(backlog.messages)}: not more are allowed"
        )
    for tag, payload in substitutes:
        if not 0 <= tag < 1 << 64:
            return f"the tag {tag} does not fit 64 bits unsigned"
        if len(payload) > message_bytes_max:
            return f"a message of {len(payload)} bytes is larger than {message_bytes_max}"
    records = sum(sealer.numbers_of(len(payload)) for _, payload in substitutes)
    if records > backlog.places:
        return f"{records} records where {backlog.places} were set aside"
    return None


def lacking_others(
    recipients: Collection[int], session: int, number: int, positions: Mapping[int, int]
) -> frozenset[int]:
    """Return which sessions but one may still lack a record."""
    return frozenset(
        index
        for index in recipients
        if index != session and index in positions and positions[index] <= number
    )


def own_bytes(log: SendLog, backlog: Backlog, positions: Mapping[int, int]) -> int:
    """Return how many bytes of the log only this backlog keeps."""
    return sum(
        record.nbytes
        for record in log
        if backlog.first <= record.number < backlog.place
        and backlog.session in record.message.recipients
        and not lacking_others(record.message.recipients, backlog.session, record.number, positions)
    )


def withdraw(log: SendLog, backlog: Backlog, positions: Mapping[int, int]) -> None:
    """Take the backlog's records away from its peer; the others still get theirs."""
    for record in log:
        recipients = record.message.recipients
        if not backlog.first <= record.number < backlog.place or backlog.session not in recipients:
            continue
        others = lacking_others(recipients, backlog.session, record.number, positions)
        if others:
            record.message = Outgoing(others, record.message.last_record)
        else:
            log.drop(record.number)


def put(log: SendLog, sealer: Sealer, backlog: Backlog, substitutes: Substitutes) -> int:
    """Seal the substitutes into their places; return the number of the record with which all of them are there."""
    at = backlog.place
    for index, (tag, payload) in enumerate(substitutes):
        last_record = at + sealer.numbers_of(len(payload)) - 1
        message = Outgoing(frozenset({backlog.session}), last_record)
        for record in sealer.seal_message(at, message, backlog.number + index, tag, payload):
            log.put(record)
        at = last_record + 1
    return max(backlog.place, at - 1)
