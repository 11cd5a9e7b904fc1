"""The recipes of the frontier benchmark: what they must be equal to where they leave nothing out, and their bytes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", reason="the benchmark's recipes need torch")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NODES, STEPS, RATE = 4, 12, 0.01


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Return the benchmark and its recipes; its folder is in the path as when it runs."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_frontier
        import recipes

        yield bench_frontier, recipes
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def task(bench: Any) -> Any:
    benchmark, _ = bench
    return benchmark.task_of(benchmark.Setting(NODES, STEPS, 16, 2, 8, 8), held_out=4)


def trained(task: Any, kind: Any, steps: int = STEPS, **options: Any) -> Any:
    """Return a recipe after some steps, from the same initial parameters and batches."""
    torch.manual_seed(0)
    recipe = kind(task, NODES, steps, RATE, **options)
    for number in range(steps):
        recipe.step([task.batch(0, node, number) for node in range(NODES)], number)
    return recipe


def per_parameter(recipe: Any) -> float:
    return float(recipe.received / recipe.numel)


def test_powersgd_of_full_rank_is_the_mean_of_the_gradients(bench: Any, task: Any) -> None:
    _, made = bench

    class Whole(made.PowerSGD):
        LEAST_COMPRESSION = 0  # no tensor goes whole

    dense = trained(task, made.Dense)
    whole = trained(task, Whole, rank=128)
    assert (whole.shared - dense.shared).norm() < 0.01
    thin = trained(task, made.PowerSGD, rank=1)
    assert (thin.shared - dense.shared).norm() > 0.1
    assert per_parameter(thin) < per_parameter(dense)


def test_powersgd_feeds_back_the_difference_to_the_mean_that_all_got(bench: Any, task: Any) -> None:
    _, made = bench
    torch.manual_seed(0)
    recipe = made.PowerSGD(task, NODES, STEPS, RATE, rank=1)
    gradients = torch.randn(NODES, recipe.numel)
    mean = recipe.reduced(gradients, recipe.START)
    torch.testing.assert_close(recipe.errors, gradients - mean)
    matrix = made.split(mean, recipe.shapes)[0]
    assert torch.linalg.matrix_rank(matrix) == 1


def test_the_cosine_transform_is_orthonormal_and_tiles_cover_every_element_once(
    bench: Any,
) -> None:
    _, made = bench
    for size in (1, 8, 64):
        matrix = made.cosines(size)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0.0, atol=1e-5)
    shapes = [torch.zeros(128, 96), torch.zeros(7), torch.zeros(130)]
    tiles = made.tiles_of(shapes)
    places = torch.cat([numbers.flatten() for numbers, _ in tiles])
    assert torch.equal(places.sort().values, torch.arange(128 * 96 + 7 + 130))
    counts = [(len(numbers), size) for numbers, size in tiles]
    assert counts == [(4, (64, 48)), (1, (1, 7)), (5, (1, 26))]
    first = tiles[0][0][0].view(64, 48)
    assert torch.equal(first[1] - first[0], torch.full((48,), 96))


def test_demo_that_keeps_everything_steps_by_the_sign_of_the_mean_gradient(
    bench: Any, task: Any
) -> None:
    _, made = bench
    torch.manual_seed(0)
    recipe = made.DeMo(task, NODES, STEPS, RATE, kept=made.TILE**2)
    before = recipe.shared.clone()
    batches = [task.batch(0, node, 0) for node in range(NODES)]
    recipe.step(batches, 0)
    assert recipe.momenta.abs().max() < 1e-6  # nothing is left
    replica = made.Replica(task)
    replica.params.copy_(before)
    gradients = []
    for batch in batches:
        replica.backward(batch)
        replica.clip()
        gradients.append(replica.gradient.clone())
    mean = torch.stack(gradients).mean(0)
    rate = recipe.rate_at(0)
    expected = before * (1.0 - rate * made.WEIGHT_DECAY) - rate * mean.sign()
    is_clear = mean.abs() > 1e-4
    torch.testing.assert_close(recipe.shared[is_clear], expected[is_clear], rtol=0.0, atol=1e-6)


def test_sparseloco_that_sends_everything_is_diloco_without_outer_momentum(
    bench: Any, task: Any
) -> None:
    _, made = bench
    diloco = trained(task, made.DiLoCo, every=3, outer_rate=1.0, outer_momentum=0.0)
    for over_senders in (False, True):
        whole = {"kept": 1.0, "bits": 32, "over_senders": over_senders}
        recipe = trained(task, made.SparseLoCo, every=3, **whole)
        torch.testing.assert_close(recipe.shared, diloco.shared, rtol=0.0, atol=1e-5)


def test_sparseloco_s_two_means_differ_where_few_send(bench: Any, task: Any) -> None:
    _, made = bench
    over_all, over_senders = (
        trained(task, made.SparseLoCo, steps=3, every=3, over_senders=is_so)
        for is_so in (False, True)
    )
    torch.manual_seed(0)
    start = made.Replica(task).params
    moved, further = (recipe.shared - start for recipe in (over_all, over_senders))
    assert torch.equal(moved != 0, further != 0)
    ratio = further[moved != 0] / moved[moved != 0]
    assert 1.0 - 1e-2 < ratio.min() < 1.1
    assert NODES - 1e-2 < ratio.max() < NODES + 1e-2


def test_diloco_s_first_outer_step_is_one_and_a_momentum_times_the_rate(
    bench: Any, task: Any
) -> None:
    _, made = bench
    plain = trained(task, made.DiLoCo, steps=3, every=3, outer_rate=1.0, outer_momentum=0.0)
    outer = trained(task, made.DiLoCo, steps=3, every=3, outer_rate=0.7, outer_momentum=0.9)
    torch.manual_seed(0)
    start = made.Replica(task).params
    expected = 0.7 * 1.9 * (plain.shared - start)
    torch.testing.assert_close(outer.shared - start, expected, rtol=0.0, atol=1e-6)


def test_streaming_sends_every_element_once_in_so_many_steps_in_four_bits(
    bench: Any, task: Any
) -> None:
    _, made = bench
    recipe = trained(task, made.StreamingDiLoCo, steps=12, every=6)
    places = torch.cat(recipe.fragments)
    assert torch.equal(places.sort().values, torch.arange(recipe.numel))
    assert per_parameter(recipe) == pytest.approx(2 * 2 * 3 / 4 * 0.5)
    values = torch.tensor([[1.0, -0.76, 0.74, 0.1, 1e-4, 0.0]])
    assert made.exponents_of(values).tolist() == [[1.0, -1.0, 0.5, 0.125, 0.0, 0.0]]


def test_values_are_rounded_to_the_means_of_their_bins(bench: Any) -> None:
    _, made = bench
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = made.quantized(values, 2)
    assert len(rounded.unique()) <= 4
    for level in rounded.unique():
        own = values[rounded == level]
        assert float(own.mean()) == pytest.approx(float(level), abs=1e-5)


def test_gradwire_loses_nothing_but_what_the_residuals_hold(bench: Any, task: Any) -> None:
    _, made = bench
    mesh = trained(task, made.Gradwire, every=3)
    owned = trained(task, made.Gradwire, every=3, owners=2)
    for recipe in (mesh, owned):
        own = torch.from_numpy(sum(encoder.residual for encoder in recipe.encoders) / NODES)
        if recipe.partition is not None:
            own = own + torch.cat([torch.from_numpy(owner.residual) for owner in recipe.owners])
        begins = torch.stack(recipe.begins)
        residuals = torch.stack([torch.from_numpy(encoder.residual) for encoder in recipe.encoders])
        torch.testing.assert_close(begins, recipe.shared + residuals)
        assert 0.0 < per_parameter(recipe) < STEPS / 3 * 4
    whole = trained(task, made.Gradwire, every=3, density=0.999)
    assert per_parameter(mesh) < per_parameter(whole)


@pytest.mark.parametrize("every", [1, 3])
def test_gradwire_has_a_factor_with_adaptive_optimisers(bench: Any, task: Any, every: int) -> None:
    _, made = bench
    factor = trained(task, made.Gradwire, every=every).agreement.factor
    assert 1.0 < factor <= math.sqrt(NODES)
    assert trained(task, made.Gradwire, every=every, inner=made.sgd).agreement.factor == 1.0


@pytest.mark.slow
def test_bytes_are_those_of_the_recipes(bench: Any, task: Any) -> None:
    _, made = bench
    reduced, gathered = 2 * (NODES - 1) / NODES, NODES - 1
    assert per_parameter(trained(task, made.Dense)) == pytest.approx(4 * reduced * STEPS)
    assert per_parameter(trained(task, made.DiLoCo, every=4)) == pytest.approx(4 * reduced * 3)
    assert per_parameter(trained(task, made.MuLoCo, every=4)) == pytest.approx(2 / 8 * reduced * 3)
    demo = trained(task, made.DeMo)
    kept = sum(len(numbers) * min(32, numbers.shape[1]) for numbers, _ in demo.tiles)
    assert demo.received == pytest.approx(STEPS * gathered * kept * 28 / 8)
    sparse = trained(task, made.SparseLoCo, every=4, over_senders=False)
    kept = sum(len(numbers) * max(1, round(numbers.shape[1] / 32)) for numbers, _ in sparse.tiles)
    assert sparse.received == pytest.approx(3 * gathered * (kept * 14 / 8 + 20 * len(sparse.tiles)))


def test_a_loss_on_another_text_is_not_taken_for_one_on_this(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, made = bench
    setting = benchmark.Setting(nodes=2, steps=2, width=8, layers=2, context=4, batch=2)

    def loss() -> float:
        trainings = benchmark.Trainings(setting, benchmark.task_of(setting, 4), path)
        return float(trainings.result("ddp", made.Dense, RATE, 0)["loss"])

    path = tmp_path / "results"
    before = loss()
    monkeypatch.setattr(benchmark, "MODULES", benchmark.MODULES[::-1])
    assert loss() != before
    monkeypatch.undo()
    assert loss() == before
    assert path.read_text().count("\n") == 2


@pytest.mark.slow
def test_a_run_continues_where_it_was_interrupted_and_draws_a_picture(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "bench_frontier.py", "--nodes", "2", "--seeds", "1"]
    command += ["--steps", "4", "--width", "8", "--layers", "2", "--context", "4", "--batch", "2"]
    command += ["--only", "ddp", "gradwire", "--results", tmp_path / "results"]
    command += ["--svg", tmp_path / "picture.svg"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    errors = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        errors.append(done.stderr)
    assert errors[0].count('"loss"') == 6
    assert errors[1] == ""
    text = (tmp_path / "picture.svg").read_text()
    assert ">ddp</text>" in text
    assert ">gradwire</text>" in text
