"""The torch operators: torch's own checks, and the same bytes as an encoder's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
from gradwire.torch.ops import message_bytes_max  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]),
]

NUMEL = 5000


def tensors(device: str, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Return a residual and an update."""
    generator = torch.Generator().manual_seed(4)
    residual = torch.randn(NUMEL, generator=generator) / 4
    update = torch.randn(NUMEL, generator=generator) / 4
    return residual.to(device), update.to(device, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_operator_gives_the_bytes_and_the_residual_of_an_encoder(
    device: str, dtype: str
) -> None:
    residual, update = tensors(device, getattr(torch, dtype))
    encoder = gw.Encoder(NUMEL, threshold=0.5, key=3)
    encoder.residual[...] = residual.cpu().numpy()
    expected = encoder.encode(update.cpu())
    message = torch.ops.gradwire.encode(residual, update, 0.5, 3, 0)
    held = message.cpu().numpy()
    assert held.size == message_bytes_max(NUMEL) >= gw.max_message_bytes(NUMEL)
    assert held[: expected.nbytes].tobytes() == bytes(expected)
    assert not held[expected.nbytes :].any()
    np.testing.assert_array_equal(residual.cpu().numpy(), encoder.residual)

    target = torch.ones(NUMEL, device=device)
    torch.ops.gradwire.apply(message, target, 2.0)
    np.testing.assert_array_equal(target.cpu().numpy(), 1 + 2 * gw.decode(expected))


def test_opcheck_passes(device: str) -> None:
    residual, update = tensors(device)
    message = torch.ops.gradwire.encode(residual, update, 0.5)
    torch.library.opcheck(torch.ops.gradwire.encode.default, (residual, update, 0.5, 7, 9))
    torch.library.opcheck(
        torch.ops.gradwire.apply.default, (message, torch.zeros(NUMEL, device=device), 0.5)
    )


def test_a_step_is_traced_as_one_graph(device: str) -> None:
    def step(residual: Any, update: Any, params: Any) -> Any:
        message = torch.ops.gradwire.encode(residual, update * 0.5, 0.25)
        torch.ops.gradwire.apply(message, params, 1.0)
        return params.sum()

    plain, traced = tensors(device)[0], tensors(device)[0]
    _, update = tensors(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    params = [torch.zeros(NUMEL, device=device) for _ in range(2)]
    for _ in range(3):
        assert step(plain, update, params[0]) == compiled(traced, update, params[1])
    assert torch.equal(plain, traced)
    assert torch.equal(params[0], params[1])
    assert params[0].any()


def test_an_invalid_message_changes_nothing(device: str) -> None:
    residual, update = tensors(device)
    message = torch.ops.gradwire.encode(residual, update, 0.5)
    message[60] ^= 1
    target = torch.zeros(NUMEL, device=device)
    if device == "cpu":
        with pytest.raises(gw.MessageError, match="checksum"):
            torch.ops.gradwire.apply(message, target, 1.0)
    else:
        torch.ops.gradwire.apply(message, target, 1.0)
    assert not target.any()


def test_invalid_arguments_are_refused(device: str) -> None:
    residual, update = tensors(device)
    with pytest.raises(ValueError, match="must have"):
        torch.ops.gradwire.encode(residual, update[:-1].clone(), 0.5)
    with pytest.raises(TypeError, match="float64"):
        torch.ops.gradwire.encode(residual, update.double(), 0.5)
    with pytest.raises(ValueError, match="positive and finite"):
        torch.ops.gradwire.encode(residual, update, 0.0)
