"""A small case of every kernel, for compute-sanitizer: gradwire and NumPy only, so that it has little else to watch.

compute-sanitizer --tool memcheck python benchmarks/sanitize_cuda.py
compute-sanitizer --tool racecheck python benchmarks/sanitize_cuda.py
"""

from __future__ import annotations

import numpy as np

import gradwire as gw

NUMEL = 40_009
DENSITIES = (1e-3, 0.1, 0.5, 0.95)


def values(density: float, seed: int) -> np.ndarray:
    """Return float32[NUMEL] of which a share of ``density`` is 1 in magnitude, the rest small."""
    rng = np.random.default_rng(seed)
    ones, small = rng.choice([-1.0, 1.0], NUMEL), rng.integers(-16, 17, NUMEL) / 64
    return np.where(rng.random(NUMEL) < density, ones, small).astype(np.float32)


def on_device(array: np.ndarray) -> gw.Encoder:
    """Return an encoder whose residual is ``array`` on the device."""
    encoder = gw.Encoder(NUMEL, threshold=1.0, device="cuda")
    encoder.load_state_dict({**encoder.state_dict(), "residual": array})
    return encoder


def check(density: float, seed: int) -> None:
    """Encode, apply and flush on both sides and compare everything."""
    arguments = {
        "threshold": gw.TargetDensity(density, initial=1.0),
        "shakeup": gw.ShakeUp(every=2),
        "clip": gw.ResidualClip(limit=1.0, every=2),
    }
    cpu, cuda = gw.Encoder(NUMEL, **arguments), gw.Encoder(NUMEL, device="cuda", **arguments)
    target, on_cpu = on_device(np.zeros(NUMEL, np.float32)), np.zeros(NUMEL, np.float32)
    for step in range(2):
        update = values(density, seed + step)
        expected, message = cpu.encode(update), cuda.encode(on_device(update).residual)
        assert bytes(message) == bytes(expected), (density, step)
        gw.apply(expected, on_cpu, 0.5)
        gw.apply(message, target.residual, 0.5)
        gw.apply_many([expected, expected], on_cpu)
        gw.apply_many([message, expected], target.residual)
    assert bytes(cuda.flush("bfloat16")) == bytes(cpu.flush("bfloat16"))
    np.testing.assert_array_equal(target.state_dict()["residual"], on_cpu)
    np.testing.assert_array_equal(cuda.state_dict()["residual"], cpu.residual)
    bad, first = values(density, seed), -1
    bad[77] = np.nan
    try:
        cuda.encode(on_device(bad).residual).check()
    except gw.NonFiniteUpdate as error:
        first = error.first_index
    assert first == 77


if __name__ == "__main__":
    for number, each in enumerate(DENSITIES):
        check(each, 10 * number)
    print(f"{len(DENSITIES)} densities, the CPU's bytes each")
