"""Messages in slices: complete and in order, or not at all."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import pytest

from gradwire.errors import MessageError, NotConnected, WouldBlock
from gradwire.slices import INCOMPLETE_MAX, Assembler, Outgoing, Slicer, tag_of_slice

TAG = 77


class Wire:
    """A node that takes so many messages, of at most 100 bytes."""

    def __init__(self, space: int = 1_000) -> None:
        self.space = space
        self.sent: list[tuple[int, memoryview]] = []
        self.is_connected = True

    def publish(self, buffer: Any, *, tag: int, to: Any) -> Any:  # noqa: ARG002  (of the interface)
        assert len(bytes(buffer)) <= 100
        if not self.is_connected:
            raise NotConnected("gone")
        if not self.space:
            raise WouldBlock("full")
        self.space -= 1
        self.sent.append((tag, memoryview(bytes(buffer))))
        return len(self.sent)


def slicer(wire: Wire) -> Slicer:
    return Slicer(wire, TAG, lambda receiver: receiver, lambda _: 100)  # type: ignore[arg-type]


def message(nbytes: int) -> bytes:
    return bytes(index % 251 for index in range(nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_a_small_message_goes_as_it_is(nbytes: int) -> None:
    wire = Wire()
    slicer(wire).send(Outgoing(5, message(nbytes)))
    assert wire.sent == [(5, memoryview(message(nbytes)))]


@pytest.mark.parametrize("cuts", [[0], [7, 100], [0, 0, 60, 153, 600]], ids=str)
@pytest.mark.parametrize("nbytes", [100, 101, 153, 700])
def test_a_message_in_pieces_arrives_whole(nbytes: int, cuts: list[int]) -> None:
    whole, wire, assembler = message(nbytes), Wire(), Assembler(nbytes)
    places = sorted(min(cut, nbytes) for cut in (0, *cuts, nbytes))
    pieces = [whole[begin:end] for begin, end in pairwise(places)]
    slicer(wire).send(Outgoing(5, pieces))
    if nbytes <= 100:
        assert wire.sent == [(5, memoryview(whole))]
    else:
        assert [assembler.add("node", 0, payload) for _, payload in wire.sent][-1] == whole


@pytest.mark.parametrize("nbytes", [101, 152, 153, 10_000])
def test_a_large_message_arrives_whole(nbytes: int) -> None:
    wire, assembler = Wire(), Assembler(nbytes)
    ticket = slicer(wire).send(Outgoing(5, message(nbytes)))
    assert ticket == len(wire.sent)
    received = [assembler.add("node", 0, payload) for _, payload in wire.sent]
    assert received[:-1] == [None] * (len(received) - 1)
    assert received[-1] == message(nbytes)
    assert {tag_of_slice(payload) for _, payload in wire.sent} == {5}
    assert not assembler.assemblies


def test_without_space_a_message_goes_on_where_it_stopped() -> None:
    wire, assembler = Wire(space=2), Assembler(1_000)
    sender, queue = slicer(wire), deque([Outgoing(5, message(400)), Outgoing(6, b"next")])
    assert not sender.send_all(queue)
    wire.space = 1
    assert not sender.send_all(queue)
    assert sender.slices == 3
    wire.space = 100
    assert sender.send_all(queue)
    *slices, (tag, payload) = wire.sent
    assert (tag, bytes(payload)) == (6, b"next")
    assert [assembler.add("node", 0, one) for _, one in slices][-1] == message(400)


def test_messages_to_nodes_that_are_gone_are_dropped() -> None:
    wire = Wire()
    wire.is_connected = False
    queue = deque([Outgoing(5, message(400), "gone")])
    assert slicer(wire).send_all(queue)
    assert not queue


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_a_message_that_lacks_a_slice_counts_for_nothing(lost: int) -> None:
    wire, assembler = Wire(), Assembler(1_000)
    slicer(wire).send(Outgoing(5, message(400)))
    del wire.sent[lost]
    assert [assembler.add("node", 0, payload) for _, payload in wire.sent].count(None) == 5
    # The next message is not disturbed by it.
    wire.sent.clear()
    slicer(wire).send(Outgoing(6, message(300)))
    assert [assembler.add("node", 0, one) for _, one in wire.sent][-1] == message(300)


def test_messages_of_several_senders_and_kinds_may_be_interleaved() -> None:
    assembler = Assembler(1_000)
    wires = [Wire(), Wire(), Wire()]
    for wire in wires:
        slicer(wire).send(Outgoing(5, message(400)))
    keys = [("one", 0), ("one", 1), ("other", 0)]
    for at in range(len(wires[0].sent)):
        received = [
            assembler.add(*key, wire.sent[at][1]) for key, wire in zip(keys, wires, strict=True)
        ]
    assert received == [message(400)] * 3


def test_what_gone_nodes_have_sent_is_forgotten() -> None:
    wire, assembler = Wire(), Assembler(1_000)
    slicer(wire).send(Outgoing(5, message(400)))
    for sender in ("stays", "gone"):
        assembler.add(sender, 0, wire.sent[0][1])
    assembler.keep_only(["stays"])
    assert list(assembler.assemblies) == [("stays", 0)]


def test_bytes_that_are_no_slice_are_refused() -> None:
    wire, assembler = Wire(), Assembler(399)
    slicer(wire).send(Outgoing(5, message(400)))
    first = bytes(wire.sent[0][1])
    with pytest.raises(MessageError, match="message of 400 bytes, where none has more than 399"):
        assembler.add("node", 0, memoryview(first))
    for wrong in (b"", first[:23], first[:24], first[:8] + bytes(8) + first[16:]):
        with pytest.raises(MessageError, match="slice of"):
            assembler.add("node", 0, memoryview(wrong))
    assert not assembler.assemblies


def test_the_memory_of_incomplete_messages_of_a_sender_is_bounded() -> None:
    assembler = Assembler(1_000)

    def begin(sender: str, kind: int) -> None:
        wire = Wire(space=1)
        with pytest.raises(WouldBlock):
            slicer(wire).send(Outgoing(kind, message(500)))
        assembler.add(sender, kind, wire.sent[0][1])

    for kind in range(INCOMPLETE_MAX):
        begin("a", kind)
        begin("a", kind)  # instead of the one before
    with pytest.raises(MessageError, match="8 incomplete messages, and one more"):
        begin("a", INCOMPLETE_MAX)
    begin("b", INCOMPLETE_MAX)
    assert len(assembler.assemblies) == INCOMPLETE_MAX + 1
