"""The same transfer by what people have installed: qh3 and aioquic (QUIC), grpcio, pyzmq.

Each is used as its documentation has it for bulk data, with the best of the settings tried, and has its bytes counted
and its first message compared. A transfer raises ``Missing`` with the reason where its library is absent.

- **qh3, aioquic**: both ends in one process, datagrams handed over in memory, TLS 1.3 with AES-128-GCM, 1,400-byte
  datagrams, 1 GB of flow control, one stream. No sockets, and no end ever waits for a timer: more than QUIC reaches
  between processes.
- **grpcio**: two processes, client streaming of bytes without serialisers, plaintext, messages of any size allowed,
  HTTP/2 frames of up to 8 MB (the default of 16 kB beside it, for information); the threaded interface and asyncio.
- **pyzmq**: two processes, PUSH to PULL over TCP, one frame per message, ``copy=False`` at both ends, 16 messages in
  each queue; plaintext, and with CURVE.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import MESSAGE_BYTES, PAYLOAD, Transfer, child
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from peers import Missing
from transport_ends import MESSAGES_IN_FLIGHT, SEGMENT_BYTES, SkippingClock

__all__ = ["PEERS", "versions"]

FLOW_CONTROL_BYTES = 1 << 30
GRPC_UNLIMITED = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
GRPC_LARGE_FRAMES = (*GRPC_UNLIMITED, ("grpc.http2.max_frame_size", 1 << 23))
GRPC_SERVICE, GRPC_METHOD = "bulk", "push"
ZMQ_QUEUE_MESSAGES = 16
IN_FLIGHT_BYTES = MESSAGES_IN_FLIGHT * MESSAGE_BYTES


def _library(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"pip install {distribution} ({error})") from None


def versions() -> dict[str, str]:
    """Return the version of each library that is installed."""
    found = {}
    for distribution in ("qh3", "aioquic", "grpcio", "pyzmq"):
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


class Counter:
    """Counts what arrives and compares the first message with what it must be."""

    def __init__(self) -> None:
        self.total = 0
        self.cpu_s = 0.0

    def take(self, message: Any) -> None:
        """Count one message; the first is compared instead, and starts the processor's clock."""
        if not self.cpu_s:
            assert message == PAYLOAD, "other bytes came"
            self.cpu_s = time.process_time()
        else:
            self.total += len(message)

    def report(self) -> tuple[int, float]:
        """Return the bytes counted and the processor seconds they took."""
        return self.total, time.process_time() - self.cpu_s


def _transfer(sent: int, elapsed_s: float, sender_s: float, report: tuple[int, float]) -> Transfer:
    total, receiver_s = report
    assert total == sent * MESSAGE_BYTES, "every byte must arrive"
    return Transfer(elapsed_s / sent, sender_s / sent, receiver_s / sent)


# ---- QUIC, both ends in memory ----------------------------------------------------------------------------------


def _write_certificate(folder: Path) -> tuple[str, str]:
    """Write a certificate for "localhost" that signs itself, and its key; return both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(paths[0]), str(paths[1])


class QuicInMemory:
    """A client and a server of one of the two QUIC libraries, which have the same sans-IO interface."""

    def __init__(self, library: str) -> None:
        make = _library(f"{library}.quic.configuration", library).QuicConfiguration
        connection = _library(f"{library}.quic.connection", library).QuicConnection
        self._events = _library(f"{library}.quic.events", library)
        suites = _library(f"{library}.tls", library).CipherSuite
        common = {
            "alpn_protocols": ["bulk"],
            "cipher_suites": [suites.AES_128_GCM_SHA256],
            "max_datagram_size": SEGMENT_BYTES,
            "max_data": FLOW_CONTROL_BYTES,
            "max_stream_data": FLOW_CONTROL_BYTES,
        }
        client = make(is_client=True, server_name="localhost", **common)
        server = make(is_client=False, **common)
        if hasattr(client, "probe_datagram_size"):
            client.probe_datagram_size = False  # or it would go on to larger datagrams
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = _write_certificate(Path(folder))
            client.load_verify_locations(cafile=certificate)
            server.load_cert_chain(certificate, key)
            self._client = connection(configuration=client)
            self._server = connection(
                configuration=server,
                original_destination_connection_id=self._client.original_destination_connection_id,
            )
            self._clock = SkippingClock()
            self._ready = 0
            self._came: list[bytes] = []
            self._client.connect(("127.0.0.1", 2), now=self._clock())
            while self._ready < 2:
                self._step()
        self._stream = self._client.get_next_available_stream_id()

    def _step(self) -> None:
        """Hand over what both ends have to send; if that is nothing, let the next timer run out."""
        now_s, moved, ends = self._clock(), False, (self._client, self._server)
        for source, target, port in ((*ends, 1), (*ends[::-1], 2)):
            datagrams = [data for data, _ in source.datagrams_to_send(now_s)]
            moved |= bool(datagrams)
            _hand_over(target, datagrams, ("127.0.0.1", port), now_s)
        for end in ends:
            self._take_events(end)
        if not moved:
            due = [at_s for end in ends if (at_s := end.get_timer()) is not None]
            self._clock.skip_to(min(due))
        for end in ends:
            if (at_s := end.get_timer()) is not None and at_s <= self._clock():
                end.handle_timer(self._clock())

    def _take_events(self, end: Any) -> None:
        while (event := end.next_event()) is not None:
            if isinstance(event, self._events.StreamDataReceived):
                self._came.append(event.data)
            elif isinstance(event, self._events.HandshakeCompleted):
                self._ready += 1
            elif isinstance(event, self._events.ConnectionTerminated):
                raise AssertionError(f"the connection has ended: {event}")

    def send(self, wants_more: Callable[[int], bool]) -> tuple[int, list[bytes]]:
        """Send messages one after the other on one stream; return how many, and what came of them in pieces."""
        sent = came = 0
        pieces: list[bytes] = []
        while wants_more(sent) or came < sent * MESSAGE_BYTES:
            while wants_more(sent) and sent * MESSAGE_BYTES < came + IN_FLIGHT_BYTES:
                self._client.send_stream_data(self._stream, PAYLOAD)
                sent += 1
            self._step()
            came += sum(map(len, self._came))
            if sent == 1:
                pieces += self._came
            self._came.clear()
        assert came == sent * MESSAGE_BYTES, "every byte must arrive"
        return sent, pieces


def _hand_over(target: Any, datagrams: list[bytes], address: tuple[str, int], now_s: float) -> None:
    if hasattr(target, "receive_many_datagrams"):
        target.receive_many_datagrams(datagrams, address, now_s)
        return
    for data in datagrams:
        target.receive_datagram(data, address, now_s)


def _quic(library: str) -> Callable[[float], Transfer]:
    def transfer(seconds: float) -> Transfer:
        connection = QuicInMemory(library)
        _, pieces = connection.send(lambda sent: sent < 1)
        assert b"".join(pieces) == PAYLOAD, "other bytes came"
        started_s, cpu_s = time.perf_counter(), time.process_time()
        sent, _ = connection.send(lambda _: time.perf_counter() - started_s < seconds)
        elapsed_s, used_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        return Transfer(elapsed_s / sent, used_s / sent)

    return transfer


# ---- grpcio -----------------------------------------------------------------------------------------------------


GrpcOptions = tuple[tuple[str, int], ...]


def _grpc() -> Any:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it reports every connection's end otherwise
    return _library("grpc", "grpcio")


def grpc_sink(pipe: Connection, options: GrpcOptions) -> None:
    """Serve streams, one after the other: each is answered when it ends."""
    grpc = _grpc()
    counter = Counter()

    def push(messages: Iterator[bytes], _: Any) -> bytes:
        for message in messages:
            counter.take(message)
        return b"done"

    server = grpc.server(ThreadPoolExecutor(max_workers=2), options=options)
    server.add_generic_rpc_handlers((_grpc_handler(grpc, push),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    pipe.send(counter.report())
    server.stop(None)


def grpc_aio_sink(pipe: Connection) -> None:
    """Do the same in asyncio."""
    grpc = _grpc()
    counter = Counter()

    async def push(messages: Any, _: Any) -> bytes:
        async for message in messages:
            counter.take(message)
        return b"done"

    async def serve() -> None:
        server = grpc.aio.server(options=GRPC_LARGE_FRAMES)
        server.add_generic_rpc_handlers((_grpc_handler(grpc, push),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        pipe.send(counter.report())
        await server.stop(None)

    asyncio.run(serve())


def _grpc_handler(grpc: Any, push: Callable[..., Any]) -> Any:
    methods = {GRPC_METHOD: grpc.stream_unary_rpc_method_handler(push)}
    return grpc.method_handlers_generic_handler(GRPC_SERVICE, methods)


def grpc_transfer(seconds: float, options: GrpcOptions = GRPC_LARGE_FRAMES) -> Transfer:
    """Stream from one process to another through the threaded interface."""
    grpc = _grpc()
    with child(grpc_sink, options) as pipe:
        with grpc.insecure_channel(f"127.0.0.1:{pipe.recv()}", options=options) as channel:
            push = channel.stream_unary(f"/{GRPC_SERVICE}/{GRPC_METHOD}")
            assert push(iter([PAYLOAD])) == b"done"
            sent = 0
            started_s, cpu_s = time.perf_counter(), time.process_time()

            def messages() -> Iterator[bytes]:
                nonlocal sent
                while time.perf_counter() - started_s < seconds:
                    sent += 1
                    yield PAYLOAD

            assert push(messages()) == b"done"
            elapsed_s, used_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        pipe.send("stop")
        return _transfer(sent, elapsed_s, used_s, pipe.recv())


def grpc_small_frames_transfer(seconds: float) -> Transfer:
    """Do the same with HTTP/2 frames of the default size."""
    return grpc_transfer(seconds, GRPC_UNLIMITED)


def grpc_aio_transfer(seconds: float) -> Transfer:
    """Stream from one process to another through asyncio."""
    grpc = _grpc()

    async def push(port: int) -> tuple[int, float, float]:
        target = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(target, options=GRPC_LARGE_FRAMES) as channel:
            stream = channel.stream_unary(f"/{GRPC_SERVICE}/{GRPC_METHOD}")
            assert await stream(iter([PAYLOAD])) == b"done"
            call, sent = stream(), 0
            started_s, cpu_s = time.perf_counter(), time.process_time()
            while time.perf_counter() - started_s < seconds:
                await call.write(PAYLOAD)
                sent += 1
            await call.done_writing()
            assert await call == b"done"
            return sent, time.perf_counter() - started_s, time.process_time() - cpu_s

    with child(grpc_aio_sink) as pipe:
        sent, elapsed_s, used_s = asyncio.run(push(pipe.recv()))
        pipe.send("stop")
        return _transfer(sent, elapsed_s, used_s, pipe.recv())


# ---- pyzmq ------------------------------------------------------------------------------------------------------


def zmq_sink(pipe: Connection, keys: tuple[bytes, bytes] | None) -> None:
    """Pull frames until an empty one comes; the first is confirmed, so that the connection stands."""
    zmq = _library("zmq", "pyzmq")
    counter = Counter()
    with zmq.Context() as context, context.socket(zmq.PULL) as sink:
        sink.setsockopt(zmq.RCVHWM, ZMQ_QUEUE_MESSAGES)
        if keys is not None:
            sink.curve_server = True
            sink.curve_publickey, sink.curve_secretkey = keys
        pipe.send(sink.bind_to_random_port("tcp://127.0.0.1"))
        counter.take(sink.recv(copy=False).buffer)
        assert sink.mechanism == (zmq.CURVE if keys else zmq.NULL), "encrypted as asked"
        pipe.send("ready")
        while len(frame := sink.recv(copy=False)):
            counter.take(frame.buffer)
        pipe.send(counter.report())


def _zmq(*, curve: bool) -> Callable[[float], Transfer]:
    def transfer(seconds: float) -> Transfer:
        zmq = _library("zmq", "pyzmq")
        if curve and not zmq.has("curve"):
            raise Missing("this libzmq was built without CURVE")
        keys = zmq.curve_keypair() if curve else None
        with (
            child(zmq_sink, keys) as pipe,
            zmq.Context() as context,
            context.socket(zmq.PUSH) as source,
        ):
            source.setsockopt(zmq.SNDHWM, ZMQ_QUEUE_MESSAGES)
            if keys is not None:
                source.curve_serverkey = keys[0]
                source.curve_publickey, source.curve_secretkey = zmq.curve_keypair()
            source.connect(f"tcp://127.0.0.1:{pipe.recv()}")
            source.send(PAYLOAD, copy=False)
            assert pipe.recv() == "ready"
            sent = 0
            started_s, cpu_s = time.perf_counter(), time.process_time()
            while time.perf_counter() - started_s < seconds:
                source.send(PAYLOAD, copy=False)
                sent += 1
            source.send(b"")
            report = pipe.recv()
            elapsed_s, used_s = time.perf_counter() - started_s, time.process_time() - cpu_s
            return _transfer(sent, elapsed_s, used_s, report)

    return transfer


@dataclass(frozen=True)
class PeerTransfer:
    """One way to do it.

    Attributes:
        name: as the table shows it.
        run: moves messages for so many seconds.
        reach: how many times as fast ours, between two processes, should be; None for information only.
        is_in_memory: both ends in one process, without sockets.
    """

    name: str
    run: Callable[[float], Transfer]
    reach: float | None
    is_in_memory: bool = False


PEERS = (
    PeerTransfer("qh3, in memory", _quic("qh3"), 5.0, is_in_memory=True),
    PeerTransfer("aioquic, in memory", _quic("aioquic"), 50.0, is_in_memory=True),
    PeerTransfer("grpcio, plaintext", grpc_transfer, 2.0),
    PeerTransfer("grpcio, plaintext, default frames", grpc_small_frames_transfer, None),
    PeerTransfer("grpcio with asyncio, plaintext", grpc_aio_transfer, 2.0),
    PeerTransfer("pyzmq over TCP, plaintext", _zmq(curve=False), 0.7),
    PeerTransfer("pyzmq over TCP, CURVE", _zmq(curve=True), 3.0),
)
