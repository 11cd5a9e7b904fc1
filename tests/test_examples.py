"""The examples run as they stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def free_addresses(count: int) -> list[str]:
    """Return loopback addresses whose ports the system says are free."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def test_two_processes_fit_the_same_line() -> None:
    one, two = free_addresses(2)
    environment = {
        **os.environ,
        "GRADWIRE_SECRET": bytes(range(32)).hex(),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = str(EXAMPLES / "train_together.py")
    commands = [
        [sys.executable, script, "--bind", bind, "--peer", peer, "--half", half]
        for bind, peer, half in ((one, two, "0"), (two, one, "1"))
    ]
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [errors for _, errors in outputs] == ["", ""]
    first, second = (
        re.fullmatch(r"largest error (\S+), sent (\d+) bytes .* checksum (\d+)\n", text)
        for text, _ in outputs
    )
    assert first is not None
    assert second is not None
    assert first.group(1, 3) == second.group(1, 3)
    assert float(first.group(1)) < 0.05
    assert int(first.group(2)) < 400
