"""What the sockets bring is handed on in batches, in the right order and with its sender."""

from __future__ import annotations

import os
import socket

import pytest

from gradwire.transport.driver import (
    LITTLE_BYTES,
    MUCH_BYTES,
    REST_FIRST_S,
    REST_MAX_S,
    Driver,
    Waker,
    now_s,
)
from gradwire.transport.endpoint import Endpoint
from gradwire.transport.model import Address, Transmit

SEGMENT = 1_400
BURST = 45 * SEGMENT
ONE = ("127.0.0.1", 1)


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(bytes(32), 0.0, node_id=1, incarnation=1)


def note_batches(endpoint: Endpoint) -> list[tuple[bytes, int, Address]]:
    taken: list[tuple[bytes, int, Address]] = []

    def take(data: memoryview, segment_bytes: int, address: Address, _: float) -> None:
        taken.append((bytes(data), segment_bytes, address))

    endpoint.intake.receive = take  # type: ignore[method-assign]
    return taken


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bursts_are_sent_and_come_as_one_batch_with_the_senders_address(
    host: str, endpoint: Endpoint
) -> None:
    try:
        source, sink = Driver((host, 0)), Driver((host, 0))
    except OSError as error:
        pytest.skip(f"no {host} on this machine: {error}")
    taken = note_batches(endpoint)
    data = os.urandom(3 * BURST + SEGMENT + 100)
    view = memoryview(data)
    calls = [[view[start : start + BURST]] for start in range(0, len(data), BURST)]
    assert source._send_all([Transmit(sink.address, calls, SEGMENT, len(data))])
    sink.receive(endpoint)
    if sink.has_gro:
        assert taken == [(data, SEGMENT, source.address)]
    assert b"".join(batch for batch, *_ in taken) == data
    assert {address for *_, address in taken} == {source.address}
    assert sink.stats().receive_calls == (4 if sink.has_gro else len(data) // SEGMENT + 1)
    source.close()
    sink.close()


class ScriptedReceiver:
    """Brings these datagrams, each with its sender."""

    is_empty = True
    drops = 0

    def __init__(self, script: list[tuple[Address, bytes]]) -> None:
        self.script = script
        self.room = bytearray(1 << 20)

    def receive(self, *_: int) -> list[tuple[int, int, int, Address]]:
        batches, start = [], 0
        while self.script:
            sender, data = self.script.pop(0)
            end = start + len(data)
            self.room[start:end] = data
            batches.append((start, end, len(data), sender))
            start = end
        return batches


def test_what_the_group_brought_first_is_taken_before_anything_can_be_acknowledged(
    endpoint: Endpoint,
) -> None:
    record, probe = os.urandom(BURST), os.urandom(SEGMENT)

    class Sleeper(ScriptedReceiver):
        """While the thread sleeps between the two sockets the record comes to the group, then a probe to this one."""

        def receive(self, *_: int) -> list[tuple[int, int, int, Address]]:
            if self.script:
                group.script.append((ONE, record))
            return super().receive()

    driver = Driver(("127.0.0.1", 0), group=("239.77.11.9", 45_671))
    assert driver._group is not None
    group, own = ScriptedReceiver([]), Sleeper([(ONE, probe)])
    for inlet, receiver in ((driver._group, group), (driver._inlet, own)):
        inlet.receiver, inlet.view = receiver, memoryview(receiver.room)  # type: ignore[assignment]
    taken: list[bytes] = []
    for name in ("receive", "receive_group"):
        setattr(endpoint.intake, name, lambda data, *_: taken.append(bytes(data)))
    driver.receive(endpoint)
    assert taken == [probe, record]
    driver.close()


def test_what_a_node_has_sent_to_the_group_itself_is_not_taken(endpoint: Endpoint) -> None:
    driver = Driver(("127.0.0.1", 0), group=("239.77.11.9", 45_672))
    assert driver._group is not None
    receiver = ScriptedReceiver([(driver.address, b"own"), (ONE, b"of another")])
    driver._group.receiver, driver._group.view = receiver, memoryview(receiver.room)  # type: ignore[assignment]
    taken: list[bytes] = []
    endpoint.intake.receive_group = lambda data, *_: taken.append(bytes(data))  # type: ignore[method-assign]
    driver.receive(endpoint)
    assert taken == [b"of another"]
    driver.close()


@pytest.mark.skipif(not hasattr(socket, "SO_INCOMING_CPU"), reason="only Linux counts drops")
def test_what_the_kernel_drops_is_counted(endpoint: Endpoint) -> None:
    driver = Driver(("127.0.0.1", 0))
    note_batches(endpoint)
    driver._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        for _ in range(200):
            source.sendto(bytes(SEGMENT), driver.address)
        driver.receive(endpoint)
        came = driver.stats().receive_calls
        assert 0 < came < 200
        source.sendto(b"the next one brings the count", driver.address)
        driver.receive(endpoint)
    assert endpoint.counters.kernel_drops == 200 - came
    driver.close()


def test_a_host_that_is_no_address_is_a_datagram_that_is_lost(endpoint: Endpoint) -> None:
    driver, sink = Driver(("127.0.0.1", 0)), Driver(("127.0.0.1", 0))
    taken = note_batches(endpoint)
    hosts = ("no.such.host.invalid", sink.address[0])
    assert driver._send_all([Transmit.single((host, sink.address[1]), b"x") for host in hosts])
    assert driver.socket_errors == 1
    sink.receive(endpoint)
    assert taken == [(b"x", 1, driver.address)]
    driver.close()
    sink.close()


def test_a_waker_rings_at_its_time_and_not_when_it_has_been_calmed() -> None:
    driver, waker = Driver(("127.0.0.1", 0)), Waker(has_alarm=True)
    if waker.alarm is None:
        pytest.skip("this system has no timers to wait for like sockets")

    def waited_s(limit_s: float) -> float:
        started_s = now_s()
        driver.wait(started_s + limit_s, waker, for_datagrams=False)
        return now_s() - started_s

    waker.ring_at(now_s() + 0.02)
    assert 0.02 <= waited_s(10.0) < 5.0
    assert waited_s(0.03) >= 0.03  # it has been heard
    waker.ring_at(now_s() - 1.0)
    assert waited_s(10.0) < 5.0
    waker.ring_at(now_s() + 0.01)
    waker.calm()
    assert waited_s(0.03) >= 0.03
    waker.close()
    driver.close()


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


def test_datagrams_lie_in_the_socket_for_as_long_as_a_rest_but_a_bell_ends_it() -> None:
    source, sink, waker = Driver(("127.0.0.1", 0)), Driver(("127.0.0.1", 0)), Waker()

    def waited_s(limit_s: float, rest_s: float) -> float:
        started_s = now_s()
        sink.wait(started_s + limit_s, waker, rest_s=rest_s)
        return now_s() - started_s

    assert source._send_all([Transmit.single(sink.address, b"x")])
    assert 0.05 <= waited_s(10.0, rest_s=0.05) < 5.0
    assert 0.03 <= waited_s(0.03, rest_s=10.0) < 5.0
    assert waited_s(10.0, rest_s=0.0) < 5.0
    waker.ring()
    assert waited_s(10.0, rest_s=10.0) < 5.0
    for each in (source, sink, waker):
        each.close()


def test_rests_grow_while_they_bring_little_and_end_with_much(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    driver = Driver(("127.0.0.1", 0))
    is_patient = True
    monkeypatch.setattr(Endpoint, "is_patient", property(lambda _: is_patient))
    note_batches(endpoint)
    inlet, receiver = driver._inlet, ScriptedReceiver([])
    inlet.receiver, inlet.view = receiver, memoryview(receiver.room)  # type: ignore[assignment]

    def rests_after(*looks: int) -> list[float]:
        rests = []
        for nbytes in looks:
            receiver.script += [(ONE, bytes(nbytes))] if nbytes else []
            driver.receive(endpoint)
            rests.append(driver.rest_s(endpoint))
        return rests

    assert rests_after(0) == [0.0]
    assert rests_after(1_400, 0, 1_400, LITTLE_BYTES + 1, LITTLE_BYTES) == pytest.approx(
        [REST_FIRST_S * each for each in (1, 1, 2, 2, 4)]
    )
    assert rests_after(*[1_400] * 5)[-1] == REST_MAX_S
    assert rests_after(MUCH_BYTES, MUCH_BYTES + 1, 0, 1_400) == [REST_MAX_S, 0.0, 0.0, REST_FIRST_S]
    is_patient = False
    assert rests_after(1_400) == [0.0]
    is_patient = True
    assert rests_after(0, 1_400) == [0.0, REST_FIRST_S]
    driver.close()
