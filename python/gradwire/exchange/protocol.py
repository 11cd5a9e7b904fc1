"""Messages between exchanges besides updates: kinds, tags and small JSON documents.

The top byte of a message's tag is the kind, the rest a number: for updates the step. The senders hold the cluster's
secret; documents that do not parse raise `MessageError` all the same.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..errors import MessageError
from ..transport import Peer

__all__ = [
    "TAG_NUMBERS",
    "VERSIONS",
    "Hello",
    "Kind",
    "NodeRun",
    "Note",
    "Phase",
    "decode_steps",
    "difference_of",
    "encode_steps",
    "pack_relay",
    "run_of",
    "tag_of",
    "unpack_relay",
]

VERSIONS = [4, 1]  # of this protocol, and of docs/message-format.md

TAG_NUMBERS = 1 << 56  # ``divmod(tag, TAG_NUMBERS)`` is kind and number
_RELAY = struct.Struct("<QQQ")
_LISTED_MAX = 4  # longer lists are described by their first difference
_Document = TypeVar("_Document")

NodeRun = tuple[
    int, int
]  # id and incarnation: a Peer without the address, which depends on the viewer


class Kind(enum.IntEnum):
    """The kind of a message."""

    UPDATE = 0  # number: step
    HELLO = 1  # phase and step of the sender; to every new connection, and to all after a change
    NOTE = 2  # number: step; goes before the update of that step
    REPORT = 3  # departed members, and how many of their updates the sender has
    RELAY = 4  # a message of a departed member, for those that miss it
    REQUEST = 5  # asks for a snapshot
    SNAPSHOT = 6  # number: of the request; one part of the answer
    PART = 7  # number: step; the part of an update that its receiver owns


class Phase(str, enum.Enum):
    """A node's relation to the training."""

    NEW = "new"  # not begun
    JOINING = "joining"  # needs the parameters from a member
    READY = "ready"  # has the parameters, and follows the members' steps without contributing
    IN = "in"  # a member
    LEAVING = "leaving"  # has sent its last update


def tag_of(kind: Kind, number: int) -> int:
    """Return the transport's tag."""
    return kind * TAG_NUMBERS + number


def run_of(peer: Peer) -> NodeRun:
    """Return a peer's identity on the wire."""
    return peer.id, peer.incarnation


# ---- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A node's introduction.

    Attributes:
        signature: the sender's run signature.
        phase: of the sender.
        step: number of the sender's next update.
        members: all members, the sender included; empty unless the sender is a member.
        first: number of the sender's first update as a member.
        fresh: first update that the receiver gets from the sender directly.
        origin: the node that began the training.
        role: of the sender.
        start: digests of the sender's initial parameters and of its initial residual; empty: unknown, or none.
    """

    signature: dict[str, Any]
    phase: Phase
    step: int
    members: tuple[NodeRun, ...]
    first: int
    fresh: int
    origin: NodeRun
    role: str = "member"
    start: tuple[str, str] = ("", "")

    def encode(self) -> bytes:
        """Return the document as bytes."""
        return _to_json(asdict(self))

    @staticmethod
    def decode(payload: memoryview) -> Hello:
        """Return the document; raise `MessageError` if the bytes are none."""
        return _decoded(
            payload,
            lambda found: Hello(
                dict(found["signature"]),
                Phase(found["phase"]),
                int(found["step"]),
                tuple(map(_run, found["members"])),
                int(found["first"]),
                int(found["fresh"]),
                _run(found["origin"]),
                str(found["role"]),
                (str(found["start"][0]), str(found["start"][1])),
            ),
        )

    @staticmethod
    def of_another_version(payload: memoryview) -> Hello:
        """Return as much of an unreadable introduction as possible: the sender's versions."""
        try:
            versions = json.loads(bytes(payload))["signature"]["versions"]
        except (ValueError, TypeError, LookupError, RecursionError):
            versions = "unreadable"
        return Hello({"versions": versions}, Phase.NEW, 0, (), 0, 0, (0, 0))


@dataclass(frozen=True)
class Note:
    """An addition to the sender's update of one step.

    Attributes:
        admits: ready newcomers that the sender sees; those that all members see in the same step become members.
        roles: of those of them that are not of the usual role.
        cut: step K of the next comparison: the state with all updates below K and no others; or None.
        digest: (cut, digest), or None.
        wants_switch: whether the sender's last steps say that those of the other topology would be shorter.
    """

    admits: tuple[NodeRun, ...] = ()
    roles: tuple[tuple[int, int, str], ...] = ()
    cut: int | None = None
    digest: tuple[int, str] | None = None
    wants_switch: bool = False

    def encode(self) -> bytes:
        """Return the document as bytes."""
        return _to_json(asdict(self))

    @staticmethod
    def decode(payload: memoryview) -> Note:
        """Return the document; raise `MessageError` if the bytes are none."""
        return _decoded(
            payload,
            lambda found: Note(
                tuple(map(_run, found["admits"])),
                tuple((int(node), int(run), str(role)) for node, run, role in found["roles"]),
                None if found["cut"] is None else int(found["cut"]),
                (int(found["digest"][0]), str(found["digest"][1])) if found["digest"] else None,
                bool(found["wants_switch"]),
            ),
        )


def encode_steps(steps: Mapping[NodeRun, int]) -> bytes:
    """Return a report or a request as bytes: a step for each of several nodes.

    A report has for every departed member the first update that the sender lacks; a request has for every member the
    first update that the sender gets directly.
    """
    return _to_json([[*run, step] for run, step in sorted(steps.items())])


def decode_steps(payload: memoryview) -> dict[NodeRun, int]:
    """Return the steps by node; raise `MessageError` if the bytes are no such document."""
    return _decoded(
        payload, lambda found: {(int(node), int(run)): int(step) for node, run, step in found}
    )


def pack_relay(sender: NodeRun, tag: int, payload: memoryview) -> bytes:
    """Return another node's message in an envelope."""
    return _RELAY.pack(*sender, tag) + bytes(payload)


def unpack_relay(payload: memoryview) -> tuple[NodeRun, int, memoryview]:
    """Return sender, tag and payload of a relayed message; raise `MessageError` if the bytes are none."""
    if len(payload) < _RELAY.size:
        raise MessageError(f"a relayed message of {len(payload)} bytes")
    node, run, tag = _RELAY.unpack_from(payload)
    return (node, run), tag, payload[_RELAY.size :]


def _run(found: Any) -> NodeRun:
    node, run = found
    return int(node), int(run)


def _to_json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _decoded(payload: memoryview, read: Callable[[Any], _Document]) -> _Document:
    try:
        return read(json.loads(bytes(payload)))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MessageError(f"a control message that cannot be read: {error!r}") from error


# ---- run signatures --------------------------------------------------------------------------------------------------


def difference_of(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe how two run signatures differ; empty if they do not.

    A run signature is everything that has to be the same on all nodes, by name, as JSON values. Between different
    versions nothing else is compared. The parameters' dtypes and shapes are None before the caller passes them in; None
    matches any others.
    """
    names = sorted({*own, *theirs})
    if own["versions"] != theirs.get("versions"):
        names = ["versions"]
    pairs = [(name, theirs.get(name), own.get(name)) for name in names]
    return ", ".join(
        _described(name, there, here)
        for name, there, here in pairs
        if there != here and not (name == "params" and None in (there, here))
    )


def _described(name: str, there: Any, here: Any) -> str:
    are_lists = isinstance(there, list) and isinstance(here, list)
    if not are_lists or max(len(there), len(here)) <= _LISTED_MAX:
        return f"{name} {there} there, {here} here"
    if len(there) != len(here):
        return f"{len(there)} {name} there, {len(here)} here"
    index = next(
        at for at, (one, other) in enumerate(zip(there, here, strict=True)) if one != other
    )
    return f"{name}[{index}] {there[index]} there, {here[index]} here"
