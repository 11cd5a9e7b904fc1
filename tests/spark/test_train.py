"""One worker's part of a training, without a cluster."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gradwire as gw
from gradwire.spark import ParameterAveraging, SharedTraining

pytestmark = [pytest.mark.spark, pytest.mark.torch]
torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")
pytest.importorskip("pandas", reason="pandas is not installed")

from gradwire.spark.checkpoints import Checkpoints, unpack  # noqa: E402
from gradwire.spark.rounds import _CHUNK, _STATE, _load, _rest_of, _State  # noqa: E402
from gradwire.spark.train import (  # noqa: E402
    AveragingTrainer,
    SharedTrainer,
    Times,
    TrainingJob,
    averaged_values,
    pack,
)

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
        driver=None,
    )


def take_step(replica: Any, inputs: Any) -> None:
    replica.optimizer.zero_grad()
    replica.model(inputs).square().mean().backward()
    replica.optimizer.step()


@pytest.mark.parametrize("average_optimizer", [True, False])
def test_the_state_of_a_round_goes_to_the_workers_and_back(average_optimizer: bool) -> None:
    job = job_of(ParameterAveraging(via="spark", average_optimizer=average_optimizer))
    state = _State(job)
    inputs = torch.randn(8, 3)
    for _ in range(2):  # first without a state of the optimiser, then with it
        worker = _load(job, unpack(state.packed()))
        take_step(worker, inputs)
        flat = averaged_values(worker, ParameterAveraging(average_optimizer=average_optimizer))
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


def test_statistics_of_batch_norm_are_averaged_with_the_parameters() -> None:
    from gradwire.spark.train import ModelReplica

    training = ParameterAveraging(every=1)
    secret = bytes(range(32))
    with (
        gw.Node("127.0.0.1:0", secret=secret, node_id=0) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=secret, node_id=1) as second,
    ):
        replicas = [ModelReplica(job_of(training)) for _ in range(2)]

        def work(rank: int, node: gw.Node) -> None:
            node.wait_for_peers(1, 30.0)
            trainer = AveragingTrainer(training, replicas[rank], node, 2)
            take_step(replicas[rank], torch.randn(4, 3, generator=torch.manual_seed(rank)))
            trainer.step(Times())

        with ThreadPoolExecutor() as pool:
            list(pool.map(work, range(2), (first, second)))
    left, right = (replica.model.state_dict() for replica in replicas)
    for name in ("0.weight", "1.running_mean", "1.running_var"):
        assert torch.equal(left[name], right[name])
    assert left["1.running_mean"].abs().max() > 0
