"""The parameters that all nodes share: sums of messages, and how this node's parameters differ from the shared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..agreement import sample_beside, sample_of
from ..arrays import (
    Arrays,
    add,
    add_finite,
    blocks,
    copies,
    device_of,
    difference,
    layouts,
    on_host,
    placed,
    put,
    put_difference,
    sampled,
    scaled,
    subtract,
    views,
    writable_views,
    zeros_like,
)
from ..errors import NonFiniteUpdate
from ..message import Message, apply_many, apply_to_both, apply_with_momentum
from .groups import Groups

__all__ = [
    "MomentumSum",
    "PlainSum",
    "SecondTarget",
    "SharedCopy",
    "Written",
    "check_layouts",
    "moved_since",
]

# Bound on the difference between parameters and shared copy + residual, relative to both: eight roundings of float32.
_ROUNDING = 2.0**-20
# The same for a whole tensor after a step, which rounds once for every node's message, relative to its largest values.
_STEP_ROUNDING = 2.0**-18

Payloads: TypeAlias = Sequence[Sequence[Message]]


# Lanes of a fingerprint: a prime, so that no two elements of a matrix that are easily confused share a lane.
_LANES = 8_191


# ---- sums of messages ------------------------------------------------------------------------------------------------


class SecondTarget(NamedTuple):
    """Parameters that get the same messages as the shared ones, except those that they hold already.

    Attributes:
        params: like the shared parameters.
        held: index of the payload that they hold already, in full; None: none.
    """

    params: Arrays
    held: int | None


class PlainSum:
    """Adds messages to the parameters directly: ``params += message / divisor``, in order."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def at(self, exported: Arrays) -> tuple[PlainSum, Arrays]:
        """Return a sum that works on what ``SharedCopy.export_state`` has returned, and the parameters in it."""
        return self, exported

    def add_payloads(
        self, payloads: Payloads, params: Any, divisor: int, second: SecondTarget | None = None
    ) -> None:
        """Add the messages of several payloads, in order."""
        for index, encoder in enumerate(self._groups.encoders):
            messages = [payload[index] for payload in payloads]
            target = self._groups.select(params, index)
            if second is None:
                apply_many(messages, target, 1.0 / divisor, threads=encoder.threads)
                continue
            apply_to_both(
                messages,
                target,
                self._groups.select(second.params, index),
                held=second.held,
                scale=1.0 / divisor,
                threads=encoder.threads,
            )

    def add_results(
        self, add_to: Callable[[Any], None], params: Any, second: SecondTarget | None
    ) -> None:
        """Add the owners' results of a step, which a function adds to any arrays of the parameters' shapes."""
        add_to(params)
        if second is not None:
            add_to(second.params)


class MomentumSum(PlainSum):
    """Adds messages with Nesterov's momentum: a part of every addition is repeated in the next steps.

    Every node does the same arithmetic with the same messages, so replicas stay identical bit for bit.

    Source: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1;
    J. Wang et al., "SlowMo: Improving communication-efficient distributed SGD with slow momentum", ICLR 2020.

    Attributes:
        velocity: one array for each of the parameters; empty before the first step.
    """

    def __init__(self, groups: Groups, momentum: float) -> None:
        super().__init__(groups)
        self._momentum = momentum
        self.velocity: Arrays = []

    def ensure_velocity(self, params: Any) -> None:
        """Start with a velocity of zero, unless there is one already; keep it where the parameters are."""
        # All nodes begin with zeros, a newcomer with the members' velocity.
        self.velocity = placed(self.velocity or zeros_like(writable_views(params)), params)

    def at(self, exported: Arrays) -> tuple[PlainSum, Arrays]:
        """Return a sum that works on what ``SharedCopy.export_state`` has returned, and the parameters in it."""
        count = len(exported) // 2
        total = MomentumSum(self._groups, self._momentum)
        total.velocity = exported[:count]
        return total, exported[count:]

    def load_velocity(self, velocity: Arrays) -> None:
        """Continue with another velocity, not copied."""
        self.velocity = velocity

    def add_results(
        self, add_to: Callable[[Any], None], params: Any, second: SecondTarget | None
    ) -> None:
        """Add the owners' results of a step, and the momentum of the earlier ones."""
        targets = writable_views(params)
        addition = zeros_like(targets)
        add_to(addition)
        self.ensure_velocity(params)
        for velocity, change in zip(self.velocity, addition, strict=True):
            velocity += change
            velocity *= self._momentum
            change += velocity
        add(targets, addition)
        if second is not None:
            add(second.params, addition)

    def add_payloads(
        self, payloads: Payloads, params: Any, divisor: int, second: SecondTarget | None = None
    ) -> None:
        """Add the messages of several payloads, and the momentum of the earlier ones."""
        self.ensure_velocity(params)
        for index, encoder in enumerate(self._groups.encoders):
            apply_with_momentum(
                [payload[index] for payload in payloads],
                self._groups.select(params, index),
                self._groups.select(self.velocity, index),
                momentum=self._momentum,
                scale=1.0 / divisor,
                second=() if second is None else self._groups.select(second.params, index),
                held=None if second is None else second.held,
                threads=encoder.threads,
            )


# ---- this node's parameters ------------------------------------------------------------------------------------------


@dataclass
class Written:
    """Values that the caller has written into its parameters, until the next exchange says what becomes of them.

    Attributes:
        values: the values, in host memory.
        digest: of these, for the other nodes; empty: it is this node's update in any case.
        offset: with ``apply_residual``: the caller's parameters less these values, where messages that were under way
            have been added since; empty: nothing.
        encoders: with ``apply_residual``: the states of the encoders, whose residuals lead to the written values.
        shared: without: the shared parameters before.
        moved: without: the caller's parameters less the shared ones before.
    """

    values: Arrays
    digest: str = ""
    offset: Arrays = field(default_factory=list)
    encoders: list[dict[str, Any]] = field(default_factory=list)
    shared: Arrays = field(default_factory=list)
    moved: Arrays = field(default_factory=list)


class SharedCopy:
    """The parameters that all nodes share, and how the caller's differ from them.

    Without local steps the caller's parameters are the shared ones. With local steps (``every``, ``step_moved``) the
    caller's parameters run ahead, and ``shared`` is a copy of the shared ones: the difference is the update.

    With ``apply_residual`` the caller's parameters also hold this node's residual: the residual is their difference
    from ``shared``, brought up to date right before an encode. Between the encode and the end of the step they hold the
    encoded messages as well, in full. Encoding then does not modify the parameters, and applying messages changes only
    the elements those messages contain. Where the encoders keep no residual, it is nothing but this difference from
    the first encode on (``is_difference``). What needs a residual, as joining and leaving do, makes it until the end
    of the next step.

    Attributes:
        groups: encoders and residuals.
        total: adds messages to the shared parameters.
        applies_residual: whether the caller's parameters hold the residual.
        differing: the caller's parameters, while the residual is nothing but their difference to the shared ones;
            empty: the encoders have it.
        shared: one array for each of the caller's; empty without local steps and ``apply_residual``.
        local_steps: steps since the last exchange.
        replacements: number of times that another node's parameters, with other values, have replaced these.
        written: what the caller has written since the last exchange, besides steps; None: nothing.
    """

    def __init__(self, groups: Groups, total: PlainSum, *, applies_residual: bool) -> None:
        self.groups = groups
        self.total = total
        self.applies_residual = applies_residual
        self.differing: Arrays = []
        self.shared: Arrays = []
        self.local_steps = 0
        self.replacements = 0
        self.written: Written | None = None
        self._is_loaded = False  # from a checkpoint
        self._sample: Any = None  # of the parameters as the last exchange left them; None: unknown
        # Fingerprint of the caller's parameters after the last call.
        self._left: list[bytes | int] = []

    # ---- local steps -------------------------------------------------------------------------------------------------

    def count_local_step(self) -> int:
        """Count a step of the caller since the last exchange; return how many there are."""
        self.local_steps += 1
        return self.local_steps

    def add_local_step(self, update: Any, params: Any) -> None:
        """Take a step of the caller's for it: add its update to its parameters, which run ahead."""
        self.copy_shared(params)
        self.forget()
        try:
            self.add_update(update, params, 1.0)
        except NonFiniteUpdate:
            self.remember(params)  # the finite part was not written by the caller
            raise

    def add_update(self, update: Any, params: Any, weight: float) -> None:
        """Let the caller's parameters hold its update, times a factor, which are to be encoded without a residual.

        Raises:
            NonFiniteUpdate: only the finite part was added.
            TypeError, ValueError: the update does not fit; nothing was added.
        """
        count, first = add_finite(writable_views(params), views(update), weight)
        if count:
            raise NonFiniteUpdate(
                f"{count} elements of the update are not finite, the first at index {first}; nothing was sent and the "
                "finite part is in the parameters: mend the update",
                count,
                first,
            )

    def copy_shared(self, params: Any) -> None:
        """Make the shared copy from ``params``, unless there is one already; keep it where the parameters are."""
        self.shared = placed(self.shared or copies(writable_views(params)), params)

    def drop_shared(self) -> None:
        """Make the caller's parameters the shared ones."""
        self.shared = []
        self.local_steps = 0

    def begin_shared(self, params: Any, *, is_new: bool) -> None:
        """Make the shared copy from ``params``, unless there is one; or fit them to that of a checkpoint.

        Args:
            params: the caller's.
            is_new: whether the training has not begun.
        """
        # The parameters of an earlier call, which was refused or timed out, may have been replaced since then.
        if is_new and not self._is_loaded:
            self.drop_shared()
        self.copy_shared(params)
        if is_new:
            self._add_loaded_residual(params)

    def place_shared(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Keep the shared copy in ``arrays`` from now on; return whether there is a copy."""
        if self.shared and self.shared[0] is not arrays[0]:
            put(arrays, self.shared)
            self.shared = list(arrays)
        return bool(self.shared)

    def load_shared(self, shared: Arrays, sample: Any, written: Written | None) -> None:
        """Continue with the shared parameters of a checkpoint; sample: see `sample_left`."""
        self.shared = shared
        self._sample = sample
        self.written = written
        self._is_loaded = True

    def _add_loaded_residual(self, params: Any) -> None:
        """Add the residual of a checkpoint, which may be another node's, to the caller's parameters.

        Elements that hold the residual already, but for rounding, stay as they are: training then resumes bit for bit.
        """
        if not self.applies_residual or self.local_steps or not self.groups.has_residuals:
            return
        # A new copy of the parameters and a residual of zeros are what the parameters are.
        residuals = self.groups.residuals(self.shared)
        if not self._is_loaded and not any(residual.any() for residual in residuals):
            return
        for param, shared, residual in self._parts(params):
            # The sum was rounded when the parameters were written, so equal means equal within some roundings. Anything
            # beyond is another node's residual, or none.
            expected = shared + residual
            bound = _ROUNDING * (np.abs(shared) + np.abs(residual))
            np.copyto(param, expected, where=~(np.abs(param - expected) <= bound))
        if not self.groups.keeps_residuals:
            self._sample = sample_beside(writable_views(params))

    # ---- a residual that is nothing but a difference -----------------------------------------------------------------

    @property
    def is_difference(self) -> bool:
        """Whether the residual is only what the caller's parameters differ from the shared ones by."""
        return bool(self.differing)

    def make_residual(self, params: Any) -> None:
        """Let the encoders have the residual."""
        if self.is_difference:
            self._set_residual(params)
        self.groups.whole_residuals()

    def drop_residual(self, params: Any, *, samples: bool) -> None:
        """Free the residuals of encoders that keep none, at the end of a step: the caller's parameters hold them.

        Args:
            params: the caller's, which no step has moved since.
            samples: whether the next step's update will be sampled.
        """
        if self.groups.keeps_residuals or not self.shared or self.written is not None:
            return
        self.differing = writable_views(params)
        self._sample = sample_beside(self.differing) if samples else None
        self.groups.drop_residuals()

    def difference_of(self, index: int, stride: int) -> NDArray[Any]:
        """Return every so many elements of one array's residual, flat and in host memory, where it is a difference."""
        param, shared = self.differing[index], self.shared[index]
        return on_host(param.reshape(-1)[::stride] - shared.reshape(-1)[::stride])

    def residuals_on_host(self, numel: int) -> Iterator[NDArray[Any]]:
        """Yield about so many elements of every residual in host memory, or of every array's difference; flat.

        Those on a device are left out: reading them would make the training wait. May be called from any thread.
        """
        differing = self.differing
        if device_of(differing) >= 0:
            return
        for param, shared in zip(differing, self.shared, strict=False):
            stride = max(1, param.size // numel)
            yield param.reshape(-1)[::stride] - shared.reshape(-1)[::stride]
        for encoder in self.groups.encoders if not differing else ():
            if encoder.device_number < 0 and encoder.has_residual:
                yield encoder.residual[:: max(1, encoder.numel // numel)]

    def held(self, params: Any) -> list[bool]:
        """Return for each array whether it is as the last step left it, but for rounding; always after local steps."""
        arrays = writable_views(params)
        if not self.shared or self.local_steps:
            return [True] * len(arrays)
        if self.is_difference:
            if not self._left or self._is_sampled_as(arrays):
                return [True] * len(arrays)
            return [now == left for now, left in zip(_fingerprint(params), self._left, strict=True)]
        if not self.applies_residual or not self.groups.has_residuals:
            return _equal(arrays, self.shared)
        # Where a large quantum was added and taken away again, rounding is relative to the quantum; where the residual
        # is larger than the shared parameters, relative to the residual.
        quantum = max((encoder.threshold for encoder in self.groups.encoders), default=0.0)
        held = []
        for triple in zip(arrays, self.shared, self.groups.residuals(self.shared), strict=True):
            largest = [
                [np.abs(each).max() for each in (shared, residual, param - shared - residual)]
                for param, shared, residual in blocks(*map(on_host, triple))
            ]
            shared_max, residual_max, difference_max = np.max([[0.0] * 3, *largest], axis=0)
            bound = _STEP_ROUNDING * (quantum + shared_max + residual_max)
            held.append(bool(difference_max <= bound))  # NaN is a difference
        return held

    def _is_sampled_as(self, arrays: Arrays) -> bool:
        """Return whether parameters on a device, of which a fingerprint counts changes, are as after the last step."""
        if device_of(arrays) < 0 or self._sample is None:
            return False
        return bool((sample_beside(arrays) == self._sample).all())

    # ---- values that the caller writes -------------------------------------------------------------------------------

    def remember(self, params: Any) -> None:
        """Remember the caller's parameters as they are after a call."""
        self._left = _fingerprint(params) if self.shared else []

    def forget(self) -> None:
        """Forget how the caller's parameters were: ``held`` compares them, where it can."""
        self._left = []

    def is_written(self, params: Any, *, is_settled: bool) -> bool:
        """Return whether the caller has changed its parameters since the last call."""
        marks = _fingerprint(params) if self.shared and self._left else []
        if not self.shared or (marks and self._left == marks):
            return False
        check_layouts(params, self.shared)
        # A checksum differs only if a value does. Torch counts changes, also those that change no value.
        if self._left and (not is_settled or self.local_steps or isinstance(marks[0], bytes)):
            return True
        return is_settled and not self.local_steps and not all(self.held(params))

    def take_written(self, params: Any, values: Arrays, digest: str) -> None:
        """Go on from values that the caller has written, for all nodes or for this one: ``settle_written`` says.

        Args:
            params: the caller's, with what was added to the values since.
            values: as the caller has written them. The shared ones need no agreement, which drops a step's messages.
            digest: see `Written`.
        """
        targets = writable_views(params)
        if self.applies_residual:
            # As an update: the residual leads from the shared parameters to the caller's.
            self._set_residual(params)
            is_equal = all(_equal(targets, values))
            offset = [] if is_equal else difference(list(map(on_host, targets)), values)
            states = [encoder.state_dict() for encoder in self.groups.encoders]
            written = Written(values, digest, offset, states)
            self.written = None if is_equal and all(_equal(values, self.shared)) else written
            return
        # As the shared parameters of all nodes, so that the next update holds only what follows.
        before = self.written.shared if self.written else copies(self.shared)
        moved = difference(list(map(on_host, targets)), list(map(on_host, self.shared)))
        if self.written is not None:
            add(moved, self.written.moved)
        self._sample = None
        self.written = Written(values, digest, shared=before, moved=moved)
        put(self.shared, values)
        put(targets, values)

    def share_written(self, params: Any) -> None:
        """Make what this node's caller has written an update of this node."""
        written = self.written
        self.written = None
        if written is None or self.applies_residual:
            return
        targets = writable_views(params)
        add(targets, placed(difference(written.shared, list(map(on_host, self.shared))), params))
        put(self.shared, written.shared)
        residuals = self.groups.residuals(self.shared)
        add(residuals, placed(written.moved, params))

    def adopt_written(
        self, params: Any, unsent: Sequence[NDArray[Any]], *, has_moved: bool
    ) -> bool:
        """Make what the callers of all nodes have written the shared parameters.

        Args:
            params: the caller's.
            unsent: the residuals, with the messages of the unfinished step; changed.
            has_moved: whether the caller's parameters differ from the shared ones by local steps, which stay.

        Returns:
            Whether the messages of the step have no meaning any more. With ``apply_residual`` they are on the way to
            the written values, or of the time before.
        """
        written = self.written
        self.written = None
        if written is None or not self.applies_residual:
            return False
        # Of the residuals only this node's update since then is left.
        for encoder, state, total in zip(
            self.groups.encoders, written.encoders, unsent, strict=True
        ):
            total -= state["residual"]
            encoder.load_state_dict({**state, "step": encoder.step, "residual": total})
        put(self.shared, written.values)
        if not has_moved:
            self.write_params(params)
        elif written.offset:
            add(writable_views(params), placed(scaled(written.offset, -1.0), params))
        return True

    def local_delta(self, params: Any, weight: float = 1.0) -> tuple[Arrays | None, Arrays | None]:
        """Return the sum of the local steps since the last exchange, times a factor, as `Groups.encode` takes it.

        With ``apply_residual`` these are the parameters and the shared ones, whose difference is the residual.
        """
        targets = writable_views(params)
        self._sample = None
        if not self.applies_residual:
            delta = difference(targets, self.shared)
            return (delta if weight == 1.0 else scaled(delta, weight)), None
        self._weigh_movement(params, weight)
        if not self.groups.has_residuals:
            self.differing = targets
        if device_of(targets) < 0:
            return targets, self.shared
        residuals = self.groups.residuals(self.shared)  # refuses residuals elsewhere
        put_difference(residuals, targets, self.shared)
        return None, None

    def samples(self, update: Any, params: Any) -> list[NDArray[np.float64]]:
        """Return a sample of this node's update of the next step, before it is encoded; nothing if it is not known.

        Args:
            update: None: what the caller's parameters have moved by.
            params: the caller's.
        """
        if update is not None:
            return [sample_of(views(update))]
        moved = moved_since(sample_left(self), writable_views(params))
        return [] if moved is None else [on_host(moved)]

    def reject(self, params: Any) -> None:
        """Remove an update that is not finite from the caller's parameters; the residual holds the finite part."""
        if not self.shared:
            return
        self.local_steps = 0
        if self.applies_residual:
            self._set_residual(params)
        self.write_params(params)

    def absorb_local_changes(self, params: Any, weight: float = 1.0) -> None:
        """Move local changes of the caller's parameters, times a factor, into the residual.

        The caller's parameters are replaced after that.
        """
        if self.applies_residual:
            if self.is_difference:  # `import_state` keeps it
                self.differing = writable_views(params)
                return
            # A newcomer that has not trained yet needs no memory for that.
            if self.groups.has_residuals or not all(_equal(writable_views(params), self.shared)):
                self._weigh_movement(params, weight)
                self._set_residual(params)
            return
        for param, shared, residual in self._parts(params):
            moved = param - shared
            moved *= weight
            # A value that is not finite would stay in the residual for ever.
            np.add(residual, moved, out=residual, where=np.isfinite(moved), casting="same_kind")

    def _weigh_movement(self, params: Any, weight: float) -> None:
        """Multiply the movement of the caller's parameters since the last exchange, which also hold the residual."""
        if weight == 1.0:
            return
        if self.is_difference:
            # What the last step has left is not known apart from the movement, and is shortened with it.
            targets = writable_views(params)
            moved = scaled(difference(targets, self.shared), weight)
            put(targets, self.shared)
            add(targets, moved)
            return
        for param, shared, residual in self._parts(params):
            before = shared + residual
            param -= before
            param *= weight
            param += before

    def _set_residual(self, params: Any) -> None:
        self.differing, self._sample = [], None
        for param, shared, residual in self._parts(params):
            moved = param - shared
            np.copyto(residual, moved, where=np.isfinite(moved), casting="same_kind")

    def write_params(self, params: Any) -> None:
        """Set the caller's parameters to the shared ones, plus the residual with ``apply_residual``."""
        targets = writable_views(params)
        if self.is_difference:
            self._set_residual(params)
        if not self.applies_residual or not self.groups.has_residuals:
            put(targets, self.shared)
            return
        residuals = self.groups.residuals(self.shared)
        if device_of(targets) >= 0:
            put(targets, self.shared)
            add(targets, residuals)
            return
        for param, shared, residual in zip(targets, self.shared, residuals, strict=True):
            np.add(shared, residual, out=param)

    def _parts(self, params: Any) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Yield the caller's parameters, the shared ones and the residual, block by block, in host memory.

        Changes of parameters and residual go back to the device. No step does this: it would copy all of them.
        """
        residuals = self.groups.residuals(self.shared)
        for arrays in zip(writable_views(params), self.shared, residuals, strict=True):
            param, shared, residual = map(on_host, arrays)
            for part in blocks(param, shared, residual):
                yield part[0], part[1], part[2]
            if device_of(arrays) >= 0:
                put([arrays[0], arrays[2]], [param, residual])

    # ---- the state of another node -----------------------------------------------------------------------------------

    def export_state(self, params: Any) -> Arrays:
        """Return the arrays of the shared parameters, after those of their momentum, not copied.

        In this order a first part of them can be brought up to a later step: the momentum does not depend on the
        parameters.

        Raises:
            TypeError: NumPy cannot view the parameters in place.
        """
        shared = agreed_parameters(self) or writable_views(params)
        if isinstance(self.total, MomentumSum):
            self.total.ensure_velocity(shared)
            return [*self.total.velocity, *shared]
        return shared

    def state_layout(self, params: Any) -> list[list[Any]]:
        """Return [dtype, shape] of every array that ``export_state`` returns."""
        shared = layouts(writable_views(params))
        return shared * 2 if isinstance(self.total, MomentumSum) else shared

    def import_state(self, arrays: Arrays, params: Any) -> None:
        """Replace the shared parameters and the caller's by another replica's."""
        self.forget()
        self.written = None
        target = self.shared or writable_views(params)
        values = arrays[len(arrays) - len(target) :]
        self.replacements += not all(map(np.array_equal, map(on_host, target), values))
        # A residual that is a difference stays one: in memory of its own it would be as large as the parameters.
        if self.is_difference:
            subtract(self.differing, target)
        put(self.export_state(params), arrays)
        if self.is_difference:
            add(self.differing, target)
            self._sample = None if self._sample is None else sample_beside(self.differing)
            return
        self._sample = None
        if self.shared:
            self.write_params(params)


def agreed_parameters(copy: SharedCopy) -> Arrays:
    """Return the shared parameters as all nodes have them: without what this node's caller has written; or nothing."""
    written = copy.written
    return written.shared if written is not None and written.shared else copy.shared


def sample_left(copy: SharedCopy) -> Any:
    """Return a sample of the caller's parameters as the last exchange has left them; None if it is not known."""
    if copy.is_difference or copy._sample is not None:
        return copy._sample
    if not copy.shared:
        return None
    sample = sample_beside(copy.shared)
    if copy.applies_residual and copy.groups.has_residuals:
        sample = sample + sample_beside(copy.groups.residuals(copy.shared))
    return sample


def moved_since(sample: Any, params: Arrays) -> Any:
    """Return a sample of what parameters have moved by since an earlier sample of them; None if that is None."""
    if sample is None:
        return None
    now = sample_beside(params)
    # That of a checkpoint is in host memory.
    return (now if type(now) is type(sample) else on_host(now)) - sample


def _equal(arrays: Arrays, others: Arrays) -> list[bool]:
    """Return for each array whether it has the values of the other one."""
    return list(map(np.array_equal, map(on_host, arrays), map(on_host, others)))


def check_layouts(params: Any, known: Arrays) -> None:
    """Raise `ValueError` for parameters that are not those of the training, `TypeError` for no parameters at all."""
    arrays = writable_views(params)
    # Compared as they are first, which is quick; NumPy's and torch's dtypes differ.
    if [(array.shape, array.dtype) for array in arrays] == [
        (array.shape, array.dtype) for array in known
    ]:
        return
    here, there = layouts(params), layouts(known)
    if here != there:
        raise ValueError(f"the parameters are {here}, those of the training {there}: give these")


def _fingerprint(params: Any) -> list[bytes | int]:
    """Return values that change when the parameters do: checksums of a sample, or on a device torch's count of changes.

    The sample has all elements of a small model. In a large one it finds what is written into whole arrays; a change of
    few elements that it does not meet becomes part of the next update, as a movement does.
    """
    arrays = params if isinstance(params, (list, tuple)) else [params]
    if arrays and device_of(arrays) >= 0:
        return [int(getattr(array, "_version", 0)) for array in arrays]
    marks: list[bytes | int] = []
    for sample in sampled([view.reshape(-1) for view in views(arrays)]):
        data = np.ascontiguousarray(sample).reshape(-1).view(f"u{sample.itemsize}")
        whole = data.size - data.size % _LANES
        # Without a whole row the result would be zeros: as many kilobytes for a bias as for a large tensor.
        lanes = (
            np.bitwise_xor.reduce(data[:whole].reshape(-1, _LANES), axis=0) if whole else data[:0]
        )
        marks.append(lanes.tobytes() + data[whole:].tobytes())
    return marks
