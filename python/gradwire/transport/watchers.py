"""Coroutines that wait for something to happen in the I/O thread."""

from __future__ import annotations

import asyncio
import contextlib


class Watchers:
    """Futures that `notify`, called from any thread, completes in their own event loops."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self) -> asyncio.Future[None]:
        """Return a future of the running loop that the next `notify` completes."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def notify(self) -> None:
        """Complete all futures; each waiter looks for itself whether what it waits for has come."""
        futures, self._futures = self._futures, []
        for future in futures:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_complete, future)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def wait_s(future: asyncio.Future[None], timeout_s: float) -> None:
    """Wait for the future, but not longer than this."""
    # Not `wait_for`: before Python 3.12 it forgets that the task was cancelled where the future is done as well.
    await asyncio.wait((future,), timeout=timeout_s)
