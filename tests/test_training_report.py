"""What the training benchmark makes of its runs: composed times, spreads over seeds, and the published tables."""

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

pytest.importorskip("torch", reason="the benchmark's methods are PyTorch's")
pytest.importorskip("sklearn", reason="the benchmark's digits are scikit-learn's")


def run(losses: list[float], step_s: list[float], end: str, **more: Any) -> dict[str, Any]:
    """Return what a run has left behind: a loss every 20 steps, a megabyte of datagrams per step."""
    points = [
        {"step": 20 * (index + 1), "seconds": 0.0, "bytes": 20_000_000 * (index + 1), "loss": loss}
        for index, loss in enumerate(losses)
    ]
    steps = 20 * len(losses) or len(step_s)
    return {
        "target": 2.3,
        "points": points,
        "end": end,
        "steps": steps,
        "seconds": sum(step_s),
        "bytes": 1_000_000 * steps,
        "step_s": step_s,
        "totals": {},
        "numel": NUMEL,
        **more,
    }


def ours(message_bytes: int, spent_s: float) -> dict[str, Any]:
    return {
        "totals": {
            "encode_s": spent_s,
            "wait_s": spent_s,
            "apply_s": spent_s,
            "message_bytes": message_bytes,
            "messages": 40,
        }
    }


RUNS = {
    "text-dense-curve-0": run([2.5, 2.2], [1.0] * 40, "steps"),
    "text-dense-100-0": run([], [3.0, 2.0], "budget"),
    "text-gradwire-udp-curve-0": run([2.3, 2.1], [1.0] * 40, "steps", **ours(800_000, 0.0)),
    "text-gradwire-udp-curve-1": run([2.4, 2.3], [1.0] * 40, "steps", **ours(800_000, 0.0)),
    "text-gradwire-udp-100-0": run([2.4, 2.3], [0.5] * 40, "target", **ours(800_000, 1.0)),
    "text-gradwire-thin-curve-0": run([2.6, 2.5], [1.0] * 40, "steps", **ours(80_000, 0.0)),
    "text-gradwire-thin-100-0": run([], [0.5] * 40, "budget", **ours(80_000, 0.1)),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the report of the runs above, and a page with its tables."""
    folder = tmp_path_factory.mktemp("runs")
    for name, content in RUNS.items():
        task, *method, place, seed = name.split("-")
        described = {
            "task": task,
            "method": "-".join(method),
            "link_mbit": 0 if place == "curve" else int(place),
            "seed": int(seed),
            "is_whole": place == "curve",
        }
        (folder / f"{name}.json").write_text(json.dumps({"run": described, **content}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    report, page = folder / "report", folder / "page.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    for script, *arguments in (
        ("bench_training.py", "--results", folder, "--report", "--json", report),
        ("publish.py", report, page),
    ):
        command = [sys.executable, ROOT / "benchmarks" / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    return json.loads(report.read_text()), page.read_text()


def figure(told: tuple[dict[str, Any], str], what: str) -> dict[str, Any]:
    (row,) = [row for row in told[0]["rows"] if row["what"] == what]
    return row


def test_steps_that_were_not_timed_count_as_the_later_half_of_those_that_were(told: Any) -> None:
    row = figure(told, "time to target, dense, 100 Mbit/s")
    assert row["minimum"] == 3.0 + 2.0 + 38 * 2.0
    assert "composed" in row["note"]


def test_a_method_s_time_is_the_median_of_its_seeds(told: Any) -> None:
    row = figure(told, "time to target, gradwire-udp, 100 Mbit/s")
    assert row["minimum"] == 15.0  # the seeds reach the target after 20 and 40 steps of 0.5 s
    assert "10.0 to 20.0 s over 2 seeds" in row["note"]
    assert "composed" not in row["note"]


def test_what_falls_short_of_its_number_is_told_so(told: Any) -> None:
    speedup = figure(told, "gradwire-udp against dense, 100 Mbit/s")
    assert speedup["minimum"] == pytest.approx(81 / 15)
    assert speedup["verdict"] == "NOT MET"
    nbytes = figure(told, "float32 gradients of all steps / messages, gradwire-udp")
    assert nbytes["minimum"] == 4 * NUMEL * 40 / 800_000
    assert nbytes["verdict"] == "met"
    share = figure(told, "share of a step in gradwire, gradwire-udp, 100 Mbit/s")
    assert share["minimum"] == pytest.approx(3 / 20)


def test_final_losses_are_compared_where_both_have_the_seed(told: Any) -> None:
    row = figure(told, "final loss of gradwire-udp / of dense, equal steps")
    assert row["minimum"] == pytest.approx(2.1 / 2.2)
    assert row["note"].endswith("1 seeds")


def test_the_tables_have_a_line_for_every_method(told: Any) -> None:
    page = told[1]
    assert "| dense |  | 81.0 (81.0 to 81.0) * |  | 1,000 kB | 2.200 (2.200 to 2.200) |" in page
    assert (
        "| gradwire-udp |  | 15.0 (10.0 to 20.0) |  | 1,000 kB | 2.200 (2.100 to 2.300) |" in page
    )
    assert "| gradwire-thin |  | not reached |  | 1,000 kB | 2.500 (2.500 to 2.500) |" in page
    assert (
        "| text | gradwire-udp against dense, 100 Mbit/s | ≥ 8 | 5.4 | not met | composed |" in page
    )
