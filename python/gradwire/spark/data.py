"""Rows of a DataFrame on their way to a worker: checked columns, Arrow batches, a spill on the executor's disk."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "FEATURES",
    "LABEL",
    "VALIDATION",
    "WEIGHT",
    "Shuffled",
    "Spill",
    "features",
    "numeric",
    "spill",
]

FEATURES, LABEL, WEIGHT, VALIDATION = "features", "label", "weight", "is_validation"

_NUMBER: Final = re.compile("tinyint|smallint|int|bigint|float|double|decimal")
_ALLOWED: Final = {
    FEATURES: ("an array of numbers", "a vector"),
    LABEL: ("a number", "boolean", "an array of numbers", "a vector"),
    VALIDATION: ("boolean",),
}  # in other roles numbers


def features(data: DataFrame, columns: str | list[str]) -> Column:
    """Return the features as one column of array<float>: a column of arrays or vectors, or several of numbers."""
    from pyspark.sql import functions as F  # noqa: N812

    if isinstance(columns, str):
        return numeric(data, columns, FEATURES)
    return F.array(*[numeric(data, name, "one feature").cast("float") for name in columns])


def numeric(data: DataFrame, name: str, role: str) -> Column:
    """Return a column of numbers: whole labels as bigint, others as float, arrays and vectors as array<float>.

    Raises:
        ValueError: there is no such column.
        TypeError: the column's type does not suit its role.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F  # noqa: N812

    try:
        kind = data.schema[name].dataType
    except KeyError:
        raise ValueError(
            f"there is no column {name!r} for {role}; the columns are {', '.join(data.columns)}"
        ) from None
    text, column = kind.simpleString(), F.col(name)
    if "Vector" in type(kind).__name__:
        found, column = "a vector", vector_to_array(column, "float32")
    elif text.startswith("array<"):
        found = "an array of numbers" if _NUMBER.match(text[6:]) else ""
        column = column.cast("array<float>")
    elif text == "boolean":
        found = text
        column = column if role == VALIDATION else column.cast("float")
    else:
        found = "a number" if _NUMBER.match(text) else ""
        is_whole = role == LABEL and text.endswith("int")
        column = column.cast("bigint" if is_whole else "float")
    allowed = _ALLOWED.get(role, ("a number", "boolean"))
    if found not in allowed:
        raise TypeError(
            f"column {name!r}, for {role}, has type {text}; it must be {' or '.join(allowed)}"
        )
    return column


class Spill:
    """The rows of one worker in files without a name, which the system removes however the worker ends."""

    def __init__(self) -> None:
        self.rows = 0
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self.arrays: dict[str, NDArray[Any]] = {}

    def append(self, columns: dict[str, NDArray[Any]]) -> None:
        """Write rows to the disk."""
        for name, array in columns.items():
            if name not in self._files:
                folder = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or None
                folder = folder if folder is not None and os.access(folder, os.W_OK) else None
                self._files[name] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                self._shapes[name] = array.dtype, array.shape[1:]
            self._files[name].write(np.ascontiguousarray(array).data)
        self.rows += len(next(iter(columns.values())))

    def finish(self) -> None:
        """Map the files."""
        for name, file in self._files.items():
            dtype, shape = self._shapes[name]
            file.flush()
            self.arrays[name] = np.memmap(file, dtype, "r", shape=(self.rows, *shape))

    def width(self, name: str) -> int:
        """Return the number of values in each row of a column; 0 for single numbers or no rows."""
        return int(np.prod(self._shapes[name][1])) if self._shapes.get(name, (0, ()))[1] else 0


def spill(batches: Iterator[pa.RecordBatch], worker: int) -> tuple[Spill, Spill]:
    """Write a worker's rows to its disk; return those for training and those for validation.

    Raises:
        ValueError: a row has another shape than the first one, or a null; the error names row and column.
    """
    training, validation = Spill(), Spill()
    first = 0
    widths: dict[str, int] = {}
    for batch in batches:
        columns = {
            name: _values(batch.column(name), name, first, worker, widths)
            for name in batch.schema.names
        }
        is_held = columns.pop(VALIDATION, np.zeros(batch.num_rows, np.bool_)).astype(np.bool_)
        for target, rows in ((training, ~is_held), (validation, is_held)):
            if rows.any():
                target.append({name: array[rows] for name, array in columns.items()})
        first += batch.num_rows
    for one in (training, validation):
        one.finish()
    return training, validation


def _values(
    column: Any, name: str, first: int, worker: int, widths: dict[str, int]
) -> NDArray[Any]:
    def fail(bad: Any, what: str) -> None:
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"row {first + row} of worker {worker}, column {name!r}: {what} in {str(column[row].as_py())[:200]}"
        )

    if column.null_count:
        fail(column.is_null().to_numpy(zero_copy_only=False), "null")
    if not pa.types.is_list(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    values = column.flatten()
    if len(lengths):
        width = widths.setdefault(name, int(lengths[0]))
        if (lengths != width).any():
            wrong = lengths != width
            fail(wrong, f"{lengths[wrong][0]} values instead of {width}")
        if values.null_count:
            nulls = values.is_null().to_numpy(zero_copy_only=False).reshape(-1, width)
            fail(nulls.any(axis=1), "null")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(lengths), -1)


class Shuffled:
    """An endless sequence of row numbers: every row once in random order, then all again in another order.

    Args:
        rows: number of rows.
        seed: of the orders.
    """

    def __init__(self, rows: int, seed: list[int]) -> None:
        self._rng = np.random.default_rng(seed)
        self._rows = rows
        self._order = self._rng.permutation(rows)
        self._next = 0

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the next row numbers; at most as many as there are rows."""
        count = min(count, self._rows)
        if self._next + count <= self._rows:
            self._next += count
            return self._order[self._next - count : self._next]
        rest = self._order[self._next :]
        self._order = self._rng.permutation(self._rows)
        self._next = count - len(rest)
        return np.concatenate([rest, self._order[: self._next]])
