"""Checkpoints of a training, in a folder of any fsspec file system."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from .watch import one_line

__all__ = ["Checkpoints", "Position", "pack", "pack_into", "unpack"]

_LOG = logging.getLogger("gradwire.spark")


def pack(value: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return the value that was packed: tensors and plain values only."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def pack_into(value: Any, file: Any) -> None:
    """Write as ``torch.save`` does, and raise what the file raises."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # Where the file has raised that the disk is full, torch says only that it is at another position than expected.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextlib.contextmanager
def _named_if_not_written(url: str) -> Iterator[None]:
    """Raise why a checkpoint cannot be written with its name.

    Raises:
        OSError: the file system is full, or something else is wrong with it.
        TimeoutError: as it is, since another attempt may be in time.
    """
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise OSError(f"the checkpoint {url} cannot be written: {error}") from error


@contextlib.contextmanager
def _replaced(files: Any, path: str, mode: str) -> Iterator[Any]:
    """Open a file of a checkpoint for writing; one that is there already stays until the new one is whole."""
    # Object stores do so anyway.
    is_local = isinstance(files, LocalFileSystem)
    with files.open(f"{path}.new" if is_local else path, mode) as file:
        yield file
    if is_local:
        files.mv(f"{path}.new", path)


@contextlib.contextmanager
def _named_if_not_read(url: str) -> Iterator[None]:
    """Raise why a file of a checkpoint cannot be read with its name: torch and JSON know only the bytes.

    Raises:
        OSError: the file is not there, or something is wrong with the file system.
        ValueError: the file is damaged.
        TimeoutError: as it is, since another attempt may be in time.
    """
    try:
        yield
    except TimeoutError:
        raise
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"the checkpoint {url} cannot be read ({one_line(error)}): resume from another folder, or begin anew"
        ) from error


def _read_state(url: str) -> dict[str, Any]:
    with _named_if_not_read(url), fsspec.open(url) as file:
        state: dict[str, Any] = unpack(file.read())
        if not isinstance(state, dict) or not {"model", "optimizer"} <= state.keys():
            raise ValueError("it is no worker's state")
    return state


def _read_latest(folder: str) -> dict[str, Any] | None:
    """Return what is the latest checkpoint of a folder; None: there is none."""
    url = f"{folder}/latest.json"
    with _named_if_not_read(url):
        try:
            # S3's keeps the sizes of an earlier attempt in this process; another one may have gone on elsewhere.
            fsspec.core.url_to_fs(url)[0].invalidate_cache()
            with fsspec.open(url) as file:
                latest: dict[str, Any] = json.load(file)
        except FileNotFoundError:
            return None
        if not isinstance(latest, dict) or not {"done", "workers", "position"} <= latest.keys():
            raise ValueError("it is no checkpoint's")
        latest["position"] = Position(**latest["position"])
    return latest


@dataclass(frozen=True)
class Position:
    """How far a training is.

    Attributes:
        epoch: the epochs that are complete.
        step: the steps of the next epoch that are done.
        step_rows: the rows of such a step, of all workers together.
        first_epoch: the epoch with which the fit began.
    """

    epoch: int = 0
    step: int = 0
    step_rows: int = 1
    first_epoch: int = 0

    def steps_done(self, steps: int, step_rows: int) -> int:
        """Return the steps since the beginning, where an epoch has so many steps of so many rows.

        The numbers are others than those of the checkpoint if the number of workers is: the training goes on at the
        row, not at the step.
        """
        step = self.step if step_rows == self.step_rows else self.step * self.step_rows // step_rows
        return self.epoch * steps + min(step, steps)


@dataclass(frozen=True)
class Checkpoints:
    """The folder of a fit, and that of an earlier fit that it continues.

    Attributes:
        folder: URL of this fit's folder; None: nothing is written.
        resume: URL of the earlier fit's folder.
        every: steps between checkpoints; the end of the fit is one, too.
    """

    folder: str | None
    resume: str | None
    every: int

    @contextlib.contextmanager
    def named_on_failure(self) -> Iterator[None]:
        """Log the folder if an exception leaves the block, and there is a checkpoint to resume from."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                files, folder = fsspec.core.url_to_fs(self.folder or "")
                if self.folder and files.exists(f"{folder}/latest.json"):
                    _LOG.warning(
                        "fit(..., resume=%r) goes on where this fit has failed", self.folder
                    )
            raise

    @contextlib.contextmanager
    def named_if_other(self) -> Iterator[None]:
        """Raise why the state to resume from cannot be loaded with its folder: torch names only tensors.

        Raises:
            ValueError: the state is of another model or optimiser.
        """
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"the checkpoint in {self.resume or self.folder} does not fit the model or the optimizer "
                f"({one_line(error)}): resume with those of the earlier fit, or begin anew"
            ) from error

    def is_due(self, before: int, done: int) -> bool:
        """Return whether to write a checkpoint after the steps from ``before`` to ``done``."""
        return self.folder is not None and done // self.every > before // self.every

    def write(self, done: int, rank: int, state: dict[str, Any]) -> None:
        """Write one worker's state after ``done`` steps."""
        url = f"{self.folder}/step-{done:09d}"
        with _named_if_not_written(url):
            files, folder = fsspec.core.url_to_fs(url)
            files.makedirs(folder, exist_ok=True)
            # An attempt that begins at the end of the last one's checkpoint may write the same one again.
            with _replaced(files, f"{folder}/worker-{rank}.pt", "wb") as file:
                pack_into(state, file)

    def finish(
        self, done: int, workers: int, position: Position, leads: Sequence[int] = ()
    ) -> None:
        """Make the checkpoint, which all workers have written, the latest; keep it and the one before."""
        files, folder = fsspec.core.url_to_fs(self.folder)
        latest = {"done": done, "workers": workers, "position": asdict(position)}
        latest["leads"] = list(leads)
        with (
            _named_if_not_written(f"{self.folder}/latest.json"),
            _replaced(files, f"{folder}/latest.json", "w") as file,
        ):
            json.dump(latest, file)
        # The user's folder may have brackets in its name, which fsspec would take for a pattern.
        paths = files.ls(folder, detail=False)
        steps = [path for path in paths if path.rpartition("/")[2].startswith("step-")]
        # By length first: from a billion steps on the numbers are longer.
        for old in sorted(steps, key=lambda path: (len(path), path))[:-2]:
            if isinstance(files, LocalFileSystem) or not glob.has_magic(old):
                files.rm(old, recursive=True)
            else:
                for path in files.find(old):
                    files.rm_file(path)

    def read(
        self, rank: int, workers: int, leads: Sequence[int] = (), *, is_warm: bool = False
    ) -> tuple[Position, dict[str, Any]]:
        """Return the position and the state of the latest checkpoint; at the beginning an empty one.

        With another number of workers than wrote the checkpoint, or if only one of the two trainings goes through
        Spark, the state is the first one's, without its residual and history. So it is with the model and the residual
        if other workers lead the teams, as where Spark has put the workers on other machines.

        Args:
            rank: of this worker.
            workers: number of workers.
            leads: the workers that lead teams, which have the residuals.
            is_warm: a fit that continues another one has a history and a best model of its own.

        Raises:
            FileNotFoundError: there is no checkpoint to resume from.
            OSError, ValueError: a file of the checkpoint is missing or damaged.
        """
        if self.folder is not None:  # a folder that cannot be made is an error before training
            files, folder = fsspec.core.url_to_fs(self.folder)
            files.makedirs(folder, exist_ok=True)
        for folder in filter(None, (self.folder, self.resume)):
            latest = _read_latest(folder)
            if latest is None:
                continue
            led = latest.get("leads", list(leads))
            # A driver that trains through Spark leads no workers. Its history and its state of an epoch are others'.
            is_other = latest["workers"] != workers or bool(led) != bool(leads)
            source = 0 if is_other else rank
            states = f"{folder}/step-{latest['done']:09d}/worker-"
            state = _read_state(f"{states}{source}.pt")
            if is_other or led != list(leads):
                state["optimizer"].pop("gradwire", None)
                if source != 0:
                    state["model"] = _read_state(f"{states}0.pt")["model"]
            if is_other:
                for name in ("history", "unfinished"):  # of one worker; the losses are those of all
                    state.get("attempt", {}).pop(name, None)
            position = latest["position"]
            if folder != self.folder:
                if is_warm:
                    state.pop("attempt", None)
                position = replace(position, first_epoch=position.epoch)
            return position, state
        if self.resume:
            raise FileNotFoundError(f"there is no checkpoint in {self.resume}")
        return Position(), {}
