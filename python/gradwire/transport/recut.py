"""Cutting records anew: for smaller datagrams, or for one datagram per record.

A nonce never comes with other associated data, so what is cut anew is sealed anew under new record numbers, at the head
of the log and in the same order; every peer skips the old numbers that it has not acknowledged. A peer may have got
more than it has acknowledged so far. It then recognises, by message number and offset, what it has consumed already;
for that the old cuts stay cuts: pieces are only subdivided.
"""

from __future__ import annotations

from collections.abc import Mapping

from .crypto import SenderKey
from .records import Outgoing, Record, SendLog
from .sealer import Sealer, open_record
from .wire import HEADER_BYTES, RECORD_META, RECORD_META_BYTES, TAG_BYTES

PIECE_BYTES = HEADER_BYTES + RECORD_META_BYTES + TAG_BYTES  # what a record of one datagram adds


def growth_max(fragment_bytes_min: int) -> float:
    """Return how many times larger a full log may become by cutting its records anew.

    A piece that fits a larger datagram gives at most two of the smallest size: each new piece adds its header, meta
    data and tag.
    """
    return 1.0 + 2 * PIECE_BYTES / (fragment_bytes_min - RECORD_META_BYTES - TAG_BYTES)


def recut(
    log: SendLog, sealer: Sealer, keys: Mapping[int, SenderKey], positions: Mapping[int, int]
) -> dict[int, int]:
    """Cut everything that some peer lacks as ``sealer`` does now, and forget the old records.

    Args:
        log: of which all records below the head it has now are replaced.
        sealer: cuts and seals.
        keys: by the low 8 bits of their epoch, under which the records in the log are sealed.
        positions: for each session, by index, the first record that it may lack.

    Returns:
        For the number of each record that was replaced, the number of its last piece.
    """
    end = log.head
    moved = {}
    for record in log:
        lacking = frozenset(
            index
            for index in record.message.recipients
            if positions.get(index, end) <= record.number
        )
        log.drop(record.number)
        if lacking:
            moved[record.number] = _cut(record, lacking, log, sealer, keys)
    log.release_below(end)
    return moved


def _cut(
    record: Record,
    lacking: frozenset[int],
    log: SendLog,
    sealer: Sealer,
    keys: Mapping[int, SenderKey],
) -> int:
    plain = open_record(record, keys[record.epoch])
    number, tag, message_bytes, offset = RECORD_META.unpack_from(plain)
    chunk = plain[RECORD_META_BYTES:]
    last_record = log.head + sealer.numbers_of(len(chunk)) - 1
    message = Outgoing(lacking, last_record)
    for at in range(0, max(1, len(chunk)), sealer.chunk_bytes):
        piece = chunk[at : at + sealer.chunk_bytes]
        log.append(sealer.seal(log.head, message, number, tag, message_bytes, offset + at, piece))
    return last_record
