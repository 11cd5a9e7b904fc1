"""One call: an optimiser that trains a model together with the other machines of a run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..sharing import training_for
from .optimizer import SharedOptimizer, is_adaptive, parameters_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..exchange import ExchangeOptions
    from ..sharing import Density
    from ..transport import Node

__all__ = ["share"]


def share(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    node: Node | None = None,
    density: Density | None = None,
    update_scale: float | Literal["auto"] = "auto",
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[ExchangeOptions],
) -> SharedOptimizer:
    """Return an optimiser that trains ``model`` together with the other nodes of this run.

    Use the result in the place of ``optimizer``: the loop, schedules, GradScaler, accumulation and checkpoints stay as
    they are. All nodes begin with the parameters of rank 0; ``model.state_dict()`` has the parameters that all nodes
    share. The place in the run comes from the environment (torchrun, SLURM, MPI, Kubernetes, `gradwire run`, or
    ``GRADWIRE_PEERS``, see `Node.from_env`); several ranks of one machine send one message together.

    Args:
        model: the model; DistributedDataParallel and ``torch.compile`` may wrap it.
        optimizer: of the model's parameters, at the learning rate for one machine's gradients averaged over all.
        node: a node to use, which the caller closes; None: one from the environment, closed with the optimiser.
        density: share of the elements that a step sends; None: 0.01, or 0.05 with an adaptive optimiser, for
            n < 2,000,000 elements sqrt(2e6 / n) times as many, up to 0.08. Or by pattern of the parameters' names:
            ``{"lm_head*": 0.02, "*.bias": "dense"}``, where "dense" sends whole updates and the rest has the default.
        update_scale: factor of every update, see `SharedOptimizer`.
        process_group: the ranks of this machine, whose gradients DistributedDataParallel averages already.
        options: see `ExchangeOptions`: such as ``mode="async"`` or ``every=4, overlap=1``. The model holds this node's
            residual by default (``apply_residual``), and a synchronous step waits for stragglers: after ``timeout_s`` a
            log entry names the node that all wait for.

    Raises:
        TypeError: ``model`` or ``optimizer`` has the wrong type, or an unknown option.
        ValueError: the optimiser has parameters that are not the model's, DistributedDataParallel averages gradients
            without ``process_group``, an option is out of range, or the environment cannot be used.
        TimeoutError: not all nodes of the run appeared; the message names the missing ones.

    Example:
        >>> import gradwire.torch, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = gradwire.torch.share(model, torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, SharedOptimizer):
        raise TypeError(f"optimizer must be one of torch's, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "L-BFGS assumes that only its own steps move the parameters: use it with DistributedDataParallel alone"
        )
    ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    is_averaged = any(ddp.process_group.size() > 1 for ddp in ddps)
    if is_averaged and process_group is None and node is None:
        raise ValueError(
            "DistributedDataParallel averages whole gradients of all its ranks: share the model without it, or give "
            "both the process group of this machine's ranks"
        )
    inner: Any = _unwrapped(model)
    names = {param: name for name, param in inner.named_parameters()}
    params: list[Any] = parameters_of(optimizer)
    if any(hasattr(param, "to_local") for param in params):
        raise TypeError(
            "the model is sharded (fully_shard): every rank has a part of each parameter, which share cannot tell "
            "apart; give an Exchange of the local shards to SharedOptimizer, as docs/torch.md shows under FSDP2"
        )
    strange = [tuple(param.shape) for param in params if param not in names]
    if strange:
        raise ValueError(
            f"{len(strange)} of the optimiser's parameters are not the model's, the first of shape {strange[0]}: "
            "make the optimiser from model.parameters()"
        )
    named = [(names[param], param) for param in params]
    team = None
    if process_group is not None:
        team = dist.get_rank(process_group), dist.get_world_size(process_group)
    training = training_for(
        named,
        density,
        is_adaptive=is_adaptive(optimizer),
        node=node,
        team=team,
        **options,
    )
    place_of = {param: place for place, param in enumerate(params)}
    frozen = [
        param for param in inner.parameters() if not param.requires_grad and param not in place_of
    ]
    shared = SharedOptimizer(
        optimizer,
        training.exchange,
        training=training,
        share_state=type(optimizer).__module__.startswith("torch.optim"),
        update_scale=update_scale,
        equalize=True,
        counts_workers=process_group is None,
        buffers=[
            tensor
            for tensor in (*inner.buffers(), *frozen)
            if tensor.dtype in (torch.float32, torch.float64)
        ],
    )
    places = {
        name: place_of[param]
        for name, param in inner.named_parameters(remove_duplicate=False)
        if param in place_of
    }
    hooks = _ModelHooks(shared, places)
    inner._register_state_dict_hook(hooks.save_shared)
    inner.register_load_state_dict_post_hook(hooks.restore)
    return shared


class _ModelHooks:
    """What a shared model's ``state_dict`` and ``load_state_dict`` do beside their own; nothing in copies of the model.

    Args:
        optimizer: None: of a copy.
        places: the parameters' places in the optimiser by name; tied ones have several names.
    """

    def __init__(
        self, optimizer: SharedOptimizer | None = None, places: Mapping[str, int] | None = None
    ) -> None:
        self._find = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._places = places or {}

    def __reduce__(self) -> Any:
        return _ModelHooks, ()

    def save_shared(
        self, _module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Put the shared parameters into a model's state."""
        optimizer = self._find()
        if optimizer is None:
            return
        shared = optimizer.shared_tensors()
        for name, place in self._places.items():
            saved = state.get(prefix + name)
            if saved is not None:
                shared[place] = state[prefix + name] = shared[place].to(saved.device, saved.dtype)

    def restore(self, *_: object) -> None:
        """Let the model hold this node's parameters after a checkpoint of both was loaded in whatever order."""
        optimizer = self._find()
        if optimizer is not None:
            optimizer.restore()


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself, without DistributedDataParallel and torch.compile."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return inner
