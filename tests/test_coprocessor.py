"""One process owns the parameters and applies the descent; workers lose and repeat nothing, whoever is killed.

Gradients here are multiples of a power of two, and learning rates are powers of two, so that every sum is exact.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import coprocessor, reference, shared_memory, slices
from gradwire.cli.run import free_port
from gradwire.coprocessor import SGD, Host, Worker
from gradwire.transport import Limits, PeerJoined

SECRET = bytes(range(32))
SHAPES = [(3, 5), (7,)]
NUMEL = 22
WHOLE = 1 << 20  # bytes of a slice with which nothing here is cut
QUICK = Limits(heartbeat_s=0.1, down_s=1.0)

Arrays = list[NDArray[Any]]


def arrays(value: float = 0.0) -> Arrays:
    return [np.full(shape, value, np.float32) for shape in SHAPES]


def flat(params: Arrays) -> NDArray[Any]:
    return np.concatenate(params, axis=None)


def gradients(seed: int) -> Iterator[Arrays]:
    """Yield gradients of multiples of 1/16 between -2 and 2."""
    rng = np.random.default_rng(seed)
    while True:
        yield [np.float32(rng.integers(-32, 33, shape) / 16.0) for shape in SHAPES]


class Cluster:
    """Hosts and workers in this process; the hosts move only when a test says so."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stack = stack
        self._monkeypatch = monkeypatch
        self._pool = stack.enter_context(ThreadPoolExecutor(1))

    def node(self, *peers: str, bind: str = "127.0.0.1:0", **options: Any) -> gw.Node:
        node = gw.Node(bind, peers, secret=SECRET, **{"limits": QUICK, **options})
        self._stack.callback(node.close, 0.0)
        return node

    def host(self, optimizer: Any = None, node: gw.Node | None = None, **options: Any) -> Host:
        params = options.pop("params", None) or arrays()
        host = Host(node or self.node(), params, optimizer or SGD(1.0), **options)
        self._stack.callback(host.close)
        return host

    def worker(self, host: Host, params: Any = None, **options: Any) -> Worker:
        defaults = {"threshold": 0.5, "in_flight": 100, "timeout_s": 20.0, "limits": QUICK}
        options = {**defaults, **options}
        node = self.node(host.node.address, limits=options.pop("limits"))
        worker = self.run(host, lambda: Worker(node, params, **options))
        self._stack.callback(worker.close)
        return worker

    def run(self, host: Host, call: Callable[[], Any]) -> Any:
        """Return the result of a call that waits for the host."""
        future = self._pool.submit(call)
        while not future.done():
            host.step(timeout_s=0.01)
        return future.result()

    def lose_connection(self, worker: Worker, host: Host) -> None:
        """Lose what is on its way, and let the worker see that its connection was replaced."""
        worker.node.receive()
        arrived = [*host._inbox, *host.node.receive()]
        host._inbox.clear()
        host._inbox.extend(message for message in arrived if message.peer != worker.node.peer)
        events = [PeerJoined(host.node.peer)]
        self._monkeypatch.setattr(worker.node, "events", lambda: [events.pop()] if events else [])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "shm")
    monkeypatch.setattr(coprocessor, "_RETRY_S", 0.05)
    with ExitStack() as stack:
        yield Cluster(stack, monkeypatch)


def reach(host: Host, version: int) -> None:
    """Let a host make so many steps."""
    for _ in range(1_000):
        if host.version >= version:
            return
        host.step(timeout_s=0.05)
    raise AssertionError(f"version {host.version} of {version}")


def refresh(worker: Worker, is_done: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if is_done():
            return
        worker.refresh(0.02)
    raise AssertionError(f"{worker.version=} {worker.kept=}")


def is_settled(worker: Worker) -> bool:
    """Return whether the host has told what became of all gradients."""
    return worker._is_ready and not worker._waiting()


def everything_of(worker: Worker) -> NDArray[Any]:
    """Return the sum of what a worker still has."""
    residual = worker.encoder.residual.copy()
    for message in worker.kept:
        gw.apply(message, residual)
    return residual


# ---- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "model"], ids=["replica", "hosted"])
def test_what_a_worker_puts_in_is_applied_or_kept_or_in_its_residual(
    cluster: Cluster, name: str | None
) -> None:
    host = cluster.host(name=name)
    worker = cluster.worker(host, arrays(), name=name)
    total = np.zeros(NUMEL, np.float32)
    for number, gradient in zip(range(12), gradients(0), strict=False):
        assert worker.send(gradient)
        total += flat(gradient)
        if number == 7:
            reach(host, 5)
    refresh(worker, lambda: len(worker.kept) == 12 - host.version)
    assert host.version >= 5
    np.testing.assert_array_equal(everything_of(worker) - flat(host.params), total)
    reach(host, 12)
    refresh(worker, lambda: not worker.kept)
    np.testing.assert_array_equal(worker.encoder.residual - flat(host.params), total)
    assert np.abs(worker.encoder.residual).max() > 0.0


def test_a_host_that_joins_while_a_worker_greets_is_greeted_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = cluster.host(name="model")
    node = cluster.node(host.node.address)
    node.wait_for_peers(1, timeout_s=20.0)
    events, receive = node.events, node.receive
    messages: list[Any] = []

    def received(timeout_s: float = 0.0) -> list[Any]:
        messages[:] = receive(timeout_s)
        return [*messages]

    # The event comes with the answer: when the worker looked for events, the host had not joined.
    monkeypatch.setattr(node, "receive", received)
    monkeypatch.setattr(node, "events", lambda: events() if messages else [])
    worker = cluster.run(host, lambda: Worker(node, name="model", threshold=1.0, in_flight=9))
    worker.send(np.ones(NUMEL, np.float32))
    reach(host, 1)  # though the worker does nothing more
    worker.close()


def test_the_last_dense_gradient_of_a_worker_leaves_nothing_behind(cluster: Cluster) -> None:
    host = cluster.host()
    worker = cluster.worker(host)
    gradient = next(gradients(1))
    worker.send(gradient)
    worker.send(dense=True)
    reach(host, 2)
    np.testing.assert_array_equal(-flat(host.params), flat(gradient))
    assert not worker.encoder.residual.any()


def test_a_gradient_larger_than_a_message_is_applied_as_a_whole_or_not_at_all(
    cluster: Cluster,
) -> None:
    small = replace(QUICK, message_bytes_max=4_096)
    rng = np.random.default_rng(2)
    first, second = (np.float32(rng.integers(-32, 33, 20_000) / 16.0) for _ in range(2))
    node = cluster.node(limits=small)
    host = cluster.host(node=node, params=[np.zeros_like(first)], name="large")
    worker = cluster.worker(host, name="large", threshold=0.0625, limits=small)
    worker.send(first, dense=True)
    assert first.nbytes > 16 * small.message_bytes_max
    while len(host._inbox) < 3:
        host._inbox.extend(host.node.receive(0.02))
    while len(host._inbox) > 3:
        host._inbox.pop()
    host.step(0.0)
    cluster.lose_connection(worker, host)
    assert host._assembler.assemblies
    assert host.version == 0
    worker.send(second, dense=True)
    cluster.run(host, partial(refresh, worker, partial(is_settled, worker)))
    assert host.version == 2
    np.testing.assert_array_equal(-host.params[0], first + second)
    assert not host._assembler.assemblies


def test_a_gradient_that_is_too_old_is_refused_and_stays_in_the_residual(cluster: Cluster) -> None:
    host = cluster.host(max_staleness=3)
    fast, slow = cluster.worker(host), cluster.worker(host)
    source = gradients(2)
    total = np.zeros(NUMEL, np.float32)
    for version in range(4):
        gradient = next(source)
        total += flat(gradient)
        fast.send(gradient)
        reach(host, version + 1)
    gradient = next(source)  # for version 0
    total += flat(gradient)
    slow.send(gradient)
    while not host.refused:
        host.step(timeout_s=0.02)
    refresh(slow, lambda: slow.refused == 1)
    assert (host.version, slow.version, slow.kept) == (4, 4, [])
    np.testing.assert_array_equal(slow.encoder.residual, flat(gradient))
    slow.send()  # for version 4, which is known now
    reach(host, 5)
    residuals = fast.encoder.residual + slow.encoder.residual
    np.testing.assert_array_equal(residuals - flat(host.params), total)


# ---- killed processes ------------------------------------------------------------------------------------------------


def kill(host: Host) -> str:
    """End a host as a signal does, as far as others can see, and return its address."""
    host.node.close(timeout_s=0.0)
    host.close()
    return host.node.address


@pytest.mark.parametrize("name", [None, "model"], ids=["replica", "hosted"])
def test_a_restarted_host_goes_on_from_its_checkpoint_and_applies_nothing_twice(
    cluster: Cluster, name: str | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"name": name, "path": tmp_path / "checkpoint", "save_every": 4}
    host = cluster.host(SGD(1.0, 0.5), **options)
    worker = cluster.worker(host, name=name)
    source = gradients(3)
    for _ in range(6):
        worker.send(next(source))
    reach(host, 6)
    refresh(worker, lambda: len(worker.kept) == 2)  # the other four are in the checkpoint
    messages = worker.kept
    address = kill(host)
    for _ in range(2):
        worker.send(next(source))
    messages = [*messages, *worker.kept[2:]]
    host = cluster.host(SGD(1.0, 0.5), cluster.node(bind=address), **options)
    assert host.version == 4
    once = [param.copy() for param in host.params]
    velocity = SGD(1.0, 0.5)
    velocity.load_state_dict(host._optimizer.state_dict())
    cluster.run(host, lambda: refresh(worker, lambda: not worker.kept))
    for message in messages:
        velocity.apply([message], once)
    assert host.version == 8
    np.testing.assert_array_equal(flat(host.params), flat(once))
    if name:
        np.testing.assert_array_equal(flat(worker.params), flat(host.params))


def test_a_connection_that_is_replaced_loses_and_repeats_nothing(cluster: Cluster) -> None:
    host = cluster.host(max_staleness=2)
    worker, other = cluster.worker(host), cluster.worker(host)
    total = np.zeros(NUMEL, np.float32)
    source = gradients(5)
    for version in (1, 2, 3):
        gradient = next(source)
        total += flat(gradient)
        other.send(gradient)
        reach(host, version)
    for _ in range(4):  # the first is refused, and the others follow it
        gradient = next(source)
        total += flat(gradient)
        worker.send(gradient)
    while not host.refused:
        host.step(0.01)
    cluster.lose_connection(worker, host)  # which would have told the worker
    cluster.run(host, lambda: refresh(worker, lambda: worker.refused == 4))
    assert host.version == 3
    cluster.run(host, lambda: refresh(worker, lambda: is_settled(worker)))
    worker.send()
    cluster.lose_connection(worker, host)  # with the gradient
    cluster.run(host, lambda: refresh(worker, lambda: host.version == 4 and not worker.kept))
    left = worker.encoder.residual + other.encoder.residual
    np.testing.assert_array_equal(left - flat(host.params), total)


@pytest.mark.parametrize(
    ("seed", "restarts", "slice_bytes"),
    [(0, 0, WHOLE), (1, 0, WHOLE), (2, 0, 64), (3, 0, 64), (4, 1, WHOLE), (5, 1, 64)]
    + [pytest.param(seed, 4, WHOLE, marks=pytest.mark.slow) for seed in range(6, 9)]
    + [pytest.param(seed, 4, 64, marks=pytest.mark.slow) for seed in range(9, 12)],
)
def test_no_gradient_is_lost_or_repeated_whatever_fails_and_whenever(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    restarts: int,
    slice_bytes: int,
) -> None:
    for module in (coprocessor, slices):
        monkeypatch.setattr(module, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(coprocessor, "LEAST_SLICE_BYTES", min(slice_bytes, 4_096))
    chance = random.Random(seed)
    options: dict[str, Any] = {"path": tmp_path / "checkpoint", "save_every": 3, "name": "model"}
    options |= {"max_staleness": 0, "threshold": 0.25, "gradients_per_step": 1 + seed % 2}
    host = cluster.host(**options)
    workers = [cluster.worker(host, name=name) for name in (None, None, "model")]
    for worker in workers:
        worker.timeout_s = 0.0
    source = gradients(seed)
    total = np.zeros(NUMEL)
    actions = ["send"] * 12 + ["step"] * 12 + ["read"] * 8 + ["save", "lose"]

    def restart() -> None:
        nonlocal host
        address = kill(host)
        host = cluster.host(None, cluster.node(bind=address), **options)
        for worker in workers:
            cluster.run(host, lambda: refresh(worker, lambda: worker._host == host.node.peer))  # noqa: B023

    for _ in range(1 + restarts):
        for action in chance.choices(actions, k=100):
            worker = chance.choice(workers)
            if action == "send":
                gradient = next(source)
                total += flat(gradient)
                with suppress(
                    TimeoutError
                ):  # the gradient is kept while the replica is not complete
                    worker.send(gradient)
            elif action == "step":
                host.step(chance.choice([0.0, 0.005]))
            elif action == "read":
                worker.refresh()
            elif action == "save":
                host.save()
            else:
                cluster.lose_connection(worker, host)
        if restarts:
            restart()
    for _ in range(2):  # gradients that are refused come back
        for worker in workers:
            cluster.run(host, partial(refresh, worker, partial(is_settled, worker)))
    host.save()
    for worker in workers:
        cluster.run(host, partial(refresh, worker, lambda: not worker.kept))  # noqa: B023
    for message in host._batch:
        gw.apply(message, total, -1.0)
    left = sum(everything_of(worker) for worker in workers)
    scale = host.gradients_per_step
    assert host.version >= 3
    assert sum(worker.refused for worker in workers)
    np.testing.assert_array_equal(left - scale * flat(host.params), total)


@pytest.mark.parametrize("limited", ["host", "worker", "both"])
def test_a_replica_comes_and_changes_whatever_the_nodes_limits(limited: str) -> None:
    numel = 200_000  # eight times as many bytes as a node takes
    small = Limits(message_bytes_max=100_000, send_log_bytes=300_000, receive_bytes=300_000)
    secret = bytes(range(32))
    limits = {name: small if limited in (name, "both") else None for name in ("host", "worker")}
    with (
        gw.Node("127.0.0.1:0", secret=secret, limits=limits["host"]) as near,
        gw.Node("127.0.0.1:0", [near.address], secret=secret, limits=limits["worker"]) as far,
    ):
        params = np.arange(numel, dtype=np.float32)
        host = coprocessor.Host(near, [params], coprocessor.SGD(1.0), threshold=0.25)
        ends = threading.Event()

        def serve() -> None:
            while not ends.is_set():
                host.step(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            worker = coprocessor.Worker(far, threshold=0.25, in_flight=0, timeout_s=30.0)
            np.testing.assert_array_equal(worker.params[0], params)
            for dense in (True, False):
                before = worker.params[0].copy()
                assert worker.send(np.ones(numel, np.float32), dense=dense)
                for _ in range(3_000):
                    if np.array_equal(worker.params[0], before):
                        worker.refresh(0.01)
            assert np.all(params - worker.params[0] <= 2.0)
        finally:
            ends.set()
            thread.join()


WORKER = """
import sys, numpy as np, gradwire as gw
name, address = sys.argv[1:]
with gw.Node("127.0.0.1:0", [address], secret=bytes(range(32))) as node:
    with gw.coprocessor.Worker(node, name=name or None, threshold=0.5, timeout_s=60.0) as worker:
        while worker.send(np.full(22, 0.5, np.float32)):
            pass
"""

HOST = """
import sys, numpy as np, gradwire as gw
name, address, path, last = sys.argv[1:]
params = [np.zeros((3, 5), np.float32), np.zeros(7, np.float32)]
with gw.Node(address, secret=bytes(range(32))) as node:
    sgd = gw.coprocessor.SGD(1.0)
    with gw.coprocessor.Host(node, params, sgd, name=name, path=path, save_every=5) as host:
        print("ready", flush=True)
        while host.version < int(last):
            host.step()
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process, which may have ended."""
    process.kill()
    with process:
        pass


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name for a model in the machine's own shared memory, which other processes see."""
    monkeypatch.undo()
    return f"test-coprocessor-{os.getpid()}"


def test_a_killed_worker_is_replaced_and_training_goes_on(cluster: Cluster, name: str) -> None:
    host = cluster.host(name=name)
    workers = [start(WORKER, name, host.node.address), start(WORKER, "", host.node.address)]
    try:
        while len(host.node.peers) < 2:
            host.step(timeout_s=0.05)
        present = set(host.node.peers)
        reach(host, host.version + 20)
        os.kill(workers[1].pid, signal.SIGSTOP)
        reach(host, host.version + 20)
        end(workers[1])
        reach(host, host.version + 20)
        workers.append(start(WORKER, "", host.node.address))
        while not set(host.node.peers) - present:
            host.step(timeout_s=0.05)
        end(workers[0])
        reach(host, host.version + 20)
        host.finish()
        assert workers[2].wait(30.0) == 0
    finally:
        for worker in workers:
            end(worker)
    # Every gradient changes every element by one threshold.
    np.testing.assert_array_equal(flat(host.params), -0.5 * host.version)


def test_workers_wait_for_a_killed_host_which_applies_nothing_twice(
    cluster: Cluster, name: str, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = (HOST, name, address, str(tmp_path / "checkpoint"))
    hosts = [start(*arguments, "1000000")]  # it is killed long before, on however fast a machine
    counts = dict.fromkeys(("hosted", "replica"), 0)

    def work(kind: str, worker: Worker) -> None:
        while worker.send(np.full(NUMEL, 0.5, np.float32)):
            counts[kind] += 1

    try:
        assert hosts[0].stdout is not None
        assert hosts[0].stdout.readline() == "ready\n"
        options: dict[str, Any] = {"threshold": 0.5, "timeout_s": 60.0}
        workers = [
            Worker(cluster.node(address), name=name, **options),
            Worker(cluster.node(address), **options),
        ]
        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(counts, workers, strict=True)
        ]
        reader = gw.HostedModel.attach(name)
        for thread in threads:
            thread.start()
        while reader.version < 22:
            reader.snapshot()
        end(hosts[0])
        assert not reader.is_live
        assert not reader.is_finished
        last = reader.version + 380
        hosts.append(start(*arguments, str(last)))
        reader = gw.HostedModel.attach(name, timeout_s=30.0)
        assert reader.is_live
        for thread in threads:
            thread.join(60.0)
        assert hosts[1].wait(30.0) == 0
    finally:
        for host in hosts:
            end(host)
    assert reader.is_finished
    assert reader.version == last
    np.testing.assert_array_equal(flat(reader.params), -0.5 * last)
    assert last <= sum(worker.encoder.step for worker in workers) <= sum(counts.values()) + 4


# ---- readers, and the end --------------------------------------------------------------------------------------------


def test_an_evaluator_reads_one_version_while_the_host_trains(cluster: Cluster) -> None:
    host = cluster.host(name="model")
    worker = cluster.worker(host, name="model", threshold=1.0)
    reader = gw.HostedModel.attach("model")
    versions: list[int] = []

    def read() -> None:
        while not reader.is_finished:
            version, params = reader.snapshot()
            assert (flat(params) == -version).all()
            versions.append(version)

    thread = threading.Thread(target=read)
    thread.start()
    for version in range(1, 101):
        worker.send(np.ones(NUMEL, np.float32))
        reach(host, version)
    host.finish()
    thread.join(30.0)
    assert not thread.is_alive()
    assert versions == sorted(versions)


def test_the_end_of_the_training_is_told_to_workers_and_readers(cluster: Cluster) -> None:
    host = cluster.host(name="model")
    remote, local = cluster.worker(host), cluster.worker(host, name="model")
    reader = gw.HostedModel.attach("model")
    assert not reader.is_finished
    with host:
        pass
    for worker in (remote, local):
        refresh(worker, lambda: worker.is_finished)  # noqa: B023
        assert not worker.send(next(gradients(6)))
        assert not worker.encoder.residual.any()
    assert (reader.is_finished, reader.is_live) == (True, False)


def test_a_host_that_fails_does_not_end_the_training(cluster: Cluster) -> None:
    host = cluster.host(name="model")
    worker = cluster.worker(host)
    reader = gw.HostedModel.attach("model")
    with pytest.raises(ZeroDivisionError), host:
        raise ZeroDivisionError
    worker.refresh(0.1)
    assert (worker.is_finished, reader.is_finished, reader.is_live) == (False, False, False)


# ---- workers on other machines ---------------------------------------------------------------------------------------


def test_a_replica_that_joins_while_parameters_change_lacks_small_elements_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coprocessor, "_PART", 4)
    host = cluster.host(SGD(0.25), threshold=0.125)
    first = cluster.worker(host, in_flight=1_000_000)
    source = gradients(7)
    node = cluster.node(host.node.address)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(Worker, node, threshold=0.5, in_flight=100, timeout_s=20.0)
        while not future.done():  # a part goes between two steps
            first.send(next(source))
            host.step(timeout_s=0.01)
        late = future.result()
    assert late.version > 0
    for _ in range(200):
        first.send(np.zeros(NUMEL, np.float32))
        reach(host, first.encoder.step)
    for worker in (first, late):
        for _ in range(2_000):
            worker.send(np.zeros(NUMEL, np.float32))
            cluster.run(host, lambda: refresh(worker, lambda: worker.version == host.version))  # noqa: B023
            if (difference := np.abs(flat(worker.params) - flat(host.params)).max()) < 0.125:
                break
        assert difference < 0.125


def test_a_replica_gets_what_it_missed_when_there_is_space_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = cluster.host(threshold=0.0625)
    worker = cluster.worker(host, threshold=0.0625)

    def publish(*_: Any, **__: Any) -> None:
        raise gw.WouldBlock("the send log is full")

    monkeypatch.setattr(host.node, "publish", publish)
    worker.send(np.full(NUMEL, 0.0625, np.float32))
    reach(host, 1)
    worker.refresh(0.1)
    assert (worker.version, flat(worker.params).any()) == (0, False)
    monkeypatch.undo()
    cluster.run(host, lambda: refresh(worker, lambda: worker.version == 1))
    np.testing.assert_array_equal(flat(worker.params), flat(host.params))


def test_a_worker_that_stalls_stops_nobody_and_goes_on_later(cluster: Cluster) -> None:
    host = cluster.host(max_staleness=1, name="model", gradients_per_step=1)
    stalled = [cluster.worker(host), cluster.worker(host, name="model")]
    active = [cluster.worker(host, in_flight=0), cluster.worker(host, in_flight=0, name="model")]
    messages = [worker.node.stats().messages_received for worker in stalled]
    source = gradients(11)
    total = np.zeros(NUMEL, np.float32)
    for number in range(40):
        gradient = next(source)
        total += flat(gradient)
        worker = active[number % 2]
        cluster.run(host, partial(worker.send, gradient))
    assert host.version >= 30
    # Nothing waits for a worker that does not read, so that it holds no memory of the host's node.
    assert [worker.node.stats().messages_received for worker in stalled] == messages
    for worker in stalled:
        gradient = next(source)
        total += flat(gradient)
        cluster.run(host, partial(worker.send, gradient))  # for an old version
        cluster.run(host, partial(refresh, worker, lambda: worker.refused == 1))  # noqa: B023
        version = host.version
        cluster.run(host, partial(refresh, worker, lambda: worker.version == version))  # noqa: B023
        cluster.run(host, worker.send)
        cluster.run(host, partial(refresh, worker, lambda: not worker.kept))  # noqa: B023
        assert (worker.refused, host.version) == (1, version + 1)
    left = sum(worker.encoder.residual for worker in stalled + active)
    np.testing.assert_array_equal(left - flat(host.params), total)


def test_several_gradients_make_a_step_of_their_mean(cluster: Cluster) -> None:
    host = cluster.host(gradients_per_step=4)
    worker = cluster.worker(host, in_flight=0, threshold=1.0)
    cluster.run(host, lambda: [worker.send(np.full(NUMEL, 1.0, np.float32)) for _ in range(7)])
    assert host.version == 1
    np.testing.assert_array_equal(flat(host.params), -1.0)
    cluster.run(host, lambda: worker.send(np.full(NUMEL, 3.0, np.float32)))
    assert host.version == 2
    np.testing.assert_array_equal(flat(host.params), -2.0)


def test_parameters_of_float64_stay_float64(cluster: Cluster) -> None:
    params = [np.zeros(()), np.zeros((2, 3))]
    host = cluster.host(SGD(0.5, 0.5, nesterov=True), params=params, threshold=2.0**-40)
    worker = cluster.worker(host, params, threshold=2.0**-40)
    worker.send(np.full(7, 2.0**-40))
    reach(host, 1)
    cluster.run(host, lambda: refresh(worker, lambda: worker.version == 1))
    assert flat(host.params).tolist() == [-0.75 * 2.0**-40] * 7
    assert [param.dtype for param in worker.params] == [np.float64] * 2


def test_a_model_larger_than_a_machine_has_several_hosts(cluster: Cluster) -> None:
    encoder, decoder = cluster.host(name="encoder"), cluster.host(name="decoder")
    both = [cluster.worker(encoder), cluster.worker(decoder, name="decoder")]
    some = cluster.worker(decoder)
    for worker in (*both, some):
        worker.send(np.ones(NUMEL, np.float32))
    reach(encoder, 1)
    reach(decoder, 2)
    assert (encoder.params[0][0, 0], decoder.params[0][0, 0]) == (-0.5, -1.0)
    assert (both[0].encoder.numel, some.encoder.numel) == (NUMEL, NUMEL)


# ---- descents --------------------------------------------------------------------------------------------------------


def regression() -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(8)
    inputs = np.float32(rng.standard_normal((64, 20)))
    return inputs, np.float32(inputs @ rng.standard_normal((20, 3)))


def train_alone(model: Any, optimizer: Any, steps: int) -> float:
    torch = sys.modules["torch"]
    inputs, targets = map(torch.from_numpy, regression())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "sgd": lambda torch, params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "nesterov": lambda torch, params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda torch, params: torch.optim.AdamW(params, lr=0.02),
}


@pytest.mark.torch
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "numpy sgd", "numpy nesterov"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "threshold"])
def test_descent_at_the_host_is_that_of_one_machine(
    cluster: Cluster, kind: str, dense: bool
) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    inputs, targets = map(torch.from_numpy, regression())
    alone, hosted, local = (torch.nn.Linear(20, 3) for _ in range(3))
    hosted.load_state_dict(alone.state_dict())
    make = OPTIMIZERS[kind.removeprefix("numpy ")]
    optimizer: Any = make(torch, hosted.parameters())
    if kind.startswith("numpy"):
        optimizer = SGD(0.05, 0.9, nesterov=kind.endswith("nesterov"))
    host = cluster.host(optimizer, params=list(hosted.parameters()), name="model")
    worker = cluster.worker(
        host, local.parameters(), name="model", in_flight=0, threshold=gw.TargetDensity(0.2)
    )
    steps = 60 if dense else 300

    def work() -> float:
        for _ in range(steps):
            local.zero_grad()
            loss = torch.nn.functional.mse_loss(local(inputs), targets)
            loss.backward()
            worker.send([param.grad for param in local.parameters()], dense=dense)
        return float(loss.detach())

    loss = cluster.run(host, work)
    best = train_alone(alone, make(torch, alone.parameters()), steps)
    assert host.version == steps
    if dense:
        for ours, theirs in zip(hosted.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    first = float(torch.nn.functional.mse_loss(torch.zeros_like(targets), targets))
    assert loss < best + 0.02 * first


@pytest.mark.torch
def test_a_torch_optimizer_may_have_parameters_in_another_order(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer, local = (torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in "ab")
    before = layer.weight.detach().clone()
    params = list(layer.parameters())
    host = cluster.host(torch.optim.SGD(params, lr=0.5), params=params, name="model")
    worker = cluster.worker(host, local.parameters(), name="model", in_flight=0)
    gradient = np.arange(108, dtype=np.float32).reshape(4, 3, 3, 3)
    cluster.run(host, lambda: worker.send([gradient, np.zeros(4, np.float32)], dense=True))
    torch.testing.assert_close(layer.weight.detach(), before - 0.5 * torch.from_numpy(gradient))


@pytest.mark.torch
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_follows_a_schedule_of_learning_rates_as_torch_s(nesterov: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ours, theirs = np.zeros(NUMEL, np.float32), torch.zeros(NUMEL, requires_grad=True)
    sgd = SGD(0.1, 0.9, nesterov=nesterov)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
    for step, gradient in zip(range(12), gradients(12), strict=False):
        sgd.lr = reference.param_groups[0]["lr"] = 0.1 / (1 + step)
        theirs.grad = torch.from_numpy(flat(gradient))
        reference.step()
        sgd.apply([gw.dense_message(flat(gradient))], [ours])
    torch.testing.assert_close(torch.from_numpy(ours), theirs.detach(), rtol=1e-5, atol=1e-6)


# ---- workers with a mistake ------------------------------------------------------------------------------------------


def pack(kind: coprocessor._Kind, *numbers: int, body: bytes = b"") -> tuple[int, bytes]:
    return kind, coprocessor._packed(numbers, body)


def hello(run: int, number: int = 0, slice_bytes: int = 1 << 20) -> tuple[int, bytes]:
    return pack(coprocessor._Kind.HELLO, run, 0, number, True, slice_bytes)


def dense(value: float) -> bytes:
    return reference.encode_dense(np.full(NUMEL, value, np.float32))


@pytest.mark.parametrize(
    "messages",
    [
        [(coprocessor._Kind.HELLO, b"short")],
        [hello(5, 1 << 63)],
        [hello(5, slice_bytes=1), pack(coprocessor._Kind.ASK, 5)],
        [(coprocessor._Kind.SLICE, b"short")],
        [(coprocessor._Kind.SLICE, struct.pack("<QQQ", kind, 200, 0) + b"x") for kind in range(99)],
        [(coprocessor._Kind.SLICE, struct.pack("<QQQ", 3, 1 << 60, 0) + b"x")],
        [(99, b""), (coprocessor._Kind.WELCOME, b""), (coprocessor._Kind.END, b"")],
        [hello(5), pack(coprocessor._Kind.GRADIENT, 5, 0, 1, body=b"x")],
        *(
            [
                hello(5),
                pack(coprocessor._Kind.GRADIENT, 5, 0, 1, body=dense(value)),
            ]
            for value in (np.nan, np.inf)
        ),
        [hello(run) for run in range(1, 2_000)],
    ],
    ids=[
        "a short introduction",
        "a large number",
        "small slices",
        "a short slice",
        "slices of 99 kinds",
        "a slice of too much",
        "kinds that only a host sends",
        "bytes that are no message",
        "NaN",
        "infinity",
        "many runs",
    ],
)
def test_a_worker_with_a_mistake_ends_nothing(
    cluster: Cluster, tmp_path: Path, messages: list[tuple[int, bytes]]
) -> None:
    host = cluster.host(path=tmp_path / "checkpoint", save_every=1)
    worker = cluster.worker(host, in_flight=0)
    wrong = cluster.node(host.node.address)
    wrong.wait_for_peers(2, timeout_s=20.0)  # of which the other worker is one
    for kind, payload in messages:
        wrong.publish(payload, tag=kind)
    assert wrong.drain(20.0)
    cluster.run(host, lambda: worker.send(np.ones(NUMEL, np.float32)))
    reach(host, 1)
    np.testing.assert_array_equal(flat(host.params), -0.5)
    assert len(host._runs) <= 2 + coprocessor._RUNS_MAX
    assert len(host._assembler.assemblies) <= 1
    assert not worker.is_finished
    address = kill(host)
    node = cluster.node(bind=address)
    assert cluster.host(node=node, path=tmp_path / "checkpoint").version == 1


@pytest.mark.parametrize("kind", [coprocessor._Kind[name] for name in ("WELCOME", "STATUS", "END")])
@pytest.mark.parametrize(
    "payload",
    [b"", *(pack(0, 5, body=body)[1] for body in (b"", b"[]", b'{"format":1,"layout":[]}'))],
)
def test_a_worker_that_does_not_know_its_host_yet_takes_no_other_worker_for_it(
    cluster: Cluster, kind: int, payload: bytes
) -> None:
    host = cluster.host()
    node, wrong = cluster.node(host.node.address), cluster.node(host.node.address)
    wrong.wait_for_peers(2, timeout_s=20.0)
    wrong.publish(payload, tag=kind)
    assert wrong.drain(20.0)
    worker = cluster.run(host, lambda: Worker(node, arrays(), threshold=0.5, timeout_s=20.0))
    assert not worker.is_finished
    worker.send(np.ones(NUMEL, np.float32))
    reach(host, 1)


def test_a_worker_that_comes_to_the_end_is_told_so(cluster: Cluster) -> None:
    host = cluster.host()
    node = cluster.node(host.node.address)
    node.wait_for_peers(1, timeout_s=20.0)
    host.node.wait_for_peers(1, timeout_s=20.0)
    host.finish()
    with pytest.raises(gw.GradwireError, match="ended before this worker could take part"):
        Worker(node, timeout_s=20.0)


# ---- unsuitable arguments --------------------------------------------------------------------------------------------


def test_a_node_that_takes_only_tiny_messages_is_refused(cluster: Cluster) -> None:
    tiny = cluster.node(limits=replace(QUICK, message_bytes_max=1_000))
    with pytest.raises(ValueError, match=r"1000, a host or worker needs at least 4096"):
        cluster.host(node=tiny)
    with pytest.raises(ValueError, match=r"1000, a host or worker needs at least 4096"):
        cluster.worker(cluster.host(), limits=tiny.limits)


def test_other_arrays_than_the_host_s_are_refused(cluster: Cluster) -> None:
    host = cluster.host(name="model")
    other = [np.zeros((5, 3), np.float32), np.zeros(7, np.float32)]
    with pytest.raises(gw.Mismatch, match=r"the host at .*\[3, 5\].*this worker.*\[5, 3\]"):
        cluster.worker(host, other)
    with pytest.raises(gw.Mismatch, match="this worker"):
        cluster.worker(host, other[:1])
    with pytest.raises(gw.Mismatch, match="has the model 'model', this worker 'other'"):
        cluster.worker(host, name="other")
    host.close()  # as on another machine, while this one has another training
    with gw.HostedModel("model", other), pytest.raises(gw.Mismatch, match="the model 'model' has"):
        cluster.worker(host, name="model")


def test_a_gradient_of_arrays_in_another_order_is_refused(cluster: Cluster) -> None:
    host = cluster.host()
    worker = cluster.worker(host)
    for gradient in (arrays()[::-1], [arrays()[0].T, arrays()[1]], arrays()[0].reshape(5, 3)):
        with pytest.raises(ValueError, match=r"array 0 of the update has shape \("):
            worker.send(gradient)
    assert not worker.kept
    assert not worker.encoder.residual.any()


def test_a_worker_may_follow_another_one_on_its_node(cluster: Cluster) -> None:
    host = cluster.host()
    worker = cluster.worker(host, in_flight=0)
    cluster.run(host, lambda: worker.send(np.ones(NUMEL, np.float32)))
    following = cluster.run(host, lambda: Worker(worker.node, threshold=0.5, timeout_s=20.0))
    cluster.run(host, lambda: following.send(np.ones(NUMEL, np.float32)))
    reach(host, 2)
    np.testing.assert_array_equal(flat(host.params), -1.0)


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        ([], TypeError, r"got \[\]"),
        ([np.zeros(3, np.float16)], TypeError, "float16"),
        ([np.zeros(3, np.float32), np.zeros(3)], TypeError, "float32.*float64"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(
    cluster: Cluster, params: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Host(cluster.node(), params, SGD(1.0))


def test_options_out_of_range_are_refused(cluster: Cluster) -> None:
    node = cluster.node()
    with pytest.raises(TypeError, match=r"optimizer must be .* got 0\.1"):
        Host(node, arrays(), 0.1)
    with pytest.raises(TypeError, match="optimizer must be"):
        Host(node, arrays(), SGD)
    for options in ({"save_every": 0}, {"gradients_per_step": 0}, {"max_staleness": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            Host(node, arrays(), SGD(1.0), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr must be finite and above 0"):
        SGD(0.0)
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        SGD(0.1, 1.0)
    with pytest.raises(ValueError, match="with nesterov above 0"):
        SGD(0.1, nesterov=True)
    node.close()
    with pytest.raises(gw.Closed):
        Worker(node)


@pytest.mark.torch
def test_an_optimizer_of_other_tensors_is_refused(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 of the optimizer's 2 tensors are not among the 2"):
        cluster.host(torch.optim.SGD(other.parameters(), lr=0.1), params=list(model.parameters()))
    with pytest.raises(ValueError, match="2 of the optimizer's 2 tensors are not among"):
        cluster.host(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_worker_without_a_host_says_how_long_it_waited(cluster: Cluster) -> None:
    with pytest.raises(TimeoutError, match=r"no answer of the host within 0\.1 s"):
        Worker(cluster.node(), timeout_s=0.1)


def test_messages_that_are_no_gradients_do_not_end_the_host_or_fill_its_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    host = cluster.host()
    worker = cluster.worker(host)
    header = worker._run.to_bytes(8, "little") + bytes(32)
    for body in (header + bytes(gw.dense_message(np.ones(3, np.float32))), header, b""):
        worker.node.publish(body, tag=3, to=host.node.peer)
    worker.node.drain(5.0)
    host.step(timeout_s=0.1)
    assert host.version == 0
    assert len(caplog.records) == 1
    assert "3 elements for parameters of 22" in caplog.text
    cluster.worker(host).send(np.ones(NUMEL, np.float32))
    reach(host, 1)
