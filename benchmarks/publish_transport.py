"""The transport's part of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from publish_tables import Result, cell, number, reach, table, verdict

__all__ = ["BLOCKS"]


def machine(result: Result) -> str:
    """Return what was measured on and with, and how quiet it was."""
    facts, parameters = result.machine, result.parameters
    peers = ", ".join(f"{name} {version}" for name, version in parameters["peers"].items())
    others = "" if result.others is None else f", others used {result.others:.2f} CPUs meanwhile"
    skipped = "".join(f" Skipped: {name} ({reason})." for name, reason in result.skipped.items())
    return (
        f"{facts['cpu']}, {facts['cpus']} CPUs; {facts['system']}; Python {facts['python']}, "
        f"cryptography {facts.get('cryptography', 'unknown')}, {peers or 'no other library'}; "
        f"commit {facts['commit'].removesuffix('-dirty')}, {facts['time'][:10]}. {parameters['rounds']} rounds of "
        f"{parameters['seconds']:g} s each. One-minute load at the start {result.load:.2f}{others}.{skipped}"
    )


def loopback(result: Result) -> str:
    """Return what was measured between processes on loopback."""
    rows = result.group("loopback")
    ratios = [row for row in rows if row["unit"].startswith("x")]
    return _ratios(ratios) + "\n\n" + _figures(row for row in rows if row not in ratios)


def peers(result: Result) -> str:
    """Return ours against each library."""
    lines = [["ours", "against", "reach", "times as fast", "ours, GB/s", "theirs, GB/s", ""]]
    for row in result.group("peers"):
        if row["reference"]:
            ends = row["what"].removeprefix("goodput of 1 MB messages, ")
            rates = [number(row["numel"] / timing["minimum_s"] / 1e9) for timing in row["timings"]]
            lines.append([ends, row["reference"], reach(row), cell(row), *rates, verdict([row])])
    costs = (row for row in result.group("peers") if row["unit"].strip() == "s/GB")
    return table(lines) + "\n\n" + _figures(costs)


def links(result: Result) -> str:
    """Return what was measured on links with a rate."""
    groups = ("cable", "proxy", "simulated")
    return _ratios(row for group in groups for row in result.group(group))


def _ratios(rows: Iterable[dict[str, Any]]) -> str:
    lines = [["what", "against", "reach", "best (median)", ""]]
    for row in rows:
        lines.append([row["what"], row["reference"], reach(row), cell(row), verdict([row])])
    return table(lines)


def _figures(rows: Iterable[dict[str, Any]]) -> str:
    lines = [["what", "unit", "best (median)"]]
    for row in rows:
        lines.append([row["what"], row["unit"].strip(), cell(row)])
    return table(lines)


BLOCKS: dict[str, Callable[[Result], str]] = {
    "transport-machine": machine,
    "transport-loopback": loopback,
    "transport-peers": peers,
    "transport-links": links,
}
