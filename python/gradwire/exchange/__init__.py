"""The exchange: one update in, all nodes' updates out. Only this package combines the codec and the transport.

Modules, from the bottom: `protocol` (control messages), `groups` (encoders of tensors), `descent` (owners' optimisers),
`parameters` (sums of messages, the shared copy), `replica` (a node's updates, owners of parameters), `membership`
(members, their updates, routing of messages), `departure`, `consistency` (comparison of replicas), `snapshot`, `join`,
`step` (one step), `exchange` (the public class), `local` (workers of one machine).
"""

from __future__ import annotations

from .checkpoint import redistribute
from .descent import SGD, Adagrad, Adam, AdamW, Optimizer
from .exchange import Exchange
from .groups import Group, Groups
from .local import LocalExchange, LocalTeam
from .metrics import MetricsServer, log_every
from .results import ExchangeStats, Joined, StepResult

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Exchange",
    "ExchangeStats",
    "Group",
    "Groups",
    "Joined",
    "LocalExchange",
    "LocalTeam",
    "MetricsServer",
    "Optimizer",
    "StepResult",
    "log_every",
    "redistribute",
]
