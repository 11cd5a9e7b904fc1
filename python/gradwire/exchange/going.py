"""How members go: who is gone, what everybody applies of it, and who passes on what others miss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ..errors import Mismatch
from ..transport import Peer
from .control import Kind, Note, Phase, Place, Report, pack_relay, place_of, split_tag
from .greetings import Greetings
from .outbox import Outbox
from .roster import Roster, by_place

__all__ = ["Going"]

_LOG = logging.getLogger(__name__)


class Going:
    """Reports what this node has of members that are gone, and lets them go when everything of them is applied.

    Args:
        come_in_again: called with the reason where this node is the one that was left behind.
        is_sync: whether the members go step by step together.
    """

    def __init__(
        self,
        roster: Roster,
        greetings: Greetings,
        outbox: Outbox,
        come_in_again: Callable[[str], None],
        *,
        is_sync: bool,
    ) -> None:
        self._roster = roster
        self._greetings = greetings
        self._outbox = outbox
        self._come_in_again = come_in_again
        self._is_sync = is_sync

    def suspect(self, peers: Iterable[Peer], why: str) -> None:
        """Take members for gone: what everybody applies of them is now agreed with the others."""
        roster = self._roster
        for peer in sorted(peers):
            _LOG.warning("step %d: %s %s", roster.next_step, peer.address, why)
            roster.agreement.suspect(peer, roster.members[peer].held)
        self.report()
        self._settle()

    def refuse_misfits(self) -> None:
        """Go on without members whose arrays turn out to be others, which they said only after the beginning.

        Raises:
            Mismatch: nobody else's fit.
        """
        peers = self._roster.peers
        misfits = [peer for peer in peers if peer in self._greetings.misfits]
        if not misfits or self._roster.phase is not Phase.IN:
            return
        if len(misfits) == len(peers):
            raise Mismatch("; ".join(self._greetings.strangers()))
        self.suspect(misfits, "has other arrays")

    def look(self, connected: frozenset[Peer], step: int) -> None:
        """Notice which members are gone; who has sent its update of ``step`` may be."""
        roster = self._roster
        if not roster.broken and connected >= roster.members.keys():
            return
        # It shows in the next step that it is gone. Unless something is to be agreed on.
        is_patient = self._is_sync and not roster.agreement.unsettled
        gone = [
            peer
            for peer in roster.members
            if peer not in roster.agreement
            and (peer not in connected or peer in roster.broken)
            and not (is_patient and step in roster.members[peer])
        ]
        if gone and roster.phase is Phase.IN:
            self.suspect(gone, "is lost")
        elif gone and roster.phase is Phase.READY:
            self._come_in_again(f"the connection to {gone[0].address} is lost")

    # ---- reports -----------------------------------------------------------------------------------------------------

    def report(self, to: Peer | None = None) -> None:
        """Tell all members, or one, what this node has of those that are gone."""
        if self._roster.phase is Phase.IN:
            report = self._roster.agreement.report()
            held = {place_of(peer): held for peer, held in report.items()}
            self._outbox.send(Kind.REPORT, 0, Report(held).encode(), to)

    def take_report(self, reporter: Peer, report: Report) -> None:
        """Take another's."""
        roster, agreement = self._roster, self._roster.agreement
        known = by_place([*roster.members, *roster.past, *agreement.held])
        named = {
            known.get(place, Peer(*place, "unknown")): held
            for place, held in report.held.items()
            if place != roster.place
        }
        is_asked_for_more = agreement.take_report(reporter, named)
        is_told = reporter in roster.members and reporter not in agreement
        own = report.held.get(roster.place)
        if is_told and roster.phase is Phase.IN and own is not None and own >= roster.first_step:
            self._come_in_again("the others have gone on without this node")
        elif is_told:
            gone = [
                peer
                for peer, held in named.items()
                if peer in roster.members
                and peer not in agreement
                and held >= (roster.members[peer].first or 0)
            ]
            if gone:
                self.suspect(gone, f"is gone, says {reporter.address}")
            elif is_asked_for_more:
                self.report()
        self._settle()

    def _settle(self) -> None:
        """Agree on what can be agreed, pass on what others lack, let go whom nothing more is to come of."""
        roster, agreement = self._roster, self._roster.agreement
        if not agreement.held:
            return
        votes = roster.phase is Phase.IN
        agreement.settle(roster.peers, votes=votes)
        if votes:
            for peer, first, last in agreement.relays(roster.me, roster.peers):
                stream = roster.members.get(peer) or roster.past.get(peer)
                for tag, payload in stream.raw(first, last) if stream else ():
                    relayed = pack_relay(place_of(peer), tag, payload)
                    self._outbox.send(Kind.RELAY, 0, relayed)
        elif roster.phase is Phase.READY and agreement.lacks_something:
            self._come_in_again("a member went and left this node without its last update")
        self.let_go()

    # ---- the last updates --------------------------------------------------------------------------------------------

    def take_relay(self, place: Place, tag: int, payload: memoryview) -> None:
        """Take a message of a member that is gone, from one that had it."""
        roster = self._roster
        peer = by_place(roster.members).get(place)
        kind, step = split_tag(tag)
        if peer is None or peer not in roster.agreement:
            return
        stream = roster.members[peer]
        if step != stream.held:
            return
        if kind == Kind.NOTE:
            stream.add_note(step, Note.decode(payload), payload)
        else:
            stream.add_relayed(roster.parse(peer, step, payload), payload)
            roster.agreement.held[peer] = stream.held
            self._settle()

    def let_go(self) -> None:
        """Drop the members that are gone and of which everything is applied."""
        roster = self._roster
        finals = roster.agreement.finals
        if not finals:
            return
        gone = [
            peer
            for peer, stream in roster.members.items()
            if peer in finals and stream.position >= finals[peer]
        ]
        for peer in gone:
            roster.remove_member(peer)
        if gone:
            names = ", ".join(peer.address for peer in gone)
            _LOG.warning("without %s: %d nodes go on", names, len(roster.members) + 1)
            if roster.phase is Phase.IN:
                self._greetings.announce(Phase.IN)
