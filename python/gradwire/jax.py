"""JAX: an optax transformation whose updates are shared between nodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .sharing import exchange_for
from .transport import Node

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .exchange import AnyExchange, ExchangeOptions

__all__ = ["ShareState", "share"]

# Fields of optax's states that hold a running mean of squares: Adam and its like, RMSprop, Adagrad, Adafactor.
_SQUARES = {"nu", "sum_of_squares", "v_row", "e_g"}


class ShareState(NamedTuple):
    """The state of the wrapped transformation; the exchange has its own."""

    inner: Any


def share(
    optimizer: Any,
    *,
    node: Node | None = None,
    density: float | None = None,
    update_scale: float | Literal["auto"] = "auto",
    **options: Unpack[ExchangeOptions],
) -> Any:
    """Return an optax transformation that shares the updates of ``optimizer`` with the other nodes of this run.

    The place in the run comes from the environment, see `Node.from_env`. All nodes begin with the parameters of rank 0:
    the first update moves the others to them. Arrays in host memory are read in place. ``update`` needs the parameters
    and exchanges messages, so it stays outside ``jax.jit``; the gradient and ``optimizer.update`` may be compiled.

    Args:
        optimizer: an optax ``GradientTransformation``.
        node: a node to use and to close; None: one from the environment.
        density: share of the elements that a step sends; None: as in `gradwire.torch.share`.
        update_scale: factor of every update; "auto": measured, as `SharedOptimizer` says, where ``optimizer`` keeps a
            mean of squares, as Adam does, otherwise 1.0.
        options: see `ExchangeOptions`, with the defaults of `gradwire.torch.share`.

    Raises:
        ValueError: an option or environment variable that cannot be used.
        TimeoutError: not all nodes of the run appeared.
    """
    import jax
    import optax

    if update_scale != "auto" and not (
        isinstance(update_scale, (int, float)) and 0.0 < update_scale < math.inf
    ):
        raise ValueError(f'update_scale is {update_scale!r}, must be positive, or "auto"')
    exchange: AnyExchange
    shared: list[Any] = []  # the parameters that all nodes share, as arrays in host memory
    expected: list[Any] = []  # the caller's parameters as the next update brings them

    def init(params: Any) -> ShareState:
        nonlocal exchange
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(params)]
        inner = optimizer.init(params)
        exchange = exchange_for(
            [(str(index), leaf) for index, leaf in enumerate(leaves)],
            density,
            is_adaptive=_has_squares(inner),
            node=node,
            **options,
        )
        if update_scale == "auto" and _has_squares(inner):
            exchange.agreement.start()
        exchange.join(leaves, equalize=True)
        shared[:] = leaves
        expected[:] = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        return ShareState(inner)

    def update(updates: Any, state: ShareState, params: Any = None) -> tuple[Any, ShareState]:
        if params is None:
            raise ValueError(
                "update needs the parameters: optimizer.update(gradients, state, params)"
            )
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        # Parameters that were restored from a checkpoint, or changed in another way, are the caller's word.
        if not all(map(_is_close, before, expected)):
            for host, leaf in zip(shared, before, strict=True):
                host[...] = leaf
        moved, inner = optimizer.update(updates, state.inner, params)
        leaves, tree = jax.tree.flatten(moved)
        factor = np.float32(exchange.agreement.factor if update_scale == "auto" else update_scale)
        exchange.step([np.asarray(leaf) * factor for leaf in leaves], shared)
        # The caller adds the result to its parameters, which thereby become those that all nodes share.
        deltas = [jax.numpy.asarray(new - old) for new, old in zip(shared, before, strict=True)]
        added = zip(before, deltas, strict=True)
        expected[:] = [(old + np.asarray(delta)).astype(old.dtype) for old, delta in added]
        return jax.tree.unflatten(tree, deltas), ShareState(inner)

    return optax.GradientTransformation(init, update)


def _is_close(array: Any, expected: Any) -> bool:
    """Return whether two arrays are equal but for the rounding of an addition."""
    bound = 4.0 * float(np.finfo(array.dtype).eps) * np.maximum(np.abs(array), np.abs(expected))
    return bool((np.abs(array - expected) <= bound).all())


def _has_squares(state: Any) -> bool:
    """Return whether a part of an optimiser's state is a mean of squares."""
    if not isinstance(state, (tuple, list)):
        return hasattr(state, "inner_state") and _has_squares(state.inner_state)
    return bool(_SQUARES & set(getattr(state, "_fields", ()))) or any(map(_has_squares, state))
