"""What an exchange shows: totals, times, metrics for Prometheus, one warning, and figures for ``gradwire top``."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest

import gradwire as gw
from gradwire import clock
from gradwire.cli import main, top
from gradwire.exchange import MetricsCollector, log_every, metrics
from gradwire.exchange.metrics import ResidualMonitor, socket_folder

from .cluster import FakeNode, cluster, run_cluster

SECRET = bytes(range(32))


def trained(**options: Any) -> tuple[gw.ExchangeStats, list[gw.StepResult]]:
    """Return totals and results of an exchange of one node after four steps."""
    with cluster(0) as made:
        share = gw.Exchange(gw.Encoder(4, 0.5), made.node(1), min_peers=0, **options)
        params = np.zeros(4, np.float32)
        results = [
            share.step(np.array([value, 0.0, 0.0, 0.0], np.float32), params)
            for value in (0.5, 0.25, 0.25, 0.375)
        ]
    return share.stats, results


def test_the_statistics_add_up() -> None:
    stats, results = trained()
    assert [result.step for result in results] == [0, 1, 2, 3]
    assert (stats.steps, stats.local_steps) == (4, 0)
    assert stats.sent_bytes == sum(result.sent_bytes for result in results)
    assert stats.ratio == pytest.approx(4 * 4 * 4 / stats.sent_bytes)
    assert (stats.threshold, stats.density) == (0.5, 0.0)
    assert results[0].ratio == 16 / results[0].sent_bytes


def test_local_steps_are_counted_apart() -> None:
    stats, results = trained(every=2)
    assert (stats.steps, stats.local_steps) == (2, 2)
    assert [result.is_local for result in results] == [True, False, True, False]


# ---- whole steps -----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves a millisecond whenever it is read, and by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def node() -> Iterator[gw.Node]:
    with gw.Node("127.0.0.1:0", secret=SECRET) as made:
        yield made


@pytest.fixture
def share(node: gw.Node) -> gw.Exchange:
    return gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)


@pytest.fixture
def not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an exchange without others count as one of two nodes."""
    of = vars(gw.Exchange)["stats"].fget
    stats = property(lambda share: dataclasses.replace(of(share), members=1))
    monkeypatch.setattr(gw.Exchange, "stats", stats)


def step(share: gw.Exchange, value: float = 0.75) -> gw.StepResult:
    return share.step(np.full(4, value, np.float32), np.zeros(4, np.float32))


def test_a_step_has_the_caller_s_time_before_it(
    share: gw.Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Clock()
    monkeypatch.setattr(clock, "now_s", moving)
    assert step(share).compute_s == 0.0
    moving.now_s += 2.0
    result = step(share)
    assert result.compute_s == pytest.approx(2.001)
    inside_s = result.step_s - result.compute_s
    assert result.encode_s + result.wait_s + result.apply_s <= inside_s <= 0.1
    assert share.stats.compute_s == result.compute_s
    assert share.stats.share == pytest.approx(1.0 - 2.001 / share.stats.step_s)


@pytest.mark.usefixtures("not_alone")
@pytest.mark.parametrize(("compute_s", "warnings"), [(0.0, 1), (10.0, 0)])
def test_a_large_share_is_warned_of_once(
    compute_s: float,
    warnings: int,
    share: gw.Exchange,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    moving = Clock()
    monkeypatch.setattr(clock, "now_s", moving)
    for _ in range(100):
        moving.now_s += compute_s
        step(share)
    found = [text for text in caplog.messages if text.startswith("gradwire takes")]
    assert len(found) == warnings
    assert all(
        re.match(r"gradwire takes \d+ % of a step \(encode .* every=4", one) for one in found
    )


@pytest.mark.parametrize("every", [1, 4, 8])
@pytest.mark.parametrize(("usual_s", "warnings"), [(0.0, 0), (1.0, 1)])
def test_one_long_wait_is_neither_a_slow_link_nor_hides_one(
    every: int,
    usual_s: float,
    warnings: int,
    node: gw.Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    moving = Clock()
    monkeypatch.setattr(clock, "now_s", moving)
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0, every=every)
    # A member is gone in one step, and this node evaluates before another.
    waits_s = {16: 10.0}
    computes_s = {18: 50.0}

    def take_room() -> None:
        moving.now_s += waits_s.get(share.stats.steps * every, usual_s * every)

    monkeypatch.setattr(share._step, "_obstacle", take_room)
    for number in range(40):
        moving.now_s += computes_s.get(number, 0.2)
        step(share)
    taken = [text for text in caplog.messages if text.startswith("gradwire takes")]
    assert len(taken) == warnings


def test_a_listener_logs_every_so_many_steps(
    share: gw.Exchange, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    share.listeners += [log_every(3), lambda result, stats: seen.append(result.step + stats.steps)]
    with caplog.at_level(logging.INFO, "gradwire.exchange.metrics"):
        for _ in range(7):
            step(share)
    assert seen == [1 + 2 * number for number in range(7)]
    found = [text.split(":")[0] for text in caplog.messages if text.startswith("step ")]
    assert found == ["step 2", "step 5"]
    assert "; sent 49 B (in the mesh to each peer) and received 0 B a step; " in caplog.text
    for steps, error in ((0, ValueError), (2.5, TypeError), ("a", TypeError)):
        with pytest.raises(error, match="steps must be"):
            log_every(steps)  # type: ignore[arg-type]


def test_local_steps_count_in_the_number_that_is_shown(
    node: gw.Node, caplog: pytest.LogCaptureFixture
) -> None:
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0, every=4)
    params = np.zeros(4, np.float32)
    share.listeners.append(log_every(3))
    with caplog.at_level(logging.INFO, "gradwire.exchange.metrics"):
        for _ in range(6):
            share.step(np.ones(4, np.float32), params)
    found = [text.split(":")[0] for text in caplog.messages if text.startswith("step ")]
    assert found == ["step 2", "step 5"]
    # The fourth step alone has sent a message, and none has the third of its bytes.
    assert f"; sent {share.stats.sent_bytes / 3:.0f} B (in the mesh to each peer) " in caplog.text
    assert share.metrics_snapshot()["step"] == share.step_number == share.stats.step_number == 6


def test_a_node_that_comes_late_shows_the_step_of_the_training(
    node: gw.Node, share: gw.Exchange
) -> None:
    for _ in range(5):
        step(share)
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            step(share)

    member = threading.Thread(target=train)
    member.start()
    try:
        with gw.Node("127.0.0.1:0", [node.address], secret=SECRET) as other:
            late = gw.Exchange(gw.Encoder(4, 0.5), other, min_peers=1)
            joined = late.join(np.zeros(4, np.float32))
            step(late)
            assert late.metrics_snapshot()["step"] == late.step_number == joined.step + 1 > 5
            late.leave(np.zeros(4, np.float32))
    finally:
        is_over.set()
        member.join()


# ---- Prometheus ------------------------------------------------------------------------------------------------------


def samples_of(share: gw.Exchange) -> dict[str, float]:
    """Return what an endpoint of ``prometheus_client`` serves, by name and labels."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(MetricsCollector(share))
    text = prometheus_client.generate_latest(registry).decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_prometheus_gets_the_totals_and_the_transport_s_counters(share: gw.Exchange) -> None:
    step(share)
    values = samples_of(share)
    assert values["gradwire_steps_total"] == 1.0
    assert values["gradwire_residual_norm"] == pytest.approx(0.5)
    assert values["gradwire_transport_datagrams_sent_total"] == 0.0
    assert values["gradwire_members"] == 0.0
    assert {"gradwire_step_seconds_total", "gradwire_transport_kernel_drops_total"} <= values.keys()


def test_prometheus_gets_each_peer_s_path(node: gw.Node, share: gw.Exchange) -> None:
    with gw.Node("127.0.0.1:0", [node.address], secret=SECRET) as other:
        other.wait_for_peers(1, 10.0)
        node.wait_for_peers(1, 10.0)
        values = samples_of(share)
        assert values[f'gradwire_peer_loss_rate{{peer="{other.address}"}}'] == 0.0
        for name in ("rate_bytes_per_second", "srtt_seconds", "backlog_records"):
            assert f'gradwire_peer_{name}{{peer="{other.address}"}}' in values


def test_a_collector_does_not_keep_an_exchange_alive(node: gw.Node) -> None:
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
    collector = MetricsCollector(share)
    assert list(collector.collect())
    del share
    gc.collect()
    assert list(collector.collect()) == []


def test_the_next_exchange_of_a_process_is_registered_as_the_first_was(node: gw.Node) -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)  # as ``REGISTRY``
    for steps in (1, 2):
        share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
        registry.register(MetricsCollector(share))
        for _ in range(steps):
            share.step(np.zeros(4, np.float32), np.zeros(4, np.float32))
        assert registry.get_sample_value("gradwire_steps_total") == steps
        del share
        gc.collect()


def test_a_collector_without_prometheus_client_says_what_to_install(
    share: gw.Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"gradwire\[metrics\]"):
        MetricsCollector(share)


# ---- gradwire top ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(metrics, "_SOCKETS", tmp_path)
    return tmp_path / f"gradwire-{os.getuid()}"


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_offered_unless_asked_for(
    value: str | None,
    folder: Path,
    node: gw.Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GRADWIRE_TOP", raising=False)
    if value is not None:
        monkeypatch.setenv("GRADWIRE_TOP", value)
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
    step(share)
    assert not folder.exists()
    assert main(["top"]) == 1
    assert "start it with GRADWIRE_TOP=1" in capsys.readouterr().err


def test_top_shows_rates_and_peers(
    folder: Path,
    node: gw.Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GRADWIRE_TOP", "1")
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
    with gw.Node("127.0.0.1:0", [node.address], secret=SECRET) as other:
        other.wait_for_peers(1, 10.0)
        node.wait_for_peers(1, 10.0)
        step(share)
        before = top.pages()
        [page] = before.values()
        assert page["process"] == os.getpid()
        assert page["stats"]["steps"] == 1
        for _ in range(9):
            step(share)
        after = top.pages()
        [name] = after
        after[name]["stats"]["step_s"] = before[name]["stats"]["step_s"] + 3.0
        after[name]["slowest"] = other.address
        sent = before[name]["transport"]["udp_bytes_sent"]
        after[name]["transport"]["udp_bytes_sent"] = sent + 9 * 2_000  # to all peers together
        head, line, place, peer = top.table(before, after, after)
        assert place == f"  process {os.getpid()}, step 10, {Path(sys.argv[0]).name}"
        after[name]["rank"] = "rank 3"
        assert list(top.table(before, after, after))[2].startswith("  rank 3, step 10, ")
        assert line.split()[:2] == [node.address, "3"]
        assert " 2 kB " in line
        assert len(head.split()) == 8
        assert peer.startswith(f"  {other.address} ")
        assert peer.endswith("<- last to arrive")
    monkeypatch.setattr(top, "INTERVAL_S", 0.01)
    assert main(["top", "--once"]) == 0
    assert node.address in capsys.readouterr().out
    del share
    gc.collect()
    assert list(folder.iterdir()) == []


def columns_at(every: int, step_s: float, last_s: float = 1e9) -> list[list[str]]:
    """Return rate, share, density, bytes and unit of the tables of a training whose last step ends at ``last_s``."""

    def figures(time_s: float) -> top.Pages:
        steps = int(min(time_s, last_s) / step_s)
        exchanges = steps // every
        stats = {
            "steps": exchanges,
            "local_steps": steps - exchanges,
            "step_s": steps * step_s,
            "compute_s": 0.75 * steps * step_s,
            "density": 0.05,
            "lost": 0,
        }
        page = {"address": f"[{':'.join(['2001'] * 8)}]:12345", "rank": "rank 0", "step": steps}
        page |= {"script": "", "time_s": time_s, "stats": stats, "residual_norm": 1.0, "peers": []}
        wire = {f"udp_bytes_{way}": 6_000 * exchanges for way in ("sent", "received")}
        return {"1-2.sock": {**page, "transport": wire}}

    before = latest = figures(600.0)
    columns = []
    for table in range(1, 31):
        after = figures(600.0 + 2.0 * table)
        before, latest = top.windows(before, latest, after)
        head, line, _ = top.table(before, latest, after)
        assert len(head) == len(line)
        columns.append(line.split()[1:6])
    return columns


@pytest.mark.parametrize(
    ("every", "step_s", "rate"),
    [
        (1, 0.125, "8"),
        (1, 3.0, "0.333"),
        (1, 20.0, "0.05"),
        (15, 0.25, "4"),  # an exchange in every second table
    ],
)
def test_top_shows_steps_and_exchanges_that_are_rarer_than_tables(
    every: int, step_s: float, rate: str
) -> None:
    columns = columns_at(every, step_s)
    known = next(index for index, column in enumerate(columns) if "?" not in column)
    assert known <= every * step_s / 2.0
    assert columns[known:] == [[rate, "25%", "5.00%", "6", "kB"]] * (30 - known)


def test_top_shows_that_a_training_waits() -> None:
    rates = [float(rate) for rate, *_ in columns_at(1, 0.125, 620.0)]
    assert rates[:10] == [8.0] * 10
    assert rates[10:14] == [0.5, 0.25, 0.167, 0.125]


@pytest.mark.parametrize(
    "place", ["missing", "long" * 30, "file", "of-another-user"], ids=lambda place: place[:15]
)
def test_a_training_goes_on_where_top_cannot_show_it(
    place: str,
    node: gw.Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / place
    if place == "file":
        folder.touch()
    elif place != "missing":
        folder.mkdir()
    if place == "of-another-user":
        user = os.getuid()
        (folder / f"gradwire-{user + 1}").mkdir()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    monkeypatch.setattr(metrics, "_SOCKETS", folder)
    monkeypatch.setenv("GRADWIRE_TOP", "1")
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
    step(share)
    [text] = [text for text in caplog.messages if "gradwire top" in text]
    assert "cannot show this process, which goes on: " in text
    if not place.startswith("long"):  # the path of a folder may be longer than that of a socket
        assert main(["top"]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("gradwire top: ")
        assert str(folder) in line


def test_the_sockets_folder_does_not_depend_on_the_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/4711")
    assert socket_folder() == folder


def test_a_node_that_trains_alone_gets_no_advice_about_others(
    share: gw.Exchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clock, "now_s", Clock())
    for _ in range(100):
        step(share)
    [text] = [text for text in caplog.messages if text.startswith("gradwire takes")]
    assert "trains alone" in text
    assert "overlap" not in text
    assert "gradwire top" not in text


@pytest.mark.usefixtures("not_alone")
@pytest.mark.parametrize(
    ("options", "proposed"),
    [
        ({"every": 2, "overlap": 1}, ["every=8"]),
        ({"every": 8, "overlap": 1}, ["overlap=2", "every=32"]),
        ({"topology": "sharded"}, ["overlap=1", "every=4"]),
    ],
)
def test_the_remedies_are_options_that_the_exchange_does_not_have_yet(
    node: gw.Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    proposed: list[str],
) -> None:
    monkeypatch.setattr(clock, "now_s", Clock())
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0, **options)
    for _ in range(40):
        step(share)
    [text] = [text for text in caplog.messages if text.startswith("gradwire takes")]
    assert re.findall(r"\w+=\d+", text) == proposed


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (gw.TargetDensity(0.25), "about equally large"),
        (gw.FixedThreshold(2.0**-9), "give TargetDensity"),
    ],
)
def test_a_threshold_that_sends_everything_is_blamed_only_where_it_was_given(
    policy: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = ResidualMonitor(lambda _numel: ())
    groups = gw.Groups([gw.exchange.Group(gw.Encoder(4, policy))])
    for number in range(200):
        monitor.add(gw.StepResult(step=number, density=1.0, threshold=0.5), groups)
    [text] = caplog.messages
    assert says in text
    assert ("too small" in text) is isinstance(policy, gw.FixedThreshold)


def test_a_model_of_small_tensors_is_sent_whole_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = ResidualMonitor(lambda _numel: ())
    groups = gw.Groups.of([np.zeros((4, 3), np.float32), np.zeros(3, np.float32)])
    for number in range(200):
        monitor.add(gw.StepResult(step=number, density=1.0), groups)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("density", "says"),
    [(0.2, "twice as high: 0.4"), (0.5, "give a larger one"), (0.999, "give a larger one")],
)
def test_a_growing_residual_is_never_given_a_density_of_1(
    density: float, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    norms = iter(2.0**number for number in range(100))
    monitor = ResidualMonitor(lambda _numel: [np.array([next(norms)])])
    groups = gw.Groups([gw.exchange.Group(gw.Encoder(4, 0.5))])
    for number in range(200):
        monitor.add(gw.StepResult(step=number, density=density, threshold=0.5), groups)
    [text] = caplog.messages
    assert says in text


def test_updates_far_above_the_threshold_get_one_remedy(
    share: gw.Exchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clock, "now_s", lambda: 0.0)
    for _ in range(60):
        step(share, 5.0)
    [text] = [
        text for text in caplog.messages if "residual has grown" in text or "sent for" in text
    ]
    assert text.startswith("every element has been sent for 50 steps")


def test_local_steps_do_not_hide_who_came_last() -> None:
    def work(node: FakeNode, rank: int) -> list[str | None]:
        share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=1, every=3)
        params = np.zeros(4, np.float32)
        shown = []
        for _ in range(8):
            node.cluster.compute(node, 0.1 * rank)
            share.step(np.ones(4, np.float32), params)
            slowest = share._meter.slowest
            shown.append(None if slowest is None else slowest.address)
        return shown

    shown, _ = run_cluster(work, count=2, seed=1)
    assert shown[:2] == [None, None]
    assert None not in shown[2:]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_call_that_finishes_no_step_hides_no_warning(
    overlap: int, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(0) as made:
        enc = gw.Encoder(4, gw.FixedThreshold(1e-6))
        share = gw.Exchange(enc, made.node(1), min_peers=0, every=2, overlap=overlap)
        params = np.zeros(4, np.float32)
        for _ in range(2 * 52):
            share.step(np.ones(4, np.float32), params)
    [text] = [
        text for text in caplog.messages if "residual has grown" in text or "sent for" in text
    ]
    assert text.startswith("every element has been sent for 50 steps")


@pytest.mark.usefixtures("not_alone")
def test_waiting_for_space_counts_as_waiting(
    share: gw.Exchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moving = Clock()
    monkeypatch.setattr(clock, "now_s", moving)

    def take_room() -> None:
        moving.now_s += 1.0

    monkeypatch.setattr(share._step, "_obstacle", take_room)
    for _ in range(30):
        step(share)
    [text] = [text for text in caplog.messages if text.startswith("gradwire takes")]
    assert "overlap=1 hides the network" in text


def test_top_leaves_out_a_process_that_ends_while_it_answers(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(socket_folder() / "1-2.sock"))
        server.listen()

        def answer() -> None:
            with server.accept()[0] as reader:
                reader.sendall(b'{"address": "127.0.0.')

        thread = threading.Thread(target=answer)
        thread.start()
        assert top.pages() == {}
        thread.join()
    assert folder.exists()


def test_top_leaves_out_a_killed_process_whose_forked_child_lives(folder: Path) -> None:
    code = """
import os, pathlib, signal, sys
import gradwire as gw
from gradwire.exchange import metrics

metrics._SOCKETS = pathlib.Path(sys.argv[1])
with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRADWIRE_TOP": "1"}
    command = [sys.executable, "-c", code, str(folder.parent)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.wait()
        try:
            assert list(folder.glob("*.sock"))
            assert top.pages() == {}
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("folder")
def test_top_shows_processes_that_do_not_answer_and_asks_all_at_once(
    node: gw.Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GRADWIRE_TOP", "1")
    monkeypatch.setattr(top, "ANSWER_S", 0.7)
    monkeypatch.setattr(top, "INTERVAL_S", 0.01)
    share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=0)
    with contextlib.ExitStack() as stack:
        for process in range(1, 11):  # as if they were stopped
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(socket_folder() / f"{process}-2.sock"))
            server.listen(0)
        begin_s = time.monotonic()
        assert main(["top", "--once"]) == 0
        assert time.monotonic() - begin_s < 7.0  # two tables; one after the other it would be 14
        out = capsys.readouterr().out
        assert node.address in out
        for process in range(1, 11):
            assert f"process {process} does not answer within 0.7 s" in out
        answered = top.pages()
        silent = {name: {"process": page["process"]} for name, page in answered.items()}
        lines = list(top.table(*top.windows(silent, silent, answered), answered))
        assert any(line.startswith(node.address) for line in lines)
    del share


def test_what_a_killed_process_has_left_is_removed(folder: Path) -> None:
    code = "import socket, sys, os; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); os._exit(0)"
    path = socket_folder() / "1-2.sock"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert path.exists()
    assert top.pages() == {}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("ends", [gw.Exchange.leave, lambda share, _: share.end()])
def test_a_node_that_has_left_has_no_members(ends: Any) -> None:
    def work(node: FakeNode, _: int) -> tuple[int, tuple[gw.transport.Peer, ...], str]:
        share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=2)
        assert len(share.wait_for_peers()) == share.stats.members == 2
        params = np.zeros(4, np.float32)
        share.step(np.ones(4, np.float32), params)
        ends(share, params)
        return share.stats.members, share.members, repr(share)

    for members, peers, text in run_cluster(work, count=3, seed=1):
        assert (members, peers) == (0, ())
        assert " 0 other members" in text


def test_the_slowest_peer_is_named() -> None:
    def work(node: FakeNode, _: int) -> list[gw.StepResult]:
        share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=1)  # type: ignore[arg-type]
        return [step(share) for _ in range(4)]

    one, two = run_cluster(work, count=2, seed=3)
    found = {result.slowest and result.slowest.id for result in (*one, *two)}
    assert found - {None}
    assert found <= {None, 10, 20}
    assert {result.slowest.id for result in one if result.slowest} <= {20}


def test_whoever_waits_for_a_node_is_told_of_long_steps_and_of_slow_links(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages over a slow link come as late as those of a node that computes for longer."""

    def work(node: FakeNode, rank: int) -> None:
        share = gw.Exchange(gw.Encoder(4, 0.5), node, min_peers=1, mode="async")  # type: ignore[arg-type]
        for _ in range(60):
            node.cluster.compute(node, 1.0 if rank else 0.1)
            step(share)

    run_cluster(work, count=2, seed=3)
    [text] = [text for text in caplog.messages if text.startswith("gradwire takes")]
    assert text.endswith(
        "127.0.0.1:1020 is behind, and this node may be 8 steps ahead (max_staleness): if it computes for longer, "
        "smaller batches there make its steps as long as those here; if a link is slow, every=4 exchanges a quarter as "
        "often"
    )
