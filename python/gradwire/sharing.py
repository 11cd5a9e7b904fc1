"""One call for NumPy arrays, and what the integrations have in common: encoders by name, node, exchange, goodbye."""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import re
import reprlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import translate
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from . import rendezvous
from .arrays import (
    check_arrays,
    check_order,
    copies,
    device_of,
    nonfinite,
    on_host,
    put,
    views,
    writable_views,
)
from .codec import Encoder
from .errors import Closed, NotCopied, PeerLost, TransportError, is_failure
from .exchange import AnyExchange, Exchange, Group, Groups, LocalExchange, LocalTeam, leader_of
from .exchange.options import ExchangeOptions, Options, training_defaults
from .exchange.results import ExchangeStats, Joined, StepResult
from .policy import ResidualClip, ShakeUp, TargetDensity, default_policy
from .transport import Node, Peer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Density",
    "ResidualClip",
    "ShakeUp",
    "SharedArrays",
    "Training",
    "TrainingMaker",
    "check_role",
    "check_shapes",
    "check_state",
    "check_update_scale",
    "share",
]

Density = float | Mapping[str, float | Literal["dense"]]

_LOG = logging.getLogger(__name__)

# Steps until tensors that do not change are named, and how many names are given.
_JUDGED_STEPS = 50
_NAMED_TENSORS = 5
# An element is late from so many thresholds on; the share of all that may be, where they are still few;
# and of how many elements of a tensor this is judged.
_LATE_THRESHOLDS = 4.0
_LATE_SHARE_MAX = 0.01
_SAMPLED_NUMEL = 1 << 16

# One thread of an encoder for so many elements, at most.
_THREAD_NUMEL = 1 << 20

# Before a training of as many elements the memory of earlier ones is freed.
_COLLECTING_NUMEL = 1 << 20

_START_TIMEOUT_S = 1800.0


class Training:
    """This process's part in one training: the exchange, and what has to be given back at the end.

    A training ends once: when its owner closes it, when the owner is collected, or when the process ends. Then node,
    port and shared memory are free, and the process may begin the next training of its run.

    Args:
        run: name of the run and rank of this process, in which there is one training at a time; None: there may be any
            number.
        exchange: of this process.
        node: to close at the end; None: the caller closes its node.
    """

    # Which of a process's trainings is which belongs to the process.
    _open: ClassVar[dict[str, weakref.ref[Training]]] = {}
    _finished: ClassVar[dict[str, list[Any]]] = {}  # for every one the node that began it
    _closers: ClassVar[list[threading.Thread]] = []

    def __init__(self, run: str | None, exchange: AnyExchange, node: Node | None) -> None:
        self.exchange = exchange
        self._run = run
        self._node = node
        self._process = os.getpid()
        self._finalizer: Any = None
        self._owner = 0, 0  # its id and its thread
        self._is_closed = threading.Lock()  # locked once
        if run is not None:
            self._open[run] = weakref.ref(self)
        # Also with a node of the caller's: it may live on, and the others would wait for it.
        atexit.register(self._close_at_exit)

    @classmethod
    def begin(cls, run: str) -> list[Any]:
        """Return the nodes that began the earlier trainings of this process, which have ended.

        Raises:
            RuntimeError: one has not.
        """
        if cls._is_open(run):
            gc.collect()  # an owner may be part of a cycle
        with suppress(IndexError):  # other threads take some of them, too
            while True:
                cls._closers.pop().join()
        if cls._is_open(run):
            raise RuntimeError(
                "this process takes part in a training of this run already: call close() on what share returned "
                "before the next share, or write `with share(...) as ...`; two models at once, or two optimisers of "
                "one model, need a node each (share(..., node=Node(...))), or one optimiser with the parameters of both"
            )
        return cls._finished.setdefault(run, [])

    @classmethod
    def _is_open(cls, run: str) -> bool:
        training = cls._open.get(run, lambda: None)()
        # A forked child has the parent's training only as a copy.
        return (
            training is not None
            and training._process == os.getpid()
            and not training._is_closed.locked()
        )

    def end_with(self, owner: object) -> None:
        """End the training when its owner is collected."""
        self._finalizer = weakref.finalize(owner, self._close_after_owner)
        self._finalizer.atexit = False

    def begin_with(self, owner: object) -> None:
        """End the training when its owner, which calls ``end_collected`` then, is collected."""
        self._owner = id(owner), threading.get_ident()

    def end_collected(self, owner: object, close: Callable[..., None], *, is_closed: bool) -> None:
        """End the training, because its owner is collected: the parameters become the shared ones, where that is safe.

        Args:
            owner: as given to ``begin_with``; nothing happens for a proxy that has its attributes.
            close: of the owner.
            is_closed: whether it was called before.
        """
        number, thread = self._owner
        if number != id(owner) or is_closed or sys.is_finalizing():
            return
        if os.getpid() != self._process:
            return  # a forked child's copy
        try:
            # The collector runs in any thread, and the parameters may be in use in the owner's.
            if threading.get_ident() == thread:
                close(has_failed=False, closes_training=False)
            elif self.exchange.step_number > 0:
                _LOG.warning(
                    "what share() has returned was collected in another thread than it was made in: the parameters "
                    "stay this node's own, residual included; call close(), or write `with share(...) as ...`"
                )
        except Exception:
            _LOG.exception("the training has not ended in order")
        finally:
            self._close_after_owner()

    def close(self, *, has_failed: bool = False) -> None:
        """Give everything back; a second call does nothing.

        Args:
            has_failed: go without a goodbye, so that the others know.

        Raises:
            RuntimeError: a signal's handler has interrupted the node; the end of the process gives everything back.
        """
        if os.getpid() != self._process or self._is_closed.locked():
            return
        if self._node is not None:
            _ = self._node.peers  # or what follows would end by halves
        if not self._is_closed.acquire(blocking=False):
            return
        atexit.unregister(self._close_at_exit)
        if self._finalizer is not None:
            self._finalizer.detach()
        team = self.exchange.team if isinstance(self.exchange, LocalExchange) else None
        leader = leader_of(self.exchange)
        has_begun = team is not None and team.is_attached and team.started_call > 0
        origin: Any = None
        try:
            if leader is not None and not has_failed:
                origin = leader.end()
        except PeerLost as error:
            # The process may still save what it has, and then says that something is missing elsewhere.
            _LOG.error("%s", error)
            _Exit.fail()
        except TransportError:
            pass  # the caller has closed its node
        except BaseException:
            has_failed = True
            raise
        finally:
            if self._node is not None:
                self._node.close(0.0 if has_failed else 5.0)
            if team is not None:
                team.close(has_failed=has_failed)
        # After an error the process may come back into the same training.
        if self._run is not None and not has_failed and (has_begun or origin is not None):
            self._finished[self._run].append(origin)

    def _close_after_owner(self) -> None:
        # The collector runs in any thread, also in a node's own, which would wait for itself here.
        if threading.current_thread() is threading.main_thread():
            self.close()
            return
        closer = threading.Thread(target=self.close, name="gradwire-close")
        self._closers.append(closer)
        closer.start()

    def _close_at_exit(self) -> None:
        try:
            self.close(has_failed=getattr(sys, "last_value", None) is not None)
        except Exception:
            _LOG.exception("the training has not ended in order")
            _Exit.fail()


class _Exit:
    """Ends the process with an error after all exit handlers, where the end of a training has failed in one of them."""

    _has_failed: ClassVar[bool] = False

    @classmethod
    def fail(cls) -> None:
        """Note the failure."""
        cls._has_failed = True

    @classmethod
    def finish(cls) -> None:
        """End the process with an error if there was a failure."""
        # Python ignores the errors of exit handlers, and a launcher would take the run for complete.
        if cls._has_failed:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


# The first to register runs last.
atexit.register(_Exit.finish)


class SharedArrays(NotCopied, instead="save its state_dict()"):
    """Parameters that all nodes of a run share; made by `share`. A context manager, which closes itself at the end.

    The first step joins the training, or ``join()`` does before. Up to then a checkpoint can be loaded.

    Attributes:
        params: the parameters, changed in place by every step.
        exchange: does the work.
        result: of the last step.
    """

    def __init__(self, params: Any, training: Training) -> None:
        self.params = params
        self.exchange = training.exchange
        self.result: StepResult | None = None
        self._training = training
        self._has_joined = False
        self._is_closed = False
        training.begin_with(self)

    def __repr__(self) -> str:
        return f"<gradwire.SharedArrays over {self.exchange!r}>"

    def join(self) -> Joined:
        """Take part from now on: the parameters are rank 0's, or, of a node that comes late, the present ones.

        Returns:
            The step to begin with, and whether training had begun.

        Raises:
            TimeoutError: not all nodes of the run appeared; the message names the missing ones.
            Mismatch: another node shares arrays of other shapes or dtypes, or with other options.
        """
        self._check_open()
        joined: Joined = self.exchange.join(self.params, equalize=True)
        self._has_joined = True
        return joined

    @property
    def step_number(self) -> int:
        """Number of the training's next step, counted from 0, as ``join()`` or a loaded checkpoint has made it known.

        Where schedules and data have to go on: in a process that comes late, or comes back, it is the others' step.
        """
        return self.exchange.step_number

    def step(self, update: Any) -> StepResult:
        """Add this node's update, and the part of the others' updates that has been sent, to the parameters.

        The first step joins if ``join`` has not been called. Call ``join`` before where the update depends on the
        parameters.

        Args:
            update: addition to the parameters, such as -learning_rate * gradient; arrays of the parameters' shapes, or
                flat, where the parameters are; float16, float32, or float64 if the parameters are; not modified.

        Raises:
            ValueError: an array has another shape.
            TypeError: an array has another dtype: float64 for parameters of float32 would be rounded.
            NonFiniteUpdate, WouldBlock, TimeoutError, MessageError, PeerLost, Mismatch, Diverged, Closed: as
                ``Exchange.join`` and ``Exchange.step``.
        """
        self._check_open()
        check_order(update, self.params)
        if not self._has_joined:
            self.join()
        self.result = self.exchange.step(update, self.params)
        return self.result

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("these arrays were closed, or have left the training: call share again")

    def shared(self) -> Any:
        """Return a copy of the parameters that all nodes share, without this node's residual: to save or to compare."""
        shared = self.exchange.shared(self.params)
        return shared if isinstance(self.params, (list, tuple)) else shared[0]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this node's parameters and of everything else that its next step depends on.

        Every process saves its own: it has the process's residual. Arrays in host memory and plain values.
        """
        return {"params": copies(views(self.params)), "exchange": self.exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, before the first step; ``params`` then are the saved ones.

        Raises:
            ValueError: the state is not from ``state_dict``, or of other arrays, or as ``Exchange.load_state_dict``;
                nothing was loaded.
            RuntimeError: training has begun; nothing was loaded.
        """
        if self._has_joined or self._is_closed:
            raise RuntimeError(
                "this training has begun or ended: load a state right after share, before the first step"
            )
        check_state(state)
        params = writable_views(self.params)
        check_shapes(state["params"], params)
        if isinstance(state["exchange"], Mapping) and state["exchange"].get("shared"):
            check_shapes(state["exchange"]["shared"], params)
        self.exchange.load_state_dict(state["exchange"])
        put(params, state["params"])

    def leave(self) -> StepResult | None:
        """Send the rest of this node's updates, for the last time, and close; the others go on. Return the last result.

        Raises:
            WouldBlock, TimeoutError, MessageError, PeerLost, Closed: as ``Exchange.leave``.
        """
        if not self._is_closed:
            if self._has_joined:
                self.result = self.exchange.leave(self.params)
            self.close()
        return self.result

    def close(self) -> None:
        """End this node's part: node, port and shared memory are free, and ``params`` are the shared parameters.

        What is still in the residual stays unsent. A second call does nothing.
        """
        self._close(has_failed=False)

    def _close(self, *, has_failed: bool, closes_training: bool = True) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not has_failed and self._has_joined:
                put(writable_views(self.params), self.exchange.shared(self.params))
        finally:
            if closes_training:
                self._training.close(has_failed=has_failed)

    def __enter__(self) -> SharedArrays:
        """Return the arrays."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close; after an error without a goodbye, so that the others know."""
        self._close(has_failed=is_failure(*error))

    def __del__(self) -> None:
        training = vars(self).get("_training")
        if training is not None:
            training.end_collected(self, self._close, is_closed=self._is_closed)


def share(
    params: Any,
    *,
    node: Node | None = None,
    density: Density | None = None,
    shakeup: ShakeUp | None = None,
    clip: ResidualClip | None = None,
    **options: Unpack[ExchangeOptions],
) -> SharedArrays:
    """Share arrays with the other nodes of this run: one call, and then ``step`` with every update.

    The node's place in the run comes from the environment, see `Node.from_env`; several processes of one machine are a
    `LocalTeam`. The first step, or `SharedArrays.join`, gives every node rank 0's parameters; whoever comes late takes
    the present ones.

    Args:
        params: one NumPy array, or a list of arrays: float32 or float64, contiguous, writable; or torch's tensors, also
            on a GPU. Changed in place.
        node: for this training alone; the caller closes it. None: one from the environment, closed with the result.
        density: share of the elements that a message has; None: 0.01, or from ``every=15`` on 0.05, for n < 2,000,000
            elements sqrt(2e6 / n) times as many, up to 0.08. Or by pattern of the arrays' numbers, such as
            ``{"1": 0.05}``: arrays whose updates are far larger than the others' need one, and with it a threshold, of
            their own.
        shakeup: periodic messages with a smaller threshold, see `ShakeUp`; None: without.
        clip: periodic clipping of the residual, see `ResidualClip`; None: without.
        options: see `ExchangeOptions`. Unlike those of `Exchange`, parameters hold this node's residual
            (``apply_residual``), an update far longer than the other nodes' is shortened (``limit_outliers``), from 15
            local steps on ``outer_momentum`` is 0.5, and a step waits for stragglers: after ``timeout_s`` a log entry
            names the node that all wait for.

    Raises:
        RuntimeError: this process takes part in a training of this run already, or ``node`` has a training.
        TimeoutError: the name of another node's machine is not known within ten minutes.
        ValueError: an argument or environment variable that cannot be used.
        TypeError: an unknown option, or no arrays.

    >>> import numpy as np, gradwire as gw
    >>> weights = np.zeros(3, np.float32)
    >>> shared = gw.share(weights)
    >>> joined = shared.join()
    >>> result = shared.step(np.array([0.5, 0.25, -0.5], np.float32))
    >>> weights.tolist()
    [0.5, 0.25, -0.5]
    """
    arrays = list(params) if isinstance(params, (list, tuple)) else [params]
    check_arrays(arrays)
    writable_views(arrays)  # refuses before there is a node
    named = [(str(index), array) for index, array in enumerate(arrays)]
    maker = TrainingMaker(density, node=node, shakeup=shakeup, clip=clip, **options)
    return SharedArrays(params, maker.make(named))


def check_role(role: str | None) -> None:
    """Refuse the role of a node that sends no updates, but only follows.

    Raises:
        ValueError: the way out.
    """
    if role == "observer":
        raise ValueError(
            'role="observer" sends no updates, so there is nothing to share here: make a '
            'gradwire.Exchange(encoder, node, role="observer") of the members\' groups, and call its follow(params)'
        )


def check_update_scale(scale: Any) -> None:
    """Raise `ValueError` unless a factor of updates is a positive number, or "auto"."""
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    if scale != "auto" and not (is_number and 0.0 < scale < math.inf):
        raise ValueError(f'update_scale is {scale!r}, must be positive, or "auto"')


def check_state(state: Any) -> None:
    """Raise `ValueError` unless a state is one of shared arrays."""
    is_mapping = isinstance(state, Mapping)
    kinds = (("params", (list, tuple)), ("exchange", Mapping))
    if is_mapping and all(isinstance(state.get(name), kind) for name, kind in kinds):
        return
    what = list(state) if is_mapping else state
    raise ValueError(
        f"a state of shared arrays has params and exchange, this one is of {reprlib.repr(what)}: load what "
        "state_dict() has returned"
    )


def check_shapes(saved: Sequence[Any], params: Sequence[Any]) -> None:
    """Raise `ValueError` if a state is of other parameters, or not of finite numbers."""
    shapes = [[list(np.shape(array)) for array in arrays] for arrays in (saved, params)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the state is of arrays of shapes {shapes[0]}, these have {shapes[1]}")
    for index, pair in enumerate(zip(saved, params, strict=True)):
        dtypes = [str(getattr(array, "dtype", "no dtype")).removeprefix("torch.") for array in pair]
        if dtypes[0] != dtypes[1]:
            raise ValueError(
                f"array {index} of the state is of {dtypes[0]}, must be of {dtypes[1]}"
            )
        if bad := nonfinite([on_host(pair[0])]):
            raise ValueError(
                f"{bad} elements of array {index} of the state are not finite: load another checkpoint"
            )


def _is_frozen(array: Any) -> bool:
    """Return whether a parameter is one of torch's that takes no gradient; arrays are never known to be."""
    return getattr(array, "is_leaf", False) and not array.requires_grad


def _checked_pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise TypeError(f'density: a pattern must be a text such as "0" or "*", got {pattern!r}')
    return pattern


def _checked_density(density: Any) -> float | str | None:
    """Return a density as a float, or "dense"; None: the default."""
    if density is None or (isinstance(density, str) and density == "dense"):
        return density
    is_number = isinstance(density, Real) and not isinstance(density, bool)
    if not (is_number and 0.0 < density < 1.0):
        raise ValueError(f'density is {density!r}, must be in (0, 1), about 0.01, or "dense"')
    return float(density)


def _policy(density: float, numel: int) -> TargetDensity:
    if density * numel < 1.0:
        enough = f"at least {1.0 / numel:.2g}" if numel > 1 else '"dense"'
        raise ValueError(
            f"density {density:g} of {numel} elements is less than one element: give {enough}"
        )
    return TargetDensity(density)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TrainingMaker:
    """Makes this process's part in a training: with a node of its own, or as one worker of its machine's team.

    Encoders are where the parameters are, a team's in host memory.

    Args:
        density: for all; or by pattern of the names (the first that fits), where "dense" sends whole updates and the
            rest has the default; None: the default for all.
        is_adaptive: whether the updates are an adaptive optimiser's, for the default.
        node: to use; None: one from the environment, closed with the training.
        team: rank and size of the team on this machine, whose gradients are averaged already; None: from the
            environment.
        shakeup: of the encoders.
        clip: of the encoders.
        options: see `ExchangeOptions`; with the defaults of `training_defaults`, and another one of ``on_straggler``.

    Raises:
        TypeError, ValueError: the options cannot be used.
    """

    # Given nodes that have, or have had, a training.
    _used_nodes: ClassVar[weakref.WeakSet[Node]] = weakref.WeakSet()

    def __init__(
        self,
        density: Density | None,
        *,
        is_adaptive: bool = False,
        node: Node | None,
        team: tuple[int, int] | None = None,
        shakeup: ShakeUp | None = None,
        clip: ResidualClip | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        self._density = density
        self._schedules: dict[str, Any] = {"shakeup": shakeup, "clip": clip}
        self._is_adaptive = is_adaptive
        self._node = node
        self._is_own_node = node is None
        self._options: ExchangeOptions = {
            **training_defaults(options),
            # A node that evaluates, or that is slow, must not end the others.
            "on_straggler": "wait",
            **options,
        }
        if "timeout_s" not in options:
            # Rank 0 may load data or compile for long before it shares; torch waits as long for its process group.
            self._options.setdefault("start_timeout_s", _START_TIMEOUT_S)
        # Options that cannot be used are refused by every worker of a team, before there is a node.
        self._checked = Options.of(self._options)
        check_role(self._checked.role)
        self._place = place = rendezvous.placement()
        if place.hint and node is None:
            _LOG.warning("%s", place.hint)
        self._rank, self._size = team or (place.local_rank, place.local_size)
        self._is_averaged = team is not None
        self._is_team = self._size > 1 and (node is None or team is not None)
        # What the parameters differ by from the shared ones needs no memory of its own, but clipping changes it.
        self._keeps_residual = not self._checked.apply_residual or clip is not None
        self._run: str | None = None
        if self._is_team or (node is None and not place.is_alone()):
            self._run = f"{rendezvous.name_of(place)} {self._rank}"
        self._finished: list[Any] = []  # the nodes that began the earlier trainings of this process
        self._teams = 0

    def make(
        self, named: Sequence[tuple[str, Any]], optimizer_groups: Sequence[int] | None = None
    ) -> Training:
        """Begin a training of the parameters.

        Args:
            named: the parameters with their names, in order.
            optimizer_groups: for every parameter the number of its group in the optimiser; None: there is one.

        Raises:
            RuntimeError: this process takes part in a training of this run already, or the given node has one.
        """
        if self._node is not None and self._node in self._used_nodes:
            raise RuntimeError(
                f"{self._node!r} has a training, whose messages the others would take for those of another one: give "
                "every training a node of its own, and close the node of one that has ended"
            )
        # The parts of an exchange know each other, so Python frees an earlier training only when it looks for circles:
        # in a loop over trainings hardly ever.
        if sum(math.prod(array.shape) for _, array in named) >= _COLLECTING_NUMEL:
            gc.collect()
        groups = self._groups(named, optimizer_groups)
        if self._run is not None:
            self._finished = Training.begin(self._run)
        team = self._team() if self._is_team else None
        try:
            exchange = self._exchange(named, groups, team)
        except BaseException:
            if team is not None:
                team.close()
            if self._is_own_node and self._node is not None:
                self._node.close(0.0)
            raise
        if not self._is_own_node and self._node is not None:
            self._used_nodes.add(self._node)
        node = self._node if self._is_own_node else None
        if self._run is not None and node is not None and self._place.rank is None:
            _tell_number(exchange, node.peer)
        return Training(self._run, exchange, node)

    def extend(
        self,
        training: Training,
        named: Sequence[tuple[str, Any]],
        optimizer_groups: Sequence[int] | None = None,
    ) -> AnyExchange:
        """Give a training that this object has made an exchange of more parameters, as in `make`; return it."""
        groups = self._groups(named, optimizer_groups)
        team = None
        if isinstance(training.exchange, LocalExchange):
            # The memory of a team that has begun has the size of the earlier parameters.
            team = training.exchange.team
            team = self._team() if team.is_attached else team
        training.exchange = self._exchange(named, groups, team)
        return training.exchange

    def _groups(
        self, named: Sequence[tuple[str, Any]], optimizer_groups: Sequence[int] | None
    ) -> Groups:
        """Return one group of all tensors with the same density, which is the default where none is given.

        All of them share a threshold and a message: a threshold for every tensor sends what moves little as often as
        what moves much. But not those of several groups of an optimiser: at a hundred times the learning rate of the
        others, a few parameters would be sent in steps of the others' size, and stay behind for hundreds of them.
        Frozen parameters have a group of their own: the densities are those of the model without them.
        """
        if not named:
            raise ValueError("there are no parameters to share")
        density = self._density
        given = density if isinstance(density, Mapping) else {}
        patterns = {_checked_pattern(key): _checked_density(value) for key, value in given.items()}
        rest = None if isinstance(density, Mapping) else _checked_density(density)
        by_density: dict[tuple[bool, float | str | None, int], list[int]] = {}
        numel_of_value: Counter[float | str | None] = Counter()
        numel_of: Counter[bool] = Counter()  # of the frozen parameters, and of the others
        used = set()
        # As fnmatchcase, which compiles a pattern again wherever there are more of them than its cache holds.
        matchers = {pattern: re.compile(translate(pattern)).match for pattern in patterns}
        for index, (name, array) in enumerate(named):
            pattern = next((each for each, match in matchers.items() if match(name)), None)
            used.add(pattern)
            value: float | str | None = rest if pattern is None else patterns[pattern]
            is_frozen = _is_frozen(array)
            group = optimizer_groups[index] if optimizer_groups else 0
            by_density.setdefault((is_frozen, value, group), []).append(index)
            numel_of_value[value] += math.prod(array.shape)
            numel_of[is_frozen] += math.prod(array.shape)
        # A pattern without a parameter is a typing error, which would train with another density than intended.
        unused = [pattern for pattern in patterns if pattern not in used]
        if unused:
            names = ", ".join(name for name, _ in named[:6])
            raise ValueError(
                f"density: {', '.join(unused)} matches no parameter that an earlier pattern leaves; the names are "
                f"{names}{', ...' if len(named) > 6 else ''}"
            )
        number = -1 if self._is_team else device_of([array for _, array in named])
        # The workers of a team wait while their leader encodes.
        processors = _processors() // (1 if self._is_team else self._place.local_size)
        is_double = any("float64" in str(array.dtype) for _, array in named)
        groups = []
        for key, ((is_frozen, value, _), indices) in enumerate(by_density.items()):
            numel = sum(math.prod(named[index][1].shape) for index in indices)
            policy = default_policy(
                numel_of[is_frozen], is_adaptive=self._is_adaptive, every=self._checked.every
            )
            if isinstance(value, float):
                policy = _policy(value, numel_of_value[value])
            encoder = Encoder(
                numel,
                policy,
                dtype="float64" if is_double else "float32",
                device="cpu" if number < 0 else f"cuda:{number}",
                key=key,
                threads=max(1, min(processors, numel // _THREAD_NUMEL)),
                keeps_residual=self._keeps_residual,
                **self._schedules,
            )
            tensors = tuple(indices) if len(by_density) > 1 else None
            groups.append(Group(encoder, tensors, is_dense=value == "dense"))
        return Groups(groups)

    def _team(self) -> LocalTeam:
        name = rendezvous.name_of(self._place)
        # A worker may be ahead of the others, which still end their earlier training.
        if self._finished:
            name = f"{name}-{len(self._finished)}"
        if self._teams:
            name = f"{name}.{self._teams}"
        self._teams += 1
        return LocalTeam(
            name,
            size=self._size,
            rank=self._rank,
            reduction=self._checked.reduction,
            timeout_s=self._checked.longest_start_s,
            needs_all=self._place.launcher == "torchrun",
        )

    def _exchange(
        self, named: Sequence[tuple[str, Any]], groups: Groups, team: LocalTeam | None
    ) -> AnyExchange:
        if team is not None and self._rank > 0:
            return team.follow()
        if self._node is None:
            # Machines of one rank and of several may train together.
            is_alone = self._place.local_size == 1
            self._node = Node.from_env(per_machine=self._is_team or is_alone)
        exchange = Exchange(groups, self._node, **self._options)
        if self._is_averaged:
            exchange.agreement.expect_averaged_workers()
        exchange.ignore(filter(None, self._finished))
        if self._checked.codec == "threshold":
            exchange.listeners.append(_TensorWatch(named, groups, exchange.difference_of))
        return exchange if team is None else team.lead(exchange)


def _tell_number(exchange: AnyExchange, peer: Peer) -> None:
    """Log once which of the nodes this one is: processes without ranks easily draw the same data unnoticed."""
    if isinstance(exchange, LocalExchange):
        return  # its workers have ranks
    find = weakref.ref(exchange)
    is_told = threading.Lock()

    def tell(_result: StepResult, _stats: ExchangeStats) -> None:
        share = find()
        if share is not None and share.members and is_told.acquire(blocking=False):
            nodes = sorted([peer, *share.members])
            _LOG.warning(
                "no launcher has given ranks: this is node %d of %d (0 is the first); let each draw its own part of "
                "the data",
                nodes.index(peer),
                len(nodes),
            )

    exchange.listeners.append(tell)


class _TensorWatch:
    """Logs once which tensors hardly change, and which stay behind because they change far more than the others.

    If so few elements change that a density cannot be met, messages are right all the same; but these tensors cost
    memory and time in every step, and often nobody knows that they do not train. Elements that stay behind reach the
    other nodes hundreds of steps late (docs/algorithm.md, parameter groups), and nothing else would say so.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        groups: Groups,
        difference_of: Callable[[int, int], NDArray[Any]],
    ) -> None:
        # The exchange calls this object, and would keep itself alive through its own method.
        self._difference_of = weakref.WeakMethod(difference_of)
        self._names = [name for name, _ in named]
        self._sizes = [math.prod(array.shape) for _, array in named]
        self._groups = groups
        self._steps = 0

    def __call__(self, _result: StepResult, _stats: ExchangeStats) -> None:
        """Count a finished step."""
        self._steps += 1
        if self._steps != _JUDGED_STEPS:
            return
        for group in self._groups.groups:
            policy = group.encoder.policy
            if group.is_dense or not isinstance(policy, TargetDensity):
                continue  # dense updates leave no residual
            if group.encoder.has_residual and group.encoder.device_number >= 0:
                continue  # cut into tensors in host memory only
            changed, late = {}, _LateElements(group)
            for index, stride, sample in self._samples(group):
                changed[index] = stride * int(np.count_nonzero(sample))
                late.add(self._names[index], stride, sample)
            late.warn()
            still = self._still_tensors(changed, policy.density)
            if still:
                _LOG.warning(
                    "fewer elements change than the density %.2g asks for, and all that change are sent; in %d steps "
                    "hardly anything has changed in %s%s: leave out of the optimiser, or of share(), what is not "
                    "trained",
                    policy.density,
                    _JUDGED_STEPS,
                    ", ".join(still[:_NAMED_TENSORS]),
                    ", ..." if len(still) > _NAMED_TENSORS else "",
                )

    def _samples(self, group: Group) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield the number of each of a group's tensors, and of every so many elements what is left to be sent."""
        start = 0
        for index in range(len(self._names)) if group.tensors is None else group.tensors:
            end = start + self._sizes[index]
            # Odd, so that a matrix is not sampled in the same columns only.
            stride = self._sizes[index] // _SAMPLED_NUMEL | 1
            if group.encoder.has_residual:
                yield index, stride, group.encoder.residual[start:end:stride]
            elif (difference_of := self._difference_of()) is not None:
                yield index, stride, difference_of(index, stride)
            start = end

    def _still_tensors(self, changed: Mapping[int, int], density: float) -> list[str]:
        """Return the names of the tensors in which too few elements have changed, if there are too few in all."""
        still = [index for index in changed if changed[index] <= density * self._sizes[index]]
        is_met = sum(changed.values()) > density * sum(self._sizes[index] for index in changed)
        return [] if is_met else [self._names[index] for index in still]


class _LateElements:
    """What a group has left to send, and how much of it few elements of many thresholds each hold."""

    def __init__(self, group: Group) -> None:
        self._threshold = group.encoder.threshold
        self._numel = group.encoder.numel
        self._square = 0.0
        self._squares: dict[str, float] = {}  # of the late elements, by tensor
        self._count = 0
        self._largest = 0.0

    def add(self, name: str, stride: int, sample: NDArray[Any]) -> None:
        """Add what is left of one tensor's elements, of which every so many are in the sample."""
        sizes = np.abs(sample.astype(np.float64))
        self._square += stride * float(np.square(sizes).sum())
        late = sizes[sizes > _LATE_THRESHOLDS * self._threshold]
        if late.size:
            self._squares[name] = stride * float(np.square(late).sum())
            self._count += stride * late.size
            self._largest = max(self._largest, float(late.max()))

    def warn(self) -> None:
        """Log the tensors' names, if their late elements are few and hold most."""
        square = sum(self._squares.values())
        if square <= self._square / 2.0 or self._count > _LATE_SHARE_MAX * self._numel:
            return
        names = sorted(self._squares, key=lambda name: -self._squares[name])
        _LOG.warning(
            "%s: %.2g %% of the elements hold %.0f %% of what is left to be sent, up to %.0f thresholds each. Their "
            "updates are far larger than the others', so they reach the other nodes late: give them a density of "
            "their own, by name, or a lower one to all",
            ", ".join(names[:_NAMED_TENSORS]),
            100.0 * self._count / self._numel,
            100.0 * square / self._square,
            self._largest / self._threshold,
        )
