"""The state of one replica at a cut between two steps, on its way to a newcomer while training goes on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MessageError, NotConnected, WouldBlock
from .control import Kind, Place, Request, place_of, tag_of
from .views import Arrays

if TYPE_CHECKING:
    from ..transport import Node, Peer

__all__ = ["Donor", "Incoming", "Snapshot"]

# Small enough to let updates pass in between, large enough to cost nothing.
_PART_BYTES = 1 << 20
_ARRAYS_MAX = 1 << 20


@dataclass
class Snapshot:
    """Everything a newcomer needs to go on from a cut.

    Attributes:
        step: number of the giver's next step.
        positions: for every member, the giver included, the number of the first update that is not in it.
        finals: for nodes that were members before, the number of the first of their updates that nobody applied.
        arrays: parameters, or initial ones and sum where exact; then the optimiser's.
        params: how many of the arrays are parameters.
        origin: the node that began the training.
        exact: scale and exactness of an exact sum, or None.
    """

    step: int
    positions: dict[Place, int]
    finals: dict[Place, int]
    arrays: Arrays
    params: int
    origin: Place
    exact: dict[str, Any] | None = None

    def header(self) -> bytes:
        """Return everything but the arrays' values."""
        return json.dumps(
            {
                "step": self.step,
                "positions": [[*place, step] for place, step in self.positions.items()],
                "finals": [[*place, step] for place, step in self.finals.items()],
                "arrays": [[array.dtype.str, list(array.shape)] for array in self.arrays],
                "params": self.params,
                "origin": self.origin,
                "exact": self.exact,
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
            return Snapshot(
                int(found["step"]),
                {(int(node), int(run)): int(step) for node, run, step in found["positions"]},
                {(int(node), int(run)): int(step) for node, run, step in found["finals"]},
                [_empty(dtype, shape) for dtype, shape in found["arrays"]],
                int(found["params"]),
                (int(found["origin"][0]), int(found["origin"][1])),
                found["exact"],
            )
        except (ValueError, TypeError, LookupError, MemoryError) as error:
            raise MessageError(f"a snapshot whose header cannot be read: {error!r}") from error


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _empty(dtype: str, shape: list[int]) -> NDArray[Any]:
    if dtype not in ("<f4", "<f8"):
        raise ValueError(f"an array of {dtype}")
    return np.empty([int(size) for size in shape], dtype)


@dataclass
class Incoming:
    """A snapshot as it arrives, part by part.

    Attributes:
        number: of the request that asked for it.
        donor: who was asked.
    """

    number: int
    donor: Peer
    snapshot: Snapshot | None = None
    _places: deque[memoryview] = field(default_factory=deque)

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return self.snapshot is not None and not self._places

    def add(self, part: memoryview) -> None:
        """Take the next part.

        Raises:
            MessageError: it does not fit.
        """
        if self.snapshot is None:
            self.snapshot = Snapshot.from_header(part)
            for array in self.snapshot.arrays:
                if array.nbytes:
                    self._places.append(_bytes_of(array))
            return
        if not self._places or len(part) > len(self._places[0]):
            raise MessageError("a part of a snapshot that does not fit")
        place = self._places.popleft()
        place[: len(part)] = part
        if len(part) < len(place):
            self._places.appendleft(place[len(part) :])


class Donor:
    """Gives snapshots to newcomers: takes their requests, waits for a cut that fits, and sends as there is room."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._requests: dict[Peer, tuple[int, Request]] = {}
        self._outgoing: deque[tuple[Peer, int, memoryview]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._requests and not self._outgoing

    def ask(self, peer: Peer, number: int, request: Request) -> None:
        """Take a request; a newcomer's latest counts."""
        self._requests[peer] = (number, request)
        self._outgoing = deque(one for one in self._outgoing if one[0] != peer)

    def serve(self, positions: dict[Peer, int], make: Callable[[], Snapshot]) -> None:
        """At a cut: answer every request that it fits.

        Args:
            positions: for every member, this node included, the first update that is not in the cut.
            make: returns the snapshot; called once, and only if somebody wants it.
        """
        snapshot = None
        by_place = {place_of(peer): step for peer, step in positions.items()}
        connected = frozenset(self._node.peers) if self._requests else frozenset()
        for peer, (number, request) in list(self._requests.items()):
            if peer not in connected:
                del self._requests[peer]
                continue
            is_early = any(
                by_place.get(place, step) < step for place, step in request.fresh.items()
            )
            if is_early or peer in positions:
                continue
            snapshot = snapshot or make()
            del self._requests[peer]
            for part in _parts(snapshot):
                self._outgoing.append((peer, number, part))

    def refuse(self) -> None:
        """Give nothing to those who have asked; they ask another member."""
        self._requests.clear()

    def pump(self) -> None:
        """Send what there is room for."""
        while self._outgoing:
            peer, number, part = self._outgoing[0]
            try:
                # Half of the room stays for updates.
                if not self._node.has_room(2 * len(part)):
                    return
                self._node.publish(part, tag=tag_of(Kind.SNAPSHOT, number), to=peer)
            except WouldBlock:
                return
            except NotConnected:
                self._outgoing = deque(one for one in self._outgoing if one[0] != peer)
                continue
            self._outgoing.popleft()


def _parts(snapshot: Snapshot) -> list[memoryview]:
    parts = [memoryview(snapshot.header())]
    for array in snapshot.arrays:
        if array.nbytes:
            whole = _bytes_of(array)
            parts += [whole[at : at + _PART_BYTES] for at in range(0, len(whole), _PART_BYTES)]
    return parts
