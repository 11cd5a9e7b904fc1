"""What a driver sends, refused now and then by the rules of a test."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.transport.driver import Driver
from gradwire.transport.model import Transmit

# From the number of a system call, the size of its datagrams, and whether it has several, to its errno or 0.
Rule = Callable[[int, int, bool], int]


class RuledSender:
    """Takes the place of a driver's sender; what the rule lets through is sent.

    Attributes:
        refused: how many system calls the rule has refused.
    """

    def __init__(self, driver: Driver, rule: Rule) -> None:
        self._sender = driver._sender
        self._rule = rule
        self._calls = 0
        self.refused = 0
        driver._sender = self  # type: ignore[assignment]

    def send(
        self, socket: int, transmits: list[Transmit], index: int, call: int
    ) -> tuple[int, int, int]:
        for place in range(index, len(transmits)):
            transmit = transmits[place]
            for number in range(call, len(transmit.calls)):
                code = self._send(socket, transmit, number)
                if code:
                    return place, number, code
            call = 0
        return len(transmits), 0, 0

    def _send(self, socket: int, transmit: Transmit, number: int) -> int:
        self._calls += 1
        slices = transmit.calls[number]
        nbytes = sum(map(len, slices))
        has_several = 0 < transmit.segment_bytes < nbytes
        size = transmit.segment_bytes if has_several else nbytes
        code = self._rule(self._calls, size, has_several)
        if code:
            self.refused += 1
            return code
        return self.pass_on(socket, Transmit(transmit.address, [slices], size, nbytes))

    def pass_on(self, socket: int, transmit: Transmit) -> int:
        """Make the one system call; return its errno or 0."""
        return self._sender.send(socket, [transmit], 0, 0)[2]
