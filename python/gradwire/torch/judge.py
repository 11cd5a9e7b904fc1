"""What an optimiser does: whether it divides gradients by their size, and whether its updates follow its rate."""

from __future__ import annotations

import copy
import inspect
import logging
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo

__all__ = [
    "Judgement",
    "check_group",
    "group_numbers",
    "is_adaptive",
    "judge",
    "pace_of",
    "parameters_of",
    "scaled_rates",
]

_LOG = logging.getLogger(__name__)

_MUON = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()

# torch's own optimisers that divide updates by the size of the gradients, or take only their signs or directions.
_ADAPTIVE = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
    *_MUON,
)
_PROPORTIONAL = (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS)

# Those with a weight decay apart from the gradient, besides those that say so in "decoupled_weight_decay".
_DECAYING_APART = (torch.optim.Adafactor, *_MUON)

# Those that divide a running mean of gradients, with the share betas[0], by the size of single gradients, or with
# "momentum" add up gradients that are so divided.
_AVERAGING = (
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SparseAdam,
)

# Those whose updates are not proportional to "lr": a minimum with another rate, or only the first step's size.
_BOUNDED_RATE = (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.ASGD)

# Options of a parameter group that hardly decide how far its parameters move.
_NO_SPEED = frozenset({"params", "param_names", "name", "initial_lr", "weight_decay"})

# A trial takes so many steps, because some optimisers normalise only after the first few (RAdam after five).
_STEPS = 12
# Gradients of this size, and others this many times as large. An update that grows by less than the square root of that
# is normalised.
_GRADIENT = 2.0**-7
_FACTOR = 1024.0
# Random gradients, averaged, make updates shorter than this share of the learning rate; those of an optimiser that
# normalises the mean itself, like Lion, have one size.
_AVERAGED = 0.6
# The learning rate of a trial, and of its last step, where a bound on the rate shows.
_RATE = 2.0**-7
_LAST_RATE = 8.0
_DECAY = 2.0**-4
# Models of more elements are tried with tensors of at most so many elements in each dimension.
_WHOLE_NUMEL = 1 << 16
_CROPPED = 4


@dataclass(frozen=True)
class Judgement:
    """How the updates of an optimiser follow its gradients and its learning rate.

    Attributes:
        is_adaptive: whether larger gradients do not make its updates larger: the mean of several nodes' updates is then
            shorter than the update of their mean gradient.
        follows_rate: whether every group has a learning rate to which the update is proportional.
        reason: how that is known.
        decays_apart: whether weight decay shrinks the parameters beside the update that the gradient causes, as AdamW's
            does, rather than being added to the gradient.
        momentum: share of an update that the next one repeats, where the optimiser is adaptive and divides by the size
            of single gradients, as Adam does; otherwise 0.0.
    """

    is_adaptive: bool
    follows_rate: bool
    reason: str
    decays_apart: bool = False
    momentum: float = 0.0


def judge(optimizer: torch.optim.Optimizer) -> Judgement:
    """Judge an optimiser by its base classes, or by what copies of it do to small tensors; it is not modified."""
    name = type(optimizer).__name__
    judgement = _judge_class(optimizer)
    if judgement is None:
        try:
            judgement = _try_out(optimizer)
        except Exception as error:
            problem = f"could not be tried out ({type(error).__name__}: {error})"
            judgement = _judge_inner(optimizer) or Judgement(False, False, f"it {problem}")
            _LOG.warning(
                "%s %s and is taken for an optimiser %s: give share() update_scale= and density= if that is wrong",
                name,
                problem,
                _describe(judgement),
            )
    _LOG.info("%s is an optimiser %s: %s", name, _describe(judgement), judgement.reason)
    return judgement


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser divides its updates by the size of its own gradients, see `judge`."""
    return judge(optimizer).is_adaptive


def check_group(param_group: Any) -> Any:
    """Return a group of parameters; raise `ValueError` for a dict without any, of which torch says `KeyError`."""
    if isinstance(param_group, dict) and "params" not in param_group:
        raise ValueError(
            f'a group of parameters needs "params", this dict has {", ".join(map(repr, param_group)) or "nothing"}: '
            'write {"params": layer.parameters()}'
        )
    return param_group


def parameters_of(
    optimizer: torch.optim.Optimizer, order: Iterable[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order; within a group in that of ``order``, where they are in it.

    A group is often made from a set, whose order is that of memory addresses: another one in every process. Nodes line
    their parameters up by place, so they need the order of the model.
    """
    places = {param: place for place, param in enumerate(order)}
    return [
        param
        for group in optimizer.param_groups
        for param in sorted(group["params"], key=lambda param: places.get(param, len(places)))
    ]


def group_numbers(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[int]:
    """Return for each parameter the number of its group, the same for groups that move equally fast; -1: none."""
    first: dict[frozenset[tuple[str, str]], int] = {}
    numbers = {}
    for index, group in enumerate(optimizer.param_groups):
        number = first.setdefault(frozenset(_speed_of(group).items()), index)
        numbers.update(dict.fromkeys(group["params"], number))
    return [numbers.get(param, -1) for param in params]


def _speed_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return all options of a group that may decide how far its parameters move."""
    # A warm-up may have set the rates of all groups to zero already; then the initial ones tell them apart.
    options = {**group, "lr": group.get("initial_lr", group.get("lr"))}
    return {name: repr(value) for name, value in options.items() if name not in _NO_SPEED}


def _describe(judgement: Judgement) -> str:
    if judgement.is_adaptive:
        return "that normalises its updates, like Adam"
    return "whose updates grow with its gradients, like SGD"


def _judge_class(optimizer: torch.optim.Optimizer) -> Judgement | None:
    """Judge an optimiser of torch, or one derived from it; None: another one, or it has a step of its own."""
    bases = _ADAPTIVE + _PROPORTIONAL
    base: Any = next((base for base in type(optimizer).__mro__ if base in bases), None)
    if base is None:
        return None
    # What derives from Adam normalises, whatever it adds. What derives from SGD may normalise gradients first.
    is_own_step = inspect.unwrap(type(optimizer).step) is not inspect.unwrap(base.step)
    if base in _PROPORTIONAL and is_own_step:
        return None
    follows = _has_rates(optimizer) and base not in _BOUNDED_RATE
    is_apart = base in _DECAYING_APART
    groups = optimizer.param_groups
    decaying = [group for group in groups if group.get("weight_decay")] or groups
    decays_apart = all(group.get("decoupled_weight_decay", is_apart) for group in decaying)
    if is_own_step:
        decays_apart = _own_step_decays_apart(optimizer, decays_apart)
    reason = f"it is torch.optim.{base.__name__}"
    momentum = _momentum_of(optimizer) if base in _AVERAGING else 0.0
    return Judgement(base in _ADAPTIVE, follows, reason, decays_apart, momentum)


def _judge_inner(optimizer: torch.optim.Optimizer) -> Judgement | None:
    """Judge the optimiser that another one wraps."""
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            judgement = judge(inner)
            return Judgement(
                judgement.is_adaptive,
                False,
                f"it wraps another one, of which {judgement.reason}",
                momentum=judgement.momentum,
            )
    return None


def _has_rates(optimizer: torch.optim.Optimizer) -> bool:
    return all(_is_rate(group.get("lr")) for group in optimizer.param_groups)


def _momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the first of the betas of an optimiser's first group, or its momentum, 0.0 if it has neither."""
    group = optimizer.param_groups[0]
    betas = group.get("betas") or (group.get("momentum"),)
    if not isinstance(betas, (list, tuple)) or not isinstance(betas[0], (float, torch.Tensor)):
        return 0.0
    momentum = float(betas[0])
    return momentum if 0.0 <= momentum < 1.0 else 0.0


def pace_of(
    optimizer: torch.optim.Optimizer, judgement: Judgement, factor: float
) -> tuple[float, float]:
    """Return what the next update is proportional to besides its gradients, and its momentum, as they are now.

    Args:
        optimizer: as judged.
        judgement: of it.
        factor: of the learning rate.
    """
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    # One on a device would have to be waited for.
    on_device = any(isinstance(rate, torch.Tensor) and rate.is_cuda for rate in rates)
    momentum = (_momentum_of(optimizer) or judgement.momentum) if judgement.momentum else 0.0
    if on_device or not judgement.follows_rate:
        return factor or 1.0, momentum
    # The largest: a group may be at rest, with a rate of zero, while the others move on.
    return max(abs(float(rate)) for rate in rates) * factor or 1.0, momentum


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, (int, float, torch.Tensor)) and not isinstance(rate, bool)


# ---- trials ----------------------------------------------------------------------------------------------------------


@contextmanager
def _unnoticed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let trials draw random numbers of their own, and warn of nothing."""
    devices = {param.device for param in parameters_of(optimizer) if param.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _try_out(optimizer: torch.optim.Optimizer) -> Judgement:
    """Judge by the updates that copies of an optimiser make, from small and from large gradients."""
    with _unnoticed(optimizer):
        errors: list[Exception] = []
        for take_step in (_step, _step_with_closure, _step_sparsely, _step_in_training):
            try:
                update = _last_update(optimizer, take_step, 1.0, _LAST_RATE)
                large = _last_update(optimizer, take_step, _FACTOR, _LAST_RATE)
                twice = _last_update(optimizer, take_step, 1.0, 2.0 * _LAST_RATE)
                decays_apart = _decays_apart(optimizer, take_step)
                break
            except Exception as error:
                errors.append(error)
        else:
            raise errors[0]
    growth = float(large.norm() / update.norm())
    # Written so that NaN is refused, too.
    if not 0.0 <= growth <= 2.0 * _FACTOR:
        raise ValueError(f"its update became {growth:g} times as large")
    follows = _has_rates(optimizer) and torch.allclose(twice, 2.0 * update, rtol=1e-3, atol=1e-6)
    is_adaptive = growth < _FACTOR**0.5
    is_averaged = float(update.square().mean()) ** 0.5 < _AVERAGED * _LAST_RATE
    return Judgement(
        is_adaptive,
        follows,
        f"gradients {_FACTOR:g} times as large made its update {growth:.3g} times as large",
        decays_apart,
        _momentum_of(optimizer) if is_adaptive and is_averaged else 0.0,
    )


def _decays_apart(
    optimizer: torch.optim.Optimizer, take_step: Callable[[Any, list[torch.Tensor]], None]
) -> bool:
    """Return whether weight decay takes the same share of every parameter, whatever the gradient does."""
    moved = []
    start: list[torch.Tensor] = []
    for decay in (0.0, _DECAY):
        trial = _copy(optimizer, {})
        params = parameters_of(trial)
        start = [param.detach().clone() for param in params]
        _set_rates(trial, _RATE, decay)
        generator = torch.Generator().manual_seed(1)
        take_step(trial, _random_grads(params, generator, _GRADIENT))
        moved.append(_movement(params, start))
    expected = -_RATE * _DECAY * torch.cat([before.flatten().cpu().double() for before in start])
    return torch.allclose(moved[1] - moved[0], expected, rtol=0.05, atol=1e-7)


def _own_step_decays_apart(optimizer: torch.optim.Optimizer, expected: bool) -> bool:
    """Return what `_decays_apart` does of an optimiser with a step of its own, ``expected`` if it cannot be tried."""
    with _unnoticed(optimizer):
        for take_step in (_step, _step_with_closure):
            with suppress(Exception):
                return _decays_apart(optimizer, take_step)
    return expected


def _last_update(
    optimizer: torch.optim.Optimizer,
    take_step: Callable[[Any, list[torch.Tensor]], None],
    factor: float,
    rate: float,
) -> torch.Tensor:
    """Return the last update of a trial, as one vector."""
    trial = _copy(optimizer, {})
    params = parameters_of(trial)
    generator = torch.Generator().manual_seed(1)
    _set_rates(trial, _RATE)
    before: list[torch.Tensor] = []
    for step in range(_STEPS):
        if step == _STEPS - 1:
            _set_rates(trial, rate)
            before = [param.detach().clone() for param in params]
        take_step(trial, _random_grads(params, generator, _GRADIENT * factor))
    return _movement(params, before)


def _random_grads(
    params: list[torch.Tensor], generator: torch.Generator, size: float
) -> list[torch.Tensor]:
    # On the generator's device, whatever torch.set_default_device says.
    drawn = (torch.randn(param.shape, generator=generator, device="cpu") for param in params)
    return [values.to(param).mul_(size) for values, param in zip(drawn, params, strict=True)]


def _movement(params: list[torch.Tensor], before: list[torch.Tensor]) -> torch.Tensor:
    """Return how far parameters have moved, as one vector."""
    pairs = zip(params, before, strict=True)
    return torch.cat([(param.detach() - start).flatten().cpu().double() for param, start in pairs])


def _step(trial: Any, grads: list[torch.Tensor]) -> None:
    for param, grad in zip(parameters_of(trial), grads, strict=True):
        param.grad = grad
    trial.step()


def _step_with_closure(trial: Any, grads: list[torch.Tensor]) -> None:
    def closure() -> torch.Tensor:
        for param, grad in zip(parameters_of(trial), grads, strict=True):
            param.grad = grad.clone()
        return torch.zeros(())

    closure()  # sharpness-aware minimisation begins with gradients, and calls the closure for the next ones
    trial.step(closure)


def _step_sparsely(trial: Any, grads: list[torch.Tensor]) -> None:
    _step(trial, [grad.to_sparse(1) if grad.dim() else grad for grad in grads])


def _step_in_training(trial: Any, grads: list[torch.Tensor]) -> None:
    trial.train()  # without, schedule-free optimisers take no step
    _step(trial, grads)


def _set_rates(trial: torch.optim.Optimizer, rate: float, decay: float = 0.0) -> None:
    """Set the learning rates of all groups that have one; a decay of the weights would hide the gradients' part."""
    for group in trial.param_groups:
        if _is_rate(group.get("lr")):
            is_tensor = torch.is_tensor(group["lr"])
            group["lr"] = torch.full_like(group["lr"], rate) if is_tensor else rate
        if _is_rate(group.get("weight_decay")):
            group["weight_decay"] = decay


def _copy(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> Any:
    """Return a copy of an optimiser of small parameters, without hooks and without what a scheduler has put on it.

    Args:
        optimizer: not modified.
        memo: as of ``copy.deepcopy``.
    """
    params = parameters_of(optimizer)
    is_whole = sum(param.numel() for param in params) <= _WHOLE_NUMEL
    generator = torch.Generator().manual_seed(0)
    for param in params:
        if id(param) in memo:
            continue
        shape = [size if is_whole else min(size, _CROPPED) for size in param.shape]
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        values = torch.randn(shape, generator=generator, device="cpu").mul_(2.0**-6)
        memo[id(param)] = torch.nn.Parameter(values.to(param.device, dtype))
        for tensor in _tensors(optimizer.state.get(param)):
            whole = tensor.detach()
            part = whole if is_whole else whole[tuple([slice(_CROPPED)] * whole.dim())]
            memo[id(tensor)] = part.clone()
    fields = dict(vars(optimizer))
    for name, value in vars(optimizer).items():
        # A scheduler puts a bound step on the optimiser. The copy takes its class's.
        if callable(value) and hasattr(type(optimizer), name):
            del fields[name]
        elif name.startswith("_optimizer_") and name.endswith("_hooks"):
            fields[name] = OrderedDict()
        elif isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            memo[id(value)] = _copy(value, memo)
    trial = object.__new__(type(optimizer))
    vars(trial).update(copy.deepcopy(fields, memo))
    # Without the hooks of all optimisers, which torch has added to the class's step.
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    vars(trial)["step"] = types.MethodType(step, trial)
    return trial


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a parameter's state."""
    if torch.is_tensor(tree):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


@contextmanager
def scaled_rates(
    optimizer: torch.optim.Optimizer, factor: float, decay_factor: float
) -> Iterator[None]:
    """Let an optimiser's learning rates carry a factor, and the weight decay that follows them another one.

    Hooks on its steps, and schedulers that they call, see and set the rates without the factor.
    """
    scaling = _RateScaling(optimizer, factor, decay_factor)
    handles = []
    if getattr(type(optimizer).step, "hooked", False):
        handles = [
            optimizer.register_step_pre_hook(scaling.begin),
            optimizer.register_step_post_hook(scaling.end),
        ]
        # The innermost: the last hook before the step, and the first one after it.
        optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)
    else:
        scaling.begin()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        scaling.revert()


class _RateScaling:
    """Multiplies an optimiser's rates between the first ``begin`` and its ``end``, which a step in a step repeats."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: float, decay_factor: float
    ) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._decay_factor = decay_factor
        self._depth = 0
        self._before: list[tuple[dict[str, Any], Any, Any, Any]] = []

    # A compiled step calls the hooks, too. Traced, rates are copies, of which none is the one that was set.
    @_disable_dynamo  # type: ignore[untyped-decorator]
    def begin(self, *_: Any) -> None:
        """Multiply learning rates and weight decay."""
        self._depth += 1
        if self._depth > 1:
            return
        decay_ratio = self._decay_factor / self._factor
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = scaled = rate * self._factor
            decay = group.get("weight_decay") if decay_ratio != 1.0 else None
            if decay:
                group["weight_decay"] = decay * decay_ratio
            self._before.append((group, rate, scaled, decay))

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def end(self, *_: Any) -> None:
        """Revert that, after as many calls as of ``begin``."""
        self._depth -= 1
        if self._depth == 0:
            self.revert()

    def revert(self) -> None:
        """Revert that now, if there is anything to revert."""
        for group, before, during, decay in self._before:
            # An optimiser may lower its rates in a step.
            group["lr"] = before if group["lr"] is during else group["lr"] / self._factor
            if decay:
                group["weight_decay"] = decay
        self._before = []
        self._depth = 0
