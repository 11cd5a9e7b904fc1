"""The reference codec: what the format and the encoder promise, stated on the readable version."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import reference
from gradwire.errors import MessageError, NonFiniteUpdate
from gradwire.policy import (
    AdaptiveThreshold,
    FixedThreshold,
    ResidualClip,
    ShakeUp,
    StepThreshold,
    TargetDensity,
)
from gradwire.reference import ReferenceEncoder

from .strategies import Changes, changes, changes_in_regions, thresholds


def encode(what: Changes, threshold: float = 0.5) -> bytes:
    """Encode with defaults."""
    return reference.encode_ternary(
        what.positions, what.negative, numel=what.numel, threshold=threshold
    )


# --- the format -----------------------------------------------------------------------------------


def test_crc32c_gives_the_published_check_value() -> None:
    assert reference.crc32c(b"123456789") == 0xE3069283
    assert reference.crc32c(b"") == 0
    assert reference.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@pytest.mark.parametrize(
    ("count", "exponent"),
    [(0, 8), (1, 8), (16_384, 9), (16_385, 9), (2**20, 12), (2**20 + 1, 12), (2**22, 13)],
)
def test_chunks_grow_with_the_count(count: int, exponent: int) -> None:
    assert reference.chunk_exponent(count) == exponent


def test_rice_parameter_is_within_a_thousandth_of_the_best_one() -> None:
    for density in np.geomspace(1e-6, 0.38, 400):
        listed, span = round(2**30 * density), 2**30
        costs = [expected_bits(density, k) for k in range(24)]
        chosen = expected_bits(density, reference.rice_parameter(listed, span))
        assert chosen <= min(costs) * 1.001, density


def expected_bits(density: float, k: int) -> float:
    """Return the mean bits of a Rice code for geometric distances."""
    return k + 1 / (1 - (1 - density) ** (1 << k))


def test_rice_parameter_of_a_listed_minority_is_never_zero() -> None:
    # The directory leaves the sum of quotients out where k is 0, and only a listed majority tells it.
    for unchanged in range(1, 700):
        for changed in range(1, 1300, 7):
            chunk = reference.Chunk(0, changed, unchanged)
            assert not chunk.inverted or chunk.k > 0


@given(changes, thresholds, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 1))
def test_decoding_inverts_encoding(
    what: Changes, threshold: float, key: int, step: int, flags: int
) -> None:
    data = reference.encode_ternary(
        what.positions,
        what.negative,
        numel=what.numel,
        threshold=threshold,
        key=key,
        step=step,
        flags=flags,
    )
    message = reference.parse(data)
    np.testing.assert_array_equal(message.positions, what.positions)
    np.testing.assert_array_equal(message.negative, what.negative)
    assert message.header.threshold == threshold
    assert (message.header.key, message.header.step) == (key, step)
    assert message.header.flags == flags
    assert message.header.numel == what.numel
    assert message.header.payload_bytes == len(data) - 48


def test_no_message_of_a_few_elements_exceeds_the_ceiling() -> None:
    for numel in range(12):
        for flags in itertools.product((False, True), repeat=numel):
            positions = np.flatnonzero(flags)
            data = reference.encode_ternary(
                positions, np.ones(positions.size, bool), numel=numel, threshold=1.0
            )
            assert len(data) <= 48 + math.ceil(0.22 * numel), flags


@pytest.mark.parametrize("unchanged", [100, 130, 135, 136, 137, 138, 139, 140, 150, 160, 200])
def test_no_adversarial_chunk_exceeds_the_ceiling(unchanged: int) -> None:
    # Even distances leave nothing in the remainders, so the quotients are as long as they can be.
    for distance in (0, 1, 2, 3, 4):
        chunk = worst_chunk(256, unchanged, distance)
        flags = np.tile(chunk, 40)
        positions = np.flatnonzero(flags)
        data = reference.encode_ternary(
            positions, np.ones(positions.size, bool), numel=flags.size, threshold=1.0
        )
        assert len(data) <= 48 + math.ceil(0.22 * flags.size), (unchanged, distance)


def worst_chunk(changed: int, unchanged: int, distance: int) -> np.ndarray:
    """Return flags with the unchanged elements ``distance`` apart, as late as can be."""
    flags = np.ones(changed + unchanged, dtype=bool)
    wanted = flags.size - 2 - np.arange(unchanged) * (distance + 1)
    flags[wanted[wanted >= 0]] = False
    missing = unchanged - np.count_nonzero(~flags)
    flags[np.flatnonzero(flags[:-1])[:missing]] = False
    return flags


@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.97])
def test_a_message_is_near_the_entropy_of_random_places(density: float) -> None:
    numel = 2**20
    what = changes_in_regions([(numel, density)], seed=21)
    count = what.positions.size
    floor = (
        math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    ) / math.log(2) + count
    bits = 8 * (len(encode(what)) - 48 - 16)
    assert bits <= (1.03 if density <= 0.1 else 1.05) * floor


def test_regions_of_different_density_cost_less_than_the_global_entropy() -> None:
    parts = [(30_000, 10.0**-exponent) for exponent in (1, 2, 3, 4) for _ in range(3)]
    what = changes_in_regions(parts, seed=22)
    count, numel = what.positions.size, what.numel
    p = count / numel
    floor = numel * (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) + count
    assert 8 * (len(encode(what)) - 48) < 0.95 * floor


@given(changes, st.data())
def test_one_flipped_bit_is_always_noticed(what: Changes, data: st.DataObject) -> None:
    message = bytearray(encode(what))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MessageError):
        reference.parse(bytes(message))


def test_arguments_that_describe_no_message_are_refused() -> None:
    for positions, numel in (([1, 1], 9), ([2, 1], 9), ([-1], 9), ([9], 9), ([], -1)):
        with pytest.raises(ValueError, match=r"numel|positions"):
            reference.encode_ternary(
                positions, np.zeros(len(positions), bool), numel=numel, threshold=1.0
            )
    with pytest.raises(ValueError, match="one length"):
        reference.encode_ternary([1, 2], [True], numel=9, threshold=1.0)
    with pytest.raises(ValueError, match="bfloat16"):
        reference.encode_ternary([1], [True], numel=9, threshold=0.1)
    with pytest.raises(TypeError, match="int32"):
        reference.encode_dense(np.zeros(3, np.int32))


def test_apply_adds_the_rounded_product_and_refuses_another_size() -> None:
    data = reference.encode_ternary([0, 2], [False, True], numel=3, threshold=0.5)
    target = np.array([1.0, 2.0, 3.0], np.float32)
    reference.apply(data, target, scale=0.1)
    quantum = np.float32(0.1 * 0.5)
    assert target.tolist() == [np.float32(1) + quantum, 2.0, np.float32(3) - quantum]
    with pytest.raises(MessageError, match="3 elements"):
        reference.apply(data, np.zeros(4, np.float32))


# --- the encoder ----------------------------------------------------------------------------------


def multiples(rng: np.random.Generator, numel: int, spread: float = 40.0) -> np.ndarray:
    """Return float32 multiples of 2^-10: sums of these are exact."""
    return (np.rint(rng.standard_normal(numel) * spread) * 2.0**-10).astype(np.float32)


@pytest.mark.parametrize(
    "policy",
    [
        FixedThreshold(2.0**-5),
        AdaptiveThreshold(initial=2.0**-6, minimum=2.0**-9, decay=0.5),
        StepThreshold(initial=2.0**-4, minimum=2.0**-7, step=2.0**-8, trigger=0.5, delay=2),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_nothing_is_lost(policy: AdaptiveThreshold) -> None:
    encoder = ReferenceEncoder(
        501, policy, shakeup=ShakeUp(every=5, divisor=2.0), clip=ResidualClip(limit=4.0, every=7)
    )
    rng = np.random.default_rng(23)
    put_in = np.zeros(501)
    sent = np.zeros(501)
    for step in range(40):
        update = multiples(rng, 501, spread=40.0 if (step + 1) % 7 else 4_000.0)
        put_in += update
        sent += reference.decode(encoder.encode(update))
    kept = encoder.residual.astype(np.float64)
    assert (put_in - sent - kept).sum() == encoder.clipped_sum
    assert encoder.clipped_count > 0
    sent += reference.decode(encoder.encode_dense())
    assert not encoder.residual.any()
    assert (put_in - sent).sum() == encoder.clipped_sum


def test_without_clipping_every_element_is_conserved() -> None:
    encoder = ReferenceEncoder(300, FixedThreshold(2.0**-5), shakeup=ShakeUp(3, 4.0))
    rng = np.random.default_rng(24)
    put_in = np.zeros(300)
    sent = np.zeros(300)
    for _ in range(20):
        update = multiples(rng, 300)
        put_in += update
        sent += reference.decode(encoder.encode(update))
    np.testing.assert_array_equal(put_in, sent + encoder.residual)


def test_a_value_of_exactly_the_threshold_is_sent() -> None:
    encoder = ReferenceEncoder(4, FixedThreshold(0.5))
    below = np.nextafter(np.float32(0.5), np.float32(0))
    message = encoder.encode(np.array([0.5, -0.5, below, -below], np.float32))
    assert reference.decode(message).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert encoder.residual.tolist() == [0.0, 0.0, below, -below]


def test_an_encode_without_update_sends_values_that_the_caller_added() -> None:
    ours, theirs = (
        ReferenceEncoder(50, FixedThreshold(1.0)),
        ReferenceEncoder(50, FixedThreshold(1.0)),
    )
    update = np.random.default_rng(25).standard_normal(50).astype(np.float32)
    ours.residual += update
    assert ours.encode() == theirs.encode(update)
    assert ours.residual.tobytes() == theirs.residual.tobytes()


def test_an_encode_without_update_leaves_a_negative_zero() -> None:
    residual = np.float32([-0.0, 0.25])
    encoders = [ReferenceEncoder(2, FixedThreshold(0.5)), gw.Encoder(2, 0.5)]
    for encoder in encoders:
        encoder.residual[:] = residual
        encoder.encode()
        assert encoder.residual.tobytes() == residual.tobytes()


def test_a_non_finite_update_leaves_its_finite_part_and_sends_nothing() -> None:
    encoder = ReferenceEncoder(5, FixedThreshold(1.0))
    encoder.residual[:] = [0.5, 0.5, np.nan, 3e38, 0.0]
    with pytest.raises(NonFiniteUpdate) as caught:
        encoder.encode(np.array([2.0, np.inf, 0.25, 3e38, np.nan], np.float32))
    assert (caught.value.count, caught.value.first_index) == (4, 1)
    assert encoder.residual.tolist() == [2.5, 0.5, 0.25, np.float32(3e38), 0.0]
    assert encoder.step == 0


def test_skipping_sends_the_finite_part_and_counts_the_rest() -> None:
    encoder = ReferenceEncoder(3, FixedThreshold(1.0), on_nonfinite="skip")
    message = encoder.encode(np.array([1.5, np.nan, -np.inf], np.float32))
    assert reference.decode(message).tolist() == [1.0, 0.0, 0.0]
    assert encoder.residual.tolist() == [0.5, 0.0, 0.0]
    assert encoder.nonfinite_count == 2
    assert encoder.step == 1


def test_a_shake_up_is_flagged_uses_the_divided_threshold_and_does_not_feed_the_policy() -> None:
    policy = AdaptiveThreshold(initial=1.0, decay=0.5, minimum=2.0**-10)
    encoder = ReferenceEncoder(10, policy, shakeup=ShakeUp(every=2, divisor=4.0))
    first = reference.parse(encoder.encode(np.zeros(10, np.float32)))
    assert (first.header.threshold, first.header.flags) == (1.0, 0)
    assert encoder.threshold == 0.5
    second = reference.parse(encoder.encode(np.full(10, 0.13, np.float32)))
    assert (second.header.threshold, second.header.flags) == (0.125, 1)
    assert second.header.count == 10
    assert encoder.threshold == 0.5


def test_clipping_limits_the_residual_to_thresholds_of_the_policy() -> None:
    encoder = ReferenceEncoder(3, FixedThreshold(0.5), clip=ResidualClip(limit=2.0, every=2))
    encoder.encode(np.array([4.0, -4.0, 0.25], np.float32))
    assert encoder.residual.tolist() == [3.5, -3.5, 0.25]
    encoder.encode(np.zeros(3, np.float32))
    assert encoder.residual.tolist() == [1.0, -1.0, 0.25]
    assert (encoder.clipped_count, encoder.clipped_sum) == (2, 0.0)


def test_steps_wrap_in_the_header_only() -> None:
    encoder = ReferenceEncoder(1, FixedThreshold(1.0))
    encoder.step = 2**32
    assert reference.parse(encoder.encode()).header.step == 0
    assert encoder.step == 2**32 + 1


# --- the sample that TargetDensity predicts from --------------------------------------------------


def test_no_element_gives_no_quantiles() -> None:
    nothing = np.zeros(0, np.float32)
    assert reference.sample_quantiles(nothing, nothing, nothing, 0.1) is None


def test_quantiles_of_a_small_array_are_those_of_all_its_elements() -> None:
    rng = np.random.default_rng(27)
    before, update, after = rng.standard_normal((3, 4_992)).astype(np.float32)
    quantiles = reference.sample_quantiles(before, update, after, 0.01)
    assert quantiles is not None
    partner = np.arange(4_992) ^ 8
    for value, sample in (
        (quantiles.now, before + update),
        (quantiles.shuffled, before + update[partner]),
        (quantiles.next, after + update[partner]),
    ):
        assert value == pytest.approx(np.quantile(np.abs(sample), 0.99), rel=0.01)


@pytest.mark.parametrize(
    ("density", "stride"),
    [
        (1e-4, 5),  # at most 2^18 elements: ceil(numel / 2^18) is 4, and the stride odd
        (0.01, 13),  # 640 above the quantile: ceil(numel / 64,000)
        (0.5, 193),  # at least 2^12: ceil(numel / 4,096)
    ],
)
def test_a_large_array_is_sampled_in_groups_of_sixteen(density: float, stride: int) -> None:
    numel = 3 * 2**18 + 5
    before = np.zeros(numel, np.float32)
    sampled = np.arange(numel) // 16 % stride == 0
    before[sampled] = np.linspace(1, 2, np.count_nonzero(sampled), dtype=np.float32)
    before[~sampled] = 100.0
    quantiles = reference.sample_quantiles(before, np.zeros_like(before), before, density)
    assert quantiles is not None
    assert quantiles.now == pytest.approx(2 - density, rel=0.001)


def test_zero_and_non_finite_magnitudes_count_as_elements_only() -> None:
    before = np.zeros(16, np.float32)
    before[:4] = [np.nan, np.inf, 2.0, 1.0]
    zeros = np.zeros_like(before)
    quantiles = reference.sample_quantiles(before, zeros, zeros, 1 / 16)
    assert quantiles is not None
    assert quantiles.now == 2.0
    assert quantiles.next == 0.0
    few = reference.sample_quantiles(before, zeros, zeros, 0.5)
    assert few is not None
    assert few.now == 1.0  # half of the elements are not there to find: the least that is


def test_the_floor_is_half_the_mean_of_the_magnitudes_that_move() -> None:
    before = np.zeros(4096, np.float32)
    zeros = np.zeros_like(before)
    before[::64] = 1.0
    few = reference.sample_quantiles(before, zeros, zeros, 0.1, 9 / 16)
    assert few is not None
    assert few.moving == 1 / 64
    assert few.floor == pytest.approx(0.5, rel=0.01)
    enough = reference.sample_quantiles(before, zeros, zeros, 1 / 64, 9 / 16)
    assert enough is not None
    assert enough.floor == 0.0
    # Small remainders of earlier updates are not what moves, however many there are.
    before[before == 0.0] = 0.1
    before[::64] = 100.0
    remainders = reference.sample_quantiles(before, zeros, zeros, 0.1, 9 / 16)
    assert remainders is not None
    assert remainders.moving == 1.0
    assert remainders.floor == pytest.approx(50.0, rel=0.01)


def test_every_element_is_sampled_from_turn_to_turn() -> None:
    numel = 3 * 2**18 + 5
    seen = np.zeros(numel, bool)
    for turn in range(5):
        before = np.where(seen, 0.0, 1.0)
        sampled = np.arange(numel) // 16 % 5 == turn
        before[~sampled] = 0.0
        quantiles = reference.sample_quantiles(before, None, before, 1e-3, turn=turn)
        assert quantiles is not None
        assert quantiles.moving == 1.0
        seen |= sampled
    assert seen.all()


@pytest.mark.parametrize("wrong_by", [0.01, 100.0])
@pytest.mark.parametrize("kind", ["gauss", "laplace", "regions"])
def test_target_density_is_reached_within_five_steps(kind: str, wrong_by: float) -> None:
    numel, density = 2**18, 2e-3
    rng = np.random.default_rng(32)
    scale = np.repeat(10.0 ** np.linspace(-4, 0, 32), numel // 32).astype(np.float32)
    encoder = ReferenceEncoder(numel, TargetDensity(density, initial=3e-3 * wrong_by))
    reached = []
    for _ in range(12):
        update = rng.standard_normal(numel, dtype=np.float32) * np.float32(1e-3)
        if kind == "laplace":
            update = rng.laplace(scale=1e-3, size=numel).astype(np.float32)
        elif kind == "regions":
            update *= scale
        message = reference.parse(encoder.encode(update))
        reached.append(message.header.count / numel / density)
    assert not 0.8 <= reached[0] <= 1.25
    assert all(0.8 <= ratio <= 1.2 for ratio in reached[4:]), reached


def test_target_density_waits_while_there_is_nothing_to_learn() -> None:
    encoder = ReferenceEncoder(1000, TargetDensity(1e-2, initial=0.5))
    encoder.encode(np.zeros(1000, np.float32))
    assert encoder.threshold == 0.5
