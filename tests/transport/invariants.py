"""Properties of an endpoint that hold at every moment, whatever the network and the peers do."""

from __future__ import annotations

from gradwire.transport.discovery import SEEDS_MAX
from gradwire.transport.endpoint import HALF_OPEN_MAX, Endpoint
from gradwire.transport.receiver import SMALL_BYTES, Receiver
from gradwire.transport.sender import SKIPPED, Sender
from gradwire.transport.session import State
from gradwire.transport.wire import ACK_WINDOW_RECORDS

FRAMES_MAX = 2_000


def check(endpoint: Endpoint) -> None:
    """Fail if the counts of an endpoint do not add up, or if it holds more than its limits allow."""
    stats = endpoint.stats()
    assert stats.send_log_bytes <= endpoint.limits.send_log_bytes
    # Complete messages of peers that are gone do not wait for their share: at most what had been granted as credit.
    assert 0 <= stats.receive_queue_bytes <= 2 * endpoint.limits.receive_bytes
    sessions = set(endpoint.sessions)
    assert len(endpoint.sessions.half_open) <= HALF_OPEN_MAX
    assert len(endpoint.discovery.by_address) <= SEEDS_MAX
    assert len(sessions) <= HALF_OPEN_MAX + SEEDS_MAX
    assert set(endpoint.sessions.by_stream.values()) <= sessions
    assert set(endpoint.sessions.by_node.values()) <= sessions
    assert set(endpoint.sessions.half_open.values()) <= sessions
    queued = sum(max(len(message.payload), SMALL_BYTES) for message in endpoint.messages)
    for session in sessions:
        assert len(session.control.frames) <= FRAMES_MAX
        if session.receiver is not None:
            queued += check_receiver(session.receiver)
        if session.is_established and session.state is not State.CLOSING:
            check_sender(session.sender)
            assert session.sender.cursor <= endpoint.log.head
    assert stats.receive_queue_bytes == queued, "the budget is what assembly and queue hold"


def check_receiver(receiver: Receiver) -> int:
    """Check the receiving side of one session; return the bytes of the message in assembly."""
    assert len(receiver._partials) <= ACK_WINDOW_RECORDS
    assert len(receiver._complete) <= 2 * ACK_WINDOW_RECORDS
    assert all(receiver.cumulative <= record < receiver.limit for record in receiver._partials)
    for record, found in receiver._complete.items():
        assert receiver._consumed <= record
        assert isinstance(found, int) or record < receiver.limit, "accepted without credit"
    assembly = receiver._assembly
    return 0 if assembly is None else max(len(assembly.payload), SMALL_BYTES)


def check_sender(sender: Sender) -> None:
    """Check that each fragment of an open record is acknowledged, waiting, or in flight."""
    in_flight = 0
    for flight in sender._flights.values():
        assert flight.record is SKIPPED or flight.number < sender.limit, "sent without credit"
        under_way = 0
        for sent in flight.sent:
            assert not under_way & sent.mask, "a fragment is in flight twice"
            under_way |= sent.mask
            in_flight += flight.record.bytes_of(sent.mask)
        assert flight.acked | flight.to_send | under_way == flight.record.full, (
            "a fragment is forgotten"
        )
        assert bool(flight.to_send) == (flight.number in sender._waiting)
    assert set(sender._waiting) <= set(sender._flights)
    assert sender.rate.bytes_in_flight == in_flight, "sent = acknowledged + lost + in flight"
