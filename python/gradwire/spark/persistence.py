"""Saved estimators and models: options and parameters as data, functions apart, loaded only on request."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import abc
from collections.abc import Iterator
from contextvars import ContextVar
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from pyspark import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from ..policy import (
    AdaptiveThreshold,
    FixedThreshold,
    ResidualClip,
    ShakeUp,
    StepThreshold,
    TargetBytes,
    TargetDensity,
)
from ..transport import Limits
from .checkpoints import pack, unpack
from .session import is_connect
from .strategies import ParameterAveraging, SharedTraining
from .tasks import pieces_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Stored", "trust_code"]

_FORMAT: Final = 1
_TENSORS: Final = (
    "tensor int, name string, dtype string, shape array<bigint>, part int, data binary"
)
_CODE: Final = "part int, data binary"
_DTYPES: Final = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_DIMENSIONS_MAX: Final = 64

# Objects that options may hold. They are stored as their arguments, and checked again when they are made.
_KINDS: Final = {
    kind.__name__: kind
    for kind in (
        *(AdaptiveThreshold, FixedThreshold, StepThreshold, TargetBytes, TargetDensity),
        *(Limits, ParameterAveraging, ResidualClip, ShakeUp, SharedTraining),
    )
}

_TRUSTS_CODE: Final[ContextVar[bool]] = ContextVar("trusts_code", default=False)


@contextlib.contextmanager
def trust_code() -> Iterator[None]:
    """Let ``load`` run code from files, in this thread and within the ``with`` block.

    The functions that make model, optimiser and loss are code: ``load`` leaves them out unless it is called in such a
    block, also by the ``load`` of a ``PipelineModel`` or ``CrossValidatorModel``. **Whoever can write the files can run
    any program with your rights**: use it only for files that you trust.

    >>> with trust_code():
    ...     pass  # model = PipelineModel.load("hdfs:///models/network")
    """
    token = _TRUSTS_CODE.set(True)
    try:
        yield
    finally:
        _TRUSTS_CODE.reset(token)


class Stored(MLReadable[Any], MLWritable):
    """Saving and loading: options as JSON, tensors and functions as Parquet, in any file system of Spark.

    **Loading runs no code from the file unless it is called within** `trust_code`. Without, the functions are missing,
    and what needs them raises a `ValueError`.
    """

    _options: Any  # the TypedDict of the parameters
    _left_out: frozenset[str] = frozenset()  # parameters in the file that were not loaded

    def write(self) -> MLWriter:
        """Return the writer."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader, which runs code from the file only within `trust_code`."""
        return _Reader(cls)

    def check_code(self) -> None:
        """Refuse to go on without the functions that were not loaded.

        Raises:
            ValueError: a function is missing.
        """
        instance: Any = self
        missing = sorted(name for name in self._left_out if not instance.isSet(name))
        if missing:
            setters = ", ".join(f"loaded.set(loaded.{name}, ...)" for name in missing)
            raise ValueError(
                f"this {type(self).__name__} was loaded without {', '.join(missing)}, as these are code: if you trust "
                f"whoever can write the file, load it within `with gradwire.spark.trust_code():`; otherwise give it "
                f"your own: {setters}"
            )

    def attachments(self) -> dict[str, Any]:
        """Return attributes of JSON values that are saved beside the parameters."""
        return {}

    def attach(self, values: dict[str, Any], state: bytes) -> None:
        """Take the attributes of a file, and the state of a model, as ``torch.save`` writes it.

        Raises:
            ValueError: they are not those of `attachments`.
        """
        if values or state:
            raise ValueError(f"unknown fields {sorted(values)}")


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Write the files; what cannot be saved is an error before `overwrite` removes those of an earlier save."""
        instance = self._instance
        instance.check_code()
        if self.shouldOverwrite and is_connect(self.sparkSession):
            raise ValueError(
                f"Spark Connect cannot overwrite what is saved in {path}: save to another folder, or remove it first"
            )
        self._plain: dict[str, Any] = {}
        code: dict[str, Any] = {}
        for param, value in instance._paramMap.items():
            try:
                self._plain[param.name] = _to_json(value)
            except TypeError:
                code[param.name] = value
        self._extra = {"format": _FORMAT, "code": sorted(code), "attached": instance.attachments()}
        self._code = list(enumerate(pieces_of(cloudpickle.dumps(code)))) if code else []
        self._tensors = _tensor_rows(unpack(instance.state)) if hasattr(instance, "state") else None
        super().save(path)

    def saveImpl(self, path: str) -> None:  # noqa: N802  (Spark's name)
        spark = self.sparkSession
        DefaultParamsWriter.saveMetadata(
            self._instance,
            path,
            spark,
            extraMetadata={"gradwire": self._extra},
            paramMap=self._plain,
        )
        if self._tensors is not None:
            spark.createDataFrame(self._tensors, _TENSORS).write.parquet(f"{path}/tensors")
        if self._code:
            spark.createDataFrame(self._code, _CODE).write.parquet(f"{path}/code")


class _Reader(MLReader[Any]):
    def __init__(self, kind: type[Stored]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        spark = self.sparkSession
        try:
            metadata = DefaultParamsReader.loadMetadata(path, spark)
            name = f"{self._kind.__module__}.{self._kind.__name__}"
            if metadata["class"] != name:
                raise ValueError(f"it is of {metadata['class']!r}, not of {name}")
            instance = self._instance(metadata, path)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path} is no saved {self._kind.__name__}: {error}") from error
        if instance._left_out and _TRUSTS_CODE.get():
            rows = _rows(spark, f"{path}/code", _CODE, "part")
            code = cloudpickle.loads(b"".join(bytes(row.data) for row in rows))
            instance._set(**{name: code[name] for name in instance._left_out})
        return instance

    def _instance(self, metadata: dict[str, Any], path: str) -> Any:
        instance: Any = self._kind()
        kinds = get_type_hints(instance._options)
        extra = metadata["gradwire"]
        if extra.keys() != {"format", "code", "attached"} or extra["format"] != _FORMAT:
            raise ValueError(f"this gradwire reads format {_FORMAT}, the file has {extra!r:.200}")
        values = {name: _from_json(value) for name, value in metadata["paramMap"].items()}
        unknown = (values.keys() | set(extra["code"])) - kinds.keys()
        if unknown:
            raise ValueError(f"unknown parameters {sorted(unknown)}")
        for name, value in values.items():
            if not _is_of(value, kinds[name]):
                raise ValueError(f"{name} is {value!r:.200}, must be {kinds[name]}")
        instance._resetUid(str(metadata["uid"]))
        instance._set(**values)
        instance._left_out = frozenset(extra["code"])
        state = b""
        if hasattr(instance, "state"):
            state = pack(_read_tensors(self.sparkSession, f"{path}/tensors"))
        instance.attach(extra["attached"], state)
        return instance


def _to_json(value: Any) -> Any:
    """Return a value for JSON; raise `TypeError` for what is no data."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (str, int, float, NoneType)):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if _KINDS.get(type(value).__name__) is type(value):
        given = value.arguments() if isinstance(value, SharedTraining) else vars(value)
        return {type(value).__name__: {name: _to_json(item) for name, item in given.items()}}
    raise TypeError(f"{value!r} is no data")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, dict):
        [(kind, arguments)] = value.items()
        made: Any = _KINDS[kind]
        return made(**{name: _from_json(item) for name, item in arguments.items()})
    return value


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value from a file is of the declared kind; functions are never in the part that is data."""
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return False
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kinds = [get_origin(each) or each for each in get_args(hint) or (hint,)]
    if get_origin(hint) is list:
        kinds = [list]
    return isinstance(value, tuple(kind for kind in kinds if kind is not abc.Callable))


def _rows(spark: SparkSession, path: str, schema: str, *order: str) -> Iterator[Any]:
    """Return the rows of a Parquet file with exactly these columns.

    Raises:
        ValueError: there are other columns, or the parts do not follow each other.
    """
    frame = spark.read.parquet(path)
    columns = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes)
    if columns != schema:
        raise ValueError(f"{path} has the columns {columns}, must have {schema}")
    # Spark's iterator brings one partition at a time, not the whole file at once.
    return iter(frame.orderBy(*order).toLocalIterator())


def _tensor_rows(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a module's state as rows.

    Raises:
        ValueError: an entry is no dense tensor of a known dtype, or has NaN.
    """
    rows = []
    for index, (name, tensor) in enumerate(state.items()):
        dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        if dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise ValueError(
                f"the model's state {name!r} is of type {dtype or type(tensor).__name__}, which is not saved as data: "
                "save model.module().state_dict() yourself"
            )
        _check_numbers(name, tensor)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = list(tensor.shape)
        for part, piece in enumerate(pieces_of(data) if data else (b"",)):
            rows.append((index, name, dtype, shape, part, piece))
    return rows


def _read_tensors(spark: SparkSession, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name.

    Raises:
        ValueError: the file has something else than tensors whose sizes and numbers are right.
    """
    state: dict[str, torch.Tensor] = {}
    rows = _rows(spark, path, _TENSORS, "tensor", "part")
    for index, parts in itertools.groupby(rows, lambda row: row.tensor):
        data = bytearray()
        for number, row in enumerate(parts):
            if number == 0:
                name, dtype, shape = row.name, row.dtype, tuple(row.shape)
                is_new = isinstance(name, str) and name not in state
                if not is_new or dtype not in _DTYPES or len(shape) > _DIMENSIONS_MAX:
                    raise ValueError(f"{name!r:.200} is repeated, or of an unknown kind: {dtype}")
                if min(shape, default=0) < 0:
                    raise ValueError(f"{name!r:.200} has the shape {shape}")
                nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
            data += row.data
            is_next = (index, number) == (len(state), row.part)
            same = (row.name, row.dtype, tuple(row.shape)) == (name, dtype, shape)
            if not (is_next and same) or len(data) > nbytes:
                raise ValueError(f"the parts of {name!r:.200} do not fit together")
        if len(data) != nbytes:
            raise ValueError(f"{name!r:.200} has {len(data)} bytes, {dtype}{list(shape)} {nbytes}")
        if dtype == "bool" and data.strip(b"\x00\x01"):
            raise ValueError(f"{name!r:.200} has truth values other than 0 and 1")
        kind = getattr(torch, dtype)
        flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        _check_numbers(name, flat)
        state[name] = flat.reshape(shape)
    return state


def _check_numbers(name: str, tensor: torch.Tensor) -> None:
    # Infinity is used on purpose, in masks for example.
    if tensor.isnan().any():
        raise ValueError(f"{name!r:.200} has values that are NaN: the training has diverged")
