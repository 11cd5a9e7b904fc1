"""Torch tensors in host memory are taken as they are, through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_tensor_encodes_as_its_values_do_in_numpy(dtype: str) -> None:
    torch.manual_seed(51)
    update = torch.randn(1_000).to(getattr(torch, dtype))
    ours, theirs = gw.Encoder(1_000, 0.5), gw.Encoder(1_000, 0.5)
    assert bytes(ours.encode(update)) == bytes(theirs.encode(update.float().numpy()))
    assert ours.residual.tobytes() == theirs.residual.tobytes()


def test_a_model_is_encoded_from_its_gradients_and_changed_in_place() -> None:
    torch.manual_seed(52)
    model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Linear(7, 3))
    model(torch.randn(5, 33)).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    parameters = [parameter.detach() for parameter in model.parameters()]
    before = torch.cat([parameter.flatten() for parameter in parameters]).clone()
    encoder = gw.Encoder(before.numel(), 0.25)
    message = encoder.encode(gradients)
    gw.apply(message, parameters, scale=-0.5)
    after = torch.cat([parameter.flatten() for parameter in model.parameters()]).detach()
    assert message.count > 0
    expected = before.numpy() + np.float32(-0.5) * gw.decode(message)
    assert np.array_equal(after.numpy(), expected)


def test_a_tensor_that_requires_grad_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"detach\(\)"):
        gw.Encoder(4, 0.5).encode(torch.ones(4, requires_grad=True))


def test_a_transposed_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        gw.Encoder(12, 0.5).encode(torch.ones(3, 4).T)


def test_integers_and_low_precision_targets_are_refused() -> None:
    encoder = gw.Encoder(4, 0.5)
    with pytest.raises(TypeError, match="float32"):
        encoder.encode(torch.ones(4, dtype=torch.int32))
    message = encoder.encode(torch.ones(4))
    with pytest.raises(TypeError, match="bfloat16"):
        gw.apply(message, torch.zeros(4, dtype=torch.bfloat16))


def test_memory_shared_with_the_residual_is_refused() -> None:
    encoder = gw.Encoder(4, 0.5)
    with pytest.raises(ValueError, match="overlap"):
        encoder.encode(torch.from_numpy(encoder.residual))
