"""Checkpoints of an exchange: one per worker, and how they are shared out among another number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..message import apply
from ..state import check_format
from .options import Reduction
from .outer import MomentumSum
from .parts import Parts
from .prepare import Preparer
from .sums import ExactSum
from .views import copies

__all__ = ["load_state", "redistribute", "state_of"]

_FORMAT = 1
_WHAT = "state of an exchange"
_KEYS = {"step", "encoders", "velocity", "anchor", "local_steps", "exact", "outer_velocity"}


def state_of(parts: Parts, preparer: Preparer) -> dict[str, Any]:
    """Return a copy of everything that the next step depends on; a message that is not finished is put back."""
    groups, replica, progress = parts.groups, parts.replica, parts.progress
    encoders = [encoder.state_dict() for encoder in groups.encoders]
    if progress.own is not None:
        for index, message in enumerate(progress.own.messages[: len(groups)]):
            apply(message, encoders[index]["residual"])
    total = replica.total
    return {
        "format": _FORMAT,
        "step": progress.step,
        "encoders": encoders,
        "velocity": copies(preparer.velocity),
        "anchor": copies(replica.anchor),
        "outer_velocity": copies(replica.velocity),
        "local_steps": replica.local_steps,
        "exact": total.state_dict() if isinstance(total, ExactSum) else None,
    }


def load_state(state: dict[str, Any], parts: Parts, preparer: Preparer) -> None:
    """Continue from ``state``.

    Raises:
        ValueError: it is of another format, model or kind of exchange.
    """
    groups, replica, progress = parts.groups, parts.replica, parts.progress
    check_format(state, _FORMAT, _WHAT)
    missing = _KEYS - state.keys()
    if missing:
        raise ValueError(f"{_WHAT} lacks {', '.join(sorted(missing))}")
    if len(state["encoders"]) != len(groups):
        raise ValueError(f"state has {len(state['encoders'])} groups, this exchange {len(groups)}")
    total = replica.total
    if isinstance(total, ExactSum) != (state["exact"] is not None):
        raise ValueError("one of state and exchange is exact, the other is not")
    if state["outer_velocity"] and not isinstance(total, MomentumSum):
        raise ValueError(
            "the state has a velocity of the shared parameters, this exchange no outer_momentum"
        )
    if state["velocity"] and parts.options.preparation.momentum == 0.0:
        raise ValueError("the state has the momentum of updates, this exchange no momentum")
    for encoder, one in zip(groups.encoders, state["encoders"], strict=True):
        encoder.load_state_dict(one)
    if isinstance(total, ExactSum):
        total.load_state_dict(state["exact"])
    if isinstance(total, MomentumSum):
        total.velocity = copies(state["outer_velocity"])
    preparer.velocity = copies(state["velocity"])
    replica.anchor = copies(state["anchor"])
    replica.local_steps = state["local_steps"]
    progress.step = state["step"]


def redistribute(
    states: Sequence[dict[str, Any]], world_size: int, *, reduction: Reduction = "mean"
) -> list[dict[str, Any]]:
    """Share the states of all workers out among another number of workers; nothing that was not sent is lost.

    Worker i of the new world gets the sum of the residuals, and of the momentum, of the old workers i, i +
    world_size, and so on; workers that had no predecessor begin with empty ones. All other state is the same
    everywhere, or that of old worker i.

    Args:
        states: of all old workers, by rank, taken after the same step; not modified.
        world_size: of the new world, 1 or more.
        reduction: of the exchange. The mean over another number of nodes weighs every node differently; residuals are
            then multiplied by new / old number, so that they add the same to the parameters as before.

    Returns:
        One state for each new worker, by rank.

    Raises:
        ValueError: the states are not of one run and step, or were taken between exchanges of local steps.

    >>> import numpy as np, gradwire as gw
    >>> states, node = [], gw.Node("127.0.0.1:0", secret=bytes(range(32)))
    >>> for rank in range(3):
    ...     encoder = gw.Encoder(2, threshold=1.0)
    ...     encoder.residual[:] = (0.25, 0.5 * rank)
    ...     states.append(gw.Exchange(encoder, node).state_dict())
    >>> node.close()
    []
    >>> two = gw.exchange.redistribute(states, 2, reduction="sum")
    >>> [state["encoders"][0]["residual"].tolist() for state in two]
    [[0.5, 1.0], [0.25, 0.5]]
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, must be 1 or more")
    _check_alike(states)
    factor = world_size / len(states) if reduction == "mean" else 1.0
    return [
        _merged(states, states[rank % len(states)], range(rank, len(states), world_size), factor)
        for rank in range(world_size)
    ]


def _check_alike(states: Sequence[dict[str, Any]]) -> None:
    if not states:
        raise ValueError("there are no states to redistribute")
    for state in states:
        check_format(state, _FORMAT, _WHAT)
        if state["local_steps"]:
            raise ValueError(
                f"a state was taken {state['local_steps']} local steps after an exchange: "
                "take it right after one"
            )
    described = [
        (state["step"], [(one["numel"], one["dtype"]) for one in state["encoders"]])
        for state in states
    ]
    if any(one != described[0] for one in described):
        raise ValueError(f"the states are of different steps or models: {described}")


def _merged(
    states: Sequence[dict[str, Any]], alike: dict[str, Any], ranks: range, factor: float
) -> dict[str, Any]:
    """Return a state like ``alike`` with the sum of what the workers ``ranks`` have not sent."""
    encoders = []
    for index, encoder in enumerate(alike["encoders"]):
        residuals = [states[rank]["encoders"][index]["residual"] for rank in ranks]
        encoders.append({**encoder, "residual": _sum(encoder["residual"], residuals, factor)})
    velocities = [states[rank]["velocity"] for rank in ranks if states[rank]["velocity"]]
    velocity = [
        _sum(one, [velocity[index] for velocity in velocities], factor)
        for index, one in enumerate(alike["velocity"])
    ]
    return {**alike, "encoders": encoders, "velocity": velocity}


def _sum(like: Any, arrays: Sequence[Any], factor: float) -> Any:
    total = np.zeros(like.shape, np.float64)
    for array in arrays:
        total += array
    return (total * factor).astype(like.dtype)
