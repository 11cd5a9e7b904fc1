"""The report of a benchmark: ratios to references of the same run, as tables and as JSON that names the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

CACHE_LINE_BYTES = 64
VERSIONS = ("gradwire", "numpy", "cryptography", "torch", "grpcio", "pyzmq", "qh3")


class Missing(Exception):
    """A reference that cannot be measured on this machine; the message says why."""


def aligned(numel: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Return zeros[numel] aligned to a cache line, as an encoder's residual is; NumPy aligns to 16 bytes only."""
    nbytes = numel * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + CACHE_LINE_BYTES, np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE_BYTES
    return raw[skip : skip + nbytes].view(dtype)


@dataclass(frozen=True)
class Timing:
    """The samples of one operation, in seconds per call."""

    name: str
    samples_s: tuple[float, ...]

    @property
    def minimum_s(self) -> float:
        return min(self.samples_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


@dataclass(frozen=True)
class Target:
    """The figure to reach."""

    relation: Literal["<=", ">="]
    value: float

    def holds(self, figure: float) -> bool:
        return figure <= self.value if self.relation == "<=" else figure >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.relation == '<=' else '≥'} {self.value:.4g}"


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        group: the table, and the block of docs/performance.md.
        what: what was measured: the line of the table.
        column: the variant, such as a size: the column of the table.
        best: the figure of the minima: noise only adds.
        median: the figure of the medians: a user meets it.
        unit: "x" for ratios.
        reference: what the figure is relative to; empty for absolute figures.
        target: the figure to reach, or None.
        floor: the least possible figure, from the bytes that must move, or None.
        note: a remark, shown behind the figure.
        timings: of the candidate and the reference.
    """

    group: str
    what: str
    column: str
    best: float
    median: float
    unit: str = "x"
    reference: str = ""
    target: Target | None = None
    floor: float | None = None
    note: str = ""
    timings: tuple[Timing, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether the target is met, by the minima and by the medians."""
        if self.target is None:
            return ""
        if not self.target.holds(self.best):
            return "not met"
        return "met" if self.target.holds(self.median) else "met (minimum only)"

    @property
    def cell(self) -> str:
        """The figure, with the median and the note in brackets."""
        unit = "" if self.unit == "x" else f" {self.unit}"
        rest = [number(self.median)] * (self.median != self.best) + [self.note] * bool(self.note)
        return number(self.best) + unit + (f" ({'; '.join(rest)})" if rest else "")

    @staticmethod
    def from_dict(content: dict[str, Any]) -> Row:
        """Return the row of a JSON report."""
        target = Target(**content["target"]) if content["target"] else None
        return Row(**{**content, "target": target})


def number(value: float) -> str:
    """Return three digits or so."""
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def ratio(
    where: tuple[str, str, str], ours: Timing, theirs: Timing, *, faster: bool = False, **more: Any
) -> Row:
    """Return our time over theirs, or how many times as fast ours is, in (group, what, column)."""
    pairs = (ours.minimum_s, theirs.minimum_s), (ours.median_s, theirs.median_s)
    figures = [other / own if faster else own / other for own, other in pairs]
    return Row(*where, *figures, reference=theirs.name, timings=(ours, theirs), **more)


def table(rows: Sequence[Row]) -> str:
    """Return the rows of one group as a Markdown table; empty columns are left out."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.what, row.reference), []).append(row)
    columns = list(dict.fromkeys(row.column for row in rows))
    cells = [["what", "against", "target", *columns, "floor", ""]]
    for key, found in lines.items():
        goals = [str(row.target) for row in found if row.target]
        shown = {row.column: row.cell for row in found}
        floors = [number(row.floor) for row in found if row.floor is not None]
        verdicts = dict.fromkeys(row.verdict for row in found if row.verdict)
        figures = [shown.get(column, "") for column in columns]
        cells.append(
            [*key, "".join(goals[:1]), *figures, "".join(floors[:1]), " / ".join(verdicts)]
        )
    kept = [index for index in range(len(cells[0])) if any(line[index] for line in cells[1:])]
    head, *body = [[line[index] for index in kept] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(kept), *body))


@dataclass
class Report:
    """All rows of one run and what was left out; ``void`` says why no figure counts, as in a smoke test."""

    benchmark: str
    parameters: dict[str, Any]
    void: str = ""
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows and print each at once: a long run should show its progress."""
        for given in rows:
            row = replace(given, target=None) if self.void else given
            self.rows.append(row)
            against = f" against {row.reference}" if row.reference else ""
            goal = f" [{row.target}: {row.verdict}]" if row.target else ""
            print(f"  {row.what}, {row.column}: {row.cell}{against}{goal}", flush=True)

    def skip(self, name: str, reason: str) -> None:
        """Note what could not be measured, and why."""
        self.skipped[name] = reason
        print(f"  skipped {name}: {reason}", flush=True)

    def finish(self, path: Path | None) -> None:
        """Print the tables and the machine, and write the JSON file if a path is given."""
        for group in dict.fromkeys(row.group for row in self.rows):
            print(f"\n{group}\n\n{table([row for row in self.rows if row.group == group])}")
        facts = machine() | {"load before": round(self.load_before, 2)}
        print()
        for key, value in (facts | self.parameters).items():
            print(f"{key + ':':18}{value}")
        if self.void:
            print(f"no figure of this run counts: {self.void}")
        if path:
            path.write_text(json.dumps(asdict(self) | {"machine": facts}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return what a figure needs to mean something: processor, instruction set, versions, commit, time, load."""
    from gradwire import _core  # not at the top: a child process may import another checkout

    cpuinfo, cache = Path("/proc/cpuinfo"), last_level_cache_bytes()
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {
        "cpu": models[0] if models else platform.processor(),
        "cpus": os.cpu_count(),
        "last-level cache": f"{cache >> 20} MiB",
        "instruction set": _core.isa(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{one.name: one.version for one in distributions() if one.name in VERSIONS},
        "commit": done.stdout.strip() or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "load after": round(os.getloadavg()[0], 2),
    }


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of this machine, at least 32 MiB."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [path.read_text().strip() for path in files]
    return max([32 << 20, *(int(size[:-1]) << 10 for size in sizes if size.endswith("K"))])
