"""The command line, and the demo's promise: the accuracy of whole updates in a hundredth of the bytes."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gradwire as gw
from gradwire.cli import main, top
from gradwire.cli.demo.report import Run
from gradwire.cli.demo.training import BATCH, TRAINING_IMAGES, Digits, Network, Recipe, Trainer
from gradwire.cli.demo.workers import train
from gradwire.cli.units import si
from gradwire.transport import parse_secret

pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
pytest.importorskip("matplotlib", reason="the demo needs matplotlib")


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )


# --- info and secret --------------------------------------------------------------------------------------------------


def test_a_reader_who_has_enough_of_the_output_ends_the_command_quietly() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "gradwire", "info"],
            stdout=closed,
            stderr=subprocess.PIPE,
            env=environment,
        )
    assert done.stderr == b""
    assert done.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
@pytest.mark.parametrize("command", ["info", "secret"])
def test_a_full_disk_under_the_output_ends_the_command_with_one_line(command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gradwire", command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.stderr == "gradwire: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"gradwire {gw.__version__}\n"


def test_info_names_the_backends_the_instruction_set_and_why_there_is_no_cuda(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["info"]) == 0
    facts = dict(
        re.split(r":\s+", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert facts["backends"].split(", ") == gw.backends()
    assert facts["instruction set"].split()[0] in gw.backends()
    assert facts["cuda"].startswith("available (") or facts["cuda"].startswith("not available: ")
    assert {"gradwire", "python", "numpy", "cryptography", "machine"} < facts.keys()


def test_info_says_so_when_the_forced_instruction_set_is_unusable(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GRADWIRE_ISA": "abacus",
    }
    command = [sys.executable, "-m", "gradwire", "info"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"instruction set: none: .*abacus", done.stdout)
    command = [*command[:-1], "estimate", "--params", "1M", "--step", "1", "--link", "1Gbit"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.match(r"gradwire: .*abacus.* \(set GRADWIRE_ISA", line)


def test_every_secret_is_new_and_a_node_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    printed = set()
    for _ in range(3):
        assert main(["secret"]) == 0
        printed.add(capsys.readouterr().out.strip())
    assert len(printed) == 3
    assert all(len(parse_secret(secret)) == 32 for secret in printed)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["demo", "--workers", "many"],
        ["estimate", "--link", "-1Gbit"],
        ["top", "--twice"],
    ],
)
def test_wrong_arguments_end_with_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gradwire")


def test_an_interrupted_command_ends_with_one_line_and_the_shell_s_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "pages", interrupt)
    assert main(["top"]) == 130
    assert capsys.readouterr().err == "gradwire: interrupted\n"


def test_an_interrupted_demo_ends_with_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "gradwire", "demo", "--workers", "2", "--link", "0"]
    # A group of its own, all of which gets the signal, as from a terminal; a shell script's background job ignores it.
    with subprocess.Popen(
        [*command, "--epochs", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        while "epoch" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert err == "gradwire: interrupted\n"
    assert process.returncode == 130


# --- the demo's parts -------------------------------------------------------------------------------------------------


def test_the_network_gives_the_gradient_of_its_loss() -> None:
    rng = np.random.default_rng(3)
    network = Network([5, 7, 4])
    params = network.initial(seed=1)
    inputs = rng.standard_normal((6, 5)).astype(np.float32)
    labels = rng.integers(0, 4, 6)
    gradient, unused = np.empty_like(params), np.empty_like(params)
    network.gradient(params, inputs, labels, gradient)

    direction = rng.standard_normal(network.numel).astype(np.float32)
    step = np.float32(1e-2)
    above = network.gradient(params + step * direction, inputs, labels, unused)
    below = network.gradient(params - step * direction, inputs, labels, unused)
    assert (above - below) / (2 * step) == pytest.approx(float(gradient @ direction), rel=2e-2)


def test_half_of_the_digits_is_held_out_and_the_workers_share_the_other() -> None:
    recipe = Recipe(workers=4)
    digits = Digits.load()
    assert len(digits.inputs) + len(digits.test_inputs) == 1797
    assert abs(len(digits.inputs) - len(digits.test_inputs)) == 1
    shares = [np.concatenate(list(Trainer(recipe, rank, digits).batches())) for rank in range(4)]
    used = np.concatenate(shares)
    assert len(set(used)) == len(used) == recipe.steps_per_epoch * BATCH * 4
    assert used.max() < TRAINING_IMAGES


def test_the_network_has_at_least_a_hundred_thousand_parameters() -> None:
    assert Network(Recipe().layers).numel >= 100_000


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"workers": 1}, "workers is 1"), ({"epochs": 0}, "epochs is 0"), ({"workers": 200}, "fewer")],
)
def test_a_recipe_that_cannot_be_trained_is_refused(
    options: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Recipe(**options)


def test_sizes_are_printed_for_people() -> None:
    sizes = [0, 999, 999.6, 1_234_567, 5e12]
    assert [si(size, "B") for size in sizes] == ["0 B", "999 B", "1 kB", "1.23 MB", "5 TB"]


# --- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--workers 1", "workers is 1, must be at least 2"),
        ("--link nan", "link is nan, must be a rate"),
        ("--link inf", "link is inf, must be a rate"),
        ("--link=-5", "link is -5, must be a rate"),
        (f"--report {__file__}/here", "Not a directory"),
    ],
)
def test_demo_refuses_what_cannot_be_before_it_trains(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gradwire demo: ")
    assert complaint in line


def test_demo_names_what_has_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["demo"]) == 1
    message = capsys.readouterr().err
    assert message.strip() == (
        'the demo needs scikit-learn and matplotlib: pip install "gradwire[demo]"'
    )


def test_demo_prints_plain_lines_and_draws_a_picture(tmp_path: Path) -> None:
    arguments = ["--workers", "2", "--epochs", "1", "--report", "made/here"]
    arguments += ["--link", "400"]
    done = run_command("demo", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"by UDP over links of 400 Mbit/s: (network namespaces|a token)", done.stdout)
    assert re.search(r"^training time .* times as fast$", done.stdout, re.M)
    for name in ("dense float32", "gradwire"):
        assert re.search(rf"^{name}: epoch +1/1  loss 0\.\d+  test accuracy", done.stdout, re.M)
    row = re.search(r"^all workers end with the same bits +(\S+) +(\S+)$", done.stdout, re.M)
    assert row is not None
    assert row.groups() == ("yes", "yes")
    picture = tmp_path / "made" / "here" / "learning-curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_ends_with_a_reason_when_a_worker_dies(tmp_path: Path) -> None:
    code = """
def fail(*_):
    raise SystemExit(7)
if __name__ == "__main__":
    import gradwire.cli.demo.workers as workers
    workers.work = fail
    from gradwire.cli import main
    raise SystemExit(main(["demo", "--workers", "2"]))
"""
    script = tmp_path / "failing.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    assert "gradwire demo: worker 0 ended early with status 7" in done.stderr


def end_demo(number: signal.Signals, folder: Path) -> int:
    """End a demo by a signal once it has its links, and return its process's number."""
    code = """
import signal, time
from gradwire.cli.demo.link import links
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
with links(2, 100.0) as (_, description):
    print(description, flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
    )
    assert process.stdout is not None
    has_namespaces = "token bucket" not in process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=30)
    if not has_namespaces:
        pytest.skip("network namespaces need root, ip and tc")
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    return process.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ended_demo_leaves_no_network_namespace(number: signal.Signals, tmp_path: Path) -> None:
    process = end_demo(number, tmp_path)
    assert not [*Path("/run/netns").glob(f"gwdemo-{process}*")]


def test_the_next_demo_removes_the_network_namespaces_of_a_killed_one(tmp_path: Path) -> None:
    killed = end_demo(signal.SIGKILL, tmp_path)
    end_demo(signal.SIGTERM, tmp_path)
    assert not [*Path("/run/netns").glob(f"gwdemo-{killed}*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ended_demo_ends_its_workers_whatever_its_links(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = f"""
import os, signal, time
from gradwire.cli.demo.link import links
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
with links(2, 0.0):
    try:
        os.kill(os.getpid(), {number:d})
        time.sleep(60)
    finally:
        print("the workers are ended")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 128 + number
    assert done.stdout == "the workers are ended\n"


def train_both_ways(recipe: Recipe) -> tuple[Run, Run]:
    """Train with whole updates and with gradwire, and check what holds for every recipe."""
    dense = train(replace(recipe, dense=True), lambda _: None)
    sparse = train(recipe, lambda _: None)
    assert dense.epochs[-1].digest
    assert sparse.epochs[-1].digest
    # The dense run is what it claims to be: a ring all-reduce's bytes, and little else.
    values = 8 * Network(recipe.layers).numel * (recipe.workers - 1) // recipe.workers
    assert values <= dense.step_bytes <= 1.1 * values
    assert sparse.step_bytes > 0
    return dense, sparse


def test_a_small_demo_learns_as_well_with_a_hundredth_of_the_bytes() -> None:
    dense, sparse = train_both_ways(Recipe(workers=2, epochs=4, layers=(64, 256, 10)))
    assert dense.accuracy > 0.94
    assert abs(sparse.accuracy - dense.accuracy) <= 0.015
    assert dense.step_bytes >= 100 * sparse.step_bytes


@pytest.mark.slow
def test_demo_reaches_the_accuracy_of_whole_updates_with_a_hundredth_of_the_bytes() -> None:
    dense, sparse = train_both_ways(Recipe())
    assert dense.accuracy > 0.97
    assert abs(sparse.accuracy - dense.accuracy) <= 0.005
    assert dense.step_bytes >= 100 * sparse.step_bytes
