"""The shared parameters as this node holds them, apart from what its local steps do to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..message import Message, apply
from .groups import Groups
from .sums import ExactSum, Sum
from .views import Arrays, add, copies, difference, put, views, writable_views

__all__ = ["Replica"]


class Replica:
    """The parameters that all nodes share.

    Without local steps they are the caller's own. With them (``every``, ``step_moved``) the caller's run ahead, and
    the anchor is a copy of the shared ones: what the caller's differ from it is the update.

    With ``applies_residual`` the caller's hold this node's residual besides: anchor + residual, whatever local steps
    add to them. Then the residual needs no adding up: before an encode it is what the caller's differ from the anchor.

    Args:
        total: how messages are added.
        groups: whose residuals are meant.
        applies_residual: whether the caller's parameters hold them.

    Attributes:
        anchor: one array for each of the caller's; empty without local steps and ``applies_residual``.
        local_steps: taken since the last exchange.
    """

    def __init__(self, total: Sum, groups: Groups, *, applies_residual: bool = False) -> None:
        self.total = total
        self.anchor: Arrays = []
        self.local_steps = 0
        self._groups = groups
        self._applies_residual = applies_residual

    def take_anchor(self, params: Any) -> None:
        """Take ``params`` as they are for the shared ones, unless there is an anchor already."""
        if not self.anchor:
            self.anchor = copies(writable_views(params))

    def restore(self, params: Any) -> None:
        """Let the caller's parameters hold the residual that a checkpoint brought, which may be another's as well."""
        if self._applies_residual and not self.local_steps:
            self.show(params)

    def drop_anchor(self) -> None:
        """Let the caller's parameters be the shared ones."""
        self.anchor = []
        self.local_steps = 0

    def add_local(self, update: Any, params: Any) -> None:
        """Add one local step's update to the caller's parameters."""
        add(writable_views(params), views(update))

    def moved(self, params: Any) -> Arrays | None:
        """Return what local steps have added since the last exchange; None: it is in the residual now."""
        if not self._applies_residual:
            return difference(writable_views(params), self.anchor)
        residuals = self._groups.residuals(self.anchor)
        for residual, param, shared in zip(
            residuals, writable_views(params), self.anchor, strict=True
        ):
            np.subtract(param, shared, out=residual, casting="same_kind")
        return None

    def go_back(self, params: Any) -> None:
        """Take local steps back out of the caller's parameters: they are in the residual or in a message now."""
        if self.anchor:
            self.show(params)
            self.local_steps = 0

    def show(self, params: Any) -> None:
        """Let the caller's parameters be the shared ones, with the residual where they are to hold it."""
        targets = writable_views(params)
        if not self._applies_residual:
            put(targets, self.anchor)
            return
        for target, shared, residual in zip(
            targets, self.anchor, self._groups.residuals(self.anchor), strict=True
        ):
            np.add(shared, residual, out=target)

    def put_back(self, messages: Sequence[Message], params: Any) -> None:
        """Return messages that cannot be sent to the residual, and to the caller's parameters if they hold that."""
        self._groups.put_back(messages)
        if self._applies_residual:
            for index, message in zip(range(len(self._groups)), messages, strict=False):
                apply(message, self._groups.select(params, index))

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
        targets = writable_views(params)
        local = difference(targets, self.anchor) if has_moved else []
        is_exact = self.total.add(payloads, self.anchor, scale)
        if local:
            put(targets, self.anchor)
            add(targets, local)
        else:
            self.show(params)
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
            self.show(params)
