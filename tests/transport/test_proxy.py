"""Real sockets with a middlebox between them: whatever it does, everything comes once, in order, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from .processes import PeerProcess, skip_if_busy
from .proxy import Proxy, Trouble

MESSAGE_BYTES = 100_000


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
def test_a_path_that_does_one_bad_thing_loses_nothing(what: str, trouble: Trouble) -> None:
    _, counts = exchange(trouble, 40, MESSAGE_BYTES)
    assert counts[what] > 20


def test_a_path_that_does_everything_bad_loses_nothing() -> None:
    trouble = Trouble(
        delay_s=0.002, loss=0.02, reorder=0.05, duplicate=0.05, corrupt=0.002, truncate=0.01
    )
    _, counts = exchange(trouble, 40, MESSAGE_BYTES)
    for what in ("loss", "reorder", "duplicate", "corrupt", "truncate"):
        assert counts[what] > 5, what


@pytest.mark.parametrize("every_s", [1.0, 0.25])
def test_a_nat_that_changes_the_port_at_one_second_and_then_often_loses_nothing(
    every_s: float,
) -> None:
    trouble = Trouble(
        delay_s=0.005, rate_bytes_per_s=2e6, rebind_first_s=1.0, rebind_every_s=every_s
    )
    _, counts = exchange(trouble, 60, MESSAGE_BYTES)  # 3 s at this rate
    assert counts["rebind"] >= 2


def test_100_megabits_with_20_ms_each_way_and_1_percent_of_loss_are_used() -> None:
    """The best of up to three runs, because other work on the machine delays the middlebox as well."""
    rate_bytes_per_s, messages, nbytes = 12.5e6, 24, 1 << 20
    shares: list[float] = []
    while len(shares) < 3 and max(shares, default=0.0) < 0.8:
        trouble = Trouble(delay_s=0.02, loss=0.01, rate_bytes_per_s=rate_bytes_per_s)
        with (
            PeerProcess() as server,
            Proxy(server.address, trouble) as proxy,
            PeerProcess([proxy.address]) as client,
        ):
            client.ask("wait", peers=1)
            server.tell("receive", messages=messages)
            sent = client.ask("send", messages=messages, nbytes=nbytes)
            assert server.answer()["tags"] == {str(client.id): list(range(messages))}
            counts = proxy.stop()
            assert sent["stats"]["retransmitted_fragments"] <= 1.2 * counts["lost_there"]
            shares.append(messages * nbytes / sent["seconds"] / rate_bytes_per_s)
    if max(shares) < 0.8:
        skip_if_busy(f"only {max(shares):.3f} of the rate was used")
    assert max(shares) >= 0.8
