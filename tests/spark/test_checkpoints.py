"""Where a training goes on: at the row, however many workers there are."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.torch]
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")

from gradwire.spark import checkpoints  # noqa: E402
from gradwire.spark.checkpoints import Checkpoints, Position  # noqa: E402


@pytest.mark.parametrize(
    ("steps", "step_rows", "expected"),
    [
        (10, 32, 24),  # two workers, as before
        (7, 48, 14 + 2),  # three: 128 rows of the epoch are done, 96 of them in two steps
        (19, 16, 38 + 8),  # one
    ],
)
def test_another_number_of_workers_goes_on_at_the_row(
    steps: int, step_rows: int, expected: int
) -> None:
    position = Position(epoch=2, step=4, step_rows=32)
    assert position.steps_done(steps, step_rows) == expected


def test_a_complete_epoch_is_complete_for_any_number_of_workers() -> None:
    for steps, step_rows in ((10, 32), (7, 48), (1, 4096)):
        assert Position(3, 0, 32).steps_done(steps, step_rows) == 3 * steps
        assert Position(2, 10, 32).steps_done(steps, step_rows) <= 3 * steps


def interrupted(_value: Any, file: Any) -> None:
    file.write("{")
    raise KeyboardInterrupt


def interrupted_save(_value: Any, file: Any) -> None:
    file.write(b"PK")
    raise KeyboardInterrupt


def test_the_position_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"file://{tmp_path}/fit"
    attempt = {"losses": [1.0], "history": [{"epoch": 0}]}
    state = {"model": {}, "optimizer": {"gradwire": 1, "lr": 2}, "attempt": attempt}
    written = Checkpoints(folder, None, 5)
    for rank in range(2):
        written.write(12, rank, {**state, "rank": rank})
    written.finish(12, 2, Position(1, 2, 32, 1))
    position, read = written.read(1, 2)
    assert position == Position(1, 2, 32, 1)
    assert (read["rank"], read["attempt"]) == (1, attempt)
    monkeypatch.setattr(checkpoints.json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written.finish(14, 2, Position(1, 4, 32, 1))
    monkeypatch.undo()
    assert written.read(1, 2)[0] == Position(1, 2, 32, 1), "the earlier one is still whole"
    monkeypatch.setattr(checkpoints.torch, "save", interrupted_save)
    with pytest.raises(KeyboardInterrupt):
        written.write(12, 1, state)
    monkeypatch.undo()
    assert written.read(1, 2)[1]["rank"] == 1, "the earlier one is still whole"
    position, read = Checkpoints(None, folder, 5).read(2, 3)
    assert position == Position(1, 2, 32, 1), "another fit begins with the epoch that it is in"
    assert (read["rank"], read["optimizer"]) == (0, {"lr": 2})
    assert read["attempt"] == {"losses": [1.0]}, "the history is that of two workers"
    _, read = Checkpoints(None, folder, 5).read(1, 2)
    assert read["attempt"] == attempt
    _, read = Checkpoints(None, folder, 5).read(1, 2, is_warm=True)
    assert "attempt" not in read
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in /nowhere"):
        Checkpoints(None, "/nowhere", 5).read(0, 1)


def test_where_other_workers_lead_teams_all_begin_with_one_model_and_no_residual(
    tmp_path: Path,
) -> None:
    """As where Spark repeats a stage, and puts the workers on other machines."""
    written = Checkpoints(f"{tmp_path}/fit", None, 5)
    for rank in range(4):
        optimizer = {"gradwire": rank, "lr": rank}
        state = {"model": {"weight": rank}, "optimizer": optimizer, "attempt": {"history": [rank]}}
        written.write(12, rank, state)
    written.finish(12, 4, Position(1, 2, 32, 1), [0, 2])
    _, read = written.read(1, 4, [0, 2])
    assert (read["model"], read["optimizer"]) == ({"weight": 1}, {"gradwire": 1, "lr": 1})
    _, read = written.read(1, 4, [0, 1])
    assert (read["model"], read["optimizer"]) == ({"weight": 0}, {"lr": 1})
    assert read["attempt"] == {"history": [1]}


def test_executors_have_the_driver_s_name_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their working folders are others, so that each of them would have a part of the checkpoints in its own."""
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from gradwire.spark.estimator import _url_of

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/me")
    for name, expected in (
        ("runs", f"{tmp_path}/runs"),
        ("runs/2026-12-01T10:00:00", f"{tmp_path}/runs/2026-12-01T10:00:00"),
        ("~/runs/", "/me/runs"),
        ("file:/runs", "file:/runs"),
        ("s3://bucket/runs/", "s3://bucket/runs"),
        ("simplecache::s3://bucket/~", "simplecache::s3://bucket/~"),
    ):
        assert _url_of(name) == expected


def test_the_latest_checkpoint_is_that_of_an_attempt_on_another_machine() -> None:
    """As where S3's file system has listed the folder for the attempt before it."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Listing(MemoryFileSystem):
        protocol = "listing"
        sizes: dict[str, int] = {}  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> Any:
            return super()._strip_protocol(path.replace("listing:", "memory:"))

        def invalidate_cache(self, path: str | None = None) -> None:  # noqa: ARG002
            self.sizes.clear()

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            file = super()._open(path, mode, **options)
            return io.BytesIO(file.read(self.sizes.setdefault(path, self.size(path))))

    fsspec.register_implementation("listing", Listing, clobber=True)
    elsewhere = Checkpoints("memory://elsewhere", None, 5)
    for done in (5, 1_000_000):
        elsewhere.write(done, 0, {"model": {}, "optimizer": {}})
        elsewhere.finish(done, 1, Position(done))
        position, _ = Checkpoints(None, "listing://elsewhere", 5).read(0, 1)
        assert position.epoch == done


def test_a_fit_that_fails_names_the_folder_if_there_is_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(checkpoints: Checkpoints) -> list[str]:
        caplog.clear()
        with pytest.raises(KeyboardInterrupt), checkpoints.named_on_failure():
            raise KeyboardInterrupt
        return caplog.messages

    folder = f"file://{tmp_path}/fit"
    checkpoints = Checkpoints(folder, None, 5)
    assert fail(Checkpoints(None, None, 5)) == []
    assert fail(checkpoints) == []
    checkpoints.write(5, 0, {})
    checkpoints.finish(5, 1, Position())
    assert fail(checkpoints) == [f"fit(..., resume={folder!r}) goes on where this fit has failed"]


@pytest.mark.parametrize("system", ["file", "memory"])
def test_only_the_last_two_checkpoints_are_kept_whatever_the_folder_is_called(
    tmp_path: Path, system: str
) -> None:
    import fsspec

    files = fsspec.filesystem(system)
    fits = [Checkpoints(f"{system}://{tmp_path}/{name}", None, 5) for name in ("run[1]", "run1")]
    for fit in reversed(fits):
        for done in (5, 999_999_995, 1_000_000_000):
            fit.write(done, 0, {})
            fit.finish(done, 1, Position())
    kept = ["latest.json", "step-1000000000/worker-0.pt", "step-999999995/worker-0.pt"]
    for fit in fits:
        folder = fsspec.core.url_to_fs(fit.folder)[1]
        paths = files.find(folder)
        assert [path.removeprefix(f"{folder}/") for path in paths] == kept


@pytest.mark.parametrize("numbers", [3, 100_000], ids=["in the buffer", "large"])
def test_a_checkpoint_on_a_full_disk_is_named_with_the_reason(tmp_path: Path, numbers: int) -> None:
    """Where torch says: unexpected pos 896 vs 790."""
    written = Checkpoints(f"file://{tmp_path}", None, 5)
    folder = tmp_path / "step-000000005"
    folder.mkdir()
    (folder / "worker-0.pt.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"{folder} cannot be written: .*No space left on device"):
        written.write(5, 0, {"model": torch.zeros(numbers)})
    (tmp_path / "latest.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"latest\.json cannot be written: .*No space left on device"):
        written.finish(5, 1, Position())


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("latest.json", 0),
        ("latest.json", 30),
        ("step-000000005/worker-1.pt", None),
        ("step-000000005/worker-1.pt", 0),
        ("step-000000005/worker-1.pt", 2000),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, size: int | None
) -> None:
    """Where torch says EOFError, and JSON: Expecting value."""
    written = Checkpoints(f"file://{tmp_path}", None, 5)
    for rank in range(2):
        written.write(5, rank, {"model": {"weight": torch.zeros(1000)}, "optimizer": {}})
    written.finish(5, 2, Position())
    path = tmp_path / name
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    with pytest.raises(
        (OSError, ValueError), match=rf"checkpoint file://{path} cannot be read \(\w"
    ):
        written.read(1, 2)


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"done": 5, "workers": 2, "position": {"rows": 1}}']
)
def test_a_file_of_another_program_is_named(tmp_path: Path, text: str) -> None:
    written = Checkpoints(f"file://{tmp_path}", None, 5)
    written.write(5, 0, {"epoch": 3})
    written.finish(5, 1, Position())
    with pytest.raises(ValueError, match=r"worker-0\.pt cannot be read .*no worker's state"):
        written.read(0, 1)
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(ValueError, match=r"latest\.json cannot be read"):
        written.read(0, 1)
