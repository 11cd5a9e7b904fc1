"""One step: wait for space to send, encode, publish, wait for the members' messages, apply."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from .. import clock
from ..arrays import Arrays, copies, nonfinite, on_host, scaled, writable_views
from ..errors import NonFiniteUpdate, TooLarge, WouldBlock
from ..slices import datagram_hint
from ..transport import Node
from .consistency import digest_of
from .departure import Departure
from .groups import Codec
from .join import Join
from .membership import Membership, Router, Updates
from .notes import Notes
from .options import Options
from .parameters import Payloads
from .protocol import CountedUpdate, NodeRun, Phase
from .replica import Replica, StepUpdate
from .results import StepResult
from .snapshot import NodeState

__all__ = ["Step"]

_LOG = logging.getLogger(__name__)

# Space that a step asks for before encoding: the largest possible message, but at most this, which every node has.
_ROOM_BYTES_MAX = 16 << 20
_NO_SPACE = "no space to send it: a peer does not take its messages"


class LeftBehind(Exception):
    """The others have gone on without this node, in the middle of a step."""


class Step:
    """Takes the steps that send a message."""

    def __init__(
        self,
        options: Options,
        replica: Replica,
        membership: Membership,
        notes: Notes,
        router: Router,
        departure: Departure,
        join: Join,
    ) -> None:
        self._options = options
        self._is_sync = options.is_sync
        self._replica = replica
        self._membership = membership
        self._introductions = membership.introductions
        self._notes = notes
        self._router = router
        self._departure = departure
        self._join = join
        most_bytes = replica.groups.max_payload_bytes(options.codec)
        self._room_bytes = min(most_bytes, _ROOM_BYTES_MAX)
        self._last_missing: frozenset[NodeRun] = frozenset()
        self._room_s = 0.0  # waited for space since the last step that sent
        self._has_shared_written = False

    def take_step(
        self, update: Any, params: Any, optimizer_state: NodeState, *, has_moved: bool = False
    ) -> StepResult | None:
        """Send an update and add all members' to the parameters; the arguments are those of ``Exchange.step``.

        With ``has_moved`` the update is the difference between the parameters and the shared ones.

        Returns:
            The result; None where a later call finishes the step (``overlap``).
        """
        replica = self._replica
        # Space first: without space the update only accumulates, because an encoded message is never encoded again.
        self.wait_for_room(params, optimizer_state)
        begin_s = clock.now_s()
        # Before the weight, which makes a machine's update count as its workers do: a sketch counts the workers itself.
        weight = self._membership.weight
        if has_moved and replica.is_difference:
            weight = 1.0  # a node with workers of its own has come in this step: it counts from the next one on
        if replica.agreement.is_on or replica.agreement.limits_norms:
            weight *= self._compare(update, params, has_moved=has_moved)
        before = None
        # Without a residual an update goes into the parameters first, which differ from the shared ones by both then.
        is_held = has_moved or not replica.groups.keeps_residuals
        try:
            if not has_moved and is_held:
                replica.add_update(update, params, weight)
                update, before = replica.local_delta(params)
            elif has_moved:
                update, before = replica.local_delta(params, weight)
            elif weight != 1.0:
                update = _weighed(update, weight, self._membership.teams)
            pending = replica.encode(update, self._options.codec, before)
        except NonFiniteUpdate:
            # The parameters have moved already, and must not stay NaN; or they lack the finite part.
            if is_held:
                replica.reject(params)
            elif replica.applies_residual:
                replica.write_params(params)
            raise
        replica.hold(pending, params, begin_s, has_moved=is_held, wait_s=self._room_s)
        self._room_s = 0.0
        if self._options.overlap:
            # The message leaves now and the next call waits for the others', so they travel while the caller computes.
            begin_s = clock.now_s()
            self._publish(pending)
            self._join.poll(0.0)
            pending.add_wait(clock.now_s() - begin_s)
            result = None
        else:
            result = self._finish_or_repeat(pending, self._options.codec, params, optimizer_state)
        if has_moved and self._membership.weight != 1.0:
            # It tells apart what the next step will move, which is to be weighed.
            replica.make_residual(params)
        elif is_held:
            samples = replica.agreement.is_on or replica.agreement.limits_norms
            replica.drop_residual(params, samples=samples)
        return result

    def _compare(self, update: Any, params: Any, *, has_moved: bool) -> float:
        """Let the note of this step's update say how it is to be compared with the others', where that is measured.

        Returns:
            What to multiply the update by: less than 1 where it is far longer than the others' have been.
        """
        replica = self._replica
        agreement = replica.agreement
        knows_update = update is not None or has_moved  # or the residual holds it
        if knows_update and agreement.is_due():
            replica.add_late_parts(params)
            agreement.measure(replica.step, replica.samples(update, params))
        own = agreement.take_own()
        if own is None:
            return 1.0
        # The members' norms are of an earlier step: a node that waited for this step's would need one more round trip.
        factor = agreement.shorten(own.norm)
        if factor < 1.0 or agreement.takes(replica.step):
            self._notes.announce_update(
                own.norm if agreement.limits_norms else None,
                None if own.sketch is None else own.sketch.scaled(factor),
            )
        return factor

    def written_values(self, params: Any, values: Sequence[Any] | None) -> Arrays:
        """Return copies of what the caller has written into the parameters; empty: nothing.

        Raises:
            NonFiniteUpdate: the values are not finite.
        """
        replica = self._replica
        is_kept = self._options.apply_residual or self._options.every > 1 or values is not None
        if not replica.shared or not is_kept:
            return []  # the parameters themselves are the shared ones
        if values is None and not replica.is_written(params):
            return []
        written = copies(writable_views(params) if values is None else values)
        count = nonfinite(written)
        # Without any there is nothing to compare, and nothing to copy from a device.
        before = nonfinite(list(map(on_host, replica.shared))) if count else 0
        if count > before:
            raise NonFiniteUpdate(
                f"{count - before} elements of the parameters were set to NaN or infinity between two steps: nothing "
                "was sent; write finite values",
                count - before,
            )
        return written

    def take_written(self, params: Any, written: Arrays) -> None:
        """Go on from values that the caller has written; `Replica.settle_written` says whether for all nodes."""
        digest = digest_of(written) if self._is_sync else ""
        self._replica.take_written(params, written, digest)

    def catch_up(self, params: Any, optimizer_state: NodeState, timeout_s: float) -> int:
        """Apply the asynchronous members' updates that have arrived; see ``Exchange.catch_up``."""
        membership = self._membership
        self._join.ensure_member(params, optimizer_state)
        self._join.poll(timeout_s)
        payloads = [messages for _, messages in membership.take_updates()]
        self._departure.remove_departed()
        if payloads:
            self._replica.share_written(params)
            self._replica.apply(payloads, params, has_moved=True)
        self._join.serve(params, optimizer_state)
        self._replica.remember(params)
        return len(payloads)

    def leave(self, params: Any, optimizer_state: NodeState) -> StepResult:
        """Send all that is left as the last update, and once more where it is lost with an owner; then say so."""
        replica = self._replica
        others = self._membership.peers
        while True:
            self._router.hold_introductions(-1)  # the others may go on with further parameters now
            self.wait_for_room(params, optimizer_state)
            # What the last local steps have moved is part of the last update. A difference has it, and needs no memory.
            if not replica.is_difference:
                replica.make_residual(params)
                if replica.local_steps or replica.written is not None:
                    replica.absorb_local_changes(params, self._membership.weight)
            pending = self._encode_rest(None, params)
            result = self._finish_or_repeat(pending, None, params, optimizer_state)
            if replica.sharding is None or self._membership.run not in replica.sharding.senders:
                break
        self._join.end(others)
        return result

    def finish_earlier(self, params: Any, optimizer_state: NodeState) -> StepResult | None:
        """Finish a step that was interrupted after encoding, or left open on purpose (``overlap``), if there is one."""
        pending = self._replica.pending
        if pending is None:
            return None
        try:
            return self._finish(pending, params, has_moved=True)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; no update of this call was taken") from None
        except LeftBehind:
            self._join.ensure_member(params, optimizer_state)
            return None

    def _finish_or_repeat(
        self, pending: StepUpdate, codec: Codec | None, params: Any, optimizer_state: NodeState
    ) -> StepResult:
        """Finish the pending step, or a later one where the others have gone on without this node."""
        while True:
            try:
                return self._finish(pending, params, has_moved=False)
            except LeftBehind:
                # The messages are back in the residual, or in the parameters that differ by it, for the step at which
                # the others admit this node.
                self._join.ensure_member(params, optimizer_state)
            pending = self._encode_rest(codec, params)

    def _encode_rest(self, codec: Codec | None, params: Any) -> StepUpdate:
        """Encode what the residual has, or what the parameters differ by, as a new update; the codec is `encode`'s."""
        replica = self._replica
        begin_s = clock.now_s()
        update, before = replica.local_delta(params) if replica.is_difference else (None, None)
        pending = replica.encode(update, codec, before)
        replica.hold(pending, params, begin_s, has_moved=replica.is_difference)
        return pending

    # ---- space -------------------------------------------------------------------------------------------------------

    def wait_for_room(self, params: Any, optimizer_state: NodeState) -> None:
        """Receive until the node has space for one more message and no member is too far behind; count the seconds.

        Raises:
            WouldBlock: after ``timeout_s``; with ``on_straggler="wait"`` only where there is no space.
        """
        timeout_s = self._options.timeout_s
        begin_s = clock.now_s()
        deadline_s = begin_s + timeout_s
        while True:
            # The others may have gone on without this node while it waited.
            if self._membership.phase is Phase.JOINING:
                self._join.ensure_member(params, optimizer_state)
            obstacle = self._obstacle()
            if obstacle is None:
                self._room_s += clock.now_s() - begin_s
                return
            if clock.now_s() >= deadline_s:
                deadline_s = clock.now_s() + timeout_s
                step = self._introductions.step_number(self._replica.step)
                text = f"step {step} cannot begin within {timeout_s:g} s: {obstacle}"
                if obstacle == _NO_SPACE or self._options.on_straggler != "wait":
                    raise WouldBlock(f"{text}; the update was not taken")
                _LOG.warning("%s; waiting goes on", text)
            self._join.poll(clock.ROOM_POLL_S)

    def _obstacle(self) -> str | None:
        """Return the reason why this node cannot send one more update; None if it can."""
        if not self._router.node.has_room(self._room_bytes):
            self._router.make_room()
            return _NO_SPACE
        if self._is_sync:
            return None
        # A node that runs ahead would make the others apply updates for parameters that they have long left.
        staleness, slowest = _staleness(self)
        if staleness > self._options.max_staleness:
            self._last_missing = slowest
            names = self._introductions.describe(slowest)
            return f"this node is {staleness} steps ahead of {names}"
        oldest = self._replica.oldest_sent
        # An update may be forgotten only when all have it: members that miss it after a death get it from those that
        # keep it.
        if oldest is not None and oldest.ticket is not None and not oldest.ticket.is_done:
            return f"a peer has not got step {oldest.step} yet"
        return None

    # ---- the members' messages ---------------------------------------------------------------------------------------

    def _publish(self, pending: StepUpdate) -> frozenset[NodeRun]:
        """Hand a member's update over unless that is done; without space it stays for the next try.

        Returns:
            The members of which something is missing for the update.

        Raises:
            TooLarge: the transport refuses the size; the message is back in the residual.
        """
        if pending.ticket is not None or self._membership.phase is Phase.JOINING:
            return frozenset()
        unaware = frozenset() if self._is_sync else self._membership.members_unaware_of_us
        # Members that do not know this node yet would ignore its update, which others apply.
        if unaware:
            return unaware
        try:
            if pending.sharded is not None:
                # Parts go before the result, so an owner has a node's part when it sees the node's result.
                if not self._router.flush(pending.sharded.unsent):
                    return frozenset()
                lost = self._router.lost | self._membership.departing.keys()
                missing = self._replica.prepare(pending, lost)
                if missing:
                    return missing
            self._router.greet()
            written = self._replica.written
            self._notes.send(pending.step, "" if written is None else written.digest)
            if not (self._is_sync or isinstance(pending.messages, CountedUpdate)):
                pending.count(len(self._membership.peers) + 1)
            pending.set_ticket(self._router.publish_update(pending.step, pending.payload))
        except TooLarge:
            self._replica.take_back(pending)
            self._membership.restart_at(pending.step)
            raise
        return frozenset()

    def _wait_for_members(self, pending: StepUpdate) -> None:
        """Return when the own message is handed over and, in synchronous mode, all members' have arrived.

        Raises:
            LeftBehind: the members do not wait for this node.
            TimeoutError: a member sent nothing in time, or there was no space.
            TooLarge: the transport refuses the size; the message is back in the residual.
        """
        membership = self._membership
        timeout_s = self._options.timeout_s
        deadline_s = clock.now_s() + timeout_s
        may_drop = self._options.on_straggler == "drop"
        # A member may be silent because it waits for a part of another member. It will suspect that member about now,
        # so the first timeout of an owner's result suspects nobody.
        is_patient = pending.sharded is not None
        poll_s = 0.0
        slices = None
        while True:
            needed = self._publish(pending)
            self._join.poll(poll_s)
            # A large message may take longer than that on a slow link: as long as parts of it come and go, nobody is
            # silent.
            before, slices = slices, self._router.slices
            if slices != before:
                deadline_s = clock.now_s() + timeout_s
            if membership.phase is Phase.JOINING:
                raise LeftBehind
            # ``needed`` holds up this node's own message, ``missing`` the end of the step.
            missing = needed | membership.missing(pending.step) if self._is_sync else needed
            if pending.ticket is not None and not missing:
                return
            self._last_missing = missing or self._last_missing
            # Four answers to a silent member: log and wait, raise, give an owner a second chance, or go on without it.
            if clock.now_s() >= deadline_s:
                deadline_s = clock.now_s() + timeout_s
                if self._options.on_straggler == "wait" and (pending.ticket is not None or needed):
                    _LOG.warning("%s; waiting goes on", self._timed_out(pending, missing))
                elif not may_drop:
                    text = self._timed_out(pending, missing)
                    raise TimeoutError(f"{text}; call again to go on with it")
                elif is_patient and not needed:
                    # An owner may wait for a part, and suspects its sender about now.
                    is_patient = False
                else:
                    may_drop = False
                    silent = [run for run in needed or missing if run not in membership.departing]
                    self._departure.suspect(silent, "sends nothing: the others go on without it")
            has_room = pending.ticket is not None or needed
            poll_s = clock.POLL_S if has_room else clock.ROOM_POLL_S

    def _timed_out(self, pending: StepUpdate, missing: frozenset[NodeRun]) -> str:
        silent = missing.difference(self._membership.departing) or missing
        names = self._introductions.describe(sorted(silent))
        hint = _hint(pending, self._router.node)
        what = f"no message from {names}, though connected{hint}" if silent else _NO_SPACE
        step = self._introductions.step_number(pending.step)
        return f"step {step} is not finished after {self._options.timeout_s:g} s: {what}"

    # ---- the end of a step -------------------------------------------------------------------------------------------

    def _finish(self, pending: StepUpdate, params: Any, *, has_moved: bool) -> StepResult:
        """Hand over the pending message, wait for the others' and apply all of them, by node id."""
        membership = self._membership
        replica = self._replica
        begin_s = clock.now_s()
        self._wait_for_members(pending)
        if replica.sharding is not None:
            unfit = replica.sharding.unfit(membership.updates_of(pending.step))
            if unfit and not self._departure.refuse(unfit, pending.step):
                raise LeftBehind
        arrived_s = clock.now_s()
        pending.add_wait(arrived_s - begin_s)
        others = membership.take_updates(pending.step if self._is_sync else math.inf)
        # All synchronous nodes add in this order, which makes their bits equal.
        in_order = sorted([*others, (membership.run, pending.messages)], key=itemgetter(0))
        payloads = [messages for _, messages in in_order]
        is_replaced = replica.written is not None and self._settle_written(
            pending, [run for run, _ in others], payloads, params, has_moved=has_moved
        )
        if not is_replaced:
            replica.apply(payloads, params, update=pending, has_moved=has_moved)
        if self._is_sync:
            self._join.finish_step([run for run, _ in others])
        else:
            self._departure.remove_departed()
            if replica.agreement.takes(pending.step):
                self._notes.measure(replica.agreement, None)
        if not self._introductions.is_confirmed:
            self._introductions.confirm()
        result = self._result(pending, others, clock.now_s() - arrived_s)
        replica.finish_step(pending, params)
        return result

    def _settle_written(
        self,
        pending: StepUpdate,
        senders: Sequence[NodeRun],
        payloads: Payloads,
        params: Any,
        *,
        has_moved: bool,
    ) -> bool:
        """Decide what becomes of written parameters; return whether the messages must not be applied."""
        is_common = self._is_sync and self._notes.is_written_by_all(senders, pending.step)
        if is_common:
            what = "all nodes go on from the parameters that were written on all of them"
            _LOG.info("step %d: %s", self._introductions.step_number(pending.step), what)
        elif not self._has_shared_written:
            self._has_shared_written = True
            _LOG.warning(
                "step %d: the parameters were changed on this node between two steps, and not in the same way on all "
                "nodes: the change is shared as an update",
                self._introductions.step_number(pending.step),
            )
        return self._replica.settle_written(
            payloads, params, is_common=is_common, has_moved=has_moved
        )

    def _result(self, pending: StepUpdate, others: Updates, apply_s: float) -> StepResult:
        replica = self._replica
        agreement = replica.agreement
        peer_of = self._introductions.peer_of
        # Events since the last result, whenever they happened: each is in exactly one result.
        lost, joined = self._membership.drain_events()
        encoded = pending.encoded
        sent_bytes = pending.nbytes
        received_bytes = sum([message.nbytes for _, update in others for message in update])
        lost_elements = 0
        if pending.sharded is not None and replica.sharding is not None:
            received_bytes += pending.sharded.received_bytes
            lost_elements = replica.sharding.drain_lost_elements()
        slowest = min(self._last_missing, default=None)
        self._last_missing = frozenset()
        return StepResult(
            step=pending.step,
            sent_bytes=sent_bytes,
            density=sum([message.count for message in encoded]) / max(replica.groups.numel, 1),
            threshold=encoded[0].threshold if encoded else 0.0,
            is_shakeup=bool(encoded) and encoded[0].is_shakeup,
            received=len(others),
            received_bytes=received_bytes,
            applied=len(others) + 1,
            ignored=self._router.drain_ignored(),
            lost=tuple(map(peer_of, lost)),
            joined=tuple(map(peer_of, joined)),
            lost_elements=lost_elements,
            shortened=agreement.drain_shortened() if agreement.limits_norms else 0,
            staleness=0 if self._is_sync else _staleness(self)[0],
            ratio=4 * replica.groups.numel / max(sent_bytes, 1),
            encode_s=pending.encode_s,
            wait_s=pending.wait_s,
            apply_s=apply_s,
            slowest=None if slowest is None else peer_of(slowest),
        )


def _staleness(step: Step) -> tuple[int, frozenset[NodeRun]]:
    """Return how many steps this node is ahead of the slowest member, and that member; none without members."""
    slowest = step._membership.slowest
    if slowest is None:
        return 0, frozenset()
    next_step, run = slowest
    return max(0, step._replica.step - next_step), frozenset([run])


def _weighed(update: Any, weight: float, teams: Sequence[tuple[int, int]]) -> Any:
    if update is None:
        (here, _), *_ = teams
        raise ValueError(
            f"{here} of {sum(workers for workers, _ in teams)} workers are on this machine, so its update has to "
            f"be multiplied by {weight:.3g}: pass the update, it cannot be in the residual"
        )
    return scaled(update, weight)


def _hint(pending: StepUpdate, node: Node) -> str:
    """Return what to try, where the others do not get this node's update; otherwise they may just compute."""
    ticket = pending.ticket
    return "" if ticket is None or ticket.is_done else f"; {datagram_hint(node)}"
