"""What several donors send of a snapshot, and what another one sends for a donor that is gone."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from gradwire import shares
from gradwire.errors import MessageError
from gradwire.shares import Division, Ranges


def test_what_is_missing_of_many_arrays_is_known_in_little_time() -> None:
    sizes = [0, 1, 9, 0, *[1] * 20_000, 9, 0]
    division = Division(sizes, shared=len(sizes), velocities=0)
    places = [0, 1, 4, 5, 8, 9, 10, 11, 20_009, 20_010, 20_014, 20_018]
    begins = [0, 1, 1, 1, 1, 1, 10, 11, 20_009, 20_010, 20_010, 20_010]
    begin_s = time.process_time()
    for _ in range(200):  # as often as a newcomer asks within a few seconds
        missing = [division.whole([(place, 20_019)]) for place in places]
    assert time.process_time() - begin_s < 1.0  # 2 seconds if all arrays were looked at
    assert missing == [[(begin, 20_019)] for begin in begins]
    assert division.nbytes == 20_019


SIZES = [4_012, 80, 3_108, 1_600]  # of parameters and moments
IN_TURN = [nbytes for nbytes in SIZES for _ in range(2)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("moments", "pairs"),
    [
        (IN_TURN, [(2 * at, 2 * at + 1) for at in range(4)]),
        ([*SIZES, *SIZES], [(at, 4 + at) for at in range(4)]),
    ],
    ids=["torch", "optax"],
)
@pytest.mark.parametrize("velocities", [0, 4])
def test_an_element_has_all_of_its_optimizer_state_from_the_same_donor(
    velocities: int,
    moments: list[int],
    pairs: list[tuple[int, int]],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "_DIVIDED_BYTES", 200)
    description = 33
    before = [*SIZES[:velocities], *SIZES, description]
    division = Division([*before, *moments], shared=len(before), velocities=velocities)
    donor_of = np.full(division.nbytes, -1)
    for place in range(count):
        ranges = division.share(place, count)
        assert all(before[1] < after[0] for before, after in pairwise(ranges))
        for begin, end in ranges:
            assert (donor_of[begin:end] == -1).all()
            donor_of[begin:end] = place
    assert (donor_of >= 0).all(), "every byte has a donor"
    *of_shared, of_description = np.split(donor_of, np.cumsum(before))[: len(before)]
    assert len({*of_description}) == 1
    for velocity, param in zip(of_shared[:velocities], of_shared[velocities:], strict=False):
        assert (velocity == param).all()
    donors = np.split(donor_of[sum(before) :], np.cumsum(moments)[:-1])
    for first, second in pairs:
        assert (donors[first] == donors[second]).all()
    sent = np.bincount(np.concatenate(donors), minlength=count)
    assert sent.max() - sent.min() <= 2 * 80 + 2 * 4 * 64, "each sends about as much"


@pytest.mark.parametrize(
    ("missing", "asked"),
    [
        ((50, 60), [(0, 60)]),  # of the parameters
        ((3_010, 3_020), [(3_000, 3_020)]),  # of the description
        # Both moments of the first parameter, from the first that is missing on.
        ((3_200, 4_040), [(3_168, 4_040), (4_168, 5_040)]),
        ((4_300, 5_040), [(3_296, 4_040), (4_296, 5_040)]),
        ((3_900, 4_100), [(3_040, 3_100), (3_872, 4_100), (4_872, 5_040)]),
        ((3_900, 5_000), [(3_040, 5_040)]),
        ((5_110, 5_240), [(5_104, 5_240), (5_304, 5_440)]),
        # The rest of the first parameter, and so much of the second.
        ((4_700, 5_100), [(3_680, 4_040), (4_680, 5_100), (5_240, 5_300)]),
        ((3_030, 4_100), [(3_000, 5_040)]),
    ],
)
def test_another_donor_sends_the_moments_of_an_element_together(
    missing: tuple[int, int], asked: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "WHOLE_BYTES", 500)
    params, state = (1_000, 200, 1_800), (1_000, 1_000, 200, 200, 0, 1_800)
    division = Division([*params, 40, *state], shared=4, velocities=0)
    assert division.whole([missing]) == asked
    # What is missing at two places goes together, without a common byte.
    assert division.whole([missing, (7_000, 7_100)]) == [*asked, (6_976, 7_100)]


def test_what_was_taken_is_no_longer_missing() -> None:
    missing = [(0, 10), (20, 30), (40, 41)]
    assert shares.without(missing, []) == missing
    assert shares.without(missing, [(0, 10)]) == missing[1:]
    assert shares.without(missing, [(2, 4), (6, 10), (20, 29)]) == [
        (0, 2),
        (4, 6),
        (29, 30),
        (40, 41),
    ]
    assert shares.without(missing, missing) == []
    for wrong in ([(9, 11)], [(12, 14)], [(20, 25), (24, 26)], [(41, 42)]):
        with pytest.raises(MessageError, match=f"from byte {wrong[-1][0]} to {wrong[-1][1]}"):
            shares.without(missing, wrong)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("order", ["torch", "jax"])
def test_little_is_sent_again_for_a_donor_that_dies(order: str, count: int) -> None:
    """With the arrays of a transformer of 124 million parameters under AdamW."""
    width = 768
    layer = [width, width, 3 * width**2, 3 * width, width**2, width]
    layer += [width, width, 4 * width**2, 4 * width, 4 * width**2, width]
    numels = [50_304 * width, 1_024 * width, *layer * 12, width, width]
    params = [4 * numel for numel in numels]
    in_turn = [nbytes for moment in params for nbytes in (4, moment, moment)]
    moments = in_turn if order == "torch" else sorted([4, *params, *params])
    division = Division([*params, 2_000, *moments], shared=len(params) + 1, velocities=0)
    given = division.share(count - 1, count)
    shares_again = []
    for come in range(0, shares.size_of(given), 1 << 22):
        missing: Ranges = []
        for begin, end in given:
            missing += [(begin + min(come, end - begin), end)] if come < end - begin else []
            come = max(0, come - (end - begin))
        again = shares.size_of(division.whole(missing)) - shares.size_of(missing)
        shares_again.append(again / division.nbytes)
    # With torch at most one moment of the embedding, if the donor dies between its two. JAX's moments of all layers
    # with the same size stand together.
    most, usual = (0.11, 0.02) if order == "torch" else (0.3, 0.07)
    assert max(shares_again) <= most / count
    assert np.mean(shares_again) <= usual / count
