"""A training whose parameters one process owns: workers send it gradients and read the parameters, nothing else.

`Host` applies the descent to every gradient that comes. A `Worker` on the same machine reads the parameters in shared
memory, without a copy; on another machine it has a replica, which the host's messages change. Only the host has an
optimiser. Every gradient is numbered, and its worker keeps it until the host has saved what it did, so that neither
side can lose or repeat one when the other is killed.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import pickle
import struct
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .codec import Encoder
from .errors import GradwireError, MessageError, Mismatch, NotConnected, WouldBlock
from .hosted import HostedModel
from .message import Message, apply, apply_many, decode, dense_message, max_message_bytes
from .policy import TargetBytes, ThresholdPolicy
from .shared_memory import layout_of
from .state import check_format, check_range
from .transport import Node, Peer, PeerLost

__all__ = ["SGD", "Host", "Worker"]

logger = logging.getLogger(__name__)

_FORMAT: Final = 1  # of the messages and of the checkpoint
_NUMBERS: Final = 1 << 56  # ``divmod(tag, _NUMBERS)`` is kind and number
# Before a gradient: epoch, version for which it was computed, number of the oldest gradient that its worker keeps.
_HEADER: Final = struct.Struct("<QQQ")
_MESSAGE_BYTES: Final = 32 << 20  # most bytes of a message, half of what a node takes by default
_LEAST_BYTES: Final = 4096  # with less space no change is sent at all
_RECORD_BYTES: Final = 4096  # more than sealing adds to a small message
# Elements of a part of a snapshot. Gradients and changes pass between two parts.
_PART: Final = 1 << 16
_PARTS_PER_TURN: Final = 64  # about 20 ms, so that a new worker does not delay the descent
_CHUNK: Final = 1 << 15  # elements of temporary arrays, which stay in the cache
_TICK_S: Final = 0.01

_Arrays: TypeAlias = list[NDArray[Any]]
_Threshold: TypeAlias = ThresholdPolicy | TargetBytes | float | None


class _Kind(enum.IntEnum):
    """The kind of a message between host and worker: the top byte of its tag."""

    WELCOME = 1  # the host to every peer that connects: a status, and the layout of the parameters
    REPLICA = 2  # number: epoch; asks for the parameters and their changes
    GRADIENT = 3  # number: of the worker's run
    STATUS = 4  # what became of a worker's gradients
    CHANGE = 5  # number: version of the parameters after it
    PART = 6  # number: version; a part of the parameters, for a new replica
    END = 7  # number: the last version


class SGD:
    """Stochastic gradient descent, with momentum as ``torch.optim.SGD`` has it.

    Without momentum a step touches only the elements that the gradients change.

    Args:
        lr: learning rate, above 0; may be changed between two steps.
        momentum: in [0, 1).
        nesterov: use Nesterov's momentum.

    Raises:
        ValueError: an argument is out of range.

    >>> import numpy as np, gradwire as gw
    >>> params = [np.ones(2, np.float32)]
    >>> gradient = gw.dense_message(np.array([1.0, -2.0], np.float32))
    >>> gw.coprocessor.SGD(0.5).apply([gradient], params)
    >>> params[0].tolist()
    [0.5, 2.0]
    """

    def __init__(self, lr: float, momentum: float = 0.0, *, nesterov: bool = False) -> None:
        if not 0.0 < lr < math.inf:
            raise ValueError(f"lr must be finite and above 0, got {lr!r}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum!r}")
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum above 0")
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self._velocity: _Arrays = []

    def apply(self, messages: list[Message], params: _Arrays) -> None:
        """Change ``params``, float32 or float64 arrays, in place by a step along minus the mean of the messages."""
        scale = 1.0 / len(messages)
        if self.momentum:
            self._velocity = self._velocity or [np.zeros_like(param) for param in params]
            for velocity in self._velocity:
                velocity *= self.momentum
            apply_many(messages, self._velocity, scale)
            factor = self.lr * self.momentum if self.nesterov else self.lr
            for param, velocity in zip(params, self._velocity, strict=True):
                flat = param.reshape(-1)
                for start in range(0, flat.size, _CHUNK):
                    part = slice(start, start + _CHUNK)
                    flat[part] -= factor * velocity.reshape(-1)[part]
        if self.nesterov or not self.momentum:
            apply_many(messages, params, -self.lr * scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the velocity, not copied."""
        return {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a copy of the velocity of ``state``."""
        self._velocity = [np.array(velocity) for velocity in state["velocity"]]


class _TorchOptimizer:
    """A ``torch.optim`` optimizer as a descent for the arrays whose memory its tensors share."""

    def __init__(self, optimizer: Any, tensors: list[Any], params: _Arrays) -> None:
        known = {id(tensor) for tensor in tensors}
        optimized = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        others = [tensor for tensor in optimized if id(tensor) not in known]
        if others:
            raise ValueError(
                f"{len(others)} of the optimizer's {len(optimized)} tensors are not among the {len(tensors)} "
                "parameters: give both the same list(model.parameters())"
            )
        self._optimizer = optimizer
        self._tensors = tensors
        # One array, into which messages are decoded, and views of it as the tensors' gradients.
        self._gradient = np.zeros(sum(param.size for param in params), params[0].dtype)
        self._gradients = _views(self._gradient, [param.shape for param in params])

    def apply(self, messages: list[Message], _params: _Arrays) -> None:
        """Step along the mean of the messages; the parameters are those of the tensors."""
        self._gradient.fill(0.0)
        apply_many(messages, self._gradient, 1.0 / len(messages))
        for tensor, gradient in zip(self._tensors, self._gradients, strict=True):
            tensor.grad = sys.modules["torch"].from_numpy(gradient)
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load torch's state."""
        self._optimizer.load_state_dict(state)


# ---- the host --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Run:
    """One run of a worker, as the host knows it: the first two are in the checkpoint."""

    applied: int = 0  # each gradient below this number was applied or refused
    refused: list[int] = field(default_factory=list)  # of these, unless the worker is known to know
    saved: int = 0  # ``applied`` in the last checkpoint
    taken: int = 0  # the worker need not wait for the gradients below this number
    # Gradients are taken only with the number of the last welcome. Those sent before are sent again, so that none can
    # overtake another when a connection is replaced.
    epoch: int = 0
    copied: int | None = None  # elements that the replica has got; None: it reads the hosted model
    is_welcomed: bool = False
    is_told: bool = False  # whether the last status was sent


class _Arrival(NamedTuple):
    """A gradient that has come and waits for its step."""

    run: _Run
    epoch: int
    number: int
    version: int  # of the parameters for which it was computed
    message: Message


class _Replicas:
    """The parameters as the workers on other machines have them, all the same, and the changes that they need.

    What a replica lacks is always the difference to the host's parameters. The encoder's residual is set to it before
    a message is encoded, so that a message that could not be sent loses nothing, and rounding errors do not add up.
    """

    def __init__(self, params: _Arrays, threshold: _Threshold) -> None:
        self._params = params
        self._threshold = threshold
        self._encoder: Encoder | None = None
        self._published = np.empty(0, params[0].dtype)

    def begin(self) -> None:
        """Take the present parameters as those of the replicas, of which there is none yet, or no more."""
        self._published = np.concatenate(self._params, axis=None)
        if self._encoder is None:
            self._encoder = Encoder(
                self._published.size, self._threshold, dtype=self._published.dtype
            )

    def send_change(self, node: Node, runs: dict[Peer, _Run], version: int) -> None:
        """Send the replicas the large elements of what they lack, or nothing if there is no space for it."""
        if self._encoder is None or not runs:
            return
        ceiling = min(max(max_message_bytes(self._published.size), _LEAST_BYTES), _MESSAGE_BYTES)
        while not node.has_room(len(runs) * (ceiling + _RECORD_BYTES)):
            if ceiling <= _LEAST_BYTES:
                return
            ceiling //= 2
        shapes = [param.shape for param in self._params]
        self._encoder.hold_difference(self._params, _views(self._published, shapes))
        message = self._encoder.encode(max_bytes=ceiling)
        for peer, run in runs.items():
            if not _publish(node, _Kind.CHANGE, version, message, peer):
                run.copied = 0  # this replica lacks a change now, so it gets all parameters again
        apply(message, self._published)

    def send_parts(self, node: Node, runs: dict[Peer, _Run], version: int) -> None:
        """Send new replicas as much of the parameters as there is space for.

        The parts come from parameters that go on changing. That is right because changes and parts arrive in order:
        a change alters the parts that a replica has, and the later ones contain it.
        """
        turns = _PARTS_PER_TURN
        for peer, run in runs.items():
            while turns and run.copied is not None and run.copied < self._published.size:
                part = self._published[run.copied : run.copied + _PART]
                # Half of the space is left for changes.
                if not node.has_room(2 * part.nbytes):
                    return
                message = dense_message(part, key=run.copied // _PART)
                if not _publish(node, _Kind.PART, version, message, peer):
                    break
                run.copied += part.size
                turns -= 1


class Host:
    """The process that owns the parameters and applies the descent.

    Call ``step`` until the training is over. A host that leaves its ``with`` block normally saves, and tells workers
    and readers that the training has ended; one that is killed can be started again with the same arguments, and goes
    on from ``path``. Workers wait meanwhile and send again what is not in the checkpoint; nothing is applied twice.

    Args:
        node: connected to nobody else's host; the workers have its address. Only this host receives from it.
        params: the initial parameters: arrays or tensors, all float32 or all float64, on the CPU; of tensors the data
            moves to the memory of ``params`` below, others are copied.
        optimizer: `SGD`, or a ``torch.optim`` optimizer of the tensors.
        name: of the `HostedModel` for the readers and workers of this machine; None: there are none.
        path: file of the checkpoint, loaded at first if it exists, and replaced every ``save_every`` steps. It is
            a pickle, so nobody else must be able to write it. None: gradients that a killed host has applied are lost
            with its parameters.
        save_every: steps between two checkpoints. Workers keep their gradients for so long.
        gradients_per_step: gradients whose mean makes a step.
        max_staleness: a gradient is refused if more steps than this have changed the parameters for which it was
            computed; it stays in its worker's residual. None: any is taken. A worker that computes for longer than so
            many steps never contributes.
        threshold: of the changes for workers on other machines, as for `Encoder`.

    Attributes:
        params: the parameters: arrays in shared memory, or in that of this process without a ``name``.
        version: steps so far, those before a restart included. Also the version of the hosted model.
        refused: gradients refused by this process.

    Raises:
        TypeError: parameters of other dtypes, or an optimizer of another kind.
        ValueError: an option out of range, no parameters, an optimizer of other tensors, a file that is no checkpoint,
            or a living process hosts a model of this name.
        Mismatch: the checkpoint is of other parameters.
        Closed: the node has been closed.

    >>> import numpy as np, gradwire as gw
    >>> node = gw.Node("127.0.0.1:0", secret=bytes(range(32)))
    >>> with gw.coprocessor.Host(node, [np.zeros(3, np.float32)], gw.coprocessor.SGD(0.1)) as host:
    ...     host.step(timeout_s=0.0), host.version  # no gradient has come
    (False, 0)
    >>> _ = node.close()
    """

    def __init__(
        self,
        node: Node,
        params: Any,
        optimizer: Any,
        *,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        gradients_per_step: int = 1,
        max_staleness: int | None = None,
        threshold: _Threshold = None,
    ) -> None:
        check_range("save_every", save_every, 1, 2**53)
        check_range("gradients_per_step", gradients_per_step, 1, 2**20)
        if max_staleness is not None:
            check_range("max_staleness", max_staleness, 0, 2**53)
        tensors, initial = _arrays_of(params)
        node.has_room(0)  # refuses a closed node before anything is made
        self.node = node
        self.save_every = save_every
        self.gradients_per_step = gradients_per_step
        self.max_staleness = max_staleness
        self.version = 0
        self.refused = 0
        self._path = None if path is None else Path(path)
        self._layout = layout_of(initial)
        self._runs: dict[tuple[int, int], _Run] = {}
        self._connected: dict[Peer, _Run] = {}
        self._epoch = 0
        self._queue: deque[_Arrival] = deque()
        self._optimizer = _optimizer_of(optimizer, tensors, initial)
        state = self._load()
        initial = state.get("params", initial)
        self._model: HostedModel | None = None
        self.params = [np.array(array) for array in initial] if name is None else []
        if name is not None:
            self._model = HostedModel(name, initial, version=self.version)
            self.params = self._model.params
        _move(tensors, self.params)
        if state:
            self._optimizer.load_state_dict(state["optimizer"])
        self._replicas = _Replicas(self.params, threshold)

    def step(self, timeout_s: float = 1.0) -> bool:
        """Apply one step of the descent if enough gradients have come, or come in time; return whether they have.

        Raises:
            NonFiniteUpdate: the parameters are no longer finite, so their change cannot be sent.
            Closed: the node has been closed.
        """
        end_s = time.monotonic() + timeout_s
        self._receive(0.0)
        while not (is_due := self._select()) and (left_s := end_s - time.monotonic()) > 0.0:
            self._tell()
            self._receive(min(left_s, _TICK_S))
        if is_due:
            self._apply([self._queue.popleft() for _ in range(self.gradients_per_step)])
            self._replicas.send_change(self.node, self._with_replica(), self.version)
            if self._path is None or self.version % self.save_every == 0:
                self.save()
        self._tell()
        return is_due

    def _apply(self, arrivals: list[_Arrival]) -> None:
        messages = [arrival.message for arrival in arrivals]
        with nullcontext() if self._model is None else self._model.writing():
            self._optimizer.apply(messages, self.params)
        self.version += 1
        for arrival in arrivals:
            self._settle(arrival)

    def _settle(self, arrival: _Arrival) -> None:
        run = arrival.run
        run.applied = arrival.number + 1
        run.taken = max(run.taken, run.applied)
        run.is_told = False

    def _select(self) -> bool:
        """Refuse gradients that are too old, forget those that come again, and return whether a step is due."""
        waiting: deque[_Arrival] = deque()
        for arrival in self._queue:
            run = arrival.run
            if arrival.epoch != run.epoch or arrival.number < run.applied:
                continue
            age = self.version - arrival.version
            # A worker's versions never fall, so that none of its earlier gradients can still be waiting.
            if self.max_staleness is not None and age > self.max_staleness:
                run.refused.append(arrival.number)
                self.refused += 1
                self._settle(arrival)
            else:
                waiting.append(arrival)
        self._queue = waiting
        is_due = len(waiting) >= self.gradients_per_step
        if not is_due:
            # Workers that waited until these are applied might wait for each other.
            for arrival in waiting:
                if arrival.number >= arrival.run.taken:
                    arrival.run.taken = arrival.number + 1
                    arrival.run.is_told = False
        return is_due

    def _receive(self, timeout_s: float) -> None:
        events = self.node.events()
        lost = {event.peer for event in events if isinstance(event, PeerLost)}
        peers = set(self.node.peers)
        for peer in self._connected.keys() & lost | self._connected.keys() - peers:
            del self._connected[peer]
        for peer in peers - self._connected.keys():
            self._welcome(peer)
        for peer, tag, payload in self.node.receive(timeout_s):
            run = self._connected.get(peer)
            if run is None:
                continue
            kind, number = divmod(tag, _NUMBERS)
            if kind == _Kind.REPLICA and number == run.epoch:
                if not self._with_replica():
                    self._replicas.begin()
                run.copied = 0
            elif kind == _Kind.GRADIENT:
                try:
                    self._add(run, number, payload)
                except (MessageError, struct.error) as error:
                    # Its worker keeps the gradient, and the others must not suffer.
                    logger.error("gradient %d of %s is not valid: %s", number, peer.address, error)
                    run.epoch = 0

    def _welcome(self, peer: Peer) -> None:
        """Begin with a worker, or begin again after its connection was lost."""
        run = self._runs.setdefault((peer.id, peer.incarnation), _Run())
        self._connected[peer] = run
        self._epoch += 1
        run.epoch = self._epoch
        run.taken = run.applied
        run.copied = None
        run.is_welcomed = False
        run.is_told = False

    def _add(self, run: _Run, number: int, payload: memoryview) -> None:
        epoch, version, oldest = _HEADER.unpack_from(payload)
        message = Message.parse(payload[_HEADER.size :])
        expected = _numel(self._layout)
        if message.numel != expected:
            raise MessageError(
                f"a gradient of {message.numel} elements for parameters of {expected}"
            )
        run.refused = [refused for refused in run.refused if refused >= oldest]
        self._queue.append(_Arrival(run, epoch, number, version, message))

    def _with_replica(self) -> dict[Peer, _Run]:
        runs = self._connected.items()
        return {peer: run for peer, run in runs if run.copied is not None}

    def _tell(self) -> None:
        """Send workers what they do not know yet, as far as there is space."""
        for peer, run in self._connected.items():
            if run.is_told:
                continue
            document = {
                "epoch": run.epoch,
                "version": self.version,
                "taken": run.taken,
                "saved": run.saved,
                "refused": run.refused,
            }
            kind = _Kind.STATUS
            if not run.is_welcomed:
                kind = _Kind.WELCOME
                name = self._model.name if self._model else None
                document |= {
                    "format": _FORMAT,
                    "name": name,
                    "layout": self._layout,
                    "applied": run.applied,
                }
            run.is_told = _publish(self.node, kind, 0, json.dumps(document).encode(), peer)
            run.is_welcomed |= run.is_told
        self._replicas.send_parts(self.node, self._with_replica(), self.version)

    def save(self) -> None:
        """Write the checkpoint now. The old one is replaced only when the new one is on the disk.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path is not None:
            state = {
                "format": _FORMAT,
                "version": self.version,
                "params": self.params,
                "optimizer": self._optimizer.state_dict(),
                "runs": {name: (run.applied, run.refused) for name, run in self._runs.items()},
            }
            temporary = self._path.with_name(self._path.name + ".tmp")
            with temporary.open("wb") as file:
                pickle.dump(state, file, protocol=5)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        for run in self._runs.values():
            run.is_told = run.is_told and run.saved == run.applied
            run.saved = run.applied

    def _load(self) -> dict[str, Any]:
        """Return the state of the checkpoint; empty if there is none."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            with self._path.open("rb") as file:
                state: dict[str, Any] = pickle.load(file)  # noqa: S301  (an earlier run of this host wrote it)
            check_format(state, _FORMAT, f"the checkpoint {self._path}")
        except (pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise ValueError(
                f"{self._path} is no checkpoint of a host ({error}): move it away to begin anew"
            ) from error
        _check_layout(layout_of(state["params"]), self._layout, f"the checkpoint {self._path}")
        self.version = state["version"]
        for name, (applied, refused) in state["runs"].items():
            self._runs[name] = _Run(applied, refused, saved=applied)
        logger.info("going on from version %d in %s", self.version, self._path)
        return state

    def finish(self, timeout_s: float = 5.0) -> None:
        """Save, and tell workers and readers that the training has ended.

        Args:
            timeout_s: longest wait for space for these messages.
        """
        self.save()
        if self._model is not None:
            self._model.finish()
        self._tell()
        for peer in self.node.peers:  # also to those that are about to take part
            if not _publish(self.node, _Kind.END, self.version, b"", peer):
                self.node.drain(timeout_s)
                _publish(self.node, _Kind.END, self.version, b"", peer)

    def close(self) -> None:
        """End the hosting; workers wait for another host unless the training is finished."""
        if self._model is not None:
            self._model.close()

    def __enter__(self) -> Host:
        """Return the host."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the training, unless by an exception, and close the host."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


# ---- the workers -----------------------------------------------------------------------------------------------------


class Worker:
    """A process that computes gradients for a `Host`.

    Every gradient is applied, in the encoder's residual, or kept here until the host has saved it. If the host is
    killed, the worker waits until it is there again. A killed worker's residual and the gradients that the host had not
    got are lost; another worker takes its place by being started.

    Args:
        node: with the host's address among its peers. Only this worker receives from it.
        params: arrays or tensors like the host's; of tensors the data moves to the memory of ``params`` below. None:
            whatever the host has.
        name: of the host's model, to read it in shared memory; None: the host is on another machine, or reading a
            replica of one's own is preferred.
        threshold: of the gradients, as for `Encoder`.
        on_nonfinite: as for `Encoder`.
        in_flight: gradients that may wait for their step when ``send`` returns. 0 waits for the step, so that the next
            gradient sees it; 1 computes meanwhile.
        timeout_s: longest wait for the host.

    Attributes:
        params: the parameters, read-only arrays: of the hosted model, which change at any time; or of the replica,
            which change during ``send`` and ``refresh`` only and lack the residual of the host's encoder. Writing to
            a tensor of the hosted model kills the process. After a restart of the host they are other arrays.
        encoder: has the residual.
        version: of ``params`` when the last call returned.
        is_finished: whether the host has ended the training.
        refused: gradients that were too old, and went back to the residual.

    Raises:
        Mismatch: the host has other parameters, or another name.
        FileNotFoundError: the host is on another machine, where ``name`` must be None.
        TimeoutError: no host answers.
        GradwireError: the training has ended, or the node had another worker before.
        TypeError, ValueError: an unsuitable argument.

    >>> import numpy as np, threading, gradwire as gw
    >>> nodes = [gw.Node("127.0.0.1:0", secret=bytes(range(32))) for _ in range(2)]
    >>> def train():
    ...     with gw.coprocessor.Host(nodes[0], [np.zeros(2, np.float32)], gw.coprocessor.SGD(0.5)) as host:
    ...         while host.version < 1:
    ...             host.step()
    >>> thread = threading.Thread(target=train)
    >>> thread.start()
    >>> nodes[1].add_peer(nodes[0].address)
    >>> worker = gw.coprocessor.Worker(nodes[1], threshold=gw.FixedThreshold(1.0), in_flight=0)
    >>> _ = worker.send([np.array([2.0, 0.5], np.float32)])
    >>> worker.version, worker.encoder.residual.tolist()
    (1, [1.0, 0.5])
    >>> thread.join()
    >>> _ = [node.close() for node in nodes]
    """

    def __init__(
        self,
        node: Node,
        params: Any = None,
        *,
        name: str | None = None,
        threshold: _Threshold = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        in_flight: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        check_range("in_flight", in_flight, 0, 2**20)
        self._tensors, arrays = ([], []) if params is None else _arrays_of(params)
        self._layout = layout_of(arrays)
        self.node = node
        self.name = name
        self.in_flight = in_flight
        self.timeout_s = timeout_s
        self.version = 0
        self.is_finished = False
        self.refused = 0
        self.params: _Arrays = []
        self._flat: NDArray[Any] | None = None  # the replica
        self._model: HostedModel | None = None
        self._host: Peer | None = None
        self._epoch = 0
        self._kept: dict[int, tuple[int, Message]] = {}  # number: version, gradient
        self._taken = 0
        self._sent = 0  # in this epoch, each gradient below this number
        self._has_asked = False  # for the parameters
        self._is_ready = False
        self._wait(lambda: self._is_ready)
        numel = sum(array.size for array in self.params)
        dtype = self.params[0].dtype
        self.encoder = Encoder(numel, threshold, dtype=dtype, on_nonfinite=on_nonfinite)

    @property
    def kept(self) -> list[Message]:
        """The gradients that the host may not have, or may not have saved yet, oldest first."""
        return [message for _, message in self._kept.values()]

    def send(self, gradient: Any = None, *, dense: bool = False) -> bool:
        """Send the large elements of a gradient, and wait until few enough gradients wait for their step.

        Args:
            gradient: arrays like ``params``, on the CPU, or one of all elements; not modified. None: only what is in
                the residual.
            dense: send the gradient and the whole residual as they are; for small models, and as the last one of
                a worker that leaves.

        Returns:
            Whether the training goes on; if not, the gradient may not have been applied.

        Raises:
            NonFiniteUpdate: as ``Encoder.encode``; nothing was sent.
            TypeError, ValueError: as ``Encoder.encode``, or a dense message is too large.
            TimeoutError: the host did not answer in time; the gradient is kept, and sent by the next call.
            TooLarge: the node's ``message_bytes_max`` is too small for the message, which is kept.
            Closed: the node has been closed.
        """
        version = self.version  # before others' steps arrive, which the gradient does not know
        self.refresh()
        version = min(version, self.version)
        if self.is_finished:
            return False
        nbytes = max_message_bytes(self.encoder.numel, dense, self.encoder.dtype)
        if dense and nbytes > _MESSAGE_BYTES:
            raise ValueError(
                f"a dense gradient has {nbytes} bytes, more than {_MESSAGE_BYTES}: send it with dense=False"
            )
        number = self.encoder.step
        most = None if dense else _MESSAGE_BYTES
        message = self.encoder.encode(gradient, dense=dense, max_bytes=most)
        self._kept[number] = version, message
        self._wait(lambda: self._is_ready and self._waiting <= self.in_flight)
        return not self.is_finished

    def refresh(self, timeout_s: float = 0.0) -> int:
        """Take what the host has sent, wait up to ``timeout_s`` for some of it, and return the version.

        Raises:
            Closed: the node has been closed.
        """
        for peer, tag, payload in self.node.receive(timeout_s):
            kind, number = divmod(tag, _NUMBERS)
            if kind == _Kind.WELCOME:
                self._enter(peer, json.loads(bytes(payload)))
            elif kind == _Kind.END and self._host in (None, peer):
                self.is_finished = True
            elif peer == self._host:
                self._take(kind, number, payload)
        self._transmit()
        if self._model is not None:
            self.version = self._model.version
        return self.version

    def _take(self, kind: int, number: int, payload: memoryview) -> None:
        """Take a message of the host."""
        if kind == _Kind.STATUS:
            self._follow(json.loads(bytes(payload)))
        elif kind in (_Kind.CHANGE, _Kind.PART) and self._flat is not None:
            message = Message.parse(payload)
            self.version = number
            if kind == _Kind.CHANGE:
                # What it adds to parts that are still to come is overwritten by them.
                apply(message, self._flat)
                return
            start = message.key * _PART
            self._flat[start : start + message.numel] = decode(message)
            self._is_ready = start + message.numel == self._flat.size

    def _enter(self, peer: Peer, document: dict[str, Any]) -> None:
        """Begin with a host, or begin again after it was restarted or the connection was lost."""
        who = f"the host at {peer.address}"
        check_format(document, _FORMAT, who)
        self._layout = self._layout or document["layout"]
        _check_layout(document["layout"], self._layout, who)
        if document["applied"] > self._sent:
            raise GradwireError(
                f"{who} has applied {document['applied']} gradients of this node, of which this worker sent "
                f"{self._sent}: make a node for each worker"
            )
        self._host = peer
        self._epoch = document["epoch"]
        # A host that was restarted has an older version. Gradients for versions that no longer exist count as its own,
        # so that versions never fall from one gradient to the next.
        self.version = min(self.version, document["version"])
        for number, (version, message) in self._kept.items():
            self._kept[number] = min(version, document["version"]), message
        self._follow(document)
        self._sent = document["applied"]
        if self.name is None:
            self._has_asked = False
            self._is_ready = False  # until the last part has come
            if self._flat is None:
                shapes = [shape for _, shape in self._layout]
                self._flat = np.zeros(_numel(self._layout), self._layout[0][0])
                self._show(_views(self._flat, shapes))
            return
        if document["name"] != self.name:
            raise Mismatch(f"{who} has the model {document['name']!r}, this worker {self.name!r}")
        if self._model is None or not self._model.is_live:
            self._model = HostedModel.attach(self.name)
            self._show(self._model.params)
        self._is_ready = True

    def _show(self, arrays: _Arrays) -> None:
        """Make arrays the parameters."""
        _move(self._tensors, arrays)
        self.params = [array.view() for array in arrays]
        for param in self.params:
            param.flags.writeable = False

    def _follow(self, document: dict[str, Any]) -> None:
        """Take refused gradients back, and forget those that the host cannot lose any more."""
        if document["epoch"] != self._epoch:
            return
        for number in document["refused"]:
            if number in self._kept:
                apply(self._kept.pop(number)[1], self.encoder.residual)
                self.refused += 1
        for number in [number for number in self._kept if number < document["saved"]]:
            del self._kept[number]
        self._taken = document["taken"]

    def _transmit(self) -> None:
        """Send what was not sent in this epoch, as far as there is space."""
        if self._host is None:
            return
        if self._flat is not None and not self._has_asked:
            self._has_asked = _publish(self.node, _Kind.REPLICA, self._epoch, b"", self._host)
        oldest = min(self._kept, default=0)
        for number, (version, message) in self._kept.items():
            if number >= self._sent:
                payload = _HEADER.pack(self._epoch, version, oldest) + bytes(message)
                if not _publish(self.node, _Kind.GRADIENT, number, payload, self._host):
                    return
                self._sent = number + 1

    @property
    def _waiting(self) -> int:
        return sum(number >= self._taken for number in self._kept)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + self.timeout_s
        self.refresh()
        while not is_done() and not self.is_finished:
            if time.monotonic() >= end_s:
                raise TimeoutError(
                    f"no answer of the host within {self.timeout_s:g} s, {len(self._kept)} gradients are kept: is it "
                    f"running, and among the {len(self.node.peers)} peers of this node? Start it again, with its path"
                )
            self.refresh(_TICK_S)
        if not self._layout:
            raise GradwireError("the training ended before this worker could take part")

    def close(self) -> None:
        """Stop reading the hosted model; gradients that are still waiting go with the node."""
        if self._model is not None:
            self._model.close()

    def __enter__(self) -> Worker:
        """Return the worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the worker."""
        self.close()


# ---- arrays and messages ---------------------------------------------------------------------------------------------


def _publish(node: Node, kind: _Kind, number: int, payload: object, peer: Peer) -> bool:
    """Publish a message to a peer; return whether there was space and the peer is connected."""
    try:
        node.publish(payload, tag=kind * _NUMBERS + number, to=peer)
    except (WouldBlock, NotConnected):
        return False
    return True


def _arrays_of(params: Any) -> tuple[list[Any], _Arrays]:
    """Return those of the parameters that are tensors (all or none), and all as arrays.

    Raises:
        TypeError: of several dtypes, or another than float32 and float64.
        ValueError: there are none.
    """
    listed = [params] if hasattr(params, "dtype") else list(params)
    dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in listed})
    if dtypes not in (["float32"], ["float64"]) or not sum(math.prod(p.shape) for p in listed):
        kind = TypeError if dtypes else ValueError
        raise kind(
            f"the parameters are {len(listed)} arrays of {', '.join(dtypes) or 'no dtype'}: they must have elements, "
            "all of float32 or all of float64; give a copy of that dtype, and cast it where gradients are computed"
        )
    tensors = [param for param in listed if hasattr(param, "detach")]
    return tensors, [np.asarray(p.detach() if hasattr(p, "detach") else p) for p in listed]


def _optimizer_of(optimizer: Any, tensors: list[Any], arrays: _Arrays) -> Any:
    """Return an object with the methods of `SGD`.

    Raises:
        TypeError: an object of another kind.
        ValueError: a torch optimizer of other tensors.
    """
    if hasattr(optimizer, "param_groups"):
        return _TorchOptimizer(optimizer, tensors, arrays)
    if isinstance(optimizer, type) or not hasattr(optimizer, "apply"):
        raise TypeError(
            "optimizer must be a gradwire.coprocessor.SGD(...), or a torch.optim optimizer of the parameters, "
            f"got {optimizer!r}"
        )
    return optimizer


def _move(tensors: list[Any], arrays: _Arrays) -> None:
    """Let tensors have the memory of arrays."""
    with warnings.catch_warnings():
        # torch has no read-only tensors, and says so.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for tensor, array in zip(tensors, arrays, strict=bool(tensors)):
            tensor.data = sys.modules["torch"].from_numpy(array)


def _views(flat: NDArray[Any], shapes: Iterable[Sequence[int]]) -> _Arrays:
    """Return arrays of some shapes whose elements are those of one array, one after the other."""
    views: _Arrays = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(flat[start:end].reshape(shape))
        start = end
    return views


def _numel(layout: list[Any]) -> int:
    return sum(math.prod(shape) for _, shape in layout)


def _check_layout(layout: list[Any], expected: list[Any], what: str) -> None:
    """Refuse arrays of other dtypes or shapes, naming the first difference.

    Raises:
        Mismatch: they differ.
    """
    if len(layout) != len(expected):
        raise Mismatch(f"{what} has {len(layout)} arrays, this process {len(expected)}")
    for index, (theirs, ours) in enumerate(zip(layout, expected, strict=True)):
        if theirs != ours:
            raise Mismatch(f"array {index} of {what} is {theirs}, that of this process {ours}")
