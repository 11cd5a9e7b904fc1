"""The end of a training, and calls that are interrupted: no message is lost, and all nodes end with the same bits."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import clock
from gradwire.exchange.protocol import TAG_NUMBERS, Kind
from gradwire.exchange.replica import Replica
from gradwire.transport import PeerLost

from .cluster import FakeNode, run_cluster

NUMEL = 24
STEPS = 3


def updates_of(rank: int) -> list[NDArray[np.float32]]:
    """Return multiples of 2^-12, so that every sum of them is exact in float32."""
    rng = np.random.default_rng([5, rank])
    return [(rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32) for _ in range(STEPS)]


def exchange(node: FakeNode, others: int, **options: Any) -> gw.Exchange:
    enc = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-6))
    return gw.Exchange(enc, node, min_peers=others, reduction="sum", **options)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_nodes_that_leave_together_end_with_the_same_bits(topology: Any) -> None:
    """One hears that another one has left from a third, which has only heard so itself.

    The last update of the one that has left is still on its way, and nobody stays to relay it.
    """

    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = exchange(node, 4, topology=topology)
        params = np.zeros(NUMEL, np.float32)
        for update in updates_of(rank):
            share.step(update, params)
        node.cluster.compute(node, 0.02 * node.cluster.random.random())
        share.leave(params)
        node.cluster.close(node)
        return params

    expected = sum(sum(updates_of(rank)) for rank in range(5))
    # It happens in one of fifty.
    for seed in range(150):
        for params in run_cluster(work, count=5, seed=seed):
            np.testing.assert_array_equal(params, expected)


def test_nodes_that_leave_together_end_with_the_same_bits_after_an_earlier_death() -> None:
    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = exchange(node, 5, topology="mesh")
        params = np.zeros(NUMEL, np.float32)
        if rank == 5:
            share.step(np.zeros(NUMEL, np.float32), params)
            node.cluster.kill(node)
            return params
        for update in (*updates_of(rank), *3 * [np.zeros(NUMEL, np.float32)]):
            share.step(update, params)
        share.leave(params)
        node.cluster.close(node)
        return params

    expected = sum(sum(updates_of(rank)) for rank in range(5))
    for seed in range(100):
        for params in run_cluster(work, count=6, seed=seed)[:5]:
            np.testing.assert_array_equal(params, expected)


@pytest.mark.parametrize("keeps", [True, False], ids=["residual", "difference"])
def test_an_owner_that_dies_takes_nothing_of_a_node_that_leaves(keeps: bool) -> None:
    rest = np.full(NUMEL, 2.0**-8, np.float32)  # too small to be sent before the end
    nothing = np.zeros(NUMEL, np.float32)

    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        enc = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-6), keeps_residual=keeps)
        share = gw.Exchange(
            enc, node, min_peers=3, reduction="sum", topology="sharded", apply_residual=True
        )
        params = np.zeros(NUMEL, np.float32)
        share.step(rest if rank == 3 else nothing, params)
        if rank == 0:
            # It owns all elements, and dies when all others have begun the step and wait for its result.
            node.cluster.compute(node, 1.0)
            node.cluster.kill(node)
        while rank in (1, 2) and share.next_step < 6:
            share.step(nothing, params)
        share.leave(params)  # the last owners send what they have not yet passed on
        node.cluster.close(node)
        return share.shared(params)[0]

    for shared in run_cluster(work, count=4, seed=3)[1:3]:
        np.testing.assert_array_equal(shared, rest)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_a_node_that_leaves_says_where_its_last_update_has_reached_nobody(topology: Any) -> None:
    def work(node: FakeNode, rank: int) -> None:
        share = exchange(node, 1, topology=topology)
        params = np.zeros(NUMEL, np.float32)
        for update in updates_of(rank):
            share.step(update, params)
        if rank == 1:  # stands still, as behind a network that is down
            node.cluster.compute(node, 1.0)
            node.cluster.kill(node)
            return
        with pytest.raises(
            gw.errors.PeerLost, match="lost before this node's last update had arrived"
        ):
            share.leave(params)

    run_cluster(work, count=2, seed=0)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_an_interrupted_call_keeps_the_messages_that_it_has_taken(topology: Any) -> None:
    """A node that goes is an event, after which the call looks for messages once more, and is interrupted."""
    interrupted: list[int] = []

    def interrupt(node: FakeNode, seed: int) -> None:
        """Interrupt a call that has taken messages and a loss."""
        receive, events = node.receive, node.events
        taken: list[list[Any]] = [[], []]

        def look(timeout_s: float = 0.0) -> Any:
            if all(taken) and seed not in interrupted:
                interrupted.append(seed)
                raise KeyboardInterrupt
            taken[0] = receive(timeout_s)
            return taken[0]

        def note() -> Any:
            taken[1] = [event for event in events() if isinstance(event, PeerLost)]
            return taken[1]

        node.receive, node.events = look, note  # type: ignore[method-assign]

    def work(node: FakeNode, rank: int, seed: int) -> NDArray[np.float32]:
        share = exchange(node, 2, topology=topology)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        if rank == 0:
            interrupt(node, seed)
        while share.next_step < (3 if rank == 2 else 8):
            params += 2.0**-8
            with suppress(KeyboardInterrupt):  # the next call finishes the step
                share.step_moved(params)
        for _ in range(2):  # the second call does nothing, or finishes what the first has begun
            with suppress(KeyboardInterrupt):
                share.leave(params)
        node.cluster.close(node)
        return params

    for seed in range(40):
        first, second, _ = run_cluster(lambda node, rank, s=seed: work(node, rank, s), seed=seed)
        np.testing.assert_array_equal(first, second)
    assert len(interrupted) > 10


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_an_interrupted_report_is_finished_by_the_next_call(topology: Any) -> None:
    """The others' reports may be there already, so that nothing else reminds the node of it."""
    interrupted: list[int] = []

    def work(node: FakeNode, rank: int, seed: int) -> NDArray[np.float32]:
        publish = node.publish

        def interrupt(buffer: Any, tag: int = 0, to: Any = None) -> Any:
            ticket = publish(buffer, tag, to)
            if tag // TAG_NUMBERS == Kind.REPORT and rank == 0 and seed not in interrupted:
                interrupted.append(seed)
                raise KeyboardInterrupt
            return ticket

        node.publish = interrupt  # type: ignore[method-assign]
        share = exchange(node, 2, topology=topology)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        while share.next_step < 8:
            if rank == 2 and share.next_step == 3:
                node.cluster.kill(node)
            params += 2.0**-8
            with suppress(KeyboardInterrupt):  # the next call finishes the step
                share.step_moved(params)
        share.leave(params)
        node.cluster.close(node)
        return params

    for seed in range(20):
        first, second, _ = run_cluster(lambda node, rank, s=seed: work(node, rank, s), seed=seed)
        np.testing.assert_array_equal(first, second)
    assert len(interrupted) == 20


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt`, as in a terminal: a test in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("name", ["encode", "hold", "apply", "finish_step"])
def test_ctrl_c_comes_when_nothing_is_half_done(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else the next call waits for ever for updates that are applied, applies them twice, or lacks its own."""
    method = getattr(Replica, name)
    at: list[int] = []

    def interrupted(self: Replica, *arguments: Any, **options: Any) -> Any:
        step = self.step
        result = method(self, *arguments, **options)
        if step == 3 and not at and threading.current_thread() is threading.main_thread():
            at.append(step)
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Replica, name, interrupted)
    secret = secrets.token_bytes(32)
    total = np.zeros(NUMEL, np.float64)
    shared: dict[int, NDArray[np.float32]] = {}
    interruptions: list[int] = []

    def train(node: gw.Node, rank: int) -> None:
        encoder = gw.Encoder(NUMEL, threshold=2.0**-9)
        share = gw.Exchange(encoder, node, min_peers=1, timeout_s=5.0)
        params = np.zeros(NUMEL, np.float32)
        update = np.full(NUMEL, (rank + 1) * 2.0**-8, np.float32)
        while share.next_step < 8:
            try:
                share.step(update, params)
            except KeyboardInterrupt:
                interruptions.append(rank)
        shared[rank] = params
        total.__iadd__(encoder.residual)

    with (
        gw.Node("127.0.0.1:0", secret=secret) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=secret) as second,
    ):
        other = threading.Thread(target=train, args=(second, 1))
        other.start()
        train(first, 0)
        other.join()
    assert interruptions == [0]
    np.testing.assert_array_equal(shared[0], shared[1])
    # What was put in is in the mean, or still in a residual: once.
    np.testing.assert_array_equal(total + 2 * shared[0], np.full(NUMEL, 8 * 3 * 2.0**-8))


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_the_wait_for_the_first_worker_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sleep(_: float) -> None:
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(clock, "sleep", time.sleep)

    monkeypatch.setattr(clock, "sleep", sleep)
    name = f"test-{secrets.token_hex(4)}"
    with gw.LocalTeam(name, size=2, rank=1, timeout_s=5.0) as team:
        share = team.follow()
        with pytest.raises(KeyboardInterrupt) as raised:
            share.join(np.zeros(NUMEL, np.float32))
    assert not isinstance(raised.value.__context__, TimeoutError)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_workers_add_up_their_updates_loses_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others' shares of the sum are there once: another try of the call would lack them."""
    reduce = gw.LocalTeam._reduce
    is_waited_for, may_add, has_added = threading.Event(), threading.Event(), threading.Event()
    sleeps: list[float] = []  # of the leader, while the other worker is waited for

    def sleep(seconds: float) -> None:
        if is_waited_for.is_set() and threading.current_thread() is threading.main_thread():
            sleeps.append(seconds)
            if len(sleeps) == 1:
                signal.raise_signal(signal.SIGINT)
            else:
                may_add.set()
        time.sleep(seconds)

    def reduce_late(self: gw.LocalTeam, rank: int) -> None:
        if rank == 1 and self.started_call == 3:
            is_waited_for.set()
            assert may_add.wait(10.0)
        reduce(self, rank)
        if may_add.is_set():
            has_added.set()

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(gw.LocalTeam, "_reduce", reduce_late)
    name = f"test-{secrets.token_hex(4)}"
    ends: dict[int, NDArray[np.float32]] = {}

    def train(rank: int, node: Any = None) -> None:
        with gw.LocalTeam(name, size=2, rank=rank) as team:
            if node is None:
                share = team.follow()
            else:
                encoder = gw.Encoder(NUMEL, threshold=1.0)
                share = team.lead(gw.Exchange(encoder, node, min_peers=0))
            params = ends[rank] = np.zeros(NUMEL, np.float32)
            share.join(params)
            for _ in range(4):
                try:
                    share.step(np.full(NUMEL, 2.0 * rank, np.float32), params)
                except (KeyboardInterrupt, gw.GradwireError):
                    may_add.set()
                    assert has_added.wait(10.0)

    with gw.Node("127.0.0.1:0", secret=secrets.token_bytes(32)) as node:
        other = threading.Thread(target=train, args=(1,))
        other.start()
        train(0, node)
        other.join()
    assert len(sleeps) > 1
    for params in ends.values():
        np.testing.assert_array_equal(params, np.full(NUMEL, 4.0, np.float32))
