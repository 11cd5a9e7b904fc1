"""Departures: which members are gone, and which of their last updates everybody applies.

A member that dies may have reached only some of the others with its last updates. Each remaining member reports how
many of the updates it has; everybody applies as many as the member with the most, and one member that has them relays
them. A report names all members that its sender considers gone, and the sender accepts no more messages from those. If
another member dies meanwhile, all report anew, and only reports that name all departed members count: an update that
the second dead member relayed is then either in a report or has reached nobody.

A node that finds itself in a training, or in a part of one, that does not go on leaves that one, too: `Trainings`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from .. import clock
from ..errors import MessageError, Mismatch, PeerLost
from .membership import Membership, Router
from .protocol import (
    DROPPED,
    TAG_NUMBERS,
    Hello,
    Kind,
    NodeRun,
    Note,
    Phase,
    decode_steps,
    encode_steps,
    pack_relay,
    run_of,
    unpack_relay,
)

__all__ = ["Departure", "Trainings"]

_LOG = logging.getLogger(__name__)

# Number of a report on nodes that have all said that they leave.
_ALL_LEAVE = 1

# How long a node that was to join sees no member before it goes on, or begins with new nodes.
_WAIT_S = 2.0

# Refusals of a node's messages after which it is excluded, and the steps after which an earlier refusal does not count.
_REFUSALS_MAX = 3
_FORGIVEN_STEPS = 100

# Pause between two looks for asynchronous members that others have and this node does not see, and the number of looks
# after which a node with a lower id gives way to them.
_UNSEEN_S = 5.0
_UNSEEN_LOOKS = 3

# A node, the node that began its training, and the members.
_Side = tuple[NodeRun, NodeRun, tuple[NodeRun, ...]]


class Refusals:
    """Counts how often this node has refused messages of each node, and how often it was wrong."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        # By node, this one included: how often, and the step of the last time.
        self._counts: dict[NodeRun, tuple[int, int]] = {}
        self._updates: dict[NodeRun, int] = {}  # of departing members: which one was refused

    def add(self, run: NodeRun, *, is_wrong: bool = True) -> bool:
        """Count a refusal of a node's messages; return whether there were several within a short time.

        Where ``is_wrong`` is False, others can use the message: it counts as a fault of this node.

        Raises:
            Mismatch: there were several, and this node was at fault within that time.
        """
        membership = self._membership
        step = membership.next_step
        counted = run if is_wrong else membership.run
        count, last = self._counts.get(counted, (0, -1))
        # This node may refuse the same update twice: as it comes, and when it is relayed.
        count = count + (is_wrong or step > last) if step <= last + _FORGIVEN_STEPS else 1
        self._counts[counted] = count, step
        _, last_fault = self._counts.get(membership.run, (0, -math.inf))
        if count >= _REFUSALS_MAX and step <= last_fault + _FORGIVEN_STEPS:
            raise Mismatch(
                f"this node has refused updates of {membership.introductions.name_of(run)} that the others can use, "
                "again and again: start it again, as the others were started"
            )
        return count >= _REFUSALS_MAX

    def note_update(self, run: NodeRun) -> None:
        """Note that the next update of a node was refused, if that has made it a departing member."""
        if run in self._membership.departing:
            self._updates[run] = self._membership.departing[run]

    def forget_updates(self) -> None:
        """Forget which updates were refused, because this node joins again."""
        self._updates.clear()

    def take_back(self, report: dict[NodeRun, int]) -> None:
        """Count a refusal as this node's fault where another member could use the update; see `add`."""
        usable = None
        for run, step in list(self._updates.items()):
            if self._membership.departing.get(run) == step < report.get(run, 0):
                del self._updates[run]
                self._counts.pop(run, None)
                usable = run
        if usable is not None:
            self.add(usable, is_wrong=False)


class Departure:
    """Reports departed members, agrees with the others on their last updates, and removes them."""

    def __init__(self, membership: Membership, router: Router, *, is_sync: bool) -> None:
        self._membership = membership
        self._introductions = membership.introductions
        self._router = router
        self._is_sync = is_sync
        # By reporter and departed node: the first update that the reporter lacks.
        self._reports: dict[NodeRun, dict[NodeRun, int]] = {}
        self._last_report: dict[NodeRun, int] = {}
        self._relayed: set[tuple[NodeRun, int, int, frozenset[NodeRun]]] = set()
        self.is_due = False  # whether `settle` is to follow the messages that have come
        self._owes_report = False
        self._has_heard = False  # a report, which may name others than this node's last one
        self._on_return: Callable[..., object] = dict  # does nothing, until it is set
        self._refusals = Refusals(membership)
        router.handle(Kind.REPORT, self._add_report)
        router.handle(Kind.RELAY, self._add_relayed)
        router.set_refuse(self._refuse_message)

    def set_on_return(self, on_return: Callable[..., object]) -> None:
        """Call a function for every departed node that has come in again meanwhile; see `Trainings.handle_unknown`."""
        self._on_return = on_return

    @property
    def unsettled(self) -> set[NodeRun]:
        """The departed members without an agreement on their last update, or with updates still to arrive."""
        finals = self._membership.finals
        return {
            run
            for run, next_missing in self._membership.departing.items()
            if run not in finals or next_missing < finals[run]
        }

    def check_members(self, least: int) -> None:
        """Raise `PeerLost` if fewer members are left than a step needs; every worker of a team counts."""
        teams = self._membership.teams
        count = sum(workers for workers, _ in teams)
        if self._membership.phase is Phase.IN and count < least:
            has_teams = count > len(teams)
            what = "workers" if has_teams else "members"
            why = self._introductions.describe_missing()
            if has_teams:
                why += ", or workers of a machine are gone"
            raise PeerLost(f"{count} of at least {least} {what} are left: {why}")

    def suspect(self, runs: Iterable[NodeRun], why: str) -> None:
        """Consider members gone: begin to agree with the others on their last updates.

        If not all members know this node, it joins again: it may have applied an update that they do not apply.
        """
        membership = self._membership
        gone = _without_leavers(membership, sorted(runs))
        if not gone:
            self.remove_departed()
            return
        # An asynchronous node that some members do not know yet takes no part in their agreement. They may agree on
        # fewer updates of the departed member than this node has applied.
        is_new = not self._is_sync and not membership.members_unaware_of_us <= set(gone)
        if membership.phase is Phase.READY or is_new:
            self.rejoin(f"{self._introductions.describe(gone)} {why}")
            return
        step = self._introductions.step_number(membership.next_step)
        log = _LOG.info if all(map(self._introductions.has_finished, gone)) else _LOG.warning
        log("step %d: %s %s", step, self._introductions.describe(gone), why)
        for run in gone:
            membership.mark_departing(run)
        self._owes_report = self.is_due = True

    def handle_lost(self, lost: set[NodeRun], step: int) -> None:
        """Suspect members whose connection ended."""
        membership = self._membership
        if self.rejoin_if_dropped(lost) or membership.phase not in (Phase.IN, Phase.READY):
            return
        # A member that has sent its update of ``step`` is not missed before the next, unless there is more to agree on.
        can_wait = self._is_sync and membership.phase is Phase.IN and not self.unsettled
        gone = [
            run
            for run in sorted(lost - membership.departing.keys())
            if not (can_wait and step in membership.members[run])
        ]
        if gone:
            self.suspect(gone, "is lost")

    def rejoin_if_dropped(self, lost: set[NodeRun]) -> bool:
        """Join again if members have given this node up, and return whether that is so.

        A process that stood still is the one that was lost: the others go on without it, or have ended. But members
        that give it up where at least as many stay connected hear nothing themselves, and go.
        """
        membership = self._membership
        dropping = sorted(filter(self._introductions.has_dropped, lost))
        is_left = len(set(membership.peers) - membership.broken - lost) >= len(dropping)
        is_out = membership.phase not in (Phase.IN, Phase.READY)
        if is_left or is_out or membership.departing.keys() >= lost:
            return False
        self.rejoin(f"{self._introductions.describe(dropping)} {DROPPED}")
        return True

    def suspect_incompatible(self) -> None:
        """Continue without members whose arrays turn out to be different, which they announced after the start.

        Raises:
            Mismatch: no other member's arrays fit.
        """
        membership = self._membership
        introductions = self._introductions
        incompatible = [run for run in membership.peers if run in introductions.incompatible]
        if excluding := list(filter(introductions.excludes_this_node, incompatible)):
            self.rejoin(f"{introductions.describe(excluding)} takes no more messages of this node")
            return
        # Parameters become known with the first step or join, so a mismatch may show only after the start.
        is_odd = introductions.fits_nobody({*membership.departing, *membership.finals})
        if membership.phase is not Phase.IN or not (incompatible or is_odd):
            return
        if len(incompatible) == len(membership.peers):
            raise Mismatch(introductions.describe_incompatible())
        self.suspect(incompatible, "has other arrays")

    def heed_exclusions(self, run: NodeRun, hello: Hello) -> None:
        """Exclude the nodes that a member has excluded."""
        membership = self._membership
        # A node that only some take for a member would hold up all: it needs the word of every member to come in.
        for other, reason in hello.excluded if run in membership.peers else ():
            if other != membership.run and not self._introductions.is_excluded(other):
                self._exclude(
                    other, f"{self._introductions.name_of(run)} has excluded it: {reason}"
                )

    def _exclude(self, run: NodeRun, reason: str) -> None:
        """Go on without a node until it is started again, and tell the others to do the same."""
        self._introductions.exclude(run, reason)
        self._router.introduce()
        if run in self._membership.peers:
            self.suspect([run], "is excluded until it is started again")

    def _refuse_message(self, run: NodeRun, kind: int, error: str) -> bool:
        """Go on without the sender of a message that cannot be used, and return whether that is so; it may join again.

        If it happens again and again, the sender is excluded.
        """
        membership = self._membership
        if self._refusals.add(run):
            # Of two members nobody knows which is wrong, so the caller shall see the error. To a node that joins, the
            # others' word counts.
            is_member = membership.phase in (Phase.IN, Phase.READY)
            if is_member and not set(membership.peers) - {run}:
                return False
            self._exclude(run, error)
        elif run in membership.peers:
            self.suspect([run], f"joins again, because its message is refused: {error}")
        elif membership.phase in (Phase.NEW, Phase.JOINING):
            _LOG.warning("a message is ignored: %s", error)
            membership.expect_updates(run, anew=True)  # what follows has a gap before
        if kind == Kind.UPDATE:
            self._refusals.note_update(run)
        return True

    def refuse(self, unfit: Sequence[NodeRun], step: int) -> bool:
        """Go on without members whose results of a step do not fit the owners that this node counts.

        If these are more than the others, this node joins again, and if they are as many and have the lowest id.

        Returns:
            Whether this node goes on.
        """
        # All members finish a step with the same results, so those that count the same owners refuse the same ones
        # without another message. Nobody applies them: with their senders they go back into residuals.
        membership = self._membership
        fitting = {membership.run, *(run for run, _ in membership.updates_of(step))} - set(unfit)
        names = self._introductions.describe(unfit)
        why = f"step {step}: the result of {names} is for other owners than this node counts"
        is_outvoted = (-len(unfit), min(unfit)) < (-len(fitting), min(fitting))
        again = list(filter(self._refusals.add, unfit))
        # Joining again has not helped, and nobody else can tell which of the two is wrong.
        if len(again) == len(unfit) and len(fitting) == 1:
            raise Mismatch(
                f"{why}, again and again: end the node that is wrong, and start it again"
            )
        if is_outvoted or membership.phase is not Phase.IN:
            self.rejoin(why)
            return False
        _LOG.warning("%s: the others go on without it", why)
        for run in again:
            self._introductions.exclude(run, why)
        if again:
            self._router.introduce()
        for run in unfit:
            membership.refuse_from(run, step)
        # Their senders join again when they hear of it. Whoever still agrees on the last updates of one takes the new
        # number.
        self.report()
        return True

    def rejoin(self, why: str) -> None:
        """Stop being a member, and join again with a snapshot."""
        # Nothing is lost by it: the updates that nobody applied go back into the residual with the snapshot.
        _LOG.warning("%s: this node joins again", why)
        self._membership.forget_members()
        self._relayed.clear()
        self._refusals.forget_updates()
        self._router.announce(Phase.JOINING)

    # ---- the departed ------------------------------------------------------------------------------------------------

    def remove_departed(self) -> None:
        """Remove departed members once all their updates have been applied."""
        membership = self._membership
        gone = [
            run
            for run, stream in membership.members.items()
            if run in membership.finals and stream.position >= membership.finals[run]
        ]
        for run in gone:
            membership.remove_member(run)
        if gone:
            # In a run of weeks many go, each with a report on all before it, of which the agreements say as much.
            finals = membership.finals
            for run in self._reports.keys() & finals.keys() - membership.members.keys():
                report = self._reports[run]
                self._reports[run] = {k: v for k, v in report.items() if v > finals.get(k, -1)}
            count = len(membership.members) + 1
            _LOG.warning("%s: %d nodes go on", self._introductions.describe_departed(gone), count)
            if not membership.members and membership.phase is Phase.READY:
                self.rejoin("nobody is left to follow")
        if gone and membership.phase is Phase.IN:
            self._router.announce(Phase.IN)
        for run in gone:
            # The node may have come in again before the others agreed that it had gone: here, or in another part of a
            # split network. Or it has given this node up as well. Its introduction counts from now on.
            if hello := self._introductions.compatible(Phase.IN).get(run):
                is_back = run in membership.others and not self.has_gone(run, hello.first_step)
                self._on_return(run, hello, was_outside=is_back)

    def makes_useless(self, positions: dict[NodeRun, int], finals: dict[NodeRun, int]) -> bool:
        """Return whether a member of a snapshot is gone, or a node has come and gone since, whose updates it lacks.

        Args:
            positions: of the snapshot: for every member the first update that is not in it.
            finals: of the snapshot: for departed members the first update that nobody applied.
        """
        reported = self._membership.reported  # since the request for the snapshot
        if not reported.isdisjoint(positions):
            return True
        # Reports repeat what had gone long ago, too: this has sent nothing so late. Synchronous nodes follow all steps.
        late = min(positions.values(), default=0)
        return not self._is_sync and any(
            report.get(run, 0) > finals.get(run, late)
            for report in self._reports.values()
            for run in reported
        )

    def has_gone(self, run: NodeRun, first_step: int) -> bool:
        """Return whether a node that came in with its update ``first_step`` is reported as gone since then."""
        # A report names the first update that is missing. If that is below the node's first update as a member, the
        # report is about an earlier time of the node.
        reports = [*self._reports.values(), self._membership.finals]
        return any(report.get(run, -1) >= first_step for report in reports)

    def report(self, receiver: NodeRun | None = None) -> None:
        """Tell all members, or one, which members are gone and how many of their updates this node has."""
        if self._membership.phase is Phase.IN:
            report = self._own_report()
            if receiver is None:
                self._last_report = report
            not_removed = report.keys() & self._membership.members.keys()
            number = int(all(map(self._introductions.has_finished, not_removed or report)))
            self._router.send(Kind.REPORT, number, encode_steps(report), receiver)

    def _own_report(self) -> dict[NodeRun, int]:
        """Return the first missing update of every member that is gone, and of unknown nodes as others report it.

        A member that only departed nodes report as gone is left out: its updates are still accepted here.
        """
        membership = self._membership
        reports = [
            report
            for reporter, report in self._reports.items()
            if reporter not in membership.departing
        ]
        # A node that never was a member here has to be in the report all the same: reports count only if they name the
        # same nodes. This node knows nothing of its updates, and repeats the largest number that others have named.
        unknown = membership.reported - membership.members.keys() - {membership.run}
        # A member that has gone once may have come in again for the others, and gone again, before it did so here. What
        # was repeated once is never less: two nodes that repeat each other's numbers would do so for ever.
        reports += [self._last_report, membership.departing]
        hearsay = {run: max(report.get(run, 0) for report in reports) for run in unknown}
        return membership.departing | hearsay

    def _add_report(self, reporter: NodeRun, number: int, payload: memoryview) -> None:
        membership = self._membership
        named = decode_steps(payload)
        membership.add_reported(named)
        first_lacking = named.pop(membership.run, None)  # of this node's updates
        if membership.phase is not Phase.NEW:  # or it is of an earlier training of the same nodes
            self._reports[reporter] = named
        if reporter in membership.peers:
            self._refusals.take_back(named)
        # Three kinds of reporters: one that is no member here, and would wait for this node's reports for ever; one
        # that is itself gone, whose opinion does not count; and a member, whose report may be about this node.
        if reporter not in membership.members:
            self._answer_outsider(reporter)
        elif reporter in membership.departing:
            pass
        elif (
            membership.phase is Phase.IN
            and first_lacking is not None
            and first_lacking >= membership.first_step
        ):
            self.rejoin("the others have gone on without this node")
        elif not self._is_sync and membership.lacks_updates(named):
            self.rejoin("updates of a node that is gone have never come here")
        else:
            meant = _members_of(membership, named)
            if number == _ALL_LEAVE:
                self._introductions.note_finished(meant.keys() - membership.departing.keys())
            gone = [
                run
                for run, next_missing in meant.items()
                if run not in membership.departing and not self._still_sends(run, next_missing)
            ]
            if gone:
                self.suspect(gone, f"is gone, says {self._introductions.name_of(reporter)}")
            self._has_heard = True
        self.is_due = True

    def _still_sends(self, run: NodeRun, next_missing: int) -> bool:
        """Return whether a node that is gone, as others say, still has updates for this node."""
        # Who leaves waits until all have got them, and the reporter, which would have to relay them, may leave before
        # it could. An observer gets nothing relayed, and hears by itself how the node ends.
        is_late = self._membership.members[run].next_missing < next_missing
        has_left = self._introductions.has_finished(run)
        is_awaited = self._membership.destination is Phase.READY or (has_left and is_late)
        is_unread = any(run_of(peer) == run for peer, *_ in self._router.remaining)
        return is_awaited and (is_unread or run in self._introductions.hellos)

    def _answer_outsider(self, run: NodeRun) -> None:
        """Tell a node that takes this one for a member, and would wait for its reports, that it is none here."""
        hello = self._introductions.compatible(Phase.IN).get(run)
        if self._membership.phase is Phase.IN and hello and self._membership.run in hello.members:
            self._router.send(Kind.REPORT, 0, encode_steps({run: hello.first_step}), run)

    def settle(self) -> None:
        """Report what is due, agree where all reports are in, relay missing updates, and remove who has none left."""
        # Once for all messages that have come together: an answer to each of n goodbyes would be n reports to n nodes.
        # Only reports that name the same nodes are compared.
        if self._owes_report or (self._has_heard and self._own_report() != self._last_report):
            self.report()
        self._owes_report = self._has_heard = False
        self._agree()
        if self._membership.phase is Phase.IN:
            self._relay()
        self.remove_departed()
        self.is_due = False  # last: the call after an interrupted one begins again

    def _agree(self) -> None:
        """Decide on the last updates of departed members."""
        membership = self._membership
        # All members decide from the same reports, so all decide alike. Nobody decides before the reports of all
        # remaining members are there.
        unsettled = self.unsettled
        reports = {run: self._reports.get(run, {}) for run in membership.peers}
        # A member may have gone before, and come in again: earlier reports on it, or of its own, are about that time.
        first = {run: stream.first_direct for run, stream in membership.members.items()}
        for run in unsettled:
            for reporter, report in reports.items():
                if report.get(run, -1) < (max(first[run], first[reporter]) if self._is_sync else 0):
                    return
        for run in unsettled:
            # All apply as many updates as the node with the most has: relays bring them to the others.
            final = max([membership.departing[run], *(each[run] for each in reports.values())])
            membership.agree_on_final(run, final)

    def _relay(self) -> None:
        """Relay updates of departed members that others lack, if this node is the first that has them."""
        membership = self._membership
        # One relay is enough: the first node by id that has all updates sends them. If it dies meanwhile, the voters
        # are others, and the next node sends them again.
        voters = frozenset(membership.peers)
        reports = {run: self._reports[run] for run in voters & self._reports.keys()}
        for run, final in membership.finals.items():
            stream = membership.members.get(run) or membership.past.get(run)
            if stream is None or membership.departing.get(run, 0) < final:
                continue
            lacking = [report[run] for report in reports.values() if report.get(run, final) < final]
            before = [reports[voter].get(run, -1) for voter in reports if voter < membership.run]
            if not lacking or max(before, default=-1) >= final:
                continue
            # The same relay twice would only cost bytes; another set of voters means that the first may not have
            # arrived.
            key = (run, min(lacking), final, voters)
            if key in self._relayed:
                continue
            for tag, payload in stream.raw(min(lacking), final):
                self._router.send(Kind.RELAY, 0, pack_relay(run, tag, payload))
            self._relayed.add(key)

    def supply(self, newcomer: NodeRun, steps: dict[NodeRun, int]) -> bool:
        """Send a newcomer the updates of departed members from these steps on.

        Returns:
            Whether this node has them all, and knows all the members.
        """
        membership = self._membership
        relays: list[bytes] = []
        for run, step in steps.items():
            if run == membership.run or run in membership.peers:
                continue
            final = membership.finals.get(run)
            stream = membership.members.get(run) or membership.past.get(run)
            if final is None or (step < final and stream is None):
                return False
            payloads = [] if stream is None else list(stream.raw(step, final))
            if sum(tag < TAG_NUMBERS for tag, _ in payloads) < final - step:
                return False  # too long ago
            relays += [pack_relay(run, tag, payload) for tag, payload in payloads]
        for relay in relays:
            self._router.send(Kind.RELAY, 0, relay, newcomer)
        return True

    def _add_relayed(self, relayer: NodeRun, _: int, payload: memoryview) -> None:
        membership = self._membership
        run, tag, relayed = unpack_relay(payload)
        is_newcomer = membership.phase is Phase.JOINING
        if not is_newcomer and (relayer in membership.departing or run not in membership.departing):
            return
        stream = membership.members.get(run)
        if is_newcomer:  # which may not know yet that the member has departed
            stream = membership.others.get(run) or membership.past.get(run)
        kind, step = divmod(tag, TAG_NUMBERS)
        # Several nodes may relay the same update after another death; only the next missing one is taken.
        if stream is None or step != stream.next_missing:
            return
        if kind == Kind.NOTE:
            stream.add_note(step, Note.decode(relayed), relayed)
            return
        try:
            messages = self._router.parse(run, step, relayed)
        except MessageError as error:
            # Neither who has sent it nor who relays it is wrong.
            self._refusals.add(run, is_wrong=False)
            self.rejoin(f"{error}, and the others can use it")
            return
        if is_newcomer:
            stream.add_relayed(messages, relayed)
        else:
            membership.add_relayed(run, messages, relayed)
            self.is_due = True


def _members_of(membership: Membership, report: dict[NodeRun, int]) -> dict[NodeRun, int]:
    """Return what a report says of members, without what it says of an earlier time of theirs."""
    members = membership.members
    return {
        run: next_missing
        for run, next_missing in report.items()
        if run in members and next_missing >= (members[run].first_received or 0)
    }


# ---- trainings -------------------------------------------------------------------------------------------------------


class Trainings:
    """Tells this node's training from others, and decides which of two goes on where both must not.

    The node that begins a training, rank 0, gives it an identity, which snapshots and checkpoints pass on. A node that
    has finished a step of a training, or comes from its checkpoint, takes part in no other. Three cases are not plain:
    a run that was started again while a process of the run before is left over; two parts of one training after a
    split of the network; and nodes that began at the same time without knowing of each other.
    """

    def __init__(
        self, membership: Membership, router: Router, departure: Departure, *, is_sync: bool
    ) -> None:
        self._membership = membership
        self._introductions = membership.introductions
        self._router = router
        self._departure = departure
        self._is_sync = is_sync
        self._waits_until_s: float | None = None
        self._told: frozenset[NodeRun] | None = None
        self._unseen: dict[NodeRun, int] = {}  # number of looks in which other members had them
        self._looks_at_s = 0.0
        self._joins_from_s = 0.0
        self._inherited_from: frozenset[NodeRun] = frozenset()
        self._introductions.set_judge(self._difference)
        departure.set_on_return(self.handle_unknown)

    def has_to_resume(self, members: Collection[NodeRun]) -> bool:
        """Return whether no member is left, and this node is the one that goes on with the training's parameters.

        It has the newest of all those that wait for a member.

        Args:
            members: that this node may join.
        """
        membership = self._membership
        introductions = self._introductions
        if membership.is_sharded is None or membership.destination is not Phase.IN:
            return False
        joining = introductions.compatible(Phase.JOINING)
        waiting = [*joining.values(), *introductions.compatible(Phase.NEW).values()]
        # A node that was never a member has only its own initial parameters.
        states = {
            run: (hello.origin, hello.step)
            for run, hello in joining.items()
            if hello.is_sharded is not None
        }
        states[membership.run] = membership.origin, membership.next_step
        # The training that began earlier goes on, from the state with most steps. Workers come last, because they own
        # no parameters.
        workers = introductions.workers
        first = min(
            states,
            key=lambda run: (run in workers, *reversed(states[run][0]), -states[run][1], run),
        )
        return self._lasts(
            first == membership.run
            and (bool(waiting) or (self._is_heir() and membership.run not in workers))
            and not members
            # Others may see a member that this node does not see, which stands still or has yet to connect.
            and not any(hello.members for hello in waiting)
            and not introductions.compatible(Phase.READY)
            and not self.is_any_silent
        )

    @property
    def is_any_silent(self) -> bool:
        """Whether a connected node has not introduced itself: the word of every one counts."""
        connected = set(map(self._introductions.register, self._router.node.peers))
        # Whoever leaves, and has to join again first, keeps what new nodes say for an exchange that may follow.
        held = {run for run, _ in self._router.held}
        return not self._introductions.hellos.keys() | held >= connected

    def has_only_misfits(self) -> bool:
        """Return whether there is a training here, but none that this node could join."""
        introductions = self._introductions
        return (
            not introductions.compatible()
            and any(
                introductions.hellos[run].phase is Phase.IN for run in introductions.incompatible
            )
            and not self.is_any_silent
        )

    def describe_unreachable(self) -> str:
        """Name the nodes that others see and this node does not, and say what to open; empty if there are none."""
        introductions = self._introductions
        unseen = self._find_unseen()
        if not unseen:
            return ""
        members = introductions.compatible(Phase.IN).items()
        seers = [run for run, hello in members if unseen.intersection(hello.members)]
        relation = "as a member" if seers else "beside it"
        if not seers:
            new = introductions.compatible(Phase.NEW).items()
            seers = [run for run, hello in new if unseen.intersection(hello.sees)]
        names = introductions.describe(sorted(unseen))
        # A node that was never met has no address here, but it may be one of those that the caller has named.
        node = self._router.node
        unanswered = sorted(node.seeds - {peer.address for peer in node.peers})
        no_answer = f" (no answer from {', '.join(unanswered)})" if unanswered else ""
        return (
            f"{introductions.name_of(min(seers))} has {names} {relation}, which this node "
            f"({introductions.name_of(self._membership.run)}) cannot reach{no_answer}: nodes send to each other "
            "directly, so let UDP pass between the two in both directions, or give the addresses at which they reach "
            "each other (advertise); gradwire doctor tries a path"
        )

    def describe_obstacle(self) -> str:
        """Say why this node may not come in; empty if there is no reason."""
        return self.describe_unreachable() or self._introductions.describe_incompatible()

    def _find_unseen(self) -> set[NodeRun]:
        introductions = self._introductions
        named = {
            run for hello in introductions.compatible(Phase.IN).values() for run in hello.members
        }
        if self._membership.phase is Phase.NEW:
            new = introductions.compatible(Phase.NEW).values()
            named.update(run for hello in new for run in hello.sees)
        # A connected node that computes introduces itself after its step.
        connected = set(map(run_of, self._router.node.peers))
        named -= {self._membership.run} | introductions.hellos.keys() | connected
        return {run for run in named if not introductions.is_excluded(run)}

    def give_way_to_unseen(self) -> None:
        """Join again where another asynchronous node has come in that this node does not see.

        Two nodes can come in by the same member at the same time. If they never see each other, each lacks the other's
        updates, which the member has.
        """
        now_s = clock.now_s()
        if now_s < self._looks_at_s or self._membership.phase is not Phase.IN:
            return
        self._looks_at_s = now_s + _UNSEEN_S
        unseen = self._find_unseen() - self._membership.members.keys()
        self._unseen = {run: self._unseen.get(run, -1) + 1 for run in unseen}
        # Perhaps only one of the two has heard of the other. If both have, that with the lower id stays longer.
        if any(
            looks >= (_UNSEEN_LOOKS if run > self._membership.run else 1)
            for run, looks in self._unseen.items()
        ):
            # The other one lacks updates of this node, and comes in again first.
            self._joins_from_s = now_s + 2 * _UNSEEN_S
            self._departure.rejoin(self.describe_unreachable())

    def begin_to_join(self) -> None:
        """Forget what this node has told of members that it sees, and whether it had what members had."""
        self._told = None
        self._inherited_from = frozenset()

    def inherit(self, members: Iterable[NodeRun]) -> None:
        """Note that this node, no member yet, had what these members had: if they die, it may go on alone."""
        self._inherited_from = frozenset(members)

    def _is_heir(self) -> bool:
        # A member that has finished, or dropped this node, has gone on without it: what they had then is not the end of
        # the training.
        members = self._inherited_from
        ended = self._introductions.has_finished, self._introductions.has_dropped
        return bool(members) and not any(has_ended(run) for run in members for has_ended in ended)

    def tell_members(self) -> None:
        """Tell nodes that look for a member whenever this node, no member itself, sees other members than before."""
        seen = frozenset(self._introductions.compatible(Phase.IN))
        if seen != self._told and self._introductions.compatible(Phase.JOINING):
            self._told = seen
            self._router.introduce()

    def has_to_begin(self) -> bool:
        """Return whether this node is to join, nobody here is a member or has trained, and other nodes are new.

        These wait for others to begin with: without this node they might wait for ever, and this node for a member.
        """
        membership = self._membership
        if membership.is_sharded is not None or membership.destination is not Phase.IN:
            return False
        others = self._introductions.compatible().values()
        return self._lasts(
            not self.is_any_silent
            and all(hello.is_sharded is None for hello in others)
            and any(hello.phase is Phase.NEW for hello in others)
        )

    def _lasts(self, is_due: bool) -> bool:
        """Return whether this has been so for a while: a member may still be on its way here, and others may see it."""
        now_s = clock.now_s()
        if not is_due or self._waits_until_s is None:
            self._waits_until_s = now_s + _WAIT_S if is_due else None
        return is_due and now_s >= (self._waits_until_s or math.inf)

    def _difference(self, run: NodeRun, hello: Hello) -> str:
        """Return why a node takes part in another training; empty if it does not."""
        membership = self._membership
        introductions = self._introductions
        has_begun = membership.phase in (Phase.IN, Phase.READY)
        if has_begun and hello.phase is Phase.IN and hello.origin != membership.origin:
            members = tuple(sorted({membership.run, *membership.peers}))
            here = (membership.run, membership.origin, members)
            there = (run, hello.origin, hello.members)
            if _is_started_again(here, there):
                introductions.supersede(
                    f"this node ({introductions.name_of(membership.run)}) is left over from an earlier run: "
                    f"{introductions.describe(hello.members)} have started the training again without it; end this "
                    "process"
                )
                return "this node is left over from an earlier run"
            if _is_started_again(there, here):
                return "it is left over from an earlier run: end that process"
        own = introductions.training
        # Nodes that began at the same time learn of each other in their first step, and one training gives way. A
        # training with a finished step is given up only for one that a member of it takes part in.
        has_gone = run in membership.finals and not introductions.has_finished(run)
        is_member = hello.phase is Phase.IN and (run in membership.members or has_gone)
        gives_way = membership.phase is Phase.IN and (not hello.is_confirmed or is_member)
        if own and hello.training not in ("", own) and introductions.is_confirmed and not gives_way:
            return (
                f"training {hello.training} there, {own} here: end processes that are left over from an earlier run, "
                "or give every training a secret or a port of its own"
            )
        return ""

    def joinable(self) -> dict[NodeRun, Hello]:
        """Return the introductions of members of the training that a late node may join."""
        if clock.now_s() < self._joins_from_s:
            return {}
        members = {
            run: hello
            for run, hello in self._introductions.compatible(Phase.IN).items()
            if not self._introductions.is_replaced(run)
        }
        sides = {run: (run, hello.origin, hello.members) for run, hello in members.items()}
        for run, side in sides.items():
            if any(_is_started_again(side, other) for other in sides.values()):
                del members[run]
        # Several trainings, of which none has taken the place of another: the oldest, as in a split network.
        oldest = min(members.values(), key=lambda hello: hello.origin[::-1], default=None)
        if oldest is None:
            return {}
        return {run: hello for run, hello in members.items() if hello.training == oldest.training}

    # ---- parts of one training ---------------------------------------------------------------------------------------

    def handle_unknown(self, run: NodeRun, hello: Hello, *, was_outside: bool) -> None:
        """Handle a member that this node does not know: a newcomer, or a member of a group that had split off."""
        membership = self._membership
        if membership.phase not in (Phase.IN, None if self._is_sync else membership.destination):
            return
        names_this_node = membership.run in hello.members
        # Four cases, by what the sender says and by whether it was outside when it last said something: it counts this
        # node in and has not heard that it was left behind; it was admitted by this node's group (asynchronous nodes
        # admit by introduction); it belongs to the other part of a split network; or both.
        own_group = {membership.run, *membership.peers}
        has_gone = self._departure.has_gone(run, hello.first_step)
        if names_this_node and (has_gone or not was_outside):
            # The others have gone on without the sender, which does not know it yet.
            self._departure.report(run)
            return
        if not self._is_sync and not own_group.isdisjoint(hello.members):
            if not has_gone:
                # Of two nodes that meet now, the second introduction says which updates come here.
                if hello.serves(membership.run):
                    self._admit(run, hello.first_step)
                return
            if was_outside:
                return
        # Synchronous newcomers are admitted at the end of a step.
        if not names_this_node and not self._is_outdated(hello):
            self.give_way(run, hello)
            if was_outside:
                self._router.introduce(run)  # its part may be the one that has to join

    def _is_outdated(self, hello: Hello) -> bool:
        """Return whether a synchronous node counts a member in that, by its own word, takes part with this node."""
        # The sender stood still while others went on and admitted newcomers, which it has never met. Members that it
        # knows tell it that it was left behind.
        members = self._membership.peers
        return self._is_sync and any(
            run in members and run in hello.members and self._membership.run in own.members
            for run, own in self._introductions.compatible(Phase.IN).items()
        )

    def _admit(self, run: NodeRun, first_step: int) -> None:
        """Make a node a member that this node's group has admitted, or join again if this node lacks its updates."""
        membership = self._membership
        # Two nodes may come in by the same member while they do not see each other: neither gets what the other sends
        # until they do.
        first_received = membership.expect_updates(run).first_received
        if first_received is not None and first_received > first_step:
            name = self._introductions.name_of(run)
            self._departure.rejoin(f"updates of {name} have never come here")
            return
        membership.admit(run, first_step)
        membership.admit_unaware(run)
        self._router.introduce(run)  # a newcomer waits for this
        if self._departure.unsettled:  # it may have heard so before it came in, and answered nobody
            self._departure.report(run)
        for other in self._introductions.compatible(Phase.JOINING):
            self._router.introduce(other)  # which needs connections with all members

    def is_elsewhere(self, hello: Hello) -> bool:
        """Return whether a node that this one counts in takes part with others: both parts of a split may have it."""
        here = self._membership
        is_other = hello.training not in ("", self._introductions.training)
        is_apart = is_other or (self._is_sync and here.run not in hello.members)
        return here.phase is hello.phase is Phase.IN and is_apart

    def absent(self, admitted: Collection[NodeRun]) -> list[NodeRun]:
        """Return those of the newcomers that are admitted with a step and send no update for their first one."""
        # They begin again after they were named, or came in elsewhere.
        return [
            run
            for run, hello in self._introductions.compatible().items()
            if run in admitted and (hello.phase is Phase.JOINING or self.is_elsewhere(hello))
        ]

    def give_way(self, run: NodeRun, hello: Hello) -> None:
        """Join again if not this node's training, or part of it, goes on but that of another member."""
        membership = self._membership
        introductions = self._introductions
        if membership.phase is Phase.JOINING:  # it has given way already
            return
        is_same = hello.training == introductions.training
        if not is_same and hello.is_confirmed != introductions.is_confirmed:
            # The sender may know this node from before its first step.
            if hello.is_confirmed:
                self._departure.rejoin(f"{introductions.name_of(run)} has begun before this node")
            else:
                self._router.introduce(run)
            return
        # The training that began earlier goes on, of equally old ones the larger: an incarnation is a start time.
        members = (membership.run, *membership.peers)
        ours = (*reversed(membership.origin), -len(members), min(members).id)
        first = min((member.id for member in hello.members), default=0)
        theirs = (*reversed(hello.origin), -len(hello.members), first)
        # A member may have given way in its first step, which this node had finished: if it is alone now, it follows.
        is_alone = not is_same and hello.is_confirmed and not {*membership.peers} - {run}
        if theirs < ours or is_alone:
            if not is_same:
                introductions.give_up()
            self._departure.rejoin(f"this node had split off from {len(hello.members)} others")


def _without_leavers(membership: Membership, runs: Iterable[NodeRun]) -> list[NodeRun]:
    """Let an observer add the last updates of members that have left in good order; return the other members.

    What these have sent is all there, and all members add it. An observer that joined again in its place would miss it
    for good where all members leave.
    """
    if not membership.phase is membership.destination is Phase.READY:
        return list(runs)
    others = []
    for run in runs:
        hello = membership.introductions.hellos.get(run)
        has_said_so = hello is not None and hello.phase is Phase.LEAVING
        if not (has_said_so or membership.introductions.has_finished(run)):
            others.append(run)
        elif run not in membership.finals:
            membership.mark_departing(run)
            membership.agree_on_final(run, membership.departing[run])
    return others


def _is_started_again(earlier: _Side, later: _Side) -> bool:
    """Return whether nodes have started a run again without a node that is left over.

    Args:
        earlier: of a node.
        later: of a node of another training.
    """
    node, origin, _ = earlier
    _, other_origin, members = later
    # A node that is alone may be a restarted one that has not met the others yet, so it proves nothing.
    return (
        len(members) > 1
        and node not in members
        and origin.incarnation < other_origin.incarnation
        and any(run.id == old.id and old < run for run in members for old in (node, origin))
    )
