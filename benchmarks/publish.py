"""Put the numbers of a result into docs/performance.md: no figure there is typed by hand.

    python benchmarks/bench_codec.py --json result.json
    python benchmarks/publish.py result.json docs/performance.md

Results of bench_transport.py and bench_training.py go the same way, into blocks of their own. Each block between
``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import publish_training
import publish_transport
from publish_tables import Result, cell, least, number, reach, table, verdict

__all__ = ["main"]

# More than this, and the ratios say more about the other processes.
QUIET_CPUS = 0.1

SIZES = (2**24, 2**26)
ADD = "np.add"
PEERS = "encode with residual at 0.001"
FLOOR = "log2 C(N, k) + k"
DENSE = ("0.2", "0.3", "0.37", "0.5", "0.6", "0.7", "0.8", "0.9", "0.99", "1")
RANDOM = (
    "1e-05",
    "0.0001",
    "0.001",
    "0.01",
    "0.1",
    "0.2",
    "0.3",
    "0.37",
    "0.5",
    "0.6",
    "0.7",
    "0.8",
    "0.9",
    "0.99",
)

# label, the row's `what`, its reference, how the table names the reference
TIME_ROWS = (
    ("encode, density 0.001", "encode at density 0.001", ADD, ADD),
    ("encode, 0.01", "encode at density 0.01", ADD, ADD),
    ("encode, 0.1", "encode at density 0.1", ADD, ADD),
    ("encode, the worst density", "encode at the worst density", ADD, ADD),
    ("encode() of what is in the residual, 0.001", "encode() of the residual at 0.001", ADD, ADD),
    ("encode, 0.001: gain of 2 threads", "encode at 0.001 on 2 threads", "encode, 1 thread", "1 thread"),
    ("np.add: gain of 2 threads", "np.add on 2 threads", ADD, "1 thread"),
    ("apply, 0.001", "apply at density 0.001", ADD, ADD),
    ("apply, 0.1", "apply at density 0.1", ADD, ADD),
    ("apply_many, 16 messages, 0.001", "apply_many of 16 messages at 0.001", ADD, ADD),
    ("the same, 0.01", "apply_many of 16 messages at 0.01", ADD, ADD),
    ("the same, 0.1", "apply_many of 16 messages at 0.1", ADD, ADD),
    ("apply_many, 16 messages, 0.001", "apply_many of 16 messages at 0.001", "apply, 16 times", "16 single applies"),
    ("the same, 0.01", "apply_many of 16 messages at 0.01", "apply, 16 times", "16 single applies"),
    ("the same, 0.1", "apply_many of 16 messages at 0.1", "apply, 16 times", "16 single applies"),
    ("encode with residual, 0.001: faster than", PEERS, "NumPy, three lines", "NumPy, three lines"),
    ("the same: faster than", PEERS, "torch, nonzero and index", "torch, nonzero and index"),
    ("the same: faster than", PEERS, "torch.topk", "torch.topk, 0.1 %"),
    ("the same: time over", PEERS, "pi-quant int4, no residual", "pi-quant int4, no residual"),
)  # fmt: skip

FLOOR_ROWS = (
    ("encode(update), 0.001", "12 + message", "encode at density 0.001"),
    ("encode(update), 0.1", "12 + message", "encode at density 0.1"),
    ("encode(), 0.001", "4, and 4 where a line is touched (1.6 %)", "encode() of the residual at 0.001"),
    ("apply, 0.001", "8 where a line is touched (1.6 %)", "apply at density 0.001"),
    ("apply, 0.1", "8 where a line is touched (81 %)", "apply at density 0.1"),
    ("apply_many, 16 messages, 0.001", "8 where a line is touched (23 %)", "apply_many of 16 messages at 0.001"),
)  # fmt: skip

# From before the codec was written: a plain scalar bit writer, and a throw-away prototype of the two passes.
PREDICTED = (
    ("0.001", "1.25", "1.06"),
    ("0.01", "1.8", "1.25"),
    ("0.1", "", "1.93"),
    ("0.2", "", "2.6"),
    ("0.3", "", "3.4"),
)


def machine(result: Result) -> str:
    """Return what was measured on, and how quiet it was."""
    facts = result.machine
    times = {
        numel: min(
            timing["minimum_s"]
            for row in result.rows
            if row["numel"] == numel
            for timing in row["timings"]
            if timing["name"] == ADD
        )
        for numel in SIZES
    }
    add_ms = " and ".join(f"{times[n] * 1e3:.1f} ms at 2^{n.bit_length() - 1}" for n in SIZES)
    rate = 12 * SIZES[0] / times[SIZES[0]] / 1e9
    others = "" if result.others is None else f", others used {result.others:.2f} CPUs meanwhile"
    return (
        f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['last-level cache']} of last-level cache, {facts['isa']}; "
        f"{facts['system']}, huge pages {facts['huge pages']}; Python {facts['python']}, NumPy {facts['numpy']}; "
        f"commit {facts['commit'].removesuffix('-dirty')}, {facts['time'][:10]}. One-minute load at the start "
        f"{result.load:.2f}{others}. `np.add(residual, update, out=residual)` took {add_ms}: {rate:.0f} GB/s."
    )


def time_table(result: Result) -> str:
    """Return the rows with a figure to reach."""
    lines = [["what", "against", "reach", "2^24", "2^26", "floor", ""]]
    for label, what, reference, shown in TIME_ROWS:
        rows = [result.row(what, reference, numel) for numel in SIZES]
        found = [row for row in rows if row]
        if found:
            cells = [cell(row) for row in rows]
            lines.append([label, shown, reach(found[0]), *cells, least(found[0]), verdict(found)])
    small = result.group("small")
    if small:
        medians = " / ".join(f"{row['median']:.1f}" for row in small)
        met = "met" if all(row["median"] <= row["reach"]["value"] for row in small) else "not met"
        what = "encode, 1,024 elements; 1 / 10 / 100 changed"
        lines.append([what, "median, µs", "≤ 5", medians, "", "", met])
    return table(lines)


def density_table(result: Result) -> str:
    """Return encode at the dense end."""
    lines = [["density", *DENSE]]
    for numel in SIZES:
        rows = [result.row(f"encode at density {density}", ADD, numel) for density in DENSE]
        lines.append(
            [
                f"2^{numel.bit_length() - 1}",
                *(number(row["minimum"]) if row else "" for row in rows),
            ]
        )
    return table(lines)


def training_table(result: Result) -> str:
    """Return the steps with Gaussian updates."""
    numels = sorted({row["numel"] for row in result.group("training")})
    whats = dict.fromkeys(row["what"] for row in result.group("training"))
    lines = [["N", *(f"2^{numel.bit_length() - 1}" for numel in numels)]]
    for what in whats:
        lines.append(
            [what.split(", ")[-1], *(cell(result.row(what, ADD, numel)) for numel in numels)]
        )
    return table(lines)


def size_table(result: Result) -> str:
    """Return payload over entropy at random places."""
    lines = [["density", "payload / floor, 2^24", "2^26", "bits per change with header, 2^24"]]
    for density in RANDOM:
        rows = [
            result.row(f"size, random places, density {density}", FLOOR, numel) for numel in SIZES
        ]
        figures = [f"{row['minimum']:.3f}" if row else "" for row in rows]
        lines.append(
            [f"{float(density):g}", *figures, rows[0]["note"].split()[0] if rows[0] else ""]
        )
    return table(lines)


def region_table(result: Result) -> str:
    """Return payload over entropy where regions differ in density."""
    lines = [["regions of", "mean density", "sigma", "payload / floor"]]
    for row in result.group("size"):
        match = re.fullmatch(
            r"size, lognormal regions of ([\d,]+), density (\S+), sigma (\S+)", row["what"]
        )
        if match:
            lines.append([*match.groups(), f"{row['minimum']:.3f}"])
    return table(lines)


def ceiling(result: Result) -> str:
    """Return how near the worst patterns come to the ceiling."""
    rows = [row for row in result.group("size") if "adversarial" in row["what"]]
    return " ".join(
        f"At N = {row['numel']:,} {row['minimum']:.3f} of `max_message_bytes` ({row['note']})."
        for row in rows
    )


def floor_table(result: Result) -> str:
    """Return the least and the measured."""
    lines = [["what", "bytes per element", "over 12", "measured, 2^24"]]
    for label, moved, what in FLOOR_ROWS:
        row = result.row(what, ADD, SIZES[0])
        if row:
            lines.append([label, moved, least(row), number(row["minimum"])])
    return table(lines)


def predicted_table(result: Result) -> str:
    """Return what was expected beside what came."""
    lines = [["density", "scalar bit writer", "prototype", "measured, 2^24"]]
    for density, scalar, prototype in PREDICTED:
        row = result.row(f"encode at density {density}", ADD, SIZES[0])
        lines.append([density, scalar, prototype, number(row["minimum"]) if row else ""])
    return table(lines)


BLOCKS: dict[str, Callable[[Result], str]] = {
    "machine": machine,
    "time": time_table,
    "densities": density_table,
    "training": training_table,
    "sizes": size_table,
    "regions": region_table,
    "ceiling": ceiling,
    "floors": floor_table,
    "predicted": predicted_table,
}
PAGES = {
    "codec": BLOCKS,
    "transport": publish_transport.BLOCKS,
    "training": publish_training.BLOCKS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Replace the blocks of a page by a result's numbers; return 0."""
    parser = argparse.ArgumentParser(description="Put the numbers of a result into a page.")
    parser.add_argument("result", type=Path, help="JSON of a full run of one of the benchmarks")
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args(argv)
    content = json.loads(arguments.result.read_text())
    parameters = content["parameters"]
    if (parameters["mode"], parameters["clock"]) != ("full", "wall"):
        raise SystemExit(
            f"{arguments.result}: publish a full run by the wall clock, not {parameters}"
        )
    result = Result(content)
    if result.others is not None and result.others > QUIET_CPUS:
        print(f"careful: others used {result.others:.2f} CPUs during this run; measure again")
    blocks = PAGES[parameters.get("benchmark", "codec")]
    page, filled = arguments.page.read_text(), 0
    for name, make in blocks.items():
        block = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        count = len(block.findall(page))
        if count > 1:
            raise SystemExit(f"{arguments.page}: has {count} blocks {name!r}, may have one")
        if count:
            text = make(result)
            page = block.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)  # type: ignore[misc]
        filled += count
    if not filled:
        raise SystemExit(f"{arguments.page}: has none of the blocks {', '.join(blocks)}")
    arguments.page.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
