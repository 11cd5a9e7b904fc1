"""A stand-in for the module ``gradwire._cuda``: what its stub promises, with the codec of the CPU behind it.

Its device is as inconvenient as a real one: its arrays cannot be viewed by NumPy, work is only queued and is done when
somebody waits, and an update that was not finite is told of when the message is first looked at, a refused buffer being
a `BufferError`. What it cannot show is whether the real module does what its stub says; for that, the tests that use it
run with the real one on the emulated device as well.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import arrays

from .cuda_arrays import is_emulated, on_device, torch

CUDA = 2  # DLPack's number of the device type


class Queue:
    """The device's only stream."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def wait(self) -> None:
        while self.work:
            self.work.popleft()()


QUEUE = Queue()


class DeviceArray:
    """A flat array on the device; ``memory`` is for the tests and the module, nobody else can see into it."""

    def __init__(self, memory: NDArray[Any]) -> None:
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def dtype(self) -> str:
        return self.memory.dtype.name

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def host(self) -> NDArray[Any]:
        """Return a copy, as torch's ``cpu`` does; waits."""
        QUEUE.wait()
        return self.memory.copy()


def memory_of(arrays_: Any) -> Any:
    """Return what a device function works on; refuses arrays on the CPU, as the module does."""
    if isinstance(arrays_, (list, tuple)):
        return [memory_of(one) for one in arrays_]
    if not isinstance(arrays_, DeviceArray):
        raise ValueError("update is not on a CUDA device, but this encoder or target is on cuda:0")
    return arrays_.memory


class CudaMessage:
    def __init__(self) -> None:
        self.made: gw.Message | None = None
        self.error: Exception | None = None

    def check(self) -> None:
        QUEUE.wait()
        if self.error is not None:
            raise self.error

    def __bytes__(self) -> bytes:
        self.check()
        assert self.made is not None
        return bytes(self.made)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.check()
        return getattr(self.made, name)


class Encoder:
    """The CPU's encoder, hidden behind the queue."""

    capacity = 0

    def __init__(
        self,
        device: int,
        numel: int,
        float64: bool,
        policy: dict[str, Any],
        threshold: float,
        trend: float,
        deviation: float,
        supply: int,
        keeps_residual: bool,
    ) -> None:
        assert device == 0
        assert keeps_residual
        self._cpu = gw.Encoder(numel, policy_of(policy), dtype="float64" if float64 else "float32")
        assert (self._cpu.threshold, self._cpu._memory.policy_state) == (
            threshold,
            (trend, deviation, supply),
        )

    def encode(
        self,
        update: Any,
        key: int,
        skip_nonfinite: bool,
        dense: str,
        partition: gw.Partition | None,
        max_bytes: int,
        most_changed: int,
        outs: Any,
        stream: int,
        messages: list[CudaMessage],
    ) -> None:
        assert outs is None
        assert (max_bytes, most_changed) == (0, self._cpu.numel)
        assert stream == 0
        memory = None if update is None else memory_of(update)
        messages += [CudaMessage() for _ in range(1 if partition is None else partition.parts)]
        kind: Any = {"": False, "own": True}.get(dense, dense)

        def work() -> None:
            self._cpu.key = key
            self._cpu.on_nonfinite = "skip" if skip_nonfinite else "raise"
            try:
                made = self._cpu.encode(memory, dense=kind, parts=partition or 1)
            except gw.NonFiniteUpdate as error:
                for message in messages:
                    message.error = error
                return
            for message, one in zip(messages, made, strict=True):
                message.made = one

        QUEUE.work.append(work)

    def check_update(self, update: Any, stream: int) -> None:
        assert stream == 0
        self._cpu.check_update(memory_of(update))

    def state(self) -> dict[str, Any]:
        QUEUE.wait()
        state, stats = self._cpu.state_dict(), self._cpu.stats
        totals = {name: getattr(stats, name) for name in stats.__dataclass_fields__}
        trend, deviation, supply = state["course"]
        kept = {name: state[name] for name in ("threshold", "step", "changed_at")}
        return {**kept, "trend": trend, "deviation": deviation, "supply": supply, **totals}

    def set_state(
        self,
        threshold: float,
        step: int,
        changed_at: int,
        trend: float,
        deviation: float,
        supply: int,
    ) -> None:
        QUEUE.wait()
        state = self._cpu.state_dict()
        new = {"threshold": threshold, "step": step, "changed_at": changed_at}
        self._cpu.load_state_dict({**state, **new, "course": (trend, deviation, supply)})

    def set_policy(self, policy: dict[str, Any]) -> None:
        QUEUE.wait()
        self._cpu.set_policy(policy_of(policy))

    def residual_to_host(self) -> NDArray[Any]:
        QUEUE.wait()
        return self._cpu.residual.copy()

    def residual_from_host(self, residual: NDArray[Any]) -> None:
        QUEUE.wait()
        self._cpu.residual[...] = residual

    @property
    def residual(self) -> DeviceArray:
        return DeviceArray(self._cpu.residual)


def policy_of(words: dict[str, Any]) -> Any:
    """Return the policy whose numbers these are; rules as in csrc/cuda/policy.h."""
    fixed, target_density = 0, 3
    if words["rule"] == fixed:
        return gw.FixedThreshold(words["minimum"])
    assert words["rule"] == target_density
    return gw.TargetDensity(words["density"], minimum=words["minimum"])


def apply_many(
    messages: list[Any], target: Any, scale: float, part: Any, device: int, stream: int
) -> None:
    assert (device, stream) == (0, 0)
    memory = memory_of(target)
    # Bytes of the host are read at once, those of the device when their turn comes.
    parts = [
        one if isinstance(one, CudaMessage) else gw.Message.parse(bytes(one)) for one in messages
    ]

    def work() -> None:
        made = [one.made if isinstance(one, CudaMessage) else one for one in parts]
        gw.apply_many([one for one in made if one is not None], memory, scale, part=part)

    QUEUE.work.append(work)


def to_device(array: NDArray[Any]) -> Any:
    """Return a copy on the device."""
    if is_emulated():
        return on_device(torch().from_numpy(array))
    return DeviceArray(array.copy())


def to_host(array: Any) -> NDArray[Any]:
    """Return a copy of what is on the device, or in host memory already."""
    if isinstance(array, np.ndarray):
        return array.copy()
    host: NDArray[Any] = array.cpu().numpy() if is_emulated() else array.host()
    return host


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Let gradwire find the stand-in where it looks for the compiled module, unless that is there, emulated."""
    if is_emulated():
        yield
        return
    module: Any = ModuleType("gradwire._cuda")
    module.Encoder, module.CudaMessage, module.DeviceArray = Encoder, CudaMessage, DeviceArray
    module.apply_many = apply_many
    module.unusable = lambda: ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gradwire._cuda", module)
        arrays.cuda_problem.cache_clear()
        yield
    arrays.cuda_problem.cache_clear()
