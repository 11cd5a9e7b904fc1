"""The life of one connection to one peer: every state and every transition is in this file.

Sans-IO: datagrams come in through `Session.on_response`, `Session.on_control` and `Session.on_fragments`, go out
through `Session.poll`, and time is an argument. ``docs/transport.md`` has the state table.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum
from typing import Final, Protocol

from . import wire
from .addressing import format_address
from .congestion import RttEstimator
from .crypto import PROLOGUE, AuthenticationError, ControlChannel, Entropy, Handshake, KeyChain, Mac1
from .discovery import ATTEMPT_S, RETRY_FIRST_S, RETRY_MAX_S
from .receiver import ReceiveBudget, Receiver
from .records import SendLog
from .sender import Burst, Sender, Sending
from .types import Address, Limits, Peer, PeerStats, Stats, Ticket, Transmit

logger = logging.getLogger(__name__)

INTRODUCTION_BYTES: Final = (
    wire.INIT_BYTES - wire.HEADER_BYTES - 32 - wire.TAG_BYTES - wire.MAC1_BYTES
)
CLOSE_ATTEMPTS: Final = 5
CLOSE_RETRY_MAX_S: Final = 0.5
PINGS_MAX: Final = 16
BURSTS_PER_POLL: Final = 16
RESPONSE_INTERVAL_S: Final = RETRY_FIRST_S / 2  # a genuine INIT is repeated half as often at most

REASON_LEFT: Final = 0
REASON_DUPLICATE: Final = 1
REASON_GIVEN_UP: Final = 2


class State(Enum):
    """The state of a session."""

    INIT_SENT = "init sent"  # an INIT was sent and no answer has come
    RESPONDED = "responded"  # an INIT was answered; nothing proves yet that it was no recording
    KEYING = "keying"  # both sides are authenticated; sender keys are on their way
    UP = "up"  # each side has the other's sender key: messages flow
    CLOSING = "closing"  # a CLOSE was sent
    DOWN = "down"  # over; the endpoint forgets the session


class Context(Protocol):
    """The endpoint as its sessions and incoming handshakes use it."""

    limits: Limits
    log: SendLog
    budget: ReceiveBudget
    counters: Stats
    entropy: Entropy
    secret: bytes
    mac1: Mac1
    keys: KeyChain
    node_id: int
    incarnation: int
    stream: int
    advertise: str

    def wall_ms(self, now_s: float) -> int:
        """Return the time since the epoch, in milliseconds, by this node's clock."""

    def window_records(self) -> int:
        """Return the credit that each active sender gets now."""

    def on_identified(self, session: Session, now_s: float) -> bool:
        """Take note of the peer's identity; return False to refuse the peer."""

    def on_stream(self, session: Session) -> None:
        """Route the peer's records to its session."""

    def on_up(self, session: Session) -> None:
        """Report that messages flow."""

    def on_moved(self, session: Session, address: Address) -> None:
        """Take note of the peer's new address."""

    def on_members(self, addresses: tuple[str, ...]) -> None:
        """Take note of other nodes that the peer has named."""

    def deliver(self, session: Session, tag: int, payload: memoryview) -> None:
        """Put a complete message into the receive queue."""

    def on_down(self, session: Session, reason: str, now_s: float) -> None:
        """Report that the session has ended."""


class Session:
    """One connection, from the INIT to the end."""

    def __init__(self, context: Context, index: int, address: Address, now_s: float) -> None:
        self._context = context
        self.index = index  # number of the session in the control datagrams sent to this node
        self.address = address  # source of the peer's latest datagrams
        self.target: Address | None = (
            None  # the address that the INIT was sent to, None if the peer sent it
        )
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
        self.started_at_s = now_s
        self.heard_at_s = now_s  # when the peer's latest control datagram arrived
        self.data_heard_at_s = float("-inf")  # when the peer's latest data datagram arrived
        self.progress_at_s = now_s  # when the peer last acknowledged a record
        self.wake_at_s = float("-inf")  # when `poll` has something to do
        self._handshake: Handshake | None = None
        self._first_datagram = b""
        self._attempts = 0
        self._responded_at_s = float("-inf")
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s: float | None = None
        self._remote_index = 0
        self._channel: ControlChannel | None = None
        self._frames: list[bytes] = []
        self._control_sent_at_s = now_s
        self._ack_counter = -1
        self._pings: dict[int, float] = {}  # sending times of the latest PINGs, by token
        self._ping_token = 0
        self._key_frame = b""
        self._has_key_ack = False
        self._keyed_at_s = now_s
        self._close_reason = REASON_LEFT
        self._closes = 0

    # ---- handshake ----------------------------------------------------------------------------------------------

    def start_initiator(self, now_s: float) -> None:
        """Start a handshake with ``address``."""
        self.target = self.address
        header = wire.HEADER.pack(wire.INIT, 0, 0, 0, self.index, self._context.wall_ms(now_s))
        self._handshake = Handshake(self._context.secret, PROLOGUE + header, self._context.entropy)
        introduction = self._introduction().encode(INTRODUCTION_BYTES)
        message = self._handshake.write_init(introduction)
        self._first_datagram = self._context.mac1.sign(header + message)
        self._retry_at_s = now_s

    def start_responder(self, init: bytes, handshake: Handshake, remote: wire.Introduction) -> None:
        """Answer an INIT that proved knowledge of the secret."""
        self.state = State.RESPONDED
        self.init = init
        self._remote_index = remote.session
        self._identify(remote)
        header = wire.HEADER.pack(wire.RESPONSE, 0, 0, 0, remote.session, 0)
        message = handshake.write_response(self._introduction().encode())
        self._first_datagram = self._context.mac1.sign(header + message)
        first, second = handshake.split()
        self._channel = ControlChannel(second, first)
        self._retry_at_s = self.started_at_s

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
        """Process the RESPONSE to this session's INIT; raise `AuthenticationError` or `WireError` if it is none."""
        if self.state is not State.INIT_SENT or self._handshake is None:
            return
        self.touch()
        if not self._context.mac1.verify(datagram):
            raise AuthenticationError("a RESPONSE without a valid mac1")
        message = datagram[wire.HEADER_BYTES : -wire.MAC1_BYTES]
        remote = wire.Introduction.decode(self._handshake.read_response(message))
        self._channel = ControlChannel(*self._handshake.split())
        self._handshake = None
        self._remote_index = remote.session
        self._identify(remote)
        if self._attempts == 1:
            self.rtt.add_sample(now_s - self.started_at_s, now_s)
        self._begin_keying(now_s)

    def _identify(self, remote: wire.Introduction) -> None:
        self.peer = Peer(remote.node_id, remote.incarnation, format_address(self.address))
        self.advertised = remote.advertise

    def _introduction(self) -> wire.Introduction:
        context = self._context
        return wire.Introduction(
            context.node_id, context.incarnation, self.index, context.advertise
        )

    def _begin_keying(self, now_s: float) -> None:
        self.state = State.KEYING
        self.heard_at_s = now_s
        if not self._context.on_identified(self, now_s):
            self.give_up("duplicate", REASON_DUPLICATE, now_s)
            return
        self._keyed_at_s = now_s
        start = self._context.log.head
        context = self._context
        self.sender = Sender(context.log, self.index, start, self.rtt, context.counters)
        key, iv = self._context.keys.key_of(start)
        self._key_frame = wire.encode_frame(wire.Key(self._context.stream, start, key, iv))
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = now_s

    # ---- receiving ----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Peer:
        """The peer's identity, once the handshake has revealed it."""
        if self.peer is None:
            raise RuntimeError("the peer of this session is not known yet")
        return self.peer

    def _connected_sender(self) -> Sender:
        if self.sender is None:
            raise RuntimeError("the peer of this session is not connected yet")
        return self.sender

    @property
    def is_established(self) -> bool:
        """Whether the peer has proved its identity and has not left."""
        return self.state in (State.KEYING, State.UP, State.CLOSING)

    def touch(self) -> None:
        """Have `poll` called at once."""
        self.wake_at_s = float("-inf")

    def on_control(
        self, counter: int, header: bytes, body: memoryview, address: Address, now_s: float
    ) -> None:
        """Process one control datagram; raise `AuthenticationError` or `WireError` if it is forged or malformed."""
        if self._channel is None:
            raise AuthenticationError("control before the handshake")
        highest = self._channel.highest_received
        frames = wire.decode_frames(self._channel.open(counter, header, body))
        self.heard_at_s = now_s
        if address != self.address and counter > highest and self.is_established:
            self._context.on_moved(self, address)
        if self.state is State.RESPONDED:
            if not any(isinstance(frame, wire.Key) for frame in frames):
                if any(isinstance(frame, wire.Close) for frame in frames):
                    self.end("left", now_s)
                return
            # The proof of the peer's presence also shows its address.
            self.address = address
            peer = self.identity
            self.peer = Peer(peer.id, peer.incarnation, format_address(address))
        for frame in frames:
            self._on_frame(frame, counter, now_s)
        self.touch()

    def _on_frame(self, frame: wire.Frame, counter: int, now_s: float) -> None:
        if self.state is State.DOWN:
            return
        match frame:
            case wire.Ack():
                self._on_ack(frame, counter, now_s)
            case wire.Ping(token):
                self._frames.append(wire.encode_frame(wire.Pong(token)))
                if self.receiver is not None:
                    self.receiver.acknowledge_by(now_s)
            case wire.Pong(token):
                if token in self._pings:
                    self.rtt.add_sample(now_s - self._pings.pop(token), now_s)
            case wire.Key():
                self._on_key(frame, now_s)
            case wire.KeyAck():
                self.rtt.set_guess(now_s - self._keyed_at_s)
                self._on_key_ack(now_s)
            case wire.Skip(first, count):
                if self.receiver is not None:
                    self.receiver.skip(first, count, now_s)
            case wire.Close(reason):
                self._frames.append(wire.encode_frame(wire.CloseAck()))
                self.end("left" if reason == REASON_LEFT else "dropped by the peer", now_s)
            case wire.CloseAck():
                if self.state is State.CLOSING:
                    self.end("closed", now_s)
            case wire.Members(addresses):
                self._context.on_members(addresses)

    def _on_ack(self, ack: wire.Ack, counter: int, now_s: float) -> None:
        self._on_key_ack(now_s)  # only a peer that has the key sends an ACK
        if self.sender is None or self.state is State.CLOSING or counter < self._ack_counter:
            return  # a closing session has already reported its undelivered messages
        self._ack_counter = counter
        before = self.sender.cumulative
        self.sender.on_ack(ack, now_s)
        cumulative = self.sender.cumulative
        if cumulative > before:
            self.progress_at_s = now_s
        while self.pending and self.pending[0][0] < cumulative:
            self.pending.popleft()[1].settle(self.identity, delivered=True)

    def _on_key(self, frame: wire.Key, now_s: float) -> None:
        if self.state is State.RESPONDED:
            self._begin_keying(now_s)
            if not self.is_established:
                return
        if self.receiver is None:
            self.receiver = Receiver(
                frame.first_record,
                KeyChain(frame.key, frame.iv, frame.first_record),
                self._context.budget,
                self._deliver,
                self._context.limits.message_bytes_max,
                self._context.counters,
            )
            self.receiver.grant_credit(self._context.window_records(), now_s)
            self.stream = frame.stream
            self._context.on_stream(self)
        self.receiver.acknowledge_by(now_s)
        self._frames.append(wire.encode_frame(wire.KeyAck()))
        self._maybe_up(now_s)

    def _on_key_ack(self, now_s: float) -> None:
        if not self._has_key_ack and self.state is State.KEYING:
            self._has_key_ack = True
            self._retry_at_s = None
            self._maybe_up(now_s)

    def _maybe_up(self, now_s: float) -> None:
        if self.state is State.KEYING and self.receiver is not None and self._has_key_ack:
            self.state = State.UP
            self.was_up = True
            self._send_ping(now_s)
            self._context.on_up(self)

    def on_fragments(self, header: wire.DataHeader, batch: memoryview, now_s: float) -> bool:
        """Process neighbouring fragments of one record; return False if they are malformed."""
        receiver = self.receiver
        if receiver is None or not self.is_established:
            return True
        self.data_heard_at_s = now_s
        is_valid = receiver.on_fragments(header, batch, now_s)
        if receiver.ack_at_s is not None:
            self.wake_at_s = min(self.wake_at_s, receiver.ack_at_s)
        return is_valid

    def resume(self, now_s: float) -> None:
        """Continue with messages that waited for room in the receive budget, and renew the credit."""
        if self.receiver is not None:
            self.receiver.consume()
            self.receiver.grant_credit(self._context.window_records(), now_s)
            self.touch()

    def _deliver(self, tag: int, payload: memoryview) -> None:
        self._context.deliver(self, tag, payload)

    # ---- sending ------------------------------------------------------------------------------------------------

    def note_published(self, last_record: int, ticket: Ticket, now_s: float) -> None:
        """Follow a message that was published to this peer, up to its last record."""
        if not self.pending:
            self.progress_at_s = now_s
        sender = self._connected_sender()
        if sender.is_idle:
            sender.rate.on_app_limited()
        self.pending.append((last_record, ticket))

    def is_lagging(self, now_s: float) -> bool:
        """Return whether messages wait and the peer has acknowledged nothing for too long."""
        return bool(self.pending) and now_s - self.progress_at_s > self._context.limits.lag_s

    def poll(self, now_s: float) -> list[Transmit]:
        """Return the datagrams to send now: a bounded number of data bursts, then control."""
        if self.state in (State.INIT_SENT, State.RESPONDED):
            out = self._poll_handshake(now_s)
        else:
            out = []
            self._check_timers(now_s, out)
            if self.sender is not None and self.state in (State.UP, State.CLOSING):
                self._poll_data(self.sender, now_s, out)
            self._poll_control(now_s, out)
        self.wake_at_s = self._deadline_s(now_s)
        return out

    def _poll_handshake(self, now_s: float) -> list[Transmit]:
        if now_s - self.started_at_s > ATTEMPT_S:
            self.end("no answer", now_s)
        if self.state is State.DOWN or self._retry_at_s is None or now_s < self._retry_at_s:
            return []
        if self.state is State.RESPONDED:
            self._responded_at_s = now_s
            self._retry_at_s = (
                None  # only a repeated INIT is answered again: one datagram out for each one in
            )
        else:
            self._attempts += 1
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        return [self._control_transmit(self._first_datagram)]

    def _control_transmit(self, datagram: bytes) -> Transmit:
        self._context.counters.control_bytes_sent += len(datagram)
        return Transmit(self.address, [datagram], len(datagram))

    def _check_timers(self, now_s: float, out: list[Transmit]) -> None:
        if self.state is State.DOWN:
            return
        if self.receiver is not None and self.receiver.error:
            logger.warning("%s broke the protocol: %s", self.peer, self.receiver.error)
            self.give_up("protocol error", REASON_GIVEN_UP, now_s)
            return
        if now_s - self.heard_at_s > self._context.limits.down_s:
            self.give_up("timeout", REASON_GIVEN_UP, now_s)
            return
        if self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._retry(now_s)
        if self.sender is not None and self.state in (State.UP, State.CLOSING):
            probes, is_probe_due = self.sender.on_timer(now_s)
            for item in probes:
                self._emit(item, out)
            if is_probe_due:
                self._send_ping(now_s)
        if (
            self.state is State.UP
            and now_s - self._control_sent_at_s >= self._context.limits.heartbeat_s
        ):
            self._send_ping(now_s)

    def _retry(self, now_s: float) -> None:
        """Repeat the frame that the peer has not confirmed: KEY or CLOSE."""
        self._retry_at_s = now_s + max(self._retry_s, self.rtt.probe_timeout_s)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        if self.state is State.CLOSING:
            self._retry_at_s = now_s + min(self.rtt.probe_timeout_s, CLOSE_RETRY_MAX_S)
            self._closes += 1
            if self._closes > CLOSE_ATTEMPTS:
                self.end("closed", now_s)
            else:
                self._frames.append(wire.encode_frame(wire.Close(self._close_reason)))
        else:
            self._frames.append(self._key_frame)

    def _send_ping(self, now_s: float) -> None:
        self._ping_token += 1
        self._pings[self._ping_token] = now_s
        self._pings.pop(self._ping_token - PINGS_MAX, None)
        self.send_frame(wire.Ping(self._ping_token))

    def _poll_data(self, sender: Sender, now_s: float, out: list[Transmit]) -> None:
        for _ in range(BURSTS_PER_POLL):
            item = sender.next_item(now_s)
            if item is None:
                return
            self._emit(item, out)

    def _emit(self, item: Sending, out: list[Transmit]) -> None:
        if isinstance(item, Burst):
            out.append(Transmit(self.address, item.slices, item.segment_bytes))
        else:
            self._frames.append(wire.encode_frame(item))

    def _poll_control(self, now_s: float, out: list[Transmit]) -> None:
        receiver = self.receiver
        ack_at_s = None if receiver is None else receiver.ack_at_s
        if receiver is not None and ack_at_s is not None and (self._frames or now_s >= ack_at_s):
            # Before a CLOSE, after which the peer reads nothing, so that received messages count as delivered.
            self._frames.insert(0, wire.encode_frame(receiver.make_ack(now_s)))
        while self._frames and self._channel is not None:
            plaintext = b""
            while (
                self._frames and len(plaintext) + len(self._frames[0]) <= wire.CONTROL_PLAINTEXT_MAX
            ):
                plaintext += self._frames.pop(0)
            counter = self._channel.next_counter()
            header = wire.HEADER.pack(wire.CONTROL, 0, 0, 0, self._remote_index, counter)
            self._control_sent_at_s = now_s
            out.append(self._control_transmit(self._channel.seal(counter, header, plaintext)))

    def send_frame(self, frame: wire.Frame) -> None:
        """Queue a control frame."""
        self._frames.append(wire.encode_frame(frame))
        self.touch()

    def _deadline_s(self, now_s: float) -> float:
        if self.state is State.DOWN:
            return float("inf")
        if self.state in (State.INIT_SENT, State.RESPONDED):
            expires_at_s = self.started_at_s + ATTEMPT_S + 0.001
            return expires_at_s if self._retry_at_s is None else min(self._retry_at_s, expires_at_s)
        if self._frames:
            return now_s
        at_s = self.heard_at_s + self._context.limits.down_s + 0.001
        if self.state is State.UP:
            at_s = min(at_s, self._control_sent_at_s + self._context.limits.heartbeat_s)
        if self._retry_at_s is not None:
            at_s = min(at_s, self._retry_at_s)
        if self.receiver is not None and self.receiver.ack_at_s is not None:
            at_s = min(at_s, self.receiver.ack_at_s)
        if self.sender is not None and self.state in (State.UP, State.CLOSING):
            at_s = min(at_s, self.sender.deadline_s())
        return at_s

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self, now_s: float) -> None:
        """Send a CLOSE; messages that are not acknowledged yet count as undelivered."""
        self.touch()
        if self.state in (State.KEYING, State.UP):
            self.state = State.CLOSING
            self._retry_at_s = now_s
            if self.sender is not None:
                self.sender.abandon()
        elif self.state is not State.CLOSING:
            self.end("closed", now_s)

    def give_up(self, reason: str, code: int, now_s: float) -> None:
        """End the session from this side, with one CLOSE in case the peer still listens."""
        self._frames = [wire.encode_frame(wire.Close(code))]
        self.end(reason, now_s)

    def final_datagrams(self, now_s: float) -> list[Transmit]:
        """Return the control datagrams that were still queued when the session went down."""
        out: list[Transmit] = []
        self.receiver = None
        self._poll_control(now_s, out)
        return out

    def end(self, reason: str, now_s: float) -> None:
        """End at once, whatever the state."""
        if self.state is State.DOWN:
            return
        self.state = State.DOWN
        if self.sender is not None:
            self.sender.abandon()
        if self.receiver is not None:
            self.receiver.abandon()
        self._context.on_down(self, reason, now_s)

    def fail_pending(self) -> tuple[Ticket, ...]:
        """Settle every message that the peer has not acknowledged as failed, and return their tickets."""
        tickets = tuple(ticket for _, ticket in self.pending)
        for ticket in tickets:
            ticket.settle(self.identity, delivered=False)
        self.pending.clear()
        return tickets

    def path_stats(self) -> PeerStats:
        """Return the state of the path to a connected peer."""
        sender = self._connected_sender()
        rate = sender.rate
        return PeerStats(
            peer=self.identity,
            srtt_s=self.rtt.smoothed_s,
            rate_bytes_per_s=rate.rate_bytes_per_s,
            window_bytes=rate.window_bytes,
            in_flight_bytes=rate.bytes_in_flight,
            credit_records=max(0, sender.limit - sender.cursor),
            backlog_records=sender.backlog_records,
            loss_rate=rate.loss_rate,
        )

    def share_link(self, paths: int) -> None:
        """Adapt to the number of paths that share the node's link."""
        self._connected_sender().rate.share_link(paths)
