"""What is under way to one peer: records, or runs of skipped ones, each with all its transmissions."""

from __future__ import annotations

from .path_mtu import BASE_BYTES
from .records import Record
from .recovery import Sent
from .wire import Ack


class Flight:
    """One record (or one run of skipped records) under way to the peer.

    Attributes:
        number: of the record, or the first skipped.
        record: None for skipped ones.
        span: how many record numbers it covers.
        nbytes: of all datagrams.
        full: a bit for each fragment.
        acked: those that the peer has.
        ever: those that were sent.
        again: those that were sent more than once.
        to_send: those that wait to be sent.
        sent: the transmissions, oldest first.
        first_order: of the first transmission; -1 before it.
        resent: whether anything counted as lost.
    """

    # How each of them begins; there are many, and most of this never changes.
    acked = 0
    ever = 0
    again = 0
    first_order = -1
    resent = False

    def __init__(self, number: int, record: Record | None, span: int) -> None:
        self.number = number
        self.record = record
        self.span = span
        self.full, self.nbytes = (1, 0) if record is None else (record.full, record.nbytes)
        self.to_send = self.full
        self.sent: list[Sent] = []

    @classmethod
    def whole(cls, record: Record, sent: Sent) -> Flight:
        """Return a record of which everything has been sent once, and nothing has been heard."""
        flight = cls(record.number, record, record.span)
        flight.to_send, flight.ever, flight.first_order = 0, flight.full, sent.order
        flight.sent.append(sent)
        return flight

    @property
    def large(self) -> int:
        """The bits of the fragments whose datagrams are larger than every path carries."""
        return self.record.fragments_above(BASE_BYTES) if self.record is not None else 0

    @property
    def is_simple(self) -> bool:
        """Whether it was sent whole, each fragment once, and nothing has been heard of it yet."""
        return self.ever == self.full and not (
            self.acked or self.again or self.to_send or self.resent
        )

    def bytes_of(self, mask: int) -> int:
        """Return the size on the wire of these fragments."""
        return self.record.bytes_of(mask) if self.record is not None else 0

    def largest_of(self, mask: int) -> int:
        """Return the size of the largest datagram among these fragments: of the first, as only a last one is short."""
        return self.bytes_of(mask & -mask)


def described_end(ack: Ack) -> int:
    """Return the number from which on the report says nothing about any record."""
    last_partial = ack.partials[-1][0] if ack.partials else ack.cumulative
    return max(ack.cumulative + max(ack.complete.bit_length(), 1), last_partial + 1)


def reported(flights: dict[int, Flight], ack: Ack) -> list[tuple[Flight, int]]:
    """Return each flight that the report says something about, with the fragments the peer holds."""
    partials = dict(ack.partials)
    first = ack.cumulative + ack.skipped
    last_partial = ack.partials[-1][0] if ack.partials else ack.cumulative
    end = described_end(ack)
    result = []
    for number, flight in flights.items():
        if number >= end:
            break
        if number + flight.span <= ack.cumulative:
            result.append((flight, flight.full))
        elif number >= ack.cumulative:
            if ack.complete >> (number - ack.cumulative) & 1:
                result.append((flight, flight.full))
            elif first <= number and (number <= last_partial or not ack.truncated):
                # A bitmap with every bit set belongs to an incomplete record only if its peer is confused.
                got = partials.get(number, 0) & flight.full
                result.append((flight, got if got != flight.full else 0))
    return result
