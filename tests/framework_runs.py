"""Trainings of a framework in two processes, and what plain torch makes of the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS = ["one machine", "two machines"]

# What the scripts of all frameworks begin with. ``cases`` are run one after another in the same two processes.
PRELUDE = """
import os, sys, traceback, warnings
from pathlib import Path
import torch
import gradwire.torch

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
local_size = int(os.environ["LOCAL_WORLD_SIZE"])
LR, SEEN = 0.05, []

def data():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(96, 8, generator=generator)
    return [(x, y) for x, y in zip(inputs, inputs.sum(1, keepdim=True).tanh())]

def layers():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

def copied(model):
    # With another name of the module before it, or none.
    state = {name.removeprefix("net."): value for name, value in model.state_dict().items()}
    return {name: value.clone() for name, value in state.items()}

def run(cases):
    for name, case in cases.items():
        SEEN.clear()
        try:
            result = case()
        except Exception:
            result = {"error": traceback.format_exc()}
        torch.save({**result, "seen": list(SEEN)}, folder / f"{name}-{rank}.pt")
        if "error" in result:
            sys.exit(1)
"""


def run_two(script: str, folder: Path, kind: str) -> str:
    """Run a script in two processes, of one machine or as two with one file system; return what they print."""
    path = folder / "train.py"
    path.write_text(PRELUDE + script)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    machines = ["--as-machines"] if kind == "two machines" else []
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", *machines, "--grace", "5"]
    done = subprocess.run(
        [*command, str(path), str(folder)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=420,
        cwd=folder,
    )
    return done.stdout + done.stderr


def results_of(folder: Path, case: str, output: str) -> list[dict[str, Any]]:
    """Return what a case has left, by rank."""
    import torch

    files = [folder / f"{case}-{rank}.pt" for rank in range(2)]
    assert all(file.exists() for file in files), output
    results = [torch.load(file, weights_only=False) for file in files]
    for result in results:
        assert "error" not in result, result["error"] + output
    return results


def trained(
    results: list[dict[str, Any]], *, lr: float, accumulate: int = 1, clip: float = 0.0
) -> dict[str, Any]:
    """Return the parameters after plain SGD with the mean of the ranks' gradients, each clipped as every rank does."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.load_state_dict(results[0]["initial"])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seen = [result["seen"] for result in results]
    assert len(seen[0]) == len(seen[1]) > 0
    assert len(seen[0]) % accumulate == 0
    for first in range(0, len(seen[0]), accumulate):
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for batches in seen:
            optimizer.zero_grad()
            for inputs, targets in batches[first : first + accumulate]:
                ((model(inputs) - targets).square().mean() / accumulate).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for total, param in zip(sums, model.parameters(), strict=True):
                total += param.grad / len(seen)
        for total, param in zip(sums, model.parameters(), strict=True):
            param.grad = total
        optimizer.step()
    return model.state_dict()


def loss_of(state: dict[str, Any]) -> float:
    """Return the loss of parameters over all the data."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.load_state_dict(state)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(7))
    return (model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean().item()


def assert_close(state: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
