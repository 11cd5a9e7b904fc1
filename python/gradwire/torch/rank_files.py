"""Files of a framework's checkpoint that belong to one rank: the state of the optimiser, with the rank's residual."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["RankFiles"]

_LOG = logging.getLogger(__name__)


class RankFiles:
    """The files beside a checkpoint, ``NAME.rank1`` and so on; rank 0's state is in the checkpoint.

    Args:
        path: of the checkpoint.
        rank: of this process.
        size: number of processes.

    Attributes:
        own: this rank's file.
    """

    def __init__(self, path: Any, rank: int, size: int) -> None:
        self._path = os.fspath(path)
        self._rank = rank
        self._size = size
        self.own = self._of(rank)

    def _of(self, rank: int) -> str:
        folder, name = os.path.split(self._path)
        # Lightning takes all digits behind this for the number of a checkpoint, when SLURM starts a job again.
        if name.startswith("hpc_ckpt_"):
            return os.path.join(folder, f"rank{rank}.{name}")
        return f"{self._path}.rank{rank}"

    def is_writer(
        self, local_rank: int, barrier: Callable[[], Any], broadcast: Callable[[Any], Any]
    ) -> bool:
        """Return whether this process writes the checkpoint: rank 0, and local rank 0 of machines without its files.

        All processes call this together.
        """
        if "://" in self._path:  # one store for all
            return self._rank == 0
        # A checkpoint of this name may be there from before, so a new name says which machines see rank 0's files.
        probe = Path(self._path).with_name(f".gradwire-{broadcast(secrets.token_hex(8))}")
        if self._rank == 0:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
        barrier()
        is_seen = probe.exists()
        barrier()
        if self._rank == 0:
            probe.unlink()
        return self._rank == 0 or (local_rank == 0 and not is_seen)

    def remove_further(self) -> None:
        """Remove the files that more ranks have saved beside an earlier checkpoint of this name."""
        if "://" in self._path:
            return
        rank = self._size
        while (further := Path(self._of(rank))).exists():
            further.unlink(missing_ok=True)  # the other ranks do the same
            rank += 1

    def check(self) -> None:
        """Refuse to go on without this rank's file, and say so if there are files of more ranks.

        Raises:
            FileNotFoundError: there is none.
        """
        if "://" in self._path:
            return
        if self._rank and not Path(self.own).exists():
            raise FileNotFoundError(
                f"{self.own} is missing: rank {self._rank} of {self._size} saves its residual there, beside the "
                "checkpoint. Resume with as many ranks as have saved it, and on every machine with the files of its "
                "ranks; for another number redistribute them (docs/howto/checkpoints.md)"
            )
        further = self._of(self._size)
        if self._rank == 0 and Path(further).exists():
            _LOG.warning(
                "%s was saved by more ranks than the %d that resume: the residuals of %s and those behind it are "
                "lost. Resume with as many ranks, or redistribute them (docs/howto/checkpoints.md)",
                self._path,
                self._size,
                further,
            )
