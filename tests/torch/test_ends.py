"""What a training leaves behind: the model, its checkpoints, other trainings, and what the others hear."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402

from .test_optimizer import OPTIMIZERS, flat, model, run_together, same_bits  # noqa: E402

pytestmark = pytest.mark.torch

SECRET = bytes(range(32))


@pytest.fixture
def pair() -> Iterator[list[gw.Node]]:
    with (
        gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=SECRET, node_id=2) as two,
    ):
        one.expected_peers = two.expected_peers = 1
        yield [one, two]


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
