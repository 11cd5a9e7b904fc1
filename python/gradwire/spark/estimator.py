"""An estimator of `pyspark.ml` that trains a torch model on all executors, and the model that it gives."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from pyspark import cloudpickle
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params
from pyspark.sql import functions as F  # noqa: N812

from ..clock import sleep
from ..errors import GradwireError
from ..policy import whole
from ..state import check_flag
from ..transport import Limits, generate_secret, parse_secret
from . import data, rounds
from .checkpoints import Checkpoints, unpack
from .history import History
from .persistence import Stored
from .progress import Progress, report_epoch
from .session import (
    Parcel,
    WorkerTraceback,
    cancel,
    check_runs,
    check_slots,
    gpus_of_executor,
    is_connect,
    keeping_slots,
    result_bytes_max,
    tagged,
    told_in_one_line,
)
from .strategies import ParameterAveraging, SharedTraining
from .train import OUTPUT, TrainingJob, device_of, rank_of_task, train

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Unpack

__all__ = ["EstimatorOptions", "TorchEstimator", "TorchModel"]

_LOG = logging.getLogger("gradwire.spark")

# Of a part of the results on its way to the driver: larger results of tasks go through the block managers, which copy
# them, and get lost where a driver of 1 GB has no space for them.
_PART_BYTES = 1 << 20
_PARTS_MIN = 4
_PARTS_UNKNOWN = 256
# In which Spark notices that executors have ended with a job. Another training, now or by the next fit, waits for those
# that replace them; if it began with too few, Spark 4.3 would stop the whole session.
_SETTLE_S = 2.0
_SEED_MAX = 2**63 - 1  # of Java's random numbers
_LOCAL = ("file", "local")  # fsspec takes file:/folder for a URL


class ModelOptions(TypedDict, total=False):
    """The options of a `TorchEstimator` that its models take over."""

    model: Callable[[], torch.nn.Module] | None
    features_col: str | list[str]
    prediction_col: str
    raw_prediction_col: str | None
    probability_col: str | None
    batch_size: int
    device: str


class EstimatorOptions(ModelOptions, total=False):
    """The options of a `TorchEstimator`, which explains them."""

    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    loss: Callable[[], Callable[..., torch.Tensor]] | None
    label_col: str | list[str]
    weight_col: str | None
    validation_indicator_col: str | None
    num_workers: int
    epochs: int
    seed: int
    training: SharedTraining | ParameterAveraging | None
    patience: int
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int
    warm_start: bool
    retries: int
    limits: Limits | None
    shuffle: Literal["auto", "always"]
    collect_stats: bool


# Options that the model takes from its estimator, and their defaults.
_BOTH: dict[str, Any] = {
    "model": None,
    "features_col": "features",
    "prediction_col": "prediction",
    "raw_prediction_col": None,
    "probability_col": None,
    "batch_size": 64,
    "device": "auto",
}
_ESTIMATOR: dict[str, Any] = {
    **_BOTH,
    "optimizer": None,
    "loss": None,
    "label_col": "label",
    "weight_col": None,
    "validation_indicator_col": None,
    "num_workers": 2,
    "epochs": 1,
    "seed": 0,
    "training": None,
    "patience": 0,
    "checkpoint": None,
    "checkpoint_every": 1000,
    "warm_start": False,
    "retries": 3,
    "limits": None,
    "shuffle": "auto",
    "collect_stats": False,
}

# The options that name columns of predictions, and what the function that predicts gives for them.
_OUTPUTS = {
    "prediction_col": "prediction double",
    "raw_prediction_col": "raw array<float>",
    "probability_col": "probability array<float>",
}
_ROLES = {
    data.FEATURES: "features_col",
    data.LABEL: "label_col",
    data.WEIGHT: "weight_col",
    data.VALIDATION: "validation_indicator_col",
}


class TorchEstimator(Estimator["TorchModel"], Stored):
    """Trains a torch model on the executors of a Spark cluster.

    ``model``, ``optimizer`` and ``loss`` are functions that the workers call: each makes its own copy, with the same
    initial parameters. Rows are spilled to the executors' disks. Every worker takes ceil(rows / (workers × batch_size))
    steps per epoch: a worker with more rows continues next time where it stopped, one with fewer begins again, and one
    without rows adds gradients of zero.

    Args:
        model: function without arguments that returns the module.
        optimizer: function of the parameters that returns the optimiser.
        loss: function without arguments, or a class, that returns the loss of (outputs, labels). With
            ``weight_col`` the loss returns one value per row (``reduction="none"``).
        features_col: a column of arrays or vectors, or a list of columns of numbers; float32 for the model.
        label_col: a column of whole numbers (int64 for the loss), other numbers, arrays or vectors (float32), or a list
            of columns of numbers (float32).
        weight_col: a column of the rows' weights.
        validation_indicator_col: a boolean column; true: not for training.
        prediction_col: for the model's prediction: the output, or with several outputs the index of the largest.
        raw_prediction_col: for the vector of outputs.
        probability_col: for the vector of their softmax.
        num_workers: tasks that train at the same time; the cluster needs so many free slots.
        batch_size: rows in each worker's batch.
        epochs: passes over the rows.
        seed: of initial parameters and order.
        device: "auto" takes the GPU that Spark assigned to the task, or the CPU.
        training: `SharedTraining` (the default) or `ParameterAveraging`.
        patience: epochs without a better validation loss before training stops; the best model is returned then.
        checkpoint: a folder, any fsspec URL that all executors reach: training continues from there after an executor
            was lost. Every fit has a folder of its own there, `TorchModel.checkpoint`.
        checkpoint_every: steps between checkpoints; the end of a fit is one, too.
        warm_start: each fit of this object goes on where its last one ended, with the optimisers' state, for ``epochs``
            more; needs ``checkpoint``. A copy, such as one of cross validation, begins anew.
        retries: how often the training begins again, at the last checkpoint, when a worker dies, is unreachable or
            stands still for longer than the training's ``timeout_s``. Spark itself gives up after
            ``spark.stage.maxConsecutiveAttempts`` (4) attempts.
        limits: of the workers' nodes, such as ``Limits(message_bytes_max=...)``; ``down_s`` is at least ``timeout_s``.
        shuffle: "auto": the rows of a cached DataFrame are trained on where they lie, if there is one partition for
            each worker, their numbers of rows are within 5 % of their mean, and their labels are spread alike; others
            are assigned to the workers at random, over the network. "always": all are.
        collect_stats: keep every worker's times and bytes in ``model.history``.

    **A saved estimator is loaded without its functions, unless within** `trust_code`: they are code from the file.
    """

    _options = EstimatorOptions

    def __init__(self, **options: Unpack[EstimatorOptions]) -> None:
        super().__init__()
        unknown = options.keys() - _ESTIMATOR.keys()
        if unknown:
            raise TypeError(f"unknown options {sorted(unknown)}; there are {', '.join(_ESTIMATOR)}")
        self._setDefault(**_ESTIMATOR)
        self._set(**options)
        self._resume: str | None = None
        self._last_checkpoint: str | None = None

    def fit(
        self, dataset: Any, params: Any = None, *, resume: str | os.PathLike[str] | None = None
    ) -> Any:
        """Train.

        Args:
            dataset: a DataFrame.
            params: parameters that override the estimator's, or a list of such, as for every estimator.
            resume: folder with the checkpoints of an earlier fit (`TorchModel.checkpoint`), which this fit continues
                until there are ``epochs`` altogether, with its history and its best model.

        Raises:
            GradwireError: a worker failed; the error has its traceback.
            ValueError, TypeError: a parameter or column is wrong.
        """
        if resume is not None:
            continued = self.copy()
            continued._resume = os.fspath(resume)
            model = continued.fit(dataset, params)
            self._last_checkpoint = continued._last_checkpoint or self._last_checkpoint
            return model
        return super().fit(dataset, params)

    def copy(self, extra: Any = None) -> TorchEstimator:
        """Return a copy with other parameters, which does not continue the fits of this object."""
        copied = super().copy(extra)
        copied._last_checkpoint = None
        return copied

    def _fit(self, dataset: DataFrame) -> TorchModel:
        spark = _session_of(dataset)
        workers = self.getOrDefault("num_workers")
        job = self._job(spark)
        rows = self._rows(dataset)
        through_spark = isinstance(job.training, ParameterAveraging) and job.training.via == "spark"
        with told_in_one_line(spark), job.checkpoints.named_on_failure():
            if not through_spark:
                check_slots(spark, workers)
            if (
                self.getOrDefault("shuffle") == "auto"
                and _are_spread(dataset, rows, workers)
                and (through_spark or _may_begin_barrier(rows))
            ):
                job = replace(job, is_shuffled=False)
            if through_spark:
                with tagged(spark, f"{self.uid}-{secrets.token_hex(4)}"):
                    dealt = self._dealt(rows) if job.is_shuffled else rows
                    history, state = rounds.fit(job, dealt, workers, report_epoch)
            else:
                history, state = self._run(spark, job, rows)
        model = TorchModel()
        model._set(**{name: self.getOrDefault(name) for name in _BOTH})
        model.state = state
        model.checkpoint = self._last_checkpoint = job.checkpoints.folder
        model.rows = history if self.getOrDefault("collect_stats") else _without_workers(history)
        return model._resetUid(self.uid)

    def _job(self, spark: SparkSession) -> TrainingJob:
        self.check_code()
        values = {name: self.getOrDefault(name) for name in _ESTIMATOR}
        for name, arguments in (("model", ""), ("optimizer", "params"), ("loss", "")):
            call = f"lambda {arguments}".strip()
            example = f"with which each worker makes its own, such as {name}={call}: ..."
            if not callable(values[name]) or isinstance(values[name], torch.nn.Module):
                kind = type(values[name]).__name__
                raise TypeError(f"{name} is of type {kind}, must be a function {example}")
            with contextlib.suppress(ValueError):  # a function of C has no signature
                signature = inspect.signature(values[name])
                try:
                    signature.bind(*arguments.split())
                except TypeError as error:
                    raise TypeError(
                        f"{name} is a function of {signature} ({error}), must be one {example}"
                    ) from None
            try:
                cloudpickle.dumps(values[name])
            except Exception as error:
                raise TypeError(
                    f"{name} cannot be sent to the workers ({error}): create such objects inside the function"
                ) from error
        for name in _ROLES.values():
            value = values[name]
            may_be_several = name in ("features_col", "label_col")
            if value is None and not may_be_several:
                continue
            kinds = (str, list, tuple) if may_be_several else str
            if not isinstance(value, kinds) or not value:
                raise TypeError(f"{name} is {value!r}, must name a column")
        for name in ("num_workers", "batch_size", "epochs", "checkpoint_every"):
            whole(name, values[name], least=1)
        for name in ("patience", "retries", "seed"):
            whole(name, values[name], least=0)
        if values["seed"] > _SEED_MAX:
            raise ValueError(f"seed must be 0 to {_SEED_MAX}, got {values['seed']}")
        for name in ("warm_start", "collect_stats"):
            check_flag(name, values[name])
        training = values["training"] or SharedTraining()
        if not isinstance(training, (SharedTraining, ParameterAveraging)):
            raise TypeError(
                f"training is {training!r}, must be SharedTraining or ParameterAveraging"
            )
        size = 1
        if isinstance(training, SharedTraining):
            size = training.workers_per_node or max(1, gpus_of_executor(spark))
        if not isinstance(values["limits"], (Limits, NoneType)):
            raise TypeError(
                f"limits is {values['limits']!r}, must be gradwire.transport.Limits(...)"
            )
        if values["shuffle"] not in ("auto", "always"):
            raise ValueError(f"shuffle is {values['shuffle']!r}, must be one of auto, always")
        if values["patience"] and values["validation_indicator_col"] is None:
            raise ValueError("patience needs validation_indicator_col")
        checkpoint = values["checkpoint"]
        if checkpoint is not None:
            # A folder of its own: two fits with the same parameters do not meet.
            checkpoint = f"{_url_of(checkpoint)}/{self.uid}-{secrets.token_hex(4)}"
            _LOG.info("checkpoints are in %s", checkpoint)
        resume = None if self._resume is None else _url_of(self._resume)
        is_warm = values["warm_start"] and resume is None
        if is_warm:
            if checkpoint is None:
                raise ValueError(
                    "warm_start needs checkpoint, a folder: the optimisers' state is there"
                )
            resume = self._last_checkpoint
        names = ["model", "optimizer", "loss", "batch_size", "epochs", "seed", "device", "patience"]
        names.append("limits")
        return TrainingJob(
            **{name: values[name] for name in names},
            training=training,
            team_size=size,
            columns={role: values[name] for role, name in _ROLES.items()},
            secret=parse_secret(generate_secret()),
            checkpoints=Checkpoints(checkpoint, resume, values["checkpoint_every"]),
            is_warm=is_warm,
            is_shuffled=True,
            driver=None,
        )

    def _rows(self, dataset: DataFrame) -> DataFrame:
        """Return the columns that training needs, named by their roles."""
        columns = [
            data.column_for(role, dataset, self.getOrDefault(name)).alias(role)
            for role, name in _ROLES.items()
            if self.getOrDefault(name) is not None
        ]
        used: list[str] = []
        for name in _ROLES.values():
            value = self.getOrDefault(name) or []
            used += [value] if isinstance(value, str) else value
        _check_outputs(self, dataset.sparkSession, used)
        return dataset.select(*columns)

    def _dealt(self, rows: DataFrame) -> DataFrame:
        """Return the rows, assigned to one partition per worker."""
        # At random: dealt out in turn, rows in a regular order would give each worker other classes.
        return rows.repartition(self.getOrDefault("num_workers"), F.rand(self.getOrDefault("seed")))

    def _run(
        self, spark: SparkSession, job: TrainingJob, rows: DataFrame
    ) -> tuple[list[Any], bytes]:
        """Train in a barrier stage; return the history and the model's state."""
        tag = f"{self.uid}-{secrets.token_hex(4)}"
        workers = self.getOrDefault("num_workers")
        progress = Progress(
            spark,
            job.secret,
            workers,
            timeout_s=job.training.timeout_s,
            retries=self.getOrDefault("retries"),
            cancel=lambda: cancel(spark, tag),
        )
        with contextlib.closing(progress):
            sent = replace(job, driver=progress.address)
            while True:
                try:
                    with (
                        tagged(spark, tag),
                        keeping_slots(spark, tag, workers, job.training.timeout_s),
                    ):
                        results = _results(self._dealt(rows) if sent.is_shuffled else rows, sent)
                    break
                except GradwireError:
                    raise
                except Exception as error:
                    sleep(_SETTLE_S)
                    if progress.may_repeat():
                        check_slots(spark, workers)
                        continue
                    if progress.failure is None:
                        raise
                    text, trace = progress.failure
                    _LOG.debug("Spark's error", exc_info=error)
                    raise GradwireError(text) from (WorkerTraceback(trace) if trace else None)
            history = json.loads(results["history"])
            first_epoch = int(results["first_epoch"])
            # What was reported neither before nor by the fit that this one continues.
            progress.report([row for row in history if row["epoch"] >= first_epoch])
            return history, results["model"]


def _results(rows: DataFrame, job: TrainingJob) -> dict[str, bytes]:
    """Run Spark's job once; return the results by their kind."""
    # Without a shuffle behind it Spark would not repeat a barrier stage whose executor was lost.
    trained = rows.mapInArrow(lambda batches: train(job, batches), OUTPUT, barrier=True)
    parts = _parts_of(job, rows.sparkSession)
    # Java hands each part on to Python when it comes, and keeps nothing; with toLocalIterator it keeps all of them.
    results = trained.repartition(parts).toArrow()
    pieces: dict[str, dict[int, Any]] = {}
    for index in range(results.num_rows):
        worker, kind, part = (results[name][index].as_py() for name in ("worker", "kind", "part"))
        piece = results["data"][index].as_buffer()
        if kind == "error":
            text, _, trace = piece.to_pybytes().decode().partition("\n")
            raise GradwireError(f"worker {worker} failed: {text}") from WorkerTraceback(trace)
        pieces.setdefault(kind, {})[part] = piece
    if not pieces:  # Spark starts no tasks if there is nothing at all
        raise GradwireError("there are no rows to train on")
    return {kind: b"".join(data for _, data in sorted(pieces[kind].items())) for kind in pieces}


def _are_spread(dataset: DataFrame, rows: DataFrame, workers: int) -> bool:
    """Return whether the rows may be trained on where they lie; of a DataFrame that is not cached, do not ask."""
    level = dataset.storageLevel
    if not level.useMemory and not level.useDisk:
        return False  # all before it would be computed once more
    columns = [name for name in rows.columns if name in (data.LABEL, data.VALIDATION)]
    summaries = rows.select(*columns).mapInArrow(data.summarize, data.SUMMARY).collect()
    return data.are_spread(summaries, workers)


def _may_begin_barrier(rows: DataFrame) -> bool:
    """Return whether Spark lets a barrier stage read the rows: not behind a coalesce or a union without a shuffle."""
    # Without a shuffle behind the stage the refusal is this job's error. With one, as in training, Spark 4.3 stops the
    # whole session.
    try:
        labels = rows.select(data.LABEL)
        labels.mapInArrow(data.summarize, data.SUMMARY, barrier=True).collect()
    except Exception as error:
        if "SPARK-24820" not in str(error):
            raise
        return False
    return True


def _parts_of(job: TrainingJob, spark: SparkSession) -> int:
    """Return the number of parts in which a model comes to the driver.

    Raises:
        ValueError: the driver does not accept so many bytes, and would say so after the training.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            tensors = job.model().state_dict().values()
    except (Exception, SystemExit):  # it can be made in a task only, or not without values
        return _PARTS_UNKNOWN
    size = sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor))
    accepted = result_bytes_max(spark)
    if 0 < accepted < size:
        raise ValueError(
            f"the model has {size / 1e9:.2f} GB, and the driver accepts results of {accepted / 1e9:.2f} GB: set "
            "spark.driver.maxResultSize to more before the session begins (0: no limit)"
        )
    return max(_PARTS_MIN, -(-size // _PART_BYTES))


class TorchModel(Model, Stored):
    """A trained torch model; made by `TorchEstimator`.

    **A saved model is loaded without the function that makes its module, unless within** `trust_code`: the function is
    code from the file.

    Attributes:
        state: the module's ``state_dict``, as bytes of ``torch.save``.
        checkpoint: folder with the checkpoints of the fit, for ``fit(resume=...)``; None without one.
    """

    _options = ModelOptions

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**_BOTH)
        self.state = b""
        self.rows: list[dict[str, Any]] = []
        self.checkpoint: str | None = None
        self._sent: tuple[Any, bytes, Parcel] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what only this session has."""
        return {**vars(self), "_sent": None}

    @property
    def history(self) -> History:
        """A pandas frame with one row per epoch, or per epoch and worker with ``collect_stats=True``."""
        return History(self.rows)

    def attachments(self) -> dict[str, Any]:
        """Return the attributes that are saved beside the parameters."""
        return {"rows": self.rows, "checkpoint": self.checkpoint}

    def attach(self, values: dict[str, Any], state: bytes) -> None:
        """Take the attributes and the state of a file; raise `ValueError` if they are not such attributes."""
        if values.keys() != {"rows", "checkpoint"}:
            raise ValueError(f"the attributes are {sorted(values)}")
        rows, checkpoint = values["rows"], values["checkpoint"]
        numbers = [number for row in rows for number in row.values()]
        if not all(isinstance(number, (int, float, NoneType)) for number in numbers):
            raise ValueError("the history has something else than numbers")
        if not isinstance(checkpoint, (str, NoneType)):
            raise ValueError(f"checkpoint is {checkpoint!r:.200}")
        self.rows, self.checkpoint, self.state = rows, checkpoint, state

    def module(self) -> torch.nn.Module:
        """Return the trained module, on the CPU.

        Raises:
            ValueError: the model was loaded without its code.
        """
        self.check_code()
        module: torch.nn.Module = self.getOrDefault("model")()
        module.load_state_dict(unpack(self.state))
        return module.eval()

    def _transform(self, dataset: DataFrame) -> DataFrame:
        self.check_code()
        values = {name: self.getOrDefault(name) for name in _BOTH}
        whole("batch_size", values["batch_size"], least=1)
        spark = _session_of(dataset)
        _check_outputs(self, spark, dataset.columns)
        wanted = [option for option in _OUTPUTS if values[option]]
        if not wanted:
            return dataset
        sent = self._sent
        # Broadcasts belong to the context; each micro-batch of a stream has another session.
        place = spark if is_connect(spark) else spark.sparkContext
        if sent is None or sent[0] is not place or sent[1] is not self.state:
            # Not closed: the DataFrame that is returned may be used for as long as the session.
            self._sent = sent = place, self.state, Parcel(spark, io.BytesIO(self.state))
        predict = F.pandas_udf(  # type: ignore[attr-defined,call-overload,unused-ignore]
            _predictor(values, sent[2]), ", ".join(_OUTPUTS[option] for option in wanted)
        )
        from pyspark.ml.functions import array_to_vector

        outputs = predict(data.column_for(data.FEATURES, dataset, values["features_col"]))
        passing = f"outputs of {self.uid}"  # no name of the user's
        predicted = dataset.withColumn(passing, outputs)
        for option in wanted:
            name, kind = _OUTPUTS[option].split()
            column = F.col(f"`{passing}`")[name]
            column = array_to_vector(column) if kind.startswith("array") else column
            predicted = predicted.withColumn(values[option], column)
        return predicted.drop(passing)


def _session_of(dataset: Any) -> SparkSession:
    """Return the session of a DataFrame.

    Raises:
        TypeError: it is none of Spark.
        ValueError: the session was stopped.
    """
    if not hasattr(dataset, "sparkSession"):
        kind = f"{type(dataset).__module__}.{type(dataset).__name__}"
        raise TypeError(
            f"dataset is a {kind}, must be a DataFrame of Spark, as from spark.createDataFrame(...)"
        )
    spark: SparkSession = dataset.sparkSession
    check_runs(spark)
    return spark


def _check_outputs(params: Params, spark: SparkSession, columns: list[str]) -> None:
    """Raise if a column of the predictions would replace another column, as those of `pyspark.ml` do.

    Raises:
        ValueError: it would.
    """
    is_exact = str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
    folded = columns if is_exact else map(str.lower, columns)
    taken = dict.fromkeys(folded, "a column of the DataFrame")
    for option in _OUTPUTS:
        name = params.getOrDefault(option)
        if not name:
            continue
        key = name if is_exact else name.lower()
        if key in taken:
            raise ValueError(
                f"{option} is {name!r}, which is {taken[key]} already: choose another name, or drop the column"
            )
        taken[key] = option


def _plain(value: Any) -> Any:
    """Return a number of NumPy's as Python's, and a path as text; JSON and Java know no others."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


for _kind, _options in ((TorchEstimator, _ESTIMATOR), (TorchModel, _BOTH)):
    for _name in _options:
        setattr(_kind, _name, Param(Params._dummy(), _name, f"see {_kind.__name__}", _plain))


def _predictor(values: dict[str, Any], parcel: Parcel) -> Callable[..., Any]:
    """Return the function that predicts, batch by batch; it loads the model once per task."""

    def predict(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        device = device_of(values["device"])
        module = values["model"]().to(device)
        module.load_state_dict(unpack(parcel.read()))
        module.eval()
        checked = data.Checked(f"partition {rank_of_task()}")
        for series in batches:
            column = pa.array(series, pa.list_(pa.float32()), from_pandas=False)
            inputs = torch.from_numpy(np.array(checked.values(column, values["features_col"])))
            checked.rows += len(series)
            with torch.no_grad():
                parts = [
                    module(rows.to(device)).reshape(len(rows), -1).float().cpu()
                    for rows in inputs.split(values["batch_size"])
                ]
            raw = torch.cat(parts)
            columns: dict[str, Any] = {}
            if values["prediction_col"]:
                chosen = raw[:, 0] if raw.shape[1] == 1 else raw.argmax(1)
                columns["prediction"] = chosen.double().numpy()
            if values["raw_prediction_col"]:
                columns["raw"] = list(raw.numpy())
            if values["probability_col"]:
                columns["probability"] = list(torch.softmax(raw, 1).numpy())
            yield pd.DataFrame(columns)

    return predict


def _url_of(folder: str) -> str:
    """Return a folder by a name that executors know, too: they have other working folders.

    Raises:
        ValueError: it is a URL of Hadoop's that fsspec takes for a local folder.
    """
    name = os.fspath(folder)
    scheme, has_scheme, path = name.partition(":/")
    if has_scheme and scheme.isalnum() and scheme not in _LOCAL and not path.startswith("/"):
        raise ValueError(
            f"the folder {name!r} has one slash behind {scheme}: fsspec has two or three, as in hdfs:///folder or "
            "s3://bucket/folder"
        )
    # A colon may be one of a time in the folder's name.
    is_url = "://" in name or name.partition(":")[0] in _LOCAL
    return (name if is_url else os.path.abspath(os.path.expanduser(name))).rstrip("/")


def _without_workers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per epoch."""
    how = {"loss": "first", "validation_loss": "first"}
    how |= {"rows": "sum", "steps": "max", "seconds": "max", "shuffled_bytes": "sum"}
    epochs = pd.DataFrame(rows, columns=["epoch", *how]).groupby("epoch", as_index=False).agg(how)
    return epochs.to_dict("records")
