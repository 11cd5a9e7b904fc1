"""JAX: an optax transformation whose updates are shared between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .errors import Closed
from .sharing import Training, training_for
from .transport import Node

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .exchange import ExchangeOptions
    from .sharing import ResidualClip, ShakeUp

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
    shakeup: ShakeUp | None = None,
    clip: ResidualClip | None = None,
    **options: Unpack[ExchangeOptions],
) -> Any:
    """Return an optax transformation that shares the updates of ``optimizer`` with the other nodes of this run.

    The place in the run comes from the environment, see `Node.from_env`. All nodes begin with the parameters of rank 0:
    the first update moves the others to them. Arrays in host memory are read in place. ``update`` needs the parameters
    and exchanges messages, so it stays outside ``jax.jit``; the gradient and ``optimizer.update`` may be compiled.
    ``close()`` of the result, ``with share(...) as ...``, or another ``init`` ends the training.

    Args:
        optimizer: an optax ``GradientTransformation``.
        node: a node to use, which the caller closes; None: one from the environment, closed with the transformation.
        density: share of the elements that a step sends; None: as in `gradwire.torch.share`.
        update_scale: factor of every update; "auto": measured, as `SharedOptimizer` says, where ``optimizer`` keeps a
            mean of squares, as Adam does, otherwise 1.0.
        shakeup: periodic messages with a smaller threshold, see `ShakeUp`; None: without.
        clip: periodic clipping of the residual, see `ResidualClip`; None: nothing is ever cut off.
        options: see `ExchangeOptions`, with the defaults of `gradwire.torch.share`.

    Raises:
        ValueError: an option or environment variable that cannot be used.
        TimeoutError: not all nodes of the run appeared.
    """
    if update_scale != "auto" and not (
        isinstance(update_scale, (int, float)) and 0.0 < update_scale < math.inf
    ):
        raise ValueError(f'update_scale is {update_scale!r}, must be positive, or "auto"')
    import optax

    class SharedTransformation(optax.GradientTransformation):  # type: ignore[misc,unused-ignore]
        """The transformation; as a context manager it closes itself at the end."""

        def close(self) -> None:
            self.init.__self__.close()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
            self.init.__self__.close(has_failed=kind is not None)

    def begin(named: Any, *, is_adaptive: bool) -> Training:
        return training_for(
            named,
            density,
            is_adaptive=is_adaptive,
            node=node,
            shakeup=shakeup,
            clip=clip,
            **options,
        )

    shared = _SharedUpdates(optimizer, begin, update_scale)
    return SharedTransformation(shared.init, shared.update)


class _SharedUpdates:
    """What a shared transformation does, and its training; the transformation's functions keep it alive.

    Args:
        optimizer: the wrapped transformation.
        begin: begins a training of named arrays.
        update_scale: see `share`.
    """

    def __init__(
        self,
        optimizer: Any,
        begin: Callable[..., Training],
        update_scale: float | Literal["auto"],
    ) -> None:
        self._optimizer = optimizer
        self._begin = begin
        self._scale = update_scale
        # The parameters that all nodes share, as arrays in host memory, and the caller's as the next update brings
        # them.
        self._shared: list[Any] = []
        self._expected: list[Any] = []
        self._training: Training | None = None

    def init(self, params: Any) -> ShareState:
        """Begin a training with these parameters; the one before has ended."""
        import jax

        self.close()
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(params)]
        inner = self._optimizer.init(params)
        is_adaptive = _has_squares(inner)
        named = [(str(index), leaf) for index, leaf in enumerate(leaves)]
        self._training = training = self._begin(named, is_adaptive=is_adaptive)
        training.end_with(self)
        try:
            if self._scale == "auto" and is_adaptive:
                training.exchange.agreement.start()
            training.exchange.join(leaves, equalize=True)
        except BaseException:
            self.close(has_failed=True)
            raise
        self._shared = leaves
        self._expected = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        return ShareState(inner)

    def update(self, updates: Any, state: ShareState, params: Any = None) -> tuple[Any, ShareState]:
        """Share the optimiser's update; return the difference to the parameters that all nodes share."""
        import jax

        if params is None:
            raise ValueError(
                "update needs the parameters: optimizer.update(gradients, state, params)"
            )
        if self._training is None:
            raise Closed("this transformation has no training, or was closed: call init")
        exchange = self._training.exchange
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        # Parameters that were restored from a checkpoint, or changed in another way, are the caller's word.
        if not all(map(_is_close, before, self._expected)):
            for host, leaf in zip(self._shared, before, strict=True):
                host[...] = leaf
        moved, inner = self._optimizer.update(updates, state.inner, params)
        leaves, tree = jax.tree.flatten(moved)
        factor = np.float32(exchange.agreement.factor if self._scale == "auto" else self._scale)
        exchange.step([np.asarray(leaf) * factor for leaf in leaves], self._shared)
        # The caller adds the result to its parameters, which thereby become those that all nodes share.
        shared = zip(self._shared, before, strict=True)
        deltas = [jax.numpy.asarray(new - old) for new, old in shared]
        added = zip(before, deltas, strict=True)
        self._expected = [(old + np.asarray(delta)).astype(old.dtype) for old, delta in added]
        return jax.tree.unflatten(tree, deltas), ShareState(inner)

    def close(self, *, has_failed: bool = False) -> None:
        """End the training, if there is one."""
        training = self._training
        self._training = None
        if training is not None:
            training.close(has_failed=has_failed)


def _is_close(array: Any, expected: Any) -> bool:
    """Return whether two arrays are equal but for the rounding of an addition."""
    bound = 4.0 * float(np.finfo(array.dtype).eps) * np.maximum(np.abs(array), np.abs(expected))
    return bool((np.abs(array - expected) <= bound).all())


def _has_squares(state: Any) -> bool:
    """Return whether a part of an optimiser's state is a mean of squares."""
    if not isinstance(state, (tuple, list)):
        return hasattr(state, "inner_state") and _has_squares(state.inner_state)
    return bool(_SQUARES & set(getattr(state, "_fields", ()))) or any(map(_has_squares, state))
