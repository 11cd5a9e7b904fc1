"""One update in, everybody's updates out: the codec and the transport meet here and nowhere else."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import MessageError, TooLarge, WouldBlock
from .message import Message, apply, apply_many, dense_message, max_message_bytes

if TYPE_CHECKING:
    from .codec import Encoder
    from .transport import Node, Peer

__all__ = ["Exchange", "StepResult"]

_LOG = logging.getLogger(__name__)

# How long one wait for messages lasts before the loop looks at the peers and the clock again; without room to send,
# acknowledgements are what is waited for, and those come within a round trip.
_POLL_S = 0.05
_ROOM_POLL_S = 0.001

# Room asked for before encoding: what the message may need at most, but no more than this, so that the ceiling of a
# huge update does not ask for more than any node has.
_ROOM_BYTES_MAX = 16 << 20

# A peer needs this node's message of a step before it can begin the next: it is never more than one step ahead.
_STEPS_AHEAD_MAX = 1

_FLOAT64_BITS = 53
_THRESHOLD_BITS = 8


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step sent, received and applied, and the time each took.

    Attributes:
        step: number of the step, the same on every node.
        sent_bytes: size of this node's message; the transport carries it once to each peer.
        density: changed elements of this node's message / numel.
        threshold: the threshold of this node's message; 0.0 if it was dense.
        is_shakeup: whether this node's message was a shake-up.
        received: messages of peers that were applied.
        received_bytes: their size.
        applied: all messages applied, this node's included.
        ignored: messages from nodes that are not members of this exchange, since the step before.
        lost: members that went down before they had sent a message for this step.
        is_exact: whether the sum of the messages is provably free of rounding, so that any order gives the same bits;
            always False without ``exact=True``.
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


@dataclass
class _Own:
    """This node's message of the step that is not finished yet: encoded once, handed over once."""

    message: Message
    encode_s: float
    is_handed_over: bool = False


class Exchange:
    """Adds everybody's updates to the parameters, step by step, the same bits on every node.

    ``step(update, params)`` encodes the update, publishes the message, waits for the message that every live member
    published for the same step, and adds all of them, this node's own included, in the order of the node ids. What an
    encoder holds back stays in its residual. Nodes that start with the same parameters and the same members keep
    identical parameters, bit for bit.

    **Members.** The nodes connected when the first step begins, or at ``wait_for_peers``. Give ``peers`` so that every
    node waits for the same number; without it a node waits for as many as it was told the addresses of. A member that
    goes down is dropped and the others go on; what arrived of it is still applied. If it died in the middle of
    publishing, some may have its last message and others not: they then differ by that one message. It does not come
    back, and neither do late comers come in: begin again from a checkpoint.

    **Back-pressure.** A step first waits for room, and receives meanwhile; only then it encodes. An encoded message is
    kept until it is handed over. So nothing is dropped and nothing is encoded twice, and the others, who wait for
    this node's message anyway, wait as long.

    **Interruption.** A step that was interrupted after encoding, by ``TimeoutError`` or ``KeyboardInterrupt``, has
    taken its update; the next call finishes it before it begins its own.

    One exchange serves one encoder, one node and one thread.

    Args:
        enc: the encoder; its ``step`` numbers the steps, so all nodes begin with the same one.
        node: the node; the exchange takes all its messages.
        peers: number of other nodes to wait for before the first step; None: as many as the node was told of.
        scale: ``params += scale * (sum of all messages)``; a power of two keeps sums exact.
        average: divide by the number of messages of the step, this node's included.
        exact: add up in float64 and scale once; the result then does not depend on the order, and
            ``StepResult.is_exact`` says whether that was so. Costs 16 bytes per element and a few more passes.
        dense: send every update whole, as float values: a baseline, and for links so fast that coding does not pay.
        timeout_s: the longest wait of one step, and for the peers before the first.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import numpy as np, gradwire as gw
        >>> secret = bytes(range(32))
        >>> with gw.Node(bind="127.0.0.1:0", secret=secret) as node:
        ...     share = gw.Exchange(gw.Encoder(3, threshold=0.5), node, peers=0)
        ...     params = np.zeros(3, np.float32)
        ...     result = share.step(np.array([0.75, 0.25, -0.5], np.float32), params)
        >>> params.tolist(), result.applied
        ([0.5, 0.0, -0.5], 1)
    """

    def __init__(
        self,
        enc: Encoder,
        node: Node,
        *,
        peers: int | None = None,
        scale: float = 1.0,
        average: bool = False,
        exact: bool = False,
        dense: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if peers is not None and peers < 0:
            raise ValueError(f"peers is {peers}, must be 0 or more")
        if not math.isfinite(scale):
            raise ValueError(f"scale is {scale}, must be finite")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, must be positive")
        self._enc = enc
        self._node = node
        self._expected_peers = peers
        self._scale = scale
        self._average = average
        self._exact = exact
        self._dense = dense
        self._timeout_s = timeout_s
        numel, dtype = enc.numel, str(enc.residual.dtype)
        self._room_bytes = min(max_message_bytes(numel, dense, dtype), _ROOM_BYTES_MAX)
        self._step = enc.step
        self._members: frozenset[Peer] | None = None
        self._lost: list[Peer] = []
        self._ignored = 0
        self._inbox: dict[int, dict[Peer, Message]] = {}
        self._own: _Own | None = None
        self._sum: NDArray[np.float64] | None = None

    @property
    def members(self) -> tuple[Peer, ...]:
        """The members besides this node, by node id, without those that were lost; empty before the first step."""
        return tuple(sorted(self._members or ()))

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """Wait until the peers are connected and make them the members; the first step does so if nobody else did.

        Raises:
            TimeoutError: fewer than ``peers`` were connected after ``timeout_s``.
        """
        if self._members is None:
            expected = self._expected_peers
            if expected is None:
                expected = len(self._node.seeds)
            connected = self._node.wait_for_peers(expected, self._timeout_s)
            self._members = frozenset(connected)
            _LOG.info("exchange of %d nodes begins at step %d", len(connected) + 1, self._step)
            if not connected and self._expected_peers is None:
                _LOG.warning("no peer is connected, this node goes on alone: give peers= to wait")
        return self.members

    def step(self, update: Any, params: Any) -> StepResult:
        """Send this node's update and add everybody's to the parameters.

        Args:
            update: what this node's step wants to add, as ``Encoder.encode`` takes it; not modified.
            params: float32 or float64, as ``apply`` takes it; modified in place.

        Raises:
            NonFiniteUpdate: as ``Encoder.encode``; the step has not begun, the others wait for it.
            WouldBlock: there was no room to send within ``timeout_s``; the update was not taken.
            TimeoutError: a connected member sent no message for this step within ``timeout_s``, or there was no room
                for the message after all. The update was taken; the next call finishes the step.
            MessageError: a member sent bytes that are no message, or one of another step or size; ``params`` is as
                it was.
            TooLarge: the message is larger than the node's limit; all of it is back in the residual.
            Closed: the node has been closed.
        """
        self.wait_for_peers()
        if self._own is not None:
            self._finish(self._own, params)
        self._wait_for_room()
        begin_s = time.perf_counter()
        message = self._enc.encode(update, dense=self._dense)
        self._own = _Own(message, time.perf_counter() - begin_s)
        return self._finish(self._own, params)

    def _wait_for_room(self) -> None:
        """Go on receiving until the node has room for one more message."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self._node.has_room(self._room_bytes):
            if time.monotonic() >= deadline_s:
                raise WouldBlock(
                    f"no room to send step {self._step} within {self._timeout_s:g} s: a peer does "
                    "not take its messages; the update was not taken"
                )
            self._update_members(_ROOM_POLL_S)

    def _finish(self, own: _Own, params: Any) -> StepResult:
        """Hand over the pending message, wait for the others' and apply all of them."""
        begin_s = time.perf_counter()
        self._swap(own)
        swapped_s = time.perf_counter()
        messages = self._in_order(own)
        is_exact = self._apply(messages, params)
        message = own.message
        result = StepResult(
            step=self._step,
            sent_bytes=message.nbytes,
            density=message.density,
            threshold=message.threshold,
            is_shakeup=message.is_shakeup,
            received=len(messages) - 1,
            received_bytes=sum(one.nbytes for one in messages) - message.nbytes,
            applied=len(messages),
            ignored=self._ignored,
            lost=tuple(self._lost),
            is_exact=is_exact,
            encode_s=own.encode_s,
            wait_s=swapped_s - begin_s,
            apply_s=time.perf_counter() - swapped_s,
        )
        self._inbox.pop(self._step, None)
        self._own = None
        self._step += 1
        self._lost = []
        self._ignored = 0
        return result

    def _swap(self, own: _Own) -> None:
        """Return when the own message is handed over and every live member's message of this step is here."""
        deadline_s = time.monotonic() + self._timeout_s
        poll_s = 0.0
        while True:
            self._hand_over(own)
            missing = self._update_members(poll_s)
            if own.is_handed_over and not missing:
                return
            if time.monotonic() >= deadline_s:
                raise self._timed_out(own, missing)
            poll_s = _POLL_S if own.is_handed_over else _ROOM_POLL_S

    def _hand_over(self, own: _Own) -> None:
        """Publish the own message unless that is done; without room it stays for the next try."""
        if own.is_handed_over:
            return
        try:
            self._node.publish(own.message, tag=self._step)
        except WouldBlock:
            return
        except TooLarge:
            apply(own.message, self._enc.residual)
            self._own = None
            raise
        own.is_handed_over = True

    def _update_members(self, timeout_s: float) -> frozenset[Peer]:
        """Receive, drop members that went down without a message for this step, return whom to wait for."""
        # Look who is connected before receiving: what a peer sent before it went down is then still taken.
        connected = frozenset(self._node.peers)
        self._receive(timeout_s)
        members = self._members or frozenset()
        missing = members - self._inbox.get(self._step, {}).keys()
        gone = missing - connected
        if gone:
            self._lost += sorted(gone)
            self._members = members - gone
            names = ", ".join(peer.address for peer in sorted(gone))
            _LOG.warning(
                "step %d: lost %s; %d nodes go on", self._step, names, len(members - gone) + 1
            )
        return missing - gone

    def _timed_out(self, own: _Own, missing: frozenset[Peer]) -> TimeoutError:
        if not own.is_handed_over:
            what = "no room to send it: a peer does not take its messages"
        else:
            names = ", ".join(peer.address for peer in sorted(missing))
            what = f"no message from {names}, though connected"
        return TimeoutError(
            f"step {self._step} is not finished after {self._timeout_s:g} s: {what}; the next call goes on with it"
        )

    def _receive(self, timeout_s: float) -> None:
        """Put what has arrived into the inbox, waiting up to ``timeout_s`` for the first."""
        for peer, step, payload in self._node.receive(timeout_s=timeout_s):
            if peer not in (self._members or ()):
                self._ignored += 1
                _LOG.warning("step %d from %s ignored: it is not a member", step, peer.address)
            else:
                self._check_step(peer, step)
                self._inbox.setdefault(step, {})[peer] = self._parse(peer, step, payload)

    def _check_step(self, peer: Peer, step: int) -> None:
        is_near = self._step <= step <= self._step + _STEPS_AHEAD_MAX
        if not is_near or peer in self._inbox.get(step, {}):
            raise MessageError(
                f"{peer.address} sent step {step} while this node is at step {self._step}: begin "
                "with the same checkpoint on all nodes"
            )

    def _parse(self, peer: Peer, step: int, payload: memoryview) -> Message:
        try:
            message = Message.parse(payload)
        except MessageError as error:
            raise MessageError(f"step {step} from {peer.address}: {error}") from error
        if message.numel != self._enc.numel:
            raise MessageError(
                f"step {step} from {peer.address} has {message.numel} elements, this node's updates "
                f"have {self._enc.numel}"
            )
        return message

    def _in_order(self, own: _Own) -> list[Message]:
        """Return all messages of the step by node id, the own one at its place."""
        by_id = {peer.id: message for peer, message in self._inbox.get(self._step, {}).items()}
        by_id[self._node.peer.id] = own.message
        return [by_id[node_id] for node_id in sorted(by_id)]

    def _apply(self, messages: list[Message], params: Any) -> bool:
        """Add the messages to ``params``; return whether that was provably exact."""
        scale = self._scale / len(messages) if self._average else self._scale
        if not self._exact:
            apply_many(messages, params, scale)
            return False
        if self._sum is None:
            self._sum = np.empty(self._enc.numel, np.float64)
        self._sum.fill(0.0)
        apply_many(messages, self._sum)
        apply(dense_message(self._sum), params, scale)
        return is_sum_exact(messages)


def is_sum_exact(messages: list[Message]) -> bool:
    """Return whether adding up these messages in float64 rounds nowhere, in any order.

    Every threshold is a multiple of its last significant bit; sums of such multiples are exact while they need no more
    than float64's 53 bits above the smallest of those bits. Dense messages hold arbitrary values, so nothing is proven.
    """
    thresholds = [message.threshold for message in messages if message.count]
    if any(message.kind == "dense" for message in messages):
        return False
    if not thresholds:
        return True
    last_bit = math.ldexp(1.0, math.frexp(min(thresholds))[1] - _THRESHOLD_BITS)
    return math.fsum(thresholds) <= math.ldexp(last_bit, _FLOAT64_BITS)
