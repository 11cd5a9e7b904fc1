"""Coming in where training has begun, and giving others what they need to come in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Mismatch
from . import clock
from .comparison import Comparison
from .control import Hello, Kind, Phase, Request, place_of
from .optimizer_state import average_optimizer
from .parts import Parts
from .snapshot import Donor, Incoming, Snapshot
from .views import copies, kinds, put, writable_views

if TYPE_CHECKING:
    from ..transport import Peer

__all__ = ["Entrance"]

_LOG = logging.getLogger(__name__)


class Entrance:
    """The way in of one node, and the other side of it for those who come later."""

    def __init__(self, parts: Parts, comparison: Comparison) -> None:
        self._node, self._options, self._groups = parts.node, parts.options, parts.groups
        self._roster, self._members = parts.roster, parts.members
        self._replica, self._progress = parts.replica, parts.progress
        self._comparison = comparison
        self._donor = Donor(parts.node)
        self._incoming: Incoming | None = None
        self._requests = 0
        parts.members.on_control = self._take_control
        parts.members.on_gone = self._forget_donor

    def come_in(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Become a member where training has begun: take a snapshot, catch up, be admitted."""
        if self._roster.phase is Phase.LEAVING:
            raise RuntimeError("this exchange has left")
        deadline_s = clock.now_s() + self._options.timeout_s
        while self._roster.phase is not Phase.IN:
            if self._roster.phase is Phase.JOINING:
                self._members.greetings.check_somebody_fits()
                self._take_snapshot(params, optimizer_state)
            self.pump()
            self._members.poll(clock.POLL_S, self._progress.step)
            while self._roster.is_ready_for(self._progress.step):
                self._follow_step(params, optimizer_state)
                deadline_s = clock.now_s() + self._options.timeout_s
            if clock.now_s() >= deadline_s:
                raise TimeoutError(
                    f"this node did not come in within {self._options.timeout_s:g} s, "
                    f"from {len(self._members.greetings.fitting(Phase.IN))} members that it sees"
                )

    def _follow_step(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Do a step of the members' as they do, without an update of this node's own."""
        taken = sorted(self._roster.take_step(self._progress.step), key=lambda one: one[0])
        payloads = [messages for _, messages in taken]
        if self._options.average_optimizer:
            average_optimizer(payloads, len(self._groups), optimizer_state)
        self._replica.apply(payloads, params, self._options.scale_for(len(payloads)))
        self._members.finish_step(self._progress.step, [peer for peer, _ in taken])
        self._progress.step += 1
        self._comparison.hear_and_compute(params)

    def _take_snapshot(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Ask for a snapshot; load the one that is here."""
        incoming = self._incoming
        members = self._members.greetings.fitting(Phase.IN)
        if incoming is None or incoming.donor not in members:
            self._ask(members)
        elif incoming.is_complete and incoming.snapshot is not None:
            self._incoming = None
            snapshot = incoming.snapshot
            own = snapshot.finals.get(place_of(self._node.peer))
            if not self._options.is_sync:
                snapshot.step = max(snapshot.step, self._progress.step) + 1
            self._check_fits(snapshot, params, optimizer_state)
            if self._members.follow(snapshot):
                pending = self._progress.own
                self._replica.fold(params, None if pending is None else pending.messages)
                self._put_back_unapplied(own)
                self._load(snapshot, params, optimizer_state)

    def _ask(self, members: Mapping[Peer, Hello]) -> None:
        """Ask a member for a snapshot, another one each time, when this node gets the updates of all it names."""
        here = {place_of(peer) for peer in members} | {place_of(self._node.peer)}
        able = sorted(peer for peer, hello in members.items() if here >= set(hello.members))
        if not able:
            return
        self._requests += 1
        donor = able[(self._node.peer.id + self._requests) % len(able)]
        firsts = {place_of(peer): self._roster.first_of(peer) for peer in members}
        fresh = {place: first for place, first in firsts.items() if first is not None}
        self._incoming = Incoming(self._requests, donor)
        self._members.outbox.send(Kind.REQUEST, self._requests, Request(fresh).encode(), to=donor)

    def _forget_donor(self, peer: Peer) -> None:
        """A connection ended: a snapshot from there will not be whole."""
        if self._incoming is not None and self._incoming.donor == peer:
            self._incoming = None

    def _take_control(self, peer: Peer, kind: int, number: int, payload: memoryview) -> None:
        """Take what is neither an update nor about membership."""
        if kind == Kind.REQUEST:
            self._donor.ask(peer, number, Request.decode(payload))
        elif kind == Kind.SNAPSHOT:
            incoming = self._incoming
            if incoming is not None and (incoming.donor, incoming.number) == (peer, number):
                incoming.add(payload)

    def serve(self, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Between two steps: give snapshots to those who have asked."""
        if self._donor.is_idle:
            return
        if self._roster.phase is Phase.IN and not self._roster.agreement.unsettled:
            positions = {**self._roster.positions, self._node.peer: self._progress.step}
            try:
                self._donor.serve(
                    positions, lambda: self._snapshot(positions, params, optimizer_state)
                )
            except (TypeError, ValueError) as error:
                _LOG.error("no snapshot for those who want to come in: %s", error)
                self._donor.refuse()
        self.pump()

    def pump(self) -> None:
        """Send what there is room for of the snapshots on their way."""
        self._donor.pump()

    def _snapshot(
        self, positions: dict[Peer, int], params: Any, optimizer_state: Sequence[Any]
    ) -> Snapshot:
        shared, exact = self._replica.give(params)
        return Snapshot(
            self._progress.step,
            {place_of(peer): step for peer, step in positions.items()},
            {place_of(peer): step for peer, step in self._roster.agreement.finals.items()},
            copies([*shared, *writable_views(optimizer_state)]),
            len(shared),
            self._roster.origin,
            exact,
        )

    def _check_fits(self, snapshot: Snapshot, params: Any, optimizer_state: Sequence[Any]) -> None:
        own = self._replica.given(params, is_exact=snapshot.exact is not None)
        theirs = kinds(snapshot.arrays)
        own_state = kinds(writable_views(optimizer_state))
        if own != theirs[: snapshot.params] or own_state != theirs[snapshot.params :]:
            raise Mismatch(
                f"this node ({self._node.peer.address}) has parameters {own} and an optimiser's state {own_state}, "
                f"the members have {theirs[: snapshot.params]} and {theirs[snapshot.params :]}"
            )

    def _load(self, snapshot: Snapshot, params: Any, optimizer_state: Sequence[Any]) -> None:
        """Put a snapshot in the place of what this node has."""
        self._replica.take(snapshot.arrays[: snapshot.params], snapshot.exact, params)
        put(writable_views(optimizer_state), snapshot.arrays[snapshot.params :])
        self._comparison.forget()
        self._progress.step = snapshot.step

    def _put_back_unapplied(self, final: int | None) -> None:
        """Return those of this node's updates that nobody applied to the residual.

        Args:
            final: number of the first of them; None: this node was no member before.
        """
        pending = [self._progress.own] if self._progress.own is not None else []
        self._progress.own = None
        for own in [*self._progress.sent, *pending]:
            if final is None or own.step >= final:
                self._groups.put_back(own.messages)
        self._progress.sent.clear()
