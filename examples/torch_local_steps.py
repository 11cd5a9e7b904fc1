"""Train on four workers that take 20 local steps at a time and then share the changes over UDP.

    pip install ".[torch,demo]"
    python examples/torch_local_steps.py

This starts all four on this machine. On several machines, start each with its rank and all addresses, and the same
secret in GRADWIRE_SECRET.
"""

from __future__ import annotations

import digits
import processes
import torch

import gradwire as gw
from gradwire.torch import SharedOptimizer

WORKERS, STEPS, BATCH, LOCAL_STEPS = 4, 400, 32, 20


def train(rank: int, addresses: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    numel = sum(param.numel() for param in model.parameters())

    pixels, labels = map(torch.from_numpy, digits.training(rank, WORKERS))
    batches = torch.Generator().manual_seed(rank)
    with gw.Node(addresses[rank], addresses) as node:
        exchange = gw.Exchange(
            gw.Encoder(numel, threshold=gw.TargetDensity(0.02)),
            node,
            min_peers=WORKERS - 1,
            every=LOCAL_STEPS,
        )
        optimizer = SharedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), exchange)
        for _ in range(STEPS):
            batch = torch.randint(len(labels), (BATCH,), generator=batches)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
        stats = exchange.stats

    pixels, labels = map(torch.from_numpy, digits.held_out())
    accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
    params = torch.cat([param.detach().flatten() for param in model.parameters()])
    print(
        f"worker {rank}: accuracy {accuracy:.1%}, {stats.sent_bytes / STEPS:.0f} bytes per step "
        f"instead of {4 * numel}; checksum {params.view(torch.int32).sum()}"
    )


if __name__ == "__main__":
    processes.run(train, WORKERS, __doc__.splitlines()[0])
