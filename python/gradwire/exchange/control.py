"""What exchanges say to each other besides updates: tags, and small documents in JSON.

The top byte of a message's tag is its kind, the rest its number: for updates the step. The documents come from members
that know the cluster secret, and are checked all the same: what does not parse is a `MessageError`.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..errors import MessageError
from ..transport import Peer

__all__ = [
    "VERSION",
    "Hello",
    "Kind",
    "Note",
    "Phase",
    "Report",
    "Request",
    "pack_relay",
    "place_of",
    "split_tag",
    "tag_of",
    "unpack_relay",
]

VERSION = 1
_NUMBER_BITS = 56
_RELAY = struct.Struct("<QQQ")
_Document = TypeVar("_Document")


class Kind(enum.IntEnum):
    """The kinds of messages, as the top byte of the tag."""

    UPDATE = 0  # number: step; payload: messages
    HELLO = (
        1  # who this node is and how far; to every peer that connects, and to all when that changes
    )
    NOTE = 2  # number: step; what a member adds to its update of this step; comes before it
    REPORT = 3  # which members are gone, and what this node has of them
    RELAY = 4  # a message of a member that is gone, passed on to those who missed it
    REQUEST = 5  # a newcomer asks for a snapshot
    SNAPSHOT = 6  # number: of the request; one part of the answer


class Phase(str, enum.Enum):
    """Where a node stands."""

    NEW = "new"  # training has not begun for it
    JOINING = "joining"  # it needs the parameters from a member
    READY = "ready"  # it has them and follows the members' steps, without contributing
    IN = "in"  # it is a member
    LEAVING = "leaving"  # it has sent its last update


Place = tuple[
    int, int
]  # id and incarnation: a Peer without its address, which differs from viewer to viewer


def tag_of(kind: Kind, number: int) -> int:
    """Return the transport's tag."""
    return kind << _NUMBER_BITS | number


def split_tag(tag: int) -> tuple[int, int]:
    """Return kind and number; the kind may be none that this version knows."""
    return tag >> _NUMBER_BITS, tag & ((1 << _NUMBER_BITS) - 1)


@dataclass(frozen=True)
class Hello:
    """Who a node is and how far it has come.

    Attributes:
        model: everything that has to be the same on all nodes, by name.
        phase: where it stands.
        step: of its next update.
        members: all members it knows, itself included, when it is one.
        fresh: from which step on the receiver of this gets all its updates.
        origin: the node that began the training it takes part in, once it does.
    """

    model: dict[str, Any]
    phase: Phase
    step: int
    members: tuple[Place, ...]
    fresh: int
    origin: Place

    def encode(self) -> bytes:
        """Return it as bytes."""
        return _to_json(asdict(self))

    @staticmethod
    def decode(payload: memoryview) -> Hello:
        """Return what the bytes say; raise `MessageError` if they are no hello."""
        return _decoded(
            payload,
            lambda found: Hello(
                dict(found["model"]),
                Phase(found["phase"]),
                int(found["step"]),
                tuple(map(_place, found["members"])),
                int(found["fresh"]),
                _place(found["origin"]),
            ),
        )

    @staticmethod
    def of_another_version(payload: memoryview) -> Hello:
        """Return what can be read of a greeting that ``decode`` refuses: at most which versions its sender has."""
        try:
            versions = json.loads(bytes(payload))["model"]["versions"]
        except (ValueError, TypeError, LookupError, RecursionError):
            versions = "that this one cannot read"
        return Hello({"versions": versions}, Phase.NEW, 0, (), 0, (0, 0))


@dataclass(frozen=True)
class Note:
    """What a member adds to its update of one step.

    Attributes:
        admits: ready nodes that it sees; one that all members see in the same step is a member from the next on.
        cut: number K: all are to compute a digest of the state with all updates below K and no others; or None.
        digest: (cut, digest), or None.
    """

    admits: tuple[Place, ...] = ()
    cut: int | None = None
    digest: tuple[int, str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.admits and self.cut is None and self.digest is None

    def encode(self) -> bytes:
        """Return it as bytes."""
        return _to_json(asdict(self))

    @staticmethod
    def decode(payload: memoryview) -> Note:
        """Return what the bytes say; raise `MessageError` if they are no note."""
        return _decoded(
            payload,
            lambda found: Note(
                tuple(map(_place, found["admits"])),
                None if found["cut"] is None else int(found["cut"]),
                (int(found["digest"][0]), str(found["digest"][1])) if found["digest"] else None,
            ),
        )


@dataclass(frozen=True)
class Report:
    """Which members are gone, for one member.

    Attributes:
        held: for each of them the number of the first update that the reporter has not got.
    """

    held: dict[Place, int]

    def encode(self) -> bytes:
        """Return it as bytes."""
        return _to_json([[*place, held] for place, held in sorted(self.held.items())])

    @staticmethod
    def decode(payload: memoryview) -> Report:
        """Return what the bytes say; raise `MessageError` if they are no report."""
        return _decoded(payload, lambda found: Report(_steps(found)))


@dataclass(frozen=True)
class Request:
    """What a newcomer tells the member that it wants a snapshot of.

    Attributes:
        fresh: for every member it knows, the first update that it will get itself: the snapshot has to hold all before.
    """

    fresh: dict[Place, int]

    def encode(self) -> bytes:
        """Return it as bytes."""
        return _to_json([[*place, step] for place, step in sorted(self.fresh.items())])

    @staticmethod
    def decode(payload: memoryview) -> Request:
        """Return what the bytes say; raise `MessageError` if they are no request."""
        return _decoded(payload, lambda found: Request(_steps(found)))


def pack_relay(place: Place, tag: int, payload: memoryview) -> bytes:
    """Return another node's message, to be passed on."""
    return _RELAY.pack(*place, tag) + bytes(payload)


def unpack_relay(payload: memoryview) -> tuple[Place, int, memoryview]:
    """Return sender, tag and payload of a message that was passed on; raise `MessageError` if it is none."""
    if len(payload) < _RELAY.size:
        raise MessageError(f"a relayed message of {len(payload)} bytes")
    node, run, tag = _RELAY.unpack_from(payload)
    return (node, run), tag, payload[_RELAY.size :]


def place_of(peer: Peer) -> Place:
    """Return what identifies a peer on the wire."""
    return peer.id, peer.incarnation


def _place(found: Any) -> Place:
    node, run = found
    return int(node), int(run)


def _steps(found: Iterable[Any]) -> dict[Place, int]:
    return {(int(node), int(run)): int(step) for node, run, step in found}


def _to_json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _decoded(payload: memoryview, read: Callable[[Any], _Document]) -> _Document:
    try:
        return read(json.loads(bytes(payload)))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MessageError(f"a control message that cannot be read: {error!r}") from error
