"""The shared parameters as this node holds them, apart from what its local steps do to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..message import Message
from .sums import ExactSum, Sum
from .views import Arrays, add, copies, difference, put, views, writable_views

__all__ = ["Replica"]


class Replica:
    """The parameters that all nodes share.

    Without local steps they are the caller's own. With them (``every``, ``step_moved``) the caller's run ahead, and
    the anchor is a copy of the shared ones: what the caller's differ from it is the update.

    Attributes:
        anchor: one array for each of the caller's; empty without local steps.
        local_steps: taken since the last exchange.
    """

    def __init__(self, total: Sum) -> None:
        self.total = total
        self.anchor: Arrays = []
        self.local_steps = 0

    def take_anchor(self, params: Any) -> None:
        """Take ``params`` as they are for the shared ones, unless there is an anchor already."""
        if not self.anchor:
            self.anchor = copies(writable_views(params))

    def drop_anchor(self) -> None:
        """Let the caller's parameters be the shared ones."""
        self.anchor = []
        self.local_steps = 0

    def add_local(self, update: Any, params: Any) -> None:
        """Add one local step's update to the caller's parameters."""
        add(writable_views(params), views(update))

    def moved(self, params: Any) -> Arrays:
        """Return what local steps have added since the last exchange."""
        return difference(writable_views(params), self.anchor)

    def go_back(self, params: Any) -> None:
        """Take local steps back out of the caller's parameters: they are in the residual now."""
        if self.anchor:
            put(writable_views(params), self.anchor)
            self.local_steps = 0

    def apply(
        self,
        payloads: Sequence[Sequence[Message]],
        params: Any,
        scale: float,
        *,
        has_moved: bool = False,
    ) -> bool:
        """Add messages to the shared parameters; return whether that was provably exact.

        Args:
            payloads: each one message for every group, in order.
            params: the caller's.
            scale: factor of every message.
            has_moved: the caller's parameters differ from the shared ones by local steps, which they keep.
        """
        if not self.anchor:
            return self.total.add(payloads, params, scale)
        local = self.moved(params) if has_moved else []
        is_exact = self.total.add(payloads, self.anchor, scale)
        put(writable_views(params), self.anchor)
        if local:
            add(writable_views(params), local)
        return is_exact

    def give(self, params: Any) -> tuple[Arrays, dict[str, Any] | None]:
        """Return the shared parameters, or what makes them up where they are exact; not copied.

        Raises:
            TypeError: the parameters are not in this machine's memory.
        """
        total = self.total
        if isinstance(total, ExactSum) and total.initial:
            exact = {"scale": total.scale, "exactness": total.exactness.as_tuple()}
            return [*total.initial, *total.total], exact
        return self.anchor or writable_views(params), None

    def take(self, shared: Arrays, exact: dict[str, Any] | None, params: Any) -> None:
        """Put what another replica gave in the place of the shared parameters and of the caller's."""
        target: Any = self.anchor or params
        total = self.total
        if isinstance(total, ExactSum) and exact is not None:
            half = len(shared) // 2
            total.load_state_dict({"initial": shared[:half], "total": shared[half:], **exact})
            total.write(target)
        else:
            put(writable_views(target), shared)
        if self.anchor:
            put(writable_views(params), self.anchor)
