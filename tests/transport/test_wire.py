"""Datagram headers and control frames: every frame survives the wire, and no bytes raise anything but WireError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.transport import wire

RECORD = st.integers(0, wire.RECORD_NUMBER_MAX)
BYTE = st.integers(0, 255)
WORD = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)
FRAGMENTS = st.integers(0, 2**wire.FRAGMENTS_MAX - 1)


@st.composite
def acks(draw: st.DrawFn) -> wire.Ack:
    cumulative = draw(st.integers(0, wire.RECORD_NUMBER_MAX - 70_000))
    deltas = draw(st.lists(st.integers(0, 65_535), max_size=wire.ACK_PARTIALS_MAX, unique=True))
    return wire.Ack(
        cumulative,
        draw(RECORD),
        draw(WORD),
        draw(st.integers(0, 2**wire.ACK_WINDOW_RECORDS - 1)),
        tuple((cumulative + delta, draw(FRAGMENTS)) for delta in sorted(deltas)),
        draw(st.integers(0, 65_535)),
        bool(deltas) and draw(st.booleans()),
    )


frames = st.one_of(
    acks(),
    st.builds(wire.Ping, LONG),
    st.builds(wire.Pong, LONG),
    st.builds(
        wire.Key,
        BYTE,
        WORD,
        RECORD,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=12, max_size=12),
    ),
    st.builds(wire.KeyAck, BYTE),
    st.builds(wire.Skip, st.integers(0, 2**40), st.integers(1, 2**40)),
    st.builds(wire.Close, BYTE),
    st.just(wire.CloseAck()),
    st.builds(wire.Members, st.lists(st.just("10.0.0.1:40123"), max_size=32).map(tuple)),
    st.just(wire.Poison()),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(frames, max_size=4))
def test_every_frame_survives_encoding(sent: list[wire.Frame]) -> None:
    assert wire.decode_frames(b"".join(map(wire.encode_frame, sent))) == sent


@given(st.lists(frames, max_size=2), st.integers(1, 9_000))
def test_padding_fills_the_rest_of_a_datagram(sent: list[wire.Frame], nbytes: int) -> None:
    encoded = b"".join(map(wire.encode_frame, [*sent, wire.Padding(nbytes)]))
    assert len(encoded) == sum(len(wire.encode_frame(frame)) for frame in sent) + nbytes
    assert wire.decode_frames(encoded) == [*sent, wire.Padding(nbytes)]


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_parse_or_raise_wire_error(data: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode_frames(data)


@settings(deadline=None, max_examples=300)
@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_mutated_frames_parse_or_raise_wire_error(
    sent: list[wire.Frame], data: st.DataObject
) -> None:
    encoded = bytearray(b"".join(map(wire.encode_frame, sent)))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    with contextlib.suppress(wire.WireError):
        wire.decode_frames(bytes(encoded[:cut]))


@pytest.mark.parametrize(
    "broken",
    [
        bytes([0]),
        bytes([99]),
        wire.encode_frame(wire.Ping(1))[:-1],
        wire.encode_frame(wire.Skip(0, 1))[:-8] + bytes(8),
        wire.encode_frame(wire.Ack(0, 0))[:-3] + bytes([129, 0, 0]),
        wire.encode_frame(wire.Ack(0, 0, 0, 1 << 900))[:-1],
        wire.encode_frame(wire.Ack(0, 0, 0, 0, ((3, 1 << 90),)))[:-1],
        wire.encode_frame(wire.Ack(0, 0, 0, 0, ((3, 1 << 256),))),
        bytes([9, 33]),
        bytes([9, 1, 5]) + b"ab",
        wire.encode_frame(wire.Padding(3)) + wire.encode_frame(wire.Ping(1)),
    ],
)
def test_a_broken_frame_is_refused(broken: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_frames(broken)


def test_record_numbers_have_48_bits() -> None:
    with pytest.raises(wire.WireError, match="48 bits"):
        wire.decode_frames(wire.encode_frame(wire.Ack(0, wire.RECORD_NUMBER_MAX + 1)))


def test_the_largest_acknowledgement_fits_one_control_datagram() -> None:
    bare = wire.Ack(0, 0, 0, 2**wire.ACK_WINDOW_RECORDS - 1)
    partials_bytes = wire.CONTROL_PLAINTEXT_MAX - len(wire.encode_frame(bare))
    assert partials_bytes >= wire.ACK_PARTIAL_BYTES_MAX
    one = bare._replace(partials=((9, 2**180 - 1),))
    assert len(wire.encode_frame(one)) - len(wire.encode_frame(bare)) == wire.partial_bytes(
        2**180 - 1
    )


@given(LONG, LONG, WORD, st.text("0123456789.:", max_size=wire.ADVERTISE_BYTES_MAX))
def test_an_introduction_survives_encoding(
    node_id: int, incarnation: int, session: int, advertise: str
) -> None:
    sent = wire.Introduction(node_id, incarnation, session, advertise)
    assert wire.Introduction.decode(sent.encode(192)) == sent


@given(st.binary(max_size=100))
def test_arbitrary_introductions_parse_or_raise_wire_error(data: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.Introduction.decode(data)


def test_an_answer_to_a_handshake_is_never_larger_than_the_question() -> None:
    longest = wire.Introduction(1, 2, 3, "x" * wire.ADVERTISE_BYTES_MAX).encode()
    response = wire.HEADER_BYTES + 32 + len(longest) + wire.TAG_BYTES + wire.MARK_BYTES
    assert response <= wire.INIT_BYTES
