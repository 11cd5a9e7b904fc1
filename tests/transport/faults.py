"""Helpers of the scenarios: a transfer over one link, and links that lose chosen datagrams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradwire.transport.wire import DATA, HEADER, RECORD_NUMBER_MAX

from .simulator import Host, Link, Simulator

MEGABYTE = 1 << 20
Drop = Callable[[int, bytes], bool]


@dataclass(frozen=True)
class Transfer:
    """The hosts of a transfer and the time it took."""

    sender: Host
    receiver: Host
    elapsed_s: float

    @property
    def resent_bytes(self) -> int:
        """Return the data bytes sent more than once."""
        return self.sender.endpoint.stats().retransmitted_bytes


def measure_round_trips(simulator: Simulator, host: Host, pause_s: float = 0.02) -> None:
    """Publish fifty small messages, one after the other, so that the endpoint has round trips to estimate from."""
    for index in range(50):
        simulator.publish(host, b"x", index)
        simulator.run_for(pause_s)


def transfer(
    link: Link, nbytes: int, *, seed: int = 1, back: Link | None = None, limit_s: float = 300.0
) -> Transfer:
    """Send ``nbytes`` in 1 MB messages over the link, and check that each arrives once, complete and in order."""
    simulator = Simulator(seed, Link(delay_s=link.delay_s))
    one, two = simulator.mesh(2)
    simulator.links[one.address, two.address] = link
    simulator.links[two.address, one.address] = back or Link(delay_s=link.delay_s)
    started_s = simulator.now_s
    sent = [
        simulator.random.randbytes(min(MEGABYTE, nbytes - at)) for at in range(0, nbytes, MEGABYTE)
    ]
    tickets = [simulator.publish(one, payload, tag) for tag, payload in enumerate(sent)]
    simulator.run_until(lambda: all(ticket.is_done for ticket in tickets), limit_s)
    assert two.payloads == sent
    assert all(ticket.delivered for ticket in tickets)
    return Transfer(one, two, simulator.now_s - started_s)


def data_fragments(wanted: Callable[[int, int, int], bool]) -> Drop:
    """Lose the first copy of every data datagram for which ``wanted(record, fragment, fragments)`` is true."""
    seen: set[tuple[int, int]] = set()

    def drop(_: int, datagram: bytes) -> bool:
        if datagram[0] != DATA:
            return False
        _, _, fragment, fragments, _, number = HEADER.unpack_from(datagram)
        record = number & RECORD_NUMBER_MAX
        if (record, fragment) in seen or not wanted(record, fragment, fragments):
            return False
        seen.add((record, fragment))
        return True

    return drop
