"""The demo's measurements, as progress, table and picture."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..units import si
from .training import BATCH, TRAINING_IMAGES, Network, Recipe

_LAST_EPOCHS = 5


@dataclass(frozen=True)
class Epoch:
    """Measurements of one epoch, of one worker or of all.

    Attributes:
        number: number of the epoch, from 1.
        elapsed_s: seconds since the first step began.
        loss: cross-entropy of the training batches.
        accuracy: accuracy on the held-out half, 0 to 1.
        udp_bytes: UDP payload bytes sent since the start of the run, acknowledgements included.
        digest: hash of the parameters' bits; "" where workers differ.
        encode_s: seconds per step to encode, since the start of the run.
        wait_s: seconds per step until all workers' messages had arrived.
        apply_s: seconds per step to add them to the parameters.
    """

    number: int
    elapsed_s: float
    loss: float
    accuracy: float
    udp_bytes: int
    digest: str
    encode_s: float
    wait_s: float
    apply_s: float

    @staticmethod
    def merge(reports: Sequence[Epoch]) -> Epoch:
        """Return the measurements of all workers in one epoch: the sum of the bytes sent, means of the rest."""
        first = vars(reports[0])
        means: dict[str, Any] = {
            name: _mean(reports, name) for name, value in first.items() if isinstance(value, float)
        }
        return replace(
            reports[0],
            udp_bytes=sum(report.udp_bytes for report in reports),
            digest=reports[0].digest if len({report.digest for report in reports}) == 1 else "",
            **means,
        )


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        recipe: settings of the run.
        epochs: all epochs, in order.
        seconds: wall time of the training, without the start of the processes.
    """

    recipe: Recipe
    epochs: tuple[Epoch, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Mean test accuracy of the last epochs, 0 to 1."""
        return _mean(self.epochs[-_LAST_EPOCHS:], "accuracy")

    @property
    def step_bytes(self) -> float:
        """UDP payload bytes per worker and step, acknowledgements included."""
        return self.epochs[-1].udp_bytes / self.recipe.workers / self.recipe.steps


def print_plan(recipe: Recipe, links: str) -> None:
    """Print the task, and the links."""
    layers = "-".join(str(width) for width in recipe.layers)
    print(
        f"{recipe.workers} workers train a {layers} network "
        f"({Network(recipe.layers).numel:,} parameters) on {TRAINING_IMAGES} scanned digits,\n"
        f"{recipe.epochs} epochs of {recipe.steps_per_epoch} steps, {BATCH} images per "
        f"worker and step,\nand send each other their updates by UDP {links}."
    )


@contextlib.contextmanager
def progress(recipe: Recipe) -> Iterator[Callable[[Epoch], None]]:
    """Yield a function that shows an epoch: as a bar on a terminal if rich is installed, else as a line."""
    name = _name(recipe)
    print(f"\n{name}: starting {recipe.workers} processes", flush=True)

    def text_of(epoch: Epoch) -> str:
        return (
            f"{name}: epoch {epoch.number:3d}/{recipe.epochs}  "
            f"loss {epoch.loss:.4f}  test accuracy {100 * epoch.accuracy:5.2f} %  "
            f"sent {si(epoch.udp_bytes, 'B')}  {epoch.elapsed_s:.1f} s"
        )

    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda epoch: print(text_of(epoch), flush=True)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(20), TextColumn("{task.description}")) as bars:
        bar = bars.add_task(name, total=recipe.epochs)
        yield lambda epoch: bars.update(bar, completed=epoch.number, description=text_of(epoch))


def comparison(dense: Run, sparse: Run) -> Iterator[str]:
    """Yield the lines of the table of both runs."""

    def row(label: str, show: Callable[[Run], str], note: str = "") -> str:
        return f"{label:44}{show(dense):>14}{show(sparse):>14}  {note}".rstrip()

    def milliseconds(name: str) -> Callable[[Run], str]:
        return lambda run: f"{1e3 * getattr(run.epochs[-1], name):.2f}"

    yield row("", lambda run: _name(run.recipe))
    last = min(_LAST_EPOCHS, len(dense.epochs))
    yield row(
        f"test accuracy, mean of the last {last} epochs" if last > 1 else "test accuracy",
        lambda run: f"{100 * run.accuracy:.2f} %",
        f"{100 * (sparse.accuracy - dense.accuracy):+.2f} points",
    )
    yield row(
        "UDP payload per worker and step",
        lambda run: si(run.step_bytes, "B"),
        f"{dense.step_bytes / sparse.step_bytes:.0f} times fewer bytes",
    )
    yield row("encode, ms per step", milliseconds("encode_s"))
    yield row("wait, ms per step", milliseconds("wait_s"))
    yield row("apply, ms per step", milliseconds("apply_s"))
    yield row(
        "training time",
        lambda run: f"{run.seconds:.1f} s",
        f"{dense.seconds / sparse.seconds:.1f} times as fast",
    )
    label = "all workers end with the same bits"
    yield row(label, lambda run: "yes" if run.epochs[-1].digest else "NO")


def draw(dense: Run, sparse: Run, folder: Path) -> Path:
    """Draw both learning curves against time and against bytes; return the picture's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for run in (dense, sparse):
        accuracies = [100 * epoch.accuracy for epoch in run.epochs]
        name = _name(run.recipe)
        by_time.plot([epoch.elapsed_s for epoch in run.epochs], accuracies, label=name)
        by_bytes.plot([epoch.udp_bytes for epoch in run.epochs], accuracies, label=name)
    by_time.set(xlabel="seconds", ylabel="test accuracy, %", xscale="log")
    by_bytes.set(xlabel="UDP payload bytes sent by all workers", xscale="log")
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.3)
        axes.legend()
    path = folder / "learning-curves.png"
    figure.savefig(path)
    return path


def _name(recipe: Recipe) -> str:
    return "dense float32" if recipe.dense else "gradwire"


def _mean(epochs: Sequence[Epoch], name: str) -> float:
    return sum(float(getattr(epoch, name)) for epoch in epochs) / len(epochs)
