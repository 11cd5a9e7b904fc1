"""One step, in its order: room, encode, hand over and wait, apply, tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..message import Message
from . import clock
from .comparison import Comparison
from .entrance import Entrance
from .handover import Handover, LeftBehind
from .optimizer_state import average_optimizer, optimizer_messages
from .parts import Parts
from .prepare import Preparer
from .progress import Own
from .results import StepResult, Totals

if TYPE_CHECKING:
    from ..transport import Peer

__all__ = ["Step"]


class Step:
    """Does the steps that send something.

    Attributes:
        preparer: what happens to an update before it is encoded.
        totals: of all steps.
    """

    def __init__(self, parts: Parts, comparison: Comparison, entrance: Entrance) -> None:
        self._options, self._groups, self._replica = parts.options, parts.groups, parts.replica
        self._roster, self._members, self._progress = parts.roster, parts.members, parts.progress
        self._comparison = comparison
        self._entrance = entrance
        self._handover = Handover(parts, comparison, self.poll)
        self.preparer = Preparer(parts.options.preparation, parts.groups)
        self.totals = Totals()

    def poll(self, timeout_s: float) -> None:
        """Send what there is room for, and receive for up to ``timeout_s``."""
        self._entrance.pump()
        self._members.poll(timeout_s, self._progress.step)

    def run(
        self,
        update: Any,
        params: Any,
        optimizer_state: Sequence[Any],
        *,
        has_moved: bool = False,
    ) -> StepResult | None:
        """Send an update, from the room for it to the parameters that hold it; the arguments are ``Exchange.step``'s.

        With ``has_moved`` the update is what the parameters differ from the shared ones.

        Returns:
            What the step did; None where a later call finishes it (``overlap``).
        """
        self._handover.wait_for_room(lambda: self._entrance.come_in(params, optimizer_state))
        begin_s = clock.now_s()
        messages = self._encode(update, params, has_moved=has_moved)
        self._replica.after_encode(params, messages, has_moved=has_moved)
        own = self._keep(messages, optimizer_state, begin_s)
        if self._options.overlap:
            self._send(own)
            return None
        again = partial(self._groups.encode, None, self._options.codec)
        return self._finish_or_repeat(own, again, params, optimizer_state)

    def _finish_or_repeat(
        self,
        own: Own,
        encode_again: Callable[[], list[Message]],
        params: Any,
        optimizer_state: Sequence[Any],
    ) -> StepResult:
        """Finish a step, or another one later where the others have gone on without this node."""
        while True:
            try:
                return self._finish(own, params, optimizer_state)
            except LeftBehind:
                # What was encoded is in the residual again, for the step at which they take this node in.
                self._entrance.come_in(params, optimizer_state)
            begin_s = clock.now_s()
            messages = encode_again()
            self._replica.after_encode(params, messages, has_moved=True)
            own = self._keep(messages, optimizer_state, begin_s)

    def _encode(self, update: Any, params: Any, *, has_moved: bool) -> list[Message]:
        codec = self.preparer.begin(self._progress.step, self._options.codec)
        refresh = None
        if has_moved:
            update, refresh = self._replica.moved(params)
        messages = self._groups.encode(self.preparer.update(update), codec, refresh)
        self.preparer.mask(messages)
        return messages

    def leave(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult:
        """Send everything that is left as the last update, and say so."""
        self._handover.wait_for_room(lambda: self._entrance.come_in(params, optimizer_state))
        begin_s = clock.now_s()
        messages = self._groups.flush()
        self._replica.after_encode(params, messages, has_moved=False)
        own = self._keep(messages, optimizer_state, begin_s)
        result = self._finish_or_repeat(own, self._groups.flush, params, optimizer_state)
        self._handover.say_goodbye()
        return result

    def finish_earlier(self, params: Any, optimizer_state: Sequence[Any]) -> StepResult | None:
        """Finish a step that was interrupted after encoding, or is open on purpose (``overlap``), if there is one."""
        own = self._progress.own
        if own is None:
            return None
        try:
            return self._finish(own, params, optimizer_state, has_moved=True)
        except LeftBehind:
            self._entrance.come_in(params, optimizer_state)
            return None

    def _keep(self, messages: list[Message], optimizer_state: Sequence[Any], begin_s: float) -> Own:
        """Keep the messages, which were encoded since ``begin_s``, until the step is finished."""
        if self._options.average_optimizer:
            messages += optimizer_messages(optimizer_state)
        payload = messages[0] if len(messages) == 1 else b"".join(map(bytes, messages))
        own = Own(self._progress.step, messages, payload, clock.now_s() - begin_s)
        self._progress.own = own
        return own

    def _send(self, own: Own) -> None:
        """Hand over the pending message if there is room, without waiting for anything."""
        begin_s = clock.now_s()
        self._handover.begin(own)
        own.wait_s += clock.now_s() - begin_s

    def _finish(
        self,
        own: Own,
        params: Any,
        optimizer_state: Sequence[Any],
        *,
        has_moved: bool = False,
    ) -> StepResult:
        """Hand over the pending message, wait for the others' and apply all of them."""
        begin_s = clock.now_s()
        self._handover.swap(own)
        swapped_s = clock.now_s()
        own.wait_s += swapped_s - begin_s
        is_sync = self._options.is_sync
        others = self._roster.take_step(own.step) if is_sync else self._members.take_all()
        is_exact = self._apply(others, own, params, optimizer_state, has_moved=has_moved)
        if is_sync:
            self._members.finish_step(own.step, [peer for peer, _ in others])
        result = self._result(own, others, is_exact, clock.now_s() - swapped_s)
        self._progress.finish(own)
        self.totals.add(result)
        self._entrance.serve(params, optimizer_state)
        if self._options.on_step is not None:
            self._options.on_step(result)
        self._comparison.take_part(params)
        return result

    def _apply(
        self,
        others: list[tuple[Peer, list[Message]]],
        own: Own,
        params: Any,
        optimizer_state: Sequence[Any],
        *,
        has_moved: bool,
    ) -> bool:
        """Add all messages by node id, the own ones at their place; return whether that was provably exact."""
        in_order = sorted([*others, (self._roster.me, own.messages)], key=_by_node_id)
        payloads = [messages for _, messages in in_order]
        if self._options.average_optimizer:
            average_optimizer(payloads, len(self._groups), optimizer_state)
        count = len(payloads) if self._options.is_sync else len(self._roster.peers) + 1
        return self._replica.apply(
            payloads,
            params,
            self._options.scale_for(count),
            own=own.messages,
            has_moved=has_moved,
        )

    def _result(
        self,
        own: Own,
        others: list[tuple[Peer, list[Message]]],
        is_exact: bool,
        apply_s: float,
    ) -> StepResult:
        first = own.messages[0]
        lost, joined, ignored = self._roster.take_news()
        return StepResult(
            step=self._progress.step,
            sent_bytes=own.nbytes,
            density=self._groups.density(own.messages),
            threshold=first.threshold,
            is_shakeup=first.is_shakeup,
            received=len(others),
            received_bytes=sum(one.nbytes for _, messages in others for one in messages),
            applied=len(others) + 1,
            ignored=ignored,
            lost=lost,
            joined=joined,
            is_exact=is_exact,
            encode_s=own.encode_s,
            wait_s=own.wait_s,
            apply_s=apply_s,
            staleness=0 if self._options.is_sync else self._handover.staleness(),
            ratio=4 * self._groups.numel / own.nbytes,
        )


def _by_node_id(one: tuple[Peer, list[Message]]) -> tuple[int, int]:
    return one[0].id, one[0].incarnation
