"""What a shared model's ``state_dict`` and ``load_state_dict`` do beside their own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from .staging import local_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .optimizer import SharedOptimizer

__all__ = ["ModelState"]


class ModelState:
    """Hooks that put the shared parameters into a model's state, and back into the model; nothing in copies of it.

    Every module below the model has the hooks, so a part's ``state_dict`` has the shared parameters, too; modules that
    come later get them when the state of a module around them is asked for, or when their parameters are added to the
    optimiser. A module's hook comes before those that the user had registered with it: they see what is saved.
    """

    def __init__(self) -> None:
        self._find: Callable[[], SharedOptimizer | None] = lambda: None  # as in a copy
        # Of the call of ``state_dict`` that has not returned yet: the modules and their prefixes, from the outermost
        # one; whether it wants the parameters themselves; and by place, what is saved for tied parameters.
        self._calls: list[tuple[torch.nn.Module, str]] = []
        self._keeps_vars = False
        self._shared: dict[torch.Tensor, torch.Tensor] | None = None
        self._saved: dict[torch.Tensor, torch.Tensor] = {}
        # The module whose ``load_state_dict`` was called last.
        self._loading: Callable[[], torch.nn.Module | None] = lambda: None
        # By module, what removes the hooks.
        self._handles: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def optimizer(self) -> SharedOptimizer | None:
        """The optimiser, while it lives; None after its end, when the model is a plain one."""
        optimizer = self._find()
        return None if optimizer is None or optimizer.has_ended else optimizer

    def __reduce__(self) -> Any:
        return ModelState, ()

    def follow(self, optimizer: SharedOptimizer) -> None:
        """Put the parameters that an optimiser shares into the state, until it has ended."""
        self._find = weakref.ref(optimizer)

    def register(self, model: torch.nn.Module) -> None:
        """Register the hooks with a model and all its modules, unless they have them."""
        for module in model.modules():
            if module in self._handles:
                continue
            handle = module._register_state_dict_hook(self.save_shared)
            module._state_dict_hooks.move_to_end(handle.id, last=False)
            self._handles[module] = [
                module.register_state_dict_pre_hook(self.begin),
                handle,
                module.register_load_state_dict_pre_hook(self.check_load),
                module.register_load_state_dict_post_hook(self.restore_part),
            ]

    def register_root(self, model: torch.nn.Module) -> None:
        """Register the hooks with a model and all its modules, and what follows when all of it is loaded."""
        self.register(model)
        self._handles[model].append(model.register_load_state_dict_post_hook(self.restore))

    def remove(self) -> None:
        """Remove the hooks: the model then is a plain one, which can be pickled without gradwire."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    # ---- state_dict --------------------------------------------------------------------------------------------------

    def begin(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Note that a module's ``state_dict`` begins."""
        if self._calls:
            outer_prefix = self._calls[-1][1]
            is_inside = prefix.startswith(outer_prefix) and len(prefix) > len(outer_prefix)
            if not is_inside or any(module is outer for outer, _ in self._calls):
                self._calls.clear()  # of a call that has raised
        if not self._calls:
            self._keeps_vars = keep_vars
            self._forget()
            optimizer = self.optimizer
            if optimizer is not None:
                self.register(module)
                optimizer.take_returned()
        self._calls.append((module, prefix))

    def save_shared(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Put the shared parameters of one module into its state; with ``keep_vars`` the module's own stay there."""
        optimizer = self.optimizer
        if optimizer is not None and not self._keeps_vars:
            for name, param in module._parameters.items():
                saved = state.get(prefix + name)
                shared = None if param is None else self._shared_of(optimizer, param)
                if shared is None or not torch.is_tensor(saved):
                    continue
                if shared.shape == local_of(saved).shape:
                    if param not in self._saved:
                        self._saved[param] = _copied(shared, saved)
                    state[prefix + name] = self._saved[param]
        if self._calls and self._calls[-1][0] is module:
            self._calls.pop()
        if not self._calls:
            # Without sharing, the tensors of a state are the parameters' own memory: users write into them.
            if optimizer is not None and self._saved:
                optimizer.keep_returned(self._saved)
            self._forget()

    def _shared_of(self, optimizer: SharedOptimizer, param: torch.Tensor) -> torch.Tensor | None:
        """Return a shared parameter where the exchange has it; None if the model has it as it is to be saved."""
        if self._shared is None:
            pairs = zip(optimizer.shared_params(), optimizer.shared_or_none(), strict=True)
            self._shared = {param: values for param, values in pairs if values is not None}
        return self._shared.get(param)

    def _forget(self) -> None:
        self._shared = None
        self._saved = {}

    # ---- load_state_dict ---------------------------------------------------------------------------------------------

    def check_load(
        self, module: torch.nn.Module, _state: Any, prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Refuse to replace the parameters that the optimiser trains by other ones.

        Raises:
            RuntimeError: ``load_state_dict(assign=True)``; nothing was loaded.
        """
        optimizer = self.optimizer
        if not prefix:
            self._loading = weakref.ref(module)
            if optimizer is not None:
                optimizer.take_returned()  # or the next step would write it over what is loaded now
        if optimizer is None or not metadata.get("assign_to_params_buffers"):
            return
        if torch.__future__.get_swap_module_params_on_conversion():
            return  # then the parameters stay the same objects
        if not set(optimizer.shared_params()).isdisjoint(module.parameters()):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters that the shared optimiser trains: load "
                "without assign, or make model, optimiser and share(model, optimizer) after the load"
            )

    def restore_part(self, module: torch.nn.Module, _keys: object) -> None:
        """Do as ``restore`` after the load of a part of the model, which may be the last one that lacked."""
        optimizer = self.optimizer
        if optimizer is not None and module is self._loading():
            optimizer.restore(is_part=True)

    def restore(self, *_: object) -> None:
        """Let the model hold this node's parameters after a checkpoint of both was loaded in whatever order."""
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer.restore()


def _copied(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values of their own memory in a tensor of another one's kind, dtype, device and strides."""
    is_alike = type(like) is torch.Tensor and (values.dtype, values.device) == (
        like.dtype,
        like.device,
    )
    if is_alike and values.stride() == like.stride():
        return values
    copy = torch.empty_like(like, requires_grad=False)
    with torch.no_grad():
        local_of(copy).copy_(values)
    return copy
