"""The synchronous exchange: same bits everywhere, nothing lost, nothing encoded twice."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import clock
from gradwire.exchange.protocol import TAG_NUMBERS, Hello, Kind, Phase, run_of
from gradwire.transport import Peer

NUMEL = 1000


class Arrival(NamedTuple):
    peer: Peer
    tag: int
    payload: memoryview


class ScriptedNode:
    """A node whose peers and arrivals the test decides; time passes only while it waits.

    Its peers greet as members that have begun with it, and have the same as it of those that are gone: they repeat what
    the exchange says. What exchanges say to each other besides updates is not in ``published``.
    """

    def __init__(self, node_id: int = 50, peers: tuple[Peer, ...] = ()) -> None:
        self.peer = Peer(node_id, 1, "127.0.0.1:1")
        self.peers = peers
        self.seeds: frozenset[str] = frozenset()
        self.names: dict[int, str] = {}
        self.expected_peers: int | None = None
        self.now_s = 0.0
        self.rounds: list[list[Arrival]] = []
        self.published: list[tuple[bytes, int]] = []
        self.refusals: list[Exception] = []
        self.space: Callable[[], bool] = lambda: True
        self.are_delivered = True
        self.on_receive: Callable[[], None] = lambda: None
        self.greetings: list[Arrival] = []

    def events(self) -> list[Any]:
        return []

    def wait_for_peers(
        self, count: int, timeout_s: float, until: Callable[[], bool]
    ) -> tuple[Peer, ...]:
        if len(self.peers) < count and not until():
            raise TimeoutError(f"{len(self.peers)} of {count} within {timeout_s} s")
        return self.peers

    def has_room(self, nbytes: int) -> bool:
        assert nbytes > 0
        return self.space()

    def publish(self, buffer: Any, tag: int = 0, to: Any = None) -> Any:
        if tag // TAG_NUMBERS == Kind.HELLO and isinstance(to, Peer):
            everybody = tuple(run_of(one) for one in (self.peer, *self.peers))
            heard = Hello.decode(memoryview(bytes(buffer)))
            hello = dataclasses.replace(heard, phase=Phase.IN, members=everybody)
            self.greetings.append(Arrival(to, tag, memoryview(hello.encode())))
        if tag // TAG_NUMBERS == Kind.REPORT:
            echo = memoryview(bytes(buffer))
            self.greetings += [Arrival(one, tag, echo) for one in self.peers]
        if tag < TAG_NUMBERS:
            if self.refusals:
                raise self.refusals.pop(0)
            self.published.append((bytes(buffer), tag))
        return SimpleNamespace(is_done=self.are_delivered)

    def receive(self, timeout_s: float = 0.0) -> list[Arrival]:
        self.on_receive()
        if self.greetings:
            greetings, self.greetings = self.greetings, []
            return greetings
        if self.rounds:
            return self.rounds.pop(0)
        self.now_s += timeout_s
        return []


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedNode]:
    """Make nodes that share one clock with the exchange."""

    def make(node_id: int = 50, peers: tuple[Peer, ...] = ()) -> ScriptedNode:
        node = ScriptedNode(node_id, peers)
        monkeypatch.setattr(clock, "now_s", lambda: node.now_s)
        return node

    return make


def peer(node_id: int) -> Peer:
    return Peer(node_id, 1, f"127.0.0.1:{1000 + node_id}")


def encoder(numel: int = 4, threshold: float = 0.5) -> gw.Encoder:
    return gw.Encoder(numel, threshold=gw.FixedThreshold(threshold))


def update(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def arrival(sender: Peer, tag: int, *values: float, threshold: float = 0.5) -> Arrival:
    message = encoder(len(values), threshold).encode(update(*values))
    return Arrival(sender, tag, memoryview(bytes(message)))


def zeros(numel: int = 4) -> NDArray[np.float32]:
    return np.zeros(numel, np.float32)


# --- over real nodes --------------------------------------------------------------------------------------------------


def updates_of(node: int, steps: int) -> Iterator[NDArray[np.float32]]:
    """Multiples of 2^-20, so that every sum in float32 is exact."""
    rng = np.random.default_rng([7, node])
    for _ in range(steps):
        yield (rng.integers(-4096, 4096, NUMEL) / 2.0**20).astype(np.float32)


class Replica(NamedTuple):
    params: NDArray[np.float32]
    residual: NDArray[np.float32]
    results: list[gw.StepResult]


def run_together(work: Callable[[int], Replica], count: int = 3) -> list[Replica]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"topology": "sharded"}, {"codec": "dense"}]
)
def test_all_replicas_end_with_the_same_bits(nodes: list[gw.Node], options: Any) -> None:
    def work(rank: int) -> Replica:
        enc = gw.Encoder(NUMEL, threshold=gw.TargetDensity(0.1))
        share = gw.Exchange(enc, nodes[rank], min_peers=2, **options)
        params = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
        results = [share.step(one, params) for one in updates_of(rank, steps=40)]
        return Replica(params, enc.residual, results)

    first, *others = run_together(work)
    for other in others:
        assert np.array_equal(first.params.view(np.uint32), other.params.view(np.uint32))
    assert all(result.applied == 3 and not result.lost for result in first.results)


def test_what_went_in_is_in_the_parameters_or_in_a_residual(nodes: list[gw.Node]) -> None:
    def work(rank: int) -> Replica:
        enc = gw.Encoder(NUMEL, threshold=gw.FixedThreshold(2.0**-9), shakeup=gw.ShakeUp(every=5))
        share = gw.Exchange(enc, nodes[rank], reduction="sum", min_peers=2)
        params = zeros(NUMEL)
        results = [share.step(one, params) for one in updates_of(rank, steps=20)]
        return Replica(params, enc.residual, results)

    replicas = run_together(work)
    put_in = sum(one.astype(np.float64) for rank in range(3) for one in updates_of(rank, 20))
    kept = sum(replica.residual.astype(np.float64) for replica in replicas)
    assert np.array_equal(replicas[0].params + kept, put_in)


def test_a_node_that_leaves_does_not_stop_the_others(nodes: list[gw.Node]) -> None:
    last_step_of_leaver = 5
    finished = threading.Barrier(2)

    def work(rank: int) -> Replica:
        enc = gw.Encoder(NUMEL, threshold=gw.FixedThreshold(2.0**-9))
        share = gw.Exchange(enc, nodes[rank], min_peers=2)
        params, results = zeros(NUMEL), []
        for step, one in enumerate(updates_of(rank, steps=20)):
            results.append(share.step(one, params))
            if rank == 2 and step == last_step_of_leaver:
                nodes[rank].close()
                break
        else:
            finished.wait(60)
        return Replica(params, enc.residual, results)

    one, two, leaver = run_together(work)
    assert np.array_equal(one.params.view(np.uint32), two.params.view(np.uint32))
    assert len(leaver.results) == last_step_of_leaver + 1
    for replica, rank in ((one, 0), (two, 1)):
        lost = [lost for result in replica.results for lost in result.lost]
        assert [gone.id for gone in lost] == [nodes[2].peer.id], rank
        assert [result.applied for result in replica.results] == [3] * 6 + [2] * 14


# --- order and arithmetic, on a scripted node -------------------------------------------------------------------------


# Around 2^24 float32 has steps of 1 and 2, so that these three changes end differently in every order.
BASE = 2.0**24
CHANGES = (1.5, 1.0, -2.0)


def added_in_order(changes: tuple[float, ...]) -> float:
    params = update(BASE)
    for change in changes:
        params += np.float32(change)
    return params.item()


def test_messages_are_applied_by_node_id_with_the_own_one_at_its_place(
    scripted: Callable[..., ScriptedNode],
) -> None:
    low, high = peer(10), peer(90)
    first, own, last = CHANGES
    node = scripted(50, (low, high))
    node.rounds = [
        [arrival(high, 0, last, threshold=abs(last)), arrival(low, 0, first, threshold=first)]
    ]
    params = update(BASE)
    gw.Exchange(encoder(1, own), node, reduction="sum").step(update(own), params)
    others = {added_in_order(order) for order in itertools.permutations(CHANGES)}
    assert params.item() == added_in_order(CHANGES)
    assert len(others - {params.item()}) > 0, "the example must tell the orders apart"


def test_the_mean_divides_by_the_messages_of_the_step(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node = scripted(peers=(peer(10),))
    node.rounds = [[arrival(peer(10), 0, 0.5, 0.0)]]
    params = zeros(2)
    gw.Exchange(encoder(2), node).step(update(0.5, 0.5), params)
    assert params.tolist() == [0.5, 0.25]


def test_dense_sends_the_update_whole(scripted: Callable[..., ScriptedNode]) -> None:
    params, enc = zeros(), encoder(4, 100.0)
    result = gw.Exchange(enc, scripted(), codec="dense").step(update(0.1, 0.2, -0.3, 0.0), params)
    assert np.array_equal(params, update(0.1, 0.2, -0.3, 0.0))
    assert not enc.residual.any()
    assert (result.threshold, result.density) == (0.0, 1.0)


# --- who belongs ------------------------------------------------------------------------------------------------------


def test_the_first_step_waits_for_the_promised_peers(
    scripted: Callable[..., ScriptedNode],
) -> None:
    enc = encoder()
    share = gw.Exchange(enc, scripted(peers=(peer(10),)), min_peers=2)
    with pytest.raises(TimeoutError, match="1 of 2"):
        share.step(update(1, 1, 1, 1), zeros())
    assert enc.step == 0
    assert not enc.residual.any()


def test_without_a_number_the_addresses_that_the_node_was_told_are_waited_for(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node = scripted(peers=(peer(10),))
    node.seeds = frozenset({"127.0.0.1:1", "127.0.0.1:2"})
    with pytest.raises(TimeoutError, match="1 of 2"):
        gw.Exchange(encoder(), node).step(update(1, 1, 1, 1), zeros())


def test_a_node_that_goes_alone_without_being_told_to_warns(
    scripted: Callable[..., ScriptedNode], caplog: pytest.LogCaptureFixture
) -> None:
    gw.Exchange(encoder(), scripted(), min_peers=0).wait_for_peers()
    assert caplog.messages == []
    gw.Exchange(encoder(), scripted()).wait_for_peers()
    assert "goes on alone" in caplog.text


def test_a_message_for_the_next_step_is_kept_for_it(scripted: Callable[..., ScriptedNode]) -> None:
    ahead = peer(10)
    node = scripted(peers=(ahead,))
    node.rounds = [[arrival(ahead, 0, 0.5, 0.0), arrival(ahead, 1, 0.0, 0.5)]]
    share, params = gw.Exchange(encoder(2), node, reduction="sum"), zeros(2)
    assert share.step(update(0.0, 0.0), params).received == 1
    assert params.tolist() == [0.5, 0.0]
    assert share.step(update(0.0, 0.0), params).received == 1
    assert params.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("tags", [[2], [0, 0]], ids=["two steps ahead", "the same step twice"])
def test_a_step_that_cannot_be_is_refused_and_its_sender_is_lost(
    scripted: Callable[..., ScriptedNode], tags: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    sender = peer(10)
    node = scripted(peers=(sender,))
    node.rounds = [[arrival(sender, tag, 0.5, 0.0) for tag in tags]]
    params = zeros(2)
    share = gw.Exchange(encoder(2), node, reduction="sum")
    result = share.step(update(0.0, 0.0), params)
    assert "begin with the same checkpoint" in caplog.text
    assert share.members == ()
    assert params.tolist() == [0.5 * result.received, 0.0]
    assert result.received == tags.count(0) // 2


def test_the_steps_of_a_restored_encoder_go_on(scripted: Callable[..., ScriptedNode]) -> None:
    before = encoder(1)
    for _ in range(3):
        before.encode(update(0.25))
    restored = encoder(1)
    restored.load_state_dict(before.state_dict())
    node = scripted()
    assert gw.Exchange(restored, node).step(update(0.25), zeros(1)).step == 3
    assert [tag for _, tag in node.published] == [3]


def test_what_a_lost_member_had_sent_is_applied_before_it_is_dropped(
    scripted: Callable[..., ScriptedNode],
) -> None:
    stays, goes = peer(10), peer(20)
    node = scripted(peers=(stays, goes))
    share, params = gw.Exchange(encoder(2), node, reduction="sum"), zeros(2)
    share.wait_for_peers()
    node.peers = (stays,)
    node.rounds = [[arrival(stays, 0, 0.5, 0.0), arrival(goes, 0, 0.0, 0.5)]]
    result = share.step(update(0.0, 0.0), params)
    assert (result.lost, result.received) == ((), 2)
    assert params.tolist() == [0.5, 0.5]
    node.rounds = [[arrival(stays, 1, 0.5, 0.0)]]
    result = share.step(update(0.0, 0.0), params)
    assert (result.lost, result.received, share.members) == ((goes,), 1, (stays,))


def test_a_member_that_leaves_after_the_last_step_is_not_lost(
    scripted: Callable[..., ScriptedNode], caplog: pytest.LogCaptureFixture
) -> None:
    leaves = peer(10)
    node = scripted(peers=(leaves,))
    node.rounds = [[arrival(leaves, 0, 0.5, 0.0)]]
    share = gw.Exchange(encoder(2), node)
    share.wait_for_peers()
    node.peers = ()
    assert share.step(update(0.0, 0.5), zeros(2)).lost == ()
    assert caplog.messages == []


def test_a_member_lost_while_others_wait_for_it_is_dropped(
    scripted: Callable[..., ScriptedNode],
) -> None:
    goes = peer(10)
    node = scripted(peers=(goes,))

    def lose_it_after_a_while() -> None:
        if node.now_s > 1.0:
            node.peers = ()

    node.on_receive = lose_it_after_a_while
    params = zeros(2)
    result = gw.Exchange(encoder(2), node, timeout_s=5.0).step(update(0.0, 0.5), params)
    assert (result.lost, result.applied) == ((goes,), 1)
    assert params.tolist() == [0.0, 0.5], "the mean is over the live nodes"


def test_a_member_that_is_gone_is_not_among_those_that_are_waited_for(
    scripted: Callable[..., ScriptedNode],
) -> None:
    evaluates, goes = peer(10), peer(20)
    node = scripted(peers=(evaluates, goes))

    def lose_it_after_a_while() -> None:
        if node.now_s > 1.0:
            node.peers = (evaluates,)
        # A node that evaluates does not say either what it has of the other one.
        node.greetings = [each for each in node.greetings if each.tag // TAG_NUMBERS != Kind.REPORT]

    node.on_receive = lose_it_after_a_while
    share = gw.Exchange(encoder(2), node, timeout_s=5.0)
    with pytest.raises(TimeoutError, match=f"no message from {evaluates.address}, though"):
        share.step(update(0.0, 0.5), zeros(2))


def test_a_late_comer_is_ignored_and_counted(scripted: Callable[..., ScriptedNode]) -> None:
    member, other = peer(10), peer(20)
    node = scripted(peers=(member,))
    node.rounds = [[arrival(other, 0, 0.0, 0.5), arrival(member, 0, 0.5, 0.0)]]
    params = zeros(2)
    result = gw.Exchange(encoder(2), node, reduction="sum").step(update(0.0, 0.0), params)
    assert (result.ignored, result.received) == (1, 1)
    assert params.tolist() == [0.5, 0.0]


def test_a_peer_that_is_no_member_does_not_fill_the_log(
    scripted: Callable[..., ScriptedNode], caplog: pytest.LogCaptureFixture
) -> None:
    member, others = peer(10), [peer(20), peer(30)]
    node = scripted(peers=(member,))
    many = [arrival(other, 0, 0.0, 0.5) for other in others] * 100
    node.rounds = [[*many, arrival(member, 0, 0.5, 0.0)], [arrival(member, 1, 0.5, 0.0)]]
    share = gw.Exchange(encoder(2), node)
    share.step(update(0.0, 0.0), zeros(2))
    assert [text.partition(" ignored")[0] for text in caplog.messages] == [
        f"step 0 from {other.address}" for other in others
    ]


def test_an_observer_is_told_to_close_its_node_instead_of_leaving(
    scripted: Callable[..., ScriptedNode],
) -> None:
    share = gw.Exchange(encoder(2), scripted(), role="observer")
    with pytest.raises(ValueError, match="just close its node"):
        share.leave(zeros(2))


@pytest.mark.parametrize("payload", [b"nonsense", bytes(encoder(3).encode(update(1, 1, 1)))])
def test_bytes_that_do_not_fit_name_their_sender_and_change_nothing(
    scripted: Callable[..., ScriptedNode], payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    sender = peer(10)
    node = scripted(peers=(sender,))
    node.rounds = [[Arrival(sender, 0, memoryview(payload))]]
    params = zeros(2)
    result = gw.Exchange(encoder(2), node).step(update(0.5, 0.5), params)
    assert f"step 0 from {sender.address} to this node" in caplog.text
    assert (result.received, result.lost) == (0, (sender,))
    assert params.tolist() == [0.5, 0.5]


# --- back-pressure and interruption -----------------------------------------------------------------------------------


def test_without_room_the_step_waits_before_it_encodes(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node, enc, params = scripted(), encoder(2), zeros(2)
    steps_seen = []

    def space() -> bool:
        steps_seen.append(enc.step)
        return len(steps_seen) > 3

    node.space = space
    result = gw.Exchange(enc, node).step(update(0.5, 0.25), params)
    assert steps_seen == [0, 0, 0, 0]
    assert result.wait_s == pytest.approx(node.now_s)
    assert (enc.step, params.tolist(), enc.residual.tolist()) == (1, [0.5, 0.0], [0.0, 0.25])


def test_without_room_until_the_timeout_the_update_is_not_taken(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node, enc = scripted(), encoder(2)
    node.space = lambda: False
    share = gw.Exchange(enc, node, timeout_s=2.0)
    with pytest.raises(gw.WouldBlock, match="update was not taken"):
        share.step(update(0.5, 0.25), zeros(2))
    assert (enc.step, enc.residual.tolist()) == (0, [0.0, 0.0])
    assert node.now_s >= 2.0


def test_an_encoded_message_is_kept_until_it_is_handed_over(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node, enc, params = scripted(), encoder(2), zeros(2)
    node.refusals = [gw.WouldBlock("full")] * 3
    result = gw.Exchange(enc, node).step(update(0.5, 0.25), params)
    expected = bytes(encoder(2).encode(update(0.5, 0.25)))
    assert node.published == [(expected, 0)]
    assert (enc.step, result.sent_bytes, params.tolist()) == (1, len(expected), [0.5, 0.0])


def test_a_step_that_timed_out_is_finished_by_the_next_call(
    scripted: Callable[..., ScriptedNode],
) -> None:
    slow = peer(10)
    node, enc, params = scripted(peers=(slow,)), encoder(2), zeros(2)
    share = gw.Exchange(enc, node, reduction="sum", timeout_s=2.0)
    with pytest.raises(TimeoutError, match=slow.address):
        share.step(update(0.5, 0.0), params)
    assert not params.any()
    node.rounds = [[arrival(slow, 0, 0.5, 0.0)], [arrival(slow, 1, 0.0, 0.5)]]
    result = share.step(update(0.0, 0.5), params)
    assert (result.step, enc.step) == (1, 2)
    assert params.tolist() == [1.0, 1.0]
    assert [tag for _, tag in node.published] == [0, 1]


@pytest.mark.parametrize("is_delivered", [True, False])
def test_the_size_of_datagrams_is_suspected_where_nobody_gets_the_update(
    is_delivered: bool, scripted: Callable[..., ScriptedNode]
) -> None:
    silent = peer(10)
    node = scripted(peers=(silent,))
    node.are_delivered = is_delivered
    share = gw.Exchange(encoder(2), node, timeout_s=2.0, on_straggler="raise", every=2)
    params = zeros(2)
    for rounds in ([], [[arrival(silent, 0, 0.5, 0.0)]], []):
        node.rounds = rounds
        share.step(update(0.5, 0.0), params)
    with pytest.raises(TimeoutError, match="step 2 is not finished") as caught:
        share.step(update(0.5, 0.0), params)
    _, _, hint = str(caught.value).partition(f"no message from {silent.address}, though connected")
    assert hint.startswith("; call again" if is_delivered else "; if small messages pass and large")
    assert ("drops datagrams of 1200 bytes" in hint) is not is_delivered


def test_a_message_too_large_goes_back_into_the_residual(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node, enc, params = scripted(), encoder(2), zeros(2)
    node.refusals = [gw.TooLarge("limit")]
    share = gw.Exchange(enc, node)
    with pytest.raises(gw.TooLarge):
        share.step(update(0.5, 0.25), params)
    assert enc.residual.tolist() == [0.5, 0.25]
    assert share.step(update(0.0, 0.0), params).step == 0
    assert params.tolist() == [0.5, 0.0]


def test_a_non_finite_update_does_not_begin_the_step(
    scripted: Callable[..., ScriptedNode],
) -> None:
    node, params = scripted(), zeros(2)
    share = gw.Exchange(encoder(2), node)
    with pytest.raises(gw.NonFiniteUpdate):
        share.step(update(np.nan, 0.25), params)
    assert node.published == []
    assert share.step(update(0.0, 0.25), params).step == 0
    assert params.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"min_peers": -1}, "min_peers is -1"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(
    scripted: Callable[..., ScriptedNode], options: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        gw.Exchange(encoder(), scripted(), **options)


def test_the_result_tells_what_was_sent(scripted: Callable[..., ScriptedNode]) -> None:
    node = scripted(peers=(peer(10),))
    node.rounds = [[arrival(peer(10), 0, 0.5, 0.5)]]
    enc = gw.Encoder(2, threshold=gw.FixedThreshold(0.5), shakeup=gw.ShakeUp(every=1, divisor=2.0))
    result = gw.Exchange(enc, node).step(update(0.25, 0.0), zeros(2))
    assert (result.density, result.threshold, result.is_shakeup) == (0.5, 0.25, True)
    assert result.sent_bytes == len(node.published[0][0])
    assert result.received_bytes > 48
    assert min(result.encode_s, result.wait_s, result.apply_s) >= 0.0
