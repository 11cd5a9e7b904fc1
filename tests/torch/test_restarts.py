"""torchrun starts all ranks of a machine again when one dies; the training then goes on bit for bit."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TRAIN = """
import os, signal, sys
from pathlib import Path
import torch
import gradwire.torch

rank, folder, dies = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = gradwire.torch.share(model, torch.optim.AdamW(model.parameters(), lr=0.01))

# As docs/howto/checkpoints.md has it: the newest step of which all ranks have a file.
size = int(os.environ["WORLD_SIZE"])
steps = [{int(path.stem) for path in folder.glob(f"rank-{other}/*.pt")} for other in range(size)]
newest = max(set.intersection(*steps), default=0)
if newest:
    model_state, optimizer_state = torch.load(folder / f"rank-{rank}" / f"{newest}.pt")
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
optimizer.join()
for step in range(optimizer.step_number, 60):
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    if is_first and f"{rank} {step}" == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    if (step + 1) % 20 == 0:
        path = folder / f"rank-{rank}" / f"{step + 1}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save((model.state_dict(), optimizer.state_dict()), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
optimizer.close()
state = torch.cat([value.flatten() for value in model.state_dict().values()])
print(f"rank {rank} ends with {state.view(torch.int32).sum().item()}", flush=True)
"""


def torchrun(tmp_path: Path, dies: str, machines: int = 1) -> list[str]:
    """Return the checksums of the ranks at the end; those of runs that were taken back are left out."""
    folder = tmp_path / f"dies-{dies.replace(' ', '-')}"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GRADWIRE_SECRET": bytes(range(32)).hex(),
        "OMP_NUM_THREADS": "1",
    }
    options = ["--nproc-per-node", "2", "--max-restarts", "2"]
    if machines == 1:
        options += ["--standalone"]
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        options += ["--nnodes", str(machines), "--rdzv-backend", "c10d", "--rdzv-id", "run"]
        options += ["--rdzv-endpoint", endpoint]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder)]
    agents = [
        subprocess.Popen(
            [*command, dies],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(machines)
    ]
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # and with it its ranks
    assert not any(agent.returncode for agent in agents), outputs
    sums = dict(re.findall(r"rank (\d) ends with (-?\d+)", "".join(outputs)))
    assert len(sums) == 2 * machines, outputs
    return list(sums.values())


def test_a_local_rank_that_is_killed_changes_no_bit(tmp_path: Path) -> None:
    [whole, *others] = [torchrun(tmp_path, dies) for dies in ("nobody", "1 47", "0 33")]
    assert whole[0] == whole[1]
    assert others == [whole, whole]


def test_a_machine_that_torchrun_starts_again_takes_the_others_back_with_it(tmp_path: Path) -> None:
    whole, restarted = (torchrun(tmp_path, dies, machines=2) for dies in ("nobody", "3 47"))
    assert len({*whole, *restarted}) == 1
