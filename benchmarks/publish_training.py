"""The blocks about training: times to the target, what was to be reached, and the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from publish_tables import Result, number, reach, table, verdict

__all__ = ["BLOCKS"]

TASKS = {"text": "transformer on text", "digits": "convolutional network on digits"}
_FIGURE = re.compile(
    r"(?P<figure>time to target|sent by one node per step|final loss), (?P<method>[^, ]+)"
    r"(, (?P<link>\d+) Mbit/s)?"
)


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
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in result.group(task):
        match = _FIGURE.fullmatch(row["what"])
        if match:
            rows[match["method"], match["link"] or match["figure"]] = row
    columns = ("10", "100", "1000")
    head = [f"{link} Mbit/s" for link in columns]
    lines = [["method", *head, "sent by one node per step", "final loss"]]
    for method in dict.fromkeys(method for method, _ in rows):
        times = [
            _seconds(rows.get((method, link)), f"{task}, {method}, {link} Mbit/s", result)
            for link in columns
        ]
        sent, loss = (
            rows.get((method, one)) for one in ("sent by one node per step", "final loss")
        )
        lines.append(
            [
                method,
                *times,
                f"{sent['minimum'] / 1e3:,.0f} kB" if sent else "",
                f"{loss['minimum']:.3f} ({loss['note'].split(' over')[0]})" if loss else "",
            ]
        )
    return table(lines)


def _seconds(row: dict[str, Any] | None, name: str, result: Result) -> str:
    """Return the median of the seeds, the least and the most; a star where it was composed."""
    if row is None:
        return "not reached" if name in result.skipped else ""
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
                    [task, row["what"], reach(row), f"{row['minimum']:.4g}", verdict([row]), note]
                )
    return table(lines)


BLOCKS: dict[str, Callable[[Result], str]] = {
    "training-machine": machine,
    "training-times": times,
    "training-reach": reached,
}
