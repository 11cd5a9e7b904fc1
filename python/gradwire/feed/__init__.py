"""Bounded queues of mini-batches in shared memory, between the processes that make batches and those that train."""

from .feed import Feed, FeedFailed

__all__ = ["Feed", "FeedFailed"]
