"""The life of one connection to one peer: every state and every transition; ``docs/transport.md`` has the table."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from . import wire
from .addressing import format_address
from .congestion import NEVER_S, RttEstimator
from .crypto import AuthenticationError, ControlChannel, Handshake, RepeatedError
from .discovery import ATTEMPT_S, RETRY_FIRST_S, RETRY_MAX_S
from .receiver import Receiver
from .sender import Sender
from .types import Address, Peer, PeerStats, Received, Transmit

logger = logging.getLogger(__name__)

CLOSE_ATTEMPTS: Final = 5
CLOSE_RETRY_MAX_S: Final = 0.5
PINGS_MAX: Final = 16
ADDRESS_BYTES_MAX: Final = 64  # of an advertised one, so that 16 fit into a frame
BURSTS_PER_POLL: Final = 16
RESPONSE_INTERVAL_S: Final = RETRY_FIRST_S / 2  # a genuine INIT is repeated half as often at most
# RESPONSEs to one INIT, which may come from several sources: ten at once, and ten in a second.
RESPONSES_AT_ONCE: Final = 10
RESPONSE_SHARE_S: Final = 0.1

REASON_LEFT: Final = 0
REASON_GIVEN_UP: Final = 2


class State(Enum):
    """The state of a session."""

    INIT_SENT = "init sent"  # an INIT was sent and no answer has come
    RESPONDED = "responded"  # an INIT was answered; nothing proves yet that its sender is there
    KEYING = "keying"  # both sides are authenticated; sender keys are on their way
    UP = "up"  # each side has the other's sender key: messages flow
    CLOSING = "closing"  # a CLOSE was sent
    DOWN = "down"  # over; the endpoint forgets the session


@dataclass(slots=True)
class Retry:
    """A datagram or frame that is sent again, less and less often, until the peer answers."""

    data: bytes
    began_at_s: float
    due_at_s: float  # infinity once the peer has answered
    sent_at_s: float = -NEVER_S
    attempts: int = 0
    wait_s: float = RETRY_FIRST_S  # before the data leaves again

    def on_sent(self, now_s: float, wait_s: float) -> None:
        """Note that the data leaves now, and again after this time."""
        self.attempts += 1
        self.sent_at_s = now_s
        self.due_at_s = now_s + wait_s
        self.wait_s = min(2 * self.wait_s, RETRY_MAX_S)


@dataclass(slots=True)
class ControlStream:
    """The control frames of one session, both ways, and the PINGs among them that wait for a PONG."""

    sent_at_s: float  # when the latest datagram left
    heard_at_s: float  # when the peer's latest datagram arrived
    channel: ControlChannel | None = None  # once the handshake has given the keys
    remote_index: int = 0  # number of the session at the peer
    frames: list[bytes] = field(default_factory=list)  # encoded, and not sent yet
    # By token: sending time of the latest PINGs, and the transmissions of data before each.
    pings: dict[int, tuple[float, int]] = field(default_factory=dict)
    ping_token: int = 0

    def ping(self, transmissions: int, now_s: float) -> None:
        """Queue a PING, which leaves after so many transmissions of data."""
        self.ping_token += 1
        self.pings[self.ping_token] = now_s, transmissions
        self.pings.pop(self.ping_token - PINGS_MAX, None)
        self.frames.append(wire.encode_frame(wire.Ping(self.ping_token)))

    def open(
        self, counter: int, header: bytes, body: memoryview, now_s: float
    ) -> tuple[list[wire.Frame], bool, bool]:
        """Return the frames of a datagram, whether none that was sent later has arrived, and whether it is new."""
        if self.channel is None:
            raise AuthenticationError("control before the handshake")
        is_new = True
        try:
            plaintext = self.channel.open(counter, header, body)
            self.heard_at_s = now_s
        except RepeatedError as error:
            is_new, plaintext = False, error.args[0]
        return wire.decode_frames(plaintext), counter == self.channel.highest_received, is_new

    def datagrams(self, now_s: float) -> Iterator[bytes]:
        """Yield the queued frames, as many as fit into each datagram."""
        while self.frames and self.channel is not None:
            plaintext = self.frames.pop(0)
            while self.frames and len(plaintext + self.frames[0]) <= wire.CONTROL_PLAINTEXT_MAX:
                plaintext += self.frames.pop(0)
            self.sent_at_s = now_s
            yield self.seal(plaintext)

    def seal(self, plaintext: bytes) -> bytes:
        """Return the next datagram, with these frames; raise `AuthenticationError` before the handshake."""
        if self.channel is None:
            raise AuthenticationError("no keys yet")
        counter = self.channel.next_counter()
        header = wire.HEADER.pack(wire.CONTROL, 0, 0, 0, self.remote_index, counter)
        return self.channel.seal(counter, header, plaintext)


class Session:
    """One connection, from the INIT to the end."""

    def __init__(self, endpoint: Any, index: int, address: Address, now_s: float) -> None:
        self._endpoint = endpoint  # the `Endpoint`, which imports this module
        self.index = index  # number of the session in the control datagrams sent to this node
        self.address = address  # of the peer; before it is established, of the latest INIT
        self.target: Address | None = None  # destination of this node's INIT, if the peer sent none
        self.init = b""  # the peer's INIT, to recognise a repetition
        self.state = State.INIT_SENT
        self.peer: Peer | None = None
        self.advertised = ""  # "host:port" at which others should reach the peer
        self.stream: int | None = None  # number of the peer's stream
        self.rtt = RttEstimator()
        self.sender = Sender(endpoint.log, index, self.rtt, endpoint.counters)
        self.receiver: Receiver | None = None
        self.control = ControlStream(now_s, now_s)
        self.was_up = False
        self.last_message = 0  # number of the latest message, counted over all peers
        self.wake_at_s = -NEVER_S  # when `poll` has something to do
        self._handshake: Handshake | None = None
        self._retry = Retry(b"", now_s, now_s)  # an INIT, RESPONSE or KEY without an answer
        self._key: Retry | None = None  # the KEY of a session whose peer's address is not proved
        self._ack_counter = -1

    def start_initiator(self, now_s: float) -> None:
        """Start a handshake with ``address``."""
        self.target = self.address
        self._handshake, init = self._endpoint.local.write_init(self.index, now_s)
        self._retry = Retry(init, now_s, now_s)

    def start_responder(
        self, init: bytes, handshake: Handshake, remote: wire.Introduction, now_s: float
    ) -> None:
        """Prepare the answer to an INIT that proved knowledge of the secret."""
        self.state = State.RESPONDED
        self.init = init
        response = self._endpoint.local.write_response(handshake, self.index, remote.session)
        self._retry = Retry(response, now_s, -NEVER_S)
        first, second = handshake.split()
        self._identify(remote, ControlChannel(second, first), now_s)

    def answer(self, address: Address, now_s: float) -> bool:
        """Send the RESPONSE to a source of the INIT; return False if none is due there."""
        # Every source gets its own: whoever delivers an INIT first, from elsewhere, does not delay its sender.
        retry = self._retry
        at_s = max(retry.due_at_s, now_s - (RESPONSES_AT_ONCE - 1) * RESPONSE_SHARE_S)
        is_late = address != self.address or now_s - retry.sent_at_s >= RESPONSE_INTERVAL_S
        is_due = at_s <= now_s and is_late
        if not (is_due and self._endpoint.is_answered(self.identity, address, now_s)):
            return False
        self.address = address
        retry.sent_at_s = now_s
        retry.due_at_s = at_s + RESPONSE_SHARE_S
        self._emit(retry.data, self._endpoint.final_datagrams)
        return True

    def on_response(self, datagram: bytes, now_s: float) -> None:
        """Process the RESPONSE to this session's INIT; raise `AuthenticationError` or `WireError` for anything else."""
        if self._handshake is None:
            return
        remote = self._endpoint.local.read_response(self._handshake, datagram)
        self._identify(remote, ControlChannel(*self._handshake.split()), now_s)
        self._handshake = None
        if self._retry.attempts == 1:  # after a repetition it is unknown which INIT was answered
            self.rtt.add_sample(now_s - self._retry.began_at_s, now_s)
        self._begin_keying(now_s)

    def _identify(self, remote: wire.Introduction, channel: ControlChannel, now_s: float) -> None:
        self.control = ControlStream(now_s, now_s, channel, remote.session)
        self.peer = Peer(remote.node_id, remote.incarnation, format_address(self.address))
        self.advertised = remote.advertise[:ADDRESS_BYTES_MAX]

    def _begin_keying(self, now_s: float) -> None:
        self.state = State.KEYING
        self.wake()
        if not self._endpoint.on_identified(self, now_s):
            self.give_up("duplicate", now_s)
            return
        self._retry = self._key or self._make_key(now_s)

    def _make_key(self, now_s: float) -> Retry:
        # A peer gets the records from the log's head on: the earlier ones were published before it was there.
        endpoint = self._endpoint
        start = endpoint.log.head
        self.sender = Sender(endpoint.log, self.index, self.rtt, endpoint.counters)
        key = wire.Key(endpoint.sealer.stream, start, *endpoint.sealer.keys.key_of(start))
        return Retry(wire.encode_frame(key), now_s, now_s)

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

    def wake(self, at_s: float = -NEVER_S) -> None:
        """Have `poll` called at this time at the latest, by default at once."""
        self.wake_at_s = min(self.wake_at_s, at_s)

    def on_control(
        self, counter: int, header: bytes, body: memoryview, address: Address, now_s: float
    ) -> None:
        """Process one control datagram; raise `AuthenticationError` or `WireError` if it is forged or malformed."""
        silence_s = now_s - self.control.heard_at_s
        frames, is_newest, is_new = self.control.open(counter, header, body, now_s)
        if self.state is State.UP and silence_s > 5 * self._endpoint.limits.heartbeat_s:
            self.rtt.note_pause(now_s)  # heartbeats come in time whatever the round trip
        # An authentic datagram may show its sender's address, even if a copy from elsewhere has overtaken it.
        is_half_open = self.state is State.RESPONDED
        if is_half_open:
            frames = self._prove(frames, address, len(body), now_s)
        elif address != self.address:
            if is_newest and wire.Pong(self._path_token(address)) in frames:
                self.address = address
                self._endpoint.sessions.route(self)
            else:
                self._probe_path(address, len(body), now_s)
        if not (is_new or is_half_open):
            raise AuthenticationError("a control datagram was repeated")
        for frame in frames:
            if self.state is not State.DOWN:
                self._on_frame(frame, counter, now_s)
        self.wake()

    def _prove(
        self, frames: list[wire.Frame], address: Address, nbytes: int, now_s: float
    ) -> list[wire.Frame]:
        """Return the frames to process: none until the peer has proved where it is, and that its INIT was no recording.

        Its KEY proves the second, a PONG the first: a datagram may be a copy from another address.
        """
        for frame in frames:
            if isinstance(frame, wire.Key) and self._key is None:
                self._key = self._make_key(now_s)
                self._on_key(frame, now_s)
            elif isinstance(frame, wire.Close):
                self.end("left", now_s)
                return []
        if self._key is None or wire.Pong(self._path_token(address)) not in frames:
            self._probe_path(address, nbytes, now_s)
            return []
        self.address = address
        self.peer = replace(self.identity, address=format_address(address))
        self._begin_keying(now_s)
        self._endpoint.sessions.route(self)
        return frames

    def _path_token(self, address: Address) -> int:
        return int(self._endpoint.local.path_token(self.index, address))

    def _probe_path(self, address: Address, nbytes: int, now_s: float) -> None:
        """Ask whether the peer is at this address, from which a datagram with so many sealed bytes has come.

        The source may be false, so nothing else goes there, and at most three times as much (RFC 9000, section 8.2).
        """
        plaintext = wire.encode_frame(wire.Ping(self._path_token(address)))
        if self.is_established:
            self._endpoint.sessions.route(self, address)
        elif self._key is None or self.receiver is None:
            return
        else:
            plaintext += self._key.data + wire.encode_frame(wire.KeyAck())
            plaintext += wire.encode_frame(self.receiver.make_ack(now_s))
        datagram = self.control.seal(plaintext)
        if len(datagram) <= 3 * (wire.HEADER_BYTES + nbytes):
            self._emit(datagram, self._endpoint.final_datagrams, address)

    def _on_frame(self, frame: wire.Frame, counter: int, now_s: float) -> None:
        receiver = self.receiver
        match frame:
            case wire.Ack():
                self._on_ack(frame, counter, now_s)
            case wire.Ping(token):
                pong = wire.encode_frame(wire.Pong(token))
                self.control.frames.insert(0, pong)  # next to the ACK
                if receiver is not None:
                    receiver.acknowledge_by(now_s)
            case wire.Pong(token) if ping := self.control.pings.pop(token, None):
                sent_at_s, transmissions = ping
                self.rtt.add_sample(now_s - sent_at_s, now_s)
                self.sender.on_pong(transmissions, now_s)
            case wire.Key():
                self._on_key(frame, now_s)
            case wire.KeyAck():
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
        if self.state is State.CLOSING or counter < self._ack_counter:
            return  # closing: undelivered messages are reported already; an older ACK: a newer one says more
        self._ack_counter = counter
        self.sender.on_ack(ack, now_s)
        self.sender.settle_messages(self.identity, self.sender.cumulative, delivered=True)

    def _on_key(self, frame: wire.Key, now_s: float) -> None:
        if self.receiver is None:
            endpoint = self._endpoint
            self.receiver = Receiver(frame, endpoint.budget, self._deliver, endpoint.counters)
            self.receiver.grant_credit(endpoint.window_records(), now_s)
            self.stream = frame.stream
            if self.is_established:
                endpoint.sessions.route(self)
        self.receiver.acknowledge_by(now_s)
        self.send_frame(wire.KeyAck())
        self._maybe_up(now_s)

    def _deliver(self, tag: int, payload: memoryview) -> None:
        counters = self._endpoint.counters
        counters.messages_received += 1
        counters.payload_bytes_received += len(payload)
        self.last_message = counters.messages_received
        self._endpoint.messages.append(Received(self.identity, tag, payload))

    def _on_key_ack(self, now_s: float) -> None:
        if self.state is State.KEYING:
            # The first keys go: whoever finds them in memory later could read what was sealed under them.
            self._retry = Retry(b"", self._retry.began_at_s, NEVER_S)
            self._key = None
            self._maybe_up(now_s)

    def _maybe_up(self, now_s: float) -> None:
        has_key_ack = self._retry.due_at_s == NEVER_S
        if self.state is State.KEYING and self.receiver is not None and has_key_ack:
            self.state = State.UP
            self.was_up = True
            self.control.ping(self.sender.transmissions, now_s)
            self._endpoint.on_up(self)

    def on_fragments(self, header: wire.DataHeader, batch: memoryview, now_s: float) -> bool:
        """Process neighbouring fragments of one record; return False if they are malformed."""
        receiver = self.receiver
        if receiver is None:
            return True
        is_valid = receiver.on_fragments(header, batch, now_s)
        self.wake_at_s = min(self.wake_at_s, receiver.ack_at_s)
        return is_valid

    def resume(self, window_records: int, now_s: float) -> None:
        """Continue with messages that waited for the receive budget, and renew the credit."""
        if self.receiver is not None:
            self.receiver.consume()
            self.receiver.grant_credit(window_records, now_s)
            self.wake()

    def send_frame(self, frame: wire.Frame) -> None:
        """Queue a control frame."""
        self.control.frames.append(wire.encode_frame(frame))
        self.wake()

    def excuse_silence(self, pause_s: float, now_s: float) -> None:
        """Do not count a pause of this process as silence of the peer."""
        self.control.heard_at_s = min(now_s, self.control.heard_at_s + pause_s)
        self.sender.excuse_silence(pause_s, now_s)

    def poll(self, now_s: float) -> list[Transmit]:
        """Return the datagrams to send now: a bounded number of data bursts, then control."""
        out: list[Transmit] = []
        if self.state in (State.INIT_SENT, State.RESPONDED):
            self._poll_handshake(now_s, out)
        else:
            self._check_timers(now_s)
            if self.state is State.UP:
                self._poll_data(now_s, out)
            self._poll_control(now_s, out)
        self.wake_at_s = self._deadline_s(now_s)
        return out

    def _poll_handshake(self, now_s: float, out: list[Transmit]) -> None:
        retry = self._retry
        if now_s - retry.began_at_s > ATTEMPT_S:
            if self.state is State.RESPONDED:
                self.discard()
            else:
                self.end("no answer", now_s)
        elif self.state is State.INIT_SENT and now_s >= retry.due_at_s:
            retry.on_sent(now_s, retry.wait_s)
            self._emit(retry.data, out)

    def _emit(self, datagram: bytes, out: list[Transmit], path: Address | None = None) -> None:
        counters = self._endpoint.counters
        counters.control_bytes_sent += len(datagram)
        counters.udp_bytes_sent += len(datagram)
        counters.datagrams_sent += 1
        out.append(Transmit(path or self.address, [datagram], len(datagram)))

    def _check_timers(self, now_s: float) -> None:
        limits, retry = self._endpoint.limits, self._retry
        if self.receiver is not None and self.receiver.error:
            logger.warning("%s broke the protocol: %s", self.peer, self.receiver.error)
            self.give_up("protocol error", now_s)
        elif now_s - self.control.heard_at_s > limits.down_s:
            self.give_up("timeout", now_s)
        elif now_s >= retry.due_at_s and self.state is State.CLOSING:
            if retry.attempts == CLOSE_ATTEMPTS:
                self.end("closed", now_s)
            else:
                self.control.frames.append(retry.data)
                retry.on_sent(now_s, min(self.rtt.probe_timeout_s, CLOSE_RETRY_MAX_S))
        elif now_s >= retry.due_at_s:
            self.control.frames.append(retry.data)
            retry.on_sent(now_s, max(retry.wait_s, self.rtt.smoothed_s))
        if self.state is State.UP and now_s - self.control.sent_at_s >= limits.heartbeat_s:
            self.control.ping(self.sender.transmissions, now_s)

    def _poll_data(self, now_s: float, out: list[Transmit]) -> None:
        item = self.sender.on_timer(now_s, self.address)
        if item is not None:
            self.control.ping(self.sender.transmissions, now_s)
        for _ in range(BURSTS_PER_POLL):
            item = item or self.sender.next_item(now_s, self.address)
            if item is None:
                break
            if isinstance(item, Transmit):
                out.append(self._endpoint.sealer.tagged(item) if self.sender.is_tagging else item)
            else:
                self.control.frames.append(wire.encode_frame(item))
            item = None

    def _poll_control(self, now_s: float, out: list[Transmit]) -> None:
        receiver, control = self.receiver, self.control
        ack_at_s = NEVER_S if receiver is None else receiver.ack_at_s
        if receiver is not None and (now_s >= ack_at_s or (control.frames and ack_at_s < NEVER_S)):
            # The ACK comes first: nobody reads it behind a CLOSE, and messages that came would count as undelivered.
            control.frames.insert(0, wire.encode_frame(receiver.make_ack(now_s)))
        for datagram in control.datagrams(now_s):
            self._emit(datagram, out)

    def _deadline_s(self, now_s: float) -> float:
        if self.state in (State.INIT_SENT, State.RESPONDED):
            due_at_s = NEVER_S if self.state is State.RESPONDED else self._retry.due_at_s
            return min(due_at_s, self._retry.began_at_s + ATTEMPT_S + 0.001)
        if self.control.frames:
            return now_s
        limits = self._endpoint.limits
        deadline_s = min(self._retry.due_at_s, self.control.heard_at_s + limits.down_s + 0.001)
        if self.state is State.UP:
            heartbeat_at_s = self.control.sent_at_s + limits.heartbeat_s
            deadline_s = min(deadline_s, heartbeat_at_s, self.sender.deadline_s())
        ack_at_s = NEVER_S if self.receiver is None else self.receiver.ack_at_s
        return float(min(deadline_s, ack_at_s))

    def close(self, now_s: float) -> None:
        """Send a CLOSE; messages that are not acknowledged yet count as undelivered."""
        self.wake()
        close = wire.encode_frame(wire.Close(REASON_LEFT))
        if self.state in (State.KEYING, State.UP):
            self.state = State.CLOSING
            self._retry = Retry(close, self._retry.began_at_s, now_s)
            self.sender.abandon()
        elif self.state is not State.CLOSING:
            # Who has the RESPONSE would wait for an answer to its KEY.
            self.control.frames = [close]
            self.end("closed", now_s)

    def give_up(self, reason: str, now_s: float) -> None:
        """End the session from this side, with one CLOSE in case the peer still listens."""
        self.control.frames = [wire.encode_frame(wire.Close(REASON_GIVEN_UP))]
        self.end(reason, now_s)

    def end(self, reason: str, now_s: float) -> None:
        """End at once, whatever the state."""
        if self.state is State.DOWN:
            return
        self.state = State.DOWN
        self.sender.abandon()
        if self.receiver is not None:
            self.receiver.abandon()
            self.receiver = None
        self._poll_control(now_s, self._endpoint.final_datagrams)
        self._endpoint.on_down(self, reason, now_s)

    def discard(self) -> None:
        """Forget a session whose peer is not known yet, without a word to anybody."""
        self.state = State.DOWN
        self._endpoint.sessions.remove(self)
        self._endpoint.discovery.reconsider()

    def path_stats(self) -> PeerStats:
        """Return the state of the path to the peer."""
        rate = self.sender.rate
        return PeerStats(
            peer=self.identity,
            srtt_s=self.rtt.smoothed_s,
            least_rtt_s=self.rtt.minimum_s,
            rate_bytes_per_s=rate.rate_bytes_per_s,
            in_flight_bytes=rate.bytes_in_flight,
            backlog_records=self._endpoint.log.head - self.sender.cumulative,
            loss_rate=rate.loss_rate,
            silence_s=max(0.0, self._endpoint.polled_at_s - self.control.heard_at_s),
        )


class SessionTable:
    """The sessions of one node, and the ways to find the session of a datagram."""

    def __init__(self) -> None:
        self.by_index: dict[int, Session] = {}
        self.by_node: dict[int, Session] = {}  # established ones, by the peer's node id
        self.by_stream: dict[tuple[Address, int], Session] = {}  # by source and stream
        self.half_open: dict[bytes, Session] = {}  # by INIT; the peer has not proved where it is

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self.by_index.values()))  # of a copy: sessions may end meanwhile

    def connected(self) -> tuple[set[Address], set[int]]:
        """Return the addresses and node ids that need no INIT."""
        # A session in state RESPONDED does not count: its INIT may be a recording, played from the peer's address.
        addresses = {each.address for each in self if each.state is not State.RESPONDED}
        addresses |= {each.target for each in self if each.target is not None}
        return addresses, set(self.by_node)

    def route(self, session: Session, probed: Address | None = None) -> None:
        """Give a session the data from its peer's address, and from one being probed, once its stream is known."""
        self.unroute(session)
        if session.stream is not None and session.state is not State.DOWN:
            self.by_stream[session.address, session.stream] = session
            self.by_stream.setdefault((probed or session.address, session.stream), session)

    def unroute(self, session: Session) -> None:
        """Give a session no more data, because its peer is gone or has another address."""
        for key in [key for key, other in self.by_stream.items() if other is session]:
            del self.by_stream[key]

    def remove(self, session: Session) -> None:
        """Forget a session that is over."""
        self.by_index.pop(session.index, None)
        self.half_open.pop(session.init, None)
        if session.peer is not None and self.by_node.get(session.peer.id) is session:
            del self.by_node[session.peer.id]
        self.unroute(session)
