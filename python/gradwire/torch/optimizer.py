"""Any torch optimiser, whose updates are shared between nodes over UDP."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch._compile import _disable_dynamo

from ..arrays import copies, put, writable_views
from ..errors import Closed, NonFiniteUpdate
from ..exchange import Exchange, LocalExchange
from .staging import Staging

if TYPE_CHECKING:
    from ..exchange import AnyExchange, Joined, StepResult
    from ..sharing import Training

__all__ = ["SharedOptimizer", "is_adaptive", "parameters_of"]

_STATE_KEY = "gradwire"

# Of an optimiser's state: what does not begin as a step without gradients leaves it, and how it begins.
_COUNTERS = {"step": 0, "mu_product": 1}

# Of a node's own parameters: the codec's memory, and the parameters that have less precision than that.
_Values = tuple[list[np.ndarray[Any, Any]], list[torch.Tensor]]

# Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, Adafactor, RMSprop, and others that normalise in the same way.
_ADAPTIVE = re.compile(r"ada(?!pter)|rmsprop|lamb|lion|muon|novograd|sophia|shampoo", re.IGNORECASE)


class SharedOptimizer(torch.optim.Optimizer):
    """Runs an optimiser and shares its updates, as Deeplearning4j does.

    Every node has an optimiser with its own state and gradients. The update is the difference between the parameters
    after the optimiser's step and the shared parameters. The exchange encodes the update and adds the mean (or the sum)
    of all nodes' messages to the shared parameters; unsent updates stay in the residual. Momentum, Adam's moments,
    schedules and weight decay work as usual.

    Nodes that begin with the same parameters keep the same ones, bit for bit, in synchronous mode (with ``overlap``
    those of the step before). Every node must call ``step`` equally often in synchronous mode. Any other change of the
    parameters between steps becomes part of the update; load checkpoints before the first step.

    ``GradScaler`` works on each node separately: a node that skips a step still takes part in the exchange.
    ``docs/torch.md`` recommends options for the exchange.

    Args:
        optimizer: the optimiser, all of whose parameters are shared.
        exchange: with an encoder, or groups, for as many elements as there are parameters, in the order of the
            optimiser's parameter groups; or one worker's part of a `LocalTeam`.
        share_state: also pass the optimiser's state to the exchange, so that late nodes begin with that state. The
            state is then created, as zeros, before the first step.
        update_scale: factor of every update: a number, or "auto": the square root of the number of nodes for an
            adaptive optimiser, 1.0 for SGD and its like. An adaptive optimiser divides by the size of its own
            gradients, noise included, so the mean of n nodes' updates is shorter than the update of their mean
            gradient by up to sqrt(n). The optimiser's learning rates carry the factor during its step.
        equalize: begin with the parameters of the node with the lowest id, on all nodes; without, nodes that begin with
            other parameters are refused.
        buffers: further float32 or float64 tensors that late nodes take over, such as a model's buffers.
        counts_workers: whether the workers of a team have gradients of their own, which count for ``update_scale``, or
            gradients that DistributedDataParallel has averaged already.
        training: ends with this optimiser; None: the caller closes the node.

    Raises:
        ValueError: ``update_scale`` is not "auto", nor positive and finite.
        TypeError: ``optimizer`` or ``exchange`` has the wrong type.

    Example:
        >>> import gradwire as gw, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        ...     share = gw.Exchange(gw.Encoder(4, threshold=0.001), node, min_peers=0)
        ...     optimizer = SharedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), share)
        ...     model(torch.ones(1, 3)).sum().backward()
        ...     optimizer.step()
        >>> optimizer.result.applied
        1
    """

    # Without this, GradScaler would not call ``step`` on overflow, and the other nodes would wait.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: AnyExchange,
        *,
        share_state: bool = False,
        update_scale: float | Literal["auto"] = 1.0,
        equalize: bool = False,
        buffers: Sequence[torch.Tensor] = (),
        counts_workers: bool = True,
        training: Training | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be one of torch's, got {optimizer!r}")
        if not isinstance(exchange, (Exchange, LocalExchange)):
            raise TypeError(f"exchange must be an Exchange, got {exchange!r}")
        # Not super().__init__: param_groups, state and defaults are the wrapped optimiser's (__getattr__).
        self.optimizer = optimizer
        self.exchange = exchange
        self.share_state = share_state
        if update_scale != "auto" and not 0.0 < update_scale < math.inf:
            raise ValueError(f'update_scale is {update_scale!r}, must be positive, or "auto"')
        self._scale = update_scale
        self._equalizes = equalize
        self._counts_workers = counts_workers
        self._buffers = [Staging(buffer) for buffer in buffers]
        # While the model holds the shared parameters.
        self._set_aside: _Values | None = None
        self.result: StepResult | None = None
        on_host = not exchange.takes_devices
        self._params = [Staging(param, on_host=on_host) for param in parameters_of(optimizer)]
        self._state: list[Staging] = []
        self._local: _Values = [], []
        self._has_joined = False
        self._is_closed = False
        self._training = training
        if training is not None:
            training.end_with(self)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimiser."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"SharedOptimizer({self.optimizer!r})"

    def join(self) -> Joined:
        """Take part from now on; a late node then has the other nodes' parameters. The first step joins otherwise.

        Returns:
            The step to begin with, and whether training had begun.

        Raises:
            TimeoutError, Mismatch: as ``Exchange.join``.
        """
        if self.share_state:
            _create_state(self.optimizer)
            self._state = [Staging(tensor) for tensor in _state_tensors(self.optimizer)]
        self._state += self._buffers
        for staging in (*self._params, *self._state):
            staging.fetch()
        self._set_values(self._local)
        joined = self.exchange.join(*self._memory, equalize=self._equalizes)
        if joined.is_late or not self.exchange.has_local_steps:
            self._store()
        if not joined.is_late:
            self._set_values(self._local)
        self._local = [], []
        self._has_joined = True
        return joined

    def resync(self) -> Joined:
        """Take parameters, step and shared optimiser state from another node again, for instance after `Diverged`.

        Raises:
            TimeoutError, Mismatch: as ``Exchange.resync``.
        """
        with self._staged() as memory:
            return self.exchange.resync(*memory)

    def leave(self) -> StepResult | None:
        """Send the rest of this node's updates, for the last time, and close; the others go on. Return the last result.

        A second call does nothing.

        Raises:
            WouldBlock, TimeoutError, MessageError, TooLarge, Closed: as ``Exchange.leave``.
        """
        if self._has_joined and not self._is_closed:
            with self._staged() as memory:
                self.result = self.exchange.leave(*memory)
        self.close()
        return self.result

    def close(self) -> None:
        """End this node's part in the training; the model then is a plain one with the parameters that all share.

        Node, port and shared memory are free for the next ``share`` of this process. What is still in the residual
        stays unsent. The optimiser can still be saved. Without a call, an optimiser ends when it is collected, or with
        the process. A second call does nothing.
        """
        self._close(has_failed=False)

    def _close(self, *, has_failed: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not has_failed and self._has_joined and self._set_aside is None and self._is_as_left():
            # As within ``shared_parameters``: a checkpoint has this node's own parameters.
            values = self._values()
            self._set_values((self.exchange.shared(writable_views(self._memory[0])), []))
            self._set_aside = values
        if self._training is not None:
            self._training.close(has_failed=has_failed)

    def __enter__(self) -> SharedOptimizer:
        """Return the optimiser."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error without a goodbye, so that the others know."""
        self._close(has_failed=kind is not None)

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the wrapped optimiser and share it.

        Returns:
            The closure's result, None without one.

        Raises:
            NonFiniteUpdate: a gradient is NaN or infinite, found before the optimiser's state has changed; or the
                optimiser made parameters NaN or infinite, and its update is reverted.
            RuntimeError: inside ``shared_parameters``.
            WouldBlock, TimeoutError, MessageError, TooLarge, Closed: as ``Exchange.step_moved``; or the optimiser was
                closed.
        """
        if self._is_closed:
            raise Closed("this optimiser was closed, or has left the training: call share again")
        if self._set_aside is not None:
            raise RuntimeError(
                "a step inside shared_parameters() would be lost: train outside, where the model has this node's "
                "own parameters"
            )
        loss = None
        if self._has_joined or not self._join_moves() or closure is not None:
            with self._scaled_rates():
                loss = self._local_step(closure)
        if self.exchange.is_next_local:
            self.result = self.exchange.step_moved(*self._memory)
            return loss
        with self._staged() as memory:
            self.result = self.exchange.step_moved(*memory)
        return loss

    def catch_up(self, timeout_s: float = 0.0) -> int:
        """Add pending messages, in asynchronous mode or with ``overlap``, without sending anything.

        Returns:
            The number of messages that were added.

        Raises:
            TimeoutError, MessageError, Closed: as ``Exchange.catch_up``.
        """
        if self._is_closed:
            return 0
        if not self._has_joined:
            self.join()
        with self._staged() as (params, _):
            return self.exchange.catch_up(params, timeout_s)

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Let the model hold the parameters that all nodes share, in order to evaluate or to save them.

        The model always holds them without local steps and ``apply_residual``. Do not train meanwhile.

        >>> import gradwire as gw, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        ...     encoder = gw.Encoder(2, threshold=1.0)
        ...     share = gw.Exchange(encoder, node, min_peers=0, apply_residual=True)
        ...     optimizer = SharedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), share)
        ...     joined = optimizer.join()
        ...     before = model.bias.item()
        ...     model(torch.ones(1, 1)).sum().backward()
        ...     optimizer.step()
        >>> with optimizer.shared_parameters():
        ...     model.bias.item() == before
        True
        >>> model.bias.item() == before - 0.25
        True
        """
        if self._set_aside is not None:
            raise RuntimeError("shared_parameters() inside shared_parameters()")
        values = self._values()
        self._set_aside = values
        try:
            shared = self.exchange.shared(writable_views(self._memory[0]))
            self._set_values((shared, []))
            yield
        finally:
            self._set_aside = None
            self._set_values(values)

    def shared_tensors(self) -> list[torch.Tensor]:
        """Return copies of the shared parameters, in host memory, in the order of the optimiser's parameters."""
        arrays = writable_views(self._memory[0])
        params = [param.detach() for param in parameters_of(self.optimizer)]
        if not self._has_joined or self._set_aside is not None or not self._is_as_left():
            return [param.cpu().clone() for param in params]
        return [torch.from_numpy(array) for array in self.exchange.shared(arrays)]

    def _is_as_left(self) -> bool:
        """Return whether no other weights were copied into the model since the last step; True after local steps."""
        if self.exchange.has_local_steps:
            return True
        for staging in self._params:
            tensor = staging.tensor
            left = staging.memory.to(tensor.device, tensor.dtype)
            if left.data_ptr() != tensor.data_ptr() and not torch.equal(left, tensor):
                return False
        return self.exchange.holds(writable_views(self._memory[0]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimiser does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the size of the exchange's encoder is fixed.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{len(param_group)} entries cannot become a new group: give all parameters to the optimiser "
            "before it is shared"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state; under "gradwire" the exchange's, and this node's own parameters."""
        state: dict[str, Any] = {**self.optimizer.state_dict()}
        shared = self.exchange.state_dict()
        shared["local"], shared["rounded"] = self._set_aside or self._values()
        state[_STATE_KEY] = _map_leaves(shared, np.ndarray, torch.from_numpy)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, before the first step; a plain optimiser's state has no residual.

        Raises:
            ValueError, RuntimeError: as ``Exchange.load_state_dict``.
        """
        state = dict(state_dict)
        shared = {**state.pop(_STATE_KEY, {})}
        self.optimizer.load_state_dict(state)
        if shared:
            local = [tensor.numpy() for tensor in shared.pop("local", [])]
            self._local = local, shared.pop("rounded", [])
            self.exchange.load_state_dict(_map_leaves(shared, torch.Tensor, torch.Tensor.numpy))
            self.restore()

    def restore(self) -> None:
        """Let the model hold this node's parameters of a loaded state, until the first step; share() sees to it."""
        if not self._has_joined:
            self._set_values(self._local)

    # ---- one step -----------------------------------------------------------------------------------------------

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        """Run the wrapped optimiser, unless GradScaler has found infinity."""
        inner = self.optimizer
        found_inf = self.__dict__.get("found_inf")
        if found_inf is None and closure is not None:

            def checked() -> Any:
                loss = closure()
                self._check_gradients()
                return loss

            return inner.step(checked)
        if found_inf is None:
            self._check_gradients()
            return inner.step()
        scale = self.__dict__.get("grad_scale")
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf = found_inf
            inner.grad_scale = scale
            try:
                return inner.step()
            finally:
                del inner.found_inf, inner.grad_scale
        if found_inf.item():
            return None
        if scale is not None:
            for param in parameters_of(inner):
                if param.grad is not None:
                    param.grad.div_(scale.item())
        return inner.step()

    def _join_moves(self) -> bool:
        """Join; return whether that has changed the parameters, to which the gradients then do not belong."""
        before = [param.detach().clone() for param in parameters_of(self.optimizer)]
        self.join()
        return not all(map(torch.equal, before, parameters_of(self.optimizer)))

    def _check_gradients(self) -> None:
        """Refuse gradients that are not finite, before they spoil the optimiser's state."""
        params = parameters_of(self.optimizer)
        param_grads = [param.grad for param in params if param.grad is not None]
        grads = [grad._values() if grad.is_sparse else grad.detach() for grad in param_grads]
        # Infinity minus infinity is NaN, and both spread through a sum: one pass, and one number per tensor.
        sums = [grad.sum(dtype=torch.float64) for grad in grads]
        if not sums or torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all():
            return
        counts = [int((~grad.isfinite()).sum()) for grad in grads]
        if sum(counts):
            index = next(index for index, count in enumerate(counts) if count)
            raise NonFiniteUpdate(
                f"{sum(counts)} elements of the gradient are NaN or infinite, the first in parameter {index} of shape "
                f"{tuple(param_grads[index].shape)}: nothing was sent, and the optimiser's state is unchanged; clip "
                "gradients, lower the learning rate, or use GradScaler",
                sum(counts),
            )

    @property
    def update_scale(self) -> float:
        """The factor of the next update, see ``update_scale``."""
        if self._scale != "auto":
            return self._scale
        workers = self.exchange.workers if self._counts_workers else 1
        nodes = (len(self.exchange.members) + 1) * workers
        return math.sqrt(nodes) if is_adaptive(self.optimizer) else 1.0

    @contextmanager
    def _scaled_rates(self) -> Iterator[None]:
        """Let the learning rates carry ``update_scale``."""
        groups = self.optimizer.param_groups
        factor = self.update_scale
        rates = [group["lr"] for group in groups] if factor != 1.0 else []
        try:
            for group, rate in zip(groups, rates, strict=False):
                group["lr"] = rate * factor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=False):
                group["lr"] = rate

    @property
    def _memory(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The codec's memory of the parameters and of the shared state."""
        params = [staging.memory for staging in self._params]
        return params, [staging.memory for staging in self._state]

    def _values(self) -> _Values:
        """Return copies of the codec's memory, and of parameters in half precision: local steps move only those."""
        for staging in self._params:
            if not (self._has_joined and staging.is_rounded):
                staging.fetch()
        halves = [staging.tensor for staging in self._params if staging.is_rounded]
        rounded = [tensor.cpu().clone() for tensor in halves]
        return copies(writable_views(self._memory[0])), rounded

    def _set_values(self, values: _Values) -> None:
        """Go on with what ``_values`` returned; nothing without values."""
        memory, rounded = values
        if not memory:
            return
        put(writable_views(self._memory[0]), memory)
        for staging in self._params:
            staging.store()
        halves = [staging.tensor for staging in self._params if staging.is_rounded]
        for half, value in zip(halves, rounded, strict=False):
            half.copy_(value)

    @contextmanager
    def _staged(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Copy what the optimiser has moved to the codec's memory, and the result back, also after an error."""
        for staging in (*self._params, *self._state):
            staging.fetch_moved()
        try:
            yield self._memory
        finally:
            self._store()

    def _store(self) -> None:
        for staging in (*self._params, *self._state):
            staging.store()


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimiser divides its updates by the size of its own gradients, as its name says."""
    return bool(_ADAPTIVE.search(type(optimizer).__name__))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser create its state, as its first step would begin with it; the parameters stay unchanged.

    A step without gradients and weight decay leaves all but counters as they begin.
    """
    if optimizer.state:
        return
    groups = optimizer.param_groups
    params = parameters_of(optimizer)
    grads = [param.grad for param in params]
    values = [param.detach().clone() for param in params]
    decays = [group.get("weight_decay") for group in groups]
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for param in params:
        zeros = torch.zeros_like(param)
        param.grad = zeros.to_sparse(1) if is_sparse else zeros
    for group, decay in zip(groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = 0.0
    optimizer.step()
    with torch.no_grad():
        for param, grad, value in zip(params, grads, values, strict=True):
            param.grad = grad
            param.copy_(value)
            state = optimizer.state[param]
            for name, initial in _COUNTERS.items():
                if torch.is_tensor(state.get(name)):
                    state[name].fill_(initial)
                elif name in state:
                    state[name] = initial
    for group, decay in zip(groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimiser's state in an order that is the same on every node."""
    for param in parameters_of(optimizer):
        state = optimizer.state.get(param, {})
        yield from (state[key] for key in sorted(state) if torch.is_tensor(state[key]))


def _map_leaves(tree: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts and lists with ``function`` applied to every leaf of ``kind``."""
    if isinstance(tree, dict):
        return {key: _map_leaves(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_map_leaves(value, kind, function) for value in tree]
    return function(tree) if isinstance(tree, kind) else tree
