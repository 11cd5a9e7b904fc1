"""Functions in processes of their own, which may import another checkout of gradwire or enter a network namespace."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def children(
    *calls: tuple[Any, ...], checkout: Path | None = None, namespaces: tuple[str, ...] = ()
) -> Iterator[list[Connection]]:
    """Run each (function, *arguments) as ``function(pipe, *arguments)`` and yield the other ends of the pipes.

    The functions belong to modules that do not import gradwire at their top, because ``checkout`` is the root of the
    source tree that gradwire and its tests' helpers are imported from; ``namespaces`` are entered, one by each process.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for index, (run, *arguments) in enumerate(calls):
            ours, theirs = context.Pipe()
            where = namespaces[index] if namespaces else ""
            given = (run, checkout, where, theirs, *arguments)
            processes.append(context.Process(target=_run, args=given, daemon=True))
            processes[-1].start()
            theirs.close()  # so that the death of the child ends the wait for its answer
            pipes.append(ours)
        yield pipes
        for process in processes:
            process.join(timeout=30.0)
            assert process.exitcode == 0, f"a process ended with status {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(
    run: Callable[..., None], checkout: Path | None, namespace: str, pipe: Connection, *given: Any
) -> None:
    if namespace:
        # Moves this thread, and the threads it will start.
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(descriptor, 0) == 0, f"cannot enter {namespace}"
    if checkout is not None:
        sys.path[:0] = [str(checkout / "python"), str(checkout / "tests")]
        import gradwire

        found = Path(gradwire.__file__).resolve()
        assert found.is_relative_to(checkout), f"{found} was imported, not {checkout}"
    run(pipe, *given)
