"""One distributed checkpoint of several ranks that hold the whole model each."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire.exchange import redistribute  # noqa: E402

from .ranks import Ranks  # noqa: E402
from .test_optimizer import OPTIMIZERS, SECRET, flat, model, train  # noqa: E402

pytestmark = pytest.mark.torch

# Not imported as ``torch.distributed.checkpoint``, which takes seconds and does without a process group.
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
whole: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
formats: Any = importlib.import_module("torch.distributed.checkpoint.format_utils")


def begin(rank: int, name: str) -> Any:
    node = gw.Node("127.0.0.1:0", secret=SECRET, node_id=rank + 1)
    addresses: list[Any] = [None, None]
    dist.all_gather_object(addresses, node.address)
    if rank:
        node.add_peer(addresses[0])
    node.expected_peers = 1
    net = model()
    inner = OPTIMIZERS[name](net.parameters())
    return node, net, gradwire.torch.share(net, inner, density=0.1, node=node)


def moments(net: Any, optimizer: Any) -> Any:
    """Return a copy of this rank's own state of the optimiser."""
    states = [optimizer.state[param] for param in net.parameters()]
    return torch.cat([value.flatten() for state in states for value in state.values()])


def go_on(rank: int, net: Any, optimizer: Any) -> Any:
    """Train on; return the moments before, the parameters, and the moments."""
    before = moments(net, optimizer)
    train(net, optimizer, rank, range(6, 12))
    return before, flat(net), moments(net, optimizer)


def resume(
    rank: int, folder: str, name: str, *, is_async: bool = False, is_old: bool = False
) -> Any:
    """Return what `go_on` does after a save, and again from the checkpoint."""
    node, net, optimizer = begin(rank, name)
    with node:
        train(net, optimizer, rank, range(6))
        weights, state = whole.get_state_dict(net, optimizer)
        if is_old:
            group = state["param_groups"][0]
            group[f"gradwire.{rank}"] = group[f"gradwire.{rank}"][:1]
        saved = {"model": weights, "optimizer": state}
        if is_async:
            saving = dcp.async_save(saved, checkpoint_id=folder)
        else:
            dcp.save(saved, checkpoint_id=folder)
        straight = go_on(rank, net, optimizer)
        if is_async:
            saving.result()  # written while the training went on
        optimizer.close()
    node, net, optimizer = begin(rank, name)
    with node:
        weights, state = whole.get_state_dict(net, optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder)
        weights, state = loaded["model"], loaded["optimizer"]
        whole.set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
        assert optimizer.result is None
        again = go_on(rank, net, optimizer)
        optimizer.close()
    return straight, again


def resume_later(rank: int, folder: str, name: str) -> Any:
    return resume(rank, folder, name, is_async=True)


def resume_an_old_one(rank: int, folder: str, name: str) -> Any:
    return resume(rank, folder, name, is_old=True)


@pytest.mark.parametrize("work", [resume, resume_later], ids=["save", "async_save"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_every_rank_goes_on_with_its_own_moments(
    two_ranks: Ranks, tmp_path: Any, name: str, work: Any
) -> None:
    results = two_ranks.run(work, str(tmp_path), name)
    (one, _), (other, _) = results
    assert not torch.equal(one[0], other[0]), "each rank has moments of its own"
    for straight, again in results:
        assert all(map(torch.equal, straight, again))


def refused(rank: int) -> list[str]:
    """Return the errors of the options that keep the state of one rank alone."""
    node, net, optimizer = begin(rank, "AdamW")
    texts = []
    with node:
        train(net, optimizer, rank, range(2))
        saved = whole.get_optimizer_state_dict(net, optimizer)
        chosen = whole.StateDictOptions(full_state_dict=True, cpu_offload=True)
        with pytest.raises(ValueError, match="cpu_offload") as error:
            whole.get_state_dict(net, optimizer, options=chosen)
        texts.append(str(error.value))
        optimizer.close()
        net = model()
        chosen = whole.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with gw.Node("127.0.0.1:0", secret=SECRET) as own:
            again = gradwire.torch.share(net, OPTIMIZERS["AdamW"](net.parameters()), node=own)
            with pytest.raises(ValueError, match="broadcast_from_rank0") as error:
                whole.set_optimizer_state_dict(net, again, {} if rank else saved, options=chosen)
            again.close()
        texts.append(str(error.value))
    return texts


def test_options_that_keep_one_rank_s_state_alone_are_refused(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(refused):
        assert all("every rank has a residual of its own: save and load" in text for text in texts)


def test_a_checkpoint_without_every_rank_s_moments_gives_all_the_same(
    two_ranks: Ranks, tmp_path: Any
) -> None:
    (_, one), (_, other) = two_ranks.run(resume_an_old_one, str(tmp_path), "AdamW")
    assert torch.equal(one[0], other[0])


def test_one_node_goes_on_from_the_checkpoint_of_two(two_ranks: Ranks, tmp_path: Any) -> None:
    two_ranks.run(resume, str(tmp_path / "two"), "AdamW")
    formats.dcp_to_torch_save(tmp_path / "two", tmp_path / "one.pt")
    saved = torch.load(tmp_path / "one.pt")
    [group] = saved["optimizer"]["param_groups"]
    [merged] = redistribute([group[f"gradwire.{rank}"][0] for rank in (0, 1)], 1)
    net = model()
    optimizer = gradwire.torch.share(net, OPTIMIZERS["AdamW"](net.parameters()), density=0.1)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict({**saved["optimizer"], "gradwire": merged})
    assert optimizer.step_number == 6
    assert optimizer.state[net[0].weight]["step"] == 6
    go_on(0, net, optimizer)


def hook_in_a_checkpoint(rank: int, folder: str) -> list[tuple[Any, Any]]:
    """Return parameters and residuals of a training that goes on, and of one from its checkpoint."""

    def trained(net: Any, steps: range, load: bool) -> tuple[Any, Any]:
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        hook = gradwire.torch.register_threshold_hook(ddp)
        if load:
            values = {"model": net.state_dict(), f"hook.{rank}": (hook.state_dict(),)}
            dcp.load(values, checkpoint_id=folder)
            hook.load_state_dict(values[f"hook.{rank}"][0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in steps:
            if step == 4 and not load:
                values = {"model": net.state_dict(), f"hook.{rank}": (hook.state_dict(),)}
                dcp.save(values, checkpoint_id=folder)
            train(ddp, optimizer, rank, range(step, step + 1))
        residuals = hook.state_dict()["residuals"]["parameters"]
        return flat(net), torch.cat([residuals[name]["residual"] for name in sorted(residuals)])

    return [trained(model(), range(8), False), trained(model(), range(4, 8), True)]


def test_the_state_of_the_hook_goes_into_a_distributed_checkpoint_as_documented(
    two_ranks: Ranks, tmp_path: Any
) -> None:
    residuals = []
    for first, second in two_ranks.run(hook_in_a_checkpoint, str(tmp_path)):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        residuals.append(first[1])
    assert not torch.equal(*residuals)
