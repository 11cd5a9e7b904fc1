"""How four nodes train one model: PyTorch's ways, and gradwire's."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.torch import SharedOptimizer, register_threshold_hook

from .tasks import Batch, Task

LOCAL_STEPS = 20
PORT = 40123
WARMUP_STEPS = 20
# Tensors so small that a denser message costs nothing beside the others': biases and norms.
SMALL_NUMEL, SMALL_DENSITY = 5_000, 0.2
# What several steps alone have changed; after twenty it is shared twice: a large quantum, then a small one for more.
LOCAL_DENSITY = 0.02
# Dense steps before PowerSGD begins; its default of 1,000 would leave nothing to measure, and fewer than 2 it refuses.
POWERSGD_START = 2


class Method:
    """One node's part of a training.

    Args:
        task: what is trained.
        seed: of the initial parameters.
        addresses: of all nodes, by rank.
        rank: of this one.
        density: that gradwire's thresholds aim at.
        steps: of the whole training: the learning rate rises, and falls to nothing at its end.
    """

    uses_gloo = True

    def __init__(
        self,
        task: Task,
        seed: int,
        addresses: list[str],
        rank: int,
        density: float,
        steps: int,
    ) -> None:
        torch.manual_seed(seed)
        self.task = task
        self.addresses = addresses
        self.rank = rank
        self.density = density
        self.steps = steps
        self.model = task.model()
        self.optimizer = task.optimizer(self.model.parameters())
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.set_up()

    def set_up(self) -> None:
        """Do what the method needs before the first step."""

    def step(self, batch: Batch, number: int) -> None:
        """Take one step, which everybody takes with a batch of his own."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(number)
        self.optimizer.zero_grad()
        self.task.loss(self.forward, batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()

    @property
    def clip_norm(self) -> float:
        """Largest norm of the gradient that this node's optimiser sees."""
        return self.task.clip_norm

    def _schedule(self, number: int) -> float:
        """Return the factor of the learning rate: a linear rise, times half a cosine down to zero."""
        rise = min(1.0, (number + 1) / WARMUP_STEPS)
        return rise * 0.5 * (1.0 + math.cos(math.pi * number / self.steps))

    @property
    def forward(self) -> torch.nn.Module:
        """What computes the loss in training."""
        return self.model

    def evaluated(self) -> AbstractContextManager[None]:
        """Let the parameters be what this node knows of the shared ones for a while."""
        return nullcontext()

    def totals(self) -> dict[str, float]:
        """Return seconds spent in gradwire and the bytes of its messages, so far."""
        return {}

    def close(self) -> None:
        """End the node."""


class Dense(Method):
    """DistributedDataParallel as it is: float32 gradients, all-reduced."""

    def set_up(self) -> None:
        self.ddp = self.wrap()
        self.register()

    def wrap(self) -> DistributedDataParallel:
        """Return the model in DDP."""
        return DistributedDataParallel(self.model)

    @property
    def forward(self) -> torch.nn.Module:
        return self.ddp

    def register(self) -> None:
        """Register the communication hook."""


class Half(Dense):
    """With gradients in float16."""

    def register(self) -> None:
        self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


class PowerSGD(Dense):
    """With gradients as products of two narrow matrices."""

    matrix_rank: int

    def wrap(self) -> DistributedDataParallel:
        """Return the model in DDP with a single bucket.

        With several, the hook starts collectives from gloo's threads, in another order on every rank, and dies of it
        ("Received data size doesn't match expected size", torch 2.13).
        """
        first_bucket_bytes = dist._DEFAULT_FIRST_BUCKET_BYTES
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
        try:
            return DistributedDataParallel(self.model, bucket_cap_mb=1 << 10)
        finally:
            dist._DEFAULT_FIRST_BUCKET_BYTES = first_bucket_bytes

    def register(self) -> None:
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=self.matrix_rank,
            start_powerSGD_iter=POWERSGD_START,
        )
        self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class PowerSGD2(PowerSGD):
    matrix_rank = 2


class PowerSGD4(PowerSGD):
    matrix_rank = 4


class LocalSGD(Method):
    """Steps alone, and every so many the mean of all parameters, all-reduced."""

    def step(self, batch: Batch, number: int) -> None:
        super().step(batch, number)
        if (number + 1) % LOCAL_STEPS:
            return
        params = [param.detach() for param in self.model.parameters()]
        flat = torch.cat([param.flatten() for param in params])
        dist.all_reduce(flat)
        flat /= len(self.addresses)
        parts = flat.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.copy_(part.view_as(param))


class Hook(Dense):
    """DistributedDataParallel with gradwire's hook."""

    def register(self) -> None:
        (momentum,) = {group["momentum"] for group in self.optimizer.param_groups}
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.0
        # Not even one whole step, which at 10 Mbit/s takes as long as a hundred others.
        self.state = register_threshold_hook(
            self.ddp,
            threshold=gw.TargetDensity(self.density),
            momentum=momentum,
            warmup_steps=0,
        )

    @property
    def clip_norm(self) -> float:
        # Of gradients that have their momentum already.
        return self.task.clip_norm / (1.0 - self.state.momentum)

    def totals(self) -> dict[str, float]:
        stats = self.state.stats
        return {
            "encode_s": stats.encode_s,
            "wait_s": stats.gather_s,
            "apply_s": stats.apply_s,
            "message_bytes": stats.message_bytes,
            "messages": stats.steps,
        }


class Udp(Method):
    """gradwire's optimiser over its own transport: every step waits for everybody's message."""

    uses_gloo = False

    def set_up(self) -> None:
        # A threshold per tensor; nothing goes out whole: the biases and norms alone would be as large as a message.
        params = list(self.model.parameters())
        small = gw.TargetDensity(SMALL_DENSITY)
        groups = gw.Groups.of(
            params,
            threshold=gw.TargetDensity(self.target_density),
            thresholds={
                index: small for index, param in enumerate(params) if param.numel() < SMALL_NUMEL
            },
            dense_below=0,
            dense_one_dimensional=False,
        )
        own, *_ = addresses = [f"{one}:{PORT}" for one in self.addresses[self.rank :]]
        addresses += [f"{one}:{PORT}" for one in self.addresses[: self.rank]]
        self.node = gw.Node(own, addresses[1:], secret=bytes(range(32)))
        self.exchange = gw.Exchange(
            groups,
            self.node,
            min_peers=len(addresses) - 1,
            apply_residual=True,
            timeout_s=300.0,
            **self.options,
        )
        self.optimizer = SharedOptimizer(self.optimizer, self.exchange)
        self.optimizer.join()

    @property
    def clip_norm(self) -> float:
        return self.task.node_clip_norm

    @property
    def options(self) -> dict[str, Any]:
        """Of the exchange."""
        return {}

    @property
    def target_density(self) -> float:
        """That thresholds aim at."""
        return self.density

    def evaluated(self) -> AbstractContextManager[None]:
        return self.optimizer.shared_parameters()

    def totals(self) -> dict[str, float]:
        stats = self.exchange.stats
        return {
            "encode_s": stats.encode_s,
            "wait_s": stats.wait_s,
            "apply_s": stats.apply_s,
            "message_bytes": stats.sent_bytes,
            "messages": stats.steps,
        }

    def close(self) -> None:
        self.node.close()


class UdpThin(Udp):
    """With half the density, for links so slow that messages take longer than the arithmetic."""

    @property
    def target_density(self) -> float:
        return self.density / 2


class UdpAsync(Udp):
    """A step applies what has come and waits for nobody."""

    @property
    def options(self) -> dict[str, Any]:
        return {"mode": "async"}

    def evaluated(self) -> AbstractContextManager[None]:
        self.optimizer.catch_up()
        return super().evaluated()


class UdpEvery4(Udp):
    """Four steps alone, then one message, which travels during the next; the shared parameters have momentum."""

    @property
    def options(self) -> dict[str, Any]:
        return {"every": 4, "overlap": 1, "outer_momentum": self.task.outer_momentum}

    @property
    def clip_norm(self) -> float:
        return self.task.node_clip_norm / 2  # local steps lead away from each other

    @property
    def target_density(self) -> float:
        return LOCAL_DENSITY


METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "fp16": Half,
    "powersgd-2": PowerSGD2,
    "powersgd-4": PowerSGD4,
    "local-sgd": LocalSGD,
    "gradwire-hook": Hook,
    "gradwire-udp": Udp,
    "gradwire-thin": UdpThin,
    "gradwire-every4": UdpEvery4,
    "gradwire-async": UdpAsync,
}


# ---- what a link would need ------------------------------------------------------------------------------------------


def predicted_bytes(
    method: str, shapes: list[tuple[int, ...]], nodes: int, density: float
) -> float:
    """Return what one node must send per step, by arithmetic, without headers and acknowledgements.

    An all-reduce in a ring sends 2 (n - 1) / n of the data; gathering everybody's messages, and UDP, send one's own to
    each of the n - 1 others. A ternary message has about H(p) + p bits per element.
    """
    numel = sum(math.prod(shape) for shape in shapes)
    ring = 2 * (nodes - 1) / nodes
    message = _message_bytes(numel, density)
    powersgd: Callable[[int], float] = lambda rank: ring * 4 * _factored(shapes, rank)  # noqa: E731
    return {
        "dense": ring * 4 * numel,
        "fp16": ring * 2 * numel,
        "powersgd-2": powersgd(2),
        "powersgd-4": powersgd(4),
        "local-sgd": ring * 4 * numel / LOCAL_STEPS,
        "gradwire-hook": (nodes - 1) * message * 9 / 8,  # slots have room for an eighth more
        "gradwire-udp": (nodes - 1) * message,
        "gradwire-thin": (nodes - 1) * _message_bytes(numel, density / 2),
        "gradwire-async": (nodes - 1) * message,
        "gradwire-every4": (nodes - 1) * _message_bytes(numel, LOCAL_DENSITY) / 4,
    }[method]


def _message_bytes(numel: int, density: float) -> float:
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    return numel * (entropy + density) / 8


def _factored(shapes: list[tuple[int, ...]], rank: int) -> int:
    """Return the elements that PowerSGD exchanges: the factors of matrices where they are smaller, the rest whole."""
    total = 0
    for shape in shapes:
        rows = shape[0]
        columns = int(torch.Size(shape).numel() / rows)
        factors = (rows + columns) * min(rank, rows, columns)
        is_worth_it = len(shape) > 1 and factors * 2 < rows * columns
        total += factors if is_worth_it else rows * columns
    return total
