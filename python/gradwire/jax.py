"""JAX: an optax transformation whose updates are shared between nodes."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from . import ulps
from .arrays import blocks, copies, nonfinite, put
from .errors import Closed, Mismatch, NonFiniteUpdate, is_failure
from .exchange.checkpoint import params_of
from .exchange.exchange import check_state as check_exchange_state
from .exchange.local import leader_of
from .sharing import Training, TrainingMaker, check_shapes, check_state, check_update_scale
from .state import check_flag
from .transport import Node

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .exchange import ExchangeOptions, StepResult
    from .sharing import Density, ResidualClip, ShakeUp

__all__ = ["ShareState", "share"]

_LOG = logging.getLogger(__name__)

# Fields of optax's states that hold a running mean of squares: Adam and its like, RMSprop, Adagrad, Adafactor, Prodigy.
_SQUARES = {"nu", "sum_of_squares", "v_row", "e_g", "exp_avg_sq"}
# A running mean of gradients, as Adam's; optax keeps its share, b1, in a closure, so the usual one is taken.
_MEANS = {"mu", "exp_avg"}
_MOMENTUM = 0.9
# Further running means with a count of their own: of reduce_on_plateau, and of ema.
_OTHER_MEANS = {"avg_value", "ema"}

# Updates in which weight decay is looked for: a schedule may begin at zero, and steps may be accumulated. And the value
# of hyperparameters that are zero at first, because the caller will set them by hand.
_TRIAL_STEPS = 8
_TRIAL_VALUE = 0.01

# Copies of returned parameters that are kept, beside those with which the caller began.
_RETURNED_MAX = 3


class ShareState(NamedTuple):
    """The states of the transformations; the exchange has its own.

    Attributes:
        inner: of the wrapped one.
        decay: of the one that tells how much of an update is weight decay; None: not measured.
    """

    inner: Any
    decay: Any = None


def share(
    optimizer: Any,
    *,
    node: Node | None = None,
    density: Density | None = None,
    update_scale: float | Literal["auto"] = "auto",
    shakeup: ShakeUp | None = None,
    clip: ResidualClip | None = None,
    share_state: bool = True,
    **options: Unpack[ExchangeOptions],
) -> Any:
    """Return an optax transformation that shares the updates of ``optimizer`` with the other nodes of this run.

    The place in the run comes from the environment, see `Node.from_env`. All nodes begin with the parameters of rank 0:
    the first update moves the others to them and ignores their gradients, or ``params = transformation.join()`` returns
    them before. The result also has ``result``, ``step_number``, ``shared()``, ``state_dict()`` and
    ``load_state_dict()``, as `SharedArrays` has. Arrays in host memory are read in place. ``update`` needs the
    parameters and exchanges messages, so it stays outside ``jax.jit``; the gradient may be compiled, and
    ``optimizer.update`` is. ``close()`` of the result, ``with share(...) as ...``, or another ``init`` ends the
    training; ``leave()`` sends the rest of this node's updates before.

    Args:
        optimizer: an optax ``GradientTransformation``. Further arguments of ``update``, such as a loss, are passed on.
        node: for this training alone; the caller closes it. None: one from the environment, closed with the result.
        density: share of the elements that a step sends; None: as in `gradwire.torch.share`, where an optimiser
            without a mean of squares, such as Lion, counts as SGD: give it 0.05. Or by pattern of the
            parameters' paths, such as ``{"head/*": 0.05}``: parameters with a learning rate far above the others', as
            ``optax.multi_transform`` gives, need a density, and with it a threshold, of their own.
        update_scale: factor of every update; "auto": measured, as `SharedOptimizer` says, where ``optimizer`` keeps a
            mean of squares, as Adam does, otherwise 1.0. Weight decay beside the gradient, as AdamW's, has no factor.
            ``optax.adafactor()`` without a learning rate takes steps as large as the parameters: give it 1.0.
        shakeup: periodic messages with a smaller threshold, see `ShakeUp`; None: without.
        clip: periodic clipping of the residual, see `ResidualClip`; None: without.
        share_state: a node that joins late takes over optax's state, too, in its first update: with Adam 8 of 12 bytes
            per parameter, and a schedule's count.
        options: see `ExchangeOptions`, with the defaults of `gradwire.torch.share`.

    Raises:
        ValueError: ``update_scale`` is out of range; ``init`` refuses what else cannot be used.
        TypeError: ``optimizer`` is no transformation.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer must be a GradientTransformation, got {reprlib.repr(optimizer)}"
        )
    check_update_scale(update_scale)
    check_flag("share_state", share_state)
    import optax

    class SharedTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc,unused-ignore]
        """The transformation; as a context manager it closes itself at the end."""

        @property
        def _shared(self) -> _SharedUpdates:
            # Not from the enclosing call: this class is part of a cycle, and would keep the training alive.
            shared: _SharedUpdates = self.init.__self__
            return shared

        @property
        def result(self) -> StepResult | None:
            """Result of the last step."""
            return self._shared.result

        @property
        def step_number(self) -> int:
            """Number of the training's next step, see `SharedArrays.step_number`."""
            return self._shared.step_number

        def join(self) -> Any:
            """Take part from now on, after ``init``; return the parameters to begin with.

            They are rank 0's, or, of a node that comes late, the present ones. The first update joins otherwise, and
            moves the caller's parameters there.
            """
            return self._shared.join()

        def shared(self) -> Any:
            """Return a copy of the parameters that all nodes share, without this node's residual."""
            return self._shared.shared()

        def state_dict(self) -> dict[str, Any]:
            """Return this node's parameters and the exchange's state; optax's state is what ``update`` returned."""
            return self._shared.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> Any:
            """Continue from ``state``, after ``init`` and before the first update; return this node's parameters.

            Raises:
                ValueError: the state is of other parameters, or as ``Exchange.load_state_dict``; nothing was loaded.
                RuntimeError: training has begun; nothing was loaded.
            """
            return self._shared.load_state_dict(state)

        def catch_up(self) -> Any:
            """Finish the last step (``overlap``), or add what has arrived (``mode="async"``); return the parameters.

            They are this node's, to go on with. Nothing is sent.

            Raises:
                TimeoutError, MessageError, Closed: as ``Exchange.catch_up``.
            """
            return self._shared.catch_up()

        def leave(self) -> Any:
            """Send the rest of this node's updates, and end its part; return the parameters that all share then.

            Raises:
                WouldBlock, TimeoutError, MessageError, PeerLost, Closed: as ``Exchange.leave``.
            """
            return self._shared.leave()

        def close(self) -> None:
            """End the training, if there is one."""
            self._shared.close()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self._shared.close(has_failed=is_failure(*error))

    maker = partial(TrainingMaker, density, node=node, shakeup=shakeup, clip=clip, **options)
    shared = _SharedUpdates(optimizer, maker, update_scale, share_state=share_state)
    return SharedTransformation(shared.init, shared.update)


class _SharedUpdates:
    """What the methods of a shared transformation do, and its training; the transformation's functions keep it alive.

    Args:
        optimizer: the wrapped transformation.
        maker: returns the `TrainingMaker` of an optimiser that ``is_adaptive`` or not.
        update_scale, share_state: see `share`.
    """

    def __init__(
        self,
        optimizer: Any,
        maker: Callable[..., TrainingMaker],
        update_scale: float | Literal["auto"],
        *,
        share_state: bool,
    ) -> None:
        self._optimizer = optimizer
        self._update = _compiled(optimizer)
        self._maker = maker
        self._scale = update_scale
        self._state = _SharedState(is_shared=share_state)
        self.result: StepResult | None = None
        # This node's parameters in host memory, which the exchange changes, and their tree.
        self._leaves: list[Any] = []
        self._shardings: list[Any] = []  # of the caller's, None: on the default device
        self._tree: Any = None
        self._names: list[str] = []
        # What the next update may bring as the caller's parameters without having written into them: those that were
        # returned last come first.
        self._expected: list[list[Any]] = []
        self._outdated = 0  # how many of them, the last ones, `join` has replaced
        self._has_joined = False
        self._is_adaptive = False
        self._momentum = 0.0
        self._decay: _Decay | None = None
        self._training: Training | None = None
        self._last_shared: list[Any] | None = None  # after the end

    def init(self, params: Any) -> ShareState:
        """Begin a training with these parameters; the one before has ended."""
        import jax

        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        names = ["/".join(map(_key_of, path)) for path, _ in paths]
        _refuse_tracers("init", params)
        leaves = [leaf for _, leaf in paths]
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, (str, bytes)):
                raise TypeError(f"{name} is {reprlib.repr(leaf)}: parameters must be arrays")
        dtypes = _checked_dtypes(names, leaves)
        for name, leaf in zip(names, leaves, strict=True):
            if count := nonfinite([np.asarray(leaf)]):
                raise ValueError(
                    f"{count} elements of {name} are NaN or infinite, and no update can change them: keep masks apart "
                    "from the parameters"
                )
        inner = self._optimizer.init(params)
        is_adaptive = _has_any(_SQUARES, inner)
        has_factor = is_adaptive if self._scale == "auto" else self._scale != 1.0
        decay = _Decay(self._optimizer, params) if has_factor else None
        if decay is not None and not decay.is_apart():
            decay = None
        self.close()
        self._tree = tree
        self._names = names
        pairs = zip(leaves, dtypes, strict=True)
        self._leaves = [np.array(leaf, dtype, order="C") for leaf, dtype in pairs]
        self._shardings = [
            leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves
        ]
        self._is_adaptive = is_adaptive
        self._momentum = _MOMENTUM if self._is_adaptive and _has_any(_MEANS, inner) else 0.0
        self._decay = decay
        named = list(zip(names, self._leaves, strict=True))
        self._training = training = self._maker(is_adaptive=self._is_adaptive).make(named)
        training.end_with(self)
        self._expected = [copies(self._leaves)]  # the caller may write into its own
        self._outdated = 0
        self._has_joined = False
        self._last_shared = None
        self.result = None
        state = ShareState(inner, self._decay and self._decay.init())
        self._state.set(state, 0)
        self._state.drop()
        return state

    def join(self) -> Any:
        training = self._opened()
        if self._scale == "auto" and self._is_adaptive:
            training.exchange.agreement.start(self._momentum)
        joined = training.exchange.join(self._leaves, self._state, equalize=True)
        if not joined.is_late:
            self._state.drop()  # nodes that begin together have what their callers have restored
        self._has_joined = True
        # Workers of one machine get the same answer whoever's parameters were replaced, so these are compared.
        if not all(map(_is_close, self._leaves, self._expected[0])):
            self._outdated = len(self._expected)
        return self._returned()

    def catch_up(self) -> Any:
        exchange = self._opened().exchange
        if not self._has_joined:
            return self.join()
        exchange.catch_up(self._leaves)
        return self._returned()

    def _returned(self) -> Any:
        # A caller that goes on with other parameters than it is given here has not written them. Without news there is
        # no other copy, however often it asks.
        if not all(map(np.array_equal, self._leaves, self._expected[0])):
            self._expected.insert(0, copies(self._leaves))
            # Of the many that an evaluation may ask for, the last ones, and those with which it began.
            del self._expected[_RETURNED_MAX : -1 - self._outdated]
        return self._given(self._leaves)

    def update(
        self, updates: Any, state: ShareState, params: Any = None, **further: Any
    ) -> tuple[Any, ShareState]:
        """Share the optimiser's update; return the difference to the parameters that all nodes share."""
        import jax

        if params is None:
            raise ValueError(
                "update needs the parameters: optimizer.update(gradients, state, params)"
            )
        if not hasattr(state, "inner"):
            raise TypeError(
                f"state must be that of init, or of the last update, got {reprlib.repr(state)}"
            )
        exchange = self._opened().exchange
        _refuse_tracers("update", (updates, params))
        leaves = self._leaves_of("the parameters", params)
        _checked_dtypes(self._names, leaves)
        if not self._has_joined:
            self.join()
        # Flax's nnx.Optimizer gives init the variables, and update their values. The wrapped optimiser gets all trees
        # as init got them, and the caller gets them as it has them.
        tree, state_tree = jax.tree.structure(params), jax.tree.structure(state)
        if tree != self._tree:
            params = jax.tree.unflatten(self._tree, leaves)
            updates = jax.tree.unflatten(self._tree, self._leaves_of("the gradients", updates))
            state = jax.tree.unflatten(
                jax.tree.structure(self._state.values), jax.tree.leaves(state)
            )
        given = list(map(np.asarray, leaves))
        matches = [all(map(_is_close, given, expected)) for expected in self._expected]
        pairs = zip(given, self._leaves, strict=True)
        before = [leaf.astype(own.dtype, copy=False) for leaf, own in pairs]
        # Parameters that were restored from elsewhere, or changed in another way, are the caller's word.
        if not any(matches):
            count = nonfinite(before) - nonfinite(self._leaves)
            if count > 0:  # once they are in ``_leaves``, the next update would be refused as well
                raise NonFiniteUpdate(
                    f"{count} elements of the parameters were set to NaN or infinity between two updates: nothing was "
                    "sent; give finite values",
                    count,
                )
        taken, lost = self._state.taken(exchange.step_number)
        if taken is not None:
            state = self._counted_up(taken, lost, updates, params, further)
        if any(matches) and not any(matches[: len(matches) - self._outdated]):
            # The gradient belongs to the parameters before `join`. It would mislead the optimiser for many steps, above
            # all with the small means of squares that come from a node that has trained for long.
            leaves = list(map(np.zeros_like, self._leaves))
            following = self._counted_up(state, 1, updates, params, further)
        else:
            leaves, following = self._updated(updates, state, params, before, further)
            # The exchange would take the finite part, and the caller would not know of it.
            if count := nonfinite(leaves):
                raise NonFiniteUpdate(
                    f"{count} elements of the update are not finite: nothing was sent, and nothing has changed; leave "
                    "the step out, or wrap the optimiser in optax.apply_if_finite",
                    count,
                )
        # Not before: after an update that is refused the caller may go on with the parameters it had.
        if not any(matches):
            put(self._leaves, before)
            self._expected, self._outdated = [copies(before)], 0
        with self._state.followed_by(following, exchange.step_number + 1):
            self.result = exchange.step(leaves, self._leaves, self._state)
        del leaves  # as large as the parameters, as what is returned
        # The caller adds the result to its parameters, which thereby become this node's.
        parts = zip(self._leaves, before, self._expected[0], strict=True)
        deltas, expected = zip(*(_moved(*part) for part in parts), strict=True)
        self._expected = [list(expected)]
        self._outdated = 0
        if tree != self._tree:
            following = jax.tree.unflatten(state_tree, jax.tree.leaves(following))
        return jax.tree.unflatten(tree, self._placed(deltas)), following

    def _updated(
        self, updates: Any, state: ShareState, params: Any, before: list[Any], further: Any
    ) -> tuple[list[Any], ShareState]:
        """Return the optimiser's update times the factor, but for its weight decay, and the next state."""
        moved, inner = self._update(updates, state.inner, params, **further)
        leaves = self._leaves_of("the update", moved)
        del moved
        agreement = self._opened().exchange.agreement
        is_measured = self._scale == "auto"
        factor = np.float32(agreement.factor if is_measured else self._scale)
        decay_factor = np.float32(agreement.decay_factor if is_measured else 1.0)
        decay = state.decay
        shifts = [np.float32(0.0)] * len(leaves)
        if self._decay is not None and decay is not None:
            decay = self._decay.follow(decay, state.inner)
            rates, decay = self._decay.update(decay, **further)
            shifts = [(decay_factor - factor) * np.asarray(rate).reshape(()) for rate in rates]
        for place, (old, shift) in enumerate(zip(before, shifts, strict=True)):
            leaves[place] = _scaled(np.asarray(leaves[place]), factor, old, shift)
        return leaves, ShareState(inner, decay)

    def _counted_up(
        self, state: ShareState, steps: int, updates: Any, params: Any, further: Any
    ) -> ShareState:
        """Return a state whose schedules, and place among the steps of MultiSteps, are so many updates further."""
        import jax

        zeros = jax.tree.map(jax.numpy.zeros_like, updates)
        counted = state.inner
        for _ in range(steps):
            _, counted = self._update(zeros, counted, params, **further)
        inner, decay = _with_counts(state.inner, counted), state.decay
        if self._decay is not None and decay is not None:
            decay = self._decay.follow(decay, inner)
        return ShareState(inner, decay)

    @property
    def step_number(self) -> int:
        return self._opened().exchange.step_number

    def shared(self) -> Any:
        import jax

        if self._last_shared is not None:
            return self._given(self._last_shared)
        # These are copies already.
        leaves = self._opened().exchange.shared(self._leaves)
        return jax.tree.unflatten(self._tree, self._placed(leaves))

    def state_dict(self) -> dict[str, Any]:
        """Return this node's parameters, as it has them and as the caller has them, and the exchange's state."""
        state = self._opened().exchange.state_dict()
        # The caller's differ from this node's by the rounding of an addition.
        return {
            "names": list(self._names),
            "params": list(map(_packed, self._leaves, _bases_of(state))),
            "returned": list(map(_packed, self._expected[0], self._leaves)),
            "exchange": state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Continue from ``state``; return the parameters that the caller had."""
        training = self._opened()
        if self._has_joined:
            raise RuntimeError(
                "this training has begun: load a state right after init, before the first update"
            )
        check_state(state)
        if "returned" not in state:
            raise ValueError("the state is one of gw.share, not of gradwire.jax.share")
        saved = state["exchange"]
        exchange = training.exchange
        leader = leader_of(exchange)
        if leader is not None and "encoders" in saved:
            check_exchange_state(leader, saved)
        params = _unpacked(state["params"], _bases_of(saved))
        check_shapes(params, self._leaves)
        returned = _unpacked(state["returned"], params)
        check_shapes(returned, self._leaves)
        names = state.get("names", self._names)  # older states have none
        if names != self._names:
            pairs = zip(names, self._names, strict=False)
            renamed = [(old, new) for old, new in pairs if old != new]
            raise ValueError(
                f"the state is of parameters with other names, saved and now {renamed[:5]}, and nothing was loaded: if "
                'they are the same in this order, set state["names"] to the new names'
            )
        exchange.load_state_dict(saved)
        put(self._leaves, params)
        self._expected = [returned, exchange.shared(self._leaves), *self._expected]
        return self._given(returned)

    def leave(self) -> Any:
        exchange = self._opened().exchange
        if self._has_joined:
            self.result = exchange.leave(self._leaves, self._state)
        self.close()
        return self._given(self._leaves if self._last_shared is None else self._last_shared)

    def close(self, *, has_failed: bool = False) -> None:
        """End the training, if there is one."""
        training = self._training
        self._training = None
        if training is None:
            return
        try:
            if self._has_joined and not has_failed:
                self._last_shared = training.exchange.shared(self._leaves)
        finally:
            training.close(has_failed=has_failed)

    def _opened(self) -> Training:
        if self._training is None:
            raise Closed("this transformation has no training, or was closed: call init")
        return self._training

    def _leaves_of(self, what: str, given: Any) -> list[Any]:
        """Return the leaves of a tree; raise `ValueError` unless it is one like the parameters."""
        import jax

        paths, tree = jax.tree_util.tree_flatten_with_path(given)
        leaves = [leaf for _, leaf in paths]
        shapes = [np.shape(leaf) for leaf in leaves]
        expected = [leaf.shape for leaf in self._leaves]
        # A variable's path is longer than that of its value.
        names = ["/".join(map(_key_of, path)) for path, _ in paths]
        is_like = shapes == expected and all(
            f"{known}/".startswith(f"{name}/")
            for known, name in zip(self._names, names, strict=True)
        )
        if not is_like:
            raise ValueError(
                f"{what} must be as the parameters given to init, {self._tree} of shapes {expected}, not {tree} of "
                f"{shapes}"
            )
        return leaves

    def _given(self, leaves: Sequence[Any]) -> Any:
        """Return arrays as the parameters of the caller."""
        import jax

        return jax.tree.unflatten(self._tree, self._placed(map(np.copy, leaves)))

    def _placed(self, leaves: Iterable[Any]) -> list[Any]:
        """Return arrays on the devices of the caller's parameters, whose memory may be theirs, too."""
        import jax

        # Not by way of one device, which may be too small for what is divided between several.
        pairs = zip(leaves, self._shardings, strict=True)
        return [jax.device_put(leaf, sharding) for leaf, sharding in pairs]


class _SharedState:
    """Optax's state as nodes that join late take it over: its arrays' bytes after a description of them.

    Args:
        is_shared: whether it is given and taken.

    Attributes:
        values: the state after the last update.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self.values: Any = None
        self._step = 0  # of the training's next update, when the state was that
        self._taken: tuple[Any, int] | None = None  # another node's, for the next update
        self._has_warned = False

    def set(self, values: Any, step: int) -> None:
        """Note the state with which the training's update of this number will begin."""
        self.values = values
        self._step = step

    def drop(self) -> None:
        """Forget another node's state."""
        self._taken = None

    def taken(self, step: int) -> tuple[Any, int]:
        """Return another node's state, and how many updates it lacks before that of this number; or None."""
        values, taken_at = self._taken or (None, step)
        return values, step - taken_at

    @contextmanager
    def followed_by(self, values: Any, step: int) -> Iterator[None]:
        """Do as ``set`` and ``drop`` meanwhile; after an error the caller begins this update again."""
        before = self.values, self._step
        taken = self._taken
        self.set(values, step)
        self.drop()
        try:
            yield
        except BaseException:
            self.set(*before)
            self._taken = self._taken or taken
            raise

    def export(self) -> list[Any]:
        """Return the state; nothing, with a warning, where the caller has donated its arrays."""
        if not self._is_shared:
            return []
        # What was taken counts already: another node may come late before this one's next update, or this one again.
        values, step = self._taken or (self.values, self._step)
        leaves = _plain_leaves(values)
        if any(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
            if not self._has_warned:
                _LOG.warning(
                    "nodes that join late begin without optax's state: its arrays were donated"
                )
            self._has_warned = True
            return []
        arrays = [np.asarray(leaf) for leaf in leaves]
        layout = [[str(array.dtype), list(array.shape)] for array in arrays]
        document = json.dumps({"step": step, "layout": layout})
        data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        return [np.frombuffer(document.encode(), np.uint8), *data]

    def check(self, arrays: list[Any]) -> None:
        """Raise `Mismatch` unless the arrays are of a state like this node's."""
        if not (arrays and self._is_shared):
            return
        leaves = _plain_leaves(self.values)
        here = [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves]
        try:
            _, there = _read(arrays)
        except (ValueError, TypeError, LookupError) as error:
            raise Mismatch(f"the members' state cannot be read: {error!r}") from error
        sizes = [array.nbytes for array in arrays[1:]]
        if here != there or sizes != [leaf.nbytes for leaf in leaves]:
            raise Mismatch(
                f"this node's optimiser has a state of {here}, the members' has {there}: wrap the same one on all "
                "nodes, or give share_state=False"
            )

    def load(self, arrays: list[Any]) -> None:
        """Keep another node's state for the next update."""
        import jax

        if not (arrays and self._is_shared):
            return
        step, _ = _read(arrays)
        leaves, tree = jax.tree.flatten(self.values)
        plain = [at for at, leaf in enumerate(leaves) if _is_plain(leaf)]
        plain.sort(key=lambda at: leaves[at].nbytes)
        for at, array in zip(plain, arrays[1:], strict=True):
            leaves[at] = _loaded(leaves[at], array)
        self._taken = jax.tree.unflatten(tree, leaves), step


def _plain_leaves(values: Any) -> list[Any]:
    """Return the arrays of numbers in a state, the smaller first: both moments of a parameter stand close together."""
    import jax

    plain = [leaf for leaf in jax.tree.leaves(values) if _is_plain(leaf)]
    return sorted(plain, key=lambda leaf: leaf.nbytes)


def _read(arrays: Sequence[Any]) -> tuple[int, Any]:
    """Return the step of an exported state, and its arrays' dtypes and shapes."""
    document = json.loads(bytes(arrays[0]))
    return int(document["step"]), document["layout"]


def _with_counts(state: Any, counted: Any) -> Any:
    """Return a state of optax with the counts of another one, but for those of running means."""
    import jax

    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    names = [[_key_of(part) for part in path] for path, _ in paths]
    kept = {
        tuple(path[:place])
        for path in names
        for place, name in enumerate(path)
        if name in _SQUARES | _MEANS | _OTHER_MEANS
    }
    pairs = zip(names, paths, jax.tree.leaves(counted), strict=True)
    leaves = [
        later if _is_count(leaf) and tuple(path[:-1]) not in kept else leaf
        for path, (_, leaf), later in pairs
    ]
    return jax.tree.unflatten(tree, leaves)


def _is_count(leaf: Any) -> bool:
    return _is_plain(leaf) and not np.ndim(leaf) and np.issubdtype(leaf.dtype, np.integer)


def _is_plain(leaf: Any) -> bool:
    """Return whether part of a state is an array of numbers: keys of random numbers stay a node's own."""
    import jax

    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _loaded(leaf: Any, data: Any) -> Any:
    """Return an array like one of a state from the bytes of another node's."""
    import jax

    array = jax.numpy.array(np.array(data).view(leaf.dtype).reshape(leaf.shape))
    return jax.device_put(array, leaf.sharding) if getattr(leaf, "committed", False) else array


class _Decay:
    """Tells how much of an optimiser's update is weight decay: as a factor of each array of the parameters.

    Parameters of one element each, all ones, without a gradient: what moves them is decay. Schedules act on them as on
    the model's, and so do masks by the number of dimensions.

    Args:
        optimizer: an optax ``GradientTransformation``.
        params: of the model.
    """

    def __init__(self, optimizer: Any, params: Any) -> None:
        import jax

        self._optimizer = optimizer
        self._update = _compiled(optimizer)
        self._ones = jax.tree.map(
            lambda leaf: jax.numpy.ones((1,) * np.ndim(leaf), jax.numpy.result_type(leaf)), params
        )
        self._zeros = jax.tree.map(jax.numpy.zeros_like, self._ones)
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        self._numbers = [path for path, leaf in paths if not np.ndim(leaf)]

    def init(self) -> Any:
        """Return the state to begin with."""
        return self._optimizer.init(self._ones)

    def update(self, state: Any, **further: Any) -> tuple[list[Any], Any]:
        """Return the factor of each array in the next update, and the next state."""
        import jax

        rates, state = self._update(self._zeros, state, self._ones, **further)
        return jax.tree.leaves(rates), state

    def follow(self, state: Any, inner: Any) -> Any:
        """Return a state with the counts and hyperparameters of the optimiser's own.

        The caller may set them by hand, and a step that is skipped does not count.
        """
        import jax

        paths, tree = jax.tree_util.tree_flatten_with_path(state)
        values, other = jax.tree.flatten(inner)
        if tree != other:
            return state
        leaves = [
            # As an array of NumPy it shares no memory with the optimiser's, and is on no device.
            np.array(value, leaf.dtype) if self._is_common(path, leaf, value) else leaf
            for (path, leaf), value in zip(paths, values, strict=True)
        ]
        return jax.tree.unflatten(tree, leaves)

    def _is_common(self, path: Any, leaf: Any, value: Any) -> bool:
        """Return whether a part of the state belongs to no parameter, whose moments differ."""
        if not _is_plain(leaf) or np.shape(leaf) != np.shape(value):
            return False
        if _is_hyperparameter(path):
            return True
        # Of a parameter without dimensions the moments are numbers, too, under its path.
        is_moment = any(path[len(path) - len(end) :] == end for end in self._numbers)
        return not np.ndim(leaf) and not (_is_float(leaf) and is_moment)

    def is_apart(self) -> bool:
        """Return whether there is decay that is added to what the gradients cause, whatever these are.

        Raises:
            ValueError: the optimiser takes other gradients, as ``optax.lookahead``, or more arguments.
        """
        try:
            return self._adds_decay()
        except Exception as error:
            raise ValueError(
                "what part of an update of this optimiser is weight decay, which no factor may change, cannot be told: "
                f"give update_scale=1.0 ({error!r})"
            ) from error

    def _adds_decay(self) -> bool:
        import jax
        import optax

        # Some optimisers need the loss. A constant one changes nothing in so few steps.
        has_loss = isinstance(self._optimizer, optax.GradientTransformationExtraArgs)
        loss = {"value": 1.0} if has_loss else {}
        decay = moving = still = jax.tree_util.tree_map_with_path(_on_trial, self.init())
        gradients = jax.tree.map(lambda leaf: 0.5 * leaf, self._ones)
        for _ in range(_TRIAL_STEPS):
            rates, decay = self.update(decay, **loss)
            whole, moving = self._update(gradients, moving, self._ones, **loss)
            rest, still = self._update(gradients, still, self._zeros, **loss)
            if any(map(np.any, rates)):
                trees = zip(rates, *map(jax.tree.leaves, (whole, rest)), strict=True)
                return all(_adds_up(*map(np.asarray, leaves)) for leaves in trees)
        return False


def _is_float(leaf: Any) -> bool:
    import jax

    return bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating))


def _is_hyperparameter(path: Any) -> bool:
    """Return whether a path in a state is one of ``optax.inject_hyperparams``."""
    return any(getattr(part, "name", None) == "hyperparams" for part in path)


def _on_trial(path: Any, leaf: Any) -> Any:
    """Return a part of a state, but for a hyperparameter that is zero another value."""
    import jax

    if not (_is_hyperparameter(path) and _is_plain(leaf) and _is_float(leaf)):
        return leaf
    return jax.numpy.where(leaf == 0.0, jax.numpy.asarray(_TRIAL_VALUE, leaf.dtype), leaf)


def _compiled(optimizer: Any) -> Callable[..., Any]:
    """Return an optimiser's ``update``, compiled: some take seconds a step otherwise."""
    import jax

    compiled = jax.jit(optimizer.update)

    def update(updates: Any, state: Any, params: Any, **further: Any) -> Any:
        # A function, as line searches take it, a text or a flag is nothing that can be traced.
        is_plain = not any(
            callable(leaf) or isinstance(leaf, (str, bool)) for leaf in jax.tree.leaves(further)
        )
        call = compiled if is_plain else optimizer.update
        return call(updates, state, params, **further)

    return update


def _adds_up(rate: Any, whole: Any, rest: Any) -> bool:
    """Return whether an update is the sum of two, but for rounding."""
    rounding = 4.0 * float(np.finfo(whole.dtype).eps) * (np.abs(whole) + np.abs(rest))
    return bool((np.abs(whole - rest - rate) <= 0.01 * np.abs(rate) + rounding).all())


def _key_of(part: Any) -> str:
    """Return a part of a path in a tree as a name."""
    names = (getattr(part, attribute, None) for attribute in ("key", "name", "idx"))
    return str(next((name for name in names if name is not None), part))


def _checked_dtypes(names: Sequence[str], leaves: Sequence[Any]) -> list[Any]:
    """Return the dtypes that jax computes with; raise `TypeError` unless all are float32 or float64."""
    import jax

    dtypes = [jax.numpy.result_type(leaf) for leaf in leaves]
    for name, dtype in zip(names, dtypes, strict=True):
        if dtype not in (np.float32, np.float64):
            raise TypeError(
                f"{name} is {dtype}: parameters must be float32 or float64; of half precision keep a master copy, and "
                "convert it for the computation; leave out what is not trained, with nnx: nnx.state(model, nnx.Param)"
            )
    return dtypes


def _refuse_tracers(call: str, tree: Any) -> None:
    """Raise `TypeError` inside a traced function: it would run once, and never exchange anything again."""
    import jax

    # Inside one every result is a tracer, also where the function only closes over the arrays of the tree.
    leaves = [*jax.tree.leaves(tree), jax.numpy.zeros(())]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            f"{call} of gradwire.jax.share exchanges messages, so it cannot be traced: call it outside jax.jit and "
            "jax.eval_shape, and put share around optax.MultiSteps and optax.apply_if_finite, not inside them"
        )


def _bases_of(state: dict[str, Any]) -> Iterator[Any]:
    """Yield what an exchange's state has for this node's parameters, from which these differ by rounding.

    Only the leader of a team has its parameters, and only after the join: else None without end.
    """
    yield from params_of(state) if state.get("shared") else repeat(None)


def _packed(array: Any, base: Any) -> Any:
    """Return what turns a copy of ``base`` into a copy of an array, see `ulps.pack`; without one all values."""
    packed = array if base is None else ulps.pack(array, base)
    return packed.copy() if packed is array else packed


def _unpacked(saved: Sequence[Any], bases: Iterable[Any]) -> list[Any]:
    """Return the arrays that ``_packed`` was given with these bases.

    Raises:
        ValueError: they are of other bases.
    """
    try:
        return [
            ulps.unpack(packed, np.array(base))
            if isinstance(packed, tuple)
            else np.array(base if packed is None else packed, order="C")
            for packed, base in zip(saved, bases, strict=False)
        ]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the state's parameters cannot be read, and nothing was loaded: {error}"
        ) from error


def _is_close(array: Any, expected: Any) -> bool:
    """Return whether two arrays are equal but for the rounding of an addition."""
    rounding = 4.0 * max(float(np.finfo(each.dtype).eps) for each in (array, expected))
    for block, other in blocks(array, expected):
        if (block == other).all():
            continue
        # Relative to what is expected, which is finite: infinity would be close to everything.
        if not (np.abs(block - other) <= rounding * np.abs(other)).all():
            return False
    return True


def _scaled(update: Any, factor: Any, params: Any, shift: Any) -> Any:
    """Return an update times a factor, plus the parameters times another."""
    # An update that is zero everywhere was skipped, and its decay with it.
    has_shift = shift != 0.0 and any(block.any() for (block,) in blocks(update))
    if factor == 1.0 and not has_shift and update.dtype == params.dtype:
        return update
    scaled = np.empty(update.shape, np.result_type(update.dtype, params.dtype, factor))
    for target, block, old in blocks(scaled, update, params):
        np.multiply(block, factor, out=target)
        if has_shift:
            target += shift * old
    return scaled


def _moved(params: Any, before: Any, expected: Any) -> tuple[Any, Any]:
    """Return the array to add for ``params``, and the rounded sum, in ``expected`` if that has the dtype."""
    import jax

    delta = np.empty(params.shape, jax.numpy.result_type(params.dtype, before.dtype))
    if expected.dtype != before.dtype:
        expected = np.empty(before.shape, before.dtype)
    for difference, total, new, old in blocks(delta, expected, params, before):
        np.subtract(new, old, out=difference, casting="same_kind")
        np.add(old, difference, out=total, casting="same_kind")
    return delta, expected


def _has_any(names: set[str], state: Any) -> bool:
    """Return whether a part of an optimiser's state has a field of one of these names."""
    if isinstance(state, Mapping):  # as of optax.multi_transform
        return any(_has_any(names, part) for part in state.values())
    if not isinstance(state, (tuple, list)):
        return hasattr(state, "inner_state") and _has_any(names, state.inner_state)
    is_here = bool(names & set(getattr(state, "_fields", ())))
    return is_here or any(_has_any(names, part) for part in state)
