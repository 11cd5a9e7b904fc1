"""One node without its socket: its sessions, the send log they share, and the rounds of sending.

Sans-IO: `Endpoint.receive` takes datagrams, `Endpoint.poll` returns what to send, `Endpoint.next_timeout_s` says when
to call `poll` again, and `take_messages` and `take_events` hand over what happened. Time is always an argument.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ..errors import Closed, NotConnected, TooLarge, WouldBlock
from .agenda import Agenda
from .crypto import Entropy, Marker, SenderKey
from .doorway import Doorway
from .fanout import Fanout
from .inbound import ReceiveBudget
from .intake import Intake
from .introductions import Introductions
from .laggards import Laggards
from .membership import Membership
from .model import (
    Address,
    Counters,
    Event,
    Limits,
    Peer,
    PeerJoined,
    PeerLost,
    Received,
    Stats,
    Ticket,
    Transmit,
    parse_address,
)
from .own_records import OwnRecords
from .path_mtu import PathMtu, ceiling_bytes, is_loopback
from .records import Outgoing
from .session import CREDIT_FLOOR_RECORDS, REASON_GIVEN_UP, Session, State
from .tally import add_counters, take_stock
from .wire import (
    HEADER_BYTES,
    Heard,
    Relay,
    Relaying,
    Shared,
)

logger = logging.getLogger(__name__)

EVENTS_MAX = 1_024
ACTIVE_S = 1.0
CREDIT_CHECK_S = 0.1
SLEEP_S = 1.0
NODES_MAX = 1 << 16
NEVER_S = float("inf")


def _nothing() -> None:
    """Do nothing."""


class Endpoint:
    """The whole protocol of one node.

    Args:
        secret: the 32-byte cluster secret.
        now_s: current time, monotonic.
        node_id: identity of the node, 64 bits.
        incarnation: start of the process in milliseconds; larger than that of any earlier run of the node.
        limits: bounds and timers.
        advertise: "host:port" at which others can reach the node, or empty.
        entropy: source of random bytes; a simulator passes a seeded one.
        insecure: neither encrypt nor authenticate (benchmarks only).
        multicast: address of the group that data records may be sent to; it must be that of all nodes.
        on_lag: "block" (a peer that stops acknowledging fills the send log, and `publish` raises `WouldBlock`) or
            "evict" (it is dropped after ``lag_s``) or "coalesce" (``laggards`` gives back what waits for it and takes
            what is to be sent instead).
        interface_mtu: returns the MTU of the interface to an address, None where that is unknown.
        socket_buffer_bytes: of the socket's receive buffer, and so of those of other nodes on this machine; 0: unknown.
        first_record: number of the first record; only tests change it.
    """

    def __init__(
        self,
        secret: bytes,
        now_s: float,
        *,
        node_id: int,
        incarnation: int,
        limits: Limits | None = None,
        advertise: str = "",
        entropy: Entropy = os.urandom,
        insecure: bool = False,
        multicast: Address | None = None,
        on_lag: str = "block",
        interface_mtu: Callable[[Address], int | None] = lambda _: None,
        socket_buffer_bytes: int = 0,
        first_record: int = 0,
    ) -> None:
        self.limits = limits or Limits()
        self.secret = secret
        self.node_id = node_id
        self.incarnation = incarnation
        self.advertise = advertise
        self.entropy = entropy
        self.insecure = insecure
        self.marker = Marker(secret, insecure=insecure)
        self._started_at_s = now_s
        self._evicts = on_lag == "evict"
        self.laggards = Laggards(self) if on_lag == "coalesce" else None
        self.counters = Counters()
        self.budget = ReceiveBudget(self.limits.receive_bytes)
        self.stream = int.from_bytes(entropy(4), "little") & ~1
        self.membership = Membership()
        self.sessions: dict[int, Session] = {}
        self.agenda = Agenda()
        shape = self.limits
        if self.laggards is not None:
            if multicast is not None:
                raise ValueError(
                    'on_lag="coalesce" does not go with multicast: a slow peer hears what waits for it'
                )
            # For the same reason nobody relays: what a relay has been given may reach a peer at any time.
            shape = replace(self.limits, mesh_nodes_max=NODES_MAX)
        self.own = OwnRecords(
            self.sessions,
            self.limits,
            self.stream,
            entropy,
            insecure=insecure,
            first_record=first_record,
            carried_from=shape.mesh_nodes_max if multicast is None else 1,
            now_s=now_s,
        )
        self.log = self.own.log
        self._interface_mtu = interface_mtu
        self.socket_buffer_bytes = socket_buffer_bytes
        self.fanout = Fanout(
            node_id,
            shape,
            self.log,
            self.counters,
            self.stream,
            lambda: self.own.sealer.key,
            multicast,
        )
        self.doorway = Doorway(self)
        self.by_node: dict[int, Session] = {}
        self.intake = Intake(self)
        self._messages: deque[Received] = deque()
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._farewells: list[Transmit] = []
        self.is_closing = False
        self._ticked_at_s = self._expected_at_s = now_s
        self._credit_at_s = now_s
        self._turn = 0
        self._knock_at_s = 0.0
        self._introductions = Introductions(now_s)

    # ---- the caller's side --------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The connected peers, in order."""
        return tuple(sorted(session.identity for session in self._up_sessions()))

    def connect(self, address: Address) -> None:
        """Want a connection to this address from now on."""
        self.membership.add(address)
        self._knock_at_s = 0.0

    def publish(
        self,
        payload: memoryview,
        tag: int,
        to: Peer | None,
        now_s: float,
        on_records: Callable[[], None] = _nothing,
    ) -> Ticket:
        """Seal a message and queue it for all connected peers, or for one.

        Args:
            payload: the message; not used any more afterwards.
            tag: a number for the receivers.
            to: one connected peer, or None for all.
            now_s: current time.
            on_records: called after each few sealed records, so that they can be sent from here: as many as fit a
                quarter of a socket's buffer.

        Raises:
            Closed: the node is closing.
            TooLarge: larger than ``message_bytes_max``.
            NotConnected: ``to`` is not connected.
            WouldBlock: the send log has no room for it now.
        """
        if self.is_closing:
            raise Closed("the node is closed; nothing can be published any more")
        if len(payload) > self.limits.message_bytes_max:
            raise TooLarge(
                f"a message of {len(payload)} bytes is larger than message_bytes_max ({self.limits.message_bytes_max})"
            )
        recipients = self._recipients(to)
        peers = frozenset(session.identity for session in recipients)
        ticket = Ticket(tag, len(payload), peers)
        if not recipients:
            return ticket
        if not self.has_room(len(payload)):
            raise WouldBlock(
                f"the send log holds {self.log.used_bytes} of {self.own.room_bytes} bytes, "
                f"no room for {len(payload)} more: "
                "wait for acknowledgements, or let the residual accumulate"
            )
        last_record = self.log.head + self.own.sealer.numbers_of(len(payload)) - 1
        for session in recipients:
            session.note_published(last_record, ticket, now_s)
        indices = frozenset(session.index for session in recipients)
        message = Outgoing(indices, last_record, is_shared=to is None)
        number = self.own.take_message_numbers(1)
        # Encryption drives the interpreter out of the processor's cache, so it takes turns with the rest seldom; and a
        # peer that gets much at a time acknowledges it at once. Its socket's buffer is taken to be as large as ours.
        together_bytes = self.socket_buffer_bytes // 4
        waiting_bytes, keep = 0, self.log.append
        for record in self.own.sealer.seal_message(self.log.head, message, number, tag, payload):
            keep(record)
            waiting_bytes += record.nbytes
            if waiting_bytes >= together_bytes:
                waiting_bytes = 0
                on_records()
        if waiting_bytes:
            on_records()
        # Also those that skip these records, or they would keep the log.
        for session in self._up_sessions():
            session.look_at_log()
        self.counters.messages_sent += 1
        self.counters.payload_bytes_sent += len(payload) * len(recipients)
        self.own.maybe_rotate(now_s)
        return ticket

    def has_room(self, nbytes: int) -> bool:
        """Whether `publish` would take a message of this size now."""
        return self.own.has_room(nbytes)

    def _recipients(self, to: Peer | None) -> list[Session]:
        if to is None:
            return self._up_sessions()
        session = self.by_node.get(to.id)
        if session is None or session.state is not State.UP or session.peer != to:
            raise NotConnected(
                f"{to} is not connected, {len(self.peers)} others are: publish to one of them (node.peers), "
                "or wait for it (node.wait_for_peers)"
            )
        return [session]

    def take_messages(self, now_s: float) -> list[Received]:
        """Return and forget the messages received, oldest first; frees their room for the senders."""
        if not self._messages:
            return []
        messages = list(self._messages)
        self._messages.clear()
        self.budget.give_back(sum(len(message.payload) for message in messages))
        if self.budget.has_waiting:
            self.budget.has_waiting = False
            for session in list(self.sessions.values()):
                session.resume(now_s)
        return messages

    def take_events(self) -> list[Event]:
        """Return and forget what happened to peers, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    @property
    def has_messages(self) -> bool:
        """Whether `take_messages` would return something."""
        return bool(self._messages)

    @property
    def is_drained(self) -> bool:
        """Whether every connected peer has acknowledged everything."""
        return all(
            session.state is not State.UP or session.outbound is None or session.outbound.is_idle
            for session in self.sessions.values()
        )

    @property
    def is_closed(self) -> bool:
        """Whether `close` has run its course."""
        return self.is_closing and not any(
            session.is_established for session in self.sessions.values()
        )

    def stop_publishing(self) -> None:
        """Refuse new messages and new peers; what is queued still goes out."""
        self.is_closing = True

    def close(self, now_s: float) -> None:
        """Say goodbye to every peer; what they have not acknowledged fails."""
        self.is_closing = True
        self.fanout.stop()
        for session in list(self.sessions.values()):
            session.close(now_s)

    def finish(self, now_s: float) -> None:
        """Stop waiting for answers to the goodbyes; what is not acknowledged fails."""
        for session in list(self.sessions.values()):
            session.finish(now_s)

    def undelivered(self) -> list[tuple[Peer, Ticket]]:
        """Return what is published and not acknowledged, per peer."""
        return [
            (session.identity, ticket)
            for session in self._up_sessions()
            for _, ticket in session.pending
        ]

    # ---- datagrams in -------------------------------------------------------------------------------------------

    def receive(self, data: memoryview, segment_bytes: int, address: Address, now_s: float) -> None:
        """See `Intake.receive`."""
        self.intake.receive(data, segment_bytes, address, now_s)

    def receive_group(
        self, data: memoryview, segment_bytes: int, address: Address, now_s: float
    ) -> None:
        """See `Intake.receive_group`."""
        self.intake.receive_group(data, segment_bytes, address, now_s)

    # ---- datagrams out ------------------------------------------------------------------------------------------

    def poll(self, now_s: float) -> list[Transmit]:
        """Return what is to be sent now; call again at once while it returns something."""
        self._notice_sleep(now_s)
        if self.own.is_release_due:
            self.own.release(now_s)
        if now_s >= self._knock_at_s:
            self._knock(now_s)
        if now_s >= self._credit_at_s:
            self._credit_at_s = now_s + CREDIT_CHECK_S
            self._check_lag(now_s)
            self._introductions.gossip(self._up_sessions(), now_s)
        indices = self.agenda.take_due(now_s)
        due = [self.sessions[index] for index in indices if index in self.sessions]
        if len(due) == 1:
            out = due[0].poll(now_s)
        elif due:
            out = self._poll_in_turns(due, now_s)
        else:
            out = []
        if self._farewells:
            out, self._farewells = self._farewells + out, []
        if self.fanout.is_needed or self.fanout.wake_at_s <= now_s:
            out.extend(self.fanout.poll(now_s))
        self._count(out)
        return out

    def _poll_in_turns(self, due: list[Session], now_s: float) -> list[Transmit]:
        """Start with another session each time, so that none is always last in the socket's queue."""
        self._turn = (self._turn + 1) % len(due)
        queues = [session.poll(now_s) for session in due[self._turn :] + due[: self._turn]]
        out: list[Transmit] = []
        while queues:
            queues = [queue for queue in queues if queue]
            out.extend(queue.pop(0) for queue in queues)
        return out

    def poll_data(self, now_s: float) -> list[Transmit]:
        """Return the data that may leave at once, and nothing else; `poll` has the timers and the control."""
        out: list[Transmit] = []
        for session in self.sessions.values():
            session.poll_data(now_s, out)
        if self.fanout.is_needed:
            out.extend(self.fanout.poll(now_s))
        self._count(out)
        return out

    def _count(self, transmits: list[Transmit]) -> None:
        sent_bytes = datagrams = 0
        for transmit in transmits:
            nbytes = transmit.nbytes
            sent_bytes += nbytes
            datagrams += -(-nbytes // (transmit.segment_bytes or nbytes))
        self.counters.udp_bytes_sent += sent_bytes
        self.counters.datagrams_sent += datagrams

    def next_timeout_s(self, now_s: float) -> float | None:
        """Return the time at which to call `poll` next; None when only a datagram or the caller can change things."""
        if self._farewells:
            return now_s
        at_s = min(self.agenda.next_at_s(), self._knock_at_s, self.fanout.wake_at_s)
        self._expected_at_s = at_s
        return None if at_s == NEVER_S else max(at_s, 0.0)

    @property
    def is_patient(self) -> bool:
        """Whether nobody notices if what comes is taken a millisecond later.

        All peers are so far away that this is little, and some message is coming that will go on coming.
        """
        is_midway = False
        for session in self.sessions.values():
            if session.is_established:
                if not session.rtt.is_far:
                    return False
                is_midway = is_midway or session.is_midway
        return is_midway

    def _notice_sleep(self, now_s: float) -> None:
        """After a long pause of this process the silence was ours, not the peers'."""
        slept_s = now_s - max(self._ticked_at_s, self._expected_at_s)
        self._ticked_at_s = self._expected_at_s = now_s
        if slept_s > SLEEP_S:
            for session in self.sessions.values():
                session.heard_at_s = min(now_s, session.heard_at_s + slept_s)
                session.progress_at_s = min(now_s, session.progress_at_s + slept_s)

    def _knock(self, now_s: float) -> None:
        self._knock_at_s = NEVER_S
        if self.is_closing:
            return
        for address in self.membership.due(now_s, *self._connected()):
            session = Session(self, self.new_index(), address, now_s)
            session.start_initiator(now_s)
            self.sessions[session.index] = session
            self.intake.note_addresses()
        next_at_s = self.membership.next_at_s(*self._connected())
        self._knock_at_s = NEVER_S if next_at_s is None else next_at_s

    def _connected(self) -> tuple[set[Address], set[int]]:
        """Return where and at whom not to knock; who has only knocked here may be a recording in another's name."""
        addresses = set(self.intake.addresses)
        addresses.update(
            session.target for session in self.sessions.values() if session.target is not None
        )
        return addresses, set(self.by_node)

    def unanswered(self) -> list[Address]:
        """Return the addresses that the caller named and nobody has answered from."""
        return self.membership.unanswered(
            {session.address for session in self._up_sessions()}, set(self.by_node)
        )

    def _check_lag(self, now_s: float) -> None:
        self.own.fit_framing(now_s)
        for session in self._up_sessions():
            session.resume(now_s)
            if self._evicts and session.is_lagging(now_s):
                session.give_up("lagging", REASON_GIVEN_UP, now_s)
        if self.laggards is not None:
            self.laggards.check(now_s)

    # ---- what the laggards ask for (laggards.Owner) -------------------------------------------------------------

    def up_sessions(self) -> list[Session]:
        """See `laggards.Owner`."""
        return self._up_sessions()

    def on_withdrawn(self, now_s: float) -> None:
        """See `laggards.Owner`."""
        self.own.release(now_s)

    # ---- what sessions ask for and report (context.Context) -----------------------------------------------------

    def wall_ms(self, now_s: float) -> int:
        """See `context.Context`; a jump of the clock after the start goes unnoticed."""
        return (self.incarnation + int((now_s - self._started_at_s) * 1e3)) & (2**64 - 1)

    def sender_keys(self) -> tuple[SenderKey, ...]:
        """See `context.Context`."""
        return self.own.sender_keys()

    def window_records(self) -> int:
        """See `context.Context`."""
        cutoff_s = self._ticked_at_s - ACTIVE_S
        active = sum(1 for session in self.sessions.values() if session.data_heard_at_s > cutoff_s)
        return max(CREDIT_FLOOR_RECORDS, self.limits.window_bytes // 65_536 // max(1, active))

    def on_identified(self, session: Session, now_s: float) -> bool:
        """See `context.Context`."""
        peer = session.identity
        self.doorway.forget(session)
        if peer.id == self.node_id:
            if session.target is not None:
                self.membership.on_own(session.target, now_s)
            return False
        if session.target is not None:
            self.membership.on_identified(session.target, peer.id)
        if self.is_closing:
            return False
        known = self.by_node.get(peer.id)
        if known is not None and known.peer is not None:
            is_alive = known.is_established and now_s - known.heard_at_s < self.limits.suspect_s
            if known.peer.incarnation > peer.incarnation or (known.peer == peer and is_alive):
                return False
            reason = "restarted" if known.peer != peer else "timeout"
            known.give_up(reason, REASON_GIVEN_UP, now_s)
        for other in list(self.sessions.values()):
            if other is session or other.address != session.address:
                continue
            if other.is_established:
                other.give_up("restarted", REASON_GIVEN_UP, now_s)
            elif other.state is State.INIT_SENT:
                self.drop(other)
        self.by_node[peer.id] = session
        self.intake.note_addresses()
        return True

    def on_stream(self, session: Session) -> None:
        """See `context.Context`."""
        self.intake.note_stream(session, session.address)
        self.fanout.on_stream(session)

    def on_up(self, session: Session, now_s: float) -> None:
        """See `context.Context`."""
        logger.info("connected to %s", session.identity)
        self.own.fit_framing(now_s)
        self._events.append(PeerJoined(session.identity))
        sessions = self._up_sessions()
        if len(sessions) < self.limits.mesh_nodes_max:  # in a tree a node sends to few of them
            for each in sessions:
                if each.outbound is not None:
                    each.outbound.rate.share_link(len(sessions))
        self.fanout.on_up(session)
        self._introductions.introduce(session, sessions)

    def on_moved(self, session: Session, address: Address, now_s: float) -> None:
        """See `context.Context`."""
        self.intake.note_stream(session, address)
        is_another_path = session.address[0] != address[0]
        session.address = address
        if is_another_path and session.path is not None:
            session.watch_path(now_s)
        self.intake.note_addresses()

    def on_members(self, addresses: tuple[str, ...]) -> None:
        """See `context.Context`."""
        for text in addresses:
            try:
                self.membership.add(parse_address(text), is_learned=True)
                self._knock_at_s = 0.0
            except ValueError:
                self.counters.malformed_datagrams += 1

    def on_fanout(self, session: Session, frame: Relay | Relaying | Shared | Heard) -> None:
        """See `context.Context`."""
        match frame:
            case Relay():
                self.fanout.on_relay(session, frame)
            case Relaying():
                self.fanout.on_relaying(session, frame)
            case Shared():
                self.fanout.on_shared(session, frame)
            case Heard():
                self.fanout.on_heard(session, frame)

    def deliver(self, session: Session, tag: int, payload: memoryview) -> None:
        """See `context.Context`."""
        self.counters.messages_received += 1
        self.counters.payload_bytes_received += len(payload)
        self._messages.append(Received(session.identity, tag, payload))

    def on_down(self, session: Session, reason: str, now_s: float) -> None:
        """See `context.Context`."""
        add_counters(self.counters, session)
        if session.target is not None and session.peer is None:
            self.membership.on_no_answer(session.target, now_s)
        self._farewells.extend(session.last_words(now_s))
        self.drop(session)
        self.membership.on_lost(session.address, now_s)
        if session.target is not None:
            self.membership.on_lost(session.target, now_s)
        if session.was_up and session.peer is not None:
            undelivered = session.fail_pending()
            logger.info(
                "%s is gone (%s), %d messages undelivered", session.peer, reason, len(undelivered)
            )
            self._events.append(PeerLost(session.peer, reason, undelivered))
            self.own.is_rotation_due = True  # who has left must not understand what comes
        self.own.release(now_s)

    def on_poisoned(self, session: Session, now_s: float) -> None:
        """See `context.Context`."""
        if self.own.on_poisoned(session, now_s):
            self.recut()

    def watch_path(self, address: Address, now_s: float) -> PathMtu | None:
        """See `context.Context`."""
        if is_loopback(address[0]):
            return None
        largest_bytes = self.limits.fragment_bytes_max + HEADER_BYTES

        def ceiling() -> int:
            return min(largest_bytes, ceiling_bytes(address[0], self._interface_mtu(address)))

        return PathMtu(self.limits.fragment_bytes + HEADER_BYTES, ceiling, now_s)

    def on_path_size(self, session: Session, now_s: float) -> None:
        """See `context.Context`."""
        if session.path is not None and self.own.on_path_size(
            session, session.path.size_bytes, now_s
        ):
            self.recut()

    def on_too_large(self, address: Address, nbytes: int, now_s: float) -> None:
        """The system refused to send a datagram of this size to an address."""
        for session in self._up_sessions():
            if session.address == address and session.path is not None:
                session.path.on_too_large(nbytes, now_s)
                session.touch()

    def recut(self) -> None:
        """Cut anew what some peer may lack, and have every peer skip the old records."""
        head = self.log.head
        self.counters.recut_records += self.own.recut()
        self.fanout.restart_at(head)

    # ---- housekeeping -------------------------------------------------------------------------------------------

    def drop(self, session: Session) -> None:
        """Forget a session, whatever its state."""
        session.state = State.DOWN
        self._knock_at_s = 0.0
        self.sessions.pop(session.index, None)
        self.agenda.drop(session.index)
        self.fanout.on_down(session)
        self.doorway.forget(session)
        if session.peer is not None and self.by_node.get(session.peer.id) is session:
            del self.by_node[session.peer.id]
        self.intake.forget_stream(session)
        self.intake.note_addresses()

    def _up_sessions(self) -> list[Session]:
        return [session for session in self.sessions.values() if session.state is State.UP]

    def new_index(self) -> int:
        """Return a number for another session, which nobody can guess."""
        while True:
            index = int.from_bytes(self.entropy(4), "little")
            if index not in self.sessions:
                return index

    def rotate_key(self, now_s: float) -> None:
        """Have a new sender key made, announced, and used as soon as every peer has confirmed it."""
        self.own.rotate_key(now_s)

    def stats(self) -> Stats:
        """Return a snapshot of the counters and of each path."""
        return take_stock(self.counters, self.sessions, self.fanout, self.log, self.budget)
