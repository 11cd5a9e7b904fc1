"""Workers of an example as processes of this machine; on several machines you start each yourself."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence


def free_addresses(count: int) -> list[str]:
    """Return addresses whose ports the system says are free."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


class Workers:
    """Starts workers: the script itself, with the worker's rank and everybody's addresses as arguments.

    Args:
        addresses: of all that will ever be.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        # `gradwire secret` makes one for several machines.
        self._environment = {**os.environ, "GRADWIRE_SECRET": secrets.token_hex(32)}

    def start(self, rank: int) -> subprocess.Popen[str]:
        """Start one; its input and output are pipes."""
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
    """Wait for workers and print what they say; fail if one failed."""
    for worker in workers:
        output, _ = worker.communicate()
        print(output, end="")
        if worker.returncode:
            sys.exit(worker.returncode)


def run(train: Callable[[int, list[str]], None], workers: int, description: str) -> None:
    """Do what the command line says: train as one of the workers, or start all of them here.

    Args:
        train: does the work of one; takes its rank and everybody's addresses.
        workers: how many there are.
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
