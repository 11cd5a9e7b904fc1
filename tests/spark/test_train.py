"""One worker's part of a training, without a cluster."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.spark import ParameterAveraging, SharedTraining

pytestmark = [pytest.mark.spark, pytest.mark.torch]
torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")
pytest.importorskip("pandas", reason="pandas is not installed")

from gradwire.spark.checkpoints import Checkpoints, Position, unpack  # noqa: E402
from gradwire.spark.data import FEATURES, LABEL, VALIDATION, WEIGHT  # noqa: E402
from gradwire.spark.rounds import (  # noqa: E402
    _CHUNK,
    _STATE,
    _load,
    _rest_of,
    _State,
    _sum,
    _trainer,
    _values_of,
)
from gradwire.spark.train import (  # noqa: E402
    AveragingTrainer,
    LateWorkers,
    ModelReplica,
    SharedTrainer,
    Times,
    TrainingJob,
    Worker,
    gather,
    is_over,
    pack,
)
from gradwire.spark.train import train as train_worker  # noqa: E402

STEPS = 4
RATE = 0.125


def train(training: SharedTraining, workers: int) -> list[tuple[Times, Any]]:
    """Train an epoch on one machine, with gradients of one; return each worker's times and shared parameters."""

    def work(rank: int, node: gw.Node | None) -> tuple[Times, Any]:
        param = torch.nn.Parameter(torch.zeros(40, 30))
        optimizer = torch.optim.SGD([param], lr=RATE)
        times = Times()
        trainer = SharedTrainer(training, optimizer, node, (name, rank, workers), machines=1)
        trainer.optimizer.join()
        for _ in range(STEPS):
            param.grad = torch.ones_like(param)
            trainer.step(times)
        trainer.end_epoch(times)
        with trainer.shared():
            values = param.detach().clone()
        if trainer.team is not None:
            trainer.team.close()
        return times, values

    name = f"test-train-{os.getpid()}"
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node, ThreadPoolExecutor() as pool:
        nodes = [node, *[None] * (workers - 1)]
        return list(pool.map(work, range(workers), nodes))


def test_only_the_leader_of_a_team_counts_the_machine_s_bytes() -> None:
    (leader, _), (follower, _) = train(SharedTraining(), workers=2)
    assert leader.sent_bytes > 0
    assert follower.sent_bytes == 0
    assert leader.encode_s == follower.encode_s > 0.0


def test_workers_whose_groups_are_sets_train_the_same_parameters() -> None:
    def work(rank: int, node: gw.Node | None) -> list[Any]:
        model = torch.nn.ModuleList(torch.nn.Linear(30, 30, bias=False) for _ in range(2))
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        params = [*model.parameters()][:: -1 if rank else 1]  # as the order of a set differs
        optimizer = torch.optim.SGD(params, lr=RATE)
        place = name, rank, 2
        training = SharedTraining(codec="dense")
        trainer = SharedTrainer(training, optimizer, node, place, machines=1, model=model)
        trainer.optimizer.join()
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 1.0)
        trainer.step(Times())
        trainer.end_epoch(Times())
        with trainer.shared():
            values = [float(param.mean()) for param in model.parameters()]
        assert trainer.team is not None
        trainer.team.close()
        return values

    name = f"test-order-{os.getpid()}"
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node, ThreadPoolExecutor() as pool:
        assert list(pool.map(work, range(2), [node, None])) == [[-RATE, -2 * RATE]] * 2


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", [{}, {"every": 3}, {"every": 3, "overlap": 1}, {"overlap": 1}])
def test_nothing_is_left_to_exchange_at_the_end_of_an_epoch(
    workers: int, options: dict[str, int]
) -> None:
    trained = train(SharedTraining(codec="dense", **options), workers)  # type: ignore[arg-type]
    for _, values in trained:
        assert (values == -RATE * STEPS).all()
    times, _ = trained[0]
    exchanges = -(-STEPS // options.get("every", 1))
    assert exchanges * 4 * 1_200 < times.sent_bytes < exchanges * 4 * 1_300


def test_a_job_in_a_log_does_not_show_the_secret() -> None:
    secret = bytes(range(32))
    fields = dict.fromkeys(TrainingJob.__dataclass_fields__)
    assert repr(secret) not in repr(TrainingJob(**{**fields, "secret": secret}))


def job_of(training: ParameterAveraging) -> TrainingJob:
    """Return a job with a model that has statistics, and is larger than a chunk."""

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 100_000), torch.nn.BatchNorm1d(100_000))

    def optimizer(params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.5)

    return TrainingJob(
        model=model,
        optimizer=optimizer,
        loss=torch.nn.MSELoss,
        training=training,
        columns={},
        secret=b"",
        batch_size=4,
        epochs=1,
        seed=3,
        device="cpu",
        patience=0,
        checkpoints=Checkpoints(None, None, 1),
        is_warm=False,
        team_size=1,
        limits=None,
        is_shuffled=True,
        driver=None,
    )


def take_step(replica: Any, inputs: Any) -> None:
    replica.optimizer.zero_grad()
    replica.model(inputs).square().mean().backward()
    replica.optimizer.step()


def test_complex_parameters_are_not_averaged() -> None:
    """As float32 they would lose their imaginary parts."""
    module = torch.nn.Linear(2, 2, dtype=torch.complex64)
    job = replace(job_of(ParameterAveraging(via="spark")), model=lambda: module)
    with pytest.raises(TypeError, match=r"parameters of torch\.complex64 cannot be averaged"):
        _State(job)


@pytest.mark.parametrize("average_optimizer", [True, False])
def test_the_state_of_a_round_goes_to_the_workers_and_back(average_optimizer: bool) -> None:
    job = job_of(ParameterAveraging(via="spark", average_optimizer=average_optimizer))
    state = _State(job)
    inputs = torch.randn(8, 3)
    for _ in range(2):  # first without a state of the optimiser, then with it
        file = io.BytesIO()
        state.write(file)
        worker = _load(job, unpack(file.getvalue()))
        take_step(worker, inputs)
        flat = _values_of(worker)
        state.put(_STATE, pack(_rest_of(worker)))
        starts = list(range(0, flat.size, _CHUNK))
        assert len(starts) > 1
        for start in reversed(starts):  # they come in any order
            state.put(start // _CHUNK, flat[start : start + _CHUNK].tobytes())
        complete = state.complete()
        torch.testing.assert_close(complete["model"], worker.model.state_dict(), rtol=0, atol=0)
        if average_optimizer:
            expected = worker.optimizer.state_dict()
            torch.testing.assert_close(complete["optimizer"], expected, rtol=0, atol=0)
            assert len(pack(_rest_of(worker))) < 20_000, "only what is not averaged"
    other = _State(job)
    other.start_from(complete)
    assert torch.equal(
        other.complete()["model"]["1.running_var"], complete["model"]["1.running_var"]
    )


def average(
    training: ParameterAveraging,
    replicas: Sequence[ModelReplica],
    steps: int = 1,
    seeds: Sequence[int] = (0, 1),
) -> list[Times]:
    """Train two replicas with rows of their own, drawn from the seeds, on two nodes of this process."""
    secret = bytes(range(32))

    def work(rank: int, node: gw.Node) -> Times:
        node.wait_for_peers(1, 30.0)
        trainer = AveragingTrainer(training, replicas[rank], node, 2)
        times = Times()
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * step + seeds[rank])
            take_step(replicas[rank], torch.randn(4, 3, generator=generator))
            trainer._steps += 1
            trainer.end_epoch(times)
        return times

    with (
        gw.Node("127.0.0.1:0", secret=secret, node_id=0) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=secret, node_id=1) as second,
        ThreadPoolExecutor() as pool,
    ):
        return list(pool.map(work, range(2), (first, second)))


def test_statistics_of_batch_norm_are_averaged_with_the_parameters() -> None:
    training = ParameterAveraging(every=1)
    replicas = [ModelReplica(job_of(training)) for _ in range(2)]
    average(training, replicas)
    left, right = (replica.model.state_dict() for replica in replicas)
    for name in ("0.weight", "1.running_mean", "1.running_var"):
        assert torch.equal(left[name], right[name])
    assert left["1.running_mean"].abs().max() > 0


def test_workers_that_have_the_same_parameters_are_averaged() -> None:
    """As workers without rows have: their parameters are those at the beginning."""
    training = ParameterAveraging(every=1)
    replicas = [ModelReplica(job_of(training)) for _ in range(2)]
    average(training, replicas, steps=2, seeds=(0, 0))
    for left, right in zip(*map(tensors_of, replicas), strict=True):
        assert torch.equal(left, right)


def test_a_mask_with_infinities_stays_as_it_is() -> None:
    mask = torch.tensor([0.0, -torch.inf])

    def model() -> Any:
        layers = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)
        made = torch.nn.Sequential(*layers)
        made.register_buffer("mask", mask.clone())
        return made

    training = ParameterAveraging(every=1)
    replicas = [ModelReplica(replace(job_of(training), model=model)) for _ in range(2)]
    average(training, replicas, steps=2)
    left, right = (replica.model.state_dict() for replica in replicas)
    for name in ("0.weight", "1.running_var"):
        assert torch.equal(left[name], right[name])
    assert torch.equal(left["mask"], mask)


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_the_best(first: float) -> None:
    assert not is_over([first, 3.0, 2.0, 1.0], 2)
    assert not is_over([3.0, first, 2.0], 2)
    assert is_over([first, 1.0, 2.0, first], 2)
    assert is_over([first] * 3, 2)


def test_a_mean_in_pieces_is_the_mean_of_parameters_and_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces begin and end in the middle of tensors, which may have any layout in memory."""

    def model() -> Any:
        layers = torch.nn.Conv2d(3, 8, 5), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 1)
        shaped = torch.nn.Sequential(torch.nn.Unflatten(1, (3, 1, 1)), torch.nn.Upsample((5, 5)))
        return torch.nn.Sequential(shaped, *layers).to(memory_format=torch.channels_last)

    training = ParameterAveraging(every=1)
    job = replace(job_of(training), model=model)
    monkeypatch.setattr("gradwire.spark.train.PIECE", 1_000)
    steps = 3
    replicas = [ModelReplica(job) for _ in range(2)]
    expected = [ModelReplica(job) for _ in range(2)]
    times = average(training, replicas, steps)
    for step in range(steps):
        for rank, replica in enumerate(expected):
            generator = torch.Generator().manual_seed(10 * step + rank)
            take_step(replica, torch.randn(4, 3, generator=generator))
        for left, right in zip(*map(tensors_of, expected), strict=True):
            left.copy_((left + right) / 2)
            right.copy_(left)
    for left, right in zip(*map(tensors_of, replicas), strict=True):
        assert torch.equal(left, right)
    for value, reference in zip(tensors_of(replicas[0]), tensors_of(expected[0]), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
    numel = sum(tensor.numel() for tensor in tensors_of(replicas[0]))
    assert numel > 2_000
    assert steps * 4 * numel < times[0].sent_bytes < steps * 4 * (numel + 1_500)


def tensors_of(replica: ModelReplica) -> list[Any]:
    """Return everything that is averaged."""
    states = [replica.optimizer.state[param] for param in replica.model.parameters()]
    return [
        *(param.detach() for param in replica.model.parameters()),
        *(buffer for buffer in replica.model.buffers() if buffer.is_floating_point()),
        *(value for state in states for value in state.values()),
    ]


def test_states_of_other_parameters_are_refused_with_the_way_out() -> None:
    """As where the rows of one worker never reach a part of the model."""
    training = ParameterAveraging(every=1)
    replicas = [ModelReplica(job_of(training)) for _ in range(2)]
    replicas[1].model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"average_optimizer=False\) averages the parameters"):
        average(training, replicas)


@pytest.mark.parametrize(("name", "kind"), [("model", "Module"), ("optimizer", "Optimizer")])
def test_a_function_that_returns_something_else_is_named(name: str, kind: str) -> None:
    """As one without its last line does."""
    job = replace(job_of(ParameterAveraging()), **{name: lambda *_: None})
    text = rf"{name}\(...\) has returned None, must return a torch {kind}"
    with pytest.raises(TypeError, match=text):
        ModelReplica(job)


@pytest.mark.parametrize("kind", ["binary", "large_binary"])
def test_a_mean_has_the_types_of_its_parts(kind: str) -> None:
    """Spark compares them, and has large types with spark.sql.execution.arrow.useLargeVarTypes."""
    import pyarrow as pa

    schema = pa.schema({"chunk": pa.int64(), "data": getattr(pa, kind)()})
    parts = [np.float32([1.0, 2.0]).tobytes(), np.float32([3.0, 4.0]).tobytes()]
    mean = _sum(pa.table({"chunk": [7, 7], "data": parts}, schema))
    assert mean.schema == schema
    assert mean.to_pylist() == [{"chunk": 7, "data": np.float32([2.0, 3.0]).tobytes()}]


class Stage:
    """A stage with a single task, which has any number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def partitionId(self) -> int:  # noqa: N802
        return self.rank

    def getTaskInfos(self) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(address="127.0.0.1:1")]

    def cpus(self) -> int:
        return 1

    def allGather(self, text: str) -> list[str]:  # noqa: N802
        return [text]


class Unwatched:
    """A watch that nobody looks at."""

    busy = staticmethod(contextlib.nullcontext)

    def tell(self, *_: Any, **values: Any) -> None:
        pass

    tell_wait = note_start = tell


class LocalTrainer:
    """Steps of a worker that exchanges nothing."""

    is_async = False
    shared = staticmethod(contextlib.nullcontext)

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, _times: Times) -> None:
        self.optimizer.step()

    def end_epoch(self, times: Times) -> None:
        pass


class LocalWorker(Worker):
    def connect(self, _stack: Any, _names: list[str], steps: int) -> None:
        self.first_step = steps
        self.trainer = LocalTrainer(self.optimizer)  # type: ignore[assignment]


def rows_of(numbers: int, held: int = 0) -> Any:
    """Return rows of a feature, a label, and whether they are for validation, as the last ones are."""
    import pyarrow as pa

    values = [float(number) for number in range(numbers + held)]
    is_held = [number >= numbers for number in range(numbers + held)]
    columns = {FEATURES: [[value] for value in values], LABEL: values, VALIDATION: is_held}
    return pa.RecordBatch.from_pydict(columns)


def local_job(drawn: list[float] | None = None, rate: float = 1e-3, **options: Any) -> TrainingJob:
    """Return a job whose model draws a random number in every step."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.rand(1))

        def forward(self, inputs: Any) -> Any:
            if drawn is not None and self.training:
                drawn.append(torch.rand(()).item())
            return inputs.float() * self.factor

    columns = {FEATURES: "x", LABEL: "y", VALIDATION: "held"}
    job = job_of(ParameterAveraging())
    return replace(
        job,
        model=Model,
        optimizer=lambda params: torch.optim.SGD(params, lr=rate),
        columns=columns,
        **options,
    )


def work_alone(job: TrainingJob, rows: Any, rank: int = 0) -> dict[str, bytes]:
    """Train a worker on its own; return its results."""
    return dict(
        LocalWorker(job, Stage(rank), Unwatched()).run(iter([rows]), contextlib.ExitStack())
    )  # type: ignore[arg-type]


def numbers_drawn(rank: int, epochs: int, folder: str | None = None, resume: Any = None) -> Any:
    drawn: list[float] = []
    checkpoints = Checkpoints(folder, resume, 1000)
    work_alone(local_job(drawn, epochs=epochs, checkpoints=checkpoints), rows_of(12), rank)
    return drawn


def test_every_worker_and_epoch_has_random_numbers_of_its_own_and_every_fit_the_same(
    tmp_path: Path,
) -> None:
    whole = numbers_drawn(0, epochs=3)
    assert len(whole) == 9
    assert numbers_drawn(0, epochs=3) == whole
    assert len({*whole, *numbers_drawn(1, epochs=3)}) == 18
    first = numbers_drawn(0, epochs=2, folder=f"{tmp_path}/fit")
    resumed = numbers_drawn(0, epochs=3, resume=f"{tmp_path}/fit")
    assert first + resumed == whole


def test_every_round_through_spark_has_random_numbers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[float] = []
    training = ParameterAveraging(via="spark")
    job = replace(local_job(drawn), training=training)
    file = io.BytesIO()
    _State(job).write(file)

    class Sent:
        read = staticmethod(file.getvalue)

    def take_round(*place: int) -> list[float]:
        drawn.clear()
        list(_trainer(job, Sent(), *place)(iter([rows_of(12)])))  # type: ignore[arg-type]
        return list(drawn)

    numbers = []
    for rank in range(2):
        monkeypatch.setattr("gradwire.spark.rounds.rank_of_task", lambda rank=rank: rank)
        for place in ((0, 0), (0, 1), (1, 0)):
            numbers += take_round(*place)
    assert len(numbers) == len(set(numbers)) == 18
    assert take_round(1, 0) == numbers[-3:]


def history_of(results: dict[str, bytes]) -> list[dict[str, Any]]:
    rows = json.loads(results["history"])
    return [
        {name: row[name] for name in ("epoch", "steps", "loss", "validation_loss")} for row in rows
    ]


def test_a_fit_that_continues_another_stops_as_early_and_returns_the_same_best_model(
    tmp_path: Path,
) -> None:
    """The training diverges, so that the first epoch is the best."""

    def fit(epochs: int, name: str, resume: str | None = None, **options: Any) -> Any:
        checkpoints = Checkpoints(f"{tmp_path}/{name}", resume and f"{tmp_path}/{resume}", 1000)
        given = {"patience": 3, "rate": 0.05, "checkpoints": checkpoints, **options}
        return work_alone(local_job(epochs=epochs, **given), rows_of(12, held=4))

    whole = fit(9, "whole")
    assert [row["epoch"] for row in history_of(whole)] == [0, 1, 2, 3]
    fit(2, "first")
    second = fit(9, "second", resume="first")
    assert history_of(second) == history_of(whole)
    assert unpack(second["model"]) == unpack(whole["model"])
    ended = fit(9, "third", resume="second")
    assert history_of(ended) == history_of(whole), "training had stopped"
    assert unpack(ended["model"]) == unpack(whole["model"])
    last = fit(5, "last", resume="second", patience=0)
    assert [row["epoch"] for row in history_of(last)] == [0, 1, 2, 3, 4]
    assert unpack(last["model"]) != unpack(whole["model"]), "without patience the last model counts"
    warm = fit(1, "warm", resume="first", is_warm=True)
    assert [row["epoch"] for row in history_of(warm)] == [2]
    assert unpack(warm["model"]) != unpack(whole["model"])


def test_a_fit_that_continues_another_has_the_options_of_its_own_optimiser(tmp_path: Path) -> None:
    """A training that diverged goes on with a smaller rate; what a schedule has changed goes on as it was."""
    rates: list[tuple[float, float]] = []

    def note(optimizer: Any, *_: Any) -> None:
        [group] = optimizer.param_groups
        rates.append((group["lr"], group["momentum"]))

    def optimizer_of(rate: float, momentum: float) -> Any:
        def optimizer(params: Any) -> Any:
            made = torch.optim.SGD(params, lr=rate, momentum=momentum)
            schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
            made.register_step_pre_hook(note)
            made.register_step_post_hook(lambda *_: schedule.step())
            return made

        return optimizer

    def fit(name: str, resume: str | None, rate: float, momentum: float, epochs: int) -> Any:
        rates.clear()
        checkpoints = Checkpoints(f"{tmp_path}/{name}", resume and f"{tmp_path}/{resume}", 1000)
        optimizer = optimizer_of(rate, momentum)
        job = local_job(epochs=epochs, checkpoints=checkpoints)
        work_alone(replace(job, optimizer=optimizer, batch_size=12), rows_of(12))
        return list(rates)

    assert fit("first", None, 1e-3, 0.5, 2) == [(1e-3, 0.5), (5e-4, 0.5)]
    assert fit("same", "first", 1e-3, 0.5, 3) == [(2.5e-4, 0.5)]
    assert fit("other", "first", 1e-4, 0.5, 4) == [(1e-4, 0.5), (5e-5, 0.5)]
    assert fit("after", "other", 1e-4, 0.25, 5) == [(2.5e-5, 0.25)]


@pytest.mark.parametrize("rate", [RATE, RATE / 2])
def test_through_spark_a_fit_that_continues_another_has_its_own_rate(rate: float) -> None:
    job = replace(local_job(rate=RATE), training=ParameterAveraging(via="spark"))
    checkpoint = unpack(pack(_State(job).complete()))
    state = _State(replace(job, optimizer=lambda params: torch.optim.SGD(params, lr=rate)))
    state.start_from(checkpoint)
    [group] = state.complete()["optimizer"]["param_groups"]
    assert group["lr"] == rate


@pytest.mark.parametrize("every", [2, 3])
def test_an_epoch_that_is_cut_in_two_is_whole_in_the_history(tmp_path: Path, every: int) -> None:
    """A checkpoint may lie within an epoch, or at its end."""
    rows = rows_of(12, held=4)
    whole = work_alone(local_job(epochs=3), rows)
    job = local_job(epochs=3, checkpoints=Checkpoints(f"{tmp_path}/fit", None, every))

    class Failing(LocalWorker):
        steps = 0

        def step(self, *args: Any) -> None:
            self.steps += 1
            if self.steps == 6:
                raise RuntimeError("the executor is lost")
            super().step(*args)

    with pytest.raises(RuntimeError, match="the executor is lost"):
        Failing(job, Stage(0), Unwatched()).run(iter([rows]), contextlib.ExitStack())  # type: ignore[arg-type]
    worker = LocalWorker(job, Stage(0), Unwatched())  # type: ignore[arg-type]
    results = dict(worker.run(iter([rows]), contextlib.ExitStack()))
    assert history_of(results) == history_of(whole)
    assert worker.first_step == {2: 1, 3: 0}[every], (
        "averages are counted from the epoch's first step"
    )


def test_averages_after_a_checkpoint_are_at_the_steps_of_a_training_without_a_break() -> None:
    averages: list[bool] = []

    class Recorded(AveragingTrainer):
        def end_epoch(self, _times: Times) -> None:
            averages[-1] = True
            self._steps = 0

    training = ParameterAveraging(every=5)
    trainer = Recorded(training, ModelReplica(job_of(training)), None, 2, steps=7)  # type: ignore[arg-type]
    for _ in range(8):
        averages.append(False)
        trainer.step(Times())
    assert [step for step, is_average in enumerate(averages, start=8) if is_average] == [10, 15]


def test_a_worker_waits_while_its_executor_s_java_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PySpark's own limit is 15 s; after that, the executor ends with all of its workers."""
    import pyspark.util

    monkeypatch.setattr(pyspark.util, "_do_server_auth", lambda *_: None)
    monkeypatch.setenv("SPARK_AUTH_SOCKET_TIMEOUT", "15")
    waits: list[float | None] = []

    class Socket(Stage):
        def allGather(self, text: str) -> list[str]:  # noqa: N802
            file, connection = pyspark.util.local_connect_and_auth(port, "secret")
            with file, connection:
                waits.append(connection.gettimeout())
            return [text]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert gather(Socket(0), 60.0, "value") == ["value"]
    assert (waits[0] or math.inf) >= 60.0


def test_a_worker_that_is_let_go_just_when_its_time_ends_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    class Late(Stage):
        def allGather(self, text: str) -> list[str]:  # noqa: N802
            released.wait()
            return [text]

    class Thread(threading.Thread):
        def is_alive(self) -> bool:
            released.set()
            self.join()
            return False

    monkeypatch.setattr("gradwire.spark.train.threading", SimpleNamespace(Thread=Thread))
    with pytest.raises(LateWorkers, match=r"within 0\.1 s"):
        gather(Late(0), 0.1, "value")
    released.set()


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
def test_workers_may_wait_for_each_other_for_ever(timeout_s: float) -> None:
    """The other waits of a training take infinity; a thread's refuses it."""
    assert gather(Stage(0), timeout_s, "value") == ["value"]


def test_rows_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark computes them anew after an executor was lost: no attempt is used up for it, here or by those that wait."""
    is_busy: list[bool] = []
    found: list[bool] = []
    waits: list[float | None] = []

    class Watched(Unwatched):
        @contextlib.contextmanager
        def busy(self) -> Iterator[None]:
            is_busy.append(True)
            yield
            is_busy.pop()

    def batches() -> Iterator[Any]:
        found.append(bool(is_busy))
        yield rows_of(4)
        found.append(bool(is_busy))

    def noted(context: Any, timeout_s: float | None, *value: Any) -> Any:
        waits.append(timeout_s)
        return gather(context, timeout_s, *value)

    monkeypatch.setattr("gradwire.spark.train.gather", noted)
    job = local_job(checkpoints=Checkpoints(None, None, 1000))
    LocalWorker(job, Stage(0), Watched()).run(batches(), contextlib.ExitStack())  # type: ignore[arg-type]
    assert found == [False, False]
    assert waits[0] is None
    assert None not in waits[1:]


def test_each_batch_for_validation_has_the_time_that_a_worker_has() -> None:
    """Or a worker with many such rows would be given up, though it makes progress."""
    calls: list[str] = []

    class Watched(Unwatched):
        @contextlib.contextmanager
        def busy(self) -> Iterator[None]:
            calls.append("busy")
            yield

    class Model(torch.nn.Linear):
        def forward(self, inputs: Any) -> Any:
            if not self.training:
                calls.append("score")
            return super().forward(inputs.float())

    job = replace(local_job(), model=lambda: Model(1, 1), batch_size=4)
    LocalWorker(job, Stage(0), Watched()).run(iter([rows_of(4, held=12)]), contextlib.ExitStack())  # type: ignore[arg-type]
    first = calls.index("score") - 1
    assert calls[first:] == ["busy", "score"] * 3 + ["busy"]  # the last for the model's state


def test_a_worker_whose_file_system_hangs_has_the_time_that_a_worker_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_busy: list[bool] = []
    calls: list[tuple[str, bool]] = []

    class Watched(Unwatched):
        @contextlib.contextmanager
        def busy(self) -> Iterator[None]:
            is_busy.append(True)
            yield
            is_busy.pop()

    def noted(name: str) -> Any:
        method = getattr(Checkpoints, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, bool(is_busy)))
            return method(*args, **options)

        return call

    for name in ("read", "write", "finish"):
        monkeypatch.setattr(Checkpoints, name, noted(name))
    job = local_job(checkpoints=Checkpoints(f"{tmp_path}/fit", None, 1000))
    LocalWorker(job, Stage(0), Watched()).run(iter([rows_of(4)]), contextlib.ExitStack())  # type: ignore[arg-type]
    assert calls == [("read", True), ("write", True), ("finish", True)]


def test_workers_that_have_read_different_checkpoints_read_again(tmp_path: Path) -> None:
    whole = numbers_drawn(0, epochs=3)
    numbers_drawn(0, epochs=1, folder=f"{tmp_path}/fit")
    numbers_drawn(0, epochs=2, folder=f"{tmp_path}/later")

    class Race(Stage):
        """Another worker has read what an earlier attempt wrote after this one had read."""

        def allGather(self, text: str) -> list[str]:  # noqa: N802
            answers = [text]
            value = json.loads(text)["value"]
            if value and isinstance(value[-1], dict) and value[-1].get("epoch") == 1:
                shutil.copytree(tmp_path / "later", tmp_path / "fit", dirs_exist_ok=True)
                other = [*value[:-1], {**value[-1], "epoch": 2}]
                answers.append(json.dumps({"value": other}))
            return answers

    drawn: list[float] = []
    checkpoints = Checkpoints(f"{tmp_path}/fit", None, 1000)
    job = local_job(drawn, epochs=3, checkpoints=checkpoints)
    LocalWorker(job, Race(0), Unwatched()).run(iter([rows_of(12)]), contextlib.ExitStack())  # type: ignore[arg-type]
    assert drawn == whole[6:]


def test_what_the_model_raises_is_told_with_its_type() -> None:
    """The message of a KeyError is the key alone."""

    class Model(torch.nn.Linear):
        def forward(self, _inputs: Any) -> Any:
            raise KeyError("mask")

    with pytest.raises(gw.GradwireError, match=r"^model or loss failed with .*: KeyError: 'mask'$"):
        work_alone(replace(local_job(), model=lambda: Model(1, 1)), rows_of(4))


def test_a_model_that_exits_is_an_error_that_every_attempt_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the module's file reads the command line; a raised exit would look like a process that was killed."""
    pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed")

    class Attempt(Stage):
        def taskAttemptId(self) -> int:  # noqa: N802
            return 0

    def model() -> Any:
        raise SystemExit("--data is missing")

    monkeypatch.setattr(pyspark.BarrierTaskContext, "get", lambda: Attempt(0))
    [batch] = train_worker(replace(local_job(), model=model), iter([rows_of(4)]))
    [row] = batch.to_pylist()
    assert (row["worker"], row["kind"]) == (0, "error")
    assert row["data"].startswith(b"SystemExit: --data is missing (on 127.0.0.1)\n")
    from gradwire.spark import estimator

    session: Any = None
    parts = estimator._parts_of(replace(local_job(), model=model), session)
    assert parts == estimator._PARTS_UNKNOWN, "the driver's program does not exit for it"


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=1e-3)


@pytest.mark.parametrize("way", ["a worker", "through Spark"])
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_training(
    tmp_path: Path, way: str
) -> None:
    """Where a step says KeyError: 'step'."""

    def fit(name: str, resume: str | None = None, **options: Any) -> Any:
        checkpoints = Checkpoints(f"{tmp_path}/{name}", resume and f"{tmp_path}/{resume}", 1000)
        job = replace(local_job(epochs=1), checkpoints=checkpoints, **options)
        if way == "a worker":
            return work_alone(job, rows_of(12))
        state = _State(replace(job, training=ParameterAveraging(via="spark")))
        if resume:
            state.start_from(checkpoints.read(0, 1)[1])
        checkpoints.write(0, 0, state.complete())
        checkpoints.finish(0, 1, Position())
        return state

    class Tuned(torch.optim.SGD):
        pass

    fit("sgd")
    fit("adam", optimizer=adam)
    fit("tuned", resume="sgd", optimizer=lambda params: Tuned(params, lr=1e-3))
    fit("again", resume="tuned")
    folder = f"the checkpoint in {tmp_path}"
    with pytest.raises(
        ValueError, match=f"{folder}/sgd does not fit .* an optimizer SGD, not Adam"
    ):
        fit("other", resume="sgd", optimizer=adam)
    with pytest.raises(ValueError, match="an optimizer Adam, not Adamax"):
        fit("other", resume="adam", optimizer=torch.optim.Adamax)
    with pytest.raises(ValueError, match=f"{folder}/sgd does not fit .*: .* Unexpected key"):
        fit("other", resume="sgd", model=lambda: torch.nn.Linear(1, 1))


@pytest.mark.parametrize("reduction", ["mean", "sum of all"])
def test_a_loss_without_a_value_for_each_weight_is_refused(reduction: str) -> None:
    import pyarrow as pa

    def loss() -> Any:
        if reduction == "mean":
            return torch.nn.MSELoss()
        return lambda outputs, labels: (outputs - labels).square().sum().reshape(1)

    job = local_job()
    job = replace(job, columns={**job.columns, WEIGHT: "w"}, loss=loss)
    with pytest.raises(ValueError, match="with weight_col the loss must return one value per row"):
        work_alone(job, rows_of(4).append_column(WEIGHT, pa.array([1.0] * 4)))


def test_rows_whose_weights_are_all_zero_are_refused() -> None:
    def fit(weights: list[float], **options: Any) -> Any:
        import pyarrow as pa

        batch = rows_of(2, held=2).append_column(WEIGHT, pa.array(weights))
        job = local_job(epochs=2, **options)
        columns = {**job.columns, WEIGHT: "importance"}
        loss = lambda: torch.nn.MSELoss(reduction="none")  # noqa: E731
        return work_alone(replace(job, columns=columns, loss=loss), batch)

    assert len(history_of(fit([0.0, 1.0, 0.0, 1.0], patience=1))) == 2
    assert len(history_of(fit([0.0, 1.0, 0.0, 0.0]))) == 2
    with pytest.raises(
        ValueError, match="all rows to train on have weight 0 in column 'importance'"
    ):
        fit([0.0, 0.0, 1.0, 1.0])
    with pytest.raises(
        ValueError, match="rows for validation with a weight above 0 in column 'imp"
    ):
        fit([1.0, 1.0, 0.0, 0.0], patience=1)


def test_a_model_predicts_only_what_columns_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and probabilities of thousands of classes would travel to Java for nothing."""
    import pandas as pd

    from gradwire.spark import estimator

    monkeypatch.setattr(estimator, "rank_of_task", lambda: 0)
    module = torch.nn.Linear(2, 3)

    class Sent:
        def read(self) -> bytes:
            return pack(module.state_dict())

    options = {"model": lambda: torch.nn.Linear(2, 3), "device": "cpu", "features_col": "x"}
    rows = pd.Series([np.zeros(2, np.float32)])
    for wanted, columns in (
        ({"prediction_col": "p"}, ["prediction"]),
        ({"raw_prediction_col": "r", "probability_col": "q"}, ["raw", "probability"]),
    ):
        values = {**dict.fromkeys(estimator._OUTPUTS), **options, **wanted, "batch_size": 4}
        [predicted] = estimator._predictor(values, Sent())(iter([rows]))
        assert list(predicted) == columns
