"""Sends each record once for several peers: the pacing and the accounting that a tree and a multicast group share.

A carrier is only the first transmission. Every member's `Outbound` takes the record for sent now, so what a member
misses is found and sent again, to it alone, exactly as without a carrier.
"""

from __future__ import annotations

import math
from typing import Final

from .outbound import Outbound
from .records import Burst, Record, SendLog
from .recovery import GainCycle

NEVER_S: Final = float("inf")
JOIN_RECORDS: Final = 8  # so far behind a newcomer may be: the others wait while it catches up
STALL_S: Final = 0.25
STALL_ROUND_TRIPS: Final = 4.0
STALLED_TIMEOUTS: Final = 2
HELD_S: Final = 0.5  # of the last second, about: who holds up the others for longer is served alone
HELD_MEMORY_S: Final = 1.0


class Carrier:
    """One way on which the same bytes reach several peers.

    Attributes:
        cursor: number of the record that goes out next.
        members: by session index.
        wake_at_s: when `next_burst` may have something, unless news come before.
    """

    def __init__(self, log: SendLog) -> None:
        self._log = log
        self.cursor = 0
        self.members: dict[int, Outbound] = {}
        self.wake_at_s = NEVER_S
        self._indices: frozenset[int] = frozenset()
        self._unsent = 0
        self._cycle = GainCycle()
        self._blockers: list[int] = []
        self._is_resting = False
        self._looked_at_s = NEVER_S
        self._stalled_since_s = NEVER_S
        self._held_s: dict[int, float] = {}
        self._decayed_at_s = 0.0

    # ---- who is served ------------------------------------------------------------------------------------------

    def start_at(self, number: int) -> None:
        """Begin with this record; there must be no members."""
        self.cursor, self._unsent = number, 0

    def may_admit(self, outbound: Outbound, first_record: int) -> bool:
        """Whether this peer is far enough to be served together with the others, and what comes is for it."""
        return (
            self.cursor >= first_record
            and not self._unsent
            and self.cursor - JOIN_RECORDS <= outbound.cursor <= self.cursor
        )

    def admit(self, index: int, outbound: Outbound) -> None:
        """Serve this peer from now on; `may_admit` has to allow it."""
        outbound.gate = self.cursor
        outbound.rate.cycle = self._cycle
        self.members[index] = outbound
        self._held_s[index] = 0.0
        self._note_members()

    def dismiss(self, index: int) -> None:
        """Let this peer be served alone again."""
        outbound = self.members.pop(index)
        outbound.leave_carrier(self.cursor, self._unsent)
        outbound.rate.cycle = GainCycle()
        del self._held_s[index]
        self._note_members()

    def restart_at(self, number: int) -> None:
        """Go on with this record: what was before it is cut anew."""
        self.cursor, self._unsent = number, 0
        for outbound in self.members.values():
            outbound.gate = number
        self._blockers.clear()

    def _note_members(self) -> None:
        self._indices = frozenset(self.members)
        self._blockers.clear()
        self._is_resting = False

    # ---- sending ------------------------------------------------------------------------------------------------

    def next_burst(self, now_s: float) -> Burst | None:
        """Return what to send to all members now; None when nothing may or need be sent."""
        record = self._next_record()
        if record is None:
            self._rest()
            return None
        self._is_resting = False
        self._account_for_waiting(now_s)
        if self._is_blocked(record, now_s):
            return None
        self._stalled_since_s = NEVER_S
        self.wake_at_s = now_s
        mask = self._unsent or record.full
        burst_bytes = min(outbound.rate.burst_bytes for outbound in self.members.values())
        if burst_bytes < record.nbytes:
            mask = record.part_of(mask, burst_bytes)
        for outbound in self.members.values():
            outbound.carry(record, mask, now_s)
        self._unsent = (self._unsent or record.full) & ~mask
        if not self._unsent:
            self.cursor += record.span
        return record.burst(mask)

    def _next_record(self) -> Record | None:
        """Return the next record that is for all members; each is told by itself of those that are not."""
        if not self.members:
            return None
        moved = False
        record: Record | None = None
        while self.cursor < self._log.head:
            record = self._log.get(self.cursor)
            if record is not None and self._is_for_all(record):
                break
            self.cursor, self._unsent = self.cursor + 1, 0
            moved = True
            record = None
        if moved:
            for outbound in self.members.values():
                outbound.gate = self.cursor
        return record

    def _is_for_all(self, record: Record) -> bool:
        return record.message.is_shared and self._indices <= record.message.recipients

    def _rest(self) -> None:
        """Nothing is left to send, which no member's rate is to blame for."""
        self.wake_at_s = NEVER_S
        if self._is_resting:
            return
        self._is_resting = True
        self._looked_at_s = self._stalled_since_s = NEVER_S
        self._blockers.clear()
        for outbound in self.members.values():
            outbound.rate.on_app_limited()

    def _is_blocked(self, record: Record, now_s: float) -> bool:
        """Whether some member's window, pace or credit does not allow the record yet."""
        blocked = self._look_at(self._blockers, record, now_s)
        if not blocked:
            blocked = self._look_at(list(self.members), record, now_s)
        self._blockers = list(blocked)
        if not blocked:
            return False
        self._stalled_since_s = min(self._stalled_since_s, now_s)
        self.wake_at_s = max(blocked.values())
        return True

    def _look_at(self, indices: list[int], record: Record, now_s: float) -> dict[int, float]:
        """Return which of the members block the record, and until when; infinite if only news can tell."""
        blocked: dict[int, float] = {}
        ready: list[Outbound] = []
        for index in indices:
            outbound = self.members[index]
            at_s = outbound.carry_at_s(record)
            if at_s is None:
                blocked[index] = NEVER_S
            elif at_s > now_s:
                blocked[index] = at_s
            else:
                ready.append(outbound)
        if blocked:
            # These could have sent: what their rates are measured at is only a lower bound.
            for outbound in ready:
                outbound.rate.on_app_limited()
        return blocked

    # ---- who holds up the others --------------------------------------------------------------------------------

    def _account_for_waiting(self, now_s: float) -> None:
        if self._are_few(self._blockers) and self._looked_at_s < now_s:
            for index in self._blockers:
                self._held_s[index] += now_s - self._looked_at_s
        self._looked_at_s = now_s

    def _are_few(self, indices: list[int]) -> bool:
        count = len(self.members)
        return 0 < len(indices) < count and len(indices) <= max(1, count // 4)

    def laggards(self, now_s: float) -> set[int]:
        """Return the members that the others should not wait for any longer."""
        slowest_s = max((each.round_trip_s for each in self.members.values()), default=0.0)
        self._cycle.floor_s = slowest_s
        is_stalled = now_s - self._stalled_since_s > STALL_S + STALL_ROUND_TRIPS * slowest_s
        result = {index for index, held_s in self._held_s.items() if held_s > HELD_S}
        for index in self._blockers:
            is_silent = self.members[index].timeouts >= STALLED_TIMEOUTS
            if is_silent or (is_stalled and self._are_few(self._blockers)):
                result.add(index)
        decay = math.exp(min(0.0, self._decayed_at_s - now_s) / HELD_MEMORY_S)
        self._decayed_at_s = now_s
        for index in self._held_s:
            self._held_s[index] *= decay
        return result
