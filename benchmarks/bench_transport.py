"""The transport against raw sockets, other libraries, and the rates of links.

Every figure comes from processes of their own, on loopback or on emulated links; candidates and references take turns.
Loopback does not cut bursts into packets, so ratios say more than rates. References that are not installed, and links
that are not allowed, are skipped by name.

    python benchmarks/bench_transport.py                       # all tables, ten minutes
    python benchmarks/bench_transport.py --smoke               # everything once, no figure counts
    python benchmarks/bench_transport.py --only all-to-all
    python benchmarks/bench_transport.py --gradwire . --gradwire ../before   # two checkouts, in turn, and their ratio
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from harness import Report, Row, Target, Timing, ratio  # noqa: E402
from transport_goodput import MESSAGE_BYTES, Qh3, raw_transfer, transfer  # noqa: E402
from transport_links import Checkouts, simulated_rows, socket_rows  # noqa: E402
from transport_meshes import (  # noqa: E402
    Mesh,
    exchange_mesh,
    gloo_mesh,
    gradwire_mesh,
    grpc_mesh,
    step_times,
    zmq_mesh,
)

STEP_BYTES, SINGLE_BYTES, SINGLE_PAUSE_S = 110_000, 300_000, 0.01
EXCHANGE_PROCESSES, EXCHANGE_NUMEL = 6, 1_000_000
# By reference: the part of a process, the module needed, and the target of our time over theirs.
PEERS: dict[str, tuple[Mesh, str, Target | None]] = {
    "grpcio": (grpc_mesh, "grpc", Target("<=", 1.0)),
    "gloo all_gather": (gloo_mesh, "torch", Target("<=", 1.5)),
    "pyzmq": (zmq_mesh, "zmq", None),
}


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    rounds: int = 5
    seconds: float = 1.5
    messages: int = 48
    simulated_messages: int = 32
    singles: int = 200
    steps: int = 100
    processes: tuple[int, ...] = (4, 8)


SMOKE = Settings(1, 0.1, 2, 2, 5, 10, (3,))


class Samples:
    """The samples of several ways, by the names of their columns or references."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}

    def add(self, name: str, *samples_s: float) -> None:
        self._samples.setdefault(name, []).extend(samples_s)

    def timing(self, name: str) -> Timing:
        return Timing(name, tuple(self._samples[name]))

    def milliseconds(self, what: str, checkouts: Checkouts) -> Iterator[Row]:
        """Yield the times of each checkout."""
        for name in checkouts:
            timing = self.timing(name)
            figures = timing.minimum_s * 1e3, timing.median_s * 1e3
            yield Row("transport-loopback", what, name, *figures, unit="ms", timings=(timing,))

    def ratios(
        self, what: str, checkouts: Checkouts, targets: Mapping[str, Target | None], *, faster: bool
    ) -> Iterator[Row]:
        """Yield the times of each checkout relative to each reference that was measured."""
        for name in checkouts:
            for reference, target in targets.items():
                if reference in self._samples:
                    theirs, where = self.timing(reference), ("transport-loopback", what, name)
                    more = {"target": target, "note": f"theirs {theirs.minimum_s * 1e3:.2f} ms"}
                    yield ratio(where, self.timing(name), theirs, faster=faster, **more)


def goodput(settings: Settings, report: Report, checkouts: Checkouts) -> Iterator[Row]:
    """Yield goodput relative to raw sockets and to QUIC."""
    samples, has_qh3 = Samples(), is_installed("qh3", report)
    for _ in range(settings.rounds):
        samples.add("raw GSO/GRO", raw_transfer(settings.seconds))
        for name, checkout in checkouts.items():
            sent = transfer(seconds=settings.seconds, checkout=checkout)
            samples.add(name, sent.message_s)
        if has_qh3:
            samples.add("qh3, in memory", Qh3().transfer(settings.seconds))
    what = "goodput of 1 MB messages, two processes"
    targets = {"raw GSO/GRO": Target(">=", 0.12), "qh3, in memory": Target(">=", 3.0)}
    yield from samples.ratios(what, checkouts, targets, faster=True)
    for name in checkouts:
        timing = samples.timing(name)
        rates = [MESSAGE_BYTES / 1e9 / s for s in (timing.minimum_s, timing.median_s)]
        yield Row("transport-loopback", what, name, *rates, unit="GB/s", timings=(timing,))


def all_to_all(settings: Settings, report: Report, checkouts: Checkouts) -> Iterator[Row]:
    """Yield the time of a step relative to other libraries."""
    peers = [name for name, (_, module, _) in PEERS.items() if is_installed(module, report)]
    for count in settings.processes:
        samples, size = Samples(), (count, STEP_BYTES, settings.steps)
        for _ in range(settings.rounds):
            for name, checkout in checkouts.items():
                samples.add(name, *step_times(gradwire_mesh, *size, checkout))
            for name in peers:
                samples.add(name, *step_times(PEERS[name][0], *size))
        what = f"step of {STEP_BYTES // 1000} kB all to all, {count} processes"
        targets = {name: target for name, (_, _, target) in PEERS.items()}
        yield from samples.milliseconds(what, checkouts)
        yield from samples.ratios(what, checkouts, targets, faster=False)


def processor(settings: Settings, _: Report, checkouts: Checkouts) -> Iterator[Row]:
    """Yield the processor time that one message alone costs each end."""
    sender, receiver = Samples(), Samples()
    size = {"nbytes": SINGLE_BYTES, "messages": settings.singles}
    for _ in range(settings.rounds):
        for name, checkout in checkouts.items():
            sent = transfer(**size, pause_s=SINGLE_PAUSE_S, checkout=checkout)
            sender.add(name, sent.sender_cpu_s)
            receiver.add(name, sent.receiver_cpu_s)
    what = f"processor time of one message of {SINGLE_BYTES // 1000} kB"
    yield from sender.milliseconds(f"{what}, sender", checkouts)
    yield from receiver.milliseconds(f"{what}, receiver", checkouts)


def exchange(settings: Settings, _: Report, checkouts: Checkouts) -> Iterator[Row]:
    """Yield the time of an exchange's step."""
    samples, size = Samples(), (EXCHANGE_PROCESSES, EXCHANGE_NUMEL, settings.steps)
    for _ in range(settings.rounds):
        for name, checkout in checkouts.items():
            samples.add(name, *step_times(exchange_mesh, *size, checkout))
    what = f"Exchange.step of {EXCHANGE_PROCESSES} processes, 1 M elements, density 0.01"
    yield from samples.milliseconds(what, checkouts)


def links(settings: Settings, report: Report, checkouts: Checkouts) -> Iterator[Row]:
    """Yield what messages make of links with a rate."""
    from transport import netns

    yield from simulated_rows(settings.simulated_messages, checkouts)
    reason = netns.missing()
    if reason is not None:
        report.skip("cables", reason)
    cables = reason is None
    yield from socket_rows(settings.messages, settings.rounds, checkouts, cables=cables)


GROUPS = {
    "goodput": goodput,
    "all-to-all": all_to_all,
    "processor": processor,
    "exchange": exchange,
    "links": links,
}


def is_installed(module: str, report: Report) -> bool:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # tests/torch, which is on the path, is not PyTorch
        report.skip(module, "not installed")
        return False
    return True


def compared(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Row]:
    """Yield, for every figure of the first checkout, its ratio to that of each other checkout."""
    found = {(row.what, row.reference, row.column): row for row in rows if len(row.timings) < 2}
    for (what, reference, column), row in found.items():
        for name in names[1:] if column == names[0] else ():
            other = found.get((what, reference, name))
            if other is not None and other.best and other.median:
                figures = row.best / other.best, row.median / other.median
                where = row.group, what, f"{column} / {name}"
                yield Row(*where, *figures, reference=reference)


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="no figure counts")
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument(
        "--gradwire",
        type=lambda text: Path(text).resolve(),
        action="append",
        metavar="CHECKOUT",
        help="root of a source tree with a compiled gradwire; several are measured in turn",
    )
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()
    settings = SMOKE if options.smoke else Settings(rounds=options.rounds)
    checkouts: dict[str, Path | None] = {"gradwire": None}
    if options.gradwire:
        checkouts = {path.name: path for path in options.gradwire}
        sys.path.insert(0, str(options.gradwire[0] / "python"))  # for the report
    parameters = {"rounds": settings.rounds, "columns": ", ".join(checkouts)}
    report = Report("transport", parameters, void="smoke test" if options.smoke else "")
    for name in options.only:
        print(name, flush=True)
        before = len(report.rows)
        report.add(GROUPS[name](settings, report, checkouts))
        report.add(compared(report.rows[before:], list(checkouts)))
    report.finish(options.json)


if __name__ == "__main__":
    main()
