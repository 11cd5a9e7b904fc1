"""The division of an update's elements into parts, each of which has a message of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .state import check_range

__all__ = ["Part", "Partition"]

_NUMEL_MAX = 2**48
_PARTS_MAX = 2**16
# More blocks balance the parts better where changes cluster. Fewer cost less.
_BLOCKS_PER_PART = 256
_BLOCK_MIN = 64
_BLOCK_MAX = 4096


@dataclass(frozen=True)
class Partition:
    """Elements 0 to numel - 1, divided into parts by blocks: block b belongs to part ``(b + first) % parts``.

    The elements of a part are numbered from 0 through its blocks in ascending order. ``partition[i]`` is part ``i``.

    Args:
        numel: elements of the whole.
        parts: number of parts, 1 to 65,536.
        first: part of block 0, below ``parts``.

    Attributes:
        block: elements of a block: a power of two from 64 to 4,096, so that a part has at least 256 blocks where
            possible. The last block may be short.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not an int.

    >>> partition = Partition(200, 3)
    >>> partition.block, partition.sizes
    (64, (72, 64, 64))
    >>> list(partition[0].slices())
    [(slice(0, 64, None), slice(0, 64, None)), (slice(192, 200, None), slice(64, 72, None))]
    """

    numel: int
    parts: int
    first: int = field(default=0, kw_only=True)
    block: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", check_range("numel", self.numel, 0, _NUMEL_MAX))
        object.__setattr__(self, "parts", check_range("parts", self.parts, 1, _PARTS_MAX))
        object.__setattr__(self, "first", check_range("first", self.first, 0, self.parts - 1))
        wanted = max(self.numel // (_BLOCKS_PER_PART * self.parts), 1)
        block = min(max(1 << (wanted.bit_length() - 1), _BLOCK_MIN), _BLOCK_MAX)
        object.__setattr__(self, "block", block)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each part; zeros where there are fewer blocks than parts."""
        return tuple(self[index].numel for index in range(self.parts))

    def __getitem__(self, index: int) -> Part:
        """Return part ``index``, 0 to parts - 1."""
        if not 0 <= index < self.parts:
            raise IndexError(f"part {index} of {self.parts}")
        return Part(self, index)

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts in order."""
        return map(self.__getitem__, range(self.parts))

    def __len__(self) -> int:
        """Return the number of parts."""
        return self.parts


@dataclass(frozen=True)
class Part:
    """One part of a partition."""

    partition: Partition
    index: int

    @property
    def position(self) -> int:
        """The number of the part's first block, if the partition has so many blocks."""
        return (self.index - self.partition.first) % self.partition.parts

    @property
    def numel(self) -> int:
        """Elements of the part."""
        whole = self.partition
        last = (whole.numel - 1) // whole.block
        blocks = (last - self.position) // whole.parts + 1
        # Only the last block of all may be short.
        has_last = last % whole.parts == self.position
        missing = (last + 1) * whole.block - whole.numel if has_last else 0
        return blocks * whole.block - missing

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield each block as a slice of the whole and a slice of the part."""
        whole = self.partition
        offset = 0  # in the part
        for begin in range(self.position * whole.block, whole.numel, whole.parts * whole.block):
            size = min(whole.block, whole.numel - begin)
            yield slice(begin, begin + size), slice(offset, offset + size)
            offset += size
