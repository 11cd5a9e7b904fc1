"""Checkpoints of an exchange, one per worker, and their redistribution among another number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..state import check_format
from .options import Reduction
from .parameters import ExactSum, MomentumSum, add_owner_state, copies, owner_arrays
from .replica import Replica

__all__ = ["load_state", "redistribute", "state_of"]

_FORMAT = 2
_WHAT = "state of an exchange"
_KEYS = {
    "step",
    "encoders",
    "shared",
    "local_steps",
    "exact",
    "outer_velocity",
    "owner",
    "estates",
    "slots",
    "has_slow_links",
}


def state_of(replica: Replica) -> dict[str, Any]:
    """Return a copy of everything that the next step depends on; the messages of an unfinished step are put back."""
    total = replica.total
    encoders = [encoder.state_dict() for encoder in replica.groups.encoders]
    replica.put_back_into([encoder["residual"] for encoder in encoders])
    return {
        "format": _FORMAT,
        "step": replica.step,
        "encoders": encoders,
        "shared": copies(replica.shared),
        "local_steps": replica.local_steps,
        "exact": total.state_dict() if isinstance(total, ExactSum) else None,
        "outer_velocity": copies(total.velocity) if isinstance(total, MomentumSum) else [],
        "owner": replica.owner_state(),
        "estates": replica.estates(),
        "slots": replica.slots,
        "has_slow_links": replica.has_slow_links,
    }


def load_state(state: dict[str, Any], replica: Replica) -> None:
    """Continue from ``state``.

    Raises:
        ValueError: the state is of another format, model or kind of exchange.
    """
    check_format(state, _FORMAT, _WHAT)
    missing = _KEYS - state.keys()
    if missing:
        raise ValueError(f"{_WHAT} lacks {', '.join(sorted(missing))}")
    encoders, total = replica.groups.encoders, replica.total
    if len(state["encoders"]) != len(encoders):
        raise ValueError(
            f"state has {len(state['encoders'])} groups, this exchange {len(encoders)}"
        )
    if isinstance(total, ExactSum) != (state["exact"] is not None):
        raise ValueError("one of state and exchange is exact, the other is not")
    if state["outer_velocity"] and not isinstance(total, MomentumSum):
        raise ValueError(
            "the state has a velocity of the shared parameters, this exchange no outer_momentum"
        )
    slots = state["slots"]
    if slots != replica.slots:
        raise ValueError(f"the state has {_owners(slots)}, this exchange {_owners(replica.slots)}")
    for encoder, one in zip(encoders, state["encoders"], strict=True):
        encoder.load_state_dict(one)
    replica.load_owner(state["owner"], state["estates"])
    if isinstance(total, ExactSum):
        total.load_state_dict(state["exact"])
    if isinstance(total, MomentumSum):
        total.velocity = copies(state["outer_velocity"])
    replica.shared = copies(state["shared"])
    replica.local_steps = state["local_steps"]
    replica.step = state["step"]
    replica.has_slow_links = state["has_slow_links"]


def _owners(slots: int | None) -> str:
    return "no optimizer" if slots is None else f"an optimizer of {slots} values for each element"


def redistribute(
    states: Sequence[dict[str, Any]], world_size: int, *, reduction: Reduction = "mean"
) -> list[dict[str, Any]]:
    """Redistribute the states of all workers among another number of workers; no unsent update is lost.

    Worker i of the new world gets the sum of the residuals of the old workers i, i + world_size, and so on, as nodes
    and as owners; workers without a predecessor get residuals of zeros. All other state is the same everywhere, or old
    worker i's.

    Args:
        states: of all old workers, by rank, taken after the same step; not modified.
        world_size: of the new world, 1 or more.
        reduction: of the exchange. The mean over another number of nodes weighs every node differently; with "mean" the
            residuals are multiplied by new / old number, so that they add the same to the parameters as before.

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
    if not states:
        raise ValueError("there are no states to redistribute")
    for state in states:
        check_format(state, _FORMAT, _WHAT)
        if state["local_steps"]:
            raise ValueError(
                f"a state was taken {state['local_steps']} local steps after an exchange: "
                "take it right after one"
            )
    layouts = [
        (state["step"], [(one["numel"], one["dtype"]) for one in state["encoders"]])
        for state in states
    ]
    if any(one != layouts[0] for one in layouts):
        raise ValueError(f"the states are of different steps or models: {layouts}")
    # A worker's own parameters, which ``gradwire.torch`` adds, hold its old residual.
    states = [{name: one[name] for name in one.keys() - {"local", "rounded"}} for one in states]
    factor = world_size / len(states) if reduction == "mean" else 1.0
    weight = len(states) if reduction == "mean" else 1
    return [
        _merged(states[rank % len(states)], states[rank::world_size], factor, weight)
        for rank in range(world_size)
    ]


def _merged(
    like: dict[str, Any], states: Sequence[dict[str, Any]], factor: float, weight: int
) -> dict[str, Any]:
    """Return a state like ``like`` with the sum of the residuals of ``states``, times a factor.

    Without an optimiser a sum that an owner keeps weighs as much as ``weight`` updates of one node.
    """
    totals = [np.zeros(one["residual"].shape, np.float64) for one in like["encoders"]]
    for state in states:
        for total, one in zip(totals, state["encoders"], strict=True):
            total += one["residual"]
        if state["slots"] is None:
            add_owner_state(state["owner"], totals, weight)
    encoders = [
        {**one, "residual": (total * factor).astype(one["residual"].dtype)}
        for one, total in zip(like["encoders"], totals, strict=True)
    ]
    return {**like, "encoders": encoders, "owner": None, "estates": _estates(states)}


def _estates(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return residuals and states of owners that run an optimiser: changes of parameters, independent of the mean."""
    found = [one for state in states for one in state["estates"]]
    for owner in (state["owner"] for state in states if state["slots"] is not None):
        if owner is not None:
            place = {"parts": owner["parts"], "at": owner["at"]}
            found.append({**place, "arrays": owner_arrays(owner)})
    return found
