"""Time to a validation loss: four nodes behind links of 10 Mbit/s, 100 Mbit/s and 1 Gbit/s, gradwire against PyTorch.

Every node is a process in a network namespace of its own, behind a link that tc limits (training/network.py: needs
root and iproute2). All methods train the same model with the same optimiser, batches and initial parameters; only the
exchange differs. Processors are few and shared by all nodes, so the models have little arithmetic per parameter
(training/tasks.py).

    python benchmarks/bench_training.py --results results          # everything; goes on where it was interrupted
    python benchmarks/bench_training.py --results results --part curves    # only those, on a busy machine if need be
    python benchmarks/bench_training.py --results results --only text gradwire-udp 100 0     # one run
    python benchmarks/bench_training.py --results results --report # the table of what is there
    python benchmarks/bench_training.py --results results --report --pictures docs --json training.json
    python benchmarks/bench_training.py --predict                  # what the links would need, by arithmetic
    python benchmarks/bench_training.py --smoke                    # three steps of each method, no figure counts

Two kinds of runs. **Curves**: every method and seed takes all steps, behind no limit, for the losses. **Timings**:
one seed of every method at every link runs to the target, or until its budget of seconds is used up, for the time of
its steps; run them on a quiet machine. What a synchronous method computes does not depend on the link (but for
rounding: nodes add messages in the order of their random ids), so its time to the target is the sum of the measured
times of so many steps as the seed's curve needs to get there; where the budget ended the timing before, the rest are
counted at the mean of its later half, and the figure is marked as composed. An asynchronous node's losses do depend on
the link: its timings run to the target, with every seed.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import Reach, Report, figure  # noqa: E402

if TYPE_CHECKING:
    from training.pictures import Curve

NODES = 4
LINKS_MBIT = (1000, 100, 10)
UNLIMITED = 0
SEEDS = (0, 1, 2)
DENSITY = 0.016
TASK_NAMES = ("text", "digits")
STEPS = {"text": 400, "digits": 400}
EVALUATE_EVERY = 20
BUDGET_S = 60.0
CURVES, TIMINGS = PARTS = ("curves", "timings")
# Start-up and evaluations do not count towards the budget; a run that takes so much longer has hung.
HANG_S = 1800.0
ASYNCHRONOUS = "gradwire-async"
OURS = (
    "gradwire-hook",
    "gradwire-udp",
    "gradwire-thin",
    "gradwire-every4",
    "gradwire-async",
)
RIVALS = ("fp16", "powersgd-2", "powersgd-4")
BYTES_RATIO, LOSS_TOLERANCE, SHARE_MAX = 200.0, 0.01, 0.10
SPEEDUPS = (("dense", 100, 8.0), ("rivals", 10, 2.0), ("rivals", 100, 1.2), ("dense", 1000, 1.5))


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task: its name.
        method: its name.
        link_mbit: rate of every node's link; 0: no limit.
        seed: of parameters and batches.
        steps: at most.
        budget_s: at most, unless it is for the whole curve.
        is_whole: whether it goes on beyond the target.
        evaluate_every: steps between evaluations.
        density: that gradwire's thresholds aim at.
    """

    task: str
    method: str
    link_mbit: int
    seed: int
    steps: int
    budget_s: float
    is_whole: bool = False
    evaluate_every: int = EVALUATE_EVERY
    density: float = DENSITY

    @property
    def name(self) -> str:
        """Of its file."""
        place = "curve" if self.is_whole else self.link_mbit
        return f"{self.task}-{self.method}-{place}-{self.seed}"


# ---- running ---------------------------------------------------------------------------------------------------------


def execute(run: Run, network: Any, target: float) -> dict[str, Any]:
    """Run one training on a network and return what its first node reported."""
    arguments = {
        **asdict(run),
        "addresses": network.addresses,
        "target": target,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile("w+") as errors:
        workers = [
            subprocess.Popen(
                [
                    *network.within(rank),
                    sys.executable,
                    str(HERE / "training" / "worker.py"),
                    json.dumps(arguments),
                    str(rank),
                ],
                env=environment,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(NODES)
        ]
        watchdog = threading.Timer(HANG_S, stop, [workers])
        watchdog.start()
        try:
            lines = [json.loads(line) for line in workers[0].stdout or () if line.startswith("{")]
        finally:
            watchdog.cancel()
            stop(workers)
        if not lines or "end" not in lines[-1]:
            errors.seek(0)
            raise RuntimeError(f"{run.name} ended early:\n{errors.read()[-2000:]}")
    return {"run": asdict(run), "target": target, "points": lines[:-1], **lines[-1]}


def stop(workers: list[subprocess.Popen[str]]) -> None:
    """End the processes that are left."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()


def execute_all(runs: list[Run], folder: Path) -> None:
    """Run what has no result in ``folder`` yet, link by link."""
    from training.network import network
    from training.tasks import TASKS

    targets = {task: TASKS[task]().target for task in {run.task for run in runs}}
    missing = [run for run in runs if not (folder / f"{run.name}.json").exists()]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there already", flush=True)
    for link_mbit, group in itertools.groupby(missing, key=lambda run: run.link_mbit):
        with network(NODES, link_mbit) as built:
            for run in group:
                result = execute(run, built, targets[run.task])
                path = folder / f"{run.name}.json"
                path.with_suffix(".part").write_text(json.dumps(result, indent=1))
                path.with_suffix(".part").rename(path)
                print(f"  {run.name}: {summary(result)}", flush=True)


def summary(result: dict[str, Any]) -> str:
    losses = [point["loss"] for point in result["points"]]
    return (
        f"{result['end']} after {result['steps']} steps, {result['seconds']:.1f} s, "
        f"{statistics.mean(result['step_s']):.3f} s per step, loss {losses[-1] if losses else float('nan'):.3f}"
    )


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What the result files say."""

    results: dict[str, dict[str, Any]]

    @staticmethod
    def load(folder: Path) -> Results:
        """Read all files of a folder."""
        return Results(
            {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        )

    def curve(self, task: str, method: str, seed: int) -> dict[str, Any] | None:
        """Return the run for the whole curve, None where there is none."""
        return self.results.get(f"{task}-{method}-curve-{seed}")

    def timing(self, task: str, method: str, link_mbit: int, seed: int) -> dict[str, Any] | None:
        """Return the run for the times at a link, None where there is none."""
        return self.results.get(f"{task}-{method}-{link_mbit}-{seed}")

    def time_to_target(self, task: str, method: str, link_mbit: int) -> Duration | None:
        """Return the median over the seeds that were run; None if there are none or one never gets there."""
        seeds = self.seeds(task, method, link_mbit)
        found = [self._seed_time(task, method, link_mbit, seed) for seed in seeds]
        times = [one for one in found if one is not None]
        if not times or len(times) < len(found):
            return None
        return Duration(
            statistics.median(one.seconds for one in times),
            any(one.is_composed for one in times),
            min(one.seconds for one in times),
            max(one.seconds for one in times),
            len(times),
        )

    def _seed_time(self, task: str, method: str, link_mbit: int, seed: int) -> Duration | None:
        if method == ASYNCHRONOUS:
            timing = self.timing(task, method, link_mbit, seed)
            reached = first_below(timing) if timing else None
            return None if reached is None else Duration(reached["seconds"], is_composed=False)
        timing = self.timing(task, method, link_mbit, SEEDS[0])
        curve = self.curve(task, method, seed)
        reached = first_below(curve) if curve else None
        if timing is None or reached is None:
            return None
        measured, steps = timing["step_s"], reached["step"]
        return Duration(seconds_of(measured, steps), is_composed=steps > len(measured))

    def seeds(self, task: str, method: str, link_mbit: int) -> list[int]:
        """Return the seeds that tell of a method at a link."""
        kind = self.curve if method != ASYNCHRONOUS else self._timing_at(link_mbit)
        return [seed for seed in SEEDS if kind(task, method, seed)]

    def _timing_at(self, link_mbit: int) -> Callable[[str, str, int], dict[str, Any] | None]:
        return lambda task, method, seed: self.timing(task, method, link_mbit, seed)

    def final_losses(self, task: str, method: str) -> dict[int, float]:
        """Return the last loss of every seed that took all steps."""
        found = {seed: self.curve(task, method, seed) for seed in SEEDS}
        return {
            seed: one["points"][-1]["loss"]
            for seed, one in found.items()
            if one and one["end"] == "steps"
        }


@dataclass(frozen=True)
class Duration:
    """Seconds to the target, whether they were composed, and the spread over seeds."""

    seconds: float
    is_composed: bool
    least_s: float = 0.0
    most_s: float = 0.0
    seeds: int = 1


def first_below(result: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first point of a result at or below its target."""
    points = (point for point in result["points"] if point["loss"] <= result["target"])
    return next(points, None)


def tell(results: Results, report: Report) -> None:
    """Add what the results say to the report."""
    from training.methods import METHODS

    for task in TASK_NAMES:
        for link_mbit, method in itertools.product(LINKS_MBIT, METHODS):
            duration = results.time_to_target(task, method, link_mbit)
            if duration is None:
                if results.timing(task, method, link_mbit, SEEDS[0]):
                    report.skip(f"{task}, {method}, {link_mbit} Mbit/s", "target not reached")
                continue
            note = f"{duration.least_s:.1f} to {duration.most_s:.1f} s over {duration.seeds} seeds"
            note += "; composed" if duration.is_composed else ""
            what = f"time to target, {method}, {link_mbit} Mbit/s"
            report.add([figure(task, what, 0, duration.seconds, "s", note=note)])
        for method in METHODS:
            tell_method(task, method, results, report)
        tell_speedups(task, results, report)
        tell_losses(task, results, report)
        tell_costs(task, results, report)


def tell_method(task: str, method: str, results: Results, report: Report) -> None:
    """Add what one node sends in a step, and the loss after the last one."""
    losses = list(results.final_losses(task, method).values())
    curves = [results.curve(task, method, seed) for seed in SEEDS]
    sent = [one["bytes"] / one["steps"] for one in curves if one]
    if not losses or not sent:
        return
    note = f"{spread(losses)} over {len(losses)} seeds"
    report.add(
        [
            figure(task, f"final loss, {method}", 0, statistics.mean(losses), "", note=note),
            figure(task, f"sent by one node per step, {method}", 0, statistics.mean(sent), "B"),
        ]
    )


def tell_speedups(task: str, results: Results, report: Report) -> None:
    for (against, link_mbit, reach), method in itertools.product(SPEEDUPS, OURS):
        ours = results.time_to_target(task, method, link_mbit)
        rivals = RIVALS if against == "rivals" else (against,)
        times = [results.time_to_target(task, rival, link_mbit) for rival in rivals]
        theirs = [one for one in times if one is not None]
        if ours is None or not theirs:
            continue
        best = min(theirs, key=lambda one: one.seconds)
        names = "the best of fp16 and PowerSGD" if against == "rivals" else against
        note = "composed" if ours.is_composed or best.is_composed else ""
        report.add(
            [
                figure(
                    task,
                    f"{method} against {names}, {link_mbit} Mbit/s",
                    0,
                    best.seconds / ours.seconds,
                    "x faster",
                    reach=Reach(">=", reach),
                    note=note,
                )
            ]
        )


def tell_losses(task: str, results: Results, report: Report) -> None:
    for method in OURS:
        all_dense, all_ours = (results.final_losses(task, one) for one in ("dense", method))
        seeds = all_dense.keys() & all_ours.keys()
        if not seeds:
            continue
        dense, losses = [[of[seed] for seed in seeds] for of in (all_dense, all_ours)]
        ratio = statistics.mean(losses) / statistics.mean(dense)
        report.add(
            [
                figure(
                    task,
                    f"final loss of {method} / of dense, equal steps",
                    0,
                    ratio,
                    "x",
                    reach=Reach("<=", 1.0 + LOSS_TOLERANCE),
                    note=f"{spread(losses)} against {spread(dense)}, {len(seeds)} seeds",
                )
            ]
        )


def spread(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def tell_costs(task: str, results: Results, report: Report) -> None:
    """Add the bytes of messages in a whole training, and gradwire's share of a step at 100 Mbit/s."""
    for method in OURS:
        curves = [results.curve(task, method, seed) for seed in SEEDS]
        whole = [one for one in curves if one and one["totals"]["message_bytes"]]
        if whole:
            numel, steps = whole[0]["numel"], whole[0]["steps"]
            sent = statistics.mean(one["totals"]["message_bytes"] for one in whole)
            report.add(
                [
                    figure(
                        task,
                        f"float32 gradients of all steps / messages, {method}",
                        0,
                        4 * numel * steps / sent,
                        "x",
                        reach=Reach(">=", BYTES_RATIO),
                        note=f"{sent / 1e6:.1f} MB in {steps} steps",
                    )
                ]
            )
        timings = [results.timing(task, method, 100, seed) for seed in SEEDS]
        spent = [
            sum(one["totals"][part] for part in ("encode_s", "wait_s", "apply_s")) / one["seconds"]
            for one in timings
            if one
        ]
        if spent:
            report.add(
                [
                    figure(
                        task,
                        f"share of a step in gradwire, {method}, 100 Mbit/s",
                        0,
                        statistics.mean(spent),
                        "of the time",
                        reach=Reach("<=", SHARE_MAX),
                        note="waiting for slower nodes counts, which share the processors",
                    )
                ]
            )


# ---- prediction ------------------------------------------------------------------------------------------------------


def predict(results: Results) -> None:
    """Print what each method must send per step, the time each link needs for it, and what was measured."""
    from training.methods import METHODS, predicted_bytes
    from training.tasks import TASKS

    for task in TASK_NAMES:
        shapes = [tuple(param.shape) for param in TASKS[task]().model().parameters()]
        print(f"\n{task}: bytes that one of {NODES} nodes sends per step, and seconds for them")
        print(f"  {'':16} {'predicted':>11} {'measured':>11}", end="")
        print("".join(f"{f'{link} Mbit/s':>24}" for link in LINKS_MBIT))
        for method in METHODS:
            sent = predicted_bytes(method, shapes, NODES, DENSITY)
            found = [
                one
                for one in results.results.values()
                if (one["run"]["task"], one["run"]["method"]) == (task, method)
            ]
            measured = [one["bytes"] / one["steps"] for one in found]
            print(f"  {method:16} {sent:11.0f}", end=" ")
            print(f"{statistics.mean(measured):11.0f}" if measured else f"{'':11}", end="")
            for link in LINKS_MBIT:
                steps = [
                    statistics.mean(one["step_s"])
                    for one in found
                    if one["run"]["link_mbit"] == link and not one["run"]["is_whole"]
                ]
                step = f"{statistics.mean(steps):.3f} s/step" if steps else ""
                print(f"{8 * sent / (link * 1e6):10.4f} {step:>13}", end="")
            print(flush=True)


def draw_all(results: Results, folder: Path) -> None:
    """Draw the learning curves of every task that has results: the first seed's."""
    from training.methods import METHODS
    from training.pictures import draw

    for task in TASK_NAMES:
        links = {}
        for link_mbit in LINKS_MBIT:
            found = [drawn(results, task, method, link_mbit) for method in METHODS]
            links[link_mbit] = [one for one in found if one is not None]
        if any(links.values()):
            target = next(
                one["target"] for one in results.results.values() if one["run"]["task"] == task
            )
            print(draw(task, target, links, folder))


def drawn(results: Results, task: str, method: str, link_mbit: int) -> Curve | None:
    """Return what to draw of a method at a link: its losses at the times that its steps take there."""
    from training.pictures import Curve

    timing = results.timing(task, method, link_mbit, SEEDS[0])
    whole = timing if method == ASYNCHRONOUS else results.curve(task, method, SEEDS[0])
    if timing is None or whole is None:
        return None
    points = whole["points"]
    seconds = [seconds_of(timing["step_s"], point["step"]) for point in points]
    return Curve(method, [one["loss"] for one in points], seconds, [one["bytes"] for one in points])


def seconds_of(measured: list[float], steps: int) -> float:
    """Return the time of so many steps; those not measured count as the mean of the later half of those that were."""
    missing = max(0, steps - len(measured))
    return sum(measured[:steps]) + missing * statistics.mean(measured[len(measured) // 2 :])


# ---- the command -----------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> list[Run]:
    """Return the runs to do."""
    from training.methods import METHODS

    if arguments.smoke:
        return [
            Run("digits", method, 1000, 0, steps=3, budget_s=60.0, evaluate_every=3)
            for method in METHODS
        ] + [Run("text", "gradwire-udp", 1000, 0, steps=3, budget_s=60.0, evaluate_every=3)]
    seeds = SEEDS[: arguments.seeds]
    runs = []
    if CURVES in arguments.part:
        runs += [
            Run(task, method, UNLIMITED, seed, STEPS[task], arguments.budget, is_whole=True)
            for seed, task, method in itertools.product(seeds, TASK_NAMES, METHODS)
        ]
    if TIMINGS in arguments.part:
        runs += [
            Run(task, method, link_mbit, seed, STEPS[task], budget_s(method, arguments))
            for link_mbit, task, method in itertools.product(LINKS_MBIT, TASK_NAMES, METHODS)
            for seed in (seeds if method == ASYNCHRONOUS else seeds[:1])
        ]
    if arguments.only:
        wanted = "-".join(arguments.only)
        runs = [run for run in runs if f"{run.name}-".startswith(f"{wanted}-")]
    return runs


def budget_s(method: str, arguments: argparse.Namespace) -> float:
    """Return the seconds of one timing; an asynchronous one has to reach the target itself."""
    return math.inf if method == ASYNCHRONOUS else float(arguments.budget)


def parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the report says about itself."""
    import torch
    from training.tasks import TASKS

    return {
        "benchmark": "training",
        "mode": "smoke" if arguments.smoke else "full",
        "clock": "wall",
        "nodes": NODES,
        "density": DENSITY,
        "targets": {name: TASKS[name]().target for name in TASK_NAMES},
        "torch": torch.__version__,
    }


def unmet(*, needs_network: bool) -> str | None:
    """Return why nothing can be measured here, or told of, or None."""
    for package in ("torch", "sklearn"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    from training.network import missing

    return missing() if needs_network else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder of the results, one file per run")
    parser.add_argument(
        "--only", nargs="+", help="task, method, link in Mbit/s or 'curve', seed; or the first few"
    )
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=PARTS, help="both, if not given"
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of one timing")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--predict", action="store_true", help="the arithmetic only")
    parser.add_argument("--smoke", action="store_true", help="three steps of each method")
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument(
        "--pictures", type=Path, help="folder for the learning curves, such as docs"
    )
    arguments = parser.parse_args()

    runs_something = not arguments.report and not arguments.predict
    reason = unmet(needs_network=runs_something)
    if reason is not None:
        print(f"skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if runs_something:
            execute_all(plan(arguments), folder)
        results = Results.load(folder)
    predict(results)
    if arguments.predict:
        return
    report = Report(parameters(arguments), void="a smoke test" if arguments.smoke else "")
    tell(results, report)
    report.print()
    if arguments.json:
        report.write(arguments.json)
    if arguments.pictures:
        draw_all(results, arguments.pictures)


if __name__ == "__main__":
    main()
