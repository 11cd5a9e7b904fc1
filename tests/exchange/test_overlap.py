"""overlap: a step's messages are on their way while the next steps are computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire.errors import PeerLost

from .cluster import FakeNode, cluster, refuse_updates, run_cluster, train_with_a_pause

NUMEL = 64
STEPS = 12
THRESHOLD = 2.0**-6


class Outcome(NamedTuple):
    shared: list[NDArray[np.float32]]  # after every step, and at the end
    residual: NDArray[np.float32]
    results: list[gw.StepResult]


def updates_of(node: int, steps: int = STEPS) -> list[NDArray[np.float32]]:
    """Return multiples of 2^-12, so that every sum of them is exact in float32."""
    rng = np.random.default_rng([23, node])
    return [(rng.integers(-256, 256, NUMEL) / 2.0**12).astype(np.float32) for _ in range(steps)]


def encoder(*, keeps: bool = True) -> gw.Encoder:
    return gw.Encoder(NUMEL, threshold=gw.FixedThreshold(THRESHOLD), keeps_residual=keeps)


RESIDUALS: dict[str, dict[str, Any]] = {
    "plain": {"apply_residual": False},
    "residual": {"apply_residual": True},
    "difference": {"apply_residual": True, "keeps_residual": False},
}
residuals = pytest.mark.parametrize("residual", RESIDUALS.values(), ids=RESIDUALS.keys())


def train(node: FakeNode, rank: int, *, moves: bool, **options: Any) -> Outcome:
    keeps = options.pop("keeps_residual", True)
    enc, params = encoder(keeps=keeps), np.ones(NUMEL, np.float32)
    share = gw.Exchange(enc, node, reduction="sum", min_peers=2, **options)
    share.join(params)
    shared, results = [], []
    for one in updates_of(rank):
        if moves:
            params += one
            results.append(share.step_moved(params))
        else:
            results.append(share.step(one, params))
        shared.append(share.shared(params)[0])
    if options.get("overlap"):
        assert share.catch_up(params) == len(share.members)
    shared.append(share.shared(params)[0])
    assert enc.has_residual == keeps
    if options.get("apply_residual"):
        share._replica.make_residual(params)
        np.testing.assert_array_equal(params, shared[-1] + enc.residual)
    return Outcome(shared, enc.residual, results)


@pytest.mark.parametrize("moves", [False, True], ids=["step", "step_moved"])
@residuals
@pytest.mark.parametrize(("every", "overlap"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_the_same_messages_are_applied_so_many_steps_later(
    every: int, overlap: int, residual: Any, moves: bool
) -> None:
    def outcomes(**options: Any) -> list[Outcome]:
        return run_cluster(lambda node, rank: train(node, rank, **options), seed=5)

    how = {"every": every, "moves": moves, **residual}
    waiting, overlapped = outcomes(**how), outcomes(**how, overlap=overlap)
    for one, other in zip(waiting, overlapped, strict=True):
        np.testing.assert_array_equal(one.residual, other.residual)
        np.testing.assert_array_equal(one.shared[-1], other.shared[-1])
        np.testing.assert_array_equal(other.shared, overlapped[0].shared)
        np.testing.assert_array_equal(other.shared[:overlap], np.ones((overlap, NUMEL)))
        if every == 1:
            np.testing.assert_array_equal(one.shared[: STEPS - 1], other.shared[1:STEPS])
        finished = [result for result in other.results if result.applied]
        assert [result.step for result in finished] == list(range(len(finished)))
        assert all(result.received == 2 for result in finished)
        assert len(finished) == (STEPS - overlap) // every


def waits_of(overlap: int) -> list[float]:
    """Return how long each node's steps waited in all, where now one is slow and now the other."""

    def work(node: FakeNode, rank: int) -> float:
        params = np.zeros(NUMEL, np.float32)
        share = gw.Exchange(encoder(), node, min_peers=1, overlap=overlap, digest_s=0.0)
        share.join(params)
        for count, one in enumerate(updates_of(rank)):
            node.cluster.compute(node, 1.5 if count % 4 == 2 * rank else 1.0)
            share.step(one, params)
        return share.stats.wait_s

    waits: list[float] = run_cluster(work, count=2, seed=1)
    return waits


def test_a_step_does_not_wait_for_what_comes_during_the_next() -> None:
    assert sum(waits_of(overlap=0)) >= 2.5
    assert sum(waits_of(overlap=1)) < 0.1


@residuals
def test_an_interrupted_step_counts_nothing_twice(residual: Any) -> None:
    def work(node: FakeNode, rank: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        keeps = residual.get("keeps_residual", True)
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(
            enc,
            node,
            reduction="sum",
            min_peers=1,
            timeout_s=2.0,
            overlap=1,
            apply_residual=residual["apply_residual"],
        )
        share.join(params)
        interruptions = train_with_a_pause(share, node, rank, params, updates_of(rank))
        for _ in range(interruptions):  # of calls that finished an earlier step only
            share.step_moved(params)
        share.leave(params)
        share._replica.make_residual(params)
        assert not enc.residual.any()
        return share.shared(params)[0], params

    put_in = sum(one.astype(np.float64) for rank in range(2) for one in updates_of(rank))
    for shared, params in run_cluster(work, count=2, seed=2):
        np.testing.assert_array_equal(shared, put_in)
        np.testing.assert_array_equal(params, put_in)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "difference"])
def test_a_checkpoint_holds_the_message_of_an_open_step(
    keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(0) as made:
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, made.node(1), min_peers=0, overlap=1, apply_residual=True)
        share.join(params)
        (one,) = updates_of(0, 1)
        params += one
        share.step_moved(params)
        state = share.state_dict()
        assert "messages of step 0 are on their way" in caplog.text
        np.testing.assert_array_equal(state["encoders"][0]["residual"], one)
        share._replica.make_residual(params)
        assert np.abs(enc.residual).max() < np.abs(one).max()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "difference"])
def test_a_message_that_no_node_takes_stays_in_the_parameters(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    with cluster(0) as made:
        node = made.node(1)
        enc, params = encoder(keeps=keeps), np.zeros(NUMEL, np.float32)
        share = gw.Exchange(enc, node, min_peers=0, overlap=1, apply_residual=True)
        share.join(params)
        (one,) = updates_of(0, 1)

        refuse_updates(node, monkeypatch)
        params += one
        with pytest.raises(gw.TooLarge):
            share.step_moved(params)
        monkeypatch.undo()
        np.testing.assert_array_equal(params, one)
        if keeps:
            np.testing.assert_array_equal(enc.residual, one)
        assert share.catch_up(params) == 0
        share.step_moved(params)
        share.leave(params)
        np.testing.assert_array_equal(params, one)
        np.testing.assert_array_equal(share.shared(params)[0], one)


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_what_other_nodes_have_sent_is_no_movement_of_this_node(topology: Any) -> None:
    """An update is measured without the messages that are added after the parameters have moved."""

    def work(node: FakeNode, rank: int) -> list[float]:
        enc = encoder(keeps=False)
        share = gw.Exchange(
            enc, node, min_peers=2, overlap=1, apply_residual=True, topology=topology
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        norms: list[float] = []
        share.agreement.limits_norms = True
        measure = share.agreement.measure

        def keep(step: int, samples: Any) -> None:
            listed = list(samples)
            norms.extend(float(np.linalg.norm(sample)) for sample in listed)
            measure(step, listed)

        share.agreement.measure = keep  # type: ignore[method-assign]
        for _ in range(6):
            params += np.float32(rank * 2.0**-5)
            share.step_moved(params)
        share.catch_up(params)
        return norms

    for rank, norms in enumerate(run_cluster(work, seed=4)):
        assert len(norms) >= 5
        assert norms == [pytest.approx(rank * 2.0**-5 * NUMEL**0.5)] * len(norms)


def test_a_node_that_is_last_to_catch_up_does_not_need_those_that_have_ended() -> None:
    """A step that is over needs no ``min_members``, which are for the steps to come."""

    def work(node: FakeNode, rank: int) -> NDArray[np.float32]:
        share = gw.Exchange(encoder(), node, min_peers=1, min_members=2, every=2, overlap=1)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for count, update in enumerate(updates_of(rank, 5)):
            # The step that sends is finished in this one, which learns that the other node has ended.
            node.cluster.compute(node, 1.0 if rank == 1 and count == 4 else 0.1)
            share.step(update, params)
        assert len(share.members) == 1 - rank
        assert share.catch_up(params) == 0
        node.cluster.close(node)
        return share.shared(params)[0]

    first, second = run_cluster(work, count=2, seed=1)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("overlap", [0, 1])
def test_connections_of_an_orderly_end_may_close_in_any_order(overlap: int) -> None:
    """With overlap the last step is open everywhere, so nobody's parameters lack what another one's have."""

    def work(node: FakeNode, rank: int) -> bool:
        share = gw.Exchange(encoder(), node, reduction="sum", min_peers=1, overlap=overlap)
        params = np.ones(NUMEL, np.float32)
        for update in updates_of(rank, 3):
            share.step(update, params)
        if rank == 1:
            node.cluster.compute(node, 1.0)
            node.cluster.close(node)
            return True

        def stats() -> Any:
            """Say that the other node has not acknowledged everything."""
            paths = [SimpleNamespace(peer=peer, backlog_records=1) for peer in node.peers]
            return SimpleNamespace(peers=paths)

        node.stats = stats  # type: ignore[method-assign]
        try:
            share.end()
        except PeerLost:
            return False
        return True

    assert run_cluster(work, count=2, seed=0)[0] is bool(overlap)
