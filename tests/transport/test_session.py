"""Two to five simulated hosts: the states of a connection and the promises made about messages."""

from __future__ import annotations

import pytest

from gradwire.errors import Closed, NotConnected, TooLarge, WouldBlock
from gradwire.transport import crypto
from gradwire.transport.types import Limits, Peer, PeerJoined

from .simulator import SECRET, Host, Link, Simulator
from .vopr import EPOCH_RECORDS

SMALL = Limits(
    message_bytes_max=1 << 20, send_log_bytes=2 << 20, receive_bytes=2 << 20, window_bytes=1 << 20
)


def pair(
    seed: int = 1, link: Link | None = None, **options: object
) -> tuple[Simulator, Host, Host]:
    simulator = Simulator(seed, link)
    one, two = simulator.mesh(2, **options)
    return simulator, one, two


def is_done(host: Host) -> bool:
    return all(ticket.is_done for ticket in host.tickets)


# ---- connecting -------------------------------------------------------------------------------------------------


def test_a_seed_on_one_side_connects_both() -> None:
    simulator = Simulator(1)
    one, two = simulator.add("one"), simulator.add("two")
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 1.0)
    assert [type(event) for event in one.events + two.events] == [PeerJoined, PeerJoined]
    assert one.endpoint.peers[0].id == two.endpoint.local.node_id
    assert two.endpoint.peers[0].address == "one:1"


def test_connecting_takes_two_and_a_half_round_trips() -> None:
    simulator = Simulator(1, Link(delay_s=0.1))
    one, two = simulator.add("one"), simulator.add("two")
    started_s = simulator.now_s
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 5.0)
    assert simulator.now_s - started_s < 0.51


@pytest.mark.parametrize("seed", range(20))
def test_simultaneous_handshakes_give_one_connection(seed: int) -> None:
    simulator, one, two = pair(seed, Link(delay_s=0.01, jitter_s=0.01))
    simulator.run_for(3.0)
    assert len(one.endpoint.peers) == len(two.endpoint.peers) == 1
    assert one.lost == two.lost == []


@pytest.mark.parametrize("ids", [(1, 2), (2, 1)])
def test_an_init_that_leaves_with_the_answer_to_the_peer_s_gives_one_connection(
    ids: tuple[int, int],
) -> None:
    simulator = Simulator(1, Link(delay_s=0.001))
    one, two = (simulator.add(f"h{node_id}", node_id=node_id) for node_id in ids)
    one.endpoint.connect(two.address)
    simulator.call_at(simulator.now_s + 0.001, lambda: two.endpoint.connect(one.address))
    simulator.run_for(5.0)
    assert len(one.endpoint.peers) == len(two.endpoint.peers) == 1
    assert one.lost == two.lost == []


def test_a_session_that_is_over_gets_no_data() -> None:
    simulator = Simulator(1)
    _, two = simulator.mesh(2)
    sessions = two.endpoint.sessions
    [session] = sessions
    session.end("closed", simulator.now_s)
    sessions.route(session)
    assert session not in sessions.by_stream.values()


def test_fifty_handshakes_succeed_at_30_percent_loss() -> None:
    for seed in range(50):
        simulator = Simulator(seed, Link(loss=0.3, delay_s=0.015))
        simulator.mesh(2)  # fails if it takes more than a minute


def test_a_node_started_late_is_found_within_two_seconds() -> None:
    simulator = Simulator(2)
    one = simulator.add("one")
    one.endpoint.connect(("two", 1))
    simulator.run_for(60.0)
    simulator.add("two")
    simulator.run_until(lambda: bool(one.endpoint.peers), 2.1)


def test_an_own_address_that_only_its_datagrams_show_is_tried_as_seldom_as_a_silent_one() -> None:
    """An echo looks the same, so it decides nothing; `Node` recognises the addresses of its machine by itself."""
    simulator = Simulator(3)
    one = simulator.add("one")
    one.endpoint.connect(one.address)
    simulator.run_for(1.0)
    sent = one.endpoint.stats().datagrams_sent
    simulator.run_for(30.0)
    assert one.endpoint.peers == ()
    assert one.endpoint.stats().datagrams_sent - sent <= 24
    assert len(one.endpoint.sessions.by_index) == 1


def test_another_secret_gets_no_answer_at_all() -> None:
    simulator = Simulator(4)
    outsider = simulator.add("outsider", secret=bytes(range(1, 33)))
    host = simulator.add("host", secret=SECRET)
    outsider.endpoint.connect(host.address)
    simulator.run_for(20.0)
    assert outsider.endpoint.peers == host.endpoint.peers == ()
    assert host.endpoint.stats().datagrams_sent == 0
    assert host.endpoint.stats().unauthenticated_datagrams > 5


def test_a_node_that_joins_late_gets_the_messages_published_afterwards() -> None:
    simulator, one, two = pair(6)
    simulator.publish(one, b"early")
    three = simulator.add("three")
    three.endpoint.connect(one.address)
    simulator.run_until(lambda: len(one.endpoint.peers) == 2, 5.0)
    simulator.publish(one, b"late")
    simulator.run_until(lambda: is_done(one) and bool(three.received), 5.0)
    assert two.payloads == [b"early", b"late"]
    assert three.payloads == [b"late"]


def test_one_seed_is_enough_to_join_the_whole_mesh() -> None:
    simulator = Simulator(8)
    hosts = [simulator.add(f"h{index}") for index in range(6)]
    for host in hosts[1:]:
        host.endpoint.connect(hosts[0].address)
        simulator.run_for(0.05)
    simulator.run_until(lambda: all(len(host.endpoint.peers) == 5 for host in hosts), 5.0)
    simulator.run_for(15.0)
    assert all(host.lost == [] for host in hosts)


def test_a_peer_that_gets_nothing_for_several_key_epochs_reads_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crypto, "EPOCH_BITS", 3)
    simulator = Simulator(10)
    one, two, three = simulator.mesh(3)
    recipient = next(peer for peer in one.endpoint.peers if peer.id == two.endpoint.local.node_id)
    for index in range(40):
        simulator.publish(one, b"for two", index, to=recipient)
        simulator.run_until(lambda: is_done(one), 1.0)
    simulator.publish(one, b"for both", 40)
    simulator.run_until(lambda: is_done(one), 1.0)
    assert three.payloads == [b"for both"]
    assert two.payloads == [b"for two"] * 40 + [b"for both"]


def test_a_learned_address_that_does_not_answer_is_dropped() -> None:
    simulator, one, two = pair(9)
    two.endpoint.on_members(("nowhere:1", "nonsense"))
    simulator.run_for(1.0)
    assert ("nowhere", 1) in two.endpoint.discovery.by_address
    simulator.run_for(15.0)
    assert ("nowhere", 1) not in two.endpoint.discovery.by_address
    assert one.address in two.endpoint.discovery.by_address


# ---- messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes", [0, 1, 1_143, 1_144, 1_145, 61_528, 61_529, 123_056, 123_057, 1 << 20]
)
def test_a_message_of_any_size_arrives_complete(nbytes: int) -> None:
    simulator, one, two = pair(8)
    payload = simulator.random.randbytes(nbytes)
    ticket = simulator.publish(one, payload, tag=2**64 - 1)
    simulator.run_until(lambda: ticket.is_done, 5.0)
    assert two.received == [(two.endpoint.peers[0], 2**64 - 1, payload)]
    assert ticket.delivered == set(one.endpoint.peers)
    assert ticket.failed == set()


@pytest.mark.parametrize("seed", range(3))
def test_ten_percent_loss_each_way_loses_no_message(seed: int) -> None:
    simulator = Simulator(seed, Link(loss=0.1, duplicate=0.02, reorder=0.05))
    hosts = simulator.mesh(3)
    sent = {host.endpoint.local.node_id: [] for host in hosts}
    for index in range(25):
        for host in hosts:
            payload = simulator.random.randbytes(simulator.random.choice((0, 300, 5_000, 90_000)))
            simulator.publish(host, payload, index)
            sent[host.endpoint.local.node_id].append(payload)
        simulator.run_for(0.003)
    simulator.run_until(lambda: all(is_done(host) for host in hosts), 30.0)
    for host in hosts:
        for peer in host.endpoint.peers:
            assert [payload for sender, _, payload in host.received if sender == peer] == sent[
                peer.id
            ]
    assert simulator.default.lost_bytes > 100_000


def test_a_message_to_one_peer_reaches_only_that_peer_and_keeps_the_order() -> None:
    simulator = Simulator(9, Link(loss=0.1))
    one, two, three = simulator.mesh(3)
    only = next(peer for peer in one.endpoint.peers if peer.id == two.endpoint.local.node_id)
    sent_two, sent_three = [], []
    for index in range(60):
        payload = simulator.random.randbytes(simulator.random.choice((10, 130_000)))
        to = only if index % 3 else None
        ticket = simulator.publish(one, payload, index, to)
        assert len(ticket.pending) == (1 if to else 2)
        sent_two.append(payload)
        if to is None:
            sent_three.append(payload)
        simulator.run_for(0.002)
    simulator.run_until(lambda: is_done(one), 20.0)
    assert two.payloads == sent_two
    assert three.payloads == sent_three


def test_with_no_peers_a_ticket_is_complete_and_empty() -> None:
    simulator = Simulator(10)
    one = simulator.add("one")
    ticket = simulator.publish(one, b"for nobody")
    assert ticket.is_done
    assert ticket.delivered == ticket.failed == ticket.pending == frozenset()
    assert one.endpoint.stats().send_log_bytes == 0


def test_a_named_peer_that_is_not_connected_is_refused() -> None:
    simulator, one, _ = pair(11)
    with pytest.raises(NotConnected):
        one.endpoint.publish(memoryview(b""), 0, Peer(1, 2, "elsewhere:1"), simulator.now_s)
    known = one.endpoint.peers[0]
    with pytest.raises(NotConnected):
        one.endpoint.publish(
            memoryview(b""), 0, Peer(known.id, known.incarnation + 1, ""), simulator.now_s
        )


def test_a_message_over_the_maximum_is_refused() -> None:
    simulator, one, _ = pair(12, limits=SMALL)
    with pytest.raises(TooLarge, match="1048577"):
        one.endpoint.publish(memoryview(bytes((1 << 20) + 1)), 0, None, simulator.now_s)


def test_two_thousand_tiny_messages_arrive() -> None:
    simulator, one, two = pair(13)
    for index in range(2_000):
        simulator.publish(one, index.to_bytes(32, "little"), index)
    simulator.run_until(lambda: len(two.received) == 2_000, 10.0)
    assert [tag for _, tag, _ in two.received] == list(range(2_000))


# ---- bounds -----------------------------------------------------------------------------------------------------


def test_a_receiver_that_does_not_read_stops_the_sender_and_nothing_grows() -> None:
    simulator, one, two = pair(14, limits=SMALL)
    two.reads = False
    sent = 0
    blocked = False
    for _ in range(200):
        try:
            simulator.publish(one, bytes(100_000), sent)
            sent += 1
        except WouldBlock:
            blocked = True
        simulator.run_for(0.05)
        assert one.endpoint.stats().send_log_bytes <= SMALL.send_log_bytes
        assert two.endpoint.stats().receive_queue_bytes <= SMALL.receive_bytes
    assert blocked
    assert sent * 100_000 < SMALL.send_log_bytes + SMALL.receive_bytes + SMALL.window_bytes
    assert one.lost == two.lost == []
    two.reads = True
    simulator.run_until(lambda: is_done(one), 5.0)
    assert len(two.received) == sent


def test_a_slow_peer_does_not_slow_the_others_until_the_log_is_full() -> None:
    simulator = Simulator(15)
    one, two, slow = simulator.mesh(3, limits=SMALL)
    slow.reads = False
    for index in range(40):
        ticket = simulator.publish(one, bytes(30_000), index)
        simulator.run_for(0.02)
        assert {peer.id for peer in ticket.delivered} >= {two.endpoint.local.node_id}


def test_a_lagging_peer_is_evicted_if_asked_for_and_the_others_go_on() -> None:
    simulator = Simulator(16)
    one, two, slow = simulator.mesh(3, limits=SMALL, on_lag="evict")
    slow.reads = False
    index = 0
    while not one.lost:
        try:
            simulator.publish(one, bytes(100_000), index)
            index += 1
        except WouldBlock:
            pass
        simulator.run_for(0.1)
        assert simulator.now_s < 1_060
    assert one.lost[0].reason == "lagging"
    assert one.lost[0].peer.id == slow.endpoint.local.node_id
    assert one.lost[0].undelivered
    simulator.run_until(lambda: all(ticket.is_done for ticket in one.tickets), 5.0)
    assert len(two.received) == index


# ---- going away -------------------------------------------------------------------------------------------------


def test_closing_tells_the_peers_at_once() -> None:
    simulator, one, two = pair(17)
    one.endpoint.close(simulator.now_s)
    simulator.run_until(lambda: bool(two.lost), 0.1)
    assert [event.reason for event in two.lost] == ["left"]
    simulator.run_until(lambda: one.endpoint.is_closed, 0.1)
    with pytest.raises(Closed):
        simulator.publish(one, b"too late")


def test_a_close_arrives_even_if_half_of_everything_is_lost() -> None:
    for seed in range(20):
        simulator = Simulator(seed, Link(loss=0.5))
        one, two = simulator.mesh(2)
        one.endpoint.close(simulator.now_s)
        simulator.run_until(lambda one=one: one.endpoint.is_closed, 10.0)
        simulator.run_until(lambda two=two: bool(two.lost), 11.0)


def test_unacknowledged_messages_are_reported_at_close() -> None:
    simulator, one, two = pair(18)
    simulator.link(one, two).blocked = True
    ticket = simulator.publish(one, b"never arrives")
    assert one.endpoint.undelivered() == [(one.endpoint.peers[0], ticket)]
    one.endpoint.close(simulator.now_s)
    simulator.run_until(lambda: one.endpoint.is_closed, 10.0)
    assert {peer.id for peer in ticket.failed} == {two.endpoint.local.node_id}


def test_a_silent_peer_is_lost_after_ten_seconds_with_the_exact_list() -> None:
    simulator, one, two = pair(19)
    arrived = simulator.publish(one, b"arrives")
    simulator.run_for(0.1)
    simulator.crash(two)
    lost = [simulator.publish(one, bytes([index])) for index in range(3)]
    simulator.run_for(9.0)
    assert one.lost == []
    simulator.run_until(lambda: bool(one.lost), 2.0)
    assert one.lost[0].reason == "timeout"
    assert list(one.lost[0].undelivered) == lost
    assert all(ticket.failed and not ticket.delivered for ticket in lost)
    assert arrived.delivered
    assert not arrived.failed
    assert one.endpoint.stats().send_log_bytes == 0


@pytest.mark.parametrize("minutes", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_idle_peers_stay_connected(minutes: int) -> None:
    simulator, one, two = pair(20, Link(loss=0.05))
    simulator.run_for(60.0 * minutes)
    assert one.lost == two.lost == []


def test_a_restart_under_the_same_address_is_another_incarnation() -> None:
    simulator, one, two = pair(21)
    before = one.endpoint.peers[0]
    simulator.publish(one, b"to the first")
    simulator.run_for(0.1)
    simulator.crash(two)
    again = simulator.add("h1", node_id=two.endpoint.local.node_id)
    again.endpoint.connect(one.address)
    simulator.run_until(lambda: any(peer != before for peer in one.endpoint.peers), 5.0)
    after = one.endpoint.peers[0]
    assert (after.id, after.incarnation) == (before.id, before.incarnation + 1)
    assert [(event.peer, event.reason) for event in one.lost] == [(before, "restarted")]
    simulator.publish(one, b"to the second")
    simulator.run_until(lambda: bool(again.received), 1.0)
    assert again.payloads == [b"to the second"]


def test_a_restart_with_another_identity_under_the_same_address_replaces_the_old_peer() -> None:
    simulator, one, two = pair(22)
    simulator.crash(two)
    again = simulator.add("h1")
    again.endpoint.connect(one.address)
    simulator.run_until(lambda: bool(one.lost), 5.0)
    assert one.lost[0].reason == "restarted"
    simulator.run_until(
        lambda: [peer.id for peer in one.endpoint.peers] == [again.endpoint.local.node_id], 1.0
    )


def test_sixteen_nodes_survive_a_restart_of_all() -> None:
    simulator = Simulator(23)
    simulator.mesh(16)
    for host in list(simulator.hosts.values()):
        simulator.crash(host)
    hosts = simulator.mesh(16)
    for host in hosts:
        simulator.publish(host, b"back")
    simulator.run_until(lambda: all(len(host.received) == 15 for host in hosts), 5.0)


@pytest.mark.parametrize("pause_s", [3.0, 9.0, 11.0, 60.0])
def test_a_stopped_process_reconnects(pause_s: float) -> None:
    simulator, one, two = pair(24)
    two.paused = True
    ticket = simulator.publish(one, b"while stopped")
    simulator.run_for(pause_s)
    simulator.resume(two)
    simulator.run_until(
        lambda: bool(one.endpoint.peers and two.endpoint.peers) and ticket.is_done, 10.0
    )
    if pause_s < 10.0:
        assert one.lost == two.lost == []
        assert two.payloads == [b"while stopped"]
    else:
        assert [event.reason for event in one.lost] == ["timeout"]
        assert ticket.failed
    simulator.publish(one, b"after")
    simulator.run_until(lambda: bool(two.payloads) and two.payloads[-1] == b"after", 1.0)


def test_a_peer_that_changes_its_port_goes_on_without_loss() -> None:
    simulator, one, two = pair(25)
    for index in range(30):
        simulator.publish(one, bytes([index]) * 3_000, index)
        simulator.publish(two, bytes([index]) * 3_000, index)
        simulator.run_for(0.5)
        if index % 5 == 0:
            del simulator.hosts[two.address]
            two.address = ("h1", 100 + index)
            simulator.hosts[two.address] = two
    simulator.run_until(lambda: is_done(one) and is_done(two), 10.0)
    assert len(one.received) == len(two.received) == 30
    assert one.lost == two.lost == []


# ---- keys -------------------------------------------------------------------------------------------------------


def test_a_new_key_under_load_and_loss_loses_no_message() -> None:
    simulator = Simulator(26, Link(loss=0.1, jitter_s=0.002))
    one, two, three = simulator.mesh(3, first_record=EPOCH_RECORDS - 100)
    for index in range(200):
        simulator.publish(one, index.to_bytes(8, "little"), index)
        simulator.run_for(0.01)
    simulator.run_until(lambda: is_done(one), 10.0)
    assert one.endpoint.log.head > EPOCH_RECORDS
    for host in (two, three):
        assert [tag for _, tag, _ in host.received] == list(range(200))
        assert host.endpoint.stats().rejected_records == 0


def test_a_node_that_joins_while_the_key_changes_understands_everything_after() -> None:
    for seed in range(20):
        simulator = Simulator(seed, Link(loss=0.2, jitter_s=0.005))
        one, _ = simulator.mesh(2, first_record=EPOCH_RECORDS - 5)
        three = simulator.add("three")
        three.endpoint.connect(one.address)
        while len(one.endpoint.peers) < 2:
            assert simulator.now_s < 1_030.0
            simulator.run_for(simulator.random.uniform(0.0, 0.02))
            if one.endpoint.log.head < EPOCH_RECORDS + 5:
                simulator.publish(one, b"x", len(one.tickets))
        while one.endpoint.log.head <= EPOCH_RECORDS:
            simulator.publish(one, b"x", len(one.tickets))
        ticket = simulator.publish(one, b"for both")
        simulator.run_until(lambda ticket=ticket: ticket.is_done, 10.0)
        assert three.payloads[-1] == b"for both"
