"""A multicast group for the records: sent once however many hear them; who does not hear it misses nothing."""

from __future__ import annotations

import logging

import pytest

from gradwire.transport.beacon import seal_beacon
from gradwire.transport.model import Limits
from gradwire.transport.wire import BEACON, DATA

from .simulator import Host, Link, Simulator
from .test_tree import CHUNK, WIDTH, finish, send, ways

GROUP = ("239.1.2.3", 40_124)


def group(
    count: int,
    *,
    deaf: int = 0,
    seed: int = 1,
    link: Link | None = None,
    limits: Limits | None = None,
) -> tuple[Simulator, list[Host]]:
    """Return a cluster whose last ``deaf`` hosts never get what is sent to the group."""
    simulator = Simulator(seed, link)
    names = [f"h{index}" for index in range(count)]
    simulator.groups[GROUP] = {(name, 1) for name in names[: count - deaf]}
    hosts = simulator.mesh(count, multicast=GROUP, limits=limits)
    simulator.run_for(0.5)
    return simulator, hosts


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05])
def test_records_are_sent_once_however_many_hear_them(loss: float) -> None:
    simulator, hosts = group(8)
    simulator.default.loss = loss
    origin = hosts[0]
    assert ways(origin) == {"multicast": 7}
    lost_before = simulator.default.lost_bytes
    sent = send(simulator, origin, 8)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])
    stats = origin.endpoint.stats()
    assert 8 * CHUNK < stats.multicast_bytes_sent < 8.3 * CHUNK
    data_bytes = stats.udp_bytes_sent - stats.control_bytes_sent
    assert data_bytes - stats.multicast_bytes_sent <= 1.01 * stats.retransmitted_bytes + 1_000
    assert stats.retransmitted_bytes <= 1.2 * (simulator.default.lost_bytes - lost_before)


def test_who_does_not_hear_the_group_is_served_alone_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    simulator, hosts = group(5, deaf=2)
    origin = hosts[0]
    sent = send(simulator, origin, 4)
    finish(simulator, origin)
    simulator.run_for(20.0)
    assert all(host.payloads == sent for host in hosts[1:])
    assert ways(origin) == {"multicast": 2, "unicast": 2}
    told = [record.getMessage() for record in caplog.records if "239.1.2.3:40124" in record.message]
    assert told.count(
        "2 of 4 peers hear nothing that is sent to 239.1.2.3:40124; they are served one by one"
    ) == len(hosts[:3])


def test_where_no_multicast_is_routed_everything_goes_as_without_it() -> None:
    simulator, hosts = group(4, deaf=4)
    sent = send(simulator, hosts[0], 4)
    finish(simulator, hosts[0])
    simulator.run_for(60.0)
    assert all(host.payloads == sent for host in hosts[1:])
    stats = hosts[0].endpoint.stats()
    assert stats.multicast_bytes_sent == 0
    assert stats.retransmitted_bytes == 0
    assert hosts[0].endpoint.fanout._beacons.number < 15  # type: ignore[union-attr]


def test_a_group_that_falls_silent_is_left_and_found_again() -> None:
    simulator, hosts = group(4)
    origin = hosts[0]
    members, simulator.groups[GROUP] = simulator.groups[GROUP], set()
    sent = send(simulator, origin, 12)
    finish(simulator, origin)
    simulator.run_for(0.2)
    assert ways(origin) == {"unicast": 3}
    sent += send(simulator, origin, 4)
    finish(simulator, origin)
    simulator.groups[GROUP] = members
    simulator.run_until(lambda: ways(origin) == {"multicast": 3}, 15.0)
    sent += send(simulator, origin, 4)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])


def test_those_who_do_not_hear_the_group_form_a_tree_when_they_are_many() -> None:
    limits = Limits(mesh_nodes_max=3, relay_children_max=WIDTH)
    simulator, hosts = group(10, deaf=6, limits=limits, link=Link(loss=0.01))
    origin = hosts[0]
    simulator.run_until(lambda: ways(origin) == {"multicast": 3, "tree": 6}, 5.0)
    sent = send(simulator, origin, 6)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])


def test_nodes_join_and_leave_a_group_and_keys_change() -> None:
    simulator, hosts = group(5, link=Link(loss=0.01))
    origin = hosts[0]
    sent: list[bytes] = []
    late: list[bytes] = []
    for round_ in range(8):
        batch = send(simulator, origin, 1, 100_000)
        sent += batch
        if round_ >= 4:
            late += batch
        origin.endpoint.rotate_key(simulator.now_s)
        simulator.run_for(0.1)
        if round_ == 1:
            hosts.pop(2).endpoint.close(simulator.now_s)
        if round_ == 3:
            finish(simulator, origin)
            newcomer = simulator.add("new", multicast=GROUP)
            simulator.groups[GROUP].add(newcomer.address)
            newcomer.endpoint.connect(origin.address)
            simulator.run_until(lambda: len(origin.endpoint.peers) == 4, 5.0)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])
    assert simulator.hosts["new", 1].payloads == late
    simulator.run_until(lambda: ways(origin) == {"multicast": 4}, 5.0)


def test_forged_and_repeated_beacons_prove_nothing() -> None:
    simulator, hosts = group(2, deaf=2)
    one, two = hosts
    beacons: list[bytes] = []
    simulator.groups[GROUP] = {two.address}
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == BEACON and not beacons.append(datagram)
    )
    simulator.run_until(lambda: bool(beacons), 15.0)
    key = one.endpoint.sender_keys()[0]
    forged = bytearray(seal_beacon(key, one.endpoint.stream, 5))
    forged[-1] ^= 1
    two.endpoint.receive(memoryview(forged), len(forged), one.address, simulator.now_s)
    two.endpoint.receive(memoryview(beacons[0][:20]), 20, one.address, simulator.now_s)
    simulator.run_for(0.1)
    assert ways(one) == {"unicast": 1}
    before = two.endpoint.stats().datagrams_sent
    two.endpoint.receive(memoryview(beacons[0]), 32, one.address, simulator.now_s)
    simulator.run_for(0.0005)
    assert two.endpoint.stats().datagrams_sent == before + 1
    for _ in range(100):
        two.endpoint.receive(memoryview(beacons[0]), 32, one.address, simulator.now_s)
    simulator.run_for(0.0005)
    assert two.endpoint.stats().datagrams_sent <= before + 2
    assert two.endpoint.stats().unauthenticated_datagrams >= 101


def test_messages_to_one_never_go_to_the_group() -> None:
    simulator, hosts = group(3)
    origin = hosts[0]
    before = origin.endpoint.stats().multicast_bytes_sent
    simulator.publish(origin, bytes(50_000), 1, origin.endpoint.peers[0])
    finish(simulator, origin)
    assert origin.endpoint.stats().multicast_bytes_sent == before
    assert sorted(len(host.received) for host in hosts) == [0, 0, 1]


def test_garbage_to_the_group_harms_nobody() -> None:
    simulator, hosts = group(3)
    one, two, _ = hosts
    for kind in (DATA, BEACON, 0x12, 0):
        for nbytes in (0, 15, 16, 31, 32, 33, 1_400):
            datagram = bytes([kind]) + bytes(nbytes)
            two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)
    sent = send(simulator, one, 2)
    finish(simulator, one)
    assert two.payloads == sent
