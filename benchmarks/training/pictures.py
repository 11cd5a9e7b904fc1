"""Learning curves: validation loss against time and against bytes, one picture per task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {
    "dense": "black",
    "fp16": "grey",
    "powersgd-2": "tab:orange",
    "powersgd-4": "tab:red",
    "local-sgd": "tab:brown",
    "gradwire-hook": "tab:blue",
    "gradwire-udp": "tab:green",
    "gradwire-async": "tab:purple",
    "gradwire-local": "tab:cyan",
}


def draw(
    task: str, results: list[dict[str, Any]], links_mbit: tuple[int, ...], folder: Path
) -> Path:
    """Draw the curves of one task and return the picture's path.

    Args:
        task: its name.
        results: of all its runs.
        links_mbit: one column for each; time above, bytes below.
        folder: where the picture goes.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.2 * len(links_mbit), 7.5), layout="constrained")
    axes = picture.subplots(2, len(links_mbit), squeeze=False, sharey=True)
    for column, link_mbit in enumerate(links_mbit):
        runs = [one for one in results if one["run"]["link_mbit"] == link_mbit]
        for result in runs:
            _add(result, axes[0][column], "seconds")
            _add(result, axes[1][column], "bytes")
        axes[0][column].set(title=f"{link_mbit} Mbit/s", xlabel="seconds", xscale="log")
        axes[1][column].set(xlabel="bytes sent by one node", xscale="log")
    for row in axes:
        row[0].set_ylabel("validation loss")
    if results:
        for axis in axes.flat:
            axis.axhline(results[0]["target"], color="lightgrey", zorder=0)
    handles = {
        line.get_label(): line
        for axis in axes.flat
        for line in axis.get_lines()
        if not str(line.get_label()).startswith("_")
    }
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    path = folder / f"training-{task}.png"
    picture.savefig(path, dpi=80)
    return path


def _add(result: dict[str, Any], axis: Any, what: str) -> None:
    method, points = result["run"]["method"], result["points"]
    if points:
        axis.plot(
            [point[what] for point in points],
            [point["loss"] for point in points],
            color=COLOURS[method],
            linewidth=1.0,
            label=method,
        )
