"""What an optimiser is, judged by what it does."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from gradwire.agreement import Agreement  # noqa: E402
from gradwire.policy import default_policy  # noqa: E402
from gradwire.torch.judge import group_numbers, judge, pace_of  # noqa: E402

from .places import (  # noqa: E402
    Share,
    share,
)
from .test_contract import Relative  # noqa: E402
from .test_optimizer import flat, model, train  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_launcher")]


class Plain(torch.optim.AdamW):  # type: ignore[misc]
    """Another name."""


class AdamNamed(torch.optim.SGD):  # type: ignore[misc]
    """A name that says the contrary."""


class SignSGD(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.sign_()
        return super().step(closure)


class Logged(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Scratch(torch.optim.Optimizer):  # type: ignore[misc]
    """Adam without torch's: a state made at once, an integer as counter."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "n": 0,
                    "mean": torch.zeros_like(param),
                    "spread": [torch.zeros_like(param)],
                }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["n"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                state["spread"][0].lerp_(param.grad.square(), 0.01)
                mean = state["mean"] / (1 - 0.9 ** state["n"])
                spread = state["spread"][0] / (1 - 0.99 ** state["n"])
                param.sub_(group["lr"] * mean / (spread.sqrt() + 1e-8))
        return loss


class Momentum(torch.optim.Optimizer):  # type: ignore[misc]
    """SGD without torch's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, _closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                velocity = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                velocity.mul_(0.9).add_(param.grad + group["weight_decay"] * param)
                param.sub_(velocity, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):  # type: ignore[misc]
    """Another project's wrapper."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.inner.step(closure)


class NeedsClosure(torch.optim.SGD):  # type: ignore[misc]
    """Takes two steps for each, as sharpness-aware minimisation does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step(closure)


class SharpnessAware(torch.optim.Optimizer):  # type: ignore[misc]
    """Begins with gradients, and needs a closure for the second ones, as the usual SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        norm = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
        for param in params:
            param.add_(param.grad * (0.05 / norm))
            param.grad = None
        torch.enable_grad()(closure)()
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
        self.base_optimizer.step()


class ScheduleFree(Scratch):
    """Takes no step before train() was called."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        return super().step(closure)


KINDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "AdamW of another name": (Plain, True),
    "SGD of Adam's name": (lambda params: AdamNamed(params, lr=0.1), False),
    "sign SGD": (lambda params: SignSGD(params, lr=0.1), True),
    "SGD with a step of its own": (lambda params: Logged(params, lr=0.1, momentum=0.9), False),
    "Adam from scratch": (Scratch, True),
    "SGD from scratch": (Momentum, False),
    "relative steps": (Relative, True),
    "a wrapped Adam": (lambda params: Lookahead(torch.optim.Adam(params)), True),
    "a wrapped SGD": (lambda params: Lookahead(torch.optim.SGD(params, lr=0.1)), False),
    "a closure is needed": (lambda params: NeedsClosure(params, lr=0.1), False),
    "gradients and a closure are needed": (SharpnessAware, False),
    "train() is needed": (ScheduleFree, True),
    **{
        name: (getattr(torch.optim, name), True)
        for name in ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
    },
    "ASGD": (torch.optim.ASGD, False),
}


@pytest.mark.parametrize("size", [20, 2000], ids=["a small model", "a large one"])
@pytest.mark.parametrize(("make", "is_adaptive"), KINDS.values(), ids=KINDS)
def test_an_optimiser_is_judged_by_what_it_does(
    make: Callable[[Any], Any], is_adaptive: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    net = torch.nn.Linear(size, 100)
    before = [param.detach().clone() for param in net.parameters()]
    inner = make(net.parameters())
    state = copy.deepcopy(inner.state_dict())
    random = torch.get_rng_state()
    assert judge(inner).is_adaptive == is_adaptive
    assert str(state) == str(inner.state_dict()), "nothing is changed by it"
    assert all(map(torch.equal, before, net.parameters()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(param.grad is None for param in net.parameters())
    kind = "normalises its updates" if is_adaptive else "updates grow with its gradients"
    assert f"{type(inner).__name__} is an optimiser " in caplog.text
    assert kind in caplog.text
    assert "could not be tried out" not in caplog.text
    encoder = share(net, inner, density=None).exchange._groups.encoders[0]
    assert encoder.policy == default_policy(encoder.numel, is_adaptive=is_adaptive)
    assert is_adaptive == (encoder.policy != default_policy(encoder.numel)) or size == 20


def test_the_default_device_of_new_tensors_does_not_matter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizers = [make(model().parameters()) for make in (SignSGD, Logged)]
    with torch.device("meta"):  # as torch.set_default_device sets it
        assert [judge(each).is_adaptive for each in optimizers] == [True, False]
    assert "could not be tried out" not in caplog.text


def test_an_optimiser_that_cannot_be_tried_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Strange(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self, _closure: Any = None) -> Any:
            raise LookupError("no such thing")

    net = model()
    assert not judge(Strange(net.parameters(), {})).is_adaptive
    assert "Strange could not be tried out (LookupError: no such thing)" in caplog.text
    assert "update_scale=" in caplog.text


@pytest.mark.parametrize("make", [Plain, Scratch], ids=["derived", "from scratch"])
def test_others_adaptive_optimisers_have_the_factor_too(everywhere: Any, make: Any) -> None:
    def work(rank: int, share: Share) -> Any:
        net = model()
        optimizer = share(net, make(net.parameters()))
        train(net, optimizer, rank, range(3))
        return optimizer.update_scale

    assert 1.0 < everywhere("machines", work)[0] <= 2.0**0.5


class Decaying(torch.optim.Optimizer):  # type: ignore[misc]
    """Takes signs, as Lion; its weight decay is beside the update, or added to the gradient."""

    def __init__(self, params: Any, *, is_apart: bool) -> None:
        super().__init__(params, {"lr": 0.01, "weight_decay": 0.5})
        self.is_apart = is_apart

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, _closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if self.is_apart:
                    param.mul_(1.0 - group["lr"] * group["weight_decay"])
                else:
                    grad = grad + group["weight_decay"] * param
                param.sub_(group["lr"] * grad.sign())


class DecayingAdam(torch.optim.Adam):
    """Has a decay of its own before Adam's step, and none in it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        loss = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return loss


class LoggedAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def with_a_group_that_decays_not(params: Any) -> list[dict[str, Any]]:
    first, *others = params
    return [
        {"params": [first], "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"params": others, "weight_decay": 0.0, "decoupled_weight_decay": False},
    ]


@pytest.mark.parametrize(
    ("make", "decays_apart"),
    [
        (lambda params: torch.optim.AdamW(params), True),
        (lambda params: torch.optim.Adam(params, weight_decay=0.1), False),
        (lambda params: torch.optim.RAdam(params, weight_decay=0.1), False),
        (
            lambda params: torch.optim.NAdam(params, weight_decay=0.1, decoupled_weight_decay=True),
            True,
        ),
        (lambda params: torch.optim.Adafactor(params, weight_decay=0.1), True),
        (lambda params: Decaying(params, is_apart=True), True),
        (lambda params: Decaying(params, is_apart=False), False),
        (lambda params: DecayingAdam(params, weight_decay=0.1), True),
        (lambda params: LoggedAdam(params, weight_decay=0.1), False),
        (lambda params: torch.optim.Adam(with_a_group_that_decays_not(params)), True),
    ],
)
def test_weight_decay_beside_the_update_has_no_factor(make: Any, decays_apart: bool) -> None:
    assert judge(make(model().parameters())).decays_apart is decays_apart


class Lion(Decaying):
    """Takes the signs of a running mean."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, is_apart=True)
        for group in self.param_groups:
            group["betas"] = (0.9, 0.99)


class OwnAdam(Scratch):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["betas"] = (0.9, 0.99)


@pytest.mark.parametrize(
    ("make", "momentum"),
    [
        (lambda params: torch.optim.AdamW(params, betas=(0.8, 0.95)), 0.8),
        (lambda params: torch.optim.NAdam(params), 0.9),
        (Plain, 0.9),
        (OwnAdam, 0.9),
        (lambda params: Lookahead(torch.optim.Adam(params)), 0.9),
        (lambda params: torch.optim.Adam(params, betas=(0.0, 0.99)), 0.0),
        (lambda params: torch.optim.RMSprop(params), 0.0),
        (lambda params: torch.optim.RMSprop(params, momentum=0.8), 0.8),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 0.0),
        (Lion, 0.0),
    ],
)
def test_momentum_counts_where_the_size_of_single_gradients_divides_it(
    make: Any, momentum: float
) -> None:
    assert judge(make(model().parameters())).momentum == momentum


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, lambda params, **_: Decaying(params, is_apart=True)]
)
def test_the_factor_multiplies_what_the_gradient_causes(make: Any) -> None:
    net, plain, still = model(), model(), model()
    shared = share(net, make(net.parameters(), weight_decay=0.5), update_scale=3.0, codec="dense")
    alone = make(plain.parameters(), weight_decay=0.5)
    for each in (net, plain):
        for param in each.parameters():
            param.grad = torch.full_like(param, 0.25)
    shared.step()
    alone.step()
    rate, decay = alone.param_groups[0]["lr"], alone.param_groups[0]["weight_decay"]
    shrunk = flat(still) * (1.0 - rate * decay)
    torch.testing.assert_close(
        flat(net) - shrunk, 3.0 * (flat(plain) - shrunk), rtol=1e-3, atol=1e-6
    )
    assert shared.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (lambda params: torch.optim.AdamW(params, weight_decay=0.5), 0.5),
        (lambda params: Decaying(params, is_apart=True), 0.5),
        (Relative, 0.5),
        (lambda params: torch.optim.SGD(params, lr=0.1), 1.0),
    ],
    ids=["AdamW", "own", "without a rate", "SGD"],
)
def test_adaptive_steps_and_decay_are_shorter_by_what_an_outer_momentum_adds(
    make: Any, scale: float
) -> None:
    net, plain = model(), model()
    shared = share(net, make(net.parameters()), every=15)
    alone = make(plain.parameters())
    begin = flat(net)
    for each in (net, plain):
        for param in each.parameters():
            param.grad = torch.full_like(param, 0.25)
    shared.step()
    alone.step()
    assert shared.result.is_local
    assert shared.update_scale == scale
    torch.testing.assert_close(
        flat(net) - begin, scale * (flat(plain) - begin), rtol=1e-3, atol=1e-6
    )
    assert shared.param_groups[0].get("weight_decay") == alone.param_groups[0].get("weight_decay")


@pytest.mark.parametrize("resting", [0, 1])
def test_the_factor_stays_what_it_is_where_a_group_rests_for_a_while(resting: int) -> None:
    nets = [model() for _ in range(2)]
    optimizers = [
        torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters()}])
        for net in nets
    ]
    judgement = judge(optimizers[0])
    agreements = [Agreement() for _ in nets]
    generator = torch.Generator().manual_seed(0)
    factors = []
    for step in range(280):
        sketches = []
        for net, optimizer, agreement in zip(nets, optimizers, agreements, strict=True):
            agreement.start(judgement.momentum)
            optimizer.param_groups[resting]["lr"] = 0.0 if 60 <= step < 80 else 0.001
            for param in net.parameters():
                param.grad = 1.0 + torch.randn(param.shape, generator=generator)
            before = flat(net)
            agreement.set_pace(*pace_of(optimizer, judgement, 1.0))
            optimizer.step()
            agreement.measure(step, [(flat(net) - before).double().numpy()])
            measured = agreement.take_own()
            if agreement.takes(step) and measured is not None and measured.sketch is not None:
                sketches.append(measured.sketch)
        agreements[0].add(sketches)
        factors.append(agreements[0].factor)
    # From whole updates, which agree more than gradients do, it would be 1.02.
    assert factors[59] > 1.1
    assert factors[279] == pytest.approx(factors[59], abs=0.05)


def test_many_groups_with_rates_of_their_own_are_numbered_in_little_time() -> None:
    params = [torch.zeros(1) for _ in range(20_000)]
    groups = [
        {"params": params[index : index + 4], "lr": index % 16_000, "betas": (0.9, 0.999)}
        for index in range(0, 20_000, 4)
    ]
    optimizer: Any = SimpleNamespace(param_groups=groups)
    begin_s = time.process_time()
    numbers = group_numbers(optimizer, [*params, torch.zeros(1)])
    assert time.process_time() - begin_s < 1.0  # not if each were compared with all others
    assert numbers == [index // 4 % 4000 for index in range(20_000)] + [-1]


def test_a_compiled_step_has_the_factor_and_leaves_the_rates() -> None:
    """As some recipes compile it, before it is shared: then the compiled step calls the factor's hooks."""
    nets = [model(), model()]
    for net, compiles in zip(nets, (False, True), strict=True):
        inner = torch.optim.Adam(net.parameters(), lr=0.003)
        if compiles:
            inner.step = torch.compile(inner.step, backend="eager")
        train(net, share(net, inner, update_scale=1.5), 0, range(4))
        assert inner.param_groups[0]["lr"] == 0.003
    torch.testing.assert_close(flat(nets[0]), flat(nets[1]), rtol=1e-4, atol=1e-6)
