"""Datagram headers and control frames: every frame survives encoding, and no bytes raise anything but WireError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.transport import wire
from gradwire.transport.endpoint import MEMBERS_PER_FRAME

RECORD = st.integers(0, wire.RECORD_NUMBER_MAX)
BYTE = st.integers(0, 255)
WORD = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)
FRAGMENTS = st.integers(0, 2**wire.FRAGMENTS_MAX - 1)
ADVERTISED_BYTES_MAX = 64  # an IPv6 address with scope and port


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
        bool(deltas) and draw(st.booleans()),
        draw(st.booleans()),
    )


frames = st.one_of(
    acks(),
    st.builds(wire.Ping, LONG),
    st.builds(wire.Pong, LONG),
    st.builds(
        wire.Key,
        WORD,
        RECORD,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=12, max_size=12),
    ),
    st.just(wire.KeyAck()),
    st.builds(wire.Skip, st.integers(0, 2**40), st.integers(1, 2**40)),
    st.builds(wire.Close, BYTE),
    st.just(wire.CloseAck()),
    st.builds(wire.Members, st.lists(st.just("10.0.0.1:40123"), max_size=32).map(tuple)),
)


@settings(max_examples=200)
@given(st.lists(frames, max_size=4))
def test_every_frame_survives_encoding(sent: list[wire.Frame]) -> None:
    assert wire.decode_frames(b"".join(map(wire.encode_frame, sent))) == sent


@settings(max_examples=300)
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
        wire.encode_frame(wire.Key(1, 2, bytes(16), bytes(12)))[:-1],
        wire.encode_frame(wire.Skip(0, 1))[:-8] + bytes(8),
        wire.encode_frame(wire.Skip(wire.RECORD_NUMBER_MAX, 1)),
        wire.encode_frame(wire.Ack(0, 0))[:-3] + bytes([129, 0, 0]),
        wire.encode_frame(wire.Ack(0, 0))[:-3] + bytes([0, 91, 0]),
        wire.encode_frame(wire.Ack(0, 0))[:-1] + bytes([1]),
        wire.encode_frame(wire.Ack(0, 0))[:-1] + bytes([3]),
        wire.encode_frame(wire.Ack(0, 0))[:-1] + bytes([4]),
        wire.encode_frame(wire.Ack(0, 0, 0, 1 << 900))[:-1],
        wire.encode_frame(wire.Ack(0, 0, 0, 0, ((3, 1 << 60),)))[:-1],
        wire.encode_frame(wire.Ack(0, 0, 0, 0, ((3, 1 << wire.FRAGMENTS_MAX),))),
        bytes([9, 33]),
        bytes([9, 1, 5]) + b"ab",
    ],
)
def test_a_broken_frame_is_refused(broken: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_frames(broken)


def test_record_numbers_have_48_bits() -> None:
    with pytest.raises(wire.WireError, match="48 bits"):
        wire.decode_frames(wire.encode_frame(wire.Ack(0, wire.RECORD_NUMBER_MAX + 1)))


def test_the_largest_acknowledgement_fits_one_control_datagram() -> None:
    fragments = 2**wire.FRAGMENTS_MAX - 1
    partials = tuple((number, fragments) for number in range(wire.ACK_PARTIALS_MAX))
    largest = wire.Ack(0, 0, 0, 2**wire.ACK_WINDOW_RECORDS - 1, partials, True, True)
    assert wire.decode_frames(wire.encode_frame(largest)) == [largest]
    assert len(wire.encode_frame(largest)) <= wire.CONTROL_PLAINTEXT_MAX


@pytest.mark.parametrize("datagram_bytes", [wire.DATAGRAM_BYTES_MIN, 1_200, 1_472, 8_972, 9_016])
def test_one_system_call_can_send_a_full_record(datagram_bytes: int) -> None:
    fragments = wire.fragments_per_record(datagram_bytes)
    assert 1 <= fragments <= wire.FRAGMENTS_MAX
    assert fragments * datagram_bytes <= wire.RECORD_BYTES_MAX
    assert fragments * (datagram_bytes + wire.TAG_BYTES) <= 65_507


@given(LONG, LONG, WORD, st.text("0123456789.:", max_size=ADVERTISED_BYTES_MAX))
def test_an_introduction_survives_encoding(
    node_id: int, incarnation: int, session: int, advertise: str
) -> None:
    sent = wire.Introduction(node_id, incarnation, session, advertise)
    assert wire.Introduction.decode(sent.encode(192)) == sent


def test_an_answer_to_a_handshake_is_never_larger_than_the_question() -> None:
    longest = wire.Introduction(1, 2, 3, "x" * ADVERTISED_BYTES_MAX).encode()
    response = wire.HEADER_BYTES + 32 + len(longest) + wire.TAG_BYTES + wire.MAC1_BYTES
    assert response <= wire.INIT_BYTES


@given(
    st.integers(0, 63),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(17, 60),
    st.sampled_from(((wire.DATA, 0, 8), (wire.TAGGED, 0, 7), (wire.DATA, 1, 7))),
)
def test_a_run_of_neighbouring_fragments_ends_with_the_record(
    first: int, count: int, others: int, segment_bytes: int, other: tuple[int, int, int]
) -> None:
    """The datagram after the run is of another record, of another kind, or of another place in the record."""

    def datagram(kind: int, fragment: int, number: int) -> bytes:
        header = wire.HEADER.pack(kind, 0, fragment & 255, 64, 9, 1_184 << 48 | number)
        return header.ljust(segment_bytes, b"x")

    kind, shift, number = other
    end = first + count + shift
    batch = b"".join(datagram(wire.DATA, first + index, 7) for index in range(count))
    batch += b"".join(datagram(kind, end + index, number) for index in range(others))
    most = count + others
    assert wire.run_length(memoryview(batch), 0, segment_bytes, first, most) == count


def test_a_frame_of_too_many_members_is_refused() -> None:
    frame = bytes([9, 33]) + 33 * b"\1x"
    with pytest.raises(wire.WireError, match="33 members in one frame, at most 32"):
        wire.decode_frames(frame)


def test_a_frame_of_members_with_the_longest_addresses_fits_a_datagram() -> None:
    longest = wire.Members(("x" * ADVERTISED_BYTES_MAX,) * MEMBERS_PER_FRAME)
    assert len(wire.encode_frame(longest)) <= wire.CONTROL_PLAINTEXT_MAX
