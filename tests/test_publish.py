"""docs/performance.md takes the transport's figures from a result, and only from one that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"


def row(group: str, what: str, reference: str, minimum: float, **more: Any) -> dict[str, Any]:
    reach = {"relation": ">=", "value": 5.0} if reference else None
    known = {"numel": 1 << 20, "unit": "x faster", "median": minimum / 2, "floor": None, "note": ""}
    verdict = "NOT MET" if reach else ""
    return {
        "group": group,
        "what": what,
        "reference": reference,
        "minimum": minimum,
        "reach": reach,
        "verdict": verdict,
        "timings": [],
        **known,
        **more,
    }


def result(mode: str) -> dict[str, Any]:
    timings = [{"name": name, "minimum_s": s} for name, s in (("ours", 1e-3), ("qh3", 4e-3))]
    what = "goodput of 1 MB messages, two processes"
    return {
        "parameters": {
            "benchmark": "transport",
            "mode": mode,
            "clock": "wall",
            "seconds": 1.5,
            "rounds": 5,
            "peers": {"qh3": "2.1.0"},
        },
        "machine": {
            "cpu": "abacus",
            "cpus": 2,
            "system": "Linux 6.1",
            "python": "3.11.7",
            "cryptography": "50.0.2",
            "commit": "0123456789ab-dirty",
            "time": "2026-11-21T12:00:00Z",
        },
        "load_average_before": [0.1, 0.1, 0.1],
        "cpus_used_by_others": 0.01,
        "skipped": {"cables": "network namespaces need root"},
        "rows": [
            row("loopback", "goodput of 1 MB messages", "raw GSO/GRO", 0.25),
            row("loopback", "ours: goodput", "", 1.5, unit=" GB/s"),
            row("peers", what, "qh3, in memory", 4.0, timings=timings),
            row("peers", "qh3, in memory: processor time of both ends", "", 3.0, unit=" s/GB"),
            row("cable", "cable: use of 100 Mbit/s", "its rate", 0.93),
        ],
    }


def publish(content: dict[str, Any], folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    file, page = folder / "result.json", folder / "page.md"
    file.write_text(json.dumps(content))
    page.write_text(PAGE.read_text())
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "publish.py"), str(file), str(page)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return done, page.read_text()


def test_a_full_run_fills_the_transport_s_blocks_and_touches_no_other(tmp_path: Path) -> None:
    done, page = publish(result("full"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| goodput of 1 MB messages | raw GSO/GRO | ≥ 5 | 0.25 (0.12) | not met |" in page
    assert "| ours: goodput | GB/s | 1.50 (0.75) |" in page
    assert "| two processes | qh3, in memory | ≥ 5 | 4.00 (2.00) | 1.05 | 0.26 | not met |" in page
    assert "| qh3, in memory: processor time of both ends | s/GB | 3.00 (1.50) |" in page
    assert "| cable: use of 100 Mbit/s | its rate | ≥ 5 | 0.93 (0.47) | not met |" in page
    assert "Skipped: cables (network namespaces need root)." in page
    head, mark, _ = PAGE.read_text().partition("<!-- begin transport-machine -->")
    assert mark
    assert page.startswith(head + mark + "\nabacus, 2 CPUs")


def test_a_smoke_test_is_not_published(tmp_path: Path) -> None:
    done, page = publish(result("smoke"), tmp_path)
    assert done.returncode == 1
    assert "publish a full run" in done.stderr
    assert page == PAGE.read_text()
