"""Messages between nodes over UDP: complete, once, in order, authenticated, and bounded in memory.

The layers, from the bottom: `wire` (bytes), `crypto` (keys), `records` (sealed pieces of messages), `congestion`
(rates), `sender` and `receiver` (the two directions of one peer), `session` (one peer, all states), `handshake` and
`discovery` (accepting and finding peers), `endpoint` (one node without a socket), `driver` (socket and clock), `node`.
"""

from __future__ import annotations

from .node import Node
from .secret import generate_secret, parse_secret
from .types import (
    Event,
    Limits,
    Peer,
    PeerJoined,
    PeerLost,
    PeerStats,
    Received,
    SocketStats,
    Stats,
    Ticket,
)

__all__ = [
    "Event",
    "Limits",
    "Node",
    "Peer",
    "PeerJoined",
    "PeerLost",
    "PeerStats",
    "Received",
    "SocketStats",
    "Stats",
    "Ticket",
    "generate_secret",
    "parse_secret",
]
