"""What the rooms of one exchange share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .groups import Groups
from .members import Members
from .model import Model
from .options import Options
from .outer import MomentumSum
from .progress import Progress
from .replica import Replica
from .roster import Roster
from .sums import ExactSum, PlainSum, Sum

if TYPE_CHECKING:
    from ..transport import Node

__all__ = ["Parts"]

# Updates that every node keeps after they are applied: a member may be one step ahead of another.
_KEEPS = 3


@dataclass(frozen=True)
class Parts:
    """One exchange's state, each piece in the room that is its own; the rooms above work on several of them.

    Attributes:
        node: whose messages are all this exchange's.
        options: as the caller gave them.
        groups: encoders and residuals.
        roster: who takes part, and what has arrived.
        members: keeps the roster.
        replica: the shared parameters.
        progress: this node's step and messages.
    """

    node: Node
    options: Options
    groups: Groups
    roster: Roster
    members: Members
    replica: Replica
    progress: Progress

    @staticmethod
    def of(node: Node, groups: Groups, options: Options) -> Parts:
        """Return the parts of an exchange that has not begun."""
        step = max(encoder.step for encoder in groups.encoders)
        keeps = _KEEPS if options.is_sync else 2 * options.max_staleness + _KEEPS
        total: Sum = PlainSum(groups)
        if options.exact:
            total = ExactSum(groups)
        elif options.outer_momentum:
            total = MomentumSum(groups, options.outer_momentum)
        roster = Roster(node.peer, groups, step=step, keeps=keeps)
        return Parts(
            node,
            options,
            groups,
            roster,
            Members(node, roster, Model.of(options, groups), is_sync=options.is_sync),
            Replica(total, groups, applies_residual=options.apply_residual),
            Progress(step, keeps),
        )
