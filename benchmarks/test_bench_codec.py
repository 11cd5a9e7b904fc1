"""Single functions under pytest-benchmark: absolute times, to follow one function while working on it.

    pytest benchmarks/test_bench_codec.py [--benchmark-autosave] [--benchmark-compare]

The normal test run does not collect this file. The table of ratios is bench_codec.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import gradwire as gw

sys.path.insert(0, str(Path(__file__).parent))

from harness import aligned
from updates import THRESHOLD, SteadyState

NUMEL = 2 ** int(os.environ.get("GRADWIRE_BENCH_EXPONENT", "22"))
DENSITIES = (1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9)
SEED = 2026


@pytest.fixture(params=DENSITIES, ids=lambda density: f"density={density:g}")
def state(request: pytest.FixtureRequest) -> SteadyState:
    return SteadyState.make(NUMEL, request.param, SEED)


@pytest.fixture
def encoder(state: SteadyState) -> gw.Encoder:
    encoder = gw.Encoder(state.numel, threshold=gw.FixedThreshold(THRESHOLD))
    encoder.residual[...] = state.residual
    return encoder


@pytest.fixture
def message(state: SteadyState, encoder: gw.Encoder) -> gw.Message:
    message = encoder.encode(state.update)
    np.testing.assert_array_equal(gw.decode(message), state.update)
    return message


def _timed_after(
    prepare: Callable[[], None], benchmark: BenchmarkFixture, run: Callable[[], gw.Message]
) -> gw.Message:
    message: gw.Message = benchmark.pedantic(run, setup=prepare, rounds=20, warmup_rounds=2)  # type: ignore[no-untyped-call]
    return message


def test_np_add_for_comparison(benchmark: BenchmarkFixture) -> None:
    residual, update = aligned(NUMEL), aligned(NUMEL)
    benchmark(np.add, residual, update, out=residual)


def test_encode(benchmark: BenchmarkFixture, state: SteadyState, encoder: gw.Encoder) -> None:
    message = benchmark(encoder.encode, state.update)
    np.testing.assert_array_equal(gw.decode(message), state.update)
    np.testing.assert_array_equal(encoder.residual, state.residual)


def test_encode_of_a_filled_residual(
    benchmark: BenchmarkFixture, state: SteadyState, encoder: gw.Encoder
) -> None:
    positions = np.flatnonzero(state.update)
    values = state.update[positions]

    def refill() -> None:
        encoder.residual[positions] += values

    message = _timed_after(refill, benchmark, encoder.encode)
    np.testing.assert_array_equal(gw.decode(message), state.update)


def test_flush(benchmark: BenchmarkFixture, state: SteadyState, encoder: gw.Encoder) -> None:
    def refill() -> None:
        encoder.residual[...] = state.residual

    message = _timed_after(refill, benchmark, encoder.flush)
    np.testing.assert_array_equal(gw.decode(message), state.residual)


def test_parse(benchmark: BenchmarkFixture, message: gw.Message) -> None:
    data = bytes(message)
    assert bytes(benchmark(gw.Message.parse, data)) == data


def test_apply(benchmark: BenchmarkFixture, state: SteadyState, message: gw.Message) -> None:
    target = aligned(NUMEL)
    benchmark(gw.apply, message, target)
    # Whole multiples of the update, however often it ran.
    np.testing.assert_array_equal(target, state.update * np.abs(target).max())


def test_apply_to_float64(
    benchmark: BenchmarkFixture, state: SteadyState, message: gw.Message
) -> None:
    target = aligned(NUMEL, np.float64)
    benchmark(gw.apply, message, target)
    np.testing.assert_array_equal(target, state.update * np.abs(target).max())


def test_decode(benchmark: BenchmarkFixture, state: SteadyState, message: gw.Message) -> None:
    np.testing.assert_array_equal(benchmark(gw.decode, message), state.update)


def test_apply_many(benchmark: BenchmarkFixture, state: SteadyState, message: gw.Message) -> None:
    target = aligned(NUMEL)
    benchmark(gw.apply_many, [message] * 16, target)
    np.testing.assert_array_equal(target, state.update * np.abs(target).max())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_encode_of_other_updates(benchmark: BenchmarkFixture, dtype: str) -> None:
    state = SteadyState.make(NUMEL, 1e-3, SEED)
    encoder = gw.Encoder(NUMEL, threshold=gw.FixedThreshold(THRESHOLD))
    message = benchmark(encoder.encode, state.update.astype(dtype))
    np.testing.assert_array_equal(gw.decode(message), state.update)


def test_encode_of_a_float64_residual(benchmark: BenchmarkFixture) -> None:
    state = SteadyState.make(NUMEL, 1e-3, SEED)
    encoder = gw.Encoder(NUMEL, threshold=gw.FixedThreshold(THRESHOLD), dtype="float64")
    message = benchmark(encoder.encode, state.update)
    np.testing.assert_array_equal(gw.decode(message), state.update)


def test_encode_of_a_model_s_tensors(benchmark: BenchmarkFixture) -> None:
    state = SteadyState.make(NUMEL, 1e-3, SEED)
    encoder = gw.Encoder(NUMEL, threshold=gw.FixedThreshold(THRESHOLD))
    tensors = np.array_split(state.update, 61)
    message = benchmark(encoder.encode, tensors)
    np.testing.assert_array_equal(gw.decode(message), state.update)


@pytest.mark.parametrize("what", ["encode", "apply", "parse"])
def test_one_call_of_1024_elements(benchmark: BenchmarkFixture, what: str) -> None:
    state = SteadyState.make(1024, 0.0, SEED, count=10)
    encoder = gw.Encoder(1024, threshold=gw.FixedThreshold(THRESHOLD))
    message = encoder.encode(state.update)
    np.testing.assert_array_equal(gw.decode(message), state.update)
    if what == "encode":
        benchmark(encoder.encode, state.update)
    elif what == "apply":
        benchmark(gw.apply, message, aligned(1024))
    else:
        benchmark(gw.Message.parse, bytes(message))
