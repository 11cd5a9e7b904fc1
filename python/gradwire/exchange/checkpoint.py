"""Checkpoints of an exchange, one per worker, and their redistribution among another number of workers."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import clock
from ..agreement import checked_state, sample_of
from ..arrays import blocks, copies, layouts, nonfinite, on_host, views, zeros_like
from ..codec import Encoder
from ..partition import Partition
from ..policy import whole
from ..state import EncoderState, check_dict, check_format, check_range
from .consistency import residual_digest
from .groups import Groups, split_by_tensor
from .options import Reduction
from .owner import add_owner_state
from .parameters import MomentumSum, Written, sample_left
from .replica import Replica

__all__ = [
    "extend_state",
    "load_state",
    "params_of",
    "redistribute",
    "state_of",
    "team_state_of",
]

_LOG = logging.getLogger(__name__)

_FORMAT = 5
_WHAT = "state of an exchange"
_KEYS = {
    "step",
    "apply_residual",
    "encoders",
    "tensors",
    "shared",
    "local_steps",
    "outer_velocity",
    "owner",
    "agreement",
    "last_updates",
    "training",
}


def state_of(replica: Replica, training: str, params: Any = None) -> dict[str, Any]:
    """Return a copy of everything that the next step depends on; the messages of an unfinished step are put back.

    Args:
        replica: whose state.
        training: identity of the training.
        params: as in ``Exchange.state_dict``.
    """
    total = replica.total
    # The residual takes in the local steps since the last exchange; this tells how much of it they are.
    sample = sample_left(replica) if replica.local_steps else None
    encoders = [encoder.state_dict() for encoder in replica.groups.encoders]
    residuals = [encoder["residual"] for encoder in encoders]
    if replica.pending is not None:
        _LOG.warning(
            "saved while the messages of step %d are on their way: the state goes on at this step, although the "
            "parameters have it; call catch_up() on all nodes before saving",
            replica.pending.step,
        )
    # The others will not wait for this message after a restart, so its content has to be in the residual.
    replica.put_back_into(residuals)
    now = replica.differing if params is None else views(params)
    if now and replica.applies_residual and replica.shared:
        # As the next encode does; up to then rounding separates the residual from this difference.
        arrays = list(map(on_host, now))
        parts = split_by_tensor(residuals, replica.groups.tensors, arrays)
        triples = zip(parts, arrays, map(on_host, replica.shared), strict=True)
        for triple in clock.shown("residuals are saved", triples, len(arrays)):
            for part, param, shared in blocks(*triple):
                moved = param - shared
                np.copyto(part, moved, where=np.isfinite(moved), casting="same_kind")
    return {
        "format": _FORMAT,
        "step": replica.step,
        "apply_residual": replica.applies_residual,
        "encoders": encoders,
        "tensors": replica.groups.tensors,
        "shared": copies(replica.shared),
        "local_steps": replica.local_steps,
        "outer_velocity": copies(total.velocity) if isinstance(total, MomentumSum) else [],
        "owner": replica.owner_state(),
        "agreement": replica.agreement.state(),
        "last_updates": replica.agreement.previous(),
        "median": replica.agreement.median,
        "sample": [] if sample is None else [np.array(on_host(sample))],
        "unsettled": [] if replica.written is None else [copy.deepcopy(vars(replica.written))],
        "training": training,
        "saved_by": f"{replica.run.id}, run {replica.run.incarnation}",
    }


def params_of(state: dict[str, Any]) -> Iterator[NDArray[Any]]:
    """Yield copies of the caller's parameters in a state: the shared ones, and the residual if applied."""
    shared = state["shared"]
    residuals = [encoder["residual"] for encoder in state["encoders"]]
    parts = split_by_tensor(residuals, state["tensors"], shared) if state["apply_residual"] else []
    for index, array in enumerate(clock.shown("parameters of a checkpoint", shared, len(shared))):
        param = np.array(array, order="C")
        if parts:
            param += parts[index]
        yield param


def check_state(state: dict[str, Any], replica: Replica) -> Sequence[dict[str, Any]]:
    """Return the states of the encoders; raise what ``load_state`` would."""
    _check_keys(state)
    try:
        return _checked(state, replica)
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"{_WHAT} cannot be read: {error!r}") from error


def load_state(state: dict[str, Any], replica: Replica, every: int) -> None:
    """Continue from ``state``, with an exchange every so many steps.

    Raises:
        ValueError: the state is of another format, model or kind of exchange.
    """
    # Everything is checked and converted before anything is loaded. NumPy's integers, as which some formats of files
    # keep numbers, would not travel in messages.
    states = check_state(state, replica)
    try:
        step = check_range("step", state["step"], 0, 2**63)
        local_steps = check_range("local_steps", state["local_steps"], 0, 2**63)
        median = float(state.get("median", 0.0))  # older states have none
        saved_by = str(state.get("saved_by", ""))  # older states have none
        previous = [np.array(sample, np.float32) for sample in state["last_updates"]]
        velocity = copies([np.asarray(array) for array in state["outer_velocity"]])
        shared = copies([np.asarray(array) for array in state["shared"]])
        sample = next((np.array(each, np.float64) for each in state.get("sample", ())), None)
        written = next(map(_written_of, state.get("unsettled", ())), None)
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"{_WHAT} cannot be read: {error!r}") from error
    total = replica.total
    for encoder, saved in zip(replica.groups.encoders, states, strict=True):
        encoder.load_state_dict(saved)
    if isinstance(total, MomentumSum):
        total.load_velocity(velocity)
    replica.agreement.load(state["agreement"])
    replica.agreement.load_previous(previous, median)
    replica.load_shared(shared, sample, written)
    # Who owns which part is known only when the training begins, perhaps with other nodes: until then the owner's state
    # is kept as it is.
    replica.load(step, local_steps, state["owner"], saved_by)
    number = step * every + local_steps
    if state.get("step_number", number) != number:
        _LOG.warning(
            "saved at step %d, with another number of local steps: step_number begins at %d, which is %d exchanges of "
            "every=%d and %d local steps; take data and schedules on from a count of your own",
            state["step_number"],
            number,
            state["step"],
            every,
            state["local_steps"],
        )


def team_state_of(state: Any, workers: int) -> tuple[int, list[NDArray[np.float64]]]:
    """Return the number of the next step, and the samples of the workers' sums, in the state of a worker of a team.

    Args:
        state: of the worker.
        workers: of the team if this worker leads it; 0: it does not.

    Raises:
        ValueError: the state is not that of a worker, or this worker leads, and the state is of another.
        TypeError: the state is no dict.
    """
    check_dict(state, _WHAT)
    if workers and "encoders" not in state:
        raise ValueError(
            f"this is local rank 0 of {workers}, and the state is of another rank, which has no residual: every rank "
            "loads the state that it has saved"
        )
    # A leader's older states have none.
    number = whole("step_number", state.get("step_number", 0 if workers else None), least=0)
    try:
        moved = [_checked_sample("moved", sample) for sample in state.get("moved", ())]
    except (TypeError, ValueError) as error:
        raise ValueError(f"moved is no list of samples: {error}") from error
    return number, moved


def _checked_sample(name: str, sample: Any) -> NDArray[np.float64]:
    """Return a copy of a sample of an update; raise `ValueError` or `TypeError` for what is none."""
    values = np.array(sample, np.float64)
    if values.ndim != 1 or nonfinite([values]):
        raise ValueError(f"{name} has {list(values.shape)}, must be one row of finite numbers")
    return values


def _check_keys(state: dict[str, Any]) -> None:
    check_dict(state, _WHAT)
    if "step_number" in state and "encoders" not in state:
        raise ValueError(
            "a state is of another local rank than 0, and has no residual: only a team's ranks load it; "
            "gw.exchange.redistribute takes one state for every machine, that of its local rank 0, and the new number "
            "of machines as world_size"
        )
    check_format(state, _FORMAT, _WHAT)
    missing = _KEYS - state.keys()
    if missing:
        raise ValueError(f"{_WHAT} lacks {', '.join(sorted(missing))}")


def _checked(state: dict[str, Any], replica: Replica) -> Sequence[dict[str, Any]]:
    """Return the states of the encoders; raise any error unless this exchange can go on with the state."""
    encoders = replica.groups.encoders
    if bool(state["apply_residual"]) != replica.applies_residual:
        raise ValueError(
            f"the state is of an exchange with apply_residual={state['apply_residual']}, this one has "
            f"{replica.applies_residual}: its parameters {'' if state['apply_residual'] else 'do not '}hold the "
            "residual; give the option that it had"
        )
    states: Sequence[dict[str, Any]] = state["encoders"]
    tensors = [None if indices is None else list(indices) for indices in state["tensors"]]
    if tensors != replica.groups.tensors:
        if state["owner"] is not None or not state["shared"]:
            raise ValueError(
                f"the state has encoders of {[saved['numel'] for saved in states]} elements, this exchange of "
                f"{[encoder.numel for encoder in encoders]}, and they cannot be divided anew: share with the same "
                "densities by pattern, the same parameter groups of the optimiser, and the same parameters frozen"
            )
        states = _regrouped(states, state["tensors"], replica.groups, state["shared"])
    if state["outer_velocity"] and not isinstance(replica.total, MomentumSum):
        raise ValueError(
            "the state has a velocity of the shared parameters, this exchange no outer_momentum, which share has from "
            "every=15 on: give the every that it had, or outer_momentum"
        )
    if len(states) != len(encoders):
        raise ValueError(f"{_WHAT} has {len(states)} encoders, this exchange {len(encoders)}")
    for encoder, saved in zip(encoders, states, strict=True):
        EncoderState.of(saved, encoder.numel, encoder.dtype)
    whole("step_number", state.get("step_number", 0), least=0)  # older states have none
    for name in ("shared", "outer_velocity"):
        arrays = [np.asarray(array) for array in state[name]]
        if arrays and sum(array.size for array in arrays) != replica.groups.numel:
            shapes = [array.shape for array in arrays]
            raise ValueError(f"{name} has arrays of {shapes}, for {replica.groups.numel} elements")
        if nonfinite(arrays):
            raise ValueError(f"{name} is not finite")
        # Others would be noticed in the first step only, when the other nodes wait already.
        if odd := {str(array.dtype) for array in arrays} - {"float32", "float64"}:
            raise ValueError(f"{name} is of {min(odd)}, must be float32 or float64")
    velocity, shared = (
        layouts([np.asarray(array) for array in state[name]])
        for name in ("outer_velocity", "shared")
    )
    if velocity and shared and velocity != shared:
        raise ValueError(f"outer_velocity has arrays of {velocity}, shared of {shared}")
    for sample in state["last_updates"]:
        _checked_sample("last_updates", sample)
    check_range("nodes", state.get("nodes", 0), 0, 2**31)  # older states have none
    try:
        checked_state(state["agreement"])
    except ValueError as error:
        raise ValueError(f"agreement {state['agreement']!r}: {error}") from error
    if not 0.0 <= float(state.get("median", 0.0)) < math.inf:  # older states have none
        raise ValueError(f"median is {state['median']}")
    for sample in state.get("sample", ()):  # older states have none
        numel = sample_of([np.asarray(array) for array in state["shared"]]).size
        if _checked_sample("sample", sample).size != numel:
            raise ValueError(f"sample has {np.shape(sample)} elements, must have {numel}")
    for saved in state.get("unsettled", ()):  # older states have none
        _check_written(_written_of(saved), encoders, layouts(state["shared"]))
    if not isinstance(state["training"], str):
        raise TypeError(f"training is {state['training']!r}")
    if state["owner"] is not None:
        _check_owner(state["owner"], encoders)
    return states


def _written_of(saved: Mapping[str, Any]) -> Written:
    """Return a copy of what a node's caller had written before a state was saved, and no exchange had settled."""
    arrays = {name: copies(saved[name]) for name in ("values", "offset", "shared", "moved")}
    return Written(
        **arrays, digest=str(saved["digest"]), encoders=list(map(dict, saved["encoders"]))
    )


def _check_written(
    written: Written, encoders: Sequence[Encoder], expected: list[list[Any]]
) -> None:
    """Raise any error unless these values were written into such parameters."""
    for arrays in (written.values, written.offset, written.shared, written.moved):
        if arrays and layouts(arrays) != expected:
            raise ValueError(f"unsettled has arrays of {layouts(arrays)}, shared of {expected}")
        if nonfinite(arrays):
            raise ValueError("unsettled is not finite")
    for encoder, saved in zip(encoders, written.encoders, strict=bool(written.encoders)):
        EncoderState.of(saved, encoder.numel, encoder.dtype)


def _check_owner(state: Mapping[str, Any], encoders: Sequence[Encoder]) -> None:
    """Raise any error unless this is the state of an owner in an exchange with these encoders."""
    parts = whole("parts", state["parts"], least=1)
    place = whole("place", state["place"], least=0)
    for number, saved in zip(state["groups"], state["encoders"], strict=True):
        encoder = encoders[number]
        part = Partition(encoder.numel, parts, first=number % parts)[place]
        EncoderState.of(saved, part.numel, encoder.dtype)


def redistribute(
    states: Sequence[dict[str, Any]], world_size: int, *, reduction: Reduction = "mean"
) -> list[dict[str, Any]]:
    """Redistribute the states of all workers among another number of workers; no unsent update is lost.

    Worker i of the new world gets the sum of the residuals of the old workers i, i + world_size, and so on, as nodes
    and as owners; workers without a predecessor get residuals of zeros. All other state is the same everywhere, or old
    worker i's.

    Args:
        states: of all old workers, by rank, taken after the same step; not modified. Those of shared optimisers are
            under "gradwire" in ``SharedOptimizer.state_dict``. A machine with several ranks is one worker, whose state
            its local rank 0 has.
        world_size: of the new world, 1 or more.
        reduction: of the exchange. The mean over another number of nodes weighs every node differently; with "mean" the
            residuals are multiplied by new / old number, so that they add the same to the parameters as before.

    Returns:
        One state for each new worker, by rank.

    Raises:
        ValueError: the states are not of one run and step, or were taken between exchanges of local steps, or one is
            there twice, or is of another local rank than 0, or is damaged.
        TypeError: a state, or that of an encoder, is no dict.

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
    world_size = whole("world_size", world_size, least=1)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, must be 'mean' or 'sum'")
    states = list(states)
    if not states:
        raise ValueError("there are no states to redistribute")
    for state in states:
        if not isinstance(state, Mapping):
            raise TypeError(f"states must be a list of dicts, one is a {type(state).__name__}")
        for name in ("exchange", "gradwire"):
            if name in state:
                raise ValueError(
                    f'a state of gradwire.share has that of its exchange in it: give state["{name}"] of every state'
                )
        _check_keys(state)
        if state["local_steps"]:
            raise ValueError(
                f"a state was taken {state['local_steps']} local steps after an exchange: "
                "take it right after one"
            )
        if state.get("unsettled"):
            raise ValueError(
                "a state was taken when parameters had been written and not been exchanged: take it right after an "
                "exchange"
            )
        for saved in state["encoders"]:
            described = saved if isinstance(saved, Mapping) else {}
            EncoderState.of(saved, described.get("numel", 0), described.get("dtype", ""))
    contents = [
        (
            state["step"],
            [(saved["numel"], saved["dtype"]) for saved in state["encoders"]],
            state["training"],
        )
        for state in states
    ]
    if any(content != contents[0] for content in contents):
        raise ValueError(
            f"the states are of different steps or models, or of different trainings: {contents}"
        )
    _refuse_twice_the_same(states)
    # A worker's own parameters, which ``gradwire.torch`` adds, hold its old residual.
    own_parameters = {"local", "rounded"}
    states = [{name: state[name] for name in state.keys() - own_parameters} for state in states]
    for state in states:
        if isinstance(state["owner"], tuple):  # of ``gradwire.torch``
            [state["owner"]] = state["owner"]
    # The mean over another number of nodes weighs each residual differently. This keeps what they add to the
    # parameters.
    factor = world_size / len(states) if reduction == "mean" else 1.0
    weight = len(states) if reduction == "mean" else 1
    return [
        {
            **_merged(states[rank % len(states)], states[rank::world_size], factor, weight),
            "nodes": world_size,
        }
        for rank in range(world_size)
    ]


def _refuse_twice_the_same(states: Sequence[dict[str, Any]]) -> None:
    """Raise `ValueError` where a worker's residual would count twice, as for a file that was read for two ranks."""
    places: dict[str, int] = {}
    for place, state in enumerate(states):
        residuals = [np.asarray(saved["residual"]) for saved in state["encoders"]]
        saved_by = str(state.get("saved_by", ""))  # older states have none
        if digest := residual_digest(residuals, saved_by):
            first = places.setdefault(digest, place)
            if first != place:
                raise ValueError(
                    f"states {first} and {place} are of the same worker, whose residual would count twice: give one "
                    "state of every worker"
                )


def _merged(
    like: dict[str, Any], states: Sequence[dict[str, Any]], factor: float, weight: int
) -> dict[str, Any]:
    """Return a state like ``like`` with the sum of the residuals of ``states``, times a factor.

    A sum that an owner keeps weighs as much as ``weight`` updates of one node.
    """
    # In float64, so that the sum of many residuals does not round.
    totals = [np.zeros(saved["residual"].shape, np.float64) for saved in like["encoders"]]
    for state in states:
        for total, saved in zip(totals, state["encoders"], strict=True):
            total += np.asarray(saved["residual"])
        add_owner_state(state["owner"], totals, weight)
    for total in totals:
        total *= factor
    encoders = [
        {**saved, "residual": total.astype(saved["dtype"])}
        for saved, total in zip(like["encoders"], totals, strict=True)
    ]
    return {**like, "encoders": encoders, "owner": None}


def extend_state(
    state: dict[str, Any], groups: Groups, params: Sequence[Any], added: int, weight: int
) -> dict[str, Any]:
    """Return the state of a node for an exchange of more parameters, whose residual is zero.

    Args:
        state: of the node; not modified.
        groups: of the new exchange.
        params: of the new exchange; those of the state come first, and only their shapes count.
        added: number of the others.
        weight: of a sum that this node keeps as an owner; it goes into the residual, because parts have new sizes.
    """
    states = [{**saved, "residual": np.array(saved["residual"])} for saved in state["encoders"]]
    add_owner_state(state["owner"], [saved["residual"] for saved in states], weight)
    before = params[: len(params) - added]
    new = copies(views(list(params[len(before) :])))
    fresh = {"step": state["step"], "changed_at": state["step"]}
    return {
        **state,
        "encoders": _regrouped(states, state["tensors"], groups, before, new, fresh),
        "tensors": groups.tensors,
        "shared": [*state["shared"], *new] if state["shared"] else [],
        "outer_velocity": [*state["outer_velocity"], *zeros_like(new)]
        if state["outer_velocity"]
        else [],
        "owner": None,
    }


def _regrouped(
    states: Sequence[dict[str, Any]],
    tensors: Sequence[Sequence[int] | None],
    groups: Groups,
    params: Sequence[Any],
    added: Sequence[Any] = (),
    fresh: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Return the states of encoders for another division of the parameters into groups.

    An encoder goes on with the threshold of the one that had most of its elements.

    Args:
        states: of the encoders so far.
        tensors: of these, as ``Groups.tensors``.
        groups: the other division.
        params: all that the encoders had, for their shapes.
        added: parameters that follow, and have no residual.
        fresh: what replaces the state of an encoder of added parameters alone.

    Raises:
        ValueError: the groups are of other parameters.
    """
    residuals = [
        *split_by_tensor([np.asarray(saved["residual"]) for saved in states], tensors, params),
        *zeros_like(added),
    ]
    home: dict[int, int] = {}  # of every tensor, its encoder so far
    for number, indices in enumerate(tensors):
        home |= dict.fromkeys(range(len(params)) if indices is None else indices, number)
    every = range(len(residuals))
    divided = [every if group.tensors is None else group.tensors for group in groups.groups]
    if sorted(index for indices in divided for index in indices) != list(every):
        raise ValueError(f"the state is of {len(every)} arrays, this exchange of other ones")
    regrouped = []
    for group, indices in zip(groups.groups, divided, strict=True):
        numel_from: Counter[int] = Counter()
        for index in indices:
            if index in home:
                numel_from[home[index]] += residuals[index].size
        saved = group.encoder.state_dict()
        source = states[numel_from.most_common(1)[0][0]] if numel_from else fresh or {}
        parts = [residuals[index].reshape(-1) for index in indices]
        regrouped.append(
            {
                **saved,
                **source,
                "numel": saved["numel"],
                "dtype": saved["dtype"],
                "residual": np.concatenate(parts, dtype=saved["dtype"]),
            }
        )
    return regrouped
