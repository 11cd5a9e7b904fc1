"""Datagrams reach their session however many of them come as one batch."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gradwire.transport.endpoint import Endpoint
from gradwire.transport.model import Transmit

SEGMENT = 1_400
ONE, TWO = ("one", 1), ("two", 1)


class Pair:
    """Two endpoints; what the first sends arrives in batches of any length, of several records or of parts of them."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.now_s = 0.0
        self.largest_batch = 0
        self.one, self.two = (
            Endpoint(bytes(32), 0.0, node_id=n, incarnation=1, socket_buffer_bytes=8 << 20)
            for n in (1, 2)
        )
        self.one.connect(TWO)
        while not (self.one.peers and self.two.peers):
            self.step()

    def step(self, swaps: int = 0) -> None:
        """Move what there is to move, pieces of it out of order."""
        pieces = [
            piece for stream in _streams(self.one.poll(self.now_s)) for piece in self._cut(*stream)
        ]
        for _ in range(swaps if len(pieces) > 1 else 0):
            at, to = self._draw.randrange(len(pieces)), self._draw.randrange(len(pieces))
            pieces[at], pieces[to] = pieces[to], pieces[at]
        for data, size in pieces:
            self.two.receive(memoryview(data), size, ONE, self.now_s)
        for transmit in self.two.poll(self.now_s):
            self.one.receive(memoryview(transmit.data()), transmit.nbytes, TWO, self.now_s)
        self.now_s += 0.001

    def _cut(self, data: bytes, size: int) -> list[tuple[bytes, int]]:
        pieces = []
        while data:
            end = size * self._draw.choice((1, 7, 45, 90, 180, 187, 400))
            pieces.append((data[:end], size))
            self.largest_batch = max(self.largest_batch, len(pieces[-1][0]))
            data = data[end:]
        return pieces


def _streams(transmits: list[Transmit]) -> list[tuple[bytes, int]]:
    """Put together what follows each other in datagrams of one size, of which only a last one is shorter."""
    streams: list[tuple[bytes, int]] = []
    for transmit in transmits:
        data, size = transmit.data(), transmit.segment_bytes or transmit.nbytes
        if streams and streams[-1][1] == size and len(streams[-1][0]) % size == 0:
            data = streams.pop()[0] + data
        streams.append((data, size))
    return streams


@given(st.integers(0, 2**32 - 1), st.sampled_from((0, 0, 1, 5)))
def test_batches_of_any_length_bring_the_same_messages(seed: int, swaps: int) -> None:
    draw = random.Random(seed)
    pair = Pair(draw)
    payloads = [draw.randbytes(draw.choice((1_000, 250_000, 1_300_000))) for _ in range(3)]
    for tag, payload in enumerate(payloads):
        pair.one.publish(memoryview(payload), tag, None, pair.now_s)
    got: list[bytes] = []
    while len(got) < len(payloads):
        assert pair.now_s < 60.0
        pair.step(swaps)
        got += [bytes(message.payload) for message in pair.two.take_messages(pair.now_s)]
    assert got == payloads
    counters = pair.two.counters
    assert counters.malformed_datagrams == counters.stray_datagrams == 0
    assert counters.udp_bytes_received >= sum(map(len, payloads))


def test_a_batch_may_be_of_several_records() -> None:
    pair = Pair(random.Random(1))
    for tag in range(6):
        pair.one.publish(memoryview(bytes(1 << 20)), tag, None, pair.now_s)
    came = 0
    while came < 6:
        pair.step()
        came += len(pair.two.take_messages(pair.now_s))
    assert pair.largest_batch > 250_000
    assert pair.one.stats().retransmitted_bytes == 0
