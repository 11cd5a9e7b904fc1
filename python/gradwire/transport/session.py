"""The life of one connection to one peer: every state and every transition is in this file.

Sans-IO: datagrams come in through `Session.on_response`, `Session.on_control` and `Session.on_fragments`, go out
through `Session.poll`, and time is an argument. ``docs/transport.md`` has the state table.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Final

from .context import Context
from .crypto import AuthenticationError, ControlChannel, Handshake, SenderKey
from .inbound import Inbound, ProtocolError
from .membership import ATTEMPT_S, RETRY_FIRST_S, RETRY_MAX_S
from .model import Address, Peer, PeerStats, Ticket, Transmit, format_address
from .outbound import Outbound, Sending
from .path_mtu import PathMtu
from .records import Burst
from .relay import Forwarder
from .round_trips import RttEstimator
from .wire import (
    CONTROL,
    CONTROL_PLAINTEXT_MAX,
    HEADER,
    HEADER_BYTES,
    INIT,
    INIT_BYTES,
    MARK_BYTES,
    RESPONSE,
    TAG_BYTES,
    Ack,
    Close,
    CloseAck,
    Frame,
    Heard,
    Introduction,
    Key,
    KeyAck,
    Members,
    Padding,
    Ping,
    Poison,
    Pong,
    Relay,
    Relaying,
    Share,
    Shared,
    Skip,
    decode_frames,
    encode_frame,
)

PROLOGUE: Final = b"gradwire transport 1"
INTRODUCTION_BYTES: Final = INIT_BYTES - HEADER_BYTES - 32 - TAG_BYTES - MARK_BYTES
CLOSE_ATTEMPTS: Final = 5
CLOSE_RETRY_MAX_S: Final = 0.5
BURSTS_PER_POLL: Final = 16
PINGS_MAX: Final = 16
ANSWER_INTERVAL_S: Final = RETRY_FIRST_S / 2  # a true knock comes half as often at most
CREDIT_FLOOR_RECORDS: Final = 4
NOTHING_SHARED: Final = 1 << 48

REASON_LEFT: Final = 0
REASON_DUPLICATE: Final = 1
REASON_GIVEN_UP: Final = 2


class State(Enum):
    """Where a session is in its life."""

    INIT_SENT = "init sent"  # we knocked and wait for an answer
    RESPONDED = "responded"  # we answered a knock and wait for proof that its sender is there now
    KEYING = "keying"  # both know each other; sender keys are on their way
    UP = "up"  # each has the other's sender key: messages flow
    CLOSING = "closing"  # everything is acknowledged; we said goodbye
    DOWN = "down"  # over; the endpoint forgets the session


SENDING: Final = (State.UP, State.CLOSING)  # in which records leave and their timers run


def prologue(header: bytes, *, insecure: bool) -> bytes:
    """Return what both sides bind the handshake to: version, mode, and the first datagram's header."""
    return PROLOGUE + (b" insecure" if insecure else b"") + header


class Session:
    """One connection, from the first knock to the end.

    Attributes:
        index: by which the peer addresses us in control datagrams.
        address: where the peer was last heard.
        target: the address we knocked at, or None if the peer knocked.
        peer: who it is, once known.
        advertised: "host:port" under which others should reach the peer, or empty.
        knock: the first datagram of a peer that knocked, to recognise its repetition.
        wake_at_s: when `poll` has something to do; anything that comes in sets it back to "now".
        pending: (last record, ticket) of the messages that the peer has not acknowledged.
        coalesce_at_s: when what waits for the peer may be coalesced next.
        path: how large datagrams to the peer may be; None before the session is up, and on loopback.
        forwarder: what the peer has asked to be done with its records, if anything.
        shared_from: records from here on may come by a relay or a group, not only from the peer itself.
        next_beacon: number of the first multicast beacon that would be news.
    """

    def __init__(self, context: Context, index: int, address: Address, now_s: float) -> None:
        self._context = context
        self.index = index
        self.address = address
        self.target: Address | None = None
        self.state = State.INIT_SENT
        self.peer: Peer | None = None
        self.stream: int | None = None
        self.rtt = RttEstimator()
        self.outbound: Outbound | None = None
        self.inbound: Inbound | None = None
        self.pending: deque[tuple[int, Ticket]] = deque()
        self.coalesce_at_s = float("-inf")
        self.path: PathMtu | None = None
        self.knock = b""
        self.advertised = ""
        self.forwarder: Forwarder | None = None
        self.shared_from = NOTHING_SHARED
        self.next_beacon = 0
        self.was_up = False
        self.started_at_s = now_s
        self.heard_at_s = now_s
        self.data_heard_at_s = float("-inf")
        self.progress_at_s = now_s
        self.touch()
        self._handshake: Handshake | None = None
        self._first_datagram = b""
        self._knocks = 0
        self._answered_at_s = float("-inf")
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s: float | None = None
        self._remote_index = 0
        self._channel: ControlChannel | None = None
        self._frames: list[bytes] = []
        self._control_sent_at_s = now_s
        self._ack_counter = -1
        self._ping_token = 0
        self._pings: dict[int, float] = {}
        self._path_probe = (0, 0)
        self._path_bytes = 0
        self._unconfirmed_keys: dict[int, SenderKey] = {}
        self._announced_keys = 0
        self._close_reason = REASON_LEFT
        self._closes = 0
        self._keyed_at_s = now_s
        self._down_s = context.limits.down_s
        self._heartbeat_s = context.limits.heartbeat_s

    # ---- handshake ----------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Have `poll` look at everything again."""
        self._wake_at(float("-inf"))

    def _wake_at(self, at_s: float) -> None:
        self.wake_at_s = at_s
        self._context.agenda.set(self.index, at_s)

    def _look_again(self, now_s: float) -> None:
        """Have `poll` called when something is due, or at once if something could be sent."""
        outbound = self.outbound
        if self.state is State.UP and outbound is not None and not outbound.has_unsent:
            self._wake_at(self._deadline_s(now_s))
        else:
            self.touch()

    def start_initiator(self, now_s: float) -> None:
        """Begin knocking at ``address``."""
        self.target = self.address
        header = HEADER.pack(INIT, 0, 0, 0, self.index, self._context.wall_ms(now_s))
        handshake = self._new_handshake(header)
        introduction = self._introduction().encode(INTRODUCTION_BYTES)
        self._first_datagram = self._context.marker.mark(
            header + handshake.write_init(introduction)
        )
        self._handshake = handshake
        self._retry_at_s = now_s

    def start_responder(self, handshake: Handshake, remote: Introduction) -> None:
        """Answer a knock that proved knowledge of the secret."""
        self.state = State.RESPONDED
        self._remote_index = remote.session
        self._identify(remote)
        header = HEADER.pack(RESPONSE, 0, 0, 0, remote.session, 0)
        self._first_datagram = self._context.marker.mark(
            header + handshake.write_response(self._introduction().encode())
        )
        first, second = handshake.split()
        self._channel = ControlChannel(second, first, insecure=self._context.insecure)
        self._retry_at_s = self.started_at_s

    def answer_again(self, address: Address, now_s: float) -> bool:
        """The knock was repeated, so our answer was lost: send the same one again; False if that is too soon.

        It goes where the repetition came from: who records a knock and is the first to deliver it, from an address of
        his own, must not keep the true sender from being answered.
        """
        if self.state is not State.RESPONDED or now_s - self._answered_at_s < ANSWER_INTERVAL_S:
            return False
        self.address = address
        self._retry_at_s = now_s
        self.touch()
        return True

    def on_response(self, datagram: bytes, now_s: float) -> None:
        """Take the answer to our knock.

        Raises:
            AuthenticationError: not by someone who knows the secret.
            WireError: it says nothing sensible.
        """
        if self.state is not State.INIT_SENT or self._handshake is None:
            return
        self.touch()
        if not self._context.marker.is_marked(datagram):
            raise AuthenticationError("an answer without a mark")
        message = datagram[HEADER_BYTES:-MARK_BYTES]
        remote = Introduction.decode(self._handshake.attempt_response(message))
        first, second = self._handshake.split()
        self._channel = ControlChannel(first, second, insecure=self._context.insecure)
        self._handshake = None
        self._remote_index = remote.session
        self._identify(remote)
        if self._knocks == 1:
            self.rtt.add_sample(now_s - self.started_at_s, now_s)
        self._begin_keying(now_s)

    def _identify(self, remote: Introduction) -> None:
        self._locate(Peer(remote.node_id, remote.incarnation, ""))
        self.advertised = remote.advertise

    def _locate(self, peer: Peer) -> None:
        self.peer = Peer(peer.id, peer.incarnation, format_address(self.address))

    def _begin_keying(self, now_s: float) -> None:
        self.state = State.KEYING
        self.heard_at_s = now_s
        if not self._context.on_identified(self, now_s):
            self.give_up("duplicate", REASON_DUPLICATE, now_s)
            return
        self._keyed_at_s = now_s
        self.outbound = Outbound(self._context.log, self.index, self._context.log.head, self.rtt)
        for key in self._context.sender_keys():
            self.announce_key(key, now_s)

    def announce_key(self, key: SenderKey, now_s: float) -> None:
        """Send a sender key of ours until the peer has confirmed it."""
        self.touch()
        self._announced_keys += 1
        self._unconfirmed_keys[key.epoch & 0xFF] = key
        self._retry_s = RETRY_FIRST_S
        self._retry_at_s = now_s

    @property
    def has_all_keys(self) -> bool:
        """Whether the peer has confirmed every sender key of ours."""
        return not self._unconfirmed_keys

    def _new_handshake(self, header: bytes) -> Handshake:
        context = self._context
        return Handshake(
            context.secret, prologue(header, insecure=context.insecure), context.entropy
        )

    def _introduction(self) -> Introduction:
        context = self._context
        return Introduction(context.node_id, context.incarnation, self.index, context.advertise)

    # ---- receiving ----------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Peer:
        """Who the peer is; only asked once the handshake has told.

        Raises:
            RuntimeError: asked too early, which is a mistake in this package.
        """
        if self.peer is None:
            raise RuntimeError("the peer of this session is not known yet")
        return self.peer

    @property
    def is_midway(self) -> bool:
        """Whether the peer has sent a part of something."""
        return self.inbound is not None and self.inbound.is_midway

    @property
    def is_established(self) -> bool:
        """Whether the peer has proved who it is and has not gone."""
        return self.state in (State.KEYING, State.UP, State.CLOSING)

    def on_control(
        self, counter: int, header: bytes, body: memoryview, address: Address, now_s: float
    ) -> None:
        """Take one control datagram.

        Raises:
            AuthenticationError: forged, changed or repeated.
            WireError: its frames do not parse.
        """
        if self._channel is None:
            raise AuthenticationError("control before the handshake")
        highest = self._channel.highest_received
        frames = decode_frames(self._channel.open(counter, header, body))
        self.heard_at_s = now_s
        if address != self.address and counter > highest and self.is_established:
            self._context.on_moved(self, address, now_s)
        if self.state is State.RESPONDED and not any(isinstance(frame, Key) for frame in frames):
            if any(isinstance(frame, Close) for frame in frames):
                self._go_down("left", now_s)
            return
        if self.state is State.RESPONDED:  # the proof of who is there tells also where
            self.address = address
            self._locate(self.identity)
        for frame in frames:
            self._on_frame(frame, counter, now_s)
        self._look_again(now_s)

    def _on_frame(self, frame: Frame, counter: int, now_s: float) -> None:
        if self.state is State.DOWN:
            return
        match frame:
            case Ack():
                self._on_ack(frame, counter, now_s)
            case Ping(token):
                self._frames.append(encode_frame(Pong(token)))
                if self.inbound is not None:
                    self.inbound.acknowledge_by(now_s)
            case Pong(token):
                self._on_pong(token, now_s)
            case Key():
                self._on_key(frame, now_s)
            case KeyAck(epoch):
                self.rtt.set_guess(now_s - self._keyed_at_s, now_s)
                self._on_key_ack(epoch, now_s)
            case Skip(first, count):
                self._on_skip(first, count, now_s)
            case Close(reason):
                self._frames.append(encode_frame(CloseAck()))
                self._go_down("left" if reason == REASON_LEFT else "dropped by the peer", now_s)
            case CloseAck():
                if self.state is State.CLOSING:
                    self._go_down("closed", now_s)
            case Members(addresses):
                self._context.on_members(addresses)
            case Poison():
                self._context.on_poisoned(self, now_s)
            case Share(first):
                self.shared_from = first
                self.send_frame(Shared(first))
            case Relay() | Relaying() | Shared() | Heard():
                self._context.on_fanout(self, frame)

    def _on_ack(self, ack: Ack, counter: int, now_s: float) -> None:
        self._infer_key_ack(now_s)
        if self.outbound is None or self.state is State.CLOSING or counter < self._ack_counter:
            return  # who closes has given up on what was not acknowledged before
        self._ack_counter = counter
        before = self.outbound.cumulative
        self.outbound.on_ack(ack, now_s)
        if self.path is not None and self.path.is_confirming:
            self.path.on_arrived(self.outbound.large.take_delivered(), now_s)
        if self.outbound.cumulative > before:
            self.progress_at_s = now_s
        self._settle_delivered(self.outbound.cumulative)

    def _settle_delivered(self, cumulative: int) -> None:
        while self.pending and self.pending[0][0] < cumulative:
            self.pending.popleft()[1].settle(self.identity, delivered=True)

    def _on_pong(self, token: int, now_s: float) -> None:
        sent_at_s = self._pings.pop(token, None)
        if sent_at_s is not None:
            self.rtt.add_sample(now_s - sent_at_s, now_s)
        probe_token, nbytes = self._path_probe
        if self.path is not None and token == probe_token:
            self.path.on_arrived(nbytes, now_s)
        elif self.path is not None and token == probe_token + 1:
            self.path.on_small_arrived()

    def _on_key(self, frame: Key, now_s: float) -> None:
        if self.state is State.RESPONDED:
            self._begin_keying(now_s)
            if not self.is_established:
                return
        key = SenderKey(frame.epoch, frame.key, frame.iv, insecure=self._context.insecure)
        if self.inbound is None:
            self.inbound = Inbound(
                frame.first_record,
                self._context.budget,
                self._deliver,
                self._context.limits.message_bytes_max,
                self.rtt,
            )
            self.inbound.grant(self._context.window_records(), now_s)
            self.stream = frame.stream & ~1
            self._context.on_stream(self)
        self.inbound.add_key(key)
        self.inbound.acknowledge_by(now_s)
        self._frames.append(encode_frame(KeyAck(frame.epoch)))
        self._maybe_up(now_s)

    def _on_key_ack(self, epoch: int, now_s: float) -> None:
        self._unconfirmed_keys.pop(epoch, None)
        if not self._unconfirmed_keys and self.state is not State.CLOSING:
            self._retry_at_s = None
        self._maybe_up(now_s)

    def _infer_key_ack(self, now_s: float) -> None:
        """What only a peer with a key of ours can send has come: if there was only one, its KeyAck was lost."""
        if self.state is State.KEYING and self._announced_keys == 1 and self._unconfirmed_keys:
            self._on_key_ack(next(iter(self._unconfirmed_keys)), now_s)

    def _maybe_up(self, now_s: float) -> None:
        if self.state is State.KEYING and self.inbound is not None and not self._unconfirmed_keys:
            self.state = State.UP
            self.was_up = True
            self.watch_path(now_s)
            self._context.on_up(self, now_s)

    def _on_skip(self, first: int, count: int, now_s: float) -> None:
        if self.inbound is not None:
            try:
                self.inbound.skip(first, count, now_s)
            except ProtocolError:
                self.give_up("protocol error", REASON_GIVEN_UP, now_s)

    def on_fragments(
        self,
        epoch: int,
        stream: int,
        record: int,
        fragments: int,
        fragment_bytes: int,
        first: int,
        batch: memoryview,
        now_s: float,
    ) -> bool:
        """Take neighbouring fragments of one record; return False if they are malformed."""
        if self.inbound is None or not self.is_established:
            return True
        inbound = self.inbound
        try:
            is_valid = inbound.on_fragments(
                epoch, stream, record, fragments, fragment_bytes, first, batch, now_s
            )
        except ProtocolError:
            self.give_up("protocol error", REASON_GIVEN_UP, now_s)
            return True
        self._note_arrival(inbound, now_s)
        return is_valid

    def go_on(self, batch: memoryview, segment_bytes: int, now_s: float) -> int:
        """Take the datagrams that come next when nothing is lost; return their bytes, 0 if these are others."""
        inbound = self.inbound
        if inbound is None or self.forwarder is not None:
            return 0
        try:
            taken_bytes = inbound.go_on(batch, segment_bytes, now_s)
            if not taken_bytes:
                return 0
        except ProtocolError:
            self.give_up("protocol error", REASON_GIVEN_UP, now_s)
            return len(batch)
        self.data_heard_at_s = now_s
        at_s = inbound.ack_at_s
        if inbound.poison.is_due or (at_s is not None and at_s < self.wake_at_s):
            self._note_arrival(inbound, now_s)
        return taken_bytes

    def _note_arrival(self, inbound: Inbound, now_s: float) -> None:
        self.data_heard_at_s = now_s
        if inbound.poison.is_due:
            inbound.poison.is_due = False
            self.send_frame(Poison())
        elif inbound.ack_at_s is not None and inbound.ack_at_s < self.wake_at_s:
            self._wake_at(inbound.ack_at_s)

    def resume(self, now_s: float) -> None:
        """Go on with what waited for room in the receive budget."""
        if self.inbound is None:
            return
        self.touch()
        try:
            if self.inbound.is_stalled:
                self.inbound.consume()
        except ProtocolError:
            self.give_up("protocol error", REASON_GIVEN_UP, now_s)
            return
        self.inbound.grant(self._context.window_records(), now_s)

    def _deliver(self, tag: int, payload: memoryview) -> None:
        self._context.deliver(self, tag, payload)

    def note_published(self, last_record: int, ticket: Ticket, now_s: float) -> None:
        """Follow a message that will be in the log for this peer, up to its last record."""
        if not self.pending:
            self.progress_at_s = now_s
        if self.outbound is not None and self.outbound.is_idle:
            self.outbound.rate.on_app_limited()
        self.pending.append((last_record, ticket))

    def restart_from(self, head: int, moved: Mapping[int, int]) -> None:
        """Skip to ``head``: all that the peer may lack comes again from there on.

        Args:
            head: first record of the new cut.
            moved: for the number of each old record, in order, the number of its last new piece.
        """
        if self.outbound is not None and self.state in (State.KEYING, State.UP):
            self.touch()
            olds, news = list(moved), [head - 1, *moved.values()]
            self.outbound.skip_to(head, news[bisect_left(olds, self.outbound.unsent_from)] + 1)
            # A message for which nothing is sent any more ends with what comes before it.
            self.pending = deque(
                (news[bisect_right(olds, last)], ticket) for last, ticket in self.pending
            )

    def repoint(self, first: int, last_record: int) -> None:
        """Have the messages that end in record ``first`` or later follow substitutes that end in ``last_record``."""
        self.touch()
        end = last_record + 1
        self.pending = deque(
            (last_record if first <= last < end else last, ticket) for last, ticket in self.pending
        )

    def look_at_log(self) -> None:
        """Take note that the log has grown and, perhaps, that everything in it has been sent already."""
        outbound = self.outbound
        if outbound is None or self.state is not State.UP or outbound.has_unsent:
            self.touch()
            return
        outbound.rate.on_app_limited()
        self.note_carried()  # whoever has sent it, that adds only timers of its own

    def is_lagging(self, now_s: float) -> bool:
        """Whether the peer has acknowledged nothing for too long although something waits for it."""
        return bool(self.pending) and now_s - self.progress_at_s > self._context.limits.lag_s

    # ---- sending ------------------------------------------------------------------------------------------------

    def poll(self, now_s: float) -> list[Transmit]:
        """Return what is to be sent now: a bounded number of data bursts, then control."""
        if self.state in (State.INIT_SENT, State.RESPONDED):
            out = self._poll_handshake(now_s)
        else:
            out = []
            self._check_timers(now_s, out)
            if self.outbound is not None and self.state in SENDING:
                self._poll_data(self.outbound, now_s, out)
            self._poll_control(now_s, out)
        self._wake_at(self._deadline_s(now_s))
        return out

    def _poll_handshake(self, now_s: float) -> list[Transmit]:
        if now_s - self.started_at_s > ATTEMPT_S:
            self._go_down("no answer", now_s)
        if self.state is State.DOWN or self._retry_at_s is None or now_s < self._retry_at_s:
            return []
        if self.state is State.RESPONDED:
            self._answered_at_s = now_s
            self._retry_at_s = None  # only a repeated knock makes us answer again: one datagram out for each one in
        else:
            self._knocks += 1
            self._retry_at_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        datagram = self._first_datagram
        self._context.counters.control_bytes_sent += len(datagram)
        return [Transmit.single(self.address, datagram)]

    def _check_timers(self, now_s: float, out: list[Transmit]) -> None:
        if self.state is State.DOWN:
            return
        if now_s - self.heard_at_s > self._down_s:
            self.give_up("timeout", REASON_GIVEN_UP, now_s)
            return
        if self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._retry(now_s)
        if self.outbound is not None and self.state in SENDING:
            probes, is_probe_due = self.outbound.on_timer(now_s)
            for item in probes:
                self._emit(item, out)
            if is_probe_due:
                self._ping(now_s)
            if self.path is not None and self.state is State.UP:
                self._check_path(self.path, self.outbound, now_s, out)
        if self.state is State.UP and now_s - self._control_sent_at_s >= self._heartbeat_s:
            self._ping(now_s)

    def watch_path(self, now_s: float) -> None:
        """Find out how large datagrams to this address may be."""
        self.path = self._context.watch_path(self.address, now_s)
        if self.outbound is not None:
            self.outbound.rate.is_local = self.path is None
            self.outbound.rate.local_buffer_bytes = self._context.socket_buffer_bytes
        if self.path is None:  # then no probe of its size will tell its round trip
            self._ping(now_s)
        self._path_bytes = 0 if self.path is None else self.path.size_bytes

    def _check_path(
        self, path: PathMtu, outbound: Outbound, now_s: float, out: list[Transmit]
    ) -> None:
        """Probe the path when it is time, and say when its size has changed."""
        if outbound.large.is_hole_likely():
            path.on_large_lost(now_s)
        nbytes = path.poll(now_s, self.rtt.probe_timeout_s)
        if nbytes is not None and self._channel is not None:
            self._path_probe = (self._ping_token + 1, nbytes)
            ping = encode_frame(Ping(self._ping_token + 1))
            padding = Padding(nbytes - HEADER_BYTES - TAG_BYTES - len(ping))
            self._send_control(self._channel, ping + encode_frame(padding), now_s, out)
            self._ping_token += 1
            self._ping(now_s)
        if path.size_bytes != self._path_bytes:
            self._path_bytes = path.size_bytes
            self._context.on_path_size(self, now_s)

    def _retry(self, now_s: float) -> None:
        """Repeat what the peer has not confirmed: our key, or our goodbye."""
        self._retry_at_s = now_s + max(self._retry_s, self.rtt.probe_timeout_s)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        if self.state is State.CLOSING:
            self._retry_at_s = now_s + min(self.rtt.probe_timeout_s, CLOSE_RETRY_MAX_S)
            self._closes += 1
            if self._closes > CLOSE_ATTEMPTS:
                self._go_down("closed", now_s)
            else:
                self._frames.append(encode_frame(Close(self._close_reason)))
        elif self.outbound is not None:
            for epoch, key in self._unconfirmed_keys.items():
                # A new receiver starts at the first record that was published with it connected.
                frame = Key(epoch, self._context.stream, self.outbound.cumulative, key.key, key.iv)
                self._frames.append(encode_frame(frame))

    def _ping(self, now_s: float) -> None:
        self._ping_token += 1
        self._pings[self._ping_token] = now_s
        if len(self._pings) > PINGS_MAX:
            del self._pings[next(iter(self._pings))]
        self._frames.append(encode_frame(Ping(self._ping_token)))

    def poll_data(self, now_s: float, out: list[Transmit]) -> None:
        """Append the data bursts that may leave now, while the caller is still filling the log."""
        outbound = self.outbound
        if outbound is None or self.state is not State.UP:
            return
        for item in outbound.send_unsent(now_s, BURSTS_PER_POLL):
            if isinstance(item, Burst):
                out.append(Transmit(self.address, item.calls, item.segment_bytes, item.nbytes))
            else:
                self._emit(item, out)

    def _poll_data(self, outbound: Outbound, now_s: float, out: list[Transmit]) -> None:
        if outbound.is_idle:
            outbound.rate.on_app_limited()
            return
        end = len(out) + BURSTS_PER_POLL
        while len(out) < end:
            item = outbound.next_item(now_s)
            if item is None:
                return
            self._emit(item, out)

    def _emit(self, item: Sending, out: list[Transmit]) -> None:
        if isinstance(item, Skip):
            self._frames.append(encode_frame(item))
        else:
            out.append(Transmit(self.address, item.calls, item.segment_bytes, item.nbytes))

    def _poll_control(self, now_s: float, out: list[Transmit]) -> None:
        inbound = self.inbound
        if (
            inbound is not None
            and inbound.ack_at_s is not None
            and (self._frames or now_s >= inbound.ack_at_s)
        ):
            # Before a goodbye, after which nothing is read: what was taken is not to count as undelivered.
            self._frames[:0] = [encode_frame(ack) for ack in inbound.make_acks(now_s)]
        while self._frames and self._channel is not None:
            plaintext = b""
            while self._frames and len(plaintext) + len(self._frames[0]) <= CONTROL_PLAINTEXT_MAX:
                plaintext += self._frames.pop(0)
            self._send_control(self._channel, plaintext, now_s, out)

    def _send_control(
        self, channel: ControlChannel, plaintext: bytes, now_s: float, out: list[Transmit]
    ) -> None:
        counter = channel.next_counter()
        header = HEADER.pack(CONTROL, 0, 0, 0, self._remote_index, counter)
        datagram = channel.seal(counter, header, plaintext)
        self._control_sent_at_s = now_s
        self._context.counters.control_bytes_sent += len(datagram)
        out.append(Transmit.single(self.address, datagram))

    def note_carried(self) -> None:
        """Records for this peer have been sent, by a carrier or while they were sealed: its timers have changed."""
        if self.outbound is not None:
            at_s = self.outbound.deadline_s()
            if at_s < self.wake_at_s:
                self._wake_at(at_s)

    def send_frame(self, frame: Frame) -> None:
        """Queue a control frame."""
        self.touch()
        self._frames.append(encode_frame(frame))

    def _deadline_s(self, now_s: float) -> float:
        if self.state is State.DOWN:
            return float("inf")
        if self.state in (State.INIT_SENT, State.RESPONDED):
            expires_at_s = self.started_at_s + ATTEMPT_S + 0.001
            return expires_at_s if self._retry_at_s is None else min(self._retry_at_s, expires_at_s)
        if self._frames:
            return now_s
        at_s = self.heard_at_s + self._down_s + 0.001
        if self.state is State.UP:
            at_s = min(at_s, self._control_sent_at_s + self._heartbeat_s)
            if self.path is not None:
                at_s = min(at_s, self.path.due_at_s)
        if self._retry_at_s is not None:
            at_s = min(at_s, self._retry_at_s)
        if self.inbound is not None and self.inbound.ack_at_s is not None:
            at_s = min(at_s, self.inbound.ack_at_s)
        if self.outbound is not None and self.state in SENDING:
            at_s = min(at_s, self.outbound.deadline_s())
        return at_s

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self, now_s: float) -> None:
        """Say goodbye; what is not acknowledged yet counts as undelivered."""
        self.touch()
        if self.state in (State.KEYING, State.UP):
            self.state = State.CLOSING
            self._retry_at_s = now_s
            if self.outbound is not None:
                self.outbound.abandon()
        elif self.state is not State.CLOSING:
            self._go_down("closed", now_s)

    def finish(self, now_s: float) -> None:
        """End at once, whatever the state."""
        self._go_down("closed", now_s)

    def give_up(self, reason: str, code: int, now_s: float) -> None:
        """End the session from our side, telling the peer once in case it still listens."""
        self._frames = [encode_frame(Close(code))]
        self._go_down(reason, now_s)

    def last_words(self, now_s: float) -> list[Transmit]:
        """Return the datagrams that were still queued when the session went down."""
        out: list[Transmit] = []
        self.inbound = None
        self._poll_control(now_s, out)
        return out

    def _go_down(self, reason: str, now_s: float) -> None:
        if self.state is State.DOWN:
            return
        self.state = State.DOWN
        if self.outbound is not None:
            self.outbound.abandon()
        if self.inbound is not None:
            self.inbound.abandon()
        self._context.on_down(self, reason, now_s)

    def fail_pending(self) -> tuple[Ticket, ...]:
        """Settle every message that the peer has not acknowledged as failed, and return their tickets."""
        tickets = []
        while self.pending:
            ticket = self.pending.popleft()[1]
            ticket.settle(self.identity, delivered=False)
            tickets.append(ticket)
        return tuple(tickets)

    def stats(self, outbound: Outbound, carrier: str) -> PeerStats:
        """Return the state of this path; ``carrier`` says how records reach the peer first."""
        rate = outbound.rate
        path_mtu_bytes = self._path_bytes or self._context.limits.fragment_bytes + HEADER_BYTES
        return PeerStats(
            peer=self.identity,
            srtt_s=self.rtt.smoothed_s,
            rate_bytes_per_s=rate.rate_bytes_per_s,
            window_bytes=rate.window_bytes,
            in_flight_bytes=rate.bytes_in_flight,
            credit_records=max(0, outbound.limit - outbound.cursor),
            backlog_records=outbound.backlog_records,
            loss_rate=rate.loss_rate,
            path_mtu_bytes=path_mtu_bytes,
            carrier=carrier,
        )
