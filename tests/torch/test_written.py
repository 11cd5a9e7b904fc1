"""Weights that the caller writes into a shared model are what the training goes on from, or an update."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire.exchange import LocalTeam  # noqa: E402

pytestmark = pytest.mark.torch

SECRET = bytes(range(32))
STEPS, AT = 16, 10


def model_of(dtype: Any) -> Any:
    layers = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 4))
    generator = torch.Generator().manual_seed(
        0
    )  # the global one is shared by the ranks, which are threads
    with torch.no_grad():
        for param in layers.parameters():
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    return layers.to(dtype)


def weights_of(model: Any) -> Any:
    return torch.cat([param.detach().float().reshape(-1) for param in model.parameters()])


def load(model: Any, best: Any) -> None:
    model.load_state_dict(best)


def copy_data(model: Any, best: Any) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(best[name])


def initialise(model: Any, best: Any) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            torch.nn.init.zeros_(param).add_(best[name])


def through_numpy(model: Any, best: Any) -> None:
    for name, param in model.named_parameters():
        if param.dtype is torch.bfloat16:
            param.data.copy_(best[name])
        else:
            param.detach().numpy()[...] = best[name].numpy()


def into_the_state(model: Any, best: Any) -> None:
    for name, tensor in model.state_dict().items():
        tensor.copy_(best[name])


WRITES = [load, copy_data, initialise, through_numpy, into_the_state]


def train(
    pair: list[gw.Node],
    write: Callable[[Any, Any], None],
    ranks: tuple[int, ...] = (0, 1),
    dtype: Any = None,
    at: int = AT,
    **options: Any,
) -> list[Any]:
    """Return by rank the distance of shared and own weights from the written ones, just before and after writing."""
    best = copy.deepcopy(model_of(dtype).state_dict())
    with torch.no_grad():
        for tensor in best.values():
            tensor.mul_(-1.0).add_(1.0)
    target = torch.cat([tensor.float().reshape(-1) for tensor in best.values()])

    end = threading.Barrier(2)

    def work(rank: int) -> Any:
        model = model_of(dtype)
        optimizer = gradwire.torch.share(
            model, torch.optim.SGD(model.parameters(), lr=1e-4), node=pair[rank], **options
        )
        optimizer.join()
        generator = torch.Generator().manual_seed(rank)
        before = after = own = 0.0
        for step in range(STEPS):
            if step == at:
                before = float((shared_of(optimizer) - target).abs().max())
                if rank in ranks:
                    write(model, best)
                    saved = torch.cat(
                        [tensor.float().reshape(-1) for tensor in model.state_dict().values()]
                    )
                    own = float((saved - target).abs().max())
                    own = max(own, float((weights_of(model) - target).abs().max()))
            optimizer.zero_grad()
            inputs = torch.randn(8, 12, generator=generator).to(dtype)
            model(inputs).square().mean().backward()
            optimizer.step()
        end.wait()
        if options.get("overlap"):
            optimizer.catch_up()
        elif "mode" in options:
            received = optimizer.exchange.stats.received
            while received < STEPS:
                received += optimizer.catch_up(timeout_s=0.2)
        after = float((shared_of(optimizer) - target).abs().max())
        return before, own, after, shared_of(optimizer), weights_of(model)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def shared_of(optimizer: Any) -> Any:
    return torch.cat([tensor.float().reshape(-1) for tensor in optimizer.shared_tensors()])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topology": "sharded"},
        {"overlap": 1},
        {"every": 4, "overlap": 1},
        {"apply_residual": False},
        {"every": 4, "apply_residual": False},
    ],
    ids=str,
)
def test_weights_loaded_on_all_ranks_stay(
    pair: list[gw.Node], write: Any, dtype: Any, options: Any
) -> None:
    outcomes = train(pair, write, dtype=dtype, **options)
    for before, own, after, shared, _ in outcomes:
        assert before > 0.5
        assert own == 0.0
        assert after < 0.1
        assert torch.equal(shared, outcomes[0][3])


@pytest.mark.parametrize("at", [0, 1])
def test_weights_loaded_before_the_first_step_stay(pair: list[gw.Node], at: int) -> None:
    for *_, after, _, weights in train(pair, load, at=at):
        assert after < 0.1
        assert weights.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}, {"overlap": 1}], ids=str)
def test_a_layer_that_begins_anew_on_all_ranks_stays(pair: list[gw.Node], options: Any) -> None:
    """The other layer, into which nobody has written, has residuals: these must not make the ranks differ."""

    def work(rank: int) -> Any:
        model = model_of(torch.float32)
        optimizer = gradwire.torch.share(
            model, torch.optim.SGD(model.parameters(), lr=0.05), node=pair[rank], **options
        )
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            if step == AT:
                optimizer.catch_up(60.0)
                with torch.no_grad():
                    model[2].weight.fill_(3.0)
                    for group in optimizer.param_groups:
                        group["lr"] = 1e-6
                model.load_state_dict(model.state_dict())
            optimizer.zero_grad()
            model(torch.randn(8, 12, generator=generator)).square().mean().backward()
            optimizer.step()
        optimizer.catch_up(60.0)
        with optimizer.shared_parameters():
            return weights_of(model[2]).max(), weights_of(model)

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(work, range(2)))
    for largest, shared in outcomes:
        assert 2.99 < largest < 3.01
        assert torch.equal(shared, outcomes[0][1])


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"every": 4}], ids=str)
def test_weights_loaded_on_one_rank_are_its_update(pair: list[gw.Node], options: Any) -> None:
    """With whole updates the mean of both ranks is in the middle."""
    outcomes = train(pair, load, ranks=(1,), density={"*": "dense"}, **options)
    if "mode" not in options:
        assert torch.equal(outcomes[0][3], outcomes[1][3])
    # An asynchronous rank may have the other's change already when it comes to that step.
    before = max(distance for distance, *_ in outcomes)
    for _, _, after, *_ in outcomes:
        assert 0.3 * before < after < 0.7 * before


def test_swapping_weights_for_an_evaluation_changes_nothing() -> None:
    def swap(model: Any, best: Any) -> None:
        own = [param.detach().clone() for param in model.parameters()]
        load(model, best)
        with torch.no_grad():
            for param, value in zip(model.parameters(), own, strict=True):
                param.copy_(value)

    def run(write: Any) -> list[Any]:
        with (
            gw.Node("127.0.0.1:0", secret=SECRET, node_id=1) as one,
            gw.Node("127.0.0.1:0", [one.address], secret=SECRET, node_id=2) as two,
        ):
            one.expected_peers = two.expected_peers = 1

            def work(rank: int) -> Any:
                model = model_of(torch.float32)
                optimizer = gradwire.torch.share(
                    model, torch.optim.SGD(model.parameters(), lr=0.05), node=[one, two][rank]
                )
                generator = torch.Generator().manual_seed(rank)
                for step in range(STEPS):
                    if step == AT and write:
                        swap(model, model_of(torch.float32).state_dict())
                    optimizer.zero_grad()
                    model(torch.randn(8, 12, generator=generator)).square().mean().backward()
                    optimizer.step()
                return shared_of(optimizer)

            with ThreadPoolExecutor(2) as pool:
                return list(pool.map(work, range(2)))

    for plain, swapped in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"topology": "sharded"}, {"every": 4}, {"apply_residual": False}], ids=str
)
def test_a_loop_that_restores_the_shared_weights_before_every_step_trains(
    pair: list[gw.Node], dtype: Any, options: Any
) -> None:
    """Meta-learning does so after its inner loop, and an evaluation with averaged weights."""
    start = weights_of(model_of(dtype))

    def work(rank: int) -> Any:
        model = model_of(dtype)
        optimizer = gradwire.torch.share(
            model, torch.optim.SGD(model.parameters(), lr=1.0), node=pair[rank], **options
        )
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            before = copy.deepcopy(model.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.5)
            inner.zero_grad()
            inputs = torch.randn(8, 12, generator=generator).to(dtype)
            model(inputs).square().mean().backward()
            inner.step()
            after = [param.detach().clone() for param in model.parameters()]
            load(model, before)
            for param, weights in zip(model.parameters(), after, strict=True):
                param.grad = param.detach() - weights
            optimizer.step()
        return shared_of(optimizer)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert torch.equal(first, second)
    assert (first - start).norm() > 0.6


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_the_workers_of_a_machine_write_weights(ranks: tuple[int, ...]) -> None:
    best = {name: 1.0 - value for name, value in model_of(torch.float32).state_dict().items()}
    target = torch.cat([tensor.reshape(-1) for tensor in best.values()])
    name = f"written-{threading.get_native_id()}"
    with ExitStack() as stack:
        node = stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET))
        teams = [stack.enter_context(LocalTeam(name, size=2, rank=rank)) for rank in (0, 1)]
        groups = gw.Groups.of(list(model_of(torch.float32).parameters()))
        lead = gw.Exchange(groups, node, min_peers=0, apply_residual=True, codec="dense")
        shares = [teams[0].lead(lead), teams[1].follow()]

        def work(rank: int) -> Any:
            model = model_of(torch.float32)
            optimizer = gradwire.torch.SharedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-4), shares[rank]
            )
            optimizer.join()
            for step in range(4):
                if step == 2 and rank in ranks:
                    load(model, best)
                before = float((weights_of(model) - target).abs().max())
                optimizer.zero_grad()
                model(torch.ones(3, 12)).square().mean().backward()
                optimizer.step()
            return before, weights_of(model)

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(work, (0, 1)))
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    distance = float((outcomes[0][1] - target).abs().max())
    assert distance < 0.1 if len(ranks) == 2 else distance > 0.3
