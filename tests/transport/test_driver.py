"""What a socket brings is handed on in batches, on a socket that brings what a test wants."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from gradwire.transport.driver import (
    BATCH_BYTES_MAX,
    SO_RXQ_OVFL,
    UDP_GRO,
    Driver,
    Waker,
    now_s,
)
from gradwire.transport.endpoint import Endpoint
from gradwire.transport.model import Address, Transmit

SEGMENT = 1_400
BURST = 45 * SEGMENT
ONE, TWO = ("127.0.0.1", 1), ("127.0.0.1", 2)


class ScriptedSocket:
    """Brings these datagrams: sender, bytes, and the size that GRO has found in them, 0 if it was not at work."""

    def __init__(self, script: list[tuple[Address, bytes, int]], drops: int = 0) -> None:
        self._script = list(script)
        self._drops = drops

    def recvmsg_into(
        self, buffers: list[memoryview], _: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Address]:
        if not self._script:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        sender, data, size = self._script.pop(0)
        assert len(buffers[0]) >= 65_536, "a batch of GRO would be cut off"
        buffers[0][: len(data)] = data
        ancillary = []
        if size:
            ancillary.append((socket.IPPROTO_UDP, UDP_GRO, struct.pack("=I", size)))
        if self._drops:
            ancillary.append((socket.SOL_SOCKET, SO_RXQ_OVFL, struct.pack("=I", self._drops)))
        return len(data), ancillary, 0, sender


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(bytes(32), 0.0, node_id=1, incarnation=1)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(("127.0.0.1", 0))
    driver.close()
    driver.has_gro = True
    return driver


def batches(
    driver: Driver, endpoint: Endpoint, script: list[tuple[Address, bytes, int]], drops: int = 0
) -> list[tuple[bytes, int, Address]]:
    driver._socket = ScriptedSocket(script, drops)  # type: ignore[assignment]
    taken: list[tuple[bytes, int, Address]] = []

    def take(data: memoryview, segment_bytes: int, address: Address, _: float) -> None:
        taken.append((bytes(data), segment_bytes, address))

    endpoint.intake.receive = take  # type: ignore[assignment,method-assign]
    driver.receive(endpoint)
    return taken


def test_the_bursts_of_a_record_are_one_batch_and_a_short_datagram_ends_it(
    driver: Driver, endpoint: Endpoint
) -> None:
    bursts = [os.urandom(BURST) for _ in range(6)]
    tail = os.urandom(3 * SEGMENT + 7)
    script = [(ONE, data, SEGMENT) for data in [*bursts, tail, bursts[0]]]
    assert batches(driver, endpoint, script) == [
        (b"".join(bursts[:4]), SEGMENT, ONE),
        (b"".join(bursts[4:]) + tail, SEGMENT, ONE),
        (bursts[0], SEGMENT, ONE),
    ]


def test_senders_and_sizes_are_not_mixed(driver: Driver, endpoint: Endpoint) -> None:
    burst, other, small = os.urandom(BURST), os.urandom(BURST), os.urandom(600)
    script = [
        (ONE, burst, SEGMENT),
        (ONE, burst, SEGMENT),
        (TWO, other, SEGMENT),
        (TWO, small, 300),
        (TWO, small, 300),
        (ONE, small, 0),
        (ONE, burst, SEGMENT),
    ]
    assert batches(driver, endpoint, script) == [
        (burst + burst, SEGMENT, ONE),
        (other, SEGMENT, TWO),
        (small + small, 300, TWO),
        (small, 600, ONE),
        (burst, SEGMENT, ONE),
    ]


def test_there_is_always_room_for_as_much_as_the_system_may_bring(
    driver: Driver, endpoint: Endpoint
) -> None:
    datas = [os.urandom(65_520 // 1_365 * 1_365) for _ in range(9)]
    taken = batches(driver, endpoint, [(ONE, data, 1_365) for data in datas])
    assert b"".join(data for data, *_ in taken) == b"".join(datas)
    assert max(len(data) for data, *_ in taken) <= BATCH_BYTES_MAX


@pytest.mark.parametrize("has_gro", [True, False])
def test_without_gro_equal_datagrams_are_a_batch_all_the_same(
    driver: Driver, endpoint: Endpoint, has_gro: bool
) -> None:
    driver.has_gro = has_gro
    datas = [os.urandom(SEGMENT) for _ in range(5)] + [os.urandom(100)]
    taken = batches(driver, endpoint, [(ONE, data, 0) for data in datas])
    # With it, one that comes alone has no neighbour to wait for.
    expected = datas if has_gro else [b"".join(datas[:5]), datas[5]]
    assert taken == [(data, min(len(data), SEGMENT), ONE) for data in expected]


def test_what_the_group_brought_first_is_taken_before_anything_can_be_acknowledged(
    driver: Driver, endpoint: Endpoint
) -> None:
    record, probe = os.urandom(BURST), os.urandom(SEGMENT)

    class Sleeper(ScriptedSocket):
        """While the thread sleeps between the two sockets the record comes to the group, then a probe to this one."""

        def recvmsg_into(
            self, buffers: list[memoryview], size: int
        ) -> tuple[int, list[tuple[int, int, bytes]], int, Address]:
            if not group._script and self._script:
                group._script.append((ONE, record, SEGMENT))
            return super().recvmsg_into(buffers, size)

    group, own = ScriptedSocket([]), Sleeper([(ONE, probe, 0)])
    driver._group, driver._socket = group, own  # type: ignore[assignment]
    taken: list[bytes] = []
    for name in ("receive", "receive_group"):
        setattr(endpoint.intake, name, lambda data, *_: taken.append(bytes(data)))
    driver.receive(endpoint)
    assert sorted(taken, key=len) == [probe, record]


def test_drops_are_counted(driver: Driver, endpoint: Endpoint) -> None:
    batches(driver, endpoint, [(ONE, bytes(SEGMENT), 0)], drops=3)
    assert endpoint.counters.kernel_drops == 3
    batches(driver, endpoint, [(ONE, bytes(BURST), SEGMENT)] * 2, drops=5)
    assert endpoint.counters.kernel_drops == 3 + 5


def test_who_leaves_the_datagrams_to_another_thread_sleeps_though_some_could_be_sent() -> None:
    driver, waker = Driver(("127.0.0.1", 0)), Waker()
    driver._unsent.append(Transmit.single(ONE, b"waits for room"))
    started_s = now_s()
    driver.wait(started_s + 0.05, waker, for_datagrams=False)
    assert now_s() - started_s >= 0.05
    driver.wait(now_s() + 10.0, waker)
    assert now_s() - started_s < 10.0
    waker.close()
    driver.close()
