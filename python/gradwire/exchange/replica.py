"""One node's replica: its encoders, its updates until all nodes have them, and the application of all nodes' updates.

In the mesh a node's message to everybody is its update. In the sharded exchange that message is its result as an owner
of parameters, and `Sharding` keeps what comes before. Membership, relays and agreements are the same for both.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np

from .. import clock
from ..agreement import Agreement, sample_beside
from ..arrays import Arrays, add, device_of, difference, put, views, writable_views
from ..errors import MessageError
from ..message import Message, apply, parse_many
from ..transport import Peer, Ticket
from .groups import Codec, Groups
from .options import Options
from .owner import Accepted, Arrived, Division, ShardedUpdate, Sharding, keep_part, part_of_state
from .parameters import (
    MomentumSum,
    Payloads,
    PlainSum,
    SecondTarget,
    SharedCopy,
    check_layouts,
    moved_since,
)
from .protocol import MESSAGE_MAGIC, CountedUpdate, NodeRun, PartUpdate, run_of

__all__ = ["Replica", "StepUpdate", "add_to_exported", "check_params", "drop_outdated"]

_LOG = logging.getLogger(__name__)

_HEADER_BYTES = 48  # of a message
_BLOCK_NUMEL = 1 << 20  # elements that are looked at together


@dataclass
class StepUpdate:
    """This node's update of one step: encoded once, handed over once.

    Attributes:
        step: number of the step.
        messages: for everybody: the update, or in the sharded exchange this node's result as an owner.
        payload: what is sent of them, in pieces; empty while parts are missing for the result, and after the step.
        sharded: this node's parts; None in the mesh.
        ticket: follows the payload to the peers; None until the transport has taken the payload.
        encode_s: time to encode the update.
        wait_s: time spent so far on handing over the payload and on waiting for the other nodes' payloads.
    """

    step: int
    messages: list[Message]
    payload: list[Any] = field(default_factory=list)
    sharded: ShardedUpdate | None = None
    ticket: Ticket | None = None
    encode_s: float = 0.0
    wait_s: float = 0.0

    @property
    def encoded(self) -> list[Message]:
        """All messages of this node's update."""
        return self.messages if self.sharded is None else self.sharded.messages

    @property
    def nbytes(self) -> int:
        """Size of everything that this node sends."""
        nbytes = sum([message.nbytes for message in self.messages])
        return nbytes if self.sharded is None else nbytes + self.sharded.sent_bytes

    def set_result(self, result: PartUpdate) -> None:
        """Set what goes to everybody in the sharded exchange."""
        self.messages = result
        self.payload = result.pieces()

    def count(self, nodes: int) -> None:
        """Set by how many nodes all divide the update, in the asynchronous exchange."""
        counted = CountedUpdate(self.messages, nodes)
        self.messages = counted
        self.payload = [counted.header, *self.payload]

    def withdraw_result(self) -> None:
        """Return to the time before the result was encoded."""
        self.messages = []
        self.payload = []

    def move_to_host(self) -> None:
        """Keep the messages for members that may miss them, and nothing else: memory of a device is too precious."""
        if self.sharded is None:  # an owner's are in host memory
            self.messages[:] = self.payload[len(self.payload) - len(self.messages) :]
        self.payload = []

    def set_ticket(self, ticket: Ticket | None) -> None:
        """Set the transport's ticket; None: the transport has not taken the payload."""
        self.ticket = ticket

    def add_wait(self, seconds: float) -> None:
        """Count time spent on waiting."""
        self.wait_s += seconds


class Replica(SharedCopy):
    """Everything that this node's next step depends on, besides the other nodes.

    Attributes:
        run: this node.
        step: number of the next step, or of the unfinished one.
        saved_by: the node whose checkpoint was loaded; empty: none was, or it does not say.
        pending: the update of an unfinished step.
        sent: the updates of the last finished steps, which peers may not have yet.
        sharding: of the sharded exchange; None in the mesh, and until the training begins.
        agreement: of the nodes' updates.
    """

    def __init__(self, groups: Groups, total: PlainSum, me: Peer, options: Options) -> None:
        super().__init__(groups, total, applies_residual=options.apply_residual)
        self.run = run_of(me)
        self.step = max(encoder.step for encoder in groups.encoders)
        self.saved_by = ""
        self.pending: StepUpdate | None = None
        # Kept after the step: if this node is cut off, the others say which of these updates they have applied.
        self.sent: deque[StepUpdate] = deque(maxlen=options.kept_updates)
        self.sharding: Sharding | None = None
        self.agreement = Agreement(
            repeats=options.every == 1,
            limits_norms=options.limit_outliers and options.reduction == "mean",
            outer_momentum=options.outer_momentum,
        )
        self._options = options
        self._division = Division(groups)
        self._sizes = [(encoder.key, encoder.numel) for encoder in groups.encoders]
        # Encoders that take more out of the residual than they send: the parameters would bring it back.
        self._is_lossy = any(
            encoder.clip is not None or encoder.on_nonfinite == "skip"
            for encoder in groups.encoders
        )
        # Parts that came back to the residual, and not yet to parameters that contain the residual.
        self._late: list[tuple[PartUpdate, float]] = []
        # Until the training begins: a checkpoint's state of an owner, and parts of members that have begun already.
        self._owner_state: Mapping[str, Any] | None = None
        self._early_parts: Arrived | None = {}

    @property
    def oldest_sent(self) -> StepUpdate | None:
        """The oldest of the kept updates; None while there is space for more."""
        return self.sent[0] if len(self.sent) == self.sent.maxlen else None

    # ---- the way of the exchange -------------------------------------------------------------------------------------

    def begin(
        self, step: int, nodes: int, *, is_sharded: bool, accepted: Accepted | None = None
    ) -> None:
        """Begin to train at a step, with so many nodes, in the way that the members have chosen.

        Args:
            step: number of the next step.
            nodes: that take part in the step, this one included.
            is_sharded: whether parameters have owners.
            accepted: of the member that gave the parameters.
        """
        self.step = step
        # Members of another part of a split network may have chosen the other way: who joins them changes with them.
        if not is_sharded:
            self.sharding = None
            if self._owner_state is not None:
                weight = nodes if self._options.reduction == "mean" else 1
                self._put_part_back(part_of_state(self._owner_state, self.run), weight)
        elif self.sharding is None:
            self.sharding = Sharding(
                self.groups,
                self._division,
                self.run,
                self._options.owners_max,
                self._options.codec,
                self._options.reduction == "mean",
                self._options.every,
                self._put_part_back,
                accepted or {},
                self._early_parts or {},
            )
            self.sharding.load_owner(self._owner_state)
        self._owner_state = None
        self._early_parts = None

    def assign_owners(
        self, contributors: Iterable[NodeRun], step: int, workers: Collection[NodeRun]
    ) -> None:
        """Assign the parameters to the nodes that take part in a step; in the mesh nobody owns anything."""
        if self.sharding is not None:
            self.sharding.assign_owners(contributors, step, workers)

    # ---- this node's updates -----------------------------------------------------------------------------------------

    def encode(self, update: Any, codec: Codec | None, before: Any = None) -> StepUpdate:
        """Encode this node's update of the next step; with None for the codec all that is left, as the last update.

        The arguments are those of `Groups.encode`.

        Raises:
            GradwireError: no node owns parameters.
        """
        if self.sharding is not None:
            sharded = self.sharding.encode(self.step, update, codec, before)
            return StepUpdate(self.step, [], sharded=sharded)
        messages = self.groups.encode(update, codec, before)
        return StepUpdate(self.step, messages, self.groups.on_host(messages))

    def hold(
        self,
        update: StepUpdate,
        params: Any,
        begin_s: float,
        *,
        has_moved: bool,
        wait_s: float = 0.0,
    ) -> None:
        """Hold an update until its step is finished.

        The local steps go from the caller's parameters: residual and messages hold them now.

        Args:
            update: just encoded.
            params: the caller's; with ``apply_residual`` the parameters hold the update too.
            begin_s: when the encoding began.
            has_moved: whether the parameters held the update before the encode.
            wait_s: time spent on waiting before the encode.
        """
        self.local_steps = 0
        # With ``apply_residual`` the parameters that the caller has moved are already what they have to be: shared
        # parameters, residual and update. Rewriting them would cost a pass and change their rounding, but encoders that
        # drop something need it.
        if self.shared and not (self.applies_residual and has_moved and not self._is_lossy):
            self.write_params(params)
            if self.applies_residual:
                self._add_update_to_params(update, writable_views(params), 1.0)
        update.encode_s = clock.now_s() - begin_s
        update.add_wait(wait_s)
        self.pending = update

    def prepare(self, update: StepUpdate, lost: Collection[NodeRun]) -> frozenset[NodeRun]:
        """Make the payload of an update; return the nodes whose parts are missing for that."""
        if update.sharded is None or self.sharding is None or update.payload:
            return frozenset()
        missing = self.sharding.missing_parts(update.sharded, lost)
        if not missing:
            update.set_result(self.sharding.make_result(update.sharded))
        return missing

    def take_back(self, update: StepUpdate) -> None:
        """Return to the residuals a message that the transport has refused because of its size."""
        sharded = update.sharded
        # The largest part goes first, so an unsent part means that no owner has got anything, and the whole step is
        # undone. If all parts are out, owners may have added them, and only the result can be taken back.
        if sharded is not None and not sharded.unsent:
            # The result was refused: it goes back into the owner's residual, and the step is still open.
            if sharded.owner is not None:
                sharded.owner.groups.put_back(update.messages)
            update.withdraw_result()
            return
        self.put_back(update)
        self.pending = None
        if sharded is not None and self.sharding is not None:
            self.sharding.withdraw(sharded)

    def put_back(self, update: StepUpdate, factor: float = 1.0, *, is_held: bool = True) -> None:
        """Add one of this node's updates, times a factor, to the residuals; a difference has it if ``is_held``."""
        if not self.is_difference:
            self._add_update_to(self.groups.whole_residuals(), update, factor)
        elif not is_held:
            self._add_update_to_params(update, self.differing, factor)

    def _add_update_to(self, residuals: Sequence[Any], update: StepUpdate, factor: float) -> None:
        if update.sharded is None:
            for message, residual in zip(update.messages, residuals, strict=True):
                apply(message, residual, factor)
            return
        for part in update.sharded.parts.values():
            self._division.add_to_residuals(part, residuals, factor)

    def _add_update_to_params(self, update: StepUpdate, params: Arrays, factor: float) -> None:
        if update.sharded is None:
            for index, message in enumerate(update.messages):
                threads = self.groups.encoders[index].threads
                apply(message, self.groups.select(params, index), factor, threads=threads)
            return
        for part in update.sharded.parts.values():
            self._division.add_to_params(part, params, factor)

    def absorb_local_changes(self, params: Any, weight: float = 1.0) -> None:
        """Move local changes of the caller's parameters, times a factor, into the residual.

        The caller's parameters are replaced after that. Messages of an unfinished step stay apart from the residual.
        """
        self.share_written(params)
        device = device_of(self.shared)
        if self.shared and all(own.device_number == device for own in self.groups.encoders):
            if self.applies_residual and self.pending is not None:
                # They have their weight already.
                self._add_update_to_params(self.pending, writable_views(params), -1.0)
            super().absorb_local_changes(params, weight)

    def put_back_into(self, residuals: Sequence[Any]) -> None:
        """Add everything that may not be applied yet to copies of the residuals."""
        if self.sharding is not None:
            for part in self.sharding.open_parts():
                self._division.add_to_residuals(part, residuals)
        elif self.pending is not None:
            self._add_update_to(residuals, self.pending, 1.0)

    # ---- other nodes' updates ----------------------------------------------------------------------------------------

    def add_part(self, sender: NodeRun, step: int, payload: memoryview) -> None:
        """Keep a part that a node has sent to this owner."""
        part = self.parse(sender, step, payload)
        if not isinstance(part, PartUpdate):
            raise MessageError("a whole update, where a part was expected")
        if step < self.step:
            return
        if self.sharding is not None:
            self.sharding.add_part(part)
        elif self._early_parts is not None:
            keep_part(self._early_parts, part)

    def parse(self, sender: NodeRun, step: int, payload: memoryview) -> list[Message]:
        """Return the messages of a node's update; raise `MessageError` if they do not fit these groups."""
        messages: list[Message]
        if self._options.mode == "async":
            messages = CountedUpdate.parse(payload)
            expected = self._sizes
        elif payload[: len(MESSAGE_MAGIC)] == MESSAGE_MAGIC:
            messages = parse_many(payload)
            expected = self._sizes
        else:
            messages = update = PartUpdate.parse(sender, step, payload)
            expected = [
                (self.groups.encoders[group].key, part.numel)
                for group, part in self._division.part(update.parts, update.place)
            ]
        _check(messages, expected)
        return messages

    def apply(
        self,
        payloads: Payloads,
        params: Any,
        *,
        update: StepUpdate | None = None,
        has_moved: bool = False,
    ) -> None:
        """Add the mean or the sum of updates to the shared parameters.

        Args:
            payloads: for every node one message for every group, in order; or the owners' results.
            params: the caller's.
            update: this node's update, which the caller's parameters hold already with ``apply_residual``.
            has_moved: whether the caller's parameters differ from the shared ones by local steps, which stay.

        Raises:
            MessageError: a node takes part in the other way; nothing was added.
        """
        # Before anything is added: an error must leave the parameters unchanged.
        for payload in payloads:
            if isinstance(payload, PartUpdate) != (self.sharding is not None):
                raise MessageError("a whole update in the sharded exchange, or a part in the mesh")
        if self.shared:
            self._add_to_shared(payloads, params, update, has_moved=has_moved)
        else:
            _add(self, payloads, params)
        if self.sharding is not None:
            self.sharding.settle(cast("Sequence[PartUpdate]", payloads), self.step)

    def settle_written(
        self, payloads: Payloads, params: Any, *, is_common: bool, has_moved: bool
    ) -> bool:
        """Decide at the end of a step what becomes of the values that the caller has written.

        Args:
            payloads: as for ``apply``.
            params: the caller's.
            is_common: whether the callers of all nodes have written the same values before the step.
            has_moved: as for ``apply``.

        Returns:
            Whether the messages must not be applied.
        """
        if not is_common:
            self.share_written(params)
            return False
        unsent = [encoder.state_dict()["residual"] for encoder in self.groups.encoders]
        self.put_back_into(unsent)
        if self.sharding is not None and self.applies_residual:
            self.sharding.settle(cast("Sequence[PartUpdate]", payloads), self.step)
            self.sharding.clear()
            self._late.clear()
        return self.adopt_written(params, unsent, has_moved=has_moved)

    def is_written(self, params: Any, *, is_settled: bool = True) -> bool:
        """Return whether the caller has changed its parameters since the last call."""
        self.add_late_parts(params)
        return super().is_written(params, is_settled=is_settled and self.pending is None)

    def _add_to_shared(
        self,
        payloads: Payloads,
        params: Any,
        update: StepUpdate | None,
        *,
        has_moved: bool,
    ) -> None:
        """Add updates to the shared copy and to the caller's parameters, which keep residual and local steps."""
        targets = writable_views(params)
        if self.applies_residual:
            held = None
            if update is not None:
                messages = update.messages
                held = next(index for index, payload in enumerate(payloads) if payload is messages)
            moved = moved_since(self._sample, targets) if has_moved else None
            _add(self, payloads, self.shared, SecondTarget(targets, held))
            if self.sharding is not None and update is not None:
                # The parts that the parameters hold went to the owners, and come back in the results.
                self._add_update_to_params(update, targets, -1.0)
            # The caller may have moved its parameters meanwhile (``overlap``): messages are no part of that.
            if moved is not None:
                self._sample = sample_beside(targets) - moved
            return
        # Local steps that the caller has taken meanwhile (``overlap``) stay on top of what arrives.
        local = difference(targets, self.shared) if has_moved else []
        _add(self, payloads, self.shared)
        put(targets, self.shared)
        if has_moved:
            add(targets, local)

    def finish_step(self, update: StepUpdate, params: Any) -> None:
        """Keep a finished update a little longer, in host memory, and advance to the next step."""
        update.move_to_host()
        self.pending = None
        self.sent.append(update)
        if self.sharding is not None:
            self.sharding.finish_step(self.step, self.step + 1 - (self.sent.maxlen or 0))
        self.advance(params)

    def advance(self, params: Any, step: int | None = None) -> None:
        """Advance to the next step, or to ``step``, also after one without an update of this node's own."""
        # Members may have gone or come with the step, and owners changed with them.
        self.add_late_parts(params)
        self.step = self.step + 1 if step is None else step

    def take_back_unapplied(
        self, finals: Mapping[NodeRun, int], accepted: Accepted, step: int
    ) -> None:
        """Return to the residual this node's updates that nobody applied, after an absence.

        Args:
            finals: for departed members the first update that nobody applied.
            accepted: of the node that gives the parameters.
            step: number of the next step there.
        """
        # The members have agreed on this node's first update that nobody applies. They do not know this node at all
        # where it was never a member, or where they have begun anew: then none of its updates was applied.
        final = finals.get(self.run)
        unfinished = [*self.sent, *([] if self.pending is None else [self.pending])]
        self.pending = None
        self.sent.clear()
        if self.sharding is not None:
            pairs = [
                (update.sharded, update.messages)
                for update in unfinished
                if update.sharded is not None
            ]
            self.sharding.take_back_unapplied(pairs, final, accepted, step)
            return
        for update in unfinished:
            if final is None or update.step >= final:
                self.put_back(update, is_held=False)

    # ---- parts that come back ----------------------------------------------------------------------------------------

    def _put_part_back(self, part: PartUpdate, factor: float) -> None:
        """Add a part to the residual, and later to the caller's parameters if these contain the residual."""
        if not self.is_difference:
            self._division.add_to_residuals(part, self.groups.whole_residuals(), factor)
        # The caller's parameters are not at hand here. Until the part is added to them, they lack what the residual
        # has.
        if self.applies_residual:
            self._late.append((part, factor))

    def add_late_parts(self, params: Any) -> None:
        """Add the parts that came back to the residual to the caller's parameters, if these contain the residual.

        Called at the end of every step: between two steps the parameters are the shared ones and the residual.
        """
        for part, factor in self._late if self.shared else ():
            self._division.add_to_params(part, writable_views(params), factor)
        self._late.clear()

    def local_delta(self, params: Any, weight: float = 1.0) -> tuple[Arrays | None, Arrays | None]:
        """Return the sum of the local steps since the last exchange, times a factor; see `SharedCopy`."""
        self.add_late_parts(params)
        return super().local_delta(params, weight)

    def write_params(self, params: Any) -> None:
        """Set the caller's parameters to the shared ones, plus the residual with ``apply_residual``."""
        self._late.clear()
        super().write_params(params)

    def _set_residual(self, params: Any) -> None:
        self.add_late_parts(params)
        super()._set_residual(params)

    def make_residual(self, params: Any) -> None:
        """Let the encoders have the residual, without the messages of an unfinished step."""
        was_difference = self.is_difference
        super().make_residual(params)
        if was_difference and self.pending is not None:
            self.put_back(self.pending, -1.0)

    def held(self, params: Any) -> list[bool]:
        """Return for each array whether it is as the last step left it; always in an unfinished step."""
        return super().held(params) if self.pending is None else [True] * len(views(params))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def owner_state(self) -> Mapping[str, Any] | None:
        """Return a copy of this node's state as an owner; None if it owns nothing."""
        if self.sharding is None:
            return self._owner_state
        if self.pending is None or self.pending.sharded is None:
            return self.sharding.owner_state(None, [])
        return self.sharding.owner_state(self.pending.sharded, self.pending.messages)

    def load(
        self, step: int, local_steps: int, owner_state: Mapping[str, Any] | None, saved_by: str
    ) -> None:
        """Continue from a checkpoint at a step; the owner's state waits for the beginning of the training."""
        self.step = step
        self.local_steps = local_steps
        self._owner_state = owner_state
        self.saved_by = saved_by


def check_params(replica: Replica, params: Any) -> None:
    """Refuse parameters that a call could not use, before anything is taken or encoded.

    Raises:
        TypeError, ValueError: they are others than those of the training so far, or nothing can be added to them.
    """
    groups = replica.groups
    total = replica.total
    velocity = total.velocity if isinstance(total, MomentumSum) else []
    known = replica.shared or velocity
    if known:
        check_layouts(params, known)
    elif replica.applies_residual:
        groups.residuals(writable_views(params))
    elif isinstance(total, MomentumSum):
        writable_views(params)
    # The usual case is clearly right, and a step has no time to lose.
    elif not (
        isinstance(params, np.ndarray)
        and params.dtype == np.float32
        and params.size == groups.numel
        and params.flags.carray
    ):
        groups.check_params(params)


def drop_outdated(replica: Replica, positions: Mapping[NodeRun, int], params: Any) -> None:
    """Drop what a checkpoint has not sent, where the others have applied later updates of this node.

    Most of it was in those: it would count twice.

    Args:
        replica: of a node that comes late.
        positions: for members and departed ones, the first update that is not applied.
        params: of the caller; afterwards the shared ones.
    """
    own = replica.run
    earlier = [step for run, step in positions.items() if run.id == own.id and run < own]
    # A node that was a member itself has a residual of its own time.
    if own in positions or not 0 < replica.step < max(earlier, default=0):
        return
    _LOG.warning(
        "this node has saved its checkpoint before step %d, and went on until step %d: the residual is dropped, the "
        "others have had it",
        replica.step,
        max(earlier),
    )
    if replica.shared:
        put(writable_views(params), replica.shared)
    if replica.groups.has_residuals:
        for residual in replica.groups.whole_residuals():
            residual[...] = 0
    replica._owner_state = None


def add_to_exported(replica: Replica, payloads: Payloads, exported: Arrays) -> None:
    """Add a step's updates to what another node's ``export_state`` has returned, as that node adds them."""
    total, params = replica.total.at(exported)
    _add(replica, payloads, params, total=total)


def _add(
    replica: Replica,
    payloads: Payloads,
    params: Any,
    second: SecondTarget | None = None,
    total: PlainSum | None = None,
) -> None:
    """Add owners' results, or whole updates: their sum, or their mean."""
    total = total or replica.total
    options = replica._options
    if payloads and isinstance(payloads[0], PartUpdate):
        results = cast("Sequence[PartUpdate]", payloads)
        total.add_results(partial(replica._division.add_results, results), params, second)
    elif options.mode == "sync":
        divisor = len(payloads) if options.reduction == "mean" else 1
        total.add_payloads(payloads, params, divisor, second)
    else:
        _add_counted(total, payloads, params, options, second)


def _add_counted(
    total: PlainSum,
    payloads: Payloads,
    params: Any,
    options: Options,
    second: SecondTarget | None,
) -> None:
    """Add asynchronous updates, each divided as it says; together those that say the same, as nearly all do."""
    is_mean = options.reduction == "mean"
    counted = cast("Sequence[CountedUpdate]", payloads)
    place = 0
    for divisor, run in groupby(counted, lambda update: update.nodes if is_mean else 1):
        updates = list(run)
        target = second
        if second is not None and second.held is not None:
            held = second.held - place
            target = SecondTarget(second.params, held if 0 <= held < len(updates) else None)
        total.add_payloads(updates, params, divisor, target)
        place += len(updates)


def _check(messages: Sequence[Message], expected: Sequence[tuple[int, int]]) -> None:
    """Raise `MessageError` unless messages have these keys and numbers of elements, and finite values."""
    sizes = [(message.key, message.numel) for message in messages]
    if sizes != expected:
        raise MessageError(f"{_describe(sizes)}, but {_describe(expected)} on this node")
    # A ternary message has one finite threshold; a dense one has values of its own, which `encode` had refused.
    for message in messages:
        if message.kind == "dense" and not _is_finite(message):
            raise MessageError(
                f"a dense message of key {message.key} with values that are not finite"
            )


def _is_finite(message: Message) -> bool:
    """Return whether all values of a dense message are finite, without a copy of them."""
    width = (message.nbytes - _HEADER_BYTES) // max(message.numel, 1)
    kind = {2: np.uint16, 4: np.float32, 8: np.float64}[width or 4]
    values: Any = np.frombuffer(memoryview(message), kind, offset=_HEADER_BYTES)
    for begin in range(0, values.size, _BLOCK_NUMEL):
        block = values[begin : begin + _BLOCK_NUMEL]
        # NumPy has no bfloat16: with all bits of the exponent a value is infinite, or NaN.
        finite = block & 0x7F80 != 0x7F80 if width == 2 else np.isfinite(block)
        if not finite.all():
            return False
    return True


def _describe(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{numel} elements in group {key}" for key, numel in sizes) or "nothing"
