"""The optimiser's state, averaged over the nodes together with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import MessageError
from ..message import Message, apply_many, dense_message
from .views import views, writable_views

__all__ = ["average_optimizer", "optimizer_messages"]

# Keys of the arrays, behind those of any group.
_FIRST_KEY = 1 << 31


def optimizer_messages(state: Sequence[Any]) -> list[Message]:
    """Return a dense message for each array of a state."""
    return [
        dense_message(array, key=_FIRST_KEY + index)
        for index, array in enumerate(writable_views(state))
    ]


def average_optimizer(
    payloads: Sequence[Sequence[Message]], groups: int, state: Sequence[Any]
) -> None:
    """Set every array of the state to its mean over the nodes.

    Args:
        payloads: of all nodes, in order: the groups' messages, then those of the state.
        groups: how many messages are the groups'.
        state: float32 or float64 arrays; modified in place.

    Raises:
        MessageError: a node's state has other arrays; nothing has changed then.
    """
    own = [array.size for array in views(state)]
    for payload in payloads:
        sizes = [message.numel for message in payload[groups:]]
        if sizes != own:
            raise MessageError(
                f"a peer's optimiser has arrays of {sizes} elements, this node's of {own}"
            )
    for index, array in enumerate(writable_views(state)):
        array[...] = 0.0
        apply_many([payload[groups + index] for payload in payloads], array, 1 / len(payloads))
