"""Everything that travels between exchanges, to and from bytes: kinds, tags, parts of updates, small JSON documents.

`Introductions` keeps what the connected nodes have said about themselves, and whether they train the same.

The top byte of a message's tag is the kind, the rest a number: for updates the step. The senders hold the cluster's
secret; bytes that do not parse raise `MessageError` all the same.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..agreement import Sketch
from ..errors import MessageError
from ..message import Message, parse_many
from ..slices import LEAST_SLICE_BYTES, SLICE_BYTES
from ..transport import Peer

__all__ = [
    "DROPPED",
    "MESSAGE_MAGIC",
    "STEP_S_MAX",
    "TAG_NUMBERS",
    "VERSIONS",
    "CountedUpdate",
    "Hello",
    "Introductions",
    "Kind",
    "NodeRun",
    "Note",
    "PartUpdate",
    "Phase",
    "decode_steps",
    "difference_of",
    "encode_steps",
    "pack_relay",
    "read_number",
    "read_run",
    "read_step",
    "read_steps",
    "run_of",
    "tag_of",
    "unpack_relay",
]

_LOG = logging.getLogger(__name__)

VERSIONS = [15, 1]  # of this protocol, and of docs/message-format.md

TAG_NUMBERS = 1 << 56  # ``divmod(tag, TAG_NUMBERS)`` is kind and number
_RELAY = struct.Struct("<QQQ")
# Why a connection without a goodbye has ended, by the transport's reason. Silence lasts ``Limits.down_s``, 10 s by
# default.
DROPPED = "has gone on without this node"
_SILENT = "is silent"
_REASONS = {
    "left": "crashed, or closed its node before leave()",
    "timeout": _SILENT,
    "dropped by the peer": DROPPED,
}
STEP_S_MAX = 86_400.0  # between two exchanges
_NAMED_MAX = 5
_NODES_MAX = 1 << 32
_LISTED_MAX = 4  # longer lists are described by their first difference
_Document = TypeVar("_Document")


class NodeRun(NamedTuple):
    """One run of one node: a `Peer` without the address, which depends on the viewer.

    Everything that exchanges keep about nodes, and tell each other about nodes, is under this identity.
    """

    id: int
    incarnation: int


class Kind(enum.IntEnum):
    """The kind of a message."""

    # The numbers are on the wire: a number is never used for another kind. A receiver ignores kinds that it does not
    # know.
    UPDATE = 0  # number: step
    HELLO = 1  # phase and step of the sender; to every new connection, and to all after a change
    NOTE = 2  # number: step; goes before the update of that step
    REPORT = 3  # departed members, and how many of their updates the sender has
    RELAY = 4  # a message of a departed member, for those that miss it
    REQUEST = 5  # asks for a snapshot
    SNAPSHOT = 6  # number: of the request; one part of the answer
    PART = 7  # number: step; the part of an update that its receiver owns
    SLICE = 8  # a slice of a message that is larger than a node takes at once


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
    """Return a peer's identity."""
    return NodeRun(peer.id, peer.incarnation)


# ---- updates ---------------------------------------------------------------------------------------------------------

_COUNT = struct.Struct("<Q")  # keeps the messages aligned


class CountedUpdate(list[Message]):
    """A whole update in the asynchronous exchange: a message for every group.

    Nodes that hear of a newcomer, or that one has gone, at different times still add the same.

    Attributes:
        nodes: number of nodes by which all divide the update where they take the mean, as its sender counts them.
    """

    def __init__(self, messages: Iterable[Message], nodes: int) -> None:
        super().__init__(messages)
        self.nodes = nodes

    @property
    def header(self) -> bytes:
        """What goes before the messages."""
        return _COUNT.pack(self.nodes)

    @staticmethod
    def parse(payload: memoryview) -> CountedUpdate:
        """Return the update in a payload; raise `MessageError` if the bytes are none."""
        nodes = int.from_bytes(payload[: _COUNT.size], "little")
        if not 0 < nodes < _NODES_MAX:
            raise MessageError(f"an asynchronous update that is to be divided by {nodes} nodes")
        return CountedUpdate(parse_many(payload[_COUNT.size :]), nodes)


# Number of parts, index of this one, number of senders that follow, whether the sender leaves.
_PART_HEADER = struct.Struct("<HHHH")
_PART_SENDER = struct.Struct("<QQ")
# A whole update has no header, it begins with a message. No header looks the same: "DW" as a place is larger than "GR"
# parts.
MESSAGE_MAGIC = b"GRDW"


class PartUpdate(list[Message]):
    """One part of an update in the sharded exchange: a message for every group of which the part has elements.

    Attributes:
        sender: the node that encoded the messages.
        step: the sender's step.
        parts: number of parts, 1 or more.
        place: index of the part; ``parts`` for the empty result of a node that owns nothing.
        missing: in an owner's result: the senders whose part of this step the result lacks.
        is_last: in a result: whether the sender leaves.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        sender: NodeRun,
        step: int,
        parts: int,
        place: int,
        missing: frozenset[NodeRun] = frozenset(),
        is_last: bool = False,
    ) -> None:
        super().__init__(messages)
        self.sender = sender
        self.step = step
        self.parts = parts
        self.place = place
        self.missing = missing
        self.is_last = is_last

    @property
    def nbytes(self) -> int:
        """Size of the messages."""
        return sum(message.nbytes for message in self)

    def pieces(self) -> list[Any]:
        """Return the bytes to send: what goes before the messages, and these."""
        # The senders are named only where a part is missing, so the header of a usual step has eight bytes.
        header = _PART_HEADER.pack(self.parts, self.place, len(self.missing), self.is_last)
        senders = [_PART_SENDER.pack(*run) for run in sorted(self.missing)]
        on_host = (each if isinstance(each, Message) else bytes(each) for each in self)
        return [b"".join([header, *senders]), *on_host]

    @staticmethod
    def parse(sender: NodeRun, step: int, payload: memoryview) -> PartUpdate:
        """Return the part in a payload; raise `MessageError` if the bytes are none."""
        try:
            parts, place, count, is_last = _PART_HEADER.unpack_from(payload)
            first_message = _PART_HEADER.size + count * _PART_SENDER.size
            senders = list(_PART_SENDER.iter_unpack(payload[_PART_HEADER.size : first_message]))
            # ``iter_unpack`` of a short payload yields fewer senders, or raises.
            if len(senders) < count or not parts or place > parts or is_last > 1:
                raise ValueError(f"part {place} of {parts}, {count} senders")
        except (struct.error, ValueError) as error:
            raise MessageError(f"a part of an update that cannot be read: {error}") from error
        missing = frozenset(NodeRun(*run) for run in senders)
        messages = parse_many(payload[first_message:])
        return PartUpdate(messages, sender, step, parts, place, missing, bool(is_last))


# ---- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A node's introduction.

    Attributes:
        signature: the sender's run signature.
        phase: of the sender.
        step: number of the sender's next update.
        members: all members, the sender included; of a node that is new or joins: those that it sees.
        first_step: number of the sender's first update as a member.
        first_direct: first update that the receiver gets from the sender directly; it gets none if a member names it
            neither in ``members`` nor in ``sees``.
        origin: the node that began the training.
        role: of the sender.
        start: digests of the sender's initial parameters and of its initial residual; empty: unknown, or none.
        is_sharded: whether the training is sharded; None if the sender has not been a member.
        team: number of workers on the sender's machine, and the number of them whose mean an update is: 1 for a sum.
        training: the identity of the sender's training; empty before the first one begins.
        is_confirmed: whether the sender has finished a step of that training, or comes from a checkpoint of it.
        step_s: time between the sender's last exchanges; 0: there were none.
        slice_bytes: size of the largest message of the transport that the sender takes.
        excluded: nodes whose messages the sender takes no more, each with the reason.
        sees: of a new node: the other new nodes that it sees; of a member: the nodes outside that get its updates.
    """

    signature: dict[str, Any]
    phase: Phase
    step: int
    members: tuple[NodeRun, ...]
    first_step: int
    first_direct: int
    origin: NodeRun
    role: str = "member"
    start: tuple[str, str] = ("", "")
    is_sharded: bool | None = None
    team: tuple[int, int] = (1, 1)
    training: str = ""
    is_confirmed: bool = False
    step_s: float = 0.0
    slice_bytes: int = SLICE_BYTES
    excluded: tuple[tuple[NodeRun, str], ...] = ()
    sees: tuple[NodeRun, ...] = ()

    def serves(self, run: NodeRun) -> bool:
        """Return whether the sender, a member, sends its updates to a node."""
        return run in self.members or run in self.sees

    def encode(self) -> bytes:
        """Return the document as bytes."""
        return _to_json(vars(self))

    @staticmethod
    def decode(payload: memoryview) -> Hello:
        """Return the document; raise `MessageError` if the bytes are none."""
        return _decoded(
            payload,
            lambda document: Hello(
                _read_signature(document["signature"]),
                Phase(document["phase"]),
                read_step(document["step"]),
                tuple(map(read_run, document["members"])),
                read_step(document["first_step"]),
                read_step(document["first_direct"]),
                read_run(document["origin"]),
                str(document["role"]),
                (str(document["start"][0]), str(document["start"][1])),
                None if document["is_sharded"] is None else bool(document["is_sharded"]),
                _read_team(document["team"]),
                str(document["training"]),
                bool(document["is_confirmed"]),
                _read_seconds(document["step_s"]),
                _read_slice_bytes(document["slice_bytes"]),
                tuple((read_run(run), str(reason)) for run, reason in document["excluded"]),
                tuple(map(read_run, document["sees"])),
            ),
        )

    @staticmethod
    def begins_anew(payload: memoryview) -> bool:
        """Return whether the sender of an introduction has not begun to train with the exchange that sent it."""
        try:
            return Hello.decode(payload).phase is Phase.NEW
        except MessageError:
            return False

    @staticmethod
    def of_another_version(payload: memoryview) -> Hello:
        """Return as much of an unreadable introduction as possible: the sender's versions."""
        try:
            versions = json.loads(bytes(payload))["signature"]["versions"]
        except (ValueError, TypeError, LookupError, RecursionError):
            versions = "unreadable"
        return Hello({"versions": versions}, Phase.NEW, 0, (), 0, 0, NodeRun(0, 0))


@dataclass(frozen=True)
class Note:
    """An addition to the sender's update of one step.

    Attributes:
        admits: ready newcomers that the sender sees; those that all members see in the same step become members.
        workers: those of them that own no parameters.
        comparison: number of the step before which all replicas are compared; or None.
        digest: (comparison, digest of the sender's replica then), or None.
        sketch: of the update; or None.
        norm: of the update before it was shortened; or None.
        written: digest of the parameters that the sender's caller has written before this step; empty: none.
    """

    admits: tuple[NodeRun, ...] = ()
    workers: tuple[NodeRun, ...] = ()
    comparison: int | None = None
    digest: tuple[int, str] | None = None
    sketch: Sketch | None = None
    norm: float | None = None
    written: str = ""

    @property
    def tells_of_update(self) -> bool:
        """Whether the note says how the update is to be compared with the other nodes'."""
        return self.sketch is not None or self.norm is not None

    def encode(self) -> bytes:
        """Return the document as bytes."""
        document = vars(self)
        if self.sketch is not None:
            document = {**document, "sketch": self.sketch.encode()}
        return _to_json(document)

    @staticmethod
    def decode(payload: memoryview) -> Note:
        """Return the document; raise `MessageError` if the bytes are none."""
        return _decoded(
            payload,
            lambda document: Note(
                tuple(map(read_run, document["admits"])),
                tuple(map(read_run, document["workers"])),
                None if document["comparison"] is None else read_step(document["comparison"]),
                (read_step(document["digest"][0]), str(document["digest"][1]))
                if document["digest"]
                else None,
                None if document["sketch"] is None else Sketch.decode(document["sketch"]),
                None if document["norm"] is None else _read_norm(document["norm"]),
                str(document["written"]),
            ),
        )


def encode_steps(steps: Mapping[NodeRun, int]) -> bytes:
    """Return a step for each of several nodes as bytes: a report."""
    return _to_json([[*run, step] for run, step in sorted(steps.items())])


def decode_steps(payload: memoryview) -> dict[NodeRun, int]:
    """Return the steps by node; raise `MessageError` if the bytes are no such document."""
    return _decoded(payload, read_steps)


def pack_relay(sender: NodeRun, tag: int, payload: memoryview) -> bytes:
    """Return another node's message in an envelope."""
    return _RELAY.pack(*sender, tag) + bytes(payload)


def unpack_relay(payload: memoryview) -> tuple[NodeRun, int, memoryview]:
    """Return sender, tag and payload of a relayed message; raise `MessageError` if the bytes are none."""
    if len(payload) < _RELAY.size:
        raise MessageError(f"a relayed message of {len(payload)} bytes")
    node, incarnation, tag = _RELAY.unpack_from(payload)
    return NodeRun(node, incarnation), tag, payload[_RELAY.size :]


def _read_signature(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):  # pairs would have other names than texts
        raise TypeError(f"a signature that is no object: {value!r:.40}")
    return value


def _read_seconds(value: Any) -> float:
    seconds = float(value)
    if not 0.0 <= seconds <= STEP_S_MAX:  # refuses NaN, too
        raise ValueError(f"{value!r:.40} seconds")
    return seconds


def read_number(value: Any, limit: int = 1 << 64) -> int:
    """Return a number of a document; raise `ValueError` unless it is an int below the limit, and not negative."""
    # JSON has numbers of any size, and Python's also infinite ones.
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.40}, where a number below {limit} belongs")
    return value


def read_step(value: Any) -> int:
    """Return the number of a step in a document; raise `ValueError` if it is none."""
    return read_number(value, TAG_NUMBERS)


def read_run(entry: Any) -> NodeRun:
    """Return a node's run in a document; raise `ValueError` or `TypeError` if it is none."""
    node, incarnation = entry
    return NodeRun(read_number(node), read_number(incarnation))


def read_steps(entries: Any) -> dict[NodeRun, int]:
    """Return steps by node in a document; raise `ValueError` or `TypeError` if they are none."""
    return {read_run((node, incarnation)): read_step(step) for node, incarnation, step in entries}


def _read_slice_bytes(value: Any) -> int:
    nbytes = read_number(value)
    if nbytes < LEAST_SLICE_BYTES:
        raise ValueError(f"slices of {nbytes} bytes")
    return nbytes


def _read_norm(value: Any) -> float:
    norm = float(value)
    if not 0.0 <= norm < math.inf:
        raise ValueError(f"a norm of {norm}")
    return norm


def _read_team(entry: Any) -> tuple[int, int]:
    workers, averaged = map(int, entry)
    if not 1 <= averaged <= workers:
        raise ValueError(f"a mean of {averaged} of {workers} workers")
    return workers, averaged


def _to_json(document: Any) -> bytes:
    # JSON, because these messages are rare and small, and a log or a debugger shows what they say.
    return json.dumps(document, separators=(",", ":")).encode()


def _decoded(payload: memoryview, read: Callable[[Any], _Document]) -> _Document:
    try:
        return read(json.loads(bytes(payload)))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise MessageError(f"a control message that cannot be read: {error!r}") from error


# ---- run signatures --------------------------------------------------------------------------------------------------


def difference_of(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Describe how two run signatures differ; empty if they do not.

    A run signature is everything that has to be the same on all nodes, by name, as JSON values. Between different
    versions nothing else is compared. The parameters' dtypes and shapes are None before the caller passes them in; None
    matches any others.
    """
    # Nodes of another version may describe everything differently, so only the versions would be news to the user.
    names = sorted({*ours, *theirs})
    if ours["versions"] != theirs.get("versions"):
        names = ["versions"]
    pairs = [(name, theirs.get(name), ours.get(name)) for name in names]
    texts = [
        _describe_difference(name, there, here)
        for name, there, here in pairs
        if there != here and not (name == "params" and None in (there, here))
    ]
    if len(texts) == 1 and texts[0].startswith("groups"):
        texts.append("so densities, frozen parameters or the optimiser's parameter groups differ")
    return ", ".join(texts)


def _describe_difference(name: str, there: Any, here: Any) -> str:
    are_lists = isinstance(there, list) and isinstance(here, list)
    if not are_lists or max(len(there), len(here)) <= _LISTED_MAX:
        return f"{name} {there} there, {here} here"
    if len(there) != len(here):
        return f"{len(there)} {name} there, {len(here)} here"
    index = next(
        index
        for index, (theirs, ours) in enumerate(zip(there, here, strict=True))
        if theirs != ours
    )
    return f"{name}[{index}] {there[index]} there, {here[index]} here"


# ---- what nodes have said about themselves ---------------------------------------------------------------------------


class Introductions:
    """What connected nodes have said about themselves, and whether they train the same.

    Args:
        me: this node.
        names: of nodes by their ids, for messages.
        signature: this node's run signature.
        role: of this node.
        slice_bytes: size of the largest message of the transport that this node takes.

    Attributes:
        slice_bytes: as given.
        signature: as given, with the parameters' dtypes and shapes once they are known.
        start: digests of the initial parameters and of the initial residual, see `Hello`.
        workers: the nodes that own no parameters in the sharded exchange.
        hellos: the latest introduction of every connected node.
        incompatible: the nodes among them that train something else, and how they differ.
        teams: of this node and of those that have introduced themselves, see `Hello`.
        training: identity of this node's training, see `Hello`.
        is_confirmed: as there.
        left_training: identity of the training that this node has left without a finished step; or empty.
        superseded: the reason why this node must not go on: its run was started again without it; or empty.
        interrupted: nodes of which a connection has ended.
    """

    def __init__(
        self,
        me: Peer,
        names: Mapping[int, str],
        signature: dict[str, Any],
        role: str,
        slice_bytes: int,
    ) -> None:
        self.signature = signature
        self.start = ("", "")
        self.hellos: dict[NodeRun, Hello] = {}
        self.incompatible: dict[NodeRun, str] = {}
        self._run = run_of(me)
        self._names = names
        self._ignored: list[Callable[[Hello], bool]] = []
        self._peers: dict[NodeRun, Peer] = {self._run: me}
        self._reasons: dict[NodeRun, str] = {}  # why connections ended
        self.workers: set[NodeRun] = {self._run} if role == "worker" else set()
        self.teams: dict[NodeRun, tuple[int, int]] = {self._run: (1, 1)}
        self.training = ""
        self.is_confirmed = False
        self.left_training = ""
        self.superseded = ""
        self.interrupted: set[NodeRun] = set()
        self._judge: Callable[[NodeRun, Hello], str] = lambda *_: ""
        self._excluded: dict[NodeRun, str] = {}
        self.slice_bytes = slice_bytes
        self._slice_bytes_of: dict[NodeRun, int] = {}

    # ---- identities --------------------------------------------------------------------------------------------------

    def register(self, peer: Peer) -> NodeRun:
        """Remember a node's address; return its identity."""
        run = run_of(peer)
        self._peers[run] = peer
        return run

    def peer_of(self, run: NodeRun) -> Peer:
        """Return a node, without its address if this node has never met it."""
        return self._peers.get(run) or Peer(*run, f"the node with id {run.id}")

    def name_of(self, run: NodeRun) -> str:
        """Return a node's rank, if that is known, and its address."""
        name = self._names.get(run.id)
        address = self.peer_of(run).address
        return f"{name} ({address})" if name else address

    def describe(self, runs: Iterable[NodeRun]) -> str:
        """Name several nodes."""
        return ", ".join(map(self.name_of, runs))

    def describe_departed(self, runs: Iterable[NodeRun] | None = None) -> str:
        """Name nodes that are gone, each with the reason; None: the last few whose connection ended."""
        # A long run has seen many go, and what this node waits for is due to the last of them.
        shown = list(reversed(self._reasons))[:_NAMED_MAX] if runs is None else runs
        names = [f"{self.name_of(run)} {self._reasons.get(run, 'is gone')}" for run in shown]
        if runs is None and len(self._reasons) > len(names):
            names[-1] += f", and {len(self._reasons) - len(names)} more"
        return ", ".join(names)

    def describe_missing(self) -> str:
        """Say why there are fewer members than a step needs."""
        if joining := sorted(self.compatible(Phase.JOINING)):
            # Members admit with a step, which these are too few to take.
            names = self.describe(joining)
            return f"{names} cannot join again without a step: start all nodes from checkpoints"
        return self.describe_departed() or "the run began with no more"

    def step_number(self, exchange: int) -> int:
        """Return the number of the step with which an exchange begins, as the caller counts: local steps count, too."""
        return exchange * int(self.signature["every"])

    def has_finished(self, run: NodeRun) -> bool:
        """Return whether a node has said that it leaves."""
        return self._reasons.get(run) == "finished"

    def note_finished(self, runs: Iterable[NodeRun]) -> None:
        """Note that nodes have said that they leave, of which others have told."""
        self._reasons.update(dict.fromkeys(runs, "finished"))

    def has_dropped(self, run: NodeRun) -> bool:
        """Return whether a node has ended the connection, because it heard nothing of this one for too long."""
        return self._reasons.get(run) == DROPPED

    def is_out_of_reach(self, run: NodeRun) -> bool:
        """Return whether the connection has ended although the node may run: one of the two has heard nothing."""
        return self._reasons.get(run) in (_SILENT, DROPPED)

    def add_workers(self, runs: Iterable[NodeRun]) -> None:
        """Remember nodes that own no parameters, of which other nodes have said so."""
        self.workers.update(runs)

    def set_team(self, team: tuple[int, int]) -> bool:
        """Note the workers of this node's machine, see `Hello`; return whether they are others than before."""
        is_new = self.teams[self._run] != team
        self.teams[self._run] = team
        return is_new

    def common_slice_bytes(self, runs: Iterable[NodeRun]) -> int:
        """Return the size of the largest message of the transport that these nodes and this one take."""
        known = self._slice_bytes_of
        return min([self.slice_bytes, *[known[run] for run in runs if run in known]])

    # ---- trainings ---------------------------------------------------------------------------------------------------

    def set_judge(self, judge: Callable[[NodeRun, Hello], str]) -> None:
        """Ask a function of every introduction why its sender takes part in another training; empty: it does not."""
        self._judge = judge

    def take_part(self, training: str, *, is_confirmed: bool) -> None:
        """Take part in a training from now on; empty: in none yet."""
        self.training = training
        self.is_confirmed = is_confirmed
        self.compare_all()

    def leave_training(self) -> None:
        """Be free to take part in another training, unless a step of this one is finished."""
        if self.training and not self.is_confirmed:
            self.left_training = self.training
            self.take_part("", is_confirmed=False)

    def confirm(self) -> None:
        """Note that a step of the training is finished: from now on this node takes part in no other."""
        self.is_confirmed = True

    def give_up(self) -> None:
        """Note that another training goes on instead of this node's, even if steps of it are finished."""
        self.is_confirmed = False

    def supersede(self, reason: str) -> None:
        """Note why this node must not go on."""
        self.superseded = self.superseded or reason

    def is_replaced(self, run: NodeRun) -> bool:
        """Return whether a later run of the same node is here."""
        others = (self._run, *self.hellos)
        return any(run.id == other.id and run < other for other in others)

    # ---- introductions -----------------------------------------------------------------------------------------------

    def read(self, run: NodeRun, payload: memoryview) -> tuple[Hello, Hello | None]:
        """Keep a node's introduction; return it and the one before, None if that was incompatible."""
        try:
            hello = Hello.decode(payload)
        except MessageError:
            # An introduction that cannot be read still has a version, which tells the user what is wrong.
            hello = Hello.of_another_version(payload)
        before = None if run in self.incompatible else self.hellos.get(run)
        self.hellos[run] = hello
        self.teams[run] = hello.team
        self._slice_bytes_of[run] = hello.slice_bytes
        if hello.role == "worker":
            self.workers.add(run)
        if hello.phase is Phase.LEAVING:
            self._reasons[run] = "finished"
        elif before is None:
            self._reasons.pop(run, None)  # the node is back
        self._compare(run, hello)
        return hello, before

    def set_params(self, layout: list[list[object]], start: tuple[str, str]) -> bool:
        """Add the dtypes and shapes of the parameters to the signature; return whether anything has changed."""
        if (self.signature["params"], self.start) == (layout, start):
            return False
        self.start = start
        self.signature["params"] = layout
        self.compare_all()
        return True

    def compatible(self, phase: Phase | None = None) -> dict[NodeRun, Hello]:
        """Return the introductions of nodes that train the same, without observers: of all, or of those in a phase."""
        return {
            run: hello
            for run, hello in self.hellos.items()
            if phase in (None, hello.phase)
            and run not in self.incompatible
            and hello.role != "observer"
        }

    @property
    def observers(self) -> list[NodeRun]:
        """The connected observers, which follow a training and begin none."""
        return sorted(run for run, hello in self.hellos.items() if hello.role == "observer")

    def ignore(self, is_of_former: Callable[[Hello], bool]) -> None:
        """Take nodes for incompatible while their introductions are of a training that has ended here."""
        self._ignored.append(is_of_former)

    def _is_ignored(self, hello: Hello) -> bool:
        return any(is_of_former(hello) for is_of_former in self._ignored)

    @property
    def excluded(self) -> tuple[tuple[NodeRun, str], ...]:
        """The connected nodes whose messages this node takes no more, each with the reason."""
        connected = self._excluded.keys() & self.hellos.keys()
        return tuple((run, self._excluded[run]) for run in sorted(connected))

    def is_excluded(self, run: NodeRun) -> bool:
        """Return whether this node takes no more messages of a node."""
        return run in self._excluded

    def excludes_this_node(self, run: NodeRun) -> bool:
        """Return whether a node has said that it takes no more messages of this one."""
        return run in self.hellos and self._run in dict(self.hellos[run].excluded)

    @property
    def misfits(self) -> int:
        """Number of connected nodes that train something else; those that end an earlier training do not count."""
        return sum(not self._is_ignored(self.hellos[run]) for run in self.incompatible)

    def fits_nobody(self, departed: Collection[NodeRun]) -> bool:
        """Return whether all nodes that this one has met train something else, one that was a member among them."""
        # Where this node is alone, it is the wrong one: the others have parted with it, and perhaps with each other.
        members = {run for run in self.incompatible if self.hellos[run].phase is Phase.IN}
        return (
            not self.compatible()
            and self.interrupted <= self.incompatible.keys()
            and any(run in departed and not self.has_finished(run) for run in members)
        )

    def exclude(self, run: NodeRun, reason: str) -> None:
        """Take a node for incompatible until its process is started again."""
        self._excluded[run] = reason
        self._reasons[run] = f"was excluded: {reason}"
        if run in self.hellos:  # it may be gone already
            self._compare(run, self.hellos[run])

    def describe_incompatible(self) -> str:
        """Describe the connected nodes that train something else; of many the first few."""
        texts = [text for _, text in sorted(self.incompatible.items())]
        if len(texts) > _NAMED_MAX:  # as many as all others, where this node is the wrong one
            texts[_NAMED_MAX:] = [f"{len(texts) - _NAMED_MAX} more do not fit either"]
        return "; ".join(texts)

    def forget(self, run: NodeRun, reason: str | None) -> None:
        """Forget what was said on a connection that has ended: the next one begins with an introduction."""
        if reason is not None:
            self.interrupted.add(run)
            self._reasons.setdefault(run, _REASONS.get(reason, f"is gone: {reason}"))
        self.hellos.pop(run, None)
        self.incompatible.pop(run, None)

    def compare_all(self) -> None:
        """Compare all introductions with this node again, which has changed."""
        for run, hello in self.hellos.items():
            self._compare(run, hello)

    def _compare(self, run: NodeRun, hello: Hello) -> None:
        before = self.incompatible.pop(run, None)
        # The next training of the same processes: this one is ahead, and must not join the one that it has finished.
        if self._is_ignored(hello):
            text = (
                f"{self.name_of(run)} still takes part in a training that this process has finished"
            )
            self.incompatible[run] = text
            if before is None:
                _LOG.info("%s; this node waits for it", text)
            return
        difference = self._excluded.get(run) or difference_of(hello.signature, self.signature)
        if not difference and self.excludes_this_node(run):
            reason = dict(hello.excluded)[self._run]
            difference = f"it takes no more messages of this node: {reason}"
        difference = difference or self._judge(run, hello)
        if difference:
            there = self.peer_of(run).address
            here = self.peer_of(self._run).address
            text = f"{there} and this node ({here}) do not fit: {difference}"
            self.incompatible[run] = text
            if before is None and self._begins_next(run):
                _LOG.info(
                    "%s has finished this training, and begins another one (%s)",
                    self.name_of(run),
                    difference,
                )
            elif before is None:
                _LOG.warning("%s; its messages are ignored", text)

    def _begins_next(self, run: NodeRun) -> bool:
        """Return whether an earlier run of a node has finished this training: its process may be ahead in a sweep."""
        earlier = (other for other in self._reasons if other.id == run.id and other < run)
        return any(map(self.has_finished, earlier))
