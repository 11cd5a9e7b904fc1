"""Two encoders on one residual: the second sends what the first one's message has left."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire as gw

from .fake_cuda import fake_cuda

NUMEL = 5_000
COARSE, FINE = 2.0**-4, 2.0**-6


def update_of(step: int) -> np.ndarray:
    """Return multiples of 2^-12, so that every sum of them is exact in float32."""
    rng = np.random.default_rng([41, step])
    return (rng.integers(-600, 600, NUMEL) / 2.0**12).astype(np.float32)


def two() -> tuple[gw.Encoder, gw.Refiner]:
    coarse = gw.Encoder(NUMEL, COARSE)
    return coarse, gw.Refiner(coarse, FINE, key=1)


def test_messages_and_the_one_residual_hold_everything() -> None:
    coarse, fine = two()
    assert fine.residual is coarse.residual
    total = np.zeros(NUMEL, np.float32)
    put_in = np.zeros(NUMEL)
    for step in range(5):
        put_in += update_of(step)
        gw.apply_many([coarse.encode(update_of(step)), fine.encode()], total)
        np.testing.assert_array_equal(total + coarse.residual, put_in)


def test_a_step_at_rest_sends_nothing_and_counts() -> None:
    coarse, fine = two()
    coarse.encode(update_of(0))
    left = coarse.residual.copy()
    message = fine.rest()
    assert (message.count, message.numel, message.key, message.step) == (0, NUMEL, 1, 0)
    assert (fine.step, fine.threshold) == (1, FINE)
    np.testing.assert_array_equal(coarse.residual, left)


def test_a_checkpoint_holds_the_residual_once_and_continues_bit_for_bit() -> None:
    policies = gw.TargetDensity(0.02), gw.TargetDensity(0.2)
    coarse = gw.Encoder(NUMEL, policies[0])
    fine = gw.Refiner(coarse, policies[1], key=1)
    for step in range(3):
        coarse.encode(update_of(step))
        fine.encode()
    states = coarse.state_dict(), fine.state_dict()
    assert states[1]["residual"].size == 0
    again = gw.Encoder(NUMEL, policies[0])
    finer = gw.Refiner(again, policies[1], key=1)
    again.load_state_dict(states[0])
    finer.load_state_dict(states[1])
    for one, other in ((coarse, again), (fine, finer)):
        update = update_of(3) if one is coarse else None
        assert bytes(one.encode(update)) == bytes(other.encode(update))
    with pytest.raises(ValueError, match=r"float32\[5000\], this encoder of float32\[0\]"):
        finer.load_state_dict(states[0])


def test_what_is_on_a_device_is_refused() -> None:
    with fake_cuda():
        coarse = gw.Encoder(8, COARSE, device="cuda")
        with pytest.raises(ValueError, match="in host memory, not on cuda"):
            gw.Refiner(coarse, FINE, key=1)
