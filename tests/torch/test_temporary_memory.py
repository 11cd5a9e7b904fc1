"""How much memory calls take for a while, where a model is one large tensor."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import gradwire as gw

pytestmark = pytest.mark.torch
torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import gradwire.torch  # noqa: E402
from gradwire.torch.parameter_state import ParameterState  # noqa: E402

NUMEL = 1 << 20


def shared_model(node: gw.Node) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Embedding(NUMEL // 64, 64)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, gradwire.torch.share(model, inner, node=node, density=0.05)


def step(model: Any, optimizer: Any) -> None:
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()


def peak_of(call: Callable[[], Any]) -> float:
    """Return the most memory that NumPy has for arrays during a call, in bytes per parameter."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / NUMEL
    finally:
        tracemalloc.stop()


def test_temporary_values_take_little_memory_even_of_one_large_tensor() -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        model, optimizer = shared_model(node)
        step(model, optimizer)
        step(model, optimizer)
        saved, state = model.state_dict(), optimizer.state_dict()
        # Of the residual, the shared parameters, and this node's own, which are compared with the sum of both.
        assert peak_of(optimizer.state_dict) < 14.0
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        model, optimizer = shared_model(node)
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)
        assert peak_of(optimizer.join) < 1.5


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """Notes the size of the largest tensor that an operation returns in double precision."""

    numel = 0

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.numel = max(self.numel, result.numel())
        return result


def test_the_hook_s_residual_and_momentum_are_rescaled_without_doubles_of_the_whole() -> None:
    state = ParameterState(gw.Encoder(NUMEL, threshold=0.5), 0.9, (NUMEL, NUMEL))
    residual = torch.from_numpy(state.encoder.residual)
    for values in (residual, state.velocity):
        values.uniform_(1.0, 2.0)
    expected = [values * 0.1 for values in (residual.double(), state.velocity.double())]
    with Largest() as largest:
        state.rescale(0.1)
    assert 0 < largest.numel < NUMEL
    for values, product in zip((residual, state.velocity), expected, strict=True):
        assert torch.equal(values, product.float())
