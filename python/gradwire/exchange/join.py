"""Joining: a late start with a snapshot, and the admission of newcomers; and when Ctrl-C comes."""

from __future__ import annotations

import functools
import logging
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from .. import clock
from ..arrays import Arrays, copies, layouts, on_host
from ..errors import Mismatch, PeerLost
from ..message import Message
from ..slices import datagram_hint
from .departure import Departure, Trainings
from .membership import Membership, Router
from .notes import Notes
from .options import Options
from .owner import can_be_of_same_owners
from .parameters import MomentumSum
from .protocol import DROPPED, Hello, Kind, NodeRun, Phase, run_of
from .replica import Replica, add_to_exported, drop_outdated
from .results import Pace
from .snapshot import Donor, NodeState, Recipient, Snapshot

__all__ = ["Join", "check_members", "held_back", "let_through"]

_LOG = logging.getLogger(__name__)

# Exchanges of the members that may pass until a newcomer gets an answer: it may ask right after one has begun.
_SILENT_STEPS = 2
# A request to several members names a step that they reach so many seconds later, and at most so many steps.
_REQUEST_S = 1.0
_STEPS_AHEAD_MAX = 16
# Memory for the members' updates that wait for the snapshot: times its size, and at least so many bytes, and updates of
# every member: those of large dense trainings have the size of the snapshot.
_KEPT_FACTOR = 2
_KEPT_BYTES = 256 << 20
_KEPT_UPDATES = 4


def _tell_step(ensure_member: Callable[..., None]) -> Callable[..., None]:
    """Log the step at which a node comes in late."""

    @functools.wraps(ensure_member)
    def told(self: Join, *args: Any) -> None:
        comes_late = self._membership.phase is not self._membership.destination
        ensure_member(self, *args)
        comes_late = comes_late and self._membership.phase is not Phase.NEW
        if comes_late and self._options.role != "observer":
            _LOG.warning(
                "this node comes in late, at step %d of the training: let schedules and data go on from there "
                "(step_number)",
                self._introductions.step_number(self._replica.step),
            )

    return told


def check_members(join: Join) -> None:
    """Raise `PeerLost` if fewer members are left than a step needs; every worker of a team counts.

    Where no member was left and nodes join again, they come in with steps, of which the first ones have fewer.
    """
    if not (join._is_early and _is_enough(join)):
        join._departure.check_members(join._options.min_members)
        join._is_early = False


def _is_enough(join: Join) -> bool:
    """Return whether the workers of the members, and of nodes about to be members, are as many as a step needs."""
    introductions = join._introductions
    joining = [*introductions.compatible(Phase.JOINING), *introductions.compatible(Phase.READY)]
    others = set(joining) - set(join._membership.peers)
    teams = [*join._membership.teams, *(introductions.teams[run] for run in others)]
    return sum(workers for workers, _ in teams) >= join._options.min_members


def _describe_too_few(join: Join) -> str:
    """Say why none of the nodes that wait for a member goes on for the others to join; empty if one may."""
    waiting = sorted(join._introductions.compatible(Phase.JOINING))
    if not waiting or join._introductions.compatible(Phase.IN) or _is_enough(join):
        return ""
    return (
        f"{join._introductions.describe(waiting)} and this node see no member, and are fewer than the "
        f"{join._options.min_members} that a step needs (min_members): if the others do not come back, start all nodes "
        "from checkpoints"
    )


def _deliver(join: Join, others: Collection[NodeRun]) -> None:
    """Wait until all connected nodes have everything that this node has sent, as long as they take anything.

    Args:
        join: of this node.
        others: the members when the last update was made, of which some may have gone since.

    Raises:
        TimeoutError: a connected node has taken nothing for ``timeout_s``; not with ``on_straggler="wait"``.
        PeerLost: the last node was lost before it had everything.
    """
    # Worth waiting for: without the last update the others' replicas end with other bits than this one, and without the
    # goodbye they take this node for crashed.
    introductions, options = join._introductions, join._options
    wait = clock.Wait("the last update is on its way", options.timeout_s)
    late: dict[NodeRun, int] = {}
    lost: set[NodeRun] = set()
    # Before the loop, because a connection that ends takes its introduction with it.
    observers = set(introductions.observers)
    while True:
        is_sent = join._router.flush()
        paths = join._router.node.stats().peers
        connected = {run_of(path.peer) for path in paths}
        lost |= late.keys() - connected - observers
        late = {run_of(path.peer): path.backlog_records for path in paths if path.backlog_records}
        if is_sent and not late:
            break
        names = introductions.describe(late)
        wait.note(sum(late.values()), f"{sum(late.values())} records to go to {names}")
        if wait.is_over and options.on_straggler != "wait":
            raise TimeoutError(
                f"{names} has taken nothing for {wait.silence_s:g} s and lacks this node's last update: the parameters "
                "there are others than here"
            )
        # Received as before: a node that takes no messages would hold up the others.
        join.poll(clock.ROOM_POLL_S)
    if lost:
        join.poll(0.0)  # a node that has finished says so before it closes the connection
    # The step of the last update may have ended because all others were lost in it: then nobody has the update.
    if others and all(map(introductions.is_out_of_reach, others)):
        lost.update(others)
    lost = {run for run in lost if not introductions.has_finished(run)}
    if not lost:
        return
    names = introductions.describe(lost)
    text = f"the connection with {names} was lost before this node's last update had arrived"
    if connected:
        _LOG.warning("%s", text)
    elif join._replica.pending is not None:
        # With ``overlap`` a step is open at every orderly end. Its updates are in nobody's parameters, not here either,
        # and the connections end in any order: who is gone lacks nothing.
        _LOG.info("%s", text)
    else:
        raise PeerLost(
            f"{text}, and nobody else has it: if that node runs, its parameters are others than here"
        )


class Join:
    """Makes this node a member, and serves the nodes that come later.

    Args:
        options, membership, notes, router, departure, trainings: of this node.
        replica: replaced by a member's when this node joins late.
        on_load: called when it has been replaced.
        on_follow: called with the caller's parameters after every step that this node follows without being a member.
    """

    def __init__(
        self,
        options: Options,
        membership: Membership,
        notes: Notes,
        router: Router,
        departure: Departure,
        trainings: Trainings,
        replica: Replica,
        on_load: Callable[[], None],
        on_follow: Callable[[Any], None],
    ) -> None:
        self._options = options
        self._membership = membership
        self._introductions = membership.introductions
        self._notes = notes
        self._router = router
        self._departure = departure
        self._trainings = trainings
        self._replica = replica
        self._on_load = on_load
        self._on_follow = on_follow
        self._is_early = False  # came in late, and there have not been ``min_members`` since
        step_bytes = replica.groups.max_payload_bytes(options.codec)
        peer_of = self._introductions.peer_of
        self._donor = Donor(router.node, self._introductions, step_bytes, departure.supply)
        self._recipient = Recipient(router.send, lambda run: peer_of(run).address, membership.run)
        router.handle(Kind.HELLO, self._add_hello)
        router.handle(Kind.REQUEST, self._donor.add_request)
        router.handle(Kind.SNAPSHOT, self._recipient.add_part)

    def poll(self, timeout_s: float) -> None:
        """Send as much as there is space for, receive for up to ``timeout_s``, and find lost members."""
        let_through()
        if lost := self._router.receive(timeout_s):
            self._departure.handle_lost(lost, self._replica.step)
        if self._departure.is_due:
            self._departure.settle()
        if self._membership.phase in (Phase.NEW, Phase.JOINING):
            self._trainings.tell_members()
        elif self._options.mode == "async":
            self._trainings.give_way_to_unseen()
        if self._introductions.superseded:
            raise Mismatch(self._introductions.superseded)

    # ---- equal initial parameters ------------------------------------------------------------------------------------

    def equalize(self, params: Any, optimizer_state: NodeState) -> None:
        """Give all first members the parameters, and the optimiser's state, of the one with the lowest id.

        Raises:
            TimeoutError: nothing was sent or arrived for ``timeout_s``.
            Mismatch: the arrays do not fit, or cannot be used.
        """
        membership = self._membership
        wait = clock.Wait("the initial parameters travel", self._options.timeout_s)
        # Everybody waits until all digests are equal: otherwise a first update could arrive at a node that still has
        # other parameters, and a node with equal ones would take those that receive theirs for stragglers.
        here = {membership.run: self._replica.step}
        told_s = clock.now_s()
        asked_digest = ""
        while membership.phase is Phase.IN:
            hellos = self._introductions.hellos
            digests = {run: hellos[run].start[0] for run in membership.peers if run in hellos}
            digests[membership.run], own_residual = self._introductions.start
            first = min(digests)
            able = sorted(run for run in digests if digests[run] == digests[first])
            if len(able) == len(digests):
                return
            self._recipient.drop(self._recipient.donors.difference(able))
            if membership.run in able:
                self._donor.serve(here, lambda: _snapshot_of(self, here, params, optimizer_state))
            elif not self._recipient.is_asked:
                _check_initial(self, first if asked_digest else None)
                if (donor := _donor_for(membership.run, sorted(digests), able)) is not None:
                    asked_digest = digests[first]
                    self._recipient.request([donor], {}, self._replica.state_layout(params))
            elif (snapshot := self._recipient.take()) is not None:
                optimizer_state.check(snapshot.arrays[snapshot.params :])
                self._load(snapshot, params, optimizer_state)
                membership.set_params(layouts(params), (asked_digest, own_residual))
                self._router.introduce()
                continue
            # A large model on a slow link takes long: only silence is an error.
            left_bytes = self._donor.remaining_bytes
            text = f"{left_bytes / 1e6:.1f} MB to send" if left_bytes else self._recipient.progress
            wait.note((left_bytes, self._router.node.stats().payload_bytes_received), text)
            # Those that only wait see by this that the others' parameters still travel.
            if self._recipient.progress and clock.now_s() >= told_s + self._options.timeout_s / 4:
                told_s = clock.now_s()
                self._router.introduce()
            if wait.is_over:
                raise TimeoutError(
                    f"nothing of the initial parameters of {self._introductions.name_of(first)} has moved for "
                    f"{wait.silence_s:g} s; {wait.progress}; {datagram_hint(self._router.node)}"
                )
            self.poll(clock.POLL_S)

    # ---- introductions -----------------------------------------------------------------------------------------------

    def _add_hello(self, run: NodeRun, _: int, payload: memoryview) -> None:
        membership = self._membership
        # The loss may come together with the new connection, whose introduction takes the reason away.
        self._departure.rejoin_if_dropped(membership.broken & {run})
        hello, before = self._introductions.read(run, payload)
        # A node that comes in again is no departed one any more, and a report after that would not name it.
        if self._departure.is_due and hello.phase is not Phase.LEAVING:
            self._departure.settle()
        self._departure.heed_exclusions(run, hello)
        # Order matters below: a lost connection first, then misfits, then members, then nodes outside.
        if before is None:
            # The connection is new: the rest of its snapshot will not arrive.
            self._recipient.drop([run])
        if run in self._introductions.incompatible:
            self._departure.suspect_incompatible()
            return
        starts_anew = hello.phase in (Phase.JOINING, Phase.READY)
        is_member = run in membership.members
        if is_member and not starts_anew and hello.phase is not Phase.LEAVING:
            if run in membership.peers and self._trainings.is_elsewhere(hello):
                self._departure.suspect([run], "came in with another part of a split network")
                self._trainings.give_way(run, hello)
            return
        # What came on an earlier connection has a gap before what comes now.
        if before is None or starts_anew:
            membership.expect_updates(run, anew=True)
        begins = before is None or before.phase is Phase.NEW or hello.phase is Phase.JOINING
        if begins and membership.phase is Phase.IN and membership.gets_updates(run):
            self._router.introduce(run)  # tells from which update on
        if is_member:
            if membership.phase in (Phase.IN, Phase.READY) and run not in membership.departing:
                why = "leaves" if hello.phase is Phase.LEAVING else "joins again"
                self._departure.suspect([run], why)
        elif hello.phase is Phase.IN:
            # The sender says from which update on it sends to this node directly: the snapshot must have all before.
            membership.expect_direct(run, hello)
            was_outside = before is not None and before.phase is not Phase.IN
            self._trainings.handle_unknown(run, hello, was_outside=was_outside)

    def end(self, others: Collection[NodeRun] = ()) -> None:
        """Say that this node's last update was sent, unless a step is open, and wait until the others have it.

        Args, Raises: see `_deliver`.
        """
        self._donor.stop()
        if self._replica.pending is None:
            self._router.announce(Phase.LEAVING)
            self._replica.sent.clear()
        _deliver(self, others)

    # ---- newcomers ---------------------------------------------------------------------------------------------------

    def finish_step(self, contributors: Iterable[NodeRun]) -> None:
        """Remove departed members, and admit the newcomers that all members named with their update of this step.

        Args:
            contributors: the other members whose updates were applied.
        """
        membership = self._membership
        # All members run this with the same notes of the same step, and so change the membership alike without another
        # message.
        next_step = self._replica.step + 1
        senders = list(contributors)
        agreement = self._replica.agreement
        if agreement.is_on or agreement.limits_norms:
            self._notes.measure(agreement, self._replica.step)
        admitted = self._notes.named_by_all(senders, self._replica.step)
        if membership.phase is Phase.IN:
            senders.append(membership.run)
        for run in admitted:
            if run == membership.run:
                membership.enter_at(next_step)
            else:  # may be gone again meanwhile, and the next poll will find so
                membership.admit(run, next_step)
            senders.append(run)
        if self._replica.sharding is not None:
            self._replica.assign_owners(senders, next_step, self._introductions.workers)
        if membership.finals:
            self._departure.remove_departed()
        if not admitted:
            return
        if membership.phase is Phase.IN:
            self._router.announce(Phase.IN)  # a newcomer waits for this
        absent = self._trainings.absent(admitted)
        if absent:
            self._departure.suspect(absent, "joins again")
            self._departure.settle()

    def serve(self, params: Any, optimizer_state: NodeState) -> None:
        """Between two steps, give snapshots to the newcomers that have asked."""
        if not self._donor.requests:
            return
        membership = self._membership
        # While members disagree on a departed member's last updates, a snapshot could contain an update that nobody
        # else applies.
        if membership.phase is Phase.IN and not self._departure.unsettled:
            positions = {**membership.positions, membership.run: self._replica.step}
            self._donor.serve(
                positions, lambda: _snapshot_of(self, positions, params, optimizer_state)
            )

    # ---- joining late ------------------------------------------------------------------------------------------------

    @_tell_step
    def ensure_member(self, params: Any, optimizer_state: NodeState) -> None:
        """Become a member where training has begun: load a snapshot, follow the members, be admitted.

        Returns in phase NEW if all members are gone before and nobody has trained: the training is still to begin.

        Raises:
            TimeoutError: nothing happened for ``timeout_s`` and two exchanges of the members, or their updates arrive
                faster than the snapshot.
            Mismatch: the members train something else.
            RuntimeError: this exchange has left.
        """
        membership = self._membership
        introductions = self._introductions
        if membership.phase is Phase.LEAVING:
            raise RuntimeError("this exchange has left")
        self._trainings.begin_to_join()
        wait = clock.Wait("this node joins", self._options.timeout_s)
        pace = Pace()
        earlier = ""
        since = None
        while membership.phase is not membership.destination:
            if membership.phase is Phase.JOINING:
                if self._trainings.has_only_misfits():
                    raise Mismatch(introductions.describe_incompatible())
                if self._trainings.has_to_begin():
                    self._recipient.cancel()
                    self._router.announce(Phase.NEW)
                    return
                self._join_with_snapshot(params, optimizer_state)
            _follow_steps(self, clock.POLL_S, params, optimizer_state)
            if self._options.role == "observer" and not introductions.compatible(Phase.IN):
                return  # nobody is left to follow, which is no error of an observer
            # Every part of a snapshot and every followed step is progress. Members give and name newcomers between two
            # exchanges, so silence lasts as long as these are apart.
            hellos = introductions.compatible(Phase.IN).values()
            pace.watch([stream.received for stream in membership.others.values()])
            step_s = max([pace.longest_s, *(hello.step_s for hello in hellos)])
            wait.allow(self._options.timeout_s + _SILENT_STEPS * step_s)
            obstacle = self._trainings.describe_obstacle() or _describe_too_few(self)
            marker = (self._recipient.received_bytes, self._replica.step, membership.phase)
            # Where members end meanwhile, nothing stands in the way any more, and yet it is why this node is not in.
            if obstacle or marker != since:
                earlier = obstacle
            since = marker
            departed = introductions.describe_departed()
            wait.note(marker, self._recipient.progress or obstacle or departed)
            _check_kept_updates(membership, self._recipient)
            if wait.is_over:
                reason = obstacle or _describe_outside(self, earlier)
                raise TimeoutError(
                    f"this node did not come in within {wait.silence_s:g} s of the last progress, from {len(hellos)} "
                    f"members that it sees; {reason or 'nobody has gone'}"
                )
        # Of a checkpoint: what this node kept as an owner is its residual where another node owns the part now.
        self._replica.add_late_parts(params)

    def observe(self, params: Any, optimizer_state: NodeState, timeout_s: float) -> int:
        """Apply the members' updates without being one; see ``Exchange.follow``."""
        membership = self._membership
        deadline_s = clock.now_s() + timeout_s
        count = 0
        while True:
            # Also those of another training, which is an error.
            hellos = self._introductions.hellos.values()
            has_members = any(hello.phase is Phase.IN for hello in hellos)
            if membership.phase is not Phase.READY and has_members:
                self.ensure_member(params, optimizer_state)
            poll_s = max(0.0, min(clock.POLL_S, deadline_s - clock.now_s()))
            count += _follow_steps(self, poll_s, params, optimizer_state)
            if not self._options.is_sync and membership.phase is Phase.READY:
                if applied := _apply_arrived(self, params):
                    # It has no steps of its own: its number is that of the member which is furthest ahead.
                    latest = max(membership.positions.values(), default=0)
                    self._replica.advance(params, max(self._replica.step, latest))
                    membership.reach_step(self._replica.step)
                self._departure.remove_departed()
                count += applied
            if count or clock.now_s() >= deadline_s:
                return count

    def _follow_step(self, params: Any) -> None:
        """Apply a step of the members, without an update of this node's own."""
        # Written values travel in no message.
        if self._notes.is_written_by_all(self._membership.members, self._replica.step):
            self._departure.rejoin(
                "the members go on from parameters that were written on all of them"
            )
            return
        self._membership.reach_step(self._replica.step + 1)
        updates = self._membership.take_updates(self._replica.step)
        updates.sort(key=itemgetter(0))
        payloads = [messages for _, messages in updates]
        self._replica.apply(payloads, params)
        self.finish_step([run for run, _ in updates])
        self._replica.advance(params)
        self._on_follow(params)

    def _join_with_snapshot(self, params: Any, optimizer_state: NodeState) -> None:
        """Ask for a snapshot, or load the one that has arrived."""
        members = self._trainings.joinable()
        self._recipient.drop(self._recipient.donors - members.keys())
        if _is_enough(self) and self._trainings.has_to_resume(members):
            self._resume(params, optimizer_state)
        elif not self._recipient.is_asked:
            self._ask(members, params)
        elif _is_brought_up(self._recipient, self._membership, self._replica) and (
            snapshot := self._recipient.take()
        ):
            if not self._options.is_sync:
                snapshot.delay(_first_step(self._membership, snapshot, self._replica.step + 2))
            optimizer_state.check(snapshot.arrays[snapshot.params :])
            if self._follow(snapshot):
                drop_outdated(self._replica, {**snapshot.positions, **snapshot.finals}, params)
                # Local changes, and own updates that nobody applied, stay in the residual.
                self._replica.absorb_local_changes(params, self._membership.weight)
                self._replica.take_back_unapplied(snapshot.finals, snapshot.accepted, snapshot.step)
                self._load(snapshot, params, optimizer_state)
                self._recipient.forget()
                if self._membership.phase is Phase.IN:
                    # More may have waited for the snapshot than may wait for a member's step.
                    _apply_arrived(self, params)

    def _resume(self, params: Any, optimizer_state: NodeState) -> None:
        """Go on alone, for the others to join: load this node's own state as if it had come in a snapshot.

        The parts of a split network may stop in favour of each other, because what they know of each other is old; and
        users may call ``resync`` on all nodes.
        """
        membership, replica = self._membership, self._replica
        step = replica.step
        _LOG.warning(
            "step %d: no member is left, and this node goes on for the others to join", step
        )
        self._recipient.cancel()
        # Nobody applies an update of the unfinished step, and no owner accepts a part of it: the senders take all back.
        finals = {**membership.finals, membership.run: step}
        if replica.sharding is not None:
            replica.sharding.reject_parts(step)
        snapshot = replace(
            _snapshot_of(self, {}, params, optimizer_state),
            finals=finals,
            step=step + 2,  # later than any update with which a node may have gone
            senders=[membership.run],
        )
        snapshot.arrays[:] = copies(snapshot.arrays)
        replica.absorb_local_changes(params)
        replica.take_back_unapplied(finals, snapshot.accepted, snapshot.step)
        self._load(snapshot, params, optimizer_state)
        self._adopt(snapshot, {})
        membership.enter_at(snapshot.step)
        self._router.introduce()

    def _ask(self, members: Mapping[NodeRun, Hello], params: Any) -> None:
        """Ask for a snapshot, other members each time, if all members that they name are connected."""
        own_run = self._membership.run
        here = {own_run, *members}
        # A donor may only know members that this node is connected with: the updates of others would never arrive here.
        able = sorted(run for run, hello in members.items() if here >= set(hello.members))
        first_direct = {
            run: first
            for run in members
            if (first := _first_received(self._membership, run)) is not None
        }
        if able and len(first_direct) == len(members):
            place = (own_run.id + self._recipient.requests + 1) % len(able)
            able = [*able[place:], *able[:place]]
            layout = self._replica.state_layout(params)
            steps = _steps_to_go_on(self._recipient, self._membership, first_direct)
            step = _step_ahead(self._membership, members, self._options)
            goes_on = steps is not None
            self._recipient.request(able, steps or first_direct, layout, step=step, goes_on=goes_on)
            self._membership.forget_reports()

    def _follow(self, snapshot: Snapshot) -> bool:
        """Adopt the members of a snapshot; return False if not all their later updates arrive here."""
        membership = self._membership
        positions = dict(snapshot.positions)
        # The snapshot says where every member's updates go on. Each of these updates has to arrive here directly: if a
        # member is gone or its first updates came before the connection, the snapshot is of no use, and this node asks
        # again.
        if not positions.keys() <= membership.others.keys():
            return False
        if self._departure.makes_useless(positions, snapshot.finals):
            return False
        if not self._options.is_sync:
            # Nodes that joined after the donor took the snapshot, and of which it did not know.
            for run, hello in self._introductions.compatible(Phase.IN).items():
                is_stale = hello.first_step <= snapshot.finals.get(run, -1)
                if not is_stale and not snapshot.positions.keys().isdisjoint(hello.members):
                    positions.setdefault(run, hello.first_step)
        for run, position in positions.items():
            first = _first_received(membership, run)
            if first is None or first > position:
                return False
        self._adopt(snapshot, positions)
        for run in positions.keys() - snapshot.positions.keys():
            membership.admit_unaware(run)
        # A synchronous newcomer follows the members' steps until all of them have named it in the same step. An
        # asynchronous newcomer is a member at once, and only waits to be known by all before it sends.
        if self._options.is_sync or self._options.role == "observer":
            self._router.announce(Phase.READY)
        else:
            membership.enter_at(snapshot.step)
            self._router.introduce()
        return True

    def _adopt(self, snapshot: Snapshot, positions: dict[NodeRun, int]) -> None:
        """Let the membership continue from a snapshot, with the members' updates from ``positions`` on."""
        self._is_early = True
        self._membership.follow_snapshot(
            positions,
            snapshot.finals,
            snapshot.step,
            snapshot.origin,
            is_sharded=snapshot.is_sharded,
            training=snapshot.training,
        )

    def _load(self, snapshot: Snapshot, params: Any, optimizer_state: NodeState) -> None:
        replica = self._replica
        replica.import_state(snapshot.arrays[: snapshot.params], params)
        optimizer_state.load(_moved(snapshot.arrays, snapshot.params))
        replica.begin(
            snapshot.step,
            len(snapshot.positions) + 1,
            is_sharded=snapshot.is_sharded,
            accepted=snapshot.accepted,
        )
        replica.agreement.load(snapshot.agreement)
        # The next update repeats nothing of this node's last one: it is of another time, and another optimiser's state.
        replica.agreement.load_previous([], snapshot.median)
        self._introductions.add_workers(snapshot.workers)
        replica.assign_owners(snapshot.senders, snapshot.step, self._introductions.workers)
        replica.add_late_parts(params)
        self._on_load()


def _describe_outside(join: Join, earlier: str) -> str:
    """Say why a node has not come in that nothing keeps out now; empty if there is no reason.

    Args:
        join: of this node.
        earlier: what kept it out since its last progress, or empty.
    """
    recipient = join._recipient
    if recipient.progress and recipient.arrived_bytes:
        came = recipient.progress
        return f"of a snapshot {came} have come: is the link too slow beside the members' updates?"
    if recipient.refusal:
        return recipient.refusal
    if recipient.is_asked and join._introductions.compatible(Phase.IN):
        return f"no part of a snapshot has come; {datagram_hint(join._router.node)}"
    kept_out = f"it could not come in before: {earlier}" if earlier else ""
    gone = join._introductions.describe_departed()
    if DROPPED in gone:
        gone += ": if the others have ended, the training's parameters are theirs, not this node's"
    return recipient.progress or "; ".join(filter(None, [gone, kept_out]))


def _check_initial(join: Join, first: NodeRun | None) -> None:
    """Raise `Mismatch` if the initial parameters of a node, which were asked for, cannot be used."""
    # All nodes that have them have the same, so another try would not help.
    if first is not None and join._recipient.refusal:
        name = join._introductions.name_of(first)
        raise Mismatch(
            f"the initial parameters of {name} cannot be used: {join._recipient.refusal}"
        )


def _donor_for(run: NodeRun, runs: list[NodeRun], able: Collection[NodeRun]) -> NodeRun | None:
    """Return the node that gives another one the initial parameters; None while it has none, or gives them to others.

    Args:
        run: gets them.
        runs: all nodes, in order; the first one has the parameters.
        able: those that have the parameters.
    """
    # Each gives them to one at a time, so that those that have them double with every turn. Who gets them from whom
    # depends on the nodes alone: by who has them at the moment, several would ask the same one while others are idle.
    place = runs.index(run)
    turn = place.bit_length() - 1
    donor = place - (1 << turn)
    before = [donor, *(donor + (1 << earlier) for earlier in range(donor.bit_length(), turn))]
    return runs[donor] if all(runs[each] in able for each in before) else None


def _moved(arrays: Arrays, begin: int) -> Arrays:
    """Return the arrays from ``begin`` on, and forget all: what takes over the memory of some needs none of its own."""
    rest = arrays[begin:]
    arrays.clear()
    return rest


def _first_received(membership: Membership, run: NodeRun) -> int | None:
    """Return the first update of a node, not a member yet, that this node gets directly; None: unknown."""
    stream = membership.others.get(run)
    return None if stream is None else stream.first_received


def _first_step(membership: Membership, snapshot: Snapshot, least: int) -> int:
    """Return the first step of an asynchronous newcomer, which is ``least`` or later."""
    # Later than any update with which this node may have gone, also in an earlier exchange on its node.
    final = snapshot.finals.get(membership.run, 0)
    # A snapshot may take long. The members would wait for a newcomer that begins at its step, until it has taken as
    # many steps as they: it begins with the slowest of them.
    others = membership.others.items()
    steps = [stream.next_missing for run, stream in others if run in snapshot.positions]
    return max(least, final + 1, min(steps, default=0))


def _step_ahead(
    membership: Membership, members: Mapping[NodeRun, Hello], options: Options
) -> int | None:
    """Return a step that no member has reached when it gets a request that leaves now; None for asynchronous ones."""
    if not options.is_sync:
        return None
    longest_s = max((hello.step_s for hello in members.values()), default=0.0)
    ahead = min(_REQUEST_S / longest_s if longest_s > 0.0 else 1.0, _STEPS_AHEAD_MAX)
    # Members answer between two exchanges as well where these are local steps apart.
    ahead = math.ceil(ahead) if options.every == 1 else math.floor(ahead)
    received = max((stream.received for stream in membership.others.values()), default=0)
    return received + ahead


def _steps_to_go_on(
    recipient: Recipient, membership: Membership, first_direct: dict[NodeRun, int]
) -> dict[NodeRun, int] | None:
    """Return the steps of a request that goes on with a dead donor's snapshot; None: everything has to travel again."""
    earlier = recipient.resumable
    if earlier is None or not recipient.arrived_bytes:
        return None
    steps = dict(first_direct)
    for run, position in earlier.positions.items():
        stream = membership.past.get(run)
        if run in first_direct:
            steps[run] = max(position, first_direct[run])
        elif stream is None or stream.first_received is None:
            return None
        else:
            steps[run] = stream.next_missing
    return steps


def _is_brought_up(recipient: Recipient, membership: Membership, replica: Replica) -> bool:
    """Bring what a dead donor had sent up to the snapshot that goes on with it; return whether nothing is left to do.

    The dead donor's values are of an earlier step. The updates in between have come to this node, as they have to all
    members, and are added to them as the members have added them: in the same order, with the same roundings.
    """
    before = recipient.earlier
    after = recipient.incoming
    if before is None or after is None:
        return before is None
    missing: set[NodeRun] = set()
    updates: dict[int, list[tuple[NodeRun, list[Message]]]] = {}
    for run, (first, end) in _updates_between(before, after, membership).items():
        stream = membership.others.get(run) or membership.past.get(run)
        begins = stream is not None and (stream.first_received or 0) <= first <= end
        notes = {} if stream is None else stream.notes
        is_written = any(first <= step < end and note.written for step, note in notes.items())
        if first != end and (not begins or is_written):
            _LOG.info(
                "the snapshot of a member that is gone is of no use: everything travels again"
            )
            recipient.forget()
            return False
        for step in range(first, end):
            if stream is None or step not in stream:
                missing.add(run)
                break
            updates.setdefault(step, []).append((run, stream.messages_of(step)))
    if missing:
        # Members send them, unless they have died since the donor answered. It has sent those of departed nodes before.
        if not missing <= after.positions.keys():
            recipient.forget()
        elif not missing <= membership.others.keys():
            recipient.cancel()
        return False
    steps = [
        [messages for _, messages in sorted(updates[step], key=itemgetter(0))]
        for step in sorted(updates)
    ]
    # Members refuse results for other owners than they count, and this node did not count them yet.
    if after.is_sharded and not all(map(can_be_of_same_owners, steps)):
        _LOG.info("not all results are for the same owners: everything travels again")
        recipient.forget()
        return False
    for payloads in steps:
        exported = after.arrays[: after.params]
        add_to_exported(replica, payloads, exported)
    recipient.bring_up()
    return True


def _updates_between(
    before: Snapshot, after: Snapshot, membership: Membership
) -> dict[NodeRun, tuple[int, int]]:
    """Return for every node its first update that is in the second of two snapshots only, and its first in neither.

    Where that is not known, as the first number is larger.
    """
    hellos = membership.introductions.hellos
    between = {}
    for run in sorted(before.positions.keys() | after.positions.keys()):
        first = before.positions.get(run)
        if first is None:  # has come in since
            first = hellos[run].first_step if run in hellos else after.positions[run] + 1
        between[run] = first, after.positions.get(run, after.finals.get(run, first - 1))
    for run, final in after.finals.items():
        if run not in between and before.finals.get(run) != final:  # has come and gone since
            between[run] = final + 1, final
    return between


def _check_kept_updates(membership: Membership, recipient: Recipient) -> None:
    """Raise `TimeoutError` for more updates than a snapshot can be worth waiting for."""
    streams = [*membership.others.values(), *membership.past.values()]
    kept_bytes = sum(stream.waiting_bytes for stream in streams)
    most_bytes = max(_KEPT_BYTES, _KEPT_FACTOR * recipient.expected_bytes)
    if kept_bytes > most_bytes and any(stream.waiting > _KEPT_UPDATES for stream in streams):
        raise TimeoutError(
            f"{kept_bytes / 1e6:.0f} MB of the members' updates have arrived while this node waits for its "
            f"snapshot ({recipient.progress or 'nothing yet'}): its link does not carry the training; share "
            "with a lower density or a larger every"
        )


def _apply_arrived(join: Join, params: Any) -> int:
    """Apply the asynchronous members' updates that have arrived; return their number."""
    payloads = [messages for _, messages in join._membership.take_updates()]
    if payloads:
        # The parameters of a member may differ by what it has not sent.
        is_member = join._membership.phase is Phase.IN
        join._replica.apply(payloads, params, has_moved=is_member)
    return len(payloads)


def _follow_steps(join: Join, timeout_s: float, params: Any, optimizer_state: NodeState) -> int:
    """Receive for up to ``timeout_s``, apply the members' steps without being one, and return their number."""
    membership = join._membership
    followed = list(membership.members) if membership.phase is Phase.READY else []
    count = 0
    join.poll(timeout_s)
    while join._options.is_sync and _can_follow(join):
        join._follow_step(params)
        count += 1
    if followed and membership.phase is Phase.JOINING and join._options.is_sync:
        _keep_state(join, followed, params, optimizer_state)
    return count


def _keep_state(
    join: Join, members: Iterable[NodeRun], params: Any, optimizer_state: NodeState
) -> None:
    """Keep a copy of what this node had as it followed these members: another one adds what it lacks."""
    finals = dict(join._membership.finals)
    positions = {run: finals.pop(run) for run in members}
    snapshot = replace(_snapshot_of(join, positions, params, optimizer_state), finals=finals)
    snapshot.arrays[:] = copies(snapshot.arrays)
    join._recipient.keep(snapshot)
    join._trainings.inherit(positions)


def _can_follow(join: Join) -> bool:
    """Return whether this node, not a member yet, can follow the members through the next step."""
    membership = join._membership
    step = join._replica.step
    sharding = join._replica.sharding
    if membership.phase is not Phase.READY or not membership.members or membership.missing(step):
        return False
    unfit = [] if sharding is None else sharding.unfit(membership.updates_of(step))
    if unfit and not join._departure.refuse(unfit, step):
        return False
    notes = [stream.notes.get(step) for stream in membership.members.values()]
    if not all(note is not None and membership.run in note.admits for note in notes):
        return True
    # The step at which this node becomes a member: only when all members have finished it, and without a report,
    # is it sure that they have applied the same updates.
    return all(map(membership.is_known_to, membership.members))


def _snapshot_of(
    join: Join, positions: dict[NodeRun, int], params: Any, optimizer_state: NodeState
) -> Snapshot:
    """Return the present state, of which nothing is copied.

    Args:
        join: of this node.
        positions: for every member, this node included, the first update that is not in the state.
        params: the caller's.
        optimizer_state: the caller's.
    """
    replica = join._replica
    membership = join._membership
    shared = replica.export_state(params)
    sharding = replica.sharding
    introductions = membership.introductions
    workers = introductions.workers
    senders = () if sharding is None else sharding.senders
    arrays = [
        np.asarray(on_host(array), order="C") for array in (*shared, *optimizer_state.export())
    ]
    return Snapshot(
        replica.step,
        positions,
        membership.finals,
        arrays,
        len(shared),
        membership.origin,
        # A node that goes on alone may have left it: members that it does not see take part in it.
        introductions.training or introductions.left_training,
        sharding is not None,
        {} if sharding is None else sharding.accepted,
        senders,
        [run for run in senders if run in workers],
        replica.agreement.state(),
        replica.agreement.median,
        len(shared) // 2 if isinstance(replica.total, MomentumSum) else 0,
    )


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


class _Interrupt:
    """What SIGINT does outside `held_back`, and the frame of the one that is held back."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.frames: list[Any] = []

    def hold(self, number: int, frame: Any) -> None:
        """Handle SIGINT: the first one waits; whoever sends a second one does not want to wait."""
        if self.frames:
            self.handler(number, frame)
        else:
            self.frames.append(frame)

    def release(self) -> None:
        """Handle the one that waits, if any."""
        if self.frames:
            frame = self.frames.pop()
            self.handler(signal.SIGINT, frame)


_INTERRUPT = _Interrupt()
_HOLD = _INTERRUPT.hold  # the same object every time, by which it is recognised


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, or until `let_through`; a second one is handled at once.

    A `KeyboardInterrupt` may come between any two calls. Between those that send an update, or add the others', it
    would leave a step half done, which the next call could neither finish nor take back. Only the main thread gets
    signals: in others this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler) or handler is _HOLD:
        yield
        return
    _INTERRUPT.handler = handler
    signal.signal(signal.SIGINT, _HOLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _INTERRUPT.release()


def let_through() -> None:
    """Handle a SIGINT that is held back: nothing is half done here, and the caller is about to wait for others."""
    if _INTERRUPT.frames and threading.current_thread() is threading.main_thread():
        _INTERRUPT.release()
