"""Several workers on one machine: they add into one array in shared memory, and the machine sends one message a step.

Deeplearning4j's intermediate storage does the same among the threads of one process. The bytes that a machine sends do
not grow with its workers.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import clock, errors
from ..agreement import Agreement, sample_of
from ..arrays import Arrays, check_dtypes, copies, difference, on_host, put, views, writable_views
from ..errors import Closed, GradwireError, Mismatch, NotCopied, PeerLost, is_failure
from ..shared_memory import (
    STATE_SUFFIX,
    SharedFile,
    aligned,
    arrays_at,
    create_locked,
    fence,
    is_held,
    layout_of,
    open_file,
    path_of,
    release,
    shortage,
    span,
)
from ..state import check_range, check_seconds
from ..transport import Peer
from . import exchange as single
from .checkpoint import team_state_of
from .consistency import digest_of
from .exchange import Exchange
from .join import let_through
from .options import Reduction
from .parameters import check_layouts
from .results import ExchangeStats, Joined, StepResult
from .snapshot import NodeState, OptimizerState, as_state

__all__ = ["AnyExchange", "LocalExchange", "LocalTeam", "hand_over", "leader_of", "take_over"]

_LOG = logging.getLogger(__name__)

# The shared file has rows of words, the leader's outcome, and the arrays. Its own words are the numbers of the calls
# that were started and finished, and whether the started call has updates.
STARTED = 0
FINISHED = 1
HAS_UPDATES = 2
_OUTCOME_BYTES = 1 << 16

# One word of a row for every worker.
_ROWS = 9
_ARRIVED = 0
_TAKES_PART = 1
_IS_NEW = 2
_WEIGHT = 3
_REDUCED = 4
_WRITTEN = 5
_BEGINS_AT = 6  # number of the training's step at a worker's first call
_HAS_LEFT = 7
_CALL = 8  # index in _CALLS
_CALLS = ("step", "catch_up", "join", "leave", "resync", "wait_for_peers", "add_param_group")

# Waiting: the pause between two looks at the memory, and the time between two looks at the others' locks.
_PAUSE_S = 0.00005
_PAUSE_MAX_S = 0.002
_LOOK_S = 0.1
_WARN_S = 10.0  # after which a late worker is named in the log

# Elements that are added together: they stay in a processor's cache, and need no memory of the arrays' size.
_BLOCK_NUMEL = 1 << 16

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Outcome:
    """The outcome of the leader's call, for all workers."""

    result: Any
    error: BaseException | None
    next_step: int
    step_number: int
    resume_number: int
    members: tuple[Peer, ...]
    total_workers: int
    stats: ExchangeStats
    has_shared: bool
    state_file: str  # name of the leader's optimiser state; empty: none
    agreement: list[float]
    outer_momentum: float


class LocalTeam(NotCopied, instead="make one in every process, with the same name"):
    """The shared memory of the workers of one machine: parameters, and every worker's update.

    The workers, processes or threads, meet by the name of the team. Rank 0 makes the memory, and replaces what a
    crashed run has left under the name; the others wait for it. Then rank 0, which has the node and the exchange, calls
    ``lead``, each other ``follow``. A worker that dies is noticed by the lock that it held; the others go on, and a new
    process may take its rank. The memory goes when rank 0 ends. The memory of a killed rank 0 goes when any team,
    hosted model or feed of this user begins or ends.

    Args:
        name: of the run: letters, digits, ".", "_" and "-", at most 64. Other runs of this user need other names.
        params: the initial parameters, float32 or float64 arrays, rank 0's for all; None: those of the first call of
            the exchange.
        size: number of workers, rank 0 included.
        rank: of this worker.
        reduction: "mean": the machine's update is the mean of the workers' updates; "sum": their sum.
        timeout_s: longest wait for a worker that has not come at all; a late one that lives is waited for.
        needs_all: let a call fail where a worker has died, for launchers that end or restart all of them, as torchrun.

    Raises:
        TypeError, ValueError: an argument cannot be used, or a living process has this rank.
        TimeoutError: rank 0 did not come in time.
        Mismatch: this worker's arrays are others than rank 0's.
        OSError: there is too little shared memory.

    Example:
        >>> import threading, numpy as np, gradwire as gw
        >>> def work(rank, node=None):
        ...     with gw.LocalTeam("documentation", size=2, rank=rank) as team:
        ...         if rank == 0:
        ...             share = team.lead(gw.Exchange(gw.Encoder(2, threshold=1.0), node, min_peers=0))
        ...         else:
        ...             share = team.follow()
        ...         params = np.zeros(2, np.float32)
        ...         share.step(np.array([2.0, 2.0 * rank], np.float32), params)
        ...     print(params.tolist()) if rank == 0 else None
        >>> with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        ...     other = threading.Thread(target=work, args=(1,))
        ...     other.start(); work(0, node); other.join()
        [1.0, 1.0]
    """

    def __init__(
        self,
        name: str,
        params: Any = None,
        *,
        size: int,
        rank: int,
        reduction: Reduction = "mean",
        timeout_s: float = 60.0,
        needs_all: bool = False,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}, must be 'mean' or 'sum'")
        self.workers = check_range("size", size, 1, 1 << 16)
        self.rank = check_range("rank", rank, 0, size - 1)
        self.name = name
        self.reduction = reduction
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.needs_all = needs_all
        self._lost: set[int] = set()  # workers that have died, rank 0's knowledge
        self._path = path_of("team", name)
        self._state_file = ""
        self._file: SharedFile | None = None  # with the arrays
        path = self._path_of(rank)
        self._lock = create_locked(path, f"is rank {rank} of team {name!r}")
        # Released however the process ends, and only by the process that took it: a forked child runs finalizers, too.
        self._finalizer: Any = weakref.finalize(self, release, self._lock, path, os.getpid())
        if params is not None:
            self.attach(params)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def attach(self, params: Any) -> None:
        """Map the team's memory, which rank 0 makes with the layout of ``params``, unless that is done.

        Raises:
            TimeoutError, Mismatch, OSError: as the class.
        """
        if self.is_closed:
            raise Closed("this worker has closed its team")
        if self._file is not None:
            check_layouts(params, self.params)
            return
        arrays = writable_views(params)
        layout = layout_of(arrays)
        if self.rank == 0:
            nbytes = self._arrays_at + (2 + self.workers) * span(layout)
            file = SharedFile.host(
                self._path,
                self._lock,
                [self.workers, layout],
                nbytes,
                what=f"a team of {self.workers} workers does",
                remedy="let every worker be a machine (gradwire run --as-machines, or LOCAL_WORLD_SIZE=1 and "
                "LOCAL_RANK=0), which shares no memory",
            )
            self._map(file)
            # The others map the memory as soon as it is published, so the parameters have to be in it.
            put(self.params, arrays)
            file.publish()
            return
        deadline_s = clock.now_s() + self.timeout_s
        warn_s = clock.now_s() + _WARN_S
        while (leaders := SharedFile.attach(self._path, mmap.ACCESS_WRITE)) is None:
            if clock.now_s() >= deadline_s:
                raise TimeoutError(
                    f"rank 0 of team {self.name!r} did not come within {self.timeout_s:g} s: start all "
                    f"{self.workers} workers of this machine; where rank 0 prepares data for longer, give a larger "
                    "start_timeout_s (share) or timeout_s (LocalTeam)"
                )
            if clock.now_s() >= warn_s:
                _LOG.warning(
                    "rank 0 of this machine is late, or has failed (see its output), and is waited for up to %g s",
                    self.timeout_s,
                )
                warn_s += _WARN_S
            let_through()
            clock.sleep(_PAUSE_MAX_S)
        # Memory of another layout would give every worker other parameters without a word.
        if leaders.document != [self.workers, layout]:
            leaders.close()
            workers, theirs = leaders.document
            raise Mismatch(
                f"worker {self.rank} of team {self.name!r} has {self.workers} workers and arrays {layout}, rank 0 "
                f"has {workers} and {theirs}"
            )
        self._map(leaders)

    @property
    def _arrays_at(self) -> int:
        return aligned(8 * _ROWS * self.workers) + _OUTCOME_BYTES

    def _map(self, file: SharedFile) -> None:
        self._file = file
        self._words = file.words
        nbytes = 8 * _ROWS * self.workers
        self._rows = file.data[:nbytes].view(np.uint64).reshape(_ROWS, -1)
        self._outcome_buffer = file.data[aligned(nbytes) : self._arrays_at]
        layout = file.document[1]
        self.params, self.shared, *self._slots = (
            arrays_at(file.data, self._arrays_at + index * span(layout), layout)
            for index in range(2 + self.workers)
        )
        self.total = self._slots[0]  # the sum of all updates takes the place of the leader's

    def lead(self, exchange: Exchange) -> LocalExchange:
        """Return the exchange of rank 0."""
        if self.rank > 0 or not isinstance(exchange, Exchange):
            raise ValueError(f"rank {self.rank} cannot lead {exchange}: rank 0 leads an Exchange")
        exchange.set_team(self.workers, sends_mean=self.reduction == "mean")
        return LocalExchange(self, exchange)

    def follow(self) -> LocalExchange:
        """Return the exchange of another rank."""
        if self.rank == 0:
            raise ValueError("rank 0 cannot follow: it has the node, and leads its Exchange")
        return LocalExchange(self, None)

    @property
    def present(self) -> int:
        """Number of workers that took part in the last call."""
        return int(np.count_nonzero(self._rows[_TAKES_PART])) if self.is_attached else 0

    def close(self, *, has_failed: bool = False) -> None:
        """Release the memory and this worker's rank; the others notice that it has finished, or ``has_failed``."""
        if self._file is not None and not self.is_closed and not has_failed:
            self._rows[_HAS_LEFT, self.rank] = 1
            fence()
        self._finalizer()
        self.params, self.total, self.shared, self._slots = [], [], [], []

    @property
    def is_closed(self) -> bool:
        """Whether this worker has released its rank."""
        return self._lock.closed

    def __enter__(self) -> LocalTeam:
        """Return the team."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the team."""
        self.close(has_failed=is_failure(*error))

    # ---- one call of all workers -------------------------------------------------------------------------------------

    def begin_call(
        self,
        call: int,
        update: Arrays | None,
        before: Arrays | None = None,
        *,
        is_new: bool,
        begins_at: int = 0,
        written: int = 0,
    ) -> int:
        """Wait for all workers, add their updates up, and return the number of the call.

        Args:
            call: number of this worker's next call.
            update: this worker's, unchanged until this returns; None: the action of the call needs none.
            before: what the update is to be the difference to; None: nothing.
            is_new: whether this is this worker's first call.
            begins_at: number of the training's step at this worker's first call.
            written: digest of the parameters that the caller has written since the last call; 0: none.

        Raises:
            TimeoutError: a worker has not come at all.
            PeerLost: rank 0 is gone.
        """
        rows, words, rank = self._rows, self._words, self.rank
        if update is not None:
            _put_update(self._slots[rank], update, before)
        # The order of stores is the protocol: first the update and what describes it, then the word that others wait
        # for. The fences keep compiler and processor from changing that order.
        while True:
            rows[_WEIGHT, rank] = update is not None
            rows[_IS_NEW, rank] = is_new
            rows[_BEGINS_AT, rank] = begins_at
            rows[_HAS_LEFT, rank] = 0
            rows[_WRITTEN, rank] = written
            fence()
            rows[_ARRIVED, rank] = call
            if self.rank == 0:
                self._gather(call)
                words[HAS_UPDATES] = update is not None
                fence()
                words[STARTED] = call
            else:
                self._wait(lambda number=call: words[STARTED] >= number, 0)  # type: ignore[misc]
            fence()
            # The leader decides who takes part. A worker that was late finds the number of a later call, or itself left
            # out.
            if int(words[STARTED]) == call and rows[_TAKES_PART, rank]:
                break
            # The others have gone on without this worker, which was not here in time.
            call = int(words[STARTED]) + 1
        # Every worker sums its own share of the elements: no two write to the same memory, and the sum takes a share of
        # the time.
        if words[HAS_UPDATES]:
            self._reduce(rank)
        fence()
        rows[_REDUCED, rank] = call
        if self.rank == 0:
            # The leader alone waits for all shares: it reads the whole sum next.
            members = np.flatnonzero(rows[_TAKES_PART])
            self._wait_for_all(members.tolist(), _REDUCED, call, are_needed=False)
            fence()
            if update is not None and (rows[_REDUCED, members] != call).any():
                # The update of a worker that has just died is complete, but its share of the sum may be half done.
                _put_update(self.total, update, before)
                for other in members.tolist():
                    self._reduce(other)
        return call

    def end_call(self, call: int) -> None:
        """Let the others read the outcome, or wait for the leader's."""
        fence()
        if self.rank == 0:
            self._words[FINISHED] = call
        else:
            self._wait(lambda: self._words[FINISHED] >= call, 0)
        fence()

    @property
    def others_updates(self) -> list[Arrays]:
        """The updates of the other workers that take part in this call, by rank; valid until the call ends."""
        return [self._slots[rank] for rank in self.senders if rank]

    @property
    def has_newcomers(self) -> bool:
        """Whether workers take part in this call for the first time, and the leader does not."""
        newcomers = self._rows[_TAKES_PART] & self._rows[_IS_NEW]
        return bool(newcomers.any() and not newcomers[0])

    @property
    def is_attached(self) -> bool:
        """Whether the memory is there, with the parameters."""
        return self._file is not None

    @property
    def started_call(self) -> int:
        """Number of the last call that the leader has started; 0: none."""
        return int(self._words[STARTED])

    def _gather(self, call: int) -> None:
        """Wait for all workers that live, and note who takes part; the first time for all."""
        rows = self._rows
        self._wait_for_all(range(self.workers), _ARRIVED, call, are_needed=not self.started_call)
        # Whoever has not arrived by now is dead: those that live were waited for.
        before = rows[_TAKES_PART].copy()
        rows[_TAKES_PART] = rows[_ARRIVED] == call
        gone = np.flatnonzero(before > rows[_TAKES_PART]).tolist()
        if gone:
            dead = [rank for rank in gone if not rows[_HAS_LEFT, rank]]
            self._lost.update(dead)
            if not (dead and self.needs_all):
                _LOG.warning("team %r: worker %s gone, %d go on", self.name, gone, self.present)
        self._lost.difference_update(np.flatnonzero(rows[_TAKES_PART]).tolist())

    @property
    def senders(self) -> list[int]:
        """The workers with an update in this call, of which the leader is the first if there is a sum."""
        return [int(rank) for rank in np.flatnonzero(self._rows[_TAKES_PART] & self._rows[_WEIGHT])]

    def adopt_written(self, values: Arrays) -> bool:
        """Make what all workers have written the parameters, and no part of the updates; return whether they have."""
        written = {int(self._rows[_WRITTEN, rank]) for rank in self.senders}
        if len(written) != 1 or 0 in written:
            return False
        count = len(self.senders) if self.reduction == "sum" else 1
        for total, value, param in zip(self.total, values, self.params, strict=True):
            total -= count * (value - param)
        put(self.params, values)
        return True

    def _reduce(self, rank: int) -> None:
        """Add one worker's part of the elements of the other updates to the leader's, in the order of the ranks."""
        members = np.flatnonzero(self._rows[_TAKES_PART]).tolist()
        others = self.others_updates
        factor = 1.0 / (1 + len(others)) if self.reduction == "mean" else 1.0
        position = members.index(rank)
        for index, total in enumerate(self.total):
            flat = total.reshape(-1)
            last = flat.size * (position + 1) // len(members)
            for begin in range(flat.size * position // len(members), last, _BLOCK_NUMEL):
                block = slice(begin, min(begin + _BLOCK_NUMEL, last))
                parts = [update[index].reshape(-1)[block] for update in others]
                # In the order of the ranks, whoever sums: the bits of the sum do not depend on who has died.
                _add_up(flat[block], parts, flat.dtype.type(factor))

    def _path_of(self, rank: int) -> Path:
        """Return the file whose lock a worker holds; rank 0's is the memory."""
        return self._path.with_name(f"{self._path.name}.rank{rank}") if rank else self._path

    def _is_alive(self, rank: int) -> bool:
        """Return whether a worker lives. In the place of rank 0 may be that of another run."""
        if rank == 0 and self._file is not None:
            return self._file.is_live
        return is_held(self._path_of(rank))

    def _wait_for_all(
        self, ranks: Iterable[int], word: int, call: int, *, are_needed: bool
    ) -> None:
        """Wait until a word of these workers' rows is the number of a call, or the worker is gone."""
        words = self._rows[word]
        for rank in ranks:
            self._wait(lambda rank=rank: words[rank] >= call, rank, is_needed=are_needed)  # type: ignore[misc]

    def _wait(self, is_done: Callable[[], Any], rank: int, *, is_needed: bool = True) -> None:
        """Wait until something is done by a worker, or the worker is gone.

        Raises:
            TimeoutError: a needed worker has not come in time.
            PeerLost: rank 0 is gone.
        """
        begin_s = look_s = clock.now_s()
        warn_s = begin_s + min(self.timeout_s, _WARN_S)
        pause_s = _PAUSE_S
        while not is_done():
            # Not between the others' shares of a sum and its use: another try of the call would not have them again.
            if self.rank or self._words[STARTED] == self._words[FINISHED]:
                let_through()
            clock.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _PAUSE_MAX_S)
            if (now_s := clock.now_s()) < look_s:
                continue
            # A lock is looked at seldom, because that is a system call, and memory often, because it is not.
            look_s = now_s + _LOOK_S
            # The order matters: a worker may do what is waited for and end right after, between the two looks.
            is_gone = not self._is_alive(rank)
            if is_done() or (is_gone and not is_needed):
                return
            if is_gone and rank == 0:
                raise PeerLost(
                    f"rank 0 of team {self.name!r}, which has the node, is gone: it failed, or took fewer steps than "
                    "this worker; start all its workers again"
                )
            if now_s >= warn_s:
                why = f"not all {self.workers} workers of this machine came within {now_s - begin_s:.3g} s: rank {rank}"
                why += " has not come, or has failed (see its output)" if is_gone else " is late"
                if is_gone and now_s >= begin_s + self.timeout_s:
                    raise TimeoutError(why)
                _LOG.warning("%s, and waited for", why)
                warn_s = now_s + min(self.timeout_s, _WARN_S)

    def publish_state(self, state: Arrays) -> str:
        """Publish the leader's optimiser state for new workers, until the next call; return the name of the file."""
        # Anybody may make files in the folder, so nobody may know the name before.
        self._state_file = f"{self._path.name}.{secrets.token_hex(16)}{STATE_SUFFIX}"
        path = self._path.with_name(self._state_file)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                np.savez(file, *map(on_host, state))
        except OSError as error:
            nbytes = sum(array.nbytes for array in state)
            what = "the optimiser's state, for a worker that has just come, does"
            raise shortage(what, nbytes, path, error) from None
        return self._state_file

    def remove_state(self) -> None:
        """Remove the leader's optimiser state, which every worker that needs it has taken."""
        if self._state_file:
            self._path.with_name(self._state_file).unlink(missing_ok=True)
            self._state_file = ""

    def take_state(self, state: NodeState, state_file: str) -> None:
        """Overwrite a worker's optimiser state with the leader's.

        Raises:
            Mismatch: this worker's optimiser has another state.
        """
        with open_file(self._path.with_name(state_file)) as opened, np.load(opened) as file:
            leaders = [file[name] for name in file.files]
        try:
            state.check(leaders)
        except Mismatch as error:
            raise Mismatch(
                f"worker {self.rank} of team {self.name!r} cannot take over the state of rank 0: {error}; give all "
                "workers the same optimiser"
            ) from error
        state.load(leaders)

    def publish_outcome(self, outcome: _Outcome) -> None:
        """Publish the leader's outcome for the other workers."""
        data = pickle.dumps(outcome)
        # An error may carry much. Its text is what the other workers need.
        if len(data) > _OUTCOME_BYTES - 8:
            short = GradwireError(str(outcome)[:500])
            data = pickle.dumps(replace(outcome, result=None, error=short, members=()))
        self._outcome_buffer[:8].view(np.uint64)[0] = len(data)
        self._outcome_buffer[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)

    def read_outcome(self) -> _Outcome:
        """Return the leader's outcome, which ``publish_outcome`` of this team wrote, never another machine."""
        size = int(self._outcome_buffer[:8].view(np.uint64)[0])
        outcome: _Outcome = pickle.loads(self._outcome_buffer[8 : 8 + size].tobytes())  # noqa: S301
        return outcome


class LocalExchange(NotCopied, instead="save and load the leader's state_dict()"):
    """One worker's exchange: the calls of `Exchange`, made by all workers of the machine together.

    All workers make the same calls in the same order. All raise the errors of the leader's call. Every worker's
    parameters are the team's after each call, whether the machine's step was a local one or not. A `SharedOptimizer`
    takes a `LocalExchange` in the place of an `Exchange`. Every worker's optimiser has its own state; late machines and
    new workers begin with the leader's.
    """

    is_next_local = False  # the other workers move the parameters too
    has_local_steps = False
    takes_devices = False  # the team's memory is the host's
    is_settled = True  # all workers' parameters are the team's after every call
    rank = property(lambda self: self.team.rank)  # 0 has the node
    workers = property(lambda self: self.team.workers)
    present = property(lambda self: self.team.present)  # how many took part in the last call
    members: tuple[Peer, ...] = ()  # the machine's, after the first call

    def __init__(self, team: LocalTeam, exchange: Exchange | None) -> None:
        self.team = team
        self.exchange = exchange
        self._call: int | None = None
        self._outcome: _Outcome | None = None  # of the last call
        self._equalizes = False
        self._sample: Any = None  # of the leader's update in this call
        self._moved: list[Any] = []  # samples of the workers' sums since the last exchange
        self.agreement = Agreement() if exchange is None else exchange.agreement
        self._written: Arrays = []  # by the caller, since the last call
        self._loaded_step = 0  # of a checkpoint, of which the leader has the rest
        self.total_workers = team.workers  # of all machines, after the first call

    @property
    def next_step(self) -> int:
        """Number of the next step; known after the first call."""
        if self.exchange is not None:
            return self.exchange.next_step
        return 0 if self._outcome is None else self._outcome.next_step

    @property
    def step_number(self) -> int:
        """See `Exchange.step_number`; before the first call that of the checkpoint that was loaded."""
        if self.exchange is not None:
            return int(self.exchange.step_number)
        return self._loaded_step if self._outcome is None else self._outcome.step_number

    @property
    def stats(self) -> ExchangeStats:
        """The machine's `Exchange.stats` after the last call.

        Raises:
            RuntimeError: there was no call yet.
        """
        if self._outcome is None:
            raise RuntimeError("the leader has no statistics yet: call join or step first")
        return self._outcome.stats

    def wait_for_peers(self) -> tuple[Peer, ...]:
        """See `Exchange.wait_for_peers`."""
        return self._call_together("wait_for_peers", lambda lead: lead.wait_for_peers())

    def join(
        self, params: Any, optimizer_state: OptimizerState = (), *, equalize: bool = False
    ) -> Joined:
        """See `Exchange.join`; all workers then have the leader's ``params``, with ``equalize`` also its state."""
        self._equalizes = equalize
        joined: Any = self._call_together(
            "join",
            lambda lead: lead.join(self.team.params, optimizer_state, equalize=equalize),
            params,
            state=optimizer_state,
        )
        if isinstance(joined, Joined):
            return joined
        # This worker has taken the place of a dead one, while the others did something else.
        return Joined(step=self.next_step, is_late=True, members=self.members)

    def resync(self, params: Any, optimizer_state: OptimizerState = ()) -> Joined:
        """See `Exchange.resync`."""
        return self._call_together(
            "resync",
            lambda lead: lead.resync(self.team.params, optimizer_state),
            params,
            state=optimizer_state,
        )

    def note_written(self, params: Any, values: Sequence[Any] | None = None) -> bool:
        """See `Exchange.note_written`: if all workers of all machines have written the same, that is adopted."""
        self.team.attach(params)
        if values is None and all(self.held(params)):
            return False
        self._written = copies(writable_views(params) if values is None else values)
        return True

    def step(self, update: Any, params: Any, optimizer_state: OptimizerState = ()) -> StepResult:
        """See `Exchange.step`: the machine's update is the mean, or the sum, of all workers' updates.

        Args:
            update: of this worker; float32, float16 or float64 arrays that NumPy can view, not modified.
            params: of this worker; overwritten by the shared ones. ``team.params`` themselves may be passed.
            optimizer_state: of this worker; the leader's is given to those that come late.
        """
        update = views(update)
        if self.note_written(params):
            self._check_update(update)
            changes = difference(writable_views(params), self.team.params)
            pairs = zip(update, changes, strict=True)
            update = [array.reshape(change.shape) + change for array, change in pairs]
        return self._step(params, update, optimizer_state)

    def step_moved(self, params: Any, optimizer_state: OptimizerState = ()) -> StepResult:
        """See `Exchange.step_moved`: the difference to the team's parameters is this worker's update."""
        return self._step(params, views(params), optimizer_state, has_moved=True)

    def _step(
        self, params: Any, update: Arrays, state: OptimizerState, *, has_moved: bool = False
    ) -> StepResult:
        def lead_step(lead: Exchange) -> StepResult:
            return self._lead_step(lead, state)

        return self._call_together("step", lead_step, params, update, state, has_moved=has_moved)

    @property
    def _is_measured(self) -> bool:
        """Whether this worker leads, and the next exchange's note is to tell of what this step moves."""
        return self.exchange is not None and (self.agreement.is_due() or bool(self._moved))

    def _lead_step(self, lead: Exchange, optimizer_state: OptimizerState) -> StepResult:
        # Workers have gradients of their own, so their updates count one by one.
        moved: list[Any] = []
        if self._is_measured:
            moved = [self._sample, *map(sample_of, self.team.others_updates)]
            if len(moved) == len(self._moved):
                moved = [now + before for now, before in zip(moved, self._moved, strict=True)]
            lead.agreement.measure(lead.next_step, moved)
        try:
            return lead.step(self.team.total, self.team.params, optimizer_state)
        except errors.NonFiniteUpdate as error:
            # The leader's own update has become the sum; the others' are as they were.
            updates = zip(self.team.senders[1:], self.team.others_updates, strict=True)
            bad = {rank for rank, parts in updates for part in parts if not np.isfinite(part).all()}
            error.args = (f"local rank {', '.join(map(str, sorted(bad or {0})))}: {error}",)
            raise
        finally:
            self._moved = moved if lead.has_local_steps else []

    def catch_up(self, params: Any, timeout_s: float = 0.0) -> int:
        """See `Exchange.catch_up`."""
        return self._call_together(
            "catch_up", lambda lead: lead.catch_up(self.team.params, timeout_s), params
        )

    def leave(self, params: Any, optimizer_state: OptimizerState = ()) -> StepResult:
        """See `Exchange.leave`."""
        return self._call_together(
            "leave", lambda lead: lead.leave(self.team.params, optimizer_state), params
        )

    def shared(self, params: Any) -> Arrays:
        """See `Exchange.shared`; of the team's parameters, which every worker's are."""
        if self._outcome is None or self.team.is_closed:
            return copies(views(params)) if self.exchange is None else self.exchange.shared(params)
        return copies(self.team.shared if self._outcome.has_shared else self.team.params)

    def held(self, params: Any) -> list[bool]:
        """See `Exchange.held`."""
        arrays = writable_views(params)
        if self.team.is_closed or not self.team.is_attached:
            return [False] * len(arrays) if self.exchange is None else self.exchange.held(arrays)
        return list(map(np.array_equal, arrays, self.team.params))

    def state_dict(self, params: Any = None) -> dict[str, Any]:  # noqa: ARG002  (as Exchange.state_dict)
        """See `Exchange.state_dict`: the leader's; of the others only the number of the next step."""
        # The exchange knows the team's parameters, which hold its residual; every worker's are the same.
        if self.exchange is not None:
            return {**self.exchange.state_dict(), "moved": self._moved}
        resume_number = self._loaded_step if self._outcome is None else self._outcome.resume_number
        return {"step_number": resume_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Exchange.load_state_dict`.

        Raises:
            ValueError: as there; or this worker leads, and the state is of another.
            RuntimeError: this worker has begun.
        """
        if self._call is not None:
            raise RuntimeError("this exchange has begun: load the state into a new one")
        number, moved = team_state_of(state, self.workers if self.exchange is not None else 0)
        if self.exchange is not None:
            self.exchange.load_state_dict(state)
            self._moved = moved
        elif "encoders" in state:
            _LOG.warning(
                "local rank %d goes on from the checkpoint of local rank 0, with that one's optimiser state",
                self.rank,
            )
        self._loaded_step = number

    @single.one_at_a_time
    def _call_together(
        self,
        name: str,
        action: Callable[[Exchange], _Result],
        params: Any = None,
        update: Arrays | None = None,
        state: OptimizerState = (),
        *,
        has_moved: bool = False,
    ) -> _Result:
        """Add this worker's update, let the leader act, and copy the resulting parameters.

        Args:
            name: of the call, see ``_CALLS``.
            action: of the leader.
            params: of this worker; None: they stay as they are.
            update: of this worker; None: the action needs none.
            state: of this worker's optimiser; the leader's overwrites that of a worker that comes late.
            has_moved: whether the update is what ``update`` differs by from the team's parameters.
        """
        team = self.team
        if params is not None or team.is_closed:
            team.attach(params)
        if not team.is_attached:
            raise RuntimeError("the team has no parameters yet: call join or step first")
        before = team.params if has_moved else None
        if update is not None:
            self._check_update(update)
            if self._is_measured:
                self._sample = sample_of(update) - (sample_of(before) if before else 0.0)
        # A worker that takes the place of a dead one begins with whatever the others do, without an update.
        last_call = team.started_call if self._call is None else self._call
        written = int(digest_of(self._written), 16) if self._written else 0
        team._rows[_CALL, team.rank] = _CALLS.index(name)  # the leader reads it within the call
        try:
            call = team.begin_call(
                last_call + 1,
                update,
                before,
                is_new=self._call is None,
                # As it was saved: with another `every` only the leader knows the number that it has now.
                begins_at=self._loaded_step or self.step_number,
                written=written,
            )
            interrupt = self.exchange and self._act(self.exchange, action, state)
            team.end_call(call)
            outcome = self._take_outcome(call, params, state)
        except BaseException as error:
            # The others go on with the update of a worker that is interrupted, and it would be a call behind. Nor can
            # the leader make a call again that it has started.
            is_started = self.exchange is None or team.started_call > last_call
            if is_started and not isinstance(error, (TimeoutError, PeerLost)):
                team.close(has_failed=True)
            raise
        if interrupt:
            raise interrupt
        # Raised in every worker, so that all of them handle it alike and make the same next call.
        if outcome.error is not None:
            raise outcome.error
        result: _Result = outcome.result
        return result

    def _take_outcome(self, call: int, params: Any, state: OptimizerState) -> _Outcome:
        """Take over the result of a call: the parameters, and the leader's optimiser state where it is needed."""
        team = self.team
        self._written = []
        self._outcome = outcome = team.read_outcome()
        self.members = outcome.members
        self.total_workers = outcome.total_workers
        self.agreement.load(outcome.agreement)
        self.agreement.outer_momentum = outcome.outer_momentum
        # Only a worker that has no state of its own takes the leader's: a new one, or all of them where the machine
        # joined late.
        is_new = self._call is None or getattr(outcome.result, "is_late", False)
        if outcome.state_file and is_new and self.exchange is None:
            team.take_state(as_state(state), outcome.state_file)
        if self._call is None and call > 1 and outcome.error is None:
            _LOG.warning(
                "rank %d of this machine comes in late, at step %d of the training: let schedules and data go on from "
                "there (step_number)",
                self.rank,
                outcome.step_number,
            )
        self._call = call
        targets = team.params if params is None else writable_views(params)
        # A caller may train on the team's memory itself, which needs no copy.
        if not all(np.shares_memory(*pair) for pair in zip(targets, team.params, strict=True)):
            put(targets, team.params)
        return outcome

    def _act(
        self, exchange: Exchange, action: Callable[[Exchange], Any], state: OptimizerState
    ) -> BaseException | None:
        """Let the leader act, and publish the outcome; return what interrupted it, such as `KeyboardInterrupt`."""
        team = self.team
        result = None
        error: Exception | None = None
        interrupt: BaseException | None = None
        state_file = ""
        # All workers are in this call, so they have taken the state that was left in an earlier one.
        team.remove_state()
        try:
            _check_workers(team)
            if team.senders:
                exchange.set_team(len(team.senders), sends_mean=team.reduction == "mean")
            has_shared = bool(self._written) and exchange.place_shared(team.shared)
            if has_shared and team.adopt_written(self._written):
                exchange.note_written(team.params, self._written)
            result = action(exchange)
            # Workers that go on from checkpoints have their own.
            begins = self._equalizes and not (exchange.next_step or exchange.has_local_steps)
            if team.has_newcomers or begins or getattr(result, "is_late", False):
                arrays = as_state(state).export()
                if arrays:
                    state_file = team.publish_state(arrays)
        except Exception as caught:
            error = caught
        except BaseException as caught:
            # The others wait for an outcome, and their next call must be another one than this.
            interrupt = caught
            error = GradwireError(
                f"the call of the machine's first worker was interrupted: {caught!r}"
            )
        has_shared = exchange.place_shared(team.shared)
        team.publish_outcome(
            _Outcome(
                result,
                error and errors.portable(error),
                exchange.next_step,
                exchange.step_number,
                single.resume_number(exchange),
                exchange.members,
                exchange.total_workers,
                exchange.stats,
                has_shared,
                state_file,
                exchange.agreement.state(),
                exchange.agreement.outer_momentum,
            )
        )
        return interrupt

    def _check_update(self, update: Arrays) -> None:
        check_dtypes(self.team.params, update)
        given, sizes = ([array.size for array in each] for each in (update, self.team.params))
        if given != sizes:
            raise ValueError(f"an update of arrays with {given} elements for parameters of {sizes}")


#: What trainers take: one node's exchange, or one worker's part of its machine's.
AnyExchange: TypeAlias = Exchange | LocalExchange


def leader_of(exchange: AnyExchange) -> Exchange | None:
    """Return the exchange of this machine's node; None: another worker has it."""
    return exchange if isinstance(exchange, Exchange) else exchange.exchange


def hand_over(
    exchange: AnyExchange, params: Any, optimizer_state: OptimizerState = ()
) -> StepResult:
    """Take the last step of an exchange, see `gradwire.exchange.exchange.hand_over`; all workers of a team together."""
    if isinstance(exchange, Exchange):
        return single.hand_over(exchange, params, optimizer_state)
    team = exchange.team
    return exchange._call_together(
        "add_param_group",
        lambda lead: single.hand_over(lead, team.params, optimizer_state, team.total),
        params,
        views(params),
        optimizer_state,
        has_moved=True,
    )


def take_over(
    exchange: AnyExchange, before: AnyExchange, params: Sequence[Any], added: int
) -> None:
    """Let a new exchange go on where another one has ended; the memory of a team so far is released."""
    lead, lead_before = leader_of(exchange), leader_of(before)
    if lead is not None and lead_before is not None:
        single.take_over(lead, lead_before, params, added)
    if isinstance(exchange, LocalExchange) and isinstance(before, LocalExchange):
        exchange._loaded_step = before.step_number
        before.team.close()


def _put_update(slots: Arrays, update: Arrays, before: Arrays | None) -> None:
    """Write a worker's update to its place in the memory; with ``before`` the difference of the two."""
    for index, slot in enumerate(slots):
        values = update[index].reshape(slot.shape)
        if before:
            np.subtract(values, before[index], out=slot, casting="same_kind")
        else:
            np.copyto(slot, values, casting="same_kind")


def _add_up(total: NDArray[Any], updates: Sequence[NDArray[Any]], factor: Any) -> None:
    """Add updates to a total in place, all times a factor."""
    if factor != 1.0:
        total *= factor
    for update in updates:
        total += update if factor == 1.0 else update * factor


def _check_workers(team: LocalTeam) -> None:
    """Refuse a call of the leader that its workers cannot make together.

    Raises:
        PeerLost: a worker has died, and the team needs all.
        Mismatch: the workers have loaded checkpoints of different steps.
        RuntimeError: the workers have called different methods. Updates would be lost, and the workers be a step apart.
    """
    if team._lost and team.needs_all:
        ranks = ", ".join(map(str, sorted(team._lost)))
        raise PeerLost(
            f"local rank {ranks} of this machine has died: the others stop, because the launcher starts all local "
            "ranks again, or ends them"
        )
    rows = team._rows
    members = np.flatnonzero(rows[_TAKES_PART]).tolist()
    if rows[_IS_NEW, 0] and len(set(rows[_BEGINS_AT, members].tolist())) > 1:
        steps = ", ".join(f"local rank {rank} at {rows[_BEGINS_AT, rank]}" for rank in members)
        raise Mismatch(
            f"the ranks of this machine begin at different steps of the training: {steps}. Load checkpoints of the "
            "same step on all ranks (without one a rank begins at 0): of the newest step of which all have one; a "
            "rank whose own is lost may load that of local rank 0"
        )
    calls = {}
    for rank in members:
        call = _CALLS[int(rows[_CALL, rank])]
        # A worker that comes late begins with whatever the others do, and a worker may leave at any time.
        is_late = rows[_IS_NEW, rank] > rows[_IS_NEW, 0] or (rank > 0 and call == "join")
        if not is_late and call != "leave":
            calls[rank] = call
    if len(set(calls.values())) > 1:
        text = ", ".join(f"local rank {rank} called {call}" for rank, call in calls.items())
        raise RuntimeError(
            f"{text}: all ranks of a machine make the same calls in the same order, catch_up before an evaluation as "
            "well; nothing was exchanged, and the updates of these calls are lost"
        )
