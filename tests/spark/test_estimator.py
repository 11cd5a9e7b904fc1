"""Estimators on real Spark: fit, transform, save and load, and everything that goes wrong.

What goes to the workers is defined inside functions: Spark sends such functions whole, others by their module's name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
import gradwire.spark
from gradwire.spark import ParameterAveraging, SharedTraining

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.torch]
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyspark", reason="pyspark is not installed")


def make_estimator(**options: Any) -> Any:
    from gradwire.spark import TorchEstimator

    def model() -> Any:
        import torch

        return torch.nn.Linear(4, 3)

    def optimizer(params: Any) -> Any:
        import torch

        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    defaults = {
        "model": model,
        "optimizer": optimizer,
        "loss": torch.nn.CrossEntropyLoss,
        "num_workers": 2,
        "batch_size": 16,
        "epochs": 2,
    }
    return TorchEstimator(**{**defaults, **options})


@pytest.fixture(scope="module")
def rows(session: Any) -> Any:
    """Three classes that a line separates; every fifth row is for validation."""
    rng = np.random.default_rng(5)
    labels = rng.integers(3, size=300)
    points = rng.standard_normal((300, 4)) + 4.0 * np.eye(4)[labels]
    found = [
        (point.tolist(), int(label), index % 5 == 0, float(index % 2))
        for index, (point, label) in enumerate(zip(points, labels, strict=True))
    ]
    names = "features array<float>, label int, held boolean, weight float"
    return session.createDataFrame(found, names).repartition(3).cache()


def accuracy(model: Any, data: Any) -> float:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    return float(evaluator.evaluate(model.transform(data)))


TRAININGS = [
    SharedTraining(),
    SharedTraining(mode="async"),
    SharedTraining(every=3, threshold=0.01),
    SharedTraining(workers_per_node=2),
    SharedTraining(every=3, overlap=1, outer_momentum=0.25, topology="sharded"),
    SharedTraining(every=2, overlap=1, codec="bfloat16", workers_per_node=2),
    ParameterAveraging(every=2),
    ParameterAveraging(every=3, average_optimizer=False, via="spark"),
]


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_every_way_of_training_learns(
    rows: Any, training: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradwire.spark")
    estimator = make_estimator(training=training, validation_indicator_col="held")
    model = estimator.fit(rows)
    assert accuracy(model, rows) > 0.9
    history = model.history
    assert history.epoch.tolist() == [0, 1]
    assert (history.rows >= 200).all()
    assert history.validation_loss.iloc[-1] < 0.5
    lines = [record.getMessage() for record in caplog.records if "rows/s" in record.getMessage()]
    assert len(lines) == 2
    assert lines[1].startswith("epoch 1: loss 0.")


def test_a_model_saved_and_loaded_predicts_the_same(rows: Any, tmp_path: Path) -> None:
    from gradwire.spark import TorchEstimator, TorchModel, trust_code

    estimator = make_estimator(collect_stats=True, raw_prediction_col="raw", probability_col="p")
    estimator.save(f"{tmp_path}/estimator")
    with trust_code():
        model = TorchEstimator.load(f"{tmp_path}/estimator").fit(rows)
        model.save(f"{tmp_path}/model")
        loaded = TorchModel.load(f"{tmp_path}/model")
    assert loaded.uid == model.uid == estimator.uid
    expected = model.transform(rows).orderBy("features").toPandas()
    found = loaded.transform(rows).orderBy("features").toPandas()
    assert found.equals(expected)
    assert [len(raw) for raw in found.raw] == [3] * 300
    assert np.allclose([sum(one) for one in found.p], 1.0)
    assert loaded.history.equals(model.history)
    model.history.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000
    assert sorted(set(model.history.worker)) == [0, 1]
    assert (model.history.sent_bytes > 0).all()
    with pytest.raises(Exception, match="TorchEstimator"):
        TorchEstimator.load(f"{tmp_path}/model")


def test_a_prediction_replaces_no_column(session: Any, rows: Any) -> None:
    """As with the models of `pyspark.ml`; Spark itself would replace it."""
    model = make_estimator(epochs=1, raw_prediction_col="raw").fit(rows)
    predicted = model.transform(rows)
    with pytest.raises(ValueError, match="prediction_col is 'prediction', which is a column of"):
        model.transform(predicted)
    with pytest.raises(ValueError, match="raw_prediction_col is 'raw', which is a column of the"):
        model.transform(rows.withColumnRenamed("weight", "RAW"))
    assert model.transform(predicted.drop("prediction", "raw")).columns == predicted.columns
    session.conf.set("spark.sql.caseSensitive", "true")
    try:
        renamed = rows.withColumnRenamed("weight", "RAW")
        assert model.transform(renamed).columns[-3:] == ["RAW", "prediction", "raw"]
    finally:
        session.conf.unset("spark.sql.caseSensitive")
    named = predicted.drop("prediction", "raw").withColumnRenamed("weight", "gradwire_outputs")
    assert model.transform(named).columns == [*named.columns, "prediction", "raw"]
    model.set(model.prediction_col, "gradwire_outputs")
    assert model.transform(rows).columns == [*rows.columns, "gradwire_outputs", "raw"]


@pytest.mark.parametrize("training", [None, ParameterAveraging(via="spark")], ids=str)
def test_a_state_that_is_too_large_for_a_task_goes_to_the_executors_beside_it(
    session: Any, rows: Any, training: Any
) -> None:
    from gradwire.spark.session import is_connect

    def model() -> Any:
        import torch

        return torch.nn.Sequential(torch.nn.Linear(4, 60_000), torch.nn.Linear(60_000, 3))

    def optimizer(params: Any) -> Any:
        import torch

        return torch.optim.AdamW(params, lr=1e-3)

    estimator = make_estimator(model=model, optimizer=optimizer, epochs=1, training=training)
    fitted = estimator.fit(rows)
    assert len(fitted.state) > 1 << 20
    for _ in range(2):
        assert accuracy(fitted, rows) > 0.9
    if not is_connect(session):
        sent = fitted._sent[2]
        # Spark gives every micro-batch of a stream to `foreachBatch` with another session.
        fitted.transform(session.newSession().createDataFrame(rows.limit(1).toPandas()))
        assert fitted._sent[2] is sent


def test_averages_through_spark_are_those_of_the_workers(rows: Any) -> None:
    """Each worker's batch is all of its rows, so that their order does not matter."""

    def model() -> Any:
        import torch

        layers = torch.nn.Linear(4, 30, bias=False), torch.nn.BatchNorm1d(30)
        return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(30, 3))

    def optimizer(params: Any) -> Any:
        import torch

        return torch.optim.AdamW(params, lr=0.01)

    states = []
    for via in ("udp", "spark"):
        options: dict[str, Any] = {"training": ParameterAveraging(via=via), "batch_size": 300}  # type: ignore[arg-type]
        estimator = make_estimator(model=model, optimizer=optimizer, epochs=3, **options)
        states.append(estimator.fit(rows).module().state_dict())
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "training", [SharedTraining(), ParameterAveraging(via="spark")], ids=["shared", "via spark"]
)
def test_rows_are_trained_on_where_they_lie(rows: Any, training: Any) -> None:
    columns = rows.select("features", "label", "held")
    balanced = columns.repartition(2).cache()
    estimator = make_estimator(
        training=training, validation_indicator_col="held", collect_stats=True
    )
    model = estimator.fit(balanced)
    assert model.history.shuffled_bytes.tolist() == [0] * 4
    assert accuracy(model, rows) > 0.9
    always = estimator.copy({estimator.shuffle: "always"}).fit(balanced)
    size = 300 * (4 * 4 + 8)
    assert always.history.groupby("epoch").shuffled_bytes.sum().tolist() == [size, 0]
    if isinstance(training, SharedTraining):
        assert always.history.steps.tolist() == model.history.steps.tolist() == [8] * 4
    balanced.unpersist()


def test_rows_that_are_not_spread_are_shuffled(rows: Any) -> None:
    """Also those that could be trained on where they lie, if Spark had barrier stages behind a coalesce."""
    columns = rows.select("features", "label").repartition(4)
    estimator = make_estimator(epochs=1)
    sorted_by_label = columns.repartitionByRange(2, "label").cache()
    coalesced = columns.cache().coalesce(2).cache()
    for data in (columns.repartition(2), sorted_by_label, columns.cache(), coalesced):
        model = estimator.fit(data)
        assert model.history.shuffled_bytes.tolist() == [300 * 24]
        assert accuracy(model, rows) > 0.9
    for data in (sorted_by_label, columns, coalesced):
        data.unpersist()


def test_only_one_worker_of_a_machine_counts_the_machine_s_bytes(rows: Any) -> None:
    training = SharedTraining(workers_per_node=2)
    history = make_estimator(training=training, collect_stats=True, epochs=1).fit(rows).history
    assert (history.encode_s > 0.0).all(), "all workers wait for their machine's leader"
    assert sorted(history.sent_bytes > 0) == [False, True]


def test_fits_at_the_same_time_share_the_slots(rows: Any) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    estimator = make_estimator()
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuned = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2
    ).fit(rows)
    assert min(tuned.avgMetrics) > 0.9


def test_names_of_columns_may_have_dots_and_quotes(rows: Any) -> None:
    data = rows.selectExpr("features `my.features`", "label `the ``label``.`", "1 `x.y`")
    estimator = make_estimator(
        features_col="my.features", label_col="the `label`.", prediction_col="pre.diction", epochs=1
    )
    predicted = estimator.fit(data).transform(data)
    assert predicted.columns == ["my.features", "the `label`.", "x.y", "pre.diction"]
    assert predicted.count() == 300


def test_it_works_in_a_pipeline_and_in_cross_validation(rows: Any) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    columns = [f"x{number}" for number in range(4)]
    data = rows.select(*[rows.features[i].alias(name) for i, name in enumerate(columns)], "label")
    assembler = VectorAssembler(inputCols=columns, outputCol="vector")
    estimator = make_estimator(features_col="vector", num_workers=1, epochs=1)
    pipeline = Pipeline(stages=[assembler, estimator])
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    tuned = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2
    ).fit(data)
    assert max(tuned.avgMetrics) > 0.9
    assert evaluator.evaluate(tuned.transform(data)) > 0.9


def test_columns_of_numbers_weights_and_a_single_output(session: Any) -> None:
    """Rows of weight zero, which would pull the line away, count for nothing."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((200, 2))
    found = [
        (float(a), float(b), float(3 * a - b if index % 2 else 50.0), float(index % 2))
        for index, (a, b) in enumerate(values)
    ]
    data = session.createDataFrame(found, "a double, b double, target double, weight double")

    def model() -> Any:
        import torch

        return torch.nn.Linear(2, 1)

    def loss() -> Any:
        import torch

        return torch.nn.MSELoss(reduction="none")

    estimator = make_estimator(
        model=model,
        loss=loss,
        features_col=["a", "b"],
        label_col="target",
        weight_col="weight",
        epochs=8,
        optimizer=lambda params: __import__("torch").optim.SGD(params, lr=0.1),
        training=ParameterAveraging(every=1),
    )
    fitted = estimator.fit(data)
    found = fitted.transform(data.filter("weight > 0")).toPandas()
    assert np.abs(found.prediction - found.target).max() < 0.2
    with pytest.raises(gw.GradwireError, match='give it reduction="none"'):
        estimator.copy({estimator.loss: torch.nn.MSELoss}).fit(data)


def test_several_columns_of_labels(session: Any, tmp_path: Path) -> None:
    from gradwire.spark import TorchEstimator, trust_code

    values = np.random.default_rng(3).standard_normal((200, 2))
    rows = [(float(a), float(b), float(a + b), int(a > b)) for a, b in values]
    data = session.createDataFrame(rows, "a double, b double, total double, larger int")

    def model() -> Any:
        import torch

        return torch.nn.Linear(2, 2)

    estimator = make_estimator(
        model=model,
        loss=torch.nn.MSELoss,
        features_col=["a", "b"],
        label_col=["total", "larger"],
        raw_prediction_col="raw",
        epochs=8,
        optimizer=lambda params: __import__("torch").optim.SGD(params, lr=0.2),
        training=ParameterAveraging(every=1),
    )
    estimator.save(f"{tmp_path}/estimator")
    with trust_code():
        loaded = TorchEstimator.load(f"{tmp_path}/estimator")
    predicted = loaded.fit(data).transform(data).toPandas()
    assert np.abs(np.stack(predicted.raw)[:, 0] - predicted.total).max() < 0.2


def test_partitions_without_rows_train_nothing_and_hold_up_nobody(rows: Any) -> None:
    model = make_estimator(collect_stats=True, epochs=1).fit(rows.limit(1))
    assert sorted(model.history.rows) == [0, 1]
    with pytest.raises(gw.GradwireError, match="there are no rows to train on"):
        make_estimator().fit(rows.filter("label > 5"))


@pytest.mark.parametrize("via", ["udp", "spark"])
def test_patience_needs_rows_for_validation(rows: Any, via: Any) -> None:
    options: dict[str, Any] = {"patience": 1, "validation_indicator_col": "held"}
    estimator = make_estimator(training=ParameterAveraging(via=via), **options)
    with pytest.raises((ValueError, gw.GradwireError), match="patience needs rows for validation"):
        estimator.fit(rows.filter("not held"))


@pytest.mark.parametrize("via", ["udp", "spark"])
def test_weights_that_are_all_zero_are_refused(rows: Any, via: Any) -> None:
    def loss() -> Any:
        import torch

        return torch.nn.CrossEntropyLoss(reduction="none")

    training = ParameterAveraging(via=via)
    names: dict[str, Any] = {"weight_col": "weight", "validation_indicator_col": "held"}
    estimator = make_estimator(training=training, loss=loss, patience=1, **names)
    for weight, text in (
        ("cast(not held as int)", "rows for validation with a weight above 0 in column 'weight'"),
        ("cast(held as int)", "all rows to train on have weight 0 in column 'weight'"),
    ):
        with pytest.raises((ValueError, gw.GradwireError), match=text):
            estimator.fit(rows.selectExpr("features", "label", "held", f"{weight} weight"))


def test_training_stops_early_and_gives_the_best_model(rows: Any) -> None:
    """From the second epoch on every step makes the model worse."""

    def loss() -> Any:
        import torch

        def value(outputs: Any, labels: Any) -> Any:
            value.calls += torch.is_grad_enabled()
            right = torch.nn.functional.cross_entropy(outputs, labels)
            is_late = torch.is_grad_enabled() and value.calls > 16
            return -right if is_late else right

        value.calls = 0
        return value

    def optimizer(params: Any) -> Any:
        import torch

        return torch.optim.SGD(params, lr=0.5)

    estimator = make_estimator(
        loss=loss, optimizer=optimizer, epochs=9, patience=2, validation_indicator_col="held"
    )
    model = estimator.fit(rows.selectExpr("features", "label", "held"))
    losses = model.history.validation_loss.tolist()
    assert len(losses) < 9
    assert losses.index(min(losses)) == len(losses) - 3


def test_a_worker_that_dies_is_replaced_and_training_goes_on_from_the_checkpoint(
    rows: Any, tmp_path: Path
) -> None:
    model = fit_with(rows, tmp_path, die_at=18)
    assert (tmp_path / "died").exists()
    assert accuracy(model, rows) > 0.9
    assert model.history.epoch.tolist() == [0, 1, 2]
    assert model.history.steps.tolist() == [10, 10, 10]
    assert steps_taken(tmp_path) <= 2 * (18 + 30 - 14), "the checkpoint was after 14 of 30"


@pytest.mark.parametrize(
    "training",
    [SharedTraining(workers_per_node=2), ParameterAveraging(via="spark")],
    ids=["shared", "via spark"],
)
def test_another_fit_resumes_from_the_end_of_an_earlier_one(
    rows: Any, tmp_path: Path, training: Any
) -> None:
    earlier = fit_with(rows, tmp_path, training=training)
    [folder] = (tmp_path / "checkpoints").iterdir()
    assert earlier.checkpoint == f"file://{folder}"
    assert len(list(folder.glob("step-*"))) == 2
    model = fit_with(rows, tmp_path, epochs=4, resume=folder, training=training)
    assert model.history.epoch.tolist() == [0, 1, 2, 3]
    assert model.history.loss.tolist()[:3] == earlier.history.loss.tolist()
    assert accuracy(model, rows) > 0.9
    ended = fit_with(rows, tmp_path, epochs=2, resume=str(folder), training=training)
    assert accuracy(ended, rows) > 0.9
    assert ended.history.equals(earlier.history)
    with pytest.raises((gw.GradwireError, OSError), match="there is no checkpoint in /nowhere"):
        fit_with(rows, tmp_path, resume="/nowhere", training=training)


def test_a_worker_that_stands_still_is_waited_for(rows: Any, tmp_path: Path) -> None:
    """For longer than the silence after which the transport usually takes a node for lost."""
    model = fit_with(rows, tmp_path, stop_at=18, stop_s=12.0)
    assert (tmp_path / "died").exists()
    assert model.history.epoch.tolist() == [0, 1, 2]
    assert model.history.steps.tolist() == [10, 10, 10], "nothing was repeated"


@pytest.mark.parametrize(
    "training",
    [SharedTraining(timeout_s=15.0), SharedTraining(timeout_s=15.0, workers_per_node=2)],
    ids=["nodes", "team"],
)
def test_a_worker_that_stops_for_good_is_named_and_training_goes_on_from_the_checkpoint(
    rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, training: Any
) -> None:
    caplog.set_level(logging.WARNING, "gradwire.spark")
    model = fit_with(rows, tmp_path, stop_at=18, training=training)
    assert model.history.epoch.tolist() == [0, 1, 2]
    assert model.history.steps.tolist() == [10, 10, 10]
    assert steps_taken(tmp_path) <= 2 * (18 + 30 - 14), "the checkpoint was after 14 of 30"
    [line] = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert line.startswith("attempt 1 of 4: ")
    assert re.search(r"worker 1 on [\d.]+", line)


def test_when_all_attempts_fail_the_error_is_one_line_with_the_worker_s_own(rows: Any) -> None:
    def loss() -> Any:
        from pyspark import TaskContext

        rank = TaskContext.get().partitionId()

        def value(outputs: Any, labels: Any) -> Any:
            import time

            import torch

            value.calls += 1
            if rank == 1 and value.calls == 3:
                time.sleep(1000.0)
            return torch.nn.functional.cross_entropy(outputs, labels)

        value.calls = 0
        return value

    estimator = make_estimator(loss=loss, retries=1, training=SharedTraining(timeout_s=10.0))
    with pytest.raises(gw.GradwireError, match="worker 1") as caught:
        estimator.fit(rows)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("place", ["loss", "optimizer"])
@pytest.mark.parametrize(
    "training",
    [SharedTraining(timeout_s=10.0, workers_per_node=2), ParameterAveraging(timeout_s=10.0)],
    ids=["team", "averaging"],
)
def test_a_worker_whose_own_code_hangs_is_named(rows: Any, training: Any, place: str) -> None:
    def hang_in_third_call(calls: list[int]) -> None:
        import time

        from pyspark import TaskContext

        calls.append(1)
        if TaskContext.get().partitionId() == 1 and len(calls) == 3:  # type: ignore[union-attr]
            time.sleep(1000.0)

    def loss() -> Any:
        import torch

        calls: list[int] = []

        def value(outputs: Any, labels: Any) -> Any:
            if place == "loss":
                hang_in_third_call(calls)
            return torch.nn.functional.cross_entropy(outputs, labels)

        return value

    def optimizer(params: Any) -> Any:
        import torch

        calls: list[int] = []
        made = torch.optim.SGD(params, lr=0.5)
        if place == "optimizer":
            made.register_step_pre_hook(lambda *_: hang_in_third_call(calls))
        return made

    estimator = make_estimator(loss=loss, optimizer=optimizer, retries=0, training=training)
    with pytest.raises(gw.GradwireError, match=r"worker 1.*on [\d.]+") as caught:
        estimator.fit(rows)
    assert str(caught.value).count("\n") == 0


def test_a_fit_after_a_fit_goes_on_where_the_last_one_ended(
    session: Any, rows: Any, tmp_path: Path
) -> None:
    """Without a break the same rows are taken in the same steps, so the parameters are the same bits."""
    if str(session.conf.get("spark.master", "")).startswith("local-cluster"):
        # Rows that are shuffled among several machines come in any order: let them lie where they are.
        rows = rows.repartition(2).cache()
    options: dict[str, Any] = {"checkpoint": f"file://{tmp_path}/warm"}
    whole = make_estimator(epochs=3).fit(rows)
    estimator = make_estimator(epochs=1, warm_start=True, **options)
    for epoch in range(3):
        model = estimator.fit(rows)
        assert model.history.epoch.tolist() == [epoch]
    assert all(
        torch.equal(value, whole.module().state_dict()[name])
        for name, value in model.module().state_dict().items()
    )
    assert estimator.copy().fit(rows).history.epoch.tolist() == [0]
    after = make_estimator(epochs=1, warm_start=True, **options)
    after.fit(rows, resume=model.checkpoint)
    assert after.fit(rows).history.epoch.tolist() == [3], "as after a driver that was killed"
    resumed = make_estimator(**options).fit(rows, {after.warm_start: True}, resume=model.checkpoint)
    assert resumed.history.epoch.tolist() == [2], "of the earlier fit, which had three"
    with pytest.raises(ValueError, match="warm_start needs checkpoint"):
        make_estimator(warm_start=True).fit(rows)


@pytest.mark.parametrize(("workers", "steps"), [(1, 19), (3, 7)])
def test_another_number_of_workers_goes_on_at_the_row(
    session: Any, rows: Any, tmp_path: Path, workers: int, steps: int
) -> None:
    """300 rows, 16 in a batch."""
    if workers > 2 and str(session.conf.get("spark.master", "")).startswith("local-cluster[2,1,"):
        pytest.skip("the cluster has two slots")
    folder = f"file://{tmp_path}/other"
    ended = make_estimator(epochs=2, checkpoint=folder).fit(rows)
    other = make_estimator(epochs=3, num_workers=workers, checkpoint=folder)
    model = other.fit(rows, resume=ended.checkpoint)
    assert model.history.epoch.tolist() == [2]
    assert model.history.steps.tolist() == [steps]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_single_worker_goes_on_through_spark_or_over_the_network(
    rows: Any, tmp_path: Path, is_first: bool
) -> None:
    """Both write the state of one process, the driver's or the worker's."""
    through_spark = ParameterAveraging(via="spark")
    ways = (through_spark, None) if is_first else (None, through_spark)
    options: dict[str, Any] = {"num_workers": 1, "checkpoint": f"file://{tmp_path}/single"}
    ended = make_estimator(training=ways[0], **options).fit(rows)
    other = make_estimator(epochs=3, training=ways[1], **options)
    model = other.fit(rows, resume=ended.checkpoint)
    assert model.history.epoch.tolist() == [2]


def test_a_fit_goes_on_with_other_teams(rows: Any, tmp_path: Path) -> None:
    folder = None
    for epochs, size in enumerate((2, 1, 2), start=1):
        training = SharedTraining(workers_per_node=size)
        estimator = make_estimator(epochs=epochs, training=training, checkpoint=tmp_path)
        model = estimator.fit(rows, resume=folder)
        folder = model.checkpoint
    assert model.history.epoch.tolist() == [0, 1, 2]
    assert accuracy(model, rows) > 0.9


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_local_steps_that_are_left_at_the_end_of_an_epoch_are_exchanged(
    rows: Any, mode: Any
) -> None:
    training = SharedTraining(every=1000, mode=mode, threshold=0.3)
    estimator = make_estimator(training=training, collect_stats=True)
    model = estimator.fit(rows)
    assert (model.history.sent_bytes > 0).all()
    torch.manual_seed(0)
    initial = torch.nn.Linear(4, 3)
    moved = model.module().weight - initial.weight
    assert moved.abs().max().item() > 0.1


def steps_taken(folder: Path) -> int:
    """Return the number of all workers' steps in `fit_with`, also of those that a lost worker took."""
    return (folder / "steps").stat().st_size


def fit_with(
    rows: Any,
    folder: Path,
    *,
    die_at: int = 0,
    stop_at: int = 0,
    stop_s: float = 0.0,
    epochs: int = 3,
    resume: str | Path | None = None,
    training: Any = None,
) -> Any:
    flag = str(folder / "died")
    steps = str(folder / "steps")

    def loss() -> Any:
        import subprocess
        import time

        import torch
        from pyspark import TaskContext

        def value(outputs: Any, labels: Any) -> Any:
            value.calls += 1
            with open(steps, "a") as file:
                file.write(".")
            if value.calls == die_at and not os.path.exists(flag):
                open(flag, "w").close()
                os._exit(1)
            rank = TaskContext.get().partitionId()
            if rank == 1 and value.calls == stop_at and not os.path.exists(flag):
                open(flag, "w").close()
                wake = f"sleep {stop_s}; kill -CONT {os.getpid()}" if stop_s else "true"
                subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; {wake}"])
                time.sleep(0.5)
            return torch.nn.functional.cross_entropy(outputs, labels)

        value.calls = 0
        return value

    checkpoint = f"file://{folder}/checkpoints"
    estimator = make_estimator(
        loss=loss, epochs=epochs, checkpoint=checkpoint, checkpoint_every=7, training=training
    )
    return estimator.fit(rows, resume=resume)


def failing_loss() -> Callable[[], Any]:
    def loss() -> Any:
        from pyspark import TaskContext

        if TaskContext.get().partitionId() == 1:
            raise RuntimeError("the disk of worker 1 is full")
        import torch

        return torch.nn.functional.cross_entropy

    return loss


def test_what_a_worker_raises_reaches_the_driver_at_once(
    rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        gw.GradwireError, match=r"(?s)worker 1 failed:.*the disk of worker 1 is full"
    ):
        make_estimator(loss=failing_loss()).fit(rows)
    assert "begins again" not in caplog.text, "the other worker has lost this one"


@pytest.mark.usefixtures("repeating")
def test_a_training_that_fails_leaves_the_executors(rows: Any) -> None:
    """Spark ends the executors of tasks that wait for each other if their job is cancelled."""

    def executors() -> set[str]:
        context = rows.sparkSession.sparkContext._jsc.sc()
        status = context.getExecutorMemoryStatus()
        names = status.keys().toSeq()
        return {names.apply(index) for index in range(names.size())}

    before = executors()
    for _ in range(2):
        with pytest.raises(gw.GradwireError, match="the disk of worker 1 is full"):
            make_estimator(loss=failing_loss()).fit(rows)
    time.sleep(3.0)  # for Spark to notice
    assert executors() == before
    assert accuracy(make_estimator().fit(rows), rows) > 0.9


def test_a_loss_that_is_not_finite_ends_training(rows: Any) -> None:
    def loss() -> Any:
        return lambda outputs, labels: (outputs.mean() + labels.sum()) * float("nan")

    with pytest.raises(gw.GradwireError, match="the loss is nan in step 0 of epoch 0"):
        make_estimator(loss=loss).fit(rows)


def test_what_the_model_cannot_take_is_told_with_shapes_and_types(rows: Any) -> None:
    with pytest.raises(
        gw.GradwireError,
        match=r"features torch.float32 \(16, 4\), label torch.float32.*cast their column to int",
    ):
        make_estimator().fit(rows.selectExpr("features", "double(label) label"))


def test_whole_labels_are_numbers_where_there_are_no_classes(rows: Any) -> None:
    def model() -> Any:
        import torch

        return torch.nn.Linear(4, 1)

    fitted = make_estimator(model=model, loss=torch.nn.BCEWithLogitsLoss).fit(
        rows.selectExpr("features", "int(label > 1) label")
    )
    assert fitted.history.loss.iloc[-1] < 0.3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("slice(x, 1, 3)", "not [34] values, as in the first row, in"),
        ("cast(null as array<float>)", "null in None"),
        ("cast(array() as array<float>)", r"no values in \[\]"),
        ("transform(x, (value, i) -> if(i = 2, null, value))", "null in"),
        ("transform(x, (value, i) -> if(i = 2, float('nan'), value))", "NaN or infinity in"),
    ],
)
def test_a_bad_row_is_named_with_its_column(rows: Any, change: str, text: str) -> None:
    good = rows.selectExpr("features x", "label")
    bad = good.selectExpr(f"if(rand(1) < 0.05, {change}, x) x", "label")
    estimator = make_estimator(features_col="x")
    with pytest.raises(gw.GradwireError, match=rf"row \d+ of worker \d, column 'x': {text}"):
        estimator.fit(bad)
    if "nan" in change:
        model = estimator.copy({estimator.num_workers: 1, estimator.epochs: 1}).fit(good)
        with pytest.raises(Exception, match=rf"row \d+ of partition \d, column 'x': {text}"):
            model.transform(bad).collect()


@pytest.mark.parametrize("via", ["udp", "spark"])
def test_a_row_that_may_be_for_validation_or_not_is_refused(rows: Any, via: Any) -> None:
    bad = rows.selectExpr("features", "label", "if(rand(1) < 0.05, null, held) held")
    estimator = make_estimator(
        validation_indicator_col="held", training=ParameterAveraging(via=via)
    )
    with pytest.raises(gw.GradwireError, match=r"row \d+ of worker \d, column 'held': null"):
        estimator.fit(bad)


def test_negative_weights_are_refused(rows: Any) -> None:
    with pytest.raises(gw.GradwireError, match="column 'weight': a negative weight in -1"):
        make_estimator(weight_col="weight").fit(rows.selectExpr("features", "label", "-1 weight"))


def test_a_folder_for_checkpoints_that_cannot_be_made_is_an_error_before_training(
    rows: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(gw.GradwireError, match="file/folder"):
        make_estimator(checkpoint=f"{tmp_path}/file/folder").fit(rows)


def test_wrong_columns_and_options_are_refused_before_anything_is_started(rows: Any) -> None:
    for options, error, text in (
        ({"features_col": "label"}, TypeError, "column 'label', for features, has type int"),
        ({"label_col": None}, TypeError, "label_col is None, must name a column"),
        ({"features_col": None}, TypeError, "features_col is None, must name a column"),
        ({"features_col": []}, TypeError, r"features_col is \[\], must name a column"),
        ({"weight_col": 3}, TypeError, "weight_col is 3, must name a column"),
        ({"weight_col": ["label"]}, TypeError, r"weight_col is \['label'\], must name a column"),
        ({"label_col": "missing"}, ValueError, "there is no column 'missing' for label"),
        ({"features_col": "struct.label"}, ValueError, r"select it first.*col\('struct.label'\)"),
        ({"features_col": ["features"]}, TypeError, "must be a number"),
        ({"features_col": "nested"}, TypeError, r"or a vector \(flatten\(...\) makes one of it"),
        ({"validation_indicator_col": "label"}, TypeError, "it must be boolean"),
        ({"patience": 2}, ValueError, "patience needs validation_indicator_col"),
        (
            {"prediction_col": "label"},
            ValueError,
            "prediction_col is 'label', which is a column of the DataFrame already",
        ),
        ({"raw_prediction_col": "Features"}, ValueError, "raw_prediction_col is 'Features', which"),
        ({"probability_col": "prediction"}, ValueError, "which is prediction_col already"),
        ({"num_workers": 0}, ValueError, "num_workers must be a whole number of at least 1, got 0"),
        ({"retries": -1}, ValueError, "retries must be a whole number of at least 0, got -1"),
        ({"batch_size": 32.0}, ValueError, "batch_size must be a whole number"),
        ({"seed": 2**63}, ValueError, f"seed must be 0 to {2**63 - 1}, got {2**63}"),
        ({"checkpoint": "hdfs:/x"}, ValueError, "'hdfs:/x' has one slash .*, as in hdfs:///folder"),
        ({"epochs": True}, ValueError, "epochs must be a whole number"),
        ({"shuffle": "never"}, ValueError, "shuffle is 'never', must be one of auto, always"),
        ({"warm_start": "no"}, TypeError, "warm_start must be True or False"),
        ({"collect_stats": 1}, TypeError, "collect_stats must be True or False"),
        ({"checkpoint": 3}, TypeError, "expected str, bytes or os.PathLike object, not int"),
        ({"limits": 3}, TypeError, "limits is 3, must be gradwire.transport.Limits"),
        ({"model": None}, TypeError, "model is of type NoneType, must be a function"),
        ({"loss": torch.nn.MSELoss()}, TypeError, "loss is of type MSELoss, must be a function"),
        (
            {"loss": torch.nn.functional.cross_entropy},
            TypeError,
            r"loss is a function of \(input: .*missing .* 'input'.*such as loss=lambda: \.\.\.",
        ),
        ({"model": torch.nn.Linear}, TypeError, r"model is a function of \(in_features: int"),
        (
            {"optimizer": lambda: None},
            TypeError,
            r"optimizer is a function of \(\) .*such as optimizer=lambda params: \.\.\.",
        ),
        ({"loss": threading.Lock().acquire}, TypeError, "loss cannot be sent to the workers"),
        ({"training": "shared"}, TypeError, "must be SharedTraining or ParameterAveraging"),
        (
            {"num_workers": 99},
            ValueError,
            r"num_workers is 99, and the cluster has (\d+|too few) slots",
        ),
    ):
        with pytest.raises(error, match=text):
            make_estimator(**options).fit(
                rows.selectExpr("*", "array(features) nested", "struct(label) struct")
            )
    with pytest.raises(TypeError, match="unknown options"):
        make_estimator(worker=3)
    with pytest.raises(
        TypeError, match=r"dataset is a builtins\.list, must be a DataFrame of Spark"
    ):
        make_estimator().fit([1, 2])
    with pytest.raises(TypeError, match=r"dataset is a builtins\.list, must be a DataFrame of"):
        gradwire.spark.TorchModel().transform([1, 2])
    model = gradwire.spark.TorchModel()
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        model.transform(rows, {model.batch_size: 0})
    with pytest.raises(gw.GradwireError, match="there is no checkpoint in"):
        make_estimator().fit(rows, resume="")


def test_every_option_of_the_estimator_is_declared_and_has_a_default() -> None:
    from gradwire.spark.estimator import _ESTIMATOR, EstimatorOptions, TorchEstimator

    assert sorted(EstimatorOptions.__annotations__) == sorted(_ESTIMATOR)
    for name in _ESTIMATOR:
        assert f"\n        {name}: " in TorchEstimator.__doc__


def sockets() -> int:
    """Return the number of this process's UDP sockets."""
    inodes = {
        line.split()[9]
        for name in ("udp", "udp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    }
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(path))
    return sum(link in links for link in {f"socket:[{inode}]" for inode in inodes})


@pytest.mark.parametrize("how", ["interruptAll", "cancelAllJobs"])
@pytest.mark.parametrize(
    "training", [None, ParameterAveraging(via="spark")], ids=["shared", "via spark"]
)
def test_a_cancelled_training_ends_with_one_line_and_leaves_nothing(
    session: Any, rows: Any, caplog: pytest.LogCaptureFixture, training: Any, how: str
) -> None:
    if how == "cancelAllJobs" and not hasattr(session, "_jsc"):
        pytest.skip("Spark Connect has no context")
    cancel = getattr(session if how == "interruptAll" else session.sparkContext, how)
    caplog.set_level(logging.INFO, "gradwire.spark")
    estimator = make_estimator(epochs=100_000, training=training)
    errors: list[Exception] = []
    sockets_before = sockets()

    def fit() -> None:
        try:
            estimator.fit(rows)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    wait_until(lambda: "epoch 0: " in caplog.text)
    caplog.clear()
    end_s = time.monotonic() + 60.0
    while (
        thread.is_alive() and time.monotonic() < end_s
    ):  # between two jobs there is none to cancel
        cancel()
        thread.join(1.0)
    [error] = errors
    assert isinstance(error, gw.GradwireError)
    assert str(error).startswith("Spark's job was cancelled: ")
    assert str(error).count("\n") == 0
    assert "attempt" not in caplog.text, "nothing begins again"
    assert not [one.name for one in threading.enumerate() if one.name.startswith("gradwire")]
    assert sockets() == sockets_before
    assert accuracy(make_estimator().fit(rows), rows) > 0.9, "the slots are free"


def wait_until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120.0
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.usefixtures("repeating")
def test_executors_that_are_lost_for_good_end_a_fit_which_others_resume(
    rows: Any, spark: Any, tmp_path: Path
) -> None:
    context = spark._jsc.sc()
    ids = context.getExecutorIds()
    workers = ids.size()

    def lose_an_executor() -> None:
        wait_until(lambda: bool(list(tmp_path.glob("*/latest.json"))))
        context.killExecutor(ids.apply(0))  # and start no other

    thread = threading.Thread(target=lose_an_executor)
    thread.start()
    options = {"num_workers": workers, "checkpoint": f"file://{tmp_path}", "checkpoint_every": 7}
    training = SharedTraining(timeout_s=15.0)
    with pytest.raises(gw.GradwireError, match=f"num_workers is {workers}, and the cluster has"):
        make_estimator(training=training, epochs=100_000, **options).fit(rows)
    thread.join()
    [folder] = tmp_path.iterdir()
    context.requestTotalExecutors(workers, 0, spark._jvm.scala.Predef.Map().empty())
    profile = context.resourceProfileManager().defaultResourceProfile()
    wait_until(lambda: context.maxNumConcurrentTasks(profile) == workers)
    model = make_estimator(epochs=1, **options).fit(rows, resume=folder)
    assert accuracy(model, rows) > 0.9


@pytest.mark.usefixtures("repeating")
def test_a_model_predicts_though_an_executor_dies(rows: Any, tmp_path: Path) -> None:
    fitted = make_estimator(epochs=1).fit(rows)
    flag = str(tmp_path / "died")

    def model() -> Any:
        import signal

        import torch

        if not os.path.exists(flag):
            open(flag, "w").close()
            daemon = os.getppid()
            stat = Path(f"/proc/{daemon}/stat").read_text()
            os.kill(int(stat.rpartition(") ")[2].split()[1]), signal.SIGKILL)
        return torch.nn.Linear(4, 3)

    def predictions() -> list[float]:
        data = fitted.transform(rows).orderBy("features")
        return [row.prediction for row in data.collect()]

    expected = predictions()
    fitted.set(fitted.model, model)
    assert predictions() == expected
    assert Path(flag).exists()
