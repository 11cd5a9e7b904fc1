"""Any torch optimiser, whose updates are shared between nodes over UDP."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import reprlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
from torch._compile import _disable_dynamo

from ..arrays import copies, writable_views
from ..errors import Closed, Mismatch, NonFiniteUpdate, NotCopied, is_failure
from ..exchange import Exchange, LocalExchange, hand_over, leader_of, take_over
from ..sharing import check_role, check_update_scale
from ..state import check_flag
from . import checkpoint
from .checkpoint import KEY, LoadedState, Values, dcp_caller, put_into, take_from
from .judge import Judgement, check_group, judge, pace_of, parameters_of, scaled_rates
from .marks import Marks
from .optimizer_state import SharedState
from .staging import Staging, check_params, fetch_moved, is_same, snapshot, store, sums_of

if TYPE_CHECKING:
    from ..exchange import AnyExchange, Joined, StepResult
    from ..sharing import Training

__all__ = ["Extension", "SharedOptimizer"]

_LOG = logging.getLogger(__name__)

# Where torch keeps an optimiser's hooks.
_HOOKS = ("step", "state_dict", "load_state_dict")

# Returns a model's tensors that the optimiser does not train, by name; second those that may be missing elsewhere.
Others: TypeAlias = Callable[[], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]]

# The parameters that an optimiser has besides those that are shared, by name; second makes the exchange of all of them.
Extension: TypeAlias = "tuple[Sequence[tuple[str, torch.Tensor]], Callable[[], AnyExchange]]"

# Returns that for the shared ones, or refuses before anything has changed.
Extend: TypeAlias = Callable[[Sequence[torch.Tensor]], Extension]


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Call the hooks that were registered for a shared optimiser's steps, as torch does for others.

    Hooks of all optimisers are called once, by the wrapped optimiser's step.
    """

    @functools.wraps(step)
    def hooked(self: SharedOptimizer, *args: Any, **kwargs: Any) -> Any:
        given: tuple[Any, ...] = (self, *args)
        for hook in list(self._optimizer_step_pre_hooks.values()):
            changed: Any = hook(self, given, kwargs)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise RuntimeError(
                        f"{hook!r} must return None or a tuple of new arguments and keywords, got {changed!r}"
                    )
                given, kwargs = changed
        result = step(*given, **kwargs)
        for after in list(self._optimizer_step_post_hooks.values()):
            after(self, given, kwargs)
        return result

    hooked.hooked = True  # type: ignore[attr-defined]  # or torch would add its own calls of the hooks
    return hooked


class SharedOptimizer(
    NotCopied,
    torch.optim.Optimizer,
    instead="save optimizer.state_dict(), and load it into what share() returns; copy.deepcopy(optimizer.optimizer) "
    "copies the wrapped optimiser",
):
    """Runs an optimiser and shares its updates, as Deeplearning4j does.

    Every node has an optimiser with its own state and gradients. The update is the difference between the parameters
    after the optimiser's step and the shared parameters. The exchange encodes the update and adds the mean (or the sum)
    of all nodes' messages to the shared parameters; unsent updates stay in the residual. Momentum, Adam's moments,
    schedules and weight decay work as usual.

    Nodes that begin with the same parameters keep the same ones, bit for bit, in synchronous mode (with ``overlap``
    those of the step before). Every node must call ``step`` equally often in synchronous mode. If all nodes write the
    same weights into the model before the same step, all go on from them; any other change becomes part of the update.

    ``GradScaler`` works on each node separately: a node that skips a step still takes part in the exchange.
    ``docs/torch.md`` recommends options for the exchange.

    Args:
        optimizer: the optimiser, all of whose parameters are shared.
        exchange: with an encoder, or groups, for as many elements as there are parameters, in the order of the
            optimiser's parameter groups and, within each, of ``names``; or one worker's part of a `LocalTeam`.
        share_state: late nodes begin with another node's optimiser state of each parameter, all with the first node's.
        update_scale: factor of every update: a number, or "auto": 1.0 for SGD and its like, and for an adaptive
            optimiser a factor that is measured all the time. Such an optimiser divides by the size of its own
            gradients, noise included, so the mean of n nodes' updates is shorter than the update of their mean
            gradient: by up to sqrt(n) where the nodes' gradients are noise, not at all where they agree. With an
            ``outer_momentum`` m a movement counts 1 / (1 - m) times, so the factor is (1 - m) times as large. The
            optimiser's learning rates carry it during its step, and weight decay beside the gradient, as AdamW's, only
            the 1 - m; where an update does not follow the rates, the update itself is multiplied.
        equalize: begin with the parameters of the node with the lowest id, on all nodes; without, nodes that begin with
            other parameters are refused.
        buffers: further tensors that late nodes take over, such as a model's buffers; or a function that returns them.
        names: of the model's parameters, in the model's order; None: errors have no names, and every group needs the
            same order of parameters on all nodes, which a set has not.
        judgement: of the optimiser; None: made here if ``update_scale`` needs it.
        extend: makes the exchange for more parameters, for `add_param_group`; None: groups cannot be added.
        training: ends with this optimiser; None: the caller closes the node.

    Raises:
        ValueError: ``update_scale`` is out of range, the exchange is an observer's, some parameters are not sharded,
            have elements in common, or cannot be moved.
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

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: AnyExchange,
        *,
        share_state: bool = False,
        update_scale: float | Literal["auto"] = 1.0,
        equalize: bool = False,
        buffers: Sequence[torch.Tensor] | Others = (),
        names: Mapping[torch.Tensor, str] | None = None,
        judgement: Judgement | None = None,
        extend: Extend | None = None,
        training: Training | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be one of torch's, got {reprlib.repr(optimizer)}")
        if not isinstance(exchange, (Exchange, LocalExchange)):
            raise TypeError(f"exchange must be an Exchange, got {reprlib.repr(exchange)}")
        leader = leader_of(exchange)
        check_role("member" if leader is None else leader._options.role)
        check_update_scale(update_scale)
        check_flag("share_state", share_state)
        # Not super().__init__: param_groups, state and defaults are the wrapped optimiser's (__getattr__, __setattr__).
        for kind in _HOOKS:
            for time in ("pre", "post"):
                setattr(self, f"_optimizer_{kind}_{time}_hooks", OrderedDict())
        self.exchange = exchange
        self._scale = update_scale
        if update_scale != 1.0 and judgement is None:
            judgement = judge(optimizer)
        self._judgement = judgement
        self._equalizes = equalize
        self._extend = extend
        # While the model holds the shared parameters.
        self._set_aside: Values | None = None
        self.result: StepResult | None = None
        names = names or {}
        params = parameters_of(optimizer, names)
        check_params([(names.get(param, ""), param) for param in params])
        self._params = [self._staged_param(param, names.get(param, "")) for param in params]
        others = buffers if callable(buffers) else functools.partial(_numbered, tuple(buffers))
        self._state = SharedState(optimizer if share_state else None, self._params, others)
        # Of a checkpoint, until this node takes part: the state, and this node's own parameters.
        self._loaded: LoadedState | None = None
        self._local: Values = [], []
        self._leave_model: Callable[[bool], None] | None = None
        self._has_joined = False
        self._is_closed = False
        self._training = training
        self._marks = Marks()  # after the last step
        # The model's state as it was last returned: parameter, copy, and torch's count of changes to the copy.
        self._returned: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        # Last: from now on other attributes are the wrapped optimiser's.
        self.optimizer = optimizer
        if training is not None:
            training.begin_with(self)

    def _staged_param(self, param: torch.Tensor, name: str) -> Staging:
        return Staging(param, name, on_host=not self.exchange.takes_devices)

    # ---- an optimiser of torch -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimiser.

        Its methods are returned as functions that refuse: a step of its own would bypass the exchange.
        """
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        value = getattr(self.optimizer, name)
        way_out = (
            f"if it leaves the parameters alone, or changes them only for the next step to share, use it as "
            f"optimizer.optimizer.{name}"
        )
        if inspect.isroutine(value):

            def refuse(*_args: Any, **_options: Any) -> NoReturn:
                raise RuntimeError(
                    f"{name}() of {type(self.optimizer).__name__} is not called through a shared optimiser: its "
                    f"changes of the parameters would not be exchanged (docs/torch.md: SAM, schedule-free); {way_out}"
                )

            return refuse
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(part, torch.optim.Optimizer) for part in parts):
            raise AttributeError(
                f"{name} of {type(self.optimizer).__name__} would take steps that are not exchanged; {way_out}"
            )
        return value

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler calls ``step`` also on overflow: without, the other nodes would wait for this one.

        To all but torch the answer is no: frameworks that hear yes refuse to clip, since fused optimisers unscale
        gradients only in the step. Here gradients are unscaled before, if somebody does so, as with any other.
        """
        return str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one that the wrapped optimiser has, such as ``param_groups``, is set there."""
        # Frameworks derive proxies from this class, which keep this optimiser as "_optimizer" (Lightning).
        inner = vars(self).get("optimizer") or vars(self).get("_optimizer")
        is_own = inner is None or name in vars(self) or name in vars(SharedOptimizer)
        if is_own or not hasattr(inner, name):
            object.__setattr__(self, name, value)
        else:
            setattr(inner, name, value)

    def __repr__(self) -> str:
        return f"SharedOptimizer({self.optimizer!r})"

    def join(self) -> Joined:
        """Take part from now on; a late node then has the other nodes' parameters. The first step joins otherwise.

        Returns:
            The step to begin with, and whether training had begun.

        Raises:
            TimeoutError, Mismatch: as ``Exchange.join``.
            ValueError: a checkpoint was loaded, and the model has not the parameters that belong to it.
            RuntimeError: inside ``shared_parameters``.
            Closed: the optimiser was closed.
        """
        self._check_open()
        self._check_outside("join")
        self._check_parameters()
        if self._has_joined:  # the codec's memory has bits that half precision lacks
            with self._staged() as memory:
                return self.exchange.join(*memory, equalize=self._equalizes)
        if self._loaded is not None and not self._loaded.is_held(self._local, self._params):
            self._restore(self._loaded)  # the model may have been loaded in parts
        if self._loaded is not None and not self._loaded.is_restored:
            raise ValueError(
                "the optimiser's checkpoint is of other parameters than the model has: load the model's state_dict() "
                "that was saved with it, too, before the first step; write other weights after optimizer.join()"
            )
        for staging in self._params:
            staging.mark_constants()
        self._set_values(self._local)
        written = self._loaded.take_back(self._params) if self._loaded else []
        if self._scale == "auto" and self._judgement is not None and self._judgement.is_adaptive:
            self.exchange.agreement.start(self._judgement.momentum)
        try:
            joined = self.exchange.join(*self._memory, equalize=self._equalizes)
        except BaseException:
            self._set_values(self._local)
            raise
        if joined.is_late or not self.exchange.has_local_steps:
            self._store()
        self._loaded = None
        self._local = [], []
        self._has_joined = True
        self._marks.set(self._tensors())
        if not joined.is_replaced:
            for tensor, values in written:
                tensor.copy_(values)
        # Steps were taken, elsewhere or before, or this node's part of the first step is left out. So torch need not
        # warn of a schedule that goes on.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return joined

    @property
    def step_number(self) -> int:
        """Number of the training's next step, counted from 0, as ``join()`` or a loaded checkpoint has made it known.

        Where learning-rate schedules and data have to go on: in a process that comes late, or comes back, it is the
        others' step. Local steps (``every``) are steps, too. Nodes in asynchronous mode count their own steps.
        """
        return self.exchange.step_number

    def resync(self) -> Joined:
        """Take parameters, step and shared optimiser state from another node again, for instance after `Diverged`.

        Before the first step it joins.

        Raises:
            TimeoutError, Mismatch: as ``Exchange.resync``.
            RuntimeError: inside ``shared_parameters``.
            Closed: the optimiser was closed.
        """
        self._check_open()
        self._check_outside("resync")
        if not self._has_joined:
            return self.join()
        with self._staged() as memory:
            return self.exchange.resync(*memory)

    def leave(self) -> StepResult | None:
        """Send the rest of this node's updates, for the last time, and close; the others go on. Return the last result.

        A second call does nothing.

        Raises:
            WouldBlock, TimeoutError, MessageError, PeerLost, Closed: as ``Exchange.leave``.
            RuntimeError: inside ``shared_parameters``.
        """
        self._check_outside("leave")
        if self._has_joined and not self._is_closed:
            with self._staged() as memory:
                self.result = self.exchange.leave(*memory)
        self.close()
        return self.result

    def close(self) -> None:
        """End this node's part in the training; the model then is a plain one with the parameters that all share.

        Parameters into which other weights were written since the last step stay as they are. Node, port and shared
        memory are free for the next ``share`` of this process. What is still in the residual stays unsent. The
        optimiser can still be saved. A second call does nothing.

        Without a call, an optimiser ends when it is collected, or with the process: in another thread than it was made
        in, the model keeps this node's own parameters, as a log entry says.

        Raises:
            ValueError: the model was converted or moved since it was shared; it stays so, and all is closed.
        """
        self._close(has_failed=False)

    def _close(self, *, has_failed: bool, closes_training: bool = True) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._leave_shared()
        except Exception:
            if not has_failed:  # or it would hide the error with which this training ends
                raise
            _LOG.warning(
                "the model keeps this node's own parameters, residual included", exc_info=True
            )
        finally:
            if self._leave_model is not None:
                self._leave_model(closes_training)
            if self._training is not None and closes_training:
                self._training.close(has_failed=has_failed)

    def _leave_shared(self) -> None:
        """Let the model hold the shared parameters for good, but for what was written into it since the last step."""
        if self._set_aside is not None:
            return  # inside ``shared_parameters``
        if self._has_joined or (self._loaded is not None and self._loaded.is_restored):
            checkpoint.check_kinds(self._params)
            self.take_returned()
            is_left = self._are_as_left()
            # A checkpoint has this node's own parameters from now on, too.
            self._set_aside = self._swap_shared(is_left)

    @property
    def has_joined(self) -> bool:
        """Whether this optimiser takes part in the training, or has: it can load no state with a residual any more."""
        return self._has_joined

    @property
    def has_ended(self) -> bool:
        """Whether the training has ended, and the model is a plain one."""
        return self._is_closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this optimiser was closed, or has left the training: call share again")

    def _check_outside(self, name: str) -> None:
        """Refuse a method inside ``shared_parameters``, whose end reverts what it does to the parameters."""
        if self._set_aside is not None and not self._is_closed:
            raise RuntimeError(
                f"{name}() inside shared_parameters() would be lost: call it outside, where the model has this node's "
                "own parameters"
            )

    def __enter__(self) -> SharedOptimizer:
        """Return the optimiser."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close; after an error without a goodbye, so that the others know."""
        self._close(has_failed=is_failure(*error))

    def __del__(self) -> None:
        training = vars(self).get("_training")
        if training is not None:
            training.end_collected(self, self._close, is_closed=self._is_closed)

    @_disable_dynamo  # type: ignore[untyped-decorator]
    @_hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the wrapped optimiser and share it.

        Returns:
            The closure's result, None without one.

        Raises:
            NonFiniteUpdate: a gradient is NaN or infinite, found before the optimiser's state has changed; or the
                optimiser made parameters NaN or infinite, and its update is reverted.
            RuntimeError: inside ``shared_parameters``.
            ValueError: a parameter was added past ``add_param_group``, or is of another kind than when it was shared.
            WouldBlock, TimeoutError, MessageError, PeerLost, Mismatch, Diverged: as ``Exchange.step_moved``.
            Closed: the optimiser or the node was closed.
        """
        self._check_open()
        self._check_outside("step")
        try:
            return self._step(closure)
        except BaseException:
            # GradScaler removes them after a step that succeeds, and the next one would take them for its own.
            for name in ("found_inf", "grad_scale"):
                self.__dict__.pop(name, None)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        has_rate = any(group.get("lr") for group in self.optimizer.param_groups)
        if not has_rate and dcp_caller("_init_optim_state") is not None:
            return self.optimizer.step()
        self._check_parameters()
        loss = None
        has_moved = not self._has_joined and self._join_moves()
        self._note_written()
        if not has_moved or closure is not None:
            with self._scaled():
                loss = self._local_step(closure)
        if self.exchange.is_next_local:
            self.result = self.exchange.step_moved(*self._memory)
            self._marks.set(self._tensors())
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
            RuntimeError: inside ``shared_parameters``.
        """
        if self._is_closed:
            return 0
        self._check_outside("catch_up")
        if not self._has_joined:
            self.join()
        with self._staged() as (params, _):
            return self.exchange.catch_up(params, timeout_s)

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Let the model hold the parameters that all nodes share, in order to evaluate or to save them.

        The model always holds them without local steps and ``apply_residual``. Do not train meanwhile; what is written
        into the parameters is reverted at the end.

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
        if self.has_ended or self._set_aside is not None:
            yield
            return
        self.take_returned()  # or a state_dict() inside would, and its end revert it
        is_as_left = self._has_joined and self._marks.hold(self._tensors())
        self._set_aside = values = self._swap_shared()
        try:
            yield
        finally:
            if not self._is_closed:
                self._set_aside = None
                self._set_values(values)
                if is_as_left:
                    self._marks.set(self._tensors())

    def shared_params(self) -> list[torch.Tensor]:
        """Return the parameters that are shared, in the order of ``shared_tensors``."""
        return [staging.source for staging in self._params]

    def shared_tensors(self) -> list[torch.Tensor]:
        """Return copies of the shared parameters, in host memory, in the order in which they were shared."""
        return [
            tensor.to("cpu", copy=True) if values is None else values
            for tensor, values in zip(self._tensors(), self.shared_or_none(), strict=True)
        ]

    def shared_or_none(self) -> list[torch.Tensor | None]:
        """Return copies of the shared parameters as ``shared_tensors`` does, but None for those that the model has.

        It has a parameter as it is to be saved before the first step, where other weights were copied into it since
        the last one, and after the end.

        Raises:
            ValueError: the model was converted or moved since it was shared.
        """
        if self.has_ended:
            return [None] * len(self._params)
        checkpoint.check_kinds(self._params)
        is_restored = self._loaded is not None and self._loaded.is_restored
        if self._set_aside is not None:
            shared = copies(self._arrays())  # as the model has them now
            is_left = [True] * len(shared)
        elif self._has_joined or is_restored:
            shared = self.exchange.shared(self._arrays())
            is_left = self._are_as_left()
        else:
            return [None] * len(self._params)
        return [
            staging.complete(torch.from_numpy(array)) if flag else None
            for staging, array, flag in zip(self._params, shared, is_left, strict=True)
        ]

    def _shared_arrays(self, copied: Any = None) -> list[np.ndarray[Any, Any]]:
        return self._complete(copied or self.exchange.shared(self._arrays()))

    def _complete(self, arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Put the parameters' infinite elements, which no sum contains, into arrays like the codec's memory."""
        for staging, array in zip(self._params, arrays, strict=True):
            staging.complete(torch.from_numpy(array))
        return arrays

    def _are_as_left(self) -> list[bool]:
        """Return for each parameter whether no other weights were copied into it since the last step."""
        if self._has_joined and not self.exchange.is_settled:
            return [self._marks.hold(self._tensors())] * len(self._params)
        is_left = self.exchange.held(self._arrays())
        for index in self._loaded.written if self._loaded else ():
            is_left[index] = False
        if self.exchange.has_local_steps:
            return is_left  # they move the tensors alone
        for index, staging in enumerate(self._params):
            tensor = staging.tensor
            left = staging.memory.to(tensor.device, tensor.dtype)
            if staging.constants is not None:
                left = staging.complete(left.clone())
            if left.data_ptr() != tensor.data_ptr() and not torch.equal(left, tensor):
                is_left[index] = False
        return is_left

    def _tensors(self) -> list[torch.Tensor]:
        return [staging.tensor for staging in self._params]

    def keep_returned(self, saved: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Keep the tensors that ``model.state_dict()`` returns, by parameter, until the next step."""
        # Those made under torch.inference_mode count no changes, and cannot be changed outside.
        self._returned = [
            (param, tensor, tensor._version)
            for param, tensor in saved.items()
            if not tensor.is_inference()
        ]

    def take_returned(self) -> None:
        """Write into the model what was written into the tensors of ``model.state_dict()``.

        Without sharing these are the parameters' own memory.
        """
        with torch.no_grad():
            for param, tensor, version in self._returned:
                if tensor._version != version:
                    param.copy_(tensor)
        self._returned = []

    def _note_written(self) -> None:
        """Tell the exchange if the caller has written into the parameters since the last step."""
        self.take_returned()
        is_marked = self._marks.hold(self._tensors())
        if is_marked or all(self._are_as_left()):
            return
        if not all(staging.has_constants for staging in self._params):
            return  # the step refuses that
        values = [staging.written() for staging in self._params]
        fetch_moved(self._params)
        if any(staging.is_rounded for staging in self._params):
            for staging, value, shared in zip(
                self._params, values, self.exchange.shared(self._arrays()), strict=True
            ):
                staging.restore_rounded(value, torch.from_numpy(shared))
        values = [value.cpu().numpy() for value in values]
        self.exchange.note_written(self._arrays(), values)
        store(self._params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimiser does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model from now on, as gradual unfreezing does; on all nodes alike.

        In the middle of training, or after a checkpoint was loaded, all nodes call this after the same step. It takes
        one exchange more, and waits for all members.

        Raises:
            ValueError: the parameters are not the model's, this optimiser was not made by ``gradwire.torch.share``, or
                the training is asynchronous; nothing has changed.
            Mismatch, TimeoutError: the others have not added the same parameters after the same step; the optimiser is
                closed, as after any other error of the exchange, and can still be saved.
            NonFiniteUpdate: the parameters are NaN or infinite; nothing has changed.
            RuntimeError: inside ``shared_parameters``.
        """
        if self._extend is None:
            raise ValueError(
                f"{len(param_group)} entries cannot become a new group: give all parameters to the optimiser before it "
                "is shared, or let gradwire.torch.share make the exchange"
            )
        self._check_open()
        self._check_outside("add_param_group")
        if self._loaded is not None:  # the training begins again with what the checkpoint has
            self.join()
        inner = self.optimizer
        inner.add_param_group(check_group(param_group))
        try:
            self._extend_exchange(self._extend)
            gc.collect()  # frees the former exchange, whose parts know each other
        except BaseException as error:
            inner.param_groups.pop()
            if isinstance(error, (Mismatch, TimeoutError)):
                raise type(error)(
                    "the other nodes have not added the same parameters after the same step, so this optimiser was "
                    "closed: call add_param_group() alike on all nodes, and start again; state_dict() still has the "
                    f"state without them ({error})"
                ) from error
            raise

    def _take_assigned(self) -> None:
        """Share what was put into the groups before the training begins, as callbacks that resume fine-tuning do."""
        if self._extend is None or self._has_joined or self._loaded is not None:
            return
        known = {id(staging.source) for staging in self._params}
        if any(id(param) not in known for param in parameters_of(self.optimizer)):
            self._extend_exchange(self._extend)

    def _extend_exchange(self, extend: Extend) -> None:
        """Let the exchange have the parameters that were added to the wrapped optimiser."""
        named, make = extend(self.shared_params())
        added = [self._staged_param(param, name) for name, param in named]
        if not self._has_joined:
            self.exchange = make()
            self._params += added
            return
        before = self.exchange
        count = len(self._params)
        has_begun = False
        try:
            with self._staged() as memory:
                self.result = hand_over(before, *memory)
            has_begun = True
            own = self._values()
            extended = make()
            # Of the former only the shapes are asked for.
            arrays = [staging.source for staging in self._params]
            arrays += [staging.mark_constants() for staging in added]
            take_over(extended, before, arrays, len(added))
            self._params += added
            self.exchange = extended
            self._local = own
            self._has_joined = False
            self.join()
        except BaseException as error:
            is_refused = isinstance(error, NonFiniteUpdate) or type(error) is ValueError
            if is_refused and not has_begun:
                raise
            # The others may have gone on, so this node cannot go back: it ends, and can be saved as it was.
            self._close(has_failed=True)
            del self._params[count:]
            self.exchange = before
            self._set_values(self._local)
            self._local = [], []
            self._has_joined = True
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state; under "gradwire" the exchange's, and this node's own parameters.

        Raises:
            ValueError: torch's functions for distributed checkpoints call this with ``flatten_optimizer_state_dict``;
                or the model was converted or moved since it was shared.
        """
        for prepare in list(self._optimizer_state_dict_pre_hooks.values()):
            prepare(self)
        state = put_into(self.optimizer.state_dict(), self._stored())
        for change in list(self._optimizer_state_dict_post_hooks.values()):
            state = change(self, state) or state
        return state

    def _stored(self) -> dict[str, Any]:
        """Return what a checkpoint has beside the wrapped optimiser's state."""
        if self._loaded is not None:
            return self._loaded.stored
        checkpoint.check_kinds(self._params)
        is_open = self._has_joined and self._set_aside is None and not self._is_closed
        is_left = self._are_as_left() if is_open else []
        own = self._set_aside or checkpoint.seen(self._params, self._fetch_rounded())
        state = self.exchange.state_dict(own[0])
        shared = self._shared_arrays(state.get("shared"))
        is_rounded = [staging.is_rounded for staging in self._params]
        is_left = is_left or checkpoint.are_same(shared, self._tensors())
        written = [not flag and (is_open or self._is_closed) for flag in is_left]
        if self._is_closed and any(written):
            own = checkpoint.overwritten(own, self._values(), written, is_rounded)
            state = self.exchange.state_dict(own[0])
        in_model = [flag and self._leave_model is not None for flag in is_left]
        return checkpoint.state_of(
            state, own, shared, is_rounded, in_model=in_model, written=written
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, before the first step; a plain optimiser's state, at any time, has no residual.

        Where ``share`` made this optimiser, load the model's ``state_dict`` of the same moment, too, before or after:
        it has the shared parameters.

        Raises:
            ValueError: the state is not an optimiser's, or as ``Exchange.load_state_dict``; nothing was loaded.
            RuntimeError: training has begun, or inside ``shared_parameters``, and the state has a residual; nothing was
                loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the state must be a dict, got {reprlib.repr(state_dict)}")
        state = dict(state_dict)
        for prepare in list(self._optimizer_load_state_dict_pre_hooks.values()):
            state = prepare(self, state) or state
        if not {"state", "param_groups"} <= state.keys():
            raise ValueError(
                "an optimiser's state has state and param_groups, this one "
                f"{reprlib.repr(list(state))}; nothing was loaded"
            )
        state, stored = take_from(state)
        if stored and self._has_joined:
            raise RuntimeError(
                "this training has begun, so a state with a residual cannot be loaded any more, and nothing was: "
                "load it into a new gradwire.torch.share(model, optimizer) before the first step, that is, start the "
                f'processes again. To go on here with the optimiser\'s own state alone, remove the key "{KEY}" '
                "from the state on all nodes"
            )
        if stored:
            self._check_outside("load_state_dict")
        self._take_assigned()
        before = self.optimizer.state_dict()
        try:
            self.optimizer.load_state_dict(state)
            if stored:
                loaded = LoadedState(stored)
                self._restore(loaded)
                self._loaded = loaded
        except BaseException:
            self.optimizer.load_state_dict(before)
            raise
        for finish in list(self._optimizer_load_state_dict_post_hooks.values()):
            finish(self)

    def restore(self, *, is_part: bool = False) -> None:
        """Let the model, just loaded as a whole or in part, hold this node's parameters of a loaded state."""
        loaded = self._loaded
        # Before the first step the model's state is the parameters themselves, and loading it changes nothing.
        if loaded is not None and not (
            (is_part and loaded.is_restored) or loaded.is_held(self._local, self._params)
        ):
            self._restore(loaded)

    def expect_shared_in_model(self, leave: Callable[[bool], None]) -> None:
        """Leave the shared parameters out of ``state_dict``: the model's has them, until ``leave`` is called.

        Its argument: whether somebody has ended the training; False where this optimiser was collected.
        """
        self._leave_model = leave

    def _restore(self, loaded: LoadedState) -> None:
        """Give the model this node's parameters of a loaded state, unless it lacks the shared ones."""
        for staging in self._params:
            staging.mark_constants()
        # A state may be loaded twice, or another one after it, where the model has the first one's already.
        is_again = self._loaded is not None and self._loaded.is_held(self._local, self._params)
        params = self._shared_arrays(None if is_again else copies(self._arrays()))
        half_dtypes = [
            staging.tensor.dtype if staging.is_rounded else None for staging in self._params
        ]
        self._local = loaded.restore(self.exchange, params, half_dtypes) or ([], [])
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
        # A checkpoint, or another worker of this machine, may have the same parameters: then nothing has changed.
        if isinstance(self.exchange, Exchange) and self._loaded is None:
            return self.join().is_replaced
        before = list(map(snapshot, self._tensors()))
        self.join()
        return not all(map(is_same, before, self._tensors()))

    def _check_gradients(self) -> None:
        """Refuse gradients that are not finite, before they spoil the optimiser's state."""
        params = [param for param in parameters_of(self.optimizer) if param.grad is not None]
        param_grads: list[Any] = [param.grad for param in params]
        grads = [grad._values() if grad.is_sparse else grad.detach() for grad in param_grads]
        # Infinity minus infinity is NaN, and both spread through a sum: one pass, and one number per tensor.
        sums = sums_of(grads)
        if not sums or torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all():
            return
        counts = [int((~grad.isfinite()).sum()) for grad in grads]
        if sum(counts):
            first = next(param for param, count in zip(params, counts, strict=True) if count)
            name = next(staging.name for staging in self._params if staging.source is first)
            raise NonFiniteUpdate(
                f"{sum(counts)} elements of the gradient are NaN or infinite, the first in {name}: nothing was sent, "
                "and the optimiser's state is unchanged; clip gradients, lower the learning rate, or use GradScaler",
                sum(counts),
            )

    @property
    def update_scale(self) -> float:
        """The factor of the next update, see ``update_scale``."""
        return self.exchange.agreement.factor if self._scale == "auto" else self._scale

    def _check_parameters(self) -> None:
        """Refuse parameters that the exchange does not know, or whose kind has changed."""
        self._take_assigned()
        known = {id(staging.source) for staging in self._params}
        unknown = [
            tuple(param.shape) for param in parameters_of(self.optimizer) if id(param) not in known
        ]
        if unknown:
            raise ValueError(
                f"{len(unknown)} parameters of the optimiser are not shared, the first of shape {unknown[0]}: they "
                "came after share(); use optimizer.add_param_group(...) on all nodes"
            )
        for staging in self._params:
            staging.check_kind()

    @contextmanager
    def _scaled(self) -> Iterator[None]:
        """Multiply the update that the optimiser makes by ``update_scale``."""
        factor = self.update_scale
        decay_factor = self.exchange.agreement.decay_factor if self._scale == "auto" else 1.0
        judgement = self._judgement
        if judgement is not None and self.exchange.agreement.is_on:
            self.exchange.agreement.set_pace(*pace_of(self.optimizer, judgement, factor))
        if factor == decay_factor == 1.0 or judgement is None:
            yield
        elif judgement.follows_rate:
            decay_factor = decay_factor if judgement.decays_apart else factor
            with scaled_rates(self.optimizer, factor, decay_factor):
                yield
        else:
            before = [param.clone() for param in self._tensors()]
            yield
            for param, start in zip(self._tensors(), before, strict=True):
                # Infinite elements have no difference.
                param.copy_(torch.where(param == start, param, start + (param - start) * factor))

    @property
    def _memory(self) -> tuple[list[Any], SharedState]:
        """The codec's memory of the parameters, and what other nodes may need besides."""
        return self._arrays(), self._state

    def _arrays(self) -> list[Any]:
        """Return the codec's memory as arrays where it is in host memory."""
        # Once in a step: the exchange would view every tensor several times.
        return writable_views([staging.memory for staging in self._params])

    def _values(self) -> Values:
        """Return copies of the codec's memory, and of parameters in half precision: local steps move only those."""
        rounded = self._fetch_rounded()
        return self._complete(copies(self._arrays())), rounded

    def _fetch_rounded(self) -> list[torch.Tensor]:
        """Bring the codec's memory up to date; return copies of parameters in half precision."""
        for staging in self._params:
            if not (self._has_joined and staging.is_rounded):
                staging.fetch()
        return [staging.tensor.cpu().clone() for staging in self._params if staging.is_rounded]

    def _swap_shared(self, is_left: Sequence[bool] = ()) -> Values:
        """Put the shared parameters into the model, and return what ``_values`` had returned before.

        Args:
            is_left: for every parameter whether to do so; empty: for all.
        """
        rounded = self._fetch_rounded()
        arrays = self._shared_arrays()
        # One after the other: another copy of all of them might be too much.
        flags = is_left or [True] * len(arrays)
        for staging, array, flag in zip(self._params, arrays, flags, strict=True):
            [own] = copies(writable_views([staging.memory]))
            staging.complete(torch.from_numpy(own))
            if flag:
                staging.assign(torch.from_numpy(array))
            array[...] = own
        return arrays, rounded

    def _set_values(self, values: Values) -> None:
        """Go on with what ``_values`` returned; nothing without values."""
        memory, rounded = values
        if not memory:
            return
        # Parameters that were added since then stay as they are.
        for staging, array in zip(self._params, memory, strict=False):
            staging.assign(torch.from_numpy(array))
        halves = [staging.tensor for staging in self._params if staging.is_rounded]
        for half, value in zip(halves, rounded, strict=False):
            half.copy_(value)

    @contextmanager
    def _staged(self) -> Iterator[tuple[list[Any], SharedState]]:
        """Copy what the optimiser has moved to the codec's memory, and the result back, also after an error."""
        fetch_moved(self._params)
        try:
            yield self._memory
        finally:
            self._store()

    def _store(self) -> None:
        self._state.settle()
        store(self._params)
        if self._has_joined:
            self._marks.set(self._tensors())


def _numbered(
    tensors: Sequence[torch.Tensor],
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return tensors by their numbers, and none whose shapes may differ."""
    return {str(index): tensor for index, tensor in enumerate(tensors)}, {}
