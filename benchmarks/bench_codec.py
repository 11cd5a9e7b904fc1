"""What encode, apply and messages cost, as ratios to references in the same run, and the laws of size.

    python benchmarks/bench_codec.py [--smoke] [--json FILE] [options of pytest and pytest-benchmark]
    python benchmarks/bench_codec.py -k "apply and 24"                           # some of it
    python benchmarks/bench_codec.py --benchmark-autosave --benchmark-compare    # absolute times, before and after

See README.md for how it is measured and docs/performance.md for results.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

import gradwire as gw

sys.path.insert(0, str(Path(__file__).parent))

import updates
from harness import Report, Row, Target, Timing, aligned, last_level_cache_bytes, ratio
from updates import THRESHOLD, SteadyState

LOG2S = tuple(map(int, os.environ.get("GRADWIRE_BENCH_LOG2", "24,26").split(",")))
SMALL_LOG2 = min(20, *LOG2S)
SECONDS, ROUNDS_MIN, ROUNDS_MAX = 2.5, 5, 60
SEED = 2026
MANY, TRAINING_STEPS = 16, 20
TARGETS = {1e-3: 1.15, 1e-2: 1.4, 0.1: 2.2}  # of encode over np.add, by density
OTHER_DENSITIES = (0.2, 0.3, 0.37, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
SIZE_DENSITIES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, *OTHER_DENSITIES[:-1])
# Law 4 holds from this size on, and allows the header and 16 bytes beside its factor.
LAW_4_NUMEL, HEADER_BYTES, SLACK_BYTES = 2**22, 48, 16
ADD_BYTES = 12  # np.add, per element: read residual and update, write residual
LINE = 16  # float32 elements of a cache line

Run = Callable[[], object]
Times = Callable[..., list[Timing]]
sizes = pytest.mark.parametrize("log2", LOG2S)


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    report = Report("codec", {"seed": SEED}, "smoke test" if max(LOG2S) < 20 else "")
    yield report
    path = os.environ.get("GRADWIRE_BENCH_JSON")
    report.finish(Path(path) if path else None)


@pytest.fixture
def times(benchmark: BenchmarkFixture) -> Times:
    """Return a function that times a call under pytest-benchmark, and each reference before every round of it.

    Caches are evicted before every timed call, so that no call finds the data of the call before.
    """
    scratch = np.zeros(2 * last_level_cache_bytes(), np.uint8)

    def seconds(call: Run) -> float:
        scratch.max()
        begin_s = time.perf_counter()
        call()
        return time.perf_counter() - begin_s

    def measure(
        run: Run, references: Mapping[str, Run], prepare: Run = lambda: None, rounds: int = 0
    ) -> list[Timing]:
        samples: dict[str, list[float]] = {name: [] for name in references}

        def set_up() -> None:
            for name, call in references.items():
                samples[name].append(seconds(call))
            prepare()
            scratch.max()

        def timed() -> None:
            run()  # the result is released inside the timed call

        set_up()
        once_s = seconds(timed)
        fitting = int(SECONDS / (once_s + sum(map(sum, samples.values()))))
        rounds = rounds or max(ROUNDS_MIN, min(ROUNDS_MAX, fitting))
        benchmark.pedantic(timed, setup=set_up, rounds=rounds)  # type: ignore[no-untyped-call]
        own = benchmark.stats.stats.data if benchmark.stats else [once_s]
        taken = {"gradwire": own} | {name: each[-rounds:] for name, each in samples.items()}
        return [Timing(name, tuple(each)) for name, each in taken.items()]

    return measure


@sizes
@pytest.mark.parametrize("density", [*TARGETS, *OTHER_DENSITIES])
def test_encode(times: Times, report: Report, log2: int, density: float) -> None:
    state = SteadyState.make(2**log2, density, SEED)
    encode, message = encoding(state)
    copy = partial(np.copyto, aligned(2**log2), state.update)
    ours, add, memcpy = times(encode, {"np.add": adding(state.update), "memcpy": copy})
    group = "time" if density in TARGETS else "densities"
    where = (group, f"encode at density {density:g}", f"2^{log2}")
    goal = Target("<=", TARGETS.get(density, 3.5))
    floor = 1.0 + message.nbytes / (ADD_BYTES * 2**log2)
    report.add([ratio(where, ours, add, target=goal, floor=floor)])
    if density == 1e-3:
        report.add([ratio(where, ours, memcpy)])


@sizes
def test_encode_of_a_filled_residual(times: Times, report: Report, log2: int) -> None:
    state = SteadyState.make(2**log2, 1e-3, SEED)
    encoder, filled = make_encoder(state), state.residual + state.update
    refill = partial(np.copyto, encoder.residual, filled)
    refill()
    check_sends(encoder, None, state)
    ours, add = times(encoder.encode, {"np.add": adding(state.update)}, refill)
    where = ("time", "encode() of the residual at 0.001", f"2^{log2}")
    floor = (4 + 4 * touched(1e-3)) / ADD_BYTES
    report.add([ratio(where, ours, add, target=Target("<=", 0.6), floor=floor)])


@sizes
def test_two_threads(times: Times, report: Report, log2: int) -> None:
    """Where np.add gains little as well, memory is the limit."""
    state = SteadyState.make(2**log2, 1e-3, SEED)
    (one, message), (two, same) = encoding(state), encoding(state, threads=2)
    assert bytes(message) == bytes(same), "two threads must write the bytes of one"
    with ThreadPoolExecutor(1) as pool:
        add, halves = adding(state.update), adding_in_halves(state.update, pool)
        ours, *others = times(two, {"1 thread": one, "np.add": add, "np.add, 2 threads": halves})
    note = f"np.add gains {others[1].minimum_s / others[2].minimum_s:.2f}"
    where = ("time", "encode at 0.001 on 2 threads: times as fast", f"2^{log2}")
    goal = Target(">=", 1.6)
    report.add([ratio(where, ours, others[0], faster=True, target=goal, note=note)])


@pytest.mark.parametrize("count", [1, 10, 100])
def test_encode_of_1024_elements(benchmark: BenchmarkFixture, report: Report, count: int) -> None:
    encode, _ = encoding(SteadyState.make(1024, 0.0, SEED, count=count))
    benchmark.pedantic(encode, iterations=2_000, rounds=100, warmup_rounds=1)  # type: ignore[no-untyped-call]
    if benchmark.stats:
        what, stats = f"encode of 1,024 elements, {count} changed", benchmark.stats.stats
        figures = stats.min * 1e6, stats.median * 1e6
        report.add([Row("small", what, "", *figures, unit="µs", target=Target("<=", 5.0))])


@pytest.mark.parametrize("log2", sorted({SMALL_LOG2, *LOG2S}))
def test_training_steps(times: Times, report: Report, log2: int) -> None:
    """20 steps of Gaussian updates under TargetDensity(1e-3), whose first threshold is 300 times too low."""
    encoder = gw.Encoder(2**log2, threshold=gw.TargetDensity(1e-3))
    fresh = encoder.state_dict()
    # Every step's update is a window of the same noise: another draw for each element.
    stride = LINE * 64
    noise = aligned(2**log2 + TRAINING_STEPS * stride)
    np.random.default_rng(SEED).standard_normal(noise.size, np.float32, out=noise)
    noise *= np.float32(1e-2)
    steps = [noise[i * stride :][: 2**log2] for i in range(TRAINING_STEPS)]
    put_in, sent, densities = aligned(2**log2), aligned(2**log2), []
    for update in steps:
        message = encoder.encode(update)
        gw.apply(message, sent)
        put_in += update
        densities.append(message.density)
    np.testing.assert_allclose(sent + encoder.residual, put_in, rtol=0.0, atol=1e-6)

    def start_over() -> None:
        if encoder.step == TRAINING_STEPS:
            encoder.load_state_dict(fresh)

    encode, add = lambda: encoder.encode(steps[encoder.step]), adding(noise[: 2**log2])
    ours, add_s = times(encode, {"np.add": add}, start_over, 4 * TRAINING_STEPS)
    # One step was not timed: the first timed is the second of its training.
    samples = np.roll(np.resize(ours.samples_s, (4, TRAINING_STEPS)), 1)
    for what, first in (("all 20 steps", 0), ("steps 11 to 20", 10)):
        timing = Timing("gradwire", tuple(samples[:, first:].mean(axis=1).tolist()))
        note = f"density {np.mean(densities[first:]):.2g}"
        where = ("training", f"mean of {what}", f"2^{log2}")
        report.add([ratio(where, timing, add_s, note=note)])


@sizes
@pytest.mark.parametrize("peer", ["NumPy, three lines", "torch, nonzero and index", "torch, topk"])
def test_encode_against(times: Times, report: Report, log2: int, peer: str) -> None:
    """The same, not packed, as one writes it in NumPy and torch; top-k selects as many elements as the threshold."""
    state = SteadyState.make(2**log2, 0.0, SEED, count=max(1, 2**log2 // 1000))
    residual, update = aligned(2**log2), state.update
    residual[...] = state.residual

    def numpy_threshold() -> tuple[Any, Any]:
        np.add(residual, update, out=residual)
        positions = np.flatnonzero(np.abs(residual) >= THRESHOLD)
        sent = np.copysign(np.float32(THRESHOLD), residual[positions])
        residual[positions] -= sent
        return positions, sent

    def torch_threshold() -> tuple[Any, Any]:
        r.add_(u)
        positions = torch.nonzero(r.abs() >= THRESHOLD).squeeze(1)
        sent = torch.sign(r[positions]) * THRESHOLD
        r[positions] -= sent
        return positions, sent

    def torch_topk() -> tuple[Any, Any]:
        r.add_(u)
        positions = torch.topk(r.abs(), count, sorted=False).indices
        sent = r[positions]
        r[positions] = 0.0
        return positions, sent

    if peer == "NumPy, three lines":
        theirs, goal = numpy_threshold, 3.5
    else:
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        r, u, count = torch.from_numpy(residual), torch.from_numpy(update), np.count_nonzero(update)
        theirs, goal = (torch_topk, 40.0) if "topk" in peer else (torch_threshold, 10.0)
    positions = np.sort(np.asarray(theirs()[0]))
    np.testing.assert_array_equal(positions, np.flatnonzero(update))
    ours, other = times(encoding(state)[0], {peer: theirs})
    where = ("time", "encode with residual at 0.001: times as fast", f"2^{log2}")
    report.add([ratio(where, ours, other, faster=True, target=Target(">=", goal))])


# ---- apply ----------------------------------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize(("density", "goal"), [(1e-3, 0.1), (0.1, 1.1), (0.5, None), (1.0, None)])
def test_apply(times: Times, report: Report, log2: int, density: float, goal: float | None) -> None:
    state, array = SteadyState.make(2**log2, density, SEED), aligned(2**log2)
    message = make_encoder(state).encode(state.update)
    gw.apply(message, array)
    np.testing.assert_array_equal(array, state.update)
    ours, add = times(partial(gw.apply, message, array), {"np.add": adding(state.update)})
    floor = (8 * touched(density) + message.nbytes / 2**log2) / ADD_BYTES
    where, target = ("time", f"apply at {density:g}", f"2^{log2}"), goal and Target("<=", goal)
    report.add([ratio(where, ours, add, target=target, floor=floor)])


@sizes
@pytest.mark.parametrize(("density", "goal"), [(1e-3, 0.4), (1e-2, None), (0.1, None)])
def test_apply_many(
    times: Times, report: Report, log2: int, density: float, goal: float | None
) -> None:
    rng = np.random.default_rng(SEED)
    messages, expected, array = [], aligned(2**log2), aligned(2**log2)
    for _ in range(MANY):
        update = updates.signed(updates.random_mask(2**log2, density, rng), rng)
        messages.append(send(update))
        expected += update
    gw.apply_many(messages, array)
    np.testing.assert_array_equal(array, expected)

    def apply_each() -> None:
        for message in messages:
            gw.apply(message, array)

    references = {"np.add": adding(expected), "16 single applies": apply_each}
    ours, add, single = times(partial(gw.apply_many, messages, array), references)
    nbytes = sum(message.nbytes for message in messages)
    floor = (8 * touched(density, MANY) + nbytes / 2**log2) / ADD_BYTES
    where = ("time", f"apply_many of 16 messages at {density:g}", f"2^{log2}")
    target = goal and Target("<=", goal)
    report.add([ratio(where, ours, add, target=target, floor=floor), ratio(where, ours, single)])


# ---- sizes ----------------------------------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("density", SIZE_DENSITIES)
def test_size_at_random_places(report: Report, log2: int, density: float) -> None:
    rng = np.random.default_rng(SEED)
    mask = updates.random_mask(2**log2, density, rng)
    if mask.any():
        factor = 1.03 if 1e-4 <= density <= 0.1 else 1.05
        report.add([size_row(("sizes", f"density {density:g}", f"2^{log2}"), mask, factor)])


@pytest.mark.parametrize(("density", "sigma"), [(1e-3, 1.5), (1e-2, 1.0), (1e-2, 1.5), (0.1, 1.0)])
@pytest.mark.parametrize("region", [2**18, 2**12])
def test_size_in_regions(report: Report, density: float, sigma: float, region: int) -> None:
    """Regions smaller than a chunk are averaged by the chunk, so the floor does not bound them."""
    rng = np.random.default_rng(SEED)
    mask = updates.clustered_mask(2 ** LOG2S[0], density, sigma, region, rng)
    where = (
        "regions",
        f"lognormal, density {density:g}, sigma {sigma:g}",
        f"regions of {region:,}",
    )
    report.add([size_row(where, mask, 1.0 if region == 2**18 else None)])


def test_size_of_adversarial_patterns(report: Report) -> None:
    small = (*range(1, 300), 500, 1_000, 2_000, 5_000)
    for column, numels in ((f"2^{LOG2S[0]}", (2 ** LOG2S[0],)), ("N = 1 ... 5,000", small)):
        rng = np.random.default_rng(SEED)
        share, numel, name = max(
            (share_of_ceiling(send(updates.signed(mask, rng))), numel, name)
            for numel in numels
            for name, mask in updates.adversarial_masks(numel)
        )
        what, note = "worst pattern over max_message_bytes", f"N = {numel:,}, {name}"
        report.add([Row("ceiling", what, column, share, share, note=note)])


def size_row(where: tuple[str, str, str], mask: NDArray[np.bool_], factor: float | None) -> Row:
    """Return the payload over the entropy floor; the law allows ``factor`` times the floor and 16 bytes."""
    message = send(updates.signed(mask, np.random.default_rng(SEED)))
    share_of_ceiling(message)
    floor_bits = updates.entropy_floor_bits(message.numel, message.count)
    figure = 8 * (message.nbytes - HEADER_BYTES) / floor_bits
    if factor and message.numel >= LAW_4_NUMEL:
        assert figure <= factor + 8 * SLACK_BYTES / floor_bits, f"{where[1]}: {figure} of the floor"
    note = f"{8 * message.nbytes / max(message.count, 1):.2f} bits per change"
    return Row(*where, figure, figure, reference="log2 C(N, k) + k", note=note)


def share_of_ceiling(message: gw.Message) -> float:
    """Return the size over the largest that law 3 allows, checked."""
    ceiling = gw.max_message_bytes(message.numel)
    assert message.nbytes <= ceiling, f"{message.nbytes} bytes are above the ceiling, {ceiling}"
    return message.nbytes / ceiling


# ---- parts, with their answers checked ------------------------------------------------------------------------------


def touched(density: float, messages: int = 1) -> float:
    """Return the share of cache lines in which at least one element changes."""
    return 1.0 - (1.0 - density) ** (LINE * messages)


def adding(update: NDArray[np.float32]) -> Run:
    """Return the reference: the least that accumulating an update costs."""
    residual = aligned(update.size)
    return partial(np.add, residual, update, out=residual)


def adding_in_halves(update: NDArray[np.float32], pool: ThreadPoolExecutor) -> Run:
    """Return np.add with one half of the elements on another thread."""
    half = update.size // 2 // LINE * LINE
    first, second = adding(update[:half]), adding(update[half:])

    def run() -> None:
        other = pool.submit(second)
        first()
        other.result()

    return run


def make_encoder(state: SteadyState, **options: Any) -> gw.Encoder:
    encoder = gw.Encoder(state.update.size, threshold=gw.FixedThreshold(THRESHOLD), **options)
    encoder.residual[...] = state.residual
    return encoder


def encoding(state: SteadyState, threads: int = 1) -> tuple[Run, gw.Message]:
    """Return an encode that can be repeated, and its message."""
    encoder = make_encoder(state, threads=threads)
    return partial(encoder.encode, state.update), check_sends(encoder, state.update, state)


def check_sends(
    encoder: gw.Encoder, update: NDArray[np.float32] | None, state: SteadyState
) -> gw.Message:
    """Check that one encode sends the whole update and nothing else, and that the rest stays, to the bit."""
    message = encoder.encode(update)
    np.testing.assert_array_equal(gw.decode(message), state.update)
    np.testing.assert_array_equal(encoder.residual, state.residual)
    return message


def send(update: NDArray[np.float32]) -> gw.Message:
    """Return the message that sends the whole update, checked."""
    message = gw.Encoder(update.size, threshold=gw.FixedThreshold(THRESHOLD)).encode(update)
    np.testing.assert_array_equal(gw.decode(message), update)
    return message


def main() -> int:
    """Run this file under pytest and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny N: the answers only")
    parser.add_argument("--json", metavar="FILE", help="write the report here as well")
    options, others = parser.parse_known_args()
    if options.smoke:
        os.environ["GRADWIRE_BENCH_LOG2"] = "16"
        others.append("--benchmark-disable")
    if options.json:
        os.environ["GRADWIRE_BENCH_JSON"] = options.json
    columns = "--benchmark-columns=min,median,iqr,rounds"
    return int(pytest.main([__file__, "-qs", "-o", "addopts=", columns, *others]))


if __name__ == "__main__":
    raise SystemExit(main())
