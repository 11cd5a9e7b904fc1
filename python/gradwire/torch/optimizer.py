"""Any torch optimiser, whose updates are shared between nodes over UDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..exchange.views import copies, put, writable_views
from .staging import Staging

if TYPE_CHECKING:
    from ..exchange import Exchange, Joined, LocalExchange, StepResult

__all__ = ["SharedOptimizer"]

_STATE_KEY = "gradwire"


class SharedOptimizer(torch.optim.Optimizer):
    """Runs an optimiser and shares what it adds to the parameters, as Deeplearning4j does.

    Every node has its own optimiser with its own state and its own gradients. After its step the difference to the
    parameters that all nodes share is the update: it goes through the exchange's encoder, and the parameters become the
    shared ones with everybody's messages added. Nodes that begin with the same parameters keep the same ones, bit for
    bit, in synchronous mode (with ``overlap`` those of the step before). What is not sent stays in the residual;
    momentum, Adam's moments, schedules and weight decay work as ever, because the exchange sees only what comes out of
    them.

    The exchange decides how: synchronously, asynchronously, or every H steps, as a mean or as a sum.

    ``step`` shares, so every node must call it equally often in synchronous mode. ``GradScaler`` works on each node by
    itself: a node that skips a step still takes part in the exchange, with what it had left.

    What else changes the parameters between steps becomes part of the update; load checkpoints before the first step.

    **Memory.** The exchange keeps the shared parameters and the residual: 4 bytes per parameter each, and 4 for the
    difference while it is taken, without ``apply_residual``. Parameters in host memory are changed in place; those of a
    GPU or in half precision have a copy of 4 bytes in (pinned) host memory besides, which in half precision holds the
    bits that rounding takes from the shared parameters.

    Args:
        optimizer: whose parameters are all shared.
        exchange: with an encoder, or groups, for as many elements as there are parameters, in the order of the
            optimiser's parameter groups; or one worker's of a `LocalTeam`.
        share_state: also hand the optimiser's state to the exchange: for ``average_optimizer=True``, and so that late
            nodes begin with it. It is then made, as zeros, before the first step.

    Raises:
        TypeError: ``optimizer`` or ``exchange`` is none.

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

    # GradScaler then hands over its verdict instead of leaving ``step`` out, on which the other nodes would wait.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange | LocalExchange,
        *,
        share_state: bool = False,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be one of torch's, got {optimizer!r}")
        if not hasattr(exchange, "step_moved"):
            raise TypeError(f"exchange must be an Exchange, got {exchange!r}")
        # Not super().__init__: groups and state are those of the wrapped optimiser.
        self.optimizer = optimizer
        self.exchange = exchange
        self.share_state = share_state
        self.result: StepResult | None = None
        self._params = [Staging(one) for group in optimizer.param_groups for one in group["params"]]
        self._state: list[Staging] = []
        self._loaded: list[torch.Tensor] = []
        self._has_joined = False

    def __getattr__(self, name: str) -> Any:
        """Return what only the wrapped optimiser has."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"SharedOptimizer({self.optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimiser's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimiser's."""
        return self.optimizer.state

    def join(self) -> Joined:
        """Come in before the first step, which does it otherwise; a late node has the others' parameters afterwards.

        Returns:
            The step to begin with, and whether training had begun.

        Raises:
            TimeoutError, Mismatch: as ``Exchange.join``.
        """
        if self.share_state:
            _make_state(self.optimizer)
            self._state = [Staging(tensor) for tensor in _state_tensors(self.optimizer)]
        for one in (*self._params, *self._state):
            one.mark_ready()
            one.fetch()
        for one, shared in zip(self._params, self._loaded, strict=False):
            if one.is_rounded:
                one.host.copy_(shared)
        joined = self.exchange.join(_hosts(self._params), _hosts(self._state))
        if joined.is_late or not self.exchange.has_local_steps:
            self._store()
        self._has_joined = True
        return joined

    def resync(self) -> Joined:
        """Take parameters, step and, where it is shared, the optimiser's state anew: after `Diverged`, say.

        Raises:
            TimeoutError, Mismatch: as ``Exchange.resync``.
        """
        self._fetch_moved()
        try:
            return self.exchange.resync(_hosts(self._params), _hosts(self._state))
        finally:
            self._store()

    def leave(self) -> StepResult:
        """Send what is left of this node's updates; the others go on without it. Close the node afterwards.

        Raises:
            WouldBlock, TimeoutError, MessageError, TooLarge, Closed: as ``Exchange.leave``.
        """
        self._fetch_moved()
        try:
            return self.exchange.leave(_hosts(self._params), _hosts(self._state))
        finally:
            self._store()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the wrapped optimiser and share it.

        Returns:
            What the closure returned, None without one.

        Raises:
            NonFiniteUpdate: the optimiser made parameters NaN or infinite; they are without its update.
            WouldBlock, TimeoutError, MessageError, TooLarge, Closed: as ``Exchange.step_moved``.
        """
        if not self._has_joined:
            self.join()
        loss = self._local_step(closure)
        if self.exchange.is_next_local:
            self.result = self._exchange_step()
            return loss
        self._fetch_moved()
        try:
            self.result = self._exchange_step()
        finally:
            self._store()
        return loss

    def catch_up(self, timeout_s: float = 0.0) -> int:
        """Add what is still to come, in asynchronous mode or with ``overlap``, without sending anything.

        Returns:
            The number of messages that were added.

        Raises:
            ValueError, TimeoutError, MessageError, Closed: as ``Exchange.catch_up``.
        """
        if not self._has_joined:
            self.join()
        self._fetch_moved()
        try:
            return self.exchange.catch_up(_hosts(self._params), timeout_s)
        finally:
            self._store()

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Let the model hold the parameters that all nodes share for a while: to evaluate or to save them.

        Without local steps and ``apply_residual`` it does so anyway. Nothing may train meanwhile.

        >>> import gradwire as gw, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        ...     share = gw.Exchange(gw.Encoder(2, threshold=1.0), node, min_peers=0, apply_residual=True)
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
        self._fetch_moved()
        hosts = writable_views(_hosts(self._params))
        own = copies(hosts)
        put(hosts, self.exchange.shared(hosts))
        self._store()
        try:
            yield
        finally:
            put(hosts, own)
            self._store()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimiser."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the exchange's encoder is made for the parameters there are.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{len(param_group)} entries cannot become a new group: give all parameters to the optimiser "
            "before it is shared"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state, and under "gradwire" the exchange's, all as tensors and numbers.

        Every node saves its own; a plain optimiser of the same kind can load it.
        """
        state: dict[str, Any] = {**self.optimizer.state_dict()}
        state[_STATE_KEY] = _mapped(self.exchange.state_dict(), np.ndarray, torch.from_numpy)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``, before the first step; one of a plain optimiser has no residual to bring.

        Raises:
            ValueError, RuntimeError: as ``Exchange.load_state_dict``.
        """
        state = dict(state_dict)
        shared = state.pop(_STATE_KEY, None)
        self.optimizer.load_state_dict(state)
        if shared is not None:
            self.exchange.load_state_dict(
                _mapped(shared, torch.Tensor, lambda tensor: tensor.numpy())
            )
            self._loaded = shared.get(
                "anchor", []
            )  # a worker's that does not lead its team has nothing

    # ---- one step -----------------------------------------------------------------------------------------------

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        """Run the wrapped optimiser, unless GradScaler has found infinity."""
        inner = self.optimizer
        found_inf = self.__dict__.get("found_inf")
        if found_inf is None:
            return inner.step(closure) if closure is not None else inner.step()
        scale = self.__dict__.get("grad_scale")
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf, inner.grad_scale = found_inf, scale
            try:
                return inner.step()
            finally:
                del inner.found_inf, inner.grad_scale
        if found_inf.item():
            return None
        if scale is not None:
            _unscale(inner, scale)
        return inner.step()

    def _exchange_step(self) -> StepResult:
        return self.exchange.step_moved(_hosts(self._params), _hosts(self._state))

    def _fetch_moved(self) -> None:
        for one in (*self._params, *self._state):
            one.mark_ready()
            one.fetch_moved()

    def _store(self) -> None:
        for one in (*self._params, *self._state):
            one.store()


def _hosts(staged: Sequence[Staging]) -> list[torch.Tensor]:
    return [one.host for one in staged]


def _unscale(optimizer: torch.optim.Optimizer, scale: torch.Tensor) -> None:
    """Divide the gradients by the loss scale, a power of two."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.div_(scale.item())


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser make its state, which it does in its first step, and leave it and the parameters untouched."""
    if optimizer.state:
        return
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    grads, rates = [param.grad for param in params], [group["lr"] for group in groups]
    values = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in groups:
        group["lr"] = 0.0
    optimizer.step()
    with torch.no_grad():
        for param, grad, value in zip(params, grads, values, strict=True):
            param.grad = grad
            param.copy_(value)
        for tensor in _state_tensors(optimizer):
            tensor.zero_()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimiser's state in an order that is the same on every node."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            yield from (state[key] for key in sorted(state) if torch.is_tensor(state[key]))


def _mapped(tree: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts and lists with ``function`` applied to every leaf of ``kind``."""
    if isinstance(tree, dict):
        return {key: _mapped(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(value, kind, function) for value in tree]
    return function(tree) if isinstance(tree, kind) else tree
