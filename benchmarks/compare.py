"""Compare two results of a benchmark: what got faster or smaller, and what did not.

    python benchmarks/compare.py before.json after.json [--limit 1.05]

Rows are matched by what they measured, against what, and N. What is compared are the rows' figures: each is already
divided by the reference of its own run. Absolute times are shown beside them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

_FORMAT = 1
_MUST_MATCH = ("cpu", "cpus", "isa", "numpy", "python")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 if --limit was given and a figure got worse by more than that."""
    parser = argparse.ArgumentParser(description="Compare two results of a benchmark.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--limit", type=float, help="fail when a figure got worse by this factor")
    arguments = parser.parse_args(argv)
    before, after = _read(arguments.before), _read(arguments.after)
    _warn(before, after)
    old, new = _by_key(before), _by_key(after)
    worse = []
    heads = [
        "what",
        "N",
        "against",
        "before",
        "after",
        "change",
        "median",
        "time before",
        "time after",
    ]
    table = [heads]
    for key, row in new.items():
        if key not in old:
            continue
        was = old[key]
        change = _change(was, row, "minimum")
        if arguments.limit is not None and change > arguments.limit:
            worse.append((row["what"], change))
        table.append(
            [
                row["what"],
                f"{row['numel']:,}",
                row["reference"],
                f"{was['minimum']:.3f} {row['unit'].split()[0]}",
                f"{row['minimum']:.3f} {row['unit'].split()[0]}",
                f"{change - 1:+.1%}",
                f"{_change(was, row, 'median') - 1:+.1%}" if row["timings"] else "",
                _time(was),
                _time(row),
            ]
        )
    _print(table)
    for title, keys in (
        ("only before", old.keys() - new.keys()),
        ("only after", new.keys() - old.keys()),
    ):
        for key in sorted(keys):
            print(f"{title}: {key[0]}, N = {key[1]:,}")
    for what, change in worse:
        print(f"worse by {change - 1:.1%}: {what}")
    return 1 if worse else 0


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("format") != _FORMAT:
        raise SystemExit(f"{path}: format {result.get('format')!r}, this script reads {_FORMAT}")
    return result


def _warn(before: dict[str, Any], after: dict[str, Any]) -> None:
    for fact in _MUST_MATCH:
        was, now = before["machine"].get(fact), after["machine"].get(fact)
        if was != now:
            print(f"careful: {fact} was {was}, is {now}")
    for fact in ("mode", "clock", "seed"):
        was, now = before["parameters"].get(fact), after["parameters"].get(fact)
        if was != now:
            print(f"careful: {fact} was {was}, is {now}")
    for name, result in (("before", before), ("after", after)):
        machine, others = result["machine"], result["cpus_used_by_others"]
        print(f"{name + ':':8}{machine['commit']}, {machine['time']}, load ", end="")
        print(" ".join(f"{load:.2f}" for load in result["load_average_before"]), end="")
        print("" if others is None else f", {others:.2f} CPUs used by others")
    print()


def _by_key(result: dict[str, Any]) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["what"], row["numel"], row["reference"]): row for row in result["rows"]}


def _change(was: dict[str, Any], now: dict[str, Any], figure: str) -> float:
    """Return by which factor a figure got worse."""
    if not was[figure] or not now[figure]:
        return float("nan")
    factor: float = now[figure] / was[figure]
    return 1 / factor if now["unit"] == "x faster" else factor


def _time(row: dict[str, Any]) -> str:
    if not row["timings"]:
        return ""
    seconds = row["timings"][0]["minimum_s"]
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3f} µs"


def _print(table: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for number, line in enumerate(table):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")


if __name__ == "__main__":
    raise SystemExit(main())
