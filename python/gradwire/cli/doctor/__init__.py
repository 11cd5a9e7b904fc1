"""``gradwire doctor``: checks of a machine and of the link to another one, with the command that helps."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

DEFAULT_PORT = 40123
SECONDS = 3.0
SECONDS_MAX = 60.0

DESCRIPTION = """\
Check this machine: instruction set, encryption, secret, address, port, socket buffers, offloads, shared memory and what
killed runs have left there, clock, and the place in a run that the launcher's variables give; with a peer, where
`gradwire doctor --serve` runs, also round trips, goodput and losses of the link. Needs no privileges. The exit status
is 1 when something fails. The secret comes from GRADWIRE_SECRET or GRADWIRE_SECRET_FILE and is never shown.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor", help="check this machine, and the link to another one", description=DESCRIPTION
    )
    parser.add_argument("peer", nargs="?", metavar="host:port", help="another machine to test")
    serve = "let doctors on other machines test the link to here"
    bind = f"a node's address; 0.0.0.0:0 by default, with --serve 0.0.0.0:{DEFAULT_PORT}"
    seconds = f"of each measurement, up to {SECONDS_MAX:.0f} (default: {SECONDS:.0f})"
    parser.add_argument("--serve", action="store_true", help=serve)
    parser.add_argument("--bind", metavar="host:port", help=bind)
    parser.add_argument("--mask", help="take the address in this network, such as 10.1.1.0/24")
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help=seconds)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    # Imported here because the transport loads cryptography, which the other commands do not need.
    from . import link, machine

    peer = arguments.peer
    mask = arguments.mask
    # An empty address, as of a variable of the shell that is not set, is not the same as none.
    has_peer = peer is not None
    if arguments.serve and (has_peer or arguments.json):
        print("gradwire doctor: --serve goes without a peer and without --json", file=sys.stderr)
        return 2
    wildcard = "[::]" if has_peer and peer.startswith("[") else "0.0.0.0"  # noqa: S104
    bind = arguments.bind
    if bind is None:
        bind = f"{wildcard}:{DEFAULT_PORT if arguments.serve else 0}"
    needs_secret = arguments.serve or has_peer
    try:
        on_machine = machine.check(bind, mask, peer, needs_secret=needs_secret)
        checks = _printed(on_machine, quiet=arguments.json)
    except ValueError as error:
        print(f"gradwire doctor: {error}", file=sys.stderr)
        return 2
    measured = None
    # The doctors have addresses of their own: a launcher's variables do not matter to the link.
    if needs_secret and _works(check for check in checks if check.name != machine.LAUNCHER):
        if arguments.serve:
            print(_conclusion(checks))
            return link.serve(bind, mask)
        on_link, measured = link.check(peer, arguments.seconds, bind, mask)
        checks += _printed(on_link, quiet=arguments.json)
    if arguments.json:
        content = {"checks": [*map(asdict, checks)], "link": measured and asdict(measured)}
        print(json.dumps({"ok": _works(checks), **content}, indent=1))
    else:
        print(_conclusion(checks))
    return 0 if _works(checks) else 1


def _printed(checks: Iterable[Any], *, quiet: bool) -> list[Any]:
    """Print each check as soon as it is done, and return all of them."""
    done = []
    for check in checks:
        done.append(check)
        if not quiet:
            print(f"{check.verdict:5} {check.name + ':':24} {check.says}", flush=True)
            for help_ in check.helps:
                print(f"{'':30} > {help_}", flush=True)
    return done


def _works(checks: Iterable[Any]) -> bool:
    return all(check.verdict != "FAIL" for check in checks)


def _conclusion(checks: Iterable[Any]) -> str:
    for verdict, words in (("FAIL", "does not work"), ("slow", "works; costs speed")):
        names = [check.name for check in checks if check.verdict == verdict]
        if names:
            return f"{words}: {', '.join(names)}"
    return "all is well"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= SECONDS_MAX:
        problem = f"{text!r} must be a number above 0 and at most {SECONDS_MAX:.0f}"
        raise argparse.ArgumentTypeError(problem)
    return seconds
