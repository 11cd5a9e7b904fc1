"""Start the workers of an example as processes on this machine."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence


def free_addresses(count: int) -> list[str]:
    """Return loopback addresses with free ports."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


class Workers:
    """Starts this script again as workers, with the worker's rank and all addresses as arguments.

    Args:
        addresses: of all workers, also of those that start late.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        # For several machines `gradwire secret` prints a secret.
        self._environment = {**os.environ, "GRADWIRE_SECRET": secrets.token_hex(32)}

    def start(self, rank: int) -> subprocess.Popen[str]:
        """Start a worker whose input and output are pipes."""
        command = [
            sys.executable,
            sys.argv[0],
            "--rank",
            str(rank),
            "--addresses",
            *self._addresses,
        ]
        return subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def finish(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for workers and print their output; exit if one failed."""
    for worker in workers:
        output, _ = worker.communicate()
        print(output, end="")
        if worker.returncode:
            sys.exit(worker.returncode)


def run(train: Callable[[int, list[str]], None], workers: int, description: str) -> None:
    """Train as one of the workers, or start all of them, depending on the command line.

    Args:
        train: called with the worker's rank and all addresses.
        workers: their number.
        description: of the example, for ``--help``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rank", type=int, help="of this worker; without, all are started here")
    parser.add_argument("--addresses", nargs=workers, help="host:port of every worker")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train(arguments.rank, arguments.addresses)
        return
    launcher = Workers(free_addresses(workers))
    finish([launcher.start(rank) for rank in range(workers)])
