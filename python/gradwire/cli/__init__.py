"""The commands: ``gradwire compare``, ``demo``, ``doctor``, ``estimate``, ``info``, ``run``, ``secret``, ``top``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import gradwire
from gradwire.cli import compare, demo, doctor, estimate, info, run, secret, top

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (help: {self.prog} -h)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 if it failed, 2 for wrong arguments, 130 if interrupted."""
    parser = _Parser(
        prog="gradwire",
        description="Exchange training updates between machines in a hundredth of the bytes.",
    )
    version = f"gradwire {gradwire.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (compare, demo, doctor, estimate, info, run, secret, top):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    status: int = 0
    try:
        status = arguments.run(arguments)
        print(end="", flush=True)  # unlike a flush, also where standard output is closed
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if _is_writable():
                raise
            print(f"gradwire: the output cannot be written: {error.strerror}", file=sys.stderr)
        # The reader of the output has gone (`| head`), or the disk is full; Python's flush at exit needs a place for
        # the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or 1
    except gradwire.BackendUnavailable as error:  # GRADWIRE_ISA names another machine's
        print(f"gradwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gradwire: interrupted", file=sys.stderr)
        return 130  # the shell's status for it
    return status


def _is_writable() -> bool:
    """Return whether standard output takes what waits for it; also where it is closed."""
    try:
        print(end="", flush=True)
    except OSError:
        return False
    return True
