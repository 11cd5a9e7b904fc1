"""What a training leaves behind: the model, its checkpoints, other trainings, and what the others hear."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire.sharing import Training  # noqa: E402

from .test_optimizer import OPTIMIZERS, flat, model, run_together, same_bits  # noqa: E402

register_parametrization: Any = torch.nn.utils.parametrize.register_parametrization

pytestmark = pytest.mark.torch

SECRET = bytes(range(32))


def share(net: Any, node: gw.Node | None = None, params: Any = None, **options: Any) -> Any:
    params = net.parameters() if params is None else params
    options = {"density": 0.1, **options}
    return gradwire.torch.share(net, OPTIMIZERS["AdamW"](params), node=node, **options)


def train(net: Any, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        outputs = net(inputs.to(next(net.parameters()).dtype))
        (outputs - inputs[:, : outputs.shape[1]]).square().mean().backward()
        optimizer.step()


def clamp(net: Any) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.clamp_(-0.1, 0.1)


def clamp_last(net: Any) -> None:
    clamp(list(net.children())[-1])


def roll_back(net: Any) -> None:
    net.load_state_dict(model().state_dict())


def saved(net: Any, optimizer: Any) -> Any:
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def same(state: Any, other: Any) -> dict[str, bool]:
    return {name: torch.equal(state[name], other[name]) for name in state}


# ---- what was written since the last step ----------------------------------------------------------------------------


@pytest.mark.parametrize("write", [clamp, clamp_last, roll_back])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float32, {"every": 4}), (torch.bfloat16, {})],
    ids=["", "local steps", "bfloat16"],
)
@pytest.mark.parametrize("when", ["open", "closed", "written after the end"])
def test_weights_that_were_written_are_saved_and_resumed(
    write: Callable[[Any], None], options: Any, dtype: Any, when: str
) -> None:
    def begin() -> tuple[Any, Any]:
        net = model().to(dtype)
        return net, share(net, **options)

    net, optimizer = begin()
    train(net, optimizer, 0, range(6))
    if when == "written after the end":
        optimizer.close()
    write(net)
    written = flat(net)
    if when == "closed":
        optimizer.close()
    weights, state = saved(net, optimizer)
    if write is not clamp_last:
        assert same_bits(torch.cat([value.reshape(-1) for value in weights.values()]), written)
    resumed, again = begin()
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    # What is saved between the load and the first step has the same weights.
    assert all(same(weights, saved(resumed, again)[0]).values())
    train(resumed, again, 0, range(6, 9))
    if when == "open":
        train(net, optimizer, 0, range(6, 9))
        assert same_bits(flat(resumed), flat(net))


@pytest.mark.parametrize("write", [clamp_last, roll_back])
def test_a_training_that_ends_leaves_what_all_share_and_what_was_written(
    pair: list[gw.Node], write: Callable[[Any], None]
) -> None:
    def work(rank: int) -> Any:
        net = model()
        optimizer = share(net, pair[rank])
        train(net, optimizer, rank, range(4))
        with optimizer.shared_parameters():
            shared = copy.deepcopy(dict(net.named_parameters()))
        write(net)
        written = copy.deepcopy(dict(net.named_parameters()))
        before = copy.deepcopy(net.state_dict())
        optimizer.close()
        return shared, written, before, net.state_dict()

    for shared, written, before, after in run_together(work, 2):
        last = [name for name in after if name.startswith(max(after)[0])]
        for name in after:
            kept = written if write is roll_back or name in last else shared
            assert torch.equal(after[name], kept[name])
        assert all(same(before, after).values())


def test_nodes_resume_a_rollback(pair: list[gw.Node]) -> None:
    def work(rank: int) -> Any:
        net = model()
        optimizer = share(net, pair[rank])
        train(net, optimizer, rank, range(4))
        roll_back(net)
        states = saved(net, optimizer)
        train(net, optimizer, rank, range(4, 7))
        return states, flat(net)

    before = run_together(work, 2)
    with (
        gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=SECRET, node_id=2) as second,
    ):
        first.expected_peers = second.expected_peers = 1

        def resume(rank: int) -> Any:
            net = model()
            optimizer = share(net, (first, second)[rank])
            (weights, state), _ = before[rank]
            optimizer.load_state_dict(state)
            net.load_state_dict(weights)
            train(net, optimizer, rank, range(4, 7))
            return flat(net)

        after = run_together(resume, 2)
    assert all(same_bits(now, then) for now, (_, then) in zip(after, before, strict=True))


# ---- a training that has ended ---------------------------------------------------------------------------------------


def fail(optimizer: Any) -> None:
    optimizer.__exit__(RuntimeError, RuntimeError(), None)


@pytest.mark.parametrize("end", [lambda optimizer: optimizer.close(), fail])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_closed_training_has_no_part_in_the_model(end: Callable[[Any], None], steps: int) -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(steps))
    shared = copy.deepcopy(net.state_dict())
    clamp_last(net)
    written = copy.deepcopy(net.state_dict())
    end(optimizer)
    assert optimizer.has_ended
    assert same(shared, written) != dict.fromkeys(shared, True)
    assert all(same(net.state_dict(), written).values())
    assert all(same(net.state_dict(), dict(net.named_parameters())).values())
    second = share(net, params=list(net.children())[-1].parameters())
    train(net, second, 0, range(3))
    second.close()
    assert all(same(net.state_dict(), dict(net.named_parameters())).values())
    net.load_state_dict(model().state_dict(), assign=True)


def test_a_model_that_was_converted_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PEERS", "127.0.0.1:9")  # one training at a time
    monkeypatch.setenv("GRADWIRE_MIN_PEERS", "0")
    monkeypatch.setenv("GRADWIRE_BIND", "127.0.0.1:0")
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET.hex())
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(3))
    net.half()
    for save in (net.state_dict, optimizer.state_dict, optimizer.close):
        with pytest.raises(ValueError, match=r"0.weight .*float16 now.* after optimizer.close"):
            save()
    assert optimizer.has_ended
    optimizer.close()
    assert all(same(net.state_dict(), dict(net.named_parameters())).values())
    share(model()).close()


def test_a_closed_model_is_pickled_without_gradwire() -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(2))
    optimizer.close()
    assert b"gradwire" not in pickle.dumps(net)
    assert not net._state_dict_hooks
    assert not net[0]._load_state_dict_pre_hooks


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_an_optimiser_that_is_collected_leaves_the_shared_parameters(
    pair: list[gw.Node], in_a_cycle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Torch would do so in the first step of a process, whose frames are then kept in a cycle.
    importlib.import_module("torch._dynamo")

    def fit(rank: int, net: Any) -> Any:
        optimizer = share(net, pair[rank])
        train(net, optimizer, rank, range(4))
        if in_a_cycle:
            optimizer.itself = [optimizer]
        state = copy.deepcopy(net.state_dict())
        assert not all(same(state, dict(net.named_parameters())).values())
        return state

    def work(rank: int) -> Any:
        net = model()
        shared = fit(rank, net)
        return dict(net.named_parameters()), shared

    gc.collect()  # those of other tests
    gc.disable()
    try:
        nets = run_together(work, 2)
    finally:
        gc.enable()
    gc.collect()
    warnings = caplog.text.count("collected in another thread")
    assert warnings == (2 if in_a_cycle else 0)
    for params, shared in nets:
        assert all(same(params, shared).values()) != in_a_cycle


def test_arrays_and_optimisers_collected_elsewhere_say_what_they_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    held = [share(net)]
    train(net, held[0], 0, range(3))
    own = flat(net)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert "call close()" in caplog.text
    assert same_bits(flat(net), own)
    weights = np.zeros(100, np.float32)
    arrays = gw.share(weights, density=0.02)
    arrays.step(np.linspace(0.0, 1.0, 100, dtype=np.float32))
    shared = arrays.shared()
    assert not np.array_equal(weights, shared)
    del arrays
    assert np.array_equal(weights, shared)


@pytest.mark.parametrize("code", [None, 0, 1])
def test_an_orderly_exit_is_no_failure(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[bool] = []
    close = Training.close

    def note(training: Training, *, has_failed: bool = False) -> None:
        ends.append(has_failed)
        close(training, has_failed=has_failed)

    monkeypatch.setattr(Training, "close", note)
    net = model()
    with pytest.raises(SystemExit), share(net):
        sys.exit(code)
    with pytest.raises(SystemExit), gw.share(np.zeros(100, np.float32)):
        sys.exit(code)
    assert ends == [bool(code)] * 2


# ---- modules that come later, and loads in parts ---------------------------------------------------------------------


class Headed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = model()

    def forward(self, inputs: Any) -> Any:
        outputs = self.body(inputs)
        return self.head(outputs) if hasattr(self, "head") else outputs

    def grow(self, optimizer: Any) -> None:
        self.head = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(self.head.weight, 0.1)
        torch.nn.init.zeros_(self.head.bias)
        optimizer.add_param_group({"params": self.head.parameters()})


class Same(torch.nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 1.0

    def right_inverse(self, weight: Any) -> Any:
        return weight


def test_modules_that_come_later_save_the_shared_parameters(pair: list[gw.Node]) -> None:
    def work(rank: int) -> Any:
        net = Headed()
        optimizer = share(net, pair[rank])
        train(net, optimizer, rank, range(2))
        net.grow(optimizer)
        train(net, optimizer, rank, range(2, 4))
        head = copy.deepcopy(net.head.state_dict())
        register_parametrization(net.body[0], "weight", Same())
        train(net, optimizer, rank, range(4, 6))
        return head, copy.deepcopy(net.state_dict())

    one, two = run_together(work, 2)
    assert all(all(same(here, there).values()) for here, there in zip(one, two, strict=True))


def test_a_model_that_has_grown_is_resumed() -> None:
    def begin() -> tuple[Any, Any]:
        net = Headed()
        return net, share(net)

    net, optimizer = begin()
    train(net, optimizer, 0, range(2))
    net.grow(optimizer)
    train(net, optimizer, 0, range(2, 4))
    weights, state = saved(net, optimizer)
    train(net, optimizer, 0, range(4, 6))
    resumed, again = begin()
    resumed.grow(again)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    train(resumed, again, 0, range(4, 6))
    assert same_bits(flat(resumed), flat(net))


def load_parts(net: Any, weights: Any) -> None:
    for index in "02":
        part = {name[2:]: value for name, value in weights.items() if name.startswith(index)}
        net[int(index)].load_state_dict(part)


def copy_over(net: Any, weights: Any) -> None:
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(weights[name])


@pytest.mark.parametrize("load", [load_parts, copy_over])
@pytest.mark.parametrize("is_first", [False, True], ids=["optimiser first", "model first"])
def test_a_checkpoint_s_model_may_be_loaded_in_parts(load: Any, is_first: bool) -> None:
    net = model()
    optimizer = share(net)
    train(net, optimizer, 0, range(4))
    weights, state = saved(net, optimizer)
    train(net, optimizer, 0, range(4, 7))
    resumed = model()
    again = share(resumed)
    if is_first:
        load(resumed, weights)
    again.load_state_dict(state)
    if not is_first:
        load(resumed, weights)
    if load is copy_over:
        again.join()  # nothing else tells that the model is complete
    train(resumed, again, 0, range(4, 7))
    assert same_bits(flat(resumed), flat(net))
