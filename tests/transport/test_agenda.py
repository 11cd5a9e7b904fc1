"""The agenda tells the same as looking at everybody."""

from __future__ import annotations

import random

import pytest

from gradwire.transport.agenda import STALE_MIN, STALE_SHARE_MAX, Agenda


@pytest.mark.parametrize("seed", range(10))
def test_it_tells_the_same_as_looking_at_everybody(seed: int) -> None:
    generator = random.Random(seed)
    agenda = Agenda()
    times: dict[int, float] = {}
    for _ in range(3_000):
        index = generator.randrange(12)
        match generator.randrange(4):
            case 0 | 1:
                times[index] = generator.choice((float("-inf"), generator.randrange(50)))
                agenda.set(index, times[index])
            case 2:
                times.pop(index, None)
                agenda.drop(index)
            case _:
                now_s = generator.randrange(50)
                before = list(times.values())
                due = agenda.take_due(now_s)
                assert sorted(due) == sorted(i for i, at_s in times.items() if at_s <= now_s)
                assert [times.pop(i) for i in due] == sorted(
                    at_s for at_s in before if at_s <= now_s
                )
        assert agenda.next_at_s() == min(times.values(), default=float("inf"))
        assert len(agenda._heap) <= STALE_MIN + STALE_SHARE_MAX * 12 + 1
