"""Links with a rate, a delay and losses: simulated, between network namespaces, and through a delaying proxy.

The simulator, the namespaces and the proxy are those of the transport's tests.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from children import children
from harness import Row, Target
from transport_goodput import MESSAGE_BYTES, transfer

RESENT, LOSSLESS = Target("<=", 1.2), Target(">=", 0.85)
FAST, LONG = 12.5e6, "100 Mbit/s, 40 ms round trip, 1 % loss"
# The simulated links: one-way delay, loss, bytes per second, queue in bytes; and the share of the rate to be used.
SIMULATED = {
    "100 Mbit/s, 1 ms round trip": ((0.0005, 0.0, FAST, 125_000), 0.92),
    LONG: ((0.02, 0.01, FAST, 500_000), 0.8),
    "10 Mbit/s, 30 ms, queue of 25 packets": ((0.015, 0.0, 1.25e6, 35_000), 0.8),
}
GIGABIT = [(0.0005, loss, 125e6, 250_000) for loss in (0.0, 0.01)]

Checkouts = Mapping[str, Path | None]
Shares = tuple[float, float]  # of the link's rate that is used; datagrams sent again over lost


def simulate(pipe: Connection, links: Sequence[Any], messages: int) -> None:
    """Send messages over each simulated link in turn, and report the shares."""
    from transport.simulator import Link, Simulator

    for delay_s, loss, rate, queue_bytes in links:
        simulator = Simulator(1, Link(delay_s))
        one, two = simulator.mesh(2)
        there = Link(delay_s, loss=loss, rate_bytes_per_s=rate, queue_bytes=queue_bytes)
        simulator.links[one.address, two.address] = there
        simulator.links[two.address, one.address] = Link(delay_s, loss=loss)
        started_s = simulator.now_s
        tickets = [simulator.publish(one, bytes(MESSAGE_BYTES)) for _ in range(messages)]
        simulator.run_until(lambda tickets=tickets: all(one.is_done for one in tickets), 600.0)
        used = messages * MESSAGE_BYTES / (simulator.now_s - started_s) / rate
        again = one.endpoint.stats().retransmitted_bytes
        pipe.send((used, again / max(1, there.lost_bytes)))


def simulated_rows(messages: int, checkouts: Checkouts) -> Iterator[Row]:
    """Yield what messages make of simulated links; the simulator is seeded, so one run is enough."""
    links = [link for link, _ in SIMULATED.values()] + GIGABIT
    for column, checkout in checkouts.items():
        with children((simulate, links, messages), checkout=checkout) as (pipe,):
            for name, (_, goal) in SIMULATED.items():
                yield from _rows(f"simulated: {name}", column, [pipe.recv()], goal)
            (clean, _), (lossy, _) = pipe.recv(), pipe.recv()
        link = "simulated: 1 Gbit/s, 1 % loss"
        yield _row(link, column, [lossy / clean], "without loss", LOSSLESS)


def cable_shares(rate_mbit: int, loss: float, messages: int, checkout: Path | None) -> Shares:
    """Return the shares of a cable between two network namespaces."""
    from transport import netns

    with netns.network(netns.Cable(rate_mbit, loss=loss)) as network:
        hosts = network.addresses["a"], network.addresses["b"]
        spaces = tuple(network.within(host)[-1] for host in ("a", "b"))
        sent = transfer(messages=messages, checkout=checkout, hosts=hosts, namespaces=spaces)
    used = MESSAGE_BYTES / sent.message_s / (rate_mbit * 125_000)
    return used, sent.resent / max(1, sent.lost)


def proxy_shares(messages: int, checkout: Path | None) -> Shares:
    """Return the shares of a path through a process that delays and loses."""
    from transport.proxy import Proxy, Trouble

    proxies: list[Proxy] = []

    def through(address: str) -> str:
        proxies.append(Proxy(address, Trouble(delay_s=0.02, loss=0.01, rate_bytes_per_s=FAST)))
        return proxies[0].address

    sent = transfer(messages=messages, checkout=checkout, through=through)
    with proxies[0] as proxy:
        lost = proxy.stop()["lost_there"]
    return MESSAGE_BYTES / sent.message_s / FAST, sent.resent / max(1, lost)


def socket_rows(messages: int, rounds: int, checkouts: Checkouts, *, cables: bool) -> Iterator[Row]:
    """Yield what real sockets make of links; in every round all checkouts use all links in turn."""
    slow, fast, lossy = "cable: 100 Mbit/s", "cable: 1 Gbit/s", "cable: 1 Gbit/s, 1 % loss"
    ways = {f"proxy: {LONG}": lambda tree: proxy_shares(-(-messages // 2), tree)}
    if cables:
        ways[slow] = lambda tree: cable_shares(100, 0.0, messages, tree)
        ways[fast] = lambda tree: cable_shares(1_000, 0.0, messages, tree)
        ways[lossy] = lambda tree: cable_shares(1_000, 0.01, messages, tree)
    found: dict[tuple[str, str], list[Shares]] = {}
    for _ in range(rounds):
        for link, way in ways.items():
            for column, checkout in checkouts.items():
                found.setdefault((link, column), []).append(way(checkout))
    goals = {f"proxy: {LONG}": 0.8, slow: 0.92}
    for (link, column), shares in found.items():
        yield from _rows(link, column, shares, goals.get(link))
        if link == lossy:
            pairs = zip(shares, found[fast, column], strict=True)
            ratios = [one[0] / other[0] for one, other in pairs]
            yield _row(link, column, ratios, "without loss", LOSSLESS)


def _rows(link: str, column: str, shares: Sequence[Shares], goal: float | None) -> Iterator[Row]:
    used, resent = zip(*shares, strict=True)
    yield _row(link, column, used, "its rate", Target(">=", goal) if goal else None)
    if any(resent):
        yield _row(f"{link}: sent again", column, resent, "lost", RESENT)


def _row(
    link: str, column: str, values: Sequence[float], reference: str, target: Target | None
) -> Row:
    """Return the best and the median: other work on the machine makes every figure worse."""
    figures = max(values) if target is not RESENT else min(values), statistics.median(values)
    return Row("transport-links", link, column, *figures, reference=reference, target=target)
