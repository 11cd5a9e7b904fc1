"""The common start of the first members: who they are, whether they begin alike, and the way of the exchange."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .. import clock
from ..arrays import layouts
from ..errors import Mismatch
from .consistency import start_of
from .departure import Departure, Trainings
from .membership import Membership, Router
from .options import Options
from .parameters import agreed_parameters
from .protocol import Hello, Introductions, Kind, NodeRun, Note, Phase
from .replica import Replica
from .snapshot import NO_STATE, NodeState

if TYPE_CHECKING:
    from ..transport import Node

__all__ = ["Start", "wait_until_all_finish"]

_LOG = logging.getLogger(__name__)

# Longest wait for the introduction of a connected node, which may not run an exchange at all.
_INTRODUCTION_S = 2.0

# How long to wait for all the nodes of a run before looking at what those that are here do.
_COMPLETE_S = 2.0

# How long a node that expects nobody waits for one that it knows.
_SEEDS_S = 2.0

# Longest wait of the node that begins a training, where members of an earlier run are here, for the other new nodes.
_RESTART_S = 10.0

# How long a node that was named as a first member waits for its connections with the others, and how long a node that
# sees all waits for a node with a lower id that does not.
_CONNECTED_S = 10.0

# A node that has not looked for so long stood still, as a stopped process does.
_STILL_S = 1.0

_LATE_REMEDY = "a node that prepares data for longer before its first step needs a larger start_timeout_s on the others"


class Start:
    """Begins the training together with the other first members.

    Args:
        options, membership, router, departure, trainings, replica: of this node.
        poll: sends and receives for up to so many seconds.

    Attributes:
        has_announced: whether the others know the parameters.
    """

    def __init__(
        self,
        options: Options,
        membership: Membership,
        router: Router,
        departure: Departure,
        trainings: Trainings,
        replica: Replica,
        poll: Callable[[float], None],
    ) -> None:
        self.has_announced = False
        self._options = options
        self._membership = membership
        self._introductions = membership.introductions
        self._router = router
        self._departure = departure
        self._trainings = trainings
        self._replica = replica
        self._poll = poll
        self._silent_until_s: float | None = None
        self._restart_until_s: float | None = None
        self._connected_until_s: float | None = None
        self._new_ids: frozenset[int] = frozenset()
        # The new nodes that this node has said it sees.
        self._told: frozenset[NodeRun] = frozenset()
        self._tells_at_s = 0.0
        # Of nodes that do not see all that this node sees.
        self._lacks_since_s: dict[NodeRun, float] = {}
        self._looked_s = 0.0
        self._wait: clock.Wait | None = None  # for the others
        self._equalizes = False
        self._former_members: frozenset[NodeRun] | None = None

    def announce_params(self, params: Any, state: NodeState = NO_STATE) -> None:
        """Check the parameters and tell the others their dtypes, shapes and initial values.

        Args:
            params: of the caller.
            state: also equal on all nodes when the training begins.

        Raises:
            Mismatch: no other member has such parameters.
            TypeError, ValueError: the parameters do not fit the encoders.
        """
        groups = self._replica.groups
        groups.check_params(params)
        # Digests of the initial parameters tell nodes apart that begin differently.
        start = self._introductions.start
        if self._membership.phase is Phase.NEW:
            arrays = agreed_parameters(self._replica) or params
            params_digest, residual = start_of(
                groups, arrays, state.export(), self._replica.saved_by
            )
            # Nodes that go on from an earlier exchange have their own residuals, which may be equal.
            start = params_digest, residual if self._former_members is None else ""
        if self._membership.set_params(layouts(params), start):
            self._router.introduce()
        self._departure.suspect_incompatible()
        self.has_announced = True

    def ensure_announced(self, params: Any) -> None:
        """Tell the others the parameters' dtypes, shapes and initial values, once; see `announce_params`."""
        if not self.has_announced:
            self.announce_params(params)

    def set_team(self, team: tuple[int, int]) -> None:
        """Note the workers of this node's machine, see `Hello`; tell the others, unless it may load a checkpoint."""
        if self._introductions.set_team(team) and self.has_announced:
            self._router.introduce()

    def wait_for_peers(self) -> None:
        """Return when this node is a member from the start (phase IN), or has to join late (JOINING).

        The node with the lowest id names the members as soon as it sees as many nodes as it expects.

        Raises:
            TimeoutError: fewer nodes appeared in time.
            Mismatch: the others train something else, or start at another step.
        """
        membership = self._membership
        timeout_s = self._options.longest_start_s
        initially = expected = self._expected_peers()
        membership.restart_at(self._replica.step)
        deadline_s = clock.now_s() + timeout_s
        self._tells_at_s = clock.now_s() + _COMPLETE_S
        try:
            seeds = len(self._router.node.seeds)
            if self._former_members is None and expected:
                self._wait_for_connections(expected, timeout_s)
            elif self._former_members is None and seeds:
                # It may begin alone, but not a second training while nodes that it knows go on with the first. A peer
                # that is as new as this node says nothing of the others.
                with suppress(TimeoutError):
                    self._router.node.wait_for_peers(seeds, _SEEDS_S, self._sees_training)
            poll_s = 0.0
            while membership.phase is Phase.NEW:
                self._poll(poll_s)
                poll_s = clock.POLL_S
                expected = self._still_expected(initially)
                self._try_to_start(expected)
                if membership.phase is not Phase.NEW:
                    return
                awaited = self._describe_awaited(expected)
                obstacle = self._note_view(awaited)
                if clock.now_s() >= deadline_s:
                    misfits = self._introductions.describe_incompatible()
                    causes = filter(None, [awaited, misfits, obstacle or _LATE_REMEDY])
                    raise TimeoutError(
                        f"the training has not begun within {timeout_s:g} s: {'; '.join(causes)}"
                    )
        finally:
            self._wait = None

    def _wait_for_connections(self, expected: int, timeout_s: float) -> None:
        """Wait for so many peers, or for a training that has begun: then no other node is needed."""
        look_at_s = clock.now_s() + _COMPLETE_S

        def sees_training() -> bool:
            # Nodes that are all started anew introduce themselves when all are here: then all of them hear of a misfit.
            if clock.now_s() < look_at_s:
                return False
            self._note_view()
            return self._sees_training() or len(self._connected()) >= self._still_expected(expected)

        try:
            self._router.node.wait_for_peers(expected, timeout_s, sees_training)
        except TimeoutError as error:
            obstacle = self._note_view()
            raise TimeoutError(f"{error}; {obstacle or _LATE_REMEDY}") from None

    def _sees_training(self) -> bool:
        self._poll(0.0)
        return bool(self._trainings.joinable())

    def _note_view(self, awaited: str = "") -> str:
        """Tell the others which new nodes this node sees; log and return which nodes have gone or cannot be reached.

        Args:
            awaited: whom this node waits for, for the log; empty: the node logs it.
        """
        now_s = clock.now_s()
        seen = frozenset(self._introductions.compatible(Phase.NEW))
        # Not at every connection: in a start of many nodes that would be a message for every three of them.
        if self._membership.phase is Phase.NEW and seen != self._told and now_s >= self._tells_at_s:
            self._told = seen
            self._tells_at_s = now_s + _COMPLETE_S
            self._router.introduce()
        obstacle = self._trainings.describe_unreachable()
        gone = _describe_gone(self._router.node, self._introductions)
        what = "this node waits for " + ("nodes that it cannot reach" if obstacle else "the others")
        what += f"; {gone}" if gone else ""
        # What is news is logged soon, but not at once: an introduction may just be on its way.
        if self._wait is None or self._wait.what != what:
            self._wait = clock.Wait(what, self._options.timeout_s)
        elif obstacle or gone or awaited:
            self._wait.note(None, obstacle or awaited)
        return "; ".join(filter(None, [gone, obstacle]))

    def _describe_awaited(self, expected: int) -> str:
        """Say how many nodes are ready to begin, and name those that are not."""
        introductions = self._introductions
        node = self._router.node
        connected = self._connected()
        here = {self._membership.run.id, *(run.id for run in connected)}
        ready = introductions.compatible()
        text = f"{len(ready)} of {expected} peers are ready"
        if len(ready) >= expected:
            first = min([self._membership.run, *ready])
            text = f"{introductions.name_of(first)} has not begun the training with this node"
            text = text if first in ready else "more new nodes may come before it begins or joins"
        missing = [name for node_id, name in sorted(node.names.items()) if node_id not in here]
        text += f"; {', '.join(missing)} missing" if missing else ""
        silent = introductions.describe(sorted(connected - introductions.hellos.keys()))
        text += f"; connected, and still preparing: {silent}" if silent else ""
        observers = introductions.describe(introductions.observers if len(ready) < expected else ())
        return text + (f"; observers do not count: {observers}" if observers else "")

    def _connected(self) -> set[NodeRun]:
        return set(map(self._introductions.register, self._router.node.peers))

    def _expected_peers(self) -> int:
        """Return the number of other nodes to wait for."""
        node = self._router.node
        if self._former_members is not None:
            # Whoever has gone since then is not waited for, as in a step.
            return len(self._former_members & self._connected())
        expected = 1 if self._options.role == "observer" else self._options.min_peers
        if expected is None:
            expected = node.expected_peers
        if expected is None:
            expected = max(len(node.seeds), len(node.peers))
            if not expected:
                _LOG.warning("no peer is known, this node goes on alone: give min_peers")
        return expected

    def _still_expected(self, initially: int) -> int:
        """Return the number of other nodes to wait for now, of those that were expected at the beginning."""
        node = self._router.node
        if self._former_members is not None:
            return self._expected_peers()
        if self._options.min_peers is not None or node.expected_peers is not None:
            return initially
        addresses = node.seeds | {peer.address for peer in node.peers}
        return min(initially, max(_count_members(addresses, self._introductions), 1))

    def _try_to_start(self, expected: int) -> None:
        membership = self._membership
        introductions = self._introductions
        if introductions.is_replaced(membership.run):
            raise Mismatch(
                f"another node with this node's id, {membership.run.id}, has started later: give every node its own"
            )
        members = self._trainings.joinable()
        # A member that names this node has begun with it. Members that do not name it have begun without it.
        naming = next(
            (hello for hello in members.values() if membership.run in hello.members), None
        )
        if naming is not None:
            self._start_with_named(naming)
        elif members and not self._may_start_again(members, expected):
            self._router.announce(Phase.JOINING)
        # As many nodes as were expected are here, and none of them trains the same: waiting would not help.
        elif not introductions.compatible() and introductions.misfits >= max(expected, 1):
            raise Mismatch(introductions.describe_incompatible())
        # Only one node names the members, so all begin with the same set even if they see each other at different
        # times.
        elif self._options.role != "observer" and not self._waits_for_introduction():
            initial = self._initial()
            if len(initial) >= (self._all_others(expected) if members else expected):
                # Also on a node that does not name the members: the one that does would name none.
                self._check_same_start(initial)
                named = self._named(initial)
                if named is not None:
                    nodes = len(named) + 1
                    is_sharded = self._options.is_sharded(nodes, self._replica.groups.numel)
                    trainings = {hello.training for hello in initial.values()} - {""}
                    self._start(named, membership.run, "".join(trainings), is_sharded=is_sharded)

    def _named(self, initial: Mapping[NodeRun, Hello]) -> list[NodeRun] | None:
        """Return the other first members; None if another node names them.

        It is the node with the lowest id. If that cannot reach all that this node sees, it will never see as many as it
        expects, and would let all wait.
        """
        run = self._membership.run
        # A node that has not seen this one has introduced itself and does not look for others yet: it may see all then.
        lacking = {
            other: initial.keys() - {other, *hello.sees} if run in hello.sees else set()
            for other, hello in initial.items()
        }
        now_s = clock.now_s()
        # What this node knows is old where it stood still: the others may have begun meanwhile, and it will hear of it.
        since_s = self._lacks_since_s if now_s < self._looked_s + _STILL_S else {}
        self._looked_s = now_s
        self._lacks_since_s = {
            other: since_s.get(other, now_s) for other, lacks in lacking.items() if lacks
        }
        longest_s = _COMPLETE_S + min(_CONNECTED_S, self._options.timeout_s / 2)
        lower = [other for other in initial if other < run]
        if not lower:
            return list(initial)
        if any(now_s < self._lacks_since_s.get(other, now_s) + longest_s for other in lower):
            return None
        # Those that lack the fewest come first, and everybody has to reach all others.
        named: list[NodeRun] = []
        for other in sorted(initial, key=lambda each: (len(lacking[each]), each)):
            if all(other not in lacking[each] and each not in lacking[other] for each in named):
                named.append(other)
        left_out = self._introductions.describe(sorted(initial.keys() - set(named)))
        _LOG.warning("%s cannot reach all the others: this node begins without it", left_out)
        return sorted(named)

    def _initial(self) -> dict[NodeRun, Hello]:
        """Return the introductions of the other nodes that have not begun."""
        introductions = self._introductions
        nodes = introductions.compatible(Phase.NEW).items()
        return {run: hello for run, hello in nodes if not introductions.is_replaced(run)}

    def _all_others(self, expected: int) -> int:
        """Return the number of other nodes that are new if all are, and not only as many as a start needs."""
        return max(expected, _count_members(self._router.node.seeds, self._introductions), 1)

    def _may_start_again(self, members: Mapping[NodeRun, Hello], expected: int) -> bool:
        """Return whether the members that are here may be left over from a run that is just started again."""
        # The node that began their training (rank 0) is new here. Either it was restarted alone and joins late, or all
        # are restarted, and the members are processes of the run before. It alone decides, for the others as well: as
        # soon as all new nodes are here they begin, and if no more come it joins. As long as nodes are missing, it may
        # be among them. Nodes that come and go keep nobody away from a training that goes on.
        run = self._membership.run
        new = self._initial()
        began = {
            other
            for other in (run, *new)
            for hello in members.values()
            if hello.origin.id == other.id and hello.origin < other
        }
        if run not in began and (began or len(self._router.node.peers) >= expected):
            return bool(began)
        now_s = clock.now_s()
        ids = self._new_ids.union(run.id for run in new)
        if self._restart_until_s is None or ids != self._new_ids:
            self._restart_until_s = now_s + min(_RESTART_S, self._options.timeout_s / 2)
            self._new_ids = ids
        if len(new) >= self._all_others(expected) or now_s < self._restart_until_s:
            return True
        if run in began:
            _LOG.warning(
                "this node takes part in a training that has begun, with %s: if a new one was to begin, end these "
                "processes of the run before",
                self._introductions.describe(members),
            )
        return False

    def _waits_for_introduction(self) -> bool:
        """Return whether to wait for a connected node's introduction: a training may have begun without this node."""
        is_silent = self._trainings.is_any_silent
        if not is_silent or self._silent_until_s is None:
            self._silent_until_s = clock.now_s() + _INTRODUCTION_S
        return is_silent and clock.now_s() < self._silent_until_s

    def _start_with_named(self, hello: Hello) -> None:
        """Start with the members that the node with the lowest id has named, once all are connected."""
        compatible = self._introductions.compatible()
        membership = self._membership
        others = [run for run in hello.members if run != membership.run]
        # The others may have begun, and lost a member that this node has never met, or this node itself, or have sent
        # their first updates before a connection was lost: it is too late to begin with them.
        streams = [membership.others[run] for run in others if run in membership.others]
        is_late = any((stream.first_received or 0) > self._replica.step for stream in streams)
        if is_late or not membership.reported.isdisjoint(hello.members):
            self._router.announce(Phase.JOINING)
            return
        # A step would wait for members that are not connected yet, and suspect them. So this node begins a little later
        # than the others, whose first updates are kept meanwhile.
        connected = self._connected()
        if not connected.issuperset(others):
            self._wait_for_named()
        elif all(run in compatible for run in others):
            self._check_same_start({run: compatible[run] for run in others})
            self._start(others, hello.origin, hello.training, is_sharded=bool(hello.is_sharded))

    def _wait_for_named(self) -> None:
        """Wait for connections with the other first members, and join late if some do not come about."""
        # Of two nodes that cannot reach each other, one can take part with the others: as in a training that goes on.
        now_s = clock.now_s()
        if self._connected_until_s is None:
            longest_s = min(_CONNECTED_S, self._options.timeout_s / 2)
            self._connected_until_s = now_s + longest_s
        elif now_s >= self._connected_until_s:
            obstacle = self._trainings.describe_unreachable()
            _LOG.warning("this node begins without some of the first members: %s", obstacle)
            self._router.announce(Phase.JOINING)

    def _check_same_start(self, hellos: Mapping[NodeRun, Hello]) -> None:
        """Refuse nodes that begin at another step, with other parameters, or with one node's residual twice."""
        step = self._replica.step
        trainings = {self._introductions.training, *(hello.training for hello in hellos.values())}
        if len(trainings - {""}) > 1:
            raise Mismatch(
                f"the checkpoints are of several trainings, {', '.join(sorted(trainings - {''}))}: load those of one "
                "training on all nodes"
            )
        # A residual belongs to one node. The same residual on two nodes would be added to the parameters twice.
        own_residual = self._introductions.start[1]
        here = self._introductions.name_of(self._membership.run)
        for run, hello in hellos.items():
            there = self._introductions.name_of(run)
            # A node that has begun already has compared itself before.
            if hello.phase is not Phase.NEW:
                continue
            if hello.step != step:
                theirs, ours = map(self._introductions.step_number, (hello.step, step))
                raise Mismatch(
                    f"{there} begins at step {theirs}, this node ({here}) at step {ours}: begin with the same "
                    "checkpoint on all nodes, each with its own file of that step; a node without a file gets one from "
                    "gw.exchange.redistribute, or joins late, once the others have begun with a smaller min_peers "
                    "(GRADWIRE_MIN_PEERS)"
                )
            if own_residual and own_residual == hello.start[1]:
                raise Mismatch(
                    f"{there} and this node ({here}) have loaded the checkpoint of the same node, so its residual "
                    "would count twice: every node saves its own, and loads it"
                )
            differs = _differ(self._introductions.start, hello.start) and not self._equalizes
            if differs and (self._options.is_sync or step == 0):
                raise Mismatch(
                    f"{there} and this node ({here}) begin with other parameters: seed the initial values alike or "
                    "load the same checkpoint on all nodes, or join(params, equalize=True) takes those of the node "
                    "with the lowest id"
                )

    def _start(
        self, others: Collection[NodeRun], origin: NodeRun, training: str, *, is_sharded: bool
    ) -> None:
        membership = self._membership
        replica = self._replica
        members = [membership.run, *others]
        membership.forget_reports()  # of an earlier training
        # In this order: a member that hears of this node's phase may send a part of its first update at once.
        membership.begin(others, replica.step, origin, is_sharded=is_sharded, training=training)
        replica.begin(replica.step, len(members), is_sharded=is_sharded)
        replica.assign_owners(members, replica.step, self._introductions.workers)
        self._router.announce(Phase.IN)
        if not (self._options.is_sync or self._equalizes):
            _warn_if_unequal(self._introductions, others)
        _LOG.info(
            "%s exchange of %d node%s begins at step %d",
            "sharded" if is_sharded else "mesh",
            len(members),
            "s" * (len(members) > 1),
            self._introductions.step_number(replica.step) + replica.local_steps,
        )

    def load_training(self, training: str) -> None:
        """Go on with the training of a checkpoint that was loaded; empty: it is of none."""
        self._membership.restart_at(self._replica.step)  # introductions name it
        self._introductions.take_part(training, is_confirmed=bool(training))

    def ignore(self, origins: Collection[NodeRun]) -> None:
        """Wait for nodes that still take part in trainings that these nodes began, instead of joining them."""
        self._introductions.ignore(lambda hello: hello.origin in origins)

    def hold_introductions(self, step: int) -> None:
        """Keep what members say about the exchange with which they go on after ``step``, for `follow`."""
        self._router.hold_introductions(step)

    def follow(self, before: Start, members: Collection[NodeRun]) -> None:
        """Begin after another exchange on the same node, with those of its members that are still there."""
        self._former_members = frozenset(members)
        # A member that ends the other exchange a little later may say there that a third one has gone.
        former = before._introductions.signature["params"]
        self._introductions.ignore(
            lambda hello: hello.phase is not Phase.NEW and hello.signature.get("params") == former
        )
        self._router.replay(before._router.held)

    def expect_equalized(self, equalize: bool) -> None:
        """Accept nodes that begin with other parameters, because `equalize` follows, or refuse them."""
        self._equalizes = equalize


def wait_until_all_finish(start: Start, following: int) -> None:
    """Return when all members that are still there have finished the step before ``following``.

    Until then one of them may need this node: both agree on the last update of a member that has died, and this node
    may have to pass it on.

    Raises:
        TimeoutError: a member has not finished it in time.
    """
    membership = start._membership
    router = start._router
    router.send(Kind.NOTE, following, Note().encode(), router.participants())
    timeout_s = start._options.longest_start_s
    deadline_s = clock.now_s() + timeout_s
    while membership.phase is Phase.IN:
        here = membership.members.keys() - router.lost - membership.departing.keys()
        unfinished = sorted(run for run in here if not membership.members[run].has_begun(following))
        if not unfinished and router.flush():
            return
        if clock.now_s() >= deadline_s:
            step = start._introductions.step_number(following - 1)
            names = start._introductions.describe(unfinished)
            raise TimeoutError(f"{names} has not finished step {step} after {timeout_s:g} s")
        start._poll(clock.POLL_S)


def _count_members(addresses: Collection[str], introductions: Introductions) -> int:
    """Return the number of nodes at these addresses that may begin a training.

    A connected node counts before it has said what it is. It may be an observer, or go again without a word, as
    ``gradwire doctor`` does. A node that a list of peers names counts whether it is connected or not.
    """
    observers = {introductions.peer_of(run).address for run in introductions.observers}
    return len(set(addresses) - observers)


def _describe_gone(node: Node, introductions: Introductions) -> str:
    """Name the nodes that were here and have gone before the start; empty if there are none."""
    here = {peer.id for peer in node.peers}
    # Others than the run's, such as gradwire doctor, come and go.
    gone = [
        run
        for run in sorted(introductions.interrupted)
        if run.id not in here and (run.id in node.names or not node.names)
    ]
    departed = introductions.describe_departed(gone)
    return f"gone before the start, see their own logs: {departed}" if gone else ""


def _differ(start: tuple[str, str], other: tuple[str, str]) -> bool:
    """Return whether two nodes begin with other parameters, as far as their digests tell; see `start_of`."""
    return bool(start[0] and other[0]) and start[0] != other[0]


def _warn_if_unequal(introductions: Introductions, others: Collection[NodeRun]) -> None:
    """Warn where asynchronous nodes go on from checkpoints of which some lack messages that were on their way."""
    hellos = introductions.hellos
    if any(_differ(introductions.start, hellos[run].start) for run in others if run in hellos):
        _LOG.warning(
            "the nodes go on from checkpoints whose parameters differ, by rounding or by messages that were on their "
            "way, and stay different: join(params, equalize=True) on all nodes makes them equal"
        )
