"""Four workers over UDP, of which one is killed midway; the others go on.

    pip install "gradwire[torch,demo]"
    python examples/torch_workers.py

This starts all of them on this machine. On several, start each with its rank and everybody's addresses, and the same
secret in GRADWIRE_SECRET.
"""

from __future__ import annotations

import argparse

import digits
import processes
import torch

import gradwire as gw
from gradwire.torch import SharedOptimizer

WORKERS, STEPS, BATCH = 4, 600, 16
KILLED, KILLED_AT = 3, 150


def train(rank: int, addresses: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    numel = sum(param.numel() for param in model.parameters())

    pixels, labels = map(torch.from_numpy, digits.training(rank, WORKERS))
    batches = torch.Generator().manual_seed(rank)
    with gw.Node(addresses[rank], addresses) as node:
        encoder = gw.Encoder(numel, threshold=gw.TargetDensity(0.02))
        exchange = gw.Exchange(encoder, node, peers=WORKERS - 1, average=True)
        optimizer = SharedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), exchange)
        while exchange.next_step < STEPS:
            batch = torch.randint(len(labels), (BATCH,), generator=batches)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
            if exchange.next_step % 50 == 0:
                print(f"worker {rank}: step {exchange.next_step}, {1 + optimizer.result.received} "
                      "workers", flush=True)  # fmt: skip

    pixels, labels = map(torch.from_numpy, digits.held_out())
    accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
    params = torch.cat([param.detach().flatten() for param in model.parameters()])
    print(f"worker {rank}: accuracy {accuracy:.1%}; checksum {params.view(torch.int32).sum()}")


def launch() -> None:
    """Start the workers, kill one of them midway, and show what the others say."""
    launcher = processes.Workers(processes.free_addresses(WORKERS))
    workers = [launcher.start(rank) for rank in range(WORKERS)]
    victim = workers.pop(KILLED)
    for line in victim.stdout:
        print(line, end="")
        if f"step {KILLED_AT}," in line:
            victim.kill()
            print(f"worker {KILLED} is killed")
    processes.finish(workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, help="of this worker; without, all are started here")
    parser.add_argument("--addresses", nargs=WORKERS, help="host:port of every worker")
    arguments = parser.parse_args()
    if arguments.rank is None:
        launch()
    else:
        train(arguments.rank, arguments.addresses)


if __name__ == "__main__":
    main()
