"""What a kernel may refuse, on real sockets: sizes, memory, buffers. Nothing is lost by it."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time

import pytest

from gradwire.transport import Node, endpoint
from gradwire.transport.driver import MTU_DISCOVER, PMTUDISC_PROBE, UDP_GRO, Driver, interface_mtu
from gradwire.transport.model import Transmit
from gradwire.transport.records import calls_of

from .ruled_sender import RuledSocket

SECRET = bytes(range(32))
linux = pytest.mark.skipif(sys.platform != "linux", reason="these socket options are Linux's")


def pair(**options: object) -> tuple[Node, Node]:
    one = Node("127.0.0.1:0", secret=SECRET)
    two = Node("127.0.0.1:0", [one.address], secret=SECRET, **options)  # type: ignore[arg-type]
    one.wait_for_peers(1, timeout_s=10.0)
    two.wait_for_peers(1, timeout_s=10.0)
    return one, two


def check_transfer(one: Node, two: Node, nbytes: int = 3_000_001) -> None:
    payload = os.urandom(nbytes)
    ticket = one.publish(payload)
    end_s = time.monotonic() + 20.0
    got: list[bytes] = []
    while not got:
        assert time.monotonic() < end_s
        got += [bytes(message.payload) for message in two.receive(timeout_s=0.1)]
    assert got == [payload]
    assert one.drain(timeout_s=10.0)
    assert len(ticket.delivered) == 1
    one.close()
    two.close()


@pytest.mark.parametrize("offload", [True, False])
def test_a_size_that_the_kernel_refuses_is_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    monkeypatch.setattr(endpoint, "is_loopback", lambda _: False)
    one = Node("127.0.0.1:0", secret=SECRET, offload=offload)
    two = Node("127.0.0.1:0", [one.address], secret=SECRET)
    one.wait_for_peers(1, timeout_s=10.0)
    stubborn = RuledSocket(one._driver, lambda _, size, __: errno.EMSGSIZE if size > 1_300 else 0)
    has_gso = one._driver.has_gso
    check_transfer(one, two)
    assert one._driver.has_gso == has_gso
    assert stubborn.refused > 0
    assert one._endpoint.own.sealer.fragment_bytes + 16 <= 1_232


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.EPERM, errno.ENETUNREACH])
def test_what_the_kernel_drops_is_sent_again(error: int) -> None:
    one, two = pair()
    stubborn = RuledSocket(one._driver, lambda call, *_: 0 if call % 7 else error)
    check_transfer(one, two)
    assert stubborn.refused > 0
    assert one._driver.socket_errors >= stubborn.refused


class FullSender(RuledSocket):
    """Every other call finds the socket full; notes what was sent instead of sending it."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, lambda call, *_: errno.EAGAIN if call % 2 else 0)
        self.taken: list[bytes] = []

    def pass_on(self, _: int, transmit: Transmit) -> int:
        self.taken.append(transmit.data())
        return 0


@pytest.mark.parametrize("cuts", [(), (45, 90, 135), (1, 2, 100), (64, 128)])
@pytest.mark.parametrize("segment_bytes", [300, 1_400, 8_972])
def test_a_record_leaves_in_bursts_and_a_full_buffer_neither_drops_nor_repeats(
    cuts: tuple[int, ...], segment_bytes: int
) -> None:
    driver = Driver(("127.0.0.1", 0))
    driver.has_gso = True
    driver.close()
    full = FullSender(driver)
    data = os.urandom(179 * segment_bytes + 100)
    ends = [cut * segment_bytes for cut in cuts]
    view = memoryview(data)
    slices = [view[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    calls = calls_of(slices, segment_bytes)
    transmit = Transmit(("127.0.0.1", 9), calls, segment_bytes, len(data))
    for _ in range(1_000):
        if driver._send_all([transmit] if not full.taken and not driver._unsent else []):
            break
    assert b"".join(full.taken) == data
    assert max(map(len, full.taken)) <= min(63_000, 64 * segment_bytes)
    assert all(len(burst) % segment_bytes == 0 for burst in full.taken[:-1])
    assert calls == calls_of(slices, segment_bytes), "other peers are sent the same list"


def test_a_receive_buffer_of_16_kilobytes_slows_down_and_loses_nothing() -> None:
    one, two = pair()
    two._driver._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    check_transfer(one, two, 1_000_000)


@linux
def test_a_receiver_without_coalescing_gets_the_same() -> None:
    one, two = pair()
    two._driver._socket.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 0)
    check_transfer(one, two)


@linux
@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_datagrams_are_never_cut_by_routers_and_the_interface_tells_its_mtu(
    host: str, family: socket.AddressFamily
) -> None:
    try:
        driver = Driver((host, 0))
    except OSError as error:
        pytest.skip(f"no {host} on this machine: {error}")
    assert driver._socket.getsockopt(*MTU_DISCOVER[family]) == PMTUDISC_PROBE
    assert interface_mtu((host, 9)) in (65_535, 65_536)
    driver.close()
