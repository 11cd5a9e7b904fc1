"""How several nodes train one model: PyTorch's ways, and gradwire's."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.torch import register_threshold_hook, share

from .tasks import Batch, Task

MOMENTUM = 0.9
ADAMW_LEARNING_RATE = 0.001
LOCAL_STEPS = 20
WARMUP_STEPS = 20
# Dense steps before PowerSGD begins: the fewest it accepts; its default of 1,000 would leave nothing to measure.
POWERSGD_START = 2


class Method:
    """One node's part of a training of ``steps`` steps; ``density`` is the target of the hook's thresholds."""

    uses_gloo = True
    is_adaptive = False  # AdamW in the place of SGD with momentum

    def __init__(
        self, task: Task, seed: int, addresses: list[str], rank: int, density: float, steps: int
    ) -> None:
        torch.manual_seed(seed)
        self.task, self.addresses, self.rank = task, addresses, rank
        self.density, self.steps = density, steps
        self.clip_norm = task.clip_norm
        self.model = self.forward = task.model()
        params = self.model.parameters()
        if self.is_adaptive:
            self.learning_rate = ADAMW_LEARNING_RATE
            self.optimizer: Any = torch.optim.AdamW(params, lr=self.learning_rate)
        else:
            self.learning_rate = task.learning_rate
            self.optimizer = torch.optim.SGD(params, lr=self.learning_rate, momentum=MOMENTUM)
        self.set_up()

    def set_up(self) -> None:
        """Do what the method needs before the first step."""

    def step(self, batch: Batch, number: int) -> None:
        """Take one step; every node has a batch of its own."""
        # A linear rise, times half a cosine down to zero.
        rise = min(1.0, (number + 1) / WARMUP_STEPS)
        factor = rise * 0.5 * (1.0 + math.cos(math.pi * number / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor
        self.optimizer.zero_grad()
        self.task.loss(self.forward, batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()

    def evaluated(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are the shared ones, as far as this node has them."""
        return nullcontext()

    def totals(self) -> dict[str, float]:
        """Return seconds spent in gradwire and the bytes of its messages, so far."""
        return {}

    def close(self) -> None:
        """End the node."""


class Dense(Method):
    """DistributedDataParallel as it is: float32 gradients, all-reduced."""

    def set_up(self) -> None:
        self.forward = self.ddp = DistributedDataParallel(self.model)
        self.register()

    def register(self) -> None:
        """Register the communication hook."""


class Half(Dense):
    """DistributedDataParallel with gradients in float16."""

    def register(self) -> None:
        self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


class PowerSGD2(Dense):
    """DistributedDataParallel with gradients as products of two narrow matrices.

    In a single bucket: with several, the hook starts collectives from gloo's threads, in another order on every rank,
    and fails ("Received data size doesn't match expected size", torch 2.13).
    """

    matrix_rank = 2

    def set_up(self) -> None:
        first_bucket_bytes = dist._DEFAULT_FIRST_BUCKET_BYTES
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
        self.forward = self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=1 << 10)
        dist._DEFAULT_FIRST_BUCKET_BYTES = first_bucket_bytes
        options = {"start_powerSGD_iter": POWERSGD_START}
        state = powerSGD_hook.PowerSGDState(None, self.matrix_rank, **options)
        self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class PowerSGD4(PowerSGD2):
    matrix_rank = 4


class LocalSGD(Method):
    """Steps alone, and every so many the mean of all parameters, all-reduced."""

    def step(self, batch: Batch, number: int) -> None:
        super().step(batch, number)
        if (number + 1) % LOCAL_STEPS:
            return
        params = list(self.model.parameters())
        flat = torch.nn.utils.parameters_to_vector(params).detach()
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat / len(self.addresses), params)


class Hook(Dense):
    """DistributedDataParallel with gradwire's hook."""

    def register(self) -> None:
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.0
        # No dense step: at 10 Mbit/s one takes as long as a hundred others.
        policy = gw.TargetDensity(self.density)
        options = {"threshold": policy, "momentum": MOMENTUM, "warmup_steps": 0}
        self.state = register_threshold_hook(self.ddp, **options)
        self.clip_norm /= 1.0 - MOMENTUM  # of gradients that have their momentum already

    def totals(self) -> dict[str, float]:
        stats = self.state.stats
        spent_s = stats.encode_s + stats.gather_s + stats.apply_s
        return {"spent_s": spent_s, "message_bytes": stats.message_bytes}


class Udp(Method):
    """gradwire's ``share`` as it is: every step waits for the messages of all others."""

    uses_gloo = False
    options: ClassVar[dict[str, Any]] = {}  # further ones of ``share``

    def set_up(self) -> None:
        if not self.is_adaptive and self.task.are_independent:
            self.clip_norm *= math.sqrt(len(self.addresses))
        others = [*self.addresses[: self.rank], *self.addresses[self.rank + 1 :]]
        self.node = gw.Node(self.addresses[self.rank], others, secret=bytes(range(32)))
        options = {"min_peers": len(others), "timeout_s": 300.0, **self.options}
        self.optimizer = share(self.model, self.optimizer, node=self.node, **options)
        self.optimizer.join()

    def evaluated(self) -> AbstractContextManager[None]:
        return self.optimizer.shared_parameters()

    def totals(self) -> dict[str, float]:
        stats = self.optimizer.exchange.stats
        spent_s = stats.encode_s + stats.wait_s + stats.apply_s
        return {"spent_s": spent_s, "message_bytes": stats.sent_bytes}

    def close(self) -> None:
        self.node.close()


class UdpThin(Udp):
    """With half the density, for links so slow that messages take longer than the arithmetic."""

    options: ClassVar[dict[str, Any]] = {"density": 0.005}


class UdpAsync(Udp):
    """A step applies the messages that have arrived and waits for none."""

    options: ClassVar[dict[str, Any]] = {"mode": "async"}

    def evaluated(self) -> AbstractContextManager[None]:
        self.optimizer.catch_up()
        return super().evaluated()


class UdpEvery4(Udp):
    """Four steps alone, then one message, which travels during the next."""

    options: ClassVar[dict[str, Any]] = {"every": 4, "overlap": 1}

    def set_up(self) -> None:
        super().set_up()
        if not self.is_adaptive:
            self.clip_norm /= 2  # local steps diverge


class AdamWDense(Dense):
    """DistributedDataParallel with AdamW."""

    is_adaptive = True


class AdamWUdp(Udp):
    is_adaptive = True


class AdamWEvery4(UdpEvery4):
    is_adaptive = True
