"""The memory that ``share`` takes, which docs/howto/costs.md says."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw

torch: Any = pytest.importorskip("torch")

import gradwire.torch  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc"),
]

# Messages, what they are made of, and the modules that are imported on the way.
REST = 1.5
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
    shared = gradwire.torch.share(
        model, optimizer, node=node, min_peers=0, overlap=int(sys.argv[2]), density=eval(sys.argv[3])
    )
    for _ in range(3):
        shared.step()
    print((peak_bytes() - before) / 20e6)
    shared.leave()
    print((peak_bytes() - before) / 20e6)
"""


@pytest.mark.parametrize(
    ("dtype", "overlap", "density", "most", "to_leave"),
    [
        ("float32", 0, 0.01, 4, 4),
        pytest.param("float32", 1, 0.01, 4, 4, marks=pytest.mark.slow),
        pytest.param("float32", 0, {"1*": 0.02, "*": 0.01}, 4, 4, marks=pytest.mark.slow),
        ("bfloat16", 0, 0.01, 8, 6),
    ],
)
def test_a_step_and_leaving_take_what_the_page_on_costs_says(
    dtype: str, overlap: int, density: Any, most: int, to_leave: int
) -> None:
    command = [sys.executable, "-c", TRAIN, dtype, str(overlap), repr(density)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    in_steps, in_all = map(float, done.stdout.split())
    assert in_steps <= most + REST
    # The last update; then this node's own parameters, of which one array at a time is copied once more.
    assert in_all <= most + to_leave + REST + 2 * 4 / 20


SHARE = """
from pathlib import Path
import numpy as np
import gradwire as gw

def peak_bytes():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])

params = [np.ones((1000, 1000), np.float32) for _ in range(20)]
update = [np.full((1000, 1000), 1e-3 * place, np.float32) for place in range(20)]
before = peak_bytes()
with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
    shared = gw.share(params, node=node, min_peers=0)
    for _ in range(3):
        shared.step(update)
    print((peak_bytes() - before) / 20e6)
"""


def test_arrays_take_as_much() -> None:
    command = [sys.executable, "-c", SHARE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) <= 4 + REST


RANK = """
import os
from pathlib import Path
import torch
import gradwire.torch

def bytes_of(name, path):
    text = Path("/proc/self", path).read_text()
    return 1024 * int(text.split(name + ":")[1].split()[0])

torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(20_000, 1000)])
for param in model:
    param.grad = torch.randn(1000, 1000).repeat(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
before = bytes_of("Pss", "smaps_rollup")
peak_before = bytes_of("VmHWM", "status")
shared = gradwire.torch.share(model, optimizer)
for _ in range(3):
    shared.step()
taken = bytes_of("Pss", "smaps_rollup") - before
print(taken / 20e6, (bytes_of("VmHWM", "status") - peak_before) / 20e6, flush=True)
input()  # memory that others have, too, counts once: none of them may end before
shared.close()
"""


def test_ranks_of_a_machine_take_what_the_page_on_costs_says() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks: list[Any] = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    lines = [process.stdout.readline() for process in ranks]
    for process in ranks:
        process.communicate("\n", timeout=300)
        assert process.returncode == 0
    taken, peaks = zip(*(map(float, line.split()) for line in lines), strict=True)
    assert sum(taken) <= 4 * (2 + 2) + 2 * REST
    # Local rank 0 sees all of it, the others what they read and write.
    assert max(peaks) <= 4 * (2 + 2) + REST


def test_an_ended_training_is_freed_before_the_next() -> None:
    gc.disable()
    try:
        ended: list[Any] = []
        for _ in range(3):
            model = torch.nn.Linear(1024, 1024, bias=False)
            with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
                shared = gradwire.torch.share(
                    model, torch.optim.AdamW(model.parameters()), node=node, min_peers=0
                )
                assert all(each() is None for each in ended)
                model.weight.grad = torch.ones_like(model.weight)
                shared.step()
                shared.close()
            ended += [weakref.ref(model.weight), weakref.ref(shared.exchange)]
            del model, shared, node
    finally:
        gc.enable()


def test_the_former_exchange_is_freed_when_parameters_were_added() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        shared = gradwire.torch.share(model, optimizer, node=node, min_peers=0)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        shared.step()
        former = weakref.ref(shared.exchange)
        model[0].requires_grad_(True)
        shared.add_param_group({"params": list(model[0].parameters())})
        assert former() is None
        shared.close()
