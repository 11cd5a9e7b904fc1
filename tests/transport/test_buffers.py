"""Memory is used again when nobody looks at it, and never before."""

from __future__ import annotations

import numpy as np

from gradwire.transport.buffers import SMALL_BYTES, BufferPool

BYTES = 4 * SMALL_BYTES


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_that_nobody_looks_at_is_used_again() -> None:
    pool = BufferPool(1 << 20)
    first = address(pool.take(BYTES))
    assert address(pool.take(BYTES - 5)) == first


def test_a_slice_of_a_view_keeps_its_memory_from_being_used_again() -> None:
    pool = BufferPool(1 << 20)
    array = pool.take(BYTES)
    array[:] = 7
    view = memoryview(array)[100:200].toreadonly()[10:20]
    del array
    for _ in range(8):
        pool.take(BYTES)[:] = 1
    assert bytes(view) == bytes([7]) * 10


def test_at_most_a_quarter_more_is_taken_than_asked_for() -> None:
    pool = BufferPool(1 << 30)
    for nbytes in (SMALL_BYTES, SMALL_BYTES + 1, 63_000, 1_048_600, 5_000_001):
        assert nbytes <= len(pool.take(nbytes)) <= 1.25 * nbytes


def test_the_pool_keeps_no_more_than_it_may() -> None:
    pool = BufferPool(3 * BYTES)
    lent = [pool.take(BYTES) for _ in range(10)]
    assert len({address(array) for array in lent}) == 10
    assert pool.kept_bytes == 3 * BYTES
    other = pool.take(2 * BYTES)
    assert len(other) == 2 * BYTES
    assert pool.kept_bytes <= 3 * BYTES


def test_small_arrays_are_left_to_the_allocator() -> None:
    pool = BufferPool(1 << 20)
    assert len(pool.take(SMALL_BYTES - 1)) == SMALL_BYTES - 1
    assert pool.kept_bytes == 0
