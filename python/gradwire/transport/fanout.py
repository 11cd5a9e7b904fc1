"""How records reach many peers with few transmissions: by a multicast group, or along a tree of relays.

Sessions stay between all pairs, with their keys, acknowledgements and credit. Only the first transmission of a record
may travel on a `Carrier`; what a peer misses is sent again to it alone. So a carrier that fails costs time and never a
message, and whoever fares badly on it is served alone for a while.

Sans-IO, like everything below the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from .beacon import Beacons, verify_beacon
from .carrier import Carrier
from .crypto import AuthenticationError, SenderKey
from .model import Address, Counters, Limits, Transmit
from .outbound import Outbound
from .records import Record, SendLog
from .relay import Forwarder, ForwardQueue, Tree
from .round_trips import RttEstimator
from .session import Session, State
from .wire import BEACON_BYTES, HEADER, Heard, Relay, Relaying, Share, Shared, WireError

logger = logging.getLogger(__name__)

NEVER_S: Final = float("inf")
REVIEW_S: Final = 0.1
BURSTS_PER_POLL: Final = 4
PENALTY_FIRST_S: Final = 1.0
PENALTY_MAX_S: Final = 60.0
FORGIVEN: Final = 10.0  # times its last penalty: who fared well for so long starts anew
UNFIT_S: Final = 60.0
ASK_FIRST_S: Final = 0.1
ASK_MAX_S: Final = 1.0
UNANSWERED_S: Final = 3.0
JUDGED_BURSTS: Final = 8
JUDGED_BYTES: Final = 400_000  # or so many small bursts as come next
JUDGED_BURSTS_SMALL: Final = 48
ACCOUNT_BYTES: Final = 4_000_000
BAD_LOSS: Final = 0.7  # more than a rate that is still being searched for loses by itself

UNICAST: Final = "unicast"
MULTICAST: Final = "multicast"
TREE: Final = "tree"


class Member:
    """One peer as a receiver, and as a relay.

    Attributes:
        way: how records reach it first.
        first_record: from here on everything that is for all is for it, too.
        is_sharing: whether it knows.
        source: the peer that forwards to it; None if it gets them from here.
        hears_group: whether it has answered a beacon.
        children: what it was last asked to forward to.
        reached: which of these it has confirmed to reach.
    """

    def __init__(self, session: Session, outbound: Outbound, first_record: int) -> None:
        self.first_record = first_record
        self.is_sharing = False
        self.share_at_s = 0.0
        self.session = session
        self.outbound = outbound
        self.way = UNICAST
        self.source: int | None = None
        self.hears_group = False
        self.first_beacon = 0
        self.alone_until_s = 0.0
        self.penalty_s = PENALTY_FIRST_S
        self.carried_since_s = 0.0
        self.children: tuple[int, ...] = ()
        self.reached: frozenset[int] = frozenset()
        self.generation = 0
        self.is_answered = True
        self.asked_at_s = 0.0
        self.ask_at_s = NEVER_S
        self.ask_s = ASK_FIRST_S
        self.unfit_until_s = 0.0
        self._bursts_mark = 0
        self._bytes_mark = 0
        self._lost_mark = 0

    @property
    def node(self) -> int:
        """Its id."""
        return self.session.identity.id

    def begin_account(self) -> None:
        """Count what is carried and what is lost from here on."""
        outbound = self.outbound
        self._bursts_mark = outbound.carried_bursts
        self._bytes_mark = outbound.carried_bytes
        self._lost_mark = outbound.lost_bytes

    def is_faring_badly(self) -> bool:
        """Whether so much of what was carried got lost that it had better be sent directly."""
        outbound = self.outbound
        bursts = outbound.carried_bursts - self._bursts_mark
        carried_bytes = outbound.carried_bytes - self._bytes_mark
        if bursts < JUDGED_BURSTS or (
            bursts < JUDGED_BURSTS_SMALL and carried_bytes < JUDGED_BYTES
        ):
            return False
        is_bad = outbound.lost_bytes - self._lost_mark > BAD_LOSS * carried_bytes
        if carried_bytes > ACCOUNT_BYTES:
            self.begin_account()
        return is_bad


class Fanout:
    """Decides for each peer how records reach it, and does what other nodes ask of a relay.

    Args:
        node_id: of this node.
        limits: how large a mesh may be, how wide a tree.
        log: the records.
        counters: of the node.
        stream: this node's stream.
        key: returns the sender key in use.
        group: multicast address, if there is one.

    Attributes:
        wake_at_s: when `poll` has something to do; infinite while no carrier is used.
        is_needed: whether what was published or has just come in may give `poll` something to do before that.
    """

    def __init__(
        self,
        node_id: int,
        limits: Limits,
        log: SendLog,
        counters: Counters,
        stream: int,
        key: Callable[[], SenderKey],
        group: Address | None,
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._stream = stream
        self._key = key
        self._log = log
        self._members: dict[int, Member] = {}
        self._streams: dict[int, Session] = {}
        self._tree = Tree(node_id, limits.relay_children_max)
        self._carriers = {MULTICAST: Carrier(log), TREE: Carrier(log)}
        self._beacons = Beacons(group) if group is not None else None
        self._queue = ForwardQueue(counters)
        self._forwarders: dict[int, Session] = {}
        self._review_at_s = NEVER_S
        self.wake_at_s = NEVER_S
        self.is_needed = False

    # ---- who is there -------------------------------------------------------------------------------------------

    def on_up(self, session: Session) -> None:
        """A peer is connected."""
        if session.outbound is None:
            return
        self._members[session.identity.id] = Member(session, session.outbound, self._log.head)
        if self._beacons is not None:
            self._beacons.restart()
        self._report_reach()
        self._review_soon()

    def on_down(self, session: Session) -> None:
        """A session is over."""
        if session.stream is not None and self._streams.get(session.stream) is session:
            del self._streams[session.stream]
        self._forwarders.pop(session.index, None)
        session.forwarder = None
        node = session.peer.id if session.peer is not None else None
        member = self._members.get(node) if node is not None else None
        if member is not None and member.session is session:
            self._serve_alone(member)
            del self._members[member.node]
            if member.node in self._tree:
                self._tree.remove(member.node)
            self._report_reach()
            self._review_soon()

    def on_stream(self, session: Session) -> None:
        """The number of a peer's stream is known; the first to name one owns it."""
        if session.stream is not None:
            self._streams.setdefault(session.stream, session)

    def session_of(self, stream: int) -> Session | None:
        """Return the session whose peer's records a relay may bring."""
        return self._streams.get(stream)

    def stop(self) -> None:
        """Serve everybody alone from now on."""
        for member in self._members.values():
            self._serve_alone(member)
        self._members.clear()
        self._tree.order.clear()

    def restart_at(self, number: int) -> None:
        """Everything not acknowledged comes again, cut anew, from this record on."""
        for carrier in self._carriers.values():
            carrier.restart_at(number)

    def way_to(self, node: int) -> str:
        """Return how records reach this peer first: "unicast", "multicast" or "tree"."""
        member = self._members.get(node)
        return UNICAST if member is None else member.way

    def _review_soon(self) -> None:
        self._review_at_s = self.wake_at_s = float("-inf")

    # ---- sending ------------------------------------------------------------------------------------------------

    def poll(self, now_s: float) -> list[Transmit]:
        """Return what is to be sent now: records for many, and what others want forwarded."""
        out: list[Transmit] = []
        if now_s >= self._review_at_s:
            self._review(now_s, out)
        self.wake_at_s = self._review_at_s
        for way, carrier in self._carriers.items():
            if carrier.members:
                self._poll_carrier(way, carrier, now_s, out)
        out.extend(self._queue.take())
        self.is_needed = any(carrier.members for carrier in self._carriers.values())
        return out

    def _poll_carrier(self, way: str, carrier: Carrier, now_s: float, out: list[Transmit]) -> None:
        targets = self._targets(way)
        sent = 0
        for _ in range(BURSTS_PER_POLL):
            burst = carrier.next_burst(now_s)
            if burst is None:
                break
            sent += burst.nbytes
            for address in targets:
                out.append(Transmit(address, burst.calls, burst.segment_bytes, burst.nbytes))
        if sent:
            for member in self._members.values():
                if member.way == way:
                    member.session.note_carried()
            if way == MULTICAST:
                self._counters.multicast_bytes_sent += sent
        self.wake_at_s = min(self.wake_at_s, carrier.wake_at_s)

    def _targets(self, way: str) -> list[Address]:
        if way == MULTICAST and self._beacons is not None:
            return [self._beacons.group]
        return [
            member.session.address
            for member in self._members.values()
            if member.way == TREE and member.source is None
        ]

    # ---- who is served how --------------------------------------------------------------------------------------

    def _review(self, now_s: float, out: list[Transmit]) -> None:
        """Drop from the carriers whom they serve badly, shape the tree, admit whom they can serve."""
        self._judge(now_s)
        is_tree_wanted = self._shape_tree(now_s)
        self._drop_misrouted()
        self._admit(now_s)
        self._instruct(now_s)
        if self._beacons is not None:
            silent = sum(not member.hears_group for member in self._members.values())
            out.extend(
                self._beacons.poll(silent, len(self._members), self._key(), self._stream, now_s)
            )
        is_active = (self._beacons is not None and self._members) or is_tree_wanted
        is_asking = any(
            member.children or not member.is_answered for member in self._members.values()
        )
        self._review_at_s = now_s + REVIEW_S if is_active or is_asking else NEVER_S

    def _judge(self, now_s: float) -> None:
        laggards = set[int]().union(
            *(carrier.laggards(now_s) for carrier in self._carriers.values())
        )
        suffering = {
            member.node
            for member in self._members.values()
            if member.way != UNICAST and member.is_faring_badly()
        }
        # What a relay misses its children miss: being served alone would not help them, nor those next to the origin.
        lossy = {
            node
            for node in suffering
            if not self._is_direct(self._members[node])
            and self._members[node].source not in suffering
        }
        excused: set[int] = set()
        for node in self._tree.order:
            excused.update(self._judge_relay(self._members[node], lossy, now_s))
        for member in list(self._members.values()):
            if member.node in excused:
                self._serve_alone(member)
            elif member.node in lossy or member.session.index in laggards:
                self._penalise(member, now_s)

    def _is_direct(self, member: Member) -> bool:
        """Whether what is carried goes the same way as what is sent to it alone: then the losses are the same."""
        return member.way == TREE and member.source is None

    def _judge_relay(self, relay: Member, lossy: set[int], now_s: float) -> list[int]:
        """If what a relay forwards does not arrive at half of its children, it is to blame; returns the excused."""
        children = [
            node
            for node in relay.children
            if node in self._members and self._members[node].source == relay.node
        ]
        failed = [node for node in children if node in lossy]
        is_silent = not relay.is_answered and now_s - relay.asked_at_s > UNANSWERED_S
        if is_silent or (failed and 2 * len(failed) >= len(children)):
            logger.info(
                "%s forwards badly: %d of %d peers miss most of it",
                relay.session.identity,
                len(failed),
                len(children),
            )
            relay.unfit_until_s = now_s + UNFIT_S
            return failed
        return []

    def _penalise(self, member: Member, now_s: float) -> None:
        if member.way == UNICAST:
            return
        if now_s - member.carried_since_s > FORGIVEN * member.penalty_s:
            member.penalty_s = PENALTY_FIRST_S
        logger.info(
            "%s lags behind or loses too much by %s: served alone for %g s",
            member.session.identity,
            member.way,
            member.penalty_s,
        )
        member.alone_until_s = now_s + member.penalty_s
        member.penalty_s = min(2 * member.penalty_s, PENALTY_MAX_S)
        if member.way == MULTICAST and self._beacons is not None:
            member.hears_group = False
            member.first_beacon = self._beacons.number
        self._serve_alone(member)

    def _serve_alone(self, member: Member) -> None:
        if member.way == UNICAST:
            return
        self._carriers[member.way].dismiss(member.session.index)
        member.way = UNICAST
        member.source = None
        member.outbound.on_resend = None
        member.session.touch()

    def _shape_tree(self, now_s: float) -> bool:
        """Make the tree contain whom it should; return whether one is wanted."""
        candidates = {
            member.node
            for member in self._members.values()
            if not (member.hears_group and self._beacons is not None)
        }
        is_wanted = len(candidates) + 1 > self._limits.mesh_nodes_max
        wanted = {
            node for node in candidates if is_wanted and self._members[node].alone_until_s <= now_s
        }
        for node in [node for node in self._tree.order if node not in wanted]:
            self._tree.remove(node)
        for node in sorted(wanted.difference(self._tree.order)):
            self._tree.add(node)
        self._tree.mark_unfit(node for node in wanted if self._members[node].unfit_until_s > now_s)
        return is_wanted

    def _is_routed(self, node: int) -> bool:
        """Whether what is sent on the tree reaches this node now."""
        parent = self._tree.parent(node)
        if parent is None:
            return True
        relay = self._members[parent]
        return relay.way == TREE and node in relay.reached

    def _drop_misrouted(self) -> None:
        for member in self._members.values():
            if member.way == TREE and member.node not in self._tree:
                self._serve_alone(member)
        for node in self._tree.order:  # parents come before their children
            member = self._members[node]
            is_right = member.source == self._tree.parent(node) and self._is_routed(node)
            if member.way == TREE and not is_right:
                self._serve_alone(member)

    def _admit(self, now_s: float) -> None:
        if self._beacons is not None:
            hearing = [member for member in self._members.values() if member.hears_group]
            self._admit_to(MULTICAST, hearing, now_s)
        order = [self._members[node] for node in self._tree.order]
        self._admit_to(TREE, order, now_s)

    def _admit_to(self, way: str, candidates: list[Member], now_s: float) -> None:
        carrier = self._carriers[way]
        waiting = [
            member
            for member in candidates
            if member.way == UNICAST
            and member.alone_until_s <= now_s
            and member.session.state is State.UP
            and self._is_sharing(member, now_s)
        ]
        if waiting and not carrier.members:
            carrier.start_at(max(member.outbound.cursor for member in waiting))
        for member in waiting:
            if carrier.may_admit(member.outbound, member.first_record) and (
                way == MULTICAST or self._is_routed(member.node)
            ):
                self._carry(member, way, now_s)

    def _is_sharing(self, member: Member, now_s: float) -> bool:
        """Whether it accepts what does not come from here directly; if not, ask for it."""
        if not member.is_sharing and now_s >= member.share_at_s:
            member.share_at_s = now_s + ASK_FIRST_S
            member.session.send_frame(Share(member.first_record))
        return member.is_sharing

    def on_shared(self, session: Session, frame: Shared) -> None:
        """A peer knows from where on records are for it, however they come."""
        member = self._members.get(session.identity.id)
        if (
            member is not None
            and member.session is session
            and frame.first == member.first_record
            and not member.is_sharing
        ):
            member.is_sharing = True
            self._review_soon()

    def _carry(self, member: Member, way: str, now_s: float) -> None:
        member.way = way
        member.carried_since_s = now_s
        member.source = self._tree.parent(member.node) if way == TREE else None
        if member.source is not None:
            # Two legs to it, one back: the relay's own round trip and the direct one together are no less.
            rtt = RttEstimator(is_overtaken=True)
            relay = self._members[member.source].outbound
            rtt.set_guess(relay.round_trip_s + member.session.rtt.smoothed_s, now_s)
            member.outbound.use_round_trips(rtt)
        if way == TREE:
            node = member.node
            member.outbound.on_resend = lambda record, mask, now_s: self._carry_again(
                node, record, mask, now_s
            )
        member.begin_account()
        self._carriers[way].admit(member.session.index, member.outbound)
        member.session.touch()

    def _carry_again(self, node: int, record: Record, mask: int, now_s: float) -> None:
        """What is sent again to a relay because it never came there reaches those below it, too."""
        for child in self._tree.children(node):
            member = self._members.get(child)
            if member is not None and member.source == node:
                member.outbound.carry_again(record, mask, now_s)
                member.session.note_carried()
                self._carry_again(child, record, mask, now_s)

    # ---- asking others to relay ---------------------------------------------------------------------------------

    def _instruct(self, now_s: float) -> None:
        """Tell each relay whom to forward to, until it has confirmed that; it does so exactly while it is carried."""
        for member in self._members.values():
            wanted = self._tree.children(member.node) if member.way == TREE else ()
            if wanted != member.children:
                member.children = wanted
                member.reached &= frozenset(wanted)
                member.generation += 1
                member.is_answered = False
                member.asked_at_s = member.ask_at_s = now_s
                member.ask_s = ASK_FIRST_S
            is_complete = len(member.reached) == len(member.children)
            if now_s >= member.ask_at_s and not (member.is_answered and is_complete):
                member.session.send_frame(Relay(member.generation, member.children))
                member.ask_at_s = now_s + member.ask_s
                member.ask_s = min(2 * member.ask_s, ASK_MAX_S)

    def on_relaying(self, session: Session, frame: Relaying) -> None:
        """A relay says whom it reaches."""
        member = self._members.get(session.identity.id)
        if member is None or member.session is not session:
            return
        if frame.generation == member.generation:
            member.is_answered = True
            member.reached = frozenset(
                node for bit, node in enumerate(member.children) if frame.reached >> bit & 1
            )
            self._review_soon()

    # ---- being asked --------------------------------------------------------------------------------------------

    def on_relay(self, session: Session, frame: Relay) -> None:
        """A peer asks to have its records forwarded."""
        forwarder = session.forwarder
        if forwarder is None or frame.generation > forwarder.generation:
            forwarder = session.forwarder = Forwarder(frame.generation, frame.children)
            self._forwarders[session.index] = session
        self._report_to(session, forwarder)

    def _report_to(self, session: Session, forwarder: Forwarder) -> None:
        own = session.identity.id
        known = [node in self._members and node != own for node in forwarder.children]
        forwarder.targets = [
            self._members[node].session
            for node, is_known in zip(forwarder.children, known, strict=True)
            if is_known
        ]
        reached = sum(1 << bit for bit, is_known in enumerate(known) if is_known)
        session.send_frame(Relaying(forwarder.generation, reached))

    def _report_reach(self) -> None:
        """Who is connected here has changed: tell those that rely on it."""
        for session in self._forwarders.values():
            forwarder = session.forwarder
            if forwarder is not None and forwarder.children and session.is_established:
                self._report_to(session, forwarder)

    def forward(
        self,
        session: Session,
        record: int,
        fragments: int,
        first: int,
        batch: memoryview,
        segment_bytes: int,
    ) -> None:
        """Forward neighbouring fragments of a peer's record; to be called before they are taken in here."""
        forwarder, inbound = session.forwarder, session.inbound
        if forwarder is None or inbound is None or not forwarder.targets:
            return
        if not inbound.accepts(record):
            return
        count = -(-len(batch) // segment_bytes)
        new = forwarder.take(record, first, count, fragments, inbound.cumulative)
        targets = [target.address for target in forwarder.targets]
        if new and targets:
            self._queue.put(batch, first, new, segment_bytes, targets)
            self.is_needed = True

    # ---- the group ----------------------------------------------------------------------------------------------

    def on_beacon(self, session: Session, datagram: bytes) -> None:
        """A peer's beacon came through the group: tell it, once.

        Raises:
            WireError: not a beacon's size.
            AuthenticationError: forged or repeated.
        """
        if len(datagram) != BEACON_BYTES:
            raise WireError(f"a beacon of {len(datagram)} bytes")
        _, epoch, _, _, _, number = HEADER.unpack_from(datagram)
        key = session.inbound.key_of(epoch) if session.inbound is not None else None
        if key is None or number < session.next_beacon:
            raise AuthenticationError("a beacon came again, or too early")
        session.next_beacon = verify_beacon(key, datagram) + 1
        session.send_frame(Heard(number))

    def on_heard(self, session: Session, frame: Heard) -> None:
        """A peer has heard a beacon."""
        member = self._members.get(session.identity.id)
        if member is None or member.session is not session or self._beacons is None:
            return
        if not member.hears_group and member.first_beacon <= frame.number < self._beacons.number:
            self._serve_alone(member)
            member.hears_group = True
            self._review_soon()
