"""The memory that ``share`` takes, which docs/howto/costs.md says."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

NUMEL = 20_000_000
TRAIN = """
import sys
from pathlib import Path
import torch
import gradwire as gw
import gradwire.torch

def peak_bytes():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])

dtype = getattr(torch, sys.argv[1])
model = torch.nn.ParameterList(torch.zeros(1000, 1000, dtype=dtype) for _ in range(20))
noise = torch.randn(1000, 1000).to(dtype)
for param in model:
    param.grad = noise.clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
before = peak_bytes()
with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
    shared = gradwire.torch.share(model, optimizer, node=node, min_peers=0)
    for _ in range(3):
        shared.step()
    print((peak_bytes() - before) / 20e6)
    shared.leave()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 4), ("bfloat16", 8)])
def test_a_step_takes_what_the_page_on_costs_says(dtype: str, most: int) -> None:
    command = [sys.executable, "-c", TRAIN, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    # Messages, what they are made of, and the modules that are imported on the way.
    assert float(done.stdout) <= most + 1.5
