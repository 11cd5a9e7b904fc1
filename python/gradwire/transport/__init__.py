"""Messages between nodes over UDP: whole, once, in order, authenticated, and bounded in memory.

The layers, from the bottom: `wire` (bytes), `crypto` (keys), `records` (sealed and framed pieces of messages),
`round_trips`, `overflow` and `recovery` (how long answers take, how much queues hold, how fast to send), `outbound` and
`inbound` (one direction of one peer), `session` (one peer, all states), `endpoint` (one node without a socket),
`driver` (the socket and the clock), `node` (the public face).
"""

from __future__ import annotations

from .coalesce import Backlogged
from .model import (
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
from .node import Node
from .secret import generate_secret, parse_secret

__all__ = [
    "Backlogged",
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
