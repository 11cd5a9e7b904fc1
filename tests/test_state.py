"""The encoder's state: nothing that is damaged gets into it, and an error leaves it as it was."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.policy import FIRST_TREND
from gradwire.reference import ReferenceEncoder

from .other_threads import lets_others_run


class Small:
    """A policy of the caller's own."""

    initial = 1e-38
    sample_density = None

    def next_threshold(self, *_: Any) -> float:
        return 1e-38


def used_encoder() -> gw.Encoder:
    encoder = gw.Encoder(3, gw.TargetDensity(0.5))
    encoder.encode(np.float32([1.0, -2.0, 3.0]))
    return encoder


def bits_of(encoder: gw.Encoder) -> bytes:
    return pickle.dumps((encoder.state_dict(), encoder.policy, encoder.stats))


@pytest.mark.parametrize(
    "damage",
    [
        {"course": (0.5, np.nan, 0)},
        {"course": (np.inf, 0.0, 0)},
        {"course": ("0.5", 0.0, 0)},
        {"course": (0.5, True, 0)},
        {"course": (0.5, 0.0, True)},
        {"course": (0.5, 0.0, 3)},
        {"course": (0.5, 0.0, 0.5)},
        {"course": (0.5, 10**400, 0)},
        {"course": (0.5, 0.0)},
        {"course": 0.5},
        {"step": 3.7},
        {"step": "5"},
        {"step": True},
        {"step": np.float64(5.0)},
        {"step": 2**64},
        {"changed_at": 0.5},
        {"changed_at": "0"},
        {"changed_at": False},
        {"threshold": "0.5"},
        {"threshold": True},
        {"threshold": 10**400},
        {"threshold": [0.5]},
        {"residual": np.float32([0.0, np.nan, 0.0])},
        {"residual": np.float32([0.0, 0.0, -np.inf])},
        {"residual": "abc"},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    encoder = used_encoder()
    before = bits_of(encoder)
    with pytest.raises(ValueError, match="state"):
        encoder.load_state_dict({**used_encoder().state_dict(), **damage})
    assert bits_of(encoder) == before
    encoder.encode(np.zeros(3, np.float32))
    assert encoder.step == 2


def test_a_state_of_numpy_s_numbers_is_taken() -> None:
    state = used_encoder().state_dict()
    numbers = {
        "threshold": np.float64(state["threshold"]),
        "step": np.int32(state["step"]),
        "changed_at": np.uint8(state["changed_at"]),
        "course": tuple(map(np.float32, state["course"])),
    }
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    for same in ({**state, **numbers}, dict(np.load(file))):
        encoder = gw.Encoder(3, gw.TargetDensity(0.5))
        encoder.load_state_dict(same)
        assert pickle.dumps(encoder.state_dict()) == pickle.dumps(state)


@pytest.mark.parametrize(
    ("policy", "threshold", "complaint"),
    [
        (gw.TargetBytes(10), 5.0, "max_bytes is 10, too few"),
        (gw.TargetDensity(0.1), 0.0, "threshold"),
        (gw.TargetDensity(0.1), "5", "threshold must be a number"),
        (gw.FixedThreshold(1e-38), None, "shake-up's threshold, 1e-38 / 1000.0, rounds to zero"),
        (gw.TargetDensity(0.1), 1e-38, "shake-up's threshold, 1e-38 / 1000.0, rounds to zero"),
        (0.5, 5.0, "policy must be a threshold policy"),
    ],
)
def test_a_policy_that_is_refused_changes_nothing(
    policy: Any, threshold: Any, complaint: str
) -> None:
    encoder = gw.Encoder(1000, gw.FixedThreshold(0.5), gw.ShakeUp(2, 1000.0))
    before = bits_of(encoder)
    with pytest.raises((ValueError, TypeError), match=complaint):
        encoder.set_policy(policy, threshold)
    assert bits_of(encoder) == before
    assert bits_of(pickle.loads(pickle.dumps(encoder))) == before


def test_a_fixed_threshold_is_the_one_given() -> None:
    update = np.full(1000, 2e-3, np.float32)
    for encoder in (gw.Encoder(1000), gw.Encoder(1000, 0.5)):
        encoder.set_policy(gw.FixedThreshold(1e-3))
        assert encoder.threshold == 1e-3
        assert encoder.encode(update).count == 1000
        encoder.set_policy(gw.FixedThreshold(1e-3), 4e-3)
        assert encoder.threshold == 4e-3
    encoder = used_encoder()
    encoder.set_policy(gw.FixedThreshold(1e-3))
    assert encoder.threshold == 1e-3


def test_a_policy_after_which_nothing_was_learned_begins_as_at_first() -> None:
    rng = np.random.default_rng(3)
    updates = (1e-3 * rng.standard_normal((4, 1000))).astype(np.float32)
    for policy in (gw.TargetDensity(0.1), gw.TargetDensity(0.1, initial=0.5), gw.TargetBytes(200)):
        fresh, changed = gw.Encoder(1000, policy), gw.Encoder(1000)
        changed.set_policy(policy)
        for update in updates:
            assert bytes(changed.encode(update)) == bytes(fresh.encode(update))
    encoder = gw.Encoder(1000)
    encoder.encode(np.zeros(1000, np.float32))  # teaches nothing
    encoder.set_policy(gw.AdaptiveThreshold(initial=0.25))
    assert encoder.threshold == 0.25
    encoder.set_policy(gw.TargetDensity(0.2), 0.125)
    assert encoder.state_dict()["course"][0] == FIRST_TREND
    assert encoder.threshold == 0.125


def test_a_threshold_that_was_learned_outlives_its_policy() -> None:
    encoder = used_encoder()
    learned = encoder.threshold
    for policy in (gw.AdaptiveThreshold(), gw.TargetDensity(0.1), gw.TargetBytes(60)):
        encoder.set_policy(policy)
        assert encoder.threshold == learned


@pytest.mark.parametrize("dtype", [False, True, "", "float32", 0, np.dtype("float32")])
def test_a_flush_of_another_dtype_is_refused(dtype: Any) -> None:
    encoder = used_encoder()
    before = bits_of(encoder)
    with pytest.raises(ValueError, match="dtype must be None"):
        encoder.flush(dtype)
    assert bits_of(encoder) == before


@pytest.mark.parametrize("dense", ["", None, 0, 1, "float32"])
def test_an_update_is_sparse_only_if_dense_is_false(dense: Any) -> None:
    encoder = used_encoder()
    before = bits_of(encoder)
    with pytest.raises(ValueError, match="a dense message has the dtype of the residual"):
        encoder.encode(np.ones(3, np.float32), dense=dense)
    assert bits_of(encoder) == before
    assert encoder.encode(np.ones(3, np.float32), dense=np.False_).kind != "dense"  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "policy",
    [
        gw.FixedThreshold(1e-38),
        gw.AdaptiveThreshold(minimum=1e-38),
        gw.StepThreshold(minimum=1e-38),
        gw.TargetDensity(0.1, minimum=1e-38),
        gw.TargetBytes(60, minimum=1e-38),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_shake_ups_below_the_least_threshold_are_refused_when_made(policy: Any) -> None:
    with pytest.raises(
        ValueError, match=r"1e-38 / 10000000000.0, rounds to zero .* smaller divisor"
    ):
        gw.Encoder(2, policy, gw.ShakeUp(2, 1e10))
    gw.Encoder(2, policy, gw.ShakeUp(2, 10.0))


def test_a_policy_of_the_caller_s_own_hears_of_shake_ups_that_are_too_small() -> None:
    encoder = gw.Encoder(2, Small(), gw.ShakeUp(2, 1e10))
    encoder.encode(np.ones(2, np.float32))
    before = bits_of(encoder)
    with pytest.raises(ValueError, match="smaller divisor"):
        encoder.encode(np.ones(2, np.float32))
    assert bits_of(encoder) == before


def test_a_policy_of_the_caller_s_own_learns_its_first_threshold_only() -> None:
    class Own:
        initial, sample_density = None, 0.5

        def next_threshold(self, *_: Any) -> float:
            return 0.125

    encoder = gw.Encoder(1_000, Own())
    reference = ReferenceEncoder(1_000, Own())
    encoder.encode(np.zeros(1_000, np.float32))
    reference.encode(np.zeros(1_000, np.float32))
    thresholds = []
    for update in np.random.default_rng(7).standard_normal((3, 1_000), np.float32):
        message = encoder.encode(update)
        assert bytes(message) == reference.encode(update)
        thresholds.append(message.threshold)
    assert 0.5 < thresholds[0] < 1.0
    assert thresholds[1:] == [0.125, 0.125]


@pytest.mark.parametrize(
    "policy", [gw.AdaptiveThreshold(0.5), gw.TargetDensity(0.5), gw.TargetBytes(10_000)], ids=str
)
@pytest.mark.parametrize("parts", [None, 3])
def test_an_interrupted_step_leaves_the_threshold_as_it_was(policy: Any, parts: Any) -> None:
    class Interrupted(gw.ResidualClip):
        def is_due(self, step: int) -> bool:
            if step == 1:
                raise KeyboardInterrupt
            return False

    encoder = gw.Encoder(1_000, policy, clip=Interrupted())
    first, second = np.random.default_rng(8).standard_normal((2, 1_000), np.float32)
    encoder.encode(first, parts=parts)
    state, stats = encoder.state_dict(), encoder.stats
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(second, parts=parts)
    np.testing.assert_allclose(encoder.residual, state.pop("residual") + second, rtol=1e-6)
    after = encoder.state_dict()
    gw.Encoder(1_000, policy).load_state_dict(after)
    del after["residual"]
    assert (after, encoder.stats) == (state, stats)


def test_what_an_interrupted_step_has_clipped_is_counted() -> None:
    class Core:
        """The core of an encoder, with a signal at the end of every clipping."""

        def __init__(self, core: Any) -> None:
            self._core = core

        def __getattr__(self, name: str) -> Any:
            return getattr(self._core, name)

        def clip(self, limit: float) -> None:
            self._core.clip(limit)
            raise KeyboardInterrupt

    encoder = gw.Encoder(4, 1.0, clip=gw.ResidualClip(2.0, every=1))
    encoder._core = Core(encoder._core)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(np.float32([8.0, 0.5, -6.0, 0.0]))
    assert encoder.residual.tolist() == [3.0, 0.5, -3.0, 0.0]
    assert encoder.stats == gw.EncoderStats(clipped_count=2, clipped_sum=5.0 - 3.0)


@pytest.mark.parametrize("policy", [1.0, gw.TargetDensity(0.5)], ids=str)
def test_without_a_residual_the_error_of_an_update_says_what_is_true(policy: Any) -> None:
    encoder = gw.Encoder(4, policy, keeps_residual=False)
    update, before = np.float32([1.0, np.nan, 3.0, 4.0]), np.zeros(4, np.float32)
    given = update.copy()
    with pytest.raises(gw.NonFiniteUpdate) as caught:
        encoder.encode(update, before=before)
    assert str(caught.value) == (
        "1 elements of update - before are not finite, the first at index 1; nothing was sent and "
        "update and before are as they were: mend the update"
    )
    assert (caught.value.count, caught.value.first_index) == (1, 1)
    np.testing.assert_array_equal(update, given)
    assert not before.any()
    encoder.make_residual()
    with pytest.raises(gw.NonFiniteUpdate, match="finite part is in the residual: mend") as caught:
        encoder.encode(update, before=before)
    assert "skip" not in str(caught.value)
    assert encoder.residual.tolist() == [1.0, 0.0, 3.0, 4.0]
    assert (encoder.step, encoder.stats.nonfinite_count) == (0, 0)


@pytest.mark.parametrize("policy", [1.0, gw.TargetDensity(0.5)], ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_errors_of_a_difference_name_the_caller_s_arguments(policy: Any, dense: bool) -> None:
    encoder = gw.Encoder(4, policy)
    four = np.ones(4, np.float32)
    half, still = four.astype(np.float16), four.copy()
    still.flags.writeable = False
    wrong: list[tuple[Any, Any, str]] = [
        (None, four, "update is a NoneType"),
        (half, four, "update is float16"),
        ([half], [four], r"update\[0\] is float16|update is float16"),
        (four.copy(), half, "before is float16"),
        (still, four, "update is read-only"),
        (four, np.ones(5, np.float32), "update and before must be arrays of the same sizes"),
        (four, four, "before overlaps the update"),
        (encoder.residual, four, "update overlaps the residual"),
    ]
    for update, before, complaint in wrong:
        with pytest.raises((TypeError, ValueError), match=complaint):
            encoder.encode(update, before=before, dense=dense)
    assert not encoder.residual.any()
    assert encoder.step == 0


def test_other_threads_run_while_a_large_residual_is_made() -> None:
    encoder = gw.Encoder(2**25, keeps_residual=False)
    assert lets_others_run(encoder.make_residual)


def test_a_residual_stays_while_an_update_lends_its_memory() -> None:
    encoder = gw.Encoder(4, 1.0, keeps_residual=False)
    encoder.make_residual()
    refusals = []

    class Lending:
        """An array whose library lets other threads run before it lends the memory."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: Any) -> Any:
            with pytest.raises(RuntimeError, match="in use by another thread") as caught:
                encoder.drop_residual()
            refusals.append(caught)
            return np.full(4, 1.5, np.float32).__dlpack__(**options)

    encoder.encode(Lending())
    assert refusals
    assert encoder.residual.tolist() == [0.5] * 4


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_of_an_encoder_has_a_residual_only_where_the_original_has(how: str) -> None:
    encoder = gw.Encoder(4, 1.0, keeps_residual=False)
    for has_residual in (False, True):
        if has_residual:
            encoder.make_residual()
        copied = (
            copy.deepcopy(encoder) if how == "deepcopy" else pickle.loads(pickle.dumps(encoder))
        )
        assert copied.has_residual == has_residual
