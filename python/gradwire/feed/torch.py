"""A torch dataset of a feed's batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .layout import Batch

__all__ = ["FeedDataset"]


class FeedDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a feed as tensors that share the feed's memory; with workers, every worker takes batches."""

    def __init__(self, feed: Iterable[Batch]) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Any]:
        """Yield what the producers put, with tensors instead of arrays."""
        for batch in self.feed:
            if isinstance(batch, dict):
                yield {name: torch.from_numpy(array) for name, array in batch.items()}
            elif isinstance(batch, tuple):
                yield tuple(torch.from_numpy(array) for array in batch)
            else:
                yield torch.from_numpy(batch)
            del batch  # while this generator waits, the space belongs to the producers
