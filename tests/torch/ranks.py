"""Processes as the ranks of one process group, shared by many tests because importing torch takes seconds.

A test passes a module-level function to `Ranks.run`; every rank calls the function with its number.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ANSWER_S = 120.0
PACKAGE = "ranked"


class RankFailed(Exception):
    """A rank's function raised; the message is its traceback."""


class Ranks:
    """Processes joined by gloo over loopback.

    Args:
        size: number of ranks.
        folder: for their sockets; its path must be short.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self._stack = ExitStack()
        listener = self._stack.enter_context(Listener(str(folder / "ranks"), "AF_UNIX"))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        store = folder / "store"
        for rank in range(size):
            command = [sys.executable, __file__, str(listener.address), str(store)]
            # As torchrun sets them, for frameworks that read them.
            launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
            process = subprocess.Popen(
                [*command, str(rank), str(size)], env={**environment, **launched}
            )
            self._stack.callback(process.wait)
            self._stack.callback(process.terminate)
        connections = [self._stack.enter_context(listener.accept()) for _ in range(size)]
        self._connections = [one for _, one in sorted((receive(one), one) for one in connections)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of ``function(rank, *arguments)`` on every rank, by rank.

        Raises:
            RankFailed: on some rank it raised.
            TimeoutError: some rank did not answer.
        """
        file = Path(function.__code__.co_filename)
        for connection in self._connections:
            send(connection, (str(file.parent), file.stem, function.__qualname__, arguments))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(ANSWER_S):
                raise TimeoutError(f"rank {rank} did not answer within {ANSWER_S:g} s")
            answers.append(receive(connection))
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            raise RankFailed("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        self._stack.close()


def send(connection: Connection, value: Any) -> None:
    """Send pickled bytes, because a connection's own pickling would share the memory of tensors between processes."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def main(address: str, store: str, rank: int, size: int) -> None:
    """Run one rank: call functions until the connection is closed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with Client(address, "AF_UNIX") as connection:
        send(connection, rank)
        while True:
            try:
                folder, module, function, arguments = receive(connection)
            except EOFError:
                return
            send(connection, call(find(folder, module, function), rank, arguments))


def find(folder: str, module: str, function: str) -> Callable[..., Any]:
    """Return a function of a test module, imported in a package of its own."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [folder]
        sys.modules[PACKAGE] = package
    found: Callable[..., Any] = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)
    return found


def call(function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "", function(rank, *arguments)
    except Exception:
        return traceback.format_exc(), None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
