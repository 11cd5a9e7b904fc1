"""``gradwire demo``: the same training twice, with whole updates and with gradwire's messages."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.cli.demo.training import Recipe

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
    parser.add_argument("--epochs", type=int, help="passes over the images (default: 20)")
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
    try:
        recipe = _recipe(arguments)
    except ValueError as error:
        print(f"gradwire demo: {error}", file=sys.stderr)
        return 2
    return _train_both(recipe, arguments.report)


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from gradwire.cli.demo.training import Recipe

    recipe = Recipe(workers=arguments.workers, threshold=arguments.threshold)
    return recipe if arguments.epochs is None else replace(recipe, epochs=arguments.epochs)


def _train_both(recipe: Recipe, folder: Path) -> int:
    # Only now, so that the other commands do not wait for these imports.
    from gradwire.cli.demo import report
    from gradwire.cli.demo.launcher import WorkerFailed, train

    report.print_plan(recipe)
    runs = []
    for recipe_of_run in (replace(recipe, dense=True), recipe):
        with report.LiveLine(recipe_of_run) as live:
            try:
                runs.append(train(recipe_of_run, live.show))
            except WorkerFailed as error:
                print(f"gradwire demo: {error}", file=sys.stderr)
                return 1
    dense, sparse = runs
    report.print_tables(dense, sparse)
    print(f"\npicture: {report.draw(dense, sparse, folder)}")
    return 0
