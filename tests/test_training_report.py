"""What the training benchmark makes of its runs: composed times, medians over seeds, and figures to reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NUMEL = 1_000_000


def run(losses: list[float], step_s: list[float], message_bytes: int = 0) -> dict[str, Any]:
    """Return the result of a run: a loss every 20 steps, a megabyte sent per step, a tenth spent in gradwire."""
    steps = 20 * len(losses) or len(step_s)
    return {
        "target": 2.3,
        "points": [{"step": 20 * n, "seconds": 0.0, "loss": x} for n, x in enumerate(losses, 1)],
        "steps": steps,
        "seconds": sum(step_s),
        "bytes": 1_000_000 * steps,
        "step_s": step_s,
        "totals": {"spent_s": sum(step_s) / 10, "message_bytes": message_bytes},
        "numel": NUMEL,
    }


RUNS = {
    "text-dense-curve-0": run([2.5, 2.2], [1.0] * 40),
    "text-dense-100-0": run([], [3.0, 2.0]),
    "text-gradwire-udp-curve-0": run([2.3, 2.1], [1.0] * 40, 800_000),
    "text-gradwire-udp-curve-1": run([2.4, 2.3], [1.0] * 40, 800_000),
    "text-gradwire-udp-100-0": run([2.4, 2.3], [0.5] * 40, 800_000),
    "text-gradwire-every4-curve-0": run([2.6, 2.5], [1.0] * 40, 80_000),
    "text-gradwire-every4-100-0": run([], [0.5] * 40, 80_000),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of the report of the runs above."""
    folder = tmp_path_factory.mktemp("runs")
    for name, content in RUNS.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    report = folder / "report"
    arguments = ["--results", folder, "--report", "--json", report]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "bench_training.py", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["rows"]
    return {(row["what"], row["column"], row["reference"]): row for row in found}


def test_steps_that_were_not_timed_count_as_the_later_half_of_the_others(rows: Any) -> None:
    row = rows["dense", "s at 100 Mbit/s", ""]
    assert row["best"] == 3.0 + 2.0 + 38 * 2.0
    assert row["note"] == "composed"


def test_a_method_s_time_is_the_median_of_its_seeds(rows: Any) -> None:
    row = rows["gradwire-udp", "s at 100 Mbit/s", ""]
    assert row["best"] == 15.0  # the seeds reach the target after 20 and 40 steps of 0.5 s
    assert row["note"] == "10 to 20"


def test_a_method_that_does_not_reach_the_target_has_no_time(rows: Any) -> None:
    assert ("gradwire-every4", "s at 100 Mbit/s", "") not in rows
    assert rows["gradwire-every4", "final loss", ""]["best"] == 2.5
    assert rows["gradwire-every4", "kB sent per node and step", ""]["best"] == 1_000


@pytest.mark.parametrize(
    ("what", "reference", "figure"),
    [
        ("times as fast, 100 Mbit/s", "dense", 81 / 15),
        ("final loss", "dense", 2.1 / 2.2),  # of the seed that both have
        ("float32 gradients of all steps over messages", "", 4 * NUMEL * 40 / 800_000),
        ("share of a step in gradwire, 100 Mbit/s", "", 0.1),
    ],
)
def test_figures_are_held_against_their_targets(
    rows: Any, what: str, reference: str, figure: float
) -> None:
    row = rows[what, "gradwire-udp", reference]
    assert row["best"] == pytest.approx(figure)
    assert row["target"]
