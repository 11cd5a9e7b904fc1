"""The results of a step and of joining, the totals of all steps, and their pace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import clock
from ..transport import Peer

__all__ = ["ExchangeStats", "Joined", "Pace", "StepResult"]

_SUMS = (
    "sent_bytes",
    "received_bytes",
    "received",
    "ignored",
    "lost_elements",
    "shortened",
    "encode_s",
    "wait_s",
    "apply_s",
)


class Pace:
    """How far a node's exchanges are apart, which introductions tell.

    Attributes:
        longest_s: the longest time between two of them, where older ones count less.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s: float | None = None
        self._marker: object = None

    @property
    def present_s(self) -> float:
        """The longest time, where that since the last exchange counts as well."""
        since_s = 0.0 if self._last_s is None else clock.now_s() - self._last_s
        return max(self.longest_s, since_s)

    def note(self) -> None:
        """Note an event."""
        time_s = clock.now_s()
        if self._last_s is not None:
            self.longest_s = max(time_s - self._last_s, self.longest_s / 2)
        self._last_s = time_s

    def watch(self, marker: object) -> None:
        """Note an event if a value is another than before."""
        if marker != self._marker:
            self._marker = marker
            self.note()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Messages, members and times of one step.

    Attributes:
        step: number of the exchange, which is that of the step but with local steps (``every``); the same on every node
            in synchronous mode.
        sent_bytes: size of this node's message; the transport carries the message once to each peer.
        density: changed elements of this node's messages / numel.
        threshold: threshold of this node's message, of the first group where there are several; 0.0 if dense.
        is_shakeup: whether this node's message was a shake-up.
        received: messages of peers that were applied.
        received_bytes: size of those messages.
        applied: all messages applied, this node's included.
        ignored: messages from nodes that are not members of this exchange, since the step before.
        lost: members that went down, left or were left behind since the step before.
        joined: members that joined since the step before.
        lost_elements: elements whose owner was gone in this step (sharded exchange). The owner's residual is missing,
            unless the owner comes back; the parts sent to the owner are in the residuals of their senders again.
        shortened: 1 if this node's update was far longer than the others', and was shortened (``limit_outliers``).
        is_local: whether this was a local step, which sends nothing (``every``).
        staleness: steps that this node is ahead of the slowest member; 0 in synchronous mode.
        ratio: float32 bytes of the update / ``sent_bytes``; 0.0 for a local step.
        encode_s: time to encode this node's message.
        wait_s: time to get space for the message, to hand it over, and to receive the others'.
        apply_s: time to add all messages to the parameters.
        slowest: the peer whose message came last; None if all messages came before this node handed over its own. In
            asynchronous mode the member for which this node, ``max_staleness`` steps ahead, has waited.
        step_s: time of the whole step, from the end of the previous call to the end of this call.
        compute_s: the caller's part of ``step_s``, between the two calls; 0.0 in the first step.
    """

    step: int
    sent_bytes: int = 0
    density: float = 0.0
    threshold: float = 0.0
    is_shakeup: bool = False
    received: int = 0
    received_bytes: int = 0
    applied: int = 0
    ignored: int = 0
    lost: tuple[Peer, ...] = ()
    joined: tuple[Peer, ...] = ()
    lost_elements: int = 0
    shortened: int = 0
    is_local: bool = False
    staleness: int = 0
    ratio: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0
    slowest: Peer | None = None
    step_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The outcome of joining.

    Attributes:
        step: number of this node's first step.
        is_late: whether the parameters came from a peer because training had begun.
        members: the other members.
        is_replaced: whether a peer's parameters were others, and have taken the place of this node's.
    """

    step: int
    is_late: bool
    members: tuple[Peer, ...]
    is_replaced: bool = False


@dataclass(frozen=True, kw_only=True)
class ExchangeStats:
    """Totals since the exchange was made, and values of the last step.

    Attributes:
        steps: finished steps that sent a message.
        local_steps: steps that sent none.
        update_bytes: size of all updates as float32.
        sent_bytes: size of this node's messages.
        received_bytes: size of the peers' messages that were applied.
        received: number of those messages.
        ignored: messages from nodes that are not members.
        lost: members that went.
        joined: members that came.
        lost_elements: elements whose owner was gone, counted each time (sharded exchange).
        shortened: updates of this node that were far longer than the others', and were shortened.
        density: density of the last message.
        threshold: threshold of the last message.
        staleness: staleness of the last step.
        step_number: number of the training's next step, see `Exchange.step_number`.
        members: number of other members now; 0 after this node's last step.
        digests: comparisons of all members' replicas that found no difference.
        encode_s: time spent encoding.
        wait_s: time spent handing over messages and waiting for the messages of the others.
        apply_s: time spent adding to the parameters.
        step_s: time of all steps, local steps and the caller's part included.
        compute_s: the caller's part, between the calls of ``step``.
        codec: codec in use.
        is_sharded: whether parameters have owners.
    """

    steps: int = 0
    local_steps: int = 0
    update_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    received: int = 0
    ignored: int = 0
    lost: int = 0
    joined: int = 0
    lost_elements: int = 0
    shortened: int = 0
    density: float = 0.0
    threshold: float = 0.0
    staleness: int = 0
    step_number: int = 0
    members: int = 0
    digests: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0
    step_s: float = 0.0
    compute_s: float = 0.0
    codec: str = "threshold"
    is_sharded: bool = False

    @property
    def share(self) -> float:
        """The share of the time that the exchange took, waiting included; 0.0 before the first step."""
        return 1.0 - self.compute_s / self.step_s if self.step_s else 0.0

    @property
    def ratio(self) -> float:
        """Float32 bytes of all updates / ``sent_bytes``; 0.0 before the first step."""
        return self.update_bytes / self.sent_bytes if self.sent_bytes else 0.0

    def plus(self, result: StepResult, update_bytes: int) -> ExchangeStats:
        """Return the totals with one more step, whose update has ``update_bytes``."""
        if result.is_local:
            return replace(self, local_steps=self.local_steps + 1)
        sums = {name: getattr(self, name) + getattr(result, name) for name in _SUMS}
        return replace(
            self,
            steps=self.steps + 1,
            update_bytes=self.update_bytes + update_bytes,
            lost=self.lost + len(result.lost),
            joined=self.joined + len(result.joined),
            density=result.density,
            threshold=result.threshold,
            staleness=result.staleness,
            **sums,
        )
