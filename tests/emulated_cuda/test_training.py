"""Training on the device: the bits of training in host memory, and no copies but those of messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw

from ..cuda_arrays import is_emulated, torch
from ..exchange.cluster import FakeNode, cluster

host_torch = pytest.importorskip("torch")

from gradwire.torch import SharedOptimizer, ThresholdState  # noqa: E402
from gradwire.torch.gather import Gathered  # noqa: E402
from gradwire.torch.hook import _Job  # noqa: E402
from gradwire.torch.staging import Staging  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.torch,
]

SHAPES = ((40, 30), (30,), (7, 5))
NUMEL = 40 * 30 + 30 + 7 * 5
STEPS = 9

Array = NDArray[Any]


class Outcome(NamedTuple):
    params: bytes
    shared: bytes
    residual: bytes
    updates: dict[int, bytes]


def values(node: int, step: int, scale: float = 2.0**-7) -> list[Array]:
    rng = np.random.default_rng([node, step])
    return [rng.normal(0.0, scale, shape).astype(np.float32) for shape in SHAPES]


def placed(arrays: list[Array], where: str) -> list[Any]:
    tensors = [host_torch.from_numpy(one.copy()) for one in arrays]
    return [one.cuda() for one in tensors] if where == "cuda" else tensors


def flat(arrays: Any) -> bytes:
    return b"".join(
        np.asarray(one.cpu() if hasattr(one, "cpu") else one).tobytes() for one in arrays
    )


def pcie_bytes() -> int:
    """Return the bytes copied so far, which the emulated device counts."""
    if not is_emulated():
        return 0
    from .device import RUNTIME

    return RUNTIME.pcie_bytes()


def encoder(where: str, **options: Any) -> gw.Encoder:
    chosen: dict[str, Any] = {"threshold": gw.FixedThreshold(2.0**-6), **options}
    return gw.Encoder(NUMEL, device=where, **chosen)


def train(
    node: FakeNode, rank: int, where: str, *, moves: bool, late: bool, **options: Any
) -> Outcome:
    """Train, from other initial parameters on every node; a late node comes in the middle."""
    if late:
        node.cluster.compute(node, 3.0)
    chosen = {"min_peers": 1, "digest_s": 0.01, **options}
    keeps, resyncs = chosen.pop("keeps_residual", True), chosen.pop("resyncs", False)
    enc = encoder(where, keeps_residual=keeps)
    share = gw.Exchange(enc, node, **chosen)
    params = placed(values(rank, 1000), where)
    share.join(params, equalize=True)
    for step in range(STEPS * options.get("every", 1)):
        if share.next_step >= STEPS:
            break
        update = placed(values(rank, step), where)
        if resyncs and rank == 1 and step == 2:
            share.resync(params)
            assert enc.has_residual == keeps
        if moves:
            for one, added in zip(params, update, strict=True):
                one += added
            share.step_moved(params)
        else:
            share.step(update, params)
        node.cluster.compute(node, 1.0)
    if "overlap" in options:
        share.catch_up(params)
    if rank == 1 and not late:
        assert share.stats.digests
    assert enc.has_residual == keeps
    state = share.state_dict()
    again = gw.Exchange(encoder(where), node, **chosen)
    again.load_state_dict(state)
    again._replica.begin_shared(params, is_new=True)
    residual = np.concatenate([one["residual"] for one in state["encoders"]])
    done = flat(params), flat(share.shared(params)), residual.tobytes()
    node.cluster.close(node)
    return Outcome(*done, dict(node.updates))


@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"apply_residual": True},
        {"apply_residual": True, "keeps_residual": False},
        {"apply_residual": True, "keeps_residual": False, "every": 2, "outer_momentum": 0.5},
        {"apply_residual": True, "keeps_residual": False, "resyncs": True},
        {"apply_residual": True, "codec": "dense"},
        {"apply_residual": True, "every": 3},
        {"every": 2, "outer_momentum": 0.5},
        {"apply_residual": True, "every": 2, "outer_momentum": 0.5},
        {"topology": "sharded", "apply_residual": True},
        {"topology": "sharded", "outer_momentum": 0.5},
    ],
    ids=str,
)
def test_training_has_the_bits_of_training_in_host_memory(options: Any, moves: bool) -> None:
    outcomes = []
    for places in (("cpu",) * 3, ("cuda", "cpu", "cuda")):
        with cluster(5) as world:
            workers = []
            for rank, where in enumerate(places, 1):
                node = world.node(rank)
                late = rank == 3 and not options.keys() & {"overlap", "resyncs"}

                def work(
                    n: Any = node, r: int = rank, w: str = where, late: bool = late
                ) -> Outcome:
                    return train(n, r, w, moves=moves, late=late, **options)

                workers.append(world.start(node, work))
            world.run()
        outcomes.append([worker.result for worker in workers])
    for host, device in zip(*outcomes, strict=True):
        assert len(host.updates) > 3
        for name in host._fields[:3]:
            one, other = (np.frombuffer(getattr(each, name), np.float32) for each in (host, device))
            np.testing.assert_array_equal(one, other, name)
        assert host == device
        assert host.shared == outcomes[0][0].shared


class Descent(host_torch.optim.Optimizer):
    """Gradient descent on tensors of the device, which are none of torch's own."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__([host_torch.nn.Parameter(host_torch.zeros(1))], {"lr": 1.0})
        self.param_groups[0]["params"] = params
        for one in params:
            one.grad = None

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for one in self.param_groups[0]["params"]:
            one.sub_(one.grad)


def shared_training(node: FakeNode, rank: int, where: str, dtype: str = "float32") -> list[bytes]:
    made = placed(values(1, 1000), where)
    params = [one.to(getattr(host_torch, dtype)) for one in made]
    share = gw.Exchange(encoder(where), node, min_peers=1, apply_residual=True, digest_s=0)
    optimizer = SharedOptimizer(
        Descent(params), share, buffers=placed([np.ones(3, np.float32)], where)
    )
    found, copied = [], []
    for step in range(STEPS):
        for one, grad in zip(params, placed(values(rank, step), where), strict=True):
            one.grad = grad.to(one.dtype)
        before = pcie_bytes()
        optimizer.step()
        copied.append(pcie_bytes() - before)
        found.append(flat(one.to(host_torch.float32) for one in params))
        messages = optimizer.result.sent_bytes + optimizer.result.received_bytes
        if step and where == "cuda":
            # The kernels write the own message, of sent_bytes, into pinned memory.
            assert copied[-1] + optimizer.result.sent_bytes <= 1.2 * messages
    with optimizer.shared_parameters():
        found.append(flat(one.to(host_torch.float32) for one in params))
    found.append(flat(optimizer.shared_tensors()))
    found.append(flat([one["residual"] for one in optimizer.state_dict()["gradwire"]["encoders"]]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_s_steps_copy_nothing_but_messages(dtype: str) -> None:
    outcomes = []
    for places in (("cpu", "cpu"), ("cuda", "cpu")):
        with cluster(5) as world:
            workers = []
            for rank, where in enumerate(places, 1):
                node = world.node(rank)
                workers.append(
                    world.start(
                        node, lambda n=node, r=rank, w=where: shared_training(n, r, w, dtype)
                    )
                )
            world.run()
        outcomes.append([worker.result for worker in workers])
    assert outcomes[0] == outcomes[1]


class FakeGather:
    """The messages of two ranks, of which the other one's are given."""

    rank, sent_bytes, second_collectives = 1, 0, 0

    def __init__(self, other: list[bytes]) -> None:
        self.other, self.payloads = other, []  # type: ignore[var-annotated]

    def __call__(self, step: int, _index: int, payload: Any, is_nonfinite: bool) -> list[Gathered]:
        self.payloads.append(bytes(payload))
        other = self.other[step] if self.other else payload
        return [Gathered(memoryview(other), False), Gathered(payload, is_nonfinite)]


def hooked(where: str, dtype: str, momentum: float, other: list[bytes]) -> tuple[list[bytes], ...]:
    """Let the hook average the buckets of several steps; return its messages, its averages and its state."""
    params = placed(values(1, 1000), where)
    options: dict[str, Any] = {"momentum": momentum, "warmup_steps": 0}
    options["parameters"] = [(str(place), param) for place, param in enumerate(params)]
    state = ThresholdState(threshold=gw.FixedThreshold(2.0**-6), **options)
    gather: Any = FakeGather(other)
    averages, copied = [], []
    for step in range(STEPS):
        grads = np.concatenate([one.ravel() for one in values(len(other) + 1, step)])
        if step == 4:
            grads[3] = np.nan
        buffer = placed([grads], where)[0].to(getattr(host_torch, dtype))
        job = _Job(0, True, step, params, Staging(buffer), gather, host_torch.futures.Future())
        before = pcie_bytes()
        state._process(job)
        copied.append(pcie_bytes() - before)
        assert job.done.value() is buffer or not isinstance(job.done.value(), Exception)
        if other and where == "cuda" and step not in (0, 4):  # the first makes the encoders
            own, others = len(gather.payloads[-1]), len(other[step])
            assert copied[-1] + own <= 1.2 * (own + others)
        # Host and device spell NaN with other bits.
        averages.append(flat([buffer.to(host_torch.float32).nan_to_num_(nan=1e30)]))
    assert state.stats.skipped_steps == 1
    saved = state.state_dict()["residuals"]["parameters"]
    left = [
        flat([one["residual"]]) + flat([one["velocity"]] if momentum else [])
        for one in saved.values()
    ]
    return gather.payloads, averages, left


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_hook_copies_nothing_but_messages(dtype: str, momentum: float) -> None:
    other, _, _ = hooked("cpu", dtype, momentum, [])
    other[4] = other[3]
    assert hooked("cuda", dtype, momentum, other) == hooked("cpu", dtype, momentum, other)


def test_memory_of_gradwire_s_own_follows_torch_s_stream() -> None:
    enc, stream = encoder("cuda"), torch().cuda.Stream()
    message = gw.Encoder(NUMEL, 1.0).encode(np.ones(NUMEL, np.float32))
    with torch().cuda.stream(stream):
        torch().cuda._sleep(1)
        gw.apply(message, enc.residual)
        sent = enc.encode()
    assert sent.count == NUMEL
