"""One call: an optimiser that trains a model together with the other machines of a run."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..sharing import TrainingMaker
from .judge import group_numbers, judge, parameters_of
from .model_state import ModelState
from .optimizer import Extension, SharedOptimizer
from .staging import check_memory, check_params

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..exchange import AnyExchange, ExchangeOptions
    from ..policy import ResidualClip, ShakeUp
    from ..sharing import Density
    from ..transport import Node

__all__ = ["check_kinds", "share"]

_LOG = logging.getLogger(__name__)
_NAMED_MAX = 8


def share(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    node: Node | None = None,
    density: Density | None = None,
    update_scale: float | Literal["auto"] = "auto",
    share_state: bool = True,
    process_group: dist.ProcessGroup | None = None,
    shakeup: ShakeUp | None = None,
    clip: ResidualClip | None = None,
    **options: Unpack[ExchangeOptions],
) -> SharedOptimizer:
    """Return an optimiser that trains ``model`` together with the other nodes of this run.

    Use the result in the place of ``optimizer``: the loop, schedules, GradScaler, accumulation and checkpoints stay as
    they are. All nodes begin with rank 0's parameters and buffers, also with those that ``optimizer`` does not train,
    which a log entry names; ``model.state_dict()`` has the parameters that all nodes share. The place in the run comes
    from the environment (torchrun, SLURM, MPI, Kubernetes, `gradwire run`, or ``GRADWIRE_PEERS``, see `Node.from_env`);
    several ranks of one machine send one message together.

    Args:
        model: the model; DistributedDataParallel and ``torch.compile`` may wrap it.
        optimizer: of the model's parameters, with the learning rate that DistributedDataParallel would use.
        node: for this training alone; the caller closes it. None: one from the environment, closed with the optimiser.
        density: share of the elements that a message has; None: 0.01, or 0.05 with an adaptive optimiser or from
            ``every=15`` on, for n < 2,000,000 elements sqrt(2e6 / n) times as many, up to 0.08. Or by pattern of the
            parameters' names: ``{"lm_head*": 0.02, "*.bias": "dense"}``, where "dense" sends whole updates and the rest
            has the default.
        update_scale: factor of every update, see `SharedOptimizer`.
        share_state: nodes that join late take over the optimiser's state of each parameter, too: with AdamW 8 of 12
            bytes per parameter. False: they begin with an empty one, in a third of the time.
        process_group: the ranks of this machine, whose gradients DistributedDataParallel averages already.
        shakeup: periodic messages with a smaller threshold, see `ShakeUp`; None: without.
        clip: periodic clipping of the residual, see `ResidualClip`; None: without.
        options: see `ExchangeOptions`: such as ``mode="async"`` or ``every=15, overlap=4``. The model holds this node's
            residual by default (``apply_residual``), from 15 local steps on ``outer_momentum`` is 0.5, and a
            step waits for stragglers: after ``timeout_s`` a log entry names the node that all wait for.

    Raises:
        TypeError: ``model`` or ``optimizer`` has the wrong type, or an unknown option.
        ValueError: the optimiser has parameters that are not the model's, DistributedDataParallel averages gradients
            without ``process_group``, a tensor of the model has no memory, an option is out of range (or the role of an
            observer), or the environment cannot be used.
        RuntimeError: this process takes part in a training of this run already, or ``node`` has a training.
        TimeoutError: the name of another node's machine is not known within ten minutes.

    Example:
        >>> import gradwire.torch, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = gradwire.torch.share(model, torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """
    check_kinds(model, optimizer)
    ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    is_averaged = any(ddp.process_group.size() > 1 for ddp in ddps)
    if is_averaged and process_group is None and node is None:
        raise ValueError(
            "DistributedDataParallel averages whole gradients of all its ranks: share the model without it, or give "
            "both the process group of this machine's ranks"
        )
    inner: Any = _unwrapped(model)
    names = _names(inner)
    named = _named(names, parameters_of(optimizer, names))
    params = [param for _, param in named]
    team = None
    if process_group is not None:
        team = dist.get_rank(process_group), dist.get_world_size(process_group)
        if team[0] < 0:
            raise ValueError(
                "this rank is not in process_group: give each rank its own machine's group"
            )
    tensors = _Untrained(inner, {name for name, _ in named})
    tensors.check()
    judgement = judge(optimizer)
    maker = TrainingMaker(
        density,
        is_adaptive=judgement.is_adaptive,
        node=node,
        team=team,
        shakeup=shakeup,
        clip=clip,
        **options,
    )
    hooks = ModelState()
    training = maker.make(named, group_numbers(optimizer, params))

    def extend(shared: Sequence[torch.Tensor]) -> Extension:
        tensors()  # names the parameters that were replaced since
        names = _names(inner)
        known = set(shared)
        added = [param for param in parameters_of(optimizer, names) if param not in known]
        every = _named(names, [*shared, *added])
        place = shared[0].device
        elsewhere = [name for name, param in every if param.device != place]
        if elsewhere and training.exchange.takes_devices:
            raise ValueError(
                f"{', '.join(elsewhere[:_NAMED_MAX])} is not on {place}, where the shared parameters are: move it "
                "there before it is added"
            )

        def make() -> AnyExchange:
            hooks.register(inner)  # they may be a new module's
            return maker.extend(
                training, every, group_numbers(optimizer, [param for _, param in every])
            )

        return every[len(shared) :], make

    try:
        shared = SharedOptimizer(
            optimizer,
            training.exchange,
            share_state=share_state,
            update_scale=update_scale,
            equalize=True,
            buffers=tensors,
            names=names,
            judgement=judgement,
            extend=extend,
            training=training,
        )
    except BaseException:
        training.close(has_failed=True)
        raise
    tensors.follow(shared)
    tensors.log()
    hooks.follow(shared)
    hooks.register_root(inner)
    settle = _look_for_plain_steps(shared)

    def leave(is_asked: bool) -> None:
        hooks.remove()
        if is_asked:
            settle()

    shared.expect_shared_in_model(leave)
    if process_group is None:
        _look_for_ddp(shared)
    return shared


def check_kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `TypeError` for a model or an optimiser that cannot be shared."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, SharedOptimizer):
        raise TypeError(f"optimizer must be one of torch's, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "L-BFGS assumes that only its own steps move the parameters: use it with DistributedDataParallel alone"
        )
    if any(hasattr(param, "to_local") for param in parameters_of(optimizer)):
        raise TypeError(
            "the model is sharded (fully_shard): every rank has a part of each parameter, which share cannot tell "
            "apart; give an Exchange of the local shards to SharedOptimizer, as docs/torch.md shows under FSDP2"
        )


def _look_for_ddp(shared: SharedOptimizer) -> None:
    """Warn in the first step if DistributedDataParallel has wrapped the model meanwhile, as frameworks do."""

    def look(optimizer: SharedOptimizer, *_: object) -> None:
        handle.remove()
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        params = set(optimizer.shared_params())
        # A module does not know its wrapper. Only types are looked at: some objects raise for everything else.
        for wrapper in gc.get_objects():
            is_ddp = issubclass(type(wrapper), DistributedDataParallel)
            if is_ddp and wrapper.process_group.size() > 1 and params & set(wrapper.parameters()):
                _LOG.warning(
                    "DistributedDataParallel averages whole gradients of this model over %d ranks, and share() "
                    "averages the updates again: each step sends both. Remove DistributedDataParallel(model); with "
                    "Accelerate: model, optimizer = gradwire.hf.prepare(accelerator, model, optimizer); with "
                    'Trainer: gradwire.hf.gradwire_trainer(Trainer); with Lightning: Trainer(strategy="gradwire"). '
                    "Ranks of one machine: share(..., process_group=)",
                    wrapper.process_group.size(),
                )
                return

    handle = shared.register_step_pre_hook(look)


def _look_for_plain_steps(shared: SharedOptimizer) -> Callable[..., None]:
    """Warn if a loop goes on with the optimiser that was shared, whose own steps reach nobody.

    Returns:
        What ends this, as the first shared step does.
    """
    if not getattr(type(shared.optimizer).step, "hooked", False):
        return lambda: None  # made without the base class's constructor, and so without hooks
    is_told = False

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal is_told
        # torch's distributed checkpoints make an optimiser's state by a step with rates of zero.
        moves = any(group.get("lr") for group in optimizer.param_groups)
        if moves and not is_told:
            is_told = True
            _LOG.warning(
                "%s takes a step of its own, which no other node gets: keep the optimiser that share() returns, and "
                "call its step(), as in: optimizer = gradwire.torch.share(model, optimizer)",
                type(optimizer).__name__,
            )

    def settle(*_: object) -> None:
        for handle in handles:
            handle.remove()

    handles = [shared.optimizer.register_step_pre_hook(look), shared.register_step_pre_hook(settle)]
    return settle


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Return the names of a model's parameters, in its order, which is the same on all nodes."""
    return {param: name for name, param in model.named_parameters()}


def _named(
    names: Mapping[torch.Tensor, str], params: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return an optimiser's parameters with their names in the model.

    Raises:
        ValueError: some are not the model's, cannot be written to, or have elements in common.
    """
    strange = [tuple(param.shape) for param in params if param not in names]
    if strange:
        raise ValueError(
            f"{len(strange)} of the optimiser's parameters are not the model's, the first of shape {strange[0]}: "
            "make the optimiser from model.parameters()"
        )
    named = [(names[param], param) for param in params]
    check_params(named)
    return named


class _Untrained:
    """The tensors of a model that its shared optimisers do not train, as they are when they are asked for.

    Args:
        model: whose buffers may be replaced by others.
        names: of the optimiser's parameters.
    """

    def __init__(self, model: torch.nn.Module, names: Set[str]) -> None:
        self._model = model
        self._names = names
        self._find: Any = lambda: None

    def follow(self, optimizer: SharedOptimizer) -> None:
        """Leave out all parameters that an optimiser trains, also those that are added to it later."""
        self._find = weakref.ref(optimizer)

    def __call__(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return all of them by name; the buffers that no checkpoint contains, which may have any shape, second.

        Raises:
            ValueError: a parameter of the optimiser was replaced in the model.
        """
        untrained = dict(self._parameters())
        replaced = sorted(self._names & untrained.keys())
        if replaced:
            raise ValueError(
                f"{', '.join(replaced[:_NAMED_MAX])} of the model was replaced after the optimiser was made, which "
                "trains the tensors from before: replace, move and convert parts of the model first (if it is shared "
                "already, after close()), then make the optimiser, then call share()"
            )
        passing = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        buffers = dict(self._model.named_buffers())
        varying = {name: buffer for name, buffer in buffers.items() if name in passing}
        kept = {name: buffer for name, buffer in buffers.items() if name not in passing}
        return {**untrained, **kept}, varying

    def check(self) -> None:
        """Refuse tensors without values, which could be neither sent nor taken over.

        Raises:
            ValueError: the first of them.
        """
        for tensors in self():
            for name, tensor in tensors.items():
                check_memory(tensor, name)

    def log(self) -> None:
        """Name the parameters once: at rank 0's values, but from then on nobody keeps them equal."""
        untrained = dict(self._parameters())
        if not untrained:
            return
        trainable = [name for name, param in untrained.items() if param.requires_grad]
        names = trainable or list(untrained)
        text = ", ".join(names[:_NAMED_MAX])
        if len(names) > _NAMED_MAX:
            text += f" and {len(names) - _NAMED_MAX} more"
        if trainable:
            _LOG.warning(
                "share() does not train %d parameters of the model that require gradients, because they are not the "
                "optimiser's: %s. They begin as rank 0's; unless another share() trains them, each rank has its own",
                len(names),
                text,
            )
        else:
            _LOG.info("share() does not train %d frozen parameters: %s", len(untrained), text)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that no shared optimiser trains."""
        own = self._find()
        hooks = [getattr(hook, "__self__", None) for hook in self._model._state_dict_hooks.values()]
        optimizers = [own, *(each.optimizer for each in hooks if isinstance(each, ModelState))]
        trained = {
            param for each in optimizers if each is not None for param in each.shared_params()
        }
        for name, param in self._model.named_parameters():
            if param not in trained and not (own is None and name in self._names):
                yield name, param


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself, without DistributedDataParallel and torch.compile."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return inner
