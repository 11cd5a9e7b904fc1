"""What the exchange tells its caller: of one step, of joining, and of everything so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..transport import Peer

__all__ = ["ExchangeStats", "Joined", "StepResult", "Totals"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step sent, received and applied, and the time each took.

    Attributes:
        step: number of the step; the same on every node in synchronous mode.
        sent_bytes: size of this node's message; the transport carries it once to each peer.
        density: changed elements of this node's messages / numel.
        threshold: the threshold of this node's message, of the first group where there are several; 0.0 if dense.
        is_shakeup: whether this node's message was a shake-up.
        received: messages of peers that were applied.
        received_bytes: their size.
        applied: all messages applied, this node's included.
        ignored: messages from nodes that are not members of this exchange, since the step before.
        lost: members that went down, left or were left behind since the step before.
        joined: members that came in since the step before.
        is_exact: whether the sum of the messages is provably free of rounding, so that any order gives the same bits;
            always False without ``exact=True``.
        is_local: whether this was a local step, which sends nothing (``every``).
        staleness: steps that this node is ahead of the slowest member it knows of; 0 in synchronous mode.
        ratio: float32 bytes of the update / ``sent_bytes``; 0.0 for a local step.
        encode_s: time to encode this node's message.
        wait_s: time to hand it over and to have everybody else's.
        apply_s: time to add all of them to the parameters.
    """

    step: int
    sent_bytes: int
    density: float
    threshold: float
    is_shakeup: bool
    received: int
    received_bytes: int
    applied: int
    ignored: int
    lost: tuple[Peer, ...]
    is_exact: bool
    encode_s: float
    wait_s: float
    apply_s: float
    joined: tuple[Peer, ...] = ()
    is_local: bool = False
    staleness: int = 0
    ratio: float = 0.0

    @staticmethod
    def nothing(step: int, *, is_local: bool) -> StepResult:
        """Return the result of a call that finishes no step: a local one, or the first with ``overlap``."""
        return StepResult(
            step=step,
            sent_bytes=0,
            density=0.0,
            threshold=0.0,
            is_shakeup=False,
            received=0,
            received_bytes=0,
            applied=0,
            ignored=0,
            lost=(),
            is_exact=False,
            encode_s=0.0,
            wait_s=0.0,
            apply_s=0.0,
            is_local=is_local,
        )


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How a node came in.

    Attributes:
        step: number of its first step.
        is_late: whether the parameters came from a peer because training had begun.
        members: the other members.
    """

    step: int
    is_late: bool
    members: tuple[Peer, ...]


@dataclass(frozen=True, kw_only=True)
class ExchangeStats:
    """Totals since the exchange was made, and the last step's values.

    Attributes:
        steps: steps finished that sent a message.
        local_steps: steps that sent none.
        sent_bytes: size of this node's messages.
        received_bytes: size of the peers' messages that were applied.
        received: their number.
        ignored: messages from nodes that are no members.
        lost: members that went.
        joined: members that came.
        ratio: float32 bytes of all updates / ``sent_bytes``; 0.0 before the first.
        density: of the last message.
        threshold: of the last message.
        staleness: of the last step.
        members: other members now.
        digests: times that all members' replicas were compared and found the same.
        residual_norm: Euclidean norm of what was not sent yet, at this moment; NaN where nobody went over it.
        encode_s: time spent encoding.
        wait_s: time spent waiting for room and for the others.
        apply_s: time spent adding to the parameters.
    """

    steps: int
    local_steps: int
    sent_bytes: int
    received_bytes: int
    received: int
    ignored: int
    lost: int
    joined: int
    ratio: float
    density: float
    threshold: float
    staleness: int
    members: int
    digests: int
    residual_norm: float
    encode_s: float
    wait_s: float
    apply_s: float


class Totals:
    """The running totals of which a frozen `ExchangeStats` is made when somebody asks."""

    def __init__(self) -> None:
        self.steps = self.local_steps = 0
        self.sent_bytes = self.received_bytes = self.received = 0
        self.ignored = self.lost = self.joined = 0
        self.encode_s = self.wait_s = self.apply_s = 0.0
        self.last: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Add one finished step."""
        if result.is_local:
            self.local_steps += 1
            return
        self.steps += 1
        self.sent_bytes += result.sent_bytes
        self.received_bytes += result.received_bytes
        self.received += result.received
        self.ignored += result.ignored
        self.lost += len(result.lost)
        self.joined += len(result.joined)
        self.encode_s += result.encode_s
        self.wait_s += result.wait_s
        self.apply_s += result.apply_s
        self.last = result

    def stats(self, *, numel: int, members: int, digests: int) -> ExchangeStats:
        """Return the totals as they are, without the residual's norm."""
        last = self.last
        return ExchangeStats(
            steps=self.steps,
            local_steps=self.local_steps,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            received=self.received,
            ignored=self.ignored,
            lost=self.lost,
            joined=self.joined,
            ratio=4 * numel * self.steps / self.sent_bytes if self.sent_bytes else 0.0,
            density=last.density if last else 0.0,
            threshold=last.threshold if last else 0.0,
            staleness=last.staleness if last else 0,
            members=members,
            digests=digests,
            residual_norm=math.nan,
            encode_s=self.encode_s,
            wait_s=self.wait_s,
            apply_s=self.apply_s,
        )
