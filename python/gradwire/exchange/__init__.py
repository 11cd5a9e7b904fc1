"""One update in, everybody's updates out: the codec and the transport meet here and nowhere else.

The rooms, from the bottom: `groups` (which encoder serves which tensor), `prepare` (clipping, momentum, warm-up),
`sums` (how messages are added), `replica` (the shared parameters), `model` (what has to be the same everywhere),
`roster` (who takes part), `greetings`, `beginning`, `going` and `members` (how they come and go), `snapshot` (the state
on its way to a newcomer), `entrance` (coming in late), `comparison` (whether replicas are the same), `handover`
(waiting), `step` (one step in its order), `exchange` (what a trainer embeds), `local` (workers of one machine).
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
