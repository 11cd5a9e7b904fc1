"""``gradwire demo``: the same training twice, with whole updates and with gradwire's messages."""

from __future__ import annotations

import argparse
import importlib.util
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
        "that exchange their updates over UDP: first whole float32 updates, then gradwire's "
        "messages. Ends with a table and a picture of both.",
    )
    parser.add_argument("--workers", type=int, default=4, help="processes (default: 4)")
    parser.add_argument(
        "--epochs", type=int, default=20, help="passes over the images (default: 20)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="a fixed threshold (default: one that keeps the density between 0.1 and 1 %%)",
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
    # Only now, so that the other commands do not wait for these imports.
    from . import report
    from .training import Recipe
    from .workers import WorkerFailed, train

    try:
        recipe = Recipe(arguments.workers, arguments.epochs, threshold=arguments.threshold)
    except ValueError as error:
        print(f"gradwire demo: {error}", file=sys.stderr)
        return 2
    report.print_plan(recipe)
    recipes = (replace(recipe, dense=True), recipe)
    try:
        dense, sparse = (train(one, report.start_progress(one)) for one in recipes)
    except WorkerFailed as error:
        print(f"gradwire demo: {error}", file=sys.stderr)
        return 1
    report.print_tables(dense, sparse)
    print(f"\npicture: {report.draw(dense, sparse, arguments.report)}")
    return 0
