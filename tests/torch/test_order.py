"""Parameters of several nodes belong together by name, whatever order the optimisers' groups have."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire.torch  # noqa: E402

from .places import Share  # noqa: E402
from .test_optimizer import batch, flat, same_bits  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]


def in_order_of(rank: int, params: Any) -> list[Any]:
    """Return parameters as a set may have them: in another order in every process."""
    return list(params)[:: -1 if rank else 1]


def squares(rank: int) -> Any:
    """Return a model whose parameters fit each other's places."""
    torch.manual_seed(rank)
    return torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(3)])


def train_squares(net: Any, optimizer: Any, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        inputs, _ = batch(0, step)
        (net(inputs) - inputs).square().mean().backward()
        optimizer.step()


def test_parameters_belong_together_by_name_whatever_order_their_groups_have(
    everywhere: Any,
) -> None:
    nets = [squares(rank) for rank in range(2)]
    wanted = copy.deepcopy(nets[0].state_dict())

    def work(rank: int, share: Share) -> Any:
        net = nets[rank]
        params = dict(net[:2].named_parameters()).items()
        groups = [
            {"params": in_order_of(rank, [param for name, param in params if kind in name])}
            for kind in ("weight", "bias")
        ]
        given = [list(map(id, group["params"])) for group in groups]
        inner = torch.optim.AdamW(groups, lr=0.01)
        optimizer = share(net, inner)
        optimizer.join()
        begun = copy.deepcopy(net.state_dict())
        train_squares(net, optimizer, range(3))
        optimizer.add_param_group({"params": in_order_of(rank, net[2].parameters())})
        train_squares(net, optimizer, range(3, 6))
        assert [list(map(id, group["params"])) for group in inner.param_groups[:2]] == given
        return begun, net.state_dict()

    results = everywhere("machines", work)
    for begun, _ in results:
        assert all(torch.equal(begun[name], wanted[name]) for name in begun)
    (_, first), (_, second) = results
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_s_own_parameters_belong_to_names_whatever_order_a_group_has() -> None:
    net = squares(0)
    optimizer = gradwire.torch.share(net, torch.optim.SGD(net.parameters(), lr=0.1), density=0.1)
    train_squares(net, optimizer, range(3))
    weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train_squares(net, optimizer, range(3, 6))
    other = squares(1)
    inner = torch.optim.SGD(in_order_of(1, other.parameters()), lr=0.1)
    again = gradwire.torch.share(other, inner, density=0.1)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    train_squares(other, again, range(3, 6))
    assert same_bits(flat(other), flat(net))
