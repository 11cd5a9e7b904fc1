"""``gradwire compare``: a script with plain all-reduce and with gradwire, side by side."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .demo.link import Link, links
from .estimate import rate, seconds
from .run import WORKERS_MAX, environments, free_port, run_all

_TASK = "GRADWIRE_COMPARE"  # for the processes of this command, in JSON
_PACKAGE = Path(__file__).parents[1]
_TAIL_LINES = 30
_GRACE_S = 5.0


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "compare",
        help="train a script with plain all-reduce and with gradwire, and compare",
        description="Train your script, which calls gradwire.torch.share, three times from the same parameters and "
        "seeds: with gradwire, with plain all-reduce, and with all-reduce and other seeds (what chance does to the "
        "loss). Ends with seconds, bytes, memory, losses and a verdict. With -n the processes are this machine's, "
        "each behind a link of its own; under torchrun or another launcher the processes and links are the real ones. "
        "Its own arguments come after the script.",
    )
    parser.add_argument("-n", "--workers", type=int, help="processes to start on this machine")
    parser.add_argument("--link", help="rate of each process's link, such as 100Mbit (with -n)")
    parser.add_argument(
        "--latency", default="0", help="one way between two processes, such as 20ms (with --link)"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="optimiser steps to take (default: 200)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random generators (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses over time")
    parser.add_argument("script", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print what came out in rank 0."""
    if _TASK in os.environ:
        return _train(json.loads(os.environ[_TASK]), arguments)
    try:
        _check(arguments)
        # Imported here, because the other commands should not wait for torch.
        from gradwire.torch.comparison import KINDS, Comparison, Curve, Place

        ranks = arguments.workers or Place.from_env().ranks
        with (
            TemporaryDirectory() as folder,
            _places(arguments, ranks) as (places, link, description),
        ):
            curves = {}
            # gradwire comes first: what it refuses, such as a wrong option of share, ends the command at once.
            for number, kind in enumerate((KINDS[2], *KINDS[:2]), 1):
                if not arguments.json and (arguments.workers or not Place.from_env().rank):
                    print(f"{kind}: {arguments.steps} steps ...", flush=True)
                result = Path(folder) / kind
                task = {"kind": kind, "number": number, "result": str(result)}
                # What chance does to the loss does not depend on the links, which make all-reduce take minutes.
                _run_kind(
                    arguments, places, task, link if kind != KINDS[1] else [Link()] * len(link)
                )
                if result.exists():
                    curves[kind] = Curve(**json.loads(result.read_text()))
        if not curves:
            return 0  # of another rank
        comparison = Comparison(ranks, description, *(curves[kind] for kind in KINDS))
        comparison.check()
    except (ValueError, OSError) as error:
        print(f"gradwire compare: {error}", file=sys.stderr)
        return 2
    except _Failed as error:
        print(f"gradwire compare: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(comparison.to_dict()))
    else:
        print("", comparison.table(), "", comparison.verdict(), sep="\n")
    if arguments.plot:
        try:
            _draw(comparison, arguments.plot)
        except (ValueError, OSError) as error:
            print(f"gradwire compare: {arguments.plot} cannot be drawn: {error}", file=sys.stderr)
            return 2
    return 0


class _Failed(Exception):
    """A process of the script failed."""


def _check(arguments: argparse.Namespace) -> None:
    """Raise `ValueError` if the arguments make no comparison."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError('comparing needs PyTorch: pip install "gradwire[torch]"')
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "gradwire[demo]"')
    if not os.path.isfile(arguments.script):
        raise ValueError(f"there is no file {arguments.script}")
    if arguments.workers is None:
        if arguments.link:
            raise ValueError(
                "--link shapes the links between processes of this machine: give -n as well"
            )
        from gradwire.torch.comparison import Place

        Place.from_env()
    elif not 2 <= arguments.workers <= WORKERS_MAX:
        raise ValueError(f"-n is {arguments.workers}, must be 2 to {WORKERS_MAX}")
    latency_s = seconds("--latency", arguments.latency)
    if latency_s < 0.0:
        raise ValueError(f"--latency is {arguments.latency}, must be 0 or more")
    if latency_s and not arguments.link:
        raise ValueError("--latency is that of links: give --link as well, such as --link 100Mbit")
    if arguments.link is not None and not rate("--link", arguments.link) > 0.0:
        raise ValueError(
            f"--link is {arguments.link}, must be above 0; without --link the rate is not limited"
        )
    from gradwire.torch.comparison import check_steps

    check_steps(arguments.steps)


@contextlib.contextmanager
def _places(
    arguments: argparse.Namespace, ranks: int
) -> Iterator[tuple[list[dict[str, str]], list[Link], str]]:
    """Yield the environments of the processes to start here, their links, and a description of the links."""
    if arguments.workers is None:
        yield [dict(os.environ)], [Link()], f"{ranks} processes"
        return
    mbit = rate("--link", arguments.link) * 8e-6 if arguments.link else 0.0
    latency_s = seconds("--latency", arguments.latency)
    with links(arguments.workers, mbit, latency_s) as (made, description):
        yield (
            environments(arguments.workers, as_machines=True),
            made,
            f"{arguments.workers} processes {description}",
        )


def _run_kind(
    arguments: argparse.Namespace,
    places: list[dict[str, str]],
    task: dict[str, Any],
    made: list[Link],
) -> None:
    """Train the script in one way; rank 0 leaves the result in a file."""
    from gradwire.torch.comparison import PORT_VARIABLE

    command = [sys.executable, "-m", "gradwire", "compare", "--steps", str(arguments.steps)]
    command += ["--seed", str(arguments.seed), arguments.script, *arguments.arguments]
    under_way = []
    port = free_port()
    for place, link in zip(places, made, strict=True):
        own = {_TASK: json.dumps({**task, "link": dataclasses.asdict(link)})}
        if arguments.workers:
            own |= {"MASTER_ADDR": made[0].host, PORT_VARIABLE: str(port)}
        if link.namespace:
            own["GLOO_SOCKET_IFNAME"] = "v0"
        if "TORCHELASTIC_RESTART_COUNT" in place:
            # torchrun's store outlives the process: what another way has left there must not be found.
            count = int(place["TORCHELASTIC_RESTART_COUNT"])
            own["TORCHELASTIC_RESTART_COUNT"] = str(10 * count + task["number"])
        under_way.append({**place, **own})
    if arguments.workers is None:
        if subprocess.run(command, env=under_way[0], check=False).returncode:  # noqa: S603
            raise _Failed(f"the training with {task['kind']} failed")
        return
    output = io.StringIO()
    status = run_all(command, under_way, _GRACE_S, output, output)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        last = "\n".join(output.getvalue().splitlines()[-_TAIL_LINES:])
        raise _Failed(f"the training with {task['kind']} failed:\n{last}")


def _train(task: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Run the script in one way, in one of the processes."""
    link = Link(**task["link"])
    link.enter()
    from gradwire.torch.comparison import Finished, Place, Recorder

    sys.argv = [arguments.script, *arguments.arguments]
    sys.path.insert(0, str(Path(arguments.script).resolve().parent))
    try:
        place = Place.from_env()
        recorder = Recorder(
            task["kind"],
            place,
            place.open_store(),
            seed=arguments.seed,
            stop_after=arguments.steps,
            link=link if link.is_limited else None,
        )
        with recorder.watching(), contextlib.suppress(Finished):
            try:
                runpy.run_path(arguments.script, run_name="__main__")
            except SystemExit as end:  # as of sys.exit(main())
                if end.code:
                    raise
        curve = recorder.gather()
    except ValueError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not Path(frames[-1].f_code.co_filename).is_relative_to(_PACKAGE):
            raise  # the script's own mistake, which its author has to find
        print(f"gradwire compare: {error}", file=sys.stderr)
        return 1
    if curve is not None:
        Path(task["result"]).write_text(json.dumps(dataclasses.asdict(curve)))
    return 0


def _draw(comparison: Any, path: Path) -> None:
    """Draw the losses over the time that the steps take."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in (
        ("all-reduce", comparison.plain),
        ("all-reduce, other seeds", comparison.again),
        ("gradwire", comparison.shared),
    ):
        seconds_done = [curve.hidden_s * (step + 1) for step in range(len(curve.losses))]
        axes.plot(seconds_done, curve.losses, label=name)
    axes.set(xlabel="seconds", ylabel="loss", title=comparison.link)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
