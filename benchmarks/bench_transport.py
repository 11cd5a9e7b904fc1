"""The transport against raw sockets: goodput, round trips, processor time, and shaped links in the simulator.

Everything is measured in one run between processes on loopback, with 1,400-byte datagrams; ratios are against the
same records or datagrams sent through raw sockets without any protocol. Loopback never cuts a burst into packets, so
absolute rates say little about a network card; ratios and processor time per gigabyte do.

    python benchmarks/bench_transport.py                  # the table, about a minute
    python benchmarks/bench_transport.py --smoke          # everything once, no figure counts
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parent.parent / "tests"),
]

from harness import Reach, Report, Row, figure  # noqa: E402

from gradwire.transport import Node, Ticket  # noqa: E402
from transport.simulator import Link, Simulator  # noqa: E402

SECRET = bytes(range(32))
MESSAGE_BYTES = 1 << 20
BURST_BYTES, SEGMENT_BYTES = 63_000, 1_400
PING_BYTES = 1_024
MESSAGES_IN_FLIGHT = 4
UDP_SEGMENT, UDP_GRO = 103, 104
GROUP_RAW, GROUP_LINK = "loopback", "simulated link"

Samples = list[float]


@contextlib.contextmanager
def child(run: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in another process, which gets one end of a pipe; wait for it at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.join(timeout=10.0)
        if process.is_alive():
            process.kill()


# ---- raw sockets: the reference ---------------------------------------------------------------------------------


def raw_sink(pipe: Connection, seconds: float) -> None:
    """Count what arrives, GRO on, until it stops; report bytes per second and processor seconds per byte."""
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
    pipe.send((total / (end_s - started_s), (time.process_time() - cpu_s) / total))


def raw_goodput(seconds: float) -> tuple[float, float, float]:
    """Return bytes per second through raw GSO/GRO sockets and the processor seconds per byte of both ends."""
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
        rate, receiver = pipe.recv()
        return rate, sender, receiver


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


def raw_round_trips(count: int) -> Samples:
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


# ---- nodes ------------------------------------------------------------------------------------------------------


def node_sink(pipe: Connection, nodes: int, options: dict[str, Any]) -> None:
    """Receive with so many nodes until told to stop; report bytes and processor seconds since the first message."""
    sinks = [Node("127.0.0.1:0", secret=SECRET, **options) for _ in range(nodes)]
    pipe.send([sink.address for sink in sinks])
    total, cpu_s = 0, 0.0
    while not pipe.poll():
        for sink in sinks:
            for _, _, payload in sink.receive(timeout_s=0.01 if nodes == 1 else 0.0):
                cpu_s = cpu_s or time.process_time()
                total += len(payload)
    pipe.recv()
    pipe.send((total, time.process_time() - cpu_s))
    for sink in sinks:
        sink.close(timeout_s=0.1)


def node_goodput(seconds: float, **options: Any) -> tuple[float, float, float, int]:
    """Return bytes per second of 1 MB messages, processor seconds per byte of both ends, and bytes sent again."""
    with (
        child(node_sink, 1, options) as pipe,
        Node("127.0.0.1:0", pipe.recv(), secret=SECRET, **options) as node,
    ):
        node.wait_for_peers(1, timeout_s=10.0)
        payload, sent = os.urandom(MESSAGE_BYTES), 0
        tickets: deque[Ticket] = deque()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() - started_s < seconds:
            tickets.append(node.publish(payload))
            sent += MESSAGE_BYTES
            # Enough in flight to keep the path full, not so much that it leaves the processor's cache.
            while len(tickets) > MESSAGES_IN_FLIGHT and not tickets[0].is_done:
                node.receive(timeout_s=0.001)
            while tickets and tickets[0].is_done:
                tickets.popleft()
        assert node.drain(timeout_s=30.0)
        elapsed_s, sender = time.perf_counter() - started_s, (time.process_time() - cpu_s) / sent
        again = node.stats().retransmitted_bytes
        pipe.send("stop")
        total, receiver_s = pipe.recv()
        assert total == sent, "every byte must arrive"
        return sent / elapsed_s, sender, receiver_s / total, again


def fan_out_cpu_s(peers: int, messages: int) -> float:
    """Return the sender's processor seconds per 1 MB message to so many peers."""
    with (
        child(node_sink, peers, {}) as pipe,
        Node("127.0.0.1:0", pipe.recv(), secret=SECRET) as node,
    ):
        node.wait_for_peers(peers, timeout_s=30.0)
        payload = os.urandom(MESSAGE_BYTES)
        cpu_s = time.process_time()
        for _ in range(messages):
            node.publish(payload)
            assert node.drain(timeout_s=30.0)
        used_s = (time.process_time() - cpu_s) / messages
        pipe.send("stop")
        pipe.recv()
        return used_s


def node_echo(pipe: Connection) -> None:
    """Send every message back until told to stop."""
    with Node("127.0.0.1:0", secret=SECRET) as node:
        pipe.send([node.address])
        while not pipe.poll():
            for peer, tag, payload in node.receive(timeout_s=0.5):
                node.publish(payload, tag, to=peer)


def node_round_trips(count: int) -> Samples:
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


# ---- shaped links, in the simulator -----------------------------------------------------------------------------


def simulated(link: Link, nbytes: int) -> tuple[float, float]:
    """Return the share of the link's rate that messages of 1 MB use, and retransmitted / lost bytes."""
    simulator = Simulator(1, Link(delay_s=link.delay_s))
    one, two = simulator.mesh(2)
    for source, target in ((one, two), (two, one)):
        simulator.links[source.address, target.address] = (
            link if source is one else Link(delay_s=link.delay_s, loss=link.loss)
        )
    started_s = simulator.now_s
    tickets = [simulator.publish(one, bytes(MESSAGE_BYTES)) for _ in range(nbytes // MESSAGE_BYTES)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 600.0)
    rate = nbytes / (simulator.now_s - started_s)
    again = one.endpoint.stats().retransmitted_bytes
    return rate / link.rate_bytes_per_s, again / link.lost_bytes if link.lost_bytes else 0.0


def link_rows(nbytes: int) -> Iterator[Row]:
    """Yield the share of the rate used on the links that the project promises something about."""
    for what, link, reach in (
        (
            "use of 100 Mbit/s, 1 ms round trip",
            Link(0.0005, rate_bytes_per_s=12.5e6, queue_bytes=125_000),
            0.92,
        ),
        (
            "use of 100 Mbit/s, 40 ms round trip, 1 % loss",
            Link(0.02, loss=0.01, rate_bytes_per_s=12.5e6, queue_bytes=500_000),
            0.8,
        ),
        (
            "use of 10 Mbit/s, 30 ms, queue of 25 packets",
            Link(0.015, rate_bytes_per_s=1.25e6, queue_bytes=35_000),
            0.8,
        ),
    ):
        used, again = simulated(link, nbytes)
        yield figure(
            GROUP_LINK, what, nbytes, used, "x", reference="its rate", reach=Reach(">=", reach)
        )
        yield figure(
            GROUP_LINK,
            what.replace("use of", "sent again on"),
            nbytes,
            again,
            "x",
            reference="lost",
            reach=Reach("<=", 1.2),
        )
    rates = [
        simulated(Link(0.0005, loss=loss, rate_bytes_per_s=125e6, queue_bytes=250_000), nbytes)[0]
        for loss in (0.0, 0.01)
    ]
    yield figure(
        GROUP_LINK,
        "1 Gbit/s at 1 % loss",
        nbytes,
        rates[1] / rates[0],
        "x",
        reference="0 %",
        reach=Reach(">=", 0.85),
    )


# ---- the table --------------------------------------------------------------------------------------------------


def loopback_rows(seconds: float, rounds: int, pings: int) -> Iterator[Row]:
    """Yield the rows measured on loopback; rounds alternate, so that both sides meet the same machine."""
    raw, sealed, plain = [], [], []
    for _ in range(rounds):
        raw.append(raw_goodput(seconds))
        sealed.append(node_goodput(seconds))
        plain.append(node_goodput(seconds, insecure=True))
    yield _ratio(
        "goodput of 1 MB messages",
        [row[0] for row in sealed],
        [row[0] for row in raw],
        Reach(">=", 0.3),
    )
    yield _ratio(
        "same, neither encrypted nor authenticated",
        [row[0] for row in plain],
        [row[0] for row in raw],
        None,
    )
    best = max(sealed)
    yield figure(GROUP_RAW, "goodput", MESSAGE_BYTES, best[0] / 1e9, " GB/s")
    yield figure(GROUP_RAW, "raw goodput", MESSAGE_BYTES, max(raw)[0] / 1e9, " GB/s")
    yield figure(
        GROUP_RAW,
        "sender's processor time",
        MESSAGE_BYTES,
        min(row[1] for row in sealed) * 1e9,
        " s/GB",
    )
    yield figure(
        GROUP_RAW,
        "receiver's processor time",
        MESSAGE_BYTES,
        min(row[2] for row in sealed) * 1e9,
        " s/GB",
    )
    yield figure(GROUP_RAW, "bytes sent again", MESSAGE_BYTES, float(best[3]), " B")
    messages = max(2, int(10 * seconds))
    one, many = [min(fan_out_cpu_s(peers, messages) for _ in range(rounds)) for peers in (1, 16)]
    yield figure(
        GROUP_RAW,
        "sender's processor time for 16 peers",
        MESSAGE_BYTES,
        many / one,
        "x",
        reference="one",
        reach=Reach("<=", 10),
    )
    reference, ours = raw_round_trips(pings), node_round_trips(pings)
    yield figure(
        GROUP_RAW,
        "round trip of 1 KB, p50",
        PING_BYTES,
        statistics.median(ours) / statistics.median(reference),
        "x",
        reference="raw UDP",
        reach=Reach("<=", 4),
    )
    for name, samples in (("raw UDP", reference), ("ours", ours)):
        for share in (50, 99):
            value = statistics.quantiles(samples, n=100)[share - 1] * 1e6
            yield figure(
                GROUP_RAW, f"round trip of 1 KB, {name}, p{share}", PING_BYTES, value, " us"
            )


def _ratio(what: str, ours: Samples, reference: Samples, reach: Reach | None) -> Row:
    best, typical = (
        max(ours) / max(reference),
        statistics.median(ours) / statistics.median(reference),
    )
    return Row(
        GROUP_RAW, what, MESSAGE_BYTES, "x", best, typical, reference="raw GSO/GRO", reach=reach
    )


def main() -> int:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="as little as possible; no figure counts"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of each goodput measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    seconds, rounds, pings = (
        (0.1, 1, 50) if options.smoke else (options.seconds, options.rounds, 5_000)
    )
    nbytes = (2 if options.smoke else 32) * MESSAGE_BYTES
    report = Report(
        {"seconds": seconds, "rounds": rounds}, void="smoke test" if options.smoke else ""
    )
    if sys.platform == "linux":
        report.add(loopback_rows(seconds, rounds, pings))
    else:
        report.skip("loopback", "raw GSO and GRO exist only on Linux")
    report.add(link_rows(nbytes))
    report.print()
    if options.json is not None:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
