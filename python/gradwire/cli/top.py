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
environment. Rates, shares and bytes are those of two seconds, or, where exchanges are rarer, of the last exchange
and the steps before it. Every table costs an exchange a pass over its residual; without a reader there is no cost.
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
    latest = before
    after = before
    try:
        while after:
            time.sleep(INTERVAL_S)
            after = pages()
            before, latest = windows(before, latest, after)
            text = "\n".join(table(before, latest, after))
            print(f"\x1b[H\x1b[2J{text}" if is_terminal else text, flush=True)
            if arguments.once:
                break
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


def windows(before: Pages, latest: Pages, after: Pages) -> tuple[Pages, Pages]:
    """Return the pages between which a table counts: those of the last two tables that had a new exchange.

    Two seconds may have no step, or only local ones. Until an exchange has ended both pages are the first.
    """
    begins: Pages = {}
    ends: Pages = {}
    for name, page in after.items():
        end = latest.get(name, page)
        begin = before.get(name, page)
        if "stats" in page:
            exchanges = page["stats"]["steps"]
            # Fewer are those of another exchange of the process, whose socket has the same name.
            if "stats" not in end or exchanges < end["stats"]["steps"]:
                begin = end = page
            elif exchanges > end["stats"]["steps"]:
                begin = end
                end = page
        begins[name] = begin
        ends[name] = end
    return begins, ends


def table(before: Pages, latest: Pages, after: Pages) -> Iterator[str]:
    """Yield the lines of the table: every exchange, followed by its peers; see `windows`."""
    nodes = [page for page in after.values() if "stats" in page]
    addresses = [each["address"] for page in nodes for each in (page, *page["peers"])]
    width = max([21, *map(len, addresses)])
    yield (
        f"{'node':{width}}{'steps/s':>10}{'gradwire':>10}{'density':>9}{'sent/exchange':>15}"
        f"{'recv/exchange':>15}{'residual':>10}{'lost':>6}"
    )
    for name, page in after.items():
        if "stats" not in page:
            yield f"process {page['process']} does not answer within {ANSWER_S:g} s: it is stopped, or very busy"
            continue
        yield f"{page['address']:{width}}{_rates(before[name], latest[name], page)}"
        rank = page["rank"] or f"process {page['process']}"
        yield f"  {rank}, step {page['step']}, {page['script'] or 'interactive'}"
        for peer in page["peers"]:
            mark = " <- last to arrive" if peer["address"] == page["slowest"] else ""
            yield (
                f"  {peer['address']:{width}}{peer['srtt_s'] * 1e3:11.3g} ms{si(peer['rate_bytes_per_s'], 'B/s'):>13}"
                f"{peer['loss_rate']:9.2%} lost{peer['backlog_records']:6d} waiting{mark}"
            )


def _rates(before: dict[str, Any], latest: dict[str, Any], now: dict[str, Any]) -> str:
    end = now if latest is before else latest
    stats = end["stats"]

    def grown(name: str) -> float:
        return float(stats[name] - before["stats"][name])

    exchanges = grown("steps")
    steps = exchanges + grown("local_steps")
    step_s = grown("step_s")
    rate = steps / step_s if step_s else 0.0
    waited_s = now["time_s"] - end["time_s"]
    if waited_s:
        # A training that waits is slower than it was: one more step, at most, has ended by now.
        since = sum(now["stats"][name] - stats[name] for name in ("steps", "local_steps"))
        rate = min(rate, (since + 1) / waited_s)
    share = f"{1.0 - grown('compute_s') / step_s:.0%}" if step_s else "?"
    # On the wire: a message goes to every peer, and lost datagrams go twice.
    names = ("udp_bytes_sent", "udp_bytes_received")
    wire = (end["transport"][name] - before["transport"][name] for name in names)
    sizes = [si(nbytes / exchanges, "B") if exchanges else "?" for nbytes in wire]
    return (
        f"{rate:10.3g}{share:>10}{now['stats']['density']:9.2%}{sizes[0]:>15}{sizes[1]:>15}"
        f"{now['residual_norm']:10.3g}{now['stats']['lost']:6d}"
    )
