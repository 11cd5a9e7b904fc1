"""What a trainer embeds: everything that one node does, by the names that callers use."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from ..errors import NonFiniteUpdate
from . import checkpoint
from .comparison import Comparison
from .control import Phase
from .entrance import Entrance
from .groups import Codec, Groups
from .options import Options, Reduction
from .parts import Parts
from .prepare import Preparation, Warmup
from .results import ExchangeStats, Joined, StepResult
from .step import Step
from .views import copies, described, writable_views

if TYPE_CHECKING:
    from ..codec import Encoder
    from ..transport import Node, Peer

__all__ = ["Exchange"]

_LOG = logging.getLogger(__name__)


class Exchange:
    """Adds everybody's updates to the parameters, step by step: the same bits on every node.

    ``step(update, params)`` encodes the update, publishes the message, and adds the members' messages, this node's own
    included, to the parameters. What an encoder holds back stays in its residual.

    **Modes.** ``"sync"``: a step waits for the message that every live member published for the same step, and adds all
    of them in the order of the node ids; nodes that start with the same parameters and members keep identical ones, bit
    for bit. ``"async"``: a step adds what has arrived and waits for nobody, unless this node is more than
    ``max_staleness`` steps ahead of the slowest member. With ``every=H`` the first H - 1 steps of H change only this
    node's parameters; what all H have changed is then the update.

    **Members.** The nodes connected when the first step begins, or at ``wait_for_peers``. Give ``min_peers`` so that
    every node waits for the same number; without it a node waits for as many as it was told the addresses of. A member
    that goes down is dropped and the others go on; what arrived of it is still applied.

    **Back-pressure.** A step first waits for room, and receives meanwhile; only then it encodes. An encoded message is
    kept until it is handed over. So nothing is dropped and nothing is encoded twice.

    **Interruption.** A step that was interrupted after encoding, by ``TimeoutError`` or ``KeyboardInterrupt``, has
    taken its update; the next call finishes it before it begins its own.

    One exchange serves one node and one thread.

    Args:
        enc: one encoder, or `Groups` of them; their ``step`` numbers the steps, so all nodes begin with the same one.
        node: the node; the exchange takes all its messages.
        reduction: "mean": ``params += mean of the messages`` of all live nodes, this one included, as
            DistributedDataParallel averages gradients; "sum": their sum, as in Deeplearning4j.
        min_peers: number of other nodes to wait for before the first step; None: as many as the node was told of.
        exact: keep the sum of all messages in float64, apart from the initial parameters, and scale it once: replicas
            that have the same messages then hold the same bits in whatever order those came. ``StepResult.is_exact``
            says whether that is certain. Costs 12 to 16 bytes per element and a few more passes; ``params`` belongs to
            the exchange then.
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
        overlap: steps after which a step's messages are waited for and applied, while the next ones are computed: 0:
            in the same step, before it returns; 1, and up to ``every``: in that many calls later, so that what the
            network takes is hidden behind the arithmetic. All nodes still apply the same messages in the same order.
            A call then returns the result of the step that it has finished, and ``catch_up`` finishes the last one.
        outer_momentum: Nesterov's momentum of the shared parameters, as DiLoCo has it for local steps: what an exchange
            adds is added again in the next ones, times this, times its square, and so on, 1 / (1 - outer_momentum)
            times in all. For synchronous replicas in host memory; it takes one more array of the size of the parameters
            and three passes over it at every exchange.
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
        ValueError: an argument is out of range, or two contradict each other.
        TypeError: an argument of the wrong kind.

    Example:
        >>> import numpy as np, gradwire as gw
        >>> secret = bytes(range(32))
        >>> with gw.Node(bind="127.0.0.1:0", secret=secret) as node:
        ...     share = gw.Exchange(gw.Encoder(3, threshold=0.5), node, min_peers=0)
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
        reduction: Reduction = "mean",
        min_peers: int | None = None,
        exact: bool = False,
        timeout_s: float = 60.0,
        mode: Literal["sync", "async"] = "sync",
        max_staleness: int = 8,
        every: int = 1,
        codec: Codec = "threshold",
        average_optimizer: bool = False,
        apply_residual: bool = False,
        overlap: int = 0,
        outer_momentum: float = 0.0,
        on_straggler: Literal["raise", "drop"] = "raise",
        warmup: Warmup | None = None,
        momentum: float = 0.0,
        factor_masking: bool = True,
        clip_norm: float | None = None,
        digest_s: float = 2.0,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        if not hasattr(node, "publish"):
            raise TypeError(f"node must be a Node, got {node!r}")
        self._options = Options(
            reduction=reduction,
            min_peers=min_peers,
            exact=exact,
            codec=codec,
            timeout_s=timeout_s,
            mode=mode,
            max_staleness=max_staleness,
            every=every,
            average_optimizer=average_optimizer,
            apply_residual=apply_residual,
            overlap=overlap,
            outer_momentum=outer_momentum,
            on_straggler=on_straggler,
            digest_s=digest_s,
            on_step=on_step,
            preparation=Preparation(warmup, momentum, factor_masking, clip_norm),
        )
        self._parts = parts = Parts.of(node, Groups.around(enc), self._options)
        self._node, self._groups, self._roster = parts.node, parts.groups, parts.roster
        self._members, self._replica, self._progress = parts.members, parts.replica, parts.progress
        self._comparison = Comparison(parts)
        self._entrance = Entrance(parts, self._comparison)
        self._step = Step(parts, self._comparison, self._entrance)
        self._optimizer_state: Sequence[Any] = ()  # of the last step, for newcomers

    # ---- who is there ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Peer, ...]:
        """The members besides this node, by node id, without those that were lost; empty before the first step."""
        return self._roster.peers

    @property
    def _has_begun(self) -> bool:
        """Whether this node has taken part, or is on its way in."""
        return self._roster.phase is not Phase.NEW

    @property
    def next_step(self) -> int:
        """Number of the next step."""
        return self._progress.step

    @property
    def is_next_local(self) -> bool:
        """Whether the next step sends nothing and leaves the parameters as they are (``every``)."""
        is_settled = self._progress.own is None and self._roster.phase is Phase.IN
        return is_settled and self._replica.local_steps + 1 < self._options.every

    @property
    def has_local_steps(self) -> bool:
        """Whether local steps were taken since the last exchange (``every``)."""
        return self._replica.local_steps > 0

    @property
    def stats(self) -> ExchangeStats:
        """Totals so far; passes once over the residual for its norm."""
        return replace(self.counts, residual_norm=self._groups.residual_norm())

    @property
    def counts(self) -> ExchangeStats:
        """Totals so far, at once: the residual's norm is NaN."""
        return self._step.totals.stats(
            numel=self._groups.numel,
            members=len(self.members),
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
            TimeoutError: fewer than ``min_peers`` were there after ``timeout_s``.
            Mismatch: the others train something else, or begin at another step.
        """
        if not self._has_begun:
            expected = self._options.min_peers
            if expected is None:
                expected = max(len(self._node.seeds), len(self._node.peers))
            self._roster.next_step = self._progress.step
            self._members.begin(expected, self._options.timeout_s)
            if not expected and self._options.min_peers is None:
                _LOG.warning(
                    "no peer is connected, this node goes on alone: give min_peers to wait"
                )
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
            TypeError, ValueError: as ``step``.
        """
        self._groups.check_params(params)
        writable_views(optimizer_state)  # refused now rather than in the middle of training
        self._replica.take_anchor(params)
        if not self._has_begun:
            self._replica.restore(params)
        self._members.learn(self._described(params, optimizer_state))
        self.wait_for_peers()
        is_late = self._roster.phase is not Phase.IN
        self._entrance.come_in(params, optimizer_state)
        return Joined(step=self._progress.step, is_late=is_late, members=self.members)

    def resync(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """Take parameters, step and optimiser's state from a member anew: after `Diverged`, or after a long pause.

        What was not sent yet stays in the residual. The others go on meanwhile.

        Args, Raises: as ``join``.
        """
        if self._roster.phase is Phase.IN:
            self._members.come_in_again("resync")
        return self.join(params, optimizer_state)

    def leave(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Send everything that is left in the residual as this node's last update; the others go on without it.

        Close the node afterwards; another exchange on it may come in again.

        Args, Raises: as ``step``.
        """
        self._begin(params, optimizer_state)
        self._step.finish_earlier(params, optimizer_state)
        return self._step.leave(params, optimizer_state)

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
            TypeError, ValueError: the first step's parameters or an update do not fit the encoders; nothing was taken.
            Diverged: the step is done, and it turned out that most others hold other parameters; see ``resync``.
        """
        finished = self._begin(params, optimizer_state)
        if self._options.every > 1:
            if update is None:
                raise ValueError("local steps need the update; it cannot be in the residual")
            self._replica.take_anchor(params)
            self._replica.add_local(update, params)
            return self._local_step(params, optimizer_state, finished)
        if self._options.apply_residual:
            self._replica.take_anchor(params)
        else:
            self._replica.drop_anchor()
        result = self._step.run(update, params, optimizer_state)
        return result or finished or StepResult.nothing(self._progress.step, is_local=False)

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
        finished = self._begin(params, optimizer_state)
        return self._local_step(params, optimizer_state, finished)

    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """Add what is still to come, without sending anything: before an evaluation, say, or at the end.

        In asynchronous mode that is what has arrived. With ``overlap`` it is the last step, which is finished: all
        nodes have to do so after the same step, and it waits for them as a step does.

        Args:
            params: as in ``step``.
            timeout_s: the longest wait for something to arrive, in asynchronous mode.

        Returns:
            The number of messages that were added, without this node's own.

        Raises:
            ValueError: in synchronous mode without ``overlap``, where steps have no place in between.
            TimeoutError, MessageError, Closed: as ``step``.
        """
        if self._options.overlap:
            self._begin(params, self._optimizer_state)
            finished = self._step.finish_earlier(params, self._optimizer_state)
            return 0 if finished is None else finished.received
        if self._options.is_sync:
            raise ValueError("synchronous replicas change only in a step")
        self._tell_arrays(params, ())
        self.wait_for_peers()
        self._entrance.come_in(params, self._optimizer_state)
        self._step.poll(timeout_s)
        arrived = [messages for _, messages in self._members.take_all()]
        if arrived:
            scale = self._options.scale_for(len(self.members) + 1)
            self._replica.apply(arrived, params, scale, has_moved=True)
        self._entrance.serve(params, self._optimizer_state)
        self._comparison.take_part(params)
        return len(arrived)

    def _begin(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult | None:
        """Do what has to be done before a step can begin; return the result of an earlier one that is finished now."""
        self._tell_arrays(params, optimizer_state)
        self._check_host(params, optimizer_state)
        self.wait_for_peers()
        self._optimizer_state = optimizer_state
        self._entrance.come_in(params, optimizer_state)
        if self._replica.local_steps + 1 < self._options.overlap:
            return None
        return self._step.finish_earlier(params, optimizer_state)

    def _tell_arrays(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Let the others know what the parameters and the averaged state are like, once."""
        greetings = self._members.greetings
        is_averaged = self._options.average_optimizer
        if not greetings.knows("params") or (
            is_averaged and not greetings.knows("optimizer_state")
        ):
            self._groups.check_params(params)
            self._members.learn(self._described(params, optimizer_state))

    def _described(self, params: Any, optimizer_state: Sequence[Any]) -> dict[str, list[Any]]:
        found = {"params": described(params)}
        if self._options.average_optimizer and optimizer_state:
            found["optimizer_state"] = described(optimizer_state)
        return found

    def _check_host(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Refuse what is not in this machine's memory where it has to be, before anything is encoded."""
        if self._options.exact or self._options.outer_momentum:
            writable_views(params)
        if self._options.average_optimizer:
            writable_views(optimizer_state)
        if self._options.apply_residual and not self._replica.anchor:
            self._groups.residuals(writable_views(params))

    def _local_step(
        self, params: Any, optimizer_state: Sequence[Any], finished: StepResult | None
    ) -> StepResult:
        """Take a local step, or the one that sends; return the result of what is finished by now."""
        replica, step = self._replica, self._progress.step
        replica.local_steps += 1
        if replica.local_steps < self._options.every:
            local = StepResult.nothing(step, is_local=True)
            self._step.totals.add(local)
            return finished or local
        try:
            result = self._step.run(None, params, optimizer_state, has_moved=True)
        except NonFiniteUpdate:
            replica.refuse(params)
            raise
        return result or finished or StepResult.nothing(step, is_local=False)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that the next step depends on but the parameters and the other nodes.

        Every worker keeps its own. Resumed by nodes with the same ids (``Node(node_id=...)``), synchronous training
        goes on bit for bit. A message that is encoded but not finished is put back, so nothing is lost with it.
        """
        return checkpoint.state_of(self._parts, self._step.preparer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, before the first step.

        Raises:
            ValueError: it is of another format, model or kind of exchange.
            RuntimeError: this exchange has begun.
        """
        if self._has_begun:
            raise RuntimeError("this exchange has begun: load the state into a new one")
        checkpoint.load_state(state, self._parts, self._step.preparer)

    def rescale(self, factor: float) -> None:
        """Multiply what was not sent yet, and all momentum, by ``factor``: after a change of learning rate, say.

        Residuals are in the units of the updates: where the next updates are ``factor`` times as large for the same
        gradient, what is left of the earlier ones has to follow. With ``outer_momentum`` all nodes call it after the
        same step.

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
        for velocity in (*self._step.preparer.velocity, *self._replica.velocity):
            velocity *= velocity.dtype.type(factor)
