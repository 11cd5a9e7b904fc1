"""How the members that are left agree which updates of those that are gone everybody applies.

A member that dies may have reached some of the others with its last updates and not the rest. Each of those left
reports what it has got; the most that one has is what all will have, and one that has it passes it on. A report names
all members that its sender takes for gone, and the sender takes nothing more from those. If another one dies meanwhile,
everybody reports anew, and only reports that know of all that are gone count: so what one passed on before it died is
either reported by somebody or has reached nobody.

Sans-IO: reports come in and go out as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..transport import Peer

__all__ = ["Agreement"]


class Agreement:
    """What one node knows of the members that are gone.

    Attributes:
        held: for every member that is gone, the number of the first update of it that this node has not got.
        finals: for those that are agreed upon, the number of the first update that nobody applies.
    """

    def __init__(self) -> None:
        self.held: dict[Peer, int] = {}
        self.finals: dict[Peer, int] = {}
        self._asked: set[Peer] = set()
        self._reports: dict[Peer, dict[Peer, int]] = {}
        self._relayed: set[tuple[Peer, int, int, frozenset[Peer]]] = set()

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.held

    @property
    def unsettled(self) -> set[Peer]:
        """Those of whom it is not agreed what everybody applies, or of whom something is still to come."""
        return {
            peer
            for peer, held in self.held.items()
            if peer not in self.finals or held < self.finals[peer]
        }

    def suspect(self, peer: Peer, held: int) -> None:
        """Take a member for gone, of which this node has everything before update ``held``."""
        self.held[peer] = held
        self._asked.add(peer)

    def take_report(self, reporter: Peer, report: Mapping[Peer, int]) -> bool:
        """Take a report; return whether it asks for peers that this node's own last report did not name."""
        self._reports[reporter] = dict(report)
        news = set(report) - self._asked
        self._asked |= news
        return bool(news)

    def report(self) -> dict[Peer, int]:
        """Return this node's report; of peers that it never knew it has nothing."""
        return {peer: self.held.get(peer, 0) for peer in self._asked}

    def settle(self, survivors: Iterable[Peer], *, votes: bool) -> bool:
        """Decide what can be decided; return whether anything was.

        Args:
            survivors: the other members that are not gone.
            votes: whether this node is a member itself, so that what it holds counts.
        """
        open_ = self.unsettled
        reports = [self._reports.get(peer, {}) for peer in survivors]
        if not open_ or not all(open_ <= set(report) for report in reports):
            return False
        if votes:
            reports.append(self.report())
        before = dict(self.finals)
        for peer in open_:
            self.finals[peer] = max((report[peer] for report in reports), default=self.held[peer])
        return self.finals != before

    def relays(self, me: Peer, survivors: Iterable[Peer]) -> list[tuple[Peer, int, int]]:
        """Return what this node has to pass on now: (member that is gone, first update, one after the last)."""
        due = []
        voters = frozenset(survivors)
        for peer, final in self.finals.items():
            named = [one for one in voters if peer in self._reports.get(one, {})]
            lacking = [
                self._reports[one][peer] for one in named if self._reports[one][peer] < final
            ]
            holders = [one for one in named if self._reports[one][peer] >= final]
            if not lacking or self.held.get(peer, 0) < final or any(one < me for one in holders):
                continue
            key = (peer, min(lacking), final, voters)
            if key not in self._relayed:
                self._relayed.add(key)
                due.append((peer, min(lacking), final))
        return due

    @property
    def lacks_something(self) -> bool:
        """Whether this node has not got everything that was agreed upon."""
        return any(self.held[peer] < final for peer, final in self.finals.items())

    def readmit(self, peer: Peer) -> None:
        """Forget that a node was gone: it has begun anew."""
        self.held.pop(peer, None)
        self.finals.pop(peer, None)
        self._asked.discard(peer)

    def begin_anew(self) -> None:
        """Forget everything but what the others have reported."""
        self.held.clear()
        self.finals.clear()
        self._asked.clear()
        self._relayed.clear()
