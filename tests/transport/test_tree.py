"""A tree of relays in clusters too large for a mesh: everything arrives as before, and nodes send only to a few."""

from __future__ import annotations

from collections import Counter

import pytest

from gradwire.errors import WouldBlock
from gradwire.transport.model import Counters, Limits
from gradwire.transport.relay import QUEUE_BYTES_MAX, ForwardQueue
from gradwire.transport.wire import DATA, HEADER, Relay

from .simulator import Host, Link, Simulator

WIDTH = 3
SMALL = Limits(mesh_nodes_max=3, relay_children_max=WIDTH)
CHUNK = 250_000


def tree(
    count: int, *, seed: int = 1, link: Link | None = None, limits: Limits = SMALL
) -> tuple[Simulator, list[Host]]:
    """Return a cluster in which every node reaches all others by its tree."""
    simulator = Simulator(seed, link)
    hosts = simulator.mesh(count, limits=limits)
    simulator.run_until(lambda: all(ways(host) == {"tree": count - 1} for host in hosts), 5.0)
    return simulator, hosts


def ways(host: Host) -> Counter[str]:
    return Counter(peer.carrier for peer in host.endpoint.stats().peers)


def send(simulator: Simulator, origin: Host, messages: int, nbytes: int = CHUNK) -> list[bytes]:
    sent = [simulator.random.randbytes(nbytes) for _ in range(messages)]
    for tag, payload in enumerate(sent):
        simulator.publish(origin, payload, tag)
    return sent


def finish(simulator: Simulator, origin: Host, limit_s: float = 60.0) -> None:
    simulator.run_until(lambda: all(ticket.is_done for ticket in origin.tickets), limit_s)


def relays_of(origin: Host, hosts: list[Host]) -> list[Host]:
    nodes = origin.endpoint.fanout._tree.relays
    by_node = {host.endpoint.node_id: host for host in hosts}
    return [by_node[node] for node in nodes]


def children_of(origin: Host, relay: Host, hosts: list[Host]) -> list[Host]:
    nodes = origin.endpoint.fanout._tree.children(relay.endpoint.node_id)
    return [host for host in hosts if host.endpoint.node_id in nodes]


def silence(simulator: Simulator, relay: Host, origin: Host, hosts: list[Host]) -> list[Link]:
    """Have a relay forward nothing of this origin, and do everything else."""
    links = [simulator.link(relay, host) for host in hosts if host is not relay]

    def is_forwarded(_: int, datagram: bytes) -> bool:
        stream = HEADER.unpack_from(datagram)[4]
        return datagram[0] == DATA and stream == origin.endpoint.stream

    for link in links:
        link.drop = is_forwarded
    return links


def join(simulator: Simulator, name: str, hosts: list[Host]) -> Host:
    """Add a host that knows only the first one, and wait until it is connected to all."""
    newcomer = simulator.add(name, limits=SMALL)
    newcomer.endpoint.connect(hosts[0].address)
    simulator.run_until(lambda: len(newcomer.endpoint.peers) == len(hosts), 5.0)
    hosts.append(newcomer)
    return newcomer


# ---- what it is for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05])
def test_forty_nodes_get_everything_from_an_uplink_that_carries_eight_copies(loss: float) -> None:
    simulator, hosts = tree(40, limits=Limits())
    simulator.default.loss = loss
    origin = hosts[0]
    before, lost_before = origin.endpoint.stats(), simulator.default.lost_bytes
    sent = send(simulator, origin, 4)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])
    assert all(len(ticket.delivered) == 39 for ticket in origin.tickets)
    after = origin.endpoint.stats()
    uplink_bytes = after.udp_bytes_sent - before.udp_bytes_sent
    resent_bytes = after.retransmitted_bytes - before.retransmitted_bytes
    assert uplink_bytes - resent_bytes < (8 + 0.5) / 39 * (39 * 4 * CHUNK)
    # What a relay loses is sent again to the relay, which forwards it: one repetition for each loss on any link.
    assert resent_bytes <= 1.2 * (simulator.default.lost_bytes - lost_before)
    assert max(host.endpoint.stats().relayed_bytes for host in hosts) <= 8.3 * 4 * CHUNK
    assert ways(origin)["tree"] >= 38


def test_the_work_of_relaying_is_spread_over_the_nodes() -> None:
    simulator, hosts = tree(12)
    for host in hosts:
        simulator.publish(host, bytes(20_000))
    simulator.run_until(lambda: all(len(host.received) == 11 for host in hosts), 10.0)
    relayed = [host.endpoint.stats().relayed_bytes for host in hosts]
    assert sum(relayed) > 12 * 8 * 20_000
    assert max(relayed) < 0.25 * sum(relayed)


def test_a_mesh_sends_nothing_through_others() -> None:
    simulator = Simulator(1)
    hosts = simulator.mesh(5, limits=Limits(mesh_nodes_max=5))
    send(simulator, hosts[0], 1)
    finish(simulator, hosts[0])
    assert [host.endpoint.stats().relayed_bytes for host in hosts] == [0] * 5
    assert [host.endpoint.fanout.wake_at_s for host in hosts] == [float("inf")] * 5


def test_messages_to_all_and_to_one_keep_their_order() -> None:
    simulator, hosts = tree(8, link=Link(loss=0.02))
    origin = hosts[0]
    expected: dict[str, list[int]] = {host.name: [] for host in hosts[1:]}
    for tag in range(60):
        only = hosts[1 + tag % 7] if tag % 3 == 0 else None
        to = None
        if only is not None:
            node = only.endpoint.node_id
            to = next(peer for peer in origin.endpoint.peers if peer.id == node)
        simulator.publish(origin, simulator.random.randbytes(5_000), tag, to)
        for host in hosts[1:]:
            if only is None or host is only:
                expected[host.name].append(tag)
        simulator.run_for(0.002)
    finish(simulator, origin)
    assert {h.name: [tag for _, tag, _ in h.received] for h in hosts[1:]} == expected


def test_what_is_for_one_is_never_forwarded() -> None:
    simulator, hosts = tree(8)
    origin = hosts[0]
    relay = relays_of(origin, hosts)[0]
    below = children_of(origin, relay, hosts)
    to = next(p for p in origin.endpoint.peers if p.id == relay.endpoint.node_id)
    for child in below:  # they do not even hear that there is something to skip
        simulator.link(origin, child).blocked = True
    simulator.publish(origin, simulator.random.randbytes(50_000), 1, to)
    simulator.run_for(0.5)
    assert [tag for _, tag, _ in relay.received] == [1]
    assert relay.endpoint.stats().relayed_bytes == 0
    assert [host.received for host in below] == [[]] * len(below)


def test_a_newcomer_gets_nothing_from_before_its_time() -> None:
    simulator, hosts = tree(6, link=Link(rate_bytes_per_s=12.5e6, queue_bytes=1 << 18))
    origin = hosts[0]
    send(simulator, origin, 12)
    newcomer = simulator.add("new", limits=SMALL)
    newcomer.endpoint.connect(origin.address)
    simulator.run_until(lambda: len(newcomer.endpoint.peers) == 6, 5.0)
    assert not all(ticket.is_done for ticket in origin.tickets)
    later = simulator.random.randbytes(CHUNK)
    simulator.publish(origin, later, 99)
    finish(simulator, origin)
    assert newcomer.payloads == [later]
    simulator.run_until(lambda: ways(origin) == {"tree": 6}, 3.0)


def test_everybody_publishes_at_once_under_loss_and_jitter() -> None:
    link = Link(loss=0.02, jitter_s=0.0003, duplicate=0.01)
    simulator, hosts = tree(9, link=link)
    sent = {host.endpoint.node_id: send(simulator, host, 3, 100_000) for host in hosts}
    for host in hosts:
        finish(simulator, host)
    for host in hosts:
        for node, payloads in sent.items():
            got = [payload for peer, _, payload in host.received if peer.id == node]
            assert got == (payloads if node != host.endpoint.node_id else [])


def test_a_common_bottleneck_is_used() -> None:
    """All that the origin sends shares an uplink of 100 Mbit/s: three copies leave it, not eleven."""
    simulator, hosts = tree(12)
    origin = hosts[0]
    shared = Link(0.0005, rate_bytes_per_s=12.5e6, queue_bytes=125_000)
    for host in hosts[1:]:
        simulator.links[origin.address, host.address] = shared
    started_s = simulator.now_s
    sent = send(simulator, origin, 16)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])
    copies = 12.5e6 * (simulator.now_s - started_s) / (16 * CHUNK)
    assert copies < WIDTH / 0.7


# ---- relays that fail -------------------------------------------------------------------------------------------


def test_a_relay_that_dies_in_the_middle_is_replaced() -> None:
    limits = Limits(mesh_nodes_max=3, relay_children_max=WIDTH, down_s=3.0)
    simulator, hosts = tree(12, limits=limits)
    origin = hosts[0]
    relay = relays_of(origin, hosts)[0]
    below = children_of(origin, relay, hosts)
    others = [host for host in hosts if host not in (origin, relay)]
    sent = send(simulator, origin, 20)
    simulator.run_until(lambda: all(host.received for host in others), 1.0)
    assert all(len(host.received) < 20 for host in others)
    simulator.crash(relay)
    started_s = simulator.now_s
    simulator.run_until(lambda: all(len(host.received) == 20 for host in others), 5.0)
    assert simulator.now_s - started_s < 1.0
    assert all(host.payloads == sent for host in others)
    simulator.run_until(lambda: bool(origin.lost), 10.0)
    assert all(len(ticket.delivered) >= 10 for ticket in origin.tickets)
    simulator.run_until(lambda: ways(origin) == {"tree": 10}, 10.0)
    assert all(
        origin.endpoint.fanout._tree.parent(h.endpoint.node_id) != relay.endpoint.node_id
        for h in below
    )


def test_a_relay_that_forwards_nothing_is_found_out_and_relays_no_more() -> None:
    simulator, hosts = tree(12)
    origin = hosts[0]
    relay = relays_of(origin, hosts)[0]
    below = children_of(origin, relay, hosts)
    assert len(below) == WIDTH
    silence(simulator, relay, origin, hosts)
    sent: list[bytes] = []
    for _ in range(10):
        sent += send(simulator, origin, 4)
        finish(simulator, origin)
        simulator.run_for(0.2)
    assert all(host.payloads == sent for host in hosts[1:])
    assert relay not in relays_of(origin, hosts)
    assert ways(origin) == {"tree": 11}
    before = origin.endpoint.stats().retransmitted_bytes
    assert before < 15 * CHUNK * WIDTH
    send(simulator, origin, 4)
    finish(simulator, origin)
    assert origin.endpoint.stats().retransmitted_bytes - before < CHUNK


def test_a_relay_that_does_not_answer_is_not_waited_for() -> None:
    simulator = Simulator(1)
    hosts = simulator.mesh(8, limits=SMALL)
    origin = hosts[0]
    mute = relays_of(origin, hosts)[0] if relays_of(origin, hosts) else None
    if mute is None:
        simulator.run_for(0.05)
        mute = relays_of(origin, hosts)[0]
    mute.endpoint.fanout.on_relay = lambda *_: None  # type: ignore[method-assign]
    origin.endpoint.fanout._members[mute.endpoint.node_id].generation += 1
    sent = send(simulator, origin, 2)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])


def test_a_slow_member_holds_up_nobody_for_long() -> None:
    simulator, hosts = tree(9)
    origin, slow = hosts[0], hosts[4]
    for host in hosts:
        if host is not slow:
            simulator.links[host.address, slow.address] = Link(
                0.0005, rate_bytes_per_s=1.25e6, queue_bytes=100_000
            )
    sent = send(simulator, origin, 60)
    others = [host for host in hosts if host not in (origin, slow)]
    started_s = simulator.now_s
    simulator.run_until(lambda: all(len(host.received) == 60 for host in others), 30.0)
    assert simulator.now_s - started_s < 3.0  # at the slow one's rate it would take twelve
    finish(simulator, origin)
    assert slow.payloads == sent


def test_a_member_that_does_not_read_is_served_alone() -> None:
    limits = Limits(
        message_bytes_max=1 << 20,
        send_log_bytes=32 << 20,
        receive_bytes=2 << 20,
        window_bytes=1 << 20,
        mesh_nodes_max=3,
        relay_children_max=WIDTH,
    )
    simulator, hosts = tree(8, limits=limits)
    origin, deaf = hosts[0], hosts[3]
    deaf.reads = False
    sent = send(simulator, origin, 40)
    others = [host for host in hosts if host not in (origin, deaf)]
    simulator.run_until(lambda: all(len(host.received) == 40 for host in others), 5.0)
    assert len(deaf.received) < 40
    deaf.reads = True
    finish(simulator, origin)
    assert deaf.payloads == sent


# ---- a changing cluster -----------------------------------------------------------------------------------------


def test_nodes_join_and_leave_during_transfers() -> None:
    simulator, hosts = tree(10, link=Link(loss=0.01))
    origin = hosts[0]
    sent: list[bytes] = []
    joined: dict[str, int] = {}
    for round_ in range(12):
        sent += send(simulator, origin, 2, 100_000)
        simulator.run_for(0.004)
        if round_ % 4 == 1:
            leaver = hosts.pop(3)
            leaver.endpoint.close(simulator.now_s)
        if round_ % 4 == 3:
            newcomer = join(simulator, f"new{round_}", hosts)
            joined[newcomer.name] = len(sent)
    finish(simulator, origin)
    for host in hosts[1:]:
        assert host.payloads == sent[joined.get(host.name, 0) :]
    simulator.run_until(lambda: ways(origin) == {"tree": len(hosts) - 1}, 5.0)


def test_the_tree_goes_on_while_keys_change() -> None:
    simulator, hosts = tree(8, link=Link(loss=0.01))
    origin = hosts[0]
    sent: list[bytes] = []
    for _ in range(10):
        sent += send(simulator, origin, 1, 100_000)
        origin.endpoint.rotate_key(simulator.now_s)
        simulator.run_for(0.05)
    finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])
    assert origin.endpoint.sender_keys()[0].epoch >= 5
    assert ways(origin) == {"tree": 7}


def test_a_cluster_that_shrinks_becomes_a_mesh_again() -> None:
    simulator, hosts = tree(5)
    for leaver in hosts[3:]:
        leaver.endpoint.close(simulator.now_s)
    simulator.run_until(lambda: len(hosts[0].endpoint.peers) == 2, 5.0)
    simulator.run_until(lambda: ways(hosts[0]) == {"unicast": 2}, 1.0)
    send(simulator, hosts[0], 1)
    finish(simulator, hosts[0])
    simulator.run_for(2.0)
    assert hosts[0].endpoint.fanout.wake_at_s == float("inf")
    assert hosts[1].endpoint.stats().relayed_bytes == 0


def test_distant_relays_cause_no_needless_repetition() -> None:
    """The way over a relay takes fifty times as long as the direct one."""
    simulator, hosts = tree(9)
    origin = hosts[0]
    relay = relays_of(origin, hosts)[0]
    for host in hosts:
        if host is not relay:
            simulator.link(relay, host).delay_s = 0.05
    sent: list[bytes] = []
    for _ in range(6):
        sent += send(simulator, origin, 4)
        finish(simulator, origin)
    assert all(host.payloads == sent for host in hosts[1:])
    assert origin.endpoint.stats().retransmitted_bytes < 0.02 * 24 * CHUNK * 8


def test_a_full_log_says_so_and_goes_on() -> None:
    limits = Limits(
        message_bytes_max=1 << 20,
        send_log_bytes=2 << 20,
        receive_bytes=2 << 20,
        mesh_nodes_max=3,
        relay_children_max=WIDTH,
    )
    simulator, hosts = tree(6, limits=limits)
    sent: list[bytes] = []
    refused = 0
    while len(sent) < 20:
        payload = simulator.random.randbytes(400_000)
        try:
            simulator.publish(hosts[0], payload, len(sent))
            sent.append(payload)
        except WouldBlock:
            refused += 1
            simulator.run_for(0.001)
    finish(simulator, hosts[0])
    assert refused > 0
    assert all(host.payloads == sent for host in hosts[1:])


# ---- what strangers can do --------------------------------------------------------------------------------------


def spoof(simulator: Simulator, relay: Host, origin: Host, record: int, fragment: int) -> None:
    """Have the relay receive garbage that claims to be a fragment of the origin's."""
    header = HEADER.pack(DATA, 0, fragment, 45, origin.endpoint.stream, 1_384 << 48 | record)
    garbage = header + simulator.random.randbytes(1_384)
    relay.endpoint.receive(memoryview(garbage), len(garbage), origin.address, simulator.now_s)


def test_garbage_in_the_name_of_an_origin_is_forwarded_once_and_only_for_records_to_come() -> None:
    simulator, hosts = tree(8)
    origin = hosts[0]
    send(simulator, origin, 1)
    finish(simulator, origin)
    relay = relays_of(origin, hosts)[0]
    session = next(s for s in relay.endpoint.sessions.values() if s.address == origin.address)
    assert session.inbound is not None
    next_record, limit = session.inbound.cumulative, session.inbound.limit
    below = len(children_of(origin, relay, hosts))
    before = relay.endpoint.stats().relayed_bytes
    for record in (0, next_record - 1, limit, limit + 1_000):
        spoof(simulator, relay, origin, record, 0)
    simulator.run_for(0.001)
    assert relay.endpoint.stats().relayed_bytes == before
    for _ in range(50):
        for fragment in range(44):
            spoof(simulator, relay, origin, next_record, fragment)
    simulator.run_for(0.001)
    assert relay.endpoint.stats().relayed_bytes - before == below * 44 * 1_400
    sent = [simulator.random.randbytes(CHUNK)]
    simulator.publish(origin, sent[0], 7)
    finish(simulator, origin)
    assert all(host.payloads[1:] == sent for host in hosts[1:])


def test_an_instruction_to_relay_counts_only_from_a_peer_and_reaches_only_peers() -> None:
    simulator, hosts = tree(4)
    victim, member = hosts[0], hosts[1]
    session = next(s for s in member.endpoint.sessions.values() if s.address == victim.address)
    strangers = (123, 456)
    session.send_frame(Relay(1_000, strangers))
    simulator.run_for(0.01)
    simulator.publish(member, bytes(50_000))
    simulator.run_for(0.1)
    assert victim.endpoint.stats().relayed_bytes == 0
    outside = simulator.add("outside", secret=bytes(range(1, 33)))
    outside.endpoint.connect(victim.address)
    simulator.run_for(1.0)
    assert outside.endpoint.peers == ()
    assert len(victim.endpoint.fanout._forwarders) <= 3


def test_a_forward_queue_that_is_full_drops_and_counts() -> None:
    counters = Counters()
    queue = ForwardQueue(counters)
    batch = memoryview(bytes(63_000))
    for _ in range(100):
        queue.put(batch, 0, (1 << 45) - 1, 1_400, [("a", 1), ("b", 1)])
    assert queue.used_bytes <= QUEUE_BYTES_MAX
    out = queue.take()
    assert counters.relayed_bytes + counters.relay_dropped_bytes == 200 * 63_000
    assert sum(transmit.nbytes for transmit in out) == counters.relayed_bytes > 0
    assert not queue


# ---- large clusters ---------------------------------------------------------------------------------------------


def test_a_hundred_nodes_find_each_other_from_one_seed_and_stay_quiet() -> None:
    simulator = Simulator(1, Link(delay_s=0.001))
    hosts = [simulator.add(f"h{index}") for index in range(100)]
    for host in hosts[1:]:
        host.endpoint.connect(hosts[0].address)
    started_s = simulator.now_s
    simulator.run_until(lambda: sum(len(host.events) for host in hosts) == 100 * 99, 10.0)
    assert all(len(host.endpoint.peers) == 99 for host in hosts)
    assert simulator.now_s - started_s < 1.0
    simulator.run_for(0.15)
    assert all(len(host.endpoint.fanout._tree.relays) == 12 for host in hosts)
    before = [host.endpoint.stats().datagrams_sent for host in hosts]
    simulator.run_for(0.2)
    sent = [
        host.endpoint.stats().datagrams_sent - was for host, was in zip(hosts, before, strict=True)
    ]
    assert max(sent) < 99 * 4  # a heartbeat in 200 ms, and answers
    simulator.publish(hosts[0], bytes(200_000))
    finish(simulator, hosts[0])
    assert all(host.payloads == [bytes(200_000)] for host in hosts[1:])
