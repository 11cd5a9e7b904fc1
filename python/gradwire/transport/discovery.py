"""Discovery: the addresses that this node connects to, with back-off, and the gossip that spreads them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from .types import Address

RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 2.0  # a seed that starts late is found within this time
ATTEMPT_S: Final = 10.0  # after this a new ephemeral key is used
SEEDS_MAX: Final = 1024  # with one given seed, more nodes than this would not all meet
GOSSIP_S: Final = 1.0


@dataclass(slots=True)
class Seed:
    """An address that should have a connection."""

    address: Address
    is_learned: bool  # not from the caller, and dropped if nobody answers there
    next_at_s: float = 0.0
    node_id: int | None = None
    misfit_at_s: float = -1.0  # when an INIT of another version or secret has come from there


class Discovery:
    """The addresses that this node tries to be connected to."""

    def __init__(self) -> None:
        self.due_at_s = 0.0  # when to call `due`
        self.by_address: dict[Address, Seed] = {}

    def add(self, address: Address, *, is_learned: bool = False) -> None:
        """Add an address to connect to; one that a peer has named is ignored when there are too many already."""
        if not is_learned or len(self.by_address) < SEEDS_MAX:
            seed = self.by_address.setdefault(address, Seed(address, is_learned))
            seed.is_learned &= is_learned
        self.reconsider()

    def reconsider(self) -> None:
        """Have `due` called at once, because an address or a connection is new or gone."""
        self.due_at_s = 0.0

    def seeds(self, seen: Set[Address] = frozenset(), ids: Set[int] = frozenset()) -> list[Address]:
        """Return the caller's addresses, without those of the peers seen."""
        return [seed.address for seed in self._unconnected(seen, ids) if not seed.is_learned]

    def due(self, now_s: float, connected: Set[Address], node_ids: Set[int]) -> list[Address]:
        """Return the addresses to start a handshake with now, and set ``due_at_s``; infinity if never."""
        missing = self._unconnected(connected, node_ids)
        due_seeds = [seed for seed in missing if now_s >= seed.next_at_s]
        for seed in due_seeds:
            seed.next_at_s = now_s + RETRY_FIRST_S
        self.due_at_s = min((seed.next_at_s for seed in missing), default=float("inf"))
        return [seed.address for seed in due_seeds]

    def _unconnected(self, connected: Set[Address], node_ids: Set[int]) -> list[Seed]:
        others = (seed for seed in self.by_address.values() if seed.address not in connected)
        return [seed for seed in others if seed.node_id not in node_ids]

    def on_identified(self, address: Address, node_id: int) -> None:
        """Note which node answers at this address."""
        if seed := self.by_address.get(address):
            seed.node_id = node_id

    def on_misfit(self, address: Address, now_s: float) -> None:
        """Note that a node of another version or secret seems to be at this address."""
        if seed := self.by_address.get(address):
            seed.misfit_at_s = now_s

    def on_ended(self, address: Address, now_s: float, *, is_answered: bool) -> None:
        """Note that a connection ended, or an attempt failed: try again later, or drop an address that a peer named."""
        self.reconsider()
        if seed := self.by_address.get(address):
            wait_s = RETRY_FIRST_S if is_answered else RETRY_MAX_S
            seed.node_id = None
            seed.next_at_s = max(seed.next_at_s, now_s + wait_s)
            if seed.is_learned and not is_answered:
                del self.by_address[address]
