"""The shared parameters as this node holds them, apart from what its local steps do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import device_of
from ..message import Message
from .groups import Groups
from .outer import MomentumSum
from .sums import Beside, ExactSum, PlainSum, Sum
from .views import Arrays, add, copies, difference, kinds, put, views, writable_views

__all__ = ["Replica"]

# What parameters may differ by from shared ones and residual, in parts of both: eight roundings of float32.
_ROUNDING = 2.0**-20


class Replica:
    """The parameters that all nodes share.

    Without local steps they are the caller's own. With them (``every``, ``step_moved``) the caller's run ahead, and
    the anchor is a copy of the shared ones: what the caller's differ from it is the update.

    With ``applies_residual`` the caller's hold this node's residual besides, and whatever local steps add to them: the
    residual is what they differ from the anchor, brought up to date before an encode. From then until the step is
    finished they hold the encoded messages as well, in full. So an encode leaves them alone, and when messages are
    applied only the elements change that those name.

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
        self._plain = PlainSum(groups)
        self._applies_residual = applies_residual
        # Encoders that take more out of the residual than they send: the parameters would bring it back.
        self._is_lossy = any(
            encoder.clip is not None or encoder.on_nonfinite == "skip"
            for encoder in groups.encoders
        )

    def take_anchor(self, params: Any) -> None:
        """Take ``params`` as they are for the shared ones, unless there is an anchor already."""
        if not self.anchor:
            self.anchor = copies(writable_views(params))

    def restore(self, params: Any) -> None:
        """Let the caller's parameters hold the residual that a checkpoint brought, which may be another's as well.

        Elements that hold it already, but for rounding, stay as they are: so training goes on bit for bit.
        """
        if not self._applies_residual or self.local_steps:
            return
        for param, shared, residual in self._parts(params):
            expected = shared + residual
            bound = _ROUNDING * (np.abs(shared) + np.abs(residual))
            np.copyto(param, expected, where=~(np.abs(param - expected) <= bound))

    def drop_anchor(self) -> None:
        """Let the caller's parameters be the shared ones."""
        self.anchor = []
        self.local_steps = 0

    def add_local(self, update: Any, params: Any) -> None:
        """Add one local step's update to the caller's parameters."""
        add(writable_views(params), views(update))

    def moved(self, params: Any) -> tuple[Arrays | None, Callable[[int], None] | None]:
        """Return what local steps have added since the last exchange.

        Or None, and what brings the residual of the group of a number up to date with it.
        """
        if not self._applies_residual:
            return difference(writable_views(params), self.anchor), None
        targets, groups = writable_views(params), self._groups
        groups.residuals(self.anchor)  # refused where one is on a device

        def refresh(index: int) -> None:
            own, shared = groups.select(targets, index), groups.select(self.anchor, index)
            groups.encoders[index].hold_difference(own, shared)

        return None, refresh

    def after_encode(self, params: Any, own: Sequence[Message], *, has_moved: bool) -> None:
        """Take local steps back out of the caller's parameters: they are in the residual or in a message now.

        Args:
            params: the caller's.
            own: the messages; parameters that hold the residual hold these besides.
            has_moved: the parameters hold the update already.
        """
        self.local_steps = 0
        if not self.anchor or (self._applies_residual and has_moved and not self._is_lossy):
            return
        self.show(params)
        if self._applies_residual:
            self._plain.add([own], writable_views(params), 1.0)

    def refuse(self, params: Any) -> None:
        """Take an update that is not finite back out of the caller's parameters; its finite part is in the residual."""
        if not self.anchor:
            return
        self.local_steps = 0
        if self._applies_residual:
            self._keep_finite(params)
        self.show(params)

    def fold(self, params: Any, own: Sequence[Message] | None) -> None:
        """Put what the caller's parameters hold beyond the shared ones into the residual, before those are replaced.

        Args:
            params: the caller's.
            own: messages of a step that is not finished, which are not to be put into the residual.
        """
        encoders = self._groups.encoders
        if not self.anchor or any(device_of(encoder.residual) >= 0 for encoder in encoders):
            return
        if not self._applies_residual:
            for param, shared, residual in self._parts(params):
                moved = param - shared
                np.add(residual, moved, out=residual, where=np.isfinite(moved), casting="same_kind")
            return
        self._keep_finite(params)
        self._groups.put_back(own or (), -1.0)

    def _keep_finite(self, params: Any) -> None:
        for param, shared, residual in self._parts(params):
            moved = param - shared
            np.copyto(residual, moved, where=np.isfinite(moved), casting="same_kind")

    def show(self, params: Any) -> None:
        """Let the caller's parameters be the shared ones, with the residual where they are to hold it."""
        if not self._applies_residual:
            put(writable_views(params), self.anchor)
            return
        for param, shared, residual in self._parts(params):
            np.add(shared, residual, out=param)

    def _parts(self, params: Any) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Return the caller's parameters, the shared ones and the residual, array by array."""
        residuals = self._groups.residuals(self.anchor)
        return zip(writable_views(params), self.anchor, residuals, strict=True)

    def apply(
        self,
        payloads: Sequence[Sequence[Message]],
        params: Any,
        scale: float,
        *,
        own: Sequence[Message] | None = None,
        has_moved: bool = False,
    ) -> bool:
        """Add messages to the shared parameters; return whether that was provably exact.

        Args:
            payloads: each one message for every group, in order.
            params: the caller's.
            scale: factor of every message.
            own: that of the payloads which the caller's parameters hold already, where they hold the residual.
            has_moved: the caller's parameters differ from the shared ones by local steps, which they keep.
        """
        if not self.anchor:
            return self.total.add(payloads, params, scale)
        targets = writable_views(params)
        if self._applies_residual:
            place = next((at for at, one in enumerate(payloads) if one is own), None)
            return self.total.add(payloads, self.anchor, scale, Beside(targets, place))
        local = difference(targets, self.anchor) if has_moved else []
        is_exact = self.total.add(payloads, self.anchor, scale)
        put(targets, self.anchor)
        if has_moved:
            add(targets, local)
        return is_exact

    def give(self, params: Any) -> tuple[Arrays, dict[str, Any] | None]:
        """Return the shared parameters, or what makes them up where they are exact, and their momentum; not copied.

        Raises:
            TypeError: the parameters are not in this machine's memory.
        """
        total = self.total
        if isinstance(total, ExactSum) and total.initial:
            exact = {"scale": total.scale, "exactness": total.exactness.as_tuple()}
            return [*total.initial, *total.total], exact
        shared = self.anchor or writable_views(params)
        if isinstance(total, MomentumSum):
            total.begin(shared)
            return [*shared, *total.velocity], None
        return shared, None

    @property
    def velocity(self) -> Arrays:
        """The momentum of the shared parameters; empty where they have none, and before the first step."""
        return self.total.velocity if isinstance(self.total, MomentumSum) else []

    def given(self, params: Any, *, is_exact: bool) -> list[tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every array that ``give`` returns."""
        own = kinds(writable_views(params))
        if is_exact:
            return [*own, *(("<f8", shape) for _, shape in own)]
        return own * 2 if isinstance(self.total, MomentumSum) else own

    def take(self, shared: Arrays, exact: dict[str, Any] | None, params: Any) -> None:
        """Put what another replica gave in the place of the shared parameters and of the caller's."""
        target: Any = self.anchor or params
        total = self.total
        if isinstance(total, ExactSum) and exact is not None:
            half = len(shared) // 2
            total.load_state_dict({"initial": shared[:half], "total": shared[half:], **exact})
            total.write(target)
        elif isinstance(total, MomentumSum):
            total.begin(target)
            put([*writable_views(target), *total.velocity], shared)
        else:
            put(writable_views(target), shared)
        if self.anchor:
            self.show(params)
