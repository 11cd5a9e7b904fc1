"""Encoders and parameters on a device, on a stand-in for it: the same messages and parameters as in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.exchange import Group
from gradwire.exchange import groups as exchange_groups

from ..cuda_arrays import is_emulated
from ..fake_cuda import fake_cuda, to_device, to_host
from ..seeds import seeds
from .cluster import FakeNode, cluster

NUMEL = 40
THRESHOLD = 2.0**-6
Array = NDArray[np.float32]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with fake_cuda():
        yield


def update(node_id: int, count: int) -> Array:
    """Return multiples of 2^-12, so that every sum is exact."""
    rng = np.random.default_rng([61, node_id, count])
    return (rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32)


def encoder(where: str, **options: Any) -> gw.Encoder:
    return gw.Encoder(NUMEL, gw.FixedThreshold(THRESHOLD), device=where, **options)


def groups(where: str) -> gw.Groups:
    """Return two coded tensors and one that goes out whole."""
    sizes = (20, 15, 5)
    made = [
        gw.Encoder(size, gw.FixedThreshold(THRESHOLD), device=where, key=key)
        for key, size in enumerate(sizes)
    ]
    return gw.Groups([Group(one, (at,), is_dense=at == 2) for at, one in enumerate(made)])


def tensors(flat: Array) -> list[Array]:
    return [part.copy() for part in np.split(flat, [20, 35])]


def placed(values: Any, where: str) -> Any:
    if isinstance(values, list):
        return [placed(one, where) for one in values]
    return to_device(values) if where == "cuda" else values.copy()


def back(values: Any) -> Array:
    if isinstance(values, list):
        return np.concatenate([back(one) for one in values])
    return to_host(values)


def residual_of(coder: gw.Encoder | gw.Groups) -> Array:
    encoders = coder.encoders if isinstance(coder, gw.Groups) else [coder]
    return np.concatenate([one.state_dict()["residual"] for one in encoders])


def train(node: FakeNode, where: str, has_groups: bool, **options: Any) -> tuple[Any, ...]:
    """Train ten steps and leave; return parameters and published messages."""
    coder = groups(where) if has_groups else encoder(where)
    share = gw.Exchange(coder, node, min_peers=2, digest_s=0.01, **options)
    shape = tensors if has_groups else np.copy
    params = placed(shape(np.zeros(NUMEL, np.float32)), where)
    for count in range(10):
        share.step(placed(shape(update(node.peer.id, count)), where), params)
        node.cluster.compute(node, 0.1)
    share.leave(params)
    assert not residual_of(coder).any()
    node.cluster.close(node)
    return back(params).tobytes(), dict(node.updates)


@pytest.mark.parametrize("has_groups", [False, True], ids=["one encoder", "groups"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"codec": "dense"}], ids=str)
@pytest.mark.parametrize("seed", seeds(2))
def test_a_device_makes_no_difference(seed: int, options: Any, has_groups: bool) -> None:
    outcomes = []
    for places in (("cpu", "cpu", "cpu"), ("cuda", "cpu", "cuda")):
        with cluster(seed) as world:
            workers = []
            for node_id, where in enumerate(places, 1):
                node = world.node(node_id)
                workers.append(
                    world.start(node, lambda n=node, w=where: train(n, w, has_groups, **options))
                )
            world.run()
        outcomes.append([worker.result for worker in workers])
    for host, device in zip(*outcomes, strict=True):
        assert host[1].keys() == device[1].keys()
        for step in range(10):
            assert host[1][step] == device[1][step]


def alone(coder: Any, **options: Any) -> tuple[gw.Exchange, FakeNode]:
    with cluster(0) as world:
        node = world.node(1)
    return gw.Exchange(coder, node, min_peers=0, **options), node


def test_an_update_that_is_not_finite_does_not_begin_the_step() -> None:
    coder = encoder("cuda")
    share, node = alone(coder)
    params = placed(np.zeros(NUMEL, np.float32), "cuda")
    bad = update(1, 0)
    bad[3] = np.nan
    with pytest.raises(gw.NonFiniteUpdate, match="first at index 3"):
        share.step(placed(bad, "cuda"), params)
    assert node.updates == {}
    bad[3] = 0.0
    result = share.step(None, params)
    assert result.step == 0
    np.testing.assert_array_equal(back(params) + residual_of(coder), bad)


def test_the_other_groups_get_back_what_they_had_encoded() -> None:
    coder = groups("cuda")
    share, node = alone(coder)
    params = placed(tensors(np.zeros(NUMEL, np.float32)), "cuda")
    bad = update(1, 0)
    bad[25] = np.inf
    with pytest.raises(gw.NonFiniteUpdate):
        share.step(placed(tensors(bad), "cuda"), params)
    assert node.updates == {}
    bad[25] = 0.0
    np.testing.assert_array_equal(residual_of(coder), bad)


def test_an_update_that_does_not_fit_one_group_is_taken_by_none() -> None:
    coder = groups("cuda")
    share, node = alone(coder)
    params = placed(tensors(np.zeros(NUMEL, np.float32)), "cuda")
    wrong = tensors(update(1, 0))
    wrong[1] = wrong[1][:-1].copy()
    with pytest.raises(ValueError, match=r"key 1 of tensors \[1\]: update has 14 elements"):
        share.step(placed(wrong, "cuda"), params)
    assert node.updates == {}
    assert not residual_of(coder).any()


def test_a_step_that_finds_no_memory_for_copies_of_its_messages_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coder = groups("cuda")
    share, node = alone(coder)
    params = placed(tensors(np.zeros(NUMEL, np.float32)), "cuda")

    def copied(_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as little_memory:
        little_memory.setattr(exchange_groups, "host_message", copied)
        with pytest.raises(MemoryError):
            share.step(placed(tensors(update(1, 0)), "cuda"), params)
    assert node.updates == {}
    np.testing.assert_array_equal(residual_of(coder), update(1, 0))
    assert share.step(None, params).step == 0
    np.testing.assert_array_equal(back(params) + residual_of(coder), update(1, 0))


def test_a_checkpoint_moves_between_host_and_device() -> None:
    params = placed(np.zeros(NUMEL, np.float32), "cuda")
    share, _ = alone(encoder("cuda"))
    share.step(placed(update(1, 0), "cuda"), params)
    state = share.state_dict()
    for where in ("cpu", "cuda"):
        coder = encoder(where)
        other, _ = alone(coder)
        other.load_state_dict(state)
        assert other.next_step == 1
        left = update(1, 0) - back(params)
        np.testing.assert_array_equal(residual_of(coder), left)


@pytest.mark.parametrize(
    "refuse",
    [
        lambda share, params: share.join(params),
        lambda share, params: share.step(placed(update(1, 0), "cuda"), params),
    ],
    ids=["join", "step"],
)
def test_what_needs_host_memory_is_refused_before_anything_is_sent(
    refuse: Callable[[gw.Exchange, Any], Any],
) -> None:
    """Local steps need torch's tensors, or host memory."""
    if is_emulated():
        pytest.skip("the emulated device's tensors stand in for torch's")
    coder = encoder("cuda")
    share, node = alone(coder, every=2)
    with pytest.raises(TypeError, match="host memory"):
        refuse(share, placed(np.zeros(NUMEL, np.float32), "cuda"))
    assert node.updates == {}
    assert not residual_of(coder).any()


def test_a_message_that_was_refused_on_the_device_says_why() -> None:
    """Also where it is applied in host memory, which asks for its buffer."""
    bad = np.full(NUMEL, np.nan, np.float32)
    message = encoder("cuda").encode(placed(bad, "cuda"))
    with pytest.raises(gw.NonFiniteUpdate):
        gw.apply(message, np.zeros(NUMEL, np.float32))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_an_update_that_is_not_where_the_parameters_are_is_refused(where: str) -> None:
    if not is_emulated():
        pytest.skip("only torch's tensors on a device are taken by encoders without a residual")
    coder = encoder(where, keeps_residual=False)
    share, node = alone(coder, apply_residual=True)
    params = placed(np.zeros(NUMEL, np.float32), where)
    other = "cuda" if where == "cpu" else "cpu"
    with pytest.raises(ValueError, match=r"the update is .*, the parameters are .*: move one"):
        share.step(placed(update(1, 0), other), params)
    assert node.updates == {}
    assert not back(params).any()


def test_parameters_on_a_device_need_an_encoder_there() -> None:
    share, _ = alone(encoder("cpu"))
    params = placed(np.zeros(NUMEL, np.float32), "cuda")
    with pytest.raises(ValueError, match='give it device="cuda:0"'):
        share.join(params)
