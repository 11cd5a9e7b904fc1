"""A misbehaving peer: the attacks that hypothesis and the fuzzer run against an endpoint.

Any byte string is a script of deliveries to one node: garbage from unknown addresses, captured datagrams changed or
repeated, and attacks that only a member can make: control frames, records and handshakes with any content, sealed with
valid keys (as msquic's recvfuzz does: change first, then encrypt again). Whatever the script, `storm` requires that

- no call of any endpoint raises,
- nothing grows beyond its bound,
- the node and an honest peer still exchange messages, and
- the misbehaving peer is accepted again after a restart.
"""

from __future__ import annotations

import contextlib
import random

from gradwire.errors import WouldBlock
from gradwire.transport.crypto import PROLOGUE, AuthenticationError, Handshake, KeyChain
from gradwire.transport.session import Session
from gradwire.transport.types import Limits
from gradwire.transport.wire import (
    ACK_WINDOW_RECORDS,
    CONTROL,
    DATA,
    HEADER,
    HEADER_BYTES,
    INIT,
    INTRODUCTION_BYTES,
    RECORD_META,
    RECORD_NUMBER_MAX,
    RESPONSE,
    TAG_BYTES,
    TAGGED,
    Ack,
    Close,
    CloseAck,
    Frame,
    Introduction,
    Key,
    KeyAck,
    Members,
    Ping,
    Pong,
    Skip,
    WireError,
    decode_frames,
    encode_frame,
)

from . import invariants
from .simulator import SECRET, Host, Link, Simulator

LIMITS = Limits(
    message_bytes_max=100_000, send_log_bytes=400_000, receive_bytes=200_000, window_bytes=1 << 19
)
OPERATIONS_MAX = 48
CAPTURES_MAX = 64
SERVICE_S = 15.0
UNKNOWN = ("unknown", 7)


class Script:
    """Choices read from bytes; past the end every choice is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._data)

    def take(self, nbytes: int) -> bytes:
        taken = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return taken

    def below(self, count: int) -> int:
        return int.from_bytes(self.take(1), "little") % count

    def number(self, bits: int = 64) -> int:
        """Return a number of up to so many bits, small ones and powers of two more often."""
        form = self.below(4)
        if form == 0:
            return self.below(256) & ((1 << bits) - 1)
        if form == 1:
            return ((1 << self.below(bits + 1)) - self.below(2)) & ((1 << bits) - 1)
        return int.from_bytes(self.take(8 if form == 2 else 2), "little") & ((1 << bits) - 1)

    def near(self, base: int, bits: int = 64) -> int:
        """Return a number close to ``base``, or any."""
        if self.below(8) == 0:
            return self.number(bits)
        return max(0, base + self.below(16) - 4) & ((1 << bits) - 1)

    def blob(self, nbytes_max: int) -> bytes:
        return self.take(self.number(16) % (nbytes_max + 1))


def parse(data: bytes) -> None:
    """Check that bytes parse to frames that survive encoding, or raise `WireError`; the same for introductions."""
    with contextlib.suppress(WireError):
        frames = decode_frames(data)
        assert decode_frames(b"".join(map(encode_frame, frames))) == frames
    with contextlib.suppress(WireError):
        introduction = Introduction.decode(data)
        assert Introduction.decode(introduction.encode(len(data))) == introduction


class Storm:
    """Three connected nodes: ``bad`` runs the script against ``target``; ``good`` behaves well."""

    def __init__(self, data: bytes) -> None:
        self.script = Script(data)
        self.simulator = Simulator(1, Link(delay_s=0.001))
        self.captured: list[bytes] = []
        self.bad, self.target, self.good = self.simulator.mesh(3, limits=LIMITS)
        self.simulator.link(self.bad, self.target).drop = self._capture
        self.simulator.publish(self.bad, bytes(5_000))
        self.simulator.run_for(0.02)

    def _capture(self, _: int, datagram: bytes) -> bool:
        if len(self.captured) < CAPTURES_MAX:
            self.captured.append(datagram)
        return False

    def run(self) -> None:
        operations = (
            self._garbage,
            self._changed,
            self._changed,
            self._control,
            self._control,
            self._control,
            self._record,
            self._record,
            self._init,
            self._traffic,
            self._time,
            self._time,
        )
        for _ in range(OPERATIONS_MAX):
            if self.script.is_done:
                break
            operations[self.script.below(len(operations))]()
        self.simulator.run_for(0.1)
        invariants.check(self.target.endpoint)
        self._check_service(self.good, b"good")
        self._restart()

    # ---- deliveries ---------------------------------------------------------------------------------------------

    def _deliver(self, data: bytes, segment_bytes: int = 0, *, source: int = 0) -> None:
        if data:
            address = (self.bad.address, UNKNOWN, self.good.address)[source % 3]
            self.target.endpoint.receive(
                memoryview(data), segment_bytes or len(data), address, self.simulator.now_s
            )

    def _session(self) -> Session | None:
        """Return the misbehaving node's end of its session, if the session has keys."""
        for session in self.bad.endpoint.sessions:
            if session.address == self.target.address and session.control.channel is not None:
                return session
        return None

    def _garbage(self) -> None:
        script = self.script
        first = (DATA, CONTROL, INIT, RESPONSE, TAGGED, script.below(256))[script.below(6)]
        data = bytes([first]) + script.blob(300)
        times = 1 + script.below(4)
        self._deliver(data * times, max(1, len(data) - script.below(2)), source=script.below(3))

    def _changed(self) -> None:
        script = self.script
        if not self.captured:
            return
        datagram = bytearray(self.captured[script.below(len(self.captured))])
        for _ in range(script.below(4)):
            at = script.below(HEADER_BYTES) if script.below(2) else script.number(16)
            datagram[at % len(datagram)] ^= script.below(256)
        if script.below(4) == 0:
            del datagram[script.number(16) % len(datagram) :]
        datagram += script.blob(20) if script.below(4) == 0 else b""
        self._deliver(bytes(datagram), source=script.below(6) // 2)

    def _control(self) -> None:
        session = self._session()
        if session is None or session.control.channel is None:
            return
        script = self.script
        if script.below(4) == 0:
            plaintext = script.blob(400)
        else:
            frames = [self._frame() for _ in range(1 + script.below(3))]
            plaintext = b"".join(map(encode_frame, frames))
        counter = session.control.channel.next_counter()
        if script.below(16) == 0:
            counter = script.near(counter, 63)
        header = HEADER.pack(CONTROL, 0, 0, 0, session.control.remote_index, counter)
        self._deliver(
            session.control.channel.seal(counter, header, plaintext), source=script.below(8) // 7
        )

    def _frame(self) -> Frame:
        script = self.script
        log = self.target.endpoint.log
        match script.below(12):
            case 0 | 1 | 2:
                return self._ack()
            case 3:
                return Ping(script.number())
            case 4:
                return Pong(script.near(1))
            case 5:
                key, iv = self.bad.endpoint.sealer.keys.key_of(self.bad.endpoint.log.head)
                return Key(
                    script.near(self.bad.endpoint.sealer.stream, 32),
                    script.near(log.head, 48),
                    key if script.below(2) else script.take(16).ljust(16),
                    iv if script.below(2) else script.take(12).ljust(12),
                )
            case 6:
                return KeyAck()
            case 7 | 8:
                first = min(script.near(self.bad.endpoint.log.head, 48), RECORD_NUMBER_MAX - 1)
                return Skip(first, min(1 + script.number(47), RECORD_NUMBER_MAX - first))
            case 9:
                return Close(script.below(256))
            case 10:
                return CloseAck()
            case _:
                texts = ("10.0.0.1:5", "nonsense", ":", "[::1]:70000", "10.0.0.1:0", "h0:1")
                count = script.below(33)
                return Members(tuple(texts[script.below(len(texts))] for _ in range(count)))

    def _ack(self) -> Ack:
        script = self.script
        head = self.target.endpoint.log.head
        cumulative = min(script.near(head, 48), RECORD_NUMBER_MAX - 70_000)
        deltas = sorted({script.number(16) for _ in range(script.below(6))})
        return Ack(
            cumulative,
            script.near(head + 4, 48),
            script.number(32),
            script.number() << script.below(ACK_WINDOW_RECORDS - 64),
            tuple((cumulative + delta, script.number()) for delta in deltas),
            bool(deltas) and script.below(2) == 1,
            script.below(2) == 1,
        )

    def _record(self) -> None:
        """Seal a record with any metadata and any shape, and deliver any of its fragments."""
        script = self.script
        endpoint = self.bad.endpoint
        number = min(script.near(endpoint.log.head, 48), RECORD_NUMBER_MAX)
        chunk = script.blob(40) * (1 + script.below(120))
        meta = RECORD_META.pack(
            script.near(len(self.bad.tickets)),
            script.number(),
            script.near(len(chunk), 32),
            script.near(0, 32),
        )
        plain = (meta + chunk)[: script.number(16) if script.below(8) == 0 else None]
        size = (256, 1_184, script.number(16) or 1)[script.below(3)]
        fragments = min(255, -(-(len(plain) + TAG_BYTES) // size))
        if script.below(8) == 0:
            fragments = script.below(256)
        fields = (fragments, endpoint.sealer.stream, size << 48 | number)
        header = HEADER.pack(DATA, 0, 0, *fields)
        sealed = bytearray(len(plain) + TAG_BYTES)
        head = endpoint.log.head
        keys = KeyChain(*endpoint.sealer.keys.key_of(head), head)
        with contextlib.suppress(AuthenticationError):  # the record is in an epoch far away
            keys.seal_into(number, memoryview(plain), header, memoryview(sealed))
        order = list(range(min(64, -(-len(sealed) // size))))
        random.Random(script.below(8)).shuffle(order)
        is_tagged = script.below(2) == 1
        for index in order[: len(order) - script.below(2)]:
            kind = TAGGED if is_tagged else DATA
            datagram = HEADER.pack(kind, 0, index, *fields) + sealed[index * size :][:size]
            with contextlib.suppress(AuthenticationError):
                if is_tagged and script.below(8):
                    datagram += keys.tags(number, index, [memoryview(datagram)])[0]
            self._deliver(datagram)

    def _init(self) -> None:
        """Send an INIT as a member that claims any identity but the honest node's."""
        script = self.script
        index = script.number(32)
        header = HEADER.pack(INIT, 0, 0, 0, index, script.near(1_000))
        handshake = Handshake(SECRET, PROLOGUE + header, self.simulator.random.randbytes)
        nodes = (
            self.bad.endpoint.local.node_id,
            self.target.endpoint.local.node_id,
            1 + script.number(16),
        )
        introduction = Introduction(nodes[script.below(3)], script.near(2), index, "10.0.0.9:9")
        plaintext = introduction.encode(INTRODUCTION_BYTES)
        if script.below(4) == 0:
            plaintext = script.blob(INTRODUCTION_BYTES).ljust(INTRODUCTION_BYTES, b"\xff")
        datagram = self.target.endpoint.local.mac1.sign(header + handshake.write_init(plaintext))
        self._deliver(datagram, source=script.below(2))

    def _traffic(self) -> None:
        script = self.script
        for host in (self.bad, self.target, self.good):
            with contextlib.suppress(WouldBlock):
                if script.below(2):
                    self.simulator.publish(host, bytes(script.number(16)))

    def _time(self) -> None:
        self.simulator.run_for((0.0005, 0.002, 0.03, 1.1)[self.script.below(4)])

    # ---- checks -------------------------------------------------------------------------------------------------

    def _check_service(self, host: Host, text: bytes) -> None:
        """Check that messages go both ways between this host and the target, reconnecting if need be."""
        simulator, target = self.simulator, self.target

        def are_connected() -> bool:
            return any(
                peer.id == target.endpoint.local.node_id for peer in host.endpoint.peers
            ) and any(peer.id == host.endpoint.local.node_id for peer in target.endpoint.peers)

        simulator.run_until(are_connected, SERVICE_S)
        simulator.publish(host, text)
        simulator.publish(target, text)
        simulator.run_until(lambda: text in target.payloads and text in host.payloads, SERVICE_S)

    def _restart(self) -> None:
        self.simulator.crash(self.bad)
        again = self.simulator.add(
            "h0", limits=LIMITS, node_id=self.bad.endpoint.local.node_id, incarnation=2**63
        )
        again.endpoint.connect(self.target.address)
        self._check_service(again, b"again")


def storm(data: bytes) -> None:
    """Run a script; the module's docstring has the requirements."""
    Storm(data).run()
