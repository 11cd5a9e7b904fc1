"""The driver on real sockets: batches with their sender, refusals by the system, waiting and waking."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from gradwire.transport.driver import MTU_DISCOVER, PMTUDISC_DONT, UDP_GRO, Driver, now_s
from gradwire.transport.endpoint import Endpoint
from gradwire.transport.handshake import LocalNode
from gradwire.transport.types import Address, Limits, Transmit

from .ruled_socket import Rule, RuledSocket

SEGMENT = 1_200
BURST = 52 * SEGMENT
NOBODY = ("127.0.0.1", 9)
LONG_S = 30.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="these socket options are Linux's")


class Batches(Endpoint):
    """An endpoint that keeps the batches it receives, and sends what it is given."""

    def __init__(self) -> None:
        super().__init__(LocalNode(bytes(32), 0.0, node_id=1, incarnation=1), Limits())
        self.taken: list[tuple[bytes, int, Address]] = []
        self.to_send: list[Transmit] = []

    def receive(
        self,
        data: memoryview,
        segment_bytes: int,
        address: Address,
        now_s: float,  # noqa: ARG002
    ) -> None:
        self.taken.append((bytes(data), segment_bytes, address))

    def poll(self, now_s: float) -> list[Transmit]:  # noqa: ARG002
        sent, self.to_send = self.to_send, []
        return sent

    def send(self, driver: Driver, *transmits: Transmit) -> None:
        """Send datagrams, if need be in several attempts."""
        self.to_send += transmits
        for _ in range(1_000):
            driver.transmit(self)
            if not self.to_send and not driver.unsent:
                return
        raise AssertionError("the driver does not get rid of its datagrams")


@pytest.fixture
def endpoint() -> Batches:
    return Batches()


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver(("127.0.0.1", 0))
    yield made
    made.close()


def transmit(address: Address, data: bytes, segment_bytes: int = SEGMENT) -> Transmit:
    return Transmit(address, [memoryview(data)], segment_bytes)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("offload", [True, False])
def test_bursts_arrive_complete_and_in_order_with_the_sender_s_address(
    host: str, offload: bool, endpoint: Batches
) -> None:
    try:
        source, sink = (Driver((host, 0), offload=offload) for _ in range(2))
    except OSError as error:
        pytest.skip(f"no {host} on this machine: {error}")
    data = os.urandom(3 * BURST + SEGMENT + 100)
    starts = range(0, len(data), BURST)
    bursts = [transmit(sink.address, data[start : start + BURST]) for start in starts]
    for burst in bursts:
        endpoint.send(source, burst)
        for _ in range(2):  # one call takes a bounded number of batches
            sink.receive(endpoint)
    if sink.has_gro:
        assert endpoint.taken == [
            (b"".join(burst.slices), min(SEGMENT, len(burst.slices[0])), source.address)
            for burst in bursts
        ]
    assert b"".join(batch for batch, *_ in endpoint.taken) == data
    assert {address for *_, address in endpoint.taken} == {source.address}
    source.close()
    sink.close()


def test_slices_of_one_transmission_leave_back_to_back(driver: Driver, endpoint: Batches) -> None:
    data = memoryview(os.urandom(7 * SEGMENT + 10))
    slices = [data[: 2 * SEGMENT], data[2 * SEGMENT : 3 * SEGMENT], data[3 * SEGMENT :]]
    endpoint.send(driver, Transmit(driver.address, slices, SEGMENT))
    driver.receive(endpoint)
    assert b"".join(batch for batch, *_ in endpoint.taken) == data


@linux
def test_datagrams_that_the_kernel_drops_are_counted(driver: Driver, endpoint: Batches) -> None:
    driver._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        for _ in range(200):
            source.sendto(bytes(SEGMENT), driver.address)
        driver.receive(endpoint)
        came = sum(-(-len(data) // size) for data, size, _ in endpoint.taken)
        assert 0 < came < 200
        source.sendto(b"the next datagram brings the count", driver.address)
        driver.receive(endpoint)
    assert driver.kernel_drops == 200 - came


@linux
def test_a_receiver_without_gro_gets_the_same(driver: Driver, endpoint: Batches) -> None:
    driver._socket.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 0)
    data = os.urandom(10 * SEGMENT + 5)
    endpoint.send(driver, transmit(driver.address, data))
    driver.receive(endpoint)
    assert [size for _, size, _ in endpoint.taken] == [SEGMENT] * 10 + [5]
    assert b"".join(batch for batch, *_ in endpoint.taken) == data


# ---- refusals by the system -------------------------------------------------------------------------------------


class Taking(RuledSocket):
    """A socket that keeps datagrams instead of sending them."""

    def __init__(self, driver: Driver, rule: Rule) -> None:
        super().__init__(driver, rule)
        self.taken: list[bytes] = []

    def pass_on(self, slices: object, *_: object) -> int:  # type: ignore[override]
        self.taken.append(b"".join(slices))  # type: ignore[arg-type]
        return 0


@pytest.mark.parametrize("cuts", [(), (10, 20, 30), (1, 2, 40), (51,)])
@pytest.mark.parametrize("has_gso", [True, False])
def test_a_full_buffer_neither_drops_nor_repeats(
    driver: Driver, endpoint: Batches, cuts: tuple[int, ...], has_gso: bool
) -> None:
    driver.has_gso = has_gso
    full = Taking(driver, lambda call, *_: errno.EAGAIN if call % 2 else 0)
    data = memoryview(os.urandom(51 * SEGMENT + 100))
    ends = [cut * SEGMENT for cut in cuts]
    slices = [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    endpoint.send(driver, Transmit(NOBODY, slices, SEGMENT), Transmit(NOBODY, [b"next"], 4))
    assert b"".join(full.taken) == bytes(data) + b"next"
    assert full.refused > 0
    assert len(full.taken) == (2 if has_gso else 53)


@pytest.mark.parametrize("refusal", [errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP])
def test_a_refusal_of_segmentation_is_logged_once_and_datagrams_leave_one_by_one(
    driver: Driver, endpoint: Batches, refusal: int, caplog: pytest.LogCaptureFixture
) -> None:
    if not driver.has_gso:
        pytest.skip("this system has no segmentation to refuse")
    ruled = RuledSocket(driver, lambda _, __, has_several: refusal if has_several else 0)
    data = os.urandom(5 * SEGMENT + 5)
    for _ in range(2):
        endpoint.send(driver, transmit(driver.address, data))
    driver.receive(endpoint)
    assert b"".join(batch for batch, *_ in endpoint.taken) == 2 * data
    assert not driver.has_gso
    assert ruled.refused == 1
    assert [record.levelname for record in caplog.records if "GSO" in record.message] == ["WARNING"]


def test_a_size_that_is_refused_is_logged_once_with_the_remedy(
    driver: Driver, endpoint: Batches, caplog: pytest.LogCaptureFixture
) -> None:
    RuledSocket(driver, lambda _, size, __: errno.EMSGSIZE if size > 1_000 else 0)
    for _ in range(3):
        endpoint.send(driver, transmit(driver.address, bytes(SEGMENT)))
    endpoint.send(driver, transmit(driver.address, b"small"))
    driver.receive(endpoint)
    assert [batch for batch, *_ in endpoint.taken] == [b"small"]
    [warning] = [record for record in caplog.records if "refused" in record.message]
    assert "1200 bytes" in warning.getMessage()
    assert "datagram_bytes" in warning.getMessage()
    assert driver.stats().errors == 3


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.EPERM, errno.ENETUNREACH])
def test_other_errors_lose_a_burst_are_counted_and_logged_once(
    driver: Driver, endpoint: Batches, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As where this node's address or route is gone: without a word its peers seem to be silent."""
    RuledSocket(driver, lambda call, *_: error if call <= 2 else 0)
    burst = transmit(driver.address, bytes(3 * SEGMENT))
    endpoint.send(driver, burst, burst, transmit(driver.address, b"x"))
    driver.receive(endpoint)
    assert [batch for batch, *_ in endpoint.taken] == [b"x"]
    assert driver.stats().errors == 2
    [warning] = caplog.messages
    assert warning.endswith(f":{driver.address[1]}: {os.strerror(error)}")


def test_a_host_that_is_no_address_costs_only_its_datagram(
    driver: Driver, endpoint: Batches
) -> None:
    hosts = ("no.such.host.invalid", "127.0.0.1")
    endpoint.send(driver, *(Transmit((host, driver.address[1]), [b"x"], 1) for host in hosts))
    driver.receive(endpoint)
    assert [batch for batch, *_ in endpoint.taken] == [b"x"]
    assert driver.stats().errors == 1


def test_a_port_without_a_listener_costs_nothing_but_its_datagrams(
    driver: Driver, endpoint: Batches
) -> None:
    """The answer of a closed port (ICMP) is an error of some later call on Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        closed: Address = probe.getsockname()
    for _ in range(5):
        endpoint.send(driver, Transmit(closed, [b"x"], 1))
        endpoint.send(driver, Transmit(driver.address, [b"y"], 1))
        driver.receive(endpoint)
    assert [batch for batch, *_ in endpoint.taken] == [b"y"] * 5


# ---- waiting ----------------------------------------------------------------------------------------------------


def test_a_wait_ends_with_a_datagram(driver: Driver, endpoint: Batches) -> None:
    endpoint.send(driver, Transmit(driver.address, [b"x"], 1))
    started_s = now_s()
    driver.wait(started_s + LONG_S)
    assert now_s() - started_s < LONG_S


def test_a_wait_ends_with_a_datagram_or_a_waker_when_select_refuses_the_descriptors(
    driver: Driver, endpoint: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("filedescriptor out of range in select()")

    monkeypatch.setattr(select, "select", refuse)
    started_s = now_s()
    driver.wake()
    driver.wait(started_s + LONG_S)
    until_s = now_s() + 0.02
    driver.wait(until_s)
    assert now_s() >= until_s - 1e-4, "the wake-up was used up"
    endpoint.send(driver, Transmit(driver.address, [b"x"], 1))
    driver.wait(started_s + LONG_S)
    assert now_s() - started_s < LONG_S


def test_a_wait_ends_at_its_time(driver: Driver) -> None:
    until_s = now_s() + 0.02
    driver.wait(until_s)
    assert now_s() >= until_s - 1e-4


def test_a_waker_ends_one_wait_before_or_while_it_lasts(driver: Driver) -> None:
    started_s = now_s()
    for _ in range(3):
        driver.wake()  # several calls end one wait
    driver.wait(started_s + LONG_S)
    until_s = now_s() + 0.02
    driver.wait(until_s)
    assert now_s() >= until_s - 1e-4, "the wake-up was used up"
    timer = threading.Timer(0.02, driver.wake)
    timer.start()
    driver.wait(now_s() + LONG_S)
    timer.join()
    assert now_s() - started_s < LONG_S


def test_a_wait_ends_when_a_full_buffer_has_space_again(driver: Driver, endpoint: Batches) -> None:
    full = Taking(driver, lambda call, *_: errno.EAGAIN if call == 1 else 0)
    endpoint.to_send.append(Transmit(NOBODY, [b"x"], 1))
    driver.transmit(endpoint)
    assert driver.unsent
    started_s = now_s()
    driver.wait(started_s + LONG_S)
    assert now_s() - started_s < LONG_S
    driver.transmit(endpoint)
    assert full.taken == [b"x"]


def test_an_address_that_cannot_be_bound_is_named(driver: Driver) -> None:
    host, port = driver.address
    with pytest.raises(OSError, match=f"{re.escape(host)}:{port}"):
        Driver(driver.address)


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_datagrams_larger_than_the_path_are_fragmented_and_not_lost(host: str) -> None:
    try:
        driver = Driver((host, 0))
    except OSError as error:
        pytest.skip(f"no {host} on this machine: {error}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    assert driver._socket.getsockopt(*MTU_DISCOVER[family]) == PMTUDISC_DONT
    driver.close()
