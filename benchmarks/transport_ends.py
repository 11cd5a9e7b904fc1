"""Our nodes and, as the reference, raw sockets without any protocol: transfers and round trips on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from children import MESSAGE_BYTES, PAYLOAD, Transfer, child

from gradwire.transport import Node, Ticket
from gradwire.transport.endpoint import Endpoint

__all__ = [
    "PING_BYTES",
    "SkippingClock",
    "busy_sink",
    "fan_out_cpu_s",
    "lone_message_cpu_s",
    "node_in_memory",
    "node_round_trips",
    "node_transfer",
    "raw_round_trips",
    "raw_transfer",
]

SECRET = bytes(range(32))
MULTICAST_GROUP = "239.77.11.4"
BURST_BYTES, SEGMENT_BYTES = 63_000, 1_400
PING_BYTES = 1_024
COMPUTE_S = 0.01
LONE_S = 0.008
MESSAGES_IN_FLIGHT = 4
UDP_SEGMENT, UDP_GRO = 103, 104


# ---- raw sockets: the reference ---------------------------------------------------------------------------------


def raw_sink(pipe: Connection, seconds: float) -> None:
    """Count what arrives, GRO on, until it stops; report seconds and processor seconds per byte."""
    sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sink.bind(("127.0.0.1", 0))
    sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sink.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    sink.settimeout(1.0)
    pipe.send(sink.getsockname())
    buffer = bytearray(65_536)
    total = sink.recvmsg_into([buffer], 64)[0]
    started_s, cpu_s = time.perf_counter(), time.process_time()
    end_s = started_s
    with contextlib.suppress(TimeoutError):
        while end_s - started_s < seconds:
            total += sink.recvmsg_into([buffer], 64)[0]
            end_s = time.perf_counter()
    pipe.send(((end_s - started_s) / total, (time.process_time() - cpu_s) / total))


def raw_transfer(seconds: float) -> Transfer:
    """Send bursts through raw GSO/GRO sockets; what counts is what arrives, for nothing is sent again."""
    with (
        child(raw_sink, seconds) as pipe,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source,
    ):
        address = pipe.recv()
        source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        burst = os.urandom(BURST_BYTES)
        option = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", SEGMENT_BYTES))]
        cpu_s, sent = time.process_time(), 0
        while not pipe.poll():
            for _ in range(20):
                source.sendmsg([burst], option, 0, address)
                sent += BURST_BYTES
        sender = (time.process_time() - cpu_s) / sent
        byte_s, receiver = pipe.recv()
    return Transfer(byte_s * MESSAGE_BYTES, sender * MESSAGE_BYTES, receiver * MESSAGE_BYTES)


def raw_echo(pipe: Connection) -> None:
    """Send every datagram back until an empty one comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.bind(("127.0.0.1", 0))
        pipe.send(echo.getsockname())
        while True:
            data, source = echo.recvfrom(65_536)
            if not data:
                return
            echo.sendto(data, source)


def raw_round_trips(count: int) -> list[float]:
    """Return the round trips of a raw UDP ping-pong."""
    with child(raw_echo) as pipe, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        source.connect(pipe.recv())
        payload, samples = os.urandom(PING_BYTES), []
        for _ in range(count):
            started_s = time.perf_counter()
            source.send(payload)
            source.recv(65_536)
            samples.append(time.perf_counter() - started_s)
        source.send(b"")
        return samples[count // 10 :]


# ---- nodes in two processes -------------------------------------------------------------------------------------


def node_sink(pipe: Connection, nodes: int, options: dict[str, Any]) -> None:
    """Receive with so many nodes until told to stop; report bytes and processor seconds after the first message."""
    sinks = [Node("127.0.0.1:0", secret=SECRET, **options) for _ in range(nodes)]
    pipe.send([sink.address for sink in sinks])
    first: set[int] = set()
    total, cpu_s, is_told = 0, 0.0, False
    while not is_told:
        is_told = pipe.poll()  # what is acknowledged by then still waits to be taken once
        for index, sink in enumerate(sinks):
            for _, _, payload in sink.receive(timeout_s=0.01 if nodes == 1 else 0.0):
                if index in first:
                    total += len(payload)
                else:
                    assert payload == PAYLOAD, "other bytes came"
                    first.add(index)
                    cpu_s = time.process_time()
    pipe.recv()
    pipe.send((total, time.process_time() - cpu_s))
    for sink in sinks:
        sink.close(timeout_s=0.1)


def busy_sink(pipe: Connection, nodes: int, options: dict[str, Any]) -> None:
    """Like `node_sink` with one node, but compute in Python all the while and look for messages every 10 ms."""
    assert nodes == 1
    sink = Node("127.0.0.1:0", secret=SECRET, **options)
    pipe.send([sink.address])
    total, came, is_told = 0, 0, False
    while not is_told:
        is_told = pipe.poll()
        for _, _, payload in sink.receive(timeout_s=0.0):
            assert came or payload == PAYLOAD, "other bytes came"
            total += len(payload) if came else 0
            came += 1
        end_s = time.perf_counter() + COMPUTE_S
        while time.perf_counter() < end_s:
            sum(index * index for index in range(200))
    pipe.recv()
    pipe.send((total, 0.0))  # its processor time is that of the computing
    sink.close(timeout_s=0.1)


def node_transfer(
    seconds: float, sink: Callable[..., None] = node_sink, **options: Any
) -> Transfer:
    """Send messages from one process to another, a few at a time, until all are acknowledged."""
    with (
        child(sink, 1, options) as pipe,
        Node("127.0.0.1:0", pipe.recv(), secret=SECRET, **options) as node,
    ):
        node.wait_for_peers(1, timeout_s=10.0)
        node.publish(PAYLOAD)  # not counted, but compared
        assert node.drain(timeout_s=30.0)
        sent = 0
        tickets: deque[Ticket] = deque()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() - started_s < seconds:
            tickets.append(node.publish(PAYLOAD))
            sent += 1
            # Enough in flight to keep the path full, not so much that it leaves the processor's cache.
            while len(tickets) > MESSAGES_IN_FLIGHT and not tickets[0].is_done:
                node.receive(timeout_s=0.001)
            while tickets and tickets[0].is_done:
                tickets.popleft()
        assert node.drain(timeout_s=30.0)
        elapsed_s, sender_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        resent = node.stats().retransmitted_bytes
        pipe.send("stop")
        total, receiver_s = pipe.recv()
        assert total == sent * MESSAGE_BYTES, "every byte must arrive"
        return Transfer(elapsed_s / sent, sender_s / sent, receiver_s / sent, resent)


def fan_out_cpu_s(peers: int, messages: int, *, multicast: bool = False) -> float:
    """Return the sender's processor seconds per 1 MB message to so many peers, to each or through a multicast group.

    Raises:
        TimeoutError: what is sent to a group does not arrive on this machine.
    """
    options = {"multicast": f"{MULTICAST_GROUP}:{free_port()}"} if multicast else {}
    with (
        child(node_sink, peers, options) as pipe,
        Node("127.0.0.1:0", pipe.recv(), secret=SECRET, **options) as node,
    ):
        node.wait_for_peers(peers, timeout_s=30.0)
        if multicast:
            wait_for_multicast(node)
        node.publish(PAYLOAD)
        assert node.drain(timeout_s=30.0)
        cpu_s = time.process_time()
        for _ in range(messages):
            node.publish(PAYLOAD)
            assert node.drain(timeout_s=30.0)
        used_s = (time.process_time() - cpu_s) / messages
        pipe.send("stop")
        total, _ = pipe.recv()
        assert total == peers * messages * MESSAGE_BYTES, "every byte must arrive at every peer"
        return used_s


def lone_message_cpu_s(messages: int) -> tuple[float, float]:
    """Return the processor seconds of sender and receiver per message of 1 KB to a waiting caller, each 8 ms.

    That is mostly waking up: who measures it in a tight loop sees none of it.
    """
    with (
        child(waiting_sink) as pipe,
        Node("127.0.0.1:0", pipe.recv(), secret=SECRET) as node,
    ):
        node.wait_for_peers(1, timeout_s=10.0)
        payload = os.urandom(PING_BYTES)
        node.publish(payload)  # not counted
        assert node.drain(timeout_s=10.0)
        cpu_s = time.process_time()
        for _ in range(messages):
            node.publish(payload)
            time.sleep(LONE_S)
        sender_s = time.process_time() - cpu_s
        assert node.drain(timeout_s=10.0)
        pipe.send("stop")
        count, receiver_s = pipe.recv()
        assert count == messages, "every message must arrive"
        return sender_s / messages, receiver_s / messages


def waiting_sink(pipe: Connection) -> None:
    """Wait in `receive` until told to stop; report messages and processor seconds after the first message."""
    with Node("127.0.0.1:0", secret=SECRET) as sink:
        pipe.send([sink.address])
        [_] = sink.receive(timeout_s=30.0)
        count, cpu_s = 0, time.process_time()
        while not pipe.poll():
            count += len(sink.receive(timeout_s=1.0))
        pipe.recv()
        pipe.send((count, time.process_time() - cpu_s))


def free_port() -> int:
    """Return a UDP port that nobody has at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_multicast(node: Node, timeout_s: float = 10.0) -> None:
    """Wait until all peers are served through the group.

    Raises:
        TimeoutError: some are not.
    """
    end_s = time.monotonic() + timeout_s
    while any(peer.carrier != "multicast" for peer in node.stats().peers):
        if time.monotonic() >= end_s:
            raise TimeoutError(f"not all peers hear the group after {timeout_s:g} s")
        time.sleep(0.01)


def node_echo(pipe: Connection) -> None:
    """Send every message back until told to stop."""
    with Node("127.0.0.1:0", secret=SECRET) as node:
        pipe.send([node.address])
        while not pipe.poll():
            for peer, tag, payload in node.receive(timeout_s=0.5):
                node.publish(payload, tag, to=peer)


def node_round_trips(count: int) -> list[float]:
    """Return the round trips of 1 KB messages."""
    with child(node_echo) as pipe, Node("127.0.0.1:0", pipe.recv(), secret=SECRET) as node:
        node.wait_for_peers(1, timeout_s=10.0)
        payload, samples = os.urandom(PING_BYTES), []
        for index in range(count):
            started_s = time.perf_counter()
            node.publish(payload, index)
            [answer] = node.receive(timeout_s=5.0)
            samples.append(time.perf_counter() - started_s)
            assert answer.payload == payload
        pipe.send("stop")
        return samples[count // 10 :]


# ---- both ends in memory ----------------------------------------------------------------------------------------


class SkippingClock:
    """The time for sans-IO ends that share a process: where both would only wait for a timer, it jumps there.

    So a link in memory has no delay at all, and no end can lose to its own timers.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self._skipped_s

    def skip_to(self, at_s: float) -> None:
        """Let it be this late at least."""
        self._skipped_s += max(0.0, at_s - self())


def node_in_memory(seconds: float) -> Transfer:
    """Send messages from one endpoint to another in the same process, without sockets: what sans-IO peers do too."""
    clock = SkippingClock()
    first, second = ("memory", 1), ("memory", 2)
    one, two = (Endpoint(SECRET, clock(), node_id=number, incarnation=1) for number in (1, 2))
    one.connect(second)

    def step() -> None:
        moved = False
        for source, target, address in ((one, two, first), (two, one, second)):
            now_s = clock()
            for transmit in source.poll(now_s):
                # One copy to a contiguous buffer, which the kernel would make.
                data = memoryview(transmit.data())
                target.receive(data, transmit.segment_bytes or transmit.nbytes, address, now_s)
                moved = True
        if not moved:
            due = [end.next_timeout_s(clock()) for end in (one, two)]
            clock.skip_to(min(at_s for at_s in due if at_s is not None))

    def send(messages: Callable[[int], bool]) -> int:
        sent = came = 0
        while messages(sent) or came < sent:
            while messages(sent) and sent - came < MESSAGES_IN_FLIGHT:
                one.publish(memoryview(PAYLOAD), sent, None, clock())
                sent += 1
            step()
            for _, tag, payload in two.take_messages(clock()):
                assert (tag, len(payload)) == (came, MESSAGE_BYTES), "every byte must arrive"
                assert came or payload == PAYLOAD, "other bytes came"
                came += 1
        return sent

    while not (one.peers and two.peers):
        step()
    send(lambda sent: sent < 1)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    sent = send(lambda _: time.perf_counter() - started_s < seconds)
    return Transfer(
        (time.perf_counter() - started_s) / sent,
        (time.process_time() - cpu_s) / sent,
        resent_bytes=one.stats().retransmitted_bytes,
    )
