"""Several workers on one machine: they add into one array in shared memory, and the machine sends one message a step.

Deeplearning4j's intermediate storage does the same among the threads of one process. The bytes that a machine sends do
not grow with its workers.
"""

from __future__ import annotations

import math
import multiprocessing
import operator
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import GradwireError
from .options import Reduction
from .results import ExchangeStats, Joined, StepResult
from .views import Arrays, copies, difference, put, views, writable_views

if TYPE_CHECKING:
    from ..transport import Peer
    from .exchange import Exchange

__all__ = ["LocalExchange", "LocalTeam"]

_MAIL_BYTES = 1 << 16
_ALIGNMENT = 64

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Outcome:
    """What the leader's turn brought, for all workers."""

    result: Any
    error: BaseException | None
    next_step: int
    members: tuple[Peer, ...] = ()
    counts: ExchangeStats | None = None


class LocalTeam:
    """What the workers of one machine share: parameters, the sum of their updates, and a meeting point.

    Make it before the workers, threads or processes, and hand it to each; processes get it as an argument of
    ``multiprocessing.Process``, forked or spawned. One worker leads: it has the node and the exchange.

    Args:
        params: the parameters to begin with, float32 or float64 arrays; copied.
        workers: how many meet in every step, the leader included.
        reduction: "mean": the machine's update is the mean of the workers' updates; "sum": their sum.
        timeout_s: how long a worker waits for the others, and for the leader's step.
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
        self._memory = SharedMemory(create=True, size=_MAIL_BYTES + 2 * self._span())
        self._owner = os.getpid()
        self._map()
        put(self.params, initial)

    def _span(self) -> int:
        """Return the bytes of all arrays, each aligned."""
        sizes: list[int] = [
            math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in self._layout
        ]
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes) + _ALIGNMENT

    def _map(self) -> None:
        """Find the arrays in the shared memory."""
        self.params = self._arrays(_MAIL_BYTES)
        self.total = self._arrays(_MAIL_BYTES + self._span())

    def _arrays(self, start: int) -> Arrays:
        found: Arrays = []
        for dtype, shape in self._layout:
            array: NDArray[Any] = np.ndarray(shape, dtype, self._memory.buf, start)
            found.append(array)
            start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to find the same memory."""
        kept = ("workers", "reduction", "timeout_s", "_layout", "_barrier")
        return {**{name: getattr(self, name) for name in kept}, "memory": self._memory.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the memory of the process that made the team."""
        self._memory = SharedMemory(name=state.pop("memory"))
        self.__dict__.update(state)
        self._owner = 0
        self._map()

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

    def meet(self) -> None:
        """Wait for all workers.

        Raises:
            TimeoutError: one did not come in time; the team is broken then.
        """
        try:
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise TimeoutError(
                f"not all {self.workers} workers of this machine came within {self.timeout_s:g} s"
            ) from None

    def post(self, outcome: _Outcome) -> None:
        """Leave the leader's outcome for the others."""
        data = pickle.dumps(outcome)
        if len(data) > _MAIL_BYTES - 8:
            data = pickle.dumps(
                replace(outcome, result=None, error=GradwireError(str(outcome)[:500]), members=())
            )
        self._mailbox[:8] = len(data).to_bytes(8, "little")
        self._mailbox[8 : 8 + len(data)] = data

    def mail(self) -> _Outcome:
        """Return what the leader has left; written by ``post`` of this very team, never by another machine."""
        box = self._mailbox
        found: _Outcome = pickle.loads(box[8 : 8 + int.from_bytes(box[:8], "little")])  # noqa: S301
        return found

    @property
    def _mailbox(self) -> memoryview:
        buffer: Any = self._memory.buf
        return memoryview(buffer)[:_MAIL_BYTES]

    def close(self) -> None:
        """Let the memory go; the process that made the team calls this last."""
        self.params, self.total = [], []
        with suppress(BufferError):  # a view of it is still in use: it goes with the process
            self._memory.close()
        if self._owner == os.getpid():  # not in a child that was forked
            self._owner = 0
            self._memory.unlink()

    def __enter__(self) -> LocalTeam:
        """Return the team."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


class LocalExchange:
    """One worker's exchange: the calls of `Exchange`, made by all workers of the machine together.

    All workers make the same calls in the same order. What the leader's call raises, all raise. Every worker's
    parameters are the team's after each of them, whether the machine's step was a local one or not. A `SharedOptimizer`
    takes it in the place of an `Exchange`; the workers' optimisers keep their states to themselves.
    """

    def __init__(self, team: LocalTeam, rank: int, exchange: Exchange | None) -> None:
        self.team = team
        self.rank = rank
        self.exchange = exchange
        self._next_step = 0 if exchange is None else exchange.next_step
        self._members: tuple[Peer, ...] = ()
        self._counts: ExchangeStats | None = None

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
        """The machine's `Exchange.stats`; the others than the leader know them as of the last call.

        The residual is the leader's: the others have NaN for its norm.

        Raises:
            RuntimeError: nothing has been called yet that the leader could have told them with.
        """
        if self.exchange is not None:
            return self.exchange.stats
        if self._counts is None:
            raise RuntimeError("the leader has told nothing yet: call join or step first")
        return self._counts

    @property
    def is_next_local(self) -> bool:
        """Whether the next step leaves the parameters as they are: never, the other workers move them too."""
        return False

    @property
    def has_local_steps(self) -> bool:
        """Whether this worker's parameters are ahead of the team's: never."""
        return False

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """See `Exchange.wait_for_peers`."""
        return self._together(None, None, lambda lead: lead.wait_for_peers())

    def join(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """See `Exchange.join`; ``params`` of every worker are the shared ones afterwards.

        Raises:
            ValueError: there is an ``optimizer_state``: every worker has its own.
        """
        _refuse_state(optimizer_state)
        return self._together(None, params, lambda lead: lead.join(self.team.params))

    def resync(self, params: Any, optimizer_state: Sequence[Any] = ()) -> Joined:
        """See `Exchange.resync`."""
        _refuse_state(optimizer_state)
        return self._together(None, params, lambda lead: lead.resync(self.team.params))

    def step(self, update: Any, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """See `Exchange.step`: the mean of all workers' updates, or their sum, is the machine's.

        Args:
            update: of this worker; float32, float16 or float64 arrays that NumPy can view, not modified.
            params: of this worker; overwritten by the shared ones. ``team.params`` themselves are taken as they are.
            optimizer_state: none.
        """
        _refuse_state(optimizer_state)
        return self._together(views(update), params, self._step)

    def step_moved(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """See `Exchange.step_moved`: what this worker's parameters differ from the shared ones is its update."""
        _refuse_state(optimizer_state)
        return self._together(difference(views(params), self.team.params), params, self._step)

    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """See `Exchange.catch_up`."""
        return self._together(None, params, lambda lead: lead.catch_up(self.team.params, timeout_s))

    def leave(self, params: Any, optimizer_state: Sequence[Any] = ()) -> StepResult:
        """See `Exchange.leave`."""
        _refuse_state(optimizer_state)
        return self._together(None, params, lambda lead: lead.leave(self.team.params))

    def rescale(self, factor: float) -> None:
        """See `Exchange.rescale`."""
        self._together(None, None, lambda lead: lead.rescale(factor))

    def shared(self, params: Any) -> Arrays:  # noqa: ARG002  (as Exchange.shared)
        """See `Exchange.shared`; of the team's parameters, which every worker's are."""
        team = self.team
        # The place of the sum serves, which is empty between the calls, and is again before the next one can begin.
        team.meet()
        if self.exchange is not None:
            put(team.total, self.exchange.shared(team.params))
        team.meet()
        found = copies(team.total)
        team.meet()
        if self.exchange is not None:
            self._empty()
        team.meet()
        return found

    def state_dict(self) -> dict[str, Any]:
        """See `Exchange.state_dict`: the leader's, nothing for the others."""
        return {} if self.exchange is None else self.exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Exchange.load_state_dict`: for the leader; the others have nothing to load."""
        if self.exchange is not None:
            self.exchange.load_state_dict(state)
            self._next_step = self.exchange.next_step

    def _step(self, lead: Exchange) -> StepResult:
        return lead.step(self.team.total, self.team.params)

    def _together(
        self,
        update: Arrays | None,
        params: Any,
        action: Callable[[Exchange], _Result],
    ) -> _Result:
        """Add this worker's update, let the leader act, and take the parameters that result.

        Args:
            update: None: the action needs none.
            params: of this worker; None: the action leaves them alone.
            action: the leader's turn.
        """
        if update is not None:
            self._add(update)
        self.team.meet()
        if self.exchange is not None:
            self._act(self.exchange, action)
        self.team.meet()
        outcome = self.team.mail()
        self._next_step, self._members = outcome.next_step, outcome.members
        self._counts = outcome.counts
        own = self.team.params if params is None else writable_views(params)
        if not all(np.shares_memory(*pair) for pair in zip(own, self.team.params, strict=True)):
            put(own, self.team.params)
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
        self._empty()
        outcome = _Outcome(result, error, exchange.next_step, exchange.members, exchange.counts)
        self.team.post(outcome)

    def _empty(self) -> None:
        for array in self.team.total:
            array[...] = 0.0

    def _add(self, update: Arrays) -> None:
        """Add to the shared sum, each worker in another part of it at a time: in the same order every time.

        In turn t worker r adds its part (r + t) mod workers, so no two write to the same memory.
        """
        workers = self.team.workers
        factor = 1.0 / workers if self.team.reduction == "mean" else 1.0
        for turn in range(workers):
            part = (self.rank + turn) % workers
            for total, array in zip(self.team.total, update, strict=True):
                _add_part(total.reshape(-1), array.reshape(-1), part, workers, factor)
            self.team.meet()


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
