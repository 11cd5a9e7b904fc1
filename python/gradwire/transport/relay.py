"""The two ends of relaying: who forwards to whom (the origin's `Tree`), and forwarding (a relay's `Forwarder`).

A relay forwards datagrams as they come; it can read them as every member can, and change nothing unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, Protocol

from .model import Address, Calls, Counters, Transmit
from .records import calls_of, runs
from .wire import FRAGMENTS_MAX

QUEUE_BYTES_MAX: Final = 4 << 20
RECORDS_MAX: Final = 2_048  # twice what a sender can have in flight


class Tree:
    """Which peer gets an origin's records from which: position ``i`` from ``i // width - 1``; -1 is the origin.

    Positions change as little as possible: whoever comes or goes moves at most two others. A newcomer's position is a
    hash of its id and the origin's, so that the work of relaying is spread over the nodes although every origin has
    a tree of its own.

    Args:
        origin: node id.
        width: how many each node sends to.
    """

    def __init__(self, origin: int, width: int) -> None:
        self._origin = origin
        self._width = width
        self.order: list[int] = []
        self._unfit: set[int] = set()

    def __contains__(self, node: int) -> bool:
        return node in self.order

    def __len__(self) -> int:
        return len(self.order)

    def add(self, node: int) -> None:
        """Take a node in."""
        digest = hashlib.blake2b(f"{self._origin}/{node}".encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "little") % (len(self.order) + 1)
        self.order.append(node)
        self._swap(position, len(self.order) - 1)
        self._settle()

    def remove(self, node: int) -> None:
        """Leave a node out."""
        self._swap(self.order.index(node), len(self.order) - 1)
        self.order.pop()
        self._settle()

    def mark_unfit(self, nodes: Iterable[int]) -> None:
        """Replace the set of nodes that should not relay; they stay as leaves as long as there are others."""
        self._unfit = set(nodes)
        self._settle()

    def parent(self, node: int) -> int | None:
        """Return the node that this one gets the records from; None: from the origin."""
        position = self.order.index(node) // self._width - 1
        return None if position < 0 else self.order[position]

    def children(self, node: int) -> tuple[int, ...]:
        """Return the nodes that this one forwards to."""
        first = (self.order.index(node) + 1) * self._width
        return tuple(self.order[first : first + self._width])

    @property
    def relays(self) -> list[int]:
        """The nodes that have children."""
        return self.order[: max(0, -(-(len(self.order) - self._width) // self._width))]

    def _swap(self, one: int, two: int) -> None:
        self.order[one], self.order[two] = self.order[two], self.order[one]

    def _settle(self) -> None:
        """Move the unfit out of the positions that relay."""
        count = len(self.relays)
        leaves = [
            position
            for position in range(count, len(self.order))
            if self.order[position] not in self._unfit
        ]
        for position in range(count):
            if self.order[position] in self._unfit and leaves:
                self._swap(position, leaves.pop())


class Target(Protocol):
    """The session to a child."""

    address: Address


class Forwarder:
    """One origin's records on their way through this node: to whom, and what has gone already.

    Whoever guesses a stream's number can send garbage in its name. It is forwarded only for records that this node
    itself still waits for, each fragment once: at most as much per child as the origin itself could have caused.

    Attributes:
        generation: of the instruction in force.
        children: ids of the nodes that the origin named.
        targets: the sessions to those of them that are connected here.
    """

    def __init__(self, generation: int, children: tuple[int, ...]) -> None:
        self.generation = generation
        self.children = children
        self.targets: list[Target] = []
        self._forwarded: dict[int, int] = {}

    def take(self, record: int, first: int, count: int, fragments: int, oldest: int) -> int:
        """Return which of these fragments are to be forwarded now, and remember that they were.

        Args:
            record: its number; this node still waits for it.
            first: index of the first fragment.
            count: number of neighbouring fragments.
            fragments: number of fragments of the record.
            oldest: this node waits for no record below this number.
        """
        if first + count > fragments or fragments > FRAGMENTS_MAX:
            return 0
        known = self._forwarded.get(record)
        if known is None:
            if len(self._forwarded) >= RECORDS_MAX:
                self._forwarded = {n: mask for n, mask in self._forwarded.items() if n >= oldest}
            known = 0
        new = ((1 << count) - 1) << first & ~known
        self._forwarded[record] = known | new
        return new


class ForwardQueue:
    """What is to be forwarded with the next `poll`, bounded: what does not fit is lost, and the origin sends it again.

    Attributes:
        used_bytes: held, each datagram counted once, however many it goes to.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._bursts: list[tuple[Calls, int, int, list[Address]]] = []
        self.used_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._bursts)

    def put(
        self, batch: memoryview, first: int, new: int, segment_bytes: int, targets: list[Address]
    ) -> None:
        """Queue the fragments of ``batch`` whose bits are set in ``new``; bit ``first`` is the first datagram."""
        slices = [
            batch[(start - first) * segment_bytes : (start - first + count) * segment_bytes]
            for start, count in runs(new)
        ]
        nbytes = sum(len(piece) for piece in slices)
        if self.used_bytes + nbytes > QUEUE_BYTES_MAX:
            self._counters.relay_dropped_bytes += nbytes * len(targets)
            return
        # The receive buffer is used again at once.
        copies = [memoryview(bytes(piece)) for piece in slices]
        self.used_bytes += nbytes
        self._bursts.append((calls_of(copies, segment_bytes), segment_bytes, nbytes, targets))

    def take(self) -> list[Transmit]:
        """Return everything, to be sent now."""
        bursts, self._bursts = self._bursts, []
        self.used_bytes = 0
        out = [
            Transmit(address, calls, segment_bytes, nbytes)
            for calls, segment_bytes, nbytes, targets in bursts
            for address in targets
        ]
        self._counters.relayed_bytes += sum(transmit.nbytes for transmit in out)
        return out
