"""``gradwire run``: several workers on this machine, with environment, secret and prefixed output."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from gradwire.shared_memory import free_leftovers

WORKERS_MAX = 1_024  # more processes than a machine has processors train no faster
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_LAST_OUTPUT_S = 5.0  # to copy what the workers have written, once all have ended
_GRACE_S = 30.0  # as torchrun gives; a checkpoint of 10 GB takes about as long on a disk


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "run",
        help="start several workers of a training on this machine",
        description="Start a script in several processes of this machine, which find each other: RANK, WORLD_SIZE, "
        "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GRADWIRE_SECRET are set. Every line of output "
        "begins with the worker's rank. When one worker fails, or this command gets SIGTERM or SIGHUP or is killed, "
        "the workers get SIGTERM and may save a checkpoint; a second signal, or the end of --grace, kills them.",
    )
    parser.add_argument("-n", "--workers", type=int, required=True, help="number of workers")
    parser.add_argument(
        "--as-machines",
        action="store_true",
        help="let every worker be a machine of its own: updates travel over UDP rather than through shared memory",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=_GRACE_S,
        metavar="SECONDS",
        help=f"time between SIGTERM, or an interrupt, and SIGKILL (default: {_GRACE_S:.0f})",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the workers, wait, and return 0 or the status of the first that failed."""
    count = arguments.workers
    if not 1 <= count <= WORKERS_MAX:
        print(f"gradwire run: -n is {count}, must be 1 to {WORKERS_MAX}", file=sys.stderr)
        return 2
    if not arguments.module and not os.path.isfile(arguments.script):
        print(f"gradwire run: there is no file {arguments.script}", file=sys.stderr)
        return 2
    command = [sys.executable, *(["-m"] if arguments.module else []), arguments.script]
    places = environments(count, as_machines=arguments.as_machines)
    try:
        return run_all([*command, *arguments.arguments], places, arguments.grace)
    except OSError as error:
        print(f"gradwire run: {count} workers cannot be started: {error}", file=sys.stderr)
        return 1


def environments(count: int, *, as_machines: bool) -> list[dict[str, str]]:
    """Return the environments of so many workers of this machine, by rank."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": "1" if as_machines else str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
    }
    if not (common.get("GRADWIRE_SECRET") or common.get("GRADWIRE_SECRET_FILE")):
        common["GRADWIRE_SECRET"] = secrets.token_hex(32)
    # Those of a training over several machines: its addresses and its number of machines.
    for name in ("BIND", "IP", "MIN_PEERS", "PEERS"):
        common.pop(f"GRADWIRE_{name}", None)
    common.pop("GROUP_WORLD_SIZE", None)
    # Processes that share the processors get a part of them each.
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return [
        # Lightning numbers machines by GROUP_RANK, torchrun's variable.
        {**common, "RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
        if as_machines
        else {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(count)
    ]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return seconds


def run_all(
    command: Sequence[str],
    places: Iterable[dict[str, str]],
    grace_s: float,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Start a worker in every environment and wait; end the others when one fails, and return the status.

    Args:
        command: to start.
        places: the environments, by rank.
        grace_s: time between SIGTERM and SIGKILL.
        out: gets the workers' output; None: standard output.
        err: gets the workers' errors; None: standard error.
    """
    out, err = out or sys.stdout, err or sys.stderr
    workers: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) != signal.SIG_IGN  # as nohup asks
    }
    for number in handlers.keys() - {signal.SIGINT}:
        signal.signal(number, leave)
    try:
        for environment in places:
            worker = subprocess.Popen(  # noqa: S603  (the user's own script)
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Safe because the readers, which are threads, begin later.
                preexec_fn=_end_with_launcher if sys.platform == "linux" else None,
            )
            workers.append(worker)
        for rank, worker in enumerate(workers):
            for pipe, target in ((worker.stdout, out), (worker.stderr, err)):
                # A daemon, because it reads until all processes that have the pipe have ended.
                reader = threading.Thread(
                    target=_copy, args=(rank, pipe, target, lock), daemon=True
                )
                reader.start()
                readers.append(reader)
        while True:
            statuses = [worker.poll() for worker in workers]
            failed = [rank for rank, status in enumerate(statuses) if status]
            if failed:
                status = int(statuses[failed[0]] or 0)
                how = f"status {status}" if status > 0 else _name_of(-status)
                _write(err, f"[{failed[0]}] ended with {how}; the others are ended\n")
                return status if status > 0 else 128 - status
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        # The terminal has interrupted them, too: they may be saving. A second interrupt is theirs as well.
        with suppress(KeyboardInterrupt):
            _wait_for(workers, grace_s, threading.Event())
        return 130
    finally:
        _end(workers, grace_s, handlers)
        free_leftovers()  # of rank 0, if it was killed
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # A process that a worker has left behind may have its output open for ever.
        deadline_s = time.monotonic() + _LAST_OUTPUT_S
        for reader in readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))


def _end_with_launcher() -> None:
    """Let the system end this worker when the launcher is killed: it would train on, unseen, beside the next run."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _name_of(number: int) -> str:
    """Return the name of a signal, of which Python knows only the first and the last real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def leave(number: int, _: object) -> None:
    """Handle a signal: end with the shell's status for it, on the way undoing what was begun."""
    # Another signal must not interrupt the way to _end, which handles it.
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _end(
    workers: list[subprocess.Popen[str]], grace_s: float, numbers: Iterable[signal.Signals]
) -> None:
    """End the workers that still run: politely, then not; whoever sends a second signal does not want to wait."""
    is_urgent = threading.Event()
    for number in numbers:
        signal.signal(number, lambda *_: is_urgent.set())
    for worker in workers:
        worker.terminate()
    _wait_for(workers, grace_s, is_urgent)
    late = [rank for rank, worker in enumerate(workers) if worker.poll() is None]
    if late:
        _write(sys.stderr, f"workers {late} still run and are killed (--grace {grace_s:g})\n")
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()


def _wait_for(
    workers: list[subprocess.Popen[str]], grace_s: float, is_urgent: threading.Event
) -> None:
    """Wait until the workers have ended, for so long at most."""
    deadline_s = time.monotonic() + grace_s
    while any(worker.poll() is None for worker in workers) and not is_urgent.is_set():
        if time.monotonic() >= deadline_s:
            return
        time.sleep(_POLL_S)


def _copy(rank: int, pipe: Any, target: Any, lock: threading.Lock) -> None:
    """Copy a worker's output, line by line, with the worker's rank before each, while somebody reads it."""
    is_read = True
    # Also afterwards: a worker whose pipe is full would wait for ever.
    for line in pipe:
        if is_read:
            text = f"[{rank}] {line if line.endswith(chr(10)) else line + chr(10)}"
            with lock:
                is_read = _write(target, text)


def _write(target: TextIO | None, text: str) -> bool:
    """Write with the characters that the target has, and return whether that was possible; None: it was closed."""
    if target is None:
        return False
    encoding = target.encoding or "utf-8"
    try:
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()
    except (OSError, ValueError):
        return False
    return True


def free_port() -> int:
    """Return a port that is free for UDP, which gradwire uses, and for TCP, which torch uses.

    Systems give none of these to a program that asks for any port, as other nodes do before it is bound.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp,
        ):
            try:
                udp.bind(("127.0.0.1", port))
                tcp.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
