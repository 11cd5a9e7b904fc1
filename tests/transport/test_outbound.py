"""One peer's books: what is under way to it."""

from __future__ import annotations

import random

from gradwire.transport.crypto import SenderKey
from gradwire.transport.outbound import Outbound
from gradwire.transport.records import Outgoing, SendLog
from gradwire.transport.round_trips import RttEstimator
from gradwire.transport.sealer import Sealer
from gradwire.transport.wire import Ack

SESSION = 1


def test_what_a_peer_has_already_is_not_under_way_when_a_carrier_sends_it() -> None:
    """A relay may have given it what this node sends only now; nobody acknowledges that again."""
    log = SendLog(1 << 20)
    sealer = Sealer(SenderKey.generate(1, random.Random(1).randbytes), 99, 1_384)
    message = Outgoing(frozenset({SESSION}), 0, is_shared=True)
    record = sealer.seal(0, message, 0, 0, 10_000, 0, memoryview(bytes(10_000)))
    log.append(record)
    outbound = Outbound(log, SESSION, 0, RttEstimator())
    outbound.on_ack(Ack(0, 16, 0, 0, (), 0, False), 1.0)
    outbound.gate = 0
    outbound.carry(record, 0b11, 1.0)
    outbound.on_ack(Ack(0, 16, 0, 0, ((0, 0b111),), 0, False), 1.1)
    outbound.carry(record, 0b100, 1.2)
    assert outbound.rate.bytes_in_flight == 0
    outbound.carry(record, record.full & ~0b111, 1.3)
    assert outbound.rate.bytes_in_flight == record.bytes_of(record.full & ~0b111)
    outbound.on_ack(Ack(1, 16, 0, 0, (), 0, False), 1.4)
    assert outbound.rate.bytes_in_flight == 0
