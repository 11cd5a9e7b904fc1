"""Train on four workers over UDP; one is killed midway, another joins late, and training continues.

    pip install ".[torch,demo]"
    python examples/torch_workers.py

This starts all of them on this machine. On several machines, start each with its rank and all addresses, and the same
secret in GRADWIRE_SECRET; a late worker receives the parameters from the others.
"""

from __future__ import annotations

import argparse

import digits
import processes
import torch

import gradwire as gw
from gradwire.torch import SharedOptimizer

WORKERS, ADDRESSES, STEPS, BATCH = 4, 5, 500, 16
KILLED, KILLED_AT, LATE = 3, 150, 4


def train(rank: int, addresses: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the late worker replaces its initial parameters
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    if rank != LATE:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 16)
    numel = sum(param.numel() for param in model.parameters())
    if rank == LATE:
        input("press Enter to join\n")

    pixels, labels = map(torch.from_numpy, digits.training(rank % WORKERS, WORKERS))
    batches = torch.Generator().manual_seed(rank)
    with gw.Node(addresses[rank], addresses) as node:
        encoder = gw.Encoder(numel, threshold=gw.TargetDensity(0.02))
        min_peers = WORKERS - 1 if rank != LATE else 1
        exchange = gw.Exchange(encoder, node, min_peers=min_peers)
        optimizer = SharedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), exchange)
        joined = optimizer.join()
        if joined.is_late:
            print(f"worker {rank}: joined at step {joined.step}", flush=True)
        while exchange.next_step < STEPS:
            batch = torch.randint(len(labels), (BATCH,), generator=batches)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
            if exchange.next_step % 50 == 0:
                workers = 1 + len(exchange.members)
                print(f"worker {rank}: step {exchange.next_step}, {workers} workers", flush=True)

    pixels, labels = map(torch.from_numpy, digits.held_out())
    accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
    params = torch.cat([param.detach().flatten() for param in model.parameters()])
    print(f"worker {rank}: accuracy {accuracy:.1%}; checksum {params.view(torch.int32).sum()}")


def launch() -> None:
    """Start all workers, kill one of them midway, let the fifth join, and print their output."""
    launcher = processes.Workers(processes.free_addresses(ADDRESSES))
    workers = [launcher.start(rank) for rank in range(ADDRESSES)]
    late, victim = workers[LATE], workers.pop(KILLED)
    for line in victim.stdout:
        print(line, end="")
        if f"step {KILLED_AT}," in line:
            victim.kill()
            print(f"worker {KILLED} is killed", flush=True)
    print("\n", file=late.stdin, flush=True)
    processes.finish(workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, help="of this worker; without, all are started here")
    parser.add_argument("--addresses", nargs=ADDRESSES, help="host:port of every worker")
    arguments = parser.parse_args()
    if arguments.rank is None:
        launch()
    else:
        train(arguments.rank, arguments.addresses)


if __name__ == "__main__":
    main()
