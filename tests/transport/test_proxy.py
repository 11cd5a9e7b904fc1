"""Real sockets with a middlebox between them: whatever it does, every message arrives once, in order, unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from .processes import PeerProcess
from .proxy import Proxy, Trouble

MESSAGE_BYTES = 100_000
PROBES_MAX = 40  # sent when a process does not run for longer than a probe timeout


def exchange(
    trouble: Trouble, messages: int, nbytes: int, *, host: str = "127.0.0.1"
) -> tuple[dict[str, Any], dict[str, int]]:
    """Have two nodes send to each other through the middlebox, and check everything that arrives."""
    with (
        PeerProcess(bind=f"{host}:0") as server,
        Proxy(server.address, trouble) as proxy,
        PeerProcess([proxy.address], bind=f"{host}:0") as client,
    ):
        pair = (server, client)
        for peer in pair:
            peer.ask("wait", peers=1)
        for peer in pair:
            peer.tell("send", messages=messages, nbytes=nbytes, timeout_s=60.0)
        answers = [peer.answer(65.0) for peer in pair]
        assert all(answer["is_drained"] for answer in answers)
        for peer, other in (pair, pair[::-1]):
            received = peer.ask("receive", messages=messages)
            assert received["tags"] == {str(other.id): list(range(messages))}
            assert peer.ask("events")["lost"] == []
        return answers[1], proxy.stop()


@pytest.mark.parametrize(
    ("what", "trouble"),
    [
        ("reorder", Trouble(reorder=0.2)),
        ("duplicate", Trouble(duplicate=0.3)),
        ("corrupt", Trouble(corrupt=0.01)),
        ("truncate", Trouble(truncate=0.05)),
    ],
)
@pytest.mark.slow
def test_a_path_that_does_one_bad_thing_loses_nothing(what: str, trouble: Trouble) -> None:
    _, counts = exchange(trouble, 40, MESSAGE_BYTES)
    assert counts[what] > 20


def test_a_path_that_does_everything_bad_loses_nothing() -> None:
    trouble = Trouble(
        delay_s=0.002, loss=0.02, reorder=0.05, duplicate=0.05, corrupt=0.002, truncate=0.01
    )
    _, counts = exchange(trouble, 20, MESSAGE_BYTES)
    for what in ("loss", "reorder", "duplicate", "corrupt", "truncate"):
        assert counts[what] > 2, what


@pytest.mark.parametrize(
    ("first_s", "every_s", "messages"),
    [(0.3, 0.2, 12), *(pytest.param(1.0, s, 60, marks=pytest.mark.slow) for s in (1.0, 0.25))],
)
def test_a_nat_that_keeps_changing_the_port_loses_nothing(
    first_s: float, every_s: float, messages: int
) -> None:
    trouble = Trouble(
        delay_s=0.005, rate_bytes_per_s=2e6, rebind_first_s=first_s, rebind_every_s=every_s
    )
    _, counts = exchange(trouble, messages, MESSAGE_BYTES)
    assert counts["rebind"] >= 2


@pytest.mark.slow
def test_over_100_megabits_with_20_ms_each_way_little_more_is_sent_again_than_1_percent_loses() -> (
    None
):
    trouble = Trouble(delay_s=0.02, loss=0.01, rate_bytes_per_s=12.5e6)
    sent, counts = exchange(trouble, 12, 1 << 20)
    assert sent["stats"]["retransmitted_fragments"] <= 1.2 * counts["lost_there"] + PROBES_MAX
