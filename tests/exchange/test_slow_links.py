"""Starts, late joins and ends over links that take longer for it than any timeout: progress is what counts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.transport import Limits

from ..transport.proxy import Proxy, Trouble

SECRET = bytes(range(32))
NUMEL = 1_000_000
TIMEOUT_S = 3.0
# A snapshot of four megabytes takes six seconds, twice the timeout.
RATE = 650_000.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def slow_path(stack: ExitStack, node: gw.Node, rate: float = RATE) -> str:
    """Return an address at which a node is reached by a slow link."""
    proxy = Proxy(node.address, Trouble(rate_bytes_per_s=rate, queue_bytes=100_000))
    stack.callback(proxy.stop)
    return proxy.address


def node_of(stack: ExitStack, node_id: int, *seeds: str, **limits: Any) -> gw.Node:
    node = gw.Node("127.0.0.1:0", seeds, secret=SECRET, node_id=node_id, limits=Limits(**limits))
    return stack.enter_context(node)


def exchange_of(node: gw.Node, **options: Any) -> gw.Exchange:
    options = {"min_peers": 1, "topology": "mesh", "timeout_s": TIMEOUT_S, **options}
    return gw.Exchange(gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-9)), node, **options)


def update(node_id: int, step: int) -> NDArray[np.float32]:
    """Return an update of a thousand elements, in multiples of 2^-20, so that every sum is exact."""
    rng = np.random.default_rng([7, node_id, step])
    values = np.zeros(NUMEL, np.float32)
    values[rng.integers(0, NUMEL, 1_000)] = rng.integers(-4096, 4096, 1_000) / 2.0**20
    return values


class Trainer:
    """Trains on a node until all have taken so many steps after a newcomer has joined."""

    def __init__(self, node: gw.Node, step_s: float = 0.05, **options: Any) -> None:
        self.node = node
        self.params = np.zeros(NUMEL, np.float32)
        self.times: list[float] = []
        self.end: int | None = None
        self.joined: gw.Joined | None = None
        self._step_s = step_s
        self._options = options

    def train(self, all_of: list[Trainer]) -> None:
        try:
            self._train(all_of)
        except BaseException:
            for each in all_of:
                each.end = 0  # nobody trains on for ever
            raise

    def _train(self, all_of: list[Trainer]) -> None:
        share = exchange_of(self.node, **self._options)
        self.joined = share.join(self.params)
        if self.joined.is_late:
            for each in all_of:
                each.end = self.joined.step + 2
        while self.end is None or share.next_step < self.end:
            time.sleep(self._step_s)
            begin_s = time.perf_counter()
            share.step(update(self.node.id, share.next_step), self.params)
            self.times.append(time.perf_counter() - begin_s)
        share.end()


def run(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        running: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [each.result(60) for each in running]


def join_late(stack: ExitStack, step_s: float, **options: Any) -> list[Trainer]:
    # A send log that a snapshot would fill.
    limits = {"message_bytes_max": 1 << 20, "send_log_bytes": 2 << 20}
    first = node_of(stack, 1, **limits)
    other = node_of(stack, 2, first.address, **limits)
    trainers = [Trainer(node, step_s, **options) for node in (first, other)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(each.train, trainers) for each in trainers]
        first.wait_for_peers(1, timeout_s=10.0)
        time.sleep(2 * step_s)
        # By its id this newcomer asks the first node, which it reaches by the slow link.
        late = Trainer(node_of(stack, 9, slow_path(stack, first), **limits), step_s, **options)
        trainers.append(late)
        running.append(pool.submit(late.train, trainers))
        for each in running:
            each.result(60)
    assert late.joined is not None
    assert late.joined.is_late
    return trainers


def test_a_newcomer_joins_over_a_slow_link_and_no_step_waits_for_it(stack: ExitStack) -> None:
    trainers = join_late(stack, 0.05)
    assert len({each.params.tobytes() for each in trainers}) == 1
    # The snapshot takes six seconds. No step may wait for more than the parts that are under way.
    assert max(trainers[0].times[5:] + trainers[1].times[5:]) < 2.0
    assert len(trainers[0].times) > 30


@pytest.mark.slow
def test_a_newcomer_joins_where_exchanges_are_further_apart_than_the_timeout(
    stack: ExitStack,
) -> None:
    trainers = join_late(stack, 0.8, every=4)
    assert trainers[2].joined
    shared = {each.params.tobytes() for each in trainers}
    assert len(shared) == 1


def test_a_start_with_other_parameters_lasts_as_long_as_they_travel(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    first = node_of(stack, 1)
    equal = node_of(stack, 2, first.address)
    other = node_of(stack, 3, slow_path(stack, first))

    def start(node: gw.Node, value: float) -> bytes:
        share = exchange_of(node, min_peers=2)
        params = np.full(NUMEL, value, np.float32)
        share.join(params, equalize=True)
        for step in range(3):
            share.step(update(node.id, step), params)
        share.end()
        return params.tobytes()

    with caplog.at_level(logging.WARNING, "gradwire"):
        results = run(
            lambda: start(first, 1.0), lambda: start(equal, 1.0), lambda: start(other, 7.0)
        )
    assert len(set(results)) == 1
    # Who waits sees how far it is.
    assert any("MB to send" in text for text in caplog.messages)
    assert any("of 4.0 MB from" in text for text in caplog.messages)


@pytest.mark.parametrize("is_late", [False, True], ids=["start", "late"])
def test_who_gets_no_part_of_the_parameters_learns_that_a_link_may_drop_large_datagrams(
    stack: ExitStack, is_late: bool
) -> None:
    first = node_of(stack, 1)
    path = stack.enter_context(Proxy(first.address, Trouble(datagram_bytes_max=1_100)))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    has_begun, is_over = threading.Event(), threading.Event()
    stack.callback(is_over.set)

    def train() -> None:
        share = exchange_of(first, min_peers=0 if is_late else 1)
        params = np.zeros(NUMEL, np.float32)
        share.join(params, equalize=not is_late)
        while not is_over.wait(0.05):
            share.step(update(1, share.next_step), params)
            has_begun.set()

    training = pool.submit(train)
    assert not is_late or has_begun.wait(10.0)
    other = node_of(stack, 2, path.address)
    share = exchange_of(other)
    with pytest.raises(TimeoutError, match="a link drops datagrams of 1200 bytes"):
        share.join(np.ones(NUMEL, np.float32), equalize=not is_late)
    other.close(timeout_s=0.0)
    is_over.set()
    training.result(60)


def test_equal_parameters_do_not_travel(stack: ExitStack) -> None:
    first = node_of(stack, 1)
    other = node_of(stack, 2, first.address)

    def start(node: gw.Node) -> None:
        exchange_of(node).join(np.ones(NUMEL, np.float32), equalize=True)

    run(lambda: start(first), lambda: start(other))
    assert first.stats().payload_bytes_sent < 10_000


ENDING = """
import os, sys
import numpy as np, gradwire as gw
rank, numel = int(sys.argv[1]), 200_000
node = gw.Node("127.0.0.1:0" if rank else sys.argv[2], [sys.argv[2]] if rank else [], secret=bytes(range(32)),
               node_id=rank + 1)
print(node.address, flush=True)
params = np.zeros(numel, np.float32)
with node:
    shared = gw.share(params, node=node, codec="dense", min_peers=1)
    shared.step(np.full(numel, rank + 1.0, np.float32))
    shared.close()
print(params.sum(), flush=True)
"""


def test_a_process_ends_when_its_last_update_is_delivered(tmp_path: Path) -> None:
    """The update takes eight seconds, where a node closes after five."""
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(rank: int, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(rank), address]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    with ExitStack() as stack:
        first = start(0, "127.0.0.1:0")
        stack.callback(first.kill)
        assert first.stdout is not None
        proxy = Proxy(
            first.stdout.readline().strip(), Trouble(rate_bytes_per_s=100_000, queue_bytes=20_000)
        )
        stack.callback(proxy.stop)
        other = start(1, proxy.address)
        stack.callback(other.kill)
        (first_out, first_log), (other_out, other_log) = (
            each.communicate(timeout=90) for each in (first, other)
        )
    assert (first.returncode, other.returncode) == (0, 0), first_log + other_log
    assert float(first_out.split()[-1]) == 1.5 * 200_000
    assert float(other_out.split()[-1]) == 1.5 * 200_000


def test_a_node_closes_when_everything_is_delivered(stack: ExitStack) -> None:
    first = node_of(stack, 1)
    other = node_of(stack, 2, slow_path(stack, first, rate=100_000.0))
    other.wait_for_peers(1, timeout_s=10.0)
    other.publish(bytes(600_000))
    begin_s = time.perf_counter()
    assert other.close(timeout_s=3.0) == []
    assert time.perf_counter() - begin_s > 4.0
    assert [len(payload) for _, _, payload in first.receive(1.0)] == [600_000]


def test_a_node_that_takes_nothing_more_is_an_error_at_the_end(stack: ExitStack) -> None:
    first = node_of(stack, 1, down_s=60.0)
    other = node_of(stack, 2, first.address)
    is_done = threading.Event()
    shares = [exchange_of(node) for node in (first, other)]

    def train(rank: int) -> None:
        params = np.zeros(NUMEL, np.float32)
        shares[rank].step(update(rank, 0), params)
        is_done.wait(0 if rank else 30)

    is_done.set()
    run(lambda: train(0), lambda: train(1))
    # Its process stands still: connected, and without an answer.
    with other._lock:
        first.publish(b"more")
        with pytest.raises(TimeoutError, match="has taken nothing for 3 s and lacks"):
            shares[0].end()
