"""The steps: encode, hand over, wait, apply."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from ..errors import NonFiniteUpdate, TooLarge, WouldBlock
from ..message import Message, apply
from . import checkpoint, clock
from .comparison import Comparison
from .control import VERSION, Phase
from .entrance import Entrance
from .groups import Codec, Groups, density_of
from .members import POLL_S, Members
from .model import Model
from .optimizer_state import average_optimizer, optimizer_messages
from .options import Options
from .prepare import Preparation, Preparer, Warmup
from .progress import Own, Progress
from .replica import Replica
from .results import ExchangeStats, Joined, StepResult, Totals
from .sums import ExactSum, PlainSum
from .views import copies, described, writable_views

if TYPE_CHECKING:
    from ..codec import Encoder
    from ..transport import Node, Peer

__all__ = ["Exchange"]

_LOG = logging.getLogger(__name__)

# Without room to send, acknowledgements are what is waited for, and those come within a round trip.
_ROOM_POLL_S = 0.001

# Room asked for before encoding: what the message may need at most, but no more than this, so that the ceiling of a
# huge update does not ask for more than any node has.
_ROOM_BYTES_MAX = 16 << 20

# Updates that every node keeps after they are applied: a member may be one step ahead of another.
_KEEPS = 3

MESSAGE_VERSION = 1  # of docs/message-format.md


class _LeftBehind(Exception):
    """The others have gone on without this node, in the middle of a step."""


class Exchange:
    """Adds everybody's updates to the parameters, step by step: the same bits on every node.

    ``step(update, params)`` encodes the update, publishes the message, and adds the members' messages, this node's own
    included, to the parameters. What an encoder holds back stays in its residual.

    **Modes.** ``"sync"``: a step waits for the message that every live member published for the same step, and adds all
    of them in the order of the node ids; nodes that start with the same parameters and members keep identical ones, bit
    for bit. ``"async"``: a step adds what has arrived and waits for nobody, unless this node is more than
    ``max_staleness`` steps ahead of the slowest member. With ``every=H`` the first H - 1 steps of H change only this
    node's parameters; what all H have changed is then the update.

    **Members.** The nodes connected when the first step begins, or at ``wait_for_peers``. Give ``peers`` so that every
    node waits for the same number; without it a node waits for as many as it was told the addresses of. A member that
    goes down is dropped and the others go on; what arrived of it is still applied.

    **Back-pressure.** A step first waits for room, and receives meanwhile; only then it encodes. An encoded message is
    kept until it is handed over. So nothing is dropped and nothing is encoded twice.

    **Interruption.** A step that was interrupted after encoding, by ``TimeoutError`` or ``KeyboardInterrupt``, has
    taken its update; the next call finishes it before it begins its own.

    One exchange serves one node and one thread.

    Args:
        enc: one encoder, or `Groups` of them; their ``step`` numbers the steps, so all nodes begin with the same one.
        node: the node; the exchange takes all its messages.
        peers: number of other nodes to wait for before the first step; None: as many as the node was told of.
        scale: ``params += scale * (sum of all messages)``; a power of two keeps sums exact.
        average: divide by the number of nodes, this one included; None: only in plain parameter averaging.
        exact: keep the sum of all messages in float64, apart from the initial parameters, and scale it once: replicas
            that have the same messages then hold the same bits in whatever order those came. ``StepResult.is_exact``
            says whether that is certain. Costs 12 to 16 bytes per element and a few more passes; ``params`` belongs to
            the exchange then.
        dense: the same as ``codec="dense"``.
        timeout_s: the longest wait of one step, and for the peers before the first.
        mode: "sync" or "async".
        max_staleness: steps that an asynchronous node may be ahead of the slowest member.
        every: local steps between exchanges, local SGD: the update is the difference of the parameters.
        codec: "threshold"; "dense" sends every update whole, as float values: a baseline, and for links so fast that
            coding does not pay; "bfloat16" sends it rounded, and the rest stays in the residual. Whole updates with
            ``every`` > 1 are plain parameter averaging.
        average_optimizer: replace the arrays of ``optimizer_state`` by their mean over the nodes at every exchange.
        apply_residual: let the caller's parameters hold this node's residual besides the sum of all messages: what it
            has not sent yet acts at home at once, so its gradients are not computed at parameters that are older than
            its own updates. Training then takes about as many steps as without compression (docs/algorithm.md). The
            parameters of the nodes differ by their residuals; `shared` returns those that are the same everywhere.
        on_straggler: what a synchronous step does when a connected member sends nothing for ``timeout_s``: "raise"
            `TimeoutError`, and the next call goes on with it.
        warmup: the first steps send more.
        momentum: local momentum correction; the update must then come without momentum.
        factor_masking: take the momentum from elements that were sent.
        clip_norm: largest Euclidean norm of one node's update; more is scaled down before it is accumulated.
        digest_s: seconds between comparisons of the replicas, more where they would cost more than one part in 50 of
            the time; 0: never. Asynchronous replicas are compared only where they are exact.
        on_step: called with every `StepResult` of a step that sent something.

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
        enc: Encoder | Groups,
        node: Node,
        *,
        peers: int | None = None,
        scale: float = 1.0,
        average: bool | None = None,
        exact: bool = False,
        dense: bool = False,
        timeout_s: float = 60.0,
        mode: Literal["sync", "async"] = "sync",
        max_staleness: int = 8,
        every: int = 1,
        codec: Codec = "threshold",
        average_optimizer: bool = False,
        apply_residual: bool = False,
        on_straggler: Literal["raise", "drop"] = "raise",
        warmup: Warmup | None = None,
        momentum: float = 0.0,
        factor_masking: bool = True,
        clip_norm: float | None = None,
        digest_s: float = 2.0,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        self._options = Options(
            peers=peers,
            scale=scale,
            average=average,
            exact=exact,
            codec="dense" if dense and codec == "threshold" else codec,
            timeout_s=timeout_s,
            mode=mode,
            max_staleness=max_staleness,
            every=every,
            average_optimizer=average_optimizer,
            apply_residual=apply_residual,
            on_straggler=on_straggler,
            digest_s=digest_s,
            on_step=on_step,
            preparation=Preparation(warmup, momentum, factor_masking, clip_norm),
        )
        self._groups = Groups.around(enc)
        self._node = node
        self._preparer = Preparer(self._options.preparation, self._groups)
        self._replica = Replica(
            ExactSum(self._groups) if exact else PlainSum(self._groups),
            self._groups,
            applies_residual=apply_residual,
        )
        first_step = max(encoder.step for encoder in self._groups.encoders)
        keeps = _KEEPS if mode == "sync" else 2 * max_staleness + _KEEPS
        self._progress = Progress(first_step, keeps)
        self._members = Members(
            node,
            self._groups,
            self._model(),
            step=first_step,
            is_sync=mode == "sync",
            keeps=keeps,
        )
        self._comparison = Comparison(
            node.peer, self._options, self._members, self._replica, self._progress
        )
        self._entrance = Entrance(
            node,
            self._options,
            self._groups,
            self._members,
            self._replica,
            self._comparison,
            self._progress,
        )
        self._optimizer_state: Sequence[Any] = ()  # of the last step, for newcomers
        self._room_bytes = min(self._groups.max_payload_bytes(self._options.codec), _ROOM_BYTES_MAX)
        self._totals = Totals()

    # ---- who is there ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Peer, ...]:
        """The members besides this node, by node id, without those that were lost; empty before the first step."""
        return self._members.peers

    @property
    def next_step(self) -> int:
        """Number of the next step."""
        return self._progress.step

    @property
    def is_next_local(self) -> bool:
        """Whether the next step sends nothing and leaves the parameters as they are (``every``)."""
        is_settled = self._progress.own is None and self._members.phase is Phase.IN
        return is_settled and self._replica.local_steps + 1 < self._options.every

    @property
    def has_local_steps(self) -> bool:
        """Whether local steps were taken since the last exchange (``every``)."""
        return self._replica.local_steps > 0

    @property
    def stats(self) -> ExchangeStats:
        """Totals so far; passes once over the residual for its norm."""
        return self._totals.stats(
            numel=self._groups.numel,
            members=len(self.members),
            residual_norm=self._groups.residual_norm(),
            digests=self._comparison.agreed,
        )

    def shared(self, params: Any) -> list[NDArray[Any]]:
        """Return a copy of the parameters that all nodes share: without local steps, without the residual.

        Args:
            params: as in ``step``; not modified.
        """
        return copies(self._replica.anchor or writable_views(params))

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """Wait until the peers are connected and ready, and make them the members; the first step does so otherwise.

        Where training has begun without this node there are none yet: ``join`` or the first step takes it in.

        Raises:
            TimeoutError: fewer than ``peers`` were there after ``timeout_s``.
            Mismatch: the others train something else, or begin at another step.
        """
        if not self._members.has_begun:
            expected = self._options.peers
            if expected is None:
                expected = max(len(self._node.seeds), len(self._node.peers))
            self._members.next_step = self._progress.step
            self._members.begin(expected, self._options.timeout_s)
            if not expected and self._options.peers is None:
                _LOG.warning("no peer is connected, this node goes on alone: give peers= to wait")
        return self.members

    def join(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """Come in before training: the members are known afterwards, and local steps may begin.

        A node that comes late, or again after a restart, takes the parameters, the number of the step and the
        optimiser's state from a member while the others go on; it then misses no update and applies none twice.

        Args:
            params: as in ``step``; overwritten where training has begun. A copy of them is kept for ``step_moved``.
            optimizer_state: float32 or float64 arrays; overwritten like ``params``.

        Raises:
            TimeoutError: as ``wait_for_peers``, or no member gave a snapshot within ``timeout_s``.
            Mismatch: as ``wait_for_peers``, or the parameters have other shapes or dtypes.
        """
        writable_views(optimizer_state)  # refused now rather than in the middle of training
        self._replica.take_anchor(params)
        self._replica.restore(params)
        self._members.tell_params(described(params))
        self.wait_for_peers()
        is_late = self._members.phase is not Phase.IN
        self._entrance.come_in(params, optimizer_state)
        return Joined(step=self._progress.step, is_late=is_late, members=self.members)

    def resync(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """Take parameters, step and optimiser's state from a member anew: after `Diverged`, or after a long pause.

        What was not sent yet stays in the residual. The others go on meanwhile.

        Args, Raises: as ``join``.
        """
        if self._members.phase is Phase.IN:
            self._members.come_in_again("resync")
        return self.join(params, optimizer_state)

    def leave(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Send everything that is left in the residual as this node's last update; the others go on without it.

        Close the node afterwards; another exchange on it may come in again.

        Args, Raises: as ``step``.
        """
        self._begin(params, optimizer_state)
        result = self._exchange(None, params, optimizer_state, flushes=True)
        self._members.announce(Phase.LEAVING)
        deadline_s = clock.now_s() + self._options.timeout_s
        while not self._members.flush() and clock.now_s() < deadline_s:
            self._poll(_ROOM_POLL_S)
        return result

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, update: Any, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Send this node's update and add everybody's to the parameters.

        Args:
            update: what this node's step wants to add, as ``Encoder.encode`` takes it; not modified. A list of arrays,
                one for each tensor, where there are groups. None: it is in the residuals already.
            params: float32 or float64, as ``apply`` takes it; modified in place. They do not hold the update yet.
            optimizer_state: float32 or float64 arrays, for ``average_optimizer``; modified in place then.

        Raises:
            NonFiniteUpdate: as ``Encoder.encode``; the step has not begun, the others wait for it.
            WouldBlock: there was no room to send, or this node was too far ahead of another, for ``timeout_s``; the
                update was not taken.
            TimeoutError: a connected member sent no message for this step within ``timeout_s``, or there was no room
                for the message after all. The update was taken; the next call finishes the step.
            MessageError: a member sent bytes that are no message, or one of another step or size; ``params`` is as
                it was.
            TooLarge: the message is larger than the node's limit; all of it is back in the residual.
            Closed: the node has been closed.
            Diverged: the step is done, and it turned out that most others hold other parameters; see ``resync``.
        """
        self._begin(params, optimizer_state)
        if self._options.every > 1:
            if update is None:
                raise ValueError("local steps need the update; it cannot be in the residual")
            self._replica.take_anchor(params)
            self._replica.add_local(update, params)
            return self._local_step(params, optimizer_state)
        if self._options.apply_residual:
            self._replica.take_anchor(params)
        else:
            self._replica.drop_anchor()
        return self._exchange(update, params, optimizer_state)

    def step_moved(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Like ``step``, after the caller's optimiser has moved ``params``: what it has added is the update.

        Args:
            params: host arrays, float32 or float64; the shared parameters afterwards. In a local step as they are.
            optimizer_state: as in ``step``.

        Raises:
            ValueError: there was no ``join(params)`` before they were moved.
            NonFiniteUpdate: as ``step``; ``params`` is without what was added.
            WouldBlock, TimeoutError, MessageError, TooLarge, Closed: as ``step``.
        """
        if not self._replica.anchor:
            raise ValueError(
                "nothing is known of the parameters before they were moved: call join(params) first"
            )
        self._begin(params, optimizer_state)
        return self._local_step(params, optimizer_state)

    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """Add what has arrived, in asynchronous mode, without sending anything: before an evaluation, say.

        Args:
            params: as in ``step``.
            timeout_s: the longest wait for something to arrive.

        Returns:
            The number of messages that were added.

        Raises:
            ValueError: in synchronous mode, where steps have no place in between.
            MessageError, Closed: as ``step``.
        """
        if self._options.is_sync:
            raise ValueError("synchronous replicas change only in a step")
        self._tell_params(params)
        self.wait_for_peers()
        self._entrance.come_in(params, self._optimizer_state)
        self._poll(timeout_s)
        arrived = [messages for _, messages in self._members.take_all()]
        if arrived:
            scale = self._options.scale_for(len(self.members) + 1)
            self._replica.apply(arrived, params, scale, has_moved=True)
        self._entrance.serve(params, self._optimizer_state)
        self._comparison.take_part(params)
        return len(arrived)

    def _begin(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Do what has to be done before a step can begin."""
        self._tell_params(params)
        self._check_host(params, optimizer_state)
        self.wait_for_peers()
        self._optimizer_state = optimizer_state
        self._entrance.come_in(params, optimizer_state)
        if self._progress.own is None:
            return
        try:
            self._finish(self._progress.own, params, optimizer_state, has_moved=True)
        except _LeftBehind:
            self._entrance.come_in(params, optimizer_state)

    def _tell_params(self, params: Any) -> None:
        """Let the others know what the parameters are like, once."""
        if not self._members.knows_params:
            self._members.tell_params(described(params))

    def _check_host(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Refuse what is not in this machine's memory where it has to be, before anything is encoded."""
        if self._options.exact:
            writable_views(params)
        if self._options.average_optimizer:
            writable_views(optimizer_state)
        if self._options.apply_residual:
            self._groups.residuals(writable_views(params))

    def _local_step(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult:
        replica = self._replica
        replica.local_steps += 1
        if replica.local_steps < self._options.every:
            result = StepResult.local(self._progress.step)
            self._totals.add(result)
            return result
        try:
            return self._exchange(replica.moved(params), params, optimizer_state)
        except NonFiniteUpdate:
            replica.go_back(params)
            raise

    def _exchange(
        self,
        update: Any,
        params: Any,
        optimizer_state: Sequence[Any],
        *,
        flushes: bool = False,
    ) -> StepResult:
        """Send the update, from the room for it to the parameters that hold it."""
        self._wait_for_room(params, optimizer_state)
        begin_s = clock.now_s()
        if flushes:
            messages = self._groups.flush()
        else:
            codec = self._preparer.begin(self._progress.step, self._options.codec)
            messages = self._groups.encode(self._preparer.update(update), codec)
            self._preparer.mask(messages)
        self._progress.own = self._packed(messages, optimizer_state, clock.now_s() - begin_s)
        self._replica.go_back(params)
        while True:
            try:
                return self._finish(self._progress.own, params, optimizer_state)
            except _LeftBehind:
                # The others went on without this update: it is in the residual again, for the step at which they take
                # this node in.
                self._entrance.come_in(params, optimizer_state)
            codec = self._options.codec
            messages = self._groups.flush() if flushes else self._groups.encode(None, codec)
            self._progress.own = self._packed(messages, optimizer_state, 0.0)

    def _packed(
        self, messages: list[Message], optimizer_state: Sequence[Any], encode_s: float
    ) -> Own:
        if self._options.average_optimizer:
            messages += optimizer_messages(optimizer_state)
        payload = messages[0] if len(messages) == 1 else b"".join(map(bytes, messages))
        return Own(self._progress.step, messages, payload, encode_s)

    def _wait_for_room(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Go on receiving until the node has room for one more message and no member is too far behind."""
        deadline_s = clock.now_s() + self._options.timeout_s
        while True:
            if self._members.phase is Phase.JOINING:
                self._entrance.come_in(params, optimizer_state)
            what = self._obstacle()
            if what is None:
                return
            if clock.now_s() >= deadline_s:
                raise WouldBlock(
                    f"step {self._progress.step} cannot begin within {self._options.timeout_s:g} s: {what}; "
                    "the update was not taken"
                )
            self._poll(_ROOM_POLL_S)

    def _obstacle(self) -> str | None:
        """Return what keeps this node from sending one more update, None if nothing does."""
        if not self._node.has_room(self._room_bytes):
            return "no room to send it: a peer does not take its messages"
        if self._options.is_sync:
            return None
        if self._staleness() > self._options.max_staleness:
            return f"this node is {self._staleness()} steps ahead of another"
        oldest = self._progress.oldest
        if oldest is not None and oldest.ticket is not None and not oldest.ticket.is_done:
            return f"a peer has not got step {oldest.step} yet"
        return None

    def _poll(self, timeout_s: float) -> None:
        self._entrance.pump()
        self._members.poll(timeout_s, self._progress.step)

    def _staleness(self) -> int:
        slowest = self._members.slowest
        return 0 if slowest is None else max(0, self._progress.step - slowest)

    def _finish(
        self, own: Own, params: Any, optimizer_state: Sequence[Any], *, has_moved: bool = False
    ) -> StepResult:
        """Hand over the pending message, wait for the others' and apply all of them."""
        begin_s = clock.now_s()
        try:
            self._swap(own)
        except TooLarge:
            self._replica.put_back(own.messages, params)
            raise
        swapped_s = clock.now_s()
        contributors, others = self._taken(own)
        is_exact = self._apply(others, own, params, optimizer_state, has_moved=has_moved)
        if self._options.is_sync:
            self._members.finish_step(own.step, contributors)
        first = own.messages[0]
        result = StepResult(
            step=self._progress.step,
            sent_bytes=own.nbytes,
            density=density_of(own.messages[: len(self._groups)]),
            threshold=first.threshold,
            is_shakeup=first.is_shakeup,
            received=len(others),
            received_bytes=sum(one.nbytes for _, messages in others for one in messages),
            applied=len(others) + 1,
            ignored=self._members.ignored,
            lost=tuple(self._members.lost),
            joined=tuple(self._members.joined),
            is_exact=is_exact,
            encode_s=own.encode_s,
            wait_s=swapped_s - begin_s,
            apply_s=clock.now_s() - swapped_s,
            staleness=0 if self._options.is_sync else self._staleness(),
            ratio=4 * self._groups.numel / own.nbytes,
        )
        self._progress.own = None
        self._progress.sent.append(own)
        self._progress.step += 1
        self._members.lost, self._members.joined, self._members.ignored = [], [], 0
        self._totals.add(result)
        self._entrance.serve(params, optimizer_state)
        if self._options.on_step is not None:
            self._options.on_step(result)
        self._comparison.take_part(params)
        return result

    def _swap(self, own: Own) -> None:
        """Return when the own message is handed over and, in synchronous mode, every live member's is here."""
        deadline_s = clock.now_s() + self._options.timeout_s
        has_dropped = self._options.on_straggler == "raise"
        poll_s = 0.0
        while True:
            self._hand_over(own)
            self._poll(poll_s)
            if self._members.phase is Phase.JOINING:
                raise _LeftBehind
            missing = self._members.missing(own.step) if self._options.is_sync else frozenset()
            if own.is_handed_over and not missing:
                return
            if clock.now_s() >= deadline_s:
                if has_dropped:
                    raise self._timed_out(own, missing)
                has_dropped = True
                deadline_s = clock.now_s() + self._options.timeout_s
                silent = [peer for peer in missing if peer not in self._members.agreement]
                self._members.suspect(silent, "sends nothing: the others go on without it")
            poll_s = POLL_S if own.is_handed_over else _ROOM_POLL_S

    def _hand_over(self, own: Own) -> None:
        """Publish the own message unless that is done; without room it stays for the next try."""
        if own.is_handed_over:
            return
        if self._members.next_step <= own.step:
            self._members.send_note(own.step, *self._comparison.to_say(own.step))
        if not self._members.flush():
            return
        try:
            own.ticket = self._node.publish(own.payload, tag=own.step)
        except WouldBlock:
            return
        except TooLarge:
            self._progress.own = None
            self._members.next_step = own.step
            raise
        own.is_handed_over = True

    def _timed_out(self, own: Own, missing: frozenset[Peer]) -> TimeoutError:
        if not own.is_handed_over:
            what = "no room to send it: a peer does not take its messages"
        else:
            names = ", ".join(peer.address for peer in sorted(missing))
            what = f"no message from {names}, though connected"
        return TimeoutError(
            f"step {own.step} is not finished after {self._options.timeout_s:g} s: {what}; "
            "the next call goes on with it"
        )

    # ---- the parameters ----------------------------------------------------------------------------------------------

    def _taken(self, own: Own) -> tuple[list[Peer], list[tuple[Peer, list[Message]]]]:
        """Take the messages to apply from the members: return who sent them, and what."""
        taken = (
            self._members.take_step(own.step) if self._options.is_sync else self._members.take_all()
        )
        return [peer for peer, _ in taken], taken

    def _apply(
        self,
        others: list[tuple[Peer, list[Message]]],
        own: Own,
        params: Any,
        optimizer_state: Sequence[Any],
        *,
        has_moved: bool,
    ) -> bool:
        """Add all messages by node id, the own ones at their place; return whether that was provably exact."""
        in_order = sorted([*others, (self._node.peer, own.messages)], key=lambda one: one[0])
        payloads = [messages for _, messages in in_order]
        if self._options.average_optimizer:
            average_optimizer(payloads, len(self._groups), optimizer_state)
        count = len(payloads) if self._options.is_sync else len(self.members) + 1
        return self._replica.apply(
            payloads, params, self._options.scale_for(count), has_moved=has_moved
        )

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that the next step depends on but the parameters and the other nodes.

        Every worker keeps its own. Resumed by nodes with the same ids (``Node(node_id=...)``), synchronous training
        goes on bit for bit. A message that is encoded but not finished is put back, so nothing is lost with it.
        """
        encoders = [encoder.state_dict() for encoder in self._groups.encoders]
        if self._progress.own is not None:
            for encoder, message in zip(encoders, self._progress.own.messages, strict=False):
                apply(message, encoder["residual"])
        total = self._replica.total
        return {
            "format": checkpoint.FORMAT,
            "step": self._progress.step,
            "encoders": encoders,
            "velocity": copies(self._preparer.velocity),
            "anchor": copies(self._replica.anchor),
            "local_steps": self._replica.local_steps,
            "exact": total.state_dict() if isinstance(total, ExactSum) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, before the first step.

        Raises:
            ValueError: it is of another format, model or kind of exchange.
            RuntimeError: this exchange has begun.
        """
        checkpoint.check_format(state)
        if self._members.has_begun:
            raise RuntimeError("this exchange has begun: load the state into a new one")
        if len(state["encoders"]) != len(self._groups):
            raise ValueError(
                f"state has {len(state['encoders'])} groups, this exchange {len(self._groups)}"
            )
        total = self._replica.total
        if isinstance(total, ExactSum) != (state["exact"] is not None):
            raise ValueError("one of state and exchange is exact, the other is not")
        for encoder, one in zip(self._groups.encoders, state["encoders"], strict=True):
            encoder.load_state_dict(one)
        if isinstance(total, ExactSum):
            total.load_state_dict(state["exact"])
        self._preparer.velocity = copies(state["velocity"])
        self._replica.anchor = copies(state["anchor"])
        self._replica.local_steps = state["local_steps"]
        self._progress.step = state["step"]

    def _model(self) -> Model:
        """Return everything that has to be the same on all nodes."""
        options = self._options
        return Model(
            {
                "versions": [VERSION, MESSAGE_VERSION],
                "groups": [[one.key, one.numel, one.dtype] for one in self._groups.encoders],
                "mode": options.mode,
                "every": options.every,
                "scale": options.scale,
                "average": options.is_average,
                "exact": options.exact,
                "average_optimizer": options.average_optimizer,
            }
        )

    def rescale(self, factor: float) -> None:
        """Multiply what was not sent yet, and the momentum, by ``factor``: after a change of learning rate, say.

        Residuals are in the units of the updates: where the next updates are ``factor`` times as large for the same
        gradient, what is left of the earlier ones has to follow.

        Raises:
            ValueError: ``factor`` is not finite, or the residual acts in the parameters already (``apply_residual``).
        """
        if not math.isfinite(factor):
            raise ValueError(f"factor is {factor}, must be finite")
        if self._options.apply_residual:
            raise ValueError(
                "with apply_residual the parameters hold the residual: nothing is left to rescale"
            )
        self._groups.rescale(factor)
        for velocity in self._preparer.velocity:
            velocity *= velocity.dtype.type(factor)
