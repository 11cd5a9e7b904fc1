"""A model in shared memory: readers see what its host writes, consistently, and only while the host lives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import HostedModel, hosted, shared_memory

HOST = """
import sys, numpy as np
from gradwire.hosted import HostedModel
model = HostedModel(sys.argv[1], [np.full(1 << 16, 7.0, np.float32)])
if sys.argv[2] == "writing":
    writing = model.writing()
    writing.__enter__()[0][0] = 8.0
print("ready", flush=True)
sys.stdin.read()
"""


def arrays(value: float = 0.0) -> list[NDArray[Any]]:
    return [np.full((3, 5), value, np.float32), np.full(7, value, np.float64)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the files of these tests apart from those of the machine."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def name() -> str:
    """A name for models that other processes host in the machine's own shared memory."""
    return f"test-{os.getpid()}"


def start_host(name: str, doing: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOST, name, doing]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    host = subprocess.Popen(command, env=environment, text=True, **pipes)
    assert host.stdout is not None
    assert host.stdout.readline() == "ready\n"
    return host


def test_a_reader_sees_what_the_host_writes_without_a_copy() -> None:
    with HostedModel("model", arrays(1.0)) as host:
        reader = HostedModel.attach("model", like=arrays())
        assert (reader.version, reader.is_live) == (0, True)
        assert host.update(arrays(2.0)) == 1
        with host.writing() as params:
            params[0][0, 0] = 3.0
        assert reader.version == 2
        assert reader.params[0].ravel()[:2].tolist() == [3.0, 2.0]
        assert [one.ctypes.data % 64 for one in reader.params] == [0, 0]
        with pytest.raises(ValueError, match="read-only"):
            reader.params[0][...] = 0.0
        with pytest.raises(gw.GradwireError, match="only the process that hosts"):
            reader.update(arrays())


def test_a_snapshot_has_one_version_while_the_host_writes() -> None:
    numel, versions = 1 << 14, 400
    with HostedModel("model", np.zeros(numel, np.int64)) as host:
        reader, seen = HostedModel.attach("model"), []

        def read() -> None:
            while not seen or seen[-1] < versions:
                found = reader.snapshot()
                assert (found.params[0] == found.version).all()
                seen.append(found.version)

        thread = threading.Thread(target=read)
        thread.start()
        for version in range(1, versions + 1):
            with host.writing() as (params,):
                for part in np.split(params, 4):  # a reader may run between two of them
                    part[...] = version
        thread.join(60.0)
    assert seen == sorted(seen)
    assert seen[-1] == versions


def test_a_host_says_that_the_parameters_are_final() -> None:
    host = HostedModel("model", arrays(1.0), version=7)
    reader = HostedModel.attach("model")
    assert (reader.version, reader.is_finished) == (7, False)
    host.update(arrays(2.0))
    with pytest.raises(gw.GradwireError, match="only the process that hosts"):
        reader.finish()
    host.finish()
    host.close()
    assert (reader.version, reader.is_finished, reader.is_live) == (8, True, False)


def test_a_dead_host_s_file_is_not_taken_for_a_model_while_it_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostedModel("model", arrays())
    (path,) = folder.iterdir()
    leftover = path.read_bytes()
    host.close()
    path.write_bytes(leftover)
    answers = [True]  # a new host holds the lock for a moment, before it removes the file
    monkeypatch.setattr(shared_memory, "is_locked", lambda _: bool(answers and answers.pop()))
    with pytest.raises(FileNotFoundError, match="no living process"):
        HostedModel.attach("model")


def test_a_snapshot_gives_up_when_the_host_does_not_finish_writing() -> None:
    with HostedModel("model", arrays()) as host, host.writing():
        reader = HostedModel.attach("model")
        with pytest.raises(TimeoutError, match="no consistent copy of the model 'model'"):
            reader.snapshot(timeout_s=0.0)


@pytest.mark.torch
def test_what_an_interrupted_write_leaves_is_no_version() -> None:
    with HostedModel("model", arrays(1.0)) as host, HostedModel.attach("model") as reader:
        with suppress(ValueError), host.writing():
            host.params[0][...] = 2.0
            raise ValueError("half")
        with pytest.raises(TimeoutError):
            reader.snapshot(0.05)
        host.params[0][...] = 0.0
        assert host.update(arrays(3.0)) == 1
        snapshot = reader.snapshot()
        assert snapshot.version == 1
        assert all((array == 3.0).all() for array in snapshot.params)


def test_a_write_that_is_interrupted_before_it_begins_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()

    with HostedModel("model", arrays(1.0)) as host:
        monkeypatch.setattr(hosted, "fence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            host.update(arrays(2.0))
        assert host.update(arrays(3.0)) == 1


def test_a_write_within_a_write_is_refused() -> None:
    with HostedModel("model", arrays(1.0)) as host:
        with host.writing(), pytest.raises(gw.GradwireError, match="inside writing"):
            host.update(arrays(2.0))
        assert host.version == 1
        assert host.update(arrays(2.0)) == 2


def test_tensors_that_require_grad_can_be_hosted() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer = torch.nn.Linear(3, 2)
    with HostedModel("model", layer.parameters()) as host:
        reader = HostedModel.attach("model", like=layer.parameters())
        with torch.no_grad():
            layer.bias.fill_(5.0)
        host.update(layer.parameters())
        assert torch.equal(torch.from_numpy(reader.snapshot().params[0]), layer.weight)
        assert reader.params[1].tolist() == [5.0, 5.0]


def test_a_model_that_nobody_hosts_is_refused(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no living process .* hosts a model 'model'"):
        HostedModel.attach("model")
    host = HostedModel("model", arrays(4.0))
    reader = HostedModel.attach("model")
    host.close()
    assert not reader.is_live
    assert reader.snapshot().params[1].tolist() == [4.0] * 7  # the last ones
    assert list(folder.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        HostedModel.attach("model")
    with pytest.raises(gw.GradwireError, match="only the process that hosts"):
        host.update(arrays())


def test_another_layout_is_refused() -> None:
    with HostedModel("model", arrays()) as host:
        other = [np.zeros((5, 3), np.float32), np.zeros(7)]
        with pytest.raises(gw.Mismatch, match=r"\[3, 5\].* expected .*\[5, 3\]"):
            HostedModel.attach("model", like=other)
        with pytest.raises(gw.Mismatch, match=r"\[3, 5\].* got .*\[5, 3\]"):
            host.update(other)
        assert host.version == 0


def test_two_living_hosts_cannot_have_one_name() -> None:
    with (
        HostedModel("model", arrays()),
        pytest.raises(ValueError, match="a living process hosts a model"),
    ):
        HostedModel("model", arrays())


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the name"):
        HostedModel(name, arrays())


def test_only_numbers_are_hosted() -> None:
    with pytest.raises(TypeError, match="arrays of numbers"):
        HostedModel("model", [np.array(["text"])])


READER = """
import sys
from gradwire.hosted import HostedModel
reader = HostedModel.attach(sys.argv[1])
if sys.argv[2] == "stopped":
    waiting = reader._file.waiting()
    waiting.__enter__()
else:
    version, params = reader.snapshot(timeout_s=30.0)
    assert (params[0] == version).all()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_host_that_always_writes_lets_another_process_copy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with HostedModel(name, np.zeros(1 << 20, np.int64)) as host:
        done = threading.Event()

        def read() -> None:
            monkeypatch.setattr(sys.modules[__name__], "HOST", READER)
            start_host(name).communicate()
            done.set()

        thread = threading.Thread(target=read)
        thread.start()
        end_s = time.monotonic() + 60.0  # a busy machine starts the reader late
        version = 0
        while not done.is_set() and time.monotonic() < end_s:
            version += 1
            with host.writing() as (params,):
                params[...] = version
                time.sleep(0.01)  # much longer than the time between two versions
        assert done.is_set()
        thread.join(30.0)


def test_a_reader_that_is_stopped_delays_the_host_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    waits: list[float] = []
    monkeypatch.setattr(hosted, "_READERS_S", 0.2)
    monkeypatch.setattr(hosted.time, "sleep", waits.append)
    with HostedModel(name, arrays()) as host:
        monkeypatch.setattr(sys.modules[__name__], "HOST", READER)
        reader = start_host(name, "stopped")
        host.update(arrays(1.0))
        waited = len(waits)
        assert waited
        host.update(arrays(2.0))
        assert len(waits) == waited
        reader.communicate()
        host.update(arrays(3.0))  # there is no reader
        assert len(waits) == waited


def test_another_process_reads_until_the_host_dies_and_the_name_is_free_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    host = start_host(name, "writing")
    reader = HostedModel.attach(name, timeout_s=30.0)
    assert reader.params[0][:2].tolist() == [8.0, 7.0]
    assert reader.is_live
    host.kill()
    host.communicate()
    with pytest.raises(gw.GradwireError, match="died while it wrote version 1"):
        reader.snapshot()
    with pytest.raises(FileNotFoundError):
        HostedModel.attach(name)
    with HostedModel(name, arrays(1.0)):  # in the place of the dead host's file
        assert HostedModel.attach(name).params[0][0, 0] == 1.0
        assert reader.params[0][0] == 8.0


def test_a_child_that_outlives_the_host_does_not_keep_the_model_alive(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    fork = 'import os, time\nif os.fork():\n    time.sleep(60)\nprint("ready"'
    monkeypatch.setattr(sys.modules[__name__], "HOST", HOST.replace('print("ready"', fork))
    host = start_host(name)
    assert HostedModel.attach(name).is_live
    host.kill()
    host.wait(30.0)
    with pytest.raises(FileNotFoundError):
        HostedModel.attach(name)
    assert host.stdin is not None
    host.stdin.close()
    HostedModel(name, arrays()).close()


@pytest.mark.parametrize("params", [None, 1.0, {"w": np.zeros(3, np.float32)}])
def test_what_are_no_arrays_is_not_hosted(name: str, params: Any) -> None:
    with pytest.raises(TypeError, match="params must be an array or several"):
        HostedModel(name, params)


def test_numbers_of_a_model_are_checked(name: str) -> None:
    for version in ("1", True, 1.0):
        with pytest.raises(TypeError, match="version must be an int"):
            HostedModel(name, arrays(), version=version)  # type: ignore[arg-type]
    with HostedModel(name, arrays(), version=np.int64(3)) as model:
        assert model.version == 3
        for timeout_s in ("1", None, float("nan")):
            with pytest.raises((TypeError, ValueError), match="timeout_s"):
                HostedModel.attach("nobody", timeout_s=timeout_s)  # type: ignore[arg-type]
            with pytest.raises((TypeError, ValueError), match="timeout_s"):
                model.snapshot(timeout_s)  # type: ignore[arg-type]
