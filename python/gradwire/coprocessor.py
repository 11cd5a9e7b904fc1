"""A training whose parameters one process owns: workers send it gradients and read the parameters, nothing else.

`Host` applies the descent to every gradient that comes. A `Worker` on the same machine reads the parameters in shared
memory; on another machine it has a replica, which the host's answers to its gradients change.

Nothing is lost or applied twice: a worker names with each gradient the one before it, and the host takes it only if it
took that one last, so not if it comes again, follows a refused one, or follows one that was lost with a connection. The
worker keeps each gradient until a checkpoint has it, and sends those that the host lacks again on a new connection.
"""

from __future__ import annotations

import enum
import io
import json
import logging
import math
import os
import reprlib
import secrets
import struct
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from .arrays import Arrays, blocks, check_order, copies, layouts, put
from .clock import LogLimit, now_s
from .codec import Encoder
from .errors import GradwireError, MessageError, Mismatch, NonFiniteUpdate, NotConnected, WouldBlock
from .hosted import HostedModel, listed
from .message import Message, apply, apply_many, decode, dense_message
from .policy import as_number
from .slices import (
    LEAST_SLICE_BYTES,
    SLICE_BYTES,
    Assembler,
    Outgoing,
    Slicer,
    slice_bytes_of,
    tag_of_slice,
)
from .state import check_flag, check_format, check_node, check_range, check_seconds
from .transport import Node, Peer, PeerJoined, Received, Ticket

__all__ = ["SGD", "Host", "Worker"]

logger = logging.getLogger(__name__)
_errors = LogLimit(logger.error)

_FORMAT: Final = 1  # of the messages and of the checkpoint
_HEADER: Final = struct.Struct("<5Q")  # a worker's run, a version of the parameters, three numbers
_MESSAGE_BYTES: Final = 32 << 20  # most of a message; half of what a node takes by default
_PART: Final = 1 << 22  # elements of a part of the parameters, between which the descent goes on
_RETRY_S: Final = 1.0  # between two questions of a worker that hears nothing
_TICK_S: Final = 0.01
_DRAIN_S: Final = 5.0
_WHO: Final = "a host or worker"
_NUMBERS: Final = 1 << 63  # of gradients and versions
_RUNS_MAX: Final = 64  # of workers, one after the other, on one node
_DIVERGED: Final = (
    "the training diverged: start the host again with a smaller rate, one of torch.optim's set after the checkpoint is "
    "loaded"
)


class _Kind(enum.IntEnum):
    """The kind of a message, its tag; with the numbers in its header, and what follows the header."""

    HELLO = 1  # of a worker, to all peers: last gradient saved, whether it has a replica
    WELCOME = 2  # the host's answer: as STATUS; its name and layout
    GRADIENT = 3  # for this version: its number, that of the gradient before it; the gradient
    ASK = 4  # of a worker, for a status
    STATUS = 5  # last gradient taken, saved, refused; the next part or change of the replica
    END = 6  # of the training; the host's name and layout
    SLICE = 7  # of a large gradient


@dataclass(eq=False)
class SGD:
    """Stochastic gradient descent, with momentum as ``torch.optim.SGD`` has it; ``lr`` may change between steps.

    Raises:
        ValueError: ``lr`` is not finite and above 0, ``momentum`` not in [0, 1), or 0 with ``nesterov``.

    >>> import numpy as np, gradwire as gw
    >>> params = [np.ones(2, np.float32)]
    >>> gw.coprocessor.SGD(0.5).apply([gw.dense_message(np.float32([1.0, -2.0]))], params)
    >>> params[0].tolist()
    [0.5, 2.0]
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = field(default=False, kw_only=True)
    _velocity: Arrays = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.lr = as_number("lr", self.lr)
        self.momentum = as_number("momentum", self.momentum)
        self.nesterov = check_flag("nesterov", self.nesterov)
        if not 0.0 < self.lr < math.inf:
            raise ValueError(f"lr must be finite and above 0, got {self.lr!r}")
        if not 0.0 <= self.momentum < 1.0 or (self.nesterov and not self.momentum):
            raise ValueError(
                f"momentum must be in [0, 1), with nesterov above 0, got {self.momentum!r}"
            )

    def apply(self, messages: list[Message], params: Arrays) -> None:
        """Change ``params``, float32 or float64 arrays, in place by a step along minus the mean of the messages."""
        scale = 1.0 / len(messages)
        if self.momentum:
            self._velocity = self._velocity or [np.zeros_like(param) for param in params]
            for velocity in self._velocity:
                velocity *= self.momentum
            apply_many(messages, self._velocity, scale)
            factor = self.lr * self.momentum if self.nesterov else self.lr
            for pair in zip(params, self._velocity, strict=True):
                for param, velocity in blocks(*pair):
                    param -= factor * velocity
        if self.lr and (self.nesterov or not self.momentum):
            apply_many(messages, params, -self.lr * scale)

    def state_dict(self) -> dict[str, Arrays]:
        """Return the velocity, not copied."""
        return {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Arrays]) -> None:
        """Go on with a copy of the velocity of ``state``; raise `ValueError` if it is not finite."""
        _check_finite("velocity", state["velocity"])
        self._velocity = copies(state["velocity"])


class _TorchOptimizer:
    """A ``torch.optim`` optimizer with the methods of `SGD`, for arrays whose memory its tensors share."""

    def __init__(self, optimizer: Any, tensors: list[Any], params: Arrays) -> None:
        self._optimizer = optimizer
        self._tensors = tensors
        if unknown := self._order().count(None):
            raise ValueError(
                f"{unknown} of the optimizer's {len(self._order())} tensors are not among the {len(tensors)} "
                "parameters: give both the same list(model.parameters())"
            )
        self._gradients = [np.zeros_like(param, order="C") for param in params]
        self._torch = sys.modules["torch"]

    def _order(self) -> list[int | None]:
        """Return which parameters the optimizer has, in its order, by which torch tells their states apart."""
        places = {id(tensor): place for place, tensor in enumerate(self._tensors)}
        groups = self._optimizer.param_groups
        return [places.get(id(tensor)) for group in groups for tensor in group["params"]]

    @property
    def lr(self) -> float:
        return max(float(group.get("lr", 0.0)) for group in self._optimizer.param_groups)

    def apply(self, messages: list[Message], _params: Arrays) -> None:
        for gradient in self._gradients:
            gradient.fill(0.0)
        apply_many(messages, self._gradients, 1.0 / len(messages))
        for tensor, gradient in zip(self._tensors, self._gradients, strict=True):
            tensor.grad = self._torch.from_numpy(gradient)
        self._optimizer.step()

    def state_dict(self) -> dict[str, Arrays]:
        buffer = io.BytesIO()
        self._torch.save({**self._optimizer.state_dict(), "order": self._order()}, buffer)
        return {"torch": [np.frombuffer(buffer.getbuffer(), np.uint8)]}

    def load_state_dict(self, state: dict[str, Arrays]) -> None:
        buffer = io.BytesIO(state["torch"][0].tobytes())
        given = self.lr
        saved = self._torch.load(buffer, weights_only=True)
        if (order := saved.pop("order")) != self._order():
            text = f"the checkpoint's optimizer has the parameters in the order {order}, this one {self._order()}"
            raise Mismatch(text)
        self._optimizer.load_state_dict(saved)
        if self.lr != given:  # as of torch's own checkpoints
            text = "the optimizer has the checkpoint's rate of %g and other options, rather than %g: set them now"
            logger.warning(text, self.lr, given)


@dataclass(eq=False)
class _Run:
    """A run of a worker, as the host knows it, by the numbers of its gradients."""

    id: int
    taken: int = 0  # the last that is applied, or in the batch of the next step
    saved: int = 0  # the same in the last checkpoint
    refused: int = 0  # the last that was too old or too large
    has_replica: bool = False
    peer: Peer | None = None  # which has begun it; None: it is from a checkpoint


class _Replica:
    """The parameters as a worker on another machine has them when it has read what was sent."""

    def __init__(self, params: Arrays, version: int) -> None:
        self._flat, self._params = _flat_and_views(layouts(params))
        put(self._params, params)
        self._parts = 0  # that were sent; after all of them changes follow
        self.version = version
        self.ticket: Ticket | None = None  # of the last answer
        self.outgoing: Outgoing | None = None  # an answer of which the transport has not taken all

    def advance(self, params: Arrays, version: int, encoder: Encoder) -> Message | None:
        """Return the next part of the parameters, or their change up to this version."""
        start = self._parts * _PART
        if start < self._flat.size:
            self._parts += 1
            return dense_message(self._flat[start : start + _PART], key=self._parts - 1)
        if self.version == version:
            return None
        # The residual is all that the replica lacks: elements that are not sent now are sent later.
        message = encoder.encode(params, before=self._params, max_bytes=_MESSAGE_BYTES)
        apply(message, self._flat)
        self.version = version
        return message


class Host(AbstractContextManager["Host"]):
    """The process that owns the parameters and applies the descent, until ``step`` is not called any more.

    A host that leaves its ``with`` block normally saves, and tells workers and readers that the training has ended. A
    killed host can be started again with the same arguments: it goes on from ``path``, and workers, which wait
    meanwhile, send again what is not in the checkpoint. Nothing is applied twice.

    Args:
        node: the workers have its address. Only this host receives from it.
        params: the initial parameters: a list of arrays or tensors, all float32 or all float64, on the CPU; copied to
            the memory of ``host.params``, where the data of tensors moves, too.
        optimizer: `SGD`, or a ``torch.optim`` optimizer of the tensors.
        name: of the `HostedModel` for the readers and workers of this machine; None: there are none.
        path: file of the checkpoint, which is data: loading it runs no code; loaded if it exists. None: what a killed
            host has applied is lost with its parameters.
        save_every: steps between two checkpoints. Workers keep their gradients for so long.
        gradients_per_step: gradients whose mean makes a step.
        max_staleness: a gradient is refused if more steps than this have changed the parameters for which it was
            computed; it goes back to its worker's residual. None: any is taken.
        threshold: of the changes of replicas, as for `Encoder`.

    Attributes:
        version: steps so far, those before a restart included. Also the version of the hosted model.
        refused: gradients refused by this process: too old, or so large that times the learning rate they overflow.

    Raises:
        FileNotFoundError: there is no folder for ``path``.
        TypeError, ValueError: an unsuitable argument, or a living process hosts a model of this name.
        Mismatch: the checkpoint is of other parameters or of another optimizer.

    >>> import numpy as np, gradwire as gw
    >>> node = gw.Node("127.0.0.1:0", secret=bytes(range(32)))
    >>> with node, gw.coprocessor.Host(node, [np.zeros(3, np.float32)], gw.coprocessor.SGD(0.1)) as host:
    ...     host.step(timeout_s=0.0), host.version  # no gradient has come
    (False, 0)
    """

    def __init__(
        self,
        node: Node,
        params: Iterable[Any],
        optimizer: Any,
        *,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        gradients_per_step: int = 1,
        max_staleness: int | None = None,
        threshold: Any = None,
    ) -> None:
        check_range("save_every", save_every, 1, 2**53)
        check_range("gradients_per_step", gradients_per_step, 1, 2**20)
        check_range("max_staleness", 0 if max_staleness is None else max_staleness, 0, 2**53)
        check_node(node)
        given = listed(params)
        initial = [np.asarray(p.detach() if hasattr(p, "detach") else p) for p in given]
        self._layout = [type(optimizer).__name__, *layouts(initial)]
        if {str(array.dtype) for array in initial} not in ({"float32"}, {"float64"}):
            raise TypeError(
                f"parameters must be all float32 or all float64, got {layouts(initial)}"
            )
        # Refuses now what the first replica's would refuse; a budget may be too small for so many elements.
        Encoder(_numel(initial), threshold, keeps_residual=False)
        if hasattr(optimizer, "param_groups"):
            optimizer = _TorchOptimizer(optimizer, given, initial)
        elif not isinstance(optimizer, SGD):
            raise TypeError(
                f"optimizer must be an SGD or from torch.optim, got {reprlib.repr(optimizer)}"
            )
        self.node = node
        self.save_every = save_every
        self.gradients_per_step = gradients_per_step
        self.max_staleness = math.inf if max_staleness is None else max_staleness
        self.threshold = threshold
        self.version = 0
        self.refused = 0
        self._optimizer: Any = optimizer  # None while it steps, and after an interrupted step
        own_bytes = slice_bytes_of(node, _WHO)
        self._path = None if path is None else Path(path)
        if self._path is not None and not self._path.parent.is_dir():
            raise FileNotFoundError(
                f"path is {str(path)!r}, whose folder does not exist: make it first"
            )
        self._runs: dict[int, _Run] = {}
        self._replicas: dict[Peer, _Replica] = {}
        self._inbox: deque[Received] = deque()
        self._batch: list[Message] = []  # the gradients of the next step
        self._answers: dict[Peer, tuple[_Run, int]] = {}  # to what kind of message
        if self._path is not None and self._path.exists():
            initial = self._load(self._path)
        else:
            _check_finite("parameters", initial)
        self._model = None if name is None else HostedModel(name, initial, version=self.version)
        self.params = self._model.params if self._model else copies(initial)
        _move(given, self.params)
        self._assembler = Assembler(_largest_bytes(self.params))
        self._slice_bytes: dict[Peer, int] = {}
        self._slicer = Slicer(
            node,
            _Kind.SLICE,
            lambda peer: peer,
            lambda outgoing: self._slice_bytes.get(outgoing.receiver, own_bytes),
        )

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(_numel(self.params), self.threshold, dtype=self.params[0].dtype)

    def step(self, timeout_s: float = 1.0) -> bool:
        """Apply one step of the descent if enough gradients have come, or come in time; return whether they have.

        Raises:
            NonFiniteUpdate: the parameters are no longer finite, as every ``save_every``-th step and replicas find out.
            ValueError: the learning rate is now too large for a gradient that has come; nothing has changed.
            OSError: the checkpoint cannot be written.
            GradwireError: in an earlier step the optimiser has raised an error, or the parameters were not finite.
        """
        optimizer = self._whole_optimizer()
        end_s = time.monotonic() + check_seconds("timeout_s", timeout_s, least=-math.inf)
        is_due = self._receive(0.0)
        while not is_due and (left_s := end_s - time.monotonic()) > 0.0:
            self._answer()
            is_due = self._receive(min(left_s, _TICK_S))
        if is_due:
            for message in self._batch:  # the rate may be another than when they came
                if message.kind != "dense" and (reason := self._overflow_of(message)):
                    raise ValueError(f"a gradient that has come needs a smaller lr: {reason}")
            is_kept = (self.version + 1) % self.save_every == 0
            self._optimizer = None
            with nullcontext() if self._model is None else self._model.writing():
                optimizer.apply(self._batch, self.params)
                if is_kept:  # a pass over all parameters is too dear for steps that change a few
                    _check_finite(_DIVERGED, self.params, NonFiniteUpdate)
            self._optimizer = optimizer
            self._batch.clear()
            self.version += 1
            if self._path is None or is_kept:
                self._write()
        self._answer()
        return is_due

    def _whole_optimizer(self) -> Any:
        """Return the optimiser; raise `GradwireError` if only a part of the parameters may have its last step."""
        if self._optimizer is None:
            raise GradwireError(
                f"step {self.version + 1} of the descent was interrupted or left no finite parameters, so a part of "
                "the parameters may have it: start the host again, from its checkpoint"
            )
        return self._optimizer

    def _receive(self, timeout_s: float) -> bool:
        """Take messages until the batch is complete, and return whether it is."""
        if not self._inbox:
            self._inbox.extend(self.node.receive(timeout_s))
        while self._inbox and len(self._batch) < self.gradients_per_step:
            peer, kind, payload = self._inbox[0]
            try:
                if kind == _Kind.SLICE:
                    kind = tag_of_slice(payload)
                    if kind != _Kind.GRADIENT:
                        raise MessageError(f"slices of a message of kind {kind}")
                    if whole := self._assembler.add(peer, kind, payload):
                        self._inbox.insert(1, Received(peer, kind, whole))
                else:
                    self._take(peer, kind, payload)
            except (MessageError, struct.error) as error:
                # Its worker keeps the gradient and waits; the others must not suffer.
                _errors.log(peer, now_s(), "a message of %s is invalid: %s", peer.address, error)
            self._inbox.popleft()  # last: the call after an interrupted one takes it again
        return len(self._batch) >= self.gradients_per_step

    def _take(self, peer: Peer, kind: int, payload: memoryview) -> None:
        run_id, version, number, other, slice_bytes = _HEADER.unpack_from(payload)
        if max(version, number, other) >= _NUMBERS:
            raise MessageError(f"numbers {version}, {number} and {other}")
        if kind == _Kind.HELLO:
            slice_bytes = min(_checked_slice_bytes(slice_bytes), slice_bytes_of(self.node, _WHO))
            self._slice_bytes[peer] = slice_bytes
            of_peer = [run.id for run in self._runs.values() if run.peer == peer]
            if run_id not in self._runs and len(of_peer) >= _RUNS_MAX:
                del self._runs[of_peer[0]]
            run = self._runs.setdefault(run_id, _Run(run_id, peer=peer))
            # A host without the checkpoint that has these gradients cannot get them again.
            run.taken = max(run.taken, number)
            run.saved = max(run.saved, number)
            run.has_replica = bool(other)
            self._replicas.pop(peer, None)
            self._answers[peer] = run, kind
        elif kind in (_Kind.GRADIENT, _Kind.ASK) and run_id in self._runs:
            run = self._runs[run_id]
            self._answers.setdefault(peer, (run, kind))
            if kind == _Kind.GRADIENT and other == run.taken:
                message = Message.parse(payload[_HEADER.size :])
                if message.numel != (numel := _numel(self.params)):
                    raise MessageError(f"{message.numel} elements for parameters of {numel}")
                if reason := self._overflow_of(message):
                    text = "a gradient of %s goes back to it: %s"
                    _errors.log(peer, now_s(), text, peer.address, reason)
                if reason or self.version - version > self.max_staleness:
                    run.refused = number
                    self.refused += 1
                else:
                    run.taken = number
                    self._batch.append(message)

    def _overflow_of(self, message: Message) -> str:
        """Return why a step with this gradient would be infinite, or ""; raise `MessageError` if it is so itself."""
        # The core's step of a ternary message is a float32, whatever the parameters are.
        largest, dtype = message.threshold, np.dtype(np.float32)
        if message.kind == "dense":
            values = decode(message)
            largest = float(max(values.max(initial=0.0), -values.min(initial=0.0)))
            dtype = self.params[0].dtype
            if not math.isfinite(largest):
                raise MessageError("a gradient with values that are not finite")
        rate = float(self._optimizer.lr)
        is_finite = max(rate, 1.0) * largest <= float(np.finfo(dtype).max)
        return "" if is_finite else f"its {largest:g} times the rate of {rate:g} overflows {dtype}"

    def _answer(self) -> None:
        """Answer workers, after the step with their gradients. A worker that gets no answer asks again."""
        peers = set(self.node.peers)
        self._replicas = {peer: self._replicas[peer] for peer in self._replicas.keys() & peers}
        self._slice_bytes = {
            peer: self._slice_bytes[peer] for peer in self._slice_bytes.keys() & peers
        }
        self._assembler.keep_only(peers)
        unfinished = {peer for peer, replica in self._replicas.items() if not self._send(replica)}
        later = {peer: self._answers.pop(peer) for peer in unfinished & self._answers.keys()}
        for peer, (run, kind) in self._answers.items():
            status = (run.taken, run.saved, run.refused)
            if kind == _Kind.HELLO:
                numbers = (run.id, self.version, *status)
                _publish(self.node, peer, _Kind.WELCOME, numbers, self._describe())
            elif not run.has_replica:
                _publish(self.node, peer, _Kind.STATUS, (run.id, self.version, *status))
            else:
                replica = self._replicas.get(peer) or _Replica(self.params, self.version)
                message = None
                # A worker with a slow connection asks before the last answer has come.
                if kind == _Kind.GRADIENT or replica.ticket is None or replica.ticket.is_done:
                    message = replica.advance(self.params, self.version, self._encoder)
                numbers = (run.id, replica.version, *status)
                replica.outgoing = Outgoing(_Kind.STATUS, _packed(numbers, message or b""), peer)
                self._replicas[peer] = replica
                self._send(replica)
        self._answers = later

    def _describe(self) -> bytes:
        """Return the document by which workers know their host."""
        name = self._model.name if self._model else None
        document = {"format": _FORMAT, "name": name, "layout": self._layout[1:]}
        return json.dumps({**document, "slice_bytes": slice_bytes_of(self.node, _WHO)}).encode()

    def _send(self, replica: _Replica) -> bool:
        """Send a worker's answer, or the rest of it, as far as there is space; return whether all of it is sent."""
        try:
            if replica.outgoing is not None:
                replica.ticket = self._slicer.send(replica.outgoing)
                replica.outgoing = None
        except NotConnected:
            replica.outgoing = None  # a new connection begins with a new replica
        except WouldBlock:
            return False
        return True

    def save(self) -> None:
        """Write the checkpoint now. The old one is replaced only when the new one is on the disk.

        Raises:
            NonFiniteUpdate, OSError, GradwireError: as ``step``; the old checkpoint stays.
        """
        if self._path is not None and self._optimizer is not None:
            _check_finite(_DIVERGED, self.params, NonFiniteUpdate)
        self._write()

    def _write(self) -> None:
        """Write the checkpoint of parameters that are finite."""
        optimizer = self._whole_optimizer()
        if self._path is not None:
            arrays = {
                "params": self.params,
                "batch": [np.frombuffer(bytes(message), np.uint8) for message in self._batch],
                **optimizer.state_dict(),
            }
            document = {
                "format": _FORMAT,
                "layout": self._layout,
                "version": self.version,
                "taken": [[run.id, run.taken] for run in self._runs.values()],
            }
            temporary = self._path.with_name(self._path.name + ".tmp")
            try:
                with ExitStack() as stack, temporary.open("wb") as file:
                    # A part would keep a disk full.
                    stack.callback(temporary.unlink, missing_ok=True)
                    _write_arrays(file, document, arrays)
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(self._path)
            except OSError as error:
                text = f"the checkpoint cannot be written ({error.strerror or error})"
                raise OSError(error.errno, text, str(self._path)) from error
        for run in self._runs.values():
            run.saved = run.taken

    def _load(self, path: Path) -> Arrays:
        """Go on from a checkpoint, and return its parameters."""
        try:
            state, arrays = _read_arrays(path)
            check_format(state, _FORMAT, f"the checkpoint {path}")
            if state["layout"] != self._layout:
                text = f"the checkpoint {path} is of {state['layout']}, not of {self._layout}"
                raise Mismatch(text)
            params = arrays.pop("params")
            if layouts(params) != self._layout[1:]:
                raise ValueError(f"the parameters are {layouts(params)}")
            _check_finite("parameters", params)
            check_range("version", state["version"], 0, 2**63)
            batch = [Message.parse(message) for message in arrays.pop("batch")]
            if any(message.numel != _numel(params) for message in batch):
                raise ValueError("a gradient is of another size than the parameters")
            runs = {run: _Run(run, taken, taken) for run, taken in state["taken"]}
            for run in runs.values():
                check_range("run", run.id, 0, 2**64 - 1)
                check_range("gradients", run.taken, 0, 2**63)
            if (velocity := arrays.get("velocity")) and layouts(velocity) != self._layout[1:]:
                raise ValueError(f"the velocity is {layouts(velocity)}")
            self._optimizer.load_state_dict(arrays)
        except Mismatch:
            raise
        except Exception as error:  # torch refuses a state in many ways
            raise ValueError(f"{path} is no checkpoint of a host: {error}") from error
        self.version = state["version"]
        self._batch = batch
        self._runs = runs
        return params

    def finish(self) -> None:
        """Save, and tell workers and readers that the training has ended; errors as of ``save``."""
        self.save()
        if self._model is not None:
            self._model.finish()
        self._answer()
        # Also to those that are about to take part, and do not know their host yet.
        end = (self.node, None, _Kind.END, (), self._describe())
        if _publish(*end) is None:
            self.node.drain(_DRAIN_S)
            _publish(*end)

    def close(self) -> None:
        """End the hosting; workers wait for another host unless the training is finished."""
        if self._model is not None:
            self._model.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the training, unless by an exception, and close the host."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


class _Channel:
    """A worker's gradients on their way to the host, and the host's answers; large ones go in slices.

    Attributes:
        sent: number of the last gradient that the transport has taken on this connection.
        is_moving: whether a call is using it, or was interrupted.
    """

    def __init__(self, node: Node) -> None:
        self.sent = 0
        self.is_moving = False
        self._slice_bytes = slice_bytes_of(node, _WHO)
        self._slicer = Slicer(node, _Kind.SLICE, lambda peer: peer, lambda _: self._slice_bytes)
        self._outgoing: Outgoing | None = None  # of which the transport has not taken all
        self._assembler = Assembler(0)

    def begin(self, slice_bytes: int, largest_bytes: int) -> None:
        """Send no larger slices than a host takes, and take its messages of up to so many bytes."""
        self._slice_bytes = min(self._slice_bytes, slice_bytes)
        self._assembler = Assembler(largest_bytes)

    def add_slice(self, host: Peer, payload: memoryview) -> tuple[int, memoryview] | None:
        """Add a slice of a message; return the message and its tag if it is complete now."""
        tag = tag_of_slice(payload)
        whole = self._assembler.add(host, tag, payload)
        return None if whole is None else (tag, whole)

    def restart(self, sent: int) -> None:
        """Begin after this gradient; what was sent of the next one is of no use."""
        self.sent = sent
        self._outgoing = None

    def send(self, host: Peer, numbers: tuple[int, ...], message: Message) -> bool:
        """Send the next gradient, or the rest of it; return False if there is no space for all of it."""
        if self._outgoing is None:
            self._outgoing = Outgoing(_Kind.GRADIENT, _packed(numbers, message), host)
        try:
            self._slicer.send(self._outgoing)
        except (WouldBlock, NotConnected):
            return False
        self.restart(numbers[2])
        return True


class Worker(AbstractContextManager["Worker"]):
    """A process that computes gradients for a `Host`, and waits for it while it is restarted.

    A gradient is applied, in the encoder's residual, or kept here until the host has saved it. With a killed worker its
    residual is lost, and the gradients that had not reached the host; another worker takes its place by being started.

    Args:
        node: with the host's address among its peers. Only this worker receives from it. A model with several hosts has
            a worker with a node of its own for each.
        params: arrays or tensors like the host's; the data of tensors moves to the memory of ``worker.params``. None:
            whatever the host has.
        name: of the host's model, to read it in shared memory on its machine. None: have a replica.
        threshold: of the gradients, as for `Encoder`.
        in_flight: gradients that the host may not have taken yet when ``send`` returns. 0 waits for the step, so that
            the next gradient sees it; 1 computes meanwhile.
        timeout_s: longest wait for the host.

    Attributes:
        params: the parameters, as arrays. Those of the hosted model are read-only, change at any time, and are others
            after a restart of the host; writing to a tensor then kills the process. Those of the replica change in
            ``send`` and ``refresh``, and lack the small elements of changes.
        version: of ``params`` when the last call returned.
        is_finished: whether the host has ended the training.
        refused: gradients that went back to the residual: too old or too large for the host, or sent after such a one.

    Raises:
        TypeError, ValueError: an unsuitable argument.
        Mismatch: the host has another name, or it or this machine's model of this name has other parameters.
        FileNotFoundError: the host is on another machine, where ``name`` must be None.
        TimeoutError: no host answers.
        GradwireError: the training has ended.

    >>> import numpy as np, threading, gradwire as gw
    >>> nodes = [gw.Node("127.0.0.1:0", secret=bytes(range(32))) for _ in range(2)]
    >>> host = gw.coprocessor.Host(nodes[0], [np.zeros(2, np.float32)], gw.coprocessor.SGD(0.5))
    >>> thread = threading.Thread(target=host.step, args=(60.0,))
    >>> thread.start()
    >>> nodes[1].add_peer(nodes[0].address)
    >>> worker = gw.coprocessor.Worker(nodes[1], threshold=1.0, in_flight=0)
    >>> worker.send(np.array([2.0, 0.5], np.float32)), worker.encoder.residual.tolist()
    (True, [1.0, 0.5])
    >>> thread.join()
    >>> _ = [node.close() for node in nodes]
    """

    def __init__(
        self,
        node: Node,
        params: Iterable[Any] | None = None,
        *,
        name: str | None = None,
        threshold: Any = None,
        in_flight: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        check_range("in_flight", in_flight, 0, 2**20)
        check_node(node)
        self._given = [] if params is None else listed(params)
        numel = sum(math.prod(shape) for _, shape in layouts(self._given))
        Encoder(numel, threshold, keeps_residual=False)
        self.node = node
        self.name = name
        self.in_flight = in_flight
        self.timeout_s = check_seconds("timeout_s", timeout_s, least=0.0)
        self.version = 0
        self.params: Arrays = []
        self._kept: dict[int, tuple[int, Message]] = {}  # by number: version, gradient
        self.is_finished = False
        self.refused = 0
        self._run = secrets.randbits(64)
        self._host: Peer | None = None
        self._ask_at_s = 0.0
        self._model: HostedModel | None = None
        self._flat: NDArray[Any] = np.empty(0)  # the replica
        self._parts = 0  # of it that have come
        # Numbers of gradients, each with all before it.
        self._channel = _Channel(node)
        self._taken = 0  # by the host
        self._saved = 0  # in its last checkpoint
        self._wait(lambda: self._is_ready)
        if self.is_finished:
            raise GradwireError("the training ended before this worker could take part")
        self.encoder = Encoder(_numel(self.params), threshold, dtype=self.params[0].dtype)

    @property
    def kept(self) -> list[Message]:
        """The gradients that the host may not have, or may not have saved yet, oldest first."""
        return [message for _, message in self._kept.values()]

    @property
    def _is_ready(self) -> bool:
        # Without a host, too: a gradient more may be computed, as many as ``in_flight`` allows.
        return bool(self.params) and self._parts * _PART >= self._flat.size

    def send(self, gradient: Any = None, *, dense: bool = False) -> bool:
        """Send the large elements of a gradient, and wait until the host has taken enough of those before.

        Args:
            gradient: arrays like ``params``, on the CPU, or one of all elements; not modified. None: only what is in
                the residual.
            dense: send all of the gradient and of the residual; for small models, or before leaving.

        Returns:
            Whether the training goes on; if not, the gradient may not have been applied.

        Raises:
            NonFiniteUpdate, TypeError, ValueError: as ``Encoder.encode``, or arrays of other shapes; nothing was sent.
            TimeoutError: the host did not answer in time; the gradient is kept, and sent later.
        """
        check_order(gradient, self.params)
        # The smaller one: the gradient does not know others' steps that come now, and a restarted host goes back.
        version = min(self.version, self.refresh())
        if not self.is_finished:
            most = None if dense else _MESSAGE_BYTES
            message = self.encoder.encode(gradient, dense=dense, max_bytes=most)
            self._kept[self.encoder.step] = version, message
            self._wait(lambda: self._is_ready and self._waiting() <= self.in_flight)
        return not self.is_finished

    def _waiting(self) -> int:
        return sum(number > self._taken for number in self._kept)

    def refresh(self, timeout_s: float = 0.0) -> int:
        """Take what the host has sent, wait up to ``timeout_s`` for some of it, and return the version."""
        if self._channel.is_moving:
            self._host = None  # what had come, or was leaving, may be lost: begin again
        self._channel.is_moving = True
        self._note_joined()
        if time.monotonic() >= self._ask_at_s:
            self._ask_at_s = time.monotonic() + _RETRY_S
            if not (self._host and _publish(self.node, self._host, _Kind.ASK, (self._run,))):
                self._host = None
                # To all peers: other workers do not answer.
                slice_bytes = slice_bytes_of(self.node, _WHO)
                numbers = (self._run, self.version, self._saved, self.name is None, slice_bytes)
                _publish(self.node, None, _Kind.HELLO, numbers)
        messages = self.node.receive(timeout_s)
        self._note_joined()  # before a welcome over this connection is taken
        for peer, kind, payload in messages:
            try:
                if kind == _Kind.SLICE:
                    if peer != self._host:
                        continue
                    self._ask_at_s = time.monotonic() + _RETRY_S
                    whole = self._channel.add_slice(peer, payload)
                    if whole is None:
                        continue
                    kind, payload = whole
                self._take(peer, kind, payload)
            except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
                raise MessageError(f"the host at {peer.address} sent no answer: {error}") from error
        self._transmit()
        if self._model is not None:
            self.version = self._model.version
            self.is_finished = self.is_finished or self._model.is_finished
        self._channel.is_moving = False
        return self.version

    def _note_joined(self) -> None:
        for event in self.node.events():
            if isinstance(event, PeerJoined):
                self._ask_at_s = 0.0
                if event.peer == self._host:
                    self._host = None  # which may not have got everything

    def _take(self, peer: Peer, kind: int, payload: memoryview) -> None:
        # Other workers are peers, too: with messages for the host, or with a mistake.
        may_be_host = self._host in (None, peer) or self._host not in self.node.peers
        is_readable = peer == self._host or len(payload) >= _HEADER.size
        if not may_be_host or not is_readable:
            return
        body = payload[_HEADER.size :]
        if kind == _Kind.END:
            self.is_finished = self.is_finished or peer == self._host or self._is_host(body)
            return
        run, version, *status = _HEADER.unpack_from(payload)
        if kind == _Kind.WELCOME and run == self._run:
            self._enter(peer, version, status, json.loads(bytes(body)))
        elif kind == _Kind.STATUS and run == self._run and peer == self._host:
            self._follow(version, status, body)

    def _is_host(self, body: memoryview) -> bool:
        """Return whether this describes a host of this worker."""
        try:
            self._check_host(json.loads(bytes(body)), "it")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError, Mismatch):
            return False
        return True

    def _check_host(self, document: Any, who: str) -> None:
        """Raise an error unless this describes a host of this worker."""
        check_format(document, _FORMAT, who)
        expected = layouts(self.params or self._given) or document["layout"]
        if document["layout"] != expected:
            raise Mismatch(f"{who} has {document['layout']}, this worker {expected}")
        if self.name not in (None, document["name"]):
            raise Mismatch(f"{who} has the model {document['name']!r}, this worker {self.name!r}")

    def _enter(self, host: Peer, version: int, status: list[int], document: Any) -> None:
        """Begin with a host, or begin again after it was restarted or the connection was lost."""
        self._check_host(document, f"the host at {host.address}")
        if self.name is None and not self.params:
            self._flat, self.params = _flat_and_views(document["layout"])
        elif self.name is not None and (self._model is None or not self._model.is_live):
            try:
                self._model = HostedModel.attach(self.name, _flat_and_views(document["layout"])[1])
            except FileNotFoundError:
                if self._model is None:
                    raise
                return  # this host has been killed, too
            self.params = self._model.params
        _move(self._given, self.params)
        slice_bytes = _checked_slice_bytes(document["slice_bytes"])
        self._channel.begin(slice_bytes, _largest_bytes(self.params))
        self._host = host
        # A restarted host goes back: what was computed for later versions counts as computed for this one.
        self.version = min(self.version, version)
        self._kept = {number: (min(v, version), m) for number, (v, m) in self._kept.items()}
        self._channel.restart(status[0])
        self._parts = 0
        self._follow(version, status, memoryview(b""))

    def _follow(self, version: int, status: list[int], body: memoryview) -> None:
        """Take refused gradients back, forget those that the host cannot lose, and change the replica."""
        self._taken, self._saved, refused = status
        if refused in self._kept:
            self._take_back(refused)
        for number in [number for number in self._kept if number <= self._saved]:
            del self._kept[number]
        if body:
            message = Message.parse(body)
            start = message.key * _PART
            if message.kind != "dense":
                apply(message, self._flat)
            elif message.key in (0, self._parts):
                self._flat[start : start + message.numel] = decode(message)
                self._parts = message.key + 1
        if self._is_ready and self.name is None:
            self.version = version
        self._ask_at_s = time.monotonic() + (_RETRY_S if self._is_ready else 0.0)

    def _take_back(self, first: int) -> None:
        """Put a gradient and the later ones, which the host has not taken, back into the residual."""
        for number in [number for number in self._kept if number >= first]:
            apply(self._kept.pop(number)[1], self.encoder.residual)
            self.refused += 1
        self._channel.restart(self._channel.sent)

    def _transmit(self) -> None:
        """Send the gradients that were not sent on this connection, as far as there is space."""
        previous = self._saved
        for number, (version, message) in self._kept.items():
            if number > self._channel.sent and self._host is not None:
                numbers = (self._run, version, number, previous)
                if not self._channel.send(self._host, numbers, message):
                    return
            previous = number

    def _wait(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + self.timeout_s
        self.refresh()
        while not is_done() and not self.is_finished:
            if time.monotonic() >= end_s:
                raise TimeoutError(
                    f"no answer of the host within {self.timeout_s:g} s, {len(self._kept)} gradients are kept: is it "
                    f"running, and among the {len(self.node.peers)} peers of this node? Start it again with its path"
                )
            self.refresh(_TICK_S)

    def close(self) -> None:
        """Stop reading the hosted model; gradients that are still waiting go with the node."""
        if self._model is not None:
            self._model.close()

    def __exit__(self, *_: object) -> None:
        """Close the worker."""
        self.close()


def _publish(
    node: Node, peer: Peer | None, kind: _Kind, numbers: tuple[int, ...] = (), body: Any = b""
) -> Ticket | None:
    """Publish a message to a peer, or to all; return None if there is no space or the peer is not connected."""
    try:
        return node.publish(_packed(numbers, body), tag=kind, to=peer)
    except (WouldBlock, NotConnected):
        return None


def _checked_slice_bytes(value: Any) -> int:
    """Return the size of slices that a peer asks for; raise `MessageError` if it is none."""
    nbytes = int(value)
    if not LEAST_SLICE_BYTES <= nbytes <= SLICE_BYTES:
        raise MessageError(f"slices of {nbytes} bytes")
    return nbytes


def _largest_bytes(params: Arrays) -> int:
    """Return the size of the largest message about parameters: dense, with its headers."""
    return 2 * sum(param.nbytes for param in params) + 4_096


def _packed(numbers: tuple[int, ...], body: Any) -> bytes:
    """Return a message's header and body."""
    return _HEADER.pack(*numbers, *[0] * (5 - len(numbers))) + bytes(body)


def _write_arrays(file: BinaryIO, document: dict[str, Any], arrays: dict[str, Arrays]) -> None:
    """Write a document and arrays as a file of ``numpy.savez``, whose check sums tell what the disk has changed."""
    counts = {name: len(each) for name, each in arrays.items()}
    text = json.dumps({**document, "arrays": counts}).encode()
    np.savez(file, np.frombuffer(text, np.uint8), *chain.from_iterable(arrays.values()))


def _read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Arrays]]:
    """Return what `_write_arrays` wrote. Another file is an error of many kinds, and runs no code."""
    with np.load(path, allow_pickle=False) as file:
        text, *values = (file[name] for name in file)
    document = json.loads(text.tobytes())
    rest = iter(values)
    counts = document.pop("arrays")
    # A damaged directory of the file hides arrays; the last ones, a velocity, may be missing unnoticed.
    if sum(counts.values()) != len(values):
        raise ValueError(f"it has {len(values)} arrays, and was written with {counts}")
    return document, {name: list(islice(rest, count)) for name, count in counts.items()}


def _check_finite(name: str, arrays: Arrays, error: type[Exception] = ValueError) -> None:
    """Raise an error if an element is NaN or infinite."""
    # A sum takes no memory; that of finite values may be too large, too.
    with np.errstate(all="ignore"):
        unclear = [array for array in arrays if not math.isfinite(array.sum())]
    if count := sum(int((~np.isfinite(array)).sum()) for array in unclear):
        raise error(f"{name}: {count} of {_numel(arrays)} elements are not finite")


def _numel(arrays: Arrays) -> int:
    return sum(array.size for array in arrays)


def _flat_and_views(layout: list[Any]) -> tuple[NDArray[Any], Arrays]:
    """Return zeros for all elements of some arrays, and as these arrays."""
    sizes = [math.prod(shape) for _, shape in layout]
    flat = np.zeros(sum(sizes), layout[0][0])
    pieces = np.split(flat, np.cumsum(sizes)[:-1])
    return flat, [part.reshape(shape) for part, (_, shape) in zip(pieces, layout, strict=True)]


def _move(tensors: list[Any], arrays: Arrays) -> None:
    """Let those that are tensors have the memory of the arrays."""
    with warnings.catch_warnings():
        # torch has no read-only tensors, and says so.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for tensor, array in zip(tensors, arrays, strict=bool(tensors)):
            if hasattr(tensor, "detach"):
                tensor.data = sys.modules["torch"].from_numpy(array)
