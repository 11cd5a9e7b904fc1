"""Links of limited rate between workers of this machine: limited by the kernel, or by a token bucket in each worker."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..run import leave

_PREFIX = "gwdemo-"
_BURST_BYTES = 131_072
_QUEUE_S = 0.05
_DELAYED_PACKETS = 100_000


@dataclass(frozen=True)
class Link:
    """A worker's connection to the others.

    Attributes:
        mbit: rate in Mbit/s that the worker enforces; 0: the kernel enforces it, or the rate is not limited.
        namespace: network namespace of the worker; "": the namespace of the demo.
        host: IP address to bind.
        limited: namespace and name of the devices at both ends of the link, which the kernel limits.
    """

    mbit: float = 0.0
    namespace: str = ""
    host: str = "127.0.0.1"
    limited: tuple[tuple[str, str], ...] = ()

    @property
    def is_limited(self) -> bool:
        """Whether the rate is limited."""
        return bool(self.mbit or self.limited)

    def enter(self) -> None:
        """Move this thread, and the threads that it will start, to the namespace."""
        if self.namespace:
            with open(f"/run/netns/{self.namespace}") as file:
                if ctypes.CDLL(None).setns(file.fileno(), 0) != 0:
                    raise OSError(f"cannot enter the network namespace {self.namespace}")

    def wait(self, sent_bytes: int, begin_s: float) -> None:
        """Wait until a link of this rate would have carried so many bytes since ``begin_s`` (monotonic)."""
        if self.mbit:
            time.sleep(max(0.0, begin_s + sent_bytes * 8e-6 / self.mbit - time.monotonic()))

    def unlimit(self) -> None:
        """Let the kernel limit the link no more. TCP sends again what this drops from the queues."""
        for space, device in self.limited:
            _run("tc", "-n", space, "qdisc", "del", "dev", device, "root")


@contextlib.contextmanager
def links(workers: int, mbit: float, latency_s: float = 0.0) -> Iterator[tuple[list[Link], str]]:
    """Yield a link of the given rate (0: not limited) for each worker, and a description of the links.

    Args:
        workers: number of links.
        mbit: rate of each, in Mbit/s.
        latency_s: time from any worker to any other, one way.

    Raises:
        OSError: there is a latency, which only the kernel can add, and this user may not make network namespaces.
    """
    name = f"{_PREFIX}{os.getpid()}"
    spaces = [f"{name}-{number}" for number in range(workers)]
    with contextlib.ExitStack() as stack:
        # The kernel keeps namespaces, and workers run on, until they are ended, which the signals' own ways to end a
        # process leave out.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
                stack.callback(signal.signal, number, signal.signal(number, leave))
        if not mbit:
            yield [Link()] * workers, "over loopback, whose rate is not limited"
            return
        try:
            built = _build(name, spaces, mbit, latency_s, stack)
        except (OSError, subprocess.CalledProcessError) as error:
            if latency_s:
                said = getattr(error, "stderr", b"") or b""
                raise OSError(
                    "links with a latency need root, ip, tc and a kernel with sch_netem: "
                    f"{said.decode().strip() or error}"
                ) from error
            how = "a token bucket in each worker (network namespaces need root, ip and tc)"
            yield [Link(mbit)] * workers, f"over links of {mbit:g} Mbit/s: {how}"
        else:
            after = f" and {1e3 * latency_s:g} ms" if latency_s else ""
            yield (
                built,
                f"over links of {mbit:g} Mbit/s{after}: network namespaces, limited by the kernel",
            )


def _build(
    name: str, spaces: list[str], mbit: float, latency_s: float, stack: contextlib.ExitStack
) -> list[Link]:
    """Connect a namespace for each worker to a bridge, limited at both ends of each link; the stack removes them."""
    _remove_leftovers()
    for space in (name, *spaces):
        stack.callback(_remove, space)  # first, for a signal may come as soon as there is one
        _run("ip", "netns", "add", space)
    _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", name, "link", "set", "bridge", "up")
    limit = int(mbit * 125_000 * _QUEUE_S) + _BURST_BYTES
    bucket = f"tbf rate {mbit}mbit burst {_BURST_BYTES} limit {limit}".split()
    delay = f"netem delay {1e3 * latency_s}ms limit {_DELAYED_PACKETS}".split()
    built = []
    for number, space in enumerate(spaces):
        port = f"p{number}"
        host = f"10.78.{number // 250}.{number % 250 + 1}"
        _run(*f"ip link add v0 netns {space} type veth peer name {port} netns {name}".split())
        _run("ip", "-n", name, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", space, "addr", "add", f"{host}/16", "dev", "v0")
        _run("ip", "-n", space, "link", "set", "v0", "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        ends = ((space, "v0"), (name, port))
        for place, device in ends:
            _run("tc", "-n", place, "qdisc", "add", "dev", device, "root", "handle", "1:", *bucket)
        if latency_s:
            _run("tc", "-n", space, "qdisc", "add", "dev", "v0", "parent", "1:1", *delay)
        built.append(Link(0.0, space, host, ends))
    return built


def _remove_leftovers() -> None:
    """Remove the namespaces of killed demos, which the kernel would keep."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        process = path.name.removeprefix(_PREFIX).partition("-")[0]
        # In containers processes get the same numbers again and again.
        if process == str(os.getpid()) or not Path("/proc", process).exists():
            _remove(path.name)


def _remove(space: str) -> None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it was never made
        _run("ip", "netns", "del", space)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
