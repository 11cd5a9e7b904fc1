"""FSDP2: shards stay within a machine; the optimiser's updates of each shard are shared between machines."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
fsdp: Any = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("FSDP2 is public from torch 2.6 on", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import state_dict as whole  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import parallel  # noqa: E402

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire.torch import SharedOptimizer  # noqa: E402
from gradwire.torch.optimizer_state import SharedState  # noqa: E402
from gradwire.torch.staging import Staging  # noqa: E402

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
        exchange = gw.Exchange(encoder, node, min_peers=0, codec="dense", apply_residual=True)
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        optimizer = SharedOptimizer(inner, exchange, update_scale="auto")
        found = train(net, optimizer, rank)
    return expected, found, encoder.numel


def test_every_rank_shares_its_own_shard(two_ranks: Ranks) -> None:
    results = two_ranks.run(one_machine_of_two_ranks)
    assert sum(numel for _, _, numel in results) == 9 * 16 + 16 + 16 * 3 + 3
    for expected, found, _ in results:
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def resume_from_a_distributed_checkpoint(rank: int, folder: str) -> Any:
    """Save all ranks' shards and residuals in one checkpoint; train on, and again from the checkpoint."""

    def begin(node: gw.Node) -> Any:
        net = sharded_model()
        encoder = gw.Encoder(sum(param.to_local().numel() for param in net.parameters()))
        exchange = gw.Exchange(encoder, node, min_peers=0, apply_residual=True)
        return net, SharedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), exchange)

    with gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as node:
        net, optimizer = begin(node)
        train(net, optimizer, rank)
        weights, state = whole.get_state_dict(net, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        straight = train(net, optimizer, rank)
    with gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as node:
        net, optimizer = begin(node)
        weights, state = whole.get_state_dict(net, optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder)
        whole.set_state_dict(
            net,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert optimizer.result is None
        again = train(net, optimizer, rank)
    theirs = {**state, "param_groups": [{"params": [], f"gradwire.{1 - rank}": ({},)}]}
    with pytest.raises(ValueError, match=rf"none of this rank, gradwire\.{rank}"):
        optimizer.load_state_dict(theirs)
    return straight, again


def test_one_distributed_checkpoint_has_every_rank_s_shard_and_residual(
    two_ranks: Ranks, tmp_path: Any
) -> None:
    for straight, again in two_ranks.run(resume_from_a_distributed_checkpoint, str(tmp_path)):
        assert all(map(torch.equal, straight, again))


def state_of_uneven_shards(rank: int) -> Any:
    net = sharded_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, rank)
    stagings = [Staging(param) for param in net.parameters()]
    state = SharedState(optimizer, stagings, lambda: ({}, {}))
    before = [optimizer.state[param]["exp_avg"].full_tensor() for param in net.parameters()]
    state.load(state.export())
    after = [optimizer.state[param]["exp_avg"] for param in net.parameters()]
    for moment, param in zip(after, net.parameters(), strict=True):
        assert (moment.shape, moment.stride()) == (param.shape, param.stride())
    again = [each.full_tensor() for each in after]
    train(net, optimizer, rank)
    return before, again


def test_uneven_shards_of_an_optimiser_s_state_are_taken_over(two_ranks: Ranks) -> None:
    for before, again in two_ranks.run(state_of_uneven_shards):
        assert all(map(torch.equal, before, again))


def evaluations(rank: int) -> Any:
    batch = torch.ones(4, 9)
    net = sharded_model()
    params = list(net.parameters())
    plain = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    outputs = []

    @torch.no_grad()
    def evaluate() -> None:
        for own, param in zip(plain.parameters(), params, strict=True):
            own.copy_(param.full_tensor())
        outputs.append((net(batch), plain(batch)))
        net.reshard()

    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        encoder = gw.Encoder(sum(param.to_local().numel() for param in params))
        exchange = gw.Exchange(encoder, node, min_peers=0, apply_residual=True)
        optimizer = SharedOptimizer(torch.optim.AdamW(params, lr=0.1), exchange)
        train(net, optimizer, rank)
        evaluate()
        with optimizer.shared_parameters():
            evaluate()
        optimizer.close()
        evaluate()
    return outputs


def test_an_evaluation_that_ends_with_reshard_leaves_no_stale_parameters(two_ranks: Ranks) -> None:
    # Without, FSDP2's root keeps whole parameters until the next backward pass.
    for outputs in two_ranks.run(evaluations):
        for sharded, plain in outputs:
            torch.testing.assert_close(sharded, plain)
        (own, _), (shared, _), (closed, _) = outputs
        assert not torch.equal(own, shared)
        assert torch.equal(shared, closed)


def refusal_of_tensor_parallelism(_: int) -> str:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    net = parallel.parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        exchange = gw.Exchange(gw.Encoder(60), node, min_peers=0)
        with pytest.raises(
            ValueError, match=r"3 of 6 parameters .* than the 2 .* \(4,\) in 1:"
        ) as error:
            SharedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), exchange)
    return str(error.value)


def test_parameters_that_several_ranks_of_a_sharded_model_have_whole_are_refused(
    two_ranks: Ranks,
) -> None:
    # Every rank would send other elements of them: after 20 steps they differed by a tenth of their size.
    for text in two_ranks.run(refusal_of_tensor_parallelism):
        assert "drift apart" in text


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
