"""Time to a validation loss: four nodes, or ``--nodes``, behind links of 10 Mbit/s to 1 Gbit/s, beside PyTorch.

Every node is a process in a network namespace of its own, behind a link that tc limits (needs root and iproute2). All
methods train the same model with the same optimiser, batches and initial parameters; only the exchange differs.

    python benchmarks/bench_training.py --results results          # everything; continues where it was interrupted
    python benchmarks/bench_training.py --results results --only text gradwire-udp 100 0     # one run
    python benchmarks/bench_training.py --results results --report --json training.json
    python benchmarks/bench_training.py --smoke                    # four steps of each method on loopback

**Curves**: every method and seed takes all steps, behind no limit, for the losses. **Timings**: one seed of every
method at every link runs to the target, or until its budget of seconds is spent, for the time of its steps; on a quiet
machine. A synchronous method's losses do not depend on the link, so its time to the target is the sum of the times of
the steps that the seed's curve needs; steps that were not timed count as the mean of the later half of the others
("composed"). An asynchronous method's losses do depend on the link: its timings run to the target, with every seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import Report, Row, Target  # noqa: E402
from training import METHODS  # noqa: E402
from training.network import network  # noqa: E402

LINKS_MBIT, UNLIMITED = (1000, 100, 10), 0
SEEDS = (0, 1, 2)
DENSITY = 0.016
TASK_NAMES = ("text", "digits")
STEPS, EVALUATE_EVERY, BUDGET_S = 400, 20, 12.0
# Start-up and evaluations do not count towards the budget; a run that takes so much longer has hung.
HANG_S = 1800.0
ASYNCHRONOUS = "gradwire-async"
RIVALS = ("fp16", "powersgd-2", "powersgd-4")
# How many times as fast as whom, at which link.
SPEEDUPS = (
    ("dense", ("dense",), 1000, 1.5),
    ("dense", ("dense",), 100, 8.0),
    ("the best of fp16 and PowerSGD", RIVALS, 100, 1.2),
    ("the best of fp16 and PowerSGD", RIVALS, 10, 2.0),
)

Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training; without a limit of the link where ``link_mbit`` is 0.

    A run for its curve continues beyond the target and the budget.
    """

    task: str
    method: str
    link_mbit: int
    seed: int
    steps: int = STEPS
    budget_s: float = BUDGET_S
    is_curve: bool = False
    evaluate_every: int = EVALUATE_EVERY
    density: float = DENSITY

    @property
    def name(self) -> str:
        """Of its result file."""
        place = "curve" if self.is_curve else self.link_mbit
        return f"{self.task}-{self.method}-{place}-{self.seed}"


# ---- running --------------------------------------------------------------------------------------------------------


def plan(only: list[str]) -> list[Run]:
    """Return all runs, or those whose names begin so."""
    trainings = [(task, method) for task in TASK_NAMES for method in METHODS]
    runs = [Run(*each, UNLIMITED, seed, is_curve=True) for seed in SEEDS for each in trainings]
    for link_mbit, each in itertools.product(LINKS_MBIT, trainings):
        if each[1] == ASYNCHRONOUS:
            # It has to reach the target itself.
            runs += [Run(*each, link_mbit, seed, budget_s=math.inf) for seed in SEEDS]
        else:
            runs.append(Run(*each, link_mbit, SEEDS[0]))
    return [run for run in runs if f"{run.name}-".startswith("-".join([*only, ""]))]


def execute_all(runs: list[Run], folder: Path, nodes: int) -> None:
    """Execute the runs that have no result in ``folder`` yet, link by link."""
    missing = [run for run in runs if not (folder / f"{run.name}.json").exists()]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there already", flush=True)
    for link_mbit, group in itertools.groupby(missing, key=lambda run: run.link_mbit):
        with network(nodes, link_mbit) as (hosts, prefixes):
            for run in group:
                execute([run], folder, hosts, prefixes)


def execute(runs: list[Run], folder: Path, hosts: list[str], prefixes: list[list[str]]) -> None:
    """Execute trainings one after the other in the same processes, and write what the first node reports."""
    described = json.dumps([asdict(run) for run in runs])
    worker = [sys.executable, HERE / "training" / "worker.py", described, json.dumps(hosts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile("w+") as errors:
        workers = [
            subprocess.Popen(
                [*prefix, *worker, str(rank)],
                env=environment,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, prefix in enumerate(prefixes)
        ]
        watchdog = threading.Timer(HANG_S, stop, [workers])
        watchdog.start()
        try:
            lines = [json.loads(line) for line in workers[0].stdout or () if line.startswith("{")]
        finally:
            watchdog.cancel()
            stop(workers)
        ends = [index for index, line in enumerate(lines) if "end" in line]
        if len(ends) < len(runs):
            errors.seek(0)
            raise RuntimeError(f"{runs[len(ends)].name} ended early:\n{errors.read()[-2000:]}")
    for run, first, last in zip(runs, [-1, *ends], ends, strict=False):
        result = {**asdict(run), **lines[last], "points": lines[first + 1 : last]}
        part = folder / f"{run.name}.part"
        part.write_text(json.dumps(result, indent=1))
        part.rename(part.with_suffix(".json"))
        print(f"  {run.name}: {result['end']}, {result['steps']} steps, {result['seconds']:.1f} s")


def stop(workers: list[subprocess.Popen[str]]) -> None:
    """End the processes that are left."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()


# ---- results --------------------------------------------------------------------------------------------------------


class Results:
    """The result files of a folder."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.json"))
        self._results = {path.stem: json.loads(path.read_text()) for path in files}

    def runs(self, task: str, method: str, place: str | int = "curve") -> dict[int, Result]:
        """Return the runs at a link, or those for the curve, by seed."""
        names = {seed: f"{task}-{method}-{place}-{seed}" for seed in SEEDS}
        return {seed: self._results[one] for seed, one in names.items() if one in self._results}

    def times_to_target(self, task: str, method: str, link_mbit: int) -> tuple[list[float], bool]:
        """Return the seconds of every seed, none if one does not reach the target; and whether they are composed."""
        timings, curves = self.runs(task, method, link_mbit), self.runs(task, method)
        is_asynchronous = method == ASYNCHRONOUS
        points = [first_below(one) for one in (timings if is_asynchronous else curves).values()]
        if not points or not all(points) or SEEDS[0] not in timings:
            return [], False
        if is_asynchronous:
            return [point["seconds"] for point in points if point], False
        measured, steps = timings[SEEDS[0]]["step_s"], [point["step"] for point in points if point]
        return [seconds_of(measured, count) for count in steps], max(steps) > len(measured)


def first_below(result: Result) -> dict[str, Any] | None:
    """Return the first point of a result at or below its target."""
    return next((point for point in result["points"] if point["loss"] <= result["target"]), None)


def seconds_of(measured: list[float], steps: int) -> float:
    """Return the time of so many steps; those not measured count as the mean of the later half of the others."""
    missing = max(0, steps - len(measured))
    return sum(measured[:steps]) + missing * statistics.mean(measured[len(measured) // 2 :])


def rows_of(task: str, results: Results) -> Iterator[Row]:
    """Yield the table of a task: a line for each method; then its targets: a column for each of gradwire's."""
    group = f"training-{task}"
    for method in METHODS:
        for link_mbit in reversed(LINKS_MBIT):
            times, is_composed = results.times_to_target(task, method, link_mbit)
            if times:
                ends = [f"{end:,.0f}" if end >= 1e3 else f"{end:.3g}" for end in sorted(times)]
                spread = [f"{ends[0]} to {ends[-1]}"] * (len(times) > 1)
                note = "; ".join(spread + ["composed"] * is_composed)
                figures = 2 * [statistics.median(times)]
                yield Row(group, method, f"s at {link_mbit} Mbit/s", *figures, note=note)
        curves = results.runs(task, method).values()
        if curves:
            sent = statistics.mean(one["bytes"] / one["steps"] for one in curves) / 1e3
            yield Row(group, method, "kB sent per node and step", sent, sent)
            losses = [one["points"][-1]["loss"] for one in curves]
            figures = 2 * [statistics.mean(losses)]
            note = ", ".join(f"{loss:.3f}" for loss in losses)
            yield Row(group, method, "final loss", *figures, note=note)
    for method in METHODS:
        if method.startswith("gradwire"):
            for what, reference, figure, target in targets(task, method, results):
                where = (f"{group}-targets", what, method)
                yield Row(*where, figure, figure, reference=reference, target=target)


def targets(task: str, method: str, results: Results) -> Iterator[tuple[str, str, float, Target]]:
    """Yield what one of gradwire's methods is to reach: what, against what, the figure, the target."""
    optimizer = "-adamw" if "adamw" in method else ""  # rivals have the same
    for reference, rivals, link_mbit, goal in SPEEDUPS:
        times, _ = results.times_to_target(task, method, link_mbit)
        found = [results.times_to_target(task, rival + optimizer, link_mbit)[0] for rival in rivals]
        theirs = [statistics.median(one) for one in found if one]
        if times and theirs:
            figure = min(theirs) / statistics.median(times)
            yield (
                f"times as fast, {link_mbit} Mbit/s",
                reference + optimizer,
                figure,
                Target(">=", goal),
            )
    ours, dense = results.runs(task, method), results.runs(task, "dense" + optimizer)
    seeds = ours.keys() & dense.keys()
    if seeds:
        losses = [[one[seed]["points"][-1]["loss"] for seed in seeds] for one in (ours, dense)]
        figure = statistics.mean(losses[0]) / statistics.mean(losses[1])
        yield "final loss", "dense" + optimizer, figure, Target("<=", 1.01)
    sent = [one["totals"]["message_bytes"] for one in ours.values()]
    if any(sent):
        one = next(iter(ours.values()))
        figure = 4 * one["numel"] * one["steps"] / statistics.mean(sent)
        yield "float32 gradients of all steps over messages", "", figure, Target(">=", 200.0)
    timed = results.runs(task, method, 100).values()
    if timed:
        # Waiting for slower nodes counts, which share the processors.
        figure = statistics.mean(one["totals"]["spent_s"] / one["seconds"] for one in timed)
        yield "share of a step in gradwire, 100 Mbit/s", "", figure, Target("<=", 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="folder of the results, one file per run")
    only = "task, method, link in Mbit/s or 'curve', seed; or the first few of these"
    parser.add_argument("--only", nargs="+", default=[], help=only)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true", help="four steps of each method")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()

    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing and not options.report:
        print(f"skipped: {' and '.join(missing)} not installed")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.smoke:
            runs = [Run("digits", method, 0, 0, 4, is_curve=True) for method in METHODS]
            runs.append(Run("text", "gradwire-udp", 0, 0, 4, is_curve=True))
            execute(runs, folder, ["127.0.0.1", "127.0.0.2"], [[], []])
        elif not options.report:
            execute_all(plan(options.only), folder, options.nodes)
        results = Results(folder)
    parameters = {"nodes": options.nodes, "density": DENSITY}
    report = Report("training", parameters, void="smoke test" if options.smoke else "")
    for task in TASK_NAMES:
        report.add(rows_of(task, results))
    report.finish(options.json)


if __name__ == "__main__":
    main()
