"""Loss over bytes: gradwire and the recipes of others, on nodes that are simulated in one process; no times.

All recipes train the same transformer on the same text and batches, with a learning rate that rises for 40 steps and
then falls to a tenth; each at the best of its three learning rates, chosen with the first seed.

    python benchmarks/bench_frontier.py --results results --svg frontier.svg      # hours; continues where it stopped
    python benchmarks/bench_frontier.py --results results --only ddp '*@15'       # recipes by pattern
    python benchmarks/bench_frontier.py --smoke                                   # a few steps of each recipe
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import Report, Row  # noqa: E402

if TYPE_CHECKING:
    from recipes import Recipe
    from training.tasks import Task, Text

LOCAL_STEPS = (4, 15, 30, 100)
# Text beside Python's documentation: the sources of these modules.
MODULES = ("argparse", "ast", "asyncio.base_events", "difflib", "doctest", "inspect", "mailbox")
MODULES += (
    "optparse",
    "pickle",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
    "turtle",
    "typing",
)
MODULES += ("_pydecimal", "email._header_value_parser", "unittest.mock", "zipfile")


@dataclass(frozen=True)
class Setting:
    """What all recipes have in common.

    Attributes:
        batch: sequences of a step, over all nodes.
        scale: factor of all learning rates: small models take higher ones.
        density: of gradwire's messages; 0.0: the default, which is higher for small models.
    """

    nodes: int = 8
    steps: int = 3000
    width: int = 128
    layers: int = 5
    context: int = 64
    batch: int = 32
    scale: float = 1.0
    density: float = 0.0


def recipes(setting: Setting, local_steps: Sequence[int] = LOCAL_STEPS) -> dict[str, Any]:
    """Return all recipes by name: functions of a task, the nodes, the steps and a rate."""
    import recipes as made

    mesh = partial(made.Gradwire, density=setting.density or None)
    muon = partial(made.GradwireMuon, density=setting.density or None)
    table: dict[str, Any] = {
        "ddp": made.Dense,
        "powersgd-2": partial(made.PowerSGD, rank=2),
        "powersgd-4": partial(made.PowerSGD, rank=4),
        "demo": made.DeMo,
        "gradwire": mesh,
        "gradwire-sharded": partial(mesh, owners=setting.nodes),
    }
    for every in local_steps:
        table |= {
            f"diloco@{every}": partial(made.DiLoCo, every=every),
            f"streaming@{every}": partial(made.StreamingDiLoCo, every=every),
            f"sparseloco@{every}": partial(made.SparseLoCo, every=every, over_senders=False),
            f"sparseloco-senders@{every}": partial(made.SparseLoCo, every=every, over_senders=True),
            f"muloco@{every}": partial(made.MuLoCo, every=every),
            f"gradwire@{every}": partial(mesh, every=every),
            f"gradwire-sharded@{every}": partial(mesh, every=every, owners=setting.nodes),
            f"gradwire-muon@{every}": partial(muon, every=every),
        }
    return table


def task_of(setting: Setting, held_out: int) -> Text:
    """Return the text, with a transformer of the setting's size."""
    from training.tasks import Text, Transformer

    class Corpus(Text):
        BATCH, HELD_OUT, CONTEXT = setting.batch // setting.nodes, held_out, setting.context

        def text(self) -> str:
            found = map(importlib.util.find_spec, MODULES)
            sources = [Path(spec.origin).read_text() for spec in found if spec and spec.origin]
            return "\n".join([super().text(), *sources])

        def model(self) -> Any:
            return Transformer(setting.context, setting.width, setting.layers)

    return Corpus()


def train(task: Task, make: Any, setting: Setting, rate: float, seed: int) -> dict[str, float]:
    """Return the held-out loss, and the bytes that the mean node receives per parameter and step."""
    import torch
    from recipes import Replica

    torch.manual_seed(seed)
    recipe: Recipe = make(task, setting.nodes, setting.steps, rate)
    for number in range(setting.steps):
        batches = [task.batch(seed, node, number) for node in range(setting.nodes)]
        recipe.step(batches, number)
    final = Replica(task)
    final.params.copy_(recipe.shared)
    loss = task.validation_loss(final.model)
    nbytes = recipe.received / recipe.numel / setting.steps
    return {"loss": loss, "bytes": nbytes, "numel": recipe.numel}


class Trainings:
    """The trainings of one setting, each done once; kept in a file of JSON lines where one is given."""

    def __init__(self, setting: Setting, task: Text, path: Path | None) -> None:
        self._setting, self._task, self._path = setting, task, path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._done = {self._key(**line["run"]): line["result"] for line in map(json.loads, lines)}

    def result(self, name: str, make: Any, rate: float, seed: int) -> dict[str, float]:
        """Return the result of one training."""
        # Losses on another text do not compare: Python's versions differ in it.
        where = {**asdict(self._setting), "text": self._task.digest}
        run = {"name": name, "rate": rate, "seed": seed, **where}
        key = self._key(**run)
        if key not in self._done:
            self._done[key] = train(self._task, make, self._setting, rate, seed)
            line = json.dumps({"run": run, "result": self._done[key]})
            print(f"  {line}", file=sys.stderr, flush=True)
            if self._path:
                with self._path.open("a") as file:
                    file.write(f"{line}\n")
        return self._done[key]

    @staticmethod
    def _key(**run: Any) -> str:
        return json.dumps(run, sort_keys=True)

    def at_best_rate(
        self, name: str, make: Any, seeds: Sequence[int]
    ) -> tuple[float, list[dict[str, float]]]:
        """Return the best of a recipe's rates by the first seed, and the results of all seeds at it."""
        rates = [self._setting.scale * rate for rate in getattr(make, "func", make).rates]
        losses = {rate: self.result(name, make, rate, seeds[0])["loss"] for rate in rates}
        # A rate at which a recipe diverges is not its best.
        best = min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])
        return best, [self.result(name, make, best, seed) for seed in seeds]


def rows_of(name: str, group: str, rate: float, results: list[dict[str, float]]) -> list[Row]:
    """Return the row of a recipe."""
    losses = [result["loss"] for result in results]
    nbytes = statistics.mean(result["bytes"] for result in results)
    mean = statistics.mean(losses)
    note = f"{min(losses):.3f} to {max(losses):.3f}" if len(losses) > 1 else f"{mean:.3f}"
    return [
        Row(group, name, "loss", mean, mean, note=note),
        Row(group, name, "bytes per 1,000 parameters and step", 1e3 * nbytes, 1e3 * nbytes),
        Row(group, name, "learning rate", rate, rate),
    ]


def picture(points: dict[str, tuple[float, float]]) -> str:
    """Return loss over bytes, on a logarithmic axis, as SVG; ``points`` has bytes and loss by recipe."""
    width, height, left, top = 900, 520, 60, 20
    xs, ys = ([point[axis] for point in points.values()] for axis in (0, 1))
    first, last = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
    lowest, highest = min(ys), max(max(ys), min(ys) * 1.01)

    def x_of(nbytes: float) -> float:
        return left + (math.log10(nbytes) - first) / (last - first) * (width - left - 150)

    def y_of(loss: float) -> float:
        return top + (highest - loss) / (highest - lowest) * (height - top - 60)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<text x="{width / 2}" y="{height - 6}">bytes received per parameter and step</text>',
        f'<text x="4" y="{top - 6}">held-out loss</text>',
    ]
    for power in range(first, last + 1):
        x, text = x_of(10.0**power), f"{10.0**power:g}"
        parts.append(f'<path d="M{x:.1f},{top}V{height - 50}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 34}" text-anchor="middle">{text}</text>')
    for step in range(5):
        loss = lowest + step / 4 * (highest - lowest)
        parts.append(f'<text x="4" y="{y_of(loss) + 4:.1f}">{loss:.2f}</text>')
    for name, (nbytes, loss) in points.items():
        x, y = x_of(nbytes), y_of(loss)
        colour = "#c00" if name.startswith("gradwire") else "#555"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    for field in fields(Setting)[1:]:
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of recipes' names")
    parser.add_argument("--results", type=Path, help="file of the results, to continue")
    parser.add_argument("--smoke", action="store_true", help="a few steps of each recipe")
    parser.add_argument("--svg", type=Path, help="write the picture of the last nodes here")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()

    if importlib.util.find_spec("torch") is None:
        print("skipped: torch not installed")
        return
    setting = Setting(0, *(getattr(options, field.name) for field in fields(Setting)[1:]))
    local_steps: Sequence[int] = LOCAL_STEPS
    if options.smoke:
        setting, local_steps = Setting(0, 6, 16, 2, 8, 8), (2,)
        options.nodes, options.seeds = [4], 1
    report = Report(
        "frontier",
        asdict(setting) | {"nodes": options.nodes},
        void="smoke test" if options.smoke else "",
    )
    points: dict[str, tuple[float, float]] = {}
    for nodes in options.nodes:
        setting = replace(setting, nodes=nodes)
        trainings = Trainings(setting, task_of(setting, 256), options.results)
        points.clear()
        for name, make in recipes(setting, local_steps).items():
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only):
                continue
            rate, results = trainings.at_best_rate(name, make, range(options.seeds))
            report.parameters["numel"] = results[0]["numel"]
            rows = rows_of(name, f"frontier-{nodes}", rate, results)
            report.add(rows)
            points[name] = rows[1].best / 1e3, rows[0].best
    report.finish(options.json)
    if options.svg:
        options.svg.write_text(picture(points))


if __name__ == "__main__":
    main()
