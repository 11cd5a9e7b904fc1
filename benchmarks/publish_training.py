"""The blocks about training: times to the target, what was to be reached, and the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from publish_tables import Result, number, reach, table, verdict

__all__ = ["BLOCKS"]

TASKS = {"text": "transformer on text", "digits": "convolutional network on digits"}
_TIME = re.compile(r"time to target, (\S+), (\d+) Mbit/s")


def machine(result: Result) -> str:
    """Return what was measured on, and with what."""
    facts, parameters = result.machine, result.parameters
    targets = " and ".join(
        f"{target:g} ({TASKS[task]})" for task, target in parameters["targets"].items()
    )
    return (
        f"{facts['cpu']}, {facts['cpus']} CPUs for all {parameters['nodes']} nodes; {facts['system']}; "
        f"Python {facts['python']}, torch {parameters['torch']}; commit "
        f"{facts['commit'].removesuffix('-dirty')}, {facts['time'][:10]}. Density aimed at "
        f"{parameters['density']:g}. Validation loss to reach: {targets}."
    )


def times(result: Result) -> str:
    """Return the seconds to the target, a table for each task: a line per method, a column per link."""
    return "\n\n".join(
        f"Seconds to the target, {title}:\n\n{_times_of(task, result)}"
        for task, title in TASKS.items()
        if result.group(task)
    )


def _times_of(task: str, result: Result) -> str:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in result.group(task):
        match = _TIME.fullmatch(row["what"])
        if match:
            rows[match[1], int(match[2])] = row
    links = sorted({link for _, link in rows})
    lines = [["method", *(f"{link} Mbit/s" for link in links)]]
    for method in dict.fromkeys(method for method, _ in rows):
        lines.append([method, *(_seconds(rows.get((method, link))) for link in links)])
    for skipped, why in result.skipped.items():
        name, method, link = skipped.split(", ")
        if name == task:
            lines.append([f"{method} at {link}: {why}", *([""] * len(links))])
    return table(lines)


def _seconds(row: dict[str, Any] | None) -> str:
    """Return the median of the seeds, the least and the most; a star where it was composed."""
    if row is None:
        return ""
    least, most = re.findall(r"[\d.]+", row["note"])[:2]
    star = " *" if "composed" in row["note"] else ""
    return f"{number(row['minimum'])} ({least} to {most}){star}"


def reached(result: Result) -> str:
    """Return every figure that had a number to reach."""
    lines = [["task", "what", "reach", "measured", "", ""]]
    for task in TASKS:
        for row in result.group(task):
            if row["reach"]:
                note = row["note"]
                lines.append(
                    [task, row["what"], reach(row), number(row["minimum"]), verdict([row]), note]
                )
    return table(lines)


BLOCKS: dict[str, Callable[[Result], str]] = {
    "training-machine": machine,
    "training-times": times,
    "training-reach": reached,
}
