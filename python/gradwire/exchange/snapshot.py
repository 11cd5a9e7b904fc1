"""Snapshots: the state of one replica between two steps, sent to a newcomer while training goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from .. import clock
from ..agreement import checked_state
from ..arrays import Arrays, layouts, nonfinite, put, writable_views
from ..errors import Closed, MessageError, Mismatch, NotConnected, WouldBlock
from ..shares import WHOLE_BYTES, Division, Ranges, memory_of, size_of, without
from ..slices import Outgoing, Slicer
from .owner import Accepted
from .protocol import (
    Introductions,
    Kind,
    NodeRun,
    read_number,
    read_run,
    read_step,
    read_steps,
    run_of,
    tag_of,
)

if TYPE_CHECKING:
    from ..transport import Node, PeerStats, Ticket

__all__ = [
    "NO_STATE",
    "Donor",
    "FixedState",
    "NodeState",
    "OptimizerState",
    "Recipient",
    "Request",
    "Snapshot",
    "as_state",
]

Layout: TypeAlias = list[list[Any]]  # [dtype, shape] of each array

_LOG = logging.getLogger(__name__)

# Small enough to let updates pass in between, large enough to cost nothing.
_PART_BYTES = 1 << 18
# Parts that are under way to one newcomer: what its link carries in so many seconds, within bounds. All messages after
# them stay in the send log as long, which has 160 MiB by default.
_WINDOW_S = 0.1
_WINDOW_BYTES_MAX = 8 << 20
# Part of the newcomer's rate that is left for it while updates are under way to the members.
_BUSY_SHARE = 0.1
# A member from which nothing has come for so long takes nothing of the link.
_SILENT_S = 1.0
_LOOK_S = 0.01  # between two looks for space
# Members that send one snapshot together: enough where each sends a tenth of what the newcomer can receive.
_DONORS_MAX = 8
# The rest of slow donors is asked of the fastest where it would take less than this part of the time, so many seconds
# after the first answer at the earliest.
_GAIN = 0.5
_PATIENCE_S = 10.0
# Space that is left for a step, at most: every node has as much.
_STEP_BYTES_MAX = 16 << 20
# What a donor answers that cannot give a snapshot, before the reason; no header begins so.
_REFUSAL = "no snapshot: "
_REFUSAL_MAX = 300
# A header comes from another machine: it must not be able to claim any amount of memory.
_ARRAYS_MAX = 1 << 20
_RANGES_MAX = 1 << 14
# Snapshots in a row with values that are not finite, after which a newcomer gives up: synchronous members all have the
# same values.
_NOT_FINITE_MAX = 3
# Bounds of the optimiser's state in it: twice the parameters are usual.
_STATE_FACTOR = 16
_STATE_BYTES = 256 << 20


class NodeState(Protocol):
    """What nodes that join late take over besides the parameters, such as an optimiser's state.

    It is exported only when another node needs it, so it may take another form from step to step.
    """

    def export(self) -> Arrays:
        """Return float32, float64 or uint8 arrays, which may be views; in this form `load` of another node has them."""

    def check(self, arrays: Arrays) -> None:
        """Raise `Mismatch` if `load` could not take over these arrays of another node."""

    def load(self, arrays: Arrays) -> None:
        """Take over the arrays of another node."""


#: What callers give as a node's state: arrays that are overwritten in place, or an object of their own.
OptimizerState: TypeAlias = Sequence[Any] | NodeState


class FixedState:
    """A state that always consists of the same float32 or float64 arrays, overwritten in place.

    Args:
        arrays: of the caller.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays

    def export(self) -> Arrays:
        """Return views of the arrays.

        Raises:
            TypeError, ValueError: arrays that cannot be used in place.
        """
        return writable_views(self._arrays)

    def check(self, arrays: Arrays) -> None:
        """Raise `Mismatch` unless the arrays have the dtypes and shapes of these."""
        here = layouts(self.export())
        there = layouts(arrays)
        if here != there:
            raise Mismatch(f"this node has an optimiser's state of {here}, the members of {there}")

    def load(self, arrays: Arrays) -> None:
        """Overwrite the arrays."""
        put(self.export(), arrays)


#: The state of callers that have none.
NO_STATE = FixedState(())


def as_state(optimizer_state: OptimizerState) -> NodeState:
    """Return a caller's state as an object.

    Raises:
        TypeError: it is neither arrays nor a `NodeState`.
    """
    if isinstance(optimizer_state, Sequence):
        return FixedState(optimizer_state)
    if not hasattr(optimizer_state, "export"):
        kind = type(optimizer_state).__name__
        raise TypeError(f"optimizer_state must be a list of arrays or a NodeState, got {kind}")
    return optimizer_state


@dataclass
class Snapshot:
    """Everything that a newcomer needs to continue.

    Attributes:
        step: number of the donor's next step.
        positions: for every member, the donor included, the first update that is not in the snapshot.
        finals: for departed members, the first update that nobody applied.
        arrays: of ``Replica.export_state``, then of the `NodeState`.
        params: number of the former.
        velocities: number of velocities among these, which come first: one for each parameter, or none.
        origin: the node that began the training.
        training: its identity.
        is_sharded: whether parameters have owners.
        accepted: see `Sharding`.
        senders: as there.
        workers: those of them that own no parameters.
        agreement: of the updates, see `Agreement`.
        median: of the updates' norms, see there.
    """

    step: int
    positions: dict[NodeRun, int]
    finals: dict[NodeRun, int]
    arrays: Arrays
    params: int
    origin: NodeRun
    training: str
    is_sharded: bool = False
    accepted: Accepted = field(default_factory=dict)
    senders: Collection[NodeRun] = ()
    workers: Collection[NodeRun] = ()
    agreement: Sequence[float] = (0.0, 0.0, 1)
    median: float = 0.0
    velocities: int = 0

    def header(self, ranges: Ranges, *, goes_on: bool = False) -> bytes:
        """Return everything but the arrays' values.

        Args:
            ranges: of the values' bytes that follow.
            goes_on: whether the newcomer has the others, of a donor that has died.
        """
        return json.dumps(
            {
                "ranges": ranges,
                "goes_on": goes_on,
                "step": self.step,
                "positions": [[*run, step] for run, step in self.positions.items()],
                "finals": [[*run, step] for run, step in self.finals.items()],
                "arrays": [[array.dtype.str, list(array.shape)] for array in self.arrays],
                "params": self.params,
                "origin": self.origin,
                "training": self.training,
                "is_sharded": self.is_sharded,
                "senders": list(self.senders),
                "workers": list(self.workers),
                "agreement": list(self.agreement),
                "median": self.median,
                "accepted": [
                    [*owner, *sender, step]
                    for owner, by_sender in self.accepted.items()
                    for sender, step in by_sender.items()
                ],
            }
        ).encode()

    @staticmethod
    def from_header(
        payload: memoryview,
        check: Callable[[Layout, int], None],
        earlier: Snapshot | None = None,
    ) -> tuple[Snapshot, Ranges]:
        """Return a snapshot with arrays still to be filled, and the ranges of their bytes that follow.

        Args:
            payload: the header.
            check: raises an error for dtypes and shapes that are not this node's, before any memory is taken. It gets
                the number of the parameters among them, too.
            earlier: what has arrived of a donor that has died, to which the values may be added.

        Raises:
            MessageError: the bytes are no header.
        """
        try:
            header = json.loads(bytes(payload))
            if len(header["arrays"]) > _ARRAYS_MAX:
                raise ValueError(f"{len(header['arrays'])} arrays")
            params = read_number(header["params"], _ARRAYS_MAX + 1)
            check([_read_layout(*entry) for entry in header["arrays"]], params)
            if not header["goes_on"]:
                # Zeros: what a dead donor has not sent is brought up to another one's, too.
                arrays = [np.zeros(shape, dtype) for dtype, shape in header["arrays"]]
            elif earlier is not None and earlier.is_continued_by(header):
                arrays = earlier.arrays
            else:
                raise ValueError("the rest of values of which there is no beginning")
            accepted: Accepted = {}
            for owner, owner_start, sender, sender_start, step in header["accepted"]:
                by_sender = accepted.setdefault(read_run((owner, owner_start)), {})
                by_sender[read_run((sender, sender_start))] = read_step(step)
            snapshot = Snapshot(
                read_step(header["step"]),
                read_steps(header["positions"]),
                read_steps(header["finals"]),
                arrays,
                params,
                read_run(header["origin"]),
                str(header["training"]),
                bool(header["is_sharded"]),
                accepted,
                list(map(read_run, header["senders"])),
                list(map(read_run, header["workers"])),
                checked_state(header["agreement"]),
                float(header["median"]),
            )
            if not 0.0 <= snapshot.median < math.inf:
                raise ValueError(f"a median of {snapshot.median}")
            return snapshot, _read_ranges(header["ranges"])
        except (
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            MemoryError,
            RecursionError,
        ) as error:
            raise MessageError(f"a snapshot whose header cannot be read: {error!r}") from error

    def delay(self, step: int) -> None:
        """Let the newcomer begin after ``step``, or after the donor's next step if that is later."""
        self.step = max(self.step + 1, step)

    def parts(self, ranges: Ranges, most_bytes: int, *, goes_on: bool) -> list[memoryview]:
        """Return the header, and copies of the arrays' bytes in some ranges, in parts of at most so many bytes."""
        parts = [memoryview(self.header(ranges, goes_on=goes_on))]
        for data in memory_of(self.arrays, ranges):
            # NumPy asks the system for large pages: the members' next step waits for this copy.
            copied = np.array(data).data
            starts = range(0, len(copied), most_bytes)
            parts += [copied[start : start + most_bytes] for start in starts]
        return parts

    @property
    def digest(self) -> str:
        """Digest of the arrays' dtypes and shapes."""
        text = json.dumps(layouts(self.arrays))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return self.division.nbytes

    @cached_property
    def division(self) -> Division:
        """Of the arrays' bytes among several donors."""
        # Kept: a newcomer asks what is missing many times a second, and may wait for 100,000 arrays.
        sizes = [array.nbytes for array in self.arrays]
        # Bytes at the beginning of a state describe what follows.
        described = [array.dtype for array in self.arrays[self.params :][:1]] == [np.uint8]
        return Division(sizes, shared=self.params + described, velocities=self.velocities)

    def is_of_same_step(self, other: Snapshot) -> bool:
        """Return whether another donor's snapshot has the same values: it holds the same updates."""
        # One of the two may not know yet that a member is gone.
        runs = self.positions.keys() | other.positions.keys()
        ours, theirs = (
            (
                each.step,
                [each.positions.get(run, each.finals.get(run)) for run in runs],
                (each.params, each.training, each.is_sharded, each.digest),
            )
            for each in (self, other)
        )
        return ours == theirs

    def is_continued_by(self, header: Mapping[str, Any]) -> bool:
        """Return whether another donor's snapshot can add to this one."""
        ours = (self.params, self.training, self.is_sharded)
        theirs = tuple(header[name] for name in ("params", "training", "is_sharded"))
        own_layout = [[array.dtype.str, list(array.shape)] for array in self.arrays]
        return ours == theirs and own_layout == header["arrays"]


def _read_ranges(entries: Any) -> Ranges:
    if len(entries) > _RANGES_MAX:
        raise ValueError(f"{len(entries)} ranges")
    ranges = [(read_number(begin, 1 << 62), read_number(end, 1 << 62)) for begin, end in entries]
    ends = [0, *(end for _, end in ranges)]
    if any(not before <= begin < end for before, (begin, end) in zip(ends, ranges, strict=False)):
        raise ValueError(f"ranges that are not in order: {ranges[:4]}")
    return ranges


def _read_layout(dtype: Any, shape: Any) -> list[Any]:
    if dtype not in ("<f4", "<f8", "|u1"):
        raise ValueError(f"an array of {dtype!r:.40}")
    return [np.dtype(dtype).name, [read_number(size, 1 << 48) for size in shape]]


@dataclass(frozen=True)
class Request:
    """A newcomer's request for a snapshot, or for what one of several donors sends of it.

    Attributes:
        steps: for every member the first update that the newcomer gets directly: the snapshot has to hold all before.
            Where it goes on with a dead donor's, for a departed member the first update that the newcomer lacks.
        missing: what it lacks of a dead donor's values.
        digest: of their arrays, see `Snapshot`; empty: it has nothing.
        step: at which all donors begin; None: at the next one.
        place: of the receiver among the donors.
        donors: their number.
    """

    steps: dict[NodeRun, int]
    missing: Ranges = field(default_factory=list)
    digest: str = ""
    step: int | None = None
    place: int = 0
    donors: int = 1

    def encode(self) -> bytes:
        """Return the document as bytes."""
        steps = [[*run, step] for run, step in sorted(self.steps.items())]
        return json.dumps({**vars(self), "steps": steps}).encode()

    @staticmethod
    def decode(payload: memoryview) -> Request:
        """Return the document; raise `MessageError` if the bytes are none."""
        try:
            document = json.loads(bytes(payload))
            donors = read_number(document["donors"], _DONORS_MAX + 1)
            return Request(
                read_steps(document["steps"]),
                _read_ranges(document["missing"]),
                str(document["digest"]),
                None if document["step"] is None else read_step(document["step"]),
                read_number(document["place"], donors),
                donors,
            )
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise MessageError(f"a request that cannot be read: {error!r}") from error


class _Transfer:
    """One snapshot on its way to one newcomer.

    Args:
        parts: header and values, in order; removed as they leave, and with them the copy of the state.
    """

    def __init__(self, parts: Sequence[Outgoing]) -> None:
        self.parts = deque(parts)
        self._in_flight: deque[Ticket] = deque()
        self._allowance_bytes = 0.0
        self._allowed_at_s = clock.now_s()

    @property
    def nbytes(self) -> int:
        """Size of all parts that have not left."""
        return sum(part.nbytes for part in self.parts)

    def space(self, path: PeerStats | None, *, is_busy: bool) -> int:
        """Return how many bytes may leave now.

        Args:
            path: to the newcomer; None: unknown.
            is_busy: whether updates are under way to the members.
        """
        while self._in_flight and self._in_flight[0].is_done:
            self._in_flight.popleft()
        rate = 0.0 if path is None else path.rate_bytes_per_s
        now_s = clock.now_s()
        elapsed_s = now_s - self._allowed_at_s
        self._allowed_at_s = now_s
        # The newcomer may share a link with the members. Updates then go first, and a part of the link remains, so that
        # a training that always sends lets newcomers in, too.
        self._allowance_bytes = min(
            self._allowance_bytes + elapsed_s * _BUSY_SHARE * rate, float(_WINDOW_BYTES_MAX)
        )
        if is_busy:
            may_send = self._allowance_bytes >= _PART_BYTES or (not rate and not self._in_flight)
            return _PART_BYTES if may_send else 0
        # Enough to keep the link busy until the next look, and no more: it delays the newcomer's updates, and all
        # messages after it stay in the send log until the newcomer has it.
        round_trip_s = 0.0 if path is None else path.least_rtt_s
        window_bytes = rate * (_WINDOW_S + 2 * round_trip_s)
        window_bytes = min(max(window_bytes, 2 * _PART_BYTES), _WINDOW_BYTES_MAX)
        return int(window_bytes) - sum(ticket.nbytes for ticket in self._in_flight)

    def advance(self, ticket: Ticket) -> None:
        """Note that the next part has left."""
        nbytes = self.parts.popleft().nbytes
        self._allowance_bytes = max(0.0, self._allowance_bytes - nbytes)
        self._in_flight.append(ticket)


class Donor:
    """Answers newcomers' requests: waits for a suitable step, and sends the snapshot beside the training.

    The parts leave in a thread of their own, also while the caller computes, a few at a time.

    Args:
        node: of this exchange.
        introductions: of the newcomers, which say how much they take at once.
        step_bytes: size of a step's largest messages, for which space is left in the send log.
        supply: sends a newcomer the departed members' updates from given steps on; returns whether they are there.

    Attributes:
        requests: those that are not answered yet, by newcomer, with their numbers.
    """

    def __init__(
        self,
        node: Node,
        introductions: Introductions,
        step_bytes: int,
        supply: Callable[[NodeRun, dict[NodeRun, int]], bool],
    ) -> None:
        self._node = node
        self._introductions = introductions
        # Only a header can be larger than a newcomer takes at once.
        self._slicer = Slicer(
            node,
            tag_of(Kind.SLICE, 0),
            introductions.peer_of,
            lambda part: introductions.common_slice_bytes([part.receiver]),
        )
        self._supply = supply
        self._log = clock.LogLimit(_LOG.error)
        self._step_bytes = min(step_bytes, _STEP_BYTES_MAX)
        self.requests: dict[NodeRun, tuple[int, Request]] = {}
        self._lock = threading.Lock()  # of what follows
        self._transfers: dict[NodeRun, _Transfer] = {}
        self._is_sending = False

    @property
    def remaining_bytes(self) -> int:
        """Bytes of all snapshots that have not left."""
        with self._lock:
            return sum(transfer.nbytes for transfer in self._transfers.values())

    def add_request(self, run: NodeRun, number: int, payload: memoryview) -> None:
        """Add a newcomer's request with its number, in the place of an earlier one."""
        self.requests[run] = number, Request.decode(payload)
        with self._lock:
            self._transfers.pop(run, None)

    def serve(self, positions: dict[NodeRun, int], make: Callable[[], Snapshot]) -> None:
        """Answer every request that the present state satisfies; where there is no snapshot, with the reason.

        Args:
            positions: for every member, this node included, the first update that is not in the state.
            make: returns the snapshot, of which nothing has to be copied; called at most once.
        """
        snapshot = None
        refusal = ""
        step = max(positions.values())  # of a synchronous exchange
        connected = set(map(run_of, self._node.peers)) if self.requests else set()
        for run, (number, request) in list(self.requests.items()):
            if run not in connected:
                del self.requests[run]
                continue
            # The newcomer gets a member's updates from a step on by itself. A state that lacks an earlier one would
            # leave a gap, so the donor waits until it has applied all of them.
            is_early = any(
                positions.get(member, step) < step for member, step in request.steps.items()
            )
            if is_early or run in positions or step < (request.step or 0):
                continue
            if snapshot is None and not refusal:
                try:
                    snapshot = make()
                except Exception as error:
                    # Of the caller's state: a newcomer must not end a member.
                    refusal = f"{_REFUSAL}{type(error).__name__}: {error}"[:_REFUSAL_MAX]
                    self._log.log(run, clock.now_s(), "%s", refusal)
            if snapshot is None:
                parts = [memoryview(refusal.encode())]
            else:
                # The updates go before the values, which the newcomer takes when it has the updates.
                goes_on = request.digest == snapshot.digest and self._supply(run, request.steps)
                share = snapshot.division.share(request.place, request.donors)
                ranges = request.missing if goes_on else share
                if request.step not in (None, step):
                    ranges = []  # too late: the other donors' values are of another step
                most_bytes = min(_PART_BYTES, self._introductions.common_slice_bytes([run]))
                parts = snapshot.parts(ranges, most_bytes, goes_on=goes_on)
            tag = tag_of(Kind.SNAPSHOT, number)
            with self._lock:
                self._transfers[run] = _Transfer([Outgoing(tag, part, run) for part in parts])
                is_sending = self._is_sending
                self._is_sending = True
            del self.requests[run]
            # A small snapshot leaves at once, the parts of a large one beside the training.
            if not is_sending and self._send_parts() is not None:
                clock.repeat(self._send_parts)

    def stop(self) -> None:
        """Send no more parts, because this node leaves; the newcomers ask another member."""
        self.requests.clear()
        with self._lock:
            self._transfers.clear()

    def _send_parts(self) -> float | None:
        """Send as many parts as may leave now; return when to call again, None when all have left."""
        try:
            paths = {run_of(path.peer): path for path in self._node.stats().peers}
            with self._lock:
                # What is under way to a member that has died stays so until it is lost.
                is_busy = any(
                    path.in_flight_bytes and path.silence_s < _SILENT_S
                    for run, path in paths.items()
                    if run not in self._transfers
                )
                for run, transfer in list(self._transfers.items()):
                    space = transfer.space(paths.get(run), is_busy=is_busy)
                    if not self._send_some(transfer, space):
                        del self._transfers[run]
                self._is_sending = bool(self._transfers)
                return _LOOK_S if self._transfers else None
        except Closed:
            with self._lock:
                self._transfers.clear()
                self._is_sending = False
            return None

    def _send_some(self, transfer: _Transfer, space_bytes: int) -> bool:
        """Send a newcomer parts of about so many bytes together; return whether there are more."""
        while transfer.parts and space_bytes > 0:
            part = transfer.parts[0]
            space_bytes -= part.nbytes
            try:
                if not self._node.has_room(part.nbytes + self._step_bytes):
                    break
                transfer.advance(self._slicer.send(part))
            except WouldBlock:
                break
            except NotConnected:
                return False
        return bool(transfer.parts)


class _Delivery:
    """What one donor is to send.

    Args:
        arrays: of the snapshot.
        ranges: of their bytes, in the order in which they come.
    """

    def __init__(self, arrays: Arrays, ranges: Ranges) -> None:
        self.nbytes = size_of(ranges)
        self._ranges = ranges
        self._missing = deque(memory_of(arrays, ranges))

    @property
    def is_done(self) -> bool:
        """Whether all has arrived."""
        return not self._missing

    @property
    def missing(self) -> Ranges:
        """What has not arrived."""
        left = sum(map(len, self._missing))
        ranges: Ranges = []
        for begin, end in reversed(self._ranges):
            if left > 0:
                ranges.insert(0, (max(begin, end - left), end))
            left -= end - begin
        return ranges

    def add_part(self, part: memoryview) -> None:
        """Add the next part that has arrived.

        Raises:
            MessageError: the part does not fit.
        """
        if not self._missing or len(part) > len(self._missing[0]):
            raise MessageError("a part of a snapshot that does not fit")
        # Parts arrive in order and may end anywhere in an array; the rest of its memory stays first in line.
        memory = self._missing.popleft()
        memory[: len(part)] = part
        if len(part) < len(memory):
            self._missing.appendleft(memory[len(part) :])


class Recipient:
    """Asks other nodes for a snapshot, and collects the parts.

    Args:
        send: sends a control message: its kind, its number, the payload and the receiver.
        address_of: returns a node's address.
        me: this node.

    Attributes:
        incoming: the snapshot that is under way, or was taken; None: nothing of it has arrived.
        earlier: what dead donors had sent, until ``incoming`` goes on with it; None: nothing.
        requests: number of requests so far.
        received_bytes: size of all parts that have arrived so far, of all requests.
        is_asked: whether a snapshot is under way, or has arrived and was not taken.
        refusal: why the last donor that answered gave nothing that could be used; empty: it did.
    """

    def __init__(
        self,
        send: Callable[[Kind, int, bytes, NodeRun], None],
        address_of: Callable[[NodeRun], str],
        me: NodeRun,
    ) -> None:
        self.requests = 0
        self.received_bytes = 0
        self.is_asked = False
        self.refusal = ""
        self._log = clock.LogLimit(_LOG.warning)
        # Until a snapshot is taken: several donors have answered at different steps, or something that is no snapshot.
        self._asks_one = False
        self._fastest: NodeRun | None = None  # of those that have sent all that was asked of them
        self._rate = 0.0  # of the fastest, in bytes per second
        self._begun_s = 0.0  # when the first answer came
        self._not_finite = 0  # snapshots in a row with such values
        self._send = send
        self._address_of = address_of
        self._me = me
        self._own_layout: Layout = []
        self.incoming: Snapshot | None = None
        self.earlier: Snapshot | None = None
        # By donor, until all of it has arrived; None: not even the header.
        self._deliveries: dict[NodeRun, _Delivery | None] = {}
        self._holes: Ranges = []  # of ``incoming``: what no donor is to send
        # Parts for which ``earlier`` has to be brought up first.
        self._waiting: list[tuple[NodeRun, memoryview]] = []

    def request(
        self,
        donors: Sequence[NodeRun],
        steps: dict[NodeRun, int],
        own_layout: Layout,
        *,
        step: int | None = None,
        goes_on: bool = False,
    ) -> None:
        """Ask some nodes, in the place of earlier ones.

        Args:
            donors: that are able to, in the order in which they are asked.
            steps: see `Request`.
            own_layout: of this node's parameters, which the snapshot must have, too.
            step: at which several of them can begin; None: they have no common step.
            goes_on: whether to go on with ``resumable``.
        """
        # Numbered, because parts of an earlier answer may still arrive from the same donor.
        self.requests += 1
        self._own_layout = own_layout
        earlier = self.resumable if goes_on else None
        missing = self.missing if goes_on else []
        self.forget()
        self.earlier = earlier
        self._holes = missing
        self.is_asked = True
        digest = "" if earlier is None else earlier.digest
        # What goes on with an earlier snapshot needs the updates between two steps, and not between many.
        count = 1
        if step is not None and not goes_on and not self._asks_one:
            shares = max(1, _layout_bytes(own_layout) // WHOLE_BYTES)
            count = min(len(donors), _DONORS_MAX, shares)
        step = step if count > 1 else None
        donors = sorted(donors, key=lambda run: run != self._fastest)
        self._rate, self._fastest = 0.0, None
        for place, donor in enumerate(donors[:count]):
            self._deliveries[donor] = None
            request = Request(steps, missing, digest, step, place, count)
            self._send(Kind.REQUEST, self.requests, request.encode(), donor)

    @property
    def donors(self) -> set[NodeRun]:
        """The nodes that were asked and have not sent everything."""
        return set(self._deliveries)

    @property
    def resumable(self) -> Snapshot | None:
        """What has arrived of a snapshot, with which another donor may go on."""
        return self.earlier or self.incoming

    @property
    def missing(self) -> Ranges:
        """What has not arrived of ``resumable``, or has to travel again if another donor sends it."""
        snapshot = self.resumable
        return [] if snapshot is None else snapshot.division.whole(self._not_arrived)

    @property
    def arrived_bytes(self) -> int:
        """Size of what has arrived of ``resumable``."""
        snapshot = self.resumable
        return 0 if snapshot is None else snapshot.nbytes - size_of(self._not_arrived)

    @property
    def _not_arrived(self) -> Ranges:
        deliveries = [delivery for delivery in self._deliveries.values() if delivery is not None]
        return sorted(
            [*self._holes, *(each for delivery in deliveries for each in delivery.missing)]
        )

    def bring_up(self) -> None:
        """Note that ``earlier`` has the updates that ``incoming`` has."""
        self.earlier = None
        waiting = self._waiting
        self._waiting = []
        for run, part in waiting:
            if run in self._deliveries:
                self._add(run, part)

    def drop(self, runs: Collection[NodeRun]) -> None:
        """Wait no longer for donors that are gone."""
        for run in self.donors.intersection(runs):
            self._end_delivery(run)

    def _drop_slow(self) -> None:
        """Wait no longer for donors whose rest the fastest one would send in less than half the time."""
        elapsed_s = clock.now_s() - self._begun_s
        if not self._rate or elapsed_s <= _PATIENCE_S:
            return
        left = [
            (size_of(delivery.missing), delivery.nbytes)
            for delivery in self._deliveries.values()
            if delivery is not None
        ]
        seconds = [elapsed_s * missing / max(nbytes - missing, 1) for missing, nbytes in left]
        all_bytes = sum(missing for missing, _ in left)
        if all_bytes / self._rate < _GAIN * max(seconds, default=0.0):
            self.drop(self.donors)

    def cancel(self) -> None:
        """Take no more parts of what was asked for."""
        self.drop(self.donors)
        self.is_asked = False

    def keep(self, snapshot: Snapshot) -> None:
        """Take a whole snapshot, of this node's own state, for one to which another donor may add."""
        self.forget()
        self.incoming = snapshot

    def forget(self) -> None:
        """Forget what was asked for, and what has arrived of it."""
        self.is_asked = False
        self.incoming = None
        self.earlier = None
        self._deliveries.clear()
        self._holes = []
        self._waiting = []

    def add_part(self, run: NodeRun, number: int, payload: memoryview) -> None:
        """Add a part that has arrived, unless it belongs to an earlier request; one that cannot be read ends it.

        Raises:
            Mismatch: the donor has other parameters.
        """
        if run not in self._deliveries or number != self.requests:
            return
        if self._add(run, payload):
            self.received_bytes += len(payload)

    def _add(self, run: NodeRun, payload: memoryview) -> bool:
        """Add a part; return False for one that cannot be read, which is no progress."""
        try:
            delivery = self._deliveries[run]
            if delivery is None:
                self._begin_delivery(run, payload)
            elif self.earlier is not None:
                self._waiting.append((run, payload))
            else:
                delivery.add_part(payload)
                if delivery.is_done:
                    self._end_delivery(run)
                    rate = delivery.nbytes / max(clock.now_s() - self._begun_s, 1e-9)
                    if rate > self._rate:
                        self._rate, self._fastest = rate, run
        except MessageError as error:
            text = "%s: %s; this node asks another member"
            self._log.log(run, clock.now_s(), text, self._address_of(run), error)
            self.refusal = f"{self._address_of(run)}: {error}"
            self._asks_one = True
            self._fastest = None
            self.forget()
            return False
        return True

    def _begin_delivery(self, run: NodeRun, header: memoryview) -> None:
        """Read the header of a donor's answer."""
        if bytes(header[: len(_REFUSAL)]) == _REFUSAL.encode():
            raise MessageError(bytes(header[:_REFUSAL_MAX]).decode(errors="replace"))
        snapshot, ranges = Snapshot.from_header(header, self._check, self.earlier)
        goes_on = self.earlier is not None and snapshot.arrays is self.earlier.arrays
        is_late = not ranges and not goes_on and snapshot.nbytes > 0
        if is_late or not (self.incoming is None or self.incoming.is_of_same_step(snapshot)):
            self._asks_one = True
            self._end_delivery(run)
            return
        self.refusal = ""
        if self.incoming is None:
            self.incoming = snapshot
            self._begun_s = clock.now_s()
            if not goes_on:  # this donor cannot go on with it
                self.earlier = None
                self._holes = [(0, snapshot.nbytes)]
        self._holes = without(self._holes, ranges)
        self._deliveries[run] = _Delivery(self.incoming.arrays, ranges)
        if not ranges:
            self._end_delivery(run)

    def _end_delivery(self, run: NodeRun) -> None:
        """Wait for nothing more of a donor; what it has not sent is missing."""
        delivery = self._deliveries.pop(run)
        if delivery is not None:
            self._holes = sorted([*self._holes, *delivery.missing])
        if not self._deliveries and (self.incoming is None or self._holes):
            self.is_asked = False

    def _check(self, there: Layout, params: int) -> None:
        """Refuse arrays that are not this node's, before they take memory; their state is bounded by the parameters."""
        here = self._own_layout
        if here != there[:params]:
            raise Mismatch(
                f"this node ({self._address_of(self._me)}) has parameters {here}, the members have {there[:params]}"
            )
        own_bytes, state_bytes = map(_layout_bytes, (here, there[params:]))
        if state_bytes > _STATE_FACTOR * own_bytes + _STATE_BYTES:
            raise MessageError(
                f"a snapshot with a state of {state_bytes} bytes for parameters of {own_bytes}"
            )

    @property
    def progress(self) -> str:
        """How much of the snapshot has arrived, as text; empty: nothing."""
        snapshot = self.incoming
        if not self.is_asked or snapshot is None:
            return ""
        donors = ", ".join(map(self._address_of, sorted(self._deliveries)))
        arrived = clock.of_bytes(self.arrived_bytes, snapshot.nbytes)
        return f"{arrived} from {donors}" if donors else arrived

    @property
    def expected_bytes(self) -> int:
        """Size of the snapshot that is under way; 0: unknown."""
        return 0 if self.incoming is None else self.incoming.nbytes

    def take(self) -> Snapshot | None:
        """Return the snapshot once all of it has arrived, and end the request; None before.

        Raises:
            Mismatch: several in a row had values that are not finite, so all members' seem to have.
        """
        self._drop_slow()
        snapshot = self.incoming
        if not self.is_asked or snapshot is None or self._deliveries or self.earlier is not None:
            return None
        self.is_asked = False
        self._fastest = None
        count = nonfinite(snapshot.arrays)
        self._asks_one = count > 0
        if not count:
            self._not_finite = 0
            return snapshot
        self._not_finite += 1
        if self._not_finite >= _NOT_FINITE_MAX:
            raise Mismatch(
                f"{self._not_finite} snapshots in a row had values that are not finite, the last one {count}: the "
                "members' parameters are of no use, start all nodes from a checkpoint; leave masks of infinities out "
                "of the parameters"
            )
        self.refusal = f"a snapshot has {count} values that are not finite"
        _LOG.warning("%s; this node asks another member", self.refusal)
        self.forget()
        return None


def _layout_bytes(layout: Layout) -> int:
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout)
