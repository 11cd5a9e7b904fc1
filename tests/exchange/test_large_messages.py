"""Messages larger than a node takes at once: in slices, with the same guarantees as whole messages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import slices
from gradwire.exchange import Group, protocol
from gradwire.exchange import exchange as exchange_module
from gradwire.exchange.protocol import TAG_NUMBERS, Kind
from gradwire.slices import LEAST_SLICE_BYTES
from gradwire.transport import Limits

from ..seeds import seeds
from . import test_membership, test_sharded
from .cluster import FakeNode

SECRET = bytes(range(32))
NUMEL = 20_000
# A dense message of NUMEL elements has ten times as many bytes.
SMALL = Limits(message_bytes_max=8_000, send_log_bytes=40_000, receive_bytes=40_000)
MEDIUM = Limits(message_bytes_max=30_000, send_log_bytes=100_000, receive_bytes=100_000)

histories = pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in seeds(12)],
)


# --- histories --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the nodes of a cluster take 70 bytes at once; yield how many slices each update of a node had."""
    monkeypatch.setattr(slices, "SLICE_BYTES", 70)
    monkeypatch.setattr(protocol, "LEAST_SLICE_BYTES", 70)
    sizes: list[int] = []
    publish = FakeNode.publish

    def counted(self: FakeNode, buffer: Any, tag: int = 0, to: Any = None) -> Any:
        kind = tag // TAG_NUMBERS
        assert kind == Kind.HELLO or len(bytes(buffer)) <= 70
        sizes.append(kind)
        return publish(self, buffer, tag, to)

    monkeypatch.setattr(FakeNode, "publish", counted)
    yield sizes
    assert sizes.count(Kind.SLICE) > 100


@histories
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(
    "how", [{}, {"overlap": 1, "moves": True, "apply_residual": True}], ids=str
)
@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_a_node_that_dies_after_some_slices_has_sent_all_or_nothing(
    seed: int, how: Any, topology: str
) -> None:
    test_sharded.deaths(seed, {**how, "topology": topology})


@histories
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_nodes_come_and_leave_in_the_middle_of_messages(seed: int, topology: str) -> None:
    test_sharded.come_and_leave(seed, {"codec": "dense", "topology": topology})


@histories
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("event", ["death", "leave", "cut", "join"])
def test_asynchronous_nodes_lose_nothing_of_messages_in_slices(seed: int, event: str) -> None:
    test_sharded.asynchronous(seed, test_sharded.ASYNC_MESH, event)


@histories
@pytest.mark.usefixtures("small_slices")
def test_a_cut_in_the_middle_of_a_message_ends_with_identical_replicas(seed: int) -> None:
    test_membership.test_a_broken_connection_ends_with_identical_replicas(seed, {"codec": "dense"})


# --- real nodes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(stack: ExitStack, limits: list[Limits | None]) -> list[gw.Node]:
    nodes: list[gw.Node] = []
    for each in limits:
        seeds_so_far = [node.address for node in nodes]
        node = gw.Node(
            "127.0.0.1:0", seeds_so_far, secret=SECRET, limits=each, node_id=len(nodes) + 1
        )
        nodes.append(stack.enter_context(node))
    return nodes


def update(rank: int, step: int) -> NDArray[np.float32]:
    """Return multiples of 2^-12, so that every sum is exact."""
    rng = np.random.default_rng([61, rank, step])
    return (rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32)


LIMITS = {
    "two alike": [SMALL, SMALL],
    "two unequal": [SMALL, None],
    "three unequal": [SMALL, MEDIUM, None],
}
WAYS: dict[str, dict[str, Any]] = {
    "threshold": {},
    "dense": {"codec": "dense"},
    "bfloat16": {"codec": "bfloat16"},
    "sharded, dense": {"codec": "dense", "topology": "sharded"},
    "sharded, threshold": {"topology": "sharded"},
    "async, dense": {"codec": "dense", "mode": "async"},
    "overlap, dense": {"codec": "dense", "overlap": 1},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_every_way_sends_and_leaves_with_messages_of_any_size(
    stack: ExitStack, limits: Any, how: dict[str, Any]
) -> None:
    nodes = connected(stack, limits)
    steps = 6

    def train(rank: int) -> tuple[NDArray[np.float32], gw.Exchange]:
        encoder = gw.Encoder(NUMEL, gw.FixedThreshold(2.0**-9))
        share = gw.Exchange(
            encoder, nodes[rank], reduction="sum", min_peers=len(nodes) - 1, timeout_s=30.0, **how
        )
        params = np.zeros(NUMEL, np.float32)
        for step in range(steps):
            share.step(update(rank, step), params)
        if rank > 0:  # one after another, each with all that is left
            while len(share.members) > rank:
                share.step(np.zeros(NUMEL, np.float32), params)
            share.leave(params)
            nodes[rank].drain(10.0)
            return params, share
        while share.members:
            share.step(np.zeros(NUMEL, np.float32), params)
        share.leave(params)
        return params, share

    with ThreadPoolExecutor(len(nodes)) as pool:
        found = list(pool.map(train, range(len(nodes))))
    put_in = sum(
        update(rank, step).astype(np.float64) for rank in range(len(nodes)) for step in range(steps)
    )
    np.testing.assert_allclose(
        found[0][0], put_in, rtol=0, atol=1e-6 if "bfloat16" in str(how) else 0
    )
    assert all(node.stats().rejected_records == 0 for node in nodes)


def test_a_dense_pattern_may_be_larger_than_a_message_of_the_transport(stack: ExitStack) -> None:
    nodes = connected(stack, [SMALL, None])

    def train(rank: int) -> list[NDArray[np.float32]]:
        embedding = np.zeros((NUMEL // 4, 4), np.float32)
        weights = np.zeros(5_000, np.float32)
        groups = gw.Groups(
            [
                Group(gw.Encoder(NUMEL, key=0), (0,), is_dense=True),
                Group(gw.Encoder(5_000, gw.TargetDensity(0.01), key=1), (1,)),
            ]
        )
        share = gw.Exchange(groups, nodes[rank], min_peers=1)
        for step in range(4):
            share.step(
                [update(rank, step).reshape(-1, 4), update(rank, step)[:5_000]],
                [embedding, weights],
            )
        return [embedding, weights]

    with ThreadPoolExecutor(2) as pool:
        (first, second) = pool.map(train, range(2))
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1].tobytes() == second[1].tobytes()
    mean = sum(update(rank, step) for rank in range(2) for step in range(4)) / 2
    np.testing.assert_array_equal(first[0].reshape(-1), mean)


@pytest.mark.parametrize("limits", [[SMALL, None], [None, SMALL]], ids=["donor", "newcomer"])
def test_a_snapshot_may_be_larger_than_a_message_of_the_transport(
    stack: ExitStack, limits: Any
) -> None:
    nodes = connected(stack, limits)

    def train(rank: int) -> NDArray[np.float32]:
        share = gw.Exchange(gw.Encoder(NUMEL), nodes[rank], min_peers=1, timeout_s=30.0)
        params = np.full(NUMEL, float(rank), np.float32)
        # So many arrays that the snapshot's header is larger, too.
        share.join(np.split(params, 1_000), equalize=True)
        return params

    with ThreadPoolExecutor(2) as pool:
        assert not np.concatenate(list(pool.map(train, range(2)))).any()


def test_a_node_that_takes_too_little_is_refused(stack: ExitStack) -> None:
    [node] = connected(stack, [Limits(message_bytes_max=1_000)])
    with pytest.raises(
        ValueError, match=f"message_bytes_max of the node is 1000.*{LEAST_SLICE_BYTES}"
    ):
        gw.Exchange(gw.Encoder(10), node)


def test_dense_messages_that_no_memory_holds_are_refused_with_the_numbers(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "physical_bytes", lambda: 1_000_000)
    nodes = connected(stack, [None, None])
    # 80,000 bytes a step, the last four of each of two nodes.
    gw.Exchange(gw.Encoder(NUMEL), nodes[1], codec="dense")
    with pytest.raises(MemoryError, match="400,000 bytes, and 4 of each of 2 nodes"):
        gw.Exchange(gw.Encoder(5 * NUMEL), nodes[1], codec="dense")
    gw.Exchange(gw.Encoder(5 * NUMEL), nodes[1])


def test_a_slice_of_a_message_that_cannot_be_takes_no_memory_and_ends_nobody(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = connected(stack, [None, None])
    share = gw.Exchange(gw.Encoder(10), nodes[0], min_peers=0, timeout_s=5.0)
    params = np.zeros(10, np.float32)
    nodes[1].wait_for_peers(1, timeout_s=10.0)
    claim = (0).to_bytes(8, "little") + (1 << 40).to_bytes(8, "little") + bytes(8) + b"GRDW"
    nodes[1].publish(claim, tag=Kind.SLICE * TAG_NUMBERS)
    nodes[1].drain(10.0)
    share.step(np.ones(10, np.float32), params)
    assert "a message of 1099511627776 bytes, where none has more" in caplog.text
