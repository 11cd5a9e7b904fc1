"""Files of a checkpoint by rank: on one file system one writer, on several one on each."""

from __future__ import annotations

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
