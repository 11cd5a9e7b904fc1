"""Workers of a machine that are interrupted, wherever they are in a call."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.exchange import LocalExchange, LocalTeam, local

from .test_local import flat, run_team, tensors


@pytest.mark.parametrize("is_in_step", [False, True])
def test_an_interrupted_call_of_the_leader_ends_for_all_workers(
    is_in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = [KeyboardInterrupt()]
    step = gw.Exchange.step

    def interrupted(*args: Any, **options: Any) -> Any:
        result = step(*args, **options) if is_in_step else None
        if interrupts:
            raise interrupts.pop()
        return result or step(*args, **options)

    monkeypatch.setattr(gw.Exchange, "step", interrupted)

    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        with pytest.raises(KeyboardInterrupt if rank == 0 else gw.GradwireError):
            share.step(tensors(rank), params)
        share.step(tensors(5), params)
        return flat(params)

    outcomes, _ = run_team(work, 2, reduction="sum", codec="dense")
    expected = 2 * flat(tensors(5)) + is_in_step * (flat(tensors(0)) + flat(tensors(1)))
    for params in outcomes:
        np.testing.assert_array_equal(params, expected)


def test_a_worker_that_is_interrupted_while_it_waits_ends_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not know what became of its update, and would be a call behind the others."""
    end_call = LocalTeam.end_call

    def interrupted(team: LocalTeam, call: int) -> None:
        if team.rank and call == 2:
            raise KeyboardInterrupt if team.rank == 1 else ZeroDivisionError
        end_call(team, call)

    monkeypatch.setattr(LocalTeam, "end_call", interrupted)

    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        share.step(tensors(rank), params)
        if rank:
            with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
                share.step(tensors(rank + 2), params)
            with pytest.raises(gw.Closed):
                share.step(tensors(), params)
            return None
        for step in (1, 2, 3):
            assert share.step(tensors(step + 4), params).step == step
        return flat(params)

    outcomes, _ = run_team(work, 3, reduction="sum", codec="dense")
    np.testing.assert_array_equal(outcomes[0], sum(flat(tensors(seed)) for seed in range(8)))


@pytest.mark.parametrize("place", ["_reduce", "read_outcome", "put"])
@pytest.mark.parametrize("interrupted_rank", [0, 1])
def test_a_call_that_is_interrupted_in_the_middle_is_not_made_again(
    interrupted_rank: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum was overwritten, or the parameters are half copied, and the others have gone on: nobody gets a result."""
    this = threading.local()
    holder: Any = local if place == "put" else LocalTeam
    function = getattr(holder, place)

    def interrupted(*arguments: Any) -> Any:
        if getattr(this, "is_due", False):
            this.is_due = False
            raise KeyboardInterrupt
        return function(*arguments)

    def work(rank: int, share: LocalExchange) -> None:
        params = tensors()

        def take_steps(count: int) -> None:
            for _ in range(count):
                share.step(tensors(rank), params)

        take_steps(1)
        if rank == interrupted_rank:
            this.is_due = True
            with pytest.raises(KeyboardInterrupt):
                take_steps(1)
            with pytest.raises(gw.Closed):
                take_steps(1)
        elif interrupted_rank == 0:
            with pytest.raises(gw.PeerLost):
                take_steps(2)
        else:
            take_steps(2)

    monkeypatch.setattr(holder, place, interrupted)
    run_team(work, 2, reduction="sum", codec="dense")
