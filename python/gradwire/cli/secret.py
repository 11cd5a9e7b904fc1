"""``gradwire secret``: a new secret for a cluster."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "secret",
        help="print a new secret for a cluster",
        description="Print 32 random bytes in base64. Every node of a cluster gets the same: as "
        "gw.Node(secret=...), in the environment variable GRADWIRE_SECRET, or in a file that only "
        "its owner can read (chmod 600), named by GRADWIRE_SECRET_FILE or passed as "
        "secret=pathlib.Path(...). Keep it out of version control.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command has this signature)
    """Print the secret."""
    # Only now, so that the other commands do not wait for the import of cryptography.
    from gradwire.transport import generate_secret

    print(generate_secret())
    return 0
