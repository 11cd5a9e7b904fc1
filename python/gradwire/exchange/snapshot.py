"""Snapshots: the state of one replica between two steps, sent to a newcomer while training goes on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MessageError, NotConnected, WouldBlock
from ..transport import Peer
from .parameters import Arrays, Taken, TakenParts
from .protocol import Kind, NodeRun, run_of, tag_of

if TYPE_CHECKING:
    from ..transport import Node

__all__ = ["Donor", "Snapshot"]

# Small enough to let updates pass in between, large enough to cost nothing.
_PART_BYTES = 1 << 20
_ARRAYS_MAX = 1 << 20


@dataclass
class Snapshot:
    """Everything that a newcomer needs to continue.

    Attributes:
        step: number of the donor's next step.
        positions: for every member, the donor included, the first update that is not in the snapshot.
        finals: for departed members, the first update that nobody applied.
        arrays: of ``Replica.export_state``, then of the optimiser's state.
        params: number of the former.
        origin: the node that began the training.
        exact: divisor and exactness of an exact sum, or None.
        taken: see `Replica`.
        senders: as there, with their roles.
        has_slow_links: as there.
        missing: the arrays' bytes that have not arrived, for a snapshot in transit.
    """

    step: int
    positions: dict[NodeRun, int]
    finals: dict[NodeRun, int]
    arrays: Arrays
    params: int
    origin: NodeRun
    exact: dict[str, Any] | None = None
    taken: Taken = field(default_factory=dict)
    senders: dict[Peer, str] = field(default_factory=dict)
    has_slow_links: bool = False
    missing: deque[memoryview] = field(default_factory=deque)

    def header(self) -> bytes:
        """Return everything but the arrays' values."""
        return json.dumps(
            {
                "step": self.step,
                "positions": [[*run, step] for run, step in self.positions.items()],
                "finals": [[*run, step] for run, step in self.finals.items()],
                "arrays": [[array.dtype.str, list(array.shape)] for array in self.arrays],
                "params": self.params,
                "origin": self.origin,
                "exact": self.exact,
                "senders": [[*run_of(peer), role] for peer, role in self.senders.items()],
                "has_slow_links": self.has_slow_links,
                "taken": [
                    [*run_of(owner), *run_of(sender), *parts]
                    for owner, by_sender in self.taken.items()
                    for sender, parts in by_sender.items()
                ],
            }
        ).encode()

    @staticmethod
    def from_header(payload: memoryview) -> Snapshot:
        """Return a snapshot with arrays still to be filled.

        Raises:
            MessageError: the bytes are no header.
        """
        try:
            found = json.loads(bytes(payload))
            if len(found["arrays"]) > _ARRAYS_MAX:
                raise ValueError(f"{len(found['arrays'])} arrays")
            arrays = [_empty(dtype, shape) for dtype, shape in found["arrays"]]
            taken: Taken = {}
            for one in found["taken"]:
                owner, owner_run, sender, sender_run, *parts = map(int, one)
                by_sender = taken.setdefault(Peer(owner, owner_run, "unknown"), {})
                by_sender[Peer(sender, sender_run, "unknown")] = TakenParts(*parts)
            return Snapshot(
                int(found["step"]),
                {(int(node), int(run)): int(step) for node, run, step in found["positions"]},
                {(int(node), int(run)): int(step) for node, run, step in found["finals"]},
                arrays,
                int(found["params"]),
                (int(found["origin"][0]), int(found["origin"][1])),
                found["exact"],
                taken,
                {
                    Peer(int(node), int(run), "unknown"): str(role)
                    for node, run, role in found["senders"]
                },
                bool(found["has_slow_links"]),
                deque(_bytes_of(array) for array in arrays if array.nbytes),
            )
        except (ValueError, TypeError, LookupError, MemoryError) as error:
            raise MessageError(f"a snapshot whose header cannot be read: {error!r}") from error

    def add_part(self, part: memoryview) -> None:
        """Add the next part that has arrived.

        Raises:
            MessageError: the part does not fit.
        """
        if not self.missing or len(part) > len(self.missing[0]):
            raise MessageError("a part of a snapshot that does not fit")
        place = self.missing.popleft()
        place[: len(part)] = part
        if len(part) < len(place):
            self.missing.appendleft(place[len(part) :])

    def parts(self) -> list[memoryview]:
        """Return the header and the arrays' bytes, in parts of bounded size."""
        parts = [memoryview(self.header())]
        for array in self.arrays:
            data = _bytes_of(array)
            parts += [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
        return parts


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _empty(dtype: str, shape: list[int]) -> NDArray[Any]:
    if dtype not in ("<f4", "<f8"):
        raise ValueError(f"an array of {dtype}")
    return np.empty([int(size) for size in shape], dtype)


class Donor:
    """Answers newcomers' requests: waits for a suitable step, and sends the snapshot as there is space."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._requests: dict[Peer, tuple[int, dict[NodeRun, int]]] = {}
        self._outgoing: deque[tuple[Peer, int, memoryview]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for a snapshot."""
        return not self._requests and not self._outgoing

    @property
    def requesters(self) -> set[Peer]:
        """The nodes whose requests are not answered yet."""
        return set(self._requests)

    def add_request(self, peer: Peer, number: int, fresh: dict[NodeRun, int]) -> None:
        """Add a request, in the place of an earlier one.

        Args:
            peer: the newcomer.
            number: of the request.
            fresh: for every member the first update that the newcomer gets directly: the snapshot has to hold all
                before.
        """
        self._requests[peer] = number, fresh
        self._outgoing = deque(one for one in self._outgoing if one[0] != peer)

    def serve(self, positions: dict[Peer, int], make: Callable[[], Snapshot]) -> None:
        """Answer every request that the present state satisfies.

        Args:
            positions: for every member, this node included, the first update that is not in the state.
            make: returns the snapshot; called at most once.
        """
        snapshot = None
        at = {run_of(peer): step for peer, step in positions.items()}
        connected = frozenset(self._node.peers) if self._requests else frozenset()
        for peer, (number, fresh) in list(self._requests.items()):
            if peer not in connected:
                del self._requests[peer]
                continue
            is_early = any(at.get(run, step) < step for run, step in fresh.items())
            if is_early or peer in positions:
                continue
            snapshot = snapshot or make()
            del self._requests[peer]
            self._outgoing += [(peer, number, part) for part in snapshot.parts()]

    def refuse_all(self) -> None:
        """Drop all requests; the newcomers ask another member."""
        self._requests.clear()

    def send_parts(self) -> None:
        """Send as many parts as there is space for."""
        while self._outgoing:
            peer, number, part = self._outgoing[0]
            try:
                # Half of the space is left for updates.
                if not self._node.has_room(2 * len(part)):
                    return
                self._node.publish(part, tag=tag_of(Kind.SNAPSHOT, number), to=peer)
            except WouldBlock:
                return
            except NotConnected:
                self._outgoing = deque(one for one in self._outgoing if one[0] != peer)
                continue
            self._outgoing.popleft()
