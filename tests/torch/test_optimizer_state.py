"""What begins as on rank 0 besides the trained parameters, and what a late node takes over."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
from gradwire.torch.optimizer_state import SharedState  # noqa: E402
from gradwire.torch.staging import Staging  # noqa: E402

from .places import (  # noqa: E402
    OPTIMIZERS,
    SECRET,
    Share,
    shared,
)
from .test_judge import Scratch  # noqa: E402
from .test_optimizer import flat, model, run_together, same_bits, train  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]


class Everything(torch.nn.Module):  # type: ignore[misc]
    """Tensors of every dtype that the optimiser does not train, with other values on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.body = torch.nn.Linear(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 3)
        with torch.no_grad():
            for param in (*self.body.parameters(), *self.norm.parameters()):
                param.copy_(torch.randn(param.shape, generator=generator))
            for param in self.head.parameters():
                param.zero_()  # the same everywhere
        self.small = torch.nn.Parameter(torch.randn(3, generator=generator).half())
        self.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64, generator=generator))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            values = torch.randint(0, 2 if dtype == torch.bool else 99, (4, 3), generator=generator)
            self.register_buffer(f"of_{str(dtype)[6:]}", values.to(dtype))
        self.register_buffer("strided", torch.randn(4, 6, generator=generator).t())
        self.register_buffer("scalar", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("passing", torch.randn(5, generator=generator), persistent=False)
        self.register_buffer("cache", torch.zeros(3 + rank), persistent=False)

    def forward(self, inputs: Any) -> Any:
        return self.head(self.norm(torch.tanh(self.body(inputs))))


@pytest.mark.parametrize("place", ["machines", "team"])
def test_all_tensors_begin_as_on_rank_0_and_the_untrained_are_named(
    everywhere: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = Everything(rank)
        net.small.requires_grad_(False)
        optimizer = share(net, OPTIMIZERS["AdamW"](net.head.parameters()))
        optimizer.join()
        return {**dict(net.named_parameters()), **dict(net.named_buffers())}, optimizer

    expected = Everything(0)
    for tensors, _ in everywhere(place, work):
        for name, tensor in (*expected.named_parameters(), *expected.named_buffers()):
            if name != "cache":
                assert torch.equal(tensors[name], tensor), name
    [record] = {
        entry.getMessage() for entry in caplog.records if "does not train" in entry.getMessage()
    }
    assert "body.weight" in record
    assert "small" not in record
    assert "head" not in record
    assert len([entry for entry in caplog.records if "does not train" in entry.getMessage()]) == 2


def test_two_optimisers_of_one_model_leave_each_other_s_parameters_alone() -> None:
    pairs: list[list[gw.Node]] = []
    with ExitStack() as stack:
        for _ in range(2):
            first = stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET, node_id=1))
            second = stack.enter_context(
                gw.Node("127.0.0.1:0", [first.address], secret=SECRET, node_id=2)
            )
            first.expected_peers = second.expected_peers = 1
            pairs.append([first, second])

        def work(rank: int) -> Any:
            net = model()
            optimizers = [
                shared(net, OPTIMIZERS["AdamW"](net[index].parameters()), pairs[place][rank])
                for place, index in enumerate((0, 2))
            ]
            for step in range(8):
                for optimizer in optimizers if step > 3 else optimizers[:1]:
                    train(net, optimizer, rank, [step])
            return net.state_dict(), flat(net)

        (first_state, own), (second_state, other) = run_together(work, 2)
    assert all(torch.equal(first_state[name], second_state[name]) for name in first_state)
    assert not same_bits(own, other), "each has its own residual"


def test_a_second_optimiser_that_is_not_shared_trains_from_rank_0_s_parameters(
    everywhere: Any,
) -> None:
    def work(rank: int, share: Share) -> Any:
        net = Everything(rank)
        plain = torch.optim.SGD(net.body.parameters(), lr=0.1)
        optimizer = share(net, OPTIMIZERS["AdamW"](net.head.parameters()))
        optimizer.join()
        begun = net.body.weight.detach().clone()
        for step in range(3):
            train(net, optimizer, rank, [step])
            plain.step()
        return begun, net.body.weight.detach()

    (first, _), (second, moved) = everywhere("machines", work)
    assert torch.equal(first, second)
    assert not torch.equal(second, moved)


def test_a_late_node_takes_over_whatever_state_there_is() -> None:
    has_begun = threading.Event()
    is_done = threading.Event()
    with (
        gw.Node("127.0.0.1:0", secret=SECRET) as first,
        gw.Node("127.0.0.1:0", [first.address], secret=SECRET) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        first.expected_peers = 0

        def train_first() -> None:
            net = Everything(0)
            optimizer = shared(net, Scratch(net.head.parameters()), first)
            for step in itertools.count():
                train(net, optimizer, 0, [step])
                if step == 3:
                    has_begun.set()
                if is_done.is_set():
                    break

        founder = pool.submit(train_first)
        try:
            assert has_begun.wait(30.0)
            net = Everything(1)
            optimizer = shared(net, Scratch(net.head.parameters()), second)
            joined = optimizer.join()
            state = copy.deepcopy(optimizer.state[net.head.weight])
            tensors = copy.deepcopy(dict(net.named_buffers()))
            optimizer.leave()
        finally:
            is_done.set()
        founder.result(30.0)
    assert joined.is_late
    assert isinstance(state["n"], int)
    assert state["n"] > 3
    assert state["spread"][0].any()
    assert tensors["norm.num_batches_tracked"] > 3
    assert torch.equal(tensors["of_bool"], Everything(0).of_bool)


def test_a_late_node_s_state_belongs_to_names_whatever_order_a_group_has() -> None:
    nets = [torch.nn.ParameterList(torch.ones(3) for _ in range(2)) for _ in range(2)]
    members = torch.optim.Adam(list(nets[0]))
    late = torch.optim.Adam(list(nets[1])[::-1])
    for number, param in enumerate(nets[0]):
        param.grad = torch.full((3,), 1.0 + number)
    members.step()
    there, here = (
        SharedState(optimizer, [Staging(param) for param in net], lambda: ({}, {}))
        for optimizer, net in zip((members, late), nets, strict=True)
    )
    arrays = there.export()
    here.check(arrays)
    here.load(arrays)
    for own, param in zip(nets[1], nets[0], strict=True):
        assert torch.equal(late.state[own]["exp_avg"], members.state[param]["exp_avg"])


def test_the_state_of_another_optimizer_is_refused() -> None:
    nets = [torch.nn.ParameterList([torch.ones(3)]) for _ in range(2)]
    members, late = torch.optim.AdamW(nets[0]), torch.optim.RMSprop(nets[1])
    there, here = (
        SharedState(optimizer, [Staging(net[0])], lambda: ({}, {}))
        for optimizer, net in zip((members, late), nets, strict=True)
    )
    here.check(there.export())  # there is no state yet
    nets[0][0].grad = torch.ones(3)
    members.step()
    with pytest.raises(gw.Mismatch, match=r"optimiser is RMSprop, the members' is AdamW"):
        here.check(there.export())


class Counting(torch.optim.AdamW):
    """Keeps state in its groups, as Lamb's step number and the distance of Prodigy."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["distance"] = torch.tensor(0.5 * group["step"])
        return super().step(closure)


def test_a_late_node_takes_over_the_numbers_of_groups_but_not_their_rates() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    members, late = (Counting([param], lr=0.1, amsgrad=True) for param in params)
    members.param_groups[0]["betas"] = (0.8, 0.9)
    for _ in range(4):
        params[0].grad = torch.ones(3)
        members.step()
    members.param_groups[0] |= {"lr": 0.05, "weight_decay": 0.25, "foreach": False}
    there, here = (
        SharedState(optimizer, [Staging(param)], lambda: ({}, {}))
        for optimizer, param in zip((members, late), params, strict=True)
    )
    arrays = there.export()
    here.check(arrays)
    here.load(arrays)
    [group] = late.param_groups
    assert (group["step"], group["distance"].item()) == (4, 2.0)
    assert (group["weight_decay"], group["lr"]) == (0.25, 0.1)
    assert (group["foreach"], group["betas"]) == (None, (0.9, 0.999))


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize(
    ("name", "flag", "key"),
    [("AdamW", "amsgrad", "max_exp_avg_sq"), ("RMSprop", "centered", "grad_avg")],
)
def test_a_late_node_takes_over_the_flags_on_which_the_state_depends(
    name: str, flag: str, key: str, is_set: bool
) -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    make = getattr(torch.optim, name)
    members = make([params[0]], **{flag: is_set}, foreach=True)
    late = make([params[1]], **{flag: not is_set}, foreach=False)
    for param in params:
        param.grad = torch.ones(3)
    members.step()
    there, here = (
        SharedState(optimizer, [Staging(param)], lambda: ({}, {}))
        for optimizer, param in zip((members, late), params, strict=True)
    )
    here.load(there.export())
    late.step()
    assert (key in late.state[params[1]]) == is_set
    assert late.param_groups[0]["foreach"] is False


def test_a_late_node_s_state_has_the_layout_of_its_parameters_as_fused_optimizers_need() -> None:
    values = torch.arange(24.0).reshape(2, 3, 2, 2)
    params = [torch.nn.Parameter(values.clone(memory_format=torch.channels_last)) for _ in range(2)]
    members, late = (torch.optim.AdamW([param], lr=0.1, fused=True) for param in params)
    there, here = (
        SharedState(optimizer, [Staging(param)], lambda: ({}, {}))
        for optimizer, param in zip((members, late), params, strict=True)
    )
    for step in range(3):
        for optimizer, param in zip((members, late)[: 1 if step < 2 else 2], params, strict=False):
            param.grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(step))
            param.grad = param.grad.contiguous(memory_format=torch.channels_last)
            optimizer.step()
        if step == 1:
            here.load(there.export())
            with torch.no_grad():
                params[1].copy_(params[0])
    assert torch.equal(*params)


def with_inference(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


KINDS: dict[str, Callable[[int], Any]] = {
    "expanded": lambda rank: torch.full((1, 3, 1), float(rank)).expand(4, 3, 2),
    "conjugate": lambda rank: torch.full((3,), 1.0 + rank * 1j).conj(),
    "negative": lambda rank: torch.full((3,), 1.0 + rank * 1j).conj().imag,
    "of one number": lambda rank: torch.tensor(float(rank)).expand(5),
    "sparse": lambda rank: (torch.eye(3) * (rank + 1.0)).to_sparse(),
    "made under inference_mode": lambda rank: with_inference(lambda: torch.ones(3) * rank),
    "compressed and equal": lambda _: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_any_kind_begin_as_on_rank_0(kind: str) -> None:
    taken = [KINDS[kind](rank) for rank in range(2)]
    net = torch.nn.Module()
    net.register_buffer("own", taken[1])
    there, here = (
        SharedState(None, [], lambda buffer=buffer: ({}, {"own": buffer}))
        for buffer in (taken[0], net.own)
    )
    here.load(there.export())
    assert torch.equal(net.own.to_dense(), KINDS[kind](0).to_dense())
    assert net.own is taken[1]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_buffer_without_a_place_for_the_values_is_named() -> None:
    for own, text in (
        (torch.zeros(1, 3).expand(2, 3), "mask of this node .* clone"),
        (torch.eye(3)[:2].to_sparse_csr(), "mask of this node .* make it dense"),
    ):
        arrays = SharedState(
            None, [], lambda: ({"mask": torch.arange(6.0).reshape(2, 3)}, {})
        ).export()
        with pytest.raises(gw.Mismatch, match=text):
            SharedState(None, [], lambda own=own: ({"mask": own}, {})).load(arrays)
