"""``gradwire top``: the exchanges that run on this machine, and their peers."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

ANSWER_S = 5.0
INTERVAL_MIN_S = 0.1

DESCRIPTION = """\
Show the exchanges of this user that run on this machine, and each one's peers: those whose processes were started with
GRADWIRE_TOP=1 in the environment. Rates and shares are those between two looks. A look costs every exchange a pass over
its residual; without a look there is no cost.
"""

Pages = dict[str, dict[str, Any]]


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "top", help="show the exchanges that run on this machine", description=DESCRIPTION
    )
    parser.add_argument("--interval", type=_interval, default=2.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look twice, print once and end")
    parser.add_argument("--json", action="store_true", help="print one page as JSON and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show tables until interrupted, and return the exit status."""
    before = pages()
    if not before:
        print(
            "gradwire top: no exchange of this user offers its figures: start training with GRADWIRE_TOP=1 in the "
            "environment",
            file=sys.stderr,
        )
        return 1
    if arguments.json:
        print(json.dumps([*before.values()], indent=1))
        return 0
    is_terminal = sys.stdout.isatty() and not arguments.once
    try:
        while before:
            time.sleep(arguments.interval)
            after = pages()
            text = "\n".join(table(before, after))
            print(f"\x1b[H\x1b[2J{text}" if is_terminal else text, flush=True)
            if arguments.once:
                break
            before = after
    except KeyboardInterrupt:
        pass
    return 0


def pages() -> Pages:
    """Return the page of every exchange, by its socket; sockets that dead processes have left are removed."""
    from gradwire.exchange.metrics import page_folder

    found: Pages = {}
    for path in sorted(page_folder().glob("*.sock")):
        with socket.socket(socket.AF_UNIX) as reader:
            reader.settimeout(ANSWER_S)
            try:
                reader.connect(str(path))
                with reader.makefile("rb") as file:
                    data = file.read()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                continue
            except OSError:  # it ends just now, or does not answer
                continue
        page = json.loads(data or b"{}")
        if page:
            found[path.name] = page
    return dict(sorted(found.items(), key=lambda item: str(item[1]["address"])))


def table(before: Pages, after: Pages) -> Iterator[str]:
    """Yield the lines of the table: every exchange, and below it its peers."""
    yield (
        f"{'node':22}{'steps/s':>9}{'gradwire':>10}{'density':>9}{'sent/step':>11}{'recv/step':>11}"
        f"{'residual':>10}{'lost':>6}"
    )
    for name, page in after.items():
        earlier = before.get(name)
        yield _node_line(earlier or page, page)
        for peer in page["peers"]:
            mark = " <- last to arrive" if peer["address"] == page["slowest"] else ""
            yield (
                f"  {peer['address']:24}{peer['srtt_s'] * 1e3:8.3g} ms{_size(peer['rate_bytes_per_s']):>11}/s"
                f"{peer['loss_rate']:9.2%} lost{peer['backlog_records']:6d} waiting{mark}"
            )


def _node_line(before: dict[str, Any], after: dict[str, Any]) -> str:
    old, new = before["stats"], after["stats"]

    def grown(name: str) -> float:
        return float(new[name] - old[name])

    elapsed_s = after["time_s"] - before["time_s"]
    steps, exchanges = grown("steps") + grown("local_steps"), max(1.0, grown("steps"))
    rate = f"{steps / elapsed_s:.3g}" if elapsed_s else "?"
    share = f"{1.0 - grown('compute_s') / grown('step_s'):.0%}" if grown("step_s") else "?"
    sizes = "".join(
        f"{_size(grown(f'{way}_bytes') / exchanges):>11}" for way in ("sent", "received")
    )
    return (
        f"{after['address']:22}{rate:>9}{share:>10}{new['density']:9.2%}{sizes}"
        f"{after['residual_norm']:10.3g}{new['lost']:6d}"
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1e3
    return f"{nbytes:.3g} GB"


def _interval(text: str) -> float:
    seconds = float(text)
    if not INTERVAL_MIN_S <= seconds <= 3_600.0:
        raise argparse.ArgumentTypeError(f"must be from {INTERVAL_MIN_S} to 3600")
    return seconds
