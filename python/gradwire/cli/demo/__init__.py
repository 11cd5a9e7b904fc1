"""``gradwire demo``: a training with whole updates, and the same training with gradwire's messages."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a network in several processes that exchange updates over UDP",
        description="Train a small network on scikit-learn's scanned digits in several processes "
        "that exchange their updates over UDP, each behind a link of limited rate: first whole float32 "
        "updates, then gradwire's messages. Ends with a table and a picture of both.",
    )
    parser.add_argument("--workers", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the images (default: 5)")
    parser.add_argument(
        "--link",
        type=float,
        default=100.0,
        metavar="MBIT",
        help="rate of each worker's link in Mbit/s, 0: not limited (default: 100)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("demo-report"),
        metavar="DIR",
        help="folder for the picture, made if missing (default: demo-report)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train both ways and report."""
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f'the demo needs {" and ".join(missing)}: pip install "gradwire[demo]"', file=sys.stderr
        )
        return 1
    # Imported here, because the other commands should not wait for it.
    from . import report
    from .link import links
    from .training import Recipe
    from .workers import WorkerFailed, train

    try:
        recipe = Recipe(arguments.workers, arguments.epochs)
        if not 0.0 <= arguments.link < math.inf:
            raise ValueError(f"link is {arguments.link:g}, must be a rate in Mbit/s, or 0")
        arguments.report.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"gradwire demo: {error}", file=sys.stderr)
        return 2
    runs = []
    try:
        with links(recipe.workers, arguments.link) as (worker_links, description):
            report.print_plan(recipe, description)
            for variant in (replace(recipe, dense=True), recipe):
                with report.progress(variant) as show:
                    runs.append(train(variant, show, worker_links))
    except WorkerFailed as error:
        print(f"gradwire demo: {error}", file=sys.stderr)
        return 1
    dense, sparse = runs
    print("", *report.comparison(dense, sparse), sep="\n")
    try:
        picture = report.draw(dense, sparse, arguments.report)
    except OSError as error:
        print(f"gradwire demo: the picture cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"\npicture: {picture}")
    return 0
