"""Rows of a DataFrame on their way to a worker: checked columns, Arrow batches, a spill on the executor's disk."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = [
    "FEATURES",
    "LABEL",
    "VALIDATION",
    "WEIGHT",
    "Checked",
    "Spill",
    "are_spread",
    "column_for",
    "shuffled",
    "spill",
    "summarize",
]

FEATURES = "features"
LABEL = "label"
WEIGHT = "weight"
VALIDATION = "is_validation"

_NUMBER: Final = re.compile(r"(tinyint|smallint|int|bigint|float|double|decimal)\b")
_ALLOWED: Final = {
    FEATURES: ("an array of numbers", "a vector"),
    LABEL: ("a number", "boolean", "an array of numbers", "a vector"),
    VALIDATION: ("boolean",),
}  # in other roles numbers


def column_for(role: str, data: DataFrame, name: str | list[str]) -> Column:
    """Return a column of numbers: whole labels as bigint, others as float, arrays and vectors as array<float>.

    Several columns of numbers become one of arrays.

    Raises:
        ValueError: there is no such column.
        TypeError: the column's type does not suit its role.
    """
    from pyspark.sql import functions as F  # noqa: N812

    # Once: with Spark Connect every look at the schema copies it, which took minutes for thousands of columns.
    kinds = {field.name: field.dataType for field in data.schema}
    if isinstance(name, str):
        return _column_for(role, kinds, name)
    return F.array(*[_column_for("one feature", kinds, part).cast("float") for part in name])


def _column_for(role: str, kinds: dict[str, DataType], name: str) -> Column:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F  # noqa: N812

    if name not in kinds:
        is_field = str(name).partition(".")[0] in kinds
        way = f"; a field must be a column: select it first, as col({name!r})" if is_field else ""
        raise ValueError(
            f"there is no column {name!r} for {role}; the columns are {', '.join(kinds)}{way}"
        )
    kind = kinds[name]
    text = kind.simpleString()
    column = F.col("`" + name.replace("`", "``") + "`")  # a dot would be one of a field
    if "Vector" in type(kind).__name__:
        content = "a vector"
        # It raises for a null, of which `Checked` names the row.
        column = F.when(column.isNotNull(), vector_to_array(column, "float32"))
    elif text.startswith("array<"):
        content = "an array of numbers" if _NUMBER.match(text[6:]) else ""
        column = column.cast("array<float>")
    elif text == "boolean":
        content = text
        column = column if role == VALIDATION else column.cast("float")
    else:
        content = "a number" if _NUMBER.match(text) else ""
        is_whole = role == LABEL and text.endswith("int")
        column = column.cast("bigint" if is_whole else "float")
    allowed = _ALLOWED.get(role, ("a number", "boolean"))
    if content not in allowed:
        way = " (StringIndexer gives each string a number)" if text == "string" else ""
        if text.startswith("array<array<"):
            way = " (flatten(...) makes one of it, which the model can reshape)"
        raise TypeError(
            f"column {name!r}, for {role}, has type {text}; it must be {' or '.join(allowed)}{way}"
        )
    return column


class Spill:
    """The rows of one worker in files without a name, which the system removes however the worker ends."""

    def __init__(self) -> None:
        self.rows = 0
        self._files: dict[str, tuple[Any, np.dtype[Any], tuple[int, ...]]] = {}
        self.arrays: dict[str, NDArray[Any]] = {}

    def append(self, columns: dict[str, NDArray[Any]]) -> None:
        """Write rows to the disk.

        Raises:
            OSError: it is full, or something else is wrong with it.
        """
        folder, *_ = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        folder = folder if os.access(folder, os.W_OK) else tempfile.gettempdir()
        try:
            for name, array in columns.items():
                if name not in self._files:
                    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                    self._files[name] = file, array.dtype, array.shape[1:]
                file = self._files[name][0]
                file.write(np.ascontiguousarray(array).data)
                file.flush()
        except OSError as error:
            raise OSError(
                f"the worker's rows cannot be written to {folder}, after {self.rows} of them ({error}): give "
                "spark.local.dir (SPARK_LOCAL_DIRS) a folder with more space"
            ) from error
        self.rows += len(next(iter(columns.values())))

    @property
    def nbytes(self) -> int:
        """Size of the rows."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def weight(self) -> float:
        """Sum of the rows' weights, which are 1 without a column of them."""
        return (
            float(self.arrays[WEIGHT].sum(dtype=np.float64))
            if WEIGHT in self.arrays
            else float(self.rows)
        )

    def finish(self) -> None:
        """Map the files."""
        for name, (file, dtype, shape) in self._files.items():
            self.arrays[name] = np.memmap(file, dtype, "r", shape=(self.rows, *shape))


#: Rows are trained on where they lie if no partition has so much more or fewer rows than the mean of all.
_ROWS_SPREAD: Final = 0.05
# And if their labels' mean and standard deviation differ from those of all labels by less than that many standard
# deviations, besides what they differ by in random partitions (four standard errors).
_LABELS_SPREAD: Final = 0.1
_ERRORS: Final = 4.0

SUMMARY: Final = "rows bigint, labels bigint, sum double, squares double"


def summarize(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what `are_spread` has to know of a partition; of its rows only labels and validation indicator are read."""
    rows = labels = 0
    sums = np.zeros(2)
    for batch in batches:
        training = batch
        if VALIDATION in batch.schema.names:
            training = batch.filter(pc.invert(batch.column(VALIDATION)))
        column = training.column(LABEL)
        if pa.types.is_list(column.type):
            column = column.flatten()
        values = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
        rows += training.num_rows
        labels += len(values)
        sums += values.sum(), values @ values
    summary = {"rows": [rows], "labels": [labels], "sum": sums[:1], "squares": sums[1:]}
    yield pa.RecordBatch.from_pydict(summary)


def are_spread(summaries: Sequence[Any], workers: int) -> bool:
    """Return whether the rows may be trained on where they lie: one partition for each worker, all of them alike."""
    if len(summaries) != workers:
        return False
    rows, labels, sums, squares = np.array(summaries, np.float64).T
    if not rows.all() or not labels.all():
        return False
    if (np.abs(rows - rows.mean()) > _ROWS_SPREAD * rows.mean()).any():
        return False
    mean = sums.sum() / labels.sum()
    deviation = np.sqrt(max(squares.sum() / labels.sum() - mean**2, 0.0))
    means = sums / labels
    deviations = np.sqrt(np.maximum(squares / labels - means**2, 0.0))
    allowed = deviation * (_LABELS_SPREAD + _ERRORS / np.sqrt(labels)) + 1e-6 * abs(mean)
    # Written so that NaN is refused.
    are_alike = (np.abs(means - mean) <= allowed) & (np.abs(deviations - deviation) <= allowed)
    return bool(are_alike.all())


def spill(
    batches: Iterator[pa.RecordBatch], place: str, columns: dict[str, Any]
) -> tuple[Spill, Spill]:
    """Write a worker's rows to its disk; return those for training and those for validation.

    Args:
        batches: the rows.
        place: the worker, as errors name it.
        columns: the user's name of each role's column.

    Raises:
        ValueError: as `Checked`.
    """
    training = Spill()
    validation = Spill()
    checked = Checked(place)
    for batch in batches:
        arrays = {
            role: checked.values(batch.column(role), columns[role], is_weight=role == WEIGHT)
            for role in batch.schema.names
        }
        checked.rows += batch.num_rows
        is_held = arrays.pop(VALIDATION, np.zeros(batch.num_rows, np.bool_)).astype(np.bool_)
        for target, is_chosen in ((training, ~is_held), (validation, is_held)):
            if is_chosen.any():
                target.append({role: array[is_chosen] for role, array in arrays.items()})
    for rows in (training, validation):
        rows.finish()
    return training, validation


class Checked:
    """NumPy arrays of Arrow columns, whose rows all have one shape and finite numbers.

    Raises:
        ValueError: a row has no values, another shape than the first one, a null, NaN or infinity; the error names the
            row and the column.
    """

    def __init__(self, place: str) -> None:
        self.rows = 0  # before the current batch
        self._place = place
        self._widths: dict[str, int] = {}

    def values(self, column: Any, name: Any, *, is_weight: bool = False) -> NDArray[Any]:
        """Return a column of a batch; arrays as a matrix."""

        def check(bad: Any, what: str) -> None:
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                raise ValueError(
                    f"row {self.rows + row} of {self._place}, column {name!r}: {what} in "
                    f"{str(column[row].as_py())[:200]}"
                )

        check(column.is_null().to_numpy(zero_copy_only=False), "null")
        values = column
        shape = [len(column)]
        if pa.types.is_list(column.type):
            values = column.flatten()
            lengths = pc.list_value_length(column).to_numpy(False)
            shape.append(self._widths.setdefault(str(name), int(lengths[0])) if shape[0] else 0)
            check(lengths == 0, "no values")
            check(lengths != shape[1], f"not {shape[1]} values, as in the first row,")
            check(values.is_null().to_numpy(False).reshape(shape).any(axis=1), "null")
        array = np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            check(~np.isfinite(array).reshape(len(array), -1).all(axis=1), "NaN or infinity")
        if is_weight:
            check(array < 0, "a negative weight")
        return array


def shuffled(rows: int, batch_size: int, seed: list[int]) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row numbers without end: every row once in random order, then all again in another order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(rows)
    size = min(batch_size, rows)
    while True:
        if len(order) < size:
            order = np.concatenate([order, rng.permutation(rows)])
        yield order[:size]
        order = order[size:]
