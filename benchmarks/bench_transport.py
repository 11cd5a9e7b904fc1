"""The transport against raw sockets, other libraries and the rates of links: goodput, round trips, processor time.

Everything is measured in one run, between processes on loopback where nothing else is said, with 1,400-byte datagrams
and messages of 1 MB. Loopback never cuts a burst into packets, so absolute rates say little about a network card;
ratios and processor time per gigabyte do. What is not installed or not allowed here is skipped by name.

    python benchmarks/bench_transport.py                  # the table, five minutes
    python benchmarks/bench_transport.py --smoke          # everything once, no figure counts
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parent.parent / "tests"),
]

from children import MESSAGE_BYTES, Transfer, timing  # noqa: E402
from harness import Reach, Report, Row, Timing, figure, speedup  # noqa: E402
from peers import Missing  # noqa: E402
from transport_ends import (  # noqa: E402
    PING_BYTES,
    busy_sink,
    fan_out_cpu_s,
    lone_message_cpu_s,
    node_in_memory,
    node_round_trips,
    node_transfer,
    raw_round_trips,
    raw_transfer,
)
from transport_links import cable_rows, proxy_rows, simulated_rows  # noqa: E402
from transport_peers import PEERS, versions  # noqa: E402

from transport import netns  # noqa: E402

GROUP_LOOPBACK, GROUP_PEERS = "loopback", "peers"
RAW, OURS, PLAIN, MEMORY = "raw GSO/GRO", "ours", "ours, insecure", "ours, in memory"
BUSY, CONVOY = "ours, computing receiver", "ours, computing receiver, 5 ms switch interval"
FAN_OUT_PEERS = 16

Rounds = dict[str, list[Transfer]]


def measure(report: Report, seconds: float, rounds: int) -> Rounds:
    """Run everything in turn, round by round, so that all meet the same machine; skip what is missing."""
    ways = {
        RAW: raw_transfer,
        OURS: node_transfer,
        PLAIN: lambda seconds: node_transfer(seconds, insecure=True),
        BUSY: lambda seconds: node_transfer(seconds, busy_sink),
        CONVOY: lambda seconds: node_transfer(seconds, busy_sink, switch_interval_s=None),
        MEMORY: node_in_memory,
        **{peer.name: peer.run for peer in PEERS},
    }
    found: Rounds = {name: [] for name in ways}
    for _ in range(rounds):
        for name in list(found):
            try:
                found[name].append(ways[name](seconds))
            except Missing as missing:
                report.skip(name, str(missing))
                del found[name]
    return found


def loopback_rows(found: Rounds) -> Iterator[Row]:
    """Yield ours against raw sockets, and what it costs the processor."""
    raw, ours = timing(RAW, found[RAW]), timing(OURS, found[OURS])
    yield _faster(GROUP_LOOPBACK, "goodput of 1 MB messages", ours, raw, Reach(">=", 0.3))
    plain = timing(PLAIN, found[PLAIN])
    yield _faster(GROUP_LOOPBACK, "the same, neither encrypted nor authenticated", plain, raw, None)
    yield from _absolute(GROUP_LOOPBACK, OURS, found[OURS])
    yield from _absolute(GROUP_LOOPBACK, RAW, found[RAW])
    resent = [float(transfer.resent_bytes) for transfer in found[OURS]]
    yield _figures(GROUP_LOOPBACK, f"{OURS}: bytes sent again", resent, " B")


def convoy_rows(found: Rounds) -> Iterator[Row]:
    """Yield what is left when the receiver's main thread computes in Python and so keeps the interpreter's lock."""
    busy, convoy = timing(BUSY, found[BUSY]), timing(CONVOY, found[CONVOY])
    what = "goodput to a receiver that computes in Python"
    yield _faster(GROUP_LOOPBACK, what, busy, timing(OURS, found[OURS]), None)
    yield _faster(GROUP_LOOPBACK, what, busy, convoy, None)


def peer_rows(found: Rounds) -> Iterator[Row]:
    """Yield ours against each library that is there: between processes, and in memory where that is in memory."""
    ours, memory = timing(OURS, found[OURS]), timing(MEMORY, found[MEMORY])
    yield from _absolute(GROUP_PEERS, MEMORY, found[MEMORY])
    for peer in PEERS:
        if peer.name in found:
            theirs = timing(peer.name, found[peer.name])
            what = "goodput of 1 MB messages, two processes"
            reach = None if peer.reach is None else Reach(">=", peer.reach)
            yield _faster(GROUP_PEERS, what, ours, theirs, reach)
            if peer.is_in_memory:
                what = "goodput of 1 MB messages, both ends in memory"
                yield _faster(GROUP_PEERS, what, memory, theirs, None)
            yield from _absolute(GROUP_PEERS, peer.name, found[peer.name])


def fan_out_rows(report: Report, messages: int, rounds: int) -> Iterator[Row]:
    """Yield what more peers cost a sender: a message is sealed once, whoever gets it."""
    one: list[float] = []
    to_each: list[float] = []
    to_group: list[float] = []
    for _ in range(rounds):
        one.append(fan_out_cpu_s(1, messages))
        to_each.append(fan_out_cpu_s(FAN_OUT_PEERS, messages))
    what = f"sender's processor time for {FAN_OUT_PEERS} local peers"
    yield _more(what, to_each, one)
    try:
        for _ in range(rounds):
            to_group.append(fan_out_cpu_s(FAN_OUT_PEERS, messages, multicast=True))
    except TimeoutError as error:
        report.skip(f"{FAN_OUT_PEERS} peers of a multicast group", str(error))
    else:
        yield _more(f"{what}, a multicast group", to_group, one)


def _more(what: str, many: list[float], one: list[float]) -> Row:
    ratios = [of(many) / of(one) for of in (min, statistics.median)]
    return Row(
        GROUP_LOOPBACK, what, MESSAGE_BYTES, "x", *ratios, reference="one", reach=Reach("<=", 10)
    )


def lone_message_rows(messages: int, rounds: int) -> Iterator[Row]:
    """Yield what a message costs that comes alone, which is mostly waking up."""
    cpu_s = [lone_message_cpu_s(messages // rounds) for _ in range(rounds)]
    for end, values in zip(("sender", "receiver"), zip(*cpu_s, strict=True), strict=True):
        what = f"a message of 1 KB each 8 ms to a waiting caller, {end}'s processor time"
        in_us = [value * 1e6 for value in values]
        yield Row(GROUP_LOOPBACK, what, PING_BYTES, " us", min(in_us), statistics.median(in_us))


def round_trip_rows(pings: int, rounds: int) -> Iterator[Row]:
    """Yield round trips of 1 KB against a raw UDP ping-pong."""
    raw: list[float] = []
    ours: list[float] = []
    for _ in range(rounds):
        raw += raw_round_trips(pings // rounds)
        ours += node_round_trips(pings // rounds)
    yield figure(
        GROUP_LOOPBACK,
        "round trip of 1 KB, p50",
        PING_BYTES,
        statistics.median(ours) / statistics.median(raw),
        "x",
        reference="raw UDP",
        reach=Reach("<=", 4),
    )
    for name, samples in (("raw UDP", raw), ("ours", ours)):
        for share in (50, 99):
            value = statistics.quantiles(samples, n=100)[share - 1] * 1e6
            what = f"round trip of 1 KB, {name}, p{share}"
            yield figure(GROUP_LOOPBACK, what, PING_BYTES, value, " us")


def _faster(group: str, what: str, ours: Timing, reference: Timing, reach: Reach | None) -> Row:
    return speedup(group, what, MESSAGE_BYTES, ours, reference, reach=reach)


def _absolute(group: str, name: str, transfers: Sequence[Transfer]) -> Iterator[Row]:
    """Yield goodput and processor time; of both ends together where they share a process."""
    per_gb = 1e9 / MESSAGE_BYTES
    rates = [1e-9 * MESSAGE_BYTES / transfer.seconds for transfer in transfers]
    yield Row(
        group,
        f"{name}: goodput",
        MESSAGE_BYTES,
        " GB/s",
        max(rates),
        statistics.median(rates),
        timings=(timing(name, transfers),),
    )
    sender = [transfer.sender_cpu_s * per_gb for transfer in transfers]
    receiver = [transfer.receiver_cpu_s * per_gb for transfer in transfers]
    if any(receiver):
        yield _figures(group, f"{name}: sender's processor time", sender, " s/GB")
        yield _figures(group, f"{name}: receiver's processor time", receiver, " s/GB")
    else:
        yield _figures(group, f"{name}: processor time of both ends", sender, " s/GB")


def _figures(group: str, what: str, values: Sequence[float], unit: str) -> Row:
    return Row(group, what, MESSAGE_BYTES, unit, min(values), statistics.median(values))


def run(report: Report, seconds: float, rounds: int, *, smoke: bool) -> None:
    """Measure everything that this machine can."""
    if sys.platform == "linux":
        found = measure(report, seconds, rounds)
        report.add(loopback_rows(found))
        report.add(convoy_rows(found))
        report.add(peer_rows(found))
        report.add(fan_out_rows(report, max(2, int(10 * seconds)), rounds))
        report.add(round_trip_rows(50 if smoke else 5_000, rounds))
        report.add(lone_message_rows(20 if smoke else 1_000, rounds))
    else:
        report.skip("loopback and peers", "raw GSO and GRO exist only on Linux")
    report.add(simulated_rows((2 if smoke else 32) * MESSAGE_BYTES))
    report.add(proxy_rows(2 if smoke else 24, rounds))
    reason = netns.missing()
    if reason is not None:
        report.skip("cables", reason)
    else:
        report.add(cable_rows(2 if smoke else 48, rounds))


def main() -> int:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="as little as possible; no figure counts"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of each goodput measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    seconds, rounds = (0.1, 1) if options.smoke else (options.seconds, options.rounds)
    report = Report(
        {
            "benchmark": "transport",
            "mode": "smoke" if options.smoke else "full",
            "clock": "wall",
            "seconds": seconds,
            "rounds": rounds,
            "peers": versions(),
        },
        void="smoke test" if options.smoke else "",
    )
    run(report, seconds, rounds, smoke=options.smoke)
    report.print()
    if options.json is not None:
        report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
