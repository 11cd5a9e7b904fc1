"""Departures: which members are gone, and which of their last updates everybody applies.

A member that dies may have reached only some of the others with its last updates. Each remaining member reports how
many of the updates it has; everybody applies as many as the member with the most, and one member that has them relays
them. A report names all members that its sender considers gone, and the sender accepts no more messages from those. If
another member dies meanwhile, all report anew, and only reports that name all departed members count: an update that
the second dead member relayed is then either in a report or has reached nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..errors import Mismatch
from ..transport import Peer
from .membership import Membership, Router, by_run
from .protocol import (
    TAG_NUMBERS,
    Kind,
    Note,
    Phase,
    decode_steps,
    encode_steps,
    pack_relay,
    run_of,
    unpack_relay,
)

__all__ = ["Departure"]

_LOG = logging.getLogger(__name__)


class Departure:
    """Reports departed members, agrees with the others on their last updates, and removes them."""

    def __init__(self, membership: Membership, router: Router, *, is_sync: bool) -> None:
        self._membership = membership
        self._router = router
        self._is_sync = is_sync
        self._reports: dict[Peer, dict[Peer, int]] = {}
        self._relayed: set[tuple[Peer, int, int, frozenset[Peer]]] = set()
        router.handlers[Kind.REPORT] = self._add_report
        router.handlers[Kind.RELAY] = self._add_relayed

    @property
    def unsettled(self) -> set[Peer]:
        """The departed members without an agreement on their last update, or with updates still to arrive."""
        finals = self._membership.finals
        return {
            peer
            for peer, held in self._membership.departing.items()
            if peer not in finals or held < finals[peer]
        }

    def suspect(self, peers: Iterable[Peer], why: str) -> None:
        """Consider members gone: begin to agree with the others on their last updates.

        If not all members know this node, it joins again: it may have applied an update that they do not apply.
        """
        membership, gone = self._membership, sorted(peers)
        is_new = not self._is_sync and not membership.unaware <= set(gone)
        if membership.phase is Phase.READY or is_new:
            self.rejoin(f"{', '.join(map(membership.name_of, gone))} {why}")
            return
        for peer in gone:
            name = membership.name_of(peer)
            _LOG.warning("step %d: %s %s", membership.next_step, name, why)
            membership.departing[peer] = membership.members[peer].held
            membership.reported.add(peer)
        self.report()
        self._settle_departures()

    def handle_lost(self, lost: set[Peer], step: int) -> None:
        """Suspect members whose connection ended."""
        membership = self._membership
        # A member that has sent its update of ``step`` is not missed before the next, unless there is more to agree on.
        can_wait = self._is_sync and membership.phase is Phase.IN and not self.unsettled
        gone = [
            peer
            for peer in sorted(lost)
            if peer not in membership.departing
            and not (can_wait and step in membership.members[peer])
        ]
        if gone and membership.phase in (Phase.IN, Phase.READY):
            self.suspect(gone, "is lost")

    def suspect_mismatched(self) -> None:
        """Continue without members whose arrays turn out to be different, which they announced after the start.

        Raises:
            Mismatch: no other member's arrays fit.
        """
        membership = self._membership
        mismatched = [peer for peer in membership.peers if peer in membership.mismatched]
        if not mismatched or membership.phase is not Phase.IN:
            return
        if len(mismatched) == len(membership.peers):
            raise Mismatch(membership.mismatches())
        self.suspect(mismatched, "has other arrays")

    def rejoin(self, why: str) -> None:
        """Stop being a member, and join again with a snapshot."""
        _LOG.warning("%s: this node joins again", why)
        self._membership.forget_members()
        self._relayed.clear()
        self._router.announce(Phase.JOINING)

    def remove_departed(self) -> None:
        """Remove departed members once all their updates have been applied."""
        membership = self._membership
        gone = [
            peer
            for peer, stream in membership.members.items()
            if peer in membership.finals and stream.position >= membership.finals[peer]
        ]
        for peer in gone:
            membership.remove_member(peer)
        if gone:
            count = len(membership.members) + 1
            _LOG.warning("%s: %d nodes go on", membership.departed(gone), count)
        for peer in gone if not self._is_sync else ():
            # It may have come in again before the others agreed that it had gone.
            hello = membership.fitting(Phase.IN).get(peer)
            if hello and peer in membership.others and not self.has_gone(peer, hello.first):
                membership.admit(peer, hello.first)
        if gone and membership.phase is Phase.IN:
            self._router.announce(Phase.IN)

    def has_gone(self, peer: Peer, first: int) -> bool:
        """Return whether a node that came in with its update ``first`` is reported as gone since."""
        reports = [*self._reports.values(), self._membership.finals]
        return any(report.get(peer, -1) >= first for report in reports)

    def report(self, to: Peer | None = None) -> None:
        """Tell all members, or one, which members are gone and how many of their updates this node has."""
        if self._membership.phase is Phase.IN:
            held = {run_of(peer): at for peer, at in self._own_report().items()}
            self._router.send(Kind.REPORT, 0, encode_steps(held), to)

    def _own_report(self) -> dict[Peer, int]:
        """Return the first missing update of every member that is gone, and of unknown nodes as others report it.

        A member that only departed nodes report as gone is left out: its updates are still accepted here.
        """
        membership, reports = self._membership, self._reports.values()
        unknown = membership.reported - membership.members.keys()
        said = {peer: max((one.get(peer, 0) for one in reports), default=0) for peer in unknown}
        return said | membership.departing

    def _add_report(self, reporter: Peer, _: int, payload: memoryview) -> None:
        membership, found = self._membership, decode_steps(payload)
        known = by_run([*membership.members, *membership.past, *membership.departing])
        named = {
            known.get(run, Peer(*run, "unknown")): held
            for run, held in found.items()
            if run != membership.run
        }
        self._reports[reporter] = named
        has_news = not named.keys() <= membership.reported
        membership.reported |= named.keys()
        own = found.get(membership.run)
        if reporter not in membership.members:
            self._refuse(reporter)
        elif reporter in membership.departing:
            pass
        elif membership.phase is Phase.IN and own is not None and own >= membership.first_step:
            self.rejoin("the others have gone on without this node")
        else:
            gone = [
                peer
                for peer, held in named.items()
                if peer in membership.members
                and peer not in membership.departing
                and held >= (membership.members[peer].first or 0)
            ]
            if gone:
                self.suspect(gone, f"is gone, says {reporter.address}")
            elif has_news:
                self.report()
        self._settle_departures()

    def _refuse(self, peer: Peer) -> None:
        """Tell a node that takes this one for a member, and would wait for its reports, that it is none here."""
        hello = self._membership.fitting(Phase.IN).get(peer)
        if self._membership.phase is Phase.IN and hello and self._membership.run in hello.members:
            self._router.send(Kind.REPORT, 0, encode_steps({run_of(peer): hello.first}), to=peer)

    def _settle_departures(self) -> None:
        """Agree where all reports are in, relay missing updates, and remove members with nothing left to apply."""
        if not self._membership.departing:
            return
        self._agree()
        if self._membership.phase is Phase.IN:
            self._relay()
        self.remove_departed()

    def _agree(self) -> None:
        """Decide on the last updates of departed members."""
        membership, unsettled = self._membership, self.unsettled
        reports = [self._reports.get(peer, {}) for peer in membership.peers]
        # A member may have gone before, and come in again: earlier reports are about that.
        begun = {peer: self._is_sync and membership.members[peer].begun for peer in unsettled}
        if any(report.get(peer, -1) < at for report in reports for peer, at in begun.items()):
            return
        for peer in unsettled:
            held = [report[peer] for report in reports]
            membership.finals[peer] = max([membership.departing[peer], *held])

    def _relay(self) -> None:
        """Relay updates of departed members that others lack, if this node is the first that has them."""
        membership = self._membership
        voters = frozenset(membership.peers)
        for peer, final in membership.finals.items():
            held = {
                one: self._reports[one][peer]
                for one in voters
                if peer in self._reports.get(one, {})
            }
            lacking = [at for at in held.values() if at < final]
            has_holder_before = any(at >= final and one < membership.me for one, at in held.items())
            if not lacking or membership.departing.get(peer, 0) < final or has_holder_before:
                continue
            key = (peer, min(lacking), final, voters)
            stream = membership.members.get(peer) or membership.past.get(peer)
            if key in self._relayed or stream is None:
                continue
            self._relayed.add(key)
            for tag, payload in stream.raw(min(lacking), final):
                self._router.send(Kind.RELAY, 0, pack_relay(run_of(peer), tag, payload))

    def _add_relayed(self, relayer: Peer, _: int, payload: memoryview) -> None:
        membership = self._membership
        run, tag, relayed = unpack_relay(payload)
        peer = by_run(membership.members).get(run)
        if relayer in membership.departing or peer is None or peer not in membership.departing:
            return
        stream, (kind, step) = membership.members[peer], divmod(tag, TAG_NUMBERS)
        if step != stream.held:
            return
        if kind == Kind.NOTE:
            stream.add_note(step, Note.decode(relayed), relayed)
        else:
            stream.add_relayed(self._router.parse(peer, step, relayed), relayed)
            membership.departing[peer] = stream.held
            self._settle_departures()
