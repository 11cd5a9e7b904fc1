"""Train with Ray Train: its workers share an optimiser, and one that dies is replaced while the others go on.

    pip install ".[torch,demo,ray]"
    python examples/ray_train.py

This starts a Ray of its own on this machine; on a cluster, submit the script as a job.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import digits
import ray.train
import torch
from ray.train.torch import TorchTrainer

import gradwire.torch
from gradwire.ray import GradwireConfig

STEPS, BATCH, REPORTED = 400, 16, 50


def train() -> None:
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = gradwire.torch.share(model, optimizer)

    pixels, labels = map(torch.from_numpy, digits.training(rank, workers))
    batches = torch.Generator().manual_seed(rank)
    optimizer.join()  # a worker that replaces another begins at the others' step
    while optimizer.step_number < STEPS:
        batch = torch.randint(len(labels), (BATCH,), generator=batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
        loss.backward()
        before = optimizer.exchange.total_workers
        optimizer.step()
        # Ray's report waits for all workers, and one that replaces another joins in a step of theirs.
        is_complete = workers == before == optimizer.exchange.total_workers
        if optimizer.step_number % REPORTED == 0 and is_complete:
            ray.train.report({"step": optimizer.step_number, "loss": loss.item()})

    pixels, labels = map(torch.from_numpy, digits.held_out())
    with optimizer.shared_parameters():
        accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
    params = torch.cat([param.flatten() for param in model.state_dict().values()])
    checksum = int(params.view(torch.int32).sum())
    print(f"rank {rank}: accuracy {accuracy:.1%}; checksum {checksum}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"accuracy": accuracy, "checksum": checksum}, checkpoint=checkpoint)


def main() -> None:
    # Workers import the same modules as this script.
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    trainer = TorchTrainer(
        train,
        torch_config=GradwireConfig(replace_workers=True),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
