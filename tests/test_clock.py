"""Log entries that every message of a peer may cause, at intervals."""

from __future__ import annotations

import logging

import pytest

from gradwire.clock import LOG_INTERVAL_S, LogLimit

TEXT = "%s sent %d"


def test_each_sender_and_text_has_an_entry_in_an_interval_and_the_next_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = LogLimit(logging.getLogger("gradwire").warning)
    for number in range(100):
        for sender in ("a", "b"):
            limit.log(sender, number * 1e-3, TEXT, sender, number)
    limit.log("a", 0.5, "another text of %s", "a")
    limit.log("a", LOG_INTERVAL_S, TEXT, "a", 100)
    limit.log("a", 2.0 * LOG_INTERVAL_S, TEXT, "a", 101)
    assert caplog.messages == [
        "a sent 0",
        "b sent 0",
        "another text of a",
        "a sent 100 (99 more of these since the last entry)",
        "a sent 101",
    ]


def test_ever_new_senders_take_no_more_memory(caplog: pytest.LogCaptureFixture) -> None:
    limit = LogLimit(logging.getLogger("gradwire").warning)
    for sender in range(2_000):
        limit.log(sender, 0.0, TEXT, sender, 0)
        limit.log("chatty", 0.0, TEXT, "chatty", 0)
    assert len(limit._entries) <= 1_024
    assert sum(text.startswith("chatty") for text in caplog.messages) == 1
