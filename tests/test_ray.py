"""Ray Train with four workers on two node processes: one training, and a worker that dies is replaced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ray", reason="ray is not installed")

import ray.train
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from gradwire.ray import GradwireConfig

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("cluster"),
]

WORKERS, STEPS = 4, 60
MORTAL_STEPS, REPORTED = 1_500, 100  # half a minute: Ray takes some seconds to start a worker
EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_train.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two node processes with two processors each."""
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100_000_000}
    patch = pytest.MonkeyPatch()
    # `ray.init()` without an address, as in the example, would use the token that it has once left in the home folder.
    patch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(address=cluster.address, runtime_env={"env_vars": variables}, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


class Reports(ray.train.UserCallback):
    """Writes what Ray hears from the workers, where it writes its results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, *_: Any, metrics: list[dict[str, Any]], **__: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def fit(
    train: Callable[[], None],
    folder: Path,
    *,
    config: GradwireConfig | None = None,
    max_failures: int = 0,
) -> list[Any]:
    """Train, and return all reports: a list of metrics by rank for each."""
    reports = folder / "reports"
    trainer = TorchTrainer(
        train,
        torch_config=config or GradwireConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"),
            callbacks=[Reports(reports)],
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
    )
    trainer.fit()
    return list(map(json.loads, reports.read_text().splitlines()))


def written(folder: Path, name: str) -> list[Any]:
    """Return what the workers have written, by rank."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(WORKERS)]


def test_workers_on_two_nodes_train_as_plain_averaging(tmp_path: Path) -> None:
    folder, steps = tmp_path, STEPS

    def train() -> None:
        import torch

        import gradwire.torch

        context = ray.train.get_context()
        rank, workers = context.get_world_rank(), context.get_world_size()
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(workers * steps, 4, 8, generator=generator)
        torch.manual_seed(rank)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        shared = gradwire.torch.share(model, optimizer, codec="dense")
        shared.join()
        initial = [param.tolist() for param in model.parameters()]
        for step in range(steps):
            batch = inputs[step * workers + rank]
            shared.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            shared.step()
            if step % 20 == 19:
                ray.train.report({"step": shared.step_number})
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        result = {
            "initial": initial,
            "trained": [param.tolist() for param in model.state_dict().values()],
            "variables": {name: int(os.environ[name]) for name in names},
            "node": ray.get_runtime_context().get_node_id(),
            "group": os.environ["GROUP_RANK"],
            "has_process_group": torch.distributed.is_initialized(),
            "secret": os.environ["GRADWIRE_SECRET"],
        }
        (folder / f"plain-{rank}.json").write_text(json.dumps(result))

    assert fit(train, folder) == [[{"step": step}] * WORKERS for step in (20, 40, 60)]
    results = written(folder, "plain")
    for rank, result in enumerate(results):
        team = [other for other in results if other["node"] == result["node"]]
        assert len(team) == 2
        assert result["variables"] == {
            "RANK": rank,
            "WORLD_SIZE": 4,
            "LOCAL_RANK": team.index(result),
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_WORLD_SIZE": 2,
        }
        assert not result["has_process_group"]
        for key in ("initial", "trained", "secret"):
            assert result[key] == results[0][key]
    assert {result["group"] for result in results} == {"0", "1"}
    import torch

    inputs = torch.randn(WORKERS * STEPS, 4, 8, generator=torch.Generator().manual_seed(7))
    model = torch.nn.Linear(8, 1)
    for param, values in zip(model.parameters(), results[0]["initial"], strict=True):
        param.data = torch.tensor(values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        batch = inputs[step * WORKERS : (step + 1) * WORKERS].flatten(0, 1)
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    for param, values in zip(model.parameters(), results[0]["trained"], strict=True):
        torch.testing.assert_close(param.detach(), torch.tensor(values), rtol=1e-4, atol=1e-5)


def mortal(folder: Path, victim: int, steps: int = MORTAL_STEPS) -> Callable[[], None]:
    """Return a training in which a worker is killed in its first life; it goes on until all take part again."""

    def train() -> None:
        import signal
        import time

        import torch

        import gradwire.torch

        rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        lives = folder / f"lives-{rank}"
        with lives.open("a") as file:
            file.write(f"{os.getpid()}\n")
        is_first = len(lives.read_text().split()) == 1
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        shared = gradwire.torch.share(model, optimizer, density=0.5)
        begun = shared.join().step
        seen = {}
        while shared.step_number < steps:
            if rank == victim and is_first and shared.step_number == 15:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = torch.randn(4, 8)
            shared.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            before = shared.exchange.total_workers
            shared.step()
            is_complete = workers == before == shared.exchange.total_workers
            seen[shared.step_number] = is_complete
            if shared.step_number % REPORTED == 0 and is_complete:
                ray.train.report({"step": shared.step_number})
            time.sleep(0.02)
        result = {
            "begun": begun,
            "seen": seen,
            "pid": os.getpid(),
            "trained": [param.tolist() for param in model.state_dict().values()],
        }
        (folder / f"mortal-{rank}.json").write_text(json.dumps(result))

    return train


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_that_is_killed_is_replaced_while_the_others_go_on(
    tmp_path: Path, victim: int
) -> None:
    config = GradwireConfig(replace_workers=True)
    reports = fit(mortal(tmp_path, victim), tmp_path, config=config, max_failures=2)
    assert reports[-1] == [{"step": MORTAL_STEPS}] * WORKERS
    assert all(report == [report[0]] * WORKERS for report in reports)
    results = written(tmp_path, "mortal")
    expected = results[1]["seen"]
    for rank, outcome in enumerate(results):
        lives = (tmp_path / f"lives-{rank}").read_text().split()
        assert len(lives) == (2 if rank == victim else 1)
        assert int(lives[-1]) == outcome["pid"]
        assert (outcome["begun"] > 15) == (rank == victim)
        # Whether to report is agreed upon in every step, or Ray would wait for ever.
        assert (False in outcome["seen"].values()) == (rank != victim)
        assert outcome["seen"].items() <= expected.items()
        assert outcome["trained"] == results[0]["trained"]


def test_without_replacement_all_workers_start_again(tmp_path: Path) -> None:
    reports = fit(mortal(tmp_path, 3, REPORTED), tmp_path, max_failures=1)
    assert reports == [[{"step": REPORTED}] * WORKERS]
    results = written(tmp_path, "mortal")
    for rank, outcome in enumerate(results):
        assert len((tmp_path / f"lives-{rank}").read_text().split()) == 2
        assert outcome["begun"] == 0
        assert outcome["trained"] == results[0]["trained"]


def test_arrays_are_shared_without_torch_s_trainer(tmp_path: Path) -> None:
    def train() -> float:
        import numpy as np

        import gradwire as gw

        rank = int(os.environ["RANK"])
        weights = np.full(3, rank, np.float32)
        shared = gw.share(weights, codec="dense")
        for _ in range(4):
            shared.step(np.full(3, rank + 1, np.float32))
        return float(shared.shared().sum())

    trainer = DataParallelTrainer(
        train,
        backend_config=GradwireConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    )
    assert trainer.fit().return_value == 3 * 4 * 2.5


def test_the_example_runs() -> None:
    # Ray takes lines that differ in numbers alone for one.
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, **variables},
        text=True,
        capture_output=True,
        timeout=240,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    accuracies = re.findall(r"'accuracy': ([\d.]+)", output)
    assert accuracies, output
    assert all(float(accuracy) > 0.93 for accuracy in accuracies)
    checksums = dict(re.findall(r"rank (\d): .*checksum (-?\d+)", output))
    assert sorted(checksums) == ["0", "1"], output
    assert len(set(checksums.values())) == 1
