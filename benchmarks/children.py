"""Functions in processes of their own, and what one measured transfer of messages took."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from harness import Timing

__all__ = ["MESSAGE_BYTES", "PAYLOAD", "Transfer", "child", "timing"]

MESSAGE_BYTES = 1 << 20
# The same in each process, so that a receiver can check what it got.
PAYLOAD = random.Random(2026).randbytes(MESSAGE_BYTES)


@dataclass(frozen=True)
class Transfer:
    """What it took to move messages of 1 MB.

    Attributes:
        seconds: wall time per message, from the first call until the receiver has confirmed the last byte.
        sender_cpu_s: processor time of the sending process per message.
        receiver_cpu_s: the same of the receiving process; 0 where one process does both.
        resent_bytes: sent more than once, all in all.
    """

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float = 0.0
    resent_bytes: int = 0


@contextlib.contextmanager
def child(run: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run a function in another process, which gets one end of a pipe; wait for it at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that a child that dies ends the waiting for its answer
    try:
        yield ours
    finally:
        process.join(timeout=10.0)
        if process.is_alive():
            process.kill()


def timing(name: str, transfers: Sequence[Transfer]) -> Timing:
    """Return the wall times per message of all rounds."""
    return Timing(name, tuple(transfer.seconds for transfer in transfers))
