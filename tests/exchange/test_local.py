"""Several workers on one machine: one sum, one message, the same parameters for all."""

from __future__ import annotations

import multiprocessing
import os
import resource
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import shared_memory
from gradwire.exchange import LocalExchange, LocalTeam, local
from gradwire.exchange.owner import add_owner_state
from gradwire.exchange.snapshot import as_state

from ..seeds import seeds
from .cluster import FakeNode, run_cluster

SECRET = bytes(range(32))
SHAPES = [(7, 3), (5,)]
NUMEL = 26
THRESHOLD = 2.0**-6


def tensors(seed: int | None = None) -> list[NDArray[np.float32]]:
    """Return zeros, or multiples of 2^-12, whose sums are exact."""
    if seed is None:
        return [np.zeros(shape, np.float32) for shape in SHAPES]
    rng = np.random.default_rng([61, seed])
    return [(rng.integers(-99, 99, shape) / 2.0**12).astype(np.float32) for shape in SHAPES]


def flat(arrays: list[Any]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(one, np.float64).ravel() for one in arrays])


@contextmanager
def team(workers: int, exchange: gw.Exchange, **options: Any) -> Iterator[list[LocalExchange]]:
    """Return the exchanges of all workers of a team, for threads."""
    name = f"test-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        teams = [
            stack.enter_context(LocalTeam(name, tensors(), size=workers, rank=rank, **options))
            for rank in range(workers)
        ]
        yield [teams[0].lead(exchange), *(one.follow() for one in teams[1:])]


def run_team(
    work: Callable[[int, LocalExchange], Any], workers: int, **options: Any
) -> tuple[list[Any], gw.Encoder]:
    """Let threads do ``work(rank, share)`` on one machine without peers."""
    keeps = options.pop("keeps_residual", True)
    enc = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD), keeps_residual=keeps)
    team_options = {name: options.pop(name) for name in ("reduction",) if name in options}
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as node,
        team(workers, gw.Exchange(enc, node, min_peers=0, **options), **team_options) as shares,
        ThreadPoolExecutor(workers) as pool,
    ):
        return list(pool.map(work, range(workers), shares)), enc


def state_of_leader(share: LocalExchange) -> Any:
    return None if share.exchange is None else share.exchange.state_dict()


RESIDUALS: dict[str, dict[str, Any]] = {
    "kept": {},
    "applied": {"apply_residual": True},
    "difference": {"apply_residual": True, "keeps_residual": False},
}
residuals = pytest.mark.parametrize("options", RESIDUALS.values(), ids=RESIDUALS.keys())


@residuals
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_of_a_machine_lose_nothing_and_hold_the_same(workers: int, options: Any) -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        results = [share.step(tensors(100 * rank + step), params) for step in range(5)]
        return params, share.shared(params), results, state_of_leader(share)

    outcomes, enc = run_team(work, workers, reduction="sum", **options)
    put_in = sum(flat(tensors(100 * rank + step)) for rank in range(workers) for step in range(5))
    assert enc.has_residual == options.get("keeps_residual", True)
    residual = outcomes[0][3]["encoders"][0]["residual"]
    assert residual.any()
    for params, shared, results, _ in outcomes:
        np.testing.assert_array_equal(flat(shared) + residual, put_in)
        np.testing.assert_array_equal(flat(params), put_in if options else flat(shared))
        assert [result.step for result in results] == list(range(5))
        assert results == outcomes[0][2]


@residuals
def test_moved_parameters_of_workers_are_their_updates(options: Any) -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        share.join(params)
        for step in range(4):
            for one, update in zip(params, tensors(100 * rank + step), strict=True):
                one += update
            share.step_moved(params)
        return share.shared(params), state_of_leader(share)

    outcomes, _ = run_team(work, 2, reduction="sum", **options)
    put_in = sum(flat(tensors(100 * rank + step)) for rank in range(2) for step in range(4))
    residual = outcomes[0][1]["encoders"][0]["residual"]
    for shared, _ in outcomes:
        np.testing.assert_array_equal(flat(shared) + residual, put_in)


@residuals
def test_a_sum_is_whole_though_a_worker_dies_in_the_middle_of_its_share(
    options: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum takes the place of the leader's update, so a share cannot be added again where it was begun."""
    add_up = local._add_up
    enc = gw.Encoder(
        NUMEL, gw.FixedThreshold(THRESHOLD), keeps_residual=options.get("keeps_residual", True)
    )

    def add_and_die(total: Any, updates: Any, factor: Any) -> None:
        if threading.current_thread() is not dying:
            return add_up(total, updates, factor)
        add_up(total[: total.size // 2], [one[: total.size // 2] for one in updates], factor)
        made[1].close(has_failed=True)
        raise SystemExit

    def follow() -> None:
        params = tensors()
        with pytest.raises(SystemExit):
            shares[1].step(tensors(1), params)

    exchange_options = {key: value for key, value in options.items() if key != "keeps_residual"}
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        made = [LocalTeam(name, tensors(), size=2, rank=rank) for rank in range(2)]
        exchange = gw.Exchange(enc, node, min_peers=0, codec="dense", **exchange_options)
        shares = [made[0].lead(exchange), made[1].follow()]
        dying = threading.Thread(target=follow)
        monkeypatch.setattr(local, "_add_up", add_and_die)
        dying.start()
        params = tensors()
        shares[0].step(tensors(0), params)
        dying.join()
        np.testing.assert_array_equal(flat(params), (flat(tensors(0)) + flat(tensors(1))) / 2)
        made[0].close()


def test_the_machine_s_update_is_the_mean_of_the_workers() -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        share.step([np.full(shape, 4.0 * rank, np.float32) for shape in SHAPES], params)
        return params

    outcomes, _ = run_team(work, 2, codec="dense")
    assert all((flat(params) == 2.0).all() for params in outcomes)


@residuals
def test_what_the_leader_s_step_raises_all_workers_raise(options: Any) -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        bad = tensors(rank)
        if rank == 1:
            bad[0][0, 0] = np.nan
        with pytest.raises(gw.NonFiniteUpdate, match="local rank 1: 1 elements"):
            share.step(bad, params)
        good = share.step(tensors(5), params)
        return share.shared(params), good.step, state_of_leader(share)

    outcomes, _ = run_team(work, 2, reduction="sum", **options)
    assert [step for _, step, _ in outcomes] == [0, 0]
    put_in = flat(tensors(0)) + flat(tensors(1)) + 2 * flat(tensors(5))
    put_in[0] = 2 * flat(tensors(5))[0]
    residual = outcomes[0][2]["encoders"][0]["residual"]
    np.testing.assert_array_equal(flat(outcomes[0][0]) + residual, put_in)


@residuals
@pytest.mark.parametrize("other", [0, 1])
def test_different_calls_of_workers_are_refused_and_nothing_is_half_applied(
    other: int, options: Any
) -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        share.join(params)
        share.step(tensors(rank), params)
        before = flat(params)
        said = f"local rank {other} called catch_up"
        with pytest.raises(RuntimeError, match=said) as caught:
            share.catch_up(params) if rank == other else share.step(tensors(2), params)
        assert f"local rank {1 - other} called step" in str(caught.value)
        np.testing.assert_array_equal(flat(params), before)
        share.catch_up(params)
        assert share.step(tensors(3 + rank), params).step == 1
        return share.shared(params), share.step_number, state_of_leader(share)

    outcomes, _ = run_team(work, 2, reduction="sum", **options)
    assert [step_number for _, step_number, _ in outcomes] == [2, 2]
    residual = outcomes[0][2]["encoders"][0]["residual"]
    put_in = sum(flat(tensors(seed)) for seed in (0, 1, 3, 4))
    np.testing.assert_array_equal(flat(outcomes[0][0]) + residual, put_in)


def test_a_worker_may_leave_while_the_others_step() -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        share.step(tensors(rank), params)
        if rank:
            share.leave(params)
            share.team.close()
            return None
        share.step(tensors(2), params)
        assert share.step(tensors(3), params).step == 2
        return flat(params)

    outcomes, _ = run_team(work, 2, reduction="sum", codec="dense")
    np.testing.assert_array_equal(outcomes[0], sum(flat(tensors(seed)) for seed in range(4)))


class _NeedsArguments(Exception):
    def __init__(self, path: str, code: int) -> None:
        super().__init__(f"{path}: {code}")


def _with_a_lock() -> Exception:
    error = RuntimeError("/x: 28")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("make", [lambda: _NeedsArguments("/x", 28), _with_a_lock])
def test_an_error_that_cannot_be_copied_is_told_by_its_text(make: Callable[[], Exception]) -> None:
    def fail(*_: Any) -> None:
        raise make()

    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        if share.exchange is not None:
            share.exchange.listeners.append(fail)
        with pytest.raises(gw.GradwireError, match=r"(_NeedsArguments|RuntimeError): /x: 28"):
            share.step(tensors(rank), params)
        if share.exchange is not None:
            share.exchange.listeners.clear()
        share.step(tensors(10 + rank), params)
        return flat(params)

    outcomes, _ = run_team(work, 2, reduction="sum", codec="dense")
    expected = sum(flat(tensors(seed)) for seed in (0, 1, 10, 11))
    for params in outcomes:
        np.testing.assert_array_equal(params, expected)


def test_every_worker_knows_what_the_machine_has_sent() -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        with pytest.raises(RuntimeError, match="call join or step first"):
            _ = share.stats
        results = [share.step(tensors(100 * rank + step), params) for step in range(3)]
        return share.stats, results

    outcomes, _ = run_team(work, 2)
    (lead, results), (other, _) = outcomes
    assert lead.sent_bytes == sum(one.sent_bytes for one in results) > 0
    assert other == lead


def test_a_worker_without_rank_0_says_that_it_may_have_failed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "_WARN_S", 0.02)
    with (
        LocalTeam(name, size=2, rank=1, timeout_s=0.1) as other,
        pytest.raises(TimeoutError, match="did not come"),
    ):
        other.attach(tensors())
    assert "has failed (see its output), and is waited for up to 0.1 s" in caplog.text


def test_a_worker_that_does_not_come_is_missed_by_the_others() -> None:
    with (
        LocalTeam("alone", tensors(), size=2, rank=0, timeout_s=0.05) as alone,
        gw.Node("127.0.0.1:0", secret=SECRET) as node,
    ):
        lead = alone.lead(gw.Exchange(gw.Encoder(NUMEL, 1.0), node, min_peers=0))
        with pytest.raises(TimeoutError, match=r"not all 2 workers.*: rank 1 has not come, or"):
            lead.step(tensors(1), tensors())


@residuals
@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_machines_send_one_update_each_whatever_their_workers(topology: Any, options: Any) -> None:
    keeps = options.get("keeps_residual", True)
    exchange_options: Any = {
        "reduction": "sum",
        "min_peers": 1,
        "topology": topology,
        "apply_residual": bool(options),
    }

    def machine(node: gw.Node, workers: int) -> Any:
        enc = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD), keeps_residual=keeps)
        exchange = gw.Exchange(enc, node, **exchange_options)
        with (
            team(workers, exchange, reduction="sum") as shares,
            ThreadPoolExecutor(workers) as pool,
        ):

            def work(rank: int) -> Any:
                params = tensors()
                for step in range(6):
                    shares[rank].step(tensors(1000 * workers + 100 * rank + step), params)
                return shares[rank].shared(params)

            found = list(pool.map(work, range(workers)))
            state = exchange.state_dict()
            kept = state["encoders"][0]["residual"].astype(np.float64)
            add_owner_state(state.get("owner"), [kept], 1.0)
        return found, kept, node.stats().messages_sent

    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=SECRET) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        both = list(pool.map(machine, (one, two), (1, 3)))
    put_in = sum(
        flat(tensors(1000 * workers + 100 * rank + step))
        for workers in (1, 3)
        for rank in range(workers)
        for step in range(6)
    )
    kept = sum(residual for _, residual, _ in both)
    for found, _, _ in both:
        for params in found:
            np.testing.assert_array_equal(flat(params) + kept, put_in)
    sent = [count for _, _, count in both]
    updates = 6 if topology == "mesh" else 12  # a part for the other owner, and the result
    assert max(sent) <= updates + 6, "the updates and a few greetings"


def follow_in_a_process(name: str, pipe: Any) -> None:
    params = tensors()
    with LocalTeam(name, params, size=2, rank=1, reduction="sum") as other:
        share = other.follow()
        for step in range(3):
            share.step(tensors(100 + step), params)
    pipe.send(flat(params).tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_can_be_processes(method: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A spawned child imports this file by its name, from the folder that holds the tests.
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    context: Any = multiprocessing.get_context(method)
    enc, params = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD)), tensors()
    with LocalTeam(name, tensors(), size=2, rank=0, reduction="sum") as leader:
        here, there = context.Pipe()
        process = context.Process(target=follow_in_a_process, args=(name, there))
        process.start()
        with gw.Node("127.0.0.1:0", secret=SECRET) as node:
            lead = leader.lead(gw.Exchange(enc, node, reduction="sum", min_peers=0))
            for step in range(3):
                lead.step(tensors(step), params)
        assert here.recv() == flat(params).tolist()
        process.join(60)
    assert process.exitcode == 0
    put_in = sum(flat(tensors(100 * rank + step)) for rank in range(2) for step in range(3))
    np.testing.assert_array_equal(flat(params) + enc.residual, put_in)


@pytest.mark.parametrize(
    ("size", "rank", "problem"),
    [
        (0, 0, "size must be 1 to 65536, got 0"),
        (2, 2, "rank must be 0 to 1, got 2"),
        (2, -1, "rank must be 0 to 1, got -1"),
    ],
)
def test_a_team_needs_workers_and_only_those(size: int, rank: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LocalTeam("team", tensors(), size=size, rank=rank)


def test_too_little_shared_memory_for_a_state_is_an_error_that_says_so() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LocalTeam(f"test-{secrets.token_hex(4)}", tensors(), size=1, rank=0) as alone:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(OSError, match=r"the optimiser's state.* not fit .* bytes .*: File"):
                alone.publish_state([np.zeros(1000, np.float32)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_call_without_parameters_needs_the_team_s(name: str) -> None:
    with LocalTeam(name, size=1, rank=0) as alone, gw.Node("127.0.0.1:0", secret=SECRET) as node:
        share = alone.lead(gw.Exchange(gw.Encoder(NUMEL, 1.0), node, min_peers=0))
        with pytest.raises(RuntimeError, match="call join or step first"):
            share.wait_for_peers()
        share.join(tensors())
        assert share.wait_for_peers() == ()


@pytest.mark.parametrize(
    "options",
    [
        *RESIDUALS.values(),
        {"every": 2},
        {"overlap": 1},
        {"every": 2, "apply_residual": True, "keeps_residual": False},
    ],
    ids=str,
)
def test_a_worker_asks_what_it_would_ask_of_an_exchange(options: Any) -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params = tensors()
        assert share.wait_for_peers() == share.members == ()
        share.join(params)
        for step in range(4):
            for param, update in zip(params, tensors(100 * rank + step), strict=True):
                param += update
            share.step_moved(params)
        if "overlap" in options:
            assert share.catch_up(params) == 0
        shown = [share.shared(params) for _ in range(3)]
        residual = None if share.exchange is None else share.exchange.state_dict()["encoders"][0]
        share.leave(params)
        return flat(params), [flat(one) for one in shown], residual, share.next_step

    outcomes, _ = run_team(work, 3, reduction="sum", **options)
    put_in = sum(flat(tensors(100 * rank + step)) for rank in range(3) for step in range(4))
    residual = outcomes[0][2]["residual"]
    for params, shown, _, next_step in outcomes:
        assert np.array_equal(params, put_in)  # the last message had everything
        assert all(np.array_equal(one + residual, put_in) for one in shown)
        assert next_step == outcomes[0][3]


@pytest.mark.parametrize("options", [{}, {"overlap": 2}, {"apply_residual": True}], ids=str)
@pytest.mark.parametrize("moves", [False, True])
def test_local_steps_are_compared_by_what_they_add_up_to(moves: bool, options: Any) -> None:
    workers, every = 3, 3

    def work(rank: int, share: LocalExchange) -> list[float]:
        share.agreement.start(0.9)
        params = tensors()
        share.join(params)
        for step in range(every + options.get("overlap", 0)):
            update = tensors(100 * rank + step)
            if moves:
                for param, part in zip(params, update, strict=True):
                    param += part
                share.step_moved(params)
            else:
                share.step(update, params)
        return share.agreement.state()

    states, _ = run_team(work, workers, every=every, **options)
    sums = [
        sum(flat(tensors(100 * rank + step)) for step in range(every)) for rank in range(workers)
    ]
    squares = np.mean([np.square(one).sum() for one in sums])
    mean_squares = np.square(np.mean(sums, axis=0)).sum()
    for state in states:
        assert state == pytest.approx([squares, mean_squares, workers], rel=0.02)


def state_of(rank: int) -> list[NDArray[Any]]:
    return [np.full((2, 3), 10.0 + rank, np.float32), np.array(rank, np.float64)]


def test_workers_that_begin_together_keep_their_optimisers_states() -> None:
    def work(rank: int, share: LocalExchange) -> Any:
        params, state = tensors(), state_of(rank)
        share.join(params, state)
        share.step(tensors(rank), params, state)
        return state

    for rank, state in enumerate(run_team(work, 2)[0]):
        assert all(map(np.array_equal, state, state_of(rank)))


def test_the_workers_of_a_late_machine_begin_with_the_state_of_another() -> None:
    has_begun, is_done = threading.Event(), threading.Event()

    def exchange(node: gw.Node, min_peers: int) -> gw.Exchange:
        enc = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD))
        return gw.Exchange(enc, node, min_peers=min_peers, timeout_s=20.0)

    def train_early(node: gw.Node) -> None:
        share, params = exchange(node, 0), tensors()
        while not is_done.is_set():
            share.step(tensors(1), params, state_of(7))
            has_begun.set()

    def come_late(node: gw.Node) -> list[Any]:
        with team(2, exchange(node, 1)) as shares, ThreadPoolExecutor(2) as workers:

            def work(rank: int) -> Any:
                params, state = tensors(), state_of(rank)
                joined = shares[rank].join(params, state)
                shares[rank].step(tensors(rank), params, state)
                shares[rank].leave(params, state)
                return joined, state

            return list(workers.map(work, range(2)))

    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=SECRET) as two,
        ThreadPoolExecutor(1) as pool,
    ):
        early = pool.submit(train_early, one)
        try:
            assert has_begun.wait(20.0)
            found = come_late(two)
        finally:
            is_done.set()
        early.result()
    for joined, state in found:
        assert joined.is_late
        assert all(map(np.array_equal, state, state_of(7)))


# ---- processes that meet by name -------------------------------------------------------------------------------------

WORKER = """
import sys
import numpy as np
import gradwire as gw

name, rank, size, steps = sys.argv[1], *map(int, sys.argv[2:])
params, node = [np.zeros(9, np.float32)], None
team = gw.LocalTeam(name, size=size, rank=rank, timeout_s=20.0)
if rank == 0:
    node = gw.Node("127.0.0.1:0", secret=bytes(range(32)))
    share = team.lead(gw.Exchange(gw.Encoder(9), node, codec="dense", min_peers=0))
else:
    share = team.follow()
state = [np.full((2, 2), 1.0 + rank), np.array(1.0 + rank, np.float32)]
joined = share.join(params, state)
print("late" if joined.is_late else "joined", *state[0][0], state[1], flush=True)
for step in range(steps):
    if sys.stdin.readline() != "step\\n":
        break
    share.step([np.full(9, 2.0 ** rank, np.float32)], params, state)
    print(params[0].tolist()[0], flush=True)
"""


class Worker:
    """A process of a team that takes a step when it is told to."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        command = [sys.executable, "-c", WORKER, name, str(rank), str(size), "99"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process: Any = subprocess.Popen(command, env=environment, text=True, **pipes)

    def says(self) -> str:
        line: str = self.process.stdout.readline()
        return line.strip() or self.process.stderr.read()[-400:]

    def step(self) -> None:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


def step_all(workers: list[Worker]) -> set[str]:
    for worker in workers:
        worker.step()
    return {worker.says() for worker in workers}


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}"
    yield name
    for path in Path("/dev/shm").glob(f"gradwire-*-team-{name}*"):
        path.unlink()


def files(name: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"gradwire-*-team-{name}*")]


def test_processes_that_meet_by_name_lose_a_worker_and_get_another(name: str) -> None:
    # Rank 0 of an earlier run died here; its leftovers are replaced.
    crashed = Worker(name, 0, 1)
    assert crashed.says() == "joined 1.0 1.0 1.0"
    crashed.end()
    assert files(name)
    workers = [Worker(name, rank, 3) for rank in range(3)]
    assert [worker.says() for worker in workers] == [
        f"joined {1.0 + n} {1.0 + n} {1.0 + n}" for n in range(3)
    ]
    [before] = {round(float(found), 4) for found in step_all(workers)}
    assert before == round(7 / 3, 4)
    workers[1].end()
    survivors = [workers[0], workers[2]]
    [after] = {round(float(found), 4) for found in step_all(survivors)}
    assert abs(after - before - 2.5) < 1e-3, "the mean of the updates 1 and 4"
    late = Worker(name, 1, 3)
    while not any(
        shared_memory.is_held(path) for path in Path("/dev/shm").glob(f"*-team-{name}.rank1")
    ):
        threading.Event().wait(0.01)
    for worker in survivors:
        worker.step()
    assert late.says() == "late 1.0 1.0 1.0", "the state of the leader's optimiser"
    [third] = {round(float(worker.says()), 4) for worker in survivors}
    [fourth] = {round(float(found), 4) for found in step_all([*survivors, late])}
    assert abs(third - after - 2.5) < 1e-3
    assert abs(fourth - third - 7 / 3) < 1e-3
    for worker in (*survivors, late):
        worker.process.stdin.close()
        worker.process.wait(20)
        worker.process.stdout.close()
        worker.process.stderr.close()
    assert files(name) == []


def test_two_runs_do_not_meet_and_wrong_workers_are_refused(name: str) -> None:
    params = [np.zeros(3, np.float32)]
    with LocalTeam(name, params, size=2, rank=0, timeout_s=0.1):
        with pytest.raises(ValueError, match=f"a living process is rank 0 of team '{name}'"):
            LocalTeam(name, params, size=2, rank=0)
        with pytest.raises(gw.Mismatch, match="worker 1 of team"):
            LocalTeam(name, [np.zeros(4, np.float32)], size=2, rank=1)
    assert files(name) == []
    with pytest.raises(TimeoutError, match="rank 0 of team"):
        LocalTeam(name, params, size=2, rank=1, timeout_s=0.05)
    with pytest.raises(ValueError, match="other characters"):
        LocalTeam("../run", params, size=1, rank=0)


@pytest.mark.parametrize("steps", [0, 1])
def test_workers_notice_that_rank_0_is_gone_whoever_has_its_name(steps: int, name: str) -> None:
    with gw.Node("127.0.0.1:0", secret=SECRET) as node, ThreadPoolExecutor(2) as pool:
        leader = LocalTeam(name, tensors(), size=2, rank=0)
        lead = leader.lead(gw.Exchange(gw.Encoder(NUMEL, 1.0), node, min_peers=0))
        with LocalTeam(name, tensors(), size=2, rank=1) as other:
            share = other.follow()
            for _ in range(steps):
                list(pool.map(lambda one: one.step(tensors(1), tensors()), [lead, share]))
            leader.close()
            with (
                LocalTeam(name, tensors(), size=2, rank=0),
                pytest.raises(gw.PeerLost, match="start all its workers again"),
            ):
                share.step(tensors(3), tensors())


FORKING = """
import os, sys
import gradwire as gw

team = gw.LocalTeam(sys.argv[1], size=2, rank=0)
if not os.fork():  # the child, which has given the rank up by then
    print("ready", flush=True)
sys.stdin.read()
"""


def test_a_child_that_outlives_a_worker_does_not_keep_its_rank(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    worker = subprocess.Popen([sys.executable, "-c", FORKING, name], env=environment, **pipes)
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"ready\n"
    with pytest.raises(ValueError, match="a living process is rank 0"):
        LocalTeam(name, size=2, rank=0)
    worker.kill()
    worker.wait()
    LocalTeam(name, size=2, rank=0).close()
    worker.stdin.close()  # its child ends
    worker.stdout.close()


# ---- files of others ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "link", "pipe", "of another user"])
def taken(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Return a function that makes what this user cannot use as a file: others may do the same in /dev/shm."""
    made: list[Path] = []

    def take(path: Path) -> None:
        made.append(path)
        if request.param == "folder":
            path.mkdir()
        elif request.param == "link":
            path.symlink_to("/nowhere")
        elif request.param == "pipe":
            os.mkfifo(path)
        else:
            path.touch()
            os.chown(path, 12_345, 12_345)

    if request.param == "of another user" and os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    yield take
    for path in made:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def test_files_that_another_user_makes_meanwhile_end_no_team(
    taken: Callable[[Path], None],
) -> None:
    name = f"taken-{os.getpid()}"
    with gw.LocalTeam(name, np.zeros(3, np.float32), size=2, rank=0) as team:
        for suffix in (".state", ".state-0", ".rank1", ".rank7"):
            taken(team._path.with_name(team._path.name + suffix))
        assert not team._is_alive(1)
        state = [np.arange(3, dtype=np.float32)]
        file = team.publish_state(state)
        copy = [np.zeros(3, np.float32)]
        team.take_state(as_state(copy), file)
        assert copy[0].tolist() == [0.0, 1.0, 2.0]
        team.remove_state()


def test_a_name_that_another_user_has_taken_is_an_error_that_names_the_owner(
    taken: Callable[[Path], None],
) -> None:
    name = f"taken-{os.getpid()}"
    taken(shared_memory.path_of("team", name))
    for rank in (0, 1):
        with pytest.raises(PermissionError, match=r"take another name, or have .* remove it"):
            gw.LocalTeam(name, np.zeros(3, np.float32), size=2, rank=rank, timeout_s=1.0)


# ---- workers that die, and checkpoints of different steps ------------------------------------------------------------


def two_of(name: str, node: gw.Node, rank: int, **options: Any) -> tuple[LocalTeam, LocalExchange]:
    needs_all = options.pop("needs_all", False)
    made = LocalTeam(name, size=2, rank=rank, timeout_s=20.0, needs_all=needs_all)
    if rank:
        return made, made.follow()
    enc = gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD))
    return made, made.lead(gw.Exchange(enc, node, min_peers=0, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needs_all": True}, "local rank 1 of this machine has died"),
        ({"min_members": 2}, "1 of at least 2 members are left"),
        ({}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_failed", [True, False], ids=["dies", "finishes"])
def test_a_team_that_loses_a_worker_stops_at_the_next_step(
    options: Any, message: str, has_failed: bool, name: str
) -> None:
    has_gone = threading.Event()

    def work(rank: int) -> None:
        made, share = two_of(name, node, rank, **options)
        params = tensors()
        for step in range(3):
            share.step(tensors(step), params)
        if rank == 1:
            made.close(has_failed=has_failed)
            has_gone.set()
            return
        assert has_gone.wait(20.0)
        before = flat(params)
        # A worker that has taken all its steps is missed by nobody who needs those that still train.
        is_missed = message and (has_failed or "min_members" in options)
        if is_missed:
            for _ in range(2):
                with pytest.raises(gw.PeerLost, match=message):
                    share.step(tensors(3), params)
            np.testing.assert_array_equal(flat(params), before)
        else:
            assert share.step(tensors(3), params).step == 3
        made.close()

    with gw.Node("127.0.0.1:0", secret=SECRET) as node, ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.parametrize("saved", [(3, 2), (2, 3), (0, 3), (3, 0), (3, 3)], ids=str)
def test_workers_with_checkpoints_of_different_steps_are_refused_with_both_numbers(
    saved: tuple[int, int], name: str
) -> None:
    def work(rank: int, states: Any = None) -> Any:
        made, share = two_of(f"{name}{states is None}", node, rank)
        params = tensors()
        kept: list[Any] = [None]
        with made:
            if states is not None:
                if states[rank][saved[rank]] is not None:
                    share.load_state_dict(states[rank][saved[rank]])
                assert share.step_number == saved[rank]
                if saved[0] != saved[1]:
                    text = f"local rank 0 at {saved[0]}, local rank 1 at {saved[1]}"
                    with pytest.raises(gw.Mismatch, match=text):
                        share.join(params)
                    return None
            for step in range(3):
                share.step(tensors(step), params)
                kept.append(share.state_dict())
        return kept

    with gw.Node("127.0.0.1:0", secret=SECRET) as node, ThreadPoolExecutor(2) as pool:
        states = list(pool.map(work, range(2)))
    with gw.Node("127.0.0.1:0", secret=SECRET) as node, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: work(rank, states), range(2)))


@pytest.mark.parametrize("seed", seeds(2))
def test_a_machine_that_still_loads_its_checkpoint_is_waited_for(seed: int, name: str) -> None:
    """With its workers told, but not its parameters, it would seem ready at step 0."""

    def train(node: FakeNode, rank: int) -> Any:
        share = gw.Exchange(gw.Encoder(NUMEL, 0.1), node, min_peers=1)
        with LocalTeam(f"{name}.{rank}", size=2, rank=0) as made:
            if rank:
                node.cluster.compute(node, 1.0)  # until it is connected
            made.lead(share)
            if rank:
                node.cluster.compute(node, 1.0)
            share.load_state_dict({**share.state_dict(), "step": 5})
            share.join(tensors())
            return share.next_step, share.total_workers

    assert run_cluster(train, count=2, seed=seed) == [(5, 4), (5, 4)]


def test_a_state_of_another_rank_is_not_the_leader_s(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> Any:
        made, share = two_of(name, node, rank)
        params = tensors()
        with made:
            share.step(tensors(rank), params)
            return share.state_dict()

    with gw.Node("127.0.0.1:0", secret=SECRET) as node, ThreadPoolExecutor(2) as pool:
        leaders, others = pool.map(work, range(2))
        made, share = two_of(name, node, 0)
        with made, pytest.raises(ValueError, match="of another rank"):
            share.load_state_dict(others)
        made, share = two_of(name, node, 1)
        with made:
            share.load_state_dict(leaders)
            assert share.step_number == 1
    assert "checkpoint of local rank 0" in caplog.text


@pytest.mark.parametrize("others", ["result", "number"])
def test_states_of_teams_are_merged_for_another_number_of_machines(others: str) -> None:
    def save(rank: int, share: LocalExchange) -> Any:
        share.step(tensors(rank), tensors())
        return share.state_dict()

    first, other = (run_team(save, workers, reduction="sum")[0] for workers in (2, 1))
    states = [first[0], {**other[0], "training": first[0]["training"]}]  # as if of one training
    with pytest.raises(ValueError, match="another local rank than 0"):
        gw.exchange.redistribute([*states, first[1]], 1)
    [merged] = gw.exchange.redistribute(states, 1, reduction="sum")
    unsent = sum(state["encoders"][0]["residual"] for state in states)
    np.testing.assert_array_equal(merged["encoders"][0]["residual"], unsent)

    def go_on(rank: int, share: LocalExchange) -> Any:
        is_number = rank > 0 and others == "number"
        share.load_state_dict({"step_number": merged["step_number"]} if is_number else merged)
        params = tensors()
        assert share.step_number == 1
        assert share.step(tensors(), params).step == 1
        return flat(params), state_of_leader(share)

    outcomes, _ = run_team(go_on, 3, reduction="sum")
    rest = outcomes[0][1]["encoders"][0]["residual"]
    for params, _ in outcomes:
        np.testing.assert_array_equal(params + rest, unsent)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"size": "2"}, "size must be an int, got '2'"),
        ({"rank": None}, "rank must be an int, got None"),
        ({"timeout_s": "5"}, "timeout_s must be a number, got '5'"),
        ({"timeout_s": float("nan")}, "timeout_s is nan, must be positive"),
        ({"name": None}, "the name None has other characters"),
    ],
)
def test_a_team_of_other_kinds_of_arguments_is_refused(
    name: str, options: Any, complaint: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        LocalTeam(**{"name": name, "size": 2, "rank": 0, **options})


def test_each_worker_of_a_team_has_its_own_part_until_it_closes(name: str) -> None:
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        exchange = gw.Exchange(gw.Encoder(NUMEL), node, min_peers=0)
        with (
            LocalTeam(name, size=2, rank=1) as made,
            pytest.raises(ValueError, match="cannot lead"),
        ):
            made.lead(exchange)
        made = LocalTeam(name, size=1, rank=0)
        assert made.present == 0
        with pytest.raises(ValueError, match=r"cannot lead .*Node"):
            made.lead(node)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot follow"):
            made.follow()
        share = made.lead(exchange)
        made.close()
        with pytest.raises(gw.Closed, match="closed its team"):
            share.step(tensors(), tensors())
