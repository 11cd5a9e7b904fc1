"""Whether rows may be trained on where they lie, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa: Any = pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from gradwire.spark.data import LABEL, VALIDATION, Spill, are_spread, column_for, summarize  # noqa: E402

pytestmark = pytest.mark.spark


def are_alike(partitions: Sequence[Any], workers: int | None = None) -> bool:
    """Return what an estimator decides for partitions with the given labels."""

    def batches(labels: Any) -> Iterator[Any]:
        for part in np.array_split(labels, 3):
            yield pa.RecordBatch.from_pydict({LABEL: pa.array(part.tolist(), pa.int64())})

    summaries = []
    for labels in partitions:
        [summary] = summarize(batches(labels))
        [row] = summary.to_pylist()
        summaries.append(tuple(row.values()))
    return are_spread(summaries, len(partitions) if workers is None else workers)


@pytest.fixture
def labels() -> Any:
    return np.random.default_rng(1).integers(10, size=8_000)


def test_random_partitions_of_one_size_are_alike(labels: Any) -> None:
    assert are_alike(np.array_split(labels, 4))
    assert are_alike(np.array_split(labels[:40], 4)), "few rows differ by chance"
    assert are_alike([labels])
    assert are_alike([np.ones(100, int)] * 2), "labels without a spread"


def test_more_partitions_than_workers_are_not(labels: Any) -> None:
    assert not are_alike(np.array_split(labels, 4), workers=3)
    assert not are_alike(np.array_split(labels, 4), workers=5)


@pytest.mark.parametrize(
    ("first", "expected"), [(1_040, True), (960, True), (1_060, False), (940, False)]
)
def test_five_percent_more_or_fewer_rows_are_the_limit(
    labels: Any, first: int, expected: bool
) -> None:
    rest = np.array_split(labels[first:8_000], 7)
    assert are_alike([labels[:first], *rest]) == expected


def test_a_partition_without_rows_is_not_alike(labels: Any) -> None:
    assert not are_alike([labels[:0], labels, labels])
    assert not are_alike([labels[:0], labels[:0]])


def test_sorted_labels_are_not_spread(labels: Any) -> None:
    assert not are_alike(np.array_split(np.sort(labels), 4))
    middle = np.isin(labels, (4, 5))
    size = middle.sum()
    outside = labels[~middle & np.isin(labels, (0, 9, 1, 8))][:size]
    assert not are_alike([labels[middle][: len(outside)], outside]), "another spread, one mean"


def test_labels_that_are_not_finite_are_not_spread() -> None:
    batch = pa.RecordBatch.from_pydict({LABEL: [1.0, float("nan"), 0.0]})
    rows = [tuple(next(summarize(iter([batch]))).to_pylist()[0].values())] * 2
    assert not are_spread(rows, 2)


def test_only_rows_for_training_count_and_arrays_are_flattened() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            LABEL: [[1.0, 2.0], [3.0, None], [9.0, 9.0], [8.0, 8.0]],
            VALIDATION: [False, False, True, None],
        }
    )
    [summary] = summarize(iter([batch]))
    assert summary.to_pylist() == [{"rows": 2, "labels": 3, "sum": 6.0, "squares": 14.0}]
    [empty] = summarize(iter([]))
    assert empty.to_pylist() == [{"rows": 0, "labels": 0, "sum": 0.0, "squares": 0.0}]


def test_thousands_of_columns_are_looked_up_in_one_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Spark Connect a schema is copied whenever somebody looks at it."""
    functions = pytest.importorskip("pyspark.sql.functions", reason="pyspark is not installed")
    types = pytest.importorskip("pyspark.sql.types", reason="pyspark is not installed")

    class Column(str):
        def cast(self, kind: str) -> Column:
            return Column(f"{self} as {kind}")

    class Frame:
        looks = 0

        @property
        def schema(self) -> Any:
            self.looks += 1
            return types.StructType([types.StructField(f"c{i}", types.LongType()) for i in "abc"])

    monkeypatch.setattr(functions, "col", Column)
    monkeypatch.setattr(functions, "array", lambda *columns: list(columns))
    frame: Any = Frame()
    columns = column_for("features", frame, ["cc", "ca"])
    assert columns == [f"`{name}` as float as float" for name in ("cc", "ca")]
    assert frame.looks == 1
    with pytest.raises(ValueError, match="no column 'cd' for one feature; the columns are ca, cb"):
        column_for("features", frame, ["cd"])


def test_a_vector_that_is_null_stays_null(session: Any) -> None:
    """So that the error names its row and column; Spark's function for vectors only says that it got null."""
    linalg = pytest.importorskip("pyspark.ml.linalg", reason="pyspark is not installed")

    vectors = [linalg.Vectors.dense([1.0, 2.0]), None, linalg.Vectors.sparse(2, {1: 3.0})]
    frame = session.createDataFrame([(vector,) for vector in vectors], ["vector"]).coalesce(1)
    rows = frame.select(column_for("features", frame, "vector")).collect()
    assert [row[0] for row in rows] == [[1.0, 2.0], None, [0.0, 3.0]]


def test_an_interval_is_no_number(session: Any) -> None:
    frame = session.sql("select interval '3' day as days, array(interval '3' day) as several")
    for name in frame.columns:
        with pytest.raises(TypeError, match=rf"column '{name}', for label, has type .*interval"):
            column_for("label", frame, name)


def test_rows_that_the_disk_cannot_hold_are_told_with_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    rows = {LABEL: np.zeros(3, np.int64)}
    spill = Spill()
    spill.append(rows)
    full = Path("/dev/full").open("wb")  # noqa: SIM115
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
    with pytest.raises(OSError, match=f"to {tmp_path}, after 3 of them .*No space.*local.dir"):
        spill.append({**rows, VALIDATION: np.ones(3, np.bool_)})
    monkeypatch.undo()
