"""Learning curves: validation loss against time and against bytes, one picture per task."""

from __future__ import annotations

from dataclasses import dataclass
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
    "gradwire-thin": "tab:olive",
    "gradwire-every4": "magenta",
    "gradwire-async": "tab:purple",
}


@dataclass(frozen=True)
class Curve:
    """One training as it went, or would go, at one link.

    Attributes:
        method: its name.
        losses: of validation.
        seconds: until each.
        nbytes: sent by one node until each.
    """

    method: str
    losses: list[float]
    seconds: list[float]
    nbytes: list[int]


def draw(task: str, target: float, links: dict[int, list[Curve]], folder: Path) -> Path:
    """Draw the curves of one task and return the picture's path.

    Args:
        task: its name.
        target: the loss that counts.
        links: the curves by rate in Mbit/s: one panel each against time, and one for all against bytes.
        folder: where the picture goes.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.0 * (len(links) + 1), 4.2), layout="constrained")
    axes = picture.subplots(1, len(links) + 1, squeeze=False, sharey=True)[0]
    for axis, (link_mbit, curves) in zip(axes, links.items(), strict=False):
        for curve in curves:
            _add(axis, curve, curve.seconds)
        axis.set(title=f"{link_mbit} Mbit/s", xlabel="seconds", xscale="log")
    for curve in next(iter(links.values()), []):
        _add(axes[-1], curve, curve.nbytes)
    axes[-1].set(title="any link", xlabel="bytes sent by one node", xscale="log")
    axes[0].set_ylabel("validation loss")
    for axis in axes:
        axis.axhline(target, color="lightgrey", zorder=0)
        axis.grid(visible=True, alpha=0.2)
    handles = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    handles = {label: line for label, line in handles.items() if label in COLOURS}
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=9)
    path = folder / f"training-{task}.png"
    picture.savefig(path, dpi=80)
    return path


def _add(axis: Any, curve: Curve, along: list[float] | list[int]) -> None:
    axis.plot(along, curve.losses, color=COLOURS[curve.method], linewidth=1.2, label=curve.method)
