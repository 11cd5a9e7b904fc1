"""One training after another in one process: each ends, gives everything back, and does not meet the next."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import rendezvous
from gradwire.cli import run as cli_run
from gradwire.sharing import Training

# Every way to end a training, for the three kinds of callers that have NumPy only.
TRAIN = """
import gc, os, sys, threading, time
import numpy as np
import gradwire as gw

rank = int(os.environ["RANK"])
WAYS = ["close", "leave", "with", "deleted", "cycle"]

def train(number):
    way = WAYS[number % 5]
    params = np.full(4096, 100.0 * rank, np.float32)
    shared = gw.share(params, codec="dense", timeout_s=30.0)
    for step in range(3):
        shared.step(np.full(4096, number + 1.0, np.float32))
    if way == "close":
        shared.close()
        shared.close()
    elif way == "leave":
        shared.exchange.catch_up(params)
        assert shared.leave() is shared.leave()
    elif way == "with":
        with shared as inner:
            assert inner is shared
    elif way == "cycle":
        shared.itself = shared
    return params

def usage():
    gc.collect()  # an owner in a cycle, which ends its training
    gc.collect()  # what the training held
    return len(os.listdir("/proc/self/fd")), threading.active_count()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for number in range(10):
    # A rank that is ahead must not come into the training that the others still end.
    if rank == 1 and number % 2:
        time.sleep(0.3)
    params = train(number)
    assert (params == 3.0 * (number + 1)).all(), params[:3]
    if number == 0:
        first, first_bytes = usage(), resident()
assert usage() == first, (usage(), first)
assert resident() < first_bytes + (8 << 20), (resident(), first_bytes)
print("done", flush=True)
"""


def run(tmp_path: Path, code: str, *arguments: str, **variables: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    options = [argument for argument in arguments if argument == "--as-machines"]
    rest = [argument for argument in arguments if argument != "--as-machines"]
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", *options, str(script), *rest]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["team", "machines"])
def test_ten_trainings_in_one_process_cost_what_one_costs(kind: str, tmp_path: Path) -> None:
    machines = ["--as-machines"] if kind == "machines" else []
    # What `gradwire top` reads has a thread and a socket, too.
    output = run(tmp_path, TRAIN, *machines, GRADWIRE_TOP="1")
    assert output.count("done") == 2, output


SECOND = """
import numpy as np
import gradwire as gw

first = gw.share(np.zeros(64, np.float32))
first.step(np.ones(64, np.float32))
try:
    gw.share(np.zeros(64, np.float32))
except RuntimeError as error:
    print(error)
first.step(np.ones(64, np.float32))
print("goes on", flush=True)
"""


@pytest.mark.parametrize("kind", ["team", "machines"])
def test_a_second_training_beside_the_first_is_refused_with_the_way_out(
    kind: str, tmp_path: Path
) -> None:
    output = run(tmp_path, SECOND, *(["--as-machines"] if kind == "machines" else []))
    assert output.count("call close() on what share returned") == 2
    assert output.count("goes on") == 2, output


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", rendezvous.PEERS, rendezvous.MIN_PEERS):
        monkeypatch.delenv(name, raising=False)


def test_a_process_alone_may_have_several(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    with gw.share(np.zeros(8, np.float32)) as one, gw.share(np.zeros(8, np.float32)) as two:
        one.step(np.ones(8, np.float32))
        two.step(np.ones(8, np.float32))
    with pytest.raises(gw.Closed):
        one.step(np.ones(8, np.float32))


def test_threads_that_begin_together_wait_for_the_same_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Emptied(list[Any]):
        """As it looked right before another thread took the last of them."""

        def __bool__(self) -> bool:
            return True

    monkeypatch.setattr(Training, "_closers", Emptied())
    assert Training.begin("of two threads") == []


def test_the_parameters_are_the_shared_ones_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    params = np.zeros(4096, np.float32)
    update = np.random.default_rng(5).standard_normal(4096).astype(np.float32)
    shared = gw.share(params)
    shared.step(update)
    expected = shared.shared()
    assert not np.array_equal(params, expected), "the residual is applied"
    shared.close()
    np.testing.assert_array_equal(params, expected)


def test_arguments_that_are_refused_leave_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    gc.collect()  # the files of other tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TypeError):
            gw.share(np.zeros(8, np.float32), nonsense=1)  # type: ignore[call-arg]
        with pytest.raises((TypeError, ValueError)):
            gw.share(np.zeros(8, np.float32), density=0.5, min_peers="two")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"observer.* call its follow"):
            gw.share(np.zeros(8, np.float32), role="observer")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_beginning_that_times_out_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    monkeypatch.setenv("GRADWIRE_SECRET", bytes(range(32)).hex())
    monkeypatch.setenv(rendezvous.MIN_PEERS, "1")
    monkeypatch.setenv(rendezvous.BIND, "127.0.0.1:0")
    for _ in range(2):
        with pytest.raises(TimeoutError), gw.share(np.zeros(8, np.float32), timeout_s=0.2) as one:
            one.join()


def test_wrong_kinds_of_ends_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    params: Any = np.zeros(8, np.float32)
    shared = gw.share(params)
    shared.step(np.ones(8, np.float32))
    assert shared.exchange.catch_up(params) == 0
    shared.leave()
    shared.leave()
    shared.close()


WITHOUT_RANKS = """
import numpy as np
import gradwire as gw

with gw.share(np.zeros(64, np.float32), timeout_s=30.0) as shared:
    for step in range(3):
        shared.step(np.ones(64, np.float32))
"""


def test_processes_without_ranks_are_told_their_number_once() -> None:
    address = f"127.0.0.1:{cli_run.free_port()}"
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    common |= {"GRADWIRE_SECRET": bytes(range(32)).hex(), rendezvous.MIN_PEERS: "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_RANKS],
            env={**common, name: address},
            text=True,
            stderr=subprocess.PIPE,
        )
        for name in (rendezvous.BIND, rendezvous.PEERS)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    numbers = [re.findall(r"this is node (\d) of 2", text) for text in errors]
    assert sorted(numbers) == [["0"], ["1"]]


# ---- checkpoints -----------------------------------------------------------------------------------------------------

RESUMED = """
import os, pickle, sys
import numpy as np
import gradwire as gw

rank, folder, options = int(os.environ["RANK"]), sys.argv[1], eval(sys.argv[2])

def train(first, last, name, state=None):
    rng = np.random.default_rng([rank, first])
    params = [np.full(4096, float(rank), np.float32), np.zeros((2, 3), np.float64)]
    with gw.share(params, timeout_s=30.0, **options) as shared:
        if state is not None:
            shared.load_state_dict(state)
            assert shared.step_number == first
        shared.join()
        assert shared.step_number == first
        for step in range(first, last):
            rng = np.random.default_rng([rank, step])
            shared.step([rng.standard_normal(array.shape).astype(array.dtype) for array in params])
            assert shared.step_number == step + 1
        if "overlap" in options:
            shared.exchange.catch_up(params)
        state = pickle.loads(pickle.dumps(shared.state_dict()))
        assert shared.result is not None
        return shared.shared(), [array.copy() for array in params], state

whole = train(0, 12, "whole")
_, _, state = train(0, 7, "half")
resumed = train(7, 12, "rest", state)
if not options.get("overlap"):
    for before, after in zip(whole[:2], resumed[:2]):
        assert all(map(np.array_equal, before, after))
print("same", float(resumed[0][0].sum()), flush=True)
"""


@pytest.mark.parametrize("kind", ["team", "machines"])
@pytest.mark.parametrize("options", [{}, {"every": 3}, {"every": 2, "overlap": 1}], ids=str)
def test_a_state_of_arrays_is_resumed_bit_for_bit(kind: str, options: Any, tmp_path: Path) -> None:
    machines = ["--as-machines"] if kind == "machines" else []
    output = run(tmp_path, RESUMED, *machines, str(tmp_path), repr(options))
    sums = re.findall(r"same (\S+)", output)
    assert len(sums) == 2, output
    assert sums[0] == sums[1]


OTHER_EVERY = """
import numpy as np
import gradwire as gw

def train(every, state, steps):
    with gw.share(np.zeros(64, np.float32), timeout_s=30.0, every=every) as shared:
        if state is not None:
            shared.load_state_dict(state)
        shared.join()
        first = shared.step_number
        for step in range(steps):
            shared.step(np.full(64, 0.5, np.float32))
        return first, shared.state_dict()

_, state = train(4, None, 6)
first, _ = train(3, state, 1)  # an exchange and two local steps
print("first step:", first, flush=True)
"""


def test_a_team_goes_on_with_another_number_of_local_steps(tmp_path: Path) -> None:
    assert run(tmp_path, OTHER_EVERY).count("first step: 5") == 2


def test_a_state_of_other_arrays_or_in_the_middle_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone(monkeypatch)
    with gw.share(np.zeros(8, np.float32)) as shared:
        shared.step(np.ones(8, np.float32))
        state = shared.state_dict()
        with pytest.raises(RuntimeError, match="before the first step"):
            shared.load_state_dict(state)
    weights = np.zeros(9, np.float32)
    with gw.share(weights) as other, pytest.raises(ValueError, match=r"\[\[8\]\].*\[\[9\]\]"):
        other.load_state_dict(state)
    assert not weights.any()


@pytest.mark.parametrize("where", ["params", "shared"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (np.ndarray.tolist, "array 0 of the state is of no dtype, must be of float32"),
        (lambda array: array.astype(np.float64), "is of float64, must be of float32"),
        (lambda array: array.T, r"\[\[4, 2\]\].*\[\[2, 4\]\]"),
        (
            lambda array: array / np.float32(0.0),
            "8 elements of array 0 of the state are not finite",
        ),
    ],
    ids=["lists", "dtype", "shape", "infinite"],
)
def test_nothing_is_loaded_of_a_state_with_changed_arrays(
    where: str, change: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    update = np.linspace(0.5, 1.0, 8, dtype=np.float32).reshape(2, 4)
    with gw.share(np.zeros((2, 4), np.float32)) as shared:
        shared.step(update)
        state = shared.state_dict()
    arrays = state["params"] if where == "params" else state["exchange"]["shared"]
    with np.errstate(divide="ignore", invalid="ignore"):
        arrays[0] = change(arrays[0])
    weights = np.zeros((2, 4), np.float32)
    with gw.share(weights) as again:
        with pytest.raises(ValueError, match=complaint):
            again.load_state_dict(state)
        assert again.step_number == 0
        assert not weights.any()
        assert again.step(update).step == 0


def test_nothing_is_left_to_do_in_arrays_that_never_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    weights = np.arange(8, dtype=np.float32)
    shared = gw.share(weights)
    assert shared.step_number == 0
    np.testing.assert_array_equal(shared.shared(), weights)
    assert shared.leave() is None
    np.testing.assert_array_equal(weights, np.arange(8))


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_shake_up_and_clipping_reach_the_encoders(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[gw.Encoder] = []

    def make(*args: Any, **options: Any) -> gw.Encoder:
        made.append(gw.Encoder(*args, **options))
        return made[-1]

    monkeypatch.setattr("gradwire.sharing.Encoder", make)
    schedules: Any = {"shakeup": gw.ShakeUp(every=7), "clip": gw.ResidualClip(limit=2.0, every=3)}
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        if framework == "numpy":
            gw.share(np.zeros(100, np.float32), node=node, **schedules).close()
        else:
            torch = pytest.importorskip("torch", reason="torch is not installed")
            from gradwire.torch import share

            net = torch.nn.Linear(10, 10)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            share(net, optimizer, node=node, **schedules).close()
    assert [(encoder.shakeup, encoder.clip) for encoder in made] == [tuple(schedules.values())]


def test_what_clipping_cuts_off_leaves_the_parameters_too() -> None:
    """They hold the residual, which must not bring it back."""
    update = np.linspace(-1.0, 1.0, 1000, dtype=np.float32)
    clip = gw.ResidualClip(limit=1.0, every=1)
    encoder = gw.Encoder(1000, gw.FixedThreshold(0.125), clip=clip)
    weights = np.zeros(1000, np.float32)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        exchange = gw.Exchange(encoder, node, apply_residual=True)
        for step in range(1, 4):
            exchange.step(update, weights)
            # One threshold of each step is sent, and at most one is left.
            assert np.abs(weights).max() <= 0.125 * (step + 1) + 1e-6
        np.testing.assert_allclose(np.abs(encoder.residual).max(), 0.125)


@pytest.mark.parametrize("params", [{"w": np.zeros(3, np.float32)}, None, [0.0, 1.0]], ids=repr)
def test_what_are_no_arrays_is_refused(params: Any) -> None:
    with pytest.raises(TypeError, match=r"list\(params\.values\(\)\)"):
        gw.share(params)


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ([], "params must be an array or a list of arrays, and the list is empty"),
        (np.zeros(3, np.int64), "parameters must be float32 or float64, got int64"),
        (np.zeros(3, np.float16), "parameters must be float32 or float64, got float16"),
        (np.zeros(3, complex), "parameters must be float32 or float64, got complex128"),
        (np.zeros((3, 2), np.float32)[:, 0], "C-contiguous and writable"),
        (np.float32(1.0), "C-contiguous and writable"),
    ],
)
def test_arrays_that_cannot_be_trained_are_refused_before_there_is_a_node(
    params: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gw.Node, "from_env", None)
    with pytest.raises((TypeError, ValueError), match=complaint):
        gw.share(params)


@pytest.mark.parametrize("density", ["0.1", [0.1], {"0": "0.1"}, {0: 0.1}, gw.TargetDensity(0.1)])
def test_a_density_of_another_kind_is_refused(density: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"density.* must be"):
        gw.share(np.zeros(99, np.float32), density=density)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"params": []},
        {"params": [np.zeros(3, np.float32)], "exchange": None},
        gw.Encoder(3).state_dict(),
    ],
)
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    with (
        gw.share(np.zeros(3, np.float32)) as shared,
        pytest.raises(ValueError, match="a state of shared arrays has params and exchange"),
    ):
        shared.load_state_dict(state)


def test_an_update_of_another_shape_is_refused_unless_it_is_flat() -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        params = [np.zeros((3, 4), np.float32), np.zeros((), np.float32)]
        with gw.share(params, node=node, density=0.5) as shared:
            with pytest.raises(ValueError, match=r"shape \(4, 3\), the parameters' has \(3, 4\)"):
                shared.step([np.ones((4, 3), np.float32), np.ones((), np.float32)])
            shared.step([np.ones(12, np.float32), np.ones(1, np.float32)])
            assert (params[0] == 1.0).all()


def test_updates_in_another_order_than_the_parameters_are_refused() -> None:
    params = [np.zeros((2, 3), np.float32), np.zeros(4, np.float32)]
    update = [np.full(param.shape, 1.0 + index, np.float32) for index, param in enumerate(params)]
    with (
        gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node,
        gw.share(params, node=node, density=0.5) as shared,
    ):
        with pytest.raises(ValueError, match=r"shape \(4,\), the parameters' has \(2, 3\)"):
            shared.step(update[::-1])
        assert not any(param.any() for param in params)
        shared.step(update)
        assert [param.ravel().tolist() for param in params] == [[1.0] * 6, [2.0] * 4]


@pytest.mark.parametrize("end", ["open", "close", "leave"])
def test_a_node_has_one_training(end: str) -> None:
    """The other nodes cannot tell the messages of two trainings of one node apart."""
    params = np.zeros(3, np.float32)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        shared = gw.share(params, node=node, min_peers=0)
        shared.step(np.ones(3, np.float32))
        if end != "open":
            getattr(shared, end)()
        with pytest.raises(RuntimeError, match="give every training a node of its own"):
            gw.share(params, node=node, min_peers=0)
        if end == "open":
            shared.step(np.ones(3, np.float32))
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        gw.share(params, node=node, min_peers=0).step(np.ones(3, np.float32))


def test_arrays_that_are_dropped_beside_their_living_node_hold_up_nobody() -> None:
    """Without a goodbye the others would wait for a node that still answers."""
    secret = bytes(range(32))
    options: Any = {"min_peers": 1, "timeout_s": 5.0, "on_straggler": "raise"}

    def train(node: gw.Node, steps: int) -> None:
        shared = gw.share(np.zeros(8, np.float32), node=node, **options)
        for step in range(steps):
            shared.step(np.full(8, 1.0 + step, np.float32))

    with (
        gw.Node("127.0.0.1:0", secret=secret) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=secret) as second,
    ):
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(train, first, 2), pool.submit(train, second, 4)]
            for end in ends:
                end.result(timeout=60.0)
        assert len(first.peers) == 1


def test_a_close_by_a_signal_handler_inside_the_node_is_refused_and_done_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone(monkeypatch)
    shared = gw.share(np.zeros(4, np.float32))
    shared.step(np.ones(4, np.float32))
    node = shared._training._node
    assert node is not None
    with node._lock, pytest.raises(RuntimeError, match="signal's handler"):
        shared.close()
    assert node.peers == ()
    assert "closed" not in repr(node)
    shared._training._close_at_exit()
    assert "closed" in repr(node)


@pytest.mark.parametrize("code", [None, 0, 1])
def test_an_exit_out_of_a_node_or_team_is_a_failure_if_it_has_a_code(
    code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[bool] = []

    def close(_: Any, *, timeout_s: float) -> None:
        ends.append(not timeout_s)

    def close_team(_: Any, *, has_failed: bool = False) -> None:
        ends.append(has_failed)

    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node, monkeypatch.context() as patch:
        patch.setattr(gw.Node, "close", close)
        with pytest.raises(SystemExit), node:
            sys.exit(code)
    name = f"exits-{os.getpid()}"
    with (
        gw.LocalTeam(name, [np.zeros(8, np.float32)], size=1, rank=0) as team,
        monkeypatch.context() as patch,
    ):
        patch.setattr(gw.LocalTeam, "close", close_team)
        with pytest.raises(SystemExit), team:
            sys.exit(code)
    assert ends == [bool(code)] * 2
