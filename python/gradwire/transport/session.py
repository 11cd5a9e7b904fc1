"""The life of one connection to one peer: every state and every transition is in this file.

Sans-IO: datagrams come in through `Session.on_response`, `Session.on_control` and `Session.on_fragments`, go out
through `Session.poll`, and time is an argument. ``docs/transport.md`` has the state table.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum
from functools import partial
from typing import Final, Protocol

from . import crypto, wire
from .addressing import format_address
from .congestion import NEVER_S, RttEstimator
from .crypto import AuthenticationError, ControlChannel, Handshake, KeyChain
from .discovery import ATTEMPT_S, RETRY_FIRST_S, RETRY_MAX_S
from .receiver import ReceiveBudget, Receiver
from .records import SendLog
from .sender import Sender
from .types import Address, Limits, Peer, PeerStats, Stats, Ticket, Transmit

logger = logging.getLogger(__name__)

CLOSE_ATTEMPTS: Final = 5
CLOSE_RETRY_MAX_S: Final = 0.5
PINGS_MAX: Final = 16
BURSTS_PER_POLL: Final = 16
RESPONSE_INTERVAL_S: Final = RETRY_FIRST_S / 2  # a genuine INIT is repeated half as often at most

REASON_LEFT: Final = 0
REASON_GIVEN_UP: Final = 2


class State(Enum):
    """The state of a session."""

    INIT_SENT = "init sent"  # an INIT was sent and no answer has come
    RESPONDED = "responded"  # an INIT was answered; nothing proves yet that it was no recording
    KEYING = "keying"  # both sides are authenticated; sender keys are on their way
    UP = "up"  # each side has the other's sender key: messages flow
    CLOSING = "closing"  # a CLOSE was sent
    DOWN = "down"  # over; the endpoint forgets the session


class _Endpoint(Protocol):
    """The endpoint as its sessions use it."""

    limits: Limits
    log: SendLog
    budget: ReceiveBudget
    counters: Stats
    entropy: crypto.Entropy
    secret: bytes
    mac1: crypto.Mac1
    keys: KeyChain
    node_id: int
    incarnation: int
    stream: int
    advertise: str
    final_datagrams: list[Transmit]

    def wall_ms(self, now_s: float) -> int: ...
    def window_records(self) -> int: ...
    def on_identified(self, session: Session, now_s: float) -> bool: ...
    def on_up(self, session: Session) -> None: ...
    def on_routed(self, session: Session, address: Address) -> None: ...
    def on_members(self, addresses: tuple[str, ...]) -> None: ...
    def on_message(self, session: Session, tag: int, payload: memoryview) -> None: ...
    def on_down(self, session: Session, reason: str, now_s: float) -> None: ...


class Session:
    """One connection, from the INIT to the end."""

    def __init__(self, endpoint: _Endpoint, index: int, address: Address, now_s: float) -> None:
        self._endpoint = endpoint
        self.index = index  # number of the session in the control datagrams sent to this node
        self.address = address  # source of the peer's latest datagrams
        self.target: Address | None = None  # destination of this node's INIT, if the peer sent none
        self.state = State.INIT_SENT
        self.peer: Peer | None = None
        self.advertised = ""  # "host:port" at which others should reach the peer
        self.stream: int | None = None  # number of the peer's stream
        self.init = b""  # the peer's INIT, to recognise a repetition
        self.rtt = RttEstimator()
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        # (last record, ticket) of the messages that the peer has not acknowledged
        self.pending: deque[tuple[int, Ticket]] = deque()
        self.was_up = False
        self.last_message = 0  # number of the latest message, counted over all peers
        self.heard_at_s = now_s  # when the peer's latest control datagram arrived
        self.data_heard_at_s = -NEVER_S  # when the peer's latest data datagram arrived
        self.progress_at_s = now_s  # when the peer last acknowledged a record
        self.wake_at_s = -NEVER_S  # when `poll` has something to do
        self._began_at_s = now_s  # when the present state began
        self._handshake: Handshake | None = None
        self._first_datagram = b""  # INIT or RESPONSE
        self._attempts = 0
        self._responded_at_s = -NEVER_S
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = now_s
        self._remote_index = 0
        self._channel: ControlChannel | None = None
        self._frames: list[bytes] = []
        self._control_sent_at_s = now_s
        self._ack_counter = -1
        # By token: sending time of the latest PINGs, and the transmissions of data before each.
        self._pings: dict[int, tuple[float, int]] = {}
        self._ping_token = 0
        self._key_frame = b""
        self._has_key_ack = False

    # ---- handshake ----------------------------------------------------------------------------------------------

    def start_initiator(self, now_s: float) -> None:
        """Start a handshake with ``address``."""
        self.target = self.address
        endpoint = self._endpoint
        header = wire.HEADER.pack(wire.INIT, 0, 0, 0, self.index, endpoint.wall_ms(now_s))
        prologue = crypto.PROLOGUE + header
        self._handshake = Handshake(endpoint.secret, prologue, endpoint.entropy)
        message = self._handshake.write_init(self._introduction(wire.INTRODUCTION_BYTES))
        self._first_datagram = endpoint.mac1.sign(header + message)

    def start_responder(self, init: bytes, handshake: Handshake, remote: wire.Introduction) -> None:
        """Answer an INIT that proved knowledge of the secret."""
        self.state = State.RESPONDED
        self.init = init
        header = wire.HEADER.pack(wire.RESPONSE, 0, 0, 0, remote.session, 0)
        message = handshake.write_response(self._introduction())
        self._first_datagram = self._endpoint.mac1.sign(header + message)
        first, second = handshake.split()
        self._identify(remote, ControlChannel(second, first))

    def answer_again(self, address: Address, now_s: float) -> bool:
        """Repeat the RESPONSE because the INIT was repeated; return False if that is too soon.

        The RESPONSE goes to the source of the repetition: an attacker who records an INIT and delivers it first, from
        another address, must not keep the genuine peer from its RESPONSE.
        """
        if self.state is not State.RESPONDED or now_s - self._responded_at_s < RESPONSE_INTERVAL_S:
            return False
        self.address = address
        self._retry_at_s = now_s
        self.touch()
        return True

    def on_response(self, datagram: bytes, now_s: float) -> None:
        """Process the RESPONSE to this session's INIT; raise `AuthenticationError` or `WireError` for anything else."""
        if self._handshake is None:
            return
        if not self._endpoint.mac1.verify(datagram):
            raise AuthenticationError("a RESPONSE without a valid mac1")
        message = datagram[wire.HEADER_BYTES : -wire.MAC1_BYTES]
        remote = wire.Introduction.decode(self._handshake.read_response(message))
        self._identify(remote, ControlChannel(*self._handshake.split()))
        self._handshake = None
        if self._attempts == 1:  # after a repetition it is unknown which INIT was answered
            self.rtt.add_sample(now_s - self._began_at_s, now_s)
        self._begin_keying(now_s)

    def _introduction(self, padded_bytes: int = 0) -> bytes:
        node = self._endpoint
        introduction = wire.Introduction(node.node_id, node.incarnation, self.index, node.advertise)
        return introduction.encode(padded_bytes)

    def _identify(self, remote: wire.Introduction, channel: ControlChannel) -> None:
        self._channel = channel
        self._remote_index = remote.session
        self.peer = Peer(remote.node_id, remote.incarnation, format_address(self.address))
        self.advertised = remote.advertise

    def _begin_keying(self, now_s: float) -> None:
        endpoint = self._endpoint
        self.state = State.KEYING
        self.heard_at_s = self._began_at_s = now_s
        self.touch()
        if not endpoint.on_identified(self, now_s):
            self.give_up("duplicate", now_s)
            return
        # A peer gets the records from the log's head on: the earlier ones were published before it was there.
        start = endpoint.log.head
        self.sender = Sender(endpoint.log, self.index, start, self.rtt, endpoint.counters)
        key = wire.Key(endpoint.stream, start, *endpoint.keys.key_of(start))
        self._key_frame = wire.encode_frame(key)
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = now_s

    # ---- receiving ----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Peer:
        """The peer's identity, once the handshake has revealed it."""
        if self.peer is None:
            raise RuntimeError("the peer of this session is not known yet")
        return self.peer

    @property
    def is_established(self) -> bool:
        """Whether the peer has proved its identity and has not left."""
        return self.state in (State.KEYING, State.UP, State.CLOSING)

    def touch(self) -> None:
        """Have `poll` called at once."""
        self.wake_at_s = -NEVER_S

    def wake_by(self, at_s: float) -> None:
        """Have `poll` called at this time at the latest."""
        self.wake_at_s = min(self.wake_at_s, at_s)

    def on_control(
        self, counter: int, header: bytes, body: memoryview, address: Address, now_s: float
    ) -> None:
        """Process one control datagram; raise `AuthenticationError` or `WireError` if it is forged or malformed."""
        if self._channel is None:
            raise AuthenticationError("control before the handshake")
        highest_before = self._channel.highest_received
        frames = wire.decode_frames(self._channel.open(counter, header, body))
        self.heard_at_s = now_s
        # Only the newest datagram tells the peer's present address; a late one may come from the address before.
        if address != self.address and counter > highest_before and self.is_established:
            self._endpoint.on_routed(self, address)
        if self.state is State.RESPONDED:
            if not any(isinstance(frame, wire.Key) for frame in frames):
                if any(isinstance(frame, wire.Close) for frame in frames):
                    self.end("left", now_s)
                return
            # The first KEY proves that the peer is there, and thereby that this is its address.
            self.address = address
            peer = self.identity
            self.peer = Peer(peer.id, peer.incarnation, format_address(address))
        for frame in frames:
            if self.state is not State.DOWN:
                self._on_frame(frame, counter, now_s)
        self.touch()

    def _on_frame(self, frame: wire.Frame, counter: int, now_s: float) -> None:
        receiver = self.receiver
        match frame:
            case wire.Ack():
                self._on_ack(frame, counter, now_s)
            case wire.Ping(token):
                self._frames.insert(0, wire.encode_frame(wire.Pong(token)))  # next to the ACK
                if receiver is not None:
                    receiver.acknowledge_by(now_s)
            case wire.Pong(token) if token in self._pings:
                sent_at_s, transmissions = self._pings.pop(token)
                self.rtt.add_sample(now_s - sent_at_s, now_s)
                if self.sender is not None:
                    self.sender.on_pong(transmissions, now_s)
            case wire.Key():
                self._on_key(frame, now_s)
            case wire.KeyAck():
                self.rtt.set_guess(now_s - self._began_at_s)
                self._on_key_ack(now_s)
            case wire.Skip(first, count) if receiver is not None:
                receiver.skip(first, count, now_s)
            case wire.Close(reason):
                self.send_frame(wire.CloseAck())
                self.end("left" if reason == REASON_LEFT else "dropped by the peer", now_s)
            case wire.CloseAck() if self.state is State.CLOSING:
                self.end("closed", now_s)
            case wire.Members(addresses):
                self._endpoint.on_members(addresses)

    def _on_ack(self, ack: wire.Ack, counter: int, now_s: float) -> None:
        self._on_key_ack(now_s)  # only a peer that has the key sends an ACK
        if self.sender is None or self.state is State.CLOSING or counter < self._ack_counter:
            return  # closing: undelivered messages are reported already; an older ACK: a newer one says more
        self._ack_counter = counter
        before = self.sender.cumulative
        self.sender.on_ack(ack, now_s)
        if self.sender.cumulative > before:
            self.progress_at_s = now_s
        while self.pending and self.pending[0][0] < self.sender.cumulative:
            self.pending.popleft()[1].settle(self.identity, delivered=True)

    def _on_key(self, frame: wire.Key, now_s: float) -> None:
        if self.state is State.RESPONDED:
            self._begin_keying(now_s)
            if not self.is_established:
                return
        if self.receiver is None:
            endpoint = self._endpoint
            self.receiver = Receiver(
                frame.first_record,
                KeyChain(frame.key, frame.iv, frame.first_record),
                endpoint.budget,
                deliver=partial(endpoint.on_message, self),
                message_bytes_max=endpoint.limits.message_bytes_max,
                counters=endpoint.counters,
            )
            self.receiver.grant_credit(endpoint.window_records(), now_s)
            self.stream = frame.stream
            endpoint.on_routed(self, self.address)
        self.receiver.acknowledge_by(now_s)
        self.send_frame(wire.KeyAck())
        self._maybe_up(now_s)

    def _on_key_ack(self, now_s: float) -> None:
        if not self._has_key_ack and self.state is State.KEYING:
            self._has_key_ack = True
            self._retry_at_s = NEVER_S
            self._maybe_up(now_s)

    def _maybe_up(self, now_s: float) -> None:
        if self.state is State.KEYING and self.receiver is not None and self._has_key_ack:
            self.state = State.UP
            self.was_up = True
            self._send_ping(now_s)
            self._endpoint.on_up(self)

    def on_fragments(self, header: wire.DataHeader, batch: memoryview, now_s: float) -> bool:
        """Process neighbouring fragments of one record; return False if they are malformed."""
        receiver = self.receiver
        if receiver is None:
            return True
        self.data_heard_at_s = now_s
        is_valid = receiver.on_fragments(header, batch, now_s)
        self.wake_at_s = min(self.wake_at_s, receiver.ack_at_s)
        return is_valid

    def resume(self, now_s: float) -> None:
        """Continue with messages that waited for the receive budget, and renew the credit."""
        if self.receiver is not None:
            self.receiver.consume()
            self.receiver.grant_credit(self._endpoint.window_records(), now_s)
            self.touch()

    # ---- sending ------------------------------------------------------------------------------------------------

    def note_published(self, last_record: int, ticket: Ticket, now_s: float) -> None:
        """Follow a message that was published to this peer, up to its last record."""
        if not self.pending:
            self.progress_at_s = now_s
        if self.sender is not None and self.sender.is_idle:
            self.sender.rate.on_app_limited()
        self.pending.append((last_record, ticket))

    def send_frame(self, frame: wire.Frame) -> None:
        """Queue a control frame."""
        self._frames.append(wire.encode_frame(frame))
        self.touch()

    def _send_ping(self, now_s: float) -> None:
        self._ping_token += 1
        transmissions = 0 if self.sender is None else self.sender.transmissions
        self._pings[self._ping_token] = now_s, transmissions
        self._pings.pop(self._ping_token - PINGS_MAX, None)
        self.send_frame(wire.Ping(self._ping_token))

    def poll(self, now_s: float) -> list[Transmit]:
        """Return the datagrams to send now: a bounded number of data bursts, then control."""
        out: list[Transmit] = []
        if self.state in (State.INIT_SENT, State.RESPONDED):
            self._poll_handshake(now_s, out)
        else:
            self._check_timers(now_s)
            if self.sender is not None and self.state in (State.UP, State.CLOSING):
                self._poll_data(self.sender, now_s, out)
            self._poll_control(now_s, out)
        self.wake_at_s = self._deadline_s(now_s)
        return out

    def _poll_handshake(self, now_s: float, out: list[Transmit]) -> None:
        if now_s - self._began_at_s > ATTEMPT_S:
            self.end("no answer", now_s)
        elif now_s >= self._retry_at_s:
            if self.state is State.RESPONDED:  # only a repeated INIT is answered again
                self._responded_at_s = now_s
                self._retry_at_s = NEVER_S
            else:
                self._attempts += 1
                self._back_off(now_s)
            self._emit_control(self._first_datagram, out)

    def _back_off(self, now_s: float) -> None:
        self._retry_at_s = now_s + max(self._retry_s, self.rtt.smoothed_s)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _emit_control(self, datagram: bytes, out: list[Transmit]) -> None:
        counters = self._endpoint.counters
        counters.control_bytes_sent += len(datagram)
        counters.udp_bytes_sent += len(datagram)
        counters.datagrams_sent += 1
        out.append(Transmit(self.address, [datagram], len(datagram)))

    def _check_timers(self, now_s: float) -> None:
        limits = self._endpoint.limits
        if self.receiver is not None and self.receiver.error:
            logger.warning("%s broke the protocol: %s", self.peer, self.receiver.error)
            self.give_up("protocol error", now_s)
        elif now_s - self.heard_at_s > limits.down_s:
            self.give_up("timeout", now_s)
        elif now_s >= self._retry_at_s and self.state is State.CLOSING:
            self._retry_at_s = now_s + min(self.rtt.probe_timeout_s, CLOSE_RETRY_MAX_S)
            self._attempts += 1
            if self._attempts > CLOSE_ATTEMPTS:
                self.end("closed", now_s)
            else:
                self.send_frame(wire.Close(REASON_LEFT))
        elif now_s >= self._retry_at_s:
            self._frames.append(self._key_frame)
            self._back_off(now_s)
        if self.state is State.UP and now_s - self._control_sent_at_s >= limits.heartbeat_s:
            self._send_ping(now_s)

    def _poll_data(self, sender: Sender, now_s: float, out: list[Transmit]) -> None:
        item = sender.on_timer(now_s, self.address)
        if item is not None:
            self._send_ping(now_s)
        for _ in range(BURSTS_PER_POLL):
            item = item or sender.next_item(now_s, self.address)
            if item is None:
                break
            if isinstance(item, Transmit):
                out.append(item)
            else:
                self._frames.append(wire.encode_frame(item))
            item = None

    def _poll_control(self, now_s: float, out: list[Transmit]) -> None:
        receiver = self.receiver
        ack_at_s = NEVER_S if receiver is None else receiver.ack_at_s
        if receiver is not None and (now_s >= ack_at_s or (self._frames and ack_at_s < NEVER_S)):
            # The ACK comes first: nobody reads it behind a CLOSE, and messages that came would count as undelivered.
            self._frames.insert(0, wire.encode_frame(receiver.make_ack(now_s)))
        while self._frames and self._channel is not None:
            plaintext = self._frames.pop(0)
            while self._frames and len(plaintext + self._frames[0]) <= wire.CONTROL_PLAINTEXT_MAX:
                plaintext += self._frames.pop(0)
            counter = self._channel.next_counter()
            header = wire.HEADER.pack(wire.CONTROL, 0, 0, 0, self._remote_index, counter)
            self._control_sent_at_s = now_s
            self._emit_control(self._channel.seal(counter, header, plaintext), out)

    def _deadline_s(self, now_s: float) -> float:
        if self.state is State.DOWN:
            return NEVER_S
        if self.state in (State.INIT_SENT, State.RESPONDED):
            return min(self._retry_at_s, self._began_at_s + ATTEMPT_S + 0.001)
        if self._frames:
            return now_s
        limits = self._endpoint.limits
        deadline_s = min(self._retry_at_s, self.heard_at_s + limits.down_s + 0.001)
        if self.state is State.UP:
            deadline_s = min(deadline_s, self._control_sent_at_s + limits.heartbeat_s)
        if self.sender is not None and self.state in (State.UP, State.CLOSING):
            deadline_s = min(deadline_s, self.sender.deadline_s())
        return deadline_s if self.receiver is None else min(deadline_s, self.receiver.ack_at_s)

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self, now_s: float) -> None:
        """Send a CLOSE; messages that are not acknowledged yet count as undelivered."""
        self.touch()
        if self.state in (State.KEYING, State.UP):
            self.state = State.CLOSING
            self._attempts = 0
            self._retry_at_s = now_s
            if self.sender is not None:
                self.sender.abandon()
        elif self.state is not State.CLOSING:
            self.end("closed", now_s)

    def give_up(self, reason: str, now_s: float) -> None:
        """End the session from this side, with one CLOSE in case the peer still listens."""
        self._frames = [wire.encode_frame(wire.Close(REASON_GIVEN_UP))]
        self.end(reason, now_s)

    def end(self, reason: str, now_s: float) -> None:
        """End at once, whatever the state."""
        if self.state is State.DOWN:
            return
        self.state = State.DOWN
        if self.sender is not None:
            self.sender.abandon()
        if self.receiver is not None:
            self.receiver.abandon()
            self.receiver = None
        self._poll_control(now_s, self._endpoint.final_datagrams)
        self._endpoint.on_down(self, reason, now_s)

    def fail_pending(self) -> tuple[Ticket, ...]:
        """Settle every message that the peer has not acknowledged as failed, and return their tickets."""
        tickets = tuple(ticket for _, ticket in self.pending)
        for ticket in tickets:
            ticket.settle(self.identity, delivered=False)
        self.pending.clear()
        return tickets

    def path_stats(self, sender: Sender) -> PeerStats:
        """Return the state of the path to the peer."""
        return PeerStats(
            peer=self.identity,
            srtt_s=self.rtt.smoothed_s,
            least_rtt_s=self.rtt.minimum_s,
            rate_bytes_per_s=sender.rate.rate_bytes_per_s,
            in_flight_bytes=sender.rate.bytes_in_flight,
            backlog_records=self._endpoint.log.head - sender.cumulative,
            loss_rate=sender.rate.loss_rate,
        )
