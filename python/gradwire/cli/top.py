"""``gradwire top``: the exchanges that run on this machine, and their peers."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .units import si

ANSWER_S = 2.0
INTERVAL_S = 2.0

DESCRIPTION = """\
Show the exchanges of this user that run on this machine, and their peers. Start the training with GRADWIRE_TOP=1 in the
environment. Rates and shares are those of two seconds. Every table costs an exchange a pass over its residual; without
a reader there is no cost.
"""

Pages = dict[str, dict[str, Any]]


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "top", help="show the exchanges that run on this machine", description=DESCRIPTION
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table, instead of one every two seconds"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show tables until interrupted, and return the exit status."""
    try:
        before = pages()
    except OSError as error:
        print(f"gradwire top: {error}", file=sys.stderr)
        return 1
    if not before:
        print(
            "gradwire top: found no training of this user; start it with GRADWIRE_TOP=1 in the environment",
            file=sys.stderr,
        )
        return 1
    is_terminal = sys.stdout.isatty() and not arguments.once
    try:
        while before:
            time.sleep(INTERVAL_S)
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
    """Return the figures of every exchange, by the name of its socket; remove the sockets of dead processes.

    A process that does not answer in time has its number and nothing else.
    """
    from gradwire.exchange.metrics import socket_folder

    paths = sorted(socket_folder().glob("*.sock"))
    # All at once, because each may take the whole time.
    with ThreadPoolExecutor(max(1, len(paths))) as pool:
        answers = zip(paths, pool.map(_ask, paths), strict=True)
        figures = {path.name: page for path, page in answers if page}
    return dict(sorted(figures.items(), key=lambda item: str(item[1].get("address", ""))))


def _ask(path: Path) -> dict[str, Any]:
    """Return the figures of one exchange; empty: it has ended."""
    page: dict[str, Any] = {}
    with socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(ANSWER_S)
        try:
            reader.connect(str(path))
            with reader.makefile("rb") as file:
                page = json.load(file)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (TimeoutError, BlockingIOError):  # or others that asked before fill its queue
            page = {"process": path.name.partition("-")[0]}
        except (OSError, ValueError):  # the process ends just now
            pass
    return page


def table(before: Pages, after: Pages) -> Iterator[str]:
    """Yield the lines of the table: every exchange, followed by its peers."""
    yield (
        f"{'node':22}{'steps/s':>9}{'gradwire':>10}{'density':>9}{'sent/step':>11}{'recv/step':>11}"
        f"{'residual':>10}{'lost':>6}"
    )
    for name, page in after.items():
        if "stats" not in page:
            yield f"process {page['process']} does not answer within {ANSWER_S:g} s: it is stopped, or very busy"
            continue
        earlier = before.get(name, {})
        yield _node_line(earlier if "stats" in earlier else page, page)
        rank = page["rank"] or f"process {page['process']}"
        yield f"  {rank}, step {page['step']}, {page['script'] or 'interactive'}"
        for peer in page["peers"]:
            mark = " <- last to arrive" if peer["address"] == page["slowest"] else ""
            yield (
                f"  {peer['address']:24}{peer['srtt_s'] * 1e3:8.3g} ms{si(peer['rate_bytes_per_s'], 'B/s'):>13}"
                f"{peer['loss_rate']:9.2%} lost{peer['backlog_records']:6d} waiting{mark}"
            )


def _node_line(before: dict[str, Any], after: dict[str, Any]) -> str:
    old = before["stats"]
    new = after["stats"]

    def grown(name: str) -> float:
        return float(new[name] - old[name])

    elapsed_s = after["time_s"] - before["time_s"]
    steps = grown("steps") + grown("local_steps")
    exchanges = max(1.0, grown("steps"))
    rate = f"{steps / elapsed_s:.3g}" if elapsed_s else "?"
    share = f"{1.0 - grown('compute_s') / grown('step_s'):.0%}" if grown("step_s") else "?"
    # On the wire: a message goes to every peer, and lost datagrams go twice.
    names = ("udp_bytes_sent", "udp_bytes_received")
    wire = (after["transport"][name] - before["transport"][name] for name in names)
    sizes = "".join(f"{si(nbytes / exchanges, 'B'):>11}" for nbytes in wire)
    return (
        f"{after['address']:22}{rate:>9}{share:>10}{new['density']:9.2%}{sizes}"
        f"{after['residual_norm']:10.3g}{new['lost']:6d}"
    )
