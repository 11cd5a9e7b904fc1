"""Train with DistributedDataParallel and gradwire's communication hook, on two ranks under torchrun.

    pip install ".[torch,demo]"
    torchrun --nproc-per-node 2 examples/torch_ddp.py

On two machines, give torchrun --nnodes 2 --node-rank 0 (on the other one 1) --master-addr HOST --master-port 29500.
"""

from __future__ import annotations

import digits
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import register_threshold_hook

EPOCHS, BATCH = 30, 32


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()

    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )  # fmt: skip
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # the hook has the momentum
    state = register_threshold_hook(ddp, optimizer=optimizer, momentum=0.9)

    pixels, labels = map(torch.from_numpy, digits.training(rank, workers))
    shuffled = torch.Generator().manual_seed(rank)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=shuffled).split(BATCH)[:-1]:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(pixels[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        if rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    pixels, labels = map(torch.from_numpy, digits.held_out())
    accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
    params = torch.cat([param.detach().flatten() for param in model.parameters()])
    sent = state.stats.message_bytes / state.stats.steps
    print(
        f"rank {rank}: accuracy {accuracy:.1%}, {sent:.0f} bytes per step instead of "
        f"{4 * params.numel()}; checksum {params.view(torch.int32).sum()}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
