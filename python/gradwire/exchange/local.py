"""Several workers on one machine: they add into one array in shared memory, and the machine sends one message a step.

Deeplearning4j's intermediate storage does the same among the threads of one process. The bytes that a machine sends do
not grow with its workers.
"""

from __future__ import annotations

import multiprocessing
import operator
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import GradwireError
from ..transport import Peer
from .exchange import Exchange
from .options import Reduction
from .parameters import Arrays, copies, difference, put, views, writable_views
from .results import ExchangeStats, Joined, StepResult

__all__ = ["LocalExchange", "LocalTeam"]

_MAIL_BYTES = 1 << 16
_ALIGNMENT = 64

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Outcome:
    """The outcome of the leader's call, for all workers."""

    result: Any
    error: BaseException | None
    next_step: int
    members: tuple[Peer, ...]
    stats: ExchangeStats


class LocalTeam:
    """The shared memory of the workers of one machine: parameters, the sum of their updates, and a barrier.

    Make the team before the workers, threads or processes, and pass it to each; processes get it as an argument of
    ``multiprocessing.Process``, forked or spawned. One worker leads: it has the node and the exchange.

    Args:
        params: the initial parameters, float32 or float64 arrays; copied.
        workers: number of workers, the leader included.
        reduction: "mean": the machine's update is the mean of the workers' updates; "sum": their sum.
        timeout_s: longest wait of a worker for the others, and for the leader's step.
        context: of multiprocessing; None: the default one.

    Raises:
        ValueError: ``workers`` is less than 1, or ``reduction`` is neither.
        TypeError: ``workers`` is no int.

    Example:
        >>> import threading, numpy as np, gradwire as gw
        >>> team = gw.LocalTeam([np.zeros(2, np.float32)], workers=2)
        >>> def work(rank, share):
        ...     params = np.zeros(2, np.float32)
        ...     share.step(np.array([2.0, 2.0 * rank], np.float32), params)
        ...     print(params.tolist()) if rank == 0 else None
        >>> with team, gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        ...     lead = team.lead(gw.Exchange(gw.Encoder(2, threshold=1.0), node, min_peers=0))
        ...     other = threading.Thread(target=work, args=(1, team.follow(1)))
        ...     other.start(); work(0, lead); other.join()
        [1.0, 1.0]
    """

    def __init__(
        self,
        params: Any,
        workers: int,
        *,
        reduction: Reduction = "mean",
        timeout_s: float = 60.0,
        context: Any = None,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}, must be 'mean' or 'sum'")
        if operator.index(workers) < 1:
            raise ValueError(f"workers is {workers}, must be 1 or more")
        initial = writable_views(params)
        self.workers = workers
        self.reduction = reduction
        self.timeout_s = timeout_s
        self._layout = [(array.dtype.str, array.shape) for array in initial]
        self._barrier = (context or multiprocessing).Barrier(workers)
        self._span = sum(array.nbytes + _ALIGNMENT for array in initial)
        size = _MAIL_BYTES + 2 * self._span
        self._memory: Any = (context or multiprocessing).RawArray("B", size)
        self._map_arrays()
        put(self.params, initial)

    def _map_arrays(self) -> None:
        """Set the arrays to their places in the shared memory."""
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self.params = self._arrays(_MAIL_BYTES)
        self.total = self._arrays(_MAIL_BYTES + self._span)

    def _arrays(self, start: int) -> Arrays:
        found: Arrays = []
        for dtype, shape in self._layout:
            array: NDArray[Any] = np.ndarray(shape, dtype, self._bytes, start)
            found.append(array)
            start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the arrays, which a spawned process finds in the same memory."""
        arrays = ("params", "total", "_bytes")
        return {name: value for name, value in self.__dict__.items() if name not in arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the memory of the process that made the team."""
        self.__dict__.update(state)
        self._map_arrays()

    def lead(self, exchange: Exchange) -> LocalExchange:
        """Return the leader's exchange, worker 0's."""
        return LocalExchange(self, 0, exchange)

    def follow(self, rank: int) -> LocalExchange:
        """Return the exchange of another worker, 1 to ``workers`` - 1.

        Raises:
            ValueError: there is no such worker.
        """
        if not 1 <= rank < self.workers:
            raise ValueError(f"rank is {rank}, must be 1 to {self.workers - 1}")
        return LocalExchange(self, rank, None)

    def wait_for_all(self) -> None:
        """Wait for all workers.

        Raises:
            TimeoutError: a worker did not come in time; the team is unusable then.
        """
        try:
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise TimeoutError(
                f"not all {self.workers} workers of this machine came within {self.timeout_s:g} s"
            ) from None

    def post_outcome(self, outcome: _Outcome) -> None:
        """Leave the leader's outcome for the other workers."""
        data = pickle.dumps(outcome)
        if len(data) > _MAIL_BYTES - 8:
            short = GradwireError(str(outcome)[:500])
            data = pickle.dumps(replace(outcome, result=None, error=short, members=()))
        self._bytes[:8].view(np.uint64)[0] = len(data)
        self._bytes[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)

    def read_outcome(self) -> _Outcome:
        """Return the leader's outcome, which ``post_outcome`` of this team wrote, never another machine."""
        size = int(self._bytes[:8].view(np.uint64)[0])
        found: _Outcome = pickle.loads(self._bytes[8 : 8 + size].tobytes())  # noqa: S301
        return found

    def close(self) -> None:
        """Release the arrays; the memory goes with the last worker."""
        self.params, self.total = [], []

    def __enter__(self) -> LocalTeam:
        """Return the team."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the team."""
        self.close()


class LocalExchange:
    """One worker's exchange: the calls of `Exchange`, made by all workers of the machine together.

    All workers make the same calls in the same order. All raise the errors of the leader's call. Every worker's
    parameters are the team's after each call, whether the machine's step was a local one or not. A `SharedOptimizer`
    takes a `LocalExchange` in the place of an `Exchange`; the workers' optimisers keep their states to themselves.
    """

    is_next_local = False  # the other workers move the parameters too
    has_local_steps = False

    def __init__(self, team: LocalTeam, rank: int, exchange: Exchange | None) -> None:
        self.team = team
        self.rank = rank
        self.exchange = exchange
        self._next_step = 0 if exchange is None else exchange.next_step
        self._members: tuple[Peer, ...] = ()
        self._stats: ExchangeStats | None = None

    @property
    def next_step(self) -> int:
        """Number of the next step; known after the first call."""
        return self._next_step

    @property
    def members(self) -> tuple[Peer, ...]:
        """The machine's `Exchange.members`; known after the first call."""
        return self._members

    @property
    def stats(self) -> ExchangeStats:
        """The machine's `Exchange.stats` after the last call.

        Raises:
            RuntimeError: there was no call yet.
        """
        if self._stats is None:
            raise RuntimeError("the leader has no statistics yet: call join or step first")
        return self._stats

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """See `Exchange.wait_for_peers`."""
        return self._call_together(lambda lead: lead.wait_for_peers())

    def join(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """See `Exchange.join`; ``params`` of every worker are the shared ones afterwards.

        Raises:
            ValueError: there is an ``optimizer_state``: every worker has its own.
        """
        _refuse_state(optimizer_state)
        return self._call_together(lambda lead: lead.join(self.team.params), params)

    def resync(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """See `Exchange.resync`."""
        _refuse_state(optimizer_state)
        return self._call_together(lambda lead: lead.resync(self.team.params), params)

    def step(self, update: Any, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """See `Exchange.step`: the machine's update is the mean, or the sum, of all workers' updates.

        Args:
            update: of this worker; float32, float16 or float64 arrays that NumPy can view, not modified.
            params: of this worker; overwritten by the shared ones. ``team.params`` themselves may be passed.
            optimizer_state: none.
        """
        _refuse_state(optimizer_state)
        return self._call_together(self._lead_step, params, views(update))

    def step_moved(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """See `Exchange.step_moved`: the difference to the team's parameters is this worker's update."""
        _refuse_state(optimizer_state)
        update = difference(views(params), self.team.params)
        return self._call_together(self._lead_step, params, update)

    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """See `Exchange.catch_up`."""
        return self._call_together(lambda lead: lead.catch_up(self.team.params, timeout_s), params)

    def leave(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """See `Exchange.leave`."""
        _refuse_state(optimizer_state)
        return self._call_together(lambda lead: lead.leave(self.team.params), params)

    def shared(self, params: Any) -> Arrays:  # noqa: ARG002  (as Exchange.shared)
        """See `Exchange.shared`; of the team's parameters, which every worker's are."""
        team = self.team
        # The sum's memory serves, which is zero between the calls, and has to be again before the next can begin.
        team.wait_for_all()
        if self.exchange is not None:
            put(team.total, self.exchange.shared(team.params))
        team.wait_for_all()
        found = copies(team.total)
        team.wait_for_all()
        if self.exchange is not None:
            self._clear_total()
        team.wait_for_all()
        return found

    def state_dict(self) -> dict[str, Any]:
        """See `Exchange.state_dict`: the leader's; empty for the others."""
        return {} if self.exchange is None else self.exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Exchange.load_state_dict`: for the leader; the others have nothing to load."""
        if self.exchange is not None:
            self.exchange.load_state_dict(state)
            self._next_step = self.exchange.next_step

    def _lead_step(self, lead: Exchange) -> StepResult:
        return lead.step(self.team.total, self.team.params)

    def _call_together(
        self,
        action: Callable[[Exchange], _Result],
        params: Any = None,
        update: Arrays | None = None,
    ) -> _Result:
        """Add this worker's update, let the leader act, and copy the resulting parameters.

        Args:
            action: of the leader.
            params: of this worker; None: they stay as they are.
            update: of this worker; None: the action needs none.
        """
        team = self.team
        if update is not None:
            self._add_update(update)
        team.wait_for_all()
        if self.exchange is not None:
            self._act(self.exchange, action)
        team.wait_for_all()
        outcome = team.read_outcome()
        self._next_step, self._members = outcome.next_step, outcome.members
        self._stats = outcome.stats
        own = team.params if params is None else writable_views(params)
        if not all(np.shares_memory(*pair) for pair in zip(own, team.params, strict=True)):
            put(own, team.params)
        if outcome.error is not None:
            raise outcome.error
        result: _Result = outcome.result
        return result

    def _act(self, exchange: Exchange, action: Callable[[Exchange], Any]) -> None:
        result, error = None, None
        try:
            result = action(exchange)
        except Exception as caught:
            error = caught
        self._clear_total()
        outcome = _Outcome(result, error, exchange.next_step, exchange.members, exchange.stats)
        self.team.post_outcome(outcome)

    def _clear_total(self) -> None:
        for array in self.team.total:
            array[...] = 0.0

    def _add_update(self, update: Arrays) -> None:
        """Add to the shared sum, in turns, so that the order is always the same and no two workers write to one part.

        In turn t worker r adds its part (r + t) mod workers.
        """
        workers = self.team.workers
        factor = 1.0 / workers if self.team.reduction == "mean" else 1.0
        for turn in range(workers):
            part = (self.rank + turn) % workers
            for total, array in zip(self.team.total, update, strict=True):
                _add_part(total.reshape(-1), array.reshape(-1), part, workers, factor)
            self.team.wait_for_all()


def _refuse_state(optimizer_state: Sequence[Any]) -> None:
    if optimizer_state:
        raise ValueError(
            "every worker of a team has an optimiser's state of its own: it cannot be shared (share_state=False)"
        )


def _add_part(
    total: NDArray[Any], update: NDArray[Any], part: int, parts: int, factor: float
) -> None:
    if update.size != total.size:
        raise ValueError(f"an update of {update.size} elements for parameters of {total.size}")
    first, last = total.size * part // parts, total.size * (part + 1) // parts
    piece = update[first:last]
    if factor != 1.0:
        piece = piece * total.dtype.type(factor)
    np.add(total[first:last], piece, out=total[first:last], casting="same_kind")
