"""A host's checkpoint is data: a file that is another, or was changed, is refused and runs no code."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.coprocessor import SGD, Host, Worker

from . import test_coprocessor
from .test_coprocessor import Cluster, flat, gradients, reach

cluster = test_coprocessor.cluster


def test_a_checkpoint_of_other_arrays_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.host(path=tmp_path / "checkpoint").save()
    with pytest.raises(gw.Mismatch, match=r"the checkpoint .* is of .*\[3, 5\].* not of .*\[22\]"):
        cluster.host(params=[np.zeros(22, np.float32)], path=tmp_path / "checkpoint")


@pytest.mark.torch
def test_a_checkpoint_of_another_optimizer_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    params = [torch.zeros(3, requires_grad=True)]
    options: dict[str, Any] = {"params": params, "path": tmp_path / "checkpoint"}
    cluster.host(torch.optim.AdamW(params), **options).save()
    with pytest.raises(gw.Mismatch, match=r"of .*AdamW.* not of .*SGD"):
        cluster.host(torch.optim.SGD(params, lr=0.1), **options)


class Touching:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_that_is_no_checkpoint_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    for content in (b"", b"something else", b"[" * 100_000, pickle.dumps([1])):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match="file is no checkpoint of a host"):
            cluster.host(path=tmp_path / "file")


def test_a_checkpoint_runs_no_code(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(Touching(tmp_path / "touched")))
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        cluster.host(path=tmp_path / "file")
    assert not (tmp_path / "touched").exists()


@pytest.mark.torch
def test_the_state_of_an_optimizer_of_torch_runs_no_code(cluster: Cluster, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    params = [torch.zeros(3, requires_grad=True)]

    def host() -> Host:
        return cluster.host(torch.optim.Adam(params), params=params, path=tmp_path / "file")

    host().save()
    document, _, _ = (tmp_path / "file").read_bytes().partition(b"\n")
    state = io.BytesIO()
    torch.save({"state": Touching(tmp_path / "touched")}, state)
    changed = json.loads(document)
    changed["arrays"]["torch"] = [["uint8", [len(state.getvalue())]]]
    data = json.dumps(changed).encode() + b"\n" + bytes(12) + state.getvalue()
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        host()
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"version": 10**30},
        {"version": 0.5},
        {"taken": [[1, -2]]},
        {"taken": [[1.5, 2]]},
        {"taken": 7},
        {"arrays": {}},
        {"arrays": {"params": [["float32", [3, 5]]], "velocity": [["float32", [7]]]}},
        {"arrays": {"params": [["float32", [-22]]]}},
        {"arrays": {"params": [["object", [11]]]}},
        {"arrays": {"params": [["float32", [10**12]]]}},
        {"arrays": {"params": [["float32", []]] * 1_000_000}},
        {"arrays": {"params": [["float32", [3, 5]], ["float32", [7]]], "batch": []}},
    ],
)
def test_a_changed_checkpoint_is_refused(
    cluster: Cluster, tmp_path: Path, change: dict[str, Any]
) -> None:
    cluster.host(path=tmp_path / "file").save()
    document, _, data = (tmp_path / "file").read_bytes().partition(b"\n")
    text = json.dumps({**json.loads(document), **change}).encode()
    (tmp_path / "file").write_bytes(text + b"\n" + data)
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        cluster.host(path=tmp_path / "file")


@pytest.mark.parametrize("data", [b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"more", b""])
def test_a_checkpoint_with_other_numbers_is_refused(
    cluster: Cluster, tmp_path: Path, data: bytes
) -> None:
    cluster.host(path=tmp_path / "file").save()
    content = (tmp_path / "file").read_bytes()
    content = content[:-4] + data if data != b"more" else content + data
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        cluster.host(path=tmp_path / "file")


def test_a_host_whose_step_was_interrupted_goes_on_from_its_checkpoint_only(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "host"
    host = cluster.host(name="model", path=path)
    worker = cluster.worker(host)
    for gradient in itertools.islice(gradients(2), 2):
        worker.send(gradient)
        reach(host, host.version + 1)
    host.save()
    params = flat(host.params)
    apply = SGD.apply

    def interrupted(self: SGD, messages: Any, params: Any) -> None:
        apply(self, messages, params)
        raise KeyboardInterrupt

    monkeypatch.setattr(SGD, "apply", interrupted)
    worker.send(next(gradients(7)))
    with pytest.raises(KeyboardInterrupt):
        reach(host, 3)
    monkeypatch.setattr(SGD, "apply", apply)
    for call in (host.step, host.save, host.finish):
        with pytest.raises(gw.GradwireError, match="step 3 of the descent was interrupted"):
            call()
    with pytest.raises(TimeoutError):
        gw.HostedModel.attach("model").snapshot(0.05)
    host.close()
    again = cluster.host(path=path)
    assert again.version == 2
    np.testing.assert_array_equal(flat(again.params), params)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"node": None}, "node must be a Node, got None"),
        ({"params": None}, "parameters must be all float32 or all float64"),
        ({"threshold": "0.1"}, "threshold must be a threshold policy or a number"),
        ({"path": "/nowhere/at/all"}, "path is '/nowhere/at/all', whose folder does not exist"),
    ],
)
def test_a_host_refuses_at_once_what_would_fail_later(
    cluster: Cluster, options: dict[str, Any], complaint: str
) -> None:
    given = {"node": cluster.node(), "params": [np.zeros(3, np.float32)], "optimizer": SGD(0.1)}
    with pytest.raises((OSError, TypeError, ValueError), match=complaint):
        Host(**{**given, **options})  # type: ignore[arg-type]
    assert len(Host(**{**given, "params": np.zeros(3, np.float32)}).params) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"node": "127.0.0.1:1"}, "node must be a Node, got '127.0.0.1:1'"),
        ({"params": {"w": np.zeros(3)}}, "not an array"),
        ({"threshold": -1.0}, "a threshold must be positive and finite"),
        ({"timeout_s": "5"}, "timeout_s must be a number, got '5'"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_a_worker_refuses_before_it_waits_for_a_host(
    cluster: Cluster, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        Worker(**{"node": cluster.node(), "timeout_s": 30.0, **options})


def test_a_descent_has_numbers() -> None:
    for wrong in ("0.1", None, True, [0.1]):
        with pytest.raises(TypeError, match="lr must be a number"):
            SGD(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="momentum must be a number"):
            SGD(0.1, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nesterov must be True or False"):
        SGD(0.1, 0.9, nesterov="no")  # type: ignore[arg-type]
    assert repr(SGD(np.float32(0.5), np.float64(0.25))) == repr(SGD(0.5, 0.25))
