"""Launchers' environment variables give a process its place in a run, and its node the others."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import rendezvous
from gradwire.cli import main
from gradwire.cli import run as cli_run
from gradwire.rendezvous import placement
from gradwire.transport import node as node_module

SECRET = bytes(range(32)).hex()
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "7",
}
OMPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any launcher, but with a secret."""
    for name in [
        *TORCHRUN,
        *SLURM,
        "SLURM_NPROCS",
        rendezvous.BIND,
        rendezvous.PEERS,
        rendezvous.MIN_PEERS,
    ]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET)
    return monkeypatch


def test_torchrun_s_ranks_connect_to_rank_0() -> None:
    place = placement(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 8, 1, 2)
    assert place.expected_peers() == 7
    assert place.expected_peers(per_machine=True) == 3
    assert place.node_options() == {"bind": "0.0.0.0:0", "peers": ("host0:29500",), "node_id": 3}
    first = placement({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})
    assert first.node_options() == {"bind": "0.0.0.0:29500", "peers": (), "node_id": 0}
    assert first.names(per_machine=True) == {rank: f"rank {rank}" for rank in (0, 2, 4, 6)}
    uneven = placement({**TORCHRUN, "GROUP_WORLD_SIZE": "3"})
    assert (uneven.expected_peers(per_machine=True), uneven.names(per_machine=True)) == (2, {})
    assert placement({**TORCHRUN, "MASTER_ADDR": "fd00::1"}).node_options()["peers"] == (
        "[fd00::1]:29500",
    )


def test_two_agents_of_one_computer_have_teams_of_different_names() -> None:
    first, other = (placement({**TORCHRUN, "GROUP_RANK": number}) for number in ("0", "1"))
    assert rendezvous.name_of(first) != rendezvous.name_of(other)
    assert rendezvous.name_of(first) == rendezvous.name_of(
        placement({**TORCHRUN, "GROUP_RANK": "0", "RANK": "2", "LOCAL_RANK": "0"})
    )


def test_slurm_s_tasks_connect_to_the_first_machine_at_a_port_of_their_step() -> None:
    place = placement(SLURM)
    assert (place.rank, place.size, place.local_size) == (4, 5, 1)
    assert place.expected_peers(per_machine=False) == 4
    [seed] = place.node_options()["peers"]
    host, port = seed.split(":")
    assert host == "gpu07"
    assert 20_000 <= int(port) < 32_000
    assert place.expected_peers(per_machine=True) == 2
    assert placement({**SLURM, "SLURM_STEP_ID": "1"}).seed != place.seed
    pmi2 = {"PMI_RANK": "4", "PMI_SIZE": "5", "PMI_JOBID": "77.0"}  # of srun --mpi=pmi2
    assert placement({**SLURM, **pmi2}) == place


def test_a_port_that_the_run_s_name_decides_is_none_that_linux_gives_to_other_sockets() -> None:
    for job in range(300):
        seed = placement({**SLURM, "SLURM_JOB_ID": str(job)}).seed
        assert 20_000 <= int(seed.rpartition(":")[2]) < 32_768, job


def test_mpi_s_ranks_of_one_machine_need_nothing_more_and_others_an_address() -> None:
    variables = {
        **OMPI,
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PMIX_NAMESPACE": "run-5",
    }
    assert placement(variables).node_options()["peers"][0].startswith("127.0.0.1:")
    apart = placement({**variables, "OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match=r"other nodes \(Open MPI: 3\).*GRADWIRE_PEERS"):
        apart.node_options()
    pmi = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
    assert placement(pmi).launcher == "PMI"
    assert placement({**pmi, **TORCHRUN}).launcher == "torchrun"


def test_an_indexed_kubernetes_job_says_how_many_pods_it_has() -> None:
    variables = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
    with pytest.raises(ValueError, match="GRADWIRE_MIN_PEERS"):
        placement(variables)
    place = placement({**variables, "GRADWIRE_MIN_PEERS": "3"})
    assert place.expected_peers() == 3
    assert place.seed.startswith("train-0")
    assert place.node_options()["node_id"] == 2
    assert place.names()[1] == "rank 1"


def test_a_port_to_bind_leaves_rank_0_s_address_in_force(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind = {"GRADWIRE_BIND": "0.0.0.0:29500"}
    options = placement({**TORCHRUN, **bind}).node_options()
    assert options == {"bind": "0.0.0.0:29500", "peers": ("host0:29500",), "node_id": 3}
    first = {**TORCHRUN, **bind, "RANK": "0", "LOCAL_RANK": "0"}
    assert placement(first).node_options()["peers"] == ()
    assert not caplog.text
    placement({**first, "MASTER_PORT": "29501"}).node_options()
    assert (
        "rank 0 binds 0.0.0.0:29500, and the other nodes look for it at host0:29501" in caplog.text
    )
    # Without an address of rank 0, the others come to whoever binds one.
    environment.setenv("GRADWIRE_MIN_PEERS", "1")
    environment.setenv("GRADWIRE_BIND", "127.0.0.1:0")
    assert placement().node_options() == {"bind": "127.0.0.1:0", "peers": ()}


def test_gradwire_s_own_variables_take_precedence() -> None:
    own = {
        "GRADWIRE_PEERS": "a:1, b:2",
        "GRADWIRE_BIND": "0.0.0.0:40123",
        "GRADWIRE_MIN_PEERS": "1",
    }
    place = placement({**TORCHRUN, **own})
    assert place.expected_peers() == 1
    assert place.node_options() == {"bind": "0.0.0.0:40123", "peers": ("a:1", "b:2"), "node_id": 3}


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT is 65536, must be a port, up to 65535"),
        ({"GRADWIRE_MIN_PEERS": "-1"}, "GRADWIRE_MIN_PEERS is '-1', must be a whole number"),
        ({"GRADWIRE_BIND": "127.0.0.1"}, "GRADWIRE_BIND: address '127.0.0.1' is not"),
        ({"GRADWIRE_PEERS": "host:1 host:99999"}, "GRADWIRE_PEERS: address 'host:99999' is not"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(variables: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        placement(variables)


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"RANK": "0"}, "RANK is 0, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "host0"}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"PMI_RANK": "1"}, "PMI_RANK is 1, but PMI_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, but OMPI_COMM_WORLD_RANK"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID is 1, but SLURM_NTASKS is not set: .* srun"),
        ({"SLURM_NPROCS": "2"}, "SLURM_NPROCS is 2, but SLURM_PROCID is not set"),
        ({**TORCHRUN, "RANK": "8"}, "torchrun: rank 8 of 8 processes: ranks are 0 to 7"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "0 processes in all: .*, WORLD_SIZE=0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2 processes .*, LOCAL_RANK=2, "),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, "16 processes .*, but 8 in all .*_WORLD_SIZE=16"),
        ({**SLURM, "SLURM_PROCID": "5"}, "SLURM: rank 5 of 5 .*SLURM_PROCID=5, SLURM_"),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "3"}, "Open MPI: rank 3 of 2"),
        ({"JOB_COMPLETION_INDEX": "2", "GRADWIRE_MIN_PEERS": "1"}, "Kubernetes: rank 2 of 2"),
    ],
)
def test_variables_that_are_half_there_or_contradict_each_other_are_named(
    variables: dict[str, str], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        placement(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-7"},
        {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"},
        {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1"},
    ],
)
def test_a_launcher_that_is_not_read_is_named_before_a_training_alone(
    variables: dict[str, str],
) -> None:
    place = placement(variables)
    assert place.expected_peers() == 0
    assert f"{next(iter(variables))} says" in place.hint
    assert "MASTER_ADDR" in place.hint
    addressed = placement({**variables, "GRADWIRE_PEERS": "10.1.1.7:40123"})
    assert (addressed.hint, addressed.peers) == ("", ("10.1.1.7:40123",))


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"SM_HOSTS": '["algo-1"]'},
        {"SLURM_PROCID": "0"},  # a batch script that asks for no number of tasks
        {"SLURM_NTASKS": "1"},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        {"GRADWIRE_PEERS": ",", "GRADWIRE_MIN_PEERS": "0"},
        {**TORCHRUN, "GRADWIRE_PEERS": ""},
        {"RANK": "7", "GRADWIRE_PEERS": "10.1.1.7:40123"},  # of something else
        {"WORLD_SIZE": "5", **SLURM},  # a batch script that sets torch's names but the rank
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"},  # Azure ML leaves it out
    ],
)
def test_what_says_enough_is_no_error(variables: dict[str, str]) -> None:
    assert placement(variables).hint == ""


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {rendezvous.PEERS: ""},
            r"GRADWIRE_PEERS is '', without an address, .*GRADWIRE_MIN_PEERS=0",
        ),
        ({rendezvous.PEERS: " , "}, "GRADWIRE_PEERS is ' , ', without an address"),
        ({rendezvous.PEERS: ",", "RANK": "1"}, "GRADWIRE_PEERS is ',', without an address"),
        (
            {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"},
            "MASTER_ADDR is host0, but RANK and WORLD_SIZE are not set",
        ),
    ],
)
def test_what_a_launcher_has_left_is_named_before_a_training_alone(
    variables: dict[str, str],
    says: str,
    environment: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert placement(variables).expected_peers() == 0
    for name, value in variables.items():
        environment.setenv(name, value)
    with gw.share(np.zeros(8, np.float32)):
        [text] = [message for message in caplog.messages if "trains alone" in message]
    assert re.search(says, text)


def test_slurm_s_older_name_of_the_number_of_tasks_is_read() -> None:
    older = {**SLURM, "SLURM_NPROCS": SLURM["SLURM_NTASKS"]}
    assert placement(older) == placement(SLURM)
    del older["SLURM_NTASKS"]
    assert placement(older) == placement(SLURM)
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PTY_PORT": "1"}
    assert "`unset SLURM_PROCID SLURM_NTASKS SLURM_NPROCS`" in placement(shell).hint


@pytest.mark.parametrize(
    "host", ["http://127.0.0.1", "127.0.0.1:29998", "[fd00::1]", "host 0", "fd00::x"]
)
def test_an_address_of_rank_0_that_can_be_none_is_refused_at_once(host: str) -> None:
    with pytest.raises(ValueError, match=rf"MASTER_ADDR is '{re.escape(host)}', must be a name"):
        placement({**WORKER, "MASTER_ADDR": host})


@pytest.mark.parametrize("host", ["127.0.0.1 ", "my_host-0.example.", "fe80::1%eth0", "fd00::1"])
def test_an_address_of_rank_0_may_have_blanks_around_it(host: str) -> None:
    [peer] = placement({**WORKER, "MASTER_ADDR": host}).node_options()["peers"]
    assert rendezvous.parse_address(peer) == (host.strip(), 29500)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_of_the_system_s_choice_is_refused_on_every_rank(rank: str) -> None:
    variables = {**WORKER, "RANK": rank, "MASTER_PORT": "0"}
    with pytest.raises(ValueError, match=r"MASTER_PORT is 0, .* from 1 to 65535"):
        placement(variables).node_options()
    own = {rendezvous.PEERS: "10.1.1.7:40123"}
    assert placement({**variables, **own}).node_options()["peers"] == ("10.1.1.7:40123",)


def test_a_node_without_a_launcher_is_alone_and_needs_no_secret(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.delenv("GRADWIRE_SECRET")
    with gw.Node.from_env() as node:
        assert node.expected_peers == 0
        assert node.address.startswith("127.0.0.1:")


def test_a_run_that_may_begin_with_any_number_is_found_by_the_ranks_that_come_late(
    environment: pytest.MonkeyPatch,
) -> None:
    port = str(cli_run.free_port())
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", rendezvous.MIN_PEERS: "0"}
    for name, value in {
        **TORCHRUN,
        **alone,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        environment.setenv(name, value)

    def start(rank: str) -> tuple[gw.Node, gw.Exchange]:
        environment.setenv("RANK", rank)
        node = gw.Node.from_env(per_machine=True)
        return node, gw.Exchange(gw.Encoder(8), node, timeout_s=10.0)

    params, others = np.ones(8, np.float32), np.zeros(8, np.float32)
    first_node, first = start("0")
    with first_node:
        assert first.join(params).members == ()
        late_node, late = start("1")
        with late_node, ThreadPoolExecutor(1) as pool:
            visit = pool.submit(lambda: (late.join(others), late.leave(others)))
            while not visit.done():
                first.step(np.zeros(8, np.float32), params)
            assert visit.result()[0].is_late
            assert others.all()


@pytest.mark.parametrize(
    ("variables", "bind"),
    [
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, "0.0.0.0:29500"),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, "127.0.0.1:0"),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, "127.0.0.1:0"),
        ({"GRADWIRE_PEERS": ","}, "127.0.0.1:0"),
        ({"GRADWIRE_PEERS": "10.1.1.7:40123"}, "0.0.0.0:0"),
        ({}, "127.0.0.1:0"),
    ],
)
def test_a_node_that_begins_alone_is_reached_if_its_run_has_others(
    variables: dict[str, str], bind: str
) -> None:
    local_size = {"LOCAL_WORLD_SIZE": "1"} if variables.get("WORLD_SIZE") == "1" else {}
    place = placement({**variables, **local_size, "GRADWIRE_MIN_PEERS": "0"})
    assert place.node_options(per_machine=True)["bind"] == bind
    assert place.is_alone(per_machine=True) == bind.startswith("127")
    assert place.expected_peers(per_machine=True) == 0


def test_a_run_of_several_nodes_never_goes_on_alone_and_names_who_is_missing(
    environment: pytest.MonkeyPatch,
) -> None:
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "3"}.items():
        environment.setenv(name, value)
    with gw.Node.from_env(bind="127.0.0.1:0") as node:
        assert repr(node).startswith("<gradwire.Node rank 0 at 127.0.0.1:")
        share = gw.Exchange(gw.Encoder(2), node, timeout_s=0.2)
        with pytest.raises(TimeoutError, match="rank 1, rank 2 missing"):
            share.wait_for_peers()
    environment.delenv("GRADWIRE_SECRET")
    with pytest.raises(ValueError, match="GRADWIRE_SECRET"):
        gw.Node.from_env(bind="127.0.0.1:0")


@pytest.mark.parametrize(
    ("secret", "node_id", "match"),
    [
        (bytes(range(1, 33)), 1, "another secret"),
        (bytes(range(32)), 0, "its node_id, 0, is that of this node"),
    ],
)
def test_a_peer_that_can_never_connect_is_an_error_long_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, node_id: int, match: str
) -> None:
    monkeypatch.setattr(node_module, "MISSING_LOG_S", 0.3)
    other = f"127.0.0.1:{cli_run.free_port()}"
    # Another secret proves nothing about its sender, so it counts only from the address of an awaited peer.
    seeds = [other] if node_id else []
    with gw.Node("127.0.0.1:0", seeds, secret=bytes(range(32)), node_id=0) as one:
        found: list[Any] = []

        def wait() -> None:
            try:
                one.wait_for_peers(1, timeout_s=60.0)
            except TimeoutError as error:
                found.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        # Two nodes of one id that began in the same millisecond would take each other for themselves.
        monkeypatch.setattr("time.time_ns", lambda now=time.time_ns: now() + 5_000_000)
        with gw.Node(other, [one.address], secret=secret, node_id=node_id):
            thread.join(10.0)
    assert found
    assert match in found[0]


def run(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "work.py"
    path.write_text(script)
    command = [sys.executable, "-m", "gradwire", "run", *options, str(path), "--epochs", "3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_gradwire_run_starts_workers_that_know_their_place(tmp_path: Path) -> None:
    script = """
import os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
print(*(os.environ[name] for name in names), len(os.environ["GRADWIRE_SECRET"]), *sys.argv[1:])
"""
    done = run(tmp_path, script, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 2 0 2 64 --epochs 3",
        "[1] 1 2 1 2 64 --epochs 3",
    ]


def test_gradwire_run_ends_all_workers_when_one_fails(tmp_path: Path) -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("no data")
time.sleep(600)
"""
    done = run(tmp_path, script, "-n", "2")
    assert done.returncode == 1
    assert "[1] no data" in done.stderr
    assert "[1] ended with status 1; the others are ended" in done.stderr


def test_gradwire_run_names_a_signal_that_python_has_no_name_for(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 3
    done = run(tmp_path, f"import os; os.kill(os.getpid(), {number})", "-n", "1")
    assert done.returncode == 128 + number
    assert f"[0] ended with signal {number}; the others are ended" in done.stderr
    assert "Traceback" not in done.stderr


def test_gradwire_run_does_not_wait_for_what_a_worker_has_left_behind(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_run, "_LAST_OUTPUT_S", 1.0)
    script = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    began_s = time.monotonic()
    assert cli_run.run_all([sys.executable, "-c", script], [dict(os.environ)], 1.0) == 0
    assert time.monotonic() - began_s < 30.0
    left = capfd.readouterr().out
    assert left.startswith("[0] ")
    os.kill(int(left.split()[1]), signal.SIGKILL)


def _hear_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_gradwire_run_lets_interrupted_workers_save(tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text("""
import time
try:
    print("ready")
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.3)
    print("saved")
""")
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A group of its own, all of which gets the signal, as from a terminal; a shell script's background job ignores it.
    with subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=_hear_sigint, **pipes
    ) as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]  # type: ignore[union-attr]
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"], err
    assert process.returncode == 130


class Gone(io.StringIO):
    """A stream that nobody reads any more."""

    def write(self, *_: object) -> int:
        raise BrokenPipeError


# More than a pipe holds. A worker that waits for a reader gets SIGALRM.
TALKING = "import signal; signal.alarm(20); print('\u4e2d' * 100_000); exit(3)"


@pytest.mark.parametrize("stream", ["gone", "ascii", "closed"])
def test_gradwire_run_goes_on_where_its_output_is_not_read_or_lacks_a_character(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    target = Gone() if stream == "gone" else io.TextIOWrapper(content, "ascii")
    if stream == "closed":
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
    streams = [] if stream == "closed" else [target, target]
    places = [{**os.environ, "PYTHONIOENCODING": "utf-8"}]
    assert cli_run.run_all([sys.executable, "-c", TALKING], places, 0.2, *streams) == 3
    if stream == "ascii":
        assert b"[0] \\u4e2d\\u4e2d" in content.getvalue()


def test_the_status_of_the_workers_is_that_of_the_command_when_nobody_reads_its_output(
    tmp_path: Path,
) -> None:
    path = tmp_path / "work.py"
    path.write_text("print('text'); exit(3)")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "gradwire", "run", "-n", "1", str(path)],
            stdout=closed,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONUNBUFFERED": "",  # what is left in the buffer is written at the end, again in vain
            },
        )
    assert done.returncode == 3, done.stderr


def test_workers_of_one_machine_do_not_inherit_what_is_said_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["GRADWIRE_BIND", "GRADWIRE_IP", "GRADWIRE_MIN_PEERS", "GRADWIRE_PEERS"]
    names.append("GROUP_WORLD_SIZE")
    for name in names:
        monkeypatch.setenv(name, "7")
    for place in cli_run.environments(2, as_machines=True):
        assert [name for name in names if name in place] == []
        assert placement(place).expected_peers() == 1


def test_an_interrupt_while_the_workers_start_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[subprocess.Popen[str]] = []

    class Worker(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            workers.append(self)

    def environments() -> Iterator[dict[str, str]]:
        yield {**os.environ}
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Worker)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert cli_run.run_all(command, environments(), 0.2) == 130
    assert workers[0].poll() == -signal.SIGTERM


SAVING = """
import signal, sys, time

def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(0)

def stay(*_):
    print("stays", flush=True)

signal.signal(signal.SIGTERM, save if sys.argv[1] == "saves" else stay)
print("trains", flush=True)
time.sleep(60)
"""


def _handle_sighup() -> None:
    """Undo what nohup does, under which these tests may run."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start_run(
    tmp_path: Path, grace: str, what: str, script_text: str = SAVING
) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(script_text)
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", *grace.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [*command, str(script), what],
        env=environment,
        preexec_fn=_handle_sighup,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert {run.stdout.readline() for _ in range(2)} == {"[0] trains\n", "[1] trains\n"}
    return run


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_workers_have_the_time_to_save_when_the_run_is_ended(
    end: signal.Signals, tmp_path: Path
) -> None:
    run = start_run(tmp_path, "", "saves")
    run.send_signal(end)
    output, errors = run.communicate(timeout=30)
    assert output.count("saved") == 2
    assert "killed" not in errors
    assert run.returncode == 128 + end


LEAVING = """
import os, pathlib, signal, sys, time

def leave(*_):
    pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
print("trains", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent has died"
)
def test_workers_of_a_killed_run_do_not_train_on(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    run = start_run(tmp_path, "", str(folder), LEAVING)
    run.kill()
    run.communicate(timeout=30)
    deadline_s = time.monotonic() + 20
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert {path.name for path in folder.iterdir()} == {"0", "1"}


def _ignore_sighup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import os, signal, sys, time

def save(*_):
    for _ in range(2):
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGHUP)
time.sleep(0.3)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(20)
""")
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "1", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=_ignore_sighup,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "[0] saved\n"


@pytest.mark.parametrize("how", ["--grace 0.2", "a second signal"])
def test_workers_that_do_not_end_are_killed(how: str, tmp_path: Path) -> None:
    run = start_run(tmp_path, how if how[0] == "-" else "", "stays")
    run.terminate()
    assert run.stdout is not None
    assert {run.stdout.readline() for _ in range(2)} == {"[0] stays\n", "[1] stays\n"}
    if how[0] != "-":
        run.terminate()
    _, errors = run.communicate(timeout=25)  # less than the grace
    assert "workers [0, 1] still run and are killed" in errors
    assert run.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "soon"])
def test_an_impossible_grace_is_refused(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-n", "2", f"--grace={grace}", "train.py"])
    error = capsys.readouterr().err
    assert f"--grace: '{grace}' must be a number of seconds, 0 or more" in error


def test_a_free_port_is_none_that_another_program_gets_meanwhile() -> None:
    ports = {cli_run.free_port() for _ in range(50)}
    assert len(ports) > 40
    assert all(20_000 <= port < 32_768 for port in ports)  # Linux gives away those from there on
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", cli_run.free_port()))


def test_too_many_workers_are_refused_before_memory_is_taken_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-n", "99999999999", __file__]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "gradwire run: -n is 99999999999, must be 1 to 1024"


def test_workers_that_the_system_does_not_start_are_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert main(["run", "-n", "2", __file__]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gradwire run: 2 workers cannot be started: ")
    assert line.endswith("Resource temporarily unavailable")


@pytest.mark.parametrize(
    ("bind", "peer"), [("[::1]:0", "127.0.0.1:40123"), ("127.0.0.1:0", "[::1]:40123")]
)
def test_a_peer_of_the_other_ip_version_is_named_as_that(bind: str, peer: str) -> None:
    with pytest.raises(ValueError, match="bind an address of the peers' IP version"):
        gw.Node(bind, [peer], secret=bytes(range(32)))


# ---- names that come later, or have IPv6 addresses only --------------------------------------------------------------


def names(monkeypatch: pytest.MonkeyPatch, *answers: str | None) -> list[str]:
    """Let names resolve to these addresses, one question after the other; None: the name is not known yet."""
    asked: list[str] = []
    remaining = list(answers)

    def answer(host: str, *_: object, **__: object) -> Any:
        asked.append(host)
        address = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(family, socket.SOCK_DGRAM, 0, "", (address, 0))]

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", answer)
    monkeypatch.setattr(rendezvous, "_NAME_PAUSE_S", 0.001)
    return asked


WORKER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first.example", "MASTER_PORT": "29500"}


def options_of(variables: dict[str, str]) -> dict[str, Any]:
    place = placement(variables)
    return rendezvous.await_names(place, place.node_options())


def test_a_name_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = names(monkeypatch, None, None, None, "10.0.0.1")
    assert options_of(WORKER)["bind"] == "0.0.0.0:0"
    assert asked == ["first.example"] * 4
    assert caplog.text.count("is not known yet") == 1


@pytest.mark.parametrize("peers", [":40123", "a:0", "10.0.0.7:0", "me@host:7", "a:1,[b]x:2"])
def test_a_peer_that_can_never_be_there_is_refused_rather_than_waited_for(
    peers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = names(monkeypatch, None)
    with pytest.raises(ValueError, match=r"GRADWIRE_PEERS: address .* a name or an IP address"):
        options_of({rendezvous.PEERS: peers})
    assert not asked
    assert placement({rendezvous.BIND: ":40123"}).bind == ":40123"  # all of this machine's
    for peer in ("[fd00::1%eth0]:7", "node_1.example:7", "[::1]:7"):
        assert placement({rendezvous.PEERS: peer}).peers == (peer,)


@pytest.mark.parametrize("peers", ["10.0.0.7", "trainer-0", "::1", "10.0.0.1:1 b"])
def test_a_peer_without_a_port_is_refused_at_once(
    peers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = names(monkeypatch, "10.0.0.1")
    with pytest.raises(ValueError, match=r"GRADWIRE_PEERS: .*(host:port|\[host\]:port)"):
        options_of({rendezvous.PEERS: peers})
    assert not asked


def test_a_comma_at_the_end_is_no_peer() -> None:
    assert placement({rendezvous.PEERS: "a:1, b:2,"}).peers == ("a:1", "b:2")
    assert placement({rendezvous.PEERS: ","}).peers is None


def test_the_first_host_of_a_list_with_several_ranges() -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    for hosts, first in (("rack[0-1]n[3-4]", "rack0n3"), ("n[1-2]-x[03,5],b", "n1-x03")):
        assert placement({**variables, "SLURM_STEP_NODELIST": hosts}).seed.startswith(f"{first}:")


def test_a_name_that_never_comes_is_named_with_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, None)
    monkeypatch.setattr(rendezvous, "_NAME_WAIT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"'first.example' is not known within .*MASTER_ADDR"):
        options_of(WORKER)


def test_names_with_addresses_of_ip_version_6_only_get_its_wildcard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, "fd00::1")
    assert options_of(WORKER)["bind"] == "[::]:0"
    assert options_of({**WORKER, "RANK": "0"})["bind"] == "[::]:29500"
    peers = {rendezvous.PEERS: "a.example:1 b.example:2", rendezvous.MIN_PEERS: "2"}
    assert options_of(peers)["bind"] == "[::]:0"
    assert options_of({**peers, rendezvous.BIND: "0.0.0.0:7"})["bind"] == "0.0.0.0:7"


def test_rank_0_need_not_know_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = names(monkeypatch, None)
    assert options_of({**WORKER, "RANK": "0"})["bind"] == "0.0.0.0:29500"
    assert len(asked) == 1


@pytest.mark.parametrize(
    "shell", [{"SLURM_PTY_PORT": "1"}, {"SLURM_PTY_WIN_ROW": "9"}, {"SLURM_STEP_ID": "4294967290"}]
)
def test_an_interactive_shell_of_slurm_is_told_what_to_set(shell: dict[str, str]) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a,b", **shell}
    place = placement(variables)
    assert "srun, or run `unset SLURM_PROCID SLURM_NTASKS`" in place.hint
    assert place.names()[1] == "rank 1 of SLURM"
    assert not placement({**variables, "SLURM_NTASKS": "1"}).hint
    started = placement({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a,b"})
    assert (started.hint, started.names()[1]) == ("", "rank 1")


# ---- a start that takes long -----------------------------------------------------------------------------------------


def test_share_waits_long_for_the_start_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", rendezvous.PEERS, rendezvous.MIN_PEERS):
        monkeypatch.delenv(name, raising=False)

    def start_of(**options: Any) -> float:
        with gw.share(np.zeros(8, np.float32), **options) as shared:
            waits: float = shared.exchange._options.longest_start_s
            return waits

    assert start_of() == 1800.0
    assert start_of(timeout_s=5.0) == 5.0
    assert start_of(timeout_s=5.0, start_timeout_s=9.0) == 9.0
    with pytest.raises(ValueError, match=r"start_timeout_s is 0\.0, must be positive"):
        start_of(start_timeout_s=0.0)


def test_a_missing_rank_and_the_remedy_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "MISSING_LOG_S", 0.05)
    for name, value in {**WORKER, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GRADWIRE_SECRET", bytes(range(32)).hex())
    with pytest.raises(TimeoutError, match=r"rank 0 missing.*larger start_timeout_s"):
        gw.share(np.zeros(8, np.float32), start_timeout_s=0.2).join()
    assert re.search(r"0 of 1 peers connected to \S+ yet, waiting 0\.2 s; rank 0", caplog.text)
