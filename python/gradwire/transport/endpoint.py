"""One node without its socket and without a clock: its sessions, the send log they share, the routing of datagrams."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from ..errors import Closed, NotConnected, TooLarge, WouldBlock
from . import types, wire
from .addressing import format_address, parse_address
from .congestion import NEVER_S
from .crypto import IV_BYTES, KEY_BYTES, AuthenticationError, KeyChain
from .discovery import GOSSIP_S, Discovery
from .handshake import LocalNode
from .receiver import ReceiveBudget
from .records import Sealer, SendLog
from .session import Session, SessionTable, State
from .types import Address, Limits, Peer, PeerJoined, PeerLost, Received, Stats, Ticket, Transmit
from .wire import HEADER, HEADER_BYTES, WireError

logger = logging.getLogger(__name__)

EVENTS_MAX: Final = 1_024
ACTIVE_S: Final = 1.0
SKIP_S: Final = 0.005
HOUSEKEEPING_S: Final = 0.1
SLEEP_S: Final = 1.0
CREDIT_FLOOR_RECORDS: Final = 4
HALF_OPEN_MAX: Final = 256
MEMBERS_PER_FRAME: Final = 16  # of ADDRESS_BYTES_MAX, in one datagram
DUPLICATE: Final = "its node_id, {}, is that of {}: give every node its own"


class Endpoint:
    """The protocol of one node; ``parse`` checks the addresses that peers tell, tests change ``first_record``."""

    def __init__(
        self,
        local: LocalNode,
        limits: Limits,
        *,
        on_lag: str = "block",
        first_record: int = 0,
        parse: Callable[[str], Address] = parse_address,
    ) -> None:
        self.local = local
        self.limits = limits
        self.counters = Stats()
        self.budget = ReceiveBudget(limits.receive_bytes, limits.message_bytes_max)
        stream = int.from_bytes(local.entropy(4), "little")
        keys = KeyChain(local.entropy(KEY_BYTES), local.entropy(IV_BYTES), first_record)
        self.sealer = Sealer(keys, stream, limits.datagram_bytes)
        self.log = SendLog(limits.send_log_bytes, first_record, local.started_at_s)
        self.discovery = Discovery()
        self.sessions = SessionTable()
        self.is_closing = False  # refuse new messages and new peers; queued messages are still sent
        self._evicts = on_lag == "evict"
        self._parse = parse
        self.twin_at_s = -1.0  # when another node of the same id, started later, sent an INIT
        self.messages: list[Received] = []  # received, and not taken yet
        self._events: deque[PeerJoined | PeerLost] = deque(maxlen=EVENTS_MAX)
        self.final_datagrams: list[Transmit] = []  # of ended sessions, and to unproved paths
        self.polled_at_s = self._expected_at_s = local.started_at_s
        self._housekeeping_at_s = local.started_at_s
        self._gossip_at_s = local.started_at_s + GOSSIP_S
        self._polls = 0

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The connected peers, in order."""
        return tuple(sorted([session.identity for session in self._up_sessions()]))

    def connect(self, *addresses: Address) -> None:
        """Connect to the first address, and reconnect whenever the connection is lost; try the others, too."""
        for index, address in enumerate(addresses):
            self.discovery.add(address, is_learned=index > 0)

    def unanswered(self) -> list[Address]:
        """Return the addresses given to `connect` from which no peer is connected."""
        connected = {each.address for each in self._up_sessions()}
        return self.discovery.seeds(connected, set(self.sessions.by_node))

    def has_room(self, nbytes: int) -> bool:
        """Return whether `publish` would take a message of this size now; an empty log takes any."""
        return not self.log.used_bytes or self.log.has_room(self.sealer, nbytes)

    def publish(self, payload: memoryview, tag: int, to: types.Recipients, now_s: float) -> Ticket:
        """Seal a message and queue it for all connected peers, or for those given; see `Node.publish`."""
        if self.is_closing:
            raise Closed("the node is closed; nothing can be published any more")
        if len(payload) > self.limits.message_bytes_max:
            raise TooLarge(
                f"a message of {len(payload)} bytes is larger than message_bytes_max ({self.limits.message_bytes_max})"
            )
        recipients = self._recipients(to)
        ticket = Ticket(tag, len(payload), frozenset([session.identity for session in recipients]))
        if not recipients:
            return ticket
        if not self.has_room(len(payload)):
            raise WouldBlock(
                f"the send log holds {self.log.used_bytes} of {self.log.limit_bytes} bytes, too many to add "
                f"{len(payload)}: wait for acknowledgements, or let the residual accumulate"
            )
        indices = frozenset([session.index for session in recipients])
        number = self.counters.messages_sent
        # Whoever is interrupted has published nothing: the same record numbers are sealed again, and leave once.
        records = list(self.sealer.seal_message(self.log.head, indices, number, tag, payload))
        for session in recipients:
            session.sender.note_published(records[-1].number, ticket, now_s)
        for record in records:
            self.log.append(record)
        # The other peers skip the records a little later: after a message to each of n peers with a single SKIP.
        for session in self._up_sessions():
            session.wake(now_s if session.index in indices else now_s + SKIP_S)
        self.counters.messages_sent += 1
        self.counters.payload_bytes_sent += len(payload) * len(recipients)
        return ticket

    def _recipients(self, to: types.Recipients) -> list[Session]:
        peers = (to,) if isinstance(to, Peer) else to
        recipients = [each for each in self._up_sessions() if peers is None or each.peer in peers]
        if isinstance(to, Peer) and not recipients:
            raise NotConnected(
                f"{to} is not connected, {len(self.peers)} others are: publish to one of them (node.peers), "
                "or wait for it (node.wait_for_peers)"
            )
        return recipients

    def drop_late(self, peers: Collection[Peer], now_s: float) -> None:
        """End the sessions of those of these peers that lag."""
        for session in self._up_sessions():
            if session.peer in peers and session.sender.is_late(self.limits.lag_s, now_s):
                session.give_up("lagging", now_s)

    def take_messages(self, now_s: float) -> list[Received]:
        """Return and forget the messages received, oldest first, and release their share of the receive budget."""
        messages, self.messages = self.messages, []
        self.budget.give_back(*[len(message.payload) for message in messages])
        if messages and self.budget.forget_waiting():
            window_records = self.window_records()
            # The session that has waited longest comes first: a busy peer must not keep the others from the budget.
            for session in sorted(self.sessions, key=lambda each: each.last_message):
                session.resume(window_records, now_s)
        return messages

    def take_events(self) -> list[PeerJoined | PeerLost]:
        """Return and forget the events of peers, oldest first."""
        events, self._events = list(self._events), deque(maxlen=EVENTS_MAX)
        return events

    @property
    def is_drained(self) -> bool:
        """Whether every connected peer has acknowledged everything."""
        return all(each.sender.is_idle for each in self._up_sessions())

    @property
    def is_closed(self) -> bool:
        """Whether every session has ended after `close`."""
        return self.is_closing and not any(each.is_established for each in self.sessions)

    def refuse_messages(self) -> None:
        """Take no new messages and no new peers; the queued messages are still sent."""
        self.is_closing = True

    def close(self, now_s: float) -> None:
        """Send a CLOSE to every peer; messages that a peer has not acknowledged fail."""
        self.refuse_messages()
        for session in self.sessions:
            session.close(now_s)

    def finish(self, now_s: float) -> None:
        """Stop waiting for the answers to CLOSE."""
        for session in self.sessions:
            session.end("closed", now_s)

    def undelivered(self) -> list[tuple[Peer, Ticket]]:
        """Return the messages that are published and not acknowledged, per peer."""
        sessions = self._up_sessions()
        return [(each.identity, ticket) for each in sessions for _, ticket in each.sender.pending]

    def stats(self) -> Stats:
        """Return a snapshot of the counters and of each path."""
        return replace(
            self.counters,
            send_log_bytes=self.log.used_bytes,
            receive_queue_bytes=self.budget.used_bytes,
            peers=tuple(each.path_stats() for each in self._up_sessions()),
        )

    def receive(self, data: memoryview, segment_bytes: int, address: Address, now_s: float) -> None:
        """Process datagrams from one address, back to back, all but the last of ``segment_bytes``; never raise."""
        total_bytes = len(data)
        position = 0
        self.counters.udp_bytes_received += total_bytes
        self.counters.datagrams_received += -(-total_bytes // segment_bytes) if total_bytes else 1
        self.counters.malformed_datagrams += not total_bytes
        while position < total_bytes:
            end = min(position + segment_bytes, total_bytes)
            if end - position < HEADER_BYTES:
                self.counters.malformed_datagrams += 1
            elif data[position] in (wire.DATA, wire.TAGGED):
                end = self._receive_data(data, position, segment_bytes, address, now_s)
            else:
                self._receive_other(data[position:end], address, now_s)
            position = end

    def _receive_data(
        self, data: memoryview, position: int, segment_bytes: int, address: Address, now_s: float
    ) -> int:
        """Process the neighbouring fragments of one record that begin here; return where they end."""
        header = wire.DataHeader.decode(data, position)
        session = self.sessions.by_stream.get((address, header.stream))
        if session is None:
            self.counters.stray_datagrams += 1
            return min(position + segment_bytes, len(data))
        most = min(-(-(len(data) - position) // segment_bytes), header.fragments - header.first)
        count = wire.run_length(data, position, segment_bytes, header.first, most)
        end = min(position + count * segment_bytes, len(data))
        batch = data[position:end]
        if header.is_tagged and session.receiver is not None:
            parts = session.receiver.authentic(header, batch, segment_bytes)
            if not parts:
                self.counters.unauthenticated_datagrams += 1
                return min(position + segment_bytes, len(data))
            count = len(parts)
            end = min(position + count * segment_bytes, len(data))
            batch = memoryview(b"".join(parts))
            segment_bytes -= wire.TAG_BYTES
        # A short last datagram may stand alone; otherwise the header has to agree with the size on the wire.
        is_valid = count == 1 or header.fragment_bytes + HEADER_BYTES == segment_bytes
        if not is_valid or not session.on_fragments(header, batch, now_s):
            self.counters.malformed_datagrams += count
        return end

    def _receive_other(self, datagram: memoryview, address: Address, now_s: float) -> None:
        kind = datagram[0]
        is_init = kind & 0x0F == wire.INIT & 0x0F and not any(datagram[1:4])
        try:
            if kind in (wire.CONTROL, wire.RESPONSE):
                self._receive_for_session(datagram, address, now_s)
            elif kind == wire.INIT:
                self._receive_init(bytes(datagram), address, now_s)
            elif is_init:
                versions = f"version {kind >> 4} of the transport, this node version {wire.VERSION}"
                self.local.rejected.note(address, f"it speaks {versions}", now_s)
                raise WireError("an INIT of another version")
            else:
                raise WireError(f"a datagram of kind {kind}")
        except (WireError, AuthenticationError) as error:
            is_malformed = isinstance(error, WireError)
            self.counters.malformed_datagrams += is_malformed
            self.counters.unauthenticated_datagrams += not is_malformed
            # A complete INIT of another version or secret, which cannot be anything else.
            if is_init and len(datagram) == wire.INIT_BYTES:
                self.discovery.on_misfit(address, now_s)

    def _receive_for_session(self, datagram: memoryview, address: Address, now_s: float) -> None:
        if len(datagram) < HEADER_BYTES + wire.TAG_BYTES:
            raise WireError("a datagram without a tag")
        header = bytes(datagram[:HEADER_BYTES])
        kind, _, _, _, index, counter = HEADER.unpack(header)
        session = self.sessions.by_index.get(index)
        if session is None:
            self.counters.stray_datagrams += 1
        elif kind == wire.RESPONSE:
            session.on_response(bytes(datagram), now_s)  # perhaps from another of its addresses
        else:
            session.on_control(counter, header, datagram[HEADER_BYTES:], address, now_s)

    def _receive_init(self, datagram: bytes, address: Address, now_s: float) -> None:
        if len(datagram) != wire.INIT_BYTES:
            raise WireError(f"an INIT of {len(datagram)} bytes")
        half_open = self.sessions.half_open
        self.counters.handshakes_refused += 1  # unless it turns out to be acceptable
        if datagram not in half_open:
            if self.is_closing:
                return
            admitted = self.local.read_init(datagram, address, now_s)
            if admitted is None:
                return
            # Another node that is not answered yet repeats this INIT, which is read only once.
            remote = admitted[1][:2]
            if remote[0] == self.local.node_id and not self._is_acceptable(*remote, address, now_s):
                return
            while len(half_open) >= HALF_OPEN_MAX:
                next(iter(half_open.values())).discard()
            session = half_open[datagram] = self._new_session(address, now_s)
            session.start_responder(datagram, *admitted, now_s)
        self.counters.handshakes_refused -= half_open[datagram].answer(address, now_s)

    def is_answered(self, peer: Peer, address: Address, now_s: float) -> bool:
        """Return whether the INIT of another node is answered at an address that it has come from."""
        # Of two nodes that send each other an INIT, the larger node id wins; the INIT may be a recording, however.
        targets = [each.address for each in self.sessions if each.state is State.INIT_SENT]
        is_first = address not in targets or self.local.node_id < peer.id
        return is_first and self._is_acceptable(peer.id, peer.incarnation, address, now_s)

    def _is_acceptable(self, node_id: int, started: int, address: Address, now_s: float) -> bool:
        known = self.sessions.by_node.get(node_id)
        if node_id == self.local.node_id:
            other = "this node" if started != self.local.incarnation else ""  # or an echo
            self.twin_at_s = now_s if started > self.local.incarnation else self.twin_at_s
        elif known is None or self._is_replaced(known, started, now_s):
            return True
        else:
            other = f"a node that started later, at {known.identity.address}"
            other = other if started < known.identity.incarnation else ""
        if other:
            self.local.rejected.note(address, DUPLICATE.format(node_id, other), now_s)
        return False

    def _is_replaced(self, known: Session, incarnation: int, now_s: float) -> bool:
        """Return whether a run of the peer's node takes the session's place: a newer run, or the same after silence."""
        is_silent = now_s - known.control.heard_at_s >= 5 * self.limits.heartbeat_s
        before = known.identity.incarnation
        return incarnation > before or (incarnation == before and is_silent)

    def poll(self, now_s: float) -> list[Transmit]:
        """Return the datagrams to send now; call again at once while it returns any."""
        self._notice_sleep(now_s)
        if self.log.used_bytes:  # looks at all peers, so once for all ACKs that have come together
            self._release_log()
        if now_s >= self.discovery.due_at_s and not self.is_closing:
            for address in self.discovery.due(now_s, *self.sessions.connected()):
                self._new_session(address, now_s).start_initiator(now_s)
        if now_s >= self._housekeeping_at_s:
            self._housekeeping_at_s = now_s + HOUSEKEEPING_S
            self._check_peers(now_s)
        due = [each for each in self.sessions.by_index.values() if each.wake_at_s <= now_s]
        # Start with another session each time, so that no session is always last in the socket's queue.
        self._polls += 1
        # A RESPONSE leaves before an INIT to the same peer, which would otherwise answer that, too.
        out = self.final_datagrams[:]
        self.final_datagrams.clear()
        for index in range(len(due)):
            out.extend(due[(self._polls + index) % len(due)].poll(now_s))
        return out

    def next_timeout_s(self, now_s: float) -> float | None:
        """Return the time at which to call `poll` next; None when only a datagram or the caller can change things."""
        if self.final_datagrams:
            return now_s
        connect_at_s = NEVER_S if self.is_closing else self.discovery.due_at_s
        wakes_s = [session.wake_at_s for session in self.sessions.by_index.values()]
        self._expected_at_s = at_s = min(connect_at_s, *wakes_s, NEVER_S)
        return None if at_s == NEVER_S else max(at_s, 0.0)

    def _notice_sleep(self, now_s: float) -> None:
        """Do not count a long pause of this process as silence of the peers."""
        slept_s = now_s - max(self.polled_at_s, self._expected_at_s)
        self.polled_at_s = self._expected_at_s = now_s
        if slept_s > SLEEP_S:
            for session in self.sessions:
                session.excuse_silence(slept_s, now_s)

    def _check_peers(self, now_s: float) -> None:
        """Renew every peer's credit, evict lagging peers if asked to, and tell one peer the others' addresses again."""
        sessions = self._up_sessions()
        self.log.renew_key(now_s)
        window_records = self.window_records()  # looks at all peers, so once for all
        for session in sessions:
            session.resume(window_records, now_s)
        if self._evicts:
            self.drop_late(self.peers, now_s)
        if now_s >= self._gossip_at_s and sessions:
            self._gossip_at_s = now_s + GOSSIP_S
            self._introduce_others(sessions[int(now_s / GOSSIP_S) % len(sessions)])

    def _introduce_others(self, session: Session) -> None:
        others = [other for other in self._up_sessions() if other is not session]
        addresses = [other.advertised or format_address(other.address) for other in others]
        for start in range(0, len(addresses), MEMBERS_PER_FRAME):
            session.send_frame(wire.Members(tuple(addresses[start : start + MEMBERS_PER_FRAME])))

    def window_records(self) -> int:
        """Return how many records each peer may send beyond the consumed ones."""
        receivers = [each.receiver for each in self.sessions if each.receiver is not None]
        active = sum(each.last_arrival_s > self.polled_at_s - ACTIVE_S for each in receivers)
        window = self.limits.window_bytes // wire.RECORD_BYTES_MAX // max(1, active)
        return max(CREDIT_FLOOR_RECORDS, window)

    def on_identified(self, session: Session, now_s: float) -> bool:
        """Put a session in the place of its node's earlier one; return False if the session has to end instead."""
        peer = session.identity
        if peer.id == self.local.node_id:
            return False
        if session.target is not None:
            self.discovery.on_identified(session.target, peer.id)
        if self.is_closing:
            return False
        known = self.sessions.by_node.get(peer.id)
        if known is not None:
            if not self._is_replaced(known, peer.incarnation, now_s):
                return False
            known.give_up("restarted" if known.peer != peer else "timeout", now_s)
        for other in self.sessions:
            if other is session or other.address != session.address:
                continue
            if other.is_established:
                other.give_up("restarted", now_s)
            elif other.state is State.INIT_SENT:
                other.discard()
        self.sessions.half_open.pop(session.init, None)
        self.sessions.by_node[peer.id] = session
        return True

    def on_up(self, session: Session) -> None:
        """Announce a connected peer, and tell it the addresses of the others."""
        logger.info("connected to %s", session.identity)
        self._events.append(PeerJoined(session.identity))
        sessions = self._up_sessions()
        for each in sessions:
            each.sender.rate.share_link(len(sessions))
        self._introduce_others(session)

    def on_members(self, addresses: tuple[str, ...]) -> None:
        """Connect to addresses that a peer has named."""
        for text in addresses:
            try:
                self.discovery.add(self._parse(text), is_learned=True)
            except ValueError:
                self.counters.malformed_datagrams += 1

    def on_down(self, session: Session, reason: str, now_s: float) -> None:
        """Forget a session that has ended, and report its undelivered messages."""
        self.sessions.remove(session)
        for address in {session.address, session.target or session.address}:
            is_answered = session.peer is not None or address != session.target
            self.discovery.on_ended(address, now_s, is_answered=is_answered)
        if session.was_up:
            undelivered = session.sender.settle_messages(session.identity, NEVER_S, delivered=False)
            count = len(undelivered)
            logger.info("%s is gone (%s), %d messages undelivered", session.peer, reason, count)
            self._events.append(PeerLost(session.identity, reason, undelivered))
        self._release_log()

    def _new_session(self, address: Address, now_s: float) -> Session:
        while (index := int.from_bytes(self.local.entropy(4), "little")) in self.sessions.by_index:
            pass  # nobody can guess the number
        session = self.sessions.by_index[index] = Session(self, index, address, now_s)
        return session

    def _up_sessions(self) -> list[Session]:
        return [each for each in self.sessions.by_index.values() if each.state is State.UP]

    def _release_log(self) -> None:
        acknowledged = [each.sender.cumulative for each in self.sessions.by_node.values()]
        self.log.release_below(min(acknowledged, default=self.log.head))
