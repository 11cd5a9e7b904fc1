"""The public interface of an exchange: everything that one node's trainer calls."""

from __future__ import annotations

import functools
import logging
import reprlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from ..agreement import Agreement
from ..arrays import check_order, copies, writable_views
from ..codec import Encoder
from ..errors import NonFiniteUpdate, NotCopied
from ..slices import slice_bytes_of
from ..state import check_node, check_seconds
from . import checkpoint
from .consistency import Consistency
from .departure import Departure, Trainings
from .groups import Group, Groups, physical_bytes
from .join import Join, check_members, held_back
from .membership import STEPS_AHEAD_MAX, Membership, Router
from .metrics import Listener, Meter, metrics_snapshot, serve_snapshot
from .notes import Notes
from .options import Options
from .parameters import MomentumSum, PlainSum
from .protocol import Introductions, Kind, NodeRun, Phase
from .replica import Replica, check_params
from .results import ExchangeStats, Joined, StepResult
from .snapshot import NO_STATE, FixedState, NodeState, OptimizerState, as_state
from .start import Start, wait_until_all_finish
from .step import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..transport import Node, Peer
    from .options import ExchangeOptions

__all__ = ["Exchange", "check_state", "hand_over", "one_at_a_time", "take_over"]

_LOG = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])


_wait_s = functools.partial(check_seconds, "timeout_s", least=0.0)


def one_at_a_time(method: _Method) -> _Method:
    """Refuse a call of an exchange while another one runs, of another thread or one that a signal has interrupted.

    Ctrl-C comes where the call waits for others, or after it.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        with held_back():
            use = self.__dict__.setdefault("_use", threading.Lock())
            if not use.acquire(blocking=False):
                raise RuntimeError(
                    "this exchange is in the middle of another call: one exchange serves one thread, and threads of "
                    "one machine share a LocalTeam; a signal's handler sets a flag, to act on after the step"
                )
            try:
                return method(self, *args, **options)
            finally:
                use.release()

    return guarded  # type: ignore[return-value]


def _metered(take: _Method) -> _Method:
    """Measure a whole step, with the caller's time before it, and tell the listeners."""

    @functools.wraps(take)
    def metered(self: Exchange, *args: Any, **options: Any) -> StepResult:
        try:
            result = self._meter.time(functools.partial(take, self, *args, **options))
        except NonFiniteUpdate:
            raise  # what has become of the parameters is remembered
        except BaseException:
            # An open step leaves them as they were, and what the caller has written is still to be noticed. Otherwise
            # the parameters may be anything in between.
            if self._replica.pending is None:
                self._replica.forget()
            raise
        self._meter.notify_listeners(result, self.stats)
        return result

    return metered  # type: ignore[return-value]


class Exchange(NotCopied, instead="save and load its state_dict()"):
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

    # A `LocalExchange` explains these.
    rank = 0
    workers = 1
    present = 1
    takes_devices = True
    step_number = property(lambda self: _step_number(self))

    def __init__(
        self, enc: Encoder | Groups, node: Node, **options: Unpack[ExchangeOptions]
    ) -> None:
        self._options = checked = Options.of(options)
        self._node = node
        self._groups = groups = _groups_of(enc)
        parts = _make_parts(checked, groups, node)
        self._replica = parts.replica
        self._membership = parts.membership
        self._departure = parts.departure
        self._consistency = parts.consistency
        self._join = parts.join
        self._start = parts.start
        self._step = parts.step
        self._stats = ExchangeStats(codec=checked.codec)
        self._optimizer_state: NodeState = NO_STATE  # of the last step, for newcomers
        self._saved_nodes = 0  # that have saved the checkpoint which was loaded; 0: unknown
        self._meter = Meter(checked, groups, self._replica.residuals_on_host)
        self.listeners: list[Listener] = self._meter.listeners
        serve_snapshot(self)

    # ---- members and numbers -----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Peer, ...]:
        """The other members that are not lost, by node id; empty before the first step and after the last one."""
        if self._membership.phase is Phase.LEAVING:
            return ()
        return tuple(map(self._membership.introductions.peer_of, self._membership.peers))

    @property
    def total_workers(self) -> int:
        """Number of workers on the machines of this node and of all other members."""
        return sum(workers for workers, _ in self._membership.teams)

    @property
    def next_step(self) -> int:
        """Number of the next exchange, counted from 0: with ``every``, that of the steps that send."""
        return self._replica.step

    @property
    def agreement(self) -> Agreement:
        """How far the nodes' updates agree, once it is started; it has the factor of an adaptive optimiser."""
        return self._replica.agreement

    @property
    def is_next_local(self) -> bool:
        """Whether the next step sends nothing and leaves the parameters as they are (``every``)."""
        is_ready = self._replica.pending is None and self._membership.phase is Phase.IN
        return is_ready and self._replica.local_steps + 1 < self._options.every

    @property
    def has_local_steps(self) -> bool:
        """Whether local steps were taken since the last exchange (``every``)."""
        return self._replica.local_steps > 0

    @property
    def is_settled(self) -> bool:
        """Whether ``held`` can compare parameters: no step is open, and there were no local steps."""
        return self._replica.pending is None and not self.has_local_steps

    @property
    def stats(self) -> ExchangeStats:
        """Totals so far."""
        return replace(
            self._stats,
            step_number=_step_number(self),
            members=0 if self._membership.phase is Phase.LEAVING else len(self._membership.peers),
            digests=self._consistency.agreed,
            step_s=self._meter.step_s,
            compute_s=self._meter.compute_s,
            is_sharded=self._replica.sharding is not None,
        )

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the totals, the transport's counters and every peer's path, as JSON values; from any thread."""
        return metrics_snapshot(self._node, self._replica, self.stats, self._meter.slowest)

    def shared(self, params: Any) -> list[NDArray[Any]]:
        """Return a copy of the parameters that all nodes share: without local steps, without the residual."""
        return copies(self._replica.shared or writable_views(params))

    def difference_of(self, index: int, stride: int = 1) -> NDArray[Any]:
        """Return every so many elements of one array's residual, where that is the difference to the shared array."""
        return self._replica.difference_of(index, stride)

    def held(self, params: Any) -> list[bool]:
        """Return for each of ``params`` whether it is as the last step left it, rather than overwritten since."""
        return self._replica.held(params)

    def end(self) -> NodeRun | None:
        """Tell the others that this node has finished, without its residual, and wait until they have its last update.

        Return the node that began. Raises: TimeoutError, as ``leave``.
        """
        if self._membership.phase is Phase.IN:
            self._join.end()
        return None if self._membership.phase is Phase.NEW else self._membership.origin

    def ignore(self, origins: Iterable[NodeRun]) -> None:
        """Wait for nodes that still take part in trainings which this process has finished, instead of joining them."""
        self._start.ignore(frozenset(origins))

    def place_shared(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Keep the shared copy in ``arrays`` from now on; return whether there is a copy."""
        return self._replica.place_shared(arrays)

    def set_team(self, workers: int, *, sends_mean: bool) -> None:
        """Say from how many workers this node's updates come, and whether as their mean; `LocalTeam` does.

        An update counts as often in the mean of all nodes as it is the mean of workers.
        """
        self._start.set_team((workers, workers if sends_mean else 1))

    # ---- joining and leaving -----------------------------------------------------------------------------------------

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """Wait until the peers are connected and ready, and make them the members; the first step does so otherwise.

        Where training has begun without this node there are no members yet: ``join`` or the first step joins it.

        Raises:
            TimeoutError: fewer than ``min_peers`` appeared within ``start_timeout_s``.
            Mismatch: the others train something else, or begin at another step.
        """
        if self._membership.phase is Phase.NEW:
            self._start.wait_for_peers()
            _tell_missing(self)
        return self.members

    @one_at_a_time
    def join(
        self, params: Any, optimizer_state: OptimizerState = (), *, equalize: bool = False
    ) -> Joined:
        """Join before training: afterwards the members are known, and local steps may begin.

        A node that comes late, or again after a restart, takes the parameters, the number of the step and the
        optimiser's state from a member while the others go on; it misses no update and applies none twice.

        Args:
            params: as in ``step``; overwritten where training has begun. The exchange keeps a copy for ``step_moved``.
            optimizer_state: float32 or float64 arrays, overwritten like ``params``; or a `NodeState`.
            equalize: give all nodes the initial parameters, and before the first step the state, of the one with the
                lowest id; on all nodes. Without, other initial parameters are a `Mismatch`.

        Raises:
            TimeoutError: as ``wait_for_peers``, or no member gave a snapshot within ``timeout_s``.
            Mismatch: as ``wait_for_peers``, or the parameters have other shapes or dtypes.
            TypeError, ValueError: as ``step``.
        """
        return _enter(self, params, optimizer_state, equalize=equalize)

    @one_at_a_time
    def resync(self, params: Any, optimizer_state: OptimizerState = ()) -> Joined:
        """Take parameters, step and optimiser's state from a member again: after `Diverged`, or after a long pause.

        Unsent updates stay in the residual. The others go on meanwhile. A node that may train alone goes on as it is.

        Args, Raises: as ``join``.
        """
        has_others = self._membership.peers or self._membership.introductions.interrupted
        is_short = self.total_workers < self._options.min_members
        if self._membership.phase is Phase.IN and (has_others or is_short):
            self._departure.rejoin("resync")
        return _enter(self, params, optimizer_state)

    @one_at_a_time
    def leave(self, params: Any, optimizer_state: OptimizerState = ()) -> StepResult:
        """Send residual and local steps as this node's last update; the others go on without this node.

        Close the node afterwards; another exchange on the node may join again. A second call does nothing.

        Args, Raises: as ``step``; also PeerLost: the last other node was lost before it had the update.
        """
        if self._options.role == "observer":
            raise ValueError('role="observer" has no last update to send: just close its node')
        if self._membership.phase is Phase.LEAVING:
            return StepResult(step=self.next_step)
        self._take_written(params)
        finished = self._begin(params, optimizer_state)
        finished = self._finish_earlier(params) or finished
        sharding = self._replica.sharding
        if finished and sharding is not None and self._membership.run not in sharding.senders:
            # The step that an earlier call of this method had begun: nobody takes a further update.
            self._join.end()
            return finished
        result = self._step.leave(params, self._optimizer_state)
        self._count(result)
        self._replica.remember(params)
        return result

    @one_at_a_time
    def note_written(self, params: Any, values: Sequence[NDArray[Any]] | None = None) -> bool:
        """Take over values that were written into ``params`` since the last call; return whether there are any.

        If the same values were written on all nodes before the same step, these become the shared parameters. Otherwise
        the change is part of this node's update. ``step`` does so by itself. ``step_moved`` takes every change for the
        movement, so call this before the optimiser.

        Args:
            params: as in ``step``.
            values: what was written; None: compare ``params`` with what they were.
        """
        return self._take_written(params, values)

    def _take_written(self, params: Any, values: Sequence[NDArray[Any]] | None = None) -> bool:
        if written := self._step.written_values(params, values):
            self._finish_earlier(params)
            self._step.take_written(params, written)
        return bool(written)

    # ---- steps -------------------------------------------------------------------------------------------------------

    @one_at_a_time
    @_metered
    def step(self, update: Any, params: Any, optimizer_state: OptimizerState = ()) -> StepResult:
        """Send this node's update and add all members' to the parameters.

        With ``overlap`` return the result of the earlier step that this call finishes.

        Args:
            update: addition to the parameters, as ``Encoder.encode`` takes it; not modified. With groups a list of
                arrays, one for each tensor. None: the residuals hold the update already.
            params: float32 or float64, as ``apply`` takes it; modified in place. Without the update.
            optimizer_state: as in ``join``, given to nodes that join late.

        Raises:
            NonFiniteUpdate: as ``Encoder.encode``; the step has not begun, the others wait for it.
            WouldBlock: there was no space to send for ``timeout_s``, or, without ``on_straggler="wait"``, this node was
                too far ahead of another; the update was not taken.
            TimeoutError: a connected member sent no message for this step within ``timeout_s``, or there was no space
                for the message after all. The update was taken; the next call finishes the step. If that takes as long
                again, nothing of the next call was taken, and the text says so.
            MessageError: a member sent bytes that are no message, or a message of another step or size; ``params`` is
                unchanged.
            Closed: the node has been closed.
            PeerLost: fewer than ``min_members`` are left; the update was not taken.
            Mismatch: as ``join``, where this node is no member yet or joins again; or the others have excluded it.
            GradwireError: no node is left that owns parameters (``role``).
            TypeError, ValueError: the parameters or the update do not fit; nothing was taken.
            Diverged: the step is done, and most others turned out to hold other parameters; see ``resync``.
        """
        if update is None and (_takes_local_steps(self) or not self._groups.keeps_residuals):
            raise ValueError(
                "local steps, and encoders that keep no residual, need the update: it cannot be in the residual"
            )
        if isinstance(update, (list, tuple)):
            _check_update(self, update, params)
        if self._replica.shared and update is not None:
            self._take_written(params)
        finished = self._begin(params, optimizer_state)
        # Local steps change the parameters at once, so the update of the exchange is what the parameters have moved by.
        if _takes_local_steps(self):
            _wait_before_exchange(self, params)
            self._replica.add_local_step(update, params)
            return _take_local_step(self, params, finished)
        if self._options.apply_residual:
            self._replica.copy_shared(params)
        elif self._replica.shared:
            self._replica.drop_shared()
        result = _take_step(self, update, params)
        return result or finished or StepResult(step=self.next_step)

    @one_at_a_time
    @_metered
    def step_moved(self, params: Any, optimizer_state: OptimizerState = ()) -> StepResult:
        """Like ``step``, after the caller's optimiser has moved ``params``: the movement is the update.

        Args:
            params: float32 or float64 arrays in host memory, or torch's tensors; afterwards the shared parameters.
                Unchanged by a local step.
            optimizer_state: as in ``step``.

        Raises:
            ValueError: there was no ``join(params)`` before the parameters were moved.
            NonFiniteUpdate: as ``step``; ``params`` is without the movement.
            WouldBlock, TimeoutError, MessageError, Closed, PeerLost, Mismatch, GradwireError, Diverged: as ``step``.
        """
        if not self._replica.shared:
            raise ValueError(
                "nothing is known of the parameters before they were moved: call join(params) first"
            )
        self._replica.forget()  # the movement is not written
        finished = self._begin(params, optimizer_state)
        if self._options.every > 1:
            _wait_before_exchange(self, params)
        return _take_local_step(self, params, finished)

    @one_at_a_time
    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """Add the messages that are still to come, without sending any: before an evaluation, or at the end.

        In asynchronous mode an interrupted step is finished, and what has arrived added. With ``overlap`` the last step
        is finished: all nodes have to do so after the same one, and the call waits for them. Otherwise there are none.

        Args:
            params: as in ``step``.
            timeout_s: longest wait for a message to arrive, in asynchronous mode.

        Returns:
            The number of messages that were added, without this node's own.

        Raises:
            TimeoutError, MessageError, Closed: as ``step``.
        """
        if self._options.overlap:
            finished = self._begin(params, self._optimizer_state, sends=False)
            return _received(finished or self._finish_earlier(params))
        if self._options.is_sync:
            return 0
        check_params(self._replica, params)
        self._start.ensure_announced(params)
        self.wait_for_peers()
        count = _received(self._finish_earlier(params))  # of a step that was interrupted
        return count + self._step.catch_up(params, self._optimizer_state, _wait_s(timeout_s))

    @one_at_a_time
    def follow(
        self, params: Any, optimizer_state: OptimizerState = (), *, timeout_s: float = 0.0
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
        check_params(self._replica, params)
        self._start.ensure_announced(params)
        self.wait_for_peers()
        return self._join.observe(params, as_state(optimizer_state), _wait_s(timeout_s))

    def _begin(
        self, params: Any, optimizer_state: OptimizerState, *, sends: bool = True
    ) -> StepResult | None:
        """Prepare a step; return the result of an earlier one if that is finished now."""
        if self._options.role == "observer":
            raise ValueError('role="observer" has no updates of its own: call follow')
        if not self._start.has_announced:
            self._start.announce_params(params)
        check_params(self._replica, params)
        # Newcomers may ask inside a later call that has no such argument, as ``catch_up``.
        is_empty = isinstance(optimizer_state, Sequence) and not optimizer_state
        self._optimizer_state = NO_STATE if is_empty else as_state(optimizer_state)
        if self._membership.phase is not Phase.IN:
            _become_member(self, params, self._optimizer_state)
        # To finish a step takes no further one: the others may have ended after it.
        if sends and self._options.min_members > 1:
            check_members(self._join)
        # An overlapped step is finished as late as allowed, so that its messages have the longest time to arrive.
        if self._replica.local_steps + 1 < self._options.overlap:
            return None
        return self._finish_earlier(params)

    def _finish_earlier(self, params: Any) -> StepResult | None:
        if self._replica.pending is None:
            return None
        finished = self._step.finish_earlier(params, self._optimizer_state)
        self._end_step(finished, params)
        return finished

    def _end_step(self, result: StepResult | None, params: Any) -> None:
        """Count a finished step, serve newcomers, and take part in the comparison of replicas."""
        if result is not None:
            self._count(result)
            self._membership.pace.note()
            self._join.serve(params, self._optimizer_state)
            self._consistency.compare(params)
        if self._replica.shared:
            self._replica.remember(params)

    def _count(self, result: StepResult) -> None:
        self._stats = self._stats.plus(result, update_bytes=4 * self._groups.numel)

    # ---- state -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"<gradwire.Exchange of {self._groups.numel:,} parameters, {self._options.mode}, "
            f"{self._options.reduction}, {len(self.members)} other members, step {self.next_step}>"
        )

    def state_dict(self, params: Any = None) -> dict[str, Any]:
        """Return a copy of everything that the next step depends on but the parameters and the other nodes.

        Every worker keeps its own. Resumed by nodes with the same ids (``Node(node_id=...)``), synchronous training
        goes on bit for bit. The message of an unfinished step is put back into the residual, so nothing is lost. With
        the ``params`` of ``step_moved``, ``apply_residual`` makes the residual their difference to the shared ones.
        """
        state = checkpoint.state_of(self._replica, self._membership.introductions.training, params)
        return {**state, "step_number": resume_number(self), "nodes": _count_nodes(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, before the first step.

        Raises:
            ValueError: the state is of another format, model or kind of exchange.
            RuntimeError: this exchange has begun.
        """
        if self._membership.phase is not Phase.NEW:
            raise RuntimeError("this exchange has begun: load the state into a new one")
        checkpoint.load_state(state, self._replica, self._options.every)
        self._saved_nodes = int(state.get("nodes", 0))  # older states have none
        self._start.load_training(state["training"])


def _enter(
    exchange: Exchange, params: Any, optimizer_state: OptimizerState, *, equalize: bool = False
) -> Joined:
    """Join, see `Exchange.join`."""
    exchange._groups.check_params(params)
    replica = exchange._replica
    state = as_state(optimizer_state)
    if isinstance(state, FixedState):
        state.export()  # before anything begins
    replica.begin_shared(params, is_new=exchange._membership.phase is Phase.NEW)
    # A checkpoint's state is the node's own.
    begins = not (replica.step or replica.local_steps)
    shared_state = state if equalize and begins else NO_STATE
    exchange._start.expect_equalized(equalize)
    exchange._start.announce_params(params, shared_state)
    return _become_member(exchange, params, state, shared_state if equalize else None)


def _become_member(
    exchange: Exchange, params: Any, state: NodeState, equalized: NodeState | None = None
) -> Joined:
    """Begin with the other first members, or join the members.

    Args:
        exchange: of this node.
        params: the caller's.
        state: the caller's, for a node that comes late.
        equalized: the state that the first members shall have in common, with their parameters; None: neither.
    """
    if isinstance(state, FixedState):
        state.export()  # refuses now rather than when a newcomer asks for it
    replica = exchange._replica
    replacements = replica.replacements
    while True:
        exchange.wait_for_peers()
        is_late = exchange._membership.phase is not Phase.IN
        if equalized is not None and not is_late:
            exchange._join.equalize(params, equalized)
        exchange._join.ensure_member(params, state)
        # All members may be gone before this node is one, without a training that others go on with.
        if exchange._membership.phase is not Phase.NEW:
            return Joined(
                step=exchange.next_step,
                is_late=is_late,
                members=exchange.members,
                is_replaced=replica.replacements > replacements,
            )


def _count_nodes(exchange: Exchange) -> int:
    """Return the number of nodes of the training, before the first step that of the checkpoint, 0 without one."""
    membership = exchange._membership
    return exchange._saved_nodes if membership.phase is Phase.NEW else len(membership.peers) + 1


def _tell_missing(exchange: Exchange) -> None:
    """Warn of residuals that are lost where fewer nodes begin than have saved the checkpoint."""
    nodes = _count_nodes(exchange)
    if exchange._membership.phase is Phase.IN and nodes < exchange._saved_nodes:
        _LOG.warning(
            "%d nodes have saved the checkpoint, and %d begin with it: the residuals of the others are missing, unless "
            "they come later with their own files; gw.exchange.redistribute(states, %d) keeps them",
            exchange._saved_nodes,
            nodes,
            nodes,
        )


def _received(result: StepResult | None) -> int:
    return 0 if result is None else result.received


def _takes_local_steps(exchange: Exchange) -> bool:
    """Return whether the next update is one of local steps; a checkpoint of a larger ``every`` may have some."""
    return exchange._options.every > 1 or exchange.has_local_steps


def _wait_before_exchange(exchange: Exchange, params: Any) -> None:
    """Wait for space before the step that sends: `WouldBlock` says that neither parameters nor count have changed."""
    if exchange._replica.local_steps + 1 >= exchange._options.every:
        exchange._step.wait_for_room(params, exchange._optimizer_state)


def _take_local_step(
    exchange: Exchange, params: Any, finished: StepResult | None, *, sends: bool = False
) -> StepResult:
    """Take a local step, or the one that sends; return the result of the step that is finished by now."""
    replica = exchange._replica
    if replica.count_local_step() < exchange._options.every and not sends:
        local = StepResult(step=replica.step, is_local=True)
        exchange._count(local)
        replica.remember(params)
        # Exchanges may be minutes apart: nodes that come meanwhile are answered here.
        exchange._join.poll(0.0)
        exchange._join.serve(params, exchange._optimizer_state)
        return finished or local
    result = _take_step(exchange, None, params, has_moved=True)
    return result or finished or StepResult(step=exchange.next_step)


def _take_step(
    exchange: Exchange, update: Any, params: Any, *, has_moved: bool = False
) -> StepResult | None:
    """Take a step that sends, and end it unless a later call does; see `Step.take_step`."""
    state = exchange._optimizer_state
    try:
        result = exchange._step.take_step(update, params, state, has_moved=has_moved)
    except BaseException:
        # If the step is open, the next call finishes it, and notices what the caller has written meanwhile.
        exchange._replica.remember(params)
        raise
    exchange._end_step(result, params)
    return result


def _check_update(exchange: Exchange, update: Sequence[Any], params: Any) -> None:
    """Refuse arrays that would be added to other elements, or taken by some of the groups only."""
    check_order(update, params)
    # Local steps and a single encoder find out what does not fit before they take anything.
    if exchange._options.every == 1 and len(exchange._groups.encoders) > 1:
        exchange._groups.check_update(update)


def _step_number(exchange: Exchange) -> int:
    """Return the number of the training's next step, counted from 0: local steps (``every``) are steps, too."""
    is_open = exchange._replica.pending is not None
    return resume_number(exchange) + (exchange._options.every if is_open else 0)


def resume_number(exchange: Exchange) -> int:
    """Return the number of the step with which ``state_dict`` goes on: it puts an unfinished step's message back."""
    replica = exchange._replica
    return replica.step * exchange._options.every + replica.local_steps


# ---- one exchange after another --------------------------------------------------------------------------------------


@one_at_a_time
@_metered
def hand_over(
    exchange: Exchange, params: Any, optimizer_state: OptimizerState = (), update: Any = None
) -> StepResult:
    """Take the last step of an exchange, after which all members go on with another one on the same nodes.

    When it is done, all members that are still there have finished it, and nobody waits for this exchange any more.

    Args:
        exchange: of this node, synchronous.
        params: as in ``Exchange.step_moved``, local changes included.
        optimizer_state: as in ``Exchange.join``.
        update: further local changes, which ``params`` do not hold; None: none.

    Raises:
        ValueError: the exchange is asynchronous.
        Mismatch: a member has done so after an earlier step.
        TimeoutError: a member has not finished it within ``start_timeout_s``, or as ``Exchange.step_moved``.
        NonFiniteUpdate, WouldBlock, MessageError, Closed, Diverged: as ``Exchange.step_moved``.
    """
    options = exchange._options
    if not options.is_sync:
        raise ValueError(
            "asynchronous nodes are never at the same step, at which all could go on with other parameters: add them "
            "before the first step"
        )
    finished = exchange._begin(params, optimizer_state)
    # With ``overlap`` the step before may stay open for longer.
    finished = exchange._finish_earlier(params) or finished
    exchange._start.hold_introductions(exchange._replica.step)
    exchange._step.wait_for_room(params, exchange._optimizer_state)
    if update is not None and exchange._replica.is_difference:
        exchange._replica.add_update(update, params, exchange._membership.weight)
    elif update is not None:
        exchange._replica.add_local_step(update, params)
    result = _take_local_step(exchange, params, finished, sends=True)
    result = exchange._finish_earlier(params) or result
    wait_until_all_finish(exchange._start, exchange._replica.step)
    exchange._replica.make_residual(params)  # for `take_over`
    return result


def check_state(exchange: Exchange, state: dict[str, Any]) -> None:
    """Raise what ``exchange.load_state_dict`` would, and load nothing."""
    checkpoint.check_state(state, exchange._replica)


def take_over(exchange: Exchange, before: Exchange, params: Sequence[Any], added: int) -> None:
    """Let a new exchange go on where another one has ended, with more parameters; ``join`` follows.

    Args:
        exchange: has taken no step.
        before: after ``hand_over``, on the same node.
        params: of the new exchange; of those that the other one had, only the shapes count.
        added: number of the others, the last ones.
    """
    nodes = len(before.members) + 1
    weight = nodes if before._options.reduction == "mean" else 1
    state = checkpoint.extend_state(before.state_dict(), exchange._groups, params, added, weight)
    exchange.load_state_dict(state)
    exchange._saved_nodes = 0  # it begins with those that are there
    exchange._start.follow(before._start, before._membership.members)
    before._membership.enter(Phase.LEAVING)  # nothing is left to say for it


# ---- the parts -------------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The parts of an exchange that its methods use."""

    replica: Replica
    membership: Membership
    departure: Departure
    consistency: Consistency
    join: Join
    start: Start
    step: Step


def _groups_of(enc: Encoder | Groups) -> Groups:
    if not isinstance(enc, (Encoder, Groups)):
        raise TypeError(f"enc must be an Encoder or Groups, got {reprlib.repr(enc)}")
    return enc if isinstance(enc, Groups) else Groups([Group(enc)])


def _check_memory(options: Options, groups: Groups, node: Node) -> None:
    """Refuse dense messages that this machine cannot hold.

    Raises:
        MemoryError: the messages that an exchange keeps are larger than the memory.
    """
    # Messages are kept for a few steps, for members that miss them when their sender dies. A threshold bounds its
    # messages; of dense ones the size is known, and nothing but memory bounds it.
    dense_bytes = groups.dense_bytes(options.codec)
    nodes = 1 + (node.expected_peers or len(node.seeds))
    kept = options.kept_updates + 1
    needed_bytes = dense_bytes * nodes * kept
    has_bytes = physical_bytes()
    if needed_bytes > has_bytes:
        raise MemoryError(
            f"a step's dense messages have {dense_bytes:,} bytes, and {kept} of each of {nodes} nodes are kept: "
            f"{needed_bytes:,} bytes, where this machine has {has_bytes:,}: send this model's updates by a threshold "
            '(codec="threshold", fewer patterns that are "dense")'
        )


def _make_parts(options: Options, groups: Groups, node: Node) -> _Parts:
    """Make and connect the parts of an exchange."""
    check_node(node)
    _check_memory(options, groups, node)
    if not groups.keeps_residuals and not options.apply_residual:
        raise ValueError(
            "encoders that keep no residual are for parameters that contain it: give apply_residual=True, or "
            "Encoder(keeps_residual=True)"
        )
    total = PlainSum(groups)
    if options.outer_momentum:
        total = MomentumSum(groups, options.outer_momentum)
    replica = Replica(groups, total, node.peer, options)
    signature = options.signature(groups.encoders)
    slice_bytes = slice_bytes_of(node, "an exchange")
    introductions = Introductions(node.peer, node.names, signature, options.role, slice_bytes)
    membership = Membership(
        node.peer,
        introductions,
        options.role,
        step=replica.step,
        keeps=options.kept_updates,
        # An asynchronous newcomer is a member before it has caught up.
        waits=max(2 * options.kept_updates, 0 if options.is_sync else STEPS_AHEAD_MAX),
    )
    router = Router(node, membership, replica.parse, groups.largest_bytes)
    notes = Notes(membership, router, options.kept_updates)
    router.handle(Kind.PART, replica.add_part)
    departure = Departure(membership, router, is_sync=options.is_sync)
    trainings = Trainings(membership, router, departure, is_sync=options.is_sync)
    # Asynchronous replicas are never in the same state.
    consistency = Consistency(
        membership, notes, replica, options.digest_s if options.is_sync else 0.0
    )
    join = Join(
        options,
        membership,
        notes,
        router,
        departure,
        trainings,
        replica,
        on_load=consistency.reset,
        on_follow=consistency.add_notes,
    )
    start = Start(options, membership, router, departure, trainings, replica, join.poll)
    step = Step(options, replica, membership, notes, router, departure, join)
    return _Parts(replica, membership, departure, consistency, join, start, step)
