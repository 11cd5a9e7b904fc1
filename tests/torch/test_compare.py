"""The comparison with plain all-reduce: the same training but for the exchange, honest figures, clear errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

import gradwire.torch  # noqa: E402
from gradwire.cli import main  # noqa: E402
from gradwire.cli.demo.link import links  # noqa: E402
from gradwire.cli.run import environments, free_port  # noqa: E402
from gradwire.torch.comparison import (  # noqa: E402
    KINDS,
    PORT_VARIABLE,
    Comparison,
    Curve,
    Finished,
    Measured,
    Place,
    Recorder,
)

STEPS = 20
SCRIPT = """
import os, torch, gradwire.torch
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(40, {width})
model.register_buffer("count", torch.zeros(()))
optimizer = gradwire.torch.share(model, torch.optim.{optimizer}(model.parameters(), lr=0.01){options})
for step in range({steps}):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(16, 40) + {more}).square().mean().backward()
    optimizer.step()
optimizer.catch_up()
with optimizer.shared_parameters():
    pass
optimizer.leave()
"""
FROM_FUNCTION = """
import torch, gradwire.torch
model = torch.nn.Linear(40, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
before = model.weight.clone()

def step(model, optimizer, number):
    optimizer.zero_grad()
    model(torch.randn(16, 40)).square().mean().backward()
    optimizer.step()

comparison = gradwire.torch.compare(step, model, optimizer, steps=20, density=0.1)
assert torch.equal(model.weight, before)
if comparison is not None:
    print(comparison.verdict())
"""


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments, "train.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )


def compared(folder: Path, *arguments: str, **script: Any) -> subprocess.CompletedProcess[str]:
    parts = {"width": 8, "optimizer": "SGD", "options": "", "steps": STEPS, "more": 0, **script}
    arguments = ("compare", "-n", "2", "--steps", str(parts["steps"]), *arguments)
    return run(folder, SCRIPT.format(**parts), *arguments)


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_a_script_is_trained_in_both_ways_from_the_same_parameters_and_batches(
    tmp_path: Path,
) -> None:
    done = compared(tmp_path, "--json", options=", density=0.5")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    plain, again, shared = (result[name] for name in ("plain", "again", "shared"))
    assert len(plain["losses"]) == len(shared["losses"]) == STEPS
    assert plain["first_loss"] == shared["first_loss"] != again["first_loss"]
    assert plain["losses"][-1] < plain["losses"][0]
    assert plain["step_bytes"] == 4 * 41 * 8
    assert plain["timed_steps"] == shared["timed_steps"] == STEPS - 3
    assert result["ranks"] == 2
    assert "after 20 steps" in result["verdict"]


def test_a_plot_that_cannot_be_drawn_does_not_cost_the_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    done = compared(tmp_path, "--plot", "missing/losses.png")
    assert done.returncode == 2
    assert f"after {STEPS} steps" in done.stdout
    assert "missing/losses.png cannot be drawn" in done.stderr


@pytest.mark.slow
def test_links_of_a_rate_show_in_the_seconds(tmp_path: Path) -> None:
    done = compared(tmp_path, "--json", "--link", "100Mbit", width=20_000, steps=40)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [len(result[name]["losses"]) for name in ("plain", "again", "shared")] == [40, 40, 40]
    assert result["plain"]["timed_steps"] == 20
    assert result["shared"]["timed_steps"] == 37
    # A step of all-reduce sends 3.28 MB, which takes a quarter of a second.
    assert result["plain"]["step_s"] > 0.25
    assert result["shared"]["step_bytes"] < result["plain"]["step_bytes"] / 8


@pytest.mark.slow
def test_a_link_that_the_kernel_limits_can_be_unlimited() -> None:
    with links(2, 1.0) as (made, description):
        if "token bucket" in description:
            pytest.skip("network namespaces need root, ip and tc")
        for place in made:
            assert len(place.limited) == 2
            before = [qdiscs(*end) for end in place.limited]
            place.unlimit()
            after = [qdiscs(*end) for end in place.limited]
            assert all("tbf" in each for each in before), before
            assert not any("tbf" in each for each in after), after


def qdiscs(namespace: str, device: str) -> str:
    command = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_value_error_of_the_script_shows_where_it_comes_from(tmp_path: Path) -> None:
    done = run(tmp_path, 'int("seven")', "compare", "-n", "2")
    assert done.returncode == 1
    assert 'train.py", line 1, in <module>' in done.stderr
    assert "[0] ValueError: invalid literal for int()" in done.stderr


def test_options_that_share_refuses_end_the_comparison_before_the_trainings_with_all_reduce(
    tmp_path: Path,
) -> None:
    done = compared(tmp_path, options=', density={"nothing*": 0.5}')
    assert done.returncode == 1
    assert done.stdout == f"gradwire: {STEPS} steps ...\n"
    assert "nothing* matches no parameter" in done.stderr


@pytest.mark.slow
def test_a_script_that_ends_with_sys_exit_is_compared(tmp_path: Path) -> None:
    script = SCRIPT.format(width=8, optimizer="SGD", options="", steps=STEPS, more=0)
    done = run(tmp_path, script + "import sys\nsys.exit(0)\n", "compare", "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["shared"]["losses"]) == STEPS


def test_an_interrupted_comparison_is_no_failed_training(tmp_path: Path) -> None:
    # A terminal interrupts the processes, too.
    done = run(tmp_path, "raise KeyboardInterrupt", "compare", "-n", "2")
    assert done.returncode == 130
    assert done.stderr == "gradwire: interrupted\n"


@pytest.mark.slow
def test_a_script_that_fails_shows_its_own_error(tmp_path: Path) -> None:
    done = compared(tmp_path, more="undefined")
    assert done.returncode == 1
    assert done.stderr.startswith("gradwire compare: the training with gradwire failed")
    assert "NameError: name 'undefined'" in done.stderr
    assert "SIGABRT" not in done.stderr


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-n", "1"], "-n is 1, must be 2 to 1024"),
        (["-n", "99999999999"], "-n is 99999999999, must be 2 to 1024"),
        (["-n", "2", "--steps", "19"], "steps is 19, must be 20 or more"),
        (["--link", "1Mbit"], "give -n as well"),
        (["-n", "2", "--latency", "20ms"], "give --link as well"),
        (["-n", "2", "--link", "1Mbit", "--latency=-1"], "--latency is -1, must be 0 or more"),
        (["-n", "2", "--link=-1Mbit"], "--link is -1Mbit, must be above 0"),
        (["-n", "2", "--link", "fast"], "not a rate"),
        (["-n", "2", "--link", "0Mbit"], "--link is 0Mbit, must be above 0"),
        ([], "needs two processes or more"),
    ],
)
def test_arguments_that_make_no_comparison_are_refused(
    arguments: list[str],
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["compare", *arguments, str(script)]) == 2
    assert error in capsys.readouterr().err
    assert main(["compare", *arguments, str(script) + "x"]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["http", "65536", "0", " 7"])
def test_a_port_that_is_none_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environments(2, as_machines=True)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(PORT_VARIABLE, port)
    with pytest.raises(ValueError, match=f"{PORT_VARIABLE} is '{port}', must be a port from 1"):
        Place.from_env()


@pytest.mark.slow
def test_a_loop_of_the_user_s_own_is_compared_under_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, str(free_port()))
    done = run(tmp_path, FROM_FUNCTION, "run", "-n", "2", "--as-machines")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert re.fullmatch(r"\[0\] 2 processes: .*; loss after 20 steps .*", line)


# ---- figures --------------------------------------------------------------------------------------------------------


def curve(**changes: Any) -> Curve:
    made = Curve([2.0] * 50 + [1.0] * 50, 2.0, 0.4, 0.3, 0.2, 1e6, 1 << 20, 97)
    return replace(made, **changes)


def test_all_reduce_is_hidden_behind_the_backward_pass_where_that_helps_it() -> None:
    fast = Measured([1.0] * 20, [0.1] * 20, [0.01] * 20, [0.05] * 20, 400, 7)
    slow = Measured([2.0] * 20, [0.5] * 20, [0.2] * 20, [0.1] * 20, 800, 5)
    of_two = Curve.of(KINDS[0], [fast, slow])
    assert of_two == Curve([1.5] * 20, 1.0, 0.5, pytest.approx(0.4), 0.2, 30.0, 7, 17)
    assert Curve.of(KINDS[2], [fast, slow]).hidden_s == 0.5


class CountingLink:
    """A link that counts its calls."""

    waits = 0
    ends = 0

    def wait(self, sent_bytes: int, begin_s: float) -> None:  # noqa: ARG002
        assert not self.ends
        self.waits += 1

    def unlimit(self) -> None:
        self.ends += 1


@pytest.mark.parametrize(("steps", "timed"), [(20, 17), (23, 20), (40, 20)])
def test_all_reduce_stays_behind_its_link_for_the_steps_that_are_timed(
    steps: int, timed: int
) -> None:
    link = CountingLink()
    recorder = Recorder(KINDS[0], Place(0, 1, "", 0), dist.HashStore(), stop_after=steps, link=link)
    model = torch.nn.Linear(3, 1)
    with recorder.watching(), suppress(Finished):
        optimizer = gradwire.torch.share(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while True:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    curve = recorder.gather()
    assert curve is not None
    assert len(curve.losses) == steps
    assert curve.timed_steps == timed
    assert (link.waits, link.ends) == (3 + timed, int(timed == 20))


def test_only_the_steps_behind_the_link_are_timed() -> None:
    seconds = [9.0] * 3 + [1.0] * 20 + [0.01] * 177
    measured = Measured([1.0] * 200, seconds, [0.5] * 200, [0.1] * 200, timed_end=23)
    of_link = Curve.of(KINDS[0], [measured, measured])
    assert (of_link.step_s, of_link.hidden_s, of_link.timed_steps) == (1.0, 0.9, 20)
    comparison = Comparison(2, "", of_link, of_link, replace(of_link, timed_steps=197))
    assert re.search(r"^steps timed +20 +197$", comparison.table(), re.MULTILINE)


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        ([[], []], "has not called gradwire.torch.share"),
        ([[1.0] * 7, [1.0] * 7], "have taken 7 optimiser's steps"),
        ([[1.0] * 30, [1.0] * 31], "have taken 30 or 31 optimiser's steps"),
        ([[1.0] * 30, [1.0] * 29 + [float("nan")]], "is not a finite number"),
    ],
)
def test_a_script_that_cannot_be_compared_is_told_why(losses: Any, error: str) -> None:
    measured = [Measured(each, each, each, each) for each in losses]
    with pytest.raises(ValueError, match=error):
        Curve.of(KINDS[0], measured)


def test_the_verdict_compares_with_the_best_that_all_reduce_could_do() -> None:
    shared = curve(step_s=0.1, losses=[2.0] * 50 + [1.02] * 50)
    comparison = Comparison(2, "link", curve(), curve(losses=[1.01] * 100), shared)
    assert comparison.speedup == pytest.approx(3.0)
    assert comparison.verdict() == (
        "link: 3 times as fast; loss after 100 steps 2.0% higher (more than the 1.0% that chance makes)"
    )
    slower = replace(comparison, shared=curve(step_s=0.6, losses=[0.995] * 100))
    assert slower.verdict() == (
        "link: slower: 2 times the time of all-reduce; "
        "loss after 100 steps 0.5% lower (within the 1.0% that chance makes)"
    )


def test_figures_of_a_large_model_have_no_exponents() -> None:
    plain, shared = curve(step_s=30.0, hidden_s=30.0), curve(step_s=0.125)
    comparison = Comparison(2, "link", plain, plain, shared)
    assert comparison.verdict().startswith("link: 240 times as fast;")
    pattern = r"^step, median +30,000 ms +125 ms +240 times$"
    assert re.search(pattern, comparison.table(), re.MULTILINE)


def test_a_loss_of_zero_is_compared() -> None:
    zero = curve(losses=[0.0] * 100, first_loss=0.0)
    comparison = Comparison(2, "link", zero, zero, zero)
    comparison.check()
    assert comparison.verdict().endswith("0.0% lower (within the 0.0% that chance makes)")
    higher = replace(comparison, shared=curve(losses=[0.1] * 100))
    assert higher.verdict().endswith("inf% higher (more than the 0.0% that chance makes)")
    assert "inf%" in higher.table()


def test_other_batches_are_noticed() -> None:
    Comparison(2, "", curve(), curve(), curve()).check()
    with pytest.raises(ValueError, match="before anything was exchanged"):
        Comparison(2, "", curve(), curve(), curve(first_loss=2.1)).check()


PLAIN = """
import torch, gradwire.torch
from gradwire.torch.comparison import KINDS, Place, Recorder
place = Place.from_env()
recorder = Recorder(KINDS[0], place, place.open_store())
{model}
with torch.no_grad():
    for param in model.parameters():
        param.fill_(place.rank + 5.0)
with recorder.watching():
    optimizer = gradwire.torch.share(model, torch.optim.{optimizer}(model.parameters(), lr=1.0))
    assert isinstance(optimizer, torch.optim.{optimizer})
    {step}
print([param.flatten().round(decimals=4).tolist() for param in model.parameters()])
"""


def plainly_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, step: str, optimizer: str = "SGD"
) -> list[str]:
    """Return what each of two ranks prints of its parameters, after a step with all-reduce."""
    monkeypatch.setenv(PORT_VARIABLE, str(free_port()))
    script = PLAIN.format(model=model, step=step.replace("\n", "\n    "), optimizer=optimizer)
    done = run(folder, script, "run", "-n", "2", "--as-machines")
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_a_plain_optimiser_averages_what_each_rank_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = """
model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)])
model[2].weight.requires_grad_(False)
"""
    step = """
model[place.rank](torch.ones(1, 3 - place.rank)).sum().backward()
optimizer.step()
"""
    # Each of the first two layers has a gradient of ones on one of two ranks.
    expected = [[4.5] * 6, [4.5] * 2, [4.5] * 2, [4.5], [5.0], [5.0]]
    done = plainly_trained(tmp_path, monkeypatch, model, step)
    assert done == [f"[{rank}] {expected}" for rank in range(2)]


def test_a_plain_optimiser_averages_gradients_that_a_closure_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = """
def closure():
    optimizer.zero_grad()
    loss = model(torch.full((1, 2), 2.0 * place.rank)).sum()
    loss.backward()
    return loss
assert optimizer.step(closure).item() == 25.0 * place.rank + 5.0 * (1 - place.rank)
assert optimizer.step(closure=closure).item() == 20.0 * place.rank + 4.0 * (1 - place.rank)
"""
    done = plainly_trained(tmp_path, monkeypatch, "model = torch.nn.Linear(2, 1)", step)
    assert done == [f"[{rank}] [[3.0, 3.0], [3.0]]" for rank in range(2)]


def test_a_plain_optimiser_averages_sparse_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = """
model(torch.tensor([place.rank, 2, 2])).sum().backward()
optimizer.step()
assert model.weight.grad.is_sparse
"""
    model = "model = torch.nn.Embedding(4, 1, sparse=True)"
    # Rows 0 and 1 have a gradient on one rank each, row 2 on both, row 3 on none.
    done = plainly_trained(tmp_path, monkeypatch, model, step)
    assert done == [f"[{rank}] [[4.5, 4.5, 3.0, 5.0]]" for rank in range(2)]
    # The first step of Adam has the size of the rate. It would refuse a dense gradient.
    done = plainly_trained(tmp_path, monkeypatch, model, step, "SparseAdam")
    assert done == [f"[{rank}] [[4.0, 4.0, 4.0, 5.0]]" for rank in range(2)]


def test_an_optimiser_that_cannot_be_shared_is_refused_before_any_training() -> None:
    model = torch.nn.Linear(1, 1)
    recorder = Recorder(KINDS[0], Place(0, 1, "", 0), dist.HashStore())
    with pytest.raises(TypeError, match="L-BFGS"):
        recorder.share(model, torch.optim.LBFGS(model.parameters()))


def test_a_missing_secret_is_found_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40123"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for name in ("GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(1, 1)
    recorder = Recorder(KINDS[0], Place(0, 2, "127.0.0.1", 0), dist.HashStore())
    with pytest.raises(ValueError, match="set GRADWIRE_SECRET"):
        recorder.share(model, torch.optim.SGD(model.parameters()))
