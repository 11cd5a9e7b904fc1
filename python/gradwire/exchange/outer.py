"""The momentum of the shared parameters: they go on as all nodes together have moved them.

Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1;
J. Wang et al., "SlowMo: Improving communication-efficient distributed SGD with slow momentum", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..message import Message
from .sums import PlainSum
from .views import Arrays

__all__ = ["OuterMomentum"]

# Elements that are brought up to date at a time: three blocks of float32 stay in the second-level cache.
_BLOCK = 1 << 15


class OuterMomentum:
    """Nesterov's momentum of what an exchange adds: ``v = momentum * v + added``, and ``momentum * v`` is added too.

    Every node does the same arithmetic with the same messages, so replicas stay identical bit for bit.

    Args:
        momentum: 0.0: none, and nothing is kept.
        plain: how messages are added up.

    Attributes:
        velocity: momentum * v, one array for each of the parameters; empty before the first exchange, and without
            momentum.
    """

    def __init__(self, momentum: float, plain: PlainSum) -> None:
        self.momentum = momentum
        self.velocity: Arrays = []
        self._plain = plain

    def begin(self, params: Arrays) -> None:
        """Begin at rest, unless there is a velocity already."""
        if self.momentum and not self.velocity:
            self.velocity = [np.zeros_like(one) for one in params]

    def carry_on(
        self, payloads: Sequence[Sequence[Message]], scale: float, *targets: Arrays
    ) -> None:
        """Take note of messages that were added to the parameters, and let these go on.

        Args:
            payloads: as they were added, each one message for every group.
            scale: factor of every message.
            targets: the shared parameters, and others that are to go with them.
        """
        if not self.momentum:
            return
        self.begin(targets[0])
        self._plain.add(payloads, self.velocity, scale)
        for index, velocity in enumerate(self.velocity):
            flat = velocity.reshape(-1)
            followers = [target[index].reshape(-1) for target in targets]
            factor = velocity.dtype.type(self.momentum)
            for start in range(0, flat.size, _BLOCK):
                block = slice(start, start + _BLOCK)
                flat[block] *= factor
                for follower in followers:
                    follower[block] += flat[block]
