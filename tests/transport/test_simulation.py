"""Random histories; GRADWIRE_SEEDS sets their number, and ``python -m transport.vopr`` runs them from the shell."""

from __future__ import annotations

import os

import pytest

from .vopr import run_seed

SEEDS = int(os.environ.get("GRADWIRE_SEEDS", "20"))
GROUP = 5


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_random_histories_lose_nothing_and_come_to_rest(first: int) -> None:
    messages = 0
    for seed in range(first, min(first + GROUP, SEEDS)):
        history = run_seed(seed)
        messages += sum(len(host.received) for host in history.hosts())
    assert messages > 20, "the histories must exchange something"


def test_a_seed_repeats_to_the_byte() -> None:
    one, two = run_seed(3), run_seed(3)
    assert [host.received for host in one.hosts()] == [host.received for host in two.hosts()]
    assert [host.endpoint.stats() for host in one.hosts()] == [
        host.endpoint.stats() for host in two.hosts()
    ]


def test_a_failing_seed_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_seed.__globals__["History"], "check", _fail)
    with pytest.raises(AssertionError, match=r"python -m transport\.vopr --seed 5"):
        run_seed(5)


def _fail(_: object) -> None:
    raise AssertionError("made to fail")
