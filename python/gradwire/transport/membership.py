"""Who to knock at, and whose knocking to look at: seeds with back-off, and a gate against floods and replays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from .model import Address

RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 2.0  # a seed that starts late is found within this time
ATTEMPT_S: Final = 10.0  # afterwards a new ephemeral key is used
HALF_OPEN_MAX: Final = 256
MARKS_MAX: Final = 16_384  # 2 MB; at full rate the last 40 s
TIMELY_S: Final = 120.0  # how far apart the clocks of two nodes may be
SEEDS_MAX: Final = 256
OWN_S: Final = 60.0  # a knock of ours that comes back may also be somebody's echo, so ask again
GATE_BURST: Final = 64.0


class Seed:
    """An address that should have a connection."""

    __slots__ = ("address", "is_learned", "is_own", "next_at_s", "node_id")

    def __init__(self, address: Address, *, is_learned: bool) -> None:
        self.address = address
        self.is_learned = is_learned
        self.next_at_s = 0.0
        self.node_id: int | None = None
        self.is_own = False


class Membership:
    """The addresses this node tries to be connected to."""

    def __init__(self) -> None:
        self._seeds: dict[Address, Seed] = {}

    def __contains__(self, address: Address) -> bool:
        return address in self._seeds

    def __iter__(self) -> Iterator[Address]:
        return iter(self._seeds)

    def seeds(self) -> list[Address]:
        """Return the addresses that the caller named, without those that turned out to be this node's own."""
        return [
            seed.address for seed in self._seeds.values() if not seed.is_learned and not seed.is_own
        ]

    def unanswered(self, connected: set[Address], node_ids: set[int]) -> list[Address]:
        """Return those of ``seeds`` that nobody has answered from."""
        return [
            address
            for address in self.seeds()
            if self._is_wanting(self._seeds[address], connected, node_ids)
        ]

    def add(self, address: Address, *, is_learned: bool = False) -> None:
        """Want a connection to this address; ignored when there are too many already.

        Args:
            address: of the other node.
            is_learned: a peer named it; it is forgotten if it does not answer.
        """
        if address not in self._seeds and len(self._seeds) < SEEDS_MAX:
            self._seeds[address] = Seed(address, is_learned=is_learned)

    def due(self, now_s: float, connected: set[Address], node_ids: set[int]) -> list[Address]:
        """Return the addresses to start a handshake with now."""
        result = []
        for seed in self._seeds.values():
            if self._is_wanting(seed, connected, node_ids) and now_s >= seed.next_at_s:
                seed.next_at_s = now_s + RETRY_FIRST_S
                result.append(seed.address)
        return result

    def next_at_s(self, connected: set[Address], node_ids: set[int]) -> float | None:
        """Return when `due` will next have something."""
        times = [
            seed.next_at_s
            for seed in self._seeds.values()
            if self._is_wanting(seed, connected, node_ids)
        ]
        return min(times) if times else None

    def _is_wanting(self, seed: Seed, connected: set[Address], node_ids: set[int]) -> bool:
        return seed.address not in connected and seed.node_id not in node_ids

    def on_identified(self, address: Address, node_id: int) -> None:
        """Learn which node answers at this address."""
        seed = self._seeds.get(address)
        if seed is not None:
            seed.node_id = node_id
            seed.is_own = False

    def on_own(self, address: Address, now_s: float) -> None:
        """What was sent to this address came back: it is this node's own, for all one knows."""
        seed = self._seeds.get(address)
        if seed is not None:
            seed.is_own = True
            seed.next_at_s = now_s + OWN_S

    def on_no_answer(self, address: Address, now_s: float) -> None:
        """A whole attempt at this address was in vain: wait longer, or forget it if it was only hearsay."""
        seed = self._seeds.get(address)
        if seed is None:
            return
        seed.next_at_s = now_s + RETRY_MAX_S
        if seed.is_learned:
            del self._seeds[address]

    def on_lost(self, address: Address, now_s: float) -> None:
        """The connection to this address ended; knock again a little later."""
        seed = self._seeds.get(address)
        if seed is not None:
            seed.node_id = None
            seed.next_at_s = max(seed.next_at_s, now_s + RETRY_FIRST_S)


class HandshakeGate:
    """Which authentic first messages are worth a decryption: none twice, and so many per second.

    What comes here carries a mark, so a stranger can only repeat what members once sent. He may have recorded more than
    can be remembered; therefore messages of the last two minutes, of which he has few, have a rate of their own.
    """

    def __init__(self, per_second: float) -> None:
        self._timely = _Bucket(per_second)
        self._any = _Bucket(per_second)
        self._marks: OrderedDict[bytes, None] = OrderedDict()

    def has_seen(self, mark: bytes) -> bool:
        """Whether the message with this mark was admitted before."""
        return mark in self._marks

    def admit(self, mark: bytes, age_s: float, now_s: float) -> bool:
        """Whether another first message may be decrypted now; remembers its mark if so.

        Args:
            mark: the message's mark, verified.
            age_s: how long ago it was made, by the clocks of both nodes; they need not agree in quiet times.
            now_s: current time.
        """
        is_timely = abs(age_s) <= TIMELY_S and self._timely.take(now_s)
        if not is_timely and not self._any.take(now_s):
            return False
        self._marks[mark] = None
        if len(self._marks) > MARKS_MAX:
            self._marks.popitem(last=False)
        return True


class _Bucket:
    """So many per second, and `GATE_BURST` at once."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._tokens = GATE_BURST
        self._refilled_at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take one, if there is one."""
        elapsed_s = max(0.0, now_s - self._refilled_at_s)
        self._refilled_at_s = now_s
        self._tokens = min(GATE_BURST, self._tokens + elapsed_s * self._per_second)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
