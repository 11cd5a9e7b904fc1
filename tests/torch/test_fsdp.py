"""FSDP2: shards stay within a machine; the optimiser's updates of each shard are shared between machines."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
fsdp: Any = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("FSDP2 is public from torch 2.6 on", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire.torch import SharedOptimizer  # noqa: E402

from .ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 6
SECRET = bytes(range(32))


def sharded_model() -> Any:
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    mesh = init_device_mesh("cpu", (2,))
    return fsdp.fully_shard(net, mesh=mesh)


def train(net: Any, optimizer: Any, rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(8, 9, generator=generator)).square().mean().backward()
        optimizer.step()
    return [param.full_tensor().detach() for param in net.parameters()]


def one_machine_of_two_ranks(rank: int) -> Any:
    plain = sharded_model()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), rank)
    net = sharded_model()
    shards = [param.to_local() for param in net.parameters()]
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        encoder = gw.Encoder(sum(shard.numel() for shard in shards))
        exchange = gw.Exchange(encoder, node, min_peers=0, codec="dense")
        optimizer = SharedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), exchange)
        found = train(net, optimizer, rank)
    return expected, found, encoder.numel


def test_every_rank_shares_its_own_shard(two_ranks: Ranks) -> None:
    results = two_ranks.run(one_machine_of_two_ranks)
    assert sum(numel for _, _, numel in results) == 9 * 16 + 16 + 16 * 3 + 3
    for expected, found, _ in results:
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def refusal(_: int) -> str:
    net = sharded_model()
    try:
        gradwire.torch.share(net, torch.optim.AdamW(net.parameters()))
    except TypeError as error:
        return str(error)
    return "taken"


def test_share_names_the_recipe_for_a_sharded_model(two_ranks: Ranks) -> None:
    for text in two_ranks.run(refusal):
        assert "fully_shard" in text
        assert "docs/torch.md shows under FSDP2" in text
