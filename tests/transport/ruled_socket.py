"""A socket that refuses to send now and then, by the rules of a test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from gradwire.transport.driver import Driver

# From the number of a system call, the size of its datagrams, and whether it has several, to its errno or 0.
Rule = Callable[[int, int, bool], int]
Ancillary = Sequence[tuple[int, int, bytes]]


class RuledSocket:
    """Takes the place of a driver's socket and sends only what a rule permits.

    Attributes:
        refused: number of system calls that the rule has refused.
    """

    def __init__(self, driver: Driver, rule: Rule) -> None:
        self._socket = driver._socket
        self._rule = rule
        self._calls = 0
        self.refused = 0
        driver._socket = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)

    def sendmsg(
        self,
        slices: Sequence[memoryview | bytes],
        ancillary: Ancillary,
        flags: int,
        address: object,
    ) -> int:
        self._calls += 1
        nbytes = sum(map(len, slices))
        size = int.from_bytes(ancillary[0][2], "little") if ancillary else nbytes
        code = self._rule(self._calls, size, bool(ancillary))
        if code:
            self.refused += 1
            raise OSError(code, os.strerror(code))
        return self.pass_on(slices, ancillary, flags, address)

    def pass_on(
        self,
        slices: Sequence[memoryview | bytes],
        ancillary: Ancillary,
        flags: int,
        address: object,
    ) -> int:
        """Make the system call."""
        assert isinstance(self._socket, socket.socket)
        return self._socket.sendmsg(slices, ancillary, flags, address)  # type: ignore[arg-type]
