"""Links with a rate, a delay and losses: simulated ones, cables between network namespaces, and a delaying proxy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from children import MESSAGE_BYTES
from harness import Reach, Row, figure

from transport import netns
from transport.netns import Cable
from transport.processes import PeerProcess
from transport.proxy import Proxy, Trouble
from transport.simulator import Link, Simulator

__all__ = ["cable_rows", "proxy_rows", "simulated_rows"]

LIMIT_S = 300.0


# ---- in the simulator -------------------------------------------------------------------------------------------


def simulated(link: Link, nbytes: int) -> tuple[float, float]:
    """Return the share of the link's rate that messages of 1 MB use, and retransmitted / lost bytes."""
    simulator = Simulator(1, Link(delay_s=link.delay_s))
    one, two = simulator.mesh(2)
    for source, target in ((one, two), (two, one)):
        simulator.links[source.address, target.address] = (
            link if source is one else Link(delay_s=link.delay_s, loss=link.loss)
        )
    started_s = simulator.now_s
    tickets = [simulator.publish(one, bytes(MESSAGE_BYTES)) for _ in range(nbytes // MESSAGE_BYTES)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), 600.0)
    rate = nbytes / (simulator.now_s - started_s)
    again = one.endpoint.stats().retransmitted_bytes
    return rate / link.rate_bytes_per_s, again / link.lost_bytes if link.lost_bytes else 0.0


def simulated_rows(nbytes: int) -> Iterator[Row]:
    """Yield the share of the rate used on the links that the project promises something about."""
    for what, link, reach in (
        (
            "use of 100 Mbit/s, 1 ms round trip",
            Link(0.0005, rate_bytes_per_s=12.5e6, queue_bytes=125_000),
            0.92,
        ),
        (
            "use of 100 Mbit/s, 40 ms round trip, 1 % loss",
            Link(0.02, loss=0.01, rate_bytes_per_s=12.5e6, queue_bytes=500_000),
            0.8,
        ),
        (
            "use of 10 Mbit/s, 30 ms, queue of 25 packets",
            Link(0.015, rate_bytes_per_s=1.25e6, queue_bytes=35_000),
            0.8,
        ),
    ):
        used, again = simulated(link, nbytes)
        yield _simulated(what, nbytes, used, "its rate", Reach(">=", reach))
        resent = what.replace("use of", "sent again on")
        yield _simulated(resent, nbytes, again, "lost", Reach("<=", 1.2))
    rates = [
        simulated(Link(0.0005, loss=loss, rate_bytes_per_s=125e6, queue_bytes=250_000), nbytes)[0]
        for loss in (0.0, 0.01)
    ]
    yield _simulated("1 Gbit/s at 1 % loss", nbytes, rates[1] / rates[0], "0 %", Reach(">=", 0.85))


def _simulated(what: str, nbytes: int, value: float, reference: str, reach: Reach) -> Row:
    label = f"simulated: {what}"
    return figure("simulated", label, nbytes, value, "x", reference=reference, reach=reach)


# ---- cables between network namespaces --------------------------------------------------------------------------


def cable_share(cable: Cable, messages: int) -> tuple[float, float]:
    """Return the share of a cable's rate that payload uses, and datagrams sent again over those lost.

    From the first `publish` until everything is acknowledged.
    """
    with netns.network(cable) as network:
        hosts = {host: f"{network.addresses[host]}:0" for host in netns.HOSTS}
        with (
            PeerProcess(bind=hosts["b"], within=network.within("b")) as target,
            PeerProcess([target.address], bind=hosts["a"], within=network.within("a")) as source,
        ):
            source.ask("wait", peers=1)
            sent = _send(source, target, messages)
    lost = sent["stats"]["datagrams_sent"] - sent["datagrams_received"]
    again = sent["stats"]["retransmitted_fragments"]
    rate = messages * MESSAGE_BYTES / sent["seconds"]
    return rate / (cable.rate_mbit * 125_000), again / lost if lost else 0.0


def cable_rows(messages: int, rounds: int) -> Iterator[Row]:
    """Yield what real sockets make of a cable between two network namespaces; rounds alternate between the cables."""
    slow, fast, lossy = Cable(100), Cable(1_000), Cable(1_000, loss=0.01)
    shares: dict[Cable, list[float]] = {slow: [], fast: [], lossy: []}
    resent = []
    for _ in range(rounds):
        for cable, values in shares.items():
            share, again = cable_share(cable, messages)
            values.append(share)
            if cable is lossy:
                resent.append(again)
    nbytes = messages * MESSAGE_BYTES
    losing = [one / other for one, other in zip(shares[lossy], shares[fast], strict=True)]
    what = "1 Gbit/s at 1 % loss"
    yield _best("cable", "use of 100 Mbit/s", nbytes, shares[slow], "its rate", Reach(">=", 0.92))
    yield _best("cable", "use of 1 Gbit/s", nbytes, shares[fast], "its rate", None)
    yield _best("cable", what, nbytes, losing, "0 %", Reach(">=", 0.85))
    yield _least("cable", f"sent again on {what}", nbytes, resent)


# ---- through a proxy that delays --------------------------------------------------------------------------------


def proxy_share(trouble: Trouble, messages: int) -> tuple[float, float]:
    """Return the share of the proxy's rate that payload uses, and datagrams sent again over those it lost."""
    with (
        PeerProcess() as target,
        Proxy(target.address, trouble) as proxy,
        PeerProcess([proxy.address]) as source,
    ):
        source.ask("wait", peers=1)
        sent = _send(source, target, messages)
        lost = proxy.stop()["lost_there"]
    rate = messages * MESSAGE_BYTES / sent["seconds"]
    again = sent["stats"]["retransmitted_fragments"]
    return rate / trouble.rate_bytes_per_s, again / lost if lost else 0.0


def proxy_rows(messages: int, rounds: int) -> Iterator[Row]:
    """Yield what real sockets make of a long path that loses, behind a proxy in a process of its own."""
    trouble = Trouble(delay_s=0.02, loss=0.01, rate_bytes_per_s=12.5e6)
    shares, resent = zip(*(proxy_share(trouble, messages) for _ in range(rounds)), strict=True)
    nbytes, path = messages * MESSAGE_BYTES, "100 Mbit/s, 20 ms each way, 1 % loss"
    yield _best("proxy", f"use of {path}", nbytes, shares, "its rate", Reach(">=", 0.8))
    yield _least("proxy", f"sent again on {path}", nbytes, resent)


# ---- both -------------------------------------------------------------------------------------------------------


def _send(source: PeerProcess, target: PeerProcess, messages: int) -> dict[str, Any]:
    """Send messages, each of which must arrive once, in order, with the bytes it must have."""
    target.tell("receive", messages=messages, timeout_s=LIMIT_S)
    sent = source.ask("send", messages=messages, nbytes=MESSAGE_BYTES, timeout_s=LIMIT_S)
    received = target.answer(LIMIT_S)
    assert sent["is_drained"], "everything must be acknowledged"
    assert received["tags"] == {str(source.id): list(range(messages))}, "each message must arrive"
    return sent | {"datagrams_received": received["stats"]["datagrams_received"]}


def _best(
    group: str,
    what: str,
    nbytes: int,
    shares: Sequence[float],
    reference: str,
    reach: Reach | None,
) -> Row:
    """Return the best and the median: other work on the machine can only lower a share."""
    best, typical = max(shares), statistics.median(shares)
    label = f"{group}: {what}"
    return Row(group, label, nbytes, "x", best, typical, reference=reference, reach=reach)


def _least(group: str, what: str, nbytes: int, resent: Sequence[float]) -> Row:
    reach, label = Reach("<=", 1.2), f"{group}: {what}"
    least, typical = min(resent), statistics.median(resent)
    return Row(group, label, nbytes, "x", least, typical, reference="lost", reach=reach)
