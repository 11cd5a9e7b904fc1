"""The factor of an adaptive optimiser's updates, from sketches that the nodes exchange."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.agreement import Agreement, Sketch, sample_of
from gradwire.exchange.protocol import Note

from .exchange.cluster import FakeNode, cluster, run_cluster

STEPS = 60


def updates(agreement: float, nodes: int, numel: int, step: int) -> list[np.ndarray]:
    """Return updates of length 1 of which the given part is common, and the rest each node's own noise."""
    # As with momentum, what is common changes slowly: asynchronous nodes are at different steps.
    common = np.random.default_rng(step // 10).standard_normal(numel, np.float32)
    own = np.random.default_rng([step, numel]).standard_normal((nodes, numel), np.float32)
    own *= np.float32(math.sqrt((1.0 - agreement) / numel))
    own += np.float32(math.sqrt(agreement / numel)) * common
    return list(own)


def sketch_of(agreement: Agreement, step: int, sample: np.ndarray) -> Sketch | None:
    """Return the sketch of an update that is finite."""
    agreement.measure(step, [sample])
    own = agreement.take_own()
    assert own is not None
    return own.sketch


def factor_of(agreement: float, nodes: int) -> float:
    return math.sqrt(1.0 / (agreement + (1.0 - agreement) / nodes))


@pytest.mark.parametrize(
    ("nodes", "agreement", "numel"),  # of 150,000 elements a sample is taken
    [
        *itertools.product([2, 8], [0.0, 0.1, 0.5, 1.0], [1_000]),
        *[(2, 0.1, 150_000), (2, 1.0, 150_000), (8, 0.1, 150_000)],
    ],
)
def test_sketches_give_the_factor_of_whole_updates(
    nodes: int, agreement: float, numel: int
) -> None:
    measured = Agreement()
    measured.start()
    for step in range(STEPS):
        sketches = []
        for update in updates(agreement, nodes, numel, step):
            assert measured.is_due()
            sample = sample_of([update[: numel // 3], update[numel // 3 :]])
            sketch = sketch_of(measured, step, sample)
            assert (sketch is not None) == measured.takes(step)
            if sketch is not None:
                sketches.append(Sketch.decode(json.loads(json.dumps(sketch.encode()))))
        measured.add(sketches)
    assert measured.factor == pytest.approx(factor_of(agreement, nodes), rel=0.04)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("agreement", [0.0, 0.1, 1.0])
def test_momentum_does_not_hide_the_noise_of_gradients(agreement: float, momentum: float) -> None:
    nodes, numel = 8, 20_000
    measured = [Agreement() for _ in range(nodes)]
    plain = Agreement()
    for own in measured:
        own.start(momentum)
    plain.start()
    means = np.zeros((nodes, numel))
    common = np.random.default_rng(0).standard_normal(numel)
    for step in range(STEPS):
        noise = np.random.default_rng(step + 1).standard_normal((nodes, numel))
        gradients = math.sqrt(agreement) * common + math.sqrt(1.0 - agreement) * noise
        means = momentum * means + (1.0 - momentum) * gradients
        # A rate that rises at first, as in a warm-up.
        rate = min(1.0, (step + 1) / 20) * 0.01
        moved = -rate * means / (1.0 - momentum ** (step + 1))
        sketches = [
            sketch_of(own, step, update) for own, update in zip(measured, moved, strict=True)
        ]
        measured[0].add([sketch for sketch in sketches if sketch is not None])
        sketches = [sketch_of(plain, step, update) for update in moved]
        plain.add([sketch for sketch in sketches if sketch is not None])
    right = factor_of(agreement, nodes)
    # Where all agree, the error of the sketches is the same in both norms.
    assert measured[0].factor == pytest.approx(right, rel=0.01 if agreement == 1.0 else 0.1)
    # Of whole updates most of the noise is averaged away already.
    assert plain.factor < 0.8 * right or agreement != 0.1


SCHEDULES: dict[str, Callable[[int], tuple[float, float]]] = {  # rate and momentum of a step
    "warm-up": lambda step: (0.01 * min(1.0, (step + 1) / 20), 0.9),
    "a tenth": lambda step: (0.01 if step < 60 else 0.001, 0.9),
    "ten times": lambda step: (0.001 if step < 60 else 0.01, 0.9),
    "one cycle": lambda step: (
        0.01 * math.sin((step + 1) / 40) ** 2,
        0.9 + 0.05 * math.cos(step / 20),
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_does_not_change_the_factor(
    schedule: Callable[[int], tuple[float, float]],
) -> None:
    nodes, numel = 8, 20_000
    measured = [Agreement() for _ in range(nodes)]
    for own in measured:
        own.start(schedule(0)[1])
    means = np.zeros((nodes, numel))
    common = np.random.default_rng(0).standard_normal(numel)
    factors = []
    for step in range(120):
        rate, momentum = schedule(step)
        noise = np.random.default_rng(step + 1).standard_normal((nodes, numel))
        gradients = math.sqrt(0.1) * common + math.sqrt(0.9) * noise
        means = momentum * means + (1.0 - momentum) * gradients
        sketches = []
        for own, mean in zip(measured, means, strict=True):
            own.set_pace(rate, momentum)
            sketches.append(sketch_of(own, step, -rate * mean / (1.0 - momentum ** (step + 1))))
        measured[0].add([sketch for sketch in sketches if sketch is not None])
        factors.append(measured[0].factor)
    assert factors[20:] == pytest.approx([factor_of(0.1, nodes)] * 100, rel=0.15)


def test_what_an_update_adds_is_unknown_without_the_one_before_but_its_norm_is_not() -> None:
    def begun() -> Agreement:
        agreement = Agreement(limits_norms=True)
        agreement.start(0.9)
        return agreement

    updates_of_steps = np.random.default_rng(0).standard_normal((3, 500))
    whole = begun()
    sketches = [sketch_of(whole, step, update) for step, update in enumerate(updates_of_steps)]
    assert None not in sketches  # the first update repeats nothing
    late = begun()
    late.measure(1, [updates_of_steps[1]])
    own = late.take_own()
    assert own is not None
    assert own.norm == pytest.approx(np.linalg.norm(updates_of_steps[1]))
    assert own.sketch is None
    # A step that the optimiser left out changes nothing, and a checkpoint continues exactly.
    assert sketch_of(late, 1, np.zeros(500)) is None
    continued = begun()
    continued.load_previous(late.previous())
    for agreement in (late, continued):
        sketch = sketch_of(agreement, 2, updates_of_steps[2])
        assert sketch is not None
        assert sketches[2] is not None
        assert sketch.encode() == sketches[2].encode()
    # A worker more, or more parameters: what was before is of another kind.
    late.measure(3, [updates_of_steps[0], updates_of_steps[1]])
    own = late.take_own()
    assert own is not None
    assert own.sketch is None


def test_a_sketch_is_small_and_nothing_else_is_taken_for_one() -> None:
    measured = Agreement()
    measured.start()
    sketch = sketch_of(measured, 0, np.random.default_rng(0).standard_normal(1_000))
    assert sketch is not None
    document = sketch.encode()
    assert len(json.dumps(document)) < 800
    count, squares, scale, text = document
    for bad in (
        [0, squares, scale, text],
        [count, math.inf, scale, text],
        [count, squares, math.nan, text],
        [count, squares, 1e300, text],
        [count, squares, scale, text[:-4]],
    ):
        with pytest.raises(ValueError, match="a sketch of"):
            Sketch.decode(bad)
    with pytest.raises(ValueError, match=r"[Bb]ase64|padding"):
        Sketch.decode([count, squares, scale, "?"])


def test_an_update_that_is_not_finite_is_not_measured() -> None:
    measured = Agreement()
    measured.start()
    measured.measure(0, [np.array([1.0, math.nan])])
    assert measured.take_own() is None


@pytest.mark.parametrize("apply_residual", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topology": "sharded"},
        {"overlap": 1},
        {"mode": "async"},
        {"every": 2},
        {"every": 2, "topology": "sharded", "overlap": 1},
        {"every": 2, "mode": "async"},
    ],
    ids=str,
)
def test_all_nodes_have_the_same_factor(options: Any, apply_residual: bool) -> None:
    numel, nodes = 4_000, 3
    # Of what two steps add up to, twice as much is common.
    agreement = 0.25 if "every" not in options else 0.4

    def work(node: FakeNode, rank: int) -> list[float]:
        share = gw.Exchange(
            gw.Encoder(numel, gw.TargetDensity(0.05)),
            node,
            min_peers=nodes - 1,
            apply_residual=apply_residual,
            **options,
        )
        share.agreement.start()
        params = np.zeros(numel, np.float32)
        share.join(params)
        factors = []
        for step in range(STEPS):
            params += updates(0.25, nodes, numel, step)[rank]
            share.step_moved(params)
            factors.append(share.agreement.factor)
        return factors

    factors = run_cluster(work, count=nodes, seed=3)
    if options.get("mode") != "async":
        assert factors[0] == factors[1] == factors[2]
    for of_node in factors:
        assert of_node[-1] == pytest.approx(factor_of(agreement, nodes), rel=0.1)


@pytest.mark.parametrize("apply_residual", [False, True])
def test_a_checkpoint_and_a_late_node_have_the_factor(apply_residual: bool) -> None:
    def share_of(node: FakeNode, peers: int) -> gw.Exchange:
        encoder = gw.Encoder(1_000, gw.TargetDensity(0.05))
        share = gw.Exchange(encoder, node, min_peers=peers, apply_residual=apply_residual)
        share.agreement.start()
        return share

    def work(node: FakeNode, rank: int) -> tuple[list[float], list[float]]:
        share = share_of(node, 1 if rank < 2 else 0)
        params = np.zeros(1_000, np.float32)
        while rank == 2 and len(node.peers) < 2:
            node.receive(0.01)
        joined = share.join(params)
        first = share.agreement.state()
        while share.next_step < 40:
            params += updates(0.5, 3, 1_000, share.next_step)[rank]
            share.step_moved(params)
        restored = share_of(node, 0)
        restored.load_state_dict(share.state_dict())
        assert restored.agreement.state() == share.agreement.state()
        return (first if joined.is_late else []), share.agreement.state()

    states = run_cluster(work, count=3, seed=5)
    assert states[0][1] == states[1][1] == states[2][1]
    assert states[2][0] == [] or states[2][0][0] > 0.0


@pytest.mark.parametrize("topology", ["mesh", "sharded"])
def test_a_node_that_comes_back_leaves_the_factor_as_it_is(topology: Any) -> None:
    """What is subtracted of its next update must not be its last one, which is of the time before."""
    generator = np.random.default_rng(0)
    moments = [np.zeros(1_000, np.float32)]
    for gradient in generator.standard_normal((STEPS, 1_000), np.float32):
        moments.append(np.float32(0.9) * moments[-1] + np.float32(0.1) * gradient)

    def work(node: FakeNode, rank: int) -> list[float]:
        encoder = gw.Encoder(1_000, gw.TargetDensity(0.05))
        share = gw.Exchange(
            encoder, node, min_peers=1, apply_residual=True, topology=topology, codec="dense"
        )
        share.agreement.start(0.9)
        params = np.zeros(1_000, np.float32)
        share.join(params)
        factors = []
        while share.next_step < 30:
            if rank == 1 and len(factors) == 10:
                share.resync(params)
            params += moments[share.next_step + 1]  # on both nodes the same
            share.step_moved(params)
            factors.append(share.agreement.factor)
        return factors

    for factors in run_cluster(work, count=2, seed=5):
        assert max(factors) < 1.02


# ---- outliers --------------------------------------------------------------------------------------------------------

BAD_STEP, BAD_RANK, BAD_FACTOR = 41, 1, 1_000.0
NUMEL = 2_000


def trained(nodes: int, factor_at: Any, **options: Any) -> list[tuple[np.ndarray, int]]:
    """Return every node's shared parameters after all steps, and how many of its updates were shortened.

    Args:
        nodes: number of nodes.
        factor_at: of a rank and a step: what the node's update of that step is multiplied by.
        options: of the exchange.
    """

    def work(node: FakeNode, rank: int) -> tuple[np.ndarray, int]:
        policy = gw.TargetDensity(0.05)
        share = gw.Exchange(gw.Encoder(NUMEL, policy), node, min_peers=nodes - 1, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(STEPS):
            params += np.float32(factor_at(rank, step)) * updates(0.5, nodes, NUMEL, step)[rank]
            share.step_moved(params)
        share.leave(params)
        return share.shared(params)[0], share.stats.shortened

    return run_cluster(work, count=nodes, seed=4)


@pytest.mark.parametrize("start", [40, 41, 42, 43])
def test_a_late_node_s_first_updates_are_limited_as_the_members_are(start: int) -> None:
    """Also where it comes in between two steps in which the members tell each other."""
    reached = [0]

    def work(node: FakeNode, rank: int) -> int:
        encoder = gw.Encoder(NUMEL, gw.TargetDensity(0.05))
        share = gw.Exchange(encoder, node, min_peers=2, topology="sharded", limit_outliers=True)
        params = np.zeros(NUMEL, np.float32)
        first = share.join(params).step
        for step in range(first, STEPS):
            node.cluster.compute(node, 0.1)
            factor = BAD_FACTOR if rank == 3 and step == first else 1.0
            params += np.float32(factor) * updates(0.5, 4, NUMEL, step)[rank]
            share.step_moved(params)
            reached[0] = max(reached[0], step)
        share.leave(params)
        return share.stats.shortened

    with cluster(4) as world:
        workers = []
        for rank in range(4):
            if rank == 3:
                world.run(until=lambda: reached[0] >= start)
            node = world.node(10 * (rank + 1))
            workers.append(world.start(node, lambda node=node, rank=rank: work(node, rank)))
        world.run()
    assert [worker.result for worker in workers] == [0, 0, 0, 1]


def outliers_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "bad data or a broken machine" in message]


def bad_once(rank: int, step: int) -> float:
    return BAD_FACTOR if (rank, step) == (BAD_RANK, BAD_STEP) else 1.0


WAYS: list[dict[str, Any]] = [
    {},
    {"apply_residual": True},
    {"topology": "sharded", "apply_residual": True},
    {"overlap": 1},
    {"every": 3, "outer_momentum": 0.5},
    {"codec": "dense"},
    {"mode": "async", "apply_residual": True},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_node_with_one_broken_update_does_not_move_the_others(
    options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    good = trained(3, lambda _rank, _step: 1.0, limit_outliers=True, **options)
    assert [count for _, count in good] == [0, 0, 0]
    assert outliers_in(caplog) == []
    limited = trained(3, bad_once, limit_outliers=True, **options)
    assert [count for _, count in limited] == [0, 1, 0]
    distance = float(np.linalg.norm(limited[0][0] - good[0][0]))
    assert distance < 0.25 * np.linalg.norm(good[0][0])
    if options.get("mode") != "async":
        assert all(np.array_equal(params, limited[0][0]) for params, _ in limited)
        names = [text.partition("the update of ")[2].split()[0] for text in outliers_in(caplog)]
        assert sorted(names) == ["127.0.0.1:1020", "127.0.0.1:1020", "this"]
    free = trained(3, bad_once, **options)
    assert np.linalg.norm(free[0][0] - good[0][0]) > 5.0 * np.linalg.norm(good[0][0])


def test_a_node_that_is_always_far_too_long_is_shortened_always_and_named_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    results = trained(
        4, lambda rank, _step: 100.0 if rank == BAD_RANK else 1.0, limit_outliers=True
    )
    # The first update has no norms to be compared with.
    assert [count for _, count in results] == [0, STEPS - 1, 0, 0]
    assert len(outliers_in(caplog)) == 4 * (1 + int(math.log2(STEPS)))


@pytest.mark.parametrize("jump", [45, 48])
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}], ids=str)
def test_steps_that_grow_on_all_nodes_are_whole_again_after_the_first(
    jump: int, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")

    # A rate that is 0 at first, and jumps later.
    def factor_at(_rank: int, step: int) -> float:
        return 0.0 if step == 0 else 1.0 if step < jump else 50.0

    results = trained(3, factor_at, limit_outliers=True, **options)
    assert [count for _, count in results] == [1, 1, 1]
    assert outliers_in(caplog) == []


@pytest.mark.parametrize(
    ("nodes", "options"), [(2, {}), (3, {"reduction": "sum"})], ids=["two nodes", "a sum"]
)
def test_neither_two_nodes_nor_a_sum_have_outliers(nodes: int, options: Any) -> None:
    results = trained(nodes, bad_once, limit_outliers=True, **options)
    assert [count for _, count in results] == [0] * nodes
    assert np.linalg.norm(results[0][0]) > 100.0


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("rank_of_batches", [lambda _: 0, lambda rank: rank], ids=["same", "own"])
def test_nodes_that_train_on_the_same_batches_are_told_once(
    rank_of_batches: Any, options: Any, is_adaptive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")

    def work(node: FakeNode, rank: int) -> None:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.TargetDensity(0.05)),
            node,
            min_peers=1,
            limit_outliers=True,
            **options,
        )
        if is_adaptive:
            share.agreement.start()
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        for step in range(STEPS):
            params += updates(0.9, 2, NUMEL, step)[rank_of_batches(rank)]
            share.step_moved(params)

    run_cluster(work, count=2, seed=4)
    told = [record for record in caplog.records if "the same batches" in record.getMessage()]
    is_same = rank_of_batches(1) == 0
    if options.get("mode") == "async":
        assert bool(told) <= is_same  # what the nodes have got of each other differs
    else:
        assert len(told) == 2 * is_same


def test_a_step_of_asynchronous_nodes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    add_norms = Agreement.add_norms

    def kept(self: Agreement, norms: Any) -> Any:
        measured.append(len(norms))
        return add_norms(self, norms)

    monkeypatch.setattr(Agreement, "add_norms", kept)
    options: dict[str, Any] = {"mode": "async", "limit_outliers": True}

    def work(node: FakeNode, rank: int) -> None:
        share = gw.Exchange(gw.Encoder(NUMEL, gw.TargetDensity(0.05)), node, min_peers=1, **options)
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        # One node takes ten steps while the other one takes its first.
        for step in range(1 if rank else 10):
            share.step(updates(0.9, 2, NUMEL, step)[rank], params)

    run_cluster(work, count=2, seed=4)
    assert measured
    assert len(measured) <= 2  # once by each node
    assert set(measured) == {2}  # of both nodes


@pytest.mark.parametrize("max_staleness", [0, 1, 8])
def test_fast_asynchronous_nodes_follow_the_norms_of_all(max_staleness: int) -> None:
    def work(node: FakeNode, rank: int) -> list[int]:
        share = gw.Exchange(
            gw.Encoder(NUMEL, gw.TargetDensity(0.05)),
            node,
            min_peers=2,
            mode="async",
            limit_outliers=True,
            max_staleness=max_staleness,
        )
        params = np.zeros(NUMEL, np.float32)
        share.join(params)
        shortened = []
        # As in a long warm-up: the updates of all nodes grow, by little from one step to the next.
        for step in range(100):
            node.cluster.compute(node, 0.1 * (1 + rank))
            one = 1.05**step * updates(0.5, 3, NUMEL, step)[rank]
            if share.step(one, params).shortened:
                shortened.append(step)
        share.leave(params)
        return shortened

    assert run_cluster(work, seed=1) == [[], [], []]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("begin", [0, 100])
def test_equal_updates_of_the_workers_of_a_machine_are_found_once(
    workers: int, are_equal: bool, begin: int
) -> None:
    agreement = Agreement(limits_norms=True)
    found = []
    for step in range(begin, begin + 12):
        samples = updates(0.9, 3, NUMEL, step)[:workers]
        agreement.measure(step, samples[:1] * workers if are_equal else samples)
        if agreement.takes(step):
            agreement.add_norms({"here": 1.0})
            found.append(agreement.drain_equal_updates())
    assert found.count(True) == (are_equal and workers > 1)


def test_workers_whose_gradients_are_averaged_have_equal_updates_without_a_warning() -> None:
    agreement = Agreement(limits_norms=True)
    agreement.expect_averaged_workers()
    for step in range(12):
        agreement.measure(step, updates(0.9, 3, NUMEL, step)[:1] * 2)
        assert not agreement.drain_equal_updates()


def test_share_limits_outliers_unless_it_is_told_not_to() -> None:
    weights = np.zeros(3, np.float32)
    with gw.share(weights) as shared:
        assert shared.exchange.agreement.limits_norms
    with gw.share(weights, limit_outliers=False) as shared:
        assert not shared.exchange.agreement.limits_norms


@pytest.mark.parametrize("norm", [-1.0, math.nan, math.inf, "x", []])
def test_a_note_with_a_norm_that_is_none_is_refused(norm: Any) -> None:
    document = json.loads(Note(norm=2.5).encode())
    assert Note.decode(memoryview(json.dumps(document).encode())).norm == 2.5
    document["norm"] = norm
    with pytest.raises(gw.MessageError, match="cannot be read"):
        Note.decode(memoryview(json.dumps(document).encode()))


@pytest.mark.parametrize(
    "sizes", [[], [0], [5], [16, 1, 0, 40_000], [1_000_000], [999, 70_001, 3, 2_000_000, 17]]
)
def test_a_sample_is_of_the_same_places_everywhere_and_of_all_where_they_are_few(
    sizes: list[int],
) -> None:
    numbers = np.arange(sum(sizes), dtype=np.float64)
    arrays = np.split(numbers, np.cumsum(sizes)[:-1]) if sizes else []
    sample = sample_of(arrays)
    assert np.array_equal(sample_of([array + 1.0 for array in arrays]), sample + 1.0)
    assert len(np.unique(sample)) == len(sample)
    if sum(sizes) < 1 << 16:
        assert np.array_equal(sample, numbers)
    else:
        assert 1 << 15 < len(sample) < 1 << 17
        # No stretch is left out.
        span = 64 * (sum(sizes) // (1 << 16) | 1)
        assert np.diff(np.sort(sample)).max() <= 2 * span


def test_a_sample_reaches_every_column_of_a_matrix() -> None:
    columns = np.tile(np.arange(1_024, dtype=np.float32), (2_000, 1))
    assert len(np.unique(sample_of([columns]))) == 1_024
