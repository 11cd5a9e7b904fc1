"""Log entries that every message of a peer may cause, at intervals; and how far a wait is."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
import sys

import pytest

from gradwire import clock
from gradwire.clock import LOG_INTERVAL_S, LogLimit, Wait, shown

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


def wait_for_a_snapshot(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for ten seconds, and fail."""
    time_s = 0.0
    monkeypatch.setattr(clock, "now_s", lambda: time_s)
    monkeypatch.setattr(sys, "stderr", terminal)
    wait = Wait("this node joins", silence_s=60.0)
    for tenth in range(1, 101):
        time_s = tenth / 10
        wait.note(tenth, f"{tenth}.0 of 200.0 MB from [::1]:7000")
    sys.stderr.write("a line of the training\n")
    assert not wait.is_over


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_a_wait_is_on_a_line_that_goes_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    wait_for_a_snapshot(terminal, monkeypatch)
    assert not caplog.messages
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "this node joins: 20.0 of 200.0 MB from [::1]:7000, after 2 s" in shown
    assert "this node joins: 98.0 of 200.0 MB from [::1]:7000, after 10 s" in shown
    assert 20 < shown.count("this node joins") < 50
    assert "a line of the training\n" in shown
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize("has_terminal", [False, True])
def test_the_log_shows_how_far_a_wait_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_terminal: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    terminal = Terminal() if has_terminal else io.StringIO()
    wait_for_a_snapshot(terminal, monkeypatch)
    assert caplog.messages == [
        f"this node joins: {10 * seconds}.0 of 200.0 MB from [::1]:7000, after {seconds} s"
        for seconds in (2, 4, 8)
    ]
    assert terminal.getvalue() == "a line of the training\n"


def test_arrays_that_take_long_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time_s = 0.0
    monkeypatch.setattr(clock, "now_s", lambda: time_s)
    for number in shown("a checkpoint is made", range(20), 20):
        assert time_s == number
        time_s += 1.0
    assert caplog.messages == [
        f"a checkpoint is made: {count} of 20 arrays, after {count} s" for count in (2, 4, 8, 16)
    ]


def test_who_silences_the_log_sees_no_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    with caplog.at_level(logging.ERROR, "gradwire"):
        wait_for_a_snapshot(terminal, monkeypatch)
    assert terminal.getvalue() == "a line of the training\n"
