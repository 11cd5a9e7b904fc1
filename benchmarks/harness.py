"""Interleaved timing of a candidate and its references in one process, and the report of what came out.

A number means little without the one it is compared with, taken in the same minute. So every round times each
operation once, in turn, and what is reported are ratios: of the minima (noise only ever adds) and of the medians (what
one meets).
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import gradwire as gw
from gradwire import _core

__all__ = [
    "Clock",
    "Effort",
    "Operation",
    "Reach",
    "Report",
    "Row",
    "Timing",
    "aligned",
    "cost",
    "cpu_model",
    "figure",
    "last_level_cache_bytes",
    "measure",
    "speedup",
]

Clock = Callable[[], int]

_JSON_FORMAT = 1
_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class Operation:
    """One thing to time.

    Attributes:
        name: as the table shows it.
        run: what is timed. Its result is dropped inside the timed region, so giving memory back counts.
        prepare: called before each timed call, outside of the timed region.
        calls: calls per sample, for operations that a clock cannot resolve one by one.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None
    calls: int = 1


@dataclass(frozen=True)
class Effort:
    """How long one group of operations is measured.

    Attributes:
        seconds: for the whole group; an operation that has used its share of it sits out, once it has ``rounds_min``
            samples. Slow references so do not cost the fast operations their samples.
        rounds_min: least samples of each operation.
        rounds_max: most.
        warmup: untimed calls of each operation before the first round.
    """

    seconds: float
    rounds_min: int = 5
    rounds_max: int = 40
    warmup: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.rounds_min <= self.rounds_max:
            raise ValueError(
                f"rounds must satisfy 1 <= least <= most, got {self.rounds_min}, {self.rounds_max}"
            )


@dataclass(frozen=True)
class Timing:
    """The samples of one operation, seconds per call."""

    name: str
    samples_s: tuple[float, ...]

    @property
    def minimum_s(self) -> float:
        """The least: what the work costs when nothing disturbs it."""
        return min(self.samples_s)

    @property
    def median_s(self) -> float:
        """The typical one."""
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """The middle half of the samples over their median: above 0.1 or so the machine was not quiet."""
        lower, upper = np.quantile(self.samples_s, [0.25, 0.75])
        return float(upper - lower) / self.median_s

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON keeps of it."""
        return {
            "name": self.name,
            "minimum_s": self.minimum_s,
            "median_s": self.median_s,
            "spread": self.spread,
            "samples_s": list(self.samples_s),
        }


def aligned(numel: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Return zeros[numel] that begin at a cache line, as an encoder's residual does; NumPy's own do at 16 bytes."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(numel * itemsize + _CACHE_LINE_BYTES, np.uint8)
    skip = -raw.ctypes.data % _CACHE_LINE_BYTES
    array: NDArray[Any] = raw[skip : skip + numel * itemsize].view(dtype)
    array.fill(0)
    return array


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of this machine; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size.read_text().strip()
        if text.endswith("K"):
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def measure(
    operations: Sequence[Operation],
    effort: Effort,
    *,
    evict: bool = True,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Timing]:
    """Time the operations in turn and return their timings by name.

    Args:
        operations: with distinct names.
        effort: how long.
        evict: read through twice the last-level cache before each timed call, so that no operation finds there what the
            one before it (or its own preparation) left, nor pays for writing that back.
        clock: nanoseconds; the wall clock, or ``time.process_time_ns`` on a busy machine.
    """
    shares_s = effort.seconds / len(operations)
    scratch = aligned(2 * last_level_cache_bytes() // 8 if evict else 1, np.uint64)
    samples: dict[str, list[float]] = {operation.name: [] for operation in operations}
    used_s = dict.fromkeys(samples, 0.0)
    if len(samples) != len(operations):
        raise ValueError("operations need distinct names")
    for operation in operations:
        for _ in range(effort.warmup):
            _time(operation, clock)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(effort.rounds_max):
            for operation in operations:
                if done >= effort.rounds_min and used_s[operation.name] >= shares_s:
                    continue
                begin = time.perf_counter()
                samples[operation.name].append(_time(operation, clock, scratch))
                used_s[operation.name] += time.perf_counter() - begin
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(name, tuple(times)) for name, times in samples.items()}


def _time(operation: Operation, clock: Clock, scratch: NDArray[np.uint64] | None = None) -> float:
    if operation.prepare:
        operation.prepare()
    if scratch is not None:
        scratch.max()
    run = operation.run
    if operation.calls == 1:
        begin = clock()
        run()
        return (clock() - begin) * 1e-9
    calls = range(operation.calls)
    begin = clock()
    for _ in calls:
        run()
    return (clock() - begin) * 1e-9 / operation.calls


@dataclass(frozen=True)
class Reach:
    """The figure to reach."""

    relation: Literal["<=", ">="]
    value: float

    def holds(self, figure: float) -> bool:
        """Return whether ``figure`` reaches it."""
        return figure <= self.value if self.relation == "<=" else figure >= self.value


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        group: the part of the benchmark that made it.
        what: what was measured.
        numel: elements.
        unit: of the figures; "x" for ratios.
        minimum: the figure from the minima.
        median: the figure from the medians; equal to ``minimum`` where nothing was timed.
        reference: what it is compared with; empty for absolute figures.
        reach: what it should be, or None for information only.
        void: why ``reach`` does not apply here; empty if it does.
        floor: the least possible figure, from the bytes that must move; None where not known.
        note: a remark.
        timings: of the candidate and the reference.
    """

    group: str
    what: str
    numel: int
    unit: str
    minimum: float
    median: float
    reference: str = ""
    reach: Reach | None = None
    void: str = ""
    floor: float | None = None
    note: str = ""
    timings: tuple[Timing, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether the reach is met, by the minima and by the medians."""
        if self.reach is None:
            return ""
        if self.void:
            return f"void: {self.void}"
        if not self.reach.holds(self.minimum):
            return "NOT MET"
        return "met" if self.reach.holds(self.median) else "met (minimum only)"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON keeps it."""
        values = asdict(self) | {"verdict": self.verdict}
        values["timings"] = [timing.as_dict() for timing in self.timings]
        return values


def cost(
    group: str, what: str, numel: int, candidate: Timing, reference: Timing, **more: Any
) -> Row:
    """Return a row of the candidate's time over the reference's: less is better."""
    return Row(
        group,
        what,
        numel,
        "x",
        candidate.minimum_s / reference.minimum_s,
        candidate.median_s / reference.median_s,
        reference=reference.name,
        timings=(candidate, reference),
        **more,
    )


def speedup(
    group: str, what: str, numel: int, candidate: Timing, reference: Timing, **more: Any
) -> Row:
    """Return a row of the reference's time over the candidate's: more is better."""
    return Row(
        group,
        what,
        numel,
        "x faster",
        reference.minimum_s / candidate.minimum_s,
        reference.median_s / candidate.median_s,
        reference=reference.name,
        timings=(candidate, reference),
        **more,
    )


def figure(group: str, what: str, numel: int, value: float, unit: str, **more: Any) -> Row:
    """Return a row of a figure that was computed, not timed."""
    return Row(group, what, numel, unit, value, value, **more)


@dataclass
class Report:
    """All rows of one run, what was left out, and the machine.

    Attributes:
        parameters: of the run.
        void: why no figure of this run counts, as in a smoke test; empty if they do.
        rows: so far.
        skipped: what could not be measured, and why.
        machine: processor, versions, commit.
        load_before: load averages when the run began.
    """

    parameters: dict[str, Any]
    void: str = ""
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    load_before: tuple[float, ...] = field(default_factory=lambda: _load_average())
    _cpu_before: _Busy | None = field(default_factory=lambda: _busy())

    def add(self, rows: Iterable[Row]) -> None:
        """Take the rows in and print each: a long run should show that it lives."""
        for row in rows:
            judged = replace(row, void=self.void) if self.void else row
            self.rows.append(judged)
            print(f"  {_one_line(judged)}", flush=True)

    def skip(self, name: str, reason: str) -> None:
        """Note that something could not be measured, and why."""
        self.skipped[name] = reason
        print(f"  skipped {name}: {reason}", flush=True)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON keeps."""
        return {
            "format": _JSON_FORMAT,
            "parameters": self.parameters,
            "machine": self.machine,
            "load_average_before": list(self.load_before),
            "load_average_after": list(_load_average()),
            "cpus_used_by_others": _cpus_used_by_others(self._cpu_before),
            "rows": [row.as_dict() for row in self.rows],
            "skipped": self.skipped,
        }

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def print(self) -> None:
        """Print the table, as Markdown that can also be read as it is, and the machine."""
        heads = ["what", "N", "against", "reach", "minimum", "median", "floor", "spread", "verdict"]
        table = [heads, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
        print()
        for number, line in enumerate(table):
            print(
                "| "
                + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
                + " |"
            )
            if number == 0:
                print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
        for name, reason in self.skipped.items():
            print(f"skipped {name}: {reason}")
        facts = self.as_dict()
        print()
        for key, value in self.machine.items():
            print(f"{key + ':':21}{value}")
        print(f"{'load average:':21}{_loads(facts['load_average_before'])} before, ", end="")
        print(f"{_loads(facts['load_average_after'])} after")
        if facts["cpus_used_by_others"] is not None:
            print(f"{'used by others:':21}{facts['cpus_used_by_others']:.2f} CPUs on average")


def _cells(row: Row) -> list[str]:
    spreads = [f"{timing.spread:.0%}" for timing in row.timings]
    return [
        row.what + (f" ({row.note})" if row.note else ""),
        f"2^{row.numel.bit_length() - 1}" if row.numel.bit_count() == 1 else f"{row.numel:,}",
        row.reference,
        f"{row.reach.relation} {row.reach.value:.4g}{_suffix(row)}" if row.reach else "",
        _number(row.minimum) + _suffix(row),
        _number(row.median) + _suffix(row) if row.timings else "",
        "" if row.floor is None else _number(row.floor),
        " / ".join(spreads),
        row.verdict,
    ]


def _one_line(row: Row) -> str:
    what, numel, reference, reach, minimum, median, _floor, spread, verdict = _cells(row)
    parts = [f"{what}, N = {numel}: {minimum}"]
    if median:
        parts.append(f"(median {median}, spread {spread})")
    if reference:
        parts.append(f"against {reference}")
    if reach:
        parts.append(f"[{reach}: {verdict}]")
    return " ".join(parts)


def _number(value: float) -> str:
    return (
        f"{value:.3f}"
        if abs(value) < 1.1
        else f"{value:.2f}"
        if abs(value) < 100
        else f"{value:.0f}"
    )


def _suffix(row: Row) -> str:
    return row.unit[0] if row.unit.startswith("x") else f" {row.unit}"


def _loads(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "unknown"


def _load_average() -> tuple[float, ...]:
    return os.getloadavg() if hasattr(os, "getloadavg") else ()


@dataclass(frozen=True)
class _Busy:
    """CPU seconds that the whole machine and this process have used up to a time."""

    at_s: float
    machine_s: float
    own_s: float


def _busy() -> _Busy | None:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(text) for text in fields[:8])
    ticks = user + nice + system + irq + softirq + steal
    own = os.times()
    return _Busy(
        time.monotonic(),
        machine_s=ticks / os.sysconf("SC_CLK_TCK"),
        own_s=own.user + own.system + own.children_user + own.children_system,
    )


def _cpus_used_by_others(before: _Busy | None) -> float | None:
    now = _busy()
    if before is None or now is None:
        return None
    elapsed_s = now.at_s - before.at_s
    others_s = (now.machine_s - before.machine_s) - (now.own_s - before.own_s)
    return max(0.0, others_s) / max(elapsed_s, 1e-9)


def cpu_model() -> str:
    """Return the processor's name, family and model."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def _machine() -> dict[str, Any]:
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "last-level cache": f"{last_level_cache_bytes() >> 20} MiB",
        "huge pages": pages.read_text().strip() if pages.exists() else "unknown",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "isa": _core.isa(),
        "gradwire": _version("gradwire"),
        "numpy": np.__version__,
        "cryptography": _version("cryptography"),
        "python": platform.python_version(),
        "commit": _commit(),
        "backends": ", ".join(gw.backends()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed (imported from a build tree)"


def _commit() -> str:
    """Return the commit that is checked out here, with "-dirty" if sources differ from it."""
    where = ["git", "-C", str(Path(__file__).resolve().parent.parent)]
    try:
        run = subprocess.run(
            [*where, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            [*where, "diff", "--quiet", "HEAD", "--", "csrc", "python"], check=False
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip() + ("-dirty" if dirty.returncode else "")
