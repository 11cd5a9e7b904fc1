"""The sharded exchange: parts of the parameters have owners, which add up all nodes' parts of an update.

Every node sends each owner its part of the update. An owner adds the mean of the parts to a residual of its own,
encodes that residual, and publishes the result to everybody. The mesh never makes any object of this module.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import blocks
from ..codec import Encoder
from ..errors import GradwireError, MessageError
from ..message import Message, apply, apply_many, dense_message
from ..partition import Part, Partition
from ..policy import owners_policy
from ..slices import Outgoing
from .groups import Codec, Group, Groups
from .protocol import Kind, NodeRun, PartUpdate, tag_of

__all__ = [
    "Accepted",
    "Arrived",
    "Division",
    "PendingPart",
    "ShardedUpdate",
    "Sharding",
    "add_owner_state",
    "can_be_of_same_owners",
    "keep_part",
    "part_of_state",
]

_LOG = logging.getLogger(__name__)

# Parts of one node that wait: it sends the next one only when it has this owner's result of the step before.
_PARTS_MAX = 16

# Steps after which a node that has taken part in them has none of its parts from before any more.
_RETURN_STEPS = 8
_NOBODY = NodeRun(-1, -1)

# By owner and sender: number of the sender's first part that the owner has not accepted.
Accepted = dict[NodeRun, dict[NodeRun, int]]

# By sender and step: parts for this owner.
Arrived = dict[NodeRun, dict[int, PartUpdate]]


class Division:
    """The division of every group into a number of parts, which is the same on all nodes."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._parts: dict[tuple[int, int], list[tuple[int, Part]]] = {}

    def partitions(self, parts: int) -> list[Partition]:
        """Return the partition of each group into so many parts."""
        # A small group has few blocks: each group begins at another part, so that these blocks spread over the owners.
        return [
            Partition(encoder.numel, parts, first=index % parts)
            for index, encoder in enumerate(self._groups.encoders)
        ]

    def part(self, parts: int, place: int) -> list[tuple[int, Part]]:
        """Return for one part the index and the elements of every group of which the part has elements."""
        if (parts, place) not in self._parts:
            # Of a few numbers of owners at most: these come and go, and messages may name any number.
            if len(self._parts) >= 4 * parts:
                self._parts.clear()
            partitions = self.partitions(parts) if place < parts else []
            pairs = [(group, partition[place]) for group, partition in enumerate(partitions)]
            self._parts[parts, place] = [(group, part) for group, part in pairs if part.numel]
        return self._parts[parts, place]

    def add_to_residuals(
        self, update: PartUpdate, residuals: Sequence[Any], factor: float = 1.0
    ) -> None:
        """Add the messages of a part, times a factor, to the residuals of all groups."""
        parts = self.part(update.parts, update.place)
        for message, (group, part) in zip(update, parts, strict=True):
            apply(message, residuals[group], factor, part=part)

    def add_to_params(self, update: PartUpdate, params: Any, factor: float = 1.0) -> None:
        """Add the messages of a part, times a factor, to the model's arrays."""
        parts = self.part(update.parts, update.place)
        for message, (group, part) in zip(update, parts, strict=True):
            threads = self._groups.encoders[group].threads
            target = self._groups.select(params, group)
            apply(message, target, factor, part=part, threads=threads)

    def add_results(self, results: Sequence[PartUpdate], params: Any) -> None:
        """Add the owners' results of a step to arrays of the parameters' shapes."""
        for result in results:
            self.add_to_params(result, params)


class Owner:
    """The part of the parameters that this node owns, with a residual of sums that were not published yet.

    Args:
        before: state of this node as the owner of another part (``Sharding.owner_state``), whose thresholds go on here.

    Attributes:
        parts: number of parts.
        place: index of this node's part.
        groups: encoders of those groups of which the part has elements.
    """

    def __init__(
        self,
        whole: Groups,
        division: Division,
        parts: int,
        place: int,
        step: int,
        every: int = 1,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self.parts = parts
        self.place = place
        # A threshold learned anew begins at twice its value: hardly anything would move for a step, and in large steps
        # then.
        known = (
            {} if before is None else dict(zip(before["groups"], before["encoders"], strict=True))
        )
        owned = []
        for group, part in division.part(parts, place):
            encoder = _owner_encoder(whole.encoders[group], part, step, every, known.get(group))
            owned.append(Group(encoder, is_dense=whole.groups[group].is_dense))
        self.groups = Groups(owned)

    def add_parts(self, parts: Sequence[PartUpdate], scale: float) -> None:
        """Add parts of updates, times a factor, to the residual."""
        for index, encoder in enumerate(self.groups.encoders):
            messages = [part[index] for part in parts]
            apply_many(messages, encoder.residual, scale, threads=encoder.threads)

    def take_residual(self, run: NodeRun) -> PartUpdate:
        """Return the residual as dense messages, and clear it."""
        encoders = self.groups.encoders
        # Dense messages carry the values exactly, so what leaves here arrives in the node's residual bit for bit.
        messages = [dense_message(encoder.residual, key=encoder.key) for encoder in encoders]
        for encoder in encoders:
            encoder.residual[...] = 0.0
        return PartUpdate(messages, run, 0, self.parts, self.place)


def _owner_encoder(
    like: Encoder, part: Part, step: int, every: int, known: Mapping[str, Any] | None
) -> Encoder:
    """Return an encoder for an owner's share of a group, with the threshold of a known state."""
    # An overflow of the sum must not stop all nodes, of which none could repair it: hence "skip".
    policy = owners_policy(like.policy, part.partition.sizes, every=every)
    encoder = Encoder(
        part.numel, policy, like.shakeup, None, like.dtype, "cpu", like.key, "skip", like.threads
    )
    state = {**encoder.state_dict(), "step": step, "changed_at": step}
    if known is not None:
        begun = min(known["changed_at"], step)
        state |= {"threshold": known["threshold"], "course": known["course"], "changed_at": begun}
    encoder.load_state_dict(state)
    return encoder


@dataclass(slots=True)
class PendingPart:
    """A part that this node has sent to an owner, or keeps because it is the owner.

    Attributes:
        part: the part.
        is_open: whether its owner may still accept it.
        is_back: whether it is in the residual again.
    """

    part: PartUpdate
    is_open: bool = True
    is_back: bool = False


@dataclass
class ShardedUpdate:
    """This node's update of one step, in parts, and its result as an owner.

    Attributes:
        run: this node.
        step: number of the step.
        parts: by owner.
        owner: the part of the parameters that this node owns in this step.
        is_last: whether this node leaves with this step.
        unsent: parts for other owners that were not handed over yet; they go before the result.
        accepted: the parts that the result contains; None: they have not all arrived.
        missing: the senders whose part the result lacks.
        scale: factor of the accepted parts.
    """

    run: NodeRun
    step: int
    parts: dict[NodeRun, PartUpdate]
    owner: Owner | None
    is_last: bool
    unsent: deque[Outgoing] = field(default_factory=deque)
    accepted: list[PartUpdate] | None = None
    missing: set[NodeRun] = field(default_factory=set)
    scale: float = 1.0

    @property
    def messages(self) -> list[Message]:
        """The messages of all parts."""
        return [message for part in self.parts.values() for message in part]

    @property
    def sent_bytes(self) -> int:
        """Size of the parts for other owners."""
        return sum(part.nbytes for owner, part in self.parts.items() if owner != self.run)

    @property
    def received_bytes(self) -> int:
        """Size of the other nodes' parts that the result contains."""
        return sum(part.nbytes for part in self.accepted or () if part.sender != self.run)


class Sharding:
    """What the sharded exchange keeps beside the mesh: this node's part as an owner, and the ledger of parts sent.

    Every number is a step. A part stays in the ledger until a result says that its owner has accepted it, and goes back
    into the residual when it turns out that the owner never will. All nodes see the same results of the same steps, so
    all agree on the owners of the next step and on the parts that were accepted.

    Args:
        groups: of this node.
        division: of the groups.
        run: this node.
        owners_max: most owners.
        codec: of the owners' results.
        is_mean: whether owners take the mean of all nodes' parts, or their sum.
        every: steps between exchanges.
        put_back: adds a part, times a factor, to this node's residual.
        accepted: where that is not obvious, see `Accepted`.
        arrived: parts for this owner that have come already.

    Attributes:
        senders: the nodes that take part in the next step, sorted.
        owners: those of them that own parameters, by the index of their part.
        accepted: as given, and since then.
    """

    def __init__(
        self,
        groups: Groups,
        division: Division,
        run: NodeRun,
        owners_max: int,
        codec: Codec,
        is_mean: bool,
        every: int,
        put_back: Callable[[PartUpdate, float], None],
        accepted: Accepted,
        arrived: Arrived,
    ) -> None:
        self.senders: tuple[NodeRun, ...] = ()
        self.owners: tuple[NodeRun, ...] = ()
        self.accepted = accepted
        self._groups = groups
        self._division = division
        self._run = run
        self._owners_max = owners_max
        self._codec = codec
        self._is_mean = is_mean
        self._every = every
        self._put_back = put_back
        self._owner: Owner | None = None
        self._ledger: dict[NodeRun, dict[int, PendingPart]] = {}  # by owner and step
        self._arrived = arrived
        self._left: set[NodeRun] = set()  # have published their last result
        # Senders of the last step's results; the others have come since then, or have come back.
        self._last_contributors: set[NodeRun] = set()
        self._loaded: Mapping[str, Any] | None = None  # until it is known who owns which part
        self._lost_elements = 0

    # ---- owners ------------------------------------------------------------------------------------------------------

    def assign_owners(
        self, contributors: Iterable[NodeRun], step: int, workers: Collection[NodeRun]
    ) -> None:
        """Assign the parameters to the nodes that take part from ``step`` on: to the same owners on all nodes."""
        present = set(contributors)
        # A node that has published its last result takes no part in the next step. It may come back after that under
        # the same identity: it has to join again if the others went on without it while it left.
        self._left &= self._last_contributors
        self.senders = tuple(sorted(present - self._left))
        # A newcomer sends its first part now. What is known of the node is of an earlier time as a member. Without
        # results of an earlier step the table is the donor's, which has forgotten the newcomers of this step already:
        # what is left there, members that are away still need.
        newcomers = set(self.senders) - self._last_contributors if self._last_contributors else ()
        for newcomer in newcomers:
            # What its earlier time has not accepted is in the residual for good: the table forgets it below.
            self._ledger.pop(newcomer, None)
            for by_sender in self.accepted.values():
                by_sender.pop(newcomer, None)
            for sender in self.accepted.get(newcomer, {}).keys() & set(self.senders):
                del self.accepted[newcomer][sender]
        if newcomers:
            self._forget_accepted(step)
        # Sorted like the senders, and cut to the same length everywhere: all nodes compute the same assignment.
        owners = [run for run in self.senders if run not in workers]
        self.owners = tuple(owners[: self._owners_max])
        parts = len(self.owners)
        place = self.owners.index(self._run) if self._run in self.owners else parts
        # An owner that keeps its part keeps its residual, too. Where only the number of parts changes, every owner has
        # another part, and all residuals move.
        owner = self._owner
        if owner is None or (owner.parts, owner.place) != (parts, place):
            before = self.owner_state(None, ())
            self._retire(owner)
            self._owner = None
            if place < parts and self._division.part(parts, place):
                self._owner = Owner(
                    self._groups, self._division, parts, place, step, self._every, before
                )
            self._use_loaded()

    def _retire(self, owner: Owner | None) -> None:
        """Move an owner's residual to this node's residual, from where it goes to the new owners."""
        if owner is not None:
            # The owners take the mean of all nodes' parts, so a sum of theirs counts as often as there are nodes.
            self._put_back(owner.take_residual(self._run), self._count(self.senders))

    def _count(self, nodes: Collection[object]) -> float:
        """Return the number of nodes whose parts make a mean; 1 if they make a sum."""
        return float(max(len(nodes), 1)) if self._is_mean else 1.0

    # ---- this node's updates -----------------------------------------------------------------------------------------

    def encode(
        self, step: int, update: Any, codec: Codec | None, before: Any = None
    ) -> ShardedUpdate:
        """Encode this node's update in one part for each owner; with None for the codec all that is left.

        Raises:
            GradwireError: no node owns parameters.
        """
        count = len(self.owners)
        if not count:
            raise GradwireError(
                f"step {step} has no owner left, and updates stay in the residual: start a node whose role is "
                '"member"'
            )
        # One pass over the residual encodes the messages for all owners.
        encoded = self._groups.encode(update, codec, before, self._division.partitions(count))
        # The owner of now is kept with the update: another assignment may come before the update is known to be
        # applied.
        sharded = ShardedUpdate(self._run, step, {}, self._owner, is_last=codec is None)
        for index, owner in enumerate(self.owners):
            messages = [encoded[group][index] for group, _ in self._division.part(count, index)]
            # A small model may have fewer blocks than owners: an owner without elements gets nothing.
            if messages:
                part = PartUpdate(messages, self._run, step, count, index)
                sharded.parts[owner] = part
                self._ledger.setdefault(owner, {})[step] = PendingPart(part)
        # This node's own part takes the same way as the others', so it is added at its place in the order of the nodes.
        if self._run in sharded.parts:
            self._arrived.setdefault(self._run, {})[step] = sharded.parts[self._run]
        # The largest first: if the transport refuses it, no other part was sent.
        for owner, part in sorted(sharded.parts.items(), key=lambda item: -item[1].nbytes):
            if owner != self._run:
                sharded.unsent.append(Outgoing(tag_of(Kind.PART, step), part.pieces(), owner))
        return sharded

    def withdraw(self, sharded: ShardedUpdate) -> None:
        """Forget an update of which nothing was sent."""
        for owner in sharded.parts:
            self._ledger[owner].pop(sharded.step, None)
        self._arrived.get(self._run, {}).pop(sharded.step, None)

    # ---- this node's results -----------------------------------------------------------------------------------------

    def add_part(self, part: PartUpdate) -> None:
        """Keep a part that a node has sent to this owner.

        Raises:
            MessageError: too many parts of the node wait.
        """
        keep_part(self._arrived, part)

    def missing_parts(
        self, sharded: ShardedUpdate, lost: Collection[NodeRun]
    ) -> frozenset[NodeRun]:
        """Return the nodes whose parts are missing for this node's result; none: they are in the owner's residual.

        Args:
            sharded: this node's update.
            lost: nodes of which nothing more comes.
        """
        owner = sharded.owner
        # The parts are added once, also where the result has to be encoded again because it was too large.
        if owner is None or sharded.accepted is not None:
            return frozenset()
        missing = frozenset(
            run
            for run in self.senders
            if self._part_for(owner, run, sharded.step) is None and run not in lost
        )
        if not missing:
            self._accept(sharded, owner)
        return missing

    def _part_for(self, owner: Owner, sender: NodeRun, step: int) -> PartUpdate | None:
        """Return the part that a node has sent for an owner's next result, if it has."""
        by_step = self._arrived.get(sender, {})
        part = by_step.get(step)
        if part is None or (part.parts, part.place) == (owner.parts, owner.place):
            return part
        # The sender counts other members than this node: it has seen an update that no other node has, or is in another
        # part of a split network. One of both joins again as soon as it hears of it.
        _LOG.warning(
            "step %d: the node with id %d sent part %d of %d, this node owns part %d of %d",
            *(step, sender.id, part.place, part.parts, owner.place, owner.parts),
        )
        del by_step[step]
        return None

    def _accept(self, sharded: ShardedUpdate, owner: Owner) -> None:
        """Add the parts that have arrived to the owner's residual, in the order of the nodes."""
        # In the order of the nodes, because float32 sums depend on the order, and a resumed run must have the same
        # bits.
        accepted: list[PartUpdate] = []
        for run in self.senders:
            part = self._part_for(owner, run, sharded.step)
            if part is None:
                sharded.missing.add(run)
            else:
                accepted.append(part)
        sharded.accepted = accepted
        # The mean of the parts that are there: a missing node must not make the update smaller.
        sharded.scale = 1.0 / self._count(accepted)
        owner.add_parts(accepted, sharded.scale)

    def make_result(self, sharded: ShardedUpdate) -> PartUpdate:
        """Encode this node's result as an owner: the message to everybody."""
        owner = sharded.owner
        parts = len(self.owners)
        missing = frozenset(sharded.missing)
        if owner is None:
            return PartUpdate([], self._run, sharded.step, parts, parts, missing, sharded.is_last)
        codec = None if sharded.is_last else self._codec
        messages = owner.groups.encode(None, codec)
        return PartUpdate(
            messages, self._run, sharded.step, parts, owner.place, missing, sharded.is_last
        )

    # ---- the results of all owners -----------------------------------------------------------------------------------

    def unfit(self, updates: Iterable[tuple[NodeRun, list[Message]]]) -> list[NodeRun]:
        """Return the senders of those results of this step that do not fit the owners that this node counts.

        Each is of another number of parts, of a part that its sender does not own, of a node that takes no part, or a
        whole update.
        """
        parts = len(self.owners)
        places = {
            owner: place
            for place, owner in enumerate(self.owners)
            if self._division.part(parts, place)
        }
        return [
            run
            for run, update in updates
            if not isinstance(update, PartUpdate)
            or run not in self.senders
            or (update.parts, update.place) != (parts, places.get(run, parts))
        ]

    def settle(self, results: Sequence[PartUpdate], step: int) -> None:
        """Note which parts the results of a step contain; put back those that their owners will never accept."""
        # Three kinds of parts: those in a result, those that a result names as missing, and those for an owner that has
        # published no result at all, because it is gone.
        contributors = {result.sender for result in results}
        for result in results:
            self._settle_result(result)
            # Parts for an owner that is gone come back to who leaves, too: it takes one more step, to send them again.
            if result.is_last and contributors.issuperset(self.owners):
                self._left.add(result.sender)
        # A dead owner's residual is lost, but not what it has not accepted: every sender still has these parts.
        for owner, pending in self._ledger.items():
            for number, part in pending.items() if owner not in contributors else ():
                if part.is_open and number <= step:
                    self._return(part)
        # An owner that goes before its first result owns nothing yet.
        gone = (set(self.owners) - contributors) & self._last_contributors
        for index, owner in enumerate(self.owners):
            if owner in gone:
                parts = self._division.part(len(self.owners), index)
                self._lost_elements += sum(part.numel for _, part in parts)
        self._last_contributors = contributors
        # A node that was away learns from this table, in a snapshot, which of its parts the owners had accepted. Only
        # the exceptions are in it: usually an owner has accepted everything before the step.
        self.reject_parts(step, contributors)

    def reject_parts(self, step: int, contributors: Collection[NodeRun] = ()) -> None:
        """Note that the owners, except these, accept no part from ``step`` on."""
        for owner in set(self.owners).difference(contributors):
            by_sender = self.accepted.setdefault(owner, {})
            for sender in self.senders:
                by_sender.setdefault(sender, step)

    def _forget_accepted(self, step: int) -> None:
        """Forget what senders will not ask for: they have gone on for some steps, or were started again."""
        # In a run of weeks owners come and go by the thousand, and every newcomer gets the table.
        present = {run.id: run for run in self.senders}
        kept = {
            owner: {
                sender: first
                for sender, first in by_sender.items()
                if sender > (later := present.get(sender.id, _NOBODY))
                or (sender == later and first >= step - _RETURN_STEPS)
            }
            for owner, by_sender in self.accepted.items()
        }
        self.accepted = {owner: by_sender for owner, by_sender in kept.items() if by_sender}

    def _settle_result(self, result: PartUpdate) -> None:
        for sender in result.missing:
            # The sender of a part that is missing is gone, so no later part of it follows.
            self.accepted.setdefault(result.sender, {}).setdefault(sender, result.step)
        for number, part in self._ledger.get(result.sender, {}).items():
            if not part.is_open or number > result.step:
                continue
            if number == result.step and self._run in result.missing:
                self._return(part)
            else:
                part.is_open = False

    def _return(self, pending: PendingPart) -> None:
        """Put a part that its owner will never accept back into the residual."""
        pending.is_open = False
        pending.is_back = True
        self._put_back(pending.part, 1.0)

    def clear(self) -> None:
        """Forget the sums that were not published: all nodes go on from other parameters."""
        if self._owner is not None:
            for encoder in self._owner.groups.encoders:
                encoder.residual[...] = 0.0

    def drain_lost_elements(self) -> int:
        """Return the number of elements that lost their owner since the last call."""
        count = self._lost_elements
        self._lost_elements = 0
        return count

    def finish_step(self, step: int, oldest: int) -> None:
        """Forget the parts of a finished step; parts from ``oldest`` on stay in the ledger for a return."""
        ledger = {
            owner: {
                number: part for number, part in parts.items() if part.is_open or number >= oldest
            }
            for owner, parts in self._ledger.items()
        }
        self._ledger = {owner: parts for owner, parts in ledger.items() if parts}
        later = {
            sender: {number: part for number, part in parts.items() if number > step}
            for sender, parts in self._arrived.items()
        }
        self._arrived = {sender: parts for sender, parts in later.items() if parts}

    # ---- absence and checkpoints -------------------------------------------------------------------------------------

    def take_back_unapplied(
        self,
        unfinished: Iterable[tuple[ShardedUpdate, list[Message]]],
        final: int | None,
        accepted: Accepted,
        step: int,
    ) -> None:
        """Return to the residual what nobody applied, after an absence.

        That is this node's parts that no owner accepted, and others' parts in its own results that nobody applied.

        Args:
            unfinished: this node's last updates, with its results.
            final: number of this node's first update that nobody applied; None: nobody knows this node.
            accepted: of the node that gives the parameters.
            step: number of the next step there.
        """
        # Two things are undone: results of this node that nobody applied, and, at the other owners, parts of this node
        # that were not accepted. Both are decided by what the members agreed on, never by what this node believes.
        owners = [self._owner]
        for sharded, result in unfinished:
            owner = sharded.owner
            if owner is not None and (final is None or sharded.step >= final):
                # The senders have put these parts back.
                owner.groups.put_back(result)
                owner.add_parts(sharded.accepted or [], -sharded.scale)
                owners.append(owner)
        self.accepted = accepted
        for owner_run, pending in self._ledger.items():
            # Without an entry the owner has accepted everything up to this node's last update that was applied.
            stop = accepted.get(owner_run, {}).get(self._run, (final or 0) + 1)
            for number, part in pending.items():
                if final is not None and step <= number <= final:
                    continue  # the owner's result of this step is still to come
                # All nodes know the same of an older part that came back, and its owner may have come back since.
                is_old = part.is_back and final is not None and number < final - 1
                is_accepted = final is not None and number < stop and not is_old
                # The residual is right already where a part was accepted and did not come back, or came back and was
                # not accepted.
                if is_accepted == part.is_back:
                    self._put_back(part.part, -1.0 if is_accepted else 1.0)
                part.is_open = False
                part.is_back = not is_accepted
        # An earlier step may have had another owner object; each residual moves once.
        for owner in dict.fromkeys(owners):
            self._retire(owner)
        self._owner = None
        self.owners = ()
        self.senders = ()
        self._last_contributors.clear()
        self._arrived.clear()

    def open_parts(self) -> Iterator[PartUpdate]:
        """Yield this node's parts that owners may still accept."""
        for pending in self._ledger.values():
            for part in pending.values():
                if part.is_open:
                    yield part.part

    def owner_state(
        self, sharded: ShardedUpdate | None, result: Sequence[Message]
    ) -> Mapping[str, Any] | None:
        """Return a copy of this node's state as an owner; None if it owns nothing.

        Args:
            sharded: the update of an unfinished step, whose parts are in their senders' residuals in a checkpoint.
            result: the messages of its result.
        """
        owner = self._owner
        if owner is None:
            return self._loaded
        encoders = [encoder.state_dict() for encoder in owner.groups.encoders]
        if sharded is not None and sharded.owner is owner:
            # In a checkpoint the parts of an unfinished step are in their senders' residuals. So they must not be in
            # the owner's as well: the result goes back, and the parts go out again.
            for encoder, message in zip(encoders, result, strict=False):
                apply(message, encoder["residual"])
            for part in sharded.accepted or ():
                for encoder, message in zip(encoders, part, strict=True):
                    apply(message, encoder["residual"], -sharded.scale)
        groups = [group for group, _ in self._division.part(owner.parts, owner.place)]
        return {
            "parts": owner.parts,
            "place": owner.place,
            "groups": groups,
            "encoders": encoders,
        }

    def load_owner(self, state: Mapping[str, Any] | None) -> None:
        """Continue as the owner of a checkpoint; a node that owns another part now passes the residual on."""
        self._loaded = state

    def _use_loaded(self) -> None:
        state = self._loaded
        owner = self._owner
        self._loaded = None
        if state is None:
            return
        if owner is not None and (owner.parts, owner.place) == (state["parts"], state["place"]):
            for encoder, saved in zip(owner.groups.encoders, state["encoders"], strict=True):
                encoder.load_state_dict(saved)
            return
        # A node that comes late is no sender yet.
        self._put_back(part_of_state(state, self._run), self._count({*self.senders, self._run}))


def keep_part(arrived: Arrived, part: PartUpdate) -> None:
    """Keep a part by its sender and step; raise `MessageError` if too many of the sender wait."""
    by_step = arrived.setdefault(part.sender, {})
    if len(by_step) >= _PARTS_MAX:
        raise MessageError(f"{len(by_step)} parts wait for results of later steps")
    by_step[part.step] = part


def can_be_of_same_owners(results: Sequence[list[Message]]) -> bool:
    """Return whether the results of a step, in the order of their senders, can be those of the same owners."""
    parts = {result.parts if isinstance(result, PartUpdate) else 0 for result in results}
    places = [
        result.place
        for result in results
        if isinstance(result, PartUpdate) and result.place < result.parts
    ]
    return len(parts) == 1 and 0 not in parts and places == sorted(set(places))


def part_of_state(state: Mapping[str, Any], run: NodeRun) -> PartUpdate:
    """Return the residual in ``Sharding.owner_state`` as dense messages."""
    messages = [dense_message(saved["residual"]) for saved in state["encoders"]]
    return PartUpdate(messages, run, 0, state["parts"], state["place"])


def add_owner_state(
    state: Mapping[str, Any] | None, residuals: Sequence[NDArray[Any]], factor: float
) -> None:
    """Add the residual in ``Sharding.owner_state``, times a factor, to the residuals of all groups."""
    if state is None:
        return
    for group, saved in zip(state["groups"], state["encoders"], strict=True):
        residual = residuals[group]
        partition = Partition(residual.size, state["parts"], first=group % state["parts"])
        for in_whole, in_part in partition[state["place"]].slices():
            part = np.asarray(saved["residual"])[in_part]
            for target, values in blocks(residual[in_whole], part):
                target += factor * values
