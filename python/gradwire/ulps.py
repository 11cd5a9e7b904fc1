"""Arrays that differ by rounding in few elements, stored as the difference of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import blocks

__all__ = ["Packed", "pack", "unpack"]

#: See `pack`.
Packed = tuple[NDArray[np.uint8], NDArray[np.int8], NDArray[Any]]

# The four codes in each byte.
_CODES = (np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3


def pack(values: NDArray[Any], base: NDArray[Any]) -> Packed | NDArray[Any] | None:
    """Return what turns ``base`` into ``values``, bit for bit.

    Args:
        values: floating-point numbers, or integers with their bits.
        base: as many, of the same dtype.

    Returns:
        None where they are equal. Where they are nearly so, uint8[numel / 4] with two bits for each element, how many
        steps of rounding it is away: none, one up, one down, or other; these others' steps as int8, -128 if they are
        more; and the values of those. Or else all values.
    """
    bits = _bits(values.reshape(-1))
    base_bits = _bits(base.reshape(-1))
    packed = [np.empty(0, np.uint8)]
    steps = [np.empty(0, np.int8)]
    far = [np.empty(0, bits.dtype)]
    for part, before in blocks(bits, base_bits):
        difference = part - before
        codes = difference.astype(np.uint8) & 3
        codes ^= codes >> 1  # -1 becomes 2
        is_other = (difference + 1).view(f"u{difference.itemsize}") > 2
        if is_other.any():
            codes[is_other] = 3
            others = difference[is_other]
            is_far = (others < -127) | (others > 127)
            steps.append(np.where(is_far, -128, others).astype(np.int8))
            far.append(part[is_other][is_far])
        # Four codes are the bytes of a word, and move together.
        words = np.pad(codes, (0, -codes.size % 4)).view("<u4")
        words |= words >> 6
        packed.append((words | words >> 12).astype(np.uint8))
    quarters = np.concatenate(packed)
    if not quarters.any():
        return None
    if sum(map(len, steps)) > bits.size // 2:
        return values
    return quarters, np.concatenate(steps), np.concatenate(far).view(values.dtype)


def unpack(packed: Packed, base: NDArray[Any]) -> NDArray[Any]:
    """Turn ``base``, which is contiguous, into the values that ``pack`` was given; return it.

    Raises:
        IndexError: what is packed is of another number of elements.
    """
    quarters, steps, far = packed
    bits = _bits(base.reshape(-1))
    marked = int((_CODES == 3).sum(1, dtype=np.uint8)[quarters].sum())
    counts = len(quarters), len(steps), len(far)
    needed = -(-bits.size // 4), marked, int((steps == -128).sum())
    if counts != needed:
        raise IndexError(f"{counts} values of {bits.size} elements, where {needed} are needed")
    moves = np.array([0, 1, -1, 0], bits.dtype)
    far = far.view(bits.dtype)
    for (part,) in blocks(bits):
        packed_codes, quarters = np.split(quarters, [-(-part.size // 4)])
        codes = _CODES[packed_codes].reshape(-1)[: part.size]
        part += moves[codes]
        (places,) = np.nonzero(codes == 3)
        others, steps = np.split(steps, [places.size])
        part[places] += others
        far_places = places[others == -128]
        part[far_places], far = np.split(far, [far_places.size])
    return base


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(f"i{array.itemsize}")
