"""What the demo shows: progress while it trains, tables and a picture at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from gradwire.cli.demo.network import Network
from gradwire.cli.demo.results import LAST_EPOCHS, Epoch, Run
from gradwire.cli.demo.training import TRAINING_IMAGES, Recipe

_LINES_PER_RUN = 10  # without a terminal
_ROWS_OVER_TIME = 6


def print_plan(recipe: Recipe) -> None:
    """Say what is going to be trained."""
    layers = "-".join(str(width) for width in recipe.layers)
    print(
        f"{recipe.workers} workers train a {layers} network "
        f"({Network(recipe.layers).numel:,} parameters) on {TRAINING_IMAGES} scanned digits,\n"
        f"{recipe.epochs} epochs of {recipe.steps_per_epoch} steps, {recipe.batch} images per "
        "worker and step, and send each other their updates over UDP."
    )


class LiveLine:
    """Progress: one line that rewrites itself on a terminal, a few plain lines elsewhere."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._name = "dense float32" if recipe.dense else "gradwire"
        self._is_terminal = sys.stdout.isatty()
        self._every = max(1, recipe.epochs // _LINES_PER_RUN)

    def __enter__(self) -> LiveLine:
        """Say which run begins."""
        print(f"\n{self._name}: starting {self._recipe.workers} processes", flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the rewritten line standing."""
        if self._is_terminal:
            print(flush=True)

    def show(self, epoch: Epoch) -> None:
        """Show the state after an epoch."""
        text = (
            f"{self._name}: epoch {epoch.number:3d}/{self._recipe.epochs}  "
            f"loss {epoch.loss:.4f}  test accuracy {100 * epoch.accuracy:5.2f} %  "
            f"sent {format_bytes(epoch.udp_bytes)}"
        )
        if self._is_terminal:
            print(f"\r{text}\x1b[K", end="", flush=True)
        elif epoch.number % self._every == 0 or epoch.number == self._recipe.epochs:
            print(text, flush=True)


def print_tables(dense: Run, sparse: Run) -> None:
    """Print the comparison, and how threshold and density went over time."""
    rows = [("", "dense float32", "gradwire", "")]
    rows += _comparison(dense, sparse)
    print()
    for name, left, right, note in rows:
        print(f"{name:44}{left:>14}{right:>14}  {note}".rstrip())
    print(f"\n{'epoch':>5}{'threshold':>12}{'density':>10}{'message':>11}")
    for epoch in _over_time(sparse):
        print(
            f"{epoch.number:5d}{epoch.threshold:12.2e}{100 * epoch.density:8.2f} %"
            f"{format_bytes(epoch.message_bytes):>11}"
        )


def _comparison(dense: Run, sparse: Run) -> list[tuple[str, str, str, str]]:
    points = 100 * (sparse.accuracy - dense.accuracy)
    fewer = dense.udp_bytes / sparse.udp_bytes
    times = [
        (
            f"{verb}, ms per step",
            f"{1e3 * dense.mean(name):.2f}",
            f"{1e3 * sparse.mean(name):.2f}",
            "",
        )
        for verb, name in (("encode", "encode_s"), ("wait", "wait_s"), ("apply", "apply_s"))
    ]
    return [
        (
            f"test accuracy, mean of the last {LAST_EPOCHS} epochs",
            f"{100 * dense.accuracy:.2f} %",
            f"{100 * sparse.accuracy:.2f} %",
            f"{points:+.2f} points",
        ),
        (
            "UDP payload per worker and step",
            format_bytes(dense.udp_bytes / dense.worker_steps),
            format_bytes(sparse.udp_bytes / sparse.worker_steps),
            f"{fewer:.0f} times fewer bytes",
        ),
        (
            "UDP payload in all",
            format_bytes(dense.udp_bytes),
            format_bytes(sparse.udp_bytes),
            "acknowledgements included",
        ),
        (
            "  of which acknowledgements and control",
            format_bytes(dense.control_bytes),
            format_bytes(sparse.control_bytes),
            "",
        ),
        *times,
        ("training time", f"{dense.seconds:.1f} s", f"{sparse.seconds:.1f} s", ""),
        (
            "all workers end with the same bits",
            _yes(dense.is_identical),
            _yes(sparse.is_identical),
            "",
        ),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _over_time(run: Run) -> list[Epoch]:
    """Return a few epochs, evenly spread, the first and the last included."""
    last = len(run.epochs) - 1
    indices = {round(last * row / (_ROWS_OVER_TIME - 1)) for row in range(_ROWS_OVER_TIME)}
    return [run.epochs[index] for index in sorted(indices)]


def format_bytes(count: float) -> str:
    """Return a size for people, in decimal units.

    >>> format_bytes(512), format_bytes(2_048_000)
    ('512 B', '2.05 MB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def draw(dense: Run, sparse: Run, folder: Path) -> Path:
    """Draw both learning curves against epochs and against bytes; return the picture's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_epoch, by_bytes = figure.subplots(1, 2, sharey=True)
    for run, name in ((dense, "dense float32"), (sparse, "gradwire")):
        accuracies = [100 * epoch.accuracy for epoch in run.epochs]
        by_epoch.plot([epoch.number for epoch in run.epochs], accuracies, label=name)
        by_bytes.plot([epoch.udp_bytes for epoch in run.epochs], accuracies, label=name)
    by_epoch.set(xlabel="epoch", ylabel="test accuracy, %")
    by_epoch.xaxis.get_major_locator().set_params(integer=True)
    by_bytes.set(xlabel="UDP payload bytes sent by all workers", xscale="log")
    for axes in (by_epoch, by_bytes):
        axes.grid(alpha=0.3)
        axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "learning-curves.png"
    figure.savefig(path)
    return path
