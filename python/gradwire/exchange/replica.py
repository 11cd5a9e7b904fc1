"""One node's replica: its updates, whole or in parts for the owners of parameters, and the sums of all nodes' updates.

In the mesh a node sends its whole update to everybody. In the sharded exchange the parameters are dealt to owners, and
every node sends each owner its part of the update. A node's message to everybody is then its result as an owner: the
mean of the parts that it was sent, added to a residual of its own, encoded once. Membership, relays and agreements are
the same for both.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..arrays import device_of
from ..codec import Encoder
from ..errors import GradwireError, MessageError
from ..message import Message, apply, apply_many, dense_message, parse_many
from ..partition import Part, Partition
from ..transport import Peer, Ticket
from .descent import Descent, Handover, Place
from .groups import Codec, Group, Groups, host_message
from .options import Options
from .parameters import (
    Arrays,
    MomentumSum,
    Payloads,
    PlainSum,
    SecondTarget,
    SharedCopy,
    Taken,
    TakenParts,
    add,
    copies,
    difference,
    gathered,
    owner_arrays,
    put,
    writable_views,
    zeros_like,
)
from .results import StepResult

__all__ = ["OwnUpdate", "Piece", "Replica"]

# parts, index, number of entries, twice the number of handovers + whether this is the last
_HEAD = struct.Struct("<HHHH")
_MAGIC = b"GRDW"  # of a message. No head is the same: as an index, "DW" is larger than "GR" parts.
# id and incarnation of a sender, first part taken, first part not taken
_ENTRY = struct.Struct("<QQQQ")
_HANDOVER = struct.Struct("<HHHH")  # both parts

# With topology="auto": fewer nodes and smaller models gain less than one more round trip costs, except behind links so
# slow that the members see it in so many steps; docs/exchange.md.
SHARDED_FROM = 5
SHARDED_ELEMENTS = 500_000
JUDGED_STEPS = 20
_PROCESSING_S = 0.5e-3  # of a sharded step more than of one in the mesh, for each node


class Piece(list[Message]):
    """One part of an update: a message for every group of which the part has elements.

    Attributes:
        sender: the node that encoded them.
        number: the sender's step.
        parts: number of parts of the update; 0: a whole update, for everybody, as in the mesh.
        at: index of the part; ``parts`` for the empty result of a node that owns nothing.
        taken: in an owner's result, by sender: the steps of the first and after the last part that the result contains.
            Earlier parts are lost. Synchronous results name only the senders whose part of the step is missing.
        is_last: in a result: whether the sender leaves.
        handovers: residual and state of elements that the receiver owns from this step on; in the last result of an
            owner that leaves, of elements that others own from the next step on.
    """

    def __init__(
        self, messages: Iterable[Message], sender: Peer, number: int, parts: int, at: int
    ) -> None:
        super().__init__(messages)
        self.sender, self.number, self.parts, self.at = sender, number, parts, at
        self.taken: dict[Peer, tuple[int, int]] = {}
        self.is_last = False
        self.handovers: list[Handover] = []

    @property
    def nbytes(self) -> int:
        """Size of the messages."""
        return sum(message.nbytes for message in (*self, *self._handed_over()))

    def _handed_over(self) -> Iterator[Message]:
        return (message for one in self.handovers for message in one.messages)

    def pack(self) -> Message | bytes:
        """Return the bytes to send; a whole update has a head only if parts were taken or its sender leaves."""
        if not (self.parts or self.taken or self.is_last):
            return self[0] if len(self) == 1 else b"".join(map(bytes, self))
        last = 2 * len(self.handovers) + self.is_last
        head = _HEAD.pack(self.parts, self.at, len(self.taken), last)
        entries = [_ENTRY.pack(one.id, one.incarnation, *at) for one, at in self.taken.items()]
        entries += [_HANDOVER.pack(*one.of, *one.to) for one in self.handovers]
        return b"".join([head, *entries, *map(bytes, self), *map(bytes, self._handed_over())])

    @staticmethod
    def parse(sender: Peer, number: int, payload: memoryview) -> Piece:
        """Return the piece in a payload, handovers' messages at the end; raise `MessageError` for other bytes."""
        if payload[: len(_MAGIC)] == _MAGIC:
            return Piece(parse_many(payload), sender, number, 0, 0)
        try:
            parts, index, count, last = _HEAD.unpack_from(payload)
            stop = _HEAD.size + count * _ENTRY.size
            start = stop + last // 2 * _HANDOVER.size
            entries = list(_ENTRY.iter_unpack(payload[_HEAD.size : stop]))
            places = list(_HANDOVER.iter_unpack(payload[stop:start]))
            if len(entries) < count or len(places) < last // 2 or index > parts:
                raise ValueError(f"part {index} of {parts}, {count} entries")
        except (struct.error, ValueError) as error:
            raise MessageError(f"a piece of an update that cannot be read: {error}") from error
        piece = Piece(parse_many(payload[start:]), sender, number, parts, index)
        piece.taken = {Peer(node, run, ""): (first, stop) for node, run, first, stop in entries}
        piece.is_last = bool(last % 2)
        piece.handovers = [Handover((a, b), (c, d), []) for a, b, c, d in places]
        return piece


@dataclass
class OwnUpdate:
    """This node's update of one step: encoded once, handed over once.

    Attributes:
        step: number of the step.
        parts: by owner; without owners the whole update, by this node.
        is_whole: whether there are no owners.
        owner: the part of the parameters that this node owns in this step.
        is_last: whether this node leaves with this step.
        messages: for everybody: this node's result as an owner, or the whole update.
        payload: these messages, as they are sent.
        unsent: parts for single nodes, which go before the payload, and have not been handed over.
        ticket: follows the payload to the peers; None until the transport has taken the payload.
        took: the parts that the result contains; None: not yet taken.
        numbers: see ``Piece.taken``.
        passed_on: parts of an earlier dealing, which went to this node's residual.
        scale: factor of the taken parts.
        params: the parameters that this node owns, of every group, for the optimiser.
        before: the owner's residuals and state before it took the parts.
        encode_s: time to encode the update.
        wait_s: time spent so far on handing over the payload and on waiting for the other nodes' payloads.
    """

    step: int
    parts: dict[Peer, Piece]
    is_whole: bool = False
    owner: Owner | None = None
    is_last: bool = False
    messages: list[Message] = field(default_factory=list)
    payload: Message | bytes = b""
    unsent: deque[tuple[Peer, bytes]] = field(default_factory=deque)
    ticket: Ticket | None = None
    took: list[Piece] | None = None
    numbers: dict[Peer, tuple[int, int]] = field(default_factory=dict)
    passed_on: list[Piece] = field(default_factory=list)
    scale: float = 1.0
    params: Arrays = field(default_factory=list)
    before: list[Arrays] | None = None
    encode_s: float = 0.0
    wait_s: float = 0.0

    @property
    def encoded(self) -> Sequence[Message]:
        """All messages of this node's update."""
        return [message for piece in self.parts.values() for message in piece]

    @property
    def nbytes(self) -> int:
        """Size of the parts for other owners and of the payload."""
        sent = sum(piece.nbytes for owner, piece in self.parts.items() if owner != piece.sender)
        return sent + sum(message.nbytes for message in self.messages)

    @property
    def taken(self) -> Sequence[Sequence[Message]]:
        """The parts of other nodes that the payload contains."""
        me = None if self.owner is None else self.owner.me
        return [piece for piece in self.took or () if piece.sender != me]


@dataclass(slots=True)
class SentPart:
    """A part that this node has sent to an owner, or keeps because it is the owner.

    Attributes:
        piece: the part.
        is_open: whether its owner may still take it.
        is_back: whether it is in the residual again.
    """

    piece: Piece
    is_open: bool = True
    is_back: bool = False


class Owner:
    """The part of the parameters that this node owns, with a residual of sums that were not published yet.

    Attributes:
        me: this node.
        parts: number of parts.
        at: number of this node's part.
        groups: encoders of those groups of which the part has elements.
        arrays: for each of them the residual and the optimiser's state.
    """

    def __init__(
        self,
        whole: Groups,
        shares: Shares,
        me: Peer,
        parts: int,
        at: int,
        step: int,
        descent: Descent | None = None,
    ) -> None:
        self.me, self.parts, self.at = me, parts, at
        owned = []
        for index, part in shares.of(parts, at):
            encoder = _owner_encoder(whole.encoders[index], part.numel, step)
            owned.append(Group(encoder, is_dense=whole.groups[index].is_dense))
        self.groups = Groups(owned)
        states: list[Arrays] = [[] for _ in owned] if descent is None else descent.zeros(self.place)
        self.arrays = [
            [one.residual, *state[1:]] for one, state in zip(self.encoders, states, strict=True)
        ]

    @property
    def place(self) -> Place:
        """The part."""
        return self.parts, self.at

    @property
    def encoders(self) -> Sequence[Encoder]:
        """The encoders of the part."""
        return self.groups.encoders

    def add_pieces(self, pieces: Sequence[Piece], scale: float) -> None:
        """Add parts of updates, times a factor, to the residual."""
        for index, encoder in enumerate(self.encoders):
            messages = [piece[index] for piece in pieces]
            apply_many(messages, encoder.residual, scale, threads=encoder.threads)

    def undo_update(self, own: OwnUpdate) -> None:
        """Undo an update that nobody has applied: the nodes have put their parts back."""
        self.groups.put_back(own.messages)
        self.add_pieces(own.took or [], -own.scale)

    def as_piece(self) -> Piece:
        """Return the residual as dense messages, and clear it."""
        messages = [dense_message(one.residual, key=one.key) for one in self.encoders]
        for encoder in self.encoders:
            encoder.residual[...] = 0.0
        return Piece(messages, self.me, 0, self.parts, self.at)


def _described(sizes: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{numel} elements in group {key}" for key, numel in sizes) or "nothing"


def _owner_encoder(like: Encoder, numel: int, step: int) -> Encoder:
    """Return an encoder for an owner's share of a group, with the nodes' policy."""
    # An overflow of the sum must not stop all nodes, of which none could repair it.
    made = Encoder(
        numel, like.policy, like.shakeup, None, like.dtype, "cpu", like.key, "skip", like.threads
    )
    made.load_state_dict({**made.state_dict(), "step": step, "changed_at": step})
    return made


class Shares:
    """The division of every group into a number of parts."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._found: dict[tuple[int, int], list[tuple[int, Part]]] = {}

    def partitions(self, parts: int) -> list[Partition]:
        """Return the partition of each group; small groups, which have few blocks, begin at different parts."""
        encoders = enumerate(self._groups.encoders)
        return [Partition(one.numel, parts, first=index % parts) for index, one in encoders]

    def of(self, parts: int, at: int) -> list[tuple[int, Part]]:
        """Return index and elements of every group of which a part has elements."""
        if (parts, at) not in self._found:
            wholes = self.partitions(parts or 1) if at < (parts or 1) else []
            found = [(index, whole[at]) for index, whole in enumerate(wholes)]
            self._found[parts, at] = [one for one in found if one[1].numel]
        return self._found[parts, at]


class Replica(SharedCopy):
    """Everything that this node's next step depends on, besides the other nodes.

    Updates go to their owners in parts, or whole to everybody: always in the mesh, and with ``topology="auto"`` while
    that costs less. Every number is a step of its sender. A part is kept until a result says that its owner has taken
    it, and is put back into the residual when it turns out that the owner never will.

    Attributes:
        me: this node.
        step: number of the next step, or of the unfinished one.
        pending: the update of an unfinished step.
        sent: the updates of the last finished steps, which peers may not have yet.
        senders: the nodes that take part in the next step.
        roles: of the nodes, where it is not that of a member.
        taken: by owner and sender: the sender's parts that the owner had taken, where that is not obvious.
        slots: values of state for each element where owners have an optimiser; None: they have none.
        has_slow_links: whether steps are sharded because all members have said that they would be shorter.
    """

    def __init__(self, groups: Groups, total: PlainSum, me: Peer, options: Options) -> None:
        super().__init__(groups, total, applies_residual=options.apply_residual)
        self.me = me
        self.step = max(encoder.step for encoder in groups.encoders)
        self.pending: OwnUpdate | None = None
        self.sent: deque[OwnUpdate] = deque(maxlen=options.kept_updates)
        self.senders: tuple[Peer, ...] = ()
        self.roles: dict[Peer, str] = {}
        self.taken: Taken = {}
        self.slots: int | None = None
        self.has_slow_links = False
        self._shares = Shares(groups)
        self._codec, self._is_sync = options.codec, options.is_sync
        self._is_mean = options.reduction == "mean"
        self._may_shard, self._is_auto = options.may_shard, options.topology == "auto"
        self._owners_max = options.owners_max
        self._is_small = self._codec == "threshold" and groups.numel < SHARDED_ELEMENTS
        # Encoders that take more out of the residual than they send: the parameters would bring it back.
        self._is_lossy = any(
            one.clip is not None or one.on_nonfinite == "skip" for one in groups.encoders
        )
        self._is_mesh = False
        self._judged: list[tuple[float, ...]] = []  # seconds of waiting, of encoding, and of all
        self._mesh_s = math.inf  # of a step before owners were tried
        self._wants_switch = self._has_returned = False
        self._owners: tuple[Peer, ...] = ()
        self._former: tuple[Peer, ...] = ()  # owners of the step before
        self._left: set[Peer] = set()  # have published their last result
        # Senders of the last step's results; others have come in since, or again.
        self._heard: set[Peer] = set()
        self._owner: Owner | None = None
        self._kept: dict[Peer, dict[int, SentPart]] = {}  # by owner and number
        self._arrived: dict[Peer, dict[int, Piece]] = {}  # parts for this owner
        # Added to the residual, and not yet to parameters that contain the residual.
        self._late: list[tuple[Piece, float]] = []
        self._orphaned = 0
        self._loaded: dict[str, Any] | None = None  # until it is known who owns what
        self._inherited: list[Handover] = []  # from owners that have left
        self._descent: Descent | None = None
        if options.optimizer is not None:
            self._descent = Descent(options.optimizer, groups.encoders, self._shares.of)
            self.slots = self._descent.slots

    @property
    def oldest_sent(self) -> OwnUpdate | None:
        """The oldest of the kept updates; None while there is space for more."""
        return self.sent[0] if len(self.sent) == self.sent.maxlen else None

    # ---- owners ------------------------------------------------------------------------------------------------------

    def deal(self, contributors: Iterable[Peer], step: int) -> None:
        """Deal the parameters to the nodes that take part from ``step`` on: the same owners, or none, on all nodes."""
        present = set(contributors)
        self._left &= present
        senders = tuple(sorted(present - self._left))
        for newcomer in set(senders) - self._heard if self._is_sync else ():
            for by_sender in self.taken.values():
                by_sender.pop(newcomer, None)
            for sender in self.taken.get(newcomer, {}).keys() & set(senders):
                del self.taken[newcomer][sender]
        if not self._is_sync:
            self._count_orphaned(set(self._owners) - present - self._left)
        self.senders = senders
        owners = [peer for peer in senders if self.roles.get(peer) not in ("worker", "observer")]
        has_roles = any(self.roles.get(peer, "member") != "member" for peer in senders)
        is_large = not self._is_small and len(senders) >= SHARDED_FROM
        gains = self._is_sync and (is_large or (self.has_slow_links and len(senders) > 2))
        self._is_mesh = not self._may_shard or (self._is_auto and not gains and not has_roles)
        self._former = self._owners
        self._owners = () if self._is_mesh else tuple(owners[: self._owners_max])
        parts = len(self._owners)
        index = self._owners.index(self.me) if self.me in self._owners else parts
        if self._owner is None or self._owner.place != (parts, index):
            self._retire(self._owner)
            made = self.groups, self._shares, self.me, parts, index, step, self._descent
            owns = index < parts and self._shares.of(parts, index)
            self._owner = Owner(*made) if owns else None
            self._use_loaded()
        if self._descent is not None and self._owner is not None:
            for handover in self._inherited:
                self._descent.add_handover(handover, self._owner.place, self._owner.arrays)
        self._inherited.clear()

    def wants_switch(self, result: StepResult, round_trip_s: Callable[[], float]) -> bool:
        """Return whether the other topology would make steps shorter, by the last steps.

        A sharded step moves 2 / nodes of the bytes, with one more way of half a round trip, and processes more. Where
        sharded steps turn out to be longer, because processors were slow and not links, the mesh is back for good.
        """
        nodes, is_chosen = len(self.senders), self._is_mesh != self.has_slow_links
        may_choose = self._may_shard and self._is_sync and not self._has_returned
        if not (is_chosen and may_choose and nodes > 2):
            return False
        all_s = result.encode_s + result.wait_s + result.apply_s
        self._judged.append((result.wait_s, result.encode_s, all_s))
        if len(self._judged) == JUDGED_STEPS:
            wait_s, encode_s, all_s = (median(one) for one in zip(*self._judged, strict=True))
            self._judged.clear()
            self._wants_switch = all_s > self._mesh_s
            if self._is_mesh:
                way_s = round_trip_s() / 2.0
                gain_s = (1.0 - 2.0 / nodes) * (wait_s - way_s)
                self._wants_switch = gain_s > way_s + 2.0 * encode_s + _PROCESSING_S * nodes
                self._mesh_s = all_s
        return self._wants_switch

    def switch(self) -> None:
        """Change the topology from the next dealing on: all members want it."""
        self._has_returned, self.has_slow_links = self.has_slow_links, not self.has_slow_links
        self._judged.clear()
        self._wants_switch = False

    def owner_state(self) -> dict[str, Any] | None:
        """Return a copy of this node's state as an owner; None if it owns nothing."""
        owner = self._owner
        if owner is None:
            return self._loaded
        encoders = [one.state_dict() for one in owner.encoders]
        own = self.pending
        arrays = owner.arrays if own is None or own.before is None else own.before
        if self._descent is not None:
            for one, (residual, *_) in zip(encoders, arrays, strict=True):
                one["residual"] = residual.copy()
        elif own is not None:  # the nodes that sent these parts put them back into their states
            for index, one in enumerate(encoders):
                for message in own.messages[index : index + 1]:
                    apply(message, one["residual"])
                for piece in own.took or ():
                    apply(piece[index], one["residual"], -own.scale)
        groups = [index for index, _ in self._shares.of(owner.parts, owner.at)]
        place = {"parts": owner.parts, "at": owner.at, "nodes": len(self.senders)}
        states = [copies(state) for _, *state in arrays]
        return {**place, "groups": groups, "encoders": encoders, "states": states}

    def estates(self) -> list[dict[str, Any]]:
        """Return a copy of residuals and states that this node has to hand over, or has in an unfinished step."""
        if self._descent is None:
            return []
        under_way = [
            handover
            for part in self._sent_parts()
            for handover in part.piece.handovers
            if part.is_open and self._is_sync
        ]
        return self._descent.export(under_way)

    def load_owner(self, state: dict[str, Any] | None, estates: Sequence[dict[str, Any]]) -> None:
        """Continue as the owner of a checkpoint; a node that owns another part now passes residual and state on."""
        self._loaded = state
        if self._descent is not None:
            for one in estates:
                self._descent.keep_estate((one["parts"], one["at"]), one["arrays"])

    def _use_loaded(self) -> None:
        loaded, owner = self._loaded, self._owner
        self._loaded = None
        if loaded is None:
            return
        place = loaded["parts"], loaded["at"]
        if owner is not None and owner.place == place:
            for encoder, one in zip(owner.encoders, loaded["encoders"], strict=True):
                encoder.load_state_dict(one)
            for index, state in enumerate(loaded["states"]):
                put(owner.arrays[index][1:], state)
            return
        if self._descent is not None:
            self._descent.keep_estate(place, owner_arrays(loaded))
            return
        messages = [dense_message(one["residual"]) for one in loaded["encoders"]]
        piece = Piece(messages, self.me, 0, loaded["parts"], loaded["at"])
        self._add_to_residual(piece, self._count_updates(self.senders))

    def _count_updates(self, senders: Iterable[Peer]) -> float:
        """Return the number of nodes whose updates make a mean; dedicated owners have none."""
        count = sum(self.roles.get(peer) != "owner" for peer in senders)
        return float(max(count, 1)) if self._is_mean else 1.0

    def _retire(self, owner: Owner | None) -> None:
        """Move an owner's residual to this node's residual, from where it goes to the new owners."""
        if owner is not None and self._descent is not None:
            self._descent.keep_estate(owner.place, owner.arrays)
        elif owner is not None:
            self._add_to_residual(owner.as_piece(), self._count_updates(self.senders))

    # ---- this node's updates -----------------------------------------------------------------------------------------

    def encode(
        self, update: Any, codec: Codec | None, refresh: Callable[[int], None] | None = None
    ) -> OwnUpdate:
        """Encode this node's update of the next step; with None for the codec all that is left, as the last update.

        Raises:
            GradwireError: no node owns parameters.
        """
        if self._is_mesh:
            piece = Piece(self.groups.encode(update, codec, refresh), self.me, self.step, 0, 0)
            is_last = self._may_shard and codec is None
            return OwnUpdate(self.step, {self.me: piece}, is_whole=True, is_last=is_last)
        count = len(self._owners)
        if not count:
            raise GradwireError(
                f"step {self.step} has no owner left, and updates stay in the residual: start one (role)"
            )
        found = self.groups.encode(update, codec, refresh, self._shares.partitions(count))
        own = OwnUpdate(self.step, {}, owner=self._owner, is_last=codec is None)
        for index, peer in enumerate(self._owners):
            messages = [found[group][index] for group, _ in self._shares.of(count, index)]
            if messages:
                piece = Piece(messages, self.me, self.step, count, index)
                if self._descent is not None:
                    piece.handovers = self._descent.hand_over((count, index))
                own.parts[peer] = piece
                self._kept.setdefault(peer, {})[self.step] = SentPart(piece)
        if self._descent is not None:
            self._descent.estates.clear()
        if self.me in own.parts:
            self._arrived.setdefault(self.me, {})[self.step] = own.parts[self.me]
        # The largest first: if the transport refuses it, no other was sent.
        for peer, piece in sorted(own.parts.items(), key=lambda one: -one[1].nbytes):
            if peer != self.me:
                own.unsent.append((peer, bytes(piece.pack())))
        return own

    def take_back(self, own: OwnUpdate) -> None:
        """Return to the residuals a message that the transport has refused because of its size."""
        if own.unsent or own.is_whole:
            self.put_back(own)
            self.pending = None
            for peer in own.parts:
                self._kept.get(peer, {}).pop(own.step, None)
            for piece in own.passed_on:
                self._add_to_residual(piece, -1.0)
                self._arrived[piece.sender][piece.number] = piece
            self._arrived.get(self.me, {}).pop(own.step, None)
        elif own.owner is not None:
            own.owner.groups.put_back(own.messages)
            own.messages, own.payload = [], b""

    def put_back(self, own: OwnUpdate, factor: float = 1.0) -> None:
        """Add the parts of one of this node's updates, times a factor, to the residuals."""
        for piece in own.parts.values():
            self._add_piece(piece, [one.residual for one in self.groups.encoders], factor)
            self._take_back_handovers(piece, factor)

    def _take_back_handovers(self, piece: Piece, factor: float) -> None:
        if self._descent is not None:
            self._descent.take_back(piece.handovers, factor)

    def remove_local_changes(self, params: Any, own: OwnUpdate, *, has_moved: bool) -> None:
        """Remove local steps from the caller's parameters after an encode: residual and messages hold them now.

        Args:
            params: the caller's.
            own: the encoded update; with ``apply_residual`` the parameters hold it too.
            has_moved: whether the parameters held the update before the encode.
        """
        self.local_steps = 0
        if self.shared and not (self._applies_residual and has_moved and not self._is_lossy):
            self.write_params(params)
            if self._applies_residual:
                self._own_to_params(own, writable_views(params), 1.0)
        if self._descent is not None and own.owner is not None:
            shares = self._shares.of(*own.owner.place)
            own.params = [gathered(self.groups.select(params, at), part) for at, part in shares]

    def absorb_local_changes(self, params: Any) -> None:
        """Move local changes of the caller's parameters into the residual, before the parameters are replaced.

        Messages of an unfinished step stay apart from the residual.
        """
        encoders = self.groups.encoders
        if self.shared and all(
            device_of(one.residual) == device_of(self.shared) for one in encoders
        ):
            super().absorb_local_changes(params)
            if self._applies_residual and self.pending is not None:
                self.put_back(self.pending, -1.0)

    def put_back_into(self, residuals: Sequence[Any]) -> None:
        """Add everything that may not be applied yet to copies of the residuals."""
        for part in self._sent_parts() if self._is_sync else ():
            if part.is_open:
                self._add_piece(part.piece, residuals, 1.0)
        own = self.pending
        if own is not None and own.is_whole:
            self._add_piece(own.parts[self.me], residuals, 1.0)

    def _own_to_params(self, own: OwnUpdate, params: Arrays, factor: float) -> None:
        for piece in own.parts.values():
            self._add_to_params(piece, params, factor)

    def add_part(self, peer: Peer, number: int, payload: memoryview) -> None:
        """Keep a part that a node has sent to this owner."""
        if not self._is_sync or number >= self.step:
            self._arrived.setdefault(peer, {})[number] = self.parse(peer, number, payload)

    def parse(self, sender: Peer, number: int, payload: memoryview) -> Piece:
        """Return the messages of a node's update; raise `MessageError` if they do not fit these groups."""
        piece, encoders = Piece.parse(sender, number, payload), self.groups.encoders
        shares = self._shares.of(piece.parts, piece.at)
        expected = [(encoders[index].key, part.numel) for index, part in shares]
        layouts = [] if self._descent is None else self._descent.layouts(piece.handovers)
        expected += [(encoders[index].key, numel) for one in layouts for index, numel in one]
        found = [(message.key, message.numel) for message in piece]
        if found != expected or len(layouts) < len(piece.handovers):
            raise MessageError(f"{_described(found)}, but {_described(expected)} on this node")
        rest = iter(piece[len(shares) :])
        del piece[len(shares) :]
        for one, layout in zip(piece.handovers, layouts, strict=True):
            one.messages.extend(itertools.islice(rest, len(layout)))
        return piece

    def prepare(self, own: OwnUpdate, lost: Container[Peer]) -> frozenset[Peer]:
        """Make the payload of an update; return the nodes whose parts are missing for that."""
        if own.payload:
            return frozenset()
        owner = own.owner
        if own.took is None and not self._is_sync:
            self._take_arrived(own)
        elif own.took is None and owner is not None:
            missing = [
                peer
                for peer in self.senders
                if peer not in lost and own.step not in self._arrived.get(peer, {})
            ]
            if missing:
                return frozenset(missing)
            self._take_parts(own, owner, lost)
        messages = (
            [] if owner is None else owner.groups.encode(None, None if own.is_last else self._codec)
        )
        parts = len(self._owners)
        index = parts if owner is None else owner.at
        result = Piece(messages, self.me, own.step, parts, index)
        if own.is_whole:
            result = own.parts[self.me]
        result.taken, result.is_last = own.numbers, own.is_last
        if own.is_last and owner is not None and self._descent is not None and self._descent.slots:
            result.handovers = [self._descent.pack_handover(owner.place, owner.arrays, (1, 0))]
        own.messages, own.payload = result, result.pack()
        return frozenset()

    def _take_parts(self, own: OwnUpdate, owner: Owner, lost: Container[Peer]) -> None:
        """Add the parts that have arrived to the owner's residual, in the order (node, number)."""
        took: list[Piece] = []
        for peer in self.senders:
            piece = self._arrived.get(peer, {}).get(own.step)
            fits = piece is not None and (piece.parts, piece.at) == (owner.parts, owner.at)
            # A node that is lost may have seen an update that nobody else has.
            if piece is None or (peer in lost and not fits):
                own.numbers[peer] = 0, own.step
            elif not fits:
                del self._arrived[peer][own.step]
                raise MessageError(
                    f"{peer.address} sent part {piece.at} of {piece.parts} for step {own.step}, this node "
                    f"({self.me.address}) owns part {owner.at} of {owner.parts}"
                )
            else:
                took.append(piece)
        own.took = took
        own.scale = 1.0 / self._count_updates(piece.sender for piece in took)
        self._add_taken(own, owner)

    def _add_taken(self, own: OwnUpdate, owner: Owner) -> None:
        took = own.took or []
        if self._descent is None:
            owner.add_pieces(took, own.scale)
        elif took:
            own.before = [copies(one) for one in owner.arrays]
            for handover in itertools.chain.from_iterable(piece.handovers for piece in took):
                self._descent.add_handover(handover, owner.place, owner.arrays)
            self._descent.take_step(
                took, own.scale, owner.encoders, owner.arrays, own.params, own.step
            )

    def _take_arrived(self, own: OwnUpdate) -> None:
        """Add all parts that have arrived; those of another dealing go to this node's residual, and on from there."""
        owner, own.took = own.owner, []
        for peer, found in sorted(self._arrived.items()):
            first = stop = min(found, default=0)
            while (
                stop in found
            ):  # one run at a time: parts that are missing before the next are lost
                piece = found[stop]
                if owner is not None and (piece.parts, piece.at) == (owner.parts, owner.at):
                    own.took.append(piece)
                elif own.is_last:  # nothing is passed on: its sender puts the part back
                    break
                else:
                    own.passed_on.append(piece)
                del found[stop]
                stop += 1
            if stop > first:
                own.numbers[peer] = first, stop
        own.scale = 1.0 / self._count_updates(self.senders)
        if owner is not None:
            self._add_taken(own, owner)
        for piece in own.passed_on:
            self._add_to_residual(piece)

    def waiting(self) -> list[bool]:
        """Return for every other node whether one of its parts has arrived; an empty list in the mesh."""
        others = [] if self._is_mesh else [peer for peer in self.senders if peer != self.me]
        return [bool(self._arrived.get(peer)) for peer in others]

    def put_back_departed(self, members: Container[Peer]) -> None:
        """Put back the parts for owners that are gone, all of whose results have been applied."""
        for owner, sent in self._kept.items():
            for part in sent.values() if owner not in members and owner != self.me else ():
                if part.is_open:
                    self._put_part_back(part)

    def apply(
        self,
        payloads: Payloads,
        params: Any,
        *,
        nodes: int,
        own: OwnUpdate | None = None,
        has_moved: bool = False,
    ) -> bool:
        """Add the mean or the sum of updates to the shared parameters, and put back parts that no owner will take.

        Args:
            payloads: for every node one message for every group, in order.
            params: the caller's.
            nodes: number of nodes of which the mean is taken.
            own: this node's update, which the caller's parameters hold already with ``apply_residual``.
            has_moved: whether the caller's parameters differ from the shared ones by local steps, which stay.

        Returns:
            Whether the sum of all updates is provably exact.
        """
        divisor = nodes if self._is_mean else 1
        pieces = [one for one in payloads if isinstance(one, Piece)]  # all of them
        if not self.shared:
            is_exact = self._add_pieces(pieces, params, divisor)
        else:
            is_exact = self._add_to_shared(pieces, params, divisor, own, has_moved=has_moved)
        for piece in pieces:
            self._settle_parts(piece)
        if self._is_sync:
            self._settle_silent_owners(pieces)
            self._count_lost_handovers(pieces)
        self._add_late(params)
        return is_exact

    def _add_to_shared(
        self,
        pieces: Sequence[Piece],
        params: Any,
        divisor: int,
        own: OwnUpdate | None,
        *,
        has_moved: bool,
    ) -> bool:
        """Add updates to the shared copy and to the caller's parameters, which keep residual and local steps."""
        targets = writable_views(params)
        if self._applies_residual:
            messages = None if own is None else own.messages
            index = next((at for at, one in enumerate(pieces) if one is messages), None)
            return self._add_pieces(pieces, self.shared, divisor, SecondTarget(targets, index))
        local = difference(targets, self.shared) if has_moved else []
        is_exact = self._add_pieces(pieces, self.shared, divisor)
        put(targets, self.shared)
        if has_moved:
            add(targets, local)
        return is_exact

    def _add_pieces(
        self, pieces: Sequence[Piece], params: Any, divisor: int, second: SecondTarget | None = None
    ) -> bool:
        total = self.total
        if not any(piece.parts for piece in pieces):
            return total.add_payloads(pieces, params, divisor, second)
        # Among the owners' results may be whole updates of nodes that have dealt otherwise.
        added = targets = [params] if second is None else [params, second.params]
        if isinstance(total, MomentumSum):
            added = [zeros_like(writable_views(params))]
        for target, piece in itertools.product(added, pieces):
            self._add_to_params(piece, target, 1.0 if piece.parts else 1.0 / divisor)
        if isinstance(total, MomentumSum):
            total.accelerate(added[0])
            for target in targets:
                add(writable_views(target), added[0])
        if second is not None and second.own is not None and self.pending is not None:
            self._own_to_params(self.pending, second.params, -1.0)
        return False

    def _settle_parts(self, result: Piece) -> None:
        """Note which of this node's parts a result contains; put back those that the owner will never take."""
        if result.taken:
            known = self.taken.setdefault(result.sender, {})
            for sender, (first, stop) in result.taken.items():
                if self._is_sync:  # no other part follows one that is not taken
                    known.setdefault(sender, TakenParts(stop))
                    continue
                before = known.get(sender, TakenParts(0))
                gap = (before.stop, first) if first > before.stop else before[1:]
                known[sender] = TakenParts(stop, *gap)
        if result.is_last:
            self._left.add(result.sender)
            self._inherited += result.handovers
        if self._is_sync and not result.parts:
            return  # see _settle_silent_owners
        by_default = (0, result.number + 1 if self._is_sync else 0)
        first, stop = result.taken.get(self.me, by_default)
        for number, part in self._kept.get(result.sender, {}).items():
            if part.is_open and first <= number < stop:
                part.is_open = False
            elif part.is_open and number < (result.number + 1 if self._is_sync else first):
                self._put_part_back(part)

    def _settle_silent_owners(self, results: Sequence[Piece]) -> None:
        """Put back the parts for owners without a result in this step, and note that these owners took none."""
        heard = {result.sender for result in results if result.parts}
        for owner, sent in self._kept.items():
            for number, part in sent.items() if owner not in heard else ():
                if part.is_open and number <= self.step:
                    self._put_part_back(part)
        # An owner that goes before its first result owns nothing yet.
        self._count_orphaned((set(self._owners) - heard) & self._heard)
        self._heard = {result.sender for result in results}
        whole = {result.sender for result in results if not result.parts}
        for owner in set(self._owners or self.senders) - heard:
            known = self.taken.setdefault(owner, {})
            # A node that is lost may have sent parts to one that has sent its update whole.
            for sender in self.senders:
                if owner not in whole or sender not in whole:
                    known.setdefault(sender, TakenParts(self.step))

    def _count_lost_handovers(self, results: Sequence[Piece]) -> None:
        """Count the elements whose former owner was gone before the new owner had their state."""
        places = {peer: (len(self._former), at) for at, peer in enumerate(self._former)}
        if self._descent is None or self._former == self._owners:
            return
        for result in results:
            # In synchronous mode a result names those senders of which the owner has no part.
            for sender in result.taken.keys() & places.keys():
                place = result.parts, result.at
                self._orphaned += self._descent.count_common(places[sender], place)

    def _count_orphaned(self, gone: Container[Peer]) -> None:
        for at, owner in enumerate(self._owners):
            shares = self._shares.of(len(self._owners), at) if owner in gone else ()
            self._orphaned += sum(part.numel for _, part in shares)

    def _put_part_back(self, part: SentPart) -> None:
        part.is_open, part.is_back = False, True
        self._add_to_residual(part.piece)

    def drain_orphaned(self) -> int:
        """Return the number of elements that lost their owner since the last call."""
        found, self._orphaned = self._orphaned, 0
        return found

    def finish_step(self, own: OwnUpdate) -> None:
        """Keep a finished update a little longer, in host memory, and advance to the next step."""
        own.messages[:] = map(host_message, own.messages)
        own.params, own.before = [], None
        self.pending = None
        self.sent.append(own)
        self.step += 1
        oldest = self.step - (self.sent.maxlen or 0)
        self._kept = {
            owner: {at: part for at, part in sent.items() if part.is_open or at >= oldest}
            for owner, sent in self._kept.items()
        }
        for found in self._arrived.values() if self._is_sync else ():
            found.pop(own.step, None)

    def take_back_unapplied(self, finals: Mapping[Peer, int], taken: Taken, step: int) -> None:
        """Return to the residual this node's updates that nobody applied, after an absence.

        These are its parts that no owner took, and others' parts in its own results that nobody applied.

        Args:
            finals: for departed members the first update that nobody applied.
            taken: ``Replica.taken`` of the node that gives the parameters.
            step: number of the next step there.
        """
        final = finals.get(self.me)
        owners = [self._owner]
        unfinished = [*self.sent, *([] if self.pending is None else [self.pending])]
        self.pending = None
        self.sent.clear()
        for own in unfinished:
            if final is None or own.step >= final:
                for piece in own.passed_on:
                    self._add_to_residual(piece, -1.0)
                if own.is_whole:
                    self.put_back(own)
                if own.owner is not None and self._descent is None:
                    own.owner.undo_update(own)
                    owners.append(own.owner)
        self.taken = taken
        by_default = TakenParts((final or 0) + 1 if self._is_sync else 0)
        for owner, sent in self._kept.items():
            found = taken.get(owner, {}).get(self.me, by_default)
            for number, part in sent.items():
                if final is None:
                    is_taken = False
                elif not self._is_sync:
                    # A part of its own that came back after an earlier absence was in no result.
                    is_own = owner == self.me
                    is_taken = number < final and not part.is_back if is_own else found.has(number)
                    if number >= found.stop and owner not in (self.me, *finals):
                        continue  # its result may still come
                elif step <= number <= final:
                    continue  # the owner's result of this step is still to come
                else:
                    # Of older parts that came back all nodes know the same, and the owner may have come in again since.
                    is_taken = found.has(number) and not (part.is_back and number < final - 1)
                if is_taken == part.is_back:
                    self._add_to_residual(part.piece, -1.0 if is_taken else 1.0)
                part.is_open, part.is_back = False, not is_taken
        for gone in dict.fromkeys(owners):
            self._retire(gone)
        if self._descent is not None:
            # The others have begun anew with this node's elements, and have counted them.
            self._descent.estates.clear()
        self._inherited.clear()
        self._owner = None
        self._owners = self.senders = ()
        self._heard.clear()
        self._arrived.clear()

    def _sent_parts(self) -> Iterator[SentPart]:
        return (part for sent in self._kept.values() for part in sent.values())

    def _messages(self, piece: Piece) -> Iterator[tuple[int, Message, Part | None]]:
        """Yield group, message and part of every message of a piece; None: the whole group."""
        shares = self._shares.of(piece.parts, piece.at)
        for message, (at, part) in zip(piece, shares, strict=True):
            yield at, message, part if piece.parts else None

    def _add_piece(self, piece: Piece, residuals: Sequence[Any], factor: float) -> None:
        for index, message, part in self._messages(piece):
            apply(message, residuals[index], factor, part=part)

    def _add_to_params(self, piece: Piece, params: Any, factor: float) -> None:
        for index, message, part in self._messages(piece):
            threads = self.groups.encoders[index].threads
            apply(message, self.groups.select(params, index), factor, part=part, threads=threads)

    def _add_to_residual(self, piece: Piece, factor: float = 1.0) -> None:
        """Add a piece to the residual, and later to the caller's parameters if these contain the residual."""
        self._add_piece(piece, [one.residual for one in self.groups.encoders], factor)
        self._take_back_handovers(piece, factor)
        if self._applies_residual:
            self._late.append((piece, factor))

    def _add_late(self, params: Any) -> None:
        for piece, factor in self._late if self.shared else ():
            self._add_to_params(piece, writable_views(params), factor)
        self._late.clear()

    def local_delta(self, params: Any) -> tuple[Arrays | None, Callable[[int], None] | None]:
        """Return the sum of the local steps since the last exchange; see `SharedCopy`."""
        self._add_late(params)
        return super().local_delta(params)

    def write_params(self, params: Any) -> None:
        """Set the caller's parameters to the shared ones, plus the residual with ``apply_residual``."""
        self._late.clear()
        super().write_params(params)

    def _set_residual(self, params: Any) -> None:
        self._add_late(params)
        super()._set_residual(params)
