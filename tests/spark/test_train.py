"""One worker's part of a training, without a cluster."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gradwire as gw
from gradwire.spark import SharedTraining

pytestmark = [pytest.mark.spark, pytest.mark.torch]
torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")

from gradwire.spark.train import SharedTrainer, Times, TrainingJob  # noqa: E402

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
