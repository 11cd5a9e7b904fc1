"""One update in, everybody's updates out: the codec and the transport meet here and nowhere else.

The rooms, from the bottom: `model` (what has to be the same everywhere), `groups` (which encoder serves which tensor),
`prepare` (clipping, momentum, warm-up), `sums` (how messages are added), `replica` (the shared parameters), `members`
(who takes part), `snapshot` (the state on its way to a newcomer), `entrance` (coming in late), `comparison` (whether
replicas are the same), `exchange` (the steps), `local` (workers of one machine).
"""

from __future__ import annotations

from .checkpoint import redistribute
from .exchange import Exchange
from .groups import Group, Groups
from .local import LocalExchange, LocalTeam
from .metrics import prometheus_text, to_tensorboard
from .prepare import Warmup
from .results import ExchangeStats, Joined, StepResult
from .sums import is_sum_exact

__all__ = [
    "Exchange",
    "ExchangeStats",
    "Group",
    "Groups",
    "Joined",
    "LocalExchange",
    "LocalTeam",
    "StepResult",
    "Warmup",
    "is_sum_exact",
    "prometheus_text",
    "redistribute",
    "to_tensorboard",
]
