"""A host's checkpoint is data: a file that is another, or was changed, is refused and runs no code."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import coprocessor
from gradwire.coprocessor import SGD, Host, Worker

from . import test_coprocessor
from .test_coprocessor import QUICK, Cluster, flat, gradients, kill, reach

cluster = test_coprocessor.cluster


def test_a_checkpoint_of_other_arrays_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.host(path=tmp_path / "checkpoint").save()
    with pytest.raises(gw.Mismatch, match=r"the checkpoint .* is of .*\[3, 5\].* not of .*\[22\]"):
        cluster.host(params=[np.zeros(22, np.float32)], path=tmp_path / "checkpoint")


def test_a_checkpoint_that_does_not_fit_the_disk_leaves_the_last_one_alone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    host = cluster.host(path=path)
    host.save()
    saved = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with pytest.raises(
            OSError, match=r"checkpoint cannot be written \(No space left.*/checkpoint'"
        ) as raised:
            host.save()
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == saved
    assert list(tmp_path.glob("checkpoint*")) == [path]


@pytest.mark.torch
def test_a_checkpoint_of_another_optimizer_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    params = [torch.zeros(3, requires_grad=True)]
    options: dict[str, Any] = {"params": params, "path": tmp_path / "checkpoint"}
    cluster.host(torch.optim.AdamW(params), **options).save()
    with pytest.raises(gw.Mismatch, match=r"of .*AdamW.* not of .*SGD"):
        cluster.host(torch.optim.SGD(params, lr=0.1), **options)


@pytest.mark.torch
def test_an_optimizer_of_torch_goes_on_from_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def make(node: gw.Node | None = None) -> tuple[Host, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        params, path = list(model.parameters()), tmp_path / "checkpoint"
        return cluster.host(optimizer, node, params=params, path=path), optimizer

    host, optimizer = make()
    worker = cluster.worker(host, in_flight=0)
    for value in (1.0, 2.0, 3.0):
        cluster.run(host, lambda: worker.send(np.full(63, value, np.float32)))  # noqa: B023
    host.save()
    address = kill(host)
    resumed, other = make(cluster.node(bind=address))
    assert resumed.version == 3
    np.testing.assert_array_equal(flat(resumed.params), flat(host.params))
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(other.state_dict()["state"][index][key], value)
    cluster.run(resumed, lambda: worker.send(np.ones(63, np.float32)))
    assert resumed.version == 4


@pytest.mark.torch
@pytest.mark.parametrize("shapes", [[(2, 3), (3,)], [(3,), (3,)]], ids=["unequal", "equal"])
def test_a_state_of_an_optimizer_with_another_order_of_tensors_is_refused(
    cluster: Cluster, tmp_path: Path, shapes: list[tuple[int, ...]]
) -> None:
    """Torch tells the states of tensors apart by their places in the optimizer."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def make(order: list[int]) -> Host:
        params = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        optimizer = torch.optim.Adam([params[place] for place in order])
        return cluster.host(optimizer, params=params, path=tmp_path / "file")

    host = make([1, 0])
    gradient = gw.dense_message(np.arange(sum(map(math.prod, shapes)), dtype=np.float32))
    host._batch.append(gradient)
    host.step(0.0)
    host.save()
    with pytest.raises(gw.Mismatch, match=r"parameters in the order \[1, 0\], this one \[0, 1\]"):
        make([0, 1])
    assert make([1, 0]).version == 1


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
    state = io.BytesIO()
    torch.save({"state": Touching(tmp_path / "touched")}, state)
    *others, _ = read(tmp_path / "file")
    write(tmp_path / "file", *others, np.frombuffer(state.getvalue(), np.uint8))
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        host()
    assert not (tmp_path / "touched").exists()


def read(path: Path) -> list[Any]:
    with np.load(path) as file:
        return [file[name] for name in file]


def write(path: Path, *arrays: Any) -> None:
    with path.open("wb") as file:
        np.savez(file, *arrays)


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
        {"arrays": {"params": 1, "batch": 0, "velocity": 1}},
        {"arrays": {"params": -2, "batch": 0, "velocity": 0}},
        {"arrays": {"params": 10**12, "batch": 0}},
        {"arrays": {"params": 1, "batch": 1, "velocity": 0}},
        {"arrays": {"params": 2, "batch": 0}},
        {"arrays": 7},
    ],
)
def test_a_changed_checkpoint_is_refused(
    cluster: Cluster, tmp_path: Path, change: dict[str, Any]
) -> None:
    cluster.host(path=tmp_path / "file").save()
    document, *arrays = read(tmp_path / "file")
    text = json.dumps({**json.loads(document.tobytes()), **change}).encode()
    write(tmp_path / "file", np.frombuffer(text, np.uint8), *arrays)
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        cluster.host(path=tmp_path / "file")


@pytest.mark.parametrize(
    "array",
    [
        np.full(7, np.nan, np.float32),
        np.full(7, np.inf, np.float32),
        np.zeros(7, np.float16),
        np.zeros(7, object),
        np.zeros(8, np.float32),
    ],
    ids=["nan", "inf", "dtype", "object", "size"],
)
def test_a_checkpoint_with_other_arrays_is_refused(
    cluster: Cluster, tmp_path: Path, array: Any
) -> None:
    cluster.host(path=tmp_path / "file").save()
    document, weights, _ = read(tmp_path / "file")
    write(tmp_path / "file", document, weights, array)
    with pytest.raises(ValueError, match="file is no checkpoint of a host"):
        cluster.host(path=tmp_path / "file")


def test_what_a_disk_has_changed_is_not_loaded(cluster: Cluster, tmp_path: Path) -> None:
    host = cluster.host(SGD(0.1, 0.9), path=tmp_path / "file")
    host._batch.append(gw.dense_message(np.ones(22, np.float32)))
    host.step(0.0)
    host.save()
    content = (tmp_path / "file").read_bytes()
    good, velocity = flat(host.params), flat(host._optimizer._velocity)
    node, refused = cluster.node(), 0
    for index in range(0, len(content), 7):
        changed = bytearray(content)
        changed[index] ^= 1 << index % 8
        (tmp_path / "file").write_bytes(changed)
        descent = SGD(0.1, 0.9)
        try:
            again = cluster.host(descent, node, path=tmp_path / "file")
        except (ValueError, gw.Mismatch):
            refused += 1
        else:  # a date or a flag that nobody reads
            np.testing.assert_array_equal(flat(again.params), good)
            np.testing.assert_array_equal(flat(descent._velocity), velocity)
    assert refused > len(content) / 7 / 2
    for nbytes in (0, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "file").write_bytes(content[:nbytes])
        with pytest.raises(ValueError, match="file is no checkpoint of a host"):
            cluster.host(path=tmp_path / "file")


@pytest.mark.parametrize("limits", [{}, {"message_bytes_max": 4_096}])
def test_a_host_that_is_interrupted_while_it_takes_a_gradient_takes_it_in_the_next_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    node = cluster.node(limits=replace(QUICK, **limits))
    host = cluster.host(node=node, params=[np.zeros(3_000, np.float32)])
    worker = cluster.worker(host, threshold=0.5)
    decode = coprocessor.decode
    interrupts = [KeyboardInterrupt()]

    def interrupted(message: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return decode(message)

    monkeypatch.setattr(coprocessor, "decode", interrupted)
    for value in (1.0, 2.0):
        worker.send(np.full(3_000, value, np.float32), dense=True)
    with pytest.raises(KeyboardInterrupt):
        reach(host, 1)
    reach(host, 2)
    np.testing.assert_array_equal(host.params[0], -3.0)


def test_a_worker_that_is_interrupted_while_its_replica_changes_gets_the_replica_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = cluster.host(threshold=0.5)
    worker = cluster.worker(host)
    follow = Worker._follow
    interrupts = [KeyboardInterrupt()]

    def interrupted(self: Worker, version: int, status: list[int], body: memoryview) -> None:
        if interrupts and version == 1 and body:
            raise interrupts.pop()
        follow(self, version, status, body)

    monkeypatch.setattr(Worker, "_follow", interrupted)
    worker.send(np.ones_like(flat(host.params)))
    with pytest.raises(KeyboardInterrupt):
        cluster.run(host, lambda: [worker.refresh(0.02) for _ in range(1_000)])
    cluster.run(host, lambda: [worker.refresh(0.02) for _ in range(30)])
    assert host.params[0].all()
    np.testing.assert_array_equal(flat(worker.params), flat(host.params))


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
        ({"params": None}, "params must be an array or several, got NoneType"),
        ({"params": {"w": np.zeros(3)}}, r"got dict: of a dict, pass list\(params.values\(\)\)"),
        ({"params": [np.float32([1.0, np.nan])]}, "parameters: 1 of 2 elements are not finite"),
        ({"threshold": "0.1"}, "threshold must be a threshold policy or a number"),
        (
            {"threshold": gw.TargetBytes(10)},
            "max_bytes is 10, too few for one changed element of 3",
        ),
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
        ({"params": {"w": np.zeros(3)}}, "got dict: of a dict, pass list"),
        (
            {"params": [np.zeros(22)], "threshold": gw.TargetBytes(10)},
            "max_bytes is 10, too few for one changed element of 22",
        ),
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


# ---- what diverges, and what does not fit ----------------------------------------------------------------------------


def test_a_diverged_step_leaves_the_good_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path / "host", "save_every": 1}
    host = cluster.host(SGD(1e30), params=[np.ones(3, np.float32)], name="model", **options)
    for value in (1e-30, 1e30):
        host._batch.append(gw.dense_message(np.full(3, value, np.float32)))
        if value < 1.0:
            host.step(0.0)
    good = (tmp_path / "host").read_bytes()
    with pytest.raises(gw.NonFiniteUpdate, match=r"smaller rate.*: 3 of 3 elements"):
        host.step(0.0)
    for call in (host.step, host.save, host.finish):
        with pytest.raises(gw.GradwireError, match="left no finite parameters"):
            call()
    with pytest.raises(TimeoutError):  # no reader takes them for a version
        gw.HostedModel.attach("model").snapshot(0.05)
    assert (tmp_path / "host").read_bytes() == good
    assert cluster.host(SGD(1.0), params=[np.ones(3, np.float32)], **options).version == 1


@pytest.mark.parametrize("path", ["host", None])
def test_parameters_that_are_not_finite_are_never_saved(
    cluster: Cluster, tmp_path: Path, path: str | None
) -> None:
    host = cluster.host(path=path and tmp_path / path, save_every=2)
    host.save()
    for _ in range(2):
        host._batch.append(gw.dense_message(np.zeros(22, np.float32)))
    host.params[1][3] = np.nan
    host.step(0.0)  # the batch of two, as from a checkpoint, makes one step: the next is looked at
    host._batch.append(gw.dense_message(np.zeros(22, np.float32)))
    if path:
        with pytest.raises(gw.NonFiniteUpdate, match="1 of 22 elements are not finite"):
            host.save()
    with pytest.raises(gw.NonFiniteUpdate, match="1 of 22 elements are not finite"):
        host.step(0.0)
    assert cluster.host(path=path and tmp_path / path).version == 0


def test_large_finite_parameters_are_saved(cluster: Cluster, tmp_path: Path) -> None:
    params = [np.full(9, 3e38, np.float32)]  # whose sum is infinite
    cluster.host(params=params, path=tmp_path / "host").save()
    again = cluster.host(params=[np.zeros(9, np.float32)], path=tmp_path / "host")
    np.testing.assert_array_equal(again.params[0], params[0])


def test_a_velocity_of_another_size_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    host = cluster.host(SGD(1.0, 0.5), path=tmp_path / "host")
    host._optimizer._velocity = [np.zeros((3, 4), np.float32), np.zeros(7, np.float32)]
    host.save()
    descent = SGD(1.0, 0.5)
    with pytest.raises(ValueError, match=r"no checkpoint of a host: the velocity is .*\[3, 4\]"):
        cluster.host(descent, path=tmp_path / "host")
    assert descent.state_dict() == {"velocity": []}


def test_a_velocity_that_a_damaged_directory_hides_is_missed(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "host"
    host = cluster.host(SGD(1.0, 0.5), params=[np.zeros(3, np.float32)], path=path)
    host._optimizer._velocity = [np.ones(3, np.float32)]
    host.save()
    *others, _ = read(path)
    write(path, *others)
    with pytest.raises(ValueError, match=r"it has 1 arrays, and was written with .*'velocity': 1"):
        cluster.host(SGD(1.0, 0.5), params=[np.zeros(3, np.float32)], path=path)


@pytest.mark.torch
def test_a_rate_that_a_checkpoint_replaces_is_told(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who starts the host again with a smaller rate would not get it, as of torch's own checkpoints."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for rate in (0.5, 0.5, 0.125):
        assert "rather than" not in caplog.text
        params = [torch.zeros(3)]
        optimizer = torch.optim.SGD(params, lr=rate)
        cluster.host(optimizer, params=params, path=tmp_path / "host").save()
    assert "the checkpoint's rate of 0.5 and other options, rather than 0.125" in caplog.text
    assert optimizer.param_groups[0]["lr"] == 0.5


# ---- a gradient that is finite, and a step with it not ---------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True], ids=["threshold", "dense"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_gradient_that_no_step_can_have_goes_back_to_its_worker(
    cluster: Cluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    momentum: float,
    dense: bool,
) -> None:
    options: dict[str, Any] = {"path": tmp_path / "host", "save_every": 1}
    host = cluster.host(SGD(10.0, momentum), **options)
    large = cluster.worker(host, threshold=1e38, in_flight=0)
    other = cluster.worker(host, in_flight=0)
    gradient = np.full(22, 2e38, np.float32)
    cluster.run(host, lambda: large.send(gradient, dense=dense))
    assert (host.version, host.refused, large.refused, large.kept) == (0, 1, 1, [])
    np.testing.assert_allclose(large.encoder.residual, gradient, rtol=1e-6)
    assert large.node.peer.address in caplog.text
    assert "times the rate of 10 overflows float32" in caplog.text
    cluster.run(host, lambda: other.send(np.ones(22, np.float32)))
    address = kill(host)
    host = cluster.host(SGD(10.0, momentum), cluster.node(bind=address), **options)
    cluster.run(host, lambda: other.send(np.ones(22, np.float32)))
    assert host.version == 2
    np.testing.assert_array_equal(flat(host.params), -10.0 if not momentum else -12.5)


@pytest.mark.torch
def test_a_large_gradient_goes_back_from_an_optimizer_of_torch(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    params = [torch.zeros(22, requires_grad=True)]
    host = cluster.host(torch.optim.SGD(params, lr=10.0), params=params)
    worker = cluster.worker(host, threshold=1e38, in_flight=0)
    cluster.run(host, lambda: worker.send(np.full(22, 2e38, np.float32)))
    assert (host.version, worker.refused) == (0, 1)


def test_a_rate_that_became_too_large_changes_nothing(cluster: Cluster) -> None:
    descent = SGD(1.0)
    host = cluster.host(descent)
    encoder = gw.Encoder(22, threshold=1e38)
    host._batch.append(encoder.encode(np.full(22, 1e38, np.float32)))
    descent.lr = 10.0
    with pytest.raises(ValueError, match=r"needs a smaller lr: its .* times the rate of 10"):
        host.step(0.0)
    descent.lr = 0.5
    assert host.step(0.0)
    assert 4e37 < -host.params[0][0, 0] < 6e37


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}])
def test_a_rate_that_has_fallen_to_zero_changes_nothing(options: dict[str, Any]) -> None:
    descent = gw.coprocessor.SGD(0.5, **options)
    params = [np.ones(2, np.float32)]
    descent.lr = 0.0
    descent.apply([gw.dense_message(np.float32([1.0, -2.0]))], params)
    assert (params[0] == 1.0).all()
