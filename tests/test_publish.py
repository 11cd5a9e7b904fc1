"""A page takes its figures from the report of a benchmark, and only from a report that counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = """before
<!-- begin codec-machine -->
<!-- end codec-machine -->
<!-- begin time -->
old
<!-- end time -->
<!-- begin other -->
kept
<!-- end other -->
"""


def row(what: str, column: str, best: float, **more: Any) -> dict[str, Any]:
    known = {"group": "time", "median": best / 2, "unit": "x", "reference": "", "floor": None}
    return {"what": what, "column": column, "best": best, "target": None, **known, **more}


REPORT = {
    "benchmark": "codec",
    "void": "",
    "parameters": {"seed": 1},
    "machine": {"cpu": "abacus", "cpus": 2, "command": "python bench_codec.py"},
    "skipped": {"torch": "not installed"},
    "rows": [
        row("encode", "2^24", 1.25, target={"relation": "<=", "value": 1.3}, reference="np.add"),
        row("encode", "2^26", 1.5, target={"relation": "<=", "value": 1.3}, reference="np.add"),
        row("goodput", "2^26", 3.0, unit="GB/s", note="busy"),
    ],
}


def publish(content: dict[str, Any], folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    file, page = folder / "report.json", folder / "page.md"
    file.write_text(json.dumps(content))
    page.write_text(PAGE)
    command = [sys.executable, str(ROOT / "benchmarks" / "publish.py"), str(file), str(page)]
    return subprocess.run(command, capture_output=True, text=True), page.read_text()


def test_a_report_fills_its_blocks_and_no_others(tmp_path: Path) -> None:
    done, page = publish(REPORT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert page.startswith("before\n<!-- begin codec-machine -->\ncpu abacus; cpus 2; seed 1;")
    assert "skipped torch (not installed)" in page
    assert "| what | against | target | 2^24 | 2^26 |  |" in page
    assert "| encode | np.add | ≤ 1.3 | 1.25 (0.625) | 1.50 (0.750) | met / not met |" in page
    assert "| goodput |  |  |  | 3.00 GB/s (1.50; busy) |  |" in page
    assert "old" not in page
    assert "kept" in page


def test_a_smoke_test_is_not_published(tmp_path: Path) -> None:
    done, page = publish({**REPORT, "void": "smoke test"}, tmp_path)
    assert done.returncode == 1
    assert "no figure of this run counts" in done.stderr
    assert page == PAGE
