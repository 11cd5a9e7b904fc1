"""The examples run as they stand."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gradwire.cli.run import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def addresses() -> list[str]:
    """Two loopback addresses whose ports are free."""
    return [f"127.0.0.1:{free_port()}" for _ in range(2)]


def test_two_processes_fit_the_same_line(addresses: list[str]) -> None:
    one, two = addresses
    variables = {
        **environment(),
        "GRADWIRE_SECRET": bytes(range(32)).hex(),
        "OPENBLAS_NUM_THREADS": "1",
    }
    script = str(EXAMPLES / "train_together.py")
    commands = [
        [sys.executable, script, "--bind", bind, "--peer", peer, "--half", half]
        for bind, peer, half in ((one, two, "0"), (two, one, "1"))
    ]
    processes = [
        subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    # So little is computed that a step is mostly exchange, which every process is told once. On a busy machine the
    # second one starts seconds later.
    late = r"(0 of 1 peers connected to .*\n|this node waits for the others: .*\n)*"
    for _, errors in outputs:
        assert re.fullmatch(late + r"(gradwire takes \d+ % of a step \(.*\n)?", errors), errors
    first, second = (
        re.fullmatch(r"largest error (\S+), sent (\d+) bytes .* checksum (\d+)\n", text)
        for text, _ in outputs
    )
    assert first is not None
    assert second is not None
    assert first.group(1, 3) == second.group(1, 3)
    assert float(first.group(1)) < 0.05
    assert int(first.group(2)) < 400


def environment() -> dict[str, str]:
    """Return the environment of these tests for another process."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]),
    }


def run(*command: str) -> str:
    """Run a command in the environment of these tests and return what it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def workers_agree(output: str, count: int) -> None:
    """Check that so many workers ended with the same parameters and know the digits."""
    # Lines may run into each other: the ranks of torchrun share a pipe and write line ends separately.
    found = re.findall(r": accuracy ([\d.]+)%.*?checksum (-?\d+)", output)
    assert len(found) == count, output
    assert len({checksum for _, checksum in found}) == 1
    assert all(float(accuracy) > 93.0 for accuracy, _ in found)


@pytest.mark.slow
def test_a_coprocessor_trains_while_a_worker_is_killed_and_replaced() -> None:
    output = run(str(EXAMPLES / "coprocessor.py"))
    found = re.findall(r"version (\d+): accuracy ([\d.]+)%", output)
    versions = [int(version) for version, _ in found]
    assert versions == sorted(set(versions))
    assert versions[-1] >= 3_000
    assert float(found[-1][1]) > 96.0
    assert "worker 4 is killed, and replaced" in output


@pytest.mark.slow
@pytest.mark.torch
def test_two_ranks_under_torchrun_learn_the_digits() -> None:
    script = str(EXAMPLES / "torch_ddp.py")
    workers_agree(run("-m", "torch.distributed.run", "--nproc-per-node", "2", script), 2)


@pytest.mark.slow
@pytest.mark.torch
def test_four_workers_learn_the_digits_in_local_steps() -> None:
    workers_agree(run(str(EXAMPLES / "torch_local_steps.py")), 4)


@pytest.mark.slow
@pytest.mark.torch
def test_workers_go_on_when_one_is_killed_and_another_joins() -> None:
    output = run(str(EXAMPLES / "torch_workers.py"))
    assert "worker 3 is killed" in output
    assert "worker 0: step 100, 4 workers" in output
    joined = re.search(r"worker 4: joined at step (\d+)", output)
    assert joined is not None, output
    assert 150 <= int(joined.group(1)) < 500
    workers_agree(output, 4)


@pytest.mark.slow
@pytest.mark.jax
def test_two_workers_with_jax_and_optax_learn_the_digits() -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    workers_agree(run(str(EXAMPLES / "jax_optax.py")), 2)


@pytest.mark.slow
@pytest.mark.spark
def test_four_spark_tasks_learn_the_digits() -> None:
    workers_agree(run(str(EXAMPLES / "spark_digits.py")), 4)


@pytest.mark.slow
@pytest.mark.torch
def test_ddp_within_a_machine_and_gradwire_between_machines_learn_the_digits() -> None:
    workers_agree(run("-m", "gradwire", "run", "-n", "2", str(EXAMPLES / "torch_machines.py")), 2)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.torch
def test_spark_stops_producing_when_training_on_its_series_ends() -> None:
    output = run(str(EXAMPLES / "stream_series.py"))
    found = re.search(r"(\d+) steps in .*; (\d+) batches produced, (\d+) of them wasted", output)
    assert found is not None, output
    steps, produced, wasted = map(int, found.groups())
    assert produced == steps + wasted
    assert wasted <= 32  # what the feed holds


def descendants(ancestor: int) -> dict[int, tuple[int, str]]:
    """Return the processes that a process has started, and those that they have started: parents and commands."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            # The second field is a name in parentheses, which may contain spaces.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            processes[int(folder.name)] = parent, command
    kept = {ancestor}
    while more := {pid for pid in processes if processes[pid][0] in kept} - kept:
        kept |= more
    return {pid: processes[pid] for pid in kept - {ancestor} if pid in processes}


def kill(ancestor: int, *, is_host: bool) -> int:
    """Kill the co-processor, or all Python workers of Spark; return the number of killed processes."""
    started = descendants(ancestor)
    if is_host:
        chosen = [pid for pid in started if "--multiprocessing-fork" in started[pid][1]]
    else:
        # The daemon forks the workers.
        daemons = [pid for pid in started if "pyspark.daemon" in started[pid][1]]
        chosen = [pid for pid in daemons if started[pid][0] in daemons]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    return len(chosen)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.torch
def test_tasks_of_spark_and_their_coprocessor_are_killed_and_the_training_goes_on() -> None:
    command = [sys.executable, str(EXAMPLES / "spark_coprocessor.py")]
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(240, process.kill)
        watchdog.start()
        assert process.stdout is not None
        output = ""
        killed: list[int] = []
        for line in process.stdout:
            output += line
            version = re.match(r"version (\d+)", line)
            if version and int(version.group(1)) > 0 and len(killed) < 2:
                killed.append(kill(process.pid, is_host=len(killed) == 1))
        assert process.stderr is not None
        errors = process.stderr.read()
        watchdog.cancel()
    assert process.returncode == 0, output + errors
    tasks, hosts = killed
    assert tasks >= 2
    assert hosts == 1
    assert output.count("the co-processor has died, and is started again") == 1
    measured = re.findall(r"version (\d+): mean squared error ([\d.]+)", output)
    assert int(measured[-1][0]) >= 3_000
    assert float(measured[-1][1]) < 0.02
