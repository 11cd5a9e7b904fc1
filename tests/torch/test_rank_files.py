"""Files of a checkpoint by rank: on one file system one writer, on several one on each."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from gradwire.torch.rank_files import RankFiles

pytestmark = pytest.mark.torch


def writers(paths: list[Any], local_ranks: list[int]) -> list[bool]:
    """Return which ranks write the checkpoint."""
    barrier = threading.Barrier(len(paths))

    def work(rank: int) -> bool:
        files = RankFiles(paths[rank], rank, len(paths))
        return files.is_writer(local_ranks[rank], barrier.wait, lambda _: "a-name-for-all")

    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(work, range(len(paths))))


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "written before"])
def test_one_process_of_each_file_system_writes(is_there: bool, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        if is_there:
            (folder / "last.ckpt").touch()
    own = [folders[rank // 2] / "last.ckpt" for rank in range(4)]
    assert writers(own, [0, 1, 0, 1]) == [True, False, True, False]
    assert writers([own[0]] * 4, [0, 1, 0, 1]) == [True, False, False, False]
    assert writers([own[0]] * 4, [0, 0, 0, 0]) == [True, False, False, False]
    assert writers(["s3://bucket/last.ckpt"] * 2, [0, 0]) == [True, False]
    names = {path.name for folder in folders for path in folder.iterdir()}
    assert names == ({"last.ckpt"} if is_there else set())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "last.ckpt", 1, 2)
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt\.rank1 is missing: rank 1 of 2"):
        files.check()
    Path(files.own).touch()
    files.check()


def test_a_resumption_by_fewer_ranks_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "last.ckpt"
    for rank in (1, 2):
        Path(RankFiles(path, rank, 3).own).touch()
    for size in (3, 4):
        RankFiles(path, 0, size).check()
    assert not caplog.records
    for rank in range(2):
        RankFiles(path, rank, 2).check()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"more ranks than the 2 that resume: the residuals of {path}.rank2" in record.message


def test_a_checkpoint_of_fewer_ranks_has_no_files_of_an_earlier_one_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "last.ckpt"
    files = [RankFiles(path, rank, 2) for rank in range(2)]
    for rank in range(1, 4):
        Path(RankFiles(path, rank, 4).own).touch()
    for each in files:
        each.remove_further()
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt.rank1"]
    for each in files:
        each.check()
    assert not caplog.records
    with pytest.raises(FileNotFoundError, match=r"rank2 is missing: rank 2 of 4"):
        RankFiles(path, 2, 4).check()


def test_slurm_counts_checkpoints_and_not_their_ranks(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "hpc_ckpt_3.ckpt", 12, 16)
    assert files.own == str(tmp_path / "rank12.hpc_ckpt_3.ckpt")
