"""What a node has counted, and the state of its paths, at one moment."""

from __future__ import annotations

from collections.abc import Mapping

from .fanout import Fanout
from .inbound import ReceiveBudget
from .model import Counters, Stats
from .records import SendLog
from .session import Session, State


def take_stock(
    counters: Counters,
    sessions: Mapping[int, Session],
    fanout: Fanout,
    log: SendLog,
    budget: ReceiveBudget,
) -> Stats:
    """Return a snapshot of the counters and of each path."""
    totals = Counters()
    for name in Counters.__slots__:
        setattr(totals, name, getattr(counters, name))
    for session in sessions.values():
        add_counters(totals, session)
    paths = tuple(
        session.stats(session.outbound, fanout.way_to(session.identity.id))
        for session in sessions.values()
        if session.state is State.UP and session.outbound is not None
    )
    known = [path.srtt_s for path in paths if path.srtt_s > 0.0]
    return Stats(
        **{name: getattr(totals, name) for name in Counters.__slots__},
        send_log_bytes=log.used_bytes,
        receive_queue_bytes=budget.used_bytes,
        srtt_s=sum(known) / len(known) if known else 0.0,
        peers=paths,
    )


def add_counters(totals: Counters, session: Session) -> None:
    """Add what one session has counted."""
    if session.outbound is not None:
        totals.retransmitted_bytes += session.outbound.retransmitted_bytes
        totals.retransmitted_fragments += session.outbound.retransmitted_fragments
        totals.lost_bytes += session.outbound.lost_bytes
    if session.inbound is not None:
        totals.duplicate_fragments += session.inbound.duplicate_fragments
        totals.rejected_records += session.inbound.rejected_records
