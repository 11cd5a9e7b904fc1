"""The figures of ``docs/transport.md`` under attacks, in the simulator.

cd tests && python -m transport.attack_figures
"""

from __future__ import annotations

import itertools
import sys

from gradwire.transport.wire import INIT

from .faults import MEGABYTE
from .simulator import Host, Link, Simulator
from .test_observers import (
    FORGERIES,
    THIRD,
    Forger,
    deliver,
    flooded,
    is_connected,
    starting,
    with_copied_datagrams,
)


def bytes_to_a_third_address() -> float:
    """Return the bytes that go to an address, over those that seem to have come from there: five copied datagrams."""
    third = with_copied_datagrams()
    return third.received[THIRD] / third.sent[THIRD]


def goodput_of_copied_stream(*, copies: bool) -> float:
    """Return the goodput of a path of 60 MB/s, every datagram of which may come first from another source."""
    simulator = Simulator(1, Link(delay_s=0.001, rate_bytes_per_s=60e6))
    one, two = simulator.mesh(2)
    numbers = itertools.count()

    def copy_to(host: Host, datagram: bytes) -> bool:
        deliver(simulator, host, datagram, (f"third{next(numbers) % 1_000}", 9))
        return False

    if copies:
        simulator.link(one, two).drop = lambda _, datagram: copy_to(two, datagram)
        simulator.link(two, one).drop = lambda _, datagram: copy_to(one, datagram)
    return _goodput(simulator, one, 20)


def goodput_under_forgeries(nbytes: int, *, forges: bool) -> float:
    """Return the goodput of a path of 12.5 MB/s under 10,000 forged datagrams a second."""
    simulator, one, _ = flooded(nbytes, forges=forges)
    return _goodput(simulator, one, 3)


def goodput_under_forged_fragments(share: float, nbytes: int) -> tuple[float, float]:
    """Return the lowest goodput over that before, and the longest time for a megabyte after, of all kinds of forgery.

    ``share`` datagrams of the size of a true one, ``nbytes``, are forged for each true one on a path of 12.5 MB/s.
    """
    ratios, recoveries_s = [], []
    for seed, kind in enumerate(FORGERIES, 20):
        forger = Forger(seed, kind, share, nbytes)
        quiet_s = forger.elapsed_s()
        forger.is_forging = True
        ratios.append(quiet_s / forger.elapsed_s())
        forger.is_forging = False
        recoveries_s.append(forger.elapsed_s(1))
    return min(ratios), max(recoveries_s)


def _goodput(simulator: Simulator, host: Host, count: int) -> float:
    started_s = simulator.now_s
    tickets = [simulator.publish(host, bytes([tag]) * MEGABYTE, tag) for tag in range(count)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 20.0)
    return count * MEGABYTE / (simulator.now_s - started_s)


def start_s(attack: str) -> float:
    """Return the time until two nodes are connected under forged openings, or an echo of each of a node's own."""

    def observe(simulator: Simulator, joiner: Host, seed: Host, datagram: bytes) -> None:
        if attack == "echoes" and datagram[0] == INIT:
            deliver(simulator, joiner, datagram, seed.address)

    simulator = starting(4, observe)

    def strike() -> None:
        for host in simulator.hosts.values():
            for first in (0x23, 0x43):
                for nbytes in (16, 256):
                    deliver(simulator, host, bytes([first]).ljust(nbytes, b"\0"), ("any", 1))
        simulator.call_at(simulator.now_s + 0.1, strike)

    if attack == "forgeries":
        strike()
    started_s = simulator.now_s
    simulator.run_until(lambda: is_connected(simulator), 60.0)
    return simulator.now_s - started_s


def main() -> None:
    lines = [f"bytes to a third address: {bytes_to_a_third_address():.2f} times those from there"]
    copied, quiet = (goodput_of_copied_stream(copies=copies) for copies in (True, False))
    lines.append(f"goodput, every datagram copied: {copied / quiet:.2f} of that without copies")
    for nbytes in (17, 100, 1_000):
        loud, quiet = (goodput_under_forgeries(nbytes, forges=forges) for forges in (True, False))
        lines.append(f"goodput, 10,000 forgeries of {nbytes} bytes in a second: {loud / quiet:.2f}")
    for share, nbytes in itertools.product((0.05, 1.0), (1_200, 9_000)):
        ratio, recovery_s = goodput_under_forged_fragments(share, nbytes)
        line = (
            f"goodput, {share:g} forged fragments of {nbytes} bytes for each true one: {ratio:.2f}"
        )
        lines.append(f"{line}; a megabyte afterwards: {recovery_s * 1e3:.0f} ms")
    for attack in ("nothing", "forgeries", "echoes"):
        lines.append(f"start under {attack}: {start_s(attack) * 1e3:.0f} ms")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
