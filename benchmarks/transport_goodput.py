"""Messages from one process to another: gradwire, raw UDP sockets, and qh3 with both ends in memory.

The functions of gradwire import gradwire themselves, because a child process may import another checkout.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import children

MESSAGE_BYTES = 1 << 20
PAYLOAD = random.Random(2026).randbytes(MESSAGE_BYTES)  # the same in every process
SECRET = bytes(range(32))
IN_FLIGHT = 4
PATIENCE_S = 300.0
BURST_BYTES, SEGMENT_BYTES = 63_000, 1_400
UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h


@dataclass(frozen=True)
class Transfer:
    """What it took to send messages: seconds per message, and datagrams that were lost and sent again."""

    message_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    lost: int
    resent: int


def receive(pipe: Connection, host: str, nbytes: int) -> None:
    """Count messages until told to stop; the first is compared, not counted."""
    from gradwire.transport import Node

    with Node(f"{host}:0", secret=SECRET) as node:
        pipe.send(node.address)
        count, cpu_s, is_last = -1, 0.0, False
        while not is_last:
            is_last = pipe.poll()  # acknowledged messages may still wait to be received
            for _, _, payload in node.receive(timeout_s=0.05):
                if count < 0:
                    assert payload == PAYLOAD[:nbytes], "other bytes arrived"
                    cpu_s = time.process_time()
                count += 1
        pipe.send((count, time.process_time() - cpu_s, node.stats().datagrams_received))


def send(
    pipe: Connection, host: str, nbytes: int, messages: int, seconds: float, pause_s: float
) -> None:
    """Send at least so many messages, and for so long, until all are acknowledged; with pauses, one by one."""
    from gradwire.transport import Node

    payload = PAYLOAD[:nbytes]
    with Node(f"{host}:0", [pipe.recv()], secret=SECRET) as node:
        node.wait_for_peers(1, timeout_s=30.0)
        node.publish(payload)
        assert node.drain(timeout_s=30.0)
        tickets: deque[Any] = deque()
        sent, started_s, cpu_s = 0, time.perf_counter(), time.process_time()
        while sent < messages or time.perf_counter() - started_s < seconds:
            tickets.append(node.publish(payload))
            sent += 1
            # Enough in flight to fill the path, not so much that it leaves the processor's cache.
            while len(tickets) > IN_FLIGHT and not tickets[0].is_done:
                node.receive(timeout_s=0.001)
            while tickets and tickets[0].is_done:
                tickets.popleft()
            if pause_s:
                assert node.drain(timeout_s=30.0)
                time.sleep(pause_s)
        assert node.drain(timeout_s=PATIENCE_S)
        spent_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        stats = node.stats()
        pipe.send((sent, *spent_s, stats.datagrams_sent, stats.retransmitted_fragments))


def transfer(
    *,
    nbytes: int = MESSAGE_BYTES,
    messages: int = 0,
    seconds: float = 0.0,
    pause_s: float = 0.0,
    checkout: Path | None = None,
    hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
    namespaces: tuple[str, ...] = (),
    through: Callable[[str], str] = str,
) -> Transfer:
    """Send messages between two processes and check that all arrive; ``through`` returns the receiver's address."""
    calls = (receive, hosts[1], nbytes), (send, hosts[0], nbytes, messages, seconds, pause_s)
    spaces = namespaces[::-1]
    with children(*calls, checkout=checkout, namespaces=spaces) as (receiver, sender):
        sender.send(through(receiver.recv()))
        sent, elapsed_s, sender_s, datagrams, resent = sender.recv()
        receiver.send("stop")
        count, receiver_s, arrived = receiver.recv()
    assert count == sent, "every message must arrive"
    return Transfer(
        elapsed_s / sent, sender_s / sent, receiver_s / sent, datagrams - arrived, resent
    )


# ---- raw sockets ----------------------------------------------------------------------------------------------------


def raw_receive(pipe: Connection, seconds: float) -> None:
    """Count the bytes that arrive, with GRO, and report seconds per byte."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sink.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        pipe.send(sink.getsockname())
        buffer = bytearray(65_536)
        sink.recvmsg_into([buffer], 64)
        total, started_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds or not total:
            total += sink.recvmsg_into([buffer], 64)[0]
        pipe.send(elapsed_s / total)


def raw_transfer(seconds: float) -> float:
    """Send bursts with GSO and return the receiver's seconds per MB: nothing is sent again."""
    option = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", SEGMENT_BYTES))]
    burst, source = os.urandom(BURST_BYTES), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with children((raw_receive, seconds)) as (pipe,), source:
        address = pipe.recv()
        source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        while not pipe.poll():
            for _ in range(20):
                source.sendmsg([burst], option, 0, address)
        return float(pipe.recv() * MESSAGE_BYTES)


# ---- qh3 ------------------------------------------------------------------------------------------------------------


class Qh3:
    """A client and a server in one process, with TLS 1.3, AES-128-GCM and one stream.

    Datagrams are handed over in memory, and the clock jumps to the next timer where both ends would only wait: more
    than QUIC can reach between processes.
    """

    def __init__(self) -> None:
        from qh3.quic import events
        from qh3.quic.configuration import QuicConfiguration
        from qh3.quic.connection import QuicConnection
        from qh3.tls import CipherSuite

        self._events, self._skipped_s, self._arrived = events, 0.0, bytearray()
        options: dict[str, Any] = {
            "alpn_protocols": ["bulk"],
            "cipher_suites": [CipherSuite.AES_128_GCM_SHA256],
            "max_datagram_size": SEGMENT_BYTES,
            "probe_datagram_size": False,
            "max_data": 1 << 30,
            "max_stream_data": 1 << 30,
        }
        client = QuicConfiguration(is_client=True, verify_mode=ssl.CERT_NONE, **options)
        server = QuicConfiguration(is_client=False, **options)
        with tempfile.TemporaryDirectory() as folder:
            server.load_cert_chain(*write_certificate(folder))
        self._client = QuicConnection(configuration=client)
        self._server = QuicConnection(
            configuration=server,
            original_destination_connection_id=self._client.original_destination_connection_id,
        )
        self._client.connect(("127.0.0.1", 2), now=self._now_s())
        self._stream = self._client.get_next_available_stream_id()

    def transfer(self, seconds: float) -> float:
        """Send messages for a while and return the seconds per message."""
        self._send(lambda sent: sent < 1)
        assert self._arrived == PAYLOAD, "other bytes arrived"
        started_s = time.perf_counter()
        sent = self._send(lambda _: time.perf_counter() - started_s < seconds)
        return (time.perf_counter() - started_s) / sent

    def _send(self, wants_more: Callable[[int], bool]) -> int:
        sent = arrived = 0
        while wants_more(sent) or arrived < sent * MESSAGE_BYTES:
            while wants_more(sent) and (sent - IN_FLIGHT) * MESSAGE_BYTES < arrived:
                self._client.send_stream_data(self._stream, PAYLOAD)
                sent += 1
            self._arrived = self._arrived if sent == 1 else bytearray()
            arrived += self._exchange()
        return sent

    def _exchange(self) -> int:
        """Hand over what both ends have to send, or let the next timer expire; return the bytes that arrived."""
        ends, moved, before = (self._client, self._server), False, len(self._arrived)
        for source, target, port in ((*ends, 1), (*ends[::-1], 2)):
            datagrams = [data for data, _ in source.datagrams_to_send(self._now_s())]
            target.receive_many_datagrams(datagrams, ("127.0.0.1", port), self._now_s())
            moved |= bool(datagrams)
        for end in ends:
            while (event := end.next_event()) is not None:
                if isinstance(event, self._events.StreamDataReceived):
                    self._arrived += event.data
                ended = isinstance(event, self._events.ConnectionTerminated)
                assert not ended, f"the connection has ended: {event}"
        if not moved:
            due_s = min(at_s for end in ends if (at_s := end.get_timer()) is not None)
            self._skipped_s += max(0.0, due_s - self._now_s())
        for end in ends:
            if (at_s := end.get_timer()) is not None and at_s <= self._now_s():
                end.handle_timer(self._now_s())
        return len(self._arrived) - before

    def _now_s(self) -> float:
        return time.perf_counter() + self._skipped_s


def write_certificate(folder: str) -> list[str]:
    """Write a self-signed certificate and its key, and return both paths."""
    paths = [f"{folder}/certificate.pem", f"{folder}/key.pem"]
    kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    command = ["openssl", "req", "-x509", *kind.split(), "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True)
    return paths
