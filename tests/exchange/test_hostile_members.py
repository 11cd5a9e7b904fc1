"""Documents, numbers, addresses and headers of a member with a bug: its bytes are refused, and nothing else happens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradwire as gw
from gradwire import clock, reference, shares
from gradwire.errors import Mismatch
from gradwire.exchange import snapshot as snapshot_module
from gradwire.exchange.membership import STEPS_AHEAD_MAX, UpdateStream
from gradwire.exchange.owner import Division
from gradwire.exchange.protocol import (
    MESSAGE_MAGIC,
    TAG_NUMBERS,
    CountedUpdate,
    Hello,
    Kind,
    NodeRun,
    Note,
    PartUpdate,
    Phase,
    decode_steps,
    run_of,
    tag_of,
)
from gradwire.exchange.snapshot import Recipient, Request, Snapshot
from gradwire.transport.addressing import parse_numeric

from ..seeds import seeds
from .cluster import Cluster, FakeNode, cluster, run_cluster
from .test_membership import NUMEL, THRESHOLD, Trainer, assert_identical, update

HERE = ("10.0.0.1", 40_123)
DEEP = "[" * 100_000 + "]" * 100_000
NUMBERS = [
    "Infinity",
    "-Infinity",
    "NaN",
    "1e400",
    "-5",
    "1.5",
    "true",
    '"7"',
    "null",
    "1" + 30 * "0",
]
NOTE = '{"admits":[],"workers":[],"comparison":%s,"digest":null}'
STEPS = "[[1,1,%s]]"
RUNS = "[[1,%s,5]]"
ADDRESSES = [
    "10.0.0.7\0:5",
    "\0",
    "",
    ":",
    "localhost:5",
    "a.example:5",
    "10.0.0.7:0",
    "10.0.0.7:65536",
    "0.0.0.0:5",
    "224.0.0.1:5",
    "255.255.255.255:5",
    "[fd00::1]:5",
    "[fe80::1%\0]:5",
    "10.0.0.7:" + 250 * "9",
    "010.0.0.7:5",
    "10.0.7:5",
]


def payload(text: str) -> memoryview:
    return memoryview(text.encode())


@pytest.mark.parametrize("number", NUMBERS[:-2] + NUMBERS[-1:])
def test_a_number_out_of_range_in_a_note_is_a_message_error(number: str) -> None:
    with pytest.raises(gw.MessageError, match="cannot be read"):
        Note.decode(payload(NOTE % number))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("document", [STEPS, RUNS])
def test_a_number_out_of_range_in_a_report_is_a_message_error(number: str, document: str) -> None:
    with pytest.raises(gw.MessageError, match="cannot be read"):
        decode_steps(payload(document % number))


@pytest.mark.parametrize("field", ["step", "first_step", "first_direct"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_out_of_range_in_an_introduction_is_a_message_error(
    field: str, number: str
) -> None:
    hello = Hello({}, Phase.IN, 5, (NodeRun(1, 1),), 6, 7, NodeRun(1, 1))
    text = hello.encode().decode()
    value = {"step": 5, "first_step": 6, "first_direct": 7}[field]
    changed = text.replace(f'"{field}":{value}', f'"{field}":{number}')
    assert changed != text
    with pytest.raises(gw.MessageError, match="cannot be read"):
        Hello.decode(payload(changed))


@pytest.mark.parametrize(
    "text", [DEEP, "", "{}", "[1]", "null", "\0", '{"signature":1}', "[[1,1]]"]
)
@pytest.mark.parametrize("decode", [Note.decode, Hello.decode])
def test_a_document_of_another_form_is_a_message_error(text: str, decode: Any) -> None:
    with pytest.raises(gw.MessageError):
        decode(payload(text))


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_that_no_socket_can_use_is_refused_without_a_resolver(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_numeric(text, like=HERE)


def test_numeric_addresses_of_the_family_are_taken() -> None:
    assert parse_numeric("10.0.0.7:5", like=HERE) == ("10.0.0.7", 5)
    assert parse_numeric("[fd00::1]:5", like=("fd00::2", 1)) == ("fd00::1", 5)


def test_an_address_in_the_form_of_a_socket_of_both_versions_is_taken_where_it_can_be_used() -> (
    None
):
    mapped = "[::ffff:10.0.0.7]:5"
    assert parse_numeric(mapped, like=HERE) == ("10.0.0.7", 5)
    for text in (mapped, "10.0.0.7:5"):
        assert parse_numeric(text, like=("::", 1)) == ("::ffff:10.0.0.7", 5)
        with pytest.raises(ValueError, match="cannot send"):
            parse_numeric(text, like=("fd00::2", 1))


# ---- snapshots --------------------------------------------------------------------------------------------------


def header(**changes: Any) -> str:
    arrays = [np.zeros((2, 3), np.float32)]
    snapshot = Snapshot(5, {NodeRun(1, 1): 5}, {}, arrays, 1, NodeRun(1, 1), "ab")
    return json.dumps({**json.loads(snapshot.header([(0, 24)])), **changes})


def check(there: list[list[Any]], params: int) -> None:
    if there != [["float32", [2, 3]]] or params != 1:
        raise Mismatch("another layout")


def test_a_snapshot_of_the_own_layout_is_taken() -> None:
    snapshot, ranges = Snapshot.from_header(payload(header()), check)
    assert (snapshot.step, snapshot.arrays[0].shape) == (5, (2, 3))
    assert ranges == [(0, 24)]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -5},
        {"step": 10**30},
        {"step": float("inf")},
        {"step": 1.0},
        {"positions": [[1, 1, -1]]},
        {"positions": [[1, float("nan"), 1]]},
        {"finals": [[1, 1]]},
        {"origin": [1, 1 << 64]},
        {"senders": [[-1, 1]]},
        {"workers": 5},
        {"agreement": [float("nan"), 1.0, 2]},
        {"agreement": [1.0, float("inf"), 2]},
        {"agreement": [1.0, 1.0, -2]},
        {"agreement": [1.0, 1.0]},
        {"median": float("nan")},
        {"median": -1.0},
        {"accepted": [[1, 1, 1, 1, 1 << 60]]},
        {"accepted": [[1, 1, 1, 1]]},
        {"params": float("inf")},
        {"arrays": [["<f4", [1 << 60]]]},
        {"arrays": [["<f4", [-2]]]},
        {"arrays": [["|O", [2, 3]]]},
        {"arrays": [[["<f4"], [2, 3]]]},
        {"arrays": 7},
        {"goes_on": True},
        {"ranges": [[0, 1 << 80]]},
        {"ranges": [[8, 4]]},
        {"ranges": [[0, 8], [4, 12]]},
        {"ranges": 7},
    ],
)
def test_a_snapshot_with_numbers_out_of_range_is_a_message_error(changes: dict[str, Any]) -> None:
    with pytest.raises(gw.MessageError, match="header cannot be read"):
        Snapshot.from_header(payload(header(**changes)), check)


@pytest.mark.parametrize(
    "arrays", [[["<f4", [1 << 40]]], [["<f4", [0]]] * 100_000, [], [["<f8", [2, 3]]]]
)
def test_a_snapshot_of_another_layout_is_refused_before_it_takes_memory(
    arrays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = header(arrays=arrays)
    monkeypatch.setattr(np, "zeros", None)
    with pytest.raises(Mismatch):
        Snapshot.from_header(payload(text), check)


def test_a_snapshot_nested_too_deeply_is_a_message_error() -> None:
    with pytest.raises(gw.MessageError, match="header cannot be read"):
        Snapshot.from_header(payload(DEEP), check)


class Answers:
    """A newcomer that has asked some members, and what they answer."""

    def __init__(self, *donors: int, step: int | None = None) -> None:
        self.runs = [NodeRun(donor, 1) for donor in donors]
        self.asked: list[int] = []
        self.recipient = Recipient(self.send, str, NodeRun(9, 1))
        self.ask(step=step)

    def send(self, _: Kind, number: int, payload: bytes, donor: NodeRun) -> None:
        self.asked.append(donor.id)
        assert number == self.recipient.requests
        assert Request.decode(memoryview(payload)).encode() == payload

    def ask(self, *, step: int | None = None, goes_on: bool = False) -> None:
        self.asked.clear()
        layout = [["float32", [2, 3]]]
        self.recipient.request(self.runs, {}, layout, step=step, goes_on=goes_on)

    def add(self, place: int, content: str | NDArray[Any]) -> None:
        data = content.encode() if isinstance(content, str) else content.tobytes()
        self.recipient.add_part(self.runs[place], self.recipient.requests, memoryview(data))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_snapshot_with_values_that_are_not_finite_is_not_taken(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(1)
    answers.add(0, header())
    answers.add(0, np.full(6, value, np.float32))
    assert answers.recipient.take() is None
    assert not answers.recipient.is_asked
    assert answers.recipient.resumable is None
    assert "not finite" in caplog.text


@pytest.mark.parametrize(
    "contents",
    [
        [(0, header(ranges=[[0, 28]]))],
        [(0, header(ranges=[[0, 12]])), (1, header(ranges=[[8, 24]]))],
        [(0, header()), (0, np.zeros(7, np.float32))],
    ],
    ids=["beyond the end", "twice", "too long"],
)
def test_values_that_were_not_asked_for_are_not_taken(
    contents: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "WHOLE_BYTES", 1)
    monkeypatch.setattr(shares, "WHOLE_BYTES", 1)
    answers = Answers(1, 2, step=5)
    for place, content in contents:
        answers.add(place, content)
    assert answers.recipient.take() is None
    assert not answers.recipient.is_asked
    assert "this node asks another member" in caplog.text
    answers.ask(step=6)
    assert len(answers.asked) == 1  # or the same member would spoil every answer


@pytest.mark.parametrize(("after_s", "is_dropped"), [(5.0, False), (100.0, True)])
def test_the_fastest_donor_is_asked_for_what_a_slow_one_has_not_sent(
    after_s: float, is_dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(snapshot_module, "WHOLE_BYTES", 1)
    monkeypatch.setattr(shares, "WHOLE_BYTES", 1)
    monkeypatch.setattr(shares, "_ALIGNMENT_BYTES", 4)
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    answers = Answers(1, 2, 3, step=5)
    for place in range(3):
        answers.add(place, header(ranges=[[8 * place, 8 * place + 8]]))
    answers.add(2, np.full(1, 6, np.float32))
    now_s = 1.0
    answers.add(1, np.full(2, 5, np.float32))
    now_s = 4.0
    answers.add(2, np.full(1, 6, np.float32))
    now_s = after_s
    assert answers.recipient.take() is None
    assert answers.recipient.is_asked != is_dropped
    assert answers.recipient.missing == [(0, 8)]
    if is_dropped:
        answers.ask(goes_on=True)
        assert answers.asked == [2]


# ---- memory -----------------------------------------------------------------------------------------------------


def test_notes_for_far_steps_are_refused() -> None:
    stream = UpdateStream(10, keeps=3)
    stream.add_note(10, Note(), payload("{}"))
    with pytest.raises(gw.MessageError, match="where 10 is next"):
        stream.add_note(11 + STEPS_AHEAD_MAX, Note(), payload("{}"))


def test_notes_without_updates_are_bounded() -> None:
    stream = UpdateStream(None, keeps=3)

    def flood() -> None:
        for step in range(10 * STEPS_AHEAD_MAX):
            stream.add_note(7 * step, Note(), payload("{}"))

    with pytest.raises(gw.MessageError, match="without their updates"):
        flood()
    assert len(stream.notes) <= STEPS_AHEAD_MAX + 4


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_dense_message_with_values_that_are_not_finite_is_a_message_error(value: float) -> None:
    values = np.ones(8, np.float32)
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        share = gw.Exchange(gw.Encoder(8, threshold=1.0), node, min_peers=0)
        parse = share._replica.parse
        [message] = parse(NodeRun(1, 1), 0, memoryview(reference.encode_dense(values)))
        assert message.kind == "dense"
        values[3] = value
        with pytest.raises(gw.MessageError, match="not finite"):
            parse(NodeRun(1, 1), 0, memoryview(reference.encode_dense(values)))


# ---- updates ----------------------------------------------------------------------------------------------------


def of_another_size(_: bytes) -> list[bytes]:
    other = gw.Encoder(NUMEL + 1, THRESHOLD).encode(np.ones(NUMEL + 1, np.float32))
    return [bytes(other)]


def damaged(payload: bytes) -> list[bytes]:
    return [payload[:-1] + bytes([payload[-1] ^ 1])]


def doubled(payload: bytes) -> list[bytes]:
    return [payload, payload]


def not_finite(_: bytes) -> list[bytes]:
    return [reference.encode_dense(np.full(NUMEL, np.nan, np.float32))]


def of_the_other_way(payload: bytes) -> list[bytes]:
    if payload[:4] == MESSAGE_MAGIC:
        return [b"".join(PartUpdate([], NodeRun(3, 1), 0, 1, 0).pieces()) + payload]
    return [bytes(gw.Encoder(NUMEL, THRESHOLD).encode(np.ones(NUMEL, np.float32)))]


WAYS: dict[str, dict[str, Any]] = {
    "mesh": {},
    "sharded": {"topology": "sharded"},
    "async": {"mode": "async"},
}


def lie_from(node: FakeNode, step: int, lie: Any) -> None:
    """Let a node publish other bytes than its update, or its parts of it, from a step on."""
    publish = node.publish

    def publish_lies(buffer: Any, tag: int = 0, to: Any = None) -> Any:
        kind, number = divmod(tag, TAG_NUMBERS)
        if kind not in (Kind.UPDATE, Kind.PART) or number < step:
            return publish(buffer, tag=tag, to=to)
        return [publish(lies, tag=tag, to=to) for lies in lie(bytes(buffer))][-1]

    node.publish = publish_lies  # type: ignore[method-assign]


def run_without(liar: Trainer, world: Cluster, honest: list[Trainer]) -> None:
    """Let the honest members finish; the other one may be told that it is excluded."""
    try:
        world.run(until=lambda: all(trainer.worker.is_done for trainer in honest))
    except Mismatch as error:
        assert "takes no more messages of this node" in str(error)  # noqa: PT017
        assert liar.worker.error is error  # noqa: PT017
        world.kill(liar.node)
        world.run()


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lie", [of_another_size, damaged, doubled, not_finite, of_the_other_way])
def test_the_others_go_on_without_a_member_whose_updates_cannot_be_used(
    lie: Any, way: str, seed: int
) -> None:
    if (lie, way) == (doubled, "sharded"):
        pytest.skip("a part that comes twice replaces the first")
    with cluster(seed) as world:
        honest = [Trainer(world, node_id, 20, **WAYS[way]) for node_id in (1, 2)]
        liar = Trainer(world, 3, 20, timeout_s=60.0, **WAYS[way])
        lie_from(liar.node, 5, lie)
        run_without(liar, world, honest)
        for trainer in honest:
            assert 3 in [peer.id for result in trainer.results for peer in result.lost]
            assert trainer.share.next_step == 20
        if way != "async":
            assert_identical(honest)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lie", [damaged, of_the_other_way])
def test_a_newcomer_goes_by_the_others_where_a_member_s_updates_cannot_be_used(
    lie: Any, way: str, seed: int
) -> None:
    with cluster(seed) as world:
        honest = [Trainer(world, node_id, 40, min_peers=2, **WAYS[way]) for node_id in (1, 2)]
        liar = Trainer(world, 3, 40, min_peers=2, timeout_s=1_000.0, **WAYS[way])
        world.run(until=lambda: len(honest[0].results) > 3)
        honest.append(Trainer(world, 4, 40, min_peers=1, **WAYS[way]))
        lie_from(liar.node, liar.share.next_step + world.random.randint(0, 4), lie)
        if way == "async":  # which has no common step that all could finish
            world.run(until=lambda: honest[2].joined is not None)
            return
        run_without(liar, world, honest)
    assert_identical(honest)


def test_updates_far_ahead_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    def flood(node: FakeNode) -> None:
        share = gw.Exchange(
            gw.Encoder(NUMEL, THRESHOLD), node, reduction="sum", topology="mesh", digest_s=0.0
        )
        params = np.zeros(NUMEL, np.float32)
        share.step(update(3, 0), params)
        payload = bytes(gw.Encoder(NUMEL, THRESHOLD).encode(update(3, 1)))
        for step in range(share.next_step, 1_000):
            node.publish(payload, tag=step)
        node.cluster.compute(node, 100.0)

    with cluster(1) as world:
        honest = [Trainer(world, node_id, 20) for node_id in (1, 2)]
        node = world.node(3)
        world.start(node, lambda: flood(node))
        world.run(until=lambda: all(trainer.worker.is_done for trainer in honest))
    assert_identical(honest)
    for trainer in honest:
        assert [peer.id for result in trainer.results for peer in result.lost] == [3]
    assert "6 updates are ahead of this node" in caplog.text


def test_a_part_for_another_number_of_owners_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Its sender counts other members for a moment."""
    with cluster(4) as world:
        trainers = [
            Trainer(world, node_id, 30, min_peers=2, topology="sharded") for node_id in (10, 20, 30)
        ]
        owner, sender, _ = trainers
        world.run(until=lambda: len(owner.results) > 3)
        node = sender.node
        messages = [
            gw.Encoder(part.numel, THRESHOLD).encode(np.zeros(part.numel, np.float32))
            for _, part in Division(sender.share._groups).part(2, 0)
        ]
        for step in range(5, 8):
            part = PartUpdate(messages, run_of(node.peer), step, 2, 0)
            node.publish(b"".join(part.pieces()), tag=tag_of(Kind.PART, step), to=owner.node.peer)
        world.run()
    assert_identical(trainers)
    assert "node with id 20 sent part 0 of 2, this node owns part 0 of 3" in caplog.text


def test_parts_for_later_steps_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(1) as world:
        trainers = [
            Trainer(world, node_id, 20, min_peers=2, topology="sharded", timeout_s=60.0)
            for node_id in (10, 20, 30)
        ]
        owner, sender, _ = trainers
        world.run(until=lambda: len(owner.results) > 3)
        messages = [
            gw.Encoder(part.numel, THRESHOLD).encode(np.zeros(part.numel, np.float32))
            for _, part in Division(sender.share._groups).part(3, 0)
        ]
        for step in range(1_000, 1_100):
            part = PartUpdate(messages, run_of(sender.node.peer), step, 3, 0)
            sender.node.publish(
                b"".join(part.pieces()), tag=tag_of(Kind.PART, step), to=owner.node.peer
            )
        run_without(sender, world, [owner, trainers[2]])
    assert_identical([owner, trainers[2]])
    assert "parts wait for results of later steps" in caplog.text


def test_a_signature_of_pairs_is_no_introduction() -> None:
    text = Hello({}, Phase.IN, 5, (), 6, 7, NodeRun(1, 1)).encode().decode()
    changed = text.replace('"signature":{}', '"signature":[["versions",[15,1]],[1,2]]')
    assert changed != text
    with pytest.raises(gw.MessageError, match="no object"):
        Hello.decode(payload(changed))


@pytest.mark.parametrize("header", [b"", bytes(8), bytes(7) + b"\1"])
def test_an_update_that_is_divided_by_no_nodes_or_too_many_is_refused(header: bytes) -> None:
    with pytest.raises(gw.MessageError, match=r"divided by \d+ nodes"):
        CountedUpdate.parse(memoryview(header))


def test_notes_for_the_same_step_take_no_more_memory_than_one() -> None:
    stream = UpdateStream(0, keeps=3)
    for number in range(100):
        note = Note(comparison=number)
        stream.add_note(0, note, memoryview(note.encode()))
    encoder = gw.Encoder(NUMEL, THRESHOLD)
    message = encoder.encode(update(1, 0))
    stream.add_update([message], memoryview(bytes(message)))
    assert [tag for tag, _ in stream.raw(0, 1)] == [tag_of(Kind.NOTE, 0), 0]
    assert stream.notes[0].comparison == 99


def test_parts_before_the_start_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Their sender is no member, and ends nobody's start."""

    def flood(node: FakeNode, receiver: FakeNode) -> None:
        share = gw.Exchange(gw.Encoder(NUMEL, 1.0), node, topology="sharded", min_peers=5)
        messages = [
            gw.Encoder(part.numel, 1.0).encode(np.zeros(part.numel, np.float32))
            for _, part in Division(share._groups).part(1, 0)
        ]
        node.cluster.compute(node, 0.5)
        for step in range(40):
            part = PartUpdate(messages, run_of(node.peer), step, 1, 0)
            tag = tag_of(Kind.PART, step)
            node.publish(b"".join(part.pieces()), tag=tag, to=receiver.peer)
        node.cluster.compute(node, 100.0)

    with cluster(1) as world:
        first, second, liar = (world.node(number) for number in (1, 2, 3))
        workers = []
        for node, after_s in ((first, 0.0), (second, 5.0)):
            share = gw.Exchange(
                gw.Encoder(NUMEL, 1.0), node, topology="sharded", min_peers=1, timeout_s=20.0
            )

            def train(node: FakeNode, share: gw.Exchange, after_s: float) -> NDArray[np.float32]:
                world.compute(node, after_s)
                params = np.zeros(NUMEL, np.float32)
                share.join(params)
                for _ in range(3):
                    share.step(np.ones(NUMEL, np.float32), params)
                return params

            workers.append(world.start(node, lambda args=(node, share, after_s): train(*args)))
        world.start(liar, lambda: flood(liar, first))
        world.run(until=lambda: all(worker.is_done for worker in workers))
    for worker in workers:
        np.testing.assert_array_equal(worker.result, np.full(NUMEL, 3.0, np.float32))
    assert "16 parts wait for results of later steps" in caplog.text


def test_parts_of_any_number_of_owners_take_no_more_memory_than_those_of_a_few() -> None:
    division = Division(gw.Groups([gw.exchange.Group(gw.Encoder(NUMEL, 1.0))]))
    for parts in range(1, 100):
        for place in range(parts + 1):
            assert division.part(parts, place) == division.part(parts, place)
    assert len(division._parts) <= 4 * 100


def test_initial_parameters_that_are_not_finite_are_refused_at_once() -> None:
    """Nobody else has other ones, so they would travel again and again."""

    def join(node: FakeNode, rank: int) -> None:
        params = np.zeros(NUMEL, np.float32)
        params[3] = np.nan if rank == 0 else 0.0
        share = gw.Exchange(gw.Encoder(NUMEL, 1.0), node, min_peers=1, timeout_s=20.0)
        expected = TimeoutError if rank == 0 else Mismatch
        with pytest.raises(expected, match=r"127.0.0.1:1010" if rank else r".") as raised:
            share.join(params, equalize=True)
        if rank == 1:
            assert "1 values that are not finite" in str(raised.value)
            assert node.cluster.now_s < 2.0

    run_cluster(join, count=2, seed=1)


def test_a_newcomer_does_not_ask_for_ever_for_parameters_that_are_not_finite() -> None:
    def exchange(node: FakeNode) -> gw.Exchange:
        return gw.Exchange(gw.Encoder(NUMEL, 1.0), node, min_peers=0, timeout_s=20.0)

    def train(node: FakeNode) -> None:
        params = np.full(NUMEL, -np.inf, np.float32)
        share = exchange(node)
        while True:
            share.step(np.zeros(NUMEL, np.float32), params)
            node.cluster.compute(node, 0.1)

    def join(node: FakeNode) -> None:
        with pytest.raises(Mismatch, match="3 snapshots in a row had values that are not finite"):
            exchange(node).join(np.zeros(NUMEL, np.float32))

    with cluster(1) as world:
        member = world.node(1)
        world.start(member, lambda: train(member))
        world.run(until=lambda: world.now_s > 1.0)
        newcomer = world.node(2)
        worker = world.start(newcomer, lambda: join(newcomer))
        world.run(until=lambda: worker.is_done)
        assert world.now_s < 5.0
