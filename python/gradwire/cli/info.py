"""``gradwire info``: versions and backends of this installation."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import version
from typing import Any

import numpy as np

import gradwire as gw
from gradwire import _core
from gradwire.arrays import cuda_problem


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "info",
        help="print version, backends and the instruction set in use",
        description="Print what this installation of gradwire can do on this machine.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command has this signature)
    """Print one line per fact."""
    facts = {
        "gradwire": gw.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cryptography": version("cryptography"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "backends": ", ".join(gw.backends()),
        "instruction set": _instruction_set(),
        "cuda": _cuda(),
    }
    for name, value in facts.items():
        print(f"{name + ':':17}{value}")
    return 0


def _instruction_set() -> str:
    try:
        return _core.isa() + (" (GRADWIRE_ISA)" if os.environ.get("GRADWIRE_ISA") else "")
    except gw.BackendUnavailable as error:
        return f"none: {error}"


def _cuda() -> str:
    problem = cuda_problem()
    if problem:
        return f"not available: {problem}"
    return f"available ({_core.cuda_status()})"
