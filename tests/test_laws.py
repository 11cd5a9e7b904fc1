"""The laws of the design, each stated once over every backend."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import _core, reference
from gradwire.policy import ThresholdPolicy

from .strategies import changes_in_regions

ISAS = _core.usable_isas()


def multiples(rng: np.random.Generator, numel: int, spread: float = 40.0) -> np.ndarray:
    """Return float32 multiples of 2^-12: sums and differences of these are exact."""
    return (np.rint(rng.standard_normal(numel) * spread) * 2.0**-12).astype(np.float32)


class Powers:
    """A policy that walks through powers of two, so that all arithmetic stays exact."""

    initial = 2.0**-4
    sample_density = None

    def next_threshold(self, threshold: float, density: float, *_: object) -> float:
        """Halve while little is sent, double while much is."""
        if density < 0.02:
            return max(threshold / 2, 2.0**-10)
        return min(threshold * 2, 2.0**-3) if density > 0.3 else threshold


# --- 1. conservation ------------------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("policy", [gw.FixedThreshold(2.0**-6), Powers()], ids=["fixed", "moving"])
def test_updates_are_sent_or_in_the_residual_exactly(policy: ThresholdPolicy, dtype: str) -> None:
    numel = 5_003
    options = {"shakeup": gw.ShakeUp(every=6, divisor=4.0), "dtype": dtype}
    encoder = gw.Encoder(numel, policy, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(61)
    put_in, sent = np.zeros(numel), np.zeros(numel)
    kinds = set()
    for step in range(48):
        # Densities from none to all, region by region: sparse, bitmap and inverted chunks.
        update = multiples(rng, numel) * rng.choice([0.0, 0.25, 1.0, 16.0], numel).astype("f4")
        put_in += update
        if step % 8 == 3:  # under back-pressure a step only accumulates
            encoder.residual[:] += update
            continue
        if step % 8 == 5:  # an update that cannot be encoded stays, without its bad element
            bad = np.append(update[:-1], np.float32(np.nan))
            put_in[-1] -= update[-1]
            with pytest.raises(gw.NonFiniteUpdate):
                encoder.encode(bad)
            continue
        if step % 8 == 6:  # a checkpoint, and another encoder goes on
            state = encoder.state_dict()
            encoder = gw.Encoder(numel, policy, **options)  # type: ignore[arg-type]
            encoder.load_state_dict(state)
        message = encoder.encode(update, dense="bfloat16" if step % 16 == 9 else False)
        kinds.add(message.kind)
        gw.apply(message, sent)
        np.testing.assert_array_equal(put_in, sent + encoder.residual)
    assert {"sparse", "dense"} <= kinds
    gw.apply(encoder.flush(), sent)
    assert not encoder.residual.any()
    np.testing.assert_array_equal(put_in, sent)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("density", [0.001, 0.1, 0.45, 0.9, 1.0])
def test_no_switch_of_the_coding_loses_an_element(density: float) -> None:
    numel = 20_000
    encoder = gw.Encoder(numel, 2.0**-6)
    rng = np.random.default_rng(62)
    update = np.where(rng.random(numel) < density, 2.0**-5, 0.0).astype(np.float32)
    sent = gw.decode(encoder.encode(update))
    np.testing.assert_array_equal(sent + encoder.residual, update)
    assert np.count_nonzero(sent) == np.count_nonzero(update)


def test_the_sum_that_clipping_removes_is_reported() -> None:
    encoder = gw.Encoder(4_000, 2.0**-6, clip=gw.ResidualClip(limit=2.0, every=3))
    rng = np.random.default_rng(63)
    put_in, sent = np.zeros(4_000), np.zeros(4_000)
    for _ in range(9):
        update = multiples(rng, 4_000, spread=300.0)
        put_in += update
        gw.apply(encoder.encode(update), sent)
    missing = put_in - sent - encoder.residual
    assert encoder.stats.clipped_count > 0
    assert missing.sum() == encoder.stats.clipped_sum
    assert np.abs(encoder.residual).max() <= 2.0**-5


def test_within_rounding_everything_is_conserved_for_any_values() -> None:
    encoder = gw.Encoder(10_000, gw.TargetDensity(0.02), shakeup=gw.ShakeUp(7))
    rng = np.random.default_rng(64)
    put_in, sent = np.zeros(10_000), np.zeros(10_000)
    for _ in range(50):
        update = rng.standard_normal(10_000).astype(np.float32)
        put_in += update
        gw.apply(encoder.encode(update), sent)
    assert np.abs(put_in - sent - encoder.residual).max() < 50 * 64 * 2.0**-24


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("parts", [None, 3])
def test_a_call_that_a_signal_interrupts_keeps_its_messages_in_the_residual(
    monkeypatch: pytest.MonkeyPatch, dense: bool, parts: int | None
) -> None:
    class InterruptedCore:
        """Python raises KeyboardInterrupt where the core returns if the signal came while it ran."""

        sample = None

        def encode(self, *arguments: Any) -> None:
            core.encode(*arguments)
            raise KeyboardInterrupt

        def encode_dense(self, *arguments: Any) -> None:
            core.encode_dense(*arguments)
            raise KeyboardInterrupt

    encoder = gw.Encoder(1_000, 2.0**-6)
    core = encoder._core
    update = multiples(np.random.default_rng(69), 1_000, spread=300.0)
    monkeypatch.setattr(encoder, "_core", InterruptedCore())
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(update, dense=dense, parts=parts)
    np.testing.assert_array_equal(encoder.residual, update)
    assert encoder.step == 0


LITTLE_MEMORY = """
import resource
import numpy as np, gradwire as gw
numel = 2**22
encoder = gw.Encoder(numel, 0.5, threads={threads})
update = (np.random.default_rng(70).random(numel) < {density}).astype(np.float32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
failures = 0
for free_bytes in range(0, 2**28, 2**19):
    encoder.residual[:] = 0
    resource.setrlimit(resource.RLIMIT_AS, (used + free_bytes, hard))
    try:
        message = encoder.encode(update)
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if encoder.residual.any():  # there was memory for the mask words
            failures += 1
            assert np.array_equal(encoder.residual, update)
        continue
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert np.array_equal(gw.decode(message) + encoder.residual, update)
    if {is_enough}:
        break
print(failures, encoder.step)
"""


def run_with_little_memory(**values: object) -> tuple[int, int]:
    """Return how many encodes found memory for pass 1 only, and how many had enough."""
    script = LITTLE_MEMORY.format(**values)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failures, step = done.stdout.split()
    return int(failures), int(step)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_messages_that_find_no_memory_stay_in_the_residual() -> None:
    failures, step = run_with_little_memory(threads=1, density=0.5, is_enough=True)
    assert failures > 0
    assert step == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_a_thread_that_cannot_start_costs_time_only() -> None:
    # From no memory for the stack of a thread on to memory for some: an exception would end the process.
    _, step = run_with_little_memory(threads=8, density=1e-3, is_enough="free_bytes > 2**25")
    assert step > 1


ENDS = """
import threading, time
import numpy as np
import gradwire as gw

def work():
    encoder, update = gw.Encoder(4_000_000, 1e-3), np.full(4_000_000, 1e-4, np.float32)
    while True:
        encoder.encode(update)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


def test_a_process_that_ends_while_another_thread_encodes_ends_in_good_order() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- 2. one canonical message: tests/test_encoder.py compares every backend with the reference ----


@given(
    st.lists(
        st.tuples(st.integers(1, 40_000), st.sampled_from([0.0, 1e-3, 0.03, 0.3, 0.5, 0.9, 1.0])),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
)
def test_all_backends_write_the_reference_s_bytes(
    parts: list[tuple[int, float]], seed: int
) -> None:
    what = changes_in_regions(parts, seed)
    update = np.zeros(what.numel, np.float32)
    update[what.positions] = np.where(what.negative, -1.5, 1.5)
    expected = reference.encode_ternary(
        what.positions, what.negative, numel=what.numel, threshold=1.0
    )
    before = _core.isa()
    for isa in ISAS:
        _core.select_isa(isa)
        assert bytes(gw.Encoder(what.numel, 1.0).encode(update)) == expected, isa
    _core.select_isa(before)


# --- 3. a known ceiling ---------------------------------------------------------------------------


def nbytes_of(flags: np.ndarray) -> int:
    """Return the bytes of a message that changes the flagged elements."""
    positions = np.flatnonzero(flags)
    negative = np.zeros(positions.size, bool)
    message = gw.Message.from_entries(positions, negative, numel=flags.size, threshold=1.0)
    return message.nbytes


def test_no_message_of_up_to_twelve_elements_exceeds_the_ceiling() -> None:
    for numel in range(13):
        for flags in itertools.product((False, True), repeat=numel):
            assert nbytes_of(np.array(flags, bool)) <= gw.max_message_bytes(numel), flags


@pytest.mark.parametrize("unchanged", [*range(120, 150), 200, 256])
@pytest.mark.parametrize("spacing", ["late", "odd", "random"])
def test_no_chunk_exceeds_the_ceiling(unchanged: int, spacing: str) -> None:
    rng = np.random.default_rng([65, unchanged])
    span = 256 + unchanged
    chunks = []
    for _ in range(30):
        if spacing == "random":
            where = np.sort(rng.choice(span - 1, unchanged, replace=False))
        else:
            step = 2 if spacing == "odd" else 1
            where = span - 2 - step * np.arange(unchanged)
            where = np.unique(where[where >= 0])
        chunk = np.ones(span, bool)
        chunk[where] = False
        missing = unchanged - np.count_nonzero(~chunk)
        chunk[np.flatnonzero(chunk[:-1])[:missing]] = False
        chunks.append(chunk)
    flags = np.concatenate(chunks)
    assert nbytes_of(flags) <= gw.max_message_bytes(flags.size)


@given(
    st.lists(st.tuples(st.integers(1, 700), st.floats(0.5, 1.0)), min_size=1, max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_no_mixture_of_dense_regions_exceeds_the_ceiling(
    parts: list[tuple[int, float]], seed: int
) -> None:
    what = changes_in_regions(parts, seed)
    flags = np.zeros(what.numel, bool)
    flags[what.positions] = True
    assert nbytes_of(flags) <= gw.max_message_bytes(what.numel)


# --- 4. near the entropy floor --------------------------------------------------------------------


@pytest.mark.parametrize(
    "density",
    [1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9, 0.99],
)
def test_random_places_cost_little_more_than_their_entropy(density: float) -> None:
    numel = 2**22
    rng = np.random.default_rng(66)
    flags = rng.random(numel, dtype=np.float32) < density
    count = int(np.count_nonzero(flags))
    floor = count + (
        math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    ) / math.log(2)
    allowed = 1.03 if 1e-4 <= density <= 0.1 else 1.05
    assert 8 * nbytes_of(flags) <= allowed * floor + 8 * (48 + 16)


def test_regions_of_different_density_cost_less_than_the_global_entropy() -> None:
    parts = [(200_000, 10.0**-rate) for rate in (1, 2, 3, 4) for _ in range(3)]
    what = changes_in_regions(parts, seed=67)
    flags = np.zeros(what.numel, bool)
    flags[what.positions] = True
    p = what.positions.size / what.numel
    floor = what.numel * (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) + what.positions.size
    assert 8 * nbytes_of(flags) < 0.9 * floor


# --- 6. order does not matter ---------------------------------------------------------------------


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_messages_in_any_order_give_the_same_bits(dtype: str) -> None:
    rng = np.random.default_rng(68)
    numel = 10_000
    messages = []
    for key in range(12):
        encoder = gw.Encoder(numel, gw.TargetDensity(0.05, initial=0.3), key=key)
        for _ in range(4):
            messages.append(encoder.encode(rng.standard_normal(numel).astype(np.float32)))
    smallest = 2.0 ** math.floor(math.log2(min(m.threshold for m in messages)))
    results = []
    for _ in range(5):
        order = rng.permutation(len(messages))
        target = np.zeros(numel, dtype)
        gw.apply_many([messages[i] for i in order], target, scale=0.25)
        assert np.abs(target).max() < 0.25 * 2**16 * smallest
        results.append(target.tobytes())
    assert len(set(results)) == 1


def test_thresholds_have_eight_significant_bits() -> None:
    encoder = gw.Encoder(100, gw.AdaptiveThreshold(initial=0.1, minimum=1e-3))
    for _ in range(30):
        mantissa, _ = math.frexp(encoder.encode(np.zeros(100, np.float32)).threshold)
        assert (mantissa * 256).is_integer()


# --- 7. untrusted bytes: tests/test_fuzz_parse.py, tests/test_apply.py ----------------------------
# --- 8. non-finite values: also tests/test_encoder.py ---------------------------------------------


@pytest.mark.usefixtures("isa")
@given(
    st.integers(1, 300),
    st.sampled_from(["raise", "skip"]),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 2**32 - 1),
)
def test_the_residual_is_finite_after_any_update(
    numel: int, mode: str, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    odd = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 0.0, -0.0, 1.0], np.float32)
    encoder = gw.Encoder(numel, 0.5, on_nonfinite=mode, dtype=dtype)  # type: ignore[arg-type]
    for _ in range(4):
        update = rng.choice(odd, numel)
        if rng.random() < 0.3:
            encoder.residual[rng.integers(0, numel)] = np.nan
        argument = update if rng.random() < 0.8 else None
        with np.errstate(over="ignore", invalid="ignore"):
            total = encoder.residual + (0.0 if argument is None else argument)
        bad = np.flatnonzero(~np.isfinite(total))
        if bad.size and mode == "raise":
            with pytest.raises(gw.NonFiniteUpdate) as caught:
                encoder.encode(argument)
            assert (caught.value.count, caught.value.first_index) == (bad.size, bad[0])
        else:
            assert np.isfinite(gw.decode(encoder.encode(argument))).all()
        assert np.isfinite(encoder.residual).all()
