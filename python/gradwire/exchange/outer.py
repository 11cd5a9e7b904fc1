"""The momentum of the shared parameters: they go on as all nodes together have moved them.

Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1;
J. Wang et al., "SlowMo: Improving communication-efficient distributed SGD with slow momentum", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..message import Message, apply_with_momentum
from .groups import Groups
from .sums import Beside
from .views import Arrays, writable_views

__all__ = ["MomentumSum"]


class MomentumSum:
    """Adds messages to the parameters with Nesterov's momentum: what was added is added again in the next steps.

    Every node does the same arithmetic with the same messages, so replicas stay identical bit for bit.

    Attributes:
        velocity: what the parameters go on by, one array for each of them; empty before the first step.
    """

    def __init__(self, groups: Groups, momentum: float) -> None:
        self._groups = groups
        self._momentum = momentum
        self.velocity: Arrays = []

    def begin(self, params: Any) -> None:
        """Begin at rest, unless there is a velocity already."""
        if not self.velocity:
            self.velocity = [np.zeros_like(one) for one in writable_views(params)]

    def add(
        self,
        payloads: Sequence[Sequence[Message]],
        params: Any,
        scale: float,
        beside: Beside | None = None,
    ) -> bool:
        """See `Sum`; nothing is proven."""
        self.begin(params)
        for index in range(len(self._groups)):
            messages = [payload[index] for payload in payloads]
            apply_with_momentum(
                messages,
                self._groups.select(params, index),
                self._groups.select(self.velocity, index),
                momentum=self._momentum,
                scale=scale,
                beside=[] if beside is None else self._groups.select(beside.params, index),
                held=[] if beside is None or beside.own is None else [messages[beside.own]],
                threads=self._groups.encoders[index].threads,
            )
        return False
