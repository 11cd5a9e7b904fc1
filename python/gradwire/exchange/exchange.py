"""The public interface of an exchange: everything that one node's trainer calls."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from ..arrays import add, copies, views, writable_views
from ..codec import Encoder
from ..errors import NonFiniteUpdate, PeerLost
from . import checkpoint
from .consistency import Consistency
from .departure import Departure
from .groups import Group, Groups
from .join import Join
from .membership import Introductions, Membership, Router
from .metrics import Listener, Meter, metrics_snapshot, serve_snapshot
from .options import Options
from .parameters import MomentumSum, PlainSum
from .protocol import Kind, NodeRun, Phase
from .replica import Replica
from .results import ExchangeStats, Joined, StepResult
from .start import Start
from .step import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..transport import Node, Peer
    from .options import ExchangeOptions

__all__ = ["Exchange"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _by_one_thread(method: _Method) -> _Method:
    """Refuse a call while another thread is inside the exchange."""

    @functools.wraps(method)
    def guarded(self: Exchange, *args: Any, **options: Any) -> Any:
        if not self._use.acquire(blocking=False):
            raise RuntimeError(
                "another thread is using this exchange: one exchange serves one thread; threads of one machine share "
                "a LocalTeam"
            )
        try:
            return method(self, *args, **options)
        finally:
            self._use.release()

    return guarded  # type: ignore[return-value]


def _metered(take: _Method) -> _Method:
    """Measure a whole step, with the caller's time before it, and tell the listeners."""

    @functools.wraps(take)
    def metered(self: Exchange, *args: Any, **options: Any) -> StepResult:
        result = self._meter.time(functools.partial(take, self, *args, **options))
        self._meter.notify_listeners(result, self.stats)
        return result

    return metered  # type: ignore[return-value]


class Exchange:
    """Adds all nodes' updates to the parameters, step by step, so that every node holds the same bits.

    ``step(update, params)`` encodes the update, publishes the message, and adds the members' messages, this node's own
    included, to the parameters. What an encoder holds back stays in its residual. An exchange is a synchronous mesh, a
    synchronous sharded exchange, or an asynchronous mesh; docs/exchange.md says when to choose which, and explains
    joining, leaving and interruptions. One exchange serves one node and one thread.

    Args:
        enc: one encoder, or `Groups` of encoders; their ``step`` numbers the steps, so all nodes begin with the same.
        node: the exchange takes all its messages.
        options: see `ExchangeOptions`; without any, a step adds the mean of all nodes' messages of the same step.

    Attributes:
        listeners: functions of a step's result and the totals, called at the end of every step; append to the list.

    Raises:
        ValueError: an option is out of range, or two contradict each other; the text says why.
        TypeError: an argument of the wrong kind, or an unknown option.

    Example:
        >>> import numpy as np, gradwire as gw
        >>> with gw.Node(bind="127.0.0.1:0", secret=bytes(range(32))) as node:
        ...     share = gw.Exchange(gw.Encoder(3, threshold=0.5), node, min_peers=0)
        ...     params = np.zeros(3, np.float32)
        ...     result = share.step(np.array([0.75, 0.25, -0.5], np.float32), params)
        >>> params.tolist(), result.applied
        ([0.5, 0.0, -0.5], 1)
    """

    # As a `LocalExchange` has them: the place of this worker on its machine, the number of workers, how many took part
    # in the last call, and whether parameters may be on a device.
    rank = 0
    workers = 1
    present = 1
    takes_devices = True

    def __init__(
        self, enc: Encoder | Groups, node: Node, **options: Unpack[ExchangeOptions]
    ) -> None:
        if not hasattr(node, "publish"):
            raise TypeError(f"node must be a Node, got {node!r}")
        if not isinstance(enc, (Encoder, Groups)):
            raise TypeError(f"enc must be an Encoder or Groups, got {enc!r}")
        self._options = checked = Options.of(options)
        self._node = node
        self._groups = groups = enc if isinstance(enc, Groups) else Groups([Group(enc)])
        total = PlainSum(groups)
        if checked.outer_momentum:
            total = MomentumSum(groups, checked.outer_momentum)
        self._replica = replica = Replica(groups, total, node.peer, checked)
        signature = checked.signature(groups.encoders)
        introductions = Introductions(node.peer, node.names, signature, checked.role)
        self._membership = membership = Membership(
            node.peer, introductions, checked.role, step=replica.step, keeps=checked.kept_updates
        )
        router = Router(node, membership, replica.parse)
        router.handle(Kind.PART, replica.add_part)
        self._departure = Departure(membership, router, is_sync=checked.is_sync)
        every_s = (
            checked.digest_s if checked.is_sync else 0.0
        )  # asynchronous replicas are never in the same state
        self._consistency = consistency = Consistency(membership, replica, every_s)
        self._join = Join(
            checked,
            membership,
            router,
            self._departure,
            replica,
            on_load=consistency.reset,
            on_follow=consistency.add_notes,
        )
        self._start = Start(checked, membership, router, self._departure, replica, self._join.poll)
        self._step = Step(checked, replica, membership, router, self._departure, self._join)
        self._stats = ExchangeStats(codec=checked.codec)
        self._is_loaded = False
        # Reentrant, because ``resync`` calls ``join``.
        self._use = threading.RLock()
        self._optimizer_state: Sequence[Any] = ()  # of the last step, for newcomers
        self._meter = Meter(checked, groups)
        self.listeners: list[Listener] = self._meter.listeners
        if os.environ.get("GRADWIRE_TOP"):
            snapshot = weakref.WeakMethod(self.metrics_snapshot)
            serve_snapshot(self, lambda: (snapshot() or dict)())

    # ---- members and numbers -----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Peer, ...]:
        """The other members that are not lost, by node id; empty before the first step."""
        return tuple(map(self._membership.introductions.peer_of, self._membership.peers))

    @property
    def next_step(self) -> int:
        """Number of the next exchange, counted from 0: with ``every``, that of the steps that send."""
        return self._replica.step

    @property
    def is_next_local(self) -> bool:
        """Whether the next step sends nothing and leaves the parameters as they are (``every``)."""
        is_settled = self._replica.pending is None and self._membership.phase is Phase.IN
        return is_settled and self._replica.local_steps + 1 < self._options.every

    @property
    def has_local_steps(self) -> bool:
        """Whether local steps were taken since the last exchange (``every``)."""
        return self._replica.local_steps > 0

    @property
    def stats(self) -> ExchangeStats:
        """Totals so far."""
        return replace(
            self._stats,
            members=len(self._membership.peers),
            digests=self._consistency.agreed,
            step_s=self._meter.step_s,
            compute_s=self._meter.compute_s,
            is_sharded=self._replica.is_sharded,
        )

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the totals, the transport's counters and every peer's path, as JSON values; from any thread."""
        return metrics_snapshot(self._node, self._groups.encoders, self.stats, self._meter.slowest)

    def shared(self, params: Any) -> list[NDArray[Any]]:
        """Return a copy of the parameters that all nodes share: without local steps, without the residual.

        Args:
            params: as in ``step``; not modified.
        """
        return copies(self._replica.shared or writable_views(params))

    def holds(self, params: Any) -> bool:
        """Return whether ``params`` are as the last step left them, rather than overwritten since."""
        return self._replica.pending is not None or self._replica.holds(params)

    def end(self) -> NodeRun | None:
        """Tell the others that this node has finished, without sending the residual; return the node that began."""
        if self._membership.phase is Phase.IN and self._replica.pending is None:
            self._join.say_goodbye()
        return None if self._membership.phase is Phase.NEW else self._membership.origin

    def ignore(self, origins: Iterable[NodeRun]) -> None:
        """Wait for nodes that still take part in trainings which this process has finished, instead of joining them."""
        self._membership.introductions.ignore(origins)

    def place_shared(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Keep the shared copy in ``arrays`` from now on; return whether there is a copy."""
        return self._replica.place_shared(arrays)

    # ---- joining and leaving -----------------------------------------------------------------------------------------

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """Wait until the peers are connected and ready, and make them the members; the first step does so otherwise.

        Where training has begun without this node there are no members yet: ``join`` or the first step joins it.

        Raises:
            TimeoutError: fewer than ``min_peers`` appeared within ``timeout_s``.
            Mismatch: the others train something else, or begin at another step.
        """
        if self._membership.phase is Phase.NEW:
            self._start.wait_for_peers()
        return self.members

    @_by_one_thread
    def join(
        self, params: Any, optimizer_state: Sequence[Any] = (), *, equalize: bool = False
    ) -> Joined:
        """Join before training: afterwards the members are known, and local steps may begin.

        A node that comes late, or again after a restart, takes the parameters, the number of the step and the
        optimiser's state from a member while the others go on; it misses no update and applies none twice.

        Args:
            params: as in ``step``; overwritten where training has begun. The exchange keeps a copy for ``step_moved``.
            optimizer_state: float32 or float64 arrays; overwritten like ``params``.
            equalize: give all nodes the initial parameters of the one with the lowest id; on all nodes. Without, other
                initial parameters are a `Mismatch`.

        Raises:
            TimeoutError: as ``wait_for_peers``, or no member gave a snapshot within ``timeout_s``.
            Mismatch: as ``wait_for_peers``, or the parameters have other shapes or dtypes.
            TypeError, ValueError: as ``step``.
        """
        self._groups.check_params(params)
        writable_views(optimizer_state)  # refuses now rather than in the middle of training
        # Parameters of a call that was refused, or that timed out, may have been replaced since then.
        if self._membership.phase is Phase.NEW and not self._is_loaded:
            self._replica.drop_shared()  # of an earlier call, which was refused
        self._replica.copy_shared(params)
        if self._membership.phase is Phase.NEW:
            self._replica.add_loaded_residual(params)
        self._start.expect_equalized(equalize)
        self._start.announce_params(params)
        self.wait_for_peers()
        is_late = self._membership.phase is not Phase.IN
        if equalize and not is_late:
            self._join.equalize(params, optimizer_state)
        self._join.ensure_member(params, optimizer_state)
        return Joined(step=self.next_step, is_late=is_late, members=self.members)

    @_by_one_thread
    def resync(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """Take parameters, step and optimiser's state from a member again: after `Diverged`, or after a long pause.

        Unsent updates stay in the residual. The others go on meanwhile.

        Args, Raises: as ``join``.
        """
        if self._membership.phase is Phase.IN:
            self._departure.rejoin("resync")
        return self.join(params, optimizer_state)

    @_by_one_thread
    def leave(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Send residual and local steps as this node's last update; the others go on without this node.

        Close the node afterwards; another exchange on the node may join again. A second call does nothing.

        Args, Raises: as ``step``.
        """
        if self._membership.phase is Phase.LEAVING:
            return StepResult(step=self.next_step)
        self._begin(params, optimizer_state)
        self._finish_earlier(params, optimizer_state)
        result = self._step.leave(params, optimizer_state)
        self._count(result)
        return result

    # ---- steps -------------------------------------------------------------------------------------------------------

    @_by_one_thread
    @_metered
    def step(self, update: Any, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Send this node's update and add all members' to the parameters.

        With ``overlap`` return the result of the earlier step that this call finishes.

        Args:
            update: addition to the parameters, as ``Encoder.encode`` takes it; not modified. With groups a list of
                arrays, one for each tensor. None: the residuals hold the update already.
            params: float32 or float64, as ``apply`` takes it; modified in place. Without the update.
            optimizer_state: float32 or float64 arrays, given to nodes that join late.

        Raises:
            NonFiniteUpdate: as ``Encoder.encode``; the step has not begun, the others wait for it.
            WouldBlock: there was no space to send, or this node was too far ahead of another, for ``timeout_s``; the
                update was not taken.
            TimeoutError: a connected member sent no message for this step within ``timeout_s``, or there was no space
                for the message after all. The update was taken; the next call finishes the step.
            MessageError: a member sent bytes that are no message, or a message of another step or size; ``params`` is
                unchanged.
            TooLarge: the message is larger than the node's limit, and back in the residual.
            Closed: the node has been closed.
            TypeError, ValueError: the first step's parameters or an update do not fit the encoders; nothing was taken.
            Diverged: the step is done, and most others turned out to hold other parameters; see ``resync``.
        """
        finished = self._begin(params, optimizer_state)
        # Local steps change the parameters at once, so the update of the exchange is what the parameters have moved by.
        if self._options.every > 1:
            if update is None:
                raise ValueError("local steps need the update; it cannot be in the residual")
            self._replica.copy_shared(params)
            add(writable_views(params), views(update))
            return self._local_step(params, optimizer_state, finished)
        if self._options.apply_residual:
            self._replica.copy_shared(params)
        elif self._replica.shared:
            self._replica.drop_shared()
        result = self._step.take_step(update, params, optimizer_state)
        self._end_step(result, params, optimizer_state)
        return result or finished or StepResult(step=self.next_step)

    @_by_one_thread
    @_metered
    def step_moved(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """Like ``step``, after the caller's optimiser has moved ``params``: the movement is the update.

        Args:
            params: float32 or float64 arrays in host memory, or torch's tensors; afterwards the shared parameters.
                Unchanged by a local step.
            optimizer_state: as in ``step``.

        Raises:
            ValueError: there was no ``join(params)`` before the parameters were moved.
            NonFiniteUpdate: as ``step``; ``params`` is without the movement.
            WouldBlock, TimeoutError, MessageError, TooLarge, Closed, Diverged: as ``step``.
        """
        if not self._replica.shared:
            raise ValueError(
                "nothing is known of the parameters before they were moved: call join(params) first"
            )
        finished = self._begin(params, optimizer_state)
        return self._local_step(params, optimizer_state, finished)

    @_by_one_thread
    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """Add the messages that are still to come, without sending any: before an evaluation, or at the end.

        In asynchronous mode these are the messages that have arrived. With ``overlap`` the last step is finished: all
        nodes have to do so after the same step, and the call waits for them as a step does. Otherwise there are none.

        Args:
            params: as in ``step``.
            timeout_s: longest wait for a message to arrive, in asynchronous mode.

        Returns:
            The number of messages that were added, without this node's own.

        Raises:
            TimeoutError, MessageError, Closed: as ``step``.
        """
        if self._options.overlap:
            self._begin(params, self._optimizer_state)
            finished = self._finish_earlier(params, self._optimizer_state)
            return 0 if finished is None else finished.received
        if self._options.is_sync:
            return 0
        self._start.ensure_announced(params)
        self.wait_for_peers()
        self._join.ensure_member(params, self._optimizer_state)
        self._join.poll(timeout_s)
        payloads = [messages for _, messages in self._membership.take_updates()]
        self._departure.remove_departed()
        if payloads:
            nodes = len(self._membership.peers) + 1
            self._replica.apply(payloads, params, nodes=nodes, has_moved=True)
        self._join.serve(params, self._optimizer_state)
        return len(payloads)

    @_by_one_thread
    def follow(
        self, params: Any, optimizer_state: Sequence[Any] = (), *, timeout_s: float = 0.0
    ) -> int:
        """Follow the members' steps without an update, as an observer: for an evaluation, or for live weights.

        Args:
            params: as in ``step``.
            optimizer_state: as in ``join``.
            timeout_s: longest wait for a step.

        Returns:
            The number of steps, or in asynchronous mode of messages, that were added.

        Raises:
            ValueError: this node's role has updates.
            TimeoutError, MessageError, Mismatch, Closed: as ``step``.
        """
        if self._options.role != "observer":
            raise ValueError(f'role="{self._options.role}" has updates to share: call step')
        self._start.ensure_announced(params)
        self.wait_for_peers()
        return self._join.observe(params, optimizer_state, timeout_s)

    def _begin(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult | None:
        """Prepare a step; return the result of an earlier one if that is finished now."""
        if self._options.role == "observer":
            raise ValueError('role="observer" has no updates of its own: call follow')
        self._start.ensure_announced(params)
        members = len(self._membership.peers) + 1
        least = self._options.min_members
        if self._membership.phase is Phase.IN and members < least:
            gone = self._membership.introductions.describe_departed()
            why = gone or "the run began with no more"
            raise PeerLost(f"{members} of at least {least} members are left: {why}")
        if self._options.outer_momentum:
            writable_views(params)  # refuses unusable arrays before anything is encoded
        if self._options.apply_residual and not self._replica.shared:
            self._groups.residuals(writable_views(params))
        if self._membership.phase is Phase.NEW:
            self.wait_for_peers()
        # Newcomers may ask inside a later call that has no such argument, as ``catch_up``.
        self._optimizer_state = optimizer_state
        if self._membership.phase is not Phase.IN:
            self._join.ensure_member(params, optimizer_state)
        # An overlapped step is finished as late as allowed, so that its messages have the longest time to arrive.
        if self._replica.local_steps + 1 < self._options.overlap:
            return None
        return self._finish_earlier(params, optimizer_state)

    def _local_step(
        self, params: Any, optimizer_state: Sequence[Any], finished: StepResult | None
    ) -> StepResult:
        """Take a local step, or the one that sends; return the result of the step that is finished by now."""
        replica = self._replica
        if replica.count_local_step() < self._options.every:
            local = StepResult(step=replica.step, is_local=True)
            self._count(local)
            return finished or local
        try:
            result = self._step.take_step(None, params, optimizer_state, has_moved=True)
        except NonFiniteUpdate:
            # The caller's optimiser has moved the parameters already; they must not stay NaN.
            replica.reject(params)
            raise
        self._end_step(result, params, optimizer_state)
        return result or finished or StepResult(step=self.next_step)

    def _finish_earlier(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult | None:
        if self._replica.pending is None:
            return None
        finished = self._step.finish_earlier(params, optimizer_state)
        self._end_step(finished, params, optimizer_state)
        return finished

    def _end_step(
        self, result: StepResult | None, params: Any, optimizer_state: Sequence[Any]
    ) -> None:
        """Count a finished step, serve newcomers, and take part in the comparison of replicas."""
        if result is not None:
            self._count(result)
            self._join.serve(params, optimizer_state)
            self._consistency.compare(params)

    def _count(self, result: StepResult) -> None:
        self._stats = self._stats.plus(result, update_bytes=4 * self._groups.numel)

    # ---- state -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        options = self._options
        return (
            f"<gradwire.Exchange of {self._groups.numel:,} parameters, {options.mode}, {options.reduction}, "
            f"{len(self.members)} other members, step {self.next_step}>"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that the next step depends on but the parameters and the other nodes.

        Every worker keeps its own. Resumed by nodes with the same ids (``Node(node_id=...)``), synchronous training
        goes on bit for bit. The message of an unfinished step is put back into the residual, so nothing is lost.
        """
        return checkpoint.state_of(self._replica)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, before the first step.

        Raises:
            ValueError: the state is of another format, model or kind of exchange.
            RuntimeError: this exchange has begun.
        """
        if self._membership.phase is not Phase.NEW:
            raise RuntimeError("this exchange has begun: load the state into a new one")
        checkpoint.load_state(state, self._replica)
        self._membership.restart_at(self._replica.step)  # introductions name it
        self._is_loaded = True
