"""Messages between nodes over UDP: complete, once, in order; ``docs/transport.md`` lists the modules and layers."""

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
