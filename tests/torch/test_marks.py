"""What tells whether tensors were written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from gradwire.torch.marks import Marks  # noqa: E402


def model_tensors() -> list[Any]:
    shapes = [(600, 600), (3,), (0,), (40, 8, 3, 3)]
    tensors = [torch.rand(shape) + 1.0 for shape in shapes]
    return [*tensors, torch.rand(700, 700).bfloat16() + 1.0, torch.rand(5, dtype=torch.float64)]


def flip_sign(tensors: list[Any]) -> None:
    tensors[1].data.neg_()


def change_a_bit(tensors: list[Any]) -> None:
    tensors[4].data.view(torch.int16)[0, 0] += 1


def transpose(tensors: list[Any]) -> None:
    tensors[0] = tensors[0].t()


def replace(tensors: list[Any]) -> None:
    tensors[3] = tensors[3] * 2.0


def change_channels_last(tensors: list[Any]) -> None:
    tensors[3].data.mul_(1.5)


def count(tensors: list[Any]) -> None:
    tensors[2].add_(0.0)


def make_nan(tensors: list[Any]) -> None:
    tensors[5].data[4] = torch.nan


@pytest.mark.parametrize(
    "change",
    [flip_sign, change_a_bit, transpose, replace, change_channels_last, count, make_nan],
)
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_what_is_written_shows(
    change: Callable[[list[Any]], None], *, is_channels_last: bool
) -> None:
    tensors = model_tensors()
    if is_channels_last:
        tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    marks = Marks()
    assert not marks.hold(tensors)
    marks.set(tensors)
    assert marks.hold(tensors)
    assert marks.hold([tensor.detach() for tensor in tensors])
    change(tensors)
    assert not marks.hold(tensors)
    marks.set(tensors)
    assert marks.hold(tensors)


def test_equal_values_in_other_memory_are_no_change() -> None:
    tensors = model_tensors()
    marks = Marks()
    marks.set(tensors)
    tensors[0].data = tensors[0].data.clone()
    assert marks.hold(tensors)
