"""What a shared optimiser refuses before anything has changed: places, roles, tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402

from .places import share  # noqa: E402
from .test_optimizer import flat, model, same_bits, train  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]


@pytest.mark.parametrize("name", ["join", "resync", "catch_up", "leave"])
def test_what_changes_the_parameters_is_refused_inside_shared_parameters(name: str) -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(2))
    own = flat(net)
    with optimizer.shared_parameters():
        shared = flat(net)
        with pytest.raises(
            RuntimeError, match=rf"{name}\(\) inside .* would be lost: call it outside"
        ):
            getattr(optimizer, name)()
        assert same_bits(flat(net), shared)
    assert same_bits(flat(net), own)
    optimizer.leave()
    assert not same_bits(flat(net), own), "the residual was sent"
    optimizer.leave()
    assert optimizer.catch_up() == 0
    with pytest.raises(gw.Closed):
        optimizer.resync()


def test_a_checkpoint_is_not_loaded_inside_shared_parameters() -> None:
    first = model()
    optimizer = share(first)
    train(first, optimizer, 0, range(3))
    net = model()
    again = share(net)
    with again.shared_parameters(), pytest.raises(RuntimeError, match=r"load_state_dict.* outside"):
        again.load_state_dict(optimizer.state_dict())
    assert not again.state
    net.load_state_dict(first.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert same_bits(flat(net), flat(first))


def test_a_resync_before_the_first_step_joins() -> None:
    net = model(torch.bfloat16)
    for param in net.parameters():
        param.data.fill_(torch.nan)  # as memory that nothing was written to
    optimizer = share(net)
    net.load_state_dict(model(torch.bfloat16).state_dict())
    assert optimizer.resync().step == 0
    assert same_bits(flat(net), flat(model(torch.bfloat16)))


def test_tensors_that_cannot_be_shared_are_named_before_there_is_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gw.Node, "from_env", lambda **_: pytest.fail("made a node"))
    net = model()
    net.register_buffer("mask", torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="mask has no memory"):
        share(net)
    net = model()
    net[0] = torch.nn.Linear(20, 8, device="meta")
    for params, text in ((net.parameters(), "0.weight has no"), (net[2].parameters(), "0.weight")):
        with pytest.raises(ValueError, match=text):
            gradwire.torch.share(net, torch.optim.SGD(params, lr=0.1))
    net = model()
    net[2].bias = torch.nn.Parameter(torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"2\.bias has several elements in the same memory"):
        share(net)
    with torch.inference_mode():
        net = model()
    with pytest.raises(ValueError, match=r"0\.weight was made under torch\.inference_mode"):
        share(net)


def tied(kind: str) -> Any:
    """Return a model of which two parameters have the same memory."""
    net = model(torch.bfloat16 if kind == "half precision" else torch.float32)
    weight = net[0].weight.detach()
    again = torch.nn.Linear(20, 8, dtype=weight.dtype)
    if kind == "transposed":
        again.weight = torch.nn.Parameter(weight.t())
    elif kind == "row":
        again.bias = torch.nn.Parameter(weight[0, :8])
    else:
        again.weight.data = weight
    return net.append(again)


@pytest.mark.parametrize("kind", ["whole", "half precision", "transposed", "row"])
def test_parameters_that_are_tied_by_their_memory_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gw.Node, "from_env", lambda **_: pytest.fail("made a node"))
    with pytest.raises(ValueError, match=r"0\.weight and 3\.\w+ have elements in the same memory"):
        share(tied(kind))


def test_an_optimizer_made_without_share_refuses_the_same_parameters(pair: list[gw.Node]) -> None:
    expanded = torch.nn.Linear(20, 8)
    expanded.bias = torch.nn.Parameter(torch.zeros(1).expand(8))
    for net, text in (
        (tied("transposed"), r"shape \(8, 20\) and .* \(20, 8\) have elements in the same"),
        (expanded, r"a parameter of shape \(8,\) has several elements in the same memory"),
    ):
        params = list(net.parameters())
        exchange = gw.Exchange(gw.Encoder(sum(param.numel() for param in params)), pair[0])
        with pytest.raises(ValueError, match=text):
            gradwire.torch.SharedOptimizer(torch.optim.SGD(params, lr=0.1), exchange)


def test_parameters_that_divide_a_memory_are_shared() -> None:
    net = model()
    together = torch.randn(8, 40)
    net[0].weight = torch.nn.Parameter(together[:, ::2])
    net.append(torch.nn.Linear(20, 8))
    net[3].weight = torch.nn.Parameter(together[:, 1::2])
    flat = torch.randn(16)
    net[0].bias = torch.nn.Parameter(flat[8:])
    net[3].bias = torch.nn.Parameter(flat[:8])
    with share(net) as optimizer:
        assert optimizer.join().step == 0


def test_an_observer_is_sent_to_an_exchange_of_its_own(
    nodes: list[gw.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    encoder = gw.Encoder(sum(param.numel() for param in net.parameters()))
    exchange = gw.Exchange(encoder, nodes[0], role="observer")
    with pytest.raises(ValueError, match=r"observer.* call its follow"):
        gradwire.torch.SharedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), exchange)
    monkeypatch.setattr(gw.Node, "from_env", lambda **_: pytest.fail("made a node"))
    with pytest.raises(ValueError, match=r"observer.* call its follow"):
        share(net, role="observer")
