"""What holds inside an endpoint at every moment, whatever the network and the peers do."""

from __future__ import annotations

from gradwire.transport.endpoint import Endpoint
from gradwire.transport.inbound import SKIPS_MAX, Inbound
from gradwire.transport.membership import HALF_OPEN_MAX, SEEDS_MAX
from gradwire.transport.outbound import Outbound
from gradwire.transport.session import State
from gradwire.transport.wire import ACK_WINDOW_RECORDS

FRAMES_MAX = 2_000


def check(endpoint: Endpoint) -> None:
    """Fail if the books of an endpoint do not add up, or if it holds more than its limits allow."""
    stats = endpoint.stats()
    assert stats.send_log_bytes <= endpoint.limits.send_log_bytes
    assert 0 <= stats.receive_queue_bytes <= endpoint.limits.receive_bytes
    sessions = set(endpoint.sessions.values())
    assert len(endpoint.doorway.half_open) <= HALF_OPEN_MAX
    assert len(list(endpoint.membership)) <= SEEDS_MAX
    assert len(sessions) <= HALF_OPEN_MAX + SEEDS_MAX
    assert set(endpoint.intake.by_stream.values()) <= sessions
    assert set(endpoint.by_node.values()) <= sessions
    assert set(endpoint.doorway.half_open.values()) <= sessions
    queued = sum(len(message.payload) for message in endpoint._messages)
    for session in sessions:
        assert len(session._frames) <= FRAMES_MAX
        if session.inbound is not None:
            queued += check_inbound(session.inbound)
        if session.outbound is not None and session.state is not State.CLOSING:
            check_outbound(session.outbound)
            assert session.outbound.cursor <= endpoint.log.head
    assert stats.receive_queue_bytes == queued, "the budget is what assembly and queue hold"


def check_inbound(inbound: Inbound) -> int:
    """Check one peer's way in; return the bytes of the message in assembly."""
    assert len(inbound._partials) + len(inbound._complete) <= ACK_WINDOW_RECORDS
    assert len(inbound._skips) <= 2 * SKIPS_MAX
    assert len(inbound._keys) <= 2
    end = inbound.cumulative
    for record, partial in sorted(inbound._partials.items()):
        assert end <= record, "incomplete records overlap"
        end = record + partial.span
        assert end <= inbound.limit
    for record, (_, span) in inbound._complete.items():
        assert inbound._consumed <= record
        assert record + span <= inbound.limit
    return 0 if inbound._assembly is None else len(inbound._assembly.payload)


def check_outbound(outbound: Outbound) -> None:
    """Check one peer's way out: each fragment of an open record is acknowledged, waiting, or in flight."""
    in_flight = 0
    last = max((flight.number for flight in outbound._flights.values()), default=-1)
    for record, _, _ in outbound._wholes:
        assert last < record.number, "what was sent whole comes after what was not"
        last = record.number
        assert record.number + record.span <= outbound.limit, "sent without credit"
        in_flight += record.nbytes
    for flight in outbound._flights.values():
        under_way = 0
        if flight.record is not None:
            assert flight.number + flight.span <= outbound.limit, "sent without credit"
        for sent in flight.sent:
            assert not under_way & sent.mask, "a fragment is in flight twice"
            under_way |= sent.mask
            in_flight += flight.bytes_of(sent.mask)
        to_come = flight.full & ~flight.ever if flight is outbound._partly_carried else 0
        accounted = flight.acked | flight.to_send | under_way | to_come
        assert accounted == flight.full, "a fragment is forgotten"
        assert bool(flight.to_send) == (flight.number in outbound._waiting)
    assert set(outbound._waiting) <= set(outbound._flights)
    assert outbound.rate.bytes_in_flight == in_flight, "sent = acknowledged + lost + in flight"
