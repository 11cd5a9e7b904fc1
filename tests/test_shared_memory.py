"""Shared memory: nothing stays that no living process holds, however its process ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import shared_memory
from gradwire.cli import main
from gradwire.feed import Feed, ring

PARAMETERS = 1 << 16
TEAM_BYTES = (3 + 2) * 4 * PARAMETERS

# What leaves memory behind when it is killed. Every process prints its folder's files once, when its own are there.
HOLDERS = {
    "team": """
params = [np.zeros(1 << 16, np.float32)]
held = gw.LocalTeam(name, params, size=2, rank=0)
""",
    "worker": """
params = [np.zeros(1 << 16, np.float32)]
held = gw.LocalTeam(name, size=2, rank=1)
""",
    "model": """
held = gw.HostedModel(name, [np.zeros(1 << 16, np.float32)])
""",
    "feed": """
from multiprocessing import resource_tracker
from gradwire.feed import Feed
held = Feed(batches=2, batch_bytes=1 << 16)
os.kill(resource_tracker._resource_tracker._pid, 9)  # as where a container ends, with all processes
""",
}
BODY = """
import os, sys
import numpy as np
import gradwire as gw
from gradwire import shared_memory
from gradwire.feed import ring
from pathlib import Path

name = sys.argv[1]
shared_memory.FOLDER = Path(sys.argv[2])
{holder}
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the files of these tests apart from those of the machine."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def own_prefix(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A prefix of files in the machine's own shared memory, where feeds have to be."""
    prefix = f"gradwire-test{os.getpid()}-"
    monkeypatch.setattr(shared_memory, "PREFIX", prefix)
    monkeypatch.setattr(ring, "PREFIX", prefix)
    yield prefix
    for path in shared_memory.FOLDER.glob(f"{prefix}*"):
        path.unlink()


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()


BEGINNINGS: dict[str, Callable[[], Any]] = {
    "team": lambda: gw.LocalTeam("another", [np.zeros(3, np.float32)], size=1, rank=0),
    "model": lambda: gw.HostedModel("another", [np.zeros(3, np.float32)]),
    "feed": lambda: Feed(batches=2, batch_bytes=10),
}


@pytest.mark.parametrize("begin", ["team", "model"])
@pytest.mark.parametrize("kind", ["team", "worker", "model"])
def test_what_a_killed_process_has_left_goes_when_anything_of_another_name_begins(
    kind: str, begin: str, folder: Path
) -> None:
    living = start(BODY.format(holder=HOLDERS[kind]), "living", str(folder))
    killed = start(BODY.format(holder=HOLDERS[kind]), "killed", str(folder))
    kill(killed)
    before = shared_memory.usage()
    assert len(list(folder.glob("*-killed*"))) == 1
    assert (before.left_bytes > 0) == (kind != "worker"), "a worker's file has no bytes"
    with BEGINNINGS[begin]():
        assert list(folder.glob("*-killed*")) == []
        assert len(list(folder.glob("*-living*"))) == 1
        assert shared_memory.usage().left_bytes == 0
    kill(living)


def test_what_a_killed_leader_has_left_goes_when_the_last_worker_ends(folder: Path) -> None:
    killed = start(BODY.format(holder=HOLDERS["team"]), "killed", str(folder))
    with gw.LocalTeam("killed", [np.zeros(1 << 16, np.float32)], size=2, rank=1):
        kill(killed)
    assert list(folder.iterdir()) == []


def test_who_waits_for_the_feed_of_a_killed_process_removes_it(own_prefix: str) -> None:
    code = BODY.format(holder=HOLDERS["feed"])
    code = code.replace("shared_memory.FOLDER = Path(sys.argv[2])", "ring.PREFIX = sys.argv[2]")
    killed = start(code, "", own_prefix)
    [path] = shared_memory.FOLDER.glob(f"{own_prefix}*")
    feed = Feed.attach(path.name)
    kill(killed)
    with pytest.raises(gw.Closed):
        feed.get(timeout_s=20)
    assert not path.exists()


def test_what_the_maker_of_a_feed_has_left_goes_too(own_prefix: str) -> None:
    code = BODY.format(holder=HOLDERS["feed"])
    code = code.replace("shared_memory.FOLDER = Path(sys.argv[2])", "ring.PREFIX = sys.argv[2]")
    living = start(code, "", own_prefix)
    killed = start(code, "", own_prefix)
    kill(killed)
    assert len(list(shared_memory.FOLDER.glob(f"{own_prefix}*"))) == 2
    with Feed(batches=2, batch_bytes=10) as feed:
        names = {path.name for path in shared_memory.FOLDER.glob(f"{own_prefix}*")}
        assert len(names) == 2
        assert feed.name in names
    kill(living)


def test_a_state_lives_as_long_as_the_memory_to_which_it_belongs(folder: Path) -> None:
    with gw.LocalTeam("team", [np.zeros(3, np.float32)], size=1, rank=0) as team:
        team.publish_state([np.zeros(3, np.float32)])
        shared_memory.free_leftovers()
        assert len(list(folder.glob("*.state"))) == 1
    left = folder / f"gradwire-{os.getuid()}-team-team.state"
    left.write_bytes(b"state")
    assert shared_memory.free_leftovers().left_bytes > 0
    assert not left.exists()
    # A name may end like a state.
    with gw.LocalTeam("team.state", [np.zeros(3, np.float32)], size=1, rank=0):
        assert shared_memory.free_leftovers().left_bytes == 0


def test_files_of_others_stay(folder: Path) -> None:
    others = folder / "torch_1234"
    others.write_bytes(b"x")
    (folder / "gradwire-link").symlink_to(others)
    (folder / "gradwire-folder").mkdir()
    shared_memory.free_leftovers()
    assert sorted(path.name for path in folder.iterdir()) == [
        "gradwire-folder",
        "gradwire-link",
        "torch_1234",
    ]


def test_many_beginnings_at_once_do_not_take_each_other_s_files(folder: Path) -> None:
    errors: list[BaseException] = []

    def begin(rank: int) -> None:
        try:
            for number in range(20):
                with gw.LocalTeam(f"team-{rank}-{number}", size=2, rank=0) as team:
                    assert shared_memory.is_held(team._path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("begin", ["team", "model", "feed"])
def test_too_little_memory_is_refused_with_the_numbers_and_the_ways_out(
    begin: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(ring, "FOLDER", folder)
    text = r"not fit .* \([\d,]+ bytes of shared memory are needed, [\d,]+ of [\d,]+ are free: No space"
    with pytest.raises(OSError, match=text) as caught:
        BEGINNINGS[begin]()
    assert "docker run --shm-size=" in str(caught.value)
    assert ("gradwire run --as-machines" in str(caught.value)) == (begin == "team")
    assert list(folder.iterdir()) == []


# ---- runs that end badly ---------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import numpy as np
import gradwire as gw

rank, end = os.environ["RANK"], sys.argv[1]
shared = gw.share(np.zeros(1 << 16, np.float32))
for step in range(3):
    if step == 2:  # which needs both ranks: when one ends, both have said their team's name
        print(shared.exchange.team.name, flush=True)
    shared.step(np.ones(1 << 16, np.float32))
if end == f"raise {rank}":
    raise RuntimeError("fails")
if end == f"kill {rank}":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["raise 0", "raise 1", "kill 0", "kill 1", "SIGTERM"])
def test_a_run_that_ends_badly_leaves_nothing(end: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", str(script), end]
    run = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    assert run.stdout is not None
    [team] = {run.stdout.readline().split()[1] for _ in range(2)}
    if end == "SIGTERM":
        run.send_signal(signal.SIGTERM)
    assert run.wait(60) != 0
    run.stdout.close()
    assert list(shared_memory.FOLDER.glob(f"gradwire-*-team-{team}*")) == []


def test_doctor_shows_what_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = folder / f"gradwire-{os.getuid()}-model-gone"
    left.write_bytes(bytes(1 << 20))
    main(["doctor"])
    assert "1.05 MB left by killed processes" in capsys.readouterr().out
    assert left.exists()
