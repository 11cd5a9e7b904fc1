"""Train with DistributedDataParallel within each machine and gradwire between the machines.

    pip install ".[torch,demo]"
    gradwire run -n 2 examples/torch_machines.py

On several machines use torchrun on each, as for any DDP training, with the same secret in GRADWIRE_SECRET.
"""

from __future__ import annotations

import os

import digits
import torch
import torch.distributed as dist

import gradwire.torch

EPOCHS, BATCH = 12, 32


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    local, _ = dist.new_subgroups(local_size)

    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=local)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = gradwire.torch.share(model, optimizer, process_group=local)

    pixels, labels = map(torch.from_numpy, digits.training(rank, workers))
    shuffled = torch.Generator().manual_seed(rank)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=shuffled).split(BATCH)[:-1]:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    pixels, labels = map(torch.from_numpy, digits.held_out())
    with optimizer.shared_parameters():
        accuracy = (net(pixels).argmax(1) == labels).float().mean().item()
    params = torch.cat([param.flatten() for param in net.state_dict().values()])
    print(
        f"rank {rank}: accuracy {accuracy:.1%}, {optimizer.result.sent_bytes} bytes in the last step of this machine "
        f"instead of {4 * params.numel()}; checksum {params.view(torch.int32).sum()}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
