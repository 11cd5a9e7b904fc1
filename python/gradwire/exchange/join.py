"""Joining: the common start of the first members, a late start with a snapshot, and the admission of newcomers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ..errors import Mismatch
from ..transport import Peer
from . import clock
from .departure import Departure
from .membership import Membership, Router, by_run
from .options import Options
from .parameters import copies, described, put, writable_views
from .protocol import Hello, Kind, NodeRun, Note, Phase, decode_steps, encode_steps, run_of
from .replica import Replica
from .snapshot import Donor, Snapshot

__all__ = ["Join"]

_LOG = logging.getLogger(__name__)

# Longest wait for the introduction of a connected node, which may not run an exchange at all.
_INTRODUCTION_S = 2.0


class Join:
    """Makes this node a member, and serves the nodes that come later.

    Args:
        options, membership, router, departure: of this node.
        replica: replaced by a member's when this node joins late.
        on_load: called when it has been replaced.
        on_follow: called with the caller's parameters after every step that this node follows without being a member.
    """

    def __init__(
        self,
        options: Options,
        membership: Membership,
        router: Router,
        departure: Departure,
        replica: Replica,
        on_load: Callable[[], None],
        on_follow: Callable[[Any], None],
    ) -> None:
        self._options = options
        self._membership = membership
        self._router = router
        self._departure = departure
        self._replica = replica
        self._on_load, self._on_follow = on_load, on_follow
        self._donor = Donor(router.node)
        self._asked: tuple[Peer, int] | None = None  # donor and number of the request
        self._incoming: Snapshot | None = None
        self._requests = 0
        self._silent_until_s: float | None = None
        self.equalizes = False
        router.handlers[Kind.HELLO] = self._add_hello
        router.handlers[Kind.REQUEST] = self._add_request
        router.handlers[Kind.SNAPSHOT] = self._add_part

    def poll(self, timeout_s: float) -> None:
        """Send as much as there is space for, receive for up to ``timeout_s``, and find lost members."""
        self._donor.send_parts()
        lost = self._router.receive(timeout_s)
        if lost:
            self._departure.handle_lost(lost, self._replica.step)
        self._router.flush()

    # ---- the first members -------------------------------------------------------------------------------------------

    def wait_for_peers(self, expected: int) -> None:
        """Return when this node is a member from the start (phase IN), or has to join late (JOINING).

        The node with the lowest id names the members as soon as it sees as many nodes as it expects.

        Raises:
            TimeoutError: fewer than ``expected`` nodes appeared in time.
            Mismatch: the others train something else, or start at another step.
        """
        membership, timeout_s = self._membership, self._options.timeout_s
        membership.next_step = self._replica.step
        deadline_s = clock.now_s() + timeout_s
        if expected:
            self._router.node.wait_for_peers(expected, timeout_s)
        poll_s = 0.0
        while membership.phase is Phase.NEW:
            self.poll(poll_s)
            poll_s = clock.POLL_S
            self._try_to_start(expected)
            if membership.phase is Phase.NEW and clock.now_s() >= deadline_s:
                ready = f"{len(membership.fitting())} of {expected} peers are ready within {timeout_s:g} s"
                raise TimeoutError("; ".join([ready, *filter(None, [membership.mismatches()])]))

    def _try_to_start(self, expected: int) -> None:
        membership = self._membership
        good, inside = membership.fitting(), membership.fitting(Phase.IN)
        naming = next((one for one in inside.values() if membership.run in one.members), None)
        if naming is not None:
            self._start_with_named(naming)
        elif inside:
            membership.phase = Phase.JOINING
        elif membership.mismatched and not good and len(membership.mismatched) >= expected:
            raise Mismatch(membership.mismatches())
        elif self._destination is Phase.IN and not self._is_any_silent():
            initial = membership.fitting(Phase.NEW)
            if len(initial) >= expected:
                # Also on a node that does not name the members: the one that does would name none.
                self._check_same_start(initial)
                if all(membership.me < peer for peer in initial):
                    self._start(initial)

    def _is_any_silent(self) -> bool:
        """Return whether to wait for a connected node's introduction: a training may have begun without this node."""
        is_silent = not self._membership.hellos.keys() >= set(self._router.node.peers)
        if not is_silent or self._silent_until_s is None:
            self._silent_until_s = clock.now_s() + _INTRODUCTION_S
        return is_silent and clock.now_s() < self._silent_until_s

    def _start_with_named(self, hello: Hello) -> None:
        """Start with the members that the node with the lowest id has named, once all are connected."""
        good = self._membership.fitting()
        known = by_run(good)
        others = [run for run in hello.members if run != self._membership.run]
        if all(run in known for run in others):
            initial = {known[run]: good[known[run]] for run in others}
            self._check_same_start(initial)
            self._membership.origin = hello.origin
            self._start(initial)

    def _check_same_start(self, hellos: dict[Peer, Hello]) -> None:
        """Refuse nodes that begin at another step, with other parameters, or with one node's residual twice."""
        own, membership = self._replica.step, self._membership
        for peer, hello in hellos.items():
            both = f"{membership.name_of(peer)} and this node ({membership.name_of(membership.me)})"
            (params, residual), (own_params, own_residual) = hello.start, membership.start
            if hello.phase is not Phase.NEW:
                continue
            if hello.step != own:
                raise Mismatch(
                    f"{peer.address} begins at step {hello.step}, this node ({membership.me.address}) at step "
                    f"{own}: begin with the same checkpoint on all nodes"
                )
            if residual and residual == own_residual:
                raise Mismatch(
                    f"{both} have loaded the checkpoint of the same node, so its residual would count twice: "
                    "every node saves its own, and loads it"
                )
            if params and own_params and params != own_params and not self.equalizes:
                raise Mismatch(
                    f"{both} begin with other parameters: seed the initial values alike or load the same checkpoint on "
                    "all nodes, or join(params, equalize=True) takes those of the node with the lowest id"
                )

    def _start(self, others: Iterable[Peer]) -> None:
        step = self._replica.step
        members = list(others)
        for peer in members:
            self._membership.add_member(peer, step)
        self._replica.deal([self._membership.me, *members], step)
        self._router.announce(Phase.IN)
        _LOG.info("exchange of %d nodes begins at step %d", len(self._membership.members) + 1, step)

    def equalize(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Give all first members the parameters, and the optimiser's state, of the one with the lowest id.

        Raises:
            TimeoutError: that took longer than ``timeout_s``.
            Mismatch: the arrays do not fit.
        """
        membership, replica = self._membership, self._replica
        deadline_s = clock.now_s() + self._options.timeout_s
        served: set[Peer] = set()
        here = {membership.me: replica.step}
        while membership.phase is Phase.IN:
            hellos = {
                peer: membership.hellos[peer]
                for peer in membership.peers
                if peer in membership.hellos
            }
            first = min((membership.me, *hellos))
            others = {
                peer for peer, hello in hellos.items() if hello.start[0] != membership.start[0]
            }
            if first == membership.me:
                served |= self._donor.requesters
                self._donor.serve(here, lambda: self._snapshot(here, params, optimizer_state))
                if others <= served and self._donor.is_idle:
                    return
            elif first not in others:
                return
            elif self._asked is None or self._asked[0] != first:
                self._requests += 1
                self._asked, self._incoming = (first, self._requests), None
                self._router.send(Kind.REQUEST, self._requests, encode_steps({}), to=first)
            elif self._incoming is not None and not self._incoming.missing:
                self._check_fits(self._incoming, params, optimizer_state)
                self._load(self._incoming, params, optimizer_state)
                self._asked = None
                return
            if clock.now_s() >= deadline_s:
                raise TimeoutError(
                    f"the initial parameters of {membership.name_of(first)} did not come in time"
                )
            self.poll(clock.POLL_S)

    # ---- introductions -----------------------------------------------------------------------------------------------

    def announce_params(self, described: list[list[object]], start: tuple[str, str]) -> None:
        """Tell the others the dtypes and shapes of the parameters, and the digests of the initial values.

        Raises:
            Mismatch: no other member has such parameters.
        """
        if self._membership.set_params(described, start):
            self._router.introduce()
        self._departure.suspect_mismatched()

    def _add_hello(self, peer: Peer, _: int, payload: memoryview) -> None:
        membership = self._membership
        hello, before = membership.add_hello(peer, payload)
        if self._asked is not None and self._asked[0] == peer and before is None:
            self._asked = None  # its connection is new: the rest of the snapshot will not arrive
        if peer in membership.mismatched:
            self._departure.suspect_mismatched()
            return
        starts_anew = hello.phase in (Phase.JOINING, Phase.READY)
        is_member = peer in membership.members
        if hello.phase is Phase.LEAVING:
            membership.reasons[peer] = "finished"
        elif before is None:
            membership.reasons.pop(peer, None)
        if is_member and not starts_anew and hello.phase is not Phase.LEAVING:
            if (
                membership.phase is Phase.IN
                and peer in membership.peers
                and self._is_elsewhere(hello)
            ):
                self._departure.suspect([peer], "came in with another part of a split network")
                self._rejoin_if_smaller(hello)
            return
        if before is None or starts_anew:
            membership.others[peer] = membership.new_stream()
        if hello.phase is Phase.JOINING and membership.phase is Phase.IN:
            self._router.introduce(peer)  # tells from which update on the newcomer gets all
        if is_member:
            if membership.phase in (Phase.IN, Phase.READY) and peer not in membership.departing:
                why = "leaves" if hello.phase is Phase.LEAVING else "joins again"
                self._departure.suspect([peer], why)
        elif hello.phase is Phase.IN:
            stream = membership.others.setdefault(peer, membership.new_stream())
            if stream.first is None:
                stream.start_at(hello.fresh)
            if membership.phase in (Phase.IN, None if self._options.is_sync else self._destination):
                was_outside = before is not None and before.phase is not Phase.IN
                self._add_unknown_member(peer, hello, was_outside=was_outside)

    def _add_unknown_member(self, peer: Peer, hello: Hello, *, was_outside: bool) -> None:
        """Handle a member that this node does not know: a newcomer, or a member of a group that had split off."""
        membership = self._membership
        names_this_node = membership.run in hello.members
        own_group = {membership.run, *map(run_of, membership.peers)}
        if names_this_node and not was_outside:
            # The others have gone on without the sender, which does not know it yet.
            self._departure.report(to=peer)
            return
        if was_outside and not self._options.is_sync and not own_group.isdisjoint(hello.members):
            if not self._departure.has_gone(peer, hello.first):
                membership.admit(peer, hello.first)
                self._router.introduce(peer)  # a newcomer waits for this
            return
        if not names_this_node:  # synchronous newcomers are admitted at the end of a step
            self._rejoin_if_smaller(hello)
            if was_outside:
                self._router.introduce(peer)  # its part may be the one that has to join

    def _is_elsewhere(self, hello: Hello) -> bool:
        """Return whether a node that this one has admitted came in with other members: both parts of a split have."""
        names_this_node = self._membership.run in hello.members
        return self._options.is_sync and hello.phase is Phase.IN and not names_this_node

    def _rejoin_if_smaller(self, hello: Hello) -> None:
        """Join again if the sender's part of a split network is the one that goes on."""
        # The training that began earlier goes on, of equally old ones the larger: an incarnation is a start time.
        membership = self._membership
        peers = membership.peers
        own = (*reversed(membership.origin), -len(peers) - 1, min((*peers, membership.me)).id)
        first = min((node for node, _ in hello.members), default=0)
        theirs = (*reversed(hello.origin), -len(hello.members), first)
        if theirs < own:
            self._departure.rejoin(f"this node had split off from {len(hello.members)} others")

    def say_goodbye(self) -> None:
        """Tell the members, while there is time, that this node's last update was sent."""
        self._router.announce(Phase.LEAVING)
        deadline_s = clock.now_s() + self._options.timeout_s
        while not self._router.flush() and clock.now_s() < deadline_s:
            self.poll(clock.ROOM_POLL_S)

    # ---- newcomers ---------------------------------------------------------------------------------------------------

    def finish_step(self, contributors: Iterable[Peer]) -> None:
        """Remove departed members, and admit the newcomers that all members named with their update of this step.

        Args:
            contributors: the other members whose updates were applied.
        """
        membership, step = self._membership, self._replica.step
        dealt = list(contributors)
        membership.next_step = max(membership.next_step, step + 1)
        notes: list[Note | None] = [
            membership.members[peer].notes.get(step) for peer in dealt if peer in membership.members
        ]
        if membership.phase is Phase.IN:
            at, note = membership.own_note or (None, None)
            notes.append(note if at == step else None)
            dealt.append(membership.me)
        for node, incarnation, role in (one for note in notes if note for one in note.roles):
            membership.roles[Peer(node, incarnation, "a newcomer")] = role
        admitted = _named_by_all(notes)
        known = by_run(membership.others) if admitted else {}
        for run in sorted(admitted):
            if run == membership.run:
                membership.first_step = step + 1
                membership.phase = Phase.IN
            else:  # unknown: gone again meanwhile, and the next poll will find so
                membership.admit(known.get(run, Peer(*run, "a newcomer")), step + 1)
            dealt.append(known.get(run, Peer(*run, "a newcomer")))
        if notes and all(note is not None and note.wants_switch for note in notes):
            self._replica.switch()
            membership.wants_switch = False
            _LOG.info("owners from step %d on: %s", step + 1, self._replica.has_slow_links)
        self._replica.deal(dealt, step + 1)
        self._departure.remove_departed()
        if admitted and membership.phase is Phase.IN:
            self._router.announce(Phase.IN)  # a newcomer waits for this
        # A newcomer that begins again after it was named, or came in elsewhere, sends no update for its first step.
        again = [
            one
            for one, hello in membership.fitting().items()
            if run_of(one) in admitted
            and (hello.phase is Phase.JOINING or self._is_elsewhere(hello))
        ]
        if again and membership.phase is Phase.IN:
            self._departure.suspect(again, "joins again")

    def serve(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Between two steps, give snapshots to the newcomers that have asked."""
        if self._donor.is_idle:
            return
        membership, replica = self._membership, self._replica
        if membership.phase is Phase.IN and not self._departure.unsettled:
            positions = {**membership.positions, membership.me: replica.step}
            try:
                self._donor.serve(
                    positions, lambda: self._snapshot(positions, params, optimizer_state)
                )
            except (TypeError, ValueError) as error:
                _LOG.error("no snapshot for newcomers: %s", error)
                self._donor.refuse_all()
        self._donor.send_parts()

    def _snapshot(
        self, positions: dict[Peer, int], params: Any, optimizer_state: Sequence[Any]
    ) -> Snapshot:
        shared, exact = self._replica.export_state(params)
        return Snapshot(
            self._replica.step,
            {run_of(peer): step for peer, step in positions.items()},
            {run_of(peer): step for peer, step in self._membership.finals.items()},
            copies([*shared, *writable_views(optimizer_state)]),
            len(shared),
            self._membership.origin,
            exact,
            self._replica.taken,
            {peer: self._membership.roles.get(peer, "member") for peer in self._replica.senders},
            self._replica.has_slow_links,
        )

    def _add_request(self, peer: Peer, number: int, payload: memoryview) -> None:
        self._donor.add_request(peer, number, decode_steps(payload))

    # ---- joining late ------------------------------------------------------------------------------------------------

    def ensure_member(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Become a member where training has begun: load a snapshot, follow the members, be admitted.

        Raises:
            TimeoutError: nothing happened for ``timeout_s``.
            Mismatch: the members train something else.
            RuntimeError: this exchange has left.
        """
        membership = self._membership
        if membership.phase is Phase.LEAVING:
            raise RuntimeError("this exchange has left")
        deadline_s = clock.now_s() + self._options.timeout_s
        while membership.phase is not self._destination:
            if membership.phase is Phase.JOINING:
                if not membership.fitting() and any(
                    membership.hellos[peer].phase is Phase.IN for peer in membership.mismatched
                ):
                    raise Mismatch(membership.mismatches())
                self._join_with_snapshot(params, optimizer_state)
            self.poll(clock.POLL_S)
            while self._options.is_sync and membership.is_ready_for(self._replica.step):
                self._follow_step(params)
                deadline_s = clock.now_s() + self._options.timeout_s
            if clock.now_s() >= deadline_s:
                raise TimeoutError(
                    f"this node did not come in within {self._options.timeout_s:g} s, "
                    f"from {len(membership.fitting(Phase.IN))} members that it sees"
                )

    @property
    def _destination(self) -> Phase:
        return Phase.READY if self._options.role == "observer" else Phase.IN

    def observe(self, params: Any, optimizer_state: Sequence[Any], timeout_s: float) -> int:
        """Apply the members' updates without being one; see ``Exchange.follow``."""
        membership, deadline_s, count = self._membership, clock.now_s() + timeout_s, 0
        while True:
            if membership.phase is not Phase.READY and membership.fitting(Phase.IN):
                self.ensure_member(params, optimizer_state)
            self.poll(max(0.0, min(clock.POLL_S, deadline_s - clock.now_s())))
            while self._options.is_sync and membership.is_ready_for(self._replica.step):
                self._follow_step(params)
                count += 1
            if not self._options.is_sync and membership.phase is Phase.READY:
                arrived = [messages for _, messages in membership.take_updates()]
                self._departure.remove_departed()
                if arrived:
                    self._replica.apply(arrived, params, nodes=max(len(membership.peers), 1))
                count += len(arrived)
            if count or clock.now_s() >= deadline_s:
                return count

    def _follow_step(self, params: Any) -> None:
        """Apply a step of the members, without an update of this node's own."""
        taken = self._membership.take_updates(self._replica.step)
        taken.sort(key=itemgetter(0))
        payloads = [messages for _, messages in taken]
        self._replica.apply(payloads, params, nodes=len(payloads))
        self.finish_step([peer for peer, _ in taken])
        self._replica.step += 1
        self._on_follow(params)

    def _join_with_snapshot(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Ask for a snapshot, or load the one that has arrived."""
        snapshot, members = self._incoming, self._membership.fitting(Phase.IN)
        if self._asked is None or self._asked[0] not in members:
            self._ask(members)
        elif snapshot is not None and not snapshot.missing:
            self._asked = None
            if not self._options.is_sync:
                # Later than any update with which this node may have gone.
                snapshot.step = max(snapshot.step, self._replica.step + 1) + 1
            self._check_fits(snapshot, params, optimizer_state)
            if self._follow(snapshot):
                # Local changes, and own updates that nobody applied, stay in the residual.
                self._replica.absorb_local_changes(params)
                finals = {Peer(*run, "unknown"): at for run, at in snapshot.finals.items()}
                self._replica.take_back_unapplied(finals, snapshot.taken, snapshot.step)
                self._load(snapshot, params, optimizer_state)

    def _ask(self, members: Mapping[Peer, Hello]) -> None:
        """Ask a member for a snapshot, another one each time, if all members that it names are connected."""
        me = self._membership.me
        here = {run_of(peer) for peer in (me, *members)}
        able = sorted(peer for peer, hello in members.items() if here >= set(hello.members))
        firsts = {run_of(peer): self._membership.first_of(peer) for peer in members}
        fresh: dict[NodeRun, int] = {run: at for run, at in firsts.items() if at is not None}
        if not able or len(fresh) < len(members):
            return
        self._requests += 1
        donor = able[(me.id + self._requests) % len(able)]
        self._asked, self._incoming = (donor, self._requests), None
        self._membership.reported.clear()
        self._router.send(Kind.REQUEST, self._requests, encode_steps(fresh), to=donor)

    def _add_part(self, peer: Peer, number: int, payload: memoryview) -> None:
        if self._asked != (peer, number):
            return
        if self._incoming is None:
            self._incoming = Snapshot.from_header(payload)
        else:
            self._incoming.add_part(payload)

    def _check_fits(self, snapshot: Snapshot, params: Any, optimizer_state: Sequence[Any]) -> None:
        own = self._replica.state_layout(params, is_exact=snapshot.exact is not None)
        theirs = described(snapshot.arrays)
        own_state = described(writable_views(optimizer_state))
        if own != theirs[: snapshot.params] or own_state != theirs[snapshot.params :]:
            raise Mismatch(
                f"this node ({self._membership.me.address}) has parameters {own} and an optimiser's state {own_state}, "
                f"the members have {theirs[: snapshot.params]} and {theirs[snapshot.params :]}"
            )

    def _follow(self, snapshot: Snapshot) -> bool:
        """Adopt the members of a snapshot; return False if not all their later updates arrive here."""
        membership = self._membership
        known = by_run(membership.others)
        gone = set(map(run_of, membership.reported))
        if not snapshot.positions.keys() <= known.keys() or not gone.isdisjoint(snapshot.positions):
            return False
        positions = {known[run]: at for run, at in snapshot.positions.items()}
        if not self._options.is_sync:
            # Nodes that joined after the donor took the snapshot, and of which it did not know.
            for peer, hello in membership.fitting(Phase.IN).items():
                is_stale = hello.first <= snapshot.finals.get(run_of(peer), -1)
                if not is_stale and not snapshot.positions.keys().isdisjoint(hello.members):
                    positions.setdefault(peer, hello.first)
        firsts = [(membership.first_of(peer), at) for peer, at in positions.items()]
        if any(first is None or first > at for first, at in firsts):
            return False
        membership.origin = snapshot.origin
        finals = {Peer(*run, "unknown"): at for run, at in snapshot.finals.items()}
        membership.follow_snapshot(positions, finals, snapshot.step)
        if self._options.is_sync or self._options.role == "observer":
            self._router.announce(Phase.READY)
        else:
            membership.first_step = snapshot.step
            self._router.announce(Phase.IN)
        return True

    def _load(self, snapshot: Snapshot, params: Any, optimizer_state: Sequence[Any]) -> None:
        self._replica.import_state(snapshot.arrays[: snapshot.params], snapshot.exact, params)
        put(writable_views(optimizer_state), snapshot.arrays[snapshot.params :])
        self._replica.step = snapshot.step
        self._membership.roles.update(snapshot.senders)
        self._replica.has_slow_links = snapshot.has_slow_links
        self._replica.deal(snapshot.senders, snapshot.step)
        self._on_load()


def _named_by_all(notes: list[Note | None]) -> set[NodeRun]:
    """Return the newcomers that every note names."""
    named = [set(note.admits) if note is not None else set() for note in notes]
    return set.intersection(*named) if named else set()
