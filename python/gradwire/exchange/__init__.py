"""The exchange: one update in, all nodes' updates out. Only this package combines the codec and the transport.

Modules, from the bottom: `protocol` (what travels), `groups` (encoders of tensors), `options`, `parameters` (sums of
messages, the shared copy), `owner` (the sharded exchange), `replica` (a node's updates and their application),
`membership` (members, their updates, the router), `notes`, `departure`, `start`, `consistency` (comparisons),
`snapshot`, `join` (late), `step` (one step), `exchange` (the public class), `local` (workers of one machine).
"""

from __future__ import annotations

from .checkpoint import redistribute
from .exchange import Exchange
from .groups import Group, Groups
from .local import AnyExchange, LocalExchange, LocalTeam, hand_over, leader_of, take_over
from .metrics import MetricsCollector, log_every
from .options import ExchangeOptions
from .results import ExchangeStats, Joined, StepResult

__all__ = [
    "AnyExchange",
    "Exchange",
    "ExchangeOptions",
    "ExchangeStats",
    "Group",
    "Groups",
    "Joined",
    "LocalExchange",
    "LocalTeam",
    "MetricsCollector",
    "StepResult",
    "hand_over",
    "leader_of",
    "log_every",
    "redistribute",
    "take_over",
]
