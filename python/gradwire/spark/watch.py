"""A worker's reports to the driver, and the end of a worker that hangs: Spark notices only processes that end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, Final

from ..clock import now_s
from ..errors import TransportError
from ..transport import Limits, Node

__all__ = ["START_S", "WORKERS_MAX", "Watch", "one_line", "silence_limits"]

WORKERS_MAX: Final = 1 << 16
START_S: Final = 60.0  # at least, for a worker to start: importing torch takes time, also where a step takes little
_CONNECT_S: Final = 2.0  # executors that do not reach the driver report nothing
_LOOK_S: Final = 0.5
_LINE_MAX: Final = 2_000


def one_line(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    text = "".join(traceback.format_exception_only(error))
    return " ".join(text.split())[:_LINE_MAX]


def silence_limits(limits: Limits | None, timeout_s: float) -> Limits:
    """Return limits with which no peer is lost before it was silent for ``timeout_s``."""
    values = vars(limits or Limits())
    return Limits(**{**values, "down_s": max(values["down_s"], timeout_s)})


class Watch:
    """Tells the driver where a worker is and how it failed; ends the process when the worker's own code hangs.

    Args:
        driver: address of the driver's node; None: nothing is told.
        secret: of the training.
        task: Spark's number of this attempt, and the worker's number.
        timeout_s: longest time for one piece of the worker's own work.
    """

    def __init__(
        self, driver: str | None, secret: bytes, task: tuple[int, int], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._allowed_s = max(timeout_s, START_S)  # until the first step is done
        self._node: Node | None = None
        if driver:
            # Other attempts are other nodes, so that the driver does not mix their messages.
            self._node = Node(
                "0.0.0.0:0",
                [driver],
                secret=secret,
                node_id=task[0] * WORKERS_MAX + task[1],
                limits=silence_limits(None, timeout_s),
            )
            with contextlib.suppress(TimeoutError):
                self._node.wait_for_peers(1, _CONNECT_S)
        self._waits = 0
        self._began_s: float | None = None
        self._ended = threading.Event()
        self._main = threading.get_ident()
        threading.Thread(target=self._look, name="gradwire-watch", daemon=True).start()

    def tell(self, kind: str, **values: Any) -> None:
        """Send the driver a note, if it can be reached."""
        if self._node is not None:
            with contextlib.suppress(TransportError):
                note = {"kind": kind, "waits": self._waits, **values}
                self._node.publish(json.dumps(note).encode())

    def note_start(self) -> None:
        """Allow only ``timeout_s`` from now on."""
        self._allowed_s = self._timeout_s

    def tell_wait(self) -> None:
        """Tell the driver that this worker waits for all others from now on."""
        self._waits += 1
        self.tell("wait")

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Allow the block ``timeout_s``, and more before the first step.

        Do not wait in the block for other workers, who have times of their own, unless after `rest`.
        """
        self._began_s = now_s()
        try:
            yield
        finally:
            self._began_s = None

    def rest(self) -> None:
        """Allow the remainder of the block in `busy` any time."""
        self._began_s = None

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            began_s = self._began_s
            if began_s is not None and now_s() - began_s > self._allowed_s:
                stack = traceback.extract_stack(sys._current_frames()[self._main])
                last = stack[-1]
                text = f"no progress for {self._allowed_s:g} s in {last.filename}, line {last.lineno}, {last.name}"
                trace = "".join(traceback.format_list(stack))
                self.tell("error", text=text, trace=trace, is_final=False)
                sys.stderr.write(f"{text}\n{trace}")  # in the executor's log
                self.close()
                os._exit(1)  # an exception does not reach code that hangs; Spark repeats the stage

    def close(self) -> None:
        """End; deliver the last notes."""
        self._ended.set()
        if self._node is not None:
            self._node.close(0.5)
