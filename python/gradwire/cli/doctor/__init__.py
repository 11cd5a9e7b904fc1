"""``gradwire doctor``: checks a machine, and the link to another one, and says what to do about what it finds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

DEFAULT_PORT = 40123
SECONDS = 3.0
SECONDS_LONGEST = 60.0

DESCRIPTION = """\
Check this machine: instruction sets, encryption, secret, address, port, socket buffers, offloads, clocks. With a peer,
also whether it can be reached with the same secret; and if `gradwire doctor --serve` runs there, the MTU, round trips,
goodput, losses, and what TCP does on the same link. Needs no privileges. Exit status 0 when all works, 1 when
something fails. The secret comes from GRADWIRE_SECRET and is never shown.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and the link to another one",
        description=DESCRIPTION,
    )
    parser.add_argument("peer", nargs="?", metavar="host:port", help="another machine to test")
    parser.add_argument(
        "--serve", action="store_true", help="let doctors on other machines test the link to here"
    )
    parser.add_argument(
        "--bind",
        metavar="host:port",
        help=f"what a node would bind; 0.0.0.0:0 by default, with --serve 0.0.0.0:{DEFAULT_PORT}",
    )
    parser.add_argument("--mask", help="take the address in this network, such as 10.1.1.0/24")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        help=f"of each measurement, up to {SECONDS_LONGEST:.0f} (default: {SECONDS:.0f})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    # The transport brings cryptography along; the other commands do not wait for it.
    from gradwire.transport import parse_secret

    from . import gather, report, verdicts, visit

    if arguments.serve and (arguments.peer or arguments.json):
        print("gradwire doctor: --serve goes without a peer and without --json", file=sys.stderr)
        return 2
    bind = arguments.bind or _bind(arguments.peer, serve=arguments.serve)
    try:
        machine = gather.look(bind, arguments.mask, arguments.peer)
    except ValueError as error:
        print(f"gradwire doctor: {error}", file=sys.stderr)
        return 2
    needs_secret = bool(arguments.serve or arguments.peer)
    checks = _shown(verdicts.judge_machine(machine, needs_secret=needs_secret), arguments)
    link = None
    if needs_secret and report.is_well(checks):
        secret = parse_secret(None)
        if arguments.serve:
            print(report.conclusion(checks))
            return visit.serve(bind, arguments.mask, secret)
        found = visit.visit(bind, arguments.mask, secret, arguments.peer, arguments.seconds)
        link = found.link
        if link is not None and not arguments.json:
            print("\n".join(report.link_table(link)))
        checks += _shown(visit.judge(found, machine, arguments.peer), arguments)
    if arguments.json:
        print(report.as_json(machine, link, checks))
    else:
        print(report.conclusion(checks))
    return 0 if report.is_well(checks) else 1


def _shown(checks: Iterable[Any], arguments: argparse.Namespace) -> list[Any]:
    """Print each verdict as soon as it is there, unless JSON is wanted."""
    from .report import lines_of

    found = []
    for check in checks:
        found.append(check)
        if not arguments.json:
            print("\n".join(lines_of(check)), flush=True)
    return found


def _bind(peer: str | None, *, serve: bool) -> str:
    if peer is not None and peer.startswith("["):
        return "[::]:0"
    return f"0.0.0.0:{DEFAULT_PORT if serve else 0}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds <= SECONDS_LONGEST:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {SECONDS_LONGEST:.0f}")
    return seconds
