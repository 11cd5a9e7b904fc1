"""Which bytes of a snapshot each of several donors sends, and which another one sends for a donor that is gone."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import MessageError

__all__ = ["WHOLE_BYTES", "Division", "Ranges", "memory_of", "size_of", "without"]

#: Begin and end of parts of the bytes of all arrays, one after the other; in order, without a common byte.
Ranges: TypeAlias = list[tuple[int, int]]

#: A smaller array comes from one donor, so that no description in bytes is of two. Several donors send as much each.
WHOLE_BYTES = 8 << 20
_ALIGNMENT_BYTES = 64  # of a place in a larger array at which another donor goes on
# Larger arrays of the optimiser's state are of all donors, at most so many of them; the others are of the first donor.
_DIVIDED_BYTES = 1 << 20
_DIVIDED_MAX = 1 << 12


class Division:
    """Divides the bytes of a snapshot's arrays among donors.

    Each node has an optimiser's state of its own. Adam divides one of its moments by the other: of two donors these
    would make a newcomer's updates huge where only one of the donors has met an element, as in rows of an embedding
    table. So all of the state of an element comes from the same donor, where that is known.

    Args:
        sizes: of the arrays, in bytes: velocities, one for each parameter or none; parameters and what else is the same
            on all donors; the optimiser's state.
        shared: number of the arrays before the state.
        velocities: number of velocities among these.

    Attributes:
        nbytes: size of all arrays.
    """

    def __init__(self, sizes: Sequence[int], *, shared: int, velocities: int) -> None:
        self._sizes = sizes
        self._ends = list(accumulate(sizes))
        ends = [0, *self._ends]
        self.nbytes = ends[-1]
        self._velocity_bytes = ends[velocities]
        self._state_begin = ends[shared]
        # Of arrays of the state that follow each other and are as large, such as torch's moments of one parameter:
        # where they begin and end, and the size of each.
        self._alike: list[tuple[int, int, int]] = []
        begin = self._state_begin
        for nbytes, group in groupby(sizes[shared:]):
            end = begin + sum(group)
            self._alike.append((begin, end, nbytes))
            begin = end

    def share(self, place: int, count: int) -> Ranges:
        """Return what the donor at a place of several sends."""
        # Whatever arrives can be brought up to a later step as long as no parameter arrives before its velocity.
        velocity_bytes = self._velocity_bytes
        rest_bytes = self._state_begin - 2 * velocity_bytes
        first, last = (self._cut(velocity_bytes * at // count) for at in (place, place + 1))
        begin, end = (
            self._cut(2 * velocity_bytes + rest_bytes * at // count) for at in (place, place + 1)
        )
        ranges = [(first, last), (velocity_bytes + first, velocity_bytes + last), (begin, end)]
        return _joined([*ranges, *self._share_of_state(place, count)])

    def _share_of_state(self, place: int, count: int) -> Ranges:
        """Return what a donor sends of the optimiser's state: a part of large arrays, the first one also the rest."""
        least_bytes = max(_DIVIDED_BYTES, (self.nbytes - self._state_begin) // _DIVIDED_MAX)
        ranges: Ranges = []
        for begin, end, nbytes in self._alike:
            if nbytes <= least_bytes:
                ranges += [(begin, end)] if place == 0 else []
                continue
            places = nbytes // _ALIGNMENT_BYTES
            first = places * place // count * _ALIGNMENT_BYTES
            last = places * (place + 1) // count * _ALIGNMENT_BYTES if place + 1 < count else nbytes
            ranges += [(start + first, start + last) for start in range(begin, end, nbytes)]
        return ranges

    def whole(self, ranges: Ranges) -> Ranges:
        """Return ranges of what is missing, with all that another donor has to send together with them.

        These are small arrays, and the same elements of other arrays of the optimiser.
        """
        missing: Ranges = []
        touched: set[tuple[int, int, int]] = set()
        for begin, end in ranges:
            if begin < self._state_begin:
                missing.append((self._cut(begin), min(end, self._state_begin)))
            if end > self._state_begin:
                missing.append((max(begin, self._state_begin), end))
                touched |= self._touched(*missing[-1])
        for index, low, high in touched:
            begin, end, nbytes = self._alike[index]
            missing += [(start + low, start + high) for start in range(begin, end, nbytes)]
        return _joined(missing)

    def _touched(self, begin: int, end: int) -> set[tuple[int, int, int]]:
        """Return where a range of the state begins and ends: among which arrays, and what it has of each of them."""
        parts: set[tuple[int, int, int]] = set()
        for place in (begin, end - 1):
            index = bisect_right(self._alike, place, key=itemgetter(1))
            first, last, nbytes = self._alike[index]
            within = range(max(begin, first) - first, min(end, last) - first)
            low, high = within[0] % nbytes, within[-1] % nbytes + 1
            low -= low % _ALIGNMENT_BYTES
            if len(within) >= nbytes:
                parts.add((index, 0, nbytes))
            elif low < high:
                parts.add((index, low, high))
            else:  # it begins in an array and ends in the next
                parts |= {(index, 0, high), (index, low, nbytes)}
        return parts

    def _cut(self, place: int) -> int:
        """Return the next place before a byte, or that byte, at which another donor may go on."""
        index = bisect_right(self._ends, place)
        if index == len(self._ends):
            return self.nbytes
        nbytes = self._sizes[index]
        begin = self._ends[index] - nbytes
        within = place - begin if nbytes > WHOLE_BYTES else 0
        return begin + within - within % _ALIGNMENT_BYTES


def memory_of(arrays: Sequence[NDArray[Any]], ranges: Ranges) -> list[memoryview]:
    """Return the memory of some ranges of all arrays' bytes, in order."""
    pieces: list[memoryview] = []
    left = deque(ranges)
    base = 0
    for array in arrays:
        end = base + array.nbytes
        while left and left[0][0] < end:
            first, last = left[0]
            data = array.reshape(-1).view(np.uint8).data
            pieces.append(data[max(first - base, 0) : last - base])
            if last > end:
                break  # it goes on in the next array
            left.popleft()
        base = end
    return [piece for piece in pieces if len(piece)]


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return ranges without others that lie within them.

    Raises:
        MessageError: they do not.
    """
    rest: Ranges = []
    left = deque(taken)
    for first, last in ranges:
        place = first
        while left and place <= left[0][0] and left[0][1] <= last:
            begin, end = left.popleft()
            if place < begin:
                rest.append((place, begin))
            place = end
        if place < last:
            rest.append((place, last))
    if left:
        begin, end = left[0]
        raise MessageError(f"values from byte {begin} to {end}, which were not asked for")
    return rest


def size_of(ranges: Ranges) -> int:
    """Return the number of bytes in ranges."""
    return sum(end - begin for begin, end in ranges)


def _joined(ranges: Ranges) -> Ranges:
    """Return ranges in order, those that overlap or touch as one, without empty ones."""
    merged: Ranges = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            begin, last = merged.pop()
            end = max(end, last)
        if begin < end:
            merged.append((begin, end))
    return merged
