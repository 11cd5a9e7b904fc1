"""A batch's bytes give the same arrays back, and other bytes give an error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from gradwire.feed import layout

ARRAYS = arrays_of.arrays(
    arrays_of.floating_dtypes() | arrays_of.integer_dtypes() | arrays_of.boolean_dtypes(),
    arrays_of.array_shapes(min_dims=0, min_side=0, max_side=5),
)


def bytes_of(batch: object) -> bytearray:
    planned = layout.Layout(batch)
    buffer = bytearray(planned.nbytes)
    planned.write(buffer)
    return buffer


@given(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4))
def test_what_is_written_is_read(batch: dict[str, np.ndarray]) -> None:
    found = layout.read(bytes_of(batch))
    assert isinstance(found, dict)
    assert list(found) == list(batch)
    for name, array in batch.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


@given(st.binary(max_size=200))
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="holds no batch"):
        layout.read(data)


def test_a_cut_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no batch"):
        layout.read(bytes_of(np.arange(100))[:-64])


def test_arrays_begin_at_multiples_of_64_bytes() -> None:
    found = layout.read(np.frombuffer(bytes_of([np.zeros(3), np.zeros(5, np.int8)]), np.uint8))
    first, second = found
    assert (second.ctypes.data - first.ctypes.data) == 64


def test_a_description_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"500 arrays has \d+ bytes, at most 4096"):
        layout.Layout([np.zeros(1)] * 500)


def test_names_that_are_the_same_text_are_refused() -> None:
    with pytest.raises(ValueError, match="the same name"):
        layout.Layout({1: np.zeros(1), "1": np.ones(1)})


def test_a_dtype_that_is_not_numpys_own_is_refused_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    with pytest.raises(TypeError, match="'x' of the batch has dtype bfloat16: a feed carries"):
        layout.Layout({"x": np.zeros(3, ml_dtypes.bfloat16)})
