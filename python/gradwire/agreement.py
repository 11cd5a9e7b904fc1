"""How far the nodes' updates agree, and the factor that an adaptive optimiser's updates need because of it.

An adaptive optimiser divides by the size of its own gradients, noise included. Where the nodes' gradients agree, the
mean of the nodes' updates is as long as the update of their mean gradient would be; where they are independent noise,
it is shorter by the square root of the number of nodes. The factor k = sqrt(mean of |u|^2 / |mean of u|^2) is right at
both ends, if u is what the gradient of one step adds. With momentum an update repeats most of the one before, which
averages much of the noise away, but the optimiser has divided by the size of single gradients: so what is repeated is
subtracted. |mean of u|^2 would take an exchange of whole updates, so every node sends a linear sketch of a sample of
u: the sketches of all nodes add up to the sketch of the sum, whose norm is that of the sum but for some per cent, and a
mean over steps takes care of these.
"""

from __future__ import annotations

import base64
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arrays import device_of, on_host

__all__ = ["Agreement", "Measured", "Sketch", "checked_state", "sample_beside", "sample_of"]

_SAMPLE_NUMEL = 1 << 16
_BLOCK_NUMEL = 64
_BUCKETS = 128
_REMEMBERED_NUMEL = 1 << 12  # of a sample, because checkpoints have it
_LARGEST = 1e100  # squares of it are finite

# Gradients agree most, and change their agreement fastest, when a training begins.
_DENSE_STEPS = 32
_EVERY = 4
_DECAY = 0.9

# How many times the median of the nodes' norms an update may have, and the fewest norms whose median tells an outlier.
_LONGEST = 4.0
_NORMS_MIN = 3

# Updates of the same batches differ by rounding only. They have to be equal in so many steps in a row.
_ROUNDING = 1e-6
_SKETCH_ROUNDING = 0.02  # a sketch has a byte for every sum
_EQUAL_STEPS = 8

_Name = TypeVar("_Name")

# Odd constants of the splitmix64 generator: all nodes need the same signs, whatever their version of NumPy.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xBF58476D1CE4E5B9)


class Sketch(NamedTuple):
    """What a node tells of what one step adds to its update, or to its workers' updates.

    Attributes:
        updates: number of the updates.
        squares: sum of the squared norms of their sketches. Where updates agree, its error is that of the sketch of
            their sum, so that the ratio has none.
        buckets: linear sketch of the sum.
    """

    updates: int
    squares: float
    buckets: NDArray[np.float64]

    def encode(self) -> list[Any]:
        """Return the sketch as JSON values."""
        # A byte for every sum: its rounding is far below what the sketch itself does not know.
        scale = float(np.abs(self.buckets).max(initial=0.0)) / 127.0
        quantized = np.rint(self.buckets / scale if scale else self.buckets).astype(np.int8)
        text = base64.b64encode(quantized.tobytes()).decode()
        return [self.updates, self.squares, scale, text]

    def scaled(self, factor: float) -> Sketch:
        """Return the sketch of the update times a factor, as the others get it."""
        scaled = Sketch(self.updates, self.squares * factor**2, self.buckets * factor)
        return Sketch.decode(scaled.encode())

    @staticmethod
    def decode(document: Any) -> Sketch:
        """Return the sketch; raise `ValueError` if the values are none."""
        updates, squares, scale, text = document
        quantized = np.frombuffer(base64.b64decode(text, validate=True), np.int8)
        sketch = Sketch(int(updates), float(squares), quantized.astype(np.float64) * float(scale))
        are_sane = 0.0 <= sketch.squares < _LARGEST and 0.0 <= float(scale) < _LARGEST
        if quantized.size != _BUCKETS or not 0 < sketch.updates < _LARGEST or not are_sane:
            raise ValueError(f"a sketch of {quantized.size} sums and {updates} updates")
        return sketch


class Measured(NamedTuple):
    """What is known of this node's update of one step.

    Attributes:
        norm: of the update; with several workers', the root of their mean square.
        sketch: None where it is not to be told, or not known.
    """

    norm: float
    sketch: Sketch | None


class _Places(NamedTuple):
    """Where the elements of a sample are.

    Attributes:
        span: elements from the begin of a block to that of the next.
        blocks: (index of the array, first element, number of blocks).
        rest: (index of the array, first element, number of elements); all arrays in full where they are small.
    """

    span: int
    blocks: list[tuple[int, int, int]]
    rest: list[tuple[int, int, int]]


@lru_cache(maxsize=8)
def _places_of(sizes: tuple[int, ...]) -> _Places:
    # Single elements, each of another page, would take half as long as an encode. An odd number of blocks does not stay
    # in the same columns of a matrix.
    times = (sum(sizes) // _SAMPLE_NUMEL) | 1
    if times == 1:
        return _Places(0, [], [(index, 0, size) for index, size in enumerate(sizes) if size])
    places = _Places(_BLOCK_NUMEL * times, [], [])
    start = 0
    for index, size in enumerate(sizes):
        count = max(size - start, 0) // places.span
        if count:
            places.blocks.append((index, start, count))
        end = start + count * places.span
        if end < size:
            places.rest.append((index, end, min(_BLOCK_NUMEL, size - end)))
        # Where the next block begins, in the next array.
        start = end + places.span * (end < size) - size
    return places


def sample_of(arrays: Sequence[Any]) -> NDArray[np.float64]:
    """Return about 65,536 elements at regular distances, or all of fewer; the same places for equal shapes."""
    return on_host(sample_beside(arrays))


def sample_beside(arrays: Sequence[Any]) -> Any:
    """Return what ``sample_of`` does, in the memory where the arrays are: on a device a tensor, without waiting."""
    places = _places_of(tuple(math.prod(array.shape) for array in arrays))
    if device_of(arrays) >= 0:
        return _sample_on_device(places, arrays)
    parts = [np.zeros(0)]
    for index, start, count in places.blocks:
        rows = arrays[index].reshape(-1)[start : start + count * places.span]
        parts.append(rows.reshape(-1, places.span)[:, :_BLOCK_NUMEL].reshape(-1))
    parts += [arrays[index].reshape(-1)[start : start + n] for index, start, n in places.rest]
    return np.concatenate(parts, dtype=np.float64)


def _sample_on_device(places: _Places, arrays: Sequence[Any]) -> Any:
    """Return the sample of torch's tensors, in few launches."""
    flat = [tensor if tensor.is_contiguous() else tensor.reshape(-1) for tensor in arrays]
    rows, pieces = [], []
    for index, start, count in places.blocks:
        shape, strides = (count, _BLOCK_NUMEL), (places.span, 1)
        at = flat[index].storage_offset() + start
        rows.append(flat[index].as_strided(shape, strides, at))
    for index, start, numel in places.rest:
        at = flat[index].storage_offset() + start
        pieces.append(flat[index].as_strided((numel,), (1,), at))
    torch = sys.modules["torch"]
    joined = [torch.cat(tensors).reshape(-1) for tensors in (rows, pieces) if tensors]
    return torch.cat(joined).double() if joined else flat[0].new_zeros(0)


class Agreement:
    """Measures the agreement of the members' updates, by their sketches, and which of them is far too long.

    Args:
        repeats: whether an update repeats much of the one before, if its optimiser has a momentum. The sum of several
            steps is mostly new.
        limits_norms: whether an update that is far longer than the members' are is to be shortened.
        outer_momentum: of the exchange. A movement counts 1 / (1 - outer_momentum) times in the end.

    Attributes:
        is_on: whether the factor is measured.
        limits_norms, outer_momentum: as given.
    """

    def __init__(
        self, *, repeats: bool = True, limits_norms: bool = False, outer_momentum: float = 0.0
    ) -> None:
        self.is_on = False
        self.limits_norms = limits_norms
        self.outer_momentum = outer_momentum
        self._workers_are_averaged = False
        self._repeats = repeats
        self._median = 0.0  # of the members' norms; 0.0: unknown
        self._shortened = 0
        # Steps in a row in which the updates of all workers here, and of all nodes, were equal.
        self._equal_steps = {"workers": 0, "nodes": 0}
        self._are_equal = False
        self._own: Measured | None = None
        self._momentum = 0.0
        self._rate = 1.0
        # Samples of the last updates over their rate, with momentum.
        self._previous: list[NDArray[np.float32]] = []
        # Means over steps, both multiplied by the same number: of the updates' squared norms, and of the squared norm
        # of their mean.
        self._squares = 0.0
        self._mean_squares = 0.0
        self._updates = 1

    def start(self, momentum: float = 0.0) -> None:
        """Measure from now on; on all nodes.

        Args:
            momentum: share of an update that the next one repeats, as the first of Adam's betas; 0.0 also for an
                optimiser whose updates have one size whatever the momentum averages, as Lion and Muon.
        """
        self.is_on = True
        self._momentum = momentum if self._repeats else 0.0

    def expect_averaged_workers(self) -> None:
        """Note that the workers of this machine average their gradients: that their updates are equal tells nothing."""
        self._workers_are_averaged = True

    def set_pace(self, rate: float, momentum: float) -> None:
        """Note what the next update is proportional to, besides the gradients, and its momentum; schedules change both.

        Args:
            rate: learning rate and factors together, over 0.
            momentum: as in `start`.
        """
        self._rate = rate
        self._momentum = momentum if self._repeats else 0.0

    @property
    def factor(self) -> float:
        """The factor of what the gradient adds to the next update: k times ``decay_factor``.

        k is from 1, where all agree, to sqrt(updates); 1 before anything is known.
        """
        if not self._mean_squares > 0.0:
            return self.decay_factor
        k = math.sqrt(self._squares / self._mean_squares)
        return self.decay_factor * min(max(k, 1.0), math.sqrt(self._updates))

    @property
    def decay_factor(self) -> float:
        """The factor of weight decay beside the gradient, which with an outer momentum then is as large as without."""
        return 1.0 - self.outer_momentum if self.is_on else 1.0

    def takes(self, step: int) -> bool:
        """Return whether the members tell each other of their updates of ``step``."""
        return (self.is_on or self.limits_norms) and (step < _DENSE_STEPS or step % _EVERY == 0)

    def is_due(self) -> bool:
        """Return whether this node's next update is still to be measured."""
        return self._own is None and (self.limits_norms or self.is_on)

    def measure(self, step: int, samples: Iterable[NDArray[np.float64]]) -> None:
        """Measure this node's update of ``step``, or its workers' updates, by a sample of each."""
        listed = list(samples)
        squares = _squares_of(listed)
        # An update that is not finite is refused, or sent without these elements: it says nothing about agreement.
        if not listed or not squares < _LARGEST:
            return
        if not self._workers_are_averaged:
            self._count_equal("workers", listed, _ROUNDING)
        sketch = None
        # Where the optimiser was not called, as after an overflow, nothing is repeated either.
        if self.is_on and (squares > 0.0 or not self._momentum):
            added = self._added(step, listed)
            if added and self.takes(step):
                told = [_sums_of(sample) for sample in added]
                own = Sketch(len(added), _squares_of(told), sum(told[1:], start=told[0]))
                # As the others get it: all nodes have to compute the same factor.
                sketch = Sketch.decode(own.encode())
        self._own = Measured(math.sqrt(squares / len(listed)), sketch)

    def _added(self, step: int, samples: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        """Return the samples without what they repeat of the last updates; empty if these are not known."""
        if not self._momentum:
            return samples
        samples = [_thinned(sample) for sample in samples]
        # Adam's momentum is divided by 1 - momentum^(steps taken).
        repeated = (
            self._momentum * (1.0 - self._momentum**step) / (1.0 - self._momentum ** (step + 1))
        )
        previous = self._previous
        self._previous = [np.float32(sample / self._rate) for sample in samples]
        if not repeated:
            return samples
        if [sample.size for sample in samples] != [sample.size for sample in previous]:
            return []
        repeated *= self._rate
        return [sample - repeated * last for sample, last in zip(samples, previous, strict=True)]

    def take_own(self) -> Measured | None:
        """Return what is known of this node's update, for the note of its step; it is given once."""
        own = self._own
        self._own = None
        return own

    def add(self, sketches: Sequence[Sketch]) -> None:
        """Add the sketches of all members' updates of a step."""
        updates = sum(sketch.updates for sketch in sketches)
        if not updates:
            return
        squares = sum(sketch.squares for sketch in sketches) / updates
        total = sum((sketch.buckets for sketch in sketches), start=np.zeros(_BUCKETS))
        mean_squares = float(np.square(total).sum()) / updates**2
        self._count_equal("nodes", [sketch.buckets for sketch in sketches], _SKETCH_ROUNDING)
        self._squares = _DECAY * self._squares + squares
        self._mean_squares = _DECAY * self._mean_squares + mean_squares
        self._updates = updates

    def shorten(self, norm: float) -> float:
        """Return the factor of this node's update of a norm: 1, or what makes it as long as the members' median.

        A factor below 1 is counted.
        """
        if not self.limits_norms or not self._is_outlier(norm):
            return 1.0
        self._shortened += 1
        return self._median / norm

    def drain_shortened(self) -> int:
        """Return how many updates were shortened since the call before."""
        count = self._shortened
        self._shortened = 0
        return count

    def add_norms(self, norms: Mapping[_Name, float]) -> list[_Name]:
        """Take the norms of all members' updates of a step; return those whose update is far too long."""
        # Two norms do not tell which of them is the outlier.
        self._median = statistics.median(norms.values()) if len(norms) >= _NORMS_MIN else 0.0
        # Adaptive optimisers may give every update the same norm.
        if norms and not self.is_on:
            self._count_equal("nodes", [np.array([norm]) for norm in norms.values()], _ROUNDING)
        return [name for name, norm in norms.items() if self._is_outlier(norm)]

    def _count_equal(
        self, whose: str, told: Sequence[NDArray[np.float64]], rounding: float
    ) -> None:
        first = told[0]
        largest = float(np.abs(first).max(initial=0.0))
        is_equal = len(told) > 1 and largest > 0.0
        for other in told[1:] if is_equal else ():
            is_equal = is_equal and float(np.abs(other - first).max()) <= rounding * largest
        self._equal_steps[whose] = self._equal_steps[whose] + 1 if is_equal else 0
        self._are_equal |= self._equal_steps[whose] == _EQUAL_STEPS

    def drain_equal_updates(self) -> bool:
        """Return whether it has become certain since the call before that workers' or nodes' updates are equal."""
        are_equal = self._are_equal
        self._are_equal = False
        return are_equal

    def _is_outlier(self, norm: float) -> bool:
        return norm > _LONGEST * self._median > 0.0

    def state(self) -> list[float]:
        """Return what the factor is made of, for checkpoints and newcomers."""
        return [self._squares, self._mean_squares, self._updates]

    def load(self, state: Sequence[float]) -> None:
        """Continue from ``state``."""
        self._squares, self._mean_squares, updates = checked_state(state)
        self._updates = int(updates)

    def previous(self) -> list[NDArray[np.float32]]:
        """Return samples of this node's last update, or of its workers', for checkpoints; empty without momentum."""
        return [sample.copy() for sample in self._previous]

    @property
    def median(self) -> float:
        """The median of the members' norms when they told them last; 0.0: unknown."""
        return self._median

    def load_previous(self, samples: Sequence[Any], median: float = 0.0) -> None:
        """Continue from ``previous`` and ``median``."""
        self._median = median
        self._previous = [np.array(sample, np.float32) for sample in samples]


def checked_state(state: Any) -> list[float]:
    """Return the state of an agreement, which may come from another machine; raise `ValueError` if it is none."""
    squares, mean_squares, updates = map(float, state)
    # A rate that is multiplied by the factor must stay a number.
    if not (0.0 <= squares < _LARGEST and 0.0 <= mean_squares < _LARGEST):
        raise ValueError(f"norms of {squares} and {mean_squares}")
    if not 1.0 <= updates < _LARGEST:
        raise ValueError(f"a sketch of {updates} updates")
    return [squares, mean_squares, updates]


def _thinned(sample: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return blocks of a sample at regular distances, or all of a small one."""
    times = -(-sample.size // _REMEMBERED_NUMEL)
    if times <= 1:
        return sample
    span = _BLOCK_NUMEL * times
    return sample[: sample.size // span * span].reshape(-1, span)[:, :_BLOCK_NUMEL].reshape(-1)


def _squares_of(samples: Sequence[NDArray[np.float64]]) -> float:
    return float(sum(np.square(sample).sum() for sample in samples))


def _sums_of(sample: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums of every 128th element, with the signs that all nodes use."""
    signed = np.zeros(-(-sample.size // _BUCKETS) * _BUCKETS)
    np.multiply(sample, _signs(sample.size), out=signed[: sample.size])
    sums: NDArray[np.float64] = signed.reshape(-1, _BUCKETS).sum(axis=0)
    return sums


@lru_cache(maxsize=4)
def _signs(count: int) -> NDArray[np.float64]:
    mixed = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIXER
    signs: NDArray[np.float64] = 1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)
    return signs
