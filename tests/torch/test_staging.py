"""Parameters that are infinite, and parameters that change after they were shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
from gradwire import _core  # noqa: E402
from gradwire.torch.optimizer_state import SharedState  # noqa: E402
from gradwire.torch.staging import _THREAD_NUMEL, Staging, sums_of  # noqa: E402

from .places import (  # noqa: E402
    AS_PLAIN,
    OPTIMIZERS,
    PLACES,
    Share,
    assert_as,
    share,
    steps,
)
from .test_optimizer import flat, model, same_bits, train  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]


@pytest.mark.parametrize("numel", [0, 1, 70, 2 * _THREAD_NUMEL + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_keeps_the_bits_that_it_has_rounded_off(numel: int, dtype: Any) -> None:
    torch.manual_seed(numel)
    tensor = torch.randn(numel).to(dtype)
    staging = Staging(tensor)
    memory = staging.fetch()
    memory += torch.randn(numel) / 1000
    before = memory.clone()
    staging.store()
    stored = tensor.clone()
    tensor.mul_(1 + (torch.rand(numel) < 0.5) / 16)
    expected = (tensor.float() - stored.float()) + before
    assert staging.fetch_moved() is memory
    assert torch.equal(memory, expected)
    assert torch.equal(memory[tensor == stored], before[tensor == stored])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_moves_its_memory_as_torch_does_to_the_bit(dtype: Any) -> None:
    torch.manual_seed(1)
    numel = 1 << 16
    # Every value of half precision: subnormal, infinite and NaN, too.
    now = torch.arange(numel).to(torch.int16).view(dtype)
    any_bits = torch.randint(-(2**31), 2**31, (numel,)).to(torch.int32).view(torch.float32)
    near = now.float() * (1 + torch.randn(numel) / 256)
    halfway = (now.float() + now.roll(1).float()) / 2
    for memory in (any_bits, near, halfway, now.float()):
        staging = Staging(torch.zeros(numel, dtype=dtype))
        staging.memory.copy_(memory)
        staging.tensor.copy_(now)
        moved = now.float() - memory.to(dtype).float()
        expected = memory + moved
        result = staging.fetch_moved()
        assert torch.equal(result.isnan(), expected.isnan())
        finite = ~expected.isnan()
        assert torch.equal(result.view(torch.int32)[finite], expected.view(torch.int32)[finite])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_is_set_to_its_memory_as_torch_does_to_the_bit(dtype: Any) -> None:
    torch.manual_seed(1)
    any_bits = torch.randint(-(2**31), 2**31, (1 << 16,)).to(torch.int32).view(torch.float32)
    halves = torch.arange(1 << 16).to(torch.int16).view(dtype).float()
    halfway = (halves.view(torch.int32) + (0x8000 if dtype == torch.bfloat16 else 0x1000)).view(
        torch.float32
    )
    for memory in (any_bits, halves, halfway):
        staging = Staging(torch.zeros(1 << 16, dtype=dtype))
        staging.memory.copy_(memory)
        expected = memory.to(dtype)
        stored = staging.store()
        finite = ~expected.isnan()
        assert torch.equal(stored.isnan(), expected.isnan())
        assert torch.equal(stored.view(torch.int16)[finite], expected.view(torch.int16)[finite])


@pytest.mark.parametrize(
    ("copies", "params", "error", "message"),
    [
        (torch.zeros(3), torch.zeros(3), TypeError, "params float16 or bfloat16"),
        (torch.zeros(3).double(), torch.zeros(3).half(), TypeError, "copies must be float32"),
        (torch.zeros(3), torch.zeros(4).half(), ValueError, "of the same sizes"),
        (torch.zeros(3), [torch.zeros(3).half()] * 2, ValueError, "of the same sizes"),
        (torch.zeros(3, 2).T, torch.zeros(2, 3).half(), ValueError, "not C-contiguous"),
    ],
)
def test_arrays_that_are_no_pair_are_refused(
    copies: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _core.add_moved(copies, params, 1)
    with pytest.raises(error, match=message):
        _core.round_copies(copies, params, 1)


def test_only_writable_parameters_of_bfloat16_are_set_to_their_copies() -> None:
    with pytest.raises(TypeError, match="params must be bfloat16"):
        _core.round_copies(torch.zeros(3), torch.zeros(3).half(), 1)
    params = np.zeros(3, np.float16)
    params.flags.writeable = False
    with pytest.raises(ValueError, match=r"params is read-only"):
        _core.round_copies(np.zeros(3, np.float32), params, 1)


def test_a_copy_in_the_memory_of_its_parameters_is_refused() -> None:
    copies = torch.zeros(8)
    with pytest.raises(ValueError, match="overlaps the copies"):
        _core.add_moved(copies, copies.view(torch.bfloat16)[:8], 1)
    assert not copies.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinite_elements_are_told_from_finite_ones_whose_sum_is_infinite(dtype: Any) -> None:
    large = torch.full((4,), 3e38, dtype=dtype)
    staging = Staging(large)
    assert torch.equal(staging.mark_constants(), large.float())
    assert staging.constants is None
    both = torch.tensor([torch.inf, 1.0, -torch.inf], dtype=dtype)
    assert torch.equal(Staging(both).mark_constants(), torch.tensor([0.0, 1.0, 0.0]))


class Masked(torch.nn.Module):  # type: ignore[misc]
    """A layer with a mask of minus infinity among its parameters."""

    def __init__(self, rank: int = 0, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.layer = model(dtype)
        mask = torch.zeros(3, dtype=dtype)
        if rank == 0:
            mask[1] = -torch.inf
        self.mask = torch.nn.Parameter(mask)

    def forward(self, inputs: Any) -> Any:
        return torch.softmax(self.layer(inputs) + self.mask, dim=1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["everywhere", "on rank 0"])
def test_infinite_parameters_stay_what_they_are(
    everywhere: Any, place: str, dtype: Any, same: bool
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = Masked(0 if same else rank, dtype)
        optimizer = share(net, OPTIMIZERS["SGD"](net.parameters()))
        train(net, optimizer, rank, range(5), dtype)
        with optimizer.shared_parameters():
            common = net.mask.detach().clone()
        after = net.mask.detach().clone()
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        again = Masked(1, dtype)
        return common, after, saved, again

    results = everywhere(place, work)
    for common, after, (weights, _), _ in results:
        for mask in (common, after, weights["mask"]):
            assert mask.isinf().tolist() == [False, True, False]
        assert weights["mask"][0] != 0.0, "the others are trained"
        assert torch.equal(weights["mask"], results[0][2][0]["mask"])
        assert all(tensor.isfinite().all() for name, tensor in weights.items() if name != "mask")


def test_infinite_parameters_are_in_checkpoints() -> None:
    straight = Masked()
    optimizer = share(straight)
    steps(straight, optimizer, 4)
    weights, state = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    steps(straight, optimizer, 4, 4)
    net = Masked(1)
    again = share(net)
    again.load_state_dict(state)
    net.load_state_dict(weights)
    steps(net, again, 4, 4)
    assert same_bits(flat(net), flat(straight))
    assert net.mask[1] == -torch.inf


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_infinite_parameters_that_are_changed_are_refused(value: float) -> None:
    net = Masked()
    optimizer = share(net)
    steps(net, optimizer, 2)
    with torch.no_grad():
        net.mask[1] = value
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(gw.NonFiniteUpdate):
        optimizer.step()
    assert net.mask[1] == -torch.inf
    steps(net, optimizer, 1)


def other_shape(net: Any) -> None:
    net[2].bias.data = torch.zeros(5)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bfloat16": (lambda net: net.to(torch.bfloat16), "dtype was torch.float32"),
    "double": (lambda net: net.double(), "dtype was torch.float32 and is torch.float64"),
    "half of a layer": (lambda net: net[2].half(), r"2\.weight has changed.*torch.float16"),
    "another shape": (other_shape, r"2\.bias has changed.*shape was \(3,\) and is \(5,\)"),
}


@pytest.mark.parametrize("count", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES)
def test_parameters_that_change_in_kind_are_named_with_the_remedy(
    change: Callable[[Any], Any], text: str, count: int
) -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, count)
    change(net)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=f"{text}.*before gradwire.torch.share"):
        optimizer.step()


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_a_model_that_was_converted_is_named_where_it_is_saved(convert: str) -> None:
    net = model()
    optimizer = share(net)
    steps(net, optimizer, 2)
    own = flat(net)
    getattr(net, convert)()
    for call in (optimizer.state_dict, net.state_dict, optimizer.shared_tensors, optimizer.resync):
        with pytest.raises(
            ValueError, match=r"0\.weight has changed.* Convert it back .* to close"
        ):
            call()
    net.float()
    if convert == "double":
        assert same_bits(flat(net), own)
    steps(net, optimizer, 1)
    optimizer.close()


def test_a_parameter_that_is_replaced_in_the_model_is_named() -> None:
    net = model()
    optimizer = share(net)
    net[2].bias = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"2\.bias of the model was replaced"):
        steps(net, optimizer, 1)


@pytest.mark.parametrize("count", [0, 2], ids=["before the first step", "later"])
def test_parameters_may_have_another_layout_after_they_were_shared(count: int) -> None:
    def net() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten())

    def run(net: Any, optimizer: Any) -> None:
        for step in range(5):
            if step == count:
                net.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            net(torch.randn(2, 2, 5, 5, generator=generator)).square().mean().backward()
            optimizer.step()

    nets = [net(), net()]
    run(nets[0], share(nets[0], **AS_PLAIN))
    run(nets[1], OPTIMIZERS["AdamW"](nets[1].parameters()))
    assert nets[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert_as(*nets)


def test_no_tensors_and_empty_ones_have_no_sums() -> None:
    assert sums_of([]) == sums_of([torch.zeros(0), torch.zeros(3, 0)]) == []
    sums = sums_of([torch.zeros(0), torch.tensor([1.0, torch.inf]), torch.ones(2)])
    assert [bool(total.isfinite()) for total in sums] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["before the first step", "later", "after another layout"])
def test_an_evaluation_under_inference_mode_changes_nothing(when: str, dtype: Any) -> None:
    def run(*, evaluates: bool) -> Any:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten()).to(dtype)
        with torch.no_grad():
            net[0].bias[1] = -torch.inf
        if when == "before the first step":
            net.to(memory_format=torch.channels_last)
        optimizer = share(net, every=2)
        for step in range(4):
            if step == 1 and when == "after another layout":
                net.to(memory_format=torch.channels_last)
            if evaluates and (step == 1) != (when == "before the first step"):
                with torch.inference_mode(), optimizer.shared_parameters():
                    net(torch.zeros(1, 2, 5, 5, dtype=dtype))
                    net.state_dict(), optimizer.state_dict()
                with torch.inference_mode():
                    net.state_dict(), optimizer.state_dict()
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(2, 2, 5, 5, generator=generator).to(dtype)
            net(inputs).clamp(-5.0).square().mean().backward()
            optimizer.step()
        return flat(net)

    assert same_bits(run(evaluates=True), run(evaluates=False))


def test_a_node_that_joins_under_inference_mode_trains() -> None:
    arrays = []
    for is_late in (False, True):
        net = torch.nn.ParameterList([torch.ones(3)])
        optimizer = torch.optim.Adam(net)
        state = SharedState(optimizer, [Staging(net[0])], lambda: ({}, {}))
        if is_late:
            with torch.inference_mode():
                state.load(arrays)
        net[0].grad = torch.ones(3)
        optimizer.step()
        arrays = state.export()
