"""Discovery: the addresses that this node connects to, with back-off, and the gossip that spreads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .types import Address
from .wire import MEMBERS_MAX, Members

RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 2.0  # a seed that starts late is found within this time
ATTEMPT_S: Final = 10.0  # after this a new ephemeral key is used
SEEDS_MAX: Final = 256
OWN_S: Final = 60.0  # an INIT of ours that comes back may be somebody's echo, so it is sent again after this time
GOSSIP_S: Final = 1.0
MEMBERS_BYTES_MAX: Final = 1_100


@dataclass(slots=True)
class Seed:
    """An address that should have a connection."""

    address: Address
    is_learned: bool  # named by a peer, and dropped if nobody answers there
    next_at_s: float = 0.0
    node_id: int | None = None
    is_own: bool = False


class Discovery:
    """The addresses that this node tries to be connected to."""

    def __init__(self) -> None:
        self._seeds: dict[Address, Seed] = {}

    def __iter__(self) -> Iterator[Address]:
        return iter(self._seeds)

    def add(self, address: Address, *, is_learned: bool = False) -> None:
        """Add an address to connect to; ignored when there are too many already."""
        if len(self._seeds) < SEEDS_MAX:
            self._seeds.setdefault(address, Seed(address, is_learned))

    def seeds(self) -> list[Address]:
        """Return the addresses that the caller named, without those that turned out to be this node's own."""
        return [s.address for s in self._seeds.values() if not (s.is_learned or s.is_own)]

    def unanswered(self, connected: set[Address], node_ids: set[int]) -> list[Address]:
        """Return the addresses of `seeds` from which no peer is connected."""
        missing = {seed.address for seed in self._unconnected(connected, node_ids)}
        return [address for address in self.seeds() if address in missing]

    def due(self, now_s: float, connected: set[Address], node_ids: set[int]) -> list[Address]:
        """Return the addresses to start a handshake with now."""
        found = [s for s in self._unconnected(connected, node_ids) if now_s >= s.next_at_s]
        for seed in found:
            seed.next_at_s = now_s + RETRY_FIRST_S
        return [seed.address for seed in found]

    def next_at_s(self, connected: set[Address], node_ids: set[int]) -> float:
        """Return the time at which `due` will next return something; infinity if never."""
        times = (seed.next_at_s for seed in self._unconnected(connected, node_ids))
        return min(times, default=float("inf"))

    def _unconnected(self, connected: set[Address], node_ids: set[int]) -> list[Seed]:
        others = (seed for seed in self._seeds.values() if seed.address not in connected)
        return [seed for seed in others if seed.node_id not in node_ids]

    def on_identified(self, address: Address, node_id: int) -> None:
        """Note which node answers at this address."""
        if seed := self._seeds.get(address):
            seed.node_id, seed.is_own = node_id, False

    def on_own(self, address: Address, now_s: float) -> None:
        """Note that datagrams to this address come back: the address is probably this node's own."""
        if seed := self._seeds.get(address):
            seed.next_at_s, seed.is_own = now_s + OWN_S, True

    def on_no_answer(self, address: Address, now_s: float) -> None:
        """Note that an attempt at this address failed: wait longer, or drop an address that a peer had named."""
        if seed := self._seeds.get(address):
            seed.next_at_s = now_s + RETRY_MAX_S
            if seed.is_learned:
                del self._seeds[address]

    def on_lost(self, address: Address, now_s: float) -> None:
        """Note that the connection to this address ended; try again a little later."""
        if seed := self._seeds.get(address):
            seed.node_id, seed.next_at_s = None, max(seed.next_at_s, now_s + RETRY_FIRST_S)


def members_frames(addresses: list[str]) -> list[Members]:
    """Return the frames that name these addresses, each small enough for one datagram."""
    longest = max(map(len, addresses), default=0)
    count = min(MEMBERS_MAX, MEMBERS_BYTES_MAX // (1 + longest))
    starts = range(0, len(addresses), count)
    return [Members(tuple(addresses[start : start + count])) for start in starts]
