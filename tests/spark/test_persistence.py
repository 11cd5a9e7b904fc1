"""Saved estimators and models: what is data comes back as data, and no file runs code unasked."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.spark import ParameterAveraging, SharedTraining
from gradwire.transport import Limits

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.torch]
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyspark", reason="pyspark is not installed")

ROWS = [{"epoch": 0, "loss": 0.5, "validation_loss": math.nan, "rows": 3, "worker": 1}]


class Traced:
    """A function that makes a module; whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> Any:
        return torch.nn.Linear(4, 3)

    def __reduce__(self) -> Any:
        return _unpickled, (str(self.path),)


def _unpickled(path: str) -> Any:
    Path(path).touch()
    return lambda: __import__("torch").nn.Linear(4, 3)


def make_model(function: Callable[[], Any], **tensors: Any) -> Any:
    from gradwire.spark import TorchModel
    from gradwire.spark.checkpoints import pack

    model = TorchModel()
    model._set(model=function, features_col=["a", "b", "c", "d"], batch_size=7)
    model.state = pack({**function().state_dict(), **tensors})
    model.rows, model.checkpoint = ROWS, "memory://checkpoints"
    return model


@pytest.fixture
def traced(tmp_path: Path) -> Traced:
    import sys

    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return Traced(tmp_path / "unpickled")


def test_a_loaded_model_has_its_data_and_runs_no_code_until_asked(
    session: Any, tmp_path: Path, traced: Traced
) -> None:
    from gradwire.spark import TorchModel, trust_code

    saved = make_model(traced)
    saved.save(f"{tmp_path}/model")
    loaded = TorchModel.load(f"{tmp_path}/model")
    rows = session.createDataFrame([(1.0, 2.0, 3.0, 4.0)], "a float, b float, c float, d float")
    for use in (loaded.module, lambda: loaded.transform(rows), lambda: loaded.save("anywhere")):
        with pytest.raises(ValueError, match=r"without model.*with gradwire.spark.trust_code\(\)"):
            use()
    assert not traced.path.exists()
    assert (loaded.getOrDefault("features_col"), loaded.getOrDefault("batch_size")) == (
        ["a", "b", "c", "d"],
        7,
    )
    assert str(loaded.rows) == str(ROWS)
    assert loaded.checkpoint == "memory://checkpoints"
    loaded.set(loaded.model, lambda: torch.nn.Linear(4, 3))
    assert torch.equal(loaded.module().weight, saved.module().weight)
    assert loaded.transform(rows).count() == 1
    assert not traced.path.exists()
    with trust_code():
        trusting = TorchModel.load(f"{tmp_path}/model")
    assert traced.path.exists()
    assert torch.equal(trusting.module().weight, saved.module().weight)
    traced.path.unlink()
    TorchModel.load(f"{tmp_path}/model")
    assert not traced.path.exists()


class OwnPolicy:
    sample_density = None
    initial = 0.5

    def next_threshold(self, threshold: float, *_: Any) -> float:
        return threshold


@pytest.mark.parametrize(
    "training",
    [
        SharedTraining(every=15, outer_momentum=0.0, timeout_s=math.inf, start_timeout_s=5.0),
        SharedTraining(
            threshold=gw.StepThreshold(), shakeup=gw.ShakeUp(every=7), clip=gw.ResidualClip()
        ),
        SharedTraining(threshold=gw.TargetBytes(9_000), mode="async", max_staleness=np.int64(3)),
        ParameterAveraging(every=3, via="spark"),
    ],
    ids=str,
)
def test_every_option_of_an_estimator_comes_back(
    session: Any, tmp_path: Path, traced: Traced, training: Any
) -> None:
    from gradwire.spark import TorchEstimator, trust_code

    options = {
        "features_col": "x",
        "training": training,
        "limits": Limits(message_bytes_max=1 << 20),
        "warm_start": True,
        "weight_col": None,
        "shuffle": "always",
    }
    estimator = TorchEstimator(
        model=traced, optimizer=torch.optim.SGD, loss=torch.nn.MSELoss, **options
    )
    estimator.save(f"{tmp_path}/estimator")
    loaded = TorchEstimator.load(f"{tmp_path}/estimator")
    assert {name: loaded.getOrDefault(name) for name in options} == options
    with pytest.raises(ValueError, match="without loss, model, optimizer, as these are code"):
        loaded.fit(session.range(1))
    assert not traced.path.exists()
    with trust_code():
        assert TorchEstimator.load(f"{tmp_path}/estimator").getOrDefault("loss")
    assert traced.path.exists()


@pytest.mark.usefixtures("session")
def test_options_may_be_numbers_of_numpy_and_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They become numbers and texts, which JSON and Java know."""
    from gradwire.spark import TorchEstimator

    monkeypatch.chdir(tmp_path)
    functions = {"model": dict, "optimizer": torch.optim.SGD, "loss": torch.nn.MSELoss}
    numbers: Any = {"epochs": np.int64(3), "warm_start": np.True_}
    estimator = TorchEstimator(
        training=ParameterAveraging(), checkpoint=Path("checkpoints"), **functions, **numbers
    )
    estimator.set(estimator.batch_size, np.int32(8))
    copied = estimator.copy({estimator.seed: np.uint8(5)})
    job = copied._job(copied)  # type: ignore[arg-type]
    assert str([job.epochs, job.is_warm, job.batch_size, job.seed]) == "[3, True, 8, 5]"
    assert str(job.checkpoints.folder).startswith(f"{tmp_path}/checkpoints/TorchEstimator_")


def test_a_policy_of_one_s_own_is_code(session: Any, tmp_path: Path) -> None:
    from gradwire.spark import TorchEstimator, trust_code

    estimator = TorchEstimator(training=SharedTraining(threshold=OwnPolicy()), epochs=3)
    estimator.save(f"{tmp_path}/estimator")
    with pytest.raises(ValueError, match="without training"):
        TorchEstimator.load(f"{tmp_path}/estimator").fit(session.range(1))
    with trust_code():
        loaded = TorchEstimator.load(f"{tmp_path}/estimator")
    assert loaded.getOrDefault("training").threshold.initial == 0.5
    assert loaded.getOrDefault("epochs") == 3


def test_pipelines_and_cross_validation_are_saved_and_loaded(session: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    from gradwire.spark import TorchEstimator, trust_code

    rng = np.random.default_rng(5)
    labels = rng.integers(2, size=80)
    points = rng.standard_normal((80, 2)) + 4.0 * np.eye(2)[labels]
    rows = session.createDataFrame(
        [(float(a), float(b), int(label)) for (a, b), label in zip(points, labels, strict=True)],
        "a double, b double, label int",
    )
    estimator = TorchEstimator(
        model=lambda: torch.nn.Linear(2, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        loss=torch.nn.CrossEntropyLoss,
        features_col="vector",
        num_workers=1,
    )
    pipeline = Pipeline(
        stages=[VectorAssembler(inputCols=["a", "b"], outputCol="vector"), estimator]
    )
    tuned = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build(),
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
    ).fit(rows)
    tuned.save(f"{tmp_path}/tuned")
    tuned.bestModel.save(f"{tmp_path}/best")
    expected = tuned.transform(rows).select("prediction").collect()
    with trust_code():
        validated = CrossValidatorModel.load(f"{tmp_path}/tuned")
        best = PipelineModel.load(f"{tmp_path}/best")
    for loaded in (validated, best):
        assert loaded.transform(rows).select("prediction").collect() == expected
    data = PipelineModel.load(f"{tmp_path}/best")
    with pytest.raises(ValueError, match="loaded without model"):
        data.transform(rows)
    stage = data.stages[-1]
    stage.set(stage.model, lambda: torch.nn.Linear(2, 2))
    assert data.transform(rows).select("prediction").collect() == expected


# ---- files that somebody has changed ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("session")
def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    from gradwire.spark import TorchModel
    from gradwire.spark.checkpoints import unpack

    tensors = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(5),
        "truth": torch.tensor([True, False]),
        "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "mask": torch.tensor([0.0, -math.inf]),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "large": torch.arange(3_000_000, dtype=torch.int64),
    }
    make_model(lambda: torch.nn.Linear(4, 3), **tensors).save(f"{tmp_path}/model")
    state = unpack(TorchModel.load(f"{tmp_path}/model").state)
    assert list(state) == ["weight", "bias", *tensors]
    for name, tensor in tensors.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("value", [torch.tensor([math.nan]), "text", torch.eye(2).to_sparse()])
def test_what_is_no_number_is_not_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="'extra'"):
        make_model(lambda: torch.nn.Linear(4, 3), extra=value).save(f"{tmp_path}/model")


@pytest.mark.usefixtures("session")
def test_what_cannot_be_saved_does_not_cost_what_it_would_overwrite(
    tmp_path: Path, traced: Traced
) -> None:
    from gradwire.spark import TorchEstimator, TorchModel

    path = f"{tmp_path}/model"
    model = make_model(traced)
    model.save(path)
    without_code = TorchModel.load(path)
    with_nan = make_model(traced, extra=torch.tensor([math.nan]))
    lock = threading.Lock()
    with_lock = TorchEstimator(model=lambda: lock)
    for other, error in (
        (without_code, ValueError),
        (with_nan, ValueError),
        (with_lock, TypeError),
    ):
        with pytest.raises(error):
            other.write().overwrite().save(path)
        assert TorchModel.load(path).state == model.state


@pytest.mark.usefixtures("session")
def test_with_spark_connect_an_earlier_save_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradwire.spark import TorchModel

    path = f"{tmp_path}/model"
    model = make_model(lambda: torch.nn.Linear(4, 3))
    model.save(path)
    monkeypatch.setattr("gradwire.spark.persistence.is_connect", lambda _: True)
    with pytest.raises(ValueError, match=rf"cannot overwrite what is saved in {path}: save to"):
        model.write().overwrite().save(path)
    assert TorchModel.load(path).state == model.state


@pytest.fixture(scope="module")
def saved(session: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    make_model(lambda: torch.nn.Linear(4, 3)).write().session(session).save(str(path))
    return path


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], str]:
    def changed(metadata: dict[str, Any]) -> str:
        change(metadata)
        return json.dumps(metadata)

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda _: "[" * 100_000,
        lambda _: "",
        lambda _: "[]",
        lambda _: "{}",
        _header(lambda data: data.pop("gradwire")),
        _header(lambda data: data["gradwire"].update(format=2)),
        _header(lambda data: data["gradwire"].update(more=1)),
        _header(lambda data: data["gradwire"].update(code=["uid"])),
        _header(lambda data: data["gradwire"]["attached"].update(more=1)),
        _header(lambda data: data["gradwire"]["attached"].update(rows=7)),
        _header(lambda data: data["gradwire"]["attached"].update(rows=[{"epoch": []}])),
        _header(lambda data: data["gradwire"]["attached"].update(checkpoint=["a"])),
        _header(lambda data: data["paramMap"].update(batch_size="7")),
        _header(lambda data: data["paramMap"].update(batch_size=math.nan)),
        _header(lambda data: data["paramMap"].update(features_col=[1])),
        _header(lambda data: data["paramMap"].update(model="os.system")),
        _header(lambda data: data["paramMap"].update(unknown=1)),
        _header(lambda data: data["paramMap"].update(device={"Popen": {"args": "true"}})),
        _header(lambda data: data["paramMap"].update(device={"ShakeUp": {"every": -1}})),
    ],
)
def test_a_changed_header_is_refused(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Any]], str]
) -> None:
    from gradwire.spark import TorchModel, trust_code

    shutil.copytree(saved, tmp_path / "model")
    [path] = (tmp_path / "model" / "metadata").glob("part-*")
    text = change(json.loads(path.read_text()))
    for file in (tmp_path / "model" / "metadata").iterdir():
        file.unlink()
    path.write_text(text)
    with trust_code(), pytest.raises(ValueError, match="is no saved TorchModel"):
        TorchModel.load(f"{tmp_path}/model")


COLUMNS = "tensor int, name string, dtype string, shape array<bigint>, part int, data binary"
FOUR = bytes(4)


@pytest.mark.parametrize(
    ("rows", "columns", "match"),
    [
        ([(0, "w", "float32", [2], 0, FOUR)], COLUMNS, r"has 4 bytes, float32\[2\] 8"),
        ([(0, "w", "float32", [0], 0, FOUR)], COLUMNS, "do not fit"),
        ([(0, "w", "float32", [2**40, 2**40], 0, FOUR)], COLUMNS, "has 4 bytes"),
        ([(0, "w", "float32", [-1], 0, FOUR)], COLUMNS, "shape"),
        ([(0, None, "float32", [1], 0, FOUR)], COLUMNS, "unknown kind"),
        ([(0, "w", "float32", [1] * 65, 0, FOUR)], COLUMNS, "unknown kind"),
        ([(0, "w", "object", [1], 0, FOUR)], COLUMNS, "unknown kind: object"),
        ([(0, "w", "float32", [1], 0, b"\0\0\xc0\x7f")], COLUMNS, "NaN"),
        ([(0, "w", "bool", [4], 0, b"\0\1\2\0")], COLUMNS, "truth values"),
        ([(0, "w", "float32", [1], 1, FOUR)], COLUMNS, "do not fit"),
        ([(1, "w", "float32", [1], 0, FOUR)], COLUMNS, "do not fit"),
        ([(0, "w", "float32", [1], 0, FOUR), (1, "w", "float32", [1], 0, FOUR)], COLUMNS, "repea"),
        ([(0, "w", "float32", [2], part, FOUR) for part in (0, 0)], COLUMNS, "do not fit"),
        ([(0, "w", "float32", [2], 0, FOUR), (0, "v", "float32", [2], 1, FOUR)], COLUMNS, "do not"),
        ([(0, "w", "float32", [1], 0, None)], COLUMNS, "no saved TorchModel"),
        ([(0, "w", "float32", None, 0, FOUR)], COLUMNS, "no saved TorchModel"),
        ([(0, None, "float32", [1], 0, FOUR, 1)], f"{COLUMNS}, more int", "has the columns"),
        ([(0, b"a pickle")], "part int, data binary", "has the columns"),
    ],
)
def test_changed_tensors_are_refused(
    session: Any, saved: Path, tmp_path: Path, rows: list[Any], columns: str, match: str
) -> None:
    from gradwire.spark import TorchModel

    shutil.copytree(saved, tmp_path / "model")
    frame = session.createDataFrame(rows, columns)
    frame.write.mode("overwrite").parquet(f"{tmp_path}/model/tensors")
    with pytest.raises(ValueError, match=f"is no saved TorchModel.*{match}|{match}"):
        TorchModel.load(f"{tmp_path}/model")
